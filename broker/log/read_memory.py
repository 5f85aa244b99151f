"""Memory for what subscriptions have read from bookies and not delivered: one bound for all subscriptions of a broker.

    size = memory.chunk(read_bytes)      what to read now: less when many subscriptions have something
    async with memory.reading(size)      waits while the reads under way take all of it
    memory.holds(buffer, size)           what a subscription has now; 0: nothing

A read that begins makes room: the subscriptions that have used what they have least recently give it back, and read it
again when they need it. So a subscription whose consumers take nothing keeps no other from reading, nothing waits for a
consumer, and a lone read is always done, whatever its size. Reads under way end: they have a time-out.
Guards: tests/broker/log/test_read_memory.py, tests/broker/subscription/test_catching_up.py.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

CHUNK_BYTES_MIN = 64 << 10
"""Least bytes of a read, however many subscriptions there are: a shorter one costs a bookie as much."""


class Holder(Protocol):
    """A holder of read entries that can drop them."""

    def give_back(self) -> None:
        """Drops all that can be read again, and says so (`holds`)."""
        ...


class ReadMemory:
    """The memory for entries that subscriptions have read and not delivered."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0  # by subscriptions
        self.under_way = 0  # asked of bookies
        self.given_back = 0  # times that a subscription had to
        self._holders: OrderedDict[Holder, int] = OrderedDict()  # the one that was used last comes last
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def used(self) -> int:
        return self.held + self.under_way

    def chunk(self, wanted: int) -> int:
        """Returns `wanted`, or a half, a quarter, … of it, so that two and a half for each are within the limit: equal
        sizes let subscriptions that are side by side share a read."""
        several = 2.5 * (len(self._holders) + 1)
        while wanted > CHUNK_BYTES_MIN and wanted * several > self.limit:
            wanted //= 2
        return wanted

    @asynccontextmanager
    async def reading(self, size: int) -> AsyncIterator[None]:
        while self.under_way and self.under_way + size > self.limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except BaseException:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._next_turn()  # it was ours
                raise
        self.under_way += size
        self._make_room()
        try:
            yield
        finally:
            soon = asyncio.get_running_loop().call_soon
            soon(soon, self._ended, size)

    def _ended(self, size: int) -> None:
        """Ends a read two turns of the loop after it: its subscription has handed out what it can before another read
        may make it give back the rest. Else subscriptions that are side by side could read for ever and deliver
        nothing."""
        self.under_way -= size
        self._next_turn()

    def _next_turn(self) -> None:
        """Lets one waiting read go on: it looks whether it fits, and the end of its read lets the next one look."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _make_room(self) -> None:
        while self._holders and self.held + self.under_way > self.limit:
            holder = next(iter(self._holders))
            self.given_back += 1
            holder.give_back()
            assert holder not in self._holders, "it has given all back"

    def holds(self, holder: Holder, size: int) -> None:
        self.held += size - self._holders.get(holder, 0)
        if size:
            self._holders[holder] = size
            self._holders.move_to_end(holder)
        else:
            self._holders.pop(holder, None)

    def check(self) -> None:
        assert self.held == sum(self._holders.values()), "what is held is what the subscriptions hold"
        assert all(size > 0 for size in self._holders.values()), "who holds nothing is not listed"
        assert self.under_way or not self._waiting, "nothing waits while nothing is read"
