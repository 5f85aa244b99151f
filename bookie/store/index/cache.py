"""Least recently used values, bounded by bytes: what does not fit is dropped, the oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A cache of the values that were used last. The caller says what a value costs; the sum is never above
    `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Replaces what was there."""
        values = self._values
        old = values.pop(key, None)
        if old is not None:
            self.size_bytes -= old[1]
        values[key] = value, size
        self.size_bytes += size
        while self.size_bytes > self.bytes_max:
            self.size_bytes -= values.popitem(last=False)[1][1]

    def pop(self, key: K) -> None:
        old = self._values.pop(key, None)
        if old is not None:
            self.size_bytes -= old[1]

    def check(self) -> None:
        assert self.size_bytes == sum(size for _, size in self._values.values())
        assert self.size_bytes <= self.bytes_max
