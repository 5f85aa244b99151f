"""Names that come back under faults: seeds pass (a late deletion: tests/broker/node/test_late_deletion.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.options import draw
from tests.simulation.run import Outcome, run_seed


def anew(seed: int, *, calm: bool = False) -> Outcome:
    drawn = draw(seed)
    return run_seed(seed, change=lambda _: replace(
        drawn, times={**({} if calm else drawn.times), "anew": 4}, rates={} if calm else drawn.rates
    ))  # fmt: skip


@pytest.mark.parametrize(("seed", "calm"), [(1, True), (2, False)])
def test_nothing_of_a_former_life_is_in_a_later_one_and_the_last_one_loses_nothing(seed: int, calm: bool) -> None:
    first, second = anew(seed, calm=calm), anew(seed, calm=calm)
    assert first.failures == []
    assert first.figures["lives"] > 1
    assert first.figures["lived"] > 5
    assert (first.trace_hash, first.figures) == (second.trace_hash, second.figures)

