"""A broker gives a bundle to another one: its clients follow at once, and whichever of the two dies at whichever step,
the bundle can be taken and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

import magnetar.asyncio as magnetar
from magnetar.broker.server import Broker
from magnetar.metadata.records import OwnerRecord
from magnetar.metadata.store import get_record
from magnetar.proto.errors import ConnectionLost, MagnetarError, NotOwner
from magnetar.proto.names import TopicName
from magnetar.runtime.network import Endpoint
from tests.broker.pulsar.raw import Raw
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"


async def two(running: Cluster, **options: Any) -> tuple[Broker, Broker]:
    """Two brokers of one group; the first has the topic TOPIC."""
    first = await running.add_broker(name="first", share_group="all", **options)
    producer = await TestProducer(running.world, first, TOPIC).opened()
    await producer.send(b"before")
    await producer.close()
    return first, await running.add_broker(name="second", share_group="all", **options)


async def owner_of(running: Cluster, broker: Broker) -> tuple[OwnerRecord, int] | None:
    record = await broker.topic_manager.catalog.get_namespace(TopicName.parse(TOPIC).namespace_name)
    path = broker.topic_manager._open().ownership.owner_path(TopicName.parse(TOPIC), record)
    return await get_record(running.store.new_session(), path, OwnerRecord)


async def test_a_drained_broker_names_the_next_one_to_its_clients_and_gets_nothing_any_more(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        first, second = await two(running)
        producer = await TestProducer(running.world, first, TOPIC).opened()
        consumer = await TestConsumer(running.world, first, TOPIC).ready()
        assert await first.topic_manager.drain() == 0
        for client in (producer, consumer):
            with pytest.raises(NotOwner) as told:
                await client.next("never")
            assert told.value.fields["owner"] == str(second.endpoint)
        found = await owner_of(running, first)
        assert found is not None
        assert (found[0].broker, found[0].assigned_by) == ("second", "first")
        resumed = await TestProducer(running.world, second, TOPIC, name="q").opened()
        await resumed.send(b"after")
        assert (await owner_of(running, first) or found)[0] == OwnerRecord(
            broker="second", endpoint=str(second.endpoint)
        )
        log: Any = second.topics[TOPIC].log
        assert log._managed_ledger.recovered_ledgers == 0, "it was closed in order"
        assert not first.topics
        for number in range(8):
            name = TopicName.parse(f"persistent://public/default/n{number}")
            assert (await first.topic_manager.find_owner(name)).name == "second"
        await first.topic_manager.end_drain()


async def test_a_close_on_pulsars_protocol_has_the_address_of_the_next_broker(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        first, second = await two(running, pulsar_listen=Endpoint("127.0.0.1", 0))
        assert first._pulsar is not None
        raw = await Raw.connected(running.world, first._pulsar.endpoint)
        await raw.open_producer(topic=TOPIC)
        await raw.subscribe(2, topic=TOPIC)
        assert await first.topic_manager.drain() == 0
        for command in ("close_producer", "close_consumer"):
            told = await raw.next(command)
            assert [told.assignedBrokerServiceUrl] == list(second.pulsar_urls[""])
            assert not told.assignedBrokerServiceUrlTls


async def test_a_program_publishes_and_consumes_over_moves_without_an_error_and_in_order(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        brokers = await two(running)
        client = magnetar.Client(f"magnetar://{brokers[1].endpoint}")
        gaps: list[float] = []
        received: list[bytes] = []

        async def consume() -> None:
            while not received or received[-1] != b"end":
                message = await consumer.receive()
                received.append(message.data())
                await consumer.acknowledge(message)

        try:
            consumer = await client.subscribe(TOPIC, "s")
            producer = await client.create_producer(TOPIC)
            consuming = asyncio.create_task(consume())
            sent, last, moves = 0, time.monotonic(), 0
            end_s = time.monotonic() + 3
            moving: asyncio.Task[int] | None = None
            while time.monotonic() < end_s:
                await producer.send(b"%d" % sent)
                now = time.monotonic()
                gaps.append(now - last)
                last, sent = now, sent + 1
                if sent % 100 == 0 and (moving is None or moving.done()):
                    if moving is not None:
                        assert await moving == 0
                        await brokers[(moves - 1) % 2].topic_manager.end_drain()
                    moving = asyncio.create_task(brokers[moves % 2].topic_manager.drain())
                    moves += 1
            assert moving is not None
            await moving
            await brokers[(moves - 1) % 2].topic_manager.end_drain()
            await producer.send(b"end")
            await consuming
            assert moves >= 2
            once = list(dict.fromkeys(received))  # acks on their way to the former owner are lost: delivered again
            assert once == [b"%d" % number for number in range(sent)] + [b"end"]
            print(f"{moves} moves, {sent} messages, the longest gap {1000 * max(gaps):.0f} ms")
        finally:
            await client.close()


async def vanish(running: Cluster, broker: Broker) -> None:
    """As after kill -9: nobody answers any more, and the session ends by its time-out."""
    number = running.brokers.index(broker)
    assert broker._serving is not None
    await broker._serving.close()
    running.sessions[number].abandon()


STEPS = ("owned no more", "topics closed", "committed")


@pytest.mark.parametrize("who", ["first", "second", "both"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_move_that_a_kill_interrupts_leaves_a_bundle_that_can_be_taken(
    tmp_path: Path, who: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        first, second = await two(running)
        third = await running.add_broker(name="third", share_group="all")
        session = first.topic_manager._open()
        ownership = session.ownership
        await third.topic_manager._open().ownership.set_draining(True)  # the heir is the second
        (path,) = ownership.owned_paths
        real_write, real_unload = ownership._write_owner, first.topic_manager._unload

        async def kill(at: str) -> None:
            if at != step:
                return
            for broker in (first, second):
                if who in (broker.name, "both"):
                    await vanish(running, broker)
            if who != "second":
                raise ConnectionLost("this process is dead, and does nothing more")

        async def unload(*args: Any) -> None:
            await kill("owned no more")
            await real_unload(*args)

        async def write(*args: Any) -> bool:
            await kill("topics closed")
            found = await real_write(*args)
            await kill("committed")
            return found

        monkeypatch.setattr(first.topic_manager, "_unload", unload)
        monkeypatch.setattr(ownership, "_write_owner", write)
        with contextlib.suppress(ConnectionLost):
            await first.topic_manager._move(session, path)
        monkeypatch.setattr(first.topic_manager, "_unload", real_unload)
        monkeypatch.setattr(ownership, "_write_owner", real_write)
        await third.topic_manager.end_drain()
        owner = await until_served(running, third)
        assert owner.name in {"first": ("second", "third"), "second": ("first", "third"), "both": ("third",)}[who]
        consumer = await TestConsumer(running.world, owner, TOPIC, initial_position=EARLIEST).ready()
        assert await consumer.receive_payloads(1) == [b"before"]


EARLIEST = 1


async def until_served(running: Cluster, asked: Broker) -> Broker:
    """Asks for the owner and opens the topic there, as a client does, until that works."""
    async with asyncio.timeout(20):
        while True:
            try:
                owner = await asked.topic_manager.find_owner(TopicName.parse(TOPIC))
                broker = next(each for each in running.brokers if each.name == owner.name)
                producer = await TestProducer(running.world, broker, TOPIC, name="again").opened()
            except MagnetarError:
                await asyncio.sleep(0.05)
                continue
            await producer.send(b"again")
            await producer.close()
            return broker
