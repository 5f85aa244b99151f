"""What a topic does not keep in memory while a producer is connected and no consumer is."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from magnetar.broker.node.load_turns import BrokerStateMemory
from magnetar.proto.names import TopicName
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


async def test_an_idle_topic_keeps_nothing_of_what_it_does_not_use(running: Cluster) -> None:
    await TestProducer(running.world, running.brokers[0], TOPIC).opened()
    broker = running.brokers[0].topic_manager
    topic = await broker.load_topic(TopicName.parse(TOPIC))
    subscription = await topic.registry.subscribe("s")
    config = replace(broker.config, state_memory_bytes=1 << 20)
    await BrokerStateMemory(config, running.world.clock, broker.cache, broker.memory).measure_topics([topic])
    store, letters, delayed = subscription.store, subscription.dead_letters, subscription.delayed
    assert store is not None
    assert letters is not None
    assert delayed is not None
    assert (delayed._used, delayed.core._used, topic.transactions._under_way) == (None, None, None)
    assert (topic.compaction._progress, topic.compaction._view, topic.compaction._tasks) == (None, None, None)
    assert (subscription.cursor._changed, subscription.cursor._holes) == (None, None)
    assert (subscription.pump._buffer, subscription.pump._returned, subscription.pump._started) == (None, None, None)
    assert (store._ledger_used, store._log, store._waiting) == (None, None, None)
    assert (topic._deleting, topic.producers._epochs, topic.dedup._ledger_used, letters._message) == (None,) * 4


async def test_what_is_used_is_made(running: Cluster) -> None:
    producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
    consumer = await TestConsumer(running.world, running.brokers[0], TOPIC, "s").ready()
    await producer.send(b"1")
    await consumer.ack(await consumer.receive())
    topic = await running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))
    subscription = topic.subscriptions["s"]
    assert subscription.store is not None
    await subscription.wait_durable()
    assert subscription.store._ledger_used is not None
    assert subscription.pump._buffer is not None
