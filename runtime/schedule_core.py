"""The decisions of the parent of a server's processes: which one it starts, ends, and starts again, and when.

    schedule = ProcessSchedule([["storage"], ["broker-1", "broker-2"]])     tiers: each needs those before it
    effects = schedule.start(now)                                ForkProcess for the first tier
    effects = schedule.on_process_ready("storage", now)          ForkProcess for the next tier; after the last tier
                                                                 ReportServing
    effects = schedule.on_process_exited("broker-2", code, now)  a later `tick` returns the next ForkProcess
    effects = schedule.stop(code, now)                           TerminateProcess, the last tier first; at the end Exit
    effects = schedule.tick(now)                                 the effects that are due, at `next_timer_at` or later

| a process | ends | then |
|---|---|---|
| before all have served | with any code | the others are stopped, and its code is the server's: it cannot start |
| later, after STABLE_AFTER_S | the same, with any code | it is started again at once; the others go on |
| later, sooner than that | the same | after RESTART_PAUSE_MIN_S, then twice as long, up to RESTART_PAUSE_MAX_S |
| that has to stop | | it is not started again; when its whole tier has ended the tier before it is stopped |
| that has to stop | not within CHILD_STOP_TIMEOUT_S, or its own time for that | KillProcess |

`code` is an exit code, or 128 plus the number of the signal. Guards: tests/runtime/test_schedule.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

RESTART_PAUSE_MIN_S = 0.5
RESTART_PAUSE_MAX_S = 30.0
STABLE_AFTER_S = 10.0
"""Seconds after which a process that runs is sound: if it ends later, that is a new failure, not the last one again."""
CHILD_STOP_TIMEOUT_S = 15.0
"""Seconds for an end in order: half as long again as a part of a process has (runtime/process.py)."""


class ForkProcess(NamedTuple):
    """Effect: start the process."""

    name: str


class TerminateProcess(NamedTuple):
    """Effect: ask the process to end (SIGTERM)."""

    name: str


class KillProcess(NamedTuple):
    """Effect: end the process at once (SIGKILL)."""

    name: str


class ReportServing(NamedTuple):
    """Effect: report that all processes serve; returned once."""


class Exit(NamedTuple):
    """Effect: end the parent with the exit code `code`, because all processes have ended."""

    code: int


ProcessEffect = ForkProcess | TerminateProcess | KillProcess | ReportServing | Exit


class ProcessState(enum.Enum):
    """The state of one process of the server; the values describe the states."""

    DOWN = "not started yet, or it waits for its next start"
    STARTING = "it runs and does not serve yet"
    SERVING = "it serves"
    STOPPING = "it was told to end"
    OVER = "it ended and is not started again"


class ManagedProcess:
    """One process of the server as the schedule sees it: its state and its restarts. `due`: when it is started again,
    or killed, if it is to be; None otherwise. `stop_s`: the seconds that it has for its end. `began`: when it was
    started last. Times are monotonic seconds."""

    def __init__(self, name: str, stop_s: float) -> None:
        self.name = name
        self.stop_s = stop_s
        self.state = ProcessState.DOWN
        self.began = 0.0
        self.due: float | None = None  # of its next start, or of its Kill
        self.pause_s = 0.0  # before its next start, if it is not sound by then
        self.restarts = 0

    @property
    def is_running(self) -> bool:
        """Returns whether the process was started and has not ended."""
        return self.state in (ProcessState.STARTING, ProcessState.SERVING, ProcessState.STOPPING)


class ProcessSchedule:
    """Decides when the parent starts, restarts and stops the processes of a server. The head of this module states the
    rules. All methods that take `now`, the monotonic time in seconds, return the effects that the caller must carry
    out, in order."""

    def __init__(self, tiers: Sequence[Sequence[str]], stop_s: Mapping[str, float] = MappingProxyType({})) -> None:
        """Creates the schedule. `tiers`: the names of the processes. `stop_s`: by process, how many seconds it has for
        its end, if not CHILD_STOP_TIMEOUT_S."""
        self._tiers = [
            [ManagedProcess(name, stop_s.get(name, CHILD_STOP_TIMEOUT_S)) for name in tier] for tier in tiers
        ]
        self._by_name = {each.name: each for tier in self._tiers for each in tier}
        self._served = False
        self._code: int | None = None  # of the whole server, once it stops
        assert len(self._by_name) == sum(map(len, tiers)), "the names of processes are distinct"

    # ------------------------------------------------------------------ facts
    def start(self, now: float) -> list[ProcessEffect]:
        """Starts the processes of the first tier. Called once."""
        return self._start_members(self._tiers[0], now)

    def on_process_ready(self, name: str, now: float) -> list[ProcessEffect]:
        """Fact: a process serves. When its whole tier serves, the next tier is started; after the last tier, returns
        ReportServing, once. Otherwise returns []."""
        member = self._by_name[name]
        if member.state is not ProcessState.STARTING:
            return []  # it was told to end meanwhile
        member.state = ProcessState.SERVING
        if self._served:
            return []
        for tier in self._tiers:
            if any(each.state is ProcessState.DOWN for each in tier):
                return self._start_members(tier, now)
            if any(each.state is ProcessState.STARTING for each in tier):
                return []
        self._served = True
        return [ReportServing()]

    def on_process_exited(self, name: str, code: int, now: float) -> list[ProcessEffect]:
        """Fact: a running process has ended with this exit code. Before all processes have served, all others are
        stopped. Later, it is started again, at once or when it is due. While the server stops, the next tier is stopped
        when this one has ended."""
        member = self._by_name[name]
        assert member.is_running, f"{name} ends, and did not run"
        if self._code is not None:
            member.state, member.due = ProcessState.OVER, None
            return self._stop_next(now)
        if not self._served:
            member.state = ProcessState.OVER
            return self.stop(code or 1, now)
        member.state = ProcessState.DOWN
        if now - member.began >= STABLE_AFTER_S:
            member.pause_s = 0.0
        member.due = now + member.pause_s
        member.pause_s = min(RESTART_PAUSE_MAX_S, max(RESTART_PAUSE_MIN_S, 2 * member.pause_s))
        member.restarts += 1
        return self.tick(now)

    def stop(self, code: int, now: float) -> list[ProcessEffect]:
        """Begins to stop all processes. `code` will be the exit code of the server. Returns [] if it stops already."""
        if self._code is not None:
            return []
        self._code = code
        for member in self._by_name.values():
            if member.state is ProcessState.DOWN:
                member.state, member.due = ProcessState.OVER, None
        return self._stop_next(now)

    def tick(self, now: float) -> list[ProcessEffect]:
        """Returns the effects that are due at `now`: processes to start again, and processes to kill."""
        effects: list[ProcessEffect] = []
        for member in self._by_name.values():
            if member.due is None or member.due > now:
                continue
            member.due = None
            if member.state is ProcessState.DOWN:
                effects += self._start_members([member], now)
            elif member.state is ProcessState.STOPPING:
                effects.append(KillProcess(member.name))
        return effects

    # ------------------------------------------------------------------ what is known
    @property
    def next_timer_at(self) -> float | None:
        """Returns the time at which `tick` must be called next; None if it need not be called before another event."""
        return min((each.due for each in self._by_name.values() if each.due is not None), default=None)

    @property
    def is_stopping(self) -> bool:
        """Returns whether all processes are to end."""
        return self._code is not None

    @property
    def restarts(self) -> dict[str, int]:
        """How many times each process was restarted, by its name."""
        return {name: member.restarts for name, member in self._by_name.items()}

    @property
    def serving(self) -> list[str]:
        """The names of the processes that serve now."""
        return [name for name, member in self._by_name.items() if member.state is ProcessState.SERVING]

    def restart_wait_s(self, name: str, now: float) -> float | None:
        """Returns the seconds until the process will be restarted; None if it runs, or will not be restarted."""
        member = self._by_name[name]
        return None if member.state is not ProcessState.DOWN or member.due is None else max(0.0, member.due - now)

    def check(self) -> None:
        """Raises AssertionError if an invariant of the schedule is broken."""
        for member in self._by_name.values():
            assert member.due is None or member.state in (ProcessState.DOWN, ProcessState.STOPPING), (
                "what is due has a reason"
            )
            assert self._code is None or member.state is not ProcessState.DOWN, "nothing waits for a start at the end"
            assert not self._served or self._code is not None or member.state is not ProcessState.OVER, (
                "nothing is given up"
            )
            assert member.pause_s <= RESTART_PAUSE_MAX_S, "the pause has a bound"

    # ------------------------------------------------------------------ steps
    def _start_members(self, members: Iterable[ManagedProcess], now: float) -> list[ProcessEffect]:
        effects: list[ProcessEffect] = []
        for member in members:
            member.state, member.began, member.due = ProcessState.STARTING, now, None
            effects.append(ForkProcess(member.name))
        return effects

    def _stop_next(self, now: float) -> list[ProcessEffect]:
        assert self._code is not None
        for tier in reversed(self._tiers):
            if not any(each.is_running for each in tier):
                continue
            effects: list[ProcessEffect] = []
            for member in tier:
                if member.state in (ProcessState.STARTING, ProcessState.SERVING):
                    member.state, member.due = ProcessState.STOPPING, now + member.stop_s
                    effects.append(TerminateProcess(member.name))
            return effects
        return [Exit(self._code)]
