"""The state of a coordinator's ledger: what its records make, one after the other, and nothing else.

    state.apply(record)      when the record is durable, and in the same order when the ledger is read
    state.snapshot()         the records that make the same state anew: a ledger begins with them

So an owner and the one after it have the same state, and a restart changes nothing.
Guards: tests/broker/transaction/core/test_coordinator_walk.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import assert_never

import msgspec

from .owned import KeptCommits, OwnedTable
from .records import (
    FORGOTTEN,
    Aborted,
    AnyRecord,
    Committed,
    Counted,
    Detached,
    Done,
    Forgotten,
    HalfNoted,
    HalfRolledBack,
    HalfStored,
    HalvesForgotten,
    HalvesKept,
    HandedOver,
    Kept,
    Named,
    Owned,
    Participant,
    Prepared,
    SinkBatch,
    SinkKept,
    Unnamed,
    committed,
    participants,
)
from .stored_halves import StoredHalves

_NOBODY = Owned("", 0.0)


class Outcome(msgspec.Struct):
    """The outcome of a transaction that is not done; `waiting`: participants that are not known to have stored it."""

    committed: bool
    waiting: dict[str, Participant]
    owner: str = ""


class NameHolder(msgspec.Struct):
    """The holder of a name."""

    holder: int
    idle_s: float  # when the record was written


class State:
    """The durable state of one coordinator."""

    __slots__ = ("forgotten", "halves", "handed", "holders", "kept", "names", "prepared", "sinks", "unsettled")

    def __init__(self) -> None:
        self.kept = KeptCommits()
        self.unsettled: dict[int, Outcome] = {}
        self.prepared: dict[int, Prepared] = {}
        self.names: OwnedTable[NameHolder] = OwnedTable()
        self.sinks: OwnedTable[SinkBatch] = OwnedTable()
        self.holders = 0  # the largest number of a holder of any name: none is given twice
        self.forgotten = 0  # ids below are not known any more
        self.handed: list[HandedOver] = []
        self.halves = StoredHalves()

    def is_committed(self, txn: int) -> bool:
        return txn in self.kept

    def apply(self, record: AnyRecord) -> None:
        match record:
            case Committed():
                self._committed(record)
            case Prepared():
                self.prepared[record.txn] = record
            case Aborted():
                del self.prepared[record.txn]
                waiting = {topic: Participant(topic) for topic in record.topics}
                self.unsettled[record.txn] = Outcome(False, waiting, record.owner)
            case Done():
                for txn in record.txns:
                    self.unsettled.pop(txn, None)
            case Detached():
                outcome = self.unsettled.get(record.txn)
                if outcome is not None:
                    outcome.waiting.pop(record.topic, None)
            case Named():
                self.names.put(record.owner, record.name, NameHolder(record.holder, record.idle_s))
                self.holders = max(self.holders, record.holder)
            case Unnamed():
                for owner, name in zip_longest(record.owners, record.names, fillvalue=""):
                    self.names.remove(owner, name)
            case Forgotten():
                self.forgotten = record.below
                self.kept.forget(record.below)
            case HandedOver():
                self.handed.append(record)
            case Kept():
                self.kept.restore(record)
            case Counted():
                self.holders = record.holders
            case SinkKept():
                self._sink(record.sink)
            case HalfStored() | HalfNoted() | HalfRolledBack() | HalvesKept() | HalvesForgotten():
                self.halves.apply(record)
            case _:
                assert_never(record)

    def _committed(self, record: Committed) -> None:
        for txn, shares in record.txns:
            self.prepared.pop(txn, None)
            self.kept.add(txn, record.owner)
            if shares:
                found = participants(record, shares)
                self.unsettled[txn] = Outcome(True, {each.topic: each for each in found}, record.owner)
        if record.sink is not None:
            self._sink(record.sink)
        if record.half:
            self.halves.committed(record.half)

    def _sink(self, sink: SinkBatch) -> None:
        if sink.batch == FORGOTTEN:
            self.sinks.remove(sink.owner, sink.sink_id)
        else:
            self.sinks.put(sink.owner, sink.sink_id, sink)

    def snapshot(self) -> Iterator[AnyRecord]:
        """Yields the records of the state, small ones, so that they can be divided among entries."""
        yield Counted(self.holders)
        yield Forgotten(self.forgotten)
        for txn, outcome in self.unsettled.items():
            if outcome.committed:
                yield committed({txn: list(outcome.waiting.values())}, owner=outcome.owner)
            else:
                yield from (Prepared(txn, _NOBODY, [], 0.0), Aborted(txn, list(outcome.waiting), outcome.owner))
        # after the unsettled ones, whose bits are in it
        yield from self.kept.snapshot()
        yield from self.prepared.values()
        for (owner, name), each in self.names.items():
            yield Named(name, each.holder, each.idle_s, owner)
        yield from (SinkKept(sink) for _, sink in self.sinks.items())
        yield from self.halves.snapshot()

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for txn, outcome in self.unsettled.items():
            assert not outcome.committed or self.is_committed(txn), "an outcome that is not settled is kept"
            assert txn >= self.forgotten, "nothing is forgotten that is not done"
            assert txn not in self.prepared, "a transaction that ended is not prepared"
        assert not any(self.is_committed(txn) for txn in self.prepared), "a prepared transaction has no outcome"
        assert all(txn >= self.forgotten for txn in self.prepared), "no prepared transaction is forgotten"
        self.halves.check()
        assert all(each.holder <= self.holders for _, each in self.names.items()), "no holder's number is given twice"
