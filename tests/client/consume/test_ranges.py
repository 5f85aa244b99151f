"""Reading by index: every message of a range once and in order, across ledgers, brokers and interruptions."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.blocking.client import Client
from magnetar.client.common.errors import InvalidConfiguration, TopicNotFound
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import encode_broker_part
from magnetar.proto.errors import ConnectionLost, CorruptEntry
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate
from tests.support.cluster import Cluster, client_part, cluster

TOPIC = "persistent://public/default/t"


def url_of(running: Cluster, broker: int = 0) -> str:
    return f"magnetar://{running.brokers[broker].endpoint}"


async def read(client: aio.Client, first: int, end: int, topic: str = "t") -> list[aio.IndexedMessage]:
    """The messages of the range, without those beside it in their entries."""
    found = []
    async with aclosing(client.read_range(topic, first, end)) as batches:
        async for entries in batches:
            found += [each for entry in entries for each in entry.messages() if first <= each.index < end]
    return found


async def fill(client: aio.Client, topic: str = "t") -> list[aio.MessageId]:
    """Six entries of one to three messages, over two ledgers (`roll_entries=4`): the numbers 0 … 11."""
    async with await client.create_producer(topic, batching_max_publish_delay_ms=1000) as producer:
        ids = []
        for at, size in enumerate((1, 3, 2, 1, 3, 2)):
            numbers = range(sum((1, 3, 2, 1, 3, 2)[:at]), sum((1, 3, 2, 1, 3, 2)[: at + 1]))
            ids += await producer.send_many(
                [b"%d" % n for n in numbers], partition_key=f"k{at}", properties={"entry": str(at)}, event_timestamp=77
            )
            assert len(numbers) == size
        return ids


async def test_any_range_is_read_in_order_each_message_once_with_all_that_it_carries(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client:
        ids = await fill(client)
        for first in range(13):
            for end in range(first, 13):
                found = await read(client, first, end)
                assert [each.index for each in found] == list(range(first, end)), (first, end)
                assert [each.payload for each in found] == [b"%d" % n for n in range(first, end)]
                assert [each.message_id for each in found] == ids[first:end]
        (lone,) = await read(client, 2, 3)
        assert (lone.key, lone.properties, lone.event_time_ms) == ("k1", {"entry": "1"}, 77)
        assert lone.publish_time_ms > 0
        assert await read(client, 12, 99) == []


async def test_it_ends_where_the_topic_does_and_a_tombstone_has_no_payload(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        async with await client.create_producer("t") as producer:
            await producer.send(b"x")
            await producer.send(None)
        assert [each.payload for each in await read(client, 0, 1000)] == [b"x", None]


async def test_a_partition_whose_owner_gives_it_up_is_read_on_at_the_next(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, brokers=2, roll_entries=4) as running,
        aio.Client(f"magnetar://{running.brokers[0].endpoint},{running.brokers[1].endpoint}") as client,
        AdminClient(url_of(running)) as admin,
    ):
        await fill(client)
        found = []
        async with aclosing(client.read_range("t", 0, 12)) as batches:
            async for entries in batches:
                found += [each.index for entry in entries for each in entry.messages()]
                await admin.unload_namespace("public/default")
        assert found == list(range(12))


class Cutting(FakeBroker):
    """Sends an entry of one message after the other, and cuts each stream `cut_s` after its first two."""

    def __init__(self, messages: int, cut_s: float) -> None:
        super().__init__()
        self.messages, self.cut_s, self.reads = messages, cut_s, list[int]()

    async def read(self, stream: Any, context: Any) -> None:
        (request,) = await stream.receive()
        self.reads.append(request.first_index)
        for index in range(request.first_index, min(request.first_index + 2, self.messages)):
            entry = encode_broker_part(index, 0) + client_part("p", index, b"%d" % index)
            delivery = wire.Delivery(ledger_id=1, entry_id=index, entry=entry)
            stream.send_nowait(wire.ReadReply(request_id=request.request_id, entry=delivery))
        if request.first_index + 2 < self.messages:
            await asyncio.sleep(self.cut_s)
            raise ConnectionLost("the server cut the stream: it took nothing for 300 s")
        done = wire.ReadDone(next_index=self.messages)
        stream.send_nowait(wire.ReadReply(request_id=request.request_id, done=done))


def test_a_program_that_pauses_for_hours_between_two_entries_loses_none_and_gets_no_error() -> None:
    """As a Spark task does that is slow with its rows: the broker cuts the stream that it does not read meanwhile."""
    broker, found = Cutting(9, cut_s=300.0), list[int]()

    async def body(client: aio.Client, _: FakeBroker) -> None:
        async with aclosing(client.read_range("t", 0, 9)) as batches:
            async for entries in batches:
                found.extend(entry.end_index - 1 for entry in entries)
                await asyncio.sleep(3 * 3600)

    simulate(body, broker)  # type: ignore[arg-type]
    assert found == list(range(9))
    assert broker.reads == [0, 2, 4, 6, 8]


async def test_what_cannot_be_read_is_the_sdks_error(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, aio.Client(url_of(running)) as client:
        with pytest.raises(TopicNotFound, match="does not exist"):
            await read(client, 0, 1, "nowhere")
        for first, end in ((-1, 1), (0, -1), ("0", 1), (0, None)):
            with pytest.raises(InvalidConfiguration):
                await read(client, first, end)  # type: ignore[arg-type]
        with pytest.raises(CorruptEntry):
            aio.StoredEntry(-1, 1, 1, b"torn").messages()


async def test_the_blocking_client_reads_the_same_and_ends_early(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=4) as running, aio.Client(url_of(running)) as client:
        await fill(client)

        def blocking() -> tuple[list[int], int]:
            with Client(url_of(running)) as own:
                whole = [m.index for entries in own.read_range("t", 3, 9) for e in entries for m in e.messages()]
                early = own.read_range("t", 0, 12)
                first = next(early)[0].messages()[0].index
                early.close()  # type: ignore[attr-defined]
                return whole, first

        whole, first = await asyncio.to_thread(blocking)
        assert (set(range(3, 9)) <= set(whole), whole == sorted(whole), first) == (True, True, 0)
