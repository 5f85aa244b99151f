"""States and reasons as closed sets, with which a broker decides, and which operators and programs read.

The value of a member is the text that is sent and shown. If a set has a member for "none", its value is "". Each set
has UNKNOWN: a client uses it for a text that only a later version of a server knows. Guarding test:
tests/proto/test_states.py.

Also in this file, each below its heading: the names of the subscription types (subscription_types); the values that the
broker's sessions use with every protocol (model); ids and states of transactions (transactions).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from . import wire_pb2 as wire
from .errors import InvalidRequest
from .names import (
    ERROR,
    ERROR_ATTEMPTS,
    ERROR_CONSUMER,
    ERROR_MESSAGE,
    ERROR_TRACEBACK,
    Position,
    choose_partition_of_key,
)

# -------------------------------------------------------------------------------------------- subscription_types
# The names of the subscription types. Each is derived from its line of `Subscribe.Type` in proto/wire.proto.
#
# | of KEY_SHARED | where |
# |---|---|
# | `KEY_SHARED` | the wire, statistics |
# | `Key_Shared` | `pulsar_type_name`: the policy `subscription_types`, messages to users |
# | `KeyShared` | `sdk_type_name`: the SDK |
# | `key_shared` | the command line |
#
# Which policy a type has: broker/subscription/core/subscription_types.py.


SUBSCRIPTION_TYPE_NUMBERS: dict[str, int] = dict(wire.Subscribe.Type.items())
"""The number of each subscription type on the wire, by its name."""


def pulsar_type_name(name: str) -> str:
    """Returns the name of a subscription type in Pulsar's spelling: `Key_Shared` for KEY_SHARED."""
    return name.title()


def sdk_type_name(name: str) -> str:
    """Returns the name of a subscription type in the SDK's spelling: `KeyShared` for KEY_SHARED."""
    return name.title().replace("_", "")


PULSAR_TYPE_NAMES = tuple(map(pulsar_type_name, SUBSCRIPTION_TYPE_NUMBERS))


# -------------------------------------------------------------------------------------------------------- states


class _Words(StrEnum):
    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls("unknown")

    @classmethod
    def reasons(cls) -> Iterator[Self]:
        """Yields the members that a server may report: all except the empty one and UNKNOWN."""
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
        "SubscriptionType", {"NONE": "", **{name: name for name in SUBSCRIPTION_TYPE_NUMBERS}, "UNKNOWN": "unknown"}
    )
    SubscriptionType.__doc__ = "How the consumers of a subscription share its messages. NONE: none has connected yet."


class KeyDistribution(_Words):
    """How a Key_Shared subscription distributes the keys among its consumers. NONE: the subscription has another type,
    or no consumer."""

    NONE = ""
    AUTO_SPLIT = "AUTO_SPLIT"
    STICKY = "STICKY"
    UNKNOWN = "unknown"


class Blocked(_Words):
    """The reason why no consumer of a subscription gets a message now. NO: there is no reason, and a consumer gets the
    next message."""

    NO = ""
    NO_CONSUMER = "no consumer is connected"
    NO_PERMITS = "no consumer has permits left"
    INACTIVE = "another consumer is the active one"
    SLOW_CONSUMER = "the consumers with permits do not read what was sent to them"
    TOO_MANY_UNACKED = "the consumers hold as many unacknowledged messages as they may"
    NOT_YET = "an earlier one comes first"
    FAILED = "a message that failed comes first: it waits for its back-off, or has not been acknowledged again"
    KEYS_BUSY = "the next messages wait for their keys' consumers"
    KEY_LIMITS = "the keys of the next messages have as many in flight, or as high a rate, as they may"
    HOLES = "what is acknowledged out of order takes all the memory that it may; older messages have to be acknowledged"
    THROTTLED = "the dispatch rate of the subscription, the topic or the broker is reached"
    MOVING = "the subscription is moved, and the new place is not stored yet"
    FINDING_DELAYS = "the buckets of delayed messages are looked up"
    DELAYS = "delayed messages cannot be stored and take all the memory that they may"
    DELAYED = "what is left is to be delivered later"
    HELD = "what is left failed, and waits for its back-off or to be a dead letter"
    OPEN_TRANSACTION = "what is left waits for an open transaction"
    CAUGHT_UP = "everything was delivered"
    UNKNOWN = "unknown"


class BacklogQuotaState(_Words):
    """What happens at a topic because its backlog has reached the quota, or because its namespace or tenant stores as
    many bytes as it may (STORAGE_…). NOT_REACHED: neither is so."""

    NOT_REACHED = ""
    HOLD = "producers wait: the backlog quota is reached"
    REFUSE = "publishes are refused: the backlog quota is reached"
    EVICT = "the oldest messages are given up: the backlog quota is reached"
    STORAGE_HOLD = "producers wait: the limit of stored bytes is reached"
    STORAGE_REFUSE = "publishes are refused: the limit of stored bytes is reached"
    UNKNOWN = "unknown"


class TopicState(_Words):
    """The state of a topic's log at the broker that owns the topic."""

    OPENING = "opening"
    SERVING = "serving"
    SWITCHING = "switching to the next ledger"
    TERMINATED = "terminated"
    CLOSING = "closing"
    CLOSED = "closed"
    LOST = "lost to another broker"
    UNKNOWN = "unknown"


class LedgerState(_Words):
    """The state of a ledger of a topic. OPEN: the topic's owner still writes to it."""

    OPEN = "open"
    CLOSED = "closed"
    UNKNOWN = "unknown"


class LedgerStays(_Words):
    """The reason why a ledger of a topic is kept. If several apply, the first one in this order is given, but
    NOT_IN_OUTCOMES in place of TRANSACTION_OPEN if the open transactions began after the stored outcomes. NO: the next
    trim deletes the ledger. UNKNOWN: a reason that this release does not know, from a newer broker."""

    NO = ""
    OPEN = "it is the last of the list, or it is written"
    NOT_ACKNOWLEDGED = "a durable subscription has not durably acknowledged all of it"
    NOT_IN_SNAPSHOT = "the snapshot of sequence ids that deduplication keeps does not cover it"
    TRANSACTION_OPEN = "a transaction with entries in it, or before it, is open"
    NOT_IN_OUTCOMES = "the stored outcomes of transactions do not cover it"
    NOT_COMPACTED = "compaction is on, running or was run once, and has not read all of it"
    NOT_SUBSCRIBED = "the topic has no durable subscription, and what it keeps until it has one is not reached"
    RETAINED_BY_TIME = "the retention time has not passed"
    RETAINED_BY_SIZE = "the retention size is not reached"
    UNKNOWN = "unknown"


class TopicStays(_Words):
    """The reason why a broker does not unload a topic that is loaded (`unload_idle_s`). If several apply, the first one
    in this order is given."""

    NOT_UNLOADED = "idle topics are not unloaded"
    IN_MEMORY = "its messages are in the memory of this broker alone"
    CLIENTS = "a producer or a consumer is connected"
    USED = "it was used a short while ago"
    TRANSACTION = "a transaction with messages or acknowledgements of it is open"
    BACKLOG = "a durable subscription has not acknowledged everything"
    WORK = "it is compacted, indexed or searched, or changes its ledger"
    RETENTION = "messages of it are about to be deleted"
    DELETED_UNUSED = "a policy deletes it, or its subscriptions, when they were unused for long enough"
    UNKNOWN = "unknown"


class CompactionState(_Words):
    """The state of a topic's last compaction, by Pulsar's names."""

    NOT_RUN = "NOT_RUN"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    ERROR = "ERROR"
    UNKNOWN = "unknown"


# --------------------------------------------------------------------------------------------------------- model
# The vocabulary of the broker's sessions: plain values that every protocol uses, without its messages.
#
# A protocol (broker/) translates its messages to these values, and the answers back. The numbers of the enums
# are those of proto/wire.proto; `enum_from_number` refuses a number without a meaning.


ENTRY_COST_BYTES = 1024
"""What each publish costs of a producer's credit, besides its length in bytes. This also bounds the number of small
entries: 8,000 of 1 KiB with 16 MiB."""


class AccessMode(enum.IntEnum):
    """How a producer wants to access its topic. EXCLUSIVE: alone, or the request fails. WAIT_FOR_EXCLUSIVE: alone,
    after the other producers have left. EXCLUSIVE_WITH_FENCING: alone at once; the other producers are fenced."""

    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3


class InitialPosition(enum.IntEnum):
    """Where a new subscription begins: after the last message, or at the first one."""

    LATEST = 0
    EARLIEST = 1


class RedeliveryOrder(enum.IntEnum):
    """Which other messages may be delivered while a failed message waits for its redelivery. ANY: all. KEY: only those
    with another key."""

    ANY = 0
    KEY = 1


class KeySharedMode(enum.IntEnum):
    """Who assigns the slots of keys to the consumers of a Key_Shared subscription. AUTO_SPLIT: the broker divides them.
    STICKY: each consumer names its own."""

    AUTO_SPLIT = 0
    STICKY = 1


ERROR_CHARACTERS_MAX, ERROR_TEXT_MAX, TRACEBACK_MAX = 256, 512, 3000
"""Most characters of a class of error, of its text, and of a traceback, whose end is kept: what a broker remembers, and
what a dead letter carries."""


class Failure(NamedTuple):
    """Why a program gave a message back: the class of the exception, its text, its traceback ("": none), and the name
    of the consumer."""

    error: str
    message: str = ""
    traceback: str = ""
    consumer: str = ""

    def cut_long_texts(self) -> Failure:
        """Returns the failure with each text cut to its limit; of the traceback the end is kept."""
        return Failure(
            self.error[:ERROR_CHARACTERS_MAX], self.message[:ERROR_TEXT_MAX], self.traceback[-TRACEBACK_MAX:],
            self.consumer[:ERROR_CHARACTERS_MAX],
        )  # fmt: skip

    def to_properties(self, attempts: int) -> dict[str, str]:
        """Returns the properties that describe this failure in a dead letter; empty ones are left out. `attempts`: how
        often the message was given back."""
        told = {
            ERROR: self.error, ERROR_MESSAGE: self.message, ERROR_TRACEBACK: self.traceback,
            ERROR_ATTEMPTS: str(attempts), ERROR_CONSUMER: self.consumer,
        }  # fmt: skip
        return {name: text for name, text in told.items() if text}


class AckedEntry(NamedTuple):
    """An acknowledgement of a whole entry, or of some messages of a batch (`bits`)."""

    position: Position
    bits: int = 0
    """If bit i is set, message i of the entry is acknowledged. 0: the whole entry. In a cumulative acknowledgement only
    the highest bit counts."""


class EntrySet(NamedTuple):
    """A set of whole entries of one ledger, such as those that are acknowledged."""

    ledger_id: int
    entries: bytes
    """The entry ids, as a portable roaring bitmap."""


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The last message of a topic that a subscription may receive, and the subscription's mark-delete position."""

    position: Position  # of its entry; (-1, -1): the topic is empty
    batch_index: int  # -1: its entry is no batch
    index: int  # -1: the topic is empty
    mark_delete: Position
    partition: int  # -1: the topic has no partitions


E = TypeVar("E", bound=enum.IntEnum)


def enum_from_number(kind: type[E], value: int, what: str) -> E:
    """Returns the member of the enum `kind` with the number `value`. Raises InvalidRequest if there is none. `what`
    names the value in the text of the error."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(each.name for each in kind)
        raise InvalidRequest(f"there is no {what} {value}; there are {names}") from None


# -------------------------------------------------------------------------------------------------- transactions
# Ids and states of transactions (docs/transactions.md).
#
#     id      (most, least)    most: number of the coordinator, from 0; Pulsar's Java client routes by it
#                              least: epoch of the coordinator << 40 | counter within the epoch, from 0
#     text    (3,1099511627781)                                          as Pulsar's clients print it
#
# Example: counter 5 of the epoch 1 of coordinator 3 is `TxnId(3, (1 << 40) | 5)`. An epoch grows with each take-over of
# a coordinator, so no id is given twice. Counters have gaps of random length, so an id does not tell the next one.
# Epochs have EPOCH_BITS bits: ids fit 63 bits, Java's long.


COUNTER_BITS, EPOCH_BITS = 40, 23
COORDINATORS_MAX = 1 << 10
_TEXT = re.compile(r"\(?(\d{1,4}),\s?(\d{1,19})\)?\Z")


class TxnState(enum.IntEnum):
    """The state of a transaction at its coordinator, with the numbers of proto/wire.proto."""

    OPEN = 0
    PREPARED = 1
    """The transaction is durable: until its deadline it survives its coordinator and its client. It ends with a commit
    or an abort."""
    COMMITTED = 2
    ABORTED = 3


class ForgottenOutcome(enum.IntEnum):
    """Why a coordinator does not know any more whether a transaction was committed, with the numbers of
    proto/wire.proto."""

    DISCARDED = 1
    """The outcome was discarded after its retention. If the transaction was committed, each of its topics had stored
    that before: a topic that lost nothing, and does not know the commit, has nothing in a committed transaction."""
    UNKNOWN = 2
    """A reason of a later version: topics may wait for the outcome still."""


class Isolation(enum.IntEnum):
    """Which messages a consumer receives. READ_COMMITTED: the messages of committed transactions, and those outside of
    transactions. READ_UNCOMMITTED: all stored messages, also those of open and aborted transactions."""

    READ_COMMITTED = 0
    READ_UNCOMMITTED = 1


class TxnId(NamedTuple):
    """The id of a transaction: two numbers, Pulsar's most and least significant bits."""

    most: int
    least: int

    @classmethod
    def from_parts(cls, coordinator: int, epoch: int, counter: int) -> TxnId:
        """Returns the transaction id with this coordinator number, epoch and counter. The caller must make sure that
        each number fits into its bits of the id."""
        return cls(coordinator, epoch << COUNTER_BITS | counter)

    @classmethod
    def from_numbers(cls, most: int, least: int) -> TxnId:
        """Returns the transaction id with these two numbers. Raises InvalidRequest if no transaction of a cluster can
        have them."""
        if not (0 <= most < COORDINATORS_MAX and 0 <= least < 1 << (COUNTER_BITS + EPOCH_BITS)):
            raise InvalidRequest(f"({most},{least}) is no transaction id")
        return cls(most, least)

    @classmethod
    def parse(cls, text: str) -> TxnId:
        """Parses a transaction id from text such as "(3,1099511627781)"; the brackets may be missing. Raises
        InvalidRequest if the text is not a transaction id."""
        found = _TEXT.match(text)
        if found is None:
            raise InvalidRequest(f"{text[:100]!r} is no transaction id; one looks like (3,1099511627781)")
        return cls.from_numbers(int(found[1]), int(found[2]))

    @property
    def coordinator(self) -> int:
        """Returns the number of the coordinator of the transaction."""
        return self.most

    @property
    def epoch(self) -> int:
        """Returns the coordinator's epoch when the transaction began."""
        return self.least >> COUNTER_BITS

    @property
    def counter(self) -> int:
        """Returns the number of the transaction within its epoch, from 0."""
        return self.least & (1 << COUNTER_BITS) - 1

    def __str__(self) -> str:
        return f"({self.most},{self.least})"


def coordinator_of(name: str, coordinators: int) -> int:
    """Returns the number of the coordinator for the transactions of `name`, from 0 to `coordinators` - 1. `name`: that
    of a holder (a program's transactions) or of a sink. Raises UnicodeEncodeError if it has a lone surrogate."""
    return choose_partition_of_key(name, coordinators)


HALF_MESSAGES_MAX = 100
HALF_BYTES_MAX = 256 << 10
"""The largest encoded size, in bytes, of all messages of a half message. They are one request, and a broker accepts 512
KiB (runtime/network.py)."""
