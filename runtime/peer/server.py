"""The server end of peers over ZeroMQ: one ROUTER socket, with one route for each client.

In each turn of the loop the server receives all messages that have arrived. It refuses requests for another process
(WrongIdentity) or of another protocol, and passes all others to the service at once. It sends the answers of a turn
together, per connection. A connection that accepts nothing now is tried again every _RETRY_S. The queue of each
connection is bounded (`runtime/peer/inside.py`). An answer above the bound is dropped and counted, and its request
times out at the client.

**Much to send.** To send is to copy: 4 MiB take a millisecond. A turn first sends the short queues, then of the long
ones (more than SHORT_QUEUE_BYTES), in turn, until it has sent LONG_BYTES_PER_TURN; the rest waits for the next turn of
the loop. So the answer to a publish passes the entries that other connections read, and a request or a sync that comes
meanwhile waits for one multipart of them. Guard: `test_a_publish_waits_for_one_answer_of_those_who_catch_up`.

**Back-pressure.** A turn receives about BYTES_PER_TURN. After `receive_slowly(True)` it is one multipart every
SLOWED_RECEIVE_S (a ROUTER receives from its connections in turn). The rest waits in ZeroMQ (RECEIVED_MULTIPARTS_MAX
multiparts of each connection), then in the kernel's buffers, then at the client: in ZeroMQ, in its queue, and at last
as BackPressure. Receiving never stops completely: ZeroMQ does not read a connection whose queue is full, nor its
heartbeats, and after some seconds would drop a client that only waits. Guard:
`test_a_server_that_is_slowed_down_takes_in_little`.

Also in this file, below its heading: how many connections a peer server has (accepted).
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket as socketlib
import struct
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from ...proto.errors import Busy
from ..access import LOCAL_PRINCIPAL, Principal
from ..descriptors import PROCESS_DESCRIPTORS
from ..files import Buffer
from ..network import SLOWED_RECEIVE_S, Endpoint, PeerServerKeys, PeerService
from .envelope import IDENTITY_BYTES, EnvelopeKind, WrongEnvelopeMagic, encode_envelope, encode_refusal_envelope
from .inside import SendQueue, message_bytes
from .sockets import BYTES_PER_TURN, MULTIPARTS_PER_TURN, WatchedZmqSocket, ZmqContext, format_zmq_address

if TYPE_CHECKING:
    import zmq

# ------------------------------------------------------------------------------------------------------ accepted
# How many connections a peer server has: each takes its place among those of the process, and one without is cut.
#
# ZeroMQ accepts without a bound, and spins when no descriptor is free. Its monitor tells each connection that it
# accepts and loses, by its descriptor. One that the process has no place for (`runtime/descriptors.py`) is shut down at
# once: so strangers fill what is free and push out no member that is connected. A stranger that does not shake hands is
# dropped by ZeroMQ after 3 s (`sockets.py`), and its place is free again. An event may come late, when its descriptor
# is another file already: only a connection to this very port is shut down. Guard:
# `test_connections_above_the_bound_are_cut_and_those_that_are_open_go_on`.


_LOG = logging.getLogger("magnetar.peers")
_EVENT = struct.Struct("=Hi")
LOG_EVERY_S = 10.0


class AcceptedConnections:
    """Counts and limits the connections that one server's socket has accepted. A connection that the process has no
    place for is shut down. `cut` counts these; `is_listening` is False once the socket has stopped listening. `close`
    must be called before the socket is closed."""

    def __init__(self, socket: zmq.Socket[bytes], port: int) -> None:
        import zmq

        self.cut = 0
        self.is_listening = True
        self._zmq = zmq
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()  # descriptors
        self._told = -LOG_EVERY_S
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_events(zmq))
        self._fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._drain()

    @property
    def count(self) -> int:
        """Returns how many connections are open."""
        return len(self._open)

    def _drain(self) -> None:
        """Handles all events that wait: the descriptor signals only once for them."""
        while True:
            try:
                event, _ = self._monitor.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                if int(self._monitor.getsockopt(self._zmq.EVENTS)) & int(self._zmq.POLLIN):
                    continue
                return
            kind, fd = _EVENT.unpack_from(event)
            if kind == self._zmq.EVENT_ACCEPTED:
                self._came(fd)
            elif kind == self._zmq.EVENT_CLOSED:
                self.is_listening = False
            elif fd in self._open:
                self._open.remove(fd)
                PROCESS_DESCRIPTORS.release_connection()

    def _came(self, fd: int) -> None:
        if fd in self._open:
            return
        if PROCESS_DESCRIPTORS.reserve_connection():
            self._open.add(fd)
            return
        self.cut += 1
        _shut(fd, self._port)
        if self._loop.time() - self._told >= LOG_EVERY_S:
            self._told = self._loop.time()
            _LOG.warning(
                "%d peers were refused: all %d connections are open", self.cut, PROCESS_DESCRIPTORS.connections_max
            )

    def close(self) -> None:
        """Stops counting, and releases the places of the open connections."""
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        for _ in self._open:
            PROCESS_DESCRIPTORS.release_connection()
        self._open.clear()


def _events(zmq: ModuleType) -> int:
    return int(zmq.EVENT_ACCEPTED) | int(zmq.EVENT_DISCONNECTED) | int(zmq.EVENT_CLOSED)


def _shut(fd: int, port: int) -> None:
    """Shuts down the connection with this descriptor; ZeroMQ, which owns the descriptor, then closes it."""
    try:
        connection = socketlib.socket(fileno=fd)
    except OSError:  # it is gone, or another file
        return
    try:
        if connection.family in (socketlib.AF_INET, socketlib.AF_INET6) and connection.getsockname()[1] == port:
            connection.shutdown(socketlib.SHUT_RDWR)
    except OSError:  # it is gone
        return
    finally:
        connection.detach()


# -------------------------------------------------------------------------------------------------------- server


_RETRY_S = 0.002
"""Seconds between tries to send: a ROUTER does not report when one of its routes takes messages again."""

ANSWERS_BYTES_MAX = 256 << 20
"""Bound of all queues together; above it a connection with more than LAGGARD_QUEUE_BYTES in its queue gets no more."""
LAGGARD_QUEUE_BYTES = 4 << 20

SHORT_QUEUE_BYTES = 64 << 10
"""A queue up to this size, in bytes, is sent before the longer ones: receipts of some hundred adds."""
LONG_BYTES_PER_TURN = 1 << 20
"""Of the longer queues, a turn sends no further multipart after so many bytes. One has about 1 MiB, or one answer."""

RECEIVED_MULTIPARTS_MAX = 16
"""Multiparts of about 1 MiB of one connection that wait in this process, besides those in the kernel."""


class ZmqRequest:
    """A request that a server received over ZeroMQ (`runtime.network.PeerRequest`), with the route to its sender."""

    __slots__ = ("_came", "_id", "_server", "connection", "frames", "head")

    def __init__(
        self, server: ZmqPeerServer, route: bytes, id_: int, head: bytes, frames: Sequence[Buffer], came: zmq.Frame
    ) -> None:
        self._server: ZmqPeerServer | None = server
        self.connection = route
        self._came = came
        self._id = id_
        self.head = head
        self.frames = frames

    @property
    def is_local(self) -> bool:
        """Returns whether the request came from this machine. This is decided by the address of the connection and not
        by the routing id, because a client may choose any routing id."""
        return is_local(str(self._came.get("Peer-Address")))

    @property
    def principal(self) -> Principal | None:
        """Returns the authenticated sender, found by the key of the message's own connection. Must be called before the
        reply. None: the sender is no longer a member of the cluster."""
        assert self._server is not None, "the request was answered"
        return self._server.find_principal(self._came)

    def reply(self, head: bytes, frames: Sequence[Buffer] = ()) -> None:
        server, self._server = self._server, None
        assert server is not None, "a request was answered twice"
        server.answer(self.connection, self._id, head, frames)


class ZmqPeerServer:
    """The server of peer connections over ZeroMQ (a ROUTER socket); implements `runtime.network.RunningPeerServer`. The
    function `serve` creates it."""

    def __init__(
        self, wire: WatchedZmqSocket, address: str, endpoint: Endpoint, identity: bytes, service: PeerService,
        access: PeerServerKeys | None = None, leave: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Creates the server, and starts to receive. `address`: of the bound socket, in ZeroMQ's syntax. `leave` is
        called when the server has closed."""
        self._wire = wire
        self._access = access
        self._leave = leave
        self._address = address
        self._endpoint = endpoint
        self._identity = identity
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[bytes, SendQueue] = {}
        self._flushing = False
        self._queued = 0  # bytes of answers in the queues of all connections
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._slow = False
        self.requests = self.multiparts_received = self.multiparts_sent = self.answers_dropped = 0
        self._accepted = AcceptedConnections(wire.socket, endpoint.port)
        wire.start(self._drain, self._writable)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @property
    def key(self) -> str:
        return "" if self._access is None else self._access.own.public

    def find_principal(self, came: zmq.Frame) -> Principal | None:
        """Returns the principal of the sender of a message, by the key of its connection; LOCAL_PRINCIPAL without keys;
        None if the sender is no longer a member of the cluster. `came`: a frame of the message."""
        return LOCAL_PRINCIPAL if self._access is None else self._access.gate.find_principal(str(came.get("User-Id")))

    def statistics(self) -> dict[str, int]:
        """Returns the counters of the server by name."""
        return {
            "requests": self.requests,
            "queued_bytes": sum(outbox.bytes for outbox in self._outboxes.values()),
            "multiparts_sent": self.multiparts_sent,
            "multiparts_received": self.multiparts_received,
            "answers_dropped": self.answers_dropped,
            "dropped": self._wire.dropped,
            "connections": self._accepted.count,
            "connections_cut": self._accepted.cut,
        }

    async def close(self, grace_s: float = 0.0) -> None:
        """Closes the server. Answers that the socket accepts at once are still sent. Waits `grace_s` seconds, then
        until the port is free, but at most a second. A second call does nothing."""
        if self._closed:
            return
        self._flush(math.inf)
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        if grace_s:
            await asyncio.sleep(grace_s)
        await self._free_port()
        self._accepted.close()
        self._wire.close()
        self._leave()

    async def _free_port(self) -> None:
        """Waits, at most a second, until ZeroMQ's own thread has stopped listening."""
        self._accepted.is_listening = True
        self._wire.socket.unbind(self._address)
        for _ in range(1000):
            if not self._accepted.is_listening:
                break
            await asyncio.sleep(0.001)

    def receive_slowly(self, slow: bool) -> None:
        """Receives requests slowly, or normally again; see `RunningPeerServer.receive_slowly`."""
        self._slow = slow
        if not slow:
            self._wire.wake()

    def _drain(self) -> bool:
        came: list[ZmqRequest] = []
        more = self._receive_turn(came)
        if came and not self._closed:
            self.requests += len(came)
            self._service(came)
        if self._slow:
            self._wire.pause(SLOWED_RECEIVE_S)
            return False
        return more

    def _receive_turn(self, came: list[ZmqRequest]) -> bool:
        """Receives the multipart messages of a turn, only one when slowed down, and adds their requests to `came`.
        Returns whether more may wait.
        """
        size = 0
        for _ in range(1 if self._slow else MULTIPARTS_PER_TURN):
            message = self._wire.receive()
            if message is None:
                return False
            route, envelope = message
            self.multiparts_received += 1
            if isinstance(envelope, WrongEnvelopeMagic):
                self._send(route, [encode_refusal_envelope(EnvelopeKind.WRONG_PROTOCOL, self._identity)])
            elif envelope.kind != EnvelopeKind.REQUESTS:
                self._wire.dropped += 1
            elif envelope.identity != self._identity:
                ids = [item.id for item in envelope.items]
                self._send(route, [encode_refusal_envelope(EnvelopeKind.WRONG_IDENTITY, self._identity, ids)])
            else:
                first = self._wire.first
                assert first is not None, "a ROUTER says who it is from"
                if self._access is not None and self.find_principal(first) is None:
                    ids = [item.id for item in envelope.items]
                    self._send(route, [encode_refusal_envelope(EnvelopeKind.UNAUTHORIZED, self._identity, ids)])
                    continue
                for item in envelope.items:
                    came.append(ZmqRequest(self, route, item.id, item.head, item.frames, first))  # type: ignore[arg-type] # noqa: PERF401
                size += envelope.size
            if size >= BYTES_PER_TURN:
                return True
        return True

    def answer(self, route: bytes, id_: int, head: bytes, frames: Sequence[Buffer]) -> None:
        """Queues the answer to the request `id_` of the connection `route`. Drops and counts it if the queue of the
        connection, or all queues together, are full. Does nothing after `close`."""
        if self._closed:
            return
        outbox = self._outboxes.get(route)
        if outbox is None:
            outbox = self._outboxes[route] = SendQueue()
        size = message_bytes(head, frames)
        crowded = self._queued + size > ANSWERS_BYTES_MAX and outbox.bytes > LAGGARD_QUEUE_BYTES
        if outbox.is_full_for(size) or crowded:
            self.answers_dropped += 1
            return
        self._queued += size
        outbox.add(size, (id_, head, frames))
        self._flush_soon()

    def _flush(self, long_bytes: float = LONG_BYTES_PER_TURN) -> None:
        """Sends the short queues, and `long_bytes`, about, of the long ones. The rest is sent in the next turn of the
        loop. A connection that accepts nothing is tried again in _RETRY_S.
        """
        self._flushing = False
        if self._closed:
            return
        for route in sorted(self._outboxes, key=self._is_long):
            outbox, is_long = self._outboxes[route], self._is_long(route)
            while outbox.items and (long_bytes > 0 or not is_long):
                size, batch = outbox.peek_next_batch()
                if not self._send(route, encode_envelope(EnvelopeKind.REPLIES, self._identity, batch)):
                    break
                outbox.remove_sent(size, len(batch))
                self._queued -= size
                if is_long:
                    long_bytes -= size
                    self._outboxes[route] = self._outboxes.pop(route)  # the others are before it next time
            if not outbox.items:
                del self._outboxes[route]
        if self._outboxes and long_bytes <= 0:
            self._flush_soon()
        elif self._outboxes and self._retry is None:
            self._retry = self._loop.call_later(_RETRY_S, self._try_again)
        self._wire.check_for_missed_events()

    def _is_long(self, route: bytes) -> bool:
        return self._outboxes[route].bytes > SHORT_QUEUE_BYTES

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _try_again(self) -> None:
        self._retry = None
        self._flush()

    def _writable(self) -> None:
        """Does nothing: a ROUTER is nearly always writable for some peer, so a timer repeats refused sends instead."""

    def _send(self, route: bytes, parts: Sequence[Buffer]) -> bool:
        import zmq

        try:
            sent = self._wire.send([route, *parts])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.answers_dropped += 1  # the requester has disconnected
            return True
        self.multiparts_sent += sent
        return sent


async def serve(
    context: ZmqContext, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerServerKeys | None = None
) -> ZmqPeerServer:
    """Starts a peer server at `endpoint` (port 0: a free port), and returns it. `identity`: of this server, 16 bytes.
    Without `access`, connections are not encrypted. Raises Busy if the port is taken or the host is unknown,
    zmq.ZMQError if the process may not open another socket."""
    import zmq

    assert len(identity) == IDENTITY_BYTES, f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}"
    socket = context.open(zmq.ROUTER)
    domain = "" if access is None else context.set_server_keys(socket, access)

    def leave() -> None:
        if domain:
            context.remove_server_gate(domain)

    try:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.RCVHWM, RECEIVED_MULTIPARTS_MAX)
        socket.bind(format_zmq_address(await _resolved(endpoint)))
        bound_to = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
    except (OSError, zmq.ZMQError) as error:
        context.close(socket)
        leave()
        raise Busy(f"cannot listen for peers on {endpoint}: {error.strerror}", endpoint=endpoint) from error
    bound = Endpoint(endpoint.host, int(bound_to.rpartition(":")[2]))
    return ZmqPeerServer(
        WatchedZmqSocket(context, socket, routed=True), bound_to, bound, identity, service, access, leave
    )


def is_local(address: str) -> bool:
    """Returns whether an IP address belongs to this machine: only such an address can be bound. Returns False for the
    wildcard addresses, and for a text that is no address."""
    address = address.removeprefix("::ffff:")
    family = socketlib.AF_INET6 if ":" in address else socketlib.AF_INET
    try:
        with socketlib.socket(family, socketlib.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return False
    return address not in ("", "0.0.0.0", "::")


async def _resolved(endpoint: Endpoint) -> Endpoint:
    """Returns the endpoint with an IP address, because ZeroMQ does not bind to names."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socketlib.SOCK_STREAM)
    return Endpoint(str(found[0][4][0]), endpoint.port)
