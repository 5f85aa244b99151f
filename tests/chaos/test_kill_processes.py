"""`--processes N` and `kill -9` of each of them under load: nothing acknowledged is lost, and the others go on."""

import os
import signal
from pathlib import Path

import pytest

from magnetar.cli.common.processes import Processes
from tests.chaos.test_kill import ACKS_BETWEEN, TOPICS
from tests.chaos.workload.load import Load, check
from tests.support.children import children, wait_another

pytestmark = pytest.mark.processes


def test_a_killed_process_of_a_standalone_server_loses_nothing_and_is_started_again(
    started: Processes, tmp_path: Path
) -> None:
    server = started.start(
        "server", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--processes", "4",
        "--bookies", "3",
    )  # fmt: skip
    url = server.wait_ready()
    with Load(url, TOPICS) as load:
        for name in children(server):
            load.wait_acked(ACKS_BETWEEN)
            before = children(server)
            os.kill(before[name], signal.SIGKILL)
            after = wait_another(server, name, before[name])
            assert {**after, name: before[name]} == before, "the others go on"
            load.wait_acked(ACKS_BETWEEN)
        load.stop()
        check(load, url)
    assert server.stop() == 0
    said = server.output()
    assert said.count("ready ") == 1
    for name in children_of(said):
        assert f"process {name} (" in said
    assert "Traceback" not in said


def children_of(text: str) -> set[str]:
    return {line.split("process ")[1].split(" ")[0] for line in text.splitlines() if " ended with signal 9" in line}
