"""The places of each entry of a ledger: in entry logs by their indexes, and in the journal from the mark on.

An entry may be in several places (replayed after a crash, moved by a compaction that has not ended, still in the
journal). Each copy counts, and each is read and checked here. The extents of one ledger are in memory, its entries are
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...ledger.peer_format import ENTRY_HEADER
from ..format.entry_log import EntryIds, entry_ids, intact_record
from ..format.journal import RecordType, crc32c
from ..store.boot import JOURNAL
from ..store.index import ExtentPlace
from ..store.journal.segments import journal_name
from . import indexes, journals, logs
from .snapshot import Damage, ReadableFile, RemovedFile, Snapshot, open_file


class EntryCopy(NamedTuple):
    """A copy of an entry, and its place. `damage` says what is wrong with the copy; None: its checksums and ids are
    right.
    """

    entry: int
    kind: str  # "log" or "journal"
    number: int
    offset: int
    bytes: int
    damage: str | None
    path: str


def walk_ledger_extents(snapshot: Snapshot, ledger: int) -> Iterator[ExtentPlace | Damage | RemovedFile]:
    """Yields the extents of a ledger in all logs, and any damage found in the logs' indexes."""
    for log in indexes.list_log_numbers(snapshot):
        for found in indexes.walk_log_extents(snapshot, log):
            if not isinstance(found, ExtentPlace) or found.extent.ledger == ledger:
                yield found


def find_log_copies(
    snapshot: Snapshot, places: list[ExtentPlace], entry: int | None = None
) -> Iterator[EntryCopy | Damage | RemovedFile]:
    """Yields the copies of entries in these extents of one ledger, in entry order within each extent; only those of
    `entry` if it is given.
    """
    for place in sorted(places, key=lambda place: (place.extent.first, place.log)):
        if entry is None or place.extent.first <= entry <= place.extent.last:
            yield from _in_extent(snapshot, place, entry)


def _in_extent(snapshot: Snapshot, place: ExtentPlace, entry: int | None) -> Iterator[EntryCopy | Damage | RemovedFile]:
    opened = indexes.open_index(snapshot, place.log)
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
    file = open_file(snapshot, logs.log_path(snapshot, place.log))
    if file is None:
        yield logs.classify_missing(snapshot, place.log)
        return
    try:
        for i, delta in enumerate(table.deltas):
            if entry in (None, place.extent.first + delta):
                begin, end = table.offsets[i], table.offsets[i + 1]
                yield _copy(file, place, place.extent.first + delta, place.extent.start + begin, end - begin)
    finally:
        file.close()


def _copy(file: ReadableFile, place: ExtentPlace, entry: int, offset: int, size: int) -> EntryCopy:
    stored = intact_record(file.pread(size, offset), 0, size)
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
    """Yields the copies in the journal after the mark, which the last checkpoint has not written to a log."""
    for found in _blocks_after_mark(snapshot):
        if isinstance(found, Damage | RemovedFile):
            yield found
            continue
        path = snapshot.path(JOURNAL, journal_name(found.journal))
        for offset, record in found.records_with_offsets():
            if record.type is RecordType.ADD and record.ledger == ledger and entry in (None, record.entry):
                yield EntryCopy(record.entry, "journal", found.journal, offset, len(record.payload), None, path)


def journal_record_types(snapshot: Snapshot, ledger: int) -> Iterator[str]:
    """Yields the type of each record of the ledger in the journal after the mark."""
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
