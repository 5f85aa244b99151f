"""Traffic of a topic: totals and rates per second, in and out; and the limits that a broker's topics share."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ...runtime.clock import Clock
from ..common.config import BrokerConfig
from ..common.token_bucket import Rate


class BrokerRates:
    """The rates of all topics of a broker together."""

    def __init__(self, config: BrokerConfig) -> None:
        self.compacting = asyncio.Semaphore(1)  # one topic at a time
        self.publish = Rate(config.broker_publish_rate_messages, config.broker_publish_rate_bytes)
        self.dispatch = Rate(config.broker_dispatch_rate_messages, config.broker_dispatch_rate_bytes)


class Rates(NamedTuple):
    """The traffic per second."""

    messages_in: float
    messages_out: float
    bytes_in: float
    bytes_out: float


NO_TRAFFIC = (Rates(0.0, 0.0, 0.0, 0.0), (0, 0, 0, 0))


class TopicStatistics:
    """The traffic of a topic since it was loaded. `…_in`: published and stored; `…_out`: handed to consumers, each
    time."""

    __slots__ = ("_clock", "_rated", "_rated_at", "_rates", "bytes_in", "bytes_out", "messages_in", "messages_out")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.messages_in = self.bytes_in = 0
        self.messages_out = self.bytes_out = 0
        self._rates, self._rated = NO_TRAFFIC
        self._rated_at = self._clock.monotonic()

    def record_in(self, messages: int, size: int) -> None:
        self.messages_in += messages
        self.bytes_in += size

    def record_out(self, messages: int, size: int) -> None:
        self.messages_out += messages
        self.bytes_out += size

    def rates(self) -> Rates:
        """Returns the rates since the last call (at least a second ago, else the last answer)."""
        now = self._clock.monotonic()
        passed_s = now - self._rated_at
        if passed_s >= 1.0:
            totals = (self.messages_in, self.messages_out, self.bytes_in, self.bytes_out)
            self._rates = Rates(*((new - old) / passed_s for new, old in zip(totals, self._rated, strict=True)))
            self._rated, self._rated_at = totals, now
        return self._rates
