"""How long an entry waits for its redelivery, by how often it came back.

Applications derive from these and call them with anything: so they are not compiled (setup.py), where a wrong argument
has another error, or none. Guarding tests: tests/client/core/test_cores.py, tests/client/model/test_wrong_arguments.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .checks import BACKOFF, WrongValue, check


class RedeliveryBackoff(Protocol):
    """The delay of an entry's redelivery, by how often it came back."""

    def next(self, redelivery_count: int) -> int:
        """Milliseconds until an entry that came back so often is delivered again."""
        ...


@dataclass(frozen=True, slots=True)
class MultiplierRedeliveryBackoff:
    """Exponential, as Pulsar's: min, min × multiplier, … up to max. With its defaults 1, 2, 4, … 60 s (A7)."""

    min_delay_ms: int = 1000
    max_delay_ms: int = 60_000
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        check(BACKOFF, {name: getattr(self, name) for name in BACKOFF})
        if self.min_delay_ms > self.max_delay_ms:
            raise WrongValue(f"min_delay_ms is at most max_delay_ms, and {self.min_delay_ms} > {self.max_delay_ms}")

    def next(self, redelivery_count: int) -> int:
        """Milliseconds until an entry that came back so often is delivered again."""
        if redelivery_count <= 0 or self.min_delay_ms <= 0:
            return self.min_delay_ms
        delay, times = float(self.min_delay_ms), redelivery_count
        while times and delay < self.max_delay_ms and self.multiplier > 1:
            delay *= self.multiplier
            times -= 1
        return int(min(self.max_delay_ms, delay))
