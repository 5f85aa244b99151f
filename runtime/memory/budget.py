"""The memory that the callers of a process hold: how much, and who waits for room."""

from __future__ import annotations

import asyncio
import sys
from collections import deque

from .arrivals import Arrivals

ROOM_S = 0.01
"""Seconds between two looks while callers wait for room."""
ROOM_BYTES = 1 << 20
"""Bytes that a waiter which goes on is expected to bring: an envelope of a client, or the entries of a read."""


class MemoryBudget:
    """Bytes that all callers of a process hold together. The part that keeps such bytes adds them to `held`, and
    subtracts them when it keeps them no more. `tight` is half of the limit.
    """

    __slots__ = ("_timer", "_waiting", "held", "limit", "tight")

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.held = 0
        self.limit = limit
        self.tight = limit // 2
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def room(self) -> None:
        """Returns when at most `limit` is held. Who waits comes in turn."""
        while self.held > self.limit:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self._waiting.append(waiter)
            if self._timer is None:
                self._timer = loop.call_later(ROOM_S, self._look)
            await waiter

    def _look(self) -> None:
        """Lets as many waiters go on as there may be room for."""
        self._timer, room = None, self.limit - self.held
        while self._waiting and room >= 0:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= ROOM_BYTES
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(ROOM_S, self._look)


class CallerMemory:
    """The memory that all callers of a process hold. Requests and answers have parts of their own, so that who does not
    read stops no publish.

    `arrivals`: a quarter, of what came and is not received yet (runtime/memory/arrivals.py). `requests`: a half, of
    what was received and is not handled, and publishes without an outcome. Above its tight half a publish is not kept
    for later: what is held then is on its way to a disk and gets less by itself. Above the limit no request
    is read. `answers`: a quarter, of what has not left. Above its tight half little is kept for one caller, and callers
    that take nothing are cut early; above the limit no message is delivered.
    Guarding tests: tests/runtime/grpc/test_memory.py.
    """

    __slots__ = ("answers", "arrivals", "connections", "requests")

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.connections = 0  # that are open, on the ports of this memory
        self.requests = MemoryBudget(limit // 2)
        self.arrivals = Arrivals(limit // 4)
        self.answers = MemoryBudget(limit // 4)
