"""Levels of priority through the SDK: which message comes next, and that everything else of a consumer goes on."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.asyncio import Client, ConsumerBatchReceivePolicy, ConsumerType, InitialPosition
from magnetar.client.admin import AdminClient
from magnetar.client.blocking.client import Client as BlockingClient
from magnetar.client.common.errors import (
    InvalidConfiguration,
    InvalidMessage,
    NoMessageAvailable,
    OperationNotSupported,
    Timeout,
)
from magnetar.client.consume.consumer import Consumer
from magnetar.client.model.message import Message
from magnetar.client.model.settings import ConsumerDeadLetterPolicy
from magnetar.client.transactions.process import Output, process
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate
from tests.support.cluster import Cluster, cluster

TOPIC = "persistent://public/default/t"
SHARED = ConsumerType.Shared
simulated = pytest.mark.run_by.with_args(simulate)


async def fill(client: Client, counts: Sequence[int], **options: Any) -> None:
    producer = await client.create_producer("t", levels=len(counts), **options)
    for level, count in enumerate(counts):
        for number in range(count):
            await producer.send(b"%d.%d" % (level, number), partition_key=f"k{number % 3}", priority=level)
    await producer.close()


async def subscribe(client: Client, kind: ConsumerType = SHARED, **options: Any) -> Consumer:
    options = {"levels": 3, "initial_position": InitialPosition.Earliest, "negative_ack_redelivery_delay_ms": 20,
               **options}  # fmt: skip
    return await client.subscribe("t", "s", kind, **options)


async def wait_waiting(consumer: Consumer, count: int) -> None:
    while consumer.statistics()["waiting_messages"] < count:  # noqa: ASYNC110 - it is virtual time, or has a limit
        await asyncio.sleep(0.01)


def level_of(message: Message) -> int:
    return int(message.data().split(b".")[0])


def in_order(messages: Sequence[Message]) -> bool:
    """Whether each level is in its order."""
    by_level: dict[int, list[int]] = defaultdict(list)
    for each in messages:
        by_level[level_of(each)].append(int(each.data().split(b".")[1]))
    return all(numbers == sorted(numbers) for numbers in by_level.values())


# ------------------------------------------------------------------------------------ which message is next
@simulated
async def test_levels_share_a_consumer_by_their_weights_and_each_keeps_its_order(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, (60, 60, 60), batching_enabled=False)
    consumer = await subscribe(client, receiver_queue_size=180)
    await wait_waiting(consumer, 180)
    found = [await consumer.receive() for _ in range(65)]
    assert Counter(map(level_of, found)) == {0: 40, 1: 20, 2: 5}
    assert in_order(found + [await consumer.receive() for _ in range(115)])
    assert {each.topic_name().rpartition("/")[2] for each in found} == {f"t-priority-{n}" for n in range(3)}
    assert consumer.topic() == TOPIC


@simulated
async def test_a_strict_consumer_takes_what_is_most_urgent_also_when_it_comes_later(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, (0, 3, 3))
    consumer = await subscribe(client, weights="strict")
    await wait_waiting(consumer, 6)
    assert [level_of(await consumer.receive()) for _ in range(4)] == [1, 1, 1, 2]
    await fill(client, (1, 0, 0))
    await wait_waiting(consumer, 3)
    assert [level_of(await consumer.receive()) for _ in range(3)] == [0, 2, 2]


@simulated
async def test_permits_are_divided_among_the_levels(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, (0, 0, 100), batching_enabled=False)
    consumer = await subscribe(client, receiver_queue_size=30)
    await wait_waiting(consumer, 10)
    await asyncio.sleep(1)
    assert consumer.statistics()["waiting_messages"] == 10, "the other levels have their own room"
    await fill(client, (100, 0, 0), batching_enabled=False)
    await wait_waiting(consumer, 20)
    for _ in range(200):
        await consumer.acknowledge(await consumer.receive(1000))


@simulated
async def test_a_batch_and_what_is_put_back_are_drawn_by_level(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, (20, 20, 20))
    consumer = await subscribe(client, weights=(3, 2, 1), batch_receive_policy=ConsumerBatchReceivePolicy(12, 0, 100))
    await wait_waiting(consumer, 60)
    batch = await consumer.batch_receive()
    assert Counter(map(level_of, batch)) == {0: 6, 1: 4, 2: 2}
    consumer.inbox.put_back(batch)
    rest = [each for _ in range(5) for each in await consumer.batch_receive()]
    assert len(rest) == 60
    assert in_order(rest)
    assert await consumer.batch_receive() == []


@simulated
async def test_a_listener_begins_by_level_what_waits_and_keeps_the_order_of_keys(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, (0, 0, 40))
    consumer, seen = await subscribe(client), list[Message]()

    async def handle(message: Message) -> None:
        seen.append(message)
        await asyncio.sleep(0.1)

    listening = consumer.listen(handle, concurrency=2)
    while len(seen) < 4:  # noqa: ASYNC110 - it is virtual time
        await asyncio.sleep(0.01)
    await fill(client, (24, 0, 0))
    await asyncio.sleep(0.3)
    del seen[:]
    await asyncio.sleep(1)
    assert Counter(map(level_of, seen))[2] <= 4, "what is urgent does not wait for what was sorted before"
    while listening.statistics().handled < 64:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert listening.statistics().failed == listening.statistics().waiting == 0


@simulated
async def test_what_cannot_be_is_refused_before_anything_is_opened(client: Client, broker: FakeBroker, /) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"levels": 1}, {"levels": 11}, {"levels": 2, "weights": (1, 2, 3)}, {"levels": 2, "weights": "softly"},
        {"levels": 2, "weights": (1, 0)}, {"weights": (1, 2), "levels": None}, {"levels": 2, "partitions": [0]},
    )  # fmt: skip
    for options in wrong:
        with pytest.raises(InvalidConfiguration):
            await subscribe(client, **options)
    with pytest.raises(InvalidConfiguration, match="pattern"):
        await client.subscribe("t.*", "s", levels=2, is_pattern_topic=True)
    with pytest.raises(InvalidConfiguration, match="partitions of its own"):
        await client.create_producer("t-partition-0", levels=2)
    plain, producer = await client.create_producer("p"), await client.create_producer("t", levels=2)
    with pytest.raises(InvalidMessage, match="opened with levels"):
        await plain.send(b"", priority=0)
    consumer = await subscribe(client, ConsumerType.Exclusive, levels=2)
    with pytest.raises(OperationNotSupported, match="assigned"):
        await consumer.assign([])
    assert len(consumer.partitions) == 2
    for priority in (2, -1, "0", True):
        with pytest.raises(InvalidMessage):
            await producer.send(b"", priority=priority)  # type: ignore[arg-type]
    assert not any("priority-2" in name for name in broker.topics), "no other topic was made"


# ------------------------------------------------------------------------------------ through a real broker
@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


@pytest.fixture
async def client(running: Cluster) -> AsyncIterator[Client]:
    async with Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        yield client


async def drain(consumer: Consumer, count: int) -> list[Message]:
    found = []
    for _ in range(count):
        found.append(await consumer.receive(10_000))
        await consumer.acknowledge(found[-1])
    return found


async def test_what_is_retried_given_back_or_a_dead_letter_keeps_its_level(running: Cluster, client: Client) -> None:
    policy = ConsumerDeadLetterPolicy(1, "dead", "kept", "again")
    consumer = await subscribe(client, dead_letter_policy=policy, enable_retry=True)
    await fill(client, (1, 1, 1))
    seen = Counter[str]()
    for _ in range(9):  # the message, its copy in the retry topic, and that copy once more
        message = await consumer.receive(10_000)
        name = message.topic_name().rpartition("/")[2]
        seen[name] += 1
        assert name in (f"t-priority-{level_of(message)}", f"again-priority-{level_of(message)}")
        assert getattr(message.entry.consumer, "level") == level_of(message)  # noqa: B009
        if name.startswith("t-"):
            await consumer.reconsume_later(message, timedelta(milliseconds=10))
        else:
            await consumer.negative_acknowledge(message)
    assert seen == {f"{of}-priority-{n}": times for of, times in (("t", 1), ("again", 2)) for n in range(3)}
    letters = await client.subscribe("dead", "kept", SHARED, levels=3, weights="strict")
    found = await drain(letters, 3)
    assert {(each.data(), each.topic_name().rpartition("/")[2]) for each in found} == {
        (b"%d.0" % level, f"dead-priority-{level}") for level in range(3)
    }
    assert {each.properties()["REAL_TOPIC"] for each in found} == {f"{TOPIC}-priority-{n}" for n in range(3)}


async def test_without_names_each_level_has_the_dead_letters_of_its_own_topic(client: Client) -> None:
    consumer = await subscribe(
        client, dead_letter_policy=ConsumerDeadLetterPolicy(1, initial_subscription_name="kept")
    )
    await fill(client, (0, 1, 0))
    for _ in range(2):
        await consumer.negative_acknowledge(await consumer.receive(10_000))
    letters = await client.subscribe("t-priority-1-s-DLQ", "kept")
    assert (await letters.receive(10_000)).data() == b"1.0"


@pytest.mark.parametrize("kind", [ConsumerType.KeyShared, ConsumerType.Failover, ConsumerType.Exclusive], ids=str)
async def test_each_type_of_subscription_reads_all_levels_in_the_order_of_keys(
    client: Client, kind: ConsumerType
) -> None:
    consumers = [await subscribe(client, kind)]
    if kind is not ConsumerType.Exclusive:
        consumers.append(await subscribe(client, kind))
    else:
        with pytest.raises(magnetar.ConsumerBusy):
            await subscribe(client, kind)
    await fill(client, (12, 12, 12), batching_enabled=False)
    found: list[list[Message]] = [[] for _ in consumers]

    async def take(consumer: Consumer, into: list[Message]) -> None:
        while True:
            into.append(await consumer.receive())
            await consumer.acknowledge(into[-1])

    tasks = [asyncio.create_task(take(*each)) for each in zip(consumers, found, strict=True)]
    while sum(map(len, found)) < 36:  # noqa: ASYNC110 - the cluster has a limit
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(each.data() for some in found for each in some) == sorted(
        b"%d.%d" % (level, number) for level in range(3) for number in range(12)
    )
    assert all(map(in_order, found))
    if kind is ConsumerType.Failover:
        assert [len(some) for some in found] == [36, 0], "one consumer is active at all levels, and weighs them"


async def test_partitions_now_seek_and_unsubscribe_are_of_all_levels(running: Cluster, client: Client) -> None:
    async with AdminClient(f"magnetar://{running.brokers[0].endpoint}") as admin:
        await admin.create_topic(f"{TOPIC}-priority-1", partitions=2)
        consumer = await subscribe(client, ConsumerType.Exclusive)
        assert len(consumer.partitions) == 4
        with pytest.raises(NoMessageAvailable):
            await consumer.receive(now=True)
        await fill(client, (3, 9, 3))
        first = [await consumer.receive(now=True) for _ in range(15)]
        with pytest.raises(NoMessageAvailable):
            await consumer.receive(now=True)
        await consumer.seek(magnetar.MessageId.earliest)
        assert sorted(each.data() for each in await drain(consumer, 15)) == sorted(each.data() for each in first)
        one = next(each for each in first if each.data() == b"2.1")
        await consumer.seek(one.message_id())
        assert (await consumer.receive(10_000)).data() == b"2.2", "of its level alone"
        assert set((await consumer.lag()).values()) == {0, 1}
        await consumer.unsubscribe()
        assert not (await admin.topic_stats(f"{TOPIC}-priority-0")).subscriptions


async def test_a_large_message_a_filter_and_a_transaction_are_of_a_level(running: Cluster, client: Client) -> None:
    consumer = await subscribe(client, filter="kind = 'wanted'", negative_ack_redelivery_delay_ms=20)
    producer = await client.create_producer("t", levels=3, chunking_enabled=True, batching_enabled=False)
    large = b"1." + b"x" * (6 << 20)
    await producer.send(large, {"kind": "wanted"}, priority=1)
    await producer.send(b"0.1", {"kind": "other"}, priority=0)
    for name, ends in (("abort", False), ("commit", True)):
        txn = await client.transaction()
        await producer.send(b"0." + name.encode(), {"kind": "wanted"}, priority=0, txn=txn)
        await (txn.commit() if ends else txn.abort())
    found = [await consumer.receive(20_000) for _ in range(2)]
    assert sorted(len(each.data()) for each in found) == [8, len(large)]
    async with client.transaction() as txn:
        await consumer.acknowledge(found, txn=txn)
        await txn.abort()
    assert sorted(len(each.data()) for each in await drain(consumer, 2)) == [8, len(large)]
    with pytest.raises(Timeout):
        await consumer.receive(100)


async def test_halves_outputs_of_process_and_delayed_messages_have_a_priority(client: Client) -> None:
    producer = await client.create_producer("t", levels=3)
    consumer = await subscribe(client)
    half = await producer.prepare(b"0.half", group="g", priority=0)
    await half.commit()
    source = await client.subscribe("in", "s")
    sender = await client.create_producer("in")
    await sender.send(b"x")
    await process(source, producer, lambda message: Output(b"1.out", priority=1), idle_timeout_ms=300)
    both = await client.half([Output(b"0.of-two", producer=producer, priority=0)], group="g")
    await both.commit()
    assert {each.data(): each.entry.consumer.topic.local for each in await drain(consumer, 3)} == {
        b"0.half": "t-priority-0", b"1.out": "t-priority-1", b"0.of-two": "t-priority-0",
    }  # fmt: skip
    later = await producer.send(b"1.later", deliver_after=timedelta(seconds=60), priority=1)
    assert await producer.cancel(later, priority=1) == ["s"]
    await producer.send(b"2.last")
    assert (await consumer.receive(10_000)).topic_name().endswith("t-priority-2"), "without a priority the last level"
    assert len({each.core.name for each in producer.partitions}) == 1


async def test_the_blocking_client_has_levels_as_well(running: Cluster) -> None:
    def program() -> list[int]:
        with BlockingClient(f"magnetar://{running.brokers[0].endpoint}") as client:
            consumer = client.subscribe("t", "s", SHARED, levels=2, weights="strict")
            producer = client.create_producer("t", levels=2)
            with pytest.raises(InvalidMessage):
                client.create_producer("plain").send(b"", priority=0)
            for level in (1, 0, 1, 0):
                producer.send(b"%d.0" % level, priority=level)
            producer.send_async(b"0.0", lambda *_: None, priority=0)
            producer.flush()
            found = []
            while len(consumer.inner().inbox) < 5:
                consumer.inner().inbox.waiting_messages()
            for _ in range(5):
                message = consumer.receive(10_000)
                consumer.acknowledge(message)
                found.append(level_of(message))
            return found

    assert await asyncio.to_thread(program) == [0, 0, 0, 1, 1]
