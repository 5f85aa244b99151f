"""Acknowledgements of one subscription: each is applied to the cursor first and then, for what is new, to the
dispatcher.

A trimmed entry counts as acknowledged. An entry after the last one belongs to no message, and naming it is the caller's
mistake (InvalidRequest); what the request names before it counts. The cost of a set of entries is that of the smaller
one of the set and of the outstanding entries, not of what the set contains.

A plain acknowledgement of an entry that is acknowledged in an open transaction is refused, and everything else of the
request counts; a cumulative one that covers such an entry is refused as a whole. In a transaction (`TransactionalAcks`)
a request counts as a whole or not at all: it is gathered first, judged (core/pending_acks.py has the table), and then
pending in one step. For consumer and dispatcher a pending entry is like one that is acknowledged: it is no longer
outstanding.

A whole entry means all of its messages. From a consumer that was shown a part of them (the others were acknowledged or
pending), it means those, as Pulsar's clients say it. Guarding tests: tests/broker/subscription/test_acks.py,
tests/broker/subscription/test_acks_in_transactions.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from pyroaring import BitMap

from ...proto.errors import MagnetarError, TransactionConflict
from ...proto.names import Position
from ...proto.states import AckedEntry, EntrySet, TxnId
from ..common.refusals import AckRefusal
from ..log.log_shape_core import LogShape
from .core import pending_acks
from .core.cursor import Cursor
from .core.cursor_state import BATCH_INDEXES_MAX, NO_POSITION, PartlyAckedBatch, TxnAcks
from .core.dispatch import Dispatcher
from .core.pending_acks import ENTRIES_MAX, SettledAcks, TransactionalAckConflict, TransactionalAckRefused
from .core.policy import NO_HIDDEN_MESSAGES, Member

MARKED_ENTRIES_PER_SLICE = 1000
"""Outstanding entries that one step of a cumulative acknowledgement, or of a search, handles: about a millisecond."""


class UnwantedMessages(NamedTuple):
    """Those messages of a batch that a filter does not want. `bits`: a number in which bit i stands for message i;
    `size`: the number of messages in the batch."""

    position: Position
    bits: int
    size: int


class SubscriptionAcks:
    """Checks acknowledgements, and applies them to the cursor and the dispatcher of one subscription. An entry or a
    message is *pending* while a transaction that has acknowledged it is open. In all methods, `member` is the consumer
    that sent the acknowledgement; None: the broker itself acknowledges."""

    __slots__ = ("_cursor", "_dispatcher", "_shape")

    def __init__(self, shape: LogShape, cursor: Cursor, dispatcher: Dispatcher) -> None:
        self._shape = shape
        self._cursor = cursor
        self._dispatcher = dispatcher

    def rebase(self, shape: LogShape) -> None:
        """Replaces the shape of the log (its list of ledgers) against which acknowledgements are checked."""
        self._shape = shape

    def ack(self, member: Member | None, entries: Sequence[AckedEntry]) -> None:
        """Acknowledges each of the entries as a whole, or only those of its messages that are named. Ignores entries
        that were trimmed. Raises TransactionConflict if an entry is pending in a transaction; all other entries are
        acknowledged nevertheless. Raises InvalidRequest if an entry is after the last entry of the log, or has no such
        message; the entries before it are acknowledged. `member`: the consumer that sent it; None: the broker."""
        refused, transactions = list[Position](), self._cursor.pending is not None or bool(member and member.unshown)
        for position, bits in entries:
            if not self._exists(position):
                continue
            if bits:
                bits = self._checked(position, bits)
            if transactions:
                bits = bits or self._shown(member, position)
                if self._is_pending(position, bits):
                    refused.append(position)
                    bits = bits or (1 << self._cursor.find_batch_size(position, 0)) - 1  # its other messages count
            if bits:
                self._ack_batch(member, position, bits)
            elif self._cursor.ack(position):
                self._dispatcher.on_acked(member, position)
        if refused:
            self._refuse(refused[0])

    def _ack_batch(self, member: Member | None, position: Position, bits: int) -> None:
        cursor = self._cursor
        before = cursor.acked_message_count(position)
        if cursor.ack_messages_of_batch(position, bits, self._size(member, position)) or cursor.is_acked_or_pending(
            position
        ):
            self._dispatcher.on_acked(member, position)
        elif member is not None:
            self._dispatcher.on_messages_acked(member, position, cursor.acked_message_count(position) - before)

    def _size(self, member: Member | None, position: Position) -> int:
        """Returns the number of messages in the batch; 0 if the number is not known."""
        if member is None:
            return self._cursor.find_batch_size(position, 0)
        if member.unshown and position in member.unshown:
            return member.unshown[position].size
        return self._cursor.find_batch_size(position, member.outstanding.get(position, 0))

    def _shown(self, member: Member | None, position: Position) -> int:
        """Returns, as bits (bit i: message i), which messages of the batch the consumer has received. These are the
        messages that it acknowledges with the whole entry. 0: all messages."""
        if member is None:
            return 0
        cursor, (unshown, size) = self._cursor, member.unshown.get(position, NO_HIDDEN_MESSAGES)
        size = size or cursor.find_batch_size(position, 0)
        if not size:
            return 0
        everything, held = (1 << size) - 1, member.outstanding.get(position, 0)
        left = everything & ~(cursor.acked_or_pending_bits(position) | unshown)
        if held and (held == left.bit_count() or not member.acks_by_index):
            return left  # the rest of them was acknowledged, or was not shown to it
        return everything & ~unshown if unshown else 0

    def _is_pending(self, position: Position, bits: int) -> bool:
        """Returns True if one of the messages `bits` is pending in a transaction. `bits` 0: if any message of the entry
        is pending."""
        pending = self._cursor.pending
        if pending is None or self._cursor.is_acked(position):
            return False
        of_batch = pending.message_bits_at(position)
        return pending.is_entry_pending(position) or bool(of_batch & bits if bits else of_batch)

    def _refuse(self, position: Position) -> None:
        raise AckRefusal.PENDING.error(f"entry {position} {TransactionalAckConflict.PENDING.value}", position=position)

    def ack_entries_of_ledger(self, member: Member | None, ledger_id: int, entries: bytes) -> None:
        """Acknowledges many whole entries of one ledger. `entries`: a serialized roaring bitmap of entry ids. Raises
        InvalidRequest if the bitmap cannot be parsed, or contains an entry after the last one; TransactionConflict if
        an entry is pending in a transaction. All other entries are acknowledged nevertheless. `member`: the consumer
        that sent it; None: the broker."""
        wanted = parse_entry_ids(entries)
        span = self._shape.find_span_of_ledger(ledger_id)
        last = span.last_entry if span is not None else -1
        beyond: Position | None = None
        if wanted and wanted.max() > last:
            beyond = Position(ledger_id, wanted.max())
            wanted.remove_range(last + 1, beyond.entry_id + 1)
        batches = self._in_part(member, ledger_id, wanted)
        if batches:
            wanted -= BitMap([each[1] for each in batches])
        new = self._cursor.ack_entries_of_ledger(ledger_id, wanted)
        if new:
            self._dispatcher.on_entries_acked(member, ledger_id, new)
        refused = self._first_pending(ledger_id, wanted)
        try:
            self.ack(member, [AckedEntry(each) for each in batches])
        except TransactionConflict:
            refused = refused or batches[0]
        if beyond is not None:
            self._exists(beyond)
        if refused is not None:
            self._refuse(refused)

    def _in_part(self, member: Member | None, ledger_id: int, wanted: BitMap) -> list[Position]:
        """Returns those of the entries `wanted` of which the consumer may not have received all messages, so that it
        may not mean all of them."""
        pending, unshown = self._cursor.pending, member.unshown if member is not None else None
        found = pending.partial_batches_in(ledger_id, wanted) if pending is not None else []
        if unshown:
            found += [each for each in unshown if each[0] == ledger_id and each[1] in wanted and each not in found]
        return found

    def _first_pending(self, ledger_id: int, wanted: BitMap) -> Position | None:
        """Returns the first of the entries `wanted` that is pending in a transaction; None if none is."""
        pending = self._cursor.pending
        if pending is None:
            return None
        held = wanted - pending.exclude_pending_entries(ledger_id, wanted)
        found = (Position(ledger_id, each) for each in held)
        return next((each for each in found if not self._cursor.is_acked(each)), None)

    def ack_cumulative(self, member: Member | None, acked: AckedEntry) -> None:
        """Acknowledges all messages up to and including the entry that `acked` names; if `acked` names messages of this
        entry, only up to and including the last of them. Does nothing if the entry was trimmed. Raises
        TransactionConflict if one of these messages is pending in a transaction; InvalidRequest if the entry is after
        the last entry of the log, or has no such message. Nothing is acknowledged then. `member`: the consumer that
        sent it; None: the broker."""
        if not self.check_cumulative_ack(acked):
            return
        position, bits = acked
        if bits:
            size = self._size(member, position)
            self._cursor.ack_cumulative_into_batch(position, bits.bit_length() - 1, size)
            self._dispatcher.on_acked_up_to(self._cursor.mark)
        else:
            self.skip_up_to(position)

    def check_cumulative_ack(self, acked: AckedEntry) -> bool:
        """Returns False if `ack_cumulative` does nothing, because the entry was trimmed. Raises what `ack_cumulative`
        raises for the same arguments. Changes nothing."""
        pending, (position, bits) = self._cursor.pending, acked
        if not self._exists(position):
            return False
        if bits:
            self._checked(position, bits)
        if pending is not None:
            covered = (1 << bits.bit_length()) - 1
            if pending.has_pending_up_to(self._shape.position_before(position)) or self._is_pending(position, covered):
                self._refuse(position)
        return True

    def skip_up_to(self, mark: Position) -> None:
        """Acknowledges all messages up to and including `mark`, except those that are pending in a transaction. The
        rest of a batch with pending messages of which the size is not known stays deliverable."""
        cursor = self._cursor
        cursor.ack_cumulative(mark)
        self._dispatcher.on_acked_up_to(max(mark, cursor.mark))
        if cursor.mark < mark:
            self._dispatcher.add_released_entries(cursor.deliverable_entries_up_to(mark))  # batches of unknown size

    def ack_unwanted(self, entries: Mapping[int, BitMap], parts: Iterable[UnwantedMessages]) -> int:
        """Acknowledges messages that are not to be delivered, because a filter does not want them or they have expired.
        Called before they are assigned to a consumer. `entries`: whole entries, by ledger; `parts`: messages of
        batches. What is pending in a transaction stays pending. Returns how many of the whole entries were not
        acknowledged before."""
        cursor, dispatcher, acked = self._cursor, self._dispatcher, 0
        for ledger_id, each in entries.items():
            new = cursor.ack_entries_of_ledger(ledger_id, each)
            if new:
                dispatcher.on_entries_acked(None, ledger_id, new)
                acked += len(new)
        for position, bits, size in parts:
            if cursor.ack_messages_of_batch(position, bits, size) or cursor.is_acked_or_pending(position):
                dispatcher.on_acked(None, position)
        return acked

    def ack_first_messages(self, position: Position, messages: int) -> None:
        """Acknowledges the first `messages` messages of the entry, except those that are pending in a transaction."""
        if self._cursor.ack_first_messages(position, messages):
            self._dispatcher.on_acked(None, position)

    def ack_messages(self, position: Position, bits: int, size: int) -> None:
        """Acknowledges the messages `bits` (bit i: message i) of a batch of `size` messages that is not outstanding at
        a consumer. None of them may be pending in a transaction."""
        if self._cursor.ack_messages_of_batch(position, bits, size) or self._cursor.is_acked_or_pending(position):
            self._dispatcher.on_acked(None, position)

    def find_outstanding_entries(self, member: Member, sets: Iterable[EntrySet]) -> Iterator[list[Position]]:
        """Yields the positions of those entries of `sets` that are outstanding at the consumer, as lists; a list may be
        empty. Each list is one step, after which the caller may let other tasks run. Raises InvalidRequest if a set
        cannot be parsed."""
        wanted: dict[int, BitMap] = {}
        for number, each in enumerate(sets, 1):
            if not number % MARKED_ENTRIES_PER_SLICE:
                yield []
            entries = parse_entry_ids(each.entries)
            if each.ledger_id in wanted:
                wanted[each.ledger_id] |= entries
            elif self._shape.find_span_of_ledger(each.ledger_id) is not None:
                wanted[each.ledger_id] = entries
        outstanding = member.outstanding
        if sum(map(len, wanted.values())) <= len(outstanding):
            named = (Position(id_, entry_id) for id_, entries in wanted.items() for entry_id in entries)
            while some := list(islice(named, MARKED_ENTRIES_PER_SLICE)):
                yield [each for each in some if each in outstanding]
        else:
            every = iter(list(outstanding))
            while some := list(islice(every, MARKED_ENTRIES_PER_SLICE)):
                yield [each for each in some if each[0] in wanted and each[1] in wanted[each[0]]]

    def split_cumulative_ack_into_steps(self, member: Member, mark: Position) -> Iterator[Position]:
        """Yields positions before `mark`, at distances of MARKED_ENTRIES_PER_SLICE outstanding entries. The caller must
        acknowledge cumulatively up to each of them before it takes the next, so that a large cumulative acknowledgement
        is applied in steps. Yields nothing if the outstanding entries are few or not in log order. Ends if the
        acknowledgement of the last position was refused."""
        while len(member.outstanding) > MARKED_ENTRIES_PER_SLICE and not member.reordered:
            step = next(islice(member.outstanding, MARKED_ENTRIES_PER_SLICE, None))
            if step >= mark:
                return
            yield step
            if step in member.outstanding:
                return  # it was refused

    def _checked(self, position: Position, bits: int) -> int:
        """Returns `bits`. Raises InvalidRequest if `bits` names more messages than the ledger of the entry contains.

        Without this check, a large message index in a short request could take much memory, and a client could get an
        answer that a message was acknowledged which does not exist.
        """
        span = self._shape.find_span_of_ledger(position[0])
        messages = min(BATCH_INDEXES_MAX, span.end_index - span.first_index if span is not None else 0)
        if bits.bit_length() > messages:
            raise AckRefusal.NO_SUCH_MESSAGES.error(f"the ledger of {position} has no {bits.bit_length()} messages")
        return bits

    def _exists(self, position: Position) -> bool:
        """Returns True if the log has an entry at `position`; False if the entry was trimmed, or its ledger does not
        belong to the topic. Raises InvalidRequest if the position is after the last entry."""
        if self._shape.has_entry(position):
            return True
        if position > self._shape.last_confirmed:
            raise AckRefusal.BEYOND_END.error(f"entry {position} is after the last one of the topic", position=position)
        return False


def parse_entry_ids(data: bytes) -> BitMap:
    """Returns the entry ids in a serialized roaring bitmap. Raises InvalidRequest if `data` is not such a bitmap."""
    try:
        return BitMap.deserialize(data)
    except (ValueError, IndexError, MemoryError) as error:
        raise AckRefusal.NOT_A_SET.error(f"{len(data)} bytes are not a set of entries: {error}") from error


# --------------------------------------------------------------------------------------------------- acks_in_txn
# Acknowledgements in transactions: a request is gathered, judged and made pending, and its transaction settled.
#
#     for _ in acks.collect_requested_acks(entries, sets, wanted): …    in steps; nothing is changed
#     acks.add_pending_acks(member, txn, wanted, …)   in one step; after a TransactionConflict nothing has changed
#     acks.settle(txn, committed=…)                   in one step; idempotent
#
# An abort gives back what the transaction had pending, and counts it as given back once, so that a message whose
# transactions always fail reaches its dead-letter limit. On types that deliver in log order everything after it that is
# not acknowledged is delivered again as well, without being counted: order is kept. On Shared the rest stays where it
# is, but for a batch of which a part was pending: its holder gives it back, as after a negative acknowledgement of that
# part, and all of it that is not acknowledged is delivered again.
#
# Order of keys (Key_Shared): a pending entry is like an acknowledged one, so its key goes on, and may change hands.
# After an abort it precedes everything of its key that is not delivered yet. Who needs the effects of a key in order,
# whatever aborts, puts the messages of a key into one transaction after the other: waits for the end of each. The same
# holds for the next active consumer of Failover, when transactions of the last one are still open. Guarding tests:
# tests/broker/subscription/test_acks_in_transactions.py, tests/broker/subscription/core/test_dispatch_walk.py.


ACKED_ENTRIES_PER_STEP = 100
"""Acknowledged entries that are collected in one step: some tenths of a millisecond."""


class TransactionalAcks(SubscriptionAcks):
    """Checks acknowledgements, also those in transactions, and applies them to the cursor and the dispatcher of one
    subscription. The comment before this class gives the rules."""

    __slots__ = ()

    # ------------------------------------------------------------------ gathering
    def collect_requested_acks(
        self, entries: Iterable[AckedEntry], sets: Iterable[EntrySet], wanted: TxnAcks
    ) -> Iterator[None]:
        """Adds the acknowledgements of a request to `wanted`, and changes nothing else. Works in steps: the caller
        iterates, and may let other tasks run in between. Raises InvalidRequest if an acknowledged entry is after the
        last entry of the log or has no such message, or a set cannot be parsed; TransactionConflict if an entry was
        trimmed."""
        entries = iter(entries)
        while some := list(islice(entries, ACKED_ENTRIES_PER_STEP)):
            for position, bits in some:
                self._check_there(position)
                wanted.add(position, self._checked(position, bits) if bits else 0)
            yield
        for each in sets:
            found = parse_entry_ids(each.entries)
            if found:
                self._check_there(Position(each.ledger_id, found.min()))
                self._check_there(Position(each.ledger_id, found.max()))
                wanted.entries[each.ledger_id] = wanted.entries.get(each.ledger_id, BitMap()) | found
            yield

    def _check_there(self, position: Position) -> None:
        """Raises TransactionConflict if the entry was trimmed, because then it is acknowledged already; InvalidRequest
        if the position is after the last entry."""
        if not self._exists(position):
            raise _conflict(TransactionalAckRefused(TransactionalAckConflict.ACKNOWLEDGED, position))

    # ------------------------------------------------------------------ pending
    def add_pending_acks(
        self, member: Member, txn: TxnId, wanted: TxnAcks, cumulative: AckedEntry | None, memory_bytes_max: int, *,
        rest: bool = False,
    ) -> bool:  # fmt: skip
        """Makes the acknowledgements `wanted` and the cumulative acknowledgement `cumulative` (None: there is none)
        pending in the transaction: all of them or none. Returns False if all of them were pending already. Raises
        TransactionConflict or InvalidRequest if an acknowledgement is refused; BackPressure if the subscription then
        had more than ENTRIES_MAX pending entries, or its cursor has more than `memory_bytes_max` bytes. Nothing is
        changed then.

        `rest`: True for clients of Pulsar's protocol. Such a client acknowledges with a whole entry only the messages
        that are not acknowledged yet, and it never repeats a request.
        """
        cursor, dispatcher = self._cursor, self._dispatcher
        if cumulative is not None and member.must_restart and not rest:  # Pulsar's clients never ask for all again
            raise _conflict(TransactionalAckRefused(TransactionalAckConflict.RESTARTED, cumulative.position))
        if rest and (clash := pending_acks.find_repeated_acks(cursor, txn, wanted)) is not None:
            raise _conflict(clash)
        asked, named = wanted, NO_POSITION
        if cumulative is not None or wanted.parts or member.unshown or cursor.has_partial_batches:
            asked = self._exact(member, wanted, rest=rest)
        if cumulative is not None:
            named = cumulative.position
            self._add_cumulative(member, cumulative, asked)
        new = pending_acks.judge_transactional_acks(cursor, txn, asked, named)
        if isinstance(new, TransactionalAckRefused):
            raise _conflict(new)
        if not new:
            return False
        before = cursor.pending.entry_count if cursor.pending is not None else 0
        entries = before + sum(map(len, new.entries.values())) + len(new.parts)
        if entries > ENTRIES_MAX or cursor.exceeds_memory(memory_bytes_max):
            raise AckRefusal.TOO_MANY_PENDING.error()
        pending_acks.add_pending_acks(cursor, txn, new)
        for ledger_id, each in new.entries.items():
            if len(each) > 1:
                dispatcher.on_entries_acked(member, ledger_id, each)
            else:
                dispatcher.on_acked(member, Position(ledger_id, each.min()))
        for position, part in new.parts.items():
            if cursor.is_acked_or_pending(position):
                dispatcher.on_acked(member, position)
            else:
                dispatcher.on_messages_acked(member, position, part.bits.bit_count())
        if new.up_to != NO_POSITION:
            dispatcher.on_acked_up_to(max(new.up_to, cursor.mark))
        return True

    def _exact(self, member: Member, wanted: TxnAcks, *, rest: bool) -> TxnAcks:
        """Returns `wanted`, where a batch is named message by message if some of its messages are acknowledged or
        pending, or did not reach this consumer. `rest`: a whole entry means only those of its messages that are neither
        acknowledged nor pending; if False, it means all of its messages, and the acknowledgement is refused later if
        one is acknowledged already."""
        cursor, exact = self._cursor, TxnAcks({id_: each.copy() for id_, each in wanted.entries.items()})
        touched = dict.fromkeys(pending_acks.find_partly_acked_batches(cursor, exact.entries))
        touched |= dict.fromkeys(each for each in member.unshown if exact.has_entry(each))
        for position in touched:
            bits = self._shown(member, position) if rest else (1 << self._size(member, position)) - 1
            if bits:
                exact.entries[position[0]].discard(position[1])
                exact.parts[position] = PartlyAckedBatch(bits, self._size(member, position))
        for position, part in wanted.parts.items():
            if not wanted.has_entry(position):
                self._add_part(member, position, part.bits, exact)
        exact.entries = {ledger_id: each for ledger_id, each in exact.entries.items() if each}
        return exact

    def _add_part(self, member: Member, position: Position, bits: int, exact: TxnAcks) -> None:
        size = self._size(member, position)
        everything = (1 << size) - 1
        bits = bits & everything if size else bits
        if bits == everything and size and not self._cursor.acked_or_pending_bits(position):
            exact.add(position)
        elif bits:
            exact.parts[position] = PartlyAckedBatch(bits, size)

    def _add_cumulative(self, member: Member, acked: AckedEntry, exact: TxnAcks) -> None:
        """Adds a cumulative acknowledgement to `exact`. Raises TransactionConflict if its entry was trimmed;
        InvalidRequest if the entry is after the last one, or has fewer messages."""
        position, bits = acked
        self._check_there(position)
        exact.up_to = position
        if bits:
            length, size = self._checked(position, bits).bit_length(), self._size(member, position)
            if not size or length < size:
                exact.up_to = self._shape.position_before(position)
                exact.parts[position] = PartlyAckedBatch((1 << length) - 1, size)

    # ------------------------------------------------------------------ the end of a transaction
    def settle(self, txn: TxnId, *, committed: bool) -> SettledAcks | None:
        """Applies the end of a transaction to the cursor and the dispatcher. If it committed, its pending
        acknowledgements count. If it was aborted, they are dropped, and the caller must deliver the entries again.
        Returns the acknowledgements that were pending; None if the transaction had none here, as at a repeated call."""
        cursor, settled = self._cursor, pending_acks.settle_transactional_acks(self._cursor, txn, committed=committed)
        if settled is None:
            return None
        if committed:
            for position in settled.acks.parts:
                if cursor.is_acked(position):
                    self._dispatcher.on_acked(None, position)
        return settled


def _conflict(clash: TransactionalAckRefused) -> MagnetarError:
    return AckRefusal.CONFLICT.error(f"entry {clash.position} {clash.why.value}", position=clash.position)
