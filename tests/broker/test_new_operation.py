"""A new operation is a row of proto/operations.py and the function that does it (new_operation.py makes one)."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.docs.documents import ROOT

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program prints."""
    command = [sys.executable, "-m", "tests.broker.new_operation", str(tmp_path_factory.mktemp("new"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_row_and_a_function_are_an_operation_on_all_faces(found: Any) -> None:
    forced = ["t", "by force"]
    assert (found["grpc"], found["asyncio"], found["blocking"]) == (forced, forced, forced)
    assert (found["rest"], found["rest_force"]) == (["t"], sorted(forced))
    assert found["rest_wide"] == ["wide-partition-0", "wide-partition-1"]
    assert (found["rest_missing"], found["cli_missing"]) == (404, 4)
    assert found["cli"] == [0, "t\n"]
    assert (found["cli_force"][0], json.loads(found["cli_force"][1])) == (0, sorted(forced))
    assert found["cli_wide"] == [0, "wide-partition-0\nwide-partition-1\n"]


def test_its_methods_have_true_signatures_and_its_verb_has_help(found: Any) -> None:
    assert found["signature"] == "(self, topic: 'str', *, force: 'bool' = False) -> 'list[str]'"
    assert found["doc"] == "What a topic is called."
    code, text = found["cli_help"]
    assert code == 0
    assert "-f, --force" in text
    assert "Although nothing asks for it." in text
    assert "Example: magnetar topics describe orders" in text


def test_its_permission_is_asked_before_it_is_done(found: Any) -> None:
    assert found["rights"] == {"stranger": ["Unauthorized"], "acme-admin": ["t"]}


def test_it_is_in_the_documents(found: Any) -> None:
    faces = "`describe_topic()` | `GET {T}/description` | `topics describe`"
    assert found["line"] == f"| `DescribeTopic` | owner | manage, topic | {faces} |"
    assert found["needs"].startswith("| `Admin.DescribeTopic` | an administrator of the tenant")
    assert found["openapi"] == ["What the topic is called."]
