"""TCP over simulated cables: bytes arrive in order, in other pieces than they were written, or the connection breaks.

On the cable: ("bytes", data), ("credit", n): n bytes were read; a sender stops when WINDOW_BYTES are unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from ...proto.errors import ConnectionLost, MagnetarError
from ..access import Caller, Guard
from ..network import STREAM_QUEUE_BYTES, ByteService, Endpoint, Enough, Room
from ..tasks import Tasks
from .wires import ConnectionEnd, SimWires

if TYPE_CHECKING:
    from .world import SimProcess

WINDOW_BYTES = 1 << 20
"""Bytes in transit or unread in one direction."""
CLOSE_S = 1.0
"""Seconds that a close may take, as in runtime/tcp/streams.py."""
PIECE_BYTES = 1000
"""Bytes of one arrival: about a packet, so that a protocol meets torn frames."""

_LOG = logging.getLogger("magnetar.bytes")


class SimByteStream:
    """One end of a simulated TCP connection (`runtime.network.ByteStream`)."""

    def __init__(self, end: ConnectionEnd, guard: Guard | None = None) -> None:
        self._end = end
        self.guard = guard
        self._out = bytearray()
        self._on_the_way = 0
        self._in = bytearray()
        self._lost = False
        self._closed = False
        self._waiting: list[asyncio.Future[None]] = []
        end.receive, end.lost = self._receive, self._is_lost

    @property
    def peer(self) -> str:
        return self._end.peer

    @property
    def caller(self) -> Caller:
        return Caller(self.peer)

    def on_admitted(self) -> None:
        """Does nothing: simulated connections are not bounded."""

    @property
    def queued_bytes(self) -> int:
        return len(self._out)

    async def read_into(self, room: Room, enough: Enough | None = None) -> int:
        while True:
            while not self._in:
                if self._lost:
                    return 0
                if self._closed:
                    raise ConnectionLost(f"{self.peer}: the connection was closed")
                await self._wait_change()
            into = room()
            size = min(len(into), len(self._in))
            into[:size] = self._in[:size]
            del self._in[:size]
            self._end.send(("credit", size), f"credit {size}")
            if enough is None or enough(size):
                return size

    def write_nowait(self, data: bytes) -> None:
        if not (self._closed or self._lost):
            self._out += data
            self._flush()

    async def wait_drained(self) -> None:
        while len(self._out) > STREAM_QUEUE_BYTES and not self._lost:
            await self._wait_change()
        if self._lost:
            raise ConnectionLost(f"{self.peer}: the connection is lost")

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._out and not self._lost:
                    await self._wait_change()
        self._closed = True
        self._end.close()
        self._wake_waiting()

    # ------------------------------------------------------------------ the cable
    def _flush(self) -> None:
        while self._out and self._on_the_way < WINDOW_BYTES:
            piece = bytes(self._out[:PIECE_BYTES])
            del self._out[:PIECE_BYTES]
            self._on_the_way += len(piece)
            self._end.send(("bytes", piece), f"bytes {len(piece)} B")

    def _receive(self, message: tuple[Any, ...]) -> None:
        if message[0] == "bytes":
            self._in += message[1]
        else:
            self._on_the_way -= message[1]
            self._flush()
        self._wake_waiting()

    def _is_lost(self) -> None:
        self._lost = True
        self._out.clear()
        self._wake_waiting()

    async def _wait_change(self) -> None:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        await change

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)


class SimByteServing:
    """A listener of TCP (`runtime.network.ByteServing`). `owner` is the process that serves."""

    is_encrypted = False

    def __init__(
        self, wires: SimWires, owner: SimProcess, endpoint: Endpoint, service: ByteService, guard: Guard | None = None
    ) -> None:
        self.owner = owner
        self._guard = guard
        self._wires = wires
        self._service = service
        self._handlers = Tasks()
        self.endpoint = wires.listen(endpoint, self)

    def accept(self, end: ConnectionEnd) -> None:
        if self._handlers.closed:
            end.close()
        else:
            self._handlers.spawn(self._handle(SimByteStream(end, self._guard)), "bytes-connection")

    async def _handle(self, stream: SimByteStream) -> None:
        try:
            await self._service(stream)
        except MagnetarError as error:
            _LOG.debug("%s: %s", stream.peer, error)
        except Exception:
            _LOG.exception("the service of a connection failed")
        finally:
            await stream.close()

    async def close(self, grace_s: float = 0.0) -> None:
        self._wires.unlisten(self.endpoint.port, self)
        await self._handlers.close(grace_s)
