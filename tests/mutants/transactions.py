"""Defects of a topic's transactions: patches of its joins, its outcomes, and the numbers of its producers."""

from collections.abc import Callable
from typing import Any

from pyroaring import BitMap64

from magnetar.broker.topic import outcomes
from magnetar.broker.topic.dedup import Deduplication
from magnetar.broker.topic.outcomes import TransactionOutcomesLedger
from magnetar.broker.topic.transactions import TopicTransactions
from magnetar.broker.topic.transactions_core import NO_POSITION, TopicTransactionsCore, TxnEndEffect, TxnPhaseAtTopic
from magnetar.broker.topic.txn_joins import TransactionJoins
from magnetar.proto.names import Position
from magnetar.proto.states import ForgottenOutcome, TxnId, TxnState
from tests.mutants.ledgers import Stack, put


def join_is_skipped(stack: Stack) -> None:
    """M80: a topic takes entries of a transaction without asking its coordinator."""

    async def patiently(self: TransactionJoins, txn: TxnId, owner: str | None) -> TxnState:
        return TxnState.OPEN

    def join_nowait(self: TransactionJoins, txn: TxnId, owner: str | None = None) -> bool:
        core = self._of.core
        if core is not None and core.may_join(txn):
            core.register_unresolved_transaction(txn)
            self._is_in(core, txn, owner)
        return self._of.is_open(txn)

    put(stack, TransactionJoins, "_patiently", patiently)
    put(stack, TransactionJoins, "join_nowait", join_nowait)


def settled_before_it_is_stored(stack: Stack) -> None:
    """M81: a settlement is answered when it is applied, and its outcome is stored later."""

    async def durable(self: TransactionOutcomesLedger) -> None:
        return

    put(stack, TransactionOutcomesLedger, "wait_durable", durable)


def aborted_by_id(stack: Stack) -> None:
    """M82: an entry that comes after the end aborts its transaction, and not itself alone."""
    honest = TopicTransactionsCore.on_publish_confirmed

    def confirmed(self: TopicTransactionsCore, txn: TxnId, *args: Any) -> None:
        found = self.known[txn]
        honest(self, txn, *args)
        if found.phase is TxnPhaseAtTopic.ENDED:
            self._abort(found.entries, found.size)
            self.aborted_indexes |= found.indexes or BitMap64()

    put(stack, TopicTransactionsCore, "on_publish_confirmed", confirmed)


def outcomes_ahead_of_their_position(stack: Stack) -> None:
    """M83: stored outcomes claim to know an entry that was not confirmed when they were taken."""
    honest = TransactionOutcomesLedger._plan

    def plan(self: TransactionOutcomesLedger, position: Position, *args: Any) -> Any:
        return honest(self, Position(position[0], position[1] + 1), *args)

    put(stack, TransactionOutcomesLedger, "_plan", plan)


def numbers_at_append(stack: Stack) -> None:
    """M84: sequence ids of a transaction count when its entries are stored, and an abort does not take them back."""
    honest = TopicTransactions.on_publish_confirmed

    def confirmed(self: TopicTransactions, txn: TxnId, name: str, *args: Any) -> None:
        honest(self, txn, name, *args)
        if self.core is not None and (found := self.core.known.get(txn)) is not None:
            self.topic.apply_sequence_ids_to_dedup(TxnEndEffect({name: found.numbers[name].progress}, shown=False))

    put(stack, TopicTransactions, "on_publish_confirmed", confirmed)


def snapshot_after_an_open_transaction(stack: Stack) -> None:
    """M85: a snapshot of sequence ids is taken at the end of the log while a transaction is open."""

    def hold_before(self: Deduplication, undecided: Callable[[], Position | None]) -> None:
        return

    put(stack, Deduplication, "set_snapshot_limit_function", hold_before)


def forgotten_is_aborted(stack: Stack) -> None:
    """M67b: a topic that lost the outcomes that it stored takes what its coordinator forgot for aborted."""

    def on_outcome_forgotten(self: TopicTransactionsCore, txn: TxnId, why: ForgottenOutcome) -> bool:
        return False

    put(stack, TopicTransactionsCore, "on_outcome_forgotten", on_outcome_forgotten)


def loss_is_not_stored(stack: Stack) -> None:
    """M67c: the next outcomes that a topic stores do not say that earlier ones are lost."""
    honest = outcomes.encode_marker

    def encode_marker(marker: outcomes.OutcomesSnapshotMarker, sequence: int) -> list[bytes]:
        return honest(marker._replace(lost_to=NO_POSITION), sequence)

    put(stack, outcomes, "encode_marker", encode_marker)


def forgotten_without_an_answer(stack: Stack) -> None:
    """M67: a transaction whose coordinator gives no answer is forgotten: no outcome shows its entries any more."""

    def refused(self: TopicTransactionsCore, txn: TxnId) -> None:
        found = self.known.get(txn)
        if found is not None and found.phase is TxnPhaseAtTopic.ASKED:
            del self.known[txn]

    put(stack, TopicTransactionsCore, "on_join_refused", refused)
