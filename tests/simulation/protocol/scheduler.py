"""A heap of events in virtual time. Equal times keep the order in which they were planned, so a run is a function."""

import heapq
from collections.abc import Callable
from typing import Any


class Endless(AssertionError):
    """More steps than any seed needs: something goes round in a circle."""


class Scheduler:
    __slots__ = ("_heap", "_planned", "now", "steps")

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._planned = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, when: float, function: Callable[..., object], *arguments: Any) -> None:
        self._planned += 1
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._planned, function, arguments))

    def after(self, seconds: float, function: Callable[..., object], *arguments: Any) -> None:
        self._planned += 1
        heapq.heappush(self._heap, (self.now + seconds, self._planned, function, arguments))

    def run(self, until: float, steps_max: int, over: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is planned before `until`, or `over` says so."""
        heap = self._heap
        pop = heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, function, arguments = pop(heap)
            self.steps += 1
            function(*arguments)
            if self.steps & 63 == 0:
                if self.steps > steps_max:
                    raise Endless(f"more than {steps_max} steps")
                if over():
                    return
        if not over():
            self.now = max(self.now, until)
