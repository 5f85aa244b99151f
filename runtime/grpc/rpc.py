"""gRPC on grpc.aio: the `serve` and `connect` of `runtime/network.py`.

Streams: `runtime/grpc/stream.py`. Errors: `runtime/grpc/errors.py`. grpc itself is imported at its first use, so that a
process without gRPC does not pay for it.

At a server each call has a task of its own for its handler. gRPC cancels *its* coroutine when the caller disconnects;
the handler is not cancelled. A stream's handler gets ConnectionLost from its stream and ends in its own order. A unary
call's handler runs to its end, because a change that it has begun must not stay half done: a topic that was being
unloaded would keep its consumers and send them nothing. An error of a handler ends the call; what was sent before still
arrives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError, Message

from ...proto import wire_pb2 as wire
from ...proto.errors import Busy, ConnectionLost, MagnetarError, MessageTooLarge, WrongProtocol
from ..network import MESSAGE_BYTES_MAX, CallContext, EndOfStream, Endpoint, Rpc, rpc
from .errors import abort, from_grpc, grpc_module
from .loop import drop_late_events
from .stream import GrpcStream, copied_tags

if TYPE_CHECKING:
    import grpc.aio

CLOSE_TIMEOUT_S = 10.0
"""How long an orderly close of a stream waits for the other side before it cancels."""

HANDLERS_TIMEOUT_S = 1.0
"""How long a server that closes lets stream handlers end by themselves after their callers were disconnected."""

END_OF_ITEMS = b""
"""An envelope without items, sent by a client before its half-close. At a server a half-close looks the same as a
caller that disconnected (gRPC reports which a moment later); after this envelope it is an end in order."""

FOREIGN_END_S = 0.1
"""How long a server waits, after a half-close without END_OF_ITEMS, for gRPC to report that the caller disconnected."""

CUT_S = 1.0
"""For a write in progress when this side cuts the call: one to a caller that does not read is never sent."""

_LOG = logging.getLogger("magnetar.rpc")

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A dead peer is noticed after 10 + 5 s, also without traffic.
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
    ("grpc.use_local_subchannel_pool", 1),  # a channel is a connection, not a share of one
    ("grpc.enable_http_proxy", 0),
]

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)


def _is_cancelled() -> bool:
    """Whether we cancelled this task (gRPC raises CancelledError for its own reasons too)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# ---------------------------------------------------------------------------------- client
class GrpcChannel:
    """A connection to one server. Belongs to the event loop in which it is first used."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, Any] = {}
        self._streams: dict[_ClientStream, None] = {}
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def _opened(self) -> Any:
        if self._closed:
            raise ConnectionLost(f"the channel to {self._endpoint} is closed", endpoint=self._endpoint)
        if self._channel is None:
            drop_late_events(asyncio.get_running_loop())
            self._channel = grpc_module().aio.insecure_channel(str(self._endpoint), options=_CHANNEL_OPTIONS)
        return self._channel

    async def call(self, rpc: Rpc[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        channel = self._opened()
        method = self._methods.get(rpc.path)
        if method is None:
            serialize, parse = rpc.request.SerializeToString, rpc.reply.FromString
            method = self._methods[rpc.path] = channel.unary_unary(rpc.path, serialize, parse)
        try:
            reply: Rep = await method(request, timeout=timeout_s)
        except grpc_module().aio.AioRpcError as error:
            raise from_grpc(error, self._endpoint) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise ConnectionLost(f"the channel to {self._endpoint} was closed", endpoint=self._endpoint) from None
        return reply

    def stream(self, rpc: Rpc[Any, Any]) -> GrpcStream:
        channel = self._opened()
        method = self._methods.get(rpc.path)
        if method is None:
            method = self._methods[rpc.path] = channel.stream_stream(rpc.path)
        call = method()
        stream = _ClientStream(self._endpoint, rpc, call)
        self._streams[stream] = None
        call.add_done_callback(lambda _: self._streams.pop(stream, None))
        return stream

    async def close(self) -> None:
        """Cancels the calls in progress."""
        self._closed = True
        for stream in list(self._streams):
            stream.cancel()
            await stream.release()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(0)


def connect(endpoint: Endpoint) -> GrpcChannel:
    return GrpcChannel(endpoint)


class _ClientStream(GrpcStream):
    def __init__(self, endpoint: Endpoint, target: Rpc[Any, Any], call: Any) -> None:
        super().__init__(
            target.reply, self._read_call, self._write_call, lambda _: call.cancel(),
            out_bytes_max=target.request_bytes_max,
        )  # fmt: skip
        self._endpoint = endpoint
        self._call = call
        self._grpc_aio = grpc_module().aio

    def break_off(self, error: MagnetarError) -> None:
        """A call that never connected does not end a write that waits for it, even when cancelled: the writer fails."""
        super().break_off(error)
        if self._flusher is not None:
            self._flusher.cancel()

    async def _read_call(self) -> bytes:
        try:
            data = await self._call.read()
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            error: MagnetarError = ConnectionLost(f"{self._endpoint}: the stream was cancelled")
            self.fail(error)
            raise error from None
        except self._grpc_aio.AioRpcError as failure:
            error = from_grpc(failure, self._endpoint)
            self.fail(_broken_by(error))
            raise error from failure
        if data is self._grpc_aio.EOF:
            self.fail(ConnectionLost(f"{self._endpoint} ended the stream"))
            raise EndOfStream
        return bytes(data)

    async def _write_call(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise ConnectionLost(f"{self._endpoint}: the stream was cancelled") from None
        except self._grpc_aio.AioRpcError as failure:
            raise _broken_by(from_grpc(failure, self._endpoint)) from failure
        except (asyncio.InvalidStateError, self._grpc_aio.UsageError, self._grpc_aio.InternalError) as failure:
            raise ConnectionLost(f"{self._endpoint}: the stream is over") from failure

    async def close(self) -> None:
        """Half-closes after the queued items and waits for the server's end; a reader may receive the last items."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.finish()
                if self._broken is None:
                    await self._write(END_OF_ITEMS)
                    await self._call.done_writing()
                puller = self._start_pulling()
                self._changed()  # without a reader it reads on
                await asyncio.wait((puller,))
        except (TimeoutError, MagnetarError, asyncio.InvalidStateError) as error:
            _LOG.debug("the stream to %s did not end in order: %s", self._endpoint, error)
        finally:
            self._call.cancel()
            await self.release()


def _broken_by(error: MagnetarError) -> MagnetarError:
    """The error for senders when the stream broke with `error`: what they sent may have been done."""
    return error if isinstance(error, WrongProtocol) else ConnectionLost(error.message, **error.fields)


# ---------------------------------------------------------------------------------- server
class GrpcServing:
    """A listening gRPC server."""

    def __init__(self, server: grpc.aio.Server, endpoint: Endpoint, handlers: dict[asyncio.Task[Any], None]) -> None:
        self._server = server
        self._endpoint = endpoint
        self._handlers = handlers
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def close(self, grace_s: float = 0.0) -> None:
        """Accepts no more calls; running ones have `grace_s`, then they are cut. Returns when all handlers are done."""
        if self._closed:
            return
        self._closed = True
        await self._server.stop(grace_s)
        handlers = list(self._handlers)
        if handlers:
            await asyncio.wait(handlers, timeout=HANDLERS_TIMEOUT_S)
            for handler in handlers:
                handler.cancel()
            await asyncio.wait(handlers)


async def serve(endpoint: Endpoint, services: Sequence[tuple[str, object]]) -> GrpcServing:
    """Serves on `endpoint` (port 0: a free one). Raises Busy when the port is taken."""
    handlers: dict[asyncio.Task[Any], None] = {}
    server = grpc_module().aio.server(options=_SERVER_OPTIONS)
    for name, handler in services:
        server.add_generic_rpc_handlers((_generic_handler(name, handler, handlers),))
    try:
        port = server.add_insecure_port(str(endpoint))
    except RuntimeError as error:
        raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error
    await server.start()
    return GrpcServing(server, Endpoint(endpoint.host, port), handlers)


def _generic_handler(name: str, handler: object, handlers: dict[asyncio.Task[Any], None]) -> Any:
    """gRPC's handler of all methods that `handler` has; the others are UNIMPLEMENTED."""
    grpc = grpc_module()
    service = wire.DESCRIPTOR.services_by_name[name]
    methods = {}
    for method in service.methods:
        target = rpc(name, method.name)
        function = getattr(handler, _snake(method.name), None)
        if function is None:
            continue
        if target.streaming:
            methods[method.name] = grpc.stream_stream_rpc_method_handler(_streaming(target, function, handlers))
        else:
            run = _unary(target, function, handlers)
            methods[method.name] = grpc.unary_unary_rpc_method_handler(run, None, target.reply.SerializeToString)
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _peer_of(context: Any) -> str:
    """HOST:PORT of the caller (gRPC writes "ipv6:%5B::1%5D:80")."""
    peer = str(context.peer())
    kind, _, address = peer.partition(":")
    return address.replace("%5B", "[").replace("%5D", "]") if kind.startswith("ipv") else peer


def _parse(target: Rpc[Any, Any], data: bytes) -> Any:
    if len(data) > (limit := target.request_bytes_max):
        raise MessageTooLarge(f"a request of {len(data)} bytes; at most {limit} are taken", size=len(data), limit=limit)
    try:
        return target.request.FromString(data)
    except DecodeError as error:
        raise WrongProtocol(f"the request is no {target.request.DESCRIPTOR.full_name}: {error}") from error


def _unary(
    target: Rpc[Any, Any], function: Callable[[Any, CallContext], Awaitable[Any]],
    handlers: dict[asyncio.Task[Any], None],
) -> Callable[[Any, Any], Awaitable[Any]]:  # fmt: skip
    async def run(request: bytes, context: CallContext) -> Any:
        return await function(_parse(target, request), context)

    async def handle(request: bytes, context: Any) -> Any:
        handler = asyncio.get_running_loop().create_task(run(request, CallContext(_peer_of(context))))
        handlers[handler] = None
        handler.add_done_callback(lambda task: handlers.pop(task, None))
        try:
            await asyncio.wait((handler,))
        except asyncio.CancelledError:  # no answer to a caller that disconnected; others get one
            handler.add_done_callback(_log_fault)
            raise
        if handler.cancelled():
            return await abort(context, ConnectionLost("the server gave the call up"))
        error = handler.exception()
        return handler.result() if error is None else await abort(context, error)

    return handle


def _streaming(
    target: Rpc[Any, Any],
    function: Callable[[GrpcStream, CallContext], Awaitable[None]],
    handlers: dict[asyncio.Task[Any], None],
) -> Callable[[Any, Any], Awaitable[None]]:
    async def run(stream: GrpcStream, context: CallContext) -> None:
        await function(stream, context)

    async def handle(_: Any, context: Any) -> None:
        stream = _ServerStream(target, context)
        handler = asyncio.get_running_loop().create_task(run(stream, CallContext(_peer_of(context))))
        handlers[handler] = None
        handler.add_done_callback(lambda task: _ended(handlers, task))
        try:
            await asyncio.wait((handler, stream.cut), return_when=asyncio.FIRST_COMPLETED)
            error = stream.cut.result() if stream.cut.done() else _error_of(handler)
            await (stream.written(CUT_S) if stream.cut.done() else stream.finish())
            if error is not None and (stream.cut.done() or not stream.is_broken):
                await abort(context, error)
        except asyncio.CancelledError:
            stream.fail(ConnectionLost("the caller is gone"))
            raise
        finally:
            if handler.done():
                await stream.release()
            else:
                handler.add_done_callback(lambda _: stream.release_soon())

    return handle


def _error_of(handler: asyncio.Task[None]) -> BaseException | None:
    if handler.cancelled():
        return ConnectionLost("the server gave the stream up")
    error = handler.exception()
    return None if isinstance(error, EndOfStream) else error


def _ended(handlers: dict[asyncio.Task[Any], None], task: asyncio.Task[None]) -> None:
    handlers.pop(task, None)
    _log_fault(task)


def _log_fault(task: asyncio.Task[Any]) -> None:
    """Logs an error; a handler may end with ConnectionLost or EndOfStream, which it need not catch."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, MagnetarError | EndOfStream):
        _LOG.error("a handler failed", exc_info=error)


class _ServerStream(GrpcStream):
    """`cut` is done when this side ends the call before its handler does, with the error for the caller."""

    def __init__(self, target: Rpc[Any, Any], context: Any) -> None:
        super().__init__(
            target.request, self._read_context, self._write_context, self._cut_off,
            in_bytes_max=target.request_bytes_max,
            copied=None if "/magnetar.wire.Metadata/" in target.path else copied_tags(target.request),
        )  # fmt: skip
        self._context = context
        self._grpc_aio = grpc_module().aio
        self._ended = False
        self.cut: asyncio.Future[MagnetarError] = self._loop.create_future()

    def _cut_off(self, error: MagnetarError) -> None:
        if not self.cut.done():
            self.cut.set_result(error)

    async def _read_context(self) -> bytes:
        try:
            data = await self._context.read()
            if data == END_OF_ITEMS:
                self._ended = True
                data = await self._context.read()
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise self._gone() from None
        except (self._grpc_aio.UsageError, self._grpc_aio.InternalError) as error:
            raise self._gone() from error
        if data is not self._grpc_aio.EOF:
            return bytes(data)
        if not self._ended and self._broken is None:
            await self._change(FOREIGN_END_S)
        if self._broken is not None:
            raise self._gone()
        raise EndOfStream

    async def _write_context(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise ConnectionLost("the caller is gone") from None
        except (self._grpc_aio.UsageError, self._grpc_aio.InternalError) as error:
            raise ConnectionLost("the caller is gone") from error

    def _gone(self) -> MagnetarError:
        self.fail(ConnectionLost("the caller is gone"))
        assert self._broken is not None
        return self._broken
