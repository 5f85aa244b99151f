"""Token buckets: debts are paid by waiting, and what is refused is not owed."""

from itertools import pairwise

import pytest

from magnetar.runtime.token_bucket import WAIT_S_MIN, TokenBucket


def test_l2_tokens_come_from_the_time_that_passed_and_may_be_owed() -> None:
    bucket = TokenBucket(100, now=0.0)
    bucket.spend_tokens(100, 0.0)
    assert bucket.delay_s(0.0) == WAIT_S_MIN, "empty: a moment"
    bucket.spend_tokens(250, 0.0)
    assert bucket.available_tokens(0.0) == -250
    assert bucket.delay_s(0.0) == 2.5
    assert bucket.delay_s(2.6) == 0.0
    assert bucket.available_tokens(1000.0) == 100, "a second's worth is saved up and no more"


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(10, now=5.0)
    bucket.spend_tokens(20, 5.0)
    assert bucket.available_tokens(4.0) == bucket.available_tokens(4.0) == -10


def test_what_is_not_there_is_refused_and_not_owed_until_the_time_that_was_told() -> None:
    bucket = TokenBucket(10, now=0.0, burst=3)
    assert [bucket.try_spend_tokens(1, 0.0) for _ in range(4)] == [True, True, True, False]
    wait_s = bucket.seconds_until_tokens(2, 0.0)
    assert wait_s == pytest.approx(0.2)
    assert not bucket.try_spend_tokens(2, 0.19)
    assert bucket.try_spend_tokens(2, wait_s)
    assert bucket.seconds_until_tokens(1, 100.0) == 0.0


@pytest.mark.parametrize("rate", [0.1, 3.0, 7.0, 1000.0])
def test_with_a_burst_of_one_they_are_spaced_evenly_whatever_was_saved_up(rate: float) -> None:
    bucket, now, taken = TokenBucket(rate, now=0.0, burst=1), 50.0, list[float]()
    while len(taken) < 50:
        if bucket.try_spend_tokens(1, now):
            taken.append(now)
        else:
            now += bucket.seconds_until_tokens(1, now)
    gaps = [later - earlier for earlier, later in pairwise(taken)]
    assert min(gaps) == pytest.approx(1 / rate, rel=1e-5)
    assert max(gaps) == pytest.approx(1 / rate, rel=1e-5)


def test_more_than_a_burst_needs_a_full_bucket_and_owes_the_rest() -> None:
    bucket = TokenBucket(10, now=0.0, burst=5)
    assert bucket.try_spend_tokens(25, 0.0)
    assert bucket.available_tokens(0.0) == -20
    assert not bucket.try_spend_tokens(1, 2.0)
    assert bucket.seconds_until_tokens(1, 2.0) == pytest.approx(0.1)


def test_a_rate_that_is_changed_counts_from_then_on() -> None:
    bucket = TokenBucket(10, now=0.0)
    assert bucket.try_spend_tokens(10, 0.0)
    bucket.set_rate(100, 0.0)
    assert bucket.available_tokens(0.5) == pytest.approx(50)
