"""Loads of ours run against a real server for a moment; what they tell is a rate and latencies. No figure is judged."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import Server, server
from benchmarks.peers import receives, sends
from benchmarks.peers.apart import Apart, Together
from benchmarks.peers.turns import Figures, Load
from tests import layout

pytestmark = pytest.mark.processes

SECONDS = 0.2


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server() as started:
        yield started


def _turn(load: Load) -> Figures:
    try:
        return load.turn(0, SECONDS)
    finally:
        load.close()  # type: ignore[attr-defined]


def test_batches_and_half_of_their_rate(running: Server) -> None:
    for load in (sends.Produce(running.url, 100), sends.Half(running.url, 100, SECONDS)):
        found = _turn(load)
        assert found["msg_s"] > 0
        assert 0 < found["p50_ms"] <= found["p99_ms"]


@pytest.mark.parametrize("api", ["magnetar", "pulsar"])
def test_single_sends_by_either_client(running: Server, api: str) -> None:
    url = running.url if api == "magnetar" else running.pulsar_url
    for load in (sends.Singles(api, url, 100, 50.0), sends.Small(api, url, 100, ["small-a", "small-b"])):
        found = _turn(load)
        assert found["msg_s"] > 0
        assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_backlogs_are_read_to_their_end_by_each_turn(running: Server) -> None:
    for load in (receives.CatchUp(running.url, 100, 640), receives.Shared(running.url, 100, 640)):
        load.turn(1, SECONDS)
        assert _turn(load)["msg_s"] > 0


def test_a_producer_and_a_consumer_in_processes_of_their_own(running: Server) -> None:
    with Apart(sends.Produce, running.url, 100, "roundtrip") as producer, Apart(receives.Receive, running.url) as reads:
        found = Together(producer, reads).turn(0, SECONDS)
    assert found["msg_s"] > 0
    assert found["produced_msg_s"] > 0


@pytest.mark.skipif(
    importlib.util.find_spec("confluent_kafka") is None
    or not (layout.ROOT / ".venv" / "kafka-4.3.1" / ".complete").exists(),
    reason="`make peers` brings Kafka",
)
def test_the_command_with_a_real_kafka(tmp_path: Path) -> None:
    written = tmp_path / "ratios.json"
    words = ["--rows", "shared", "--rounds", "1", "--seconds", "0.2", "--pause", "0", "--messages", "6400"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *words, "--json", str(written)],
        cwd=layout.ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [row] = json.loads(written.read_text())["rows"]
    assert {side: len(turns) for side, turns in row["sides"].items()} == {"magnetar": 1, "Kafka, share group": 1}
    assert "| shared | " in done.stdout
