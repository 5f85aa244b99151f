"""The timer of a driver: it calls when the time has come that the driver's core waits for.

    timer.arm(core.due)         an earlier time replaces a later one; a timer that fires too early finds nothing to do
    timer.stop()

The event loop rounds its timers and has a clock of its own: `reached` gets a time that is never before the one that it
was armed for, so that it is not armed for the same time again. Guard: tests/client/common/test_due_timer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from .guard import Broke, run


class DueTimer:
    """A timer of the event loop that calls at the time for which it is armed."""

    __slots__ = ("_broke", "_handle", "_loop", "_now", "_reached", "at")

    def __init__(self, now: Callable[[], float], reached: Callable[[float], None], broke: Broke) -> None:
        """Made in the event loop. `now`: a monotonic clock, in seconds, whose times `arm` and `reached` get."""
        self.at = inf  # when it fires; inf: never
        self._now = now
        self._reached = reached
        self._broke = broke
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, due: float | None) -> None:
        """Sets the time at which the timer fires. None: no time matters."""
        if due is None or due >= self.at:
            return
        self.stop()
        self.at = due
        self._handle = self._loop.call_later(max(0.0, due - self._now()), run, self._fire, self._broke)

    def _fire(self) -> None:
        at, self.at = self.at, inf
        self._reached(max(self._now(), at))

    def stop(self) -> None:
        self.at = inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
