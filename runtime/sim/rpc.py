"""gRPC over simulated cables: channels, calls and coalescing streams with the semantics of runtime/rpc.py.

Messages are serialised and parsed again, so nobody shares an object with another process; errors travel as
`wire.Error` bytes. One connection per channel, made when first used and remade when it broke.
On the cable:

    ("call", id, path, bytes) → ("reply", id, bytes) | ("failed", id, error)      ("cancel", id): the caller gave up
    ("open", id, path), ("items", id, bytes)*, ("half", id) → ("items", id, bytes)*, ("end", id, error or b"")
    ("credit", id, n): n bytes of items were taken; a sender stops when WINDOW_BYTES are not
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError, Message

from ...proto import errors
from ...proto import wire_pb2 as wire
from ..network import (
    COALESCE_BYTES,
    MESSAGE_BYTES_MAX,
    STREAM_QUEUE_BYTES,
    CallContext,
    EndOfStream,
    Endpoint,
    Rep,
    Req,
    Rpc,
    rpc,
)
from .wires import End, Owner, Wires

WINDOW_BYTES = 4 << 20
"""What may be on its way or unread in one direction of a stream (HTTP/2's window)."""

CLOSE_TIMEOUT_S = 10.0
"""How long an orderly close of a stream waits for the other side before it cancels (as runtime/rpc.py)."""


def _error_bytes(error: BaseException) -> bytes:
    return errors.to_wire(error).SerializeToString(deterministic=True)


def _error_from(data: bytes) -> errors.MagnetarError:
    return errors.from_wire(wire.Error.FromString(data))


class SimChannel:
    """`runtime.network.Channel`."""

    def __init__(self, wires: Wires, owner: Owner, endpoint: Endpoint) -> None:
        self._wires = wires
        self._owner = owner
        self._endpoint = endpoint
        self._end: End | None = None
        self._dialling: asyncio.Future[End] | None = None
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
            raise errors.MessageTooLarge(f"{rpc.path}: a request of {len(data)} bytes", size=len(data), limit=MESSAGE_BYTES_MAX)
        self._ids += 1
        id_ = self._ids
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                end = await self._connected()
                self._calls[id_] = answer
                end.send(("call", id_, rpc.path, data), f"call {id_} {rpc.path} {len(data)} B")
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
            stream.broke(error)
            return
        if stream.broken:
            return
        self._streams[id_] = stream
        end.send(("open", id_, rpc.path), f"open {id_} {rpc.path}")
        stream.attach(end, id_, lambda: self._streams.pop(id_, None))

    async def _connected(self) -> End:
        if self._closed:
            raise errors.ConnectionLost(f"the channel to {self._endpoint} is closed")
        if self._end is not None and self._end.open:
            return self._end
        if self._dialling is None:
            self._dialling = self._wires.dial(self._owner, self._endpoint)
            self._dialling.add_done_callback(self._dialled, context=self._owner.context)
        end = await asyncio.shield(self._dialling)
        if not end.open:
            raise errors.Unavailable(f"the connection to {self._endpoint} broke at once")
        return end

    def _dialled(self, dialling: asyncio.Future[End]) -> None:
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
            stream.broke(type(error)(error.message))

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
            self._streams[id_].arrived(message)


class SimStream:
    """Either end of a stream (`runtime.network.Stream`); `attach` gives it its cable when that is there.

    `envelope` is the type that arrives. Items are serialised when they are sent (as the real one does) and parsed when
    they are taken; an item may be given as its bytes.
    """

    def __init__(self, envelope: type[Message], path: str, owner: Owner, *, is_client: bool) -> None:
        self._envelope = envelope
        self._path = path
        self._owner = owner
        self._is_client = is_client
        self._end: End | None = None
        self._id = 0
        self._forget: Callable[[], object] = _nothing
        self._out: deque[bytes] = deque()
        self._queued_bytes = 0
        self._on_the_way = 0
        self._flushing = False
        self._half_closed = False
        self._half_sent = False
        self._in: list[bytes] = []
        self._in_over = False  # the other end sends no more, in order
        self._broken: errors.MagnetarError | None = None  # what senders are told; the stream is over
        self._failure: errors.MagnetarError | None = None  # what `receive` raises after the last item
        self._reading = False
        self._changed: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ sending
    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def send_nowait(self, item: Message | bytes) -> None:
        self._check_open()
        data = item if isinstance(item, bytes) else item.SerializeToString(deterministic=True)
        piece = b"\x0a" + _varint(len(data)) + data
        self._out.append(piece)
        self._queued_bytes += len(piece)
        self._flush_soon()

    async def send(self, item: Message | bytes) -> None:
        if self._queued_bytes > STREAM_QUEUE_BYTES:
            await self.drained()
        self.send_nowait(item)

    async def drained(self) -> None:
        while self._queued_bytes > STREAM_QUEUE_BYTES and not self.broken:
            await self._change()
        self._check_open()

    async def close(self) -> None:
        """Client: half-closes after what is queued, waits up to CLOSE_TIMEOUT_S for the other side's end. Never raises."""
        if not self._is_client:
            return
        self._half_closed = True
        self._flush_soon()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while not self.broken:
                    if not self._reading:
                        self._in.clear()
                    await self._change()
        except TimeoutError:
            self.cancel()
        finally:
            self.broke(errors.ConnectionLost("the stream was closed"))

    def cancel(self) -> None:
        if not self.broken:
            if self._end is not None:
                self._end.send(("cancel", self._id), f"cancel {self._id}")
            self.broke(errors.ConnectionLost(f"{self._path}: the stream was cancelled"))

    def _check_open(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(self._broken.message, **self._broken.fields)

    def _flush_soon(self) -> None:
        if not self._flushing and self._end is not None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush, context=self._owner.context)

    def flush(self) -> None:
        self._flushing = False
        while self._out and self._on_the_way < WINDOW_BYTES and not self.broken:
            self._send_envelope()
        if self._half_closed and not self._out and not self._half_sent and not self.broken:
            assert self._end is not None
            self._half_sent = True
            self._end.send(("half", self._id), f"half {self._id}")

    def _send_envelope(self) -> None:
        """One message of all that waits, up to COALESCE_BYTES."""
        assert self._end is not None
        pieces: list[bytes] = []
        size = 0
        while self._out and (size == 0 or size + len(self._out[0]) <= COALESCE_BYTES):
            pieces.append(self._out.popleft())
            size += len(pieces[-1])
        self._queued_bytes -= size
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
                await self._change()
            return self._take()
        finally:
            self._reading = False

    def _take(self) -> list[Any]:
        taken, self._in = self._in, []
        size = sum(map(len, taken))
        if self._end is not None and not self.broken:
            self._end.send(("credit", self._id, size), f"credit {self._id} {size}")
        items: list[Any] = []
        for data in taken:
            try:
                items.extend(self._envelope.FromString(data).items)  # type: ignore[attr-defined]
            except DecodeError as error:
                self.cancel()
                raise errors.WrongProtocol(f"a stream message that is no {self._envelope.__name__}: {error}") from error
        return items

    def arrived(self, message: tuple[Any, ...]) -> None:
        if self.broken:
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
                self.broke(_error_from(message[2]))
            case "end":
                self._in_over = True
                self.broke(errors.ConnectionLost(f"{self._path}: the other end closed the stream"), in_order=True)
            case _:
                raise AssertionError(f"a stream message {message[0]}")
        self._wake()

    def broke(self, error: errors.MagnetarError, *, in_order: bool = False) -> None:
        """Over: senders get `error` (ConnectionLost), `receive` too after what has come, unless it ended in order."""
        if self._broken is not None:
            return
        if not in_order:
            self._failure = error
        self._broken = errors.ConnectionLost(error.message, **error.fields)
        self._out.clear()
        self._queued_bytes = 0
        self._forget()
        self._wake()

    def attach(self, end: End, id_: int, forget: Callable[[], object]) -> None:
        self._end, self._id, self._forget = end, id_, forget
        if self._out or self._half_closed:
            self._flush_soon()

    async def _change(self) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.append(changed)
        await changed

    def _wake(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)


# ---------------------------------------------------------------------------------- server
class SimServing:
    """A listener of gRPC (`runtime.network.Serving`). `owner` is the process that serves."""

    def __init__(
        self, wires: Wires, owner: Owner, endpoint: Endpoint, services: Sequence[tuple[str, object]]
    ) -> None:
        self.owner = owner
        self.methods = _methods(services)
        self.tasks: dict[asyncio.Task[None], None] = {}
        self._wires = wires
        self._connections: list[_Connection] = []
        self.closed = False
        self._endpoint = wires.listen(endpoint, self)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def accept(self, end: End) -> None:
        if self.closed:
            end.close()
            return
        self._connections.append(_Connection(self, end))

    def forget(self, connection: _Connection) -> None:
        self._connections.remove(connection)

    async def close(self, grace_s: float = 0.0) -> None:
        """No new calls; those that run have `grace_s`, then their connections are cut and they are cancelled."""
        if self.closed:
            return
        self.closed = True
        self._wires.unlisten(self._endpoint.port, self)
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
    """One client's connection at the server."""

    def __init__(self, server: SimServing, end: End) -> None:
        self._server = server
        self._end = end
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, SimStream] = {}
        end.receive, end.lost = self._receive, self._lost

    def _receive(self, message: tuple[Any, ...]) -> None:
        if self._server.closed:
            return
        kind, id_ = message[0], message[1]
        if kind == "call":
            self._start(self._call(id_, message[2], message[3]), id_)
        elif kind == "open":
            self._open(id_, message[2])
        elif kind == "cancel":
            if id_ in self._calls:
                self._calls[id_].cancel()
            elif id_ in self._streams:
                self._streams[id_].broke(errors.ConnectionLost("the caller is gone"))
        elif id_ in self._streams:
            self._streams[id_].arrived(message)

    def _start(self, coroutine: Any, id_: int | None = None) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._server.tasks[task] = None
        task.add_done_callback(lambda done: self._server.tasks.pop(done, None))
        if id_ is not None:
            self._calls[id_] = task
            task.add_done_callback(lambda done: self._calls.pop(id_, None))

    def _open(self, id_: int, path: str) -> None:
        if path not in self._server.methods:
            self._send(("end", id_, _error_bytes(_not_offered(path))), f"end {id_}")
            return
        target, function = self._server.methods[path]
        stream = SimStream(target.request, path, self._server.owner, is_client=False)
        self._streams[id_] = stream
        stream.attach(self._end, id_, lambda: self._streams.pop(id_, None))
        self._start(self._stream(id_, stream, function))

    async def _call(self, id_: int, path: str, data: bytes) -> None:
        try:
            if path not in self._server.methods:
                raise _not_offered(path)
            target, function = self._server.methods[path]
            reply = await function(target.request.FromString(data), CallContext(self._end.peer))
            answer = ("reply", id_, reply.SerializeToString(deterministic=True))
        except Exception as error:
            answer = ("failed", id_, _error_bytes(error))
        self._send(answer, f"{answer[0]} {id_} {len(answer[2])} B")

    async def _stream(self, id_: int, stream: SimStream, function: Callable[..., Any]) -> None:
        """A caller that is gone does not cancel the handler: it learns that from its stream."""
        failure = b""
        try:
            await function(stream, CallContext(self._end.peer))
        except EndOfStream:
            pass
        except Exception as error:
            failure = _error_bytes(error)
        if not stream.broken:
            while stream.queued_bytes and not stream.broken:
                stream.flush()
                if stream.queued_bytes:
                    await stream._change()
            self._send(("end", id_, failure), f"end {id_} {len(failure)} B")
            stream.broke(errors.ConnectionLost("the stream's handler has returned"))

    def _send(self, message: Any, what: str) -> None:
        self._end.send(message, what)

    def _lost(self) -> None:
        self._server.forget(self)
        self._gone()

    def shut(self) -> None:
        self._end.close()
        self._gone()

    def _gone(self) -> None:
        for task in list(self._calls.values()):
            task.cancel()
        for stream in list(self._streams.values()):
            stream.broke(errors.ConnectionLost("the caller is gone"))


def _methods(services: Sequence[tuple[str, object]]) -> dict[str, tuple[Rpc[Any, Any], Callable[..., Any]]]:
    found: dict[str, tuple[Rpc[Any, Any], Callable[..., Any]]] = {}
    for name, handler in services:
        for method in wire.DESCRIPTOR.services_by_name[name].methods:
            function = getattr(handler, _snake(method.name), None)
            if function is not None:
                target = rpc(name, method.name)
                found[target.path] = (target, function)
    return found


def _not_offered(path: str) -> errors.WrongProtocol:
    return errors.WrongProtocol(f"this server does not offer {path}")


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _nothing() -> None:
    return
