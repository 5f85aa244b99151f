"""Each pair of a feature and kill -9: all of them on one process, which is killed while they send, and starts again."""

import asyncio
from pathlib import Path

import pytest

from tests.pairs.pairs import Names, pairs, title
from tests.pairs.stage import in_processes, play_through_a_kill
from tests.pairs.test_pairs import Faults, marked, wanted_of
from tests.support.processes import Processes

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder: Path = tmp_path_factory.mktemp("pairs-kills")
    with Processes(folder) as processes, in_processes(processes, folder) as (process, server):
        return dict(asyncio.run(play_through_a_kill(process, server, wanted_of(request))))


@pytest.mark.parametrize("pair", marked(pairs("processes")), ids=title)
def test_two_features_keep_their_promises_through_a_kill(pair: Names, faults: Faults) -> None:
    assert not faults[pair], "\n".join(faults[pair])
