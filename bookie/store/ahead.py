"""Reading on behind a range that was asked for, so that the disk works while the last answer is on its way.

Who got fewer entries than it asked for comes again for those behind them. For it a *stream* is kept under (ledger, next
entry): entries that were read, and the reads of two chunks that are under way behind them. The next read takes the
stream and what it needs of it, and the read behind that begins. The kernel is told what comes after, `WINDOW_CHUNKS`
chunks along the extents of the ledger, and nothing else (its own read-ahead would go on into the entries of others):
those bytes are in the page cache when their turn comes. Several readers of a ledger have a stream each.

Streams share `bytes_max`, least recently used out first; with more readers than fit the chunks get smaller, and below
an eighth (`SHRINK_MAX`) nothing is read ahead, so that no disk work is thrown away. Entries never change, so that a
stream can be old but not wrong; where anything is unclear (no extent known, damage, an error) it ends, and the reader
looks for the entry in the ordinary way. Guarded by tests/bookie/test_reads.py.
"""

from __future__ import annotations

from asyncio import Future
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from ...runtime.files import Buffer
from ...runtime.workers import Worker
from .cache import Lru
from .index import Index, Place, find, run_end
from .log_files import EntriesRead, Hint, LogReader
from .memtable import ENTRY_OVERHEAD_BYTES

SHRINK_MAX = 8
CHUNKS_MAX = 2
"""One being read, and one that waits, so that the worker goes on while the event loop hands out the first."""
WINDOW_CHUNKS = 4
"""Measured: 8 MiB ahead read 1.2 GB/s from a disk that gave 0.9 GB/s without, 16 MiB no more."""
_ENTRIES_MAX = 1 << 20


class Chunk(NamedTuple):
    """A read that is under way, from `entry` on; `entries`: how many there should be, None: only the read will say."""

    entry: int
    entries: int | None
    read: Future[EntriesRead]


class Stream:
    """What is ready ends where the first chunk begins, and each chunk where the next begins, the last at `behind`."""

    __slots__ = ("_at", "_ends", "_ready", "behind", "chunks", "hinted", "hints", "ready_bytes")

    def __init__(self, entry: int, hints: Iterator[Hint]) -> None:
        self._ready: list[bytes] = []
        self._ends = [0]  # bytes of the entries before each, and of all
        self._at = 0
        self.ready_bytes = 0
        self.chunks: deque[Chunk] = deque()
        self.behind: int | None = entry  # None: known when the last chunk has arrived
        self.hints = hints
        self.hinted = 0  # bytes that the kernel was told of and that were not asked for yet

    @property
    def left(self) -> int:
        """Entries that are ready."""
        return len(self._ready) - self._at

    @property
    def due(self) -> bool:
        """Nothing is ready, and the first chunk is done: it may `arrive`."""
        return not self.left and bool(self.chunks) and self.chunks[0].read.done()

    def arrive(self) -> None:
        """The first chunk is ready. One that is shorter than it should be is the last: what follows is unclear."""
        assert not self.left
        entry, expected, read = self.chunks.popleft()
        self._ready, self._at, self.ready_bytes = [], 0, 0
        if not read.cancelled() and read.exception() is None:
            self._ready = read.result().entries
            self._ends = list(accumulate(map(len, self._ready), initial=0))
            self.ready_bytes = self._ends[-1]
        if not self._ready or (expected is not None and expected != len(self._ready)):
            self.chunks.clear()
            self.behind = None
        elif expected is None:
            self.behind = entry + len(self._ready)

    def take(self, count: int, bytes_max: int) -> list[Buffer]:
        """At least one, when one is ready; at most `count`, about `bytes_max`."""
        if not self.left:
            return []
        before = self._ends[self._at]
        end = min(self._at + count, len(self._ready), bisect_left(self._ends, before + bytes_max, self._at + 1))
        taken = list[Buffer](self._ready[self._at : end])
        self._at = end
        self.ready_bytes = self._ends[-1] - self._ends[end]
        return taken


class Ahead:
    def __init__(self, index: Index, reader: LogReader, worker: Worker, bytes_max: int, chunk_bytes: int) -> None:
        self._index = index
        self._reader = reader
        self._worker = worker
        self._chunk_bytes = chunk_bytes
        self._streams: Lru[tuple[int, int], Stream] = Lru(bytes_max)

    def claim(self, ledger: int, entry: int) -> Stream | None:
        """The stream that goes on with this entry; it belongs to the caller now."""
        stream = self._streams.get((ledger, entry))
        if stream is not None:
            self._streams.pop((ledger, entry))
        return stream

    def follow(self, ledger: int, entry: int, stream: Stream | None) -> None:
        """Keeps the stream (None: begins one) for whoever comes for `entry`, and reads on behind it."""
        chunk = min(self._chunk_bytes, self._streams.bytes_max // ((1 + CHUNKS_MAX) * (len(self._streams) + 1)))
        if stream is None:
            stream = Stream(entry, self._hints(ledger, entry, chunk))
        while chunk * SHRINK_MAX >= self._chunk_bytes and len(stream.chunks) < CHUNKS_MAX and stream.behind is not None:
            self._read_on(stream, ledger, stream.behind, chunk)
        if stream.chunks or stream.left:
            size = stream.ready_bytes + stream.left * ENTRY_OVERHEAD_BYTES + len(stream.chunks) * chunk
            self._streams.put((ledger, entry), stream, size)

    def _read_on(self, stream: Stream, ledger: int, entry: int, chunk: int) -> None:
        """Another chunk, unless the index knows no extent for the entry without loading."""
        stream.behind = None
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
            stream.behind = entry + entries
        told = list[Hint]()
        while stream.hinted < WINDOW_CHUNKS * chunk and (hint := next(stream.hints, None)) is not None:
            told.append(hint)
            stream.hinted += hint.size
        stream.hinted -= chunk
        read = self._worker.run(self._reader.read_on, told, place, table, entry, _ENTRIES_MAX, chunk)
        read.add_done_callback(lambda done: self._arrived(place, done))
        stream.chunks.append(Chunk(entry, entries, read))

    def _arrived(self, place: Place, done: Future[EntriesRead]) -> None:
        """Also of a stream that nobody wants any more. An error is for the reader who looks in the ordinary way."""
        if done.cancelled() or done.exception() is not None:
            return
        table = done.result().table
        if table is not None and self._index.table(place) is None:
            self._index.keep_table(place, table)

    def _hints(self, ledger: int, entry: int, size: int) -> Iterator[Hint]:
        """The bytes of the ledger from about that entry on, as far as the index knows without loading."""
        while places := self._index.candidates(ledger, entry):
            log, extent, _ = places[0]
            begin = extent.length * (entry - extent.first) // (extent.last - extent.first + 1)
            for offset in range(begin, extent.length, size):
                yield Hint(log, extent.start + offset, min(size, extent.length - offset))
            entry = extent.last + 1

    @property
    def size_bytes(self) -> int:
        return self._streams.size_bytes

    def check(self) -> None:
        self._streams.check()
