"""Compaction of a topic: the driver of compaction_core.py. Compaction reads the topic's ledgers, and takes no part in
the delivery of messages.

`COMPACTION_STEPS`, in this order and no other (Pulsar CP1; complaint 49: compaction lost messages):

    survey    reads the survivors of the last compaction, then the log up to the horizon (the last stable position at
              the start), once for each round, and finds which messages survive
    create    creates a ledger
    name      adds the ledger to `pending_deletion` of the topic's record: after a crash the next owner deletes it
    copy      appends the survivors to the ledger, under their original ids, in order; then their table
    close     closes the ledger
    publish   stores in the record the new ledger and its horizon, and the old ledger in `pending_deletion`, in one
              commit
    delete    deletes the old ledger

After a crash before `publish` the topic is as before, and the new ledger is in `pending_deletion`. After a crash behind
`publish` the topic is compacted, and the old ledger is in `pending_deletion`. So no message is lost or doubled, and no
ledger is left over (except an empty one, after a crash between `create` and `name`). When the outcome of `publish` is
unknown, no ledger is deleted: the next change of the record decides. Compaction does not change or trim the log.

**What it keeps**: the log after the horizon is not trimmed (`trim_limit`), from the first compaction on, or from the
start if the policy `compaction_threshold_bytes` is set. Survivors in trimmed ledgers are in the compacted ledger, from
which the next compaction begins. `truncate` publishes a ledger without survivors by the same steps.

**Bounds**: `compaction_memory_bytes` for keys (with more keys compaction_core.py reads the log more often), one read of
`read_bytes` and the entries in flight to bookies. Other tasks get the event loop after each `YIELD_AFTER_MESSAGES`. One
compaction at a time runs in a broker; the others wait.

Guarding tests: tests/broker/log/test_compaction.py (a crash at every write).

`CompactedLogView` is a topic's log for `read_compacted` consumers: the compacted ledger up to the horizon, then the
log. A subscription reads it in place of the log (`shape`, `reader`). Positions are those of the topic, so order,
cursors, acknowledgements and seeks work unchanged. Entries that compaction removed count as acknowledged by such a
subscription (`removed_entries`), and are never delivered to it.

When a topic is compacted again, each subscription whose position is before the new horizon begins again after its mark
(broker/topic/topic.py), so that no consumer holds an entry of the ledger that is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import ParamSpec, TypeVar

from pyroaring import BitMap

from ...ledger import LedgerClient, LedgerReader, LedgerWriter
from ...metadata.records import CompactedLedgerInfo
from ...proto.applied import AppliedPolicies
from ...proto.errors import Busy, DataLost, InternalError, MagnetarError, OutcomeUnknown, Unavailable
from ...proto.names import Position, TopicName
from ...proto.states import CompactionState, LedgerStays, TopicState
from ...runtime.network import World
from ...runtime.tasks import Tasks
from ..common.config import BrokerConfig, GetReplicationPolicy
from .cache import StoredEntry
from .compaction_core import (
    KEY_OVERHEAD_BYTES,
    DamagedCompactedLedger,
    SurvivingEntriesRow,
    SurvivingMessageSearch,
    compact_entry,
    decode_survivor,
    decode_survivor_table_piece,
    decode_survivor_table_rows,
    encode_survivor,
    encode_survivor_table,
    last_surviving_batch_index,
    parse_entry,
)
from .log import Log, LogEntryReader, ReadableLog
from .log_shape_core import CommittedShape, LedgerSpan, LogShape, TrimLimit, find_first_entry_by_bisection
from .managed_ledger import TopicFenced
from .reader import PositionAndIndex
from .snapshot_ledger import TopicStateLedgers
from .unfolding import run_in_thread_if_slow

# ------------------------------------------------------------------------------------------------- compacted_log
# Reading a compacted ledger: by original position and by time. And the places of the topic as its readers see them.
#
# `CompactedLedger` is one compacted ledger, open: its table (broker/log/compaction_core.py) is in memory, two bytes at
# most for each entry that survives. `CompactedShape` is the log's shape with the ledgers before it that were trimmed
# and of which something survives: a consumer that reads compacted still sees them. It follows the log's own shape.


class CompactedLedger:
    """An open compacted ledger: the entries of a topic that survived a compaction. Each entry keeps its position in the
    topic. `rows`: its table, a row for each ledger of the topic with surviving entries, oldest first."""

    def __init__(self, record: CompactedLedgerInfo, reader: LedgerReader, rows: list[SurvivingEntriesRow]) -> None:
        self.record = record
        self.rows = rows
        self._reader = reader
        self._ids = [row.ledger_id for row in rows]

    @classmethod
    async def open(cls, ledgers: TopicStateLedgers | LedgerClient, record: CompactedLedgerInfo) -> CompactedLedger:
        """Opens the compacted ledger, reads the table of its entries, and returns it. Raises DataLost if the ledger is
        damaged or lost; LedgerNotFound if it does not exist; Unavailable if bookies do not answer; NewerFormat if a
        later version of Magnetar wrote the ledger."""
        reader = await ledgers.open(record.ledger_id)
        try:
            _, pieces, body = decode_survivor_table_piece(
                (await reader.read(reader.last_entry, reader.last_entry))[0].payload
            )
            for back in range(1, pieces):
                at = reader.last_entry - back
                body = decode_survivor_table_piece((await reader.read(at, at))[0].payload)[2] + body
            return cls(record, reader, decode_survivor_table_rows(body))
        except DamagedCompactedLedger as error:
            raise DataLost(f"compacted ledger {record.ledger_id}: {error}", ledger=record.ledger_id) from error

    @property
    def horizon(self) -> Position:
        """Returns the position in the topic up to which the compaction has read the log (the horizon)."""
        return Position(self.record.horizon_ledger, self.record.horizon_entry)

    @property
    def entries(self) -> int:
        """Returns the number of surviving entries in this ledger."""
        return self.record.entries

    def find_survivor_number(self, position: Position) -> int:
        """Returns the number (from 0) of the first surviving entry at or after `position`. If there is none, returns
        the number of all surviving entries."""
        at = bisect_left(self._ids, position[0])
        if at == len(self.rows):
            return self.entries
        row = self.rows[at]
        before = row.survivors.rank(position[1] - 1) if row.ledger_id == position[0] and position[1] > 0 else 0
        return row.first + before

    def find_survivor_row(self, ledger_id: int) -> SurvivingEntriesRow | None:
        """Returns the row of the table that describes a ledger of the topic; None if no entry of that ledger
        survives."""
        at = bisect_left(self._ids, ledger_id)
        return self.rows[at] if at < len(self.rows) and self._ids[at] == ledger_id else None

    async def read(self, first: int, bytes_max: int) -> list[StoredEntry]:
        """Returns surviving entries, beginning with number `first` (from 0, below `entries`): about `bytes_max` bytes,
        at least one entry. Raises DataLost if an entry is damaged or lost; Unavailable if bookies do not answer;
        LedgerNotFound if the ledger was deleted; NewerFormat if a later version of Magnetar wrote it."""
        found = await self._reader.read(first, self.entries - 1, bytes_max)
        try:
            return [StoredEntry.parse(*decode_survivor(each.payload)) for each in found]
        except DamagedCompactedLedger as error:
            raise DataLost(f"compacted ledger {self.record.ledger_id}: {error}") from error

    async def read_survivor(self, number: int) -> StoredEntry:
        """Returns the surviving entry with this number (from 0, below `entries`). Raises the errors of `read`."""
        return (await self.read(number, 1))[0]

    async def find_first_survivor_since(self, time_ms: int) -> StoredEntry | None:
        """Returns the first surviving entry that arrived at or after `time_ms` (ms since the epoch); None if there is
        none. Raises the errors of `read`."""
        return (
            await find_first_entry_by_bisection(self.entries - 1, self.read_survivor,
            lambda entry: entry.timestamp_ms >= time_ms)
        ).entry

    async def read_last_survivor(self) -> tuple[StoredEntry, int] | None:
        """Returns the last surviving entry, and the batch index of its last surviving message (-1: the entry is not a
        batch); None if no entry survives. Raises the errors of `read`."""
        if not self.entries:
            return None
        entry = await self.read_survivor(self.entries - 1)
        return entry, last_surviving_batch_index(entry.payload)


class CompactedShape(CommittedShape):
    """The shape of a topic's log for consumers that read the compacted form of the topic. It also contains ledgers that
    the log has trimmed, if some of their entries survive in the compacted ledger."""

    __slots__ = ("_ghosts", "_rows")

    def __init__(self, log: LogShape) -> None:
        self._ghosts: set[int] = set()
        self._rows: dict[int, SurvivingEntriesRow] = {}
        super().__init__(log)

    def set_survivor_rows(self, rows: list[SurvivingEntriesRow]) -> None:
        """Sets the table of the compacted ledger (a row for each ledger of the topic). Adds those ledgers of the table
        that the log has trimmed."""
        self._rows = {row.ledger_id: row for row in rows}
        for row in rows:
            if row.ledger_id not in self._spans:
                self._spans[row.ledger_id] = _ghost(row)
                insort(self._ids, row.ledger_id)
                self._ghosts.add(row.ledger_id)

    def remove(self, ledger_id: int) -> None:
        row = self._rows.get(ledger_id)
        if row is None:
            super().remove(ledger_id)
        else:
            self._spans[ledger_id] = _ghost(row)
            self._ghosts.add(ledger_id)

    def is_ledger_trimmed(self, ledger_id: int) -> bool:
        """Returns True if the log has trimmed this ledger and some of its entries survive in the compacted ledger."""
        return ledger_id in self._ghosts


def _ghost(row: SurvivingEntriesRow) -> LedgerSpan:
    """Returns the span of a ledger that the log has trimmed and of which some entries survive in the compacted
    ledger."""
    return LedgerSpan(row.ledger_id, row.first_index, row.entries - 1, row.end_index)


# ------------------------------------------------------------------------------------------------ compacted_view


class CompactedReader:
    """Reads the compacted form of a topic: the entries of the compacted ledger up to the horizon, and the entries of
    the log after it. A LogEntryReader."""

    def __init__(self, shape: CompactedShape, log: LogEntryReader) -> None:
        self.compacted: CompactedLedger | None = None
        self._shape = shape
        self._log = log

    def set_log_reader(self, log: LogEntryReader) -> None:
        """Replaces the reader that reads the entries of the log after the horizon."""
        self._log = log

    def _covers(self, position: Position) -> CompactedLedger | None:
        """Returns the compacted ledger if `position` is at or before its horizon; None if the entry must be read from
        the log."""
        compacted = self.compacted
        return compacted if compacted is not None and position <= compacted.horizon else None

    def read_cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        return [] if self._covers(position) else self._log.read_cached(position, entries_max, bytes_max)

    def get(self, position: Position) -> StoredEntry | None:
        return None if self._covers(position) else self._log.get(position)

    async def read(self, position: Position, bytes_max: int, last_entry: int = 1 << 62) -> list[StoredEntry]:
        """Returns entries from `position` on: up to the horizon the surviving ones, after the horizon the entries of
        the log. Returns no entries if no entry at or after `position` survives, and the log has none after the horizon.
        About `bytes_max` bytes, at least one entry; `last_entry` counts only if `position` is after the horizon. Raises
        the errors of reading the log."""
        compacted = self._covers(position)
        if compacted is None:
            return await self._log.read(position, bytes_max, last_entry)
        number = compacted.find_survivor_number(position)
        if number < compacted.entries:
            return await compacted.read(number, bytes_max)
        following = self._shape.position_after(compacted.horizon)
        return await self._log.read(following, bytes_max) if self._shape.has_visible_entry(following) else []

    async def read_entry(self, position: Position) -> StoredEntry:
        return (await self.read(position, 1))[0] if self._covers(position) else await self._log.read_entry(position)

    async def find_position_by_index(self, index: int) -> PositionAndIndex:
        compacted, place = self.compacted, await self._log.find_position_by_index(index)
        if compacted is not None:
            for row in compacted.rows:
                if (
                    index < row.end_index
                    and row.ledger_id < place.position[0]
                    and self._shape.is_ledger_trimmed(row.ledger_id)
                ):
                    return PositionAndIndex(Position(row.ledger_id, 0), row.first_index)  # trimmed: from its ledger on
        return place

    async def find_position_by_time(self, time_ms: int) -> PositionAndIndex:
        compacted = self.compacted
        if compacted is not None and (found := await compacted.find_first_survivor_since(time_ms)) is not None:
            return PositionAndIndex(found.position, found.first_index)
        return await self._log.find_position_by_time(time_ms)

    async def find_message_index_after(self, mark: Position) -> int:
        return await self._log.find_message_index_after(mark)

    def find_cached_message_index_after(self, mark: Position) -> int | None:
        return self._log.find_cached_message_index_after(mark)

    async def read_last_message(self) -> tuple[Position, int, int] | None:
        compacted = self.compacted
        if compacted is not None and self._shape.last_position <= compacted.horizon:
            survivor = await compacted.read_last_survivor()
            return None if survivor is None else (survivor[0].position, survivor[1], survivor[0].index)
        return await self._log.read_last_message()


class CompactedLogView:
    """The log of a topic for consumers that read the compacted form. A ReadableLog."""

    is_compacted = True

    def __init__(self, log: ReadableLog) -> None:
        self.topic = log.topic
        self.shape = CompactedShape(log.shape)
        self.reader = CompactedReader(self.shape, log.reader)
        self._log = log

    @property
    def world(self) -> World:
        return self._log.world

    @property
    def state(self) -> TopicState:
        return self._log.state

    def hide_uncommitted_entries(self, log: ReadableLog) -> None:
        """From now on, readers get only the committed entries of the log after the horizon. `log`: the view of the log
        that contains only committed entries (log.py)."""
        self._log = log
        self.reader.set_log_reader(log.reader)
        assert isinstance(log.shape, CommittedShape), "it is the view of what is committed"
        self.shape.set_transaction_outcomes(log.shape.outcomes)

    @property
    def compacted(self) -> CompactedLedger | None:
        """Returns the compacted ledger that is read now; None if the topic was never compacted."""
        return self.reader.compacted

    def switch_compacted_ledger(self, compacted: CompactedLedger) -> None:
        """From now on, readers read up to the horizon from the ledger `compacted`, in place of the former compacted
        ledger."""
        self.shape.set_survivor_rows(compacted.rows)
        self.reader.compacted = compacted

    def removed_entries(self) -> Iterator[tuple[int, BitMap]]:
        """Yields, for each ledger of the topic, its id and the ids of the entries that compaction removed from it."""
        compacted = self.compacted
        if compacted is None:
            return
        horizon = compacted.horizon
        for span in self.shape.spans:
            if span.ledger_id > horizon[0]:
                break
            row = compacted.find_survivor_row(span.ledger_id)
            last = horizon[1] if span.ledger_id == horizon[0] else span.last_entry
            removed = BitMap(range(last + 1))
            if row is not None:
                removed -= row.survivors
            if removed:
                yield span.ledger_id, removed


P = ParamSpec("P")
R = TypeVar("R")
_LOG = logging.getLogger("magnetar.broker.log.compaction")

YIELD_AFTER_MESSAGES = 1000
"""After so many messages other tasks get a turn: one to three milliseconds of work."""
READ_ATTEMPTS_MAX, READ_RETRY_S = 10, 1.0
"""Tries of one read while bookies do not answer, and seconds between them; then the compaction has failed, and the next
one starts over."""


class CompactionProgress:
    """The progress of the running compaction; if none is running, of the last one. `step`: the name of the present
    step; `error`: why the compaction failed, "" if it did not; `looked_at`: the messages read so far, in all readings;
    `to_look_at`: an estimate of that number at the end; `rounds`: how often the log was read to find the survivors."""

    def __init__(self) -> None:
        self.state = CompactionState.NOT_RUN
        self.step = ""
        self.error = ""
        self.looked_at = 0  # messages read, in both passes
        self.to_look_at = 0
        self.rounds = 0


class Compaction:
    """The compaction of one topic. A StatefulTopicPart. `changed`: a function that is called when the topic has a new
    compacted ledger; `turn`: a semaphore that limits how many compactions run in the broker."""

    __slots__ = (
        "_changed", "_ledger_client", "_progress", "_replication", "_task", "_tasks", "_turn", "_view", "config", "log",
        "shown", "topic", "world",
    )  # fmt: skip

    def __init__(
        self, world: World, ledgers: LedgerClient, config: BrokerConfig, topic: TopicName, log: Log, *,
        replication: GetReplicationPolicy, changed: Callable[[], None], turn: asyncio.Semaphore | None = None,
    ) -> None:  # fmt: skip
        self.shown: ReadableLog = log
        self.topic = topic
        self.log = log
        self.world = world
        self.config = config
        self._ledger_client, self._replication = ledgers, replication
        self._changed = changed
        self._turn = turn or asyncio.Semaphore(1)
        self._task: asyncio.Task[MagnetarError | None] | None = None
        self._tasks: Tasks | None = None
        self._progress: CompactionProgress | None = None  # None, as those beside it: most topics are never compacted
        self._view: CompactedLogView | None = None

    @property
    def view(self) -> CompactedLogView:
        """Returns the log that consumers read if they ask for the compacted topic."""
        if self._view is None:
            self._view = CompactedLogView(self.log)
            if self.shown is not self.log:
                self._view.hide_uncommitted_entries(self.shown)
        return self._view

    @property
    def progress(self) -> CompactionProgress:
        """Returns the progress of the running compaction; if none is running, the progress of the last one."""
        if self._progress is None:
            self._progress = CompactionProgress()
        return self._progress

    @property
    def ledgers(self) -> TopicStateLedgers:
        """Returns the object that creates, opens and deletes the compacted ledgers of the topic."""
        return TopicStateLedgers(self._ledger_client, self.config, self._replication, self.topic, compacted="true")

    # ------------------------------------------------------------------ facts
    @property
    def record(self) -> CompactedLedgerInfo | None:
        """Returns the compacted ledger that the topic's record names; None if the topic was never compacted."""
        return self.log.record.compacted

    @property
    def shape(self) -> LogShape:
        """Returns the shape for consumers that read the compacted form of the topic; the shape of the log if the topic
        was never compacted."""
        return self.view.shape if self.record is not None else self.log.shape

    @property
    def is_running(self) -> bool:
        """Returns True while a compaction of the topic runs or waits for its turn."""
        return self._task is not None

    def hide_uncommitted_entries(self, log: ReadableLog) -> None:
        """From now on, compaction reads only committed entries, and readers of the compacted form get only committed
        entries. `log`: the view of the log that contains only committed entries."""
        view = self.view
        self.shown = log
        view.hide_uncommitted_entries(log)

    def trim_limit(self, applied: AppliedPolicies) -> TrimLimit | None:
        """Returns the position up to which compaction no longer needs the log. Returns None if it needs no part of the
        log: the topic was never compacted, no compaction is running, and the policy does not ask for one."""
        if self.record is not None:
            mark = Position(self.record.horizon_ledger, self.record.horizon_entry)
        elif self.is_running or applied.compaction_threshold_bytes:
            mark = self.log.shape.start_position
        else:
            return None
        return TrimLimit(mark, why=LedgerStays.NOT_COMPACTED)

    def list_own_ledgers(self) -> list[int]:
        """Returns the id of the compacted ledger, which must be deleted with the topic; [] if there is none."""
        return [self.record.ledger_id] if self.record is not None else []

    def estimate_uncompacted_bytes(self) -> int:
        """Returns an estimate of the bytes of the log that no compaction has read yet."""
        horizon = self.record
        size = 0.0
        for span in self.log.shape.spans:
            share = 1.0
            if horizon is not None and span.ledger_id <= horizon.horizon_ledger:
                looked = horizon.horizon_entry + 1 if span.ledger_id == horizon.horizon_ledger else span.last_entry + 1
                share = max(0.0, 1 - looked / max(1, span.last_entry + 1))
            size += span.size * share
        return int(size)

    # ------------------------------------------------------------------ life
    async def open(self, applied: AppliedPolicies) -> None:
        """Opens the compacted ledger that the topic's record names. The log must be taken over before. Raises DataLost
        if the ledger is lost, unless an operator has given it up (`SkipLostRequest`); Unavailable if bookies do not
        answer."""
        record = self.record
        if record is None:
            return
        self.progress.state = CompactionState.SUCCESS
        try:
            self.view.switch_compacted_ledger(await CompactedLedger.open(self.ledgers, record))
        except MagnetarError as error:
            if error.retryable:
                raise
            raise DataLost(
                f"topic {self.topic}: its compacted ledger {record.ledger_id} is lost ({error}): "
                f"'magnetar topics skip-lost {self.topic}' gives it up",
                topic=self.topic, ledger=record.ledger_id,
            ) from error

    def start(self, *, keeps_nothing: bool = False) -> bool:
        """Starts a task that compacts the topic, and returns True. Returns False, and starts none, if a compaction is
        running already. The outcome is in `progress`. `keeps_nothing`: no message survives."""
        if self._task is not None:
            return False
        self._progress = CompactionProgress()
        self._progress.state = CompactionState.RUNNING
        if self._tasks is None:
            self._tasks = Tasks()
        self._task = self._tasks.spawn(self._run(keeps_nothing=keeps_nothing), f"compaction of {self.topic}")
        self._task.add_done_callback(self._on_ended)
        return True

    def _on_ended(self, task: asyncio.Task[MagnetarError | None]) -> None:
        """Called when the task of a compaction has ended, also if it was cancelled before it began."""
        self._task = None
        if task.cancelled():
            self.progress.state, self.progress.error = CompactionState.ERROR, "stopped: the topic ended at this broker"

    def run_due_work(self, applied: AppliedPolicies) -> None:
        """Starts a compaction if the log has at least `compaction_threshold_bytes` bytes that no compaction has read (a
        policy; 0: never)."""
        threshold_bytes = applied.compaction_threshold_bytes
        if threshold_bytes and self.estimate_uncompacted_bytes() >= threshold_bytes:
            self.start()

    def check_not_running(self) -> None:
        """Raises Busy while a compaction of the topic runs or waits for its turn."""
        if self.is_running:
            raise Busy(f"topic {self.topic} is being compacted; try again when it is, see compaction-status")

    async def truncate(self, applied: AppliedPolicies) -> None:
        """Replaces the compacted form of the topic by an empty one up to the last stable position, so that its readers
        get no older message, and the log need not be kept for it. Does nothing if compaction needs no part of the log
        (`trim_limit`). Goes on if the caller is cancelled. Raises Busy if a compaction is running; Unavailable if the
        topic ends at this broker meanwhile; and the errors of the steps."""
        self.check_not_running()
        if self.trim_limit(applied) is None:
            return
        self.start(keeps_nothing=True)
        task = self._task
        assert task is not None, "it was started"
        await asyncio.wait([task])
        if task.cancelled():
            raise Unavailable(f"topic {self.topic} has ended at this broker; try again")
        if (error := task.result()) is not None:
            raise error

    async def wait_finished(self) -> None:
        """Waits until the compaction in progress, if any, has ended. Does not raise its error: `progress` has it."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """Cancels a running compaction, because the topic ends at this broker. The next owner of the topic deletes the
        unfinished ledger."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Cancels a running compaction, and waits until its tasks have ended."""
        if self._tasks is not None:
            self._tasks.cancel()
            await self._tasks.drain()

    async def _run(self, *, keeps_nothing: bool) -> MagnetarError | None:
        """Runs a compaction, and returns the error that ended it."""
        progress, failure = self.progress, None
        try:
            async with nullcontext() if keeps_nothing else self._turn:  # it reads nothing
                await CompactionRun(self, keeps_nothing=keeps_nothing).run()
            progress.state = CompactionState.SUCCESS
        except MagnetarError as error:
            _LOG.warning("%s: not compacted, in step %s: %s", self.topic, progress.step, error)
            failure = error
        except Exception as error:  # a fault of ours: the topic goes on without
            _LOG.exception("%s: compaction failed in step %s", self.topic, progress.step)
            failure = InternalError(repr(error))
        if failure is not None:
            progress.state, progress.error = CompactionState.ERROR, str(failure)
        return failure

    def on_published(self, compacted: CompactedLedger) -> None:
        """Called when the topic's record names a new compacted ledger: readers read from this ledger from now on."""
        self.view.switch_compacted_ledger(compacted)
        self._changed()


class CompactionRun:
    """One run of a compaction. It runs the `COMPACTION_STEPS` in their order. A step raises the error that ends the
    run, such as NotEnoughBookies, Unavailable, DataLost or TopicFenced. `keeps_nothing`: it reads nothing, and no
    message survives."""

    def __init__(self, of: Compaction, *, keeps_nothing: bool = False) -> None:
        self._of = of
        self._keeps_nothing = keeps_nothing
        self._log = of.log
        self._old = of.view.compacted
        self._shown = of.shown
        self._horizon = of.shown.shape.stable_position  # before any entry of an open transaction
        self._end_index = of.shown.shape.end_index
        self._survey = SurvivingMessageSearch(
            max(1, of.config.compaction_memory_bytes // KEY_OVERHEAD_BYTES), salt=of.world.rng.randbytes(16),
            retain_null_key=of.config.compaction_retain_null_key,
        )  # fmt: skip
        self._writer: LedgerWriter | None = None
        self._written: list[asyncio.Future[int]] = []
        self._rows: list[SurvivingEntriesRow] = []
        self._compacted: CompactedLedgerInfo | None = None
        self._entries = self._messages = self._size = 0
        self._breath = 0

    async def run(self) -> None:
        """Runs all steps of the compaction. Does nothing if no entry became stable since the last compaction, and the
        survivors of that are to survive. If a step fails, raises its error, after deleting the new ledger if it is
        certain that the topic's record does not name it."""
        old = self._old
        if self._horizon.entry_id < 0 or (old is not None and self._horizon <= old.horizon):  # nothing is new
            if old is None or not (self._keeps_nothing and old.entries):
                return
            self._horizon, self._end_index = old.horizon, old.record.end_index
        try:
            for step in COMPACTION_STEPS:
                self._of.progress.step = step.__name__
                await step(self)
        except BaseException as error:
            await self._give_up(error)
            raise

    async def _give_up(self, error: BaseException) -> None:
        """Stops writing the new ledger. Deletes it if the topic's record certainly does not name it as the compacted
        ledger; if that is not certain, the next owner of the topic decides."""
        writer, step = self._writer, self._of.progress.step
        if writer is None or step == "delete":
            return
        await writer.abandon()
        certain = step != "publish" or (isinstance(error, TopicFenced) and error.unwritten)
        if certain and isinstance(error, MagnetarError) and not isinstance(error, OutcomeUnknown):
            await self._of.ledgers.delete_ledgers(writer.ledger_id)

    # ------------------------------------------------------------------ the steps
    async def survey(self) -> None:
        """Step: finds the messages that survive. Reads the log once, or several times if the keys of all messages need
        more memory than the limit. Raises the errors of reading the log; if bookies do not answer, only after
        READ_ATTEMPTS_MAX attempts."""
        survey, progress = self._survey, self._of.progress
        while not survey.is_done:
            live = self._live()
            progress.to_look_at = progress.looked_at + 2 * live
            async for entries in self._read():
                for entry in entries:
                    await self._aside(entry, self._survey_entry, entry)
                    await self._breathe(entry.count)
            survey.finish_reading_round()
            progress.rounds = survey.rounds
        if survey.unreadable:
            _LOG.warning("%s: %d entries stay as they are: they cannot be parsed", self._of.topic, survey.unreadable)

    def _survey_entry(self, entry: StoredEntry) -> None:
        self._survey.add_entry(entry.first_index, entry.count, parse_entry(entry.payload))

    async def create(self) -> None:
        """Step: creates the new compacted ledger. Raises the errors of `TopicStateLedgers.create_ledger`."""
        self._writer = await self._of.ledgers.create_ledger()

    async def name(self) -> None:
        """Step: stores the id of the new ledger in the topic's record, so that the ledger can be deleted after a crash.
        Then deletes the ledgers that earlier unfinished runs left. Raises the errors of `TopicLog.commit_fields`."""
        record, writer = self._log.record, self._writer
        assert writer is not None, "a ledger was created"
        current = record.compacted.ledger_id if record.compacted is not None else -1
        before = [each for each in record.pending_deletion if each != current]
        await self._log.commit_fields(pending_deletion=(*before, writer.ledger_id))
        await self._of.ledgers.delete_ledgers(*before)

    async def copy(self) -> None:
        """Step: reads the log again, and appends the surviving entries to the new ledger. Raises the errors of reading
        the log (as `survey`), and those of an append to the new ledger (`LedgerWriter.append`)."""
        writer, survivors = self._writer, self._survey.survivors
        assert writer is not None, "a ledger was created"
        async for entries in self._read():
            for entry in entries:
                kept = await self._aside(entry, compact_entry, entry.payload, entry.first_index, entry.count, survivors)
                if kept is not None:
                    self._add_survivor(entry, len(kept))
                    self._append(encode_survivor(entry.position, kept))
                    if not writer.has_room:
                        await writer.wait_room()
                await self._breathe(entry.count)
            await self._stored()
        for piece in encode_survivor_table(self._rows):
            self._append(piece)
        await self._stored()

    async def close(self) -> None:
        """Step: closes the new ledger. Raises the errors of `LedgerWriter.close`."""
        assert self._writer is not None, "a ledger was created"
        await self._writer.close()

    async def publish(self) -> None:
        """Step: names the new ledger as the compacted ledger in the topic's record, in one commit. Opens the ledger
        first, to be sure that it can be read. Raises the errors of `CompactedLedger.open` and `TopicLog.commit_fields`.
        """
        log, writer = self._log, self._writer
        assert writer is not None, "a ledger was created"
        self._compacted = CompactedLedgerInfo(
            ledger_id=writer.ledger_id, horizon_ledger=self._horizon[0], horizon_entry=self._horizon[1],
            end_index=self._end_index, messages=len(self._survey.survivors), entries=self._entries, size=self._size,
            compacted_ms=self._of.world.clock.wall_ms(),
        )  # fmt: skip
        old = [self._old.record.ledger_id] if self._old is not None else []
        opening = await CompactedLedger.open(self._of.ledgers, self._compacted)  # what cannot be read is not published
        await log.commit_fields(compacted=self._compacted, pending_deletion=tuple(old))
        self._of.on_published(opening)

    async def delete(self) -> None:
        """Step: deletes the former compacted ledger, if there is one. If that fails, only logs the error."""
        if self._old is not None:
            await self._of.ledgers.delete_ledgers(self._old.record.ledger_id)

    # ------------------------------------------------------------------ reading and writing
    def _live(self) -> int:
        """Returns how many messages one reading of the log reads."""
        if self._keeps_nothing:
            return 0
        first = self._old.record.end_index if self._old is not None else self._log.shape.first_index
        return self._end_index - first + (self._old.record.messages if self._old is not None else 0)

    async def _read(self) -> AsyncIterator[list[StoredEntry]]:
        """Yields the survivors of the last compaction, and then the entries of the log up to the horizon."""
        if self._keeps_nothing:
            return
        old, bytes_max = self._old, self._of.config.read_bytes
        number = 0
        while old is not None and number < old.entries:
            entries = await self._tried(partial(old.read, number, bytes_max))
            number += len(entries)
            yield entries
        shape, reader = self._shown.shape, self._shown.reader
        position = (
            shape.position_after(old.horizon) if old is not None else shape.position_at_or_after(shape.start_position)
        )
        while (position := shape.next_unskipped_position(position)) <= self._horizon and shape.has_visible_entry(
            position
        ):
            entries = await self._tried(partial(reader.read, position, bytes_max))
            yield [entry for entry in entries if entry.position <= self._horizon]
            position = shape.position_after(entries[-1].position)

    async def _tried(self, read: Callable[[], Awaitable[list[StoredEntry]]]) -> list[StoredEntry]:
        """Calls `read` and returns its entries. Retries while bookies do not answer."""
        for left in reversed(range(READ_ATTEMPTS_MAX)):
            try:
                return await read()
            except MagnetarError as error:
                if not error.retryable or not left:
                    raise
            await asyncio.sleep(READ_RETRY_S)
        raise AssertionError("the last try returns or raises")

    def _aside(self, entry: StoredEntry, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        return run_in_thread_if_slow(entry.frames[-1], self._of.world, work, *args, **kwargs)

    async def _breathe(self, messages: int) -> None:
        """Counts messages that were read, and lets other tasks run after each YIELD_AFTER_MESSAGES messages."""
        self._of.progress.looked_at += messages
        self._breath += messages
        if self._breath >= YIELD_AFTER_MESSAGES:
            self._breath = 0
            await asyncio.sleep(0)

    def _append(self, record: bytes) -> None:
        assert self._writer is not None, "a ledger was created"
        self._written.append(self._writer.append(record))

    async def _stored(self) -> None:
        """Waits until all appended entries are stored."""
        written, self._written = self._written, []
        await asyncio.gather(*written)

    def _add_survivor(self, entry: StoredEntry, size: int) -> None:
        ledger_id, entry_id = entry.position
        if not self._rows or self._rows[-1].ledger_id != ledger_id:
            self._rows.append(self._row(ledger_id, entry))
        self._rows[-1].survivors.add(entry_id)
        self._entries += 1
        self._size += size

    def _row(self, ledger_id: int, entry: StoredEntry) -> SurvivingEntriesRow:
        span = self._log.shape.find_span_of_ledger(ledger_id)
        if span is not None:
            last = self._horizon[1] if ledger_id == self._horizon[0] else span.last_entry
            end_index = self._end_index if ledger_id == self._horizon[0] else span.end_index
            return SurvivingEntriesRow(ledger_id, last + 1, span.first_index, end_index, self._entries, BitMap())
        before = self._old.find_survivor_row(ledger_id) if self._old is not None else None
        if before is not None:
            return SurvivingEntriesRow(
                ledger_id, before.entries, before.first_index, before.end_index, self._entries, BitMap()
            )
        return SurvivingEntriesRow(
            ledger_id, entry.position[1] + 1, entry.first_index, entry.index + 1, self._entries, BitMap()
        )


COMPACTION_STEPS = (
    CompactionRun.survey, CompactionRun.create, CompactionRun.name, CompactionRun.copy, CompactionRun.close,
    CompactionRun.publish, CompactionRun.delete,
)  # fmt: skip
"""The order of a compaction."""
