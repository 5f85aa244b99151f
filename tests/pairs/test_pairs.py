"""Each pair of features that needs no process of its own: scene.py has the play, judge.py what is judged."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.pairs.features import FEATURES
from tests.pairs.known import defect_of
from tests.pairs.pairs import Names, pairs, table, title
from tests.pairs.stage import in_process, play

Faults = dict[Names, list[str]]


def marked(found: Iterable[Names]) -> list[Any]:
    """As parameters: of those that do not hold yet a failure is expected."""
    return [
        pytest.param(pair, marks=pytest.mark.xfail(reason=why, strict=True)) if (why := defect_of(pair)) else pair
        for pair in found
    ]


def wanted_of(request: pytest.FixtureRequest) -> list[Names]:
    """The pairs of this module that the run asks for."""
    of_module = [item for item in request.session.items if item.path == request.path]
    parameters = [getattr(item, "callspec").params for item in of_module if hasattr(item, "callspec")]  # noqa: B009
    return [each["pair"] for each in parameters if "pair" in each]


@pytest.fixture(scope="module")
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Of all scenes that this run asks for, played beside each other."""
    folder: Path = tmp_path_factory.mktemp("pairs")

    async def all_of_them() -> Faults:
        async with in_process(folder) as server:
            return dict(await play(server, wanted_of(request)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("pair", marked(pairs("here")), ids=title)
def test_two_features_keep_their_promises_together(pair: Names, faults: Faults) -> None:
    assert not faults[pair], "\n".join(faults[pair])


def test_each_pair_is_met_or_excluded_by_a_sentence() -> None:
    found = table()
    assert len(found) == len(FEATURES) * (len(FEATURES) - 1) // 2
    for pair, what in found.items():
        assert "::" in what or len(what.partition("excluded: ")[2].split()) > 5, pair
