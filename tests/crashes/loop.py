"""A world in which everything happens at once: for starting a store thousands of times.

`TinyLoop` is an asyncio event loop of a few lines: no threads, no sockets, no waiting; virtual time jumps to the next
timer. `InlineWorkers` run each call at once, in the caller. So a store's start is one long synchronous step of real
store code, at about a tenth of what the full simulator costs (it keeps no trace and draws no delays). The order of
events is always the same; what may happen in between is the business of the workload, which runs in the full simulator.
"""

import asyncio
import heapq
import random
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, cast

from magnetar.runtime.network import Network, World
from magnetar.runtime.sim.disk import DeadProcess, SimFiles, SimulatedDeath

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

STEPS_MAX = 200_000


class Stuck(Exception):
    """Nothing is ready and no timer is set, or it never ends: what was awaited can never be done."""


class _Handle:
    __slots__ = ("args", "callback", "cancelled_", "context", "when")

    def __init__(self, when: float, callback: Callable[..., object], args: Any, context: Context | None) -> None:
        self.when, self.callback, self.args, self.context = when, callback, args, context
        self.cancelled_ = False

    def cancel(self) -> None:
        self.cancelled_ = True

    def cancelled(self) -> bool:
        return self.cancelled_

    def run(self) -> None:
        if self.context is None:
            self.callback(*self.args)
        else:
            self.context.run(self.callback, *self.args)


class TinyLoop(asyncio.AbstractEventLoop):
    def __init__(self) -> None:
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._serial = 0
        self._now = 0.0
        self._tasks: list[asyncio.Task[Any]] = []
        self.complaints: list[str] = []

    # ------------------------------------------------------------------ what asyncio asks of a loop
    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        handle = _Handle(0.0, callback, args, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        handle = _Handle(when, callback, args, context)
        self._serial += 1
        heapq.heappush(self._timers, (when, self._serial, handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name or "task", context=context)
        self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    # ------------------------------------------------------------------ the driver
    def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs until the coroutine ends. What it started in the background may go on with the next `drive`."""
        events._set_running_loop(self)
        try:
            task = self.create_task(coroutine)
            for _ in range(STEPS_MAX):
                if task.done():
                    return task.result()
                self._step()
            raise Stuck(f"not done after {STEPS_MAX} steps")
        finally:
            events._set_running_loop(None)

    def _step(self) -> None:
        if not self._ready:
            if not self._timers:
                raise Stuck("nothing can ever happen again")
            self._now, _, timer = heapq.heappop(self._timers)
            self._ready.append(timer)
        handle = self._ready.popleft()
        if not handle.cancelled_:
            handle.run()

    def abandon(self) -> None:
        """The process is gone: no task takes another step."""
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
            elif not task.cancelled():
                task.exception()
        self._ready.clear()
        self._timers.clear()
        self._tasks.clear()


def _close(coroutine: Any) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a coroutine that never took a step
            coroutine.close()
    except (Exception, SimulatedDeath, DeadProcess):
        return  # its cleanup used a dead world: as it must


class InlineWorker:
    def __init__(self, loop: TinyLoop) -> None:
        self._loop = loop

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        future: asyncio.Future[R] = asyncio.Future(loop=self._loop)
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    async def close(self) -> None:
        return


class InlineWorkers:
    def __init__(self, loop: TinyLoop) -> None:
        self._loop = loop

    def start(self, name: str) -> InlineWorker:
        return InlineWorker(self._loop)

    async def load(self, *modules: str) -> None:
        for each in modules:
            import_module(each)


class TinyClock:
    def __init__(self, loop: TinyLoop) -> None:
        self._loop = loop

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + int(self._loop.time() * 1000)

    def monotonic(self) -> float:
        return self._loop.time()


def tiny_world(loop: TinyLoop, files: SimFiles, seed: int) -> World:
    return World(
        clock=TinyClock(loop),
        rng=random.Random(seed),
        files=files,
        workers=InlineWorkers(loop),
        network=cast(Network, None),  # a store has none
    )
