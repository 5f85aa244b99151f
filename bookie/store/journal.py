"""The journal, writing side: the driver of group commit. group_commit_core.py decides; replay.py has the files,
format/journal.py their bytes, and replay.py reads them back.

Rule (invariants 14, 15): a waiter is answered only after the block that holds its record is synced; waiters are
answered in the order in which they came.

    enqueue_record()* ; seal_group(done) synchronous, from the event loop; `done(True)` later, in order
    position                             (journal id, offset) up to where everything is synced
    release(position)                    recycles or removes the files that a checkpoint made superfluous

One block of all groups that wait (up to `block_bytes_max`) goes to a worker, and meanwhile the next block fills. A
block begins in the `seal_group` that finds no other one on its way, and is answered in the call with which its worker
reports it: no task is woken for one. Whatever has to wait (a segment begins, blocks are on their way, the end) is done
by one task, which also ends the process when something fails. Direct blocks go to `JOURNAL_WORKERS` threads in turn, so
that the disk waits neither for the event loop nor for the interpreter. Other blocks go to one thread, because of two
syncs of a file at once the kernel reports a lost page to only one.

Full disk: the waiters of the block, and of the blocks after it that are on their way, get `done(False)`. A failed sync
ends the process, and no waiter is answered.

Direct or not (`journal_direct`), and two at once: µs per block written and synced on a zero-filled file, without the
journal, medians of eleven rounds in turn, one run on ext4 and two cores (write + fdatasync: another run, nine rounds):

                     write + fdatasync   O_DIRECT | O_DSYNC   the same, two at once
    blocks of 4 KiB                 98                   95                      53
    128 KiB                        165                  158                     117
    1 MiB                          989                  488                     464

Direct is the default: one system call instead of two, after each of which the worker must get the interpreter again,
and no copy in the page cache, which no reader would use. Writes into zeros change no extents, so writes of one file do
not wait for each other, and the disk flushes its cache once for both. With one write at a time the disk would wait 10
to 20 µs between blocks: the wake-up of the event loop alone is a system call of 10 µs in the worker.

Bound: `is_full` when `queue_bytes_max` of records wait or are on their way; the store then admits no add.
Guarded by tests/bookie/store/journal/test_journal.py.

Also in this file, below its heading: memory for blocks that bypass the page cache (arenas).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ...runtime.files import Buffer, File, Files
from ...runtime.metrics import DURATION_BOUNDS, Histogram
from ...runtime.network import World
from ...runtime.tasks import Worker
from ..format.journal import (
    BLOCK_ALIGNMENT_BYTES,
    BLOCK_HEADER_BYTES,
    RecordType,
    encode_block_header,
    encode_record,
    round_up_to_alignment,
)
from . import disk
from .group_commit_core import (
    BLOCKS_IN_FLIGHT_MAX,
    JOURNAL_WORKERS,
    BeginSegment,
    BlockSynced,
    ConfirmBlock,
    DiskRoomFound,
    GroupCommit,
    JournalFailed,
    NoRoomForBlock,
    NoRoomForSegment,
    ReportNoRoomForBlock,
    SegmentBegun,
    WriteBlock,
)
from .replay import JournalPosition, JournalSegment, JournalSegments

# -------------------------------------------------------------------------------------------------------- arenas
# Memory for blocks that bypass the page cache: aligned, as the disk needs it, and used again in turn.
#
# At most `count` blocks are on their way (`BLOCKS_IN_FLIGHT_MAX`), so the next arena in turn is free.
# Guarded by tests/bookie/store/journal/test_journal.py.


UNJOINED_ENTRY_BYTES = 4096
"""If the buffers of a block have at least this size on average, they are copied into its memory one by one; smaller
buffers are joined first."""


class JournalBlockBuffers:
    """Page-aligned memory in which journal blocks are assembled: `count` buffers of at least `size` bytes, used in
    turn. A longer block enlarges its buffer for good.

    New memory for each such block would cost the kernel 4 MiB of zeros, a tenth of the time of a bookie that gets
    entries of 1 MiB."""

    def __init__(self, files: Files, size: int, count: int) -> None:
        self._files = files
        self._size = size
        self._arenas = [memoryview(b"")] * count
        self._turn = -1

    def fill(self, buffers: Sequence[Buffer], size: int) -> memoryview:
        """Copies `buffers` one after the other into the next memory, and fills it with zeros up to `size` bytes.
        Returns these bytes; they are valid until this method was called `count` more times."""
        view = self._next_arena(size)[:size]
        if len(buffers) * UNJOINED_ENTRY_BYTES > size:
            buffers = [b"".join(buffers)]
        at = 0
        for buffer in buffers:
            view[at : at + len(buffer)] = buffer
            at += len(buffer)
        view[at:] = bytes(size - at)
        return view

    def _next_arena(self, size: int) -> memoryview:
        self._turn = (self._turn + 1) % len(self._arenas)
        if len(self._arenas[self._turn]) < size:
            self._arenas[self._turn] = self._files.allocate_buffer(max(size, self._size))
        return self._arenas[self._turn]


# ------------------------------------------------------------------------------------------------------- journal


BLOCK_SIZE_BOUNDS = tuple(4096 << n for n in range(11))
BLOCK_RECORDS_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

OnDurable = Callable[[bool], None]


class JournalRecordGroup(msgspec.Struct):
    """A group of journal records: those that were enqueued between two calls of `seal_group`. `headers` are the headers
    of the records, `buffers` all bytes to write, `size` the bytes of the records. `done` are the functions to call when
    the group is written. `sealed_at`: when it was sealed, in seconds of the monotonic clock."""

    headers: list[bytes] = []
    buffers: list[Buffer] = []
    size: int = 0
    done: tuple[OnDurable, ...] = ()
    sealed_at: float = 0.0


def encode_block_buffers(block: WriteBlock[JournalRecordGroup], number: int, salt: int) -> list[Buffer]:
    """Returns the buffers of a block to be written: its header and its records, without padding. `number` and `salt`
    are those of the journal file."""
    headers: list[bytes] = []
    buffers: list[Buffer] = [b""]
    for group in block.groups:
        headers += group.headers
        buffers += group.buffers
    buffers[0] = encode_block_header(
        salt, number, block.sequence, block.offset, block.synced_upto, headers, block.length
    )
    return buffers


class Journal:
    """Writes the journal of one store, in `directory`. Sizes in bytes: `segment_bytes` of a journal file,
    `first_segment_bytes` of the first one if there is no spare file, `block_bytes_max` of the records of a block,
    `queue_bytes_max` of all records that are not synced. At most `spares_max` recycled files are kept. The module's
    docstring states its rule, the order of calls and its bounds."""

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
        assert len(workers) == JOURNAL_WORKERS
        self._workers = workers
        self._filler = filler
        self.core: GroupCommit[JournalRecordGroup] = GroupCommit(block_bytes_max=block_bytes_max)
        self._block_bytes_max = block_bytes_max
        self.queue_bytes_max = queue_bytes_max
        self._segments = JournalSegments(
            world.files, directory, uuid, world.rng, filler, segment_bytes=segment_bytes,
            first_segment_bytes=first_segment_bytes, spares_max=spares_max, direct=direct,
        )  # fmt: skip
        self.release = self._segments.release
        self.open = JournalRecordGroup()  # what the next `seal_group` takes
        self._flying: deque[tuple[int, asyncio.Future[float]]] = deque()  # blocks at a worker: sequence, seconds
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._next: BeginSegment | None = None  # for the task
        self._fault: BaseException | None = None  # of a block that was answered, for the task
        self._segment: JournalSegment | None = None
        # a last entry may exceed the bound
        self._arenas = JournalBlockBuffers(
            world.files, 2 * round_up_to_alignment(block_bytes_max), BLOCKS_IN_FLIGHT_MAX
        )
        self._closing = False
        self.histograms = {
            # of each group: from its seal until its block goes to the worker
            "queue_seconds": Histogram(DURATION_BOUNDS),
            "sync_seconds": Histogram(DURATION_BOUNDS),  # of each block: its write and its sync
            "block_bytes": Histogram(BLOCK_SIZE_BOUNDS),  # as written
            "block_records": Histogram(BLOCK_RECORDS_BOUNDS),
        }
        self.counters = {
            "blocks": 0,
            "records": 0,
            "bytes": 0,
            "synced_bytes": 0,
            "no_space": 0,
        }

    # ------------------------------------------------------------------------------------ life
    async def start(self, previous: JournalPosition) -> None:
        """Begins a new journal file; from then on records may be enqueued. `previous` is the position at which the
        journal of the last process ends. Raises NoSpace if the disk is full, OSError if the directory cannot be
        listed."""
        segments = self._segments
        worker = self._workers[0]
        await worker.run(segments.adopt_spare_files)
        self._use(await worker.run(segments.make_segment, segments.spares.pop() if segments.spares else "", previous))
        self._task = asyncio.create_task(disk.run_or_end_process(self._files, "journal", self._run()), name="journal")

    def _use(self, segment: JournalSegment) -> None:
        self._segment = segment
        self.core.receive(SegmentBegun(segment.number, segment.size, segment.file.direct))

    async def close(self) -> None:
        """Waits until the callers of all enqueued records are answered, then closes the journal. No group may be sealed
        after this call."""
        self._closing = True
        self.core.close()
        self._work.set()
        await self._segments.close()
        if self._task is not None:
            await self._task
        if self._segment is not None:
            self._segment.file.close()

    @property
    def statistics(self) -> dict[str, int]:
        """Returns the journal's counters, and the bytes and the number of the records that wait."""
        queued = {"queued_bytes": self.queued_bytes, "queued_records": self.queued_records}
        return {**self.counters, **self._segments.counters, **queued}

    # ------------------------------------------------------------------------------------ intents
    @property
    def position(self) -> JournalPosition:
        """Returns the position up to which the journal is synced."""
        return JournalPosition(self.core.segment_number, self.core.synced_upto)

    @property
    def queued_bytes(self) -> int:
        """Returns the size in bytes of all records whose callers are not answered yet."""
        return self.open.size + self.core.queued_bytes

    @property
    def is_full(self) -> bool:
        """Returns whether `queue_bytes_max` of records, or more, are not answered yet: the store must admit no add."""
        return self.open.size + self.core.queued_bytes >= self.queue_bytes_max

    @property
    def queued_records(self) -> int:
        """Returns the number of records that wait to be put into a block. Walks over all waiting groups: use it only
        for statistics."""
        return self.core.queued_records + len(self.open.headers)

    def enqueue_record(self, kind: RecordType, ledger: int, entry: int, payload: Sequence[Buffer] = ()) -> None:
        """Adds a record of type `kind` to the group that the next `seal_group` writes. The caller must call
        `seal_group` in the same turn of the event loop, and must not change the payload any more."""
        header, size = encode_record(kind, ledger, entry, payload)
        group = self.open
        group.headers.append(header)
        group.buffers.append(header)
        group.buffers.extend(payload)
        group.size += size

    def seal_group(self, *done: OnDurable) -> None:
        """Ends the present group of records and gives it to be written. Calls each function of `done` once, in order:
        with True when everything enqueued so far is synced, with False if the disk had no room for the group. They are
        never called within this call."""
        assert self._task is not None, "the journal was not started"
        assert not self._closing, "the journal is closing"
        group, self.open = self.open, JournalRecordGroup()
        group.done = done
        group.sealed_at = self._clock.monotonic()
        core = self.core
        idle = not self._flying and not core.has_waiting_groups and self._next is None
        core.append_group(group, group.size, len(group.headers))
        if not (idle and group.headers):  # one without records may be answered at once, and never within its seal
            self._work.set()
            return
        try:
            for effect in core.next_effects(bool(self._segments.spares)):
                if isinstance(effect, WriteBlock):
                    self._send(effect)
                elif isinstance(effect, BeginSegment):
                    self._next = effect  # only the task can wait for it
        except BaseException as error:  # the block is lost: the task ends the process
            self._fault = error
        if core.has_waiting_groups or self._fault is not None:
            self._work.set()

    def seal_with_future(self) -> asyncio.Future[bool]:
        """Ends the present group of records, like `seal_group`. Returns a future of the outcome: True if the records
        are synced, False if the disk had no room for them."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.seal_group(lambda ok: None if future.done() else future.set_result(ok))
        return future

    # ------------------------------------------------------------------------------------ the driver
    async def _run(self) -> None:
        core = self.core
        while not core.is_ended:
            self._work.clear()
            if self._fault is not None:
                raise self._fault
            self._report_finished()
            if self._next is not None:
                begins, self._next = self._next, None
                await self._start_segment(begins)
            while effects := core.next_effects(bool(self._segments.spares)):
                for effect in effects:
                    match effect:
                        case WriteBlock():
                            self._send(effect)
                        case BeginSegment():
                            await self._start_segment(effect)
                        case _:
                            self._answer([effect])
            if not core.is_ended:
                await self._work.wait()

    def _written(self, written: asyncio.Future[float]) -> None:
        """Called when the write of a block has ended. Answers the oldest blocks at once; everything else is left to the
        task."""
        stored = not written.cancelled() and written.exception() is None
        if stored and self._fault is None and not self._closing:
            try:
                self._report_finished()
            except BaseException as error:  # a fault of ours; the task raises it
                self._fault = error
        if not stored or self.core.has_waiting_groups or self._closing or self._fault is not None:
            self._work.set()

    def _report_finished(self) -> None:
        """Tells the core the outcomes of the oldest blocks whose writes have ended, in order, and answers their
        callers."""
        flying = self._flying
        while flying and flying[0][1].done():
            sequence, written = flying.popleft()
            try:
                self.histograms["sync_seconds"].observe_value(written.result())
            except disk.NoSpace:
                self._answer(self.core.receive(NoRoomForBlock(sequence)))
            except BaseException:
                self.core.receive(JournalFailed())
                raise
            else:
                self._answer(self.core.receive(BlockSynced(sequence)))

    def _answer(
        self, answers: Sequence[ConfirmBlock[JournalRecordGroup] | ReportNoRoomForBlock[JournalRecordGroup]]
    ) -> None:
        for answer in answers:
            block = answer.block
            confirmed = isinstance(answer, ConfirmBlock)
            if not confirmed:
                self.counters["no_space"] += 1
            elif block.size:
                self._segments.full = False
                self.histograms["block_bytes"].observe_value(block.size)
                self.histograms["block_records"].observe_value(block.records)
                self.counters["blocks"] += 1
                self.counters["records"] += block.records
                self.counters["bytes"] += block.length
                self.counters["synced_bytes"] += block.size
            for group in block.groups:
                for done in group.done:
                    done(confirmed)

    def _send(self, block: WriteBlock[JournalRecordGroup]) -> None:
        """Gives the block to the worker that writes it."""
        segment = self._segment
        assert segment is not None
        now = self._clock.monotonic()
        for group in block.groups:
            self.histograms["queue_seconds"].observe_value(now - group.sealed_at)
        buffers = encode_block_buffers(block, segment.number, segment.salt)
        if segment.file.direct:
            buffers = [self._arenas.fill(buffers, block.size)]
        else:
            buffers.append(bytes(block.size - BLOCK_HEADER_BYTES - block.length))
        written = self._workers[block.lane].run(self._write, segment.file, buffers, block.offset, block.zeros)
        written.add_done_callback(self._written)
        self._flying.append((block.sequence, written))
        if self.core.must_make_spare_file:
            self._segments.start_making_spare_journal()

    def _write(self, file: File, block: Sequence[Buffer], offset: int, zeros: Sequence[int]) -> float:
        """Writes and syncs zeros at each offset of `zeros`, then the block at `offset`. Must run in a worker. Returns
        the time that this took, in seconds."""
        began = self._clock.monotonic()
        for place in zeros:
            self._write_synced(file, [bytes(BLOCK_ALIGNMENT_BYTES)], place)
        self._write_synced(file, block, offset)
        return self._clock.monotonic() - began

    def _write_synced(self, file: File, buffers: Sequence[Buffer], offset: int) -> None:
        disk.write_buffers(self._files, file, buffers, offset)
        if not file.direct:
            disk.sync_file(self._files, file)

    async def _start_segment(self, effect: BeginSegment) -> None:
        """Makes a spare file the next journal file. If the disk has no room for that, tells the core and goes on with
        the present file."""
        segments = self._segments
        spare = segments.spares.pop()
        try:
            begun = await self._workers[0].run(
                segments.make_segment, spare, JournalPosition(effect.journal, effect.end)
            )
        except disk.NoSpace:
            segments.spares.append(spare)
            self.core.receive(NoRoomForSegment())
            return
        assert self._segment is not None
        self._segment.file.close()
        self._use(begun)

    # ------------------------------------------------------------------------------------ room
    @property
    def no_space(self) -> bool:
        """Returns whether the disk had no room for the last block or the last spare file. This stays true until a later
        write finds room, or `refresh_no_space` finds it."""
        return self.core.no_room or self._segments.full

    async def refresh_no_space(self) -> None:
        """Sets `no_space` to false if the disk has room again for a block of the largest size."""
        try:
            await self._filler.run(self._segments.check_disk_room, self._block_bytes_max)
        except disk.NoSpace:
            return
        self.core.receive(DiskRoomFound())
        self._segments.full = False
