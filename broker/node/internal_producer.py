"""Publishing to a topic of any broker, over the wire that clients use: for messages that a broker itself publishes.

One call is one producer: look-up, open, publish, receipts, end. It returns when everything is stored, and raises when
something may not be; then all of it is to be published again, under the same names and sequence ids. What a copy of a
message says beside the message has room beside `max_message_bytes`. The code of a producer is loaded by the first call.
Guarding tests: tests/broker/subscription/test_dead_letters.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ...proto import wire_pb2 as wire
from ...proto.entry import parse_header
from ...proto.errors import IncompatibleSchema, SchemaNotFound, TimedOut, TopicNotFound
from ...proto.names import Position, TopicName
from ...runtime.network import Channel, Endpoint, rpc
from ...runtime.world import World

_LOG = logging.getLogger("magnetar.broker.node.internal_producer")

TIMEOUT_S = 30.0
AT_ONCE = 16
"""Producers at a time: dead letters are rare, and must not take the broker from its clients."""


class InternalProducer:
    """Publishes for a broker. `endpoint`: where this broker listens; it answers look-ups like any other."""

    def __init__(self, world: World, endpoint: Callable[[], str]) -> None:
        self._world = world
        self._endpoint = endpoint
        self._room = asyncio.Semaphore(AT_ONCE)

    async def publish(
        self, topic: TopicName, producer_name: str, client_parts: Sequence[bytes], spread: int,
        *, schema_version: bytes = b"", written_for: tuple[TopicName, int] | None = None,
    ) -> list[Position | None]:  # fmt: skip
        """Publishes entries; returns where each is stored. `spread`: any number; chooses the partition of a partitioned
        topic. `schema_version`: of their schema, which the topic has, or the one that they were `written_for`, made
        then; empty: none."""
        async with self._room:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    schema = await self._schema(*(written_for or (topic, 0)), schema_version)
                    return await self._publish(topic, producer_name, client_parts, spread, schema)
            except TimeoutError as error:
                raise TimedOut(f"{topic}: not published within {TIMEOUT_S} s") from error

    async def copy(
        self, source: tuple[TopicName, int], topic: TopicName, producer_name: str, client_parts: Sequence[bytes],
        spread: int,
    ) -> list[Position | None]:  # fmt: skip
        """Publishes, like `publish`, copies of messages of the topic `source`, made then, which all name one version of
        its schemas. It is registered for `topic`, and they name its number there; where it is refused, or gone, they
        name none."""
        version = parse_header(client_parts[0]).metadata.schema_version if client_parts else b""
        if version:
            try:
                return await self.publish(
                    topic, producer_name, client_parts, spread, schema_version=version, written_for=source
                )
            except (IncompatibleSchema, SchemaNotFound, TopicNotFound) as error:
                _LOG.warning("%s: copies of messages of %s name no schema: %s", topic, source[0], error)
            from .one_producer import of_schema  # it was loaded by the first try

            client_parts = [of_schema(part, b"") for part in client_parts]
        return await self.publish(topic, producer_name, client_parts, spread)

    async def _schema(self, topic: TopicName, incarnation: int, version: bytes) -> wire.SchemaInfo | None:
        if not version:
            return None
        me = self._world.network.connect(Endpoint.parse(self._endpoint()))
        try:
            wanted = wire.GetSchemaRequest(topic=topic.full, version=version, incarnation=incarnation)
            found: wire.SchemaReply = await me.call(rpc("Broker", "GetSchema"), wanted, timeout_s=TIMEOUT_S)
        finally:
            await me.close()
        return found.schema

    async def _publish(
        self, topic: TopicName, name: str, client_parts: Sequence[bytes], spread: int, schema: wire.SchemaInfo | None
    ) -> list[Position | None]:
        await self._world.workers.load(f"{__package__}.one_producer")
        from .one_producer import send

        me = self._world.network.connect(Endpoint.parse(self._endpoint()))
        owner: Channel | None = None
        try:
            asked = wire.PartitionsRequest(topic=topic.full, create=True)
            found = await me.call(rpc("Broker", "Partitions"), asked, timeout_s=TIMEOUT_S)
            if found.partitions:
                topic = topic.with_partition(spread % found.partitions)
            there = await me.call(rpc("Broker", "Lookup"), wire.LookupRequest(topic=topic.full), timeout_s=TIMEOUT_S)
            if not there.here:
                owner = self._world.network.connect(Endpoint.parse(there.owner))
            opening = wire.OpenProducer(topic=topic.full, producer_name=name, instance=name, copies=True)
            if schema is not None:
                opening.schema.CopyFrom(schema)
            return await send(self._world, owner or me, opening, client_parts)
        finally:
            await me.close()
            if owner is not None:
                await owner.close()
