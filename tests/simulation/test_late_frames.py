"""A topic that is unloaded again and again: what a broker says of ids that are gone breaks no client."""

from dataclasses import replace

import pytest

from tests.simulation.options import Options
from tests.simulation.run import run_seed


@pytest.mark.parametrize("seed", [2, 6, 10])
def test_ids_that_are_closed_twice_and_late_break_no_client(seed: int) -> None:
    def unloaded(options: Options) -> Options:
        return replace(options, times={"unload": 40}, rates={}, secured=False, transactions=False, inside=False)

    outcome = run_seed(seed, change=unloaded)
    assert not outcome.failures
