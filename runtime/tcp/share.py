"""The share of the event loop that all unauthenticated connections of a port (strangers) have together, with the
connections that send too many frames that carry nothing.

    share.spend_frames(frames)              counts work of such a connection (`FrameAllowance.charge_frames`)
    share.is_share_used_up                  True: the received bytes of unauthenticated connections must wait
    share.queue_connection_turn(go_on, …)   calls `go_on` when the share is not used up; `wait_turn` waits for that

Connections that have used little come first, and of these the newest one: it is a caller that has just connected, while
the oldest are closed first to make room (runtime/tcp/listening.py). All other connections follow in the order of their
arrival.

Each connection has an allowance of its own (`STRANGER_ALLOWANCE`), and a slice of time per turn. A thousand such
connections could still use the whole event loop. So all of them together have SHARE_RATE: a twelfth of the loop,
however many they are. Connections of authenticated callers that send frames with content use nothing of this share, and
never wait. Guarding tests: tests/runtime/tcp/test_share.py. """

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

SHARE_RATE = 50_000.0
"""Frames that carry nothing a second, of 1.5 µs each."""
SAVED_FRAMES_MAX = 2_000.0
"""Most frames that may be saved: 3 ms."""
SHARE_WAIT_MIN_S = 0.002
PRUNE_TURNS_MIN = 256


class QueuedTurn:
    """The place of one connection in the queue of an UnauthenticatedLoopShare, until its function was called."""

    __slots__ = ("go_on",)

    def __init__(self, go_on: Callable[[], None]) -> None:
        self.go_on: Callable[[], None] | None = go_on

    def cancel(self) -> None:
        """Removes the connection from the queue: its function is not called any more."""
        self.go_on = None


class UnauthenticatedLoopShare:
    """Limits the share of the event loop's time that all unauthenticated connections of one port may use together.
    `spent`: the frames that were used since the start."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._left = SAVED_FRAMES_MAX
        self._since = self._loop.time()
        self._light: list[QueuedTurn] = []  # the latest goes first
        self._heavy: deque[QueuedTurn] = deque()
        self._tidy_above = PRUNE_TURNS_MIN  # so many wait, with those that are over
        self._timer: asyncio.TimerHandle | None = None
        self.spent = 0  # in all

    def spend_frames(self, frames: int) -> None:
        """Counts work that costs as much as `frames` frames without content. Never refuses: the share may be overdrawn.
        """
        self._left -= frames
        self.spent += frames

    @property
    def is_share_used_up(self) -> bool:
        """Returns whether unauthenticated connections must wait now."""
        return self._left <= 0 and self._refilled() <= 0

    def _refilled(self) -> float:
        now = self._loop.time()
        self._left = min(self._left + (now - self._since) * SHARE_RATE, SAVED_FRAMES_MAX)
        self._since = now
        return self._left

    def queue_connection_turn(self, go_on: Callable[[], None], *, is_light: bool) -> QueuedTurn:
        """Queues a call of `go_on`, and returns its place in the queue. `go_on` is called once, when the share is not
        used up, but not before SHARE_WAIT_MIN_S seconds. `is_light`: the connection has used little time, and comes
        before connections that have used more."""
        turn = QueuedTurn(go_on)
        (self._light if is_light else self._heavy).append(turn)
        self._look_later()
        return turn

    def _look_later(self) -> None:
        if self._timer is None and (self._light or self._heavy):
            self._timer = self._loop.call_later(SHARE_WAIT_MIN_S, self._give_turns)

    def _give_turns(self) -> None:
        """Calls queued functions, each at most once, as long as the share lasts. Each call spends its part before the
        next one.
        """
        self._timer = None
        left = self._refilled()
        if len(self._light) + len(self._heavy) > self._tidy_above:
            self._light = [each for each in self._light if each.go_on is not None]
            self._heavy = deque(each for each in self._heavy if each.go_on is not None)
            self._tidy_above = 2 * (len(self._light) + len(self._heavy)) + PRUNE_TURNS_MIN
        light, self._light = self._light, []
        while light and left > 0:
            left = self._run_turn(light.pop())
        self._light = light + self._light
        for _ in range(len(self._heavy)):
            if left <= 0:
                break
            left = self._run_turn(self._heavy.popleft())
        self._look_later()

    async def wait_turn(self, frames: int, *, is_light: bool) -> None:
        """Waits until the share is not used up, and then counts `frames` as used. Returns at once if it is not used up.
        `is_light`: as in `queue_connection_turn`."""
        if not self.is_share_used_up:
            self.spend_frames(frames)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go_on() -> None:
            self.spend_frames(frames)
            waiter.set_result(None)

        turn = self.queue_connection_turn(go_on, is_light=is_light)
        try:
            await waiter
        finally:
            turn.cancel()

    def _run_turn(self, turn: QueuedTurn) -> float:
        if turn.go_on is not None:
            turn.go_on()
        return self._left

    def close(self) -> None:
        """Drops all queued calls: their functions are not called. A `wait_turn` that waits then ends only when it is
        cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        self._light.clear()
        self._heavy.clear()
