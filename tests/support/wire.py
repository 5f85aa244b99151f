"""A connection of HTTP/2 without a socket: its transport is in memory, and the test says how many bytes arrive when."""

from __future__ import annotations

import asyncio
from typing import Any

from magnetar.runtime.tcp.http2 import Http2Connection


class Wire(asyncio.Transport):
    """What one end writes. `to`: the other end, or None where the test reads `written` itself."""

    def __init__(self, peername: tuple[str, int] = ("192.0.2.1", 4)) -> None:
        super().__init__({"peername": peername})
        self.written = bytearray()
        self.is_closed = False
        self.is_read = True
        self.high = 1 << 20

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        if not self.is_closed:
            self.written += data

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def taken(self, size: int) -> bytes:
        """The next `size` bytes leave."""
        data = bytes(self.written[:size])
        del self.written[:size]
        return data


def give(connection: Http2Connection[Any], data: bytes) -> None:
    """`data` arrives, in as many steps as the connection has room for. A connection that does not read is given what it
    waits for: its slices come one after the other."""
    view = memoryview(data)
    while len(view):
        while connection._later is not None and not connection.is_lost:
            connection._later.cancel()
            connection._go_on()
        room = connection.get_buffer(-1)
        size = min(len(room), len(view))
        room[:size] = view[:size]
        view = view[size:]
        connection.buffer_updated(size)
    while connection._later is not None and not connection.is_lost:
        connection._later.cancel()
        connection._go_on()
