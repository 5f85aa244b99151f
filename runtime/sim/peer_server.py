"""The server end of simulated peers (runtime/sim/peers.py), as runtime/peer/server.py is the real one.

A server that is slowed down takes one envelope every SLOW_S, from its connections in turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..access import LOCAL, Principal
from ..files import Buffer
from ..network import SLOW_S, Endpoint, PeerService
from ..peer.envelope import IDENTITY_BYTES, Envelope, EnvelopeKind, encode, refuse
from ..peer.keys import PeerListening
from ..tasks import Tasks
from . import keys
from .peers import PeerItem, batches, decoded
from .wires import End, Wires

if TYPE_CHECKING:
    from .world import SimProcess


class SimRequest:
    """A request at the server (`runtime.network.Request`)."""

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
    """A listener of peers. `owner` is the process that serves."""

    def __init__(
        self, wires: Wires, owner: SimProcess, endpoint: Endpoint, identity: bytes, service: PeerService,
        access: PeerListening | None = None,
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

    def accept(self, end: End) -> None:
        if self._closed:
            end.close()
            return
        self._connections.append(_Connection(self, end))

    async def close(self, grace_s: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._wires.unlisten(self._endpoint.port, self)
        self.greetings.cancel()
        for connection in self._connections:
            connection.flush()
        if grace_s:
            await asyncio.sleep(grace_s)
        for connection in self._connections:
            connection.end.close()

    def slow_down(self, slow: bool) -> None:
        self._slow = slow
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        self._arm()

    def take(self, connection: _Connection, envelope: Envelope) -> None:
        """Passes the requests to the service, or keeps them for later while slowed down."""
        if not self._slow and not self._came:
            self._serve(connection, envelope)
            return
        self._came.setdefault(connection, deque()).append(envelope)
        self._arm()

    def _arm(self) -> None:
        if self._tick is None and self._came:
            loop = asyncio.get_running_loop()
            self._tick = loop.call_later(SLOW_S if self._slow else 0, self._take_one, context=self.owner.context)

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
    def closed(self) -> bool:
        return self._closed

    def forget(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._came.pop(connection, None)


class _Connection:
    """A client at the server: receives requests, collects the answers of a turn."""

    def __init__(self, server: SimPeerServer, end: End) -> None:
        self.end = end
        self._server = server
        self._outbox: list[PeerItem] = []
        self._flushing = False
        self._key = ""  # of the client, which has shown it
        end.receive, end.lost = self._receive, self._lost

    def principal(self) -> Principal | None:
        access = self._server.access
        return LOCAL if access is None else access.gate.principal(self._key)

    async def _greet(self, parts: list[bytes]) -> None:
        answer, self._key = await keys.answer(parts, self._server.access)
        if answer:
            self.end.send(answer, answer[0].decode().lower())
        if not self._key:
            self.end.close()

    def _receive(self, parts: list[bytes]) -> None:
        if self._server.closed:
            return
        if parts[0] == keys.HELLO:
            self._server.greetings.spawn(self._greet(parts), "sim-peer-greeting")
            return
        if self._server.access is not None and not self._key:
            self.end.send([keys.REFUSED, keys.WANTED], "refused")
            return
        envelope = decoded(parts)
        if self.principal() is None:
            ids = [item.id for item in envelope.items]
            self.end.send([refuse(EnvelopeKind.UNAUTHORIZED, self._server.identity, ids)], "unauthorized")
            return
        if envelope.identity != self._server.identity:
            ids = [item.id for item in envelope.items]
            self.end.send([refuse(EnvelopeKind.WRONG_IDENTITY, self._server.identity, ids)], "wrong identity")
            return
        self._server.take(self, envelope)

    def _lost(self) -> None:
        self._server.forget(self)

    def answer(self, item: PeerItem) -> None:
        self._outbox.append(item)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush, context=self._server.owner.context)

    def flush(self) -> None:
        self._flushing = False
        outbox, self._outbox = self._outbox, []
        for batch in batches(outbox):
            parts = [bytes(part) for part in encode(EnvelopeKind.REPLIES, self._server.identity, batch)]
            ids = f"{batch[0][0]}..{batch[-1][0]}"
            self.end.send(parts, f"replies {ids} {sum(map(len, parts))} B", droppable=True)
