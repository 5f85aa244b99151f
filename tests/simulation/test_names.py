"""Names that come back under faults: seeds pass, those with deletions that are late, too."""

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.load import names
from tests.simulation.options import draw
from tests.simulation.run import Outcome, run_seed


def anew(seed: int, **changes: Any) -> Outcome:
    drawn = draw(seed)
    return run_seed(seed, change=lambda _: replace(drawn, **{"times": {**drawn.times, "anew": 4}, **changes}))


def test_nothing_of_a_former_life_is_in_a_later_one_and_the_last_one_loses_nothing() -> None:
    first, second = anew(2), anew(2)
    assert first.failures == []
    assert first.figures["lives"] > 1
    assert first.figures["lived"] > 5
    assert (first.trace_hash, first.figures) == (second.trace_hash, second.figures)


@pytest.mark.parametrize("seed", [1, 101, 12])
def test_a_deletion_that_is_late_takes_nothing_of_a_later_life(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 1 and 101 a topic, in 12 a subscription is made anew at another broker before the first one goes on."""
    monkeypatch.setattr(names, "LATE", 1.0)
    alone: dict[str, Any] = {"times": {"anew": 4}, "rates": {}, "secured": False, "inside": False}
    outcome = anew(seed, kind="take-over", seconds=40.0, transactions=False, **alone)
    assert outcome.failures == []
    assert outcome.figures["late"] > 0, "a deletion was late"
