"""`redelivery_order=key` over the wire: what failed holds back what follows it, until it is done; with back-off."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.subscription import dead_letters
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConsumerBusy, NotAllowed
from magnetar.proto.names import TopicName
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster, payloads_of

TOPIC = "persistent://public/default/t"
SHARED, FAILOVER = wire.Subscribe.SHARED, wire.Subscribe.FAILOVER
EXCLUSIVE, KEY_SHARED = wire.Subscribe.EXCLUSIVE, wire.Subscribe.KEY_SHARED
KEY = wire.Subscribe.KEY


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(dead_letters, "ORDERED_BACKOFF_S", (0.3, 0.6))
    async with cluster(tmp_path) as running:
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        for number in range(3):
            for key in ("a", "b"):
                await producer.send(f"{key}{number}".encode(), key=key)
        yield running


async def consumer(running: Cluster, type_: Any, **options: Any) -> TestConsumer:
    options = {"redelivery_order": KEY, "initial_position": wire.Subscribe.EARLIEST, "type": type_} | options
    return await TestConsumer(running.world, running.brokers[0], TOPIC, **options).ready()


def nack(mine: TestConsumer, delivery: wire.Delivery) -> None:
    mine.frame(redeliver=wire.Redeliver(entries=[
        wire.Position(ledger_id=delivery.ledger_id, entry_id=delivery.entry_id)
    ]))  # fmt: skip


def forget(mine: TestConsumer, *keys: bytes) -> None:
    """As a client does with what came after the one that failed, and that it has not given to its program."""
    for each in list(mine.items):
        if each.WhichOneof("kind") == "delivery" and payloads_of(each.delivery.entry)[0][:1] in keys:
            mine.items.remove(each)


async def all_but(mine: TestConsumer, failing: bytes, times: int) -> list[bytes]:
    """Acknowledges one after the other, and gives `failing` back so often."""
    found: list[bytes] = []
    while len(found) < 6 + times:
        delivery = await mine.receive()
        (payload,) = payloads_of(delivery.entry)
        found.append(payload)
        if payload == failing and found.count(payload) <= times:
            assert delivery.redelivery_count == found.count(payload) - 1
            forget(mine, b"a", b"b")
            nack(mine, delivery)
        else:
            await mine.ack(delivery)
    return found


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER])
async def test_what_failed_holds_back_the_topic_of_one_consumer_at_a_time(running: Cluster, type_: Any) -> None:
    mine = await consumer(running, type_)
    assert await all_but(mine, b"a1", 2) == [b"a0", b"b0", b"a1", b"a1", b"a1", b"b1", b"a2", b"b2"]
    await mine.quiet()
    assert not [each for each in mine.items if each.WhichOneof("kind") == "delivery"]


async def test_what_failed_holds_back_its_key_and_no_other(running: Cluster) -> None:
    mine = await consumer(running, KEY_SHARED)
    six = [await mine.receive() for _ in range(6)]
    nack(mine, six[0])
    for each in six[1::2]:
        await mine.ack(each)
    subscription = (await running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))).find_subscription("s")
    assert subscription.dispatcher.failed
    again = await mine.receive()
    assert (payloads_of(again.entry), again.redelivery_count) == ([b"a0"], 1)
    assert await mine.quiet()
    nack(mine, again)
    again = await mine.receive()
    assert (payloads_of(again.entry), again.redelivery_count) == ([b"a0"], 2)
    assert await mine.quiet()
    await mine.ack(again)
    assert await mine.receive_payloads(2) == [b"a1", b"a2"]
    assert await mine.quiet()


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER, KEY_SHARED])
async def test_a_dead_letter_lets_go_what_it_held_back(running: Cluster, type_: Any) -> None:
    properties = {"dead-letter.max-redeliver-count": "1", "dead-letter.backoff-s": "0.1"}
    mine = await consumer(running, type_, subscription_properties=properties)
    found: list[bytes] = []
    while found.count(b"b2") < 1 or found.count(b"a2") < 1:
        delivery = await mine.receive()
        (payload,) = payloads_of(delivery.entry)
        found.append(payload)
        if payload == b"a0":
            forget(mine, b"a", *([b"b"] if type_ != KEY_SHARED else []))
            nack(mine, delivery)
        else:
            await mine.ack(delivery)
    assert [each for each in found if each[:1] == b"a"] == [b"a0", b"a0", b"a1", b"a2"]
    topic = await running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))
    letters = topic.find_subscription("s").dead_letters
    assert letters is not None
    assert letters.letters == 1


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER, KEY_SHARED])
async def test_order_holds_when_the_consumer_of_what_failed_is_lost(running: Cluster, type_: Any) -> None:
    mine = await consumer(running, type_)
    six = [await mine.receive() for _ in range(6)]
    nack(mine, six[0])
    await mine.close()
    again = await consumer(running, type_)
    found = await again.receive_payloads(6)
    assert [each for each in found if each[:1] == b"a"] == [b"a0", b"a1", b"a2"]


async def test_it_is_of_the_subscription_and_needs_an_order(running: Cluster) -> None:
    for type_, options in ((SHARED, {}), (EXCLUSIVE, {"durable": False}),
                           (KEY_SHARED, {"key_shared": wire.KeySharedPolicy(allow_out_of_order_delivery=True)})):
        with pytest.raises(NotAllowed, match="redelivery_order"):
            await consumer(running, type_, **options)
    await consumer(running, FAILOVER)
    with pytest.raises(ConsumerBusy, match="redelivery_order"):
        await consumer(running, FAILOVER, redelivery_order=wire.Subscribe.ANY)


