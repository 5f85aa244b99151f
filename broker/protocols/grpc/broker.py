"""The Broker service of proto/wire.proto: translates and calls; decides nothing.

Unary calls are here; the streams have a module each: connection.py, read.py, watch.py.
"""

from __future__ import annotations

from ....proto import wire_pb2 as wire
from ....proto.errors import InvalidRequest
from ....proto.names import TopicName
from ....proto.schema import version_of
from ....runtime.network import CallContext
from ...node.topic_manager import TopicManager
from ...session.schemas import Schemas
from ...session.topics import Owner, Topics
from . import connection, read, translate, watch


class BrokerService:
    """The Broker service; each method is an rpc."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._topics = Topics(broker)
        self._schemas = Schemas(broker)

    async def lookup(self, request: wire.LookupRequest, context: CallContext) -> wire.LookupReply:
        return _owner(await self._topics.lookup(TopicName.parse(request.topic), request.listener))

    async def partitions(self, request: wire.PartitionsRequest, context: CallContext) -> wire.PartitionsReply:
        found = await self._topics.partitions(TopicName.parse(request.topic), create=request.create)
        owner = _owner(found.owner) if found.owner is not None else None
        return wire.PartitionsReply(partitions=found.count, owner=owner)

    async def connect(self, stream: connection.Connects, context: CallContext) -> None:
        await connection.serve(self._broker, stream, context)

    async def read(self, stream: read.Reads, context: CallContext) -> None:
        await read.serve(self._broker, stream, context)

    async def watch_topics(self, stream: watch.Watches, context: CallContext) -> None:
        await watch.serve(self._topics, stream, context)

    async def offsets(self, request: wire.OffsetsRequest, context: CallContext) -> wire.OffsetsReply:
        name = TopicName.parse(request.topic)
        range_ = request.aborted_first, request.aborted_end
        found = await self._topics.offsets(
            name, request.publish_times_ms, request.subscription, range_, request.incarnation
        )
        return wire.OffsetsReply(
            earliest_index=found.earliest, end_index=found.end, by_time=found.by_time, bytes=found.size,
            subscription_index=found.subscription, aborted=found.aborted, incarnation=found.incarnation,
        )  # fmt: skip

    async def advance_subscription(
        self, request: wire.AdvanceSubscriptionRequest, context: CallContext
    ) -> wire.Empty:
        name = TopicName.parse(request.topic)
        await self._topics.advance(name, request.subscription, request.index, request.incarnation)
        return wire.Empty()


    async def get_schema(self, request: wire.GetSchemaRequest, context: CallContext) -> wire.SchemaReply:
        version = version_of(request.version)
        if request.version and version is None:
            raise InvalidRequest(f"a schema version of {len(request.version)} bytes; it has 8")
        found = await self._schemas.get(TopicName.parse(request.topic), version, request.incarnation)
        return translate.schema_reply(found)


def _owner(owner: Owner) -> wire.LookupReply:
    return wire.LookupReply(owner=owner.endpoint, here=owner.here)
