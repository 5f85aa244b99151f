"""Peers over ZeroMQ: pipelined requests between processes, as `runtime/network.py` promises them.

One DEALER per client end, one ROUTER per server; bytes as in `runtime/envelope.py`; sockets as in `runtime/sockets.py`.

**Coalescing.** A request is queued and the flush scheduled with `call_soon`: all requests of one turn of the loop leave
as one multipart, closed at COALESCE_BYTES. The server takes in what has come, hands all of it to the service at once,
and answers the same way, per connection. Nothing ever waits for more.

**Deadlines.** One timer per peer: it wakes at the earliest deadline that was known when it was set, fails what is due
and sets itself to the earliest that is left. With equal time-outs that is one look at the table per time-out.

**Broken connections.** The socket's monitor tells of every disconnect and refused connection; all requests in flight,
and those that were waiting to leave, fail at once with ConnectionLost. Replies that had come are delivered first.
ZeroMQ connects again by itself, after 50 ms and then more slowly, up to 1 s; requests made meanwhile wait for the
outcome of the next attempt.

**Bounds.** A message part: MESSAGE_BYTES_MAX. Waiting to leave: QUEUE_BYTES_MAX; beyond it the future fails with
BackPressure (definite: nothing was sent), and a server drops the answers of the connection that does not take them.
`statistics()` has the counters.

Buffers given to `request` and `reply` must not change until they have left: large ones are not copied.
"""

from __future__ import annotations

import asyncio
import struct
from asyncio import Future
from collections import deque
from collections.abc import Sequence

from ..proto.errors import BackPressure, Busy, ConnectionLost, MagnetarError, TimedOut, WrongIdentity, WrongProtocol
from .envelope import IDENTITY_BYTES, Envelope, Kind, WrongMagic, encode, refuse
from .files import Buffer
from .network import COALESCE_BYTES, Endpoint, PeerService, Reply
from .sockets import MULTIPARTS_PER_TURN, Context, Wire

QUEUE_BYTES_MAX = 64 << 20
"""What may wait to leave on one connection: a second of 512 Mbit/s; more would only be late."""

_ITEM_BYTES = 64
"""Cost of an item beside its content, so that a flood of empty ones is bounded too."""

_RETRY_S = 0.002
_MONITOR = struct.Struct("=Hi")

_Queued = tuple[int, bytes, Sequence[Buffer]]


def _address(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"tcp://{host}:{endpoint.port}"


def _bytes_of(head: bytes, frames: Sequence[Buffer]) -> int:
    size = _ITEM_BYTES + len(head)
    for frame in frames:
        size += len(frame)
    return size


class _Outbox:
    """What waits to leave on one connection, in order, and how much of it goes into the next multipart."""

    __slots__ = ("bytes", "items")

    def __init__(self) -> None:
        self.items: deque[tuple[int, _Queued]] = deque()
        self.bytes = 0

    def add(self, size: int, item: _Queued) -> None:
        self.items.append((size, item))
        self.bytes += size

    def head(self) -> tuple[int, list[_Queued]]:
        """(bytes, items) of the next multipart; they stay until `sent`."""
        size = 0
        batch: list[_Queued] = []
        for item_bytes, item in self.items:
            if batch and size + item_bytes > COALESCE_BYTES:
                break
            batch.append(item)
            size += item_bytes
        return size, batch

    def sent(self, size: int, count: int) -> None:
        self.bytes -= size
        if count == len(self.items):
            self.items.clear()
        else:
            for _ in range(count):
                self.items.popleft()

    def clear(self) -> None:
        self.items.clear()
        self.bytes = 0


class ZmqPeer:
    """The client end. Made and used in one event loop; connects with the first request."""

    def __init__(self, context: Context, endpoint: Endpoint, identity: bytes) -> None:
        assert len(identity) == IDENTITY_BYTES, f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}"
        self._context = context
        self._endpoint = endpoint
        self._identity = identity
        self._loop = asyncio.get_running_loop()
        self._link: _Link | None = None
        self._closed = False
        self._next_id = 1
        self._outbox = _Outbox()
        self._flushing = False
        self._waiting: dict[int, tuple[Future[Reply], float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.requests = self.multiparts_sent = self.multiparts_received = self.late_replies = 0

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def statistics(self) -> dict[str, int]:
        return {
            "requests": self.requests,
            "in_flight": len(self._waiting),
            "queued_bytes": self._outbox.bytes,
            "multiparts_sent": self.multiparts_sent,
            "multiparts_received": self.multiparts_received,
            "late_replies": self.late_replies,
            "dropped": self._link.wire.dropped if self._link else 0,
        }

    def request(self, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float) -> Future[Reply]:
        future: Future[Reply] = self._loop.create_future()
        if self._closed:
            future.set_exception(ConnectionLost(f"the peer {self._endpoint} is closed"))
            return future
        size = _bytes_of(head, frames)
        if self._outbox.bytes + size > QUEUE_BYTES_MAX and self._outbox.items:
            future.set_exception(BackPressure(f"{self._outbox.bytes} bytes wait to leave for {self._endpoint}"))
            return future
        id_ = self._next_id
        self._next_id = id_ + 1
        self.requests += 1
        deadline = self._loop.time() + timeout_s
        self._waiting[id_] = (future, deadline)
        self._outbox.add(size, (id_, head, frames))
        if self._timer is None or deadline < self._timer_at:
            self._arm(deadline)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush_turn)
        return future

    async def close(self) -> None:
        self._closed = True
        self._fail_all(ConnectionLost(f"the peer {self._endpoint} was closed"))
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---------------------------------------------------------------------------------- sending
    def _flush_turn(self) -> None:
        self._flushing = False
        self.flush()

    def flush(self) -> None:
        """Sends what waits as long as the socket takes it; the rest goes when it is writable or connected."""
        if self._closed:
            return
        if self._link is None:
            self._link = _Link(self._context, self)
        if not self._link.connected:
            return
        outbox = self._outbox
        while outbox.items:
            size, batch = outbox.head()
            if not self._link.wire.send(encode(Kind.REQUESTS, self._identity, batch)):
                break
            outbox.sent(size, len(batch))
            self.multiparts_sent += 1
        self._link.wire.recheck()

    # ---------------------------------------------------------------------------------- receiving
    def receive(self, envelope: Envelope | WrongMagic) -> None:
        if isinstance(envelope, WrongMagic):
            self._fail_all(WrongProtocol(f"{self._endpoint} does not speak Magnetar's peer protocol: {envelope}"))
            return
        self.multiparts_received += 1
        match envelope.kind:
            case Kind.REPLIES:
                self._resolve(envelope)
            case Kind.WRONG_IDENTITY:
                for item in envelope.items:
                    self._fail(item.id, self._wrong_identity(envelope.identity))
            case Kind.WRONG_PROTOCOL | Kind.REQUESTS:
                self._fail_all(WrongProtocol(f"{self._endpoint} speaks another version of the peer protocol"))

    def _resolve(self, envelope: Envelope) -> None:
        waiting = self._waiting
        for item in envelope.items:
            entry = waiting.pop(item.id, None)
            if entry is None:
                self.late_replies += 1
            elif not entry[0].done():
                entry[0].set_result(Reply(item.head, item.frames))  # type: ignore[arg-type]

    def _wrong_identity(self, found: bytes) -> WrongIdentity:
        return WrongIdentity(
            f"the process at {self._endpoint} is {found.hex()}, not {self._identity.hex()}",
            endpoint=self._endpoint,
            wanted=self._identity.hex(),
            found=found.hex(),
        )

    # ---------------------------------------------------------------------------------- failing
    def disconnected(self, reason: str) -> None:
        self._fail_all(ConnectionLost(f"no connection to {self._endpoint}: {reason}", endpoint=self._endpoint))

    def wrong_protocol(self) -> None:
        self._fail_all(WrongProtocol(f"{self._endpoint} does not speak ZeroMQ", endpoint=self._endpoint))

    def _fail(self, id_: int, error: MagnetarError) -> None:
        entry = self._waiting.pop(id_, None)
        if entry is not None and not entry[0].done():
            entry[0].set_exception(error)

    def _fail_all(self, error: MagnetarError) -> None:
        waiting, self._waiting = self._waiting, {}
        self._outbox.clear()
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(type(error)(error.message, **error.fields))

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        due = [id_ for id_, (_, deadline) in self._waiting.items() if deadline <= now]
        for id_ in due:
            self._fail(id_, TimedOut(f"no answer from {self._endpoint} in time", endpoint=self._endpoint))
        if self._waiting:
            self._arm(min(deadline for _, deadline in self._waiting.values()))


class _Link:
    """The socket of a client end and its monitor, from the first request to the peer's close."""

    def __init__(self, context: Context, peer: ZmqPeer) -> None:
        import zmq

        self.connected = False
        self._peer = peer
        self._zmq = zmq
        self._handshaking = False
        socket = context.open(zmq.DEALER)
        self.wire = Wire(context, socket, routed=False)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_DISCONNECTED
        )
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(self._monitor_fd, self._watch)
        self.wire.start(self._drain, peer.flush)
        socket.connect(_address(peer.endpoint))
        self._watch()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._monitor_fd)
        self._monitor.close(0)
        self.wire.close()

    def _drain(self) -> bool:
        for _ in range(MULTIPARTS_PER_TURN):
            message = self.wire.receive()
            if message is None:
                return False
            self._peer.receive(message[1])
        return True

    def _watch(self) -> None:
        """Takes in all monitor events (edge-triggered as every ZeroMQ socket)."""
        zmq = self._zmq
        while not self._monitor.closed:
            try:
                event, *_ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._happened(*_MONITOR.unpack(event))

    def _happened(self, event: int, value: int) -> None:
        zmq = self._zmq
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self._peer.flush()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.connected = False
            self._peer.wrong_protocol()
        else:
            self.connected = False
            while self._drain():
                pass
            reason = "refused, trying again" if event == zmq.EVENT_CONNECT_RETRIED else "it broke"
            self._peer.disconnected(reason)


class ZmqRequest:
    """A request at the server; remembers where its answer goes."""

    __slots__ = ("_id", "_route", "_server", "frames", "head")

    def __init__(self, server: ZmqPeerServer, route: bytes, id_: int, head: bytes, frames: Sequence[Buffer]) -> None:
        self._server: ZmqPeerServer | None = server
        self._route = route
        self._id = id_
        self.head = head
        self.frames = frames

    def reply(self, head: bytes, frames: Sequence[Buffer] = ()) -> None:
        server, self._server = self._server, None
        assert server is not None, "a request was answered twice"
        server.answer(self._route, self._id, head, frames)


class ZmqPeerServer:
    """The server end: a ROUTER socket. `serve` makes it."""

    def __init__(self, wire: Wire, endpoint: Endpoint, identity: bytes, service: PeerService) -> None:
        self._wire = wire
        self._endpoint = endpoint
        self._identity = identity
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[bytes, _Outbox] = {}
        self._flushing = False
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self.requests = self.multiparts_received = self.multiparts_sent = self.answers_dropped = 0
        wire.start(self._drain, self._writable)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def statistics(self) -> dict[str, int]:
        return {
            "requests": self.requests,
            "queued_bytes": sum(outbox.bytes for outbox in self._outboxes.values()),
            "multiparts_sent": self.multiparts_sent,
            "multiparts_received": self.multiparts_received,
            "answers_dropped": self.answers_dropped,
            "dropped": self._wire.dropped,
        }

    async def close(self, grace_s: float = 0.0) -> None:
        """What was answered before leaves if the socket takes it at once; then the port is free."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        if grace_s:
            await asyncio.sleep(grace_s)
        self._wire.close()

    def _drain(self) -> bool:
        came: list[ZmqRequest] = []
        more = self._take(came)
        if came:
            self.requests += len(came)
            self._service(came)
        return more

    def _take(self, came: list[ZmqRequest]) -> bool:
        """Adds the requests of up to MULTIPARTS_PER_TURN multiparts; whether there may be more."""
        for _ in range(MULTIPARTS_PER_TURN):
            message = self._wire.receive()
            if message is None:
                return False
            route, envelope = message
            self.multiparts_received += 1
            if isinstance(envelope, WrongMagic):
                self._send(route, [refuse(Kind.WRONG_PROTOCOL, self._identity)])
            elif envelope.kind != Kind.REQUESTS:
                self._wire.dropped += 1
            elif envelope.identity != self._identity:
                ids = [item.id for item in envelope.items]
                self._send(route, [refuse(Kind.WRONG_IDENTITY, self._identity, ids)])
            else:
                for item in envelope.items:
                    came.append(ZmqRequest(self, route, item.id, item.head, item.frames))  # type: ignore[arg-type] # noqa: PERF401
        return True

    def answer(self, route: bytes, id_: int, head: bytes, frames: Sequence[Buffer]) -> None:
        if self._closed:
            return
        outbox = self._outboxes.get(route)
        if outbox is None:
            outbox = self._outboxes[route] = _Outbox()
        size = _bytes_of(head, frames)
        if outbox.bytes + size > QUEUE_BYTES_MAX and outbox.items:
            self.answers_dropped += 1
            return
        outbox.add(size, (id_, head, frames))
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends what waits, connection by connection; a connection that takes nothing is tried again in _RETRY_S."""
        self._flushing = False
        if self._closed:
            return
        for route, outbox in list(self._outboxes.items()):
            while outbox.items:
                size, batch = outbox.head()
                if not self._send(route, encode(Kind.REPLIES, self._identity, batch)):
                    break
                outbox.sent(size, len(batch))
            if not outbox.items:
                del self._outboxes[route]
        if self._outboxes and self._retry is None:
            self._retry = self._loop.call_later(_RETRY_S, self._try_again)
        self._wire.recheck()

    def _try_again(self) -> None:
        self._retry = None
        self._flush()

    def _writable(self) -> None:
        """A ROUTER is nearly always writable for somebody: what was refused is tried again by the timer."""

    def _send(self, route: bytes, parts: Sequence[Buffer]) -> bool:
        import zmq

        try:
            sent = self._wire.send([route, *parts])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.answers_dropped += 1  # who asked is gone
            return True
        self.multiparts_sent += sent
        return sent


async def serve(context: Context, endpoint: Endpoint, identity: bytes, service: PeerService) -> ZmqPeerServer:
    """Listens at once. Raises Busy when the port is taken."""
    import zmq

    assert len(identity) == IDENTITY_BYTES, f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}"
    socket = context.open(zmq.ROUTER)
    try:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(_address(endpoint))
        address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
    except zmq.ZMQError as error:
        context.close(socket)
        raise Busy(f"cannot listen for peers on {endpoint}: {error.strerror}", endpoint=endpoint) from error
    bound = Endpoint(endpoint.host, int(address.rpartition(":")[2]))
    return ZmqPeerServer(Wire(context, socket, routed=True), bound, identity, service)
