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

Damage never stops the reader. It is recorded in `damages` (file, offset, what is lost) and the reader goes on: after a
block whose header is whole and whose records are not (it is skipped whole, however many of its records decode), else at
the next aligned place where a valid block of this journal begins, else in the next journal that exists. A journal that
is missing, ends before the mark, or has lost both copies of its header is damage too. The end of the journal before it
is then unknown, and a bad block there is damage. store/boot.py decides what follows from damage: the mark must not move
past a damage before the loss is durable. A file of another bookie and a newer format raise `ForeignFile` and
`NewerFormat`.

`end` is after the last block that counts, in the newest journal that exists: the next journal begins after it.
Journals are read *direct*, without the page cache, where the file system allows it: 0.3 instead of 2.4 s of processor
time for 1 GiB, because the pages are not in the cache and are read once only.
`JournalReader.read_blocks` is called from a worker; it returns blocks in order, each with the position after it.
Guarded by tests/bookie/store/journal/test_replay.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ....runtime.files import File, Files, join_path
from ...format.journal import (
    ALIGNMENT,
    BLOCK_HEADER_BYTES,
    FILE_HEADER_BYTES,
    HEADER_COPY_OFFSET,
    MAGIC,
    BlockHeader,
    BlockRecords,
    DamagedFile,
    FileHeader,
    ForeignFile,
    decode_file_header,
    encode_block_prefix,
    intact_block_header,
    intact_records,
)
from .. import disk
from .segments import JournalPosition, journal_name, journal_numbers

WINDOW_BYTES = 4 << 20
"""Bytes that are read at once: the memory that a replay needs besides the memtable, and one system call for some
blocks."""


class ReplayedBlock(NamedTuple):
    """The records of a replayed block, and the position after the block."""

    records: BlockRecords
    end: JournalPosition  # after the block


class Damage(NamedTuple):
    """Bytes that were durable and cannot be read. Their content is unknown."""

    path: str
    offset: int
    reason: str


class _Source(NamedTuple):
    """A journal file to be read. `header` is None if it cannot be read."""

    number: int
    path: str
    header: FileHeader | None


class JournalReader:
    """Reads all blocks from `start` to the last one that counts."""

    def __init__(self, files: Files, directory: str, uuid: bytes, start: JournalPosition) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self.damages: list[Damage] = []
        self.torn_bytes = 0
        self.end = start
        self._sources = self._find_sources(start)
        self._at = -1
        self._blocks: _Blocks | None = None
        self.finished = False
        self._next_source(start.offset if self._sources and self._sources[0].number == start.journal else ALIGNMENT)

    def read_blocks(self, bytes_max: int) -> list[ReplayedBlock]:
        """Returns the next blocks, of about `bytes_max` together. Sets `finished` when it returns the last ones."""
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
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None

    # ------------------------------------------------------------------------------------ files
    def _find_sources(self, start: JournalPosition) -> list[_Source]:
        numbers = [number for number in journal_numbers(self._files, self._directory) if number >= start.journal]
        sources = []
        expected = start.journal
        for number in numbers or [start.journal + 1]:
            for missing in range(expected, number):
                path = join_path(self._directory, journal_name(missing))
                self._damaged(path, 0, "this journal is missing, and the mark or its neighbours need it")
            expected = number + 1
        for number in numbers:
            path = join_path(self._directory, journal_name(number))
            sources.append(_Source(number, path, self._header(path, number)))
        return sources

    def _header(self, path: str, number: int) -> FileHeader | None:
        """Returns the file's header from either copy; None if neither is whole."""
        file = self._files.open(path, write=False)
        try:
            copies = [file.pread(FILE_HEADER_BYTES, offset) for offset in (0, HEADER_COPY_OFFSET)]
        finally:
            file.close()
        reason = ""
        for data in copies:
            try:
                return decode_file_header(data, MAGIC, self._uuid, number, path)
            except ForeignFile:
                raise
            except DamagedFile as error:
                reason = reason or error.reason
        self._damaged(path, 0, f"no block of this journal can be read: {reason}")
        return None

    @property
    def _durable_end(self) -> int | None:
        """Returns up to where this journal is known to have been synced, by the header of the next one; None if
        unknown.
        """
        if self._at + 1 == len(self._sources):
            return None
        this, following = self._sources[self._at], self._sources[self._at + 1]
        if following.header is None or following.number != this.number + 1:
            return None
        return following.header.a

    def _next_source(self, offset: int = ALIGNMENT) -> None:
        """Opens the next journal that can be read, at `offset`; sets `finished` if there is none."""
        self.close()
        while self._at + 1 < len(self._sources):
            self._at += 1
            source = self._sources[self._at]
            self.end = JournalPosition(source.number, offset)
            offset = ALIGNMENT
            if source.header is not None:
                self._blocks = _Blocks(disk.open_uncached(self._files, source.path), source.number, source.header.b)
                if self._blocks.size < self.end.offset:
                    reason = f"the file ends here, and it was synced up to {self.end.offset}"
                    self._damaged(source.path, self._blocks.size, reason)
                return
        self.finished = True

    # ------------------------------------------------------------------------------------ blocks
    def _read_block(self) -> BlockRecords | None:
        """Returns the records of the block at `end`, and moves `end` after it. Returns None if no block is there; then
        `end` was moved on.
        """
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
        """Handles a block at `bad` that is not whole: either damage in durable data, after which the reader goes on, or
        the end.
        """
        behind = bad + (header.padded_bytes if header is not None else ALIGNMENT)
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
        self.damages.append(Damage(path, offset, reason))


class _Blocks:
    """The blocks of one journal file, read through a window that moves forward."""

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
        """Returns the header of the block at `offset`; None if no valid block of this use of the file begins there."""
        at = self._window(offset, BLOCK_HEADER_BYTES)
        return intact_block_header(self._data[at : at + BLOCK_HEADER_BYTES], self._salt, self.number, offset)

    def records(self, header: BlockHeader, offset: int) -> BlockRecords | None:
        if offset + header.padded_bytes > self.size:
            return None
        at = self._window(offset, header.padded_bytes)
        return intact_records(header, self._data, at + BLOCK_HEADER_BYTES)

    def find(self, offset: int, limit: int | None, bad: int) -> int | None:
        """Returns the offset of the first valid block header at or after `offset` and before `limit`. None if there is
        none, or if none there was made after the block at `bad` was synced.
        """
        limit = self.size if limit is None else min(limit, self.size)
        first: int | None = None
        for place in range(offset, limit, ALIGNMENT):
            at = self._window(place, BLOCK_HEADER_BYTES)
            header = self.header(place) if self._data.startswith(self._prefix, at) else None
            if header is not None:
                first = place if first is None else first
                if header.synced_upto > bad:
                    return first
        return None

    def torn_bytes(self, offset: int, header: BlockHeader | None) -> int:
        """Returns about how many bytes of a block were written at `offset`; zeros and blocks of an earlier use do not
        count.
        """
        if header is not None:
            return min(header.padded_bytes, self.size - offset)
        at = self._window(offset, BLOCK_HEADER_BYTES)
        return ALIGNMENT if self._data.startswith(self._prefix[4:], at + 4) else 0

    def _window(self, offset: int, size: int) -> int:
        """Makes `_data` contain `size` bytes from `offset` on, if the file has them. Returns where `offset` is in
        `_data`.
        """
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            self._start, at = offset, 0
            self._data = self._file.pread(max(WINDOW_BYTES, size), offset)
        return at
