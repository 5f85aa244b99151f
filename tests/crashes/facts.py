"""What a store said, and when: the promises that a crash must not break.

A `Fact` carries the number of the last disk operation before it was known (`at`): a crash after operation n has to
honour every fact with `at` ≤ n, and no other. `Expected` is the sum of the facts up to a crash, brought forward fact by
fact as the crash points go forward.
"""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from tests.bookie.entries import stored_entry

LATE = 1 << 40
"""An entry id that no workload sends: for asking whether an add would be taken."""


class Kind(enum.Enum):
    SENT = "sent"  # the add was handed to the store, whatever became of it
    ACKED = "acked"
    FENCING = "fencing"
    FENCED = "fenced"
    LAC_SENT = "lac sent"
    LAC_ACKED = "lac acked"
    DELETING = "deleting"
    DELETED = "deleted"
    QUARANTINING = "quarantining"
    QUARANTINED = "quarantined"
    MENDED = "mended"
    LIMBO_ENTERING = "entering limbo"  # `ledger` is up to where
    LIMBO_ENTERED = "in limbo"
    LIMBO_LEAVING = "leaving limbo"
    LIMBO_LEFT = "limbo left"
    MARKED = "marked"  # a checkpoint ended; `ledger`, `entry` are the mark's journal and offset


class Fact(NamedTuple):
    at: int
    kind: Kind
    ledger: int
    entry: int = -1
    size: int = 0


@lru_cache(100_000)
def stored_bytes(ledger: int, entry: int, size: int, lac: int = -1) -> bytes:
    """An entry's bytes are a function of its id; so are its size and LAC, in one workload."""
    return stored_entry(ledger, entry, random.Random(ledger << 32 | entry).randbytes(size), lac)


LIMBO = (Kind.LIMBO_ENTERING, Kind.LIMBO_ENTERED, Kind.LIMBO_LEAVING, Kind.LIMBO_LEFT)


@dataclass
class Ledger:
    sent: dict[int, int] = field(default_factory=dict)  # entry: payload bytes
    acked: dict[int, None] = field(default_factory=dict)
    fencing: bool = False
    fenced: bool = False
    lac_sent: int = -1
    lac_acked: int = -1
    deleting: bool = False
    deleted: bool = False
    quarantine: dict[int, Kind] = field(default_factory=dict)  # entry: SENT once a copy of it may mend it


class Expected:
    def __init__(self, facts: Sequence[Fact]) -> None:
        self._facts = facts
        self._next = 0
        self.ledgers: dict[int, Ledger] = {}
        self.mark = (0, 0)
        self.limbo: Kind | None = None
        self.limbo_upto = -1

    @property
    def may_be_in_limbo(self) -> bool:
        return self.limbo not in (None, Kind.LIMBO_LEFT)

    @property
    def fenced_upto(self) -> int:
        """By limbo, for ever."""
        return self.limbo_upto if self.limbo is not Kind.LIMBO_ENTERING else -1

    @property
    def epoch(self) -> int:
        """Grows with every fact."""
        return self._next

    def forward(self, operation: int) -> None:
        """Takes in what was said until this disk operation."""
        while self._next < len(self._facts) and self._facts[self._next].at <= operation:
            self._take(self._facts[self._next])
            self._next += 1

    def _take(self, fact: Fact) -> None:
        if fact.kind is Kind.MARKED:
            self.mark = max(self.mark, (fact.ledger, fact.entry))
            return
        if fact.kind in LIMBO:
            self.limbo, self.limbo_upto = fact.kind, fact.ledger
            return
        ledger = self.ledgers.setdefault(fact.ledger, Ledger())
        match fact.kind:
            case Kind.SENT:
                ledger.sent[fact.entry] = fact.size
                if fact.entry in ledger.quarantine:
                    ledger.quarantine[fact.entry] = Kind.SENT
            case Kind.ACKED:
                ledger.acked[fact.entry] = None
            case Kind.FENCING:
                ledger.fencing = True
            case Kind.FENCED:
                ledger.fenced = True
            case Kind.LAC_SENT:
                ledger.lac_sent = max(ledger.lac_sent, fact.entry)
            case Kind.LAC_ACKED:
                ledger.lac_acked = max(ledger.lac_acked, fact.entry)
            case Kind.DELETING:
                ledger.deleting = True
            case Kind.DELETED:
                ledger.deleted = True
            case Kind.QUARANTINED:
                if ledger.quarantine[fact.entry] is Kind.QUARANTINING:
                    ledger.quarantine[fact.entry] = fact.kind
            case Kind.QUARANTINING | Kind.MENDED:
                ledger.quarantine[fact.entry] = fact.kind
