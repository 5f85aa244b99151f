"""Flow control: how many messages the broker may send. Permits are conserved: none is lost, none is made.

A consumer grants its queue size when it subscribes; what the application took, or the client threw away, is granted
again in blocks of at least half the queue. They die with the stream: `start` begins anew, and what came over an earlier
stream gives none back.

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


class Permits:
    def __init__(self, queue_size: int) -> None:
        self._size = max(1, queue_size)
        self._block = max(1, self._size // 2)
        self._used = 0
        self.at_broker = 0  # granted and not charged yet
        self.held = 0  # charged, and what they were charged for is not used yet

    def start(self) -> int:
        """The stream is new: grant this."""
        self._used = self.held = 0
        self.at_broker = self._size
        return self._size

    def resize(self, queue_size: int) -> None:
        """The queue is shared with more others, or fewer: what is granted next makes up for it."""
        self._used += max(1, queue_size) - self._size
        self._size = max(1, queue_size)
        self._block = max(1, self._size // 2)

    def came(self, messages: int) -> None:
        """The broker charged so many."""
        self.at_broker -= messages
        self.held += messages

    def used(self, messages: int) -> int:
        """What they were charged for left the queue: grant this now (0: not yet)."""
        self.held -= messages
        self._used += messages
        if self._used < self._block:
            return 0
        granted, self._used = self._used, 0
        self.at_broker += granted
        return granted

    def check(self) -> None:
        """Between two replies of the broker."""
        assert self.held >= 0, "more was given back than was charged"
        assert self.at_broker + self.held + self._used in (self._size, 0), "permits were lost or made"
