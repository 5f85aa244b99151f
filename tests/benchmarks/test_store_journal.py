"""The journal's benchmarks as commands, with sizes that take no time."""

from tests.benchmarks.test_harness import run_json


def test_replay_reads_back_all_that_was_written() -> None:
    result = run_json("store-replay", "--mib", "4", "--size", "1000", "--runs", "2")
    assert result["unit"] == "MB/s"
    assert len(result["runs"]) == 2
    assert result["options"]["mib"] == 4
    detail = result["detail"]
    assert detail["journal_bytes"] >= 4 << 20
    assert detail["records"] * 1000 <= detail["journal_bytes"] <= detail["records"] * 1300


def test_the_journal_is_compared_with_raw_writes_of_each_size() -> None:
    result = run_json("store-journal", "--seconds", "0.05", "--runs", "1")
    assert result["unit"] == "ratio"
    detail = result["detail"]
    assert list(detail) == ["4096", "131072", "1048576"]
    assert result["value"] > 0
    assert all(each["mb_s"].keys() == {"sync", "direct", "journal", "journal, not direct"} for each in detail.values())
    for each in detail.values():
        best = max(each["mb_s"]["sync"], each["mb_s"]["direct"])
        assert abs(each["ratio"] - each["mb_s"]["journal"] / best) < 0.05 * each["ratio"]
