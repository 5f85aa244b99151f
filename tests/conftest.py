"""What all tests share: `spark` tests are skipped, with the reason, where Spark cannot run; processes that end."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.cli.common.processes import Processes
from magnetar.cli.demo.java import why_no_spark


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--walks", type=int, default=1, metavar="N", help="random walks: N times as many as usual (1)")


@pytest.fixture
def walks(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--walks"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("spark")]
    reason = why_no_spark() if marked else None
    for item in marked if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason or ""))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection of garbage looks through them again."""
    if not gc.get_freeze_count():  # tests of the mutant bank run pytest within a test
        gc.collect()
        gc.freeze()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes in the test's folder and ends them, whatever happens."""
    with Processes(tmp_path) as processes:
        yield processes


@pytest.fixture(autouse=True)
def _logs_again() -> Iterator[None]:
    """A simulation keeps its processes quiet; the test after it may want to read what is logged."""
    yield
    logging.disable(logging.NOTSET)
