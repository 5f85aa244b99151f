"""The benchmarks as a tool: names, one JSON object on stdout, tables, pictures, comparisons. No figure is judged."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS, STANDARD, label
from benchmarks.harness import Options, Run, Usage, measured, percentiles, report
from benchmarks.tables import as_table, compared, ratio_line
from magnetar.proto.versions import build_kind
from tests import layout

NAMES = [
    "startup", "journal", "ledger", "produce", "roundtrip", "catchup", "latency", "idle", "recover", "recover-topics",
    "spark-read", "spark-write", "store-journal", "store-replay", "store-many", "store-add", "store-latency",
    "store-read", "store-read-small", "store-gc", "bookie-killed", "slow-bookie", "broker-killed", "rolling", "balance",
    "repair", "repair-disturb", "dedup", "topics", "holes", "shared", "key-shared", "fan-out", "stuck-key", "compact",
    "delayed", "small-sends", "secure-produce", "secure-latency", "secure-startup", "filter", "connect", "cost",
    "calls", "control", "memory", "tracing", "fair", "secure-cluster", "abuse", "pulsar-java-produce",
    "pulsar-java-consume", "pulsar-java-transaction", "pulsar-python", "rest", "scrape", "status", "page",
    "schema-spark-read", "outbox", "txn-small", "txn-large", "txn-none", "txn-aborts", "process", "find",
    "metadata", "catchup-disturb", "durability", "shares", "two-brokers",
]  # fmt: skip
"""A contract: results are compared over time."""


def _benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=layout.ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def run_json(*arguments: str) -> dict[str, Any]:
    """The one JSON object that a benchmark prints."""
    done = _benchmarks(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    """One real run: the journal, a fifth of a second, twice."""
    done = _benchmarks("journal", "--size", "4096", "--seconds", "0.2", "--runs", "2", "--seed", "7", "--json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "progress goes to stderr"
    assert done.stderr.count("journal run ") == 2
    result: dict[str, Any] = json.loads(lines[0])
    return result


def test_every_name_is_there_and_leads_to_a_function() -> None:
    assert sorted(BENCHMARKS) == sorted(NAMES)
    for name, entry in BENCHMARKS.items():
        assert callable(getattr(importlib.import_module(f"benchmarks.{entry.module}"), name.replace("-", "_")))
    assert {name for name, _ in STANDARD} == set(NAMES), "`make bench` runs them all"
    names = [label({"benchmark": name, "options": {"size": 1, "bookies": 1, **options}}) for name, options in STANDARD]
    assert len(set(names)) == len(names), "each has a file of its own"


def test_a_result_says_what_was_measured_where_and_how(tiny: dict[str, Any]) -> None:
    assert (tiny["benchmark"], tiny["unit"], tiny["seed"]) == ("journal", "MB/s", 7)
    assert len(tiny["runs"]) == 2
    assert tiny["min"] <= tiny["value"] <= tiny["max"]
    assert tiny["value"] > 0
    assert {"p50", "p99", "max"} <= tiny["latencies_ms"].keys()
    assert tiny["processes"]["client"].keys() >= {"cpu_s", "peak_rss_mb"}
    assert tiny["machine"].keys() >= {"cores", "memory_gib", "system", "python"}
    assert tiny["options"].items() >= {"size": 4096, "runs": 2, "seconds": 0.2, "bookies": 1}.items()
    assert re.fullmatch(r"[0-9a-f]{12}(\+changes)?|unknown", tiny["commit"])
    assert tiny["build"] == build_kind()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", tiny["when"])


def test_compare_prints_the_ratio_and_names_what_differs(tiny: dict[str, Any], tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps(tiny | {"value": tiny["value"] / 2, "machine": {"cores": 512}, "build": "another"}))
    arguments = ["--size", "4096", "--seconds", "0.1", "--runs", "1", "--json", "--compare", str(before)]
    done = _benchmarks("journal", *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    against = found["compared"]
    assert against["ratio"] == pytest.approx(found["value"] / (tiny["value"] / 2))
    assert against["differs"] == ["machine", "options", "build"]
    assert ratio_line(found)[-1].endswith("; not the same: machine, options, build")
    assert f"{against['ratio']:.2f} × the " in ratio_line(found)[-1]
    assert ratio_line(tiny) == []
    with pytest.raises(SystemExit, match="a result of journal, not of produce"):
        compared({**tiny, "benchmark": "produce"}, tiny)


def test_the_value_is_the_median_and_the_costs_are_of_the_run_next_to_it() -> None:
    runs = [Run(value, detail={"was": value}) for value in (5.0, 1.0, 100.0)]
    found = report("produce", "msg/s", runs, Options(seed=3))
    assert (found["value"], found["min"], found["max"], found["detail"]) == (5.0, 1.0, 100.0, {"was": 5.0})
    assert found["runs"] == [5.0, 1.0, 100.0]


def test_percentiles_are_in_milliseconds() -> None:
    found = percentiles([each / 1000 for each in range(1, 1001)])
    assert found == pytest.approx({"p50": 501, "p90": 901, "p99": 991, "p999": 1000, "max": 1000})
    assert percentiles([]) == {}


def test_what_a_process_costs_is_read_while_it_runs() -> None:
    run = Run(0.0)
    with measured(run, again=os.getpid()):
        sum(range(100_000))
    assert run.processes.keys() == {"client", "again"}
    assert Usage(os.getpid()).read()["rss_mb"] > 1


def test_a_table_has_a_line_for_each_result(tiny: dict[str, Any]) -> None:
    three = {**tiny, "options": tiny["options"] | {"bookies": 3}, "latencies_ms": {}, "processes": {}}
    lines = as_table([tiny, three]).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| journal 4096 B |")
    assert lines[3].startswith("| journal 4096 B, 3 bookies |")
    assert lines[3].endswith(f"| – | – | {tiny['commit'][:7]}, {build_kind()} |")
    older = {key: value for key, value in three.items() if key != "build"}
    assert as_table([older]).endswith(f"| {tiny['commit'][:7]} |")


def test_results_in_the_repository_are_results_of_benchmarks() -> None:
    for path in sorted((layout.ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        assert path.stem == label(result), path
        assert result["unit"] == BENCHMARKS[result["benchmark"]].unit
