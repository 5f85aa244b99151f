"""gRPC on grpc.aio: services, channels and coalescing streams, as `runtime/network.py` promises them.

grpc is imported with the first use, so that a process that never talks gRPC does not pay for it.

**Streams** carry envelopes `{repeated X items = 1}`. To send, the bytes of the items are put together by hand (tag,
length, item), without building the envelope; to receive, the envelope's class parses them. One flusher task per stream
takes all that waits, up to COALESCE_BYTES, and never waits for more.

**Errors** are translated here and nowhere else. A handler's MagnetarError travels as a status and the trailer
`magnetar-error-bin` and is raised again as the same class; what is not one becomes InternalError. Failures of gRPC:

| gRPC says | raised | definite |
|---|---|---|
| UNAVAILABLE, no connection could be made | Unavailable | yes: nothing was sent |
| UNAVAILABLE otherwise, CANCELLED, ABORTED | ConnectionLost | no |
| DEADLINE_EXCEEDED | TimedOut | no |
| UNIMPLEMENTED, or an answer that is not HTTP/2 | WrongProtocol | yes |
| RESOURCE_EXHAUSTED (message above MESSAGE_BYTES_MAX) | MessageTooLarge | yes |
| anything else | InternalError | no |
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError, Message

from ..proto import wire_pb2 as wire
from ..proto.errors import (
    Busy,
    ConnectionLost,
    InternalError,
    InvalidRequest,
    MagnetarError,
    MessageTooLarge,
    NotFound,
    TimedOut,
    Unauthorized,
    Unavailable,
    WrongProtocol,
    from_wire,
    to_wire,
)
from .network import COALESCE_BYTES, MESSAGE_BYTES_MAX, STREAM_QUEUE_BYTES, CallContext, EndOfStream, Endpoint, Rpc, rpc

if TYPE_CHECKING:
    import grpc.aio

ERROR_TRAILER = "magnetar-error-bin"
CLOSE_TIMEOUT_S = 10.0
"""How long an orderly close of a stream waits for the other side before it cancels."""

END_OF_ITEMS = b""
"""An envelope without items, sent by a client before its half-close. At a server a half-close looks the same as a caller
that is gone (gRPC tells which a moment later); after this one it is an end in order."""

FOREIGN_END_S = 0.1
"""How long a server waits, after a half-close without END_OF_ITEMS, for gRPC to say that the caller is gone."""

_LOG = logging.getLogger("magnetar.rpc")

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A dead peer is noticed after 10 + 5 s, also when nothing is said.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),  # a taken port is an error, not half of the connections
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]
_CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

_NEVER_CONNECTED = ("failed to connect to all addresses", "name resolution", "dns resolution", "no address")
_NOT_HTTP2 = ("http1.x", "http2", "settings frame", "settings", "first byte", "preface", "frame of size")

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)
Call = TypeVar("Call")


def _grpc() -> ModuleType:
    """grpc, quiet, and without its fork handlers: after a fork channels are made anew (client/), never reused."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    import grpc.aio

    return grpc


# ---------------------------------------------------------------------------------- errors
def _status_of(error: MagnetarError) -> Any:
    code = _grpc().StatusCode
    match error:
        case InvalidRequest():
            return code.INVALID_ARGUMENT
        case NotFound():
            return code.NOT_FOUND
        case Unauthorized():
            return code.PERMISSION_DENIED
        case Unavailable():
            return code.UNAVAILABLE
        case InternalError():
            return code.INTERNAL
        case _:
            return code.FAILED_PRECONDITION


def from_grpc(error: grpc.aio.AioRpcError, endpoint: Endpoint) -> MagnetarError:
    """The MagnetarError that a failed call means, by the table of this module."""
    trailers: Any = error.trailing_metadata() or ()
    for key, value in trailers:
        if key == ERROR_TRAILER and isinstance(value, bytes):
            try:
                return from_wire(wire.Error.FromString(value))
            except DecodeError:
                return WrongProtocol(f"{endpoint} answered with an error that does not parse", endpoint=endpoint)
    code = _grpc().StatusCode
    details = error.details() or ""
    text = f"{endpoint}: {details}"
    match error.code():
        case code.UNAVAILABLE:
            low = details.lower()
            if any(words in low for words in _NOT_HTTP2):
                return WrongProtocol(f"{endpoint} does not speak gRPC: {details}", endpoint=endpoint)
            if any(words in low for words in _NEVER_CONNECTED):
                return Unavailable(f"cannot connect to {text}", endpoint=endpoint)
            return ConnectionLost(text, endpoint=endpoint)
        case code.CANCELLED | code.ABORTED:
            return ConnectionLost(text, endpoint=endpoint)
        case code.DEADLINE_EXCEEDED:
            return TimedOut(f"no answer from {endpoint} in time", endpoint=endpoint)
        case code.UNIMPLEMENTED:
            return WrongProtocol(f"{endpoint} does not offer this: {details}", endpoint=endpoint)
        case code.RESOURCE_EXHAUSTED:
            return MessageTooLarge(text, endpoint=endpoint, limit=MESSAGE_BYTES_MAX)
        case _:
            return InternalError(text, endpoint=endpoint)


async def _abort(context: Any, error: BaseException) -> None:
    """Ends a call with an error; raises gRPC's own exception, as gRPC wants it."""
    if not isinstance(error, MagnetarError):
        _LOG.error("a handler failed", exc_info=error)
    message = to_wire(error)
    trailer = ((ERROR_TRAILER, message.SerializeToString()),)
    await context.abort(_status_of(from_wire(message)), message.message[:1024], trailer)


# ---------------------------------------------------------------------------------- streams
def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_PREFIXES = [b"\x0a" + _varint(size) for size in range(2048)]


class GrpcStream:
    """Either end of a stream: a queue and its flusher on the way out, one read at a time on the way in.

    `read` gives one envelope's bytes, b"" never; raises EndOfStream or a MagnetarError. `write` sends one.
    """

    def __init__(
        self,
        envelope: type[Any],
        read: Callable[[], Awaitable[bytes]],
        write: Callable[[bytes], Awaitable[None]],
        cancel: Callable[[], None],
    ) -> None:
        self._envelope = envelope
        self._read = read
        self._write = write
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[tuple[bytes, bytes]] = deque()
        self._queued = 0
        self._flusher: asyncio.Task[None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._room: list[asyncio.Future[None]] = []
        self._broken: MagnetarError | None = None
        self._closing = False
        self.reading = False

    @property
    def queued_bytes(self) -> int:
        return self._queued

    # ------------------------------------------------------------------------------ out
    def send_nowait(self, item: Message | bytes) -> None:
        if self._broken is not None:
            raise type(self._broken)(self._broken.message, **self._broken.fields)
        data = item if isinstance(item, bytes) else item.SerializeToString()
        size = len(data)
        prefix = _PREFIXES[size] if size < 2048 else b"\x0a" + _varint(size)
        self._pieces.append((prefix, data))
        self._queued += size + len(prefix)
        if self._idle is not None:
            if not self._idle.done():
                self._idle.set_result(None)
        elif self._flusher is None:
            self._flusher = self._loop.create_task(self._flush())

    async def send(self, item: Message | bytes) -> None:
        if self._queued > STREAM_QUEUE_BYTES:
            await self.drained()
        self.send_nowait(item)

    async def drained(self) -> None:
        while self._queued > STREAM_QUEUE_BYTES and self._broken is None:
            room = self._loop.create_future()
            self._room.append(room)
            await room
        if self._broken is not None:
            raise type(self._broken)(self._broken.message, **self._broken.fields)

    async def _flush(self) -> None:
        """One envelope of all that waits, after the other; sleeps on `_idle` when nothing does."""
        pieces = self._pieces
        try:
            while True:
                while not pieces:
                    if self._closing:
                        return
                    self._idle = self._loop.create_future()
                    await self._idle
                    self._idle = None
                parts: list[bytes] = []
                size = 0
                while pieces and (not size or size + len(pieces[0][1]) <= COALESCE_BYTES):
                    prefix, data = pieces.popleft()
                    parts += (prefix, data)
                    size += len(prefix) + len(data)
                await self._write(b"".join(parts))
                self._queued -= size
                if self._room and self._queued <= STREAM_QUEUE_BYTES:
                    self._wake_senders()
        except MagnetarError as error:
            self.fail(error)

    async def finish(self) -> None:
        """Returns when all that is queued has been given to gRPC (or the stream is broken)."""
        self._closing = True
        if self._flusher is not None:
            if self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
            await self._flusher

    def _wake_senders(self) -> None:
        waiting, self._room = self._room, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

    # ------------------------------------------------------------------------------ in
    async def receive(self) -> Sequence[Any]:
        assert not self.reading, "one reader of a stream at a time"
        self.reading = True
        try:
            while True:
                data = await self._read()
                try:
                    items = self._envelope.FromString(data).items
                except DecodeError as error:
                    raise self._bad_envelope(error) from error
                if items:
                    return list(items)
        finally:
            self.reading = False

    def _bad_envelope(self, error: DecodeError) -> WrongProtocol:
        broken = WrongProtocol(f"a stream message that is no {self._envelope.DESCRIPTOR.full_name}: {error}")
        self.fail(broken)
        self._cancel()
        return broken

    # ------------------------------------------------------------------------------ the end
    def fail(self, error: MagnetarError) -> None:
        """The stream is broken: nothing more leaves, senders are told."""
        if self._broken is not None:
            return
        self._broken = error
        self._pieces.clear()
        self._queued = 0
        self._closing = True
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        self._wake_senders()

    async def close(self) -> None:
        """The server's end has nothing to do: its stream ends with its handler."""

    def cancel(self) -> None:
        self.fail(ConnectionLost("the stream was cancelled"))
        self._cancel()


class _ClientStream(GrpcStream):
    def __init__(self, channel: GrpcChannel, target: Rpc[Any, Any], call: Any) -> None:
        super().__init__(target.reply, self._read_call, self._write_call, call.cancel)
        self._channel = channel
        self._call = call
        self._eof = _grpc().aio.EOF

    async def _read_call(self) -> bytes:
        try:
            data = await self._call.read()
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            error: MagnetarError = self._broken or ConnectionLost(f"{self._channel.endpoint}: the stream was cancelled")
            self.fail(error)
            raise error from None
        except _grpc().aio.AioRpcError as failure:
            error = from_grpc(failure, self._channel.endpoint)
            self.fail(_broken_by(error))
            raise error from failure
        if data is self._eof:
            self.fail(ConnectionLost(f"{self._channel.endpoint} ended the stream"))
            raise EndOfStream
        return bytes(data)

    async def _write_call(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise ConnectionLost(f"{self._channel.endpoint}: the stream was cancelled") from None
        except _grpc().aio.AioRpcError as failure:
            raise _broken_by(from_grpc(failure, self._channel.endpoint)) from failure
        except (asyncio.InvalidStateError, _grpc().aio.UsageError, _grpc().aio.InternalError) as failure:
            raise ConnectionLost(f"{self._channel.endpoint}: the stream is over") from failure

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.finish()
                if self._broken is None:
                    await self._write(END_OF_ITEMS)
                    await self._call.done_writing()
                    await self._until_over()
        except (TimeoutError, EndOfStream, MagnetarError, asyncio.InvalidStateError):
            pass  # over, in whatever way: that is what was asked for
        finally:
            self._call.cancel()
            self._channel.forget(self)
            self.fail(ConnectionLost("the stream was closed"))
            await self.finish()

    async def _until_over(self) -> None:
        while not self.reading:
            await self.receive()
        await self._call.code()  # somebody else reads, to the end


def _broken_by(error: MagnetarError) -> MagnetarError:
    """What senders are told when the stream broke with `error`: its outcome is unknown, unless it says more."""
    return error if isinstance(error, WrongProtocol) else ConnectionLost(error.message, **error.fields)


def _is_cancelled() -> bool:
    """Whether this task was cancelled by us (gRPC raises CancelledError for its own reasons too)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# ---------------------------------------------------------------------------------- client
class GrpcChannel:
    """A connection to one server. Belongs to the event loop in which it is first used."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channel: grpc.aio.Channel | None = None
        self._callables: dict[str, Any] = {}
        self._streams: dict[_ClientStream, None] = {}
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def _open(self) -> Any:
        if self._closed:
            raise ConnectionLost(f"the channel to {self._endpoint} is closed")
        if self._channel is None:
            self._channel = _grpc().aio.insecure_channel(str(self._endpoint), options=_CHANNEL_OPTIONS)
        return self._channel

    async def call(self, rpc: Rpc[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        method = self._callables.get(rpc.path)
        if method is None:
            serialize, parse = rpc.request.SerializeToString, rpc.reply.FromString
            method = self._callables[rpc.path] = self._open().unary_unary(rpc.path, serialize, parse)
        elif self._closed:
            self._open()
        try:
            reply: Rep = await method(request, timeout=timeout_s)
        except _grpc().aio.AioRpcError as error:
            raise from_grpc(error, self._endpoint) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise ConnectionLost(f"the channel to {self._endpoint} was closed") from None
        return reply

    def stream(self, rpc: Rpc[Any, Any]) -> GrpcStream:
        method = self._callables.get(rpc.path)
        if method is None:
            method = self._callables[rpc.path] = self._open().stream_stream(rpc.path)
        elif self._closed:
            self._open()
        stream = _ClientStream(self, rpc, method())
        self._streams[stream] = None
        return stream

    def forget(self, stream: _ClientStream) -> None:
        self._streams.pop(stream, None)

    async def close(self) -> None:
        self._closed = True
        for stream in list(self._streams):
            stream.cancel()
            await stream.finish()
        self._streams.clear()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(0)


def connect(endpoint: Endpoint) -> GrpcChannel:
    return GrpcChannel(endpoint)


# ---------------------------------------------------------------------------------- server
class GrpcServing:
    def __init__(self, server: grpc.aio.Server, endpoint: Endpoint, handlers: dict[asyncio.Task[None], None]) -> None:
        self._server = server
        self._endpoint = endpoint
        self._handlers = handlers
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def close(self, grace_s: float = 0.0) -> None:
        """No new calls; those that run have `grace_s`, then they are cut off. Returns when all handlers are done."""
        if self._closed:
            return
        self._closed = True
        await self._server.stop(grace_s)
        handlers = list(self._handlers)
        if handlers:
            await asyncio.wait(handlers, timeout=1.0)
            for handler in handlers:
                handler.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)


async def serve(endpoint: Endpoint, services: Sequence[tuple[str, object]]) -> GrpcServing:
    """Serves on `endpoint` (port 0: a free one). Raises Busy when the port is taken."""
    grpc = _grpc()
    handlers: dict[asyncio.Task[None], None] = {}
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    for name, handler in services:
        server.add_generic_rpc_handlers((_generic_handler(name, handler, handlers),))
    try:
        port = server.add_insecure_port(str(endpoint))
    except RuntimeError as error:
        raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error
    if port == 0:
        raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint)
    await server.start()
    return GrpcServing(server, Endpoint(endpoint.host, port), handlers)


def _generic_handler(name: str, handler: object, handlers: dict[asyncio.Task[None], None]) -> Any:
    grpc = _grpc()
    service = wire.DESCRIPTOR.services_by_name[name]
    methods = {}
    for method in service.methods:
        target = rpc(name, method.name)
        function = getattr(handler, _snake(method.name), None)
        if function is None:
            continue  # UNIMPLEMENTED, which the caller sees as WrongProtocol
        if target.streaming:
            methods[method.name] = grpc.stream_stream_rpc_method_handler(_streaming(target, function, handlers))
        else:
            parse, serialize = target.request.FromString, target.reply.SerializeToString
            methods[method.name] = grpc.unary_unary_rpc_method_handler(_unary(function), parse, serialize)
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _peer_of(context: Any) -> str:
    kind, _, address = context.peer().partition(":")
    return str(address.replace("%5B", "[").replace("%5D", "]")) if kind.startswith("ipv") else str(context.peer())


def _unary(function: Callable[[Any, CallContext], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await function(request, CallContext(_peer_of(context)))
        except Exception as error:
            return await _abort(context, error)

    return handle


class _ServerStream(GrpcStream):
    def __init__(self, target: Rpc[Any, Any], context: Any) -> None:
        super().__init__(target.request, self._read_context, self._write_context, self._cancel_call)
        self._context = context
        self._eof = _grpc().aio.EOF
        self._ended = False
        self.cut: asyncio.Future[MagnetarError | None] = self._loop.create_future()

    async def _read_context(self) -> bytes:
        if self._broken is not None:
            raise self._broken
        if self._ended:
            raise EndOfStream
        try:
            data = await self._context.read()
            if data == b"":  # the caller ends in order: END_OF_ITEMS, then the half-close
                self._ended = True
                data = await self._context.read()
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise self._lost() from None
        except (_grpc().aio.UsageError, _grpc().aio.InternalError) as error:
            raise self._lost() from error
        if data is not self._eof:
            return bytes(data)
        if not self._ended:
            await self._until_broken(FOREIGN_END_S)
        if self._broken is not None:
            raise self._broken
        self._ended = True
        raise EndOfStream

    async def _until_broken(self, seconds: float) -> None:
        room = self._loop.create_future()
        self._room.append(room)
        await asyncio.wait((room,), timeout=seconds)

    async def _write_context(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise ConnectionLost("the caller is gone") from None
        except (_grpc().aio.UsageError, _grpc().aio.InternalError) as error:
            raise ConnectionLost("the caller is gone") from error

    def _lost(self) -> MagnetarError:
        self.fail(ConnectionLost("the caller is gone"))
        assert self._broken is not None
        return self._broken

    def _cancel_call(self) -> None:
        if not self.cut.done():
            self.cut.set_result(self._broken)


def _streaming(
    target: Rpc[Any, Any],
    function: Callable[[GrpcStream, CallContext], Awaitable[None]],
    handlers: dict[asyncio.Task[None], None],
) -> Callable[[Any, Any], Awaitable[None]]:
    async def run(stream: GrpcStream, context: CallContext) -> None:
        await function(stream, context)

    async def handle(_: Any, context: Any) -> None:
        """gRPC cancels this coroutine when the caller is gone; the handler itself learns it from its stream."""
        stream = _ServerStream(target, context)
        handler = asyncio.get_running_loop().create_task(run(stream, CallContext(_peer_of(context))))
        handlers[handler] = None
        handler.add_done_callback(lambda task: _forget(handlers, task))
        try:
            await asyncio.wait((handler, stream.cut), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            stream.fail(ConnectionLost("the caller is gone"))
            raise
        error = handler.exception() if handler.done() and not handler.cancelled() else None
        if stream.cut.done():
            error = stream.cut.result()
        else:
            await stream.finish()
        if error is not None and not isinstance(error, EndOfStream):
            await _abort(context, error)

    return handle


def _forget(handlers: dict[asyncio.Task[None], None], task: asyncio.Task[None]) -> None:
    handlers.pop(task, None)
    if not task.cancelled() and (error := task.exception()) is not None and not _expected(error):
        _LOG.error("a stream handler failed", exc_info=error)


def _expected(error: BaseException) -> bool:
    return isinstance(error, MagnetarError | EndOfStream)
