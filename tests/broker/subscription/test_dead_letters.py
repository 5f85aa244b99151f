"""Dead letters by the server, for clients that know nothing of them: counted, held back, moved, and never too early."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnetar.broker.subscription import dead_letters
from magnetar.broker.subscription.dead_letters import ForwardLetters
from magnetar.broker.topic.storage import DurableTopicStorage
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import decode_batch, parse_header, split_broker_part
from magnetar.proto.errors import Unavailable
from magnetar.proto.names import DEAD_LETTERS, TopicName, make_letter_topic_name
from magnetar.proto.policies import Policies
from magnetar.runtime.clock import SystemClock
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster, payloads_of

TOPIC = "persistent://public/default/orders"
GRAVE = f"{TOPIC}-s-DLQ"
EARLIEST, SHARED = wire.Subscribe.EARLIEST, wire.Subscribe.SHARED


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, dead_letter_max_redeliver_count=2) as running:
        yield running


async def filled(running: Cluster, entries: int, *, batch: int = 1, topic: str = TOPIC) -> None:
    producer = await TestProducer(running.world, running.brokers[-1], topic).opened()
    for number in range(entries):
        await producer.send(*(b"%d.%d" % (number, index) for index in range(batch)))
    await producer.close()


async def consumer(running: Cluster, topic: str = TOPIC, subscription: str = "s", **options: Any) -> TestConsumer:
    asked = {"type": SHARED, "initial_position": EARLIEST, **options}
    return await TestConsumer(running.world, running.brokers[-1], topic, subscription, **asked).ready()


def give_back(consumer: TestConsumer, *deliveries: wire.Delivery) -> None:
    entries = [wire.Position(ledger_id=each.ledger_id, entry_id=each.entry_id) for each in deliveries]
    consumer.frame(redeliver=wire.Redeliver(entries=entries))


def told_by(delivery: wire.Delivery) -> dict[str, str]:
    part = split_broker_part(delivery.entry)[2]
    ((fields, _),) = decode_batch(parse_header(part), part)
    return {pair.key: pair.value for pair in fields.properties}


def forward_by(monkeypatch: pytest.MonkeyPatch, running: Cluster, way: ForwardLetters) -> None:
    """Topics that are loaded from here on send their dead letters that way."""
    session = running.brokers[0].topic_manager._open()
    assert isinstance(session.storage, DurableTopicStorage)
    storage = msgspec.structs.replace(session.storage, forward=lambda source, *letters: way(*letters))
    monkeypatch.setattr(session, "storage", storage)


@pytest.mark.parametrize("type_", [SHARED, wire.Subscribe.KEY_SHARED])
async def test_what_is_given_back_too_often_goes_to_the_dead_letter_topic_and_says_why(
    running: Cluster, type_: int
) -> None:
    await filled(running, 2)
    mine = await consumer(running, type=type_)
    counts = []
    for _ in range(3):
        delivery = await mine.receive()
        while delivery.entry_id != 0:
            delivery = await mine.receive()
        counts.append(delivery.redelivery_count)
        give_back(mine, delivery)
    assert counts == [0, 1, 2], "delivered as often as was stated, and not once less"
    dead = await consumer(running, GRAVE, "grave")
    letter = await dead.receive()
    assert payloads_of(letter.entry) == [b"0.0"]
    told = told_by(letter)
    assert told["ORIGIN_MESSAGE_ID"] == f"({delivery.ledger_id},0,-1,-1)"
    assert (told["REAL_TOPIC"], told["REAL_SUBSCRIPTION"], told["REDELIVERY_COUNT"]) == (TOPIC, "s", "3")
    assert "given back 3 times" in told["DEAD_LETTER_REASON"]
    await mine.close()
    again = await consumer(running, type=type_)
    assert payloads_of((await again.receive()).entry) == [b"1.0"], "the original is acknowledged, the other one is not"


async def test_complaint_14_a_message_that_kills_its_consumers_is_a_dead_letter_in_the_end(running: Cluster) -> None:
    """Pulsar (#23944, #5881): a crash does not count, so a poison message kills every consumer for ever."""
    await filled(running, 1)
    for count in range(3):
        mine = await consumer(running, permits=1)
        assert (await mine.receive()).redelivery_count == count
        await mine.close()  # without a word
    dead = await consumer(running, GRAVE, "grave")
    assert payloads_of((await dead.receive()).entry) == [b"0.0"]


async def test_a_consumer_that_says_that_it_goes_has_not_given_back(running: Cluster) -> None:
    await filled(running, 1)
    for _ in range(5):
        mine = await consumer(running)
        assert (await mine.receive()).redelivery_count == 0
        mine.requests += 1
        await mine.ask(close=mine.requests)
        await mine.close()


async def test_only_what_is_not_acknowledged_of_a_batch_is_moved(running: Cluster) -> None:
    await filled(running, 1, batch=4)
    mine = await consumer(running)
    delivery = await mine.receive()
    await mine.ack(delivery, indexes=[0, 2])
    for times in range(3):
        give_back(mine, delivery)
        if times < 2:
            delivery = await mine.receive()
    dead = await consumer(running, GRAVE, "grave")
    assert [payloads_of((await dead.receive()).entry) for _ in range(2)] == [[b"0.1"], [b"0.3"]]


async def test_counts_and_dead_letters_survive_a_restart_in_the_middle(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(running, 2)
    asked = asyncio.Event()

    async def nobody(topic: TopicName, name: str, letters: Sequence[bytes], spread: int) -> None:
        asked.set()
        raise Unavailable("no way to the dead-letter topic")

    broker = running.brokers[0]
    forward_by(monkeypatch, running, nobody)
    await broker.topic_manager.unload_topic(TopicName.parse(TOPIC))  # so that it is loaded with that way
    mine = await consumer(running)
    first, second = await mine.receive(), await mine.receive()
    give_back(mine, second)
    again = await mine.receive()
    assert (again.entry_id, again.redelivery_count) == (1, 1)
    for times in range(3):
        give_back(mine, first)
        if times < 2:
            first = await mine.receive()
    async with asyncio.timeout(20):
        await asked.wait()
    assert await mine.quiet(), "what becomes a dead letter is not delivered while it waits"
    mine.requests += 1
    await mine.ask(close=mine.requests)
    await mine.close()
    await broker.close()
    await running.add_broker(dead_letter_max_redeliver_count=2)
    moved = await consumer(running)
    dead = await consumer(running, GRAVE, "grave")
    assert payloads_of((await dead.receive()).entry) == [b"0.0"]
    left = await moved.receive()
    assert (payloads_of(left.entry), left.redelivery_count) == ([b"1.0"], 1)


async def test_the_longest_names_have_dead_letters_and_their_topic_is_taken_over_with_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "DEAD_LETTER_RETRY_S", 0.01)
    topic, subscription = "persistent://public/default/" + "t" * 255, "s" * 255
    options = {"dead_letter_max_redeliver_count": 2}
    async with cluster(tmp_path, **options) as running:
        await filled(running, 2, topic=topic)
        mine = await consumer(running, topic, subscription)
        first, second = await mine.receive(), await mine.receive()
        give_back(mine, second)
        await mine.receive()
        for _ in range(2):
            give_back(mine, first)
            first = await mine.receive()
        give_back(mine, first)
        await running.brokers[0].close()
        await running.add_broker(**options)
        moved = await consumer(running, topic, subscription)
        left = await moved.receive()
        assert (payloads_of(left.entry), left.redelivery_count > 0) == ([b"1.0"], True)
        letters = make_letter_topic_name(TopicName.parse(topic), subscription, DEAD_LETTERS)
        dead = await consumer(running, letters.full, "grave")
        delivery = await dead.receive()
        assert payloads_of(delivery.entry) == [b"0.0"]
        told = told_by(delivery)
        assert (told["REAL_TOPIC"], told["REAL_SUBSCRIPTION"]) == (topic, subscription)


async def test_a_letter_that_cannot_be_written_is_tried_until_it_can(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "DEAD_LETTER_RETRY_S", 0.01)
    real, tries = running.brokers[0].topic_manager.internal_producer.publish_messages, 0

    async def sometimes(*arguments: Any) -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise Unavailable("not yet")
        await real(*arguments)

    forward_by(monkeypatch, running, sometimes)
    await filled(running, 1)
    mine = await consumer(running)
    for _ in range(3):
        give_back(mine, await mine.receive())
    dead = await consumer(running, GRAVE, "grave")
    assert payloads_of((await dead.receive()).entry) == [b"0.0"]
    assert tries == 4


async def test_the_ladder_holds_a_message_back_and_it_comes_by_itself(tmp_path: Path) -> None:
    async with cluster(
        tmp_path, dead_letter_max_redeliver_count=9, dead_letter_backoff_s=(0.05, 3600.0)
    ) as running:
        await filled(running, 2)
        mine = await consumer(running)
        first, _second = await mine.receive(), await mine.receive()
        give_back(mine, first)
        again = await mine.receive()
        assert (again.entry_id, again.redelivery_count) == (0, 1)
        give_back(mine, again)
        assert await mine.quiet(), "an hour"
        subscription = running.brokers[0].topics[TOPIC].find_subscription("s")
        async with asyncio.timeout(10):
            while subscription.cursor.has_unstored_changes:
                await subscription.wait_durable()
        assert len(subscription.dispatcher.held) == 1
        await mine.close()
        await running.brokers[0].close()
        await running.add_broker(dead_letter_max_redeliver_count=9, dead_letter_backoff_s=(0.05, 3600.0))
        moved = await consumer(running)
        assert (await moved.receive()).entry_id == 1
        assert await moved.quiet(), "the wait survives the move"
        held = running.brokers[-1].topics[TOPIC].find_subscription("s").dispatcher.held
        assert len(held) == 1
        await moved.ack(wire.Delivery(ledger_id=first.ledger_id, entry_id=0))
        assert not len(held), "an acknowledgement ends it"


@pytest.mark.parametrize("step_s", [-3600, 3600])
async def test_a_wall_clock_that_is_set_anew_changes_no_back_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    wall_ms, steps_ms = SystemClock.wall_ms, [0]
    monkeypatch.setattr(SystemClock, "wall_ms", lambda clock: wall_ms(clock) + steps_ms[0])
    async with cluster(tmp_path, dead_letter_max_redeliver_count=9, dead_letter_backoff_s=(2.0,)) as running:
        await filled(running, 1)
        mine = await consumer(running)
        given_back_s = time.monotonic()
        give_back(mine, await mine.receive())
        held = running.brokers[0].topics[TOPIC].find_subscription("s").dispatcher.held
        async with asyncio.timeout(10):
            while (held.next_due_ms or inf) > time.time() * 1000 + 10_000:  # noqa: ASYNC110 - until its count is stored
                await asyncio.sleep(0.01)
        steps_ms[0] = step_s * 1000
        assert (await mine.receive()).redelivery_count == 1
        assert time.monotonic() - given_back_s > 1.9


async def test_a_subscription_may_have_a_policy_of_its_own_and_exclusive_ones_have_none(running: Cluster) -> None:
    await filled(running, 1)
    own = {"dead-letter.max-redeliver-count": "1", "dead-letter.topic": "persistent://public/default/elsewhere"}
    mine = await consumer(running, subscription="own", subscription_properties=own)
    for _ in range(2):
        give_back(mine, await mine.receive())
    dead = await consumer(running, own["dead-letter.topic"], "grave")
    assert payloads_of((await dead.receive()).entry) == [b"0.0"]
    single = await consumer(running, subscription="single", type=wire.Subscribe.EXCLUSIVE)
    for count in range(6):
        delivery = await single.receive()
        assert delivery.redelivery_count == count
        give_back(single, delivery)


@pytest.mark.parametrize("named", [False, True], ids=["by default", "by the policy"])
async def test_a_message_of_a_dead_letter_topic_that_is_given_back_stays_there(running: Cluster, named: bool) -> None:
    """The dead-letter topic is under the policy of its namespace too: it moved each letter to itself, 19 in 10 s."""
    owned = running.brokers[0].topic_manager
    if named:
        name = TopicName.parse(TOPIC)
        policies = Policies(dead_letter_max_redeliver_count=2, dead_letter_topic=GRAVE)
        await owned.policies.change_policies(name.namespace_name, None, policies)
    await filled(running, 1)
    mine = await consumer(running)
    for _ in range(3):
        give_back(mine, await mine.receive())
    dead = await consumer(running, GRAVE)
    counts = []
    for _ in range(10):
        letter = await dead.receive()
        counts.append((letter.entry_id, letter.redelivery_count))
        give_back(dead, letter)
    assert counts == [(0, times) for times in range(10)], "one copy, which comes again as often as it is given back"
    assert running.brokers[0].topics[GRAVE].log.shape.end_index == 1
    assert f"{GRAVE}-s-DLQ" not in running.brokers[0].topics
