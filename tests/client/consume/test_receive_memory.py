"""The joint bound of all receiver queues: kept, shared, and never a reason to wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.receive_memory import MESSAGE_OVERHEAD, Claim, ReceiveMemory
from magnetar.client.model.settings import InitialPosition
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

LIMIT = 1 << 20
PAYLOAD = b"x" * 4096


async def backlog(client: Client, topic: str, count: int) -> None:
    producer = await client.create_producer(topic, batching_enabled=False, block_if_queue_full=True)
    await producer.send_many([PAYLOAD] * count)
    await producer.close()


def waiting_bytes(consumers: list[Any]) -> int:
    return sum(len(message.payload) + MESSAGE_OVERHEAD for each in consumers for message in each.inbox.messages)


def test_consumers_that_never_read_keep_below_the_limit_together_and_one_that_reads_gets_all() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
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

    simulate(body, memory_limit_bytes=LIMIT)


@pytest.mark.parametrize("limit", [0, 64 << 20])
def test_far_below_the_limit_a_queue_holds_what_it_may(limit: int) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        await backlog(client, "t", 1200)
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
        await asyncio.sleep(5)
        assert len(consumer.inbox) == 1000
        consumer.check()

    simulate(body, memory_limit_bytes=limit)


def test_a_limit_below_one_message_lets_them_through_one_by_one() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        await backlog(client, "t", 50)
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
        for _ in range(50):
            await asyncio.sleep(0.1)
            assert len(consumer.inbox) == 1
            await consumer.receive(5000)

    simulate(body, memory_limit_bytes=1)


def test_those_who_read_come_to_equal_shares() -> None:
    memory = ReceiveMemory(LIMIT)
    claims = [Claim(memory, 1000) for _ in range(7)]
    for _ in range(200):
        for claim in claims:
            claim.came(4096 * 10, 10, claim.window)
    shares = [claim.window * (4096 + MESSAGE_OVERHEAD) for claim in claims]
    assert sum(shares) <= LIMIT
    assert max(shares) <= 2.5 * min(shares)
