"""The pending acknowledgements of a cursor, by transaction and of all transactions together. The rules are in
pending_acks.py.

Whether a position is pending is one test: a bitmap per ledger and a dictionary of batches contain the union.
`memory_bytes` is updated at each change, and so are the chunks that contain something of a transaction (`keys_of`):
every write of the cursor contains all that is pending, so what does not change is not computed again. `rows` are the
stored bytes of transactions, as broker/subscription/cursor_format.py encoded them last.
Guarding tests: tests/broker/subscription/core/test_pending_acks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyroaring import BitMap

from ....proto.names import Position
from ....proto.states import TxnId
from ...log.log_shape_core import LogShape
from .cursor_state import (
    NOWHERE,
    CursorChunkKey,
    PartialBatch,
    TxnAcks,
    bitmap_memory_bytes_max,
    chunk_keys_of_pending_acks,
)

TXN_BYTES = 700
"""Bytes of a transaction beside its bitmaps and batches."""


class PendingAcks:
    """The pending acknowledgements of one cursor: those of each open transaction (`of`), and the union of all of them
    (`whole`, `parts`, `up_to`)."""

    __slots__ = ("_bytes", "_measured", "_part_bytes", "keys_of", "of", "parts", "rows", "up_to", "whole")

    def __init__(self, of: dict[TxnId, TxnAcks]) -> None:
        self.of: dict[TxnId, TxnAcks] = {}
        self.whole: dict[int, BitMap] = {}  # ledger → entries
        self.parts: dict[Position, PartialBatch] = {}  # batches of which some messages are pending
        self.up_to = NOWHERE  # everything up to it that is not acknowledged is pending
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
                    part = parts[position] = PartialBatch()
                else:
                    self._part_bytes -= part.memory_bytes
                part.bits |= new.bits
                part.size = part.size or new.size
                self._part_bytes += part.memory_bytes
        own.up_to = max(own.up_to, acks.up_to)
        self.up_to = max(self.up_to, acks.up_to)
        self.keys_of[txn] = tuple(dict.fromkeys(chunk_keys_of_pending_acks(own)))
        self.rows.pop(txn, None)
        measured = TXN_BYTES + 2 * sum(map(bitmap_memory_bytes_max, own.entries.values()))  # it is in the union as well
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
        if own.up_to != NOWHERE:
            self.up_to = NOWHERE
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
        if self.up_to != NOWHERE or any(position <= mark for position in self.parts):
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
            if acks.up_to != NOWHERE or acks.has_entry(position) or acks.message_bits_at(position)
        ]  # fmt: skip

    @property
    def entry_count(self) -> int:
        """The number of entries that are pending, as a whole or in part. A cumulative acknowledgement counts as one
        entry."""
        return sum(len(each) for each in self.whole.values()) + len(self.parts) + (self.up_to != NOWHERE)

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
            fitted = TxnAcks(left, parts, up_to if up_to > mark else NOWHERE)
            if fitted:
                kept[txn] = fitted
        return PendingAcks(kept) if kept else None

    def check_disjoint_from_acked(
        self, shape: LogShape, partial: Mapping[Position, PartialBatch], is_acked: Callable[[Position], bool]
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
        assert self.up_to == NOWHERE or self.up_to >= shape.start_position, "pending before the log"

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
        ends = [acks.up_to for acks in self.of.values() if acks.up_to != NOWHERE]
        assert ends == ([self.up_to] if self.up_to != NOWHERE else []), "there are two cumulative acknowledgements"
