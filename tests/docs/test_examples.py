"""Each program of examples/ runs against a real server, checks itself and says what it did; docs/sdk.md names each."""

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT
from tests.docs.rules import Place
from tests.support.processes import Processes

PROGRAMS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py"))
WITH_SPARK = [program for program in PROGRAMS if "/spark_" in program]

DONE = "-- the program is done --"
_IN_TURN = f"""
import runpy, sys
url, *programs = sys.argv[1:]
for program in programs:
    sys.argv[:] = [program, url]
    runpy.run_path(program, run_name="__main__")
    print({DONE!r}, flush=True)
"""


def run_in_turn(place: Place, programs: list[str]) -> None:
    """One after the other against one server: each has topics of its own, so that it may run again. In one process,
    which imports and starts a JVM once, and where each is `__main__` in its turn."""
    said = place.run(sys.executable, "-c", _IN_TURN, f"magnetar://{place.address}", *programs, timeout_s=600)
    parts = said.split(DONE)
    assert parts.pop().strip() == ""
    for program, part in zip(programs, parts, strict=True):
        assert part.strip(), f"{program} says nothing of what it did"


@pytest.mark.processes
def test_each_program_without_spark_runs(tmp_path: Path) -> None:
    """Those with Spark: tests/docs/test_commands.py, in the process of a document that has Spark."""
    pytest.importorskip("fastavro")
    pytest.importorskip("opentelemetry.sdk")
    with Processes(tmp_path) as processes:
        programs = [str(ROOT / program) for program in PROGRAMS if program not in WITH_SPARK]
        run_in_turn(Place(tmp_path, processes), programs)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_checks_itself_and_says_how_it_is_started(program: str) -> None:
    tree = ast.parse((ROOT / program).read_text(encoding="utf-8"))
    assert f"    python {program} magnetar://localhost:7650\n" in (ast.get_docstring(tree, clean=False) or "")
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree))


def test_the_tutorial_names_each_program() -> None:
    text = (ROOT / "docs/sdk.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"\]\(\.\./(examples/\w+\.py)\)", text))) == PROGRAMS
