"""What a stranger may do at the metadata's port: it is told no, in bounded memory, and others are served."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata import server as server_module
from magnetar.metadata.remote import BACKUP_RPC, COMMIT_RPC, GET_RPC, SESSION_RPC, RemoteStore, connect_metadata
from magnetar.metadata.server import MetadataServer
from magnetar.metadata.store import VersionedValue
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import BackPressure, InvalidName, InvalidRequest, MagnetarError
from magnetar.runtime.network import MESSAGE_BYTES_MAX, Stream
from magnetar.runtime.process import make_system_world
from tests.metadata.stores import ANYWHERE


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[tuple[MetadataServer, RemoteStore]]:
    """The service, and somebody who uses it all the time."""
    world = make_system_world(1)
    server = await MetadataServer.start(world, ANYWHERE, str(tmp_path / "metadata.db"))
    store = await connect_metadata(world, server.endpoint, 10.0)
    await store.put("/e", b"mine", ephemeral=True)
    yield server, store
    assert await store.get("/e") == VersionedValue(b"mine", 0), "who was there is served, in the same session"
    await store.put("/after", b"x")
    await store.close()
    await server.close()


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_garbage_half_open_connections_and_wrong_protocols_cost_nobody_anything(
    backend: tuple[MetadataServer, RemoteStore],
) -> None:
    server, store = backend
    before = memory_bytes()
    sockets = []
    for number in range(500):
        connection = socket.create_connection(server.endpoint, 5.0)
        connection.setblocking(False)
        match number % 4:
            case 0:
                connection.sendall(os.urandom(4096))
            case 1:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            case 2:  # HTTP/2, and then a frame that says it has 16 MiB
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01")
        sockets.append(connection)
    for number in range(50):
        await store.put(f"/n/{number}", b"x")
    assert memory_bytes() - before < 64 << 20
    for connection in sockets:
        connection.close()


async def test_requests_that_are_too_large_or_wrong_are_refused_by_type(
    backend: tuple[MetadataServer, RemoteStore],
) -> None:
    server, _ = backend
    channel = make_system_world(2).network.connect(server.endpoint)
    huge = wire.CommitRequest(operations=[wire.Operation(path="/a", value=bytes(MESSAGE_BYTES_MAX + 1))])
    with pytest.raises(MagnetarError):
        await channel.call(COMMIT_RPC, huge, timeout_s=10)
    for path in ("", "a", "/a/../b", "/" + "x" * 5000, "/\x00"):
        with pytest.raises(InvalidName):
            await channel.call(GET_RPC, wire.GetRequest(path=path), timeout_s=10)
    for name in ("../up", "/etc/passwd", ".hidden", "a/b", "x" * 300):
        with pytest.raises(InvalidRequest):
            await channel.call(BACKUP_RPC, wire.BackupRequest(name=name), timeout_s=10)
    await channel.close()


async def test_sessions_of_one_address_are_bounded_and_who_has_one_keeps_it(
    backend: tuple[MetadataServer, RemoteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = backend
    monkeypatch.setattr(server_module, "SESSIONS_OF_ADDRESS_MAX", 20)
    channel = make_system_world(2).network.connect(server.endpoint)
    opening = wire.SessionRequest(open=wire.OpenSession(timeout_s=600.0))
    streams = [channel.stream(SESSION_RPC) for _ in range(60)]
    for stream in streams:
        stream.send_nowait(opening)
    answers = await asyncio.gather(*[stream.receive() for stream in streams], return_exceptions=True)
    assert server.statistics()["sessions"] == 20
    assert sum(isinstance(answer, BackPressure) for answer in answers) == 41
    for stream, answer in zip(streams, answers, strict=True):
        if not isinstance(answer, BaseException):
            stream.send_nowait(wire.SessionRequest(close=wire.Empty()))
    async with asyncio.timeout(10):
        while server.statistics()["sessions"] == 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    again = channel.stream(SESSION_RPC)
    again.send_nowait(opening)
    assert (await again.receive())[0].opened.session, "there is room again"
    for stream in [*streams, again]:
        stream.cancel()
    await channel.close()


async def _read_to_the_end(stream: Stream[Any, Any]) -> None:
    while True:
        await stream.receive()


async def test_watches_of_one_address_are_bounded(
    backend: tuple[MetadataServer, RemoteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = backend
    monkeypatch.setattr(server_module, "WATCHES_OF_ADDRESS_MAX", 50)
    channel = make_system_world(2).network.connect(server.endpoint)
    stream = channel.stream(SESSION_RPC)
    stream.send_nowait(wire.SessionRequest(open=wire.OpenSession(timeout_s=10.0)))
    await stream.receive()
    for number in range(60):
        watch = wire.WatchRequest(watch_id=number, prefix="/")
        stream.send_nowait(wire.SessionRequest(watch=watch))
    with pytest.raises(BackPressure, match="watches"):
        await _read_to_the_end(stream)
    await channel.close()


async def test_a_stream_that_does_not_say_whose_it_is_ends(
    backend: tuple[MetadataServer, RemoteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = backend
    monkeypatch.setattr(server_module, "SESSION_OPEN_TIMEOUT_S", 0.05)
    channel = make_system_world(2).network.connect(server.endpoint)
    stream = channel.stream(SESSION_RPC)
    with pytest.raises(InvalidRequest, match="begins with"):
        await stream.receive()
    await channel.close()
