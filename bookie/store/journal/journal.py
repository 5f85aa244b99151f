"""The journal, writing side: group commit. Its files are store/segments.py, its bytes format/journal.py, and what reads
it back is store/replay.py.

Rule (invariants 14, 15): a waiter is answered only after the block that holds its record is synced; waiters are
answered in the order in which they came.

    enqueue(record)* ; seal(done)        synchronous, from the event loop; `done(True)` later, in order
    position                             (journal id, offset) up to where everything is synced
    release(position)                    forgets the files that a checkpoint made needless

One task takes all groups that wait (up to `block_bytes_max`), makes one block and hands it to a worker, and meanwhile
the next block fills. `DEPTH` blocks are on their way at most; when they are direct, `WORKERS` of them are in the disk
at once, so that it waits neither for the event loop nor for the interpreter. A block says in `synced_upto` what was
synced when it was made. A journal rolls only when nothing is on its way, because the header of the next one says that
all of it is synced. Not direct, one worker writes and syncs all blocks one after the other: of two syncs of a file at
once, the kernel tells only one that a page was lost.

Full disk: the block does not count, its waiters and those of the block behind it get `done(False)`. The next block is
written over it, alone, after zeros over the start of the block behind it if that one was written: else, behind the
next block, it could count. A failed sync ends the process and nobody is answered. A crash leaves at most `DEPTH` blocks
at the end of the newest file that nobody was told of, and any of them may be whole.

Direct or not (`journal_direct`), and two at once: µs per block written and synced on a zero-filled file, without the
journal, medians of eleven rounds in turn, one run on ext4 and two cores (write + fdatasync: another run, nine rounds):

                     write + fdatasync   O_DIRECT | O_DSYNC   the same, two at once
    blocks of 4 KiB                 98                   95                      53
    128 KiB                        165                  158                     117
    1 MiB                          989                  488                     464

Direct is the default: one system call instead of two, after each of which the worker must get the interpreter back, and
no copy in the page cache, where nobody would read it. Writes into zeros change no extents, so those of one file do not
wait for each other, and the disk flushes its cache once for both. One at a time, the disk would wait 10 to 20 µs
between blocks: the wake-up of the event loop alone is a system call of 10 µs in the worker.

Bound: `full` when `queue_bytes_max` of records wait or are on their way; the store then admits no add.
Guarded by tests/bookie/store/journal/test_journal.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ....runtime.files import Buffer, File
from ....runtime.metrics import SECONDS, Histogram
from ....runtime.workers import Worker
from ....runtime.world import World
from ...format.journal import (
    ALIGNMENT,
    BLOCK_HEADER_BYTES,
    RecordType,
    encode_adds,
    encode_block_header,
    encode_record,
    padded,
)
from .. import disk
from .arenas import Arenas
from .segments import Position, Segment, Segments

WORKERS = 2
"""Blocks in the disk at once, while they are direct."""

DEPTH = 3
"""Blocks on their way: one more than in the disk, so that a worker has its next one when it is done with the last."""

BYTES = tuple(4096 << n for n in range(11))
RECORDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

Done = Callable[[bool], None]


@dataclass(slots=True)
class _Group:
    """What one turn of the event loop enqueued."""

    headers: list[bytes] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    size: int = 0
    done: Done = lambda ok: None
    sealed_at: float = 0.0


@dataclass(slots=True)
class _Flight:
    """A block on its way. `written`: the seconds that write and sync took; None: there was nothing to write."""

    groups: list[_Group]
    sequence: int
    offset: int
    end: int
    length: int
    records: int
    written: asyncio.Future[float] | None


class Journal:
    def __init__(
        self,
        world: World,
        directory: str,
        uuid: bytes,
        workers: Sequence[Worker],
        filler: Worker,
        *,
        segment_bytes: int,
        first_segment_bytes: int,
        block_bytes_max: int,
        queue_bytes_max: int,
        spares_max: int,
        direct: bool = True,
    ) -> None:
        self._clock = world.clock
        self._files = world.files
        assert len(workers) == WORKERS
        self._workers = workers
        self._filler = filler
        self._block_bytes_max = block_bytes_max
        self._queue_bytes_max = queue_bytes_max
        self._segments = Segments(
            world.files, directory, uuid, world.rng, filler, segment_bytes=segment_bytes,
            first_segment_bytes=first_segment_bytes, spares_max=spares_max, direct=direct,
        )  # fmt: skip
        self.release = self._segments.release
        self._open = _Group()
        self._groups: deque[_Group] = deque()
        self._flights: deque[_Flight] = deque()
        self._refused = False  # a block found no room, and one behind it is still on its way
        self._stray: list[int] = []  # where blocks were written behind one that found no room
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._segment: Segment | None = None
        self._offset = 0  # where the next block goes, and its number
        self._sequence = 0
        self._arenas = Arenas(world.files, padded(block_bytes_max + BLOCK_HEADER_BYTES), DEPTH)
        self._closing = False
        self.position = Position(0, 0)
        self.queued_bytes = 0
        self._block_refused = False
        self.histograms = {
            "queue_seconds": Histogram(SECONDS),  # of each group: from its seal until its block goes to the worker
            "sync_seconds": Histogram(SECONDS),  # of each block: its write and its sync
            "block_bytes": Histogram(BYTES),  # as written
            "block_records": Histogram(RECORDS),
        }
        self.counters = {
            "blocks": 0,
            "records": 0,
            "bytes": 0,
            "synced_bytes": 0,
            "no_space": 0,
        }

    # ------------------------------------------------------------------------------------ life
    async def start(self, previous: Position) -> None:
        """Begins a new file after `previous`, which replay found to be the end of all that counts."""
        segments = self._segments
        worker = self._workers[0]
        await worker.run(segments.tidy)
        self._use(await worker.run(segments.begin, segments.spares.pop() if segments.spares else "", previous))
        self._task = asyncio.create_task(disk.guarded(self._files, "journal", self._run()), name="journal")

    def _use(self, segment: Segment) -> None:
        self._segment = segment
        self._offset, self._sequence = ALIGNMENT, 0
        self.position = Position(segment.number, ALIGNMENT)
        self._stray = []  # the end in the header cuts them off

    async def close(self) -> None:
        """After everything that is enqueued."""
        self._closing = True
        self._work.set()
        await self._segments.close()
        if self._task is not None:
            await self._task
        if self._segment is not None:
            self._segment.file.close()

    @property
    def statistics(self) -> dict[str, int]:
        queued = {"queued_bytes": self.queued_bytes, "queued_records": self.queued_records}
        return {**self.counters, **self._segments.counters, **queued}

    @property
    def direct(self) -> bool:
        """Whether blocks are written past the page cache."""
        return self._segments.direct

    # ------------------------------------------------------------------------------------ intents
    @property
    def full(self) -> bool:
        return self.queued_bytes >= self._queue_bytes_max

    @property
    def queued_records(self) -> int:
        """Not yet in a block. For statistics: it walks over the groups that wait."""
        return sum(len(group.headers) for group in self._groups) + len(self._open.headers)

    def enqueue(self, kind: RecordType, ledger: int, entry: int, payload: Sequence[Buffer] = ()) -> None:
        """Adds a record to the open group; `seal` follows in the same turn. The payload must not change any more."""
        header, size = encode_record(kind, ledger, entry, payload)
        group = self._open
        group.headers.append(header)
        group.buffers.append(header)
        group.buffers.extend(payload)
        group.size += size
        self.queued_bytes += size

    def enqueue_adds(self, ledger: int, entries: Sequence[tuple[int, Sequence[Buffer], int]]) -> None:
        """`enqueue` of an ADD record for each of the entries (id, stored, bytes)."""
        headers, buffers, size = encode_adds(ledger, entries)
        group = self._open
        group.headers += headers
        group.buffers += buffers
        group.size += size
        self.queued_bytes += size

    def seal(self, done: Done) -> None:
        """`done` is called once, when everything enqueued so far is synced (True) or was refused for want of room."""
        assert self._task is not None, "the journal was not started"
        assert not self._closing, "the journal is closing"
        group, self._open = self._open, _Group()
        group.done = done
        group.sealed_at = self._clock.monotonic()
        self._groups.append(group)
        self._work.set()

    def synced(self) -> asyncio.Future[bool]:
        """`seal` as a future."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.seal(lambda ok: None if future.done() else future.set_result(ok))
        return future

    # ------------------------------------------------------------------------------------ the writer
    async def _run(self) -> None:
        while True:
            self._work.clear()
            self._land()
            if self._groups and len(self._flights) < (1 if self._stray else DEPTH) and not self._refused:
                await self._launch(self._take())
            elif self._flights or self._groups or not self._closing:
                await self._work.wait()
            else:
                return

    def _take(self) -> list[_Group]:
        groups = [self._groups.popleft()]
        size = groups[0].size
        while self._groups and size + self._groups[0].size <= self._block_bytes_max:
            size += self._groups[0].size
            groups.append(self._groups.popleft())
        return groups

    async def _launch(self, groups: list[_Group]) -> None:
        """Hands a worker one block of all records of the groups."""
        now = self._clock.monotonic()
        length = 0
        headers: list[bytes] = []
        buffers: list[Buffer] = [b""]
        for group in groups:
            length += group.size
            headers += group.headers
            buffers += group.buffers
            self.histograms["queue_seconds"].observe(now - group.sealed_at)
        size = padded(BLOCK_HEADER_BYTES + length) if headers else 0
        written: asyncio.Future[float] | None = None
        if headers:
            segment = await self._segment_for(size)
            sequence, offset = self._sequence, self._offset
            buffers[0] = encode_block_header(
                segment.salt, segment.number, sequence, offset, self.position.offset, headers, length
            )
            direct = segment.file.direct
            if direct:
                buffers = [self._arenas.fill(buffers, size)]
            else:
                buffers.append(bytes(size - BLOCK_HEADER_BYTES - length))
            worker = self._workers[sequence % WORKERS if direct else 0]
            written = worker.run(self._write, segment.file, buffers, offset, tuple(self._stray))
            written.add_done_callback(lambda _: self._work.set())
        self._flights.append(
            _Flight(groups, self._sequence, self._offset, self._offset + size, length, len(headers), written)
        )
        self._offset += size
        self._sequence += 1 if headers else 0

    def _write(self, file: File, block: Sequence[Buffer], offset: int, stray: Sequence[int]) -> float:
        """In a worker: one block, durable when this returns, after zeros over the strays; the seconds it took."""
        began = self._clock.monotonic()
        for place in stray:
            self._write_synced(file, [bytes(ALIGNMENT)], place)
        self._write_synced(file, block, offset)
        return self._clock.monotonic() - began

    def _write_synced(self, file: File, buffers: Sequence[Buffer], offset: int) -> None:
        disk.write(self._files, file, buffers, offset)
        if not file.direct:
            disk.sync(self._files, file)

    def _land(self) -> None:
        """Answers, in order, for all blocks that the disk has or refused."""
        flights = self._flights
        while flights and (flights[0].written is None or flights[0].written.done()):
            flight = flights.popleft()
            ok = self._landed(flight)
            self.queued_bytes -= flight.length
            if not flights:
                self._refused = False
            for group in flight.groups:
                group.done(ok)

    def _landed(self, flight: _Flight) -> bool:
        if flight.written is None:
            return True
        assert self._segment is not None
        try:
            self.histograms["sync_seconds"].observe(flight.written.result())
        except disk.NoSpace:
            return self._refuse(flight)
        if self._refused:
            self._stray.append(flight.offset)
            return self._refuse(flight)
        self._stray = []
        size = flight.end - flight.offset
        self.position = Position(self._segment.number, flight.end)
        self._block_refused = self._segments.full = False
        self.histograms["block_bytes"].observe(size)
        self.histograms["block_records"].observe(flight.records)
        self.counters["blocks"] += 1
        self.counters["records"] += flight.records
        self.counters["bytes"] += flight.length
        self.counters["synced_bytes"] += size
        return True

    def _refuse(self, flight: _Flight) -> bool:
        self.counters["no_space"] += 1
        self._block_refused = self._refused = True
        if flight.offset < self._offset:  # the first that was refused: the next block goes here
            self._offset, self._sequence = flight.offset, flight.sequence
        return False

    async def _segment_for(self, size: int) -> Segment:
        """The segment that takes the next block; rolls when the current one is full and another is ready."""
        segment, segments = self._segment, self._segments
        assert segment is not None
        if self._offset + size > segment.size // 2:
            segments.fill_soon()
        if self._offset + size <= segment.size or self._offset == ALIGNMENT or not segments.spares:
            return segment
        while self._flights:
            await self._work.wait()
            self._work.clear()
            self._land()
        spare = segments.spares.pop()
        try:
            begun = await self._workers[0].run(segments.begin, spare, Position(segment.number, self._offset))
        except disk.NoSpace:  # the block will say whether there is room for it where we are
            segments.spares.append(spare)
            return segment
        segment.file.close()
        self._use(begun)
        return begun

    # ------------------------------------------------------------------------------------ room
    @property
    def no_space(self) -> bool:
        """The last block, or the last spare segment, found no room; until one does, or `try_room` finds it."""
        return self._block_refused or self._segments.full

    async def try_room(self) -> None:
        """Clears `no_space` when there is room for a largest block again."""
        try:
            await self._filler.run(self._segments.probe, self._block_bytes_max)
        except disk.NoSpace:
            return
        self._block_refused = self._segments.full = False
