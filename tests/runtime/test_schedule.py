"""What the parent of several processes does next: facts and effects; and at random, with its invariants."""

import random

import pytest

from magnetar.runtime.schedule_core import (
    CHILD_STOP_TIMEOUT_S,
    RESTART_PAUSE_MAX_S,
    RESTART_PAUSE_MIN_S,
    STABLE_AFTER_S,
    Exit,
    ForkProcess,
    KillProcess,
    ProcessEffect,
    ProcessSchedule,
    ReportServing,
    TerminateProcess,
)

TIERS = [["storage"], ["b1", "b2"]]


def _serving(now: float = 0.0) -> ProcessSchedule:
    schedule = ProcessSchedule(TIERS)
    schedule.start(now)
    for name in ("storage", "b1", "b2"):
        schedule.on_process_ready(name, now)
    return schedule


def test_a_tier_is_started_once_the_one_before_it_serves() -> None:
    schedule = ProcessSchedule(TIERS)
    assert schedule.start(0.0) == [ForkProcess("storage")]
    assert schedule.on_process_ready("storage", 0.1) == [ForkProcess("b1"), ForkProcess("b2")]
    assert schedule.on_process_ready("b2", 0.2) == []
    assert schedule.on_process_ready("b1", 0.3) == [ReportServing()]
    assert schedule.serving == ["storage", "b1", "b2"]


@pytest.mark.parametrize("code", [0, 1, 5, 137])
def test_a_process_that_ends_before_all_serve_ends_the_server_with_its_code(code: int) -> None:
    schedule = ProcessSchedule(TIERS)
    schedule.start(0.0)
    schedule.on_process_ready("storage", 0.0)
    assert schedule.on_process_exited("b1", code, 0.1) == [TerminateProcess("b2")]
    assert schedule.on_process_exited("b2", 0, 0.2) == [TerminateProcess("storage")]
    assert schedule.on_process_exited("storage", 0, 0.3) == [Exit(code or 1)]


def test_a_process_that_was_sound_is_started_again_at_once_and_the_others_go_on() -> None:
    schedule = _serving()
    assert schedule.on_process_exited("b1", 137, STABLE_AFTER_S) == [ForkProcess("b1")]
    assert schedule.on_process_ready("b1", STABLE_AFTER_S + 1) == [], "the ready line comes once"
    assert schedule.restarts == {"storage": 0, "b1": 1, "b2": 0}


def test_one_that_ends_at_once_again_and_again_waits_longer_each_time_up_to_a_bound() -> None:
    schedule, now, waits = _serving(), 0.0, []
    assert schedule.on_process_exited("b1", 1, now) == [ForkProcess("b1")], "the first misfortune costs no wait"
    for _ in range(9):
        assert schedule.on_process_exited("b1", 1, now) == []
        at = schedule.next_timer_at
        assert at is not None
        assert schedule.tick(at - 0.01) == []
        assert schedule.tick(at) == [ForkProcess("b1")]
        waits.append(at - now)
        now = at
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert (waits[0], waits[-1]) == (RESTART_PAUSE_MIN_S, RESTART_PAUSE_MAX_S)
    now += STABLE_AFTER_S
    assert schedule.on_process_exited("b1", 1, now) == [ForkProcess("b1")], "then it was sound"


def test_a_stop_ends_the_last_tier_first_and_starts_nothing_again() -> None:
    schedule = _serving()
    schedule.on_process_exited("b1", 1, 1.0)
    schedule.on_process_exited("b1", 1, 1.0)  # it waits for its next start
    assert schedule.stop(0, 2.0) == [TerminateProcess("b2")]
    assert schedule.stop(130, 2.0) == [], "the first one counts"
    assert schedule.tick(3.0) == []
    assert schedule.on_process_exited("b2", 0, 3.0) == [TerminateProcess("storage")]
    assert schedule.on_process_exited("storage", 9, 4.0) == [Exit(0)]
    assert schedule.next_timer_at is None


def test_one_that_does_not_end_in_time_is_killed() -> None:
    schedule = _serving()
    assert schedule.stop(0, 0.0) == [TerminateProcess("b1"), TerminateProcess("b2")]
    assert schedule.on_process_exited("b1", 0, 1.0) == []
    assert schedule.tick(CHILD_STOP_TIMEOUT_S) == [KillProcess("b2")]
    assert schedule.tick(CHILD_STOP_TIMEOUT_S + 1) == []
    assert schedule.on_process_exited("b2", 137, CHILD_STOP_TIMEOUT_S + 1) == [TerminateProcess("storage")]


def test_a_process_with_its_own_time_to_end_is_killed_after_that() -> None:
    schedule = ProcessSchedule([["storage", "broker"]], {"broker": CHILD_STOP_TIMEOUT_S + 10})
    schedule.start(0.0)
    schedule.stop(0, 0.0)
    assert schedule.tick(CHILD_STOP_TIMEOUT_S) == [KillProcess("storage")]
    assert schedule.next_timer_at == CHILD_STOP_TIMEOUT_S + 10
    assert schedule.tick(CHILD_STOP_TIMEOUT_S + 10) == [KillProcess("broker")]


class Walk:
    """Facts at random, and who runs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.schedule = ProcessSchedule(TIERS)
        self.running: set[str] = set()
        self.exits: list[int] = []
        self.now = 0.0

    def do(self, effects: list[ProcessEffect]) -> None:
        for effect in effects:
            match effect:
                case ForkProcess(name):
                    assert name not in self.running
                    self.running.add(name)
                case TerminateProcess(name) | KillProcess(name):
                    assert name in self.running
                case Exit(code):
                    assert not self.running
                    self.exits.append(code)
                case ReportServing():
                    assert self.running == {"storage", "b1", "b2"}
        self.schedule.check()

    def end(self, name: str) -> None:
        self.running.discard(name)
        self.do(self.schedule.on_process_exited(name, self.rng.choice((0, 1, 137)), self.now))

    def step(self, *, may_stop: bool) -> None:
        self.now += self.rng.expovariate(1.0)
        if self.running and self.rng.random() < 0.4:
            self.end(self.rng.choice(sorted(self.running)))
        elif self.running and self.rng.random() < 0.7:
            self.do(self.schedule.on_process_ready(self.rng.choice(sorted(self.running)), self.now))
        elif may_stop:
            self.do(self.schedule.stop(0, self.now))
        if not self.exits:
            self.do(self.schedule.tick(self.now))


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_no_process_runs_twice_and_a_stop_comes_to_its_end(seed: int) -> None:
    walk = Walk(seed)
    walk.do(walk.schedule.start(0.0))
    for step in range(60):
        walk.step(may_stop=step > 40)
    if not walk.exits:
        walk.do(walk.schedule.stop(0, walk.now))
    while walk.running:
        walk.end(min(walk.running))
    assert len(walk.exits) == 1
