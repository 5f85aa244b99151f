"""The pace keeps its mean whatever the batches, and lets nobody save up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.maintenance.repair_core import RATE_BURST_S, CopyRateLimit


@given(st.lists(st.integers(1, 5_000_000), min_size=1, max_size=50), st.integers(100_000, 50_000_000))
def test_who_waits_as_told_copies_at_the_rate_and_no_faster(sizes: list[int], rate: int) -> None:
    pace, now = CopyRateLimit(rate), 5.0
    for size in sizes:
        now += pace.reserve(now, size)
    assert sum(sizes) <= rate * (now - 5.0 + RATE_BURST_S) * (1 + 1e-9) + 1


def test_an_idle_hour_saves_nothing_up() -> None:
    pace = CopyRateLimit(1000)
    pace.reserve(0.0, 100)
    assert pace.reserve(3600.0, 100 + 500) == pytest.approx(0.5)


def test_no_limit_never_waits() -> None:
    assert CopyRateLimit(0).reserve(0.0, 1 << 40) == 0.0
