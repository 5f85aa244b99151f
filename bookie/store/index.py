"""The index: which log holds which ledgers in memory, the extents themselves loaded by need, in bounded memory.

    in memory, per log        an exact bitmap of its ledgers; per page of 64 heads of its index file: the first ledger,
                              place and CRC32C of the page, where its tables begin. 29 bytes, half a byte an extent
    in one LRU of bytes_max   *runs*, the extents of one ledger in one log, and tables (entry ids and offsets)

A group (one flush, or one round of compaction) is sorted by ledger, so that pages of a ledger are found by bisection.
The index is a multimap of copies: an entry may be in several extents (replayed after a crash, copied by compaction);
every good copy counts. `add_group` adds a group and drops logs in one synchronous step, so that a reader sees a flush,
a compaction or a deletion whole. It increments `generation`, by which a reader detects the change.

This module reads no file: `find_extents_of_ledger_in_log` says which pages are missing, reads.py loads them in the
read worker. Guarded by tests/bookie/store/test_index.py.

Also in this file, below its heading: a cache of the least recently used values, bounded by bytes (cache).
"""

from __future__ import annotations

import struct
from array import array
from asyncio import Future
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from pyroaring import BitMap64

from ..format.index import (
    EXTENT_HEAD_BYTES,
    GROUP_HEADER_BYTES,
    HEADS_PER_PAGE,
    INDEX_PAGE_BYTES,
    Extent,
    ExtentTable,
    decode_head_columns,
    encode_extent_heads,
    find_ledger_extents,
    make_single_entry_table,
)
from ..format.journal import crc32c

# --------------------------------------------------------------------------------------------------------- cache
# Least recently used values, bounded by bytes: what does not fit is dropped, the oldest first.


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A cache with a bound of `bytes_max`: when it is full, it evicts the value that was not used for the longest time.
    The caller says the size of each value."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """Returns the value of the key; None if there is none. The value counts as used now."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Adds a value of `size` bytes, or replaces the value of this key. Evicts other values if the cache exceeds its
        bound. A value that is larger than the bound is not kept."""
        values = self._values
        old = values.pop(key, None)
        if old is not None:
            self.size_bytes -= old[1]
        values[key] = value, size
        self.size_bytes += size
        while self.size_bytes > self.bytes_max:
            self.size_bytes -= values.popitem(last=False)[1][1]

    def pop(self, key: K) -> None:
        """Removes the value of the key, if there is one."""
        old = self._values.pop(key, None)
        if old is not None:
            self.size_bytes -= old[1]

    def check(self) -> None:
        assert self.size_bytes == sum(size for _, size in self._values.values())
        assert self.size_bytes <= self.bytes_max


# --------------------------------------------------------------------------------------------------------- index


_RUN = struct.Struct(">qqIIQIQ")
_RUN_OVERHEAD_BYTES = 600
"""Approximate memory of a cached value besides its extents, in bytes: the key, the slot and the objects."""


class ExtentLocation(NamedTuple):
    """Where an extent is: the number of its entry log, the head of the extent, and the offset of its table in the log's
    index file."""

    log: int
    extent: Extent
    table_offset: int


class IndexPage(NamedTuple):
    """A page of extent heads in the index file of an entry log: its offset, its number of heads, its checksum, and the
    offset of the table that belongs to its first head."""

    offset: int
    heads: int
    crc: int
    tables_offset: int

    @property
    def size(self) -> int:
        """The size of the page in bytes."""
        return self.heads * EXTENT_HEAD_BYTES


class IndexPages:
    """The pages of extent heads of one or more index groups. Each field of a page is kept in an array, to save
    memory."""

    __slots__ = ("crcs", "heads", "ledgers", "offsets", "tables")

    def __init__(self) -> None:
        self.ledgers = array("q")
        self.offsets = array("Q")
        self.tables = array("Q")
        self.crcs = array("I")
        self.heads = array("B")

    def __len__(self) -> int:
        return len(self.ledgers)

    def extend(self, other: IndexPages) -> None:
        """Adds the pages of `other` after these pages."""
        self.ledgers += other.ledgers
        self.offsets += other.offsets
        self.tables += other.tables
        self.crcs += other.crcs
        self.heads += other.heads

    def get_page(self, at: int) -> IndexPage:
        """Returns the page number `at`, counted from 0."""
        return IndexPage(self.offsets[at], self.heads[at], self.crcs[at], self.tables[at])


class LoadedIndexGroup:
    """The part of an index group that stays in memory: which ledgers it has, and where its pages of extent heads are.
    The group begins at `offset` of the index file of log `log`.

    Made by `LoadedIndexGroup(log, offset, extents)`, or by `LoadedIndexGroup.start_empty` and then `add_extent_heads`,
    in a worker. The extents must be in ascending order of ledgers."""

    __slots__ = ("_heads_offset", "_tables_offset", "extents", "ledgers", "log", "offset", "pages", "reach")

    def __init__(self, log: int, offset: int, extents: Sequence[Extent] = ()) -> None:
        self.log = log
        self.offset = offset
        self.extents = 0
        self.ledgers = BitMap64()
        self.pages = IndexPages()
        self.reach = 0  # where the last of its records ends in the log
        self._heads_offset = self._tables_offset = offset + GROUP_HEADER_BYTES
        if extents:
            self._tables_offset += len(extents) * EXTENT_HEAD_BYTES
            self.add_extent_heads(encode_extent_heads(extents))

    @classmethod
    def start_empty(cls, log: int, offset: int, extents: int) -> LoadedIndexGroup:
        """Returns an empty index group that will have `extents` extents. It may be used when `add_extent_heads` has
        added all extent heads."""
        group = cls(log, offset)
        group._tables_offset += extents * EXTENT_HEAD_BYTES
        return group

    def add_extent_heads(self, heads: bytes) -> None:
        """Adds the next encoded extent heads. `heads` must consist of whole pages of heads, except in the last call.
        Raises ValueError if the heads are not in ascending order of ledgers."""
        columns = decode_head_columns(heads)
        ledgers = columns.ledgers
        in_order = sorted(ledgers)
        if in_order != list(ledgers) or (self.ledgers and in_order[0] < self.ledgers.max()):
            raise ValueError("the extents of a group must ascend by ledger")
        self.ledgers.update(ledgers)
        self.extents += len(ledgers)
        self.reach = max(self.reach, columns.reach)
        pages = self.pages
        for first in range(0, len(ledgers), HEADS_PER_PAGE):
            page = heads[first * EXTENT_HEAD_BYTES : first * EXTENT_HEAD_BYTES + INDEX_PAGE_BYTES]
            count = len(page) // EXTENT_HEAD_BYTES
            pages.ledgers.append(ledgers[first])
            pages.offsets.append(self._heads_offset)
            pages.tables.append(self._tables_offset)
            pages.crcs.append(crc32c(page))
            pages.heads.append(count)
            self._heads_offset += len(page)
            self._tables_offset += 4 * (2 * sum(columns.entries[first : first + count]) + count)

    @property
    def end_offset(self) -> int:
        """Returns the offset in the index file at which this group ends."""
        return self._tables_offset


class LedgerExtents:
    """The extents of one ledger in one entry log, in ascending order of first entries. `groups`: how many index groups
    of the log were searched for them."""

    __slots__ = ("_firsts", "_packed", "_reach", "groups", "ledger", "log")

    def __init__(self, log: int, ledger: int, groups: int, places: Iterable[ExtentLocation]) -> None:
        self.log = log
        self.ledger = ledger
        self.groups = groups
        ordered = sorted((place.extent.first, place.table_offset, place) for place in places)
        self._packed = b"".join(_RUN.pack(*place.extent[1:], offset) for _, offset, place in ordered)
        self._firsts = array("q", [first for first, _, _ in ordered])
        self._reach = array("q")  # largest `last` of all up to here
        for _, _, place in ordered:
            self._reach.append(max(place.extent.last, self._reach[-1] if self._reach else -1))

    def __iter__(self) -> Iterator[ExtentLocation]:
        for first, last, entries, length, start, crc, offset in _RUN.iter_unpack(self._packed):
            yield ExtentLocation(self.log, Extent(self.ledger, first, last, entries, length, start, crc), offset)

    @property
    def first(self) -> int | None:
        """Returns the smallest first entry id of the extents; None if there is no extent."""
        return self._firsts[0] if self._firsts else None

    @property
    def last(self) -> int:
        """Returns the largest last entry id of the extents; -1 if there is no extent."""
        return self._reach[-1] if self._reach else -1

    @property
    def size_bytes(self) -> int:
        """The approximate memory of this object, in bytes."""
        return _RUN_OVERHEAD_BYTES + len(self._packed) + 16 * len(self._firsts)

    def find_extents(self, entry: int) -> list[ExtentLocation]:
        """Returns the locations of the extents that may contain the entry, because it is between their first and their
        last entry. The extent with the largest first entry comes first."""
        found: list[ExtentLocation] = []
        at = bisect_right(self._firsts, entry) - 1
        while at >= 0 and self._reach[at] >= entry:
            first, last, entries, length, start, crc, offset = _RUN.unpack_from(self._packed, at * _RUN.size)
            if last >= entry:
                extent = Extent(self.ledger, first, last, entries, length, start, crc)
                found.append(ExtentLocation(self.log, extent, offset))
            at -= 1
        return found


class MissingIndexPages(NamedTuple):
    """The result of `find_extents_of_ledger_in_log` if pages of the index must be read from the disk first. The extents
    in `pages` and those in `known` together are all extents of the ledger in that log. `groups`: how many index groups
    the log has now."""

    log: int
    ledger: int
    groups: int
    pages: list[IndexPage]
    known: LedgerExtents | None

    def make_ledger_extents(self, found: list[ExtentLocation]) -> LedgerExtents:
        """Returns all extents of the ledger in the log: those that are known, and those `found` in the missing
        pages."""
        return LedgerExtents(self.log, self.ledger, self.groups, [*(self.known or ()), *found])


class _Log:
    __slots__ = ("extents", "ledgers", "pages", "starts")

    def __init__(self) -> None:
        self.ledgers = BitMap64()
        self.pages = IndexPages()
        self.starts: list[int] = []  # the first page of each group
        self.extents = 0

    def add(self, group: LoadedIndexGroup) -> None:
        self.starts.append(len(self.pages))
        self.pages.extend(group.pages)
        self.ledgers |= group.ledgers
        self.extents += group.extents

    def pages_of(self, ledger: int, first_group: int) -> list[IndexPage]:
        """Returns the pages that may have extents of the ledger, in the index group number `first_group` and later
        ones."""
        found: list[IndexPage] = []
        firsts = self.pages.ledgers
        ends = [*self.starts[first_group + 1 :], len(firsts)]
        for start, end in zip(self.starts[first_group:], ends, strict=True):
            high = bisect_right(firsts, ledger, start, end)
            low = bisect_left(firsts, ledger, start, high)
            found += map(self.pages.get_page, range(max(low - 1, start), high))
        return found


class EntryLogIndex:
    """The index of a bookie's entry logs: says which logs and extents may contain an entry. Reads no files. `bytes_max`
    bounds the memory of its cache of extents and tables. `generation` grows with each change of the logs."""

    def __init__(self, bytes_max: int) -> None:
        self._logs: dict[int, _Log] = {}
        self._runs: LruCache[tuple[int, int] | tuple[int, int, None], LedgerExtents | ExtentTable] = LruCache(bytes_max)
        self.generation = 0
        self.loading: dict[tuple[int, int], Future[None]] = {}
        """(log, ledger) → a future that is done when the ledger's extents in the log have been loaded (reads.py)."""

    # ------------------------------------------------------------------------------------ changes
    def add(self, group: LoadedIndexGroup) -> None:
        """Adds an index group, like `add_group`."""
        self.add_group(group, ())

    def add_group(self, group: LoadedIndexGroup | None, drop: Collection[int]) -> None:
        """Adds an index group (None: none) and removes the logs `drop`, in one step without an await: readers see both
        changes or neither."""
        if group is not None and group.extents:
            log = self._logs.get(group.log)
            if log is None:
                log = self._logs[group.log] = _Log()
                self._logs = dict(sorted(self._logs.items()))
            log.add(group)
        for number in drop:
            self._logs.pop(number, None)  # its runs and tables are never asked for again, and age out of the LRU
        self.generation += 1

    # ------------------------------------------------------------------------------------ which logs
    def log_numbers(self) -> list[int]:
        """Returns the numbers of all logs that have entries, in ascending order."""
        return list(self._logs)

    def logs_of_ledger(self, ledger: int) -> list[int]:
        """Returns the numbers of the logs that have entries of the ledger, in ascending order."""
        return [number for number, log in self._logs.items() if ledger in log.ledgers]

    def ledgers_of_log(self, log: int) -> BitMap64:
        """Returns a copy of the set of ledger ids that have entries in the log; an empty set if there is no such
        log."""
        found = self._logs.get(log)
        return BitMap64() if found is None else found.ledgers.copy()

    # ------------------------------------------------------------------------------------ extents
    def find_extents_of_ledger_in_log(self, log: int, ledger: int) -> LedgerExtents | MissingIndexPages:
        """Returns the extents of the ledger in the log. If pages of the index must be read first, returns
        MissingIndexPages, which names them."""
        found = self._logs.get(log)
        if found is None or ledger not in found.ledgers:
            return LedgerExtents(log, ledger, 0, ())
        known = self._runs.get((log, ledger))
        assert known is None or isinstance(known, LedgerExtents)
        groups = len(found.starts)
        if known is not None and known.groups == groups:
            return known
        pages = found.pages_of(ledger, known.groups if known is not None else 0)
        if known is not None and not pages:
            known.groups = groups
            return known
        return MissingIndexPages(log, ledger, groups, pages, known)

    def add_extents_of_ledger(self, run: LedgerExtents) -> None:
        """Adds `run`, the extents of a ledger in a log, which were read from the disk, to the cache."""
        self._runs.put((run.log, run.ledger), run, run.size_bytes)

    def is_entry_certainly_absent(self, ledger: int, entry: int) -> bool:
        """Returns True if no extent in any log can contain the entry. Returns False if one may contain it, or if that
        cannot be decided without reading the disk."""
        for number, log in self._logs.items():
            if ledger in log.ledgers:
                if (number, ledger) not in self._runs:
                    return False
                run = self.find_extents_of_ledger_in_log(number, ledger)
                if isinstance(run, MissingIndexPages) or run.find_extents(entry):
                    return False
        return True

    def find_extents(self, ledger: int, entry: int) -> list[ExtentLocation] | None:
        """Returns the locations of all extents that may contain the entry, those in newer logs first. Returns None if
        pages of the index must be read first."""
        places: list[ExtentLocation] = []
        for log in reversed(self.logs_of_ledger(ledger)):
            run = self.find_extents_of_ledger_in_log(log, ledger)
            if isinstance(run, MissingIndexPages):
                return None
            places += run.find_extents(entry)
        return places

    # ------------------------------------------------------------------------------------ tables
    def get_extent_table(self, place: ExtentLocation) -> ExtentTable | None:
        """Returns the table of the extent at `place`; None if the table is not in memory and must be read."""
        if place.extent.entries == 1:
            return make_single_entry_table(place.extent)
        found = self._runs.get((place.log, place.table_offset, None))
        assert found is None or isinstance(found, ExtentTable)
        return found

    def add_extent_table(self, place: ExtentLocation, table: ExtentTable) -> None:
        """Adds the table of the extent at `place`, which was read from the disk, to the cache. Does nothing for an
        extent with one entry, because its table follows from the head of the extent."""
        if place.extent.entries == 1:
            return  # it follows from the head
        size = place.extent.table_bytes + _RUN_OVERHEAD_BYTES
        self._runs.put((place.log, place.table_offset, None), table, size)

    # ------------------------------------------------------------------------------------ what it holds
    def check(self) -> None:
        """Checks the invariants: the numbers of the logs ascend; the pages of each group ascend by ledger, and the
        ledgers of the pages are in the log's bitmap."""
        assert list(self._logs) == sorted(self._logs)
        for log in self._logs.values():
            assert log.starts
            assert log.starts[0] == 0
            for start, end in zip(log.starts, [*log.starts[1:], len(log.pages)], strict=True):
                firsts = log.pages.ledgers[start:end]
                assert list(firsts) == sorted(firsts)
                assert all(ledger in log.ledgers for ledger in firsts)
            assert sum(log.pages.heads) == log.extents
        self._runs.check()

    def statistics(self) -> dict[str, int]:
        return {
            "index_logs": len(self._logs),
            "index_extents": sum(log.extents for log in self._logs.values()),
            "index_pages": sum(len(log.pages) for log in self._logs.values()),
            "index_cache_bytes": self._runs.size_bytes,
        }


def decode_page(log: int, ledger: int, page: IndexPage, heads: bytes) -> list[ExtentLocation] | None:
    """Returns the extents of the ledger that are encoded in `heads`, the bytes of an index page of log `log`. Returns
    None if the page is damaged."""
    if len(heads) != page.size or crc32c(heads) != page.crc:
        return None
    return [
        ExtentLocation(log, extent, offset) for extent, offset in find_ledger_extents(heads, ledger, page.tables_offset)
    ]


def find_record_number(place: ExtentLocation, table: ExtentTable, entry: int) -> int | None:
    """Returns the number of the extent's record that contains the entry, counted from 0; None if the extent does not
    have the entry."""
    delta = entry - place.extent.first
    at = bisect_left(table.deltas, delta)
    return at if at < len(table.deltas) and table.deltas[at] == delta else None


def find_run_end(table: ExtentTable, first: int, count: int, bytes_max: int) -> int:
    """Finds the end of a run of consecutive entries in an extent. The run begins with record number `first` and has at
    least one entry, at most `count` entries, and about `bytes_max` bytes. Returns the number of the record after the
    run.

    The end is found by bisection: entries ascend, so deltas[i] - i grows at each gap and never shrinks."""
    deltas, offsets = table.deltas, table.offsets
    end = min(first + count, len(deltas))
    end = bisect_left(offsets, offsets[first] + bytes_max, first + 1, end)
    if deltas[end - 1] - deltas[first] != end - 1 - first:
        end = first + bisect_right(range(end - first), deltas[first], key=lambda i: deltas[first + i] - i)
    return end
