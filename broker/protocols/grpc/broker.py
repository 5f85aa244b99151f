"""The Broker service of proto/wire.proto: translates and calls; decides nothing.

Unary calls are here; the streams have a module each: connection.py, read.py, watch.py.
"""

from __future__ import annotations

import contextlib

from ....proto import wire_pb2 as wire
from ....proto.errors import MagnetarError
from ....proto.model import AckedEntry
from ....proto.names import TopicName, check_subscription_name
from ....runtime.network import CallContext, Stream
from ...common.turns import Turns
from ...node.topic_manager import OwnedTopics
from . import connection, read, watch
from .border import check_offsets

Reads = Stream[wire.ReadReply | bytes, wire.ReadRequest]


class BrokerService:
    def __init__(self, broker: OwnedTopics) -> None:
        self._broker = broker

    async def lookup(self, request: wire.LookupRequest, context: CallContext) -> wire.LookupReply:
        return await self._look_up(TopicName.parse(request.topic))

    async def _look_up(self, topic: TopicName) -> wire.LookupReply:
        owner = await self._broker.lookup(topic)
        return wire.LookupReply(owner=owner.endpoint, here=owner.name == self._broker.name)

    async def partitions(self, request: wire.PartitionsRequest, context: CallContext) -> wire.PartitionsReply:
        topic, catalog = TopicName.parse(request.topic), self._broker.catalog
        if topic.is_partition:
            return wire.PartitionsReply(partitions=0)  # a partition is used like a topic without partitions
        if request.create:
            reply = wire.PartitionsReply(partitions=await catalog.partitions_or_create(topic))
            if not reply.partitions:
                with contextlib.suppress(MagnetarError):  # the look-up says why
                    reply.owner.CopyFrom(await self._look_up(topic))
            return reply
        await catalog.namespace(topic.namespace_name)
        return wire.PartitionsReply(partitions=await catalog.existing_partitions(topic))

    async def connect(self, stream: connection.Connects, context: CallContext) -> None:
        await connection.serve(self._broker, stream, context)

    async def read(self, stream: Reads, context: CallContext) -> None:
        await read.serve(self._broker, stream)

    async def watch_topics(self, stream: watch.Watches, context: CallContext) -> None:
        await watch.serve(self._broker, stream)

    async def offsets(self, request: wire.OffsetsRequest, context: CallContext) -> wire.OffsetsReply:
        check_offsets(request)
        topic = await self._broker.topic(TopicName.parse(request.topic), create=False)
        shape, reader = topic.log.shape, topic.log.reader
        subscription_index = -1
        if request.subscription:
            check_subscription_name(request.subscription)
            subscription = await topic.subscribe(request.subscription, shape.start)
            subscription_index = await reader.index_after(subscription.cursor.mark)
        by_time, turns = list[int](), Turns()
        for time_ms in request.publish_times_ms:
            by_time.append((await reader.locate_time(time_ms)).first_index)
            if turns.over:
                await turns.next()
        topic.check_end()
        return wire.OffsetsReply(
            earliest_index=shape.first_index,
            end_index=shape.end_index,
            by_time=by_time,
            bytes=shape.size,
            subscription_index=subscription_index,
        )

    async def advance_subscription(
        self, request: wire.AdvanceSubscriptionRequest, context: CallContext
    ) -> wire.Empty:
        """Everything before the index is acknowledged, durably, when this returns. Never moves backwards."""
        topic = await self._broker.topic(TopicName.parse(request.topic), create=False)
        subscription = topic.subscription(request.subscription)
        shape = topic.log.shape
        if request.index >= shape.end_index:
            last = shape.last
            if last.entry_id >= 0:
                subscription.ack_cumulative(None, AckedEntry(last))
        elif request.index > shape.first_index:
            place = await topic.log.reader.locate(request.index)
            done = max(0, request.index - place.first_index)
            position = place.position if done else shape.before(place.position)
            if position.entry_id >= 0:
                subscription.ack_cumulative(None, AckedEntry(position, 1 << done >> 1))
        await subscription.durable_now()
        return wire.Empty()
