"""The journal's benchmarks as commands, with sizes that take no time."""

from __future__ import annotations

from tests.benchmarks.test_harness import run_json


def test_replay_reads_back_all_that_was_written() -> None:
    result = run_json("store-replay", "--mib", "4", "--size", "1000", "--runs", "2")
    assert result["unit"] == "MB/s"
    assert len(result["runs"]) == 2
    assert result["options"]["mib"] == 4
    detail = result["detail"]
    assert detail["journal_bytes"] >= 4 << 20
    assert detail["records"] * 1000 <= detail["journal_bytes"] <= detail["records"] * 1300
