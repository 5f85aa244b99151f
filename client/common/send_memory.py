"""The memory of the messages that producers of one client have sent and that have no outcome yet: a joint bound in
bytes of payload.

It exists when the program gave `memory_limit_bytes`; without, messages alone are bounded, as in Pulsar's Python client.
Producers and receiver queues (receive_memory.py) share the limit: either uses what the other does not, and half at
least. So together they have the limit, and at most half of it more while the one gives back what the other did not
use. A message is taken when nothing is pending, however long it is.

All is safe from any thread; what waits is told, in any thread, when a quarter of the limit is free.
Guards: tests/client/produce/test_send_memory.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock


class SendMemory:
    """The memory that the producers of one client share."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held = 0
        self.claimed: Callable[[], float] = lambda: 0.0  # by receiver queues
        self._lock = Lock()
        self._waiting: deque[Callable[[], object]] = deque()

    @property
    def limit_now(self) -> float:
        """Returns the limit without what receiver queues use."""
        return self.limit_bytes - min(self.claimed(), self.limit_bytes / 2)

    def take(self, size: int) -> bool:
        """Takes memory. False: there is too little."""
        with self._lock:
            if self.held and self.held + size > self.limit_now:
                return False
            self.held += size
            return True

    def free(self, size: int) -> None:
        waiting: deque[Callable[[], object]] = deque()
        with self._lock:
            self.held -= size
            if self._waiting and self.has_room:
                waiting, self._waiting = self._waiting, waiting
        for call in waiting:
            call()

    @property
    def has_room(self) -> bool:
        return not self.held or self.held <= self.limit_now * 3 / 4

    def wait(self, call: Callable[[], object]) -> None:
        """Calls `call` once, when there is room. Look again after this: there may be some now."""
        with self._lock:  # or it would be lost to a `free` that takes the others at this moment
            self._waiting.append(call)
