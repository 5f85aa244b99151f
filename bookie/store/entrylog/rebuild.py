"""Rebuilds the index of an entry log from the log itself, whose records have their ids (format/entry_log.py).

The log is read from 4096 to its end, record by record. A bad record is skipped by its length if a valid one follows it.
If the length is damaged too, the reader searches for the next place where a record begins. (The length comes first,
because a client may have written bytes into the bad record that look like one.) The bytes between are *lost*; which
entries they had is unknown. Zeros up to the end of the file are no loss, unless the file is known to end `exact`ly: a
log is allocated ahead, and may have that room again after a power loss.

Consecutive records of one ledger in ascending order become one extent, as a flush would have written them; groups of
about GROUP_ENTRIES entries bound the memory. The file is made under a temporary name, synced, renamed: a crash leaves
the old index or the new one. A log that lost its end is cut there, so that index and log agree again.
All of it runs in a worker. Guarded by tests/bookie/store/test_rebuild.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ....runtime.files import File, Files, join
from ...format import entry_log, index
from ...format.framing import FILE_HEADER_BYTES, FileHeader, encode_file_header
from ...format.journal import RECORD_BYTES_MAX
from .. import disk
from .files import index_name, log_name

_LOG = logging.getLogger("magnetar.bookie.store.entrylog")

GROUP_ENTRIES = 1 << 16
TEMPORARY = ".tmp"
_WINDOW_BYTES = 4 << 20
_PLAUSIBLE = re.compile(rb"\x00(?!\x00{3})[\x00-\x7f].{6}\x00.{7}\x00", re.DOTALL)
"""Matches the bytes at which a record may begin: a length below 8 MiB and not 0, a checksum, a ledger and an entry
below 2^56."""


class Found(NamedTuple):
    """A record found in a log: where it begins and ends, and its ids."""

    start: int
    end: int
    ids: entry_log.EntryIds


class Lost(NamedTuple):
    """A stretch of a log, between two offsets, in which no record can be read."""

    start: int
    end: int


class Scan:
    """A scan of a log. `records` gives every valid record, in order; then `lost` says what is missing between them."""

    def __init__(self, file: File, *, exact: bool = True) -> None:
        self._file = file
        self._exact = exact
        self._size = file.size()
        self._data = b""
        self._start = 0
        self.lost: list[Lost] = []

    def records(self) -> Iterator[Found]:
        offset = entry_log.DATA_OFFSET
        while offset < self._size:
            found = self._record(offset)
            if found is None:
                if not self._exact and self._zeros_from(offset):
                    return
                found = self._behind(offset) or self._search(offset)
                self.lost.append(Lost(offset, self._size if found is None else found.start))
                if found is None:
                    return
            yield found
            offset = found.end

    def _record(self, offset: int) -> Found | None:
        at = self._window(offset, entry_log.RECORD_HEADER_BYTES)
        length = int.from_bytes(self._data[at : at + 4], "big")
        end = offset + entry_log.RECORD_HEADER_BYTES + length
        if not 0 < length <= RECORD_BYTES_MAX or end > self._size:
            return None  # `_window` gives nothing after the end of the file
        at = self._window(offset, end - offset)
        stored = entry_log.decode_record(self._data, at, at + end - offset)
        ids = None if stored is None else entry_log.entry_ids(stored)
        return None if ids is None else Found(offset, end, ids)

    def _zeros_from(self, offset: int) -> bool:
        return not any(
            self._file.pread(_WINDOW_BYTES, at).strip(b"\0") for at in range(offset, self._size, _WINDOW_BYTES)
        )

    def _behind(self, offset: int) -> Found | None:
        """The record after the bad one at `offset`, if its length is right."""
        at = self._window(offset, entry_log.RECORD_HEADER_BYTES)
        return self._record(offset + entry_log.RECORD_HEADER_BYTES + int.from_bytes(self._data[at : at + 4], "big"))

    def _search(self, offset: int) -> Found | None:
        """The first valid record after `offset`."""
        offset += 1
        while offset < self._size:
            at = self._window(offset, min(_WINDOW_BYTES, self._size - offset))
            window_end = self._start + len(self._data)
            match = _PLAUSIBLE.search(self._data, at)
            if match is None:
                if window_end >= self._size:
                    return None
                offset = max(window_end - 32, offset + 1)
                continue
            offset = self._start + match.start()
            found = self._record(offset)
            if found is not None:
                return found
            offset += 1
        return None

    def _window(self, offset: int, size: int) -> int:
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            self._start, at = offset, 0
            self._data = self._file.pread(max(_WINDOW_BYTES, size), offset)
        return at


class _Groups:
    """Writes groups of extents to a new index file."""

    def __init__(self, files: Files, file: File) -> None:
        self._files = files
        self._file = file
        self._end = FILE_HEADER_BYTES
        self._extents: list[index.Extent] = []
        self._tables: list[bytes] = []
        self._waiting = 0
        self._run: list[Found] = []
        self.entries = 0

    def add(self, found: Found) -> None:
        self.entries += 1
        last = self._run[-1] if self._run else None
        if last is not None and not (
            last.end == found.start
            and last.ids.ledger == found.ids.ledger
            and found.ids.entry > last.ids.entry
            and found.ids.entry - self._run[0].ids.entry <= index.DELTA_MAX
            and len(self._run) < GROUP_ENTRIES
        ):
            self._end_run()
        self._run.append(found)

    def _end_run(self) -> None:
        run, self._run = self._run, []
        start = run[0].start
        offsets = [record.start - start for record in run] + [run[-1].end - start]
        extent, table = index.encode_extent(run[0].ids.ledger, [record.ids.entry for record in run], offsets, start)
        self._extents.append(extent)
        self._tables.append(table)
        self._waiting += len(run)
        if self._waiting >= GROUP_ENTRIES:
            self._flush()

    def _flush(self) -> None:
        order = sorted(range(len(self._extents)), key=lambda at: self._extents[at][:2])
        group = index.encode_group([self._extents[at] for at in order], [self._tables[at] for at in order])
        self._end += disk.write(self._files, self._file, [group], self._end)
        self._extents, self._tables, self._waiting = [], [], 0

    def close(self) -> None:
        if self._run:
            self._end_run()
        if self._extents:
            self._flush()


def rebuild_index(
    files: Files, directory: str, number: int, uuid: bytes, tell: Callable[[list[Lost]], None], *, exact: bool
) -> None:
    """Rebuilds the index of log `number`. Calls `tell` with what is lost before it replaces a file. NoSpace."""
    log_path, path = join(directory, log_name(number)), join(directory, index_name(number))
    temporary = path + TEMPORARY
    source = files.open(log_path)
    try:
        scan = Scan(source, exact=exact)
        target = _create(files, temporary, uuid, number)
        try:
            groups = _Groups(files, target)
            for found in scan.records():
                groups.add(found)
            groups.close()
            disk.sync(files, target)
        finally:
            target.close()
        tell(scan.lost)
        files.rename(temporary, path)
        disk.sync_directory(files, directory)
        if scan.lost and scan.lost[-1].end == source.size():
            source.truncate(scan.lost[-1].start)
    finally:
        source.close()
    _LOG.warning("%s was rebuilt: %d entries, %d regions of the log lost", path, groups.entries, len(scan.lost))


def _create(files: Files, path: str, uuid: bytes, number: int) -> File:
    try:
        file = files.open(path, create=True)
    except OSError as error:
        disk.fail(files, f"create {path}", error)
    file.truncate(0)
    disk.write(files, file, [encode_file_header(FileHeader(index.MAGIC, uuid, number))], 0)
    return file
