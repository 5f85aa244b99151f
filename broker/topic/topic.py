"""A topic that this broker owns for a while: its log, its producers, its subscriptions.

`Topic.open` loads it (take-over of the log, then of every durable cursor). It ends by `close` (in order: producers and
consumers are notified, cursors stored, the ledger closed) or by `lose` (another broker has it: everything stops at
once). Changes of the set of subscriptions and trimming are serialised: a subscription that is being made keeps its
data (invariant 34).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ...ledger import LedgerClient
from ...metadata.update import Change
from ...proto.applied import Applied
from ...proto.errors import AlreadyExists, Busy, MagnetarError, NotOwner, SubscriptionNotFound, Unavailable
from ...proto.names import Position, TopicName, check_subscription_name
from ...proto.states import LedgerStays, TopicState
from ...runtime.unbroken import unbroken
from ...runtime.world import World
from ..common.config import BrokerConfig, Replication
from ..common.refusals import PublishRefusal, SubscribeRefusal
from ..common.token_bucket import Rate
from ..common.transactions import Coordinators, NoCoordinators, Settlement
from ..log.committed_view import CommittedView
from ..log.compaction import Compaction
from ..log.core.log_shape import LogShape
from ..log.core.trimming import NOTHING, Retention, Safe, trimmable, verdicts
from ..log.log import ReadableLog
from ..subscription.consumer import Consumer
from ..subscription.core.policies import SubscriptionType
from ..subscription.core.redelivery_backoff import check_properties
from ..subscription.subscription import Subscription
from . import backlog
from .core.admission import Admission
from .core.transactions import Transactions, TxnEnd
from .dedup import Deduplication
from .gate import PublishGate
from .maintenance import TopicMaintenance
from .part import TopicPart
from .registry import ProducerRegistry
from .replay import replay
from .statistics import BrokerRates, TopicStatistics
from .storage import Storage
from .transactions import TopicTransactions

_LOG = logging.getLogger("magnetar.broker.topic")

NOWHERE = Position(-1, -1)
NAMES_BYTES_MAX = 64 << 10
"""Most bytes of the names of subscriptions in a topic's record, a sixteenth of what a record holds; with more it names
none."""
RECORD_LOST = "magnetar.record-lost-ms"
"""The property of a subscription that was made anew because its record was lost: when."""


class Topic:
    """A loaded topic. Its `storage` decides where log and subscriptions are kept; its `parts` are called in order."""

    __slots__ = (
        "_broker_rates",
        "_changing",
        "_deleting",
        "_dispatch_rate",
        "_ended",
        "_going",
        "_on_lost",
        "_publish_rate",
        "_settled",
        "_storage",
        "_unnamed",
        "_woken_at",
        "_world",
        "admission",
        "applied",
        "compaction",
        "dedup",
        "gate",
        "life",
        "log",
        "name",
        "owned",
        "parts",
        "producers",
        "replication",
        "shown",
        "subscriptions",
        "traffic",
        "transactions",
    )  # fmt: skip

    def __init__(
        self, world: World, ledgers: LedgerClient, config: BrokerConfig, name: TopicName, applied: Applied,
        storage: Storage, *, rates: BrokerRates, owned: Callable[[], bool], settled: Callable[[], bool],
        on_lost: Callable[[Topic], None], coordinators: Coordinators | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.applied = applied  # read it anew for each decision; `apply` changes it
        self.owned = owned
        self.producers = ProducerRegistry(self)
        self.subscriptions: dict[str, Subscription] = {}
        self.traffic = TopicStatistics(world.clock)
        self._world = world
        self._storage = storage
        self._changing = asyncio.Lock()  # serialises changes of the set of subscriptions, and trimming
        self._on_lost, self._settled = on_lost, settled
        self._deleting: asyncio.Lock | None = None
        self._ended = self._going = False  # it takes nothing any more; it is being deleted
        self._unnamed = False  # the record does not name the subscriptions that there are
        self._publish_rate, self._dispatch_rate = Rate(), Rate()
        self._woken_at = NOWHERE  # the last stable position when subscriptions were woken
        self._broker_rates = rates
        self.admission = Admission(name, config.max_same_address_producers, config.max_same_address_consumers)
        self.life = TopicMaintenance(world, self, config.roll_idle_s)
        self.gate = PublishGate(world.clock, (self._publish_rate, rates.publish), self.life.is_holding)
        self.replication = self._replication  # one bound method for all that ask
        self.log = storage.log(self)
        self.shown: ReadableLog = self.log  # what readers of committed entries see: whatever shows entries reads this
        self.dedup = Deduplication(world.clock, ledgers, config, self.log, self.replication)
        self.compaction = Compaction(
            world, ledgers, config, name, self.log, replication=self.replication, changed=self._compacted,
            turn=rates.compacting,
        )  # fmt: skip
        self.transactions = TopicTransactions(
            world, ledgers, config, self, self.log, self.replication, coordinators or NoCoordinators()
        )
        self.dedup.hold_before(self.transactions.undecided)
        self.parts: tuple[TopicPart, ...] = (self.dedup, self.transactions, self.compaction)
        self.apply(applied)

    @property
    def incarnation(self) -> int:
        """Returns when the topic was made, by which it is told from another one of its name: ms since the epoch. 0: not
        known."""
        return self.log.record.created_ms

    @property
    def dropped(self) -> int:
        """Messages that no consumer got; only a non-persistent topic has any."""
        return sum(each.dropped for each in self.subscriptions.values())

    def apply(self, applied: Applied) -> None:
        """Sets other policies from here on."""
        self.applied, now = applied, self._world.clock.monotonic()
        self._publish_rate.change(applied.publish_rate_messages, applied.publish_rate_bytes, now)
        self._dispatch_rate.change(applied.dispatch_rate_messages, applied.dispatch_rate_bytes, now)
        self.dedup.apply(applied)
        self.gate.look()
        for producer in self.producers:
            producer.size_max = applied.max_message_bytes + producer.room
        for subscription in self.subscriptions.values():
            self._apply_to(subscription)

    def _apply_to(self, subscription: Subscription) -> None:
        applied, own = self.applied, subscription.rates[0]
        messages, size = applied.subscription_dispatch_rate_messages, applied.subscription_dispatch_rate_bytes
        own.change(messages, size, self._world.clock.monotonic())
        subscription.rates = (own, self._dispatch_rate, self._broker_rates.dispatch)
        subscription.apply(applied)
        if subscription.consumers:
            subscription.wake()

    def released(self) -> None:
        """Lets waiting producers continue: the backlog quota is met again."""
        self.gate.look()

    async def _replication(self) -> Replication:
        """The quorums of the next ledger."""
        applied = self.applied
        return Replication(applied.ensemble_size, applied.write_quorum, applied.ack_quorum)

    # ------------------------------------------------------------------ loading
    async def open(self, create: Callable[[], Awaitable[None]] | None = None) -> None:
        """Takes the topic over; one that does not exist is made by `create`, where that is allowed.

        TopicNotFound, NotOwner (another broker was faster), DataLost, Unavailable.
        """
        try:
            await self.log.open(create)
            for part in self.parts:
                await part.open(self.applied)
            await replay(self.log, self.dedup, self.transactions)
            for subscription in await self._storage.subscriptions(self, self.compaction.shape):
                self._add(subscription)
                mark = subscription.cursor.mark
                if self.compaction.shape.after(mark) != self.log.shape.after(mark):
                    subscription.read_from(self.compaction.view)  # it has not read all that is left of trimmed ledgers
            await self._make_lost_ones()
            self.transactions.loaded()
        except BaseException:
            self._ended = True
            await self._close_subscriptions()
            raise

    async def _make_lost_ones(self) -> None:
        """Makes subscriptions that the record names, and that have no record: each was lost, not deleted. It begins
        anew at the oldest message, so that nothing is skipped, and nothing is trimmed that it did not acknowledge."""
        if not self.name.persistent:
            return
        named = self.log.record.subscriptions
        self._unnamed = named is None
        for name in [each for each in named or () if each not in self.subscriptions]:
            _LOG.error(
                "%s/%s: the record of the subscription is lost, and it was not deleted: it begins anew at the oldest "
                "message", self.name, name,
            )  # fmt: skip
            properties = {RECORD_LOST: str(self._world.clock.wall_ms())}
            shape = self.shape(compacted=False)
            making = self._storage.create(self, name, self.log.shape.start, properties, shape)
            self._add(await unbroken(making))

    async def commit_subscription(self, name: str, record: Change) -> None:
        """Commits the record of a new subscription, and in the same commit its name in the topic's record: beside those
        that are there, also of lost ones that are not made anew yet. The caller runs to its end once it has begun."""
        named = self.log.record.subscriptions or ()
        await self.log.note(together=(record,), within=True, subscriptions=self._names({name, *named}))
        self._unnamed = False

    async def _name_subscriptions(self) -> None:
        """Commits their names: before the record of one that is deleted goes."""
        if not self.name.persistent:
            return
        names = self._names(set())
        if names != self.log.record.subscriptions:
            self._unnamed = True
            await self.log.note(subscriptions=names)
        self._unnamed = False

    def _names(self, new: set[str]) -> tuple[str, ...] | None:
        """Returns the names of the durable subscriptions and the new one; None: they are too long for the record."""
        names = () if self._going else tuple(sorted(new.union(each.name for each in self._durable())))
        return names if sum(len(each.encode()) for each in names) <= NAMES_BYTES_MAX else None

    def _add(self, subscription: Subscription) -> Subscription:
        self.subscriptions[subscription.name] = subscription
        if self.shown is not self.log and not subscription.compacted:  # made before the first transaction, perhaps
            subscription.show(self.readable(uncommitted=subscription.uncommitted))
        self._apply_to(subscription)
        return subscription

    def confirmed(self) -> None:
        """Hands out new entries. While a transaction hides them, only subscriptions that read uncommitted are woken."""
        core = self.transactions.core
        waits = core is not None and core.first_hidden is not None and core.stable == self._woken_at
        if core is not None:
            self._woken_at = core.stable
        for subscription in self.subscriptions.values():
            if subscription.consumers and (not waits or subscription.uncommitted):
                subscription.wake()

    def crowded(self) -> None:
        """Hands out now, because the log drops entries otherwise."""
        for subscription in self.subscriptions.values():
            if subscription.consumers:
                subscription.hand_out()

    def delayed(self, position: Position, at_ms: int) -> None:
        """Tells subscriptions the delivery time of a new entry."""
        for subscription in self.subscriptions.values():
            subscription.noted(position, at_ms)

    def check_delay(self, at_ms: int) -> None:
        """Raises NotAllowed if the delivery time is later than the longest delay. (Types that do not delay deliver it
        at once.)"""
        limit, delay = self.applied.max_delay_ms, at_ms - self._world.clock.wall_ms()
        if limit and delay > limit and self.applied.delayed_delivery:
            raise PublishRefusal.DELAY.error(
                f"topic {self.name}: a delay of {delay} ms is above the longest, {limit} ms"
            )

    # ------------------------------------------------------------------ subscriptions
    async def subscribe(
        self, name: str, mark: Position | None = None, properties: dict[str, str] | None = None, *,
        exclusive: bool = False, compacted: bool = False, by_consumer: bool = False,
    ) -> Subscription:  # fmt: skip
        """The durable subscription; made with its mark there (None: at the end) when it does not exist.

        `exclusive`: AlreadyExists when it does. `compacted`: the mark is of a consumer that reads compacted.
        `by_consumer`: a consumer's request makes it, which may be forbidden.
        """
        check_subscription_name(name)
        async with self._changing:
            self.check_open()
            found = self.subscriptions.get(name)
            if found is not None:
                if exclusive:
                    raise AlreadyExists(f"subscription {name!r} of topic {self.name} exists already")
                if self._unnamed and found.durable:
                    await unbroken(self._name_subscriptions())
                return found
            self.check_subscription(name, by_consumer=by_consumer)
            if properties:
                check_properties(properties)
            return await unbroken(self._make(name, mark, properties or {}, self.shape(compacted=compacted)))

    async def _make(
        self, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        subscription = await self._storage.create(self, name, mark, properties, shape)
        self.check_open()
        return self._add(subscription)

    def check_subscription(self, name: str, *, by_consumer: bool) -> None:
        """Whether one more may be made (core/admission.py)."""
        self.admission.check_subscription(self.applied, name, len(self.subscriptions), by_consumer=by_consumer)

    def check_consumer(self, subscription: Subscription, type_: SubscriptionType, consumer: Consumer) -> None:
        """Whether the consumer may join (core/admission.py)."""
        everybody = [each for other in self.subscriptions.values() for each in other.consumers.values()]
        mine = subscription.consumers.values()
        self.admission.check_consumer(self.applied, type_, consumer, subscription.name, everybody, mine)

    def shape(self, *, compacted: bool) -> LogShape:
        """Returns the positions of the topic as a consumer that reads compacted, or any other consumer, sees them."""
        return self.readable(compacted=compacted).shape

    def readable(self, *, compacted: bool = False, uncommitted: bool = False) -> ReadableLog:
        """Returns the log as a consumer reads it: compacted, uncommitted (all that is stored), or as any other."""
        if compacted:
            return self.compaction.view
        return self.log if uncommitted else self.shown

    def show(self, subscription: Subscription, *, compacted: bool) -> None:
        """Sets how the joining consumer reads: compacted, or not; and by its isolation, which was set before.
        ConsumerBusy: others read the other way.

        The first one that reads compacted leaves out what compactions have removed up to now.
        """
        wanted = self.readable(compacted=compacted, uncommitted=subscription.uncommitted)
        if subscription.consumers:
            if subscription.compacted != compacted:
                way = "compacted" if subscription.compacted else "everything"
                raise SubscribeRefusal.READS_OTHERWISE.error(
                    f"the consumers of subscription {subscription.name!r} read {way}", topic=self.name
                )
        elif compacted or wanted is not subscription.log:
            subscription.read_from(wanted)

    def _compacted(self) -> None:
        """Starts subscriptions over that read compacted and are before the new horizon, with what is left there: when
        their next consumer joins (`show`)."""
        record = self.compaction.record
        assert record is not None, "it was just written"
        horizon = Position(record.horizon_ledger, record.horizon_entry)
        for subscription in list(self.subscriptions.values()):
            if subscription.compacted and subscription.needs(horizon):
                subscription.disconnect_all(Unavailable(f"topic {self.name} was compacted; subscribe again"))

    def passing(self, name: str, mark: Position, *, compacted: bool = False, tracks: bool = False) -> Subscription:
        """A subscription that ends with its last consumer, and keeps no data (storage.py)."""
        return self._storage.passing(self, name, mark, self.shape(compacted=compacted), tracks=tracks)

    def shared_passing(self, name: str) -> Subscription | None:
        """Returns the subscription of that name which does not last and which other consumers may join; None: there is
        none. NotAllowed: it is durable."""
        found = self.subscriptions.get(name)
        if found is not None and found.durable:
            raise SubscribeRefusal.LASTS.error(
                f"subscription {name!r} of topic {self.name} is durable: ask for a durable one, or choose another name"
            )
        return found

    def attach(self, subscription: Subscription) -> None:
        """Registers a subscription that does not last; if its name is taken it gets another. NotOwner: the topic has
        ended, and the consumer would not be notified of it.
        """
        self.check_open()
        key = subscription.name
        while key in self.subscriptions:
            key = f"{subscription.name}-{self._world.rng.randbytes(4).hex()}"
        subscription.name = key
        self._add(subscription)

    async def detach(self, subscription: Subscription) -> None:
        """Ends a subscription that does not last after its last consumer."""
        if subscription.durable or subscription.consumers:
            return
        if self.subscriptions.get(subscription.name) is subscription:
            del self.subscriptions[subscription.name]
            await subscription.close()

    def subscription(self, name: str) -> Subscription:
        found = self.subscriptions.get(name)
        if found is None or (self.name.persistent and not found.durable):  # that of a reader has no name
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
        if subscription.store is not None:
            await self._name_subscriptions()
            await subscription.store.delete()
        await subscription.close()

    async def set_properties(self, subscription: Subscription, properties: dict[str, str]) -> None:
        """Replaces all properties of a durable subscription. Its dead-letter policy among them applies from here on."""
        check_properties(properties)
        assert subscription.store is not None, "it is durable"
        await unbroken(subscription.store.set_properties(properties))
        subscription.wake()

    # ------------------------------------------------------------------ transactions
    async def settle(self, settlements: Sequence[Settlement], timeout_s: float) -> list[MagnetarError | None]:
        """Settles transactions; returns an answer for each, when that is durable here (transactions.py). Raises
        NotOwner."""
        self.check_open()
        return await self.transactions.settle(settlements, timeout_s)

    def pending_acks(self) -> list[Subscription]:
        return [each for each in self.subscriptions.values() if each.durable]

    def merge_numbers(self, end: TxnEnd) -> None:
        self.dedup.merged(end.numbers, end.sent, end.back)

    def show_committed(self, core: Transactions) -> None:
        self.shown = CommittedView(self.log, core)
        self.compaction.show_committed(self.shown)
        for each in self.subscriptions.values():
            each.show(self.readable(compacted=each.compacted, uncommitted=each.uncommitted))

    def decided(self) -> None:
        """Tells subscriptions that the last stable position, or what is aborted, has changed."""
        if self.transactions.core is not None:
            self._woken_at = self.transactions.core.stable
        for each in self.subscriptions.values():
            each.decided()

    async def truncate(self) -> None:
        """Makes every durable subscription acknowledge everything, and deletes every ledger that is not written."""
        await self.log.roll()
        for subscription in [each for each in self.subscriptions.values() if each.durable]:
            await backlog.skip(self.shown, subscription, -1)
        await self.trim(retained=False)

    @property
    def users(self) -> int:
        """Returns how many producers and consumers are connected."""
        return len(self.producers) + sum(len(each.consumers) for each in self.subscriptions.values())

    # ------------------------------------------------------------------ trimming
    def retention(self) -> Retention:
        return Retention(self.applied.retention_minutes, self.applied.retention_mib)

    def unread(self) -> Retention:
        """Returns the retention of a topic without durable subscriptions; nothing if it has one, or is compacted, which
        is how its messages are kept then."""
        durable = any(each.durable for each in self.subscriptions.values())
        if durable or self.compaction.held(self.applied) is not None:
            return NOTHING
        return Retention(self.applied.unsubscribed_minutes, self.applied.unsubscribed_mib)

    async def trim(self, *, retained: bool = True) -> list[int]:
        """Removes ledgers that no holder needs (broker/log/core/trimming.py); `retained` False: also those that
        retention, or the want of a subscription, keeps.
        """
        async with self._changing:
            if self._ended:
                return []
            kept = (self.retention(), self.unread()) if retained else (NOTHING, NOTHING)
            return await unbroken(self._trim(*kept))

    async def _trim(self, retention: Retention, unread: Retention) -> list[int]:
        now_ms = self._world.clock.wall_ms()
        before = {span.ledger_id: span for span in self.log.shape.spans}
        gone = await self.log.trim(lambda: trimmable(self.log.shape, self.holders(), retention, now_ms, unread))
        for ledger_id in gone:
            self.transactions.trimmed(ledger_id, before[ledger_id].first_index, before[ledger_id].end_index)
            if self.compaction.shape.span(ledger_id) is None:
                for subscription in self.subscriptions.values():
                    subscription.cursor.trimmed(ledger_id)
        return gone

    def holders(self) -> list[Safe]:
        """Returns the marks of durable subscriptions and parts: what each of them no longer needs of the log."""
        cursors = [each.cursor.safe for each in self.subscriptions.values() if each.durable]
        parts = [part.held(self.applied) for part in self.parts]
        return [*cursors, *(each for each in parts if each is not None)]

    def why_ledgers_stay(self) -> list[tuple[int, LedgerStays | None]]:
        """Returns each ledger, oldest first, and why it stays; None: the next trim removes it."""
        now_ms = self._world.clock.wall_ms()
        return verdicts(self.log.shape, self.holders(), self.retention(), now_ms, self.unread())

    # ------------------------------------------------------------------ ending
    @property
    def ended(self) -> bool:
        """Whether it takes nothing any more."""
        return self._ended

    def check_open(self) -> None:
        """Raises NotOwner when the topic has ended here: its end may be old, and a caller would get nothing more of
        it."""
        if self._ended or self._going or self.log.state is TopicState.LOST:
            raise NotOwner(f"topic {self.name} is not served here any more; look it up again", topic=self.name)

    def check_end(self) -> None:
        """Checks the topic before a caller gets its end. Unavailable: another broker may have continued it by now."""
        self.check_open()
        if not self._settled():
            raise Unavailable(f"this broker cannot tell whether topic {self.name} continued elsewhere; ask again")

    def lose(self, error: MagnetarError) -> None:
        """Stops everything at once: the topic belongs to another broker, or this one cannot serve it."""
        if self._ended:
            return
        self._ended = True
        self._disconnect(NotOwner(f"topic {self.name} is not served here any more: {error}", topic=self.name))
        for part in self.parts:
            part.stop()
        for subscription in list(self.subscriptions.values()):  # readers detach meanwhile
            subscription.stop()
            if subscription.store is not None:
                subscription.store.abandon()
        self._on_lost(self)

    def waits(self, error: MagnetarError) -> None:
        """Tells producers why their publishes have no answer: the log has no ledger now."""
        for producer in self.producers:
            producer.waits(error)

    def _disconnect(self, error: MagnetarError) -> None:
        self.producers.close(error)
        for subscription in list(self.subscriptions.values()):  # readers detach meanwhile
            subscription.disconnect_all(error)

    async def close(self, error: MagnetarError | None = None) -> None:
        """Unloads the topic in order; clients get `error` (NotOwner: look it up again). Idempotent."""
        async with self._changing:
            unloaded = NotOwner(f"topic {self.name} was unloaded; look it up again", topic=self.name)
            await unbroken(self._close(error or unloaded))

    async def _close(self, error: MagnetarError) -> None:
        if not self._ended:
            self._ended = True
            for part in self.parts:
                part.stop()
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
        for part in self.parts:
            await part.close()
        await self.log.close()

    def _durable(self) -> list[Subscription]:
        return [each for each in self.subscriptions.values() if each.durable]

    def _check_unused(self) -> None:
        durable = len(self._durable())
        if self.users or durable:
            raise Busy(
                f"topic {self.name} has {len(self.producers)} producers and {durable} subscriptions; "
                "remove them first, or delete by force",
                topic=self.name,
            )

    async def check_delete(self, *, force: bool) -> None:
        """Whether `delete` would succeed now; changes nothing. Busy, TransactionsOpen."""
        if not force:
            self._check_unused()
        await self.transactions.check_leave(force=force)

    async def delete(self, *, force: bool, abort: bool) -> list[int]:
        """Ends the topic for good; returns its ledgers, to be deleted after its record. Busy: in use, and not forced.

        What is open in transactions is aborted first, if `abort` says so (deletion.py). TransactionsOpen: something is
        left, or a coordinator does not answer; the topic is as before. NotOwner: another call has deleted it.
        """
        if self._deleting is None:
            self._deleting = asyncio.Lock()
        async with self._deleting:
            self.check_open()
            if not force:
                self._check_unused()
            try:
                await self.transactions.leave(force=abort)
                if not force:
                    self._check_unused()  # in the same turn as the next line
                self._going = True  # publishing is refused from here on: the message would have no subscriber
                for name in [each.name for each in self._durable()]:
                    await self.unsubscribe(name, force=True)
            except BaseException:
                self._going = False
                self.transactions.stay()
                raise
        await self.close(NotOwner(f"topic {self.name} was deleted", topic=self.name))
        record = self.log.record
        of_parts = [ledger_id for part in self.parts for ledger_id in part.own_ledgers()]
        return [*(each.ledger_id for each in record.ledgers), *of_parts, *record.pending_deletion]
