"""One standalone server for the tests of commands; each test uses names of its own."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from magnetar.cli.common.processes import Processes
from tests.support.processes import Result, run_here


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("standalone")
    with Processes(folder) as processes:
        server = processes.start("standalone", "standalone", "--port", "0", "--data", str(folder / "data"))
        yield server.wait_ready()


@pytest.fixture
def cli(url: str) -> Callable[..., Result]:
    """Runs a command against the server; fails the test when its exit code is not the expected one."""

    def run(*arguments: str, code: int = 0, **options: Any) -> Result:
        done = run_here(*arguments, MAGNETAR_URL=url, **options)
        assert done.code == code, f"{arguments} ended with {done.code}\n{done.out}{done.err}"
        assert "Traceback" not in done.err
        return done

    return run


@pytest.fixture
def cli_json(cli: Callable[..., Result]) -> Callable[..., Any]:
    """Runs a command with -o json; what it printed, parsed."""

    def run(*arguments: str, **options: Any) -> Any:
        return json.loads(cli(*arguments, "-o", "json", **options).out)

    return run
