"""Waits that end at a deadline: one timer for all of them.

    deadlines = Deadlines(now)
    await deadlines.wait(future, at)      its result; TimeoutError when the time is over

A time-out of asyncio arms a timer for each wait, and cancels it; of thousands of waits in a second that costs more than
what they wait for. Here a wait is noted, and the timer fires for the earliest of those that are left.
Guard: tests/client/common/test_deadlines.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from .due_timer import DueTimer

T = TypeVar("T")


class Deadlines:
    """The deadlines of waits in one event loop. `now`: a monotonic clock, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._at: dict[asyncio.Future[object], float] = {}
        self._timer = DueTimer(now, self._reached, self._broke)

    async def wait(self, future: asyncio.Future[T], at: float) -> T:
        """Waits. The future belongs to this wait alone: it has the error when the time is over, and is cancelled with
        it."""
        if future.done():
            return future.result()
        waiting: asyncio.Future[object] = future  # type: ignore[assignment]
        self._at[waiting] = at
        self._timer.arm(at)
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
            self._timer.arm(min(left))

    def _broke(self, error: Exception) -> None:
        for future in self._at:
            if not future.done():
                future.set_exception(error)

    def stop(self) -> None:
        """Stops all deadlines: no wait ends by one any more."""
        self._timer.stop()
