"""What every replica lost is passed over when an operator says so: with real stores, and to the end of the walk."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import magnetar
from magnetar.bookie.store import identity
from magnetar.broker.log.log_shape_core import LedgerSpan
from magnetar.broker.log.managed_ledger import INDEXES_SKIPPED_FOR_LOST
from magnetar.broker.log.reader import TopicLogReader
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.ledger.client import LedgerClient
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import DataLost, InvalidRequest, NotAllowed, Unavailable
from magnetar.proto.names import Position, TopicName
from tests.broker.node.test_failover import until_owned_by, vanish
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)


def _of(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


async def _replace_bookie(running: Cluster) -> str:
    """Another bookie takes the place of the last one, whose data is gone; the id of that one."""
    gone, folder = running.bookies[-1], running.folder / f"bookie-{len(running.bookies) - 1}"
    await running.add_bookie()
    running.bookies.remove(gone)
    await gone.close()
    shutil.rmtree(folder)
    return gone.id


async def _publish(running: Cluster, *numbers: int) -> list[int]:
    producer = await TestProducer(running.world, running.brokers[-1], TOPIC).opened()
    found = [(await producer.send(payload)).index for payload in _of(*numbers)]
    await producer.close()
    return found


def _admin(running: Cluster) -> AdminClient:
    return AdminClient(f"pulsar://{running.brokers[-1].endpoint}")


async def test_a_closed_ledger_that_is_lost_is_passed_over_on_purpose_and_everything_goes_on(running: Cluster) -> None:
    broker, world = running.brokers[0], running.world
    earliest = wire.Subscribe.EARLIEST
    acked = await TestConsumer(world, broker, TOPIC, initial_position=earliest, subscription="half").ready()
    assert await _publish(running, *range(4)) == [0, 1, 2, 3]
    await acked.ack(await acked.receive())
    await acked.leave()
    await broker.topic_manager.unload_topic(NAME)
    (ledger,) = [span.ledger_id for span in (await broker.topic_manager.load_topic(NAME)).log.shape.spans]
    topic = await broker.topic_manager.load_topic(NAME)
    await topic.registry.subscribe("late", topic.log.shape.start_position)
    gone = await _replace_bookie(running)
    assert await _publish(running, 4, 5) == [4, 5]
    broker.topic_manager.cache.discard(ledger)
    admin = _admin(running)

    with pytest.raises(NotAllowed, match="may have them: nothing was passed over"):
        await admin.skip_lost(TOPIC)
    await identity.delete_bookie(running.sessions[-1], gone)
    consumer = await TestConsumer(world, broker, TOPIC, subscription="late").ready()
    with pytest.raises(DataLost, match="skip-lost"):
        await consumer.receive()

    found = await admin.skip_lost(TOPIC)
    (hole,) = found.ranges
    assert (hole.ledger_id, hole.first_entry, hole.last_entry) == (ledger, 0, 3)
    assert (hole.first_index, hole.end_index, hole.forced) == (0, 4, False)
    assert {each.name: each.messages for each in found.subscriptions} == {"half": 3, "late": 4}
    for name in ("half", "late", "new"):
        consumer = await TestConsumer(world, broker, TOPIC, subscription=name, initial_position=earliest).ready()
        assert await consumer.receive_payloads(2) == _of(4, 5)
    assert await _publish(running, 6) == [6]
    assert (await admin.skip_lost(TOPIC)).ranges == (), "nothing is lost any more"
    with pytest.raises(InvalidRequest, match="has no ledger 999"):
        await admin.skip_lost(TOPIC, ledger_id=999)
    await admin.close()


async def test_a_compacted_ledger_that_is_lost_is_given_up_and_the_topic_is_compacted_again(running: Cluster) -> None:
    broker = running.brokers[0]
    manager, admin = broker.topic_manager, _admin(running)
    await _publish(running, 0, 1)
    compaction = (await manager.load_topic(NAME)).compaction

    async def compact() -> int:
        compaction = (await manager.load_topic(NAME)).compaction
        assert compaction.start()
        await compaction.wait_finished()
        assert compaction.record is not None
        return compaction.record.ledger_id

    lost = await compact()
    assert (await admin.skip_lost(TOPIC)).ranges == (), "it is whole"
    await manager.unload_topic(NAME)
    await compaction.ledgers.delete_ledgers(lost)
    with pytest.raises(DataLost, match=f"compacted ledger {lost} is lost .* skip-lost"):
        await manager.load_topic(NAME)

    (given_up,) = (await admin.skip_lost(TOPIC)).ranges
    assert (given_up.ledger_id, given_up.forced) == (lost, False)
    assert await _publish(running, 2) == [2]
    assert await compact() != lost
    assert (await admin.skip_lost(TOPIC)).ranges == ()
    await admin.close()


async def test_a_topic_whose_open_ledger_is_lost_opens_again_and_gives_no_index_twice(running: Cluster) -> None:
    broker, world = running.brokers[0], running.world
    await TestConsumer(world, broker, TOPIC).ready()
    assert await _publish(running, *range(3)) == [0, 1, 2]
    topic = await broker.topic_manager.load_topic(NAME)
    ledger = topic.log.shape.tail_span.ledger_id
    await vanish(running, broker)  # its ledger stays open
    gone = await _replace_bookie(running)
    broker = await running.add_broker()
    await until_owned_by(running, broker)
    admin = _admin(running)
    with pytest.raises(NotAllowed, match="may have what the others lost"):
        await admin.skip_lost(TOPIC)
    await identity.delete_bookie(running.sessions[-1], gone)
    with pytest.raises(DataLost, match="skip-lost"):
        await TestProducer(world, broker, TOPIC).opened()

    found = await admin.skip_lost(TOPIC, ledger_id=ledger)
    (hole,) = found.ranges
    assert (hole.ledger_id, hole.first_entry, hole.last_entry, hole.first_index) == (ledger, 0, -1, 0)
    assert {each.name: each.messages for each in found.subscriptions} == {"s": -1}, "nobody knows"
    for _ in range(2):
        (index,) = await _publish(running, 9)
        assert index >= INDEXES_SKIPPED_FOR_LOST == hole.end_index, "no index is given twice"
        await broker.topic_manager.unload_topic(NAME)
    consumer = await TestConsumer(world, broker, TOPIC).ready()
    assert await consumer.receive_payloads(2) == _of(9, 9)
    record = (await broker.topic_manager.load_topic(NAME)).log.record
    assert [each.ledger_id for each in record.lost] == [ledger], "it is written down"
    assert min(each.ledger_id for each in record.ledgers) > ledger
    await admin.close()


async def test_holes_in_a_ledger_are_passed_over_by_consumers_and_readers_old_and_new(tmp_path: Path) -> None:
    """Entries are striped over two bookies without copies: one of them is lost, and with it each second entry."""
    async with cluster(tmp_path, bookies=2, ensemble_size=2) as running:
        broker, world = running.brokers[0], running.world
        topic = await broker.topic_manager.load_topic(NAME)
        for name in ("acked", "old"):
            await topic.registry.subscribe(name, topic.log.shape.start_position)
        await _publish(running, *range(6))
        acked = await TestConsumer(world, broker, TOPIC, subscription="acked").ready()
        await acked.ack(*[await acked.receive() for _ in range(6)])
        await acked.leave()
        await broker.topic_manager.unload_topic(NAME)
        (span,) = (await broker.topic_manager.load_topic(NAME)).log.shape.spans
        gone = await _replace_bookie(running)
        assert await _publish(running, 6) == [6]
        broker.topic_manager.cache.discard(span.ledger_id)
        await identity.delete_bookie(running.sessions[-1], gone)
        admin = _admin(running)
        found = await admin.skip_lost(TOPIC, ledger_id=span.ledger_id)
        lost = [each.first_entry for each in found.ranges]
        assert lost in ([0, 2, 4], [1, 3, 5])
        assert [(each.last_entry, each.first_index, each.end_index) for each in found.ranges] == [
            (at, at, at + 1) for at in lost
        ], "no more than the lost ones"
        assert {each.name: each.messages for each in found.subscriptions} == {"acked": 0, "old": 3}
        assert (await admin.skip_lost(TOPIC)).ranges == (), "it is known"
        left = _of(*(number for number in range(7) if number not in lost))
        for _ in range(2):
            for name, durable in (("old", True), ("new", True), ("reader", False)):
                consumer = await TestConsumer(
                    world, broker, TOPIC, subscription=name, durable=durable,
                    initial_position=wire.Subscribe.EARLIEST,
                ).ready()  # fmt: skip
                assert await consumer.receive_payloads(len(left)) == left
            await broker.topic_manager.unload_topic(NAME)
        for name in ("old", "new"):
            consumer = await TestConsumer(world, broker, TOPIC, subscription=name).ready()
            await consumer.ack(*[await consumer.receive() for _ in left])
            await consumer.leave()
        topic = await broker.topic_manager.load_topic(NAME)
        await topic.trim_ledgers()
        assert topic.log.shape.find_span_of_ledger(span.ledger_id) is None, "nobody waits for the lost ones"
        await admin.close()


async def test_who_looks_up_what_is_lost_is_told_the_range_and_after_it_was_passed_over_gets_the_next(
    tmp_path: Path,
) -> None:
    """By index and by time, over the wire, from programs and for operators."""
    async with cluster(tmp_path, bookies=2, ensemble_size=2) as running:
        broker = running.brokers[0]
        url = f"magnetar://{broker.endpoint}"
        topic = await broker.topic_manager.load_topic(NAME)
        times = []
        for number in range(6):
            await _publish(running, number)
            times.append((await topic.log.reader.read_entry(topic.log.shape.last_position)).timestamp_ms)
            await asyncio.sleep(0.002)
        await broker.topic_manager.unload_topic(NAME)
        topic = await broker.topic_manager.load_topic(NAME)
        (span,) = topic.log.shape.spans
        gone = await _replace_bookie(running)
        assert await _publish(running, 6) == [6]
        broker.topic_manager.cache.discard(span.ledger_id)
        await identity.delete_bookie(running.sessions[-1], gone)
        first = await _first_lost(topic.log.reader, span)
        lost, kept = range(first, 6, 2), range(1 - first, 6, 2)
        async with aio.Client(url) as client, AdminClient(url) as admin:
            consumer = await client.subscribe(TOPIC, "s")

            def questions(number: int) -> dict[str, Callable[[], Awaitable[object]]]:
                return {
                    "seek": lambda: consumer.seek(times[number]),
                    "reset": lambda: admin.reset_subscription(TOPIC, "s", times[number]),
                    "id": lambda: admin.message_id_by_time(TOPIC, times[number]),
                    "nth": lambda: admin.nth_message(TOPIC, number + 1),
                    "range": lambda: _read(client, number),
                }

            for number in lost:
                asked = questions(number)
                for name, ask in asked.items():
                    with pytest.raises((magnetar.DataLost, DataLost), match="skip-lost") as told:
                        await ask()
                    assert told.value.fields["first"] == told.value.fields["last"] == str(number), name
                    assert told.value.fields["ledger"] == str(span.ledger_id), name
            for number in kept:
                assert (await admin.nth_message(TOPIC, number + 1)).payload == b"%d" % number
                assert await _read(client, number) == [b"%d" % number]

            await consumer.close()
            await admin.skip_lost(TOPIC)
            consumer = await client.subscribe(TOPIC, "s")
            for number in range(6):
                following = min(each for each in (*kept, 6) if each >= number)
                assert (await admin.nth_message(TOPIC, number + 1)).payload == b"%d" % following
                found = await admin.message_id_by_time(TOPIC, times[number])
                assert (found.ledger_id() == span.ledger_id, found.entry_id()) == (
                    (True, following) if following < 6 else (False, 0)
                )
                await consumer.seek(times[number])
                assert (await consumer.receive(20_000)).data() == b"%d" % following
            assert await _read(client, 0, 7) == _of(*kept, 6)


async def _first_lost(reader: TopicLogReader, span: LedgerSpan) -> int:
    for number in range(2):
        try:
            await reader.read_entry(Position(span.ledger_id, number))
        except DataLost:
            return number
    raise AssertionError("nothing is lost")


async def _read(client: aio.Client, first: int, count: int = 1) -> list[bytes | None]:
    return [
        each.payload async for some in client.read_range(TOPIC, first, first + count)
        for entry in some for each in entry.messages()
    ]  # fmt: skip


async def test_by_force_what_a_silent_bookie_may_have_is_given_up_and_that_is_written_down(running: Cluster) -> None:
    broker = running.brokers[0]
    await _publish(running, 0, 1)
    await broker.topic_manager.unload_topic(NAME)
    (span,) = (await broker.topic_manager.load_topic(NAME)).log.shape.spans
    await _replace_bookie(running)
    admin = _admin(running)
    (hole,) = (await admin.skip_lost(TOPIC, force=True)).ranges
    assert (hole.ledger_id, hole.first_entry, hole.last_entry, hole.forced) == (span.ledger_id, 0, 1, True)
    assert await _publish(running, 2) == [2]
    await admin.close()


async def test_by_force_nothing_is_given_up_of_a_ledger_whose_recovery_could_not_begin(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata does not answer for a moment: the ledger's record still says that a broker writes it."""
    await _publish(running, 0, 1)
    await vanish(running, running.brokers[0])  # its ledger stays open
    broker = await running.add_broker()
    await until_owned_by(running, broker)
    admin = _admin(running)

    async def recover(ledgers: LedgerClient, ledger_id: int, *, joined: bool) -> None:
        raise Unavailable(f"ledger {ledger_id}: the session is lost")

    with monkeypatch.context() as patch:
        patch.setattr(LedgerClient, "_recover", recover)
        with pytest.raises(Unavailable, match="try again"):
            await admin.skip_lost(TOPIC, force=True)
    assert (await admin.skip_lost(TOPIC, force=True)).ranges == ()
    assert await _publish(running, 2) == [2]
    consumer = await TestConsumer(
        running.world, broker, TOPIC, durable=False, initial_position=wire.Subscribe.EARLIEST
    ).ready()
    assert await consumer.receive_payloads(3) == _of(0, 1, 2)
    await admin.close()


async def test_what_is_there_is_never_passed_over(running: Cluster) -> None:
    broker, world = running.brokers[0], running.world
    await (await broker.topic_manager.load_topic(NAME)).registry.subscribe(
        "s", (await broker.topic_manager.load_topic(NAME)).log.shape.start_position
    )
    await _publish(running, 0, 1)
    await broker.topic_manager.unload_topic(NAME)
    await _publish(running, 2)
    admin = _admin(running)
    for force in (False, True):
        assert (await admin.skip_lost(TOPIC, force=force)).ranges == ()
    consumer = await TestConsumer(world, broker, TOPIC).ready()
    assert await consumer.receive_payloads(3) == _of(0, 1, 2)
    await admin.close()
