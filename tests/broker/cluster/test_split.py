"""A namespace whose bundles are doubled while brokers ask for them, move them, and lose their sessions: interleavings
of their calls with at most two switches between them, and some with more; on real stores; then with real brokers and
clients."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from magnetar.admin import AdminClient
from magnetar.asyncio import Client
from magnetar.broker.cluster.bundles_core import (
    BUNDLES_PER_NAMESPACE_MAX,
    CROWDED_CHECKS_MIN,
    SPLIT_REST_S,
    BundleTraffic,
    CrowdedBundle,
    SplitPlanner,
    find_crowded_bundle,
    list_bundle_parts,
    make_bundle_name,
    parse_bundle_name,
)
from magnetar.broker.cluster.ownership import BundlesChanged, Ownership
from magnetar.broker.server import Broker
from magnetar.metadata import paths
from magnetar.metadata.records import BrokerRecord, NamespaceRecord
from magnetar.metadata.store import (
    NODE_ABSENT,
    CheckNodeVersion,
    CommitOperation,
    DeleteNode,
    MetadataStore,
    PutNode,
    VersionedValue,
    get_record,
    put_record,
    update_record,
)
from magnetar.metadata.tree_core import check_version
from magnetar.proto.errors import InvalidRequest, NamespaceNotFound, NotAllowed, Unavailable
from magnetar.proto.names import NamespaceName, TopicName
from magnetar.runtime.clock import SystemClock
from tests.metadata.stores import Backend, conformance
from tests.support.cluster import cluster

NAME = NamespaceName("public", "default")
RECORD = paths.namespace("public", "default")
OLD = NamespaceRecord(bundles=2)
TOPICS = [TopicName.parse(f"persistent://public/default/t{at}") for at in range(6)]


# ------------------------------------------------------------------------------------------------ names
def test_a_name_says_which_bundle_it_is_of_how_many() -> None:
    for bundles in (*range(1, 70), 100, 999, 1024, 4096):
        for number in range(bundles):
            assert parse_bundle_name(make_bundle_name(number, bundles)) == (number, bundles)
    for wrong in ("", "x", "0x00000000", "0x00000000_", "0x80000000_0x00000000", "0x00000001_0x40000000", "1_1"):
        with pytest.raises(ValueError, match=r"bundle|invalid literal"):
            parse_bundle_name(wrong)


def test_the_parts_of_a_bundle_have_its_hashes_and_no_others() -> None:
    for bundles, doubled in ((1, 2), (3, 12), (32, 64), (4, 4)):
        parts = [list_bundle_parts(make_bundle_name(number, bundles), doubled) for number in range(bundles)]
        assert [each for group in parts for each in group] == [make_bundle_name(at, doubled) for at in range(doubled)]
        for name, group in zip((make_bundle_name(at, bundles) for at in range(bundles)), parts, strict=True):
            assert (group[0][:10], group[-1][11:]) == (name[:10], name[11:])
    assert list_bundle_parts(make_bundle_name(0, 4), 2) == list_bundle_parts(make_bundle_name(0, 3), 8) == []


# ------------------------------------------------------------------------------------------------ when it is due
LIMITS = BundleTraffic(100, 1_000, 30_000, 0)


def test_a_bundle_above_a_limit_is_crowded_and_a_topic_with_half_of_it_is_hot() -> None:
    assert find_crowded_bundle("/b", BundleTraffic(100, 1_000, 30_000, 1e12), {}, LIMITS) is None
    many = {f"t{at}": BundleTraffic(1, 1, 350, 10) for at in range(101)}
    found = find_crowded_bundle("/b", BundleTraffic(101, 101, 35_350, 1_010), many, LIMITS)
    assert found == CrowdedBundle("/b", "101 topics, 100 are the most")
    one = {"hot": BundleTraffic(1, 1, 16_000, 0), "other": BundleTraffic(1, 1, 15_000, 0)}
    found = find_crowded_bundle("/b", BundleTraffic(2, 2, 31_000, 0), one, LIMITS)
    assert found == CrowdedBundle("/b", "31,000 messages a second, 30,000 are the most", "hot")
    both = one | {f"t{at}": BundleTraffic(1, 1, 0, 0) for at in range(99)}
    found = find_crowded_bundle("/b", BundleTraffic(101, 101, 31_000, 0), both, LIMITS)
    assert found is not None
    assert found.hot_topic == "", "its topics can be shared"


def test_a_namespace_is_split_when_it_was_crowded_for_three_checks_and_rests_then() -> None:
    planner, crowded, hot = SplitPlanner(), CrowdedBundle("/b", "why"), CrowdedBundle("/c", "why", "topic")
    found = [planner.plan_splits({"x": [hot, crowded], "y": [hot]}, 10.0 * at) for at in range(CROWDED_CHECKS_MIN)]
    assert found == [*[[]] * (CROWDED_CHECKS_MIN - 1), ["x"]]
    rested_s = 10.0 * (CROWDED_CHECKS_MIN - 1) + SPLIT_REST_S
    assert planner.plan_splits({"x": [crowded]}, rested_s - 1) == []
    assert planner.plan_splits({"x": [crowded]}, rested_s) == ["x"]
    planner = SplitPlanner()
    checks: list[dict[str, list[CrowdedBundle]]] = [{"x": [crowded]}] * 2 + [{}] + [{"x": [crowded]}] * 2
    assert not any(planner.plan_splits(now, 10.0 * at) for at, now in enumerate(checks)), "a peak splits nothing"


# ------------------------------------------------------------------------------------------------ the tree
ACTOR: ContextVar[int] = ContextVar("actor", default=-1)


class Tree:
    """Nodes, and the calls that wait until it is their turn."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[bytes, int, object]] = {}  # value, version, session of an ephemeral node
        self.revision = 0
        self.waiting: dict[int, list[asyncio.Future[None]]] = {}

    async def turn(self) -> None:
        if (actor := ACTOR.get()) >= 0:
            future = asyncio.get_running_loop().create_future()
            self.waiting.setdefault(actor, []).append(future)
            await future

    def end_session(self, session: object) -> None:
        self.nodes = {path: node for path, node in self.nodes.items() if node[2] is not session}


class Session(MetadataStore):
    """A session with the tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.key = tree, object()

    async def get(self, path: str) -> VersionedValue | None:
        await self.tree.turn()
        node = self.tree.nodes.get(path)
        return None if node is None else VersionedValue(node[0], node[1])

    async def children(self, path: str) -> list[str]:
        await self.tree.turn()
        below = f"{path}/"
        return sorted({each[len(below) :].split("/")[0] for each in self.tree.nodes if each.startswith(below)})

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        await self.tree.turn()
        nodes = dict(self.tree.nodes)
        self.tree.revision += 1
        for each in operations:
            check_version(each.path, each.expected, nodes[each.path][1] if each.path in nodes else NODE_ABSENT)
            match each:
                case PutNode():
                    key = self.key if each.ephemeral else None
                    nodes[each.path] = each.value, self.tree.revision, key
                case DeleteNode():
                    nodes.pop(each.path, None)
                case CheckNodeVersion():
                    pass
        self.tree.nodes = nodes
        await self.tree.turn()  # the answer comes later
        return [nodes[each.path][1] if each.path in nodes else NODE_ABSENT for each in operations]

    async def put(self, path: str, value: bytes, expected: int = -2, *, ephemeral: bool = False) -> int:
        return (await self.commit([PutNode(path, value, expected, ephemeral)]))[0]

    async def delete(self, path: str, expected: int = -2) -> None:
        await self.commit([DeleteNode(path, expected)])


class Cluster:
    """Three brokers; the first owns both bundles of the namespace."""

    def __init__(self, stores: Sequence[MetadataStore] = ()) -> None:
        """`stores`: three sessions of a real store."""
        self.tree = Tree()
        self.sessions: Sequence[Any] = stores or [Session(self.tree) for _ in range(3)]
        self.brokers = [
            Ownership(session, BrokerRecord(name=name, endpoint=f"{name}:1"), random.Random(1), SystemClock())
            for name, session in zip("abc", self.sessions, strict=True)
        ]

    async def open(self) -> None:
        await put_record(self.sessions[0], RECORD, OLD)
        for each in self.brokers:
            await each.register_broker()
        for topic in TOPICS:
            await self.brokers[0].find_owner(topic, OLD)

    def check(self) -> None:
        """No two brokers have a hash, and no broker has it twice."""
        claimed = list[str]()
        for each in self.brokers:
            for path in [] if each.lost else each.owner_record_paths:
                claimed += list_bundle_parts(path.rpartition("/")[2], 64)
        assert len(set(claimed)) == len(claimed), [each.owner_record_paths for each in self.brokers]

    async def check_end(self, asked: Sequence[int] = range(3)) -> None:
        """When all is quiet the brokers that are asked name one owner, by the old number of bundles and the new."""
        found = await get_record(self.sessions[asked[0]], RECORD, NamespaceRecord)
        assert found is not None
        assert found[0].bundles == 8
        for topic in TOPICS:
            owners = [await self.ask(broker, topic, record) for broker, record in product(asked, (found[0], OLD))]
            names = {each.name for each in owners if each is not None}
            assert len(names) == 1
            assert None not in owners
            owner = self.brokers["abc".index(*names)]
            assert (await self.ask("abc".index(*names), topic, found[0])) is owner.me
            assert owner.is_owned(owner.owner_record_path(topic, found[0]))
        self.check()

    # -------------------------------------------------------------- what happens at the same time
    async def split(self) -> None:
        for times in (1, 2):
            bundles = OLD.bundles << times
            await update_record(
                self.sessions[1],
                RECORD,
                NamespaceRecord,
                lambda _, n=bundles, s=times: NamespaceRecord(bundles=n, splits=s),
            )
            if not self.brokers[0].lost:
                await self.brokers[0].divide_bundles(NAME, NamespaceRecord(bundles=bundles, splits=times))

    async def ask(self, broker: int, topic: TopicName, record: NamespaceRecord) -> BrokerRecord | None:
        """Asks as a broker does that knows this record; None if that must be tried again later."""
        for _ in range(3):
            try:
                return await self.brokers[broker].find_owner(topic, record)
            except BundlesChanged:
                found = await get_record(self.sessions[broker], RECORD, NamespaceRecord)
                assert found is not None
                record = found[0]
            except Unavailable:  # its owner is between two sessions
                return None
        return None

    async def ask_by_old_number(self) -> None:
        for topic in TOPICS[:2]:
            await self.ask(2, topic, OLD)

    async def ask_by_new_number(self) -> None:
        found = await get_record(self.sessions[1], RECORD, NamespaceRecord)
        assert found is not None
        await self.ask(1, TOPICS[0], found[0])

    async def move(self) -> None:
        for path in self.brokers[0].owner_record_paths[:1]:
            await self.brokers[0].move_bundle(path, self.brokers[1].me, _nothing)

    async def release(self) -> None:
        for path in self.brokers[0].owner_record_paths[:1]:
            await self.brokers[0].release_bundle(path, _nothing)

    async def lose_session(self) -> None:
        await self.tree.turn()
        broker, session = self.brokers[0], self.sessions[0]
        broker.lost = True
        self.tree.end_session(session.key)
        session.key = object()
        await self.tree.turn()
        await broker.register_broker()
        await broker.reclaim_bundles()
        broker.lost = False


async def _nothing() -> None:
    pass


OTHERS: Mapping[str, tuple[Callable[[Cluster], Awaitable[None]], ...]] = {
    "asked": (Cluster.ask_by_old_number, Cluster.ask_by_new_number),
    "moved": (Cluster.ask_by_old_number, Cluster.move),
    "released": (Cluster.ask_by_old_number, Cluster.release),
    "session lost": (Cluster.ask_by_old_number, Cluster.lose_session),
    "lost and asked": (Cluster.ask_by_new_number, Cluster.lose_session),
}


async def _settle() -> None:
    """Turns the loop until nothing is ready but this."""
    ready: Any = asyncio.get_running_loop()
    for _ in range(8):
        await asyncio.sleep(0)
        if not ready._ready:
            return


async def _run(acting: Sequence[Callable[[Cluster], Awaitable[None]]], choose: Callable[[Sequence[int]], int]) -> int:
    """Runs the actors, one call at a time: `choose` says whose. Returns the number of calls."""
    cluster = Cluster()
    await cluster.open()
    tasks = list[asyncio.Task[Any]]()
    for number, act in enumerate(acting):
        token = ACTOR.set(number)
        tasks.append(asyncio.ensure_future(act(cluster)))
        ACTOR.reset(token)
    steps = 0
    await _settle()
    while able := sorted(actor for actor, calls in cluster.tree.waiting.items() if calls):
        cluster.tree.waiting[choose(able)].pop(0).set_result(None)
        await _settle()
        cluster.check()
        steps += 1
    for each in tasks:
        assert each.done(), "an actor waits for ever"
        each.result()
    await cluster.check_end()
    return steps


def _switch_at(points: Sequence[int], order: Sequence[int]) -> Callable[[Sequence[int]], int]:
    """Each actor goes on until a point is reached, or it can do nothing; then the next one of the order."""
    steps: Iterator[int] = iter(range(10_000))
    current = [0]

    def choose(able: Sequence[int]) -> int:
        if next(steps) in points or order[current[0] % len(order)] not in able:
            current[0] += 1
            while order[current[0] % len(order)] not in able:
                current[0] += 1
        return order[current[0] % len(order)]

    return choose


@pytest.mark.parametrize("others", OTHERS)
async def test_no_topic_has_two_owners_while_its_namespace_is_split_however_calls_interleave(others: str) -> None:
    acting = (Cluster.split, *OTHERS[others])
    for order in ((0, 1, 2), (2, 0, 1)):
        steps = await _run(acting, _switch_at((), order))
        for points in combinations(range(steps), 2):
            if sum(points) % 4 == order[0]:  # some of them by each order
                await _run(acting, _switch_at(points, order))
    for seed in range(60):
        await _run(acting, random.Random(seed).choice)


@conformance
async def test_on_each_store_a_split_under_questions_and_a_move_leaves_each_topic_one_owner(backend: Backend) -> None:
    cluster = Cluster([await backend.store() for _ in range(3)])
    await cluster.open()
    acting = (Cluster.split, Cluster.ask_by_old_number, Cluster.ask_by_new_number, Cluster.move)
    await asyncio.gather(*(act(cluster) for act in acting))
    await cluster.check_end()
    first, second, _ = cluster.sessions
    changes = second.watch(paths.broker("a"), await second.revision())
    cluster.brokers[0].lost = True
    await first.close()
    await anext(changes)  # its session ends a moment later
    await cluster.check_end((1, 2))


# ------------------------------------------------------------------------------------------------ brokers
@asynccontextmanager
async def three_brokers(folder: Path) -> AsyncIterator[tuple[AdminClient, Client, list[Broker]]]:
    """Three brokers of a group, and a namespace with two bundles and six topics."""
    async with cluster(folder, brokers=0) as running:
        brokers = [await running.add_broker(name=name, share_group="all", namespace_bundles=2) for name in "abc"]
        async with (
            AdminClient(f"magnetar://{brokers[0].endpoint}") as admin,
            Client(f"magnetar://{brokers[1].endpoint}") as client,
        ):
            await admin.create_namespace("public/split", bundles=2)
            for at in range(6):
                await admin.create_topic(f"public/split/t{at}")
            yield admin, client, brokers


async def test_clients_notice_nothing_while_their_namespace_is_split_and_its_parts_move(
    tmp_path: Path,
) -> None:
    async with three_brokers(tmp_path) as (admin, client, brokers):
        names = [f"persistent://public/split/t{at}" for at in range(6)]
        consumers = [await client.subscribe(name, "s") for name in names]
        producers = [await client.create_producer(name) for name in names]
        published, stop = [0] * len(names), asyncio.Event()

        async def publish(at: int) -> None:
            while not stop.is_set():
                await producers[at].send(b"%d" % published[at])
                published[at] += 1

        publishing = [asyncio.create_task(publish(at)) for at in range(len(names))]
        loaded = {each: topic for broker in brokers for each, topic in broker.topics.items()}
        assert (await admin.split_bundles("public/split")).bundles == 4
        assert (await admin.split_bundles("public/split", bundles=8)).bundles == 8
        assert (await admin.split_bundles("public/split", bundles=8)).bundles == 8
        kept = {each: topic for broker in brokers for each, topic in broker.topics.items()}
        assert kept == loaded, "no topic was closed or moved"
        parts = [each.bundle for each in (await admin.list_bundles(namespace="public/split")).bundles]
        assert sorted(parts) == [make_bundle_name(at, 8) for at in range(8)]
        moved = 0
        for bundle, target in zip(parts, itertools.cycle("abc")):
            moved += (await admin.unload_namespace("public/split", bundle, destination=target)).bundles
        assert moved > 0
        await asyncio.sleep(0)
        before = list(published)
        while any(now < was + 20 for now, was in zip(published, before, strict=True)):
            done, _ = await asyncio.wait(publishing, timeout=0.05)
            assert not done, done
        stop.set()
        await asyncio.gather(*publishing)
        for consumer, count in zip(consumers, published, strict=True):
            got = list[int]()
            while len(set(got)) < count:
                message = await consumer.receive()
                got.append(int(message.data()))
                await consumer.acknowledge(message)
            first = list(dict.fromkeys(got))
            assert first == list(range(count)), "all came, in order"


async def test_a_split_that_cannot_be_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three_brokers(tmp_path) as (admin, _client, _brokers):
        for wrong in (3, 1, 2 * BUNDLES_PER_NAMESPACE_MAX):
            with pytest.raises(InvalidRequest, match="has 2 bundles"):
                await admin.split_bundles("public/split", bundles=wrong)
        with pytest.raises(NamespaceNotFound):
            await admin.split_bundles("public/none")
        with pytest.raises(InvalidRequest, match="split-bundles"):
            await admin.update_namespace("public/split", bundles=4)
        await admin.split_bundles("public/split")
        await admin.update_namespace("public/split", default_partitions=2)
        assert (await admin.namespace("public/split")).bundles == 4
        monkeypatch.setattr("magnetar.broker.cluster.catalog.may_write_feature", lambda feature: False)
        with pytest.raises(NotAllowed, match="finish-upgrade"):
            await admin.split_bundles("public/split")
