"""The gate for publishes: open below the topic's publish rates and while its backlog quota does not block producers.

A producer's session checks `closed` before it publishes, reports to `took` what it published, and keeps entries that
arrive while the gate is closed. `when_open` calls the session once for each entry that may be published then, in turn
with the other sessions, so that no producer takes the share of another. So a producer that is too fast gets no
receipts, and therefore no credit (broker/session/producer.py; PIP-322, Pulsar L1, T18); entries are never dropped, and
nothing else on the connection waits. One timer for all producers of a topic, and none while nothing is limited.
Guarding tests: tests/broker/topic/test_maintenance.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...runtime.clock import Clock
from ..common.token_bucket import Rate, wait_s
from ..common.turns import Turns

Step = Callable[[], bool]
"""Publishes one entry. True: there are more."""


class PublishGate:
    """The gate of one topic."""

    __slots__ = ("_clock", "_held", "_loop", "_timer", "_waiting", "rates")

    def __init__(self, clock: Clock, rates: tuple[Rate, Rate], held: Callable[[], bool]) -> None:
        self._clock = clock
        self.rates = rates  # of the topic, and of the broker
        self._held = held  # by the backlog quota: `look` is called when that may have changed
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Step, None] | None = None  # in the order of their turns
        self._timer: asyncio.Handle | None = None

    @property
    def throttled(self) -> int:
        """Returns how often a producer had to wait for a rate."""
        return sum(rate.throttled for rate in self.rates[:1])

    @property
    def limited(self) -> bool:
        """Whether `took` counts anything."""
        own, of_broker = self.rates
        return own.limited or of_broker.limited

    def took(self, messages: int, size: int) -> None:
        for rate in self.rates:
            if rate.limited:
                rate.take(messages, size, self._clock.monotonic())

    @property
    def closed(self) -> bool:
        """Whether an entry that arrives now has to wait."""
        if self._held():
            return True
        own, of_broker = self.rates
        if not own.limited and not of_broker.limited:
            return False
        return any(rate.limited and rate.wait_s(self._clock.monotonic()) > 0 for rate in self.rates)

    def when_open(self, step: Step) -> None:
        """Calls `step` when the gate is open, repeatedly while it is, until it returns False."""
        if self._waiting is None:
            self._waiting = {}
        self._waiting[step] = None
        self._arm()

    def forget(self, step: Step) -> None:
        """Removes `step` from the waiting ones. Idempotent."""
        if self._waiting is not None:
            self._waiting.pop(step, None)

    def look(self) -> None:
        """Applies a changed quota or rate: the waiting sessions continue as far as they may, in slices."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, turns = self._waiting, Turns(self._clock)
        while waiting and not self.closed and not turns.over:
            step = next(iter(waiting))
            del waiting[step]
            if step():
                waiting[step] = None
        if waiting:
            self._arm()
        else:
            self._waiting = None

    def _arm(self) -> None:
        """Checks again when the debt of a rate is paid; what the quota blocks waits for `look`."""
        if self._timer is not None or self._held():
            return
        seconds = wait_s(self.rates, self._clock.monotonic())
        self._timer = self._loop.call_later(seconds, self.look) if seconds > 0 else self._loop.call_soon(self.look)
