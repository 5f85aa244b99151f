"""The checkpoint: moves what the memtable holds into the entry log, so that journals can go (ledger protocol §2.4).

`CHECKPOINT_STEPS` is the order. What a crash after each step leaves:

    capture_position   nothing. The position of the last synced block, taken BEFORE the swap: all entries up to it are
                       in the tables already, because inserts precede enqueueing
    swap_memtable      nothing; new adds go to the other table
    write_entries      bytes after the log's marked end: cut at the next start
    write_index        the same for the index file; synced after its log
    write_ledgers      the same for keys, fences, LACs and facts; also when there are no entries (#4843)
    write_mark         the commit point: the new mark counts, and the next start replays from it. Temporary file, sync,
                       rename, directory sync; refuses to go backwards (#4740)
    publish            nothing, it is memory: in one synchronous step the extents enter the index and the flushed table
                       leaves the memtable
    release_journals   journals before the mark that are not recycled yet; a later checkpoint recycles them

A full disk ends the run with NoSpace before the mark; the flushing table stays readable and the next run repeats it.
Any failed sync ends the process. Guarded by tests/bookie/store/test_checkpoint.py.

`commit` writes the mark too: it commits what compaction moved (entrylog/compaction.py), or the removal of logs. It
shares steps with a checkpoint and runs under the same lock. It does not change the journal's position, and writes only
its own facts, which must not become durable with any other mark. Logs are begun and closed under this lock too
(`run_between_checkpoints`), because every mark names both open logs and the last number.

**A run that began goes to its end**, also when its caller is cancelled (`run_to_end`). Once the mark is durable, memory
must agree with it; else the next append to the ledger index, a log or its index overwrites what the mark names. If a
run is cut off all the same, because all tasks of the loop are cancelled, nothing more is written.
Guarded by the stops of the crash states (tests/crashes/stops.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...runtime.clock import Clock
from ...runtime.files import Files
from ...runtime.metrics import DURATION_BOUNDS, Histogram
from ...runtime.tasks import Worker, run_to_end
from ..format import mark as mark_format
from ..format.mark import CheckpointMark
from . import disk
from .entrylog.writer import EntryLogWriter, LogNumberSequence, MemtableFlush, WrittenEntries
from .index import EntryLogIndex
from .index_files import LedgerDescriptors, LedgerIndexContent, LedgerIndexFile
from .memtable import ENTRIES_RELEASED_PER_SLICE, Memtable, clear_in_steps
from .replay import JournalPosition
from .state_log import StateLogFact

MARK_FILE = "mark"
LAGGING_SLICES_PER_TURN = 8
"""How many slices a lagging flush writes before each turn of the event loop. Under load a turn takes milliseconds: with
one slice for each turn a flush writes 150 to 250 MB/s, even if the disk is faster."""


class CheckpointJournalPort(NamedTuple):
    """The functions of the journal and of the store's owner that a checkpoint calls. `position` returns the position up
    to which the journal is synced. `release` recycles the journals before a position, and must run in a worker, and may
    raise OSError. `swapped` is called when the memtable has room again."""

    position: Callable[[], JournalPosition]
    release: Callable[[JournalPosition], None] = lambda position: None
    swapped: Callable[[], None] = lambda: None


class Checkpoint:
    """Makes the checkpoints of a store, which move entries from the memtable to an entry log. Also commits the results
    of compactions. Does one of these at a time. `mark` is the durable checkpoint mark. The methods that are steps are
    called in the order of CHECKPOINT_STEPS only; a step that writes raises NoSpace if the disk is full."""

    def __init__(
        self,
        clock: Clock,
        files: Files,
        directory: str,
        uuid: bytes,
        worker: Worker,
        mark: tuple[CheckpointMark, int],
        memtable: Memtable,
        descriptors: LedgerDescriptors,
        numbers: LogNumberSequence,
        hot: EntryLogWriter,
        cold: EntryLogWriter,
        index: EntryLogIndex,
        ledgers: LedgerIndexFile,
    ) -> None:
        self._clock = clock
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self._worker = self.writer = worker
        """`_worker` does the disk work of a checkpoint. `writer` writes the slices of a flush: the same worker, except
        during a start, when another one writes while this one encodes the next slices."""
        self.mark, self._count = mark
        self._memtable = memtable
        self._descriptors = descriptors
        self._numbers = numbers
        self._hot = hot
        self._cold = cold
        self._index = index
        self._ledgers = ledgers
        self._lock = asyncio.Lock()
        self._whole = True  # no run was cut off
        self._source = CheckpointJournalPort(lambda: JournalPosition(*self.mark.position))  # of the last run
        self._captured: JournalPosition | None = None
        self._settled: LedgerIndexContent | None = None
        self._release: tuple[dict[int, Any], ...] = ()
        self._next = self.mark
        self._flush: MemtableFlush | None = None
        self._written: WrittenEntries | None = None
        self.counters = {"checkpoints": 0, "flushed_entries": 0, "flushed_bytes": 0}
        self.seconds = Histogram((*DURATION_BOUNDS, 60.0))  # of each checkpoint that was done

    async def run(self, source: CheckpointJournalPort) -> None:
        """Makes one checkpoint by `CHECKPOINT_STEPS`, when no other checkpoint or commit runs. Goes to its end even if
        the caller is cancelled. Raises NoSpace if the disk is full, or its subclass NoFileDescriptor if no file
        descriptor is free; the next call then repeats what is missing. `source` has the functions of the journal."""
        await self._alone(partial(self._steps, source))

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work` while no other checkpoint or commit runs. The work goes to its end even if the caller is
        cancelled."""
        async with self._lock:
            assert self._whole, "a checkpoint was cut off: what is in memory is not what the mark says"
            self._whole = False
            await run_to_end(self._noted(work))

    async def _noted(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work`. If it is cut off, records that memory and the mark may differ, so that nothing more is
        written."""
        try:
            await work()
        except Exception:
            self._whole = True
            raise
        self._whole = True

    async def _steps(self, source: CheckpointJournalPort) -> None:
        began = self._clock.monotonic()
        self._source = source
        for step in CHECKPOINT_STEPS:
            if (work := step(self)) is not None:
                await work
        self.seconds.observe_value(self._clock.monotonic() - began)

    def capture_position(self) -> None:
        """Step: remembers up to which position the journal is synced. Keeps the position of a run that failed."""
        if self._captured is None:
            self._captured = self._source.position()

    def swap_memtable(self) -> None:
        """Step: swaps the two tables of the memtable, so that the full one can be flushed. If the last run failed
        before its table was flushed, keeps that table instead."""
        if self._memtable.flushing is None:
            self._descriptors.end_quarantine_of_flushed_entries(self._memtable.swap_table().ledgers)
            self._source.swapped()
        self._descriptors.begin_checkpoint()

    async def write_entries(self) -> None:
        """Step: writes and syncs the entries of the flushing table to the hot log. Raises NoSpace or
        NoFileDescriptor."""
        table = self._memtable.flushing
        assert table is not None
        self._flush = None
        if not table.ledgers:
            return
        flush = MemtableFlush(self._hot, table)
        await self._worker.run(flush.start)
        written: asyncio.Future[None] | None = None
        while slices := await self._worker.run(flush.take_next_slices, self._at_once(flush)):
            if written is not None:
                await written
            written = self.writer.run(self._hot.append_slices, slices)
        if written is not None:
            await written
        self._flush = flush

    def _at_once(self, flush: MemtableFlush) -> int:
        """Returns how many slices the worker writes before it waits for a turn of the event loop.

        The number is 1, so that adds get the disk and the interpreter in between. It is larger while the other table
        fills faster than this one is written, because adds must wait when that table is full."""
        filled = self._memtable.active.size_bytes / self._memtable.bytes_max
        return LAGGING_SLICES_PER_TURN if filled > flush.flushed_share else 1

    async def write_index(self) -> None:
        """Step: writes and syncs the index group of these entries, and sets the ends of the logs for the next mark.
        Raises NoSpace or NoFileDescriptor."""
        self._written = None
        if self._flush is not None:
            self._written = await self._worker.run(self._flush.write_index)
        hot = self._hot.committed_ends_of_open_log if self._written is None else self._written.open
        self._next = self.mark.with_open_logs(hot, self._cold.committed_ends_of_open_log, self._numbers.last)

    async def write_ledgers(self) -> None:
        """Step: writes and syncs the changed descriptors and facts to the ledger index. Raises NoSpace or
        NoFileDescriptor."""
        unwritten = self._descriptors.pending_changes()
        self._settled, generation, end = await self._worker.run(self._ledgers.write, unwritten)
        self._next = self._next._replace(ledgers_generation=generation, ledgers_end=end)

    async def write_mark(self) -> None:
        """Step: makes the new mark durable. This commits the checkpoint. Raises NoSpace or NoFileDescriptor."""
        assert self._captured is not None
        await self._replace_mark(self._next._replace(journal=self._captured.journal, offset=self._captured.offset))

    async def _replace_mark(self, new: CheckpointMark) -> None:
        assert new.position >= self.mark.position, f"the mark would go backwards: {self.mark} to {new}"
        data = mark_format.encode_checkpoint_mark(new, self._uuid, self._count + 1)
        await self._worker.run(disk.replace_file, self._files, self._directory, MARK_FILE, data)
        self.mark, self._count = new, self._count + 1

    def publish(self) -> None:
        """Step: makes readers find the written entries in the index, and removes the flushed table from memory."""
        table = self._memtable.flushing
        assert table is not None
        if self._written is not None:
            self._index.add(self._written.group)
            self._hot.on_committed()
            self.counters["flushed_entries"] += table.entries
            self.counters["flushed_bytes"] += table.size_bytes
        self._memtable.discard_flushed_table()
        assert self._settled is not None
        self._release = table.ledgers, self._descriptors.on_changes_durable(self._settled)
        self._settled = self._flush = None
        self._captured = None
        self.counters["checkpoints"] += 1

    async def release_journals(self) -> None:
        """Step: releases the journals before the mark, and frees the memory of the flushed table in small steps."""
        await self._worker.run(self._settle, JournalPosition(*self.mark.position))
        for values in self._release:
            await self._free(values)
        self._release = ()

    async def _free(self, values: dict[int, Any]) -> None:
        """Frees the memory of flushed values in slices, with turns of the event loop in between. Each slice has at
        least twice as many values as entries arrived meanwhile, so that this ends before the other table is full.

        This does not run in the worker, because each step needs the interpreter."""
        table = self._memtable.active
        admitted, allowed = table.entries, 0
        for _ in clear_in_steps(values):
            allowed -= ENTRIES_RELEASED_PER_SLICE
            if allowed <= 0:
                await asyncio.sleep(0)
                admitted, allowed = table.entries, max(ENTRIES_RELEASED_PER_SLICE, 2 * (table.entries - admitted))

    def _settle(self, released: JournalPosition | None) -> None:
        """Removes old files of the ledger index, and releases the journals before the position `released` (None: no
        journals)."""
        self._ledgers.on_committed(self.mark.ledgers_generation, self.mark.ledgers_end)
        if released is not None:
            self._source.release(released)

    # ------------------------------------------------------------------------------------ the mark's other author
    async def run_between_checkpoints(self, function: Callable[[], None]) -> None:
        """Runs `function`, which opens or closes an entry log, in a worker, at a moment when neither a checkpoint nor a
        commit runs. Waits until it has ended, and raises its errors."""

        async def run() -> None:
            await self._worker.run(function)

        await self._alone(run)

    async def commit(self, moved: WrittenEntries | None, facts: Sequence[StateLogFact], drop: Collection[int]) -> None:
        """Commits the result of a compaction in one step: the entries `moved` (None: none), the facts `facts`, and the
        removal of the logs `drop` from the index. Raises NoSpace if the disk is full, or its subclass NoFileDescriptor
        if no file descriptor is free; then nothing was committed."""
        await self._alone(partial(self._commit, moved, facts, drop))

    async def _commit(self, moved: WrittenEntries | None, facts: Sequence[StateLogFact], drop: Collection[int]) -> None:
        generation, end = await self._worker.run(self._ledgers.append, facts)
        cold = self._cold.committed_ends_of_open_log if moved is None else moved.open
        new = self.mark.with_open_logs(self._hot.committed_ends_of_open_log, cold, self._numbers.last)
        await self._replace_mark(new._replace(ledgers_generation=generation, ledgers_end=end))
        for fact in facts:
            self._descriptors.apply(fact)
        self._index.add_group(None if moved is None else moved.group, drop)
        if moved is not None:
            self._cold.on_committed()
        await self._worker.run(self._settle, None)


CheckpointStep = Callable[[Checkpoint], Awaitable[None] | None]
CHECKPOINT_STEPS: tuple[CheckpointStep, ...] = (
    Checkpoint.capture_position,
    Checkpoint.swap_memtable,
    Checkpoint.write_entries,
    Checkpoint.write_index,
    Checkpoint.write_ledgers,
    Checkpoint.write_mark,
    Checkpoint.publish,
    Checkpoint.release_journals,
)
"""The steps of a checkpoint, in order."""
