"""gRPC's messages on a stream of HTTP/2: a byte that is 0 (not compressed), four of the length, and the message.

A message that has come whole is handed on. Of a longer one the place is made when its length is known, and the
connection reads into it. A message is as long as its receiver takes, or it is refused by its length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

from ..http2.connection import DIRECT_BYTES, Http2Stream
from ..http2.patience import REFUSED
from ..memory.arrivals import Arrivals

PREFIX = struct.Struct("!BI")
PREFIX_BYTES = 5
MESSAGES_AT_ONCE = 256
"""Most messages of a stream before its connection looks at the clock; one takes about 1 µs."""


prefix: Callable[[int], bytes] = partial(PREFIX.pack, 0)
"""Returns the prefix of a message of so many bytes."""


class MessageStream(Http2Stream):
    """A stream of messages. `in_bytes_max`: of a message. The subclass says what becomes of a message, and of one that
    is refused."""

    __slots__ = (
        "_arrivals", "_cost", "_early", "_ended_early", "_filled", "_has_waiting", "_message", "_place", "_prefix",
        "_size", "in_bytes_max",
    )  # fmt: skip

    def __init__(self, in_bytes_max: int, arrivals: Arrivals | None = None) -> None:
        """Begins a stream. `arrivals`: what bounds the places of long messages; None: nothing does."""
        super().__init__()
        self._arrivals = arrivals
        self._early: bytearray | None = None  # what came of a long message that has no place yet, and after it …
        self._size = 0  # … how long it is …
        self._ended_early = False  # … and whether the other end has sent all
        self.in_bytes_max = in_bytes_max
        self._prefix = b""  # torn
        self._message: bytearray | None = None
        self._place = memoryview(b"")
        self._filled = 0
        self._cost = 0  # bytes of the window that the message took so far
        self._has_waiting = False  # a message came and is not read

    def message_came(self, data: bytes | bytearray, cost: int) -> None:
        """Called with a message. `cost`: what the service says when it has `read` it."""
        raise NotImplementedError

    def message_refused(self, size: int) -> None:
        """Called for a message of `size` bytes, which are too many; or it is compressed (-1)."""
        raise NotImplementedError

    @property
    def is_torn(self) -> bool:
        """Whether a message has begun and is not whole."""
        return self._message is not None or self._early is not None or bool(self._prefix)

    def data_came(self, data: memoryview) -> int:
        offset, end, whole = 0, len(data), 0
        size: int
        while offset < end and self.connection is not None:
            if whole == MESSAGES_AT_ONCE:
                return offset
            if self._message is not None:
                part = min(len(self._message) - self._filled, end - offset)
                self._place[self._filled : self._filled + part] = data[offset : offset + part]
                offset += part
                self._filled_by(part)
                continue
            if self._early is not None:
                self._early += data[offset:]
                return end
            if self._prefix or end - offset < PREFIX_BYTES:
                part = min(PREFIX_BYTES - len(self._prefix), end - offset)
                self._prefix += data[offset : offset + part]
                offset += part
                if len(self._prefix) < PREFIX_BYTES:
                    return end
                compressed, size = PREFIX.unpack(self._prefix)
                self._prefix = b""
            else:
                compressed, size = PREFIX.unpack_from(data, offset)
                offset += PREFIX_BYTES
            if compressed or size > self.in_bytes_max:
                self.connection.patience.charge(REFUSED)
                self.message_refused(-1 if compressed else size)
                return end
            if end - offset >= size:
                self._has_waiting = True
                self.message_came(bytes(data[offset : offset + size]), size + PREFIX_BYTES)
                offset += size
                whole += 1
            else:
                self._begin(size)
        return end

    def _begin(self, size: int) -> None:
        is_long = self._arrivals is not None and 2 * size > self._window
        if is_long and not (self.is_read and self._arrivals.begin(self, size)):  # type: ignore[union-attr]
            self._early, self._size = bytearray(), size
        else:
            self._make_place(size)

    def _make_place(self, size: int) -> None:
        self._early, self._message, self._filled, self._cost = None, bytearray(size), 0, PREFIX_BYTES
        self._place = memoryview(self._message)

    def window_opened(self) -> None:
        """Called when the service reads the stream: a long message that began before is read on."""
        if self._early is not None and self._arrivals is not None and self._arrivals.begin(self, self._size):
            self.place()

    def place(self) -> None:
        """Makes the place of the long message: there is room for it."""
        early = self._early
        assert early is not None, "it waits"
        self._make_place(self._size)
        first = min(len(early), self._size)
        came = memoryview(early)
        self._place[:first] = came[:first]
        self._filled_by(first)
        while first < len(early):
            first += self.data_came(came[first:])
        if self._ended_early and self._early is None:
            self.input_ended()

    def ends_early(self) -> bool:
        """Whether the input has ended while a message waits for its place: `input_ended` is called again after it."""
        self._ended_early = self._early is not None
        return self._ended_early

    def too_slow(self) -> None:
        """Called when others wait for the room of the message: the stream ends."""
        raise NotImplementedError

    def forget_message(self) -> None:
        """Drops the message: the stream is over, or is not read any more."""
        self._early = None
        if self._arrivals is not None:
            self._arrivals.end(self)

    def direct_room(self) -> memoryview | None:
        if self._message is None or len(self._message) - self._filled < DIRECT_BYTES:
            return None
        return self._place[self._filled :]

    def direct_came(self, size: int) -> None:
        self._filled_by(size)

    def _filled_by(self, size: int) -> None:
        message = self._message
        assert message is not None
        self._filled += size
        self._cost += size
        self._credit_long()
        if self._filled == len(message):
            self._message, self._place, self._has_waiting = None, memoryview(b""), True
            if self._arrivals is not None:
                self._arrivals.whole(self)
            self.message_came(message, self._cost)

    def read(self, cost: int) -> None:
        """Notes that the service has read all messages that came, of this `cost`."""
        self._has_waiting = False
        if self._arrivals is not None:
            self._arrivals.read(self)
        if self.connection is not None:
            self.connection.window.consumed(self, cost)
            if self._message is not None:
                self._credit_long()

    def _credit_long(self) -> None:
        """Credits a message that would fill half of the window as it comes, while none waits to be read."""
        message, connection = self._message, self.connection
        if message is None or 2 * len(message) <= self._window or self._has_waiting or not self.is_read:
            return
        if connection is not None:
            connection.window.consumed(self, self._cost)
            self._cost = 0
