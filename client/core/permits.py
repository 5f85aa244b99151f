"""Flow control: how many messages the broker may send.

A consumer grants its queue size when it subscribes; what the application took, or the client threw away, is granted
again in blocks of at least half the queue. Permits count messages; an entry is never split, so a broker may owe some,
and they are settled by later grants. They die with the stream: `start` begins anew.
"""

from __future__ import annotations


class Permits:
    def __init__(self, queue_size: int) -> None:
        self._size = max(1, queue_size)
        self._block = max(1, self._size // 2)
        self._used = 0

    def start(self) -> int:
        """The stream is new: grant this."""
        self._used = 0
        return self._size

    def resize(self, queue_size: int) -> None:
        """The queue is shared with more others, or fewer: what is granted next makes up for it."""
        self._used += max(1, queue_size) - self._size
        self._size = max(1, queue_size)
        self._block = max(1, self._size // 2)

    def used(self, messages: int) -> int:
        """Messages left the queue: grant this now (0: not yet)."""
        self._used += messages
        if self._used < self._block:
            return 0
        granted, self._used = self._used, 0
        return granted

    def check(self) -> None:
        assert self._used <= self._size, "more is owed to the broker than the queue holds"
