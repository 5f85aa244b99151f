"""Reads of a store: where an entry is searched, and when the answer may be "no such entry".

The places are searched in this order: the active table of the memtable, the flushing one, the read cache, the index.

Certainty (invariant 17): NO_SUCH_ENTRY and NO_SUCH_LEDGER are answered only when every place that could hold the entry
was searched and is whole. Damage and I/O errors are UNKNOWN, and so is every miss of a quarantined entry, or of a
ledger that limbo concerns (state_log.py).

A flush moves entries from memory to the index, and compaction from log to log, in one synchronous step each. Memory and
`EntryLogIndex.generation` are read without an await in between. If the generation has changed after all places were
searched, the entry may have moved from a place not yet searched to one already searched, and the search is repeated: so
there is no gap.

A range is one file read: the run of consecutive entries from the first, within one extent, up to `count` and about
`bytes_max`. When more was asked for, the following entries are read ahead, in bounded memory (`ReadAhead`). A single
entry reads ahead along its extent into the cache. Guarded by tests/bookie/store/test_reads.py and
tests/bookie/store/test_checkpoint.py.

**The search for an entry in the index** (`EntrySearch`): the order of the logs, and what damage means. Entries of a
ledger mostly ascend with the numbers of the logs, so the logs are bisected first: a hit needs a few of them. Any good
copy counts. A miss needs all logs: the others follow, newest first. A page that cannot be read or does not match its
checksum makes `damaged` true: then the answer must not be NO_SUCH_ENTRY. Pages are read when needed, in the read
worker, in slices of `INDEX_PAGES_PER_SLICE`, so that other reads run in between.

`StoredEntryFinder` finds which entries of a range the bookie has. Guarded by tests/bookie/store/test_index.py.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future, wait
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Sequence, Set
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from ...ledger.peer_format import Status
from ...runtime.descriptors import NO_DESCRIPTOR_ERRORS
from ...runtime.files import Buffer
from ...runtime.tasks import Worker
from ..format.index import Extent, ExtentTable
from . import disk
from .entrylog.files import EntryLogReader, ExtentReadResult
from .index import (
    EntryLogIndex,
    ExtentLocation,
    LedgerExtents,
    LruCache,
    MissingIndexPages,
    find_record_number,
    find_run_end,
)
from .index_files import LedgerDescriptors
from .memtable import ENTRY_MEMORY_BYTES, IntegerIntervals, Memtable

INDEX_PAGES_PER_SLICE = 64


class EntrySearch:
    """A search for one entry in the entry logs. The caller calls `next_extent_to_search` and reads the extent that it
    returns, until the entry is found or the result is None. `damaged`: whether a part of the index could not be read;
    then a search without result does not prove that the entry is missing."""

    def __init__(self, index: EntryLogIndex, reader: EntryLogReader, worker: Worker, ledger: int, entry: int) -> None:
        self._index = index
        self._reader = reader
        self._worker = worker
        self._ledger = ledger
        self._entry = entry
        self._logs = index.logs_of_ledger(ledger)
        self._low, self._high = 0, len(self._logs)  # where the bisection goes on
        self._found: list[ExtentLocation] = []
        self.damaged = False

    async def next_extent_to_search(self) -> ExtentLocation | None:
        """Returns the location of the next extent that may contain the entry, the likeliest one first. Returns None
        when there is no further extent. Raises OSError if no file descriptor is free."""
        while not self._found:
            if not self._logs:
                return None
            bisecting = self._low < self._high
            at = (self._low + self._high) // 2 if bisecting else len(self._logs) - 1
            run = await self._run(self._logs.pop(at))
            self._found = run.find_extents(self._entry)
            self._high -= bisecting
            if bisecting:
                self._narrow(at, run)
        return self._found.pop(0)

    def _narrow(self, at: int, run: LedgerExtents) -> None:
        """Narrows the bisection over the logs by `run`, the ledger's extents in the log number `at` of the list."""
        if run.first is None or self._entry < run.first:
            self._high = at
        elif self._entry > run.last:
            self._low = at
        else:
            self._low = self._high

    async def _run(self, number: int) -> LedgerExtents:
        run, whole = await load_extents_of_ledger(self._index, self._reader, self._worker, number, self._ledger)
        self.damaged = self.damaged or not whole
        return run


async def load_extents_of_ledger(
    index: EntryLogIndex, reader: EntryLogReader, worker: Worker, number: int, ledger: int
) -> tuple[LedgerExtents, bool]:
    """Returns (the extents of the ledger in log `number`, whether these are all of them). Reads missing index pages
    from the disk and caches a complete result; extents in damaged pages are left out. If another caller is just loading
    the same extents, waits for that one. Raises OSError if no file descriptor is free."""
    missing = index.find_extents_of_ledger_in_log(number, ledger)
    if isinstance(missing, MissingIndexPages) and (other := index.loading.get((number, ledger))) is not None:
        await asyncio.wait([other])
        # of damaged pages, or a group that came meanwhile, it is not all
        missing = index.find_extents_of_ledger_in_log(number, ledger)
    if isinstance(missing, LedgerExtents):
        return missing, True
    loaded = index.loading[number, ledger] = asyncio.get_running_loop().create_future()
    try:
        return await _load(index, reader, worker, missing)
    finally:
        loaded.set_result(None)
        if index.loading.get((number, ledger)) is loaded:
            del index.loading[number, ledger]


async def _load(
    index: EntryLogIndex, reader: EntryLogReader, worker: Worker, missing: MissingIndexPages
) -> tuple[LedgerExtents, bool]:
    found: list[ExtentLocation] = []
    whole = True
    for first in range(0, len(missing.pages), INDEX_PAGES_PER_SLICE):
        pages = missing.pages[first : first + INDEX_PAGES_PER_SLICE]
        try:
            places, bad = await worker.run(reader.read_pages, missing.log, missing.ledger, pages)
        except OSError as error:
            disk.raise_if_out_of_descriptors(error)
            _LOG.error("cannot read the index of log %d: %s", missing.log, error)
            places, bad = [], len(pages)
        found += places
        whole = whole and not bad
    run = missing.make_ledger_extents(found)
    if whole:
        index.add_extents_of_ledger(run)
    return run, whole


# ---------------------------------------------------------------------------------------------------------- held
# The lookup of the entries that the store holds durably of a ledger, without a read of their data: memtable, then the
# index.
#
# A repair that gets the answer "held" makes no other copy, names this bookie in the ledger's record, and lets the last
# other copy be deleted (bookie/maintenance). So an entry is held when it is in the index, which a mark covers, or when
# it is in memory and the journal is synced after the lookup: `find_stored_entries` seals before it returns. An entry
# for which the journal had no room is not held until a checkpoint has moved it into the log
# (`Memtable.refused_runs_of_ledger`), even if an older copy is in a log.
#
# The lookup takes memory first and the index next. A flush moves entries from memory to the index, and after a
# compaction the index is read again (`EntryLogIndex.generation`), so no entry is missed. Extents without gaps cost a
# read of their head; those of a striped ledger cost their table. An extent whose table is damaged counts as not held.
# Quarantined entries are not held, unless memory has them again, which is how they are repaired. Nothing of a ledger is
# held while its copies are being dropped (`Store.dropping`). Guards: tests/bookie/store/test_held.py.


class StoredEntryFinder:
    """Finds which entries of a ledger this bookie has durably stored. Calling `sealed` writes everything that was
    enqueued to the journal, and waits until that is done."""

    def __init__(
        self, descriptors: LedgerDescriptors, memtable: Memtable, index: EntryLogIndex, reader: EntryLogReader,
        worker: Worker,
        sealed: Callable[[], Awaitable[bool]],
        dropping: Set[int],
    ) -> None:  # fmt: skip
        self._dropping = dropping
        self._sealed = sealed
        self._descriptors = descriptors
        self._memtable = memtable
        self._index = index
        self._reader = reader
        self._worker = worker

    async def find_stored_entries(self, ledger: int, first: int, last: int) -> IntegerIntervals:
        """Returns which of the entries `first … last` of the ledger are durable here; none if the ledger is deleted, or
        its copies are being dropped.
        Does not read the entries. Leaves out entries that are quarantined, or whose index cannot be read. Waits for the
        journal if some entries are only in memory."""
        while True:
            if ledger in self._descriptors.tombstones or ledger in self._dropping:
                return IntegerIntervals()
            generation = self._index.generation
            memory = self._in_memory(ledger, first, last)
            found = IntegerIntervals()
            for number in self._index.logs_of_ledger(ledger):
                try:
                    extents, _ = await load_extents_of_ledger(self._index, self._reader, self._worker, number, ledger)
                except OSError as error:  # no descriptor is free: not held, as far as it is known
                    _LOG.warning("cannot read the index of log %d: %s", number, error)
                    continue
                for place in extents:
                    if place.extent.first <= last and place.extent.last >= first:
                        await self._add(found, place, first, last)
            if generation == self._index.generation:
                break
        for run in self._descriptors.quarantined_runs_of_ledger(ledger):
            found.remove(*run)
        for run in memory:
            found.add(*run)
        if len(memory):
            await self._sealed()  # they were enqueued before the look
        for run in self._memtable.refused_runs_of_ledger(ledger):
            found.remove(*run)
        return IntegerIntervals() if ledger in self._dropping else found

    def _in_memory(self, ledger: int, first: int, last: int) -> IntegerIntervals:
        found = IntegerIntervals()
        for table in (self._memtable.flushing, self._memtable.active):
            entries = {} if table is None else table.ledgers.get(ledger, {})
            for entry in sorted(entry for entry in entries if first <= entry <= last):
                found.add(entry, entry)
        return found

    async def _add(self, found: IntegerIntervals, place: ExtentLocation, first: int, last: int) -> None:
        extent = place.extent
        if extent.entries == extent.last - extent.first + 1:
            found.add(max(first, extent.first), min(last, extent.last))
            return
        table = self._index.get_extent_table(place)
        if table is None:
            try:
                table = await self._worker.run(self._reader.read_table, place)
            except OSError as error:
                _LOG.error("cannot read the index of log %d: %s", place.log, error)
            if table is None:
                return
            self._index.add_extent_table(place, table)
        for delta in table.deltas:
            if first <= extent.first + delta <= last:
                found.add(extent.first + delta, extent.first + delta)


# ---------------------------------------------------------------------------------------------------- read_ahead
# Read-ahead after a range that was asked for, so that the disk works while the last answer is on its way.
#
# A reader that got fewer entries than it asked for asks again for the next ones. For this reader a *stream* is kept
# under (ledger, next entry): entries that were read, and up to `CHUNKS_AHEAD_MAX` reads of chunks after them that are
# under way. The next read takes the stream and the entries that it needs, and another chunk is begun. Chunks go to the
# `READ_AHEAD_LANES` in turn, so that the disk reads one while entries are cut out of another. Single reads have a
# worker of their own and wait for no chunk. When an extent is begun, the table of the next one is loaded. Several
# readers of a ledger have a stream each.
#
# Streams share `bytes_max`; the least recently used is dropped first. In addition each lane has memory for one chunk.
# With more readers than fit, the chunks get smaller, and below an eighth (`CHUNK_SHRINK_DIVISOR_MAX`) nothing is read
# ahead, so that no disk work is wasted. Entries never change, so a stream can be old but not wrong. Where anything is
# uncertain (no known extent, damage, an error) it ends, and the reader looks the entry up in the ordinary way. Guarded
# by tests/bookie/store/test_reads.py.


CHUNK_SHRINK_DIVISOR_MAX = 8
READ_AHEAD_LANES = 2
CHUNKS_AHEAD_MAX = 3
"""The largest number of chunks of a stream: one for each lane, and one that is read, so that the lanes work on while
the event loop hands out the first."""
LANE_FILES_MAX = 16
"""The largest number of open files of each lane. A read of one more log must open a file."""
_ENTRIES_MAX = 1 << 20


class ReadAheadWorker(NamedTuple):
    """A worker thread that reads chunks ahead, with an EntryLogReader of its own."""

    reader: EntryLogReader
    worker: Worker


class ReadAheadChunk(NamedTuple):
    """Consecutive entries, from `entry` on, that are being read ahead. `entries`: how many entries are expected; None:
    unknown until they are read. `read`: the future of the result."""

    entry: int
    entries: int | None
    read: Future[ExtentReadResult]


class ReadAheadStream:
    """The stream of one client that reads a ledger in order: entries that are read and ready, and after them chunks
    that are still being read. Each chunk begins where the previous one ends; the next chunk begins at entry `after`."""

    __slots__ = ("_at", "_ends", "_ready", "after", "chunks", "place", "ready_bytes")

    def __init__(self, entry: int) -> None:
        self._ready: list[bytes] = []
        self._ends = [0]  # bytes of the entries before each, and of all
        self._at = 0
        self.ready_bytes = 0
        self.chunks: deque[ReadAheadChunk] = deque()
        self.after: int | None = entry  # None: known when the last chunk has arrived
        self.place: ExtentLocation | None = None  # the extent of the last chunk

    @property
    def ready_entries(self) -> int:
        """Returns the number of entries that are ready to be taken."""
        return len(self._ready) - self._at

    @property
    def may_accept_chunk(self) -> bool:
        """Returns whether `make_first_chunk_ready` may be called: no entry is ready, and the first chunk has been
        read."""
        return not self.ready_entries and bool(self.chunks) and self.chunks[0].read.done()

    def make_first_chunk_ready(self) -> None:
        """Makes the entries of the first chunk ready; none if its read failed. If the chunk has another number of
        entries than expected, drops the chunks after it, because they do not begin where it ends."""
        assert not self.ready_entries
        entry, expected, read = self.chunks.popleft()
        self._ready, self._at, self.ready_bytes = [], 0, 0
        if not read.cancelled() and read.exception() is None:
            self._ready = read.result().entries
            self._ends = list(accumulate(map(len, self._ready), initial=0))
            self.ready_bytes = self._ends[-1]
        if not self._ready or (expected is not None and expected != len(self._ready)):
            self.chunks.clear()
            self.after = None
        elif expected is None:
            self.after = entry + len(self._ready)

    def take_entries(self, count: int, bytes_max: int) -> list[Buffer]:
        """Removes and returns ready entries, in order: at most `count`, of about `bytes_max` bytes together, but at
        least one if any is ready. Returns [] if none is ready."""
        if not self.ready_entries:
            return []
        before = self._ends[self._at]
        end = min(self._at + count, len(self._ready), bisect_left(self._ends, before + bytes_max, self._at + 1))
        taken = list[Buffer](self._ready[self._at : end])
        self._at = end
        self.ready_bytes = self._ends[-1] - self._ends[end]
        return taken


class ReadAhead:
    """Reads entries ahead for clients that read a ledger in order. The entries that are kept need at most `bytes_max`
    bytes of memory; each read fetches up to `chunk_bytes`."""

    def __init__(
        self, index: EntryLogIndex, lanes: Sequence[ReadAheadWorker], bytes_max: int, chunk_bytes: int
    ) -> None:
        self._index = index
        self._lanes = deque(lanes)
        self._chunk_bytes = chunk_bytes
        self._streams: LruCache[tuple[int, int], ReadAheadStream] = LruCache(bytes_max)

    def take_read_ahead_stream(self, ledger: int, entry: int) -> ReadAheadStream | None:
        """Removes and returns the stream whose next entry is `entry`; None if there is no such stream. The caller owns
        the stream from then on."""
        stream = self._streams.get((ledger, entry))
        if stream is not None:
            self._streams.pop((ledger, entry))
        return stream

    def read_ahead(self, ledger: int, entry: int, stream: ReadAheadStream | None) -> None:
        """Starts to read more chunks of `stream` (None: of a new stream), up to CHUNKS_AHEAD_MAX, and keeps the stream
        for the client's next read, which is expected to begin at `entry`."""
        chunk = min(self._chunk_bytes, self._streams.bytes_max // ((1 + CHUNKS_AHEAD_MAX) * (len(self._streams) + 1)))
        if stream is None:
            stream = ReadAheadStream(entry)
        while (
            chunk * CHUNK_SHRINK_DIVISOR_MAX >= self._chunk_bytes
            and len(stream.chunks) < CHUNKS_AHEAD_MAX
            and stream.after is not None
        ):
            self._read_on(stream, ledger, stream.after, chunk)
        if stream.chunks or stream.ready_entries:
            size = stream.ready_bytes + stream.ready_entries * ENTRY_MEMORY_BYTES + len(stream.chunks) * chunk
            self._streams.put((ledger, entry), stream, size)

    def _read_on(self, stream: ReadAheadStream, ledger: int, entry: int, chunk: int) -> None:
        """Starts to read one more chunk of the stream, from `entry` on. Does nothing if pages of the index would have
        to be read first."""
        stream.after = None
        places = self._index.find_extents(ledger, entry)
        if not places:
            return
        place, entries = places[0], None
        table = self._index.get_extent_table(place)
        if table is not None:
            first = find_record_number(place, table, entry)
            if first is None:
                return
            entries = find_run_end(table, first, _ENTRIES_MAX, chunk) - first
            stream.after = entry + entries
        lane = self._next_lane()
        read = lane.worker.run(lane.reader.read_entries, place, table, entry, _ENTRIES_MAX, chunk)
        read.add_done_callback(partial(self._arrived, place))
        stream.chunks.append(ReadAheadChunk(entry, entries, read))
        if place != stream.place:
            stream.place = place
            self._load_table(ledger, place.extent.last + 1)

    def _load_table(self, ledger: int, entry: int) -> None:
        """Reads the table of the extent with this entry, because without the table only the first chunk of the extent
        can be read ahead."""
        places = self._index.find_extents(ledger, entry)
        if places and self._index.get_extent_table(places[0]) is None:
            lane = self._next_lane()
            lane.worker.run(lane.reader.read_table, places[0]).add_done_callback(partial(self._loaded, places[0]))

    def _next_lane(self) -> ReadAheadWorker:
        self._lanes.rotate()
        return self._lanes[0]

    def _arrived(self, place: ExtentLocation, done: Future[ExtentReadResult]) -> None:
        """Called when a chunk was read: caches the extent's table, also if the stream was dropped. Ignores errors: the
        client's next read then reads in the ordinary way."""
        if not done.cancelled() and done.exception() is None:
            self._keep(place, done.result().table)

    def _loaded(self, place: ExtentLocation, done: Future[ExtentTable | None]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._keep(place, done.result())

    def _keep(self, place: ExtentLocation, table: ExtentTable | None) -> None:
        if table is not None and self._index.get_extent_table(place) is None:
            self._index.add_extent_table(place, table)

    async def close_log(self, log: int) -> None:
        """Waits for the reads that are queued, then closes the open files of a log, which is about to be removed."""
        for lane in list(self._lanes):
            await lane.worker.run(lane.reader.close_log, log)

    async def close(self) -> None:
        """Waits until the reads that were started have ended, then closes the files."""
        for lane in list(self._lanes):
            await lane.worker.run(lane.reader.close)

    @property
    def size_bytes(self) -> int:
        """The approximate memory of the entries that are kept, in bytes, with those that are being read."""
        return self._streams.size_bytes

    def check(self) -> None:
        self._streams.check()


# --------------------------------------------------------------------------------------------------------- reads


_LOG = logging.getLogger("magnetar.bookie.store.reads")


class ReadResult(NamedTuple):
    """The result of a read: its status, consecutive stored entries (none unless the status is OK), and the ledger's
    last-add-confirmed (LAC; -1: unknown)."""

    status: Status
    entries: list[Buffer]  # stored entries `entry`, `entry + 1`, …; none unless OK
    lac: int


class LacResult(NamedTuple):
    """The result of reading a ledger's last-add-confirmed (LAC): the status, the LAC, and the id of the last stored
    entry (-1: none)."""

    status: Status
    lac: int
    last: int


class StoreReader:
    """Answers the reads of a store. `worker` reads files with `reader`; the workers `lanes` read ahead. `cache_bytes`
    bounds the memory for entries that were read ahead: half of it for reads of single entries, half for ranges."""

    def __init__(
        self, descriptors: LedgerDescriptors, memtable: Memtable, index: EntryLogIndex, reader: EntryLogReader,
        worker: Worker,
        lanes: Sequence[ReadAheadWorker], *, cache_bytes: int, read_ahead_bytes: int, chunk_bytes: int,
        read_bytes_max: int,
    ) -> None:  # fmt: skip
        self._descriptors = descriptors
        self._memtable = memtable
        self._index = index
        self._reader = reader
        self._worker = worker
        self._cache = LruCache[tuple[int, int], bytes](cache_bytes // 2)
        self._ahead = ReadAhead(index, lanes, cache_bytes - cache_bytes // 2, chunk_bytes)
        self._read_ahead_bytes = read_ahead_bytes
        self._read_bytes_max = read_bytes_max
        self.counters = {
            "reads": 0, "read_entries": 0, "read_bytes": 0, "reads_memory": 0, "reads_ahead": 0, "reads_disk": 0,
            "reads_unknown": 0, "reads_busy": 0, "damaged": 0,
        }  # fmt: skip

    def read_lac(self, ledger: int) -> LacResult:
        """Returns the ledger's last-add-confirmed (LAC). The status is NO_SUCH_LEDGER if the ledger is unknown here. It
        is UNKNOWN for a ledger in limbo: the bookie may have lost a larger LAC, and a recovery would trust any other
        answer."""
        descriptor = self._descriptors.get(ledger)
        if self._in_limbo(ledger):
            return LacResult(Status.UNKNOWN, -1, -1)
        if descriptor is None:
            return LacResult(Status.NO_SUCH_LEDGER, -1, -1)
        return LacResult(Status.OK, descriptor.lac, descriptor.last)

    def _read_memory(self, ledger: int, entry: int, count: int, bytes_max: int) -> ReadResult | None:
        """Returns the result of a read if memory alone determines it; None if the disk must be read."""
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
        return self._miss(ledger, entry) if self._index.is_entry_certainly_absent(ledger, entry) else None

    def read_from_memory(self, ledger: int, entry: int, count: int, bytes_max: int) -> ReadResult | None:
        """Reads entries like `read_entries` if that needs no disk access now. Returns None if it does."""
        bytes_max = min(max(bytes_max, 1), self._read_bytes_max)
        result = self._read_memory(ledger, entry, count, bytes_max)
        if result is None:
            stream = self._ahead.take_read_ahead_stream(ledger, entry)
            if stream is not None:
                if stream.may_accept_chunk:
                    stream.make_first_chunk_ready()
                result = self._read_stream(stream, ledger, entry, count, bytes_max)
        self.counters["reads"] += result is not None
        return result

    async def read_entries(self, ledger: int, entry: int, count: int = 1, bytes_max: int = 0) -> ReadResult:
        """Reads the consecutive entries `entry`, `entry + 1`, …: at least one, at most `count`, of about `bytes_max`
        bytes together (never more than the `read_bytes_max` of the store). If the first of them cannot be returned, the
        status says why, and the result has no entries.

        NO_SUCH_ENTRY and NO_SUCH_LEDGER: it is certain that the entry is not here. UNKNOWN: it may be here, but damaged
        or lost. BUSY: no file descriptor is free, which says nothing about the entry."""
        self.counters["reads"] += 1
        bytes_max = min(max(bytes_max, 1), self._read_bytes_max)
        result = self._read_memory(ledger, entry, count, bytes_max)
        if result is None:
            stream = self._ahead.take_read_ahead_stream(ledger, entry)
            if stream is not None:
                result = await self._read_ahead(stream, ledger, entry, count, bytes_max)
                if result is None:
                    result = self._read_memory(ledger, entry, count, bytes_max)
            try:
                while result is None:
                    result = await self._read_disk(ledger, entry, count, bytes_max)
                    if result is None:
                        result = self._read_memory(ledger, entry, count, bytes_max)
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR_ERRORS:
                    raise
                self.counters["reads_busy"] += 1
                return ReadResult(Status.BUSY, [], -1)
        return result

    async def _read_ahead(
        self, stream: ReadAheadStream, ledger: int, entry: int, count: int, bytes_max: int
    ) -> ReadResult | None:
        if not stream.ready_entries and stream.chunks:
            await wait([stream.chunks[0].read])
            stream.make_first_chunk_ready()
        return self._read_stream(stream, ledger, entry, count, bytes_max)

    def _read_stream(self, stream: ReadAheadStream, ledger: int, entry: int, count: int,
        bytes_max: int) -> ReadResult | None:
        """Returns ready entries of a stream that the caller owns, and makes the stream go on after them. Returns None
        if no entry is ready."""
        entries = stream.take_entries(count, bytes_max)
        size = sum(map(len, entries))
        # else each chunk costs its reader an answer
        while stream.may_accept_chunk and len(entries) < count and size < bytes_max:
            stream.make_first_chunk_ready()
            more = stream.take_entries(count - len(entries), bytes_max - size)
            entries += more
            size += sum(map(len, more))
        if entries or stream.chunks:
            self._ahead.read_ahead(ledger, entry + len(entries), stream)
        if not entries:
            return None
        self._count_read(entries, "reads_ahead")
        return ReadResult(Status.OK, entries, self._lac(ledger))

    async def _read_disk(self, ledger: int, entry: int, count: int, bytes_max: int) -> ReadResult | None:
        """Searches the entry logs and reads the entries. The caller must have searched memory in the same step, without
        an await in between. Returns None if the index has changed meanwhile."""
        generation = self._index.generation
        search = EntrySearch(self._index, self._reader, self._worker, ledger, entry)
        damaged = False
        while (place := await search.next_extent_to_search()) is not None:
            found = await self._read_place(place, entry, count, bytes_max)
            if found.entries:
                entries = list[Buffer](found.entries)
                self._count_read(entries, "reads_disk")
                if 1 < count > len(entries):
                    self._ahead.read_ahead(ledger, entry + len(entries), None)
                return ReadResult(Status.OK, entries, self._lac(ledger))
            damaged = damaged or found.damaged
        if generation != self._index.generation:
            return None
        return self._miss(ledger, entry, damaged or search.damaged)

    def _miss(self, ledger: int, entry: int, damaged: bool = False) -> ReadResult:
        """Returns the result for an entry that was found nowhere. `damaged`: a place where the entry may be could not
        be read."""
        descriptors = self._descriptors
        lac = self._lac(ledger)
        if ledger in descriptors.tombstones:
            return ReadResult(Status.NO_SUCH_LEDGER, [], -1)
        if damaged or self._in_limbo(ledger) or descriptors.may_be_elsewhere(ledger, entry):
            self.counters["reads_unknown"] += 1
            self.counters["damaged"] += damaged
            return ReadResult(Status.UNKNOWN, [], lac)
        missing = Status.NO_SUCH_LEDGER if descriptors.get(ledger) is None else Status.NO_SUCH_ENTRY
        return ReadResult(missing, [], lac)

    async def _read_place(self, place: ExtentLocation, entry: int, count: int, bytes_max: int) -> ExtentReadResult:
        """Reads entries from an extent with one read of the file. If one entry is requested, also reads those after it,
        for the cache."""
        ledger = place.extent.ledger
        table = self._index.get_extent_table(place)
        ahead = (1 << 20, self._read_ahead_bytes) if count == 1 else (count, bytes_max)
        try:
            found = await self._worker.run(self._reader.read_entries, place, table, entry, *ahead)
        except OSError as error:
            disk.raise_if_out_of_descriptors(error)
            _LOG.error("cannot read entry %d of ledger %d from log %d: %s", entry, ledger, place.log, error)
            return ExtentReadResult(None, [], True)
        if table is None and found.table is not None:
            self._index.add_extent_table(place, found.table)
        for i, stored in enumerate(found.entries[count:], entry + count):
            self._cache.put((ledger, i), stored, len(stored) + ENTRY_MEMORY_BYTES)
        return found._replace(entries=found.entries[:count])

    # ------------------------------------------------------------------------------------ for the scrubber
    async def verify_entry(self, ledger: int, entry: int) -> Status:
        """Reads an entry from the entry logs, bypassing memory and caches. Returns OK if a log has a good copy; UNKNOWN
        if a copy is damaged or cannot be read; NO_SUCH_ENTRY if no log has a copy. Raises OSError if no file descriptor
        is free."""
        while True:
            generation = self._index.generation
            search = EntrySearch(self._index, self._reader, self._worker, ledger, entry)
            damaged = False
            while (place := await search.next_extent_to_search()) is not None:
                found = await self._read_again(place, entry)
                if found.entries:
                    return Status.OK
                damaged = damaged or found.damaged
            if generation == self._index.generation:
                return Status.UNKNOWN if damaged or search.damaged else Status.NO_SUCH_ENTRY

    async def _read_again(self, place: ExtentLocation, entry: int) -> ExtentReadResult:
        try:
            return await self._worker.run(self._reader.read_entries, place, None, entry, 1, 1)
        except OSError as error:
            disk.raise_if_out_of_descriptors(error)
            ledger = place.extent.ledger
            _LOG.error("cannot read entry %d of ledger %d from log %d: %s", entry, ledger, place.log, error)
            return ExtentReadResult(None, [], True)

    async def read_extent_from_disk(
        self, number: int, extent: Extent
    ) -> tuple[ExtentLocation, ExtentTable | None] | None:
        """Returns (location of the extent in log `number`, the extent's table as it is on the disk, or None if the
        table is damaged). Returns None if the index does not have this extent. Raises OSError if no file descriptor is
        free."""
        search = EntrySearch(self._index, self._reader, self._worker, extent.ledger, extent.first)
        while (place := await search.next_extent_to_search()) is not None:
            if place.log == number and place.extent == extent:
                return place, (await self._read_again(place, extent.first)).table
        return None

    # ------------------------------------------------------------------------------------ the files
    async def close_log(self, log: int) -> None:
        """Closes the open files of a log, which is about to be removed."""
        await self._worker.run(self._reader.close_log, log)
        await self._ahead.close_log(log)

    async def close(self) -> None:
        """Waits until the reads that were started have ended, then closes the files."""
        await self._worker.run(self._reader.close)
        await self._ahead.close()

    # ------------------------------------------------------------------------------------ what is known of a ledger
    def _in_limbo(self, ledger: int) -> bool:
        """Returns whether entries of the ledger may be lost because of limbo. Then an entry that is not found may still
        exist."""
        return ledger <= self._descriptors.limbo_upto and ledger not in self._descriptors.tombstones

    def _in_memory(self, ledger: int, entry: int) -> Buffer | None:
        stored = self._memtable.get(ledger, entry)
        if stored is None:
            return self._cache.get((ledger, entry))
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
        self._ahead.check()

    def statistics(self) -> dict[str, int]:
        return {**self.counters, "read_cache_bytes": self._cache.size_bytes + self._ahead.size_bytes}
