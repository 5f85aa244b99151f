"""Defects of acknowledgements in transactions: patches of a cursor's pending acknowledgements."""

from collections.abc import Callable, Iterable
from typing import Any

from magnetar.broker.pulsar import translate
from magnetar.broker.subscription.core import pending_acks
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import NO_POSITION, PendingAcks, TxnAcks
from magnetar.broker.subscription.core.dispatch import Dispatcher
from magnetar.broker.subscription.core.pending_acks import SettledAcks, TransactionalAckRefused
from magnetar.client.consume.transactional_acks import ClientTransactionalAcks
from magnetar.client.core.redelivery import DuplicateFilter
from magnetar.proto.names import Position
from magnetar.proto.states import TxnId
from tests.mutants.ledgers import Stack, put


def commit_takes_the_batch(stack: Stack) -> None:
    """M70: a commit acknowledges all messages of a batch that are pending, those of other transactions too."""
    honest = pending_acks.settle_transactional_acks

    def settle(cursor: Cursor, txn: TxnId, *, committed: bool) -> SettledAcks | None:
        pending = cursor.pending
        parts = {each: part.bits for each, part in pending.parts.items()} if pending is not None else {}
        settled = honest(cursor, txn, committed=committed)
        if settled is not None and committed:
            for position, part in settled.acks.parts.items():
                kept, cursor.pending = cursor.pending, None
                cursor.ack_messages_of_batch(position, parts[position] | part.bits, part.size)
                cursor.pending = kept
        return settled

    put(stack, pending_acks, "settle_transactional_acks", settle)


def settled_and_still_pending(stack: Stack) -> None:
    """M71: what a transaction had pending is applied, and is pending still: it is applied again."""
    honest = PendingAcks.take_acks_of_transaction

    def take(self: PendingAcks, txn: TxnId) -> TxnAcks | None:
        taken = honest(self, txn)
        if taken is not None:
            self.add(txn, taken)
        return taken

    put(stack, PendingAcks, "take_acks_of_transaction", take)


def pending_comes_again(stack: Stack) -> None:
    """M72: what is pending is delivered again when its consumer gives it back or leaves."""
    put(stack, Cursor, "is_acked_or_pending", Cursor.is_acked)
    put(stack, Cursor, "next_deliverable_position", Cursor.next_unacked_position)


def refused_in_the_middle(stack: Stack) -> None:
    """M73: a request that is refused for one of its entries leaves those before it pending."""
    honest = pending_acks.judge_transactional_acks

    def judge(
        cursor: Cursor, txn: TxnId, wanted: TxnAcks, named: Position = NO_POSITION
    ) -> TxnAcks | TransactionalAckRefused:
        for ledger_id, entries in wanted.entries.items():
            for entry_id in entries:
                one = TxnAcks()
                one.add(Position(ledger_id, entry_id))
                found = honest(cursor, txn, one)
                if not isinstance(found, TransactionalAckRefused):
                    pending_acks.add_pending_acks(cursor, txn, found)
        return honest(cursor, txn, wanted, named)

    put(stack, pending_acks, "judge_transactional_acks", judge)


def aborted_is_acknowledged(stack: Stack) -> None:
    """M74: an abort acknowledges what it should give back."""
    honest = pending_acks.settle_transactional_acks

    def settle(cursor: Cursor, txn: TxnId, *, committed: bool) -> SettledAcks | None:
        return honest(cursor, txn, committed=True)

    put(stack, pending_acks, "settle_transactional_acks", settle)


def abort_forgets_the_order(stack: Stack) -> None:
    """M75: after an abort its entries come again, and what was delivered after them does not."""
    def step_back(self: Dispatcher, first: Position) -> None:
        return None

    put(stack, Dispatcher, "move_read_position_back", step_back)


def delivered_twice_in_the_sdk(stack: Stack) -> None:
    """M70b: the SDK acknowledges two deliveries of a message in one transaction: it is processed twice."""
    put(stack, ClientTransactionalAcks, "_delivered_twice", lambda *_: None)


def shown_again_and_covered(stack: Stack) -> None:
    """M70e: what a new connection delivers again is shown to a program that has it and acknowledges cumulatively."""
    put(stack, DuplicateFilter, "find_end_of_repeats", lambda *_: None)


def delivered_twice_in_the_broker(stack: Stack) -> None:
    """M70c: a client of Pulsar's protocol acknowledges two deliveries of a message in one transaction."""
    put(stack, pending_acks, "find_repeated_acks", lambda *_: None)


def bits_above_what_is_held(stack: Stack) -> None:
    """M70d: of a batch of which an abort gave a part back, acknowledgements count as far as its consumer holds it."""
    honest = translate.parse_individual_acks

    def individual(ids: Iterable[Any], messages_of: Callable[[Position], int], *, exact: bool = False) -> Any:
        return honest(ids, messages_of)

    put(stack, translate, "parse_individual_acks", individual)
