"""Consumers over lists and patterns, on a real broker: topics come and go, and nothing is missed."""

import asyncio
import re
from pathlib import Path

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import Timeout
from magnetar.client.consume.consumer import Consumer
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType, InitialPosition, RegexSubscriptionMode
from magnetar.proto import wire_pb2 as wire
from magnetar.runtime.network import find_rpc
from tests.client.consume.test_table_view import until
from tests.support.cluster import Cluster, cluster


async def send(client: Client, topic: str, *payloads: bytes) -> list[MessageId]:
    producer = await client.create_producer(topic, batching_enabled=False)
    sent = [await producer.send(payload) for payload in payloads]
    await producer.close()
    return sent


async def received(consumer: Consumer, count: int) -> list[bytes]:
    found = [await consumer.receive(10_000) for _ in range(count)]
    await consumer.acknowledge(found)
    return sorted(message.data() for message in found)


async def admin(running: Cluster, method: str, request: object) -> None:
    channel = running.world.network.connect(running.brokers[0].endpoint)
    await channel.call(find_rpc("Admin", method), request, timeout_s=10)  # type: ignore[arg-type]
    await channel.close()


def topics_of(consumer: Consumer) -> list[str]:
    return sorted(each.topic.full.rsplit("/", 1)[1] for each in consumer.partitions)


async def test_topics_that_match_are_told_by_the_broker_and_nothing_of_them_is_missed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        await send(client, "old-1", b"before")
        consumer = await client.subscribe(re.compile("persistent://public/default/old-.*"), "s")
        assert topics_of(consumer) == ["old-1"]
        await send(client, "other", b"never")
        await send(client, "old-2", b"first of a new topic", b"second")
        await send(client, "old-1", b"later")
        assert await received(consumer, 3) == [b"first of a new topic", b"later", b"second"]
        await admin(running, "CreateTopic", wire.TopicSpec(name="persistent://public/default/old-p", partitions=3))
        await until(lambda: topics_of(consumer) == ["old-1", "old-2", *(f"old-p-partition-{i}" for i in range(3))])
        await send(client, "old-p", b"p1", b"p2", b"p3")
        assert await received(consumer, 3) == [b"p1", b"p2", b"p3"]
        with pytest.raises(Timeout):
            await consumer.receive(50)
        await consumer.close()


async def test_a_deleted_topic_leaves_is_not_made_again_and_may_come_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        await send(client, "t-1", b"x")
        await send(client, "t-2", b"x")
        consumer = await client.subscribe(re.compile("t-.*"), "s", initial_position=InitialPosition.Earliest)
        held = [await consumer.receive(10_000) for _ in range(2)]
        gone = next(message for message in held if message.topic_name().endswith("t-1"))
        await admin(running, "DeleteTopic", wire.DeleteRequest(name="persistent://public/default/t-1", force=True))
        await until(lambda: topics_of(consumer) == ["t-2"])
        await consumer.acknowledge(gone)  # there is nothing left to acknowledge, and that is no fault
        await asyncio.sleep(0.3)
        assert await running.store.children("/topics/public/default") == ["t-2"]
        await send(client, "t-2", b"still")
        assert await received(consumer, 1) == [b"still"]
        await send(client, "t-1", b"anew")
        assert await received(consumer, 1) == [b"anew"]


async def test_a_pattern_without_a_topic_waits_for_the_first_and_survives_a_broken_watch(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        consumer = await client.subscribe(re.compile("later-.*"), "s", ConsumerType.Shared)
        assert consumer.partitions == []
        watch = consumer._watch
        assert watch is not None
        watch._stream.cancel()  # type: ignore[attr-defined]
        await send(client, "later-1", b"1")
        assert await received(consumer, 1) == [b"1"]
        watch._stream.cancel()  # type: ignore[attr-defined]
        await admin(running, "DeleteTopic", wire.DeleteRequest(name="persistent://public/default/later-1", force=True))
        await until(lambda: consumer.partitions == [])
        await send(client, "later-2", b"2")
        assert await received(consumer, 1) == [b"2"]


async def test_non_persistent_topics_are_found_while_they_are_in_memory(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        first = await client.create_producer("non-persistent://public/default/n-1")
        await send(client, "n-2", b"kept")
        modes = (RegexSubscriptionMode.NonPersistentOnly, RegexSubscriptionMode.AllTopics)
        only, all_ = [
            await client.subscribe(
                re.compile("non-persistent://public/default/n-.*"), f"s{mode}", regex_subscription_mode=mode,
                pattern_auto_discovery_period=0, initial_position=InitialPosition.Earliest,
            )
            for mode in modes
        ]  # fmt: skip
        assert (topics_of(only), topics_of(all_)) == (["n-1"], ["n-1", "n-2"])
        later = await client.create_producer("non-persistent://public/default/n-3")
        await until(lambda: topics_of(only) == ["n-1", "n-3"])
        await until(lambda: topics_of(all_) == ["n-1", "n-2", "n-3"])
        for producer in (first, later):
            await producer.send(b"passing")
        assert await received(only, 2) == [b"passing"] * 2
        assert await received(all_, 3) == [b"kept", b"passing", b"passing"]
        await admin(running, "DeleteTopic", wire.DeleteRequest(name="persistent://public/default/n-2", force=True))
        await until(lambda: topics_of(all_) == ["n-1", "n-3"])


async def test_acks_nacks_seek_and_redelivery_on_many_topics_over_namespaces(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        await admin(running, "CreateNamespace", wire.NamespaceSpec(name="public/second"))
        topics = ["one", "persistent://public/second/two", "three"]
        consumer = await client.subscribe(
            topics, "s", ConsumerType.Shared, negative_ack_redelivery_delay_ms=50, receiver_queue_size=100,
            max_total_receiver_queue_size_across_partitions=30,
        )  # fmt: skip
        assert [each.core.permits._size for each in consumer.partitions] == [10, 10, 10]
        for topic in topics:
            await send(client, topic, b"a" + topic[-1:].encode(), b"b" + topic[-1:].encode())
        first = [await consumer.receive(10_000) for _ in range(6)]
        assert {message.topic_name() for message in first} == {each.topic.full for each in consumer.partitions}
        for message in first[:4]:
            await consumer.acknowledge(message)
        for message in first[4:]:
            await consumer.negative_acknowledge(message)
        again = sorted(message.data() for message in [await consumer.receive(10_000) for _ in range(2)])
        assert again == sorted(message.data() for message in first[4:])
        consumer.redeliver_unacknowledged_messages()
        assert await received(consumer, 2) == again
        await consumer.seek(MessageId.earliest)
        assert len(await received(consumer, 6)) == 6
        await consumer.seek(0)
        assert len(await received(consumer, 6)) == 6
        await consumer.close()
        consumer = await client.subscribe(topics, "s", ConsumerType.Shared)
        with pytest.raises(Timeout):
            await consumer.receive(100)


async def test_room_is_shared_out_again_when_topics_come_and_go(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        await send(client, "q-1", b"x")
        consumer = await client.subscribe(
            re.compile("q-.*"), "s", max_total_receiver_queue_size_across_partitions=60, receiver_queue_size=50
        )
        assert [each.core.permits._size for each in consumer.partitions] == [50]
        for number in (2, 3):
            await send(client, f"q-{number}", b"x")
        await until(lambda: [each.core.permits._size for each in consumer.partitions] == [20, 20, 20])
        await admin(running, "DeleteTopic", wire.DeleteRequest(name="persistent://public/default/q-2", force=True))
        await until(lambda: [each.core.permits._size for each in consumer.partitions] == [30, 30])
        sent = [b"%d" % number for number in range(200)]
        await send(client, "q-1", *sent)
        assert sorted(await received(consumer, 201)) == sorted([*sent, b"x"])
        consumer.check()


async def test_a_reader_of_a_partitioned_topic_seeks_one_partition_by_id_and_all_by_time(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        await admin(running, "CreateTopic", wire.TopicSpec(name="persistent://public/default/parts", partitions=2))
        ids = await send(client, "parts", *(b"%d" % number for number in range(8)))
        reader = await client.create_reader("parts", MessageId.earliest)
        assert len([await reader.read_next(10_000) for _ in range(8)]) == 8
        assert not await reader.has_message_available()
        of_first = [id_ for id_ in ids if id_.partition() == 0]
        await reader.seek(of_first[0])
        back = [await reader.read_next(10_000) for _ in of_first[1:]]
        assert [message.message_id() for message in back] == of_first[1:]
        assert not await reader.has_message_available()
        await reader.seek(0)
        assert len([await reader.read_next(10_000) for _ in range(8)]) == 8
