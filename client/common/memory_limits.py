"""The memory of the messages in all receiver queues of one client: a joint bound in bytes, shared by its consumers.
Also the memory that its producers share (`SendMemory`).

The broker counts messages, not bytes: it sends as many as it has permits for, and a permit that was granted cannot be
taken back. So each partition's consumer has a *window*, the messages that may be on their way or wait here, and its
claim on the memory is its window times the size of its messages, as it learns that from what comes. A window begins
with FIRST_MESSAGES, as if each had FIRST_BYTES. It may grow to the receiver queue's size, as long as the claim is at
most half of what others do not claim: so all claims together stay below the limit, who comes later finds room, and
consumers that all read come to equal shares. A claim shrinks as its messages are read.

A window is never below one message, so each consumer gets at least one entry at a time and none waits for another:
past the limit there is at most one entry each. Sizes are averages: a burst of larger messages than before, or first
messages above FIRST_BYTES, exceed the bound until they are read. Messages in chunks that are not complete have a bound
of their own (max_pending_chunked_message). Sizes are those that entries declare to have once they are decompressed.

**Compressed entries.** An entry of 2 KB may declare 64 MiB, and a window of them is here before its size is known. So
what declares LARGE_BYTES or more is counted by itself (`decompressed_bytes`) until its application takes it: it is
decompressed when there is room below the limit, or when nothing else so large of its partition's
consumer waits. Until then it stays compressed, and so does what came after it (client/consume/deliveries.py).

In the event loop only. Guard: tests/client/consume/test_receive_memory.py.
"""

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


class SendMemory:
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
"""Memory of receiver queues without `memory_limit_bytes`."""
MESSAGE_OVERHEAD = 400
"""Bytes of a message beyond its payload: objects and metadata, about."""
FIRST_MESSAGES = 64
"""Messages of a first window, more than the chunks of most messages in chunks: a Shared subscription sends all of them
to one consumer, if it can take them. Less than a queue: what comes first may be large."""
FIRST_BYTES = 16 << 10
"""Bytes that a message counts whose size is not known."""
LARGE_BYTES = 1 << 20
"""Unfolded bytes from which on an entry is large: a client's batch has an eighth by default."""
NEW_WEIGHT = 1 / 4
"""Weight of the newest messages in the average size."""


class ReceiveMemory:
    """The memory limit for received messages, which the receiver queues of all consumers of one client share."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes  # 0: none
        self.producers: SendMemory | None = None  # they share the limit
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


class MemoryClaim:
    """The share of a client's ReceiveMemory that the consumer of one partition claims. Its `window` is the number of
    messages that this consumer may have in flight and in its queue together."""

    def __init__(self, memory: ReceiveMemory, queue_size: int) -> None:
        self._memory = memory
        self._bytes = 0.0
        self._message_bytes = 0.0  # 0: not known
        self.window = 0
        self.resize_queue(queue_size)

    def resize_queue(self, queue_size: int) -> None:
        """Claims as much memory as a receiver queue of `queue_size` messages needs, in place of the present claim."""
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
