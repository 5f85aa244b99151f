"""The files of the entry logs: names, index heads, deletion, and reading by offset. Written by entrylog/writer.py.

Reads of `DIRECT_READ_BYTES_MIN` and more bypass the page cache, where the file system allows it, into memory that is
used again: the disk writes into it once, and the entries are copied out of it. Smaller reads use the cache. Neither
reads more than was asked for, except the rest of its first and last block. Guarded by tests/bookie/store/test_reads.py
`test_large_reads_go_past_the_page_cache_and_small_ones_do_not`.

Also in this file, below its heading: a walk over the records of one extent, one after the other, without its table
(walk).
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from ....ledger.peer_format import ENTRY_HEADER_STRUCT
from ....runtime.files import DIRECT_ALIGNMENT, File, Files, join_path
from ...format import entry_log, index
from ...format.index import Extent, encode_extent
from ...format.journal import (
    FILE_HEADER_BYTES,
    RECORD_BYTES_MAX,
    DamagedFile,
    continue_crc32c,
    crc32c,
    decode_file_header,
)
from .. import disk
from ..index import ExtentLocation, IndexPage, LoadedIndexGroup, decode_page, find_record_number, find_run_end

_LOG = logging.getLogger("magnetar.bookie.store.entrylog")

EXTENTS_PER_SLICE_MAX = 64 * index.HEADS_PER_PAGE
"""The number of extent heads that are read at once: 180 KiB, whatever the size of the group."""
DIRECT_READ_BYTES_MIN = 256 << 10
ARENA_STEP_BYTES = 2 << 20
UNCOPIED_ENTRY_BYTES_MIN = 16 << 10
"""If the entries of a read have at least this size on average, they are copied one by one; smaller entries are cut from
one copy of all."""
LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".idx"


def entry_log_file_name(number: int) -> str:
    return f"{number:016d}{LOG_SUFFIX}"


def entry_log_index_file_name(number: int) -> str:
    return f"{number:016d}{INDEX_SUFFIX}"


class _Heads(NamedTuple):
    """A group of an index file: its offset, its number of extents, and the bytes of its heads in slices. If the group's
    checksum is wrong, reading the last slice raises DamagedFile."""

    offset: int
    extents: int
    slices: Iterator[bytes]


def _groups(files: Files, directory: str, number: int, uuid: bytes, end: int | None) -> Iterator[_Heads]:
    """Yields the groups of a log's index file up to the offset `end` (None: the end of the file). Raises DamagedFile,
    also while the slices of a group are read."""
    path = join_path(directory, entry_log_index_file_name(number))
    file = files.open(path, write=False)
    try:
        decode_file_header(file.pread(FILE_HEADER_BYTES, 0), index.INDEX_MAGIC, uuid, number, path)
        end = file.size() if end is None else end
        if file.size() < end:
            raise DamagedFile(path, file.size(), f"the file ends here and should be {end} bytes long")
        offset = FILE_HEADER_BYTES
        while offset < end:
            data = file.pread(index.GROUP_HEADER_BYTES, offset)
            header = index.decode_group_header_if_intact(data)
            size = 0 if header is None else index.GROUP_HEADER_BYTES + header.extent_heads_bytes + header.tables_bytes
            if header is None or offset + size > end:
                raise DamagedFile(path, offset, "there should be a group of the index")
            yield _Heads(offset, header.extents, _slices(file, offset, header, data))
            offset += size
    finally:
        file.close()


def _slices(file: File, group: int, header: index.IndexGroupHeader, data: bytes) -> Iterator[bytes]:
    crc = index.compute_group_header_checksum(data)
    offset = group + index.GROUP_HEADER_BYTES
    end = offset + header.extent_heads_bytes
    while offset < end:
        heads = file.pread(min(EXTENTS_PER_SLICE_MAX * index.EXTENT_HEAD_BYTES, end - offset), offset)
        crc = continue_crc32c(crc, heads)
        offset += len(heads)
        if offset == end and crc == header.crc:
            yield heads
            return
        if offset == end or not heads:
            break
        yield heads
    raise DamagedFile(file.path, group, "group of the index does not match its checksum")


def read_index_groups(
    files: Files, directory: str, number: int, uuid: bytes, end: int | None
) -> list[LoadedIndexGroup]:
    """Reads the index file of log `number` and returns its groups, when a store starts. `end` is the committed end of
    the index file; None: the end of the file. Raises DamagedFile, ForeignFile or NewerFormat, and FileNotFoundError if
    the file is missing."""
    groups: list[LoadedIndexGroup] = []
    for offset, extents, slices in _groups(files, directory, number, uuid, end):
        group = LoadedIndexGroup.start_empty(number, offset, extents)
        try:
            for heads in slices:
                group.add_extent_heads(heads)
        except ValueError as error:
            raise DamagedFile(join_path(directory, entry_log_index_file_name(number)), offset, str(error)) from error
        groups.append(group)
    return groups


def read_extents(
    files: Files, directory: str, number: int, uuid: bytes, end: int | None
) -> Iterator[list[index.Extent]]:
    """Yields all extents of log `number`, as lists of at most `EXTENTS_PER_SLICE_MAX` extents, in the order of the
    index file. `end` is the committed end of the index file; None: the end of the file. Raises the errors of
    `read_index_groups`.

    The checksum of a group is verified before the group's first extent is yielded."""
    for _, _, slices in _groups(files, directory, number, uuid, end):
        for heads in list(slices):
            yield list(index.decode_extent_heads(heads))


def list_entry_log_numbers(files: Files, directory: str) -> list[int]:
    """Returns the numbers of all entry logs whose log file or index file exists, in ascending order. Raises OSError if
    the directory cannot be listed."""
    found = {
        int(name.partition(".")[0])
        for name in files.list_directory(directory)
        if name.endswith((LOG_SUFFIX, INDEX_SUFFIX))
    }
    return sorted(found)


def measure_log_bytes(files: Files, directory: str) -> int:
    """Returns the total size in bytes of all log files in the directory. A file that is removed during the call does
    not count. Raises OSError if the directory cannot be listed."""
    total = 0
    for name in files.list_directory(directory) if files.exists(directory) else ():
        if name.endswith(LOG_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                total += disk.read_file_size(files, join_path(directory, name))
    return total


def remove_log_files(files: Files, directory: str, number: int) -> None:
    """Removes the log file and the index file of a log, without a sync. The log must be drained, or the mark must not
    name it. If a crash brings the files back, the next start removes them again.

    The next start can do so because `DrainedEntryLog` facts are kept for ever. Raises OSError if a file cannot be
    removed."""
    remove_log_data_file(files, directory, number)
    _remove(files, join_path(directory, entry_log_index_file_name(number)))


def remove_log_data_file(files: Files, directory: str, number: int) -> None:
    """Removes the log file of a log, without a sync. Keeps its index file, which says which entries the log contained.
    Raises OSError if it cannot be removed."""
    _remove(files, join_path(directory, entry_log_file_name(number)))


def _remove(files: Files, path: str) -> None:
    if files.exists(path):
        files.remove(path)


class ExtentReadResult(NamedTuple):
    """The result of one read of an extent: the extent's table (None: it is damaged), the consecutive stored entries
    that were found (none: they are not in this extent, or damaged), and whether the read met damage."""

    table: index.ExtentTable | None  # None: damaged
    entries: list[bytes]  # stored entries; none: not in this extent
    damaged: bool  # the table, or the record after these entries


class EntryLogReader:
    """Reads entries and index pages from the files of entry logs. Must be used by one worker only. Keeps at most
    `open_max` files open, and keeps the memory of its largest read."""

    def __init__(self, files: Files, directory: str, open_max: int) -> None:
        self._files = files
        self._directory = directory
        self._open_max = open_max
        self._open: OrderedDict[tuple[str, bool], File] = OrderedDict()
        self._direct = True  # until the file system says no
        self._arena = memoryview(b"")

    def read_pages(self, log: int, ledger: int, pages: list[IndexPage]) -> tuple[list[ExtentLocation], int]:
        """Reads these pages of a log's index file. Returns (locations of the ledger's extents in these pages, number of
        damaged pages). Raises OSError if the file cannot be read."""
        file = self._file(entry_log_index_file_name(log))
        found: list[ExtentLocation] = []
        bad = 0
        for page in pages:
            places = decode_page(log, ledger, page, file.pread(page.size, page.offset))
            if places is None:
                bad += 1
                _LOG.error("page of the index of log %d at %d is damaged", log, page.offset)
            else:
                found += places
        return found, bad

    def read_entries(
        self, place: ExtentLocation, table: index.ExtentTable | None, entry: int, count: int, bytes_max: int
    ) -> ExtentReadResult:
        """Reads `entry` and the entries after it from the extent at `place` and returns them, with one read of the
        file: at most `count` consecutive entries, of about `bytes_max` bytes together. `table` is the extent's table;
        None: reads it too.

        Stops before the first record that is damaged, or that contains another entry than the index says. Raises
        OSError if a file cannot be read."""
        if table is None:
            table = self.read_table(place)
        if table is None:
            _LOG.error("index table of log %d at %d is damaged", place.log, place.table_offset)
            return ExtentReadResult(None, [], True)
        first = find_record_number(place, table, entry)
        if first is None:
            return ExtentReadResult(table, [], False)
        end = find_run_end(table, first, count, bytes_max)
        offsets = table.offsets[first : end + 1]
        data = self._read(entry_log_file_name(place.log), offsets[-1] - offsets[0], place.extent.start + offsets[0])
        if len(data) < (end - first) * UNCOPIED_ENTRY_BYTES_MIN:
            data = bytes(data)
        entries = entry_log.decode_entries_if_intact(data, offsets, place.extent.ledger, entry)
        damaged = len(entries) < end - first
        if damaged:
            _LOG.error(
                "entry %d of ledger %d in log %d is damaged", entry + len(entries), place.extent.ledger, place.log
            )
        return ExtentReadResult(table, entries, damaged)

    def read_table(self, place: ExtentLocation) -> index.ExtentTable | None:
        """Reads the table of the extent at `place` from the log's index file and returns it. Returns None if the table
        is damaged. Raises OSError if the file cannot be read."""
        data = self._file(entry_log_index_file_name(place.log)).pread(place.extent.table_bytes, place.table_offset)
        return index.decode_table_if_intact(place.extent, data)

    def _read(self, name: str, size: int, offset: int) -> bytes | memoryview:
        """Reads up to `size` bytes at `offset` of a file. The result may be a view that is valid only until the next
        read."""
        if size >= DIRECT_READ_BYTES_MIN and self._direct:
            try:
                return self._read_direct(name, size, offset)
            except OSError as error:
                if error.errno not in disk.NO_DIRECT_IO_ERRORS:
                    raise
                self._direct = False
        return self._file(name).pread(size, offset)

    def _read_direct(self, name: str, size: int, offset: int) -> memoryview:
        before = offset % DIRECT_ALIGNMENT
        whole = before + size + -(before + size) % DIRECT_ALIGNMENT
        file = self._file(name, direct=True)
        if len(self._arena) < whole:
            self._arena = self._files.allocate_buffer(-(-whole // ARENA_STEP_BYTES) * ARENA_STEP_BYTES)
        found = file.pread_into(self._arena[:whole], offset - before)
        return self._arena[before : min(before + size, found)]

    def close_log(self, log: int) -> None:
        """Closes the open files of a log. A later read opens them again."""
        for key in (
            (entry_log_file_name(log), False),
            (entry_log_file_name(log), True),
            (entry_log_index_file_name(log), False),
        ):
            file = self._open.pop(key, None)
            if file is not None:
                file.close()

    def close(self) -> None:
        """Closes all open files."""
        while self._open:
            self._open.popitem()[1].close()

    def _file(self, name: str, *, direct: bool = False) -> File:
        key = name, direct
        file = self._open.get(key)
        if file is None:
            file = self._open[key] = self._files.open(join_path(self._directory, name), write=False, direct=direct)
            file.advise_random()  # what is next to an extent belongs to another ledger
            if len(self._open) > self._open_max:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(key)
        return file


# ---------------------------------------------------------------------------------------------------------- walk
# A walk over the records of one extent, one after the other, without its table: for the scrubber. In a worker.
#
# `run_step` reads about SCAN_SLICE_BYTES and checks every record in it: checksum, ledger, entry (ascending), and the
# entry's own checksum. It returns the bytes read, 0 at the end. Then `has_all_records` says whether the extent agrees
# with its head in the index, and `entries` and `offsets` are the right content of its table.


SCAN_SLICE_BYTES = 256 << 10
_CHECKED = ENTRY_HEADER_STRUCT.size - 4


class ExtentScan:
    """Reads and verifies the records of one extent, one slice per call of `run_step`, in a worker. At the end,
    `has_all_records` says whether the extent has exactly the good records that its head in the index promises. The
    constructor raises OSError if the log cannot be opened, such as FileNotFoundError."""

    def __init__(self, files: Files, path: str, extent: Extent) -> None:
        self._file = files.open(path, write=False)
        self._extent = extent
        self._offset = extent.start
        self._end = extent.start + extent.length
        self._bad = False
        self.entries: list[int] = []
        self.offsets = [0]

    @property
    def records(self) -> int:
        """The number of good records so far."""
        return len(self.entries)

    @property
    def has_all_records(self) -> bool:
        """Returns whether all records were read and are good, and are exactly those that the extent's head promises.
        Valid after `run_step` has returned 0."""
        extent = self._extent
        return (
            not self._bad
            and self._offset == self._end
            and len(self.entries) == extent.entries
            and (self.entries[0], self.entries[-1]) == (extent.first, extent.last)
        )

    def run_step(self) -> int:
        """Reads and verifies the next slice of records. Returns the number of bytes read; 0 at the end of the extent,
        and at the first bad record."""
        if self._bad or self._offset >= self._end:
            return 0
        try:
            data = self._file.pread(min(SCAN_SLICE_BYTES, self._end - self._offset), self._offset)
            size = entry_log.decode_record_size(data, 0)
            if len(data) < size <= min(self._end - self._offset, RECORD_BYTES_MAX):
                data = self._file.pread(size, self._offset)
        except OSError:
            self._bad = True
            return 0
        at = 0
        while (end := self._keep_record(data, at)) is not None:
            at = end
        self._bad = at == 0
        self._offset += at
        return len(data) if at else 0

    def _keep_record(self, data: bytes, at: int) -> int | None:
        """Verifies the record at `at` of `data` and records its entry. Returns where the record ends in `data`; None if
        the record is damaged or does not belong to this extent."""
        found = entry_log.verify_record_at(data, at)
        if found is None:
            return None
        end, ledger, entry = found
        stored = data[at + entry_log.RECORD_HEADER_BYTES : end]
        last = self.entries[-1] if self.entries else self._extent.first - 1
        if ledger != self._extent.ledger or entry <= last:
            return None
        if crc32c(stored[:_CHECKED], stored[ENTRY_HEADER_STRUCT.size :]) != ENTRY_HEADER_STRUCT.unpack_from(stored)[4]:
            return None
        self.entries.append(entry)
        self.offsets.append(self._offset + end - self._extent.start)
        return end

    def close(self) -> None:
        """Closes the log file."""
        self._file.close()


def rewrite_table(files: Files, path: str, offset: int, extent: Extent, walk: ExtentScan) -> bool:
    """Makes the table of an undamaged extent anew and writes it at `offset` of the index file. `walk` has scanned the
    extent. Returns False, and writes nothing, if the new table does not match the checksum in the extent's head. Raises
    NoSpace if the disk is full, or OSError if the index file cannot be opened."""
    again, table = encode_extent(extent.ledger, walk.entries, walk.offsets, extent.start)
    if again != extent:
        return False
    file = files.open(path)
    try:
        disk.write_buffers(files, file, [table], offset)
        disk.sync_file(files, file)
    finally:
        file.close()
    return True
