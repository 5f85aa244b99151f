"""The log of a persistent topic: how a broker takes it over, which ledger it writes, and when it begins the next one.

**Take-over** happens in the order of `TAKE_OVER_STEPS` and nowhere else (ledger protocol §3.1; invariants 27, 28, 29):

    read_ledger_list   reads the topic's record with the list of ledgers
    recover_ledgers    recovers each ledger that is not known to be closed, the last one first: its writer is fenced for
                       good, and its end is known
    claim_ledger_list  changes the list by compare-and-set against the list that was read, with a claim that no other
                       owner has; from now on no other owner can add a ledger. The same commit closes the last ledger
    serve              begins to serve: no entry is confirmed, delivered or trimmed before

A write acknowledged by the old owner is in a ledger that was listed when it was claimed, and recovery keeps it: the
claim goes through only if the list is still what was read, so no ledger was added meanwhile. The old owner can confirm
nothing after its ledger was fenced, and cannot add another one after the claim. A crash between two steps leaves the
last ledger in recovery, or a claimed list of closed ones: the next take-over starts over.

A topic that was taken over has **no open ledger**, and needs none while no producer publishes. The first publish
switches to the first ledger of this owner, as a later one switches to the next. If the topic was written until just
now, its first producer does that (`TopicLog.create_first_ledger_early`).

**Switching** to the next ledger is one function, `_switch`, whether there was none, or the present one is full, old or
ended (§3.3). A ledger does not end when a bookie fails that can be replaced. The steps: stop sending → close the ledger
and learn its true end → create the next one and append it to the list, in one commit → confirm the publishes that the
old ledger has → send the others again, in order → continue. When a change of the list raises TopicFenced, all work
stops, and `on_lost` is called.

`TopicLog.close_idle_ledger` does the first half of these steps: it stores in the list where the ledger ended, and makes
no other one. The log is then as after a take-over: without a writer, and without anything that a next owner would have
to recover.

broker/log/managed_ledger.py changes the list of ledgers; broker/log/appender.py sends and confirms publishes.
**Back-pressure** is in broker/topic/producer.py.

Guarding tests: tests/broker/log/test_topic_log.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from pyroaring import BitMap

from ...ledger import LedgerClient
from ...metadata.records import LedgerRecord, TopicLedger, TopicRecord
from ...metadata.store import MetadataStore, NodeUpdate
from ...proto.entry import encode_broker_part
from ...proto.errors import (
    DataLost,
    InternalError,
    MagnetarError,
    OutcomeUnknown,
    TopicNotFound,
    Unavailable,
)
from ...proto.names import Position, TopicName
from ...proto.states import TopicState
from ...runtime.metrics import DURATION_BOUNDS, Histogram
from ...runtime.network import World
from ...runtime.tasks import Tasks, run_to_end
from ..common.config import BrokerConfig, GetReplicationPolicy, LedgerReplication
from ..common.refusals import PublishRefusal
from .appender import LogAppender, Publish, SlowPublishLog
from .cache import TailCache
from .log_queue_core import LogQueue
from .log_shape_core import get_allowed_striping_reduction
from .managed_ledger import MakeClaimUpdates, ManagedLedger, TopicFenced, make_no_extra_claims

_LOG = logging.getLogger("magnetar.broker.log")


RECENTLY_CLOSED_MS = 5000
"""Several times what a move of a topic between two brokers takes. A topic that is idle for longer has no ledger that is
written until somebody publishes."""


class TopicLog:
    """The log of a persistent topic, stored on bookies. Must be called from one event loop.

    `on_confirmed`: called after entries were confirmed, once for all that are confirmed together. `on_lost`: called at
    most once, when this broker can no longer serve the topic, such as when another broker owns it. `on_ledger_delayed`:
    called every WAIT_REPORT_INTERVAL_S seconds while publishes wait for a ledger, with the reason.
    """

    is_compacted = False

    def __init__(
        self, world: World, metadata: MetadataStore, ledgers: LedgerClient, cache: TailCache, config: BrokerConfig,
        topic: TopicName, *, replication: GetReplicationPolicy, on_confirmed: Callable[[], None],
        on_delayed: Callable[[Position, int], None], on_lost: Callable[[MagnetarError], None],
        owned: Callable[[], bool], publish_seconds: Histogram | None = None,
        on_ledger_delayed: Callable[[MagnetarError], None] = lambda error: None,
        claims: MakeClaimUpdates = make_no_extra_claims,
        slow_publishes: SlowPublishLog | None = None,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.state = TopicState.OPENING
        self._managed_ledger = ManagedLedger(
            world, metadata, ledgers, cache, topic, replication=replication,
            shrink=get_allowed_striping_reduction(degraded_writes=config.degraded_writes), claims=claims,
        )  # fmt: skip
        self._managed_ledger.on_ledger_delayed = on_ledger_delayed
        self.shape, self.reader, self._list = (
            self._managed_ledger.shape,
            self._managed_ledger.reader,
            self._managed_ledger.listed,
        )
        self.world = world
        self._config = config
        self._on_confirmed = on_confirmed
        self._on_lost = on_lost
        self._owned = owned
        self._changing = asyncio.Lock()  # one change of the list at a time
        self._closed: list[TopicLedger] = []  # of a take-over: the list as it was recovered
        self._switching: asyncio.Task[None] | None = None
        self._tasks = Tasks()
        self._appender = LogAppender(
            world.clock, self._managed_ledger, cache, config, self._tasks, on_confirmed=on_confirmed,
            on_delayed=on_delayed,
            on_stopped=self._start_switch, publish_seconds=publish_seconds or Histogram(DURATION_BOUNDS),
            slow_publishes=slow_publishes or SlowPublishLog(world.clock, 0.0),
        )  # fmt: skip

    def removed_entries(self) -> Iterable[tuple[int, BitMap]]:
        """Returns (), because compaction removes no entries from the log itself."""
        return ()

    # ------------------------------------------------------------------ take-over
    async def open(self, create: Callable[[], Awaitable[None]] | None = None) -> None:
        """Takes the topic over, so that only this broker writes to it. If the topic does not exist, awaits `create()`
        first, which creates it.

        Raises TopicNotFound if the topic does not exist and `create` is None; TopicFenced if another broker was faster;
        Unavailable, or another error of bookies and metadata, if they do not answer.
        """
        async with self._changing:
            try:
                await self._take_over()
                return
            except TopicNotFound:
                if create is None:
                    raise
            await create()
            await self._take_over()

    async def _take_over(self) -> None:
        for step in TAKE_OVER_STEPS:
            await step(self)

    async def read_ledger_list(self) -> None:
        """Step of a take-over: reads the topic's record with the list of ledgers. Raises TopicNotFound if there is no
        record; DataLost if it is damaged; and the errors of the metadata."""
        await self._managed_ledger.read_ledger_list()

    async def recover_ledgers(self) -> None:
        """Step of a take-over: fences and recovers each ledger that is not known to be closed. Raises the errors of
        `ManagedLedger.recover_ledgers`."""
        self._closed = await self._managed_ledger.recover_ledgers()

    async def claim_ledger_list(self) -> None:
        """Step of a take-over: stores the recovered list with a new claim. Raises TopicFenced if another broker was
        faster, and the other errors of `ManagedLedger.claim_ledger_list`."""
        await self._managed_ledger.claim_ledger_list(self._closed)

    async def serve(self) -> None:
        """Step of a take-over: from now on the log accepts publishes, unless the topic is terminated."""
        self._closed = []
        self._appender.queue = LogQueue(self.shape.end_index)
        self.state = TopicState.TERMINATED if self.record.terminated else TopicState.SERVING

    def _now_ms(self) -> int:
        """Returns the wall clock (ms since the epoch), but never a time before the last entry of this owner, even if
        the clock was set back. (Retention and searches by time need times that do not decrease.)"""
        return max(self.world.clock.wall_ms(), self._appender.timestamp_ms)

    # ------------------------------------------------------------------ publishing
    def publish(self, publish: Publish) -> None:
        """Queues an entry to be stored. Its publisher gets the outcome later. Raises TopicTerminated or NotOwner at
        once if the log accepts no entries."""
        state = self.state
        if state is not TopicState.SERVING and state is not TopicState.SWITCHING:
            raise self._refusal()
        appender, clock = self._appender, self.world.clock
        # never before an earlier entry's of this owner; the clock of the owner before may have been ahead
        now_ms = appender.timestamp_ms = max(clock.wall_ms(), appender.timestamp_ms)
        publish.arrived_s = clock.monotonic()
        appender.queue.add(publish, publish.count)
        # copied here, and for the disk
        stored = b"".join((encode_broker_part(publish.index, now_ms), publish.client_part))
        publish.timestamp_ms, publish.client_part = now_ms, b""
        publish.frames, publish.size = (stored,), len(stored)
        if state is TopicState.SERVING:
            appender.send_queued_publishes()

    def await_first_copy(self, publish: Publish) -> None:
        """Implements `Log.await_first_copy`."""
        self._appender.await_first_copy(publish)

    def _refusal(self) -> MagnetarError:
        if self.state is TopicState.TERMINATED:
            return PublishRefusal.TERMINATED.error(f"topic {self.topic} is terminated", topic=self.topic)
        return PublishRefusal.NOT_OWNER.error(
            f"topic {self.topic} is {self.state.value}; look it up again", topic=self.topic
        )

    # ------------------------------------------------------------------ the next ledger
    def _start_switch(self, draft: LedgerRecord | None = None, *, idle: bool = False) -> None:
        """`idle`: only ends the present ledger, if no publish comes meanwhile."""
        if self.state is TopicState.SERVING:
            self.state = TopicState.SWITCHING
            self._appender.queue.on_ledger_stopped()
            self._switching = self._tasks.spawn(self._switch(draft, idle=idle), "topic-log-switch")

    def create_first_ledger_early(self) -> None:
        """Creates the first ledger of this owner without waiting for a publish, if the last ledger was closed less than
        RECENTLY_CLOSED_MS milliseconds ago. Then the producers of the topic have probably moved to this broker, too,
        and publish in a moment."""
        last = self.record.ledgers[-1:]
        now_ms = self.world.clock.wall_ms()
        if self._appender.writer is None and last and now_ms - last[0].closed_ms < RECENTLY_CLOSED_MS:
            self._start_switch()

    async def roll_ledger(self) -> None:
        """Begins a new ledger although the present one is not full, so that trimming can delete the present one.
        Returns when the new ledger is open. Does nothing if the present ledger is empty, or the log is not serving.

        Chooses the bookies of the new ledger first. If there are not enough, raises NotEnoughBookies, and nothing has
        changed. Raises the errors of the metadata, too.
        """
        await run_to_end(self._roll())

    async def _roll(self) -> None:
        async with self._changing:
            empty = self.shape.last_position.entry_id < 0 or self.shape.tail_span.last_entry < 0
            if self.state is not TopicState.SERVING or empty:
                return
            draft = await self._managed_ledger.make_next_ledger_record()
            if self.state is not TopicState.SERVING:  # it began to switch, or to end, by itself
                return
            self._start_switch(draft)
        assert self._switching is not None, "a switch was started"
        await asyncio.wait([self._switching])

    @property
    def has_idle_ledger(self) -> bool:
        """Returns True if a ledger is open, and every publish has its outcome."""
        return (
            self.state is TopicState.SERVING and self._appender.writer is not None and not self._appender.queue
        )

    async def close_idle_ledger(self) -> None:
        """Closes the ledger that is being written, and begins no other: the next publish does. So a log that is not
        written takes less memory, and its next owner has nothing to recover. Returns when the ledger is closed. If a
        publish comes meanwhile, the log switches to the next ledger. Does nothing unless `has_idle_ledger`."""
        if self.has_idle_ledger:
            self._start_switch(idle=True)
            assert self._switching is not None, "a switch was started"
            await asyncio.wait([self._switching])

    async def _switch(self, draft: LedgerRecord | None, *, idle: bool) -> None:
        try:
            async with asyncio.timeout(self._config.reroute_timeout_s), self._changing:
                last_entry = await self._end_ledger()
                if not idle or not await self._end_without_next(last_entry):
                    await self._next_ledger(last_entry, draft)
        except TimeoutError:
            why = f": {self._managed_ledger.waits_for}" if self._managed_ledger.waits_for else ""
            self.abandon(
                Unavailable(f"topic {self.topic}: no new ledger within {self._config.reroute_timeout_s} s{why}")
            )
        except MagnetarError as error:
            self.abandon(error)
        except Exception as error:  # a fault of ours must not leave the topic between two ledgers for ever
            _LOG.exception("%s: the switch to the next ledger failed", self.topic)
            self.abandon(InternalError(f"topic {self.topic}: the switch to the next ledger failed: {error!r}"))
        finally:
            if self._switching is asyncio.current_task():
                self._switching = None  # a task that has ended takes 0.6 KB

    async def _end_ledger(self) -> int:
        """Closes the ledger that is being written, or finds out where another process closed it. Returns the id of its
        last entry; -1 if no ledger is being written. Raises DataLost if a confirmed entry is missing."""
        writer = self._appender.writer
        if writer is None:
            return -1
        span = self.shape.tail_span
        last_entry, length = await self._managed_ledger.end_ledger(writer, self._owned)
        if last_entry < span.last_entry:
            raise DataLost(f"ledger {writer.ledger_id} was closed at {last_entry}, before {span.last_entry}")
        span.size = max(span.size, length)
        return last_entry

    async def _end_without_next(self, last_entry: int) -> bool:
        """Stores in the list where the last ledger ended, and adds no other. Returns False, for the caller to add one,
        if a publish waits for it, or if it is not certain that the list was changed."""
        _, ended = self._appender.end_ledger(last_entry)
        if self._appender.queue or ended is None:
            return False
        try:
            await self._managed_ledger.commit_closed_last_ledger(ended, terminated=None)
        except MagnetarError as error:
            if isinstance(error, TopicFenced) or not error.retryable:
                raise
            return False
        self._managed_ledger.close_last_ledger_in_shape(ended)
        self._appender.remove_ledger()
        _LOG.debug("%s: ledger %d is closed: nothing was published for long", self.topic, ended.ledger_id)
        if self.state is TopicState.SWITCHING:
            self.state = TopicState.SERVING
        if self._appender.queue:  # publishes that came during the commit
            self._start_switch()
        return True

    async def _next_ledger(self, last_entry: int, draft: LedgerRecord | None) -> None:
        """Adds a new ledger to the list. Then confirms the publishes that the old ledger has stored, and sends the
        others to the new one."""
        stored, ended = self._appender.end_ledger(last_entry)
        end_index = ended.end_index if ended is not None else self.shape.end_index
        try:
            writer, empty = await self._managed_ledger.add_ledger_with_retries(
                draft, end_index=end_index, created_ms=self._now_ms(), ended=ended
            )
        except BaseException:
            for queued in stored:
                queued.publisher.on_failed(queued, self._unknown())
            raise
        self._appender.confirm_publishes(stored)
        if ended is not None:
            self._managed_ledger.close_last_ledger_in_shape(ended)
        await self._managed_ledger.apply_added_ledger(writer, end_index, empty)
        self._appender.start_ledger(writer)
        _LOG.debug(
            "%s: ledger %d begins at index %d, at bookies %s; before it: %s", self.topic, writer.ledger_id, end_index,
            ", ".join(writer.record.fragments[-1].bookies),
            "none of this owner" if ended is None else f"ledger {ended.ledger_id}, {ended.size} bytes",
        )  # fmt: skip
        if self.state is TopicState.SWITCHING:
            self.state = TopicState.SERVING
        self._appender.send_queued_publishes()
        self._on_confirmed()

    def _unknown(self) -> MagnetarError:
        return OutcomeUnknown(f"topic {self.topic} was lost while the entry was on its way", topic=self.topic)

    def abandon(self, error: MagnetarError) -> None:
        """Stops all work at once, because another broker owns the topic, or because this broker cannot serve it, and
        calls `on_lost`. The publishes in flight fail, and it is not known whether their entries are stored. Does
        nothing after the log was closed or abandoned."""
        if self.state in (TopicState.LOST, TopicState.CLOSED):
            return
        _LOG.warning("%s: given up: %s", self.topic, error)
        self.state = TopicState.LOST
        for queued in self._appender.take_all_publishes():
            queued.publisher.on_failed(queued, self._unknown())
        if self._switching is not None and self._switching is not asyncio.current_task():
            self._switching.cancel()  # or it makes a ledger, and puts it into a list of another owner
        if self._appender.writer is not None:
            self._tasks.spawn(self._appender.writer.abandon(), "topic-log-abandon")
        self._on_lost(error)

    async def is_still_owned(self) -> bool:
        """Returns True if no other broker has taken the topic over. (A broker that does so changes the stored list of
        ledgers.) Returns True without a look while this broker changes the list: the change would fail. Raises the
        error of the metadata store if the list cannot be read."""
        if self._changing.locked():
            return True  # a broker that changes the list now finds out
        async with self._changing:
            return await self._managed_ledger.is_still_owned()

    # ------------------------------------------------------------------ trimming, sealing, closing
    async def trim_ledgers(self, choose: Callable[[], list[int]]) -> list[int]:
        """Calls the function `choose`, removes the ledgers whose ids it returns from the list, and then deletes them.
        Returns the ids of the removed ledgers. The list does not change while `choose` runs. Deletes nothing unless it
        is certain that the list was changed. Never deletes the last ledger. Returns [] if there is nothing to delete,
        or the log is neither serving nor terminated. If another broker owns the topic, abandons the log and returns [].
        Raises the other errors of `ManagedLedger.remove_ledgers`."""
        async with self._changing:
            gone = [ledger_id for ledger_id in choose() if ledger_id != self.shape.tail_span.ledger_id]
            if not gone or self.state not in (TopicState.SERVING, TopicState.TERMINATED):
                return []
            try:
                await run_to_end(self._managed_ledger.remove_ledgers(gone))
            except TopicFenced as error:
                self.abandon(error)
                return []
            return gone

    async def commit_fields(
        self, *, together: Sequence[NodeUpdate] = (), within: bool = False,
        decide: Callable[[TopicRecord], Mapping[str, object]] | None = None, **fields: object,
    ) -> None:  # fmt: skip
        """Stores new values of the given `fields` of the topic's record, and makes the changes `together` in the same
        commit. `decide`: returns further fields, from the record as it is when its turn comes; the list of ledgers does
        not change between that and the commit. `within`: True if the caller runs in a task that is never cancelled
        (runtime/tasks.py); else a new task makes the commit. Raises TopicFenced if another broker owns the topic (the
        log is abandoned then); NotOwner if the log is closed or abandoned; and any error that a change of `together`
        raises. After any other error the outcome is unknown."""
        async with self._changing:
            if self.state not in (TopicState.SERVING, TopicState.SWITCHING, TopicState.TERMINATED):
                raise self._refusal()
            further = {} if decide is None else decide(self.record)
            try:
                noting = self._managed_ledger.commit_fields(together, **fields, **further)
                await (noting if within else run_to_end(noting))
            except TopicFenced as error:
                self.abandon(error)
                raise

    async def terminate(self) -> Position:
        """Waits until the publishes in flight have their outcomes, and then terminates the topic. Returns the position
        of its last entry. Idempotent. Raises Unavailable if that takes more than `close_timeout_s` seconds; TopicFenced
        if another broker owns the topic; DataLost if the closed ledger lacks a confirmed entry. The log is abandoned
        then. Raises NotOwner if it was closed or abandoned before."""
        if self.state is not TopicState.TERMINATED:
            await run_to_end(self._finish(TopicState.TERMINATED))
        return self.shape.last_position

    async def close(self) -> None:
        """Closes the log in order: confirms the publishes in flight, closes the ledger, and stores the ledger's last
        entry in the list. Idempotent. Raises the errors of `terminate`; the log is abandoned then."""
        if self.state in (TopicState.SERVING, TopicState.SWITCHING, TopicState.CLOSING):
            await run_to_end(self._finish(TopicState.CLOSED))
        await self._tasks.drain()
        if self.state is not TopicState.LOST:
            self.state = TopicState.CLOSED

    async def _finish(self, final: TopicState) -> None:
        """Accepts no more publishes, confirms those that are stored, and stores in the list where the last ledger ends.
        `final`: the state of the log after that.

        Waits first until a switch to another ledger has ended; no further switch begins. If another broker takes the
        topic over meanwhile, writes nothing more, because the list may name a ledger that this owner never began.
        """
        if self.state in (TopicState.SERVING, TopicState.SWITCHING):
            self.state = TopicState.CLOSING
        if self._switching is not None:
            await asyncio.wait([self._switching])
        try:
            async with asyncio.timeout(self._config.close_timeout_s), self._changing:
                if self.state is TopicState.CLOSING:  # else it is lost, or another call has ended it
                    await self._end_list(terminated=final is TopicState.TERMINATED)
                if self.state is TopicState.CLOSING:
                    for queued in self._appender.take_all_publishes():  # certainly not in the ledger, which is closed
                        queued.publisher.on_failed(queued, self._refusal())
                    self.state = final
        except TimeoutError:
            error = Unavailable(f"topic {self.topic} did not end within {self._config.close_timeout_s} s")
            self.abandon(error)
            raise error from None
        except MagnetarError as error:
            self.abandon(error)
            raise
        if self.state not in (TopicState.TERMINATED, final):
            raise self._refusal()
        self._on_confirmed()

    async def _end_list(self, *, terminated: bool) -> None:
        self._appender.queue.on_ledger_stopped()
        last_entry = await self._end_ledger()
        stored, ended = self._appender.end_ledger(last_entry)
        self._appender.confirm_publishes(stored)
        if ended is not None:
            self._managed_ledger.close_last_ledger_in_shape(ended)
            await self._managed_ledger.commit_closed_last_ledger(ended, terminated=terminated or None)
        elif terminated:
            await self._managed_ledger.terminate()

    # ------------------------------------------------------------------ questions
    @property
    def replication(self) -> LedgerReplication | None:
        """Returns the replication (the quorums) of the ledger that this owner of the topic is writing or wrote last;
        None if it has created no ledger."""
        return self._appender.replication

    @property
    def wanted_replication(self) -> LedgerReplication:
        """Returns the replication that the policy demanded when the present ledger was created;
        NO_REPLICATION_REQUESTED if this owner has created none. (The ledger may have less, if bookies were missing.)"""
        return self._managed_ledger.wanted_replication

    @property
    def is_degraded(self) -> bool:
        """Returns True if the ledger that is being written has fewer bookies, or fewer copies, than the policy asks
        for."""
        return self.state in (TopicState.SERVING, TopicState.SWITCHING) and self._appender.is_degraded

    @property
    def next_index(self) -> int:
        """Returns the index that the next message gets."""
        return self._appender.queue.end_index

    @property
    def pending_entries(self) -> int:
        """Returns the number of entries that were published and are not confirmed yet."""
        return len(self._appender.queue)

    @property
    def last_published_ms(self) -> int:
        return self._appender.timestamp_ms

    @property
    def ledger_age_s(self) -> float:
        """Returns the age, in seconds, of the ledger that is being written, or of the last one if none is being
        written; 0 if there is no ledger."""
        ledgers = self.record.ledgers
        return (self.world.clock.wall_ms() - ledgers[-1].created_ms) / 1000 if ledgers else 0.0

    @property
    def record(self) -> TopicRecord:
        return self._list.record

    @property
    def ensemble(self) -> dict[int, tuple[str, ...]]:
        """Returns a mapping with one item: the id of the ledger that is being written, and the names of its bookies.
        Empty if no ledger is being written."""
        if self._appender.writer is None:
            return {}
        return {self._appender.writer.ledger_id: self._appender.writer.record.fragments[-1].bookies}


TAKE_OVER_STEPS = (TopicLog.read_ledger_list, TopicLog.recover_ledgers, TopicLog.claim_ledger_list, TopicLog.serve)
"""The order of a take-over."""
