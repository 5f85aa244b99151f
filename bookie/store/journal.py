"""The journal, writing side: group commit. Reading it back is store/replay.py; its bytes are format/journal.py.

Rule (invariants 14, 15): a waiter is answered only after `fdatasync` of the block that holds its record; waiters are
answered in the order in which they came.

    enqueue(record)* ; seal(done)        synchronous, from the event loop; `done(True)` later, in order
    position                             (journal id, offset) up to where everything is synced
    release(position)                    forgets the files that a checkpoint made needless

One task takes all groups that wait (up to `block_bytes_max`), makes one block, lets the worker write and sync it, and
answers; meanwhile the next block fills. At most one block is on its way, so each block's `synced_upto` is its own
offset. A file is used once under each journal id; ids grow by one. Segments are zero-filled and recycled, so that a
sync changes no extents (213 µs instead of 626–778 µs for 128 KiB, measurements §1): the next one is filled in slices in
the background once the current one is half used; until it is ready the current one simply grows.

Full disk: the block does not count, its waiters get `done(False)`, the next block is written over it. A failed sync
ends the process and nobody is answered. A crash leaves at most one torn block, at the end of the newest file.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...runtime.files import Buffer, File, Files, join
from ...runtime.metrics import SECONDS, Histogram
from ...runtime.workers import Worker
from ...runtime.world import World
from ..format.framing import FileHeader, encode_file_header
from ..format.journal import (
    ALIGNMENT,
    BLOCK_HEADER_BYTES,
    MAGIC,
    RecordType,
    encode_adds,
    encode_block_header,
    encode_first_block,
    encode_record,
    padded,
)
from . import disk

SUFFIX = ".jnl"
SPARE = "spare-"
FILLING = "filling-"
FILL_SLICE_BYTES = 256 << 10
FILL_PAUSE_S = 0.002
"""Zeros are written in slices of about 0.5 ms with pauses, so that they hold up the blocks' syncs little."""

Done = Callable[[bool], None]


class Position(NamedTuple):
    """Everything before `offset` of journal `journal`, and in journals with smaller ids."""

    journal: int
    offset: int


def journal_name(number: int) -> str:
    return f"{number:016d}{SUFFIX}"


def journal_numbers(files: Files, directory: str) -> list[int]:
    return [int(name[: -len(SUFFIX)]) for name in files.list_directory(directory) if name.endswith(SUFFIX)]


@dataclass(slots=True)
class _Group:
    """What one turn of the event loop enqueued."""

    headers: list[bytes] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    size: int = 0
    done: list[Done] = field(default_factory=list)


@dataclass(slots=True)
class _Segment:
    file: File
    number: int
    salt: int
    size: int
    offset: int = ALIGNMENT
    sequence: int = 0


class Journal:
    def __init__(
        self,
        world: World,
        directory: str,
        uuid: bytes,
        worker: Worker,
        filler: Worker,
        *,
        segment_bytes: int,
        first_segment_bytes: int,
        block_bytes_max: int,
        queue_bytes_max: int,
        spares_max: int,
    ) -> None:
        self._clock = world.clock
        self._files = world.files
        self._rng = world.rng
        self._directory = directory
        self._uuid = uuid
        self._worker = worker
        self._filler = filler
        self._segment_bytes = segment_bytes
        self._first_segment_bytes = first_segment_bytes
        self._block_bytes_max = block_bytes_max
        self._queue_bytes_max = queue_bytes_max
        self._spares_max = spares_max
        self._groups: deque[_Group] = deque()
        self._open = _Group()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._spares: list[str] = []
        self._filling: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._segment: _Segment | None = None
        self._closing = False
        self.position = Position(0, 0)
        self.queued_bytes = 0
        self.no_space = False
        self.sync_seconds = Histogram(SECONDS)  # of each block: until it is written and synced
        self.counters = {
            "blocks": 0,
            "records": 0,
            "bytes": 0,
            "synced_bytes": 0,
            "recycled": 0,
            "filled": 0,
            "no_space": 0,
        }

    # ------------------------------------------------------------------------------------ life
    async def start(self, previous: Position) -> None:
        """Begins a new file after `previous`, which replay found to be the end of all that counts."""
        await self._worker.run(self._tidy)
        spare = self._spares.pop() if self._spares else ""
        self._segment = await self._worker.run(self._begin, spare, previous)
        self.position = Position(self._segment.number, self._segment.offset)
        self._task = asyncio.create_task(disk.guarded(self._files, "journal", self._run()), name="journal")

    def _tidy(self) -> None:
        for name in self._files.list_directory(self._directory):
            path = join(self._directory, name)
            if name.startswith(FILLING):
                self._files.remove(path)
            elif name.startswith(SPARE):
                self._spares.append(path)

    async def close(self) -> None:
        """After everything that is enqueued."""
        self._closing = True
        self._work.set()
        for task in (self._filling, self._task):
            if task is not None:
                await task
        if self._segment is not None:
            self._segment.file.close()

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
        group.done.append(done)
        self._groups.append(group)
        self._idle.clear()
        self._work.set()

    def synced(self) -> asyncio.Future[bool]:
        """`seal` as a future."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.seal(lambda ok: None if future.done() else future.set_result(ok))
        return future

    # ------------------------------------------------------------------------------------ the writer
    async def _run(self) -> None:
        while True:
            if not self._groups:
                self._idle.set()
                if self._closing:
                    return
                self._work.clear()
                await self._work.wait()
                continue
            groups = self._take()
            ok = await self._commit(groups)
            for group in groups:
                for done in group.done:
                    done(ok)

    def _take(self) -> list[_Group]:
        groups = [self._groups.popleft()]
        size = groups[0].size
        while self._groups and size + self._groups[0].size <= self._block_bytes_max:
            size += self._groups[0].size
            groups.append(self._groups.popleft())
        return groups

    async def _commit(self, groups: list[_Group]) -> bool:
        """One block of all records of the groups, on disk; False: no room."""
        headers = [header for group in groups for header in group.headers]
        length = sum(group.size for group in groups)
        if not headers:
            return True
        size = padded(BLOCK_HEADER_BYTES + length)
        try:
            segment = await self._segment_for(size)
            block: list[Buffer] = [
                encode_block_header(segment.salt, segment.number, segment.sequence, segment.offset, headers, length)
            ]
            for group in groups:
                block += group.buffers
            block.append(bytes(size - BLOCK_HEADER_BYTES - length))
            began = self._clock.monotonic()
            await self._worker.run(self._write, segment, block)
            self.sync_seconds.observe(self._clock.monotonic() - began)
        except disk.NoSpace:
            self.counters["no_space"] += 1
            self.no_space = True
            return False
        finally:
            self.queued_bytes -= length
        segment.offset += size
        segment.sequence += 1
        self.position = Position(segment.number, segment.offset)
        self.no_space = False
        self._count(len(headers), length, size)
        return True

    def _count(self, records: int, length: int, size: int) -> None:
        self.counters["blocks"] += 1
        self.counters["records"] += records
        self.counters["bytes"] += length
        self.counters["synced_bytes"] += size

    def _write(self, segment: _Segment, block: list[Buffer]) -> None:
        disk.write(self._files, segment.file, block, segment.offset)
        disk.sync(self._files, segment.file)

    # ------------------------------------------------------------------------------------ segments
    async def _segment_for(self, size: int) -> _Segment:
        """The segment that takes the next block; rolls when the current one is full and another is ready."""
        segment = self._segment
        assert segment is not None
        if segment.offset + size > segment.size // 2 and not self._spares and self._filling is None:
            filling = disk.guarded(self._files, "journal segment", self._fill())
            self._filling = asyncio.create_task(filling, name="journal-fill")
        if segment.offset + size > segment.size and segment.offset > ALIGNMENT and self._spares:
            old = segment
            segment = await self._worker.run(self._begin, self._spares.pop(), Position(old.number, old.offset))
            self._segment = segment
            self.position = Position(segment.number, segment.offset)
            old.file.close()
        return segment

    def _begin(self, spare: str, previous: Position) -> _Segment:
        """Turns a spare file (or a new small one) into the journal after `previous`: header, sync, name, sync."""
        number = previous.journal + 1
        salt = self._rng.getrandbits(64)
        path = spare or join(self._directory, f"{FILLING}{number:016d}")
        file = self._open_file(path)
        if not spare:
            self._zero(file, 0, self._first_segment_bytes)
        header = encode_file_header(FileHeader(MAGIC, self._uuid, number, previous.offset, salt))
        disk.write(self._files, file, [encode_first_block(header)], 0)
        disk.sync(self._files, file)
        size = file.size()
        file.close()
        final = join(self._directory, journal_name(number))
        self._files.rename(path, final)
        disk.sync_directory(self._files, self._directory)
        return _Segment(self._files.open(final), number, salt, size)

    async def _fill(self) -> None:
        """Makes one spare segment: zeros, really written, so that later syncs change no extents."""
        path = join(self._directory, f"{FILLING}{self._rng.getrandbits(64):016x}")
        try:
            file = await self._filler.run(self._open_file, path)
            try:
                for offset in range(0, self._segment_bytes, FILL_SLICE_BYTES):
                    if self._closing:
                        return
                    size = min(FILL_SLICE_BYTES, self._segment_bytes - offset)
                    await self._filler.run(self._zero, file, offset, size)
                    await asyncio.sleep(FILL_PAUSE_S)
            finally:
                file.close()
            spare = path.replace(FILLING, SPARE)
            await self._filler.run(self._files.rename, path, spare)
            self._spares.append(spare)
            self.counters["filled"] += 1
        except disk.NoSpace:
            self.no_space = True
            await self._filler.run(self._discard, path)
        finally:
            self._filling = None

    def _discard(self, path: str) -> None:
        if self._files.exists(path):  # there may have been no room for its name either
            self._files.remove(path)

    def _open_file(self, path: str) -> File:
        try:
            return self._files.open(path, create=True)
        except OSError as error:
            disk.fail(self._files, f"create {path}", error)

    def _zero(self, file: File, offset: int, size: int) -> None:
        disk.write(self._files, file, [bytes(size)], offset)
        disk.write_back(self._files, file)

    async def try_room(self) -> None:
        """Clears `no_space` when there is room for a largest block again."""
        try:
            await self._filler.run(self._probe)
            self.no_space = False
        except disk.NoSpace:
            return

    def _probe(self) -> None:
        path = join(self._directory, f"{FILLING}probe")
        try:
            file = self._open_file(path)
            try:
                disk.allocate(self._files, file, self._block_bytes_max)
            finally:
                file.close()
        finally:
            self._discard(path)

    # ------------------------------------------------------------------------------------ release
    def release(self, position: Position) -> None:
        """Recycles or removes the journals before `position`; the mark that says so is durable. In a worker.

        A crash here leaves names that the next start releases again.
        """
        for number in journal_numbers(self._files, self._directory):
            if number >= position.journal:
                continue
            path = join(self._directory, journal_name(number))
            if len(self._spares) < self._spares_max and self._recyclable(path):
                spare = join(self._directory, f"{SPARE}{number:016d}")
                self._files.rename(path, spare)
                self._spares.append(spare)
                self.counters["recycled"] += 1
            else:
                self._files.remove(path)

    def _recyclable(self, path: str) -> bool:
        file = self._files.open(path, write=False)
        try:
            return self._segment_bytes <= file.size() <= 4 * self._segment_bytes
        finally:
            file.close()
