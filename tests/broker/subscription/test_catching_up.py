"""Subscriptions that catch up from bookies: how much is read at a time, how often, and what stays in memory."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.log import reader as read_memory
from magnetar.broker.subscription.read_ahead import ReadAheadBuffer
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.names import Position
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"
EARLIEST = wire.Subscribe.EARLIEST
ENTRY = 1000
ENTRIES = 120


async def filled(running: Cluster) -> TestProducer:
    producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
    for number in range(ENTRIES):
        producer.publish(b"%0*d" % (ENTRY, number))
    for _ in range(ENTRIES):
        await producer.next("receipt")
    return producer


async def test_t16_subscriptions_side_by_side_read_storage_once_and_leave_the_tail_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path, cache_bytes=20_000, read_bytes=8_000) as running:
        producer = await filled(running)
        topic = running.brokers[0].topics[TOPIC]
        before = running.brokers[0].topic_manager.cache.statistics()
        consumers = [
            await TestConsumer(running.world, running.brokers[0], TOPIC, f"s{n}", initial_position=EARLIEST).ready()
            for n in range(8)
        ]
        wanted = [b"%0*d" % (ENTRY, number) for number in range(ENTRIES)]
        found = await asyncio.gather(*(consumer.receive_payloads(ENTRIES) for consumer in consumers))
        assert all(payloads == wanted for payloads in found)
        assert topic.log.reader.storage_reads <= 2 * ENTRIES * ENTRY // 8_000
        after = running.brokers[0].topic_manager.cache.statistics()
        assert after == before, "whoever catches up pushes nothing out of the tail"
        await producer.send(b"new")
        assert await consumers[0].receive_payloads(1) == [b"new"]


@pytest.mark.parametrize(("read_bytes", "limit", "chunk"), [(8_000, 256 << 20, 8_000), (32_000, 40_000, 8_000)])
async def test_t17_a_read_is_bounded_and_the_next_one_goes_while_this_one_is_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int, limit: int, chunk: int
) -> None:
    """Of the setting, or of the share of all that the broker has for reads."""
    monkeypatch.setattr(read_memory, "CHUNK_BYTES_MIN", 1_000)
    ahead: list[int] = []
    read = ReadAheadBuffer._read_ahead

    def noted(self: ReadAheadBuffer) -> None:
        read(self)
        ahead.append(self._ahead_bytes)

    monkeypatch.setattr(ReadAheadBuffer, "_read_ahead", noted)
    settings = {"cache_bytes": 0, "catch_up_cache_bytes": 0, "read_bytes": read_bytes, "read_memory_bytes": limit}
    async with cluster(tmp_path, **settings) as running:
        await filled(running)
        reader: Any = running.brokers[0].topics[TOPIC].log.reader
        sizes: list[int] = []
        from_bookies = reader._read

        async def measured(*asked: Any) -> Any:
            entries = await from_bookies(*asked)
            sizes.append(sum(entry.size for entry in entries))
            return entries

        reader._read = measured
        consumer = await TestConsumer(
            running.world, running.brokers[0], TOPIC, permits=0, initial_position=EARLIEST
        ).ready()
        for _ in range(ENTRIES // 4):
            consumer.permits(4)
            await consumer.receive_payloads(4)
        assert sum(sizes) >= ENTRIES * ENTRY
        assert max(sizes[1:]) <= chunk + 2 * ENTRY, "the first is of one that holds nothing yet"
        assert len(sizes) < ENTRIES / 4
        most = 2.5 * chunk + 4 * ENTRY + (sizes[0] - chunk)
        assert max(ahead) <= most, "two chunks and a half at a time are in memory"
        assert max(ahead) > chunk + 2 * ENTRY, "a chunk is read while a whole one waits"


async def test_who_lags_within_the_cache_holds_what_comes_next_before_the_cache_drops_it(tmp_path: Path) -> None:
    """A chunk and a half is on hand: what is read begins after that, and is under way before it is wanted."""
    settings = {"cache_bytes": 100_000, "catch_up_cache_bytes": 0, "read_bytes": 8_000}
    async with cluster(tmp_path, **settings) as running:
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        consumer = await TestConsumer(
            running.world, running.brokers[0], TOPIC, permits=0, initial_position=EARLIEST
        ).ready()

        async def publish(count: int) -> None:
            for _ in range(count):
                producer.publish(b"%0*d" % (ENTRY, 0))
            for _ in range(count):
                await producer.next("receipt")

        await publish(40)
        consumer.permits(4)
        await consumer.receive_payloads(4)
        reader: Any = running.brokers[0].topics[TOPIC].log.reader
        asked: list[int] = []
        from_bookies = reader._read

        async def measured(position: Position, *rest: Any) -> Any:
            asked.append(position.entry_id)
            return await from_bookies(position, *rest)

        reader._read = measured
        await publish(100)
        dropped = Position(*reader._shape.start_position)._replace(entry_id=20)
        assert reader.read_cached(dropped, 1, 1) == [], "the cache dropped it"
        consumer.permits(136)
        await consumer.receive_payloads(136)
        assert asked[0] >= 12
        assert asked == sorted(set(asked))


async def test_t17_slow_subscriptions_share_one_bound_and_hold_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 40_000
    settings = {"cache_bytes": 0, "catch_up_cache_bytes": 0, "read_bytes": 8_000, "read_memory_bytes": limit}
    async with cluster(tmp_path, **settings) as running:
        await filled(running)
        broker = running.brokers[0]
        reads = broker.topic_manager.reads
        used, may_read, reader = [0], asyncio.Event(), broker.topics[TOPIC].log.reader
        from_bookies, count = reader._read, reads.set_used_bytes_of_holder

        async def held_up(*asked: Any) -> Any:
            await may_read.wait()
            return await from_bookies(*asked)

        def noted(holder: ReadAheadBuffer, size: int) -> None:
            count(holder, size)
            used.append(reads.used_bytes)

        monkeypatch.setattr(reader, "_read", held_up)
        monkeypatch.setattr(reads, "set_used_bytes_of_holder", noted)
        slow = [
            await TestConsumer(running.world, broker, TOPIC, f"slow{n}", permits=1, initial_position=EARLIEST).ready()
            for n in range(20)
        ]
        async with asyncio.timeout(30):  # as many as fit share the first read, and all go on in one turn
            while reads.under_way < limit:  # noqa: ASYNC110 (it has no event for it)
                await asyncio.sleep(0)
        may_read.set()
        for consumer in slow:
            assert await consumer.receive_payloads(1) == [b"%0*d" % (ENTRY, 0)]
        most = max(used)
        wanted = [b"%0*d" % (ENTRY, number) for number in range(ENTRIES)]
        fast = await TestConsumer(running.world, broker, TOPIC, "fast", initial_position=EARLIEST).ready()
        assert await fast.receive_payloads(ENTRIES) == wanted
        assert limit / 2 < most <= limit + 8_000 + 2 * ENTRY, "twenty of them would have 160,000"
        assert reads.given_back
        for consumer in slow:
            consumer.permits(ENTRIES)
        found = await asyncio.gather(*(consumer.receive_payloads(ENTRIES - 1) for consumer in slow))
        assert all(payloads == wanted[1:] for payloads in found), "what was given back is read again"
        reads.check()
        assert reads.used_bytes <= limit + 8_000 + 2 * ENTRY
