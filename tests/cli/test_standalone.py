"""`magnetar standalone`: one ready line, an orderly end, and everything still there after a `kill -9`."""

import re
from pathlib import Path

import pytest

from magnetar.cli.common.processes import Processes
from tests.support.processes import run_here

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("bookies", ["1", "3"])
def test_it_prints_one_ready_line_serves_and_ends_with_sigterm(
    started: Processes, tmp_path: Path, bookies: str
) -> None:
    server = started.start("s", "standalone", "--port", "0", "--bookies", bookies, "--data", str(tmp_path / "data"))
    url = server.wait_ready()
    assert re.fullmatch(r"magnetar://127\.0\.0\.1:\d+", url)
    assert run_here("produce", "t", "-m", "hello", "--url", url).code == 0
    assert run_here("consume", "t", "-s", "s", "-n", "1", "--url", url).out == "hello\n"
    assert server.stop() == 0
    (line,) = server.lines
    assert line.startswith("ready ")
    assert f"bookies={bookies}" in line
    assert "Traceback" not in server.output()


def test_the_number_of_bookies_is_remembered(started: Processes, tmp_path: Path) -> None:
    server = started.start("s", "standalone", "--port", "0", "--bookies", "3", "--data", str(tmp_path / "data"))
    server.wait_ready()
    server.stop()
    again = started.start("t", "standalone", "--port", "0", "--data", str(tmp_path / "data"))
    again.wait_ready()
    assert "bookies=3" in again.lines[0]
