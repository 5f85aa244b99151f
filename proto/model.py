"""The vocabulary of the broker's sessions: plain values that every protocol uses, without its messages.

A protocol (broker/protocols/) translates its messages to these values, and the answers back. The numbers of the enums
are those of proto/wire.proto; `enum_of` refuses a number without a meaning.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from .errors import InvalidRequest
from .names import Position

ENTRY_COST_BYTES = 1024
"""The cost of a publish, besides its length, in a producer's credit: it bounds small entries (8,000 of 1 KiB with
16 MiB)."""


class AccessMode(enum.IntEnum):
    """A producer's access to its topic: shared, exclusive, exclusive after a wait, or exclusive at once."""

    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3


class InitialPosition(enum.IntEnum):
    """The position at which a new subscription begins."""

    LATEST = 0
    EARLIEST = 1


class RedeliveryOrder(enum.IntEnum):
    """The messages that may pass one that failed and comes again: any, or none of its key."""

    ANY = 0
    KEY = 1


class KeySharedMode(enum.IntEnum):
    """Key_Shared: the broker divides the slots of keys, or each consumer names its own."""

    AUTO_SPLIT = 0
    STICKY = 1


class AckedEntry(NamedTuple):
    """An entry, or some of its messages, that are acknowledged."""

    position: Position
    bits: int = 0
    """Bit i is message i of the entry; 0: the whole entry. Of a cumulative acknowledgement the highest bit counts."""


class EntrySet(NamedTuple):
    """Whole entries of one ledger."""

    ledger_id: int
    entries: bytes
    """Entry ids as a portable roaring bitmap."""


@dataclass(frozen=True, slots=True)
class LastMessage:
    """The last message of a topic, as a subscription sees it, and where the subscription is."""

    position: Position  # of its entry; (-1, -1): the topic is empty
    batch_index: int  # -1: its entry is no batch
    index: int  # -1: the topic is empty
    mark_delete: Position
    partition: int  # -1: the topic has no partitions


E = TypeVar("E", bound=enum.IntEnum)


def enum_of(kind: type[E], value: int, what: str) -> E:
    """The member with this number. InvalidRequest: there is none."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(each.name for each in kind)
        raise InvalidRequest(f"there is no {what} {value}; there are {names}") from None
