"""gRPC's client on our HTTP/2: the `connect` of `runtime/network.py`. The wire is gRPC's own (doc/PROTOCOL-HTTP2.md).

A channel has one connection, which is made at its first call, and again after it broke. All calls that wait share one
attempt to connect; a call that begins after a failed attempt makes another attempt. A call is sent only after the
server's settings have arrived: so an error before that is definite, because nothing was sent.

Streams and the translation of errors are in `runtime/grpc/stream.py`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import deque
from functools import partial
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from ...proto.errors import (
    ConnectionLost,
    MagnetarError,
    MessageTooLarge,
    TimedOut,
    Unavailable,
    UntrustedServer,
    WrongProtocol,
)
from ..access import NO_CREDENTIALS, CallerAccess
from ..files import Buffer
from ..network import MESSAGE_BYTES_MAX, EndOfStream, Endpoint, Pieces, Rpc
from ..tcp import http2_frames as frames
from ..tcp.http2 import FRAME_BYTES_MAX, STREAM_WINDOW_BYTES, Http2Connection
from ..tcp.http2_frames import (
    HEADER_BYTES_MAX,
    HeaderDecoder,
    HeaderField,
    Http2ErrorCode,
    Http2Setting,
    encode_headers,
)
from .limits import AUTHORIZATION_HEADER, ChannelTls, check_credentials_encrypted, make_authorization_header
from .messages import MessageStream, prefix
from .stream import (
    ERROR_TRAILER,
    PARSED_COPIES,
    GrpcStream,
    Status,
    copy_error,
    make_error_for_status,
    parse_grpc_message,
)

CLOSE_TIMEOUT_S = 10.0
"""Seconds that an orderly close of a stream waits for the other side before it cancels."""
CONNECT_TIMEOUT_S = 20.0
"""Seconds for one attempt to connect: TCP, TLS, and the server's settings."""

_LOG = logging.getLogger("magnetar.rpc")

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)


# ---------------------------------------------------------------------------------- an answer's head
class _Head(NamedTuple):
    """The content of a header block of an answer: `http` and `is_grpc` are from its head, `status` and the rest from
    its trailers.
    """

    http: int
    is_grpc: bool
    status: int | None
    details: str
    error: bytes  # the value of `magnetar-error-bin`


def _head_of(headers: list[HeaderField]) -> _Head:
    found = dict(headers)
    status, http = found.get(b"grpc-status", b""), found.get(b":status", b"")
    return _Head(
        int(http[:9]) if http.isdigit() else 0,
        found.get(b"content-type", b"").startswith(b"application/grpc"),
        int(status[:9]) if status.isdigit() else None,
        parse_grpc_message(found.get(b"grpc-message", b"")),
        found.get(ERROR_TRAILER, b""),
    )


def _outcome(head: _Head, endpoint: Endpoint, *, ended: bool, begun: bool) -> MagnetarError | _Going:
    """Returns what a header block means for a call: it goes on, it succeeded, or the error with which it failed."""
    if not begun and (head.http != 200 or not head.is_grpc):
        return WrongProtocol(f"{endpoint} answers as another service (HTTP status {head.http})", endpoint=endpoint)
    if not ended:
        return _GOES_ON
    if head.status is None:
        return ConnectionLost(f"{endpoint} ended the call without a status", endpoint=endpoint)
    return _WELL if head.status == Status.OK else make_error_for_status(head.status, head.details, head.error, endpoint)


class _Going:
    pass


_GOES_ON, _WELL = _Going(), _Going()


# ---------------------------------------------------------------------------------- calls
class _UnaryCall(MessageStream):
    """A unary call, and the future of its answer."""

    __slots__ = ("_endpoint", "_reply", "_reset_code", "begun", "data", "done")

    def __init__(self, endpoint: Endpoint, data: bytes) -> None:
        super().__init__(MESSAGE_BYTES_MAX)
        self._endpoint = endpoint
        self._reply: bytes | bytearray | None = None
        self.data = memoryview(data)  # what is not sent yet
        self.begun = False
        self.done: asyncio.Future[bytes | bytearray] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self.done.done()

    def start(self, connection: _ClientConnection, head: bytes) -> None:
        if connection.out.may_send_whole(self, len(self.data)):
            data, self.data = bytes(self.data), memoryview(b"")
            connection.out.send_headers(self, head, ends=True, data=data)
        else:
            connection.out.send_headers(self, head, ends=False)
            self.on_writable()

    def on_writable(self) -> None:
        if self.connection is not None and not self.out_ended:
            sent = self.connection.out.send_data(self, self.data, ends=True)
            self.data = self.data[sent:]

    def on_headers(self, head: _Head, ended: bool) -> None:
        outcome = _outcome(head, self._endpoint, ended=ended, begun=self.begun)
        self.begun = True
        if isinstance(outcome, MagnetarError):
            self.fail(outcome)
        elif outcome is _WELL:
            if self._reply is None or self.has_partial_message:
                self.fail(WrongProtocol(f"{self._endpoint} answered without a message", endpoint=self._endpoint))
            elif not self.done.done():
                self.done.set_result(self._reply)

    def on_message(self, data: bytes | bytearray, cost: int) -> None:
        self.on_service_read(cost)
        if self._reply is not None:
            self.fail(WrongProtocol(f"{self._endpoint} answered twice", endpoint=self._endpoint))
        self._reply = data

    def on_message_refused(self, size: int) -> None:
        what = "compressed" if size < 0 else f"{size} bytes long"
        self.fail(MessageTooLarge(f"the answer of {self._endpoint} is {what}", endpoint=self._endpoint))

    def on_input_ended(self) -> None:
        if not self.done.done():
            self.fail(ConnectionLost(f"{self._endpoint} ended the call without a status", endpoint=self._endpoint))

    def on_lost(self, error: MagnetarError, code: int | None) -> None:
        self.fail(_lost(error, code, self._endpoint))

    def fail(self, error: MagnetarError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # who waited may be gone

    def expire(self) -> None:
        self.fail(TimedOut(f"no answer from {self._endpoint} in time", endpoint=self._endpoint))

    def cancel(self) -> None:
        """Resets the call, because its caller does not wait any more, or the answer arrived before the whole request
        was sent.
        """
        self.done.cancel()
        if self.connection is not None:
            self.connection.reset(self, Http2ErrorCode.CANCEL)


class _ClientStream(GrpcStream):
    def __init__(self, endpoint: Endpoint, target: Rpc[Any, Any]) -> None:
        super().__init__(target.reply, out_bytes_max=target.request_bytes_max)
        self._endpoint = endpoint
        self._begun = False

    @property
    def is_over(self) -> bool:
        return self.is_broken

    def start(self, connection: _ClientConnection, head: bytes) -> None:
        connection.out.send_headers(self, head, ends=False)
        if self.queued_bytes:
            self._flush()

    def on_headers(self, head: _Head, ended: bool) -> None:
        outcome = _outcome(head, self._endpoint, ended=ended, begun=self._begun)
        self._begun = True
        if isinstance(outcome, MagnetarError):
            self.end_with_failure(outcome)
        elif outcome is _WELL:
            if self.has_partial_message:
                self.end_with_failure(ConnectionLost(f"{self._endpoint} ended the stream in the middle of a message"))
            else:
                self.fail_sending(ConnectionLost(f"{self._endpoint} ended the stream"))
                self.end_receiving(EndOfStream())
                self._reset(Http2ErrorCode.CANCEL)

    def end_with_failure(self, error: MagnetarError) -> None:
        """Ends the stream with `error`, which the server sent, or which broke the connection."""
        self.fail_sending(_broken_by(error))
        self.end_receiving(error)
        self._reset(Http2ErrorCode.CANCEL)

    def on_input_ended(self) -> None:
        if self._end is None:
            self.end_with_failure(
                ConnectionLost(f"{self._endpoint} ended the stream without a status", endpoint=self._endpoint)
            )

    def on_lost(self, error: MagnetarError, code: int | None) -> None:
        self.end_with_failure(_lost(error, code, self._endpoint))

    def reset_with_error(self, error: MagnetarError) -> None:
        self._reset(Http2ErrorCode.CANCEL)

    def _reset(self, code: Http2ErrorCode) -> None:
        if self.connection is not None:
            self.connection.reset(self, code)

    async def close(self) -> None:
        """Ends this side of the stream after the queued items, and waits until the server ends its side, at most
        CLOSE_TIMEOUT_S. A reader may still receive the last items meanwhile."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.finish()
                self._closing = True
                if self.connection is not None and not self.out_ended:
                    self.connection.out.send_data(self, memoryview(b""), ends=True)
                self._credit()  # without a reader it reads on
                while self._end is None:
                    await self._wait_change()
        except TimeoutError:
            _LOG.debug("the stream to %s did not end in order", self._endpoint)
        finally:
            self.end_with_failure(ConnectionLost("the stream is closed"))


class _PlainClientStream(_ClientStream):
    """A stream of messages as they are, without envelopes (`Rpc.is_plain`): of services that are not Magnetar's. Each
    item is one gRPC message. Fields that are not known are ignored."""

    def send_nowait(self, item: Message | bytes | Pieces) -> None:
        if self._broken is not None:
            raise copy_error(self._broken)
        assert isinstance(item, Message), "a message of the other service"
        data = item.SerializeToString()
        self._items.append((len(data), (data,)))
        self.queued_bytes += len(data)
        self._answers.held += len(data)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _next_envelope(self) -> tuple[int, deque[Buffer]]:
        size, pieces = self._items.popleft()
        return size, deque((prefix(size), *pieces))

    def _take(self) -> list[Any]:
        came, self._came = self._came, []
        self._taken_bytes += PARSED_COPIES * self._came_bytes
        self._requests.held += PARSED_COPIES * self._came_bytes
        self._came_bytes = 0
        self._credit()
        return [self._parsed(data) for data in came]

    def _parsed(self, data: bytes | bytearray) -> Any:
        try:
            return self._envelope.FromString(data)
        except DecodeError as error:
            broken = WrongProtocol(f"{self._endpoint} sent no {self._envelope.DESCRIPTOR.full_name} on the stream")
            self.terminate_with_error(broken)
            raise copy_error(broken) from error


def _broken_by(error: MagnetarError) -> MagnetarError:
    """Returns the error that the senders of a stream get after the stream broke with `error`. It says that the outcome
    of what they sent is unknown."""
    return error if isinstance(error, WrongProtocol) else ConnectionLost(error.message, **error.fields)


def _lost(error: MagnetarError, code: int | None, endpoint: Endpoint) -> MagnetarError:
    """Returns the error of a call whose stream was reset with `code`, or whose connection is lost."""
    if code == Http2ErrorCode.REFUSED_STREAM:
        return Unavailable(f"{endpoint} takes no more calls on this connection", endpoint=endpoint)
    if code == Http2ErrorCode.HTTP_1_1_REQUIRED:
        return WrongProtocol(f"{endpoint} does not speak gRPC", endpoint=endpoint)
    return ConnectionLost(f"{endpoint}: {error.message}", endpoint=endpoint)


# ---------------------------------------------------------------------------------- the connection
_Call = _UnaryCall | _ClientStream


class _ClientConnection(Http2Connection[_Head]):
    credits_at_once = True
    stream_window = STREAM_WINDOW_BYTES

    def __init__(self) -> None:
        super().__init__(HeaderDecoder(_head_of, HEADER_BYTES_MAX), frames.CONNECTION_PREFACE, {
            Http2Setting.ENABLE_PUSH: 0,
            Http2Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            Http2Setting.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
            Http2Setting.MAX_HEADER_LIST_SIZE: HEADER_BYTES_MAX,
        })  # fmt: skip
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self._next = 1
        self._waiting: deque[tuple[_Call, bytes]] = deque()  # the server takes so many streams at a time
        self.is_draining = False
        self.came_in_vain = False  # the server broke the rules before its settings were there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.window.widen_to_maximum()

    def on_settings(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)
        self._start_waiting()  # perhaps it takes more streams than before

    def on_lost(self, error: MagnetarError) -> None:
        if not self.ready.done():
            self.ready.set_result(None)
        waiting, self._waiting = self._waiting, deque()
        for call, _ in waiting:
            call.on_lost(error, None)

    def terminate_with_error(self, code: Http2ErrorCode, text: str) -> None:
        self.came_in_vain = not self.is_ready
        super().terminate_with_error(code, text)

    def is_idle(self, id_: int) -> bool:
        return id_ % 2 == 0 or id_ >= self._next

    @property
    def is_open(self) -> bool:
        """Returns whether the connection accepts more calls."""
        return not self.is_lost and not self.is_draining and self._next <= frames.STREAM_MASK

    def start(self, call: _Call, head: bytes) -> None:
        if call.is_over:
            return
        if len(self.streams) >= self.peer_streams:
            self._waiting.append((call, head))
            return
        self.open(call, self._next, has_head=False)
        self._next += 2
        call.start(self, head)

    def _start_waiting(self) -> None:
        while self._waiting and len(self.streams) < self.peer_streams and not self.is_lost:
            self.start(*self._waiting.popleft())

    def on_stream_removed(self) -> None:
        self._start_waiting()
        if self.is_draining and not self.streams and not self._waiting:
            self.loop.call_soon(self.close, ConnectionLost("the connection is not used any more"))

    def drain(self) -> None:
        """Accepts no further calls, and closes the connection after the last open call has ended."""
        self.is_draining = True
        if not self.streams and not self._waiting:
            self.close(ConnectionLost("the connection is not used any more"))

    def on_goaway(self, last: int, code: int, text: str) -> None:
        self.is_draining = True
        waiting, self._waiting = self._waiting, deque()
        not_begun = [stream for id_, stream in self.streams.items() if id_ > last]
        for stream in not_begun:
            self._remove_stream(stream)
            stream.on_lost(ConnectionLost(f"{self.peer} takes no more calls"), Http2ErrorCode.REFUSED_STREAM)
        for call, _ in waiting:
            call.on_lost(ConnectionLost(f"{self.peer} takes no more calls"), Http2ErrorCode.REFUSED_STREAM)
        self.drain()


_Attempt = asyncio.Task[_ClientConnection | MagnetarError]


def _wake(waiting: asyncio.Future[None], _: object = None) -> None:
    if not waiting.done():
        waiting.set_result(None)


class GrpcChannel:
    """A client's channel to one gRPC server (`runtime.network.Channel`). Makes its connection at the first call, and
    again after it broke. Belongs to the event loop in which it is first used. The constructor raises
    InvalidConfiguration if a TLS file cannot be used, or if credentials would leave this machine without encryption."""

    def __init__(self, endpoint: Endpoint, access: CallerAccess) -> None:
        check_credentials_encrypted(endpoint, access)
        self._endpoint = endpoint
        self._access = access
        self._tls = ChannelTls(access.tls) if access.tls is not None else None
        self._connection: _ClientConnection | None = None
        self._connecting: _Attempt | None = None  # with the newest credentials
        # with those that were given up and have not ended; and the calls that wait for each
        self._attempts: dict[_Attempt, dict[asyncio.Future[None], None]] = {}
        self._old: list[_ClientConnection] = []  # that take no more calls; each ends with its last call
        self._unopened: set[_ClientStream] = set()
        self._calls: set[_UnaryCall] = set()
        self._heads: dict[tuple[str, bytes], bytes] = {}
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    # ------------------------------------------------------------------ the connection
    def _check(self) -> None:
        """Raises ConnectionLost if the channel is closed. If the TLS files changed, lets the old connection drain, and
        gives up an attempt to connect: the calls that wait for it wait for the next one.
        """
        if self._closed:
            raise ConnectionLost(f"the channel to {self._endpoint} is closed", endpoint=self._endpoint)
        if self._tls is not None and self._tls.reload():
            if self._connecting is not None:
                self._connecting.cancel()
                self._connecting = None
            self._replace_connection(None)

    def _replace_connection(self, new: _ClientConnection | None) -> None:
        if self._connection is not None:
            self._old = [each for each in self._old if not each.is_lost] + [self._connection]
            self._connection.drain()
        self._connection = new

    def _opened(self) -> _ClientConnection | None:
        """Returns the connection if it is open and accepts calls, else None."""
        connection = self._connection
        return connection if connection is not None and connection.is_open else None

    def _attempt(self) -> _Attempt:
        """Returns the attempt to connect that is under way, or starts one."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._attempts[self._connecting] = {}
            self._connecting.add_done_callback(self._on_attempt_ended)
        return self._connecting

    def _on_attempt_ended(self, attempt: _Attempt) -> None:
        for waiting in self._attempts.pop(attempt):
            _wake(waiting)

    async def _wait_ended(self, attempt: _Attempt, call: _UnaryCall) -> None:
        """Waits until the attempt has ended, or the time of the call is over. The attempt has one callback for all
        calls: removing one of many takes time for each that is left, and thousands of producers may wait."""
        if attempt.done():
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wake = partial(_wake, waiting)
        self._attempts[attempt][waiting] = None
        call.done.add_done_callback(wake)
        try:
            await waiting
        finally:
            call.done.remove_done_callback(wake)
            if attempt in self._attempts:
                del self._attempts[attempt][waiting]

    async def _connect(self) -> _ClientConnection | MagnetarError:
        connection = _ClientConnection()
        found = await self._reach(connection)
        if isinstance(found, _ClientConnection):
            if self._closed:
                found.close(ConnectionLost("the channel is closed"))
                return ConnectionLost(f"the channel to {self._endpoint} is closed", endpoint=self._endpoint)
            self._replace_connection(found)
        return found

    async def _reach(self, connection: _ClientConnection) -> _ClientConnection | MagnetarError:
        """Connects, makes the TLS handshake and waits for the settings of the server."""
        host, port = self._endpoint
        tls = self._tls.context if self._tls is not None else None
        has_connected = False
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, host, port, ssl=tls, server_hostname=host if tls is not None else None
                )
                has_connected = True
                await connection.ready
        except TimeoutError as error:
            connection.abort_connecting()
            return self._unreached(error, has_connected=has_connected)
        except (OSError, ValueError) as error:  # ValueError: a host name that is none
            return self._unreached(error, has_connected=False)
        except BaseException:
            connection.abort_connecting()
            raise
        if connection.is_ready and not connection.is_lost:
            return connection
        if connection.came_in_vain:
            text = f"{self._endpoint} does not speak gRPC: {connection.lost_for}"
            return WrongProtocol(text, endpoint=self._endpoint)
        return self._unreached(ConnectionResetError(), has_connected=True)

    def _unreached(self, error: Exception, *, has_connected: bool) -> MagnetarError:
        """Returns the error for a failed attempt. Its field `unreached` is "refused" (the host, or a router, refused at
        once) or "silent" (no answer in time). Its field `listens` is "no" if the host says that no process listens
        there.
        """
        endpoint = self._endpoint
        match error:
            case ssl.SSLCertVerificationError():
                return UntrustedServer(f"the certificate of {endpoint} {_distrust(error)}", endpoint=endpoint)
            case ssl.SSLError() if error.reason in _NOT_TLS:
                text = f"{endpoint} does not speak TLS: its URL begins with magnetar://"
                return WrongProtocol(text, endpoint=endpoint)
            case ssl.SSLError():
                return UntrustedServer(f"no TLS with {endpoint}: {error.reason or error}", endpoint=endpoint)
            case socket.gaierror() if error.errno == socket.EAI_AGAIN:
                how, why = "silent", "the name service did not answer"
            case socket.gaierror() | ValueError():
                how, why = "refused", "the host name is not known"
            case ConnectionResetError() | BrokenPipeError() | ConnectionAbortedError():
                how = "refused"
                why = "it closed the connection: perhaps it asks for TLS (magnetar+ssl://) or for a certificate"
            case TimeoutError() if has_connected:
                how, why = "silent", "it accepts connections and sends nothing"
            case TimeoutError():
                how, why = "silent", "no answer to connecting"
            case OSError() if error.errno in (errno.ETIMEDOUT,):
                how, why = "silent", "no answer to connecting"
            case OSError():
                how, why = "refused", error.strerror or str(error)
        listens = "no" if isinstance(error, ConnectionRefusedError) else "perhaps"
        return Unavailable(f"cannot connect to {endpoint}: {why}", endpoint=endpoint, unreached=how, listens=listens)

    def _head(self, path: str) -> bytes:
        """Returns the header block of a call, which is cached by path and credential."""
        credential = make_authorization_header(self._access)
        found = self._heads.get((path, credential))
        if found is None:
            if len(self._heads) > 64:
                self._heads.clear()
            headers = [
                (b":method", b"POST"), (b":scheme", b"https" if self._tls else b"http"), (b":path", path.encode()),
                (b":authority", str(self._endpoint).encode()), (b"te", b"trailers"),
                (b"content-type", b"application/grpc"), (b"user-agent", b"magnetar"), *self._access.headers,
            ]  # fmt: skip
            if credential:
                headers.append((AUTHORIZATION_HEADER, credential))
            found = self._heads[path, credential] = encode_headers(headers)
        return found

    # ------------------------------------------------------------------ calls
    async def call(self, rpc: Rpc[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        self._check()
        data = request.SerializeToString()
        if len(data) > MESSAGE_BYTES_MAX:
            raise MessageTooLarge(
                f"a request of {len(data)} bytes; at most {MESSAGE_BYTES_MAX} are taken",
                size=len(data), limit=MESSAGE_BYTES_MAX,
            )  # fmt: skip
        call = _UnaryCall(self._endpoint, prefix(len(data)) + data)
        timer = asyncio.get_running_loop().call_later(timeout_s, call.expire)
        self._calls.add(call)
        try:
            connection = self._opened() or await self._connected(call)
            connection.start(call, self._head(rpc.path))
            reply = await call.done
        finally:
            timer.cancel()
            self._calls.discard(call)
            call.cancel()
        try:
            return rpc.reply.FromString(reply)  # type: ignore[arg-type]
        except DecodeError as error:
            text = f"{self._endpoint} answered with no {rpc.reply.DESCRIPTOR.full_name}"
            raise WrongProtocol(text, endpoint=self._endpoint) from error

    async def _connected(self, call: _UnaryCall) -> _ClientConnection:
        """Waits for the attempt to connect. Raises the attempt's error, or Unavailable if the call's time is over:
        nothing was sent.
        """
        attempt = self._attempt()
        await self._wait_ended(attempt, call)
        if self._closed:
            raise ConnectionLost(f"the channel to {self._endpoint} was closed", endpoint=self._endpoint)
        if not attempt.done():
            raise self._unreached(TimeoutError(), has_connected=False)
        if attempt.cancelled() and attempt is not self._connecting:  # it was given up
            return self._opened() or await self._connected(call)
        if attempt.cancelled():
            raise ConnectionLost(f"the channel to {self._endpoint} was closed", endpoint=self._endpoint)
        found = attempt.result()
        if isinstance(found, MagnetarError):
            raise copy_error(found)
        if not found.is_open:
            raise ConnectionLost(f"{self._endpoint} closed the connection", endpoint=self._endpoint)
        return found

    def stream(self, rpc: Rpc[Any, Any]) -> GrpcStream:
        self._check()
        kind = _PlainClientStream if rpc.is_plain else _ClientStream
        stream = kind(self._endpoint, rpc)
        self._start(stream, self._head(rpc.path))
        return stream

    def _start(self, stream: _ClientStream, head: bytes) -> None:
        """Starts the stream on the open connection, or as soon as there is one."""
        connection = self._opened()
        if connection is not None:
            connection.start(stream, head)
        else:
            self._unopened.add(stream)
            self._attempt().add_done_callback(lambda attempt: self._open(stream, head, attempt))

    def _open(self, stream: _ClientStream, head: bytes, attempt: _Attempt) -> None:
        self._unopened.discard(stream)
        if stream.is_broken:
            return
        if attempt.cancelled() and attempt is not self._connecting:  # it was given up
            self._start(stream, head)
            return
        found = None if attempt.cancelled() else attempt.result()
        if isinstance(found, _ClientConnection) and found.is_open:
            found.start(stream, head)
        elif isinstance(found, MagnetarError):
            stream.end_with_failure(copy_error(found))
        else:
            stream.end_with_failure(
                ConnectionLost(f"{self._endpoint}: the connection was closed", endpoint=self._endpoint)
            )

    async def is_answering(self, timeout_s: float) -> bool:
        connection = self._opened()
        if connection is not None:
            return await connection.liveness.is_answering(timeout_s)
        await asyncio.sleep(timeout_s)
        return self._opened() is not None

    async def close(self) -> None:
        """Closes the channel and its connections. Calls in progress and later calls fail with ConnectionLost."""
        self._closed = True
        gone = ConnectionLost(f"the channel to {self._endpoint} was closed", endpoint=self._endpoint)
        for stream in list(self._unopened):
            stream.terminate_with_error(copy_error(gone))
        for attempt in self._attempts:
            attempt.cancel()
        if self._attempts:
            await asyncio.wait(tuple(self._attempts))
        for call in list(self._calls):
            call.fail(copy_error(gone))
        for connection in [*self._old, self._connection]:
            if connection is not None:
                connection.close(gone)
        self._connection = None


def connect(endpoint: Endpoint, access: CallerAccess = NO_CREDENTIALS) -> GrpcChannel:
    """Returns a channel to `endpoint`, which connects at its first call. Raises InvalidConfiguration like
    `GrpcChannel`."""
    return GrpcChannel(endpoint, access)


_NOT_TLS = frozenset(
    ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
)
"""OpenSSL's reasons of a failure at a server that does not speak TLS."""

_UNTRUSTED = {
    "has expired": "has expired",
    "not yet valid": "is not valid yet, or this machine's clock is wrong",
    "mismatch": "is of another host name",
}
"""Part of OpenSSL's text → what is wrong with the server's certificate. The first that fits."""


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    for part, why in _UNTRUSTED.items():
        if part in error.verify_message:
            return why
    return "is not signed by an authority that this client trusts: give its file (--tls-ca)"
