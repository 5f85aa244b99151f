"""Batch receive: Pulsar's three limits, and nothing lost between two batches (client/consume/receiver_queue.py)."""

import asyncio

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.common.errors import AlreadyClosed, ChecksumError, InvalidConfiguration
from magnetar.client.consume.consumer import Consumer
from magnetar.client.consume.receiver_queue import DEFAULT_BATCH_BYTES, ConsumerBatchReceivePolicy
from magnetar.client.model.message import Message
from tests.client.consume.test_partition_consumer import EARLIEST, FULL, filled
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)


async def _subscribe(client: Client, policy: ConsumerBatchReceivePolicy | None = None, queue: int = 1000) -> Consumer:
    return await client.subscribe(
        "t", "s", initial_position=EARLIEST, batch_receive_policy=policy, receiver_queue_size=queue
    )


async def _send(client: Client, *payloads: bytes) -> None:
    async with await client.create_producer("t", batching_enabled=False) as producer:
        for payload in payloads:
            await producer.send(payload)


def _contents(messages: list[Message]) -> list[bytes]:
    return [message.data() for message in messages]


def test_s18_the_defaults_are_pulsars_and_one_limit_is_needed() -> None:
    policy = ConsumerBatchReceivePolicy()
    assert (policy.max_num_message, policy.max_num_bytes, policy.timeout_ms) == (-1, 10 << 20, 100)
    assert ConsumerBatchReceivePolicy(-1, -1, 50).bytes_max == DEFAULT_BATCH_BYTES
    assert ConsumerBatchReceivePolicy(5, -1, 50).bytes_max == 0
    with pytest.raises(InvalidConfiguration, match="at least one"):
        ConsumerBatchReceivePolicy(0, -1, 0)


async def test_s18_the_first_limit_that_is_met_ends_a_batch(client: Client, broker: FakeBroker, /) -> None:
    await filled(client, 25)
    consumer = await _subscribe(client, ConsumerBatchReceivePolicy(10, -1, 200))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    assert [len(await consumer.batch_receive()) for _ in range(2)] == [10, 10]
    assert loop.time() - begun < 0.1
    assert [len(await consumer.batch_receive()) for _ in range(2)] == [5, 0]
    assert 0.4 <= loop.time() - begun < 0.5


async def test_s18_bytes_are_not_exceeded_but_by_a_message_that_is_larger_alone(
    client: Client, broker: FakeBroker, /
) -> None:
    sizes = [40, 40, 40, 500, 60, 40, 1]
    await _send(client, *(bytes(size) for size in sizes))
    consumer = await _subscribe(client, ConsumerBatchReceivePolicy(-1, 100, 100))
    batches = [[len(content) for content in _contents(await consumer.batch_receive())] for _ in range(4)]
    assert batches == [[40, 40], [40], [500], [60, 40]]
    assert _contents(await consumer.batch_receive()) == [b"\0"]


@pytest.mark.parametrize("queue", [1, 10])
async def test_s18_a_batch_may_be_larger_than_the_receiver_queue_and_needs_no_time_out(
    client: Client, broker: FakeBroker, /, queue: int
) -> None:
    await _send(client, *(b"%d" % i for i in range(50)))
    consumer = await _subscribe(client, ConsumerBatchReceivePolicy(50, -1, -1), queue)
    assert _contents(await consumer.batch_receive()) == [b"%d" % i for i in range(50)]


async def test_s18_a_cancelled_batch_loses_nothing_and_keeps_the_order(client: Client, broker: FakeBroker, /) -> None:
    await _send(client, *(b"%d" % i for i in range(3)))
    consumer = await _subscribe(client, ConsumerBatchReceivePolicy(10, -1, -1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.batch_receive(), 1)
    assert (await consumer.receive(1000)).data() == b"0"
    await _send(client, *(b"%d" % i for i in range(3, 11)))
    assert _contents(await consumer.batch_receive()) == [b"%d" % i for i in range(1, 11)]
    consumer.check()


async def test_s18_a_damaged_message_raises_and_those_around_it_come(client: Client, broker: FakeBroker, /) -> None:
    await _send(client, b"0", b"1", b"2")
    entries = broker.topics[FULL].entries
    entries[1] = entries[1][:-1] + bytes([entries[1][-1] ^ 1])
    consumer = await _subscribe(client)
    with pytest.raises(ChecksumError):
        await consumer.batch_receive()
    assert _contents(await consumer.batch_receive()) == [b"0", b"2"]


async def test_s18_closing_ends_who_waits_for_a_batch(client: Client, broker: FakeBroker, /) -> None:
    consumer = await _subscribe(client, ConsumerBatchReceivePolicy(10, -1, -1))
    waiting = asyncio.ensure_future(consumer.batch_receive())
    await asyncio.sleep(0.1)
    await consumer.close()
    with pytest.raises(AlreadyClosed):
        await waiting


def test_s18_a_batch_is_acknowledged_as_one_and_a_listener_excludes_it(fake: tuple[str, FakeBroker]) -> None:
    policy = magnetar.ConsumerBatchReceivePolicy(4, -1, 100)
    with magnetar.Client(fake[0]) as client:
        producer = client.create_producer("parts")
        consumer = client.subscribe("parts", "s", batch_receive_policy=policy)
        for i in range(10):
            producer.send(b"%d" % i)
        batches: list[list[magnetar.Message]] = []
        while sum(map(len, batches)) < 10:
            batch = consumer.batch_receive()
            consumer.acknowledge(batch)
            batches.append(batch)
        assert sorted(message.data() for batch in batches for message in batch) == [b"%d" % i for i in range(10)]
        assert all(len(batch) <= 4 for batch in batches)
        consumer.close()
        heard = client.subscribe("parts", "s", message_listener=lambda consumer, message: None)
        with pytest.raises(magnetar.InvalidConfiguration, match="listener"):
            heard.batch_receive()
