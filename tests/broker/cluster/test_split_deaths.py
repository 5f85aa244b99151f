"""Brokers in a simulation that die at each step of the split of a namespace, and bundles that move at each step of the
recovery of a topic. A step is a call of one broker's to the metadata: the strike falls before it is sent, or after it
is done and before its answer."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from magnetar.admin import AdminClient
from magnetar.asyncio import Client
from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.broker.cluster.bundles_core import find_topic_bundle_name, list_bundle_parts
from magnetar.broker.cluster.ownership import list_bundle_owners
from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.server import Broker
from magnetar.client.model.message_id import MessageId
from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.server import MetadataServer
from magnetar.metadata.sqlite import IN_MEMORY_PATH
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import NamespaceName, TopicName
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.wires import NetworkFaults
from magnetar.runtime.sim.world import Simulation

NAMESPACE = NamespaceName("public", "split")
TOPICS = [f"persistent://public/split/t{at}" for at in range(4)]
SESSION_S = 5.0
STEPS_MAX = 100
CALLS = ("get", "children", "commit", "revision", "list_nodes", "read_nodes")
BROKERS = {"a": 7651, "b": 7652, "c": 7653}


class Strike:
    """What happens at the `at`-th call of a broker's to the metadata after `begin`; `after`: when it is done."""

    def __init__(self, at: int, act: Callable[[], object], *, after: bool) -> None:
        self.at, self.act, self.after = at, act, after
        self.calls = 0
        self.begun = False

    def begin(self) -> None:
        self.begun = True

    async def call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        self.calls += self.begun
        mine = self.begun and self.calls == self.at
        if mine and not self.after:
            self.act()
        answer = await work()
        if mine and self.after:
            self.act()
            await asyncio.sleep(0)  # a dead process takes no step more
        return answer

    def watch(self, store: MetadataStore) -> None:
        for name in CALLS:
            real = getattr(store, name)

            async def call(*arguments: Any, _real: Any = real, **more: Any) -> Any:
                return await self.call(lambda: _real(*arguments, **more))

            setattr(store, name, call)


class Scene:
    """Metadata, a bookie, and three brokers of a group on machines of their own. The metadata is slow by chance."""

    def __init__(self, seed: int) -> None:
        self.simulation = Simulation(seed=seed)
        self.simulation.wires.faults = NetworkFaults(slow_rate=0.2, slow_s=0.3)
        self.brokers: dict[str, Broker] = {}
        self.strikes: dict[str, Strike] = {}
        self.metadata = Endpoint("metadata", 7640)
        self.sent: dict[str, list[bytes]] = {each: [] for each in TOPICS}

    def run(self, body: Callable[["Scene"], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(600):  # virtual seconds
                await self._start()
                await body(self)

        self.simulation.run(main())

    async def _start(self) -> None:
        world = self.simulation.world("metadata")
        await self.simulation.spawn("metadata", MetadataServer.start(world, self.metadata, IN_MEMORY_PATH))
        await self.simulation.spawn("bookie", self._start_bookie())
        for name in BROKERS:
            await self.start_broker(name)
        await self.at_client(self._make_topics())

    async def _start_bookie(self) -> None:
        world = self.simulation.world("bookie")
        await Bookie.start(world, BookieConfig(data="/data"), await self._session(world))

    async def _session(self, world: Any) -> MetadataStore:
        return await connect_metadata(world, self.metadata, SESSION_S)

    async def start_broker(self, name: str) -> None:
        await self.simulation.spawn(name, self._start_broker(name))

    async def _start_broker(self, name: str) -> None:
        world = self.simulation.world(name)
        config = BrokerConfig(
            listen=Endpoint(name, BROKERS[name]), name=name, share_group="all",
            ensemble_size=1, write_quorum=1, ack_quorum=1,
        )  # fmt: skip
        store = await self._session(world)
        if name in self.strikes:
            self.strikes[name].watch(store)
        self.brokers[name] = await Broker.start(world, config, store, lambda: self._session(world))

    def at_client(self, work: Any) -> Any:
        return self.simulation.spawn("client", work)

    def client(self) -> Client:
        return Client(self._url(tuple(BROKERS)), world=self.simulation.world("client"))

    def admin(self, *brokers: str) -> AdminClient:
        return AdminClient(self._url(brokers or tuple(BROKERS)), timeout_s=20.0, world=self.simulation.world("client"))

    @staticmethod
    def _url(brokers: Sequence[str]) -> str:
        return "magnetar://" + ",".join(f"{each}:{BROKERS[each]}" for each in brokers)

    async def _make_topics(self) -> None:
        """The namespace has two bundles: the first two brokers have one each."""
        async with self.admin() as admin:
            await admin.create_namespace(str(NAMESPACE), bundles=2)
            for topic in TOPICS:
                await admin.create_topic(topic)
            for bundle, broker in zip(await self._bundles(2), BROKERS, strict=False):
                await admin.unload_namespace(str(NAMESPACE), bundle, destination=broker)
        await self.publish()

    async def _bundles(self, count: int) -> list[str]:
        return sorted({find_topic_bundle_name(TopicName.parse(each), count) for each in TOPICS})

    async def publish(self) -> None:
        """To each topic. Each is told to be there."""
        async with self.client() as client:
            for topic in TOPICS:
                producer = await client.create_producer(topic)
                for _ in range(3):
                    value = b"%d" % len(self.sent[topic])
                    await producer.send(value)
                    self.sent[topic].append(value)

    async def check(self, *bundles: int) -> None:
        """All that was told to be there is, in order; each topic has one bundle, and each bundle one owner.
        `bundles`: how many there may be."""
        await self.publish()
        async with self.client() as client:
            for topic in TOPICS:
                reader = await client.create_reader(topic, MessageId.earliest)
                got = list[bytes]()
                while await reader.has_message_available():
                    got.append((await reader.read_next()).data())
                assert list(dict.fromkeys(got)) == self.sent[topic], "what was sent again may be there twice"
        async with self.admin(*self.brokers) as admin:
            number = (await admin.namespace(str(NAMESPACE))).bundles
        assert number in bundles
        store = await self._session(self.simulation.world("client"))
        found = await list_bundle_owners(store, NAMESPACE)
        await store.close()
        parts = [part for each in found for part in list_bundle_parts(each, number)]
        assert len(set(parts)) == len(parts), "no range of hashes has two owner records"
        for name, broker in self.brokers.items():
            for path in broker.topic_manager._open().ownership.list_owned_bundle_paths(NAMESPACE):
                assert found[path.rpartition("/")[2]].broker == name, "a broker owns what the metadata says"


async def _again(work: Callable[[], Awaitable[Any]]) -> Any:
    """As an operator does whose command failed."""
    while True:
        try:
            return await work()
        except MagnetarError:
            await asyncio.sleep(1.0)


def _split_with_death(victim: str, at: int, seed: int, *, after: bool) -> bool:
    """False: the split was over before this step."""
    scene = Scene(seed)
    strike = Strike(at, lambda: scene.simulation.crash(victim), after=after)
    scene.strikes[victim] = strike

    async def body(scene: Scene) -> None:
        strike.begin()

        async def split() -> None:
            async with scene.admin("a") as admin:
                await admin.split_bundles(str(NAMESPACE), bundles=4)

        publishing = scene.at_client(scene.publish())
        with contextlib.suppress(MagnetarError):
            await scene.at_client(split())
        await publishing
        if scene.simulation.is_node_running(victim):
            return
        strike.begun = False
        del scene.brokers[victim]
        await scene.at_client(scene.check(2, 4))

        async def split_again() -> None:
            async with scene.admin(*scene.brokers) as admin:
                assert (await _again(lambda: admin.split_bundles(str(NAMESPACE), bundles=4))).bundles == 4

        await scene.at_client(split_again())
        await scene.at_client(scene.check(4))
        await scene.start_broker(victim)
        await scene.at_client(scene.check(4))

    scene.run(body)
    return strike.calls >= at


@pytest.mark.parametrize("victim", ["a", "b"], ids=["who-splits", "who-divides"])
def test_a_broker_that_dies_at_any_step_of_a_split_leaves_topics_with_one_owner_and_all_their_messages(
    victim: str,
) -> None:
    steps = next(at for at in range(1, STEPS_MAX) if not _split_with_death(victim, at, at, after=bool(at % 2)))
    assert steps > (8 if victim == "a" else 3)


def _recover_with_move(at: int, seed: int, *, after: bool) -> bool:
    """The bundles of the first broker are recovered by another after its death, and move on meanwhile."""
    scene = Scene(seed)
    rng = random.Random(seed)
    moved = asyncio.Event()
    strikes = [Strike(at, moved.set, after=after) for _ in "bc"]
    scene.strikes |= dict(zip("bc", strikes, strict=True))

    async def body(scene: Scene) -> None:
        scene.simulation.crash("a")
        del scene.brokers["a"]
        for each in strikes:
            each.begin()
        publishing = scene.at_client(scene.publish())

        async def move() -> None:
            async with scene.admin("b", "c") as admin:
                for topic in TOPICS:
                    with contextlib.suppress(MagnetarError):
                        bundle = find_topic_bundle_name(TopicName.parse(topic), 2)
                        await admin.unload_namespace(str(NAMESPACE), bundle, destination=rng.choice("bc"))

        waiting = asyncio.ensure_future(moved.wait())
        await asyncio.wait([waiting, publishing], return_when=asyncio.FIRST_COMPLETED)
        if moved.is_set():
            await scene.at_client(move())
        waiting.cancel()
        await publishing
        await scene.at_client(scene.check(2))

    scene.run(body)
    return moved.is_set()


def test_a_bundle_that_moves_at_any_step_of_its_topics_recovery_loses_nothing() -> None:
    steps = next(at for at in range(1, STEPS_MAX) if not _recover_with_move(at, at, after=bool(at % 2)))
    assert steps > 10
