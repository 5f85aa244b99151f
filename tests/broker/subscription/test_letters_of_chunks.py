"""Messages in chunks under dead-letter and retry policies, of the SDK and of the server: each is moved whole, once."""

import random
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnetar.broker.session.backlogs import SubscriptionAdministration
from magnetar.broker.subscription import dead_letters
from magnetar.broker.topic.storage import DurableTopicStorage
from magnetar.client.common.errors import Timeout
from magnetar.client.consume.dead_letters import parse_reconsume_count
from magnetar.client.core.chunking import encode_chunks
from magnetar.client.model.settings import (
    CompressionType,
    ConsumerDeadLetterPolicy,
    ConsumerType,
)
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import encode_entry
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import Unavailable
from magnetar.proto.names import TopicName
from tests.support.cluster import TestConsumer, TestProducer, cluster

from .test_letters import Post

TOPIC = "persistent://public/default/large"
DEAD = f"{TOPIC}-s-DLQ"
BIG = random.Random(1).randbytes(50_000)
ENTRY_BYTES_MAX = 20_000
INDIVIDUAL = [ConsumerType.Shared, ConsumerType.KeyShared]


async def nothing(consumer: Any) -> None:
    with pytest.raises(Timeout):
        await consumer.receive(300)


@pytest.fixture
async def post(tmp_path: Path) -> AsyncIterator[Post]:
    async with cluster(tmp_path, max_message_bytes=ENTRY_BYTES_MAX) as running:
        post = Post(running, TOPIC, chunking_enabled=True)
        yield post
        await post.client.close()


# ------------------------------------------------------------------------------------------------ by the SDK
@pytest.mark.parametrize("type_", INDIVIDUAL)
async def test_a_consumer_moves_a_message_in_chunks_as_one(post: Post, type_: ConsumerType) -> None:
    mine = await post.consumer(consumer_type=type_, dead_letter_policy=ConsumerDeadLetterPolicy(2))
    await post.send(BIG, properties={"a": "b"}, partition_key="k", ordering_key="o", event_timestamp=7)
    counts = []
    for _ in range(3):
        message = await mine.receive(10_000)
        assert message.data() == BIG
        counts.append(message.redelivery_count())
        await mine.negative_acknowledge(message)
    assert counts == [0, 1, 2]
    dead = await post.consumer(DEAD, "late")
    letter = await dead.receive(10_000)
    assert (letter.data(), letter.partition_key(), letter.event_timestamp()) == (BIG, "k", 7)
    assert letter.ordering_key() == "o"
    assert letter.properties() == {
        "a": "b", "REAL_TOPIC": TOPIC, "REAL_SUBSCRIPTION": "s", "ORIGIN_MESSAGE_ID": str(message.message_id()),
    }  # fmt: skip
    await nothing(dead)
    await mine.close()
    await nothing(await post.consumer(consumer_type=type_))


@pytest.mark.parametrize("type_", INDIVIDUAL)
async def test_a_message_in_chunks_is_reconsumed_later_as_one_and_dies_in_the_end(
    post: Post, type_: ConsumerType
) -> None:
    mine = await post.consumer(
        consumer_type=type_, enable_retry=True, dead_letter_policy=ConsumerDeadLetterPolicy(1)
    )  # fmt: skip
    await post.send(BIG, properties={"a": "b"})
    first = await mine.receive(10_000)
    await mine.reconsume_later(first, timedelta(milliseconds=20))
    second = await mine.receive(10_000)
    assert (second.data(), second.topic_name()) == (BIG, f"{TOPIC}-s-RETRY")
    assert second.properties()["RECONSUMETIMES"] == "1"
    await mine.reconsume_later(second, timedelta(0))
    dead = await post.consumer(DEAD, "late")
    letter = await dead.receive(10_000)
    assert (letter.data(), letter.properties()["ORIGIN_MESSAGE_ID"]) == (BIG, str(first.message_id()))
    await nothing(dead)
    await mine.close()
    await nothing(await post.consumer(consumer_type=type_, enable_retry=True))


# ------------------------------------------------------------------------------------------------ by the server
@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Post]:
    async with cluster(tmp_path, max_message_bytes=ENTRY_BYTES_MAX, dead_letter_max_redeliver_count=1) as running:
        post = Post(running, TOPIC, chunking_enabled=True)
        yield post
        await post.client.close()


@pytest.mark.parametrize(
    ("type_", "compression"), list(zip(INDIVIDUAL, (CompressionType.NONE, CompressionType.LZ4), strict=True))
)
async def test_the_server_moves_a_message_in_chunks_as_one(
    served: Post, type_: ConsumerType, compression: CompressionType
) -> None:
    mine = await served.consumer(consumer_type=type_)
    served.produced["compression_type"] = compression
    await served.send(BIG, b"small", BIG[::-1], properties={"a": "b"}, partition_key="k")
    origins = {}
    for _ in range(6):
        message = await mine.receive(10_000)
        origins[message.data()] = str(message.message_id())
        await mine.negative_acknowledge(message)
    dead = await served.consumer(DEAD, "late")
    found = {}
    for _ in range(3):
        letter = await dead.receive(10_000)
        found[letter.data()] = letter
        await dead.acknowledge(letter)
    assert found.keys() == {BIG, b"small", BIG[::-1]}
    for data, letter in found.items():
        told = letter.properties()
        assert (letter.partition_key(), told["a"], told["REAL_TOPIC"]) == ("k", "b", TOPIC)
        assert (told["ORIGIN_MESSAGE_ID"], told["REDELIVERY_COUNT"]) == (origins[data], "2")
    await nothing(dead)
    await mine.close()
    await nothing(await served.consumer(consumer_type=type_))


class Raw:
    """A producer and a consumer by hand: chunks in any order, and given back one by one."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.running = post.running

    async def publish(self, *numbers: int, uuid: str = "u", name: str = "p", payload: bytes = BIG) -> None:
        producer = await TestProducer(self.running.world, self.running.brokers[0], TOPIC, name=name).opened()
        metadata = MessageMetadata(producer_name=name, sequence_id=0, publish_time=1)
        entries = encode_chunks(metadata, payload, ENTRY_BYTES_MAX, uuid)
        for number in numbers:
            producer.frame(publish=entries[number])
            await producer.next("receipt")
        await producer.close()

    async def consumer(self) -> TestConsumer:
        asked = {"type": wire.Subscribe.SHARED, "initial_position": wire.Subscribe.EARLIEST}
        return await TestConsumer(self.running.world, self.running.brokers[0], TOPIC, "s", **asked).ready()

    async def kill(self, consumer: TestConsumer, *entry_ids: int) -> None:
        """Gives these back until they are dead; others are kept."""
        for _ in range(2):
            for entry_id in entry_ids:
                delivery = await consumer.receive()
                while delivery.entry_id != entry_id:
                    delivery = await consumer.receive()
                place = wire.Position(ledger_id=delivery.ledger_id, entry_id=delivery.entry_id)
                consumer.frame(redeliver=wire.Redeliver(entries=[place]))

    async def letters(self, count: int) -> list[Any]:
        dead = await self.post.consumer(DEAD, "late")
        found = []
        for _ in range(count):
            found.append(await dead.receive(10_000))
            await dead.acknowledge(found[-1])
        await nothing(dead)
        return found

    async def has_no_backlog(self) -> bool:
        return (
            await SubscriptionAdministration(self.running.brokers[0].topics[TOPIC]).analyze_backlog("s")
        ).entries == 0


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_one_dead_chunk_takes_the_others_along_and_what_repeats_them(served: Post, which: int) -> None:
    raw = Raw(served)
    consumer = await raw.consumer()
    await raw.publish(0, 1, 0, 1, 2)
    await raw.kill(consumer, [0, 3, 4][which])
    (letter,) = await raw.letters(1)
    assert letter.data() == BIG
    assert await raw.has_no_backlog()


async def test_a_chunk_of_what_is_never_whole_goes_as_it_is(served: Post) -> None:
    raw = Raw(served)
    consumer = await raw.consumer()
    await raw.publish(0, 1)
    await raw.publish(0, 1, 2, uuid="v")  # the producer went on
    await raw.kill(consumer, 1)
    (letter,) = await raw.letters(1)
    assert "chunk 1 of 3 of a message of which the rest is missing" in letter.properties()["DEAD_LETTER_REASON"]
    assert BIG[30_000:30_100] in letter.data()


async def test_what_may_still_become_whole_is_waited_for(served: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "DEAD_LETTER_RETRY_S", 0.01)
    raw = Raw(served)
    consumer = await raw.consumer()
    await raw.publish(0, 1)
    await raw.publish(0, 1, 2, uuid="w", name="q")
    await raw.kill(consumer, 0)
    assert not await raw.has_no_backlog()
    await raw.publish(2)
    (letter,) = await raw.letters(1)
    assert letter.data() == BIG


async def test_a_move_that_breaks_off_is_repeated_and_the_message_comes_once(
    served: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "DEAD_LETTER_RETRY_S", 0.01)
    monkeypatch.setattr(dead_letters, "LETTER_GROUP_BYTES", 1)
    raw, calls = Raw(served), 0
    session = served.running.brokers[0].topic_manager._open()
    assert isinstance(session.storage, DurableTopicStorage)
    way = session.storage.forward

    async def broken(source: TopicName, *letters: Any) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Unavailable("no way to the dead-letter topic")
        return await way(source, *letters)

    monkeypatch.setattr(session, "storage", msgspec.structs.replace(session.storage, forward=broken))
    consumer = await raw.consumer()
    await raw.publish(0, 1, 2)
    await raw.kill(consumer, 0)
    (letter,) = await raw.letters(1)
    assert (letter.data(), calls) == (BIG, 5)


async def test_a_message_as_large_as_an_entry_has_room_for_what_its_letter_says(served: Post) -> None:
    raw = Raw(served)
    consumer = await raw.consumer()
    producer = await TestProducer(served.running.world, served.running.brokers[0], TOPIC).opened()
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    payload = bytes(ENTRY_BYTES_MAX - len(encode_entry(metadata, b"")))
    producer.frame(publish=encode_entry(metadata, payload))
    await producer.next("receipt")
    await raw.kill(consumer, 0)
    (letter,) = await raw.letters(1)
    assert letter.data() == payload


async def test_chunks_that_wait_for_others_are_no_dead_letters(served: Post) -> None:
    """They were not shown."""
    consumer = await served.consumer(max_pending_chunked_message=1)
    raw = Raw(served)
    payloads = [bytes([number]) * 50_000 for number in range(6)]
    for chunk in range(3):
        for number, payload in enumerate(payloads):
            await raw.publish(chunk, uuid=f"u{number}", name=f"p{number}", payload=payload)
    found = []
    for _ in payloads:
        message = await consumer.receive(20_000)
        assert message.redelivery_count() == 0
        found.append(message.data())
        await consumer.acknowledge(message)
    assert sorted(found) == payloads
    await nothing(await served.consumer(DEAD, "late"))


# ------------------------------------------------------------------------------------------------ what a copy keeps
def foreign(**fields: Any) -> bytes:
    """An entry as a program of another language may publish it."""
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, **fields)
    metadata.properties.add(key="RECONSUMETIMES", value="x")
    return encode_entry(metadata, b"payload")


async def published(post: Post, entry: bytes) -> None:
    producer = await TestProducer(post.running.world, post.running.brokers[0], TOPIC).opened()
    producer.frame(publish=entry)
    await producer.next("receipt")
    await producer.close()


@pytest.mark.parametrize("key", [b"\xff\x00\x80", b"", None, "ü".encode()])
async def test_copies_keep_keys_of_bytes_and_times_of_any_size(post: Post, key: bytes | None) -> None:
    fields: dict[str, Any] = {"event_time": (1 << 64) - 1, "partition_key": ""}
    if key is not None:
        fields["ordering_key"] = key
    await published(post, foreign(**fields))
    mine = await post.consumer(enable_retry=True, dead_letter_policy=ConsumerDeadLetterPolicy(1))
    first = await mine.receive(30_000)
    await mine.reconsume_later(first, timedelta(0))
    second = await mine.receive(10_000)
    assert second.properties()["RECONSUMETIMES"] == "1", "a property of that name that is no number counts as none"
    await mine.reconsume_later(second, timedelta(0))
    dead = await post.consumer(DEAD, "late")
    for copy in (second, await dead.receive(30_000)):
        assert copy.fields.HasField("ordering_key") == (key is not None)
        assert copy.fields.ordering_key == (key or b"")
        assert (copy.fields.HasField("partition_key"), copy.event_timestamp()) == (True, (1 << 64) - 1)


@pytest.mark.parametrize(
    ("told", "times"), [("", 0), ("x", 0), ("7", 7), ("-1", 0), ("1_0", 0), (" 5", 0), ("٣", 0), ("9" * 5000, 0)]
)
def test_a_count_that_is_no_number_is_none(told: str, times: int) -> None:
    assert parse_reconsume_count(told) == times
