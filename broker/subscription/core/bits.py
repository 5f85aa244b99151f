"""Sets of numbers as the bits of one, and runs in bitmaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pyroaring import BitMap

from ...log.core.runs import run_end as run_end
from .cursor_state import BATCH_INDEXES_MAX


def bits_of(indexes: Iterable[int]) -> int:
    """The number with these bits, without those that no entry can have: costs as much as the largest has bytes."""
    kept = [index for index in indexes if 0 <= index < BATCH_INDEXES_MAX]
    if not kept:
        return 0
    bits = bytearray((max(kept) >> 3) + 1)
    for index in kept:
        bits[index >> 3] |= 1 << (index & 7)
    return int.from_bytes(bits, "little")


def ones(bits: int) -> Iterator[int]:
    """The positions of the bits that are set, ascending."""
    text = bin(bits)[:1:-1]
    at = text.find("1")
    while at >= 0:
        yield at
        at = text.find("1", at + 1)


def first_zero(bits: int) -> int:
    """The position of the first bit that is not set."""
    return (~bits & (bits + 1)).bit_length() - 1


def bytes_of(holes: BitMap) -> int:
    """Bytes of the containers as CRoaring keeps them (a bitset of 8 KB, two bytes a value, four bytes a run), and of
    the object.
    """
    figures = holes.get_statistics()
    size = 200 + 16 * int(figures["n_containers"]) + int(figures["n_bytes_array_containers"])
    return size + int(figures["n_bytes_run_containers"]) + int(figures["n_bytes_bitset_containers"])


FEW = 64
"""Values that are weighed by their number: the figures of a bitmap cost more than all else of a small one."""


def at_most(holes: BitMap) -> int:
    """Returns an upper bound of `bytes_of`: at most 16 bytes a value more."""
    count = len(holes)
    return bytes_of(holes) if count > FEW else 200 + 18 * count


def ranges(holes: BitMap) -> int:
    shifted = holes.shift(1)
    return len(holes) - len(holes & shifted)
