"""The part of the Admin service that is about schemas: translates and calls; decides nothing."""

from __future__ import annotations

from ....proto import wire_pb2 as wire
from ....proto.names import TopicName
from ....proto.schema import version_bytes
from ....proto.statistics import SchemaTest
from ....runtime.network import CallContext
from ...session.schemas import Schemas
from . import translate


class SchemaService:
    """The rpcs of Admin about schemas."""

    _schemas: Schemas

    async def list_schemas(self, request: wire.Name, context: CallContext) -> wire.SchemasReply:
        found = await self._schemas.all(TopicName.parse(request.name))
        return wire.SchemasReply(schemas=map(translate.schema_reply, found))

    async def put_schema(self, request: wire.SchemaRequest, context: CallContext) -> wire.SchemaReply:
        topic, info = TopicName.parse(request.topic), translate.schema(request.schema)
        version = await self._schemas.put(topic, info, context.principal.name)
        return wire.SchemaReply(version=version_bytes(version))

    async def find_schema(self, request: wire.SchemaRequest, context: CallContext) -> wire.SchemaReply:
        topic, info = TopicName.parse(request.topic), translate.schema(request.schema)
        return wire.SchemaReply(version=version_bytes(await self._schemas.find(topic, info)))

    async def test_schema(self, request: wire.SchemaRequest, context: CallContext) -> SchemaTest:
        topic, info = TopicName.parse(request.topic), translate.schema(request.schema)
        found = await self._schemas.test(topic, info)
        return SchemaTest(found.refused, found.compatibility)

    async def delete_schema(self, request: wire.DeleteRequest, context: CallContext) -> wire.SchemaReply:
        deleted = await self._schemas.delete(TopicName.parse(request.name), force=request.force)
        return wire.SchemaReply(version=version_bytes(deleted))
