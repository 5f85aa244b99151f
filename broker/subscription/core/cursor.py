"""A cursor: what a subscription has acknowledged, with any number of holes, and how often entries were given back.

State: `mark` (mark-delete: everything up to and with it is acknowledged), `acked` (whole entries after the mark, one
roaring bitmap per ledger: the holes), `partial` (entries of which only some batch indexes are acknowledged, as the
bits of a number) and `counts` (how often an entry was given back, and until when it is held back).

Rules (ledger protocol §3.5, invariants 36 and 44)
- The mark advances only over contiguous acknowledged entries, and never goes backwards; `seek` alone sets it freely.
- Nothing beyond the last confirmed entry can be acknowledged: the caller checks that against the log's shape.
- No hole is ever dropped, and their number is not limited. `memory_bytes` is what they cost, and past the budget the
  dispatcher delivers nothing new (`broker/subscription/core/dispatch.py`). The bitmaps are compressed first
  (`exceeds_memory`): then they take at most four bytes for each entry between them that is not acknowledged, and a
  constant for each ledger. A bitmap of a million alternating holes takes 250 KB.
- `version` grows with every change; `persisted` is the version that is stored. `has_unstored_changes` compares them.
  Which pieces of the state have changed since they were stored is in `changed_chunks`: a `CursorChunkKey` each, the
  unit that is written again (broker/subscription/core/positions.py). The mark is in none of them: moving it rewrites
  nothing.
- A batch whose size is not known yet (acknowledged after a restart) keeps its bits; `set_batch_size` decides
  when it is read.
- A redelivery count lasts as long as its entry: it is forgotten when the entry is acknowledged, and by `seek`. With
  `counts_first` the count belongs to the first unacknowledged message of the entry, because no program has received the
  messages after it yet: the count lasts as long as that message.
- `note` is what the program that committed last gave with it (`set_commit_note`); a seek removes it.
- What is acknowledged in an open transaction is `pending` (core/pending_acks.py): in the backlog,
  `is_acked_or_pending`, and left out by every acknowledgement. The mark does not pass it.
Guarding tests: tests/broker/subscription/core/test_cursor.py (plain sets),
tests/broker/subscription/test_cursor_model.py (with crashes).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyroaring import BitMap
from sortedcontainers import SortedDict

from ....proto.names import Position
from ...log.log_shape_core import LogShape, TrimLimit
from .cursor_state import (
    BATCH_INDEXES_MAX,
    COMMIT_NOTE_KEY,
    HOLES_OF_LEDGER_BYTES,
    NO_REDELIVERY_COUNT,
    REDELIVERY_COUNT_BYTES,
    CursorChunkKey,
    CursorChunkKind,
    CursorState,
    PartlyAckedBatch,
    PendingAcks,
    RedeliveryCount,
    bit_indexes,
    bitmap_memory_bytes,
    chunk_key_of,
    chunk_keys_of_holes,
    count_contiguous_ranges,
    find_end_of_contiguous,
    first_clear_bit,
)

_NONE: SortedDict[Position, Any] = SortedDict()
"""The empty dictionary of most cursors. One for all of them, because it costs 2 KB: never add to it."""


class AckHoles:
    """The holes of a cursor (the acknowledged entries after its mark), as one bitmap of entry ids per ledger. Also
    counts the memory that the bitmaps take. A `Cursor` creates this object with its first hole, because most cursors
    have none."""

    __slots__ = ("_acked", "_loose", "_sizes", "_unsized", "full")

    def __init__(self, acked: dict[int, BitMap]) -> None:
        self._acked = acked
        self.full: dict[int, tuple[int, int]] = {}
        """Ledger, all holes → (last entry, version) seen so first."""
        self._sizes: dict[int, int] = {}
        """Bytes of the bitmap of a ledger."""
        self._unsized = set(acked)
        """Ledgers whose bitmap has changed since it was measured."""
        self._loose = set(acked)
        """Ledgers whose bitmap has changed since it was compressed."""

    def get_or_create_hole_bitmap(self, ledger_id: int) -> BitMap:
        """Returns the bitmap with the holes of a ledger. The caller may change it. Creates an empty bitmap if the
        ledger has no holes."""
        holes = self._acked.get(ledger_id)
        if holes is None:
            holes = self._acked[ledger_id] = BitMap()
        self._on_bitmap_changed(ledger_id)
        return holes

    def _on_bitmap_changed(self, ledger_id: int) -> None:
        self._unsized.add(ledger_id)
        self._loose.add(ledger_id)

    def compress_holes_of_ledger(self, ledger_id: int) -> BitMap:
        """Brings the bitmap with the holes of a ledger, which must have some, into the form that takes the least
        memory, and returns it."""
        holes = self._acked[ledger_id]
        holes.run_optimize()
        self._unsized.add(ledger_id)
        self._loose.discard(ledger_id)
        return holes

    def compress_all_holes(self) -> None:
        """Brings each bitmap that has changed since it was compressed into the form that takes the least memory."""
        for ledger_id in list(self._loose):
            self.compress_holes_of_ledger(ledger_id)

    def discard_holes_of_ledger(self, ledger_id: int) -> None:
        """Removes all holes in the ledger, which must have some."""
        del self._acked[ledger_id]
        self.full.pop(ledger_id, None)
        self._sizes.pop(ledger_id, None)
        self._unsized.discard(ledger_id)
        self._loose.discard(ledger_id)

    def discard_holes_up_to(self, mark: Position) -> None:
        """Removes the holes up to and including the position `mark`."""
        ledger_id, entry_id = mark
        for id_ in [id_ for id_ in self._acked if id_ < ledger_id]:
            self.discard_holes_of_ledger(id_)
        holes = self._acked.get(ledger_id)
        if holes is not None and holes.min() <= entry_id:
            holes.remove_range(0, entry_id + 1)
            self._on_bitmap_changed(ledger_id)
            if not holes:
                self.discard_holes_of_ledger(ledger_id)

    @property
    def hole_range_count(self) -> int:
        """The number of ranges of consecutive acknowledged entries, over all ledgers."""
        return sum(count_contiguous_ranges(holes) for holes in self._acked.values())

    @property
    def memory_bytes(self) -> int:
        """How many bytes of memory the bitmaps take, and what is kept for each of their ledgers. The size is computed
        again only for the bitmaps that have changed."""
        for ledger_id in self._unsized:
            self._sizes[ledger_id] = HOLES_OF_LEDGER_BYTES + bitmap_memory_bytes(self._acked[ledger_id])
        self._unsized.clear()
        return sum(self._sizes.values())

    def check(self, mark: Position, following: Position) -> None:
        """Raises AssertionError if an invariant is broken: every hole is after the mark `mark`; the entry at
        `following`, directly after the mark, is no hole; no bitmap is empty."""
        holes = self._acked.get(following[0])
        assert holes is None or following[1] < 0 or following[1] not in holes, "the mark could advance and did not"
        for ledger_id, holes in self._acked.items():
            assert holes, "an empty bitmap is kept"
            assert Position(ledger_id, holes.min()) > mark, "a hole is before the mark"
        assert set(self._acked) == set(self._sizes) | self._unsized, "a bitmap is not measured"
        assert self._loose <= set(self._acked), "a bitmap is to be compressed that is not kept"


class Cursor:
    """The acknowledgement state of one subscription: the mark, up to which everything is acknowledged, and what is
    acknowledged or pending after the mark. *Pending*: acknowledged in a transaction that is still open."""

    __slots__ = (
        "_changed", "_holes", "_partial_bytes", "_shape", "acked", "counts", "counts_first", "mark", "note",
        "partial", "partial_messages", "pending", "persisted", "persisted_mark", "seeks", "version",
    )  # fmt: skip

    def __init__(self, shape: LogShape, state: CursorState) -> None:
        self._shape = shape
        self._changed: set[CursorChunkKey] | None = None
        self._holes: AckHoles | None = None
        self.mark = state.mark
        self.acked = state.acked
        self.partial: SortedDict[Position, PartlyAckedBatch] = SortedDict(state.partial) if state.partial else _NONE
        self.counts: SortedDict[Position, RedeliveryCount] = SortedDict(state.counts) if state.counts else _NONE
        self.pending = PendingAcks(state.pending) if state.pending else None
        self.counts_first = False
        self.note = state.note
        self.version = 0
        self.seeks = 0  # states of one number only grow: what is acknowledged in the older one is in the later one
        self.persisted = 0
        self.persisted_mark = state.mark
        self._partial_bytes: int = sum(partial.memory_bytes for partial in self.partial.values())
        self.partial_messages: int = sum(partial.bits.bit_count() for partial in self.partial.values())  # acknowledged

    @property
    def changed_chunks(self) -> set[CursorChunkKey]:
        """The keys of the chunks (parts of the stored state) that have changed since they were stored. The code that
        stores them removes them from this set."""
        changed = self._changed
        if changed is None:
            changed = self._changed = set()
        return changed

    @property
    def holes(self) -> AckHoles:
        """The acknowledged entries after the mark."""
        holes = self._holes
        if holes is None:
            holes = self._holes = AckHoles(self.acked)
        return holes

    # ------------------------------------------------------------------ intents
    def ack(self, position: Position) -> bool:
        """Acknowledges the whole entry. Returns True if the entry was not acknowledged before. Returns False, and
        changes nothing, if it was, or if the entry or one of its messages is pending in a transaction."""
        if self.is_acked(position):
            return False
        pending = self.pending
        if pending is not None and (pending.is_entry_pending(position) or pending.message_bits_at(position)):
            return False
        self.version += 1
        if position == self._shape.position_after(self.mark):
            self.mark = position
            if self.acked:
                self._advance()
            elif self.partial or self.counts:
                self._forget_up_to_mark()
            return True
        self._discard_state(position)
        ledger_id, entry_id = position
        self.holes.get_or_create_hole_bitmap(ledger_id).add(entry_id)
        self.changed_chunks.add(chunk_key_of(CursorChunkKind.HOLES, position))
        return True

    def ack_entries_of_ledger(self, ledger_id: int, entries: BitMap) -> BitMap:
        """Acknowledges many whole entries of one ledger, except those that are pending in a transaction, as a whole or
        in part. Returns the entries that are newly acknowledged."""
        new = entries - self.acked[ledger_id] if ledger_id in self.acked else entries.copy()
        if ledger_id < self.mark[0] or not new:
            return BitMap()
        if ledger_id == self.mark[0]:
            new.remove_range(0, self.mark[1] + 1)
            if not new:
                return new
        if self.pending is not None:
            new = self.pending.exclude_pending_entries(ledger_id, new)
            if not new:
                return new
        self.version += 1
        self._forget_set(ledger_id, new)
        holes = self.holes.get_or_create_hole_bitmap(ledger_id)
        holes |= new
        self.changed_chunks.update(chunk_keys_of_holes(ledger_id, new))
        self._advance()
        return new

    def ack_first_messages(self, position: Position, messages: int, size: int = 0) -> bool:
        """Acknowledges the first `messages` messages of a batch, at most BATCH_INDEXES_MAX. `size`: the number of
        messages in the batch (0: not known). Returns True if the whole entry is acknowledged by this call."""
        return self.ack_messages_of_batch(position, (1 << min(messages, BATCH_INDEXES_MAX)) - 1, size)

    def ack_messages_of_batch(self, position: Position, bits: int, size: int = 0) -> bool:
        """Acknowledges the messages of a batch whose bits are set in `bits` (bit i: message i), except those that are
        pending in a transaction. `size`: the number of messages in the batch (0: not known). Returns True if the whole
        entry is acknowledged by this call."""
        if self.is_acked(position):
            return False
        pending = self.pending
        if pending is not None:
            bits &= ~pending.message_bits_at(position)
            if pending.is_entry_pending(position) or not bits:
                return False
        partial = self.partial.get(position)
        if partial is None:
            if self.partial is _NONE:
                self.partial = SortedDict()
            partial = self.partial[position] = PartlyAckedBatch(0, size)
            self._partial_bytes += partial.memory_bytes
        partial.size = partial.size or size
        bits |= partial.bits
        if partial.size:
            bits &= (1 << partial.size) - 1
        if bits != partial.bits:
            # and was not given back
            other_first = self.counts_first and first_clear_bit(bits) != first_clear_bit(partial.bits)
            if other_first and self.counts and self.counts.pop(position, None) is not None:
                self.changed_chunks.add(chunk_key_of(CursorChunkKind.COUNTS, position))
            self._partial_bytes -= partial.memory_bytes
            self.partial_messages += bits.bit_count() - partial.bits.bit_count()
            partial.bits = bits
            self._partial_bytes += partial.memory_bytes
            self.version += 1
            self.changed_chunks.add(chunk_key_of(CursorChunkKind.PARTIALS, position))
        elif not bits:
            self._forget_partial(position)
            return False
        return self.set_batch_size(position, partial.size)

    def set_batch_size(self, position: Position, size: int) -> bool:
        """Sets the number of messages in a batch, once the entry was read; `size` 0 means that it is not known, and
        acknowledges nothing. If each of its messages is acknowledged already, acknowledges the whole entry and returns
        True; else returns False. Returns False also if the entry is pending in a transaction as a whole: a commit
        acknowledges it, and after an abort it is read again."""
        if self.pending is not None and position in self.pending.parts:
            self.pending.parts[position].size = size
        partial = self.partial.get(position)
        if partial is None or not size:
            return False
        whole = partial.bits.bit_count() >= size
        if whole and self.pending is not None and self.pending.is_entry_pending(position):
            return False
        partial.size = size
        return whole and self.ack(position)

    def ack_cumulative(self, position: Position) -> bool:
        """Acknowledges all entries up to and including `position`, except those that are pending in a transaction.
        Returns False if nothing changed."""
        if position <= self.mark:
            return False
        if self.pending is not None and self.pending.has_pending_up_to(position):
            return self._ack_around(position)
        self.version += 1
        self.mark = position
        self._advance()
        return True

    def _ack_around(self, position: Position) -> bool:
        """Acknowledges everything up to `position`, except pending messages and pending batches of unknown size.
        Returns True if anything changed."""
        version = self.version
        for span in self._shape.spans:
            last = min(span.last_entry, position[1]) if span.ledger_id == position[0] else span.last_entry
            if last >= 0 and self.mark[0] <= span.ledger_id <= position[0]:
                self.ack_entries_of_ledger(span.ledger_id, BitMap(range(last + 1)))
        assert self.pending is not None, "something is pending"
        for each in [each for each in self.pending.parts if each <= position]:
            if size := self._size(each):
                self.ack_messages_of_batch(each, (1 << size) - 1, size)
        return self.version != version

    def ack_cumulative_into_batch(self, position: Position, last_index: int, size: int = 0) -> bool:
        """Acknowledges all entries before the entry at `position`, and the messages 0 … `last_index` of this entry,
        except those that are pending in a transaction. `size`: the number of messages in the batch (0: not known).
        Returns True if anything changed."""
        if size and last_index + 1 >= size:
            return self.ack_cumulative(position)
        moved = self.ack_cumulative(self._shape.position_before(position))
        version = self.version
        if position > self.mark:
            self.ack_first_messages(position, last_index + 1, size)
        return moved or self.version != version

    def seek(self, mark: Position) -> None:
        """Moves the mark to `mark`, forwards or backwards, and removes all holes, partly acknowledged batches,
        redelivery counts, pending acknowledgements and the note. No other method moves the mark backwards."""
        self.version += 1
        self.seeks += 1
        self.pending = None
        self.note = b""
        self.mark = mark
        self.acked.clear()
        self.partial.clear()
        self.counts.clear()
        self._changed = self._holes = None
        self._partial_bytes = self.partial_messages = 0

    def set_commit_note(self, note: bytes) -> None:
        """Replaces the note, which a commit stores in the same write as the mark. A seek removes it."""
        if note != self.note:
            self.note = note
            self.version += 1
            self.changed_chunks.add(COMMIT_NOTE_KEY)

    def count_redelivery(self, position: Position, until_ms: int = 0) -> int:
        """Adds 1 to the redelivery count of the entry, and stores `until_ms` (ms since the epoch), before which the
        entry must not be delivered again; 0: at once. Returns the new count."""
        times = self.redelivery_count(position) + 1
        if self.counts is _NONE:
            self.counts = SortedDict()
        self.counts[position] = RedeliveryCount(times, until_ms)
        self.version += 1
        self.changed_chunks.add(chunk_key_of(CursorChunkKind.COUNTS, position))
        return times

    def redelivery_count(self, position: Position) -> int:
        """Returns how many times consumers have given the entry back; 0 if it is acknowledged."""
        found: RedeliveryCount = self.counts.get(position, NO_REDELIVERY_COUNT)
        return found.redeliveries

    # ------------------------------------------------------------------ facts
    def adapt_to_log_after_restart(self) -> None:
        """Adapts the cursor to the log after a restart. Moves the mark to a position in the log if it is outside.
        Removes acknowledgements and redelivery counts of entries that the log does not have. Then moves the mark over
        the acknowledged entries directly after it."""
        shape = self._shape
        self.mark = shape.clamp_mark_to_log(self.mark)
        for ledger_id, holes in list(self.acked.items()):
            span = shape.find_span_of_ledger(ledger_id)
            holes &= BitMap(range(span.last_entry + 1)) if span is not None else BitMap()
            if not holes:
                self.holes.discard_holes_of_ledger(ledger_id)
        for position in [position for position in self.partial if not shape.has_visible_entry(position)]:
            self._forget_partial(position)
        for position in [position for position in self.counts if not shape.has_visible_entry(position)]:
            del self.counts[position]
        if self.pending is not None:
            self.pending = self.pending.select_acks_in_log(shape, self.mark, self.is_acked)
        self._advance()

    def on_ledger_trimmed(self, ledger_id: int) -> None:
        """Called when a ledger was deleted, all of whose entries are acknowledged: removes the holes in this ledger.
        (After a restart `adapt_to_log_after_restart` does this.)"""
        if ledger_id in self.acked:
            self.holes.discard_holes_of_ledger(ledger_id)

    def rebase(self, shape: LogShape) -> None:
        """Replaces the shape of the log. The new shape must contain the same entries as the present one; it may contain
        older entries in addition."""
        self._shape = shape

    def advance_mark(self) -> bool:
        """Moves the mark forward over the acknowledged entries directly after it, and over entries that the shape no
        longer contains (such as entries of aborted transactions). Returns True if the mark moved."""
        before = self.mark
        if self.acked:
            self._advance()
        self.version += self.mark != before
        return self.mark != before

    def on_state_stored(self, version: int, mark: Position) -> None:
        """Called when a state of the cursor is durable. `version`, `mark`: the version and the mark of that state."""
        assert version <= self.version, "a version was stored that never was"
        if version >= self.persisted:
            self.persisted, self.persisted_mark = version, mark

    # ------------------------------------------------------------------ questions
    @property
    def durable_trim_mark(self) -> Position:
        """The position up to which the subscription needs no entry any more, even after a crash. Ledgers up to this
        position may be trimmed. It is the smaller one of the mark and the stored mark. The stored mark normally lags,
        but after a seek backwards it is ahead of the mark until the next write."""
        return min(self.mark, self.persisted_mark)

    @property
    def trim_limit(self) -> TrimLimit:
        """The part of the log that the subscription no longer needs: everything up to `durable_trim_mark`, and the
        later ledgers of which every entry is acknowledged in a stored state.

        A ledger that is completely acknowledged in one stored state is so in every later one. Acknowledgements are
        never taken back, except by a seek, which starts the whole state again.
        """
        full: dict[int, tuple[int, int]] = {}
        for ledger_id, holes in self.acked.items():
            span, hidden = self._shape.find_span_of_ledger(ledger_id), self._shape.hidden_entries_of_ledger(ledger_id)
            done = len(holes) if hidden is None else holes.union_cardinality(hidden)
            if span is not None and done == span.last_entry + 1:
                last, version = self.holes.full.get(ledger_id, (-1, 0))
                full[ledger_id] = (last, version) if last == span.last_entry else (span.last_entry, self.version)
        if full or self._holes is not None:
            self.holes.full = full
        mark = self._shape.last_hidden_position_after(self.durable_trim_mark)
        return TrimLimit(mark, frozenset(id_ for id_, (_, version) in full.items() if version <= self.persisted))

    @property
    def has_unstored_changes(self) -> bool:
        """True if the state has changed since it was last stored."""
        return self.version != self.persisted

    def is_acked(self, position: Position) -> bool:
        """Returns True if the whole entry is acknowledged."""
        if position <= self.mark:
            return True
        if not self.acked:
            return False
        holes = self.acked.get(position[0])
        return holes is not None and position[1] in holes

    def is_acked_or_pending(self, position: Position) -> bool:
        """Returns True if the entry must not be delivered now: all of its messages are acknowledged or pending. If a
        transaction with such a pending acknowledgement is aborted, the entry can be delivered again."""
        if self.is_acked(position):
            return True
        pending = self.pending
        if pending is None:
            return False
        return pending.is_entry_pending(position) or (
            position in pending.parts and 0 < self._size(position) <= self.acked_or_pending_bits(position).bit_count()
        )

    def acked_or_pending_bits(self, position: Position) -> int:
        """Returns, as bits (bit i: message i), which messages of a batch are acknowledged or pending. Consumers do not
        receive these messages."""
        partial: PartlyAckedBatch | None = self.partial.get(position)
        bits = partial.bits if partial is not None else 0
        return bits if self.pending is None else bits | self.pending.message_bits_at(position)

    def _size(self, position: Position) -> int:
        """Returns the number of messages in a batch that is acknowledged or pending in part; 0 if the number is not
        known."""
        partial: PartlyAckedBatch | None = self.partial.get(position)
        if (partial is None or not partial.size) and self.pending is not None:
            partial = self.pending.parts.get(position)
        return partial.size if partial is not None else 0

    def find_batch_size(self, position: Position, shown: int) -> int:
        """Returns the number of messages in a batch; 0 if the number is not known. `shown`: how many of its messages
        the consumer has received at which the batch is outstanding; 0 if it is not outstanding."""
        return self._size(position) or (0 if self.acked_or_pending_bits(position) else shown)

    @property
    def has_partial_batches(self) -> bool:
        """True if there is a batch of which some messages, but not all, are acknowledged or pending."""
        return bool(self.partial or (self.pending is not None and self.pending.parts))

    def acked_indexes(self, position: Position) -> list[int]:
        """Returns the batch indexes of the messages of an entry that are acknowledged. Empty if no message is
        acknowledged, or the whole entry is."""
        partial = self.partial.get(position)
        return list(bit_indexes(partial.bits)) if partial is not None else []

    def count_leading_acked_messages(self, position: Position) -> int:
        """Returns how many messages at the beginning of a batch are acknowledged; 0 also if the whole entry is
        acknowledged."""
        partial = self.partial.get(position)
        return first_clear_bit(partial.bits) if partial is not None else 0

    def acked_message_count(self, position: Position) -> int:
        """Returns how many messages of an entry are acknowledged; 0 if none is, or if the whole entry is."""
        partial: PartlyAckedBatch | None = self.partial.get(position)
        return partial.bits.bit_count() if partial is not None else 0

    def next_unacked_position(self, position: Position) -> Position:
        """Returns the first position at or after `position` whose entry is not acknowledged as a whole; a position
        after the last entry if there is none. Its cost grows with the number of contiguous ranges of holes that it
        passes."""
        shape = self._shape
        if position <= self.mark:
            position = shape.position_after(self.mark)
        while self.acked:
            position = shape.position_at_or_after(position)
            holes = self.acked.get(position[0])
            if holes is None or position[1] not in holes:
                break
            position = shape.position_after(Position(position[0], find_end_of_contiguous(holes, position[1])))
        return position

    def next_deliverable_position(self, position: Position) -> Position:
        """Returns the first position at or after `position` whose entry is not acknowledged or pending as a whole; a
        position after the last entry if there is none."""
        position = self.next_unacked_position(position)
        if self.pending is None:
            return position
        shape = self._shape
        while self.pending.is_entry_pending(position := shape.position_at_or_after(position)):
            if position <= self.pending.up_to:
                position = self.next_unacked_position(shape.position_after(self.pending.up_to))
                continue
            ledger_id, entry_id = position
            over = self.pending.whole[ledger_id]
            if ledger_id in self.acked:
                over = over | self.acked[ledger_id]
            position = self.next_unacked_position(
                shape.position_after(Position(ledger_id, find_end_of_contiguous(over, entry_id)))
            )
        return position

    def deliverable_entries_up_to(self, position: Position) -> Iterator[Position]:
        """Yields, in log order, the positions after the mark and up to and including `position` of which at least one
        message is neither acknowledged nor pending."""
        at = self.next_deliverable_position(self.mark)
        while at <= position and self._shape.has_visible_entry(at):
            if not self.is_acked_or_pending(at):
                yield at
            at = self.next_deliverable_position(self._shape.position_after(at))

    def deliverable_entries_before(self, position: Position) -> Iterator[Position]:
        """Yields, in reverse log order, the positions from `position` back to the mark of which at least one message is
        neither acknowledged nor pending."""
        # a mark may be before the log: of an empty topic, or a trimmed one
        end = max(self.mark, self._shape.start_position)
        while position > end:
            if self._shape.has_visible_entry(position) and not self.is_acked_or_pending(position):
                yield position
            position = self._shape.position_before(position)

    @property
    def last_hole_position(self) -> Position:
        """The position of the last entry that is acknowledged as a whole; the mark if no entry after it is."""
        if not self.acked:
            return self.mark
        ledger_id = max(self.acked)
        return Position(ledger_id, self.acked[ledger_id].max())

    @property
    def memory_bytes(self) -> int:
        """How many bytes of memory the state of this cursor takes, without the object itself."""
        counted: int = REDELIVERY_COUNT_BYTES * len(self.counts)
        pending = self.pending.memory_bytes if self.pending is not None else 0
        holes = self.holes.memory_bytes if self.acked else 0
        return holes + self._partial_bytes + counted + pending

    def exceeds_memory(self, bytes_max: float) -> bool:
        """Returns True if the state takes more than `bytes_max` bytes of memory, even when all holes are compressed. A
        bitmap that was changed by single acknowledgements may take twenty times as much as it needs."""
        if self.memory_bytes <= bytes_max:
            return False
        if self.acked:
            self.holes.compress_all_holes()
        return self.memory_bytes > bytes_max

    @property
    def hole_entry_count(self) -> int:
        """How many entries after the mark are acknowledged as a whole."""
        return sum(len(holes) for holes in self.acked.values())

    def copy_cursor_state(self) -> CursorState:
        """Returns a copy of the state, which can be stored while the cursor changes."""
        return CursorState(
            self.mark,
            {ledger_id: holes.copy() for ledger_id, holes in self.acked.items()},
            {position: PartlyAckedBatch(partial.bits, partial.size) for position, partial in self.partial.items()},
            dict(self.counts),
            {txn: acks.copy() for txn, acks in self.pending.of.items()} if self.pending is not None else {},
            self.note,
        )

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken: each hole is after the mark and does not adjoin it; no
        bitmap is empty; no entry is kept both as acknowledged and as partly acknowledged; the totals are right."""
        assert self.persisted <= self.version, "more is stored than was ever changed"
        self.holes.check(self.mark, self._shape.position_after(self.mark))
        for position, partial in self.partial.items():
            assert not self.is_acked(position), "a finished entry is kept as partial"
            assert partial.bits, "nothing of an entry is acknowledged and it is kept as partial"
            assert not partial.size or partial.bits.bit_count() < partial.size, "a whole batch is kept as partial"
        assert not any(map(self.is_acked, self.counts)), "a finished entry is still counted"
        assert self._partial_bytes == sum(each.memory_bytes for each in self.partial.values()), "weighed wrong"
        assert self.partial_messages == sum(each.bits.bit_count() for each in self.partial.values()), "miscounted"
        if self.pending is not None:
            self.pending.check_disjoint_from_acked(self._shape, self.partial, self.is_acked)

    def _advance(self) -> None:
        following = self._shape.position_after(self.mark)
        while (holes := self.acked.get(following[0])) is not None and following[1] >= 0 and following[1] in holes:
            self.mark = Position(following[0], find_end_of_contiguous(holes, following[1]))
            following = self._shape.position_after(self.mark)
        self._forget_up_to_mark()

    def _forget_up_to_mark(self) -> None:
        if self.acked:
            self.holes.discard_holes_up_to(self.mark)
        while self.partial and self.partial.keys()[0] <= self.mark:
            self._gone(self.partial.popitem(0)[1])
        while self.counts and self.counts.keys()[0] <= self.mark:
            self.counts.popitem(0)

    def _forget_partial(self, position: Position) -> None:
        self._gone(self.partial.pop(position))
        self.changed_chunks.add(chunk_key_of(CursorChunkKind.PARTIALS, position))

    def _gone(self, partial: PartlyAckedBatch) -> None:
        """Subtracts the partial batch, which was removed, from the totals."""
        self._partial_bytes -= partial.memory_bytes
        self.partial_messages -= partial.bits.bit_count()

    def _discard_state(self, position: Position) -> None:
        """Removes the partial batch and the redelivery count of an entry that is acknowledged as a whole."""
        if self.partial and position in self.partial:
            self._forget_partial(position)
        if self.counts and self.counts.pop(position, None) is not None:
            self.changed_chunks.add(chunk_key_of(CursorChunkKind.COUNTS, position))

    def _forget_set(self, ledger_id: int, entries: BitMap) -> None:
        first, last = Position(ledger_id, entries.min()), Position(ledger_id, entries.max())
        for kept in (self.partial, self.counts):
            for position in [each for each in kept.irange(first, last) if each[1] in entries] if kept else ():
                self._discard_state(position)
