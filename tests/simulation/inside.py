"""A broker and a bookie in one simulated process: `runtime/peer/inside.py` between them, which the observer sees.

As in `magnetar standalone`. What they ask each other crosses no wire, so that no fault of a wire strikes it; a kill, a
freeze, a power loss and a cancelled task strike both at once.
"""

import asyncio
import itertools
from asyncio import Future
from collections.abc import Callable, Sequence
from functools import partial

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.access import Principal
from magnetar.runtime.files import Buffer
from magnetar.runtime.network import (
    NO_PEER_KEYS,
    AnswerListener,
    Endpoint,
    Peer,
    PeerClientKeys,
    PeerReply,
    PeerRequest,
    PeerServerKeys,
    PeerService,
    RunningPeerServer,
    World,
)
from magnetar.runtime.peer.inside import InProcessNetwork, InProcessRequest
from tests.simulation.verdict.observer import Observer

CONNECTION = -1
"""Of all requests within processes: their numbers are different, and no wire has it."""
LATE_S = 2.0
SLACK_S = 5.0
"""A request without an outcome so long after its deadline never gets one."""
_NUMBERS = itertools.count()


class _Observed:
    """A request within a process (`runtime.network.PeerRequest`) whose answer the observer sees."""

    __slots__ = ("_node", "_number", "_observer", "_request", "connection", "frames", "head")

    is_local = True

    def __init__(self, request: PeerRequest, observer: Observer, node: str) -> None:
        self._request, self._observer, self._node = request, observer, node
        self._number = next(_NUMBERS)
        self.connection, self.head, self.frames = request.connection, request.head, request.frames
        observer.within += 1
        observer.asked(node, CONNECTION, self._number, self.head, [bytes(each) for each in self.frames])

    @property
    def principal(self) -> Principal | None:
        return self._request.principal

    def reply(self, head: bytes, frames: Sequence[Buffer] = ()) -> None:
        self._observer.answers(self._node, CONNECTION, self._number, head, [bytes(each) for each in frames])
        self._request.reply(head, frames)


class _Deadline:
    """Calls `passed` after so many seconds in which its process ran: one that was stopped meanwhile, so that its timers
    are late, has SLACK_S from then on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, passed: Callable[[], None]) -> None:
        self._loop, self._passed = loop, passed
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        self.timer = self._loop.call_at(self._loop.time() + seconds, self._due, self._loop.time() + seconds)

    def _due(self, at: float) -> None:
        if self._loop.time() > at:
            self._wait(SLACK_S)
        else:
            self._passed()


class _Watched:
    """An `AnswerListener` of a request that must get an outcome."""

    watch: _Deadline

    def __init__(self, asked: dict[object, float], asker: AnswerListener) -> None:
        self._asked, self._asker = asked, asker

    def on_answered(self, head: bytes, frames: Sequence[Buffer]) -> None:
        self._over()
        self._asker.on_answered(head, frames)

    def on_failed(self, error: BaseException) -> None:
        self._over()
        self._asker.on_failed(error)

    def _over(self) -> None:
        del self._asked[self]
        self.watch.timer.cancel()


class _ObservedPeer:
    """A peer (`runtime.network.Peer`) each of whose requests must get an outcome."""

    def __init__(
        self, inside: Peer, asked: dict[object, float], now: Callable[[], float], gone: Callable[[], None]
    ) -> None:
        self._inside, self._asked, self._now, self._gone = inside, asked, now, gone
        self._loop = asyncio.get_running_loop()
        self.statistics, self.close = inside.statistics, inside.close

    @property
    def endpoint(self) -> Endpoint:
        return self._inside.endpoint

    def request(self, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float) -> Future[PeerReply]:
        future = self._inside.request(head, frames, timeout_s=timeout_s)
        if not future.done():
            self._asked[future] = self._now()
            watch = _Deadline(self._loop, timeout_s + SLACK_S, self._gone)

            def over(done: Future[PeerReply]) -> None:
                del self._asked[done]
                watch.timer.cancel()

            future.add_done_callback(over)
        return future

    def send_request(
        self, asker: AnswerListener, head: bytes, frames: Sequence[Buffer], *, timeout_s: float
    ) -> MagnetarError | None:
        watched = _Watched(self._asked, asker)
        refused = self._inside.send_request(watched, head, frames, timeout_s=timeout_s)
        if refused is None:
            self._asked[watched] = self._now()
            watched.watch = _Deadline(self._loop, timeout_s + SLACK_S, self._gone)
        return refused


class ObservedInside:
    """The network of the process on `node`: around an `InProcessNetwork`, which is compiled and so has no subclass."""

    def __init__(self, world: World, observer: Observer, node: str) -> None:
        self._inside = InProcessNetwork(world.network, world.clock)
        self._observer = observer
        self._node = node
        self._now = world.clock.monotonic
        self._asked: dict[object, float] = {}  # requests without an outcome → when they were made
        outside = world.network
        self.serve, self.connect, self.generate_keys = outside.serve, outside.connect, outside.generate_keys
        self.serve_bytes, self.connect_bytes = outside.serve_bytes, outside.connect_bytes

    def late(self) -> int:
        """Requests that have waited for an outcome for LATE_S."""
        return sum(asked_at < self._now() - LATE_S for asked_at in self._asked.values())

    def connect_peer(self, endpoint: Endpoint, identity: bytes, access: PeerClientKeys = NO_PEER_KEYS) -> Peer:
        gone = partial(self._observer.forgotten, self._node)
        return _ObservedPeer(self._inside.connect_peer(endpoint, identity, access), self._asked, self._now, gone)

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerServerKeys | None = None
    ) -> RunningPeerServer:
        assert access is None, "secured bookies are asked through a socket"

        def observed(requests: Sequence[PeerRequest]) -> None:
            """What came through the socket, a stranger's too, is seen on the wire."""
            service([_Observed(each, self._observer, self._node) if isinstance(each, InProcessRequest) else each
                     for each in requests])  # fmt: skip

        return await self._inside.serve_peers(endpoint, identity, observed)
