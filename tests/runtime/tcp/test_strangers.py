"""Connections that say nothing, or never end their TLS handshake, keep no honest caller out and are bounded."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from magnetar.runtime.access import CallerLimits, ListenerAccess, TlsFiles
from magnetar.runtime.descriptors import PROCESS_DESCRIPTORS, FileDescriptors
from magnetar.runtime.network import ByteStream, Endpoint
from magnetar.runtime.tcp import listening
from magnetar.runtime.tcp.listening import STRANGER_CONNECTIONS_MIN, UnauthenticatedConnections
from tests.support.byte_streams import read
from tests.support.certificates import Authority

ANY = Endpoint("127.0.0.1", 0)
FLOOD = 300
CLIENT_HELLO = bytes.fromhex("16030100c0010000bc0303") + bytes(20)
"""The beginning of a handshake; the rest never comes."""


class One:
    def __init__(self) -> None:
        self.is_busy = False
        self.is_gone = False

    def evict(self) -> None:
        self.is_gone = True


def test_the_oldest_of_the_address_that_has_most_leaves() -> None:
    strangers = UnauthenticatedConnections(CallerLimits(connections=40))
    assert strangers.count_max == 20
    honest, flood = One(), [One() for _ in range(100)]
    assert strangers.add(honest, "10.0.0.1:1")
    assert all(strangers.add(each, f"10.0.0.2:{port}") for port, each in enumerate(flood))
    assert not honest.is_gone
    assert len(strangers) == 20
    assert [each.is_gone for each in flood] == [True] * 81 + [False] * 19
    assert strangers.pushed_out == 81


def test_one_that_is_asked_who_it_is_stays_and_when_all_are_none_comes() -> None:
    strangers = UnauthenticatedConnections(CallerLimits(connections=4))
    several = [One() for _ in range(4)]
    for each in several:
        each.is_busy = True
        assert strangers.add(each, "10.0.0.1:1")
    late = One()
    assert not strangers.add(late, "10.0.0.2:1")
    assert late not in strangers
    several[2].is_busy = False
    assert strangers.add(late, "10.0.0.2:1")
    assert [each.is_gone for each in several] == [False, False, True, False]


def test_strangers_of_a_port_have_an_eighth_of_what_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileDescriptors, "connections_max", 800)
    assert UnauthenticatedConnections(CallerLimits()).count_max == 100
    monkeypatch.setattr(FileDescriptors, "connections_max", 8)
    assert UnauthenticatedConnections(CallerLimits()).count_max == STRANGER_CONNECTIONS_MIN


async def _echo(stream: ByteStream) -> None:
    data = await read(stream)
    stream.on_caller_authenticated()
    while data:
        stream.write_nowait(data)
        data = await read(stream)


@pytest.fixture
async def tls(tmp_path: Path) -> AsyncIterator[tuple[listening.RunningTcpServer, ssl.SSLContext]]:
    authority = Authority.make(tmp_path)
    files = authority.issue("server")
    serving = await listening.serve(
        ANY, _echo, ListenerAccess(tls=TlsFiles(files.certificate, files.key), limits=CallerLimits(connections=64))
    )
    try:
        yield serving, ssl.create_default_context(cafile=files.ca)
    finally:
        await serving.close()


@contextlib.contextmanager
def flooded(port: int, says: bytes, count: int = FLOOD) -> Iterator[list[socket.socket]]:
    """Connections that say this, and nothing more."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            opened.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            with contextlib.suppress(OSError):  # it may have been pushed out
                opened[-1].sendall(says)
        yield opened
    finally:
        for each in opened:
            each.close()


async def echoed(port: int, context: ssl.SSLContext | None) -> None:
    async with asyncio.timeout(20):
        name = None if context is None else "localhost"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.close()


@pytest.mark.parametrize("says", [b"", CLIENT_HELLO[:3], CLIENT_HELLO])
async def test_handshakes_that_never_end_are_bounded_and_keep_no_honest_caller_out(
    tls: tuple[listening.RunningTcpServer, ssl.SSLContext], says: bytes
) -> None:
    serving, context = tls
    before = PROCESS_DESCRIPTORS.connections
    handshakes = serving._server.handshakes
    assert handshakes is not None
    with flooded(serving.endpoint.port, says):
        await echoed(serving.endpoint.port, context)
        assert len(handshakes) <= handshakes.count_max == 32
        assert handshakes.pushed_out >= FLOOD - 33
        assert PROCESS_DESCRIPTORS.connections - before <= 34, "each has its place among the connections of the process"
    async with asyncio.timeout(20):
        while len(handshakes) or PROCESS_DESCRIPTORS.connections > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await echoed(serving.endpoint.port, context)


async def test_a_handshake_has_so_much_time(
    tls: tuple[listening.RunningTcpServer, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_TIMEOUT_S", 0.2)
    serving, _ = tls
    before = PROCESS_DESCRIPTORS.connections
    with flooded(serving.endpoint.port, CLIENT_HELLO, 5) as opened:
        for each in opened:
            each.setblocking(False)
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(each, 1) == b""
    assert PROCESS_DESCRIPTORS.connections == before


async def test_handshakes_under_way_end_with_the_listener(
    tls: tuple[listening.RunningTcpServer, ssl.SSLContext],
) -> None:
    serving, context = tls
    before = PROCESS_DESCRIPTORS.connections
    with flooded(serving.endpoint.port, CLIENT_HELLO, 5):
        await echoed(serving.endpoint.port, context)
        await serving.close()
        async with asyncio.timeout(20):
            while PROCESS_DESCRIPTORS.connections > before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_silent_connections_of_a_port_of_bytes_keep_no_honest_caller_out() -> None:
    """Also those of the same address, of which there are more than it may have streams; those that are known stay."""
    limits = CallerLimits(connections=64, streams_per_address=8)
    serving = await listening.serve(ANY, _echo, ListenerAccess(limits=limits))
    port = serving.endpoint.port
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"first")
        assert await reader.readexactly(5) == b"first"
        with flooded(port, b""):
            await echoed(port, None)
            assert serving.strangers.pushed_out >= FLOOD - 33
            writer.write(b"again")
            assert await reader.readexactly(5) == b"again"
        writer.close()
    finally:
        await serving.close()
