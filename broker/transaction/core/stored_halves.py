"""The half messages that a coordinator's ledger has, and how those that ended did: a part of its state.

    halves.apply(record) | committed(half)     as of State: when it is durable, and when the ledger is read
    halves.outcome(half)                       COMMITTED, ABORTED; None: it is open, forgotten, or never was stored

A half is in `open` from its HalfStored to the record that ends it: the COMMIT of the transaction that published it
(Committed.half), or HalfRolledBack. Then its id is in one of two bitmaps until HalvesForgotten. Its age is what was
noted last: a time since the last note is not counted over a take-over, so that no clock of another machine matters.
Guards: tests/broker/transaction/core/test_halves_walk.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import msgspec
from pyroaring import BitMap64

from ....proto.transactions import TxnState
from .records import HalfNoted, HalfRecord, HalfRolledBack, HalfStored, HalvesForgotten, HalvesKept


class StoredHalves:
    """The half messages of a coordinator's ledger."""

    __slots__ = ("_committed", "_of", "_rolled_back", "open", "size_bytes")

    def __init__(self) -> None:
        self.open: dict[int, HalfStored] = {}
        self.size_bytes = 0  # of the messages of all that are open
        self._committed = BitMap64()
        self._rolled_back = BitMap64()
        self._of: dict[str, BitMap64] = {}  # those that ended, by the role that prepared them

    def apply(self, record: HalfRecord) -> None:
        match record:
            case HalfStored():
                self.open[record.half] = record
                self.size_bytes += size_of(record)
            case HalfNoted():
                found = self.open.get(record.half)
                if found is not None:
                    self.open[record.half] = msgspec.structs.replace(
                        found, unknown=record.unknown, age_s=record.age_s, parked=record.parked
                    )
            case HalfRolledBack():
                self._remove(record.half)
                self._rolled_back.add(record.half)
            case HalvesKept():
                self._committed = BitMap64.deserialize(record.committed)
                self._rolled_back = BitMap64.deserialize(record.rolled_back)
                self._of = {owner: BitMap64.deserialize(ids) for owner, ids in record.owners.items()}
            case HalvesForgotten():
                forgotten = BitMap64.deserialize(record.halves)
                self._committed -= forgotten
                self._rolled_back -= forgotten
                left = {owner: ids - forgotten for owner, ids in self._of.items()}
                self._of = {owner: ids for owner, ids in left.items() if ids}
            case _:
                assert_never(record)

    def committed(self, half: int) -> None:
        self._remove(half)
        self._committed.add(half)

    def _remove(self, half: int) -> None:
        stored = self.open.pop(half)
        self.size_bytes -= size_of(stored)
        if stored.owner:
            self._of.setdefault(stored.owner, BitMap64()).add(half)

    def outcome(self, half: int) -> TxnState | None:
        if half in self._committed:
            return TxnState.COMMITTED
        return TxnState.ABORTED if half in self._rolled_back else None

    def is_of_another(self, half: int, owner: str) -> bool:
        """Whether it has ended, and another role prepared it. (An earlier version did not write who did.)"""
        if self.outcome(half) is None or half in self._of.get(owner, ()):
            return False
        return any(half in ids for ids in self._of.values())

    def ended(self) -> BitMap64:
        """Returns all that ended and are not forgotten."""
        return self._committed | self._rolled_back

    @property
    def is_idle(self) -> bool:
        """Whether none of them is to be asked about."""
        return all(each.parked for each in self.open.values())

    def snapshot(self) -> Iterator[HalfRecord]:
        yield from self.open.values()
        if self._committed or self._rolled_back:
            owners = {owner: ids.serialize() for owner, ids in self._of.items()}
            yield HalvesKept(self._committed.serialize(), self._rolled_back.serialize(), owners)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert not self._committed & self._rolled_back, "a half has at most one outcome"
        assert not any(self.outcome(half) for half in self.open), "an open half has no outcome"
        assert self.size_bytes == sum(map(size_of, self.open.values())), "the bytes of all open halves are counted"


def size_of(half: HalfStored) -> int:
    return sum(len(each.topic) + len(each.entry) for each in half.messages)
