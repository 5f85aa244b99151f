"""Room on a full disk: which write found none, and when the reserve is given up and filled (ledger protocol §2.2,
invariant 24).

A write that finds no room fails, and none of it counts (store/disk.py). Then, in this order:

    a checkpoint, a move     gives up the reserve (space/reserve.py) and is tried once more (`found_for`)
    a journal block          its waiters are refused; `keep` gives up the reserve, so that the next blocks find room: by
                             then they are recovery adds and fences only, because `on_no_space` has ended clients' adds
    a start                  gives up the reserve, then the journals that wait for their use, then those that it has
                             replayed and flushed, and begins again

Without a free descriptor the disk is not full (NoDescriptor): the reserve stays, and no adds are ended. The checkpoint
is made again soon (checkpoint_scheduler.py). `without_descriptor` holds until then, and adds that find memory full do
not wait for it (bookie/requests/adds.py).

`keep` is called at intervals, and after `on_no_space`: it repeats the write that found no room, and fills the reserve
when the disk has room for it.
Guarded by tests/bookie/node/test_full_disk.py, tests/bookie/node/test_few_descriptors.py.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ....runtime.files import Files, join
from ....runtime.workers import Worker
from ...format import mark as mark_format
from ...format.framing import Damaged
from .. import disk
from ..checkpoint import MARK
from ..journal.journal import Journal
from ..journal.segments import FILLING, SPARE, SUFFIX, journal_name
from .reserve import Reserve

_LOG = logging.getLogger("magnetar.bookie.store.space")

JOURNAL = "journal"


class Headroom:
    """The state of a bookie's disk for its writers. `checkpoint` makes the one that waits for room. `on_no_space` ends
    clients' adds: a write found a full disk."""

    def __init__(
        self, files: Files, directory: str, worker: Worker, reserve: Reserve, journal: Journal,
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

    async def usage(self) -> tuple[int, int]:
        """Returns (total, free) bytes of the disk under the data directory."""
        return await self._worker.run(self._files.disk_usage, self._directory)

    @property
    def no_space(self) -> bool:
        """Whether the last write to journal or log found a full disk. Stays so until one finds room."""
        return self.flush_blocked or self._journal.no_space

    @property
    def reserve_held(self) -> bool:
        return self._reserve.held

    async def keep(self, used_share_max: float) -> bool:
        """Whether there is room, and a reserve, now. The reserve is filled when less of the disk is used then.
        OSError, NoDescriptor: that cannot be said now."""
        if self.no_space:
            await self._make()
            await self._try_again()
        await self._worker.run(self._reserve.look)
        if not self.no_space and not self._reserve.held:
            await self._worker.run(self._reserve.fill, used_share_max)
        return not self.no_space and self._reserve.held

    async def _make(self) -> bool:
        """Gives up the reserve; False: there is none."""
        if not await self._worker.run(self._reserve.give_up):
            return False
        _LOG.warning("the disk is full: the reserve is freed for the writes that must succeed")
        self.on_no_space()
        return True

    async def _try_again(self) -> None:
        """Looks whether there is room for a block again, then makes the checkpoint that waits."""
        if self._journal.no_space:
            await self._journal.try_room()
        if self.flush_blocked and not self._journal.no_space:
            try:
                await self._checkpoint()
            except disk.NoSpace as error:
                _LOG.debug("still no room for a checkpoint: %s", error)

    async def found_for(self, action: Callable[[], Awaitable[None]]) -> None:
        """Runs the action, and once more if the reserve could be given up for it. NoSpace."""
        try:
            await action()
        except disk.NoDescriptor:
            raise
        except disk.NoSpace:
            if not await self._make():
                raise
            await action()

    async def flush(self, checkpoint: Callable[[], Awaitable[None]]) -> None:
        """Makes a checkpoint; NoSpace, and then it is tried again by `keep`, or NoDescriptor."""
        try:
            await self.found_for(checkpoint)
            self.flush_blocked = self.without_descriptor = False
        except disk.NoDescriptor as error:
            if not self.without_descriptor:
                _LOG.error("no file descriptor is free for a checkpoint; adds are busy when memory is full: %s", error)
            self.without_descriptor = True
            raise
        except disk.NoSpace:
            self.flush_blocked = True
            self.on_no_space()
            raise


def at_start(files: Files, directory: str, uuid: bytes) -> bool:
    """Makes room for a start that found none; False: there is nothing left to give up."""
    journals = join(directory, JOURNAL)
    if Reserve(files, directory, directory, 0, 0).give_up():
        return True
    names = files.list_directory(journals) if files.exists(journals) else []
    spares = [name for name in names if name.startswith((SPARE, FILLING))]
    last = [name for name in spares if name.startswith(SPARE)]  # not what this start begins to fill, again and again
    for needless in (spares[1:], _replayed(files, directory, uuid, names), last):
        for name in needless:
            files.remove(join(journals, name))
        if needless:
            return True
    return False


def _replayed(files: Files, directory: str, uuid: bytes, names: list[str]) -> list[str]:
    """The journals that an earlier try of this start replayed and flushed: the mark is after them."""
    path = join(directory, MARK)
    if not files.exists(path):
        return []
    try:
        mark, _ = mark_format.decode_mark(disk.read_file(files, path), uuid, path)
    except Damaged:
        return []
    return [name for name in names if name.endswith(SUFFIX) and name < journal_name(mark.journal)]
