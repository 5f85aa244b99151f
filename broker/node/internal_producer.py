"""Publishing to a topic of any broker, over the wire that clients use: for messages that a broker itself publishes.

One call is one producer: look-up, open, publish, receipts, end. It returns when everything is stored, and raises when
something may not be; then all of it is to be published again, under the same names and sequence ids. What a copy of a
message says beside the message has room beside `max_message_bytes`. The code of a producer is loaded by the first call.
Guarding tests: tests/broker/subscription/test_dead_letters.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...proto import wire_pb2 as wire
from ...proto.errors import TimedOut
from ...proto.names import Position, TopicName
from ...runtime.network import Channel, Endpoint, rpc
from ...runtime.world import World

TIMEOUT_S = 30.0
AT_ONCE = 16
"""Producers at a time: dead letters are rare, and must not take the broker from its clients."""


class InternalProducer:
    """`endpoint`: where this broker listens; it answers look-ups like any other."""

    def __init__(self, world: World, endpoint: Callable[[], str]) -> None:
        self._world = world
        self._endpoint = endpoint
        self._room = asyncio.Semaphore(AT_ONCE)

    async def publish(
        self, topic: TopicName, producer_name: str, client_parts: Sequence[bytes], spread: int,
        *, schema_version: bytes = b"",
    ) -> list[Position | None]:  # fmt: skip
        """Where each is stored. `spread`: any number; chooses the partition of a partitioned topic. `schema_version`:
        of their schema, which the topic has; empty: none."""
        async with self._room:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await self._publish(topic, producer_name, client_parts, spread, schema_version)
            except TimeoutError as error:
                raise TimedOut(f"{topic}: not published within {TIMEOUT_S} s") from error

    async def _publish(
        self, topic: TopicName, name: str, client_parts: Sequence[bytes], spread: int, schema_version: bytes
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
            if schema_version:
                wanted = wire.GetSchemaRequest(topic=topic.full, version=schema_version)
                found_schema = await me.call(rpc("Broker", "GetSchema"), wanted, timeout_s=TIMEOUT_S)
                opening.schema.CopyFrom(found_schema.schema)
            return await send(self._world, owner or me, opening, client_parts)
        finally:
            await me.close()
            if owner is not None:
                await owner.close()
