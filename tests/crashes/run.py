"""Many workloads and all sites over several processes; one result. `python -m tests.crashes` prints it."""

import concurrent.futures
import itertools
import logging
import multiprocessing
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from tests.crashes import cases, control
from tests.crashes.cases import Looked
from tests.crashes.control import Found
from tests.crashes.enumerate import Enumeration, Failure
from tests.crashes.sites import asking_functions, function_of
from tests.crashes.stops import STATES as STOPPED_STATES
from tests.crashes.stops import STOP, record_named
from tests.crashes.verify import listening
from tests.crashes.workload import Recording, record

CONTROL_WORKLOADS = 6
PROGRESS_S = 5.0
SHOWN_FAILURES = 20
PENDING = 3
"""Shares that wait for each process, so that none is idle while another one is slow."""
WORKLOAD_STATES = 2_500
"""Of one workload; more of them come from further workloads, which see other interleavings."""
STOPS_SHARE = 0.5
"""So many states of stops (tests/crashes/stops.py) for each of workloads."""


@dataclass
class Result:
    states: int = 0
    equal: int = 0
    workloads: int = 0
    stops: int = 0
    failures: list[Failure] = field(default_factory=list)
    controls: list[Found] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures and not self.unreached and all(found.failure for found in self.controls)

    def figures(self) -> dict[str, int]:
        return {
            "states": self.states,
            "equal": self.equal,
            "failed": len(self.failures),
            "workloads": self.workloads,
            "stops": self.stops,
            "syncs_removed": len(self.controls),
            "syncs_caught": sum(found.failure is not None for found in self.controls),
        }


@dataclass
class Part:
    """A share of a result: of one workload, or of some stops."""

    states: int
    equal: int
    failures: list[Failure]


def quiet() -> None:
    """What a crashed store logs, and what asyncio says of tasks that died with it, is of no interest here."""
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)


def workload(name: str, states: int) -> Part:
    """The states of one workload, or of one stop. What went wrong while it was recorded fails, too."""
    recording = record_named(name)
    failures = [Failure(name, complaint) for complaint in recording.complaints]
    enumeration = Enumeration(recording)
    with listening():
        for _ in enumeration.run(states):
            pass
    outcome = enumeration.outcome
    return Part(outcome.states, outcome.equal, failures + outcome.failures)


def some_stops(numbers: Sequence[int]) -> Part:
    parts = [workload(f"{STOP}{number}", STOPPED_STATES) for number in numbers]
    failures = [failure for part in parts for failure in part.failures]
    return Part(sum(part.states for part in parts), sum(part.equal for part in parts), failures)


@lru_cache(1)
def control_recordings(seed: int) -> list[Recording]:
    """In which every sync is taken away in turn: lived once in each process."""
    return [record(seed + i) for i in range(CONTROL_WORKLOADS)]


def sites(seed: int) -> list[str]:
    with listening():
        return control.sites_of(control_recordings(seed))


def site(name: str, seed: int) -> Found:
    with listening():
        return control.find(name, control_recordings(seed))


def case(name: str) -> Looked:
    with listening():
        return cases.look(name)


def everything(
    states: int, seed: int, jobs: int, *, show: Callable[[str], object] = lambda line: None, controls: bool = True
) -> Result:
    """About `states` states, then the negative control, and the cases."""
    result = Result()
    context = multiprocessing.get_context("spawn")  # a fork of a process that uses gRPC dies in gRPC's threads
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=quiet) as pool:
        named = pool.submit(sites, seed) if controls else None
        _states(result, pool, states, seed, jobs, show)
        if named is not None:
            names = named.result()
            for found in pool.map(site, names, [seed] * len(names)):
                result.controls.append(found)
                show(_line(found))
            for looked in pool.map(case, cases.CASES):
                result.states += looked.states
                _fail(result, looked.failures, show)
                for found in looked.controls:
                    result.controls.append(found)
                    show(_line(found))
            reached = {function_of(found.site) for found in result.controls}
            result.unreached = [f"{path}: {name}" for name, path in asking_functions().items() if name not in reached]
            for name in result.unreached:
                show(f"never reached by any workload: {name}")
    return result


def _fail(result: Result, failures: Sequence[Failure], show: Callable[[str], object]) -> None:
    for failure in failures[: max(0, SHOWN_FAILURES - len(result.failures))]:
        show(f"FAILED {failure.state}: {failure.reason}")
        show(f"    python -m tests.crashes --replay '{failure.state}'")
    result.failures += failures


class _Share(NamedTuple):
    """What one process looks at: a workload, or some stops."""

    stops: range | None  # None: a workload
    workload: str
    states: int  # about

    def submit(self, pool: concurrent.futures.Executor) -> concurrent.futures.Future[Part]:
        if self.stops is None:
            return pool.submit(workload, self.workload, self.states)
        return pool.submit(some_stops, self.stops)


def _shares(states: int, seed: int, jobs: int) -> Iterator[_Share]:
    """Workload after workload, and after each of them stops; without end."""
    share = min(WORKLOAD_STATES, max(1, states // jobs))
    some = max(1, int(share * STOPS_SHARE / STOPPED_STATES))
    for number in itertools.count():
        yield _Share(None, str(seed + number), share)
        yield _Share(range(number * some, (number + 1) * some), "", some * STOPPED_STATES)


def _states(
    result: Result, pool: concurrent.futures.Executor, states: int, seed: int, jobs: int, show: Callable[[str], object]
) -> None:
    """Until there are enough. Which shares are begun follows from the states of those before, not from the clock."""
    shares = _shares(states, seed, jobs)
    pending: deque[tuple[_Share, concurrent.futures.Future[Part]]] = deque()
    shown = begun = time.perf_counter()
    while result.states < states or pending:
        while len(pending) < PENDING * jobs and result.states + sum(each.states for each, _ in pending) < states:
            share = next(shares)
            pending.append((share, share.submit(pool)))
        share, future = pending.popleft()
        part = future.result()
        result.states += part.states
        result.equal += part.equal
        result.workloads += share.stops is None
        result.stops += len(share.stops or ())
        _fail(result, part.failures, show)
        now = time.perf_counter()
        if now - shown >= PROGRESS_S:
            shown = now
            rate = result.states / (now - begun)
            lives = f"{result.workloads} workloads and {result.stops} stops"
            show(f"{result.states} states of {lives}, {len(result.failures)} failed, {rate:.0f}/s")


def _line(found: Found) -> str:
    if found.failure is None:
        return f"NOT MISSED  {found.site} ({found.states} states)"
    return f"missed  {found.site}: {found.failure.state} ({found.states} states): {found.failure.reason}"
