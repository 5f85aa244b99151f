"""The smallest part of a failing seed of the whole cluster that still fails, found as in protocol/shrink.py:

    1  whole kinds of faults, rates and strikes
    2  clients: one producer, one subscription, half of the messages
    3  single strikes, by their names: halves first, then each

Each step is run, and stays when what falls is of the same class (the word before the colon). The order is fixed, so a
seed shrinks to the same schedule each time. A run costs about as much as the seed: RUNS_MAX bounds it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from tests.simulation.options import Options, draw
from tests.simulation.protocol.shrink import Search
from tests.simulation.run import Outcome, run_seed

T = TypeVar("T")

RUNS_MAX = 80
SECONDS_MAX = 180.0
"""Of real time: a seed that is stuck costs half an hour of virtual time in each run."""

Run = Callable[[Options, frozenset[str] | None], Outcome]


def run_options(options: Options, only: frozenset[str] | None) -> Outcome:
    return run_seed(options.seed, change=lambda _: options, only=only)


@dataclass(slots=True)
class Shrunk:
    options: Options
    only: frozenset[str]
    outcome: Outcome
    runs: int

    def lines(self) -> list[str]:
        return [
            f"shrunk in {self.runs} runs to {self.outcome.steps} steps: {self.outcome.failures[0]}",
            f"    with {self.options.describe()}",
            *(f"    {name} at {at:.6f}" for name, at in self.outcome.struck.items()),
        ]


def shrink(seed: int, options: Options | None = None, run: Run = run_options) -> Shrunk | None:
    """None when the seed does not fail."""
    alike = lambda one, other: class_of(one.failures[0]) == class_of(other.failures[0])
    search = Search[Options, str, Outcome](options or draw(seed), run, RUNS_MAX, SECONDS_MAX, alike)
    if not search.search(_kinds, _clients):
        return None
    return Shrunk(search.options, search.only or frozenset(search.found.struck), search.found, search.runs)


def class_of(failure: str) -> str:
    return failure.partition(":")[0]


def _kinds(options: Options) -> Iterator[Options]:
    if options.rates and options.times:
        yield replace(options, rates=MappingProxyType({}))
        yield replace(options, times=MappingProxyType({}))
    for kind in options.rates:
        yield replace(options, rates=_without(options.rates, kind))
    for kind in options.times:
        yield replace(options, times=_without(options.times, kind))


def _without(kinds: Mapping[str, T], kind: str) -> Mapping[str, T]:
    return MappingProxyType({name: value for name, value in kinds.items() if name != kind})


def _clients(options: Options) -> Iterator[Options]:
    if options.producers > 1:
        yield replace(options, producers=1)
    if options.subscriptions > 1:
        yield replace(options, subscriptions=1)
    if options.messages > 1:
        yield replace(options, messages=options.messages // 2)
