"""When the streams of a topic's producers are read: below its publish rates, and while its backlog quota holds.

Whoever reads a producer's stream tells `took` what came, and waits for `open` before it reads on
(protocols/grpc/produce.py). So a producer that is too fast is held back by its own full stream, in its client (PIP-322,
Pulsar L1, T18); what was read is published, never dropped and never delayed, and nothing that serves others waits. One
timer for all producers of a topic, and none while nothing is limited. Guarding test:
tests/broker/topic/test_maintenance.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..common.token_bucket import Rate, wait_s


class PublishGate:
    __slots__ = ("_held", "_loop", "_opened", "_rates", "_timer")

    def __init__(self, rates: tuple[Rate, ...], held: Callable[[], bool]) -> None:
        self._rates = rates
        self._held = held  # by the backlog quota: `look` is called when that may have changed
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Event | None = None  # somebody waits for it
        self._timer: asyncio.TimerHandle | None = None

    @property
    def throttled(self) -> int:
        """How often a producer had to wait for a rate."""
        return sum(rate.throttled for rate in self._rates[:1])

    def took(self, messages: int, size: int) -> None:
        for rate in self._rates:
            if rate.limited:
                rate.take(messages, size, self._loop.time())

    async def open(self) -> None:
        """Returns when the next may be read."""
        while self._closed():
            if self._opened is None:
                self._opened = asyncio.Event()
            await self._opened.wait()

    @property
    def closed(self) -> bool:
        """Whether somebody who asks now would have to wait."""
        return self._held() or wait_s(self._rates, self._loop.time()) > 0

    def look(self) -> None:
        """Lets those who wait look again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._opened is not None:
            self._opened.set()
            self._opened = None

    def _closed(self) -> bool:
        if self._held():
            return True
        seconds = wait_s(self._rates, self._loop.time())
        if seconds > 0 and self._timer is None:
            self._timer = self._loop.call_later(seconds, self.look)
        return seconds > 0
