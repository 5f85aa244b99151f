"""A message in chunks where a feature handles entries one by one: it is taken, left or shown as one message."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.session.backlogs import SubscriptionAdministration
from magnetar.broker.subscription import dead_letters as whole_messages
from magnetar.client.admin.grpc_transport import decode_stored_messages
from magnetar.client.client import Client
from magnetar.client.core.chunking import encode_chunks
from magnetar.client.model.settings import CompressionType, ConsumerType, InitialPosition, MultiplierRedeliveryBackoff
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import encode_entry
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import CorruptEntry, InvalidRequest, MagnetarError
from magnetar.proto.names import Position
from tests.support.cluster import Cluster, TestProducer, cluster
from tests.support.steps import take_until_quiet

TOPIC = "persistent://public/default/large"
BIG = random.Random(1).randbytes(50_000)
INDIVIDUAL = [ConsumerType.Shared, ConsumerType.KeyShared]
EVERY = list(ConsumerType)


class At:
    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.client = Client(f"magnetar://{running.brokers[0].endpoint}")

    async def consumer(self, type_: ConsumerType = ConsumerType.Shared, name: str = "s", **options: Any) -> Any:
        return await self.client.subscribe(
            TOPIC, name, type_, initial_position=InitialPosition.Earliest,
            negative_ack_redelivery_backoff=MultiplierRedeliveryBackoff(1, 1), **options,
        )  # fmt: skip

    async def send(self, *payloads: bytes, **options: Any) -> list[Any]:
        producer = await self.client.create_producer(TOPIC, batching_enabled=False, chunking_enabled=True)
        ids = [await producer.send(payload, **options) for payload in payloads]
        await producer.close()
        return ids

    @property
    def backlogs(self) -> SubscriptionAdministration:
        return SubscriptionAdministration(self.running.brokers[0].topics[TOPIC])


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[At]:
    async with cluster(tmp_path, max_message_bytes=20_000) as running:
        at = At(running)
        yield at
        await at.client.close()


async def rest(consumer: Any) -> list[bytes]:
    """What comes until nothing does, acknowledged."""

    async def take(timeout_ms: int) -> bytes:
        message = await consumer.receive(timeout_ms)
        await consumer.acknowledge(message)
        return bytes(message.data())

    return await take_until_quiet(take, 400)


@pytest.mark.parametrize("type_", EVERY, ids=[each.name for each in EVERY])
@pytest.mark.parametrize("skipped", [1, 2, 3])
async def test_skipping_a_part_of_a_message_skips_all_of_it(at: At, type_: ConsumerType, skipped: int) -> None:
    await (await at.consumer(type_)).close()
    (big, _) = await at.send(BIG, b"small")
    assert len(big.chunks()) == 3
    await at.backlogs.skip_messages("s", skipped)
    assert await rest(await at.consumer(type_)) == [b"small"]
    assert (await at.backlogs.analyze_backlog("s")).entries == 0


@pytest.mark.parametrize("type_", INDIVIDUAL, ids=[each.name for each in INDIVIDUAL])
async def test_expiring_a_part_of_a_message_expires_all_of_it(at: At, type_: ConsumerType) -> None:
    await (await at.consumer(type_)).close()
    (big, _) = await at.send(BIG, b"small")
    await at.backlogs.expire_messages("s", 0, big.chunks()[1])
    assert await rest(await at.consumer(type_)) == [b"small"]
    assert (await at.backlogs.analyze_backlog("s")).entries == 0


async def in_parts(at: At, other: TestProducer) -> int:
    """Publishes a message in chunks with another one between two of them; a time between the first two chunks."""
    producer = await TestProducer(at.running.world, at.running.brokers[0], TOPIC, name="big").opened()
    metadata, when = MessageMetadata(producer_name="big", sequence_id=0, publish_time=1), 0
    for number, entry in enumerate(encode_chunks(metadata, BIG, 20_000, "u")):
        if number == 1:
            clock = at.running.world.clock
            begun = clock.wall_ms()
            while clock.wall_ms() < begun + 2:  # noqa: ASYNC110 - a condition of the clock alone
                await asyncio.sleep(0)
            when = clock.wall_ms()
            await other.send(b"between")
        producer.frame(publish=entry)
        await producer.next("receipt")
    await producer.close()
    return when


@pytest.mark.parametrize("by", ["consumer", "admin"])
@pytest.mark.parametrize("type_", EVERY, ids=[each.name for each in EVERY])
async def test_seeking_to_a_time_inside_a_message_gets_all_of_it(at: At, type_: ConsumerType, by: str) -> None:
    other = await TestProducer(at.running.world, at.running.brokers[0], TOPIC).opened()
    await other.send(b"before")
    consumer = await at.consumer(type_)
    when = await in_parts(at, other)
    assert sorted(await rest(consumer)) == sorted([b"before", b"between", BIG])
    if by == "consumer":
        await consumer.seek(when)
    else:
        await consumer.close()
        await at.backlogs.reset_subscription("s", None, when)
        consumer = await at.consumer(type_)
    assert sorted(await rest(consumer)) == sorted([b"between", BIG])
    assert (await at.backlogs.analyze_backlog("s")).entries == 0


async def test_what_expires_by_age_inside_a_message_takes_all_of_it(at: At) -> None:
    other = await TestProducer(at.running.world, at.running.brokers[0], TOPIC).opened()
    await (await at.consumer()).close()
    when = await in_parts(at, other)
    life, clock = at.running.brokers[0].topics[TOPIC].maintenance, at.running.world.clock
    subscription = at.running.brokers[0].topics[TOPIC].subscriptions["s"]
    await life.expire_messages_older_than(subscription, (clock.wall_ms() - when) / 1000)
    found = await rest(await at.consumer())
    assert found in ([b"between"], []), "as late as it is, the other one may be old enough too"
    assert (await at.backlogs.analyze_backlog("s")).entries == 0


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("type_", INDIVIDUAL, ids=[each.name for each in INDIVIDUAL])
async def test_several_consumers_get_each_message_whole_and_once(at: At, type_: ConsumerType, key: str | None) -> None:
    consumers = [await at.consumer(type_) for _ in range(3)]
    producers = [
        await at.client.create_producer(TOPIC, batching_enabled=False, chunking_enabled=True) for _ in range(5)
    ]
    payloads = [bytes([number]) * 50_000 for number in range(20)]
    await asyncio.gather(
        *(
            producers[number % 5].send(payload, partition_key=key and f"{key}{number % 7}")
            for number, payload in enumerate(payloads)
        )
    )
    found = await asyncio.gather(*map(rest, consumers))
    assert sorted(each for one in found for each in one) == payloads
    assert (await at.backlogs.analyze_backlog("s")).entries == 0


@pytest.mark.parametrize("type_", EVERY, ids=[each.name for each in EVERY])
async def test_an_acknowledgement_in_a_transaction_is_of_all_chunks(at: At, type_: ConsumerType) -> None:
    await at.send(BIG)
    consumer = await at.consumer(type_)
    for committed in (False, True):
        message = await consumer.receive(10_000)
        assert message.data() == BIG
        txn = at.client.transaction(timeout=30)
        try:
            async with txn:
                await consumer.acknowledge(message, txn=txn)
                if not committed:
                    raise LookupError
        except LookupError:
            continue
    assert await rest(consumer) == []
    assert (await at.backlogs.analyze_backlog("s")).entries == 0


async def test_a_table_has_values_that_came_in_chunks(at: At) -> None:
    await at.send(b"old", BIG, partition_key="k")
    table = await at.client.create_table_view(TOPIC)
    assert table.get("k") == BIG
    await table.close()


@pytest.mark.parametrize("compression", [CompressionType.NONE, CompressionType.LZ4])
def test_a_chunk_is_shown_as_it_is_stored(compression: CompressionType) -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, compression=int(compression))  # type: ignore[arg-type]
    entries = encode_chunks(metadata, BIG, 20_000, "u")
    shown = decode_stored_messages(
        [wire.Delivery(ledger_id=1, entry_id=number, entry=each) for number, each in enumerate(entries)], TOPIC
    )
    assert [each.message_id.position() for each in shown] == [Position(1, number) for number in range(3)]
    assert sum(len(each.payload) for each in shown) == metadata.total_chunk_msg_size


async def test_a_skip_among_chunks_of_very_many_messages_reads_a_bounded_number_of_entries(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is of another message that is never whole: no search of one ends early."""
    monkeypatch.setattr(whole_messages, "SEARCH_ENTRIES_MAX", 2_000)
    producer = await TestProducer(at.running.world, at.running.brokers[0], TOPIC).opened()
    count = 400
    for number in range(count):
        metadata = MessageMetadata(
            producer_name=f"p{number}", sequence_id=number, publish_time=1, uuid=f"u{number}", chunk_id=1,
            num_chunks_from_msg=3, total_chunk_msg_size=9,
        )  # fmt: skip
        producer.frame(publish=encode_entry(metadata, b"..."))
    for _ in range(count):
        await producer.next("receipt")
    log, read = at.running.brokers[0].topics[TOPIC].shown, 0
    honest = log.reader.read

    async def counted(*of: Any, **more: Any) -> Any:
        nonlocal read
        found = await honest(*of, **more)
        read += len(found)
        return found

    monkeypatch.setattr(type(log.reader), "read", lambda reader, *of, **more: counted(*of, **more))
    assert await whole_messages.find_remaining_chunks(log, Position(log.shape.tail_span.ledger_id, 200)) == []
    assert 1_000 < read < 5_000, "without a bound it is half of the square: 80,000"


@pytest.mark.parametrize("error", [CorruptEntry("its head is no metadata"), InvalidRequest("it was trimmed")])
@pytest.mark.parametrize("at_mark", [True, False], ids=["read at the mark", "search of the rest"])
async def test_an_entry_that_cannot_be_read_does_not_end_a_skip(
    at: At, error: MagnetarError, at_mark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expiry would end at it in each round, and messages after it would never expire."""
    await (await at.consumer()).close()
    (big,) = await at.send(BIG)
    log = at.running.brokers[0].topics[TOPIC].shown

    async def refuse(*of: Any) -> Any:
        raise error

    if at_mark:
        monkeypatch.setattr(type(log.reader), "read_entry", refuse)
    else:
        monkeypatch.setattr(whole_messages, "find_whole_message", refuse)
    assert await whole_messages.find_remaining_chunks(log, big.position()) == []
