"""The state of a cursor, and the chunks in which it is stored (core/positions.py, cursor_format.py).

Also in this file, each below its heading: sets of numbers as the bits of one integer, and runs in bitmaps (bits); the
pending acknowledgements of a cursor (pending acknowledgements).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from pyroaring import BitMap

from ....proto.compression import UNCOMPRESSED_BYTES_MAX
from ....proto.names import Position
from ....proto.states import TxnId
from ...log.log_shape_core import LogShape
from ...log.log_shape_core import find_end_of_contiguous as find_end_of_contiguous

BATCH_INDEXES_MAX = UNCOMPRESSED_BYTES_MAX // 6
"""The most messages that an entry can contain (each takes six bytes). A larger batch index acknowledges nothing."""
PARTIAL_BATCH_BYTES, REDELIVERY_COUNT_BYTES = 300, 250
"""Bytes of memory that a partial batch takes in addition to its bits, and that a redelivery count takes: a position,
numbers, and a place in a sorted dictionary."""

HOLES_OF_LEDGER_BYTES = 500
"""Bytes of memory of a ledger with holes beside its bitmap: places in dictionaries, and the row of the stored chunk
(measured with 50,000 ledgers of one hole: 484)."""


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


COMMIT_NOTE_KEY = CursorChunkKey(CursorChunkKind.NOTE, 0, 0)
"""The one chunk with the note of the last commit."""


def chunk_keys_of_holes(ledger_id: int, holes: BitMap) -> Iterator[CursorChunkKey]:
    """Yields the keys of the chunks that store the acknowledged entries `holes` of a ledger, in ascending order.
    `holes` must not be empty."""
    bits = CursorChunkKind.HOLES.block_bits
    for block in range(holes.min() >> bits, (holes.max() >> bits) + 1):
        yield CursorChunkKey(CursorChunkKind.HOLES, ledger_id, block)


def chunk_key_of(kind: CursorChunkKind, position: Position) -> CursorChunkKey:
    """Returns the key of the chunk of this kind that covers the entry at `position`."""
    return CursorChunkKey(kind, position[0], position[1] >> kind.block_bits)


class PartlyAckedBatch(msgspec.Struct):
    """A batch of which some messages are acknowledged. `bits`: which of them (bit i: message i); `size`: the number of
    messages in the batch, 0 if not known."""

    bits: int = 0
    size: int = 0

    @property
    def memory_bytes(self) -> int:
        return PARTIAL_BATCH_BYTES + (self.bits.bit_length() >> 3)


class RedeliveryCount(NamedTuple):
    """How many times consumers gave an entry back. `until_ms`: the end of the entry's back-off, before which it is not
    delivered again (ms since the epoch; 0: it may be delivered at once)."""

    redeliveries: int
    until_ms: int = 0


NO_REDELIVERY_COUNT = RedeliveryCount(0)


NO_POSITION = Position(-1, -1)
"""A position before all others, at which no entry exists."""


class TxnAcks(msgspec.Struct):
    """The acknowledgements of one transaction at a subscription, while the transaction is open
    (core/pending_acks.py)."""

    entries: dict[int, BitMap] = {}  # ledger → whole entries
    parts: dict[Position, PartlyAckedBatch] = {}  # some messages of batches
    up_to: Position = NO_POSITION  # a cumulative acknowledgement: everything up to and with it

    def __bool__(self) -> bool:
        return bool(self.entries or self.parts or self.up_to != NO_POSITION)

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
            part = self.parts.setdefault(position, PartlyAckedBatch(0, size))
            part.bits |= bits

    @property
    def entry_count(self) -> int:
        """The number of entries that are acknowledged, as a whole or in part. A cumulative acknowledgement counts as
        one entry."""
        return sum(map(len, self.entries.values())) + len(self.parts) + (self.up_to != NO_POSITION)

    def copy(self) -> TxnAcks:
        entries = {ledger_id: each.copy() for ledger_id, each in self.entries.items()}
        return TxnAcks(
            entries, {each: PartlyAckedBatch(part.bits, part.size) for each, part in self.parts.items()}, self.up_to
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
    if acks.up_to != NO_POSITION:
        yield chunk_key_of(CursorChunkKind.PENDING, Position(acks.up_to[0], max(0, acks.up_to[1])))


class CursorState(msgspec.Struct):
    """The complete state of a cursor, as it is stored (broker/subscription/cursor_format.py). The fields are those of
    `Cursor` (core/cursor.py)."""

    mark: Position
    acked: dict[int, BitMap] = {}
    partial: dict[Position, PartlyAckedBatch] = {}
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


SMALL_HOLE_COUNT = 64
"""Most values of a bitmap whose size is estimated from their number: to measure a small bitmap costs more than all
else."""


def bitmap_memory_bytes_max(holes: BitMap) -> int:
    """Returns an upper bound of `bitmap_memory_bytes(holes)` that is cheaper to compute. It is larger by at most 16
    bytes for each value of `holes`."""
    count = len(holes)
    return bitmap_memory_bytes(holes) if count > SMALL_HOLE_COUNT else 200 + 18 * count


def count_contiguous_ranges(holes: BitMap) -> int:
    """Returns the number of contiguous ranges of values in the bitmap."""
    shifted = holes.shift(1)
    return len(holes) - len(holes & shifted)


# --------------------------------------------------------------------------------------------- pending acknowledgements
# The pending acknowledgements of a cursor, by transaction and of all transactions together. The rules are in
# pending_acks.py.
#
# Whether a position is pending is one test: a bitmap per ledger and a dictionary of batches contain the union.
# `memory_bytes` is updated at each change, and so are the chunks that contain something of a transaction (`keys_of`):
# every write of the cursor contains all that is pending, so what does not change is not computed again. `rows` are the
# stored bytes of transactions, as broker/subscription/cursor_format.py encoded them last.
# Guarding tests: tests/broker/subscription/core/test_pending_acks.py.


TXN_MEMORY_BYTES = 700
"""Bytes of a transaction beside its bitmaps and batches."""


class PendingAcks:
    """The pending acknowledgements of one cursor: those of each open transaction (`of`), and the union of all of them
    (`whole`, `parts`, `up_to`)."""

    __slots__ = ("_bytes", "_measured", "_part_bytes", "keys_of", "of", "parts", "rows", "up_to", "whole")

    def __init__(self, of: dict[TxnId, TxnAcks]) -> None:
        self.of: dict[TxnId, TxnAcks] = {}
        self.whole: dict[int, BitMap] = {}  # ledger → entries
        self.parts: dict[Position, PartlyAckedBatch] = {}  # batches of which some messages are pending
        self.up_to = NO_POSITION  # everything up to it that is not acknowledged is pending
        self.keys_of: dict[TxnId, tuple[CursorChunkKey, ...]] = {}
        self.rows: dict[TxnId, bytes] = {}  # of those that are in one chunk, since they changed last
        self._measured: dict[TxnId, int] = {}
        self._bytes = 0  # the sum of it
        self._part_bytes = 0
        for txn, acks in of.items():
            self.add(txn, acks)

    # ------------------------------------------------------------------ changes
    def add(self, txn: TxnId, acks: TxnAcks) -> None:
        """Adds acknowledgements to those that are pending in the transaction. None of them may be pending in another
        transaction."""
        own = self.of.get(txn)
        if own is None:
            own = self.of[txn] = TxnAcks()
        for ledger_id, entries in acks.entries.items():
            for held in (own.entries, self.whole):
                if ledger_id in held:
                    held[ledger_id] |= entries
                else:
                    held[ledger_id] = entries.copy()
        for position, new in acks.parts.items():
            for parts in (own.parts, self.parts):
                part = parts.get(position)
                if part is None:
                    part = parts[position] = PartlyAckedBatch()
                else:
                    self._part_bytes -= part.memory_bytes
                part.bits |= new.bits
                part.size = part.size or new.size
                self._part_bytes += part.memory_bytes
        own.up_to = max(own.up_to, acks.up_to)
        self.up_to = max(self.up_to, acks.up_to)
        self.keys_of[txn] = tuple(dict.fromkeys(chunk_keys_of_pending_acks(own)))
        self.rows.pop(txn, None)
        # it is in the union as well
        measured = TXN_MEMORY_BYTES + 2 * sum(map(bitmap_memory_bytes_max, own.entries.values()))
        self._bytes += measured - self._measured.get(txn, 0)
        self._measured[txn] = measured

    def take_acks_of_transaction(self, txn: TxnId) -> TxnAcks | None:
        """Removes the pending acknowledgements of the transaction and returns them; None if there are none."""
        own = self.of.pop(txn, None)
        if own is None:
            return None
        for ledger_id, entries in own.entries.items():
            self.whole[ledger_id] -= entries
            if not self.whole[ledger_id]:
                del self.whole[ledger_id]
        for position, part in own.parts.items():
            union = self.parts[position]
            self._part_bytes -= part.memory_bytes + union.memory_bytes
            union.bits &= ~part.bits
            if union.bits:
                self._part_bytes += union.memory_bytes
            else:
                del self.parts[position]
        if own.up_to != NO_POSITION:
            self.up_to = NO_POSITION
        self._bytes -= self._measured.pop(txn)
        del self.keys_of[txn]
        self.rows.pop(txn, None)
        return own

    # ------------------------------------------------------------------ questions
    def is_entry_pending(self, position: Position) -> bool:
        """Returns True if the entry is pending as a whole in a transaction."""
        if position <= self.up_to:
            return True
        entries = self.whole.get(position[0])
        return entries is not None and position[1] >= 0 and position[1] in entries

    def message_bits_at(self, position: Position) -> int:
        """Returns, as bits (bit i: message i), which messages of a batch are pending one by one. 0 if the whole entry
        is pending, or no message of it."""
        part = self.parts.get(position)
        return part.bits if part is not None else 0

    def has_pending_up_to(self, mark: Position) -> bool:
        """Returns True if an entry up to and including `mark` is pending, as a whole or in part, or if a cumulative
        acknowledgement is pending."""
        if self.up_to != NO_POSITION or any(position <= mark for position in self.parts):
            return True
        return any(Position(ledger_id, entries.min()) <= mark for ledger_id, entries in self.whole.items())

    def exclude_pending_entries(self, ledger_id: int, entries: BitMap) -> BitMap:
        """Returns `entries` (entry ids of one ledger) without those that are pending, as a whole or in part."""
        free = entries.copy()
        if ledger_id <= self.up_to[0]:
            end = self.up_to[1] + 1 if ledger_id == self.up_to[0] else 1 << 32
            free.remove_range(0, max(0, end))
        if ledger_id in self.whole:
            free -= self.whole[ledger_id]
        for position in self.partial_batches_in(ledger_id, free):
            free.discard(position[1])
        return free

    def may_have_pending_among(self, ledger_id: int, entries: BitMap) -> bool:
        """Returns True if one of the `entries` of this ledger may be pending, as a whole or in part. (True is possible
        although none is.)"""
        whole = self.whole.get(ledger_id)
        return (
            bool(self.parts) or ledger_id <= self.up_to[0] or (whole is not None and entries.intersect(whole))
        )

    def partial_batches_in(self, ledger_id: int, entries: BitMap) -> list[Position]:
        """Returns the positions of those batches among the `entries` of one ledger of which some messages are
        pending."""
        return [each for each in self.parts if each[0] == ledger_id and each[1] in entries] if self.parts else []

    def find_transactions(self, position: Position) -> list[TxnId]:
        """Returns the open transactions that have acknowledged the entry or a message of it, and those that have a
        cumulative acknowledgement, whether it covers the entry or not."""
        return [
            txn for txn, acks in self.of.items()
            if acks.up_to != NO_POSITION or acks.has_entry(position) or acks.message_bits_at(position)
        ]  # fmt: skip

    @property
    def entry_count(self) -> int:
        """The number of entries that are pending, as a whole or in part. A cumulative acknowledgement counts as one
        entry."""
        return sum(len(each) for each in self.whole.values()) + len(self.parts) + (self.up_to != NO_POSITION)

    @property
    def memory_bytes(self) -> int:
        """An upper bound of the bytes of memory that the pending acknowledgements take."""
        return self._bytes + self._part_bytes

    def chunk_keys(self) -> list[CursorChunkKey]:
        """Returns the sorted keys of the chunks in which pending acknowledgements are stored."""
        return sorted(set().union(*self.keys_of.values()))

    def select_acks_in_log(
        self, shape: LogShape, mark: Position, is_acked: Callable[[Position], bool]
    ) -> PendingAcks | None:
        """Returns the pending acknowledgements that still apply after a restart: those whose entries are in the log and
        are not acknowledged. `mark`: the mark of the cursor. Returns None if there are none. This object must not be
        used afterwards."""
        kept = {}
        for txn, acks in self.of.items():
            for ledger_id, entries in acks.entries.items():
                span = shape.find_span_of_ledger(ledger_id)
                entries &= BitMap(range(span.last_entry + 1)) if span is not None else BitMap()
                entries -= BitMap(each for each in entries if is_acked(Position(ledger_id, each)))
            left = {ledger_id: entries for ledger_id, entries in acks.entries.items() if entries}
            parts = {
                each: part for each, part in acks.parts.items() if shape.has_visible_entry(each) and not is_acked(each)
            }
            up_to = min(acks.up_to, shape.last_position)
            fitted = TxnAcks(left, parts, up_to if up_to > mark else NO_POSITION)
            if fitted:
                kept[txn] = fitted
        return PendingAcks(kept) if kept else None

    def check_disjoint_from_acked(
        self, shape: LogShape, partial: Mapping[Position, PartlyAckedBatch], is_acked: Callable[[Position], bool]
    ) -> None:
        """Raises AssertionError if an entry or a message is both acknowledged and pending."""
        self.check()
        assert self.of, "pending acknowledgements without a transaction are kept"
        for ledger_id, entries in self.whole.items():
            assert not any(is_acked(Position(ledger_id, each)) for each in entries), "acknowledged, and pending"
        for position, part in self.parts.items():
            assert not is_acked(position), "a batch is acknowledged, and pending in part"
            acked = partial[position].bits if position in partial else 0
            assert not part.bits & acked, "a message is acknowledged, and pending"
        assert self.up_to == NO_POSITION or self.up_to >= shape.start_position, "pending before the log"

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken: each message is pending in one transaction at most; the
        union agrees with the transactions."""
        whole, parts = dict[int, BitMap](), dict[Position, int]()
        for acks in self.of.values():
            assert acks, "a transaction without a pending acknowledgement is kept"
            for ledger_id, entries in acks.entries.items():
                assert entries, "an empty bitmap is kept"
                held = whole.setdefault(ledger_id, BitMap())
                assert not held & entries, "an entry is pending in two transactions"
                held |= entries
            for position, part in acks.parts.items():
                assert part.bits, "a batch is kept of which nothing is pending"
                assert not parts.get(position, 0) & part.bits, "a message is pending in two transactions"
                parts[position] = parts.get(position, 0) | part.bits
        assert whole == self.whole, "the union has other entries than the transactions"
        assert parts == {each: part.bits for each, part in self.parts.items()}, "the union has other messages"
        assert not [each for each in parts if self.is_entry_pending(each)], "a batch is pending as a whole and in part"
        for txn, acks in self.of.items():
            assert self.keys_of[txn] == tuple(
                dict.fromkeys(chunk_keys_of_pending_acks(acks))
            ), "what changed has other chunks"
        assert self.keys_of.keys() == self._measured.keys() == self.of.keys(), "a transaction is not measured"
        assert self.rows.keys() <= self.of.keys(), "bytes are kept of nothing"
        assert self._bytes == sum(self._measured.values()), "weighed wrong"
        ends = [acks.up_to for acks in self.of.values() if acks.up_to != NO_POSITION]
        assert ends == ([self.up_to] if self.up_to != NO_POSITION else []), "there are two cumulative acknowledgements"
