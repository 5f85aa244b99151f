"""What always is in memory takes from the caches what it needs beyond its share, and holes have a bound together."""

import asyncio
import logging
from pathlib import Path

import pytest

from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.log.cache import ENTRY_OVERHEAD_BYTES, StoredEntry, TailCache
from magnetar.broker.node.load_turns import (
    CACHE_SHRINK_STEP_BYTES,
    CLIENT_MEMORY_BYTES,
    CONNECTION_MEMORY_BYTES,
    HOLES_BYTES_MIN,
    SUBSCRIPTION_MEMORY_BYTES,
    TOPIC_MEMORY_BYTES,
    BrokerStateMemory,
    compute_cache_limits,
    compute_hole_memory_limit,
)
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.names import Position
from magnetar.proto.states import Blocked
from magnetar.runtime.budget import CallerMemory
from magnetar.runtime.clock import SystemClock
from tests.support.cluster import TestConsumer, TestProducer, cluster

MIB = 1 << 20
CONFIG = BrokerConfig(cache_bytes=60 * MIB, catch_up_cache_bytes=10 * MIB, state_memory_bytes=20 * MIB)
TOPIC = "persistent://public/default/t"


@pytest.mark.parametrize(
    ("state", "tail", "recent", "lacking"),
    [(0, 60, 10, 0), (20, 60, 10, 0), (25, 60, 5, 0), (40, 50, 0, 0), (90, 0, 0, 0), (100, 0, 0, 10)],
)
def test_the_cache_of_catch_up_reads_gives_first_then_the_tail(
    state: int, tail: int, recent: int, lacking: int
) -> None:
    assert compute_cache_limits(state * MIB, CONFIG) == (tail * MIB, recent * MIB, lacking * MIB)


def test_holes_of_all_subscriptions_are_within_the_limit_and_small_ones_lose_nothing() -> None:
    limit, own = 100 * MIB, 64 * MIB
    assert compute_hole_memory_limit([], limit, own) == own
    assert compute_hole_memory_limit([50 * MIB, 50 * MIB], limit, own) == own
    most = compute_hole_memory_limit([60 * MIB, 5 * MIB, 60 * MIB, 60 * MIB], limit, own)
    assert most == 95 * MIB // 3
    assert sum(min(size, most) for size in (60 * MIB, 5 * MIB, 60 * MIB, 60 * MIB)) <= limit
    assert compute_hole_memory_limit([MIB] * 10_000, limit, own) == HOLES_BYTES_MIN


async def test_caches_lose_a_step_at_a_look_and_get_it_back(caplog: pytest.LogCaptureFixture) -> None:
    recent, memory = TailCache(CONFIG.catch_up_cache_bytes), CallerMemory()
    cache = TailCache(CONFIG.cache_bytes, recent)
    for number in range(60):
        cache.add(StoredEntry(Position(1, number), (b"",), 1, number, MIB - ENTRY_OVERHEAD_BYTES, 0))
    state = BrokerStateMemory(CONFIG, SystemClock(), cache, memory)
    memory.connections = 200 * MIB // CONNECTION_MEMORY_BYTES
    with caplog.at_level(logging.WARNING, "magnetar.broker"):
        await state.measure_topics(())
        assert cache.bytes == 60 * MIB - CACHE_SHRINK_STEP_BYTES
        for _ in range(10):
            await state.measure_topics(())
    assert (cache.bytes, cache.bytes_max, recent.bytes_max) == (0, 0, 0)
    [record] = caplog.records
    assert "memory_bytes" in record.getMessage()
    memory.connections = 0
    await state.measure_topics(())
    assert (cache.bytes_max, recent.bytes_max) == (CONFIG.cache_bytes, CONFIG.catch_up_cache_bytes)


async def test_topics_subscriptions_and_clients_are_counted_and_holes_past_the_share_stop_what_is_new(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, state_memory_bytes=1) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        consumer = await TestConsumer(
            running.world, broker, TOPIC, type=wire.Subscribe.SHARED, initial_position=wire.Subscribe.EARLIEST
        ).ready()
        state, topic = broker.topic_manager.state, broker.topics[TOPIC]
        subscription = topic.subscriptions["s"]
        await state.measure_topics(broker.topics.values())
        connections = broker.topic_manager.memory.connections
        assert connections >= 1
        own = (
            connections * CONNECTION_MEMORY_BYTES
            + TOPIC_MEMORY_BYTES
            + SUBSCRIPTION_MEMORY_BYTES
            + 2 * CLIENT_MEMORY_BYTES
        )
        assert own <= state.bytes < own + 1024
        for number in range(20):
            await producer.send(b"%d" % number)
        deliveries = [await consumer.receive() for _ in range(20)]
        await consumer.ack(*deliveries[1::2])
        subscription.dispatcher.memory_bytes_max = 10
        await producer.send(b"new")
        async with asyncio.timeout(10):
            while subscription.pump.blocked is not Blocked.HOLES:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await state.measure_topics(broker.topics.values())
        assert subscription.dispatcher.memory_bytes_max == HOLES_BYTES_MIN
        assert await consumer.receive_payloads(1) == [b"new"], "it goes on when it may have more"
