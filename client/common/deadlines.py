"""Waits that end at a deadline, with one timer for all of them (`Deadlines`). Also that timer (`DueTimer`), and calls
from any thread into the event loop (`LoopCalls`).

    deadlines = Deadlines(now)
    await deadlines.wait(future, at)      returns its result; raises TimeoutError at the deadline

A time-out of asyncio starts a timer for each wait, and cancels it; for thousands of waits in a second that costs more
than the requests that are waited for. Here the timer is set to the earliest deadline of all waits. Guard:
tests/client/common/test_deadlines.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TypeVar

from .loggers import Broke, ignore_error, report_failure, run_logging_errors

# ----------------------------------------------------------------------------------------------------- due_timer
# The timer of a driver: it calls when the time has come that the driver's core waits for.
#
#     timer.arm(core.due)         an earlier time replaces a later one; a timer that fires too early finds nothing to do
#     timer.stop()
#
# The event loop rounds its timers and has a clock of its own: `reached` gets a time that is never before the one that
# it was armed for, so that it is not armed for the same time again. Guard: tests/client/common/test_due_timer.py.


class DueTimer:
    """A timer of the event loop that calls `reached(now)` when the time `at` has come."""

    __slots__ = ("_broke", "_handle", "_loop", "_now", "_reached", "at")

    def __init__(self, now: Callable[[], float], reached: Callable[[float], None], broke: Broke) -> None:
        """Must be called in the event loop. `now`: a monotonic clock, in seconds; `set_earlier` and `reached` use its
        times."""
        self.at = inf  # when it fires; inf: never
        self._now = now
        self._reached = reached
        self._broke = broke
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def set_earlier(self, due: float | None) -> None:
        """Sets the timer to `due` if that is earlier than its present time. None: changes nothing."""
        if due is None or due >= self.at:
            return
        self.stop()
        self.at = due
        self._handle = self._loop.call_later(max(0.0, due - self._now()), run_logging_errors, self._fire, self._broke)

    def _fire(self) -> None:
        at, self.at = self.at, inf
        self._reached(max(self._now(), at))

    def stop(self) -> None:
        self.at = inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


# ----------------------------------------------------------------------------------------------------- deadlines


T = TypeVar("T")


class Deadlines:
    """Ends waits in one event loop at their deadlines. `now`: a monotonic clock, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._at: dict[asyncio.Future[object], float] = {}
        self._timer = DueTimer(now, self._reached, self._broke)

    async def wait(self, future: asyncio.Future[T], at: float) -> T:
        """Waits for `future` and returns its result; raises TimeoutError at the time `at`. The future must not be
        awaited elsewhere: if the wait is cancelled, so is the future."""
        if future.done():
            return future.result()
        waiting: asyncio.Future[object] = future  # type: ignore[assignment]
        self._at[waiting] = at
        self._timer.set_earlier(at)
        try:
            return await future
        finally:
            del self._at[waiting]

    def _reached(self, now: float) -> None:
        left: list[float] = []
        for future, at in self._at.items():
            if future.done():
                continue
            if at <= now:
                future.set_exception(TimeoutError())
            else:
                left.append(at)
        if left:
            self._timer.set_earlier(min(left))

    def _broke(self, error: Exception) -> None:
        for future in self._at:
            if not future.done():
                future.set_exception(error)

    def stop(self) -> None:
        """Stops the timer: no wait ends at its deadline any more."""
        self._timer.stop()


# --------------------------------------------------------------------------------------------------------- wakes
# Calls from any thread into the event loop: one wake-up of the loop for all that wait.
#
# To wake a loop that sleeps costs a system call and a change of threads. Fifty threads that each send one message need
# one, when they come together.


class LoopCalls:
    """Runs functions in one event loop, called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[], object], Broke]] = deque()
        self._woken = False

    def call(self, work: Callable[[], object], broke: Broke) -> None:
        """Runs `work()` in the event loop, in the order of the calls; `broke` gets the error if it fails."""
        self._calls.append((work, broke))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(run_logging_errors, self._run, ignore_error)

    def _run(self) -> None:
        self._woken = False  # first: a later caller wakes the loop again
        calls = self._calls
        for _ in range(len(calls)):
            work, broke = calls.popleft()
            try:
                work()
            except BaseException as error:
                report_failure(work, broke, error)
