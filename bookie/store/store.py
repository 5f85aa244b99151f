"""The store of one bookie: what it keeps, and the order in which adds, fences and reads meet.

**Synchronous intents**, answered after the next `seal_group`: `add_entry`, `fence`, `write_lac`. Each checks, changes
memory and enqueues its journal record in one step without an await (ledger protocol §1.5). So a fence sees every add
that was admitted before it, and every later add is refused. `seal_group(done)` calls `done(True)` when all of them are
synced.
**Reads**: `read_entries`, `read_from_memory`, `read_lac` (reads.py). **Keys** of ledgers: `keys` (index_files.py).

boot.py starts the store, `CheckpointScheduler` runs the checkpoints, `TombstoneWriter` (index_files.py) writes the
tombstones of deleted ledgers.

Bounds: two memtables, the journal's queue, the read cache, the index's cache. Past them adds are BUSY.

**The result of a start** (`LoadedStore`): what steps 1 to 5 of store/boot.py have read and repaired, before the store
has a journal to write to.

    workers = StoreWorkers.start(world.workers)
    loaded = await load_store(world, directory, uuid, config, known, workers)
    Store(world, directory, uuid, config, loaded, ports)  every part gets its dependencies in its constructor

`LoadedStore` does not change. All of it is durable: what was replayed is flushed, and the mark is at `end`.
Guarded by tests/bookie/test_boot.py.

Also in this file, below its heading: the settings of a store (config).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from ...ledger.peer_format import Status
from ...proto.errors import InvalidConfiguration
from ...runtime.descriptors import NO_DESCRIPTOR_ERRORS
from ...runtime.files import Files, join_path
from ...runtime.metrics import Histogram
from ...runtime.network import World
from ...runtime.tasks import Worker, Workers, run_to_end
from ..format.index import Extent, ExtentTable
from ..format.journal import RecordType, encode_adds
from . import boot, disk
from . import headroom as room
from .boot import JournalPlace
from .checkpoint import Checkpoint, CheckpointJournalPort
from .entrylog import files as log_files
from .entrylog import repair_at_start as logs_at_boot
from .entrylog.compaction import EntryLogCompactor
from .entrylog.writer import EntryLogWriter, LogNumberSequence
from .group_commit_core import JOURNAL_WORKERS
from .headroom import DiskHeadroom, DiskReserve
from .index import EntryLogIndex, ExtentLocation
from .index_files import LedgerDescriptor, LedgerDescriptors, LedgerKeys, TombstoneWriter
from .journal import Journal, OnDurable
from .memtable import EntryPieces, IntegerIntervals, Memtable
from .reads import (
    LANE_FILES_MAX,
    READ_AHEAD_LANES,
    LacResult,
    ReadAheadWorker,
    ReadResult,
    StoredEntryFinder,
    StoreReader,
)
from .replay import JournalPosition
from .state_log import DataLossLog, RecordedDirectoryState

# -------------------------------------------------------------------------------------------------------- config
# The settings of a store: each with its unit, what it bounds, and what it costs.


class StoreConfig(msgspec.Struct, frozen=True):
    """The settings of a bookie's store. The constructor raises InvalidConfiguration for values that cannot work
    together."""

    memtable_bytes: int = 64 << 20  # a checkpoint begins at this size; memory holds at most three times this
    checkpoint_interval_s: float = 600.0  # a checkpoint also after this long; each makes an extent per ledger touched
    journal_bytes: int = 64 << 20  # and after this much journal, which small records fill faster than the memtable
    journal_segment_bytes: int = 64 << 20  # a spare of this size is zero-filled in the background
    journal_first_segment_bytes: int = 4 << 20  # filled while the process starts: about 10 ms
    journal_block_bytes_max: int = 1 << 20  # a larger block delays its answers (0.5 ms for 1 MiB) and gains nothing
    journal_queue_bytes_max: int = 32 << 20  # of records not synced yet; past it adds are held, then BUSY
    journal_spares_max: int = 3  # recycled segments kept
    journal_direct: bool = True  # past the page cache where the file system does that; else a write and a sync
    log_bytes_max: int = 1 << 30  # an entry log is the unit of deletion
    log_allocate_bytes: int = 16 << 20  # entry logs grow in steps of this
    reserve_bytes: int = 64 << 20  # kept free for a full disk, at least; grows with the logs up to one log; at most 5 %
    log_files_open_max: int = 64  # file descriptors of the reader; reading ahead has 32 more
    index_cache_bytes: int = 16 << 20  # of extents and entry tables (8 bytes an entry); a miss is one more file read
    read_cache_bytes: int = 32 << 20  # of entries read ahead, half for single reads and half for ranges
    read_ahead_bytes: int = 256 << 10  # along the extent, when single entries are asked for
    read_chunk_bytes: int = 2 << 20  # after a range that was asked for; smaller with more readers than have room
    read_bytes_max: int = 4 << 20  # of one answer

    def __post_init__(self) -> None:
        if self.journal_first_segment_bytes > self.journal_segment_bytes:
            raise InvalidConfiguration("journal_first_segment_bytes is above journal_segment_bytes")
        if self.memtable_bytes + (8 << 20) >= self.log_bytes_max:
            raise InvalidConfiguration("log_bytes_max must hold a whole memtable and 8 MiB: a flush goes into one log")


# ------------------------------------------------------------------------------------------------------- loading


class StoreWorkers(msgspec.Struct, frozen=True):
    """The worker threads of one store. Each kind of disk access has its own: writes of the journal, checkpoints
    (`flush`), reads, reads ahead (`ahead`), and compaction."""

    journal: tuple[Worker, ...]
    flush: Worker
    read: Worker
    ahead: tuple[Worker, ...]
    compact: Worker

    @classmethod
    def start(cls, workers: Workers) -> StoreWorkers:
        """Starts the worker threads of a store and returns them. The caller must close them."""
        return cls(
            tuple(workers.start(f"bookie-journal-{number}") for number in range(JOURNAL_WORKERS)),
            workers.start("bookie-flush"),
            workers.start("bookie-read"),
            tuple(workers.start(f"bookie-ahead-{number}") for number in range(READ_AHEAD_LANES)),
            workers.start("bookie-compact"),
        )

    async def close(self) -> None:
        """Ends the worker threads when they have done the calls that are queued for them."""
        for worker in (*self.journal, self.flush, self.read, self.compact, *self.ahead):
            await worker.close()


class LoadedStore(msgspec.Struct, frozen=True):
    """The parts of a store after steps 1 to 5 of its start. Everything in them is durable. `hot` and `cold` write entry
    logs: for checkpoints, and for compaction. `replayed_records`: the records of the journal that were applied;
    `torn_bytes`: the bytes at its end that were ignored."""

    workers: StoreWorkers
    losses: DataLossLog
    reserve: DiskReserve
    descriptors: LedgerDescriptors
    memtable: Memtable
    index: EntryLogIndex
    hot: EntryLogWriter
    cold: EntryLogWriter
    checkpoint: Checkpoint
    end: JournalPosition  # of the journals: the next one begins after it
    replayed_records: int
    torn_bytes: int


async def load_store(
    world: World, directory: str, uuid: bytes, config: StoreConfig, known: RecordedDirectoryState,
    workers: StoreWorkers, journal: JournalPlace | None = None,
) -> LoadedStore:  # fmt: skip
    """Does steps 1 to 5 of the start of a store: reads and repairs its files and replays the journal. Returns the parts
    of the store. Raises ForeignFile, NewerFormat, NoSpace or OSError, and the errors of `known.upto`. The caller must
    close the workers."""
    files, entries = world.files, join_path(directory, boot.ENTRIES_FOLDER)
    journal = journal or JournalPlace.inside(directory, files)
    losses = DataLossLog(files, directory)
    found = await workers.flush.run(boot.load_store_files, files, directory, journal, uuid, losses)
    reserve = DiskReserve(files, directory, entries, config.reserve_bytes, config.log_bytes_max)
    await workers.flush.run(reserve.measure_size)
    descriptors, memtable, index = (
        LedgerDescriptors(),
        Memtable(config.memtable_bytes),
        EntryLogIndex(config.index_cache_bytes),
    )
    descriptors.load(found.loaded)
    for fact in found.facts:
        descriptors.add_fact(fact)
    for group in found.groups:
        index.add(group)
    numbers = LogNumberSequence(found.last_log)
    hot, cold = [
        EntryLogWriter(
            files, entries, uuid, numbers,
            log_bytes_max=config.log_bytes_max, allocate_bytes=config.log_allocate_bytes,
        )
        for _ in range(2)
    ]  # fmt: skip
    checkpoint = Checkpoint(
        world.clock, files, directory, uuid, workers.flush, (found.mark, found.marks_written),
        memtable, descriptors, numbers, hot, cold, index, found.ledgers,
    )  # fmt: skip
    replay = boot.JournalReplay(memtable, descriptors, checkpoint, losses)
    end = await replay.run(journal.files, journal.directory, uuid, workers.journal[0], workers.read)
    logs_at_boot.report_missing_logs(found.gone, descriptors.tombstones)
    await boot.enter_limbo(workers.flush, losses, known, end, descriptors)
    if replay.records:
        # The flush and the mark come before a new journal file, whose header says that all before it is durable: what
        # was replayed may have been in the page cache alone, and a power loss would look like damage (§2.2).
        await checkpoint.run(CheckpointJournalPort(lambda: end))
    return LoadedStore(
        workers, losses, reserve, descriptors, memtable, index, hot, cold, checkpoint, end, replay.records,
        replay.torn_bytes,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ checkpoint_scheduler
# The times of a running store's checkpoints: when the memtable becomes part of a log (the order is
# store/checkpoint.py's).
#
# One is due when the memtable's active half is full, when `journal_bytes` were written to the journal since the last
# one began, or after `interval_s` with something to write. On a full disk it logs an error and tries again at each
# interval; meanwhile memtable and journal fill up, and adds are BUSY. Without a free descriptor it tries again after
# CHECKPOINT_RETRY_S.
#
#     start() ; schedule_if_due()* after each sync ; checkpoint() at will ; stop() ; flush() for the last one
#
# Guarded by tests/bookie/store/test_checkpoint.py, tests/bookie/test_full_disk.py.


CHECKPOINT_RETRY_S = 1.0
"""Seconds to wait after a checkpoint that found no free file descriptor. Each attempt may write the whole memtable."""

_LOG = logging.getLogger("magnetar.bookie.store")


class CheckpointScheduler:
    """Makes the checkpoints of one store when they are due: when the memtable is full, after `journal_bytes` bytes of
    journal, and after `interval_s` seconds. Calls `on_room` after each one, when adds may be admitted again. Also calls
    it after a checkpoint that found no free file descriptor: adds that wait are then refused."""

    def __init__(
        self, files: Files, journal: Journal, checkpoint: Checkpoint, room: DiskHeadroom, memtable: Memtable,
        descriptors: LedgerDescriptors, *, interval_s: float, journal_bytes: int, on_room: Callable[[], None],
        on_failed: Callable[[], None] = lambda: None,
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
        self._on_failed = on_failed
        self._failed = False
        self._source = CheckpointJournalPort(lambda: journal.position, journal.release, self._swapped)
        self._due = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._flushed_bytes = 0

    def start(self) -> None:
        """Starts the task that makes checkpoints when they are due. If the task fails, the process ends."""
        guarded = disk.run_or_end_process(self._files, "checkpoints", self._run())
        self._task = asyncio.create_task(guarded, name="bookie-checkpoint")
        self._task.add_done_callback(self._on_task_ended)

    def _on_task_ended(self, task: asyncio.Task[None]) -> None:
        """Only the failure of one directory of several ends the task and not the process: tells the owner of it."""
        if not task.cancelled() and task.exception() is not None and isinstance(self._files, disk.IsolatedFiles):
            self._failed = True
            self._on_failed()

    async def stop(self) -> None:
        """Stops making checkpoints, and waits until the running one has ended. `flush` may still be called."""
        self._stopping.set()
        self._due.set()
        assert self._task is not None, "the keeper was not started"
        try:
            await self._task
        except OSError:
            if not self._failed:
                raise

    def schedule_if_due(self) -> None:
        """Makes the background task begin a checkpoint if one is due. Must be called after each sync of the journal."""
        if self._memtable.is_flush_due or self._journal_bytes >= self._journal_bytes_max:
            self._due.set()

    @property
    def _journal_bytes(self) -> int:
        """Returns the bytes written to the journal since the last checkpoint began."""
        return self._journal.counters["synced_bytes"] - self._flushed_bytes

    def _swapped(self) -> None:
        """Called when the tables of the memtable were swapped: calls `on_room` in the next turn of the event loop."""
        asyncio.get_running_loop().call_soon(self._on_room)

    async def checkpoint(self) -> None:
        """Makes a checkpoint: writes all entries that are in memory now to the entry log, then calls `on_room`. Raises
        NoSpace if the disk is full, NoFileDescriptor if no file descriptor is free; then the entries stay in memory."""
        try:
            await self.flush()
        except asyncio.CancelledError:
            self._on_room()  # what had begun has ended all the same
            raise
        self._on_room()

    async def flush(self) -> None:
        """Makes a checkpoint like `checkpoint`, with the same errors NoSpace and NoFileDescriptor, but does not call
        `on_room` afterwards."""
        self._flushed_bytes = self._journal.counters["synced_bytes"]
        await self._room.flush(partial(self._checkpoint.run, self._source))

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._due.wait()
            except TimeoutError:
                if not (
                    self._memtable.active.entries or self._memtable.flushing or self._descriptors.has_unwritten_changes
                ):
                    continue
            self._due.clear()
            if self._stopping.is_set():
                return
            try:
                await self.checkpoint()
                # a request that was longer than its room has filled memory again, and no sync follows
                self.schedule_if_due()
            except disk.NoFileDescriptor:
                self._due.set()
                self._on_room()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECKPOINT_RETRY_S):
                        await self._stopping.wait()
            except disk.NoSpace as error:
                _LOG.error("no room for a checkpoint; adds will be refused: %s", error)


# --------------------------------------------------------------------------------------------------------- store


__all__ = ["Store", "StoreCallbacks", "StoreConfig"]


class StoreCallbacks(msgspec.Struct, frozen=True):
    """Functions that the store calls to tell its owner of events. None of them is called before `Store.open`
    returns."""

    on_room: Callable[[], None] = lambda: None  # an add may be admitted again
    on_no_space: Callable[[], None] = lambda: None  # a write found a full disk
    on_bad: Callable[[], None] = lambda: None  # compaction found damage, and quarantined it
    on_failed: Callable[[], None] = lambda: None  # the disk of a directory of several has failed


class Store:
    """The store of a bookie's data directory: its journal, memtable, entry logs and ledger index. Made by `Store.open`.
    The caller must have locked the directory (bookie/store/identity.py)."""

    def __init__(
        self, world: World, directory: str, uuid: bytes, config: StoreConfig, loaded: LoadedStore,
        ports: StoreCallbacks, journal: JournalPlace | None = None,
    ) -> None:  # fmt: skip
        files, entries, workers = world.files, join_path(directory, boot.ENTRIES_FOLDER), loaded.workers
        journal = journal or JournalPlace.inside(directory, files)
        self.directory = directory
        self._isolated = files if isinstance(files, disk.IsolatedFiles) else None
        self._workers = workers
        self._losses = loaded.losses
        self._log, self._cold = loaded.hot, loaded.cold
        self._checkpoint = loaded.checkpoint
        self._flush_worker = workers.flush
        self.descriptors = loaded.descriptors
        self.memtable = loaded.memtable
        self.index = loaded.index
        self._fencing: dict[int, LedgerDescriptor] = {}  # whose fence goes out with the next seal
        self._fenced: set[int] = set()  # ledgers whose fence is on its way to the disk
        self._lacs: dict[int, int] = {}  # explicit LACs that go out with the next seal
        self._adding: list[tuple[int, Sequence[tuple[int, EntryPieces, int]]]] = []  # ledger and entries, likewise
        self.dropping: set[int] = set()
        """Ledgers whose copies a running compaction may remove (bookie/maintenance/garbage.py): no add is admitted to
        them, and nothing of them is held."""
        self._ending: asyncio.Task[None] | None = None
        self.counters = {
            "adds": 0, "add_bytes": 0, "fences": 0, "replayed_records": loaded.replayed_records,
            "torn_bytes": loaded.torn_bytes,
        }  # fmt: skip
        reader = log_files.EntryLogReader(files, entries, config.log_files_open_max)
        lanes = [
            ReadAheadWorker(log_files.EntryLogReader(files, entries, LANE_FILES_MAX), worker)
            for worker in workers.ahead
        ]
        self._reads = StoreReader(
            self.descriptors, self.memtable, self.index, reader, workers.read, lanes,
            cache_bytes=config.read_cache_bytes, read_ahead_bytes=config.read_ahead_bytes,
            chunk_bytes=config.read_chunk_bytes, read_bytes_max=config.read_bytes_max,
        )  # fmt: skip
        self._held = StoredEntryFinder(
            self.descriptors, self.memtable, self.index, reader, workers.read, self.seal_group_and_wait, self.dropping
        )
        self._journal = Journal(
            replace(world, files=journal.files), journal.directory, uuid, workers.journal, workers.flush,
            segment_bytes=config.journal_segment_bytes, first_segment_bytes=config.journal_first_segment_bytes,
            block_bytes_max=config.journal_block_bytes_max, queue_bytes_max=config.journal_queue_bytes_max,
            spares_max=config.journal_spares_max, direct=config.journal_direct,
        )  # fmt: skip
        self.keys = LedgerKeys(self.descriptors, self._journal)
        self.room = DiskHeadroom(
            files, directory, workers.flush, loaded.reserve, self._journal, self.checkpoint, ports.on_no_space
        )  # fmt: skip
        self._keeper = CheckpointScheduler(
            files, self._journal, self._checkpoint, self.room, self.memtable, self.descriptors,
            interval_s=config.checkpoint_interval_s, journal_bytes=config.journal_bytes, on_room=ports.on_room,
            on_failed=ports.on_failed,
        )  # fmt: skip
        self._tombstones = TombstoneWriter(
            self._journal, self.descriptors, self.memtable, self.seal_group_and_wait, self.checkpoint
        )
        self.compactor = EntryLogCompactor(
            files, world.clock, entries, uuid, workers=(workers.compact, workers.flush),
            checkpoint=self._checkpoint, hot=self._log, cold=self._cold, descriptors=self.descriptors,
            dropping=self.dropping, log_bytes_max=config.log_bytes_max,
            settle=self._tombstones.write_pending_tombstones,
            with_room=self.room.run_and_retry_with_reserve,
            forget=self._reads.close_log, on_bad=ports.on_bad,
        )  # fmt: skip

    @property
    def failure(self) -> str | None:
        """Why the disk of the directory failed, as a text; None: it did not, or its failure ends the process. A store
        that failed takes no adds, and writes nothing more but its journal."""
        return None if self._isolated is None else self._isolated.failure

    def note_disk_error(self, error: OSError) -> None:
        """Called when the disk of the directory could not even be measured: one of several disks has failed then."""
        if self._isolated is not None and error.errno not in NO_DESCRIPTOR_ERRORS:
            self._isolated.end_process(f"{self.directory}: {error}")

    # ------------------------------------------------------------------------------------ life
    @classmethod
    async def open(
        cls, world: World, directory: str, uuid: bytes, config: StoreConfig | None = None,
        known: RecordedDirectoryState | None = None,
        ports: StoreCallbacks | None = None, journal: JournalPlace | None = None,
    ) -> Store:  # fmt: skip
        """Starts the store of a data directory (store/boot.py) and returns it, ready for reads and adds. `known`: what
        cookie and metadata say of the directory; `ports`: the functions that the store calls; `journal`: where its
        journal is (None: in the directory). On a full disk frees the disk reserve and begins again. Raises ForeignFile,
        NewerFormat, NoSpace or OSError, and the errors of `known.upto`."""
        config, known, ports = config or StoreConfig(), known or RecordedDirectoryState(), ports or StoreCallbacks()
        workers = StoreWorkers.start(world.workers)
        try:
            loaded = await load_store(world, directory, uuid, config, known, workers, journal)
            store = cls(world, directory, uuid, config, loaded, ports, journal)
            await store._start_journal(loaded.end)
        except BaseException as error:
            await run_to_end(workers.close())  # nothing is written any more when this returns: the lock may go
            if not isinstance(error, disk.NoSpace) or isinstance(error, disk.NoFileDescriptor):
                raise
            _LOG.warning("the disk is full at the start: %s", error)
            place = journal or JournalPlace.inside(directory, world.files)
            if not room.release_reserve_for_start(world.files, directory, place, uuid):
                raise
            return await cls.open(world, directory, uuid, config, known, ports, journal)
        return store

    async def _start_journal(self, end: JournalPosition) -> None:
        """Takes steps 6 and 7 of the start: a journal after `end`, and a mark that names it."""
        await self._journal.start(end)
        # From now on the mark names a journal that must be there.
        await self._checkpoint.run(CheckpointJournalPort(lambda: self._journal.position, self._journal.release))
        in_limbo = self.descriptors.limbo_upto >= 0
        await self._flush_worker.run(self._losses.mark_limbo_durable if in_limbo else self._losses.delete_log)
        self._keeper.start()

    async def close(self) -> None:
        """Closes the store: writes the journal, makes a last checkpoint so that the next start need not replay, and
        closes the files.

        The close completes even if the caller is cancelled; a second caller waits until the first close has ended."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._shut_down(), name="bookie-store-close")
        await run_to_end(self._ending)

    async def _shut_down(self) -> None:
        await self._keeper.stop()
        await self._journal.seal_with_future()
        try:
            await self._keeper.flush()
        except disk.NoSpace as error:
            _LOG.warning("no room, so no last checkpoint: the journal keeps the entries: %s", error)
        except OSError as error:
            self._raise_unless_failed(error)
        await self._journal.close()
        for log in (self._log, self._cold):
            try:
                await self._flush_worker.run(log.close)
            except OSError as error:
                self._raise_unless_failed(error)
        await self._reads.close()
        await self._workers.close()

    def _raise_unless_failed(self, error: OSError) -> None:
        """Raises `error` again, unless the directory has failed: then the journal keeps what is not in its logs."""
        if self.failure is None:
            raise error
        _LOG.warning("not written, the directory %s has failed: %s", self.directory, error)

    # ------------------------------------------------------------------------------------ intents
    def add_entry(
        self, ledger: int, entry: int, key: bytes, stored: EntryPieces, size: int, lac: int, recovery: bool
    ) -> Status:
        """Adds one entry to a ledger. Parameters and result as in `add_entries`."""
        return self.add_entries(ledger, key, ((entry, stored, size),), size, lac, recovery)

    def add_entries(
        self,
        ledger: int,
        key: bytes,
        entries: Sequence[tuple[int, EntryPieces, int]],
        size: int,
        lac: int,
        recovery: bool,
    ) -> Status:
        """Adds entries to a ledger. Returns OK if all of them are admitted; they are durable when the next `seal_group`
        is done. Any other status says why none of them is admitted:

        NO_SUCH_LEDGER: the ledger is unknown here, and its key must be read from the metadata first. UNAUTHORIZED: the
        ledger has another key. FENCED: the ledger is deleted, or is fenced and `recovery` is False. BUSY: memory or the
        journal's queue is full. READ_ONLY: the disk of the directory has failed, or the ledger is in
        `dropping`.

        `entries` are (entry id, stored entry, size in bytes), verified by the caller; `size` is the sum of the sizes,
        `lac` the largest last-add-confirmed (LAC) among them. The bounds are checked once, so one request may exceed
        them."""
        if (self._isolated is not None and self._isolated.failure is not None) or ledger in self.dropping:
            return Status.READ_ONLY
        dirty, memtable, journal = self.descriptors.dirty_ledgers, self.memtable, self._journal
        descriptor = dirty.get(ledger) or self.descriptors.get(ledger)
        if descriptor is None:
            if ledger in self.descriptors.tombstones:
                return Status.FENCED
            if not self.keys.may_begin_unknown_ledger(ledger, key):
                return Status.NO_SUCH_LEDGER
        elif not hmac.compare_digest(descriptor.key, key):
            return Status.UNAUTHORIZED
        elif descriptor.fenced and not recovery:
            return Status.FENCED
        if ledger <= self.descriptors.fenced_upto and not recovery:
            return Status.FENCED  # this bookie lost data when the ledger existed: its fence may be among it
        group = journal.open
        if (memtable.active.size_bytes >= memtable.bytes_max and memtable.is_full) or (
            group.size + journal.core.queued_bytes >= journal.queue_bytes_max  # as `journal.full`, a call less
        ):
            return Status.BUSY
        if descriptor is None or not descriptor.key_synced:
            descriptor = self.keys.ensure_descriptor(ledger, key)
        last = memtable.insert_entries(ledger, entries, size)
        group.size += encode_adds(ledger, entries, group.headers, group.buffers)
        self._adding.append((ledger, entries))
        if lac > descriptor.lac:
            descriptor.lac = lac
        if last > descriptor.last:
            descriptor.last = last
        dirty[ledger] = descriptor
        self.counters["adds"] += len(entries)
        self.counters["add_bytes"] += size
        return Status.OK

    def fence(self, ledger: int, key: bytes) -> Status:
        """Fences a ledger, so that only recoveries can add entries to it. Returns OK if it is fenced in memory. The
        caller must answer nothing, not even an error, before the next `seal_group` is done (§1.9).

        A ledger that is unknown here is created, fenced. A deleted ledger stays deleted, and no add to it is ever
        admitted. While a fence is being written, further calls write no second record; `is_fence_durable` then says
        whether the fence is durable.

        Returns NO_SUCH_LEDGER, and changes nothing, if the ledger is unknown and its key must be read from the metadata
        first (`LedgerKeys.may_begin_unknown_ledger`). No client gets this status as the answer to a fence: the service
        reads the metadata (bookie/service.py), then fences the ledger or refuses the request, which is no vote."""
        status = self.keys.judge_add_key(ledger, key)
        if status is not Status.OK:
            return Status.OK if status is Status.FENCED else status
        descriptor = self.keys.ensure_descriptor(ledger, key)
        if not descriptor.fence_synced and ledger not in self._fencing and ledger not in self._fenced:
            descriptor.fenced = True
            self._journal.enqueue_record(RecordType.FENCE, ledger, -1)
            self._fencing[ledger] = descriptor
            self.descriptors.mark_changed(descriptor)
            self.counters["fences"] += 1
        return Status.OK

    def is_fenced(self, ledger: int, key: bytes) -> bool:
        """Returns whether the ledger has this key and is fenced, both durably. Then `fence` would have nothing to
        write."""
        descriptor = self.descriptors.get(ledger)
        return (
            descriptor is not None and descriptor.fence_synced and descriptor.key_synced and descriptor.has_key(key)
        )

    def is_fence_durable(self, ledger: int) -> bool:
        """Returns whether the fence of the ledger is durable, or the ledger is deleted. Must be called when the seal
        after `fence` is done."""
        descriptor = self.descriptors.get(ledger)
        return ledger in self.descriptors.tombstones if descriptor is None else descriptor.fence_synced

    def write_lac(self, ledger: int, key: bytes, lac: int) -> Status:
        """Sets the last-add-confirmed (LAC) of a ledger, if `lac` is larger than the present one. Returns OK if that is
        done in memory; it is durable when the next `seal_group` is done. Any other status is one of
        `LedgerKeys.judge_add_key`; then nothing changed. If a ledger gets several LACs before a seal, only the largest
        is written."""
        status = self.keys.judge_add_key(ledger, key)
        if status is not Status.OK:
            return status
        descriptor = self.keys.ensure_descriptor(ledger, key)
        descriptor.lac = max(descriptor.lac, lac)
        self._lacs[ledger] = max(self._lacs.get(ledger, -1), lac)
        self.descriptors.mark_changed(descriptor)
        return Status.OK

    # ------------------------------------------------------------------------------------ what was lost
    def end_quarantine(self, ledger: int, first: int, count: int) -> None:
        """Ends the quarantine of `count` entries from `first` on. The caller must have read and verified good copies of
        them here."""
        for entry in range(first, first + count):
            if self.descriptors.is_quarantined(ledger, entry):
                self.descriptors.end_quarantine(ledger, entry, entry)

    async def leave_limbo(self) -> None:
        """Ends the bookie's limbo, because all lost data was restored or given up. This is durable when the call
        returns. Raises NoSpace, or its subclass NoFileDescriptor: then limbo continues. After a crash the list of
        losses may be there once more; the next start deletes it."""
        upto = self.descriptors.limbo_upto
        self.descriptors.leave_limbo()
        try:
            await self.checkpoint()
        except disk.NoSpace:
            self.descriptors.enter_limbo(upto)
            raise
        try:
            await self._flush_worker.run(self._losses.delete_log)
        except disk.NoFileDescriptor as error:  # limbo has ended, and the list says nothing any more
            _LOG.warning("the end of limbo is durable, the deletion of its list of losses may be not: %s", error)

    @property
    def limbo_losses(self) -> Sequence[str]:
        """Returns the data losses because of which the store is in limbo, as texts; none if it is not in limbo."""
        return self._losses.reasons

    def seal_group(self, done: OnDurable) -> None:
        """Writes all adds, fences and LACs since the last seal to the journal, as one group. Calls `done(True)` when
        they are durable, `done(False)` if the disk had no room for them.

        `done` does not report that an earlier group was refused; `wait_durable` does. When `done` is called, the store
        has recorded the outcome already."""
        for ledger, lac in self._lacs.items():
            self._journal.enqueue_record(RecordType.LAC, ledger, lac)
        self._lacs.clear()
        fencing, self._fencing = self._fencing, {}
        adding, self._adding = self._adding, []
        self._fenced |= fencing.keys()
        self._journal.seal_group(partial(self._sealed, fencing, self.keys.take_enqueued_keys(), adding), done)

    def _sealed(
        self, fencing: dict[int, LedgerDescriptor], keying: dict[int, LedgerDescriptor],
        adding: list[tuple[int, Sequence[tuple[int, EntryPieces, int]]]], ok: bool,
    ) -> None:  # fmt: skip
        """Called when the journal is done with a group of these fences, keys and entries. `ok`: they are durable;
        False: the disk had no room for them."""
        self._fenced -= fencing.keys()
        for descriptor in fencing.values():
            descriptor.fence_synced = descriptor.fence_synced or ok
        for descriptor in keying.values():
            descriptor.key_synced = descriptor.key_synced or ok
        if not ok or self.memtable.has_refused_entries:
            account = self.memtable.mark_durable if ok else self.memtable.mark_refused_by_journal
            for ledger, entries in adding:
                account(ledger, [entry for entry, _, _ in entries])
        self._keeper.schedule_if_due()
        if not ok:
            self.room.on_no_space()

    async def seal_group_and_wait(self) -> bool:
        """Writes all adds, fences and LACs since the last seal, like `seal_group`, and waits for the outcome. Returns
        True if they are durable, False if the disk had no room for them."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.seal_group(lambda ok: None if future.done() else future.set_result(ok))
        return await future

    async def wait_durable(self, ledger: int) -> bool:
        """Waits until the journal has written everything that was enqueued. Returns whether all entries of the ledger
        that can be read now are durable. False: the disk had no room for some; a checkpoint, or adding these entries
        again, makes them durable."""
        return await self.seal_group_and_wait() and not self.memtable.refused_runs_of_ledger(ledger)

    # ------------------------------------------------------------------------------------ reads
    def read_lac(self, ledger: int) -> LacResult:
        """Returns the ledger's last-add-confirmed (LAC), as `StoreReader.read_lac` does."""
        return self._reads.read_lac(ledger)

    def read_from_memory(self, ledger: int, entry: int, count: int, bytes_max: int) -> ReadResult | None:
        """Reads entries like `read_entries` if that needs no disk access. Returns None if it does."""
        return self._reads.read_from_memory(ledger, entry, count, bytes_max)

    async def read_entries(self, ledger: int, entry: int, count: int = 1, bytes_max: int = 0) -> ReadResult:
        """Reads the consecutive entries `entry`, `entry + 1`, …: at least one, at most `count`, of about `bytes_max`
        bytes together. If the first of them cannot be returned, the result has no entries, and its status says why
        (`StoreReader.read_entries`)."""
        return await self._reads.read_entries(ledger, entry, count, bytes_max)

    async def verify_entry(self, ledger: int, entry: int) -> Status:
        """Reads an entry from the entry logs, bypassing memory and caches. Returns OK if a log has a good copy;
        otherwise a status as in `StoreReader.verify_entry`. Raises OSError if no file descriptor is free."""
        return await self._reads.verify_entry(ledger, entry)

    async def find_stored_entries(self, ledger: int, first: int, last: int) -> IntegerIntervals:
        """Returns which of the entries `first … last` of the ledger are durable here, by memory and the index. Does not
        read the entries. Special cases are those of `StoredEntryFinder.find_stored_entries`."""
        return await self._held.find_stored_entries(ledger, first, last)

    async def read_extent_from_disk(
        self, log_number: int, extent: Extent
    ) -> tuple[ExtentLocation, ExtentTable | None] | None:
        """Returns (location of the extent in log `log_number`, the extent's table as it is on the disk, or None if the
        table is damaged). Returns None if the index does not have this extent. Raises OSError if no file descriptor is
        free."""
        return await self._reads.read_extent_from_disk(log_number, extent)

    def committed_index_end(self, log_number: int) -> int | None:
        """Returns the committed end of the log's index file, in bytes. Returns None if the log is not being written:
        then the whole file counts."""
        opened = {
            each.committed_ends_of_open_log.number: each.committed_ends_of_open_log.index_end
            for each in (self._log, self._cold)
        }
        return opened.get(log_number)

    # ------------------------------------------------------------------------------------ keeping
    async def checkpoint(self) -> None:
        """Makes a checkpoint: writes all entries that are in memory now to the entry log. Raises NoSpace if the disk is
        full or no file descriptor is free; then the entries stay in memory."""
        await self._keeper.checkpoint()

    @property
    def journal_position(self) -> JournalPosition:
        """Returns the position up to which the journal is synced."""
        return self._journal.position

    @property
    def has_room(self) -> bool:
        """Returns whether the store can admit an add now, or refuses it for good. If not, an add gets BUSY."""
        return self.failure is not None or not (self.memtable.is_full or self._journal.is_full)

    @property
    def is_journal_full(self) -> bool:
        """Returns whether the journal accepts no further records, because too many are not synced yet."""
        return self._journal.is_full

    @property
    def is_flush_blocked(self) -> bool:
        """Returns whether the last checkpoint found the disk full."""
        return self.room.flush_blocked

    @property
    def is_short_of_descriptors(self) -> bool:
        """Returns whether the last checkpoint found no free file descriptor."""
        return self.room.without_descriptor

    async def delete_ledgers(self, ledgers: list[int]) -> bool:
        """Writes tombstones, which record that these ledgers are deleted. Returns True if the tombstones are durable:
        only then may the data of these ledgers be deleted (§2.6). Returns False if the journal had no room; then some
        of the ledgers may have no tombstone, and the caller must call this again."""
        return await self._tombstones.write(ledgers)

    async def record_dropped_copies(self) -> None:
        """Records durably that copies of the ledgers in `dropping` were dropped here, so that a miss of one of their
        entries is UNKNOWN from now on, also after a restart: only then may their entries be removed. Their keys and
        fences stay. Raises NoSpace: then the ledgers must leave `dropping`."""
        found = [each for ledger in sorted(self.dropping) if (each := self.descriptors.get(ledger)) is not None]
        for descriptor in found:
            if not descriptor.dropped:
                descriptor.dropped = True
                self.descriptors.mark_changed(descriptor)
        await self.checkpoint()

    # ------------------------------------------------------------------------------------ what it holds
    def check(self) -> None:
        """Checks the invariants of the parts that are in memory. Raises AssertionError if one is broken."""
        self.descriptors.check()
        self.memtable.check()
        self.index.check()
        self._reads.check()

    def histograms(self) -> dict[str, Histogram]:
        return {
            **{f"journal_{name}": histogram for name, histogram in self._journal.histograms.items()},
            "checkpoint_seconds": self._checkpoint.seconds,
            "compaction_seconds": self.compactor.seconds,
            "compaction_bytes": self.compactor.bytes,
        }

    def statistics(self) -> dict[str, int]:
        return {
            **self.counters,
            **self._tombstones.counters,
            **{f"journal_{name}": value for name, value in self._journal.statistics.items()},
            **self._checkpoint.counters,
            **self.compactor.counters,
            **self.index.statistics(),
            **self._reads.statistics(),
            "memtable_bytes": self.memtable.size_bytes,
            "ledgers": len(self.descriptors),
            "tombstones": len(self.descriptors.tombstones),
            "quarantined": len(self.descriptors.quarantined()),
            "limbo": int(self.descriptors.limbo_upto >= 0),
        }
