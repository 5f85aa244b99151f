"""The time of day of a server: a jump counts when it lasts."""

import pytest

from magnetar.runtime import clock
from magnetar.runtime.clock import CLOCK_JUMP_CONFIRM_S, CLOCK_JUMP_MIN_MS, ServerClock

DAY_MS = 86_400_000


class Machine:
    """The two clocks of the operating system."""

    def __init__(self) -> None:
        self.wall, self.up = 1_700_000_000_000, 1000.0

    def time_ns(self) -> int:
        return self.wall * 1_000_000

    def monotonic(self) -> float:
        return self.up

    def run(self, seconds: float) -> None:
        self.wall += int(1000 * seconds)
        self.up += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clock, "time", machine)
    return machine


@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS, CLOCK_JUMP_MIN_MS, -CLOCK_JUMP_MIN_MS])
def test_a_jump_that_is_taken_back_never_counts(
    machine: Machine, jump_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    told = ServerClock()
    right = machine.wall
    machine.wall += jump_ms
    for _ in range(int(CLOCK_JUMP_CONFIRM_S) - 1):
        machine.run(1)
        assert told.wall_ms() == machine.wall - jump_ms
    machine.wall -= jump_ms
    assert told.wall_ms() == machine.wall == right + 1000 * (int(CLOCK_JUMP_CONFIRM_S) - 1)
    assert [each.levelname for each in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS])
def test_a_jump_that_lasts_counts(machine: Machine, jump_ms: int) -> None:
    told = ServerClock()
    machine.wall += jump_ms
    assert told.wall_ms() == machine.wall - jump_ms
    machine.run(CLOCK_JUMP_CONFIRM_S)
    assert told.wall_ms() == machine.wall
    machine.run(1)
    assert told.wall_ms() == machine.wall


def test_what_a_time_daemon_corrects_counts_at_once_however_often(machine: Machine) -> None:
    told = ServerClock()
    for step in (CLOCK_JUMP_MIN_MS - 1, 1 - CLOCK_JUMP_MIN_MS, 500, -500) * 10:
        machine.wall += step
        assert told.wall_ms() == machine.wall
        machine.run(0.5)


def test_an_idle_server_is_no_jump(machine: Machine) -> None:
    told = ServerClock()
    machine.run(100_000)
    machine.wall += 5000  # drifted meanwhile
    assert told.wall_ms() == machine.wall
