"""An asyncio event loop on virtual time: no threads, no sockets, no waiting (`VirtualLoop`); its trace (`SimTrace`);
and the workers of a simulated process (`SimWorkers`).

Ready callbacks run in the order in which they were scheduled. When none is ready, time jumps to the next timer. When
there is no timer either, the simulation can never go on: `Deadlock`, with the tasks that wait. The clock starts at
`origin_s`, between 0 and years, as on a host that has been up for so long. Code that waits with asyncio (`sleep`,
`timeout`, `call_later`, futures, queues) runs here unchanged and takes no time.

*The process of a step.* Every callback runs in a `contextvars` context, tasks and callbacks inherit it, and
`CURRENT_PROCESS` names the simulated process. The steps of a dead process are dropped: neither its code nor its
`finally` blocks run again, as after `kill -9`. Its coroutines are closed after the run, when they can change nothing.
The steps of a paused process (SIGSTOP) are kept, and run when it continues: by then its timers are late.

*Determinism.* asyncio keeps tasks and futures in sets and waits on sets of them, and a set's order follows hashes, by
default addresses. Tasks and futures made by this loop hash by a serial number instead. What would need a thread
(`run_in_executor`, `getaddrinfo`) or a socket is refused with `NotSimulated`.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import random
import re
import selectors
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from .disk import DeadProcess, SimulatedDeath

if TYPE_CHECKING:
    from .world import SimProcess

# --------------------------------------------------------------------------------------------------------- trace
# The trace of a simulation: one running hash over everything that happened, and its lines on demand.
#
# Two runs are the same run when their hashes are equal. The trace gets every step of the loop (its virtual time and the
# name of what ran), every message of the network, every operation on a file, every fault, and the test's notes.
# It must not get anything that differs between processes: no `id()`, no `hash()` of text, no wall time.


_FLUSH_LINES = 512


class SimTrace:
    """The trace of a simulation, and the hash of all its lines. `show` is called with each line; None: no line is
    shown. `add_line` adds a line that is always shown; `add_detail` adds a line that is shown only with `details`;
    `add_step` adds a step of the loop, which is only hashed."""

    def __init__(self, show: Callable[[str], None] | None = None, *, details: bool = True) -> None:
        self.show = show
        self.show_details = show if details else None
        self.lines = 0
        self.steps = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._waiting: list[str] = []
        self._frozen = False

    def end_trace(self) -> None:
        """Ends the trace. Lines that are added later are ignored: they come from the cleaning up after the run."""
        self._frozen = True

    def add_step(self, now: float, what: str) -> None:
        """Counts a step of the loop and adds it to the hash, until the trace is frozen. `now`: virtual seconds."""
        if self._frozen:
            return
        self.steps += 1
        self._feed(f"{now:.9f} {what}")

    def add_line(self, now: float, text: str) -> None:
        """Adds a line of text to the hash, and shows it if `show` is set, until the trace is frozen. `now`: virtual
        seconds."""
        if self._frozen:
            return
        self.lines += 1
        line = f"{now:14.6f} {text}"
        self._feed(line)
        if self.show is not None:
            self.show(line)

    def add_detail(self, now: float, text: str) -> None:
        """Adds a line about one message or one disk operation to the hash, until the trace is frozen. The line is shown
        only if details are. `now`: virtual seconds."""
        if self._frozen:
            return
        self.lines += 1
        line = f"{now:.6f} {text}"
        self._feed(line)
        if self.show_details is not None:
            self.show_details(f"{now:14.6f} {text}")

    def _feed(self, line: str) -> None:
        self._waiting.append(line)
        if len(self._waiting) >= _FLUSH_LINES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._digest.update("\n".join(self._waiting).encode("utf-8", "backslashreplace") + b"\n")
            self._waiting.clear()

    @property
    def hash(self) -> str:
        """The hash of all steps and lines so far: equal for equal runs."""
        self._flush()
        return self._digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------- loop


T = TypeVar("T")


CURRENT_PROCESS: ContextVar[SimProcess | None] = ContextVar("magnetar_process", default=None)

CLOCK_RESOLUTION_S = 1e-9
"""Least resolution of the clock. It is two steps of its floating point number where that is more, after years: a due
timer must count as due."""


class Deadlock(Exception):
    """Raised when the simulation can never continue, because no call is ready and no timer is set. The text lists the
    tasks that wait."""


class SimulationLimitExceeded(Exception):
    """Raised when a simulation exceeds its limit of steps or of virtual time, because of a livelock or of work that
    never ends."""


class NotSimulated(RuntimeError):
    """Raised when code uses threads, sockets or name resolution directly instead of through its `World`."""


class SimTask(asyncio.Task[T]):
    """A task whose hash is a serial number, so that sets of tasks have the same order in each run."""

    _serials = 0
    serial: int
    process: SimProcess | None

    def __new__(cls, *args: Any, **kwargs: Any) -> SimTask[T]:
        task = super().__new__(cls)
        SimTask._serials += 1
        task.serial = SimTask._serials
        task.process = None
        return task

    def __hash__(self) -> int:
        return self.serial


class _Interruptible(Coroutine[Any, Any, T]):
    """A coroutine of a simulated process, into which a test may raise an exception at the await where it waits
    (`raise_inside_task`).
    """

    def __init__(self, inner: Coroutine[Any, Any, T]) -> None:
        self._inner = inner
        self.fault: Exception | None = None

    def send(self, value: Any) -> Any:
        return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        fault, self.fault = self.fault, None
        return self._inner.throw(*error) if fault is None else self._inner.throw(fault)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, None, T]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def raise_inside_task(task: SimTask[Any], fault: Exception) -> None:
    """Raises the error `fault` inside a task, at the `await` where the task waits now, as if the awaited code had
    raised it. The task must be waiting, and belong to a simulated process."""
    coroutine = task.get_coro()
    assert isinstance(coroutine, _Interruptible), "tasks of processes can be thrown into"
    coroutine.fault = fault
    task.cancel()  # wakes it; it gets the fault
    task.uncancel()


class SimFuture(asyncio.Future[T]):
    """A future whose hash is a serial number (see `SimTask`)."""

    _serials = 0
    serial: int

    def __new__(cls, *args: Any, **kwargs: Any) -> SimFuture[T]:
        future = super().__new__(cls)
        SimFuture._serials += 1
        future.serial = SimFuture._serials
        return future

    def __hash__(self) -> int:
        return self.serial


class _Handle(events.Handle):
    def _run(self) -> None:
        if self._loop._admit(self):  # type: ignore[attr-defined]
            super()._run()


class _TimerHandle(events.TimerHandle):
    def _run(self) -> None:
        if self._loop._admit(self):  # type: ignore[attr-defined]
            super()._run()


class _Jump(selectors.BaseSelector):
    """Replaces the selector: where a real loop would wait, time jumps to the next timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            self._loop._deadlock()
        elif timeout > 0:
            self._loop._jump()
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> NoReturn:
        raise NotSimulated("a simulated process has no file descriptors")

    def unregister(self, fileobj: Any) -> NoReturn:
        raise NotSimulated("a simulated process has no file descriptors")

    def get_map(self) -> Any:
        return {}


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of one simulation, with virtual time, which begins at `origin_s`. Raises SimulationLimitExceeded
    after `steps_max` steps or `seconds_max` virtual seconds, Deadlock when nothing can run any more."""

    _ready: Any
    _scheduled: list[events.TimerHandle]
    _context: Context

    def __init__(
        self, trace: SimTrace, *, steps_max: int = 50_000_000, seconds_max: float = 1e6, origin_s: float = 0.0
    ) -> None:
        super().__init__()
        self._trace = trace
        self.origin_s = origin_s
        self._now = origin_s
        self._steps_max = steps_max
        self._seconds_max = seconds_max
        self._selector = _Jump(self)
        self._clock_resolution = max(CLOCK_RESOLUTION_S, 2 * math.ulp(origin_s + seconds_max))
        self._task_serial = 0
        SimTask._serials = SimFuture._serials = 0
        self.set_task_factory(_make_task)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ time
    def time(self) -> float:
        return self._now

    @property
    def elapsed_s(self) -> float:
        """Returns how many virtual seconds have passed since the loop was created. Used in messages and for the
        limits."""
        return self._now - self.origin_s

    def _jump(self) -> None:
        """Sets the time to the next timer, exactly (adding a difference would lose the last bits)."""
        self._now = max(self._now, self._scheduled[0].when())
        if self.elapsed_s > self._seconds_max:
            raise SimulationLimitExceeded(f"more than {self._seconds_max} virtual seconds\n{self.describe_tasks()}")

    def _deadlock(self) -> NoReturn:
        when = f"at {self.elapsed_s:.6f} s"
        raise Deadlock(f"{when} nothing is ready and no timer is set; these wait:\n{self.describe_tasks()}")

    def describe_tasks(self) -> str:
        """Returns a text with one line for each pending task that belongs to no dead process: its name, and where it
        waits."""
        lines = []
        for task in sorted(asyncio.all_tasks(self), key=lambda task: getattr(task, "serial", 0)):
            owner = task.process if isinstance(task, SimTask) else None
            if owner is not None and not owner.alive:
                continue
            frames = task.get_stack(limit=3)
            where = " < ".join(f"{f.f_code.co_name}:{f.f_lineno}" for f in frames)
            lines.append(f"  {task.get_name()} at {where}")
        return "\n".join(lines) or "  (none)"

    # ------------------------------------------------------------------ steps
    def _admit(self, handle: events.Handle) -> bool:
        """Counts and hashes one step. Returns False if its process is dead (then the step is dropped) or paused (then
        the step is kept until it continues).
        """
        process = handle._context.get(CURRENT_PROCESS)  # type: ignore[attr-defined]
        if process is not None:
            if not process.alive:
                return False
            if process.held is not None:
                process.held.append(handle)
                return False
        callback = handle._callback  # type: ignore[attr-defined]
        owner = getattr(callback, "__self__", None)
        name = owner.get_name() if isinstance(owner, asyncio.Task) else getattr(callback, "__qualname__", "")
        self._trace.add_step(self.elapsed_s, name or type(callback).__name__)
        if self._trace.steps > self._steps_max:
            raise SimulationLimitExceeded(
                f"more than {self._steps_max} steps at {self.elapsed_s:.6f} s\n{self.describe_tasks()}"
            )
        return True

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> events.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        self._check_closed()  # type: ignore[attr-defined]
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.Handle:
        return self.call_soon(callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def schedule_held_steps(self, held: list[events.Handle]) -> None:
        """Schedules, in order, the steps of a process that were held back while the process was paused."""
        self._ready.extend(held)

    # ------------------------------------------------------------------ what there is not
    def _process_events(self, event_list: Any) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        return

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise NotSimulated(f"run_in_executor({func!r}): no threads under simulation; use world.workers")

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSimulated("getaddrinfo: no name resolution under simulation; use world.network")

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise NotSimulated("add_reader: no sockets under simulation; use world.network")

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise NotSimulated("add_writer: no sockets under simulation; use world.network")


_COMPILED = re.compile(r"(\w+?)(?:_(_?[A-Z][A-Za-z0-9]*))?_gen")


def _name_of(coroutine: object) -> str:
    """Returns the name of a coroutine, which is the same in interpreted and compiled code, so that a seed has one hash.
    """
    name = getattr(coroutine, "__qualname__", None)
    if isinstance(name, str):
        return name
    compiled = _COMPILED.fullmatch(type(coroutine).__name__)
    return ".".join(each for each in (compiled[2], compiled[1]) if each) if compiled else "task"


def _make_task(
    loop: VirtualLoop,
    coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
    *,
    context: Context | None = None,
) -> asyncio.Task[T]:
    loop._task_serial += 1
    name = f"{_name_of(coroutine)}#{loop._task_serial}"
    process = CURRENT_PROCESS.get() if context is None else context.get(CURRENT_PROCESS)
    if process is not None and isinstance(coroutine, Coroutine):
        coroutine = _Interruptible(coroutine)
    task: SimTask[T] = SimTask(coroutine, loop=loop, name=name, context=context)
    if process is not None:
        task.process = process
        process.adopt_task(task)
    return task


# ------------------------------------------------------------------------------------------------------- workers
# Workers without threads: the call runs on the loop, after a delay; its result returns after another delay.
#
# As with a real thread (runtime/tasks.py): one call at a time, in the order given; the next one does not wait for the
# delivery of the last result; results return in order; a cancelled future does not stop its call.
# Between the two delays the work is done and its caller does not know: a crash there leaves a synced write unanswered.


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class DiskDelays:
    """The random delays of a call to a simulated worker thread: one delay before the call runs, and one before its
    result arrives. The delays are exponentially distributed around `mean_s` seconds; with the probability `stall_rate`
    a delay is a stall of up to `stall_s` seconds."""

    mean_s: float = 0.0005
    stall_rate: float = 0.0
    stall_s: float = 0.5

    def draw(self, rng: random.Random) -> float:
        """Returns a random delay of one call, in seconds: at most 20 times the mean, or `stall_s` for a stall."""
        if self.stall_rate and rng.random() < self.stall_rate:
            return rng.random() * self.stall_s
        return min(rng.expovariate(1.0 / self.mean_s), 20 * self.mean_s)


class SimWorker:
    """A simulated worker thread; implements `runtime.tasks.Worker`."""

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
        """Waits until every queued call has run and its future is done. A second call does nothing."""
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
    """The worker threads of a simulated process; implements `runtime.tasks.Workers`."""

    def __init__(self, rng: random.Random, delays: DiskDelays, is_alive: Callable[[], bool]) -> None:
        self._rng = rng
        self._delays = delays
        self._is_alive = is_alive

    def start(self, name: str) -> SimWorker:
        if not self._is_alive():
            raise DeadProcess("workers of a dead process")
        return SimWorker(name, self._rng, self._delays, self._is_alive)

    async def load(self, *modules: str) -> None:
        """Imports the modules before this call returns. So the trace is the same whether or not a module was imported
        before."""
        for each in modules:
            import_module(each)
