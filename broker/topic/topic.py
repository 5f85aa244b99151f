"""A topic that this broker owns for a while: its log, its producers, its subscriptions.

Loaded by `Topic.open` (take-over of the log, then of every durable cursor), ended by `close` (in order: producers and
consumers are told, cursors stored, the ledger closed) or by `lose` (another broker has it: everything stops at once).
What changes the set of subscriptions and what trims the log are serialised: a subscription that is being made holds
its data (invariant 34).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ...ledger import LedgerClient
from ...metadata import paths
from ...metadata.store import MetadataStore
from ...proto.errors import (
    AlreadyExists,
    Busy,
    ConsumerBusy,
    MagnetarError,
    NotAllowed,
    NotOwner,
    SubscriptionNotFound,
    TopicNotFound,
    Unavailable,
)
from ...proto.model import SubscriptionType
from ...proto.names import LATEST, Position, TopicName, check_subscription_name
from ...runtime.metrics import Histogram
from ...runtime.unbroken import unbroken
from ...runtime.world import World
from ..common.applied import Applied
from ..common.config import BrokerConfig, Replication
from ..common.token_bucket import Rate
from ..log.cache import TailCache
from ..log.compaction import Compaction
from ..log.core.log_shape import LogShape
from ..log.core.trimming import Retention, Safe, trimmable
from ..log.topic_log import State, TopicLog
from ..subscription.consumer import Consumer
from ..subscription.core.cursor import Cursor, CursorState
from ..subscription.core.delays import Delays
from ..subscription.core.redelivery_backoff import check_properties
from ..subscription.core.redelivery_backoff import policy_of as dead_letter_policy
from ..subscription.cursors import DurableCursor
from ..subscription.dead_letters import DeadLetters, Forward
from ..subscription.delays import DelayedDelivery
from ..subscription.subscription import Subscription
from . import backlog
from .core.admission import Admission
from .dedup import Deduplication
from .gate import PublishGate
from .maintenance import TopicLife
from .registry import Seating
from .statistics import BrokerRates, Traffic

_LOG = logging.getLogger("magnetar.broker.topic.topic")


class Topic:
    __slots__ = (
        "__dict__", "_broker_rates", "_changing", "_config", "_dispatch_rate", "_ended", "_forward", "_going",
        "_ledgers", "_metadata", "_on_lost", "_publish_rate", "_settled", "_world", "admission", "applied",
        "compaction", "dedup", "gate", "life", "log", "name", "owned", "producers", "subscriptions", "traffic",
    )  # fmt: skip

    def __init__(
        self, world: World, metadata: MetadataStore, ledgers: LedgerClient, cache: TailCache, config: BrokerConfig,
        name: TopicName, applied: Applied, *, rates: BrokerRates, owned: Callable[[], bool],
        settled: Callable[[], bool], on_lost: Callable[[Topic], None], forward: Forward,
        publish_seconds: Histogram | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._forward = forward
        self.applied = applied  # read it anew for each decision; `apply` changes it
        self.producers = Seating(self)
        self.subscriptions: dict[str, Subscription] = {}
        self.traffic = Traffic()
        self._world = world
        self._metadata = metadata
        self._ledgers = ledgers
        self._config = config
        self._changing = asyncio.Lock()  # of the set of subscriptions, and trimming
        self._on_lost = on_lost
        self.owned = owned
        self._settled = settled
        self._ended = False
        self._going = False  # it is being deleted
        self._publish_rate, self._dispatch_rate = Rate(), Rate()
        self._broker_rates = rates
        self.admission = Admission(name, config.max_same_address_producers, config.max_same_address_consumers)
        self.life = TopicLife(world, self, config.roll_idle_s, self._released)
        self.gate = PublishGate((self._publish_rate, rates.publish), lambda: self.life.holds)
        self.apply(applied)
        self.log = self._make_log(
            world, metadata, ledgers, cache, config, name, replication=self._replication,
            on_confirmed=self._confirmed, on_delayed=self._delayed, on_lost=self.lose,
            owned=owned, publish_seconds=publish_seconds,
        )  # fmt: skip
        self.dedup = Deduplication(world, ledgers, config, self.log, self._replication)

        self.compaction = Compaction(
            world, ledgers, config, name, self.log, replication=self._replication, changed=self._compacted,
            turn=rates.compacting,
        )  # fmt: skip

    def _make_log(self, *args: Any, **options: Any) -> TopicLog:
        return TopicLog(*args, **options)

    @property
    def config(self) -> BrokerConfig:
        return self._config

    @property
    def dropped(self) -> int:
        """Messages that nobody got: only a non-persistent topic has such."""
        return 0

    def apply(self, applied: Applied) -> None:
        """Other policies hold from here on."""
        self.applied, now = applied, asyncio.get_running_loop().time()
        self._publish_rate.change(applied.publish_rate_messages, applied.publish_rate_bytes, now)
        self._dispatch_rate.change(applied.dispatch_rate_messages, applied.dispatch_rate_bytes, now)
        self.gate.look()
        for producer in self.producers:
            producer.size_max = applied.max_message_bytes
        for subscription in self.subscriptions.values():
            self._apply_to(subscription)

    def _apply_to(self, subscription: Subscription) -> None:
        applied, own = self.applied, subscription.rates[0]
        messages, size = applied.subscription_dispatch_rate_messages, applied.subscription_dispatch_rate_bytes
        own.change(messages, size, asyncio.get_running_loop().time())
        subscription.rates = (own, self._dispatch_rate, self._broker_rates.dispatch)
        subscription.apply(applied)
        subscription.wake()

    def _released(self) -> None:
        self.gate.look()

    async def _replication(self) -> Replication:
        """Of the next ledger."""
        applied = self.applied
        return Replication(applied.ensemble_size, applied.write_quorum, applied.ack_quorum)

    # ------------------------------------------------------------------ loading
    async def open(self, create: Callable[[], Awaitable[None]] | None = None) -> None:
        """Takes the topic over; one that does not exist is made by `create`, where that is allowed.

        TopicNotFound, NotOwner (another broker is faster), DataLost, Unavailable."""
        names = paths.cursors(self.name.tenant, self.name.namespace, self.name.stored_local)
        try:
            try:
                await self.log.open()
            except TopicNotFound:
                if create is None:
                    raise
                await create()
                await self.log.open()
            await self.dedup.open(self.applied.deduplication)
            await self.compaction.open()
            for name in await self._metadata.children(names):
                store = self._store(paths.name(name))
                await store.open(self.compaction.view.shape)  # its mark may stand in what is only there compacted
                store.cursor.over(self.log.shape)
                self._add(store)
        except BaseException:
            await self._abandon()
            raise

    def _store(self, subscription: str) -> DurableCursor:
        return DurableCursor(
            self._world, self._metadata, self._ledgers, self._config, self.name, subscription,
            replication=self._replication, on_fenced=self.log.lose, on_stored=lambda: None,
        )  # fmt: skip

    def _add(self, store: DurableCursor) -> Subscription:
        config = self._config
        delays = Delays(
            self.log.shape, store.cursor, config.delayed_seal_entries, config.delayed_memory_bytes,
        )  # fmt: skip
        delayed = DelayedDelivery(
            self._world, self._ledgers, config, store, delays, applied=lambda: self.applied,
            replication=self._replication, on_fenced=self.log.lose,
        )  # fmt: skip
        subscription = Subscription(store.subscription, self.log, store.cursor, store, config, self.applied, delayed)
        subscription.dead_letters = DeadLetters(
            store.subscription, self.log, store.cursor, store, subscription.dispatcher, self._world.clock,
            policy=lambda: dead_letter_policy(self.applied, store.properties).at(self.name, store.subscription),
            forward=self._forward,
            wake=subscription.wake,
        )  # fmt: skip
        self.subscriptions[store.subscription] = subscription
        self._apply_to(subscription)
        return subscription

    def _confirmed(self) -> None:
        """New entries can be handed out."""
        for subscription in self.subscriptions.values():
            if subscription.consumers:
                subscription.wake()

    def _delayed(self, position: Position, at_ms: int) -> None:
        """A new entry has a delivery time."""
        for subscription in self.subscriptions.values():
            subscription.noted(position, at_ms)

    def check_delay(self, at_ms: int) -> None:
        """NotAllowed: that is later than a message may come. (Types that do not delay deliver it at once.)"""
        limit, delay = self.applied.max_delay_ms, at_ms - self._world.clock.wall_ms()
        if limit and delay > limit and self.applied.delayed_delivery:
            raise NotAllowed(f"topic {self.name}: a delay of {delay} ms is above the longest, {limit} ms")

    # ------------------------------------------------------------------ subscriptions
    async def subscribe(
        self, name: str, mark: Position | None = None, properties: dict[str, str] | None = None, *,
        exclusive: bool = False, compacted: bool = False, by_consumer: bool = False,
    ) -> Subscription:  # fmt: skip
        """The durable subscription; made with its mark there (None: at the end) when it does not exist.

        `exclusive`: AlreadyExists when it does. `compacted`: the mark is one of who reads compacted. `by_consumer`: it
        is made by the way, which may be forbidden.
        """
        check_subscription_name(name)
        async with self._changing:
            self.check_open()
            found = self.subscriptions.get(name)
            if found is not None:
                if exclusive:
                    raise AlreadyExists(f"subscription {name!r} of topic {self.name} exists already")
                return found
            self.check_subscription(name, by_consumer=by_consumer)
            check_properties(properties or {})
            return await unbroken(self._make(name, mark, properties or {}, self.shape(compacted=compacted)))

    async def _make(
        self, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        store = self._store(name)
        await store.create(shape, shape.clamp(mark if mark is not None else LATEST), properties)
        self.check_open()
        return self._add(store)

    def check_subscription(self, name: str, *, by_consumer: bool) -> None:
        """Whether one more may be made (core/admission.py)."""
        self.admission.check_subscription(self.applied, name, len(self.subscriptions), by_consumer=by_consumer)

    def check_consumer(self, subscription: Subscription, type_: SubscriptionType, consumer: Consumer) -> None:
        """Whether it may come (core/admission.py)."""
        everybody = [each for other in self.subscriptions.values() for each in other.consumers.values()]
        mine = subscription.consumers.values()
        self.admission.check_consumer(self.applied, type_, consumer, subscription.name, everybody, mine)

    def shape(self, *, compacted: bool) -> LogShape:
        """The places of the topic, as who reads compacted sees them, or everybody else."""
        return self.compaction.view.shape if compacted else self.log.shape

    def show(self, subscription: Subscription, *, compacted: bool) -> None:
        """A consumer comes that reads compacted, or does not. ConsumerBusy: others read the other way."""
        if subscription.consumers:
            if subscription.compacted != compacted:
                way = "compacted" if subscription.compacted else "everything"
                raise ConsumerBusy(f"the consumers of subscription {subscription.name!r} read {way}", topic=self.name)
        elif compacted or subscription.compacted:
            subscription.read_from(self.compaction.view if compacted else self.log)

    def _compacted(self) -> None:
        """Who reads compacted and stands in front of the new horizon starts over, with what is left there."""
        record = self.compaction.record
        assert record is not None, "it was just written"
        horizon = Position(record.horizon_ledger, record.horizon_entry)
        for subscription in list(self.subscriptions.values()):
            if subscription.compacted and subscription.needs(horizon):
                subscription.disconnect_all(Unavailable(f"topic {self.name} was compacted; subscribe again"))

    def read_only(self, name: str, mark: Position, *, compacted: bool = False) -> Subscription:
        """A reader's subscription: it dies with its consumer, and holds no data."""
        shape = self.shape(compacted=compacted)
        cursor = Cursor(shape, CursorState(shape.clamp(mark)))
        return Subscription(name, self.log, cursor, None, self._config, self.applied)

    def attach(self, subscription: Subscription) -> None:
        """A reader's subscription takes part from now on. NotOwner: whoever joins now would never hear of the end."""
        self.check_open()
        key = subscription.name
        while key in self.subscriptions:
            key = f"{subscription.name}-{self._world.rng.randbytes(4).hex()}"
        subscription.name = key
        self.subscriptions[key] = subscription
        self._apply_to(subscription)

    async def detach(self, subscription: Subscription) -> None:
        if self.subscriptions.get(subscription.name) is subscription and not subscription.durable:
            del self.subscriptions[subscription.name]
            await subscription.close()

    def subscription(self, name: str) -> Subscription:
        found = self.subscriptions.get(name)
        if found is None or not found.durable:
            raise SubscriptionNotFound(f"topic {self.name} has no subscription {name!r}", subscription=name)
        return found

    async def unsubscribe(self, name: str, *, force: bool = False) -> None:
        """Removes a subscription for good. Busy while consumers are connected, unless by force."""
        async with self._changing:
            subscription = self.subscription(name)
            if subscription.consumers and not force:
                raise Busy(f"subscription {name!r} of {self.name} has {len(subscription.consumers)} consumers")
            await unbroken(self._remove(subscription))

    async def _remove(self, subscription: Subscription) -> None:
        del self.subscriptions[subscription.name]
        subscription.disconnect_all(SubscriptionNotFound(f"subscription {subscription.name!r} was removed"))
        subscription.stop()
        assert subscription.store is not None
        await subscription.store.delete()
        await subscription.close()

    async def set_properties(self, subscription: Subscription, properties: dict[str, str]) -> None:
        """Of a durable one: these and no others. Its dead-letter policy among them holds from here on."""
        check_properties(properties)
        assert subscription.store is not None, "it is durable"
        await unbroken(subscription.store.set_properties(properties))
        subscription.wake()

    async def truncate(self) -> None:
        """Everything counts as acknowledged by every subscription, and every ledger that is not written goes."""
        await self.log.roll()
        for subscription in [each for each in self.subscriptions.values() if each.durable]:
            await backlog.skip(self.log, subscription, -1)
        await self.trim(retained=False)

    @property
    def users(self) -> int:
        """Producers and consumers that are connected."""
        return len(self.producers) + sum(len(each.consumers) for each in self.subscriptions.values())

    # ------------------------------------------------------------------ trimming
    def retention(self) -> Retention:
        return Retention(self.applied.retention_minutes, self.applied.retention_mib)

    async def trim(self, *, retained: bool = True) -> list[int]:
        """Removes ledgers that nobody needs (core/trimming.py), also those that retention keeps when it is asked to."""
        self.dedup.want(self.applied.deduplication)
        async with self._changing:
            return [] if self._ended else await unbroken(self._trim(self.retention() if retained else Retention()))

    async def _trim(self, retention: Retention) -> list[int]:
        gone = await self.log.trim(lambda: self._trimmable(retention))
        for ledger_id in gone:
            if self.compaction.view.shape.span(ledger_id) is None:
                for subscription in self.subscriptions.values():
                    subscription.cursor.trimmed(ledger_id)
        return gone

    def _trimmable(self, retention: Retention) -> list[int]:
        holders = [each.cursor.safe for each in self.subscriptions.values() if each.durable]
        held = self.compaction.held(self.applied.compaction_threshold_bytes)
        holders += [Safe(mark) for mark in (self.dedup.mark, held) if mark is not None]
        return trimmable(self.log.shape, holders, retention, self._world.clock.wall_ms())

    # ------------------------------------------------------------------ ending
    @property
    def ended(self) -> bool:
        """It takes nothing any more."""
        return self._ended

    def check_open(self) -> None:
        """NotOwner when the topic has ended here: its end may be old, and nobody would hear more."""
        if self._ended or self._going or self.log.state is State.LOST:
            raise NotOwner(f"topic {self.name} is not served here any more; look it up again", topic=self.name)

    def check_end(self) -> None:
        """Before anybody is told where the topic ends. Unavailable: another broker may have gone on with it by now."""
        self.check_open()
        if not self._settled():
            raise Unavailable(f"this broker cannot tell whether topic {self.name} went on elsewhere; ask again")

    def lose(self, error: MagnetarError) -> None:
        """The topic belongs to another broker, or this one cannot serve it: everything stops at once."""
        if self._ended:
            return
        self._ended = True
        self.compaction.stop()
        self._disconnect(NotOwner(f"topic {self.name} is not served here any more: {error}", topic=self.name))
        self.dedup.stop()
        for subscription in list(self.subscriptions.values()):  # readers detach meanwhile
            subscription.stop()
            if subscription.store is not None:
                subscription.store.abandon()
        self._on_lost(self)

    def _disconnect(self, error: MagnetarError) -> None:
        self.producers.close(error)
        for subscription in list(self.subscriptions.values()):  # readers detach meanwhile
            subscription.disconnect_all(error)

    async def close(self, error: MagnetarError | None = None) -> None:
        """Unloads the topic in order; clients are told `error` (NotOwner: look it up again). Idempotent."""
        async with self._changing:
            unloaded = NotOwner(f"topic {self.name} was unloaded; look it up again", topic=self.name)
            await unbroken(self._close(error or unloaded))

    async def _close(self, error: MagnetarError) -> None:
        if not self._ended:
            self._ended = True
            self.compaction.stop()
            try:
                await self.log.close()
            except MagnetarError as failure:
                _LOG.warning("%s: not closed in order: %s", self.name, failure)
            self._disconnect(error)
        await self._close_subscriptions()

    async def _close_subscriptions(self) -> None:
        for subscription in list(self.subscriptions.values()):  # readers detach meanwhile
            try:
                await subscription.close()
            except MagnetarError as failure:
                _LOG.warning("%s/%s: cursor not stored: %s", self.name, subscription.name, failure)
        await self.dedup.close()
        await self.log.close()

    async def _abandon(self) -> None:
        self._ended = True
        await self._close_subscriptions()

    async def delete(self, *, force: bool) -> list[int]:
        """Ends the topic for good; its ledgers, to be deleted after its record. Busy when in use, unless by force."""
        durable = [each for each in self.subscriptions.values() if each.durable]
        busy = self.users
        if not force and (busy or durable):
            raise Busy(
                f"topic {self.name} has {len(self.producers)} producers and {len(durable)} subscriptions; "
                "remove them first, or delete by force",
                topic=self.name,
            )
        self._going = True  # nobody comes in while its subscriptions go: what he publishes would be lost
        try:
            for name in [each.name for each in durable]:
                await self.unsubscribe(name, force=True)
        except MagnetarError:
            self._going = False
            raise
        await self.close(NotOwner(f"topic {self.name} was deleted", topic=self.name))
        record = self.log.record
        snapshots, compacted = record.dedup, record.compacted
        return [
            *(each.ledger_id for each in record.ledgers),
            *([snapshots.ledger_id] if snapshots is not None and snapshots.ledger_id >= 0 else []),
            *([compacted.ledger_id] if compacted is not None else []),
            *record.doomed,
        ]
