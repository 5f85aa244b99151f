"""The store on ZooKeeper when connections break and the server dies or sleeps: on a real one."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata import zookeeper_connection
from magnetar.metadata.session import SessionState, ZookeeperAddress, parse_address
from magnetar.metadata.store import (
    NODE_ABSENT,
    CheckNodeVersion,
    DeleteNode,
    NodeChanged,
    PutNode,
    VersionedValue,
    WatchReset,
    allocate_ids,
    update_node,
)
from magnetar.proto.errors import BackPressure, BadVersion, ConnectionLost, MessageTooLarge, SessionExpired, Unavailable
from magnetar.runtime.process import make_system_world
from tests.metadata.stores import EXPIRING_S, ZookeeperBackend
from tests.support.zookeeper import ZookeeperServer, why_no_zookeeper

if why_no_zookeeper():
    pytest.skip(str(why_no_zookeeper()), allow_module_level=True)

from magnetar.metadata.zookeeper import ZookeeperStore, connect_zookeeper


@pytest.fixture
async def backend() -> AsyncIterator[ZookeeperBackend]:
    """On the server of the whole test run, which lives."""
    backend = ZookeeperBackend()
    yield backend
    await backend.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZookeeperServer]:
    """One that may be killed and stopped; it runs when a test begins."""
    with ZookeeperServer(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@asynccontextmanager
async def _store(server: ZookeeperServer, timeout_s: float = 10.0) -> AsyncIterator[ZookeeperStore]:
    address = parse_address(server.url)
    assert isinstance(address, ZookeeperAddress)
    store = await connect_zookeeper(make_system_world(1), address, timeout_s)
    try:
        yield store
    finally:
        await store.close()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def _attached(store: ZookeeperStore) -> None:
    """Until all of its watches are with the connection of now."""
    await asyncio.sleep(0)  # those that have just begun
    await _until(lambda: all(watch.attached for watch in store._watches._watches.values()))


async def _dropped(store: ZookeeperStore) -> None:
    """A connection breaks, and the next is there."""
    connection = store._watches._connection
    store._line.reconnect()
    await _until(lambda: store._watches._connection > connection and store.state is SessionState.CONNECTED)


# ------------------------------------------------------------------------------------------ connections
async def test_nothing_is_lost_or_done_twice_while_connections_break(backend: ZookeeperBackend) -> None:
    stores = [await backend.store() for _ in range(3)]
    rng = random.Random(1)
    taken: list[int] = []

    async def work(store: ZookeeperStore) -> None:
        for i in range(15):
            name = f"{store.session_id}-{i}".encode()

            def join(current: VersionedValue | None, name: bytes = name) -> bytes | None:
                members = current.value.split() if current else []
                return None if name in members else b" ".join([*members, name])

            taken.extend(await allocate_ids(store, 2))
            await update_node(store, "/members", join)

    async def disturb() -> None:
        while True:
            await _dropped(rng.choice(stores))

    disturbing = asyncio.ensure_future(disturb())
    await asyncio.gather(*[work(store) for store in stores])
    disturbing.cancel()
    assert len(taken) == len(set(taken)) == 90
    members = await stores[0].get("/members")
    assert members is not None
    assert len(members.value.split()) == len(set(members.value.split())) == 45
    assert members.version == 44  # nothing was written twice


async def test_a_session_and_its_ephemerals_outlive_their_connections(backend: ZookeeperBackend) -> None:
    store, other = await backend.store(), await backend.store()
    await store.put("/e", b"", ephemeral=True)
    session = store.session_id
    for _ in range(5):
        await _dropped(store)
        assert await other.get("/e") == await store.get("/e") == VersionedValue(b"", 0)
    assert store.session_id == session


async def test_a_watch_goes_on_after_a_broken_connection_or_says_reset_when_something_changed(
    backend: ZookeeperBackend,
) -> None:
    store, other = await backend.store(), await backend.store()
    await store.commit([PutNode("/w/a", b""), PutNode("/w/b", b""), PutNode("/v", b"")])
    watch = store.watch("/w", await store.revision())
    heard = asyncio.ensure_future(anext(watch))
    await _attached(store)
    await other.put("/v", b"of no concern")
    await _dropped(store)
    await _attached(store)
    await other.put("/w/a", b"")
    assert await heard == NodeChanged("/w/a", 1, await other.revision())
    for operation in (
        PutNode("/w/a", b""),
        DeleteNode("/w/b"),
        PutNode("/w/c/d", b""),
        DeleteNode("/w/c/d"),
        PutNode("/w", b""),
    ):
        heard = asyncio.ensure_future(anext(watch))
        store._line.reconnect()
        await other.commit([operation])  # before the watch can be set again, or it hears it: in no case nothing
        revision = await other.revision()
        news = await heard
        while news.revision < revision if isinstance(news, WatchReset) else news.path != operation.path:
            news = await anext(watch)  # that was of the connection before


async def test_a_watch_does_not_overlook_what_came_and_went_while_nobody_looked(backend: ZookeeperBackend) -> None:
    store, other = await backend.store(), await backend.store()
    for prefix, passing in (("/w", "/w/a/b"), ("/x", "/x"), ("/y/z", "/y/z/a"), ("/", "/n")):
        before = await store.revision()
        await other.put(passing, b"")
        await other.delete(passing)
        assert await anext(store.watch(prefix, before)) == WatchReset(await other.revision())


async def test_two_watches_of_one_store_hear_each_change_once(backend: ZookeeperBackend) -> None:
    store = await backend.store()
    now = await store.revision()
    watches = [store.watch("/", now), store.watch("/w", now), store.watch("/w", now)]
    heard = [asyncio.ensure_future(anext(watch)) for watch in watches]
    await _attached(store)
    await store.put("/w/a", b"")
    first = NodeChanged("/w/a", 0, await store.revision())
    assert await asyncio.gather(*heard) == [first, first, first]
    await watches[2].aclose()  # type: ignore[attr-defined]
    await store.put("/w/a", b"")
    second = NodeChanged("/w/a", 1, await store.revision())
    assert [await anext(watches[0]), await anext(watches[1])] == [second, second]


async def test_a_read_counts_only_on_the_connection_that_its_sync_went_over(backend: ZookeeperBackend) -> None:
    """Kazoo's thread drops the connection and makes another between the sync and the read, which both were queued."""
    store, other = await backend.store(), await backend.store()
    await other.put("/a", b"x")
    client, connection = store._line.client, store._line._connection

    def broken_before(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*arguments: Any) -> Any:
            calls.append(ask)
            if len(calls) == 1:
                before = client._live.is_set(), connection._write_sock
                store._line.reconnect()
                while client._live.is_set() and connection._write_sock is before[1]:
                    time.sleep(0.001)
                assert client._live.wait(10)
            return ask(*arguments)

        return asked

    for name in ("get", "children", "exists"):
        calls: list[Any] = []
        await _until(lambda: store.state is SessionState.CONNECTED)
        real = getattr(store._line, name)
        setattr(store._line, name, broken_before(real))
        assert await store.get("/a") == VersionedValue(b"x", 0) if name == "get" else True
        assert await store.children("/") == ["a"] if name == "children" else True
        assert await store.revision() if name == "exists" else True
        setattr(store._line, name, real)
        assert len(calls) >= 2, f"{name}: what was read without a sync before it on that connection was believed"


async def test_whose_pings_are_lost_knows_it_first_also_while_its_watches_hear_everything(
    server: ZookeeperServer,
) -> None:
    """One way only: what ZooKeeper says arrives, and it is no sign of life that a watch is busy."""
    async with _OneWay(server.port) as relay, _store(server) as other:
        address = parse_address(f"zk://127.0.0.1:{relay.port}/magnetar")
        assert isinstance(address, ZookeeperAddress)
        store = await connect_zookeeper(make_system_world(1), address, EXPIRING_S)
        await store.put("/owner", b"mine", ephemeral=True)
        busy = store.watch("/busy", await store.revision())
        listening = asyncio.ensure_future(_heard(busy))

        async def write() -> None:
            while True:
                await other.put("/busy", b"")
                await asyncio.sleep(0.02)

        writing = asyncio.ensure_future(write())
        await _attached(store)
        watch = other.watch("/owner", await other.revision())
        gone, lost = asyncio.ensure_future(anext(watch)), asyncio.ensure_future(store.wait_session_lost())
        await _attached(other)
        relay.swallow()
        await gone
        assert lost.done()  # also if this process stalled over both: its alarm runs before it hears anything
        writing.cancel()
        assert await listening > 0
        await store.close()
        await asyncio.gather(writing, return_exceptions=True)


async def test_a_session_that_the_server_made_shorter_is_lost_by_the_servers_timeout(server: ZookeeperServer) -> None:
    """Asked for an hour, given ten minutes: the deadline counts from the handshake, with what the server gave."""
    async with _store(server, 3600.0) as store:
        assert store._timeout_s == 600.0
        assert store._deadline <= store._clock.monotonic() + 600.0


async def _heard(watch: AsyncIterator[Any]) -> int:
    count = 0
    with suppress(SessionExpired):
        async for _ in watch:
            count += 1
    return count


class _OneWay:
    """A relay to the server that can swallow what clients say and still tell them what the server says."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._swallows = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> _OneWay:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def swallow(self) -> None:
        self._swallows = True

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._tasks += [
            asyncio.ensure_future(self._pump(reader, back, said=True)),
            asyncio.ensure_future(self._pump(there, writer, said=False)),
        ]

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, said: bool) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if not (said and self._swallows):
                    target.write(data)
        if not (said and self._swallows):
            target.close()


# ------------------------------------------------------------------------------------------ the tree
async def test_a_key_may_have_keys_below_it_whatever_it_is(backend: ZookeeperBackend) -> None:
    store, other = await backend.store(), await backend.store()
    await store.put("/e", b"", ephemeral=True)
    await other.commit([PutNode("/e/x/y", b""), PutNode("/e/x", b"")])
    assert await other.children("/") == ["e"]
    await store.close()
    assert await other.get("/e") is None
    assert [await other.children(path) for path in ("/", "/e", "/e/x")] == [["e"], ["x"], ["y"]]
    await other.delete("/e/x")
    assert await other.children("/e") == ["x"]
    await other.delete("/e/x/y")
    assert (await other.children("/"), await other.children("/e")) == ([], [])


async def test_a_folder_that_goes_while_a_commit_is_under_way_is_made_again(backend: ZookeeperBackend) -> None:
    """ZooKeeper deletes containers when they are empty."""
    store = await backend.store()
    for i in range(20):
        await store.put(f"/a/b/{i}", b"")
        await store.delete(f"/a/b/{i}")
        deleting = [store._line.client.handler.async_result() for _ in range(2)]
        from kazoo.protocol.serialization import Delete as DeleteRequest

        for znode, result in zip(("/a/b", "/a"), deleting, strict=True):
            store._line.client._call(DeleteRequest(backend.address.root + znode, -1), result)
    await store.put("/a/b/c", b"")
    assert await store.children("/a/b") == ["c"]


async def test_a_refusal_stands_on_what_is_and_not_on_what_was_read_first(backend: ZookeeperBackend) -> None:
    store, other = await backend.store(), await backend.store()
    await store.put("/a", b"")
    real, lied = store._found, 0

    async def behind(operations: object, *, fresh: bool) -> object:
        """The connected server has not heard of the last commit."""
        nonlocal lied
        lied += not fresh
        found = await real(operations, fresh=fresh)  # type: ignore[arg-type]
        return found if fresh else dict.fromkeys(found)

    store._found = behind  # type: ignore[assignment, method-assign]
    assert await store.put("/a", b"x", 0) == 1
    assert await store.put("/a", b"y") == 2
    assert await store.commit([CheckNodeVersion("/a", 2), PutNode("/b", b"", NODE_ABSENT)]) == [2, 0]
    with pytest.raises(BadVersion) as refused:
        await store.delete("/a", 1)
    assert refused.value.fields["found"] == "2"
    await store.delete("/a")
    assert await other.get("/a") is None
    assert lied == 5


async def test_what_zookeeper_would_not_take_is_refused_before_it_is_sent(backend: ZookeeperBackend) -> None:
    limited = await connect_zookeeper(make_system_world(1), backend.address._replace(jute_maxbuffer=(1 << 20) - 1))
    with pytest.raises(MessageTooLarge, match="jute"):
        await limited.put("/a", bytes(1 << 20))
    await limited.put("/a", bytes(1_000_000))
    assert limited.state is SessionState.CONNECTED
    await limited.close()


async def test_a_closed_store_leaves_no_thread_behind(backend: ZookeeperBackend) -> None:
    before = threading.active_count()
    stores = [await backend.store() for _ in range(3)]
    for store in stores:
        await store.close()
        store._line._connection._connection_routine.join(30)
    assert threading.active_count() <= before


# ------------------------------------------------------------------------------------------ the server
async def test_a_server_that_is_killed_and_comes_back_costs_nothing_but_time(
    server: ZookeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.metadata.session.CALL_TIMEOUT_S", 60.0)  # Java starts within it
    async with _store(server, 60.0) as store, _store(server, 60.0) as other:
        await store.commit([PutNode("/e", b"", ephemeral=True), PutNode("/stays", b"")])
        watch = other.watch("/stays", await store.revision())
        heard = asyncio.ensure_future(anext(watch))
        await _attached(other)
        server.kill()
        writing = asyncio.ensure_future(update_node(store, "/stays", lambda _: b"written"))
        server.start(wait=False)
        await asyncio.to_thread(server.wait_ready)
        assert await writing == VersionedValue(b"written", 1)
        await _until(lambda: other.state is SessionState.CONNECTED)
        assert await other.get("/e") == VersionedValue(b"", 0)
        news = await heard
        assert isinstance(news, WatchReset) or news == NodeChanged("/stays", 1, news.revision)


async def test_without_a_server_a_call_is_definitely_not_done(
    server: ZookeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _store(server, 60.0) as store:
        server.kill()
        await _until(lambda: store.state is not SessionState.CONNECTED)
        monkeypatch.setattr("magnetar.metadata.session.CALL_TIMEOUT_S", 0.2)
        for call in (store.put("/a", b""), store.children("/a"), store.get("/a"), store.revision()):
            with pytest.raises(Unavailable) as refused:
                await call
            assert refused.value.definite
        server.start()


async def test_who_hears_nothing_for_the_timeout_has_lost_its_session_before_anybody_can_take_over(
    server: ZookeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.metadata.session.CALL_TIMEOUT_S", 60.0)  # the session ends first, not the call
    async with _store(server, EXPIRING_S) as store:
        await store.put("/owner", b"mine", ephemeral=True)
        send = store._line.commit

        async def send_to_a_stopped_server(*transaction: Any) -> int:
            server.pause()
            return await send(*transaction)

        store._line.commit = send_to_a_stopped_server  # type: ignore[method-assign]
        writing = asyncio.ensure_future(store.put("/a", b"x"))
        await store.wait_session_lost()
        with pytest.raises(ConnectionLost) as unknown:
            await writing
        assert not unknown.value.definite
        for call in (store.get("/owner"), store.put("/owner", b"still mine"), anext(store.watch("/", 0))):
            with pytest.raises(SessionExpired):
                await call
        server.resume()
        async with _store(server) as other:
            watch = other.watch("/owner", await other.revision())
            while await other.get("/owner") is not None:
                await anext(watch)
            assert await other.put("/owner", b"another's", NODE_ABSENT, ephemeral=True) == 0
            await other.delete("/owner")


async def test_connecting_to_nobody_and_to_a_stranger_says_so(server: ZookeeperServer, tmp_path: Path) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-nobody\r\n")
        writer.close()

    stranger = await asyncio.start_server(shout, "127.0.0.1", 0)
    port = stranger.sockets[0].getsockname()[1]
    address = parse_address(f"zk://127.0.0.1:{port}/m")
    assert isinstance(address, ZookeeperAddress)
    with pytest.raises(Unavailable, match=str(port)):
        await connect_zookeeper(make_system_world(1), address, 0.5)
    stranger.close()
    await stranger.wait_closed()
    with pytest.raises(Unavailable, match=str(port)):
        await connect_zookeeper(make_system_world(1), address, 0.3)


async def test_a_watch_that_ends_while_too_many_requests_wait_leaves_no_error_for_the_loop(
    backend: ZookeeperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, told = await backend.store(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    line = store._line
    monkeypatch.setattr(zookeeper_connection, "WAITING_REQUESTS_MAX", 0)
    line.unwatch("/nothing")
    gc.collect()
    assert not told
    with pytest.raises(BackPressure):
        await line.get("/")
