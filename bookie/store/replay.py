"""The journal, reading side: what counts after a crash, what is a torn tail, what is damage (ledger protocol §2.2).

Rule: from the mark on, journals are read in the order of their ids, and every whole block is returned. A block that is
not whole is judged by what is known to have been synced before the crash:

    in a journal with a successor   everything up to the end that the successor's header names: a bad block before it
                                    is *damage*
    in the newest journal           everything before the `synced_upto` of a later valid block: a bad block with such a
                                    block after it is *damage*
    anything else                   was never acknowledged: a *torn tail*. Replay ends before it, a whole block after
                                    it does not count either (both were in flight), `torn_bytes` counts the bytes.
                                    Nothing is truncated: the file is recycled after the next checkpoint

Damage never stops the reader. It is recorded in `damages` (file, offset, what is lost), and the reader goes on. A block
whose header is whole is skipped whole, however many of its records decode. Otherwise the reader goes on at the next
aligned place where a valid block of this journal begins, or in the next journal that exists. A journal that is missing,
ends before the mark, or has lost both copies of its header is damage too. The end of the journal before it
is then unknown, and a bad block there is damage. store/boot.py decides what follows from damage: the mark must not move
past a damage before the loss is durable. A file of another bookie and a newer format raise `ForeignFile` and
`NewerFormat`.

`end` is after the last block that counts, in the newest journal that exists: the next journal begins after it.
Journals are read *direct*, without the page cache, where the file system allows it: 0.3 instead of 2.4 s of processor
time for 1 GiB, because the pages are not in the cache and are read once only.
`JournalReader.read_blocks` is called from a worker; it returns blocks in order, each with the position after it.
Guarded by tests/bookie/store/journal/test_replay.py.

**The files of the journal** (`JournalSegments`): how a file begins, is filled with zeros in advance, is recycled or
removed.

    NNNNNNNNNNNNNNNN.jnl    a journal, by its id; a file is used once under each id, ids grow by one
    spare-…                 zero-filled, or used before: becomes the next journal
    filling-…               not all zeros yet; removed at the next start

A journal *begins* in this order: its header is written into a spare and synced, the spare gets the journal's name, the
directory is synced. The header says where the journal before it ended, so it may only be written when all of that is
synced. A recycled file keeps its stale blocks: they carry another id and salt and never parse (format/journal.py).

Spares are filled with zeros that are really written, so that a sync of a block changes no extents (213 µs instead of
626–778 µs for 128 KiB). This happens in slices in the background, while the current journal fills; until a spare is
ready, the current journal grows. A journal before the mark is recycled, or removed when there are enough spares.

Blocks are written *direct* (O_DIRECT | O_DSYNC: one system call, no page cache) where the file system allows it, else
with a write and an `fdatasync`. The write of the first file's header shows which. See journal.py for the
figures.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
from typing import NamedTuple

import msgspec

from ...runtime.files import File, Files, join_path
from ...runtime.tasks import Worker
from ..format.journal import (
    BLOCK_ALIGNMENT_BYTES,
    BLOCK_HEADER_BYTES,
    FILE_HEADER_BYTES,
    HEADER_COPY_OFFSET,
    JOURNAL_MAGIC,
    BlockHeader,
    BlockRecords,
    DamagedFile,
    FileHeader,
    ForeignFile,
    decode_block_header_if_intact,
    decode_file_header,
    decode_records_if_intact,
    encode_block_prefix,
    encode_file_header,
    encode_first_block,
)
from . import disk

_LOG = logging.getLogger("magnetar.bookie.store.journal")

JOURNAL_SUFFIX = ".jnl"
SPARE_PREFIX = "spare-"
FILLING_PREFIX = "filling-"
FILL_SLICE_BYTES = 256 << 10
FILL_PAUSE_S = 0.002
"""The pause in seconds between two slices of zeros. A slice takes about 0.5 ms, so filling a file hardly delays the
syncs of blocks."""

_REFUSALS = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP))
"""Error numbers by which a file system says that it does not support direct writes."""


class JournalPosition(NamedTuple):
    """A position in a store's journal: the byte `offset` in the journal file number `journal`. Files with smaller
    numbers come before."""

    journal: int
    offset: int


def journal_file_name(number: int) -> str:
    return f"{number:016d}{JOURNAL_SUFFIX}"


def list_journal_file_numbers(files: Files, directory: str) -> list[int]:
    """Returns the numbers of all journal files in the directory, in ascending order. Raises OSError if the directory
    cannot be listed."""
    return _numbers(files.list_directory(directory))


def _numbers(names: list[str]) -> list[int]:
    return [int(name[: -len(JOURNAL_SUFFIX)]) for name in names if name.endswith(JOURNAL_SUFFIX)]


class JournalSegment(msgspec.Struct):
    """The journal file to which blocks are written now: the open file, its number, the salt of its checksums, and its
    size in bytes."""

    file: File
    number: int
    salt: int
    size: int


class JournalSegments:
    """Creates, recycles and removes the journal files of a directory. `spares` are the paths of the spare files. A
    spare file has `segment_bytes` bytes; the first journal file, if there is no spare, has `first_segment_bytes`.
    `filler` is the worker that fills spare files. A method whose docstring says so waits for the disk and must run in a
    worker."""

    def __init__(
        self,
        files: Files,
        directory: str,
        uuid: bytes,
        rng: random.Random,
        filler: Worker,
        *,
        segment_bytes: int,
        first_segment_bytes: int,
        spares_max: int,
        direct: bool,
    ) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self._rng = rng
        self._filler = filler
        self._segment_bytes = segment_bytes
        self._first_segment_bytes = first_segment_bytes
        self._spares_max = spares_max
        self.direct = direct
        self.spares: list[str] = []
        self._filling: asyncio.Task[None] | None = None
        self._closing = False
        self.full = False
        """Whether the last attempt to fill a spare file, or to find room, found the disk full."""
        self.counters = {"recycled": 0, "filled": 0}

    def adopt_spare_files(self) -> None:
        """Called at a start: takes over the finished spare files of the last process, and removes the unfinished ones.
        Must run in a worker. Raises OSError if the directory cannot be listed or a file cannot be removed."""
        for name in self._files.list_directory(self._directory):
            path = join_path(self._directory, name)
            if name.startswith(FILLING_PREFIX):
                self._files.remove(path)
            elif name.startswith(SPARE_PREFIX):
                self.spares.append(path)

    async def close(self) -> None:
        """Stops making a spare file, and waits until that work has ended."""
        self._closing = True
        if self._filling is not None:
            await self._filling

    # ------------------------------------------------------------------------------------ a journal begins
    def make_segment(self, spare: str, previous: JournalPosition) -> JournalSegment:
        """Makes the journal file that follows the position `previous` and returns it: from the spare file `spare`, or,
        if `spare` is "", from a new small file. Its header and its name are durable. Must run in a worker. Raises
        NoSpace if the disk is full, or its subclass NoFileDescriptor if no file descriptor is free; then the spare file
        may be used again."""
        number = previous.journal + 1
        salt = self._rng.getrandbits(64)
        path = spare or self._small(number)
        header = encode_file_header(FileHeader(JOURNAL_MAGIC, self._uuid, number, previous.offset, salt))
        size = self._write_header(path, encode_first_block(header))
        final = join_path(self._directory, journal_file_name(number))
        self._files.rename(path, final)
        try:
            disk.sync_directory(self._files, self._directory)
            file = disk.open_file(self._files, final, direct=self.direct)
        except disk.NoSpace:
            self._files.rename(final, path)  # the same spare is tried again
            raise
        return JournalSegment(file, number, salt, size)

    def _small(self, number: int) -> str:
        path = join_path(self._directory, f"{FILLING_PREFIX}{number:016d}")
        file = self._create(path)
        self._zero(file, 0, self._first_segment_bytes)
        file.advise_dontneed()
        file.close()
        return path

    def _write_header(self, path: str, block: bytes) -> int:
        """Writes and syncs the first block of a journal file. Returns the file's size in bytes. Finds out whether the
        file system supports direct writes."""
        if self.direct:
            try:
                file = self._files.open(path, direct=True)
                file.pwrite([block], 0)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    disk.raise_no_space_or_exit(self._files, f"write {path}", error)
                _LOG.info("%s cannot be written direct (%s): each block is written, then synced", path, error)
                self.direct = False
        if not self.direct:
            file = disk.open_file(self._files, path)
            disk.write_buffers(self._files, file, [block], 0)
            disk.sync_file(self._files, file)
        size = file.size()
        file.close()
        return size

    # ------------------------------------------------------------------------------------ spares
    def start_making_spare_journal(self) -> None:
        """Starts to make a spare journal file in the background, unless one exists or is being made."""
        if not self.spares and self._filling is None:
            filling = disk.run_or_end_process(self._files, "journal segment", self._fill())
            self._filling = asyncio.create_task(filling, name="journal-fill")

    async def _fill(self) -> None:
        path = join_path(self._directory, f"{FILLING_PREFIX}{self._rng.getrandbits(64):016x}")
        try:
            file = await self._filler.run(self._create, path)
            try:
                for offset in range(0, self._segment_bytes, FILL_SLICE_BYTES):
                    if self._closing:
                        return
                    size = min(FILL_SLICE_BYTES, self._segment_bytes - offset)
                    await self._filler.run(self._zero, file, offset, size)
                    await asyncio.sleep(FILL_PAUSE_S)
                file.advise_dontneed()
            finally:
                self._filler.run(file.close)  # after a write that may be under way there
            spare = path.replace(FILLING_PREFIX, SPARE_PREFIX)
            await self._filler.run(self._files.rename, path, spare)
            self.spares.append(spare)
            self.counters["filled"] += 1
        except disk.NoSpace as error:
            self.full = self.full or not isinstance(error, disk.NoFileDescriptor)
            await self._filler.run(self._discard, path)
        finally:
            self._filling = None

    def _create(self, path: str) -> File:
        try:
            return self._files.open(path, create=True)
        except OSError as error:
            disk.raise_no_space_or_exit(self._files, f"create {path}", error)

    def _zero(self, file: File, offset: int, size: int) -> None:
        disk.write_buffers(self._files, file, [bytes(size)], offset)
        disk.start_write_back(self._files, file)

    def _discard(self, path: str) -> None:
        if self._files.exists(path):  # there may have been no room for its name either
            self._files.remove(path)

    def check_disk_room(self, size: int) -> None:
        """Raises NoSpace if the disk has no room for a file of `size` bytes. Makes such a file and removes it. Raises
        NoFileDescriptor, a NoSpace, if no file descriptor is free. Must run in a worker."""
        path = join_path(self._directory, f"{FILLING_PREFIX}probe")
        try:
            file = self._create(path)
            try:
                disk.allocate_space(self._files, file, size)
            finally:
                file.close()
        finally:
            self._discard(path)

    # ------------------------------------------------------------------------------------ release
    def release(self, position: JournalPosition) -> None:
        """Recycles or removes the journal files before `position`, because no start needs them any more: the checkpoint
        mark with this position must be durable. Must run in a worker.

        If the process crashes during this call, or if no file descriptor is free, files are left. The next call
        recycles or removes them. Raises OSError if a file cannot be renamed or removed."""
        for number in _numbers(disk.list_removable_files(self._files, self._directory)):
            if number >= position.journal:
                continue
            path = join_path(self._directory, journal_file_name(number))
            if len(self.spares) < self._spares_max and self._recyclable(path):
                spare = join_path(self._directory, f"{SPARE_PREFIX}{number:016d}")
                self._files.rename(path, spare)
                self.spares.append(spare)
                self.counters["recycled"] += 1
            else:
                self._files.remove(path)

    def _recyclable(self, path: str) -> bool:
        try:
            file = self._files.open(path, write=False)
        except OSError as error:
            disk.raise_unless_out_of_descriptors(error)
            return False
        try:
            return self._segment_bytes <= file.size() <= 4 * self._segment_bytes
        finally:
            file.close()


REPLAY_WINDOW_BYTES = 4 << 20
"""The number of bytes that are read at once. This is the memory that a replay needs besides the memtable."""


class ReplayedBlock(NamedTuple):
    """The records of a journal block that was read again at a start, and the position after the block."""

    records: BlockRecords
    end: JournalPosition  # after the block


class FileDamage(NamedTuple):
    """Damage in a file: the bytes at `offset` of the file `path` were durable once and cannot be read any more.
    `reason` says what is wrong."""

    path: str
    offset: int
    reason: str


class _Source(NamedTuple):
    """A journal file to be read. `header` is None if the header is damaged."""

    number: int
    path: str
    header: FileHeader | None


class JournalReader:
    """Reads the blocks of the journal at a start, from the position `start` to the last valid block. `damages` is the
    damage found so far, `end` the position after the last block that counts. Must be used by one worker. The
    constructor raises ForeignFile, NewerFormat or OSError."""

    def __init__(self, files: Files, directory: str, uuid: bytes, start: JournalPosition) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self.damages: list[FileDamage] = []
        self.torn_bytes = 0
        self.end = start
        self._sources = self._find_sources(start)
        self._at = -1
        self._blocks: _Blocks | None = None
        self.finished = False
        self._next_source(
            start.offset if self._sources and self._sources[0].number == start.journal else BLOCK_ALIGNMENT_BYTES
        )

    def read_blocks(self, bytes_max: int) -> list[ReplayedBlock]:
        """Reads and returns the next blocks, of about `bytes_max` bytes together. Sets `finished` when there are no
        more; then the list may be empty. Adds damage that it finds to `damages`. Raises OSError if a file cannot be
        opened or read."""
        found: list[ReplayedBlock] = []
        size = 0
        while size < bytes_max and not self.finished:
            before = self.end
            records = self._read_block()
            if records is not None:
                size += self.end.offset - before.offset
                found.append(ReplayedBlock(records, self.end))
        return found

    def close(self) -> None:
        """Closes the file that is being read. May be called again."""
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None

    # ------------------------------------------------------------------------------------ files
    def _find_sources(self, start: JournalPosition) -> list[_Source]:
        numbers = [
            number for number in list_journal_file_numbers(self._files, self._directory) if number >= start.journal
        ]
        sources = []
        expected = start.journal
        for number in numbers or [start.journal + 1]:
            for missing in range(expected, number):
                path = join_path(self._directory, journal_file_name(missing))
                self._damaged(path, 0, "this journal is missing, and the mark or its neighbours need it")
            expected = number + 1
        for number in numbers:
            path = join_path(self._directory, journal_file_name(number))
            sources.append(_Source(number, path, self._header(path, number)))
        return sources

    def _header(self, path: str, number: int) -> FileHeader | None:
        """Returns the file's header from an undamaged copy. Records the damage and returns None if both copies are
        damaged."""
        file = self._files.open(path, write=False)
        try:
            copies = [file.pread(FILE_HEADER_BYTES, offset) for offset in (0, HEADER_COPY_OFFSET)]
        finally:
            file.close()
        reason = ""
        for data in copies:
            try:
                return decode_file_header(data, JOURNAL_MAGIC, self._uuid, number, path)
            except ForeignFile:
                raise
            except DamagedFile as error:
                reason = reason or error.reason
        self._damaged(path, 0, f"no block of this journal can be read: {reason}")
        return None

    @property
    def _durable_end(self) -> int | None:
        """Returns the offset up to which the present journal file was synced, as the header of the next file says; None
        if that is unknown."""
        if self._at + 1 == len(self._sources):
            return None
        this, following = self._sources[self._at], self._sources[self._at + 1]
        if following.header is None or following.number != this.number + 1:
            return None
        return following.header.a

    def _next_source(self, offset: int = BLOCK_ALIGNMENT_BYTES) -> None:
        """Opens the next journal file that can be read, at `offset`. Sets `finished` if there is none."""
        self.close()
        while self._at + 1 < len(self._sources):
            self._at += 1
            source = self._sources[self._at]
            self.end = JournalPosition(source.number, offset)
            offset = BLOCK_ALIGNMENT_BYTES
            if source.header is not None:
                self._blocks = _Blocks(
                    disk.open_for_uncached_reads(self._files, source.path), source.number, source.header.b
                )
                if self._blocks.size < self.end.offset:
                    reason = f"the file ends here, and it was synced up to {self.end.offset}"
                    self._damaged(source.path, self._blocks.size, reason)
                return
        self.finished = True

    # ------------------------------------------------------------------------------------ blocks
    def _read_block(self) -> BlockRecords | None:
        """Reads the block at `end`, moves `end` after it, and returns its records. If there is no valid block, moves
        `end` to the next place to read and returns None."""
        blocks, offset, durable_end = self._blocks, self.end.offset, self._durable_end
        assert blocks is not None
        if durable_end is not None and offset >= durable_end:
            self._next_source()
            return None
        header = blocks.header(offset)
        records = None if header is None else blocks.records(header, offset)
        if header is not None and records is not None:
            self.end = JournalPosition(blocks.number, offset + header.padded_bytes)
            return records
        self._judge(blocks, offset, header, durable_end)
        return None

    def _judge(self, blocks: _Blocks, bad: int, header: BlockHeader | None, durable_end: int | None) -> None:
        """Handles an invalid block at the offset `bad`. If durable data is damaged, records that and goes on after it;
        otherwise the valid part of the journal ends there."""
        behind = bad + (header.padded_bytes if header is not None else BLOCK_ALIGNMENT_BYTES)
        following = blocks.find(behind, durable_end, bad if durable_end is None else -1)
        what = "the records of a block do not decode" if header is not None else "no valid block"
        if following is not None:
            reason = f"{what}; {following - bad} bytes are skipped, a later block was made when they were synced"
            self._damaged(blocks.path, bad, reason)
            self.end = JournalPosition(blocks.number, following)
        elif durable_end is not None:
            reason = f"{what}; {durable_end - bad} bytes are skipped, the next journal was begun when they were synced"
            self._damaged(blocks.path, bad, reason)
            self._next_source()
        else:
            torn = blocks.torn_bytes(bad, header)
            if torn and self._at + 1 < len(self._sources):
                self._damaged(blocks.path, bad, f"{what}, and the next journal cannot say whether it was synced")
            else:
                self.torn_bytes += torn
            self._next_source()

    def _damaged(self, path: str, offset: int, reason: str) -> None:
        self.damages.append(FileDamage(path, offset, reason))


class _Blocks:
    """Reads the blocks of one journal file through a window that moves forward."""

    def __init__(self, file: File, number: int, salt: int) -> None:
        self.path = file.path
        self.number = number
        self.size = file.size()
        self._file = file
        self._salt = salt
        self._prefix = encode_block_prefix(number)
        self._data = b""
        self._start = 0  # of the window

    def close(self) -> None:
        self._file.close()
        self._data = b""

    def header(self, offset: int) -> BlockHeader | None:
        """Returns the block header at `offset`; None if no valid block of this use of the file begins there."""
        at = self._window(offset, BLOCK_HEADER_BYTES)
        return decode_block_header_if_intact(self._data[at : at + BLOCK_HEADER_BYTES], self._salt, self.number, offset)

    def records(self, header: BlockHeader, offset: int) -> BlockRecords | None:
        if offset + header.padded_bytes > self.size:
            return None
        at = self._window(offset, header.padded_bytes)
        return decode_records_if_intact(header, self._data, at + BLOCK_HEADER_BYTES)

    def find(self, offset: int, limit: int | None, bad: int) -> int | None:
        """Returns the offset of the first valid block header at or after `offset` and before `limit`. Returns None if
        there is none, or if no block there was made after the block at `bad` was synced."""
        limit = self.size if limit is None else min(limit, self.size)
        first: int | None = None
        for place in range(offset, limit, BLOCK_ALIGNMENT_BYTES):
            at = self._window(place, BLOCK_HEADER_BYTES)
            header = self.header(place) if self._data.startswith(self._prefix, at) else None
            if header is not None:
                first = place if first is None else first
                if header.synced_upto > bad:
                    return first
        return None

    def torn_bytes(self, offset: int, header: BlockHeader | None) -> int:
        """Returns about how many bytes of an incomplete block were written at `offset`. Zeros, and blocks of an earlier
        use of the file, do not count."""
        if header is not None:
            return min(header.padded_bytes, self.size - offset)
        at = self._window(offset, BLOCK_HEADER_BYTES)
        return BLOCK_ALIGNMENT_BYTES if self._data.startswith(self._prefix[4:], at + 4) else 0

    def _window(self, offset: int, size: int) -> int:
        """Reads `size` bytes from `offset` of the file on into `_data`, unless they are there already. Returns the
        index of the first of them in `_data`."""
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            self._start, at = offset, 0
            self._data = self._file.pread(max(REPLAY_WINDOW_BYTES, size), offset)
        return at
