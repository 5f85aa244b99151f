"""Commands with any values in any order: what a stranger sends ends its own connection at most, and holds nothing."""

import asyncio
import contextlib
import logging
import random
import struct
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from magnetar.broker.pulsar.frames import encode_frame
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry import encode_client_part
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.network import Endpoint, World
from tests.broker.pulsar.raw import Closed, Raw, T, simulate

COMMANDS = 150
NUMBERS = (0, 1, 1, 2, 3, 100, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)
TEXTS = (T, T, "persistent://public/default/t2-partition-0", "non-persistent://public/default/n", "s", "", "é\0/")
COMMON = ("producer", "subscribe", "send", "send", "flow", "flow", "ack", "ack", "seek", "close_consumer", "lookup")


def filled(message: Any, rng: random.Random, depth: int = 0) -> Any:
    """Each field has a value of its type, or none."""
    for field in message.DESCRIPTOR.fields:
        if not field.is_required and rng.random() < 0.4:
            continue
        for _ in range(rng.choice((0, 1, 3)) if field.is_repeated else 1):
            _fill(message, field, rng, depth)
    return message


def _fill(message: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    if field.message_type is not None:
        if depth < 3:
            inner = getattr(message, field.name)
            filled(inner.add() if field.is_repeated else inner, rng, depth + 1)
            if not field.is_repeated:
                inner.SetInParent()
        return
    if field.type == FieldDescriptor.TYPE_STRING:
        value: Any = rng.choice(TEXTS)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        value = rng.randbytes(rng.choice((0, 8, 20)))
    elif field.type == FieldDescriptor.TYPE_BOOL:
        value = rng.random() < 0.5
    elif field.enum_type is not None:
        value = rng.choice(field.enum_type.values).number
    else:
        bits = 64 if "64" in field.camelcase_name or field.cpp_type in (2, 4) else 32
        signed = field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
        value = rng.choice(NUMBERS) & ((1 << (bits - signed)) - 1)
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            value = float(value)
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def command(rng: random.Random) -> bytes:
    kinds = [field.name for field in pulsar.BaseCommand.DESCRIPTOR.fields if field.message_type is not None]
    kind = rng.choice(COMMON) if rng.random() < 0.8 else rng.choice(kinds)
    made = pulsar.BaseCommand()
    inner = filled(getattr(made, kind), rng)
    if kind in ("producer", "send", "close_producer"):
        inner.producer_id = rng.choice((1, 1, 2))
    elif hasattr(inner, "consumer_id"):
        inner.consumer_id = rng.choice((1, 1, 2))
    with contextlib.suppress(ValueError):
        data = encode_frame(**{kind: inner})
        if kind == "send":
            metadata = MessageMetadata(producer_name="p", sequence_id=inner.sequence_id, publish_time=1)
            entry = (
                encode_client_part(metadata, b"payload")
                if rng.random() < 0.7
                else rng.randbytes(rng.choice((0, 5, 40)))
            )
            data = struct.pack(">I", len(data) - 4 + len(entry)) + data[4:] + entry
        return data if rng.random() < 0.98 else data[: rng.randrange(4, len(data))] + bytes(4)
    return encode_frame(ping=pulsar.CommandPing())


@pytest.mark.parametrize("seed", range(12))
def test_any_commands_leave_the_other_connections_alone_and_nothing_behind(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    sent = 0

    async def scenario(world: World, endpoint: Endpoint) -> None:
        nonlocal sent
        other = await Raw.connected(world, endpoint)
        await other.open_producer(9, topic=f"{T}-other")
        await other.subscribe(9, topic=f"{T}-other")
        while sent < COMMANDS:
            stranger = await Raw.connected(world, endpoint)
            ended = asyncio.ensure_future(stranger.ended())
            while sent < COMMANDS and not ended.done():
                stranger.stream.write_nowait(command(rng))
                sent += 1
                await asyncio.sleep(rng.choice((0, 0, 0.01)))
            await stranger.stream.close()
            with contextlib.suppress(Closed, ConnectionLost):
                await ended
        other.publish(0, b"still here", 9)
        await other.next("send_receipt")
        assert (await other.next_with_rest("message"))[1].endswith(b"still here")
        await other.stream.close()
        await asyncio.sleep(60)

    with caplog.at_level(logging.WARNING):
        broker = simulate(scenario, seed=seed)
    faults = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not faults, faults
    memory = broker.topic_manager.memory
    assert (memory.requests.held, memory.answers.held) == (0, 0)
