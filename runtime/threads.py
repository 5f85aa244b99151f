"""The real workers: one thread each, fed by a queue, answering through the event loop.

Calls run in the order given. Results return in that order through `call_soon_threadsafe`, and one wake-up of the loop
delivers all results that are ready by then: a wake-up costs a system call and a turn of the loop, a result a few
hundred nanoseconds. `_main` runs on the worker's thread and `_deliver` on the loop's; they share nothing else.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import Future
from collections import deque
from collections.abc import Callable
from importlib import import_module
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_Call = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class SystemWorker:
    """A worker with a thread of its own. Must be used from the event loop in which it was started."""

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
        """Waits until every queued call has run and its future is done."""
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
    """The `runtime.threads.Workers` of the system."""

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
    """Runs calls in a thread, one after the other."""

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queues a call; the future belongs to the calling event loop. Calls run in the order in which they were
        queued.
        """
        ...

    async def close(self) -> None:
        """Waits until the queued calls have run."""
        ...


class Workers(Protocol):
    """The workers of a process."""

    def start(self, name: str) -> Worker: ...

    async def load(self, *modules: str) -> None:
        """Imports the modules, in order. If all of them are imported already, returns in the same turn of the loop."""
        ...
