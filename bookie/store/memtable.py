"""The memtable: entries that are in the journal, or on their way there, and not yet in an entry log.

It has two tables: new entries are inserted into `active`, while `flushing` is written to an entry log. A read searches
`active`, then `flushing`, then the index. `swap_table` and `discard_flushed_table` are single synchronous steps, and
the flushed entries are in the index before they leave the memtable (store/checkpoint.py). So no reader finds a gap.

Both tables are bounded. No add is admitted (`is_full`) when `active` has reached `bytes_max` while the other table is
flushed, or twice that while the flush waits to begin; after the swap there is room again. So the two tables together
have at most three times `bytes_max`, and one request. Entries are stored as they arrived (a tuple of bytes) and sorted
once, at the flush (147 + 44 ns an entry instead of 1,578 for a sorted map).

An entry whose journal block found no room stays in its table, can be read, and becomes durable with the checkpoint of
that table. Until then, or until the entry is added again and synced, it does not count as stored: it is in
`refused_runs_of_ledger`.

Also in this file, below its heading: a set of integers as disjoint intervals, ascending (intervals).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

# ----------------------------------------------------------------------------------------------------- intervals
# A set of integers as disjoint intervals, ascending; neighbours are merged: ids that come in order cost nothing.


class IntegerIntervals:
    """A set of integers, stored as disjoint intervals in ascending order."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def copy(self) -> IntegerIntervals:
        """Returns a copy, which later changes of this set do not affect."""
        new = IntegerIntervals()
        new._firsts, new._lasts = self._firsts[:], self._lasts[:]
        return new

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._firsts, value) - 1
        return at >= 0 and value <= self._lasts[at]

    def __len__(self) -> int:
        """Returns the number of intervals."""
        return len(self._firsts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields (first, last) of each interval, in ascending order."""
        return zip(self._firsts, self._lasts, strict=True)

    def add(self, first: int, last: int) -> None:
        """Adds all integers from `first` to `last`, both included."""
        assert first <= last
        low = bisect_left(self._lasts, first - 1)
        high = bisect_right(self._firsts, last + 1)
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]

    def remove(self, first: int, last: int) -> None:
        """Removes all integers from `first` to `last`, both included. Does nothing for those that are not in the
        set."""
        assert first <= last
        low = bisect_left(self._lasts, first)
        high = bisect_right(self._firsts, last)
        if low >= high:
            return
        kept = [(self._firsts[low], first - 1), (last + 1, self._lasts[high - 1])]
        kept = [(a, b) for a, b in kept if a <= b]
        self._firsts[low:high] = [a for a, _ in kept]
        self._lasts[low:high] = [b for _, b in kept]

    def intersect(self, first: int, last: int) -> list[tuple[int, int]]:
        """Returns the part of the set within `first … last`, as (first, last) pairs in ascending order."""
        low = bisect_left(self._lasts, first)
        high = bisect_right(self._firsts, last)
        return [(max(self._firsts[i], first), min(self._lasts[i], last)) for i in range(low, high)]

    def check(self) -> None:
        """Checks the invariants: no interval is empty; the intervals ascend, and neither overlap nor touch."""
        assert all(first <= last for first, last in self)
        assert all(a[1] + 1 < b[0] for a, b in pairwise(self))


# ------------------------------------------------------------------------------------------------------ memtable


EntryPieces = tuple[bytes, ...]
"""A stored entry in one or more pieces."""
MEMTABLES_MAX = 3
"""Both tables together have at most this multiple of `bytes_max`, besides one request."""
ENTRY_MEMORY_BYTES = 200
"""Approximate memory of an entry besides its bytes: the slot, the key, the tuple and the bytes objects of CPython."""
LEDGER_MEMORY_BYTES = 400
"""Approximate memory that the first entry of a ledger needs in addition: a dictionary, and a changed descriptor."""
ENTRIES_RELEASED_PER_SLICE = 256


class EntryTable:
    """One of the two tables of the memtable: stored entries, by ledger and entry id."""

    __slots__ = ("entries", "ledgers", "refused", "size_bytes")

    def __init__(self) -> None:
        self.ledgers: dict[int, dict[int, EntryPieces]] = {}
        self.refused: dict[int, IntegerIntervals] = {}  # of those, what the journal had no room for
        self.size_bytes = 0
        self.entries = 0

    def entries_of_ledger(self, ledger: int) -> dict[int, EntryPieces]:
        """Returns the dictionary of the ledger's entries (entry id → stored entry), which may be empty. A caller that
        adds entries to it must call `count_added_entries` afterwards."""
        entries = self.ledgers.get(ledger)
        if entries is None:
            entries = self.ledgers[ledger] = {}
            self.size_bytes += LEDGER_MEMORY_BYTES
        return entries

    def count_added_entries(self, count: int, size: int) -> None:
        """Counts `count` entries, of `size` bytes together, that the caller has added to the table.

        An entry that replaces an earlier one is counted again, so the counters may be too high, never too low."""
        self.size_bytes += size + count * ENTRY_MEMORY_BYTES
        self.entries += count


class Memtable:
    """The entries that are in memory and not yet in an entry log. `bytes_max`: the size of a table, in bytes, at which
    it should be flushed. The active table gets new entries; a second table exists while its entries are written to the
    log."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.active = EntryTable()
        self.flushing: EntryTable | None = None

    @property
    def is_flush_due(self) -> bool:
        """Returns whether the active table has reached its bound, so that a checkpoint should begin."""
        return self.active.size_bytes >= self.bytes_max

    @property
    def is_full(self) -> bool:
        """Returns whether no add may be admitted: the active table has reached `bytes_max` while the other table is
        flushed, or twice that while none is."""
        return self.active.size_bytes >= (2 * self.bytes_max if self.flushing is None else self.bytes_max)

    @property
    def size_bytes(self) -> int:
        """The approximate memory of both tables, in bytes."""
        return self.active.size_bytes + (self.flushing.size_bytes if self.flushing else 0)

    def insert_entries(self, ledger: int, entries: Sequence[tuple[int, EntryPieces, int]], size: int) -> int:
        """Inserts entries of a ledger, given as (entry id, stored entry, size in bytes), into the active table. `size`
        is the sum of the sizes. Returns the largest entry id."""
        active = self.active
        table = active.ledgers.get(ledger)
        if table is None:
            table = active.entries_of_ledger(ledger)
        last = -1
        for entry, stored, _ in entries:
            table[entry] = stored
            if entry > last:
                last = entry
        active.size_bytes += size + len(entries) * ENTRY_MEMORY_BYTES
        active.entries += len(entries)
        return last

    def get(self, ledger: int, entry: int) -> EntryPieces | None:
        """Returns the stored entry; None if it is not in memory."""
        found = self.active.ledgers.get(ledger, _NONE).get(entry)
        if found is None and self.flushing is not None:
            found = self.flushing.ledgers.get(ledger, _NONE).get(entry)
        return found

    # ------------------------------------------------------------------------------------ what the journal refused
    @property
    def _tables(self) -> list[EntryTable]:
        return [self.active] if self.flushing is None else [self.active, self.flushing]

    @property
    def has_refused_entries(self) -> bool:
        """Returns whether any entry is only in memory, because the journal had no room for it."""
        return bool(self.active.refused) or (self.flushing is not None and bool(self.flushing.refused))

    def mark_refused_by_journal(self, ledger: int, entries: Iterable[int]) -> None:
        """Marks these entries as refused: the journal had no room for them, so they are only in memory."""
        for table in self._tables:
            held = table.ledgers.get(ledger, _NONE)
            for entry in entries:
                if entry in held:
                    table.refused.setdefault(ledger, IntegerIntervals()).add(entry, entry)

    def mark_durable(self, ledger: int, entries: Iterable[int]) -> None:
        """Removes the mark of `mark_refused_by_journal` from these entries, because they were added again and are
        durable now."""
        for table in self._tables:
            refused = table.refused.get(ledger)
            if refused is None:
                continue
            for entry in entries:
                refused.remove(entry, entry)
            if not len(refused):
                del table.refused[ledger]

    def refused_runs_of_ledger(self, ledger: int) -> list[tuple[int, int]]:
        """Returns (first, last) of each run of the ledger's entries that are only in memory, because the journal had no
        room for them."""
        return [run for table in self._tables for run in table.refused.get(ledger, ())]

    # ------------------------------------------------------------------------------------ a flush
    def swap_table(self) -> EntryTable:
        """Makes the active table the one that is flushed, with an empty active table in its place. Returns the table to
        flush. The last flush must have ended."""
        assert self.flushing is None, "the last flush has not ended"
        self.flushing, self.active = self.active, EntryTable()
        return self.flushing

    def discard_flushed_table(self) -> None:
        """Removes the flushed table. Its entries must be in the index already, so that readers find them."""
        self.flushing = None

    def discard(self, ledger: int) -> None:
        """Removes the entries of a ledger from the active table, because the ledger was deleted. Those in the flushing
        table stay until it is flushed."""
        self.active.ledgers.pop(ledger, None)
        self.active.refused.pop(ledger, None)

    def check(self) -> None:
        """Checks the invariants: no size is negative, no ledger in a table is without entries, and each refused entry
        is in its table."""
        for table in self._tables:
            assert table.size_bytes >= 0
            assert all(table.ledgers.values())
            for ledger, refused in table.refused.items():
                assert len(refused)
                assert all(entry in table.ledgers[ledger] for low, high in refused for entry in range(low, high + 1))


_NONE: dict[int, EntryPieces] = {}


def clear_in_steps(values: dict[int, Any]) -> Iterator[None]:
    """Empties the dictionary `values` and the dictionaries in it. Each step of the iterator removes one to two times
    ENTRIES_RELEASED_PER_SLICE values.

    Removing 50,000 entries of 1 KiB at once would keep the interpreter for 10 ms, in any thread, while the event loop
    waits."""
    freed = 0
    while values:
        _, value = values.popitem()
        freed += 1
        while isinstance(value, dict) and value:
            some = min(len(value), ENTRIES_RELEASED_PER_SLICE)
            for _ in range(some):
                value.popitem()
            freed += some
            if freed >= ENTRIES_RELEASED_PER_SLICE:
                freed = 0
                yield
        if freed >= ENTRIES_RELEASED_PER_SLICE:
            freed = 0
            yield
