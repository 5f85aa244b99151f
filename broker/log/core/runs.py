"""Runs of contiguous values in bitmaps, found in logarithmically many steps."""

from __future__ import annotations

from pyroaring import BitMap


def run_end(entries: BitMap, first: int) -> int:
    """The last of the contiguous values that begin with `first`, which is one of them."""
    low, step = first, 1
    while entries.contains_range(low, low + step + 1):
        low, step = low + step, step * 2
    while step:
        if entries.contains_range(low, low + step + 1):
            low += step
        step //= 2
    return low


def run_start(entries: BitMap, last: int) -> int:
    """The first of the contiguous values that end with `last`, which is one of them."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if entries.contains_range(middle, last + 1):
            high = middle
        else:
            low = middle + 1
    return low
