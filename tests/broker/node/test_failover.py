"""Two brokers on one cluster: one goes, the other serves its topics, and nothing acknowledged is lost."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.log.topic_log import TopicLog
from magnetar.broker.server import Broker
from magnetar.metadata import paths
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError, NotOwner, OutcomeUnknown, SessionExpired, Unavailable
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import AckedEntry
from magnetar.runtime.network import find_rpc
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster, payloads_of

TOPIC = "persistent://public/default/t"
EARLIEST = wire.Subscribe.EARLIEST


async def look_up(running: Cluster, broker: Broker, topic: str = TOPIC) -> wire.LookupReply:
    channel = running.world.network.connect(broker.endpoint)
    try:
        reply: wire.LookupReply = await channel.call(
            find_rpc("Broker", "Lookup"), wire.LookupRequest(topic=topic), timeout_s=10
        )
        return reply
    finally:
        await channel.close()


async def vanish(running: Cluster, broker: Broker) -> None:
    """As after kill -9: nobody answers any more, and the session ends by its time-out. It still believes in itself."""
    number = running.brokers.index(broker)
    assert broker._serving is not None
    await broker._serving.close()
    running.sessions[number].abandon()


async def until_owned_by(running: Cluster, broker: Broker, topic: str = TOPIC) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                if (await look_up(running, broker, topic)).here:
                    return
            except Unavailable:
                pass
            await asyncio.sleep(0.1)


async def test_every_broker_names_the_same_owner_and_the_others_refuse(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=2) as running:
        first, second = running.brokers
        assert (await look_up(running, first)).here
        answer = await look_up(running, second)
        assert (answer.owner, answer.here) == (str(first.endpoint), False)
        with pytest.raises(NotOwner):
            await TestProducer(running.world, second, TOPIC).opened()
        with pytest.raises(NotOwner):
            await TestConsumer(running.world, second, TOPIC).ready()


async def test_a_broker_that_closes_in_order_hands_its_topics_over_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=2) as running:
        first, second = running.brokers
        producer = await TestProducer(running.world, first, TOPIC).opened()
        consumer = await TestConsumer(running.world, first, TOPIC).ready()
        for number in range(5):
            await producer.send(b"%d" % number)
        deliveries = [await consumer.receive() for _ in range(5)]
        entry = wire.AckedEntry(ledger_id=deliveries[2].ledger_id, entry_id=deliveries[2].entry_id)
        consumer.frame(ack=wire.Ack(kind=wire.Ack.CUMULATIVE, entries=[entry]))
        consumer.frame(last_message_id=1)
        await consumer.next("last")  # the ack before it was taken
        await first.close()
        with pytest.raises(NotOwner):
            await consumer.receive_payloads(1)
        assert (await look_up(running, second)).here
        again = await TestConsumer(running.world, second, TOPIC).ready()
        assert await again.receive_payloads(2) == [b"3", b"4"]
        assert second.topics[TOPIC].log._managed_ledger.recovered_ledgers == 0


async def test_a_killed_broker_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    async with cluster(tmp_path, bookies=3, brokers=2, ensemble_size=3, write_quorum=3, ack_quorum=2) as running:
        first, second = running.brokers
        producer = await TestProducer(running.world, first, TOPIC).opened()
        consumer = await TestConsumer(running.world, first, TOPIC).ready()
        for number in range(200):
            producer.publish(b"%d" % number)
        receipts = [await producer.next("receipt") for _ in range(150)]
        done = [await consumer.receive() for _ in range(40)]
        await consumer.ack(*done[::2])
        await vanish(running, first)
        await until_owned_by(running, second)
        again = await TestConsumer(running.world, second, TOPIC).ready()
        expected = [b"%d" % number for number in range(len(receipts)) if number >= 40 or number % 2]
        found: list[bytes] = []
        while len(found) < len(expected):
            found += payloads_of((await again.receive()).entry)
        assert found == expected
        resumed = await TestProducer(running.world, second, TOPIC).opened()
        receipt = await resumed.send(b"new")
        assert receipt.index >= 150


async def test_a_broker_that_lost_its_session_drops_its_topics_and_its_acks_change_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=2) as running:
        first, second = running.brokers
        producer = await TestProducer(running.world, first, TOPIC).opened()
        consumer = await TestConsumer(running.world, first, TOPIC).ready()
        await producer.send(b"0")
        delivery = await consumer.receive()
        topic = first.topics[TOPIC]
        await running.sessions[0].close()
        with pytest.raises(NotOwner):
            await producer.next("receipt")
        assert not first.topics
        assert (await look_up(running, second)).here
        store = topic.subscriptions["s"].store
        assert store is not None
        store.cursor.ack(topic.log.shape.last_position)
        with pytest.raises(MagnetarError):
            await store.make_acks_durable_future()
        again = await TestConsumer(running.world, second, TOPIC).ready()
        assert (await again.receive()).entry_id == delivery.entry_id
        with pytest.raises(Unavailable):
            await first.topic_manager.load_topic(TopicName.parse(TOPIC))


async def test_a_broker_that_meets_a_fence_stops_the_topic_at_once_and_tells_its_clients(tmp_path: Path) -> None:
    """Its session seems alive to it; the first write that another owner's fence refuses ends everything (M30)."""
    async with cluster(tmp_path, brokers=2) as running:
        first, second = running.brokers
        producer = await TestProducer(running.world, first, TOPIC).opened()
        consumer = await TestConsumer(running.world, first, TOPIC).ready()
        await producer.send(b"0")
        await consumer.receive_payloads(1)
        store = running.store.new_session()
        (bundle,) = await store.children(f"{paths.BUNDLE_OWNERS}/public/default")
        await store.delete(f"{paths.BUNDLE_OWNERS}/public/default/{bundle}")  # what the end of its session does
        await store.close()
        assert (await look_up(running, second)).here
        other = await TestProducer(running.world, second, TOPIC, name="other").opened()
        assert (await other.send(b"1")).index == 1
        assert (await look_up(running, first)).here, "it does not know yet"
        topic = first.topics[TOPIC]
        producer.publish(b"of a former owner")
        with pytest.raises(MagnetarError) as told:
            await producer.next("receipt")
        assert isinstance(told.value, NotOwner | OutcomeUnknown)
        with pytest.raises(NotOwner):
            await consumer.receive()
        assert topic.is_ended
        assert TOPIC not in first.topics
        again = await TestConsumer(running.world, second, TOPIC).ready()
        assert (await again.receive_payloads(2))[-1] == b"1"


async def test_a_broker_that_can_have_another_session_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        sessions = [running.store.new_session()]

        async def another() -> object:
            sessions.append(running.store.new_session())
            return sessions[-1]

        from tests.support.cluster import SMALL

        broker = await Broker.start(running.world, SMALL, sessions[0], another)  # type: ignore[arg-type]
        running.brokers.append(broker)
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        await producer.send(b"0")
        resume, failures = broker.topic_manager.resume_ownership, [Unavailable("the metadata has no room")]

        async def failing(*args: Any) -> None:
            if failures:
                raise failures.pop()
            await resume(*args)

        monkeypatch.setattr(broker.topic_manager, "resume_ownership", failing)
        monkeypatch.setattr("magnetar.broker.server.SESSION_RETRY_S", 0.05)
        await sessions[0].close()
        async with asyncio.timeout(20):
            while len(sessions) < 3 or await running.store.new_session().get(paths.broker(broker.name)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(SessionExpired):
            await sessions[1].revision()
        again = await TestProducer(running.world, broker, TOPIC).opened()
        assert (await again.send(b"1")).index == 1


async def test_an_unloading_whose_caller_is_gone_tells_the_clients_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its consumers stayed at a topic that nobody writes any more, and waited for ever."""
    closing, go_on = asyncio.Event(), asyncio.Event()
    close = TopicLog.close

    async def held(log: TopicLog) -> None:
        closing.set()
        await go_on.wait()
        await close(log)

    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        consumer = await TestConsumer(running.world, broker, TOPIC).ready()
        monkeypatch.setattr(TopicLog, "close", held)
        channel = running.world.network.connect(broker.endpoint)
        unload = channel.call(find_rpc("Admin", "UnloadTopic"), wire.Name(name=TOPIC), timeout_s=10)
        unloading = asyncio.create_task(unload)
        await closing.wait()
        unloading.cancel()
        for _ in range(10):  # the broker has heard of it
            await channel.call(find_rpc("Admin", "ListBrokers"), wire.Empty(), timeout_s=10)
        go_on.set()
        with pytest.raises(NotOwner):
            await consumer.next("nothing")
        await channel.close()


async def test_a_topic_that_does_not_open_and_whose_askers_are_gone_complains_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on = asyncio.Event(), asyncio.Event()

    async def held(log: TopicLog, create: object = None) -> None:
        opening.set()
        await go_on.wait()
        raise Unavailable("no bookie answers")

    complaints: list[dict[str, Any]] = []
    async with cluster(tmp_path) as running:
        owned = running.brokers[0].topic_manager
        monkeypatch.setattr(TopicLog, "open", held)
        asking = asyncio.create_task(owned.load_topic(TopicName.parse(TOPIC)))
        await opening.wait()
        loading = next(iter(owned._loading._running.values()))
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        go_on.set()
        await asyncio.wait([loading])
        del asking, loading
        gc.collect()
    assert complaints == []


async def test_trimming_waits_for_the_persisted_position(tmp_path: Path) -> None:
    async with cluster(tmp_path, roll_entries=2, cursor_flush_s=600.0) as running:
        broker = running.brokers[0]
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        consumer = await TestConsumer(running.world, broker, TOPIC).ready()
        for number in range(6):
            await producer.send(b"%d" % number)
        deliveries = [await consumer.receive() for _ in range(6)]
        topic = broker.topics[TOPIC]
        entries = [AckedEntry(Position(each.ledger_id, each.entry_id), 0) for each in deliveries]
        topic.subscriptions["s"].ack(None, entries)
        assert topic.subscriptions["s"].cursor.mark == topic.log.shape.last_position
        assert await topic.trim_ledgers() == [], "acknowledged in memory only"
        await topic.subscriptions["s"].wait_durable()
        assert len(await topic.trim_ledgers()) >= 2
        assert topic.log.shape.first_index >= 4
        await broker.topic_manager.unload_topic(topic.name)
        again = await TestConsumer(running.world, broker, TOPIC).ready()
        assert await again.quiet()
        reader = await TestConsumer(
            running.world, broker, TOPIC, "r", durable=False, initial_position=EARLIEST
        ).ready()
        await (await TestProducer(running.world, broker, TOPIC).opened()).send(b"end")
        assert (await reader.receive_payloads(1))[-1] in (b"4", b"end")
