"""The schemas with which messages were written, by the version that each message names.

    writers = WriterSchemas(connections, partition, incarnation)        of a topic and all its partitions
    await writers.fetch(version)                       asked of a broker once
    info = writers.of(version)                         from any thread but the event loop it may ask as well

What a version means never changes while its topic lasts: one that is deleted and made anew numbers its own, and has
writers of its own. These go on with what they know, and the broker tells them nothing more (`incarnation`). A version
that the broker does not have is asked for again after MISSING_S.
"""

from __future__ import annotations

import asyncio

from ...proto import wire_pb2 as wire
from ...proto.errors import NotFound
from ...proto.names import TopicName
from ...proto.schema import BYTES_VERSION, SchemaInfo, SchemaType, version_of
from ..common.errors import InvalidMessage
from .connections import Connections

NEWEST = b""
MISSING_S = 10.0
MISSING_MAX = 1000
"""Versions that were invented; a producer may stamp any."""


class WriterSchemas:
    """The schemas of one topic, by their version."""

    def __init__(self, connections: Connections, topic: TopicName, incarnation: int = 0) -> None:
        """Makes an empty cache. `incarnation`: of `topic`, which may be a partition; 0: the present one."""
        self._connections = connections
        self._topic = topic
        self._incarnation = incarnation
        self._loop = asyncio.get_running_loop()
        self._now = connections.world.clock.monotonic
        self._known: dict[bytes, SchemaInfo] = {}
        self._missing: dict[bytes, float] = {}  # until when

    def knows(self, version: bytes) -> bool:
        return version in self._known or self._missing.get(version, 0.0) > self._now()

    async def fetch(self, version: bytes) -> None:
        """Fetches a schema. Empty: the newest. Raises what the broker answers; that there is none is kept, and told by
        `of`."""
        if self.knows(version):
            return
        if version == BYTES_VERSION:
            self._known[version] = SchemaInfo(type=SchemaType.NONE)
            return
        request = wire.GetSchemaRequest(topic=self._topic.full, version=version, incarnation=self._incarnation)
        try:
            found: wire.SchemaReply = await self._connections.ask("GetSchema", request)
        except NotFound:
            if len(self._missing) >= MISSING_MAX:
                self._missing.clear()
            self._missing[version] = self._now() + MISSING_S
            return
        info = found.schema
        self._known[version] = SchemaInfo(
            type=SchemaType(info.type), data=info.data, name=info.name, properties=dict(info.properties)
        )

    def has(self, version: bytes) -> SchemaInfo | None:
        """Returns a schema that was fetched. None: the topic has no such schema."""
        return self._known.get(version)

    def of(self, version: bytes) -> SchemaInfo:
        """Returns the schema of a version. InvalidMessage: the topic has no such schema. Raises what the broker
        answers."""
        if not self.knows(version):
            self._ask(version)
        found = self._known.get(version)
        if found is None:
            number = version_of(version)
            what = "no schema" if number is None else f"no schema version {number}, which the message names"
            raise InvalidMessage(f"topic {self._topic.base} has {what}")
        return found

    def _ask(self, version: bytes) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            raise InvalidMessage(f"the schema of the message is not known yet: await fetch({version!r}) first")
        asyncio.run_coroutine_threadsafe(self.fetch(version), self._loop).result()
