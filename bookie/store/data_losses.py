"""The data losses that a start finds: they are durable until limbo is (ledger protocol §2.7).

A start that finds durable data damaged or gone continues: it takes what is whole, and enters limbo. Its findings must
be durable before the start changes any file, because a second look might find nothing wrong any more:

    found(reason)   in memory, and logged
    record()        durable, in the note `limbo` of the data directory; before anything is cut, removed, rebuilt, or
                    passed by a mark. A start that finds such a note has found its reasons
    settle()        after the checkpoint that made limbo durable in the ledger index: the note is only a list of
                    reasons from now on, for operators
    forget()        after the checkpoint that left limbo

    note = format/note.py with magic "MGN-LIMB", body {"reasons": [text, …], "settled": bool}

A damaged note is a reason. Reasons are kept up to REASONS_MAX. Guarded by tests/bookie/node/test_boot.py
`test_what_was_found_survives_a_crash_at_any_operation_of_the_start`.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec

from ...runtime.files import Files, join
from ..format import note
from ..format.framing import Damaged
from . import disk
from .journal.segments import JournalPosition

_LOG = logging.getLogger("magnetar.bookie.store")

LIMBO = "limbo"
MAGIC = b"MGN-LIMB"
REASONS_MAX = 100

T = TypeVar("T")


class Note(msgspec.Struct, frozen=True):
    """The note of data losses that a start found; `settled` once limbo is durable."""

    reasons: tuple[str, ...]
    settled: bool = False


async def every_ledger() -> int:
    return (1 << 63) - 1


class Known(NamedTuple):
    """The state of a data directory as its cookie and the metadata know it, when it is opened."""

    journal: JournalPosition = JournalPosition(0, 0)  # its journal was synced up to here
    losses: tuple[str, ...] = ()  # reasons that were found before the store was looked at
    upto: Callable[[], Awaitable[int]] = every_ledger  # the largest ledger id that was ever given out


class DataLossLog:
    """The losses that one start found. All calls in a worker, except `found`."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._path = join(directory, LIMBO)
        self._durable: tuple[int, bool] = (0, False)  # of the note: how many reasons, and whether it is settled
        self.reasons: list[str] = []  # all that are known, also of former starts
        self.open = False  # something was found that is not limbo yet

    def load(self) -> None:
        """Loads what a former start found."""
        if not self._files.exists(self._path):
            return
        try:
            known = note.decode(disk.read_file(self._files, self._path), MAGIC, Note, self._path)
        except Damaged as error:
            self.found(str(error))
            return
        self.reasons += known.reasons
        self._durable = (len(self.reasons), known.settled)
        self.open = not known.settled

    def found(self, reason: str) -> None:
        _LOG.error("data was lost: %s", reason)
        self.open = True
        if reason not in self.reasons and len(self.reasons) < REASONS_MAX:
            self.reasons.append(reason)

    def record(self) -> None:
        if self.open and self._durable != (len(self.reasons), False):
            self._write(settled=False)

    def settle(self) -> None:
        if self._durable != (len(self.reasons), True):
            self._write(settled=True)
        self.open = False

    def forget(self) -> None:
        self.reasons = []
        self.open = False
        self._durable = (0, False)
        if self._files.exists(self._path):
            self._files.remove(self._path)
            disk.sync_directory(self._files, self._directory)

    def _write(self, *, settled: bool) -> None:
        data = note.encode(MAGIC, Note(tuple(self.reasons), settled))
        disk.replace(self._files, self._directory, LIMBO, data)
        self._durable = (len(self.reasons), settled)


def readable(path: str, read: Callable[[], T]) -> T:
    """Returns what `read` returns. Raises Damaged, also when the disk cannot read a sector."""
    try:
        return read()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damaged(path, 0, f"the disk cannot read it: {error}") from error
