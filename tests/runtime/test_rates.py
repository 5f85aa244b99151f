"""Token buckets: the rate holds on the average, whatever is taken at once, and debts are paid by waiting."""

import random
from typing import NamedTuple

import pytest

from magnetar.runtime.token_bucket import RateLimit, compute_rate_delay_s, count_entries_within_rates


class Entry(NamedTuple):
    count: int
    size: int


@pytest.mark.parametrize("seed", range(5))
def test_l1_whoever_waits_as_told_gets_the_rate_on_the_average(seed: int) -> None:
    rng, now, taken = random.Random(seed), 0.0, 0
    rate = RateLimit(messages=1000, size=0, now=now)
    while now < 60:
        wait = rate.delay_s(now)
        if wait:
            now += wait
            continue
        count = rng.choice([1, 10, 5000])
        rate.spend_tokens(count, 10**9, now)
        taken += count
    assert 0.9 * 60_000 <= taken <= 61_000 + 5000


def test_messages_and_bytes_are_limits_of_their_own() -> None:
    rate = RateLimit(messages=10, size=1000, now=0.0)
    rate.spend_tokens(1, 3000, 0.0)
    assert rate.delay_s(0.0) == 2.0
    assert rate.delay_s(2.1) == 0.0
    rate.spend_tokens(30, 1, 2.1)
    assert rate.delay_s(2.1) == 2.0


def test_without_a_rate_there_is_no_limit() -> None:
    rate = RateLimit()
    rate.spend_tokens(10**9, 10**12, 0.0)
    assert (rate.limited, rate.delay_s(0.0)) == (False, 0.0)
    assert count_entries_within_rates([rate], [Entry(5, 5)] * 7, 0.0) == 7


def test_a_rate_that_is_changed_keeps_the_debt() -> None:
    rate = RateLimit(messages=10, now=0.0)
    rate.spend_tokens(110, 0, 0.0)
    rate.set_rate(1000, 0, 0.0)
    assert rate.delay_s(0.0) == pytest.approx(0.1)
    rate.set_rate(0, 0, 0.0)
    assert rate.delay_s(0.0) == 0.0


def test_of_several_rates_the_slowest_counts_and_says_so() -> None:
    fast, slow = RateLimit(messages=1000, now=0.0), RateLimit(messages=10, now=0.0)
    for rate in (fast, slow):
        rate.spend_tokens(20, 0, 0.0)
    assert compute_rate_delay_s([fast, slow], 0.0) == 1.0
    assert (fast.throttled, slow.throttled) == (0, 1)


def test_so_many_entries_go_as_tokens_cover_and_one_that_leaves_a_debt() -> None:
    rate = RateLimit(messages=10, now=0.0)
    assert count_entries_within_rates([rate], [Entry(4, 1)] * 9, 0.0) == 3
    assert count_entries_within_rates(
        [rate], [Entry(500, 1), Entry(1, 1)], 0.0
    ) == 1, "an entry above the rate is not stuck"
    rate.spend_tokens(10, 0, 0.0)
    assert count_entries_within_rates([rate], [Entry(1, 1)], 0.0) == 0
