"""Maintenance of a loaded topic: finds what is due and does it. Drives admission_core.py and
broker/log/log_shape_core.py.

    maintenance = TopicMaintenance(topic, …)
    await maintenance.run_due_work()        does all that is due, in the order of `MAINTENANCE_STEPS`
    maintenance.must_pause_producers()      True: producers get no credit, because the backlog quota is exceeded
    maintenance.why_publish_refused()       the error that a publish gets for that reason; None: it is accepted

Order: expired messages are acknowledged first, so that the quota counts only the others, and trimming deletes the
ledgers that both have released. Expiry (A15) checks no message one by one: it finds the first entry that arrived after
the limit by bisection over the entries' timestamps, and moves the mark to just before it. The arrival time of a
subscription's oldest message is read once per mark and kept in memory. Nothing here has a timer of its own; a topic in
which nothing is due costs no read, no task and some microseconds (`TopicMaintenance.has_due_work`).
Guarding tests: tests/broker/topic/test_maintenance.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...proto.errors import MagnetarError
from ...proto.names import Position
from ...proto.states import BacklogQuotaState, TopicState, TopicStays
from ...runtime.alarm import EventLoopSlices
from ...runtime.clock import Clock
from ...runtime.network import World
from ...runtime.tasks import run_together
from ..common.refusals import PublishRefusal
from ..log.log_shape_core import find_trimmable_ledgers
from ..subscription.dead_letters import find_remaining_chunks
from ..subscription.subscription import Subscription
from .admission_core import (
    TopicUse,
    compute_backlog_bytes,
    compute_release_delay_s,
    estimate_delayed_bytes,
    find_mark_for_backlog_bytes,
    is_topic_inactive,
    judge_backlog_quota,
    must_roll_ledger,
    why_topic_stays,
)

if TYPE_CHECKING:
    from ..subscription.cursors import DurableCursor
    from .topic import Topic

_LOG = logging.getLogger("magnetar.broker.topic")


_REFUSALS = {
    BacklogQuotaState.REFUSE: PublishRefusal.QUOTA,
    BacklogQuotaState.STORAGE_REFUSE: PublishRefusal.STORAGE,
}


class TopicMaintenance:
    """The maintenance of one loaded topic, which runs from time to time: expires messages, applies the backlog quota,
    trims ledgers, deletes idle subscriptions. `expired`, `evicted`: how many entries were acknowledged since the topic
    was loaded because of their age, and because of the quota; `quota`: the present reaction to the backlog, or to a
    limit of stored bytes of the namespace or the tenant; None if there is none."""

    __slots__ = (
        "_ages", "_backlog_state", "_evicts", "_idle", "_messages_in", "_quiet_since", "_storage_state", "_topic",
        "_unused_since", "_world", "asked_s", "evicted", "expired", "quota", "roll_idle_s", "unload_idle_s",
    )  # fmt: skip

    def __init__(self, world: World, topic: Topic, roll_idle_s: float, unload_idle_s: float) -> None:
        self._world = world
        self._topic = topic
        self.roll_idle_s, self.unload_idle_s = roll_idle_s, unload_idle_s
        self.quota: BacklogQuotaState | None = None  # the stronger one of the next two
        self._backlog_state: BacklogQuotaState | None = None
        self._storage_state: BacklogQuotaState | None = None
        self.expired = 0  # entries that were not acknowledged in time …
        self.evicted = 0  # … or that were evicted because of the quota
        self._evicts = False  # the previous pass evicted: it is logged once
        now = world.clock.monotonic()
        self._unused_since = self._quiet_since = now
        self.asked_s = now  # when a call last asked this broker for the topic, by the monotonic clock
        self._messages_in = 0
        self._idle: dict[str, float] = {}  # unused subscription → since when
        self._ages: dict[str, tuple[Position, int]] = {}  # subscription → its first open entry, and when it arrived

    # ------------------------------------------------------------------ answers
    def must_pause_producers(self) -> bool:
        """Returns True if producers must wait, because the backlog has reached the quota, or the namespace or the
        tenant stores as many bytes as it may, and the policy says so. The caller then grants producers no credit (bytes
        that they may publish)."""
        return self.quota is BacklogQuotaState.HOLD or self.quota is BacklogQuotaState.STORAGE_HOLD

    @property
    def holds_for_backlog(self) -> bool:
        """Returns True if producers wait because of this topic's own backlog: its maintenance finds out when there is
        room."""
        return self._backlog_state is BacklogQuotaState.HOLD

    def why_publish_refused(self) -> MagnetarError | None:
        """Returns the error with which the topic refuses publishes because the backlog has reached the quota, or the
        namespace or the tenant stores as many bytes as it may; None if the topic does not refuse them. Each returned
        error is counted as a refusal."""
        refusal = _REFUSALS.get(self.quota) if self.quota is not None else None
        if refusal is None or self.quota is None:
            return None
        return refusal.error(f"topic {self._topic.name}: {self.quota.value}", topic=self._topic.name)

    def on_topic_used(self) -> None:
        """Called when a producer or a consumer opens the topic. The topic counts as used at this time, even if the
        client leaves again before `is_inactive` is called."""
        self._unused_since = self._world.clock.monotonic()

    def is_inactive(self) -> bool:
        """Returns True if the topic has been unused for so long that the policy demands to delete it. The topic is used
        while a producer or a consumer is connected, or a transaction is open. The time without use is only as exact as
        the calls of this method and of `on_topic_used`."""
        topic, now = self._topic, self._world.clock.monotonic()
        if not topic.applied.inactive_s:
            self._unused_since = now  # the time begins when a policy asks for it
            return False
        if topic.has_clients or topic.transactions.open_transactions:
            self._unused_since = now
        durable = self._durable()
        return is_topic_inactive(
            topic.applied, users=topic.connected_client_count, subscriptions=len(durable),
            unused_s=now - self._unused_since,
            backlog=any(topic.shown.shape.has_readable_entry_after(each.cursor.mark) for each in durable),
        )  # fmt: skip

    def why_stays_loaded(self, unload_idle_s: float) -> TopicStays | None:
        """Returns the reason why the topic stays loaded; None if it may be unloaded. `unload_idle_s`: for how many
        seconds it must not have been used; 0: it is never unloaded. The time without use is only as exact as the calls
        of this method."""
        topic, now = self._topic, self._world.clock.monotonic()
        if clients := topic.has_clients:
            self.asked_s = now
        if not unload_idle_s or now - self.asked_s < unload_idle_s:  # the usual case, before anything else is read
            return TopicStays.CLIENTS if clients else TopicStays.USED if unload_idle_s else TopicStays.NOT_UNLOADED
        durable, shape = self._durable(), topic.log.shape
        use = TopicUse(
            topic.name.persistent, topic.connected_client_count, now - self.asked_s,
            transactions=any((topic.transactions.open_transactions, *(each.pending_transactions for each in durable))),
            backlog=any(shape.has_readable_entry_after(each.cursor.mark) for each in durable),
            work=topic.compaction.is_running or topic.key_indexes.is_building
            or topic.log.state not in (TopicState.SERVING, TopicState.TERMINATED),
            subscriptions=len(durable), bytes=shape.size,
        )  # fmt: skip
        return why_topic_stays(use, topic.applied, topic.retention_without_subscriptions(), unload_idle_s)

    def find_release_time_s(self) -> float:
        """Returns when retention will keep no message of an idle topic any more, by the monotonic clock; infinity if it
        has none, or time releases none."""
        topic = self._topic
        if not topic.log.shape.size:
            return math.inf
        delay_s = compute_release_delay_s(topic.applied, topic.retention_without_subscriptions())
        return self._world.clock.monotonic() + delay_s

    # ------------------------------------------------------------------ a look
    def has_due_work(self) -> bool:
        """Returns False if `run_due_work` would do nothing now; then the caller need not call it, and this call has
        started what is due of the topic's parts. Costs some microseconds: of very many topics few have anything due.
        Returns True if it cannot tell."""
        topic = self._topic
        if topic.log.state not in (TopicState.SERVING, TopicState.TERMINATED):
            return False
        try:
            if self._may_expire() or self._may_change_subscriptions() or self._must_roll() or self._find_trimmable():
                return True
            if self._has_idle_ledgers():
                return True
            for part in topic.parts:
                part.run_due_work(topic.applied)
        except Exception:  # the step that fails logs it
            return True
        return False

    def _may_expire(self) -> bool:
        """Returns True if messages may be too old, or the backlog may have reached its quota."""
        topic, applied, shape = self._topic, self._topic.applied, self._topic.log.shape
        if self._backlog_state is not None or self._evicts:
            return True
        limited = applied.message_ttl_s or applied.backlog_quota_s or 0 < applied.backlog_quota_bytes <= shape.size
        return bool(limited) and any(
            each.is_durable and shape.has_readable_entry_after(each.cursor.mark)
            for each in topic.subscriptions.values()
        )

    def _may_change_subscriptions(self) -> bool:
        """Returns True if subscriptions may have been unused for too long, or may have slots of keys that wait."""
        topic = self._topic
        if self._idle or topic.applied.subscription_expiration_s or len(self._ages) > len(topic.subscriptions):
            return True
        return any(each.consumers and each.dispatcher.policy.by_keys for each in topic.subscriptions.values())

    def _find_trimmable(self) -> bool:
        """Returns True if a ledger may be trimmed now."""
        topic, shape = self._topic, self._topic.log.shape
        if len(shape) < 2:  # the last one stays
            return False
        kept = topic.retention(), self._world.clock.wall_ms(), topic.retention_without_subscriptions()
        return find_trimmable_ledgers(shape, topic.trim_limits(), *kept) != []

    async def run_due_work(self) -> None:
        """Runs all maintenance `MAINTENANCE_STEPS`. If a step fails, logs the error and continues with the next step:
        bookies that do not answer must not prevent trimming. Stops before the next step when the topic is no longer
        served here."""
        for step in MAINTENANCE_STEPS:
            if self._topic.log.state not in (TopicState.SERVING, TopicState.TERMINATED):
                return
            try:
                await step(self)
            except MagnetarError as error:
                _LOG.warning("%s: %s: %s", self._topic.name, step.__name__.replace("_", " "), error)
            except Exception:  # a fault in one step must not keep the others, and other topics, from being done
                _LOG.exception("%s: %s", self._topic.name, step.__name__.replace("_", " "))

    def _durable(self) -> list[Subscription]:
        return [each for each in self._topic.subscriptions.values() if each.is_durable]

    async def expire_messages(self) -> None:
        """Acknowledges, for each durable subscription, the messages that are older than the time to live (TTL) of the
        policy. Does nothing if the policy has none. Raises the errors of reading the log."""
        ttl_s = self._topic.applied.message_ttl_s
        if ttl_s:
            for subscription in self._durable():
                self.expired += await self.expire_messages_older_than(subscription, ttl_s)

    async def expire_messages_older_than(self, subscription: Subscription, seconds: float) -> int:
        """Acknowledges, for the subscription, the messages that arrived more than `seconds` ago. Returns an estimate of
        the number of entries that were not acknowledged before. Does not wait until the acknowledgements are durable.
        Raises the errors of reading the log."""
        limit_ms = self._world.clock.wall_ms() - int(seconds * 1000)
        oldest_ms = await self.oldest_arrival_ms(subscription)
        if oldest_ms is None or oldest_ms >= limit_ms:
            return 0
        log = self._topic.readable_log(uncommitted=subscription.reads_uncommitted)
        place = await log.reader.find_position_by_time(limit_ms)
        subscription.activity.expired_ms = self._world.clock.wall_ms()
        return await self.skip_whole_messages(subscription, log.shape.position_before(place.position))

    async def skip_whole_messages(self, subscription: Subscription, mark: Position) -> int:
        """Acknowledges everything up to `mark` for the subscription. If a chunked message has chunks on both sides of
        `mark`, also acknowledges its later chunks. Returns an estimate of the entries up to `mark` that were not
        acknowledged before. Raises the errors of reading the log."""
        entries = self.skip_up_to(subscription, mark)
        if entries:
            log = self._topic.readable_log(uncommitted=subscription.reads_uncommitted)
            subscription.skip_entries(await find_remaining_chunks(log, mark))
        return entries

    def skip_up_to(self, subscription: Subscription, mark: Position) -> int:
        """Acknowledges everything up to `mark` for the subscription, except what is pending in a transaction. Returns
        an estimate of the entries that were not acknowledged before."""
        before = subscription.cursor.mark
        if mark.entry_id < 0 or mark <= before:
            return 0
        entries = sum(
            max(0, (mark[1] if span.ledger_id == mark[0] else span.last_entry)
                - (before[1] if span.ledger_id == before[0] else -1))
            for span in self._topic.log.shape.spans if before[0] <= span.ledger_id <= mark[0]
        )  # fmt: skip
        holes = subscription.cursor.hole_entry_count if subscription.cursor.pending is not None else None
        subscription.skip_up_to(mark)
        if holes is not None and subscription.cursor.mark < mark:  # what is pending in a transaction stays
            return max(0, subscription.cursor.hole_entry_count - holes)
        return entries

    async def oldest_arrival_ms(self, subscription: Subscription) -> int | None:
        """Returns the arrival time (ms since the epoch) of the subscription's oldest unacknowledged message; None if
        there is none. Reads the entry if its time is not in memory. Raises the errors of reading the log."""
        log = self._topic.readable_log(uncommitted=subscription.reads_uncommitted)
        position = log.shape.next_unskipped_position(log.shape.position_after(subscription.cursor.mark))
        if not log.shape.has_visible_entry(position):
            return None
        known = self._ages.get(subscription.name)
        if known is None or known[0] != position:
            known = self._ages[subscription.name] = position, (await log.reader.read_entry(position)).timestamp_ms
        return known[1]

    def oldest_arrival_ms_in_memory(self, subscription: Subscription) -> int:
        """Returns the arrival time (ms since the epoch) of the subscription's oldest unacknowledged message, without
        reading an entry. If the time is not in memory, returns the time that was read last, even if its message was
        acknowledged since; 0 if no time was read, or if there is no unacknowledged message."""
        log = self._topic.readable_log(uncommitted=subscription.reads_uncommitted)
        position = log.shape.next_unskipped_position(log.shape.position_after(subscription.cursor.mark))
        if not log.shape.has_visible_entry(position):
            return 0
        known = self._ages.get(subscription.name)
        if known is None or known[0] != position:
            entry = log.reader.get(position)
            if entry is None:
                return known[1] if known is not None else 0
            known = self._ages[subscription.name] = position, entry.timestamp_ms
        return known[1]

    async def apply_backlog_quota(self) -> None:
        """Checks the backlog quota. If the backlog has reached the quota, reacts as the policy says: producers wait,
        publishes are refused, or the oldest messages are acknowledged. The quota does not apply to a topic without
        durable subscriptions. Raises the errors of reading the log."""
        applied, shape, durable = self._topic.applied, self._topic.log.shape, self._durable()
        logged, self._evicts = self._evicts, False
        if not (applied.backlog_quota_bytes or applied.backlog_quota_s) or not durable:
            self._decide(None)
            return
        slowest = min(durable, key=lambda each: each.cursor.mark)
        oldest_ms = await self.oldest_arrival_ms(slowest) if applied.backlog_quota_s else None
        age_s = (self._world.clock.wall_ms() - oldest_ms) / 1000 if oldest_ms is not None else 0.0
        backlog = compute_backlog_bytes(shape, slowest.cursor.mark)
        if not applied.backlog_quota_counts_delayed and slowest.delayed is not None:
            backlog -= estimate_delayed_bytes(shape, slowest.delayed.core.count_delayed_entries)
        quota = judge_backlog_quota(applied, backlog, age_s)
        if quota is BacklogQuotaState.EVICT:
            before = self.evicted
            try:
                for subscription in durable:
                    await self._evict(subscription)
            finally:  # what was given up is logged, also when another subscription fails
                evicted = self.evicted - before
                self._evicts = logged or evicted > 0
                if evicted and not logged:
                    _LOG.warning("%s: %s: %d entries so far", self._topic.name, quota.value, evicted)
            quota = None
        self._decide(quota)

    async def _evict(self, subscription: Subscription) -> None:
        """Acknowledges the subscription's oldest messages, until its backlog no longer exceeds the quota."""
        topic, applied = self._topic, self._topic.applied
        if applied.backlog_quota_bytes:
            mark = min(
                find_mark_for_backlog_bytes(topic.log.shape, applied.backlog_quota_bytes),
                topic.shown.shape.stable_position,
            )
            self.evicted += await self.skip_whole_messages(subscription, mark)
        if applied.backlog_quota_s:
            self.evicted += await self.expire_messages_older_than(subscription, applied.backlog_quota_s)

    def _decide(self, quota: BacklogQuotaState | None) -> None:
        if quota is self._backlog_state:
            return
        self._backlog_state = quota
        if quota is not None:
            _LOG.warning("%s: %s", self._topic.name, quota.value)
        else:
            _LOG.info("%s: the backlog quota is met again", self._topic.name)
        self._choose_quota()

    def set_storage_state(self, state: BacklogQuotaState | None) -> None:
        """Sets what happens because of a limit of stored bytes of the namespace or the tenant; None: nothing."""
        if state is not self._storage_state:
            self._storage_state = state
            self._choose_quota()

    def _choose_quota(self) -> None:
        before, states = self.quota, (self._backlog_state, self._storage_state)
        self.quota = next((each for each in states if each in _REFUSALS), states[0] or states[1])
        if before is not None and self.quota is not before:
            self._topic.on_backlog_quota_changed()

    async def run_due_work_of_parts(self) -> None:
        """Calls `StatefulTopicPart.run_due_work` of each part of the topic (deduplication, transactions, compaction and
        key indexes), which starts the work that is due."""
        for part in self._topic.parts:
            part.run_due_work(self._topic.applied)

    async def roll_ledger(self) -> None:
        """Begins a new ledger if the present one is idle or old, so that trimming can delete the present one; or if the
        policy `durability` has changed since it began. Raises the errors of `TopicLog.roll_ledger`."""
        if self._must_roll():
            await self._topic.log.roll_ledger()

    def _must_roll(self) -> bool:
        """Returns True if the topic must begin a new ledger now."""
        topic, log, now = self._topic, self._topic.log, self._world.clock.monotonic()
        if log.shape.end_index != self._messages_in:
            self._messages_in, self._quiet_since = log.shape.end_index, now
        if log.state is not TopicState.SERVING or log.shape.last_position.entry_id < 0:
            return False
        written = log.replication
        if written is not None and written.unsynced != topic.is_durable_in_memory:
            return True
        return must_roll_ledger(
            topic.name, log.shape, topic.applied, topic.trim_limits(), quiet_s=now - self._quiet_since,
            age_s=log.ledger_age_s, idle_s=self.roll_idle_s, now_ms=self._world.clock.wall_ms(),
            unread=topic.retention_without_subscriptions(),
        )  # fmt: skip

    def _has_idle_ledgers(self) -> bool:
        """Returns True if a ledger of the topic or of a subscription is open, and was not written for
        `unload_idle_s`. Counts from the last call of `_must_roll` that found new messages."""
        now = self._world.clock.monotonic()
        if not self.unload_idle_s or now - self._quiet_since < self.unload_idle_s:
            return False
        return self._topic.log.has_idle_ledger or any(self._find_idle_cursors())

    def _find_idle_cursors(self) -> list[DurableCursor]:
        limit_s = self.unload_idle_s
        stores = [each.store for each in self._topic.subscriptions.values()]
        return [each for each in stores if each is not None and each.has_idle_ledger(limit_s)]

    async def close_idle_ledgers(self) -> None:
        """Closes the ledger of the log and those of cursors, if nothing was published, or acknowledged, for
        `unload_idle_s`, although clients are connected: the next publish and acknowledgement begin others. Raises the
        errors of `DurableCursor.close_idle_ledger`."""
        if self._has_idle_ledgers():
            await self._topic.log.close_idle_ledger()
            for cursor in self._find_idle_cursors():
                await cursor.close_idle_ledger()

    async def trim_ledgers(self) -> None:
        """Deletes the ledgers of the topic that no holder needs. Raises the errors of `Topic.trim_ledgers`."""
        await self._topic.trim_ledgers()

    async def delete_idle_subscriptions(self) -> None:
        """Deletes the durable subscriptions that were unused for at least `subscription_expiration_s` seconds, which
        the policy sets; 0: deletes none. A subscription is used while it has a consumer, or acknowledgements of an open
        transaction: a commit must find these. Raises the errors of `SubscriptionRegistry.unsubscribe`."""
        limit_s, now = self._topic.applied.subscription_expiration_s, self._world.clock.monotonic()
        unused = (each for each in self._durable() if not each.consumers and not each.pending_transactions)
        names = {each.name for each in unused} if limit_s else set()
        self._idle = {name: self._idle.get(name, now) for name in sorted(names)}
        for name, since in self._idle.items():
            if now - since >= limit_s:
                _LOG.info("%s: subscription %r has had no consumer for %d s and goes", self._topic.name, name, limit_s)
                await self._topic.registry.unsubscribe(name)
        self._ages = {name: age for name, age in self._ages.items() if name in self._topic.subscriptions}

    async def find_held_slots_of_topic(self) -> None:
        """Calls `find_held_slots` for each subscription that delivers by key, and ignores the result. The regular calls
        let the subscription record since when each slot of keys is held back by an outstanding message."""
        now_s = self._world.clock.monotonic()
        for subscription in self._topic.subscriptions.values():
            if subscription.dispatcher.policy.by_keys:
                subscription.dispatcher.policy.find_held_slots(now_s)


MAINTENANCE_STEPS = (
    TopicMaintenance.expire_messages, TopicMaintenance.apply_backlog_quota, TopicMaintenance.run_due_work_of_parts,
    TopicMaintenance.roll_ledger, TopicMaintenance.trim_ledgers, TopicMaintenance.delete_idle_subscriptions,
    TopicMaintenance.find_held_slots_of_topic, TopicMaintenance.close_idle_ledgers,
)  # fmt: skip
"""The steps of `run_due_work`, in this order."""


async def run_maintenance(topics: Sequence[TopicMaintenance], at_once: int, clock: Clock) -> None:
    """Runs the maintenance of `topics`, of `at_once` topics at a time. Returns when all are done. A topic in which
    nothing is due is only looked at, in slices of the event loop."""
    waiting, turns = list[TopicMaintenance](), EventLoopSlices(clock)
    for life in topics:
        if life.has_due_work():
            waiting.append(life)
        if turns.is_slice_used_up:
            await turns.begin_slice()
    for start in range(0, len(waiting), at_once):
        await run_together([life.run_due_work() for life in waiting[start : start + at_once]], "topic-maintenance")
