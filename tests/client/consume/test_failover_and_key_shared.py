"""Failover, Key_Shared and Shared through the SDK, against a real broker with one bookie."""

from __future__ import annotations

import asyncio
import queue
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar import ConsumerKeySharedPolicy, ConsumerType, InitialPosition, KeySharedMode
from magnetar.broker.session.summaries import collect_subscription_stats
from magnetar.client.client import Client
from magnetar.client.consume.consumer import Consumer
from magnetar.client.model.message import Message
from magnetar.proto.names import compute_key_slot
from tests.support.cluster import cluster
from tests.support.steps import take_until_quiet

EARLIEST = InitialPosition.Earliest
WAIT_MS = 30_000
SILENCE_MS = 300


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    async with Client(url) as made:
        yield made


class Told:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[bool, int]] = asyncio.Queue()

    def became_active(self, consumer: Consumer, partition_id: int) -> None:
        assert isinstance(consumer, Consumer)
        self.events.put_nowait((True, partition_id))

    def became_inactive(self, consumer: Consumer, partition_id: int) -> None:
        self.events.put_nowait((False, partition_id))

    async def next(self) -> tuple[bool, int]:
        return await asyncio.wait_for(self.events.get(), 30)


async def taken(consumer: Consumer, count: int) -> list[Message]:
    return [await consumer.receive(WAIT_MS) for _ in range(count)]


async def numbers(consumer: Consumer, count: int) -> list[int]:
    return [int(message.data()) for message in await taken(consumer, count)]


async def nothing_comes(consumer: Consumer) -> None:
    with pytest.raises(magnetar.Timeout):
        await consumer.receive(SILENCE_MS)


async def send(client: Client, topic: str, count: int, keys: int = 0, **settings: Any) -> None:
    producer = await client.create_producer(topic, **{"batching_enabled": False, **settings})
    for number in range(count):
        key = f"k{number % keys}" if keys else None
        await producer.send(b"%d" % number, partition_key=key)
    await producer.close()


async def test_a_standby_takes_over_with_all_that_was_not_acknowledged_in_order(client: Client) -> None:
    first_told, second_told = Told(), Told()
    first = await client.subscribe(
        "over", "s", ConsumerType.Failover, initial_position=EARLIEST, consumer_event_listener=first_told
    )
    assert await first_told.next() == (True, -1)
    second = await client.subscribe("over", "s", ConsumerType.Failover, consumer_event_listener=second_told)
    assert await second_told.next() == (False, -1)
    await send(client, "over", 10)
    got = await taken(first, 10)
    await first.acknowledge(got[1])
    await first.close()
    assert await second_told.next() == (True, -1)
    assert await numbers(second, 9) == [0, *range(2, 10)]
    await second.close()


@pytest.mark.parametrize("batch", [1, 4])
async def test_a_consumer_that_is_not_active_any_more_gives_its_program_nothing_that_the_active_one_gets(
    client: Client, batch: int
) -> None:
    """What its program has comes to both, and an acknowledgement of either counts."""
    told, topic = Told(), f"deposed-{batch}"
    worse = await client.subscribe(
        topic, "s", ConsumerType.Failover, initial_position=EARLIEST, priority_level=1, receiver_queue_size=10,
        consumer_event_listener=told, ack_receipt_enabled=True,
    )  # fmt: skip
    assert await told.next() == (True, -1)
    producer = await client.create_producer(topic, batching_max_messages=batch)
    await producer.send_many([b"%d" % number for number in range(20)])
    got = await taken(worse, 3)
    await worse.acknowledge(got[0])
    better = await client.subscribe(topic, "s", ConsumerType.Failover)
    assert await told.next() == (False, -1)
    assert not worse.inbox
    waiter = asyncio.ensure_future(worse.receive(WAIT_MS))
    assert await numbers(better, 19) == [*range(1, 20)]
    assert not waiter.done()
    await worse.acknowledge(got[1])
    await better.close()
    assert await told.next() == (True, -1)
    again = [int((await waiter).data()), *await numbers(worse, 17)]
    assert again == [*range(2, 20)], "it is active again, and its permits are all there"
    worse.check()


async def test_a_better_priority_becomes_active_and_the_stats_say_who_is(client: Client, url: str) -> None:
    worse = await client.subscribe("prio", "s", ConsumerType.Failover, consumer_name="worse", priority_level=1)
    told = Told()
    better = await client.subscribe(
        "prio", "s", ConsumerType.Failover, consumer_name="better", consumer_event_listener=told
    )
    assert await told.next() == (True, -1)
    await send(client, "prio", 3)
    assert await numbers(better, 3) == [0, 1, 2]
    await nothing_comes(worse)


async def test_the_listener_of_a_blocking_consumer_is_called_with_it(url: str) -> None:
    told: queue.SimpleQueue[tuple[object, int]] = queue.SimpleQueue()

    class Listener:
        def became_active(self, consumer: object, partition_id: int) -> None:
            told.put((consumer, partition_id))

        def became_inactive(self, consumer: object, partition_id: int) -> None:
            told.put((None, partition_id))

    def blocking() -> None:
        with magnetar.Client(url) as blocking_client:
            consumer = blocking_client.subscribe(
                "told", "s", ConsumerType.Failover, consumer_event_listener=Listener()
            )
            assert told.get(timeout=10) == (consumer, -1)

    await asyncio.to_thread(blocking)


async def all_of(consumer: Consumer) -> list[Message]:
    return await take_until_quiet(consumer.receive, 2 * SILENCE_MS)


async def test_sticky_consumers_get_the_ranges_they_ask_for_and_conflicts_are_refused(client: Client) -> None:
    def policy(*ranges: tuple[int, int]) -> ConsumerKeySharedPolicy:
        return ConsumerKeySharedPolicy(KeySharedMode.Sticky, sticky_ranges=list(ranges))

    async def subscribe(policy: ConsumerKeySharedPolicy | None) -> Consumer:
        return await client.subscribe(
            "sticky", "s", ConsumerType.KeyShared, initial_position=EARLIEST, key_shared_policy=policy
        )

    low = await subscribe(policy((0, 20000)))
    for other in (policy((15000, 30000)), None, ConsumerKeySharedPolicy()):
        with pytest.raises(magnetar.ConsumerAssignError):
            await subscribe(other)
    high = await subscribe(policy((20001, 40000), (50000, 65535)))
    await send(client, "sticky", 30, keys=30)
    slots = [compute_key_slot(f"k{number}") for number in range(30)]
    assert sorted(int(message.data()) for message in await all_of(low)) == [n for n in range(30) if slots[n] <= 20000]
    got = [int(message.data()) for message in await all_of(high)]
    gap = [n for n in range(30) if 40000 < slots[n] < 50000]
    assert gap
    assert sorted([*got, *gap]) == [n for n in range(30) if slots[n] > 20000]
    rest = await subscribe(policy((40001, 49999)))
    assert sorted(await numbers(rest, len(gap))) == gap


def test_a_policy_that_contradicts_itself_is_refused() -> None:
    for wrong in (
        {"key_shared_mode": KeySharedMode.Sticky}, {"sticky_ranges": [(0, 5)]},
        {"key_shared_mode": KeySharedMode.Sticky, "sticky_ranges": [(0, 5), (5, 9)]},
        {"key_shared_mode": KeySharedMode.Sticky, "sticky_ranges": [(0, 65536)]},
    ):  # fmt: skip
        with pytest.raises(magnetar.InvalidConfiguration):
            ConsumerKeySharedPolicy(**wrong)  # type: ignore[arg-type]


async def test_the_ordering_key_goes_before_the_key(client: Client) -> None:
    consumers = [await client.subscribe("ordering", "s", ConsumerType.KeyShared) for _ in range(2)]
    producer = await client.create_producer("ordering", batching_enabled=False)
    for number in range(12):
        await producer.send(b"%d" % number, partition_key=f"k{number}", ordering_key="one")
    got = [await all_of(consumer) for consumer in consumers]
    assert sorted(map(len, got)) == [0, 12]


async def test_messages_without_a_key_go_to_everybody(client: Client) -> None:
    consumers = [await client.subscribe("no keys", "s", ConsumerType.KeyShared) for _ in range(2)]
    await send(client, "no keys", 20)
    assert [len(await all_of(consumer)) for consumer in consumers] == [10, 10]


async def test_complaint_09_permits_of_messages_that_are_delivered_again_unread_come_back(client: Client) -> None:
    """apache/pulsar#100: each redelivery of what waits in the queue costs its permits for ever."""
    consumer = await client.subscribe(
        "again", "s", ConsumerType.Shared, initial_position=EARLIEST, receiver_queue_size=10
    )
    await send(client, "again", 50)
    for _ in range(20):
        await consumer.receive(WAIT_MS)
        consumer.redeliver_unacknowledged_messages()
    seen = set()
    while len(seen) < 50:
        message = await consumer.receive(WAIT_MS)
        seen.add(int(message.data()))
        await consumer.acknowledge(message)


async def test_complaint_59_many_negative_acknowledgements_stop_nobody(client: Client) -> None:
    """apache/pulsar#15052: after many of them the consumer gets nothing any more."""
    consumer = await client.subscribe(
        "nacks", "s", ConsumerType.Shared, initial_position=EARLIEST, receiver_queue_size=20,
        negative_ack_redelivery_delay_ms=50,
    )  # fmt: skip
    await send(client, "nacks", 100)
    times: dict[int, int] = defaultdict(int)
    done = 0
    while done < 100:
        message = await consumer.receive(WAIT_MS)
        number = int(message.data())
        times[number] += 1
        if times[number] < 4:
            await consumer.negative_acknowledge(message)
        else:
            assert message.redelivery_count() >= 3
            await consumer.acknowledge(message)
            done += 1


async def test_what_stats_say_of_consumers_keys_and_limits(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_unacked_per_consumer=5) as running, Client(
        f"magnetar://{running.brokers[0].endpoint}"
    ) as client:
        first = await client.subscribe(
            "t", "s", ConsumerType.KeyShared, consumer_name="a", initial_position=EARLIEST
        )
        await send(client, "t", 8, keys=8)
        assert len(await all_of(first)) == 5
        await client.subscribe("t", "s", ConsumerType.KeyShared, consumer_name="b")
        await client.subscribe("t", "f", ConsumerType.Failover, consumer_name="c")
        topic = running.brokers[0].topics["persistent://public/default/t"]
        keyed = await collect_subscription_stats(topic, topic.subscriptions["s"])
        assert [(each.name, each.blocked) for each in keyed.consumers] == [("a", True), ("b", False)]
        assert keyed.key_shared_mode == "AUTO_SPLIT"
        assert sum(slots.last - slots.first + 1 for each in keyed.consumers for slots in each.slots) == 65535
        owned = [(slots.first, slots.last) for slots in keyed.consumers[1].slots]
        held = [compute_key_slot(f"k{number}") for number in range(5)]
        assert [each.slot for each in keyed.draining] == sorted(
            slot for slot in held if any(low <= slot <= high for low, high in owned)
        )
        active = await collect_subscription_stats(topic, topic.subscriptions["f"])
        assert (active.type, active.active_consumer) == ("FAILOVER", "c")
