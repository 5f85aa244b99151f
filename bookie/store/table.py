"""The ledgers that did not change lately, as in the ledger index: about 50 bytes each, sorted, in leaves.

A `LedgerTable` is never changed: a checkpoint merges what changed into new leaves and shares the others with the table
before it, in the flush worker, so that the event loop never walks over all ledgers and readers keep a whole table. A
leaf is up to `2 * LEAF_RECORDS` records of format/ledger_index.py, byte for byte: loading is slicing, a rewrite of the
ledger index is writing the leaves one after the other.

`TableLoader` makes a table from a ledger index file: each checkpoint appended its ledgers in ascending order, later
records replace earlier ones. Guarded by tests/bookie/store/test_ledger_table.py.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from pyroaring import BitMap64

from ..format import ledger_index
from ..format.journal import crc32c
from ..format.ledger_index import RECORD_BYTES, FactKind, LedgerState, State, Tombstone
from .memtable import IntegerIntervals

LEAF_RECORDS = 256
LEAF_BYTES = LEAF_RECORDS * RECORD_BYTES
_HEAD = struct.Struct(">IBq")
_LEDGER = struct.Struct(">q")
_LEDGER_AT = 5
_CHANGES_MAX = 1 << 17
"""Records out of order that wait to be merged while a file is loaded: about 30 MB."""
_SORT_SLICE = 4096
"""Values that are sorted at once, as that keeps the interpreter: 1 ms for so many, against 50 ms for 100,000."""


def sorted_in_slices(values: Collection[int]) -> Iterator[int]:
    """Yields the values in ascending order. Runs in a worker thread, and sorts in slices, so that the event loop can
    run in between."""
    if len(values) <= _SORT_SLICE:
        return iter(sorted(values))
    rest = iter(values)
    slices = list(iter(lambda: sorted(islice(rest, _SORT_SLICE)), []))
    return heapq.merge(*slices)


class LedgerTable:
    """The records of ledgers that did not change lately, sorted, in leaves. Never changed after it is made."""

    __slots__ = ("_firsts", "leaves")

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self.leaves = [leaf for leaf in leaves if leaf]
        self._firsts = array("q", [_LEDGER.unpack_from(leaf, _LEDGER_AT)[0] for leaf in self.leaves])

    def get(self, ledger: int) -> LedgerState | None:
        at = bisect_right(self._firsts, ledger) - 1
        if at < 0:
            return None
        leaf = self.leaves[at]
        where = _find(leaf, ledger, 0)
        if where * RECORD_BYTES == len(leaf) or _ledger(leaf, where) != ledger:
            return None
        state = ledger_index.intact_record(leaf, where * RECORD_BYTES)
        assert isinstance(state, LedgerState), f"the record of ledger {ledger} changed in memory"
        return state

    def __iter__(self) -> Iterator[int]:
        """Yields the ledgers, ascending."""
        for leaf in self.leaves:
            for (ledger,) in struct.iter_unpack(f">{_LEDGER_AT}xq{RECORD_BYTES - _LEDGER_AT - 8}x", leaf):
                yield ledger

    def with_ledger_records(self, changes: Mapping[int, bytes]) -> LedgerTable:
        """Returns a table in which these records replace the ledgers' old ones."""
        by_leaf: dict[int, list[int]] = {}
        for ledger in changes:
            by_leaf.setdefault(max(bisect_right(self._firsts, ledger) - 1, 0), []).append(ledger)
        leaves: list[bytes] = []
        done = 0
        for at in sorted(by_leaf):
            leaves += self.leaves[done:at]
            leaves += _merge(self.leaves[at] if self.leaves else b"", sorted_in_slices(by_leaf[at]), changes)
            done = at + 1
        return LedgerTable(leaves + self.leaves[done:])

    def without(self, dead: IntegerIntervals) -> LedgerTable:
        """Returns a table without the ledgers of these intervals."""
        leaves: list[bytes] = []
        for leaf in self.leaves:
            last = len(leaf) // RECORD_BYTES - 1
            if dead.intersect(_ledger(leaf, 0), _ledger(leaf, last)):
                kept = [at * RECORD_BYTES for at in range(last + 1) if _ledger(leaf, at) not in dead]
                leaf = b"".join([leaf[at : at + RECORD_BYTES] for at in kept])
            leaves.append(leaf)
        return LedgerTable(leaves)


def _ledger(leaf: bytes, at: int) -> int:
    found: int = _LEDGER.unpack_from(leaf, at * RECORD_BYTES + _LEDGER_AT)[0]
    return found


def _find(leaf: bytes, ledger: int, low: int) -> int:
    """Returns the number of the first record, from `low` on, whose ledger is not smaller than `ledger`."""
    high = count = len(leaf) // RECORD_BYTES
    if low == count or _ledger(leaf, count - 1) < ledger:
        return count
    while low < high:  # as `bisect_left` with a key, which is a call or two a step
        at = (low + high) // 2
        if _LEDGER.unpack_from(leaf, at * RECORD_BYTES + _LEDGER_AT)[0] < ledger:
            low = at + 1
        else:
            high = at
    return low


def _merge(leaf: bytes, ledgers: Iterable[int], changes: Mapping[int, bytes]) -> Iterator[bytes]:
    """Applies the changes to `leaf`, and yields the leaves that replace it."""
    parts: list[bytes] = []
    size = done = 0
    for ledger in ledgers:
        at = _find(leaf, ledger, done)
        for part in (leaf[done * RECORD_BYTES : at * RECORD_BYTES], changes[ledger]):
            parts.append(part)
            size += len(part)
        done = at + (at * RECORD_BYTES < len(leaf) and _ledger(leaf, at) == ledger)
        if size >= LEAF_BYTES:
            yield from _cut(parts)
            parts, size = [], 0
    yield from _cut([*parts, leaf[done * RECORD_BYTES :]])


def _cut(parts: list[bytes]) -> list[bytes]:
    """Splits data into leaves of the allowed length."""
    data = b"".join(parts)
    if len(data) <= 2 * LEAF_BYTES:
        return [data]
    return [data[at : at + LEAF_BYTES] for at in range(0, len(data), LEAF_BYTES)]


class LoadedIndex(NamedTuple):
    """The content of a ledger index."""

    table: LedgerTable
    ledgers: BitMap64  # those of the table without a tombstone
    facts: list[State]  # in the order in which they were stated


class TableLoader:
    """Makes a table from the file of a ledger index: `feed` gets its whole records in order, slice by slice; `finish`
    returns the result.
    """

    def __init__(self) -> None:
        self._leaves: list[bytes] = []
        self._tail: list[bytes] = []  # ascending, above all leaves
        self._tail_bytes = 0
        self._highest = -1
        self._changes: dict[int, bytes] = {}
        self._facts: list[State] = []

    def feed(self, data: bytes) -> list[int]:
        """Adds the records in `data`. Returns the offsets of those that are damaged or cut off, which are left out."""
        bad: list[int] = []
        begin = 0  # of the records that were not taken yet: ascending, above all before
        for at in range(0, len(data), RECORD_BYTES):
            record = data[at : at + RECORD_BYTES]
            if len(record) < RECORD_BYTES:
                bad.append(at)
            else:
                crc, kind, ledger = _HEAD.unpack_from(record)
                if crc32c(record[4:]) != crc:
                    bad.append(at)
                elif kind == FactKind.LEDGER and ledger > self._highest:
                    self._highest = ledger
                    continue
                elif kind == FactKind.LEDGER:
                    self._changes[ledger] = record
                else:
                    self._fact(record, at, bad)
            self._append(data[begin:at])
            begin = at + RECORD_BYTES
        self._append(data[begin:])
        if len(self._changes) > _CHANGES_MAX:
            self._settle()
        return bad

    def _fact(self, record: bytes, at: int, bad: list[int]) -> None:
        fact = ledger_index.intact_record(record)
        if fact is None:
            bad.append(at)
        else:
            self._facts.append(fact)

    def _append(self, records: bytes) -> None:
        self._tail.append(records)
        self._tail_bytes += len(records)
        if self._tail_bytes >= LEAF_BYTES:
            self._cut()

    def _cut(self) -> None:
        tail = b"".join(self._tail)
        self._leaves += [tail[at : at + LEAF_BYTES] for at in range(0, len(tail), LEAF_BYTES)]
        self._tail, self._tail_bytes = [], 0

    def _settle(self) -> LedgerTable:
        self._cut()
        table = LedgerTable(self._leaves).with_ledger_records(self._changes)
        self._leaves, self._changes = table.leaves, {}
        return table

    def finish(self) -> LoadedIndex:
        table = self._settle()
        ledgers = BitMap64()
        for leaf in table.leaves:
            ledgers.update(array("Q", list(LedgerTable([leaf]))))
        for fact in self._facts:
            if isinstance(fact, Tombstone):
                ledgers.remove_range(fact.first, fact.last + 1)
        return LoadedIndex(table, ledgers, self._facts)
