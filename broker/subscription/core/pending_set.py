"""What is pending in a cursor, by transaction and of all of them together. The rules: pending_acks.py.

A position is one test away: a bitmap per ledger and a dictionary of batches hold the union. `memory_bytes` is kept with
each change. Guarding tests: tests/broker/subscription/core/test_pending_acks.py.
"""

from __future__ import annotations

from pyroaring import BitMap

from ....proto.names import Position
from ....proto.transactions import TxnId
from .bits import bytes_of
from .cursor_state import NOWHERE, ChunkKey, Partial, TxnAcks, keys_of_pending

TXN_BYTES = 700
"""Bytes of a transaction beside its bitmaps and batches."""


class PendingAcks:
    """What is pending in a cursor: by transaction, and of all of them together."""

    __slots__ = ("_measured", "_part_bytes", "_union_bytes", "of", "parts", "up_to", "whole")

    def __init__(self, of: dict[TxnId, TxnAcks]) -> None:
        self.of: dict[TxnId, TxnAcks] = {}
        self.whole: dict[int, BitMap] = {}  # ledger → entries
        self.parts: dict[Position, Partial] = {}  # batches of which some messages are pending
        self.up_to = NOWHERE  # everything up to it that is not acknowledged is pending
        self._measured: dict[TxnId, int] = {}
        self._part_bytes = 0
        self._union_bytes = 0
        for txn, acks in of.items():
            self.add(txn, acks)

    # ------------------------------------------------------------------ changes
    def add(self, txn: TxnId, acks: TxnAcks) -> None:
        """They become pending in it, beside what is. Nothing of it is pending in another one."""
        own = self.of.setdefault(txn, TxnAcks())
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
                    part = parts[position] = Partial()
                else:
                    self._part_bytes -= part.memory_bytes
                part.bits |= new.bits
                part.size = part.size or new.size
                self._part_bytes += part.memory_bytes
        own.up_to = max(own.up_to, acks.up_to)
        self.up_to = max(self.up_to, acks.up_to)
        self._measure(txn)

    def take(self, txn: TxnId) -> TxnAcks | None:
        """What is pending in it, which is pending no more."""
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
        self._measured.pop(txn, None)
        self._measure(None)
        return own

    def _measure(self, txn: TxnId | None) -> None:
        """Linear in the bitmaps of one transaction: some, and one per ledger of the union."""
        if txn is not None:
            self._measured[txn] = TXN_BYTES + sum(map(bytes_of, self.of[txn].entries.values()))
        self._union_bytes = sum(map(bytes_of, self.whole.values()))

    # ------------------------------------------------------------------ questions
    def holds(self, position: Position) -> bool:
        """Whether the entry is pending as a whole."""
        if position <= self.up_to:
            return True
        entries = self.whole.get(position[0])
        return entries is not None and position[1] >= 0 and position[1] in entries

    def bits_at(self, position: Position) -> int:
        """The messages of a batch that are pending, where it is not pending as a whole."""
        part = self.parts.get(position)
        return part.bits if part is not None else 0

    def holds_any(self, mark: Position) -> bool:
        """Whether anything up to and with that position is pending."""
        if self.up_to != NOWHERE or any(position <= mark for position in self.parts):
            return True
        return any(Position(ledger_id, entries.min()) <= mark for ledger_id, entries in self.whole.items())

    def without(self, ledger_id: int, entries: BitMap) -> BitMap:
        """Those of the entries of a ledger of which nothing is pending."""
        free = entries.copy()
        if ledger_id <= self.up_to[0]:
            end = self.up_to[1] + 1 if ledger_id == self.up_to[0] else 1 << 32
            free.remove_range(0, max(0, end))
        if ledger_id in self.whole:
            free -= self.whole[ledger_id]
        for position in self.parts_in(ledger_id, free):
            free.discard(position[1])
        return free

    def parts_in(self, ledger_id: int, entries: BitMap) -> list[Position]:
        """The batches among those entries of which some messages are pending."""
        return [each for each in self.parts if each[0] == ledger_id and each[1] in entries] if self.parts else []

    def holders(self, position: Position) -> list[TxnId]:
        """The transactions that have acknowledged some of the entry, or anything cumulatively."""
        return [
            txn for txn, acks in self.of.items()
            if acks.up_to != NOWHERE or acks.holds(position) or acks.bits_at(position)
        ]  # fmt: skip

    @property
    def entries(self) -> int:
        """Entries that are pending, wholly or in part; a cumulative acknowledgement counts as one."""
        return sum(len(each) for each in self.whole.values()) + len(self.parts) + (self.up_to != NOWHERE)

    @property
    def memory_bytes(self) -> int:
        return sum(self._measured.values()) + self._part_bytes + self._union_bytes

    def keys(self) -> list[ChunkKey]:
        return sorted({key for acks in self.of.values() for key in keys_of_pending(acks)})

    def check(self) -> None:
        """One holder for each message; the union is the sum of its parts."""
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
        assert not [each for each in parts if self.holds(each)], "a batch is pending as a whole and in part"
        ends = [acks.up_to for acks in self.of.values() if acks.up_to != NOWHERE]
        assert ends == ([self.up_to] if self.up_to != NOWHERE else []), "there are two cumulative acknowledgements"
