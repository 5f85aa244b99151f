"""Serves connections of HTTP/1.1 (`HttpListener`): uvicorn's protocol on h11, over the bytes of a listener.

uvicorn expects an asyncio transport; `_Transport` is one over a `ByteStream`. So the listener has the same limits, TLS
with renewed certificates, and simulated network as every other listener.

All connections of callers that are not authenticated yet share one part of the event loop's time
(runtime/tcp/share.py).

Bounds: the head of a request has at most REQUEST_HEAD_BYTES_MAX bytes and HEAD_LINES_MAX lines. Received data is parsed
in slices, between which other tasks run. A request must arrive within `request_s` seconds; the time while the server
does not read does not count. An idle connection is closed after KEEP_ALIVE_S seconds. While more than
UNSENT_RESPONSE_BYTES_MAX of a response are unsent, the application must wait; a caller that does not read for
UNREAD_RESPONSE_S_MAX seconds is disconnected. If the caller disconnects, its request is finished nevertheless. If a
request is answered before it has arrived completely (413), the rest is read and dropped, for at most LINGER_TIMEOUT_S
seconds and LINGER_BYTES_MAX bytes: to close at once would reset the connection, and the response would be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ...proto.errors import ConnectionLost
from ...proto.names import parse_number
from ...runtime.alarm import EventLoopSlices
from ...runtime.clock import Clock
from ...runtime.network import ByteStream
from ...runtime.tasks import Tasks
from ...runtime.tcp.share import UnauthenticatedLoopShare

REQUEST_HEAD_BYTES_MAX = 64 << 10
HEAD_LINES_MAX = 256
"""Most lines of a request's head: h11 needs 10 µs for a header."""
HEAD_LINE_COST = 8
"""Cost of parsing a line (10 to 20 µs), in units of an empty frame (runtime/tcp/share.py)."""
UNAUTHENTICATED_COST_MAX = 512
"""A connection of an unauthenticated caller that has used less than this, the cost of one request's head, goes before
the others."""
HEAD_LINES_PER_TURN = 32
"""Lines that are parsed at once: h11 needs 20 µs for a chunk of one byte, so 64 KiB of them would hold the loop for 200
ms."""
KEEP_ALIVE_S = 60
UNREAD_RESPONSE_S_MAX = 30.0
READ_BUFFER_BYTES = 64 << 10
UNSENT_RESPONSE_BYTES_MAX = 256 << 10
"""Of a response: what is behind it is counted where it is kept (`PayloadResponse`)."""
LINGER_TIMEOUT_S = 5.0
LINGER_BYTES_MAX = 64 << 20


class HttpListener:
    """Serves the HTTP connections of one listener. `application`: the ASGI application that answers their requests;
    `request_s`: the seconds within which a request must arrive completely."""

    def __init__(self, application: Any, clock: Clock, request_s: float) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # strangers must not fill the log
        self._clock = clock
        self._request_s = request_s
        self._open: set[_Connection] = set()
        self._share = UnauthenticatedLoopShare()
        self._config = Config(
            application, interface="asgi3", lifespan="off", ws="none", http="h11", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX,
        )  # fmt: skip
        self._config.load()

    async def serve(self, stream: ByteStream) -> None:
        """Serves one connection until the client or `shut_down` ends it, and its last request is answered. If the call
        is cancelled, the requests in progress are cancelled, too."""
        connection = _Connection(self._config, stream, self._clock, self._request_s, self._share)
        self._open.add(connection)
        try:
            await connection.serve()
        finally:
            self._open.discard(connection)

    def shut_down(self) -> None:
        """Closes each connection that has no request in progress, and each other one after its request. Does not wait
        for that."""
        for each in list(self._open):
            each.shut_down()
        self._share.close()


class _Transport(asyncio.Transport):
    """An asyncio transport over a `ByteStream`, with the methods that uvicorn's protocol calls."""

    def __init__(self, stream: ByteStream, full: Callable[[], None]) -> None:
        """Makes a transport. `full` is called after a write if more than UNSENT_RESPONSE_BYTES_MAX are queued."""
        super().__init__()
        stream.limit_queue(UNSENT_RESPONSE_BYTES_MAX)
        self._stream = stream
        self._full = full
        self.closed = asyncio.Event()
        self.readable = asyncio.Event()
        self.readable.set()
        host, _, port = stream.peer.rpartition(":")
        self._facts = {
            "peername": (host.strip("[]"), parse_number(port) or 0),
            "sslcontext": stream.caller.is_encrypted,
        }

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._facts.get(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self.closed.is_set():
            self._stream.write_nowait(bytes(data))
            if self._stream.queued_bytes > UNSENT_RESPONSE_BYTES_MAX:
                self._full()

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()

    def pause_reading(self) -> None:
        self.readable.clear()

    def resume_reading(self) -> None:
        self.readable.set()


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yields the data in pieces of HEAD_LINES_PER_TURN lines, to bound the work per piece: each header and each chunk
    of a body has at least one line."""
    begin = 0
    while begin < len(data):
        end = begin
        for _ in range(HEAD_LINES_PER_TURN):
            end = data.find(b"\n", end) + 1
            if not end:
                end = len(data)
                break
        yield data[begin:end]
        begin = end


class _Connection:
    def __init__(
        self, config: Config, stream: ByteStream, clock: Clock, request_s: float, share: UnauthenticatedLoopShare
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._request_s = request_s
        self._transport = _Transport(stream, self._full)
        self._draining = False
        self._state = ServerState()  # has the tasks of this connection's requests
        self._ended = asyncio.Event()  # no more requests come: a response without an end ends
        state = {"caller": stream.caller, "admitted": self._admitted, "ended": self._ended}
        self._protocol = H11Protocol(config, self._state, state)
        self._share: UnauthenticatedLoopShare | None = share  # None: its caller is authenticated
        self._drawn = 0  # the part of the share that it has used
        self._since: float | None = clock.monotonic()  # when the incomplete request began; None: there is none
        self._lines = 0  # lines so far of the head that arrives
        self._tasks = Tasks()

    async def serve(self) -> None:
        self._protocol.connection_made(self._transport)
        closed = self._tasks.spawn(self._transport.closed.wait(), "http-closed")
        reading = self._tasks.spawn(self._read(), "http-connection")
        try:
            await asyncio.wait([closed, reading], return_when=asyncio.FIRST_COMPLETED)
            self._ended.set()
            await self._answered()
            if self._is_answered_early:
                reading.cancel()
                await asyncio.wait([reading])
                await self._linger()
        except asyncio.CancelledError:  # the server closes, and its grace is over
            for task in self._state.tasks:
                task.cancel()
            raise
        finally:
            self._protocol.connection_lost(None)
            await self._tasks.close()
            await self._end_requests()

    @property
    def _is_answered_early(self) -> bool:
        """Whether the response is complete while the client still sends the body of its request."""
        connection = self._protocol.conn
        return connection.their_state in (h11.SEND_BODY, h11.ERROR) and connection.our_state in (
            h11.DONE, h11.MUST_CLOSE, h11.CLOSED
        )  # fmt: skip

    async def _linger(self) -> None:
        taken = 0
        with contextlib.suppress(TimeoutError, ConnectionLost):
            async with asyncio.timeout(LINGER_TIMEOUT_S):
                while taken < LINGER_BYTES_MAX and (data := await self._some()):
                    taken += len(data)

    def shut_down(self) -> None:
        self._ended.set()
        with contextlib.suppress(h11.LocalProtocolError):  # in the middle of a request
            self._protocol.shutdown()

    async def _read(self) -> None:
        """Reads until the client ends its side, or takes too long for a request."""
        while True:
            if not self._transport.readable.is_set():
                await self._transport.readable.wait()
                self._since = self._clock.monotonic() if self._since is not None else None
            try:
                async with asyncio.timeout(self._left_s()):
                    data = await self._some()
            except (TimeoutError, ConnectionLost):
                self._transport.close()
                return
            if not data:
                return
            if not await self._feed(data):
                self._transport.close()
                return
            self._update_partial()

    async def _feed(self, data: bytes) -> bool:
        """Passes data to the protocol in pieces of few lines; after each time slice other tasks of the event loop run.
        Returns False if the head of a request has too many lines."""
        turns = EventLoopSlices(self._clock)
        for piece in _pieces(data):
            if self._transport.is_closing():
                return True
            await self._transport.readable.wait()
            if self._share is not None:
                cost = HEAD_LINE_COST * (1 + piece.count(b"\n"))
                await self._share.wait_turn(cost, is_light=self._drawn < UNAUTHENTICATED_COST_MAX)
                self._drawn += cost
            self._protocol.data_received(piece)
            is_head = self._protocol.conn.their_state is h11.IDLE
            self._lines = self._lines + piece.count(b"\n") if is_head else 0
            if self._lines > HEAD_LINES_MAX:
                return False
            if turns.is_slice_used_up:
                await turns.begin_slice()
        return True

    def _admitted(self) -> None:
        self._share = None
        self._stream.on_caller_authenticated()

    async def _some(self) -> bytes:
        """Reads and returns the next bytes; empty if the client has ended its side. The buffer is only allocated when
        bytes arrive."""
        rooms: list[memoryview] = []

        def room() -> memoryview:
            rooms.append(memoryview(bytearray(READ_BUFFER_BYTES)))
            return rooms[-1]

        size = await self._stream.read_into(room)
        return bytes(rooms[-1][:size]) if size else b""

    def _update_partial(self) -> None:
        """Sets or clears the start time of the incomplete request."""
        protocol = self._protocol.conn
        if protocol.their_state is h11.IDLE:
            is_partial = bool(protocol.trailing_data[0])
        else:
            is_partial = protocol.their_state is h11.SEND_BODY
        if not is_partial:
            self._since = None
        elif self._since is None:
            self._since = self._clock.monotonic()

    def _left_s(self) -> float | None:
        """Returns the seconds until the incomplete request must be complete. None if there is no incomplete request:
        then uvicorn's timer for idle connections runs."""
        if self._since is None:
            return None
        return max(0.0, self._since + self._request_s - self._clock.monotonic())

    def _full(self) -> None:
        """Makes the application wait until the queued bytes of its response are sent."""
        if not self._draining:
            self._draining = True
            self._protocol.pause_writing()
            self._tasks.spawn(self._drain(), "http-drain")

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(UNREAD_RESPONSE_S_MAX):
                await self._stream.wait_drained()
        except (TimeoutError, ConnectionLost):
            self._transport.close()
            return
        self._draining = False
        self._protocol.resume_writing()

    async def _answered(self) -> None:
        """Waits until the complete requests are answered: a client that ended its side may still read."""
        if not self._transport.is_closing() and self._protocol.conn.their_state is not h11.SEND_BODY:
            await self._end_requests()

    async def _end_requests(self) -> None:
        """Waits until the tasks of all requests are done."""
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks))
