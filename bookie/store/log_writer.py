"""The writing side of entry logs and their index files: one flush at a time. Reading is store/log_files.py.

`LogWriter` (all calls from the flush worker, in this order; it is the middle of store/checkpoint.py):

    begin(table) ; write_slice() until False ; write_index()       → Written(log, ends, places)
    committed()                                                    after the mark is durable

A flush goes whole into one log; a new one is begun when it would pass `log_bytes_max`, and at every start (a log that
replay found is never appended to). Files are allocated ahead and written in slices of at most 1 MiB, each synced, so
that a big flush does not hold up the journal's syncs (p99 10 ms instead of 83 ms, measurements §4). A flush that met a
full disk is repeated from where the last committed one ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...runtime.files import Buffer, File, Files, join
from ..format import entry_log, index
from ..format.framing import FILE_HEADER_BYTES, FileHeader, encode_file_header
from . import disk
from .index import Place
from .log_files import index_name, log_name, places_of
from .memtable import Stored, Table

SLICE_BYTES = 1 << 20


class Written(NamedTuple):
    log: int
    log_end: int
    index_end: int
    places: list[Place]


class _Open:
    """The log being written."""

    __slots__ = ("allocated", "index", "index_end", "log", "log_end", "number")

    def __init__(self, number: int, log: File, index_: File) -> None:
        self.number = number
        self.log = log
        self.index = index_
        self.log_end = entry_log.DATA_OFFSET
        self.index_end = FILE_HEADER_BYTES
        self.allocated = 0


class LogWriter:
    def __init__(
        self, files: Files, directory: str, uuid: bytes, last_log: int, *, log_bytes_max: int, allocate_bytes: int
    ) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self._last_log = last_log
        self._log_bytes_max = log_bytes_max
        self._allocate_bytes = allocate_bytes
        self._open: _Open | None = None
        self._flush: _Flush | None = None
        self._written: Written | None = None

    @property
    def current(self) -> int:
        """The newest log's number; 0: none yet."""
        return self._last_log

    def begin(self, table: Table) -> None:
        """Starts the flush of a table: the log it goes to, and room for it."""
        estimate = table.size_bytes + table.entries * entry_log.RECORD_HEADER_BYTES
        current = self._open
        if (
            current is not None
            and current.log_end > entry_log.DATA_OFFSET
            and current.log_end + estimate > self._log_bytes_max
        ):
            self.close()
            current = None
        if current is None:
            current = self._open = self._create(self._last_log + 1)
        if current.log_end + estimate > current.allocated:
            steps = -(-(current.log_end + estimate) // self._allocate_bytes)
            disk.allocate(self._files, current.log, steps * self._allocate_bytes)
            current.allocated = steps * self._allocate_bytes
            disk.sync(self._files, current.log)
        self._flush = _Flush(table, current.log_end)

    def _create(self, number: int) -> _Open:
        """A new log and its index: headers synced, names synced. Overwrites what an aborted try left."""
        paths = join(self._directory, log_name(number)), join(self._directory, index_name(number))
        opened: list[File] = []
        for path, magic in zip(paths, (entry_log.MAGIC, index.MAGIC), strict=True):
            try:
                file = self._files.open(path, create=True)
            except OSError as error:
                disk.fail(self._files, f"create {path}", error)
            opened.append(file)
            file.truncate(0)
            disk.write(self._files, file, [encode_file_header(FileHeader(magic, self._uuid, number))], 0)
            disk.sync(self._files, file)
        disk.sync_directory(self._files, self._directory)
        self._last_log = number
        return _Open(number, opened[0], opened[1])

    def write_slice(self) -> bool:
        """Writes and syncs about 1 MiB more; False: all of it is written."""
        assert self._open is not None
        assert self._flush is not None
        offset = self._flush.end
        buffers = self._flush.next_slice()
        if not buffers:
            return False
        disk.write(self._files, self._open.log, buffers, offset)
        disk.sync(self._files, self._open.log)
        return True

    def write_index(self) -> Written:
        """Appends the group of this flush to the index file and syncs it."""
        assert self._open is not None
        assert self._flush is not None
        current, flush = self._open, self._flush
        group = index.encode_group(flush.extents, flush.tables)
        disk.write(self._files, current.index, [group], current.index_end)
        disk.sync(self._files, current.index)
        places = list(places_of(current.number, current.index_end, flush.extents))
        self._written = Written(current.number, flush.end, current.index_end + len(group), places)
        return self._written

    def committed(self) -> None:
        """The mark names the ends of the last flush: the next goes behind them."""
        assert self._open is not None
        assert self._written is not None
        self._open.log_end, self._open.index_end = self._written.log_end, self._written.index_end
        self._flush = self._written = None

    def close(self) -> None:
        if self._open is not None:
            self._open.log.truncate(max(self._open.log_end, FILE_HEADER_BYTES))
            self._open.log.close()
            self._open.index.close()
            self._open = None


class _Flush:
    """The records of one table in order, slice by slice, and the extents they make."""

    def __init__(self, table: Table, start: int) -> None:
        self.end = start
        self.extents: list[index.Extent] = []
        self.tables: list[bytes] = []
        self._records = self._walk(table)

    def next_slice(self) -> list[Buffer]:
        buffers: list[Buffer] = []
        size = 0
        for header, stored in self._records:
            buffers.append(header)
            buffers += stored
            size += len(header) + sum(map(len, stored))
            if size >= SLICE_BYTES:
                break
        self.end += size
        return buffers

    def _walk(self, table: Table) -> Iterator[tuple[bytes, Stored]]:
        position = self.end
        for ledger, run in table.sorted_runs():
            start, entries, offsets = position, list[int](), [0]
            for entry, stored in run:
                if entries and entry - entries[0] > index.DELTA_MAX:
                    self._extent(ledger, entries, offsets, start)
                    start, entries, offsets = position, [], [0]
                header = entry_log.encode_record_header(stored)
                position += len(header) + sum(map(len, stored))
                entries.append(entry)
                offsets.append(position - start)
                yield header, stored
            self._extent(ledger, entries, offsets, start)

    def _extent(self, ledger: int, entries: list[int], offsets: list[int], start: int) -> None:
        extent, table = index.encode_extent(ledger, entries, offsets, start)
        self.extents.append(extent)
        self.tables.append(table)
