"""Token buckets: how much of a rate is used up, and how long to wait. All rates use this core: those of a broker
(`RateLimit`, below), of a repair worker (bookie/maintenance/repair_core.py) and of a program's handlers
(client/common/rate_limits.py).

Tokens derive from the time that passed: `rate` a second, at most `burst` saved up. There are two ways to use a bucket:

    bucket.spend_tokens(count, now)           never refuses: what was read is taken, and may be owed;
    bucket.delay_s(now)                       then this is the time until nothing is owed any more
    bucket.try_spend_tokens(count, now)       refuses what is not there: no token is owed;
    bucket.seconds_until_tokens(count, now)   then this is the time until `try_spend_tokens` succeeds

With a `burst` of one second's worth (the default) a bucket is that of PIP-322: tokens that were not used for a while
may be used at once. With a burst of 1 it is a leaky bucket, which spends tokens one by one at equal intervals. Guarding
test: tests/runtime/test_token_bucket.py.

Also in this file, below its heading: rates of messages and bytes (rates).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

WAIT_S_MIN = 0.016
"""Shortest wait in seconds for what is owed: many short ones cost more than they smooth (PIP-322)."""
TOKEN_ROUNDING = 1e-6
"""Part of a token that may be missing: times are binary fractions."""


class TokenBucket:
    """A token bucket that limits one rate, in tokens per second. `burst`: the most tokens that are saved up; None: as
    many as the rate gives in a second. A new bucket is full. `now` is always the caller's time in seconds, and must not
    go back. `spent`: the tokens that `spend_tokens` has removed."""

    __slots__ = ("_at", "_burst", "_tokens", "rate", "spent")

    def __init__(self, rate: float, now: float, burst: float | None = None) -> None:
        self.rate = rate
        self._burst = burst
        self._tokens = self.burst
        self.spent = 0.0
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
        new rate. `burst`: as in the constructor; `now`: seconds."""
        self._fill(now)
        self.rate, self._burst = rate, burst
        self._tokens = min(self._tokens, self.burst)

    def spend_tokens(self, count: float, now: float) -> None:
        """Removes `count` tokens from the bucket. The number of tokens may become negative, which is a debt."""
        self._fill(now)
        self._tokens -= count
        self.spent += count

    def available_tokens(self, now: float) -> float:
        """Returns the number of tokens that are available now; a negative number is a debt."""
        self._fill(now)
        return self._tokens

    def delay_s(self, now: float) -> float:
        """Returns the seconds until tokens are available again: at least WAIT_S_MIN, or 0 if some are available now.
        """
        self._fill(now)
        return 0.0 if self._tokens > 0 else max(WAIT_S_MIN, -self._tokens / self.rate)

    def try_spend_tokens(self, count: float, now: float) -> bool:
        """Removes `count` tokens and returns True if that many are available; else removes none and returns False. For
        more than `burst` tokens, `burst` tokens must be available, and the rest becomes a debt."""
        self._fill(now)
        if self._tokens < min(count, self.burst) - TOKEN_ROUNDING:
            return False
        self._tokens -= count
        return True

    def seconds_until_tokens(self, count: float, now: float) -> float:
        """Returns the seconds until `try_spend_tokens(count, …)` succeeds; 0 if it does now."""
        self._fill(now)
        missing = min(count, self.burst) - self._tokens
        return 0.0 if missing <= TOKEN_ROUNDING else missing / self.rate


# ---------------------------------------------------------------------------------------------------------------- rates
# Rates of messages and bytes: how much of them is used up, and how long to wait (PIP-322; Pulsar L1, L2).
#
# A `RateLimit` is two token buckets, for messages and bytes; a rate of 0 has no limit and costs
# nothing. The number of tokens may become negative, which is a debt: entries that have arrived or were read are counted
# and never dropped. While there is a debt the caller stops what feeds it: it does not read a producer's stream, or does
# not ask for the next entries of a log. So a rate holds on the average over seconds, whatever the size of an entry, and
# an entry larger than a second's tokens is not stuck.
#
# Several `RateLimit`s (subscription, topic, broker) are asked together: `compute_rate_delay_s`,
# `count_entries_within_rates`.
# Guarding test: tests/runtime/test_rates.py.


_UNLIMITED: tuple[TokenBucket | None, TokenBucket | None] = (None, None)


class RateLimit:
    """Limits a rate in messages per second and in bytes per second; 0 means no limit. `limited`: at least one of the
    two limits is set. `throttled`: how often a caller had to wait for this rate."""

    __slots__ = ("_buckets", "limited", "throttled")

    def __init__(self, messages: float = 0, size: float = 0, now: float = 0.0) -> None:
        self._buckets: tuple[TokenBucket | None, TokenBucket | None] = _UNLIMITED
        self.limited = False
        self.throttled = 0  # how often a caller had to wait
        if messages > 0 or size > 0:
            self.set_rate(messages, size, now)

    def set_rate(self, messages: float, size: float, now: float) -> None:
        """Sets the limits: messages per second and bytes per second; 0 means no limit. `now`: the monotonic time in
        seconds. A debt from the old limit remains, unless that limit is removed."""
        if messages <= 0 and size <= 0:
            self._buckets, self.limited = _UNLIMITED, False
            return
        buckets = (_changed(self._buckets[0], messages, now), _changed(self._buckets[1], size, now))
        self._buckets, self.limited = buckets, True

    def spend_tokens(self, messages: int, size: int, now: float) -> None:
        """Counts `messages` messages, of `size` bytes together, against both limits. Never refuses: the number of
        tokens may become negative, and this debt delays what follows."""
        for bucket, count in zip(self._buckets, (messages, size), strict=True):
            if bucket is not None:
                bucket.spend_tokens(count, now)

    def delay_s(self, now: float) -> float:
        """Returns the seconds until both limits allow at least one more message; 0 if both allow one now."""
        return max((bucket.delay_s(now) for bucket in self._buckets if bucket is not None), default=0.0)

    def count_spent(self) -> tuple[float, float]:
        """Returns (messages, bytes) that were counted since there is a limit for them; 0 if there is none."""
        messages, size = (0.0 if bucket is None else bucket.spent for bucket in self._buckets)
        return messages, size

    def available_tokens(self, now: float) -> tuple[float, float]:
        """Returns (the number of messages, the number of bytes) for which there are tokens now. A number is infinite if
        there is no such limit, and negative if there is a debt."""
        messages, size = (float("inf") if bucket is None else bucket.available_tokens(now) for bucket in self._buckets)
        return messages, size


def _changed(bucket: TokenBucket | None, rate: float, now: float) -> TokenBucket | None:
    if rate <= 0:
        return None
    if bucket is None:
        return TokenBucket(rate, now)
    if bucket.rate != rate:
        bucket.set_rate(rate, now)
    return bucket


class RateLimitedItem(Protocol):
    """An item that counts against rate limits: `count` messages with `size` bytes together."""

    @property
    def count(self) -> int:
        """The number of messages in the item."""
        ...

    @property
    def size(self) -> int:
        """The bytes of the item."""
        ...


def compute_rate_delay_s(rates: Iterable[RateLimit], now: float) -> float:
    """Returns the seconds until all of the rates allow at least one more message; 0 if they allow one now. Increments
    the counter `throttled` of each rate that does not allow one now."""
    longest = 0.0
    for rate in rates:
        wait = rate.delay_s(now) if rate.limited else 0.0
        if wait > 0:
            rate.throttled += 1
            longest = max(longest, wait)
    return longest


def count_entries_within_rates(rates: Iterable[RateLimit], entries: Sequence[RateLimitedItem], now: float) -> int:
    """Returns how many of `entries`, from the first on, all of the rates allow now. An entry is allowed if every limit
    has tokens left after the entries before it; so the last allowed entry may leave a debt. Spends no tokens."""
    limited = [rate for rate in rates if rate.limited]
    if not limited:
        return len(entries)
    lefts = [rate.available_tokens(now) for rate in limited]
    messages, size = min(left[0] for left in lefts), min(left[1] for left in lefts)
    for number, entry in enumerate(entries):
        if messages <= 0 or size <= 0:
            return number
        messages -= entry.count
        size -= entry.size
    return len(entries)
