"""The consumer of one topic or several: one PartitionConsumer per partition, one inbox (asyncio face).

    async with await client.subscribe("flights", "board") as consumer:
        async for message in consumer:
            …
            await consumer.acknowledge(message)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

from ..proto.errors import MagnetarError, TopicNotFound
from ..proto.names import TopicName, check_subscription_name
from .connections import Connections
from .errors import (
    AlreadyClosed,
    CumulativeAcknowledgementNotAllowedError,
    InvalidConfiguration,
    InvalidMessage,
    OperationNotSupported,
    PulsarException,
    Timeout,
)
from .events import ActiveEvents
from .growth import Growth
from .inbox import Inbox
from .letters import Letters, policy_of, retry_topic
from .message import Message
from .message_id import MessageId
from .partition_consumer import PartitionConsumer
from .settings import ConsumerDeadLetterPolicy, ConsumerSettings, ConsumerType, InitialPosition
from .state import State
from .topic_watch import Changed

_LOG = logging.getLogger("magnetar.client")


@dataclass(frozen=True, slots=True)
class ConsumerBatchReceivePolicy:
    """`batch_receive` returns when one of these is reached; -1: no such limit."""

    max_num_message: int = -1
    max_num_bytes: int = 10 << 20
    timeout_ms: int = 100

    def __post_init__(self) -> None:
        if self.max_num_message <= 0 and self.max_num_bytes <= 0 and self.timeout_ms <= 0:
            raise InvalidConfiguration("a batch receive policy needs at least one limit above 0")

    def reached(self, messages: int, size: int) -> bool:
        return (0 < self.max_num_message <= messages) or (0 < self.max_num_bytes <= size)


class Watch(Protocol):
    """Who tells of topics that come and go (client/topic_watch.py)."""

    @property
    def title(self) -> str: ...
    def follow(self, changed: Changed) -> None: ...
    def left(self, topic: TopicName) -> None: ...
    def stop(self) -> None: ...
    async def close(self) -> None: ...


class Consumer:
    def __init__(
        self, name: str, subscription: str, settings: ConsumerSettings, policy: ConsumerBatchReceivePolicy,
        lanes: list[PartitionConsumer], inbox: Inbox,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.policy = policy
        self.lanes = lanes
        self.inbox = inbox
        self._name = name
        self._subscription = subscription
        self._by_topic = {lane.topic.full: lane for lane in lanes}
        self._closed = False
        self._growth: Growth | None = None
        self._watch: Watch | None = None
        self._connections: Connections | None = None
        self._events: ActiveEvents | None = None
        self._left: WeakSet[PartitionConsumer] = WeakSet()  # of topics that were deleted
        self._letters: dict[TopicName, Letters] = {}  # by topic, its retry-letter topic too

    @classmethod
    async def open(
        cls, connections: Connections, topics: Sequence[TopicName], subscription: str, settings: ConsumerSettings,
        policy: ConsumerBatchReceivePolicy | None = None, watch: Watch | None = None,
    ) -> Consumer:  # fmt: skip
        """Subscribes to all partitions of all topics; to none when one refuses. `watch` tells of topics to come."""
        check_subscription_name(subscription)
        policy_of(settings)
        settings = replace(settings, many_topics=len(topics) > 1 or watch is not None)
        if settings.enable_retry:
            topics = [*topics, *(retry_topic(topic, subscription, settings) for topic in topics)]
        events = ActiveEvents(settings.consumer_event_listener) if settings.consumer_event_listener else None
        counts = await asyncio.gather(*(connections.partitions(topic) for topic in topics))
        names: list[TopicName] = []
        for topic, partitions in zip(topics, counts, strict=True):
            names += [topic.with_partition(i) for i in range(partitions)] or [topic]
        inbox = Inbox()
        queue_size = share_of(settings, len(names))
        if watch is not None:
            settings = replace(settings, existing_only=True)  # a topic that was deleted is not to come back by us
        lanes = [
            PartitionConsumer(connections, name, subscription, settings, inbox, queue_size=queue_size)
            for name in names
        ]
        title = watch.title if watch is not None else ",".join(topic.full for topic in topics)
        consumer = cls(title, subscription, settings, policy or ConsumerBatchReceivePolicy(), lanes, inbox)
        consumer._connections, consumer._events = connections, events
        consumer._write_letters(connections, topics)
        for lane in lanes:
            consumer._prepare(lane)
        await open_lanes(lanes)
        if events is not None:
            events.attach(consumer)
        consumer._growth = Growth(connections, dict(zip(topics, counts, strict=True)), consumer._grown)
        if watch is not None:
            consumer._watch = watch
            watch.follow(consumer.change_topics)
        return consumer

    def _prepare(self, lane: PartitionConsumer) -> None:
        lane.on_active = self._events.tell if self._events is not None else None
        if self.settings.existing_only:
            lane.on_gone = self._gone

    # ------------------------------------------------------------------------------ topics and partitions
    def _new_lanes(self, names: Sequence[TopicName]) -> list[PartitionConsumer]:
        """From their beginning: the subscription is older than they are."""
        settings = replace(self.settings, initial_position=InitialPosition.Earliest)
        share = share_of(settings, len(self.lanes) + len(names))
        assert self._connections is not None, "an opened consumer has connections"
        lanes = [
            PartitionConsumer(
                self._connections, name, self._subscription, settings, Inbox(), queue_size=share,
                letters=self._letters.get(name.base),
            )
            for name in names
        ]  # fmt: skip
        for lane in lanes:
            self._prepare(lane)
        return lanes

    async def _grown(self, topic: TopicName, found: int) -> None:
        added = [name for name in (topic.with_partition(i) for i in range(found)) if name.full not in self._by_topic]
        await self.grow(self._new_lanes(added))

    async def change_topics(self, added: Sequence[TopicName], removed: Sequence[TopicName]) -> list[TopicName]:
        """Topics came and went; those that could not be subscribed to."""
        for lane in [lane for lane in self.lanes if lane.topic.base in removed]:
            lane.retire()
            self._gone(lane)
            lane.abort()
        failed: list[TopicName] = []
        for topic in added:
            try:
                await self._add_topic(topic)
            except (MagnetarError, PulsarException) as error:
                _LOG.warning("%s: topic %s is subscribed to later: %s", self._name, topic, error)
                failed.append(topic)
        return failed

    async def _add_topic(self, topic: TopicName) -> None:
        assert self._connections is not None
        try:
            partitions = await self._connections.partitions(topic, create=False)
        except TopicNotFound:
            return  # gone again; the watch tells when it comes back
        self._write_letters(self._connections, [topic])
        names = [topic.with_partition(i) for i in range(partitions)] or [topic]
        await self.grow(self._new_lanes([name for name in names if name.full not in self._by_topic]))
        if self._growth is not None:
            self._growth.follow(topic, partitions)

    def _gone(self, lane: PartitionConsumer) -> None:
        """Its topic was deleted."""
        if self._by_topic.pop(lane.topic.full, None) is not None:
            self.lanes.remove(lane)
            self._left.add(lane)
            self._share()
            if self._growth is not None:
                self._growth.forget(lane.topic.base)
            if self._watch is not None:
                self._watch.left(lane.topic.base)

    def _share(self) -> None:
        """What may wait here, of all partitions together, is shared out again."""
        share = share_of(self.settings, len(self.lanes))
        for lane in self.lanes:
            lane.resize(share)

    async def grow(self, new: list[PartitionConsumer]) -> None:
        """Partitions were added: what they got before they were found is received too.

        Until all are open each has an inbox of its own: nobody takes a message of a lane that is not ours yet, and one
        that cannot be opened ends only its own.
        """
        try:
            await open_lanes(new)
        except BaseException:
            for lane in new:
                lane.abort()
            raise
        self.lanes.extend(new)
        self._by_topic.update({lane.topic.full: lane for lane in new})
        self._share()
        for lane in new:
            lane.deliver_to(self.inbox)

    # ------------------------------------------------------------------------------ facts
    def topic(self) -> str:
        return self._name

    @property
    def watches(self) -> bool:
        """New topics may come."""
        return self._watch is not None and not self._closed

    def subscription_name(self) -> str:
        return self._subscription

    def consumer_name(self) -> str:
        return self.lanes[0].name if self.lanes else self.settings.consumer_name or ""

    def is_connected(self) -> bool:
        return all(lane.state is State.CONNECTED for lane in self.lanes)

    def statistics(self) -> dict[str, int]:
        return {
            "partitions": len(self.lanes),
            "waiting_messages": len(self.inbox),
            "delivered_messages": sum(lane.delivered for lane in self.lanes),
        }

    # ------------------------------------------------------------------------------ receiving
    async def receive(self, timeout_millis: int | None = None) -> Message:
        """The next message. Raises Timeout when none came in time."""
        message = self.inbox.take_nowait()
        if message is None:
            message = await self.inbox.take(check_timeout(timeout_millis))
        return message

    async def batch_receive(self) -> list[Message]:
        """As many as the policy allows; empty when its time is over and nothing came."""
        return await receive_batch(self.inbox, self.policy)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                yield await self.receive()
            except AlreadyClosed:
                if self._closed:
                    return
                raise

    # ------------------------------------------------------------------------------ acknowledging
    def lane_of(self, which: Message | MessageId) -> PartitionConsumer:
        if isinstance(which, Message):
            lane = which.entry.lane
            if self.lanes and lane is self.lanes[0]:
                return self.lanes[0]
            mine = self._by_topic.get(lane.topic.full)
            if mine is lane:
                return mine
            for left in self._left:
                if left is lane:
                    return left
            raise InvalidMessage("the message was not received by this consumer")
        if not isinstance(which, MessageId):
            raise InvalidMessage(f"a Message or a MessageId is acknowledged, not {type(which).__name__}")
        if len(self.lanes) == 1:
            return self.lanes[0]
        found = self._by_topic.get(which.topic_name())
        if found is None:
            of_partition = [lane for lane in self.lanes if lane.topic.partition == which.partition()]
            if len(of_partition) != 1:
                raise InvalidMessage(f"{which!r} does not say of which topic it is: deserialize it with topic=…")
            found = of_partition[0]
        return found

    def acknowledge_soon(self, which: Message | MessageId | Iterable[Message | MessageId]) -> None:
        """From any thread; sent within 100 ms."""
        if type(which) is Message or not isinstance(which, list | tuple | set | frozenset | Iterator):
            lane = self.lane_of(which)  # type: ignore[arg-type]
            if lane in self._left:
                return  # there is nothing left to acknowledge
            lane.raise_if_closed()
            lane.acknowledge(which)  # type: ignore[arg-type]
        else:
            for each in which:
                self.acknowledge_soon(each)

    def negative_acknowledge_soon(self, which: Message | MessageId) -> None:
        self.lane_of(which).negative_acknowledge(which)

    async def acknowledge(self, message: Message | MessageId | Iterable[Message | MessageId]) -> None:
        """Returns at once; acks are grouped and sent within 100 ms. With receipts: when it survives any crash."""
        if self.settings.ack_receipt_enabled:
            await self._acknowledge_durably(message, cumulative=False)
        else:
            self.acknowledge_soon(message)

    async def _acknowledge_durably(
        self, which: Message | MessageId | Iterable[Message | MessageId], *, cumulative: bool
    ) -> None:
        lanes: dict[PartitionConsumer, list[Message | MessageId]] = {}
        every: Iterable[Message | MessageId] = [which] if isinstance(which, Message | MessageId) else which
        for each in every:
            lane = self.lane_of(each)
            lane.raise_if_closed()
            lanes.setdefault(lane, []).append(each)
        await asyncio.gather(*(lane.acknowledge_durably(some, cumulative=cumulative) for lane, some in lanes.items()))

    async def acknowledge_cumulative(self, message: Message | MessageId) -> None:
        """This message and all before it of its partition."""
        self._check_cumulative()
        if self.settings.ack_receipt_enabled:
            await self._acknowledge_durably(message, cumulative=True)
        else:
            self.acknowledge_cumulative_nowait(message)

    def _check_cumulative(self) -> None:
        if self.settings.consumer_type in (ConsumerType.Shared, ConsumerType.KeyShared):
            raise CumulativeAcknowledgementNotAllowedError(
                f"a {self.settings.consumer_type.name} subscription has no order: acknowledge single messages"
            )

    def acknowledge_cumulative_nowait(self, message: Message | MessageId) -> None:
        self._check_cumulative()
        lane = self.lane_of(message)
        lane.raise_if_closed()
        lane.acknowledge_cumulative(message)

    async def negative_acknowledge(self, message: Message | MessageId) -> None:
        """To be delivered again after negative_ack_redelivery_delay_ms."""
        self.negative_acknowledge_soon(message)

    # ------------------------------------------------------------------------------ dead letters and retries
    def _write_letters(self, connections: Connections, topics: Sequence[TopicName]) -> None:
        policy = policy_of(self.settings)
        if policy is None:
            return
        originals = topics[: len(topics) // 2] if self.settings.enable_retry else topics
        for topic in originals:
            letters = Letters(connections, topic, self._subscription, policy, self.consumer_name)
            self._letters[topic] = self._letters[letters.retry_letter_topic] = letters
        for lane in self.lanes:
            lane.letters = self._letters[lane.topic.base]

    @property
    def dead_letter_policy(self) -> ConsumerDeadLetterPolicy | None:
        """What applies, a default too; None: messages come until they are acknowledged."""
        return policy_of(self.settings)

    async def reconsume_later(
        self, message: Message, delay: timedelta, properties: dict[str, str] | None = None
    ) -> None:
        """Acknowledges it, when a copy that is delivered after the delay is stored. Needs `enable_retry`."""
        letters = self.lane_of(message).letters
        if letters is None or not self.settings.enable_retry:
            raise OperationNotSupported("reconsume_later needs a consumer with enable_retry=True")
        await letters.reconsume_later(message, delay, properties)

    async def redeliver_unacknowledged_messages(self) -> None:
        for lane in self.lanes:
            lane.redeliver_unacknowledged()

    # ------------------------------------------------------------------------------ the subscription
    async def seek(self, messageid: MessageId | int) -> None:
        """To a message id, MessageId.earliest, .latest, or a publish time in ms since the epoch."""
        if isinstance(messageid, MessageId):
            if len(self.lanes) == 1 or messageid in (MessageId.earliest, MessageId.latest):
                await asyncio.gather(*(lane.seek(messageid) for lane in self.lanes))
            else:
                await self.lane_of(messageid).seek(messageid)
        elif isinstance(messageid, int) and not isinstance(messageid, bool):
            await asyncio.gather(*(lane.seek(messageid) for lane in self.lanes))
        else:
            raise InvalidConfiguration(f"seek takes a MessageId or ms since the epoch, not {messageid!r}")

    async def get_last_message_id(self) -> MessageId:
        if len(self.lanes) != 1:
            raise OperationNotSupported("several partitions have no last message; ask each of them")
        found = MessageId.from_wire((await self.lanes[0].last_message_id()).id)
        return MessageId(
            self.lanes[0].topic.partition, found.ledger_id(), found.entry_id(), found.batch_index(),
            0, self.lanes[0].topic.full,
        )  # fmt: skip

    async def unsubscribe(self) -> None:
        """Deletes the subscription and closes the consumer."""
        await asyncio.gather(*(lane.unsubscribe() for lane in self.lanes))
        await self.close()

    def abort(self) -> None:
        """Ends at once: acks that wait are not sent."""
        if self._watch is not None:
            self._watch.stop()
        if self._growth is not None:
            self._growth.stop()
        for letters in self._letters.values():
            letters.abort()
        for lane in self.lanes:
            lane.abort()

    async def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            await self._watch.close()
        if self._growth is not None:
            await self._growth.close()
        await asyncio.gather(*(letters.close() for letters in dict.fromkeys(self._letters.values())))
        await asyncio.gather(*(lane.close() for lane in self.lanes))

    async def __aenter__(self) -> Consumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def check(self) -> None:
        for lane in self.lanes:
            lane.check()


def share_of(settings: ConsumerSettings, lanes: int) -> int:
    """Messages that may wait of one partition: its queue, or its share of what all may hold together."""
    total = settings.max_total_receiver_queue_size_across_partitions
    return max(1, min(settings.receiver_queue_size, total // max(1, lanes)))


async def open_lanes(lanes: Sequence[PartitionConsumer]) -> None:
    outcomes = await asyncio.gather(*(lane.open() for lane in lanes), return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        await asyncio.gather(*(lane.close() for lane in lanes))
        raise errors[0]


def check_timeout(timeout_millis: int | None) -> float | None:
    if timeout_millis is None:
        return None
    if isinstance(timeout_millis, bool) or not isinstance(timeout_millis, int) or timeout_millis < 0:
        raise InvalidConfiguration(f"timeout_millis is a whole number of at least 0, not {timeout_millis!r}")
    return timeout_millis / 1000


async def receive_batch(inbox: Inbox, policy: ConsumerBatchReceivePolicy) -> list[Message]:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + policy.timeout_ms / 1000 if policy.timeout_ms > 0 else None
    messages: list[Message] = []
    size = 0
    while not policy.reached(len(messages), size):
        message = inbox.take_nowait()
        if message is None:
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                break
            try:
                message = await inbox.take(left)
            except Timeout:
                break
        messages.append(message)
        size += len(message.payload)
    return messages
