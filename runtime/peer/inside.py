"""Peers within one process: a broker and bookies that share an event loop send each other requests without a socket.

    network = InProcessNetwork(world.network, world.clock)      `magnetar standalone`

Requests and answers are passed on as they are: nothing is encoded, sent, received or copied. So neither end may ever
change a buffer that it gave to `request` or `reply`. A server listens at a socket as well, for other processes. A
request goes through the socket if its endpoint is not in this process, if it names another identity, or if it has keys.
The rest of the contract (`runtime/network.py`) holds:

| | |
|---|---|
| requests of one turn | reach the service together, in the next turn; about BYTES_PER_TURN at once |
| a server that is slowed down | takes a batch of COALESCE_BYTES from one peer in turn every SLOWED_RECEIVE_S |
| a peer's queue | QUEUE_BYTES_MAX; past it BackPressure, definite |
| deadlines | one alarm for all requests of a peer (`RequestsInFlight`) |
| a server that closes | requests without an answer: ConnectionLost, unknown |

Measured, against ZeroMQ over loopback: benchmarks/results, `produce` and `pulsar-java-produce`. Guards:
tests/runtime/peer/test_inside.py.

Also in this file: the requests of one peer that have no answer yet, each with its deadline (`RequestsInFlight`), and
the queue of messages for one connection (`SendQueue`).

A peer has one alarm for all its requests: it rings at the earliest deadline, fails the requests that are due, and is
set to the earliest deadline that is left. With equal time-outs the table of requests is read once per time-out.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import Sequence

from ...proto.errors import BackPressure, ConnectionLost, MagnetarError, TimedOut
from ..access import LOCAL_PRINCIPAL, Principal
from ..alarm import AlarmTimer
from ..clock import Clock
from ..files import Buffer
from ..network import (
    COALESCE_BYTES,
    NO_PEER_KEYS,
    SLOWED_RECEIVE_S,
    AnswerListener,
    Endpoint,
    Network,
    Peer,
    PeerClientKeys,
    PeerReply,
    PeerServerKeys,
    PeerService,
    RunningPeerServer,
)
from .sockets import BYTES_PER_TURN


class FutureAnswerListener:
    """Sets the outcome of a request as the result or the error of its `future`. Does nothing if the future is done
    already, because it was cancelled."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[PeerReply] = loop.create_future()

    def on_answered(self, head: bytes, frames: Sequence[Buffer]) -> None:
        if not self.future.done():
            self.future.set_result(PeerReply(head, frames))

    def on_failed(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class RequestsInFlight:
    """The requests to one peer that have no answer yet, with their time-outs. A request without an answer in time fails
    with TimedOut. Must be created inside a running event loop. `late` counts answers that arrived after their request
    had an outcome."""

    def __init__(self, clock: Clock, endpoint: Endpoint) -> None:
        self._now = clock.monotonic
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[AnswerListener, float]] = {}
        self._alarm = AlarmTimer(clock, self._expire)
        self._last = 0
        self.late = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, asker: AnswerListener, timeout_s: float) -> int:
        """Adds a request, whose outcome `asker` gets, within `timeout_s` seconds. Returns the id of the request."""
        self._last = id_ = self._last + 1
        deadline = self._now() + timeout_s
        self._waiting[id_] = (asker, deadline)
        if deadline < self._alarm.at:
            self._alarm.set_if_earlier(deadline)
        return id_

    def answer(self, id_: int, head: bytes, frames: Sequence[Buffer]) -> None:
        """Passes an answer to the request `id_`. If the request has an outcome already, only counts the answer as late.
        An error that the listener raises is reported to the event loop."""
        entry = self._waiting.pop(id_, None)
        if entry is None:
            self.late += 1
            return
        try:
            entry[0].on_answered(head, frames)
        except Exception as error:  # a fault of ours: the requests beside it are answered all the same
            self._broke(error)

    def fail(self, id_: int, error: MagnetarError) -> None:
        """Fails the request `id_` with `error`. Does nothing if the request has an outcome already. An error that the
        listener raises is reported to the event loop."""
        entry = self._waiting.pop(id_, None)
        if entry is not None:
            self._fail(entry[0], error)

    def fail_all(self, error: MagnetarError) -> None:
        """Fails all requests. Each gets a copy of the error, because each of their callers raises it."""
        waiting, self._waiting = self._waiting, {}
        for asker, _ in waiting.values():
            self._fail(asker, type(error)(error.message, **error.fields))

    def _fail(self, asker: AnswerListener, error: MagnetarError) -> None:
        try:
            asker.on_failed(error)
        except Exception as fault:
            self._broke(fault)

    def _broke(self, error: Exception) -> None:
        text = f"who asked {self._endpoint} failed with the answer"
        self._loop.call_exception_handler({"message": text, "exception": error})

    def close(self) -> None:
        """Cancels the alarm. Requests that are left do not time out any more: call `fail_all` before."""
        self._alarm.cancel()

    def _expire(self) -> None:
        now = self._now()
        for id_ in [id_ for id_, (_, deadline) in self._waiting.items() if deadline <= now]:
            self.fail(id_, TimedOut(f"no answer from {self._endpoint} in time", endpoint=self._endpoint))
        if self._waiting:
            self._alarm.set_if_earlier(min(deadline for _, deadline in self._waiting.values()))


# -------------------------------------------------------------------------------------------------------- outbox
# The queue of one peer connection: bounded in bytes, sent in multiparts of about COALESCE_BYTES.


QUEUE_BYTES_MAX = 64 << 20
"""Bound of the queue of one connection: a second of 512 Mbit/s; more would only be late."""

ITEM_OVERHEAD_BYTES = 64
"""Cost of an item besides its content, so that the bound also holds for empty ones."""

QueuedItem = tuple[int, bytes, Sequence[Buffer]]
"""(id, head, frames) of a request or a reply."""


def message_bytes(head: bytes, frames: Sequence[Buffer]) -> int:
    """Returns how many bytes a request or a reply counts in a queue: its content and ITEM_OVERHEAD_BYTES."""
    size = ITEM_OVERHEAD_BYTES + len(head)
    for frame in frames:
        size += len(frame)
    return size


class SendQueue:
    """The queue of messages for one connection. Decides how many of them the next multipart message contains. `items`:
    (bytes that it counts, message) of each, the oldest first; `bytes`: their sum."""

    __slots__ = ("bytes", "items")

    def __init__(self) -> None:
        self.items: deque[tuple[int, QueuedItem]] = deque()
        self.bytes = 0

    def add(self, size: int, item: QueuedItem) -> None:
        """Adds a message, which counts `size` bytes (`message_bytes`). The caller must have asked `is_full_for`."""
        self.items.append((size, item))
        self.bytes += size

    def is_full_for(self, size: int) -> bool:
        """Returns whether `size` more bytes would exceed the bound of the queue. An empty queue accepts an item of any
        size.
        """
        return bool(self.items) and self.bytes + size > QUEUE_BYTES_MAX

    def peek_next_batch(self) -> tuple[int, list[QueuedItem]]:
        """Returns (bytes, items) for the next multipart message: items of at most COALESCE_BYTES together, or one
        larger item. The items stay in the queue until `remove_sent` is called."""
        size = 0
        batch: list[QueuedItem] = []
        for item_bytes, item in self.items:
            if batch and size + item_bytes > COALESCE_BYTES:
                break
            batch.append(item)
            size += item_bytes
        return size, batch

    def remove_sent(self, size: int, count: int) -> None:
        """Removes the first `count` messages, which count `size` bytes together."""
        self.bytes -= size
        if count == len(self.items):
            self.items.clear()
        else:
            for _ in range(count):
                self.items.popleft()

    def clear(self) -> None:
        """Drops all messages."""
        self.items.clear()
        self.bytes = 0


class InProcessRequest:
    """A request (`runtime.network.PeerRequest`) between two parts of the same process. The object exists from the queue
    of the peer until the answer. `InProcessPeer.send_request` sets its fields; `size` is the number of bytes that it
    counts in the queue. The `AnswerListener` of a request may be a subclass of this class, which saves an object per
    request."""

    __slots__ = ("connection", "frames", "head", "id", "size")

    is_local = True
    principal: Principal | None = LOCAL_PRINCIPAL
    connection: InProcessPeer
    frames: Sequence[Buffer]
    head: bytes
    id: int
    size: int

    def reply(self, head: bytes, frames: Sequence[Buffer] = ()) -> None:
        id_, self.id = self.id, 0
        assert id_, "a request was answered twice"
        self.connection.in_flight.answer(id_, head, frames)


class InProcessServer:
    """Receives the requests that peers in the same process send, from one peer after the other, and passes them to the
    service once in a turn of the loop."""

    def __init__(self, identity: bytes, service: PeerService) -> None:
        self.identity = identity
        self.open = True
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._peers: set[InProcessPeer] = set()  # that asked something once
        self._turns: dict[InProcessPeer, None] = {}
        self._next: asyncio.Handle | None = None
        self._slow = False

    def on_requests_queued(self, peer: InProcessPeer) -> None:
        """Called when the empty queue of `peer` has got a request. Schedules a turn in which its requests are received.
        """
        self._peers.add(peer)
        self._turns[peer] = None
        if self._next is None:
            self._arm()

    def _arm(self) -> None:
        self._next = (
            self._loop.call_later(SLOWED_RECEIVE_S, self._turn) if self._slow else self._loop.call_soon(self._turn)
        )

    def _turn(self) -> None:
        self._next = None
        came: list[InProcessRequest] = []
        size = 0
        while self._turns and size < BYTES_PER_TURN:
            peer = next(iter(self._turns))
            del self._turns[peer]
            size += peer.move_queued_requests(came)
            if peer.has_queued_requests:
                self._turns[peer] = None  # after the others
            if self._slow:
                break
        if self._turns:
            self._arm()
        self._service(came)

    def receive_slowly(self, slow: bool) -> None:
        """With `slow`, receives a batch from one peer every SLOWED_RECEIVE_S; without, receives normally again."""
        self._slow = slow
        if self._next is not None:
            self._next.cancel()
            self._arm()

    def remove_peer(self, peer: InProcessPeer) -> None:
        """Removes a peer that has closed: its queued requests are not received."""
        self._peers.discard(peer)
        self._turns.pop(peer, None)

    def close(self) -> None:
        """Closes the server: requests that have no answer fail with ConnectionLost."""
        self.open = False
        if self._next is not None:
            self._next.cancel()
        self._turns.clear()
        peers, self._peers = self._peers, set()
        for peer in peers:
            peer.on_server_closed()


class InProcessPeer:
    """The client end (`runtime.network.Peer`) of a connection to a server in the same process, without a socket.
    Requests for another server go to `outside`, a peer with a socket."""

    def __init__(
        self, servers: dict[Endpoint, InProcessServer], clock: Clock, endpoint: Endpoint, identity: bytes, outside: Peer
    ) -> None:
        self._servers = servers
        self._endpoint = endpoint
        self._identity = identity
        self._outside = outside
        self._loop = asyncio.get_running_loop()
        self._queue: deque[InProcessRequest] = deque()  # until the server takes them …
        self._queued_bytes = 0  # … and their size
        self.in_flight = RequestsInFlight(clock, endpoint)
        self._server: InProcessServer | None = None  # the last one
        self._closed = False
        self._requests = 0

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @property
    def has_queued_requests(self) -> bool:
        """Returns whether requests wait for the server to receive them."""
        return bool(self._queue)

    def request(self, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float) -> Future[PeerReply]:
        asker = FutureAnswerListener(self._loop)
        if (refused := self.send_request(asker, head, frames, timeout_s=timeout_s)) is not None:
            asker.on_failed(refused)
        return asker.future

    def send_request(
        self, asker: AnswerListener, head: bytes, frames: Sequence[Buffer], *, timeout_s: float
    ) -> MagnetarError | None:
        server = self._servers.get(self._endpoint)
        if server is None or server.identity != self._identity:
            return self._outside.send_request(asker, head, frames, timeout_s=timeout_s)
        queue, size = self._queue, ITEM_OVERHEAD_BYTES + len(head)
        for frame in frames:
            size += len(frame)
        if self._closed:
            return ConnectionLost(f"the peer {self._endpoint} is closed")
        if queue and self._queued_bytes + size > QUEUE_BYTES_MAX:
            return BackPressure(f"{self._queued_bytes} bytes wait for {self._endpoint}")
        self._requests += 1
        is_first = not queue or self._server is not server
        request = asker if isinstance(asker, InProcessRequest) else InProcessRequest()
        request.connection, request.head, request.frames, request.size = self, head, frames, size
        request.id = self.in_flight.add(asker, timeout_s)
        queue.append(request)
        self._queued_bytes += size
        if is_first:
            self._server = server
            server.on_requests_queued(self)
        return None

    def move_queued_requests(self, came: list[InProcessRequest]) -> int:
        """Moves the first requests of the queue, about COALESCE_BYTES in sum, to the end of the list `came`. Returns
        the number of moved bytes."""
        queue, size = self._queue, 0
        while queue and not (size and size + queue[0].size > COALESCE_BYTES):
            request = queue.popleft()
            size += request.size
            came.append(request)
        self._queued_bytes -= size
        return size

    def on_server_closed(self) -> None:
        """Called when the server has closed. Fails all requests with ConnectionLost."""
        self._close_with(ConnectionLost(f"no connection to {self._endpoint}: it broke", endpoint=self._endpoint))

    def _close_with(self, error: ConnectionLost) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        self.in_flight.fail_all(error)

    async def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.remove_peer(self)
        self._close_with(ConnectionLost(f"the peer {self._endpoint} was closed"))
        self.in_flight.close()
        await self._outside.close()

    def statistics(self) -> dict[str, int]:
        own = {
            "requests": self._requests, "in_flight": len(self.in_flight), "queued_bytes": self._queued_bytes,
            "late_replies": self.in_flight.late,
        }  # fmt: skip
        return {name: own.get(name, 0) + value for name, value in self._outside.statistics().items()}


class RunningInProcessServer:
    """A listener (`runtime.network.RunningPeerServer`) that receives from peers in other processes by a socket, and
    from peers in this process without one."""

    def __init__(
        self, outside: RunningPeerServer, server: InProcessServer, servers: dict[Endpoint, InProcessServer]
    ) -> None:
        self._outside = outside
        self._server = server
        self._servers = servers
        self.endpoint, self.key = outside.endpoint, outside.key
        servers[self.endpoint] = server

    def receive_slowly(self, slow: bool) -> None:
        self._server.receive_slowly(slow)
        self._outside.receive_slowly(slow)

    async def close(self, grace_s: float = 0.0) -> None:
        if self._server.open:
            del self._servers[self.endpoint]
            self._server.close()
        await self._outside.close(grace_s)


class InProcessNetwork:
    """Wraps another `runtime.network.Network`, so that peers in the same process are reached without a socket.
    Everything else goes to the other network."""

    def __init__(self, outside: Network, clock: Clock) -> None:
        self._outside = outside
        self._clock = clock
        self._servers: dict[Endpoint, InProcessServer] = {}
        self.serve, self.connect = outside.serve, outside.connect
        self.serve_bytes, self.connect_bytes, self.generate_keys = (
            outside.serve_bytes, outside.connect_bytes, outside.generate_keys,
        )  # fmt: skip

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerServerKeys | None = None
    ) -> RunningPeerServer:
        serving = await self._outside.serve_peers(endpoint, identity, service, access)
        return (
            RunningInProcessServer(serving, InProcessServer(identity, service), self._servers)
            if access is None
            else serving
        )

    def connect_peer(self, endpoint: Endpoint, identity: bytes, access: PeerClientKeys = NO_PEER_KEYS) -> Peer:
        outside = self._outside.connect_peer(endpoint, identity, access)
        if access.own is not None:
            return outside
        return InProcessPeer(self._servers, self._clock, endpoint, identity, outside)
