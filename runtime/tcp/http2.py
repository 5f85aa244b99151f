"""A connection of HTTP/2 (RFC 9113), the same for both ends: frames, windows, settings, pings and the end.

Below it is an asyncio transport, in clear or TLS. Above it are the streams (`Http2Stream`), whose service is gRPC
(`runtime/grpc/`). This module has no task and no queue: received data is passed on in the step that read it, and sent
data is given to the transport in the step that wrote it.

**In.** All connections of a thread read into one buffer (`READ_BUFFER_BYTES`); only a frame that has arrived in part is
stored. The rest of a long message is read straight into the place that its stream names (`direct_read_buffer`).
**Out.** `send_data` takes as much as the windows of the other end and the transport allow; a stream that waits for room
gets `on_writable`.
**Windows.** A stream has DEFAULT_WINDOW_BYTES, and the connection too, until its service reads it
(`ReceiveWindow.open`): so a caller that is not authenticated (a stranger) can make this process store no more. Bytes
that the service has read are credited (`credit_stream`).
**Slices.** In a turn of the loop a connection handles received bytes for at most TURN_SLICE_S. Further bytes wait
(`_rest`), the socket is not read meanwhile, and other connections have their turn. A slice also ends when more than
CHARGE_PER_TURN_MAX was charged in it (see below), and the connection then rests for SLICE_PAUSE_S: so a flood of frames
gets a tenth of the loop's time. At a server all resting connections, and all whose callers are not authenticated, get
such a part together (runtime/tcp/share.py), however many they are.
**Patience.** Frames that carry nothing (pings, settings, window updates without sent bytes, resets, empty DATA, …) and
refused calls are charged to the allowance of the connection (`FrameAllowance` in http2_frames.py). When the allowance
is used up, the connection ends with ENHANCE_YOUR_CALM.
**Liveness.** A timer checks the connection every LIVENESS_CHECK_S. It counts checks and not seconds, so that a process
that was paused ends no connection for the time of the pause. After CHECKS_BEFORE_PING checks without received bytes it
sends a PING; after CHECKS_BEFORE_ABORT the connection is lost. `is_answering` pings on behalf of a service that wants
to know earlier (client/connect/discovery.py), and ends nothing.

A violation by the other end ends the stream (RST_STREAM) or, as `Http2Violation`, the connection (GOAWAY).
`Http2Connection.check` checks the windows. Guarding tests: tests/runtime/tcp/.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
from collections import deque
from time import perf_counter
from typing import Any, Generic, TypeVar, cast

from ...proto.errors import ConnectionLost, MagnetarError
from ..files import Buffer
from . import http2_frames as frames
from .http2_frames import (
    CHARGE_PER_TURN_MAX,
    CONTINUATION,
    DATA,
    FLAG_PADDED,
    HEADER_BYTES_MAX,
    LIGHT_CHARGE_MAX,
    REFUSED_CALL_CHARGE,
    STRANGER_CHARGE_PER_TURN,
    FrameAllowance,
    HeaderBlocks,
    HeaderDecoder,
    Http2ErrorCode,
    Http2Setting,
    Http2Violation,
    strip_padding,
)
from .share import QueuedTurn

READ_BUFFER_BYTES = 256 << 10
DIRECT_READ_BYTES = 64 << 10
"""Bytes that a message lacks from which on it is read straight into its place."""
FRAME_BYTES_MAX = (1 << 20) + (64 << 10)
"""Most bytes of DATA in a frame that this end takes: an envelope. It holds up the other streams of its connection for
half a millisecond."""
CONTROL_BYTES_MAX = 16 << 10
"""Most bytes of a frame of another kind than DATA."""
STREAM_WINDOW_BYTES = 2 << 20
"""Window of a stream that is read: two full envelopes, one that is processed and one that comes."""
CONNECTION_WINDOW_BYTES = 16 << 20
"""Window of a server's connection with a stream that is read. A client takes all that its server sends (each stream has
its own window), so that a stream that is not read holds up no other."""
UNSENT_CONTROL_BYTES_MAX = 1 << 20
"""Most bytes that no window bounds and the other end does not read: headers, resets, answers to pings and settings.
Above it, the connection is cut."""
WRITE_BUFFER_BYTES = 1 << 20
"""Bytes that a transport keeps before the streams wait."""
UNSENT_BYTES_MAX = WRITE_BUFFER_BYTES + FRAME_BYTES_MAX + UNSENT_CONTROL_BYTES_MAX
"""Most bytes in a transport: what streams may have given to it, with the last frame that it took, and what no window
bounds."""
JOINED_WRITE_BYTES_MAX = 16 << 10
"""Size of a payload below which it is copied after its header, which costs less than a second write."""

TURN_SLICE_S = 0.001
"""Seconds of handling what came, for a connection in a turn of the loop."""
PARSED_SLICE_BYTES = 2 << 10
"""Bytes between two looks at the clock: of the shortest frames there are 230, which take 0.3 ms."""
SLICE_S_PER_CALL = 0.0001
"""Seconds of a slice that count for a call that begins: its task runs after the slice."""

SLICE_PAUSE_S = 0.002

STRANGER_SLICE_BYTES = 256
"""Bytes of the slice of a stranger that has waited, and between two looks at it: many wait."""
SMALL_DATA_BYTES = 64
"""Bytes of DATA below which it costs more than it carries, before the stream's service reads it."""

LIVENESS_CHECK_S = 2.5
HANDSHAKE_CHECKS = 2
CHECKS_BEFORE_PING = 4
CHECKS_BEFORE_ABORT = 6
LAST_WRITES_S = 10.0

_LOG = logging.getLogger("magnetar.rpc")

T = TypeVar("T")


_OF_THREAD = threading.local()


def _buffer() -> memoryview:
    """Returns the buffer into which all connections of this thread read. It is not an attribute of a subclass of
    `threading.local`: compiled, such attributes would be the same in all threads.
    """
    view: memoryview | None = getattr(_OF_THREAD, "view", None)
    if view is None:
        view = _OF_THREAD.view = memoryview(bytearray(READ_BUFFER_BYTES))
    return view


class Http2Stream:
    """One stream of an HTTP/2 connection. A service overrides the methods, and the connection calls them. `connection`
    is None before the stream is opened and after it has ended."""

    __slots__ = (
        "_owed", "_window", "connection", "has_head", "id", "in_ended", "is_read", "is_shut", "out_ended",
        "receive_left", "send_left", "unread",
    )  # fmt: skip

    def __init__(self) -> None:
        self.connection: Http2Connection[Any] | None = None  # None: not opened yet, or over
        self.id = 0
        self.send_left = 0  # window of the other end
        self.receive_left = self._window = frames.DEFAULT_WINDOW_BYTES  # of this one
        self._owed = 0  # read, and not credited yet
        self.unread = 0  # came, and not read by the service
        self.is_read = False  # its service reads it; before that it gets no more than its first window
        self.in_ended = self.out_ended = False
        self.has_head = False  # of the other end: what comes after it are trailers
        self.is_shut = False  # something is to be sent, and the other end's window of the stream has no room

    def on_headers(self, head: Any, ended: bool) -> None:
        """Called when a header block has arrived: the headers or the trailers of an answer. `head`: the result of the
        connection's decoder. `ended`: the other end sends nothing more on this stream."""

    def on_data(self, data: memoryview) -> int:
        """Called with received data, which is valid only during the call. Returns how many bytes were accepted. If
        these are fewer than all, because handling them takes much work, the method is called again with the rest. Data
        that is stored for later must be credited to the receive window when it is read (`ReceiveWindow.credit_stream`).
        May raise Http2Violation, which ends the connection."""
        return len(data)

    def direct_read_buffer(self) -> memoryview | None:
        """Returns the memory into which the connection must read the next bytes of a long message; None if no long
        message is arriving."""
        return None

    def on_direct_read(self, size: int) -> None:
        """Called when `size` bytes were read into the memory of `direct_read_buffer`."""

    def on_input_ended(self) -> None:
        """Called when the other end has finished sending on this stream."""

    def on_writable(self) -> None:
        """Called when the stream can probably send data again, after `send_data` could not send all."""

    def on_lost(self, error: MagnetarError, code: int | None) -> None:
        """Called once when the stream has ended with an error. `code`: the code with which the other end has reset the
        stream; None if the connection is lost, or this end has ended the stream."""


class Http2Output:
    """The sending side of a connection: passes frames to the transport, as far as the transport and the windows of the
    other end allow. When a stream that had to wait may send again, its `on_writable` is called."""

    __slots__ = (
        "_connection", "_cutting", "blocked", "is_paused", "peer_frame", "peer_window", "send_left", "transport",
    )  # fmt: skip

    transport: asyncio.Transport

    def __init__(self, connection: Http2Connection[Any]) -> None:
        self._connection = connection
        self.send_left = frames.DEFAULT_WINDOW_BYTES
        self.peer_window = frames.DEFAULT_WINDOW_BYTES
        self.peer_frame = frames.DEFAULT_FRAME_BYTES
        self.is_paused = False
        self.blocked: dict[Http2Stream, None] = {}
        self._cutting: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:
        """Writes an encoded frame to which flow control does not apply. Does nothing on a lost connection. If more than
        UNSENT_BYTES_MAX are unsent, because the other end does not read the answers to its requests, the connection is
        aborted. The abort happens in a later step of the loop, because the caller may be in the middle of a change of a
        stream."""
        if self._connection.is_lost:
            return
        if self.is_paused and self._cutting is None and self.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            lost = ConnectionLost(f"{self._connection.peer} does not read the answers to what it asks")
            self._cutting = self._connection.loop.call_soon(self._connection.abort, lost)
        if self._cutting is None:
            self.transport.write(data)

    def send_headers(self, stream: Http2Stream, block: bytes, *, ends: bool, data: bytes = b"") -> None:
        """Sends the header block, and `data` in the same write. `ends`: the last frame ends this end's side of the
        stream. If there is data, the caller must have checked with `may_send_whole` that it may be sent."""
        framed = frames.encode_header_block(
            stream.id, block, frames.END_STREAM if ends and not data else 0, self.peer_frame
        )
        if data:
            stream.send_left -= len(data)
            self.send_left -= len(data)
            flags = frames.END_STREAM if ends else 0
            framed += frames.encode_frame_header(len(data), DATA, flags, stream.id) + data
        self.write(framed)
        if ends:
            self._connection.on_output_ended(stream)

    def send_whole_answer(self, stream: Http2Stream, head: bytes, data: bytes, trailers: bytes) -> None:
        """Sends a complete answer in one write: its headers, its data and its trailers. The caller must have checked
        with `may_send_whole` that the data may be sent."""
        id_, size = stream.id, len(data)
        stream.send_left -= size
        self.send_left -= size
        self.write(b"".join((
            frames.encode_header_block(id_, head, 0, self.peer_frame), frames.encode_frame_header(size, DATA, 0, id_),
            data, frames.encode_header_block(id_, trailers, frames.END_STREAM, self.peer_frame),
        )))  # fmt: skip
        self._connection.on_output_ended(stream)

    def may_send_whole(self, stream: Http2Stream, size: int) -> bool:
        """Returns whether `size` bytes of data may be sent on the stream now, as one frame."""
        return size <= min(stream.send_left, self.send_left, self.peer_frame) and not self.is_paused

    def send_data(self, stream: Http2Stream, data: memoryview, *, ends: bool = False) -> int:
        """Sends as much of `data` as the windows and the transport allow now, and returns how many bytes that were (0
        on a lost connection). If some bytes are left, the stream's `on_writable` is called later. With `ends`, the last
        byte ends this end's side of the stream. `data` must not be changed afterwards."""
        size, sent, id_ = len(data), 0, stream.id
        while not self.is_paused and not self._connection.is_lost:
            part = min(size - sent, stream.send_left, self.send_left, self.peer_frame)
            if part <= 0 and (size - sent or not ends):
                break
            stream.send_left -= part
            self.send_left -= part
            last = ends and sent + part == size
            head = frames.encode_frame_header(part, DATA, frames.END_STREAM if last else 0, id_)
            if part <= JOINED_WRITE_BYTES_MAX:
                self.transport.write(head + data[sent : sent + part])
            else:
                self.transport.write(head)
                self.transport.write(data[sent : sent + part])
            sent += part
            if sent == size:
                if last:
                    self._connection.on_output_ended(stream)
                return sent
        if sent < size or ends:
            self._waits(stream, size - sent)
        return sent

    def send_parts(self, stream: Http2Stream, parts: deque[Buffer], size: int) -> int:
        """Sends the buffers in `parts` (`size` bytes together) like `send_data`, and returns the number of sent bytes.
        Removes the sent bytes from `parts`, without copying the rest."""
        sent, id_ = 0, stream.id
        while not self.is_paused and not self._connection.is_lost:
            left = part = min(size - sent, stream.send_left, self.send_left, self.peer_frame)
            if part <= 0:
                break
            stream.send_left -= part
            self.send_left -= part
            leaving: list[Buffer] = [frames.FRAME_HEADER_STRUCT.pack(part >> 8, part & 0xFF, DATA, 0, id_)]
            while left:
                first = parts[0]
                if len(first) <= left:
                    leaving.append(parts.popleft())
                    left -= len(first)
                else:
                    view = memoryview(first)
                    leaving.append(view[:left])
                    parts[0], left = view[left:], 0
            if part <= JOINED_WRITE_BYTES_MAX:
                self.transport.write(b"".join(leaving))
            else:
                self.transport.writelines(leaving)
            sent += part
            if sent == size:
                return sent
        self._waits(stream, size - sent)
        return sent

    def _waits(self, stream: Http2Stream, left: int) -> None:
        """Makes the stream wait for room: for its own window, or for that of the connection and the transport. An end
        without data needs no window.
        """
        if left and stream.send_left <= 0:
            stream.is_shut = True
        else:
            self.blocked[stream] = None

    def resume_streams(self) -> None:
        """Calls `on_writable` of the streams that wait for the connection, one after the other, while the connection
        can send. Streams that wait for their own window are not called."""
        blocked = self.blocked
        while blocked and not self.is_paused and self.send_left > 0 and not self._connection.is_lost:
            stream = next(iter(blocked))
            del blocked[stream]
            stream.on_writable()

    def change_send_windows(self, change: int) -> None:
        """Adds `change`, which may be negative, to the send windows of all streams, as a SETTINGS frame requires.
        Called once for each frame, although a frame may contain this setting thousands of times. Raises Http2Violation
        if a window becomes too large, or if the connection's allowance of frames is used up."""
        self._connection.allowance.charge_frames(len(self._connection.streams) // 10)
        for stream in list(self._connection.streams.values()):
            stream.send_left += change
            if stream.send_left > frames.WINDOW_BYTES_MAX:
                raise Http2Violation(Http2ErrorCode.FLOW_CONTROL_ERROR, "a window above its maximum")
            self.on_window_opened(stream)

    def on_window_opened(self, stream: Http2Stream) -> None:
        """Called when the other end has enlarged the send window of the stream. If the stream has waited for its
        window, calls its `on_writable` now, or later if the connection is blocked."""
        if stream.is_shut and stream.send_left > 0 and stream.connection is not None:
            stream.is_shut = False
            if self.is_paused or self.send_left <= 0:
                self.blocked[stream] = None
            else:
                stream.on_writable()

    def stop(self) -> None:
        """Called when the connection has ended: drops the streams that wait for room."""
        if self._cutting is not None:
            self._cutting.cancel()
        self.blocked.clear()


class ReceiveWindow:
    """The receive window of a connection (the number of bytes that the other end may still send), and the receive
    windows of its streams."""

    __slots__ = ("_connection", "left", "owed", "size")

    def __init__(self, connection: Http2Connection[Any]) -> None:
        self._connection = connection
        self.size = self.left = frames.DEFAULT_WINDOW_BYTES
        self.owed = 0  # read, and not credited yet

    def open(self, stream: Http2Stream, window: int = STREAM_WINDOW_BYTES) -> None:
        """Called when the service begins to read a stream: enlarges the receive window of the stream to `window` bytes
        unless it is larger, and the window of the connection to its full size."""
        stream.is_read = True
        if stream._window < window:
            more, stream._window = window - stream._window, window
            stream.receive_left += more
            if not stream.in_ended:
                self._connection.out.write(frames.encode_window_update(stream.id, more))
        self.widen_to_maximum()

    def widen_to_maximum(self) -> None:
        """Enlarges the window of the connection to CONNECTION_WINDOW_BYTES bytes, and tells the other end. Does nothing
        if it has this size."""
        if self.size < CONNECTION_WINDOW_BYTES:
            more, self.size = CONNECTION_WINDOW_BYTES - self.size, CONNECTION_WINDOW_BYTES
            self.left += more
            self._connection.out.write(frames.encode_window_update(0, more))

    def credit_stream(self, stream: Http2Stream, size: int) -> None:
        """Lets the other end send `size` more bytes on the stream, because the service has read `size` bytes. The
        credit is sent when it is a quarter of the window."""
        stream.unread -= size
        if not self._connection.credits_at_once:
            self.owed += size
            if self.owed * 4 >= self.size:
                self.credit_connection()
        stream._owed += size
        if stream._owed * 4 >= stream._window and not stream.in_ended and stream.connection is not None:
            self._connection.out.write(frames.encode_window_update(stream.id, stream._owed))
            stream.receive_left += stream._owed
            stream._owed = 0

    def credit_connection(self, size: int = 0) -> None:
        """Lets the other end send `size` more bytes on the connection. The credit is sent when it is a quarter of the
        window."""
        self.owed += size
        if self.owed * 4 >= self.size and not self._connection.is_lost:
            self._connection.out.write(frames.encode_window_update(0, self.owed))
            self.left += self.owed
            self.owed = 0


class Http2LivenessCheck:
    """Detects that the other end of a connection is dead: counts the checks in a row in which nothing was received.
    Counts checks, not seconds, so that a paused process does not end its connections."""

    __slots__ = ("_answer", "_connection", "_looks", "_silent", "received", "timer")

    def __init__(self, connection: Http2Connection[Any]) -> None:
        self._connection = connection
        self.received = False
        self._silent = 0
        self._looks = 0
        self.timer: asyncio.TimerHandle | None = None
        self._answer: asyncio.Future[None] | None = None  # to a PING of `is_answering`

    def check_alive(self) -> None:
        """Called every LIVENESS_CHECK_S seconds, and sets the timer for the next call. After CHECKS_BEFORE_PING calls
        in a row without any received bytes it sends a PING; after CHECKS_BEFORE_ABORT it aborts the connection. Also
        aborts it if the other end has not sent its settings after HANDSHAKE_CHECKS calls."""
        connection = self._connection
        self.timer = connection.loop.call_later(LIVENESS_CHECK_S, self.check_alive)
        self._looks += 1
        self._silent = 0 if self.received else self._silent + 1
        self.received = False
        if not connection.is_ready and self._looks >= HANDSHAKE_CHECKS:
            connection.abort(
                ConnectionLost(f"{connection.peer} sent no settings in {HANDSHAKE_CHECKS * LIVENESS_CHECK_S:g} s")
            )
        elif self._silent == CHECKS_BEFORE_PING:
            connection.out.write(frames.encode_ping(b"magnetar"))
        elif self._silent >= CHECKS_BEFORE_ABORT:
            connection.abort(ConnectionLost(f"{connection.peer} answers no ping"))
        else:
            connection.on_liveness_check(self._looks)

    async def is_answering(self, timeout_s: float) -> bool:
        """Sends a PING. Returns True if the other end answers this PING, or an earlier one, within `timeout_s` seconds;
        else False. Never ends the connection."""
        if self._answer is None:
            self._answer = self._connection.loop.create_future()
        self._connection.out.write(frames.encode_ping(b"magnetar"))
        done, _ = await asyncio.wait((self._answer,), timeout=timeout_s)
        return bool(done)

    def on_ping(self, flags: int, id_: int, payload: bytes) -> None:
        """Called when a PING frame has arrived. Answers it, or ends the waits of `is_answering` if it is an answer.
        Raises Http2Violation if the frame is malformed."""
        if id_ or len(payload) != 8:
            raise Http2Violation(_size_error(not id_), "a PING that is none")
        if not flags & frames.ACK:
            self._connection.out.write(frames.encode_ping(payload, frames.ACK))
        elif self._answer is not None:
            answer, self._answer = self._answer, None
            answer.set_result(None)


class Http2Connection(asyncio.BufferedProtocol, Generic[T]):
    """An HTTP/2 connection, the same for both ends; a subclass for each end overrides the methods below "for the ends".
    `T` is the type of a decoded header block."""

    def __init__(self, decoder: HeaderDecoder[T], first: bytes, settings: dict[Http2Setting, int]) -> None:
        """Creates a connection. `decoder` decodes the header blocks that arrive. `first` is sent before the settings (a
        client's preface); `settings` are those of this end."""
        self.loop = asyncio.get_running_loop()
        self._decoder = decoder
        self._first = first + frames.encode_settings(settings)
        self.peer = "?"
        self.streams: dict[int, Http2Stream] = {}
        self.is_lost = False
        self.is_greeted = True  # a server's is not, until the client's preface has come
        self.is_ready = False  # the other end's settings are here
        self.lost_for: MagnetarError | None = None
        self.peer_streams = frames.STREAM_MASK
        self.allowance = FrameAllowance(self.loop)
        self.out = Http2Output(self)
        self.window = ReceiveWindow(self)
        self.liveness = Http2LivenessCheck(self)
        self._leaves: asyncio.TimerHandle | None = None  # what was written has so long to leave
        # in
        self._view = _buffer()
        self._partial = bytearray()  # of a frame that is not DATA, or of a header
        self._frame_end = 0  # of the frame in `_partial`
        self._data_left = 0  # of the DATA frame that is being read
        self._data_ends = False
        self._data_stream: Http2Stream | None = None
        self._direct = False
        self._blocks = HeaderBlocks(self.allowance)
        self._room = 0  # what `get_buffer` gave
        self._is_full = False  # the last read filled it: the system may hand over more in the same turn
        self._until = 0.0  # of the slice
        self._rest = memoryview(b"")  # came, and waits for a later turn
        self._ahead = b""  # of the padded DATA that is being taken: comes before `_rest`
        self._later: asyncio.Handle | QueuedTurn | None = None

    # ------------------------------------------------------------------ for the ends
    def consume_preface(self, view: memoryview) -> memoryview:
        """Removes from the beginning of `view` the bytes that belong to the client's preface, and returns the rest.
        Called at a server until the preface is complete (`is_greeted`); a server must override it."""
        raise NotImplementedError

    def on_stream_opened(self, id_: int, head: T, ended: bool) -> None:
        """Called when the other end has opened a stream, with the decoded headers. `ended`: it sends nothing more on
        the stream. Raises Http2Violation at a client, where no server may open streams."""
        raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, f"a server opened stream {id_}")

    def is_idle(self, id_: int) -> bool:
        """Returns whether the stream with this id was never opened, by either end. Each end overrides it."""
        raise NotImplementedError

    def on_settings(self) -> None:
        """Called each time the settings of the other end have arrived and are applied."""

    def on_goaway(self, last: int, code: int, text: str) -> None:
        """Called when the other end accepts no more streams: it does not handle those with an id above `last`."""

    def on_liveness_check(self, looks: int) -> None:
        """Called at each check that finds the connection alive. `looks`: the number of checks since the connection was
        made."""

    def on_lost(self, error: MagnetarError) -> None:
        """Called once when the connection has ended with `error`, after the `on_lost` of its streams."""

    def on_stream_removed(self) -> None:
        """Called when a stream has ended on a connection that goes on."""

    credits_at_once = False
    """Whether the connection's window is credited for what came, not for what was read."""
    stream_window = frames.DEFAULT_WINDOW_BYTES
    """Window of each stream, before `ReceiveWindow.open`."""

    # ------------------------------------------------------------------ asyncio's protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        own = self.out.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        own.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.peer = get_peer_address(transport)
        own.write(self._first)
        self.liveness.timer = self.loop.call_later(LIVENESS_CHECK_S, self.liveness.check_alive)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._data_left > DIRECT_READ_BYTES and (stream := self._data_stream) is not None and stream.connection:
            room = stream.direct_read_buffer()
            if room is not None:
                self._direct = True
                room = room[: self._data_left]
                self._room = len(room)
                return room
        self._direct, self._room = False, READ_BUFFER_BYTES
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        self.liveness.received = True
        if not self._is_full:
            self._until = perf_counter() + TURN_SLICE_S
            self.allowance.charged = max(self.allowance.charged - CHARGE_PER_TURN_MAX, 0.0)
        self._is_full = nbytes >= self._room
        try:
            if self._direct:
                self._direct = False
                stream = self._data_stream
                assert stream is not None
                self._data_left -= nbytes
                stream.unread += nbytes
                if self.credits_at_once:
                    self.window.credit_connection(nbytes)
                stream.on_direct_read(nbytes)
                if self._data_ends and not self._data_left:
                    self._data_ended()
            elif not self.is_lost:
                view = self._view[:nbytes]
                if not self.is_greeted:
                    view = self.consume_preface(view)
                taken = 0 if not self.allowance.is_known and self.allowance.must_wait else self._read_frames(view)
                if (taken < len(view) or self._ahead) and not self.is_lost:
                    self._wait(memoryview(self._ahead + bytes(view[taken:])))
        except Exception as error:
            self._on_failure(error)
        if self._is_full and self._later is None and not self.is_lost and perf_counter() >= self._until:
            self._wait(self._rest)

    def _wait(self, rest: memoryview) -> None:
        """Ends the slice. `rest` is handled in a later turn; the socket is not read until then."""
        self._rest, self._ahead = rest, b""
        if self._later is None and not self.out.transport.is_closing():
            self.out.transport.pause_reading()
        tired = self.allowance.charged >= CHARGE_PER_TURN_MAX
        self._later = self._rest_later() if tired or self.allowance.must_wait else self.loop.call_soon(self._go_on)

    def _rest_later(self) -> asyncio.TimerHandle | QueuedTurn:
        if self.allowance.share is None:
            return self.loop.call_later(SLICE_PAUSE_S, self._go_on)
        if self.allowance.is_known:
            self.allowance.share.spend_frames(CHARGE_PER_TURN_MAX)  # of a stranger it is spent already
        return self.allowance.share.queue_connection_turn(self._go_on, is_light=self.allowance.drawn < LIGHT_CHARGE_MAX)

    def _go_on(self) -> None:
        was_lost = self.is_lost  # it is looked at again below: setup.py
        if was_lost:
            return
        self.liveness.received = True  # what waits here has come
        self._until = perf_counter() + TURN_SLICE_S
        patience = self.allowance
        least = 0.0 if patience.is_known else CHARGE_PER_TURN_MAX - STRANGER_CHARGE_PER_TURN
        patience.charged = max(patience.charged - CHARGE_PER_TURN_MAX, least)
        rest = self._rest
        try:
            taken = self._read_frames(rest)
        except Exception as error:
            self._on_failure(error)
            return
        if self.is_lost:
            return
        if taken < len(rest) or self._ahead:
            self._wait(memoryview(self._ahead + bytes(rest[taken:])) if self._ahead else rest[taken:])
            return
        self._rest, self._later, self._is_full = memoryview(b""), None, False
        if not self.out.transport.is_closing():
            self.out.transport.resume_reading()

    def _on_failure(self, error: Exception) -> None:
        if isinstance(error, Http2Violation):
            self.terminate_with_error(error.code, str(error))
        else:
            _LOG.error("a connection of %s failed", self.peer, exc_info=error)
            self.terminate_with_error(Http2ErrorCode.INTERNAL_ERROR, "internal error")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._leaves is not None:
            self._leaves.cancel()
        self._close_with(ConnectionLost(f"{self.peer}: the connection is lost" + (f": {exc}" if exc else "")))

    def pause_writing(self) -> None:
        self.out.is_paused = True

    def resume_writing(self) -> None:
        self.out.is_paused = False
        self.out.resume_streams()

    # ------------------------------------------------------------------ in
    def _read_frames(self, view: memoryview) -> int:
        """Handles received bytes until the slice is over; returns how many it took. Bytes in `_ahead` come before the
        rest.
        """
        step = PARSED_SLICE_BYTES if self.allowance.is_known else STRANGER_SLICE_BYTES
        offset, end, look = 0, len(view), step
        unpack = frames.FRAME_HEADER_STRUCT.unpack_from
        while offset < end and not self.is_lost:
            if offset >= look:
                if (
                    perf_counter() >= self._until
                    or self.allowance.charged >= CHARGE_PER_TURN_MAX
                    or self.allowance.must_wait
                ):
                    return offset
                look = offset + step
            if self._data_left:
                size = min(self._data_left, end - offset)
                taken = self._take_data(view[offset : offset + size], size)
                offset += taken
                if taken < size:
                    look = offset
                continue
            if self._partial:
                offset = self._take_part(view, offset)
                if self._ahead:
                    return offset
                continue
            if end - offset < frames.FRAME_HEADER_BYTES:
                self._partial += view[offset:]
                return end
            high, low, kind, flags, id_ = unpack(view, offset)
            length = high << 8 | low
            if kind == DATA and not flags & FLAG_PADDED:
                offset += frames.FRAME_HEADER_BYTES
                self._data_begins(length, flags, id_ & frames.STREAM_MASK)
                continue
            self._check_length(kind, length)
            after: int = offset + frames.FRAME_HEADER_BYTES + length
            if after > end:
                self._frame_end = frames.FRAME_HEADER_BYTES + length
                self._partial += view[offset:]
                return end
            self._take_frame(
                kind, flags, id_ & frames.STREAM_MASK, bytes(view[offset + frames.FRAME_HEADER_BYTES : after])
            )
            look = offset = after  # it may be much work
            if self._ahead:
                return offset
        return end

    def _take_part(self, view: memoryview, offset: int) -> int:
        """Takes more bytes of a frame that has arrived in part; returns the offset after them."""
        partial = self._partial
        want = self._frame_end if len(partial) >= frames.FRAME_HEADER_BYTES else frames.FRAME_HEADER_BYTES
        part = view[offset : offset + want - len(partial)]
        partial += part
        offset += len(part)
        if len(partial) < want:
            return offset
        high, low, kind, flags, id_ = frames.FRAME_HEADER_STRUCT.unpack_from(partial)
        length, id_ = high << 8 | low, id_ & frames.STREAM_MASK
        if kind == DATA and not flags & FLAG_PADDED:
            partial.clear()
            self._data_begins(length, flags, id_)
            return offset
        self._check_length(kind, length)
        self._frame_end = frames.FRAME_HEADER_BYTES + length
        if len(partial) == self._frame_end:
            payload = bytes(partial[frames.FRAME_HEADER_BYTES :])
            partial.clear()
            self._take_frame(kind, flags, id_, payload)
        return offset

    def _check_length(self, kind: int, length: int) -> None:
        if kind == DATA and length > self.window.left:  # padded: it is kept until it is whole
            raise Http2Violation(Http2ErrorCode.FLOW_CONTROL_ERROR, "DATA above the connection's window")
        limit = FRAME_BYTES_MAX if kind == DATA else HEADER_BYTES_MAX if kind in _OF_HEADERS else CONTROL_BYTES_MAX
        if length > limit:
            raise Http2Violation(
                Http2ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} has {length} bytes, more than {limit}"
            )

    def _data_begins(self, length: int, flags: int, id_: int, padding: int = 0) -> None:
        if self._blocks.continued is not None:
            raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "DATA within a header block")
        if not self.is_ready:
            raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "DATA before SETTINGS")
        if length > FRAME_BYTES_MAX:
            raise Http2Violation(
                Http2ErrorCode.FRAME_SIZE_ERROR, f"DATA of {length} bytes, more than {FRAME_BYTES_MAX}"
            )
        if length > self.window.left:
            raise Http2Violation(Http2ErrorCode.FLOW_CONTROL_ERROR, "DATA above the connection's window")
        self.window.left -= length
        stream = self.streams.get(id_)
        if stream is None:
            if not id_ or self.is_idle(id_):
                raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, f"DATA for stream {id_}, which is not open")
            if length < SMALL_DATA_BYTES or not self.allowance.is_known:
                self.allowance.charge_frames()
        elif stream.in_ended:
            self.reset(stream, Http2ErrorCode.STREAM_CLOSED, ConnectionLost("the other end sent data after its end"))
            stream = None
        elif length > stream.receive_left:
            self.reset(
                stream, Http2ErrorCode.FLOW_CONTROL_ERROR, ConnectionLost("the other end sent more than the window")
            )
            stream = None
        else:
            stream.receive_left -= length
            if length < SMALL_DATA_BYTES and not ((length and stream.is_read) or flags & frames.END_STREAM):
                self.allowance.charge_frames()
        self._data_stream, self._data_left = stream, length - padding
        self._data_ends = bool(flags & frames.END_STREAM)
        if padding:
            self.window.credit_connection(padding)
            if stream is not None:
                stream._owed += padding
        if self._data_ends and not self._data_left:
            self._data_ended()

    def _take_data(self, data: memoryview, size: int) -> int:
        """Gives data to its stream; returns how many of the `size` bytes it took."""
        stream, taken = self._data_stream, size
        if stream is None or stream.connection is None:
            self.window.credit_connection(size)
        else:
            stream.unread += size
            taken = stream.on_data(data)
            stream.unread -= size - taken
            if self.credits_at_once:
                window = self.window
                window.owed += taken
                if window.owed * 4 >= window.size:
                    window.credit_connection()
        self._data_left -= taken
        if self._data_ends and not self._data_left:
            self._data_ended()
        return taken

    def _data_ended(self) -> None:
        """Handles the end of the last DATA frame of its stream."""
        stream, self._data_stream = self._data_stream, None
        if stream is not None and stream.connection is not None:
            self._input_ended(stream)

    def _input_ended(self, stream: Http2Stream) -> None:
        stream.in_ended = True
        if stream.out_ended:
            self._remove_stream(stream)
        stream.on_input_ended()

    def _take_frame(self, kind: int, flags: int, id_: int, payload: bytes) -> None:
        if self._blocks.continued is not None and kind != CONTINUATION:
            raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "another frame within a header block")
        if not self.is_ready and kind != frames.SETTINGS:
            raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        match kind:
            case frames.HEADERS:
                self._header_block(self._blocks.start_header_block(flags, id_, payload))
            case frames.DATA:  # padded
                data, padding = strip_padding(flags, payload)
                if padding and len(data) < SMALL_DATA_BYTES:
                    self.allowance.charge_frames()
                self._data_begins(len(payload), flags, id_, padding)
                if data:
                    taken = self._take_data(memoryview(data), len(data))
                    self._ahead = data[taken:]
            case frames.WINDOW_UPDATE:
                self._take_window(id_, payload)
            case frames.PING:
                self.allowance.charge_frames()
                self.liveness.on_ping(flags, id_, payload)
            case frames.SETTINGS:
                self.allowance.charge_frames(1 + len(payload) // 24)
                self._take_settings(flags, id_, payload)
            case frames.RST_STREAM:
                self._take_reset(id_, payload)
            case frames.GOAWAY:
                self.allowance.charge_frames()
                if id_ or len(payload) < 8:
                    raise Http2Violation(_size_error(not id_), "a GOAWAY that is none")
                last, code = struct.unpack_from("!II", payload)
                self.on_goaway(last & frames.STREAM_MASK, code, payload[8:].decode("utf-8", "replace"))
            case frames.CONTINUATION:
                self._header_block(self._blocks.add_continuation(flags, id_, payload))
            case frames.PRIORITY:
                self.allowance.charge_frames()
                if not id_ or len(payload) != 5:
                    raise Http2Violation(_size_error(id_), "a PRIORITY that is none")
            case frames.PUSH_PROMISE:
                raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "a PUSH_PROMISE, which no end may send here")
            case _:
                self.allowance.charge_frames()  # a later kind (RFC 9113, 5.5)

    def _header_block(self, whole: tuple[int, int, bytes] | None) -> None:
        if whole is None:
            return  # its continuations have to come
        flags, id_, block = whole
        head = self._decoder.decode(block)  # also when no stream wants it: the decoder has state
        ended = bool(flags & frames.END_STREAM)
        stream = self.streams.get(id_)
        if stream is not None:
            if cost := self._decoder.cost:
                self.allowance.charge_frames(cost)
            if stream.in_ended:
                self.reset(
                    stream, Http2ErrorCode.STREAM_CLOSED, ConnectionLost("the other end sent headers after its end")
                )
                return
            if stream.has_head and not ended:
                self.reset(
                    stream, Http2ErrorCode.PROTOCOL_ERROR, ConnectionLost("the other end sent headers within its data")
                )
                return
            stream.has_head = True
            stream.on_headers(head, ended)
            if ended and stream.connection is not None:
                self._input_ended(stream)
        elif self.is_idle(id_):
            self._until -= SLICE_S_PER_CALL
            if not self.allowance.is_known:
                self.allowance.charged += REFUSED_CALL_CHARGE  # its task finds out later who calls
            self.on_stream_opened(id_, head, ended)
        else:
            self.allowance.charge_frames(self._decoder.cost + REFUSED_CALL_CHARGE)

    def _take_window(self, id_: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Violation(Http2ErrorCode.FRAME_SIZE_ERROR, "a WINDOW_UPDATE that is none")
        size = int.from_bytes(payload, "big") & frames.STREAM_MASK
        self.allowance.charge_window_update(id_, size, self.out.send_left)
        if not id_:
            self.out.send_left += size
            if not size or self.out.send_left > frames.WINDOW_BYTES_MAX:
                code = Http2ErrorCode.FLOW_CONTROL_ERROR if size else Http2ErrorCode.PROTOCOL_ERROR
                raise Http2Violation(code, "a window above its maximum, or an update by nothing")
            self.out.resume_streams()
            return
        stream = self.streams.get(id_)
        if stream is None:
            if self.is_idle(id_):
                raise Http2Violation(
                    Http2ErrorCode.PROTOCOL_ERROR, f"a WINDOW_UPDATE for stream {id_}, which is not open"
                )
            return
        stream.send_left += size
        if not size or stream.send_left > frames.WINDOW_BYTES_MAX:
            code = Http2ErrorCode.FLOW_CONTROL_ERROR if size else Http2ErrorCode.PROTOCOL_ERROR
            self.reset(stream, code, ConnectionLost("the other end broke the rules of the stream's window"))
        else:
            self.out.on_window_opened(stream)

    def _take_settings(self, flags: int, id_: int, payload: bytes) -> None:
        if id_ or len(payload) % 6 or (flags & frames.ACK and payload):
            raise Http2Violation(_size_error(not id_), "SETTINGS that are none")
        if flags & frames.ACK:
            if not self.is_ready:
                raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "the first frame is no SETTINGS of its sender")
            return
        window = self.out.peer_window
        for key, value in struct.iter_unpack("!HI", payload):
            self._set(key, value)
        self.out.write(frames.SETTINGS_ACK)  # first: from there on the other end counts with the new windows
        self.is_ready = True
        if self.out.peer_window != window:
            self.out.change_send_windows(self.out.peer_window - window)
        self.on_settings()

    def _set(self, key: int, value: int) -> None:
        if key == Http2Setting.INITIAL_WINDOW_SIZE:
            if value > frames.WINDOW_BYTES_MAX:
                raise Http2Violation(Http2ErrorCode.FLOW_CONTROL_ERROR, "an initial window above its maximum")
            self.out.peer_window = value
        elif key == Http2Setting.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_BYTES <= value <= frames.FRAME_BYTES_LIMIT:
                raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, f"a maximum of {value} bytes a frame")
            self.out.peer_frame = min(value, FRAME_BYTES_MAX)
        elif key == Http2Setting.MAX_CONCURRENT_STREAMS:
            self.peer_streams = value
        elif key == Http2Setting.ENABLE_PUSH and value > 1:
            raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "a wrong value of ENABLE_PUSH")

    def _take_reset(self, id_: int, payload: bytes) -> None:
        if not id_ or len(payload) != 4:
            raise Http2Violation(_size_error(id_), "an RST_STREAM that is none")
        stream = self.streams.get(id_)
        self.allowance.charge_frames(REFUSED_CALL_CHARGE if stream is not None else 1)
        if stream is not None:
            code = int.from_bytes(payload, "big")
            self._remove_stream(stream)
            stream.on_lost(ConnectionLost(f"{self.peer} reset the stream: {frames.get_error_code_name(code)}"), code)
        elif self.is_idle(id_):
            raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, f"an RST_STREAM for stream {id_}, which is not open")

    def open(self, stream: Http2Stream, id_: int, *, has_head: bool) -> None:
        """Adds a stream to the connection, with the id `id_`. `has_head`: the headers of the other end have arrived,
        because it opened the stream."""
        stream.connection, stream.id, stream.has_head = self, id_, has_head
        stream._window = stream.receive_left = self.stream_window
        stream.is_read = self.credits_at_once
        stream.send_left = self.out.peer_window
        self.streams[id_] = stream

    def on_output_ended(self, stream: Http2Stream) -> None:
        """Called when this end has sent the last frame of a stream. Removes the stream if the other end has finished
        too."""
        stream.out_ended = True
        if stream.in_ended:
            self._remove_stream(stream)

    def reset(self, stream: Http2Stream, code: Http2ErrorCode, error: MagnetarError | None = None) -> None:
        """Ends a stream at once by sending RST_STREAM. If `error` is given, the other end is at fault: calls the
        stream's `on_lost` with it, and charges the allowance, which raises Http2Violation if it is used up. Does
        nothing if the stream has ended."""
        if stream.connection is None:
            return
        self.out.write(frames.encode_rst_stream(stream.id, code))
        self._remove_stream(stream)
        if error is not None:
            stream.on_lost(error, None)
            self.allowance.charge_frames(REFUSED_CALL_CHARGE)

    def _remove_stream(self, stream: Http2Stream) -> None:
        stream.connection = None
        self.streams.pop(stream.id, None)
        self.out.blocked.pop(stream, None)
        if self._data_stream is stream and not self._data_left:
            self._data_stream = None  # it would stay in memory until other data comes
        if not self.credits_at_once:
            self.window.credit_connection(stream.unread)
        stream.unread = 0
        self.on_stream_removed()

    # ------------------------------------------------------------------ the end
    def terminate_with_error(self, code: Http2ErrorCode, text: str) -> None:
        """Ends the connection by sending GOAWAY with this code, because the other end violated the protocol or a limit.
        All streams end with ConnectionLost. Does nothing on a lost connection."""
        if self.is_lost:
            return
        _LOG.debug("%s broke the rules of HTTP/2: %s", self.peer, text)
        self.out.write(frames.encode_goaway(max(self.streams, default=0), code, text))
        self._close_with(ConnectionLost(f"{self.peer}: {text}"))
        self._close_transport()

    def close(self, error: MagnetarError) -> None:
        """Ends all streams with `error` at once, and closes the connection when all written data was sent, after
        LAST_WRITES_S at the latest. Does not wait for that."""
        if not self.is_lost:
            self._close_with(error)
            self._close_transport()

    def _close_transport(self) -> None:
        """Closes the transport. What was written may be sent for LAST_WRITES_S; a peer that reads nothing would keep
        the transport open."""
        if self.out.is_paused:
            self.out.transport.abort()
            return
        transport = self.out.transport
        is_ending = transport.is_closing()  # by itself, as its peer has: asked then, one of TLS raises
        if not is_ending:
            transport.close()
        if is_ending or transport.get_write_buffer_size():
            self._leaves = self.loop.call_later(LAST_WRITES_S, self.out.transport.abort)

    def abort_connecting(self) -> None:
        """Ends an attempt to connect. May be called before the connection has a transport."""
        if hasattr(self.out, "transport"):
            self.abort(ConnectionLost("the attempt to connect was given up"))

    def abort(self, error: MagnetarError) -> None:
        """Ends all streams with `error`, and closes the connection at once; unsent data is lost. Does nothing on a lost
        connection."""
        if not self.is_lost:
            self._close_with(error)
            self.out.transport.abort()

    def _close_with(self, error: MagnetarError) -> None:
        if self.is_lost:
            return
        self.is_lost, self.lost_for = True, error
        if self.liveness.timer is not None:
            self.liveness.timer.cancel()
        if self._later is not None:
            self._later.cancel()
        self._rest = memoryview(b"")
        self.out.stop()
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.connection = None
            stream.on_lost(error, None)
        self.on_lost(error)

    def check(self) -> None:
        """Raises AssertionError if a flow-control window is wrong. Each window must be the sum of the bytes that the
        other end may still send, the bytes that arrived and were not credited, and the rest of the current frame."""
        if self.is_lost:
            return
        coming, of = self._data_left, self._data_stream
        unread = 0 if self.credits_at_once else sum(stream.unread for stream in self.streams.values())
        found = self.window.left + self.window.owed + unread + coming
        assert found == self.window.size, f"the connection's window of {self.window.size} bytes has {found}"
        for id_, stream in self.streams.items():
            found = stream.receive_left + stream._owed + stream.unread + (coming if stream is of else 0)
            assert found == stream._window, f"the window of {stream._window} bytes of stream {id_} has {found}"
            assert min(stream.receive_left, stream._owed, stream.unread) >= 0, f"a window of stream {id_} is overdrawn"
        assert self.out.blocked.keys() <= set(self.streams.values()), "what waits for room is open"


def get_peer_address(transport: asyncio.BaseTransport) -> str:
    """Returns the address of the other end of a transport as HOST:PORT; "?" if it is not known."""
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "?"
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


_OF_HEADERS = (frames.HEADERS, CONTINUATION)


def _size_error(has_its_stream: object) -> Http2ErrorCode:
    """Returns the error code for a frame that is on the wrong stream, or else has the wrong length."""
    return Http2ErrorCode.FRAME_SIZE_ERROR if has_its_stream else Http2ErrorCode.PROTOCOL_ERROR
