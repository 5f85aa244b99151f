"""The reserve: a file of really allocated blocks, given up when the disk is full and something must be written.

Compaction, checkpoints, recovery adds and a start need room before they free some. On a disk without any free byte none
of them could begin. `give_up` removes the file and so frees its size. From then on the bookie takes no adds of clients
(bookie/node/disk_monitor.py) until `fill` has allocated the file again.

    size = `bytes_min`, or a sixteenth of all entry logs when that is more, up to `bytes_max` (a whole log: the most
           that a move of compaction needs), but at most 5 % of the disk; whole pages

The reserve grows with the store, so that an empty store costs little and a full one can move any of its logs. It is not
synced: a crash leaves the file whole, in part, or not at all, and each is harmless. The present part counts, and the
rest is filled. The file is never read. Guarded by tests/bookie/node/test_full_disk.py.
"""

from __future__ import annotations

from ....runtime.files import Files, join
from .. import disk
from ..entrylog import files as log_files

NAME = "reserve"
SHARE_MAX = 0.05
STORED_SHARE = 1 / 16
_PAGE = 4096


class Reserve:
    """The reserve of one data directory. All calls from a worker; `held` is true while the whole file is there, or none
    is wanted."""

    def __init__(self, files: Files, directory: str, entries: str, bytes_min: int, bytes_max: int) -> None:
        self._files = files
        self._directory = directory
        self._entries = entries
        self._path = join(directory, NAME)
        self._bytes_min = bytes_min
        self._bytes_max = max(bytes_min, bytes_max)
        self.held = False

    def size_bytes(self) -> int:
        """Returns the size that the reserve should have."""
        if not self._bytes_min:
            return 0
        total, _ = self._files.disk_usage(self._directory)
        stored = log_files.stored_bytes(self._files, self._entries)
        wanted = min(max(self._bytes_min, int(stored * STORED_SHARE)), self._bytes_max)
        return min(wanted, int(total * SHARE_MAX)) // _PAGE * _PAGE

    def look(self) -> None:
        """Whether it is there, and as large as what is stored wants it."""
        self.held = self._there() >= self.size_bytes()

    def _there(self) -> int:
        return disk.size_of(self._files, self._path) if self._files.exists(self._path) else 0

    def give_up(self) -> bool:
        """Makes room; False: there was nothing to give up."""
        self.held = False
        if not self._files.exists(self._path):
            return False
        self._files.remove(self._path)
        return True

    def fill(self, used_share_max: float) -> None:
        """Takes it again, if less of the disk is used then than this share. NoDescriptor."""
        total, free = self._files.disk_usage(self._directory)
        size = self.size_bytes()
        missing = max(size - self._there(), 0)
        if missing and total - free + missing >= used_share_max * total:
            return
        try:
            self._allocate(size)
        except disk.NoDescriptor:
            raise
        except disk.NoSpace:
            self.give_up()
            return
        self.held = True

    def _allocate(self, size: int) -> None:
        if not size:
            return
        try:
            file = self._files.open(self._path, create=True)
        except OSError as error:
            disk.fail(self._files, f"create {self._path}", error)
        try:
            disk.allocate(self._files, file, size)
        finally:
            file.close()
