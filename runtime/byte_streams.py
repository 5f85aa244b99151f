"""TCP on asyncio's streams: the `serve_bytes` and `connect_bytes` of `runtime/network.py`."""

from __future__ import annotations

import asyncio
import logging

from ..proto.errors import Busy, ConnectionLost, MagnetarError, Unavailable
from .network import STREAM_QUEUE_BYTES, ByteService, Endpoint
from .tasks import Tasks

READ_BYTES = 256 << 10
"""Of one `read`."""
CLOSE_S = 1.0
"""Time for what is queued when a connection is closed: a peer that does not read must not keep it open."""

_LOG = logging.getLogger("magnetar.bytes")


class TcpStream:
    """A `runtime.network.ByteStream` over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=STREAM_QUEUE_BYTES)
        host, port = writer.get_extra_info("peername", ("?", 0))[:2]
        self.peer = str(Endpoint(host, port))

    async def read(self) -> bytes:
        try:
            return await self._reader.read(READ_BYTES)
        except OSError as error:
            raise ConnectionLost(f"{self.peer}: {error}") from error

    def write_nowait(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    @property
    def queued_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    async def drained(self) -> None:
        try:
            await self._writer.drain()
        except OSError as error:
            raise ConnectionLost(f"{self.peer}: {error}") from error

    async def close(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()


class TcpServing:
    """A `runtime.network.Serving` over a listening socket."""

    def __init__(self, service: ByteService) -> None:
        self._service = service
        self._server: asyncio.Server
        self._handlers = Tasks()
        self.endpoint: Endpoint

    async def listen(self, endpoint: Endpoint) -> None:
        try:
            self._server = await asyncio.start_server(self._accept, endpoint.host, endpoint.port)
        except OSError as error:
            raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error
        self.endpoint = Endpoint(endpoint.host, self._server.sockets[0].getsockname()[1])

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._handlers.closed:
            writer.close()
        else:
            self._handlers.spawn(self._handle(TcpStream(reader, writer)), "bytes-connection")

    async def _handle(self, stream: TcpStream) -> None:
        try:
            await self._service(stream)
        except MagnetarError as error:
            _LOG.debug("%s: %s", stream.peer, error)
        except Exception:
            _LOG.exception("the service of a connection failed")
        finally:
            await stream.close()

    async def close(self, grace_s: float = 0.0) -> None:
        """Accepts no more connections; open ones have `grace_s`, then they are closed. Idempotent."""
        self._server.close()
        await self._handlers.close(grace_s)


async def serve(endpoint: Endpoint, service: ByteService) -> TcpServing:
    serving = TcpServing(service)
    await serving.listen(endpoint)
    return serving


async def connect(endpoint: Endpoint) -> TcpStream:
    try:
        return TcpStream(*await asyncio.open_connection(endpoint.host, endpoint.port))
    except OSError as error:
        raise Unavailable(f"no process listens on {endpoint}: {error}") from error
