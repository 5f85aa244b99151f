"""Nothing of the client ends in silence: what the event loop calls, and what runs beside it, goes through here.

    loop.call_soon(run, self._pump, self._broke)        a callback
    task = spawn(self._run(), "producer t", self._broke)   a task

An unforeseen error is logged and given to `broke`, whose duty it is to give every waiter an error: so
no future stays without an outcome. A task that is cancelled was cancelled by its owner, which knows it.
tests/client/blocking/test_guard.py breaks each callback and each task of the client in turn and looks at who waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

_LOG = logging.getLogger("magnetar.client")

Broke = Callable[[Exception], object]


def run(work: Callable[[], object], broke: Broke) -> None:
    try:
        work()
    except Exception as error:
        _LOG.exception("%s failed", getattr(work, "__qualname__", work))
        broke(error)


def spawn(work: Coroutine[Any, Any, None], name: str, broke: Broke) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(partial(_over, broke))
    return task


def _over(broke: Broke, task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, Exception):
        _LOG.error("the task %s ended by an error", task.get_name(), exc_info=error)
        broke(error)


def ignored(_error: Exception) -> None:
    """It has no waiter, and the log has it."""
