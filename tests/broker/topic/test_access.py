"""Who may produce, across connections, unloads and owners; and a subscription that is made with the topic."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.topic.dedup_core import (
    EXCLUSIVE,
    EXCLUSIVE_WITH_FENCING,
    SHARED,
    WAIT_FOR_EXCLUSIVE,
    ProducerJoinDenied,
    ProducerRegistration,
    ProducerTable,
    TopicEpochChange,
    compute_next_topic_epoch,
    decide_epoch_change,
)
from magnetar.broker.topic.producer import TopicProducer
from magnetar.broker.topic.topic import Topic
from magnetar.client.admin import AdminClient
from magnetar.client.client import Client
from magnetar.client.common.errors import ProducerFenced as ProducerFencedError
from magnetar.client.consume.consumer import Consumer
from magnetar.client.model.settings import ConsumerType, ProducerAccessMode
from magnetar.proto.errors import MagnetarError, ProducerBusy, ProducerFenced, Unavailable
from magnetar.proto.names import TopicName
from tests.broker.node.test_failover import until_owned_by, vanish
from tests.support.cluster import TestProducer, cluster

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)


def test_the_epoch_grows_with_each_new_holder_and_fences_whoever_had_an_earlier_one() -> None:
    assert decide_epoch_change(SHARED, 0, 7) is decide_epoch_change(SHARED, 3, 7) is TopicEpochChange.STAYS
    assert decide_epoch_change(EXCLUSIVE, 0, 7) is TopicEpochChange.GROWS
    assert decide_epoch_change(EXCLUSIVE, 7, 7) is TopicEpochChange.STAYS
    assert decide_epoch_change(EXCLUSIVE, 6, 7) is TopicEpochChange.FENCED


def test_an_epoch_of_a_deleted_topic_is_lower_than_those_of_one_that_is_made_anew() -> None:
    old = compute_next_topic_epoch(compute_next_topic_epoch(0, 1000), 1000)
    assert old == 1002
    new = compute_next_topic_epoch(0, 5000)
    assert decide_epoch_change(EXCLUSIVE_WITH_FENCING, old, new) is TopicEpochChange.FENCED
    assert compute_next_topic_epoch(7, 0) == 8, "when it was made is not known"


def test_an_earlier_connection_that_comes_late_does_not_replace_the_later_one() -> None:
    table = ProducerTable()
    assert table.join(ProducerRegistration(1, "p", SHARED, "me", 1)).registered
    assert [each.id for each in table.join(ProducerRegistration(2, "p", SHARED, "me", 3)).replaced] == [1]
    late = table.join(ProducerRegistration(3, "p", SHARED, "me", 2))
    assert late.denied is ProducerJoinDenied.STALE
    assert not late.replaced
    assert list(table.registered) == [2]


@pytest.mark.parametrize("crash", [False, True])
async def test_an_owner_that_returns_is_fenced_when_another_took_the_topic_meanwhile(
    tmp_path: Path, crash: bool
) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        first = await TestProducer(
            running.world, broker, TOPIC, "a", instance="a", access_mode=EXCLUSIVE
        ).opened()
        had = first.answer.topic_epoch
        await first.send(b"0")
        if crash:
            await vanish(running, broker)
            broker = await running.add_broker()
            await until_owned_by(running, broker)
        else:
            await broker.topic_manager.unload_topic(NAME)
        again = await TestProducer(
            running.world, broker, TOPIC, "a", instance="a", access_mode=EXCLUSIVE, topic_epoch=had, connection=2
        ).opened()
        assert again.answer.topic_epoch == had, "nobody took it meanwhile"
        await broker.topic_manager.unload_topic(NAME)
        other = await TestProducer(
            running.world, broker, TOPIC, "b", instance="b", access_mode=EXCLUSIVE_WITH_FENCING
        ).opened()
        assert other.answer.topic_epoch == had + 1
        with pytest.raises(ProducerFenced):
            await TestProducer(
                running.world, broker, TOPIC, "a", instance="a", access_mode=EXCLUSIVE, topic_epoch=had, connection=3
            ).opened()
        await other.close()
        await broker.topic_manager.unload_topic(NAME)
        with pytest.raises(ProducerFenced):
            await TestProducer(
                running.world, broker, TOPIC, "a", instance="a", access_mode=EXCLUSIVE, topic_epoch=had, connection=4
            ).opened()
        keeps = await TestProducer(running.world, broker, TOPIC, "c", access_mode=EXCLUSIVE).opened()
        assert keeps.answer.topic_epoch == had + 2
        with pytest.raises(ProducerFenced):
            await TestProducer(running.world, broker, TOPIC, "d", access_mode=EXCLUSIVE).opened()
        with pytest.raises(ProducerBusy):
            await TestProducer(running.world, broker, TOPIC, "e").opened()


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT_FOR_EXCLUSIVE])
async def test_a_producer_that_reconnects_publishes_on_alone_while_another_one_waits(
    tmp_path: Path, mode: Any
) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        first = await TestProducer(running.world, broker, TOPIC, "a", instance="a", access_mode=mode).opened()
        await first.send(b"0")
        (old,) = broker.topics[TOPIC].producers
        waiting = []
        for name in "bc":
            opening = TestProducer(running.world, broker, TOPIC, name, access_mode=WAIT_FOR_EXCLUSIVE)
            waiting.append(asyncio.create_task(opening.opened()))
            async with asyncio.timeout(10):
                while not any(each.name == name for each in broker.topics[TOPIC].producers):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        again = await TestProducer(
            running.world, broker, TOPIC, "a", instance="a", access_mode=mode, connection=1,
            topic_epoch=first.answer.topic_epoch,
        ).opened()  # fmt: skip
        assert again.answer.topic_epoch == first.answer.topic_epoch
        assert isinstance(old.close_error, Unavailable)
        assert [each.name for each in broker.topics[TOPIC].producers] == ["b", "c", "a"]
        await again.send(b"1")
        assert not any(each.done() for each in waiting)
        await again.close()
        await (await waiting[0]).send(b"2")
        assert not waiting[1].done()
        await waiting[0].result().close()
        await (await waiting[1]).send(b"3")


async def test_a_producer_whose_reconnect_is_refused_still_keeps_exclusive_producers_out(tmp_path: Path) -> None:
    """What publishes and what is registered are the same producers."""
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        first = await TestProducer(running.world, broker, TOPIC, "a", instance="a").opened()
        second = await TestProducer(running.world, broker, TOPIC, "b").opened()
        with pytest.raises(ProducerFenced):
            await TestProducer(
                running.world, broker, TOPIC, "a", instance="a", access_mode=EXCLUSIVE, connection=1
            ).opened()
        await second.close()
        with pytest.raises(ProducerFenced):
            await TestProducer(running.world, broker, TOPIC, "c", access_mode=EXCLUSIVE).opened()
        await first.send(b"0")
        await first.close()
        await (await TestProducer(running.world, broker, TOPIC, "d", access_mode=EXCLUSIVE).opened()).send(b"1")


async def test_a_producer_of_a_deleted_topic_does_not_fence_who_has_the_one_that_was_made_anew(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as running,
        AdminClient(f"magnetar://{running.brokers[0].endpoint}") as admin,
        Client(f"magnetar://{running.brokers[0].endpoint}") as client,
    ):
        mode = ProducerAccessMode.ExclusiveWithFencing
        for _ in range(2):  # the old topic has a higher count than the new one will have
            old = await client.create_producer(TOPIC, access_mode=mode)
        await old.send(b"old")
        await admin.delete_topic(TOPIC, force=True)
        new = await client.create_producer(TOPIC, access_mode=mode)
        with pytest.raises(ProducerFencedError):
            await old.send(b"of the old one")
        await new.send(b"new")


async def test_one_that_returns_does_not_fence_who_takes_the_topic_just_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The taker's epoch is not stored yet, and the one that returns has that of a topic of this name which is gone."""
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        await TestProducer(running.world, broker, TOPIC, "first").opened()
        log, go_on = broker.topics[TOPIC].log, asyncio.Event()
        commit = log.commit_fields

        async def slow(**fields: Any) -> None:
            await go_on.wait()
            await commit(**fields)

        monkeypatch.setattr(type(log), "commit_fields", lambda self, **fields: slow(**fields))
        taking = asyncio.create_task(TestProducer(
            running.world, broker, TOPIC, "new", access_mode=EXCLUSIVE_WITH_FENCING
        ).opened())  # fmt: skip
        async with asyncio.timeout(10):
            while not any(each.name == "new" for each in broker.topics[TOPIC].producers):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        with pytest.raises(ProducerFenced):
            await TestProducer(
                running.world, broker, TOPIC, "old", access_mode=EXCLUSIVE_WITH_FENCING, topic_epoch=5
            ).opened()
        go_on.set()
        await (await taking).send(b"new")


class _Outlet:
    def on_closed(self, _error: MagnetarError) -> None: ...


@asynccontextmanager
async def empty_topic(tmp_path: Path) -> AsyncIterator[Topic]:
    """A loaded topic that nobody produces to."""
    async with cluster(tmp_path) as running:
        await TestProducer(running.world, running.brokers[0], TOPIC, "first").opened()
        topic = running.brokers[0].topics[TOPIC]
        topic.producers.leave(next(iter(topic.producers)))
        yield topic


def producer_of(topic: Topic, number: int, name: str, mode: Any, **options: Any) -> TopicProducer:
    outlet: Any = _Outlet()
    return TopicProducer(10**6 + number, name, mode, topic, outlet, address="", instance=name, size_max=1000, **options)


async def test_a_producer_that_waited_is_fenced_if_another_one_had_exclusive_access_meanwhile(tmp_path: Path) -> None:
    async with empty_topic(tmp_path) as topic, asyncio.timeout(30):
        producers = topic.producers
        first = producer_of(topic, 0, "w", WAIT_FOR_EXCLUSIVE)
        await producers.join(first)
        producers.leave(first)
        shared = producer_of(topic, 1, "y", SHARED)
        await producers.join(shared)
        other = producer_of(topic, 2, "v", WAIT_FOR_EXCLUSIVE)
        others_turn = asyncio.create_task(producers.join(other))
        await asyncio.sleep(0)
        again = producer_of(topic, 3, "w", WAIT_FOR_EXCLUSIVE, connection=1, epoch=first.epoch)
        its_turn = asyncio.create_task(producers.join(again))
        await asyncio.sleep(0)
        producers.leave(shared)
        await others_turn
        producers.leave(other)
        with pytest.raises(ProducerFenced):
            await its_turn


async def test_a_producer_that_is_fenced_as_its_turn_comes_takes_no_epoch(tmp_path: Path) -> None:
    """Its epoch would be above that of the producer that fenced it, which could not reconnect then."""
    async with empty_topic(tmp_path) as topic, asyncio.timeout(30):
        producers = topic.producers
        holder, waits = producer_of(topic, 0, "a", EXCLUSIVE), producer_of(topic, 1, "b", WAIT_FOR_EXCLUSIVE)
        fencing = producer_of(topic, 2, "f", EXCLUSIVE_WITH_FENCING)
        await producers.join(holder)
        its_turn = asyncio.create_task(producers.join(waits))
        while len(producers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        fences = asyncio.create_task(producers.join(fencing))
        producers.leave(holder)
        await fences
        with pytest.raises(ProducerFenced):
            await its_turn
        assert fencing.epoch == topic.log.record.epoch


async def test_the_initial_subscription_gets_what_was_published_before_anybody_came(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as running,
        Client(f"magnetar://{running.brokers[0].endpoint}", world=running.world) as client,
    ):
        producer = await client.create_producer(TOPIC, initial_subscription_name="first")
        await producer.send(b"0")
        again = await client.create_producer(TOPIC, initial_subscription_name="first")
        await again.send(b"1")
        consumer = await client.subscribe(TOPIC, "first")
        assert [(await consumer.receive(30_000)).data() for _ in range(2)] == [b"0", b"1"]


@pytest.mark.parametrize("queue", [1000, 3])
async def test_messages_in_chunks_reach_one_of_several_shared_consumers_whole(tmp_path: Path, queue: int) -> None:
    """Also where a consumer's queue has no room for all chunks of one."""
    async with (
        cluster(tmp_path, max_message_bytes=20_000) as running,
        Client(f"magnetar://{running.brokers[0].endpoint}", world=running.world) as client,
    ):
        consumers = [
            await client.subscribe(TOPIC, "s", ConsumerType.Shared, receiver_queue_size=queue) for _ in range(3)
        ]
        producer = await client.create_producer(TOPIC, batching_enabled=False, chunking_enabled=True)
        sent = [bytes([number]) * 150_000 for number in range(6)]
        for payload in sent:
            assert len((await producer.send(payload)).chunks()) > 5
            await producer.send(b"small")
        found: list[bytes] = []
        everything = asyncio.Event()

        async def receive(consumer: Consumer) -> None:
            while True:
                message = await consumer.receive()
                found.append(message.data())
                await consumer.acknowledge(message)
                if len(found) == 12:
                    everything.set()

        tasks = [asyncio.create_task(receive(consumer)) for consumer in consumers]
        async with asyncio.timeout(20):
            await everything.wait()
        for task in tasks:
            task.cancel()
        assert sorted(found) == sorted([*sent, *[b"small"] * 6])
