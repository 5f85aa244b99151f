"""Dead letters and retries by the SDK, through a broker: what is moved, when, and with what written on it."""

import logging
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from magnetar.client import aio
from magnetar.client.common.errors import InvalidConfiguration, OperationNotSupported, Timeout
from magnetar.client.model.settings import (
    ConsumerDeadLetterPolicy,
    ConsumerType,
    InitialPosition,
    MultiplierRedeliveryBackoff,
)
from magnetar.proto.names import DEAD_LETTERS, RETRIES, TopicName, make_letter_topic_name
from tests.support.cluster import Cluster, cluster

TOPIC = "persistent://public/default/letters"
NOW = MultiplierRedeliveryBackoff(1, 1)


class Post:
    def __init__(self, running: Cluster, topic: str = TOPIC, **produced: Any) -> None:
        self.running, self.topic, self.produced = running, topic, produced
        self.client = aio.Client(f"magnetar://{running.brokers[-1].endpoint}")

    async def consumer(self, topic: str = "", name: str = "s", **options: Any) -> Any:
        return await self.client.subscribe(
            topic or self.topic, name, **{"consumer_type": ConsumerType.Shared,
            "initial_position": InitialPosition.Earliest,
            "negative_ack_redelivery_backoff": NOW, **options},
        )  # fmt: skip

    async def send(self, *payloads: bytes, **options: Any) -> None:
        producer = await self.client.create_producer(self.topic, batching_enabled=False, **self.produced)
        for payload in payloads:
            await producer.send(payload, **options)
        await producer.close()


@pytest.fixture
async def post(tmp_path: Path) -> AsyncIterator[Post]:
    async with cluster(tmp_path) as running:
        post = Post(running)
        yield post
        await post.client.close()


async def test_a_message_is_shown_one_time_more_than_it_may_come_back_and_then_is_a_dead_letter(post: Post) -> None:
    policy = ConsumerDeadLetterPolicy(2, initial_subscription_name="kept")
    mine = await post.consumer(dead_letter_policy=policy)
    await post.send(b"poison", properties={"a": "b"}, partition_key="k", event_timestamp=7)
    shown = []
    for _ in range(3):
        message = await mine.receive(30_000)
        shown.append(message.redelivery_count())
        await mine.negative_acknowledge(message)
    assert shown == [0, 1, 2]
    with pytest.raises(Timeout):
        await mine.receive(500)
    dead = await post.consumer(f"{TOPIC}-s-DLQ", "kept", initial_position=InitialPosition.Latest)
    letter = await dead.receive(30_000)
    assert (letter.data(), letter.partition_key(), letter.event_timestamp()) == (b"poison", "k", 7)
    assert letter.properties() == {
        "a": "b", "REAL_TOPIC": TOPIC, "REAL_SUBSCRIPTION": "s", "ORIGIN_MESSAGE_ID": str(message.message_id()),
    }  # fmt: skip
    assert letter.producer_name().startswith("letters-s-")
    assert letter.producer_name().endswith("-DLQ")
    await mine.close()
    again = await post.consumer()
    with pytest.raises(Timeout):
        await again.receive(300)


async def test_complaint_13_a_move_does_not_begin_the_counting_anew(post: Post) -> None:
    mine = await post.consumer(dead_letter_policy=ConsumerDeadLetterPolicy(3))
    await post.send(b"poison")
    for _ in range(2):
        await mine.negative_acknowledge(await mine.receive(30_000))
    assert (await mine.receive(30_000)).redelivery_count() == 2
    broker = post.running.brokers[0]
    await broker.topic_manager.unload_topic(broker.topics[TOPIC].name)
    message = await mine.receive(10_000)
    assert message.redelivery_count() == 2, "who loses its broker has not given back"
    await mine.negative_acknowledge(message)
    again = await mine.receive(30_000)
    assert again.redelivery_count() == 3
    await mine.negative_acknowledge(again)
    dead = await post.consumer(f"{TOPIC}-s-DLQ", "late")
    assert (await dead.receive(30_000)).data() == b"poison"


async def test_complaint_15_what_the_application_never_saw_is_no_dead_letter(post: Post) -> None:
    """Pulsar (#3077): asking for everything again counted what only waited in the receiver queue."""
    mine = await post.consumer(dead_letter_policy=ConsumerDeadLetterPolicy(1))
    await post.send(*(b"%d" % number for number in range(5)))
    for count in range(2):
        message = await mine.receive(30_000)
        assert (message.data(), message.redelivery_count()) == (b"0", count)
        while mine.statistics()["waiting_messages"] < 4:
            await post.client.get_topic_partitions(TOPIC)
        mine.redeliver_unacknowledged_messages()
    shown = [await mine.receive(30_000) for _ in range(4)]
    assert [each.data() for each in shown] == [b"1", b"2", b"3", b"4"]
    assert {each.redelivery_count() for each in shown} == {0}
    dead = await post.consumer(f"{TOPIC}-s-DLQ", "late")
    assert (await dead.receive(30_000)).data() == b"0"
    with pytest.raises(Timeout):
        await dead.receive(300)


async def test_a_message_that_is_reconsumed_later_comes_from_the_retry_topic_with_its_count(post: Post) -> None:
    mine = await post.consumer(enable_retry=True, dead_letter_policy=ConsumerDeadLetterPolicy(2))
    await post.send(b"later", properties={"a": "b"})
    first = await mine.receive(30_000)
    origin = str(first.message_id())
    await mine.reconsume_later(first, timedelta(milliseconds=20), {"why": "busy"})
    second = await mine.receive(10_000)
    assert second.topic_name() == f"{TOPIC}-s-RETRY"
    assert second.properties() == {
        "a": "b", "why": "busy", "RECONSUMETIMES": "1", "DELAY_TIME": "20", "REAL_TOPIC": TOPIC,
        "REAL_SUBSCRIPTION": "s", "ORIGIN_MESSAGE_ID": origin,
    }  # fmt: skip
    await mine.reconsume_later(second, timedelta(0))
    third = await mine.receive(10_000)
    assert third.properties()["RECONSUMETIMES"] == "2"
    await mine.reconsume_later(third, timedelta(0))
    dead = await post.consumer(f"{TOPIC}-s-DLQ", "late")
    letter = await dead.receive(30_000)
    assert (letter.data(), letter.properties()["ORIGIN_MESSAGE_ID"]) == (b"later", origin)
    await mine.close()
    again = await post.consumer(enable_retry=True)
    with pytest.raises(Timeout):
        await again.receive(300)


async def test_topics_that_a_pattern_finds_later_have_retries_and_dead_letters_too(post: Post) -> None:
    mine = await post.client.subscribe(
        re.compile("found-[0-9]"), "s", ConsumerType.Shared, enable_retry=True,
        dead_letter_policy=ConsumerDeadLetterPolicy(1),
    )  # fmt: skip
    async with await post.client.create_producer("found-1") as producer:
        await producer.send(b"x")
    await mine.reconsume_later(await mine.receive(30_000), timedelta(0))
    again = await mine.receive(30_000)
    assert again.topic_name().endswith("found-1-s-RETRY")
    await mine.reconsume_later(again, timedelta(0))
    dead = await post.consumer("found-1-s-DLQ", "late")
    assert (await dead.receive(30_000)).data() == b"x"


async def test_complaint_16_no_limit_is_hidden(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """Pulsar (#14867): «message can only be resent 17 times», by a policy that nobody had set."""
    plain = await post.consumer(name="plain")
    assert plain.dead_letter_policy is None
    await post.send(b"x")
    for count in range(20):
        message = await plain.receive(30_000)
        assert message.redelivery_count() == count
        await plain.negative_acknowledge(message)
    with caplog.at_level(logging.INFO, "magnetar.client"):
        retrying = await post.consumer(enable_retry=True)
    assert retrying.dead_letter_policy == ConsumerDeadLetterPolicy(16)
    assert "16" in caplog.text


async def test_what_has_no_counts_has_no_dead_letters(post: Post) -> None:
    with pytest.raises(InvalidConfiguration, match="Shared and KeyShared"):
        await post.consumer(consumer_type=ConsumerType.Exclusive, dead_letter_policy=ConsumerDeadLetterPolicy(2))
    with pytest.raises(InvalidConfiguration, match="max_redeliver_count"):
        ConsumerDeadLetterPolicy(0)
    mine = await post.consumer()
    await post.send(b"x")
    with pytest.raises(OperationNotSupported, match="enable_retry"):
        await mine.reconsume_later(await mine.receive(5000), timedelta(0))


@pytest.mark.parametrize("named", [None, "graveyard"])
async def test_a_dead_letter_stays_one_whatever_policy_is_over_its_topic(post: Post, named: str | None) -> None:
    """A pattern that covers the dead-letter topic as well: no copy of a copy, and no topic of a topic."""
    dead = f"persistent://public/default/{named}" if named else f"{TOPIC}-s-DLQ"
    policy = ConsumerDeadLetterPolicy(1, dead_letter_topic=named, initial_subscription_name="kept")
    await post.send(b"poison")
    mine = await post.consumer(re.compile("public/default/.*"), dead_letter_policy=policy)
    counts: dict[str, int] = {}
    while counts.get(dead, 0) < 6:
        message = await mine.receive(20_000)
        counts[message.topic_name()] = counts.get(message.topic_name(), 0) + 1
        await mine.negative_acknowledge(message)
    assert counts == {TOPIC: 2, dead: 6}, "the dead letter itself comes until it is acknowledged"
    kept = await post.consumer(dead, "kept")
    assert (await kept.receive(30_000)).data() == b"poison"
    with pytest.raises(Timeout):
        await kept.receive(300)
    assert {each.topic.base.full for each in mine.partitions} <= {TOPIC, dead}


async def test_two_subscriptions_do_not_pass_dead_letters_to_and_fro(post: Post) -> None:
    await post.send(b"poison")
    to_and_fro = {"s": "dead-of-s", "r": "dead-of-r"}
    consumers = {
        name: await post.consumer(
            re.compile("public/default/.*"), name,
            dead_letter_policy=ConsumerDeadLetterPolicy(1, dead_letter_topic=dead),
        )
        for name, dead in to_and_fro.items()
    }
    shown: dict[tuple[str, str], int] = {}
    for _ in range(14):
        for name, consumer in consumers.items():
            try:
                message = await consumer.receive(700)
            except Timeout:
                continue
            key = (name, message.topic_name().rpartition("/")[2])
            shown[key] = shown.get(key, 0) + 1
            await consumer.negative_acknowledge(message)
    for dead in to_and_fro.values():
        consumer = await post.consumer(dead, "judge")
        assert (await consumer.receive(30_000)).data() == b"poison"
        with pytest.raises(Timeout):
            await consumer.receive(300)


async def test_a_pattern_over_its_own_retry_topics_makes_no_retries_of_retries(post: Post) -> None:
    await post.send(b"later")
    options = {"dead_letter_policy": ConsumerDeadLetterPolicy(2), "enable_retry": True}
    mine = await post.consumer(re.compile("public/default/.*"), **options)
    for _ in range(3):
        message = await mine.receive(20_000)
        await mine.reconsume_later(message, timedelta(0))
    letter = await mine.receive(20_000)
    assert letter.topic_name() == f"{TOPIC}-s-DLQ"
    with pytest.raises(OperationNotSupported, match="dead letter"):
        await mine.reconsume_later(letter, timedelta(0))
    await mine.acknowledge(letter)
    await mine.close()
    again = await post.consumer(re.compile("public/default/.*"), **options)
    assert {each.topic.base.full for each in again.partitions} == {TOPIC, f"{TOPIC}-s-RETRY", f"{TOPIC}-s-DLQ"}
    assert len(again.partitions) == 3, "each topic once"
    with pytest.raises(Timeout):
        await again.receive(500)


async def test_the_longest_names_have_retries_and_dead_letters_and_a_pattern_finds_them(post: Post) -> None:
    topic, name, policy = TopicName.parse("t" * 255), "s" * 255, ConsumerDeadLetterPolicy(1)
    post.topic = topic.full
    options = {"name": name, "dead_letter_policy": policy, "enable_retry": True, "consumer_name": "c" * 255}
    dead, retries = (make_letter_topic_name(topic, name, each) for each in (DEAD_LETTERS, RETRIES))
    mine = await post.consumer(**options)
    await post.send(b"poison")
    message = await mine.receive(20_000)
    await mine.reconsume_later(message, timedelta(0))
    message = await mine.receive(20_000)
    assert message.topic_name() == retries.full
    await mine.close()
    found = await post.consumer(re.compile("public/default/.*"), **options)
    assert {each.topic.base for each in found.partitions} == {topic, retries}
    await found.reconsume_later(await found.receive(20_000), timedelta(0))
    letter = await (await post.consumer(dead.full, "late")).receive(20_000)
    assert (letter.data(), letter.properties()["REAL_TOPIC"]) == (b"poison", post.topic)
    assert letter.producer_name().endswith("-DLQ")


async def test_a_retry_topic_with_a_shortened_name_leads_to_the_dead_letters_of_its_topic(post: Post) -> None:
    origin, name = TopicName.parse("t" * 230), "billing"
    dead, retries = (make_letter_topic_name(origin, name, each) for each in (DEAD_LETTERS, RETRIES))
    post.topic = retries.full
    await post.send(b"poison", properties={"RECONSUMETIMES": "1", "ORIGIN_MESSAGE_ID": "(1,1,-1,-1)"})
    policy = ConsumerDeadLetterPolicy(1)
    mine = await post.consumer(re.compile("public/default/.*"), name, dead_letter_policy=policy, enable_retry=True)
    await mine.reconsume_later(await mine.receive(20_000), timedelta(0))
    assert (await (await post.consumer(dead.full, "late")).receive(20_000)).data() == b"poison"


async def test_an_asyncio_consumer_that_asks_for_everything_again_gets_dead_letters_too(post: Post) -> None:
    mine = await post.consumer(dead_letter_policy=ConsumerDeadLetterPolicy(2, initial_subscription_name="kept"))
    await post.send(b"poison")
    for count in range(3):
        assert (await mine.receive(30_000)).redelivery_count() == count
        again = mine.redeliver_unacknowledged_messages()
        if again is not None:
            await again
    with pytest.raises(Timeout):
        await mine.receive(500)
    dead = await post.consumer(f"{TOPIC}-s-DLQ", "kept")
    assert (await dead.receive(30_000)).data() == b"poison"
