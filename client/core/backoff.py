"""Back-off between attempts: from `first_s` to `last_s`, each a quarter longer, less up to a tenth by chance.

The limits are Pulsar's for reconnecting (100 ms → 60 s). It doubles there, so that a client that comes back after t
seconds is found after up to 2 t; here after about 1.25 t, for 29 attempts on the way to 60 s instead of 10. `reset`
after a success.
"""

from __future__ import annotations

from typing import Protocol

GROWTH = 1.25


class Chance(Protocol):
    """`random.Random`, or what behaves like it."""

    def random(self) -> float: ...
    def randrange(self, start: int, /) -> int: ...


class Backoff:
    """The pauses between attempts: each is longer than the one before."""

    def __init__(self, rng: Chance, first_s: float = 0.1, last_s: float = 60.0) -> None:
        assert 0 < first_s <= last_s, "a back-off grows"
        self._rng = rng
        self._first_s = first_s
        self._last_s = last_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Returns how long to wait before the next attempt."""
        delay = self._next_s
        self._next_s = min(delay * GROWTH, self._last_s)
        return delay * (1 - self._rng.random() / 10)

    def reset(self) -> None:
        self._next_s = self._first_s

    def check(self) -> None:
        assert self._first_s <= self._next_s <= self._last_s
