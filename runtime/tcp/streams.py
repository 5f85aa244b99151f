"""TCP and TLS on asyncio's streams: the `serve_bytes` and `connect_bytes` of `runtime/network.py`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter

from ...proto.errors import Busy, ConnectionLost, MagnetarError, Unavailable
from ..access import OPEN, Caller, Guard, ListenerAccess
from ..network import STREAM_QUEUE_BYTES, ByteService, Endpoint, network_of
from ..tasks import Tasks
from .tls import HANDSHAKE_S, SHUTDOWN_S, listener_context

READ_BYTES = 256 << 10
"""Of one `read`."""
CLOSE_S = 1.0
"""Time for what is queued when a connection is closed: a peer that does not read must not keep it open."""

_LOG = logging.getLogger("magnetar.bytes")


class TcpStream:
    """A `runtime.network.ByteStream` over a socket."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, guard: Guard | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=STREAM_QUEUE_BYTES)
        host, port = writer.get_extra_info("peername", ("?", 0))[:2]
        self.peer = str(Endpoint(host, port))
        self.guard = guard

    @property
    def caller(self) -> Caller:
        tls: ssl.SSLObject | None = self._writer.get_extra_info("ssl_object")
        if tls is None:
            return Caller(self.peer)
        found = tls.getpeercert(binary_form=True)
        return Caller(self.peer, "", ssl.DER_cert_to_PEM_cert(found).encode() if found else b"", is_encrypted=True)

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

    def __init__(self, service: ByteService, access: ListenerAccess) -> None:
        self._service = service
        self._access = access
        self._server: asyncio.Server
        self._handlers = Tasks()
        self._of_address: Counter[str] = Counter()
        self.endpoint: Endpoint

    @property
    def is_encrypted(self) -> bool:
        return self._access.tls is not None

    async def listen(self, endpoint: Endpoint) -> None:
        tls = listener_context(self._access.tls) if self._access.tls is not None else None
        try:
            self._server = await asyncio.start_server(
                self._accept, endpoint.host, endpoint.port, ssl=tls, limit=READ_BYTES,
                ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
                ssl_shutdown_timeout=SHUTDOWN_S if tls is not None else None,
            )  # fmt: skip
        except OSError as error:
            raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error
        self.endpoint = Endpoint(endpoint.host, self._server.sockets[0].getsockname()[1])

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = TcpStream(reader, writer, self._access.guard)
        limits, place = self._access.limits, network_of(stream.peer)
        full = len(self._handlers) >= limits.connections or self._of_address[place] >= limits.streams_per_address
        if self._handlers.closed or full:
            writer.transport.abort()
        else:
            self._of_address[place] += 1
            self._handlers.spawn(self._handle(stream, place), "bytes-connection")

    async def _handle(self, stream: TcpStream, place: str) -> None:
        try:
            await self._service(stream)
        except MagnetarError as error:
            _LOG.debug("%s: %s", stream.peer, error)
        except Exception:
            _LOG.exception("the service of a connection failed")
        finally:
            await stream.close()
            self._of_address[place] -= 1
            if not self._of_address[place]:
                del self._of_address[place]

    async def close(self, grace_s: float = 0.0) -> None:
        """Accepts no more connections; open ones have `grace_s`, then they are closed. Idempotent."""
        self._server.close()
        await self._handlers.close(grace_s)


async def serve(endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN) -> TcpServing:
    serving = TcpServing(service, access)
    await serving.listen(endpoint)
    return serving


async def connect(endpoint: Endpoint) -> TcpStream:
    try:
        return TcpStream(*await asyncio.open_connection(endpoint.host, endpoint.port))
    except OSError as error:
        raise Unavailable(f"no process listens on {endpoint}: {error}") from error
