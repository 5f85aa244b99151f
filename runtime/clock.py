"""Time and chance, the first two doors to the world.

Waiting is asyncio's (`asyncio.sleep`, `asyncio.timeout`, `loop.call_later`): under simulation the event loop itself
runs on virtual time, so that waiting code is the same in both worlds. Reading the time of day goes through `Clock`.
Cores get `now` and `rng` as arguments and never come here.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def wall_ms(self) -> int:
        """Milliseconds since the epoch; may jump. For records that people read, never for deadlines."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that only goes forward. Its origin says nothing: compare it with itself alone."""
        ...


class SystemClock:
    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)  # as it is: hot paths call it for each read of a stream
