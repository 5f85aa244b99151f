"""A consumer of any protocol: takes permits and acknowledgements, and delivers entries through a port.

    session = await ConsumerSession.open(broker, options, port, caller)      or a typed error
    session.grant_permits(permits)         the port gets entries from the next turn of the loop on
    for _ in session.ack(…): …             in steps of less than a millisecond, between which the loop may run others
    await session.wait_durable()           what was acknowledged up to now survives a crash
    await session.ack_in_transaction(txn, …)  pending in a transaction, and durable
    await session.seek_message(…), …       answered before anything from the new position is delivered
    await session.close()                  in order; `leave()` when the connection is lost

How much is delivered is bounded by the permits and by the port: while it is full nothing more is delivered to it, and
other consumers get the entries. A subscription that is not durable ends with its last consumer: an Exclusive one
belongs to one reader, and is not tracked for redelivery; of another type, all consumers that name it share it. Guarding
tests: tests/broker/grpc/test_connect.py, tests/broker/subscription/test_seek.py,
tests/broker/pulsar/test_passing.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from ...metadata.records import Feature, may_write_feature
from ...proto.entry_filter import find_filter
from ...proto.errors import (
    Busy,
    ConnectionLost,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    TransactionConflict,
    TransactionEnded,
)
from ...proto.names import (
    EARLIEST,
    FAIR_BY_KEY,
    FAIRNESS_PROPERTIES,
    LATEST,
    MessageId,
    Position,
    TopicName,
    check_subscription_name,
)
from ...proto.operations import Permission
from ...proto.schema import SchemaInfo
from ...proto.states import (
    AckedEntry,
    Blocked,
    EntrySet,
    Failure,
    InitialPosition,
    Isolation,
    LastMessage,
    TxnId,
    TxnState,
)
from ...runtime.access import Principal
from ...runtime.alarm import EventLoopSlices
from ...runtime.clock import Clock
from ...runtime.network import CallContext
from ...runtime.tasks import run_and_clean_up, run_or_undo
from ..cluster.schema_registry import SchemaPolicies
from ..common.refusals import AckRefusal, SubscribeRefusal, are_different_incarnations
from ..common.transactions import get_required_transaction_role
from ..node.topic_manager import TopicManager
from ..subscription.consumer import Consumer, ConsumerOutlet
from ..subscription.core.cursor_state import TxnAcks
from ..subscription.core.dispatch import Delivery
from ..subscription.core.policy import NO_POLICY_OPTIONS, Member, PolicyOptions
from ..subscription.core.redelivery_backoff import TOPIC_PROPERTY as DEAD_LETTER_TOPIC
from ..subscription.core.subscription_types import EXCLUSIVE_ROW, SubscriptionTypeRow
from ..subscription.dead_letters import NO_FAILURES, move_mark_before_chunked_message
from ..subscription.subscription import Subscription
from ..topic.topic import Topic
from .backlogs import (
    compute_cursor_start,
    find_cumulative_ack_before,
    find_cursor_mark_by_time,
    find_cursor_start,
    find_first_unacked_index,
    find_last_message,
)
from .producer import check_name_size

_LOG = logging.getLogger("magnetar.broker.session")

ACKED_ENTRIES_PER_SLICE = 100
"""Entries that are acknowledged in one step: some tenths of a millisecond."""
PREDECESSOR_WAITS_MAX = 8
"""Most transactions for whose outcome one acknowledgement waits, one after the other."""
COMMIT_NOTE_BYTES_MAX = 1024
"""Longest note of a commit: it is written again with each commit, and with each new cursor ledger."""
PERMITS_MAX = (1 << 31) - 1
"""Most permits that a consumer may have at a time: the largest value of Pulsar's field."""


class SubscribeOptions(msgspec.Struct, frozen=True):
    """The options with which a consumer is opened. `topic`: the full name of its topic. The comments of the fields say
    what each of them means."""

    topic: str
    subscription: str
    type: SubscriptionTypeRow = EXCLUSIVE_ROW
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
    instance: str = ""  # a random id of the client's consumer object: its next connection replaces its last one
    policy: PolicyOptions = NO_POLICY_OPTIONS  # of the subscription type
    many_topics: bool = False  # failover spreads the topics by the consumers' names
    schema: SchemaInfo | None = None  # None: bytes; AUTO_CONSUME: that of each message
    isolation: Isolation = Isolation.READ_COMMITTED  # of the subscription, while a consumer is connected
    ordered: bool = False  # likewise: what failed holds back what follows it
    incarnation: int = 0  # of the topic that it read before; 0: it begins
    acks_by_index: bool = True  # False: unless it does, it gets batches whole of which a part is acknowledged
    start_time_ms: int = 0  # a durable subscription that is made begins with what arrived then or later; 0: not asked
    acknowledges: bool = False  # EXCLUSIVE and not durable: what it gives back comes again

    def adapt_to_incarnation(self, topic: Topic) -> SubscribeOptions:
        """Returns the options, adapted to the present incarnation of the topic. If the topic was deleted and created
        again since the client read it, the result begins at the earliest message."""
        if not are_different_incarnations(topic.incarnation, self.incarnation):
            return self
        return msgspec.structs.replace(self, start=None, initial_position=InitialPosition.EARLIEST, start_time_ms=0)

    @property
    def filter_text(self) -> str:
        """The text of the filter that the consumer asks for; empty if it asks for none, and takes that of the
        subscription. Raises InvalidRequest if the properties contain an invalid filter."""
        wanted = find_filter(self.subscription_properties) if self.subscription_properties else None
        return wanted.text if wanted is not None else ""

    def check(self) -> None:
        """Raises InvalidName if a name is invalid; InvalidRequest or NotAllowed if the options contradict each
        other."""
        if self.subscription_properties:
            find_filter(self.subscription_properties)
        check_name_size("consumer", self.consumer_name)
        check_name_size("instance", self.instance)
        check_subscription_name(self.subscription)
        self.policy.check()
        if self.ordered and not (
            self.type.policy.is_order_guaranteed and self.durable and self.policy.is_order_guaranteed
        ):
            raise SubscribeRefusal.NO_ORDER.error()
        if self.ordered and not TopicName.parse(self.topic).persistent:
            raise SubscribeRefusal.NO_ORDER.error()
        if FAIR_BY_KEY in self.subscription_properties and not (
            self.type.fair and self.durable and TopicName.parse(self.topic).persistent
        ):
            raise SubscribeRefusal.NOT_FAIR.error()
        if self.read_compacted and self.type.policy.individual:
            raise SubscribeRefusal.COMPACTED_TYPE.error()
        if self.read_compacted and not TopicName.parse(self.topic).persistent:
            raise SubscribeRefusal.COMPACTED_TOPIC.error()


class SubscriptionProgress(msgspec.Struct, frozen=True):
    """Where a subscription is in its log, as indexes of messages. `earliest_index`: the oldest message that is kept;
    `position`: the first one that is not acknowledged; `end_index`: one past the newest. `note`: that of the last
    commit; `incarnation`: that of the topic."""

    earliest_index: int
    position: int
    end_index: int
    note: bytes
    incarnation: int


class DeliveryProbeResult(msgspec.Struct, frozen=True):
    """The answer to a probe, which asks why a consumer gets no message. `end_index`: one past the newest message that
    the subscription may be shown; `why`: why its consumer gets nothing more now (NO: it got something)."""

    end_index: int
    why: Blocked


def check_commit_note(note: bytes, *, durable: bool) -> None:
    """Raises InvalidRequest if the note of a commit is longer than COMMIT_NOTE_BYTES_MAX bytes. Raises NotAllowed if a
    note cannot be stored, because the subscription is not durable or the upgrade of the cluster is not finished."""
    if len(note) > COMMIT_NOTE_BYTES_MAX:
        raise AckRefusal.LONG_NOTE.error(f"a note of {len(note)} bytes is longer than {COMMIT_NOTE_BYTES_MAX}")
    if note and not durable:
        raise AckRefusal.NOTE_NOT_KEPT.error()
    if note and not may_write_feature(Feature.COMMIT_NOTES):
        raise AckRefusal.NOTE_NOT_KEPT.error("the upgrade is not finished: run 'magnetar cluster finish-upgrade'")


class ConsumerPort(ConsumerOutlet, Protocol):
    """The interface through which a consumer session sends to its client. The handlers of the protocols implement it,
    and the session calls it. Its methods must not raise errors. None of them is called after `on_closed`."""


class ConsumerSession:
    """An open consumer at the broker, for any protocol. `open` creates it. The docstring of this module shows how it is
    used."""

    __slots__ = (
        "_clock", "_consumer", "_over", "_port", "_removing", "compacted_end_index", "is_reader", "subscription",
        "topic",
    )  # fmt: skip

    def __init__(self, topic: Topic, port: ConsumerPort, clock: Clock) -> None:
        self.topic = topic
        self._clock = clock
        self.compacted_end_index = 0
        self.is_reader = False
        self._port = port
        self._over = False
        self._removing = False
        self._consumer: Consumer
        self.subscription: Subscription

    @classmethod
    async def open(
        cls, broker: TopicManager, options: SubscribeOptions, port: ConsumerPort, caller: CallContext
    ) -> ConsumerSession:
        """Opens a consumer with these `options`, and returns its session. Raises InvalidRequest, InvalidName,
        Unauthorized, TopicNotFound, IncompatibleSchema, InvalidSchema, SubscriptionNotFound, ConsumerBusy, NotAllowed,
        NotOwner or BackPressure if the consumer may not be opened; or an error of loading the topic, reading its log or
        `SubscriptionRegistry.subscribe`. If this method raises or is cancelled, the broker keeps nothing of the
        consumer. The port is not called before this method returns."""
        options.check()
        await _authorize(broker, options, caller)
        topic = await broker.load_topic(TopicName.parse(options.topic), create=not options.existing_only)
        await _check_schema(broker, topic, options, caller)
        options = options.adapt_to_incarnation(topic)
        session, id_ = cls(topic, port, broker.world.clock), broker.allocate_client_id()
        member = Member(
            id_, options.consumer_name or f"{broker.name}-{id_}", options.priority_level, options.many_topics,
            options.policy, options.ordered,
        )  # fmt: skip
        consumer = session._consumer = Consumer(
            member, session, address=caller.peer, instance=options.instance, principal=caller.principal,
            client=caller.client, since_ms=broker.world.clock.wall_ms(), properties=options.properties,
        )  # fmt: skip
        now = broker.world.clock.monotonic()
        topic.admission.check_subscribe_rate(topic.applied, consumer, options.consumer_name, now)
        session.subscription = await _subscription(topic, options)
        await run_or_undo(session._joined(broker, options, caller), session.leave)
        _LOG.debug(
            "%s/%s: consumer %r is open: %s, %s, %s", topic.name, options.subscription, session.name, caller.principal,
            caller.peer, caller.client,
        )  # fmt: skip
        return session

    async def _joined(self, broker: TopicManager, options: SubscribeOptions, caller: CallContext) -> None:
        await self._join(options)
        await _authorize(broker, options, caller)  # revoked meanwhile, perhaps

    async def _join(self, options: SubscribeOptions) -> None:
        topic, subscription, consumer = self.topic, self.subscription, self._consumer
        consumer.member.acks_by_index = options.acks_by_index or consumer.client in subscription.index_clients
        await subscription.wait_entries_returned(consumer)
        if not subscription.is_durable and topic.subscriptions.get(subscription.name) is not subscription:
            raise SubscribeRefusal.ENDED.error()
        topic.registry.check_consumer(subscription, options.type, consumer)
        subscription.set_isolation_level(options.isolation)
        topic.set_log_of_subscription(subscription, compacted=options.read_compacted)
        subscription.check_filter(options.filter_text)
        subscription.join(consumer, options.type)
        topic.maintenance.on_topic_used()
        compacted = topic.compaction.record if options.read_compacted else None
        self.compacted_end_index = compacted.end_index if compacted is not None else 0
        self.is_reader = not subscription.is_durable and options.type is EXCLUSIVE_ROW

    def find_reader_start_message(self) -> MessageId | None:
        """Returns the id of the message after which this reader begins; valid when it was just opened or moved. Returns
        None if this is not a reader, or if it also skips some later entries, so that one message id does not describe
        where it begins."""
        cursor = self.subscription.cursor
        if not self.is_reader or cursor.acked:
            return None
        for position, part in cursor.partial.items():  # the first messages of the next entry
            return MessageId(position.ledger_id, position.entry_id, batch_index=part.bits.bit_length() - 1)
        return MessageId(*cursor.mark)

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def member(self) -> Member:
        """The state of this consumer in the dispatcher of its subscription. The caller must not change it."""
        return self._consumer.member

    def count_messages(self, position: Position) -> int:
        """Returns the number of messages in an entry that is outstanding at this consumer; 0 if the number is not
        known."""
        cursor, member = self.subscription.cursor, self.member
        if position in member.unshown:
            return member.unshown[position].size
        held = member.outstanding.get(position, 0)
        return cursor.find_batch_size(position, 0) or held + cursor.acked_or_pending_bits(position).bit_count()

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

    def on_active_changed(self, active: bool) -> None:
        self._port.on_active_changed(active)

    def on_topic_moving(self, error: MagnetarError) -> asyncio.Future[None] | None:
        return None if self._over or self._removing else self._port.on_topic_moving(error)

    def on_closed(self, error: MagnetarError) -> None:
        if not (self._over or self._removing):
            self._over = True
            self._port.on_closed(error)

    async def wait_drained(self) -> None:
        await self._port.wait_drained()

    # ------------------------------------------------------------------ at once
    def on_credentials_renewed(self, principal: Principal) -> None:
        """Called when the client has renewed its credentials, for the same role. `principal`: the caller with the new
        credentials, which are used from now on."""
        self._consumer.principal = principal

    def grant_permits(self, permits: int) -> None:
        """Permits the broker to deliver `permits` more messages to this consumer. Raises InvalidRequest if `permits` is
        negative, or the consumer would have more than PERMITS_MAX permits."""
        held = self._consumer.member.permits
        if permits < 0 or held + permits > PERMITS_MAX:
            raise InvalidRequest(f"{permits} permits beside the {held} that are left are more than {PERMITS_MAX}")
        self._consumer.activity.flow_ms = self.subscription.activity.flow_ms = self._clock.wall_ms()
        self.subscription.grant_permits(self._consumer, permits)

    def mark_acks_by_batch_index(self) -> None:
        """Called when the client acknowledges a part of a batch for the first time, before the acknowledgement is
        applied. From now on, the acknowledged messages of a batch are hidden from this consumer, and from
        later consumers of the same client in this subscription."""
        self.subscription.mark_acks_by_batch_index(self._consumer)

    def ack(self, entries: Iterable[AckedEntry], sets: Iterable[EntrySet] = ()) -> Iterator[None]:
        """Acknowledges entries and sets of entries, in steps: the caller iterates, and may let other tasks run in
        between. Raises InvalidRequest at the first entry that is after the end of the topic or has no such message, and
        at a set that does not parse; what comes before it is acknowledged. After the last step raises
        TransactionConflict if some entries are acknowledged in an open transaction; all other entries are acknowledged.
        """
        entries, refused = iter(entries), list[TransactionConflict]()
        while some := list(islice(entries, ACKED_ENTRIES_PER_SLICE)):
            try:
                self.subscription.ack(self._consumer, some)
            except TransactionConflict as conflict:
                refused.append(conflict)
            yield
        for each in sets:
            try:
                self.subscription.ack_entries_of_ledger(self._consumer, each.ledger_id, each.entries)
            except TransactionConflict as conflict:
                refused.append(conflict)
            yield
        if refused:
            raise refused[0]

    def ack_cumulative(self, acked: AckedEntry) -> Iterator[None]:
        """Acknowledges all messages up to and including the entry that `acked` names. Works in steps: the caller
        iterates, and may let other tasks run in between. Does nothing if the entry was trimmed. Before anything is
        acknowledged raises NotAllowed if several consumers may share the subscription, InvalidRequest if the entry is
        after the last entry of the log or has no such message, TransactionConflict if one of the messages is
        acknowledged in an open transaction. A later step raises a TransactionConflict that has arisen meanwhile; what
        earlier steps have acknowledged stays so."""
        if not self.subscription.check_cumulative_ack(self._consumer, acked):
            return  # trimmed
        for mark in self.subscription.acks.split_cumulative_ack_into_steps(self._consumer.member, acked.position):
            self.subscription.ack_cumulative(self._consumer, AckedEntry(mark))
            yield
        self.subscription.ack_cumulative(self._consumer, acked)

    def redeliver(
        self, entries: Iterable[Position], sets: Sequence[EntrySet] = (), *, counted: bool = True
    ) -> Iterator[None]:
        """Requeues outstanding entries of this consumer, so that the subscription delivers them again. Works in steps:
        the caller iterates, and may let other tasks run in between. Without `entries` and `sets`, requeues all entries
        that are outstanding at this consumer. `counted`: adds 1 to the redelivery counts, because the application has
        seen the messages. A step raises InvalidRequest if a set cannot be parsed; then nothing is requeued."""
        wanted: list[Position] = []
        entries = iter(entries)
        while some := list(islice(entries, ACKED_ENTRIES_PER_SLICE)):
            wanted += some
            yield
        named = bool(wanted or sets)
        for held in self.subscription.acks.find_outstanding_entries(self._consumer.member, sets):
            wanted += held
            yield
        self.subscription.redeliver(self._consumer, wanted if named else None, counted=counted)

    def record_failure_reasons(self, failures: Mapping[Position, Failure]) -> None:
        """Stores `failures`: why the application gave entries back, by position. It is sent with their next delivery,
        and with their dead letters. Does nothing if the subscription moves no dead letters."""
        if failures and self.subscription.dead_letters is not None:
            self.subscription.dead_letters.record_failure_reasons(failures)

    @property
    def failures(self) -> Mapping[Position, Failure]:
        """Why entries were given back last, by position, as far as the broker has stored it. Empty if the subscription
        moves no dead letters."""
        letters = self.subscription.dead_letters
        return letters.failures if letters is not None else NO_FAILURES

    # ------------------------------------------------------------------ requests
    async def ack_in_transaction(
        self, txn: TxnId, entries: Iterable[AckedEntry], sets: Iterable[EntrySet] = (), *, cumulative: bool = False,
        rest: bool = False,
    ) -> None:  # fmt: skip
        """Acknowledges messages in a transaction: they are pending, durably, and count as acknowledged if the
        transaction commits. All of them become pending, or none. `cumulative`: `entries` contains one entry, and
        everything up to and including this entry is acknowledged.

        `rest`: True for clients of Pulsar's protocol. A whole entry then means only those of its messages that are not
        acknowledged yet; otherwise it means all of its messages. Such a client never repeats a request. So if a message
        is pending in the same transaction already, it was delivered twice, and that is a conflict.

        If a message is pending in another transaction that has ended, waits until the outcome of that transaction was
        applied here. (A cumulative acknowledgement does not wait after an abort: the messages must be delivered again
        first.)

        Raises NotAllowed, InvalidRequest, TransactionConflict, BackPressure, TransactionEnded, ConnectionLost (the
        consumer is closed), or an error of `TransactionCoordinatorsPort.join_transaction`; nothing is pending then.
        After another error or a cancellation the outcome is unknown: the caller must repeat the request, in the same
        transaction."""
        subscription, turns, wanted, last = self.subscription, EventLoopSlices(self._clock), TxnAcks(), None
        subscription.check_supports_transactions()
        if cumulative:
            *others, last = entries
            if others or sets:
                raise InvalidRequest("a cumulative acknowledgement in a transaction names one entry")
        else:
            for _ in subscription.acks.collect_requested_acks(entries, sets, wanted):
                if turns.is_slice_used_up:
                    await turns.begin_slice()
        transactions = self.topic.transactions
        if not transactions.joins.join_nowait(txn, get_required_transaction_role(self._consumer.principal)):
            await transactions.joins.join(txn, get_required_transaction_role(self._consumer.principal))
        for left in reversed(range(PREDECESSOR_WAITS_MAX)):
            if self._over or subscription.consumers.get(self.member.id) is not self._consumer:
                raise ConnectionLost("the consumer is closed: nothing was acknowledged")
            if not transactions.is_open(txn):
                raise TransactionEnded(f"transaction {txn} has ended", txn=str(txn))
            try:
                subscription.ack_in_transaction(self._consumer, txn, wanted, last, rest=rest)
                break
            except TransactionConflict as error:
                conflict = error
            if not left or not await self._ends(conflict, txn, cumulative=cumulative):
                raise conflict
        await subscription.wait_durable()

    def ack_in_transaction_nowait(
        self, txn: TxnId, entries: Iterable[AckedEntry], sets: Iterable[EntrySet] = ()
    ) -> bool:
        """Acknowledges a few entries in a transaction, as `ack_in_transaction` does, but without waiting, and returns
        True. The entries are then pending, and `call_when_durable` tells when they are durably so. Returns False if
        nothing was changed; then the caller must call `ack_in_transaction`, which can wait and raise errors."""
        subscription, wanted = self.subscription, TxnAcks()
        try:
            subscription.check_supports_transactions()
            for _ in subscription.acks.collect_requested_acks(entries, sets, wanted):
                pass
            if self._over or subscription.consumers.get(self.member.id) is not self._consumer:
                return False
            if not self.topic.transactions.joins.join_nowait(
                txn, get_required_transaction_role(self._consumer.principal)
            ):
                return False
            subscription.ack_in_transaction(self._consumer, txn, wanted)
        except MagnetarError:
            return False
        return True

    async def _ends(self, conflict: TransactionConflict, txn: TxnId, *, cumulative: bool) -> bool:
        """Returns True if the acknowledgement in `txn` may be tried again, because the other transaction with which it
        conflicts has ended."""
        for other in self.subscription.conflicting_transactions(Position.parse(conflict.fields["position"])):
            if (
                other != txn
                and (outcome := await self.topic.transactions.outcome_resolver.resolve_outcome(other)) is not None
            ):
                return outcome is TxnState.COMMITTED or not cumulative
        return False

    def call_when_durable(self, tell: Callable[[MagnetarError | None], None]) -> None:
        """Calls the function `tell` once, possibly before this method returns. `tell` gets None when everything that
        was acknowledged before this call is durable, and an error if that is not known."""
        self.subscription.call_when_durable(tell)

    async def wait_durable(self) -> None:
        """Waits until everything that this consumer acknowledged before the call is durable. Raises the errors of
        `Subscription.wait_durable`."""
        await self.subscription.wait_durable()

    async def seek_message(self, message_id: MessageId) -> None:
        """Moves the subscription so that the message `message_id` is delivered next. The new position is durable when
        this method returns. Before that, nothing from the new position on is delivered. The other consumers of the
        subscription are disconnected. Raises the errors of reading the log, and those of
        `Subscription.wait_durable`."""
        async with self.subscription.seek_lock:
            mark, acked = await find_cursor_start(self.subscription.log, message_id, inclusive=True)
            await self.subscription.seek(mark, acked, keep=self._consumer)

    async def seek_time(self, publish_time_ms: int) -> None:
        """Moves the subscription so that the first message that arrived at or after `publish_time_ms` (ms since the
        epoch) is delivered next. Otherwise does the same as `seek_message`. Raises the errors of reading the log, and
        those of `Subscription.wait_durable`."""
        async with self.subscription.seek_lock:
            log = self.subscription.log
            place = await log.reader.find_position_by_time(publish_time_ms)
            mark = await move_mark_before_chunked_message(log, log.shape.position_before(place.position))
            await self.subscription.seek(mark, keep=self._consumer)

    async def seek_index(self, index: int) -> None:
        """Moves the subscription so that the message with this index, or the first existing message after it, is
        delivered next. Otherwise does the same as `seek_message`. Raises the errors of reading the log, and those of
        `Subscription.wait_durable`."""
        async with self.subscription.seek_lock:
            log = self.subscription.log
            place = await log.reader.find_position_by_index(index)
            done = max(0, index - place.first_index) if log.shape.has_visible_entry(place.position) else 0
            mark = log.shape.position_before(place.position)
            if not done:
                mark = await move_mark_before_chunked_message(log, mark)
            await self.subscription.seek(mark, done, keep=self._consumer)

    async def commit_progress(self, index: int, note: bytes) -> None:
        """Acknowledges every message with an index below `index`, and stores the note with the cursor. Both are durable
        when this method returns, in one write. Never moves the cursor backwards; a commit of an index that is
        acknowledged already changes only the note.

        Raises InvalidRequest if the index is after the end of the topic, or the note is too long; TransactionConflict
        as `ack_cumulative` does. Raises NotAllowed if several consumers may share the subscription, if this consumer is
        not the active one, or if a note may not be stored. Raises the errors of reading the log and those of
        `Subscription.wait_durable`, too."""
        subscription = self.subscription
        check_commit_note(note, durable=subscription.is_durable)
        async with subscription.seek_lock:
            log = subscription.log
            if not 0 <= index <= log.shape.end_index:
                raise AckRefusal.NO_INDEX.error(f"index {index} is not within 0 … {log.shape.end_index}")
            acked = await find_cumulative_ack_before(log, index)
            if self.member not in subscription.dispatcher.policy.candidates:
                raise AckRefusal.INACTIVE.error(f"subscription {subscription.name!r}: {AckRefusal.INACTIVE.value}")
            if acked is not None:
                for _ in self.ack_cumulative(acked):
                    await asyncio.sleep(0)
            subscription.set_commit_note(note)
        await subscription.wait_durable()

    async def find_progress(self) -> SubscriptionProgress:
        """Returns where the subscription is in its log, as indexes of messages. Raises the errors of
        `Topic.check_may_answer_end_of_topic` and those of reading the log."""
        subscription = self.subscription
        position = await find_first_unacked_index(subscription)
        self.topic.check_may_answer_end_of_topic()
        shape, note = subscription.log.shape, subscription.cursor.note
        return SubscriptionProgress(shape.first_index, position, shape.end_index, note, self.topic.incarnation)

    async def probe_delivery(self) -> DeliveryProbeResult:
        """Waits until it is known whether this consumer gets a message now, and returns why it gets none. What it gets
        is delivered before this method returns. Considers every message that was confirmed before the call. Raises
        ConnectionLost if the consumer is closed, and the errors of `Topic.check_may_answer_end_of_topic`."""
        subscription = self.subscription
        if subscription.consumers.get(self.member.id) is not self._consumer:
            raise ConnectionLost("the consumer is closed")
        why = await subscription.pump.probe_delivery_to(self.member)
        if why is not Blocked.NO:
            self.topic.check_may_answer_end_of_topic()
        return DeliveryProbeResult(subscription.log.shape.end_index, why)

    async def unsubscribe(self, *, force: bool = False) -> None:
        """Deletes the subscription. Raises NotAllowed if the subscription is not durable (only on persistent topics);
        Busy if it has other consumers and `force` is False. With `force` the other consumers are disconnected. Raises
        the errors of `SubscriptionRegistry.unsubscribe`, too."""
        subscription = self.subscription
        if not subscription.is_durable and self.topic.name.persistent:
            raise NotAllowed("a subscription that does not last ends with its consumers: close them")
        others = len(subscription.consumers) - 1
        if others > 0 and not force:
            raise Busy(f"subscription {subscription.name!r} has {others} other consumers")
        self._removing = True  # removed by its own consumer: the answer reports it, not `on_closed`
        try:
            await self.topic.registry.unsubscribe(subscription.name, force=True)
        finally:
            self._removing = False

    async def find_last_message(self) -> LastMessage:
        """Returns the last message of the topic that the subscription can receive; its index is -1 if there is none.
        Raises the errors of `Topic.check_may_answer_end_of_topic` and those of reading the log."""
        log, mark = self.subscription.log, self.subscription.cursor.mark
        position, batch_index, index = await log.reader.read_last_message() or (EARLIEST, -1, -1)
        self.topic.check_may_answer_end_of_topic()
        return LastMessage(position, batch_index, index, mark, self.topic.name.partition)

    # ------------------------------------------------------------------ ending
    async def close(self) -> None:
        """Closes the consumer in order: its outstanding messages are delivered to other consumers, and everything that
        it acknowledged is durable when this method returns. Raises the errors of `Subscription.wait_durable`; the
        consumer is closed nevertheless."""
        self._over = True
        self.subscription.leave(self._consumer)
        await run_and_clean_up(self.wait_durable(), self.leave)

    async def leave(self) -> None:
        """Ends the consumer at once, as after a lost connection. Its outstanding messages are delivered to other
        consumers. Idempotent."""
        self._over = True
        self.subscription.leave(self._consumer, lost=True)
        await self.topic.registry.end_nondurable_subscription(self.subscription)


async def _check_schema(broker: TopicManager, topic: Topic, options: SubscribeOptions, caller: CallContext) -> None:
    """Raises IncompatibleSchema if the consumer's schema is not compatible with the schemas of the topic;
    InvalidRequest if it is invalid."""
    if options.schema is not None:
        idle = not topic.log.next_index and not len(topic.producers)
        rules, user = SchemaPolicies.from_policies(topic.applied), caller.principal.name
        await broker.schemas.check_consumer_schema(topic.name, options.schema, rules, user, idle=idle)


async def _authorize(broker: TopicManager, options: SubscribeOptions, caller: CallContext) -> None:
    """Raises Unauthorized if the caller may not consume from the topic, or may not publish to the dead-letter topic
    that the properties of the subscription name."""
    require, topic = broker.access.check_permission, TopicName.parse(options.topic)
    await require(caller.principal, Permission.CONSUME, topic=topic, subscription=options.subscription)
    if letters := options.subscription_properties.get(DEAD_LETTER_TOPIC):
        await require(caller.principal, Permission.PRODUCE, topic=TopicName.parse(letters))


async def _set_key_limits(topic: Topic, subscription: Subscription, asked: Mapping[str, str]) -> None:
    """Makes a subscription that exists as fair by key as a consumer asks for. Raises ConsumerBusy if it has consumers
    and is not. A consumer that asks for nothing takes the subscription as it is."""
    wanted, there = (
        {name: each[name] for name in FAIRNESS_PROPERTIES if name in each} for each in (asked, subscription.properties)
    )
    if not wanted or wanted == there:
        return
    if subscription.consumers:
        raise SubscribeRefusal.OTHER_LIMITS.error(
            f"subscription {subscription.name!r} has {there or 'no limits of keys'} while its consumers are connected, "
            f"and cannot have {wanted}"
        )
    others = {name: value for name, value in subscription.properties.items() if name not in FAIRNESS_PROPERTIES}
    await topic.registry.set_properties(subscription, others | wanted)


async def _subscription(topic: Topic, options: SubscribeOptions) -> Subscription:
    compacted, shape, start = options.read_compacted, topic.shape(compacted=options.read_compacted), options.start
    if options.durable:
        mark = shape.start_position if options.initial_position is InitialPosition.EARLIEST else None
        if options.start_time_ms and options.subscription not in topic.subscriptions:
            mark = await find_cursor_mark_by_time(topic.readable_log(compacted=compacted), options.start_time_ms)
        elif start is not None:
            mark = compute_cursor_start(shape, start, options.start_inclusive, last_again=options.start_inclusive)[0]
        properties = dict(options.subscription_properties)
        durable = await topic.registry.subscribe(
            options.subscription, mark, properties, compacted=compacted, by_consumer=True
        )
        if not options.incarnation:  # one that connects again does not undo what an operator has changed
            await _set_key_limits(topic, durable, properties)
        return durable
    shared = options.type is not EXCLUSIVE_ROW  # else it has its own, whatever its name is
    if shared and (found := topic.registry.find_nondurable_subscription(options.subscription)) is not None:
        return found
    if start is None:
        start = MessageId(*(EARLIEST if options.initial_position is InitialPosition.EARLIEST else LATEST))
    log = topic.readable_log(compacted=compacted)
    done: Sequence[Position] = ()
    if options.start_time_ms:
        mark, acked = await find_cursor_mark_by_time(log, options.start_time_ms), 0
    elif start.position >= LATEST and options.start_inclusive:
        mark, acked, done = await find_last_message(log)
    else:
        mark, acked = await find_cursor_start(log, start, options.start_inclusive)
    # made meanwhile
    if shared and (found := topic.registry.find_nondurable_subscription(options.subscription)) is not None:
        return found
    subscription = topic.registry.make_nondurable_subscription(
        options.subscription, mark, compacted=compacted, tracks=shared or options.acknowledges
    )
    if acked:
        subscription.cursor.ack_first_messages(shape.position_after(mark), acked)
    for position in done:
        subscription.cursor.ack(position)
    topic.registry.register_nondurable_subscription(subscription)
    return subscription
