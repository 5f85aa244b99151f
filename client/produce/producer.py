"""The producer of a topic: routing over one PartitionProducer per partition (asyncio face).

    async with await client.create_producer("flights") as producer:
        await producer.send(b"…")                       # one message, its MessageId
        producer.send_nowait(b"…", callback)            # callback(Result, MessageId)
        await producer.send_many([b"…", b"…"])          # ids in order, one await
        await producer.flush()
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

from ...proto.names import TopicName
from ..common.checks import (
    INT64_MAX,
    WrongMessageType,
    WrongMessageValue,
    WrongValue,
    are_plain,
    check_message,
    is_plain_key,
    shown,
)
from ..common.errors import (
    AlreadyClosed,
    InvalidMessage,
    OperationNotSupported,
    ProducerQueueIsFull,
    PulsarException,
    Result,
    exception_of,
)
from ..connect.connections import Connections
from ..connect.partitions_watcher import PartitionsWatcher
from ..core.batcher import Callback, OutgoingMessage
from ..core.router import PartitionsRoutingMode, Router
from ..core.state import State
from ..model.message_id import MessageId
from ..model.schema import BytesSchema, Schema
from ..model.settings import ProducerAccessMode, ProducerSettings
from .partition_producer import PartitionProducer


class MessageDraft:
    """What a `message_router` is shown: the message before it is sent."""

    def __init__(self, message: OutgoingMessage, schema: Schema) -> None:
        self._message = message
        self._schema = schema

    def value(self) -> Any:
        """As a consumer with the producer's schema would get it; None for a message without a value."""
        return None if self._message.null_value else self._schema.decode(self._message.payload)

    def data(self) -> bytes:
        return self._message.payload

    def partition_key(self) -> str:
        return self._message.partition_key or ""

    def ordering_key(self) -> str:
        return (self._message.ordering_key or b"").decode("utf-8", "replace")

    def properties(self) -> dict[str, str]:
        return dict(self._message.properties)

    def event_timestamp(self) -> int:
        return self._message.event_time


class Extras(NamedTuple):
    """What `send` may say of a message beyond its content, in the order of its parameters."""

    properties: dict[str, str] | None = None
    partition_key: str | None = None
    ordering_key: str | None = None
    sequence_id: int | None = None
    replication_clusters: list[str] | None = None
    disable_replication: bool | None = False
    event_timestamp: int | None = None  # ms since the epoch
    deliver_at: int | None = None  # ms since the epoch
    deliver_after: timedelta | None = None
    key_bytes: bytes | None = None


NO_EXTRAS = Extras()
DELAY_DEFAULT_MS = ProducerSettings().batching_max_publish_delay_ms
"""With a longer delay than this, `send` waits for other messages to batch with, as in pulsar.asyncio."""


class Producer:
    """Publishes messages to one topic, for asyncio. `Client.create_producer` opens it; `close` ends it.

        async with await client.create_producer("flights") as producer:
            message_id = await producer.send(b"UA 1545", partition_key="UA")
            ids = await producer.send_many([b"DL 202", b"AA 7"])

    The content is `bytes`, or a value of the producer's schema; None publishes a message without a value, which deletes
    its key in a compacted topic. Times are in ms since the epoch; `deliver_after` is a timedelta. The order of messages
    is kept per partition; messages with one key have one partition.

    It belongs to the event loop that opened it; `enqueue` is safe from any thread. Errors: ProducerQueueIsFull at
    `max_pending_messages` (with `block_if_queue_full` the call waits), MessageTooBig, InvalidMessage for a wrong value,
    Timeout after `send_timeout_millis` (the outcome is unknown), ProducerFenced, TopicTerminated, AlreadyClosed.
    """

    def __init__(
        self, topic: TopicName, settings: ProducerSettings, lanes: list[PartitionProducer], router: Router | None,
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        self.settings = settings
        self.lanes = lanes
        self._topic = topic
        self._router = router
        self._now = now
        self._plain = isinstance(settings.schema, BytesSchema)
        self._gathers = settings.batching_enabled and settings.batching_max_publish_delay_ms > DELAY_DEFAULT_MS
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._growth: PartitionsWatcher | None = None

    @classmethod
    async def open(cls, connections: Connections, topic: TopicName, settings: ProducerSettings) -> Producer:
        """Opens all partitions; none stays open when one cannot be."""
        partitions = await connections.partitions(topic)
        names = [topic.with_partition(i) for i in range(partitions)] or [topic]
        pending = min(
            settings.max_pending_messages, max(1, settings.max_pending_messages_across_partitions // len(names))
        )
        lanes = [PartitionProducer(connections, name, settings, pending) for name in names]
        try:
            await lanes[0].open()
            for lane in lanes[1:]:
                lane.name = lanes[0].name  # the broker named it; all partitions carry one name
            await _open(lanes[1:], settings)
        except BaseException:
            await asyncio.gather(*(lane.close() for lane in lanes), return_exceptions=True)
            raise
        window_s = settings.batching_max_publish_delay_ms / 1000 if settings.batching_enabled else 0.0
        router = None
        if partitions:
            router = Router(
                partitions,
                PartitionsRoutingMode(settings.message_routing_mode),
                connections.world.rng,
                window_s=window_s,
                messages_max=settings.batching_max_messages,
                bytes_max=settings.batching_max_allowed_size_in_bytes,
            )
        producer = cls(topic, settings, lanes, router, connections.world.clock.monotonic)

        async def grow(topic: TopicName, found: int) -> None:
            numbers = range(len(lanes), found)
            new = [PartitionProducer(connections, topic.with_partition(i), settings, pending) for i in numbers]
            await producer.grow(new)

        producer._growth = PartitionsWatcher(connections, {topic: partitions}, grow)
        return producer

    async def grow(self, new: list[PartitionProducer]) -> None:
        """Adds new partitions: keys are routed by the new number. None is used when one cannot be opened."""
        assert self._router is not None, "only a partitioned topic grows"
        for lane in new:
            lane.name = self.lanes[0].name
        try:
            await _open(new, self.settings)
        except BaseException:
            await asyncio.gather(*(lane.close() for lane in new), return_exceptions=True)
            raise
        self.lanes.extend(new)  # before the router, which other threads ask, can name them
        self._router.grow(len(self.lanes))

    # ------------------------------------------------------------------------------ facts
    def topic(self) -> str:
        """Full name of the topic."""
        return self._topic.full

    def producer_name(self) -> str:
        """The name, given by the program or by the broker."""
        return self.lanes[0].name

    def last_sequence_id(self) -> int:
        """The highest acknowledged sequence id; -1: none."""
        return max(lane.last_sequence_id for lane in self.lanes)

    def is_connected(self) -> bool:
        """Whether every partition that was opened is connected."""
        return all(lane.state is State.CONNECTED for lane in self.lanes if not lane.waits_for_messages)

    def title(self) -> str:
        return f"producer {self.producer_name()} of {self.topic()}"

    def statistics(self) -> dict[str, int]:
        stored = sum(lane.stored for lane in self.lanes)
        pending = sum(lane.pending for lane in self.lanes)
        return {"stored_messages": stored, "pending_messages": pending, "partitions": len(self.lanes)}

    # ------------------------------------------------------------------------------ sending
    def lane_for(self, message: OutgoingMessage) -> PartitionProducer:
        if self._router is None:
            return self.lanes[0]
        if self.settings.message_router is not None:
            number = self.settings.message_router(
                MessageDraft(message, self.settings.schema), self._router.partitions
            )
            if not isinstance(number, int) or not 0 <= number < len(self.lanes):
                raise WrongValue(f"message_router chose partition {shown(number)} of {len(self.lanes)}")
            return self.lanes[number]
        key = message.partition_key if message.partition_key is not None else message.ordering_key
        return self.lanes[self._router.route(key, len(message.payload), self._now())]

    def plain_lane(self) -> PartitionProducer | None:
        """The one partition that takes plain payloads unchanged; None: the message must be routed or encoded."""
        return self.lanes[0] if self._router is None and self._plain else None

    def enqueue(self, content: Any, callback: Callback, extras: Extras = NO_EXTRAS) -> PartitionProducer:
        """Adds a message, as `send_nowait`, with all options in one value. Safe from any thread.

        `callback(Result, MessageId)` is called in the event loop. Raises ProducerQueueIsFull, MessageTooBig,
        AlreadyClosed.
        """
        if self._router is None and self._plain and type(content) is bytes and extras == NO_EXTRAS:
            lane = self.lanes[0]
            lane.add(content, callback)
            return lane
        message = self.message(content, extras)
        lane = self.lane_for(message)
        lane.add_message(message, callback)
        return lane

    def message(self, content: Any, extras: Extras = NO_EXTRAS) -> OutgoingMessage:
        if extras != NO_EXTRAS:
            _check_extras(extras)
        deliver_at = extras.deliver_at
        if extras.deliver_after is not None:
            deliver_at = self.lanes[0].wall_ms() + round(extras.deliver_after.total_seconds() * 1000)
        return OutgoingMessage(
            payload=b"" if content is None else self._encoded(content),
            properties=dict(extras.properties or {}),
            partition_key=extras.partition_key if extras.key_bytes is None else b64encode(extras.key_bytes).decode(),
            key_is_base64=extras.key_bytes is not None,
            ordering_key=None if extras.ordering_key is None else extras.ordering_key.encode(),
            event_time=extras.event_timestamp or 0,
            sequence_id=extras.sequence_id,
            deliver_at=deliver_at,
            null_value=content is None,
        )

    def _encoded(self, content: Any) -> bytes:
        """Encodes by the schema. Its errors are the caller's, and nothing is sent. The result is bytes."""
        try:
            payload = self.settings.schema.encode(content)
        except InvalidMessage as error:
            if isinstance(error, TypeError | ValueError):
                raise
            raise WrongMessageType(error.message) from error
        except Exception as error:
            kind = WrongMessageType if isinstance(error, TypeError) else WrongMessageValue
            raise kind(f"{shown(content)} cannot be encoded as {self.settings.schema}: {error}") from error
        if type(payload) is not bytes:
            raise WrongMessageType(f"{self.settings.schema} made {type(payload).__name__} of a value, not bytes")
        return payload

    def send_nowait(
        self,
        content: Any,
        callback: Callback | None = None,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = False,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        *,
        key_bytes: bytes | None = None,
    ) -> None:
        """`callback(Result, MessageId)` is called in the event loop. Raises ProducerQueueIsFull at the limit.

        `key_bytes` replaces `partition_key` for a key that is not text; it is stored as base64 and marked so.
        """
        if callback is not None and not callable(callback):
            check_message({"callback": callback})
        extras = Extras(
            properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication,
            event_timestamp, deliver_at, deliver_after, key_bytes,
        )  # fmt: skip
        self.enqueue(content, callback, extras)

    async def send(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
    ) -> MessageId:
        """Waits until the message is durable and returns its id; raises the exception of its Result.

        It is sent at once. With a longer batching_max_publish_delay_ms than the default it waits for a full batch, or
        for that delay.
        """
        outcome: asyncio.Future[tuple[Result, MessageId]] = self._loop.create_future()

        def done(result: Result, message_id: MessageId) -> None:
            if not outcome.done():
                outcome.set_result((result, message_id))

        extras = Extras(
            properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication or False,
            event_timestamp, deliver_at, deliver_after,
        )  # fmt: skip
        lane = await self._enqueue_waiting(content, done, extras)
        if not self._gathers:
            lane.flush_soon()
        result, message_id = await outcome
        if result is not Result.Ok:
            raise lane.exception(result)
        return message_id

    async def send_many(
        self,
        contents: Iterable[Any],
        *,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
    ) -> list[MessageId]:
        """Sends all and returns their ids in the order of `contents`.

        When every message has an outcome and one failed, raises the exception of the first failure.
        """
        extras = Extras(
            properties, partition_key, ordering_key,
            event_timestamp=event_timestamp, deliver_at=deliver_at, deliver_after=deliver_after,
        )  # fmt: skip
        ids: list[MessageId | None] = []
        failures: list[Result] = []
        finished: asyncio.Future[None] = self._loop.create_future()
        left, complete = 0, False

        def callback_for(index: int) -> Callable[[Result, MessageId], None]:
            def done(result: Result, message_id: MessageId) -> None:
                nonlocal left
                ids[index] = message_id
                if result is not Result.Ok:
                    failures.append(result)
                left -= 1
                if complete and left == 0 and not finished.done():
                    finished.set_result(None)

            return done

        for content in contents:
            ids.append(None)
            left += 1
            try:
                await self._enqueue_waiting(content, callback_for(len(ids) - 1), extras)
            except PulsarException:
                left -= 1
                raise
        complete = True
        if left:
            for lane in self.lanes:
                lane.flush_soon()
            await finished
        if failures:
            why = next((lane.why for lane in self.lanes if lane.why), failures[0].name)
            raise exception_of(failures[0], f"{len(failures)} of {len(ids)} messages: {why}")
        return [each for each in ids if each is not None]

    async def _enqueue_waiting(self, content: Any, callback: Callback, extras: Extras) -> PartitionProducer:
        """With block_if_queue_full, waits for room instead of raising ProducerQueueIsFull."""
        while True:
            try:
                return self.enqueue(content, callback, extras)
            except ProducerQueueIsFull:
                if not self.settings.block_if_queue_full:
                    raise
            for lane in self.lanes:
                if lane.full and lane.error is None:
                    room: asyncio.Future[None] = self._loop.create_future()
                    lane.room.append(lambda room=room: room.done() or room.set_result(None))  # type: ignore[misc]
                    lane.flush_soon()
                    await room

    # ------------------------------------------------------------------------------ the end
    async def flush(self) -> None:
        """Returns when every message sent before has its outcome (callbacks included)."""
        await asyncio.gather(*(lane.flush() for lane in self.lanes))

    def abort(self) -> None:
        """Ends at once; messages that are not acknowledged yet have an unknown outcome."""
        self._closed = True
        if self._growth is not None:
            self._growth.stop()
        for lane in self.lanes:
            lane.abort()

    async def close(self) -> None:
        """Flushes, then closes. Raises Timeout when messages have no outcome after the operation timeout, and
        AlreadyClosed when the producer is closed."""
        if self._closed:
            raise AlreadyClosed("the producer is closed")
        self._closed = True
        try:
            if self._growth is not None:
                await self._growth.close()
            outcomes = await asyncio.gather(*(lane.close() for lane in self.lanes), return_exceptions=True)
        except BaseException:  # the close was interrupted: it ends at once
            self.abort()
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, AlreadyClosed):
                raise outcome

    async def __aenter__(self) -> Producer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            await self.close()

    def check(self) -> None:
        for lane in self.lanes:
            lane.check()


async def _open(lanes: list[PartitionProducer], settings: ProducerSettings) -> None:
    """Opens all at once; lazy producers open each with its first message, unless the access mode is exclusive or an
    initial subscription is named: these must take effect now."""
    if (
        settings.lazy_start_partitioned_producers
        and settings.access_mode == ProducerAccessMode.Shared
        and not settings.initial_subscription_name
    ):
        for lane in lanes:
            lane.wait_for_messages()
    else:
        await asyncio.gather(*(lane.open() for lane in lanes))


def _check_extras(extras: Extras) -> None:
    """Skips the plain values that most messages have; checks the rest by the table."""
    properties, key, ordering, sequence_id, clusters, disabled, event, at, after, key_bytes = extras
    if key_bytes is not None and (key is not None or type(key_bytes) is not bytes):
        raise WrongMessageType(f"key_bytes is bytes, without a partition_key, not {shown(key_bytes)}")
    if key is not None and not is_plain_key(key):
        check_message({"partition_key": key})
    if ordering is not None and not is_plain_key(ordering):
        check_message({"ordering_key": ordering})
    if properties is not None and not are_plain(properties):
        check_message({"properties": properties})
    if event is not None and not (type(event) is int and 0 <= event <= INT64_MAX):
        check_message({"event_timestamp": event})
    if sequence_id is not None or at is not None or after is not None:
        check_message({"sequence_id": sequence_id, "deliver_at": at, "deliver_after": after})
    if clusters is not None or (disabled is not None and disabled is not False):
        check_message({"replication_clusters": clusters, "disable_replication": disabled})
        if clusters or disabled:
            what = "replication_clusters" if clusters else "disable_replication"
            raise OperationNotSupported(f"{what}: a cluster does not replicate to others, nothing of it; leave it out")
