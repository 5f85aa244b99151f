"""The times of a running store's checkpoints: when the memtable becomes part of a log (the order is
store/checkpoint.py's).

One is due when the memtable's active half is full, when `journal_bytes` were written to the journal since the last one
began, or after `interval_s` with something to write. On a full disk it logs an error and tries again at each interval;
meanwhile memtable and journal fill up, and adds are BUSY. Without a free descriptor it tries again after RETRY_S.

    start() ; look()* after each sync ; checkpoint() at will ; stop() ; flush() for the last one

Guarded by tests/bookie/store/test_checkpoint.py, tests/bookie/node/test_full_disk.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

from ...runtime.files import Files
from . import disk
from .checkpoint import Checkpoint, Source
from .journal.journal import Journal
from .ledgers.descriptors import Descriptors
from .memtable import Memtable
from .space.headroom import Headroom

RETRY_S = 1.0
"""Seconds between tries without a free descriptor; a try may write the whole memtable."""

_LOG = logging.getLogger("magnetar.bookie.store")


class CheckpointScheduler:
    """Runs the checkpoints of one store; `on_room` is called when adds may be admitted again, and
    when a checkpoint found no descriptor free: what waits for one is refused."""

    def __init__(
        self, files: Files, journal: Journal, checkpoint: Checkpoint, room: Headroom, memtable: Memtable,
        descriptors: Descriptors, *, interval_s: float, journal_bytes: int, on_room: Callable[[], None],
    ) -> None:  # fmt: skip
        self._files = files
        self._journal = journal
        self._checkpoint = checkpoint
        self._room = room
        self._memtable = memtable
        self._descriptors = descriptors
        self._interval_s = interval_s
        self._journal_bytes_max = journal_bytes
        self._on_room = on_room
        self._source = Source(lambda: journal.position, journal.release, self._swapped)
        self._due = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._flushed_bytes = 0

    def start(self) -> None:
        guarded = disk.guarded(self._files, "checkpoints", self._run())
        self._task = asyncio.create_task(guarded, name="bookie-checkpoint")

    async def stop(self) -> None:
        """Waits for the checkpoint that is under way; none begins after it."""
        self._stopping.set()
        self._due.set()
        assert self._task is not None, "the keeper was not started"
        await self._task

    def look(self) -> None:
        """Begins a checkpoint if one is due; called after each sync."""
        if self._memtable.due or self._journal_bytes >= self._journal_bytes_max:
            self._due.set()

    @property
    def _journal_bytes(self) -> int:
        """Returns the bytes written to the journal since the last checkpoint began."""
        return self._journal.counters["synced_bytes"] - self._flushed_bytes

    def _swapped(self) -> None:
        """Handles the swap: the memtable has room again, and adds are admitted from the next turn of the event loop on.
        """
        asyncio.get_running_loop().call_soon(self._on_room)

    async def checkpoint(self) -> None:
        """Moves everything that is in memory now into the entry log. NoSpace when the disk is full."""
        try:
            await self.flush()
        except asyncio.CancelledError:
            self._on_room()  # what had begun has ended all the same
            raise
        self._on_room()

    async def flush(self) -> None:
        """Makes a checkpoint like `checkpoint`, without the call of `on_room`."""
        self._flushed_bytes = self._journal.counters["synced_bytes"]
        await self._room.flush(partial(self._checkpoint.run, self._source))

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._due.wait()
            except TimeoutError:
                if not (self._memtable.active.entries or self._memtable.flushing or self._descriptors.dirty):
                    continue
            self._due.clear()
            if self._stopping.is_set():
                return
            try:
                await self.checkpoint()
                self.look()  # a request that was longer than its room has filled memory again, and no sync follows
            except disk.NoDescriptor:
                self._due.set()
                self._on_room()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._stopping.wait()
            except disk.NoSpace as error:
                _LOG.error("no room for a checkpoint; adds will be refused: %s", error)
