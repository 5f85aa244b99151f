"""A new policy is a line of proto/applied.py and a row of proto/policies.py (new_policy.py makes one)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.documents import ROOT

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program prints."""
    folder: Path = tmp_path_factory.mktemp("new")
    command = [sys.executable, "-m", "tests.broker.new_policy", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_line_and_a_row_are_a_policy_on_all_faces(found: Any) -> None:
    assert (found["default"], found["setting"]) == (7, 7)
    assert (found["rest"], found["in_namespace"], found["inherited"], found["not_set"]) == (3, 3, 3, 204)
    assert [found["cli_get"][0], json.loads(found["cli_get"][1])] == [0, {"max_pigeons": 3}]
    assert found["cli_set"] == [0, "max-pigeons of t: max_pigeons=4\n"]
    assert (found["asyncio"], found["set"]) == (4, 5)
    assert found["cli_remove"][0] == 0
    assert found["removed"] is None


def test_it_is_checked_and_its_permission_is_asked(found: Any) -> None:
    assert found["refused"] == 412
    assert found["checked"] == "max_pigeons is 0 (none) or more, not -1"
    assert found["rights"] == {"stranger": "Unauthorized", "acme-admin": "done", "root": "done"}


def test_it_is_in_the_documents(found: Any) -> None:
    assert [path.rpartition("/")[2] for path in found["openapi"]] == ["maxPigeons", "maxPigeons"]
    assert "-n, --max-pigeons" in found["help"]
    assert "Example: magnetar topics set-max-pigeons orders -n 3" in found["help"]
