"""The parts of a process: started one after the other, stopped in the reverse order.

    async with Parts(world.clock) as parts:
        store = await parts.start("metadata", SqliteStore.open(…), SqliteStore.close)
        bookie = await parts.start("bookie", Bookie.start(…), Bookie.close)

When a part does not start, the parts before it are stopped, and the error is raised. Each stop has a deadline; one that
fails or takes too long is logged, and the others are stopped nevertheless. `statistics` has the state of each part, and
the time that its start and its stop took.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

import msgspec

from .clock import Clock

Part = TypeVar("Part")

STOP_TIMEOUT_S = 10.0
"""Seconds for a part to end in order. Data are safe without it (kill -9 is always possible); the next start is only
slower."""

_LOG = logging.getLogger("magnetar.lifecycle")


class PartState(enum.Enum):
    """The state of one part of a process, such as its broker, after its start."""

    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed to stop"


class PartStatistics(msgspec.Struct):
    """The state of one part of a process, and how many seconds its start and its stop took."""

    name: str
    state: PartState
    start_s: float
    stop_s: float


class _Started(msgspec.Struct):
    statistics: PartStatistics
    stop: Callable[[], Awaitable[object]]
    timeout_s: float


class ProcessParts:
    """The parts of one process, such as its bookie and its broker, in the order of their start."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started: list[_Started] = []

    async def start(
        self,
        name: str,
        starting: Awaitable[Part],
        stop: Callable[[Part], Awaitable[object]],
        *,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> Part:
        """Awaits `starting`, which starts the part `name`, and returns its result. Later, `close` calls `stop` with
        this result."""
        began = self._clock.monotonic()
        part = await starting
        statistics = PartStatistics(name, PartState.RUNNING, self._clock.monotonic() - began, 0.0)
        self._started.append(_Started(statistics, lambda: stop(part), stop_timeout_s))
        return part

    async def close(self) -> None:
        """Stops the running parts, the one that was started last first. Raises nothing but the CancelledError of its
        caller."""
        for started in reversed(self._started):
            if started.statistics.state is PartState.RUNNING:
                await self._stop(started)

    async def _stop(self, started: _Started) -> None:
        statistics = started.statistics
        statistics.state = PartState.FAILED  # until it has ended
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(started.timeout_s):
                await started.stop()
            statistics.state = PartState.STOPPED
        except TimeoutError:
            _LOG.error("%s did not stop within %s s", statistics.name, started.timeout_s)
        except Exception:
            _LOG.exception("%s failed to stop", statistics.name)
        finally:
            statistics.stop_s = self._clock.monotonic() - began

    def statistics(self) -> list[PartStatistics]:
        return [started.statistics for started in self._started]

    async def __aenter__(self) -> ProcessParts:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
