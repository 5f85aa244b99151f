"""Calls from any thread into the event loop: one wake-up of the loop for all that wait.

To wake a loop that sleeps costs a system call and a change of threads. Fifty threads that each send one message need
one, when they come together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .guard import Broke, failed, ignored, run


class Wakes:
    """Calls from any thread into one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[], object], Broke]] = deque()
        self._woken = False

    def call(self, work: Callable[[], object], broke: Broke) -> None:
        """Runs `work()` in the loop, in the order of the calls; `broke` is told when it fails."""
        self._calls.append((work, broke))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(run, self._run, ignored)

    def _run(self) -> None:
        self._woken = False  # first: a later caller wakes the loop again
        calls = self._calls
        for _ in range(len(calls)):
            work, broke = calls.popleft()
            try:
                work()
            except BaseException as error:
                failed(work, broke, error)
