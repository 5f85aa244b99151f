"""Bytes over TCP: what a reader is woken for."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from socket import SO_LINGER, SOL_SOCKET

import pytest

from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.network import ByteStream, Endpoint
from magnetar.runtime.process import SystemNetwork
from magnetar.runtime.sim.world import Simulation
from magnetar.runtime.tcp.listening import TcpStream

ANY = Endpoint("127.0.0.1", 0)
SIZE = 3_000_000

Connected = Callable[[], Awaitable[tuple[ByteStream, ByteStream]]]


@asynccontextmanager
async def _connected(network: SystemNetwork) -> AsyncIterator[tuple[ByteStream, ByteStream]]:
    """Both ends."""
    came: asyncio.Future[ByteStream] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def service(stream: ByteStream) -> None:
        came.set_result(stream)
        await over.wait()

    serving = await network.serve_bytes(ANY, service)
    stream = await network.connect_bytes(serving.endpoint)
    try:
        yield stream, await came
    finally:
        over.set()
        await stream.close()
        await serving.close(1.0)


class Sink:
    """Room for SIZE bytes; enough are `wanted`."""

    def __init__(self, wanted: int) -> None:
        self.bytes, self.size, self.pieces, self.wanted = memoryview(bytearray(SIZE)), 0, 0, wanted

    def room(self) -> memoryview:
        return self.bytes[self.size : self.size + 50_000]

    def enough(self, size: int) -> bool:
        self.size += size
        self.pieces += 1
        return self.size >= self.wanted


async def _until_enough(writer: ByteStream, reader: ByteStream) -> None:
    data = bytes(range(256)) * (SIZE // 256)
    writer.write_nowait(data)
    sink = Sink(len(data))
    assert await reader.read_into(sink.room, sink.enough) > 0
    assert sink.size == len(data), "it is not woken before"
    assert sink.pieces > 2
    assert sink.bytes[: sink.size] == data
    writer.write_nowait(b"abcdef")
    two = Sink(2)
    assert await reader.read_into(lambda: two.room()[:2], two.enough) == 2
    assert two.bytes[:2] == b"ab"
    rest = Sink(4)
    await reader.read_into(rest.room, rest.enough)
    assert rest.bytes[: rest.size] == b"cdef"


async def test_a_reader_is_woken_when_it_has_enough() -> None:
    async with _connected(SystemNetwork(SystemClock())) as (writer, reader):
        await _until_enough(writer, reader)
        waiting = asyncio.create_task(reader.read_into(Sink(10).room, Sink(10).enough))
        await asyncio.sleep(0)
        await writer.close()
        assert await waiting == 0, "the end wakes it in any case"


async def test_a_connection_that_is_reset_while_nobody_reads_is_lost_and_has_not_ended() -> None:
    async with _connected(SystemNetwork(SystemClock())) as (writer, reader):
        first = Sink(1)
        writer.write_nowait(b"1")
        await reader.read_into(first.room, first.enough)
        assert isinstance(writer, TcpStream)
        assert isinstance(reader, TcpStream)
        socket = writer._transport.get_extra_info("socket")
        socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))  # a reset in place of an end
        writer.abort()
        await asyncio.wait_for(asyncio.shield(reader._lost), 20)
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                await reader.read_into(first.room, first.enough)


async def test_what_came_before_a_reader_counts_too() -> None:
    async with _connected(SystemNetwork(SystemClock())) as (writer, reader):
        first = Sink(1)
        writer.write_nowait(b"1")
        await reader.read_into(first.room, first.enough)
        writer.write_nowait(b"x" * 40_000)
        await asyncio.sleep(0.05)  # without a reader: a part of it comes early
        sink = Sink(40_000)
        await reader.read_into(sink.room, sink.enough)
        assert sink.size == 40_000


@pytest.mark.parametrize("seed", range(3))
def test_a_simulated_reader_is_woken_when_it_has_enough(seed: int) -> None:
    simulation = Simulation(seed)
    came: list[ByteStream] = []

    async def service(stream: ByteStream) -> None:
        came.append(stream)
        await asyncio.sleep(60)

    async def serve() -> Endpoint:
        return (await simulation.world("server").network.serve_bytes(ANY, service)).endpoint

    async def client(endpoint: Endpoint) -> ByteStream:
        return await simulation.world("client").network.connect_bytes(endpoint)

    async def body() -> None:
        writer = await simulation.spawn("client", client(await simulation.spawn("server", serve())))
        await asyncio.sleep(1)
        await _until_enough(writer, came[0])

    simulation.run(body())
