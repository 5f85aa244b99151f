"""gRPC over simulated connections: channels, calls and coalescing streams like those of runtime/grpc/.

Messages are serialised and parsed again, so processes share no object; errors are sent as `wire.Error` bytes. A channel
has one connection, which is made at its first use and again after it breaks. The messages on a connection:

    ("call", id, path, authorization, bytes) → ("reply", id, bytes) | ("failed", id, error)
    ("cancel", id): the caller cancelled
    ("open", id, path, authorization), ("items", id, bytes)*, ("half", id)
        → ("items", id, bytes)*, ("end", id, error or b"")
    ("credit", id, n): n bytes of items were received; a sender stops when UNRECEIVED_BYTES_MAX are not received

A stream (`SimStream`) ends in one of four ways:

| ends with | `receive`, after the items that arrived | `send` |
|---|---|---|
| the other side closed it | EndOfStream | ConnectionLost (a half-closed client still takes answers) |
| the handler raised | that error | ConnectionLost |
| cut, crash, the other side cancelled | ConnectionLost | ConnectionLost |
| `cancel` or `close` on this side | ConnectionLost | ConnectionLost |

The real counterpart is `GrpcStream` in runtime/grpc/stream.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError, Message

from ...proto import errors
from ...proto import wire_pb2 as wire
from ...proto.checksum import encode_varint
from ..access import Caller, Guard
from ..clock import Clock
from ..grpc.limits import CallerAuthenticator
from ..network import (
    COALESCE_BYTES,
    MESSAGE_BYTES_MAX,
    STREAM_QUEUE_BYTES,
    CallContext,
    EndOfStream,
    Endpoint,
    Pieces,
    Rep,
    Req,
    Rpc,
    find_rpc,
    list_rpc_names,
)
from .wires import ConnectionEnd, SimConnections

if TYPE_CHECKING:
    from .world import SimProcess


UNRECEIVED_BYTES_MAX = 4 << 20
"""Bytes in transit or unread in one direction of a stream (HTTP/2's window)."""

CLOSE_TIMEOUT_S = 10.0
"""Seconds that an orderly close of a stream waits for the other side before it cancels (as runtime/grpc/client.py)."""


class SimStream:
    """One end of a simulated gRPC stream; implements `runtime.network.Stream`. `attach` connects it to a simulated
    connection. `envelope` is the type of the messages that arrive. Items are serialised when they are sent, as in the
    real stream, and parsed when they are received; an item may also be given as its bytes."""

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
            await self.wait_stream_changed()
        self._check_open()

    @property
    def is_broken(self) -> bool:
        """Returns whether nothing more can be sent, because the stream has ended."""
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
            await self.wait_stream_changed()
        self._check_open()

    async def close(self) -> None:
        """Closes the stream. A client ends its direction after the queued items, and waits for the other end, at most
        CLOSE_TIMEOUT_S. A server does nothing. Never raises."""
        if not self._is_client:
            return
        self._half_closed = True
        self._flush_soon()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while not self.is_broken:
                    if not self._reading:
                        self._in.clear()
                    await self.wait_stream_changed()
        except TimeoutError:
            self.cancel()
        finally:
            self.end_with_error(errors.ConnectionLost("the stream was closed"))

    def cancel(self) -> None:
        if not self.is_broken:
            error = errors.ConnectionLost(f"{self.path}: the stream was cancelled")
            if self._end is not None and self._is_client:
                self._end.send(("cancel", self._id), f"cancel {self._id}")
            elif self._end is not None:
                data = errors.to_wire(error).SerializeToString(deterministic=True)
                self._end.send(("end", self._id, data), f"end {self._id} cancelled")
            self.end_with_error(error)

    def _check_open(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(self._broken.message, **self._broken.fields)

    def _flush_soon(self) -> None:
        if not self._flushing and self._end is not None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush, context=self._owner.context)

    def flush(self) -> None:
        """Sends queued items as far as the window allows; then half-closes the stream if it is closing."""
        self._flushing = False
        while self._out and self._on_the_way < UNRECEIVED_BYTES_MAX and not self.is_broken:
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
                await self.wait_stream_changed()
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
        """Called with each message of the connection that belongs to this stream."""
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
                self.end_with_error(errors.from_wire(wire.Error.FromString(message[2])))
            case "end":
                self._in_over = True
                self.end_with_error(
                    errors.ConnectionLost(f"{self.path}: the other end closed the stream"), in_order=True
                )
            case _:
                raise AssertionError(f"a stream message {message[0]}")
        self._wake()

    def end_with_error(self, error: errors.MagnetarError, *, in_order: bool = False) -> None:
        """Ends the stream, and drops the items that were not sent. Does nothing if it has ended. Senders get
        ConnectionLost with the text of `error`. `receive` returns the items that have arrived, and then raises
        EndOfStream if `in_order` is True, else `error`."""
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
        """Opens the stream on a connection with the id `id_`. The function `forget` is called when the stream has
        ended."""
        self._end, self._id, self._forget = end, id_, forget
        if self._out or self._half_closed:
            self._flush_soon()

    async def wait_stream_changed(self) -> None:
        """Waits until items were sent or have arrived, or the stream has ended."""
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


def _error_bytes(error: BaseException) -> bytes:
    return errors.to_wire(error).SerializeToString(deterministic=True)


def _error_from(data: bytes) -> errors.MagnetarError:
    return errors.from_wire(wire.Error.FromString(data))


class SimChannel:
    """A client's channel in a simulation; implements `runtime.network.Channel`. `authorization` returns the value of
    the header `authorization`; None: no credentials are sent."""

    def __init__(
        self, wires: SimConnections, owner: SimProcess, endpoint: Endpoint,
        authorization: Callable[[], str] | None = None
    ) -> None:
        self._wires = wires
        self._authorization = authorization or str
        self._owner = owner
        self._endpoint = endpoint
        self._end: ConnectionEnd | None = None
        self._dialling: asyncio.Future[ConnectionEnd] | None = None
        self._ids = 0
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._streams: dict[int, SimStream] = {}
        self._openers: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def call(self, rpc: Rpc[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        data = request.SerializeToString(deterministic=True)
        if len(data) > MESSAGE_BYTES_MAX:
            text = f"{rpc.path}: a request of {len(data)} bytes"
            raise errors.MessageTooLarge(text, size=len(data), limit=MESSAGE_BYTES_MAX)
        self._ids += 1
        id_ = self._ids
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                end = await self._connected()
                self._calls[id_] = answer
                end.send(("call", id_, rpc.path, self._authorization(), data), f"call {id_} {rpc.path} {len(data)} B")
                return rpc.reply.FromString(await answer)
        except TimeoutError:
            self._give_up(id_)
            raise errors.TimedOut(f"{rpc.path}: no answer from {self._endpoint} in {timeout_s} s") from None
        except asyncio.CancelledError:
            self._give_up(id_)
            raise
        finally:
            self._calls.pop(id_, None)

    def stream(self, rpc: Rpc[Any, Any]) -> SimStream:
        self._ids += 1
        stream = SimStream(rpc.reply, rpc.path, self._owner, is_client=True)
        if self._closed:
            raise errors.ConnectionLost(f"the channel to {self._endpoint} is closed")
        opener = asyncio.get_running_loop().create_task(
            self._open(self._ids, rpc, stream), context=self._owner.context.copy()
        )
        self._openers = [task for task in self._openers if not task.done()] + [opener]
        return stream

    async def is_answering(self, timeout_s: float) -> bool:
        end = self._end
        if end is None or not end.open:
            await asyncio.sleep(timeout_s)
            return self._end is not None and self._end.open
        answer = asyncio.get_running_loop().create_future()
        self._wires.ping_peer(end, answer)
        done, _ = await asyncio.wait((answer,), timeout=timeout_s)
        return bool(done)

    async def close(self) -> None:
        self._closed = True
        for opener in self._openers:
            opener.cancel()
        await asyncio.gather(*self._openers, return_exceptions=True)
        self._break(errors.ConnectionLost(f"the channel to {self._endpoint} was closed"))
        if self._end is not None:
            self._end.close()
            self._end = None

    # ------------------------------------------------------------------ inside
    async def _open(self, id_: int, rpc: Rpc[Any, Any], stream: SimStream) -> None:
        try:
            end = await self._connected()
        except errors.MagnetarError as error:
            stream.end_with_error(error)
            return
        if stream.is_broken:
            return
        self._streams[id_] = stream
        end.send(("open", id_, rpc.path, self._authorization()), f"open {id_} {rpc.path}")
        stream.attach(end, id_, lambda: self._streams.pop(id_, None))

    async def _connected(self) -> ConnectionEnd:
        if self._closed:
            raise errors.ConnectionLost(f"the channel to {self._endpoint} is closed")
        if self._end is not None and self._end.open:
            return self._end
        if self._dialling is None:
            self._dialling = self._wires.open_connection(self._owner, self._endpoint)
            self._dialling.add_done_callback(self._dialled, context=self._owner.context)
        end = await asyncio.shield(self._dialling)
        if not end.open:
            raise errors.Unavailable(f"the connection to {self._endpoint} broke at once")
        return end

    def _dialled(self, dialling: asyncio.Future[ConnectionEnd]) -> None:
        self._dialling = None
        if dialling.exception() is not None:
            return
        end = dialling.result()
        if self._closed:
            end.close()
            return
        self._end = end
        end.receive, end.lost = self._receive, self._lost

    def _lost(self) -> None:
        self._end = None
        self._break(errors.ConnectionLost(f"the connection to {self._endpoint} broke"))

    def _break(self, error: errors.MagnetarError) -> None:
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(type(error)(error.message))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end_with_error(type(error)(error.message))

    def _give_up(self, id_: int) -> None:
        if id_ in self._calls and self._end is not None:
            self._end.send(("cancel", id_), f"cancel {id_}")

    def _receive(self, message: tuple[Any, ...]) -> None:
        kind, id_ = message[0], message[1]
        if kind in ("reply", "failed"):
            answer = self._calls.get(id_)
            if answer is None or answer.done():
                return
            if kind == "reply":
                answer.set_result(message[2])
            else:
                answer.set_exception(_error_from(message[2]))
        elif id_ in self._streams:
            self._streams[id_].on_message(message)


# ---------------------------------------------------------------------------------- server
class RunningSimServer:
    """A simulated gRPC listener; implements `runtime.network.RunningServer`. `owner` is the process that serves."""

    def __init__(
        self, wires: SimConnections, owner: SimProcess, endpoint: Endpoint, services: Sequence[tuple[str, object]],
        guard: Guard | None, clock: Clock,
    ) -> None:  # fmt: skip
        self.owner = owner
        self.callers = CallerAuthenticator(guard, clock)
        self.methods = _methods(services)
        self.tasks: dict[asyncio.Task[None], None] = {}
        self._wires = wires
        self._connections: list[_Connection] = []
        self.closed = False
        self._endpoint = wires.listen(endpoint, self)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def accept(self, end: ConnectionEnd) -> None:
        """Called for a new connection, with the listener's end of it."""
        if self.closed:
            end.close()
            return
        self._connections.append(_Connection(self, end))

    def remove_connection(self, connection: _Connection) -> None:
        """Called when a connection is lost."""
        self._connections.remove(connection)

    async def close(self, grace_s: float = 0.0) -> None:
        """Stops accepting calls. Running calls may continue for `grace_s` seconds; then their connections break, and
        calls that run for one more second are cancelled. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._wires.stop_listening(self._endpoint.port, self)
        if self.tasks and grace_s:
            await asyncio.wait(list(self.tasks), timeout=grace_s)
        for connection in list(self._connections):
            connection.shut()
        if self.tasks:
            await asyncio.wait(list(self.tasks), timeout=1.0)
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection:
    """A client's connection at the server."""

    def __init__(self, server: RunningSimServer, end: ConnectionEnd) -> None:
        self._server = server
        self._end = end
        self._streams: dict[int, SimStream] = {}
        end.receive, end.lost = self._receive, self._lost

    def _receive(self, message: tuple[Any, ...]) -> None:
        if self._server.closed:
            return
        kind, id_ = message[0], message[1]
        if kind == "call":
            self._start(self._call(id_, *message[2:]))
        elif kind == "open":
            self._open(id_, *message[2:])
        elif kind == "cancel":
            if id_ in self._streams:  # the handler of a unary call runs on, as in runtime/grpc/server.py
                self._streams[id_].end_with_error(errors.ConnectionLost("the caller is gone"))
        elif id_ in self._streams:
            self._streams[id_].on_message(message)

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._server.tasks[task] = None
        task.add_done_callback(lambda done: self._server.tasks.pop(done, None))

    def _open(self, id_: int, path: str, authorization: str) -> None:
        if path not in self._server.methods:
            self._send(("end", id_, _error_bytes(_not_offered(path))), f"end {id_}")
            return
        target, function = self._server.methods[path]
        stream = SimStream(target.request, path, self._server.owner, is_client=False)
        self._streams[id_] = stream
        stream.attach(self._end, id_, lambda: self._streams.pop(id_, None))
        self._start(self._stream(id_, stream, function, authorization))

    async def _context(self, authorization: str, path: str) -> CallContext:
        caller = Caller(self._end.peer, authorization, is_encrypted=True)
        return CallContext(self._end.peer, await self._server.callers.admit(caller, path))

    async def _call(self, id_: int, path: str, authorization: str, data: bytes) -> None:
        try:
            if path not in self._server.methods:
                raise _not_offered(path)
            target, function = self._server.methods[path]
            context = await self._context(authorization, path)
            reply = await function(target.request.FromString(data), context)
            answer = ("reply", id_, reply.SerializeToString(deterministic=True))
        except asyncio.CancelledError:  # gRPC answers CANCELLED
            data = _error_bytes(errors.ConnectionLost("the handler was cancelled"))
            self._send(("failed", id_, data), f"failed {id_} cancelled")
            raise
        except Exception as error:
            answer = ("failed", id_, _error_bytes(error))
        self._send(answer, f"{answer[0]} {id_} {len(answer[2])} B")

    async def _stream(self, id_: int, stream: SimStream, function: Callable[..., Any], authorization: str) -> None:
        """Runs the handler of a stream. It is not cancelled when its caller disconnects, but gets the error from its
        stream.
        """
        failure = b""
        try:
            context = await self._context(authorization, stream.path)
            with self._server.callers.end_when_credentials_expire(
                context.principal, partial(self._end_of, id_, stream)
            ):
                await function(stream, context)
        except EndOfStream:
            pass
        except asyncio.CancelledError:
            lost = errors.ConnectionLost("the handler was cancelled")
            if not stream.is_broken:
                self._send(("end", id_, _error_bytes(lost)), f"end {id_} cancelled")
                stream.end_with_error(lost)
            raise
        except Exception as error:
            failure = _error_bytes(error)
        if not stream.is_broken:
            while stream.queued_bytes and not stream.is_broken:
                stream.flush()
                if stream.queued_bytes:
                    await stream.wait_stream_changed()
            self._send(("end", id_, failure), f"end {id_} {len(failure)} B")
            stream.end_with_error(errors.ConnectionLost("the stream's handler has returned"))

    def _end_of(self, id_: int, stream: SimStream, error: errors.MagnetarError) -> None:
        """Ends a stream from this side, before its handler has ended."""
        if not stream.is_broken:
            self._send(("end", id_, _error_bytes(error)), f"end {id_} expired")
            stream.end_with_error(error)

    def _send(self, message: Any, what: str) -> None:
        self._end.send(message, what)

    def _lost(self) -> None:
        self._server.remove_connection(self)
        self._gone()

    def shut(self) -> None:
        self._end.close()
        self._gone()

    def _gone(self) -> None:
        for stream in list(self._streams.values()):
            stream.end_with_error(errors.ConnectionLost("the caller is gone"))


def _methods(services: Sequence[tuple[str, object]]) -> dict[str, tuple[Rpc[Any, Any], Callable[..., Any]]]:
    found: dict[str, tuple[Rpc[Any, Any], Callable[..., Any]]] = {}
    for name, handler in services:
        for method in list_rpc_names(name):
            function = getattr(handler, _snake(method), None)
            if function is not None:
                target = find_rpc(name, method)
                found[target.path] = (target, function)
    return found


def _not_offered(path: str) -> errors.WrongProtocol:
    return errors.WrongProtocol(f"this server does not offer {path}")


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
