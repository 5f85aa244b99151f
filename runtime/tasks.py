"""Tasks of one part: each has a name and an owner, and ends with it.

    tasks = Tasks()
    tasks.spawn(work(), "bookie-read")        begins now; what it raises is logged with its name and counted
    await tasks.drain()                       waits for all of them
    await tasks.close()                       cancels all of them, and waits for what they do at their end
    tasks.cancel()                            the same without a wait; others may begin

    await together([a(), b()], "repair")      all at once; the first error ends the others, and is raised

Which of the three: work that must run as long as its part does is a `Supervisor`'s (supervisor.py), which begins it
again; work that is spawned in passing is a `Tasks`'s; work whose caller waits for it is a `together`. A task that its
caller awaits elsewhere belongs to neither, because its error is raised there. Guarded by tests/runtime/test_tasks.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_LOG = logging.getLogger("magnetar.runtime")


class Tasks:
    """Of one part. `failures`: of tasks, since it was made."""

    __slots__ = ("_closed", "_running", "failures")

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], None] = {}  # in the order of their beginning
        self._closed = False
        self.failures = 0

    def __len__(self) -> int:
        """Tasks that run."""
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Begins the work in the running loop; not after `close`."""
        if self._closed:
            work.close()
            raise RuntimeError(f"{name} begins after its part is closed")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures += 1
            _LOG.error("%s failed", task.get_name(), exc_info=error)

    async def drain(self) -> None:
        """Until no task runs, those included that begin meanwhile."""
        while self._running:
            await asyncio.wait(list(self._running))

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancels all. Returns them."""
        ending = list(self._running)
        for task in ending:
            task.cancel()
        return ending

    async def close(self) -> None:
        """Cancels all, and waits for their end."""
        self._closed = True
        ending = self.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


async def together(work: Iterable[Coroutine[Any, Any, None]], name: str) -> None:
    """Returns when all have returned. An error, or a cancellation of the caller, cancels the others; it is raised when
    all have ended."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each, name=name) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
