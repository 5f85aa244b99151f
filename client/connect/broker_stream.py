"""The Connect stream to one broker. All producers and consumers of a client whose topics this broker owns share it;
each has an id on it, and is called its *owner* here.

    id = stream.attach(owner)       the owner's first frame must be `open_producer` or `subscribe`
    stream.send(id, frame)          never waits; all frames of one turn of the event loop leave in one envelope
    stream.detach(id)               frames for that id are dropped from now on

Frames are passed to the owner of their id, synchronously, in the order of their arrival; an owner gets all its frames
of one read at once. There is one task per stream, and none per owner. **Silence.** If a stream with owners receives
nothing for PING_AFTER_SILENCE_S, it pings the broker. While the ping is not answered, it asks another broker who owns
the topics now (client/connect/discovery.py). Owners whose topics moved get `on_lost`; others keep waiting. **The end.**
When the stream breaks, `on_lost` is called once for each owner; a new stream is a new object. A stream without owners
closes after IDLE_STREAM_S. An owner that raises an error does not end the stream for others: only its `on_failure` is
called. **Fairness.** While more than QUEUE_BY_ID_BYTES wait to be sent, frames are queued by their ids, and the ids
send one frame each in turn: an id that publishes much delays the frame of another id by those bytes only. The queue of
an id is bounded by its credit. A read is processed in slices, and after READ_TURN_S other work of the event loop runs.
Guards: tests/client/connect/test_broker_stream.py, tests/client/connect/test_silence.py."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, MagnetarError
from ...proto.names import TopicName
from ...runtime.network import (
    Channel,
    EndOfStream,
    Pieces,
    Stream,
    find_rpc,
)
from ...runtime.tasks import Tasks
from ..common.loggers import ignore_error, report_failure, run_logging_errors
from .discovery import OWNER_LOOKUPS_AT_ONCE, PING_AFTER_SILENCE_S, PING_TIMEOUT_S, SilentBrokerTracker

IDLE_STREAM_S = 60.0
"""Seconds that a stream without owners stays open, so that a program that opens one producer after another uses one
stream."""
QUEUE_BY_ID_BYTES = 2 << 20
"""Unsent bytes from which on frames are queued by their ids: two envelopes, the one that gRPC writes and the next. With
less unsent, a frame of any id is sent at once. (With one envelope, every second envelope has a single frame, because
nothing waits when the write before it ends.)"""
FRAMES_PER_SLICE = 512
READ_TURN_S = 0.005
TIMER_EARLY_MAX_S = 0.01
"""Seconds by which a timer may fire too early: the resolution of the clock."""
CLOSE_REQUEST_ID = 1 << 62
"""The request id of each `close` request; no other request has it."""


SentFrame = wire.ClientFrame | Pieces


class StreamOwner(Protocol):
    """The interface of an object that is attached to a stream and gets frames from it, called in the event loop.
    Attachment implements it for a producer or consumer. None of its methods may block."""

    topic: TopicName

    def on_frames(self, frames: Sequence[wire.ServerFrame]) -> None: ...
    def on_lost(self, error: MagnetarError) -> None:
        """Fact: the stream broke, or another broker owns the topic. This producer or consumer is no longer attached to
        the stream."""
        ...

    def on_failure(self, error: Exception) -> None:
        """Fact: this object's method `on_frames` or `on_lost` raised `error`. This object must then end itself."""
        ...


class BrokerStream:
    """The `Connect` stream between a client and one broker: all producers and consumers of the client on topics of that
    broker share it. `has_ended`: it carries no frames any more. `received_at`: when frames came last, in seconds of
    `now`. See the head of the module."""

    def __init__(
        self, channel: Channel, now: Callable[[], float], on_end: Callable[[], object], silence: SilentBrokerTracker
    ) -> None:
        """Opens the stream to the broker of `channel`. Must be called in the event loop. `now`: a monotonic clock, in
        seconds. `on_end` is called once, when the stream ends and no owner can be attached any more."""
        self.has_ended = False
        self._channel = channel
        self._silence = silence
        self._watch: asyncio.TimerHandle | None = None  # whether it is silent; or it is being asked
        self._now = now
        self.received_at = now()  # when frames came last
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._owners: dict[int, StreamOwner] = {}
        self._last = 0
        self._held: dict[int, deque[SentFrame]] = {}  # in the order of their turns
        self._sending = False  # what is held
        self._rounds = 0  # of questions while it is silent
        self._idle: asyncio.TimerHandle | None = None
        self._stream: Stream[Any, Any] = channel.stream(find_rpc("Broker", "Connect"))
        self._tasks = Tasks(self._on_failure)
        self._tasks.spawn(self._read(), f"stream to {channel.endpoint}")

    # ------------------------------------------------------------------------------ owners
    def attach(self, owner: StreamOwner) -> int:
        """Attaches an owner, and returns its id on the stream, which no owner had before. The stream must not have
        ended."""
        assert not self.has_ended, "nothing is attached to a stream that is over"
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._last += 1
        self._owners[self._last] = owner
        if self._watch is None:
            self._watch_from(self._now())
        return self._last

    def detach(self, id_: int) -> None:
        """Detaches the owner of an id: frames for it are dropped from now on. Does nothing if there is none. The stream
        closes IDLE_STREAM_S seconds after the last owner is detached."""
        self._owners.pop(id_, None)
        if not self._owners and not self.has_ended and self._idle is None:
            self._idle = self._loop.call_later(IDLE_STREAM_S, run_logging_errors, self._close_idle, ignore_error)

    def _close_idle(self) -> None:
        self._idle = None
        if not self._owners:
            self.cancel()

    # ------------------------------------------------------------------------------ out
    def send(self, id_: int, frame: SentFrame) -> None:
        """Sends a frame of the producer or consumer with the id `id_`; never waits. If the stream has ended, drops the
        frame: the attached producers and consumers are notified of the end and reconnect."""
        if self._held or self._stream.queued_bytes > QUEUE_BY_ID_BYTES:
            self._hold(id_, frame)
        elif not self.has_ended:
            try:
                self._stream.send_nowait(frame)
            except ConnectionLost:
                return  # the reader finds the same

    def _hold(self, id_: int, frame: SentFrame) -> None:
        if not self.has_ended:
            self._held.setdefault(id_, deque()).append(frame)
            if not self._sending:
                self._sending = True
                self._tasks.spawn(self._send_held(), "frames that are held")

    async def _send_held(self) -> None:
        held = self._held
        try:
            while held:
                await self._stream.wait_drained(QUEUE_BY_ID_BYTES)
                while held and self._stream.queued_bytes <= QUEUE_BY_ID_BYTES:
                    id_ = next(iter(held))
                    frames = held.pop(id_)
                    self._stream.send_nowait(frames.popleft())
                    if frames:
                        held[id_] = frames  # its next turn comes after all others'
        except MagnetarError:  # the reader finds the same
            held.clear()
        finally:
            self._sending = False

    # ------------------------------------------------------------------------------ in
    async def _read(self) -> None:
        error: MagnetarError = ConnectionLost("the broker ended the stream")
        try:
            while True:
                frames = await self._stream.receive()
                begun = self.received_at = self._now()
                for at in range(0, len(frames), FRAMES_PER_SLICE):
                    if self._now() - begun > READ_TURN_S:
                        await asyncio.sleep(0)
                        begun = self._now()
                    self._deliver_frames(frames[at : at + FRAMES_PER_SLICE])
        except EndOfStream:
            pass
        except MagnetarError as broken:
            error = broken
        except asyncio.CancelledError:
            error = ConnectionLost("the client is closed")
            raise
        except GeneratorExit:  # the event loop is gone, and with it everything that would be told
            self.has_ended = True
            raise
        except Exception as failed:
            error = ConnectionLost(f"the stream's reader failed: {failed!r}")
            raise
        finally:
            self._close_with(error)

    def _deliver_frames(self, frames: Sequence[wire.ServerFrame]) -> None:
        by_id: dict[int, list[wire.ServerFrame]] = {}
        for frame in frames:
            id_ = frame.id
            if id_ in by_id:
                by_id[id_].append(frame)
            else:
                by_id[id_] = [frame]
        for id_, own in by_id.items():
            owner = self._owners.get(id_)
            if owner is not None:
                try:
                    owner.on_frames(own)
                except BaseException as error:
                    report_failure(owner.on_frames, owner.on_failure, error)

    # ------------------------------------------------------------------------------ silence
    def _watch_from(self, since: float) -> None:
        after_s = max(since + PING_AFTER_SILENCE_S - self._now(), 0.0)
        self._watch = self._loop.call_later(after_s, run_logging_errors, self._check_silence, ignore_error)

    def _check_silence(self) -> None:
        now = self._now()
        if not self._owners:
            self._watch = None  # the next owner begins anew
        elif now - self.received_at < PING_AFTER_SILENCE_S - TIMER_EARLY_MAX_S:
            self._watch_from(self.received_at)
        elif not self._silence.other_brokers(self._channel.endpoint):
            self._watch_from(now)
        else:
            self._tasks.spawn(self._ask(), f"silence of {self._channel.endpoint}")

    async def _ask(self) -> None:
        """Asks other brokers about the silent broker, until that one sends something or has no owner any more."""
        endpoint, since = self._channel.endpoint, self.received_at
        try:
            while self._owners and not await self._channel.is_answering(PING_TIMEOUT_S) and self.received_at == since:
                moved = await self._silence.find_moved_topics(endpoint, self._topics())
                if self.received_at == since:
                    self._leave(moved)
            if self._owners:
                self._silence.on_answered(endpoint)
        finally:
            if not self.has_ended:
                self._watch_from(self._now())

    def _topics(self) -> list[TopicName]:
        """Returns the topics of the stream's owners. Each call begins at another topic, so that all are asked about in
        time."""
        topics = list({owner.topic: None for owner in self._owners.values()})
        self._rounds += 1
        at = self._rounds * OWNER_LOOKUPS_AT_ONCE % len(topics) if topics else 0
        return topics[at:] + topics[:at]

    def _leave(self, moved: set[TopicName]) -> None:
        error = ConnectionLost(f"{self._channel.endpoint} says nothing, and another broker owns the topic")
        for id_, owner in [each for each in self._owners.items() if each[1].topic in moved]:
            if self._owners.get(id_) is owner:  # what one does may detach another
                self.send(id_, wire.ClientFrame(id=id_, close=CLOSE_REQUEST_ID))
                self.detach(id_)
                run_logging_errors(partial(owner.on_lost, error), owner.on_failure)

    # ------------------------------------------------------------------------------ the end
    def _on_failure(self, error: Exception) -> None:
        self._close_with(ConnectionLost(f"the stream failed: {error!r}"))

    def _close_with(self, error: MagnetarError) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self._on_end()
        self._held.clear()
        if self._idle is not None:
            self._idle.cancel()
        if self._watch is not None:
            self._watch.cancel()
        self._stream.cancel()
        owners, self._owners = self._owners, {}
        for owner in owners.values():
            run_logging_errors(partial(owner.on_lost, error), owner.on_failure)

    def cancel(self) -> None:
        """Ends the stream at once; all owners get `on_lost`. May be called again."""
        self._close_with(ConnectionLost("the stream was closed"))
        self._tasks.cancel()

    async def close(self) -> None:
        """Ends the stream as `cancel` does, and waits until its tasks have ended."""
        self.cancel()
        await self._tasks.close()
