"""Work that ends once it has begun, whatever becomes of who asked for it.

    async with lock:
        await unbroken(self._steps())

A sequence of writes that depend on each other must not end between two of them: what comes after it would go on from a
state that no crash leaves. `unbroken` runs it in a task of its own and waits for its end, also when it is cancelled
itself; then the cancellation goes on. So it may be called with a lock that belongs to the work. What waits for the
beginning (for the lock) is cancelled as ever.

It ends when its work ends and not before: of a disk that hangs only the end of the process sets it free. An error of
work whose caller was cancelled is logged. Guarded by tests/runtime/test_unbroken.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_LOG = logging.getLogger("magnetar.runtime")


def _begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    try:
        return asyncio.get_running_loop().create_task(work)
    except RuntimeError:  # the loop is over, and who waited in it is closed only now
        work.close()
        raise


async def unbroken(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """What the work returns or raises. CancelledError only after its end. A future may have several callers."""
    ending = work if isinstance(work, asyncio.Future) else _begun(work)
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.wait((ending,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return ending.result()
    if not ending.cancelled() and (failure := ending.exception()) is not None:
        _LOG.warning("%r failed, and its caller was cancelled", ending, exc_info=failure)
    raise cancelled
