"""Three real etcd servers: one of them dies, stands still or is cut off from the others under load, and a bookie and a
broker outlive that."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import magnetar
from magnetar.cli.common.processes import Processes
from magnetar.metadata.etcd import EtcdStore
from magnetar.metadata.remote import connect_metadata_at
from magnetar.metadata.session import EtcdAddress, SessionState, parse_address
from magnetar.metadata.store import NodeChanged, VersionedValue, WatchReset, update_node
from magnetar.proto.errors import OutcomeUnknown, Unavailable
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import make_system_world
from tests.chaos.processes.nodes import EtcdServers
from tests.chaos.processes.proxy import Link, Mode, Proxy, owner_of
from tests.metadata.stores import EXPIRING_S
from tests.support.children import pids
from tests.support.etcd import EtcdCluster, why_no_etcd
from tests.support.processes import run_here

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(why_no_etcd() is not None, reason=str(why_no_etcd())),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), servers=3) as cluster:
        yield cluster


async def _open(cluster: EtcdCluster, root: str, server: int | None = None, timeout_s: float = 30.0) -> EtcdStore:
    """`server`: the one that the store uses first; None: any."""
    address = parse_address(cluster.url)
    assert isinstance(address, EtcdAddress)
    if server is not None:
        address = address._replace(servers=(address.servers[server],))
    store = await connect_metadata_at(make_system_world(), address._replace(root=root), timeout_s)
    assert isinstance(store, EtcdStore)
    if server is not None:
        store._address = store._address._replace(servers=parse_address(cluster.url).servers)  # type: ignore[union-attr]
        store._number = server
    return store


async def _count(store: EtcdStore, name: str, until: asyncio.Event) -> int:
    """Joins one name after the other to a list, and returns how many. No attempt may be lost or be done twice."""
    number = 0
    while not until.is_set():
        mine = f"{name}-{number} ".encode()

        def join(current: VersionedValue | None, mine: bytes = mine) -> bytes | None:
            before = b"" if current is None else current.value
            return None if mine in before else before + mine

        await update_node(store, f"/list/{name}", join, deadline_s=60.0)
        number += 1
    return number


async def _follow(watch: AsyncIterator[NodeChanged | WatchReset], heard: list[NodeChanged]) -> None:
    """Hears changes until one of /list/end."""
    async for change in watch:
        assert isinstance(change, NodeChanged), "no history is lost"
        if change.path == "/list/end":
            return
        heard.append(change)


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_nothing_is_lost_or_done_twice_while_the_leader_goes(cluster: EtcdCluster, how: str) -> None:
    async def scenario() -> None:
        leader = await asyncio.to_thread(cluster.leader)
        stores = [await _open(cluster, f"/{how}", server) for server in range(3)]
        await stores[0].put("/e", b"", ephemeral=True)
        heard: list[NodeChanged] = []
        watch = stores[leader].watch("/list", await stores[0].revision())
        following = asyncio.ensure_future(_follow(watch, heard))
        until = asyncio.Event()
        counting = [asyncio.ensure_future(_count(store, str(at), until)) for at, store in enumerate(stores)]
        try:
            await _wait_longer(stores[0])
            await asyncio.to_thread(cluster.kill if how == "kill" else cluster.pause, leader)
            for _ in range(3):
                for store in stores:
                    await _wait_longer(store)
        finally:
            if how == "kill":
                cluster.start(leader, wait=False)  # here: it dies with its thread
                await asyncio.to_thread(cluster.wait_ready)
            else:
                cluster.resume(leader)
        until.set()
        counts = await asyncio.gather(*counting)
        versions = {}
        for at, count in enumerate(counts):
            found = await stores[0].get(f"/list/{at}")
            assert found is not None
            assert found.value.split() == [f"{at}-{number}".encode() for number in range(count)]
            assert found.version == count - 1
            versions[f"/list/{at}"] = list(range(count))
        await stores[0].put("/list/end", b"")
        await following
        for path, wanted in versions.items():
            assert [change.version for change in heard if change.path == path] == wanted, "each once and in order"
        assert [store.state for store in stores] == [SessionState.CONNECTED] * 3
        assert await stores[1].get("/e") == VersionedValue(b"", 0), "the lease is kept"
        for store in stores:
            await store.close()

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())


async def _wait_longer(store: EtcdStore) -> None:
    """Waits for another commit of this store's list."""
    begun = await store.revision()
    async for change in store.watch("/list", begun):
        if isinstance(change, NodeChanged):
            return


def _server_of(client: Endpoint, server: Endpoint) -> str:
    """The name of the etcd server that has made this connection; "" if it has closed it meanwhile."""
    found = owner_of(client, server, pids(os.getpid()))
    words = Path(f"/proc/{found}/cmdline").read_bytes().split(b"\0") if found is not None else []
    return words[words.index(b"--name") + 1].decode() if b"--name" in words else ""


@pytest.mark.parametrize("place", ["leader", "follower"])
def test_a_client_of_a_server_that_is_cut_off_reads_nothing_old_and_keeps_its_session(
    place: str, tmp_path: Path
) -> None:
    host = "127.0.0.2"
    with Proxy(_server_of) as proxy:

        def listen(number: int, port: int) -> None:
            proxy.listen(Endpoint(host, port), Endpoint("127.0.0.1", port), f"m{number}")

        with EtcdServers(tmp_path, host, listen) as cluster:
            lonely = (cluster.leader() + (place == "follower")) % 3
            asyncio.run(asyncio.wait_for(_read_where_it_is_cut_off(cluster, proxy, lonely), 120))
            cluster.wait_ready()


async def _read_where_it_is_cut_off(cluster: EtcdCluster, proxy: Proxy, lonely: int) -> None:
    async def cut_off(mode: Mode) -> None:
        for at in {0, 1, 2} - {lonely}:
            for pair in ((f"m{at}", f"m{lonely}"), (f"m{lonely}", f"m{at}")):
                await asyncio.to_thread(proxy.set, *pair, Link(mode))

    async def count(until: int) -> None:
        for number in range(1, until):
            await update_node(other, "/n", lambda current, mine=b"%d" % number: mine, deadline_s=60.0)

    async def read() -> int:
        """What is told at one server, the other one knows."""
        told, found = await other.get("/n"), await mine.get("/n")
        assert told is not None
        assert found is not None
        assert int(found.value) >= int(told.value)
        return int(found.value)

    mine, other = await _open(cluster, "/part", lonely), await _open(cluster, "/part", (lonely + 1) % 3)
    await mine.put("/e", b"", ephemeral=True)
    await other.put("/n", b"0")
    await cut_off(Mode.HOLD)
    counting = asyncio.ensure_future(count(200))
    while await read() < 199:
        pass
    await counting
    await mine.put("/mine", b"")
    assert mine.state is SessionState.CONNECTED
    assert await other.get("/e") == VersionedValue(b"", 0), "its lease is kept"
    await cut_off(Mode.PASS)
    for each in (mine, other):
        await each.close()


def test_who_is_cut_off_has_lost_its_session_before_its_lease_ends(cluster: EtcdCluster) -> None:
    async def scenario() -> None:
        mine, other = await _open(cluster, "/cut", timeout_s=EXPIRING_S), await _open(cluster, "/cut")
        await mine.put("/e", b"", ephemeral=True)
        watch = other.watch("/e", await other.revision())
        gone = asyncio.ensure_future(anext(watch))
        mine._address = mine._address._replace(servers=parse_address("etcd://127.0.0.1:1").servers)  # type: ignore[union-attr]
        await mine._channel.close()
        await mine.wait_session_lost()
        assert not gone.done(), "the client gives up first"
        assert await gone == NodeChanged("/e", -1, await other.revision())
        await mine.close()
        await other.close()

    asyncio.run(scenario())


def test_a_follower_that_stands_still_is_left_and_its_sessions_commits_and_watches_go_on(cluster: EtcdCluster) -> None:
    async def scenario() -> None:
        leader = await asyncio.to_thread(cluster.leader)
        follower = (leader + 1) % 3
        store, other = await _open(cluster, "/follower", follower), await _open(cluster, "/follower", leader)
        await store.put("/e", b"", ephemeral=True)
        watch = store.watch("/n", await store.revision())
        first = asyncio.ensure_future(anext(watch))
        await asyncio.to_thread(cluster.pause, follower)
        try:
            await other.put("/n", b"")
            assert await first == NodeChanged("/n", 0, await other.revision())
            await update_node(store, "/mine", lambda current: b"mine", deadline_s=60.0)
            assert await other.get("/mine") == VersionedValue(b"mine", 0), "once"
            assert await other.get("/e") == VersionedValue(b"", 0)
            assert store.state is SessionState.CONNECTED
        finally:
            cluster.resume(follower)
        await asyncio.to_thread(cluster.wait_ready)
        for each in (store, other):
            await each.close()

    asyncio.run(scenario())


def test_a_broker_and_a_bookie_serve_over_the_death_of_the_leader(cluster: EtcdCluster, started: Processes) -> None:
    where = ("--listen", "127.0.0.1:0", "--metadata", cluster.url + "/whole", "--session-timeout", "10")
    settings = started.directory / "settings.toml"
    settings.write_text("[broker]\nensemble_size = 1\nwrite_quorum = 1\nack_quorum = 1\n")
    bookie = started.start("bookie", "bookie", *where, "--data", str(started.directory / "bookie"))
    broker = started.start("broker", "broker", *where, "--config", str(settings))
    bookie.wait_ready()
    url = broker.wait_ready()
    leader = cluster.leader()
    with magnetar.Client(url) as client:
        producer = client.create_producer("t", send_timeout_millis=60_000)
        for number in range(20):
            producer.send(b"%d" % number)
        cluster.kill(leader)
        try:
            began = time.monotonic()
            for number in range(20, 40):
                producer.send(b"%d" % number)
            client.create_producer("another", send_timeout_millis=60_000).send(b"after")  # a commit of the metadata
            assert time.monotonic() - began < 60
        finally:
            cluster.start(leader)
        consumer = client.subscribe("t", "all", initial_position=magnetar.InitialPosition.Earliest)
        assert [consumer.receive(30_000).data() for _ in range(40)] == [b"%d" % number for number in range(40)]


def test_while_etcd_is_full_topics_are_served_on_and_a_new_one_opens_when_there_is_room(
    tmp_path: Path, started: Processes
) -> None:
    with EtcdCluster(tmp_path / "etcd", arguments=("--quota-backend-bytes", str(8 << 20))) as etcd:
        where = ("--listen", "127.0.0.1:0", "--metadata", etcd.url)
        settings = started.directory / "settings.toml"
        settings.write_text("[broker]\nensemble_size = 1\nwrite_quorum = 1\nack_quorum = 1\n")
        bookie = started.start("bookie", "bookie", *where, "--data", str(started.directory / "bookie"))
        broker = started.start("broker", "broker", *where, "--config", str(settings))
        bookie.wait_ready()
        with magnetar.Client(broker.wait_ready(), operation_timeout_seconds=5) as client:
            producer = client.create_producer("t")
            producer.send(b"begins a ledger")
            consumer = client.subscribe("t", "s")
            revision = asyncio.run(_fill(etcd))
            for number in range(20):
                producer.send(b"%d" % number)
                message = consumer.receive(30_000)
                assert message.data() == b"%d" % number
                consumer.acknowledge(message)
            with pytest.raises(magnetar.PulsarException):
                client.create_producer("another")
            told = run_here("status", "-o", "json", MAGNETAR_URL=broker.wait_ready())
            assert any("alarm NOSPACE" in each["text"] for each in json.loads(told.out)["alarms"]), told.out
            etcd.make_room(revision)
            client.create_producer("another", send_timeout_millis=60_000).send(b"after")
        assert "etcd is full (alarm NOSPACE)" in broker.output()


async def _fill(etcd: EtcdCluster) -> int:
    """Fills etcd by another tree, which it deletes. Returns the revision."""
    address = parse_address(etcd.url)
    assert isinstance(address, EtcdAddress)
    store = await connect_metadata_at(make_system_world(), address._replace(root="/other"), 30.0)
    with contextlib.suppress(Unavailable, OutcomeUnknown):
        while True:
            await store.put("/large", bytes(1 << 20))
    with pytest.raises(Unavailable):
        await store.put("/large", b"")
    await store.delete("/large")
    revision = await store.revision()
    await store.close()
    return revision
