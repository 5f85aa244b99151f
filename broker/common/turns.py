"""Shares the event loop: long work for one request runs in slices, and other tasks have their turn in between.

    turns = Turns(clock)
    for each in many:
        do(each)
        if turns.over:
            await turns.next()

A slice lasts SLICE_S and one step more, so a step must be short: what is linear in a request's bytes is cut into
entries, what is not is refused before (broker/protocols/grpc/translate.py). In a simulation a slice never ends: no
time passes within one step of it. Guarding test: tests/broker/protocols/grpc/test_extreme_requests.py.
"""

from __future__ import annotations

import asyncio

from ...runtime.clock import Clock

SLICE_S = 0.002
"""Seconds of a slice, so that the loop is held for less than 5 ms: a slice, and what the turn does before and after it.
"""


class Turns:
    """The slices of one piece of work."""

    __slots__ = ("_clock", "end")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.end = clock.monotonic() + SLICE_S

    @property
    def over(self) -> bool:
        return self._clock.monotonic() > self.end

    async def next(self) -> None:
        """Gives the others their turn."""
        await asyncio.sleep(0)
        self.end = self._clock.monotonic() + SLICE_S
