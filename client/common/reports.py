"""Statistics of a client in the log, at an interval (`stats_interval_in_seconds`), as Pulsar's client writes them.

A timer of the event loop, and no task: nothing can end silently. It knows the client weakly: one that is dropped
without a close ends it. A failed report is logged, and the next one follows.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol
from weakref import ref

from .guard import ignored, run

_LOG = logging.getLogger("magnetar.client")


class Told(Protocol):
    """An object whose statistics are logged."""

    def statistics(self) -> dict[str, dict[str, int]]: ...


class Reports:
    """Logs the statistics of one client at an interval."""

    def __init__(self, client: Told, interval_s: float) -> None:
        """Made in the client's event loop. 0: nothing is logged."""
        self._client = ref(client)
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s, run, self._report, ignored) if interval_s else None

    def _report(self) -> None:
        client = self._client()
        if client is None:
            return
        self._timer = self._loop.call_later(self._interval_s, run, self._report, ignored)
        try:
            for title, numbers in client.statistics().items():
                _LOG.info("%s: %s", title, ", ".join(f"{name} {number}" for name, number in numbers.items()))
        except Exception:
            _LOG.exception("the statistics of a client could not be told")

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
