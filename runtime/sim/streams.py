"""An end of a simulated gRPC stream: coalescing, back-pressure, order, and the four ways in which a stream ends.

| ends with | `receive`, after the items that arrived | `send` |
|---|---|---|
| the other side closed it | EndOfStream | ConnectionLost (a half-closed client still takes answers) |
| the handler raised | that error | ConnectionLost |
| cut, crash, the other side cancelled | ConnectionLost | ConnectionLost |
| `cancel` or `close` on this side | ConnectionLost | ConnectionLost |

The messages are in rpc.py; the real counterpart is `GrpcStream` in runtime/grpc/stream.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError, Message

from ...proto import errors
from ...proto import wire_pb2 as wire
from ...proto.checksum import encode_varint
from ..network import COALESCE_BYTES, STREAM_QUEUE_BYTES, EndOfStream, Pieces
from .wires import ConnectionEnd

if TYPE_CHECKING:
    from .world import SimProcess

WINDOW_BYTES = 4 << 20
"""Bytes in transit or unread in one direction of a stream (HTTP/2's window)."""

CLOSE_TIMEOUT_S = 10.0
"""Seconds that an orderly close of a stream waits for the other side before it cancels (as runtime/grpc/client.py)."""


class SimStream:
    """One end of a simulated gRPC stream (`runtime.network.Stream`); `attach` connects it to its cable.

    `envelope` is the type of the messages that arrive. Items are serialised when they are sent, as in the real stream,
    and parsed when they are received; an item may also be given as its bytes.
    """

    def __init__(self, envelope: type[Message], path: str, owner: SimProcess, *, is_client: bool) -> None:
        self._envelope = envelope
        self.path = path
        self._owner = owner
        self._is_client = is_client
        self._end: ConnectionEnd | None = None
        self._id = 0
        self._forget: Callable[[], object] = _nothing
        self._out: deque[bytes] = deque()
        self._queued_bytes = 0
        self._left_bytes = 0
        self._on_the_way = 0
        self._flushing = False
        self._half_closed = False
        self._half_sent = False
        self._in: list[bytes] = []
        self._in_over = False  # the other end has closed in order
        self._broken: errors.MagnetarError | None = None  # what senders get; the stream has ended
        self._failure: errors.MagnetarError | None = None  # what `receive` raises after the last item
        self._reading = False
        self._waiters: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ sending
    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def sent_bytes(self) -> int:
        return self._left_bytes

    async def wait_sent(self, offset: int) -> None:
        while self._left_bytes < offset and not self.is_broken:
            await self.wait_changed()
        self._check_open()

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def send_nowait(self, item: Message | bytes | Pieces) -> None:
        self._check_open()
        if isinstance(item, tuple):
            item = b"".join(item)
        data = item if isinstance(item, bytes) else item.SerializeToString(deterministic=True)
        piece = b"\x0a" + encode_varint(len(data)) + data
        self._out.append(piece)
        self._queued_bytes += len(piece)
        self._flush_soon()

    async def send(self, item: Message | bytes | Pieces) -> None:
        if self._queued_bytes > STREAM_QUEUE_BYTES:
            await self.wait_drained()
        self.send_nowait(item)

    async def wait_drained(self, bytes_max: int = STREAM_QUEUE_BYTES) -> None:
        while self._queued_bytes > bytes_max and not self.is_broken:
            await self.wait_changed()
        self._check_open()

    async def close(self) -> None:
        """Closes the stream. A client half-closes after the queued items and waits for the other end (CLOSE_TIMEOUT_S).
        Never raises.
        """
        if not self._is_client:
            return
        self._half_closed = True
        self._flush_soon()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while not self.is_broken:
                    if not self._reading:
                        self._in.clear()
                    await self.wait_changed()
        except TimeoutError:
            self.cancel()
        finally:
            self.end_with(errors.ConnectionLost("the stream was closed"))

    def cancel(self) -> None:
        if not self.is_broken:
            error = errors.ConnectionLost(f"{self.path}: the stream was cancelled")
            if self._end is not None and self._is_client:
                self._end.send(("cancel", self._id), f"cancel {self._id}")
            elif self._end is not None:
                data = errors.to_wire(error).SerializeToString(deterministic=True)
                self._end.send(("end", self._id, data), f"end {self._id} cancelled")
            self.end_with(error)

    def _check_open(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(self._broken.message, **self._broken.fields)

    def _flush_soon(self) -> None:
        if not self._flushing and self._end is not None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush, context=self._owner.context)

    def flush(self) -> None:
        self._flushing = False
        while self._out and self._on_the_way < WINDOW_BYTES and not self.is_broken:
            self._send_envelope()
        if self._half_closed and not self._out and not self._half_sent and not self.is_broken:
            assert self._end is not None
            self._half_sent = True
            self._end.send(("half", self._id), f"half {self._id}")

    def _send_envelope(self) -> None:
        """Sends one message with queued items, up to COALESCE_BYTES."""
        assert self._end is not None
        pieces: list[bytes] = []
        size = 0
        while self._out and (size == 0 or size + len(self._out[0]) <= COALESCE_BYTES):
            pieces.append(self._out.popleft())
            size += len(pieces[-1])
        self._queued_bytes -= size
        self._left_bytes += size
        self._on_the_way += size
        self._end.send(("items", self._id, b"".join(pieces)), f"items {self._id} {len(pieces)} {size} B")
        self._wake()

    # ------------------------------------------------------------------ receiving
    async def receive(self) -> Sequence[Any]:
        assert not self._reading, "one reader of a stream at a time"
        self._reading = True
        try:
            while not self._in:
                if self._failure is not None:
                    raise self._failure
                if self._in_over:
                    raise EndOfStream
                await self.wait_changed()
            return self._take()
        finally:
            self._reading = False

    def _take(self) -> list[Any]:
        taken, self._in = self._in, []
        size = sum(map(len, taken))
        if self._end is not None and not self.is_broken:
            self._end.send(("credit", self._id, size), f"credit {self._id} {size}")
        items: list[Any] = []
        for data in taken:
            try:
                items.extend(self._envelope.FromString(data).items)  # type: ignore[attr-defined]
            except DecodeError as error:
                self.cancel()
                raise errors.WrongProtocol(f"a stream message that is no {self._envelope.__name__}: {error}") from error
        return items

    def on_message(self, message: tuple[Any, ...]) -> None:
        if self.is_broken:
            return
        match message[0]:
            case "items":
                self._in.append(message[2])
            case "credit":
                self._on_the_way -= message[2]
                self._flush_soon()
            case "half":
                self._in_over = True
            case "end" if message[2]:
                self.end_with(errors.from_wire(wire.Error.FromString(message[2])))
            case "end":
                self._in_over = True
                self.end_with(errors.ConnectionLost(f"{self.path}: the other end closed the stream"), in_order=True)
            case _:
                raise AssertionError(f"a stream message {message[0]}")
        self._wake()

    def end_with(self, error: errors.MagnetarError, *, in_order: bool = False) -> None:
        """Ends the stream: senders get `error` (ConnectionLost). `receive` raises it after the received items, or
        EndOfStream if the stream ended in order.
        """
        if self._broken is not None:
            return
        if not in_order:
            self._failure = error
        self._broken = errors.ConnectionLost(error.message, **error.fields)
        self._out.clear()
        self._queued_bytes = 0
        self._forget()
        self._wake()

    def attach(self, end: ConnectionEnd, id_: int, forget: Callable[[], object]) -> None:
        self._end, self._id, self._forget = end, id_, forget
        if self._out or self._half_closed:
            self._flush_soon()

    async def wait_changed(self) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(changed)
        await changed

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)


def _nothing() -> None:
    return
