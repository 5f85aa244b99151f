"""The smallest part of a failing schedule that still fails, found by leaving things out, one after the other:

    1. whole kinds of faults
    2. clients, entries, bookies
    3. single disturbances, by their numbers: halves first, then each

What is left out changes what follows, so each step is judged by running it: it stays out when anything still fails.
The order is fixed, hence the same seed shrinks to the same schedule.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, cast

from .bookie import Rules
from .options import Options, draw
from .run import Verdict, run_protocol

RUNS_MAX = 400

Name = TypeVar("Name")
Drawn = TypeVar("Drawn")
Ran = TypeVar("Ran", bound="Found[Any]")


@dataclass(slots=True)
class Shrunk:
    """`only`: the disturbances that are left; their numbers are those of the runs with these options."""

    options: Options
    only: frozenset[int]
    verdict: Verdict
    runs: int

    def lines(self) -> list[str]:
        struck = [f"{number}: {kind} {what} at {at:.6f}" for number, (at, kind, what) in self.verdict.struck.items()]
        return [
            f"shrunk in {self.runs} runs to {self.verdict.steps} steps: {self.verdict.failures[0]}",
            f"    with {self.options.describe()}",
            *(f"    disturbance {each}" for each in struck),
        ]


def shrink(seed: int, rules: Rules | None = None, options: Options | None = None) -> Shrunk | None:
    """None when the seed does not fail."""
    part = lambda given, only: run_protocol(seed, options=given, only=only, rules=rules)
    search = Search[Options, int, Verdict](options or draw(seed), part, RUNS_MAX)
    if not search.search(_steady, _fewer_kinds, _fewer_clients, _fewer_entries, _fewer_bookies):
        return None
    return Shrunk(search.options, search.only or frozenset(), search.found, search.runs)


class Found(Protocol[Name]):
    failures: list[str]
    struck: dict[Name, Any]


class Search(Generic[Drawn, Name, Ran]):
    """Of either tier: the options and the disturbances that are left, and what they do. A smaller part is kept when it
    fails, and `alike` says that it does so in the same way."""

    def __init__(
        self, options: Drawn, run: Callable[[Drawn, frozenset[Name] | None], Ran], runs_max: int,
        seconds_max: float = inf, alike: Callable[[Ran, Ran], bool] = lambda one, other: True,
    ) -> None:  # fmt: skip
        self._run, self._runs_max, self._alike = run, runs_max, alike
        self._until = time.perf_counter() + seconds_max
        self.options, self.only, self.runs = options, cast(frozenset[Name] | None, None), 1
        self.found = run(options, None)

    def _take(self, options: Drawn, only: frozenset[Name] | None) -> bool:
        if self.runs >= self._runs_max or time.perf_counter() > self._until:
            return False
        self.runs += 1
        found = self._run(options, only)
        if not found.failures or not self._alike(self.found, found):
            return False
        self.options, self.only, self.found = options, only, found
        return True

    def search(self, *smaller: Callable[[Drawn], Iterator[Drawn]]) -> bool:
        """False: it does not fail."""
        for each in smaller if self.found.failures else ():
            while any(self._take(options, None) for options in list(each(self.options))):
                continue
        left = list(self.found.struck)
        if self.found.failures and self._take(self.options, frozenset(left)):
            self._fewer_disturbances(left)
        return bool(self.found.failures)

    def _fewer_disturbances(self, left: list[Name]) -> None:
        size = (len(left) + 1) // 2
        while size:
            at = 0
            while at < len(left):
                if self._take(self.options, frozenset(left[:at] + left[at + size :])):
                    left = list(self.found.struck)
                else:
                    at += size
            size //= 2


def _steady(options: Options) -> Iterator[Options]:
    """Without jitter a disturbance that is left out shifts nothing else."""
    if options.jitter:
        yield replace(options, jitter=False)


def _fewer_kinds(options: Options) -> Iterator[Options]:
    for kind in options.rates:
        rates = {name: rate for name, rate in options.rates.items() if name != kind}
        yield replace(options, rates=MappingProxyType(rates))
    for kind in options.times:
        times = {name: count for name, count in options.times.items() if name != kind}
        yield replace(options, times=MappingProxyType(times))


def _fewer_clients(options: Options) -> Iterator[Options]:
    if options.writers > 1:
        yield replace(options, writers=1)
    if options.readers:
        yield replace(options, readers=options.readers - 1)
    if options.recoverers:
        yield replace(options, recoverers=options.recoverers - 1)


def _fewer_entries(options: Options) -> Iterator[Options]:
    if options.entries > 1:
        yield replace(options, entries=options.entries // 2)
        yield replace(options, entries=options.entries - 1)


def _fewer_bookies(options: Options) -> Iterator[Options]:
    if options.bookies > options.shape[0]:
        yield replace(options, bookies=options.bookies - 1)
