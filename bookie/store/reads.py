"""Reading: active → flushing → read cache → index, and when "no such entry" may be said.

Certainty (invariant 17): NO_SUCH_ENTRY and NO_SUCH_LEDGER are answered only when every place that could hold the entry
was looked at and is whole; damage and I/O errors are UNKNOWN, and so is every miss of a quarantined entry, or of a
ledger that limbo concerns (store/facts.py). No await lies between the look at the memtable and the
look at the index, and a flush moves entries from one to the other in one synchronous step: there is no gap.

A range is one file read: the run of consecutive entries from the first, within one extent, up to `count` and about
`bytes_max`. A single entry reads ahead along its extent into the cache. Guarded by tests/bookie/test_checkpoint.py.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from ...runtime.files import Buffer
from ...runtime.workers import Worker
from ..format.entry_log import EntryIds, entry_ids
from ..format.index import Table
from ..format.peer import Status
from .cache import ReadCache
from .descriptors import Descriptors
from .index import Index, Place, find
from .log_files import LogReader
from .memtable import Memtable

log = logging.getLogger(__name__)


class ReadResult(NamedTuple):
    status: Status
    entries: list[Buffer]  # stored entries `entry`, `entry + 1`, …; none unless OK
    lac: int


class LacResult(NamedTuple):
    status: Status
    lac: int
    last: int


class Reads:
    """The reading side of a store. `worker` reads the files."""

    def __init__(
        self, descriptors: Descriptors, memtable: Memtable, index: Index, reader: LogReader, worker: Worker,
        *, cache_bytes: int, read_ahead_bytes: int, read_bytes_max: int,
    ) -> None:  # fmt: skip
        self._descriptors = descriptors
        self._memtable = memtable
        self._index = index
        self._reader = reader
        self._worker = worker
        self._cache = ReadCache(cache_bytes)
        self._read_ahead_bytes = read_ahead_bytes
        self._read_bytes_max = read_bytes_max
        self.counters = {
            "reads": 0, "read_entries": 0, "read_bytes": 0, "reads_memory": 0, "reads_disk": 0, "damaged": 0,
            "reads_unknown": 0,
        }  # fmt: skip

    def read_lac(self, ledger: int) -> LacResult:
        descriptor = self._descriptors.get(ledger)
        if descriptor is None:
            return LacResult(Status.UNKNOWN if self._in_limbo(ledger) else Status.NO_SUCH_LEDGER, -1, -1)
        return LacResult(Status.OK, descriptor.lac, descriptor.last)

    def _read_memory(self, ledger: int, entry: int, count: int, bytes_max: int) -> ReadResult | None:
        """The answer, when it needs no disk; else None."""
        if self._descriptors.get(ledger) is None and not self._in_limbo(ledger):
            return self._miss(ledger, entry)
        entries: list[Buffer] = []
        size = 0
        while len(entries) < count and (not entries or size < bytes_max):
            found = self._in_memory(ledger, entry + len(entries))
            if found is None:
                break
            entries.append(found)
            size += len(found)
        if entries:
            self._count_read(entries, "reads_memory")
            return ReadResult(Status.OK, entries, self._lac(ledger))
        if next(self._index.candidates(ledger, entry), None) is None:
            return self._miss(ledger, entry)
        return None

    def read_now(self, ledger: int, entry: int, count: int, bytes_max: int) -> ReadResult | None:
        """`read`, when it needs no disk; else None."""
        result = self._read_memory(ledger, entry, count, min(max(bytes_max, 1), self._read_bytes_max))
        self.counters["reads"] += result is not None
        return result

    async def read(self, ledger: int, entry: int, count: int = 1, bytes_max: int = 0) -> ReadResult:
        """Entries `entry`, `entry + 1`, … that lie together: at least one, at most `count`, about `bytes_max`."""
        self.counters["reads"] += 1
        bytes_max = min(max(bytes_max, 1), self._read_bytes_max)
        result = self._read_memory(ledger, entry, count, bytes_max)
        return await self._read_disk(ledger, entry, count, bytes_max) if result is None else result

    async def _read_disk(self, ledger: int, entry: int, count: int, bytes_max: int) -> ReadResult:
        damaged = False
        for place in list(self._index.candidates(ledger, entry)):
            try:
                entries = await self._read_place(place, entry, count, bytes_max)
            except OSError as error:
                log.error("cannot read entry %d of ledger %d from log %d: %s", entry, ledger, place.log, error)
                entries = None
            if entries:
                self._count_read(entries, "reads_disk")
                return ReadResult(Status.OK, entries, self._lac(ledger))
            damaged = damaged or entries is None
        return self._miss(ledger, entry, damaged)

    def _miss(self, ledger: int, entry: int, damaged: bool = False) -> ReadResult:
        """Every place was looked at. `damaged`: one of them does not say what it holds."""
        descriptors = self._descriptors
        lac = self._lac(ledger)
        if ledger in descriptors.tombstones:
            return ReadResult(Status.NO_SUCH_LEDGER, [], -1)
        if damaged or self._in_limbo(ledger) or descriptors.is_quarantined(ledger, entry):
            self.counters["reads_unknown"] += 1
            self.counters["damaged"] += damaged
            return ReadResult(Status.UNKNOWN, [], lac)
        missing = Status.NO_SUCH_LEDGER if descriptors.get(ledger) is None else Status.NO_SUCH_ENTRY
        return ReadResult(missing, [], lac)

    async def _read_place(self, place: Place, entry: int, count: int, bytes_max: int) -> list[Buffer] | None:
        """A run of entries with one read; empty: the entry is not in this extent; None: damaged."""
        table = self._index.table(place)
        if table is None:
            table = await self._worker.run(self._reader.read_table, place)
            if table is None:
                log.error("index table of log %d at %d is damaged", place.log, place.table_offset)
                return None
            self._index.keep_table(place, table)
        first = find(place, table, entry)
        if first is None:
            return []
        end = _run_end(table, first, count, bytes_max)
        ahead = end
        if count == 1:
            ahead = _run_end(table, first, 1 << 20, self._read_ahead_bytes)
        offsets = list(table.offsets[first : ahead + 1])
        records = await self._worker.run(self._reader.read_records, place, offsets)
        return self._accept(place, entry, records, end - first)

    def _accept(self, place: Place, entry: int, records: list[bytes | None], wanted: int) -> list[Buffer] | None:
        """The wanted records up to the first that is damaged or not what the index says; the rest goes to the cache."""
        entries: list[Buffer] = []
        for i, stored in enumerate(records):
            if stored is None or entry_ids(stored) != EntryIds(place.extent.ledger, entry + i):
                log.error("entry %d of ledger %d in log %d is damaged", entry + i, place.extent.ledger, place.log)
                break
            if i < wanted:
                entries.append(stored)
            else:
                self._cache.put(place.extent.ledger, entry + i, stored)
        return entries or None

    def _in_limbo(self, ledger: int) -> bool:
        """Entries of it may be lost, also all of them and its descriptor: only a hit is an answer."""
        return ledger <= self._descriptors.limbo_upto and ledger not in self._descriptors.tombstones

    def _in_memory(self, ledger: int, entry: int) -> Buffer | None:
        stored = self._memtable.get(ledger, entry)
        if stored is None:
            return self._cache.get(ledger, entry)
        return stored[0] if len(stored) == 1 else b"".join(stored)

    def _lac(self, ledger: int) -> int:
        descriptor = self._descriptors.get(ledger)
        return -1 if descriptor is None else descriptor.lac

    def _count_read(self, entries: list[Buffer], where: str) -> None:
        self.counters[where] += 1
        self.counters["read_entries"] += len(entries)
        self.counters["read_bytes"] += sum(map(len, entries))

    def check(self) -> None:
        self._cache.check()

    def statistics(self) -> dict[str, int]:
        return {**self.counters, "read_cache_bytes": self._cache.size_bytes}


def _run_end(table: Table, first: int, count: int, bytes_max: int) -> int:
    """One past the last record of the run of consecutive entries from record `first`."""
    deltas, offsets = table.deltas, table.offsets
    end = first + 1
    limit = min(first + count, len(deltas))
    while end < limit and deltas[end] == deltas[first] + end - first and offsets[end] - offsets[first] < bytes_max:
        end += 1
    return end
