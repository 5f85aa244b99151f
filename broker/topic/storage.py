"""The storage of a topic's log and subscriptions: on bookies and in the metadata, or none (nonpersistent.py).

A topic is constructed with its `Storage` and knows no more of the difference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Concatenate, Protocol

import msgspec

from ...ledger import LedgerClient
from ...metadata import paths
from ...metadata.store import MetadataStore
from ...metadata.update import Change
from ...proto.applied import Applied
from ...proto.errors import MagnetarError
from ...proto.names import LATEST, Position, TopicName
from ...runtime.monitoring.metrics import Histogram
from ...runtime.world import World
from ..common.config import BrokerConfig, Policy
from ..log.cache import TailCache
from ..log.core.log_shape import LogShape
from ..log.log import Log, ReadableLog
from ..log.read_memory import ReadMemory
from ..log.topic_log import TopicLog
from ..subscription.core.cursor import Cursor
from ..subscription.core.cursor_state import CursorState
from ..subscription.core.delays import DelayIndex
from ..subscription.cursors import DurableCursor, claims
from ..subscription.dead_letters import DeadLetters
from ..subscription.delays import DelayedDelivery
from ..subscription.subscription import Subscription


class Owner(Protocol):
    """The topic, as its log and its subscriptions see it."""

    name: TopicName
    applied: Applied

    @property
    def incarnation(self) -> int: ...
    @property
    def log(self) -> Log: ...
    @property
    def shown(self) -> ReadableLog:
        """Returns the log as it is shown to readers of committed entries."""

    @property
    def owned(self) -> Callable[[], bool]: ...
    @property
    def replication(self) -> Policy:
        """The quorums of the next ledger."""

    async def commit_subscription(self, name: str, record: Change) -> None:
        """Commits the record of a new subscription, and in the same commit its name in the topic's record."""

    def confirmed(self) -> None:
        """Called when new entries can be handed out."""

    def crowded(self) -> None:
        """Called when the log drops entries unless they are handed out now."""

    def delayed(self, position: Position, at_ms: int) -> None:
        """Called when an entry that was just stored has a delivery time."""

    def lose(self, error: MagnetarError) -> None: ...
    def waits(self, error: MagnetarError) -> None:
        """Tells producers why what they published waits for a ledger."""


class Storage(Protocol):
    """The storage of a topic's log and subscriptions."""

    def log(self, owner: Owner) -> Log: ...

    async def subscriptions(self, owner: Owner, shape: LogShape) -> list[Subscription]:
        """Returns the subscriptions that exist, opened, after the log was taken over; their marks may be in what is
        only in `shape`."""

    async def create(
        self, owner: Owner, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        """Makes a subscription that has acknowledged everything up to `mark` (None: to the end)."""

    def passing(self, owner: Owner, name: str, mark: Position, shape: LogShape, *, tracks: bool) -> Subscription:
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

    def log(self, owner: Owner) -> TopicLog:
        return TopicLog(
            self.world, self.metadata, self.ledgers, self.cache, self.config, owner.name,
            replication=owner.replication, on_confirmed=owner.confirmed, on_delayed=owner.delayed, on_lost=owner.lose,
            owned=owner.owned, publish_seconds=self.publish_seconds, on_waits=owner.waits,
            claims=claims,
        )  # fmt: skip

    async def subscriptions(self, owner: Owner, shape: LogShape) -> list[Subscription]:
        name, found = owner.name, list[Subscription]()
        for each in await self.metadata.children(paths.cursors(name.tenant, name.namespace, name.stored_local)):
            store = self._store(owner, paths.name(each), owner.log.record.claim)
            await store.open(shape)
            store.cursor.over(owner.log.shape)
            found.append(self._subscription(owner, store))
        return found

    async def create(
        self, owner: Owner, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        store = self._store(owner, name)
        mark = shape.clamp(mark if mark is not None else LATEST)
        await store.create(shape, mark, properties, partial(owner.commit_subscription, name))
        return self._subscription(owner, store)

    def passing(self, owner: Owner, name: str, mark: Position, shape: LogShape, *, tracks: bool) -> Subscription:
        cursor, clock = Cursor(shape, CursorState(shape.clamp(mark))), self.world.clock
        return Subscription(
            name, owner.shown, cursor, None, clock, self.config, owner.applied, tracks=tracks, memory=self.reads
        )

    def _store(self, owner: Owner, subscription: str, claim: str = "") -> DurableCursor:
        return DurableCursor(
            self.world, self.metadata, self.ledgers, self.config, owner.name, subscription,
            replication=owner.replication, on_fenced=owner.log.lose, claim=claim,
        )  # fmt: skip

    def _subscription(self, owner: Owner, store: DurableCursor) -> Subscription:
        config, log, clock = self.config, owner.shown, self.world.clock
        delays = DelayIndex(log.shape, store.cursor, config.delayed_seal_entries, config.delayed_memory_bytes)
        delayed = DelayedDelivery(
            self.world, self.ledgers, config, store, delays, topic=owner, replication=owner.replication,
            on_fenced=owner.log.lose,
        )  # fmt: skip
        subscription = Subscription(
            store.subscription, log, store.cursor, store, clock, config, owner.applied, delayed, memory=self.reads
        )
        subscription.dead_letters = DeadLetters(
            store.subscription, log, store.cursor, store, subscription.dispatcher, clock,
            topic=owner, forward=self.forward, wake=subscription.wake,
        )  # fmt: skip
        return subscription
