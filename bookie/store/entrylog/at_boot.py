"""Steps 3 and 4 of a start (store/boot.py): which entry logs exist, which should, and what their indexes lack.

`Logs.open` removes what an unfinished checkpoint or move left, cuts the open logs, checks each log against its index,
rebuilds indexes, and returns all groups. `facts` are the consequences: entries that are known to be lost are
quarantined, and a log that is gone is drained, so that it is reported once only. All of it in a worker.

A log that is gone is damage only if an entry in it lived. This is known after the replay, which may still read
tombstones of its ledgers. Until then the log is in `gone`, and `complain` reports those that had living entries. On a
full disk compaction removes the data of dead logs first (store/compaction/compaction.py); their indexes remain until a
start finds them drained.
Guarded by tests/bookie/node/test_boot.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pyroaring import BitMap64

from ....runtime.files import Files, join
from ...format import entry_log
from ...format.framing import FILE_HEADER_BYTES, Damaged, ForeignFile, decode_file_header
from ...format.ledger_index import Drained, Quarantined
from ...format.mark import Mark
from .. import disk
from ..data_losses import DataLossLog, readable
from ..index.index import Group
from ..intervals import Intervals
from . import files as log_files
from . import rebuild
from .rebuild import Lost

_LOG = logging.getLogger("magnetar.bookie.store.entrylog")

INVENTORY = 0
"""Drained(INVENTORY): from here on a log that neither exists nor is drained counts as a loss."""


class Logs:
    """The entry logs of a start: its inventory, its repairs, and the groups of all indexes."""

    def __init__(
        self, files: Files, directory: str, uuid: bytes, mark: Mark, drained: frozenset[int], losses: DataLossLog
    ) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self._mark = mark
        self._drained = drained
        self._losses = losses
        self._opened = {opened.number: opened for opened in (mark.hot, mark.cold) if opened.number}
        self.facts: list[Quarantined | Drained] = []
        self.gone: dict[str, BitMap64] = {}  # path of a log that only its index speaks of: its ledgers

    def open(self) -> list[Group]:
        """The groups of all indexes; every loss is recorded before a file is changed."""
        self._take_inventory()
        self._losses.record()
        self._tidy()
        groups: list[Group] = []
        for number in log_files.numbers(self._files, self._directory):
            if not self._files.exists(self._log(number)):
                self._mourn(number)
                continue
            if number in self._opened:
                self._cut(self._log(number), self._opened[number].log_end)
                self._cut(self._index(number), self._opened[number].index_end)
            groups += self._groups(number)
        return groups

    def _log(self, number: int) -> str:
        return join(self._directory, log_files.log_name(number))

    def _index(self, number: int) -> str:
        return join(self._directory, log_files.index_name(number))

    # ------------------------------------------------------------------------------------ which there are
    def _take_inventory(self) -> None:
        """Checks that each committed log exists or is drained."""
        here = set(log_files.numbers(self._files, self._directory))
        missing = [n for n in range(1, self._mark.last_log + 1) if n not in here and n not in self._drained]
        self.facts += [Drained(number) for number in missing]
        if INVENTORY not in self._drained:
            self.facts.append(Drained(INVENTORY))
            missing = [number for number in missing if number in self._opened]
        for number in missing:
            self._losses.found(f"{self._log(number)} is gone, and its index")

    def _tidy(self) -> None:
        """Removes what a checkpoint, a move, a removal or a rebuild that did not end left."""
        for name in self._files.list_directory(self._directory):
            if name.endswith(rebuild.TEMPORARY):
                self._files.remove(join(self._directory, name))
        for number in log_files.numbers(self._files, self._directory):
            if number > self._mark.last_log or number in self._drained:
                log_files.remove(self._files, self._directory, number)

    def _cut(self, path: str, end: int) -> None:
        """Cuts the file at `end`: what follows belongs to a checkpoint that did not end.

        Syncs also when nothing was cut: a process that was killed may have cut it in the page cache alone, and the next
        mark does not name the end any more. If the tail of a log returned, it would look like entries that the index
        lost.
        """
        if not self._files.exists(path):
            return
        file = self._files.open(path)
        try:
            if file.size() >= end:
                file.truncate(end)
                disk.sync(self._files, file)
        finally:
            file.close()

    # ------------------------------------------------------------------------------------ what each holds
    def _groups(self, number: int) -> list[Group]:
        self._check_header(number)
        try:
            groups = self._read(number)
        except ForeignFile:
            raise
        except (Damaged, FileNotFoundError) as error:
            return self._rebuild(number, str(error))
        size, opened = self._size(number), self._opened.get(number)
        reach = max((group.reach for group in groups), default=entry_log.DATA_OFFSET)
        if opened is not None and reach < opened.log_end:
            return self._rebuild(number, f"{self._index(number)} ends before the log does")
        if size > reach and any(self._read_log(number, reach, entry_log.RECORD_HEADER_BYTES)):
            # The index may have lost whole groups; or a checkpoint did not end here, and left less than a record.
            return self._rebuild(number, f"{self._index(number)} ends before the log does", whole_to=reach)
        if size < reach and groups:
            _LOG.error("%s ends at %d and should be %d bytes long", self._log(number), size, reach)
            self._quarantine(number, size)
        return groups

    def _read(self, number: int) -> list[Group]:
        return readable(
            self._index(number),
            lambda: log_files.read_groups(self._files, self._directory, number, self._uuid, None),
        )

    def _rebuild(self, number: int, reason: str, whole_to: int | None = None) -> list[Group]:
        """Rebuilds the index. The log must have its full length, else what was after its end is lost with the index.

        `whole_to`: the index is whole, up to there; a log's end without a record after it is no loss.
        """
        _LOG.error("%s; it is rebuilt from the log", reason)
        opened = self._opened.get(number)
        if opened is not None and self._size(number) < opened.log_end:
            self._losses.found(f"{self._log(number)} ends before {opened.log_end}, and its index is damaged")
        try:
            readable(
                self._log(number),
                lambda: rebuild.rebuild_index(
                    self._files, self._directory, number, self._uuid, lambda lost: self._tell(number, lost, whole_to),
                    exact=opened is not None,
                ),
            )
            return self._read(number)
        except Damaged as error:
            self._losses.found(f"{error}, and its index is damaged")
            self._losses.record()
            return []

    def _tell(self, number: int, lost: list[Lost], whole_to: int | None) -> None:
        size = self._size(number)
        for start, end in lost:
            if whole_to is not None and start < whole_to:
                _LOG.error("%s: no entry can be read between %d and %d", self._log(number), start, end)
                self._quarantine(number, start, end)
            elif whole_to is None or end < size:
                self._losses.found(f"{self._log(number)}: no entry can be read between {start} and {end}")
        self._losses.record()

    def _mourn(self, number: int) -> None:
        """Handles a log that is gone, whose index says what it held."""
        before = len(self.facts)
        try:
            readable(self._index(number), lambda: self._quarantine(number))
        except ForeignFile:
            raise
        except Damaged as error:
            self._losses.found(f"{self._log(number)} is gone, and its index is damaged: {error}")
            self._losses.record()
        ledgers = {fact.ledger for fact in self.facts[before:] if isinstance(fact, Quarantined)}
        self.gone[self._log(number)] = BitMap64(ledgers)
        self.facts.append(Drained(number))

    def _quarantine(self, number: int, start: int = 0, end: int | None = None) -> None:
        """Quarantines the entries that the index has in that part of the log."""
        for extents in log_files.read_extents(self._files, self._directory, number, self._uuid, None):
            self.facts += [
                Quarantined(extent.ledger, extent.first, extent.last)
                for extent in extents
                if extent.start + extent.length > start and (end is None or extent.start < end)
            ]

    # ------------------------------------------------------------------------------------ the log's bytes
    def _check_header(self, number: int) -> None:
        """Raises ForeignFile, NewerFormat. A damaged header is no loss: each record has its ids."""
        path = self._log(number)
        try:
            header = readable(path, lambda: self._read_log(number, 0, FILE_HEADER_BYTES))
            decode_file_header(header, entry_log.MAGIC, self._uuid, number, path)
        except ForeignFile:
            raise
        except Damaged as error:
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


def complain(gone: Mapping[str, BitMap64], deleted: Intervals) -> None:
    """Logs, after the replay, an error for each missing log that had a ledger without a tombstone."""
    for path, ledgers in gone.items():
        if any(ledger not in deleted for ledger in ledgers):
            _LOG.error("%s is missing; its index names the entries that it had", path)
