"""The smallest part of a failing schedule that still fails, found by leaving things out, one after the other:

    1. whole kinds of faults
    2. clients, entries, bookies
    3. single disturbances, by their numbers: halves first, then each

What is left out changes what follows, so each step is judged by running it: it stays out when anything still fails.
The order is fixed, hence the same seed shrinks to the same schedule.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from .bookie import Rules
from .options import Options, draw
from .run import Verdict, run_protocol

RUNS_MAX = 400


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
    return _Search(options or draw(seed), rules).run()


class _Search:
    def __init__(self, options: Options, rules: Rules | None) -> None:
        self._options = options
        self._rules = rules
        self._runs = 0
        self._only: frozenset[int] | None = None
        self._verdict = self._try(options, None)

    def _try(self, options: Options, only: frozenset[int] | None) -> Verdict:
        self._runs += 1
        return run_protocol(options.seed, options=options, only=only, rules=self._rules)

    def _take(self, options: Options, only: frozenset[int] | None) -> bool:
        """Keeps the smaller one when it still fails."""
        if self._runs >= RUNS_MAX:
            return False
        verdict = self._try(options, only)
        if not verdict.failures:
            return False
        self._options, self._only, self._verdict = options, only, verdict
        return True

    def run(self) -> Shrunk | None:
        if not self._verdict.failures:
            return None
        for smaller in (_steady, _fewer_kinds, _fewer_clients, _fewer_entries, _fewer_bookies):
            self._repeat(smaller)
        self._fewer_disturbances()
        return Shrunk(self._options, self._only or frozenset(), self._verdict, self._runs)

    def _repeat(self, smaller: Callable[[Options], Iterator[Options]]) -> None:
        found = True
        while found:
            found = any(self._take(options, None) for options in list(smaller(self._options)))

    def _fewer_disturbances(self) -> None:
        left = sorted(self._verdict.struck)
        if not self._take(self._options, frozenset(left)):
            return
        size = len(left)
        while size:
            at = 0
            while at < len(left):
                fewer = left[:at] + left[at + size :]
                if self._take(self._options, frozenset(fewer)):
                    left = sorted(self._verdict.struck)
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
