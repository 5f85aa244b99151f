"""Publishing to a topic of any broker, over the wire that clients use: for messages that a broker itself publishes.

One call is one producer: look-up, open, publish, receipts, end. It returns when everything is stored, and raises when
something may not be; then all of it is to be published again, under the same names and sequence ids.
Guarding tests: tests/broker/subscription/test_dead_letters.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from ...client.core.backoff import Backoff
from ...client.core.effects import (
    Connect,
    Finished,
    Leave,
    ProducerEffect,
    ProducerOptions,
    Publish,
    Settle,
)
from ...client.core.producer import ProducerCore
from ...proto import wire_pb2 as wire
from ...proto.entry import parse_header
from ...proto.errors import ConnectionLost, TimedOut, from_wire
from ...proto.names import Position, TopicName
from ...runtime.network import Channel, EndOfStream, Endpoint, Stream, rpc
from ...runtime.world import World

TIMEOUT_S = 30.0
_ID = 1
"""Of the only producer on its stream."""
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
            opening = wire.OpenProducer(topic=topic.full, producer_name=name, instance=name)
            if schema_version:
                wanted = wire.GetSchemaRequest(topic=topic.full, version=schema_version)
                found_schema = await me.call(rpc("Broker", "GetSchema"), wanted, timeout_s=TIMEOUT_S)
                opening.schema.CopyFrom(found_schema.schema)
            return await self._send(owner or me, opening, client_parts)
        finally:
            await me.close()
            if owner is not None:
                await owner.close()

    async def _send(
        self, channel: Channel, opening: wire.OpenProducer, client_parts: Sequence[bytes]
    ) -> list[Position | None]:
        """One attempt. An error that may pass is the caller's to retry: the connection is not opened twice."""
        outcomes: list[Position | None] = []
        topic, name = opening.topic, opening.producer_name
        core = ProducerCore(
            name, ProducerOptions(send_timeout_s=0.0), max_pending=len(client_parts), lock=nullcontext(),
            backoff=Backoff(self._world.rng),
        )  # fmt: skip
        for part in client_parts:
            core.add_entry(part, parse_header(part).sequence_id, lambda _, place: outcomes.append(place))
        stream = channel.stream(rpc("Broker", "Connect"))
        try:
            stream.send_nowait(wire.ClientFrame(id=_ID, open_producer=opening))
            while len(outcomes) < len(client_parts):
                try:
                    frames = await stream.receive()
                except EndOfStream as error:
                    raise ConnectionLost(f"{topic}: the broker ended the stream") from error
                for frame in frames:
                    for effect in self._facts(core, frame):
                        _do(effect, stream)
        finally:
            stream.cancel()
        return outcomes

    def _facts(self, core: ProducerCore, frame: wire.ServerFrame) -> list[ProducerEffect]:
        now, wall_ms = self._world.clock.monotonic(), self._world.clock.wall_ms()
        match frame.WhichOneof("kind"):
            case "producer_opened":
                opened = frame.producer_opened
                return core.opened(
                    opened.producer_name, opened.last_sequence_id, opened.max_message_size, opened.credit,
                    opened.topic_epoch, now, wall_ms,
                )  # fmt: skip
            case "receipt":
                return core.receipt(
                    frame.receipt.sequence_id, frame.receipt.ledger_id, frame.receipt.entry_id, now
                )
            case "credit":
                return core.credit(frame.credit)
            case "failed":
                raise from_wire(frame.failed.error)
            case "closed":
                raise from_wire(frame.closed)
            case kind:
                raise ConnectionLost(f"a producer received {kind}")


def _do(effect: ProducerEffect, stream: Stream[Any, Any]) -> None:
    match effect:
        case Publish(entry):
            stream.send_nowait(wire.ClientFrame(id=_ID, publish=entry))
        case Settle(batch, None, ledger_id, entry_id):
            for callback in batch.callbacks:
                if callback is not None:
                    callback(None, Position(ledger_id, entry_id))
        case Settle(_, error) | Finished(error) if error is not None:
            raise error
        case Leave() | Connect():
            raise ConnectionLost("the producer lost its connection")
