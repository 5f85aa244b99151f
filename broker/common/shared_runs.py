"""One run of some work, shared by all callers that ask for it while it runs.

    shared = SharedRuns()
    value = await shared.get(key, work)       begins `work()`, or joins the run of that key

A caller that is cancelled leaves the run to the others, and it goes on to its end. Its result and its error go to the
callers; when all of them were cancelled they go nowhere. Guarding tests: tests/broker/node/test_failover.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SharedRuns(Generic[K, T]):
    """The shared runs of one part, by key."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Task[T]] = {}

    async def get(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Begins or joins the run of `key`; returns its result, or raises its error."""
        run = self._running.get(key)
        if run is None:
            run = self._running[key] = asyncio.get_running_loop().create_task(work())
            run.add_done_callback(partial(self._over, key))
        return await asyncio.shield(run)

    def _over(self, key: K, run: asyncio.Task[T]) -> None:
        del self._running[key]
        if not run.cancelled():
            run.exception()  # the callers get it

    async def drain(self) -> None:
        """Returns when nothing runs."""
        while self._running:
            await asyncio.wait(list(self._running.values()))
