"""A batch that declares more messages than it has, with a right checksum, freezes no subscription."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import ChecksumError, Timeout
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import encode_client_part
from magnetar.proto.entry_pb2 import MessageMetadata
from tests.client.core.test_permits import torn
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster, payloads_of

TOPIC = "persistent://public/default/t"
DECLARED = 60_000
"""More than a consumer may hold unacknowledged, and above a quarter of what a subscription may."""


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


async def filled(running: Cluster, malformed: int, *, compressed: bool = False) -> None:
    producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
    for _ in range(malformed):
        entry = torn(producer.sequence_id, DECLARED)
        if compressed:
            metadata = MessageMetadata(
                producer_name="p", sequence_id=producer.sequence_id, publish_time=1000, compression=2,  # type: ignore[arg-type]
                uncompressed_size=6 * DECLARED, num_messages_in_batch=DECLARED,
            )  # fmt: skip
            entry = encode_client_part(metadata, b"no zlib stream")
        producer.frame(publish=entry)
        await producer.next("receipt")
        producer.sequence_id += DECLARED
    for number in range(3):
        await producer.send(b"%d" % number)
    await producer.close()


async def three_of(consumer: Any, errors: int) -> None:
    got, told = [], 0
    while len(got) < 3:
        try:
            message = await consumer.receive(10_000)
            got.append(message.data())
            await consumer.acknowledge(message)
        except ChecksumError:
            told += 1
    assert (sorted(got), told) == ([b"0", b"1", b"2"], errors)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("type_", list(ConsumerType), ids=[each.name for each in ConsumerType])
async def test_a_malformed_batch_is_told_once_and_discarded(
    running: Cluster, type_: ConsumerType, compressed: bool
) -> None:
    await filled(running, 8, compressed=compressed)
    client = Client(f"magnetar://{running.brokers[0].endpoint}")
    try:
        consumer = await client.subscribe(TOPIC, "s", initial_position=InitialPosition.Earliest, consumer_type=type_)
        await three_of(consumer, 8)
        assert consumer.statistics()["discarded_entries"] == 8
        await consumer.close()
        again = await client.subscribe(TOPIC, "s", consumer_type=type_)
        with pytest.raises(Timeout):
            await again.receive(300)
    finally:
        await client.close()


@pytest.mark.parametrize("type_", [wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED])
async def test_a_client_that_acknowledges_nothing_of_it_gets_what_follows(running: Cluster, type_: int) -> None:
    await filled(running, 8)
    asked = {"type": type_, "initial_position": wire.Subscribe.EARLIEST}
    for _ in range(2):  # the next consumer gets it too
        raw = await TestConsumer(running.world, running.brokers[0], TOPIC, permits=10 * DECLARED, **asked).ready()
        got: list[bytes] = []
        while len(got) < 3:
            delivery = await raw.receive()
            if len(delivery.entry) < 1000:
                got += payloads_of(delivery.entry)
        assert sorted(got) == [b"0", b"1", b"2"]
        await raw.leave()
