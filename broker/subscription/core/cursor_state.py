"""The state of a cursor, and the pieces in which it is stored (core/cursor_log.py, format/cursor.py)."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from pyroaring import BitMap

from ....proto.compression import UNCOMPRESSED_BYTES_MAX
from ....proto.names import Position

BATCH_INDEXES_MAX = UNCOMPRESSED_BYTES_MAX // 6
"""The most messages of an entry (six bytes each): an index above it acknowledges nothing."""
PARTIAL_BYTES, COUNT_BYTES = 300, 250
"""Bytes of one beside its bits: a position, its numbers, and their places in a sorted dictionary."""


class ChunkKind(enum.IntEnum):
    """Pieces of a state; `blocks` is how many entries of a ledger one of them covers, as a power of two."""

    HOLES = 1
    PARTIALS = 2
    COUNTS = 3

    @property
    def block_bits(self) -> int:
        return 20 if self is ChunkKind.HOLES else 10


class ChunkKey(NamedTuple):
    """A part of a ledger: its holes, its partial batches or its counts. It is written again as a whole."""

    kind: ChunkKind
    ledger_id: int
    block: int

    def covers(self) -> range:
        bits = self.kind.block_bits
        return range(self.block << bits, (self.block + 1) << bits)


def keys_of_holes(ledger_id: int, holes: BitMap) -> Iterator[ChunkKey]:
    """All from the first of the holes to the last one."""
    bits = ChunkKind.HOLES.block_bits
    for block in range(holes.min() >> bits, (holes.max() >> bits) + 1):
        yield ChunkKey(ChunkKind.HOLES, ledger_id, block)


def key_of(kind: ChunkKind, position: Position) -> ChunkKey:
    return ChunkKey(kind, position[0], position[1] >> kind.block_bits)


class Partial(msgspec.Struct):
    """A batch acknowledged in part: bit i is message i. `size` 0: not known."""

    bits: int = 0
    size: int = 0

    @property
    def memory_bytes(self) -> int:
        return PARTIAL_BYTES + (self.bits.bit_length() >> 3)


class Count(NamedTuple):
    """How often an entry was given back; `until_ms`: it is not delivered before this time of day (0: at once)."""

    redeliveries: int
    until_ms: int = 0


NO_COUNT = Count(0)


class CursorState(msgspec.Struct):
    """The stored state: enough to continue after a crash (broker/subscription/format/cursor.py)."""

    mark: Position
    acked: dict[int, BitMap] = {}
    partial: dict[Position, Partial] = {}
    counts: dict[Position, Count] = {}
