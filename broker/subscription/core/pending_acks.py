"""Acknowledgements of open transactions: part of a cursor, stored with it, and acknowledged by nothing else.

A transaction acknowledges whole entries, messages of batches, or everything up to a position (one transaction at a time
in a subscription). From the moment that `add_pending_acks` returns until `settle_transactional_acks`, that is
*pending*: not acknowledged, in the backlog, and delivered to no consumer, whatever its consumer does meanwhile.

| what is named is | plain acknowledgement | in transaction X | delivered |
|---|---|---|---|
| free | acknowledged | pending in X | yes |
| acknowledged | nothing to do | refused | no |
| pending in X | refused | in X nothing to do, in Y refused | no |
| another message of such a batch | that message counts | likewise | the messages that are not pending |

Rules
- `judge_transactional_acks` is called before anything is changed: a refused request changes nothing (invariant 81).
  `add_pending_acks` takes its result.
- A message is pending in one transaction at most (invariant 77). A client that never repeats a request gets an error if
  the message is pending in the same transaction already (`find_repeated_acks`): it was delivered and processed twice. A
  cumulative acknowledgement is refused if it covers a message that is pending in another transaction; messages that it
  covers and that are acknowledged already stay so.
- `settle_transactional_acks` is one change of the cursor (invariant 79): a commit acknowledges exactly what is pending
  in the transaction, an abort frees it.
- Every way to acknowledge (`Cursor.ack`, `ack_entries_of_ledger`, `ack_messages_of_batch`, `ack_cumulative`) leaves out
  what is pending, so that expiry, quotas, skipping, compaction and dead letters pass over it. `Cursor.seek` forgets all
  of it, and a commit that comes later has nothing to acknowledge.
- A cursor without transactions has no PendingAcks: that costs one test in each question.
Guarding tests: tests/broker/subscription/core/test_pending_acks.py (sets of messages, and an exhaustive walk),
tests/broker/subscription/test_cursor_model.py (a crash at every write).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from pyroaring import BitMap

from ....proto.names import Position
from ....proto.states import TxnId
from .cursor import Cursor
from .cursor_state import NO_POSITION, PartlyAckedBatch, PendingAcks, TxnAcks

ENTRIES_MAX = 200_000
"""Pending entries of a subscription: an abort gives back and counts each of them, at 250 bytes a count."""
CUMULATIVE_TAIL_ENTRIES_MAX = 1000
"""Entries before the position of an aborted cumulative acknowledgement that count as given back: a receiver queue."""


class TransactionalAckConflict(enum.Enum):
    """The reasons why a transaction may not acknowledge an entry or a message."""

    ACKNOWLEDGED = "is acknowledged already"
    PENDING = "is acknowledged in another transaction that is open"
    TWICE = "is acknowledged in this transaction already: it was delivered twice"
    RESTARTED = "comes after entries that an aborted transaction freed: they come again, ask for everything again first"
    CUMULATIVE = "another open transaction has a cumulative acknowledgement, and a subscription takes one at a time"


class TransactionalAckRefused(NamedTuple):
    """A refusal of acknowledgements in a transaction: the reason, and the position of the first refused entry."""

    why: TransactionalAckConflict
    position: Position


class SettledAcks(NamedTuple):
    """The acknowledgements that were pending in a transaction until it ended. `shown`: the positions of batches of
    which the transaction had acknowledged only some messages, while consumers could still receive the others."""

    acks: TxnAcks
    shown: frozenset[Position]


# ------------------------------------------------------------------------------------------ intents
def judge_transactional_acks(
    cursor: Cursor, txn: TxnId, wanted: TxnAcks, named: Position = NO_POSITION
) -> TxnAcks | TransactionalAckRefused:
    """Checks the acknowledgements `wanted` in a transaction. Returns those of them that are not pending in it yet, or
    the refusal of all of them. Changes nothing.

    `named`: the entry that a cumulative acknowledgement names; NO_POSITION: it is not cumulative. If all of this entry
    is acknowledged, `wanted.up_to` is the same position. Else `wanted.up_to` is the position before, and `wanted.parts`
    has the acknowledged messages of the entry.
    """
    pending = cursor.pending
    own = pending.of.get(txn, _NOTHING) if pending is not None else _NOTHING
    new = TxnAcks()
    if named != NO_POSITION:
        clash = _judge_cumulative(cursor, own, wanted, named, new)
        if clash is not None:
            return clash
    for ledger_id, entries in wanted.entries.items():
        clash = _judge_entries(cursor, own, ledger_id, entries, new)
        if clash is not None:
            return clash
    for position, part in wanted.parts.items():
        clash = _judge_part(cursor, own, position, part, new, cumulative=named != NO_POSITION)
        if clash is not None:
            return clash
    return new


def _judge_cumulative(
    cursor: Cursor, own: TxnAcks, wanted: TxnAcks, named: Position, new: TxnAcks
) -> TransactionalAckRefused | None:
    pending = cursor.pending
    if cursor.is_acked(named):
        return TransactionalAckRefused(TransactionalAckConflict.ACKNOWLEDGED, named)
    if pending is not None:
        if pending.up_to != own.up_to:
            return TransactionalAckRefused(TransactionalAckConflict.CUMULATIVE, named)
        for ledger_id, entries in pending.whole.items():
            others = entries - own.entries[ledger_id] if ledger_id in own.entries else entries
            if others and Position(ledger_id, others.min()) <= named:
                return TransactionalAckRefused(TransactionalAckConflict.PENDING, Position(ledger_id, others.min()))
        for position, part in pending.parts.items():
            if position <= wanted.up_to and part.bits & ~own.message_bits_at(position):
                return TransactionalAckRefused(TransactionalAckConflict.PENDING, position)
    if wanted.up_to > own.up_to:
        new.up_to = wanted.up_to
    return None


def _judge_entries(
    cursor: Cursor, own: TxnAcks, ledger_id: int, entries: BitMap, new: TxnAcks
) -> TransactionalAckRefused | None:
    fresh = entries - own.entries[ledger_id] if ledger_id in own.entries else entries.copy()
    holes = cursor.acked.get(ledger_id)
    if holes is not None and fresh.intersect(holes):
        return TransactionalAckRefused(
            TransactionalAckConflict.ACKNOWLEDGED, Position(ledger_id, (fresh & holes).min())
        )
    if fresh and Position(ledger_id, fresh.min()) <= cursor.mark:
        return TransactionalAckRefused(TransactionalAckConflict.ACKNOWLEDGED, Position(ledger_id, fresh.min()))
    if ledger_id <= own.up_to[0]:
        fresh.remove_range(0, max(0, own.up_to[1] + 1) if ledger_id == own.up_to[0] else 1 << 32)
    for position in [
        each for each in own.parts if each[0] == ledger_id and each[1] in fresh and cursor.is_acked_or_pending(each)
    ]:
        fresh.discard(position[1])  # nothing of it is left
    if not fresh:
        return None
    first = Position(ledger_id, fresh.min())
    if cursor.partial:
        span = cursor.partial.irange(first, Position(ledger_id, fresh.max()))
        found = next((each for each in span if each[1] in fresh), None)
        if found is not None:
            return TransactionalAckRefused(TransactionalAckConflict.ACKNOWLEDGED, found)
    pending = cursor.pending
    if pending is not None and pending.may_have_pending_among(ledger_id, fresh):
        for position in pending.partial_batches_in(ledger_id, fresh):
            if pending.message_bits_at(position) & ~own.message_bits_at(position):
                return TransactionalAckRefused(TransactionalAckConflict.PENDING, position)
        free = pending.exclude_pending_entries(ledger_id, fresh) | BitMap(
            each[1] for each in own.parts if each[0] == ledger_id
        )
        if fresh - free:
            return TransactionalAckRefused(TransactionalAckConflict.PENDING, Position(ledger_id, (fresh - free).min()))
    new.entries[ledger_id] = fresh
    return None


def _judge_part(
    cursor: Cursor, own: TxnAcks, position: Position, part: PartlyAckedBatch, new: TxnAcks, *, cumulative: bool
) -> TransactionalAckRefused | None:
    if cursor.is_acked(position):
        return TransactionalAckRefused(TransactionalAckConflict.ACKNOWLEDGED, position)
    pending, mine = cursor.pending, own.message_bits_at(position)
    bits = part.bits & ~mine
    acked = cursor.partial[position].bits if position in cursor.partial else 0
    if acked & bits:
        if not cumulative or not (bits & ~acked or part.bits & mine):
            return TransactionalAckRefused(TransactionalAckConflict.ACKNOWLEDGED, position)
        bits &= ~acked
    if own.has_entry(position):
        return None
    if pending is not None and (pending.is_entry_pending(position) or pending.message_bits_at(position) & bits):
        return TransactionalAckRefused(TransactionalAckConflict.PENDING, position)
    if bits:
        new.parts[position] = PartlyAckedBatch(bits, part.size)
    return None


def find_repeated_acks(cursor: Cursor, txn: TxnId, wanted: TxnAcks) -> TransactionalAckRefused | None:
    """Returns a refusal if the transaction has already acknowledged an entry or a message of `wanted`; else None."""
    own = cursor.pending.of.get(txn, _NOTHING) if cursor.pending is not None else _NOTHING
    for ledger_id, entries in wanted.entries.items():
        if ledger_id in own.entries and (both := entries & own.entries[ledger_id]):
            return TransactionalAckRefused(TransactionalAckConflict.TWICE, Position(ledger_id, both.min()))
    for position in own.parts:
        if wanted.has_entry(position) and cursor.is_acked_or_pending(position):
            return TransactionalAckRefused(TransactionalAckConflict.TWICE, position)
    for position, part in wanted.parts.items():
        if own.has_entry(position) or part.bits & own.message_bits_at(position):
            return TransactionalAckRefused(TransactionalAckConflict.TWICE, position)
    return None


def add_pending_acks(cursor: Cursor, txn: TxnId, new: TxnAcks) -> None:
    """Makes the acknowledgements `new`, which `judge_transactional_acks` returned, pending in the transaction."""
    if not new:
        return
    if cursor.pending is None:
        cursor.pending = PendingAcks({})
    pending, own = cursor.pending, cursor.pending.of.get(txn)
    if own is not None:
        cursor.changed_chunks.update(pending.keys_of[txn])  # a cumulative position moves to another chunk, perhaps
        if parts := [each for each in own.parts if new.has_entry(each)]:
            mine = pending.take_acks_of_transaction(
                txn
            )  # a batch that was pending in part is pending as a whole from here on
            assert mine is not None, "it is the transaction's own"
            for position in parts:
                del mine.parts[position]
            pending.add(txn, mine)
    pending.add(txn, new)
    cursor.version += 1
    cursor.changed_chunks.update(pending.keys_of[txn])


def settle_transactional_acks(cursor: Cursor, txn: TxnId, *, committed: bool) -> SettledAcks | None:
    """Applies the end of a transaction to the cursor. If the transaction committed, its pending acknowledgements count.
    If it was aborted, they are dropped, and their entries may be delivered again. Returns the acknowledgements that
    were pending; None if there were none."""
    pending = cursor.pending
    if pending is None or txn not in pending.of:
        return None
    shown = frozenset([each for each in pending.of[txn].parts if not cursor.is_acked_or_pending(each)])
    cursor.changed_chunks.update(pending.keys_of[txn])
    acks = pending.take_acks_of_transaction(txn)
    assert acks is not None, "it is there"
    if not pending.of:
        cursor.pending = None
    cursor.version += 1
    if committed:
        if acks.up_to != NO_POSITION:
            cursor.ack_cumulative(acks.up_to)
        for ledger_id, entries in acks.entries.items():
            if len(entries) > 1:
                cursor.ack_entries_of_ledger(ledger_id, entries)
            else:
                cursor.ack(Position(ledger_id, entries.min()))
        for position, part in acks.parts.items():
            cursor.ack_messages_of_batch(position, part.bits, part.size)
    return SettledAcks(acks, shown)


# ------------------------------------------------------------------------------------------ what an abort frees
def find_first_redelivered_entry(cursor: Cursor, acks: TxnAcks) -> Position | None:
    """Returns the position of the first entry that must be delivered again, because the transaction that made the
    acknowledgements `acks` was aborted; None if there is no such entry. Called after the abort was applied to the
    cursor."""
    firsts = [Position(ledger_id, entries.min()) for ledger_id, entries in acks.entries.items()]
    firsts += acks.parts
    if acks.up_to != NO_POSITION and (first := cursor.next_deliverable_position(cursor.mark)) <= acks.up_to:
        firsts.append(first)
    return min(firsts, default=None)


def entries_of_aborted_acks(cursor: Cursor, settled: SettledAcks, *, tail: bool) -> Iterator[Position]:
    """Yields the positions of the entries that can be delivered again because their transaction was aborted, without
    the batches in `settled.shown`. `tail`: of a large cumulative acknowledgement, yields only the last
    CUMULATIVE_TAIL_ENTRIES_MAX entries."""
    acks = settled.acks
    for ledger_id, entries in sorted(acks.entries.items()):
        each = (Position(ledger_id, entry_id) for entry_id in entries)
        yield from (position for position in each if position > acks.up_to)
    yield from sorted(acks.parts.keys() - settled.shown)
    if acks.up_to != NO_POSITION:
        if tail:
            yield from islice(cursor.deliverable_entries_before(acks.up_to), CUMULATIVE_TAIL_ENTRIES_MAX)
        else:
            yield from cursor.deliverable_entries_up_to(acks.up_to)


_NOTHING = TxnAcks()
"""The acknowledgements of a transaction that has nothing pending: never add to it."""


def find_partly_acked_batches(cursor: Cursor, entries: dict[int, BitMap]) -> list[Position]:
    """Returns the positions of those batches among `entries` of which some messages are acknowledged or pending."""
    found: list[Position] = []
    for ledger_id, each in entries.items():
        if not each:
            continue
        if cursor.partial:
            span = cursor.partial.irange(Position(ledger_id, each.min()), Position(ledger_id, each.max()))
            found += [position for position in span if position[1] in each]
        if cursor.pending is not None:
            batches = cursor.pending.partial_batches_in(ledger_id, each)
            found += [position for position in batches if position not in cursor.partial]
    return found
