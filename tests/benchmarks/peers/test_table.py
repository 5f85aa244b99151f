"""Ratios of the peers: how they are taken from rounds, the table, the file, the picture, the command without peers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.peers import table
from benchmarks.peers.__main__ import main
from benchmarks.peers.maven import Missing
from benchmarks.peers.rows import MSG_S, OURS, PERF, PULSAR, ROWS, Plan, Row, Side
from benchmarks.peers.servers import Servers
from benchmarks.peers.slow import NAME, slow_down
from benchmarks.peers.turns import Figures, Load, Turn, Turns
from tests import layout


def _turns(*sides: tuple[str, list[tuple[Figures, float]]]) -> Turns:
    return Turns({name: [Turn(figures, stolen, 4.0) for figures, stolen in taken] for name, taken in sides})


def _record(name: str, turns: Turns, missing: dict[str, str] | None = None) -> table.Record:
    return table.record(name, Plan(rounds=3), turns, missing or {})


SMALL = _turns(
    (OURS, [({"msg_s": 9.0}, 0.1), ({"msg_s": 8.0}, 0.3), ({"msg_s": 20.0}, 0.2)]),
    (PULSAR, [({"msg_s": 3.0}, 1.0), ({"msg_s": 4.0}, 9.0), ({"msg_s": 5.0}, 2.0)]),
)
LATENCY = _turns(
    (OURS, [({"p50_ms": 1.0, "p99_ms": 2.0}, 0.0), ({"p50_ms": 1.0, "p99_ms": 3.0}, 0.0)]),
    (PULSAR, [({"p50_ms": 2.0, "p99_ms": 8.0}, 0.0), ({"p50_ms": 4.0, "p99_ms": 4.0}, 0.0)]),
    (PERF, [({"p50_ms": 1.0, "p99_ms": 4.0}, 0.0)]),
)


def test_a_ratio_is_of_the_turns_of_one_round_and_the_median_of_the_rounds() -> None:
    [small] = table.ratios([_record("small-sends", SMALL)])
    assert (small.ratio, small.low, small.high, small.rounds) == (3.0, 2.0, 4.0, 3)
    assert (small.ours, small.theirs, small.stolen) == (9.0, 4.0, (0.2, 2.0))
    assert small.better == (3.0, 2.0, 4.0)


def test_less_latency_is_better_and_a_side_with_fewer_rounds_is_compared_in_those() -> None:
    found = list(table.ratios([_record("latency", LATENCY)]))
    assert [(each.peer, each.unit) for each in found] == [
        (PULSAR, "p50 ms"), (PERF, "p50 ms"), (PULSAR, "p99 ms"), (PERF, "p99 ms"),
    ]  # fmt: skip
    p99 = found[2]
    assert (p99.ratio, p99.low, p99.high) == (0.5, 0.25, 0.75)
    assert p99.better == (2.0, 1 / 0.75, 4.0)
    assert found[3].rounds == 1


def test_the_table_has_the_stolen_time_and_names_what_is_missing_or_failed() -> None:
    failed = _turns((OURS, [({"rows_s": 5.0}, 0.0)]))
    failed.failed = {"Spark's Kafka connector": "Failed: Traceback (most recent call last):\n  File\nOSError: full"}
    records = [_record("small-sends", SMALL), _record("spark-read", failed, {PULSAR: "java is missing"})]
    lines = table.as_table(records).splitlines()
    assert lines[2] == (
        "| small-sends | 50 producers of one client, one send after another, default settings | Pulsar, Python client "
        "| 9.00 | 4.00 | messages/s | **3.00** | 2.00 – 4.00 (3) | 0.2 %, 2.0 % |"
    )
    assert {line.count("|") for line in lines[:3]} == {10}
    assert lines[3] == ""
    assert "3 rounds of 10 s, 3 s of pause" in lines[4]
    assert lines[-3:] == [
        "In the pauses before the turns the processors were busy for 4 % of the time, at most 4 %.",
        "- spark-read, Pulsar, Python client is missing: java is missing",
        "- spark-read, Spark's Kafka connector failed: OSError: full",
    ]


def test_a_very_small_ratio_is_not_rounded_to_nothing() -> None:
    turns = _turns((OURS, [({"p50_ms": 2.0, "p99_ms": 2.0}, 0.0)]), (PERF, [({"p50_ms": 5000.0, "p99_ms": 9.0}, 0.0)]))
    assert "| **0.0004** | 0.0004 – 0.0004 (1) |" in table.as_table([_record("latency", turns)])


def test_rows_that_are_measured_anew_replace_the_old_ones_of_a_file(tmp_path: Path) -> None:
    old, path = [_record("latency", LATENCY), _record("small-sends", SMALL)], tmp_path / "ratios.json"
    path.write_text(table.as_json(old))
    now = _record("latency", Turns())
    merged = table.merged(table.stored(path), [now])
    assert [each["row"] for each in merged] == ["small-sends", "latency"], "the order of the rows"
    assert merged[1] == now
    assert table.stored(tmp_path / "absent.json") == []
    path.write_text('{"benchmark": "produce"}')
    with pytest.raises(ValueError, match="not a result of"):
        table.stored(path)


def test_the_picture_has_every_ratio_and_the_same_ratios_make_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    from benchmarks.peers.plot import as_plot

    found = list(table.ratios([_record("small-sends", SMALL), _record("latency", LATENCY)]))
    pictures = []
    for name in ("one.svg", "two.svg"):
        as_plot(found, str(tmp_path / name))
        pictures.append((tmp_path / name).read_text())
    assert pictures[0] == pictures[1]
    for each in ("small-sends, messages/s | Pulsar, Python client", "latency, p99 ms | Pulsar, pulsar-perf", "3.00×"):
        assert f"<!-- {each} -->" in pictures[0], each


# ------------------------------------------------------------------------------------------ the command
class Constant:
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def turn(self, number: int, seconds: float) -> Figures:
        return self._figures


def _gives(rate: float) -> Any:
    return lambda servers, plan: Constant({"msg_s": rate})


def _absent(servers: Servers, plan: Plan) -> Load:
    raise Missing("mvn is missing: install Maven")


def _breaks(servers: Servers, plan: Plan) -> Load:
    raise OSError("no space on the disk")


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the sides of the row small-sends."""

    def replace(*made: Side) -> None:
        monkeypatch.setitem(ROWS, "small-sends", Row("of a test", (MSG_S,), made))

    return replace


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["--rows", "small-sends", "--rounds", "2", "--pause", "0", *arguments])


def test_a_row_is_measured_and_written(sides: Any, tmp_path: Path) -> None:
    sides(Side(OURS, _gives(30)), Side(PULSAR, _gives(10)))
    files = [tmp_path / name for name in ("ratios.json", "ratios.md")]
    done = _run("--json", str(files[0]), "--table", str(files[1]))
    assert done.exit_code == 0, done.output
    assert "| **3.00** | 3.00 – 3.00 (2) |" in done.stdout
    assert "round 2/2, Pulsar, Python client: msg_s 10.00" in done.stderr
    assert files[1].read_text().strip() == done.stdout.strip()
    told = json.loads(files[0].read_text())
    assert (told["benchmark"], told["ratios"][0]["ratio"]) == ("peers", 3.0)
    again = CliRunner().invoke(main, ["--rows", "", "--json", str(files[0])])
    assert (again.exit_code, again.stdout) == (0, done.stdout), "the table of what is there"


def test_a_missing_peer_is_named_and_the_rest_is_measured(sides: Any) -> None:
    sides(Side(OURS, _gives(30)), Side(PULSAR, _absent), Side(PERF, _gives(15)))
    done = _run()
    assert done.exit_code == 1
    assert "| **2.00** |" in done.stdout
    assert "- small-sends, Pulsar, Python client is missing: mvn is missing: install Maven" in done.stdout


def test_a_side_that_does_not_start_is_named_and_nothing_is_compared_with_it(sides: Any) -> None:
    sides(Side(OURS, _breaks), Side(PULSAR, _gives(1)))
    done = _run()
    assert done.exit_code == 1
    assert "- small-sends, magnetar failed: OSError: no space on the disk" in done.stdout
    assert "round" not in done.stderr, "a peer alone is no comparison"


def test_results_in_the_repository_are_of_this_command() -> None:
    folder = layout.ROOT / "benchmarks" / "results" / "peers"
    records = table.stored(folder / "ratios.json")
    rows = {each["row"] for each in records}
    assert rows
    assert rows <= set(ROWS), "those that were measured: a row of an earlier tree goes"
    assert (folder / "ratios.md").read_text() == table.as_table(records) + "\n"
    assert (folder / "ratios.json").read_text() == table.as_json(records)


def test_a_machine_that_is_slowed_down_is_said() -> None:
    slow = table.record("small-sends", Plan(rounds=3, cores=1.0), SMALL, {})
    assert "Measured on the time of 1 of " in table.as_table([slow])
    del slow["options"]["cores"]
    assert "the time of" not in table.as_table([slow])


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_of_a_slowed_machine_has_its_share(version: int, tmp_path: Path) -> None:
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpu")
    else:
        (tmp_path / "cpu").mkdir()
    slow_down(1.5, tmp_path)
    group = tmp_path / ("" if version == 2 else "cpu") / NAME
    found = {each.name: each.read_text() for each in group.iterdir()}
    assert found.pop("cgroup.procs") == str(os.getpid())
    assert found == (
        {"cpu.max": "15000 10000"} if version == 2 else {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "15000"}
    )
