"""The connection of one producer or consumer (the *owner*) to the broker of its topic. All owners share a stream to
that broker; `Attachment` gets an id on the stream for its owner, and gives it up. Also the frames that open a producer
or subscribe (`make_open_frame`, `make_subscribe_frame`).

    attachment.open()               the first time; `on_opening_done` reports its success or failure
    attachment.reopen(after_s)      later: one attempt after a pause; `on_lost` reports its failure
    attachment.send(permits=7)      sends a frame; without an id, sends nothing
    attachment.publish(entry)       sends an entry; without an id, sends nothing
    attachment.close_at_broker()    gives up the id, and tells the broker
    await attachment.close()        the same, and returns when the broker has closed the owner

The first opening fails when the broker refuses it, or the operation's deadline is over. An owner that waits for others
(`waits`) has no deadline while the broker lets it wait.

Each attempt looks up the topic's broker, attaches to the stream of that broker and sends the owner's first frame. The
owner calls `on_opened` or `on_closed_by_broker` when it reads the broker's answer. Once it has no id (`is_attached`),
it ignores the frames that follow in the same read: a broker repeats `closed` for each frame that arrives for an id
after its end.

A broker that hands the topic to another broker names that broker (`NotOwner.owner`). The next attempt goes there
without a look-up, and without a pause if the owner was open. An id is lost only once, so each loss causes one new
opening. The owner's core decides what to do after an error (client/core/producer.py, client/core/consumer.py). Guards:
tests/client/produce/test_partition_producer.py, tests/client/connect/test_late_frames.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from ...proto import wire_pb2 as wire
from ...proto.checksum import encode_varint
from ...proto.entry import EncryptFunction, EntryEncoding
from ...proto.entry_filter import FILTER
from ...proto.errors import ConnectionLost, MagnetarError, NotOwner, TimedOut
from ...proto.names import FAIR_BY_KEY, FAIR_IN_FLIGHT, FAIR_RATE, TopicName
from ...runtime.tasks import Tasks
from ..common.loggers import run_logging_errors
from ..core.effects import AttachedProducerOptions
from ..model.message_id import MessageId
from ..model.options import ReaderStart
from ..model.schema import Schema
from ..model.settings import BatchingType, ConsumerKeySharedPolicy, ConsumerSettings, ProducerSettings
from .broker_stream import CLOSE_REQUEST_ID, BrokerStream
from .connections import Connections

PUBLISH_TAG = b"\x1a"
"""Encoded tag of the field `publish` of ClientFrame: field 3, length-delimited."""
SLOW_OPENING_S = 1.0
"""Seconds. An opening that waited longer for the broker's answer did not simply fail: the broker accepted it, and let
it wait."""


class AttachmentOwner(Protocol):
    """The interface of a producer or consumer that its `Attachment` calls, in the event loop. PartitionProducer,
    PartitionConsumer and PreEncodedEntryWriter implement it."""

    topic: TopicName
    waits: bool  # the answer to its first frame may take as long as others please

    def make_opening_frame(self) -> dict[str, Any]:
        """Returns the first frame to send to the broker, which opens the producer or consumer, as a dict {kind of
        ClientFrame: value}."""
        ...

    def on_frames(self, frames: Sequence[wire.ServerFrame]) -> None: ...
    def on_opening_done(self, error: MagnetarError | None) -> None:
        """Fact: the first opening has succeeded (`error` is None), or has failed for good with `error`. Called once."""
        ...

    def on_lost(self, error: MagnetarError) -> None:
        """Fact: this producer or consumer is no longer open at its broker, or an attempt to open it again failed;
        `error` says why. The owner may call `Attachment.reopen`."""
        ...

    def on_failure(self, error: Exception) -> None: ...


class Attachment:
    """Opens one producer or consumer (the owner) at the broker of its topic, and sends its frames over the stream to
    that broker. See the head of the module."""

    __slots__ = (
        "_answer", "_connections", "_id", "_left", "_named", "_owner", "_pause", "_publish_head", "_stream", "_tasks",
        "_was_moved", "on_failure", "on_frames", "topic",
    )  # fmt: skip

    def __init__(self, connections: Connections, owner: AttachmentOwner) -> None:
        self.on_frames = owner.on_frames
        self.on_failure = owner.on_failure
        self.topic = owner.topic
        self._connections = connections
        self._owner = owner
        self._stream: BrokerStream | None = None
        self._id = 0
        self._publish_head = b""  # a ClientFrame's bytes up to the length of its entry
        self._answer: asyncio.Future[None] | None = None  # to the first frame
        self._left: asyncio.Future[None] | None = None
        self._tasks = Tasks(owner.on_failure)
        self._pause: asyncio.TimerHandle | None = None
        self._named = ""  # the endpoint of the topic's next owner, as the last one named it
        self._was_moved = False  # it was open, and its broker named the next one

    # ------------------------------------------------------------------------------ to get an id
    def open(self) -> None:
        """Starts the first opening of the producer or consumer at the broker of its topic.
        `AttachmentOwner.on_opening_done` gets the outcome. Must be called in the event loop."""
        self._tasks.spawn(self._open(), f"opening of {self._owner.topic}")

    async def _open(self) -> None:
        failure: MagnetarError | None = None
        try:
            if self._owner.waits:
                await self._wait_for_turn()
            else:
                await self._connections.retry(self._attempt)
        except MagnetarError as error:
            failure = error
        self._owner.on_opening_done(failure)

    async def _wait_for_turn(self) -> None:
        """Waits until the broker lets the owner in (an exclusive producer waits for the others). Starts the wait again
        if the connection breaks. Raises a permanent error, and the last error if no wait could be started within the
        operation time-out."""
        now, timeout_s = self._connections.world.clock.monotonic, self._connections.settings.operation_timeout_s
        backoff, since = self._connections.backoff(), now()
        while True:
            answer, began = await self._connections.retry(self._attach), now()
            try:
                await self._answered(answer)
                return
            except MagnetarError as error:
                if now() - began > SLOW_OPENING_S:
                    backoff.reset()
                    since = now()
                delay = backoff.next_delay_s()
                if not error.retryable or now() + delay - since > timeout_s:
                    raise
            await asyncio.sleep(delay)

    def reopen(self, after_s: float) -> None:
        """Opens the producer or consumer at its broker again after `after_s` seconds; at once if its last broker has
        just named the topic's next broker. Returns at once; a failure is reported by `AttachmentOwner.on_lost`. The
        pause is a timer, not a task, because many owners may wait, and the loop may end in the meantime."""
        assert not self.is_attached, "one connection at a time"
        if self._pause is not None:
            self._pause.cancel()
        if self._was_moved:
            self._was_moved, after_s = False, 0.0
        self._pause = asyncio.get_running_loop().call_later(
            after_s, run_logging_errors, self._start_reopening, self.on_failure
        )

    def _start_reopening(self) -> None:
        self._tasks.spawn(self._reopen(), f"opening of {self._owner.topic}")

    async def _reopen(self) -> None:
        try:
            async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                await self._attempt()
        except TimeoutError as error:
            failure: MagnetarError = error if isinstance(error, MagnetarError) else TimedOut("no answer to the opening")
        except MagnetarError as error:
            failure = error
        else:
            return
        self._owner.on_lost(failure)

    async def _attempt(self) -> None:
        await self._answered(await self._attach())

    async def _attach(self) -> asyncio.Future[None]:
        """Attaches to the broker's stream and sends the owner's first frame. Returns a future that ends with the
        broker's answer."""
        named, self._named = self._named, ""
        stream = await self._connections.connect_owner_stream(self._owner.topic, named)
        first = self._owner.make_opening_frame()
        answer = self._answer = asyncio.get_running_loop().create_future()
        id_ = stream.attach(self)
        self._stream, self._id = stream, id_
        self._publish_head = wire.ClientFrame(id=id_).SerializeToString() + PUBLISH_TAG
        self.send(**first)
        return answer

    async def _answered(self, answer: asyncio.Future[None]) -> None:
        id_ = self._id
        try:
            await answer
        except BaseException:
            if self.is_attached and self._id == id_:
                self.close_at_broker()
            raise
        finally:
            if self._answer is answer:
                self._answer = None

    def on_opened(self) -> None:
        """Fact: the broker answered that the producer or consumer is open. If it did not wait for this answer, the
        connection counts as lost."""
        if self._answer is None or self._answer.done():
            self.on_closed_by_broker(ConnectionLost("the broker opened it twice"))
        else:
            self._answer.set_result(None)

    # ------------------------------------------------------------------------------ with an id
    @property
    def is_attached(self) -> bool:
        """Returns whether the owner has an id on a broker's stream."""
        return self._stream is not None

    def send(self, **kind: Any) -> None:
        """Sends a frame of one kind to the broker, as `send(permits=7)`; does nothing without an id. Never waits."""
        if self._stream is not None:
            self._stream.send(self._id, wire.ClientFrame(id=self._id, **kind))

    def publish(self, entry: bytes) -> None:
        """Sends an entry to the broker, as `send(publish=entry)` does, but without the two copies of the entry that
        protobuf makes. Does nothing without an id."""
        if self._stream is not None:
            size = len(entry)
            self._stream.send(self._id, (self._publish_head, encode_varint(size), entry))

    def send_close_frame(self) -> None:
        """Tells the broker that this producer or consumer is closed and sends no more frames; does not wait for the
        broker's answer."""
        self.send(close=CLOSE_REQUEST_ID)

    # ------------------------------------------------------------------------------ without it
    def on_closed_by_broker(self, error: MagnetarError) -> None:
        """Fact: the broker reported that it has closed the producer or consumer; `error` says why. The id is given up,
        and the attempt to open it, or else the owner, gets the error."""
        if isinstance(error, NotOwner) and not self._connections.settings.listener_name:
            self._named = error.fields.get("owner", "")
            self._was_moved = bool(self._named) and self._answer is None
        self._detach()
        self.on_lost(error)

    def on_lost(self, error: MagnetarError) -> None:
        """Fact: the stream broke, or another broker owns the topic; `error` says why. An attempt to open the owner
        fails with the error; a `close` that waits ends; else the owner gets the error."""
        self._stream = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            return
        if self._left is not None:
            self.on_closed()
            return
        self._owner.on_lost(error)

    def on_unexpected_frame(self, kind: str | None) -> None:
        """Fact: the producer or consumer received a frame of the kind `kind`, which it does not expect. As broker and
        client disagree about its state, closes it at the broker and treats the connection as lost."""
        self.close_at_broker()
        self.on_lost(ConnectionLost(f"the broker said {kind} out of turn"))

    def close_at_broker(self) -> None:
        """Tells the broker that the producer or consumer is closed, and gives up the id; does not wait. Does nothing
        without an id."""
        if self._stream is not None:
            self.send(close=CLOSE_REQUEST_ID)
            self._detach()

    def _detach(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.detach(self._id)

    async def close(self) -> None:
        """Closes the producer or consumer at its broker and waits for the answer; an opening in flight is cancelled.
        Returns at once if it is not open, and also when the connection breaks. Two calls at the same time wait for one
        answer, and both end when one of them is interrupted."""
        self.stop()
        if self._answer is not None:
            self.close_at_broker()
        elif self._stream is not None:
            if self._left is None:
                self._left = asyncio.get_running_loop().create_future()
                self.send(close=CLOSE_REQUEST_ID)
            try:
                await asyncio.shield(self._left)
            finally:
                self._detach()
                self.on_closed()

    def on_closed(self) -> None:
        """Fact: the broker answered that it has closed the producer or consumer, as `close` asked."""
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    def stop(self) -> None:
        """Stops the attempts to open the producer or consumer at its broker: no new attempt begins, and an attempt in
        flight is cancelled."""
        self._tasks.cancel()
        if self._pause is not None:
            self._pause.cancel()


# ----------------------------------------------------------------------------------------------------- handshake
# The opening of a producer or a consumer: the options of its core, and the first frame, with its identity.


ISOLATIONS = {
    "read_committed": wire.Subscribe.READ_COMMITTED,
    "read_uncommitted": wire.Subscribe.READ_UNCOMMITTED,
}


def make_producer_options(
    settings: ProducerSettings, encrypt: EncryptFunction | None, *, persistent: bool
) -> AttachedProducerOptions:
    """Returns the options of a producer's core, made from the program's settings. Chunking is used only for persistent
    topics, as in Pulsar's clients: a non-persistent topic may drop single chunks, which makes the rest of the message
    useless."""
    return AttachedProducerOptions(
        initial_sequence_id=settings.initial_sequence_id,
        batching=settings.batching_enabled,
        batch_messages_max=settings.batching_max_messages,
        batch_bytes_max=settings.batching_max_allowed_size_in_bytes,
        batch_delay_s=settings.batching_max_publish_delay_ms / 1000,
        key_based=settings.batching_type is BatchingType.KeyBased,
        batch_by=settings.batch_by,
        summarized=_list_summarized_properties(settings),
        send_timeout_s=settings.send_timeout_millis / 1000,
        chunking=settings.chunking_enabled and persistent,
        encoding=EntryEncoding(int(settings.compression_type), encrypt),
        reports_when_sent=settings.acks == "none",
        reports_first_copy=settings.acks == "one",
    )


def _list_summarized_properties(settings: ProducerSettings) -> tuple[str, ...]:
    """Returns the properties that the summary of a batch covers: those that the program names for it, and those of
    `batch_by` unless batches are encrypted. (Values can be guessed from their hashes.)"""
    own = () if settings.encryption_keys else settings.batch_by
    return tuple(dict.fromkeys(settings.filter_properties + own))


def make_open_frame(
    topic: TopicName, name: str, instance: str, settings: ProducerSettings, *, connection: int, epoch: int
) -> wire.OpenProducer:
    """Returns the first frame of a producer, which opens it. `name`: empty: the broker chooses one. `instance`:
    identifies this object among all producers of the name. `connection`: the number of this attempt to open it; at the
    broker an attempt never replaces a later one. `epoch`: the topic epoch that the broker gave to this producer, or to
    the one that it replaces, when that had exclusive access; 0: neither had it."""
    request = wire.OpenProducer(
        topic=topic.full,
        producer_name=name,
        instance=instance,
        access_mode=int(settings.access_mode),  # type: ignore[arg-type]
        properties=settings.properties,
        connection=connection,
        initial_subscription=settings.initial_subscription_name or "",
        topic_epoch=epoch,
        hears_waits=True,
        existing_only=settings.existing_only,
        waits_for_nothing=settings.acks == "none",
        hears_first_copies=settings.acks == "one",
    )
    _set_schema(request, settings.schema)
    return request


def make_subscribe_frame(
    topic: TopicName, subscription: str, name: str, instance: str, settings: ConsumerSettings, start: ReaderStart | None
) -> wire.Subscribe:
    """Returns the first frame of a consumer or reader, which subscribes to the topic. `name`: empty: the broker chooses
    one. `instance`: identifies this object, whose next connection replaces its last one. `start`: the position at which
    a reader starts, whose subscription is not durable; None: the subscription is durable."""
    request = wire.Subscribe(
        topic=topic.full,
        subscription=subscription,
        type=int(settings.consumer_type),  # type: ignore[arg-type]
        initial_position=int(settings.initial_position),  # type: ignore[arg-type]
        consumer_name=name,
        durable=start is None,
        properties=settings.properties,
        instance=instance,
        priority_level=settings.priority_level,
        subscription_properties=_make_subscription_properties(settings),
        many_topics=settings.many_topics,
        read_compacted=settings.is_read_compacted,
        existing_only=settings.existing_only,
        isolation=ISOLATIONS[settings.isolation],
        says_last=True,
        redelivery_order=wire.Subscribe.KEY if settings.redelivery_order == "key" else wire.Subscribe.ANY,
        acknowledges=not settings.durable,
    )
    if settings.filter is not None:
        request.subscription_properties[FILTER] = settings.filter.strip()
    _set_schema(request, settings.schema)
    if settings.key_shared_policy is not None:
        _describe(request.key_shared, settings.key_shared_policy)
    if start is not None:
        first = start.id if start.begun is None else MessageId(start.id.partition(), *start.begun)
        request.start.CopyFrom(first.to_wire())
        # A message inside a batch: the broker sends the entry and we leave out what is before it.
        request.start_inclusive = start.inclusive or first.batch_index() >= 0 or start.begun is not None
    return request


def _make_subscription_properties(settings: ConsumerSettings) -> dict[str, str]:
    """Returns the properties that the consumer asks for its subscription to have; empty: any."""
    if not settings.fair_by_key:
        return {}
    limits = {FAIR_IN_FLIGHT: settings.max_in_flight_per_key, FAIR_RATE: settings.rate_per_key}
    return {FAIR_BY_KEY: "true", **{name: str(limit) for name, limit in limits.items() if limit is not None}}


def _set_schema(request: wire.OpenProducer | wire.Subscribe, schema: Schema) -> None:
    info = schema.info()
    if info is not None:
        told = request.schema
        told.type, told.data, told.name = info.type, info.data, info.name
        told.properties.update(info.properties)


def _describe(shared: wire.KeySharedPolicy, policy: ConsumerKeySharedPolicy) -> None:
    shared.mode = int(policy.key_shared_mode)  # type: ignore[assignment]
    shared.allow_out_of_order_delivery = policy.allow_out_of_order_delivery
    for first, last in policy.sticky_ranges:
        shared.ranges.add(first=first, last=last)
