"""Steps 3 and 4 of a start (store/boot.py): which entry logs exist, which should, and what their indexes lack.

`EntryLogRepairAtStart.open` removes what an unfinished checkpoint or move left, cuts the open logs, checks each log
against its index, rebuilds indexes, and returns all groups. `facts` are the consequences: entries that are known to be
lost are quarantined, and a log that is gone is drained, so that it is reported once only. All of it in a worker.

A log that is gone is damage only if an entry in it lived. This is known after the replay, which may still read
tombstones of its ledgers. Until then the log is in `gone`, and `report_missing_logs` reports those that had living
entries. On a full disk compaction removes the data of dead logs first (store/entrylog/compaction.py); their indexes
remain until a start finds them drained.
Guarded by tests/bookie/test_boot.py.

Also in this file, below its heading: the rebuilding of the index of an entry log from the log itself (rebuild).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from pyroaring import BitMap64

from ....runtime.files import File, Files, join_path
from ...format import entry_log, index
from ...format.journal import (
    FILE_HEADER_BYTES,
    RECORD_BYTES_MAX,
    DamagedFile,
    FileHeader,
    ForeignFile,
    decode_file_header,
    encode_file_header,
)
from ...format.ledger_index import DrainedEntryLog, QuarantinedEntries
from ...format.mark import CheckpointMark
from .. import disk
from ..index import LoadedIndexGroup
from ..memtable import IntegerIntervals
from ..state_log import DataLossLog, read_or_raise_damaged
from . import files as log_files
from .files import entry_log_file_name, entry_log_index_file_name

# ------------------------------------------------------------------------------------------------------- rebuild
# Rebuilds the index of an entry log from the log itself, whose records have their ids (format/entry_log.py).
#
# The log is read from 4096 to its end, record by record. A bad record is skipped by its length if a valid one follows
# it. If the length is damaged too, the reader searches for the next place where a record begins. (The length comes
# first, because a client may have written bytes into the bad record that look like one.) The bytes between are *lost*;
# which entries they had is unknown. Zeros up to the end of the file are no loss, unless the file is known to end
# `exact`ly: a log is allocated ahead, and may have that room again after a power loss.
#
# Consecutive records of one ledger in ascending order become one extent, as a flush would have written them; groups of
# about ENTRIES_PER_GROUP entries bound the memory. The file is made under a temporary name, synced, renamed: a crash
# leaves the old index or the new one. A log that lost its end is cut there, so that index and log agree again.
# All of it runs in a worker. Guarded by tests/bookie/store/test_rebuild.py.


_LOG = logging.getLogger("magnetar.bookie.store.entrylog")

ENTRIES_PER_GROUP = 1 << 16
TEMPORARY_SUFFIX = ".tmp"
_WINDOW_BYTES = 4 << 20
_PLAUSIBLE = re.compile(rb"\x00(?!\x00{3})[\x00-\x7f].{6}\x00.{7}\x00", re.DOTALL)
"""Matches bytes that may be the start of a record: a length below 8 MiB and not 0, a checksum, and a ledger id and an
entry id below 2^56."""


class ScannedLogRecord(NamedTuple):
    """A record that a scan of an entry log found: the offsets of its start and its end, and the ids of its ledger and
    its entry."""

    start: int
    end: int
    ids: entry_log.EntryIds


class UnreadableLogRange(NamedTuple):
    """A range of bytes of an entry log, from offset `start` to offset `end`, that contains no valid record."""

    start: int
    end: int


class EntryLogScan:
    """Scans an entry log without its index. `records` yields every valid record in order; after that, `lost` has the
    ranges that contain no valid record. `exact`: zeros at the end of the file count as such a range; otherwise the file
    may have been allocated in advance."""

    def __init__(self, file: File, *, exact: bool = True) -> None:
        self._file = file
        self._exact = exact
        self._size = file.size()
        self._data = b""
        self._start = 0
        self.lost: list[UnreadableLogRange] = []

    def records(self) -> Iterator[ScannedLogRecord]:
        """Yields every valid record of the log, in the order of the file. May be called once."""
        offset = entry_log.FIRST_RECORD_OFFSET
        while offset < self._size:
            found = self._record(offset)
            if found is None:
                if not self._exact and self._zeros_from(offset):
                    return
                found = self._behind(offset) or self._search(offset)
                self.lost.append(UnreadableLogRange(offset, self._size if found is None else found.start))
                if found is None:
                    return
            yield found
            offset = found.end

    def _record(self, offset: int) -> ScannedLogRecord | None:
        at = self._window(offset, entry_log.RECORD_HEADER_BYTES)
        length = int.from_bytes(self._data[at : at + 4], "big")
        end = offset + entry_log.RECORD_HEADER_BYTES + length
        if not 0 < length <= RECORD_BYTES_MAX or end > self._size:
            return None  # `_window` gives nothing after the end of the file
        at = self._window(offset, end - offset)
        stored = entry_log.decode_record_if_intact(self._data, at, at + end - offset)
        ids = None if stored is None else entry_log.decode_entry_ids(stored)
        return None if ids is None else ScannedLogRecord(offset, end, ids)

    def _zeros_from(self, offset: int) -> bool:
        return not any(
            self._file.pread(_WINDOW_BYTES, at).strip(b"\0") for at in range(offset, self._size, _WINDOW_BYTES)
        )

    def _behind(self, offset: int) -> ScannedLogRecord | None:
        """Returns the record after the damaged record at `offset`, if the length of the damaged record is right;
        otherwise None."""
        at = self._window(offset, entry_log.RECORD_HEADER_BYTES)
        return self._record(offset + entry_log.RECORD_HEADER_BYTES + int.from_bytes(self._data[at : at + 4], "big"))

    def _search(self, offset: int) -> ScannedLogRecord | None:
        """Returns the first valid record after `offset`; None if there is none."""
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
        self._run: list[ScannedLogRecord] = []
        self.entries = 0

    def add(self, found: ScannedLogRecord) -> None:
        self.entries += 1
        last = self._run[-1] if self._run else None
        if last is not None and not (
            last.end == found.start
            and last.ids.ledger == found.ids.ledger
            and found.ids.entry > last.ids.entry
            and found.ids.entry - self._run[0].ids.entry <= index.ENTRY_DELTA_MAX
            and len(self._run) < ENTRIES_PER_GROUP
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
        if self._waiting >= ENTRIES_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        order = sorted(range(len(self._extents)), key=lambda at: self._extents[at][:2])
        group = index.encode_index_group([self._extents[at] for at in order], [self._tables[at] for at in order])
        self._end += disk.write_buffers(self._files, self._file, [group], self._end)
        self._extents, self._tables, self._waiting = [], [], 0

    def close(self) -> None:
        if self._run:
            self._end_run()
        if self._extents:
            self._flush()


def rebuild_index(
    files: Files, directory: str, number: int, uuid: bytes, tell: Callable[[list[UnreadableLogRange]], None], *,
    exact: bool
) -> None:
    """Makes the index file of entry log `number` anew by scanning the log. Before it replaces the old index, calls
    `tell` with the ranges of the log that cannot be read. `exact`: zeros at the end of the log count as unreadable.
    Cuts an unreadable range at the end of the log off. Raises NoSpace if the disk is full, or OSError if the log cannot
    be read."""
    log_path, path = (
        join_path(directory, entry_log_file_name(number)),
        join_path(directory, entry_log_index_file_name(number)),
    )
    temporary = path + TEMPORARY_SUFFIX
    source = files.open(log_path)
    try:
        scan = EntryLogScan(source, exact=exact)
        target = _create(files, temporary, uuid, number)
        try:
            groups = _Groups(files, target)
            for found in scan.records():
                groups.add(found)
            groups.close()
            disk.sync_file(files, target)
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
        disk.raise_no_space_or_exit(files, f"create {path}", error)
    file.truncate(0)
    disk.write_buffers(files, file, [encode_file_header(FileHeader(index.INDEX_MAGIC, uuid, number))], 0)
    return file


# -------------------------------------------------------------------------------------------------- repair_at_start


INVENTORY_DONE_MARK = 0
"""A `DrainedEntryLog` with this number says that, from then on, a log that neither exists nor is drained counts as a
data loss."""


class EntryLogRepairAtStart:
    """Repairs the entry logs when a store starts: compares their files with the checkpoint mark, cuts what is not
    committed, and rebuilds damaged indexes. After `open`, `facts` must be recorded: entries that are known to be lost,
    and logs that are gone. `gone` has the ledgers of each log that is missing and whose index is there, by the log's
    path. `drained`: the numbers of the drained logs, whose files are removed."""

    def __init__(
        self,
        files: Files,
        directory: str,
        uuid: bytes,
        mark: CheckpointMark,
        drained: frozenset[int],
        losses: DataLossLog,
    ) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self._mark = mark
        self._drained = drained
        self._losses = losses
        self._opened = {opened.number: opened for opened in (mark.hot_open_log, mark.cold_open_log) if opened.number}
        self.facts: list[QuarantinedEntries | DrainedEntryLog] = []
        self.gone: dict[str, BitMap64] = {}  # path of a log that only its index speaks of: its ledgers

    def open(self) -> list[LoadedIndexGroup]:
        """Repairs the entry logs. Returns the groups of all their index files. Records every data loss durably before
        it changes a file. Must run in a worker. Raises ForeignFile, NewerFormat, NoSpace or OSError."""
        self._take_inventory()
        self._losses.write()
        self._tidy()
        groups: list[LoadedIndexGroup] = []
        for number in log_files.list_entry_log_numbers(self._files, self._directory):
            if not self._files.exists(self._log(number)):
                self._on_missing_log(number)
                continue
            if number in self._opened:
                self._cut(self._log(number), self._opened[number].log_end)
                self._cut(self._index(number), self._opened[number].index_end)
            groups += self._groups(number)
        return groups

    def _log(self, number: int) -> str:
        return join_path(self._directory, log_files.entry_log_file_name(number))

    def _index(self, number: int) -> str:
        return join_path(self._directory, log_files.entry_log_index_file_name(number))

    # ------------------------------------------------------------------------------------ which there are
    def _take_inventory(self) -> None:
        """Records a data loss for each committed log that neither exists nor is drained."""
        here = set(log_files.list_entry_log_numbers(self._files, self._directory))
        missing = [n for n in range(1, self._mark.last_log + 1) if n not in here and n not in self._drained]
        self.facts += [DrainedEntryLog(number) for number in missing]
        if INVENTORY_DONE_MARK not in self._drained:
            self.facts.append(DrainedEntryLog(INVENTORY_DONE_MARK))
            missing = [number for number in missing if number in self._opened]
        for number in missing:
            self._losses.add_data_loss(f"{self._log(number)} is gone, and its index")

    def _tidy(self) -> None:
        """Removes files that an unfinished checkpoint, move, removal or index rebuild has left."""
        for name in self._files.list_directory(self._directory):
            if name.endswith(TEMPORARY_SUFFIX):
                self._files.remove(join_path(self._directory, name))
        for number in log_files.list_entry_log_numbers(self._files, self._directory):
            if number > self._mark.last_log or number in self._drained:
                log_files.remove_log_files(self._files, self._directory, number)

    def _cut(self, path: str, end: int) -> None:
        """Truncates the file to `end`, because what follows belongs to an unfinished checkpoint.

        Syncs even if nothing was cut: a process that was killed may have cut it in the page cache alone, and the next
        mark does not name the end any more. If the tail of a log returned, it would look like entries that the index
        lost.
        """
        if not self._files.exists(path):
            return
        file = self._files.open(path)
        try:
            if file.size() >= end:
                file.truncate(end)
                disk.sync_file(self._files, file)
        finally:
            file.close()

    # ------------------------------------------------------------------------------------ what each holds
    def _groups(self, number: int) -> list[LoadedIndexGroup]:
        self._check_header(number)
        try:
            groups = self._read(number)
        except ForeignFile:
            raise
        except (DamagedFile, FileNotFoundError) as error:
            return self._rebuild(number, str(error))
        size, opened = self._size(number), self._opened.get(number)
        reach = max((group.reach for group in groups), default=entry_log.FIRST_RECORD_OFFSET)
        if opened is not None and reach < opened.log_end:
            return self._rebuild(number, f"{self._index(number)} ends before the log does")
        if size > reach and any(self._read_log(number, reach, entry_log.RECORD_HEADER_BYTES)):
            # The index may have lost whole groups; or a checkpoint did not end here, and left less than a record.
            return self._rebuild(number, f"{self._index(number)} ends before the log does", whole_to=reach)
        if size < reach and groups:
            _LOG.error("%s ends at %d and should be %d bytes long", self._log(number), size, reach)
            self._quarantine(number, size)
        return groups

    def _read(self, number: int) -> list[LoadedIndexGroup]:
        return read_or_raise_damaged(
            self._index(number),
            lambda: log_files.read_index_groups(self._files, self._directory, number, self._uuid, None),
        )

    def _rebuild(self, number: int, reason: str, whole_to: int | None = None) -> list[LoadedIndexGroup]:
        """Rebuilds the index of log `number` and returns its groups. If the log is shorter than the mark says, records
        a data loss, because no index says what was after its end.

        `whole_to`: the index is undamaged up to this offset of the log. A log that ends there has lost nothing."""
        _LOG.error("%s; it is rebuilt from the log", reason)
        opened = self._opened.get(number)
        if opened is not None and self._size(number) < opened.log_end:
            self._losses.add_data_loss(f"{self._log(number)} ends before {opened.log_end}, and its index is damaged")
        try:
            read_or_raise_damaged(
                self._log(number),
                lambda: rebuild_index(
                    self._files,
                    self._directory,
                    number,
                    self._uuid,
                    lambda lost: self._log_lost(number, lost, whole_to),
                    exact=opened is not None,
                ),
            )
            return self._read(number)
        except DamagedFile as error:
            self._losses.add_data_loss(f"{error}, and its index is damaged")
            self._losses.write()
            return []

    def _log_lost(self, number: int, lost: list[UnreadableLogRange], whole_to: int | None) -> None:
        size = self._size(number)
        for start, end in lost:
            if whole_to is not None and start < whole_to:
                _LOG.error("%s: no entry can be read between %d and %d", self._log(number), start, end)
                self._quarantine(number, start, end)
            elif whole_to is None or end < size:
                self._losses.add_data_loss(f"{self._log(number)}: no entry can be read between {start} and {end}")
        self._losses.write()

    def _on_missing_log(self, number: int) -> None:
        """Handles an entry log whose index file exists but whose log file does not. The index says which entries the
        log contained."""
        before = len(self.facts)
        try:
            read_or_raise_damaged(self._index(number), lambda: self._quarantine(number))
        except ForeignFile:
            raise
        except DamagedFile as error:
            self._losses.add_data_loss(f"{self._log(number)} is gone, and its index is damaged: {error}")
            self._losses.write()
        ledgers = {fact.ledger for fact in self.facts[before:] if isinstance(fact, QuarantinedEntries)}
        self.gone[self._log(number)] = BitMap64(ledgers)
        self.facts.append(DrainedEntryLog(number))

    def _quarantine(self, number: int, start: int = 0, end: int | None = None) -> None:
        """Quarantines the entries that are, by the index, between the offsets `start` and `end` of log `number`."""
        for extents in log_files.read_extents(self._files, self._directory, number, self._uuid, None):
            self.facts += [
                QuarantinedEntries(extent.ledger, extent.first, extent.last)
                for extent in extents
                if extent.start + extent.length > start and (end is None or extent.start < end)
            ]

    # ------------------------------------------------------------------------------------ the log's bytes
    def _check_header(self, number: int) -> None:
        """Raises ForeignFile or NewerFormat if the log's header says so. A damaged header is no loss, because each
        record has its ids."""
        path = self._log(number)
        try:
            header = read_or_raise_damaged(path, lambda: self._read_log(number, 0, FILE_HEADER_BYTES))
            decode_file_header(header, entry_log.ENTRY_LOG_MAGIC, self._uuid, number, path)
        except ForeignFile:
            raise
        except DamagedFile as error:
            _LOG.error("%s", error)

    def _size(self, number: int) -> int:
        file = self._files.open(self._log(number), write=False)
        try:
            return file.size()
        finally:
            file.close()

    def _read_log(self, number: int, offset: int, size: int) -> bytes:
        file = self._files.open(self._log(number), write=False)
        try:
            return file.pread(size, offset)
        finally:
            file.close()


def report_missing_logs(gone: Mapping[str, BitMap64], deleted: IntegerIntervals) -> None:
    """Logs an error for each entry log that is missing and had entries of ledgers that are not deleted. `gone` has the
    ledgers of each missing log, by its path. Must be called after the replay, because the journal may have more
    tombstones."""
    for path, ledgers in gone.items():
        if any(ledger not in deleted for ledger in ledgers):
            _LOG.error("%s is missing; its index names the entries that it had", path)
