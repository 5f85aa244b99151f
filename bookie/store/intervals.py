"""A set of integers as disjoint intervals, ascending; neighbours are merged: ids that come in order cost nothing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise


class Intervals:
    """A set of integers, kept as disjoint intervals in ascending order."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def copy(self) -> Intervals:
        new = Intervals()
        new._firsts, new._lasts = self._firsts[:], self._lasts[:]
        return new

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._firsts, value) - 1
        return at >= 0 and value <= self._lasts[at]

    def __len__(self) -> int:
        """Returns the number of intervals."""
        return len(self._firsts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields (first, last) of each interval, ascending."""
        return zip(self._firsts, self._lasts, strict=True)

    def add(self, first: int, last: int) -> None:
        assert first <= last
        low = bisect_left(self._lasts, first - 1)
        high = bisect_right(self._firsts, last + 1)
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]

    def remove(self, first: int, last: int) -> None:
        assert first <= last
        low = bisect_left(self._lasts, first)
        high = bisect_right(self._firsts, last)
        if low >= high:
            return
        kept = [(self._firsts[low], first - 1), (last + 1, self._lasts[high - 1])]
        kept = [(a, b) for a, b in kept if a <= b]
        self._firsts[low:high] = [a for a, _ in kept]
        self._lasts[low:high] = [b for _, b in kept]

    def within(self, first: int, last: int) -> list[tuple[int, int]]:
        """Returns the parts of first .. last that are in the set, as intervals."""
        low = bisect_left(self._lasts, first)
        high = bisect_right(self._firsts, last)
        return [(max(self._firsts[i], first), min(self._lasts[i], last)) for i in range(low, high)]

    def check(self) -> None:
        """Checks that no interval is empty, and that they are disjoint, ascending and not adjacent."""
        assert all(first <= last for first, last in self)
        assert all(a[1] + 1 < b[0] for a, b in pairwise(self))
