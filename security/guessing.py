"""Limits the guessing of passwords: after FAILURES_FREE failures of a key, each further one makes the next wait longer.

A key is an address or a user. The wait is 1 s at first and doubles to 60 s; a key without failures for FORGET_S is
forgotten. Pure: time comes in as `now_s`. The number of keys is bounded: the one that failed longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict

FAILURES_FREE = 5
WAIT_MAX_S = 60.0
FORGET_S = 600.0
KEYS_MAX = 10_000


class Guessing:
    """The failures by key."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, tuple[int, float]] = OrderedDict()  # key → number, when the last was

    def wait_s(self, key: str, now_s: float) -> float:
        """Seconds until the key may try again; 0: now."""
        count, last_s = self._failed.get(key, (0, now_s))
        if count < FAILURES_FREE or now_s - last_s >= FORGET_S:
            return 0.0
        wait_s = min(WAIT_MAX_S, 2.0 ** min(count - FAILURES_FREE, 10))
        return max(0.0, last_s + wait_s - now_s)

    def failed(self, key: str, now_s: float) -> None:
        count, last_s = self._failed.pop(key, (0, now_s))
        self._failed[key] = (1 if now_s - last_s >= FORGET_S else count + 1, now_s)
        if len(self._failed) > KEYS_MAX:
            self._failed.popitem(last=False)

    def succeeded(self, key: str) -> None:
        self._failed.pop(key, None)
