"""The queue of one peer connection: bounded in bytes, sent in multiparts of about COALESCE_BYTES."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..files import Buffer
from ..network import COALESCE_BYTES

QUEUE_BYTES_MAX = 64 << 20
"""Bound of the queue of one connection: a second of 512 Mbit/s; more would only be late."""

ITEM_BYTES = 64
"""Cost of an item besides its content, so that the bound also holds for empty ones."""

Queued = tuple[int, bytes, Sequence[Buffer]]
"""(id, head, frames) of a request or a reply."""


def bytes_of(head: bytes, frames: Sequence[Buffer]) -> int:
    size = ITEM_BYTES + len(head)
    for frame in frames:
        size += len(frame)
    return size


class Outbox:
    """The queue of one connection, in order, and the size of its next multipart."""

    __slots__ = ("bytes", "items")

    def __init__(self) -> None:
        self.items: deque[tuple[int, Queued]] = deque()
        self.bytes = 0

    def add(self, size: int, item: Queued) -> None:
        self.items.append((size, item))
        self.bytes += size

    def full(self, size: int) -> bool:
        """Whether `size` more exceeds the bound. A single item is always taken, of any size."""
        return bool(self.items) and self.bytes + size > QUEUE_BYTES_MAX

    def head(self) -> tuple[int, list[Queued]]:
        """Returns (bytes, items) of the next multipart; they stay in the queue until `sent`."""
        size = 0
        batch: list[Queued] = []
        for item_bytes, item in self.items:
            if batch and size + item_bytes > COALESCE_BYTES:
                break
            batch.append(item)
            size += item_bytes
        return size, batch

    def sent(self, size: int, count: int) -> None:
        self.bytes -= size
        if count == len(self.items):
            self.items.clear()
        else:
            for _ in range(count):
                self.items.popleft()

    def clear(self) -> None:
        self.items.clear()
        self.bytes = 0
