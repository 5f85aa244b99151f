"""A broker whose metadata session is lost serves on, and in the next session keeps what nobody took in between."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from magnetar.broker import server
from magnetar.broker.cluster.ownership import Ownership
from magnetar.broker.log.topic_log import TopicLog
from magnetar.broker.server import Broker
from magnetar.metadata import paths
from magnetar.metadata.store import MetadataStore
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError, NotOwner, Unavailable, from_wire
from magnetar.proto.names import TopicName
from magnetar.runtime.network import find_rpc
from tests.broker.node.test_failover import EARLIEST, TOPIC, look_up
from tests.support.cluster import SMALL, Cluster, TestConsumer, TestProducer, cluster, payloads_of
from tests.support.steps import stopwatch


class Renewing:
    """A broker whose next session comes when `gate` is open."""

    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.gate = asyncio.Event()
        self.failure: MagnetarError | None = None
        self.attempts = 0
        self.session = running.store.new_session()

    async def start(self, **changes: float | str) -> Broker:
        config = replace(SMALL, name="first", **changes)  # type: ignore[arg-type]
        self.broker = await Broker.start(self.running.world, config, self.session, self._next)
        return self.broker

    async def _next(self) -> MetadataStore:
        if self.failure is not None:
            self.attempts += 1
            raise self.failure
        await self.gate.wait()
        self.session = self.running.store.new_session()
        return self.session

    async def lose(self) -> None:
        self.gate.clear()
        await self.session.close()

    async def until_back(self) -> None:
        """Registered in the next session, and done with its topics."""
        self.gate.set()
        async with asyncio.timeout(20):
            while True:
                node = await self.running.store.new_session().get(paths.broker("first"))
                if node is not None and self.broker._metadata is self.session:
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def one_that_renews(folder: Path, **changes: float | str) -> AsyncIterator[tuple[Cluster, Renewing]]:
    async with cluster(folder, brokers=0) as running:
        renewing = Renewing(running)
        running.brokers.append(await renewing.start(**changes))
        yield running, renewing


async def closed(stream: TestProducer | TestConsumer) -> None:
    with pytest.raises(NotOwner):
        await stream.next("nothing")


async def test_topics_are_served_on_without_a_session_and_kept_with_their_clients(tmp_path: Path) -> None:
    async with one_that_renews(tmp_path) as (running, renewing):
        broker = renewing.broker
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        consumer = await TestConsumer(running.world, broker, TOPIC).ready()
        await producer.send(b"0")
        topic = broker.topics[TOPIC]
        ledger = topic.log.shape.tail_span.ledger_id
        await renewing.lose()
        await producer.send(b"1")
        assert (await look_up(running, broker)).here
        with pytest.raises(Unavailable):  # nothing new is claimed
            await look_up(running, broker, TOPIC + "-2")
        consumer.frame(last_message_id=1)  # nor where the topic ends
        assert from_wire((await consumer.next("done")).error).code == Unavailable.code
        await renewing.until_back()
        await producer.send(b"2")
        found = [(await consumer.receive()).entry for _ in range(3)]
        assert [payloads_of(entry) for entry in found] == [[b"0"], [b"1"], [b"2"]]
        assert broker.topics[TOPIC] is topic
        assert topic.log.shape.tail_span.ledger_id == ledger, "the writer stays"
        other = await running.add_broker()
        assert (await look_up(running, other)).owner == str(broker.endpoint)


async def test_a_topic_that_another_broker_took_meanwhile_is_lost_and_its_clients_told(tmp_path: Path) -> None:
    async with one_that_renews(tmp_path) as (running, renewing):
        producer = await TestProducer(running.world, renewing.broker, TOPIC).opened()
        consumer = await TestConsumer(running.world, renewing.broker, TOPIC).ready()
        await producer.send(b"0")
        await renewing.lose()
        other = await running.add_broker()
        second = await TestProducer(running.world, other, TOPIC, "other").opened()
        await second.send(b"1")
        await renewing.until_back()
        await closed(producer)
        await closed(consumer)
        answer = await look_up(running, renewing.broker)
        assert (answer.owner, answer.here) == (str(other.endpoint), False)
        await second.send(b"2")


async def test_a_topic_that_somebody_had_in_between_is_lost_though_its_bundle_is_free_again(tmp_path: Path) -> None:
    async with one_that_renews(tmp_path) as (running, renewing):
        producer = await TestProducer(running.world, renewing.broker, TOPIC).opened()
        consumer = await TestConsumer(running.world, renewing.broker, TOPIC).ready()
        await producer.send(b"0")
        await renewing.lose()
        other = await running.add_broker()
        await TestProducer(running.world, other, TOPIC, "other").opened()
        await other.close()
        await renewing.until_back()
        await closed(producer)
        await closed(consumer)
        again = await TestProducer(running.world, renewing.broker, TOPIC, "again").opened()
        await again.send(b"1")


async def test_until_its_bundles_are_its_own_again_a_broker_opens_no_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_that_renews(tmp_path) as (running, renewing):
        broker = renewing.broker
        await (await TestProducer(running.world, broker, TOPIC).opened()).send(b"0")
        await broker.topic_manager.unload_topic(TopicName.parse(TOPIC))  # its bundle stays
        reclaiming, go_on = asyncio.Event(), asyncio.Event()
        reclaim = Ownership.reclaim_bundles

        async def held(ownership: Ownership) -> None:
            reclaiming.set()
            await go_on.wait()
            await reclaim(ownership)

        monkeypatch.setattr(Ownership, "reclaim_bundles", held)
        await renewing.lose()
        renewing.gate.set()
        await reclaiming.wait()
        with pytest.raises(Unavailable, match="no metadata session"):
            await broker.topic_manager.load_topic(TopicName.parse(TOPIC))
        assert not broker.topics
        go_on.set()


async def test_without_a_next_session_topics_are_given_up_after_the_grace(tmp_path: Path) -> None:
    async with one_that_renews(tmp_path, session_lost_grace_s=0.2) as (running, renewing):
        producer = await TestProducer(running.world, renewing.broker, TOPIC).opened()
        await producer.send(b"0")
        await renewing.lose()
        await closed(producer)
        assert not renewing.broker.topics
        await renewing.until_back()
        assert TopicName.parse(TOPIC).full not in renewing.broker.topics
        async with asyncio.timeout(20):
            while not renewing.broker.topic_manager.has_session:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        again = await TestProducer(running.world, renewing.broker, TOPIC, "again").opened()
        await again.send(b"1")


async def test_while_no_process_of_the_metadata_runs_nothing_is_given_up_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has a session then. From when there is one that does not answer, the grace counts."""
    monkeypatch.setattr(server, "SESSION_RETRY_S", 0.02)
    async with one_that_renews(tmp_path, session_lost_grace_s=4.0) as (running, renewing):
        producer = await TestProducer(running.world, renewing.broker, TOPIC).opened()
        await producer.send(b"begins the ledger")
        renewing.failure = Unavailable("nobody is there", listens="no")
        await renewing.lose()
        async with asyncio.timeout(60):
            while renewing.attempts < 250:  # noqa: ASYNC110 - over five seconds, more than the grace
                await asyncio.sleep(0.01)
        await producer.send(b"0")
        renewing.failure = Unavailable("no answer", listens="perhaps")
        await closed(producer)


async def test_what_is_loaded_is_opened_without_the_metadata(tmp_path: Path) -> None:
    """Also by new clients with a schema, and by those who ask for its partitions first."""
    async with one_that_renews(tmp_path) as (running, renewing):
        broker, world = renewing.broker, running.world
        channel = world.network.connect(broker.endpoint)
        text = wire.SchemaInfo(type=1)

        async def partitions(topic: str = TOPIC) -> wire.PartitionsReply:
            reply: wire.PartitionsReply = await channel.call(
                find_rpc("Broker", "Partitions"), wire.PartitionsRequest(topic=topic, create=True), timeout_s=20
            )
            return reply

        assert (await partitions()).owner.here
        producer = await TestProducer(world, broker, TOPIC, "first", schema=text).opened()
        await producer.send(b"begins the ledger")
        await TestConsumer(world, broker, TOPIC).ready()
        await renewing.lose()
        assert (await partitions()).owner.here
        second = await TestProducer(world, broker, TOPIC, "second", schema=text).opened()
        await producer.send(b"0")
        await second.send(b"1")
        with pytest.raises(Unavailable):
            await partitions(TOPIC + "x")
        await channel.close()


@pytest.mark.parametrize("grace_s", [30.0, 0.1])
async def test_a_fault_between_a_new_session_and_its_use_leaves_no_broker_without_one(
    tmp_path: Path, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its topics are still served, or were given up. The next run begins with the session that is lost."""
    async with one_that_renews(tmp_path, session_lost_grace_s=grace_s) as (running, renewing):
        broker = renewing.broker
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        await producer.send(b"0")
        await renewing.lose()
        if grace_s < 1.0:
            await closed(producer)
        honest, given = Ownership.register_broker, []

        async def fails_once(self: Ownership) -> None:
            if not given:
                given.append(renewing.session)
                raise RuntimeError("a fault of ours")
            await honest(self)

        monkeypatch.setattr(Ownership, "register_broker", fails_once)
        await renewing.until_back()
        assert given
        assert given[0] is not broker._metadata
        async with asyncio.timeout(30):
            await given[0].wait_session_lost()  # it was given back
        again = await TestProducer(running.world, broker, TOPIC, "again").opened()
        await again.send(b"1")


@pytest.mark.parametrize("name", ["broker-session", "broker-upkeep", "broker-orphans", "broker-policies"])
async def test_a_task_of_a_broker_that_is_killed_begins_again_and_is_shown(tmp_path: Path, name: str) -> None:
    async with one_that_renews(tmp_path) as (running, renewing):
        broker = renewing.broker
        supervisors = (broker.background, broker._sessions, broker.topic_manager.policies._background)
        kept, owner = next((kept, each) for each in supervisors for kept in each._kept if kept.name == name)
        first = kept._task
        assert first is not None
        first.cancel()
        async with asyncio.timeout(20):
            while kept._task is first or kept._task is None:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert not kept._task.done()
        assert owner.statistics()["background_restarts"] == 1
        assert list(owner.failure_reasons) == [name]
        await renewing.lose()
        await renewing.until_back()
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        await producer.send(b"0")


@pytest.mark.parametrize("returns", [True, False])
async def test_a_drain_goes_on_in_the_next_session_and_ends_soon_without_one(
    tmp_path: Path, returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is lost in the middle of the drain that SIGTERM begins."""
    async with one_that_renews(tmp_path, share_group="all", drain_timeout_s=60.0 if returns else 1.0) as found:
        running, renewing = found
        producer = await TestProducer(running.world, renewing.broker, TOPIC).opened()
        await producer.send(b"0")
        await producer.close()
        other = await running.add_broker(name="second", share_group="all")
        close = TopicLog.close

        async def lose_session_and_close(self: TopicLog) -> None:
            monkeypatch.undo()
            await renewing.lose()
            if returns:
                renewing.gate.set()
            await close(self)

        monkeypatch.setattr(TopicLog, "close", lose_session_and_close)
        with stopwatch() as seconds:
            await renewing.broker.close()
        assert seconds() < 9, "a call waits 10 s for a session"
        consumer = await TestConsumer(running.world, other, TOPIC, initial_position=EARLIEST).ready()
        assert payloads_of((await consumer.receive()).entry) == [b"0"]


class Silent:
    """A session that answers nothing from `silence` on."""

    def __init__(self, session: MetadataStore) -> None:
        self._session = session
        self._silence: asyncio.Future[None] | None = None

    def silence(self) -> None:
        self._silence = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)
        if name in ("get", "children", "list_nodes", "revision", "commit", "put", "delete"):
            async def call(*of: Any, **more: Any) -> Any:
                if self._silence is not None:
                    await asyncio.shield(self._silence)
                return await method(*of, **more)

            return call
        return method


async def test_a_broker_stops_in_seconds_while_the_metadata_says_nothing(tmp_path: Path) -> None:
    """However many topics it has: none waits for an answer of its own."""
    async with cluster(tmp_path, brokers=0) as running:
        session = Silent(running.store.new_session())
        config = replace(SMALL, name="first", close_timeout_s=60.0)
        broker = await Broker.start(running.world, config, cast(MetadataStore, session))
        for number in range(3):
            producer = await TestProducer(running.world, broker, f"{TOPIC}{number}").opened()
            await producer.send(b"0")
        session.silence()
        async with asyncio.timeout(30):
            await broker.close()
