"""No callback of the client fails in silence: the event loop calls each of them by `run`.

    loop.call_soon(run, self._pump, self._broke)

An unforeseen error is logged and given to `broke`, which gives every waiter an error: so no future stays without an
outcome. Tasks do the same: they belong to a `Tasks(self._broke)` (runtime/tasks.py).
tests/client/blocking/test_guard.py breaks each callback and each task of the client in turn and looks at who waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

_LOG = logging.getLogger("magnetar.client")

Broke = Callable[[Exception], object]


def run(work: Callable[[], object], broke: Broke) -> None:
    try:
        work()
    except Exception as error:
        _LOG.exception("%s failed", getattr(work, "__qualname__", work))
        broke(error)


def ignored(_error: Exception) -> None:
    """It has no waiter, and the log has it."""
