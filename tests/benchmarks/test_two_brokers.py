"""two-brokers: shares of the CPU where they can be given, an error where not, and what the figures are made of."""

from pathlib import Path

import pytest

from benchmarks import two_brokers
from benchmarks.two_brokers import MODES, CpuShare, NoCpuShare, Turn


def mounted(patch: pytest.MonkeyPatch, folder: Path, line: str) -> None:
    (mounts := folder / "mounts").write_text(f"tmpfs /tmp tmpfs rw 0 0\n{line}".strip())
    patch.setattr(two_brokers, "MOUNTS", mounts)


def read_group(folder: Path) -> dict[str, str]:
    (group,) = folder.glob("magnetar-bench-*-one")
    return {each.name: each.read_text() for each in group.iterdir()}


def test_a_share_is_a_quota_of_a_control_group_of_the_first_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, tmp_path, f"cgroup {tmp_path} cgroup rw,relatime,cpu 0 0")
    share = CpuShare("one", 0.2)
    assert read_group(tmp_path) == {
        "cpu.shares": "102400", "cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "4000",
    }  # fmt: skip
    (next(tmp_path.glob("magnetar-bench-*-one")) / "cpu.stat").write_text(
        "nr_periods 32\nnr_throttled 30\nthrottled_time 5\n"
    )
    assert share.count_throttled() == (32, 30)


def test_a_share_is_a_limit_of_a_control_group_of_the_second_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    mounted(monkeypatch, tmp_path, f"cgroup2 {tmp_path} cgroup2 rw 0 0")
    CpuShare("one", 0.2)
    assert read_group(tmp_path) == {"cpu.weight": "10000", "cpu.max": "4000 20000"}
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"


def test_what_has_no_share_has_a_group_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, tmp_path, f"cgroup {tmp_path} cgroup rw,cpu 0 0")
    CpuShare("one")
    assert read_group(tmp_path)["cpu.cfs_quota_us"] == "-1"


@pytest.mark.parametrize("line", ["", "cgroup2 {folder} cgroup2 rw 0 0", "cgroup /nowhere/at/all cgroup rw,cpu 0 0"])
def test_where_no_share_of_the_cpu_can_be_given_the_benchmark_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """No control groups; none with the controller of the CPU; one in which this user may make none."""
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    mounted(monkeypatch, tmp_path, line.format(folder=tmp_path))
    with pytest.raises(NoCpuShare, match="control group"):
        CpuShare("one", 0.2)


def test_the_value_is_the_smaller_ratio_and_it_is_said_whether_the_brokers_were_the_limit() -> None:
    def turn(rate: float, used: float, other: float = 0.3, brokers: int = 1) -> Turn:
        return Turn(rate, 50.0, [used] * brokers, [0.9] * brokers, other, 0)

    turns = {
        "unbatched": {1: [turn(100, 1.0), turn(110, 0.99)], 2: [turn(210, 0.98), turn(220, 0.97)]},
        "batches-of-10": {1: [turn(1000, 1.0)] * 2, 2: [turn(1800, 0.96, brokers=2)] * 2},
    }
    assert turns.keys() == MODES.keys()
    run = two_brokers._summary(turns, [{"moves": 0}])
    assert (run.value, run.detail["unbatched"]["ratio"], run.detail["batches-of-10"]["ratio"]) == (1.8, 2.05, 1.8)
    assert run.detail["batches-of-10"]["2"]["used"] == [0.96, 0.96]
    assert run.detail["limited"] is True
    turns["unbatched"][2] = [turn(210, 0.9)] * 2
    assert two_brokers._summary(turns, [{}]).detail["limited"] is False, "a broker had time left"
    turns["unbatched"][2] = [turn(210, 1.0, other=0.97), turn(210, 1.0)]
    assert two_brokers._summary(turns, [{}]).detail["limited"] is False, "another process used a whole core"
