
import asyncio

import pytest

from magnetar.client.client import Client
from magnetar.client.connect.topic_watch import DISCOVER_EVERY_S
from magnetar.client.model.message import Message
from magnetar.proto import errors as wire_errors
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate


def test_added_partitions_are_found_and_nothing_of_them_is_missed() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("parts", batching_enabled=False)
        consumer = await client.subscribe("parts", "s")
        broker.partition_counts["parts"] = 4
        early = await client.create_producer("parts-partition-3")
        await early.send(b"before anybody looked")
        assert producer.statistics()["partitions"] == 2
        await asyncio.sleep(DISCOVER_EVERY_S + 5)
        assert (producer.statistics()["partitions"], consumer.statistics()["partitions"]) == (4, 4)
        assert (await consumer.receive(1000)).data() == b"before anybody looked"
        assert sorted([(await producer.send(b"x")).partition() for _ in range(4)]) == [0, 1, 2, 3]
        messages: list[Message] = [await consumer.receive(1000) for _ in range(4)]
        assert sorted(each.message_id().partition() for each in messages) == [0, 1, 2, 3]
        await consumer.acknowledge(messages)
        producer.check()
        consumer.check()

    simulate(body, FakeBroker({"parts": 2}))


def test_a_new_partition_that_cannot_be_opened_is_tried_again_and_disturbs_nothing() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("parts")
        broker.partition_counts["parts"] = 3
        broker.refuse = [wire_errors.NotAllowed("not yet")]
        await asyncio.sleep(DISCOVER_EVERY_S + 5)
        assert producer.statistics()["partitions"] == 2
        await producer.send(b"x")
        await asyncio.sleep(DISCOVER_EVERY_S + 5)
        assert producer.statistics()["partitions"] == 3

    simulate(body, FakeBroker({"parts": 2}))


def test_a_new_partition_that_refuses_the_consumer_does_not_end_the_others() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer = await client.subscribe("parts", "s")
        broker.partition_counts["parts"] = 3
        broker.refuse = [wire_errors.ConsumerBusy("held")]
        waiting = asyncio.create_task(consumer.receive())
        await asyncio.sleep(DISCOVER_EVERY_S + 5)
        assert consumer.statistics()["partitions"] == 2
        producer = await client.create_producer("parts-partition-1")
        await producer.send(b"x")
        assert (await waiting).data() == b"x"
        await asyncio.sleep(DISCOVER_EVERY_S + 5)
        assert consumer.statistics()["partitions"] == 3

    simulate(body, FakeBroker({"parts": 2}))


def test_a_subscription_that_nobody_waits_for_any_more_is_not_made_later() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        broker.refuse = [wire_errors.Unavailable("not yet")] * 20
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.subscribe("parts", "s"), 1)
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("consumer ")]
        broker.refuse = []
        await asyncio.sleep(60)
        await client.subscribe("parts", "s")

    simulate(body, FakeBroker({"parts": 2}))
