"""gRPC's server on grpc.aio: the `serve` of `runtime/network.py`.

At a server each call has a task of its own for its handler. gRPC cancels *its* coroutine when the caller disconnects;
the handler is not cancelled. A stream's handler gets ConnectionLost from its stream and ends in its own order. A unary
call's handler runs to its end, because a change that it has begun must not stay half done: a topic that was being
unloaded would keep its consumers and send them nothing. An error of a handler ends the call; what was sent before still
arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from ...proto import wire_pb2 as wire
from ...proto.errors import (
    BackPressure,
    Busy,
    ConnectionLost,
    MagnetarError,
    MessageTooLarge,
    WrongProtocol,
)
from ..access import Caller, CallerMemory, ListenerAccess, MemoryBudget
from ..clock import Clock
from ..network import CallContext, EndOfStream, Endpoint, Rpc, rpc
from .access import caller_of, peer_of, server_credentials
from .callers import Callers
from .envelope import END_OF_ITEMS, copied_tags
from .errors import abort, grpc_module, is_cancelled
from .limits import OpenStreams, server_options
from .stream import GrpcStream

if TYPE_CHECKING:
    import grpc.aio

HANDLERS_TIMEOUT_S = 1.0
"""How long a server that closes lets stream handlers end by themselves after their callers were disconnected."""

FOREIGN_END_S = 0.1
"""How long a server waits, after a half-close without END_OF_ITEMS, for gRPC to report that the caller disconnected."""

CUT_S = 1.0
"""For a write in progress when this side cuts the call: one to a caller that does not read is never sent."""

_LOG = logging.getLogger("magnetar.rpc")


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


async def serve(
    endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess, clock: Clock
) -> GrpcServing:
    """Serves on `endpoint` (port 0: a free one). Raises Busy when the port is taken, InvalidConfiguration for TLS files
    that cannot be used."""
    handlers: dict[asyncio.Task[Any], None] = {}
    credentials = server_credentials(access.tls) if access.tls is not None else None
    server = grpc_module().aio.server(options=server_options(access.limits))
    asking = _Asking(access, clock)
    for name, handler in services:
        server.add_generic_rpc_handlers((_generic_handler(name, handler, handlers, asking),))
    try:
        if credentials is not None:
            port = server.add_secure_port(str(endpoint), credentials)
        else:
            port = server.add_insecure_port(str(endpoint))
    except RuntimeError as error:
        raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error
    await server.start()
    return GrpcServing(server, Endpoint(endpoint.host, port), handlers)


class _Asking:
    """Asks who calls, before a handler starts and before anything of a request is read."""

    def __init__(self, access: ListenerAccess, clock: Clock) -> None:
        self.callers = Callers(access.guard, clock)
        self._limit = access.limits.authentications
        self._under_way = 0
        self._request_s = access.limits.first_frame_s
        self.memory = access.memory
        self.streams = OpenStreams(access.limits, access.memory.answers)

    async def who(self, context: Any, path: str) -> CallContext:
        """Raises what the guard raises; BackPressure: too many callers are asked who they are."""
        if not self.callers.asks:
            return CallContext(peer_of(context))
        if self._under_way >= self._limit:
            raise BackPressure(f"{self._limit} callers are being authenticated: try again")
        try:
            caller = caller_of(context)
        except MagnetarError as refusal:
            self.callers.refused(Caller(peer_of(context)), path, refusal)
            raise
        self._under_way += 1
        try:
            return CallContext(caller.peer, await self.callers.admitted(caller, path))
        finally:
            self._under_way -= 1

    async def request(self, context: Any) -> bytes:
        """Of a unary call whose caller is known. ConnectionLost: it did not come, or not in time."""
        aio = grpc_module().aio
        try:
            async with asyncio.timeout(self._request_s):
                await self.memory.requests.room()
                data = await context.read()
        except TimeoutError:
            raise ConnectionLost(f"the request did not come within {self._request_s:g} s") from None
        except (aio.UsageError, aio.InternalError) as error:
            raise ConnectionLost("the caller is gone") from error
        if data is aio.EOF:
            raise ConnectionLost("the call ended before its request")
        return bytes(data)


def _generic_handler(name: str, handler: object, handlers: dict[asyncio.Task[Any], None], asking: _Asking) -> Any:
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
            methods[method.name] = grpc.stream_stream_rpc_method_handler(_streaming(target, function, handlers, asking))
        else:
            run = _unary(target, function, handlers, asking)
            methods[method.name] = grpc.stream_unary_rpc_method_handler(run, None, target.reply.SerializeToString)
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _parse(target: Rpc[Any, Any], data: bytes) -> Any:
    if len(data) > (limit := target.request_bytes_max):
        raise MessageTooLarge(f"a request of {len(data)} bytes; at most {limit} are taken", size=len(data), limit=limit)
    try:
        return target.request.FromString(data)
    except DecodeError as error:
        raise WrongProtocol(f"the request is no {target.request.DESCRIPTOR.full_name}: {error}") from error


def _unary(
    target: Rpc[Any, Any], function: Callable[[Any, CallContext], Awaitable[Any]],
    handlers: dict[asyncio.Task[Any], None], asking: _Asking,
) -> Callable[[Any, Any], Awaitable[Any]]:  # fmt: skip
    async def run(request: bytes, context: CallContext) -> Any:
        return await function(_parse(target, request), context)

    async def handle(_: Any, context: Any) -> Any:
        """For gRPC a stream of requests: it reads nothing of the one before it is asked for."""
        try:
            who = await asking.who(context, target.path)
            request = await asking.request(context)
        except Exception as refusal:
            return await abort(context, refusal)
        handler = asyncio.get_running_loop().create_task(run(request, who))
        handlers[handler], size = None, len(request)
        asking.memory.requests.held += size
        handler.add_done_callback(lambda task: _handled(handlers, task, asking.memory.requests, size))
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
    asking: _Asking,
) -> Callable[[Any, Any], Awaitable[None]]:
    async def run(stream: GrpcStream, context: CallContext) -> None:
        await function(stream, context)

    async def handle(_: Any, context: Any) -> None:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(asking.streams.place(peer_of(context)))
                who = await asking.who(context, target.path)
            except Exception as refusal:
                await abort(context, refusal)
                return
            stream = _ServerStream(target, context, asking.memory)
            held.enter_context(asking.callers.holding(who.principal, stream.break_off))
            await converse(stream, context, who)

    async def converse(stream: _ServerStream, context: Any, who: CallContext) -> None:
        asking.streams.add(stream, who.peer)
        handler = asyncio.get_running_loop().create_task(run(stream, who))
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
            asking.streams.remove(stream)
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


def _handled(handlers: dict[asyncio.Task[Any], None], task: asyncio.Task[Any], memory: MemoryBudget, size: int) -> None:
    handlers.pop(task, None)
    memory.held -= size


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

    def __init__(self, target: Rpc[Any, Any], context: Any, memory: CallerMemory) -> None:
        super().__init__(
            target.request, self._read_context, self._write_context, self._cut_off,
            in_bytes_max=target.request_bytes_max,
            copied=None if "/magnetar.wire.Metadata/" in target.path else copied_tags(target.request),
            memory=memory,
        )  # fmt: skip
        self._context = context
        self._grpc_aio = grpc_module().aio
        self._ended = False
        self.has_read = False
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
            if is_cancelled():
                raise
            raise self._gone() from None
        except (self._grpc_aio.UsageError, self._grpc_aio.InternalError) as error:
            raise self._gone() from error
        self.has_read = True
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
            if is_cancelled():
                raise
            raise ConnectionLost("the caller is gone") from None
        except (self._grpc_aio.UsageError, self._grpc_aio.InternalError) as error:
            raise ConnectionLost("the caller is gone") from error

    def _gone(self) -> MagnetarError:
        self.fail(ConnectionLost("the caller is gone"))
        assert self._broken is not None
        return self._broken
