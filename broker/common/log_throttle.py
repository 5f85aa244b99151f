"""Rate-limits the log lines of a loop that retries: a line when the reason changes, and the same one after a while."""

from __future__ import annotations

from ...runtime.clock import Clock

AGAIN_S = 10.0
"""Seconds after which an unchanged reason is logged again."""


class LogThrottle:
    """Remembers what one loop logged last. `news` is asked before each line."""

    __slots__ = ("_at", "_clock", "_reason")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reason: type[Exception] | None = None
        self._at = 0.0

    def news(self, error: Exception) -> bool:
        """Whether this error is worth a line: of another class than the last, or AGAIN_S later."""
        now = self._clock.monotonic()
        if type(error) is self._reason and now - self._at < AGAIN_S:
            return False
        self._reason, self._at = type(error), now
        return True
