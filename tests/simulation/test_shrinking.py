"""A failing seed of the whole cluster is shrunk to what it needs, in the same way each time."""

from dataclasses import replace

from tests.simulation.options import Options, draw
from tests.simulation.run import Outcome
from tests.simulation.shrink import shrink

START = replace(
    draw(1), producers=2, subscriptions=2, messages=8, rates={"drop": 0.1}, times={"cut": 3, "kill-bookie": 5},
)  # fmt: skip


def test_what_is_left_is_one_producer_one_kind_and_the_two_strikes_that_it_takes() -> None:
    needed = {"kill-bookie#2", "kill-bookie#5"}

    def run(options: Options, only: frozenset[str] | None) -> Outcome:
        planned = [f"{kind}#{number + 1}" for kind, count in options.times.items() for number in range(count)]
        struck = [name for name in planned if only is None or name in only]
        failures = ["6: lost"] if needed <= {*struck} else ["stuck: another one"] if struck else []
        return Outcome(1, "", failures, "", 0.1, 1.0, len(struck), struck=dict.fromkeys(struck, 1.0))

    found = shrink(1, START, run)
    assert found is not None
    assert (dict(found.options.rates), dict(found.options.times)) == ({}, {"kill-bookie": 5})
    assert (found.options.producers, found.options.subscriptions, found.options.messages) == (1, 1, 1)
    assert found.only == needed
    assert found.lines()[0].startswith(f"shrunk in {found.runs} runs to 2 steps: 6: lost")


def test_a_seed_that_passes_is_not_shrunk() -> None:
    assert shrink(1, START, lambda options, only: Outcome(1, "", [], "", 0.1, 1.0, 1)) is None
