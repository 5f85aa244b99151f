"""Read-ahead after a range that was asked for, so that the disk works while the last answer is on its way.

A reader that got fewer entries than it asked for asks again for the next ones. For this reader a *stream* is kept under
(ledger, next entry): entries that were read, and up to `CHUNKS_MAX` reads of chunks after them that are under way. The
next read takes the stream and the entries that it needs, and another chunk is begun. Chunks go to the `LANES` in turn,
so that the disk reads one while entries are cut out of another. Single reads have a worker of their own and wait for no
chunk. When an extent is begun, the table of the next one is loaded. Several readers of a ledger have a stream each.

Streams share `bytes_max`; the least recently used is dropped first. In addition each lane has memory for one chunk.
With more readers than fit, the chunks get smaller, and below an eighth (`SHRINK_MAX`) nothing is read ahead, so that no
disk work is wasted. Entries never change, so a stream can be old but not wrong. Where anything is uncertain (no known
extent, damage, an error) it ends, and the reader looks the entry up in the ordinary way. Guarded by
tests/bookie/store/test_reads.py.
"""

from __future__ import annotations

from asyncio import Future
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from ....runtime.files import Buffer
from ....runtime.workers import Worker
from ...format.index import Table
from ..entrylog.files import EntriesRead, EntryLogReader
from ..index.cache import Lru
from ..index.index import ExtentPlace, Index, find, run_end
from ..memtable import ENTRY_OVERHEAD_BYTES

SHRINK_MAX = 8
LANES = 2
CHUNKS_MAX = 3
"""Chunks of a stream: one for each lane, and one that is done, so that the lanes go on while the event loop hands out
the first."""
LANE_FILES_MAX = 16
"""File descriptors of each lane; one more log costs it an `open`."""
_ENTRIES_MAX = 1 << 20


class Handler(NamedTuple):
    """Reads chunks, one after the other: a thread with files and memory of its own."""

    reader: EntryLogReader
    worker: Worker


class Chunk(NamedTuple):
    """A read that is under way, from `entry` on; `entries`: how many there should be, None: only the read will say."""

    entry: int
    entries: int | None
    read: Future[EntriesRead]


class SequentialRead:
    """A sequential reader's chunks. Its ready entries end where the first chunk begins, each chunk where the next
    begins, the last at `after`."""

    __slots__ = ("_at", "_ends", "_ready", "after", "chunks", "place", "ready_bytes")

    def __init__(self, entry: int) -> None:
        self._ready: list[bytes] = []
        self._ends = [0]  # bytes of the entries before each, and of all
        self._at = 0
        self.ready_bytes = 0
        self.chunks: deque[Chunk] = deque()
        self.after: int | None = entry  # None: known when the last chunk has arrived
        self.place: ExtentPlace | None = None  # the extent of the last chunk

    @property
    def left(self) -> int:
        """Returns the number of entries that are ready."""
        return len(self._ready) - self._at

    @property
    def due(self) -> bool:
        """Whether nothing is ready, and the first chunk is done: it may `arrive`."""
        return not self.left and bool(self.chunks) and self.chunks[0].read.done()

    def arrive(self) -> None:
        """Makes the first chunk ready. One that is shorter than it should be is the last: what follows is unclear."""
        assert not self.left
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

    def take(self, count: int, bytes_max: int) -> list[Buffer]:
        """Takes at least one entry, when one is ready; at most `count`, about `bytes_max`."""
        if not self.left:
            return []
        before = self._ends[self._at]
        end = min(self._at + count, len(self._ready), bisect_left(self._ends, before + bytes_max, self._at + 1))
        taken = list[Buffer](self._ready[self._at : end])
        self._at = end
        self.ready_bytes = self._ends[-1] - self._ends[end]
        return taken


class ReadAhead:
    """Read-ahead for sequential readers, in bounded memory."""

    def __init__(self, index: Index, lanes: Sequence[Handler], bytes_max: int, chunk_bytes: int) -> None:
        self._index = index
        self._lanes = deque(lanes)
        self._chunk_bytes = chunk_bytes
        self._streams: Lru[tuple[int, int], SequentialRead] = Lru(bytes_max)

    def claim(self, ledger: int, entry: int) -> SequentialRead | None:
        """The stream that goes on with this entry; it belongs to the caller now."""
        stream = self._streams.get((ledger, entry))
        if stream is not None:
            self._streams.pop((ledger, entry))
        return stream

    def follow(self, ledger: int, entry: int, stream: SequentialRead | None) -> None:
        """Keeps the stream (None: begins one) for the next read of `entry`, and reads on after it."""
        chunk = min(self._chunk_bytes, self._streams.bytes_max // ((1 + CHUNKS_MAX) * (len(self._streams) + 1)))
        if stream is None:
            stream = SequentialRead(entry)
        while chunk * SHRINK_MAX >= self._chunk_bytes and len(stream.chunks) < CHUNKS_MAX and stream.after is not None:
            self._read_on(stream, ledger, stream.after, chunk)
        if stream.chunks or stream.left:
            size = stream.ready_bytes + stream.left * ENTRY_OVERHEAD_BYTES + len(stream.chunks) * chunk
            self._streams.put((ledger, entry), stream, size)

    def _read_on(self, stream: SequentialRead, ledger: int, entry: int, chunk: int) -> None:
        """Reads another chunk, unless the index knows no extent for the entry without loading."""
        stream.after = None
        places = self._index.candidates(ledger, entry)
        if not places:
            return
        place, entries = places[0], None
        table = self._index.table(place)
        if table is not None:
            first = find(place, table, entry)
            if first is None:
                return
            entries = run_end(table, first, _ENTRIES_MAX, chunk) - first
            stream.after = entry + entries
        lane = self._next_lane()
        read = lane.worker.run(lane.reader.read_entries, place, table, entry, _ENTRIES_MAX, chunk)
        read.add_done_callback(partial(self._arrived, place))
        stream.chunks.append(Chunk(entry, entries, read))
        if place != stream.place:
            stream.place = place
            self._load_table(ledger, place.extent.last + 1)

    def _load_table(self, ledger: int, entry: int) -> None:
        """Loads the table of the entry's extent: without it only its first chunk can be read."""
        places = self._index.candidates(ledger, entry)
        if places and self._index.table(places[0]) is None:
            lane = self._next_lane()
            lane.worker.run(lane.reader.read_table, places[0]).add_done_callback(partial(self._loaded, places[0]))

    def _next_lane(self) -> Handler:
        self._lanes.rotate()
        return self._lanes[0]

    def _arrived(self, place: ExtentPlace, done: Future[EntriesRead]) -> None:
        """Runs also for a stream that was dropped. An error is left to the reader, which reads in the ordinary way."""
        if not done.cancelled() and done.exception() is None:
            self._keep(place, done.result().table)

    def _loaded(self, place: ExtentPlace, done: Future[Table | None]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._keep(place, done.result())

    def _keep(self, place: ExtentPlace, table: Table | None) -> None:
        if table is not None and self._index.table(place) is None:
            self._index.keep_table(place, table)

    async def forget(self, log: int) -> None:
        for lane in list(self._lanes):
            await lane.worker.run(lane.reader.forget, log)

    async def close(self) -> None:
        for lane in list(self._lanes):
            await lane.worker.run(lane.reader.close)

    @property
    def size_bytes(self) -> int:
        return self._streams.size_bytes

    def check(self) -> None:
        self._streams.check()
