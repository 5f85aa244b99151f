"""A timer at a moment of a clock.

The event loop's time and a `Clock` have different origins in the simulator, so a moment of the clock is no argument of
`loop.call_at`. An alarm turns it into seconds from now. The loop may ring by its own rounding a little early: the
owner compares the clock with its deadline, and sets the alarm again, at least RESOLUTION_S later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from .clock import Clock

RESOLUTION_S = 0.001
"""The least wait: an alarm that rings early and is set again lets the time pass."""


class Alarm:
    """Calls `ring` once, at `at` (seconds of `clock`; infinity: it is not set). Made inside a running loop."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self.at = math.inf
        self._clock = clock
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def set_by(self, when: float) -> None:
        """Rings at `when` at the latest: an alarm that is set for an earlier moment stays."""
        if when < self.at:
            self.cancel()
            self.at = when
            self._timer = self._loop.call_later(max(RESOLUTION_S, when - self._clock.monotonic()), self._rings)

    def cancel(self) -> None:
        """Until it is set again it does not ring."""
        self.at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rings(self) -> None:
        self.cancel()
        self._ring()
