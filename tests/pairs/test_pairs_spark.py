"""Each pair of a feature and Spark: a batch query writes the second wave, another one reads everything."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.pairs.pairs import Names, pairs, title
from tests.pairs.stage import in_processes, play, play_through_a_kill
from tests.pairs.test_pairs import Faults, marked, wanted_of
from tests.spark.conftest import spark as spark
from tests.support.processes import Processes

pytestmark = pytest.mark.spark
AT_ONCE = 2
KILL = "kill -9"


@pytest.fixture(scope="module")
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, spark: Any) -> Faults:
    folder: Path = tmp_path_factory.mktemp("pairs-spark")
    wanted = wanted_of(request)
    with Processes(folder) as processes, in_processes(processes, folder) as (process, server):
        server.spark = spark
        found = asyncio.run(play(server, [pair for pair in wanted if KILL not in pair], AT_ONCE))
        killed = [pair for pair in wanted if KILL in pair]
        return dict(found + asyncio.run(play_through_a_kill(process, server, killed)))


@pytest.mark.parametrize("pair", marked(pairs("spark")), ids=title)
def test_spark_and_a_feature_keep_their_promises_together(pair: Names, faults: Faults) -> None:
    assert not faults[pair], "\n".join(faults[pair])
