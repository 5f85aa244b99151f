"""The turns of the peers: their order, the rest before each, the stolen time, a side that fails, a load apart."""

import pytest

from benchmarks.peers import maven, sends
from benchmarks.peers.apart import Apart, Failed, Fleet, Together
from benchmarks.peers.turns import Figures, Turn, busy_percent, stolen_percent, take

BEFORE = "cpu  1748012 10413 560718 2563212 63105 0 59020 10250 0 0"
AFTER = "cpu  1748112 10413 560768 2563412 63115 0 59020 10290 0 0"


class Scripted:
    """A load that writes into a log what it is asked, and fails in one turn."""

    def __init__(self, name: str, log: list[str], fails_in: int | None = None) -> None:
        self._name, self._log, self._fails_in = name, log, fails_in

    def turn(self, number: int, seconds: float) -> Figures:
        self._log.append(f"{self._name} {number} {seconds}")
        if number == self._fails_in:
            raise RuntimeError("the connection is lost")
        return {"msg_s": 100.0 + number}


def test_the_side_that_was_last_is_first_in_the_next_round_and_each_turn_begins_with_a_rest() -> None:
    log: list[str] = []
    loads = {name: Scripted(name, log) for name in ("ours", "pulsar", "kafka")}
    turns = take(loads, rounds=2, seconds=0.5, quiet=lambda: log.append("rest") or 2.0, times=lambda: BEFORE)
    assert log[1::2] == [
        "ours 0 0.5", "pulsar 0 0.5", "kafka 0 0.5", "kafka 1 0.5", "pulsar 1 0.5", "ours 1 0.5"
    ]  # fmt: skip
    assert log[::2] == ["rest"] * 6
    assert turns.taken["kafka"] == [Turn({"msg_s": 100.0}, 0.0, 2.0), Turn({"msg_s": 101.0}, 0.0, 2.0)]
    assert turns.failed == {}


def test_a_side_that_fails_has_no_more_turns_and_the_others_go_on() -> None:
    log: list[str] = []
    loads = {"ours": Scripted("ours", log), "kafka": Scripted("kafka", log, fails_in=1)}
    turns = take(loads, rounds=3, seconds=1, quiet=lambda: 0.0, times=lambda: BEFORE)
    assert [len(taken) for taken in turns.taken.values()] == [3, 1]
    assert turns.failed == {"kafka": "turn 2: RuntimeError: the connection is lost"}
    assert "kafka 2 1" not in log


def test_stolen_time_is_a_share_of_all_time_of_the_processors() -> None:
    assert stolen_percent(BEFORE, AFTER) == pytest.approx(100 * 40 / (100 + 50 + 200 + 10 + 40))
    assert stolen_percent(BEFORE, BEFORE) == 0


def test_a_machine_is_busy_while_it_neither_idles_nor_waits_nor_is_stolen() -> None:
    assert busy_percent(BEFORE, AFTER) == pytest.approx(100 * (100 + 50) / (100 + 50 + 200 + 10 + 40))


def test_stolen_time_is_taken_around_the_turn() -> None:
    read = iter([BEFORE, AFTER])
    turns = take({"ours": Scripted("ours", [])}, rounds=1, seconds=1, quiet=lambda: 0.0, times=lambda: next(read))
    assert [each.stolen_percent for each in turns.taken["ours"]] == [10.0]


class Member(Scripted):
    """As a process that has a load: it is asked, and answers later."""

    def __init__(self, figures: Figures, log: list[str]) -> None:
        self._figures, self._log = figures, log

    def ask(self, number: int, seconds: float) -> None:
        self._log.append(f"asked for {seconds} s")

    def answer(self) -> Figures:
        self._log.append("answered")
        return self._figures


def test_a_fleet_works_at_once_and_adds_rates_up() -> None:
    log: list[str] = []
    members = [Member({"msg_s": rate, "p50_ms": rate / 10}, log) for rate in (10.0, 20.0, 60.0)]
    assert Fleet(members).turn(0, 1) == {"msg_s": 90.0, "p50_ms": 2.0}  # type: ignore[arg-type]
    assert log == ["asked for 1 s"] * 3 + ["answered"] * 3


def test_a_producer_sends_for_longer_than_its_consumer_is_measured() -> None:
    log: list[str] = []
    producer, consumer = Member({"msg_s": 50.0}, log), Member({"msg_s": 40.0, "produced_msg_s": 45.0}, log)
    before, after = (lambda n: log.append(f"topic {n}")), (lambda n: log.append(f"no topic {n}"))
    together = Together(producer, consumer, before, after)  # type: ignore[arg-type]
    assert together.turn(7, 1) == {"msg_s": 40.0, "produced_msg_s": 45.0}
    assert log == ["topic 7", "asked for 1 s", "asked for 3.0 s", "answered", "answered", "no topic 7"]


def test_what_a_load_raises_in_its_process_comes_out_with_its_traceback() -> None:
    made = Apart(sends.Small, "no_such_client", "", 1, [])
    with pytest.raises(Failed, match="No module named 'no_such_client'"), made:
        raise AssertionError("it was made")


def test_a_missing_tool_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(maven.Missing, match="java is missing: install Java 17 or later"):
        maven.tool("java")
    with pytest.raises(maven.Missing, match="mvn is missing: install Maven"):
        maven.tool("mvn")
