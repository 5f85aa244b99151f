"""The transactions of a loaded topic: joins before the first entry, outcomes, and the questions to coordinators after a
load.

The decisions are in transactions_core.py; outcomes.py stores them; txn_joins.py has the joins and the questions to
coordinators. Rules
- **Seen.** Before a topic's first join its record says that it has seen transactions (`transactions` beside `dedup`):
  a later owner looks for their entries in the log. A topic whose record does not say it replays nothing for them.
- **Join first.** `join` asks the coordinator to make the topic a participant, and returns when it did; then
  `is_open` is true, and is checked again in the turn that appends. A join that is refused leaves no trace in the log.
- **A role writes only in transactions that it began.** The coordinator checks the role at its first join; the topic
  keeps the answer until the transaction ends. An entry or acknowledgement of another role is refused; the owner's
  entries in flight are not affected.
- **The end** of a transaction comes by `TopicTransactions.settle`. The outcome is applied at once to the entries and to
  the pending acknowledgements of each subscription. The coordinator gets its answer when all of that is durable and no
  entry of the transaction is in flight. A repeated settlement changes nothing. If the topic knows nothing of the
  transaction, it first checks in the metadata that no other broker has taken the topic over.
- **Asked again.** A task asks the coordinators, with back-off, about each transaction that a load finds open (by its
  entries in the log, or by pending acknowledgements). A coordinator that does not answer holds back only the messages
  after those entries. The task asks about all open transactions every `OPEN_STATE_ASK_INTERVAL_S`, because a
  coordinator that was taken over may have lost its list of participants; and at once about those of a coordinator that
  refuses a join as aborted. The answer ABORTED ends the transaction at once; so does a settlement, which names the last
  receipt. After COMMITTED without a settlement (an operator made the coordinator wait for this topic no more) the topic
  waits `SETTLEMENT_WAIT_S` for one, and then counts every entry.
- **Forgotten.** If the topic may have lost outcomes that it stored, and the coordinator has forgotten the outcome, the
  topic decides nothing: the messages stay hidden, and so do all later ones. An error is logged, and
  `decide_forgotten_transactions` does what an operator says.
Guarding tests: tests/broker/topic/test_transactions.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...ledger import LedgerClient
from ...metadata.records import TransactionOutcomesLocation
from ...proto.applied import AppliedPolicies
from ...proto.entry import EntryHeader
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import (
    MagnetarError,
    TimedOut,
)
from ...proto.names import Position
from ...proto.states import LedgerStays, TxnId
from ...proto.statistics import ForgottenTransaction
from ...runtime.network import World
from ..common.config import BrokerConfig, GetReplicationPolicy
from ..common.transactions import Settlement, TransactionCoordinatorsPort
from ..log.cache import StoredEntry
from ..log.log import Log
from ..log.log_queue_core import SequenceRange
from ..log.log_shape_core import TrimLimit
from ..subscription.subscription import Subscription
from .dedup_core import DedupVerdict
from .outcomes import TransactionOutcomesLedger
from .storage import TransactionsOfDeletedTopic
from .transactions_core import NO_END_EFFECT, OpenTxnStats, TopicTransactionsCore, TxnSnapshot
from .txn_joins import SharedTransactionTasks, TransactionJoins, TransactionOutcomeResolver, get_future_error

if TYPE_CHECKING:
    from .topic import Topic

_LOG = logging.getLogger("magnetar.broker.topic.transactions")

LOGGED_TRANSACTIONS_MAX = 100
"""Most transactions that one line of the log names."""
TRANSACTIONS_SETTLED_AT_ONCE = 100
"""Settlements that are applied in one step of the loop: a millisecond."""


class _Writes(NamedTuple):
    """The writes that must be durable before the end of a transaction is answered: the cursors of the subscriptions
    `acks`, the outcome (if `outcome` is True), and the entries of the transaction `landing` that are in flight."""

    acks: tuple[Subscription, ...]
    outcome: bool
    landing: TxnId | None


class TransactionEventToAwait(NamedTuple):
    """An event for which a producer must wait before it can publish an entry: the topic joins the transaction `txn`,
    or, if `end` is True, the transaction ends."""

    txn: TxnId
    end: bool = False
    owner: str | None = None  # the role that writes it; None: who may write in each


class TransactionStats(NamedTuple):
    """Statistics of the transactions of a topic. `last_stable`: all transactions with entries up to this position have
    ended; `stable_index`: the index of the first message after it; `open`: the number of open transactions; `oldest`:
    the one with the earliest entry, and `oldest_ms` its age at this topic; `aborted_…`: what aborted transactions have
    in the log."""

    last_stable: Position
    stable_index: int
    open: int
    oldest: TxnId | None
    oldest_ms: int
    aborted_entries: int
    aborted_bytes: int
    commits: int  # transactions that ended since the topic was loaded
    aborts: int


def transaction_id_of(metadata: MessageMetadata) -> TxnId | None:
    """Returns the id of the transaction to which an entry with this metadata belongs; None if the entry belongs to no
    transaction. Raises InvalidRequest if the id is not a valid transaction id."""
    if not metadata.HasField("txnid_most_bits") or not metadata.HasField("txnid_least_bits"):
        return None
    return TxnId.from_numbers(metadata.txnid_most_bits, metadata.txnid_least_bits)


class _TxnWork:
    """The work of a topic for its transactions that is in progress: joins, settlements, and questions to coordinators,
    with the callers that wait for them."""

    __slots__ = ("ends", "joins", "landing", "questions", "runs", "seeing", "settles")

    def __init__(self, of: TopicTransactions) -> None:
        self.runs = SharedTransactionTasks(of.topic.name, is_over=of.ended)
        self.questions = TransactionOutcomeResolver(of, self.runs)
        self.joins = TransactionJoins(of, self.runs, self.questions)
        self.settles: dict[TxnId, asyncio.Future[None]] = {}
        self.landing: dict[TxnId, asyncio.Future[None]] = {}  # until nothing of it is on its way
        self.ends: dict[TxnId, list[Callable[[MagnetarError | None], None]]] = {}
        self.seeing = asyncio.Lock()


class TopicTransactions:
    """The transactions of a loaded topic. Does what the core `TopicTransactionsCore` decides, and stores the core's
    state. A StatefulTopicPart. `core` is None until the topic has its first transaction."""

    __slots__ = (
        "_config", "_ledger", "_ledger_client", "_log", "_loop", "_replication", "_under_way", "coordinators", "core",
        "ended", "replayed", "topic", "world",
    )  # fmt: skip

    def __init__(
        self, world: World, ledgers: LedgerClient, config: BrokerConfig, topic: Topic, log: Log,
        replication: GetReplicationPolicy, coordinators: TransactionCoordinatorsPort,
    ) -> None:  # fmt: skip
        self.core: TopicTransactionsCore | None = None  # None: the topic has seen no transaction
        self.replayed = 0  # entries, when the topic was loaded
        self.world, self.topic, self._log, self.coordinators = world, topic, log, coordinators
        self._ledger_client, self._config, self._replication = ledgers, config, replication
        self._ledger: TransactionOutcomesLedger | None = None
        self._loop = asyncio.get_running_loop()
        self._under_way: _TxnWork | None = None
        self.ended = False  # it takes nothing any more

    @property
    def _here(self) -> _TxnWork:
        """Returns the work in progress. Creates the object with the first transaction, because most topics have
        none."""
        if self._under_way is None:
            self._under_way = _TxnWork(self)
        return self._under_way

    @property
    def joins(self) -> TransactionJoins:
        """Returns the object that makes the topic join transactions. Each publish and each acknowledgement in a
        transaction must pass through it first."""
        return self._here.joins

    @property
    def outcome_resolver(self) -> TransactionOutcomeResolver:
        """Returns the object that asks coordinators for the outcomes of the topic's open transactions."""
        return self._here.questions

    # ------------------------------------------------------------------ opening
    async def open(self, applied: AppliedPolicies) -> None:
        """Loads the stored state of the transactions, if the topic's record says that there is such a state. After this
        call `add_replayed_entry` must be called for each later entry of a transaction in the log. Raises the errors of
        `TransactionOutcomesLedger.recover`, such as Unavailable."""
        place = self._log.record.transactions
        if place is None:
            return
        ledger = self._make_ledger()
        self._load_core(ledger, await ledger.recover(place))

    def _make_ledger(self) -> TransactionOutcomesLedger:
        return TransactionOutcomesLedger(self.world, self._ledger_client, self._config, self._log, self._replication)

    def _load_core(self, ledger: TransactionOutcomesLedger, snapshot: TxnSnapshot) -> TopicTransactionsCore:
        core = ledger.core = TopicTransactionsCore(self._log.shape, snapshot)
        self._ledger, self.core = ledger, core
        return core

    @property
    def replay_start_position(self) -> Position | None:
        """Returns the position after which the log must be replayed for transactions; None if no entry needs to be
        replayed."""
        return self.core.position if self.core is not None else None

    def add_replayed_entry(self, txn: TxnId, header: EntryHeader, numbers: SequenceRange, entry: StoredEntry) -> bool:
        """Adds an entry of a transaction to the state, while the topic is being loaded. Must be called in log order.
        Returns True if the entry is aborted; False if it is not, or if its transaction has no outcome yet."""
        if self.core is None:
            return False
        if entry.position > self.core.position:
            self.core.add_replayed_entry(
                txn, header.producer_name, numbers, entry.position, entry.first_index, entry.count, entry.size
            )
            self.replayed += 1
        return self.core.add_replayed_sequence_ids(txn, header.producer_name, numbers, entry.position)

    def position_before_open_transactions(self) -> Position | None:
        """Returns the position before the first entry of an open transaction; None if there is none."""
        first = self.core.first_open_transaction_position if self.core is not None else None
        return self._log.shape.position_before(first) if first is not None else None

    def is_hidden(self, txn: TxnId, position: Position) -> bool:
        """Returns True if consumers that read only committed entries do not get this entry: its transaction is open
        (they may get the entry later) or aborted (they never get it)."""
        return self.core is not None and self.core.is_hidden(txn, position)

    def finish_replay(self) -> None:
        """Ends the replay of the log. All entries of transactions must have been added before."""
        if self.core is not None:
            self.core.finish_replay()

    def on_topic_loaded(self) -> None:
        """Called when the log was replayed and the subscriptions are open. From now on consumers read committed entries
        only, and the coordinators of open transactions are asked for the outcomes."""
        if self.core is None:
            return
        self.outcome_resolver.register_pending_acknowledgements(self.core)
        self.topic.hide_uncommitted_entries(self.core)
        now = self.world.clock.monotonic()
        self.joins.since = dict.fromkeys(self.core.open_transaction_ids, now)
        self.outcome_resolver.start_resolver_task()

    # ------------------------------------------------------------------ joining
    def is_open(self, txn: TxnId) -> bool:
        """Returns True if the transaction is open at this topic."""
        return self.core is not None and self.core.is_open(txn)

    def call_when_ended(self, txn: TxnId, then: Callable[[MagnetarError | None], None]) -> None:
        """Calls the function `then` once with None, in a later turn of the event loop, when the transaction has ended
        at this topic. If the topic ends at this broker before that, `then` is never called."""
        self._here.ends.setdefault(txn, []).append(then)

    def call_when_publishable(
        self, awaited: TransactionEventToAwait, then: Callable[[MagnetarError | None], None]
    ) -> None:
        """Calls the function `then` once, in a later turn of the event loop. Its argument is None when the event
        `awaited` has happened, so that the waiting entry can be published; else it is the error with which the entry is
        refused. If the event is the end of a transaction and the topic ends at this broker before, `then` is never
        called."""
        if awaited.end:
            self.call_when_ended(awaited.txn, then)
            return
        self.joins.start_join(awaited.txn, awaited.owner).add_done_callback(
            lambda done: then(get_future_error(done))
        )

    async def store_transactions_flag(self) -> TopicTransactionsCore:
        """Stores in the topic's record that the topic has transactions, unless the record says so already. Must be
        called before its first transaction. Returns the state of the topic's transactions. Raises the errors of
        `Log.commit_fields`."""
        async with self._here.seeing:
            core = self.core
            if core is None:
                position = self._log.shape.last_confirmed
                await self._log.commit_fields(
                    transactions=TransactionOutcomesLocation(mark_ledger=position[0], mark_entry=position[1])
                )
                ledger = self._make_ledger()
                ledger.position, ledger.stored_index = position, self._log.shape.end_index
                core = self._load_core(ledger, TxnSnapshot(position))
                self.topic.hide_uncommitted_entries(core)
        return core

    # ------------------------------------------------------------------ entries
    def judge_duplicate(self, txn: TxnId, name: str, numbers: SequenceRange) -> DedupVerdict:
        """Returns the verdict on an entry of the transaction: whether it is a duplicate (dedup_core.py). After NEW the
        entry counts as in flight: the caller must pass it to the log, or call `on_publish_failed`. The caller must have
        checked `is_open` in the same turn of the event loop."""
        assert self.core is not None, "it is open"
        return self.core.judge_duplicate(txn, name, numbers)

    def on_publish_confirmed(
        self, txn: TxnId, name: str, numbers: SequenceRange, position: Position, first_index: int, count: int,
        size: int,
    ) -> None:  # fmt: skip
        """Called when an entry with the verdict NEW is stored at `position`. `first_index`: the index of its first
        message; `count`: the number of its messages; `size`: its bytes. If the transaction has ended meanwhile, the
        entry is aborted."""
        assert self.core is not None, "it was open"
        late = self.core.version
        self.core.on_publish_confirmed(txn, name, numbers, position, first_index, count, size)
        if self.core.version != late:
            self._stored_soon()
            self.topic.on_transaction_outcomes_known()
        self._landed(txn)

    def on_publish_failed(self, txn: TxnId, name: str) -> None:
        """Called when an entry of the producer `name` with the verdict NEW failed. The caller must close the producer
        (`TopicTransactionsCore.on_publish_failed`)."""
        assert self.core is not None, "it was open"
        self.core.on_publish_failed(txn, name)
        self._landed(txn)

    def _landed(self, txn: TxnId) -> None:
        if (
            self._here.landing
            and txn in self._here.landing
            and self.core is not None
            and not self.core.count_entries_in_flight(txn)
        ):
            future = self._here.landing.pop(txn)
            if not future.done():
                future.set_result(None)

    def find_other_transaction_of_sequence(self, name: str, txn: TxnId | None, numbers: SequenceRange) -> TxnId | None:
        """Returns another open transaction in which the producer sent one of these sequence ids; None if there is
        none."""
        return self.core.find_other_transaction_of_sequence(
            name, txn, numbers
        ) if self.core is not None and self.core.known else None

    def last_sequence_id(self, name: str) -> int:
        """Returns the highest sequence id of the producer in an open transaction; -1 if there is none."""
        return self.core.last_sequence_id(name) if self.core is not None and self.core.known else -1

    async def wait_idle(self, name: str) -> None:
        """Waits until no entry of the producer is in flight in a transaction. Raises NotOwner if the topic ends at this
        broker before; returns at once if it has ended already."""
        core = self.core
        while core is not None and not self.ended and not core.is_idle(name):
            txn = next(txn for txn, each in core.known.items() if name in each.numbers and each.numbers[name].in_flight)
            await asyncio.shield(self._landing_of(txn))

    def _landing_of(self, txn: TxnId) -> asyncio.Future[None]:
        if txn not in self._here.landing:
            self._here.landing[txn] = self._loop.create_future()
        return self._here.landing[txn]

    # ------------------------------------------------------------------ the end
    async def settle(self, settlements: Sequence[Settlement], timeout_s: float) -> list[MagnetarError | None]:
        """Applies the outcomes of transactions at this topic, and waits until they are stored durably. Idempotent.
        Returns one value for each settlement: None if its outcome is stored; NotOwner if another broker owns the topic
        or may own it (the coordinator must look up the owner); TimedOut if the outcome was not stored within
        `timeout_s` seconds; else the error of a write that failed for good."""
        runs: list[asyncio.Future[None]] = []
        for first in range(0, len(settlements), TRANSACTIONS_SETTLED_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            runs += self.start_settling(settlements[first : first + TRANSACTIONS_SETTLED_AT_ONCE])
        if runs:
            await asyncio.wait(set(runs), timeout=timeout_s)
        late = TimedOut(f"topic {self.topic.name} has not stored it within {timeout_s:g} s")
        return [get_future_error(run) if run.done() else late for run in runs]

    def start_settling(self, settlements: Sequence[Settlement]) -> list[asyncio.Future[None]]:
        """Applies the settlements, except those that are being stored already. Returns a future for each settlement,
        which is done when the outcome is durable. Settlements that wait for the same writes share one task. If the
        topic has ended at this broker, applies nothing: all futures have failed with NotOwner."""
        if self.ended:
            return [self._here.runs.make_failed_not_owner_future()] * len(settlements)
        groups: dict[_Writes, list[TxnId]] = {}
        for txn, each in {each.txn: each for each in settlements if each.txn not in self._here.settles}.items():
            groups.setdefault(self._apply(each), []).append(txn)
        if any(writes.outcome for writes in groups):
            self.topic.on_transaction_outcomes_known()
        for writes, txns in groups.items():
            self._here.runs.start(self._here.settles, txns, partial(self._written, writes))
        return [self._here.settles[each.txn] for each in settlements]

    def _apply(self, settlement: Settlement) -> _Writes:
        """Applies a settlement to the transaction's entries, and to its pending acknowledgements in each subscription.
        Returns the writes that must be durable before the settlement is answered."""
        txn, core = settlement.txn, self.core
        touched = [each for each in self.topic.registry.durable_subscriptions() if each.has_pending_acks(txn)]
        end = core.settle(settlement) if core is not None else NO_END_EFFECT
        if end.missing:
            _LOG.error(
                "%s: transaction %s is committed with %d entries that are not in the log: acknowledged data is lost",
                self.topic.name, txn, end.missing,
            )  # fmt: skip
        if end.numbers or end.back:
            self.topic.apply_sequence_ids_to_dedup(end)
        for each in touched:
            each.settle(txn, settlement.committed)
        if end.shown:
            self._stored_soon()
        self._on_ended(txn)
        return _Writes(
            tuple(touched), end.shown, txn if core is not None and core.count_entries_in_flight(txn) else None
        )

    async def decide_forgotten_transactions(self, *, committed: bool | None) -> list[ForgottenTransaction]:
        """Asks the coordinators about the transactions whose outcomes the topic may have lost, and returns those whose
        outcomes are forgotten there, too. `committed`: ends these transactions at this topic, as committed or aborted,
        and returns when that is durable; None: ends nothing. Raises NotOwner if the topic has ended at this broker, and
        the error of a write that failed for good."""
        core = self.core
        if core is None or not core.perhaps_forgotten_transaction_ids:
            return []
        found = [
            ForgottenTransaction(txn, first=each.first, entries=each.entries, bytes=each.size)
            for txn in await self.outcome_resolver.ask_about_forgotten()
            if (each := core.find_open_transaction_stats(txn)) is not None and each.first is not None
        ]
        if committed is not None:
            _LOG.error(
                "%s: an operator says that %d transactions whose outcomes are lost are %s: %s", self.topic.name,
                len(found), "committed" if committed else "aborted",
                [str(each.txn) for each in found[:LOGGED_TRANSACTIONS_MAX]],
            )  # fmt: skip
            for run in self.start_settling([Settlement(each.txn, committed) for each in found]):
                await asyncio.shield(run)
        return found

    async def _written(self, writes: _Writes) -> None:
        """Waits until the writes `writes` are durable, and no entry of the transaction is in flight."""
        core = self.core
        if writes.landing is not None and core is not None and core.count_entries_in_flight(writes.landing):
            await asyncio.shield(self._landing_of(writes.landing))
        if self._ledger is not None and core is not None and self._ledger.version < core.version:
            await self._ledger.wait_durable()
        if len(writes.acks) == 1:
            await writes.acks[0].wait_durable()
        else:
            await asyncio.gather(*(each.wait_durable() for each in writes.acks))
        if not writes.outcome and not writes.acks and not await self._log.is_still_owned():
            raise self._here.runs.make_not_owner_error()

    def _on_ended(self, txn: TxnId) -> None:
        self.joins.discard(txn)
        self.outcome_resolver.discard(txn)
        for then in self._here.ends.pop(txn, ()):
            self._loop.call_soon(then, None)

    def _stored_soon(self) -> None:
        assert self._ledger is not None, "there is an outcome"
        self._ledger.schedule_write()

    # ------------------------------------------------------------------ as a part of the topic
    def run_due_work(self, applied: AppliedPolicies) -> None:
        """Starts a write of the outcomes if the log has grown much since the last write of outcomes."""
        if self._ledger is not None and not self.ended:
            self._ledger.write_outcomes_if_lagging()

    def trim_limit(self, applied: AppliedPolicies) -> TrimLimit | None:
        """Returns which part of the log transactions no longer need: the entries up to the position of the last stored
        outcomes, and before the first entry of any open transaction. Returns None if the topic never had a
        transaction."""
        if self.core is None or self._ledger is None:
            return None
        first, stored = self.core.first_open_transaction_position, self._ledger.position
        if first is not None and first <= stored:
            return TrimLimit(self._log.shape.position_before(first), why=LedgerStays.TRANSACTION_OPEN)
        return TrimLimit(stored, why=LedgerStays.NOT_IN_OUTCOMES)

    def on_ledger_trimmed(self, ledger_id: int, first_index: int, end_index: int) -> None:
        """Called when a ledger of the log was deleted, whose messages had the indexes from `first_index` up to, not
        including, `end_index`."""
        if self.core is not None:
            self.core.on_ledger_trimmed(ledger_id, first_index, end_index)

    @property
    def open_transactions(self) -> list[TxnId]:
        """Returns the transactions that have not ended at this topic, the transaction with the earliest entry first."""
        return self.core.open_transaction_ids if self.core is not None else []

    # ------------------------------------------------------------------ deletion (storage.py)
    async def block_transaction_joins(self, *, force: bool) -> None:
        """Prepares the deletion of the topic: the topic joins no transaction until `allow_transaction_joins` is called.
        Waits until no transaction of the topic can commit any more. `force`: aborts the open transactions. Raises
        TransactionsOpen if a transaction is left."""
        self.joins.is_leaving = True
        await self.check_deletable(force=force)
        if force and (opened := self.open_transactions):
            await self._deletion().abort(opened)

    async def check_deletable(self, *, force: bool) -> None:
        """Raises TransactionsOpen if `block_transaction_joins` would raise it now. Changes nothing."""
        if opened := self.open_transactions:
            await self._deletion().check(opened, force=force)

    def _deletion(self) -> TransactionsOfDeletedTopic:
        return TransactionsOfDeletedTopic(self.world.clock, self.topic.name, self.coordinators)

    def allow_transaction_joins(self) -> None:
        """Permits joins again after `block_transaction_joins`, because the topic is not deleted after all."""
        self.joins.is_leaving = False

    def statistics(self) -> TransactionStats | None:
        """Returns the statistics of the topic's transactions; None if the topic never had a transaction."""
        core = self.core
        if core is None:
            return None
        opened = core.open_transaction_ids
        oldest = opened[0] if opened else None
        now = self.world.clock.monotonic()
        age_s = now - self.joins.since.get(oldest, now) if oldest is not None else 0.0
        return TransactionStats(
            core.stable_position, core.stable_index, len(opened), oldest, int(age_s * 1000), core.aborted_entries,
            core.aborted_bytes, core.commits, core.aborts,
        )

    def find_open_transaction_stats(self, txn: TxnId) -> OpenTxnStats | None:
        """Returns the statistics of an open transaction; None if the transaction has ended at this topic, or is not
        known."""
        return self.core.find_open_transaction_stats(txn) if self.core is not None else None

    def stop(self) -> None:
        """Stops all tasks of the topic's transactions. Callers that wait for a join, a settlement or an entry in flight
        get NotOwner; functions passed to `call_when_ended` are dropped. Idempotent."""
        self.ended = True
        if (here := self._under_way) is not None:
            here.runs.is_over = True
            here.runs.tasks.cancel()
            waiting = [*here.joins.stop(), *here.settles.values(), *here.landing.values()]
            here.settles.clear()
            here.landing.clear()
            for future in waiting:
                if not future.done():
                    future.set_exception(here.runs.make_not_owner_error())
                    future.exception()
            here.ends.clear()
        if self._ledger is not None:
            self._ledger.stop()

    async def close(self) -> None:
        """Stops, waits until the tasks have ended, and closes the outcomes ledger (`TransactionOutcomesLedger.close`).
        Must be called after the log was closed."""
        self.stop()
        if self._under_way is not None:
            await self._under_way.runs.tasks.drain()
        if self._ledger is not None:
            await self._ledger.close()

    def list_own_ledgers(self) -> list[int]:
        """Returns the ids of the ledgers that store outcomes of the topic's transactions, which must be deleted with
        the topic."""
        place = self._log.record.transactions
        return [place.ledger_id] if place is not None and place.ledger_id >= 0 else []
