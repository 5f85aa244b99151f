"""Where a listener of bytes listens: an address, which is not looked up, or a name."""

import asyncio
import socket

import pytest

from magnetar.proto.errors import Busy
from magnetar.runtime.network import ByteStream, Endpoint
from magnetar.runtime.tcp import listening


async def _greet(stream: ByteStream) -> None:
    assert isinstance(stream, listening.TcpStream)
    connection = stream._transport.get_extra_info("socket")
    delays = not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    stream.write_nowait(b"late" if delays else b"hello")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_it_listens_at_an_address_and_at_a_name_and_answers_at_once(host: str) -> None:
    serving = await listening.serve(Endpoint(host, 0), _greet)
    try:
        assert serving.endpoint.host == host
        reader, writer = await asyncio.open_connection(host, serving.endpoint.port)
        assert await reader.read() == b"hello"
        writer.close()
        with pytest.raises(Busy):
            await listening.serve(serving.endpoint, _greet)
    finally:
        await serving.close()
    again = await listening.serve(serving.endpoint, _greet)  # while connections of before are in TIME_WAIT
    await again.close()
