"""The metadata stores under test, each in its own small world; and a store that loses answers."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from magnetar.metadata.remote import RemoteStore, connect_metadata, connect_metadata_at
from magnetar.metadata.server import MetadataServer
from magnetar.metadata.session import EtcdAddress, ZookeeperAddress, parse_address
from magnetar.metadata.sqlite import IN_MEMORY_PATH, LocalSession, SqliteStore
from magnetar.metadata.store import (
    ANY_VERSION,
    CommitOperation,
    DeleteNode,
    MetadataStore,
    NodeChanged,
    PutNode,
    VersionedValue,
    WatchReset,
)
from magnetar.proto.errors import ConnectionLost
from magnetar.proto.etcd_pb2 import CompactionRequest
from magnetar.runtime.network import Endpoint, find_rpc
from magnetar.runtime.process import make_system_world
from magnetar.runtime.sim.world import Simulation
from tests.support.etcd import EtcdCluster, why_no_etcd
from tests.support.zookeeper import ZookeeperServer, why_no_zookeeper

if TYPE_CHECKING:
    from magnetar.metadata.etcd import EtcdStore
    from magnetar.metadata.zookeeper import ZookeeperStore

ANYWHERE = Endpoint("127.0.0.1", 0)
EXPIRING_S = 6.0
"""The timeout, in seconds, of a session that a test lets expire. Until then it survives a machine that stalls for half
of it."""


class Backend(Protocol):
    keeps_history: bool  # a watch may resume at any revision; else at one before which nothing it would hear happened

    async def store(self, timeout_s: float = 10.0) -> MetadataStore: ...
    async def vanish(self, store: MetadataStore) -> None:
        """The store's user dies without a word."""
        ...

    async def lose_history(self, store: MetadataStore) -> None:
        """The store forgets the changes up to the present revision."""
        ...

    async def close(self) -> None: ...


class SqliteBackend:
    keeps_history = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store: SqliteStore | None = None

    async def store(self, timeout_s: float = 10.0) -> MetadataStore:
        if self._store is None:
            self._store = await SqliteStore.open(make_system_world(1), str(self._path / "metadata.db"))
        return self._store.new_session(timeout_s)

    async def vanish(self, store: MetadataStore) -> None:
        assert isinstance(store, LocalSession)
        store.abandon()

    async def lose_history(self, store: MetadataStore) -> None:
        await fill_history(store)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()


class RemoteBackend:
    """Over real gRPC."""

    keeps_history = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._world = make_system_world(1)
        self._server: MetadataServer | None = None
        self._stores: list[RemoteStore] = []

    async def store(self, timeout_s: float = 10.0) -> MetadataStore:
        if self._server is None:
            self._server = await MetadataServer.start(self._world, ANYWHERE, str(self._path / "metadata.db"))
        self._stores.append(await connect_metadata(self._world, self._server.endpoint, timeout_s))
        return self._stores[-1]

    async def vanish(self, store: MetadataStore) -> None:
        """What the kernel does for a killed process: the connection is closed, and nobody says anything."""
        assert isinstance(store, RemoteStore)
        assert store._keeper is not None
        store._keeper.cancel()
        await asyncio.wait([store._keeper])

    async def lose_history(self, store: MetadataStore) -> None:
        await fill_history(store)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
        if self._server is not None:
            await self._server.close()


class SimulatedBackend:
    """The service and each client on a machine of its own, on virtual time."""

    keeps_history = True

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.server: MetadataServer | None = None
        self._nodes: dict[int, str] = {}

    async def store(self, timeout_s: float = 10.0) -> RemoteStore:
        if self.server is None:
            start = MetadataServer.start(self.simulation.world("metadata"), ANYWHERE, IN_MEMORY_PATH)
            self.server = await self.simulation.spawn("metadata", start)
        node = f"client-{len(self._nodes)}"
        connect = connect_metadata(self.simulation.world(node), self.server.endpoint, timeout_s)
        store = await self.simulation.spawn(node, connect)
        self._nodes[id(store)] = node
        return store

    def node(self, store: MetadataStore) -> str:
        return self._nodes[id(store)]

    async def vanish(self, store: MetadataStore) -> None:
        self.simulation.crash(self.node(store))

    async def lose_history(self, store: MetadataStore) -> None:
        await fill_history(store)

    async def close(self) -> None:
        """Nothing: the simulation ends with everything in it."""


class ZookeeperBackend:
    """A tree of its own in the one ZooKeeper server of the test run."""

    keeps_history = False
    _server: ZookeeperServer | None = None
    _trees = 0

    def __init__(self) -> None:
        ZookeeperBackend._trees += 1
        address = parse_address(self.server().url)
        assert isinstance(address, ZookeeperAddress)
        self.address = address._replace(root=f"/trees/{ZookeeperBackend._trees}")
        self._stores: list[ZookeeperStore] = []

    @classmethod
    def server(cls) -> ZookeeperServer:
        if cls._server is None:
            directory = tempfile.TemporaryDirectory(prefix="zookeeper-")
            cls._server = ZookeeperServer(Path(directory.name))
            atexit.register(directory.cleanup)
            atexit.register(cls._server.kill)
        return cls._server

    async def store(self, timeout_s: float = 10.0) -> ZookeeperStore:
        from magnetar.metadata.zookeeper import ZookeeperStore

        store = await connect_metadata_at(make_system_world(1), self.address, timeout_s)
        assert isinstance(store, ZookeeperStore)
        self._stores.append(store)
        return store

    async def vanish(self, store: MetadataStore) -> None:
        """Its connection is closed, nobody says anything, and nobody comes back."""
        store._keeper.cancel()  # type: ignore[attr-defined]
        store._line.disconnect(farewell=False)  # type: ignore[attr-defined]

    async def lose_history(self, store: MetadataStore) -> None:
        await fill_history(store)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


class EtcdBackend:
    """A tree of its own in the one etcd server of the test run."""

    keeps_history = True
    _cluster: EtcdCluster | None = None
    _trees = 0

    def __init__(self) -> None:
        EtcdBackend._trees += 1
        address = parse_address(self.cluster().url)
        assert isinstance(address, EtcdAddress)
        self.address = address._replace(root=f"/trees/{EtcdBackend._trees}")
        self._stores: list[EtcdStore] = []

    @classmethod
    def cluster(cls) -> EtcdCluster:
        if cls._cluster is None:
            directory = tempfile.TemporaryDirectory(prefix="etcd-")
            cls._cluster = EtcdCluster(Path(directory.name))
            atexit.register(directory.cleanup)
            atexit.register(cls._cluster.close)
        return cls._cluster

    async def store(self, timeout_s: float = 10.0) -> EtcdStore:
        from magnetar.metadata.etcd import EtcdStore

        store = await connect_metadata_at(make_system_world(1), self.address, timeout_s)
        assert isinstance(store, EtcdStore)
        self._stores.append(store)
        return store

    async def vanish(self, store: MetadataStore) -> None:
        """Its connection is closed, nobody says anything, and nobody comes back."""
        store._keeper.cancel()  # type: ignore[attr-defined]
        await store._channel.close()  # type: ignore[attr-defined]

    async def lose_history(self, store: MetadataStore) -> None:
        await store._call(  # type: ignore[attr-defined]
            find_rpc("etcdserverpb.KV", "Compact"), CompactionRequest(revision=await store.revision())
        )

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


async def fill_history(store: MetadataStore) -> None:
    """Makes more changes than a store remembers for its watches."""
    for _ in range(10):
        await store.commit([PutNode("/w", b"")] * 1024)


KINDS = ("sqlite", "remote", "simulated", "zookeeper", "etcd")
Scenario = Callable[[Backend], Coroutine[Any, Any, None]]


def conformance(scenario: Scenario) -> Callable[[str, Path], None]:
    """Makes a test of a scenario: it must hold for every store."""

    @pytest.mark.parametrize("kind", KINDS)
    def test(kind: str, tmp_path: Path) -> None:
        if kind == "simulated":
            simulation = Simulation(1)
            simulation.run(_run(scenario, SimulatedBackend(simulation)))
            assert not simulation.complaints
        else:
            asyncio.run(_run(scenario, _backend(kind, tmp_path)))

    test.__name__ = scenario.__name__
    test.__doc__ = scenario.__doc__
    return test


def _backend(kind: str, path: Path) -> Backend:
    if kind == "zookeeper":
        if reason := why_no_zookeeper():
            pytest.skip(reason)
        return ZookeeperBackend()
    if kind == "etcd":
        if reason := why_no_etcd():
            pytest.skip(reason)
        return EtcdBackend()
    return SqliteBackend(path) if kind == "sqlite" else RemoteBackend(path)


async def _run(scenario: Scenario, backend: Backend) -> None:
    try:
        async with asyncio.timeout(60):
            await scenario(backend)
    finally:
        with suppress(ConnectionLost):
            await backend.close()


class Forgetful:
    """A store whose commits lose their answers: `faults` says for each, "applied" (then lost), "dropped" or "ok"."""

    def __init__(self, store: MetadataStore, faults: Sequence[str]) -> None:
        self._store = store
        self._faults = list(faults)
        self.commits = 0

    @property
    def session_id(self) -> str:
        return self._store.session_id

    @property
    def part_operations(self) -> int:
        return self._store.part_operations

    async def get(self, path: str) -> VersionedValue | None:
        return await self._store.get(path)

    async def children(self, path: str) -> list[str]:
        return await self._store.children(path)

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        self.commits += 1
        fault = self._faults.pop(0) if self._faults else "ok"
        if fault == "dropped":
            raise ConnectionLost("dropped on the way there")
        versions = await self._store.commit(operations)
        if fault == "applied":
            raise ConnectionLost("dropped on the way back")
        return versions

    async def put(self, path: str, value: bytes, expected: int = ANY_VERSION, *, ephemeral: bool = False) -> int:
        return (await self.commit([PutNode(path, value, expected, ephemeral)]))[0]

    async def delete(self, path: str, expected: int = ANY_VERSION) -> None:
        await self.commit([DeleteNode(path, expected)])

    async def revision(self) -> int:
        return await self._store.revision()

    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[NodeChanged | WatchReset]:
        return self._store.watch(prefix, after_revision)

    async def wait_session_lost(self) -> None:
        await self._store.wait_session_lost()

    async def close(self) -> None:
        await self._store.close()
