"""Compaction: moves the living entries of sparse logs together, and deletes the logs (ledger protocol §2.6).

A move takes a group of closed logs (entrylog/mover.py) through `MOVE_STEPS`. What a crash after each step leaves:

    list_living        nothing. The extents of ledgers without a tombstone, of all sources (entrylog/mover.py)
    begin_cold_log     perhaps an empty cold log, which the next move takes, or a start removes
    copy               bytes after the cold log's marked end: cut at the next start. Synced slice by slice, as fast as
                       `bytes_per_s` allows
    write_index        the same for its index, synced
    commit             the commit point, the mark (store/checkpoint.py): the cold log's new ends, `DrainedEntryLog` for
                       each source, `QuarantinedEntries` for each entry whose copies were damaged. In the same
                       synchronous step readers find the copies and the sources leave the index
    remove_sources     sources: a start removes what is drained

A bad record is reported (`on_bad`), counted and quarantined, and the rest of its log is moved: no log remains because
of it. The index is a multimap of copies, each verified when it is read and filtered by tombstones, so that a move can
neither resurrect nor overwrite an entry. Logs without living entries take the steps commit and remove_sources alone.

**A log's index is deleted only after its `DrainedEntryLog` is durable.** Its data is deleted earlier in one case:
nothing lives in the log, and even the reserve gave no room for the fact `DrainedEntryLog` (`_give_up`). A crash then
leaves the index, which says that the log had only ledgers whose tombstones are durable. The next start sees that
nothing is lost, and states `DrainedEntryLog` itself (entrylog/repair_at_start.py). Guarded by
tests/bookie/test_full_disk.py `test_a_log_that_made_room_for_its_own_note_is_no_damage`.

A pass that is cancelled ends before or after a commit, never within it. The next start deletes sources that are drained
and still exist.

A full disk ends a move, and the move gives its room back. Then single logs are tried, the smallest first, each of which
frees some room. Before that the reserve is given up (`with_room`): with the reserve alone, a log can be moved whose
living bytes fit into it. One pass at a time. Guarded by tests/bookie/store/test_compaction.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import NamedTuple

from ....runtime.clock import Clock
from ....runtime.files import Files, join_path
from ....runtime.metrics import DURATION_BOUNDS, Histogram
from ....runtime.tasks import Worker, run_to_end
from ...format.ledger_index import DrainedEntryLog
from ...format.mark import OpenLogEnds
from .. import disk
from ..checkpoint import Checkpoint
from ..index_files import LedgerDescriptors
from ..state_log import StateLogFact
from . import files as log_files
from .mover import (
    CompactionAction,
    CompactionPolicy,
    DeletedLedgers,
    EntryLogPlan,
    EntryLogState,
    EntryLogUsage,
    EntryMover,
    LogUsageCounter,
    file_size,
    group_logs_to_move,
    is_compactable_once_closed,
    plan_entry_logs,
)
from .writer import EntryLogWriter

_LOG = logging.getLogger("magnetar.bookie.store.compaction")

MOVE_STEPS = ("list_living", "begin_cold_log", "copy", "write_index", "commit", "remove_sources")

EXTENTS_PER_MOVE_MAX = 1 << 18
"""The largest number of living extents in the logs of one move: they take about 30 MB of memory. A single log may have
more."""
SOURCE_LOGS_PER_MOVE_MAX = 64
"""The largest number of logs in one move. Each has two files open meanwhile."""
SIZE_HISTOGRAM_BOUNDS = tuple(float(1 << power) for power in range(12, 33, 2))
"""The bounds of a histogram of sizes, from 4 KiB to 4 GiB."""

OnProgress = Callable[[str, int, int, int, int], None]
"""A function that is called with (phase, logs done, logs, bytes done, bytes)."""


class CompactionResult(NamedTuple):
    """The result of a compaction: the numbers of the logs that were deleted and of those that were compacted, the bytes
    freed, the bytes moved, and the number of damaged records."""

    deleted: list[int]
    compacted: list[int]
    bytes_freed: int
    bytes_moved: int
    bad_records: int


class CompactionThrottle:
    """Limits to `bytes_per_s` the bytes a second that a compaction reads and writes. Bytes that are not used now are
    not allowed later."""

    def __init__(self, clock: Clock, bytes_per_s: int) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._due = clock.monotonic()

    async def wait_until_allowed(self, size: int) -> None:
        """Waits until the bytes of all calls, `size` more included, are within the limit."""
        now = self._clock.monotonic()
        self._due = max(self._due + size / self._bytes_per_s, now)
        await asyncio.sleep(self._due - now)


class EntryLogCompactor:
    """Compacts the entry logs of a store. `hot` is the log's writer that checkpoints use, `cold` the one that gets the
    moved entries. Calls `settle` to make tombstones durable, and `forget` to close the open files of a log that is
    removed. Entries of the ledgers in `dropping` do not live (`Store.dropping`). Calls
    `with_room` to run an action; if the disk has no room, `with_room` gives up the disk reserve and runs
    the action again. Calls `on_bad` after damaged entries were found and quarantined."""

    def __init__(
        self, files: Files, clock: Clock, directory: str, uuid: bytes, *, workers: tuple[Worker, Worker],
        checkpoint: Checkpoint, hot: EntryLogWriter, cold: EntryLogWriter, descriptors: LedgerDescriptors,
        dropping: Set[int], log_bytes_max: int,
        settle: Callable[[], Awaitable[None]], with_room: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        forget: Callable[[int], Awaitable[None]], on_bad: Callable[[], None],
    ) -> None:  # fmt: skip
        self._files = files
        self._clock = clock
        self._directory = directory
        self._uuid = uuid
        self._worker, self._flush_worker = workers
        self._checkpoint = checkpoint
        self._hot = hot
        self._cold = cold
        self._descriptors = descriptors
        self._dropping = dropping
        self._log_bytes_max = log_bytes_max
        self._settle = settle
        self._with_room = with_room
        self._forget = forget
        self._lock = asyncio.Lock()
        self._on_bad = on_bad
        self.seconds = Histogram((*DURATION_BOUNDS, 60.0, 600.0))  # of each move
        self.bytes = Histogram(SIZE_HISTOGRAM_BOUNDS)  # moved by each
        self.counters = {
            "logs_deleted": 0, "logs_compacted": 0, "bytes_freed": 0, "bytes_moved": 0, "records_moved": 0,
            "bad_records": 0, "moves_without_room": 0,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------ what there is
    async def list_log_usage(self) -> list[EntryLogUsage]:
        """Returns how much of each entry log is live, in ascending order of log numbers. Leaves out logs that are
        drained, made meanwhile or removed meanwhile. Raises OSError if the directory cannot be listed."""
        deleted = DeletedLedgers(self._descriptors.tombstones, self._dropping)
        opened, last = self._opened(), self._checkpoint.mark.last_log
        found: list[EntryLogUsage] = []
        for number in await self._worker.run(log_files.list_entry_log_numbers, self._files, self._directory):
            if number in self._descriptors.drained:
                continue  # an index without its log, for the next start to remove
            if number > last and number not in opened:
                continue  # made meanwhile: it may be open
            state, end = opened.get(number, (EntryLogState.CLOSED, None))
            try:
                survey = await self._worker.run(
                    LogUsageCounter, self._files, self._directory, self._uuid, number, state, end, deleted
                )
            except FileNotFoundError:
                continue
            while await self._worker.run(survey.run_step):
                pass
            found.append(survey.usage_so_far)
        return found

    def _opened(self) -> dict[int, tuple[EntryLogState, OpenLogEnds | None]]:
        hot, cold = self._hot.committed_ends_of_open_log, self._cold.committed_ends_of_open_log
        return {hot.number: (EntryLogState.HOT, hot), cold.number: (EntryLogState.COLD, cold)}

    async def plan_compaction(self, policy: CompactionPolicy, *, major: bool) -> list[EntryLogPlan]:
        """Returns for each entry log the action that a minor or (`major` True) a major compaction by this policy would
        take now, and its reason, in ascending order of log numbers. Changes nothing. Raises OSError if the directory
        cannot be listed."""
        return plan_entry_logs(await self.list_log_usage(), policy, major=major)

    # ------------------------------------------------------------------------------------ a pass
    async def run_compaction(
        self, policy: CompactionPolicy | None, *, major: bool = False, roll: bool = False,
        on_progress: OnProgress = lambda *numbers: None,
    ) -> CompactionResult:  # fmt: skip
        """Deletes the logs without living entries; with a `policy`, also compacts logs, in a minor or (`major` True) a
        major compaction. `roll`: first closes open logs with few living bytes, so that they can be compacted. Returns
        what was done. Waits for a compaction that is running.

        A log that the disk has no room to move stays. Raises NoSpace if the disk has no room for the deletions,
        DamagedFile if an index is found damaged during a move, and OSError if a file cannot be read or removed."""
        async with self._lock:
            before = dict(self.counters)
            deleted, compacted = await self._run(policy or _DELETE, major, roll, on_progress)
            gained = {name: value - before[name] for name, value in self.counters.items()}
            return CompactionResult(
                deleted, compacted, gained["bytes_freed"], gained["bytes_moved"], gained["bad_records"]
            )  # fmt: skip

    async def _run(
        self, policy: CompactionPolicy, major: bool, roll: bool, on_progress: OnProgress
    ) -> tuple[list[int], list[int]]:
        on_progress("plan", 0, 0, 0, 0)
        await self._settle()
        facts = await self.list_log_usage()
        if await self._roll(facts, policy, major, roll):
            facts = await self.list_log_usage()
        plans = plan_entry_logs(facts, policy, major=major)
        dead = [plan.facts for plan in plans if plan.action is CompactionAction.DELETE]
        await self._delete(dead, on_progress)
        moves = [plan.facts for plan in plans if plan.action is CompactionAction.COMPACT]
        compacted = await self._compact(moves, policy, on_progress) if moves else []
        await self._checkpoint.run_between_checkpoints(
            self._cold.close_unless_empty if roll else self._cold.release_unused_space
        )
        on_progress("done", len(dead) + len(compacted), len(dead) + len(moves), 0, 0)
        return [log.log for log in dead], compacted

    async def _roll(self, logs: list[EntryLogUsage], policy: CompactionPolicy, major: bool, roll: bool) -> bool:
        """Closes the cold log if it would be compacted once it is closed; with `roll`, also the hot log. Returns
        whether a log was closed."""
        share = policy.major_share if major or roll else policy.minor_share
        rolled = False
        for facts in logs:
            if is_compactable_once_closed(facts, share) and (roll or facts.state is EntryLogState.COLD):
                writer = self._cold if facts.state is EntryLogState.COLD else self._hot
                await self._checkpoint.run_between_checkpoints(writer.close)
                rolled = True
        return rolled

    async def _delete(self, dead: Sequence[EntryLogUsage], on_progress: OnProgress) -> None:
        if not dead:
            return
        numbers = [log.log for log in dead]
        on_progress("delete", 0, len(numbers), 0, 0)
        try:
            await self._with_room(
                lambda: self._checkpoint.commit(None, [DrainedEntryLog(log) for log in numbers], numbers)
            )
        except disk.NoFileDescriptor:
            raise
        except disk.NoSpace:
            await self._give_up(numbers)
            await self._checkpoint.commit(None, [DrainedEntryLog(log) for log in numbers], numbers)
        await self._remove(numbers)
        self.counters["logs_deleted"] += len(numbers)
        on_progress("delete", len(numbers), len(numbers), 0, 0)

    async def _give_up(self, numbers: Sequence[int]) -> None:
        """Deletes the files of dead logs before `DrainedEntryLog` facts are durable, to get disk space. Leaves the logs
        that are open in the mark, because a start would cut their indexes."""
        await self._settle()
        await self._remove(
            [log for log in numbers if log not in self._checkpoint.mark.open_log_numbers], data_only=True
        )

    async def _remove(self, numbers: Sequence[int], *, data_only: bool = False) -> None:
        for number in numbers:
            await self._forget(number)
            self.counters["bytes_freed"] += await self._flush_worker.run(self._remove_files, number, data_only)

    def _remove_files(self, number: int, data_only: bool) -> int:
        before = self._bytes_of(number)
        remove = log_files.remove_log_data_file if data_only else log_files.remove_log_files
        remove(self._files, self._directory, number)
        return before - self._bytes_of(number)

    def _bytes_of(self, number: int) -> int:
        names = (log_files.entry_log_file_name(number), log_files.entry_log_index_file_name(number))
        return sum(file_size(self._files, join_path(self._directory, name)) for name in names)

    # ------------------------------------------------------------------------------------ moves
    async def _compact(
        self, moves: list[EntryLogUsage], policy: CompactionPolicy, on_progress: OnProgress
    ) -> list[int]:
        """Moves the living entries of these logs, group by group. Returns the numbers of the logs that were moved. If
        the disk has no room for a group, tries its logs one by one, the smallest first."""
        waiting = group_logs_to_move(moves, self._log_bytes_max, EXTENTS_PER_MOVE_MAX, SOURCE_LOGS_PER_MOVE_MAX)
        total = sum(log.live_bytes for log in moves)
        throttle = CompactionThrottle(self._clock, policy.bytes_per_s)
        done: list[int] = []
        moved = 0
        one_by_one = False
        while waiting:
            batch = waiting.pop(0)
            numbers = [log.log for log in batch]
            move = _Move(len(done), len(moves), moved, total, on_progress)
            try:
                await self._move(numbers, throttle, move)
            except disk.NoSpace as error:
                self.counters["moves_without_room"] += 1
                _LOG.error("no room to compact logs %s: %s", numbers, error)
                if len(batch) == 1 and (one_by_one or not waiting):
                    break  # the others need more
                one_by_one = True
                left = sorted((log for logs in [batch, *waiting] for log in logs), key=lambda log: log.live_bytes)
                waiting = [[log] for log in left]
                continue
            done += numbers
            moved += sum(log.live_bytes for log in batch)
        return done

    async def _move(self, numbers: list[int], throttle: CompactionThrottle, move: _Move) -> None:
        began = self._clock.monotonic()
        deleted = DeletedLedgers(self._descriptors.tombstones, self._dropping)
        mover = EntryMover(self._files, self._directory, self._uuid, numbers, deleted, self._cold)
        try:
            while await self._worker.run(mover.list_more_extents):
                pass
            if mover.live_bytes:
                await self._with_room(
                    lambda: self._checkpoint.run_between_checkpoints(lambda: self._cold.ensure_room(mover.live_bytes))
                )
            while work := await self._worker.run(mover.run_step):
                move.report_moved(mover.moved_bytes)
                await throttle.wait_until_allowed(work)
            written = await self._worker.run(mover.finish)
            facts: list[StateLogFact] = [DrainedEntryLog(number) for number in numbers]
            facts += mover.bad
            await self._with_room(lambda: self._checkpoint.commit(written, facts, numbers))
        except disk.NoSpace:
            await self._checkpoint.run_between_checkpoints(self._cold.release_unused_space)
            raise
        finally:
            await run_to_end(self._worker.run(mover.close))  # after the step that is under way there
        self._count(mover, numbers, self._clock.monotonic() - began)
        await self._remove(numbers)

    def _count(self, mover: EntryMover, numbers: list[int], seconds: float) -> None:
        self.counters["logs_compacted"] += len(numbers)
        self.counters["bytes_moved"] += mover.moved_bytes
        self.counters["records_moved"] += mover.records
        self.counters["bad_records"] += len(mover.bad)
        self.seconds.observe_value(seconds)
        self.bytes.observe_value(mover.moved_bytes)
        for bad in mover.bad:
            _LOG.error("entries %d to %d of ledger %d were damaged in a log that is compacted", *bad[1:], bad.ledger)
        if mover.bad:
            self._on_bad()


class _Move:
    """Reports the progress of one move, as a part of a compaction with several moves."""

    def __init__(self, logs_done: int, logs: int, bytes_before: int, bytes_: int, on_progress: OnProgress) -> None:
        self._logs_done = logs_done
        self._logs = logs
        self._before = bytes_before
        self._bytes = bytes_
        self._on_progress = on_progress

    def report_moved(self, moved: int) -> None:
        self._on_progress("compact", self._logs_done, self._logs, self._before + moved, self._bytes)


_DELETE = CompactionPolicy(0.0, 0.0, 0)
"""A policy that compacts nothing."""
