"""Seeking and resetting: where a subscription begins again, and that nothing comes from there before it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InvalidRequest, Unavailable
from tests.broker.cluster import TestConsumer, cluster
from tests.broker.test_services import EARLIEST, TOPIC, House

LONG_MAX = (1 << 63) - 1
LATEST = wire.MessageId(ledger_id=LONG_MAX, entry_id=LONG_MAX, partition=-1, batch_index=-1)
FIRST = wire.MessageId(ledger_id=-1, entry_id=-1, partition=-1, batch_index=-1)
TYPES = {"exclusive": wire.Subscribe.EXCLUSIVE, "shared": wire.Subscribe.SHARED}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with cluster(tmp_path) as running:
        house = House(running)
        yield house
        await house.channel.close()


# ------------------------------------------------------------------------------------------------ latest
async def _next(house: House, consumer: TestConsumer, producer: Any) -> bytes:
    await producer.send(b"next")
    return (await consumer.receive_payloads(1))[0]


async def test_after_a_seek_to_latest_the_next_message_comes_first(house: House) -> None:
    producer, consumer = await house.filled(3), await house.consumer(initial_position=EARLIEST)
    await consumer.receive_payloads(3)
    consumer.requests = 1
    await consumer.ask(seek=wire.Seek(request_id=1, message_id=LATEST))
    assert await _next(house, consumer, producer) == b"next"


async def test_after_a_readers_seek_to_latest_the_next_message_comes_first(house: House) -> None:
    producer, reader = await house.filled(3), await house.consumer(durable=False, start=FIRST)
    await reader.receive_payloads(3)
    reader.requests = 1
    await reader.ask(seek=wire.Seek(request_id=1, message_id=LATEST))
    assert await _next(house, reader, producer) == b"next"


async def test_a_subscription_that_is_reset_to_latest_or_made_there_begins_with_the_next_message(house: House) -> None:
    producer = await house.filled(3)
    await (await house.consumer(initial_position=EARLIEST)).close()
    reset = wire.ResetSubscriptionRequest(topic=TOPIC, name="s", message_id=LATEST)
    await house.admin("ResetSubscription", reset)
    await house.admin("CreateSubscription", wire.SubscriptionSpec(topic=TOPIC, name="made", position=LATEST))
    of_both = [await house.consumer(subscription=name) for name in ("s", "made")]
    await producer.send(b"next")
    assert [await each.receive_payloads(1) for each in of_both] == [[b"next"], [b"next"]]


async def test_a_reader_opened_at_latest_inclusive_begins_with_the_last_message(house: House) -> None:
    await house.filled(3)
    reader = await house.consumer(durable=False, start=LATEST, start_inclusive=True)
    assert await reader.receive_payloads(1) == [b"2"]
