"""The result of a start: what it has read and repaired before the store has a journal to write to, in steps 1 to 5 of
store/boot.py.

    workers = StoreWorkers.start(world.workers)
    loaded = await load(world, directory, uuid, config, known, workers)
    Store(world, directory, config, loaded, ports)        every part gets its dependencies in its constructor

`Loaded` does not change. All of it is durable: what was replayed is flushed, and the mark is at `end`.
Guarded by tests/bookie/node/test_boot.py.
"""

from __future__ import annotations

import msgspec

from ...runtime.files import join
from ...runtime.workers import Worker, Workers
from ...runtime.world import World
from . import boot
from .checkpoint import Checkpoint, Source
from .config import StoreConfig
from .data_losses import DataLossLog, Known
from .entrylog import at_boot as logs_at_boot
from .entrylog.writer import LogNumbers, LogWriter
from .index.index import Index
from .journal.core.group_commit import WORKERS
from .journal.segments import JournalPosition
from .ledgers.descriptors import Descriptors
from .memtable import Memtable
from .reads.read_ahead import LANES
from .space.reserve import Reserve


class StoreWorkers(msgspec.Struct, frozen=True):
    """The threads of one store, by what they write or read."""

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
        """Ends the threads after the calls that are queued."""
        for worker in (*self.journal, self.flush, self.read, self.compact, *self.ahead):
            await worker.close()


class Loaded(msgspec.Struct, frozen=True):
    """The parts of a store after its start, all durable (module docstring)."""

    workers: StoreWorkers
    losses: DataLossLog
    reserve: Reserve
    descriptors: Descriptors
    memtable: Memtable
    index: Index
    hot: LogWriter
    cold: LogWriter
    checkpoint: Checkpoint
    end: JournalPosition  # of the journals: the next one begins after it
    replayed_records: int
    torn_bytes: int


async def load(
    world: World, directory: str, uuid: bytes, config: StoreConfig, known: Known, workers: StoreWorkers
) -> Loaded:
    """Raises ForeignFile, NewerFormat, NoSpace."""
    files, entries = world.files, join(directory, boot.ENTRIES)
    losses = DataLossLog(files, directory)
    found = await workers.flush.run(boot.inspect, files, directory, uuid, losses)
    reserve = Reserve(files, directory, entries, config.reserve_bytes, config.log_bytes_max)
    await workers.flush.run(reserve.look)
    descriptors, memtable, index = Descriptors(), Memtable(config.memtable_bytes), Index(config.index_cache_bytes)
    descriptors.load(found.loaded)
    for fact in found.facts:
        descriptors.state(fact)
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
    replay = boot.Replay(memtable, descriptors, checkpoint, losses)
    end = await replay.run(files, join(directory, boot.JOURNAL), uuid, workers.journal[0], workers.read)
    logs_at_boot.complain(found.gone, descriptors.tombstones)
    await boot.enter_limbo(workers.flush, losses, known, end, descriptors)
    if replay.records:
        # The flush and the mark come before a new journal file, whose header says that all before it is durable: what
        # was replayed may have been in the page cache alone, and a power loss would look like damage (§2.2).
        await checkpoint.run(Source(lambda: end))
    return Loaded(
        workers, losses, reserve, descriptors, memtable, index, hot, cold, checkpoint, end, replay.records,
        replay.torn_bytes,
    )  # fmt: skip
