"""The journal, reading side: what counts after a crash, and what is a torn tail or damage (BookKeeper protocol §2.2).

Rule: from the mark on, journals are read in the order of their ids, without a gap. In a journal that has a successor
everything up to the end that the successor's header names was synced before the successor was begun: a bad block before
that end is damage in durable data. In the newest journal the first bad block ends the journal; when any later block
of it is valid and says that it was built after those bytes were synced, the bad one is damage in durable data.
Damage stops the start with file and offset. Anything else was never acknowledged: it is cut, and counted.

`JournalReader.read_some` is called from a worker; it returns blocks in order, each with the position behind it.
Guarded by tests/bookie/test_journal.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.files import File, Files, join
from ..format.framing import FILE_HEADER_BYTES, Damaged, decode_file_header
from ..format.journal import ALIGNMENT, BLOCK_HEADER_BYTES, MAGIC, Record, decode_block_header, decode_records
from .journal import Position, journal_name, journal_numbers

_SCAN_BYTES = 1 << 20


class Replayed(NamedTuple):
    records: list[Record]
    end: Position  # behind the block


class _Source(NamedTuple):
    number: int
    path: str
    previous_end: int
    salt: int


class JournalReader:
    """Reads all blocks from `start` to the end of all that counts."""

    def __init__(self, files: Files, directory: str, uuid: bytes, start: Position) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self._sources = self._open_sources(start)
        self._index = 0
        self._file: File | None = None
        self.end = start
        self.torn_bytes = 0
        self.finished = False

    def _open_sources(self, start: Position) -> list[_Source]:
        numbers = [number for number in journal_numbers(self._files, self._directory) if number >= start.journal]
        expected = list(range(start.journal, start.journal + max(len(numbers), 1)))
        if numbers != expected:
            missing = next(number for number in expected if number not in numbers)
            raise Damaged(
                join(self._directory, journal_name(missing)),
                0,
                "this journal is missing, and the mark or its neighbours need it",
            )
        return [self._source(number) for number in numbers]

    def _source(self, number: int) -> _Source:
        path = join(self._directory, journal_name(number))
        file = self._files.open(path, write=False)
        try:
            header = decode_file_header(file.pread(FILE_HEADER_BYTES, 0), MAGIC, self._uuid, number, path)
        finally:
            file.close()
        return _Source(number, path, header.a, header.b)

    def read_some(self, bytes_max: int) -> list[Replayed]:
        """The next blocks, about `bytes_max` of them; `finished` is set with the last."""
        blocks: list[Replayed] = []
        size = 0
        while size < bytes_max and not self.finished:
            block = self._next_block()
            if block is not None:
                size += block.end.offset - self.end.offset
                self.end = block.end
                blocks.append(block)
        return blocks

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_block(self) -> Replayed | None:
        """The block at `end`; None when this journal is over (and moves to the next)."""
        source = self._sources[self._index]
        last = self._index == len(self._sources) - 1
        durable_end = None if last else self._sources[self._index + 1].previous_end
        if self._file is None:
            self._file = self._files.open(source.path, write=False)
        if durable_end is not None and self.end.offset >= durable_end:
            self._next_source()
            return None
        found = self._read_block(self._file, source, self.end.offset)
        if found is not None:
            return found
        if durable_end is not None:
            raise Damaged(source.path, self.end.offset, f"bad block, and the journal was synced up to {durable_end}")
        self._judge_tail(self._file, source, self.end.offset)
        self.finished = True
        self.close()
        return None

    def _next_source(self) -> None:
        self.close()
        self._index += 1
        self.end = Position(self._sources[self._index].number, ALIGNMENT)

    def _read_block(self, file: File, source: _Source, offset: int) -> Replayed | None:
        data = file.pread(ALIGNMENT, offset)
        header = decode_block_header(data, source.salt, source.number)
        if header is None or offset + header.padded_bytes > file.size():
            return None
        if header.padded_bytes > ALIGNMENT:
            data += file.pread(header.padded_bytes - ALIGNMENT, offset + ALIGNMENT)
        records = decode_records(header, data[BLOCK_HEADER_BYTES:])
        if records is None:
            return None
        return Replayed(records, Position(source.number, offset + header.padded_bytes))

    def _judge_tail(self, file: File, source: _Source, bad: int) -> None:
        """Raises Damaged when a later block proves that the bad one was synced; else counts what is cut."""
        for start in range(bad, file.size(), _SCAN_BYTES):
            chunk = file.pread(_SCAN_BYTES, start)
            for at in range(0, len(chunk), ALIGNMENT):
                header = decode_block_header(chunk[at : at + BLOCK_HEADER_BYTES], source.salt, source.number)
                if header is None:
                    continue
                if header.synced_upto > bad:
                    raise Damaged(
                        source.path,
                        bad,
                        f"bad block, and a later one was built when it was synced up to {header.synced_upto}",
                    )
                self.torn_bytes += header.padded_bytes
        if bad + ALIGNMENT <= file.size() and self.torn_bytes == 0 and any(file.pread(ALIGNMENT, bad)[:4]):
            self.torn_bytes = ALIGNMENT
