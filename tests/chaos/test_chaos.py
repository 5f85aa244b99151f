"""Half a minute of `python -m tests.chaos`, the known-bad control, and a disk that forgets what was not synced."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import unsynced
from tests.chaos.faults import WEIGHTS

LONG_S = 300.0


def _chaos(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.chaos", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.processes
def test_a_cluster_under_faults_loses_nothing_and_says_so() -> None:
    """A bookie or broker killed, a half-open connection, a power cut; hours of all kinds are for by hand."""
    kinds = ("kill", "half_open", "power_cut")
    result = _chaos("--minutes", "0.05", "--seed", "7", "--every", "1", "--kinds", ",".join(kinds))
    assert result["by_kind"] == dict.fromkeys(kinds, 1)
    assert set(kinds) < set(WEIGHTS)
    assert {name: result[name] for name in ("lost", "duplicated", "stuck", "failed", "seed", "metadata")} == {
        "lost": 0, "duplicated": 0, "stuck": 0, "failed": 0, "seed": 7, "metadata": "sqlite",
    }  # fmt: skip
    assert result["acknowledged"] > 100
    assert result["delivered"] >= 2 * result["acknowledged"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> unsynced.NotedFiles:
    monkeypatch.setenv(unsynced.UNDO, str(tmp_path / "undo"))
    return unsynced.NotedFiles()


class All(random.Random):
    """Every write that no sync covers is dropped."""

    def random(self) -> float:
        return 1.0


def test_a_power_cut_takes_what_was_not_synced_and_nothing_else(files: unsynced.NotedFiles, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file = files.open(str(tmp_path / "data" / "a"), create=True)
    file.pwrite([b"synced"], 0)
    file.fdatasync()
    files.sync_directory(str(tmp_path / "data"))
    file.pwrite([b"S"], 0)
    file.pwrite([b" and more"], 6)
    other = files.open(str(tmp_path / "data" / "nameless"), create=True)
    other.pwrite([b"bytes"], 0)
    other.fdatasync()
    assert unsynced.drop(tmp_path / "undo", All(1)) == 3
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]
    assert (tmp_path / "data" / "a").read_bytes() == b"synced"


def test_a_write_that_began_after_its_sync_is_not_covered_by_it(files: unsynced.NotedFiles, tmp_path: Path) -> None:
    first = files.open(str(tmp_path / "a"), create=True)
    files.sync_directory(str(tmp_path))
    first.pwrite([b"12"], 0)
    first.fdatasync()
    first.truncate(1)
    files.rename(str(tmp_path / "a"), str(tmp_path / "b"))
    unsynced.drop(tmp_path / "undo", All(1))
    assert (tmp_path / "b").read_bytes() == b"12"


def test_a_disk_that_lies_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(unsynced.UNDO, str(tmp_path / "undo"))
    monkeypatch.setenv(unsynced.LIES, "1")
    files = unsynced.NotedFiles()
    file = files.open(str(tmp_path / "a"), create=True)
    file.pwrite([b"said to be there"], 0)
    file.fdatasync()
    files.sync_directory(str(tmp_path))
    unsynced.drop(tmp_path / "undo", All(1))
    assert (tmp_path / "a").read_bytes() == b""


def test_what_a_killed_process_had_not_synced_may_be_lost_after_the_next_one(
    files: unsynced.NotedFiles, tmp_path: Path
) -> None:
    file = files.open(str(tmp_path / "a"), create=True)
    files.sync_directory(str(tmp_path))
    file.pwrite([b"first"], 0)
    again = unsynced.NotedFiles()
    assert again.open(str(tmp_path / "a")).pread(5, 0) == b"first"
    other = again.open(str(tmp_path / "b"), create=True)
    other.pwrite([b"second"], 0)
    other.fdatasync()
    again.sync_directory(str(tmp_path))
    unsynced.drop(tmp_path / "undo", All(1))
    assert (tmp_path / "a").read_bytes() == b""
    assert (tmp_path / "b").read_bytes() == b"second"


def test_a_direct_write_stays_with_the_size_of_its_file_and_without_what_was_written_beside_it(
    files: unsynced.NotedFiles, tmp_path: Path
) -> None:
    path = str(tmp_path / "a")
    plain = files.open(path, create=True)
    files.sync_directory(str(tmp_path))
    plain.truncate(0)
    plain.pwrite([b"p" * 12_288], 0)
    direct = files.open(path, direct=True)
    try:
        direct.pwrite([b"d" * 4096], 4096)
    except OSError:
        pytest.skip("no direct files here")
    unsynced.drop(tmp_path / "undo", All(1))
    assert (tmp_path / "a").read_bytes() == bytes(4096) + b"d" * 4096
