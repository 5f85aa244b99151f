"""ZeroMQ sockets in an asyncio loop, by their file descriptors (`ZmqContext`, `WatchedZmqSocket`); the admission of
clients by their keys (`ZapHandler`); and the network of a cluster's member, with its certificates and keys
(`MemberNetwork`).

The descriptor of a ZeroMQ socket is *edge-triggered*: it signals once that something may have changed, and any call on
the socket (a send as well) may consume that signal. So the rule of this module: after every drain and after every send
the socket's EVENTS are read again, and handled at once or in the next turn of the loop. A sender must call
`WatchedZmqSocket.check_for_missed_events` afterwards.

`WatchedZmqSocket.receive` returns one envelope with its large frames. A malformed message is dropped to its last part
and counted. One context (one I/O thread) has all sockets of a world and ends with the last of them, so that nothing
needs to be closed at the end of the process. `zmq.asyncio` is not used: it costs four to five times the CPU at 1 KB
(measured).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...proto.errors import InvalidConfiguration, MagnetarError
from ..access import NO_CREDENTIALS, OPEN_ACCESS, CallerAccess, ListenerAccess
from ..files import Buffer
from ..network import (
    MESSAGE_BYTES_MAX,
    NO_PEER_KEYS,
    NO_PUBLIC_KEY,
    Channel,
    Endpoint,
    KeyPair,
    Network,
    Peer,
    PeerAdmission,
    PeerClientKeys,
    PeerServerKeys,
    PeerService,
    RunningPeerServer,
    RunningServer,
)
from ..tasks import Tasks
from .envelope import Envelope, MalformedEnvelope, WrongEnvelopeMagic, decode_envelope

if TYPE_CHECKING:
    import zmq

# ----------------------------------------------------------------------------------------------------------- zap
# The admission to a peer server with keys: ZeroMQ asks, over ZAP (RFC 27), before it completes a connection.
#
# One handler for a context; ZeroMQ names the server in each question by its domain. The answer may wait for the gate,
# so questions are answered in any order. The user id of the answer is the client's public key: it comes back with each
# message of the connection, whatever routing id the client chooses.
#
#     question = version "1.0" | id | domain | address | identity | mechanism "CURVE" | key, 32 bytes
#     answer   = version | id | status 200, 300 (ask again later: the client is disconnected) or 400 | text | user id |
#
# Without an answer, and without a handler, ZeroMQ admits no client (`ZAP_ENFORCE_DOMAIN`).


ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ADMISSIONS_AT_ONCE_MAX = 64
"""Questions that wait for their gate at a time; further ones are told to come again."""

_LOG = logging.getLogger("magnetar.peers")
_FIELDS = 9
"""Frames of a question: route, an empty one, and the seven of the table."""


class ZapHandler:
    """Answers the authentication requests (ZAP) of a ZeroMQ context: asks the gate of each server whether a client's
    key is admitted. The context closes `socket`."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        self.socket = socket
        self._zmq = zmq
        self._gates: dict[str, PeerAdmission] = {}
        self._number = 0
        self._tasks = Tasks()
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)

    def add(self, gate: PeerAdmission) -> str:
        """Adds the gate of a server. Returns the ZAP domain, a name that identifies this server in authentication
        requests."""
        self._number += 1
        domain = f"peers-{self._number}"
        self._gates[domain] = gate
        return domain

    def remove(self, domain: str) -> bool:
        """Removes the gate of the server with this ZAP domain, which `add` returned. Returns True if no gate is left.
        """
        del self._gates[domain]
        return not self._gates

    def close(self) -> None:
        """Stops answering, and cancels the questions that wait for a gate."""
        self._loop.remove_reader(self._fd)
        self._tasks.cancel()

    def _drain(self) -> None:
        """Handles all waiting requests: the descriptor signals only once for them."""
        while not self.socket.closed:
            try:
                question = self.socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            self._judge(question)

    def _judge(self, question: list[bytes]) -> None:
        if len(question) != _FIELDS or question[2] != b"1.0" or question[7] != b"CURVE" or len(question[8]) != 32:
            self._answer(question, b"400", b"a key is wanted")
            return
        gate = self._gates.get(question[4].decode("latin-1"))
        if gate is None:
            self._answer(question, b"400", b"this server has ended")
        elif len(self._tasks) >= ADMISSIONS_AT_ONCE_MAX:
            self._answer(question, b"300", b"too many at once")
        else:
            self._tasks.spawn(self._decide(question, gate), "peer-admission")

    async def _decide(self, question: list[bytes], gate: PeerAdmission) -> None:
        key = question[8].hex()
        try:
            admitted = await gate.admit(key)
        except MagnetarError as error:
            _LOG.warning("a peer at %s is not admitted now: %s", question[5].decode("latin-1"), error)
            self._answer(question, b"300", b"it cannot be decided now")
            return
        if not admitted:
            _LOG.warning("a peer at %s is refused: no member has its key", question[5].decode("latin-1"))
        self._answer(question, b"200" if admitted else b"400", b"", key.encode() if admitted else b"")

    def _answer(self, question: list[bytes], status: bytes, text: bytes, user: bytes = b"") -> None:
        if not self.socket.closed:
            route, request = question[0], question[3] if len(question) > 3 else b""
            self.socket.send_multipart([route, b"", b"1.0", request, status, text, user, b""], self._zmq.NOBLOCK)
            self._loop.call_soon(self._drain)


# ------------------------------------------------------------------------------------------------------- sockets


NO_COPY_BYTES = 512 << 10
"""Frames of at least this size are received without a copy. Sending copies: to share what is sent, pyzmq starts a
thread and opens sockets at the first such send, which the process may have no descriptors for by then, and that thread
takes the interpreter for each."""

MULTIPARTS_QUEUED_MAX = 64
"""High-water mark of a socket, in multiparts of about 1 MiB: above it messages wait, and coalesce, in the outbox."""

MULTIPARTS_PER_TURN = 32
"""Multiparts that a socket receives before the loop's other work runs."""

BYTES_PER_TURN = 4 << 20
"""Bytes, about, that a server passes to its service at once; the service then decides whether it takes more."""

MALFORMED_AT_ONCE = 100
"""Messages that are dropped before the loop's other work runs."""
SKIPPED_AT_ONCE = 1_000
"""Parts of a malformed message that are dropped before the loop's other work runs: about 2 ms."""

_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 15_000
_HANDSHAKE_MS = 3_000


def format_zmq_address(endpoint: Endpoint) -> str:
    """Returns the endpoint as an address in ZeroMQ's syntax."""
    return f"tcp://{endpoint}"


def new_keys() -> KeyPair:
    """Creates and returns new keys for peer connections. Raises InvalidConfiguration if the ZeroMQ library does not
    support CURVE."""
    import zmq
    from zmq.utils import z85

    if not zmq.has("curve"):
        raise InvalidConfiguration("the ZeroMQ of this machine has no CURVE: install pyzmq from a wheel")
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret))


_UNENDED: set[zmq.Context[zmq.Socket[bytes]]] = set()
"""Kept from the garbage collector: pyzmq ends a context that it collects, and waits without end for sockets that were
not closed."""


class ZmqContext:
    """The ZeroMQ context that all sockets of a world share. It is created with the first socket, and ended with the
    last one."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pid = 0
        self._sockets = 0
        self._admission: ZapHandler | None = None

    def open(self, kind: int) -> zmq.Socket[bytes]:
        """Returns a new socket of the ZeroMQ type `kind`, with the options that all sockets of a world have. Creates
        the context if there is none, or if it belongs to the process that forked this one. Raises zmq.ZMQError if the
        process may not open another socket."""
        import zmq

        if self._context is None or self._pid != os.getpid():
            self._context = zmq.Context(io_threads=1)
            _UNENDED.add(self._context)
            self._pid = os.getpid()
            self._sockets = 0
            self._admission = None
        socket = self._context.socket(kind)
        self._sockets += 1
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, MULTIPARTS_QUEUED_MAX),
            (zmq.RCVHWM, MULTIPARTS_QUEUED_MAX),
            (zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX),
            (zmq.IMMEDIATE, 1),
            (zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        return socket

    def set_server_keys(self, socket: zmq.Socket[bytes], access: PeerServerKeys) -> str:
        """Sets the keys of a server's socket, so that it accepts only clients that `access.gate` admits. Must be called
        before the socket is bound. Returns the ZAP domain of the server, for `remove_server_gate`. Raises zmq.ZMQError
        if the socket of the ZapHandler cannot be opened or bound."""
        import zmq

        if self._admission is None:
            handler = self.open(zmq.ROUTER)
            try:
                handler.bind(ZAP_ENDPOINT)
            except zmq.ZMQError:
                self.close(handler)
                raise
            self._admission = ZapHandler(handler)
        domain = self._admission.add(access.gate)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, access.own.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # a handler that died admits no client
        return domain

    def set_client_keys(self, socket: zmq.Socket[bytes], own: KeyPair, server: str) -> None:
        """Sets the keys of a client's socket: its own, and the public key `server` (64 hexadecimal digits) that its
        server must have. With "" it accepts no server. Must be called before the socket connects."""
        import zmq

        socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server or NO_PUBLIC_KEY))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(own.public))
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)

    def remove_server_gate(self, domain: str) -> None:
        """Removes the gate of a server that has closed. `domain` is the ZAP domain that `set_server_keys` returned."""
        if self._admission is not None and self._admission.remove(domain):
            admission, self._admission = self._admission, None
            admission.close()
            if not admission.socket.closed:
                admission.socket.unbind(ZAP_ENDPOINT)  # now: one that is closed gives its address back some time later
            self.close(admission.socket)

    def close(self, socket: zmq.Socket[bytes]) -> None:
        """Closes a socket at once; unsent messages are lost. Ends the context if it was the last socket."""
        socket.close(0)
        self._sockets -= 1
        if self._sockets == 0 and self._context is not None and self._pid == os.getpid():
            context, self._context = self._context, None
            context.term()
            _UNENDED.discard(context)


class WatchedZmqSocket:
    """A ZeroMQ socket that an event loop watches: calls `readable` when envelopes may have arrived, and `writable` when
    a message that could not be sent may now be accepted. `dropped` counts malformed messages. `routed`: the socket is a
    ROUTER, and each message begins with the routing id of its sender."""

    def __init__(self, context: ZmqContext, socket: zmq.Socket[bytes], *, routed: bool) -> None:
        import zmq

        self.socket = socket
        self.first: zmq.Frame | None = None  # the last routing id received: it has the sender's address
        self.dropped = 0
        self._routed = routed
        self._zmq = zmq
        self._in, self._out = int(zmq.POLLIN), int(zmq.POLLOUT)  # an operation of an enum is a call
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._readable: Callable[[], bool] | None = None
        self._writable: Callable[[], None] | None = None
        self._scheduled = False
        self._skipping = False  # the last message received has parts left that are dropped
        self._resting: asyncio.TimerHandle | None = None

    def start(self, readable: Callable[[], bool], writable: Callable[[], None]) -> None:
        """Starts to watch the socket. `readable` must receive up to MULTIPARTS_PER_TURN envelopes, and return whether
        more may have arrived. `writable` must send messages that could not be sent before."""
        self._readable = readable
        self._writable = writable
        self._loop.add_reader(self._fd, self._turn)
        self.check_for_missed_events()

    def pause(self, seconds: float) -> None:
        """Stops receiving for `seconds`, or until `wake` is called. Messages then wait in ZeroMQ's queue; when that is
        full, they wait at the sender."""
        self.wake()
        self._resting = self._loop.call_later(seconds, self.wake)

    def wake(self) -> None:
        """Ends a pause: receives again. Does nothing if there is none."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
            self.check_for_missed_events()

    def close(self) -> None:
        """Stops watching, and closes the socket. A second call does nothing."""
        if self._resting is not None:
            self._resting.cancel()
        if self._readable is not None:
            self._loop.remove_reader(self._fd)
            self._readable = self._writable = None
            self._context.close(self.socket)

    def _events(self) -> int:
        return int(self.socket.getsockopt(self._zmq.EVENTS))

    def check_for_missed_events(self) -> None:
        """Checks whether the socket is readable; if so, `readable` is called in the next turn of the loop. Must be
        called after a send, which may have consumed the signal of the socket's descriptor. Does nothing during a pause.
        """
        if self._scheduled or self._resting is not None or self._readable is None:
            return
        if self._events() & self._in:
            self._scheduled = True
            self._loop.call_soon(self._again)

    def _again(self) -> None:
        self._scheduled = False
        self._turn()

    def _turn(self) -> None:
        if self._readable is None:
            return
        events = self._events()
        more = bool(events & self._in) and self._resting is None and self._readable()
        if self._writable is not None and events & self._out:
            self._writable()
        if more and not self._scheduled and self._readable is not None:
            self._scheduled = True
            self._loop.call_soon(self._again)
        else:
            self.check_for_missed_events()

    def receive(self) -> tuple[bytes, Envelope | WrongEnvelopeMagic] | None:
        """Returns the next message as (routing id, envelope). The routing id is b"" unless the socket is `routed`. In
        place of an envelope of another protocol or version it returns the error. Returns None if no message has
        arrived. Drops malformed messages; returns None after MALFORMED_AT_ONCE of them, so that other work of the loop
        can run."""
        zmq = self._zmq
        socket = self.socket
        most = self.dropped + MALFORMED_AT_ONCE
        while self.dropped < most and (not self._skipping or self._skip()):
            route = b""
            try:
                if self._routed:
                    self.first = first = socket.recv(zmq.NOBLOCK, copy=False)
                    route = first.bytes
                else:
                    header = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if self._routed:
                if not socket.getsockopt(zmq.RCVMORE):
                    self.dropped += 1
                    continue
                header = socket.recv(zmq.NOBLOCK)
            try:
                envelope = decode_envelope(header)
                self._receive_parts(envelope)
            except MalformedEnvelope:
                self.dropped += 1
            except WrongEnvelopeMagic as error:
                self.dropped += 1
                self._skipping = True
                return route, error
            else:
                return route, envelope
            self._skipping = True
        return None

    def _receive_parts(self, envelope: Envelope) -> None:
        zmq = self._zmq
        socket = self.socket
        for item, index, size in envelope.parts:
            if not socket.getsockopt(zmq.RCVMORE):
                raise MalformedEnvelope(f"a part of {size} bytes is missing")
            large = size >= NO_COPY_BYTES
            part: Buffer = socket.recv(zmq.NOBLOCK, copy=False).buffer if large else socket.recv(zmq.NOBLOCK)
            if len(part) != size:
                raise MalformedEnvelope(f"a part of {len(part)} bytes was announced with {size}")
            item.frames[index] = part
        if socket.getsockopt(zmq.RCVMORE):
            raise MalformedEnvelope("more parts than announced")

    def _skip(self) -> bool:
        """Drops parts of the message, at most SKIPPED_AT_ONCE. Returns whether the next part begins another message."""
        zmq = self._zmq
        for _ in range(SKIPPED_AT_ONCE):
            if not self.socket.getsockopt(zmq.RCVMORE):
                self._skipping = False
                return True
            self.socket.recv(zmq.NOBLOCK, copy=False)
        return False

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Sends one multipart message and returns True. Returns False if the socket accepts nothing now; then no part
        was sent. Raises zmq.ZMQError, on a ROUTER with EHOSTUNREACH if the peer has disconnected."""
        zmq = self._zmq
        send = self.socket.send
        last = len(parts) - 1
        for index, part in enumerate(parts):
            flags = zmq.NOBLOCK if index == last else zmq.NOBLOCK | zmq.SNDMORE
            try:
                send(part, flags)
            except zmq.Again:
                assert index == 0, "ZeroMQ refused the rest of a multipart"
                return False
        return True


# -------------------------------------------------------------------------------------------------------- member
# The network of a member of a secured cluster: its certificate to the metadata service, its key to the peers.
#
#     metadata service   gRPC over TLS, both ends with certificates of the cluster's authority
#     broker ↔ bookie    CURVE: keys made at the process' start; `gate` says whose are members' (metadata/members.py)
#
# Bytes (TCP) pass as they are. A broker's own listener for clients is not here (security/authenticator.py).


class MemberNetwork:
    """Wraps another `runtime.network.Network` for a process that is a member of the cluster. Its listeners and calls
    use the certificates of the member, unless the caller names others; with `peers`, its peer connections use the keys
    of the member."""

    def __init__(
        self, inner: Network, listener: ListenerAccess, caller: CallerAccess, peers: PeerServerKeys | None = None
    ) -> None:
        self._inner = inner
        self._listener = listener
        self._caller = caller
        self._peers = peers
        self.serve_bytes, self.connect_bytes, self.generate_keys = (
            inner.serve_bytes,
            inner.connect_bytes,
            inner.generate_keys,
        )

    def with_peer_keys(self, peers: PeerServerKeys) -> MemberNetwork:
        """Returns a copy of this network with these keys and this gate for peer connections."""
        return MemberNetwork(self._inner, self._listener, self._caller, peers)

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN_ACCESS
    ) -> RunningServer:
        if access.guard is None and access.tls is None:
            access = replace(self._listener, limits=access.limits, memory=access.memory)
        return await self._inner.serve(endpoint, services, access)

    def connect(self, endpoint: Endpoint, access: CallerAccess = NO_CREDENTIALS) -> Channel:
        return self._inner.connect(endpoint, self._caller if access is NO_CREDENTIALS else access)

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerServerKeys | None = None
    ) -> RunningPeerServer:
        return await self._inner.serve_peers(endpoint, identity, service, access or self._peers)

    def connect_peer(self, endpoint: Endpoint, identity: bytes, access: PeerClientKeys = NO_PEER_KEYS) -> Peer:
        own = access.own if self._peers is None else self._peers.own
        return self._inner.connect_peer(endpoint, identity, replace(access, own=own))
