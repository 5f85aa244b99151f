"""Why something is as it is: the closed sets that a broker decides with, and that operators and programs read.

A member's value is the sentence that is sent and shown. Each set has a member for "nothing of this" with the value ""
where there may be nothing, and UNKNOWN: what a client makes of a sentence that a later version of a server says.
Guarding test: tests/proto/test_states.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from . import subscription_types


class _Words(StrEnum):
    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls("unknown")

    @classmethod
    def reasons(cls) -> Iterator[Self]:
        """The members that a server says."""
        return (each for each in cls if each not in ("", "unknown"))


if TYPE_CHECKING:

    class SubscriptionType(_Words):
        """How the consumers of a subscription share its messages. NONE: no consumer has connected yet."""

        NONE = ""
        EXCLUSIVE = "EXCLUSIVE"
        SHARED = "SHARED"
        FAILOVER = "FAILOVER"
        KEY_SHARED = "KEY_SHARED"
        UNKNOWN = "unknown"
else:
    SubscriptionType = _Words(
        "SubscriptionType", {"NONE": "", **{name: name for name in subscription_types.NUMBERS}, "UNKNOWN": "unknown"}
    )
    SubscriptionType.__doc__ = "How the consumers of a subscription share its messages. NONE: none has connected yet."


class KeyDistribution(_Words):
    """How a Key_Shared subscription divides the keys. NONE: it is of another type, or has no consumer."""

    NONE = ""
    AUTO_SPLIT = "AUTO_SPLIT"
    STICKY = "STICKY"
    UNKNOWN = "unknown"


class Blocked(_Words):
    """The reason why no consumer of a subscription gets the next message. NO: one does."""

    NO = ""
    NO_CONSUMER = "no consumer is connected"
    NO_PERMITS = "no consumer has permits left"
    SLOW_CONSUMER = "the consumers with permits do not read what was sent to them"
    TOO_MANY_UNACKED = "the consumers hold as many unacknowledged messages as they may"
    NOT_YET = "an earlier one comes first"
    FAILED = "a message that failed comes first: it waits for its back-off, or has not been acknowledged again"
    KEYS_BUSY = "the next messages wait for their keys' consumers"
    HOLES = "what is acknowledged out of order takes all the memory that it may; older messages have to be acknowledged"
    THROTTLED = "the dispatch rate of the subscription, the topic or the broker is reached"
    MOVING = "the subscription is moved, and the new place is not stored yet"
    FINDING_DELAYS = "the buckets of delayed messages are looked up"
    DELAYS = "delayed messages cannot be stored and take all the memory that they may"
    DELAYED = "what is left is to be delivered later"
    HELD = "what is left failed, and waits for its back-off or to be a dead letter"
    CAUGHT_UP = "everything was delivered"
    UNKNOWN = "unknown"


class BacklogQuotaState(_Words):
    """The reaction of a topic whose backlog is above its quota. NOT_REACHED: it is not above, or there is no quota."""

    NOT_REACHED = ""
    HOLD = "producers wait: the backlog quota is reached"
    REFUSE = "publishes are refused: the backlog quota is reached"
    EVICT = "the oldest messages are given up: the backlog quota is reached"
    UNKNOWN = "unknown"


class TopicState(_Words):
    """The state of a topic's log at its owner."""

    OPENING = "opening"
    SERVING = "serving"
    SWITCHING = "switching to the next ledger"
    TERMINATED = "terminated"
    CLOSING = "closing"
    CLOSED = "closed"
    LOST = "lost to another broker"
    UNKNOWN = "unknown"


class LedgerState(_Words):
    """The state of a ledger. OPEN: the topic's owner writes it."""

    OPEN = "open"
    CLOSED = "closed"
    UNKNOWN = "unknown"


class LedgerStays(_Words):
    """Why a ledger of a topic is not deleted: the first reason that holds, in this order. NO: the next trim deletes it.
    """

    NO = ""
    OPEN = "it is the last of the list, or it is written"
    NOT_ACKNOWLEDGED = "a durable subscription has not durably acknowledged all of it"
    NOT_IN_SNAPSHOT = "the snapshot of sequence ids that deduplication keeps does not cover it"
    TRANSACTION_OPEN = "a transaction with entries in it, or before it, is open"
    NOT_IN_OUTCOMES = "the stored outcomes of transactions do not cover it"
    NOT_COMPACTED = "compaction is on or running, and has not read all of it"
    NOT_SUBSCRIBED = "the topic has no durable subscription, and what it keeps until it has one is not reached"
    RETAINED_BY_TIME = "the retention time has not passed"
    RETAINED_BY_SIZE = "the retention size is not reached"
    UNKNOWN = "unknown"


class CompactionState(_Words):
    """The state of the last compaction of a topic: Pulsar's names."""

    NOT_RUN = "NOT_RUN"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    ERROR = "ERROR"
    UNKNOWN = "unknown"
