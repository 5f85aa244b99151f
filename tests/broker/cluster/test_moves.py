"""A broker gives a bundle to another one: its clients follow at once, and whichever of the two dies at whichever step,
the bundle can be taken and nothing acknowledged is lost."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import magnetar.asyncio as magnetar
from magnetar.admin import AdminClient
from magnetar.broker import server
from magnetar.broker.log import snapshot_ledger
from magnetar.broker.node import topic_manager
from magnetar.broker.server import Broker
from magnetar.broker.topic import topic as topic_module
from magnetar.broker.topic.topic import LAST_ACKS_WAIT_S, Topic
from magnetar.client.connect.attachment import Attachment
from magnetar.metadata import paths
from magnetar.metadata.records import BrokerRecord, OwnerRecord, encode_record
from magnetar.metadata.store import get_record
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    AWAITS_LAST_ACKS,
    ConnectionLost,
    MagnetarError,
    NotAllowed,
    NotFound,
    NotOwner,
    Unavailable,
)
from magnetar.proto.names import TopicName
from magnetar.proto.statistics import BrokerInfo
from magnetar.runtime.network import Endpoint
from tests.broker.node.test_failover import vanish
from tests.broker.pulsar.raw import Raw
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, brokers=0) as running:
        yield running

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
    path = broker.topic_manager._open().ownership.owner_record_path(TopicName.parse(TOPIC), record)
    return await get_record(running.store.new_session(), path, OwnerRecord)


async def test_a_drained_broker_names_the_next_one_to_its_clients_and_gets_nothing_any_more(running: Cluster) -> None:
    first, second = await two(running)
    producer = await TestProducer(running.world, first, TOPIC).opened()
    consumer = await TestConsumer(running.world, first, TOPIC).ready()
    assert await first.topic_manager.drain_broker() == 0
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


async def test_what_arrives_while_a_topic_closes_is_answered_by_a_close_that_names_the_next_owner(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    first, second = await two(running)
    producer = await TestProducer(running.world, first, TOPIC).opened()
    consumer = await TestConsumer(running.world, first, TOPIC, permits=1, initial_position=EARLIEST).ready()
    before = await consumer.receive()
    await producer.send(b"next")
    topic = first.topics[TOPIC]
    log: Any = topic.log
    closed, may_close, real_close = asyncio.Event(), asyncio.Event(), log.close

    async def close() -> None:
        await real_close()
        closed.set()
        await may_close.wait()

    monkeypatch.setattr(log, "close", close)
    draining = asyncio.create_task(first.topic_manager.drain_broker())
    await closed.wait()
    producer.publish(b"too late")
    consumer.permits(1)
    await consumer.ack(before)
    assert await producer.quiet(), "a refusal would have the client wait, and look the topic up"
    assert await consumer.quiet(), "what is delivered now could not be acknowledged in time"
    with pytest.raises(NotOwner) as told:
        topic.check_not_ended()
    assert told.value.fields["owner"] == str(second.endpoint)
    may_close.set()
    assert await draining == 0
    with pytest.raises(NotOwner) as told:
        await producer.next("failed")
    assert told.value.fields["owner"] == str(second.endpoint)
    again = await TestConsumer(running.world, second, TOPIC).ready()
    assert await again.receive_payloads(1) == [b"next"]
    assert await again.quiet(), "what was acknowledged until the cursor was stored is not delivered again"


async def test_acknowledgements_on_their_way_while_a_topic_moves_count(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_module, "LAST_ACKS_WAIT_S", 60.0)  # until the consumer says that it has no more
    first, second = await two(running)
    producer = await TestProducer(running.world, first, TOPIC).opened()
    await producer.send(b"1")
    await producer.send(b"2")
    consumer = await TestConsumer(running.world, first, TOPIC, initial_position=EARLIEST, says_last=True).ready()
    deliveries = [await consumer.receive() for _ in range(3)]
    draining = asyncio.create_task(first.topic_manager.drain_broker())
    with pytest.raises(NotOwner) as told:
        await consumer.next("never")
    assert (told.value.fields["owner"], told.value.fields[AWAITS_LAST_ACKS]) == (str(second.endpoint), "yes")
    consumer.items.clear()
    again = TestConsumer(running.world, second, TOPIC)
    consumer.frame(ack=ack_of(deliveries[0]))
    await asyncio.sleep(LAST_ACKS_WAIT_S / 4)
    consumer.frame(ack=ack_of(deliveries[1]))
    consumer.frame(close=1)
    assert await draining == 0
    await again.ready()
    assert await again.receive_payloads(1) == [b"2"]
    assert await again.quiet()


async def test_what_a_program_acknowledged_is_stored_before_its_consumer_subscribes_at_the_next_owner(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    first, second = await two(running)
    client = magnetar.Client(f"magnetar://{first.endpoint}")
    try:
        consumer = await client.subscribe(
            TOPIC, "s", magnetar.ConsumerType.Shared, initial_position=magnetar.InitialPosition.Earliest
        )
        monkeypatch.setattr(Attachment, "reopen", lambda attachment, after_s: None)
        await consumer.acknowledge(await consumer.receive())
        assert await first.topic_manager.drain_broker() == 0
        other = await TestConsumer(running.world, second, TOPIC, initial_position=EARLIEST).ready()
        assert await other.quiet(), "it is delivered to another consumer of a shared subscription"
    finally:
        await client.close()


@pytest.mark.parametrize("says_last", [True, False], ids=["one that hangs", "of an older client"])
async def test_a_consumer_that_does_not_say_its_last_holds_a_move_up_for_a_moment_at_most(
    monkeypatch: pytest.MonkeyPatch, running: Cluster, *, says_last: bool
) -> None:
    first, _ = await two(running)
    consumer = await TestConsumer(running.world, first, TOPIC, says_last=says_last).ready()
    waits: list[float | None] = []
    real_wait = asyncio.wait

    async def wait(fs: Any, *, timeout: float | None = None, **options: Any) -> Any:
        if timeout == LAST_ACKS_WAIT_S:
            waits.append(timeout)
        return await real_wait(fs, timeout=timeout, **options)

    monkeypatch.setattr(asyncio, "wait", wait)
    assert await first.topic_manager.drain_broker() == 0
    assert len(waits) == int(says_last)
    with pytest.raises(NotOwner) as told:
        await consumer.next("never")
    assert (AWAITS_LAST_ACKS in told.value.fields) is says_last
    await consumer.quiet()
    assert [item.WhichOneof("kind") for item in consumer.items] == ["closed"], "it is told once"


async def test_a_connection_that_breaks_ends_the_wait_for_its_last_acknowledgements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_module, "LAST_ACKS_WAIT_S", 60.0)
    async with cluster(tmp_path, brokers=0) as running:
        first, _ = await two(running)
        consumer = await TestConsumer(running.world, first, TOPIC, says_last=True).ready()
        draining = asyncio.create_task(first.topic_manager.drain_broker())
        with pytest.raises(NotOwner):
            await consumer.next("never")
        await consumer.close()
        async with asyncio.timeout(20):
            assert await draining == 0


def ack_of(delivery: wire.Delivery) -> wire.Ack:
    return wire.Ack(entries=[wire.AckedEntry(ledger_id=delivery.ledger_id, entry_id=delivery.entry_id)])


async def test_who_opens_a_topic_that_moves_meanwhile_is_told_its_next_owner(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    first, second = await two(running)
    await first.topic_manager.unload_topic(TopicName.parse(TOPIC))
    opening, may_open, real_open = asyncio.Event(), asyncio.Event(), Topic.open

    async def wait_and_open(topic: Topic, *create: Any) -> None:
        opening.set()
        await may_open.wait()
        await real_open(topic, *create)

    monkeypatch.setattr(Topic, "open", wait_and_open)
    producer = TestProducer(running.world, first, TOPIC)
    await opening.wait()
    assert await first.topic_manager.drain_broker() == 0
    may_open.set()
    with pytest.raises(NotOwner) as told:
        await producer.opened()
    assert told.value.fields["owner"] == str(second.endpoint)


async def test_a_broker_that_has_stopped_still_names_the_next_owner(running: Cluster) -> None:
    first, second = await two(running)
    name, manager = TopicName.parse(TOPIC), first.topic_manager
    assert await manager.drain_broker() == 0
    await manager.close()  # its streams are open still
    assert (await manager.find_owner(name)).endpoint == str(second.endpoint)
    with pytest.raises(NotOwner) as told:
        await TestProducer(running.world, first, TOPIC).opened()
    assert told.value.fields["owner"] == str(second.endpoint)
    with pytest.raises(Unavailable):
        await manager.find_owner(TopicName.parse("persistent://public/default/other"))


async def test_a_bundle_has_one_owner_at_each_step_of_a_move(monkeypatch: pytest.MonkeyPatch, running: Cluster) -> None:
    first, _ = await two(running)
    ownership = first.topic_manager._open().ownership
    (path,) = ownership.owner_record_paths
    steps: list[tuple[str, bool, str, bool]] = []
    real_write, real_unload = ownership._write_owner, first.topic_manager._unload

    async def note(step: str) -> None:
        found = await owner_of(running, first)
        assert found is not None
        steps.append((step, ownership.is_owned(path), found[0].broker, bool(found[0].assigned_by)))

    async def unload(*args: Any) -> None:
        await note("before the close")
        await real_unload(*args)
        await note("after the close")

    async def write(*args: Any) -> bool:
        written = await real_write(*args)
        await note("after the commit")
        return written

    await note("before the move")
    monkeypatch.setattr(first.topic_manager, "_unload", unload)
    monkeypatch.setattr(ownership, "_write_owner", write)
    assert await first.topic_manager.drain_broker() == 0
    assert steps == [
        ("before the move", True, "first", False), ("before the close", False, "first", False),
        ("after the close", False, "first", False), ("after the commit", False, "second", True),
    ]  # fmt: skip


async def test_drains_that_meet_leave_each_topic_with_one_owner(running: Cluster) -> None:
    first, second = await two(running)
    assert await asyncio.gather(first.topic_manager.drain_broker(), first.topic_manager.drain_broker()) == [0, 0]
    assert await until_served(running, first) is second
    await first.topic_manager.end_drain()
    left = await asyncio.gather(first.topic_manager.drain_broker(), second.topic_manager.drain_broker())
    owner = await until_served(running, second)
    assert sum(left) <= 1, "nobody else may have it: the one that has it keeps it"
    assert sum(TOPIC in broker.topics for broker in (first, second)) == 1
    assert TOPIC in owner.topics
    assert await owner.topic_manager.drain_broker() == 1
    producer = await TestProducer(running.world, owner, TOPIC, name="last").opened()
    await producer.send(b"the last broker serves on")


async def test_a_drain_that_is_ended_half_way_gives_away_what_it_has_begun_with(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    first, second = await two(running)
    real_unload = first.topic_manager._unload

    async def unload(*args: Any) -> None:
        await first.topic_manager.end_drain()
        await real_unload(*args)

    monkeypatch.setattr(first.topic_manager, "_unload", unload)
    assert await first.topic_manager.drain_broker() == 0
    assert await until_served(running, first) is second
    assert first.topic_manager.own_broker_record is not None
    assert not first.topic_manager.own_broker_record.draining
    assert await second.topic_manager.drain_broker() == 0
    assert await until_served(running, second) is first


async def test_a_bundle_counts_until_its_topics_are_closed(monkeypatch: pytest.MonkeyPatch, running: Cluster) -> None:
    first, second = await two(running)
    closing, may, close = asyncio.Event(), asyncio.Event(), first.topics[TOPIC].log.close

    async def slow() -> None:
        closing.set()
        await may.wait()
        await close()

    monkeypatch.setattr(first.topics[TOPIC].log, "close", slow)
    draining = asyncio.create_task(first.topic_manager.drain_broker())
    await closing.wait()
    async with AdminClient(f"magnetar://{second.endpoint}") as admin:
        (found,) = [each for each in await admin.brokers() if each.name == "first"]
        assert (found.draining, found.bundles) == (True, 1), "what `drain --wait` waits for"
        may.set()
        assert await draining == 0
        (found,) = [each for each in await admin.brokers() if each.name == "first"]
        assert found.bundles == 0


async def test_a_drain_stops_where_it_is_when_its_order_is_removed(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    monkeypatch.setattr(server, "ORDERS_CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(topic_manager, "ORDER_CHECK_INTERVAL_S", 0.0)
    first = await running.add_broker(name="first", share_group="all")
    for number in range(30):
        await first.topic_manager.find_owner(TopicName.parse(f"persistent://public/default/n{number}"))
    second = await running.add_broker(name="second", share_group="all")
    ownership, move = first.topic_manager._open().ownership, first.topic_manager._move
    begun, may = asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any) -> None:
        begun.set()
        await may.wait()
        await move(*arguments)

    monkeypatch.setattr(first.topic_manager, "_move", slow)
    owned = len(ownership.owner_record_paths)
    async with AdminClient(f"magnetar://{second.endpoint}") as admin:
        await admin.drain_broker("first")
        await begun.wait()
        await admin.undrain_broker("first")
        may.set()
        async with asyncio.timeout(60):
            while ownership.me.draining:  # noqa: ASYNC110 - the loop that follows orders tells nobody
                await asyncio.sleep(0.02)
    assert len(ownership.owner_record_paths) == owned - topic_manager.BUNDLES_MOVED_AT_ONCE


async def test_the_last_broker_of_a_group_keeps_its_bundles_and_reads_the_brokers_once(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    first = await running.add_broker(name="first", share_group="all")
    for number in range(20):
        await first.topic_manager.find_owner(TopicName.parse(f"persistent://public/default/n{number}"))
    ownership, reads = first.topic_manager._open().ownership, list[str]()
    get = ownership._store.get

    async def counted(path: str) -> Any:
        reads.append(path)
        return await get(path)

    monkeypatch.setattr(ownership._store, "get", counted)
    assert await first.topic_manager.drain_broker() == len(ownership.owner_record_paths) > 1
    assert len(reads) < 5


async def test_bundles_of_a_deleted_namespace_are_owned_by_nobody(running: Cluster) -> None:
    first, second = await two(running)
    async with AdminClient(f"magnetar://{second.endpoint}") as admin:
        owned = [len(each.topic_manager._open().ownership.owner_record_paths) for each in (first, second)]
        await admin.create_namespace("public/short")
        for number in range(8):
            await admin.create_topic(f"public/short/t{number}")
            await first.topic_manager.find_owner(TopicName.parse(f"persistent://public/short/t{number}"))
        more = [len(each.topic_manager._open().ownership.owner_record_paths) for each in (first, second)]
        assert sum(more) > sum(owned)
        await admin.delete_namespace("public/short", force=True)
    assert [len(each.topic_manager._open().ownership.owner_record_paths) for each in (first, second)] == owned


async def test_a_drain_while_outcomes_are_written_leaves_a_snapshot_that_the_next_owner_reads(
    monkeypatch: pytest.MonkeyPatch, running: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = await two(running)
    sent, append = asyncio.Event(), snapshot_ledger.append_and_wait

    async def slow(writer: Any, entries: Any) -> None:
        appended = [writer.append(each) for each in entries]
        sent.set()
        await asyncio.sleep(0.3)
        await appended[-1]

    async with magnetar.Client(f"magnetar://{first.endpoint},{second.endpoint}") as client:
        producer = await client.create_producer(TOPIC)

        async def aborted() -> None:
            txn = await client.transaction()
            await producer.send(b"a", txn=txn)
            await txn.abort()

        await aborted()
        outcomes: Any = first.topics[TOPIC].transactions
        async with asyncio.timeout(60):
            while not outcomes._ledger.writes:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.02)
        monkeypatch.setattr(snapshot_ledger, "append_and_wait", slow)
        await aborted()
        await asyncio.wait_for(sent.wait(), 60)
        monkeypatch.setattr(snapshot_ledger, "append_and_wait", append)
        with caplog.at_level(logging.ERROR):
            assert await first.topic_manager.drain_broker() == 0
            await producer.send(b"after")
    assert not [each for each in caplog.records if "cannot be used" in each.getMessage()]


async def test_a_close_on_pulsars_protocol_has_the_address_of_the_next_broker(running: Cluster) -> None:
    first, second = await two(running, pulsar_listen=Endpoint("127.0.0.1", 0))
    assert first._pulsar is not None
    raw = await Raw.connected(running.world, first._pulsar.endpoint)
    await raw.open_producer(topic=TOPIC)
    await raw.subscribe(2, topic=TOPIC)
    assert await first.topic_manager.drain_broker() == 0
    for command in ("close_consumer", "close_producer"):
        told = await raw.next(command)
        assert [told.assignedBrokerServiceUrl] == list(second.pulsar_urls[""])
        assert not told.assignedBrokerServiceUrlTls


async def test_a_program_publishes_and_consumes_over_moves_without_an_error_and_in_order(running: Cluster) -> None:
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
        while moves < 3 or time.monotonic() < end_s:
            await producer.send(b"%d" % sent)
            now = time.monotonic()
            gaps.append(now - last)
            last, sent = now, sent + 1
            if sent % 100 == 0 and (moving is None or moving.done()):
                if moving is not None:
                    assert await moving == 0
                    await brokers[(moves - 1) % 2].topic_manager.end_drain()
                moving = asyncio.create_task(brokers[moves % 2].topic_manager.drain_broker())
                moves += 1
        assert moving is not None
        await moving
        await brokers[(moves - 1) % 2].topic_manager.end_drain()
        await producer.send(b"end")
        await consuming
        assert moves >= 3
        assert received == [b"%d" % number for number in range(sent)] + [b"end"], "none comes again either"
        print(f"{moves} moves, {sent} messages, the longest gap {1000 * max(gaps):.0f} ms")
    finally:
        await client.close()


async def told_of(running: Cluster, asked: Broker, name: str, wanted: Callable[[BrokerInfo], bool]) -> BrokerInfo:
    """What brokers say of the one of that name, once it is as wanted."""
    async with AdminClient(f"magnetar://{asked.endpoint}") as admin, asyncio.timeout(20):
        while True:
            found = {each.name: each for each in await admin.brokers()}
            if name in found and wanted(found[name]):
                return found[name]
            await asyncio.sleep(0.02)


async def test_an_order_to_drain_holds_over_a_restart_until_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ORDERS_CHECK_INTERVAL_S", 0.05)
    async with cluster(tmp_path, brokers=0) as running:
        first, second = await two(running)
        async with AdminClient(f"magnetar://{second.endpoint}") as admin:
            with pytest.raises(NotFound):
                await admin.drain_broker("third")
            with pytest.raises(NotFound):
                await admin.undrain_broker("third")
            assert not any(each.draining for each in await admin.brokers())
            await admin.drain_broker("first")
            await admin.drain_broker("first")
            left = await told_of(running, second, "first", lambda found: found.draining and not found.bundles)
            assert (left.bundles, left.topics) == (0, 0)
            await (await TestProducer(running.world, second, TOPIC, name="q").opened()).send(b"there")
            await first.close()
            first = await running.add_broker(name="first", share_group="all")
            assert first.topic_manager.own_broker_record is not None
            assert first.topic_manager.own_broker_record.draining, "from its first moment"
            for number in range(8):
                name = TopicName.parse(f"persistent://public/default/n{number}")
                assert (await first.topic_manager.find_owner(name)).name == "second"
            await admin.undrain_broker("first")
            await admin.undrain_broker("first")
            await told_of(running, second, "first", lambda found: not found.draining)
            assert await second.topic_manager.drain_broker() == 0
            assert (await first.topic_manager.find_owner(TopicName.parse(TOPIC))).name == "first"


async def test_a_drain_that_an_older_broker_would_never_end_is_refused_at_once(running: Cluster) -> None:
    first, second = await two(running)
    older = running.store.new_session()
    path = paths.broker("older")
    for record, name, text in (
        (BrokerRecord(name="older", endpoint="h:1", group="all"), "older",
         "broker 'older' (an older version) does not know how to drain: stop it by SIGTERM"),
        (BrokerRecord(name="older", endpoint="h:1", group="all", version="0.0.1"), "second",
         "nothing can be given to the other brokers, 'older' (version 0.0.1): upgrade one of them first"),
    ):  # fmt: skip
        await older.put(path, encode_record(record, path), ephemeral=True)
        async with AdminClient(f"magnetar://{second.endpoint}") as admin:
            with pytest.raises(NotAllowed, match=re.escape(text)):
                await admin.drain_broker(name)
            assert await older.children(paths.DRAINING_BROKERS) == []
            if name == "older":
                await admin.drain_broker("second")  # the first one takes what it has
                await admin.undrain_broker("second")
                await first.close()
    await older.delete(path)
    async with AdminClient(f"magnetar://{second.endpoint}") as admin:
        await admin.drain_broker("second")  # alone: it keeps all, and gets nothing for another group
    await older.close()


async def test_a_broker_with_a_random_name_finds_its_order_again_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ORDERS_CHECK_INTERVAL_S", 0.05)
    async with cluster(tmp_path, brokers=0) as running:
        one = await running.add_broker(share_group="all")
        two = await running.add_broker(share_group="all")
        async with AdminClient(f"magnetar://{two.endpoint}") as admin:
            await admin.drain_broker(one.name)
            await told_of(running, two, one.name, lambda found: found.draining)
            listen = one.endpoint
            await one.close()
            named = await running.add_broker(name="named", share_group="all", listen=listen)
            assert not any(each.draining for each in await admin.brokers()), "one with a name of its own is another"
            await named.close()
            again = await running.add_broker(share_group="all", listen=listen)
            assert again.name != one.name
            await told_of(running, two, again.name, lambda found: found.draining)
            await admin.undrain_broker(again.name)
            await told_of(running, two, again.name, lambda found: not found.draining)


async def test_the_order_for_a_broker_with_a_name_is_no_order_for_who_gets_its_address(running: Cluster) -> None:
    first, second = await two(running)
    async with AdminClient(f"magnetar://{second.endpoint}") as admin:
        await admin.drain_broker("first")
    listen = first.endpoint
    await first.close()
    fresh = await running.add_broker(share_group="all", listen=listen)
    await fresh.topic_manager.apply_drain_order()
    assert fresh.topic_manager.own_broker_record is not None
    assert not fresh.topic_manager.own_broker_record.draining


STEPS = ("owned no more", "topics closed", "committed")


@pytest.mark.parametrize("who", ["first", "second", "both"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_move_that_a_kill_interrupts_leaves_a_bundle_that_can_be_taken(
    who: str, step: str, monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    first, second = await two(running)
    third = await running.add_broker(name="third", share_group="all")
    session = first.topic_manager._open()
    ownership = session.ownership
    await third.topic_manager._open().ownership.store_draining(True)  # the heir is the second
    (path,) = ownership.owner_record_paths
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
