"""The remote store when the network and the service fail: simulated, on virtual time, and once with real restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata.remote import COMMIT_RPC, SESSION_RPC, RemoteStore, connect_metadata
from magnetar.metadata.server import MetadataServer
from magnetar.metadata.session import TIMEOUT_MARGIN_SHARE, SessionState
from magnetar.metadata.sqlite import IN_MEMORY_PATH
from magnetar.metadata.store import NodeChanged, VersionedValue, WatchReset, allocate_ids, update_node
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    InvalidRequest,
    MagnetarError,
    SessionExpired,
    TimedOut,
    Unavailable,
    WrongProtocol,
)
from magnetar.runtime.network import EndOfStream, Endpoint, Stream
from magnetar.runtime.process import make_system_world
from magnetar.runtime.sim.world import Simulation
from tests.metadata.stores import ANYWHERE, EXPIRING_S, SimulatedBackend


async def _read_to_the_end(stream: Stream[Any, Any]) -> None:
    while True:
        await stream.receive()


Scenario = Callable[[SimulatedBackend], Coroutine[Any, Any, None]]


def _simulate(scenario: Scenario, seed: int = 1) -> str:
    simulation = Simulation(seed)
    simulation.run(scenario(SimulatedBackend(simulation)))
    assert not simulation.complaints
    return simulation.trace_hash


pytestmark = pytest.mark.run_by.with_args(_simulate)


def _partition(backend: SimulatedBackend, store: RemoteStore) -> None:
    backend.simulation.wires.partition_nodes(backend.node(store), "metadata")


def _heal(backend: SimulatedBackend, store: RemoteStore) -> None:
    backend.simulation.wires.heal_partition(backend.node(store), "metadata")


def _cut(backend: SimulatedBackend, store: RemoteStore) -> None:
    assert backend.simulation.wires.cut_connections(backend.node(store), "metadata") >= 1


async def test_a_session_and_its_watches_outlive_their_connections(backend: SimulatedBackend, /) -> None:
    store, other = await backend.store(), await backend.store()
    await store.put("/e", b"", ephemeral=True)
    session = store.session_id
    watch = store.watch("/w", await store.revision())
    heard = asyncio.ensure_future(anext(watch))
    for i in range(20):
        _cut(backend, store)
        await other.put("/w", str(i).encode())
        change = await heard
        assert isinstance(change, NodeChanged)
        assert change.version == i  # none is missed, none comes twice
        heard = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(60)
    assert (store.session_id, store.state) == (session, SessionState.CONNECTED)
    assert await other.get("/e") == VersionedValue(b"", 0)
    heard.cancel()


@pytest.mark.parametrize("seed", range(10))
def test_who_is_cut_off_knows_it_before_anybody_can_take_over(seed: int) -> None:
    async def scenario(backend: SimulatedBackend) -> None:
        store, other = await backend.store(), await backend.store()
        await store.put("/owner", b"mine", ephemeral=True)
        watch = other.watch("/owner", await other.revision())
        rng = backend.simulation.random_generator("test")
        await asyncio.sleep(rng.uniform(0, 20))
        _partition(backend, store)
        cut_at = asyncio.get_running_loop().time()
        gone = asyncio.ensure_future(anext(watch))
        lost = asyncio.ensure_future(store.wait_session_lost())
        done, _ = await asyncio.wait([gone, lost], return_when=asyncio.FIRST_COMPLETED)
        assert lost in done
        assert gone not in done
        assert asyncio.get_running_loop().time() - cut_at <= 10.001
        for call in (store.get("/owner"), store.put("/owner", b"still mine")):
            with pytest.raises(SessionExpired):
                await call
        await gone
        assert await other.get("/owner") is None
        assert asyncio.get_running_loop().time() - cut_at <= 11

    _simulate(scenario, seed)


@pytest.mark.parametrize("seed", range(10))
def test_whose_pings_are_lost_knows_it_first_also_while_its_watches_hear_everything(seed: int) -> None:
    """One way only: what the service says arrives, and a reply that is no answer to a ping is no sign of life."""

    async def scenario(backend: SimulatedBackend) -> None:
        store, other, third = await backend.store(), await backend.store(), await backend.store()
        await store.put("/owner", b"mine", ephemeral=True)
        busy = store.watch("/busy", await store.revision())
        heard = 0.0  # when it last was
        loop = asyncio.get_running_loop()

        async def listen() -> None:
            nonlocal heard
            with contextlib.suppress(SessionExpired):
                async for _ in busy:
                    heard = loop.time()

        async def write() -> None:
            while True:
                await third.put("/busy", b"")
                await asyncio.sleep(0.05)

        listening, writing = asyncio.ensure_future(listen()), asyncio.ensure_future(write())
        gone = asyncio.ensure_future(anext(other.watch("/owner", await other.revision())))
        lost = asyncio.ensure_future(store.wait_session_lost())
        await asyncio.sleep(backend.simulation.random_generator("test").uniform(0, 20))
        backend.simulation.wires.partition_nodes(backend.node(store), "metadata", both=False)
        cut_at = loop.time()
        await asyncio.wait([gone, lost], return_when=asyncio.FIRST_COMPLETED)
        assert lost.done()
        assert not gone.done()
        lost_at = loop.time()
        assert heard > cut_at + 1, "the watch was busy until the end"
        with pytest.raises(SessionExpired):
            await store.put("/owner", b"still mine")
        await gone
        assert loop.time() - lost_at >= 10.0 * TIMEOUT_MARGIN_SHARE, "with a margin"
        writing.cancel()
        await listening

    _simulate(scenario, seed)


async def test_who_was_stopped_over_its_deadline_does_not_take_itself_for_an_owner_when_it_wakes_up(
    backend: SimulatedBackend, /
) -> None:
    """Before any timer runs: the first call after the standstill looks at the clock."""
    store = await backend.store()
    await store.put("/owner", b"mine", ephemeral=True)
    store._deadline = store._clock.monotonic()  # what a stopped machine finds
    with pytest.raises(SessionExpired):
        await store.get("/owner")
    assert store.state is SessionState.LOST


async def test_a_short_partition_costs_nothing_but_time(backend: SimulatedBackend, /) -> None:
    store, other = await backend.store(), await backend.store()
    await store.put("/e", b"", ephemeral=True)
    for _ in range(10):
        _partition(backend, store)
        await asyncio.sleep(3.0)
        _heal(backend, store)
        await asyncio.sleep(7.0)
    assert await store.get("/e") == await other.get("/e") == VersionedValue(b"", 0)


async def test_calls_without_a_connection_are_definitely_not_done(backend: SimulatedBackend, /) -> None:
    store = await backend.store(timeout_s=60.0)
    assert backend.server is not None
    backend.simulation.crash("metadata")
    await asyncio.sleep(1.0)
    started = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable) as put:
        await store.put("/a", b"")
    assert put.value.definite
    assert 9.0 <= asyncio.get_running_loop().time() - started <= 11.0
    with pytest.raises(MagnetarError) as get:
        await store.get("/a")
    assert get.value.retryable


async def test_a_commit_whose_answer_does_not_come_is_unknown(backend: SimulatedBackend, /) -> None:
    store, other = await backend.store(timeout_s=60.0), await backend.store()
    backend.simulation.wires.partition_nodes("metadata", backend.node(store), both=False)  # answers stay out
    with pytest.raises(TimedOut) as lost:
        await store.put("/a", b"")
    assert not lost.value.definite
    assert await other.get("/a") == VersionedValue(b"", 0)


def _cuts(seed: int) -> str:
    async def scenario(backend: SimulatedBackend) -> None:
        stores = [await backend.store() for _ in range(3)]
        rng = backend.simulation.random_generator("test")
        taken: list[int] = []

        async def work(store: RemoteStore, name: str) -> None:
            def join(current: VersionedValue | None) -> bytes | None:
                members = current.value.split() if current else []
                return None if name.encode() in members else b" ".join([*members, name.encode()])

            for i in range(15):
                taken.extend(await allocate_ids(store, 2))
                name = f"{store.session_id[:4]}-{i}"
                await update_node(store, "/members", join)

        async def disturb() -> None:
            while True:
                await asyncio.sleep(rng.expovariate(20.0))
                _cut_any(backend, rng.choice(stores))

        disturbing = asyncio.ensure_future(disturb())
        await asyncio.gather(*[work(store, "") for store in stores])
        disturbing.cancel()
        assert len(taken) == len(set(taken)) == 90
        members = await stores[0].get("/members")
        assert members is not None
        names = members.value.split()
        assert len(names) == len(set(names)) == 45  # each joined, and once
        assert members.version == 44  # nothing was written twice

    return _simulate(scenario, seed)


def _cut_any(backend: SimulatedBackend, store: RemoteStore) -> None:
    backend.simulation.wires.cut_connections(backend.node(store), "metadata")


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_or_done_twice_while_connections_break(seed: int) -> None:
    assert _cuts(seed) == _cuts(seed), "the same seed is the same trace"


async def test_a_service_that_comes_back_without_its_sessions_ends_them(backend: SimulatedBackend, /) -> None:
    """Its file is gone (here: it was in memory): nobody may go on as if nothing had happened."""
    store = await backend.store()
    await store.put("/e", b"", ephemeral=True)
    assert backend.server is not None
    endpoint = backend.server.endpoint
    backend.simulation.crash("metadata")
    start = MetadataServer.start(backend.simulation.world("metadata"), endpoint, IN_MEMORY_PATH)
    backend.server = await backend.simulation.spawn("metadata", start)
    await store.wait_session_lost()
    with pytest.raises(SessionExpired):
        await store.get("/e")


async def test_sessions_and_ephemerals_survive_a_restart_of_the_service(tmp_path: Path) -> None:
    world, path = make_system_world(1), str(tmp_path / "metadata.db")
    server = await MetadataServer.start(world, ANYWHERE, path)
    store = await connect_metadata(world, server.endpoint)
    gone = await connect_metadata(world, server.endpoint, EXPIRING_S)
    await store.put("/e", b"", ephemeral=True)
    await gone.put("/gone", b"", ephemeral=True)
    seen = await store.revision()
    watch = store.watch("/", seen)
    heard = asyncio.ensure_future(anext(watch))
    session = store.session_id
    await gone._channel.close()
    assert gone._keeper is not None
    gone._keeper.cancel()
    await server.close()
    server = await MetadataServer.start(world, server.endpoint, path)
    async with asyncio.timeout(60):
        assert await store.put("/a", b"") == 0
        assert store.session_id == session
        assert await heard == NodeChanged("/a", 0, seen + 1)
        assert await store.get("/e") == VersionedValue(b"", 0)
        assert await anext(watch) == NodeChanged("/gone", -1, seen + 2)  # the other session had its whole timeout again
    await store.close()
    await gone.close()
    await server.close()


async def test_connecting_to_nobody_and_to_somebody_else_says_so() -> None:
    world = make_system_world(1)

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-nobody\r\n")
        writer.close()

    listening = await asyncio.start_server(shout, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    with pytest.raises((WrongProtocol, Unavailable)):
        await connect_metadata(world, Endpoint("127.0.0.1", port), 0.5)
    listening.close()
    await listening.wait_closed()
    with pytest.raises(Unavailable, match=str(port)):
        await connect_metadata(world, Endpoint("127.0.0.1", port), 0.3)


async def test_a_session_timeout_out_of_bounds_is_refused_at_once(backend: SimulatedBackend, /) -> None:
    await backend.store()
    started = asyncio.get_running_loop().time()
    with pytest.raises(InvalidRequest):
        await backend.store(timeout_s=1e6)
    assert asyncio.get_running_loop().time() - started < 1.0


async def test_a_watch_with_nothing_to_hear_does_not_fall_behind_the_history(backend: SimulatedBackend, /) -> None:
    store, other = await backend.store(), await backend.store()
    watch = store.watch("/quiet", await store.revision())
    heard = asyncio.ensure_future(anext(watch))
    for _ in range(20):
        await asyncio.gather(*[other.put("/noise", b"") for _ in range(1000)])
    await asyncio.sleep(5)  # a ping
    _cut(backend, store)
    await asyncio.sleep(5)
    await other.put("/quiet/at-last", b"")
    change = await heard
    assert isinstance(change, NodeChanged)
    assert change.path == "/quiet/at-last"


async def test_a_reader_that_leaves_its_watch_lying_gets_one_reset(backend: SimulatedBackend, /) -> None:
    store, other = await backend.store(), await backend.store()
    watch = store.watch("/", await store.revision())
    heard = asyncio.ensure_future(anext(watch))
    for _ in range(13):
        await asyncio.gather(*[other.put("/noise", b"") for _ in range(1000)])
    await asyncio.sleep(1)
    await heard
    reset = await anext(watch)
    assert isinstance(reset, WatchReset)
    news = [await anext(watch) for _ in range(await other.revision() - reset.revision)]
    assert all(isinstance(change, NodeChanged) for change in news)


async def test_a_connection_that_swallows_everything_is_given_up_while_there_is_time(
    backend: SimulatedBackend, /
) -> None:
    """The machine of the service loses power and is back at once; the client's connection is never told."""
    backend.simulation.wires.faults.silence_s = 1000.0
    store = await backend.store()
    assert backend.server is not None
    endpoint = backend.server.endpoint
    backend.simulation.crash("metadata", power_loss=True)
    failed_at = asyncio.get_running_loop().time()
    start = MetadataServer.start(backend.simulation.world("metadata"), endpoint, IN_MEMORY_PATH)
    backend.server = await backend.simulation.spawn("metadata", start)
    await store.wait_session_lost()  # the new service answered, and does not know the session
    assert asyncio.get_running_loop().time() - failed_at < 9.0


async def test_a_second_stream_of_a_session_takes_over_from_the_first(backend: SimulatedBackend, /) -> None:
    store = await backend.store()
    assert backend.server is not None
    channel = backend.simulation.world("another").network.connect(backend.server.endpoint)
    first, second = channel.stream(SESSION_RPC), channel.stream(SESSION_RPC)
    opening = wire.SessionRequest(open=wire.OpenSession(timeout_s=10.0))
    first.send_nowait(opening)
    (opened,) = await first.receive()
    assert opened.opened.timeout_s == 10.0
    opening.open.session = opened.opened.session
    second.send_nowait(opening)
    assert (await second.receive())[0].opened.session == opened.opened.session
    with pytest.raises(EndOfStream):
        await first.receive()
    second.send_nowait(wire.SessionRequest(ping=7))
    assert (await second.receive())[0].pong == 7
    assert store.state is SessionState.CONNECTED


async def test_a_stream_that_breaks_the_protocol_is_refused_and_the_service_lives(backend: SimulatedBackend, /) -> None:
    store = await backend.store()
    assert backend.server is not None
    channel = backend.simulation.world("another").network.connect(backend.server.endpoint)
    opening = wire.SessionRequest(open=wire.OpenSession(timeout_s=10.0))
    watch = wire.SessionRequest(watch=wire.WatchRequest(watch_id=1, prefix="/"))
    bad = wire.SessionRequest(watch=wire.WatchRequest(watch_id=2, prefix="no path"))
    for requests in ([watch], [opening, opening], [opening, watch, watch], [opening, bad], [wire.SessionRequest()]):
        stream = channel.stream(SESSION_RPC)
        for request in requests:
            stream.send_nowait(request)
        with pytest.raises(InvalidRequest):
            await _read_to_the_end(stream)
    unknown = wire.CommitRequest(operations=[wire.Operation(path="/a", kind=wire.Operation.Kind.ValueType(9))])
    with pytest.raises(InvalidRequest):
        await channel.call(COMMIT_RPC, unknown, timeout_s=5)
    assert await store.children("/") == []


def test_the_last_moment_before_a_deadline_takes_few_attempts() -> None:
    """What is left is then less than the clock can tell apart: a pause of that length would end at the same time."""
    simulation = Simulation(1, steps_max=100_000)

    async def scenario() -> None:
        backend = SimulatedBackend(simulation)
        await backend.store()
        assert backend.server is not None
        for number in range(40):
            node = f"partitioned-{number}"
            simulation.wires.partition_nodes(node, "metadata")
            connecting = connect_metadata(simulation.world(node), backend.server.endpoint, 0.37 + number / 7)
            with pytest.raises(Unavailable):
                await simulation.spawn(node, connecting)

    simulation.run(scenario())
