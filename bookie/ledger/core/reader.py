"""Reading a range of entries: whom to ask for what, whom next, and when to give up. Pure.

A reader that does not own the ledger reads up to `bound` only: last_entry of a CLOSED ledger, else the largest LAC it
knows (BookKeeper protocol §1.10). The bound is the caller's to keep (`Bound` below); entries up to it are stored for
ever.

`RangeRead`: one question at a time. `Ask` one bookie for a run of entries; an answer counts as far as its entries are
the right ones and undamaged, in order from the first. When not even the first is, the next replica of the write set
is asked. Replicas that failed a moment ago (`avoid`) are asked last. When all have answered:
- `LOST`: the ledger is closed, and *every* replica is certain that it does not have the entry. An alarm.
- `UNAVAILABLE`: at least one did not answer, or could not say.
Guards: tests/bookie/ledger/test_reader_core.py.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ....metadata.records import CLOSED, LedgerRecord
from ....runtime.files import Buffer
from .metadata import fragment_of, striping_of
from .stored import StoredEntry, unseal


class Failure(enum.Enum):
    LOST = "every replica is certain that it does not have the entry"
    UNAVAILABLE = "no replica gave the entry, and not all are certain"


class Ask(NamedTuple):
    """Effect: READ `count` entries from `entry`, about `bytes_max`, at `bookie`."""

    bookie: str
    entry: int
    count: int  # type: ignore[assignment]  # tuple.count is not used
    bytes_max: int


class EntriesRead(NamedTuple):
    """Fact: the bookie answered with these stored entries, to be verified."""

    bookie: str
    frames: Sequence[Buffer]


class EntryMissing(NamedTuple):
    """Fact: the bookie is certain that it does not have the first entry asked for."""

    bookie: str


class ReadFailed(NamedTuple):
    """Fact: no answer, or one that says nothing."""

    bookie: str


class Done(NamedTuple):
    """Effect: the entries, at least one, in order without a gap from the first."""

    entries: list[StoredEntry]


class Failed(NamedTuple):
    """Effect: not even the first entry can be had."""

    why: Failure
    asked: tuple[str, ...]


Fact = EntriesRead | EntryMissing | ReadFailed
Effect = Ask | Done | Failed


class RangeRead:
    """Reads [first … last], at least one entry, until about `bytes_max`. `last` must not pass the bound of reading."""

    def __init__(
        self, record: LedgerRecord, first: int, last: int, bytes_max: int, avoid: Collection[str] = (), prefer: int = 0
    ) -> None:
        assert 0 <= first <= last, "a range has at least one entry"
        fragment, fragment_end = fragment_of(record, first)
        striping = striping_of(record)
        self.ledger_id = record.ledger_id
        self.first = first
        self.last = last if fragment_end < 0 else min(last, fragment_end)
        self.bytes_max = bytes_max
        self.damaged: list[str] = []  # bookies that gave bytes which are not the entry
        self._closed = record.state == CLOSED
        # Longest runs first, then one fixed order per ledger, so that reads in sequence find the same read-ahead.
        slots = sorted(
            striping.write_set(first),
            key=lambda slot: (
                fragment.bookies[slot] in avoid,
                -striping.run_length(first, slot),
                (slot - prefer) % striping.ensemble_size,
            ),
        )  # fmt: skip
        self._to_ask = [
            Ask(fragment.bookies[slot], first, min(striping.run_length(first, slot), self.last - first + 1), bytes_max)
            for slot in slots
        ]
        self._asked: list[str] = []
        self._missing: set[str] = set()
        self._finished = False

    def start(self) -> Effect:
        return self._next()

    def receive(self, fact: Fact) -> Effect:
        assert not self._finished, "a read that is finished gets no more answers"
        assert fact.bookie == self._asked[-1], "one question at a time"
        if isinstance(fact, EntriesRead):
            entries = self._verified(fact.frames)
            if entries:
                self._finished = True
                return Done(entries)
            self.damaged.append(fact.bookie)
        elif isinstance(fact, EntryMissing):
            self._missing.add(fact.bookie)
        return self._next()

    def _verified(self, frames: Sequence[Buffer]) -> list[StoredEntry]:
        entries: list[StoredEntry] = []
        for entry, frame in zip(range(self.first, self.last + 1), frames, strict=False):
            found = unseal(frame, self.ledger_id, entry)
            if found is None:
                break
            entries.append(found)
        return entries

    def _next(self) -> Effect:
        if self._to_ask:
            ask = self._to_ask.pop(0)
            self._asked.append(ask.bookie)
            return ask
        self._finished = True
        lost = self._closed and len(self._missing) == len(self._asked)
        return Failed(Failure.LOST if lost else Failure.UNAVAILABLE, tuple(self._asked))

    def check(self) -> None:
        assert self._missing <= set(self._asked), "only a bookie that was asked votes"
        assert len(self._asked) == len(set(self._asked)), "each replica is asked once"


class Bound:
    """Up to where a reader may read: never falls, and is the *end* only of a CLOSED ledger (M22).

    Before that it is a lower bound: `max(known LAC, first entry of the last fragment - 1)`. -1 of an open ledger means
    "nothing known yet", never "empty".
    """

    __slots__ = ("closed", "last_entry")

    def __init__(self, record: LedgerRecord) -> None:
        self.last_entry = -1
        self.closed = False
        self.learn_record(record)

    def learn_record(self, record: LedgerRecord) -> None:
        if record.state == CLOSED:
            assert not self.closed or self.last_entry == record.last_entry, "the end of a closed ledger never changes"
            assert self.last_entry <= record.last_entry, "a ledger never ends before a confirmed entry"
            self.closed = True
            self.last_entry = record.last_entry
        else:
            self.learn_lac(record.fragments[-1].first_entry - 1)

    def learn_lac(self, lac: int) -> None:
        if not self.closed and lac > self.last_entry:
            self.last_entry = lac
