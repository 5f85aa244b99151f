"""Rates of messages and bytes: how much of them is used up, and how long to wait (PIP-322; Pulsar L1, L2).

A `RateLimit` is two token buckets (runtime/token_bucket.py), for messages and bytes; a rate of 0 has no limit and costs
nothing. The number of tokens may become negative, which is a debt: entries that have arrived or were read are counted
and never dropped. While there is a debt the caller stops what feeds it: it does not read a producer's stream, or does
not ask for the next entries of a log. So a rate holds on the average over seconds, whatever the size of an entry, and
an entry larger than a second's tokens is not stuck.

Several `RateLimit`s (subscription, topic, broker) are asked together: `compute_rate_delay_s`,
`count_entries_within_rates`.
Guarding test: test_token_bucket.py.

Also in this file, below its heading: slices of the event loop, for long work (turns).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from ...runtime.clock import Clock
from ...runtime.token_bucket import TokenBucket

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


# --------------------------------------------------------------------------------------------------------- turns
# Shares the event loop: long work for one request runs in slices, and other tasks have their turn in between.
#
#     turns = EventLoopSlices(clock)
#     for each in many:
#         do(each)
#         if turns.is_slice_used_up:
#             await turns.begin_slice()
#
# A slice lasts SLICE_S and one step more, so a step must be short: what is linear in a request's bytes is cut into
# entries, what is not is refused before (broker/grpc/translate.py). In a simulation a slice never ends: no
# time passes within one step of it. Guarding test: tests/broker/grpc/test_extreme_requests.py.


SLICE_S = 0.002
"""Seconds of a slice, so that the loop is held for less than 5 ms: a slice, and what the turn does before and after it.
"""


class EventLoopSlices:
    """Divides a long computation into time slices, so that other tasks of the event loop run between two slices."""

    __slots__ = ("_clock", "end")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.end = clock.monotonic() + SLICE_S

    @property
    def is_slice_used_up(self) -> bool:
        """Returns True if the current time slice is used up. The caller should then await `begin_slice`."""
        return self._clock.monotonic() > self.end

    async def begin_slice(self) -> None:
        """Lets other tasks of the event loop run, and then begins the next time slice, of SLICE_S seconds."""
        await asyncio.sleep(0)
        self.end = self._clock.monotonic() + SLICE_S
