"""A timer at a moment of a clock.

The event loop's time and a `Clock` have different origins in the simulator, so a moment of the clock is no argument of
`loop.call_at`. An alarm converts it to seconds from now. Rounding may make the loop call `ring` slightly early: the
owner must compare the clock with its deadline, and set the alarm again, at least ALARM_RESOLUTION_S later.

Also in this file, below its heading: slices of the event loop, for long work (turns).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from .clock import Clock

ALARM_RESOLUTION_S = 0.001
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
        """Sets the alarm to the time `when` (seconds of the monotonic clock), unless it is set to an earlier time. It
        rings ALARM_RESOLUTION_S from now at the earliest."""
        if when < self.at:
            self.cancel()
            self.at = when
            self._timer = self._loop.call_later(max(ALARM_RESOLUTION_S, when - self._clock.monotonic()), self._rings)

    def cancel(self) -> None:
        """Cancels the alarm: `ring` is not called until the alarm is set again."""
        self.at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rings(self) -> None:
        self.cancel()
        self._ring()


# --------------------------------------------------------------------------------------------------------- turns
# Shares the event loop: long work for one request runs in slices, and other tasks have their turn in between.
#
#     turns = EventLoopSlices(clock)
#     for each in many:
#         do(each)
#         if turns.is_slice_used_up:
#             await turns.begin_slice()
#
# A slice lasts LOOP_SLICE_S and one step more, so a step must be short: what is linear in a request's bytes is cut into
# entries, what is not is refused before (broker/grpc/translate.py). In a simulation a slice never ends: no
# time passes within one step of it. Guarding test: tests/broker/grpc/test_extreme_requests.py.


LOOP_SLICE_S = 0.002
"""Seconds of a slice, so that the loop is held for less than 5 ms: a slice, and what the turn does before and after it.
"""


class EventLoopSlices:
    """Divides a long computation into time slices, so that other tasks of the event loop run between two slices. `end`:
    the time at which the present slice ends, in seconds of the monotonic clock."""

    __slots__ = ("_clock", "end")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.end = clock.monotonic() + LOOP_SLICE_S

    @property
    def is_slice_used_up(self) -> bool:
        """Returns True if the current time slice is used up. The caller should then await `begin_slice`."""
        return self._clock.monotonic() > self.end

    async def begin_slice(self) -> None:
        """Lets other tasks of the event loop run, and then begins the next time slice, of LOOP_SLICE_S seconds."""
        await asyncio.sleep(0)
        self.end = self._clock.monotonic() + LOOP_SLICE_S
