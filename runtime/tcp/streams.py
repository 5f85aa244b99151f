"""TCP and TLS on asyncio: the `serve_bytes` and `connect_bytes` of `runtime/network.py`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable
from typing import cast

from ...proto.errors import ConnectionLost, MagnetarError, Unavailable, UntrustedServer
from ..access import OPEN, Caller, Guard, ListenerAccess, TlsFiles
from ..descriptors import PROCESS
from ..network import STREAM_QUEUE_BYTES, ByteService, Endpoint, Enough, Room, address_network
from ..tasks import Tasks
from .listening import Listening, UnauthenticatedConnections, listen, make_caller_tls_context, make_listener_tls_context

EARLY_BYTES = 16 << 10
"""Most bytes that came while no reader waited; then the socket is not read until one does."""
CLOSE_S = 1.0
"""Seconds for what is queued when a connection is closed: a peer that does not read must not keep it open."""

_LOG = logging.getLogger("magnetar.bytes")


class TcpStream(asyncio.BufferedProtocol):
    """A `runtime.network.ByteStream` over a socket: it reads straight into the reader's buffer."""

    def __init__(
        self, accepted: Callable[[TcpStream], None] | None = None, guard: Guard | None = None,
        known: Callable[[TcpStream], None] = lambda stream: None,
    ) -> None:  # fmt: skip
        """Creates a stream. `accepted` is called when the connection is made, `known` when its caller is authenticated;
        both may raise.
        """
        self.peer = "?"
        self.guard = guard
        self._known = known
        self._accepted = accepted
        self._transport: asyncio.Transport
        self._room: Room | None = None  # of the reader that waits …
        self._enough: Enough | None = None
        self._reader: asyncio.Future[int] | None = None
        self._given = memoryview(b"")  # … and where the bytes of now go
        self._early = memoryview(b"")
        self._paused = False  # the socket is not read
        self._ended = False  # the other end sends no more
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writable: list[asyncio.Future[None]] | None = None  # who waits for the peer to read; None: no need to

    # ------------------------------------------------------------------ the protocol of asyncio
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=STREAM_QUEUE_BYTES)
        host, port = (transport.get_extra_info("peername") or ("?", 0))[:2]
        self.peer = str(Endpoint(host, port))
        if self._accepted is not None:
            self._accepted(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer for the next bytes. May be called without any bytes following (TLS)."""
        self._given = self._room() if self._room is not None else memoryview(bytearray(EARLY_BYTES))
        return self._given

    def buffer_updated(self, nbytes: int) -> None:
        given, self._given = self._given, memoryview(b"")
        early = self._room is None
        if early:
            self._early = given[:nbytes]
        elif self._enough is not None and not self._enough(nbytes):
            return
        else:
            self._room = None
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(nbytes)
        if early or nbytes == len(given):  # else the socket is empty for now
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return self._transport.get_extra_info("ssl_object") is None  # the other direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if not self._lost.done():
            self._lost.set_result(None)
        self._wake(exc)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = []

    def resume_writing(self) -> None:
        waiting, self._writable = self._writable, None
        for each in waiting or ():
            if not each.done():
                each.set_result(None)

    def _wake(self, why: Exception | None = None) -> None:
        reader = self._reader
        if reader is not None and not reader.done():
            if why is None:
                reader.set_result(0)
            else:
                reader.set_exception(ConnectionLost(f"{self.peer}: {why}"))

    # ------------------------------------------------------------------ a ByteStream
    @property
    def caller(self) -> Caller:
        tls: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object")
        if tls is None:
            return Caller(self.peer)
        found = tls.getpeercert(binary_form=True)
        return Caller(self.peer, "", ssl.DER_cert_to_PEM_cert(found).encode() if found else b"", is_encrypted=True)

    def on_admitted(self) -> None:
        self._known(self)

    is_busy = False

    def evict(self) -> None:
        self.abort()

    async def read_into(self, room: Room, enough: Enough | None = None) -> int:
        while self._early:
            into = room()
            size = min(len(into), len(self._early))
            into[:size], self._early = self._early[:size], self._early[size:]
            if enough is None or enough(size):
                return size
        if self._ended:
            return 0
        self._room, self._enough, self._reader = room, enough, asyncio.get_running_loop().create_future()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        try:
            return await self._reader
        finally:
            self._room = self._enough = self._reader = None

    def write_nowait(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def queued_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    async def wait_drained(self) -> None:
        if self._writable is not None and not self._lost.done():
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._writable.append(waiting)
            await waiting
        if self._lost.done():
            raise ConnectionLost(f"{self.peer}: the connection is lost")

    def abort(self) -> None:
        """Closes the connection at once; queued bytes are lost."""
        self._transport.abort()

    async def close(self) -> None:
        self._transport.close()
        if not (await asyncio.wait((self._lost,), timeout=CLOSE_S))[0]:
            self._transport.abort()


class TcpServing:
    """A `runtime.network.Serving` over a listening socket."""

    def __init__(self, service: ByteService, access: ListenerAccess) -> None:
        self._service = service
        self._access = access
        self._server: Listening
        self._handlers = Tasks()
        self.strangers = UnauthenticatedConnections(access.limits)
        self._known: dict[TcpStream, str] = {}  # with their addresses
        self._of_address: Counter[str] = Counter()  # those that are known
        self.endpoint: Endpoint

    @property
    def is_encrypted(self) -> bool:
        return self._access.tls is not None

    async def listen(self, endpoint: Endpoint) -> None:
        tls = make_listener_tls_context(self._access.tls) if self._access.tls is not None else None
        access = self._access
        made = lambda: TcpStream(self._accept, access.guard, self._admit)
        self._server = await listen(endpoint, made, tls, access.limits)
        self.endpoint = Endpoint(endpoint.host, self._server.port)

    def _accept(self, stream: TcpStream) -> None:
        if self._handlers.closed or not self.strangers.add(stream, stream.peer):
            stream.abort()
        elif (
            len(self.strangers) + len(self._known) > self._access.limits.connections or not PROCESS.reserve_connection()
        ):
            self.strangers.remove(stream)
            stream.abort()
        else:
            self._handlers.spawn(self._handle(stream), "bytes-connection")

    def _admit(self, stream: TcpStream) -> None:
        """Counts a connection whose caller is authenticated. Raises ConnectionLost if its address has as many
        connections as it may have.
        """
        if stream in self._known or stream not in self.strangers:
            return
        self.strangers.remove(stream)
        place, most = address_network(stream.peer), self._access.limits.streams_per_address
        if self._of_address[place] >= most:
            stream.abort()
            raise ConnectionLost(f"{place} has {most} connections")
        self._known[stream] = place
        self._of_address[place] += 1

    async def _handle(self, stream: TcpStream) -> None:
        self._access.memory.connections += 1
        try:
            await self._service(stream)
        except MagnetarError as error:
            _LOG.debug("%s: %s", stream.peer, error)
        except Exception:
            _LOG.exception("the service of a connection failed")
        finally:
            self._access.memory.connections -= 1
            PROCESS.release_connection()
            await stream.close()
            self.strangers.remove(stream)
            place = self._known.pop(stream, None)
            if place is not None:
                self._of_address[place] -= 1
                if not self._of_address[place]:
                    del self._of_address[place]

    async def close(self, grace_s: float = 0.0) -> None:
        """Accepts no further connections. Open connections may continue for `grace_s`; then they are closed.
        Idempotent."""
        self._server.close()
        await self._handlers.close(grace_s)


async def serve(endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN) -> TcpServing:
    serving = TcpServing(service, access)
    await serving.listen(endpoint)
    return serving


async def connect(endpoint: Endpoint, tls: TlsFiles | None = None) -> TcpStream:
    context = make_caller_tls_context(tls) if tls is not None else None
    connecting = asyncio.get_running_loop().create_connection
    try:
        return (await connecting(TcpStream, endpoint.host, endpoint.port, ssl=context))[1]
    except ssl.SSLCertVerificationError as error:
        raise UntrustedServer(f"the certificate of {endpoint} is not trusted: {error.verify_message}") from error
    except OSError as error:
        raise Unavailable(f"no process listens on {endpoint}: {error}") from error
