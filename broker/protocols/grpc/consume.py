"""The Consume stream: subscribe, then permits and acknowledgements in and entries out, until either side ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from ....proto import wire_pb2 as wire
from ....proto.errors import Busy, ConnectionLost, InternalError, InvalidRequest, MagnetarError, NotAllowed, to_wire
from ....proto.names import EARLIEST, LATEST, Position, TopicName, check_subscription_name
from ....runtime.network import CallContext, EndOfStream, Stream
from ...common.refusals import SubscribeRefusal
from ...common.turns import Turns
from ...log.compacted_view import CompactedView, last_of
from ...log.core.log_shape import LogShape
from ...log.topic_log import TopicLog
from ...node.topic_manager import OwnedTopics
from ...subscription.consumer import Consumer
from ...subscription.core.dispatch import Delivery
from ...subscription.core.policies.policy import Member
from ...subscription.subscription import Subscription
from ...topic.topic import Topic
from .border import check_ack, check_permits, check_subscribe
from .delivery import delivery_items

_LOG = logging.getLogger("magnetar.broker.consume")

Consumes = Stream[wire.ConsumeReply | bytes, wire.ConsumeRequest]

ANSWERS_MAX = 1000
"""Of one consumer, under way; its stream is not read on meanwhile."""
ACK_ENTRIES = 100
"""Acknowledged between two looks at the clock: some tenths of a millisecond."""


class StreamOutlet:
    """A consumer's deliveries, as items of its stream."""

    def __init__(self, stream: Consumes, topic: Topic) -> None:
        self._stream = stream
        self._topic = topic
        self.over = False

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        messages, size = sum([each.entry.count for each in deliveries]), sum([each.entry.size for each in deliveries])
        self._topic.traffic.went(messages, size)
        for item in delivery_items(deliveries):
            self.send(item)

    def ended(self) -> None:
        self.send(wire.ConsumeReply(end_of_topic=wire.Empty()))

    def active(self, active: bool) -> None:
        self.send(wire.ConsumeReply(active=active))

    def closed(self, error: MagnetarError) -> None:
        if not self.over:
            self.over = True
            self.send(wire.ConsumeReply(closed=to_wire(error)))

    def send(self, reply: wire.ConsumeReply | bytes) -> None:
        with contextlib.suppress(ConnectionLost):  # the reading side of the handler learns it too, and ends
            self._stream.send_nowait(reply)

    @property
    def queued_bytes(self) -> int:
        return self._stream.queued_bytes

    async def drained(self) -> None:
        await self._stream.drained()


async def serve(broker: OwnedTopics, stream: Consumes, context: CallContext) -> None:
    """Errors before the consumer is subscribed fail the call; later ones travel as `closed` or in `done`."""
    items = await stream.receive()
    if items[0].WhichOneof("kind") != "subscribe":
        raise InvalidRequest("the first item of a Consume stream is `subscribe`")
    asked = items[0].subscribe
    check_subscribe(asked)
    check_subscription_name(asked.subscription)
    if asked.read_compacted and asked.type not in (wire.Subscribe.EXCLUSIVE, wire.Subscribe.FAILOVER):
        raise SubscribeRefusal.COMPACTED_TYPE.error()
    if asked.read_compacted and not TopicName.parse(asked.topic).persistent:
        raise SubscribeRefusal.COMPACTED_TOPIC.error()
    topic = await broker.topic(TopicName.parse(asked.topic), create=not asked.existing_only)
    outlet = StreamOutlet(stream, topic)
    id_ = broker.next_id()
    ranges = tuple((each.first, each.last) for each in asked.key_shared.ranges)
    member = Member(id_, asked.consumer_name or f"{broker.name}-{id_}", asked.priority_level, asked.many_topics, ranges)
    consumer = Consumer(member, outlet, address=context.peer, instance=asked.instance)
    now = asyncio.get_running_loop().time()
    topic.admission.check_rate(topic.applied, consumer, asked.consumer_name, now)
    session = _Session(topic, await _subscription(topic, asked), consumer, outlet)
    try:
        await session.subscription.expect(consumer)
        topic.check_consumer(session.subscription, asked.type, consumer)
        topic.show(session.subscription, compacted=asked.read_compacted)
        session.subscription.join(
            consumer, asked.type, sticky=asked.key_shared.mode == wire.KeySharedPolicy.STICKY,
            out_of_order=asked.key_shared.allow_out_of_order_delivery,
        )  # fmt: skip
        outlet.send(wire.ConsumeReply(subscribed=_subscribed(topic, consumer, asked)))
        await session.take(items[1:])
        while not session.finished:
            await session.take(await stream.receive())
        await session.answered()
    except EndOfStream:
        await session.answered()
    finally:
        session.end()
        await topic.detach(session.subscription)


def _subscribed(topic: Topic, consumer: Consumer, asked: wire.Subscribe) -> wire.Subscribed:
    compacted = topic.compaction.record if asked.read_compacted else None
    return wire.Subscribed(
        consumer_name=consumer.member.name, compacted_end_index=compacted.end_index if compacted is not None else 0
    )


async def _subscription(topic: Topic, asked: wire.Subscribe) -> Subscription:
    compacted, shape = asked.read_compacted, topic.shape(compacted=asked.read_compacted)
    start = Position(asked.start.ledger_id, asked.start.entry_id) if asked.HasField("start") else None
    if asked.durable:
        mark = shape.start if asked.initial_position == wire.Subscribe.EARLIEST else None
        if start is not None:
            mark = mark_of(shape, asked.start, asked.start_inclusive, last_again=asked.start_inclusive)[0]
        properties = dict(asked.subscription_properties)
        return await topic.subscribe(asked.subscription, mark, properties, compacted=compacted, by_consumer=True)
    if asked.type != wire.Subscribe.EXCLUSIVE:
        raise SubscribeRefusal.READER_TYPE.error()
    if start is None:
        start = EARLIEST if asked.initial_position == wire.Subscribe.EARLIEST else LATEST
        asked.start.ledger_id, asked.start.entry_id, asked.start.batch_index = *start, -1
    log = topic.compaction.view if compacted else topic.log
    mark, acked = await place_of(log, asked.start, asked.start_inclusive, last_again=asked.start_inclusive)
    subscription = topic.read_only(asked.subscription, mark, compacted=compacted)
    if acked:
        subscription.cursor.ack_first(shape.after(mark), acked)
    topic.attach(subscription)
    return subscription


def mark_of(
    shape: LogShape, start: wire.MessageId, inclusive: bool, *, last_again: bool = False
) -> tuple[Position, int]:
    """(mark, messages of the entry after it that are done) of a cursor that starts at, or just after, a message.

    `latest` is the end of the topic: the next message that is published comes first. Only a reader that is opened at
    `latest`, inclusive, begins with the last entry (`last_again`, Pulsar R1); a seek or a reset never does.
    """
    position = Position(start.ledger_id, start.entry_id)
    if position >= LATEST:
        return (shape.before(shape.last) if last_again and shape.last.entry_id >= 0 else shape.last), 0
    if position.entry_id < 0:
        return shape.clamp(position), 0
    if start.batch_index >= 0:
        done = start.batch_index + (0 if inclusive else 1)
        return shape.clamp(shape.before(position)), done if shape.readable(position) else 0
    return shape.clamp(shape.before(position) if inclusive else position), 0


async def place_of(
    log: TopicLog | CompactedView, start: wire.MessageId, inclusive: bool, *, last_again: bool = False
) -> tuple[Position, int]:
    """The same, with no more messages than the entry has: it is looked at when some of it are done."""
    shape = log.shape
    mark, done = mark_of(shape, start, inclusive, last_again=last_again)
    if not done:
        return mark, 0
    position = Position(start.ledger_id, start.entry_id)
    found = log.reader.cached(position, 1, 1) or await log.reader.read(position, 1)
    if not found or found[0].position != position:
        return mark, 0  # it is not there compacted
    return (mark, done) if done < found[0].count else (shape.clamp(position), 0)


def _told(failure: Exception) -> wire.Error:
    """What a request that failed is answered. A fault of ours is logged: who asked must not wait for ever."""
    if isinstance(failure, MagnetarError):
        return to_wire(failure)
    _LOG.error("a request of a consumer failed", exc_info=failure)
    return to_wire(InternalError(f"the request failed: {failure!r}"))


class _Session:
    """What a consumer asks for on its stream, after it has subscribed."""

    def __init__(self, topic: Topic, subscription: Subscription, consumer: Consumer, outlet: StreamOutlet) -> None:
        self.subscription = subscription
        self.finished = False
        self._topic = topic
        self._consumer = consumer
        self._outlet = outlet
        self._answers: set[asyncio.Task[None]] = set()

    async def take(self, items: Sequence[wire.ConsumeRequest]) -> None:
        """In slices; what one request asks for is done before the next."""
        subscription, consumer, turns = self.subscription, self._consumer, Turns()
        for item in items:
            if turns.over:
                await turns.next()
            if len(self._answers) >= ANSWERS_MAX:
                await asyncio.wait(self._answers, return_when=asyncio.FIRST_COMPLETED)
            if self._outlet.over:
                return  # the consumer was told that it is over; what it sends is for nobody
            kind = item.WhichOneof("kind")
            if kind == "permits":
                check_permits(consumer.member.permits, item.permits)
                subscription.flow(consumer, item.permits)
            elif kind == "ack":
                await self._ack(item.ack, turns)
            elif kind == "redeliver":
                await self._redeliver(item.redeliver, turns)
            elif kind == "seek":
                self._answer(item.seek.request_id, self._seek(item.seek))
            elif kind == "unsubscribe":
                self._answer(item.unsubscribe, self._unsubscribe())
            elif kind == "last_message_id":
                self._start(self._last_or_why(item.last_message_id))
            elif kind == "close":
                self._close(item.close)
            else:
                raise InvalidRequest(f"a Consume stream does not take {kind or 'an item of unknown kind'} here")

    async def _redeliver(self, asked: wire.Redeliver, turns: Turns) -> None:
        entries = None
        if asked.entries or asked.ledgers:
            entries = [Position(each.ledger_id, each.entry_id) for each in asked.entries]
            for some in self.subscription.held(self._consumer, asked.ledgers):
                entries += some
                if turns.over:
                    await turns.next()
        self.subscription.redeliver(self._consumer, entries, counted=not asked.uncounted)

    # ------------------------------------------------------------------ answers
    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def _answer(self, request_id: int, work: Coroutine[Any, Any, None]) -> None:
        self._start(self._done(request_id, work))

    async def _done(self, request_id: int, work: Coroutine[Any, Any, None]) -> None:
        error = None
        try:
            await work
        except Exception as failure:
            error = _told(failure)
        self._outlet.send(wire.ConsumeReply(done=wire.Done(request_id=request_id, error=error)))

    async def answered(self) -> None:
        """Returns when everything that was asked is answered."""
        while self._answers:
            await asyncio.gather(*self._answers, return_exceptions=True)

    def end(self) -> None:
        for task in self._answers:
            task.cancel()
        self.subscription.leave(self._consumer, lost=True)

    # ------------------------------------------------------------------ requests
    async def _ack(self, ack: wire.Ack, turns: Turns) -> None:
        """Applied in the order of the stream, in slices; the receipt, if one is wanted, when it is durable."""
        error: MagnetarError | None = None
        try:
            check_ack(ack)
            if ack.kind == wire.Ack.CUMULATIVE:
                for entry in ack.entries:
                    await self._ack_cumulative(entry, turns)
            else:
                await self._ack_each(ack.entries, turns)
                for each in ack.ledgers:
                    self.subscription.ack_set(self._consumer, each.ledger_id, each.entries)
                    if turns.over:
                        await turns.next()
        except MagnetarError as failure:
            error = failure
        if ack.request_id:
            self._answer(ack.request_id, self._receipt(error))

    async def _ack_each(self, entries: Sequence[wire.AckedEntry], turns: Turns) -> None:
        for first in range(0, len(entries), ACK_ENTRIES):
            self.subscription.ack(self._consumer, entries[first : first + ACK_ENTRIES])
            if turns.over:
                await turns.next()

    async def _ack_cumulative(self, acked: wire.AckedEntry, turns: Turns) -> None:
        """In steps of what the consumer holds: up to each of them everything is acknowledged, too."""
        for mark in self.subscription.marks_up_to(self._consumer, Position(acked.ledger_id, acked.entry_id)):
            step = wire.AckedEntry(ledger_id=mark[0], entry_id=mark[1])
            self.subscription.ack_cumulative(self._consumer, step)
            if turns.over:
                await turns.next()
        self.subscription.ack_cumulative(self._consumer, acked)
        if turns.over:
            await turns.next()

    async def _receipt(self, error: MagnetarError | None) -> None:
        if error is not None:
            raise error
        await self.subscription.durable_now()

    async def _seek(self, seek: wire.Seek) -> None:
        async with self.subscription.moving:
            mark, acked = await self._sought(seek)
            await self.subscription.seek(mark, acked, keep=self._consumer)

    async def _sought(self, seek: wire.Seek) -> tuple[Position, int]:
        log = self.subscription.log
        if seek.HasField("message_id"):
            return await place_of(log, seek.message_id, inclusive=True)
        if seek.HasField("publish_time_ms"):
            return log.shape.before((await log.reader.locate_time(seek.publish_time_ms)).position), 0
        place = await log.reader.locate(seek.index)
        if not log.shape.readable(place.position):
            return log.shape.before(place.position), 0  # the end
        return log.shape.before(place.position), max(0, seek.index - place.first_index)

    async def _unsubscribe(self) -> None:
        if not self.subscription.durable:
            raise NotAllowed("a reader has no subscription to remove")
        others = len(self.subscription.consumers) - 1
        if others > 0:
            raise Busy(f"subscription {self.subscription.name!r} has {others} other consumers")
        self._outlet.over = True  # removed by its own consumer: `done` is the answer, not `closed`
        await self._topic.unsubscribe(self.subscription.name, force=True)

    async def _last_or_why(self, request_id: int) -> None:
        try:
            await self._last(request_id)
        except Exception as failure:
            self._outlet.send(wire.ConsumeReply(done=wire.Done(request_id=request_id, error=_told(failure))))

    async def _last_shown(self) -> tuple[Position, int, int] | None:
        """Position, batch index (-1: no batch) and index of the last message; None: there is none."""
        log = self.subscription.log
        if isinstance(log, CompactedView):
            return await log.reader.last_shown()
        return await last_of(log.shape, log.reader)

    async def _last(self, request_id: int) -> None:
        partition, mark = self._topic.name.partition, self.subscription.cursor.mark
        last, batch_index, index = await self._last_shown() or (EARLIEST, -1, -1)
        self._topic.check_end()
        self._outlet.send(
            wire.ConsumeReply(
                last=wire.LastMessageId(
                    request_id=request_id, index=index,
                    id=wire.MessageId(
                        ledger_id=last[0], entry_id=last[1], partition=partition, batch_index=batch_index
                    ),
                    mark_delete=wire.MessageId(
                        ledger_id=mark[0], entry_id=mark[1], partition=partition, batch_index=-1
                    ),
                )
            )
        )  # fmt: skip

    def _close(self, request_id: int) -> None:
        """The consumer goes in order: what it acknowledged before is stored when `done` is sent."""
        self.finished = True
        self.subscription.leave(self._consumer)
        self._answer(request_id, self.subscription.durable_now())
