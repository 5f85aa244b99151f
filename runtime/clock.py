"""Time, as a process reads it.

Waiting is asyncio's (`asyncio.sleep`, `asyncio.timeout`, `loop.call_later`): in a simulation the event loop itself runs
on virtual time, so that code waits in the same way in both. Reading the time goes through `Clock`.
Cores get `now` and `rng` as arguments and never import this module.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The clocks of a process: the wall clock and a monotonic one."""

    def wall_ms(self) -> int:
        """Returns the wall-clock time in milliseconds since the epoch. The clock may jump, so it is for records that
        people read, never for deadlines."""
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
