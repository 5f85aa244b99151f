"""Time, as a process reads it.

Waiting is asyncio's (`asyncio.sleep`, `asyncio.timeout`, `loop.call_later`): in a simulation the event loop itself runs
on virtual time, so that code waits in the same way in both. Reading the time goes through `Clock`.
Cores get `now` and `rng` as arguments and never import this module.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol


class Clock(Protocol):
    """The clocks of a process: the wall clock and a monotonic one. `SystemClock` and `ServerClock` are real, `SimClock`
    is simulated."""

    def wall_ms(self) -> int:
        """Returns the wall-clock time in milliseconds since the epoch. The clock may jump, so it is for times that are
        stored or compared with stored ones, such as the expiry of a message. For time-outs use `monotonic`."""
        ...

    def monotonic(self) -> float:
        """Returns the time in seconds of a clock that never goes back. The time may be compared only with other times
        of the same clock."""
        ...


class SystemClock:
    """The clocks of the operating system: the time of day, and CLOCK_MONOTONIC."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)  # as it is: hot paths call it for each read of a stream


_LOG = logging.getLogger("magnetar.clock")
CLOCK_JUMP_MIN_MS = 10_000
"""A smaller step of the time of day counts at once, as what a time daemon corrects."""
CLOCK_JUMP_CONFIRM_S = 300.0
"""Seconds that a jump must last before it counts."""


class ServerClock(SystemClock):
    """The clocks of a server, on which the expiry of messages depends. A jump of the time of day by CLOCK_JUMP_MIN_MS
    or more, ahead or back, counts only when it has lasted CLOCK_JUMP_CONFIRM_S: until then the time of day goes on by
    the monotonic clock. So a clock that is set wrong for a short time makes no message expire, and gives no message a
    wrong time. The time of day at the start of the process is taken as right."""

    def __init__(self) -> None:
        self._known = super().wall_ms(), time.monotonic()  # a time of day that counted, and when; threads read both
        self._jumped_s: float | None = None

    def wall_ms(self) -> int:
        now_ms = time.time_ns() // 1_000_000
        if 0 <= now_ms - self._known[0] < CLOCK_JUMP_MIN_MS // 2 and self._jumped_s is None:
            return now_ms  # a jump within that is a small one
        return self._compare(now_ms, time.monotonic())

    def _compare(self, now_ms: int, now_s: float) -> int:
        """Returns the time of day that counts: `now_ms`, or by the monotonic clock what it would be without a jump."""
        known_ms, known_s = self._known
        expected_ms = known_ms + int(1000 * (now_s - known_s))
        jump_ms = now_ms - expected_ms
        if -CLOCK_JUMP_MIN_MS < jump_ms < CLOCK_JUMP_MIN_MS:
            if self._jumped_s is not None:
                _LOG.warning("the time of day is right again: its jump did not count")
        elif self._jumped_s is None:
            self._jumped_s = now_s
            _LOG.warning(
                "the time of day jumped by %.0f s: that counts if it lasts %.0f s", jump_ms / 1000, CLOCK_JUMP_CONFIRM_S
            )
            return expected_ms
        elif now_s - self._jumped_s < CLOCK_JUMP_CONFIRM_S:
            return expected_ms
        else:
            _LOG.warning("the time of day jumped by %.0f s, and that counts now", jump_ms / 1000)
        self._jumped_s, self._known = None, (now_ms, now_s)
        return now_ms
