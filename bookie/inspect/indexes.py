"""The index files of logs: groups and extents (format/index.py), also after damage.

A group that does not match its checksum is `Damage`; the walk continues at the next bytes that are a whole group. A
group after the end that the mark names belongs to a checkpoint that has not ended, and is not read.
Heads are read and checked in pieces, so that a group of a million extents needs no more memory than a small one.

The ledger index (format/ledger_index.py): descriptors, tombstones, quarantine, limbo, drained logs.

`read_ledger_index_overview` is one pass over the file: the facts, and which ledgers have a descriptor.
`walk_ledger_records` makes one pass for every `WINDOW` ledgers, so that a million of them are shown in order and are
not in memory. No reader of this folder returns a key.

A rewrite replaces the file as a whole: when the one that the mark named is gone, the newer mark is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from pyroaring import BitMap64

from ..format import index, ledger_index
from ..format.index import GROUP_HEADER_BYTES, GROUP_MAGIC, HEAD_BYTES, MAGIC, Extent, ExtentTable, IndexGroupHeader
from ..format.journal import FILE_HEADER_BYTES, crc32c
from ..format.ledger_index import MAGIC as LEDGER_INDEX_MAGIC
from ..format.ledger_index import RECORD_BYTES, LedgerState, State, Tombstone
from ..store.boot import ENTRIES, LEDGERS
from ..store.entrylog.files import INDEX_SUFFIX, LOG_SUFFIX, entry_log_index_file_name
from ..store.index import ExtentLocation
from ..store.index_files import SUFFIX, ledger_index_file_name
from ..store.state_log import StateLog
from .snapshot import (
    WINDOW_BYTES,
    Damage,
    ReadableFile,
    RemovedFile,
    Snapshot,
    list_file_numbers,
    open_file,
    read_file_in_parts,
    read_header_or_damage,
    snapshot_directory,
)

WINDOW = 100_000
_TRIES = 3
_RECORDS_BYTES = WINDOW_BYTES // RECORD_BYTES * RECORD_BYTES


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
    damages: list[Damage]
    path: str
    bytes: int  # what counts of the file
    quarantined: dict[int, list[tuple[int, int]]]  # ledger: intervals of entries


def read_ledger_index_overview(snapshot: Snapshot) -> LedgerIndexOverview:
    facts, ledgers, damages = StateLog(), BitMap64(), list[Damage]()
    opened = _open(snapshot)
    if isinstance(opened, Damage):
        return LedgerIndexOverview(facts, ledgers, [opened], opened.path, 0, {})
    file, end = opened
    try:
        for record in _records(snapshot, file, end):
            if isinstance(record, Damage):
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
    snapshot: Snapshot, seen: LedgerIndexOverview, start: int = 0, stop: int | None = None
) -> Iterator[IndexedLedger]:
    """Yields the latest record of each ledger of `seen` with `start` ≤ id < `stop`, in ascending order of ledger ids.
    `stop` None: no upper limit."""
    opened = _open(snapshot)
    if isinstance(opened, Damage):
        return
    file, end = opened
    wanted = (ledger for ledger in seen.ledgers if ledger >= start and (stop is None or ledger < stop))
    try:
        while ids := list(islice(wanted, WINDOW)):
            found: dict[int, IndexedLedger] = dict.fromkeys(ids, IndexedLedger(-1, False, -1, -1))
            for record in _records(snapshot, file, end):
                if isinstance(record, LedgerState) and record.ledger in found:
                    found[record.ledger] = IndexedLedger(record.ledger, record.fenced, record.lac, record.last)
            yield from (state for state in found.values() if state.ledger >= 0)
    finally:
        file.close()


def _open(snapshot: Snapshot) -> tuple[ReadableFile, int] | Damage:
    """Opens the ledger index. Returns the file that the checkpoint mark names, and the file's committed end. Without a
    mark returns the newest file of the index and its size."""
    for _ in range(_TRIES):
        generation, end = _named(snapshot)
        path = snapshot.path(LEDGERS, ledger_index_file_name(generation))
        file = open_file(snapshot, path)
        if file is not None:
            return file, file.size() if end is None else end
        snapshot = snapshot_directory(snapshot.files, snapshot.directory)
    return Damage(path, 0, "the ledger index is missing")


def _named(snapshot: Snapshot) -> tuple[int, int | None]:
    if snapshot.mark is not None:
        return snapshot.mark.ledgers_generation, snapshot.mark.ledgers_end
    return max(list_file_numbers(snapshot, LEDGERS, (SUFFIX,)), default=1), None


def _records(snapshot: Snapshot, file: ReadableFile, end: int) -> Iterator[State | Damage]:
    """Yields the records of the ledger index in the order of the file, and a Damage in the place of each damaged
    record."""
    generation = int(file.path.rpartition("/")[2].removesuffix(SUFFIX))
    header = read_header_or_damage(snapshot, file, LEDGER_INDEX_MAGIC, generation)
    if isinstance(header, Damage):
        yield header
    offset = FILE_HEADER_BYTES
    for base, data in read_file_in_parts(file, FILE_HEADER_BYTES, end, _RECORDS_BYTES):
        for at in range(0, len(data), RECORD_BYTES):
            record = ledger_index.decode_record_if_intact(data, at)
            yield record or Damage(file.path, base + at, "record of the ledger index does not match its checksum")
        offset = base + len(data)
    if offset < end:
        yield Damage(file.path, offset, f"the file ends here and should be {end} bytes long")


_PIECE_BYTES = WINDOW_BYTES // HEAD_BYTES * HEAD_BYTES
_HEADS_MIN = 64
_HEAD = struct.Struct(">qqqIIQI")
assert _HEAD.size == HEAD_BYTES


class IndexGroup(NamedTuple):
    """A group of extents in the index file of an entry log. One flush of the memtable, or one compaction, wrote these
    extents."""

    log: int
    offset: int
    header: IndexGroupHeader

    @property
    def end_offset(self) -> int:
        return self.offset + GROUP_HEADER_BYTES + self.header.extent_heads_bytes + self.header.tables_bytes


def list_entry_log_numbers(snapshot: Snapshot) -> list[int]:
    """Returns the numbers of all entry logs in the snapshot's directory. A log is included even if only its log file or
    only its index file exists."""
    return list_file_numbers(snapshot, ENTRIES, (LOG_SUFFIX, INDEX_SUFFIX))


def index_file_path(snapshot: Snapshot, log: int) -> str:
    return snapshot.path(ENTRIES, entry_log_index_file_name(log))


class IndexFile:
    """An open index file of an entry log. `groups` yields the groups of the file, `extents` yields the extents of one
    group, `table` reads the table of one extent."""

    def __init__(self, snapshot: Snapshot, log: int, file: ReadableFile) -> None:
        self.snapshot = snapshot
        self.log = log
        self.file = file
        ends = snapshot.committed_ends_of_log(log)
        self.end = file.size() if ends is None else ends[1]
        if not snapshot.is_committed(log):
            self.end = 0

    def groups(self, start: int = FILE_HEADER_BYTES) -> Iterator[IndexGroup | Damage]:
        header = read_header_or_damage(self.snapshot, self.file, MAGIC, self.log) if self.end else None
        if isinstance(header, Damage):
            yield header
        offset = FILE_HEADER_BYTES
        while offset < min(self.end, self.file.size()):
            group = self._group(offset)
            if group is None:
                yield Damage(self.file.path, offset, "group of the index does not match its checksum")
                group = self._next_group(offset + 1)
            if group is None:
                return
            if group.end_offset > start:
                yield group
            offset = group.end_offset
        if offset < self.end:
            yield Damage(self.file.path, offset, f"the file ends here and should be {self.end} bytes long")

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

    def extents(self, group: IndexGroup, pieces: int = 1) -> Iterator[ExtentLocation]:
        """Yields the extents of a group, each with its location, in the order of the index. `pieces` is the number of
        groups that the caller reads at the same time; these groups share one memory bound."""
        piece_bytes = max(_PIECE_BYTES // HEAD_BYTES // pieces, _HEADS_MIN) * HEAD_BYTES
        offset = group.offset + GROUP_HEADER_BYTES + group.header.extent_heads_bytes
        for piece in self._heads(group, piece_bytes):
            for fields in _HEAD.iter_unpack(piece[: len(piece) // HEAD_BYTES * HEAD_BYTES]):
                extent = Extent(*fields)
                yield ExtentLocation(self.log, extent, offset)
                offset += extent.table_bytes

    def table(self, place: ExtentLocation) -> ExtentTable | Damage:
        """Reads the table of an extent and returns it; returns a Damage if the table is damaged. Reads a damaged table
        a second time first, because the scrubber may just be rewriting it."""
        for _ in range(2):
            data = self.file.pread(place.extent.table_bytes, place.table_offset)
            found = index.decode_table_if_intact(place.extent, data)
            if found is not None:
                break
        if found is None:
            reason = f"table of ledger {place.extent.ledger} does not match its checksum"
            return Damage(self.file.path, place.table_offset, reason)
        return found


def open_index_file(snapshot: Snapshot, log: int) -> IndexFile | Damage | RemovedFile:
    path = index_file_path(snapshot, log)
    file = open_file(snapshot, path)
    if file is not None:
        return IndexFile(snapshot, log, file)
    has_log = snapshot.is_committed(log) and snapshot.files.exists(path.removesuffix(INDEX_SUFFIX) + LOG_SUFFIX)
    return Damage(path, 0, "the index is missing, and its log is there") if has_log else RemovedFile(path)


def walk_log_extents(snapshot: Snapshot, log: int) -> Iterator[ExtentLocation | Damage | RemovedFile]:
    """Yields all extents of a log, each with its location, in the order of the log's index. Yields a Damage for each
    damaged part of the index, or a RemovedFile if the bookie has removed the log."""
    opened = open_index_file(snapshot, log)
    if not isinstance(opened, IndexFile):
        yield opened
        return
    try:
        for group in opened.groups():
            if isinstance(group, Damage):
                yield group
            else:
                yield from opened.extents(group)
    finally:
        opened.file.close()
