"""Some of the bank in a test run; all of it by `python -m tests.mutants`."""

import re

import pytest

from tests.docs.documents import ROOT
from tests.mutants.bank import BANK, CRASHES, FENCE, NO_COUNTERPART, PROTOCOL, planted
from tests.mutants.hunt import fallen, hunt
from tests.simulation.load import topics
from tests.simulation.protocol.run import run_protocol
from tests.simulation.verdict import rest

CATALOGUE = [f"M{number:02}" for number in range(1, 63)]
QUICK = ["M13", "M19", "M19b"]
"""More of the ledger's are in tests/ledger/test_sabotage.py."""
SEEDS = 600


def test_every_number_of_the_catalogue_is_planted_or_says_why_not() -> None:
    planted_numbers = {mutant.number for mutant in BANK.values()}
    assert planted_numbers | set(NO_COUNTERPART) >= set(CATALOGUE), "numbers above it are ours"
    assert not planted_numbers & set(NO_COUNTERPART)


def test_every_mutant_says_what_it_breaks() -> None:
    for id_, mutant in BANK.items():
        assert re.fullmatch(r"M\d\d[a-z]?", id_)
        assert mutant.what, id_
        assert mutant.tier in (PROTOCOL, CRASHES) or mutant.target, id_


def test_the_tests_that_a_mutant_must_fell_exist() -> None:
    for id_, text in [
        *((id_, mutant.target) for id_, mutant in BANK.items()),
        *((id_, " ".join(FENCE[id_])) for id_ in FENCE),
    ]:
        for node in re.findall(r"tests/\S+", text):
            path, _, name = node.partition("::")
            files = [ROOT / path] if path.endswith(".py") else list((ROOT / path).rglob("test_*.py"))
            assert files, (id_, node)
            wanted = f"def {name.partition('[')[0]}(" if name else ""
            assert any(wanted in file.read_text() for file in files), (id_, node)


def test_a_plant_leaves_nothing_behind() -> None:
    before = [run_protocol(seed).trace_hash for seed in range(1, 6)]
    for mutant in BANK.values():
        with planted(mutant):
            pass
    assert [run_protocol(seed).trace_hash for seed in range(1, 6)] == before


@pytest.mark.parametrize("id_", QUICK)
def test_the_fast_tier_kills(id_: str) -> None:
    kill = hunt(id_, SEEDS)
    assert kill.killed, BANK[id_].what


@pytest.mark.parametrize(
    ("id_", "first"), [("M70b", 1), ("M70c", 3), ("M86", 13), ("M98d", 1), ("M98e", 4)]
)
def test_seeds_of_a_cluster_kill(id_: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`first`: the seed that found it last; it need not find it for ever."""
    for module in (rest, topics):
        monkeypatch.setattr(module, "LIVENESS_S", 120.0)  # what is stuck is so after two minutes, too
    kill = hunt(id_, 12, first)
    assert kill.killed, BANK[id_].what


@pytest.mark.parametrize("id_", FENCE)
def test_each_test_of_the_fence_falls_when_the_fence_is_not_durable(id_: str) -> None:
    with planted(BANK[id_]):
        assert {node.partition("[")[0] for node in fallen(*FENCE[id_])} == set(FENCE[id_])
