"""The long-lived tasks of a part: each failure is logged, counted and followed by a restart.

    background = Supervisor()
    background.keep("bookie-upkeep", upkeep.run)     runs it; when it fails it is logged, counted, and run again
    background.failing                               name → why, of those that failed and have not run for SOUND_S since
    await background.close()                         cancels all of them, and waits

A task *fails* when it raises, and also when something other than `close` cancels it: a cancelled future that it awaited
looks the same. It is run again, from its beginning, after `RETRY_MIN_S`, then twice as long each time, up to
`RETRY_MAX_S`; after `SOUND_S` of running the pause is `RETRY_MIN_S` again. A task that returns has ended.
So a task must be able to begin again in its object, with the state that its last run left.

`final` decides which errors end a task for good: `Kept.ended` raises them, and the task is shown as failing. A restart
is a timer, not a task, so it does not keep a loop from ending. Guards: tests/runtime/test_supervisor.py.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

_LOG = logging.getLogger("magnetar.background")

RETRY_MIN_S = 0.5
RETRY_MAX_S = 30.0
"""Seconds between two starts, at most: a task that fails at once costs a log line and its first steps, twice a minute.
"""
SOUND_S = 60.0
"""Seconds after which a task that runs is sound: its next failure is a new one."""

Work = Callable[[], Coroutine[Any, Any, None]]
Final = Callable[[Exception], bool]


def _none_is_final(error: Exception) -> bool:
    return False


class Kept:
    """A long-lived task, over all its restarts."""

    def __init__(self, name: str, work: Work, final: Final, supervisor: Supervisor) -> None:
        self.name = name
        self.why = ""  # of the last failure, until it has run for SOUND_S
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
        self._task.add_done_callback(self._over)
        self._sound = self._loop.call_later(SOUND_S, self._is_sound)

    def _is_sound(self) -> None:
        self.why, self._pause_s = "", RETRY_MIN_S

    def _over(self, task: asyncio.Task[None]) -> None:
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
        """Ends it for good; returns the task to await, if it runs."""
        if not self.ended.done():
            self.ended.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            return self._task
        return None


class Supervisor:
    """The tasks of one part. `failing_now` and `restarted` are of the whole process, for its metrics."""

    everywhere: ClassVar[weakref.WeakSet[Supervisor]] = weakref.WeakSet()
    restarted: ClassVar[int] = 0

    def __init__(self) -> None:
        self._kept: list[Kept] = []
        self.restarts = 0
        Supervisor.everywhere.add(self)

    @classmethod
    def failing_now(cls) -> Counter[str]:
        """Returns name → how many tasks of that name fail now, in all parts of the process; 0: all of them run."""
        found = Counter[str]()
        for each in cls.everywhere:
            for kept in each._kept:
                found[kept.name] += bool(kept.why)
        return found

    def keep(self, name: str, work: Work, *, final: Final = _none_is_final) -> Kept:
        """Runs `work()` now, and again whenever it fails."""
        kept = Kept(name, work, final, self)
        self._kept.append(kept)
        return kept

    @property
    def failing(self) -> dict[str, str]:
        """Returns name → why, of the tasks that fail now."""
        return {kept.name: kept.why for kept in self._kept if kept.why}

    async def close(self) -> None:
        """Cancels all, and waits for what they do at their end. Later failures are not reported."""
        ended, self._kept = self._kept, []
        running = [task for kept in ended if (task := kept.cancel()) is not None]
        await asyncio.gather(*running, return_exceptions=True)

    def statistics(self) -> dict[str, int]:
        return {
            "background_tasks": sum(not kept.ended.done() for kept in self._kept),
            "background_failing": len(self.failing),
            "background_restarts": self.restarts,
        }
