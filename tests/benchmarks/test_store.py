"""The store's benchmarks as commands, with sizes that take seconds; store-latency alone needs half a minute."""

from tests.benchmarks.test_harness import run_json


def test_many_ledgers_are_restarted_and_measured() -> None:
    result = run_json("store-many", "--ledgers", "3000", "--runs", "1")
    assert (result["unit"], result["detail"]["ledgers"]) == ("s", 3000)
    assert 0 < result["value"] < 10


def test_garbage_is_collected_and_what_lives_is_counted() -> None:
    result = run_json("store-gc", "--mib", "24", "--ledgers", "100", "--runs", "1")
    detail = result["detail"]
    assert abs(result["value"] - detail["log_bytes"] / detail["live_bytes"]) < 0.01
    assert 1.0 <= result["value"] <= 1.3
    assert detail["disk_after"] < detail["disk_before"]


def test_reads_are_compared_with_raw_reads_of_the_file() -> None:
    large = run_json("store-read", "--mib", "32", "--runs", "1")
    assert large["unit"] == "ratio"
    assert large["value"] > 0
    small = run_json("store-read-small", "--mib", "8", "--runs", "1")
    assert small["unit"] == "entries/s"
    assert small["value"] > 1000


def test_adds_go_over_a_socket_into_a_process_of_their_own() -> None:
    result = run_json("store-add", "--size", "1024", "--seconds", "0.3", "--runs", "1")
    assert result["unit"] == "entries/s"
    assert result["value"] > 100
    assert set(result["processes"]) == {"client", "bookie"}
