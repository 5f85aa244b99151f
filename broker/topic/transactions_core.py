"""The transactions of a topic: which of their entries consumers get, which ones they never get, and up to which
position all outcomes are known.

Entries of a transaction are in the log from the start, hidden from consumers. The transaction's coordinator decides
whether they become visible; the topic learns its decision by `TopicTransactionsCore.settle`.

| the topic's view | event | effect |
|---|---|---|
| unknown | a send or an acknowledgement asks to join | ASKED: nothing of it is appended before the answer |
| unknown | an entry of it is replayed | ASKED: it is hidden until its coordinator answers |
| ASKED | the coordinator takes the topic as a participant | OPEN |
| OPEN | an entry is confirmed | it is hidden, and the last stable position stays before the first of them |
| ASKED, OPEN | committed | its entries are shown, and its numbers count; an entry after `Settlement.last` is aborted |
| ASKED, OPEN | aborted | its entries are aborted; its sequence numbers are forgotten |
| ASKED, OPEN | its coordinator has forgotten the outcome, and the topic may have lost it | FORGOTTEN: it stays hidden |
| FORGOTTEN | an operator decides; or its coordinator knows an outcome after all | as above |
| ENDED | an entry that was on its way is confirmed | it is aborted, whatever the outcome: it had no receipt |

Rules
- `stable_position` is before the smallest first entry of a transaction that has not ended, at most the last confirmed
  entry; at one owner it never goes back. Each entry up to it is in no transaction, in a committed one, or in `aborted`.
- `aborted` contains positions and not transaction ids: one transaction may have entries that are shown and entries that
  are not. When a ledger is trimmed, its bitmap is removed.
- **Sequence ids.** Entries of a transaction are always deduplicated inside it: by (transaction, producer), against its
  confirmed entries and those in flight (dedup_core.py has the verdicts). A commit returns the sequence ids, which the
  topic's deduplication keeps; an abort drops them, and entries with the same ids are NEW again.
- A `snapshot` has a position, the open transactions and the aborted entries up to it. A load calls `add_replayed_entry`
  for each later entry of a transaction in the log, in order.
- **Lost outcomes.** If the stored outcomes could not be read (`TxnSnapshot.lost_to`), the topic may have known the
  outcome of each transaction with an entry up to that position. Then the coordinator's "forgotten" does not mean
  aborted: the transaction may be committed. It is FORGOTTEN, until an operator decides (`topics skip-lost
  --forgotten`). The position is stored with each later snapshot.
- `version` grows with each outcome that has to be stored.

Bounds: `OPEN_TRANSACTIONS_MAX` transactions of a topic. A bitmap of a million aborted entries takes 250 KB at most.
Guarding tests: tests/broker/topic/test_transactions_core.py (against plain lists, with crashes).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from pyroaring import BitMap, BitMap64

from ...proto.names import Position
from ...proto.states import ForgottenOutcome, TxnId
from ..common.transactions import Settlement
from ..log.log_queue_core import SEQUENCE_ID_END, SequenceRange
from ..log.log_shape_core import LogShape
from .dedup_core import NO_PROGRESS, DedupVerdict, ProducerSequenceProgress, judge_sequence_range

NO_POSITION = Position(-1, -1)
OPEN_TRANSACTIONS_MAX = 100_000
"""Most open transactions of a topic: each takes about 2 KB."""


class TxnPhaseAtTopic(enum.Enum):
    """The phases of a transaction at one topic."""

    ASKED = "its coordinator is asked"
    OPEN = "the topic is a participant, and it has not ended"
    FORGOTTEN = "it has ended, and neither the topic nor its coordinator has its outcome"
    ENDED = "it has ended, and entries of it are on their way"


_NONE = BitMap64()
"""An empty bitmap; never changed."""


class EntriesOfTxnProducer:
    """The entries that one producer sent in one transaction. `progress`: how far it has come by stored entries;
    `pushed`: how far with those in flight; `last`: the position of its last stored entry; `in_flight`: the number of
    entries in flight; `sent`: the sequence ids of all entries."""

    __slots__ = ("in_flight", "last", "progress", "pushed", "sent")

    def __init__(self, progress: ProducerSequenceProgress = NO_PROGRESS, last: Position = NO_POSITION) -> None:
        self.progress = self.pushed = progress
        self.last = last  # its last confirmed entry
        self.in_flight = 0
        self.sent = BitMap64()


class _Sender:
    """The open transactions in which one producer sent entries, and the producer's highest sequence id in any of
    them."""

    __slots__ = ("highest", "txns")

    def __init__(self) -> None:
        self.txns: dict[TxnId, None] = {}
        self.highest = -1


class TopicTxn:
    """One transaction at one topic. `entries`: its stored entries, by ledger; `first`: the position of the first of
    them, None if there is none; `indexes`: the indexes of the messages in these entries; `starts`: the index of the
    first message of each entry; `size`: their bytes; `numbers`: what each producer sent in the transaction."""

    __slots__ = ("entries", "first", "in_flight", "indexes", "numbers", "phase", "size", "starts")

    def __init__(self) -> None:
        self.phase = TxnPhaseAtTopic.ASKED
        self.entries: dict[int, BitMap] = {}
        self.indexes = self.starts = _NONE  # until there is an entry: most only acknowledge
        self.first: Position | None = None
        self.size = 0  # bytes
        self.numbers: dict[str, EntriesOfTxnProducer] = {}
        self.in_flight = 0

    def add_entry(self, position: Position, first_index: int, count: int, size: int) -> None:
        """Adds a stored entry, which has `count` messages from the index `first_index` on and `size` bytes. Must be
        called in log order."""
        entries = self.entries.get(position[0])
        if entries is None:
            entries = self.entries[position[0]] = BitMap()
        entries.add(position[1])
        if self.first is None:
            self.first, self.indexes, self.starts = position, BitMap64(), BitMap64()
        self.indexes.add_range(first_index, first_index + count)
        self.starts.add(first_index)
        self.size += size

    @property
    def entry_count(self) -> int:
        """Returns the number of stored entries of the transaction."""
        return len(self.starts)

    def entries_without_receipt(self, last: Position, entries: int) -> tuple[dict[int, BitMap], BitMap64, Position]:
        """Returns the stored entries of a committed transaction that do not count, because the client got no receipt
        for them. `last`: the last position that a receipt named; NO_POSITION: none named one, as the receipt of a
        duplicate does not. `entries`: the number of receipts that the client counted. An entry counts if it is at or
        before `last`, or is among the first `entries` entries.

        Returns three values: the entries that do not count, by ledger; the indexes of their messages; and the position
        of the last entry that counts, NO_POSITION if none counts.
        """
        kept = min(entries, self.entry_count)
        kept = max(kept, sum(each.rank(last[1]) if id_ == last[0] else len(each) for id_, each in self.entries.items()
                             if id_ < last[0] or (id_ == last[0] and last[1] >= 0)))  # fmt: skip
        indexes = self.indexes.copy()
        indexes.remove_range(0, self.starts[kept] if kept < self.entry_count else 1 << 63)
        late: dict[int, BitMap] = {}
        end = NO_POSITION
        for ledger_id in sorted(self.entries):
            each = self.entries[ledger_id]
            if kept > 0:
                end = Position(ledger_id, each[min(kept, len(each)) - 1])
            if kept < len(each):
                late[ledger_id] = each[max(0, kept) :]
            kept -= len(each)
        return late, indexes, end


class OpenTxnInSnapshot(NamedTuple):
    """An open transaction, as a snapshot of the topic's transactions stores it. The fields are those of `TopicTxn`;
    `numbers`: by producer, how far it has come by stored entries, and the position of the last of these."""

    txn: TxnId
    first: Position
    entries: dict[int, BitMap]
    indexes: BitMap64
    starts: BitMap64
    size: int
    numbers: dict[str, tuple[ProducerSequenceProgress, Position]]


class AbortedEntriesOfLedger(NamedTuple):
    """The entries of one ledger of the log that are in aborted transactions. `entries`: their entry ids; `indexes`: the
    indexes of their messages; `size`: their bytes."""

    entries: BitMap
    indexes: BitMap64
    size: int


class TxnSnapshot(NamedTuple):
    """The stored state of a topic's transactions, after all entries up to `position` and before all later entries.
    `open`: the transactions that have not ended; `aborted`: by ledger of the log, its entries that are in aborted
    transactions."""

    position: Position
    open: tuple[OpenTxnInSnapshot, ...] = ()
    aborted: Mapping[int, AbortedEntriesOfLedger] = {}
    ended: tuple[TxnId, ...] = ()
    """Transactions that had ended while entries of them were in flight: their entries after `position` are aborted."""
    lost_to: Position = NO_POSITION
    """A transaction with an entry up to this position may have an outcome that was stored and is lost. NO_POSITION: no
    outcome is lost."""


class TxnEndEffect(NamedTuple):
    """How the end of a transaction changes the topic. `numbers`: how far each producer has come, for deduplication;
    `shown`: whether entries became visible to consumers, or will never be visible."""

    numbers: dict[str, ProducerSequenceProgress]
    shown: bool
    sent: Mapping[str, BitMap64] = {}
    """Sequence ids of each producer that are in the log for good."""
    back: Mapping[str, BitMap64] = {}
    """Sequence ids of each producer that are not in the log."""
    missing: int = 0
    """Entries that had a receipt, as the coordinator says, and are not in the log: acknowledged data is lost."""


NO_END_EFFECT = TxnEndEffect({}, shown=False)


def _above(own: EntriesOfTxnProducer) -> BitMap64:
    """Returns the sequence ids that the producer sent in the transaction and that are not confirmed by the log."""
    above = own.sent.copy()
    above.remove_range(0, own.progress.number + 1)
    return above


class OpenTxnStats(NamedTuple):
    """The statistics of an open transaction. `holds`: True if no other open transaction has an earlier entry, so that
    this one holds back all later messages from consumers; `waiting`: the number of these messages."""

    first: Position | None  # its first entry; None: it has none
    entries: int
    size: int  # bytes
    holds: bool
    waiting: int


class TopicTransactionsCore:
    """Decides which entries of one topic's transactions consumers receive. Implements `TxnOutcomes`, which the topic's
    CommittedShape (broker/log/log_shape_core.py) asks."""

    __slots__ = (
        "_ended", "_flying", "_hidden", "_senders", "_shape", "_stable", "aborted", "aborted_indexes", "aborts",
        "changed", "commits", "known", "lost_to", "position", "sizes", "version",
    )  # fmt: skip

    def __init__(self, shape: LogShape, snapshot: TxnSnapshot) -> None:
        self._shape = shape
        self.position = snapshot.position  # entries up to it are known
        self.lost_to = snapshot.lost_to
        self.known: dict[TxnId, TopicTxn] = {}
        self.aborted: dict[int, BitMap] = {}
        self.aborted_indexes = BitMap64()
        self.sizes: dict[int, int] = {}  # ledger → bytes that are aborted
        self.changed: set[int] = set()  # ledgers of which something was aborted since it was stored
        self.version = 0
        self.commits = self.aborts = 0  # transactions that ended since it was loaded
        self._hidden: dict[TxnId, TopicTxn] = {}  # with entries and not ended, the earliest first entry first
        self._ended = frozenset(snapshot.ended)  # until the replay is done
        self._stable: Position | None = None  # kept while something is hidden; None: to be found
        self._flying: dict[str, int] = {}  # producer → its entries on their way, in any transaction
        self._senders: dict[str, _Sender] = {}  # producer → where it sent something
        for ledger_id, part in snapshot.aborted.items():
            if shape.find_span_of_ledger(ledger_id) is not None:
                self.aborted[ledger_id], self.sizes[ledger_id] = part.entries, part.size
                self.aborted_indexes |= part.indexes
        for each in sorted(snapshot.open, key=lambda each: each.first):
            txn = self.known[each.txn] = self._hidden[each.txn] = TopicTxn()
            txn.first, txn.entries, txn.size = each.first, each.entries, each.size
            txn.indexes, txn.starts = each.indexes, each.starts
            txn.numbers = {name: EntriesOfTxnProducer(*numbers) for name, numbers in each.numbers.items()}
            for name, own in txn.numbers.items():
                self._sends(each.txn, name, own.progress.number)

    # ------------------------------------------------------------------ joining
    def register_unresolved_transaction(self, txn: TxnId) -> TxnPhaseAtTopic:
        """Adds the transaction if it is not known, and returns its phase. Called before its coordinator is asked about
        the transaction."""
        found = self.known.get(txn)
        if found is None:
            found = self.known[txn] = TopicTxn()
        return found.phase

    def is_at_open_limit(self, txn: TxnId) -> bool:
        """Returns True if the topic has OPEN_TRANSACTIONS_MAX open transactions, the most, and the transaction is not
        one of them."""
        return len(self.known) >= OPEN_TRANSACTIONS_MAX and txn not in self.known

    def may_join(self, txn: TxnId) -> bool:
        """Returns True if the topic may join the transaction: the transaction has not ended here, and the topic has
        fewer than OPEN_TRANSACTIONS_MAX open transactions."""
        found = self.known.get(txn)
        return len(self.known) < OPEN_TRANSACTIONS_MAX if found is None else found.phase is not TxnPhaseAtTopic.ENDED

    def on_transaction_joined(self, txn: TxnId) -> bool:
        """Called when the coordinator has made the topic a participant of the transaction. Returns False if the
        transaction has ended meanwhile."""
        found = self.known.get(txn)
        if found is None or found.phase is TxnPhaseAtTopic.ENDED:
            return False
        found.phase = TxnPhaseAtTopic.OPEN
        return True

    def on_join_refused(self, txn: TxnId) -> None:
        """Called when the coordinator refused the join or did not answer. Removes the transaction, unless it has
        entries at this topic; then the coordinator is asked again for its outcome."""
        found = self.known.get(txn)
        if found is not None and found.phase is TxnPhaseAtTopic.ASKED and not found.entry_count:
            del self.known[txn]

    def on_outcome_forgotten(self, txn: TxnId, why: ForgottenOutcome) -> bool:
        """Called when the coordinator does not know the outcome of a transaction any more. Returns True if the topic
        cannot tell the outcome either: the transaction stays hidden. Returns False if it is aborted: the topic has no
        entry of it, or has lost no outcome that it stored."""
        found = self.known.get(txn)
        if found is None or found.phase is TxnPhaseAtTopic.ENDED or found.first is None:
            return False
        if why is ForgottenOutcome.DISCARDED and found.first > self.lost_to:
            return False
        found.phase = TxnPhaseAtTopic.FORGOTTEN
        return True

    @property
    def forgotten_transaction_ids(self) -> list[TxnId]:
        """Returns the transactions whose outcomes neither the topic nor their coordinators know, in the order of their
        first entries."""
        return [txn for txn, each in self._hidden.items() if each.phase is TxnPhaseAtTopic.FORGOTTEN]

    @property
    def perhaps_forgotten_transaction_ids(self) -> list[TxnId]:
        """Returns the transactions that are FORGOTTEN, or will be when their coordinators answer that they have
        forgotten the outcomes."""
        return [
            txn for txn, each in self._hidden.items()
            if each.phase is TxnPhaseAtTopic.FORGOTTEN or (each.first is not None and each.first <= self.lost_to)
        ]  # fmt: skip

    def is_open(self, txn: TxnId) -> bool:
        """Returns True if the transaction is open at this topic."""
        found = self.known.get(txn)
        return found is not None and found.phase is TxnPhaseAtTopic.OPEN

    # ------------------------------------------------------------------ entries
    def judge_duplicate(self, txn: TxnId, name: str, numbers: SequenceRange) -> DedupVerdict:
        """Returns the verdict on an entry of an open transaction: whether it is a duplicate. After NEW the entry counts
        as in flight: the caller must pass the entry to the log, or call `on_publish_failed`."""
        found = self.known[txn]
        assert found.phase is TxnPhaseAtTopic.OPEN, "an entry is judged in an open transaction"
        own = found.numbers.get(name)
        if own is None:
            own = found.numbers[name] = EntriesOfTxnProducer()
        answer = judge_sequence_range(own.progress, own.pushed, numbers)
        if answer is DedupVerdict.NEW and not own.pushed.is_followed_by(numbers):
            return DedupVerdict.UNORDERED
        if answer is DedupVerdict.NEW:
            own.pushed = own.pushed.extended_by(numbers)
            numbers.add_sequence_ids_to(own.sent)
            self._sends(txn, name, numbers.last)
            own.in_flight += 1
            found.in_flight += 1
            self._flying[name] = self._flying.get(name, 0) + 1
        return answer

    def _sends(self, txn: TxnId, name: str, number: int) -> None:
        sender = self._senders.get(name)
        if sender is None:
            sender = self._senders[name] = _Sender()
        sender.txns[txn] = None
        sender.highest = max(sender.highest, number)

    def find_other_transaction_of_sequence(self, name: str, txn: TxnId | None, numbers: SequenceRange) -> TxnId | None:
        """Returns another transaction that has not ended and in which the producer sent one of these sequence ids; None
        if there is none."""
        sender = self._senders.get(name)
        if sender is None or numbers.first > sender.highest:
            return None
        for other in sender.txns:
            if other != txn and self.known[other].numbers[name].sent.range_cardinality(
                numbers.first, min(numbers.last + 1, SEQUENCE_ID_END)
            ):
                return other
        return None

    def on_publish_failed(self, txn: TxnId, name: str) -> None:
        """Called when an entry with the verdict NEW failed: it is not in the log, or it is not known whether it is. The
        caller must disconnect the producer, so that none of its later entries is stored before this entry is sent
        again."""
        own = self._landed(txn, name).numbers[name]
        if not own.in_flight:
            own.sent -= _above(own)

    def _landed(self, txn: TxnId, name: str) -> TopicTxn:
        found = self.known[txn]
        own = found.numbers[name]
        own.in_flight -= 1
        if not own.in_flight:
            own.pushed = own.progress
        found.in_flight -= 1
        left = self._flying[name] - 1
        if left:
            self._flying[name] = left
        else:
            del self._flying[name]
        if found.phase is TxnPhaseAtTopic.ENDED and not found.in_flight:
            del self.known[txn]
        return found

    def on_publish_confirmed(
        self, txn: TxnId, name: str, numbers: SequenceRange, position: Position, first_index: int, count: int,
        size: int,
    ) -> None:  # fmt: skip
        """Called when an entry with the verdict NEW is stored at `position`. `first_index`: the index of its first
        message; `count`: the number of its messages; `size`: its bytes. If the transaction has ended meanwhile, the
        entry is aborted."""
        found = self.known[txn]
        if found.phase is TxnPhaseAtTopic.ENDED:
            self._abort_one(position, first_index, count, size)
        else:
            self._add(txn, found, name, numbers, position, first_index, count, size)
        self._landed(txn, name)

    def add_replayed_entry(
        self, txn: TxnId, name: str, numbers: SequenceRange, position: Position, first_index: int, count: int,
        size: int,
    ) -> None:  # fmt: skip
        """Adds an entry of a transaction, while the log is being replayed. Its position must be after all entries that
        are known already. The entry is hidden until the outcome of its transaction is known; it is aborted if its
        transaction had ended before the loaded snapshot."""
        assert position > self.position, "the log is taken in its order"
        self.position = position
        if txn in self._ended:
            self._abort_one(position, first_index, count, size)
            return
        self.register_unresolved_transaction(txn)
        self._add(txn, self.known[txn], name, numbers, position, first_index, count, size)

    def add_replayed_sequence_ids(self, txn: TxnId, name: str, numbers: SequenceRange, position: Position) -> bool:
        """Adds the sequence ids of an entry to its transaction, if that is open, while the log is being replayed. Must
        be called for each replayed entry of a transaction, also for one that the loaded snapshot contains already.
        Returns True if the entry is aborted."""
        if position[1] in self.aborted.get(position[0], ()):
            return True
        found = self.known.get(txn)
        if found is not None and name in found.numbers:
            numbers.add_sequence_ids_to(found.numbers[name].sent)
        return False

    def finish_replay(self) -> None:
        """Ends the replay of the log. Before this call each entry of a transaction in the log must have been passed to
        `add_replayed_entry` or `add_replayed_sequence_ids`."""
        self.position, self._ended = self._shape.last_confirmed, frozenset()

    def _add(
        self, txn: TxnId, found: TopicTxn, name: str, numbers: SequenceRange, position: Position, first_index: int,
        count: int, size: int,
    ) -> None:  # fmt: skip
        found.add_entry(position, first_index, count, size)
        if not self._hidden:
            self._stable = None
        self._hidden.setdefault(txn, found)
        own = found.numbers.get(name)
        if own is None:
            own = found.numbers[name] = EntriesOfTxnProducer()
        own.progress, own.last = own.progress.extended_by(numbers), position
        numbers.add_sequence_ids_to(own.sent)
        self._sends(txn, name, numbers.last)
        if not own.in_flight:
            own.pushed = own.progress

    # ------------------------------------------------------------------ the end
    def settle(self, settlement: Settlement) -> TxnEndEffect:
        """Applies the outcome of a transaction, and returns how the topic changes by it; NO_END_EFFECT if the
        transaction is not known or has ended here. Idempotent. After an earlier settlement the transaction may be known
        again without an entry, because of an acknowledgement, a join or a new owner. Then its entries up to `last` do
        not count as missing."""
        found = self.known.get(settlement.txn)
        if found is None or found.phase is TxnPhaseAtTopic.ENDED:
            return NO_END_EFFECT
        self.commits += settlement.committed
        self.aborts += not settlement.committed
        numbers: dict[str, ProducerSequenceProgress] = {}
        missing = 0
        if settlement.committed and 0 <= settlement.entries < found.entry_count:
            late, indexes, end = found.entries_without_receipt(settlement.last, settlement.entries)
            late_count = sum(map(len, late.values()))
            self._abort(late, found.size * late_count // max(1, found.entry_count))
            self.aborted_indexes |= indexes
            numbers = {
                name: own.progress for name, own in found.numbers.items()
                if own.progress != NO_PROGRESS and own.last <= end
            }  # fmt: skip
            missing = max(0, settlement.entries - (found.entry_count - late_count))
        elif settlement.committed:  # all of it counts
            numbers = {name: own.progress for name, own in found.numbers.items() if own.progress != NO_PROGRESS}
            if found.entry_count or not self._is_in_log(settlement.last):
                missing = max(0, settlement.entries - found.entry_count)
        else:
            self._abort(found.entries, found.size)
            self.aborted_indexes |= found.indexes
        sent = {name: own.sent - _above(own) for name, own in found.numbers.items() if name in numbers}
        back = {
            name: _above(own) if settlement.committed else own.sent for name, own in found.numbers.items() if own.sent
        }  # fmt: skip
        for name in found.numbers:
            sender = self._senders.get(name)
            if sender is not None and sender.txns.pop(settlement.txn, NO_POSITION) is None and not sender.txns:
                del self._senders[name]
        shown = self._hidden.pop(settlement.txn, None) is not None
        self._stable = None
        found.phase = TxnPhaseAtTopic.ENDED
        if not found.in_flight:
            del self.known[settlement.txn]
        self.version += shown
        return TxnEndEffect(numbers, shown, sent, back, missing)

    def _is_in_log(self, position: Position) -> bool:
        """Returns True if the log has, or had, an entry at this position."""
        span = self._shape.find_span_of_ledger(position[0])
        return position[1] <= span.last_entry if span is not None else position <= self._shape.last_confirmed

    def _abort_one(self, position: Position, first_index: int, count: int, size: int) -> None:
        self._abort({position[0]: BitMap((position[1],))}, size)
        self.aborted_indexes.add_range(first_index, first_index + count)
        self.version += 1

    def _abort(self, gone: Mapping[int, BitMap], size: int) -> None:
        total = sum(map(len, gone.values()))
        for ledger_id, entries in gone.items():
            if ledger_id in self.aborted:
                self.aborted[ledger_id] |= entries
            else:
                self.aborted[ledger_id] = entries.copy()
            self.sizes[ledger_id] = self.sizes.get(ledger_id, 0) + size * len(entries) // total
            self.changed.add(ledger_id)

    def on_ledger_trimmed(self, ledger_id: int, first_index: int, end_index: int) -> None:
        """Called when a ledger was deleted: removes the state of the entries in it. Its messages had the indexes from
        `first_index` up to, not including, `end_index`."""
        self._stable = None
        if self.aborted.pop(ledger_id, None) is not None:
            del self.sizes[ledger_id]
            self.changed.discard(ledger_id)
            self.aborted_indexes.remove_range(first_index, end_index)

    # ------------------------------------------------------------------ questions
    @property
    def stable_position(self) -> Position:
        """Returns the last stable position: all transactions with entries up to this position have ended. Returns the
        position before the first entry of the log if there is no such position."""
        first = self.first_open_transaction_position
        if first is None:
            return self._shape.last_confirmed
        if self._stable is None:
            self._stable = self._shape.position_before(first)
        return self._stable

    @property
    def stable_index(self) -> int:
        """Returns the index of the first message after the last stable position."""
        for found in self._hidden.values():
            return int(found.starts[0])
        return self._shape.end_index

    @property
    def first_open_transaction_position(self) -> Position | None:
        """Returns the position of the earliest entry that belongs to a transaction which has not ended; None if there
        is none."""
        for found in self._hidden.values():
            return found.first
        return None

    def count_aborted_messages(self, first: int, end: int) -> int:
        """Returns how many messages with an index from `first` up to, not including, `end` are aborted."""
        return int(self.aborted_indexes.range_cardinality(first, end))

    def is_hidden(self, txn: TxnId, position: Position) -> bool:
        """Returns True if consumers that read only committed entries do not get this entry: its transaction is open
        (they may get the entry later) or aborted (they never get it)."""
        aborted = self.aborted.get(position[0])
        if aborted is not None and position[1] in aborted:
            return True
        found = self._hidden.get(txn)
        return found is not None and position[1] in found.entries.get(position[0], ())

    def is_known(self, txn: TxnId) -> bool:
        """Returns True if the transaction has not ended, and the topic has entries of it or has asked its coordinator
        about it."""
        found = self.known.get(txn)
        return found is not None and found.phase is not TxnPhaseAtTopic.ENDED

    @property
    def open_transaction_ids(self) -> list[TxnId]:
        """Returns the ids of the transactions that have not ended, the transaction with the earliest entry first."""
        rest = [
            txn
            for txn, each in self.known.items()
            if each.phase is not TxnPhaseAtTopic.ENDED and txn not in self._hidden
        ]
        return [*self._hidden, *rest]

    def last_sequence_id(self, name: str) -> int:
        """Returns the highest sequence id of the producer in an open transaction; -1 if none is known."""
        sender = self._senders.get(name)
        open_ = sender.txns if sender is not None else ()
        return max((self.known[txn].numbers[name].progress.number for txn in open_), default=-1)

    def is_idle(self, name: str) -> bool:
        """Returns True if no entry of the producer is in flight in a transaction."""
        return name not in self._flying

    def count_entries_in_flight(self, txn: TxnId) -> int:
        """Returns the number of entries of the transaction that are in flight; 0 if it is not known."""
        found = self.known.get(txn)
        return found.in_flight if found is not None else 0

    def find_open_transaction_stats(self, txn: TxnId) -> OpenTxnStats | None:
        """Returns the statistics of an open transaction; None if the transaction has ended, or is not known."""
        found = self.known.get(txn)
        if found is None or found.phase is TxnPhaseAtTopic.ENDED:
            return None
        holds = found.first is not None and found.first == self.first_open_transaction_position
        waiting = self._shape.end_index - self.stable_index if holds else 0
        return OpenTxnStats(found.first, found.entry_count, found.size, holds, waiting)

    @property
    def aborted_entries(self) -> int:
        """Returns the number of stored entries that are in aborted transactions."""
        return sum(map(len, self.aborted.values()))

    @property
    def aborted_bytes(self) -> int:
        """Returns the size in bytes of the stored entries that are in aborted transactions."""
        return sum(self.sizes.values())

    # ------------------------------------------------------------------ snapshots
    def get_aborted_entries_of_ledger(self, ledger_id: int) -> AbortedEntriesOfLedger:
        """Returns the entries of the ledger that belong to aborted transactions, in the form in which a snapshot stores
        them."""
        span = self._shape.find_span_of_ledger(ledger_id)
        indexes = BitMap64()
        if span is not None:
            indexes.add_range(span.first_index, span.end_index)
            indexes &= self.aborted_indexes
        return AbortedEntriesOfLedger(self.aborted[ledger_id], indexes, self.sizes[ledger_id])

    def open_transactions(self) -> tuple[OpenTxnInSnapshot, ...]:
        """Returns the open transactions, in the form in which a snapshot stores them. Their entries in flight are left
        out, because these come after the position of the snapshot."""
        return tuple(
            OpenTxnInSnapshot(
                txn, each.first, {id_: entries.copy() for id_, entries in each.entries.items()}, each.indexes.copy(),
                each.starts.copy(), each.size,
                {
                    name: (own.progress, own.last) for name, own in each.numbers.items() if own.progress != NO_PROGRESS
                },
            )
            for txn, each in self._hidden.items() if each.first is not None
        )  # fmt: skip

    def ended_txns_with_entries_in_flight(self) -> tuple[TxnId, ...]:
        """Returns the ids of the transactions that have ended while entries of them were in flight."""
        return tuple(txn for txn, each in self.known.items() if each.phase is TxnPhaseAtTopic.ENDED)

    def snapshot(self) -> TxnSnapshot:
        """Returns a snapshot of the topic's transactions as of the last confirmed entry."""
        parts = {each: self.get_aborted_entries_of_ledger(each) for each in self.aborted}
        return TxnSnapshot(
            self._shape.last_confirmed, self.open_transactions(), parts, self.ended_txns_with_entries_in_flight(),
            self.lost_to,
        )  # fmt: skip

    def check(self) -> None:
        """Raises AssertionError unless these invariants hold: hidden entries are in log order and not aborted; the last
        stable position is confirmed; all counters are right."""
        firsts = [each.first for each in self._hidden.values()]
        assert all(first is not None for first in firsts), "a transaction without entries hides something"
        assert firsts == sorted(each for each in firsts if each is not None), "first entries are not in order"
        assert self.stable_position <= self._shape.last_confirmed, (
            "the last stable position is after the last confirmed entry"
        )
        assert self.stable_index <= self._shape.end_index, "an index that no message has is stable"
        assert self.aborted.keys() == self.sizes.keys(), "a ledger is not weighed"
        assert self._hidden.keys() <= self.known.keys(), "entries are hidden that no outcome will show"
        for txn, each in self.known.items():
            assert each.phase is not TxnPhaseAtTopic.ENDED or each.in_flight, "a transaction that is over is kept"
            assert (txn in self._hidden) is (each.phase is not TxnPhaseAtTopic.ENDED and each.entry_count > 0), (
                "wrongly hidden"
            )
            assert each.in_flight == sum(own.in_flight for own in each.numbers.values()), (
                "entries on their way are lost"
            )
        senders = {
            name: {txn for txn,
                each in self.known.items() if each.phase is not TxnPhaseAtTopic.ENDED and name in each.numbers}
            for each in self.known.values() for name in each.numbers
        }  # fmt: skip
        assert {name: set(each.txns) for name, each in self._senders.items()} == {
            name: txns for name, txns in senders.items() if txns
        }, "where a producer sent something is not known"
        for each in self._hidden.values():
            assert each.entry_count == sum(map(len, each.entries.values())), "an entry has no start"
            for ledger_id, entries in each.entries.items():
                assert entries.isdisjoint(self.aborted.get(ledger_id, BitMap())), "an entry is open and aborted"
            assert self.aborted_indexes.isdisjoint(each.indexes), "a message is open and aborted"

