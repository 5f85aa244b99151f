"""The storage of a topic's log and subscriptions: on bookies and in the metadata, or none (nonpersistent.py).

A topic is constructed with its `Storage` and knows no more of the difference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Concatenate, Protocol

import msgspec

from ...ledger import LedgerClient
from ...metadata import paths
from ...metadata.store import MetadataStore
from ...proto.names import LATEST, Position, TopicName
from ...runtime.monitoring.metrics import Histogram
from ...runtime.world import World
from ..common.config import BrokerConfig
from ..log.cache import TailCache
from ..log.core.log_shape import LogShape
from ..log.log import Log
from ..log.read_memory import ReadMemory
from ..log.topic_log import TopicLog
from ..subscription.core.cursor import Cursor
from ..subscription.core.cursor_state import CursorState
from ..subscription.core.delays import DelayIndex
from ..subscription.cursors import DurableCursor, claims
from ..subscription.dead_letters import DeadLetters
from ..subscription.delays import DelayedDelivery
from ..subscription.subscription import Subscription

if TYPE_CHECKING:
    from .topic import Topic


class Storage(Protocol):
    """The storage of a topic's log and subscriptions."""

    def log(self, topic: Topic) -> Log: ...

    async def subscriptions(self, topic: Topic, shape: LogShape) -> list[Subscription]:
        """Returns the subscriptions that exist, opened, after the log was taken over; their marks may be in what is
        only in `shape`."""

    async def create(
        self, topic: Topic, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        """Makes a subscription that has acknowledged everything up to `mark` (None: to the end)."""

    def passing(self, topic: Topic, name: str, mark: Position, shape: LogShape, *, tracks: bool) -> Subscription:
        """A subscription that ends with its last consumer, and keeps no data. `tracks` False: what a consumer got is
        never given back, as that of a reader."""


class DurableStorage(msgspec.Struct, frozen=True):
    """Log and subscriptions on bookies, their records in the metadata."""

    world: World
    metadata: MetadataStore
    ledgers: LedgerClient
    cache: TailCache
    config: BrokerConfig
    forward: Callable[Concatenate[tuple[TopicName, int], ...], Awaitable[object]]  # copies of its messages
    reads: ReadMemory
    publish_seconds: Histogram | None = None

    def log(self, topic: Topic) -> TopicLog:
        return TopicLog(
            self.world, self.metadata, self.ledgers, self.cache, self.config, topic.name,
            replication=topic.replication, on_confirmed=topic.confirmed, on_delayed=topic.delayed, on_lost=topic.lose,
            owned=topic.owned, publish_seconds=self.publish_seconds, on_waits=topic.waits,
            claims=claims,
        )  # fmt: skip

    async def subscriptions(self, topic: Topic, shape: LogShape) -> list[Subscription]:
        name, found = topic.name, list[Subscription]()
        for each in await self.metadata.children(paths.cursors(name.tenant, name.namespace, name.stored_local)):
            store = self._store(topic, paths.name(each), topic.log.record.claim)
            await store.open(shape)
            store.cursor.over(topic.log.shape)
            found.append(self._subscription(topic, store))
        return found

    async def create(
        self, topic: Topic, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        store = self._store(topic, name)
        mark = shape.clamp(mark if mark is not None else LATEST)
        await store.create(shape, mark, properties, partial(topic.registry.commit, name))
        return self._subscription(topic, store)

    def passing(self, topic: Topic, name: str, mark: Position, shape: LogShape, *, tracks: bool) -> Subscription:
        cursor, clock = Cursor(shape, CursorState(shape.clamp(mark))), self.world.clock
        return Subscription(
            name, topic.shown, cursor, None, clock, self.config, topic.applied, tracks=tracks, memory=self.reads
        )

    def _store(self, topic: Topic, subscription: str, claim: str = "") -> DurableCursor:
        return DurableCursor(
            self.world, self.metadata, self.ledgers, self.config, topic.name, subscription,
            replication=topic.replication, on_fenced=topic.log.lose, claim=claim,
        )  # fmt: skip

    def _subscription(self, topic: Topic, store: DurableCursor) -> Subscription:
        config, log, clock = self.config, topic.shown, self.world.clock
        delays = DelayIndex(log.shape, store.cursor, config.delayed_seal_entries, config.delayed_memory_bytes)
        delayed = DelayedDelivery(
            self.world, self.ledgers, config, store, delays, applied=topic.applied, replication=topic.replication,
            on_fenced=topic.log.lose,
        )  # fmt: skip
        subscription = Subscription(
            store.subscription, log, store.cursor, store, clock, config, topic.applied, delayed, memory=self.reads
        )
        subscription.dead_letters = DeadLetters(
            store.subscription, log, store.cursor, store, subscription.dispatcher, clock,
            topic=topic.name, incarnation=topic.incarnation, applied=topic.applied, forward=self.forward,
            wake=subscription.pump.wake,
        )  # fmt: skip
        return subscription
