"""Crash-point enumeration in the time that a test run has. `python -m tests.crashes` does the same with more states.

By hand: `python -m tests.crashes --states 50000` before a change of the store, `--states 1000000` before a release.
"""

from __future__ import annotations

from tests.crashes import run

STATES = 12_000


def test_a_crash_anywhere_loses_nothing() -> None:
    result = run.everything(STATES, seed=0, jobs=2, controls=False)
    assert [f"{failure.state}: {failure.reason}" for failure in result.failures] == []
    assert result.states >= STATES
