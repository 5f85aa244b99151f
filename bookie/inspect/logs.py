"""The records of an entry log one after the other (format/entry_log.py), also after damage, without its index.

A record has its length, so a whole log can be read from 4096 on. Where the bytes are not a record, the walk yields
`Damage` once and continues at the next bytes that are one: length, ids and checksum are right. (Bytes of a message that
were made to look like a record can be taken for one there, because the index is not read.)

An open log ends where the mark says, a closed one where the last record of its index ends, and one without an index
where only zeros follow. Bytes after the end belong to a checkpoint that has not ended, and are not read.

The places of each entry of a ledger: in entry logs by their indexes, and in the journal from the mark on.

An entry may be in several places (replayed after a crash, moved by a compaction that has not ended, still in the
journal). Each copy counts, and each is read and checked here. The extents of one ledger are in memory, its entries are
not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...ledger.peer_format import ENTRY_HEADER
from ..format.entry_log import DATA_OFFSET, MAGIC, RECORD_HEADER_BYTES, EntryIds, decode_record_if_intact, entry_ids
from ..format.journal import RECORD_BYTES_MAX, RecordType, crc32c
from ..store.boot import ENTRIES, JOURNAL
from ..store.entrylog.files import entry_log_file_name
from ..store.index import ExtentLocation
from ..store.replay import journal_file_name
from . import indexes, journals
from .indexes import index_file_path, read_ledger_index_overview, walk_log_extents
from .snapshot import (
    WINDOW_BYTES,
    Damage,
    ReadableFile,
    RemovedFile,
    Snapshot,
    open_file,
    read_file_in_parts,
    read_header_or_damage,
    snapshot_directory,
)

_RECORD = re.compile(rb"(?=\x00(?!\x00\x00[\x00-\x23])[\x00-\x80].{6}[\x00-\x7f].{7}[\x00-\x7f])", re.S)
"""Matches the first bytes of a record: a length of 36 bytes to 8 MiB, a checksum, and two ids that are not negative."""


class LoggedEntry(NamedTuple):
    """A record of an entry log: its location in the log, the ledger id and entry id of the entry in it, and the entry's
    last-add-confirmed."""

    log: int
    offset: int  # of the record
    bytes: int  # of the record
    ledger: int
    entry: int
    lac: int


class OpenedLogFile(NamedTuple):
    """The opened file of an entry log: its path, its size, and the end of its committed part, in bytes.
    `walk_entry_log` yields this item before the log's records."""

    path: str
    bytes: int
    end: int  # what counts of it


Found = OpenedLogFile | LoggedEntry | Damage | RemovedFile


def log_path(snapshot: Snapshot, log: int) -> str:
    return snapshot.path(ENTRIES, entry_log_file_name(log))


def classify_missing_log(snapshot: Snapshot, log: int) -> Damage | RemovedFile:
    """Returns RemovedFile if the bookie itself removed this missing entry log, otherwise Damage.

    A log without living entries is deleted before its index, so its index may still exist. This function does not see
    tombstones that are only in the journal: until the next checkpoint, a log that was removed because of them counts as
    Damage."""
    path, index = log_path(snapshot, log), index_file_path(snapshot, log)
    if not snapshot.is_committed(log) or not snapshot.files.exists(index):
        return RemovedFile(path)
    facts = read_ledger_index_overview(snapshot_directory(snapshot.files, snapshot.directory)).facts
    if log in facts.drained or not snapshot.files.exists(index) or snapshot.files.exists(path):
        return RemovedFile(path)
    if all(
        isinstance(each, ExtentLocation) and each.extent.ledger in facts.tombstones
        for each in walk_log_extents(snapshot, log)
    ):
        return RemovedFile(path)
    return Damage(path, 0, "the log is missing, and its index is there")


def walk_entry_log(snapshot: Snapshot, log: int, start: int = DATA_OFFSET) -> Iterator[Found]:
    """Yields the content of an entry log: first an OpenedLogFile, then the records from the offset `start` on. Yields a
    Damage for each damaged part. `start` must be the offset of a record; otherwise the next item is a Damage."""
    path = log_path(snapshot, log)
    file = open_file(snapshot, path)
    if file is None:
        yield classify_missing_log(snapshot, log)
        return
    try:
        header = read_header_or_damage(snapshot, file, MAGIC, log)
        if isinstance(header, Damage) and snapshot.is_committed(log):
            yield header
        end = _end_offset(snapshot, log)
        yield OpenedLogFile(path, file.size(), file.size() if end is None else end)
        yield from _Walk(file, log, end).records(max(start, DATA_OFFSET))
    finally:
        file.close()


def _end_offset(snapshot: Snapshot, log: int) -> int | None:
    """Returns the length in bytes that the log must have; None if that is unknown."""
    ends = snapshot.committed_ends_of_log(log)
    if ends is not None:
        return ends[0]
    if not snapshot.is_committed(log):
        return DATA_OFFSET
    last = None
    for found in walk_log_extents(snapshot, log):
        if isinstance(found, Damage | RemovedFile):
            return None
        last = max(last or 0, found.extent.start + found.extent.length)
    return last


class _Walk:
    def __init__(self, file: ReadableFile, log: int, end: int | None) -> None:
        self._file = file
        self._log = log
        self._known_end = end is not None
        self._end = file.size() if end is None else end
        self._base = 0
        self._window = b""

    def records(self, offset: int) -> Iterator[LoggedEntry | Damage]:
        while offset < self._end:
            found = self._record(offset)
            if found is None:
                if self._only_zeros(offset):
                    if self._known_end:
                        yield self._short(offset)
                    return
                yield Damage(self._file.path, offset, "not a whole record")
                following = self._next_record(offset + 1)
                if following is None:
                    return
                offset = following
                continue
            yield found
            offset += found.bytes
        if offset > self._end:
            yield Damage(self._file.path, self._end, "a record goes on after the end of what counts")

    def _short(self, offset: int) -> Damage:
        what = "the file ends here" if offset >= self._file.size() else "only zeros follow"
        return Damage(self._file.path, offset, f"{what}, and it should have records up to {self._end}")

    def _bytes(self, offset: int, size: int) -> bytes:
        if offset < self._base or offset + size > self._base + len(self._window):
            self._base = offset
            self._window = self._file.pread(max(size, WINDOW_BYTES), offset)
        at = offset - self._base
        return self._window[at : at + size]

    def _record(self, offset: int) -> LoggedEntry | None:
        head = self._bytes(offset, RECORD_HEADER_BYTES)
        length = int.from_bytes(head[:4], "big")
        if len(head) < RECORD_HEADER_BYTES or not ENTRY_HEADER.size <= length <= RECORD_BYTES_MAX:
            return None
        size = RECORD_HEADER_BYTES + length
        stored = decode_record_if_intact(self._bytes(offset, size), 0, size)
        ids = entry_ids(stored) if stored is not None else None
        if stored is None or ids is None or ids.ledger < 0 or ids.entry < 0:
            return None
        return LoggedEntry(self._log, offset, size, ids.ledger, ids.entry, ENTRY_HEADER.unpack_from(stored)[2])

    def _only_zeros(self, start: int) -> bool:
        return not any(data.strip(b"\0") for _, data in read_file_in_parts(self._file, start, self._end))

    def _next_record(self, start: int) -> int | None:
        overlap = 32
        for base in range(start, min(self._end, self._file.size()), WINDOW_BYTES):
            data = self._file.pread(WINDOW_BYTES + overlap, base)
            for match in _RECORD.finditer(data):
                at = base + match.start()
                if match.start() < WINDOW_BYTES and self._record(at) is not None:
                    return at
        return None


class EntryCopy(NamedTuple):
    """A copy of an entry in a log or a journal, and the location of the copy. `damage` says what is wrong with the
    copy; None: the copy is good."""

    entry: int
    kind: str  # "log" or "journal"
    number: int
    offset: int
    bytes: int
    damage: str | None
    path: str


def walk_ledger_extents(snapshot: Snapshot, ledger: int) -> Iterator[ExtentLocation | Damage | RemovedFile]:
    """Yields the extents of a ledger in all logs, each with its location. Yields a Damage for each damaged part of a
    log's index, and a RemovedFile for each log that the bookie has removed."""
    for log in indexes.list_entry_log_numbers(snapshot):
        for found in indexes.walk_log_extents(snapshot, log):
            if not isinstance(found, ExtentLocation) or found.extent.ledger == ledger:
                yield found


def find_log_copies(
    snapshot: Snapshot, places: list[ExtentLocation], entry: int | None = None
) -> Iterator[EntryCopy | Damage | RemovedFile]:
    """Yields the copies of entries in the extents `places` of one ledger, extent by extent, in entry order. With
    `entry`, yields only the copies of that entry. Yields a Damage or a RemovedFile where copies cannot be read."""
    for place in sorted(places, key=lambda place: (place.extent.first, place.log)):
        if entry is None or place.extent.first <= entry <= place.extent.last:
            yield from _in_extent(snapshot, place, entry)


def _in_extent(
    snapshot: Snapshot, place: ExtentLocation, entry: int | None
) -> Iterator[EntryCopy | Damage | RemovedFile]:
    opened = indexes.open_index_file(snapshot, place.log)
    if not isinstance(opened, indexes.IndexFile):
        yield opened
        return
    try:
        table = opened.table(place)
    finally:
        opened.file.close()
    if isinstance(table, Damage):
        yield table
        return
    file = open_file(snapshot, log_path(snapshot, place.log))
    if file is None:
        yield classify_missing_log(snapshot, place.log)
        return
    try:
        for i, delta in enumerate(table.deltas):
            if entry in (None, place.extent.first + delta):
                begin, end = table.offsets[i], table.offsets[i + 1]
                yield _copy(file, place, place.extent.first + delta, place.extent.start + begin, end - begin)
    finally:
        file.close()


def _copy(file: ReadableFile, place: ExtentLocation, entry: int, offset: int, size: int) -> EntryCopy:
    stored = decode_record_if_intact(file.pread(size, offset), 0, size)
    damage = None
    if stored is None:
        damage = "the record does not match its checksum"
    elif entry_ids(stored) != EntryIds(place.extent.ledger, entry):
        damage = f"the record is of {entry_ids(stored)}"
    elif crc32c(stored[: ENTRY_HEADER.size - 4], stored[ENTRY_HEADER.size :]) != ENTRY_HEADER.unpack_from(stored)[4]:
        damage = "the entry does not match the checksum of who wrote it"
    return EntryCopy(entry, "log", place.log, offset, size, damage, file.path)


def find_journal_copies(
    snapshot: Snapshot, ledger: int, entry: int | None = None
) -> Iterator[EntryCopy | Damage | RemovedFile]:
    """Yields the copies of a ledger's entries in the journal after the checkpoint mark: entries that no finished
    checkpoint has written to a log. With `entry`, yields only the copies of that entry."""
    for found in _blocks_after_mark(snapshot):
        if isinstance(found, Damage | RemovedFile):
            yield found
            continue
        path = snapshot.path(JOURNAL, journal_file_name(found.journal))
        for offset, record in found.records_with_offsets():
            if record.type is RecordType.ADD and record.ledger == ledger and entry in (None, record.entry):
                yield EntryCopy(record.entry, "journal", found.journal, offset, len(record.payload), None, path)


def read_journal_record_types(snapshot: Snapshot, ledger: int) -> Iterator[str]:
    """Yields the name of the type of each journal record after the checkpoint mark that concerns the ledger."""
    for found in _blocks_after_mark(snapshot):
        if isinstance(found, journals.Block):
            for record in found.records:
                last = record.entry if record.type is RecordType.TOMBSTONE else record.ledger
                if record.ledger <= ledger <= last:
                    yield record.type.name


def _blocks_after_mark(snapshot: Snapshot) -> Iterator[journals.Block | Damage | RemovedFile]:
    position = (0, 0) if snapshot.mark is None else snapshot.mark.position
    for number in journals.list_journal_numbers(snapshot):
        if number >= position[0]:
            for found in journals.walk_journal(snapshot, number, position[1] if number == position[0] else 0):
                if isinstance(found, journals.Block | Damage | RemovedFile):
                    yield found
