"""Peers over simulated connections, with the behaviour of runtime/peer/client.py and the envelopes of
runtime/peer/envelope.py.

As with real peers, requests of one turn leave together. When a connection breaks or is refused, all requests in flight
or in the queue fail with ConnectionLost. The peer connects again after 50 ms, then more slowly, up to 1 s, and requests
made meanwhile wait for that attempt. A server with another identity answers WrongIdentity, and every request has its
deadline. Messages may be lost in transit (`NetworkFaults.drop_rate`). TCP does not lose them, but a broken switch, a
stopped process or a full queue has the same effect: the deadline passes.

Keys of simulated peers: what CURVE and ZAP decide on real ones (runtime/peer/sockets.py), in two messages.

    hello = HELLO | public key of the client | its secret | public key that the server has to have
    answer = WELCOME, or REFUSED and why; anything but WELCOME ends the connection

A public key is the hash of its secret, so that only a process with the secret can show the key. No code listens on
simulated connections, so the secret itself is the proof.

Also in this file, below its heading: the server end of simulated peers, as runtime/peer/server.py is the real one
(peer_server).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...proto import errors
from ...proto.errors import MagnetarError
from ..access import LOCAL_PRINCIPAL, Principal
from ..files import Buffer
from ..network import (
    COALESCE_BYTES,
    NO_PEER_KEYS,
    SLOWED_RECEIVE_S,
    AnswerListener,
    Endpoint,
    KeyPair,
    PeerClientKeys,
    PeerReply,
    PeerServerKeys,
    PeerService,
    notify_asker_of_answer,
)
from ..peer.envelope import (
    IDENTITY_BYTES,
    Envelope,
    EnvelopeKind,
    decode_envelope,
    encode_envelope,
    encode_refusal_envelope,
)
from ..tasks import Tasks
from .wires import ConnectionEnd, SimConnections

if TYPE_CHECKING:
    from .world import SimProcess


HELLO, WELCOME, REFUSED = b"HELLO", b"WELCOME", b"REFUSED"

KEYS_WANTED_REFUSAL = b"asks for keys: give --security, as the other processes of its cluster"
NO_KEYS_REFUSAL = b"speaks in clear, without keys, as the other processes of its cluster"
UNKNOWN_KEY_REFUSAL = b"does not know this process' key: it is no member of that cluster, or is no more"


def new_keys(rng: random.Random) -> KeyPair:
    """Creates keys for simulated peer connections from random bytes of `rng`, and returns them."""
    secret = rng.randbytes(32)
    return KeyPair(_public(secret), secret)


def _public(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def make_hello(access: PeerClientKeys) -> list[bytes]:
    """Returns the handshake message HELLO of a client with keys."""
    assert access.own is not None, "a caller in clear says no hello"
    return [HELLO, access.own.public.encode(), access.own.secret, access.server.encode()]


async def answer_hello(parts: list[bytes], access: PeerServerKeys | None) -> tuple[list[bytes], str]:
    """Returns the server's answer to the handshake message HELLO of a client, and the key of the client if the answer
    is WELCOME, else "". `access` None: the server has no keys. An empty answer means that the server breaks the
    connection off: the client wants a server with another key, or the gate cannot decide. `parts`: the message of
    `make_hello`."""
    if access is None:
        return [REFUSED, NO_KEYS_REFUSAL], ""
    public, secret, server = parts[1].decode(), parts[2], parts[3].decode()
    if server != access.own.public:
        return [], ""
    try:
        admitted = public == _public(secret) and await access.gate.admit(public)
    except MagnetarError:
        return [], ""
    return ([WELCOME], public) if admitted else ([REFUSED, UNKNOWN_KEY_REFUSAL], "")


RECONNECT_S = 0.05
RECONNECT_MAX_S = 1.0

PeerItem = tuple[int, bytes, Sequence[Buffer]]


class SimPeer:
    """The client end of a simulated peer connection; implements `runtime.network.Peer`."""

    def __init__(
        self, wires: SimConnections, owner: SimProcess, endpoint: Endpoint, identity: bytes,
        access: PeerClientKeys = NO_PEER_KEYS
    ) -> None:
        assert len(identity) == IDENTITY_BYTES, f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}"
        self._wires = wires
        self._owner = owner
        self._endpoint = endpoint
        self._identity = identity
        self._access = access
        self._greeting: ConnectionEnd | None = None  # connected, and its keys are not decided yet
        self._loop = asyncio.get_running_loop()
        self._end: ConnectionEnd | None = None
        self._dialling: asyncio.Future[ConnectionEnd] | None = None
        self._dial_not_before = 0.0
        self._retry_s = RECONNECT_S
        self._outbox: list[PeerItem] = []
        self._waiting: dict[int, tuple[asyncio.Future[PeerReply], asyncio.TimerHandle]] = {}
        self._next_id = 1
        self._flushing = False
        self._closed = False
        self.requests = self.late_replies = 0

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def statistics(self) -> dict[str, int]:
        return {"requests": self.requests, "in_flight": len(self._waiting), "late_replies": self.late_replies}

    def request(self, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float) -> asyncio.Future[PeerReply]:
        future: asyncio.Future[PeerReply] = self._loop.create_future()
        if self._closed:
            future.set_exception(errors.ConnectionLost(f"the peer {self._endpoint} is closed"))
            return future
        id_ = self._next_id
        self._next_id += 1
        self.requests += 1
        timer = self._loop.call_later(timeout_s, self._expire, id_, context=self._owner.context)
        self._waiting[id_] = (future, timer)
        self._outbox.append((id_, head, frames))
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush, context=self._owner.context)
        return future

    def send_request(
        self, asker: AnswerListener, head: bytes, frames: Sequence[Buffer], *, timeout_s: float
    ) -> errors.MagnetarError | None:
        self.request(head, frames, timeout_s=timeout_s).add_done_callback(partial(notify_asker_of_answer, asker))
        return None

    async def close(self) -> None:
        self._closed = True
        self._fail_all(errors.ConnectionLost(f"the peer {self._endpoint} was closed"))
        for end in (self._end, self._greeting):
            if end is not None:
                end.close()

    # ------------------------------------------------------------------ connecting
    def _flush(self) -> None:
        self._flushing = False
        if self._closed or not self._outbox:
            return
        if self._end is None:
            if self._greeting is None:
                self._dial()
            return
        outbox, self._outbox = self._outbox, []
        for batch in split_into_multipart_messages(outbox):
            parts = [bytes(part) for part in encode_envelope(EnvelopeKind.REQUESTS, self._identity, batch)]
            ids = f"{batch[0][0]}..{batch[-1][0]}"
            self._end.send(parts, f"requests {ids} {sum(map(len, parts))} B", droppable=True)

    def _dial(self) -> None:
        if self._dialling is None:
            self._dialling = self._loop.create_future()
            wait = max(0.0, self._dial_not_before - self._loop.time())
            self._loop.call_later(wait, self._dial_now, context=self._owner.context)

    def _dial_now(self) -> None:
        self._dialling = self._wires.open_connection(self._owner, self._endpoint)
        self._dialling.add_done_callback(self._dialled, context=self._owner.context)

    def _dialled(self, dialling: asyncio.Future[ConnectionEnd]) -> None:
        self._dialling = None
        error = dialling.exception()
        if error is not None:
            self._broke("refused, trying again")
            return
        end = dialling.result()
        if self._closed:
            end.close()
        elif not end.open:
            self._broke("it broke")
        elif self._access.own is None:
            self._joined(end)
        else:
            self._greeting = end
            end.receive, end.lost = self._greeted, self._lost
            end.send(make_hello(self._access), "hello")

    def _greeted(self, parts: list[bytes]) -> None:
        end, self._greeting = self._greeting, None
        assert end is not None, "an answer to our hello"
        if parts[0] == WELCOME:
            self._joined(end)
        else:
            self._on_refused(end, parts)

    def _on_refused(self, end: ConnectionEnd, parts: list[bytes]) -> None:
        end.close()
        self._end = None
        self._fail_all(errors.Unauthorized(f"{self._endpoint} {parts[1].decode()}", endpoint=self._endpoint))

    def _joined(self, end: ConnectionEnd) -> None:
        self._end = end
        self._retry_s = RECONNECT_S
        end.receive, end.lost = self._receive, self._lost
        self._flush()

    def _lost(self) -> None:
        self._end = self._greeting = None
        self._broke("it broke")

    def _broke(self, reason: str) -> None:
        self._dial_not_before = self._loop.time() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RECONNECT_MAX_S)
        self._fail_all(errors.ConnectionLost(f"no connection to {self._endpoint}: {reason}", endpoint=self._endpoint))

    # ------------------------------------------------------------------ answers
    def _receive(self, parts: list[bytes]) -> None:
        if parts[0] == REFUSED:
            assert self._end is not None, "it was connected"
            self._on_refused(self._end, parts)
            return
        envelope = decode_envelope_parts(parts)
        match envelope.kind:
            case EnvelopeKind.REPLIES:
                for item in envelope.items:
                    future = self._take_waiting(item.id)
                    if future is None:
                        self.late_replies += 1
                    else:
                        future.set_result(PeerReply(item.head, [frame for frame in item.frames if frame is not None]))
            case EnvelopeKind.WRONG_IDENTITY:
                for item in envelope.items:
                    self._fail(item.id, self._wrong_identity(envelope.identity))
            case EnvelopeKind.UNAUTHORIZED:
                for item in envelope.items:
                    text = f"this process is no member any more for {self._endpoint}"
                    self._fail(item.id, errors.Unauthorized(text))
            case EnvelopeKind.WRONG_PROTOCOL | EnvelopeKind.REQUESTS:
                self._fail_all(errors.WrongProtocol(f"{self._endpoint} speaks another version of the peer protocol"))

    def _wrong_identity(self, found: bytes) -> errors.WrongIdentity:
        text = f"the process at {self._endpoint} is {found.hex()}, not {self._identity.hex()}"
        return errors.WrongIdentity(text, endpoint=self._endpoint, wanted=self._identity.hex(), found=found.hex())

    def _expire(self, id_: int) -> None:
        self._fail(id_, errors.TimedOut(f"no answer from {self._endpoint} in time", endpoint=self._endpoint))

    def _take_waiting(self, id_: int) -> asyncio.Future[PeerReply] | None:
        entry = self._waiting.pop(id_, None)
        if entry is None:
            return None
        entry[1].cancel()
        return entry[0] if not entry[0].done() else None

    def _fail(self, id_: int, error: errors.MagnetarError) -> None:
        future = self._take_waiting(id_)
        if future is not None:
            future.set_exception(error)

    def _fail_all(self, error: errors.MagnetarError) -> None:
        self._outbox.clear()
        for id_ in list(self._waiting):
            self._fail(id_, type(error)(error.message, **error.fields))


def split_into_multipart_messages(items: list[PeerItem]) -> list[list[PeerItem]]:
    """Divides the items, in order, into groups of at most COALESCE_BYTES; a larger item is a group of its own. Returns
    [] if there are none."""
    batches: list[list[PeerItem]] = []
    size = COALESCE_BYTES + 1
    for item in items:
        item_bytes = len(item[1]) + sum(map(len, item[2]))
        if size + item_bytes > COALESCE_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += item_bytes
    return batches


def decode_envelope_parts(parts: list[bytes]) -> Envelope:
    """Decodes the header of an envelope in `parts[0]`, puts the further parts into its items, and returns it. The parts
    must be complete. Raises the errors of `decode_envelope`."""
    envelope = decode_envelope(parts[0])
    assert len(envelope.parts) == len(parts) - 1
    for (item, index, size), part in zip(envelope.parts, parts[1:], strict=True):
        assert len(part) == size
        item.frames[index] = part
    return envelope


# --------------------------------------------------------------------------------------------------- peer_server
# The server end of simulated peers (runtime/sim/peers.py), as runtime/peer/server.py is the real one.
#
# A server that is slowed down takes one envelope every SLOWED_RECEIVE_S, from its connections in turn.


class SimRequest:
    """A request that a simulated peer server received; implements `runtime.network.PeerRequest`."""

    __slots__ = ("_connection", "_id", "connection", "frames", "head")

    def __init__(self, connection: _Connection, id_: int, head: bytes, frames: Sequence[Buffer]) -> None:
        self._connection: _Connection | None = connection
        self.connection = connection
        self._id = id_
        self.head = head
        self.frames = frames

    @property
    def is_local(self) -> bool:
        end = self.connection.end
        return end.owner.node == end.other.owner.node

    @property
    def principal(self) -> Principal | None:
        return self.connection.principal()

    def reply(self, head: bytes, frames: Sequence[Buffer] = ()) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None, "a request was answered twice"
        connection.answer((self._id, head, frames))


class SimPeerServer:
    """A simulated listener for peers; implements `runtime.network.RunningPeerServer`. `owner` is the process that
    serves."""

    def __init__(
        self, wires: SimConnections, owner: SimProcess, endpoint: Endpoint, identity: bytes, service: PeerService,
        access: PeerServerKeys | None = None,
    ) -> None:  # fmt: skip
        assert len(identity) == IDENTITY_BYTES, f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}"
        self.owner = owner
        self.identity = identity
        self.service = service
        self.access = access
        self._wires = wires
        self._connections: list[_Connection] = []
        self.greetings = Tasks()
        self._closed = False
        self._slow = False
        self._came: dict[_Connection, deque[Envelope]] = {}  # while slowed down, in turn
        self._tick: asyncio.TimerHandle | None = None
        self._endpoint = wires.listen(endpoint, self)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @property
    def key(self) -> str:
        return "" if self.access is None else self.access.own.public

    def accept(self, end: ConnectionEnd) -> None:
        """Called for a new connection, with the server's end of it."""
        if self._closed:
            end.close()
            return
        self._connections.append(_Connection(self, end))

    async def close(self, grace_s: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._wires.stop_listening(self._endpoint.port, self)
        self.greetings.cancel()
        for connection in self._connections:
            connection.flush()
        if grace_s:
            await asyncio.sleep(grace_s)
        for connection in self._connections:
            connection.end.close()

    def receive_slowly(self, slow: bool) -> None:
        self._slow = slow
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        self._arm()

    def on_envelope(self, connection: _Connection, envelope: Envelope) -> None:
        """Called when an envelope of `connection` has arrived. Passes its requests to the service; while the server is
        slowed down, stores them first."""
        if not self._slow and not self._came:
            self._serve(connection, envelope)
            return
        self._came.setdefault(connection, deque()).append(envelope)
        self._arm()

    def _arm(self) -> None:
        if self._tick is None and self._came:
            loop = asyncio.get_running_loop()
            self._tick = loop.call_later(
                SLOWED_RECEIVE_S if self._slow else 0, self._take_one, context=self.owner.context
            )

    def _take_one(self) -> None:
        self._tick = None
        if not self._came:
            return
        connection = next(iter(self._came))
        envelopes = self._came.pop(connection)
        envelope = envelopes.popleft()
        if envelopes:
            self._came[connection] = envelopes  # after the others
        if not self._closed:
            self._serve(connection, envelope)
        self._arm()

    def _serve(self, connection: _Connection, envelope: Envelope) -> None:
        self.service(
            [
                SimRequest(connection, item.id, item.head, [frame for frame in item.frames if frame is not None])
                for item in envelope.items
            ]
        )

    @property
    def is_closed(self) -> bool:
        return self._closed

    def remove_connection(self, connection: _Connection) -> None:
        """Called when a connection is lost: envelopes that wait are dropped."""
        self._connections.remove(connection)
        self._came.pop(connection, None)


class _Connection:
    """A client's connection at the server: receives requests, and collects the answers of a turn."""

    def __init__(self, server: SimPeerServer, end: ConnectionEnd) -> None:
        self.end = end
        self._server = server
        self._outbox: list[PeerItem] = []
        self._flushing = False
        self._key = ""  # of the client, which has shown it
        end.receive, end.lost = self._receive, self._lost

    def principal(self) -> Principal | None:
        access = self._server.access
        return LOCAL_PRINCIPAL if access is None else access.gate.find_principal(self._key)

    async def _greet(self, parts: list[bytes]) -> None:
        welcome, self._key = await answer_hello(parts, self._server.access)
        if welcome:
            self.end.send(welcome, welcome[0].decode().lower())
        if not self._key:
            self.end.close()

    def _receive(self, parts: list[bytes]) -> None:
        if self._server.is_closed:
            return
        if parts[0] == HELLO:
            self._server.greetings.spawn(self._greet(parts), "sim-peer-greeting")
            return
        if self._server.access is not None and not self._key:
            self.end.send([REFUSED, KEYS_WANTED_REFUSAL], "refused")
            return
        envelope = decode_envelope_parts(parts)
        if self.principal() is None:
            ids = [item.id for item in envelope.items]
            self.end.send(
                [encode_refusal_envelope(EnvelopeKind.UNAUTHORIZED, self._server.identity, ids)], "unauthorized"
            )
            return
        if envelope.identity != self._server.identity:
            ids = [item.id for item in envelope.items]
            self.end.send(
                [encode_refusal_envelope(EnvelopeKind.WRONG_IDENTITY, self._server.identity, ids)], "wrong identity"
            )
            return
        self._server.on_envelope(self, envelope)

    def _lost(self) -> None:
        self._server.remove_connection(self)

    def answer(self, item: PeerItem) -> None:
        self._outbox.append(item)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush, context=self._server.owner.context)

    def flush(self) -> None:
        self._flushing = False
        outbox, self._outbox = self._outbox, []
        for batch in split_into_multipart_messages(outbox):
            parts = [bytes(part) for part in encode_envelope(EnvelopeKind.REPLIES, self._server.identity, batch)]
            ids = f"{batch[0][0]}..{batch[-1][0]}"
            self.end.send(parts, f"replies {ids} {sum(map(len, parts))} B", droppable=True)
