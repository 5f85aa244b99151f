"""Looking into a topic: exact backlogs in messages, single messages."""

import asyncio
from pathlib import Path

import pytest

from magnetar.broker.topic.statistics import analyze_backlog, find_nth_message, read_message
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import NotFound
from magnetar.proto.names import Position
from magnetar.runtime.network import find_rpc
from tests.support.cluster import TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"


async def test_a18_the_precise_backlog_counts_messages_whatever_was_acknowledged_out_of_order(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=3) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        consumer = await TestConsumer(
            running.world, broker, TOPIC, initial_position=wire.Subscribe.EARLIEST, type=wire.Subscribe.SHARED
        ).ready()
        for size in (1, 10, 1, 5, 2, 4):
            await producer.send(*[b"x"] * size)
        deliveries = [await consumer.receive() for _ in range(6)]
        topic = broker.topics[TOPIC]
        subscription = topic.find_subscription("s")
        assert (await analyze_backlog(topic.log, subscription))[:3] == (6, 23, 0)
        await consumer.ack(deliveries[1])  # ten messages, behind one that is not acknowledged
        await consumer.ack(deliveries[3], indexes=[0, 2])  # two of five
        found = await analyze_backlog(topic.log, subscription)
        assert (found.entries, found.messages, found.acknowledged, found.complete) == (5, 11, 12, True)
        await consumer.ack(deliveries[0])
        assert (await analyze_backlog(topic.log, subscription)).messages == 10
        await consumer.ack(deliveries[5], cumulative=False)
        assert (await analyze_backlog(topic.log, subscription)).messages == 6


async def test_a_backlog_of_which_a_ledger_was_not_read_is_not_called_complete(tmp_path: Path) -> None:
    """Also where the ledgers before it had exactly as many entries as may be read."""
    async with cluster(tmp_path, roll_entries=3) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        consumer = await TestConsumer(
            running.world, broker, TOPIC, initial_position=wire.Subscribe.EARLIEST, type=wire.Subscribe.SHARED
        ).ready()
        for _ in range(7):
            await producer.send(*[b"x"] * 4)
        deliveries = [await consumer.receive() for _ in range(7)]
        await consumer.ack(deliveries[1])
        topic = broker.topics[TOPIC]
        subscription = topic.find_subscription("s")
        found = await analyze_backlog(topic.log, subscription, 3)
        assert (found.messages, found.acknowledged, found.complete) == (24, 4, True), "others need no reading"
        await consumer.ack(deliveries[4])
        found = await analyze_backlog(topic.log, subscription, 3)
        assert (found.messages, found.acknowledged, found.complete) == (23, 5, False)
        found = await analyze_backlog(topic.log, subscription, 6)
        assert (found.messages, found.acknowledged, found.complete) == (20, 8, True)
        await consumer.ack(deliveries[6], indexes=[0, 2])
        assert not (await analyze_backlog(topic.log, subscription, 6)).complete, "a batch has to be read"
        found = await analyze_backlog(topic.log, subscription, 7)
        assert (found.messages, found.acknowledged, found.complete) == (18, 10, True)


async def test_a18_single_messages_are_found_by_number_and_by_id(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=2) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        for size in (1, 3, 1):
            receipt = await producer.send(*[b"x"] * size)
        log = broker.topics[TOPIC].log
        assert [(await find_nth_message(log, number, from_latest=False))[1] for number in range(1, 6)] == [
            0,
            0,
            1,
            2,
            0,
        ]
        assert [(await find_nth_message(log, number, from_latest=True))[1] for number in range(1, 6)] == [0, 2, 1, 0, 0]
        for number in (0, 6):
            with pytest.raises(NotFound, match="5 messages"):
                await find_nth_message(log, number, from_latest=True)
        assert (await read_message(log, Position(receipt.ledger_id, receipt.entry_id))).count == 1
        with pytest.raises(NotFound):
            await read_message(log, Position(receipt.ledger_id, 99))


async def test_complaint_25_asking_for_the_last_message_again_and_again_leaves_nothing_behind(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        await producer.send(b"1")
        channel = running.world.network.connect(broker.endpoint)
        topic = broker.topics[TOPIC]

        async def ask() -> tuple[int, tuple[int, ...]]:
            last = await channel.call(find_rpc("Admin", "LastMessageId"), wire.Name(name=TOPIC), timeout_s=20.0)
            offsets = await channel.call(
                find_rpc("Broker", "Offsets"), wire.OffsetsRequest(topic=TOPIC), timeout_s=20.0
            )
            assert (last.entry_id, offsets.end_index) == (0, 1)
            tasks = len(asyncio.all_tasks())
            return tasks, (len(topic.subscriptions), len(topic.producers), len(topic.log.reader._readers))

        tasks, first = await ask()
        for _ in range(200):
            tasks_now, found = await ask()
        assert found == first
        assert tasks_now < tasks + 50, "nothing runs on behind 200 questions"
        await channel.close()
