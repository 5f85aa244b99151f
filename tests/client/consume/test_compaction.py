"""Compaction and `read_compacted` through the SDK, on a real broker and bookie: what is shown, and in which order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.topic import statistics as backlog
from magnetar.broker.topic.topic import Topic
from magnetar.client.client import Client
from magnetar.client.common.errors import ConsumerBusy, InvalidConfiguration, Timeout
from magnetar.client.model.message import Message
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto.names import TopicName
from tests.support.cluster import Cluster, cluster

TOPIC = "prices"


class Bench:
    def __init__(self, running: Cluster, client: Client) -> None:
        self.running = running
        self.client = client

    async def topic(self) -> Topic:
        return await self.running.brokers[-1].topic_manager.load_topic(TopicName.parse(TOPIC))

    async def compact(self) -> Topic:
        topic = await self.topic()
        topic.compaction.start()
        await topic.compaction.wait_finished()
        assert topic.compaction.progress.error == ""
        return topic

    async def send(self, *messages: tuple[str | None, bytes | None], batch: bool = True) -> None:
        """As one batch, or each alone."""
        producer = await self.client.create_producer(TOPIC, batching_enabled=batch, batching_max_publish_delay_ms=1000)
        sent = [asyncio.create_task(producer.send(value, partition_key=key)) for key, value in messages]  # type: ignore
        await asyncio.sleep(0)
        await producer.flush()
        await asyncio.gather(*sent)
        await producer.close()

    async def read_all(self, **options: Any) -> list[tuple[str, bytes]]:
        reader = await self.client.create_reader(
            TOPIC, options.pop("start", MessageId.earliest), is_read_compacted=True, **options
        )
        found = []
        while await reader.has_message_available():
            message = await reader.read_next(30_000)
            found.append((message.partition_key(), message.data()))
        with pytest.raises(Timeout):
            await reader.read_next(50)
        await reader.close()
        return found


@asynccontextmanager
async def bench(folder: Path, **changes: object) -> AsyncIterator[Bench]:
    async with cluster(folder, **changes) as running:
        client = Client(f"magnetar://{running.brokers[0].endpoint}")
        try:
            yield Bench(running, client)
        finally:
            await client.close()


@pytest.fixture
async def on(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench(tmp_path) as on:
        yield on


async def test_a_reader_sees_the_latest_of_each_key_then_the_rest_each_once(on: Bench) -> None:
    await on.send(("a", b"1"), ("b", b"1"), ("a", b"2"))
    await on.send(("c", b"1"), batch=False)
    await on.send(("b", None), ("d", b"1"), (None, b"no key"))
    assert len(await on.read_all()) == 7
    topic = await on.compact()
    assert topic.compaction.record is not None
    assert topic.compaction.record.messages == 3
    assert await on.read_all() == [("a", b"2"), ("c", b"1"), ("d", b"1")]
    await on.send(("a", b"3"), ("e", b""))
    assert await on.read_all() == [("a", b"2"), ("c", b"1"), ("d", b"1"), ("a", b"3"), ("e", b"")]
    await on.compact()
    assert await on.read_all() == [("c", b"1"), ("d", b"1"), ("a", b"3")]
    everything = await on.client.create_reader(TOPIC, MessageId.earliest)
    assert [(await everything.read_next(30_000)).data() for _ in range(9)][-1] == b""


async def test_the_end_is_known_when_the_last_messages_were_removed(on: Bench) -> None:
    await on.send(("a", b"1"), ("b", b"1"))
    await on.send(("b", None), batch=False)
    await on.compact()
    assert await on.read_all() == [("a", b"1")]
    await on.send(("a", None), batch=False)
    await on.compact()
    assert await on.read_all() == []
    assert await on.read_all(start=MessageId.latest) == []
    await on.send(("z", b"9"), batch=False)
    assert await on.read_all() == [("z", b"9")]


async def test_seek_by_id_and_time_goes_right_across_the_border(on: Bench) -> None:
    for number in range(6):
        await on.send((f"k{number % 3}", b"%d" % number), batch=False)
    await on.compact()
    await on.send(("k0", b"6"), batch=False)
    reader = await on.client.create_reader(TOPIC, MessageId.earliest, is_read_compacted=True)
    shown = [await reader.read_next(30_000) for _ in range(4)]
    assert [message.data() for message in shown] == [b"3", b"4", b"5", b"6"]
    for back, message in enumerate(shown):
        await reader.seek(message.message_id())
        assert [(await reader.read_next(30_000)).data() for _ in shown[back + 1 :]] == [
            each.data() for each in shown[back + 1 :]
        ]
        assert not await reader.has_message_available()
    await reader.seek(0)
    assert [(await reader.read_next(30_000)).data() for _ in range(4)] == [b"3", b"4", b"5", b"6"]
    await reader.seek(MessageId.earliest)
    assert (await reader.read_next(30_000)).data() == b"3"


async def test_what_the_log_has_trimmed_is_still_there_compacted_also_after_a_restart(tmp_path: Path) -> None:
    async with bench(tmp_path, roll_entries=3) as on:
        for number in range(20):
            await on.send((f"k{number % 5}", b"%d" % number), batch=False)
        topic = await on.topic()
        before = topic.log.shape.first_index
        topic = await on.compact()
        assert await topic.trim_ledgers()
        assert topic.log.shape.first_index > before
        latest = [b"%d" % number for number in range(15, 20)]
        assert [value for _, value in await on.read_all()] == latest
        for number in range(20, 22):
            await on.send((f"k{number % 5}", b"%d" % number), batch=False)
        topic = await on.compact()
        assert [value for _, value in await on.read_all()] == [b"%d" % number for number in range(17, 22)]
        await on.running.brokers[0].topic_manager.unload_topic(topic.name)
        assert [value for _, value in await on.read_all()] == [b"%d" % number for number in range(17, 22)]
        consumer = await on.client.subscribe(
            TOPIC, "s", is_read_compacted=True, initial_position=InitialPosition.Earliest
        )
        first = await consumer.receive(30_000)
        await consumer.acknowledge(first)
        await consumer.close()
        topic = await on.topic()
        await on.running.brokers[0].topic_manager.unload_topic(topic.name)
        consumer = await on.client.subscribe(TOPIC, "s", is_read_compacted=True)
        assert [(await consumer.receive(5000)).data() for _ in range(4)] == [b"%d" % number for number in range(18, 22)]


async def test_a_durable_consumer_acknowledges_across_the_border_and_gets_nothing_twice(on: Bench) -> None:
    await on.send(("a", b"1"), ("b", b"1"), ("a", b"2"), ("c", b"1"))
    await on.compact()
    await on.send(("c", b"2"), batch=False)
    options: dict[str, Any] = {
        "is_read_compacted": True, "initial_position": InitialPosition.Earliest,
        "consumer_type": ConsumerType.Exclusive,
    }  # fmt: skip
    consumer = await on.client.subscribe(TOPIC, "s", **options)
    received: list[Message] = [await consumer.receive(30_000) for _ in range(4)]
    assert [message.data() for message in received] == [b"1", b"2", b"1", b"2"]
    for message in received:
        await consumer.acknowledge(message)
    await consumer.close()
    topic = await on.topic()
    assert await backlog.count_unacknowledged(topic.log, topic.find_subscription("s")) == 0
    assert topic.find_subscription("s").cursor.mark == topic.log.shape.last_position
    consumer = await on.client.subscribe(TOPIC, "s", **options)
    await on.send(("d", b"1"), batch=False)
    assert (await consumer.receive(30_000)).data() == b"1"


async def test_a_standby_goes_on_in_the_compacted_form_with_what_was_not_acknowledged(on: Bench) -> None:
    for number in range(12):
        await on.send((f"k{number % 6}", b"%d" % number), batch=False)
    await on.compact()
    await on.send(("k0", b"12"), ("k9", b"13"))
    options: dict[str, Any] = {
        "is_read_compacted": True, "initial_position": InitialPosition.Earliest,
        "consumer_type": ConsumerType.Failover,
    }  # fmt: skip
    first = await on.client.subscribe(TOPIC, "s", consumer_name="a", **options)
    standby = await on.client.subscribe(TOPIC, "s", consumer_name="b", **options)
    shown = [await first.receive(30_000) for _ in range(8)]
    assert [message.data() for message in shown] == [b"%d" % each for each in range(6, 14)]
    await first.acknowledge_cumulative(shown[1])
    await first.acknowledge(shown[6])
    with pytest.raises(Timeout):
        await standby.receive(50)
    await first.close()
    taken = [await standby.receive(30_000) for _ in range(5)]
    assert [message.data() for message in taken] == [b"8", b"9", b"10", b"11", b"13"]
    await on.send(("k9", b"14"), batch=False)
    assert (await standby.receive(30_000)).data() == b"14"
    with pytest.raises(ConsumerBusy):
        await on.client.subscribe(TOPIC, "s", consumer_type=ConsumerType.Failover)


async def test_a_compaction_meanwhile_neither_repeats_nor_shows_what_it_removed(on: Bench) -> None:
    for number in range(30):
        await on.send((f"k{number % 10}", b"%d" % number), batch=False)
    reader = await on.client.create_reader(TOPIC, MessageId.earliest, is_read_compacted=True, receiver_queue_size=1)
    shown = [(await reader.read_next(30_000)).data() for _ in range(5)]
    await on.compact()
    while await reader.has_message_available():
        shown.append((await reader.read_next(30_000)).data())
    waited = [b"5"] if b"5" in shown else []  # it was at the client already
    assert shown == [*(b"%d" % number for number in range(5)), *waited, *(b"%d" % each for each in range(20, 30))]


async def test_read_compacted_is_refused_where_there_is_no_order(on: Bench) -> None:
    with pytest.raises(InvalidConfiguration):
        await on.client.subscribe(TOPIC, "s", ConsumerType.Shared, is_read_compacted=True)


async def test_a_topic_is_compacted_by_its_policy_and_holds_what_is_not(tmp_path: Path) -> None:
    async with bench(tmp_path, roll_entries=3, compaction_threshold_bytes=1000) as on:
        for number in range(20):
            await on.send((f"k{number % 2}", b"%d" % number * 30), batch=False)
        topic = await on.topic()
        assert await topic.trim_ledgers() == [], "what was never compacted is not trimmed"
        await on.running.brokers[0].topic_manager.maintain_topics()
        await topic.compaction.wait_finished()
        assert topic.compaction.record is not None
        assert await topic.trim_ledgers()
        assert len(await on.read_all()) == 2
        await on.running.brokers[0].topic_manager.maintain_topics()
        assert not topic.compaction.is_running, "nothing is due"


async def test_a_deleted_topic_leaves_no_ledger_of_compactions_behind(on: Bench) -> None:
    await on.send(("a", b"1"))
    for value in (b"2", b"3"):
        await on.compact()
        await on.send(("a", value))
    await on.compact()
    topic = await on.topic()
    owned = on.running.brokers[0].topic_manager
    ledgers = await on.running.store.children("/ledgers")
    assert len(ledgers) == 2, "the log's, and the compacted one"
    await owned.delete_topic(topic.name, force=True)
    assert await on.running.store.children("/ledgers") == []
