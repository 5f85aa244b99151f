"""`magnetar …` on a disk that remembers what was not synced, so that a power cut can be had with `kill -9`.

What cluster.py starts: `python -m tests.chaos.processes.unsynced ARGUMENTS…` is `magnetar ARGUMENTS…` with the
disk's writes noted in a file (of the environment's UNDO) before they are made: what was there before. A sync notes
that everything written to its file before it began is durable. `drop(file, rng)` then takes back, in a stopped
process's files, what no sync covers: all of it, or for a file by chance only the last writes; and new names that no
sync of their folder covers. Renames and removals are not taken back. A write of a `direct` file is durable when it
returns, and with it the size of its file; what was written otherwise to other bytes of it is not.

On a fast disk nearly nothing is ever under way, and a power cut would take nothing. So a sync, and a direct write, take
up to SYNC_MAX_S longer than they do, and as long as there is a file STALLED beside the notes none comes to its end:
that is what a power cut begins with.

With HASTE of moves.py in the environment the balance is in haste.

With LIES in the environment no sync is noted and nothing is direct: a disk that lies, the known-bad control of a run.
SQLite writes past this (metadata): a power cut is only `kill -9` for it.
"""

import contextlib
import os
import pickle
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from magnetar.runtime import process
from magnetar.runtime.disk import DirectFile, SystemFile, SystemFiles
from magnetar.runtime.files import Buffer

UNDO = "MAGNETAR_CHAOS_UNDO"
LIES = "MAGNETAR_CHAOS_SYNC_LIES"
STALLED = "stalled"
SYNC_MAX_S = 0.01
"""What a disk that turns takes."""
STALL_LOOK_S = 0.005


class Wrote(NamedTuple):
    """Or cut the file: then from `offset` to its end."""

    number: int
    path: str
    offset: int
    before: bytes
    size: int
    length: int
    cut: bool = False


class WroteDirect(NamedTuple):
    path: str
    below: int
    offset: int
    end: int


class Created(NamedTuple):
    path: str


class Synced(NamedTuple):
    path: str
    below: int


class SyncedFolder(NamedTuple):
    path: str


class Renamed(NamedTuple):
    old: str
    new: str


class Removed(NamedTuple):
    path: str


class Notes:
    """The file of notes. What is appended survives `kill -9`: the page cache is the system's.

    What a process that was killed had not synced may still be lost after the next one has read it, unless that one
    syncs it: a start keeps the notes that no sync covers, and those alone.
    """

    def __init__(self, path: str) -> None:
        self.numbers = _compact(Path(path))
        self._stalled = Path(path).with_name(STALLED)
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()

    def add(self, note: Any) -> None:
        with self._lock:
            os.write(self._fd, pickle.dumps(note))

    def wrote(self, file: SystemFile, offset: int, length: int, *, cut: bool = False) -> int:
        """The number behind it: before the file is changed."""
        with self._lock:
            note = Wrote(self.numbers, file.path, offset, file.pread(length, offset), file.size(), length, cut)
            self.numbers += 1
            os.write(self._fd, pickle.dumps(note))
            return self.numbers

    def wait(self) -> None:
        """For the disk."""
        time.sleep(random.uniform(0.0, SYNC_MAX_S))
        while self._stalled.exists():
            time.sleep(STALL_LOOK_S)


class NotedFile(SystemFile):
    __slots__ = ("_lies", "_notes")

    def __init__(self, fd: int, path: str, notes: Notes, lies: bool) -> None:
        super().__init__(fd, path)
        self._notes, self._lies = notes, lies

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._notes.wrote(self, offset, sum(map(len, buffers)))
        return super().pwrite(buffers, offset)

    def truncate(self, size: int) -> None:
        self._notes.wrote(self, size, max(0, self.size() - size), cut=True)
        super().truncate(size)

    def fdatasync(self) -> None:
        below = self._notes.numbers
        self._notes.wait()
        super().fdatasync()
        if not self._lies:
            self._notes.add(Synced(self.path, below))


class NotedDirectFile(DirectFile):
    __slots__ = ("_notes",)

    def __init__(self, fd: int, path: str, notes: Notes) -> None:
        super().__init__(fd, path)
        self._notes = notes

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> int:
        below = self._notes.wrote(self, offset, sum(map(len, buffers)))
        written = super().pwrite(buffers, offset)
        self._notes.wait()
        self._notes.add(WroteDirect(self.path, below, offset, offset + written))
        return written

    def fdatasync(self) -> None:
        below = self._notes.numbers
        self._notes.wait()
        super().fdatasync()
        self._notes.add(Synced(self.path, below))


class NotedFiles(SystemFiles):
    def __init__(self) -> None:
        self._notes = Notes(os.environ[UNDO])
        self._lies = bool(os.environ.get(LIES))

    def open(
        self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True, direct: bool = False
    ) -> SystemFile:
        new = create and not os.path.exists(path)
        direct = direct and not self._lies
        plain = super().open(path, create=create, exclusive=exclusive, write=write, direct=direct)
        fd = os.dup(plain._fd)
        os.set_inheritable(fd, False)
        plain.close()
        opened = NotedDirectFile(fd, path, self._notes) if direct else NotedFile(fd, path, self._notes, self._lies)
        if new:
            self._notes.add(Created(path))
        return opened

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._notes.add(Renamed(old, new))

    def remove(self, path: str) -> None:
        super().remove(path)
        self._notes.add(Removed(path))

    def sync_directory(self, path: str) -> None:
        self._notes.wait()
        super().sync_directory(path)
        self._notes.add(SyncedFolder(path))


def drop(notes: Path, rng: random.Random) -> int:
    """Takes back what was not synced when the process ended; how many writes. Call it before the next start."""
    writes, created = _pending(notes)
    dropped = 0
    for path in sorted(writes):
        undo = writes[path]
        if rng.random() < 0.5:
            undo = undo[rng.randrange(len(undo)) :]
        with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
            for note in reversed(undo):
                file.seek(note.offset)
                file.write(note.before.ljust(min(note.length, note.size - note.offset), b"\0"))
                file.truncate(max(note.size, 0))
                dropped += 1
    for path in sorted(created):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
            dropped += 1
    notes.unlink(missing_ok=True)
    return dropped


def _compact(notes: Path) -> int:
    """Leaves in the file what is not synced; the number of the next write."""
    writes, created = _pending(notes)
    pending = sorted(note for undo in writes.values() for note in undo)
    compacted = notes.with_suffix(".compacted")
    with compacted.open("wb") as file:
        for note in [*pending, *map(Created, sorted(created))]:
            pickle.dump(note, file)
    compacted.rename(notes)
    return pending[-1].number + 1 if pending else 0


def _pending(notes: Path) -> tuple[dict[str, list[Wrote]], set[str]]:
    writes: dict[str, list[Wrote]] = defaultdict(list)
    created: set[str] = set()
    for note in _read(notes):
        match note:
            case Wrote():
                writes[note.path].append(note)
            case Synced():
                writes[note.path] = [each for each in writes[note.path] if each.number >= note.below]
            case WroteDirect():
                writes[note.path] = [left for each in writes[note.path] for left in _beside(each, note)]
            case Created():
                created.add(note.path)
            case SyncedFolder():
                created = {path for path in created if os.path.dirname(path) != note.path.rstrip("/")}
            case Renamed():
                writes[note.new] = [each._replace(path=note.new) for each in writes.pop(note.old, [])]
                created.discard(note.old)
            case Removed():
                writes.pop(note.path, None)
                created.discard(note.path)
    return {path: found for path, found in writes.items() if found}, created


def _beside(wrote: Wrote, direct: WroteDirect) -> list[Wrote]:
    """What may still be taken back of a write when another one has become durable."""
    if wrote.number >= direct.below:
        return [wrote]
    if wrote.cut:
        return []
    size, end = max(wrote.size, direct.end), wrote.offset + wrote.length
    pieces = ((wrote.offset, min(end, direct.offset)), (max(wrote.offset, direct.end), end))
    return [_piece(wrote, start, stop)._replace(size=size) for start, stop in pieces if start < stop]


def _piece(wrote: Wrote, start: int, stop: int) -> Wrote:
    before = wrote.before[start - wrote.offset : stop - wrote.offset]
    return wrote._replace(offset=start, before=before, length=stop - start)


def _read(notes: Path) -> list[Any]:
    found: list[Any] = []
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError), notes.open("rb") as file:
        while True:
            found.append(pickle.load(file))
    return found


if __name__ == "__main__":
    from magnetar.cli.main import main
    from tests.chaos.processes import moves, stacks, unsynced  # its notes are read under that name

    stacks.listen()
    if moves.HASTE in os.environ:
        moves.make_haste()
    if UNDO in os.environ:
        process.SystemFiles = unsynced.NotedFiles  # type: ignore[misc]
    sys.exit(main())
