"""The result of a start: what it has read and repaired before the store has a journal to write to, in steps 1 to 5 of
store/boot.py.

    workers = StoreWorkers.start(world.workers)
    loaded = await load(world, directory, uuid, config, known, workers)
    Store(world, directory, config, loaded, ports)        every part gets its dependencies in its constructor

`LoadedStore` does not change. All of it is durable: what was replayed is flushed, and the mark is at `end`.
Guarded by tests/bookie/test_boot.py.
"""

from __future__ import annotations

import msgspec

from ...proto.errors import InvalidConfiguration
from ...runtime.files import join_path
from ...runtime.network import World
from ...runtime.threads import Worker, Workers
from . import boot
from .checkpoint import Checkpoint, JournalPort
from .entrylog import at_boot as logs_at_boot
from .entrylog.writer import LogNumbers, LogWriter
from .headroom import DiskReserve
from .index import EntryLogIndex
from .index_files import LedgerDescriptors
from .journal.group_commit_core import WORKERS
from .journal.segments import JournalPosition
from .memtable import Memtable
from .reads import LANES
from .state_log import DataLossLog, DirectoryFacts

# -------------------------------------------------------------------------------------------------------- config
# The settings of a store: each with its unit, what it bounds, and what it costs.


class StoreConfig(msgspec.Struct, frozen=True):
    """Settings of a bookie's store."""

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
    """The worker threads of one store, one field for each kind of disk access."""

    journal: tuple[Worker, ...]
    flush: Worker
    read: Worker
    ahead: tuple[Worker, ...]
    compact: Worker

    @classmethod
    def start(cls, workers: Workers) -> StoreWorkers:
        return cls(
            tuple(workers.start(f"bookie-journal-{number}") for number in range(WORKERS)),
            workers.start("bookie-flush"),
            workers.start("bookie-read"),
            tuple(workers.start(f"bookie-ahead-{number}") for number in range(LANES)),
            workers.start("bookie-compact"),
        )

    async def close(self) -> None:
        """Ends the threads after the calls that are queued there."""
        for worker in (*self.journal, self.flush, self.read, self.compact, *self.ahead):
            await worker.close()


class LoadedStore(msgspec.Struct, frozen=True):
    """The parts of a store after its files are loaded; all of their content is durable."""

    workers: StoreWorkers
    losses: DataLossLog
    reserve: DiskReserve
    descriptors: LedgerDescriptors
    memtable: Memtable
    index: EntryLogIndex
    hot: LogWriter
    cold: LogWriter
    checkpoint: Checkpoint
    end: JournalPosition  # of the journals: the next one begins after it
    replayed_records: int
    torn_bytes: int


async def load(
    world: World, directory: str, uuid: bytes, config: StoreConfig, known: DirectoryFacts, workers: StoreWorkers
) -> LoadedStore:
    """Loads a store: does steps 1 to 5 of its start. Raises ForeignFile, NewerFormat or NoSpace."""
    files, entries = world.files, join_path(directory, boot.ENTRIES)
    losses = DataLossLog(files, directory)
    found = await workers.flush.run(boot.load_files, files, directory, uuid, losses)
    reserve = DiskReserve(files, directory, entries, config.reserve_bytes, config.log_bytes_max)
    await workers.flush.run(reserve.measure)
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
    numbers = LogNumbers(found.last_log)
    hot, cold = [
        LogWriter(
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
    end = await replay.run(files, join_path(directory, boot.JOURNAL), uuid, workers.journal[0], workers.read)
    logs_at_boot.log_missing_logs(found.gone, descriptors.tombstones)
    await boot.enter_limbo(workers.flush, losses, known, end, descriptors)
    if replay.records:
        # The flush and the mark come before a new journal file, whose header says that all before it is durable: what
        # was replayed may have been in the page cache alone, and a power loss would look like damage (§2.2).
        await checkpoint.run(JournalPort(lambda: end))
    return LoadedStore(
        workers, losses, reserve, descriptors, memtable, index, hot, cold, checkpoint, end, replay.records,
        replay.torn_bytes,
    )  # fmt: skip
