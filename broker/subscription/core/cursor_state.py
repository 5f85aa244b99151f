"""The state of a cursor, and the chunks in which it is stored (core/positions.py, cursor_format.py).

Also in this file, below its heading: sets of numbers as the bits of one integer, and runs in bitmaps (bits).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
from pyroaring import BitMap

from ....proto.compression import UNCOMPRESSED_BYTES_MAX
from ....proto.names import Position
from ....proto.states import TxnId
from ...log.log_shape_core import run_end as run_end

BATCH_INDEXES_MAX = UNCOMPRESSED_BYTES_MAX // 6
"""The most messages that an entry can contain (each takes six bytes). A larger batch index acknowledges nothing."""
PARTIAL_BYTES, COUNT_BYTES = 300, 250
"""Bytes of memory that a partial batch takes in addition to its bits, and that a redelivery count takes: a position,
numbers, and a place in a sorted dictionary."""


class CursorChunkKind(enum.IntEnum):
    """The kinds of chunks. A chunk is a part of the stored state of a cursor. It covers 2 ** `block_bits` entries of
    one ledger; a chunk of the kind NOTE contains the note of the last commit."""

    HOLES = 1
    PARTIALS = 2
    COUNTS = 3
    PENDING = 4
    NOTE = 5

    __hash__ = int.__hash__  # that of an enum is a call of Python, and keys of chunks are in sets and dictionaries

    @property
    def block_bits(self) -> int:
        """The binary logarithm of the number of entries that a chunk of this kind covers."""
        return 20 if self in (CursorChunkKind.HOLES, CursorChunkKind.PENDING) else 10


class CursorChunkKey(NamedTuple):
    """Identifies a chunk of a cursor's stored state: its kind, the ledger, and the number of the block of entries that
    it covers. A chunk is always written as a whole."""

    kind: CursorChunkKind
    ledger_id: int
    block: int

    def entry_range(self) -> range:
        """Returns the range of entry ids that the chunk covers."""
        bits = self.kind.block_bits
        return range(self.block << bits, (self.block + 1) << bits)


NOTE_KEY = CursorChunkKey(CursorChunkKind.NOTE, 0, 0)
"""The one chunk with the note of the last commit."""


def chunk_keys_of_holes(ledger_id: int, holes: BitMap) -> Iterator[CursorChunkKey]:
    """Yields the keys of the chunks that store the acknowledged entries `holes` of a ledger, in ascending order."""
    bits = CursorChunkKind.HOLES.block_bits
    for block in range(holes.min() >> bits, (holes.max() >> bits) + 1):
        yield CursorChunkKey(CursorChunkKind.HOLES, ledger_id, block)


def chunk_key_of(kind: CursorChunkKind, position: Position) -> CursorChunkKey:
    """Returns the key of the chunk of this kind that covers the entry at `position`."""
    return CursorChunkKey(kind, position[0], position[1] >> kind.block_bits)


class PartialBatch(msgspec.Struct):
    """A batch of which some messages are acknowledged. `bits`: which of them (bit i: message i); `size`: the number of
    messages in the batch, 0 if not known."""

    bits: int = 0
    size: int = 0

    @property
    def memory_bytes(self) -> int:
        return PARTIAL_BYTES + (self.bits.bit_length() >> 3)


class RedeliveryCount(NamedTuple):
    """How many times consumers gave an entry back. `until_ms`: the end of the entry's back-off, before which it is not
    delivered again (ms since the epoch; 0: it may be delivered at once)."""

    redeliveries: int
    until_ms: int = 0


NO_COUNT = RedeliveryCount(0)


NOWHERE = Position(-1, -1)
"""A position before all others, at which no entry exists."""


class TxnAcks(msgspec.Struct):
    """The acknowledgements of one transaction at a subscription, while the transaction is open
    (core/pending_acks.py)."""

    entries: dict[int, BitMap] = {}  # ledger → whole entries
    parts: dict[Position, PartialBatch] = {}  # some messages of batches
    up_to: Position = NOWHERE  # a cumulative acknowledgement: everything up to and with it

    def __bool__(self) -> bool:
        return bool(self.entries or self.parts or self.up_to != NOWHERE)

    def has_entry(self, position: Position) -> bool:
        """Returns True if the transaction has acknowledged the entry as a whole."""
        entries = self.entries.get(position[0])
        return position <= self.up_to or (entries is not None and position[1] in entries)

    def message_bits_at(self, position: Position) -> int:
        """Returns, as bits (bit i: message i), which messages of a batch the transaction has acknowledged one by one. 0
        if it has acknowledged the whole entry, or no message of it."""
        part = self.parts.get(position)
        return part.bits if part is not None else 0

    def add(self, position: Position, bits: int = 0, size: int = 0) -> None:
        """Adds an acknowledgement. `bits`: the acknowledged messages of the batch (bit i: message i), 0 for the whole
        entry; `size`: the number of messages in the batch, 0 if not known."""
        if not bits:
            self.entries.setdefault(position[0], BitMap()).add(position[1])
        else:
            part = self.parts.setdefault(position, PartialBatch(0, size))
            part.bits |= bits

    @property
    def entry_count(self) -> int:
        """The number of entries that are acknowledged, as a whole or in part. A cumulative acknowledgement counts as
        one entry."""
        return sum(map(len, self.entries.values())) + len(self.parts) + (self.up_to != NOWHERE)

    def copy(self) -> TxnAcks:
        entries = {ledger_id: each.copy() for ledger_id, each in self.entries.items()}
        return TxnAcks(
            entries, {each: PartialBatch(part.bits, part.size) for each, part in self.parts.items()}, self.up_to
        )


def chunk_keys_of_pending_acks(acks: TxnAcks) -> Iterator[CursorChunkKey]:
    """Yields the keys of the chunks in which the acknowledgements `acks` are stored; a key may be yielded more than
    once. A cumulative acknowledgement is stored in the chunk of its position."""
    bits = CursorChunkKind.PENDING.block_bits
    for ledger_id, entries in acks.entries.items():
        first, last = entries.min() >> bits, entries.max() >> bits
        for block in range(first, last + 1):
            yield CursorChunkKey(CursorChunkKind.PENDING, ledger_id, block)
    for position in acks.parts:
        yield chunk_key_of(CursorChunkKind.PENDING, position)
    if acks.up_to != NOWHERE:
        yield chunk_key_of(CursorChunkKind.PENDING, Position(acks.up_to[0], max(0, acks.up_to[1])))


class CursorState(msgspec.Struct):
    """The complete state of a cursor, as it is stored (broker/subscription/cursor_format.py). The fields are those of
    `Cursor` (core/cursor.py)."""

    mark: Position
    acked: dict[int, BitMap] = {}
    partial: dict[Position, PartialBatch] = {}
    counts: dict[Position, RedeliveryCount] = {}
    pending: dict[TxnId, TxnAcks] = {}
    note: bytes = b""  # of the last commit


# ---------------------------------------------------------------------------------------------------------- bits
# Sets of numbers as the bits of one, and runs in bitmaps.


def bits_of_indexes(indexes: Iterable[int]) -> int:
    """Returns an integer in which the bits with the given indexes are set. Ignores negative indexes, and those that no
    batch can have (from BATCH_INDEXES_MAX on). The integer takes one bit of memory for each index up to the largest
    one."""
    kept = [index for index in indexes if 0 <= index < BATCH_INDEXES_MAX]
    if not kept:
        return 0
    bits = bytearray((max(kept) >> 3) + 1)
    for index in kept:
        bits[index >> 3] |= 1 << (index & 7)
    return int.from_bytes(bits, "little")


def bit_indexes(bits: int) -> Iterator[int]:
    """Yields the indexes of the bits that are set in `bits`, in ascending order."""
    text = bin(bits)[:1:-1]
    at = text.find("1")
    while at >= 0:
        yield at
        at = text.find("1", at + 1)


def first_clear_bit(bits: int) -> int:
    """Returns the index of the lowest bit of `bits` that is not set."""
    return (~bits & (bits + 1)).bit_length() - 1


def bitmap_memory_bytes(holes: BitMap) -> int:
    """Returns how many bytes of memory a bitmap takes: the containers of CRoaring, and the Python object. A container
    takes 8 KB as a bitset, 2 bytes for each value as an array, or 4 bytes for each run."""
    figures = holes.get_statistics()
    size = 200 + 16 * int(figures["n_containers"]) + int(figures["n_bytes_array_containers"])
    return size + int(figures["n_bytes_run_containers"]) + int(figures["n_bytes_bitset_containers"])


FEW = 64
"""Most values of a bitmap whose size is estimated from their number: to measure a small bitmap costs more than all
else."""


def bitmap_memory_bytes_max(holes: BitMap) -> int:
    """Returns an upper bound of `bitmap_memory_bytes(holes)` that is cheaper to compute. It is larger by at most 16
    bytes for each value of `holes`."""
    count = len(holes)
    return bitmap_memory_bytes(holes) if count > FEW else 200 + 18 * count


def count_contiguous_ranges(holes: BitMap) -> int:
    """Returns the number of contiguous ranges of values in the bitmap."""
    shifted = holes.shift(1)
    return len(holes) - len(holes & shifted)
