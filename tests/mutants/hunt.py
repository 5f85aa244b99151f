"""Runs what should see a mutant until something falls, or enough was run."""

import contextlib
import io
import itertools
from typing import NamedTuple

import pytest

from tests.crashes.mutants import killed as killed_on_disk
from tests.mutants.bank import BANK, CLUSTER, CRASHES, PROTOCOL, Mutant, planted
from tests.simulation.protocol.run import run_protocol
from tests.simulation.run import quiet, run_seed
from tests.simulation.tiers import INSIDE, SECURED, TRANSACTIONS, drawn_for

CLUSTER_SEEDS_MAX = 150


class Kill(NamedTuple):
    id: str
    fell: str  # "": it is alive
    seeds: int  # that were run; 0: the tier has none

    @property
    def killed(self) -> bool:
        return bool(self.fell)


def hunt(id_: str, seeds_max: int, first: int = 1) -> Kill:
    """In a process of its own, or one that does nothing else meanwhile: code is replaced. Of a cluster the seed `first`
    is tried first."""
    mutant = BANK[id_]
    if mutant.tier == CRASHES:
        failure = killed_on_disk(mutant.target)
        return Kill(id_, "" if failure is None else f"{failure.reason} (state {failure.state})", 0)
    with planted(mutant):
        if mutant.tier == PROTOCOL:
            quiet()
            return _protocol(id_, seeds_max)
        if mutant.tier == CLUSTER:
            quiet()
            return _cluster(mutant, min(seeds_max, CLUSTER_SEEDS_MAX), first)
        fell = falls(mutant.target)
    assert not fell or not falls(fell), f"{fell} falls without {id_}, too"
    return Kill(id_, fell, 0)


def _protocol(id_: str, seeds_max: int) -> Kill:
    for seed in range(1, seeds_max + 1):
        failures = run_protocol(seed).failures
        if failures:
            return Kill(id_, failures[0], seed)
    return Kill(id_, "", seeds_max)


def _cluster(mutant: Mutant, seeds_max: int, first: int) -> Kill:
    """Seeds of the kind that the mutant names; only those count. Or of the tier that it names: all seeds are."""
    ran, seeds = 0, itertools.chain((first,), itertools.count(1))
    of_a_tier = mutant.target in (TRANSACTIONS, INSIDE, SECURED)
    while ran < seeds_max:
        seed = next(seeds)
        drawn = drawn_for(mutant.target if of_a_tier else "cluster", seed)
        if mutant.target and not of_a_tier and drawn.kind != mutant.target:
            continue
        ran += 1
        failures = run_seed(seed, change=lambda _, drawn=drawn: drawn).failures
        if failures:
            return Kill(mutant.id, failures[0], ran)
    return Kill(mutant.id, "", ran)


class _Seen:
    """Which tests fell, in their order."""

    def __init__(self) -> None:
        self.fell: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.fell.append(report.nodeid)


def falls(nodes: str) -> str:
    """The first that falls; "": none."""
    return next(iter(fallen("-x", *nodes.split())), "")


def fallen(*nodes: str) -> list[str]:
    """Those of these tests that fall."""
    seen = _Seen()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(["-q", "-p", "no:cacheprovider", *nodes], plugins=[seen])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{nodes} could not be run: {output.getvalue()[-2000:]}")
    return seen.fell
