"""What callers can hold of a gRPC listener, and what cuts those that hold it and do nothing."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import BackPressure, ConnectionLost, MagnetarError
from magnetar.runtime.access import Caller, CallerAccess, CallerLimits, ListenerAccess, Principal, PrincipalKind
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc.client import connect
from magnetar.runtime.grpc.limits import find_caller_network
from magnetar.runtime.grpc.server import STRANGER_CHECKS, RunningGrpcServer, serve
from magnetar.runtime.network import CallContext, Channel, EndOfStream, Endpoint, find_rpc

HERE = Endpoint("127.0.0.1", 0)
LOOKUP, CONNECT, CLOCK = find_rpc("Broker", "Lookup"), find_rpc("Broker", "Connect"), SystemClock()
class Broker:
    """Its stream answers each frame with `answers` items."""

    def __init__(self, answers: int = 1) -> None:
        self.answers, self.ended = answers, asyncio.Event()

    async def lookup(self, request: Any, context: CallContext) -> wire.LookupReply:
        return wire.LookupReply(owner="here")

    async def connect(self, stream: Any, context: CallContext) -> None:
        try:
            while True:
                for _ in await stream.receive():
                    for _ in range(self.answers):
                        stream.send_nowait(wire.ServerFrame(id=1, delivery=wire.Delivery(entry=bytes(1 << 20))))
        except EndOfStream:
            pass
        finally:
            self.ended.set()


class Slow:
    """A guard that takes its time."""

    async def authenticate(self, caller: Caller) -> Principal:
        await asyncio.sleep(0.5)
        return Principal("ada", PrincipalKind.CLIENT, "token")

    def authorize(self, principal: Principal, path: str) -> None:
        pass

    def lapsed(self, principal: Principal) -> str:
        return ""


class Place:
    def __init__(self) -> None:
        self.ends: list[Any] = []

    async def listen(self, limits: CallerLimits, broker: Broker | None = None, guard: Any = None) -> RunningGrpcServer:
        access = ListenerAccess(guard, limits=limits)
        self.ends.append(await serve(HERE, [("Broker", broker or Broker())], access, CLOCK))
        return self.ends[-1]  # type: ignore[no-any-return]

    def dial(self, serving: RunningGrpcServer) -> Channel:
        self.ends.append(connect(serving.endpoint, CallerAccess()))
        return self.ends[-1]  # type: ignore[no-any-return]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place()
    yield place
    for end in reversed(place.ends):
        await end.close()


async def call(channel: Channel) -> str:
    reply = await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=30)
    return str(reply.owner)


async def test_a_stream_on_which_nothing_comes_is_cut_and_logged(place: Place, caplog: Any) -> None:
    broker = Broker()
    channel = place.dial(await place.listen(CallerLimits(first_frame_s=0.2), broker))
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(ConnectionLost, match=r"sent nothing for 0\.2 s"):
        await channel.stream(CONNECT).receive()
    assert time.monotonic() - begin > 0.15
    assert "a stream of 127.0.0.1:" in caplog.text
    assert await call(channel) == "here"


async def test_a_stream_that_has_begun_may_be_silent(place: Place) -> None:
    channel = place.dial(await place.listen(CallerLimits(first_frame_s=0.1, unread_s=0.1)))
    stream = channel.stream(CONNECT)
    for _ in range(2):
        stream.send_nowait(wire.ClientFrame(id=1))
        assert await stream.receive()
        await asyncio.sleep(0.6)
    stream.cancel()


async def test_a_caller_that_never_reads_is_cut(place: Place, caplog: Any) -> None:
    broker = Broker(answers=40)
    channel = place.dial(await place.listen(CallerLimits(unread_s=0.5), broker))
    stream = channel.stream(CONNECT)
    stream.send_nowait(wire.ClientFrame(id=1))
    async with asyncio.timeout(20):
        await broker.ended.wait()
    assert "took nothing for 0.5 s" in caplog.text
    assert await call(channel) == "here"
    stream.cancel()


async def test_an_address_has_so_many_streams_and_gets_others_when_some_have_ended(place: Place) -> None:
    channel = place.dial(await place.listen(CallerLimits(streams_per_address=3)))
    streams = [channel.stream(CONNECT) for _ in range(3)]
    for stream in streams:
        stream.send_nowait(wire.ClientFrame(id=1))
        await stream.receive()
    with pytest.raises(BackPressure, match="3 streams"):
        await channel.stream(CONNECT).receive()
    await streams[0].close()
    async with asyncio.timeout(30):
        while True:
            again = channel.stream(CONNECT)
            again.send_nowait(wire.ClientFrame(id=1))
            try:
                assert await again.receive()
                break
            except BackPressure:
                await asyncio.sleep(0.05)


async def test_so_many_callers_are_authenticated_at_a_time(place: Place) -> None:
    channel = place.dial(await place.listen(CallerLimits(authentications=2), guard=Slow()))
    done = await asyncio.gather(*[call(channel) for _ in range(5)], return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["BackPressure"] * 3 + ["str"] * 2
    assert await call(channel) == "here"


async def test_connections_in_all_are_bounded_and_those_that_are_open_go_on(place: Place) -> None:
    serving = await place.listen(CallerLimits(connections=3))
    first = place.dial(serving)
    assert await call(first) == "here"
    idle = [socket.create_connection(serving.endpoint) for _ in range(6)]
    await asyncio.sleep(0.2)
    try:
        with pytest.raises(MagnetarError):
            await place.dial(serving).call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=1)
        assert await call(first) == "here"
    finally:
        for each in idle:
            each.close()


async def test_strangers_have_a_share_of_the_connections_and_leave_for_those_that_call(place: Place) -> None:
    """Forty places: twenty for connections that made no call. The oldest leaves when another comes; in time all do."""
    serving = await place.listen(CallerLimits(connections=40))
    listener = serving._listener  # type: ignore[attr-defined]
    first = place.dial(serving)
    assert await call(first) == "here"
    idle = [socket.create_connection(serving.endpoint) for _ in range(60)]
    idle[0].setblocking(False)
    with contextlib.suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(idle[0], 1000):
            pass
    async with asyncio.timeout(10):
        while listener.strangers.pushed_out < 40:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (len(listener.strangers), len(listener.connections)) == (20, 21)
    oldest = next(iter(listener.strangers))
    late = place.dial(serving)
    assert await call(late) == "here"
    assert oldest.is_lost
    assert (len(listener.strangers), len(listener.connections)) == (19, 21)
    for stranger in list(listener.strangers):
        stranger.is_ready = True  # it sent its settings, and makes no call
        for _ in range(STRANGER_CHECKS):
            stranger.liveness.received = True
            stranger.liveness.check_alive()
    assert not len(listener.strangers)
    assert await call(first) == await call(late) == "here"
    for each in idle:
        each.close()


@pytest.mark.parametrize(
    "garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000]
)
async def test_garbage_on_the_port_changes_nothing_for_others(place: Place, garbage: bytes) -> None:
    serving = await place.listen(CallerLimits())
    channel = place.dial(serving)
    held = [socket.create_connection(serving.endpoint) for _ in range(50)]
    for each in held:
        each.sendall(garbage)
    assert await call(channel) == "here"
    for each in held:
        each.close()
    assert await call(channel) == "here"


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("127.0.0.1:80", "127.0.0.1"),
        ("[2001:db8:1:2:3:4:5:6]:80", "2001:db8:1:2::"),
        ("[::ffff:10.0.0.1]:80", "10.0.0.1"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_an_address_is_a_host_or_a_network_of_ipv6(peer: str, network: str) -> None:
    assert find_caller_network(peer) == network
