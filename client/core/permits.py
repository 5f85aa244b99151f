"""Flow control: how many messages the broker may send. Permits are conserved: none is lost, none is made.

A consumer grants its queue size when it subscribes; what the application took, or the client threw away, is granted
again in blocks of at least a quarter of the queue: with half of it, consumers of Key_Shared that take turns ran out of
permits, and a tenth of the messages waited at the broker for theirs. Permits die with the stream: `start` begins anew,
and what came over an earlier stream gives none back.

**The rule of both sides.** A delivery costs what its entry's head declares (proto/entry.py `declared_messages`), less
the batch indexes that the delivery says are acknowledged. The broker charges that when it sends the entry
(broker/subscription/core/dispatch.py), and the client gives back exactly that, whatever it makes of the entry: shown as
a whole or in part, filtered, thrown away, a chunk, a dead letter, or damaged. An entry is never split, so a broker's
count may go below zero by one entry, and later grants settle it. At every moment

    at the broker + held by the client + used and not granted yet = the queue size

where what is on its way counts for its sender's side of the stream. Guarding tests: tests/client/core/test_permits.py
(both sides in one walk), tests/broker/subscription/core/test_dispatch_walk.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


class Permits:
    """The permits of one consumer. `used` may be called from any thread: `lock` guards the counts."""

    def __init__(self, queue_size: int, lock: AbstractContextManager[Any]) -> None:
        self._size = max(1, queue_size)
        self._block = max(1, self._size // 4)
        self._lock = lock
        self._used = 0
        self._granted = 0  # to be told to the broker
        self.stream = 0  # they are those of this one, and begin anew with the next
        self.at_broker = 0  # granted and not charged yet
        self.held = 0  # charged, and what they were charged for is not used yet

    def start(self) -> int:
        """Begins a new stream; returns the permits to grant it."""
        with self._lock:
            self.stream += 1
            self._used = self._granted = self.held = 0
            self.at_broker = self._size
            return self._size

    def resize(self, queue_size: int) -> None:
        """Changes the size of the queue, which is shared with more others, or fewer: what is granted next makes up for
        it."""
        with self._lock:
            self._used += max(1, queue_size) - self._size
            self._size = max(1, queue_size)
            self._block = max(1, self._size // 4)

    def came(self, messages: int) -> None:
        """Counts messages that the broker charged."""
        with self._lock:
            self.at_broker -= messages
            self.held += messages

    def used(self, messages: int, stream: int) -> bool:
        """Counts permits of messages that left the queue; those that came over an earlier stream give none back. True:
        call `grant` soon."""
        with self._lock:
            if stream == self.stream:
                self.held -= messages
                self._used += messages
                if self._used >= self._block:
                    self._granted += self._used
                    self.at_broker += self._used
                    self._used = 0
            return self._granted > 0

    def grant(self) -> int:
        """Returns the permits to tell the broker now (0: not yet)."""
        with self._lock:
            granted, self._granted = self._granted, 0
            return granted

    def check(self) -> None:
        """Checks the sums. Holds between two replies of the broker."""
        assert self.held >= 0, "more was given back than was charged"
        assert self.at_broker + self.held + self._used in (self._size, 0), "permits were lost or made"
