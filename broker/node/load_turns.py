"""How many topics a broker loads at a time, and which come first.

After a broker died, another one is asked for hundreds of its topics in the same second. Each of them fences, reads and
closes ledgers. All at once they are slower than one after the other, and every client waits for the last of them.

    async with turns.turn(name):      returns when it is the topic's turn
    turns.hurry(name)                 a producer waits for it: it comes before those that only consumers wait for

At most `at_once` topics have a turn, in the order of their arrival. A turn lasts until the load has ended, and for
`turn_s` at most: a topic whose bookies do not answer goes on without one and delays no other. Nothing is refused.
That time is TURN_S, or twice as long as loads usually take that succeed: where disks are slow, turns that end before
their loads would let in ever more topics, until none is loaded in time.
Guards: tests/broker/node/test_load_turns.py.
"""

from __future__ import annotations

import asyncio

from ...runtime.clock import Clock

TURN_S, TURN_S_MAX = 1.0, 10.0
"""Seconds of a turn, usual and longest: a load takes some milliseconds when its bookies answer, and clients wait for 30
s."""
USUAL_PART = 8
"""Divisor: a load that was quicker counts for one part in so many of what is usual; a slower one is the usual time from
then on."""


class LoadTurns:
    """The turns in which topics are loaded: a few at a time, some first."""

    def __init__(self, at_once: int, clock: Clock) -> None:
        self._clock = clock
        self._left = at_once
        self._first: dict[str, asyncio.Future[None]] = {}  # a producer waits for these
        self._others: dict[str, asyncio.Future[None]] = {}
        self._hurried: set[str] = set()  # were asked for by a producer, and have not come to their load
        self._usual_s = 0.0  # of loads that succeeded

    def __len__(self) -> int:
        """Returns the number of topics that wait for their turn."""
        return len(self._first) + len(self._others)

    @property
    def turn_s(self) -> float:
        """The longest time that a turn lasts, as of now."""
        return min(max(TURN_S, 2 * self._usual_s), TURN_S_MAX)

    def hurry(self, name: str) -> None:
        waiting = self._others.pop(name, None)
        if waiting is not None:
            self._first[name] = waiting
        elif name not in self._first:
            self._hurried.add(name)

    def forget(self, name: str) -> None:
        """Ends the hurry for a topic: it is loaded, or is not loaded after all."""
        self._hurried.discard(name)

    def turn(self, name: str) -> _Turn:
        return _Turn(self, name)

    async def begin(self, name: str) -> float:
        """Waits for the turn of a topic; returns when it began."""
        if self._left and not self._first and not self._others:
            self._hurried.discard(name)
            self._left -= 1
        else:
            await self._wait(name)
        return self._clock.monotonic()

    def succeeded(self, began: float) -> None:
        took = self._clock.monotonic() - began
        self._usual_s = max(took, self._usual_s + (took - self._usual_s) / USUAL_PART)

    def end(self) -> None:
        self._left += 1
        if self._first or self._others:
            self._next()

    async def _wait(self, name: str) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._first if name in self._hurried else self._others
        self._hurried.discard(name)
        line[name] = waiting
        self._next()
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():  # it had its turn already: the next one takes it
                self._left += 1
            self._first.pop(name, None)
            self._others.pop(name, None)
            self._next()
            raise

    def _next(self) -> None:
        while self._left and (self._first or self._others):
            line = self._first or self._others
            name = next(iter(line))
            waiting = line.pop(name)
            if not waiting.done():
                self._left -= 1
                waiting.set_result(None)


class _Turn:
    """A turn, from when it comes. A class, because a generator costs each load more than all else here."""

    __slots__ = ("_began", "_held", "_name", "_timer", "_turns")

    def __init__(self, turns: LoadTurns, name: str) -> None:
        self._turns, self._name = turns, name
        self._held = False
        self._began = 0.0
        self._timer: asyncio.TimerHandle

    async def __aenter__(self) -> None:
        self._began = await self._turns.begin(self._name)
        self._held = True
        self._timer = asyncio.get_running_loop().call_later(self._turns.turn_s, self._end)

    async def __aexit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            self._turns.succeeded(self._began)
        self._timer.cancel()
        self._end()

    def _end(self) -> None:
        if self._held:
            self._held = False
            self._turns.end()
