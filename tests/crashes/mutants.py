"""Defects of the catalogue (docs/design/defects.md) that are a matter of order on one bookie, each as a patch.

The enumeration must find every one: `killed(mutant)` says in which state. A mutant is on while the workload is
recorded and while stores are started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

from magnetar.bookie.format import ledger_index
from magnetar.bookie.format.journal import RecordType
from magnetar.bookie.format.ledger_index import LimboChange, QuarantinedEntries
from magnetar.bookie.store import checkpoint
from magnetar.bookie.store.checkpoint import Checkpoint, CheckpointJournalPort
from magnetar.bookie.store.entrylog import files as log_files
from magnetar.bookie.store.entrylog.compaction import EntryLogCompactor
from magnetar.bookie.store.entrylog.mover import EntryMover
from magnetar.bookie.store.entrylog.writer import MemtableFlush, WrittenEntries, _Open
from magnetar.bookie.store.group_commit_core import GroupCommit, GroupCommitState, WriteBlock
from magnetar.bookie.store.index_files import LedgerDescriptors, TombstoneWriter
from magnetar.bookie.store.journal import Journal, OnDurable
from magnetar.bookie.store.memtable import Memtable
from magnetar.bookie.store.state_log import StateLog
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.runtime.files import Files, join_path
from tests.bookie.stores import DATA
from tests.crashes.enumerate import Enumeration, Failure
from tests.crashes.stops import KINDS, STOP, record_named
from tests.crashes.stops import STATES as STOPPED_STATES
from tests.crashes.verify import listening

WORKLOADS = 12
STATES = 400

Patch = Callable[[contextlib.ExitStack], None]


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, new: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, new))


def _replace_step(stack: contextlib.ExitStack, old: checkpoint.CheckpointStep, new: checkpoint.CheckpointStep) -> None:
    _replace(
        stack,
        checkpoint,
        "CHECKPOINT_STEPS",
        tuple(new if step is old else step for step in checkpoint.CHECKPOINT_STEPS),
    )


def fence_lost_on_checkpoint(stack: contextlib.ExitStack) -> None:
    real = ledger_index.encode_ledger_record

    def encode(ledger: int, fenced: bool, key: bytes, lac: int, last: int) -> bytes:
        return real(ledger, False, key, lac, last)

    _replace(stack, ledger_index, "encode_ledger_record", encode)


def fence_answered_before_its_sync(stack: contextlib.ExitStack) -> None:
    """The store calls a seal of fences alone durable when it is queued, and not when it is synced."""
    real = Store.seal_group

    def seal(self: Store, done: OnDurable) -> None:
        early = bool(self._fencing) and not self._adding
        real(self, (lambda ok: None) if early else done)
        if early:
            done(True)

    _replace(stack, Store, "seal_group", seal)


LATE_S = 0.005
"""How long adds go by a descriptor that does not know of the fence yet."""


def adds_go_by_another_descriptor(stack: contextlib.ExitStack, late_s: float = LATE_S) -> None:
    """The check and the change of the fence are not one step: adds check a descriptor that is fenced later (#4701)."""
    real = Store.fence

    def fence(self: Store, ledger: int, key: bytes) -> Status:
        before = self.descriptors.get(ledger)
        was = before is not None and before.fenced
        status = real(self, ledger, key)
        found = self.descriptors.get(ledger)
        if found is not None and not was:

            def hear() -> None:
                found.fenced = True

            found.fenced = False
            asyncio.get_running_loop().call_later(late_s, hear) if late_s else hear()
        return status

    _replace(stack, Store, "fence", fence)


def journal_before_memtable(stack: contextlib.ExitStack) -> None:
    real = Memtable.insert_entries

    def insert_entries(self: Memtable, ledger: int, entries: Any, size: int) -> int:
        entries = list(entries)
        asyncio.get_running_loop().call_later(0.005, real, self, ledger, entries, size)
        return max(entry for entry, _, _ in entries)

    _replace(stack, Memtable, "insert_entries", insert_entries)


def tombstone_in_memory_only(stack: contextlib.ExitStack) -> None:
    real = Journal.enqueue_record

    def enqueue(self: Journal, kind: RecordType, *arguments: Any) -> None:
        if kind is not RecordType.TOMBSTONE:
            real(self, kind, *arguments)

    _replace(stack, Journal, "enqueue_record", enqueue)


def mark_captured_at_the_end(stack: contextlib.ExitStack) -> None:
    steps = [step for step in checkpoint.CHECKPOINT_STEPS if step is not Checkpoint.capture_position]
    steps.insert(steps.index(Checkpoint.write_mark), Checkpoint.capture_position)
    _replace(stack, checkpoint, "CHECKPOINT_STEPS", tuple(steps))


def facts_only_with_entries(stack: contextlib.ExitStack) -> None:

    async def write(self: Checkpoint) -> None:
        await self.write_ledgers()
        if self._flush is None:
            old = self.mark
            self._next = self._next._replace(
                ledgers_generation=old.ledgers_generation, ledgers_end=old.ledgers_end
            )

    _replace_step(stack, Checkpoint.write_ledgers, write)


def journals_released_before_the_mark(stack: contextlib.ExitStack) -> None:

    async def write(self: Checkpoint) -> None:
        assert self._captured is not None
        await self._worker.run(self._source.release, self._captured)
        await self.write_mark()

    _replace_step(stack, Checkpoint.write_mark, write)


def sources_removed_before_the_commit(stack: contextlib.ExitStack) -> None:
    real = Checkpoint.commit

    async def commit(self: Checkpoint, moved: Any, facts: Sequence[Any], drop: Collection[int]) -> None:
        for number in drop:
            await self._worker.run(log_files.remove_log_files, self._files, join_path(DATA, "entries"), number)
        await real(self, moved, facts, drop)

    async def remove(self: EntryLogCompactor, numbers: Sequence[int], *, data_only: bool = False) -> None:
        return

    _replace(stack, Checkpoint, "commit", commit)
    _replace(stack, EntryLogCompactor, "_remove", remove)


def dead_logs_without_a_trace(stack: contextlib.ExitStack) -> None:
    real = log_files.remove_log_data_file

    def remove(files: Files, directory: str, number: int) -> None:
        real(files, directory, number)
        index = join_path(directory, log_files.entry_log_index_file_name(number))
        if files.exists(index):
            files.remove(index)

    _replace(stack, log_files, "remove_log_data_file", remove)


def limbo_in_memory_only(stack: contextlib.ExitStack) -> None:
    _replace(stack, LedgerDescriptors, "enter_limbo", lambda self, upto: self.apply(LimboChange(upto, entered=True)))


def quarantine_in_memory_only(stack: contextlib.ExitStack) -> None:
    def quarantine(self: LedgerDescriptors, ledger: int, first: int, last: int) -> None:
        self.apply(QuarantinedEntries(ledger, first, last))

    _replace(stack, LedgerDescriptors, "quarantine", quarantine)


def fences_of_limbo_end_with_it(stack: contextlib.ExitStack) -> None:
    real = StateLog.apply

    def apply(self: StateLog, fact: Any) -> None:
        real(self, fact)
        if isinstance(fact, LimboChange) and not fact.entered:
            self.fenced_upto = -1

    _replace(stack, StateLog, "apply", apply)


def extent_lost_when_a_flush_ends_beside_its_move(stack: contextlib.ExitStack) -> None:
    flushes = 0
    begin = EntryMover.__init__
    began: dict[int, int] = {}

    def init(self: EntryMover, *arguments: Any) -> None:
        began[id(self)] = flushes
        begin(self, *arguments)

    def publish_and_count(self: Checkpoint) -> None:
        nonlocal flushes
        flushes += self._written is not None
        self.publish()

    def finish(self: EntryMover) -> WrittenEntries | None:
        extents, tables = self._out.finish()
        if began[id(self)] != flushes:
            extents, tables = extents[:-1], tables[:-1]
        return self._cold.write_index(extents, tables) if extents else None

    _replace(stack, EntryMover, "__init__", init)
    _replace(stack, EntryMover, "finish", finish)
    _replace_step(stack, Checkpoint.publish, publish_and_count)


def repeated_flush_without_the_bytes_before_it(stack: contextlib.ExitStack) -> None:
    def rewind(self: _Open) -> None:
        self.end = self.log_end

    _replace(stack, _Open, "rewind", rewind)


def later_tombstone_settles_an_earlier_one(stack: contextlib.ExitStack) -> None:
    real = TombstoneWriter.write

    async def write(self: TombstoneWriter, ledgers: list[int]) -> bool:
        durable = await real(self, ledgers)
        if durable:
            self._loose.clear()
        return durable

    _replace(stack, TombstoneWriter, "write", write)


def block_after_one_without_room_counts(stack: contextlib.ExitStack) -> None:
    real = GroupCommit._refuse

    def refuse(self: GroupCommit[Any], block: WriteBlock[Any]) -> None:
        real(self, block)
        self._stage = GroupCommitState.WRITING  # a block after it is confirmed when it is synced

    _replace(stack, GroupCommit, "_refuse", refuse)


def checkpoint_ends_with_its_caller(stack: contextlib.ExitStack) -> None:
    async def run(self: Checkpoint, source: CheckpointJournalPort) -> None:
        async with self._lock:
            await self._steps(source)

    _replace(stack, Checkpoint, "run", run)


def commit_ends_with_its_caller(stack: contextlib.ExitStack) -> None:
    async def commit(self: Checkpoint, moved: Any, facts: Sequence[Any], drop: Collection[int]) -> None:
        async with self._lock:
            await self._commit(moved, facts, drop)

    _replace(stack, Checkpoint, "commit", commit)


def fence_in_memory_only(stack: contextlib.ExitStack) -> None:
    real = Journal.enqueue_record

    def enqueue(self: Journal, kind: RecordType, *arguments: Any) -> None:
        if kind is not RecordType.FENCE:
            real(self, kind, *arguments)

    _replace(stack, Journal, "enqueue_record", enqueue)


def flush_waits_for_its_last_write(stack: contextlib.ExitStack) -> None:
    async def write_entries(self: Checkpoint) -> None:
        table = self._memtable.flushing
        self._flush = None
        if table is None or not table.ledgers:
            return
        flush = MemtableFlush(self._hot, table)
        await self._worker.run(flush.start)
        written: asyncio.Future[None] | None = None
        while slices := await self._worker.run(flush.take_next_slices, self._at_once(flush)):
            written = self.writer.run(self._hot.append_slices, slices)
            written.add_done_callback(lambda done: done.cancelled() or done.exception())
        if written is not None:
            await written
        self._flush = flush

    _replace_step(stack, Checkpoint.write_entries, write_entries)


MUTANTS: dict[str, Patch] = {
    "M07 the fence bit is not durable after a checkpoint": fence_lost_on_checkpoint,
    "M07b the fences of limbo end with it": fences_of_limbo_end_with_it,
    "M07c a fence is obeyed in memory and not journaled": fence_in_memory_only,
    "M08b a fence is answered before its sync": fence_answered_before_its_sync,
    "M09b limbo that a restart forgets": limbo_in_memory_only,
    "M14 adds do not see a fence that was answered": adds_go_by_another_descriptor,
    "M15 journal before memtable": journal_before_memtable,
    "M17 a tombstone that a restart forgets": tombstone_in_memory_only,
    "M23 the mark is captured after the swap": mark_captured_at_the_end,
    "M23b facts are not flushed without entries": facts_only_with_entries,
    "M23c journals go before the mark": journals_released_before_the_mark,
    "M23d a flush waits for its last write alone: one before it may have found no room": flush_waits_for_its_last_write,
    "M24 compaction removes its sources before the commit": sources_removed_before_the_commit,
    "M24b a dead log that makes room takes its index with it": dead_logs_without_a_trace,
    "M35 a move loses an extent when a flush ends beside it": extent_lost_when_a_flush_ends_beside_its_move,
    "M36 a flush that is repeated forgets the bytes before it": repeated_flush_without_the_bytes_before_it,
    "M37 a durable tombstone counts for an earlier one that found no room": later_tombstone_settles_an_earlier_one,
    "M38 a journal block after one without room counts": block_after_one_without_room_counts,
    "M47 a quarantine that a restart forgets": quarantine_in_memory_only,
    "M48 a checkpoint ends when its caller is cancelled": checkpoint_ends_with_its_caller,
    "M49 a commit ends when its caller is cancelled": commit_ends_with_its_caller,
}


SEEDS = {
    "M09b limbo that a restart forgets": 1,
    "M23d a flush waits for its last write alone: one before it may have found no room": 1,
    "M24b a dead log that makes room takes its index with it": 5,
    "M35 a move loses an extent when a flush ends beside it": 6,
    "M36 a flush that is repeated forgets the bytes before it": 1,
    "M38 a journal block after one without room counts": 2,
    "M47 a quarantine that a restart forgets": 7,
}
"""Workloads that show a defect at once, where the first does not; they and WORKLOADS after them are tried."""

STOPS = {
    "M48 a checkpoint ends when its caller is cancelled": "checkpoint",
    "M49 a commit ends when its caller is cancelled": "compaction",
}
"""Defects that need a cancellation: the stops in which they are looked for."""
STOPS_MAX = 200
STOPS_FIRST = {
    "M48 a checkpoint ends when its caller is cancelled": 72,
    "M49 a commit ends when its caller is cancelled": 537,
}
"""The stop that showed it last, and is tried first: dozens of others show nothing."""


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        MUTANTS[name](stack)
        yield


def killed(name: str) -> Failure | None:
    """The first failure with this mutant; None: it survives."""
    with mutated(name), listening():
        for life in lives_of(name):
            try:
                recording = record_named(life)
            except Exception as error:  # the workload itself could not go on
                return Failure(life, repr(error))
            if recording.complaints:
                return Failure(life, recording.complaints[0])
            enumeration = Enumeration(recording)
            for outcome in enumeration.run(STOPPED_STATES if life.startswith(STOP) else STATES):
                if outcome.failures:
                    return outcome.failures[0]
    return None


def lives_of(name: str) -> list[str]:
    """The workloads, or stops, in which this mutant is looked for."""
    if name in STOPS:
        kinds = list(KINDS)
        first = kinds.index(STOPS[name])
        numbers = (STOPS_FIRST.get(name, first), *range(first, len(kinds) * STOPS_MAX, len(kinds)))
        return [f"{STOP}{number}" for number in numbers]
    seed = SEEDS.get(name, 0)
    return [str(each) for each in range(seed, seed + WORKLOADS)]
