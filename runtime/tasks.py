"""Tasks of one part: each has a name and an owner, and ends with its owner.

    tasks = Tasks()
    tasks.spawn(work(), "bookie-read")        starts now; its error is logged with its name and counted
    await tasks.drain()                       waits for all of them
    tasks.cancel()                            cancels all of them, without waiting; others may begin after it
    await tasks.close()                       cancels all of them, and waits for what they do at their end

    await together([a(), b()], "repair")      all at once; the first error ends the others, and is raised

Which of the three: work that must run as long as its part does is a `Supervisor`'s (supervisor.py), which restarts it;
work that is spawned in passing is a `Tasks`'s; work whose caller waits for it is a `together`. A task that its caller
awaits elsewhere belongs to none of them, because its error is raised there. Guarded by tests/runtime/test_tasks.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_LOG = logging.getLogger("magnetar.runtime")


class Tasks:
    """The tasks of one part. `failures` counts those that failed; `on_failure` is called with the error of each."""

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
        """Starts the work in the running loop; after `close` it raises RuntimeError."""
        if self.closed:
            work.close()
            raise RuntimeError(f"{name} begins after its part is closed")
        task = asyncio.get_running_loop().create_task(work, name=name)
        if self._running is None:
            self._running = {}
        self._running[task] = None
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        assert self._running is not None, "the task was started here"
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures += 1
            _LOG.error("%s failed", task.get_name(), exc_info=error)
            if self._on_failure is not None and isinstance(error, Exception):
                self._on_failure(error)

    async def drain(self) -> None:
        """Returns when no task runs, including those that start meanwhile."""
        while self._running:
            await asyncio.wait(list(self._running))

    def cancel(self) -> None:
        """Cancels all but a task that calls it: that one ends by itself."""
        for task in self._others():
            task.cancel()

    def _others(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._running or () if task is not asyncio.current_task(task.get_loop())]

    async def close(self, grace_s: float = 0.0) -> None:
        """Cancels all that still run after `grace_s` seconds but a task that calls it, and waits for their end."""
        self.closed = True
        ending = self._others()
        if ending and grace_s:
            await asyncio.wait(ending, timeout=grace_s)
            ending = self._others()
        self.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


async def together(work: Iterable[Coroutine[Any, Any, None]], name: str) -> None:
    """Returns when all have returned. An error, or a cancellation of the caller, cancels the others; it is raised when
    all have ended."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each, name=name) for each in work]
    try:
        await asyncio.gather(*tasks)
    except GeneratorExit:  # the event loop is gone
        raise
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
