"""The id of one producer or consumer on the stream to the broker that owns its topic: how it gets one, and loses it.

    attachment.open()               the first time: `on_open` reports that it is open, is refused, or the operation's
                                    deadline is over. An owner that waits for its turn has no deadline once it waits
    attachment.reopen(after_s)      later: one attempt after a pause; `on_lost` reports its failure
    attachment.send(permits=7)      a frame; nothing is sent without an id
    attachment.publish(entry)       the same of an entry
    attachment.leave()              the id is given up, and the broker told
    await attachment.close()        the same, and the broker has forgotten the owner when it returns

Each attempt looks the topic up, attaches to the stream of that broker and sends the owner's first frame. The owner
calls `opened` or `closed` when it reads the answer, and takes no frame that follows in the same read once it has no id
(`is_attached`): a broker says `closed` again for each frame that reaches an id after its end. An id is lost once, so
one loss begins one opening. What to do after an error is the decision of the owner's core
(client/core/producer.py, client/core/consumer.py). Guards: tests/client/produce/test_partition_producer.py,
tests/client/connect/test_late_frames.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, MagnetarError, TimedOut
from ...proto.names import TopicName
from ...proto.varint import varint
from ...runtime.tasks import Tasks
from ..common.guard import run
from .broker_stream import CLOSE, BrokerStream
from .connections import Connections

PUBLISH_TAG = b"\x1a"
"""Tag of ClientFrame.publish, field 3, length-delimited."""
WAITED_S = 1.0
"""Seconds of a wait after which an opening did not just fail: the broker took it and let it wait."""


class AttachedOwner(Protocol):
    """A producer or consumer, as its attachment calls it."""

    topic: TopicName
    waits: bool  # the answer to its first frame may take as long as others please

    def first_frame(self) -> dict[str, Any]:
        """The kind of a ClientFrame that opens the producer or consumer."""
        ...

    def on_frames(self, frames: Sequence[wire.ServerFrame]) -> None: ...
    def on_open(self, error: MagnetarError | None) -> None:
        """Called when the first opening is over; `error`: it failed for good."""
        ...

    def on_lost(self, error: MagnetarError) -> None:
        """Called when the owner has no id (any more), or an attempt to get one failed."""
        ...

    def broke(self, error: Exception) -> None: ...


class Attachment:
    """The attachment of one producer or consumer to its broker."""

    __slots__ = (
        "_answer", "_connections", "_id", "_left", "_owner", "_pause", "_publish_head", "_stream", "_tasks", "broke",
        "on_frames", "topic",
    )  # fmt: skip

    def __init__(self, connections: Connections, owner: AttachedOwner) -> None:
        self.on_frames = owner.on_frames
        self.broke = owner.broke
        self.topic = owner.topic
        self._connections = connections
        self._owner = owner
        self._stream: BrokerStream | None = None
        self._id = 0
        self._publish_head = b""  # a ClientFrame's bytes up to the length of its entry
        self._answer: asyncio.Future[None] | None = None  # to the first frame
        self._left: asyncio.Future[None] | None = None
        self._tasks = Tasks(owner.broke)
        self._pause: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------ to get an id
    def open(self) -> None:
        self._tasks.spawn(self._open(), f"opening of {self._owner.topic}")

    async def _open(self) -> None:
        failure: MagnetarError | None = None
        try:
            if self._owner.waits:
                await self._wait_for_turn()
            else:
                await self._connections.retry(self._attempt)
        except MagnetarError as error:
            failure = error
        self._owner.on_open(failure)

    async def _wait_for_turn(self) -> None:
        """Returns when its turn came. A wait that breaks is begun anew. Raises what stays, and what kept it from
        waiting for as long as an operation may take."""
        now, timeout_s = self._connections.world.clock.monotonic, self._connections.settings.operation_timeout_s
        backoff, since = self._connections.backoff(), now()
        while True:
            answer, began = await self._connections.retry(self._attach), now()
            try:
                await self._answered(answer)
                return
            except MagnetarError as error:
                if now() - began > WAITED_S:
                    backoff.reset()
                    since = now()
                delay = backoff.next_s()
                if not error.retryable or now() + delay - since > timeout_s:
                    raise
            await asyncio.sleep(delay)

    def reopen(self, after_s: float) -> None:
        """Opens again after a pause. That is a timer, and no task until then, because many owners may wait, and a loop
        may end meanwhile."""
        assert not self.is_attached, "one connection at a time"
        if self._pause is not None:
            self._pause.cancel()
        self._pause = asyncio.get_running_loop().call_later(after_s, run, self._begin, self.broke)

    def _begin(self) -> None:
        self._tasks.spawn(self._reopen(), f"opening of {self._owner.topic}")

    async def _reopen(self) -> None:
        try:
            async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                await self._attempt()
        except TimeoutError as error:
            failure: MagnetarError = error if isinstance(error, MagnetarError) else TimedOut("no answer to the opening")
        except MagnetarError as error:
            failure = error
        else:
            return
        self._owner.on_lost(failure)

    async def _attempt(self) -> None:
        await self._answered(await self._attach())

    async def _attach(self) -> asyncio.Future[None]:
        """Sends its first frame; returns the future of the answer."""
        stream = await self._connections.broker_stream(self._owner.topic)
        first = self._owner.first_frame()
        answer = self._answer = asyncio.get_running_loop().create_future()
        id_ = stream.attach(self)
        self._stream, self._id = stream, id_
        self._publish_head = wire.ClientFrame(id=id_).SerializeToString() + PUBLISH_TAG
        self.send(**first)
        return answer

    async def _answered(self, answer: asyncio.Future[None]) -> None:
        id_ = self._id
        try:
            await answer
        except BaseException:
            if self.is_attached and self._id == id_:
                self.leave()
            raise
        finally:
            if self._answer is answer:
                self._answer = None

    def opened(self) -> None:
        """Called when the owner read that it is open."""
        if self._answer is None or self._answer.done():
            self.closed(ConnectionLost("the broker opened it twice"))
        else:
            self._answer.set_result(None)

    # ------------------------------------------------------------------------------ with an id
    @property
    def is_attached(self) -> bool:
        return self._stream is not None

    def send(self, **kind: Any) -> None:
        if self._stream is not None:
            self._stream.send(self._id, wire.ClientFrame(id=self._id, **kind))

    def publish(self, entry: bytes) -> None:
        """Sends `send(publish=entry)`, without the two copies that protobuf makes of it."""
        if self._stream is not None:
            size = len(entry)
            self._stream.send(self._id, (self._publish_head, varint(size), entry))

    # ------------------------------------------------------------------------------ without it
    def closed(self, error: MagnetarError) -> None:
        """Called when the owner read that the broker gave it up."""
        self._detach()
        self.lost(error)

    def lost(self, error: MagnetarError) -> None:
        self._stream = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            return
        if self._left is not None:
            self.done()
            return
        self._owner.on_lost(error)

    def out_of_turn(self, kind: str | None) -> None:
        """Called when the owner read a frame that it does not take: the broker and it do not agree on what the id is.
        """
        self.leave()
        self.lost(ConnectionLost(f"the broker said {kind} out of turn"))

    def leave(self) -> None:
        if self._stream is not None:
            self.send(close=CLOSE)
            self._detach()

    def _detach(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.detach(self._id)

    async def close(self) -> None:
        """Waits until the broker has forgotten an owner that is open; an opening that is under way is given up.

        Two that close at once wait for one answer, and both end when one is interrupted.
        """
        self.stop()
        if self._answer is not None:
            self.leave()
        elif self._stream is not None:
            if self._left is None:
                self._left = asyncio.get_running_loop().create_future()
                self.send(close=CLOSE)
            try:
                await asyncio.shield(self._left)
            finally:
                self._detach()
                self.done()

    def done(self) -> None:
        """Called when the owner read that the broker has forgotten it."""
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    def stop(self) -> None:
        """Stops attempts: no further one begins, and one that is under way ends."""
        self._tasks.cancel()
        if self._pause is not None:
            self._pause.cancel()
