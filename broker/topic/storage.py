"""The storage of a topic's log and subscriptions: bookies and the metadata (`DurableTopicStorage`), or memory only
(nonpersistent.py). `Topic` gets its `TopicStorage` when it is constructed, and is otherwise the same for both.
`TransactionsOfDeletedTopic` checks and aborts the open transactions of a topic that is to be deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Concatenate, Protocol

import msgspec

from ...ledger import LedgerClient
from ...metadata import paths
from ...metadata.store import MetadataStore
from ...proto.entry_filter import find_filter
from ...proto.errors import InvalidRequest, MagnetarError, TransactionForgotten, TransactionsOpen, Unavailable
from ...proto.filters import Filter
from ...proto.names import LATEST, Position, TopicName
from ...proto.states import TxnId, TxnState
from ...runtime.clock import Clock
from ...runtime.metrics import Histogram
from ...runtime.network import World
from ..common.config import BrokerConfig
from ..common.transactions import ReportedTransaction, TransactionCoordinatorsPort
from ..log.appender import SlowPublishLog
from ..log.cache import TailCache
from ..log.log import Log
from ..log.log_shape_core import LogShape
from ..log.reader import ReadMemoryBudget
from ..log.topic_log import TopicLog
from ..subscription.core.cursor import Cursor
from ..subscription.core.cursor_state import CursorState
from ..subscription.core.delays import DelayIndex
from ..subscription.cursors import DurableCursor, make_subscription_claim_changes
from ..subscription.dead_letters import HeldBackEntries
from ..subscription.delays import DelayedDelivery
from ..subscription.subscription import Subscription

if TYPE_CHECKING:
    from .topic import Topic

_LOG = logging.getLogger("magnetar.broker")


class TopicStorage(Protocol):
    """Creates the log and the subscriptions of a topic. DurableTopicStorage and NonPersistentStorage implement it;
    Topic and SubscriptionRegistry call it. The asynchronous methods raise the errors of `DurableCursor.open` and
    `DurableCursor.create`, and of the metadata."""

    def create_log(self, topic: Topic) -> Log:
        """Returns a new object for the topic's log, which is not opened yet."""
        ...

    async def open_subscriptions(self, topic: Topic, shape: LogShape) -> list[Subscription]:
        """Opens the stored subscriptions of a topic and returns them. The log must be taken over before. `shape`: the
        shape of the topic's compacted form, because the mark of a subscription may be a position that only this form
        contains. Raises the errors of `DurableCursor.open`, and of the metadata."""

    async def create_subscription(
        self, topic: Topic, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        """Creates a subscription that has acknowledged everything up to `mark` (None: up to the end of the topic).
        Returns the subscription. Raises the errors of `DurableCursor.create`."""

    def make_nondurable_subscription(
        self, topic: Topic, name: str, mark: Position, shape: LogShape, *, tracks: bool
    ) -> Subscription:
        """Returns a new non-durable subscription, which ends with its last consumer. `tracks`: True if messages that
        were delivered and not acknowledged are redelivered; False for a reader."""


class DurableTopicStorage(msgspec.Struct, frozen=True):
    """Creates the log and the subscriptions of a persistent topic. Bookies store their entries and cursors; the
    metadata stores their records."""

    world: World
    metadata: MetadataStore
    ledgers: LedgerClient
    cache: TailCache
    config: BrokerConfig
    forward: Callable[Concatenate[tuple[TopicName, int], ...], Awaitable[object]]  # copies of its messages
    reads: ReadMemoryBudget
    publish_seconds: Histogram | None = None
    slow_publishes: SlowPublishLog | None = None

    def create_log(self, topic: Topic) -> TopicLog:
        return TopicLog(
            self.world, self.metadata, self.ledgers, self.cache, self.config, topic.name,
            replication=topic.replication, on_confirmed=topic.on_entries_confirmed,
            on_delayed=topic.on_delayed_entry_stored,
            on_lost=topic.abandon,
            owned=topic.is_owned, publish_seconds=self.publish_seconds, on_ledger_delayed=topic.on_publish_waiting,
            claims=make_subscription_claim_changes, slow_publishes=self.slow_publishes,
        )  # fmt: skip

    async def open_subscriptions(self, topic: Topic, shape: LogShape) -> list[Subscription]:
        name, found = topic.name, list[Subscription]()
        for each in await self.metadata.children(paths.cursors(name.tenant, name.namespace, name.stored_local)):
            store = self._store(topic, paths.decode_segment(each), topic.log.record.claim)
            await store.open(shape)
            store.cursor.rebase(topic.log.shape)
            found.append(self._subscription(topic, store))
        return found

    async def create_subscription(
        self, topic: Topic, name: str, mark: Position | None, properties: dict[str, str], shape: LogShape
    ) -> Subscription:
        store = self._store(topic, name)
        mark = shape.clamp_mark_to_log(mark if mark is not None else LATEST)
        await store.create(shape, mark, properties, partial(topic.registry.commit_cursor_record, name))
        return self._subscription(topic, store)

    def make_nondurable_subscription(
        self, topic: Topic, name: str, mark: Position, shape: LogShape, *, tracks: bool
    ) -> Subscription:
        cursor, clock = Cursor(shape, CursorState(shape.clamp_mark_to_log(mark))), self.world.clock
        return Subscription(
            name, topic.shown, cursor, None, clock, self.config, topic.applied, tracks=tracks, memory=self.reads
        )

    def _store(self, topic: Topic, subscription: str, claim: str = "") -> DurableCursor:
        return DurableCursor(
            self.world, self.metadata, self.ledgers, self.config, topic.name, subscription,
            replication=topic.replication, on_fenced=topic.log.abandon, claim=claim,
        )  # fmt: skip

    def _subscription(self, topic: Topic, store: DurableCursor) -> Subscription:
        config, log, clock = self.config, topic.shown, self.world.clock
        delays = DelayIndex(log.shape, store.cursor, config.delayed_seal_entries, config.delayed_memory_bytes)
        delayed = DelayedDelivery(
            self.world, self.ledgers, config, store, delays, applied=topic.applied, replication=topic.replication,
            on_fenced=topic.log.abandon,
        )  # fmt: skip
        subscription = Subscription(
            store.subscription, log, store.cursor, store, clock, config, topic.applied, delayed, memory=self.reads
        )
        subscription.dead_letters = HeldBackEntries(
            store.subscription, log, store.cursor, store, subscription.dispatcher, clock,
            topic=topic.name, incarnation=topic.incarnation, applied=topic.applied, forward=self.forward,
            wake=subscription.pump.wake,
        )  # fmt: skip
        if store.properties:
            subscription.set_filter(_find_stored_filter(topic.name, store), topic.key_indexes)
        return subscription


def _find_stored_filter(topic: TopicName, store: DurableCursor) -> Filter | None:
    """Returns the filter of a stored subscription; None if it has none, or one that this version does not know: its
    consumers get all messages then, and filter themselves."""
    try:
        return find_filter(store.properties)
    except InvalidRequest as error:
        _LOG.error("%s/%s: its filter is not applied: %s", topic, store.subscription, error.message)
        return None


# ------------------------------------------------------------------------------------------------------ deletion
# Transactions that have something in a topic that is to be deleted: asked about, refused, or aborted first.
#
#     await deletion.check(txns, force=…)     TransactionsOpen: with who began them, their age, and what to do
#     await deletion.abort(txns)              by force: returns when none of them can commit any more
#
# Rules (docs/transactions.md)
# - A topic goes only when every transaction that has something in it has an outcome. One that committed without this
#   topic would have lost a part of it, and its client would not know.
# - **Without force** anything open or prepared refuses the deletion.
# - **By force** what is open is aborted by its coordinator, wherever that runs: the client gets TransactionAborted and
#   does all of it again. What is **prepared is not**: its client was told that it can commit, and may have made that
#   true elsewhere (the checkpoint of a Spark query, a database). Its own program or an operator ends it.
# - One that is being committed is waited for: it counts, and its messages go with the topic.
# - **A coordinator that does not answer** refuses the deletion: an outcome is never guessed. The topic is as before;
#   transactions may have been aborted. The error is not one that clients try again by themselves: ANSWER_TIMEOUT_S have
#   passed.
#
# Order, in Topic.delete: no transaction joins any more → all are asked → the open ones are aborted → the topic ends.
# Guards: tests/broker/topic/test_deletion.py.


ANSWER_TIMEOUT_S = 10.0
"""Seconds for the answers of all coordinators. Deleting asks twice: below the 30 s after which another broker, that
passes the request on, gives up."""
ASK_RETRY_S = 0.1
TRANSACTIONS_ASKED_AT_ONCE = 1_000
NAMED_TRANSACTIONS_MAX = 5
"""Transactions that an error names: it has to fit into a trailer of gRPC."""
UNKNOWN_STATE = "UNKNOWN"
"""The field `state` of an error, where no coordinator says it."""
ENDED_STATES = (TxnState.COMMITTED, TxnState.ABORTED)

AskTransactionState = Callable[[TxnId], Awaitable[ReportedTransaction]]


class TransactionsOfDeletedTopic:
    """Checks and aborts the open transactions of a topic that is to be deleted. Asks the coordinators of the
    transactions."""

    __slots__ = ("_clock", "_coordinators", "_name")

    def __init__(self, clock: Clock, name: TopicName, coordinators: TransactionCoordinatorsPort) -> None:
        self._clock, self._name, self._coordinators = clock, name, coordinators

    async def check(self, txns: Sequence[TxnId], *, force: bool) -> None:
        """Raises TransactionsOpen if the topic must not be deleted because of one of the transactions `txns`. Without
        `force`, each transaction without an outcome forbids the deletion; with `force`, only a prepared one does. Also
        raises TransactionsOpen if a coordinator does not answer within ANSWER_TIMEOUT_S seconds. Changes nothing."""
        found = await self._answers(txns, self._coordinators.ask_transaction_state)
        self._refuse([each for each in found if each.state is TxnState.PREPARED or not force])

    async def abort(self, txns: Sequence[TxnId]) -> None:
        """Aborts the open transactions among `txns`, and waits until each of them has an outcome. Raises
        TransactionsOpen if one was prepared in the meantime, because a prepared transaction is not aborted, or if a
        coordinator does not answer within ANSWER_TIMEOUT_S seconds. Other transactions may have been aborted then."""
        self._refuse(await self._answers(txns, self._coordinators.abort_if_open))

    def _refuse(self, found: Sequence[ReportedTransaction]) -> None:
        if not found:
            return
        some = "; ".join(map(_described, found[:NAMED_TRANSACTIONS_MAX]))
        more = f"; and {len(found) - NAMED_TRANSACTIONS_MAX} more" if len(found) > NAMED_TRANSACTIONS_MAX else ""
        count = "a transaction that has" if len(found) == 1 else f"{len(found)} transactions that have"
        raise TransactionsOpen(
            f"topic {self._name} has entries or acknowledgements in {count} not ended: {some}{more}. {_advice(found)}",
            topic=self._name, txn=found[0].txn, state=found[0].state.name, count=len(found),
        )  # fmt: skip

    async def _answers(self, txns: Sequence[TxnId], ask: AskTransactionState) -> list[ReportedTransaction]:
        """Asks the coordinators about the transactions `txns`, and returns the answers about those that have no
        outcome. Raises TransactionsOpen if a coordinator does not answer."""
        until = self._clock.monotonic() + ANSWER_TIMEOUT_S
        found: list[ReportedTransaction | None] = []
        for first in range(0, len(txns), TRANSACTIONS_ASKED_AT_ONCE):
            some = txns[first : first + TRANSACTIONS_ASKED_AT_ONCE]
            answers = await asyncio.gather(*(self._answer(each, ask, until) for each in some), return_exceptions=True)
            for txn, each in zip(some, answers, strict=True):
                if isinstance(each, MagnetarError):
                    raise TransactionsOpen(
                        f"topic {self._name} is not deleted: it has something in transaction {txn}, and whether that "
                        f"is open its coordinator does not say: {each}. Delete the topic again when it does",
                        topic=self._name, txn=txn, state=UNKNOWN_STATE, count=len(txns),
                    ) from each  # fmt: skip
                if isinstance(each, BaseException):
                    raise each
                found.append(each)
        return [each for each in found if each is not None and each.state not in ENDED_STATES]

    async def _answer(self, txn: TxnId, ask: AskTransactionState, until: float) -> ReportedTransaction | None:
        """Returns the coordinator's answer about a transaction. Retries until the time `until`. Returns None if the
        transaction ended so long ago that the coordinator does not know it any more."""
        last: MagnetarError | None = None
        try:
            async with asyncio.timeout(until - self._clock.monotonic()):
                while True:
                    try:
                        return await ask(txn)
                    except TransactionForgotten:
                        return None
                    except MagnetarError as error:
                        if not error.retryable:
                            raise
                        last = error
                    await asyncio.sleep(ASK_RETRY_S)
        except TimeoutError as error:
            raise last or Unavailable(f"no answer within {ANSWER_TIMEOUT_S:g} s") from error


def _advice(found: Sequence[ReportedTransaction]) -> str:
    if any(each.state is TxnState.PREPARED for each in found):
        return (
            "Force does not abort what is prepared, because its program was told that it can commit: let it commit, or "
            "run 'magnetar transactions abort ID', then delete again"
        )
    return "End them first, or delete by force, which aborts them"


def _described(found: ReportedTransaction) -> str:
    whose = [
        f"of role {found.owner!r}" if found.owner else "", f"from {found.address}" if found.address else "",
        f"by the name {found.name!r}" if found.name else "", f"for sink {found.sink!r}" if found.sink else "",
    ]  # fmt: skip
    begun = f"{found.state.name.lower()}, begun {found.age_s:.0f} s ago"
    return f"{' '.join([str(found.txn), *filter(None, whose)])} ({begun})"
