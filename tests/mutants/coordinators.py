"""Defects of the coordinators of transactions: patches of the core, its take-over, and its retention."""

from collections.abc import Sequence
from typing import Any

from magnetar.broker.transaction import log
from magnetar.broker.transaction.begins_core import SinkBatchDecider, TransactionEndDecider
from magnetar.broker.transaction.coordinator_core import TransactionCoordinatorCore
from magnetar.broker.transaction.halves_core import IntentQueuedUntilDurable
from magnetar.broker.transaction.intents_core import AbortReason, SendOutcomeToParticipant
from magnetar.broker.transaction.log import CoordinatorLog
from magnetar.broker.transaction.outcomes_core import OutcomeDecider
from magnetar.broker.transaction.records_core import Participant, SinkBatch, TransactionsSettled
from magnetar.broker.transaction.state_core import CoordinatorState, LiveTransaction, TransactionPhase, TransactionTable
from tests.mutants.ledgers import Stack, put


def answered_while_in_doubt(stack: Stack) -> None:
    """M90: a question about a transaction is answered while its commit is on its way."""

    def certain(self: OutcomeDecider, txn: int, intent: Any, now: float, owner: str | None = None) -> Any:
        found = self.find_transaction(txn, now, owner)
        if getattr(found, "phase", None) is TransactionPhase.COMMITTING and not self._decisions.writing:
            found.waiting_intents.append(intent)  # type: ignore[union-attr]
            raise IntentQueuedUntilDurable
        return found

    put(stack, OutcomeDecider, "find_transaction_not_in_doubt", certain)


def done_before_all_stored(stack: Stack) -> None:
    """M91: a transaction is done when the first of its topics has stored the outcome."""

    def settled(self: OutcomeDecider, txn: int, topic: str) -> None:
        ending = self._table.ending.pop(txn, None)
        if ending is not None and ending.is_durable:
            self._decisions.defer_record(TransactionsSettled([txn]))

    put(stack, OutcomeDecider, "on_outcome_stored", settled)


def epoch_stays(stack: Stack) -> None:
    """M92: a take-over keeps the epoch, so ids are given again."""

    async def store_coordinator_claim(self: CoordinatorLog) -> None:
        before = self._record.epoch
        await self.store_coordinator_claim()
        self.epoch = max(1, before)

    steps = (
        store_coordinator_claim if step is CoordinatorLog.store_coordinator_claim else step
        for step in log.TAKE_OVER_STEPS
    )
    put(stack, log, "TAKE_OVER_STEPS", tuple(steps))


def handed_to_any_epoch(stack: Stack) -> None:
    """M93: what an owner handed over is open for every later epoch, also when it was aborted in the next one."""
    honest = TransactionCoordinatorCore.start

    def start(self: TransactionCoordinatorCore, now: float) -> list[Any]:
        for handed in self.state.handed:
            if handed.epoch < self.table.epoch - 1:
                self._take_handed(handed, now)
        return honest(self, now)

    put(stack, TransactionCoordinatorCore, "start", start)


def forgotten_by_age(stack: Stack) -> None:
    """M94: outcomes are forgotten when they are old, whether their topics have stored them or not."""

    put(stack, TransactionTable, "lowest_unsettled_id", property(lambda self: self.next_id))


def batch_is_not_remembered(stack: Stack) -> None:
    """M95: the batch of a sink is not in the record that commits it."""
    honest = CoordinatorState._committed

    def committed(self: CoordinatorState, record: Any) -> None:
        honest(self, record)
        if record.sink is not None:
            self.sinks.remove(record.sink.owner, record.sink.sink_id)

    put(stack, CoordinatorState, "_committed", committed)


def aborted_by_sink_alone(stack: Stack) -> None:
    """M97: the commit of a batch aborts all else that was begun for its sink, and asks for no batch."""

    def committed(self: SinkBatchDecider, sink: SinkBatch, now: float) -> None:
        key = sink.owner, sink.sink_id
        for txn in list(self._table.by_sink.get(key, ())):
            self._outcomes.abort_or_void_id(txn, AbortReason.SUPERSEDED, now)
        self._outcomes.handle_intents(self.in_doubt.pop(key), now)

    put(stack, SinkBatchDecider, "on_committed", committed)


def settled_before_durable(stack: Stack) -> None:
    """M96: topics are told of a commit when it is decided, and not when its record is durable."""
    honest = TransactionCoordinatorCore._receive

    def receive(self: TransactionCoordinatorCore, intent: Any, now: float) -> None:
        before = len(self.decisions.gathered)
        honest(self, intent, now)
        for record, _ in self.decisions.gathered[before:]:
            for txn, _ in getattr(record, "txns", ()) if type(record).__name__ == "TransactionsCommitted" else ():
                shares = self.table.live[txn].participants.values()
                self.decisions.effects += [SendOutcomeToParticipant(txn, True, each) for each in shares]

    put(stack, TransactionCoordinatorCore, "_receive", receive)


def lost_receipts_commit_all(stack: Stack) -> None:
    """M76: of a topic whose receipts the client lost a commit counts all that it stored."""
    honest = TransactionEndDecider.match_reported_participants

    def participants(
        self: TransactionEndDecider, live: LiveTransaction, listed: Sequence[Participant], now: float
    ) -> list[Participant]:
        said = {each.topic for each in listed}
        found = honest(self, live, listed, now)
        return [each if not listed or each.topic in said else Participant(each.topic) for each in found]

    put(stack, TransactionEndDecider, "match_reported_participants", participants)
