"""`magnetar bench`: it measures what it says, tells what a confirmation means, and leaves nothing."""

import asyncio
import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.cli import bench
from magnetar.client.common.errors import Result
from tests.support.processes import run_here

Cli = Callable[..., Any]


def test_percentiles_are_of_all_samples() -> None:
    found = bench.compute_latency_percentiles(array("d", [each / 1000 for each in range(1, 1001)]))
    assert found == {"p50Ms": 501.0, "p90Ms": 901.0, "p99Ms": 991.0, "p999Ms": 1000.0, "maxMs": 1000.0}
    assert bench.compute_latency_percentiles(array("d")) == {}


class _Slow:
    """A producer that confirms everything after a pause."""

    def __init__(self, pause_s: float, result: Result) -> None:
        self.sent: list[bytes] = []
        self._pause_s, self._result = pause_s, result

    def send_nowait(self, payload: bytes, callback: Callable[[Result, None], None]) -> None:
        self.sent.append(payload)
        asyncio.get_running_loop().call_later(self._pause_s, callback, self._result, None)

    async def flush(self) -> None:
        await asyncio.sleep(self._pause_s * 2)


def _sent(
    rate: float | None, most: int, pause_s: float = 0.01, result: Result = Result.Ok
) -> tuple[_Slow, bench.EventCounts]:
    async def run() -> tuple[_Slow, bench.EventCounts]:
        slow, tally = _Slow(pause_s, result), bench.EventCounts()
        await bench.BenchSender(slow, 32, rate, tally).run(bench.now() + 60, most)  # type: ignore[arg-type]
        return slow, tally

    return asyncio.run(run())


def test_a_rate_is_a_schedule_and_latencies_count_from_it() -> None:
    slow, tally = _sent(1000.0, 50)
    due = [bench.DUE_TIME_STAMP.unpack_from(payload)[0] for payload in slow.sent]
    assert [round((at - due[0]) * 1000) for at in due] == list(range(50))
    assert {len(payload) for payload in slow.sent} == {32}
    assert min(tally.latencies_s) >= 0.01


def test_no_more_than_a_window_waits_for_its_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "UNCONFIRMED_MAX", 10)
    slow, tally = _sent(None, 35)
    assert (len(slow.sent), tally.messages) == (35, 35)
    due = [bench.DUE_TIME_STAMP.unpack_from(payload)[0] for payload in slow.sent]
    assert due[10] - due[9] >= 0.01, "the eleventh waits for a confirmation"


def test_what_is_refused_is_an_error_and_no_latency() -> None:
    _, tally = _sent(None, 5, result=Result.Timeout)
    assert (tally.messages, tally.errors, len(tally.latencies_s)) == (0, {"Timeout": 5}, 0)


@pytest.mark.processes
def test_each_bench_says_what_it_did_and_leaves_nothing(cli: Cli, cli_json: Cli) -> None:
    before = cli_json("topics", "list")
    for kind, options in (("produce", ()), ("consume", ("-n", "2000")), ("latency", ("--rate", "200"))):
        done = cli("bench", kind, "--duration", "0.5", "--size", "100", "--clients", "2", *options, "--json")
        found = json.loads(done.out)
        assert (found["bench"], found["clients"], found["size"], found["errors"]) == (kind, 2, 100, 0)
        assert found["messages"] > 0
        assert found["confirmedMeans"] == "fsync on 1 of 1 copies"
        if kind == "consume":
            assert found["messages"] >= 2000
        if kind == "latency":
            assert found["received"] == found["messages"] <= 110
            assert 0 < found["confirmedP50Ms"] <= found["confirmedMaxMs"]
            assert found["receivedP50Ms"] > 0
    assert cli_json("topics", "list") == before


@pytest.mark.processes
def test_a_topic_that_is_named_stays_and_has_the_messages(cli: Cli, cli_json: Cli) -> None:
    cli("topics", "create", "measured", "-p", "2")
    lines = cli("bench", "produce", "measured", "--duration", "2.2", "--rate", "100", "-o", "jsonl").out.splitlines()
    *seconds, found = map(json.loads, lines)
    assert [each["second"] for each in seconds] == list(range(1, max(len(seconds), 2) + 1)), "more where it stalls"
    assert any(each["messages"] for each in seconds)
    stored = sum(row["end"] - row["earliest"] for row in cli_json("topics", "offsets", "measured"))
    assert stored == found["messages"] > 150
    assert json.loads(cli("bench", "consume", "measured", "--duration", "1", "--json").out)["messages"] == stored
    assert cli_json("subscriptions", "list", "measured") == []


@pytest.mark.processes
def test_what_is_not_stored_is_said_to_be_so(cli: Cli) -> None:
    found = json.loads(
        cli("bench", "produce", "non-persistent://public/default/air", "--duration", "0.2", "--json").out
    )
    assert found["confirmedMeans"] == "nothing: the topic is not persistent"


def test_a_wrong_measure_is_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (("--size", "0"), ("--rate", "0"), ("--duration", "nan"), ("--clients", "0")):
        assert run_here("bench", "produce", *wrong).code == 2
