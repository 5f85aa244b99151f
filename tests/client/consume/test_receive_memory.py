"""The joint bound of all receiver queues: kept, shared, and never a reason to wait."""

import asyncio
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.rate_limits import MESSAGE_OVERHEAD_BYTES, ReceiveMemoryClaim, ReceiveMemoryLimit
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import CompressionType, ConsumerType, InitialPosition
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

LIMIT = 1 << 20
PAYLOAD = b"x" * 4096


async def backlog(client: Client, topic: str, count: int) -> None:
    producer = await client.create_producer(topic, batching_enabled=False, block_if_queue_full=True)
    await producer.send_many([PAYLOAD] * count)
    await producer.close()


def waiting_bytes(consumers: list[Any]) -> int:
    return sum(len(message.payload) + MESSAGE_OVERHEAD_BYTES for each in consumers for message in each.inbox.messages)


@pytest.mark.run_by(simulate, memory_limit_bytes=LIMIT)
async def test_consumers_that_never_read_keep_below_the_limit_together_and_one_that_reads_gets_all(
    client: Client, broker: FakeBroker, /
) -> None:
    for i in range(20):
        await backlog(client, f"t{i}", 300)
    consumers = [
        await client.subscribe(f"t{i}", "s", initial_position=InitialPosition.Earliest) for i in range(20)
    ]
    await asyncio.sleep(5)
    assert LIMIT / 2 < waiting_bytes(consumers) < LIMIT + 20 * 4600
    assert all(len(each.inbox) for each in consumers), "each has one entry at least"
    last = consumers[-1]
    for _ in range(300):
        await last.acknowledge(await last.receive(5000))
    assert waiting_bytes(consumers) < LIMIT + 20 * 4600
    for each in consumers[:-1]:
        for _ in range(300):
            await each.acknowledge(await each.receive(5000))
    for each in consumers:
        each.check()
    assert client.connections.memory.claimed_bytes < LIMIT * 1.1
    await asyncio.gather(*(each.close() for each in consumers))
    assert round(client.connections.memory.claimed_bytes) == 0


TALL = bytes(4 << 20)
"""A few hundred bytes, compressed."""
ROOM = 16 << 20


async def tall_backlog(client: Client, topic: str, count: int) -> None:
    producer = await client.create_producer(topic, batching_enabled=False, compression_type=CompressionType.ZSTD)
    for number in range(count):
        await producer.send(TALL, properties={"n": str(number)})
    await producer.close()


@pytest.mark.parametrize("kind", [ConsumerType.Exclusive, ConsumerType.Shared])
@pytest.mark.run_by(simulate, memory_limit_bytes=ROOM)
async def test_what_unfolds_to_a_thousand_times_its_size_stays_below_the_limit_and_in_order(
    client: Client, broker: FakeBroker, /, kind: ConsumerType
) -> None:
    consumers = []
    for topic in ("a", "b", "c"):
        await tall_backlog(client, topic, 30)
        consumers.append(
            await client.subscribe(topic, "s", kind, initial_position=InitialPosition.Earliest)
        )
    await asyncio.sleep(5)
    assert waiting_bytes(consumers) <= ROOM + 3 * len(TALL)
    assert all(len(each.inbox) for each in consumers), "each has one at least"
    for each in consumers:
        for number in range(30):
            message = await each.receive(5000)
            assert message.properties() == {"n": str(number)}
            assert len(message.data()) == len(TALL)
            assert waiting_bytes(consumers) <= ROOM + 3 * len(TALL)
            await each.acknowledge(message)
        each.check()
    await asyncio.sleep(1)
    assert client.connections.memory.decompressed_bytes == 0


def test_what_waits_folded_comes_again_after_everything_that_brings_it_again() -> None:
    """A lost connection, a seek, and what is asked for again."""

    async def body(client: Client, broker: FakeBroker) -> None:
        await tall_backlog(client, "t", 12)
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)

        async def reads_all() -> None:
            for number in range(12):
                assert (await consumer.receive(60_000)).properties() == {"n": str(number)}
            assert client.connections.memory.decompressed_bytes <= len(TALL)
            consumer.check()

        await asyncio.sleep(2)
        broker.cut()
        await reads_all()
        await consumer.seek(MessageId.earliest)
        await asyncio.sleep(2)
        consumer.redeliver_unacknowledged_messages()
        await reads_all()
        await consumer.close()
        assert client.connections.memory.decompressed_bytes == 0

    simulate(body, memory_limit_bytes=len(TALL))


@pytest.mark.parametrize("limit", [0, 64 << 20])
def test_far_below_the_limit_a_queue_holds_what_it_may(limit: int) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        await backlog(client, "t", 1200)
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
        await asyncio.sleep(5)
        assert len(consumer.inbox) == 1000
        consumer.check()

    simulate(body, memory_limit_bytes=limit)


@pytest.mark.run_by(simulate, memory_limit_bytes=1)
async def test_a_limit_below_one_message_lets_them_through_one_by_one(client: Client, broker: FakeBroker, /) -> None:
    await backlog(client, "t", 50)
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    for _ in range(50):
        await asyncio.sleep(0.1)
        assert len(consumer.inbox) == 1
        await consumer.receive(5000)


def test_those_who_read_come_to_equal_shares() -> None:
    memory = ReceiveMemoryLimit(LIMIT)
    claims = [ReceiveMemoryClaim(memory, 1000) for _ in range(7)]
    for _ in range(200):
        for claim in claims:
            claim.count_received(4096 * 10, 10, claim.window)
    shares = [claim.window * (4096 + MESSAGE_OVERHEAD_BYTES) for claim in claims]
    assert sum(shares) <= LIMIT
    assert max(shares) <= 2.5 * min(shares)
