"""A reader that is opened at `latest`, inclusive, begins with the last message, whatever its entry is."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import Timeout
from magnetar.client.core.chunking import encode_chunks
from magnetar.client.model.message_id import MessageId
from magnetar.proto.entry_pb2 import MessageMetadata
from tests.support.cluster import Cluster, TestProducer, cluster

TOPIC = "persistent://public/default/t"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


async def read(running: Cluster, then: Any) -> list[bytes]:
    """What a reader at the last message gets, with what is published after it was opened."""
    client = Client(f"magnetar://{running.brokers[0].endpoint}")
    try:
        reader = await client.create_reader(TOPIC, MessageId.latest, start_message_id_inclusive=True)
        await then()
        found = []
        while True:
            try:
                found.append((await reader.read_next(500)).data())
            except Timeout:
                return found
    finally:
        await client.close()


@pytest.mark.parametrize("batch", [1, 2, 10])
async def test_of_a_batch_the_last_message_comes_and_all_of_a_later_one(running: Cluster, batch: int) -> None:
    producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
    payloads = [b"%d" % number for number in range(batch)]
    later = lambda: producer.send(*payloads)
    assert await read(running, later) == payloads, "there was no last message"
    assert await read(running, later) == [payloads[-1], *payloads]


async def test_a_message_in_chunks_comes_whole_and_what_is_between_its_chunks_does_not(running: Cluster) -> None:
    producer = await TestProducer(running.world, running.brokers[0], TOPIC, name="p").opened()
    other = await TestProducer(running.world, running.brokers[0], TOPIC, name="q").opened()
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    await other.send(b"before")
    for number, entry in enumerate(encode_chunks(metadata, bytes(2500), 1000, "u")):
        if number:
            await other.send(b"between")
        producer.frame(publish=entry)
        await producer.next("receipt")
    assert await read(running, lambda: other.send(b"after")) == [bytes(2500), b"after"]
