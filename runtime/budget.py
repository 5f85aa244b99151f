"""Limits the memory that the callers of a process use: for messages that are arriving (`ArrivingMessagesMemory`), and
in all (`MemoryBudget`, `CallerMemory`). If there is not enough memory, callers wait."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import Protocol

# ------------------------------------------------------------------------------------------------------ arrivals
# The memory of what arrives from the callers of a process and is not read yet: one bound for all their streams.
#
# The other end may send as much as the window of its stream allows, whether it is read or not. So windows are shared
# out: a stream gets an eighth of what is left, as much as it wants at most, and WINDOW_BYTES_MIN at least. A message
# that is longer than half of its window is *long*: it is credited as it comes, and its place is made when it begins,
# also while those before it are not read yet. Places of long messages have the other half of the bound, until they are
# read: one that does not fit waits, in turn, with what its window let in. A lone one always fits. While others wait,
# one that is not whole after SLOW_ARRIVAL_S is cut; one that is whole waits for the memory of requests
# (`CallerMemory`), which gets less by itself. So nothing waits for good.
# Guards: tests/runtime/test_arrivals.py, tests/runtime/grpc/test_memory.py.


WINDOW_BYTES_MIN = (64 << 10) - 1
"""Window that HTTP/2 gives to each stream in any case."""
SLOW_ARRIVAL_S, SLOW_ARRIVAL_CHECKS = 10.0, 4
"""Seconds for a message of 5 MiB, and looks in that time: a connection of 4 Mbit/s."""


class ArrivingLongMessage(Protocol):
    """A message that is longer than half of its stream's receive window; `MessageStream` implements it. Memory must be
    reserved for the message (`ArrivingMessagesMemory.admit`) before it can arrive completely."""

    def on_memory_reserved(self) -> None:
        """Called when the message had to wait for memory, and the memory is now reserved."""

    def on_arrival_too_slow(self) -> None:
        """Called when this message arrives too slowly while other messages wait for its memory. The implementation must
        end the stream of this message."""


class ArrivingMessagesMemory:
    """Limits the memory of all messages that are arriving at a process, or have arrived and were not read by the
    service yet. Half of `limit` bytes is for receive windows, half for long messages. `windows` and `long` are the
    reserved bytes."""

    def __init__(self, limit: int = sys.maxsize) -> None:
        self._windows_max = self._long_max = limit // 2
        self.windows = 0
        self.long = 0
        self._coming: dict[ArrivingLongMessage, tuple[int, int]] = {}  # bytes, and since which look; the oldest first
        self._whole: dict[ArrivingLongMessage, int] = {}  # bytes of those of a stream that are not read
        self._waiting: dict[ArrivingLongMessage, int] = {}
        self._looks = 0  # of the timer, while others wait: a process that was stopped cuts nothing for that time
        self._timer: asyncio.TimerHandle | None = None

    def reserve_window(self, wanted: int) -> int:
        """Reserves memory for the receive window of a new stream. Returns the size of the window in bytes: at most
        `wanted`, and at least the smaller of `wanted` and WINDOW_BYTES_MIN. The memory stays reserved until
        `release_window` is called with this size."""
        size = max(min(wanted, WINDOW_BYTES_MIN), min(wanted, (self._windows_max - self.windows) // 8))
        self.windows += size
        return size

    def release_window(self, size: int) -> None:
        """Releases the memory of a window, whose size `reserve_window` returned."""
        self.windows -= size

    def admit(self, message: ArrivingLongMessage, size: int) -> bool:
        """Reserves memory for a long message of `size` bytes, and returns True. Returns False if there is not enough
        memory now, or if other messages wait: then `message.on_memory_reserved` is called as soon as the memory is
        reserved."""
        assert message not in self._coming, "one message of a stream comes at a time"
        if self._waiting or not self._fits(size):
            self._waiting[message] = size
            self._watch()
            return False
        self._admit(message, size)
        return True

    def on_message_complete(self, message: ArrivingLongMessage) -> None:
        """Called when a long message has arrived completely. The service has not read the message yet. Does nothing if
        no memory is reserved for it."""
        size, _ = self._coming.pop(message, (0, 0))
        if size:
            self._whole[message] = self._whole.get(message, 0) + size

    def on_messages_read(self, message: ArrivingLongMessage) -> None:
        """Called when the service has read all messages of this stream that have arrived completely. Releases their
        memory, and reserves it for messages that wait."""
        size = self._whole.pop(message, 0)
        if size:
            self.long -= size
            self._go_on()

    def discard(self, message: ArrivingLongMessage) -> None:
        """Releases the memory of the long messages of a stream that has ended, and reserves it for messages that wait.
        Does nothing if the stream has none."""
        self._waiting.pop(message, None)
        self.long -= self._coming.pop(message, (0, 0))[0] + self._whole.pop(message, 0)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            following, size = next(iter(self._waiting.items()))
            if not self._fits(size):
                return
            del self._waiting[following]
            self._admit(following, size)
            following.on_memory_reserved()

    def _fits(self, size: int) -> bool:
        return not self.long or self.long + size <= self._long_max

    def _admit(self, message: ArrivingLongMessage, size: int) -> None:
        self.long += size
        self._coming[message] = size, self._looks

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SLOW_ARRIVAL_S / SLOW_ARRIVAL_CHECKS, self._check_slow)

    def _check_slow(self) -> None:
        self._timer = None
        self._looks += 1
        slow = next(
            (each for each, (_, since) in self._coming.items() if self._looks - since >= SLOW_ARRIVAL_CHECKS), None
        )
        if self._waiting and slow is not None:
            slow.on_arrival_too_slow()  # one at a time: those that wait may fit then
            self.discard(slow)
        if self._waiting:
            self._watch()

    def check(self) -> None:
        """Raises AssertionError if the reserved bytes are not those of the messages, or if a message waits alone."""
        places = [*(size for size, _ in self._coming.values()), *self._whole.values()]
        assert self.long == sum(places), "the places are counted"
        assert not self._waiting or places, "what waits waits for others"


# -------------------------------------------------------------------------------------------------------- budget


ROOM_POLL_S = 0.01
"""Seconds between two looks while callers wait for room."""
BYTES_PER_WAITER = 1 << 20
"""Bytes that a waiter which goes on is expected to bring: an envelope of a client, or the entries of a read."""


class MemoryBudget:
    """Counts and limits the bytes that all callers of a process use together. Code that stores such bytes must add
    their number to `held`, and subtract it when it drops them. `tight` is half of `limit`: when `held` is above
    `tight`, users of the budget store less for each caller."""

    __slots__ = ("_timer", "_waiting", "held", "limit", "tight")

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.held = 0
        self.limit = limit
        self.tight = limit // 2
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def wait_room(self) -> None:
        """Waits until `held` is at most `limit`; returns at once if it is. Waiting callers are woken in the order of
        their calls; a woken caller that finds no room waits again, after the others."""
        while self.held > self.limit:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self._waiting.append(waiter)
            if self._timer is None:
                self._timer = loop.call_later(ROOM_POLL_S, self._wake_waiting)
            await waiter

    def _wake_waiting(self) -> None:
        """Wakes as many waiters as there may be room for."""
        self._timer, room = None, self.limit - self.held
        while self._waiting and room >= 0:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= BYTES_PER_WAITER
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(ROOM_POLL_S, self._wake_waiting)


class CallerMemory:
    """Limits the memory that all callers of a process use to `limit` bytes. Requests and answers have separate limits,
    so that a caller that does not read its answers does not stop the publishes of others.

    `arrivals` has a quarter of the memory: for messages that are arriving, or that the service has not read yet.
    `requests` has a half: for requests that are not handled yet, and for publishes without an outcome. Above half of
    its limit, the broker does not let a publish wait in memory; above its limit, no request is read. `answers` has a
    quarter: for answers that were not sent yet. Above half of its limit, little is stored for each caller, and callers
    that do not read are disconnected early; above its limit, no message is delivered. Guarding tests:
    tests/runtime/grpc/test_memory.py.
    """

    __slots__ = ("answers", "arrivals", "connections", "requests")

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.connections = 0  # that are open, on the ports of this memory
        self.requests = MemoryBudget(limit // 2)
        self.arrivals = ArrivingMessagesMemory(limit // 4)
        self.answers = MemoryBudget(limit // 4)
