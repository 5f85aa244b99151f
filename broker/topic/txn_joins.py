"""The joins of a topic's transactions (`TransactionJoins`): before the first entry the topic asks the transaction's
coordinator to make it a participant (transactions.py, "Join first"). Before them in this file: tasks for which several
callers wait (`SharedTransactionTasks`), and the questions to coordinators about open transactions
(`TransactionOutcomeResolver`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...proto.errors import (
    BackPressure,
    InternalError,
    MagnetarError,
    NotAllowed,
    NotOwner,
    TransactionAborted,
    TransactionEnded,
    Unavailable,
)
from ...proto.names import TopicName
from ...proto.states import ForgottenOutcome, TxnId, TxnState
from ...runtime.tasks import Tasks
from ..common.transactions import JoinAnswer, Settlement, convert_join_answer_to_state
from .transactions_core import OPEN_TRANSACTIONS_MAX, TopicTransactionsCore, TxnPhaseAtTopic

if TYPE_CHECKING:
    from .transactions import TopicTransactions

# ------------------------------------------------------------------------------------------------------ txn_runs
# Runs that several callers wait for: the join of a transaction, or its end, and the first of them starts it.


_LOG = logging.getLogger("magnetar.broker.topic.transactions")

Key = TypeVar("Key")


class SharedTransactionTasks:
    """Starts tasks for the transactions of one topic, and lets several callers wait for the outcome of the same task (a
    run). After this broker has stopped serving the topic, no run is started: each caller gets NotOwner."""

    __slots__ = ("_loop", "_topic", "is_over", "tasks")

    def __init__(self, topic: TopicName, *, is_over: bool) -> None:
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        self.is_over = is_over
        self.tasks = Tasks()

    def start(
        self, runs: dict[Key, asyncio.Future[None]], txns: Sequence[Key],
        work: Callable[[], Coroutine[Any, Any, None]],
    ) -> asyncio.Future[None]:  # fmt: skip
        """Starts a run of the async function `work`, and returns a future for its outcome. Until the run has ended,
        `runs` maps each transaction in `txns` to this future. After this broker has stopped serving the topic, starts
        nothing: the future has failed with NotOwner."""
        if self.is_over:
            return self.make_failed_not_owner_future()
        future: asyncio.Future[None] = self._loop.create_future()
        runs.update(dict.fromkeys(txns, future))
        self.tasks.spawn(self._run(runs, txns, future, work), "transaction of a topic")
        return future

    async def _run(
        self, runs: dict[Key, asyncio.Future[None]], txns: Sequence[Key], future: asyncio.Future[None],
        work: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:  # fmt: skip
        error: MagnetarError | None = None
        try:
            await work()
        except MagnetarError as failure:
            error = failure
        except Exception as failure:  # a fault of ours must not leave a caller waiting
            _LOG.exception("%s: transactions %s", self._topic, txns)
            error = InternalError(f"transaction {txns[0]} of topic {self._topic}: {failure!r}")
        finally:
            for txn in txns:
                if runs.get(txn) is future:
                    del runs[txn]
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # who waits gets it

    def make_failed_not_owner_future(self) -> asyncio.Future[None]:
        """Returns a future that has failed with NotOwner, in place of the future of a run."""
        refused: asyncio.Future[None] = self._loop.create_future()
        refused.set_exception(self.make_not_owner_error())
        refused.exception()
        return refused

    def make_not_owner_error(self) -> MagnetarError:
        """Returns the NotOwner error for callers after this broker has stopped serving the topic."""
        return NotOwner(f"topic {self._topic} is not served here any more; look it up again")


def get_future_error(done: asyncio.Future[None]) -> MagnetarError | None:
    """Returns the error with which the future `done`, which must be done, has failed; None if it succeeded."""
    error = done.exception()
    assert error is None or isinstance(error, MagnetarError), "a run raises typed errors"
    return error


# ------------------------------------------------------------------------------------------------- txn_questions
# What a topic asks coordinators again: the outcome of each transaction that is open here (transactions.py, "Asked
# again").


JOIN_TIMEOUT_S = 5.0
"""Seconds that a send or an acknowledgement waits for a coordinator that does not answer."""
OUTCOME_ASK_PAUSE_S, OUTCOME_ASK_PAUSE_S_MAX = 0.2, 5.0
"""Seconds between two rounds of questions about transactions that a load has found: at first, and at most."""
OPEN_STATE_ASK_INTERVAL_S = 30.0
SETTLEMENT_WAIT_S = 10.0
TRANSACTIONS_ASKED_AT_ONCE = 1_000


class TransactionOutcomeResolver:
    """Asks coordinators for the outcomes of one topic's open transactions. While the topic has open transactions, a
    task asks again and again."""

    __slots__ = ("_asking", "_committed_at", "_has_alarmed", "_of", "_runs", "_suspects")

    def __init__(self, of: TopicTransactions, runs: SharedTransactionTasks) -> None:
        self._of = of
        self._runs = runs
        self._asking: asyncio.Task[None] | None = None
        self._has_alarmed = False  # that an outcome is lost
        self._committed_at: dict[TxnId, float] = {}  # the coordinator said so, and its settlement has not come
        self._suspects: dict[int, asyncio.Task[None]] = {}  # coordinators of which all that is open is asked for now

    def discard(self, txn: TxnId) -> None:
        """Removes the state of a transaction from this object, because the transaction has ended at this topic."""
        self._committed_at.pop(txn, None)

    async def resolve_outcome(self, txn: TxnId) -> TxnState | None:
        """Asks the coordinator for the outcome of a transaction. Returns COMMITTED or ABORTED if the transaction has
        ended, after its end was applied at this topic; None if it is open, or if its coordinator does not answer within
        JOIN_TIMEOUT_S seconds. Raises NotOwner if the topic has ended at this broker."""
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                return await self._until_over(txn)
        except (MagnetarError, TimeoutError) as error:
            if self._of.ended:
                raise self._runs.make_not_owner_error() from error
            _LOG.info("%s: transaction %s: %s", self._of.topic.name, txn, error)
            return None

    async def _until_over(self, txn: TxnId) -> TxnState | None:
        core = self._of.core
        if core is None or not core.is_known(txn):
            return None
        joined = await self._of.coordinators.join_transaction(txn, self._of.topic.name)
        state = convert_join_answer_to_state(joined)
        if state in (TxnState.OPEN, TxnState.PREPARED) or self._is_forgotten(txn, joined):
            return None
        if core.is_known(txn):
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def tell(_: MagnetarError | None) -> None:
                if not over.done():
                    over.set_result(None)

            self._of.call_when_ended(txn, tell)
            self.on_outcome_answered(txn, joined)
            await over
        return state

    def register_pending_acknowledgements(self, core: TopicTransactionsCore) -> None:
        """Registers the transactions of all pending acknowledgements in `core`, so that their coordinators are asked
        for their outcomes, too."""
        for each in self._of.topic.registry.durable_subscriptions():
            for txn in each.pending_transactions:
                core.register_unresolved_transaction(txn)

    def start_resolver_task(self) -> None:
        """Starts the task that asks coordinators, if the topic has open transactions and the task does not run yet. The
        task ends when the topic has no open transaction."""
        core = self._of.core
        if self._asking is None and not self._of.ended and core is not None and core.open_transaction_ids:
            self._asking = self._runs.tasks.spawn(self._keep_asking(), "open transactions of a topic")

    async def _keep_asking(self) -> None:
        core, clock = self._of.core, self._of.world.clock
        assert core is not None, "there is something to ask for"
        pause_s, swept = OUTCOME_ASK_PAUSE_S, clock.monotonic()
        try:
            while not self._of.ended:
                self.register_pending_acknowledgements(core)
                if not core.open_transaction_ids:
                    break
                every = clock.monotonic() - swept >= OPEN_STATE_ASK_INTERVAL_S
                if every:
                    swept = clock.monotonic()
                wanted = [
                    txn for txn in core.open_transaction_ids
                    if (every or core.known[txn].phase is TxnPhaseAtTopic.ASKED) and not self._of.joins.is_joining(txn)
                ]  # fmt: skip
                await self._ask_all(wanted)
                pause_s = min(2 * pause_s, OUTCOME_ASK_PAUSE_S_MAX) if wanted else OUTCOME_ASK_PAUSE_S
                await asyncio.sleep(pause_s if wanted else OUTCOME_ASK_PAUSE_S_MAX)
        finally:
            self._asking = None

    async def _ask_all(self, txns: Sequence[TxnId]) -> None:
        for first in range(0, len(txns), TRANSACTIONS_ASKED_AT_ONCE):
            await asyncio.gather(*map(self._ask_one, txns[first : first + TRANSACTIONS_ASKED_AT_ONCE]))

    def resolve_other_transactions_of_coordinator(self, number: int) -> None:
        """Starts a task that asks the coordinator `number` once about its other open transactions at this topic. Called
        when this coordinator refused a join because the transaction is aborted, which this topic did not know. The
        topic may have missed the outcomes of other transactions of this coordinator, too."""
        others = [
            txn
            for txn in self._of.open_transactions
            if txn.coordinator == number and not self._of.joins.is_joining(txn)
        ]
        if others and number not in self._suspects:
            asked = self._runs.tasks.spawn(self._ask_all(others), "lost transactions of a topic")
            self._suspects[number] = asked
            asked.add_done_callback(lambda _: self._suspects.pop(number, None))

    async def _ask_one(self, txn: TxnId) -> None:
        """Asks the coordinator once about an open transaction, and applies the answer."""
        assert self._of.core is not None, "something is open"
        try:
            joined = await self._of.coordinators.join_transaction(txn, self._of.topic.name)
        except MagnetarError as error:
            _LOG.info("%s: transaction %s: %s", self._of.topic.name, txn, error)
            return
        except Exception:  # a fault of ours must not keep the others from being asked for
            _LOG.exception("%s: transaction %s", self._of.topic.name, txn)
            return
        if txn not in self._of.core.known:
            return  # it was settled meanwhile
        if convert_join_answer_to_state(joined) in (TxnState.OPEN, TxnState.PREPARED):
            self._of.core.on_transaction_joined(txn)
        else:
            self.on_outcome_answered(txn, joined)

    def on_outcome_answered(self, txn: TxnId, joined: JoinAnswer) -> None:
        """Called when the coordinator has answered a question about a transaction that is not settled at this topic.
        `joined`: the answer. If the transaction has ended, starts to settle it at this topic; after COMMITTED without a
        settlement only when SETTLEMENT_WAIT_S seconds have passed since the first such answer. If the outcome is
        forgotten, and the topic may have lost it, raises an alarm and settles nothing."""
        if self._is_forgotten(txn, joined):
            return
        if isinstance(joined, Settlement):
            self._of.start_settling([joined])
        elif convert_join_answer_to_state(joined) is TxnState.ABORTED:
            self._of.start_settling([Settlement(txn, False)])
        elif joined is TxnState.COMMITTED:
            now = self._of.world.clock.monotonic()
            if now - self._committed_at.setdefault(txn, now) >= SETTLEMENT_WAIT_S:
                topic = self._of.topic.name
                _LOG.error("%s: no settlement of the committed %s has come: every entry counts", topic, txn)
                self._of.start_settling([Settlement(txn, True)])

    def _is_forgotten(self, txn: TxnId, joined: JoinAnswer) -> bool:
        """Returns True if nothing tells the outcome of the transaction any more: `joined` is the coordinator's answer
        that it is forgotten, and the topic may have known a commit. Logs an error for the first one of a load."""
        core = self._of.core
        if core is None or not isinstance(joined, ForgottenOutcome) or not core.on_outcome_forgotten(txn, joined):
            return False
        if not self._has_alarmed:
            self._has_alarmed = True
            _LOG.error(
                "%s: the outcome of transaction %s is lost, perhaps of more: it and all later messages are held back "
                "until 'magnetar topics skip-lost --forgotten' decides", self._of.topic.name, txn,
            )  # fmt: skip
        return True

    async def ask_about_forgotten(self) -> list[TxnId]:
        """Asks the coordinators about all open transactions with entries up to the position of lost outcomes, and
        those that are FORGOTTEN. Returns the transactions that are FORGOTTEN afterwards."""
        if (core := self._of.core) is None:
            return []
        await self._ask_all(core.perhaps_forgotten_transaction_ids)
        return core.forgotten_transaction_ids


# ----------------------------------------------------------------------------------------------------- txn_joins


JOIN_RETRY_S = 0.1
"""Seconds between two tries of a join."""


class TransactionJoins:
    """Joins one topic to transactions: asks the coordinator of each transaction to make the topic a participant. Called
    by the topic's producers and subscriptions before their first write in a transaction. `since`: when each open
    transaction was joined or found (monotonic seconds); `is_leaving`: True while the topic is about to be deleted, and
    joins nothing."""

    __slots__ = ("_asked", "_of", "_questions", "_runs", "_under_way", "_writers", "is_leaving", "since")

    def __init__(
        self, of: TopicTransactions, runs: SharedTransactionTasks, questions: TransactionOutcomeResolver
    ) -> None:
        self._of = of
        self._runs = runs
        self._questions = questions
        self._under_way: dict[tuple[TxnId, str | None], asyncio.Future[None]] = {}
        """The joins in progress, by transaction and by the role that wants to write in it."""
        self._asked: dict[TxnId, int] = {}  # how many of these joins ask its coordinator now
        self._writers: dict[TxnId, str] = {}
        """For each transaction the role that began it, as its coordinator said when this role first wrote here."""
        self.since: dict[TxnId, float] = {}  # when it was joined or found, on the monotonic clock
        self.is_leaving = False  # the topic is about to be deleted

    def is_joining(self, txn: TxnId) -> bool:
        """Returns True if a join of the transaction is in progress."""
        return txn in self._asked

    def discard(self, txn: TxnId) -> None:
        """Removes the state of a transaction from this object, because the transaction has ended at this topic."""
        self.since.pop(txn, None)
        self._writers.pop(txn, None)

    def stop(self) -> list[asyncio.Future[None]]:
        """Removes the joins that are in progress from this object, and returns their futures, which the caller must
        fail."""
        waiting = list(self._under_way.values())
        self._under_way.clear()
        return waiting

    def join_nowait(self, txn: TxnId, owner: str | None = None) -> bool:
        """Joins the transaction at once, if the coordinator is in this process. Returns True if the topic is a
        participant now, or was one before, and if the role `owner` may write in the transaction. After False the caller
        must await `join`, which raises the reason of a refusal. `owner` None: the caller may write in every
        transaction."""
        core = self._of.core
        if core is None or self._of.ended or (txn, owner) in self._under_way:
            return False
        if core.is_open(txn) and self._is_writer(txn, owner):
            return True
        if self.is_leaving or not core.may_join(txn):
            return False
        if not self._of.coordinators.join_transaction_nowait(txn, self._of.topic.name.full, owner):
            return False
        core.register_unresolved_transaction(txn)
        return self._is_in(core, txn, owner)

    def _is_writer(self, txn: TxnId, owner: str | None) -> bool:
        return owner is None or self._writers.get(txn) == owner

    async def join(self, txn: TxnId, owner: str | None = None) -> None:
        """Waits until the topic has joined the transaction. Raises InvalidRequest if another role began the
        transaction, or if it was never begun; TransactionEnded or TransactionAborted if it has ended; BackPressure if
        the topic has too many open transactions. Raises Unavailable if its coordinator does not answer within
        JOIN_TIMEOUT_S seconds, or the topic is about to be deleted; NotAllowed if the topic is non-persistent; NotOwner
        if the topic has ended at this broker. `owner`: the role that writes; None: one that may write in every
        transaction."""
        if not (self._of.is_open(txn) and self._is_writer(txn, owner)):
            await asyncio.shield(self.start_join(txn, owner))

    def start_join(self, txn: TxnId, owner: str | None) -> asyncio.Future[None]:
        """Returns the future of a join for the role `owner` (None: it may write in every transaction). Starts the join,
        unless a join for the same transaction and role is in progress. After the topic has ended at this broker, the
        future has failed with NotOwner."""
        key = txn, owner
        return self._under_way.get(key) or self._runs.start(self._under_way, [key], lambda: self._join(txn, owner))

    async def _join(self, txn: TxnId, owner: str | None) -> None:
        self._asked[txn] = self._asked.get(txn, 0) + 1
        try:
            await self._join_for(txn, owner)
        finally:
            self._asked[txn] -= 1
            if not self._asked[txn]:
                del self._asked[txn]

    async def _join_for(self, txn: TxnId, owner: str | None) -> None:
        if not self._of.topic.name.persistent:
            raise NotAllowed(f"topic {self._of.topic.name} keeps nothing, and takes part in no transaction")
        self._check_leaving()
        core = await self._of.store_transactions_flag()
        is_full = core.is_at_open_limit(txn)
        if is_full or core.register_unresolved_transaction(txn) is TxnPhaseAtTopic.ENDED:
            if not self._is_writer(txn, owner):
                await self._patiently(txn, owner)  # raises InvalidRequest for another role: it learns nothing
            if is_full:
                raise BackPressure(f"topic {self._of.topic.name} has {OPEN_TRANSACTIONS_MAX} open transactions")
            raise TransactionEnded(f"transaction {txn} has ended", txn=str(txn))
        try:
            joined = await self._patiently(txn, owner)
            self._check_leaving()  # the coordinator may have it as a participant, with nothing to settle
        except BaseException:
            self._join_refused(core, txn)
            raise
        state = convert_join_answer_to_state(joined)
        if state in (TxnState.OPEN, TxnState.PREPARED):
            if not self._is_in(core, txn, owner):
                raise TransactionEnded(f"transaction {txn} ended meanwhile", txn=str(txn))
            return
        self._join_refused(core, txn)
        if txn in core.known:  # a load found entries of it
            self._questions.on_outcome_answered(txn, joined)
        if state is TxnState.ABORTED:
            self._questions.resolve_other_transactions_of_coordinator(txn.coordinator)
        if state is TxnState.COMMITTED:
            raise TransactionEnded(f"transaction {txn} is committed", txn=str(txn))
        raise TransactionAborted(f"transaction {txn} is aborted", txn=str(txn))

    def _join_refused(self, core: TopicTransactionsCore, txn: TxnId) -> None:
        """Records that the join was refused, unless another join of the same transaction is in progress for another
        role."""
        if self._asked[txn] == 1:
            core.on_join_refused(txn)

    def _is_in(self, core: TopicTransactionsCore, txn: TxnId, owner: str | None) -> bool:
        """Records that the coordinator has made the topic a participant. Returns False if the transaction has ended
        meanwhile."""
        if not core.on_transaction_joined(txn):
            return False
        if owner is not None:
            self._writers[txn] = owner
        self.since.setdefault(txn, self._of.world.clock.monotonic())
        self._questions.start_resolver_task()
        return True

    def _check_leaving(self) -> None:
        """Raises Unavailable if the topic is about to be deleted."""
        if self.is_leaving:
            raise Unavailable(f"topic {self._of.topic.name} is about to be deleted: nothing joins a transaction there")

    async def _patiently(self, txn: TxnId, owner: str | None) -> JoinAnswer:
        """Asks the coordinator to join the transaction, and returns its answer. Retries for JOIN_TIMEOUT_S seconds;
        raises Unavailable after that. The entry for which the topic joins is certainly not in the log then."""
        end = self._of.world.clock.monotonic() + JOIN_TIMEOUT_S
        while True:
            try:
                return await self._of.coordinators.join_transaction(txn, self._of.topic.name, owner)
            except MagnetarError as error:
                if not error.retryable:
                    raise
                if self._of.world.clock.monotonic() + JOIN_RETRY_S >= end:
                    raise Unavailable(f"the coordinator of transaction {txn} does not answer: {error}") from error
            await asyncio.sleep(JOIN_RETRY_S)
