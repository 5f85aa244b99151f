"""The facts that a bookie must never lose: tombstones, quarantine, limbo, drained logs.

    tombstones    ids of deleted ledgers, for ever: an add or fence of such a ledger is refused
    quarantined   entries of which the only local copy is damaged: a miss is UNKNOWN until they are mended, that is
                  until a checkpoint has moved a later copy into the log
    limbo_upto    ledgers up to this id may have lost entries: a miss is UNKNOWN (-1: none)
    fenced_upto   the largest `limbo_upto` that ever was: no add without RECOVERY is admitted up to here, for ever
    drained       logs whose living entries were all copied, or that are gone: a start removes their files. For ever:
                  a log that neither exists nor is drained is a loss (entrylog/repair_at_start.py)

Each change is in memory at once and is durable with the next checkpoint, which takes it with `take_changes`. A rewrite
of the ledger index writes `list_facts`, the fewest records with the same meaning. `DataLossLog` records the data losses
that a start found, until they are durable as limbo. Guarded by tests/bookie/store/test_state_log.py.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, TypeVar

import msgspec

from ...runtime.files import Files, join_path
from ..format import mark as note
from ..format.journal import DamagedFile
from ..format.ledger_index import (
    DrainedEntryLog,
    LedgerIndexRecord,
    LimboChange,
    QuarantinedEntries,
    QuarantineEnded,
    Tombstone,
)
from . import disk
from .memtable import EntryPieces, IntegerIntervals
from .replay import JournalPosition

StateLogFact = Tombstone | QuarantinedEntries | QuarantineEnded | LimboChange | DrainedEntryLog


class StateLog:
    """The facts that a bookie must never lose: tombstones, quarantined entries, limbo and drained logs. They are kept
    in memory; checkpoints write them to the ledger index. `limbo_upto` and `fenced_upto` are ledger ids, -1: none."""

    def __init__(self) -> None:
        self.tombstones = IntegerIntervals()
        self.limbo_upto = -1
        self.fenced_upto = -1
        self.drained: set[int] = set()
        self._quarantined: dict[int, IntegerIntervals] = {}
        self._changes: list[LedgerIndexRecord] = []

    def add_fact(self, fact: StateLogFact) -> None:
        """Adds a new fact. It is in force at once, and durable with the next checkpoint."""
        self._changes.append(fact)
        self.apply(fact)

    def apply(self, fact: StateLogFact) -> None:
        """Puts a fact into force in memory. Unlike `add_fact`, does not record it as a change, because it is durable
        already."""
        match fact:
            case Tombstone(first, last):
                self.tombstones.add(first, last)
                for ledger in [ledger for ledger in self._quarantined if first <= ledger <= last]:
                    del self._quarantined[ledger]
            case QuarantinedEntries(ledger, first, last):
                if ledger not in self.tombstones:
                    self._quarantined.setdefault(ledger, IntegerIntervals()).add(first, last)
            case QuarantineEnded(ledger, first, last):
                known = self._quarantined.get(ledger)
                if known is not None:
                    known.remove(first, last)
                    if not len(known):
                        del self._quarantined[ledger]
            case LimboChange(upto, entered):
                self.fenced_upto = max(self.fenced_upto, upto)
                self.limbo_upto = max(self.limbo_upto, upto) if entered else -1
            case DrainedEntryLog(log):
                self.drained.add(log)

    # ------------------------------------------------------------------------------------ quarantine
    def quarantine(self, ledger: int, first: int, last: int) -> None:
        """Quarantines the entries `first … last` of the ledger: the only copy here is damaged, so a miss is UNKNOWN.
        Durable with the next checkpoint."""
        self.add_fact(QuarantinedEntries(ledger, first, last))

    def end_quarantine(self, ledger: int, first: int, last: int) -> None:
        """Ends the quarantine of the entries `first … last` of the ledger. An entry log must have good copies of them,
        or get these copies from the running checkpoint."""
        self.add_fact(QuarantineEnded(ledger, first, last))

    def end_quarantine_of_flushed_entries(self, ledgers: dict[int, dict[int, EntryPieces]]) -> None:
        """Ends the quarantine of all quarantined entries among `ledgers` (ledger id → its entries). The running
        checkpoint writes good copies of these entries to the entry log."""
        for ledger in sorted(ledgers.keys() & self._quarantined.keys()):
            for entry in sorted(ledgers[ledger]):
                if self.is_quarantined(ledger, entry):
                    self.end_quarantine(ledger, entry, entry)

    def is_quarantined(self, ledger: int, entry: int) -> bool:
        known = self._quarantined.get(ledger)
        return known is not None and entry in known

    def quarantined_runs_of_ledger(self, ledger: int) -> list[tuple[int, int]]:
        """Returns (first, last) of each run of quarantined entries of the ledger, in ascending order."""
        return list(self._quarantined.get(ledger, ()))

    def quarantined_ledgers(self) -> list[int]:
        """Returns the ids of the ledgers with quarantined entries, in ascending order."""
        return sorted(self._quarantined)

    def quarantined(self) -> list[QuarantinedEntries]:
        """Returns all runs of quarantined entries, in ascending order of ledgers and entries."""
        return [
            QuarantinedEntries(ledger, first, last)
            for ledger in sorted(self._quarantined)
            for first, last in self._quarantined[ledger]
        ]

    # ------------------------------------------------------------------------------------ limbo
    def enter_limbo(self, upto: int) -> None:
        """Begins limbo: entries of ledgers up to `upto` may be lost, and these ledgers are fenced here for ever.
        Durable with the next checkpoint."""
        self.add_fact(LimboChange(upto, entered=True))

    def leave_limbo(self) -> None:
        """Ends limbo; the fence of its ledgers stays. Does nothing if there is no limbo. Durable with the next
        checkpoint."""
        if self.limbo_upto >= 0:
            self.add_fact(LimboChange(self.limbo_upto, entered=False))

    # ------------------------------------------------------------------------------------ logs
    def mark_log_drained(self, log: int) -> None:
        """Records that all living entries of the log were copied to another log. Durable with the next checkpoint."""
        self.add_fact(DrainedEntryLog(log))

    # ------------------------------------------------------------------------------------ for the ledger index
    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def take_changes(self) -> list[LedgerIndexRecord]:
        """Removes and returns the facts that were added since the last call. Leaves out the quarantine of ledgers that
        were deleted meanwhile."""
        changes, self._changes = self._changes, []
        return [
            each for each in changes if not (isinstance(each, QuarantinedEntries) and each.ledger in self.tombstones)
        ]

    def list_facts(self) -> list[LedgerIndexRecord]:
        """Returns all facts in force, in as few records as possible."""
        facts: list[LedgerIndexRecord] = [Tombstone(first, last) for first, last in self.tombstones]
        facts += self.quarantined()
        if self.fenced_upto >= 0:
            facts.append(LimboChange(self.fenced_upto, entered=False))
        if self.limbo_upto >= 0:
            facts.append(LimboChange(self.limbo_upto, entered=True))
        return facts + [DrainedEntryLog(log) for log in sorted(self.drained)]

    def copy(self) -> StateLog:
        """Returns a copy of all facts in force, for use in a worker thread."""
        new = StateLog()
        new.tombstones = self.tombstones.copy()
        new.limbo_upto, new.fenced_upto, new.drained = self.limbo_upto, self.fenced_upto, set(self.drained)
        new._quarantined = {ledger: known.copy() for ledger, known in self._quarantined.items()}
        return new

    def check_facts(self, ledgers: Iterable[int]) -> None:
        """Checks the invariants: none of `ledgers` has a tombstone, no deleted ledger has quarantined entries, and
        every ledger in limbo is fenced."""
        self.tombstones.check()
        assert all(ledger not in self.tombstones for ledger in ledgers)
        assert all(ledger not in self.tombstones and len(known) for ledger, known in self._quarantined.items())
        for known in self._quarantined.values():
            known.check()
        assert self.limbo_upto <= self.fenced_upto


# --------------------------------------------------------------------------------------------------- data_losses
# The data losses that a start finds: they are durable until limbo is (ledger protocol §2.7).
#
# A start that finds durable data damaged or gone continues: it takes what is whole, and enters limbo. Its findings must
# be durable before the start changes any file, because a second look might find nothing wrong any more:
#
#     add_data_loss(reason)   in memory, and logged
#     write()                 durable, in the note `limbo` of the data directory; before anything is cut, removed,
#                             rebuilt, or passed by a mark. A start that finds such a note has found its reasons
#     mark_limbo_durable()    after the checkpoint that made limbo durable in the ledger index: the note is only a list
#                             of reasons from now on, for operators
#     delete_log()            after the checkpoint that left limbo
#
#     note = format/mark.py with magic "MGN-LIMB", body {"reasons": [text, …], "settled": bool}
#
# A damaged note is a reason. Reasons are kept up to LIMBO_REASONS_MAX. Guarded by tests/bookie/test_boot.py
# `test_what_was_found_survives_a_crash_at_any_operation_of_the_start`.


_LOG = logging.getLogger("magnetar.bookie.store")

LIMBO_FILE = "limbo"
LIMBO_MAGIC = b"MGN-LIMB"
LIMBO_REASONS_MAX = 100

T = TypeVar("T")


class DataLossRecord(msgspec.Struct, frozen=True):
    """The content of the file with the data losses that a start found: the `reasons` as texts. `settled`: whether the
    limbo that follows from them is durable."""

    reasons: tuple[str, ...]
    settled: bool = False


async def largest_possible_ledger_id() -> int:
    """Returns 2^63 - 1: it is assumed that every ledger id was given out."""
    return (1 << 63) - 1


ReadLargestLedger = Callable[[], Awaitable[int]]
"""A function that returns the largest ledger id that was ever given out; -1: none."""


class RecordedDirectoryState(NamedTuple):
    """What the cookie and the metadata say about a data directory when its store is opened."""

    journal: JournalPosition = JournalPosition(0, 0)  # its journal was synced up to here
    losses: tuple[str, ...] = ()  # reasons that were found before the store was looked at
    upto: ReadLargestLedger = largest_possible_ledger_id  # the largest ledger id that was ever given out


class DataLossLog:
    """Records data losses in a file until the limbo that follows from them is durable. All methods except
    `add_data_loss` must be called in a worker. `reasons` are all known losses, as texts. `open`: whether some of them
    have not led to a durable limbo yet."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._path = join_path(directory, LIMBO_FILE)
        self._durable: tuple[int, bool] = (0, False)  # of the note: how many reasons, and whether it is settled
        self.reasons: list[str] = []  # all that are known, also of former starts
        self.open = False  # something was found that is not limbo yet

    def load(self) -> None:
        """Reads the data losses that an earlier start recorded. If the file is damaged, that is another data loss.
        Raises NewerFormat, or OSError if the file cannot be read."""
        if not self._files.exists(self._path):
            return
        try:
            known = note.decode_checksummed_json(
                disk.read_file(self._files, self._path), LIMBO_MAGIC, DataLossRecord, self._path
            )
        except DamagedFile as error:
            self.add_data_loss(str(error))
            return
        self.reasons += known.reasons
        self._durable = (len(self.reasons), known.settled)
        self.open = not known.settled

    def add_data_loss(self, reason: str) -> None:
        """Records a data loss in memory, and logs it. `write` makes it durable. Beyond LIMBO_REASONS_MAX reasons, and
        for a known one, only sets `open`."""
        _LOG.error("data was lost: %s", reason)
        self.open = True
        if reason not in self.reasons and len(self.reasons) < LIMBO_REASONS_MAX:
            self.reasons.append(reason)

    def write(self) -> None:
        """Makes the recorded losses durable if there are new ones. Raises NoSpace if the disk is full, or its subclass
        NoFileDescriptor if no file descriptor is free."""
        if self.open and self._durable != (len(self.reasons), False):
            self._write(settled=False)

    def mark_limbo_durable(self) -> None:
        """Called after the checkpoint that made the limbo durable. Keeps the reasons in the file, for operators, and
        sets `open` to False. Raises NoSpace if the disk is full, or its subclass NoFileDescriptor if no file descriptor
        is free."""
        if self._durable != (len(self.reasons), True):
            self._write(settled=True)
        self.open = False

    def delete_log(self) -> None:
        """Called when limbo has ended, or was never entered: deletes the file and all reasons. Raises NoFileDescriptor
        if the directory cannot be synced; then the file may come back after a crash."""
        self.reasons = []
        self.open = False
        self._durable = (0, False)
        if self._files.exists(self._path):
            self._files.remove(self._path)
            disk.sync_directory(self._files, self._directory)

    def _write(self, *, settled: bool) -> None:
        data = note.encode_checksummed_json(LIMBO_MAGIC, DataLossRecord(tuple(self.reasons), settled))
        disk.replace_file(self._files, self._directory, LIMBO_FILE, data)
        self._durable = (len(self.reasons), settled)


def read_or_raise_damaged(path: str, read: Callable[[], T]) -> T:
    """Returns the result of `read`, which reads the file `path`. Raises DamagedFile instead of the OSError if the disk
    cannot read a sector. Raises other errors of `read` as they are."""
    try:
        return read()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedFile(path, 0, f"the disk cannot read it: {error}") from error
