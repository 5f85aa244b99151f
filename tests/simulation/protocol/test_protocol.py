"""The fast tier: it passes on what is right, is the same each time, meets what it says, and finds each broken rule."""

from collections import Counter
from dataclasses import fields, replace
from types import MappingProxyType

import pytest

from tests.simulation.protocol.bookie import Rules
from tests.simulation.protocol.options import LOSSES, RATES, TIMES, draw
from tests.simulation.protocol.run import Verdict, run_protocol
from tests.simulation.protocol.shrink import shrink

SEEDS = range(1, 601)


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    return [run_protocol(seed) for seed in SEEDS]


def test_sound_seeds_keep_every_promise(verdicts: list[Verdict]) -> None:
    assert {verdict.seed: verdict.failures for verdict in verdicts if verdict.failures} == {}


def test_seeds_confirm_recover_and_change_ensembles(verdicts: list[Verdict]) -> None:
    figures: Counter[str] = Counter()
    for verdict in verdicts:
        figures.update(verdict.figures)
    assert figures["confirmed"] > 5 * len(SEEDS)
    assert figures["recovered"] > len(SEEDS) / 2
    assert figures["changes"] > len(SEEDS) / 4


def test_every_kind_of_fault_happens(verdicts: list[Verdict]) -> None:
    struck = Counter(kind for verdict in verdicts for _, kind, _ in verdict.struck.values())
    assert set(struck) == {*RATES, *TIMES}


def test_one_seed_in_ten_has_no_faults_and_few_are_beyond_promise() -> None:
    drawn = [draw(seed) for seed in range(1, 2001)]
    calm = sum(not options.rates and not options.times for options in drawn)
    assert 150 <= calm <= 300
    assert 40 <= sum(options.beyond for options in drawn) <= 120
    assert all(options.losing == options.shape[2] - 1 for options in drawn if not options.beyond)


def test_a_seed_is_the_same_each_time() -> None:
    def play(seed: int) -> tuple[object, ...]:
        verdict = run_protocol(seed)
        return verdict.trace_hash, verdict.steps, verdict.virtual_seconds, verdict.figures

    assert [play(seed) for seed in range(1, 40)] == [play(seed) for seed in range(1, 40)]


def first_failure(rules: Rules, **times: int) -> Verdict | None:
    """`times`: what happens so often in every seed."""
    for seed in range(1, 2001):
        drawn = draw(seed)
        verdict = run_protocol(seed, options=replace(drawn, times={**drawn.times, **times}), rules=rules)
        if verdict.failures:
            return verdict
    return None


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_each_rule_of_the_service_is_needed(rule: str) -> None:
    """Broken in the model of the bookie, each costs something that the judge sees: so the model says no more than is
    needed. The same defects in the real bookie are hunted in tests/mutants."""
    often = {"tombstones_stay": {"delete": 3, "pause": 3, "recover": 3}, "damage_is_unknown": {"damage": 3}}
    assert first_failure(replace(Rules(), **{rule: False}), **often.get(rule, {})) is not None


def test_a_failure_shrinks_to_less_that_still_fails_and_is_the_same_each_time() -> None:
    rules = Rules(damage_is_unknown=False, misses_after_a_loss_are_unknown=False)
    failed = first_failure(rules)
    assert failed is not None
    shrunk, again = shrink(failed.seed, rules), shrink(failed.seed, rules)
    assert shrunk is not None
    assert again is not None
    assert shrunk.lines() == again.lines()
    assert shrunk.verdict.failures
    assert len(shrunk.only) < len(failed.struck)
    replayed = run_protocol(failed.seed, options=shrunk.options, only=shrunk.only, rules=rules)
    assert replayed.failures == shrunk.verdict.failures


def test_what_is_sound_does_not_shrink() -> None:
    assert shrink(1) is None


def test_the_story_is_told_in_lines_that_begin_with_the_time() -> None:
    told: list[str] = []
    run_protocol(3, show=told.append)
    assert len(told) > 5
    assert all(line[:10].strip().replace(".", "").isdigit() for line in told)


def test_beyond_promise_a_loss_is_reported_and_nothing_false_is_read() -> None:
    lost = 0
    for seed in range(1, 401):
        drawn = draw(seed)
        times = MappingProxyType({**drawn.times, **dict.fromkeys(LOSSES, 3)})
        verdict = run_protocol(seed, options=replace(drawn, times=times, losing=7, beyond=True))
        assert verdict.failures == []
        lost += verdict.figures["unreadable"] > 0
    assert lost > 10
