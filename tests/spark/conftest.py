"""One Spark session and one Magnetar server for all tests that need both."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.cli.common.processes import Processes


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]").appName("magnetar-tests")
        .config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC").getOrCreate()
    )  # fmt: skip
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("spark-server")
    with Processes(folder) as processes:
        yield processes.start("standalone", "standalone", "--port", "0", "--data", "data").wait_ready()


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    import magnetar

    with magnetar.Client(url) as connected:
        yield connected
