"""A store in short: each log with its live share and the ledgers that hold it, the journals, the ledger index.

Live bytes are those of extents whose ledger has no tombstone, in a log that is not drained. Garbage collection decides
by the same number (bookie/maintenance/garbage.py); it is stored nowhere. The ledgers of a log are summed up by merging
its groups, each sorted by ledger: memory is bounded by the number of groups, not by that of ledgers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

from ..format.journal import ALIGNMENT
from ..store.boot import ENTRIES, JOURNAL, LEDGERS
from ..store.index import ExtentPlace
from ..store.state_log import StateLog
from . import indexes, journals, ledgers, logs
from .indexes import IndexFile, IndexGroup
from .snapshot import Damage, RemovedFile, Snapshot, open_file

HOLDERS_MAX = 20


class LedgerShare(NamedTuple):
    """A ledger with data in an entry log: how many bytes, and whether they are live."""

    ledger: int
    bytes: int
    live: bool


class LogSummary(NamedTuple):
    """The summary of an entry log: its state, its size, and how much of it is live."""

    log: int
    state: str  # open (checkpoints write to it), cold (compaction does), closed, drained, not committed
    bytes: int  # of the file
    data_bytes: int  # of records that an extent names
    live_bytes: int
    groups: int
    extents: int
    entries: int
    ledgers: int
    live_ledgers: int
    holders: list[LedgerShare]  # the largest
    damages: list[Damage]

    @property
    def live_share(self) -> float:
        return self.live_bytes / self.data_bytes if self.data_bytes else 0.0


class JournalSummary(NamedTuple):
    """The summary of a journal file: its size, where its last whole block ends, and its damage."""

    journal: int
    bytes: int
    end: int  # after the last whole block
    damages: list[Damage]


class StoreSummary(NamedTuple):
    """The summary of a bookie's store: its logs, its journals, and the counts of its ledger index."""

    directory: str
    logs: list[LogSummary]
    journals: list[JournalSummary]
    spare_bytes: int
    ledgers: int
    tombstones: int  # intervals
    quarantined: int  # intervals
    limbo_upto: int
    fenced_upto: int
    ledger_index_bytes: int
    other_bytes: int  # index files, reserve and the small files
    damages: list[Damage]  # all

    @property
    def live_bytes(self) -> int:
        return sum(log.live_bytes for log in self.logs)

    @property
    def log_bytes(self) -> int:
        return sum(log.bytes for log in self.logs)


def summarize_log(snapshot: Snapshot, log: int, facts: StateLog) -> LogSummary | RemovedFile:
    """Summarizes a log from the heads of its index; does not read the log itself."""
    size = _size(snapshot, logs.log_path(snapshot, log))
    damages: list[Damage] = []
    if size is None:
        absent = logs.classify_missing(snapshot, log)
        if isinstance(absent, RemovedFile):
            return absent
        damages.append(absent)
    opened = indexes.open_index(snapshot, log)
    if isinstance(opened, RemovedFile):
        return opened
    sums = _Sums(facts)
    if isinstance(opened, Damage):
        damages.append(opened)
    elif snapshot.is_committed(log):
        try:
            sums.add(opened, damages)
        finally:
            opened.file.close()
    state = _state(snapshot, log, facts)
    return LogSummary(
        log, state, size or 0, sums.data_bytes, 0 if state == "drained" else sums.live_bytes, sums.groups, sums.extents,
        sums.entries, sums.ledgers, sums.live_ledgers, sums.largest_ledgers(), damages,
    )  # fmt: skip


def _state(snapshot: Snapshot, log: int, facts: StateLog) -> str:
    if not snapshot.is_committed(log):
        return "not committed"
    if log in facts.drained:
        return "drained"
    if snapshot.mark is not None and log == snapshot.mark.cold_log:
        return "cold"
    return "open" if snapshot.mark is not None and log == snapshot.mark.log else "closed"


class _Sums:
    def __init__(self, facts: StateLog) -> None:
        self._facts = facts
        self.groups = self.extents = self.entries = self.data_bytes = self.live_bytes = 0
        self.ledgers = self.live_ledgers = 0
        self.holders: list[LedgerShare] = []

    def add(self, opened: IndexFile, damages: list[Damage]) -> None:
        for ledger, places in groupby(_merged(opened, damages, self), key=lambda place: place.extent.ledger):
            size = 0
            for place in places:
                size += place.extent.length
                self.extents += 1
                self.entries += place.extent.entries
            live = ledger not in self._facts.tombstones
            self.ledgers += 1
            self.live_ledgers += live
            self.data_bytes += size
            self.live_bytes += size * live
            self._hold(LedgerShare(ledger, size, live))

    def _hold(self, holder: LedgerShare) -> None:
        self.holders.append(holder)
        if len(self.holders) >= 4 * HOLDERS_MAX:
            self.holders = heapq.nlargest(HOLDERS_MAX, self.holders, key=_weight)

    def largest_ledgers(self) -> list[LedgerShare]:
        return heapq.nlargest(HOLDERS_MAX, self.holders, key=_weight)


def _weight(holder: LedgerShare) -> tuple[bool, int]:
    """Returns the sort key for the holders to show: live ledgers first, because they keep the log, then by bytes."""
    return holder.live, holder.bytes


def _merged(opened: IndexFile, damages: list[Damage], sums: _Sums) -> Iterator[ExtentPlace]:
    groups: list[IndexGroup] = []
    for found in opened.groups():
        if isinstance(found, Damage):
            damages.append(found)
        else:
            groups.append(found)
    sums.groups = len(groups)
    each = [opened.extents(group, pieces=len(groups)) for group in groups]
    return heapq.merge(*each, key=lambda place: (place.extent.ledger, place.extent.first))


def summarize_journal(snapshot: Snapshot, number: int) -> JournalSummary | RemovedFile:
    """Summarizes a journal; reads all of it."""
    end, size, damages = ALIGNMENT, 0, list[Damage]()
    for found in journals.walk_journal(snapshot, number):
        match found:
            case journals.OpenedJournal():
                size = found.bytes
            case journals.Block():
                end = found.end_offset
            case Damage():
                damages.append(found)
            case RemovedFile():
                return found
    return JournalSummary(number, size, end, damages)


def summarize_store(snapshot: Snapshot, advance: Callable[[int], None] = lambda files: None) -> StoreSummary:
    """Returns the summary of the whole store. Reads the journals and the heads of all indexes; calls `advance` with the
    number of files that are done.
    """
    seen = ledgers.read_index_overview(snapshot)
    of_logs: list[LogSummary | RemovedFile] = []
    for number in indexes.list_log_numbers(snapshot):
        of_logs.append(summarize_log(snapshot, number, seen.facts))
        advance(len(of_logs))
    of_journals: list[JournalSummary | RemovedFile] = []
    for number in journals.list_journal_numbers(snapshot):
        of_journals.append(summarize_journal(snapshot, number))
        advance(len(of_logs) + len(of_journals))
    known_logs = [each for each in of_logs if isinstance(each, LogSummary)]
    known_journals = [each for each in of_journals if isinstance(each, JournalSummary)]
    damages = [*snapshot.damages, *seen.damages, *journals.missing_journals(snapshot)]
    damages += [damage for log in known_logs for damage in log.damages]
    damages += [damage for journal in known_journals for damage in journal.damages]
    spares = [_size(snapshot, snapshot.path(JOURNAL, name)) or 0 for name in journals.spare_names(snapshot)]
    return StoreSummary(
        snapshot.directory, known_logs, known_journals, sum(spares), len(seen.ledgers), len(seen.facts.tombstones),
        len(seen.facts.quarantined()), seen.facts.limbo_upto, seen.facts.fenced_upto, seen.bytes,
        _other_bytes(snapshot), damages,
    )  # fmt: skip


def _size(snapshot: Snapshot, path: str) -> int | None:
    file = open_file(snapshot, path)
    if file is None:
        return None
    try:
        return file.size()
    finally:
        file.close()


def _other_bytes(snapshot: Snapshot) -> int:
    """Returns the bytes of all files that are neither log nor journal nor ledger index."""
    total = 0
    for name in snapshot.files.list_directory(snapshot.directory):
        if name not in (ENTRIES, JOURNAL, LEDGERS):
            total += _size_of_plain(snapshot, snapshot.path(name))
    for log in indexes.list_log_numbers(snapshot):
        total += _size(snapshot, indexes.index_path(snapshot, log)) or 0
    return total


def _size_of_plain(snapshot: Snapshot, path: str) -> int:
    try:
        return _size(snapshot, path) or 0
    except OSError:  # a folder
        return 0
