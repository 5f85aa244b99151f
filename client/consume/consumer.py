"""The consumer of one or several topics, for asyncio (`Consumer`): one PartitionConsumer per partition, and one
receiver queue for all.

    async with await client.subscribe("flights", "board") as consumer:
        async for message in consumer:
            …
            await consumer.acknowledge(message)

Also the collection of the PartitionConsumers of one consumer or reader (`PartitionConsumers`), which share a receiver
queue, the `inbox`:

    partitions = PartitionConsumers(settings)
    await partitions.open(new)             the first partitions: opens all of them, or none if a broker refuses one
    await partitions.add_partitions(new)   later partitions; each has a receiver queue of its own until all are open
    partitions.remove(consumer)            its topic was deleted
    await partitions.close()

The limit of messages that wait in the client is divided evenly among the partitions, and divided anew when their number
changes. A message id that selects a partition must name its topic, or a partition number that only one topic of the
consumer has. `all` is the same list object for ever. Guards: tests/client/connect/test_partitions_watcher.py,
tests/client/connect/test_patterns.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from ...proto import wire_pb2 as wire
from ...proto.errors import InvalidName, MagnetarError, TopicNotFound
from ...proto.names import TopicName, check_subscription_name
from ...proto.states import Failure
from ...runtime.tasks import Tasks
from ..common.checks import (
    ACK_ID_CHECKS,
    DELAY_CHECK,
    EXCEPTION_CHECK,
    INT64_MAX,
    PROPERTIES_CHECK,
    PUBLISH_TIME_CHECK,
    SEEK_ID_CHECKS,
    TIMEOUT_MS,
    ParameterCheck,
    WrongMessageType,
    WrongType,
    WrongValue,
    check_parameter,
    check_parameters,
    make_instance_check,
    make_whole_number_check,
    shorten_value,
)
from ..common.closing import ClosedAfterAsyncWith, close_all_parts
from ..common.errors import (
    AlreadyClosed,
    CumulativeAcknowledgementNotAllowedError,
    InvalidMessage,
    NoMessageAvailable,
    OperationNotSupported,
    PulsarException,
    Timeout,
    run_translating_errors,
    translate_error,
)
from ..common.rate_limits import CircuitBreaker, SharedRateLimiter
from ..connect.connections import Connections
from ..connect.topic_watch import PartitionsWatcher, TopicPatternWatch
from ..core.effects import PartitionClientState, SeekIndex
from ..core.levels import LevelQueues, LevelTurns, make_default_weights, split_by_level
from ..core.transaction import TransactionPort
from ..model.hooks import chain_hooks
from ..model.message import ActiveConsumerEvents, Message
from ..model.message_id import MessageId
from ..model.options import ReaderStart
from ..model.settings import ORDERED_CONSUMER_TYPES, ConsumerDeadLetterPolicy, ConsumerSettings, InitialPosition
from ..produce.entry_writer import check_transaction_argument
from .acknowledgements import get_ack_coordinates
from .dead_letters import DeadLetterProducers, describe_error, is_dead_letter
from .listening import Listening, ListenOptions, begin_listening, check_batch_parameters
from .partition_consumer import PartitionConsumer
from .receiver_queue import ConsumerBatchReceivePolicy, ReceiverQueue, fetch_writer_schemas, receive_batch

T = TypeVar("T")


class PartitionConsumers:
    """The PartitionConsumers of one consumer or reader, one for each partition (`all`), and the receiver queue that
    they share (`inbox`). See the head of the module."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self.all: list[PartitionConsumer] = []
        self.inbox = ReceiverQueue(_make_level_queues(settings))
        self._watcher: PartitionsWatcher | None = None
        self._settings = settings
        self._by_topic: dict[str, PartitionConsumer] = {}

    # ------------------------------------------------------------------------------ who belongs to it
    def queue_size_per_partition(self, more: int = 0) -> int:
        """Returns how many messages of each partition may wait in the client: `receiver_queue_size`, or the partition's
        share of the limit for all partitions if that is smaller. `more`: the number of partitions that will be
        added."""
        total = self._settings.max_total_receiver_queue_size_across_partitions
        return max(1, min(self._settings.receiver_queue_size, total // max(1, len(self.all) + more)))

    async def open(self, new: Sequence[PartitionConsumer]) -> None:
        """Adds the partitions `new`, the first of the collection, and opens them. If one cannot be opened, closes all
        of them and raises its error, such as ConsumerBusy, TopicNotFound, Timeout or ConnectError."""
        self._add(new)
        await _open(new)

    async def add_partitions(self, new: Sequence[PartitionConsumer]) -> None:
        """Opens the partitions `new` and adds them. If one cannot be opened, closes all of `new`, adds none and raises
        its error. Until all are open, each has a receiver queue of its own. So no caller receives a message of a
        partition that is not added, and a partition that fails closes only its own queue."""
        await _open(new)
        self._add(new)
        self._share_out()
        for each in new:
            each.set_receiver_queue(self.inbox)

    def _add(self, new: Sequence[PartitionConsumer]) -> None:
        self.all.extend(new)
        self._by_topic.update({each.topic.full: each for each in new})

    def remove(self, consumer: PartitionConsumer) -> bool:
        """Removes a partition's consumer from the collection, and does not close it. The others share its part of the
        receiver queue's limit. Returns False if it was removed already."""
        if self._by_topic.pop(consumer.topic.full, None) is None:
            return False
        self.all.remove(consumer)
        self._share_out()
        if self._watcher is not None:
            self._watcher.remove(consumer.topic.base)
        return True

    def _share_out(self) -> None:
        share = self.queue_size_per_partition()
        for each in self.all:
            each.resize_queue(share)

    # ------------------------------------------------------------------------------ which one
    def find_missing_topics(self, topics: Sequence[TopicName]) -> list[TopicName]:
        """Returns those of `topics` that no consumer of this collection reads."""
        return [topic for topic in topics if topic.full not in self._by_topic]

    def find_consumer_of_message(self, message: Message) -> PartitionConsumer | None:
        """Returns the PartitionConsumer that received the message; None if it is not, or no longer, in this collection.
        """
        consumer = message.entry.consumer
        found = self._by_topic.get(consumer.topic.full)
        return found if found is consumer else None

    def find_consumer_of_message_id(self, which: MessageId) -> PartitionConsumer:
        """Returns the PartitionConsumer of the partition that the message id `which` names. Raises
        OperationNotSupported if the id names neither its topic nor a partition that only one topic has, as Pulsar's
        client does. Raises InvalidMessage if no consumer of this collection reads that partition."""
        if which.partition() >= 0 and all(each.topic.partition != which.partition() for each in self.all):
            raise InvalidMessage(f"{which!r} is of partition {which.partition()}, which this consumer does not have")
        if len(self.all) == 1:
            return self.all[0]
        found = self._by_topic.get(which.topic_name())
        if found is None:
            of_partition = [each for each in self.all if each.topic.partition == which.partition()]
            if len(of_partition) != 1:
                raise OperationNotSupported(f"{which!r} does not say of which topic it is: deserialize it with topic=…")
            found = of_partition[0]
        return found

    # ------------------------------------------------------------------------------ later partitions
    def watch_partition_counts(
        self, connections: Connections, counts: dict[TopicName, int],
        grow: Callable[[TopicName, int], Awaitable[None]],
    ) -> None:  # fmt: skip
        """Starts to watch how many partitions the topics have. `counts`: the numbers now, by topic. Awaits `grow(topic,
        count)` when a topic has more partitions, until `stop_watching` or `close`."""
        self._watcher = PartitionsWatcher(connections, counts, grow)

    def watch_partitions(self, topic: TopicName, count: int) -> None:
        """Watches the number of partitions of a further topic; `count`: the number now. Does nothing if nothing is
        watched."""
        if self._watcher is not None:
            self._watcher.watch(topic, count)

    # ------------------------------------------------------------------------------ all of them
    def are_all_connected(self) -> bool:
        """Returns whether each partition is connected to its broker; also if there is no partition."""
        return all(each.core.state is PartitionClientState.CONNECTED for each in self.all)

    def are_all_closed(self) -> bool:
        """Returns whether each partition has ended for good; also if there is no partition."""
        return all(each.core.state is PartitionClientState.CLOSED for each in self.all)

    async def wait_available(self) -> None:
        """Waits until the receiver queue contains a message, or the brokers of all partitions have answered that they
        have none. Raises NoMessageAvailable in the second case; the error with which the receiver queue ended;
        OperationNotSupported if a broker is too old; and the error of a broker that does not answer, untranslated."""
        while True:
            asked = {each: each.received_permits for each in self.all}
            for each in asked:
                each.flush_acks()  # what was taken makes room for more
            if len(self.inbox):
                return
            answers = await self._probe(list(asked))
            if len(self.inbox):
                return
            if all(each.received_permits == before for each, before in asked.items()):
                ends = {each.topic.full: answer.end_index for each, answer in answers.items()}
                why = {each.topic.full: answer.why for each, answer in answers.items()}
                raise NoMessageAvailable("the brokers have no message for this consumer now", ends, why)

    async def _probe(self, partitions: Sequence[PartitionConsumer]) -> dict[PartitionConsumer, wire.Probed]:
        """Asks the brokers of the partitions whether this consumer gets a message now. Returns their answers; some may
        be missing if a message arrived first."""
        tasks, answers = Tasks(), dict[PartitionConsumer, wire.Probed | MagnetarError]()

        async def ask(each: PartitionConsumer) -> None:
            answers[each] = await _get_outcome(each.requests.ask_for_message_now())

        asking = asyncio.gather(*(tasks.spawn(ask(each), f"a question of {each.topic}") for each in partitions))
        filled = tasks.spawn(_get_outcome(self.inbox.wait_message(None)), "a wait for a message")
        try:
            await asyncio.wait((filled, asking), return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks.cancel()
            await tasks.drain()
            await asyncio.gather(asking, return_exceptions=True)
        if len(self.inbox):
            return {}
        self.inbox.raise_if_ended()
        found = dict[PartitionConsumer, wire.Probed]()
        for each, answer in answers.items():
            if isinstance(answer, wire.Probed):
                found[each] = answer
            elif each in self.all:  # others were deleted meanwhile
                raise answer
        return found

    def find_partition(self, which: int | str | None) -> PartitionConsumer:
        """Returns the PartitionConsumer of a partition: `which` is its number, its full topic name, or None if there is
        only one. Raises InvalidConfiguration if `which` names no partition, or several; InvalidTopicName if it is no
        name of a topic."""
        if isinstance(which, str):
            try:
                name = TopicName.parse(which).full
            except InvalidName as error:
                raise translate_error(error) from error
            found = [self._by_topic[name]] if name in self._by_topic else []
        elif which is None:
            found = self.all
        else:
            found = [each for each in self.all if each.topic.partition == which]
        if len(found) != 1:
            names = ", ".join(sorted(self._by_topic)[:3])
            raise WrongValue(f"{shorten_value(which)} is no partition, or several, of: {names or 'nothing'}")
        return found[0]

    def stop_watching(self) -> None:
        """Ends the watch of how many partitions the topics have, if there is one."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()

    async def seek(self, to: MessageId | int) -> None:
        """Moves all partitions to MessageId.earliest, MessageId.latest or a time in ms since the epoch, at which a
        broker stored the message. For the id of a message, moves only the partition of that message. Returns when the
        brokers have moved them. Raises InvalidConfiguration for another type or an invalid number, the errors of
        `find_consumer_of_message_id`, and those of the requests to the brokers: Timeout, ConnectError, AlreadyClosed or
        the error of a broker that refuses."""
        if isinstance(to, MessageId):
            everywhere = to in (MessageId.earliest, MessageId.latest)
            if not everywhere:
                check_parameters(SEEK_ID_CHECKS, {"ledger_id": to.ledger_id(), "entry_id": to.entry_id()})
            await _seek(self.all if everywhere else [self.find_consumer_of_message_id(to)], to)
        elif isinstance(to, int) and not isinstance(to, bool):
            check_parameter("a publish time", PUBLISH_TIME_CHECK, to)
            await _seek(self.all, to)
        else:
            raise WrongType(f"seek takes a MessageId or ms since the epoch, not {shorten_value(to)}")

    def abort(self) -> None:
        """Ends all partitions at once, without informing the brokers."""
        if self._watcher is not None:
            self._watcher.stop()
        for each in self.all:
            each.abort()

    async def close(self) -> None:
        """Closes all partitions at their brokers, and waits for the answers; errors of the brokers are logged, not
        raised. If the call is interrupted, ends the partitions at once."""
        try:
            if self._watcher is not None:
                await self._watcher.close()
            await close_all_parts(self.all)
        except BaseException:  # the close was interrupted: they end at once
            self.abort()
            raise


def _make_level_queues(settings: ConsumerSettings) -> LevelQueues[Message] | None:
    if settings.levels is None:
        return None
    weights = make_default_weights(settings.levels) if settings.weights is None else settings.weights
    return LevelQueues(LevelTurns(settings.levels, weights), _find_level)


def _find_level(message: Message) -> int:
    consumer: Any = message.entry.consumer
    level: int = consumer.level
    return level


async def _seek(partitions: Sequence[PartitionConsumer], to: MessageId | int) -> None:
    await run_translating_errors(asyncio.gather(*(each.requests.seek(to) for each in partitions)))


async def _get_outcome(work: Awaitable[T]) -> T | MagnetarError:
    try:
        return await work
    except MagnetarError as error:
        return error


async def _open(new: Sequence[PartitionConsumer]) -> None:
    try:
        outcomes = await asyncio.gather(*(each.open() for each in new), return_exceptions=True)
    except BaseException:  # they have no waiter any more
        for each in new:
            each.abort()
        raise
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        with suppress(Exception):  # why it was not opened is what the caller learns
            await close_all_parts(new)
        raise errors[0]


class PartitionProgress(NamedTuple):
    """The position of a subscription in one partition, as indexes of messages (dense, from 0). `earliest`: the oldest
    message that is kept. `position`: the first message that is not acknowledged. `end`: one past the newest message
    that the subscription may get. `note`: that of the last commit; empty if there is none. `incarnation`: a number of
    the topic, which is another one after the topic was deleted and created again; 0: not known."""

    earliest: int
    position: int
    end: int
    note: bytes
    incarnation: int

    @property
    def lag(self) -> int:
        """Returns how many messages follow `position`; those that are acknowledged out of order count too."""
        return max(0, self.end - self.position)


COMMIT_NOTE_CHECK = ParameterCheck("bytes, at most 1024, or None", (bytes,), lambda note: len(note) <= 1024, True)
INDEX_CHECK = make_whole_number_check(0, INT64_MAX)
PARTITION_CHECK = ParameterCheck("the number of a partition, the name of a topic, or None", (int, str), optional=True)


def timeout_to_seconds(timeout_millis: int | None) -> float | None:
    """Converts a time-out in milliseconds to seconds and returns it; None for None. Raises WrongType or WrongValue if
    `timeout_millis` is no valid number of milliseconds."""
    if timeout_millis is None:
        return None
    check_parameter("timeout_millis", TIMEOUT_MS, timeout_millis)
    return timeout_millis / 1000


_LOG = logging.getLogger("magnetar.client")


NONDURABLE_STARTS = {
    InitialPosition.Latest: ReaderStart(MessageId.latest, False),
    InitialPosition.Earliest: ReaderStart(MessageId.earliest, False),
}
"""Where a subscription that is not durable begins."""


def check_partitions(partitions: Iterable[int]) -> tuple[int, ...]:
    """Returns numbers of partitions, sorted, each once. Raises WrongType or WrongValue if `partitions` is no list of
    such numbers."""
    if isinstance(partitions, str | bytes) or not isinstance(partitions, Iterable):
        raise WrongType(f"partitions is a list of numbers of partitions, not {shorten_value(partitions)}")
    found = list(partitions)
    for each in found:
        check_parameter("a partition", make_whole_number_check(0), each)
    return tuple(sorted(set(found)))


class Consumer(ClosedAfterAsyncWith):
    """Receives and acknowledges messages of a subscription, for asyncio. `Client.subscribe` opens it.

    A subscription keeps its position when its consumers are closed: unacknowledged messages are delivered again
    (at-least-once). `message.data()` is `bytes`, `message.value()` is decoded by the schema. Up to
    `receiver_queue_size` messages wait in the client. One consumer receives from all partitions of a topic; the order
    of messages is kept per partition.

    A consumer belongs to the event loop that opened it; `acknowledge_soon`, `negative_acknowledge_soon` and
    `record_error` may be called from any thread. Errors: Timeout (no message within `timeout_millis`), AlreadyClosed,
    InvalidConfiguration (a wrong parameter), InvalidMessage (not received by this consumer), ChecksumError (a damaged
    message), CumulativeAcknowledgementNotAllowedError (Shared and KeyShared), OperationNotSupported (a message id that
    does not name its partition, or a broker that is too old). A method that asks brokers also raises Timeout or
    ConnectError if they do not answer within `operation_timeout_seconds`, and the error with which a broker refuses the
    request."""

    def __init__(
        self, connections: Connections, name: str, subscription: str, settings: ConsumerSettings,
        policy: ConsumerBatchReceivePolicy, start: ReaderStart | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.policy = policy
        self.tracing = connections.settings.tracing
        self.hooks = chain_hooks(connections.settings.hooks, settings.hooks)
        self._partitions = PartitionConsumers(settings)
        self.partitions, self.inbox = self._partitions.all, self._partitions.inbox
        self.connections = connections
        self._name = name
        self._subscription = subscription
        self.listening: Listening | None = None  # the latest
        self._closed = False
        self._single_topic: TopicName | None = None
        self._assigned: tuple[int, ...] | None = None  # None: all partitions, also later ones
        self._assigning = asyncio.Lock()
        self._start = start
        self._levels: dict[TopicName, int] = {}  # of priority, by topic
        self._watch: TopicPatternWatch | None = None
        listener = settings.consumer_event_listener
        self._events = ActiveConsumerEvents(listener) if listener is not None else None
        self._dead_letters = DeadLetterProducers(connections, subscription, settings, self.consumer_name, self.hooks)

    @classmethod
    async def open(
        cls, connections: Connections, topics: Sequence[TopicName], subscription: str, settings: ConsumerSettings,
        policy: ConsumerBatchReceivePolicy | None = None, watch: TopicPatternWatch | None = None,
        *, start: ReaderStart | None = None, partitions: Sequence[int] | None = None,
    ) -> Consumer:  # fmt: skip
        """Returns a consumer that is subscribed to all partitions of all `topics`. If the broker of one partition
        refuses, subscribes to none and raises the error of that broker.

        `watch`: finds the topics that match a pattern and are created later. `start`: where a subscription that is not
        durable begins; None: at the settings' initial position. `partitions`: the numbers of the partitions to read, of
        one topic; None: all. With levels of priority the consumer reads the topics of all levels, and the receiver
        queue is divided evenly among the levels. Raises TopicNotFound if a topic does not exist and may not be created;
        InvalidName if `subscription` is malformed; with `partitions`, the errors of `assign`; and those of
        `Connections.fetch_partition_count`."""
        check_subscription_name(subscription)
        if settings.levels is not None:
            settings = replace(settings, receiver_queue_size=max(1, settings.receiver_queue_size // settings.levels))
        settings = replace(settings, many_topics=len(topics) > 1 or watch is not None)
        if watch is not None:
            settings = replace(settings, existing_only=True)  # do not create a deleted topic again
        title = watch.title if watch is not None else ",".join(topic.full for topic in topics)
        consumer = cls(connections, title, subscription, settings, policy or ConsumerBatchReceivePolicy(), start)
        is_single = len(topics) == 1 and watch is None and settings.levels is None
        consumer._single_topic = topics[0] if is_single else None
        if partitions is not None:
            await consumer.assign(partitions)
            if consumer._events is not None:
                consumer._events.attach_consumer(consumer)
            return consumer
        await consumer._open_topics(topics)
        if watch is not None:
            consumer._watch = watch
            watch.follow(consumer.change_topics)
        return consumer

    async def _open_topics(self, topics: Sequence[TopicName]) -> None:
        opened: dict[TopicName, int] = {}
        for topic, level in split_by_level(topics, self.settings.levels):
            opened.update(dict.fromkeys(self._dead_letters.add(topic, level), level))
        self._levels.update((topic.base, level) for topic, level in opened.items())
        topics = list(opened)
        counts = await asyncio.gather(*(self.connections.fetch_partition_count(topic) for topic in topics))
        names: list[TopicName] = []
        for topic, partitions in zip(topics, counts, strict=True):
            names += [topic.with_partition(i) for i in range(partitions)] or [topic]
        await self._partitions.open([self._consumer(name, self.settings, self.inbox, len(names)) for name in names])
        if self._events is not None:
            self._events.attach_consumer(self)
        self._partitions.watch_partition_counts(self.connections, dict(zip(topics, counts, strict=True)), self._grown)

    def _consumer(
        self, name: TopicName, settings: ConsumerSettings, inbox: ReceiverQueue, more: int
    ) -> PartitionConsumer:
        letters = self._dead_letters.producer_of(name)
        if settings.filter is not None and letters is not None and name.base == letters.retry_letter_topic.base:
            settings = replace(settings, filter=None)  # what is retried was wanted
        consumer = PartitionConsumer(
            self.connections, name, self._subscription, settings, inbox,
            queue_size=self._partitions.queue_size_per_partition(more), dead_letters=letters,
            start=None if settings.durable else self._start or NONDURABLE_STARTS[settings.initial_position],
            on_gone=self._gone if settings.existing_only else None,
            hooks=self.hooks,
        )  # fmt: skip
        consumer.level = self._levels.get(name.base, 0)
        consumer.on_active = self._events.notify if self._events is not None else None
        return consumer

    # ------------------------------------------------------------------------------ topics and partitions
    async def _grow(self, names: Sequence[TopicName]) -> None:
        """Adds partitions, which are read from their beginning: the subscription is older than the new partitions."""
        settings = replace(self.settings, initial_position=InitialPosition.Earliest, start_at_ms=0)
        missing = self._partitions.find_missing_topics(names)
        await self._partitions.add_partitions(
            [self._consumer(name, settings, ReceiverQueue(), len(missing)) for name in missing]
        )

    async def _grown(self, topic: TopicName, found: int) -> None:
        await self._grow([topic.with_partition(i) for i in range(found)])

    async def change_topics(self, added: Sequence[TopicName], removed: Sequence[TopicName]) -> list[TopicName]:
        """Subscribes to the topics `added`, and ends the consumers of the topics `removed`. Returns the topics of
        `added` to which the consumer could not subscribe; the errors are logged."""
        for consumer in [each for each in self.partitions if each.topic.base in removed]:
            consumer.discard_messages()
            self._gone(consumer)
            consumer.abort()
        failed: list[TopicName] = []
        for topic in added:
            try:
                await self._add_topic(topic)
            except (MagnetarError, PulsarException) as error:
                _LOG.warning("%s: topic %s is subscribed to later: %s", self._name, topic, error)
                failed.append(topic)
        return failed

    async def _add_topic(self, topic: TopicName) -> None:
        for each in self._dead_letters.add(topic):
            try:
                partitions = await self.connections.fetch_partition_count(each, create=each != topic)
            except TopicNotFound:
                return  # deleted again; the watch reports when it is created again
            await self._grow([each.with_partition(i) for i in range(partitions)] or [each])
            self._partitions.watch_partitions(each, partitions)

    def _gone(self, consumer: PartitionConsumer) -> None:
        """Removes a partition from the consumer, because its topic was deleted."""
        if self._partitions.remove(consumer):
            consumer.was_of = self
            if self._watch is not None:
                self._watch.on_topic_found_deleted(consumer.topic.base)

    # ------------------------------------------------------------------------------ facts
    def topic(self) -> str:
        """Returns the full name of the topic; for several topics, their names separated by commas; for a pattern, the
        text of the pattern."""
        return self._name

    @property
    def is_over(self) -> bool:
        """Returns whether the consumer is closed or has failed, that is, all its partitions are closed. A pattern may
        match no topic for a while, and no partition may be assigned; the consumer then stays open."""
        return self._partitions.are_all_closed() and ((self._watch is None and self._assigned is None) or self._closed)

    def subscription_name(self) -> str:
        """Returns the name of the subscription."""
        return self._subscription

    def consumer_name(self) -> str:
        """Returns the name of the consumer, given by the program or by the broker. If the program gave none, it is
        empty until a broker has given one."""
        return self.partitions[0].name if self.partitions else self.settings.consumer_name or ""

    def is_connected(self) -> bool:
        """Returns whether the consumers of all partitions are connected to their brokers."""
        return self._partitions.are_all_connected()

    def title(self) -> str:
        """Returns the names of the consumer, the subscription and the topic as one text, for log lines."""
        return f"consumer {self.consumer_name()} of {self.subscription_name()} on {self.topic()}"

    def statistics(self) -> dict[str, int]:
        """Returns counters since the consumer was opened; client/common/loggers.py `STATISTICS` says what they are."""
        held = [each.debounce for each in self.partitions if each.debounce is not None]
        return {
            "partitions": len(self.partitions),
            "waiting_messages": len(self.inbox.waiting_messages()) + sum(len(each.held_messages) for each in held),
            "delivered_messages": sum(each.core.delivered for each in self.partitions),
            "delivered_bytes": sum(each.core.delivered_bytes for each in self.partitions),
            "acknowledgements": sum(each.acks.acknowledged for each in self.partitions),
            "negative_acknowledgements": sum(each.core.negatively_acknowledged for each in self.partitions),
            "expired_messages": sum(each.deliveries.expired for each in self.partitions),
            "discarded_entries": sum(each.deliveries.discarded for each in self.partitions),
            "filtered_messages": sum(each.deliveries.filtered for each in self.partitions),
            "hook_failures": self.hooks.failures if self.hooks is not None else 0,
            "superseded_messages": sum(each.superseded for each in held),
        }

    # ------------------------------------------------------------------------------ receiving
    async def receive(self, timeout_millis: int | None = None, *, now: bool = False) -> Message:
        """Waits for the next message and returns it. Raises Timeout if no message arrives within `timeout_millis`
        milliseconds; None: waits without a limit. Raises AlreadyClosed, or the error that ended the consumer, if the
        consumer has ended; ChecksumError for a damaged message; a broker's error if the message's schema must be
        fetched; InvalidConfiguration for a wrong parameter.

        `now`: asks the brokers instead of waiting, and raises NoMessageAvailable if they have no message for this
        consumer. A message whose `send` was acknowledged before this call is found, if this consumer may have it. `now`
        and `timeout_millis` exclude each other. With `now` raises the errors of `wait_available`, too."""
        if timeout_millis is not None and (type(timeout_millis) is not int or timeout_millis < 0):
            timeout_to_seconds(timeout_millis)
        if now and timeout_millis is not None:
            raise WrongValue("now and timeout_millis exclude each other")
        message = self.inbox.take_nowait()
        if message is None and now:
            message = await self._receive_now()
        elif message is None:
            message = await self.inbox.take_message(timeout_to_seconds(timeout_millis))
        if self.settings.schema.by_writer:
            await fetch_writer_schemas(self.inbox, message)
        if self.hooks is not None:
            self.hooks.before_deliver(message)
        return message

    async def _receive_now(self) -> Message:
        while True:
            await self.wait_available()
            message = self.inbox.take_nowait()  # another task may have been faster
            if message is not None:
                return message

    async def wait_available(self) -> None:
        """Waits until a message waits in the client, and does not remove it. Raises NoMessageAvailable if the brokers
        have none for this consumer now; Timeout or ConnectError if a broker does not answer; AlreadyClosed, or the
        error that ended the consumer, if the consumer has ended; OperationNotSupported if a broker is too old."""
        await run_translating_errors(self._partitions.wait_available())

    async def batch_receive(self) -> list[Message]:
        """Waits for messages and returns a batch of them, within the limits of the consumer's batch_receive_policy.
        Returns an empty list if no message arrives within the time-out of that policy. Raises AlreadyClosed, or the
        error that ended the consumer, if the consumer has ended; ChecksumError for a damaged message; a broker's error
        if a message's schema must be fetched. If the call is cancelled or raises, the other messages go back to the
        receiver queue."""
        batch = await receive_batch(self.inbox, self.policy, self.connections.world.clock.monotonic)
        if self.settings.schema.by_writer:
            await fetch_writer_schemas(self.inbox, *batch)
        if self.hooks is not None:
            for message in batch:
                self.hooks.before_deliver(message)
        return batch

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                yield await self.receive()
            except AlreadyClosed:
                if self._closed:
                    return
                raise

    # ------------------------------------------------------------------------------ listening
    def listen(
        self,
        function: Callable[[Message], Any],
        *,
        concurrency: int = 32,
        order: str = "key",
        threads: int | None = None,
        rate: float | SharedRateLimiter | None = None,
        breaker: CircuitBreaker | None = None,
        acknowledge: bool = True,
        stop_timeout: float = 30,
    ) -> Listening:
        """Calls `function(message)` for each message, up to `concurrency` at a time, and acknowledges the message when
        the function returns. If the function raises, the message is negatively acknowledged. Returns the running
        listener at once.

            async with consumer.listen(handle, concurrency=8) as listening:
                await listening.wait()

        A coroutine function runs in the event loop, another function in up to `threads` threads (None: `concurrency`).
        `order`: with "key" the messages of one key are handled one after the other, those without a key in any order;
        with "partition" the messages of one partition are handled one after the other; with "none" there is no order.
        `rate`: the most calls per second, or a RateLimiter. `breaker`: while it is open, no call begins, and the
        consumer requests no more messages. `acknowledge` False: the function acknowledges by itself, for example in a
        transaction. `stop_timeout`: the seconds that running handlers have at the end.

        A handler that runs for a minute is reported by a warning in the log. A message that is delivered again while
        its handler runs is not handled a second time. Raises InvalidConfiguration if the consumer has a listener, or
        for a wrong parameter. Must be called in the event loop."""
        options = ListenOptions(concurrency, order, threads, rate, breaker, acknowledge, stop_timeout)
        return begin_listening(self, function, options)

    def listen_batch(
        self,
        function: Callable[[list[Message]], Any],
        *,
        max: int = 500,
        wait: float = 1.0,
        concurrency: int = 1,
        threads: int | None = None,
        rate: float | SharedRateLimiter | None = None,
        breaker: CircuitBreaker | None = None,
        acknowledge: bool = True,
        stop_timeout: float = 30,
    ) -> Listening:
        """Calls `function(messages)` for batches of messages, and acknowledges the messages when the function returns.
        A batch has up to `max` messages, and ends `wait` seconds after its first message. Returns the running listener
        at once.

        The function may return a result for each message, in their order: for an exception or False, that message is
        negatively acknowledged. If the function raises, all messages of the batch are. `rate`: messages per second. The
        other parameters and the errors are those of `listen`; with a `concurrency` of 1 batches keep the order of the
        messages."""
        check_batch_parameters(max, wait)
        options = ListenOptions(
            concurrency, "none", threads, rate, breaker, acknowledge, stop_timeout, batch=max, wait_s=wait
        )
        return begin_listening(self, function, options)

    @property
    def is_closing(self) -> bool:
        """Returns whether `close` was called."""
        return self._closed

    @property
    def has_listener(self) -> bool:
        """Returns whether a running listener of `listen` or `listen_batch` gets the messages."""
        return self.listening is not None and not self.listening.is_over

    # ------------------------------------------------------------------------------ acknowledging
    def consumer_of(self, which: Message | MessageId) -> PartitionConsumer:
        """Returns the PartitionConsumer that received the message `which`. Raises InvalidMessage if this consumer did
        not receive the message, or `which` is neither a Message nor a MessageId; OperationNotSupported if the id does
        not name its partition; InvalidConfiguration if it is the id of no single message, such as
        MessageId.earliest."""
        if isinstance(which, Message):
            consumer, consumers = which.entry.consumer, self._partitions.all
            if consumers and consumer is consumers[0]:
                return consumers[0]
            mine = self._partitions.find_consumer_of_message(which)
            if mine is not None:
                return mine
            if isinstance(consumer, PartitionConsumer) and consumer.was_of is self:
                return consumer
            raise InvalidMessage("the message was not received by this consumer")
        if not isinstance(which, MessageId):
            raise WrongMessageType(f"a Message or a MessageId is acknowledged, not {shorten_value(which)}")
        (ledger_id, entry_id), batch_index = which.position(), which.batch_index()
        check_parameters(ACK_ID_CHECKS, {"ledger_id": ledger_id, "entry_id": entry_id, "batch_index": batch_index})
        return self._partitions.find_consumer_of_message_id(which)

    def acknowledge_soon(self, which: Message | MessageId | Iterable[Message | MessageId]) -> None:
        """Acknowledges one or several messages without waiting; the acknowledgements are sent within `ack_group_ms`.
        Raises InvalidMessage, before any is acknowledged, if this consumer did not receive one of them;
        OperationNotSupported or InvalidConfiguration for an id that names no message or partition; AlreadyClosed, or
        the error that ended the consumer, if the consumer has ended. May be called from any thread."""
        if type(which) is Message and (consumers := self._partitions.all) and which.entry.consumer is consumers[0]:
            if consumers[0].core.error is not None:
                consumers[0].requests.raise_if_closed()
            consumers[0].acks.acknowledge(which)
        elif isinstance(which, Message) or not isinstance(which, list | tuple | set | frozenset | Iterator):
            consumer = self.consumer_of(which)  # type: ignore[arg-type]
            if consumer.was_of is self:
                return  # there is nothing left to acknowledge
            consumer.requests.raise_if_closed()
            consumer.acknowledge(which)  # type: ignore[arg-type]
        else:
            every = list(which)
            for each in every:
                self.consumer_of(each)  # all are checked before the first is acknowledged
            for each in every:
                self.acknowledge_soon(each)

    def record_error(self, which: Message | MessageId, error: BaseException) -> None:
        """Records the exception with which the program failed at the message: it is described in the dead letter, if
        the message becomes one. Does not acknowledge anything. Raises InvalidMessage if this consumer did not receive
        the message; OperationNotSupported or InvalidConfiguration for an id that names no partition or no message. May
        be called from any thread."""
        consumer = self.consumer_of(which)
        position = get_ack_coordinates(which)[0]
        consumer.remember_failure(position, self._describe(error))

    def _describe(self, error: BaseException) -> Failure:
        return describe_error(error, self.consumer_name(), traceback=self.settings.error_traceback)

    def negative_acknowledge_soon(self, which: Message | MessageId, error: BaseException | None = None) -> None:
        """Acknowledges a message negatively, as `negative_acknowledge` does and with its errors, without waiting. May
        be called from any thread. With redelivery_order "key" the broker may be told later than by that method."""
        if error is not None:
            check_parameter("error", EXCEPTION_CHECK, error)
            self.record_error(which, error)
        self.consumer_of(which).acks.negative_acknowledge(which)

    def acknowledge_in(
        self, txn: TransactionPort, which: Message | MessageId | Iterable[Message | MessageId], *,
        cumulative: bool = False, waiters: list[asyncio.Future[None]] | None = None,
    ) -> None:  # fmt: skip
        """Acknowledges messages in the transaction `txn`: the acknowledgements count when `txn` commits. `cumulative`:
        acknowledges also all messages before them in their partitions. Returns at once; the commit waits until they are
        durable. If `waiters` is given, appends to it one future for each partition, which gets the outcome. Raises the
        errors of `acknowledge` and `acknowledge_cumulative`; TransactionEnded if `txn` is not open,
        InvalidTxnStatusError if it has not begun, InvalidConfiguration if it is another client's; TransactionConflict
        if `txn` acknowledges two deliveries of one message. Must be called in the event loop."""
        check_transaction_argument(txn)
        if cumulative:
            self._check_cumulative()
        by_partition: dict[PartitionConsumer, list[Message | MessageId]] = {}
        several: Iterable[Any] = which if isinstance(which, list | tuple | set | frozenset | Iterator) else (which,)
        for each in several:
            by_partition.setdefault(self.consumer_of(each), []).append(each)
        for consumer, some in by_partition.items():
            waiter: asyncio.Future[None] | None = None
            if waiters is not None:
                waiter = asyncio.get_running_loop().create_future()
                waiters.append(waiter)
            consumer.in_transactions.acknowledge(txn, some, cumulative=cumulative, waiter=waiter)

    async def _acknowledge_in(
        self, txn: TransactionPort, which: Message | MessageId | Iterable[Message | MessageId], *, cumulative: bool
    ) -> None:
        waiters: list[asyncio.Future[None]] = []
        limit_s = self.connections.settings.operation_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                self.acknowledge_in(txn, which, cumulative=cumulative, waiters=waiters)
                await asyncio.gather(*waiters)
        except PulsarException:
            raise
        except TimeoutError as error:
            raise Timeout(f"an acknowledgement in a transaction has no answer within {limit_s:g} s") from error

    async def acknowledge(
        self, message: Message | MessageId | Iterable[Message | MessageId], *, txn: TransactionPort | None = None
    ) -> None:
        """Acknowledges messages: they are not delivered again. Returns at once; acknowledgements are sent in groups,
        within `ack_group_ms`.

        With `ack_receipt_enabled` or `txn` the call waits, and returns when the acknowledgement survives any crash.
        With `txn` the messages count as acknowledged when that transaction commits. The call then raises
        TransactionConflict if a message is acknowledged already, or in another transaction; TransactionEnded if the
        transaction is not open.

        Raises InvalidMessage if this consumer did not receive a message; OperationNotSupported or InvalidConfiguration
        for an id that names no partition or no message; AlreadyClosed if the consumer is closed. A call that waits also
        raises Timeout or ConnectError if a broker does not answer."""
        if txn is not None:
            await self._acknowledge_in(txn, message, cumulative=False)
        elif self.settings.ack_receipt_enabled:
            await self._acknowledge_durably(message, cumulative=False)
        else:
            self.acknowledge_soon(message)

    async def _acknowledge_durably(
        self, which: Message | MessageId | Iterable[Message | MessageId], *, cumulative: bool
    ) -> None:
        consumers: dict[PartitionConsumer, list[Message | MessageId]] = {}
        several: Iterable[Any] = which if isinstance(which, list | tuple | set | frozenset | Iterator) else (which,)
        for each in several:
            consumer = self.consumer_of(each)
            consumer.requests.raise_if_closed()
            consumers.setdefault(consumer, []).append(each)
        work = (each.requests.acknowledge(some, cumulative=cumulative) for each, some in consumers.items())
        await run_translating_errors(asyncio.gather(*work))

    async def acknowledge_cumulative(
        self, message: Message | MessageId, *, txn: TransactionPort | None = None
    ) -> None:
        """Acknowledges this message and all messages before it in its partition; waits, and takes `txn`, as
        `acknowledge` does, and raises its errors. Raises CumulativeAcknowledgementNotAllowedError for Shared and
        KeyShared, and for a consumer with `debounce`. A call that waits raises OperationNotSupported if a message in
        chunks began before this message and is not acknowledged yet."""
        self._check_cumulative()
        if txn is not None:
            await self._acknowledge_in(txn, message, cumulative=True)
        elif self.settings.ack_receipt_enabled:
            await self._acknowledge_durably(message, cumulative=True)
        else:
            self.acknowledge_cumulative_nowait(message)

    def _check_cumulative(self) -> None:
        if self.settings.debounce is not None:
            raise CumulativeAcknowledgementNotAllowedError(
                "with debounce the messages before one may not have been received yet: acknowledge single messages"
            )
        if self.settings.consumer_type not in ORDERED_CONSUMER_TYPES:
            raise CumulativeAcknowledgementNotAllowedError(
                f"a {self.settings.consumer_type!s} subscription has no order: acknowledge single messages"
            )

    def acknowledge_cumulative_nowait(self, message: Message | MessageId) -> None:
        """Acknowledges a message and all messages before it, as `acknowledge_cumulative` does, but without waiting; the
        acknowledgement is sent within `ack_group_ms`. Raises CumulativeAcknowledgementNotAllowedError and the errors of
        `acknowledge_soon`. Must be called in the event loop."""
        self._check_cumulative()
        consumer = self.consumer_of(message)
        consumer.requests.raise_if_closed()
        consumer.acknowledge_cumulative(message)

    async def negative_acknowledge(
        self, message: Message | MessageId, *, error: BaseException | None = None
    ) -> None:
        """Tells the broker that the message was not processed: the broker delivers it again after
        negative_ack_redelivery_delay_ms. With redelivery_order "key" the broker's back-off applies instead, and later
        messages of the same key come after this one. `error`: the exception with which the program failed; it is
        described in the dead letter, if the message becomes one. Raises InvalidMessage if this consumer did not receive
        the message; OperationNotSupported or InvalidConfiguration for an id that names no partition or no message;
        InvalidConfiguration if `error` is no exception. Does not wait for the broker."""
        self.negative_acknowledge_now(message, error)

    def negative_acknowledge_now(self, message: Message | MessageId, error: BaseException | None = None) -> None:
        """Acknowledges a message negatively, as `negative_acknowledge` does and with its errors, without waiting. With
        redelivery_order "key" the broker is told at once. Must be called in the event loop."""
        self.negative_acknowledge_soon(message, error)
        if self.settings.redelivery_order == "key":
            self.consumer_of(message).flush_acks()

    # ------------------------------------------------------------------------------ dead letters and retries
    @property
    def dead_letter_policy(self) -> ConsumerDeadLetterPolicy | None:
        """Returns the dead-letter policy that is in force: the policy that the program set, or the default policy of
        `enable_retry`. None: messages are redelivered until they are acknowledged."""
        return self._dead_letters.policy

    async def reconsume_later(
        self, message: Message, delay: timedelta, properties: dict[str, str] | None = None,
        *, error: BaseException | None = None,
    ) -> None:  # fmt: skip
        """Stores a copy of the message, which is delivered after `delay`, and then acknowledges the message itself. If
        the message was retried too often, the copy goes to the dead-letter topic instead. `error`: the exception with
        which the program failed; the copy, and its dead letter, describe it. `properties`: added to those of the copy.

        Raises OperationNotSupported if the consumer was opened without `enable_retry`, or the message is a dead letter
        itself; InvalidMessage if this consumer did not receive the message; InvalidConfiguration for a wrong parameter.
        If the copy cannot be stored, raises the error of its producer; the message is not acknowledged then."""
        check_parameter("message", make_instance_check(Message, optional=False), message)
        check_parameter("delay", DELAY_CHECK, delay)
        check_parameter("properties", PROPERTIES_CHECK, properties)
        topic = self.consumer_of(message).topic
        if is_dead_letter(message):
            raise OperationNotSupported("a dead letter stays where it is: acknowledge it when it is dealt with")
        check_parameter("error", EXCEPTION_CHECK, error)
        failure = self._describe(error) if error is not None else None
        await self._dead_letters.find_retry_producer(topic).reconsume_later(message, delay, properties, failure)

    def redeliver_unacknowledged_messages(self) -> None:
        """Asks the broker to deliver all unacknowledged messages again. Messages that wait in the client are dropped;
        the broker delivers them again, too. Returns without waiting for the broker, as in Pulsar."""
        for consumer in self.partitions:
            consumer.redeliver_unacknowledged()

    def start_again(self) -> None:
        """Asks the broker to deliver all unacknowledged messages again, in order. Messages that wait in the client are
        dropped first, because the broker delivers them again, too. Does not wait for the broker."""
        for consumer in self.partitions:
            consumer.redeliver_in_order()

    # ------------------------------------------------------------------------------ the subscription
    async def seek(self, messageid: MessageId | int) -> None:
        """Moves the subscription to a message id, MessageId.earliest, MessageId.latest, or a time in ms since the
        epoch. The time is that at which a broker stored the message, not `publish_timestamp()`, which is the producer's
        clock. The id of a message moves only its partition; raises InvalidMessage if the consumer does not read that
        partition, OperationNotSupported if the id does not name it. Returns when the brokers have moved the
        subscription. Raises InvalidConfiguration for another argument; Timeout or ConnectError if a broker does not
        answer; AlreadyClosed if the consumer is closed."""
        await self._partitions.seek(messageid)

    async def seek_index(self, index: int, *, partition: int | str | None = None) -> None:
        """Moves the subscription in one partition to the message with this index, or to the first message after it that
        is kept. `partition`: its number, or the full name of its topic; needed if the consumer has several. Returns
        when the broker has moved the subscription. Raises InvalidConfiguration if the consumer has no such partition,
        or `index` is negative; InvalidTopicName if `partition` is no name of a topic; Timeout or ConnectError if the
        broker does not answer; AlreadyClosed if the consumer is closed."""
        check_parameter("index", INDEX_CHECK, index)
        check_parameter("partition", PARTITION_CHECK, partition)
        await run_translating_errors(self._partitions.find_partition(partition).requests.seek(SeekIndex(index)))

    async def commit(self, index: int, note: bytes | None = None, *, partition: int | str | None = None) -> None:
        """Acknowledges every message of a partition whose index is less than `index`; returns when this survives a
        crash. After message `m` was processed, and all before it: `commit(m.index() + 1)`. Never moves the subscription
        back. An index inside a chunked message counts as that of its first chunk.

        `note`: up to 1024 bytes, stored in the same write; `progress` returns them until the next commit replaces them,
        or a seek removes them. `partition`: as for `seek_index`.

        Raises InvalidConfiguration for an index after the end of the topic, or another wrong parameter;
        CumulativeAcknowledgementNotAllowedError for Shared, KeyShared and `debounce`; NotAllowedError for a Failover
        consumer that is not active, and for a note of a subscription that is not durable; ConnectError if the
        subscription is moved during the commit; Timeout or ConnectError if the broker does not answer; AlreadyClosed
        if the consumer is closed; OperationNotSupported if the broker is too old."""
        check_parameter("index", INDEX_CHECK, index)
        check_parameter("note", COMMIT_NOTE_CHECK, note)
        check_parameter("partition", PARTITION_CHECK, partition)
        self._check_cumulative()
        await run_translating_errors(self._partitions.find_partition(partition).requests.commit(index, note or b""))

    async def progress(self) -> dict[str, PartitionProgress]:
        """Asks the brokers for the position of the subscription in each partition, and returns it by the full name of
        the partition. What this consumer acknowledged before counts, though it may not survive a crash yet. Raises
        Timeout or ConnectError if a broker does not answer, AlreadyClosed if the consumer is closed,
        OperationNotSupported if a broker is too old. Returns an empty dict if the consumer reads no partition now."""
        partitions = list(self.partitions)
        for each in partitions:
            each.send_waiting_acks()
        found = await run_translating_errors(asyncio.gather(*(each.requests.progress() for each in partitions)))
        return {
            each.topic.full: PartitionProgress(
                one.earliest_index, one.position, one.end_index, one.note, one.incarnation
            ) for each, one in zip(partitions, found, strict=True)
        }  # fmt: skip

    async def position(self) -> dict[str, int]:
        """Asks the brokers, and returns for each partition, by its full name, the index of the first message that is
        not acknowledged. Raises the errors of `progress`."""
        return {topic: each.position for topic, each in (await self.progress()).items()}

    async def end(self) -> dict[str, int]:
        """Asks the brokers, and returns for each partition, by its full name, the index that follows that of the newest
        message that the subscription may get. Raises the errors of `progress`."""
        return {topic: each.end for topic, each in (await self.progress()).items()}

    async def lag(self) -> dict[str, int]:
        """Asks the brokers, and returns for each partition, by its full name, how many messages follow the first
        unacknowledged one, itself included; 0 if all are acknowledged. Those that are acknowledged out of order count,
        too. Raises the errors of `progress`."""
        return {topic: each.lag for topic, each in (await self.progress()).items()}

    async def assign(self, partitions: Iterable[int]) -> None:
        """Reads these partitions of the topic from now on, and no others. First leaves the other partitions: their
        acknowledgements are sent, and their messages that wait in the client are dropped.

        Only for an Exclusive or Failover consumer of one topic, without `enable_retry`; raises OperationNotSupported
        for others, and InvalidConfiguration if the topic has no such partition. On Exclusive a partition has one
        consumer. If another consumer still has a partition of `partitions`, raises ConsumerBusy, takes no new
        partition, and keeps those that this consumer has; call `assign` again when the other has left. So no two
        consumers commit for one partition at the same time. Raises InvalidConfiguration if `partitions` is no list of
        numbers; Timeout or ConnectError if a broker does not answer."""
        wanted = check_partitions(partitions)
        if (
            self.settings.consumer_type not in ORDERED_CONSUMER_TYPES
            or self._single_topic is None
            or self.settings.enable_retry
        ):
            raise OperationNotSupported("partitions are assigned to an Exclusive or Failover consumer of one topic")
        async with self._assigning:
            self._partitions.stop_watching()
            self._assigned = wanted
            leaving = [each for each in self.partitions if each.topic.partition not in wanted]
            for each in leaving:
                each.discard_messages()
                self._partitions.remove(each)
                each.was_of = self
            await close_all_parts(leaving)
            await run_translating_errors(self._take(self._single_topic, wanted))

    async def _take(self, topic: TopicName, wanted: Sequence[int]) -> None:
        count = await self.connections.fetch_partition_count(topic)
        if wanted and wanted[-1] >= count:
            raise WrongValue(f"{topic} has the partitions 0 … {count - 1}, and not {wanted[-1]}" if count else
                             f"{topic} has no partitions to assign")  # fmt: skip
        missing = self._partitions.find_missing_topics([topic.with_partition(each) for each in wanted])
        await self._partitions.add_partitions(
            [self._consumer(name, self.settings, ReceiverQueue(), len(missing)) for name in missing]
        )

    async def get_last_message_id(self) -> MessageId:
        """Asks the broker, and returns the id of the topic's last message that the subscription can receive; if there
        is none, its ledger id and entry id are -1. Raises OperationNotSupported unless the consumer reads exactly one
        partition; Timeout or ConnectError if the broker does not answer; AlreadyClosed if the consumer is closed."""
        if len(self.partitions) != 1:
            raise OperationNotSupported("several partitions have no last message; ask each of them")
        reply = await run_translating_errors(self.partitions[0].requests.last_message_id())
        found = MessageId.from_wire(reply.id)
        return MessageId(
            self.partitions[0].topic.partition, found.ledger_id(), found.entry_id(), found.batch_index(),
            0, self.partitions[0].topic.full,
        )  # fmt: skip

    async def unsubscribe(self) -> None:
        """Deletes the subscription and closes the consumer. Raises NotAllowedError if the subscription has other
        consumers; Timeout or ConnectError if a broker does not answer; AlreadyClosed if the consumer is closed. If it
        raises, the consumer stays open, and the subscription may be deleted at some of the partitions."""
        await run_translating_errors(asyncio.gather(*(each.requests.unsubscribe() for each in self.partitions)))
        await self.close()

    def abort(self) -> None:
        """Ends the consumer at once; acknowledgements that wait are not sent."""
        if self.listening is not None:
            self.listening.abort()
        if self._watch is not None:
            self._watch.stop()
        self._dead_letters.abort()
        self._partitions.abort()

    async def close(self) -> None:
        """Stops the listener, if there is one, sends the acknowledgements that wait, and closes the consumer. Returns
        when the brokers have answered, or after the operation time-out; errors of the brokers are logged, not raised.
        If the call is cancelled, ends the consumer at once. May be called again."""
        self._closed = True
        try:
            if self.listening is not None:
                await self.listening.stop()
            if self._watch is not None:
                await self._watch.close()
            await self._dead_letters.close()
            await self._partitions.close()
        except BaseException:
            self.abort()
            raise

    def check(self) -> None:
        """Raises AssertionError if an invariant of a partition's core is broken."""
        for consumer in self.partitions:
            consumer.core.check()
