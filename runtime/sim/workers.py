"""Workers without threads: the call runs on the loop, after a delay; its result returns after another delay.

As with a real thread (runtime/threads.py): one call at a time, in the order given; the next one does not wait for the
delivery of the last result; results return in order; a cancelled future does not stop its call.
Between the two delays the work is done and its caller does not know: a crash there leaves a synced write unanswered.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from .files import DeadProcess, SimulatedDeath

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class DiskDelays:
    """The delay before a call runs, and that of its result: exponential around `mean_s`, sometimes stalled."""

    mean_s: float = 0.0005
    stall_rate: float = 0.0
    stall_s: float = 0.5

    def draw(self, rng: random.Random) -> float:
        if self.stall_rate and rng.random() < self.stall_rate:
            return rng.random() * self.stall_s
        return min(rng.expovariate(1.0 / self.mean_s), 20 * self.mean_s)


class SimWorker:
    """A worker of a simulated process (`runtime.workers.Worker`)."""

    def __init__(self, name: str, rng: random.Random, delays: DiskDelays, is_alive: Callable[[], bool]) -> None:
        self.name = name
        self._rng = rng
        self._delays = delays
        self._is_alive = is_alive
        self._calls: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._running = False
        self._answered_at = 0.0
        self._closed = False

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        if not self._is_alive():
            raise DeadProcess(f"worker {self.name} of a dead process")
        assert not self._closed, f"worker {self.name} is closed"
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._calls.append((future, lambda: function(*args, **kwargs)))
        if not self._running:
            self._start_next()
        return future

    async def close(self) -> None:
        """Returns when every call that was queued has run and its future is done."""
        if self._closed:
            return
        last = self.run(int)
        self._closed = True
        await last

    def _start_next(self) -> None:
        self._running = bool(self._calls)
        if self._running:
            asyncio.get_running_loop().call_later(self._delays.draw(self._rng), self._execute)

    def _execute(self) -> None:
        if not self._is_alive():
            return
        future, call = self._calls.popleft()
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except SimulatedDeath:
            return  # the process has died, and this worker with it
        except StopIteration as caught:  # a future refuses it
            error = RuntimeError(f"a worker's call raised {caught!r}")
        except Exception as caught:
            error = caught
        self._results.append((future, result, error))
        loop = asyncio.get_running_loop()
        self._answered_at = max(self._answered_at + 1e-6, loop.time() + self._delays.draw(self._rng))
        loop.call_at(self._answered_at, self._answer)
        self._start_next()

    def _answer(self) -> None:
        if not self._is_alive():
            return
        future, result, error = self._results.popleft()
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


class SimWorkers:
    """The `runtime.workers.Workers` of a simulated process."""

    def __init__(self, rng: random.Random, delays: DiskDelays, is_alive: Callable[[], bool]) -> None:
        self._rng = rng
        self._delays = delays
        self._is_alive = is_alive

    def start(self, name: str) -> SimWorker:
        if not self._is_alive():
            raise DeadProcess("workers of a dead process")
        return SimWorker(name, self._rng, self._delays, self._is_alive)

    async def load(self, *modules: str) -> None:
        """Loads at once: what this process has imported before must not change a trace."""
        for each in modules:
            import_module(each)
