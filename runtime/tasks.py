"""Tasks of one part (`Tasks`), its long-lived tasks, which are restarted when they fail (`Supervisor`), and work that
runs to its end although its caller is cancelled (`run_to_end`).

    tasks = Tasks()
    tasks.spawn(work(), "bookie-read")        starts now; its error is logged with its name and counted
    await tasks.drain()                       waits for all of them
    tasks.cancel()                            cancels all of them, without waiting; others may begin after it
    await tasks.close()                       cancels all of them, and waits for what they do at their end

    await run_together([a(), b()], "repair")  all at once; the first error ends the others, and is raised

Work that must run as long as its part does belongs to a `Supervisor`. Work for which its caller does not wait belongs
to a `Tasks`. Work for which its caller waits is run by `run_together`. Each task has a name and an owner, and ends with
its owner. A task that its caller awaits elsewhere belongs to none of them, because its error is raised there. Guarded
by tests/runtime/test_tasks.py.

Also in this file: the real workers (`SystemWorker`). Each has one thread, which gets calls from a queue, and returns
results through the event loop.

Calls run in the order given. Results return in that order through `call_soon_threadsafe`. One wake-up of the loop
delivers all results that are ready by then: a wake-up costs a system call and a turn of the loop, a result much less.
`_main` runs on the worker's thread and `_deliver` on the loop's; they share nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from asyncio import Future
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_Call = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class SystemWorker:
    """A worker (`Worker`) with a thread of its own, which starts at once. Must be used only in the event loop in which
    it was started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._waking = False
        self._closed = False
        # A daemon: a disk that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        assert not self._closed, f"worker {self.name} is closed"
        future: asyncio.Future[R] = self._loop.create_future()
        self._calls.put((future, function, args, kwargs))
        return future

    async def close(self) -> None:
        """Waits until every queued call has run and its future is done, and ends the thread. A second call does
        nothing."""
        if self._closed:
            return
        last = self.run(threading.get_ident)
        self._closed = True
        self._calls.put(None)
        await last
        self._thread.join()

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args, kwargs = call
            try:
                self._answer(future, function(*args, **kwargs), None)
            except BaseException as error:
                self._answer(future, None, error)
            del call, future, function, args, kwargs  # otherwise the buffers of the last call live until the next

    def _answer(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._results.append((future, result, error))
        if not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: no task waits for the result
                self._results.clear()

    def _deliver(self) -> None:
        # Clear the flag before the drain: a later result finds it cleared and wakes the loop again.
        self._waking = False
        while self._results:
            future, result, error = self._results.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            elif isinstance(error, StopIteration):  # a future refuses it
                future.set_exception(RuntimeError(f"a worker's call raised {error!r}"))
            else:
                future.set_exception(error)


class SystemWorkers:
    """The real implementation of `runtime.tasks.Workers`, with threads of the operating system."""

    def __init__(self) -> None:
        self._loaded: set[str] = set()  # of `sys.modules`, without those that another thread still imports

    def start(self, name: str) -> SystemWorker:
        return SystemWorker(name)

    async def load(self, *modules: str) -> None:
        missing = [each for each in modules if each not in self._loaded]
        if not missing:
            return
        worker = self.start("load")
        try:
            for each in missing:
                await worker.run(import_module, each)
                self._loaded.add(each)
        finally:
            await worker.close()


# ------------------------------------------------------------------------------------------------------- workers
# Workers: threads that wait for the disk so that the event loop does not.
#
# A worker runs one call at a time, in the order given. In a simulation there is no thread: the call runs on the event
# loop after a virtual delay, so that other work may run in between.
#
# Code that an idle server does not need is loaded when it is first needed, in a thread too: the server starts faster
# and is smaller without it.
#
#     await world.workers.load(f"{__package__}.coordinator")
#     from .coordinator import RunningCoordinator             # is there, so it costs nothing


class Worker(Protocol):
    """Runs functions in a thread, one after the other. `SystemWorker` is a real one; `SimWorker` simulates a thread."""

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queues the call of a function, and returns a future of its result, which belongs to the calling event loop.
        Calls run in the order in which they were queued. A call runs even if its future is cancelled. The future fails
        with the error of the function; StopIteration becomes RuntimeError. Must not be called after `close`."""
        ...

    async def close(self) -> None:
        """Waits until the queued calls have run, and ends the worker."""
        ...


class Workers(Protocol):
    """Starts the worker threads of a process. `SystemWorkers` is the real implementation, `SimWorkers` the simulated
    one."""

    def start(self, name: str) -> Worker:
        """Starts a worker and returns it. `name` is the name of its thread."""
        ...

    async def load(self, *modules: str) -> None:
        """Imports the modules, one after the other, in a thread, and returns when all are imported. If all of them are
        imported already, returns in the same turn of the loop. Raises the error of an import that fails."""
        ...


T = TypeVar("T")

_LOG = logging.getLogger("magnetar.runtime")


class Tasks:
    """The running tasks of one part of the program. An error of a task is logged; `failures` counts the tasks that
    failed, and the function `on_failure` is called with the error of each."""

    __slots__ = ("_on_failure", "_running", "closed", "failures")

    def __init__(self, on_failure: Callable[[Exception], object] | None = None) -> None:
        self._on_failure = on_failure
        self._running: dict[asyncio.Task[Any], None] | None = None  # in the order of their start; most parts have none
        self.closed = False
        self.failures = 0

    def __len__(self) -> int:
        """Returns the number of running tasks."""
        return len(self._running or ())

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts the coroutine `work` as a task in the running loop, and returns the task. After `close`, closes the
        coroutine and raises RuntimeError."""
        if self.closed:
            work.close()
            raise RuntimeError(f"{name} begins after its part is closed")
        task = asyncio.get_running_loop().create_task(work, name=name)
        if self._running is None:
            self._running = {}
        self._running[task] = None
        task.add_done_callback(self._on_task_ended)
        return task

    def _on_task_ended(self, task: asyncio.Task[Any]) -> None:
        assert self._running is not None, "the task was started here"
        del self._running[task]
        if not self._running:
            self._running = None  # an empty dictionary takes 0.2 KB, in each of many topics
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures += 1
            _LOG.error("%s failed", task.get_name(), exc_info=error)
            if self._on_failure is not None and isinstance(error, Exception):
                self._on_failure(error)

    async def drain(self) -> None:
        """Waits until no task is running, also for tasks that are started during the wait. Raises no error of a task.
        """
        while self._running:
            await asyncio.wait(list(self._running))

    def cancel(self) -> None:
        """Cancels all tasks, and does not wait for their end. If the caller is one of these tasks, it is not cancelled.
        Tasks may be spawned afterwards."""
        for task in self._others():
            task.cancel()

    def _others(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._running or () if task is not asyncio.current_task(task.get_loop())]

    async def close(self, grace_s: float = 0.0) -> None:
        """Waits up to `grace_s` seconds for the tasks, then cancels those that still run and waits for their end. If
        the caller is one of these tasks, it is not cancelled. No task may be spawned afterwards."""
        self.closed = True
        ending = self._others()
        if ending and grace_s:
            await asyncio.wait(ending, timeout=grace_s)
            ending = self._others()
        self.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


async def run_together(work: Iterable[Coroutine[Any, Any, None]], name: str) -> None:
    """Runs all coroutines of `work` at the same time, and returns when all have returned. If a coroutine fails, or the
    caller is cancelled, cancels the other coroutines once, waits until their `finally` blocks have ended, and raises
    the error."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each, name=name) for each in work]
    whole = asyncio.gather(*tasks)
    try:
        await asyncio.wait([whole])  # who awaits it, and is cancelled, cancels them, and below once more
        await whole
    except GeneratorExit:  # the event loop is gone
        raise
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(whole, *tasks, return_exceptions=True)
        raise


# ------------------------------------------------------------------------------------------------------ unbroken
# Work that runs to its end once it has begun, even when its caller is cancelled.
#
#     async with lock:
#         await run_to_end(self._steps())
#
# A sequence of writes that depend on each other must not end between two of them: its successor would continue from a
# state that no crash leaves. `run_to_end` runs the work in a task and waits for its end, also when the caller is
# cancelled; then it raises the cancellation. So the caller may keep a lock that belongs to the work. Waiting for the
# beginning (for the lock) can be cancelled as usual.
#
# `run_and_clean_up` and `run_or_undo` are `finally` and `except` for coroutines that are compiled (setup.py): while
# these wait within either, the exception that they handle is that of the whole thread, and whatever runs meanwhile sees
# it.
#
# It returns only when the work has ended: if the disk hangs, only the end of the process ends it. An error of work
# whose caller was cancelled is logged. Guarded by tests/runtime/test_unbroken.py.


def _begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    try:
        return asyncio.get_running_loop().create_task(work)
    except RuntimeError:  # the loop has ended, and the coroutine that waited in it is closed only now
        work.close()
        raise


def _set_ended(ended: asyncio.Future[None], _: object) -> None:
    if not ended.done():  # its caller was cancelled
        ended.set_result(None)


async def run_to_end(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Runs `work` to its end even if the caller is cancelled; CancelledError is then raised after that end, and an
    error of `work` is logged. Otherwise returns the result of `work`, or raises its error. Several callers may wait for
    the same future."""
    ending = work if isinstance(work, asyncio.Future) else _begun(work)
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        ended: asyncio.Future[None] = ending.get_loop().create_future()
        ending.add_done_callback(partial(_set_ended, ended))
        try:
            await ended
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return ending.result()
    if not ending.cancelled() and (failure := ending.exception()) is not None:
        _LOG.warning("%r failed, and its caller was cancelled", ending, exc_info=failure)
    raise cancelled


async def run_and_clean_up(work: Awaitable[T], then: Callable[[], Awaitable[object]]) -> T:
    """Awaits `work`, and afterwards, even if `work` failed, awaits `then()`. Returns the result of `work`, or raises
    its error. An error of `then()` is raised instead."""
    try:
        return await work
    finally:
        await then()


async def run_all_steps(*steps: Callable[[], object]) -> None:
    """Calls the functions in their order, each of them whatever the others raise, and awaits what they return if it can
    be awaited. Then raises the first error, or CancelledError if the caller was cancelled; logs the other errors."""
    first: BaseException | None = None
    for step in steps:
        error = await _run_step(step)
        if error is None:
            continue
        if first is None or (isinstance(error, asyncio.CancelledError) and isinstance(first, Exception)):
            first, error = error, first
        if error is not None:
            _LOG.error("%r failed, after another step", step, exc_info=error)
    if first is not None:
        raise first


async def _run_step(step: Callable[[], object]) -> BaseException | None:
    """Calls a function, and awaits what it returns if it can be awaited. Returns its error; None if it has none."""
    try:
        done = step()
        if isinstance(done, Awaitable):
            await done
    except GeneratorExit:  # the event loop is gone
        raise
    except BaseException as error:
        return error
    return None


async def run_or_undo(work: Awaitable[T], undo: Callable[[], Awaitable[object]]) -> T:
    """Awaits `work` and returns its result. If `work` fails, awaits `undo()` and raises the error. An error of `undo()`
    is raised instead."""
    try:
        return await work
    except BaseException:
        await undo()
        raise


# ---------------------------------------------------------------------------------------------------- supervisor
# The long-lived tasks of a part: each failure is logged, counted and followed by a restart.
#
#     background = Supervisor()
#     background.start_supervised("bookie-upkeep", upkeep.run)  runs it; when it fails: logged, counted, and run again
#     background.failure_reasons                               name → why, of those that failed and have not run for
#                                                              STABLE_AFTER_S since
#     await background.close()                                 cancels all of them, and waits
#
# A task *fails* when it raises, and also when something other than `close` cancels it: a cancelled future that it
# awaited looks the same. It is run again, from its beginning, after `RETRY_MIN_S`, then twice as long each time, up to
# `RETRY_MAX_S`; after `STABLE_AFTER_S` of running the pause is `RETRY_MIN_S` again. A task that returns has ended. So a
# task must be able to begin again in its object, with the state that its last run left.
#
# `final` decides which errors end a task for good: `SupervisedTask.ended` raises them, and the task is shown as
# failing. A restart is a timer, not a task, so it does not keep a loop from ending. Guards:
# tests/runtime/test_supervisor.py.


RETRY_MIN_S = 0.5
RETRY_MAX_S = 30.0
"""Seconds between two starts, at most: a task that fails at once costs a log line and its first steps, twice a minute.
"""
STABLE_AFTER_S = 60.0
"""Seconds after which a task that runs is sound: its next failure is a new one."""

TaskFunction = Callable[[], Coroutine[Any, Any, None]]
IsFinalError = Callable[[Exception], bool]


def _none_is_final(error: Exception) -> bool:
    return False


class SupervisedTask:
    """A long-running task that is restarted whenever it fails, and the state of its restarts. `why`: the text of the
    last failure; "" once the task has run for STABLE_AFTER_S since. `ended`: a future that is done when the task has
    returned, has raised a final error, or was cancelled."""

    def __init__(self, name: str, work: TaskFunction, final: IsFinalError, supervisor: Supervisor) -> None:
        self.name = name
        self.why = ""  # of the last failure, until it has run for STABLE_AFTER_S
        self._work = work
        self._final = final
        self._supervisor = supervisor
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sound: asyncio.TimerHandle | None = None
        self._pause_s = RETRY_MIN_S
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may have no waiter
        self._run()

    def _run(self) -> None:
        self._timer = None
        self._task = self._loop.create_task(self._work(), name=self.name)
        self._task.add_done_callback(self._on_task_ended)
        self._sound = self._loop.call_later(STABLE_AFTER_S, self._is_sound)

    def _is_sound(self) -> None:
        self.why, self._pause_s = "", RETRY_MIN_S

    def _on_task_ended(self, task: asyncio.Task[None]) -> None:
        assert self._sound is not None
        self._sound.cancel()
        if self.ended.done():
            return
        error = asyncio.CancelledError("cancelled") if task.cancelled() else task.exception()
        if error is None:
            self.why = ""
            self.ended.set_result(None)
            return
        self.why = f"{type(error).__name__}: {error}"
        if isinstance(error, Exception) and self._final(error):
            _LOG.error("%s ended: %s", self.name, self.why)
            self.ended.set_exception(error)
            return
        self._supervisor.restarts += 1
        Supervisor.restarted += 1
        _LOG.error("%s failed and begins again in %g s", self.name, self._pause_s, exc_info=error)
        self._timer = self._loop.call_later(self._pause_s, self._run)
        self._pause_s = min(RETRY_MAX_S, 2 * self._pause_s)

    def cancel(self) -> asyncio.Task[None] | None:
        """Ends the task for good, and does not wait. If it is running, returns the asyncio task, so that the caller can
        await its end; else returns None."""
        if not self.ended.done():
            self.ended.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            return self._task
        return None


class Supervisor:
    """Runs the long-lived tasks of one part of a process, and restarts them when they fail. `restarts` counts the
    restarts of this part; `restarted` counts those of all parts of the process, for its metrics. `everywhere` has the
    supervisors of all parts."""

    everywhere: ClassVar[weakref.WeakSet[Supervisor]] = weakref.WeakSet()
    restarted: ClassVar[int] = 0

    def __init__(self) -> None:
        self._kept: list[SupervisedTask] = []
        self.restarts = 0
        Supervisor.everywhere.add(self)

    @classmethod
    def count_failing_tasks(cls) -> Counter[str]:
        """Returns, by task name, how many tasks with this name are failing now, in all parts of the process. A task
        fails from its error until it has run for STABLE_AFTER_S again. 0 means that all tasks of this name run."""
        found = Counter[str]()
        for each in cls.everywhere:
            for kept in each._kept:
                found[kept.name] += bool(kept.why)
        return found

    def start_supervised(
        self, name: str, work: TaskFunction, *, final: IsFinalError = _none_is_final
    ) -> SupervisedTask:
        """Starts `work()` as a task, and returns the SupervisedTask. Starts `work()` again whenever it fails, after a
        pause of RETRY_MIN_S to RETRY_MAX_S. If the function `final` returns True for an error of the task, the task is
        not restarted."""
        kept = SupervisedTask(name, work, final, self)
        self._kept.append(kept)
        return kept

    @property
    def failure_reasons(self) -> dict[str, str]:
        """Returns the error text of each task of this part that is failing now, by the name of the task; {} if none is.
        """
        return {kept.name: kept.why for kept in self._kept if kept.why}

    async def close(self) -> None:
        """Cancels all tasks of this part, and waits for their end. Errors that they raise from now on are not
        reported."""
        ended, self._kept = self._kept, []
        running = [task for kept in ended if (task := kept.cancel()) is not None]
        await asyncio.gather(*running, return_exceptions=True)

    def statistics(self) -> dict[str, int]:
        """Returns how many tasks of this part have not ended, how many of them are failing, and how often tasks were
        restarted."""
        return {
            "background_tasks": sum(not kept.ended.done() for kept in self._kept),
            "background_failing": len(self.failure_reasons),
            "background_restarts": self.restarts,
        }
