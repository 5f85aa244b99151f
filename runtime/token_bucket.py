"""Token buckets: how much of a rate is used up, and how long to wait. All rates use this core: those of a broker
(broker/common/token_bucket.py), of a repair worker (bookie/maintenance/repair_core.py) and of a program's handlers
(client/common/rate_limits.py).

Tokens derive from the time that passed: `rate` a second, at most `burst` saved up. There are two ways to use a bucket:

    bucket.spend_tokens(count, now)           never refuses: what was read is taken, and may be owed;
    bucket.delay_s(now)                       then this is the time until nothing is owed any more
    bucket.try_spend_tokens(count, now)       refuses what is not there: no token is owed;
    bucket.seconds_until_tokens(count, now)   then this is the time until `try_spend_tokens` succeeds

With a `burst` of one second's worth (the default) a bucket is that of PIP-322: tokens that were not used for a while
may be used at once. With a burst of 1 it is a leaky bucket, which spends tokens one by one at equal intervals. Guarding
test: tests/runtime/test_token_bucket.py.
"""

from __future__ import annotations

RESOLUTION_S = 0.016
"""Shortest wait in seconds for what is owed: many short ones cost more than they smooth (PIP-322)."""
ROUNDING = 1e-6
"""Part of a token that may be missing: times are binary fractions."""


class TokenBucket:
    """A token bucket that limits one rate, in tokens per second. `burst`: the most tokens that are saved up; None: as
    many as the rate gives in a second. A new bucket is full. `now` is always the caller's time in seconds, and must not
    go back."""

    __slots__ = ("_at", "_burst", "_tokens", "rate")

    def __init__(self, rate: float, now: float, burst: float | None = None) -> None:
        self.rate = rate
        self._burst = burst
        self._tokens = self.burst
        self._at = now

    @property
    def burst(self) -> float:
        """Returns the most tokens that are saved up."""
        return self.rate if self._burst is None else self._burst

    def _fill(self, now: float) -> None:
        passed = max(0.0, now - self._at)
        self._tokens = min(self.burst, self._tokens + passed * self.rate)
        self._at = now

    def set_rate(self, rate: float, now: float, burst: float | None = None) -> None:
        """Changes the rate (tokens per second) and the burst. A debt from the old rate remains, and is paid back at the
        new rate."""
        self._fill(now)
        self.rate, self._burst = rate, burst
        self._tokens = min(self._tokens, self.burst)

    def spend_tokens(self, count: float, now: float) -> None:
        """Removes `count` tokens from the bucket. The number of tokens may become negative, which is a debt."""
        self._fill(now)
        self._tokens -= count

    def available_tokens(self, now: float) -> float:
        """Returns the number of tokens that are available now; a negative number is a debt."""
        self._fill(now)
        return self._tokens

    def delay_s(self, now: float) -> float:
        """Returns the seconds until tokens are available again: at least RESOLUTION_S, or 0 if some are available now.
        """
        self._fill(now)
        return 0.0 if self._tokens > 0 else max(RESOLUTION_S, -self._tokens / self.rate)

    def try_spend_tokens(self, count: float, now: float) -> bool:
        """Removes `count` tokens and returns True if that many are available; else removes none and returns False. For
        more than `burst` tokens, `burst` tokens must be available, and the rest becomes a debt."""
        self._fill(now)
        if self._tokens < min(count, self.burst) - ROUNDING:
            return False
        self._tokens -= count
        return True

    def seconds_until_tokens(self, count: float, now: float) -> float:
        """Returns the seconds until `try_spend_tokens(count, …)` succeeds; 0 if it does now."""
        self._fill(now)
        missing = min(count, self.burst) - self._tokens
        return 0.0 if missing <= ROUNDING else missing / self.rate
