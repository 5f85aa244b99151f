"""Work that runs to its end once it has begun, even when its caller is cancelled.

    async with lock:
        await unbroken(self._steps())

A sequence of writes that depend on each other must not end between two of them: its successor would continue from a
state that no crash leaves. `unbroken` runs the work in a task and waits for its end, also when the caller is cancelled;
then it raises the cancellation. So the caller may keep a lock that belongs to the work. Waiting for the beginning (for
the lock) can be cancelled as usual.

`followed_by` and `undone_by` are `finally` and `except` for coroutines that are compiled (setup.py): while these wait
within either, the exception that they handle is that of the whole thread, and whatever runs meanwhile sees it.

It returns only when the work has ended: if the disk hangs, only the end of the process ends it. An error of work whose
caller was cancelled is logged. Guarded by tests/runtime/test_unbroken.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

_LOG = logging.getLogger("magnetar.runtime")


def _begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    try:
        return asyncio.get_running_loop().create_task(work)
    except RuntimeError:  # the loop has ended, and the coroutine that waited in it is closed only now
        work.close()
        raise


def _tell(ended: asyncio.Future[None], _: object) -> None:
    if not ended.done():  # its caller was cancelled
        ended.set_result(None)


async def unbroken(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """The result or the error of the work. CancelledError only after its end. A future may have several callers."""
    ending = work if isinstance(work, asyncio.Future) else _begun(work)
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        ended: asyncio.Future[None] = ending.get_loop().create_future()
        ending.add_done_callback(partial(_tell, ended))
        try:
            await ended
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return ending.result()
    if not ending.cancelled() and (failure := ending.exception()) is not None:
        _LOG.warning("%r failed, and its caller was cancelled", ending, exc_info=failure)
    raise cancelled


async def followed_by(work: Awaitable[T], then: Callable[[], Awaitable[object]]) -> T:
    """The result or the error of the work, after `then()`."""
    try:
        return await work
    finally:
        await then()


async def undone_by(work: Awaitable[T], undo: Callable[[], Awaitable[object]]) -> T:
    """The result of the work; or its error, after `undo()`."""
    try:
        return await work
    except BaseException:
        await undo()
        raise
