"""The records of an entry log one after the other (format/entry_log.py), also after damage, without its index.

A record has its length, so a whole log can be read from 4096 on. Where the bytes are not a record, the walk yields
`FileDamage` once and continues at the next bytes that are one: length, ids and checksum are right. (Bytes of a
message that were made to look like a record can be taken for one there, because the index is not read.)

An open log ends where the mark says, a closed one where the last record of its index ends, and one without an index
where only zeros follow. Bytes after the end belong to a checkpoint that has not ended, and are not read.

**The copies of each entry of a ledger** (`EntryCopy`) are found in entry logs by their indexes, and in the journal from
the mark on. An entry may be in several places (replayed after a crash, moved by a compaction that has not ended, still
in the journal). Each copy counts, and each is read and checked here. The extents of one ledger are in memory, its
entries are not.

Also in this file, below its heading: the index files of logs (indexes).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from pyroaring import BitMap64

from ...ledger.peer_format import ENTRY_HEADER_STRUCT
from ..format import index, ledger_index
from ..format.entry_log import ENTRY_LOG_MAGIC as LOG_MAGIC
from ..format.entry_log import (
    FIRST_RECORD_OFFSET,
    RECORD_HEADER_BYTES,
    EntryIds,
    decode_entry_ids,
    decode_record_if_intact,
)
from ..format.index import (
    EXTENT_HEAD_BYTES,
    GROUP_HEADER_BYTES,
    GROUP_MAGIC,
    INDEX_MAGIC,
    Extent,
    ExtentTable,
    IndexGroupHeader,
)
from ..format.journal import FILE_HEADER_BYTES, RECORD_BYTES_MAX, RecordType, crc32c
from ..format.ledger_index import LEDGER_INDEX_MAGIC, LEDGER_RECORD_BYTES, LedgerIndexRecord, LedgerState, Tombstone
from ..store.boot import ENTRIES_FOLDER, JOURNAL_FOLDER, LEDGERS_FOLDER
from ..store.entrylog.files import INDEX_SUFFIX, LOG_SUFFIX, entry_log_file_name, entry_log_index_file_name
from ..store.index import ExtentLocation
from ..store.index_files import LEDGER_INDEX_SUFFIX, ledger_index_file_name
from ..store.replay import journal_file_name
from ..store.state_log import StateLog
from . import journals
from .snapshot import (
    READ_WINDOW_BYTES,
    FileDamage,
    ReadableFile,
    RemovedFile,
    StoreSnapshot,
    list_file_numbers,
    open_file,
    read_file_in_parts,
    read_header_or_damage,
    snapshot_directory,
)

_RECORD = re.compile(rb"(?=\x00(?!\x00\x00[\x00-\x23])[\x00-\x80].{6}[\x00-\x7f].{7}[\x00-\x7f])", re.S)
"""Matches the first bytes of a record: a length of 36 bytes to 8 MiB, a checksum, and two ids that are not negative."""


class LoggedEntry(NamedTuple):
    """A record of an entry log: its location in the log, the ledger id and entry id of the entry in it, and the entry's
    last-add-confirmed (`lac`)."""

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


EntryLogFinding = OpenedLogFile | LoggedEntry | FileDamage | RemovedFile


def log_path(snapshot: StoreSnapshot, log: int) -> str:
    return snapshot.path(ENTRIES_FOLDER, entry_log_file_name(log))


def classify_missing_log(snapshot: StoreSnapshot, log: int) -> FileDamage | RemovedFile:
    """Returns RemovedFile if the bookie itself removed this missing entry log, otherwise FileDamage. Raises the errors
    of `snapshot_directory`, which reads the mark again, and InvalidRequest if an index has a newer format than this
    Magnetar knows.

    A log without living entries is deleted before its index, so its index may still exist. This function does not see
    tombstones that are only in the journal: until the next checkpoint, a log that was removed because of them counts as
    FileDamage."""
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
    return FileDamage(path, 0, "the log is missing, and its index is there")


def walk_entry_log(snapshot: StoreSnapshot, log: int, start: int = FIRST_RECORD_OFFSET) -> Iterator[EntryLogFinding]:
    """Yields the content of an entry log: first an OpenedLogFile, then the records from the offset `start` on. Yields a
    FileDamage for each damaged part. `start` must be the offset of a record; otherwise the next item is a FileDamage.
    Raises the errors of `classify_missing_log`."""
    path = log_path(snapshot, log)
    file = open_file(snapshot, path)
    if file is None:
        yield classify_missing_log(snapshot, log)
        return
    try:
        header = read_header_or_damage(snapshot, file, LOG_MAGIC, log)
        if isinstance(header, FileDamage) and snapshot.is_committed(log):
            yield header
        end = _end_offset(snapshot, log)
        yield OpenedLogFile(path, file.size(), file.size() if end is None else end)
        yield from _Walk(file, log, end).records(max(start, FIRST_RECORD_OFFSET))
    finally:
        file.close()


def _end_offset(snapshot: StoreSnapshot, log: int) -> int | None:
    """Returns the length in bytes that the log must have; None if that is unknown."""
    ends = snapshot.committed_ends_of_log(log)
    if ends is not None:
        return ends[0]
    if not snapshot.is_committed(log):
        return FIRST_RECORD_OFFSET
    last = None
    for found in walk_log_extents(snapshot, log):
        if isinstance(found, FileDamage | RemovedFile):
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

    def records(self, offset: int) -> Iterator[LoggedEntry | FileDamage]:
        while offset < self._end:
            found = self._record(offset)
            if found is None:
                if self._only_zeros(offset):
                    if self._known_end:
                        yield self._short(offset)
                    return
                yield FileDamage(self._file.path, offset, "not a whole record")
                following = self._next_record(offset + 1)
                if following is None:
                    return
                offset = following
                continue
            yield found
            offset += found.bytes
        if offset > self._end:
            yield FileDamage(self._file.path, self._end, "a record goes on after the end of what counts")

    def _short(self, offset: int) -> FileDamage:
        what = "the file ends here" if offset >= self._file.size() else "only zeros follow"
        return FileDamage(self._file.path, offset, f"{what}, and it should have records up to {self._end}")

    def _bytes(self, offset: int, size: int) -> bytes:
        if offset < self._base or offset + size > self._base + len(self._window):
            self._base = offset
            self._window = self._file.pread(max(size, READ_WINDOW_BYTES), offset)
        at = offset - self._base
        return self._window[at : at + size]

    def _record(self, offset: int) -> LoggedEntry | None:
        head = self._bytes(offset, RECORD_HEADER_BYTES)
        length = int.from_bytes(head[:4], "big")
        if len(head) < RECORD_HEADER_BYTES or not ENTRY_HEADER_STRUCT.size <= length <= RECORD_BYTES_MAX:
            return None
        size = RECORD_HEADER_BYTES + length
        stored = decode_record_if_intact(self._bytes(offset, size), 0, size)
        ids = decode_entry_ids(stored) if stored is not None else None
        if stored is None or ids is None or ids.ledger < 0 or ids.entry < 0:
            return None
        return LoggedEntry(self._log, offset, size, ids.ledger, ids.entry, ENTRY_HEADER_STRUCT.unpack_from(stored)[2])

    def _only_zeros(self, start: int) -> bool:
        return not any(data.strip(b"\0") for _, data in read_file_in_parts(self._file, start, self._end))

    def _next_record(self, start: int) -> int | None:
        overlap = 32
        for base in range(start, min(self._end, self._file.size()), READ_WINDOW_BYTES):
            data = self._file.pread(READ_WINDOW_BYTES + overlap, base)
            for match in _RECORD.finditer(data):
                at = base + match.start()
                if match.start() < READ_WINDOW_BYTES and self._record(at) is not None:
                    return at
        return None


class EntryCopy(NamedTuple):
    """A copy of an entry in a log or a journal: where the copy is (`number`: that of the log or journal; `offset`: of
    the record in the file `path`), and its size in bytes with the record's header (in a journal: without it). `damage`
    says what is wrong with the copy; None: the copy is good."""

    entry: int
    kind: str  # "log" or "journal"
    number: int
    offset: int
    bytes: int
    damage: str | None
    path: str


def walk_ledger_extents(snapshot: StoreSnapshot, ledger: int) -> Iterator[ExtentLocation | FileDamage | RemovedFile]:
    """Yields the extents of a ledger in all logs, each with its location. Yields a FileDamage for each damaged part of
    a log's index, and a RemovedFile for each log that the bookie has removed. Raises InvalidRequest if a file has a
    newer format than this Magnetar knows."""
    for log in list_entry_log_numbers(snapshot):
        for found in walk_log_extents(snapshot, log):
            if not isinstance(found, ExtentLocation) or found.extent.ledger == ledger:
                yield found


def find_log_copies(
    snapshot: StoreSnapshot, places: list[ExtentLocation], entry: int | None = None
) -> Iterator[EntryCopy | FileDamage | RemovedFile]:
    """Yields the copies of entries in the extents `places` of one ledger, extent by extent, in entry order. With
    `entry`, yields only the copies of that entry. Yields a FileDamage or a RemovedFile where copies cannot be read.
    Raises the errors of `classify_missing_log` if a log is missing."""
    for place in sorted(places, key=lambda place: (place.extent.first, place.log)):
        if entry is None or place.extent.first <= entry <= place.extent.last:
            yield from _in_extent(snapshot, place, entry)


def _in_extent(
    snapshot: StoreSnapshot, place: ExtentLocation, entry: int | None
) -> Iterator[EntryCopy | FileDamage | RemovedFile]:
    opened = open_index_file(snapshot, place.log)
    if not isinstance(opened, IndexFile):
        yield opened
        return
    try:
        table = opened.read_table(place)
    finally:
        opened.file.close()
    if isinstance(table, FileDamage):
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
    elif decode_entry_ids(stored) != EntryIds(place.extent.ledger, entry):
        damage = f"the record is of {decode_entry_ids(stored)}"
    elif (
        crc32c(stored[: ENTRY_HEADER_STRUCT.size - 4], stored[ENTRY_HEADER_STRUCT.size :])
        != ENTRY_HEADER_STRUCT.unpack_from(stored)[4]
    ):
        damage = "the entry does not match the checksum of who wrote it"
    return EntryCopy(entry, "log", place.log, offset, size, damage, file.path)


def find_journal_copies(
    snapshot: StoreSnapshot, ledger: int, entry: int | None = None
) -> Iterator[EntryCopy | FileDamage | RemovedFile]:
    """Yields the copies of a ledger's entries in the journal after the checkpoint mark: entries that no finished
    checkpoint has written to a log. With `entry`, yields only the copies of that entry. Yields a FileDamage or a
    RemovedFile where the journal cannot be read. Raises InvalidRequest if a file has a newer format than this Magnetar
    knows."""
    for found in walk_blocks_after_mark(snapshot):
        if isinstance(found, FileDamage | RemovedFile):
            yield found
            continue
        path = snapshot.path(JOURNAL_FOLDER, journal_file_name(found.journal))
        for offset, record in found.records_with_offsets():
            if record.type is RecordType.ADD and record.ledger == ledger and entry in (None, record.entry):
                yield EntryCopy(record.entry, "journal", found.journal, offset, len(record.payload), None, path)


def read_journal_record_types(snapshot: StoreSnapshot, ledger: int) -> Iterator[str]:
    """Yields the name of the type of each journal record after the checkpoint mark that concerns the ledger. Skips
    damaged parts of the journal. Raises InvalidRequest if a file has a newer format than this Magnetar knows."""
    for found in walk_blocks_after_mark(snapshot):
        if isinstance(found, journals.JournalBlock):
            for record in found.records:
                last = record.entry if record.type is RecordType.TOMBSTONE else record.ledger
                if record.ledger <= ledger <= last:
                    yield record.type.name


def walk_blocks_after_mark(snapshot: StoreSnapshot) -> Iterator[journals.JournalBlock | FileDamage | RemovedFile]:
    """Yields the valid blocks of the journal after the checkpoint mark, in order. Yields a FileDamage or a RemovedFile
    where the journal cannot be read. Raises InvalidRequest if a file has a newer format than this Magnetar knows."""
    position = (0, 0) if snapshot.mark is None else snapshot.mark.position
    for number in journals.list_journal_numbers(snapshot):
        if number >= position[0]:
            for found in journals.walk_journal(snapshot, number, position[1] if number == position[0] else 0):
                if isinstance(found, journals.JournalBlock | FileDamage | RemovedFile):
                    yield found


# -------------------------------------------------------------------------------------------------------------- indexes
# The index files of logs: groups and extents (format/index.py), also after damage.
#
# A group that does not match its checksum is `FileDamage`; the walk continues at the next bytes that are a whole
# group. A group after the end that the mark names belongs to a checkpoint that has not ended, and is not read. Heads
# are read and checked in pieces, so that a group of a million extents needs no more memory than a small one.
#
# The ledger index (format/ledger_index.py): descriptors, tombstones, quarantine, limbo, drained logs.
#
# `read_ledger_index_overview` is one pass over the file: the facts, and which ledgers have a descriptor.
# `walk_ledger_records` makes one pass for every `LEDGERS_PER_PASS` ledgers, so that a million of them are shown in
# order and are not in memory. No reader of this folder returns a key.
#
# A rewrite replaces the file as a whole: when the one that the mark named is gone, the newer mark is read.

LEDGERS_PER_PASS = 100_000
_TRIES = 3
_RECORDS_BYTES = READ_WINDOW_BYTES // LEDGER_RECORD_BYTES * LEDGER_RECORD_BYTES


class IndexedLedger(NamedTuple):
    """The record of a ledger in the ledger index, without the ledger's secret key. `lac` is the last-add-confirmed;
    `last` is the largest entry id stored here, -1: none."""

    ledger: int
    fenced: bool
    lac: int
    last: int


class LedgerIndexOverview(NamedTuple):
    """An overview of a store's ledger index: its facts (such as tombstones), the ids of the ledgers that have a record
    and are not deleted, and the damage that was found in the index."""

    facts: StateLog
    ledgers: BitMap64  # those that have a descriptor
    damages: list[FileDamage]
    path: str
    bytes: int  # what counts of the file
    quarantined: dict[int, list[tuple[int, int]]]  # ledger: intervals of entries


def read_ledger_index_overview(snapshot: StoreSnapshot) -> LedgerIndexOverview:
    """Reads the whole ledger index once and returns its overview. Damage in it, or a missing file, is in the overview's
    `damages`. Raises InvalidRequest if the file has a newer format than this Magnetar knows, and the errors of
    `snapshot_directory` if the file was replaced meanwhile."""
    facts, ledgers, damages = StateLog(), BitMap64(), list[FileDamage]()
    opened = _open(snapshot)
    if isinstance(opened, FileDamage):
        return LedgerIndexOverview(facts, ledgers, [opened], opened.path, 0, {})
    file, end = opened
    try:
        for record in _records(snapshot, file, end):
            if isinstance(record, FileDamage):
                damages.append(record)
            elif isinstance(record, LedgerState):
                ledgers.add(record.ledger)
            else:
                facts.apply(record)
                if isinstance(record, Tombstone):
                    ledgers.remove_range(record.first, record.last + 1)
    finally:
        file.close()
    quarantined: dict[int, list[tuple[int, int]]] = {}
    for ledger, first, last in facts.quarantined():
        quarantined.setdefault(ledger, []).append((first, last))
    return LedgerIndexOverview(facts, ledgers, damages, file.path, end, quarantined)


def walk_ledger_records(
    snapshot: StoreSnapshot, seen: LedgerIndexOverview, start: int = 0, stop: int | None = None
) -> Iterator[IndexedLedger]:
    """Yields the latest record of each ledger of `seen` with `start` ≤ id < `stop`, in ascending order of ledger ids.
    `stop` None: no upper limit. Yields nothing if the ledger index is missing, and skips damaged records. Raises the
    errors of `snapshot_directory` if the index was replaced meanwhile, and InvalidRequest if the index has a newer
    format than this Magnetar knows."""
    opened = _open(snapshot)
    if isinstance(opened, FileDamage):
        return
    file, end = opened
    wanted = (ledger for ledger in seen.ledgers if ledger >= start and (stop is None or ledger < stop))
    try:
        while ids := list(islice(wanted, LEDGERS_PER_PASS)):
            found: dict[int, IndexedLedger] = dict.fromkeys(ids, IndexedLedger(-1, False, -1, -1))
            for record in _records(snapshot, file, end):
                if isinstance(record, LedgerState) and record.ledger in found:
                    found[record.ledger] = IndexedLedger(record.ledger, record.fenced, record.lac, record.last)
            yield from (state for state in found.values() if state.ledger >= 0)
    finally:
        file.close()


def _open(snapshot: StoreSnapshot) -> tuple[ReadableFile, int] | FileDamage:
    """Opens the ledger index. Returns the file that the checkpoint mark names, and the file's committed end. Without a
    mark returns the newest file of the index and its size."""
    for _ in range(_TRIES):
        generation, end = _named(snapshot)
        path = snapshot.path(LEDGERS_FOLDER, ledger_index_file_name(generation))
        file = open_file(snapshot, path)
        if file is not None:
            return file, file.size() if end is None else end
        snapshot = snapshot_directory(snapshot.files, snapshot.directory)
    return FileDamage(path, 0, "the ledger index is missing")


def _named(snapshot: StoreSnapshot) -> tuple[int, int | None]:
    if snapshot.mark is not None:
        return snapshot.mark.ledgers_generation, snapshot.mark.ledgers_end
    return max(list_file_numbers(snapshot, LEDGERS_FOLDER, (LEDGER_INDEX_SUFFIX,)), default=1), None


def _records(snapshot: StoreSnapshot, file: ReadableFile, end: int) -> Iterator[LedgerIndexRecord | FileDamage]:
    """Yields the records of the ledger index in the order of the file, and a FileDamage in the place of each damaged
    record."""
    generation = int(file.path.rpartition("/")[2].removesuffix(LEDGER_INDEX_SUFFIX))
    header = read_header_or_damage(snapshot, file, LEDGER_INDEX_MAGIC, generation)
    if isinstance(header, FileDamage):
        yield header
    offset = FILE_HEADER_BYTES
    for base, data in read_file_in_parts(file, FILE_HEADER_BYTES, end, _RECORDS_BYTES):
        for at in range(0, len(data), LEDGER_RECORD_BYTES):
            record = ledger_index.decode_record_if_intact(data, at)
            yield record or FileDamage(
                file.path, base + at, "record of the ledger index does not match its checksum"
            )
        offset = base + len(data)
    if offset < end:
        yield FileDamage(file.path, offset, f"the file ends here and should be {end} bytes long")


_PIECE_BYTES = READ_WINDOW_BYTES // EXTENT_HEAD_BYTES * EXTENT_HEAD_BYTES
_HEADS_MIN = 64
_HEAD = struct.Struct(">qqqIIQI")
assert _HEAD.size == EXTENT_HEAD_BYTES


class IndexGroup(NamedTuple):
    """A group of extents in the index file of an entry log. One flush of the memtable, or one compaction, wrote these
    extents. `offset`: where the group begins in the index file of the entry log `log`."""

    log: int
    offset: int
    header: IndexGroupHeader

    @property
    def end_offset(self) -> int:
        return self.offset + GROUP_HEADER_BYTES + self.header.extent_heads_bytes + self.header.tables_bytes


def list_entry_log_numbers(snapshot: StoreSnapshot) -> list[int]:
    """Returns the numbers of all entry logs in the snapshot's directory. A log is included even if only its log file or
    only its index file exists. Raises OSError if the directory cannot be listed."""
    return list_file_numbers(snapshot, ENTRIES_FOLDER, (LOG_SUFFIX, INDEX_SUFFIX))


def index_file_path(snapshot: StoreSnapshot, log: int) -> str:
    return snapshot.path(ENTRIES_FOLDER, entry_log_index_file_name(log))


class IndexFile:
    """An open index file of an entry log. `walk_groups` yields the groups of the file, `walk_extents` yields the
    extents of one group, `read_table` reads the table of one extent. The caller must close `file`. `end` is the
    committed end in bytes; 0: no finished checkpoint includes the log."""

    def __init__(self, snapshot: StoreSnapshot, log: int, file: ReadableFile) -> None:
        self.snapshot = snapshot
        self.log = log
        self.file = file
        ends = snapshot.committed_ends_of_log(log)
        self.end = file.size() if ends is None else ends[1]
        if not snapshot.is_committed(log):
            self.end = 0

    def walk_groups(self, start: int = FILE_HEADER_BYTES) -> Iterator[IndexGroup | FileDamage]:
        """Yields the groups up to the committed end, in the order of the file; only those that end after the offset
        `start`. Yields a FileDamage for each damaged part, and goes on at the next undamaged group. Raises
        InvalidRequest if the file has a newer format than this Magnetar knows."""
        header = read_header_or_damage(self.snapshot, self.file, INDEX_MAGIC, self.log) if self.end else None
        if isinstance(header, FileDamage):
            yield header
        offset = FILE_HEADER_BYTES
        while offset < min(self.end, self.file.size()):
            group = self._group(offset)
            if group is None:
                yield FileDamage(self.file.path, offset, "group of the index does not match its checksum")
                group = self._next_group(offset + 1)
            if group is None:
                return
            if group.end_offset > start:
                yield group
            offset = group.end_offset
        if offset < self.end:
            yield FileDamage(self.file.path, offset, f"the file ends here and should be {self.end} bytes long")

    def _group(self, offset: int) -> IndexGroup | None:
        """Returns the group of extents at `offset`; None if no valid group begins there."""
        data = self.file.pread(GROUP_HEADER_BYTES, offset)
        header = index.decode_group_header_if_intact(data)
        if header is None:
            return None
        group = IndexGroup(self.log, offset, header)
        if group.end_offset > self.end:
            return None
        crc = crc32c(data[: GROUP_HEADER_BYTES - 4], *self._heads(group))
        return group if crc == header.crc else None

    def _next_group(self, start: int) -> IndexGroup | None:
        for base, data in read_file_in_parts(self.file, start, self.end):
            at = data.find(GROUP_MAGIC)
            while at >= 0:
                group = self._group(base + at)
                if group is not None:
                    return group
                at = data.find(GROUP_MAGIC, at + 1)
        return None

    def _heads(self, group: IndexGroup, piece_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
        """Yields the bytes of the group's extent heads, in parts of `piece_bytes`."""
        start = group.offset + GROUP_HEADER_BYTES
        end = start + group.header.extent_heads_bytes
        for at in range(start, end, piece_bytes):
            yield self.file.pread(min(piece_bytes, end - at), at)

    def walk_extents(self, group: IndexGroup, pieces: int = 1) -> Iterator[ExtentLocation]:
        """Yields the extents of a group, each with its location, in the order of the index. `pieces` is the number of
        groups that the caller reads at the same time; these groups share one memory bound."""
        piece_bytes = max(_PIECE_BYTES // EXTENT_HEAD_BYTES // pieces, _HEADS_MIN) * EXTENT_HEAD_BYTES
        offset = group.offset + GROUP_HEADER_BYTES + group.header.extent_heads_bytes
        for piece in self._heads(group, piece_bytes):
            for fields in _HEAD.iter_unpack(piece[: len(piece) // EXTENT_HEAD_BYTES * EXTENT_HEAD_BYTES]):
                extent = Extent(*fields)
                yield ExtentLocation(self.log, extent, offset)
                offset += extent.table_bytes

    def read_table(self, place: ExtentLocation) -> ExtentTable | FileDamage:
        """Reads the table of the extent at `place` and returns it; returns a FileDamage if the table is damaged. Reads
        a damaged table a second time first, because the scrubber may just be rewriting it."""
        for _ in range(2):
            data = self.file.pread(place.extent.table_bytes, place.table_offset)
            found = index.decode_table_if_intact(place.extent, data)
            if found is not None:
                break
        if found is None:
            reason = f"table of ledger {place.extent.ledger} does not match its checksum"
            return FileDamage(self.file.path, place.table_offset, reason)
        return found


def open_index_file(snapshot: StoreSnapshot, log: int) -> IndexFile | FileDamage | RemovedFile:
    """Opens the index file of an entry log and returns it. If the file is missing, returns a FileDamage if the log
    itself is there and committed, otherwise a RemovedFile."""
    path = index_file_path(snapshot, log)
    file = open_file(snapshot, path)
    if file is not None:
        return IndexFile(snapshot, log, file)
    has_log = snapshot.is_committed(log) and snapshot.files.exists(path.removesuffix(INDEX_SUFFIX) + LOG_SUFFIX)
    return FileDamage(path, 0, "the index is missing, and its log is there") if has_log else RemovedFile(path)


def walk_log_extents(snapshot: StoreSnapshot, log: int) -> Iterator[ExtentLocation | FileDamage | RemovedFile]:
    """Yields all extents of a log, each with its location, in the order of the log's index. Yields a FileDamage for
    each damaged part of the index, or a RemovedFile if the bookie has removed the log. Raises InvalidRequest if the
    index has a newer format than this Magnetar knows."""
    opened = open_index_file(snapshot, log)
    if not isinstance(opened, IndexFile):
        yield opened
        return
    try:
        for group in opened.walk_groups():
            if isinstance(group, FileDamage):
                yield group
            else:
                yield from opened.walk_extents(group)
    finally:
        opened.file.close()
