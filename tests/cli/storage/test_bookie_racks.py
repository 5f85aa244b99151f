"""Where bookies stand, said in the folder of a stopped standalone."""

import json
from pathlib import Path

import pytest

from tests.support.processes import run_here

BOOKIE = "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"
OTHER = "00000000-0000-0000-0000-000000000001"


def racks(folder: Path, *words: str) -> dict[str, str]:
    done = run_here("bookies", *words, "--data", str(folder), "-o", "json")
    assert done.code == 0, done.err
    return {row["bookie"]: row["rack"] for row in json.loads(done.out)}


def test_a_rack_is_set_shown_changed_and_deleted(tmp_path: Path) -> None:
    assert racks(tmp_path, "racks") == {}
    assert racks(tmp_path, "delete-rack", BOOKIE) == {}
    assert racks(tmp_path, "set-rack", BOOKIE, "/rack-7") == {BOOKIE: "/rack-7"}
    assert racks(tmp_path, "set-rack", OTHER, "/rack-8") == {OTHER: "/rack-8", BOOKIE: "/rack-7"}
    assert racks(tmp_path, "set-rack", BOOKIE.upper(), "/rack-9")[BOOKIE] == "/rack-9"
    assert racks(tmp_path, "delete-rack", BOOKIE) == racks(tmp_path, "racks") == {OTHER: "/rack-8"}


@pytest.mark.parametrize("words", [("bookie-1", "/a"), (BOOKIE, " ")])
def test_what_is_no_bookie_or_no_rack_is_refused(words: tuple[str, str], tmp_path: Path) -> None:
    done = run_here("bookies", "set-rack", *words, "--data", str(tmp_path))
    assert done.code == 2
    assert "Traceback" not in done.err
