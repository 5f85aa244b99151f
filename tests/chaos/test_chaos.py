"""Half a minute of `python -m tests.chaos` on each metadata store, also of its transactions, and of its control; how it
ends when it is told to; what it draws, how it waits, and a disk that forgets what was not synced; what is said of moves
that the balance should not have made."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.faults import OF_ETCD, SUDDEN, WEIGHTS, WIDE, Faults
from tests.chaos.processes import unsynced
from tests.chaos.processes.cluster import small_disk
from tests.chaos.processes.moves import count_most, find_restless, read_moves
from tests.chaos.waiting import wait_until
from tests.support.etcd import why_no_etcd
from tests.support.zookeeper import why_no_zookeeper

LONG_S = 300.0


def _chaos(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.chaos", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kinds", "how"),
    [
        ("kill+half_open,power_cut,wipe+revoke", ["--secured"]),
        ("kill_one,kill_one+cut,freeze+kill", ["--processes", "2", "--clients", "sdk,python", "--keyed", "--filtered"]),
        ("disk+kill_leader,part_leader+split,move+restart", ["--wide", "--clients", "sdk"]),
    ],
)
def test_a_cluster_under_faults_loses_nothing_and_says_so(kinds: str, how: list[str], tmp_path: Path) -> None:
    """Some kinds alone and some that overlap; half an hour of all of them, on ZooKeeper too, is for by hand."""
    metadata = "etcd" if "--wide" in how else "sqlite"
    if metadata == "etcd" and (why := why_no_etcd()):
        pytest.skip(why)
    if "--secured" in how:
        with contextlib.suppress(PermissionError), small_disk(tmp_path, 1):
            kinds += ",full_disk"
    result = _chaos("--minutes", "0.05", "--seed", "7", "--every", "1", "--kinds", kinds, *how)
    wanted = kinds.replace("+", ",").split(",")
    assert result["by_kind"] == Counter(wanted)
    assert set(wanted) < set(WEIGHTS)
    assert {name: result[name] for name in ("faults", "lost", "duplicated", "stuck", "failed", "metadata")} == {
        "faults": len(wanted), "lost": 0, "duplicated": 0, "stuck": 0, "failed": 0, "metadata": metadata,
    }  # fmt: skip
    assert result["acknowledged"] > 100
    assert result["delivered"] >= 2 * result["acknowledged"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("metadata", "kinds", "clients"),
    [("sqlite", "kill,kill+freeze", "sdk,java"), ("zookeeper", "kill+reset", "sdk")],
)
def test_no_transaction_counts_by_half_whatever_happens_to_its_cluster(
    metadata: str, kinds: str, clients: str
) -> None:
    """The sum of all accounts never changes, and each message is moved once; half an hour of it is for by hand."""
    if metadata == "zookeeper" and (why := why_no_zookeeper()):
        pytest.skip(why)
    given = ("--minutes", "0.05", "--seed", "7", "--every", "1", "--metadata", metadata, "--kinds", kinds)
    result = _chaos(*given, "--transactions", "--clients", clients)
    assert {name: result[name] for name in ("lost", "duplicated", "stuck", "failed", "wrong", "metadata")} == {
        "lost": 0, "duplicated": 0, "stuck": 0, "failed": 0, "wrong": {}, "metadata": metadata,
    }  # fmt: skip
    assert result["committed"] > 50
    assert result["aborted"] >= 3
    assert result["hidden"] >= 3
    assert result["delivered"] >= 2 * result["committed"]


@pytest.mark.processes
def test_a_cluster_on_disks_that_lie_is_found_wrong() -> None:
    """The control: what it says is 0 when something is wrong."""
    assert _chaos("--minutes", "0.05", "--seed", "7", "--every", "1", "--control")["failed"] == 1


@pytest.mark.processes
def test_a_run_that_is_told_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "5", "--every", "1", "--kinds", "freeze"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as run:
        assert run.stdout is not None
        assert "freeze" in run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        assert run.wait(LONG_S) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert [each for each in _command_lines() if str(tmp_path) in each] == []


def _command_lines() -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(process.read_text(errors="replace"))
        except OSError:
            continue
    return found


def test_what_is_drawn_costs_data_only_where_it_may_and_comes_first() -> None:
    cluster = SimpleNamespace(
        bookies=[None] * 4, metadata=[None], small=None, security=None, processes=1, wide=False,
        session_s=2.0,
    )  # fmt: skip
    faults = Faults(cluster, random.Random(7))  # type: ignore[arg-type]
    rounds = [faults.draw() for _ in range(2000)]
    never = {"full_disk", "revoke", "kill_one"}
    assert {kind for kinds in rounds for kind in kinds} == set(WEIGHTS) - {*never, "lose", *WIDE, *OF_ETCD}
    assert {len(kinds) for kinds in rounds} == {1, 2, 3}
    assert not [kinds for kinds in rounds if set(kinds[1:]) & set(SUDDEN)]
    cluster.bookies.append(None)
    later = {kind for _ in range(2000) for kind in faults.draw()}
    assert later == set(WEIGHTS) - {*never, "replace", *WIDE, *OF_ETCD}
    cluster.wide, cluster.metadata = True, [None] * 3
    widest = {kind for _ in range(2000) for kind in faults.draw()}
    assert widest == set(WEIGHTS) - {*never, "replace"}


def test_a_bundle_that_the_balance_moves_before_its_rest_is_over_is_said(tmp_path: Path) -> None:
    def line(at_s: float, text: str) -> str:
        return f"2026-01-01T00:{at_s // 60:02.0f}:{at_s % 60:06.3f} INFO    magnetar.broker: {text}\n"

    leads, moves = "this broker balances the load of brokers", "moves from one to two: one is 40 % busy"
    rested = [(0, leads), (1, f"/a {moves}"), (62, f"/a {moves}"), (70, f"/b {moves}"), (183, f"/a {moves}")]
    restless = [(190, f"/b {moves}"), (280, f"/a {moves}"), (300, leads), (301, f"/a {moves}"), (302, f"/a {moves}")]
    for name, lines in (("rested", rested), ("restless", rested + restless)):
        (tmp_path / name).write_text("".join(line(*each) for each in lines))
    found = read_moves([tmp_path / "rested"])
    assert (len(found), count_most(found), find_restless(found)) == (4, 3, [])
    said = find_restless(read_moves([tmp_path / "restless"]))
    assert said == ["/a moves again after 97.0 s of 240 s", "/a moves again after 1.0 s of 60 s"]


def test_what_a_busy_machine_makes_one_wait_longer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert wait_until(lambda: ["it"], 10.0, look_s=0.5) == ["it"]
    assert pauses == [0.5] * 20
    assert wait_until(lambda: ["it"][: len(pauses) < 25], 10.0, look_s=0.5) == []


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


def test_a_direct_write_may_be_lost_until_it_returns(
    files: unsynced.NotedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a")
    files.open(path, create=True)
    files.sync_directory(str(tmp_path))
    direct = files.open(path, direct=True)
    try:
        direct.pwrite([b"d" * 8192], 0)
    except OSError:
        pytest.skip("no direct files here")

    def cut() -> None:
        """The power, before the write has come to its end."""
        raise KeyboardInterrupt

    monkeypatch.setattr(files._notes, "wait", cut)
    with pytest.raises(KeyboardInterrupt):
        direct.pwrite([b"e" * 8192], 4096)
    assert (tmp_path / "a").read_bytes() == b"d" * 4096 + b"e" * 8192
    assert unsynced.drop(tmp_path / "undo", All(1)) == 1
    assert (tmp_path / "a").read_bytes() == b"d" * 8192


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
