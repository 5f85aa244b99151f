"""`memory_limit_bytes`: what producers have pending and receiver queues hold is bounded together, and nothing hangs."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import MemoryBufferIsFull, Result
from magnetar.client.common.rate_limits import ReceiveMemoryClaim, ReceiveMemoryLimit, SendMemoryLimit
from magnetar.client.model.settings import InitialPosition
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

LIMIT = 100_000
PAYLOAD = bytes(10_000)


@pytest.mark.run_by(simulate, memory_limit_bytes=LIMIT)
async def test_messages_past_the_limit_are_refused_and_each_outcome_gives_its_bytes_back(
    client: Client, broker: FakeBroker, /
) -> None:
    memory = client.connections.send_memory
    assert memory is not None
    producers = [await client.create_producer(f"t{n}", batching_enabled=n == 1) for n in range(2)]
    outcomes: list[Result] = []
    for number in range(10):
        producers[number % 2].send_nowait(PAYLOAD, lambda result, _: outcomes.append(result))
    with pytest.raises(MemoryBufferIsFull, match="100000 bytes"):
        producers[0].send_nowait(b"x")
    with pytest.raises(MemoryBufferIsFull):
        producers[1].send_nowait(b"x", partition_key="k")
    for each in producers:
        await each.flush()
    assert outcomes == [Result.Ok] * 10
    assert memory.reserved_bytes == 0
    await producers[0].send(bytes(3 * LIMIT))
    for each in producers:
        each.check()


def test_with_block_if_queue_full_senders_of_all_producers_wait_and_all_is_sent() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        memory = client.connections.send_memory
        assert memory is not None
        producers = [
            await client.create_producer(f"t{number}", batching_enabled=number > 1, block_if_queue_full=True)
            for number in range(4)
        ]
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, memory.reserved_bytes)
                await asyncio.sleep(0.0005)

        watching = asyncio.create_task(watch())
        sent = await asyncio.gather(*(each.send_many([PAYLOAD] * 50) for each in producers))
        watching.cancel()
        assert [len(ids) for ids in sent] == [50] * 4
        assert LIMIT / 2 < most <= LIMIT
        assert memory.reserved_bytes == 0

    simulate(body, memory_limit_bytes=LIMIT)


@pytest.mark.run_by(simulate, memory_limit_bytes=LIMIT)
async def test_a_producer_that_is_closed_or_times_out_keeps_nothing(client: Client, broker: FakeBroker, /) -> None:
    memory = client.connections.send_memory
    assert memory is not None
    producer = await client.create_producer("t", send_timeout_millis=1000, batching_enabled=True,
                                            batching_max_publish_delay_ms=10_000)  # fmt: skip
    for _ in range(3):
        producer.send_nowait(PAYLOAD)
    with pytest.raises(TypeError):
        producer.send_nowait(PAYLOAD, properties={"a": 1})  # type: ignore[dict-item]
    assert memory.reserved_bytes == 3 * len(PAYLOAD)
    producer.abort()
    assert memory.reserved_bytes == 0


@pytest.mark.parametrize("limit", [None, 0])
def test_without_a_limit_messages_alone_are_bounded_as_in_pulsars_client(limit: int | None) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t")
        for _ in range(200):
            producer.send_nowait(bytes(1 << 20))
        await producer.flush()
        assert client.connections.send_memory is None
        assert client.connections.memory.limit_bytes == (64 << 20 if limit is None else 0)

    simulate(body, memory_limit_bytes=limit)


def test_producers_and_receiver_queues_use_what_the_others_do_not_and_half_at_least() -> None:
    send, receive = SendMemoryLimit(1000), ReceiveMemoryLimit(1000)
    send.claimed, receive.producers = lambda: receive.claimed_bytes, send
    assert send.reserve(1000), "nothing waits in a queue"
    assert not send.reserve(1)
    assert receive.compute_window_messages(0.0, 1.0, 1000) == 250, "half of the half that is theirs, for one of them"
    receive.claimed_bytes = 900.0
    assert send.current_limit_bytes == 500
    send.release(600)
    assert send.reserve(100)
    assert not send.reserve(1)
    receive.claimed_bytes = 0.0
    assert send.reserve(500)
    send.release(1000)
    assert send.reserve(5000), "one is taken when nothing is pending"
    assert ReceiveMemoryClaim(receive, 1000).window >= 1


@pytest.mark.run_by(simulate, memory_limit_bytes=LIMIT)
async def test_a_consumer_beside_a_producer_that_fills_its_part_receives_all(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t", block_if_queue_full=True)
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    sending = asyncio.create_task(producer.send_many([PAYLOAD] * 100))
    for _ in range(100):
        await consumer.acknowledge(await consumer.receive(5000))
    await sending


def test_who_begins_to_wait_while_others_are_told_is_not_forgotten() -> None:
    memory, told = SendMemoryLimit(1), threading.Event()
    assert memory.reserve(1)
    freeing = threading.Thread(target=memory.release, args=(1,))

    class Late(deque[Callable[[], object]]):
        """Another thread frees between the look at the queue and the append."""

        def append(self, call: Callable[[], object]) -> None:
            freeing.start()
            freeing.join(0.2)
            super().append(call)

    memory._waiting = Late([lambda: None])
    memory.call_when_memory_is_free(told.set)
    freeing.join(10)
    assert told.wait(10)
