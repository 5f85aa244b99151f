"""A reader that is opened at `latest`, inclusive, begins with the last message, whatever its entry is."""

import asyncio
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
from tests.support.steps import take_until_quiet

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
        return [each.data() for each in await take_until_quiet(reader.read_next, 500)]
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


@pytest.mark.parametrize(("inclusive", "moved"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("batch", [1, 3])
async def test_what_is_published_while_it_reconnects_is_not_passed_over(
    running: Cluster, batch: int, inclusive: bool, moved: bool
) -> None:
    producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
    await producer.send(*[b"before %d" % number for number in range(batch)])
    client = Client(f"magnetar://{running.brokers[0].endpoint}")
    try:
        start = MessageId.earliest if moved else MessageId.latest
        reader = await client.create_reader(TOPIC, start, start_message_id_inclusive=inclusive)
        if moved:
            await reader.seek(MessageId.latest)
        expected = [b"before %d" % (batch - 1)] if inclusive else []
        for number in range(3):  # nothing is taken: what waits is dropped with the connection
            payloads = [b"%d/%d" % (number, each) for each in range(batch)]
            async with asyncio.timeout(30):
                while not client.connections._streams:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            next(iter(client.connections._streams.values())).cancel()
            await producer.send(*payloads)
            expected += payloads
            await asyncio.sleep(0.3)
        assert [(await reader.read_next(30_000)).data() for _ in expected] == expected
        with pytest.raises(Timeout):
            await reader.read_next(300)
    finally:
        await client.close()
