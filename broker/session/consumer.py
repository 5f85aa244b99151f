"""A consumer as any protocol opens it: permits and acknowledgements in, entries out through a port.

    session = await ConsumerSession.open(broker, options, port, caller)      or a typed error
    session.flow(permits)                  the port gets entries from the next turn of the loop on
    for _ in session.ack(…): …             in steps of less than a millisecond; others may have their turn in between
    await session.durable()                what was acknowledged up to now survives a crash
    await session.ack_in(txn, …)           pending in a transaction, and durable
    await session.seek_message(…), …       answered before anything from the new position is delivered
    await session.close()                  in order; `leave()` when the connection is lost

How much is delivered is bounded by the permits and by the port: while it is full nothing more is delivered to it, and
other consumers get the entries. A subscription that is not durable ends with its last consumer: Exclusive, it is a
reader's own, and what it got is not given back; of another type, all consumers that name it share it. Guarding tests:
tests/broker/grpc/test_connect.py, tests/broker/subscription/test_seek.py,
tests/broker/pulsar/test_passing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from ...proto.errors import (
    Busy,
    ConnectionLost,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    TransactionConflict,
    TransactionEnded,
)
from ...proto.names import EARLIEST, LATEST, MessageId, Position, TopicName, check_subscription_name
from ...proto.operations import Permission
from ...proto.schema import SchemaInfo
from ...proto.states import AckedEntry, EntrySet, InitialPosition, Isolation, LastMessage, TxnId, TxnState
from ...runtime.access import Principal
from ...runtime.clock import Clock
from ...runtime.network import CallContext
from ...runtime.tasks import followed_by, undone_by
from ..cluster.schema_registry import SchemaRules
from ..common.refusals import SubscribeRefusal, is_another
from ..common.token_bucket import Turns
from ..common.transactions import writer_of
from ..node.topic_manager import TopicManager
from ..subscription.consumer import Consumer, Outlet
from ..subscription.core.cursor_state import TxnAcks
from ..subscription.core.dispatch import Delivery
from ..subscription.core.policy import NO_OPTIONS, Member, PolicyOptions
from ..subscription.core.redelivery_backoff import TOPIC as DEAD_LETTER_TOPIC
from ..subscription.core.subscription_types import EXCLUSIVE, SubscriptionType
from ..subscription.dead_letters import before_whole
from ..subscription.subscription import Subscription
from ..topic.topic import Topic
from .backlogs import last_message, mark_of, place_of
from .producer import check_size

ACK_ENTRIES = 100
"""Entries that are acknowledged in one step: some tenths of a millisecond."""
PREDECESSORS_MAX = 8
"""Transactions that have ended elsewhere, and whose ends an acknowledgement waits for, one after the other."""
PERMITS_MAX = (1 << 31) - 1
"""Permits that a consumer may have at a time, as Pulsar's int."""


class SubscribeOptions(msgspec.Struct, frozen=True):
    """The options of a consumer. `topic` is its full name."""

    topic: str
    subscription: str
    type: SubscriptionType = EXCLUSIVE
    initial_position: InitialPosition = InitialPosition.LATEST
    consumer_name: str = ""  # empty: the broker names it
    durable: bool = True  # False: the subscription ends with its last consumer
    start: MessageId | None = None  # where a new cursor begins; None: at `initial_position`
    start_inclusive: bool = False
    properties: dict[str, str] = {}
    priority_level: int = 0  # lower ones come first
    subscription_properties: dict[str, str] = {}  # of a subscription that is made
    read_compacted: bool = False
    existing_only: bool = False  # TopicNotFound rather than a new topic
    instance: str = ""  # random, of the consumer object: its next connection replaces its last one
    policy: PolicyOptions = NO_OPTIONS  # of the subscription type
    many_topics: bool = False  # failover spreads the topics by the consumers' names
    schema: SchemaInfo | None = None  # None: bytes; AUTO_CONSUME: that of each message
    isolation: Isolation = Isolation.READ_COMMITTED  # of the subscription, while a consumer is connected
    ordered: bool = False  # likewise: what failed holds back what follows it
    incarnation: int = 0  # of the topic that it read before; 0: it begins

    def at(self, topic: Topic) -> SubscribeOptions:
        """Returns the options at this topic: a consumer that returns to one that was made anew begins at the first."""
        if not is_another(topic.incarnation, self.incarnation):
            return self
        return msgspec.structs.replace(self, start=None, initial_position=InitialPosition.EARLIEST)

    def check(self) -> None:
        """Checks the options. Raises InvalidName, InvalidRequest, NotAllowed."""
        check_size("consumer", self.consumer_name)
        check_size("instance", self.instance)
        check_subscription_name(self.subscription)
        self.policy.check()
        if self.ordered and not (self.type.policy.keeps_order and self.durable and self.policy.keeps_order):
            raise SubscribeRefusal.NO_ORDER.error()
        if self.ordered and not TopicName.parse(self.topic).persistent:
            raise SubscribeRefusal.NO_ORDER.error()
        if self.read_compacted and self.type.policy.individual:
            raise SubscribeRefusal.COMPACTED_TYPE.error()
        if self.read_compacted and not TopicName.parse(self.topic).persistent:
            raise SubscribeRefusal.COMPACTED_TOPIC.error()


class ConsumerPort(Outlet, Protocol):
    """The port for a session's deliveries. No method may raise, and none is called after `on_closed`."""


class ConsumerSession:
    """A consumer of any protocol, made by `open`. See the module."""

    __slots__ = (
        "_clock", "_consumer", "_over", "_port", "_removing", "compacted_end_index", "subscription", "topic",
    )  # fmt: skip

    def __init__(self, topic: Topic, port: ConsumerPort, clock: Clock) -> None:
        self.topic = topic
        self._clock = clock
        self.compacted_end_index = 0
        self._port = port
        self._over = False
        self._removing = False
        self._consumer: Consumer
        self.subscription: Subscription

    @classmethod
    async def open(
        cls, broker: TopicManager, options: SubscribeOptions, port: ConsumerPort, caller: CallContext
    ) -> ConsumerSession:
        """Opens a consumer. Raises Unauthorized, TopicNotFound, IncompatibleSchema, SubscriptionNotFound, ConsumerBusy,
        NotAllowed, NotOwner, BackPressure, and what loading a topic may raise. Nothing is left of it then, or when it
        is cancelled. The port is not called before it returns."""
        options.check()
        await _authorize(broker, options, caller)
        topic = await broker.topic(TopicName.parse(options.topic), create=not options.existing_only)
        await _check_schema(broker, topic, options, caller)
        options = options.at(topic)
        session, id_ = cls(topic, port, broker.world.clock), broker.next_id()
        member = Member(
            id_, options.consumer_name or f"{broker.name}-{id_}", options.priority_level, options.many_topics,
            options.policy, options.ordered,
        )  # fmt: skip
        consumer = session._consumer = Consumer(
            member, session, address=caller.peer, instance=options.instance, principal=caller.principal,
            client=caller.client, since_ms=broker.world.clock.wall_ms(), properties=options.properties,
        )  # fmt: skip
        now = broker.world.clock.monotonic()
        topic.admission.check_rate(topic.applied, consumer, options.consumer_name, now)
        session.subscription = await _subscription(topic, options)
        await undone_by(session._joined(broker, options, caller), session.leave)
        return session

    async def _joined(self, broker: TopicManager, options: SubscribeOptions, caller: CallContext) -> None:
        await self._join(options)
        await _authorize(broker, options, caller)  # revoked meanwhile, perhaps

    async def _join(self, options: SubscribeOptions) -> None:
        topic, subscription, consumer = self.topic, self.subscription, self._consumer
        await subscription.expect(consumer)
        if not subscription.durable and topic.subscriptions.get(subscription.name) is not subscription:
            raise SubscribeRefusal.ENDED.error()
        topic.registry.check_consumer(subscription, options.type, consumer)
        subscription.isolate(options.isolation)
        topic.choose_log(subscription, compacted=options.read_compacted)
        subscription.join(consumer, options.type)
        compacted = topic.compaction.record if options.read_compacted else None
        self.compacted_end_index = compacted.end_index if compacted is not None else 0

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def member(self) -> Member:
        """Returns its state in the dispatcher: to be read only."""
        return self._consumer.member

    def messages_of(self, position: Position) -> int:
        """Returns how many messages an entry has that this consumer holds; 0: it is not known."""
        cursor, member = self.subscription.cursor, self.member
        if position in member.unshown:
            return member.unshown[position].size
        held = member.outstanding.get(position, 0)
        return cursor.size_of(position, 0) or held + cursor.hidden(position).bit_count()

    # ------------------------------------------------------------------ as the consumer's outlet
    def deliver(self, deliveries: Sequence[Delivery]) -> bool:
        messages = size = 0
        for each in deliveries:
            messages += each.entry.count
            size += each.entry.size
        traffic = self.topic.traffic
        traffic.messages_out += messages
        traffic.bytes_out += size
        self._consumer.activity.consumed_ms = self.subscription.activity.consumed_ms = self._clock.wall_ms()
        return self._port.deliver(deliveries)

    def on_end_of_topic(self) -> None:
        self._port.on_end_of_topic()

    def active(self, active: bool) -> None:
        self._port.active(active)

    def on_closed(self, error: MagnetarError) -> None:
        if not (self._over or self._removing):
            self._over = True
            self._port.on_closed(error)

    async def wait_drained(self) -> None:
        await self._port.wait_drained()

    # ------------------------------------------------------------------ at once
    def on_renewed(self, principal: Principal) -> None:
        """Sets the new credentials of its caller, of the same role."""
        self._consumer.principal = principal

    def flow(self, permits: int) -> None:
        """Grants permits: so many messages more may be delivered. InvalidRequest: that is more than a consumer may
        have."""
        held = self._consumer.member.permits
        if permits < 0 or held + permits > PERMITS_MAX:
            raise InvalidRequest(f"{permits} permits beside the {held} that are left are more than {PERMITS_MAX}")
        self._consumer.activity.flow_ms = self.subscription.activity.flow_ms = self._clock.wall_ms()
        self.subscription.flow(self._consumer, permits)

    def ack(self, entries: Iterable[AckedEntry], sets: Iterable[EntrySet] = ()) -> Iterator[None]:
        """Acknowledges each of them, in steps. InvalidRequest: one is past the end; what was named before counts.
        TransactionConflict: one is pending in a transaction; all others count.
        """
        entries, refused = iter(entries), list[TransactionConflict]()
        while some := list(islice(entries, ACK_ENTRIES)):
            try:
                self.subscription.ack(self._consumer, some)
            except TransactionConflict as conflict:
                refused.append(conflict)
            yield
        for each in sets:
            try:
                self.subscription.ack_set(self._consumer, each.ledger_id, each.entries)
            except TransactionConflict as conflict:
                refused.append(conflict)
            yield
        if refused:
            raise refused[0]

    def ack_cumulative(self, acked: AckedEntry) -> Iterator[None]:
        """Acknowledges everything up to the entry, included, in steps of what the consumer holds. NotAllowed: several
        consumers share the subscription. TransactionConflict: some of it is pending in a transaction, and nothing
        of it counts.
        """
        self.subscription.check_cumulative(self._consumer, acked)
        for mark in self.subscription.acks.marks_up_to(self._consumer.member, acked.position):
            self.subscription.ack_cumulative(self._consumer, AckedEntry(mark))
            yield
        self.subscription.ack_cumulative(self._consumer, acked)

    def redeliver(
        self, entries: Iterable[Position], sets: Sequence[EntrySet] = (), *, counted: bool = True
    ) -> Iterator[None]:
        """Gives them back, in steps; with none of both all that it holds. `counted`: the program has seen them."""
        wanted: list[Position] = []
        entries = iter(entries)
        while some := list(islice(entries, ACK_ENTRIES)):
            wanted += some
            yield
        named = bool(wanted or sets)
        for held in self.subscription.acks.find_held(self._consumer.member, sets):
            wanted += held
            yield
        self.subscription.redeliver(self._consumer, wanted if named else None, counted=counted)

    # ------------------------------------------------------------------ requests
    async def ack_in(
        self, txn: TxnId, entries: Iterable[AckedEntry], sets: Iterable[EntrySet] = (), *, cumulative: bool = False,
        rest: bool = False,
    ) -> None:  # fmt: skip
        """Acknowledges in a transaction: when this returns, that is pending in it, durably, and counts if the
        transaction commits. `cumulative`: everything up to and with the one entry that is named. A whole entry means
        all of its messages; `rest`: those that the consumer has not acknowledged yet, as clients mean it that count
        them themselves; such clients repeat no request, so a message that the transaction has already was delivered
        twice: a conflict.

        A transaction that has them, and has ended elsewhere, is waited for: its end is on its way here. (But not by a
        cumulative one after an abort: what is given back has to be delivered again before it can be covered.)

        All of them or, whatever this raises before they are pending, none. NotAllowed, InvalidRequest,
        TransactionConflict, BackPressure; TransactionEnded and what Coordinators.join raises. When it is not stored for
        another reason, or cancelled, the outcome is unknown: repeat it, in the same transaction.
        """
        subscription, turns, wanted, last = self.subscription, Turns(self._clock), TxnAcks(), None
        subscription.check_transactional()
        if cumulative:
            *others, last = entries
            if others or sets:
                raise InvalidRequest("a cumulative acknowledgement in a transaction names one entry")
        else:
            for _ in subscription.acks.gather(entries, sets, wanted):
                if turns.is_over:
                    await turns.next()
        transactions = self.topic.transactions
        if not transactions.joins.join_now(txn, writer_of(self._consumer.principal)):
            await transactions.joins.join(txn, writer_of(self._consumer.principal))
        for left in reversed(range(PREDECESSORS_MAX)):
            if self._over or subscription.consumers.get(self.member.id) is not self._consumer:
                raise ConnectionLost("the consumer is closed: nothing was acknowledged")
            if not transactions.is_open(txn):
                raise TransactionEnded(f"transaction {txn} has ended", txn=str(txn))
            try:
                subscription.ack_in(self._consumer, txn, wanted, last, rest=rest)
                break
            except TransactionConflict as error:
                conflict = error
            if not left or not await self._ends(conflict, txn, cumulative=cumulative):
                raise conflict
        await subscription.durable_now()

    def pend_now(self, txn: TxnId, entries: Iterable[AckedEntry], sets: Iterable[EntrySet] = ()) -> bool:
        """Makes a few entries pending like `ack_in`, without a wait and not durable yet (`when_durable`). False:
        nothing was done; `ack_in` them, which waits for what has to be waited for, or says why not."""
        subscription, wanted = self.subscription, TxnAcks()
        try:
            subscription.check_transactional()
            for _ in subscription.acks.gather(entries, sets, wanted):
                pass
            if self._over or subscription.consumers.get(self.member.id) is not self._consumer:
                return False
            if not self.topic.transactions.joins.join_now(txn, writer_of(self._consumer.principal)):
                return False
            subscription.ack_in(self._consumer, txn, wanted)
        except MagnetarError:
            return False
        return True

    async def _ends(self, conflict: TransactionConflict, txn: TxnId, *, cumulative: bool) -> bool:
        """Whether one that has what `txn` wants has ended, so that it may be asked for again."""
        for other in self.subscription.holders(Position.parse(conflict.fields["position"])):
            if other != txn and (outcome := await self.topic.transactions.questions.outcome(other)) is not None:
                return outcome is TxnState.COMMITTED or not cumulative
        return False

    def when_durable(self, tell: Callable[[MagnetarError | None], None]) -> None:
        """Calls `tell` with None once all is durable, like `durable`, at once perhaps; or with why that is not known.
        """
        self.subscription.when_durable(tell)

    async def durable(self) -> None:
        """Returns when what was acknowledged up to now survives a crash."""
        await self.subscription.durable_now()

    async def seek_message(self, message_id: MessageId) -> None:
        """Moves the subscription: the message is delivered next; durable when this returns. The other consumers of the
        subscription are disconnected, and nothing from the new position is delivered before this returns. As
        `seek_time` and `seek_index`."""
        async with self.subscription.moving:
            mark, acked = await place_of(self.subscription.log, message_id, inclusive=True)
            await self.subscription.seek(mark, acked, keep=self._consumer)

    async def seek_time(self, publish_time_ms: int) -> None:
        """Moves the subscription: the first message that arrived then or later is delivered next."""
        async with self.subscription.moving:
            log = self.subscription.log
            place = await log.reader.locate_time(publish_time_ms)
            mark = await before_whole(log, log.shape.before(place.position))
            await self.subscription.seek(mark, keep=self._consumer)

    async def seek_index(self, index: int) -> None:
        """Moves the subscription: the message of that index is delivered next, or the first one after it that is kept.
        """
        async with self.subscription.moving:
            log = self.subscription.log
            place = await log.reader.locate(index)
            done = max(0, index - place.first_index) if log.shape.readable(place.position) else 0
            await self.subscription.seek(log.shape.before(place.position), done, keep=self._consumer)

    async def unsubscribe(self, *, force: bool = False) -> None:
        """Removes the subscription for good. NotAllowed: one that does not last has nothing to remove; Busy: it has
        other consumers, which `force` disconnects.
        """
        subscription = self.subscription
        if not subscription.durable and self.topic.name.persistent:
            raise NotAllowed("a subscription that does not last ends with its consumers: close them")
        others = len(subscription.consumers) - 1
        if others > 0 and not force:
            raise Busy(f"subscription {subscription.name!r} has {others} other consumers")
        self._removing = True  # removed by its own consumer: the answer reports it, not `on_closed`
        try:
            await self.topic.registry.unsubscribe(subscription.name, force=True)
        finally:
            self._removing = False

    async def last_message(self) -> LastMessage:
        """Returns the last message that the subscription would be shown. Unavailable: the topic may go on elsewhere."""
        log, mark = self.subscription.log, self.subscription.cursor.mark
        position, batch_index, index = await log.reader.last_shown() or (EARLIEST, -1, -1)
        self.topic.check_end()
        return LastMessage(position, batch_index, index, mark, self.topic.name.partition)

    # ------------------------------------------------------------------ ending
    async def close(self) -> None:
        """Closes the session, in order: what it holds goes to the others, and what it acknowledged is durable when this
        returns."""
        self._over = True
        self.subscription.leave(self._consumer)
        await followed_by(self.durable(), self.leave)

    async def leave(self) -> None:
        """Leaves at once: what it holds goes to the others. Idempotent."""
        self._over = True
        self.subscription.leave(self._consumer, lost=True)
        await self.topic.registry.detach(self.subscription)


async def _check_schema(broker: TopicManager, topic: Topic, options: SubscribeOptions, caller: CallContext) -> None:
    """Checks the consumer's schema. Raises IncompatibleSchema, InvalidRequest."""
    if options.schema is not None:
        idle = not topic.log.queued_index and not len(topic.producers)
        rules, user = SchemaRules.from_policies(topic.applied), caller.principal.name
        await broker.schemas.of_consumer(topic.name, options.schema, rules, user, idle=idle)


async def _authorize(broker: TopicManager, options: SubscribeOptions, caller: CallContext) -> None:
    """Raises Unauthorized if the caller may not consume. A caller that names a dead letter topic in the subscription's
    properties has to be able to publish there."""
    require, topic = broker.access.require, TopicName.parse(options.topic)
    await require(caller.principal, Permission.CONSUME, topic=topic, subscription=options.subscription)
    if letters := options.subscription_properties.get(DEAD_LETTER_TOPIC):
        await require(caller.principal, Permission.PRODUCE, topic=TopicName.parse(letters))


async def _subscription(topic: Topic, options: SubscribeOptions) -> Subscription:
    compacted, shape, start = options.read_compacted, topic.shape(compacted=options.read_compacted), options.start
    if options.durable:
        mark = shape.start if options.initial_position is InitialPosition.EARLIEST else None
        if start is not None:
            mark = mark_of(shape, start, options.start_inclusive, last_again=options.start_inclusive)[0]
        properties = dict(options.subscription_properties)
        return await topic.registry.subscribe(
            options.subscription, mark, properties, compacted=compacted, by_consumer=True
        )
    shared = options.type is not EXCLUSIVE  # a reader has its own, whatever its name is
    if shared and (found := topic.registry.shared_passing(options.subscription)) is not None:
        return found
    if start is None:
        start = MessageId(*(EARLIEST if options.initial_position is InitialPosition.EARLIEST else LATEST))
    log = topic.readable(compacted=compacted)
    done: Sequence[Position] = ()
    if start.position >= LATEST and options.start_inclusive:
        mark, acked, done = await last_message(log)
    else:
        mark, acked = await place_of(log, start, options.start_inclusive)
    if shared and (found := topic.registry.shared_passing(options.subscription)) is not None:  # made meanwhile
        return found
    subscription = topic.registry.passing(options.subscription, mark, compacted=compacted, tracks=shared)
    if acked:
        subscription.cursor.ack_first(shape.after(mark), acked)
    for position in done:
        subscription.cursor.ack(position)
    topic.registry.attach(subscription)
    return subscription
