"""Room on a full disk: which write found none, and when the reserve is given up and filled (ledger protocol §2.2,
invariant 24).

A write that finds no room fails, and none of it counts (store/disk.py). Then, in this order:

    a checkpoint, a move     gives up the reserve (`DiskReserve`) and is tried once more (`run_and_retry_with_reserve`)
    a journal block          its waiters are refused; `ensure_room` gives up the reserve, so that the next blocks find
                             room: by then they are recovery adds and fences only, because `on_no_space` has ended
                             clients' adds
    a start                  gives up the reserve, then the journals that wait for their use, then those that it has
                             replayed and flushed, and begins again

Without a free descriptor the disk is not full (NoFileDescriptor): the reserve stays, and no adds are ended. The
checkpoint is made again soon (store.py). `without_descriptor` holds until then, and adds that find memory full do not
wait for it (bookie/adds.py).

`ensure_room` is called at intervals, and after `on_no_space`: it repeats the write that found no room, and fills the
reserve when the disk has room for it. Guarded by tests/bookie/test_full_disk.py, tests/bookie/test_few_descriptors.py.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ...runtime.files import Files, join_path
from ...runtime.tasks import Worker
from ..format import mark as mark_format
from ..format.journal import DamagedFile
from . import disk
from .boot import JournalPlace
from .checkpoint import MARK_FILE
from .entrylog import files as log_files
from .journal import Journal
from .replay import FILLING_PREFIX, JOURNAL_SUFFIX, SPARE_PREFIX, journal_file_name

# ------------------------------------------------------------------------------------------------------- reserve
# The reserve: a file of really allocated blocks, given up when the disk is full and something must be written.
#
# Compaction, checkpoints, recovery adds and a start need room before they free some. On a disk without any free byte
# none of them could begin. `release` removes the file and so frees its size. From then on the bookie takes no adds of
# clients (bookie/registration.py) until `fill_to_share` has allocated the file again.
#
#     size = `bytes_min`, or a sixteenth of all entry logs when that is more, up to `bytes_max` (a whole log: the most
#            that a move of compaction needs), but at most 5 % of the disk; whole pages
#
# The reserve grows with the store, so that an empty store costs little and a full one can move any of its logs. It is
# not synced: a crash leaves the file whole, in part, or not at all, and each is harmless. The present part counts, and
# the rest is filled. The file is never read. Guarded by tests/bookie/test_full_disk.py.


RESERVE_FILE = "reserve"
RESERVE_DISK_SHARE_MAX = 0.05
RESERVE_STORED_SHARE = 1 / 16
_PAGE = 4096


class DiskReserve:
    """The disk reserve of one data directory: a file that is deleted when the disk is full, so that its space can be
    used. All methods must be called in a worker. `held`: whether the whole reserve file exists; also true if no reserve
    is wanted. The file has at least `bytes_min` (0: no reserve is wanted) and at most `bytes_max` bytes, but never more
    than RESERVE_DISK_SHARE_MAX of the disk."""

    def __init__(self, files: Files, directory: str, entries: str, bytes_min: int, bytes_max: int) -> None:
        self._files = files
        self._directory = directory
        self._entries = entries
        self._path = join_path(directory, RESERVE_FILE)
        self._bytes_min = bytes_min
        self._bytes_max = max(bytes_min, bytes_max)
        self.held = False

    def size_bytes(self) -> int:
        """Returns the size in bytes that the reserve file should have now: the share RESERVE_STORED_SHARE of the stored
        bytes, within the configured bounds, and at most the share RESERVE_DISK_SHARE_MAX of the disk; 0: no reserve is
        wanted. Raises OSError if the directory cannot be listed."""
        if not self._bytes_min:
            return 0
        total, _ = self._files.disk_usage(self._directory)
        stored = log_files.measure_log_bytes(self._files, self._entries)
        wanted = min(max(self._bytes_min, int(stored * RESERVE_STORED_SHARE)), self._bytes_max)
        return min(wanted, int(total * RESERVE_DISK_SHARE_MAX)) // _PAGE * _PAGE

    def measure_size(self) -> None:
        """Sets `held` to whether the reserve file has the size that it should have now. Raises OSError if the directory
        cannot be listed."""
        self.held = self._there() >= self.size_bytes()

    def _there(self) -> int:
        return disk.read_file_size(self._files, self._path) if self._files.exists(self._path) else 0

    def release(self) -> bool:
        """Deletes the reserve file, which frees its disk space. Sets `held` to False. Returns whether there was a file
        to delete. Raises OSError if it cannot be deleted."""
        self.held = False
        if not self._files.exists(self._path):
            return False
        self._files.remove(self._path)
        return True

    def fill_to_share(self, used_share_max: float) -> None:
        """Allocates the reserve file and sets `held`. Does nothing if more than the share `used_share_max` of the disk
        would be used afterwards, or if the disk has no room. Raises NoFileDescriptor, or OSError if the directory
        cannot be listed."""
        total, free = self._files.disk_usage(self._directory)
        size = self.size_bytes()
        missing = max(size - self._there(), 0)
        if missing and total - free + missing >= used_share_max * total:
            return
        try:
            self._allocate(size)
        except disk.NoFileDescriptor:
            raise
        except disk.NoSpace:
            self.release()
            return
        self.held = True

    def _allocate(self, size: int) -> None:
        if not size:
            return
        try:
            file = self._files.open(self._path, create=True)
        except OSError as error:
            disk.raise_no_space_or_exit(self._files, f"create {self._path}", error)
        try:
            disk.allocate_space(self._files, file, size)
        finally:
            file.close()


# ------------------------------------------------------------------------------------------------------ headroom


_LOG = logging.getLogger("magnetar.bookie.store.space")


class DiskHeadroom:
    """Gets room on a full disk for a bookie's store: frees the disk reserve for writes that must succeed, repeats the
    writes that found no room, and fills the reserve again later. Calls `checkpoint` to make a checkpoint. Calls
    `on_no_space` when a write found the disk full; the bookie must then refuse adds of clients."""

    def __init__(
        self, files: Files, directory: str, worker: Worker, reserve: DiskReserve, journal: Journal,
        checkpoint: Callable[[], Awaitable[None]], on_no_space: Callable[[], None],
    ) -> None:  # fmt: skip
        self._files = files
        self._directory = directory
        self._worker = worker
        self._reserve = reserve
        self._checkpoint = checkpoint
        self._journal = journal
        self.flush_blocked = False
        self.without_descriptor = False  # the last checkpoint found none free
        self.on_no_space = on_no_space

    async def measure_disk(self) -> tuple[int, int]:
        """Returns (size, free space) of the disk with the data directory, in bytes. Raises OSError."""
        return await self._worker.run(self._files.disk_usage, self._directory)

    @property
    def no_space(self) -> bool:
        """Returns whether the last checkpoint, or the last block or spare file of the journal, found the disk full, and
        no later write has found room."""
        return self.flush_blocked or self._journal.no_space

    @property
    def is_reserve_held(self) -> bool:
        """Returns whether the disk reserve was complete when it was measured or filled last, or none is wanted."""
        return self._reserve.held

    async def ensure_room(self, used_share_max: float) -> bool:
        """Repeats the writes that found the disk full, and fills the disk reserve if at most the share `used_share_max`
        of the disk is used afterwards. Returns whether the disk has room for writes and the reserve exists.

        Raises OSError or NoFileDescriptor if the state of the disk cannot be determined now."""
        if self.no_space:
            await self._make()
            await self._try_again()
        await self._worker.run(self._reserve.measure_size)
        if not self.no_space and not self._reserve.held:
            await self._worker.run(self._reserve.fill_to_share, used_share_max)
        return not self.no_space and self._reserve.held

    async def _make(self) -> bool:
        """Frees the disk reserve and calls `on_no_space`. Returns False, and does nothing, if there is no reserve."""
        if not await self._worker.run(self._reserve.release):
            return False
        _LOG.warning("the disk is full: the reserve is freed for the writes that must succeed")
        self.on_no_space()
        return True

    async def _try_again(self) -> None:
        """Tests whether the disk has room for a journal block again. If so, repeats the checkpoint that found no
        room."""
        if self._journal.no_space:
            await self._journal.refresh_no_space()
        if self.flush_blocked and not self._journal.no_space:
            try:
                await self._checkpoint()
            except disk.NoSpace as error:
                _LOG.debug("still no room for a checkpoint: %s", error)

    async def run_and_retry_with_reserve(self, action: Callable[[], Awaitable[None]]) -> None:
        """Runs `action`. If the disk is full, frees the disk reserve and runs `action` once more. Raises NoSpace if
        there is no reserve, or if `action` fails again."""
        try:
            await action()
        except disk.NoFileDescriptor:
            raise
        except disk.NoSpace:
            if not await self._make():
                raise
            await action()

    async def flush(self, checkpoint: Callable[[], Awaitable[None]]) -> None:
        """Runs `checkpoint`, with the disk reserve if necessary. Raises NoSpace (then `ensure_room` repeats the
        checkpoint later) or NoFileDescriptor."""
        try:
            await self.run_and_retry_with_reserve(checkpoint)
            self.flush_blocked = self.without_descriptor = False
        except disk.NoFileDescriptor as error:
            if not self.without_descriptor:
                _LOG.error("no file descriptor is free for a checkpoint; adds are busy when memory is full: %s", error)
            self.without_descriptor = True
            raise
        except disk.NoSpace:
            self.flush_blocked = True
            self.on_no_space()
            raise


def release_reserve_for_start(files: Files, directory: str, journal: JournalPlace, uuid: bytes) -> bool:
    """Frees disk space when a start of the store found the disk full: deletes the disk reserve; if there is none, spare
    journal files or journal files that are not needed any more. Returns whether anything was deleted. Raises
    NewerFormat if the checkpoint mark has a newer format, OSError if a file cannot be read or deleted."""
    if DiskReserve(files, directory, directory, 0, 0).release():
        return True
    files_of_journal, journals = journal.files, journal.directory
    names = files_of_journal.list_directory(journals) if files_of_journal.exists(journals) else []
    spares = [name for name in names if name.startswith((SPARE_PREFIX, FILLING_PREFIX))]
    # not what this start begins to fill, again and again
    last = [name for name in spares if name.startswith(SPARE_PREFIX)]
    for needless in (spares[1:], _replayed(files, directory, uuid, names), last):
        for name in needless:
            files_of_journal.remove(join_path(journals, name))
        if needless:
            return True
    return False


def _replayed(files: Files, directory: str, uuid: bytes, names: list[str]) -> list[str]:
    """Returns the names of the journal files before the mark. An earlier attempt of this start has replayed and flushed
    them."""
    path = join_path(directory, MARK_FILE)
    if not files.exists(path):
        return []
    try:
        mark, _ = mark_format.decode_checkpoint_mark(disk.read_file(files, path), uuid, path)
    except DamagedFile:
        return []
    return [name for name in names if name.endswith(JOURNAL_SUFFIX) and name < journal_file_name(mark.journal)]
