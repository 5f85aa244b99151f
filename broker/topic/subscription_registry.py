"""The subscriptions of a topic: how they are made, found again after a loss, and removed.

The topic's record names the durable ones, in the same commit as a new one's record: so one whose record is lost is told
from one that was deleted, and is made anew. Changes are serialised by `changing`, with trimming and the topic's end: a
subscription that is being made keeps its data (invariant 34).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ...metadata.store import NodeUpdate
from ...proto.errors import AlreadyExists, Busy, SubscriptionNotFound
from ...proto.names import Position, check_subscription_name
from ...runtime.tasks import run_to_end
from ..common.refusals import SubscribeRefusal
from ..log.log_shape_core import LogShape
from ..subscription.consumer import Consumer
from ..subscription.core.redelivery_backoff import check_properties
from ..subscription.core.subscription_types import SubscriptionType
from ..subscription.subscription import Subscription
from .storage import Storage

if TYPE_CHECKING:
    from .topic import Topic

_LOG = logging.getLogger("magnetar.broker.topic")

NAMES_BYTES_MAX = 64 << 10
"""Most bytes of the names of subscriptions in a topic's record, a sixteenth of what a record holds; with more it names
none."""
RECORD_LOST = "magnetar.record-lost-ms"
"""The property of a subscription that was made anew because its record was lost: when."""


class SubscriptionRegistry:
    """The subscriptions of one topic. Creates, restores and deletes them."""

    __slots__ = ("_by_name", "_storage", "_topic", "_unnamed", "changing")

    def __init__(self, topic: Topic, storage: Storage) -> None:
        self._topic = topic
        self._storage = storage
        self._by_name = topic.subscriptions
        self._unnamed = False  # the record does not name the subscriptions that there are
        self.changing = asyncio.Lock()  # serialises changes of the set of subscriptions, and trimming

    def durable_subscriptions(self) -> list[Subscription]:
        """Returns the durable subscriptions."""
        return [each for each in self._by_name.values() if each.is_durable]

    async def open(self) -> None:
        """Opens the stored subscriptions. The log must be taken over before."""
        topic = self._topic
        for subscription in await self._storage.open_subscriptions(topic, topic.compaction.shape):
            self.add(subscription)
            mark = subscription.cursor.mark
            if topic.compaction.shape.after(mark) != topic.log.shape.after(mark):
                subscription.read_from(topic.compaction.view)  # it has not read all that is left of trimmed ledgers
        await self._make_lost_ones()

    async def _make_lost_ones(self) -> None:
        """Creates each subscription again that the topic's record names but that has no record of its own: its record
        was lost, not deleted. The subscription begins at the oldest message, so that no unacknowledged message is
        skipped or trimmed."""
        if not self._topic.name.persistent:
            return
        named = self._topic.log.record.subscriptions
        self._unnamed = named is None
        for name in [each for each in named or () if each not in self._by_name]:
            _LOG.error(
                "%s/%s: the record of the subscription is lost, and it was not deleted: it begins anew at the oldest "
                "message", self._topic.name, name,
            )  # fmt: skip
            properties = {RECORD_LOST: str(self._topic.world.clock.wall_ms())}
            shape = self._topic.shape(compacted=False)
            making = self._storage.create(self._topic, name, self._topic.log.shape.start, properties, shape)
            self.add(await run_to_end(making))

    async def commit(self, name: str, record: NodeUpdate) -> None:
        """Commits the record of a new subscription, and in the same commit adds its name to the topic's record. Names
        of lost subscriptions that are not created anew yet stay there. The caller must not be cancelled meanwhile."""
        named = self._topic.log.record.subscriptions or ()
        await self._topic.log.commit_fields(together=(record,), within=True, subscriptions=self._names({name, *named}))
        self._unnamed = False

    async def _name_subscriptions(self) -> None:
        """Commits the names of the durable subscriptions to the topic's record. Must be called before the record of a
        deleted subscription is deleted."""
        if not self._topic.name.persistent:
            return
        names = self._names(set())
        if names != self._topic.log.record.subscriptions:
            self._unnamed = True
            await self._topic.log.commit_fields(subscriptions=names)
        self._unnamed = False

    def _names(self, new: set[str]) -> tuple[str, ...] | None:
        """Returns the names of the durable subscriptions and of `new`; None if they are too long for the topic's
        record."""
        names = (
            () if self._topic.is_going else tuple(sorted(new.union(each.name for each in self.durable_subscriptions())))
        )
        return names if sum(len(each.encode()) for each in names) <= NAMES_BYTES_MAX else None

    def add(self, subscription: Subscription) -> Subscription:
        """Adds a subscription, and applies the topic's policies to it. Returns it."""
        self._by_name[subscription.name], topic = subscription, self._topic
        # made before the first transaction, perhaps
        if topic.shown is not topic.log and not subscription.reads_compacted:
            subscription.switch_log(topic.readable_log(uncommitted=subscription.reads_uncommitted))
        topic.apply_to_subscription(subscription)
        return subscription

    async def subscribe(
        self, name: str, mark: Position | None = None, properties: dict[str, str] | None = None, *,
        exclusive: bool = False, compacted: bool = False, by_consumer: bool = False,
    ) -> Subscription:  # fmt: skip
        """Returns the durable subscription of that name. If it does not exist, creates it, with its mark at `mark`
        (None: at the end of the topic).

        `exclusive`: raises AlreadyExists if it exists. `compacted`: `mark` is a position of the compacted form.
        `by_consumer`: a consumer asks for it instead of an operator; a policy may forbid to create it then."""
        check_subscription_name(name)
        async with self.changing:
            self._topic.check_open()
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
            return await run_to_end(self._make(name, mark, properties or {}, self._topic.shape(compacted=compacted)))

    async def _make(
        self, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        subscription = await self._storage.create(self._topic, name, mark, properties, shape)
        self._topic.check_open()
        return self.add(subscription)

    def check_subscription(self, name: str, *, by_consumer: bool) -> None:
        """Raises NotAllowed or SubscriptionNotFound if no further subscription may be created (admission_core.py)."""
        self._topic.admission.check_subscription(self._topic.applied, name, len(self._by_name), by_consumer=by_consumer)

    def check_consumer(self, subscription: Subscription, type_: SubscriptionType, consumer: Consumer) -> None:
        """Raises NotAllowed or ConsumerBusy if the consumer may not join (admission_core.py)."""
        everybody = [each for other in self._by_name.values() for each in other.consumers.values()]
        mine = subscription.consumers.values()
        self._topic.admission.check_consumer(self._topic.applied, type_, consumer, subscription.name, everybody, mine)

    def make_nondurable_subscription(
        self, name: str, mark: Position, *, compacted: bool = False, tracks: bool = False
    ) -> Subscription:
        """Returns a non-durable subscription, which ends with its last consumer
        (`Storage.make_nondurable_subscription`)."""
        return self._storage.make_nondurable_subscription(
            self._topic, name, mark, self._topic.shape(compacted=compacted), tracks=tracks
        )

    def find_nondurable_subscription(self, name: str) -> Subscription | None:
        """Returns the non-durable subscription of that name that other consumers may join; None if there is none.
        Raises NotAllowed if the subscription of that name is durable."""
        found = self._by_name.get(name)
        if found is not None and found.is_durable:
            raise SubscribeRefusal.LASTS.error(
                f"subscription {name!r} of topic {self._topic.name} is durable: "
                "ask for a durable one, or choose another name"
            )
        return found

    def register_nondurable_subscription(self, subscription: Subscription) -> None:
        """Registers a non-durable subscription, under another name if its own is taken. Raises NotOwner if the topic
        has ended at this broker, since its consumer would not be notified of that."""
        self._topic.check_open()
        key = subscription.name
        while key in self._by_name:
            key = f"{subscription.name}-{self._topic.world.rng.randbytes(4).hex()}"
        subscription.name = key
        self.add(subscription)

    async def end_nondurable_subscription(self, subscription: Subscription) -> None:
        """Ends a non-durable subscription if no consumer is left."""
        if subscription.is_durable or subscription.consumers:
            return
        if self._by_name.get(subscription.name) is subscription:
            del self._by_name[subscription.name]
            await subscription.close()

    async def unsubscribe(self, name: str, *, force: bool = False) -> None:
        """Deletes a subscription. Raises Busy if consumers are connected and `force` is False; SubscriptionNotFound if
        the topic has no subscription of that name."""
        async with self.changing:
            subscription = self._topic.find_subscription(name)
            if subscription.consumers and not force:
                raise Busy(f"subscription {name!r} of {self._topic.name} has {len(subscription.consumers)} consumers")
            await run_to_end(self._remove(subscription))

    async def _remove(self, subscription: Subscription) -> None:
        del self._by_name[subscription.name]
        subscription.disconnect_all(SubscriptionNotFound(f"subscription {subscription.name!r} was removed"))
        subscription.stop()
        if subscription.store is not None:
            await self._name_subscriptions()
            await subscription.store.delete()
        await subscription.close()

    async def set_properties(self, subscription: Subscription, properties: dict[str, str]) -> None:
        """Replaces all properties of a durable subscription. A dead-letter policy in them applies from now on. Raises
        InvalidRequest if they are too large, or the policy does not parse."""
        check_properties(properties)
        assert subscription.store is not None, "it is durable"
        await run_to_end(subscription.store.set_properties(properties))
        subscription.pump.wake()
