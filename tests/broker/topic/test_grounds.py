"""What is loaded when its ground changes: the topic's first compaction, transaction, policy or delay comes while a
subscription, a reader or a producer is there, with unread messages. It goes on, and shows what a new one would.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.topic.topic import Topic
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import Unavailable
from magnetar.proto.names import TopicName
from tests.broker.topic.coordination import FakeCoordinator, coordinator
from tests.broker.topic.test_transactions import TxnProducer
from tests.support.cluster import Cluster, MagnetarError, TestConsumer, TestProducer, cluster, payloads_of

TOPIC = "persistent://public/default/t"
EARLIEST = wire.MessageId(ledger_id=-1, entry_id=-1)
NULL = b""
"""An empty value removes a key, as none does."""
LATEST_OF_EACH = [b"b2", b"d4", b"e5", b"b6"]
__all__ = ["coordinator"]


class Loaded:
    def __init__(self, running: Cluster, producer: TestProducer, topic: Topic) -> None:
        self.running, self.producer, self.topic = running, producer, topic

    async def send(self, *messages: tuple[str, bytes]) -> None:
        for key, value in messages:
            await self.producer.send(value, key=key)

    async def compact(self) -> None:
        self.topic.compaction.start()
        await self.topic.compaction.wait_finished()
        assert self.topic.compaction.progress.error == ""

    async def consumer(self, name: str = "s", **options: Any) -> TestConsumer:
        options = {"read_compacted": True, "initial_position": wire.Subscribe.EARLIEST} | options
        return await TestConsumer(self.running.world, self.running.brokers[0], TOPIC, name, **options).ready()

    async def first(self) -> None:
        """Of a, nothing is left; of b, the first; of c, nothing; of d, the only one."""
        await self.send(("a", b"a1"), ("a", NULL), ("b", b"b2"), ("c", b"c3"), ("c", NULL), ("d", b"d4"))

    async def later(self) -> None:
        await self.send(("e", b"e5"), ("b", b"b6"))


@asynccontextmanager
async def loaded(folder: Path, **changes: object) -> AsyncIterator[Loaded]:
    async with cluster(folder, **changes) as running:
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        yield Loaded(running, producer, await running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC)))


@pytest.fixture
async def on(tmp_path: Path) -> AsyncIterator[Loaded]:
    async with loaded(tmp_path) as on:
        yield on


async def all_of(consumer: TestConsumer, *, ack: bool = True, least: int = 0) -> list[bytes]:
    """What comes until nothing does; for `least` messages it waits, however busy the machine is."""
    found: list[bytes] = []
    while consumer.items or not await consumer.quiet(0.2 if len(found) >= least else 10.0):
        if all(each.WhichOneof("kind") == "active" for each in consumer.items):
            consumer.items.clear()
            continue
        delivery = await consumer.receive()
        found += payloads_of(delivery.entry)
        if ack:
            await consumer.ack(delivery)
    return found


TYPES = [wire.Subscribe.EXCLUSIVE, wire.Subscribe.FAILOVER]


# ------------------------------------------------------------------------------------- compaction
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("rounds", [1, 2, 3])
async def test_a_subscription_that_reads_compacted_goes_on_after_a_compaction_while_it_was_away(
    type_: Any, rounds: int, on: Loaded
) -> None:
    await (await on.consumer(type=type_)).leave()
    await on.first()
    for _ in range(rounds - 1):
        await on.compact()
        await on.first()
    await on.compact()
    await on.later()
    consumer = await on.consumer(type=type_)
    assert await all_of(consumer) == LATEST_OF_EACH
    await on.send(("z", b"z"))
    assert await all_of(consumer) == [b"z"]


@pytest.mark.parametrize("acked", [True, False])
@pytest.mark.parametrize("read", [0, 1, 3, 6])
async def test_a_consumer_that_reads_compacted_starts_over_and_goes_on_after_a_compaction(
    read: int, acked: bool, on: Loaded
) -> None:
    """It has read so much of what there is, and is told to subscribe again if any of that, or the rest, is left."""
    consumer = await on.consumer(permits=read)
    await on.first()
    for _ in range(read):
        delivery = await consumer.receive()
        if acked:
            await consumer.ack(delivery)
    await on.compact()
    await on.later()
    if acked and read == 6:
        consumer.permits(100)
        assert await all_of(consumer) == [b"e5", b"b6"]
        return
    with pytest.raises(Unavailable, match="was compacted"):
        await consumer.next("delivery")
    again = await on.consumer()
    assert await all_of(again) == (LATEST_OF_EACH if not acked or read < 3 else LATEST_OF_EACH[1:])


async def test_one_that_does_not_last_and_gives_back_what_was_compacted_away_goes_on(on: Loaded) -> None:
    consumer = await on.consumer(durable=False, start=EARLIEST, type=wire.Subscribe.FAILOVER)
    await on.first()
    assert len(await all_of(consumer, ack=False)) == 6
    await on.compact()
    await on.later()
    consumer.frame(redeliver=wire.Redeliver())
    least = len(LATEST_OF_EACH)
    try:
        found = await all_of(consumer, least=least)
    except MagnetarError:
        again = await on.consumer(durable=False, start=EARLIEST, type=wire.Subscribe.FAILOVER)
        found = await all_of(again, least=least)
    assert found == LATEST_OF_EACH


@pytest.mark.parametrize("compacted", [True, False])
@pytest.mark.parametrize("read", [0, 2, 6])
async def test_a_reader_goes_on_after_the_first_compaction(tmp_path: Path, compacted: bool, read: int) -> None:
    everything = [b"a1", NULL, b"b2", b"c3", NULL, b"d4"]
    async with loaded(tmp_path) as on:
        await on.first()
        options = {"durable": False, "read_compacted": compacted, "start": EARLIEST}
        reader = await on.consumer("r", permits=read, **options)
        assert await reader.receive_payloads(read) == everything[:read]
        await on.compact()
        await on.later()
        reader.permits(100)
        if compacted and read < 6:
            with pytest.raises(Unavailable, match="was compacted"):
                await reader.next("delivery")
            reader = await on.consumer("r", **options)
            assert await all_of(reader, ack=False) == LATEST_OF_EACH
        else:
            assert await all_of(reader, ack=False) == [*everything[read:], b"e5", b"b6"]


@pytest.mark.parametrize("type_", [*TYPES, wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED])
async def test_what_reads_everything_does_not_notice_a_compaction_also_when_its_last_consumer_read_compacted(
    type_: Any, on: Loaded
) -> None:
    await (await on.consumer()).leave()
    connected = await on.consumer("plain", type=type_, read_compacted=False, permits=2)
    await on.first()
    await on.compact()
    await on.later()
    connected.permits(100)
    for consumer in (connected, await on.consumer(type=type_, read_compacted=False)):
        assert sorted(await all_of(consumer)) == sorted([b"a1", NULL, b"b2", b"c3", NULL, b"d4", b"e5", b"b6"])


@pytest.mark.parametrize("reload", [False, True])
async def test_what_survives_of_a_trimmed_ledger_is_there_after_a_first_transaction(
    tmp_path: Path, coordinator: FakeCoordinator, reload: bool
) -> None:
    """A mark in a ledger that only the compacted form has stays there while no consumer is connected."""
    async with loaded(tmp_path, trim_interval_s=3600.0) as on:
        await on.first()
        await on.topic.log.roll_ledger()
        await on.later()
        await on.compact()
        assert await on.topic.trim_ledgers(retained=False)
        consumer = await on.consumer()
        first, *rest = [await consumer.receive() for _ in range(3)]
        assert payloads_of(first.entry) == [b"d4"]
        await consumer.ack(*rest)
        await consumer.leave()
        if reload:
            await on.producer.close()
            await on.running.brokers[0].topic_manager.unload_topic(TopicName.parse(TOPIC))
            on.topic = await on.running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))
        producer = await TxnProducer(on.running.world, on.running.brokers[0], TOPIC, "q").opened()
        txn = coordinator.begin()
        await producer.send_in(txn, b"gone")
        await coordinator.end(on.topic, txn, False)
        assert await all_of(await on.consumer()) == [b"d4"]


# ------------------------------------------------------------------------------------- transactions, policies, delays
@pytest.mark.parametrize("type_", [*TYPES, wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED])
@pytest.mark.parametrize("compacted", [False, True])
async def test_whatever_is_loaded_goes_on_after_the_first_transaction(
    tmp_path: Path, coordinator: FakeCoordinator, type_: Any, compacted: bool
) -> None:
    if compacted and type_ not in TYPES:
        return
    everything = [b"a1", NULL, b"b2", b"c3", NULL, b"d4", b"in", b"e5", b"b6"]
    async with loaded(tmp_path) as on:
        options = {"type": type_, "read_compacted": compacted}
        await (await on.consumer("away", **options)).leave()
        unread = await on.consumer("unread", permits=2, **options)
        reader = await on.consumer("r", durable=False, read_compacted=compacted, start=EARLIEST, permits=2)
        await on.first()
        producer = await TxnProducer(on.running.world, on.running.brokers[0], TOPIC, "q").opened()
        gone, txn = coordinator.begin(), coordinator.begin()
        await producer.send_in(gone, b"gone")
        await producer.send_in(txn, b"in")
        await on.later()
        await coordinator.end(on.topic, gone, False)
        await coordinator.end(on.topic, txn, True)
        for consumer in (unread, reader):
            consumer.permits(100)
        for consumer in (unread, reader, await on.consumer("away", **options)):
            found = await all_of(consumer, ack=consumer is not reader)
            assert sorted(found) == sorted(everything)
            assert found == everything or type_ == wire.Subscribe.KEY_SHARED


@pytest.mark.parametrize("type_", [wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED])
async def test_whatever_is_loaded_goes_on_after_a_first_delayed_message_and_a_first_dead_letter_policy(
    type_: Any, on: Loaded
) -> None:
    options = {"type": type_, "read_compacted": False}
    await (await on.consumer("away", **options)).leave()
    unread = await on.consumer("unread", permits=2, **options)
    await on.first()
    held = [await unread.receive() for _ in range(2)]
    await on.producer.send(b"late", key="l", deliver_at_ms=on.running.world.clock.wall_ms() + 400)
    for each in ("away", "unread"):
        subscription = on.topic.find_subscription(each)
        await on.topic.registry.set_properties(subscription, {"dead-letter.max-redeliver-count": "3"})
    assert len(held) == 2
    unread.frame(redeliver=wire.Redeliver())
    unread.permits(100)
    for consumer in (unread, await on.consumer("away", **options)):
        found = await consumer.receive_payloads(7)
        assert sorted(found) == sorted([b"a1", NULL, b"b2", b"c3", NULL, b"d4", b"late"])
        assert found[-1] == b"late"


async def test_a_producer_that_is_connected_goes_on_when_deduplication_is_turned_on_and_off(on: Loaded) -> None:
    await on.first()
    applied = on.topic.applied
    for enabled in (True, False, True):
        on.topic.apply(replace(applied, deduplication=enabled))
        await on.later()  # the first of them turns it on or off
        if (working := on.topic.dedup._working) is not None:
            await working
        assert on.topic.dedup.is_enabled is enabled
        on.producer.sequence_id -= 1
        assert (await on.producer.send(b"b6", key="b")).duplicate is enabled
        await on.later()
    reader = await on.consumer("r", durable=False, read_compacted=False, start=EARLIEST)
    assert len(await all_of(reader, ack=False)) == 6 + 3 * 4 + 1
