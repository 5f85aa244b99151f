"""Keys that take turns, through a real broker: set by a consumer or an operator, beside all that delays or fails."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.asyncio import Client, ConsumerType, InitialPosition
from magnetar.broker.subscription.core.fair_shared import FairShared
from magnetar.broker.subscription.core.policy import SubscriptionOptions
from magnetar.broker.subscription.core.subscription_types import find_subscription_type
from magnetar.client.admin import AdminClient
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import parse_header, split_broker_part
from magnetar.proto.errors import ConsumerBusy, InvalidRequest, NotAllowed
from magnetar.proto.names import TopicName
from magnetar.proto.states import Blocked
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster, payloads_of

TOPIC = "persistent://public/default/jobs"
FAIR = {"fair.by-key": "true", "fair.max-in-flight-per-key": "2"}
EARLIEST, SHARED = wire.Subscribe.EARLIEST, wire.Subscribe.SHARED


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


async def filled(running: Cluster, *keys: str | None, topic: str = TOPIC) -> None:
    producer = await TestProducer(running.world, running.brokers[-1], topic).opened()
    for number, key in enumerate(keys):
        await producer.send(b"%s.%d" % ((key or "-").encode(), number), key=key)
    await producer.close()


async def consumer(running: Cluster, properties: dict[str, str] = FAIR, **options: Any) -> TestConsumer:
    asked: dict[str, Any] = {"type": SHARED, "initial_position": EARLIEST, **options}
    topic = asked.pop("topic", TOPIC)
    return await TestConsumer(
        running.world, running.brokers[-1], topic, subscription_properties=properties, **asked
    ).ready()


def key_of(delivery: wire.Delivery) -> str:
    return parse_header(split_broker_part(delivery.entry)[2]).metadata.partition_key


async def test_a_key_with_many_messages_delays_no_other_one_and_none_is_lost(running: Cluster) -> None:
    await filled(running, *["noisy"] * 60, "quiet", *["noisy"] * 40, None)
    mine = await consumer(running)
    first = [await mine.receive() for _ in range(4)]
    assert Counter(map(key_of, first)) == {"noisy": 2, "quiet": 1, "": 1}
    assert await mine.quiet()
    found = list(first)
    await mine.ack(*first)
    while len(found) < 102:
        found.append(await mine.receive())
        await mine.ack(found[-1])
    assert len({each.entry_id for each in found}) == 102
    assert await mine.quiet()


async def test_two_consumers_share_the_limit_of_a_key_and_a_lost_one_gives_its_part_back(running: Cluster) -> None:
    await filled(running, *["k"] * 6)
    one, other = await consumer(running, permits=1), await consumer(running, permits=0)
    held = await one.receive()
    other.permits(10)
    await other.receive()
    assert await other.quiet(), "two are in flight"
    await one.close()
    again = await other.receive()
    assert again.entry_id == held.entry_id


async def test_the_property_survives_a_restart_and_a_consumer_without_it_takes_turns_too(
    running: Cluster, tmp_path: Path
) -> None:
    await filled(running, *["k"] * 5)
    mine = await consumer(running)
    await mine.ack(await mine.receive())
    await mine.close()
    await running.brokers[0].close()
    await running.add_broker()
    plain = await consumer(running, properties={})
    assert [(await plain.receive()).entry_id for _ in range(2)] == [1, 2]
    assert await plain.quiet()


async def test_consumers_agree_on_the_limits_and_the_first_one_sets_them(running: Cluster) -> None:
    mine = await consumer(running)
    other = {**FAIR, "fair.max-in-flight-per-key": "3"}
    with pytest.raises(ConsumerBusy, match="while its consumers are connected"):
        await consumer(running, properties=other)
    await consumer(running, properties={})
    await consumer(running)
    await mine.leave()
    with pytest.raises(NotAllowed, match="needs a durable Shared subscription"):
        await consumer(running, type=wire.Subscribe.FAILOVER, topic=f"{TOPIC}-2")
    with pytest.raises(NotAllowed, match="persistent topic"):
        await consumer(running, topic="non-persistent://public/default/gone")
    with pytest.raises(InvalidRequest, match="whole number from 1"):
        await consumer(running, properties={**FAIR, "fair.max-in-flight-per-key": "many"}, topic=f"{TOPIC}-3")


async def test_the_first_consumer_changes_the_limits_of_a_subscription_that_exists(running: Cluster) -> None:
    await filled(running, *["k"] * 5)
    await (await consumer(running, properties={"team": "a"})).leave()
    await (await consumer(running)).leave()
    mine = await consumer(running, properties={**FAIR, "fair.max-in-flight-per-key": "3"})
    assert [(await mine.receive()).entry_id for _ in range(3)] == [0, 1, 2]
    assert await mine.quiet()
    topic = await running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))
    assert topic.subscriptions["s"].properties["team"] == "a", "other properties stay"


async def test_an_operator_changes_limits_at_once_and_turns_fairness_on_by_connecting_anew(running: Cluster) -> None:
    await filled(running, *["k"] * 8)
    async with AdminClient(f"magnetar://{running.brokers[0].endpoint}") as admin, Client(
        f"magnetar://{running.brokers[0].endpoint}"
    ) as sdk:
        mine = await sdk.subscribe(
            TOPIC, "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest, receiver_queue_size=100,
            fair_by_key=True, max_in_flight_per_key=1,
        )  # fmt: skip
        one = await mine.receive(10_000)
        assert (await admin.subscription_properties(TOPIC, "s")) == {**FAIR, "fair.max-in-flight-per-key": "1"}
        await admin.set_subscription_properties(TOPIC, "s", {**FAIR, "fair.max-in-flight-per-key": "3"})
        several = [await mine.receive(10_000) for _ in range(2)]
        with pytest.raises(magnetar.Timeout):
            await mine.receive(100)
        await admin.set_subscription_properties(TOPIC, "s", {})
        ids = {each.message_id().entry_id() for each in (one, *several)}
        while len(ids) < 8:
            ids.add((await mine.receive(10_000)).message_id().entry_id())


async def test_a_key_waits_for_its_rate_and_goes_on_by_itself(running: Cluster) -> None:
    await filled(running, "slow", "slow", "slow", "quick")
    mine = await consumer(running, properties={"fair.by-key": "true", "fair.rate-per-key": "0.5"})
    first = [await mine.receive() for _ in range(2)]
    assert sorted(map(key_of, first)) == ["quick", "slow"]
    topic = await running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))
    assert topic.subscriptions["s"].pump.blocked is Blocked.KEY_LIMITS
    assert key_of(await mine.receive()) == "slow", "time alone made it deliverable"


async def test_what_failed_waits_for_its_back_off_gives_its_place_to_others_and_dies_in_the_end(tmp_path: Path) -> None:
    async with cluster(tmp_path, dead_letter_max_redeliver_count=1, dead_letter_backoff_s=(0.2,)) as running:
        await filled(running, "k", "k", "k")
        mine = await consumer(running, properties={**FAIR, "fair.max-in-flight-per-key": "1"})
        for expected in (0, 1, 2):
            delivery = await mine.receive()
            assert delivery.entry_id == expected, "the next one of its key goes on during the back-off"
            if expected:
                await mine.ack(delivery)
            else:
                mine.frame(redeliver=wire.Redeliver(entries=[wire.Position(ledger_id=delivery.ledger_id, entry_id=0)]))
        again = await mine.receive()
        assert (again.entry_id, again.redelivery_count) == (0, 1)
        mine.frame(redeliver=wire.Redeliver(entries=[wire.Position(ledger_id=again.ledger_id, entry_id=0)]))
        dead = await consumer(running, properties={}, topic=f"{TOPIC}-s-DLQ")
        assert payloads_of((await dead.receive()).entry) == [b"k.0"]


async def test_delayed_messages_come_when_due_and_within_the_limit_of_their_key(running: Cluster) -> None:
    producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
    soon_ms = int(time.time() * 1000) + 400
    for number in range(4):
        await producer.send(b"later.%d" % number, key="k", deliver_at_ms=soon_ms)
    await producer.send(b"now", key="k")
    mine = await consumer(running)
    first = await mine.receive()
    assert payloads_of(first.entry) == [b"now"]
    one = await mine.receive()
    assert payloads_of(one.entry) == [b"later.0"]
    assert await mine.quiet(), "two of the key are in flight"
    await mine.ack(first, one)
    found = [await mine.receive(), await mine.receive()]
    await mine.ack(*found)
    assert payloads_of((await mine.receive()).entry) == [b"later.3"]


async def test_limits_of_unacknowledged_messages_hold_beside_those_of_keys(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_unacked_per_consumer=3) as running:
        await filled(running, "a", "a", "a", "b", "b", "c")
        mine = await consumer(running)
        held = [await mine.receive() for _ in range(3)]
        assert await mine.quiet()
        await mine.ack(*held)
        held = [await mine.receive() for _ in range(3)]
        await mine.ack(*held)
        assert await mine.quiet()


async def test_partitions_take_turns_each_for_itself_and_everything_is_received_once(running: Cluster) -> None:
    url = f"magnetar://{running.brokers[0].endpoint}"
    async with AdminClient(url) as admin, Client(url) as sdk:
        await admin.create_topic(TOPIC, partitions=2)
        mine = await sdk.subscribe(
            TOPIC, "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest,
            fair_by_key=True, max_in_flight_per_key=1,
        )  # fmt: skip
        producer = await sdk.create_producer(TOPIC)
        await asyncio.gather(*(producer.send(b"%d" % n, partition_key=f"k{n % 5}") for n in range(100)))
        found, held = list[bytes](), Counter[str]()
        while len(found) < 100:
            message = await mine.receive(10_000)
            held[message.partition_key()] += 1
            assert held[message.partition_key()] == 1, "two of a key at once"
            found.append(message.data())
            held[message.partition_key()] -= 1
            await mine.acknowledge(message)
        assert sorted(found) == sorted(b"%d" % n for n in range(100))


async def test_a_message_in_chunks_of_a_key_that_may_not_is_received_whole(running: Cluster) -> None:
    async with Client(f"magnetar://{running.brokers[0].endpoint}") as sdk:
        mine = await sdk.subscribe(TOPIC, "s", ConsumerType.Shared, fair_by_key=True, max_in_flight_per_key=1)
        producer = await sdk.create_producer(TOPIC, chunking_enabled=True, batching_enabled=False)
        await producer.send(b"small", partition_key="k")
        large = b"x" * (12 << 20)
        await producer.send(large, partition_key="k")
        one, two = await mine.receive(10_000), await mine.receive(20_000)
        assert {len(one.data()), len(two.data())} == {5, len(large)}


async def test_an_aborted_acknowledgement_frees_no_second_place_and_comes_again(running: Cluster) -> None:
    async with Client(f"magnetar://{running.brokers[0].endpoint}") as sdk:
        mine = await sdk.subscribe(
            TOPIC, "s", ConsumerType.Shared, fair_by_key=True, max_in_flight_per_key=1, receiver_queue_size=10
        )
        producer = await sdk.create_producer(TOPIC)
        for number in range(3):
            await producer.send(b"%d" % number, partition_key="k")
        first = await mine.receive(10_000)
        async with sdk.transaction() as txn:
            await mine.acknowledge(first, txn=txn)
            second = await mine.receive(10_000)  # its place is free while the transaction is open
            await txn.abort()
        with pytest.raises(magnetar.Timeout):
            await mine.receive(200)
        await mine.acknowledge(second)
        again = await mine.receive(10_000)
        assert (first.data(), second.data(), again.data()) == (b"0", b"1", b"0")


def test_without_the_property_the_policy_is_the_plain_one() -> None:
    assert not isinstance(find_subscription_type(SHARED).make_policy(SubscriptionOptions()), FairShared)
