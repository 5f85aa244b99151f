"""Peers over ZeroMQ, the client end: pipelined requests between processes (`runtime/network.py` has the contract).

One DEALER per client end, one ROUTER per server (`runtime/peer/server.py`); bytes as in `runtime/peer/envelope.py`;
sockets as in `runtime/peer/sockets.py`.

**Coalescing.** A request is queued and the flush is scheduled with `call_soon`: all requests of one turn of the loop
leave as one multipart, closed at COALESCE_BYTES. The server passes all requests that have arrived to the service at
once, and sends the answers in the same way, per connection. Neither end waits for further requests.

**Deadlines.** `RequestsInFlight` in `runtime/peer/inside.py`.

**Broken connections.** The socket's monitor reports every disconnect and refused connection. All requests in flight or
in the queue then fail at once with ConnectionLost; replies that have arrived are delivered first. A socket whose
connection broke or was refused is closed, and the next request makes another: ZeroMQ would not connect again after an
error of protocol, and after a refusal only in a second, for which every request to a bookie that is gone would wait.

Requests leave only after ZeroMQ's handshake; a port where the handshake fails HANDSHAKES_MAX times does not speak
ZeroMQ: WrongProtocol, and nothing was sent.

**Keys.** With a key of its own the connection is encrypted, and both ends prove their keys (CURVE). A server that
refuses our key is Unauthorized at once; so is one that speaks in clear where we have a key, or the other way. A server
with another key than the expected one breaks the handshake: ConnectionLost after HANDSHAKES_MAX times.

**Bounds.** A message part has at most MESSAGE_BYTES_MAX, a multipart `MULTIPART_BYTES_MAX`. ZeroMQ gathers all parts of
a multipart before it passes on the first, so a server receives only from admitted clients. The queue has
QUEUE_BYTES_MAX; above it the future fails with BackPressure (definite: nothing was sent), and a server drops the
answers of a connection that does not take them. `statistics()` has the counters.

Buffers given to `request` and `reply` must not change until they have left.

Also in this file, below its heading: the greeting of a ZeroMQ server (greeting).
"""

from __future__ import annotations

import asyncio
import struct
from asyncio import Future
from collections.abc import Sequence

from ...proto.errors import (
    BackPressure,
    ConnectionLost,
    MagnetarError,
    Unauthorized,
    WrongIdentity,
    WrongProtocol,
)
from ..clock import Clock
from ..files import Buffer
from ..network import NO_PEER_KEYS, AnswerListener, Endpoint, KeyPair, PeerClientKeys, PeerReply
from ..tasks import Tasks
from .envelope import IDENTITY_BYTES, Envelope, EnvelopeKind, WrongEnvelopeMagic, encode_envelope
from .inside import FutureAnswerListener, RequestsInFlight, SendQueue, message_bytes
from .sockets import BYTES_PER_TURN, MULTIPARTS_PER_TURN, WatchedZmqSocket, ZmqContext, format_zmq_address

# ------------------------------------------------------------------------------------------------------ greeting
# The greeting of a ZeroMQ server (ZMTP 3): it names the mechanism with which the server secures connections.
#
# A client learns of another mechanism than its own by an event of its socket, unless the server closes the connection
# first. Then the client has seen a broken handshake only, and asks here.


_OURS = bytes.fromhex("ff00000000000000017f03")
"""The signature, and the version's first byte: then the server says the rest of its greeting, and waits for ours."""
_MECHANISM = slice(12, 32)
_TIMEOUT_S = 1.0


async def probe_security_mechanism(endpoint: Endpoint) -> str:
    """Returns the security mechanism of the ZeroMQ server at `endpoint`: "NULL" if it has no keys, "CURVE" if it has.
    Returns "" if it cannot be reached, or sends no greeting within a second."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            writer.write(_OURS)
            greeting = await reader.readexactly(_MECHANISM.stop)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return ""
    finally:
        if writer is not None:
            writer.close()
    return greeting[_MECHANISM].rstrip(b"\0").decode("latin-1")


# -------------------------------------------------------------------------------------------------------- client


HANDSHAKES_MAX = 3
"""Connections in a row that break during the handshake and so mean another protocol. One of our servers breaks one when
it is killed at that moment."""

_AGAIN_S = 0.05
"""Pause after the first failed handshake; twice as long after the second."""

_MONITOR = struct.Struct("=Hi")
"""A monitor's message: event and value, in the machine's byte order."""


class ZmqPeer:
    """The client end of a connection to a peer, over ZeroMQ; implements `runtime.network.Peer`. Connects at its first
    request. Must be used in one event loop only."""

    def __init__(
        self,
        context: ZmqContext,
        clock: Clock,
        endpoint: Endpoint,
        identity: bytes,
        access: PeerClientKeys = NO_PEER_KEYS,
    ) -> None:
        assert len(identity) == IDENTITY_BYTES, f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}"
        self._context = context
        self._endpoint = endpoint
        self.access = access
        self._identity = identity
        self._loop = asyncio.get_running_loop()
        self._link: _Link | None = None
        self._handshakes_failed = 0
        self._dropped = 0
        self._closed = False
        self._asking = Tasks()
        self._outbox = SendQueue()
        self._flushing = False
        self._in_flight = RequestsInFlight(clock, endpoint)
        self.requests = self.multiparts_sent = self.multiparts_received = 0

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def statistics(self) -> dict[str, int]:
        return {
            "requests": self.requests,
            "in_flight": len(self._in_flight),
            "queued_bytes": self._outbox.bytes,
            "multiparts_sent": self.multiparts_sent,
            "multiparts_received": self.multiparts_received,
            "late_replies": self._in_flight.late,
            "dropped": self._dropped + (self._link.wire.dropped if self._link else 0),
        }

    def request(self, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float) -> Future[PeerReply]:
        asker = FutureAnswerListener(self._loop)
        if (refused := self.send_request(asker, head, frames, timeout_s=timeout_s)) is not None:
            asker.on_failed(refused)
        return asker.future

    def send_request(
        self, asker: AnswerListener, head: bytes, frames: Sequence[Buffer], *, timeout_s: float
    ) -> MagnetarError | None:
        size = message_bytes(head, frames)
        if self._closed:
            return ConnectionLost(f"the peer {self._endpoint} is closed")
        if self._outbox.is_full_for(size):
            return BackPressure(f"{self._outbox.bytes} bytes wait to leave for {self._endpoint}")
        self.requests += 1
        self._outbox.add(size, (self._in_flight.add(asker, timeout_s), head, frames))
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush_turn)
        return None

    async def close(self) -> None:
        self._closed = True
        self._fail_all(ConnectionLost(f"the peer {self._endpoint} was closed"))
        if self._link is not None:
            self._link.close()
            self._link = None
        self._in_flight.close()
        await self._asking.close()

    # ---------------------------------------------------------------------------------- sending
    def _flush_turn(self) -> None:
        self._flushing = False
        self.flush()

    def flush(self) -> None:
        """Sends the queued requests, as many as the socket accepts now. The remaining requests are sent when the socket
        is connected or accepts more."""
        if self._closed:
            return
        if self._link is None:
            if not self._outbox.items:
                return
            self._link = _Link(self._context, self)
        if not self._link.connected:
            return
        outbox = self._outbox
        while outbox.items:
            size, batch = outbox.peek_next_batch()
            if not self._link.wire.send(encode_envelope(EnvelopeKind.REQUESTS, self._identity, batch)):
                break
            outbox.remove_sent(size, len(batch))
            self.multiparts_sent += 1
        self._link.wire.check_for_missed_events()

    # ---------------------------------------------------------------------------------- receiving
    def receive(self, envelope: Envelope | WrongEnvelopeMagic) -> None:
        """Called with each envelope that has arrived: passes its answers, or its refusal, to the requests that wait for
        them."""
        if isinstance(envelope, WrongEnvelopeMagic):
            self._fail_all(WrongProtocol(f"{self._endpoint} does not speak Magnetar's peer protocol: {envelope}"))
            return
        self.multiparts_received += 1
        match envelope.kind:
            case EnvelopeKind.REPLIES:
                answer = self._in_flight.answer
                for item in envelope.items:
                    answer(item.id, item.head, item.frames)  # type: ignore[arg-type]
            case EnvelopeKind.WRONG_IDENTITY:
                for item in envelope.items:
                    self._in_flight.fail(item.id, self._wrong_identity(envelope.identity))
            case EnvelopeKind.UNAUTHORIZED:
                for item in envelope.items:
                    error = Unauthorized(f"this process is no member any more for {self._endpoint}")
                    self._in_flight.fail(item.id, error)
            case EnvelopeKind.WRONG_PROTOCOL | EnvelopeKind.REQUESTS:
                self._fail_all(WrongProtocol(f"{self._endpoint} speaks another version of the peer protocol"))

    def _wrong_identity(self, found: bytes) -> WrongIdentity:
        return WrongIdentity(
            f"the process at {self._endpoint} is {found.hex()}, not {self._identity.hex()}",
            endpoint=self._endpoint,
            wanted=self._identity.hex(),
            found=found.hex(),
        )

    # ---------------------------------------------------------------------------------- failing
    def on_connected(self) -> None:
        """Called when the handshake with the server has succeeded. Sends the queued requests."""
        self._handshakes_failed = 0
        self.flush()

    def on_disconnected(self, reason: str) -> None:
        """Called when no connection can be made, or it is lost. Fails all requests with ConnectionLost."""
        self._fail_all(ConnectionLost(f"no connection to {self._endpoint}: {reason}", endpoint=self._endpoint))

    def on_link_broken(self, how: str = "it broke") -> None:
        """Called when the connection is lost or was refused, and its socket is closed. Fails all requests with
        ConnectionLost; the next request makes a new connection. `how`: the reason, for the text of the error."""
        self._forget_link()
        self.on_disconnected(how)

    def on_handshake_failed(self, *, certain: bool) -> None:
        """Called when a handshake with the server has failed, before anything was sent, and the socket is closed.
        Connects again, up to HANDSHAKES_MAX times, because a correct server may need several attempts. After the last
        attempt, or if `certain` (the server violated ZeroMQ's protocol), finds out the reason and fails all requests.
        """
        self._forget_link()
        self._handshakes_failed += 1
        if certain or self._handshakes_failed >= HANDSHAKES_MAX:
            self._handshakes_failed = 0
            self._asking.spawn(self._ask_why(), "peer-greeting")
        else:
            self._loop.call_later(_AGAIN_S * self._handshakes_failed, self.flush)

    async def _ask_why(self) -> None:
        """Finds out why no connection can be made, and fails all requests with that reason."""
        match await probe_security_mechanism(self._endpoint), self.access.own:
            case ("CURVE", None) | ("NULL", KeyPair()):
                self.on_key_mismatch()
            case ("CURVE", KeyPair()):
                self.on_disconnected("it breaks the handshake. Its key is another one, or it cannot ask who we are")
            case _:
                self._fail_all(WrongProtocol(f"{self._endpoint} does not speak ZeroMQ", endpoint=self._endpoint))

    def on_key_mismatch(self) -> None:
        """Called when only one of the two ends has keys. Fails all requests with Unauthorized."""
        clear = self.access.own is None
        asks = "asks for keys: give --security" if clear else "speaks in clear, without keys"
        self.on_refused(f"{asks}, as the other processes of its cluster")

    def on_refused(self, why: str) -> None:
        """Called when one end has refused the other before any request was sent; `why` is the reason. Fails all
        requests with Unauthorized."""
        self._forget_link()
        self._fail_all(Unauthorized(f"{self._endpoint} {why}", endpoint=self._endpoint))

    def _forget_link(self) -> None:
        if self._link is not None:
            self._dropped += self._link.wire.dropped
            self._link = None

    def _fail_all(self, error: MagnetarError) -> None:
        self._outbox.clear()
        self._in_flight.fail_all(error)


class _Link:
    """The socket of a client end with its monitor: one connection, and the attempts to make it."""

    def __init__(self, context: ZmqContext, peer: ZmqPeer) -> None:
        import zmq

        self.connected = False
        self._peer = peer
        self._zmq = zmq
        socket = context.open(zmq.DEALER)
        if peer.access.own is not None:
            context.set_client_keys(socket, peer.access.own, peer.access.server)
        self.wire = WatchedZmqSocket(context, socket, routed=False)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_DISCONNECTED
        )
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        loop = asyncio.get_running_loop()
        loop.add_reader(self._monitor_fd, self._watch)
        self.wire.start(self._drain, peer.flush)
        socket.connect(format_zmq_address(peer.endpoint))
        loop.call_soon(self._watch)  # not here: it may flush, and the peer has no link yet

    def close(self) -> None:
        if not self._monitor.closed:
            asyncio.get_running_loop().remove_reader(self._monitor_fd)
            # In this order: an event for a monitor whose other end is closed blocks the I/O thread for ever.
            self.wire.socket.disable_monitor()
            self._monitor.close(0)
            self.wire.close()

    def _drain(self) -> bool:
        """Passes on the answers that have arrived, about BYTES_PER_TURN of them. Returns whether more may wait."""
        size = 0
        for _ in range(MULTIPARTS_PER_TURN):
            message = self.wire.receive()
            if message is None:
                return False
            envelope = message[1]
            self._peer.receive(envelope)
            size += 0 if isinstance(envelope, WrongEnvelopeMagic) else envelope.size
            if size >= BYTES_PER_TURN:
                break
        return True

    def _watch(self) -> None:
        """Handles all monitor events that wait; the monitor is edge-triggered, as every ZeroMQ socket is."""
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
            self._peer.on_connected()
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self.close()
            self._peer.on_link_broken("refused")
        elif self.connected:
            while self._drain():
                pass
            self.close()
            self._peer.on_link_broken()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.close()
            self._peer.on_refused("does not know this process' key: it is no member of that cluster, or is no more")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self.close()
            self._peer.on_key_mismatch()
        else:
            self.close()
            self._peer.on_handshake_failed(certain=event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
