"""A transaction, for asyncio: the driver of the core in client/core/transaction.py, which makes the decisions.

    async with client.transaction(timeout=60) as txn:        commits; aborts when the body raises or is cancelled
        await producer.send(b"…", txn=txn)
        await consumer.acknowledge(message, txn=txn)

**The outcome of a commit is never guessed.** `commit` sends the open batches of the transaction's producers and waits
for the outcome of every operation. It then asks the coordinator to commit, again until there is an answer; without an
answer it asks for the status. It raises OutcomeUnknown if both get no answer in time. If the caller is cancelled
meanwhile, the cancellation takes effect when the outcome is known; `state` then tells the outcome. **An abort** is sent
for as long as an operation may take; if no coordinator answers, the transaction's time-out aborts it.
Guards: tests/client/transactions/test_transactions.py.

Also in this file, under the heading "transactions": the open transactions of one client (`Transactions`)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, suppress
from threading import Lock
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from ...proto import wire_pb2 as wire
from ...proto.errors import MagnetarError, TimedOut
from ...proto.names import Position
from ...proto.states import TxnId, TxnState
from ...runtime.tasks import Tasks
from ..common.checks import ParameterCheck, WrongValue, check_parameter
from ..common.errors import (
    InvalidTxnStatusError,
    OutcomeUnknown,
    PulsarException,
    Timeout,
    TransactionEnded,
    translate_error,
)
from ..common.loggers import ignore_error, run_logging_errors
from ..connect.connections import Connections
from ..core.transaction import (
    ENDING_STATES,
    AskToEndTransaction,
    PartitionClientPort,
    ReportOperationsDone,
    ReportTransactionEnd,
    SendAllowance,
    TopicReceipts,
    TransactionCore,
    TransactionEffect,
    TransactionEndKind,
    TransactionPort,
    TransactionState,
)
from .coordinators import CoordinatorClient

_LOG = logging.getLogger("magnetar.client")
END_VERBS = {
    TransactionEndKind.COMMIT: wire.EndItem.COMMIT, TransactionEndKind.ABORT: wire.EndItem.ABORT,
    TransactionEndKind.PREPARE: wire.EndItem.PREPARE}
WAIT_CHECK = ParameterCheck("durable or visible", (str,), lambda wait: wait in ("durable", "visible"))
PREPARED_S_MAX = 10 * 365 * 86400.0
UNTIL_CHECK = ParameterCheck("a number of seconds, 0 or more", (int, float), lambda until: 0 <= until <= PREPARED_S_MAX)
ABORT_WAIT_S = 5.0
"""Longest time in seconds for which the end of a cancelled `async with` block waits for the abort of its transaction.
The abort continues after that."""
Wait = Literal["durable", "visible"]


class Transaction(TransactionPort):
    """A transaction: the messages and acknowledgements in it count together or not at all. `Client.transaction` makes
    it.

        async with client.transaction() as txn:
            await producer.send(b"…", txn=txn)
            await consumer.acknowledge(message, txn=txn)

    `async with`, or `await`, begins the transaction; `commit` and `abort` end it. It can be used only with producers
    and consumers of its client. Its methods raise InvalidTxnStatusError before it has begun. Sends and
    acknowledgements in it raise TransactionEnded after its end. `commit` raises TransactionAborted if nothing in it
    counts (run it again), TransactionFenced if a later program took its name over, and OutcomeUnknown if its end got no
    answer."""

    def __init__(self, home: Transactions, timeout_s: float, name: str | None, begun: TxnId | None = None) -> None:
        """Makes a transaction. `home`: the transactions of its client. `timeout_s`: seconds after which the coordinator
        aborts it. `name`: its transaction name; None: none. `begun`: its id, if it has begun already."""
        self.timeout_s = timeout_s
        self.name = name
        self._home = home
        self._core: TransactionCore | None = None
        self._lock = Lock()
        self._begun: asyncio.Future[None] | None = None
        self.deliveries = {}
        self._parts: dict[PartitionClientPort, SendAllowance | None] = {}
        self._again: dict[Callable[[], None], None] = {}
        self._idle: asyncio.Future[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._deadline = 0.0
        self._inside = False
        self._unseen: Timeout | None = None  # it is committed, and was not visible in time
        if begun is not None:
            self._start(begun)

    # ------------------------------------------------------------------------------ the beginning
    def __await__(self) -> Generator[Any, None, Transaction]:
        return self._begin().__await__()

    async def _begin(self) -> Transaction:
        if self._core is not None or self._begun is not None:
            raise TransactionEnded("a transaction begins once: make another one")
        self._begun = asyncio.get_running_loop().create_future()
        try:
            found = await self._home.begin(self)
        except BaseException:
            self._begun = None
            raise
        self._start(found)
        return self

    def begin_now(self) -> bool:
        """Begins the transaction with a transaction id that was leased in advance, and returns True. Returns False if
        no leased id is left, or the transaction has a name: the caller must `await` it. May be called from any
        thread."""
        found = self._home.begin_with_leased_id(self)
        if found is not None:
            self._start(found)
        return found is not None

    def _start(self, found: TxnId) -> None:
        self._core = TransactionCore(found, self._lock, named=self.name is not None)
        self._deadline = self._home.now() + self.timeout_s

    async def __aenter__(self) -> Transaction:
        if self._inside:
            raise TransactionEnded("transactions are not nested: it is entered already")
        self._inside = True
        self._home.enter_with_block(self)
        try:
            return self if self._core is not None else await self._begin()
        except BaseException:
            self._home.leave_with_block(self)
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        self._home.leave_with_block(self)
        core = self._known
        if core.state is not TransactionState.OPEN:
            if kind is None and self._ending is not None:
                await self._outlive(self._ending)
                self._raise_error()
            return
        if kind is None:
            await self.commit()
            return
        ending = self._start_ending(self._abort(visible=False))
        with suppress(TimeoutError, asyncio.CancelledError, PulsarException):
            async with asyncio.timeout(ABORT_WAIT_S):
                await asyncio.shield(ending)

    # ------------------------------------------------------------------------------ facts
    @property
    def _known(self) -> TransactionCore:
        if self._core is None:
            raise InvalidTxnStatusError("the transaction is not begun: `await` it, or use `async with`")
        return self._core

    @property
    def id(self) -> TxnId:
        """Returns the id of the transaction; its text is `(most,least)`, as Pulsar prints it. Raises
        InvalidTxnStatusError before the transaction has begun."""
        return self._known.txn

    @property
    def state(self) -> TransactionState:
        """Returns the state of the transaction: OPEN, PREPARING, PREPARED, COMMITTING, ABORTING, COMMITTED, ABORTED; or
        ERROR if the request to end it got no answer, and `commit` must be called again. Raises InvalidTxnStatusError
        before the transaction has begun."""
        return self._known.state

    def __repr__(self) -> str:
        core = self._core
        return "<Transaction, not begun>" if core is None else f"<Transaction {core.txn}, {core.state.name}>"

    # ------------------------------------------------------------------------------ operations
    @property
    def is_unfinished(self) -> bool:
        core = self._core
        return core is not None and core.state in (TransactionState.OPEN, *ENDING_STATES)

    def begin_operation(self, where: PartitionClientPort, connections: object) -> None:
        core = self._core
        if where in self._parts and core is not None and core.try_begin_operation(message=where.is_producer):
            return
        self._check_home(connections)
        self._known.begin_operation(where.topic.full, message=where.is_producer)
        self._parts.setdefault(where)

    def allow_sends(
        self, where: PartitionClientPort, connections: object, lock: AbstractContextManager[Any]
    ) -> SendAllowance:
        self._check_home(connections)
        share = self._parts.get(where) or SendAllowance(self, lock)
        self._known.allow_sends(where.topic.full, share)
        self._parts[where] = share
        return share

    def _check_home(self, connections: object) -> None:
        if connections is not self._home.connections:
            raise WrongValue("the transaction is another client's: nothing was sent")

    def cancel_operation(self, *, message: bool) -> None:
        self._home.run_in_event_loop(lambda: self._do(self._known.cancel_operation(message=message)))

    def register_cumulative_ack(self, again: Callable[[], None]) -> None:
        self._again[again] = None

    def on_stored(self, where: PartitionClientPort, messages: int, position: Position) -> None:
        self._do(self._known.on_stored(where.topic.full, messages, position))

    def on_refused(self, messages: int, error: MagnetarError) -> None:
        first = self._known.failure is None
        self._do(self._known.on_refused(messages, error))
        if first:
            self._forget_lost()

    def on_acknowledged(self, error: MagnetarError | None) -> None:
        first = self._known.failure is None
        self._do(self._known.on_acknowledged(error))
        if first and error is not None:
            self._forget_lost()

    def _forget_lost(self) -> None:
        """Drops what is known of the coordinator if it lost the transaction, also if the program never ends the
        transaction."""
        if self._known.was_aborted_remotely:
            self._home.coordinators.discard(self.id.most)

    def _do(self, effects: list[TransactionEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ReportOperationsDone):
                if self._idle is not None and not self._idle.done():
                    self._idle.set_result(None)
            elif isinstance(effect, ReportTransactionEnd):
                self._parts.clear()
                self.deliveries.clear()
                self._home.on_transaction_ended(self)
                self._forget_lost()

    # ------------------------------------------------------------------------------ the end
    async def commit(self, wait: Wait = "durable") -> None:
        """Commits the transaction. Returns when the commit is durable, or with `wait` "visible" when all consumers may
        see its messages. May be called again. If the caller is cancelled, the commit goes on.

        Raises TransactionAborted if nothing in the transaction counts, for example because an operation in it failed;
        TransactionFenced if a later program took its name over; TransactionEnded after `abort`. Raises Timeout if the
        commit is durable and not visible in time. Raises OutcomeUnknown if the coordinator did not answer, or the
        client was closed during the commit: call `commit` again, or ask
        `transaction_status`. Raises InvalidTxnStatusError before the transaction has begun, InvalidConfiguration for
        another `wait`."""
        check_parameter("wait", WAIT_CHECK, wait)
        core = self._known
        if core.state is TransactionState.PREPARING and self._ending is not None:
            await self._outlive(self._ending)
        if core.state in (TransactionState.OPEN, TransactionState.PREPARED, TransactionState.ERROR):
            self._start_ending(self._commit(visible=wait == "visible"))
        elif core.state is TransactionState.ABORTED and core.error is None:
            raise TransactionEnded(f"transaction {core.txn} was aborted by this program")
        if self._ending is not None:
            await self._outlive(self._ending)
        self._raise_error()

    async def prepare(self, until: float = 0) -> None:
        """Prepares the transaction: everything in it is durable when `prepare` returns, and nothing can be added any
        more. The transaction then waits for its end for `until` seconds (0: as long as the cluster allows), even if
        this client or the coordinator crashes. `commit` or `abort` ends it, also from another program by its id:
        `Client.commit_transaction`, `abort_transaction`, or asyncio's `commit_batch`. Until then readers wait for it.
        May be called again before the end. Raises the errors of `commit`; TransactionEnded after the end;
        InvalidConfiguration if `until` is not a number of seconds from 0 to ten years."""
        check_parameter("until", UNTIL_CHECK, until)
        core = self._known
        if core.state is TransactionState.OPEN:
            self._start_ending(self._prepare(until))
        elif core.state not in (TransactionState.PREPARING, TransactionState.PREPARED):
            self._raise_error()
            raise TransactionEnded(f"transaction {core.txn} is {core.state.name.lower()}: it cannot be prepared")
        if self._ending is not None:
            await self._outlive(self._ending)
        self._raise_error()

    async def abort(self, wait: Wait = "durable") -> None:
        """Aborts the transaction: nothing in it counts, and messages that it acknowledged are delivered again. Returns
        when the abort is durable, with `wait` "visible" when it has taken effect at all topics, or when no coordinator
        answers: then the time-out aborts it. May be called again. Raises TransactionEnded if the transaction is
        committed, or may be; OutcomeUnknown if it was prepared, and its coordinator does not answer;
        InvalidTxnStatusError before the transaction has begun; InvalidConfiguration for another `wait`."""
        check_parameter("wait", WAIT_CHECK, wait)
        core = self._known
        if core.state is TransactionState.PREPARING and self._ending is not None:
            await self._outlive(self._ending)
        if core.state in (TransactionState.COMMITTING, TransactionState.COMMITTED, TransactionState.ERROR):
            raise TransactionEnded(f"transaction {core.txn}: its commit was asked for ({core.state.name})")
        if core.state in (TransactionState.OPEN, TransactionState.PREPARED):
            self._start_ending(self._abort(visible=wait == "visible"))
        if self._ending is not None:
            await self._outlive(self._ending)
        if core.state is not TransactionState.ABORTED:
            self._raise_error()

    async def wait_redeliverable(self) -> None:
        """Waits until the brokers may deliver the messages again that this transaction acknowledged. Must be called
        after the abort. Returns at once if the transaction had no operations; also returns when no coordinator answers
        within the operation time-out."""
        core = self._known
        assert core.state is TransactionState.ABORTED, "it is aborted"
        if core.pending_operations or core.has_operations:
            item = wire.EndItem(verb=wire.EndItem.ABORT, visible=True)
            item.txn.most, item.txn.least = core.txn
            with suppress(MagnetarError):
                await self._home.coordinators.end_transaction(item)

    def _start_ending(self, work: Any) -> asyncio.Task[None]:
        self._ending = self._home.spawn(work, f"end of transaction {self._known.txn}")
        return self._ending

    async def _outlive(self, ending: asyncio.Task[None]) -> None:
        """Waits until the task `ending` has ended; if the caller is cancelled in the meantime, the cancellation takes
        effect after that."""
        interrupted: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted
        if ending.cancelled():
            raise OutcomeUnknown(f"transaction {self.id}: its client was closed while it was ending", txn=self.id)
        if (broken := ending.exception()) is not None:
            raise broken

    def _raise_error(self) -> None:
        error = self._known.error
        if error is not None:
            told = type(error)(error.message, **error.fields)
            told.definite, told.retryable = error.definite, error.retryable  # type: ignore[misc]
            raise told from error
        if self._unseen is not None:
            raise self._unseen

    async def _commit(self, *, visible: bool) -> None:
        await self._ask(await self._settled(self._known.commit), visible=visible)

    async def _prepare(self, until_s: float) -> None:
        await self._ask(await self._settled(self._known.prepare), visible=False, prepared_ms=round(until_s * 1000))

    async def _settled(self, ending: Callable[[], list[TransactionEffect]]) -> list[TransactionEffect]:
        """Begins the end with `ending()` and waits until all operations have outcomes. Returns the effects to
        do then."""
        core = self._known
        self._idle = asyncio.get_running_loop().create_future()
        self._do(ending())
        try:
            for each in list(self._parts):
                each.send_waiting_now()
            if not self._idle.done():
                await self._home.coordinators.deadlines.wait(self._idle, self._deadline)
        except TimeoutError:
            return core.expire_operations(
                TimedOut(f"its operations have no outcome within its time, {self.timeout_s:g} s")
            )
        return core.decide_transaction_end()

    async def _abort(self, *, visible: bool) -> None:
        await self._ask(self._known.abort(), visible=visible)

    async def _ask(self, effects: list[TransactionEffect], *, visible: bool, prepared_ms: int = 0) -> None:
        await self._ask_coordinator(effects, visible=visible, prepared_ms=prepared_ms)
        if self._again and self.state is TransactionState.ABORTED:
            await self.wait_redeliverable()
            again, self._again = self._again, {}
            for each in again:
                each()

    async def _ask_coordinator(self, effects: list[TransactionEffect], *, visible: bool, prepared_ms: int) -> None:
        """Asks the coordinator to end the transaction, until the outcome is known or the time is over."""
        self._do(effects)
        core = self._known
        end = next((each for each in effects if isinstance(each, AskToEndTransaction)), None)
        if end is None:
            return
        item = wire.EndItem(verb=END_VERBS[end.verb], visible=visible, prepared_ms=prepared_ms)
        item.txn.most, item.txn.least = core.txn
        item.participants.extend(map(encode_participant, end.participants))
        try:
            answer = await self._home.coordinators.end_transaction(item)
            state, error = answer
        except MagnetarError as lost:
            if end.verb is TransactionEndKind.ABORT:
                self._do(core.on_unanswered())
                if core.state is TransactionState.ABORTED:
                    _LOG.info("transaction %s is aborted by its time-out: %s", core.txn, lost)
                return
            state, error = await self._resolve_outcome(item)
            if visible and state is TxnState.COMMITTED and error is None:
                self._unseen = Timeout(f"transaction {core.txn} is committed, and not visible everywhere in time")
        self._do(core.on_answered(state, error))

    async def _resolve_outcome(self, item: wire.EndItem) -> tuple[TxnState, MagnetarError | None]:
        """Asks the coordinator for the outcome of an end that got no answer in time. If the transaction is still open
        there, asks for the end again. Pauses between two tries, for at most the operation time-out."""
        deadline = self._home.now() + self._home.connections.settings.operation_timeout_s
        backoff = self._home.connections.backoff()
        while True:
            try:
                state, error = await self._home.coordinators.get_status(self._known.txn)
                if error is not None or state in (TxnState.COMMITTED, TxnState.ABORTED):
                    return state, error
                if state is TxnState.PREPARED and item.verb == wire.EndItem.PREPARE:
                    return state, error
                state, error = await self._home.coordinators.end_transaction(item)
                return state, error
            except MagnetarError as error:
                pause_s = backoff.next_delay_s()
                if self._home.now() + pause_s >= deadline or self._home.coordinators.is_closed:
                    return TxnState.OPEN, error if error.definite and not error.retryable else None
            await asyncio.sleep(pause_s)


def encode_participant(receipts: TopicReceipts) -> wire.Participant:
    """Converts the receipts of one topic in a transaction to the Protobuf message for its coordinator."""
    found = wire.Participant(topic=receipts.topic, entries=receipts.entries)
    if receipts.entries > 0:
        found.last.ledger_id, found.last.entry_id = receipts.last
    return found


# -------------------------------------------------------------------------------------------------- transactions
# The transactions of one client: those that are open, the tasks that end them, and the coordinators that they ask.
#
# A client that is closed aborts what is open, and waits for what is being ended. Nesting is refused: a task in the body
# of an `async with` does not enter another one; transactions that are open at the same time belong to tasks of their
# own, or are ended by hand. Guards: tests/client/transactions/test_transactions.py.


T = TypeVar("T")


class Transactions:
    """The open transactions of one client. `len()` returns their number. Must be made and used in the client's event
    loop, except for the methods that say otherwise."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.coordinators = CoordinatorClient(connections)
        self.now = connections.world.clock.monotonic
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._open: dict[Transaction, None] = {}
        self._bodies: WeakKeyDictionary[asyncio.Task[Any], Transaction] = WeakKeyDictionary()
        self._tasks = Tasks()

    @classmethod
    def for_client(cls, connections: Connections) -> Transactions:
        """Returns the Transactions of the client that has these connections; makes it at the first use."""
        found = connections.transactions
        if found is None:
            found = connections.transactions = cls(connections)
        assert isinstance(found, cls), "a client has its transactions"
        return found

    def __len__(self) -> int:
        """Returns the number of open transactions."""
        return len(self._open)

    def begin_with_leased_id(self, transaction: Transaction) -> TxnId | None:
        """Begins the transaction `transaction` with an id that was leased in advance, and returns this id; None if no
        leased id is left, or the transaction has a name. May be called from any thread."""
        if transaction.name is not None:
            return None
        found = self.coordinators.begin_with_leased_id(_timeout_ms(transaction), self.run_in_event_loop)
        if found is not None:
            self._open[transaction] = None
        return found

    async def begin(self, transaction: Transaction) -> TxnId:
        """Asks a coordinator to begin the transaction, unless a leased id is left, and returns its id. Raises the SDK's
        exceptions: TransactionFenced if another program has taken its name over, Timeout or ConnectError if no
        coordinator answers."""
        timeout_ms = _timeout_ms(transaction)
        try:
            if transaction.name is None:
                found = await self.coordinators.begin_transaction(timeout_ms)
            else:
                found = await self.coordinators.begin_named_transaction(transaction.name, timeout_ms)
        except MagnetarError as error:
            raise translate_error(error) from error
        self._open[transaction] = None
        return found

    def make_open_transaction(self, found: TxnId, timeout_s: float) -> Transaction:
        """Makes and returns a Transaction object for the transaction with the id `found`, which is open already.
        `timeout_s`: its time-out in seconds."""
        transaction = Transaction(self, timeout_s, None, found)
        self._open[transaction] = None
        return transaction

    def on_transaction_ended(self, transaction: Transaction) -> None:
        """Fact: the transaction has ended: `close` need not abort it."""
        self._open.pop(transaction, None)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts a task that goes on when its caller is cancelled; `close` waits for it. Raises RuntimeError after
        `close`."""
        return self._tasks.spawn(work, name)

    def run_in_event_loop(self, work: Callable[[], None]) -> None:
        """Runs the function `work`: at once if called in the event loop, else in the loop soon after. Raises
        RuntimeError, in another thread, if the loop is closed."""
        if threading.get_ident() == self._thread:
            work()
        else:
            self._loop.call_soon_threadsafe(run_logging_errors, work, ignore_error)

    # ------------------------------------------------------------------------------ bodies
    def enter_with_block(self, transaction: Transaction) -> None:
        """Records that the current task enters the `async with` block of the transaction. Raises TransactionEnded if
        the task is in the block of another transaction."""
        task = asyncio.current_task()
        if task is not None:
            if task in self._bodies:
                raise TransactionEnded("transactions are not nested: this task is in the body of another one")
            self._bodies[task] = transaction

    def leave_with_block(self, transaction: Transaction) -> None:
        """Records that the `async with` block of the transaction has ended."""
        for task, each in list(self._bodies.items()):
            if each is transaction:
                del self._bodies[task]

    # ------------------------------------------------------------------------------ the end
    async def close(self) -> None:
        """Aborts the open transactions, waits for those that are being ended, and closes the CoordinatorClient. An
        abort that fails with an error of the SDK is ignored: the time-out aborts that transaction."""

        async def abort(transaction: Transaction) -> None:
            if transaction.state is TransactionState.OPEN:
                await transaction.abort()

        try:
            outcomes = await asyncio.gather(*map(abort, list(self._open)), return_exceptions=True)
            await self._tasks.drain()
            for each in outcomes:
                if isinstance(each, BaseException) and not isinstance(each, PulsarException):
                    raise each
        finally:
            await self._tasks.close()
            await self.coordinators.close()

    def shutdown(self) -> None:
        """Stops all tasks at once. The coordinators abort open transactions when their time-outs have passed."""
        self._open.clear()
        self._tasks.cancel()
        self.coordinators.deadlines.stop()


def _timeout_ms(transaction: Transaction) -> int:
    return max(1, round(transaction.timeout_s * 1000))
