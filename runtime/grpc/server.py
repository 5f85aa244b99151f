"""gRPC's server on our HTTP/2: the `serve` of `runtime/network.py`. The wire is gRPC's own (doc/PROTOCOL-HTTP2.md).

    connection ──HEADERS──▶ `_ServerConnection.on_stream_opened` ──▶ `_UnaryCall` or `_ServerStream` ──▶ a task: handler

Each call has one task. The caller is authenticated before anything of the request is read. A handler is not cancelled
when its caller disconnects. A stream's handler gets ConnectionLost from its stream and ends by itself. A unary call's
handler runs to its end, because a change that it has begun must not stay half done. For example, a topic that is half
unloaded would keep its consumers and send them nothing. An error of a handler ends the call; items that were sent
before still arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from ...proto.errors import (
    BackPressure,
    ConnectionLost,
    MagnetarError,
    MessageTooLarge,
    Unauthenticated,
    WrongProtocol,
)
from ..access import AUTHORIZATION_MAX, Caller, ListenerAccess
from ..clock import Clock
from ..descriptors import PROCESS_DESCRIPTORS
from ..network import (
    HEALTH_SERVICE,
    STREAM_QUEUE_BYTES,
    CallContext,
    EndOfStream,
    Endpoint,
    Rpc,
    find_rpc,
    list_rpc_names,
)
from ..tcp import http2_frames as frames
from ..tcp.http2 import (
    FRAME_BYTES_MAX,
    LIVENESS_CHECK_S,
    STREAM_WINDOW_BYTES,
    Http2Connection,
    Http2Stream,
    get_peer_address,
)
from ..tcp.http2_frames import (
    ALLOWANCE_RATE,
    HEADER_BYTES_MAX,
    KNOWN_CALLER_ALLOWANCE,
    REFUSED_CALL_CHARGE,
    STRANGER_ALLOWANCE,
    HeaderDecoder,
    HeaderField,
    Http2ErrorCode,
    Http2Setting,
    encode_headers,
)
from ..tcp.listening import TcpListening, UnauthenticatedConnections, listen
from ..tcp.share import UnauthenticatedLoopShare
from .limits import (
    AUTHORIZATION_HEADER,
    CALLS_MAX,
    IDLE_CONNECTION_S,
    CallerAuthenticator,
    OpenStreams,
    make_server_tls_context,
)
from .messages import MessageStream, find_bytes_field_tags, prefix
from .stream import GrpcStream, Status, make_error_trailers, make_status_trailers

HANDLERS_TIMEOUT_S = 1.0
"""Seconds that a server which closes lets handlers end by themselves after their callers were disconnected."""

_IDLE_LOOKS = int(IDLE_CONNECTION_S / LIVENESS_CHECK_S)
UNAUTHENTICATED_PATH = f"/{HEALTH_SERVICE}/Check"
"""The one call that needs no credentials: a probe's, which is told whether the server is ready and no more. It admits
nobody: its connection stays one of a stranger."""
STRANGER_CHECKS = 4
"""Looks after which a connection without a call that was admitted is closed."""

_ANSWER = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_ANSWER_BLOCK = encode_headers(_ANSWER)
_OK_BLOCK = encode_headers(make_status_trailers(Status.OK))
_NOT_HTTP2 = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"This port speaks gRPC, which is HTTP/2. The HTTP port of a broker is 8080.\n"
)

_LOG = logging.getLogger("magnetar.rpc")


class RunningGrpcServer:
    """A gRPC server that is listening (`runtime.network.RunningServer`). The function `serve` creates it."""

    def __init__(self, listener: _Listener, server: TcpListening, endpoint: Endpoint) -> None:
        self._listener = listener
        self._server = server
        self._endpoint = endpoint
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def close(self, grace_s: float = 0.0) -> None:
        """Stops accepting calls. Running calls may continue for `grace_s` seconds; then their connections are closed,
        and handlers that still run after HANDLERS_TIMEOUT_S are cancelled. Returns when all handlers have ended. A
        second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._server.close()
        handlers = self._listener.handlers
        self._listener.stop_accepting()
        if grace_s and handlers:
            await asyncio.wait(list(handlers), timeout=grace_s)
        self._listener.end_all_streams()
        if handlers:
            left = list(handlers)
            await asyncio.wait(left, timeout=HANDLERS_TIMEOUT_S)
            for handler in left:
                handler.cancel()
            await asyncio.wait(left)


async def serve(
    endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess, clock: Clock
) -> RunningGrpcServer:
    """Starts a gRPC server at `endpoint` (port 0: a free port), and returns it. Each of `services` is (name of a
    service in proto/wire.proto, its handler). Raises Busy if the port is taken, InvalidConfiguration if the TLS files
    cannot be used."""
    listener = _Listener(services, access, clock)
    tls = make_server_tls_context(access.tls) if access.tls is not None else None
    server = await listen(endpoint, lambda: _ServerConnection(listener), tls, access.limits)
    return RunningGrpcServer(listener, server, Endpoint(endpoint.host, server.port))


# ---------------------------------------------------------------------------------- a request's head
class _Head(NamedTuple):
    """The parsed headers of a call: its path, its credentials, and how its body is encoded."""

    path: str
    authorization: tuple[str, ...]
    is_post: bool
    is_grpc: bool
    encoding: str


def _head_of(headers: list[HeaderField]) -> _Head:
    authorization: list[str] = []
    found = {b":path": b"", b":method": b"", b"content-type": b"", b"grpc-encoding": b"identity"}
    for name, value in headers:
        if name in found:
            found[name] = value
        elif name == AUTHORIZATION_HEADER:
            authorization.append(value.decode("latin-1"))
    return _Head(
        found[b":path"].decode("latin-1"), tuple(authorization), found[b":method"] == b"POST",
        found[b"content-type"].startswith(b"application/grpc"), found[b"grpc-encoding"].decode("latin-1"),
    )  # fmt: skip


def _authorization(head: _Head) -> str:
    """Returns the value of the header `authorization`. Raises Unauthenticated if it is too long, or there are two."""
    if len(head.authorization) > 1:
        raise Unauthenticated(f"the call has {len(head.authorization)} headers `authorization`; send one")
    value = head.authorization[0] if head.authorization else ""
    if len(value) > AUTHORIZATION_MAX:
        raise Unauthenticated(f"the header `authorization` is too long: {len(value)} characters of {AUTHORIZATION_MAX}")
    return value


# ---------------------------------------------------------------------------------- the listener
class _Method:
    """An rpc of a service, and the handler's method that serves it."""

    __slots__ = ("copied", "function", "target")

    def __init__(self, target: Rpc[Any, Any], function: Callable[[Any, CallContext], Awaitable[Any]]) -> None:
        self.target, self.function = target, function
        self.copied = (
            find_bytes_field_tags(target.request)
            if target.streaming and not target.is_plain and "/magnetar.wire.Metadata/" not in target.path
            else None
        )  # fmt: skip


class _Listener:
    """The common state of all connections of a server: its methods, its limits, and the handlers that run."""

    def __init__(self, services: Sequence[tuple[str, object]], access: ListenerAccess, clock: Clock) -> None:
        self.access = access
        self.methods = {each.target.path: each for name, handler in services for each in _methods(name, handler)}
        self.handlers: dict[asyncio.Task[None], None] = {}
        self.connections: dict[_ServerConnection, None] = {}
        self.strangers = UnauthenticatedConnections(access.limits)  # without a call that was admitted
        self.callers = CallerAuthenticator(access.guard, clock)
        self.memory = access.memory
        self.share = UnauthenticatedLoopShare()
        self.streams = OpenStreams(access.limits, access.memory.answers)
        self.closed = False
        self._under_way = 0

    def admit_connection(self, connection: _ServerConnection) -> bool:
        """Counts a new connection, whose caller is not authenticated yet. Returns False, and does not count it, if
        there are too many connections, or the listener is closed."""
        if self.closed or not self.strangers.add(connection, connection.peer):
            return False
        if len(self.connections) < self.access.limits.connections and PROCESS_DESCRIPTORS.reserve_connection():
            return True
        self.strangers.remove(connection)
        return False

    def spawn(self, coroutine: Any, connection: _ServerConnection) -> None:
        """Runs a call's handler. The handler's errors are answered to the caller; an error raised here is a bug of this
        module.
        """
        task = asyncio.get_running_loop().create_task(coroutine)
        self.handlers[task] = None
        connection.calls += 1
        task.add_done_callback(lambda task: self._on_call_ended(task, connection))

    def _on_call_ended(self, task: asyncio.Task[None], connection: _ServerConnection) -> None:
        self.handlers.pop(task, None)
        connection.calls -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a call failed", exc_info=error)

    async def authenticate(self, connection: _ServerConnection, head: _Head, cost: int) -> CallContext:
        """Authenticates the caller of a call and returns its context. Raises the errors of the guard, or BackPressure
        if too many callers are being authenticated.

        The first admitted call marks the connection as authenticated. A refused call is charged to the connection's
        allowance; `cost` is the cost of its header block.
        """
        if not self.callers.requires_authentication:
            found = CallContext(connection.peer)
        elif head.path == UNAUTHENTICATED_PATH:
            if not connection.allowance.is_known:
                connection.charge_refused_call(cost)  # as one that is refused: it is a stranger's
            return CallContext(connection.peer)
        else:
            try:
                found = await self._asked(connection, head)
            except MagnetarError:
                connection.charge_refused_call(cost)
                raise
        if not connection.allowance.is_known:
            connection.on_caller_authenticated()
            _LOG.debug("%s is %s", connection.peer, found.principal)
        return found

    async def admit_stream(
        self, stream: _ServerStream | _PlainStream, connection: _ServerConnection, head: _Head, cost: int,
        held: contextlib.ExitStack,
    ) -> CallContext | None:  # fmt: skip
        """Authenticates the caller of a new stream and returns its context; returns None if the stream is refused, or
        the caller has disconnected. Until `held` is closed, the stream counts as a stream of the caller's address, and
        is ended when the caller's credentials expire."""
        try:
            held.enter_context(self.streams.count_stream_while_open(connection.peer))
            who = await self.authenticate(connection, head, cost)
        except Exception as refusal:
            _refuse(stream, refusal, begun=False)
            return None
        if stream.connection is None:
            return None
        held.enter_context(self.callers.end_when_credentials_expire(who.principal, stream.terminate_with_error))
        return who

    async def _asked(self, connection: _ServerConnection, head: _Head) -> CallContext:
        limit = self.access.limits.authentications
        if self._under_way >= limit:
            raise BackPressure(f"{limit} callers are being authenticated: try again")
        try:
            caller = connection.caller(_authorization(head))
        except MagnetarError as refusal:
            self.callers.record_refusal(Caller(connection.peer), head.path, refusal)
            raise
        self._under_way += 1
        try:
            return CallContext(caller.peer, await self.callers.admit(caller, head.path))
        finally:
            self._under_way -= 1

    def stop_accepting(self) -> None:
        self.closed = True
        for connection in list(self.connections):
            connection.go_away()

    def end_all_streams(self) -> None:
        for connection in list(self.connections):
            connection.close(ConnectionLost("the server is closing"))
        self.share.close()


def _methods(name: str, handler: object) -> list[_Method]:
    """Returns the methods of a service that `handler` has; calls of the others are UNIMPLEMENTED."""
    methods = []
    for each in list_rpc_names(name):
        function = getattr(handler, _snake(each), None)
        if function is not None:
            methods.append(_Method(find_rpc(name, each), function))
    return methods


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class _ServerConnection(Http2Connection[_Head]):
    """A caller's connection."""

    def __init__(self, listener: _Listener) -> None:
        super().__init__(HeaderDecoder(_head_of, HEADER_BYTES_MAX), b"", {
            Http2Setting.MAX_CONCURRENT_STREAMS: CALLS_MAX,
            Http2Setting.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
            Http2Setting.MAX_HEADER_LIST_SIZE: HEADER_BYTES_MAX,
        })  # fmt: skip
        self.allowance.set_allowance(STRANGER_ALLOWANCE, ALLOWANCE_RATE / 100)
        self.allowance.share = listener.share
        self._listener = listener
        self._last = 0
        self._greeting = b""
        self.is_greeted = False
        self._idle_since = 0
        self._certificate: bytes | None = None
        self.calls = 0  # their handlers run
        self.is_draining = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        listener = self._listener
        self.peer = get_peer_address(transport)
        if not listener.admit_connection(self):
            self.is_lost = True
            transport.abort()  # type: ignore[attr-defined]
            return
        listener.connections[self] = None
        listener.memory.connections += 1
        super().connection_made(transport)
        _LOG.debug("%s has connected, with gRPC", self.peer)

    @property
    def is_busy(self) -> bool:
        """Returns whether a call of this connection is being handled or authenticated."""
        return self.calls > 0

    def evict(self) -> None:
        self.abort(ConnectionLost("others wait, and no call of this connection was admitted"))

    def on_caller_authenticated(self) -> None:
        """Called when the first call of the connection is admitted: allows more calls, and removes the connection from
        the unauthenticated ones (`UnauthenticatedConnections`).
        """
        self.allowance.set_allowance(KNOWN_CALLER_ALLOWANCE, ALLOWANCE_RATE)
        self._listener.strangers.remove(self)

    def on_lost(self, error: MagnetarError) -> None:
        if self in self._listener.connections:
            del self._listener.connections[self]
            self._listener.strangers.remove(self)
            self._listener.memory.connections -= 1
            PROCESS_DESCRIPTORS.release_connection()
            _LOG.debug("%s has disconnected: %s", self.peer, error)

    def consume_preface(self, view: memoryview) -> memoryview:
        size = min(len(frames.CONNECTION_PREFACE) - len(self._greeting), len(view))
        self._greeting += view[:size]
        if not frames.CONNECTION_PREFACE.startswith(self._greeting):
            if self._greeting[:4] in (b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI"):
                self.out.write(_NOT_HTTP2)
            self.close(ConnectionLost(f"{self.peer} does not speak HTTP/2"))
            return view[:0]
        self.is_greeted = len(self._greeting) == len(frames.CONNECTION_PREFACE)
        return view[size:]

    def is_idle(self, id_: int) -> bool:
        return id_ % 2 == 0 or id_ > self._last

    def on_liveness_check(self, looks: int) -> None:
        if self.streams or self.calls:
            self._idle_since = looks
        elif not self.allowance.is_known and looks >= STRANGER_CHECKS:
            self.close(
                ConnectionLost(f"no call of {self.peer} was admitted in {STRANGER_CHECKS * LIVENESS_CHECK_S:g} s")
            )
        elif looks - self._idle_since >= _IDLE_LOOKS:
            self.go_away()
            self.close(ConnectionLost(f"{self.peer} made no call for {IDLE_CONNECTION_S} s"))

    def go_away(self) -> None:
        """Accepts no more calls (GOAWAY); open calls continue."""
        if not self.is_draining:
            self.is_draining = True
            self.out.write(frames.encode_goaway(self._last, Http2ErrorCode.NO_ERROR))

    def charge_refused_call(self, cost: int) -> None:
        """Charges a refused call to the allowance of the connection, and ends the connection if the allowance is used
        up. `cost`: the cost of the call's header block."""
        try:
            self.allowance.charge_frames(REFUSED_CALL_CHARGE + cost)
        except frames.Http2Violation as error:
            self.terminate_with_error(error.code, str(error))

    def caller(self, authorization: str) -> Caller:
        found: ssl.SSLObject | None = self.out.transport.get_extra_info("ssl_object")
        if found is not None and self._certificate is None:
            certificate = found.getpeercert(binary_form=True)
            self._certificate = ssl.DER_cert_to_PEM_cert(certificate).encode() if certificate else b""
        return Caller(self.peer, authorization, self._certificate or b"", found is not None)

    def on_stream_opened(self, id_: int, head: _Head, ended: bool) -> None:
        if id_ % 2 == 0:
            raise frames.Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, f"a client opened stream {id_}, which is even")
        self._last = id_
        cost = self._decoder.cost
        if self.is_draining:
            self.allowance.charge_frames(1 + cost)
            return  # the caller was told, and what follows of this stream is ignored
        if max(self.calls, len(self.streams)) >= CALLS_MAX:
            self.allowance.charge_frames(REFUSED_CALL_CHARGE + cost)
            self.out.write(frames.encode_rst_stream(id_, Http2ErrorCode.REFUSED_STREAM))
            return
        refusal = self._refusal(head)
        if refusal is not None:
            self.allowance.charge_frames(REFUSED_CALL_CHARGE + cost)
            self.open(stream := Http2Stream(), id_, has_head=True)
            stream.in_ended = ended
            self.out.send_headers(stream, encode_headers(refusal), ends=True)
            if not ended:
                self.reset(stream, Http2ErrorCode.NO_ERROR)
            return
        method = self._listener.methods[head.path]
        plain = _PlainStream if method.target.is_plain else _ServerStream
        kind = plain if method.target.streaming else _UnaryCall
        call = kind(self._listener, method, head, cost)
        self.open(call, id_, has_head=True)
        call.in_ended = ended
        call.start(self)

    def _refusal(self, head: _Head) -> list[HeaderField] | None:
        if not head.is_post:
            return [(b":status", b"405")]
        if not head.is_grpc:
            return [(b":status", b"415")]
        if head.path not in self._listener.methods:
            return [*_ANSWER, *make_status_trailers(Status.UNIMPLEMENTED, f"no method {head.path} is served here")]
        if head.encoding != "identity":
            text = f"requests compressed with {head.encoding} are not taken"
            return [*_ANSWER, *make_status_trailers(Status.UNIMPLEMENTED, text), (b"grpc-accept-encoding", b"identity")]
        return None


def _refuse(stream: Http2Stream, error: BaseException, *, begun: bool) -> None:
    """Ends a call with an error. `begun` says whether the head of the answer was sent."""
    trailers, connection = make_error_trailers(error), stream.connection
    if connection is None or stream.out_ended:
        return
    connection.out.send_headers(stream, encode_headers(trailers if begun else [*_ANSWER, *trailers]), ends=True)
    if stream.connection is not None:
        connection.reset(stream, Http2ErrorCode.NO_ERROR)


# ---------------------------------------------------------------------------------- unary
class _UnaryCall(MessageStream):
    """A unary call at the server: waits for its request, then runs its handler."""

    __slots__ = ("_changed", "_cost", "_head", "_listener", "_method", "_refused", "_request")

    def __init__(self, listener: _Listener, method: _Method, head: _Head, cost: int) -> None:
        """Creates a call. `cost` is that of its header block (`HeaderDecoder`)."""
        super().__init__(method.target.request_bytes_max)
        self._listener = listener
        self._method = method
        self._head, self._cost = head, cost
        self._request: list[bytes | bytearray] = []
        self._refused: MagnetarError | None = None
        self._changed: asyncio.Future[None] | None = None

    def start(self, connection: _ServerConnection) -> None:
        self._listener.spawn(self._run(connection), connection)

    def on_message(self, data: bytes | bytearray, cost: int) -> None:
        self.on_service_read(cost)
        if self._request and self.connection is not None:
            self.connection.allowance.charge_frames(REFUSED_CALL_CHARGE)
            self._stop(WrongProtocol("a unary call has one request"))
        else:
            self._request.append(data)

    def on_message_refused(self, size: int) -> None:
        limit = self.in_bytes_max
        self._stop(
            MessageTooLarge(f"a request of {size} bytes; at most {limit} are taken", size=size, limit=limit)
            if size >= 0
            else WrongProtocol("the request is compressed, and no compression was agreed on")
        )

    def _stop(self, error: MagnetarError) -> None:
        self._refused = self._refused or error
        self._wake()

    def on_input_ended(self) -> None:
        self._wake()

    def on_lost(self, error: MagnetarError, code: int | None) -> None:
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _run(self, connection: _ServerConnection) -> None:
        listener, requests = self._listener, self._listener.memory.requests
        size = 0
        try:
            who = await listener.authenticate(connection, self._head, self._cost)
            if requests.held > requests.limit:
                await requests.wait_room()
            request = self._request[0] if self.in_ended and self._request else await self._whole(connection)
            size = len(request)
            requests.held += size
            message = self._parse(request)
            if self._refused is not None:
                raise self._refused
            if self.connection is None:
                return  # the caller gave up before anything began
            reply = await self._method.function(message, who)
        except asyncio.CancelledError:
            _refuse(self, ConnectionLost("the server gave the call up"), begun=False)
            raise
        except Exception as error:
            _refuse(self, error, begun=False)
        else:
            self._answer(reply.SerializeToString())
        finally:
            requests.held -= size

    async def _whole(self, connection: _ServerConnection) -> bytes | bytearray:
        """Returns the request. Raises ConnectionLost if it does not arrive in time."""
        if self.connection is not None:
            connection.window.open(self)
        limit_s = self._listener.access.limits.first_frame_s
        try:
            async with asyncio.timeout(limit_s):
                while not self.in_ended and self._refused is None and self.connection is not None:
                    self._changed = asyncio.get_running_loop().create_future()
                    await self._changed
        except TimeoutError:
            raise ConnectionLost(f"the request did not come within {limit_s:g} s") from None
        if self._refused is not None:
            raise self._refused
        if self.connection is None:
            raise ConnectionLost("the caller is gone")
        if not self._request or self.has_partial_message:
            raise ConnectionLost("the call ended before its request")
        return self._request[0]

    def _parse(self, data: bytes | bytearray) -> Any:
        target = self._method.target
        try:
            return target.request.FromString(data)
        except DecodeError as error:
            raise WrongProtocol(f"the request is no {target.request.DESCRIPTOR.full_name}: {error}") from error

    # ------------------------------------------------------------------ the answer
    def _answer(self, data: bytes) -> None:
        connection = self.connection
        if connection is None:
            return
        message = prefix(len(data)) + data
        if connection.out.may_send_whole(self, len(message)):
            connection.out.send_whole_answer(self, _ANSWER_BLOCK, message, _OK_BLOCK)
        else:
            connection.out.send_headers(self, _ANSWER_BLOCK, ends=False)
            self._place = memoryview(message)  # its own place is free: the request is whole
            self.on_writable()

    def on_writable(self) -> None:
        connection = self.connection
        if connection is not None:
            sent = connection.out.send_data(self, self._place)
            self._place = self._place[sent:]
            if not self._place:
                connection.out.send_headers(self, _OK_BLOCK, ends=True)


# ---------------------------------------------------------------------------------- streams
_TORN = "the caller ended in the middle of a message"


class _ServerStream(GrpcStream):
    """A stream at the server. Its handler starts with it; it ends when the handler returns, or by `cut`."""

    def __init__(self, listener: _Listener, method: _Method, head: _Head, cost: int) -> None:
        """Creates a stream. `cost` is that of its header block (`HeaderDecoder`)."""
        target = method.target
        super().__init__(
            target.request, in_bytes_max=target.request_bytes_max, copied=method.copied, memory=listener.memory
        )
        self._listener = listener
        self._method = method
        self._head, self._cost = head, cost
        self._has_answered = False
        self._ending = False
        self._trailers: list[HeaderField] | None = None  # None: of a call that went well

    def start(self, connection: _ServerConnection) -> None:
        self._listener.spawn(self._run(connection), connection)

    async def _run(self, connection: _ServerConnection) -> None:
        with contextlib.ExitStack() as held:
            who = await self._listener.admit_stream(self, connection, self._head, self._cost, held)
            if who is None:
                self.fail_sending(ConnectionLost("the stream is refused"))
                return
            arrivals = self._listener.memory.arrivals
            window = arrivals.reserve_window(STREAM_WINDOW_BYTES)
            held.callback(arrivals.release_window, window)
            connection.window.open(self, window)
            self.on_reading_started()
            self._listener.streams.add(self, who.peer)
            try:
                self._end_with(await self._outcome(who))
                await self.finish()
            except asyncio.CancelledError:
                self._end_with(ConnectionLost("the server gave the stream up"))
                raise
            finally:
                self._listener.streams.remove(self)
                self._forget_received()

    async def _outcome(self, who: CallContext) -> Exception | None:
        """Runs the handler. Returns its error, or None if the call succeeded."""
        try:
            await self._method.function(self, who)
        except EndOfStream:
            return None
        except Exception as error:
            return error
        return None

    def _end_with(self, error: Exception | None) -> None:
        """Ends the call with this error after all queued items were sent."""
        if self.is_broken:
            if error is not None and not isinstance(error, MagnetarError):
                _LOG.error("a handler failed", exc_info=error)
            return
        self._trailers = make_error_trailers(error) if error is not None else None
        self._ending = self._closing = True
        self._flush()

    def send_answer_headers(self) -> None:
        if self.connection is not None:
            self.connection.out.send_headers(self, _ANSWER_BLOCK, ends=False)

    def on_output_drained(self) -> None:
        connection = self.connection
        if self._ending and connection is not None and not self.out_ended:
            connection.out.send_headers(
                self, _OK_BLOCK if self._trailers is None else encode_headers(self._trailers), ends=True
            )
            if self.connection is not None:
                connection.reset(self, Http2ErrorCode.NO_ERROR)
            self.fail_sending(ConnectionLost("the stream is over"))

    def reset_with_error(self, error: MagnetarError) -> None:
        _refuse(self, error, begun=self._has_answered)

    def on_input_ended(self) -> None:
        if self.must_defer_input_end():
            return
        self.end_receiving(ConnectionLost(_TORN) if self.has_partial_message else EndOfStream())

    def on_lost(self, error: MagnetarError, code: int | None) -> None:
        gone = ConnectionLost("the caller is gone")
        self.fail_sending(gone)
        self.end_receiving(gone)


class _PlainStream(MessageStream):
    """A stream at the server whose messages go one by one, as they are: of the services of gRPC itself. What is not
    read yet, and what is not sent yet, is bounded by the windows."""

    __slots__ = ("_begun", "_changed", "_ending", "_head", "_head_cost", "_listener", "_lost", "_method", "_out",
                 "_requests")  # fmt: skip

    def __init__(self, listener: _Listener, method: _Method, head: _Head, cost: int) -> None:
        """Creates a stream. `cost` is that of its header block (`HeaderDecoder`)."""
        super().__init__(method.target.request_bytes_max)
        self._listener = listener
        self._method = method
        self._head, self._head_cost = head, cost
        self._requests: list[tuple[bytes | bytearray, int]] = []
        self._out = b""
        self._begun = self._ending = False
        self._lost: MagnetarError | None = None
        self._changed = asyncio.Event()

    def start(self, connection: _ServerConnection) -> None:
        self._listener.spawn(self._run(connection), connection)

    async def _run(self, connection: _ServerConnection) -> None:
        with contextlib.ExitStack() as held:
            who = await self._listener.admit_stream(self, connection, self._head, self._head_cost, held)
            if who is None:
                return
            connection.window.open(self)
            try:
                await self._method.function(self, who)
            except EndOfStream:
                pass
            except asyncio.CancelledError:
                _refuse(self, ConnectionLost("the server gave the stream up"), begun=self._begun)
                raise
            except Exception as error:
                _refuse(self, error, begun=self._begun)
                return
            self._ending = True
            self.on_writable()

    @property
    def is_open(self) -> bool:
        """Returns whether the stream can still be used: its caller has not disconnected."""
        return self.connection is not None and self._lost is None

    async def receive(self) -> Any:
        """Returns the next request. Raises EndOfStream after the last request, ConnectionLost if the caller has
        disconnected or has ended its side in the middle of a request."""
        while not self._requests:
            if self._lost is not None or self.connection is None:
                raise self._lost or ConnectionLost("the caller is gone")
            if self.in_ended:
                raise ConnectionLost(_TORN) if self.has_partial_message else EndOfStream
            self._changed.clear()
            await self._changed.wait()
        data, cost = self._requests.pop(0)
        self.on_service_read(cost)
        try:
            return self._method.target.request.FromString(data)
        except DecodeError as error:
            raise WrongProtocol(f"the request is no {self._method.target.request.DESCRIPTOR.full_name}") from error

    async def send(self, message: Any) -> None:
        """Sends a message. Waits while more than STREAM_QUEUE_BYTES are queued. Raises ConnectionLost if the caller has
        disconnected."""
        data = message.SerializeToString()
        self._out += prefix(len(data)) + data
        self.on_writable()
        while len(self._out) > STREAM_QUEUE_BYTES and self.is_open:
            self._changed.clear()
            await self._changed.wait()
        if not self.is_open:
            raise self._lost or ConnectionLost("the caller is gone")

    def on_message(self, data: bytes | bytearray, cost: int) -> None:
        self._requests.append((data, cost))
        self._changed.set()

    def on_message_refused(self, size: int) -> None:
        limit = self.in_bytes_max
        self.terminate_with_error(
            MessageTooLarge(f"a request of {size} bytes; at most {limit} are taken", size=size, limit=limit)
            if size >= 0
            else WrongProtocol("the request is compressed, and no compression was agreed on")
        )

    def on_input_ended(self) -> None:
        self._changed.set()

    def on_lost(self, error: MagnetarError, code: int | None) -> None:
        self.terminate_with_error(ConnectionLost("the caller is gone"))

    def terminate_with_error(self, error: MagnetarError) -> None:
        self._lost = self._lost or error
        self._changed.set()

    def on_writable(self) -> None:
        connection = self.connection
        if connection is None or self.out_ended:
            return
        if not self._begun:
            self._begun = True
            connection.out.send_headers(self, _ANSWER_BLOCK, ends=False)
        if self._out:
            sent = connection.out.send_data(self, memoryview(self._out))
            self._out = self._out[sent:]
            self._changed.set()
        if self._ending and not self._out:
            connection.out.send_headers(self, _OK_BLOCK, ends=True)
            if self.connection is not None:
                connection.reset(self, Http2ErrorCode.NO_ERROR)
