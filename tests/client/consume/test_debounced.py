"""Debounce through a real broker: what is superseded is acknowledged, what is newest is received, whatever breaks."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.asyncio import Client, Consumer, ConsumerType, InitialPosition
from magnetar.client.admin import AdminClient
from tests.support.cluster import Cluster, cluster

TOPIC = "persistent://public/default/prices"
TYPES = [ConsumerType.Exclusive, ConsumerType.Failover, ConsumerType.KeyShared]


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


def url_of(running: Cluster) -> str:
    return f"magnetar://{running.brokers[-1].endpoint}"


async def subscribed(client: Client, type_: ConsumerType = ConsumerType.Exclusive, **options: Any) -> Consumer:
    return await client.subscribe(
        TOPIC, "s", type_, initial_position=InitialPosition.Earliest, **{"debounce": 86_400.0, **options}
    )


async def sent(client: Client, count: int, keys: int, **options: Any) -> None:
    producer = await client.create_producer(TOPIC, **options)
    for number in range(count):
        await producer.send(b"%d" % number, partition_key=f"k{number % keys}")
    await producer.close()


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("batching", [True, False])
async def test_the_newest_of_each_key_is_received_and_the_backlog_is_empty_when_they_are_acknowledged(
    running: Cluster, type_: ConsumerType, batching: bool
) -> None:
    async with Client(url_of(running)) as client, AdminClient(url_of(running)) as admin:
        mine = await subscribed(client, type_, debounce=0.3)
        await sent(client, 60, 3, batching_enabled=batching)
        newest = dict[str, int]()
        received = 0
        while len(newest) < 3 or min(newest.values()) < 57:
            message = await mine.receive(10_000)
            key, number = message.partition_key(), int(message.data())
            assert number > newest.get(key, -1), "a key goes back"
            newest[key], received = number, received + 1
            await mine.acknowledge(message)
        assert mine.statistics()["superseded_messages"] == 60 - received > 0
        await mine.close()
        (subscription,) = (await admin.topic_stats(TOPIC)).subscriptions
        assert subscription.backlog == 0


async def test_what_is_held_when_the_broker_is_lost_is_received_after_it(running: Cluster) -> None:
    async with Client(url_of(running)) as client:
        mine = await subscribed(client, debounce=2.0)
        await sent(client, 20, 2)
        while mine.statistics()["waiting_messages"] < 2:
            await mine.last_message_id()
        async with AdminClient(url_of(running)) as admin:
            await admin.unload_topic(TOPIC)
        found = set[int]()
        while not {18, 19} <= found:
            found.add(int((await mine.receive(20_000)).data()))


async def test_a_consumer_that_leaves_with_held_messages_loses_none(running: Cluster) -> None:
    async with Client(url_of(running)) as client:
        mine = await subscribed(client)
        await sent(client, 10, 1)
        while not mine.statistics()["waiting_messages"]:
            await mine.last_message_id()
        await mine.close()
        again = await subscribed(client, debounce=None)
        while int((await again.receive(10_000)).data()) != 9:
            pass


async def test_more_keys_than_the_queue_has_room_for_are_all_received(running: Cluster) -> None:
    async with Client(url_of(running)) as client:
        mine = await subscribed(client, debounce=0.2, receiver_queue_size=5)
        await sent(client, 40, 40)
        found = set[int]()
        while len(found) < 40:
            message = await mine.receive(10_000)
            found.add(int(message.data()))
            await mine.acknowledge(message)


async def test_messages_without_a_key_wait_for_nothing(running: Cluster) -> None:
    async with Client(url_of(running)) as client:
        mine = await subscribed(client)
        producer = await client.create_producer(TOPIC)
        await producer.send(b"now")
        assert (await mine.receive(10_000)).data() == b"now"


async def test_after_a_seek_everything_is_debounced_anew(running: Cluster) -> None:
    async with Client(url_of(running)) as client:
        mine = await subscribed(client, debounce=0.2)
        await sent(client, 10, 1)
        first = await mine.receive(10_000)
        while int(first.data()) != 9:
            first = await mine.receive(10_000)
        await mine.seek(magnetar.MessageId.earliest)
        again = await mine.receive(10_000)
        while int(again.data()) != 9:
            again = await mine.receive(10_000)


async def test_what_is_held_is_not_acknowledged_when_another_message_of_its_batch_was_given_back(
    running: Cluster,
) -> None:
    async with Client(url_of(running)) as client:
        mine = await subscribed(client, negative_ack_redelivery_delay_ms=10)
        producer = await client.create_producer(TOPIC, batching_enabled=True, batching_max_publish_delay_ms=5000)
        producer.send_nowait(b"held", lambda *_: None, partition_key="k")
        producer.send_nowait(b"free", lambda *_: None)
        await producer.flush()
        await mine.negative_acknowledge(await mine.receive(10_000))
        await mine.acknowledge(await mine.receive(10_000))
        assert mine.statistics()["superseded_messages"] == 0
        await mine.close()
        again = await subscribed(client, debounce=None)
        assert (await again.receive(10_000)).data() == b"held"


async def test_what_would_lose_messages_is_refused(running: Cluster) -> None:
    async with Client(url_of(running)) as client:
        with pytest.raises(magnetar.InvalidConfiguration, match="debounce needs an Exclusive"):
            await subscribed(client, ConsumerType.Shared)
        with pytest.raises(magnetar.InvalidConfiguration, match="without redelivery_order"):
            await subscribed(client, redelivery_order="key")
        mine = await subscribed(client)
        producer = await client.create_producer(TOPIC)
        await producer.send(b"now")
        message = await mine.receive(10_000)
        with pytest.raises(magnetar.CumulativeAcknowledgementNotAllowedError, match="with debounce"):
            await mine.acknowledge_cumulative(message)
