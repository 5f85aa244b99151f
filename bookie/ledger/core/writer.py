"""The writer of one ledger: what it sends, what it confirms, when and where it ends. Pure.

| state | appends | acks confirm | leaves when |
|---|---|---|---|
| OPEN | yes | yes | `close()` or a bookie failed → DRAINING; FENCED, UNAUTHORIZED, quorum time-out → POISONED |
| DRAINING | no | yes | nothing pending, or the first pending entry cannot reach Qa acks any more → CLOSING |
| CLOSING | no | **no: frozen** | the metadata said how it ended → CLOSED; that it is being recovered → POISONED |
| POISONED | no | no | `close()` → CLOSING, to learn the end |
| CLOSED | no | no | – |

**The guarantee** (BookKeeper protocol §1.3, §1.6). An entry is confirmed once Qa bookies of the *committed* ensemble
have synced it and every entry before it is confirmed; so confirmed ⊆ [0 … last_entry] of the closed ledger, always:
- LAC is chosen as the end and frozen in the same step (`CloseLedger`), so that nothing is confirmed beyond it while
  the compare-and-set is on its way (M10); the end is LAC, never LAP (M18).
- A bookie that fails ends the ledger (no ensemble change yet): nothing new is sent, and what was sent already may
  still be confirmed by the other bookies, in order, until the first pending entry is confirmed or cannot be.

**How a pending entry ends**, besides confirmed:
- `NOT_STORED`, definite: the ledger was closed at our own LAC, below the entry. Nobody will ever read it: writing it
  again to a new ledger makes no duplicate.
- `FENCED`, unknown: another client recovers or has closed the ledger, and may have kept the entry. When its end is
  known and reaches the entry, the entry is confirmed instead.
- `UNAUTHORIZED`: a bookie refuses the key. The others may have the entry: unknown.
- `UNKNOWN`: nobody said in time how it ended (`QuorumTimedOut`, `EndUnknown`).

Facts about answers carry slot and bookie. An ensemble change (§1.4) will be one more state between OPEN and DRAINING
that freezes `PendingAdds`, and calls its `replace` when the compare-and-set is through.
Guards: tests/bookie/ledger/test_writer_core.py, test_sabotage.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar, assert_never

from .pending import AddAcked, AddFailed, AddsAcked, PendingAdd, PendingAdds, SendAdd
from .striping import Striping

P = TypeVar("P")


class State(enum.Enum):
    OPEN = enum.auto()
    DRAINING = enum.auto()
    CLOSING = enum.auto()
    POISONED = enum.auto()
    CLOSED = enum.auto()


class Outcome(enum.Enum):
    """How a pending entry ended that was not confirmed, and why a handle takes no more appends."""

    NOT_STORED = "the ledger was closed before this entry"
    FENCED = "another client is recovering or has closed the ledger"
    UNAUTHORIZED = "a bookie refuses the ledger's key"
    UNKNOWN = "nobody said in time whether it is stored"


class AddRefused(NamedTuple):
    """Fact: a bookie said FENCED or UNAUTHORIZED. Never a reason for another ensemble."""

    why: Outcome


class QuorumTimedOut(NamedTuple):
    """Fact: the first pending entry has waited longer than the owner allows."""

    entry: int


class LedgerEnded(NamedTuple):
    """Fact: the metadata holds the ledger as CLOSED, by us or another."""

    last_entry: int
    length: int


class EndRefused(NamedTuple):
    """Fact: the metadata holds the ledger IN_RECOVERY, or not at all."""


class EndUnknown(NamedTuple):
    """Fact: the metadata did not answer; the ledger may be closed or not."""


Fact = AddAcked | AddsAcked | AddFailed | AddRefused | QuorumTimedOut | LedgerEnded | EndRefused | EndUnknown


class Confirm(NamedTuple, Generic[P]):
    """Effect: tell the owner of the entry that it is stored. In entry order, each once."""

    add: PendingAdd[P]


class Fail(NamedTuple, Generic[P]):
    """Effect: tell the owner of the entry how it ended. In entry order, each once."""

    add: PendingAdd[P]
    why: Outcome


class CloseLedger(NamedTuple):
    """Effect: OPEN → CLOSED with this end in the metadata; answer LedgerEnded, EndRefused or EndUnknown."""

    last_entry: int
    length: int


Effect = SendAdd[P] | Confirm[P] | Fail[P] | CloseLedger


class Writer(Generic[P]):
    def __init__(self, striping: Striping, ensemble: Sequence[str]) -> None:
        self.state = State.OPEN
        self.adds: PendingAdds[P] = PendingAdds(striping, ensemble)
        self.why: Outcome | None = None  # of being poisoned
        self.end: LedgerEnded | None = None

    # ------------------------------------------------------------------------------ intents
    def append(self, payload: P, size: int) -> list[SendAdd[P]]:
        """Sends the next entry. Only while OPEN: the caller asks `state` first."""
        assert self.state is State.OPEN, "only an open writer appends"
        return self.adds.push(payload, size)

    def close(self) -> Sequence[Effect[P]]:
        """Ends the ledger at what can still be confirmed. Again after POISONED: asks again how it ended."""
        if self.state is State.OPEN:
            self.state = State.DRAINING
            return self._drained()
        return self._closing() if self.state is State.POISONED else ()

    def abandon(self) -> Sequence[Effect[P]]:
        """Lets go: pending entries end UNKNOWN and the ledger is left to a recoverer."""
        return () if self.state in (State.CLOSED, State.POISONED) else self._poison(Outcome.UNKNOWN)

    # ------------------------------------------------------------------------------ facts
    def receive(self, fact: Fact) -> Sequence[Effect[P]]:
        if isinstance(fact, AddsAcked):
            return self._acked(self.adds.ack_many(fact))
        if isinstance(fact, AddAcked):
            return self._acked(self.adds.ack(fact))
        if isinstance(fact, AddFailed):
            return self._bookie_failed(fact)
        if isinstance(fact, AddRefused):
            return self._poison(fact.why) if self.state in (State.OPEN, State.DRAINING) else ()
        if isinstance(fact, QuorumTimedOut):
            return self._timed_out(fact)
        if isinstance(fact, LedgerEnded):
            return self._ended(fact)
        if isinstance(fact, EndRefused):
            return self._end_failed(Outcome.FENCED)
        if isinstance(fact, EndUnknown):
            return self._end_failed(Outcome.UNKNOWN)
        assert_never(fact)

    def _acked(self, confirmed: Sequence[PendingAdd[P]]) -> Sequence[Effect[P]]:
        if not confirmed:
            return () if self.state is State.OPEN else self._drained()
        effects: list[Effect[P]] = [Confirm(add) for add in confirmed]
        if self.state is not State.OPEN:
            effects += self._drained()
        return effects

    def _bookie_failed(self, fact: AddFailed) -> Sequence[Effect[P]]:
        if self.state not in (State.OPEN, State.DRAINING) or not self.adds.fail(fact.slot, fact.bookie):
            return ()
        self.state = State.DRAINING
        return self._drained()

    def _drained(self) -> Sequence[Effect[P]]:
        """DRAINING → CLOSING once no further entry can be confirmed in order."""
        if self.state is State.DRAINING and (not len(self.adds) or self.adds.head_is_doomed):
            return self._closing()
        return ()

    def _closing(self) -> Sequence[Effect[P]]:
        self.state = State.CLOSING
        self.adds.frozen = True
        return [CloseLedger(self.adds.lac, self.adds.length_confirmed)]

    def _timed_out(self, fact: QuorumTimedOut) -> Sequence[Effect[P]]:
        if not len(self.adds) or fact.entry != self.adds.lac + 1:
            return ()  # it was confirmed in the meantime
        if self.state is State.CLOSING:
            return self._fail_all(Outcome.UNKNOWN)
        return self._poison(Outcome.UNKNOWN)

    def _poison(self, why: Outcome) -> Sequence[Effect[P]]:
        self.state = State.POISONED
        self.why = why
        self.adds.frozen = True
        return self._fail_all(why)

    def _end_failed(self, why: Outcome) -> Sequence[Effect[P]]:
        assert self.state is State.CLOSING, "only a closing writer hears about its end"
        return self._poison(why)

    def _ended(self, fact: LedgerEnded) -> Sequence[Effect[P]]:
        assert self.state is State.CLOSING, "only a closing writer hears about its end"
        assert fact.last_entry >= self.adds.lac, "a ledger never ends before a confirmed entry"
        self.state = State.CLOSED
        self.end = fact
        why = Outcome.NOT_STORED if fact.last_entry == self.adds.lac else Outcome.FENCED
        effects: list[Effect[P]] = []
        for add in self.adds.take_all():
            if add.entry <= fact.last_entry:
                self.adds.lac, self.adds.length_confirmed = add.entry, add.length
                effects.append(Confirm(add))
            else:
                effects.append(Fail(add, why))
        return effects

    def _fail_all(self, why: Outcome) -> Sequence[Effect[P]]:
        return [Fail(add, why) for add in self.adds.take_all()]

    def check(self) -> None:
        self.adds.check()
        assert self.adds.frozen == (self.state in (State.CLOSING, State.POISONED, State.CLOSED)), (
            "nothing is confirmed by acks from the moment the end is being decided"
        )
        assert (self.why is not None) or self.state is not State.POISONED, "a poisoned writer says why"
        assert (self.end is not None) == (self.state is State.CLOSED), "a closed writer knows its end, no other does"
        if self.state in (State.POISONED, State.CLOSED):
            assert not len(self.adds), "nothing is pending once the handle is finished"
        if self.end is not None:
            assert self.adds.lac <= self.end.last_entry, "every confirmed entry is in the closed ledger"
