"""How a transaction gets its outcome: decided records are gathered for one append, and take effect when it is durable.

    PendingDecisions   the records that are decided and not durable, and the effects. `take_next_append` returns all of
                       these records as one append; `take_durable_decisions` removes them when the append is durable
    OutcomeDecider     aborts transactions, and sends outcomes to participants until they have stored them

The abort of an open transaction needs no record: a transaction without a commit record is aborted. The abort of a
prepared transaction, and each commit, is a record. coordinator_core.py applies durable records.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...proto.errors import NotOwner
from ...proto.states import COUNTER_BITS, TxnState
from .halves_core import IntentQueuedUntilDurable
from .intents_core import (
    AbandonEpoch,
    AbortReason,
    AnswerRequest,
    AppendRecords,
    CoordinatorEffect,
    CoordinatorIntent,
    IntentResult,
    SendOutcomeToParticipant,
)
from .records_core import (
    AnyCoordinatorRecord,
    Participant,
    PreparedTransactionAborted,
    TransactionOwner,
    TransactionsSettled,
    make_commit_record,
)
from .state_core import IN_DOUBT_PHASES, LiveTransaction, TransactionPhase, TransactionTable, UnsettledTransaction


class PendingDecision(NamedTuple):
    """A record that is decided and must be written, and the intent that caused it, which the coordinator handles when
    the record is durable; None if no intent waits."""

    record: AnyCoordinatorRecord
    intent: CoordinatorIntent | None = None


class PendingDecisions:
    """The records that are decided and not durable yet, and the effects that the driver has not done yet. `gathered`:
    records for the next append; `deferred`: records that join it, but do not cause it; `writing`: records of the append
    in flight; `has_ended`: True if the coordinator accepts no more intents."""

    def __init__(self) -> None:
        self.has_ended = False  # the coordinator gave itself up, or is closing: it answers nothing new
        self.gathered: list[PendingDecision] = []
        self.deferred: list[PendingDecision] = []  # records that join the next append, or are appended at the next tick
        self.writing: list[PendingDecision] = []
        self._number = 0
        self.effects: list[CoordinatorEffect] = []

    # ------------------------------------------------------------------ records
    def append_decision(self, record: AnyCoordinatorRecord, intent: CoordinatorIntent | None = None) -> None:
        """Adds a record to the next append. When the record is durable, the coordinator answers `intent` (None: nothing
        is to be answered)."""
        self.gathered.append(PendingDecision(record, intent))

    def defer_record(self, record: AnyCoordinatorRecord) -> None:
        """Adds a record whose loss does no harm. It does not cause an append, but is part of the next append that
        another record causes."""
        self.deferred.append(PendingDecision(record))

    def append_deferred_records_next(self) -> None:
        """Makes the deferred records cause an append, because they have waited long enough for another record."""
        self.gathered += self.deferred
        self.deferred = []

    def take_next_append(self) -> AppendRecords | None:
        """Returns the next append, with all decided records; None if there is no decided record, or if an append is in
        flight."""
        if self.writing or not self.gathered:
            return None
        self.writing = [*self.gathered, *self.deferred]
        self.gathered, self.deferred = [], []
        self._number += 1
        return AppendRecords(self._number, [each.record for each in self.writing])

    def take_durable_decisions(self, number: int) -> list[PendingDecision]:
        """Removes and returns the decisions of append `number`, whose records are durable. From now on the next append
        may begin."""
        assert number == self._number, "one append at a time"
        assert self.writing, "an append has records"
        decisions, self.writing = self.writing, []
        return decisions

    @property
    def has_decided_records(self) -> bool:
        """Returns True if decided records wait for the next append."""
        return bool(self.gathered)

    @property
    def has_deferred_records(self) -> bool:
        """Returns True if deferred records wait for an append."""
        return bool(self.deferred)

    # ------------------------------------------------------------------ effects
    def answer_intent(self, intent: CoordinatorIntent, result: IntentResult) -> None:
        """Adds the effect that answers the intent with `result`."""
        self.effects.append(AnswerRequest(intent.request, result))

    def take_effects(self) -> list[CoordinatorEffect]:
        """Removes the collected effects and returns them. The driver must also call this method after it has called a
        method of `HalfMessageCore`."""
        effects, self.effects = self.effects, []
        return effects

    def abandon_epoch(self, why: str) -> None:
        """Ends the epoch: adds the effect that stops the coordinator at this broker. `why`: the reason."""
        self.has_ended = True
        self.effects.append(AbandonEpoch(why))


class OutcomeDecider:
    """Finds transactions by id, and gives them their outcomes. The first use of an id opens a transaction; a commit or
    an abort ends it; then its outcome is sent to each participant until all have stored it. In all methods `now` is in
    monotonic seconds."""

    def __init__(
        self, table: TransactionTable, decisions: PendingDecisions, receive: Callable[[CoordinatorIntent, float], None]
    ) -> None:
        """`receive`: a function that handles an intent (with the present time) which waited while a transaction was in
        doubt."""
        self._table = table
        self._decisions = decisions
        self._receive = receive

    def handle_queued_intents(self, live: LiveTransaction, now: float) -> None:
        """Handles the intents that waited while the transaction `live` was in doubt (a record about it was being
        written)."""
        intents, live.waiting_intents = live.waiting_intents, []
        self.handle_intents(intents, now)

    def handle_intents(self, intents: Iterable[CoordinatorIntent], now: float) -> None:
        """Handles the intents, in this order."""
        for intent in intents:
            self._receive(intent, now)

    # ------------------------------------------------------------------ uses and doubt
    def find_transaction(
        self, txn: int, now: float, owner: str | None = None
    ) -> LiveTransaction | UnsettledTransaction | TxnState:
        """Returns the transaction with this id, if it is live or unsettled, else its state. If the id is leased and was
        not used yet, opens the transaction. Raises NotOwner if the id belongs to a later epoch; InvalidRequest if the
        id was never given to a client, or another role than `owner` began the transaction. `owner` None: the caller may
        see the transactions of every role."""
        if txn >> COUNTER_BITS > self._table.epoch:
            raise NotOwner(f"coordinator {self._table.number} has a later epoch elsewhere; look it up again")
        self._table.check_owner(txn, owner)
        if txn in self._table.unused:
            self._use(txn, now)
        found = self._table.live.get(txn) or self._table.ending.get(txn)
        if found is not None:
            return found
        if self._table.state.is_committed(txn):
            return TxnState.COMMITTED
        if txn >= self._table.next_id:
            raise self._table.make_unknown_id_error(txn)
        return TxnState.ABORTED

    def _use(self, txn: int, now: float) -> None:
        owned = self._table.unused[txn].owned
        if self._table.unused[txn].until <= now:
            self.abort_or_void_id(txn, AbortReason.LEASE, now)
        elif self._table.is_sink_batch_committed(owned):
            self.abort_or_void_id(txn, AbortReason.SUPERSEDED, now)
        else:
            del self._table.unused[txn]  # its owner, name and sink have it as before
            self._table.live[txn] = LiveTransaction(txn, owned, now, now + owned.timeout_s)
            heapq.heappush(self._table.deadlines, (now + owned.timeout_s, txn))
            self._table.counters.begun += 1

    def find_transaction_not_in_doubt(
        self, txn: int, intent: CoordinatorIntent, now: float, owner: str | None = None
    ) -> LiveTransaction | UnsettledTransaction | TxnState:
        """Returns the same as `find_transaction`. If a record about the transaction is being written (it is in doubt),
        queues `intent` to be handled later, and raises IntentQueuedUntilDurable. Raises the errors of
        `find_transaction`."""
        found = self.find_transaction(txn, now, owner)
        if isinstance(found, LiveTransaction) and found.phase in IN_DOUBT_PHASES:
            found.waiting_intents.append(intent)
            raise IntentQueuedUntilDurable
        return found

    # ------------------------------------------------------------------ outcomes
    def commit_without_participants(self, live: LiveTransaction, now: float) -> None:
        """Commits a transaction that has no participants, at once. Its record is written with the next append that
        another record causes, because the loss of this record does no harm."""
        self._table.remove_transaction(live)
        record = make_commit_record({live.txn: []}, owner=live.owned.owner)
        self._table.state.apply(record)
        self._decisions.defer_record(record)
        self._table.counters.committed += 1
        self._table.counters.count_ended_transaction(now - live.began)

    def abort_transaction(self, live: LiveTransaction, reason: AbortReason, now: float) -> None:
        """Aborts the transaction `live`, which must be open or prepared. An open one is aborted at once; a prepared one
        when a record is durable. Its participants get the outcome."""
        live.reason = reason
        if live.phase is TransactionPhase.PREPARED:
            live.phase = TransactionPhase.ABORTING
            self._decisions.append_decision(
                PreparedTransactionAborted(live.txn, list(live.participants), live.owned.owner)
            )
            return
        assert live.phase is TransactionPhase.OPEN, "a transaction in doubt is not aborted"
        self._table.remove_transaction(live)
        self.record_aborted_end(live, now, is_durable=False)

    def record_aborted_end(self, live: LiveTransaction, now: float, *, is_durable: bool) -> None:
        """Counts the aborted transaction `live`, stores its reason in memory, and sends the outcome to its
        participants. `is_durable`: True if a record of the abort is durable."""
        self._table.counters.count_ended_transaction(now - live.began)
        self._table.record_abort(live.txn, live.reason, live.owned.owner)
        self.send_outcome(live.txn, False, live.participants.values(), live.owned, live.began, is_durable=is_durable)

    def abort_or_void_id(self, txn: int, reason: AbortReason, now: float) -> None:
        """Aborts the transaction, which must be live or leased. If its id is leased and was not used yet, makes the id
        void, so that it can never be used. Does nothing while the transaction is in doubt."""
        lease = self._table.unused.pop(txn, None)
        if lease is not None:
            self._table.remove_from_indexes(txn, lease.owned)
            self._table.record_abort(txn, reason, lease.owned.owner)
            return
        live = self._table.live[txn]
        if live.phase not in IN_DOUBT_PHASES:
            self.abort_transaction(live, reason, now)

    def abort_if_superseded(self, live: LiveTransaction, now: float) -> None:
        """Called when the transaction is no longer in doubt: aborts it if meanwhile its name got a later holder, or its
        sink committed the batch."""
        owned = live.owned
        if live.phase not in (TransactionPhase.OPEN, TransactionPhase.PREPARED):
            return
        holder = self._table.state.names.find(owned.owner, owned.name) if owned.name else None
        if holder is not None and holder.holder > owned.holder:
            self.abort_transaction(live, AbortReason.FENCED, now)
        elif self._table.is_sink_batch_committed(owned):
            self.abort_transaction(live, AbortReason.SUPERSEDED, now)

    # ------------------------------------------------------------------ settling
    def send_outcome(
        self, txn: int, is_committed: bool, waiting: Iterable[Participant], owned: TransactionOwner | None,
        began: float, *,
        is_durable: bool,
    ) -> None:  # fmt: skip
        """Sends the outcome of the transaction to each topic in `waiting`. If `waiting` is empty, the transaction
        counts as settled at once. `owned`: who began it, None if it ended in an earlier epoch; `began`: when it began
        (monotonic seconds); `is_durable`: True if a record of the outcome is durable."""
        each_waiting = {each.topic: each for each in waiting}
        if not each_waiting:
            if is_durable and txn in self._table.state.unsettled:
                self._decisions.defer_record(TransactionsSettled([txn]))
            return
        self._table.ending[txn] = UnsettledTransaction(is_committed, each_waiting, owned, began, is_durable)
        self._decisions.effects += [SendOutcomeToParticipant(txn, is_committed, each) for each in each_waiting.values()]

    def on_outcome_stored(self, txn: int, topic: str) -> None:
        """Called when the topic has stored the outcome of the transaction. A repeated call does nothing."""
        ending = self._table.ending.get(txn)
        if ending is None or ending.waiting.pop(topic, None) is None or ending.waiting:
            return
        self._table.counters.settled += 1
        state = TxnState.COMMITTED if ending.committed else TxnState.ABORTED
        self._decisions.effects += [AnswerRequest(request, state) for request in ending.waiting_requests]
        ending.waiting_requests.clear()
        if ending.is_durable:
            self._decisions.defer_record(TransactionsSettled([txn]))
        else:
            del self._table.ending[txn]

    def find_unsettled_participant(self, txn: int, topic: str) -> Participant | None:
        """Returns the Participant of the topic, if the transaction is committed durably and the topic has not stored
        the outcome yet; else None."""
        ending = self._table.ending.get(txn)
        return ending.waiting.get(topic) if ending is not None and ending.committed and ending.is_durable else None
