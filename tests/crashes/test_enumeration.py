"""Crash-point enumeration in the time that a test run has. `python -m tests.crashes` does the same with more states.

By hand: `python -m tests.crashes --states 50000` before a change of the store, `--states 1000000` before a release.
"""

from __future__ import annotations

import pytest

from tests.crashes import run
from tests.crashes.cases import CASES
from tests.crashes.limits import SMALL, places
from tests.crashes.mutants import MUTANTS, killed
from tests.crashes.sites import function_of

STATES = 6_000


def test_a_crash_anywhere_loses_nothing_and_every_sync_is_needed() -> None:
    result = run.everything(STATES, seed=0, jobs=2)
    assert [f"{failure.state}: {failure.reason}" for failure in result.failures] == []
    assert result.states >= STATES
    assert [found.site for found in result.controls if found.failure is None] == []
    assert len(result.controls) > 30
    assert result.unreached == []


@pytest.mark.parametrize("case", CASES)
def test_a_crash_beside_damage_and_before_the_first_entry_keeps_what_was_said(case: str) -> None:
    looked = run.case(case)
    assert [f"{failure.state}: {failure.reason}" for failure in looked.failures] == []
    assert {function_of(found.site) for found in looked.controls if found.failure} == set(CASES[case].functions)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_defect_of_order_is_found(mutant: str) -> None:
    assert killed(mutant) is not None


def test_every_small_limit_is_a_constant_of_the_store() -> None:
    assert {name for _, name, _ in places()} == set(SMALL)
