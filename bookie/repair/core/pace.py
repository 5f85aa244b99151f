"""How fast a worker may copy: a bucket of bytes that fills with the time. Pure.

`take` charges what was read and says how long to wait before more is read. The bucket holds at most `BURST_S` of the
rate and may go below zero, so a batch is never split and the mean is kept.
Guards: tests/bookie/repair/test_pace.py.
"""

from __future__ import annotations

BURST_S = 0.1


class Pace:
    """The rate at which a worker copies: a bucket of bytes that fills with time."""

    def __init__(self, bytes_per_s: int) -> None:
        """Sets the limit; 0: none."""
        self.bytes_per_s = bytes_per_s
        self._tokens = bytes_per_s * BURST_S
        self._at = 0.0

    def take(self, now: float, size: int) -> float:
        """Seconds to wait."""
        if not self.bytes_per_s:
            return 0.0
        elapsed = max(0.0, now - self._at)
        self._at = now
        self._tokens = min(self._tokens + elapsed * self.bytes_per_s, self.bytes_per_s * BURST_S) - size
        return max(0.0, -self._tokens / self.bytes_per_s)
