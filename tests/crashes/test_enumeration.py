"""Crash-point enumeration in the time that a test run has. `python -m tests.crashes` does the same with more states.

By hand: `python -m tests.crashes --states 50000` before a change of the store, `--states 1000000` before a release.
"""

import pytest

from tests.crashes import run, stops
from tests.crashes.cases import CASES
from tests.crashes.limits import SMALL, places
from tests.crashes.mutants import MUTANTS, killed
from tests.crashes.sites import function_of
from tests.crashes.workload import record

STATES = 700
STOPS = 5


def test_a_crash_anywhere_loses_nothing_and_every_sync_is_needed() -> None:
    result = run.everything(STATES, seed=0, jobs=2)
    assert [f"{failure.state}: {failure.reason}" for failure in result.failures] == []
    assert result.states >= STATES
    assert [found.site for found in result.controls if found.failure is None] == []
    assert len(result.controls) > 30
    assert result.unreached == []
    fell = {function_of(found.site) for found in result.controls}
    assert not [name for name, case in CASES.items() if not fell.issuperset(case.functions)]


@pytest.mark.parametrize("kind", stops.KINDS)
def test_a_stop_over_running_work_loses_nothing_wherever_it_is_cancelled(kind: str) -> None:
    number = list(stops.KINDS).index(kind)
    part = run.some_stops(range(number, number + STOPS * len(stops.KINDS), len(stops.KINDS)))
    assert [f"{failure.state}: {failure.reason}" for failure in part.failures] == []
    assert part.states > 10 * STOPS


def test_a_disk_that_fills_while_the_bookie_starts_again_loses_nothing() -> None:
    part = run.some_stops([2895])  # its start is cancelled; the next one finds the disk full, and the third has room
    assert [f"{failure.state}: {failure.reason}" for failure in part.failures] == []
    assert part.states > 0


def test_stops_go_over_every_operation_of_their_work() -> None:
    places = stops.places_of("checkpoint", 0)
    assert sorted(places) == list(range(1, len(places) + 1))
    cancelled = [stops.nth_of("checkpoint", turn) for turn in range(stops.LIVES * len(places))]
    assert sorted(stop.place for stop in cancelled if stop.seed == 0) == sorted(places)


def test_in_every_workload_a_flush_ends_beside_a_move() -> None:
    assert all(record(seed).beside for seed in range(8))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_defect_of_order_is_found(mutant: str) -> None:
    assert killed(mutant) is not None


def test_every_small_limit_is_a_constant_of_the_store() -> None:
    assert {name for _, name, _ in places()} == set(SMALL)
