"""No callback of the client fails in silence: the event loop calls each of them by `run`.

    loop.call_soon(run, self._pump, self._broke)

An unforeseen error is logged and given to `broke`, which gives every waiter an error: so no future stays without an
outcome. Tasks do the same: they belong to a `Tasks(self._broke)` (runtime/tasks.py).

**Foreign code** (callbacks, listeners, checks, key readers, schemas) may raise anything, also CancelledError,
SystemExit and other BaseExceptions. What it raises is about itself: it is logged or told as that code's failure, and
what comes after the call is done as if it had returned. Two are not the code's own: the cancellation of the task that
awaits it (`is_cancelled`), and Ctrl-C, which ends the program once nothing is left half done (`survived`).
tests/client/blocking/test_guard.py breaks each callback and each task of the client in turn and looks at who waits;
tests/client/common/test_foreign_code.py has each kind of foreign code raise each kind of exception.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_LOG = logging.getLogger("magnetar.client")

Broke = Callable[[Exception], object]


def run(work: Callable[[], object], broke: Broke) -> None:
    try:
        work()
    except BaseException as error:
        failed(work, broke, error)


def failed(work: object, broke: Broke, error: BaseException) -> None:
    """Logs the error that `work` raised and tells `broke`. Called while that error is handled."""
    _LOG.exception("%s failed", getattr(work, "__qualname__", work))
    broke(error if isinstance(error, Exception) else RuntimeError(repr(error)))
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error


def survived(error: BaseException, what: str) -> None:
    """Logs what foreign code raised, in the event loop or in a thread of the client's."""
    _LOG.error("%s failed", what, exc_info=error)
    if isinstance(error, KeyboardInterrupt):
        try:
            asyncio.get_running_loop().call_soon(_end, error)
        except RuntimeError:  # a thread without one: Ctrl-C comes to the main thread by itself
            return


def _end(error: KeyboardInterrupt) -> None:
    raise error


def own(error: BaseException) -> BaseException:
    """Returns what foreign code raised that was called and not awaited. Raises KeyboardInterrupt: it was Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    return error


def is_cancelled(error: BaseException) -> bool:
    """Whether an await of foreign code ended because the task that awaits it is cancelled, or by Ctrl-C."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def ignored(_error: Exception) -> None:
    """Does nothing: the error has no waiter, and the log has it."""
