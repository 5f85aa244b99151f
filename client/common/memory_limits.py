"""The limits of a client's memory for messages: of received messages, in the receiver queues of all its consumers
(`ReceiveMemoryLimit`, `ReceiveMemoryClaim`), and of messages that its producers send (`SendMemoryLimit`).

The broker counts messages, not bytes: it sends as many messages as it has permits for, and a permit that was granted
cannot be withdrawn. So each partition's consumer has a *window*, the number of messages that may be in flight or in its
queue, and *claims* memory: its window times the average size of its messages, which it learns from the messages that
arrive. The first window is FIRST_MESSAGES, counted with FIRST_BYTES each. A window may grow to the size of the receiver
queue, as long as the claim is at most half of the memory that other consumers do not claim. So all claims together stay
below the limit, a new consumer finds memory, and consumers that all read get equal shares in the end. A claim shrinks
as the consumer's messages are read.

A window is never below one message, so that each consumer gets at least one entry at a time and no consumer waits for
another; so the limit may be exceeded by at most one entry per consumer. Sizes are averages: the limit is also exceeded,
until the messages are read, by a burst of messages larger than before, and by first messages above FIRST_BYTES.
Incomplete chunked messages have a limit of their own (max_pending_chunked_message). The size of an entry is its
decompressed size, which it declares.

**Compressed entries.** An entry of 2 KB may declare 64 MiB, and a window of such entries arrives before their size is
known. So an entry that declares LARGE_BYTES or more is counted by itself (`decompressed_bytes`) until the application
takes it. It is decompressed when there is room below the limit, or when its partition's consumer has no other entry of
that size. Until then it stays compressed, and so do the entries after it (client/consume/deliveries.py).

All methods must be called in the event loop. Guard: tests/client/consume/test_receive_memory.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock

# --------------------------------------------------------------------------------------------------- send_memory
# The memory of the messages that producers of one client have sent and that have no outcome yet: a joint bound in
# bytes of payload.
#
# It exists when the program gave `memory_limit_bytes`; without, messages alone are bounded, as in Pulsar's Python
# client. Producers and receiver queues (memory_limits.py) share the limit: either uses what the other does not, and
# half at least. So together they have the limit, and at most half of it more while the one gives back what the other
# did not use. A message is taken when nothing is pending, however long it is.
#
# All is safe from any thread; what waits is told, in any thread, when a quarter of the limit is free.
# Guards: tests/client/produce/test_send_memory.py.


class SendMemoryLimit:
    """The memory budget for messages without an outcome, which all producers of one client share."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.claimed: Callable[[], float] = lambda: 0.0  # by receiver queues
        self._lock = Lock()
        self._waiting: deque[Callable[[], object]] = deque()

    @property
    def current_limit_bytes(self) -> float:
        """Returns how many bytes the producers may use now: the client's memory limit minus the bytes that receiver
        queues claim, but at least half of the limit."""
        return self.limit_bytes - min(self.claimed(), self.limit_bytes / 2)

    def reserve(self, size: int) -> bool:
        """Reserves memory for `size` bytes and returns True. Returns False, and reserves nothing, if too little memory
        is free."""
        with self._lock:
            if self.reserved_bytes and self.reserved_bytes + size > self.current_limit_bytes:
                return False
            self.reserved_bytes += size
            return True

    def release(self, size: int) -> None:
        waiting: deque[Callable[[], object]] = deque()
        with self._lock:
            self.reserved_bytes -= size
            if self._waiting and self.has_room:
                waiting, self._waiting = self._waiting, waiting
        for call in waiting:
            call()

    @property
    def has_room(self) -> bool:
        return not self.reserved_bytes or self.reserved_bytes <= self.current_limit_bytes * 3 / 4

    def call_when_memory_is_free(self, call: Callable[[], object]) -> None:
        """Registers the function `call`, which is called once when memory becomes free. The caller must try `reserve`
        again after this, because memory may be free already."""
        with self._lock:  # or it would be lost to a `release` that takes the others at this moment
            self._waiting.append(call)


# ------------------------------------------------------------------------------------------------ memory_limits


RECEIVE_BYTES = 64 << 20
"""Memory limit of the receiver queues, in bytes, if the program does not set `memory_limit_bytes`."""
MESSAGE_OVERHEAD = 400
"""Approximate memory of a message in addition to its payload, in bytes: objects and metadata."""
FIRST_MESSAGES = 64
"""Messages of a consumer's first window. More than most chunked messages have chunks: a Shared subscription sends all
chunks of a message to one consumer, if that has permits for them. Less than a queue, because the first messages may be
large."""
FIRST_BYTES = 16 << 10
"""Bytes that are counted for a message before any message of the consumer has arrived."""
LARGE_BYTES = 1 << 20
"""Decompressed size in bytes from which on an entry is large. A batch of our client has an eighth of that by
default."""
NEW_WEIGHT = 1 / 4
"""Weight of the messages that arrived last in the average message size."""


class ReceiveMemoryLimit:
    """The memory limit for received messages, which the receiver queues of all consumers of one client share."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes  # 0: none
        self.producers: SendMemoryLimit | None = None  # they share the limit
        self.claimed_bytes = 0.0
        self.decompressed_bytes = 0  # of large entries that wait for their application

    def compute_window_messages(self, claimed: float, message_bytes: float, wanted: int) -> int:
        """Returns how many messages a consumer may have in flight and in its queue together, at most `wanted`.
        `message_bytes`: the size of a message; `claimed`: the bytes that this consumer claims now."""
        sent = 0.0 if self.producers is None else min(self.producers.reserved_bytes, self.limit_bytes / 2)
        room = max(0.0, self.limit_bytes - sent - (self.claimed_bytes - claimed)) / 2
        return max(1, min(wanted, int(room / message_bytes)))

    def has_room(self, size: int) -> bool:
        """Returns whether the memory limit has room for `size` more bytes of decompressed entries."""
        return not self.limit_bytes or self.decompressed_bytes + size <= self.limit_bytes


class ReceiveMemoryClaim:
    """The share of a client's ReceiveMemoryLimit that the consumer of one partition claims. Its `window` is the number
    of messages that this consumer may have in flight and in its queue together."""

    def __init__(self, memory: ReceiveMemoryLimit, queue_size: int) -> None:
        self._memory = memory
        self._bytes = 0.0
        self._message_bytes = 0.0  # 0: not known
        self.window = 0
        self.resize_queue(queue_size)

    def resize_queue(self, queue_size: int) -> None:
        """Replaces the claim by the claim for a receiver queue of `queue_size` messages, as far as the limit allows
        it."""
        self._wanted = max(1, queue_size)
        if not self._memory.limit_bytes:
            self.window = self._wanted
        elif self._message_bytes:
            self.window = self._memory.compute_window_messages(self._bytes, self._message_bytes, self._wanted)
            self._claim(self.window * self._message_bytes)
        else:
            self.window = self._memory.compute_window_messages(
                self._bytes, FIRST_BYTES, min(self._wanted, FIRST_MESSAGES)
            )
            self._claim(self.window * FIRST_BYTES)

    def count_received(self, entry_bytes: int, messages: int, circulating: int) -> bool:
        """Counts `messages` received messages of `entry_bytes` bytes together, and adjusts the average message size and
        the claim. `circulating`: the number of messages that are in flight or in the queue. Returns True if the window
        has changed."""
        if not self._memory.limit_bytes or messages <= 0:
            return False
        size = entry_bytes / messages + MESSAGE_OVERHEAD
        known = self._message_bytes
        self._message_bytes = size if not known else known + (size - known) * NEW_WEIGHT
        window = self._memory.compute_window_messages(self._bytes, self._message_bytes, self._wanted)
        changed = window == self._wanted != self.window or abs(window - self.window) * 4 > self.window
        if changed:
            self.window = window
        claimed, self._bytes = self._bytes, max(self.window, circulating) * self._message_bytes
        self._memory.claimed_bytes += self._bytes - claimed
        return changed

    def release(self) -> None:
        self._claim(0.0)

    def _claim(self, now: float) -> None:
        self._memory.claimed_bytes += now - self._bytes
        self._bytes = now
