"""A topic that is loaded at the broker which owns it: its log, its producers, its subscriptions.

`Topic.open` loads the topic: it takes over the log, then each durable cursor. The topic ends at this broker by `close`,
or by `abandon` if another broker owns it (all work stops at once). `Topic.close` goes in this order: deliveries stop,
and consumers learn of the close; the ledger is closed; producers are closed; the last acknowledgements arrive
(LAST_ACKS_WAIT_S); cursors are stored. So a message that a consumer acknowledged before it learned of the close is not
delivered again.

`ProducerRegistry` has the producers of a topic (dedup_core.py decides which ones join, wait, or are disconnected). A
producer joins in this order: the topic is served here; its quota and its limits (admission_core.py) admit one more; the
producer was not fenced meanwhile; it is registered, which it may have to wait for; the epoch, if it grows, is durable;
all earlier publishes under its name have their outcome (dedup.py). Only then may it publish.

`SubscriptionRegistry` creates and deletes the subscriptions of a topic. The topic's record names the durable ones; a
new name is added in the same commit that stores its cursor's record. So a subscription whose record is lost is
distinguished from a deleted one, and is created again. `SubscriptionRegistry.changing` serialises changes of the set of
subscriptions, trimming, and the end of the topic: the data of a subscription that is being created are not trimmed
(invariant 34).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from ...ledger import LedgerClient
from ...ledger.placement_core import BookieGroups
from ...metadata.records import Feature, may_write_feature
from ...metadata.store import NodeUpdate
from ...proto.applied import AppliedPolicies
from ...proto.entry_filter import find_filter
from ...proto.errors import (
    AlreadyExists,
    Busy,
    MagnetarError,
    NotAllowed,
    NotOwner,
    ProducerBusy,
    ProducerFenced,
    SubscriptionNotFound,
    Unavailable,
)
from ...proto.names import Position, TopicName, check_subscription_name
from ...proto.states import AccessMode, BacklogQuotaState, LedgerStays, TopicState
from ...runtime.network import World
from ...runtime.tasks import run_to_end, run_together
from ...runtime.token_bucket import RateLimit
from ..common.config import BrokerConfig, LedgerReplication
from ..common.refusals import PublishRefusal, SubscribeRefusal
from ..common.transactions import NoCoordinators, Settlement, TransactionCoordinatorsPort
from ..log.compaction import Compaction
from ..log.key_indexes import KeyIndexes
from ..log.log import CommittedLogView, ReadableLog
from ..log.log_shape_core import (
    NO_RETENTION,
    LogShape,
    Retention,
    TrimLimit,
    find_trimmable_ledgers,
    list_reasons_to_keep_ledgers,
)
from ..subscription.consumer import Consumer
from ..subscription.core.policy import check_fair_properties
from ..subscription.core.redelivery_backoff import check_properties
from ..subscription.core.subscription_types import SubscriptionTypeRow
from ..subscription.cursors import DurableCursor
from ..subscription.subscription import Subscription
from . import statistics as backlog
from .admission_core import TopicAdmission
from .dedup import Deduplication, StatefulTopicPart, replay_log_for_dedup_and_transactions
from .dedup_core import (
    ProducerJoinDenied,
    ProducerRegistration,
    ProducerTable,
    TopicEpochChange,
    compute_next_topic_epoch,
    decide_epoch_change,
)
from .maintenance import TopicMaintenance
from .producer import PublishGate, TopicProducer
from .statistics import BrokerRateLimits, SharedRates, TopicStatistics
from .storage import TopicStorage
from .transactions import TopicTransactions
from .transactions_core import TopicTransactionsCore, TxnEndEffect

_LOG = logging.getLogger("magnetar.broker.topic")

NO_POSITION = Position(-1, -1)

SUBSCRIPTIONS_CLOSED_AT_ONCE = 64
"""Subscriptions that are closed at a time: each stores its cursor, and so many share a sync of the metadata."""
LAST_ACKS_WAIT_S = 0.1
"""Seconds that a topic that closes in order waits for what its consumers acknowledged before they learned of it: some
round trips. The next owner delivers again what comes later."""


class Topic:
    """A topic that is loaded at the broker which owns it. `storage` creates its log and its subscriptions; `shown` is
    the log without uncommitted entries; `parts` are deduplication, transactions, compaction and key indexes, in the
    order in which their methods are called."""

    __slots__ = (
        "_broker_rates",
        "_deleting",
        "_dispatch_rate",
        "_ended",
        "_on_lost",
        "_publish_rate",
        "_settled",
        "_shared_rates",
        "_woken_at",
        "admission",
        "applied",
        "compaction",
        "dedup",
        "gate",
        "is_going",
        "key_indexes",
        "log",
        "maintenance",
        "moves_to",
        "name",
        "owned",
        "parts",
        "producers",
        "registry",
        "replication",
        "shown",
        "subscriptions",
        "traffic",
        "transactions",
        "world",
    )  # fmt: skip

    def __init__(
        self, world: World, ledgers: LedgerClient, config: BrokerConfig, name: TopicName, applied: AppliedPolicies,
        storage: TopicStorage, *, rates: BrokerRateLimits, owned: Callable[[], bool], settled: Callable[[], bool],
        on_lost: Callable[[Topic], None], coordinators: TransactionCoordinatorsPort | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.applied = applied  # read it anew for each decision; `apply` changes it
        self.owned = owned
        self.producers = ProducerRegistry(self)
        self.subscriptions: dict[str, Subscription] = {}
        self.registry = SubscriptionRegistry(self, storage)
        self.traffic = TopicStatistics(world.clock)
        self.world = world
        self._on_lost, self._settled = on_lost, settled
        self._deleting: asyncio.Lock | None = None
        self._ended = self.is_going = False  # it takes nothing any more; it is being deleted
        self.moves_to = ""  # the endpoint of the broker that gets it, once that is decided
        self._publish_rate, self._dispatch_rate = RateLimit(), RateLimit()
        self._shared_rates: tuple[SharedRates, ...] = ()  # of its namespace and its tenant, if they have a limit
        self._woken_at = NO_POSITION  # the last stable position when subscriptions were woken
        self._broker_rates = rates
        self.admission = TopicAdmission(name, config.max_same_address_producers, config.max_same_address_consumers)
        self.maintenance = TopicMaintenance(world, self, config.roll_idle_s, config.unload_idle_s)
        self.gate = PublishGate(world.clock, (self._publish_rate, rates.publish), self.maintenance.must_pause_producers)
        self.replication = self._replication  # one bound method for all that ask
        self.log = storage.create_log(self)
        self.shown: ReadableLog = self.log  # what readers of committed entries see: whatever shows entries reads this
        self.dedup = Deduplication(world.clock, ledgers, config, self.log, self.replication)
        self.compaction = Compaction(
            world, ledgers, config, name, self.log, replication=self.replication, changed=self._compacted,
            turn=rates.compacting,
        )  # fmt: skip
        self.transactions = TopicTransactions(
            world, ledgers, config, self, self.log, self.replication, coordinators or NoCoordinators()
        )
        self.dedup.set_snapshot_limit_function(self.transactions.position_before_open_transactions)
        self.key_indexes = KeyIndexes(
            world, ledgers, config, name, self.log, replication=self.replication, applied=self._find_applied,
            turn=rates.indexing,
        )  # fmt: skip
        self.parts: tuple[StatefulTopicPart, ...] = (self.dedup, self.transactions, self.compaction, self.key_indexes)
        self.apply(applied)

    def is_owned(self) -> bool:
        """Returns True if this broker owns the topic's bundle, which is another one after a split of the namespace."""
        return self.owned()

    @property
    def incarnation(self) -> int:
        """Returns the time at which the topic was created (ms since the epoch; 0: not known). It distinguishes the
        topic from deleted topics of the same name."""
        return self.log.record.created_ms

    @property
    def dropped_messages(self) -> int:
        """Returns the number of messages that were dropped before delivery; above 0 only in a non-persistent topic."""
        return sum(each.dropped for each in self.subscriptions.values())

    def apply(self, applied: AppliedPolicies) -> None:
        """Applies changed policies to the topic and its subscriptions."""
        self.applied, now = applied, self.world.clock.monotonic()
        self._publish_rate.set_rate(applied.publish_rate_messages, applied.publish_rate_bytes, now)
        self._dispatch_rate.set_rate(applied.dispatch_rate_messages, applied.dispatch_rate_bytes, now)
        self._shared_rates = self._broker_rates.apply_shared_rates(self.name.namespace_name, applied, now)
        shared = (each.publish.rate for each in self._shared_rates)
        self.gate.set_rates((self._publish_rate, *shared, self._broker_rates.publish))
        self.dedup.apply(applied)
        self.gate.resume_queued_publishes()
        for producer in self.producers:
            producer.size_max = applied.max_message_bytes + producer.room
        for subscription in self.subscriptions.values():
            self.apply_policies_to_subscription(subscription)

    def apply_policies_to_subscription(self, subscription: Subscription) -> None:
        """Applies the topic's policies to a subscription."""
        applied, own = self.applied, subscription.pump.rates[0]
        messages, size = applied.subscription_dispatch_rate_messages, applied.subscription_dispatch_rate_bytes
        own.set_rate(messages, size, self.world.clock.monotonic())
        shared = (each.dispatch.rate for each in self._shared_rates)
        subscription.pump.rates = (own, self._dispatch_rate, *shared, self._broker_rates.dispatch)
        subscription.apply(applied)
        if subscription.consumers:
            subscription.pump.wake()

    def on_backlog_quota_changed(self) -> None:
        """Called when the state of the backlog quota has changed: resumes waiting producers if the new state permits
        that."""
        self.gate.resume_queued_publishes()

    @property
    def stored_bytes(self) -> int:
        """Returns the bytes of the topic's log; after the topic has ended, those that it had then."""
        return self.log.shape.size

    def set_storage_state(self, state: BacklogQuotaState | None) -> None:
        """Sets what happens because the namespace or the tenant stores as many bytes as it may; None: nothing."""
        self.maintenance.set_storage_state(state)

    def _find_applied(self) -> AppliedPolicies:
        return self.applied

    async def _replication(self) -> LedgerReplication:
        """Returns the replication (the quorums, and the groups of bookies) that the next ledger of the topic gets."""
        applied, unsynced = self.applied, self.is_durable_in_memory
        groups = BookieGroups(applied.primary_bookie_groups, applied.secondary_bookie_groups)
        return LedgerReplication(applied.ensemble_size, applied.write_quorum, applied.ack_quorum, groups, unsynced)

    @property
    def is_durable_in_memory(self) -> bool:
        """Whether the policy is `durability=memory`: bookies answer the next ledger's entries before their sync."""
        return self.applied.durability == "memory" and may_write_feature(Feature.UNSYNCED_ADDS)

    # ------------------------------------------------------------------ loading
    async def open(self, create: Callable[[], Awaitable[None]] | None = None) -> None:
        """Takes the topic over, so that only this broker serves the topic. If the topic does not exist, awaits
        `create()` first, which creates it.

        Raises TopicNotFound if the topic does not exist and `create` is None; NotOwner if another broker took it over
        first; DataLost if a ledger is lost; Unavailable if bookies or the metadata do not answer; and the errors of
        `create`, of opening the parts and of `SubscriptionRegistry.open`. After an error the topic has ended at this
        broker.
        """
        try:
            await self.log.open(create)
            for part in self.parts:
                await part.open(self.applied)
            await replay_log_for_dedup_and_transactions(self.log, self.dedup, self.transactions)
            await self.registry.open()
            self.transactions.on_topic_loaded()
        except BaseException:
            self._ended = True
            self._shared_rates = ()
            await self._close_subscriptions()
            raise

    def on_entries_confirmed(self) -> None:
        """Called when entries were confirmed: wakes the subscriptions, which deliver them. While an open transaction
        hides the entries, wakes only the subscriptions that read uncommitted entries."""
        core = self.transactions.core
        waits = (
            core is not None
            and core.first_open_transaction_position is not None
            and core.stable_position == self._woken_at
        )
        if core is not None:
            self._woken_at = core.stable_position
        for subscription in self.subscriptions.values():
            if subscription.consumers and (not waits or subscription.reads_uncommitted):
                subscription.pump.wake()

    def deliver_before_cache_eviction(self) -> None:
        """Called when the broker is about to evict entries of the topic from memory: lets the subscriptions deliver
        these entries at once, so that they need not be read from bookies."""
        for subscription in self.subscriptions.values():
            if subscription.consumers:
                subscription.pump.deliver_available_entries()

    def on_delayed_entry_stored(self, position: Position, at_ms: int) -> None:
        """Called when a new entry at `position` has a delivery time: each subscription holds the entry back until
        `at_ms` (ms since the epoch)."""
        for subscription in self.subscriptions.values():
            subscription.pump.delay_entry_until(position, at_ms)

    def check_delivery_time(self, at_ms: int) -> None:
        """Raises NotAllowed if the delivery time `at_ms` (ms since the epoch) is later than the policy allows.
        (Subscription types that do not delay messages ignore the delivery time.)"""
        limit, delay = self.applied.max_delay_ms, at_ms - self.world.clock.wall_ms()
        if limit and delay > limit and self.applied.delayed_delivery:
            raise PublishRefusal.DELAY.error(
                f"topic {self.name}: a delay of {delay} ms is above the longest, {limit} ms"
            )

    def shape(self, *, compacted: bool) -> LogShape:
        """Returns the shape that a consumer reads: the shape of the compacted form if `compacted` is True, else the
        shape of the log."""
        return self.readable_log(compacted=compacted).shape

    def readable_log(self, *, compacted: bool = False, uncommitted: bool = False) -> ReadableLog:
        """Returns the log that a consumer reads: the compacted form (`compacted`), all stored entries (`uncommitted`),
        or else the committed entries."""
        if compacted:
            return self.compaction.view
        return self.log if uncommitted else self.shown

    @property
    def waiting_message_count(self) -> int:
        """Returns how many messages come after the begin of an open transaction: consumers of committed messages do not
        get them before it ends."""
        return self.log.shape.end_index - self.shown.shape.end_index

    def set_log_of_subscription(self, subscription: Subscription, *, compacted: bool) -> None:
        """Sets which log the subscription reads, before a consumer joins it. The log depends on `compacted` and on the
        isolation level of the subscription, which must be set before. Raises ConsumerBusy if connected consumers read
        another log.

        When the subscription changes to the compacted form, it skips the entries that compactions have removed up to
        then.
        """
        wanted = self.readable_log(compacted=compacted, uncommitted=subscription.reads_uncommitted)
        if subscription.consumers:
            if subscription.reads_compacted != compacted:
                way = "compacted" if subscription.reads_compacted else "everything"
                raise SubscribeRefusal.READS_OTHERWISE.error(
                    f"the consumers of subscription {subscription.name!r} read {way}", topic=self.name
                )
        elif compacted or wanted is not subscription.log:
            subscription.restart_with_log(wanted)

    def _compacted(self) -> None:
        """Called after a compaction. Disconnects the consumers of each subscription that reads the compacted form and
        has not delivered everything up to the position up to which the topic is now compacted (the horizon). When the
        next consumer joins, the subscription reads the new compacted form (`set_log_of_subscription`)."""
        record = self.compaction.record
        assert record is not None, "it was just written"
        horizon = Position(record.horizon_ledger, record.horizon_entry)
        for subscription in list(self.subscriptions.values()):
            if subscription.reads_compacted and subscription.has_undelivered_up_to(horizon):
                subscription.disconnect_all(Unavailable(f"topic {self.name} was compacted; subscribe again"))

    def find_subscription(self, name: str) -> Subscription:
        """Returns the subscription `name`. Raises SubscriptionNotFound if there is none. In a persistent topic only
        durable subscriptions are found."""
        found = self.subscriptions.get(name)
        if found is None or (self.name.persistent and not found.is_durable):  # that of a reader has no name
            raise SubscriptionNotFound(f"topic {self.name} has no subscription {name!r}", subscription=name)
        return found

    # ------------------------------------------------------------------ transactions
    async def settle(self, settlements: Sequence[Settlement], timeout_s: float) -> list[MagnetarError | None]:
        """Applies the outcomes of transactions at this topic, and waits until they are stored durably, at most
        `timeout_s` seconds. Returns one value for each settlement: None, or an error (`TopicTransactions.settle`).
        Raises NotOwner if the topic has ended at this broker."""
        self.check_not_ended()
        return await self.transactions.settle(settlements, timeout_s)

    def apply_sequence_ids_to_dedup(self, end: TxnEndEffect) -> None:
        """Passes the sequence ids of a transaction that has ended to deduplication. `end`: how the topic has changed by
        the end of the transaction."""
        self.dedup.on_transaction_ended(end.numbers, end.sent, end.back)

    def hide_uncommitted_entries(self, core: TopicTransactionsCore) -> None:
        """Hides uncommitted entries from consumers, except from those that read uncommitted entries. Called with the
        topic's first transaction."""
        self.shown = CommittedLogView(self.log, core)
        self.compaction.hide_uncommitted_entries(self.shown)
        for each in self.subscriptions.values():
            each.switch_log(self.readable_log(compacted=each.reads_compacted, uncommitted=each.reads_uncommitted))

    def on_transaction_outcomes_known(self) -> None:
        """Called when transactions have ended, so that the last stable position has moved or entries are aborted: wakes
        the subscriptions, which deliver the entries that consumers may get now."""
        if self.transactions.core is not None:
            self._woken_at = self.transactions.core.stable_position
        for each in self.subscriptions.values():
            each.on_transaction_outcomes_known()

    async def truncate_topic(self) -> None:
        """Empties the compacted form, and acknowledges all messages for each durable subscription, durably. Then
        deletes all ledgers except the one that is being written, as far as no other holder needs them. Raises Busy
        while a compaction is running, and the errors of `TopicLog.roll_ledger`, `Compaction.truncate`, `skip_messages`
        and `trim_ledgers`. After an error the call may be repeated; it continues."""
        self.compaction.check_not_running()
        await self.log.roll_ledger()
        await self.compaction.truncate(self.applied)
        for subscription in self.registry.durable_subscriptions():
            await backlog.skip_messages(self.shown, subscription, -1)
        await self.trim_ledgers(retained=False)

    @property
    def has_clients(self) -> bool:
        """Returns True if a producer or a consumer is connected."""
        return len(self.producers) > 0 or any(each.consumers for each in self.subscriptions.values())

    @property
    def connected_client_count(self) -> int:
        """Returns the number of connected producers and consumers."""
        return len(self.producers) + sum(len(each.consumers) for each in self.subscriptions.values())

    # ------------------------------------------------------------------ trimming
    def retention(self) -> Retention:
        """Returns the retention of acknowledged ledgers that the policies set."""
        return Retention(self.applied.retention_minutes, self.applied.retention_mib)

    def retention_without_subscriptions(self) -> Retention:
        """Returns for how long, and up to which size, messages are retained while the topic has no durable
        subscription. Returns NO_RETENTION if the topic has a durable subscription or is compacted, because then the
        messages stay for another reason."""
        durable = any(each.is_durable for each in self.subscriptions.values())
        if durable or self.compaction.trim_limit(self.applied) is not None:
            return NO_RETENTION
        return Retention(self.applied.unsubscribed_minutes, self.applied.unsubscribed_mib)

    async def trim_ledgers(self, *, retained: bool = True) -> list[int]:
        """Deletes the ledgers that no holder needs (broker/log/log_shape_core.py). Returns the ids of the deleted
        ledgers; none after the topic has ended. If `retained` is False, also deletes ledgers that are kept only by the
        retention, or only because the topic has no subscription. Raises the errors of `TopicLog.trim_ledgers`."""
        async with self.registry.changing:
            if self._ended:
                return []
            kept = (
                (self.retention(), self.retention_without_subscriptions()) if retained else (NO_RETENTION, NO_RETENTION)
            )
            return await run_to_end(self._trim(*kept))

    async def _trim(self, retention: Retention, unread: Retention) -> list[int]:
        now_ms = self.world.clock.wall_ms()
        before = {span.ledger_id: span for span in self.log.shape.spans}
        gone = await self.log.trim_ledgers(
            lambda: find_trimmable_ledgers(self.log.shape, self.trim_limits(), retention, now_ms, unread)
        )
        for ledger_id in gone:
            self.transactions.on_ledger_trimmed(ledger_id, before[ledger_id].first_index, before[ledger_id].end_index)
            if self.compaction.shape.find_span_of_ledger(ledger_id) is None:
                for subscription in self.subscriptions.values():
                    subscription.cursor.on_ledger_trimmed(ledger_id)
        return gone

    def trim_limits(self) -> list[TrimLimit]:
        """Returns, for each durable subscription and for each part of the topic (such as compaction), which ledgers and
        entries of the log it no longer needs."""
        cursors = [each.cursor.trim_limit for each in self.subscriptions.values() if each.is_durable]
        parts = [part.trim_limit(self.applied) for part in self.parts]
        return [*cursors, *(each for each in parts if each is not None)]

    def list_reasons_ledgers_kept(self) -> list[tuple[int, LedgerStays | None]]:
        """Returns a pair for each ledger, oldest first: the ledger id, and the reason why the ledger is kept. The
        reason is None if the next trim deletes the ledger."""
        now_ms = self.world.clock.wall_ms()
        return list_reasons_to_keep_ledgers(
            self.log.shape, self.trim_limits(), self.retention(), now_ms, self.retention_without_subscriptions()
        )

    # ------------------------------------------------------------------ ending
    @property
    def is_ended(self) -> bool:
        """Returns True if this broker has stopped serving the topic, so that the topic accepts no more requests."""
        return self._ended

    def check_not_ended(self) -> None:
        """Raises NotOwner if this broker has stopped serving the topic. From then on the topic's state may be outdated,
        and consumers get no further messages from this object."""
        if self._ended or self.is_going or self.log.state is TopicState.LOST:
            next_owner = {"owner": self.moves_to} if self.moves_to else {}
            raise NotOwner(
                f"topic {self.name} is not served here any more; look it up again", topic=self.name, **next_owner
            )

    def check_may_answer_end_of_topic(self) -> None:
        """Raises an error if this broker must not answer that a client has read everything up to the end of the topic.
        Must be called before such an answer. Raises NotOwner if this broker has stopped serving the topic; Unavailable
        if another broker may have taken the topic over, and stored more messages."""
        self.check_not_ended()
        if not self._settled():
            raise Unavailable(f"this broker cannot tell whether topic {self.name} continued elsewhere; ask again")

    def abandon(self, error: MagnetarError) -> None:
        """Stops all work at once, because another broker owns the topic, or because this broker cannot serve it.
        Producers and consumers are closed with NotOwner, which names `error`; what is stored stays for the next owner.
        Does nothing if the topic has ended already."""
        if self._ended:
            return
        self._ended = True
        self._shared_rates = ()
        self._disconnect(NotOwner(f"topic {self.name} is not served here any more: {error}", topic=self.name))
        for part in self.parts:
            part.stop()
        for subscription in list(self.subscriptions.values()):  # readers detach meanwhile
            subscription.stop()
            if subscription.store is not None:
                subscription.store.abandon()
        self._on_lost(self)

    def on_publish_waiting(self, error: MagnetarError) -> None:
        """Called while publishes wait for a ledger: passes the reason `error` to the producers."""
        for producer in self.producers:
            producer.on_publish_waiting(error)

    def _disconnect(self, error: MagnetarError) -> None:
        self.producers.close(error)
        for subscription in list(self.subscriptions.values()):  # readers detach meanwhile
            subscription.disconnect_all(error)

    async def close(self, error: MagnetarError | None = None) -> None:
        """Unloads the topic in order, and returns when its log and cursors are closed. Its clients get `error`. If
        `error` is None, they get NotOwner, after which they look up the new owner. Idempotent."""
        async with self.registry.changing:
            unloaded = NotOwner(f"topic {self.name} was unloaded; look it up again", topic=self.name)
            await run_to_end(self._close(error or unloaded))

    async def _close(self, error: MagnetarError) -> None:
        begun_s = None if self._ended else self.world.clock.monotonic()
        if not self._ended:
            self._ended = True
            self._shared_rates = ()
            for part in self.parts:
                part.stop()
            last_acks = [last for each in self.subscriptions.values() for last in each.stop_delivery_for_move(error)]
            try:
                await self.log.close()
            except MagnetarError as failure:
                _LOG.warning("%s: not closed in order: %s", self.name, failure)
            finally:
                self.producers.close(error)  # whatever happened: publishes since are answered by it alone
                if last_acks:
                    await asyncio.wait(last_acks, timeout=LAST_ACKS_WAIT_S)
                self._disconnect(error)
        await self._close_subscriptions()
        if begun_s is not None:
            _LOG.debug("topic %s is unloaded, in %.3f s: %s", self.name, self.world.clock.monotonic() - begun_s, error)

    async def _close_subscriptions(self) -> None:
        subscriptions = list(self.subscriptions.values())  # readers detach meanwhile
        for start in range(0, len(subscriptions), SUBSCRIPTIONS_CLOSED_AT_ONCE):
            await run_together(
                [
                    self._close_subscription(each)
                    for each in subscriptions[start : start + SUBSCRIPTIONS_CLOSED_AT_ONCE]
                ],
                "subscription-end",
            )
        for part in self.parts:
            await part.close()
        await self.log.close()

    async def _close_subscription(self, subscription: Subscription) -> None:
        try:
            await subscription.close()
        except MagnetarError as failure:
            _LOG.warning("%s/%s: cursor not stored: %s", self.name, subscription.name, failure)

    def _check_unused(self) -> None:
        durable = len(self.registry.durable_subscriptions())
        if self.connected_client_count or durable:
            raise Busy(
                f"topic {self.name} has {len(self.producers)} producers and {durable} subscriptions; "
                "remove them first, or delete by force",
                topic=self.name,
            )

    def _check_may_go(self, force: bool, inactive: bool) -> None:
        """Raises Busy if the topic is in use and `force` is False. With `inactive`, also raises Busy if the topic is no
        longer inactive."""
        if not force:
            self._check_unused()
        if inactive and not self.maintenance.is_inactive():
            raise Busy(f"topic {self.name} is used again: it is not deleted as an inactive one", topic=self.name)

    async def check_delete(self, *, force: bool) -> None:
        """Raises Busy or TransactionsOpen if `delete` would refuse to delete the topic now. Changes nothing."""
        self._check_may_go(force, inactive=False)
        await self.transactions.check_deletable(force=force)

    async def delete(self, *, force: bool, abort: bool, inactive: bool = False) -> list[int]:
        """Ends the topic for good. Returns the ids of its ledgers, which the caller must delete after the topic's
        record.

        `abort`: first aborts the open transactions (storage.py). `inactive`: deletes the topic only if it is still
        inactive, even with `force`. Raises Busy if the topic is in use and `force` is False; TransactionsOpen if a
        transaction is left, or a coordinator does not answer; NotOwner if the topic has ended at this broker, as after
        another call has deleted it; and the errors of `SubscriptionRegistry.unsubscribe`. After Busy and
        TransactionsOpen the topic is served as before.
        """
        if self._deleting is None:
            self._deleting = asyncio.Lock()
        async with self._deleting:
            self.check_not_ended()
            self._check_may_go(force, inactive)
            try:
                await self.transactions.block_transaction_joins(force=abort)
                self._check_may_go(force, inactive)  # in the same turn as the next line
                self.is_going = True  # publishing is refused from here on: the message would have no subscriber
                for name in self.registry.list_stored_names():
                    await self.registry.unsubscribe(name, force=True)
            except BaseException:
                self.is_going = False
                self.transactions.allow_transaction_joins()
                raise
        await self.close(NotOwner(f"topic {self.name} was deleted", topic=self.name))
        record = self.log.record
        of_parts = [ledger_id for part in self.parts for ledger_id in part.list_own_ledgers()]
        return [*(each.ledger_id for each in record.ledgers), *of_parts, *record.pending_deletion]


class ProducerRegistry:
    """The producers of one topic: those that may publish, and those that wait for exclusive access. Iteration yields
    both."""

    __slots__ = ("_epochs", "_here", "_table", "_topic", "_warned")

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._warned = False  # that messages may be lost
        self._table = ProducerTable()
        self._here: dict[int, TopicProducer] = {}
        self._epochs: asyncio.Lock | None = None  # one change at a time; None: there was none

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[TopicProducer]:
        return iter(self._here.values())

    async def join(self, producer: TopicProducer) -> None:
        """Registers the producer; if its access mode is WAIT_FOR_EXCLUSIVE, first waits for exclusive access. Returns
        when the producer may publish: a new epoch is stored, and no earlier entry under its name is in flight. Raises
        ProducerBusy or ProducerFenced if the producer may not join; NotAllowed if the topic deduplicates and a message
        of it or of this producer may be lost; BacklogQuotaExceeded if the topic refuses
        publishes; NotOwner if the topic has ended at this broker; the error with which the producer is closed while it
        waits for other producers, such as Unavailable if it has connected again; and the errors of
        `Log.commit_fields`. After an error the caller must call `leave`. If the producer is closed later in this call,
        that may raise nothing: the caller must check `producer.close_error` afterwards."""
        topic = self._topic
        topic.check_not_ended()
        refusal = topic.maintenance.why_publish_refused()
        if refusal is not None:
            raise refusal
        self._check_promises(producer)
        if producer.mode is not AccessMode.EXCLUSIVE:  # that is alone, or fenced, whatever may be here
            topic.admission.check_producer(topic.applied, producer, self._here.values())
        change = self._decide_epoch_change(producer)
        registered = self._register(producer)
        topic.maintenance.on_topic_used()
        topic.dedup.on_producer_joined(producer.name)
        if not registered:
            producer.turn = asyncio.get_running_loop().create_future()
            await producer.turn
            change = self._decide_epoch_change(producer)  # others had exclusive access meanwhile, perhaps
        if change is TopicEpochChange.GROWS:
            if self._epochs is None:
                self._epochs = asyncio.Lock()
            async with self._epochs:
                if producer.close_error is not None:  # another one has its place: the epoch is that one's
                    raise producer.close_error
                producer.epoch = compute_next_topic_epoch(topic.log.record.epoch, topic.log.record.created_ms)
                await topic.log.commit_fields(epoch=producer.epoch)
        await topic.dedup.wait_idle(producer.name)
        await topic.transactions.wait_idle(producer.name)
        topic.check_not_ended()

    def _check_promises(self, producer: TopicProducer) -> None:
        """Raises NotAllowed if the topic deduplicates, and its durability or the producer's acks promise less. Says in
        the log, at the topic's first producer, that its messages may be lost."""
        topic = self._topic
        if topic.applied.deduplication and topic.is_durable_in_memory:
            raise PublishRefusal.MEMORY.error(f"topic {topic.name}: {PublishRefusal.MEMORY.value}")
        if topic.applied.deduplication and producer.acks != "quorum":
            raise NotAllowed(
                f"topic {topic.name} deduplicates, and a producer with acks={producer.acks} does not learn what is "
                "stored: use acks=quorum", topic=topic.name,
            )  # fmt: skip
        if topic.is_durable_in_memory and not self._warned:
            self._warned = True
            _LOG.warning(
                "%s: durability=memory: bookies answer before their disks have the messages; a crash of all bookies of "
                "a message at once loses it", topic.name,
            )  # fmt: skip

    def _decide_epoch_change(self, producer: TopicProducer) -> TopicEpochChange:
        """Returns how the topic's epoch changes when the producer is registered now. Raises ProducerFenced if another
        producer got exclusive access since this one had it."""
        topic = self._topic
        epoch, created_ms = topic.log.record.epoch, topic.log.record.created_ms
        if self._epochs is not None and self._epochs.locked():  # another one has the next epoch; it is not stored yet
            epoch = compute_next_topic_epoch(epoch, created_ms)
        change = decide_epoch_change(producer.mode, producer.epoch, epoch)
        if change is TopicEpochChange.FENCED:
            raise ProducerFenced(f"topic {topic.name}, producer {producer.name!r}: {change.value}", topic=topic.name)
        return change

    def _register(self, producer: TopicProducer) -> bool:
        """Registers a producer, and closes the producers that it replaces or fences. Returns False if the producer has
        to wait for exclusive access. Raises ProducerBusy or ProducerFenced if the producer may not join."""
        name = self._topic.name
        answer = self._table.join(ProducerRegistration(
            producer.id, producer.name, producer.mode, producer.instance, producer.connection, producer.writer
        ))  # fmt: skip
        if answer.denied is not None:
            # one that returns tries again
            first = answer.denied is ProducerJoinDenied.HAS_PRODUCERS and producer.epoch == 0
            text = f"topic {name}, producer {producer.name!r}: {answer.denied.value}"
            raise (ProducerFenced if first else ProducerBusy)(text, topic=name, producer=producer.name)
        for other in answer.replaced:
            self._displace(other, Unavailable(f"producer {other.name!r} has connected again"))
        for other in answer.fenced:
            self._displace(other, ProducerFenced(f"producer {producer.name!r} has taken topic {name} for itself"))
        self._here[producer.id] = producer
        return answer.registered

    def _displace(self, registration: ProducerRegistration, error: MagnetarError) -> None:
        producer = self._here.pop(registration.id, None)
        if producer is not None:
            self._topic.dedup.on_producer_left(producer.name)
            producer.close(error)

    def leave(self, producer: TopicProducer) -> None:
        """Removes a producer whose stream has ended. The producer that has waited longest for exclusive access may be
        registered in its place. Idempotent."""
        if self._here.pop(producer.id, None) is not None:
            self._topic.dedup.on_producer_left(producer.name)
        for successor in self._table.leave(producer.id):
            waiting = self._here.get(successor.id)
            if waiting is not None and waiting.turn is not None and not waiting.turn.done():
                waiting.turn.set_result(None)

    def close(self, error: MagnetarError) -> None:
        """Closes all producers with `error`, because the topic ends at this broker."""
        for producer in list(self._here.values()):
            producer.close(error)
        self._here.clear()


SUBSCRIPTION_NAMES_BYTES_MAX = 64 << 10
"""Most bytes of the names of subscriptions in a topic's record, a sixteenth of what a record holds; with more it names
none."""
RECORD_LOST_PROPERTY = "magnetar.record-lost-ms"
"""The property of a subscription that was made anew because its record was lost: when."""


class SubscriptionRegistry:
    """The subscriptions of one topic. Creates and deletes them, and creates those again whose records were lost.

    A name is free when the deletion of its subscription has ended, durably. A deletion that failed is kept with its
    cursor (`_deleting`), and the next `subscribe` or `unsubscribe` of the name repeats it first."""

    __slots__ = ("_by_name", "_deleting", "_storage", "_topic", "_unnamed", "changing")

    def __init__(self, topic: Topic, storage: TopicStorage) -> None:
        self._topic = topic
        self._storage = storage
        self._by_name = topic.subscriptions
        self._deleting: dict[str, DurableCursor] = {}  # of subscriptions that have ended here and may have records
        self._unnamed = False  # the record does not name the subscriptions that there are
        self.changing = asyncio.Lock()  # serialises changes of the set of subscriptions, and trimming

    def durable_subscriptions(self) -> list[Subscription]:
        """Returns the durable subscriptions of the topic."""
        return [each for each in self._by_name.values() if each.is_durable]

    def list_stored_names(self) -> list[str]:
        """Returns the names of the durable subscriptions, and of those whose deletion has failed."""
        return [*self._deleting, *(each.name for each in self.durable_subscriptions())]

    async def open(self) -> None:
        """Opens the stored subscriptions, and creates those again whose records were lost. The log must be taken over
        before. Raises the errors of `TopicStorage.open_subscriptions` and `TopicStorage.create_subscription`."""
        topic = self._topic
        for subscription in await self._storage.open_subscriptions(topic, topic.compaction.shape):
            self.add_subscription(subscription)
            mark = subscription.cursor.mark
            if topic.compaction.shape.position_after(mark) != topic.log.shape.position_after(mark):
                # it has not read all that is left of trimmed ledgers
                subscription.restart_with_log(topic.compaction.view)
        await self._make_lost_ones()

    async def _make_lost_ones(self) -> None:
        """Creates each subscription again that the topic's record names but that has no record of its own, because then
        that record was lost and not deleted. The subscription begins at the oldest message, so that no unacknowledged
        message is skipped or trimmed."""
        if not self._topic.name.persistent:
            return
        named = self._topic.log.record.subscriptions
        self._unnamed = named is None
        for name in [each for each in named or () if each not in self._by_name]:
            _LOG.error(
                "%s/%s: the record of the subscription is lost, and it was not deleted: it begins anew at the oldest "
                "message", self._topic.name, name,
            )  # fmt: skip
            properties = {RECORD_LOST_PROPERTY: str(self._topic.world.clock.wall_ms())}
            shape = self._topic.shape(compacted=False)
            making = self._storage.create_subscription(
                self._topic, name, self._topic.log.shape.start_position, properties, shape
            )
            self.add_subscription(await run_to_end(making))

    async def commit_cursor_record(self, name: str, record: NodeUpdate) -> None:
        """Stores the record of a new subscription, and in the same commit adds its name to the topic's record. The
        topic's record keeps the names of lost subscriptions that are not created again yet. The caller must not be
        cancelled during this call. Raises the errors of `Log.commit_fields`."""
        named = self._topic.log.record.subscriptions or ()
        await self._topic.log.commit_fields(together=(record,), within=True, subscriptions=self._names({name, *named}))
        self._unnamed = False

    async def _name_subscriptions(self) -> None:
        """Stores the names of the durable subscriptions in the topic's record. Must be called before the record of a
        deleted subscription is deleted."""
        if not self._topic.name.persistent:
            return
        names = self._names(set())
        if names != self._topic.log.record.subscriptions:
            self._unnamed = True
            await self._topic.log.commit_fields(subscriptions=names)
        self._unnamed = False

    def _names(self, new: set[str]) -> tuple[str, ...] | None:
        """Returns the names of the durable subscriptions and the names `new`; None if they are too long for the topic's
        record."""
        names = (
            () if self._topic.is_going else tuple(sorted(new.union(each.name for each in self.durable_subscriptions())))
        )
        return names if sum(len(each.encode()) for each in names) <= SUBSCRIPTION_NAMES_BYTES_MAX else None

    def add_subscription(self, subscription: Subscription) -> Subscription:
        """Adds a subscription to the topic, and applies the topic's policies to it. Returns the subscription."""
        self._by_name[subscription.name], topic = subscription, self._topic
        # made before the first transaction, perhaps
        if topic.shown is not topic.log and not subscription.reads_compacted:
            subscription.switch_log(topic.readable_log(uncommitted=subscription.reads_uncommitted))
        topic.apply_policies_to_subscription(subscription)
        return subscription

    async def subscribe(
        self, name: str, mark: Position | None = None, properties: dict[str, str] | None = None, *,
        exclusive: bool = False, compacted: bool = False, by_consumer: bool = False,
    ) -> Subscription:  # fmt: skip
        """Returns the durable subscription `name`. If it does not exist, creates it; the new subscription begins after
        the position `mark` (None: at the end of the topic).

        `exclusive`: raises AlreadyExists if the subscription exists. `compacted`: `mark` is a position of the compacted
        form. `by_consumer`: True if a consumer, and not an operator, asks for the subscription. A policy may forbid
        that consumers create subscriptions (SubscriptionNotFound). Raises NotAllowed if the topic has its maximum of
        subscriptions; InvalidRequest if `name` or `properties` are invalid; NotOwner if the topic has ended at this
        broker; and the errors of `TopicStorage.create_subscription`, and of `unsubscribe` if that has failed.
        """
        check_subscription_name(name)
        async with self.changing:
            self._topic.check_not_ended()
            found = self._by_name.get(name)
            if found is not None:
                if exclusive:
                    raise AlreadyExists(f"subscription {name!r} of topic {self._topic.name} exists already")
                if self._unnamed and found.is_durable:
                    await run_to_end(self._name_subscriptions())
                return found
            self.check_subscription(name, by_consumer=by_consumer)
            if properties:
                check_properties(properties)
                check_fair_properties(properties)
            if name in self._deleting:
                await run_to_end(self._delete(name))
            return await run_to_end(self._make(name, mark, properties or {}, self._topic.shape(compacted=compacted)))

    async def _make(
        self, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        subscription = await self._storage.create_subscription(self._topic, name, mark, properties, shape)
        self._topic.check_not_ended()
        return self.add_subscription(subscription)

    def check_subscription(self, name: str, *, by_consumer: bool) -> None:
        """Raises NotAllowed or SubscriptionNotFound if the subscription `name` may not be created
        (admission_core.py)."""
        self._topic.admission.check_subscription(self._topic.applied, name, len(self._by_name), by_consumer=by_consumer)

    def check_consumer(self, subscription: Subscription, type_: SubscriptionTypeRow, consumer: Consumer) -> None:
        """Raises NotAllowed if the topic does not allow the subscription type, ConsumerBusy if a maximum of consumers
        is reached (admission_core.py)."""
        everybody = [each for other in self._by_name.values() for each in other.consumers.values()]
        mine = subscription.consumers.values()
        self._topic.admission.check_consumer(self._topic.applied, type_, consumer, subscription.name, everybody, mine)

    def make_nondurable_subscription(
        self, name: str, mark: Position, *, compacted: bool = False, tracks: bool = False
    ) -> Subscription:
        """Returns a new non-durable subscription, which ends with its last consumer. The arguments are explained at
        `TopicStorage.make_nondurable_subscription`."""
        return self._storage.make_nondurable_subscription(
            self._topic, name, mark, self._topic.shape(compacted=compacted), tracks=tracks
        )

    def find_nondurable_subscription(self, name: str) -> Subscription | None:
        """Returns the non-durable subscription that has the name `name` in this topic; None if there is none. Raises
        NotAllowed if the subscription of this name is durable."""
        found = self._by_name.get(name)
        if found is not None and found.is_durable:
            raise SubscribeRefusal.LASTS.error(
                f"subscription {name!r} of topic {self._topic.name} is durable: "
                "ask for a durable one, or choose another name"
            )
        return found

    def register_nondurable_subscription(self, subscription: Subscription) -> None:
        """Adds a non-durable subscription to the topic. If its name is taken, changes `subscription.name` to a unique
        one. Raises NotOwner if this broker has stopped serving the topic, because the consumer would not be notified of
        that later."""
        self._topic.check_not_ended()
        key = subscription.name
        while key in self._by_name:
            key = f"{subscription.name}-{self._topic.world.rng.randbytes(4).hex()}"
        subscription.name = key
        self.add_subscription(subscription)

    async def end_nondurable_subscription(self, subscription: Subscription) -> None:
        """Ends a non-durable subscription and removes it from the topic. Does nothing while it has a consumer, or if it
        is durable. Raises the errors of `Subscription.close`."""
        if subscription.is_durable or subscription.consumers:
            return
        if self._by_name.get(subscription.name) is subscription:
            del self._by_name[subscription.name]
            await subscription.close()

    async def unsubscribe(self, name: str, *, force: bool = False) -> None:
        """Deletes the subscription `name`, durably; its consumers are disconnected with SubscriptionNotFound. Raises
        Busy if consumers are connected and `force` is False; SubscriptionNotFound if the topic has no such
        subscription. Raises the errors of `Log.commit_fields` and `DurableCursor.delete`: then the subscription has
        ended at this broker, may exist again after the next load of the topic, and the call may be repeated."""
        async with self.changing:
            if name in self._deleting:
                await run_to_end(self._delete(name))
                return
            subscription = self._topic.find_subscription(name)
            if subscription.consumers and not force:
                raise Busy(f"subscription {name!r} of {self._topic.name} has {len(subscription.consumers)} consumers")
            await run_to_end(self._remove(subscription))

    async def _remove(self, subscription: Subscription) -> None:
        del self._by_name[subscription.name]
        subscription.disconnect_all(SubscriptionNotFound(f"subscription {subscription.name!r} was removed"))
        subscription.stop()
        try:
            if subscription.store is not None:
                self._deleting[subscription.name] = subscription.store
                await self._delete(subscription.name)
        finally:
            await subscription.close()

    async def _delete(self, name: str) -> None:
        await self._name_subscriptions()
        await self._deleting[name].delete()
        del self._deleting[name]

    async def set_properties(self, subscription: Subscription, properties: dict[str, str]) -> None:
        """Replaces all properties of a durable subscription, durably. A dead-letter policy, a filter or limits of keys
        in the properties apply from now on; consumers that cannot go on with new limits are disconnected. Raises
        InvalidRequest if the properties are too large, or if the dead-letter policy, the filter or the limits of keys
        are invalid; Busy if the filter changes and consumers are connected; and the errors of
        `DurableCursor.set_properties`."""
        check_properties(properties)
        check_fair_properties(properties)
        assert subscription.store is not None, "it is durable"
        wanted = find_filter(properties)
        changes = (wanted.text if wanted is not None else "") != subscription.filter_text
        if changes and subscription.consumers:
            raise Busy(
                f"subscription {subscription.name!r} has {len(subscription.consumers)} consumers: "
                "a filter changes while none is connected"
            )
        await run_to_end(subscription.store.set_properties(properties))
        if changes:
            subscription.disconnect_all(Unavailable("the filter of the subscription has changed; subscribe again"))
            subscription.set_filter(wanted, self._topic.key_indexes)
        subscription.pump.wake()
        subscription.apply_properties()
