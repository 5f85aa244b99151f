"""Producers that have little to publish share a stream; with more than a few words each gets its own, and its seat."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.asyncio import Client
from magnetar.broker.protocols.grpc import lobby, produce
from magnetar.broker.topic.gate import PublishGate
from magnetar.broker.topic.registry import Seating
from magnetar.client.connect.lobby import ENTRY_BYTES_MAX, MESSAGES_MAX
from tests.support.cluster import Cluster, cluster

T = "persistent://public/default/t"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many streams of each kind were opened."""
    opened = {"lobby": 0, "produce": 0}

    def count(module: Any, name: str) -> None:
        honest = module.serve

        async def serve(*args: Any) -> None:
            opened[name] += 1
            await honest(*args)

        monkeypatch.setattr(module, "serve", serve)

    count(lobby, "lobby")
    count(produce, "produce")
    return opened


def seats(running: Cluster, topic: str) -> list[str]:
    return [each.name for each in running.brokers[0].topics[topic].producers]


async def test_producers_without_messages_share_one_stream_and_are_seated(
    tmp_path: Path, streams: dict[str, int]
) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        producers = [await client.create_producer(f"t{number}", producer_name=f"p{number}") for number in range(20)]
        assert streams == {"lobby": 1, "produce": 0}
        assert [seats(running, f"{T}{number}") for number in range(20)] == [[f"p{number}"] for number in range(20)]
        assert all(producer.is_connected() for producer in producers)
        await producers[3].close()
        assert seats(running, f"{T}3") == [], "the broker has forgotten it when it is closed"
        with pytest.raises(magnetar.ProducerBusy):
            await client.create_producer("t4", producer_name="p4")


async def test_a_few_words_are_said_in_the_lobby_and_then_the_producer_gets_its_own_stream(
    tmp_path: Path, streams: dict[str, int]
) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        producer = await client.create_producer("t1")
        for number in range(MESSAGES_MAX):
            assert (await producer.send(b"%d" % number)).entry_id() == number
        assert streams == {"lobby": 1, "produce": 0}
        assert (await producer.send(b"more")).entry_id() == MESSAGES_MAX
        assert streams == {"lobby": 1, "produce": 1}
        large = await client.create_producer("t2")
        await large.send(b"x" * (ENTRY_BYTES_MAX + 1))
        assert streams == {"lobby": 1, "produce": 2}


async def test_whom_the_broker_would_not_read_gets_its_own_stream_and_nothing_is_stored_twice(
    tmp_path: Path, streams: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate or a quota: a stream that is shared is always read."""
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        producer = await client.create_producer("t1")
        await producer.send(b"a")
        monkeypatch.setattr(PublishGate, "closed", property(lambda _: True))
        async with asyncio.timeout(20):
            await producer.send(b"b")
        assert streams == {"lobby": 1, "produce": 1}
        assert running.brokers[0].topics[T + "1"].log.shape.end_index == 2
        assert seats(running, T + "1") == [producer.producer_name()]


async def test_more_than_one_message_opens_the_producers_own_stream_which_takes_its_seat(
    tmp_path: Path, streams: dict[str, int]
) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        idle = await client.create_producer("t1")
        busy = await client.create_producer("t2", batching_enabled=False)
        ids = await asyncio.gather(*[busy.send(b"%d" % number) for number in range(50)])
        assert ids == sorted(ids)
        assert running.brokers[0].topics[T + "2"].log.shape.end_index == 50, "nothing is stored twice"
        assert streams == {"lobby": 1, "produce": 1}
        assert seats(running, T + "2") == [busy.producer_name()]
        await busy.send(b"more")
        assert streams["produce"] == 1, "it stays there"
        assert seats(running, T + "1") == [idle.producer_name()]
        await busy.close()
        assert seats(running, T + "2") == []


async def test_who_waits_in_the_lobby_hears_that_the_topic_moved_and_comes_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        producer = await client.create_producer("t1", producer_name="p")
        before = running.brokers[0].topics[T + "1"]
        await running.brokers[0].owned.unload(before.name)
        async with asyncio.timeout(20):
            await producer.send(b"x")
        assert running.brokers[0].topics[T + "1"] is not before
        assert seats(running, T + "1") == ["p"]


async def test_a_message_that_is_sent_while_the_place_is_given_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic is lost to a producer in the lobby, which returns there; meanwhile it gets something to say."""
    joining, go_on, join = asyncio.Event(), asyncio.Event(), Seating.join
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        producer = await client.create_producer("t1", producer_name="p")

        async def slowly(self: Seating, joined: Any) -> None:
            joining.set()
            await go_on.wait()
            await join(self, joined)

        monkeypatch.setattr(Seating, "join", slowly)
        await running.brokers[0].owned.unload(running.brokers[0].topics[T + "1"].name)
        await joining.wait()
        sending = asyncio.create_task(producer.send(b"x"))
        await asyncio.sleep(0)
        go_on.set()
        async with asyncio.timeout(20):
            await sending
        assert running.brokers[0].topics[T + "1"].log.shape.end_index == 1
        assert seats(running, T + "1") == ["p"]


async def test_exclusive_producers_have_their_own_stream(tmp_path: Path, streams: dict[str, int]) -> None:
    async with cluster(tmp_path) as running, Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        await client.create_producer("t1", access_mode=magnetar.ProducerAccessMode.Exclusive)
        assert streams == {"lobby": 0, "produce": 1}


async def test_who_breaks_off_leaves_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, all_left, leave = [], asyncio.Event(), Seating.leave

    def noted(self: Seating, producer: Any) -> None:
        leave(self, producer)
        left.append(producer.name)
        if len(left) == 3:
            all_left.set()

    monkeypatch.setattr(Seating, "leave", noted)
    async with cluster(tmp_path) as running:
        client = Client(f"magnetar://{running.brokers[0].endpoint}")
        for number in range(3):
            await client.create_producer(f"t{number}")
        await client.connections.close()  # as a process that is killed: nobody says farewell
        async with asyncio.timeout(20):
            await all_left.wait()
        assert [seats(running, f"{T}{number}") for number in range(3)] == [[], [], []]
        client.shutdown()
