"""Publishing to a topic of any broker, over the wire that clients use: for what a broker itself has to tell a topic.

One call is one producer: look-up, open, publish, receipts, end. It returns when everything is stored, and raises when
something may not be; then all of it is to be published again, under the same names and sequence ids.
Guarding tests: tests/broker/subscription/test_dead_letters.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, TimedOut, from_wire
from ...proto.model import ENTRY_COST_BYTES
from ...proto.names import TopicName
from ...runtime.network import Channel, EndOfStream, Endpoint, rpc
from ...runtime.world import World

TIMEOUT_S = 30.0
AT_ONCE = 16
"""Producers at a time: dead letters are rare, and must not take the broker from its clients."""


class Outgoing:
    """`endpoint`: where this broker listens; it answers look-ups like any other."""

    def __init__(self, world: World, endpoint: Callable[[], str]) -> None:
        self._world = world
        self._endpoint = endpoint
        self._room = asyncio.Semaphore(AT_ONCE)

    async def publish(self, topic: TopicName, producer_name: str, client_parts: Sequence[bytes], spread: int) -> None:
        """`spread`: any number; chooses the partition of a partitioned topic."""
        async with self._room:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._publish(topic, producer_name, client_parts, spread)
            except TimeoutError as error:
                raise TimedOut(f"{topic}: not published within {TIMEOUT_S} s") from error

    async def _publish(self, topic: TopicName, name: str, client_parts: Sequence[bytes], spread: int) -> None:
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
            await self._send(owner or me, topic, name, client_parts)
        finally:
            await me.close()
            if owner is not None:
                await owner.close()

    @staticmethod
    async def _send(channel: Channel, topic: TopicName, name: str, client_parts: Sequence[bytes]) -> None:
        stream = channel.stream(rpc("Broker", "Connect"))
        try:
            opening = wire.OpenProducer(topic=topic.full, producer_name=name, instance=name)
            stream.send_nowait(wire.ClientFrame(id=1, open_producer=opening))
            waiting, stored, credit = deque(client_parts), 0, 0
            while stored < len(client_parts):
                try:
                    frames = await stream.receive()
                except EndOfStream as error:
                    raise ConnectionLost(f"{topic}: the broker ended the stream") from error
                for frame in frames:
                    kind = frame.WhichOneof("kind")
                    if kind in ("failed", "closed"):
                        raise from_wire(frame.failed.error if kind == "failed" else frame.closed)
                    stored += kind == "receipt"
                    credit += frame.producer_opened.credit + frame.credit
                while waiting and credit > 0:
                    client_part = waiting.popleft()
                    credit -= len(client_part) + ENTRY_COST_BYTES
                    stream.send_nowait(wire.ClientFrame(id=1, publish=client_part))
        finally:
            stream.cancel()
