"""A timer at a moment of a clock.

The event loop's time and a `Clock` have different origins in the simulator, so a moment of the clock is no argument of
`loop.call_at`. An alarm converts it to seconds from now. Rounding may make the loop call `ring` slightly early: the
owner must compare the clock with its deadline, and set the alarm again, at least RESOLUTION_S later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from .clock import Clock

RESOLUTION_S = 0.001
"""The shortest wait, so that time passes before an alarm that rang early rings again."""


class AlarmTimer:
    """A timer that calls the function `ring` once, at the time `at` (seconds of the monotonic clock). `at` is infinity
    while the alarm is not set; it is not set any more when `ring` is called. Must be created inside a running event
    loop."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self.at = math.inf
        self._clock = clock
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def set_if_earlier(self, when: float) -> None:
        """Sets the alarm to the time `when`, unless it is set to an earlier time."""
        if when < self.at:
            self.cancel()
            self.at = when
            self._timer = self._loop.call_later(max(RESOLUTION_S, when - self._clock.monotonic()), self._rings)

    def cancel(self) -> None:
        """Cancels the alarm: `ring` is not called until the alarm is set again."""
        self.at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rings(self) -> None:
        self.cancel()
        self._ring()
