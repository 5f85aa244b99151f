"""Non-persistent topics: handed to whoever is there, kept nowhere, dropped and counted when nobody keeps up."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.subscription.core.subscription_types import SUBSCRIPTION_TYPE_ROWS
from magnetar.broker.topic.nonpersistent import IN_FLIGHT_ENTRIES, NonPersistentLog
from magnetar.broker.topic.topic import Topic
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.common.errors import MessageTooBig
from magnetar.client.model.settings import ConsumerType
from magnetar.metadata import paths
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import AlreadyExists, Busy, TopicNotFound
from magnetar.proto.names import TopicName, compute_key_slot
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster

TOPIC = "non-persistent://public/default/n"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, bookies=0) as made:
        yield made


async def producer_of(running: Cluster) -> TestProducer:
    return await TestProducer(running.world, running.brokers[0], TOPIC).opened()


async def consumer_of(running: Cluster, name: str = "s", **options: Any) -> TestConsumer:
    return await TestConsumer(running.world, running.brokers[0], TOPIC, name, **options).ready()


def topic_of(running: Cluster) -> Topic:
    found = running.brokers[0].topics[TOPIC]
    assert isinstance(found.log, NonPersistentLog)
    return found


async def test_t2_without_a_bookie_publishes_are_taken_and_connected_consumers_get_them(running: Cluster) -> None:
    producer = await producer_of(running)
    await producer.send(b"nobody is there")
    first, second = await consumer_of(running, "a"), await consumer_of(running, "b")
    for number in range(50):
        receipt = await producer.send(b"%d" % number)
    assert receipt.index == 50
    wanted = [b"%d" % number for number in range(50)]
    assert await first.receive_payloads(50) == await second.receive_payloads(50) == wanted
    assert topic_of(running).dropped_messages == 0
    assert not await running.store.new_session().children(paths.topics("public", "default")), "no record of it"


@pytest.mark.parametrize("type_", sorted(SUBSCRIPTION_TYPE_ROWS), ids=lambda type_: wire.Subscribe.Type.Name(type_))
async def test_t2_every_subscription_type_is_served_and_nothing_is_redelivered(running: Cluster, type_: Any) -> None:
    producer = await producer_of(running)
    consumer = await consumer_of(running, type=type_)
    await producer.send(b"1")
    assert await consumer.receive_payloads(1) == [b"1"]
    consumer.frame(redeliver=wire.Redeliver())
    await producer.send(b"2")
    assert await consumer.receive_payloads(1) == [b"2"], "what was handed out does not come again"


async def test_t2_what_was_handed_out_holds_no_key_of_key_shared(running: Cluster) -> None:
    """A key that one consumer had got went to no other, not even when that one had left."""
    producer, first = await producer_of(running), await consumer_of(running, type=wire.Subscribe.KEY_SHARED)
    keys = [f"k{number}" for number in range(20)]

    async def send() -> None:
        for key in keys:
            await producer.send(key.encode(), key=key)

    await send()
    assert await first.receive_payloads(20) == [key.encode() for key in keys]
    dispatcher: Any = topic_of(running).subscriptions["s"].dispatcher
    (member,), policy = dispatcher.members.values(), dispatcher.policy
    second = await consumer_of(running, type=wire.Subscribe.KEY_SHARED)
    await send()
    assert not policy.slots_in_handover()
    assert not policy.slots.of, "nothing is outstanding"
    moved = [key for key in keys if policy.owners.find_owner(compute_key_slot(key)) is not member]
    assert await second.receive_payloads(len(moved)) == [key.encode() for key in moved]
    await first.leave()
    await send()
    assert await second.receive_payloads(20) == [key.encode() for key in keys]


async def test_t2_a_message_that_needs_chunks_is_refused_as_by_pulsars_clients(running: Cluster) -> None:
    """Two chunks are more than may be in flight: the first one was dropped, and the message never came."""
    async with aio.Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        consumer = await client.subscribe(TOPIC, "s")
        producer = await client.create_producer(TOPIC, batching_enabled=False, chunking_enabled=True)
        with pytest.raises(MessageTooBig):
            await producer.send(bytes(6 << 20))
        await producer.send(b"small")
        assert (await consumer.receive(10_000)).data() == b"small"


async def test_t2_policies_of_stored_topics_do_not_end_it(tmp_path: Path) -> None:
    """Deduplication and compaction keep their state in the record, and a non-persistent topic has none."""
    stored = {"deduplication": True, "compaction_threshold_bytes": 1}
    async with cluster(tmp_path, bookies=0, **stored) as running:
        producer, consumer = await producer_of(running), await consumer_of(running)
        for number in range(3):
            await producer.send(b"%d" % number)
            await running.brokers[0].topic_manager.maintain_topics()
        assert await consumer.receive_payloads(3) == [b"0", b"1", b"2"]
        assert not topic_of(running).dedup.is_enabled


async def test_t2_an_ack_is_taken_and_means_nothing(running: Cluster) -> None:
    producer, consumer = await producer_of(running), await consumer_of(running)
    await producer.send(b"1")
    await consumer.ack(await consumer.receive())


async def test_t2_what_a_consumer_does_not_take_in_time_is_dropped_and_counted(running: Cluster) -> None:
    producer = await producer_of(running)
    consumer, other = await consumer_of(running, "slow", permits=10), await consumer_of(running, "fast", permits=9999)
    count = IN_FLIGHT_ENTRIES + 500
    for number in range(count):
        producer.publish(b"%d" % number)
    assert len(await other.receive_payloads(count)) == count
    assert await consumer.receive_payloads(10) == [b"%d" % number for number in range(10)]
    consumer.permits(9999)
    rest = await consumer.receive_payloads(IN_FLIGHT_ENTRIES)
    assert rest == [b"%d" % number for number in range(500, count)]
    assert topic_of(running).dropped_messages == 490


async def test_t2_a_subscription_whose_consumers_left_is_gone_with_what_they_did_not_take(running: Cluster) -> None:
    producer, consumer = await producer_of(running), await consumer_of(running, permits=0)
    await producer.send(b"1")
    consumer.requests += 1
    await consumer.ask(close=consumer.requests)
    again = await consumer_of(running)
    await producer.send(b"2")
    assert await again.receive_payloads(1) == [b"2"]


def test_t2_a_non_persistent_name_is_another_topic_than_the_persistent_one() -> None:
    name = TopicName.parse(TOPIC)
    assert (name.full, name.persistent, name.stored_local) == (TOPIC, False, "n")
    assert name != TopicName.parse("public/default/n")
    assert name.with_partition(0).full == TOPIC + "-partition-0"


async def test_t2_partitions_live_at_several_brokers_and_lists_show_what_is_in_memory(tmp_path: Path) -> None:
    name, single = "non-persistent://public/default/parted", "non-persistent://public/default/single"
    async with cluster(tmp_path, bookies=0, brokers=2) as running:
        one, two = (f"magnetar://{broker.endpoint}" for broker in running.brokers)
        async with AdminClient(one) as admin, aio.Client(two) as client:
            await admin.create_topic(name, partitions=3)
            with pytest.raises(AlreadyExists):
                await admin.create_topic(name)
            with pytest.raises(TopicNotFound, match="no partition 3"):
                await admin.topic_stats(f"{name}-partition-3")
            assert await admin.topics() == [name]
            assert await admin.topics(partitions=True) == [f"{name}-partition-{i}" for i in range(3)]
            await admin.topic_stats(f"{name}-partition-0")  # by the first broker; the others by the second
            consumer = await client.subscribe(name, "s", ConsumerType.Shared)
            producer = await client.create_producer(name, batching_enabled=False)
            await (await client.create_producer(single)).send(b"x")
            for number in range(9):
                await producer.send(b"%d" % number)
            got = [await consumer.receive(30_000) for _ in range(9)]
            assert {message.data() for message in got} == {b"%d" % number for number in range(9)}
            assert len({message.topic_name() for message in got}) == 3
            assert await admin.topics() == [name, single], "whichever broker is asked"
            assert not await running.store.new_session().children(paths.topics("public", "default"))
            with pytest.raises(Busy, match="non-persistent"):
                await admin.delete_namespace("public/default")
            await admin.update_topic(name, partitions=4)
            assert await admin.partitions(name) == 4
            await client.close()
            await admin.delete_topic(name)
            assert await admin.topics() == [single]
            await admin.delete_namespace("public/default", force=True)
            assert not any(broker.topic_manager.loaded for broker in running.brokers)
