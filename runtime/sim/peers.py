"""Peers over simulated cables: the semantics of runtime/peer/client.py, with its envelopes (runtime/peer/envelope.py).

As the real one: requests of one turn leave together; when a connection breaks or is refused, all requests in flight or
in the queue fail with ConnectionLost; it connects again after 50 ms, then more slowly, up to 1 s, and requests made
meanwhile wait for that attempt; another identity answers WrongIdentity; every request has its deadline.
Messages may be lost in transit (`NetworkFaults.drop_rate`). TCP does not lose them, but a broken switch, a stopped
process or a full queue has the same effect: the deadline passes.
The server end: runtime/sim/peer_server.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...proto import errors
from ..files import Buffer
from ..network import COALESCE_BYTES, Asker, Endpoint, Reply, pass_on
from ..peer.envelope import IDENTITY_BYTES, Envelope, EnvelopeKind, decode, encode
from ..peer.keys import CLEAR, PeerCalling
from . import keys
from .wires import End, Wires

if TYPE_CHECKING:
    from .world import SimProcess

RECONNECT_S = 0.05
RECONNECT_MAX_S = 1.0

PeerItem = tuple[int, bytes, Sequence[Buffer]]


class SimPeer:
    """The client end (`runtime.network.Peer`)."""

    def __init__(
        self, wires: Wires, owner: SimProcess, endpoint: Endpoint, identity: bytes, access: PeerCalling = CLEAR
    ) -> None:
        assert len(identity) == IDENTITY_BYTES, f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}"
        self._wires = wires
        self._owner = owner
        self._endpoint = endpoint
        self._identity = identity
        self._access = access
        self._greeting: End | None = None  # connected, and its keys are not decided yet
        self._loop = asyncio.get_running_loop()
        self._end: End | None = None
        self._dialling: asyncio.Future[End] | None = None
        self._dial_not_before = 0.0
        self._retry_s = RECONNECT_S
        self._outbox: list[PeerItem] = []
        self._waiting: dict[int, tuple[asyncio.Future[Reply], asyncio.TimerHandle]] = {}
        self._next_id = 1
        self._flushing = False
        self._closed = False
        self.requests = self.late_replies = 0

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def statistics(self) -> dict[str, int]:
        return {"requests": self.requests, "in_flight": len(self._waiting), "late_replies": self.late_replies}

    def request(self, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = self._loop.create_future()
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

    def post(
        self, asker: Asker, head: bytes, frames: Sequence[Buffer], *, timeout_s: float
    ) -> errors.MagnetarError | None:
        self.request(head, frames, timeout_s=timeout_s).add_done_callback(partial(pass_on, asker))
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
        for batch in batches(outbox):
            parts = [bytes(part) for part in encode(EnvelopeKind.REQUESTS, self._identity, batch)]
            ids = f"{batch[0][0]}..{batch[-1][0]}"
            self._end.send(parts, f"requests {ids} {sum(map(len, parts))} B", droppable=True)

    def _dial(self) -> None:
        if self._dialling is None:
            self._dialling = self._loop.create_future()
            wait = max(0.0, self._dial_not_before - self._loop.time())
            self._loop.call_later(wait, self._dial_now, context=self._owner.context)

    def _dial_now(self) -> None:
        self._dialling = self._wires.dial(self._owner, self._endpoint)
        self._dialling.add_done_callback(self._dialled, context=self._owner.context)

    def _dialled(self, dialling: asyncio.Future[End]) -> None:
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
            end.send(keys.hello(self._access), "hello")

    def _greeted(self, parts: list[bytes]) -> None:
        end, self._greeting = self._greeting, None
        assert end is not None, "an answer to our hello"
        if parts[0] == keys.WELCOME:
            self._joined(end)
        else:
            self._refused(end, parts)

    def _refused(self, end: End, parts: list[bytes]) -> None:
        end.close()
        self._end = None
        self._fail_all(errors.Unauthorized(f"{self._endpoint} {parts[1].decode()}", endpoint=self._endpoint))

    def _joined(self, end: End) -> None:
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
        if parts[0] == keys.REFUSED:
            assert self._end is not None, "it was connected"
            self._refused(self._end, parts)
            return
        envelope = decoded(parts)
        match envelope.kind:
            case EnvelopeKind.REPLIES:
                for item in envelope.items:
                    future = self._take(item.id)
                    if future is None:
                        self.late_replies += 1
                    else:
                        future.set_result(Reply(item.head, [frame for frame in item.frames if frame is not None]))
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

    def _take(self, id_: int) -> asyncio.Future[Reply] | None:
        entry = self._waiting.pop(id_, None)
        if entry is None:
            return None
        entry[1].cancel()
        return entry[0] if not entry[0].done() else None

    def _fail(self, id_: int, error: errors.MagnetarError) -> None:
        future = self._take(id_)
        if future is not None:
            future.set_exception(error)

    def _fail_all(self, error: errors.MagnetarError) -> None:
        self._outbox.clear()
        for id_ in list(self._waiting):
            self._fail(id_, type(error)(error.message, **error.fields))


def batches(items: list[PeerItem]) -> list[list[PeerItem]]:
    """The items in groups, each of the size of a multipart."""
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


def decoded(parts: list[bytes]) -> Envelope:
    envelope = decode(parts[0])
    assert len(envelope.parts) == len(parts) - 1
    for (item, index, size), part in zip(envelope.parts, parts[1:], strict=True):
        assert len(part) == size
        item.frames[index] = part
    return envelope
