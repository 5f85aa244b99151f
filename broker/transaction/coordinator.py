"""A transaction coordinator that runs at this broker: the driver of one core, in one epoch.

    running = await RunningCoordinator.load(…)      takes over, serves, and sends the outcomes that were decided before
    state = await running.end_transaction(…)        one of the requests; each has a deadline of ANSWER_TIMEOUT_S
    await running.close()                           ends in order: writes all decisions, hands over open transactions
    await running.abandon_epoch(error)              ends at once; the next epoch reads the ledger

Requests go to the core in the turn of the event loop in which they are made. One append is in flight at a time. The
next append has all records that were decided meanwhile; their requests are answered when it is durable. An append whose
outcome is unknown ends this epoch: waiting requests get OutcomeUnknown, never an outcome. Guards:
tests/broker/grpc/test_transactions.py.

`HalfMessageDriver` is the driver of half messages: connected members answer checks, and tasks publish committed half
messages.

    work = HalfMessageDriver(publish, published, not_published)
    with work.connect_member() as member: …           `await member.wait_next_check()` returns its next check
    work.send_half_message_check(effect)              does the effect AskAboutHalfMessage
    work.start_publishing_half_message(effect)        does the effect PublishHalfMessage
    await work.close()                                disconnects the members, and cancels publishes in progress

Each half message is published by its own task, HALVES_PUBLISHED_AT_ONCE at a time, within PUBLISH_TIMEOUT_S, which is
the timeout of its transaction. If the end of the epoch cancels a publish, the next epoch aborts its transaction.
Guards: tests/client/transactions/test_halves.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, assert_never

from ...proto.errors import ConnectionLost, InternalError, InvalidRequest, MagnetarError, NotOwner, TimedOut
from ...proto.names import Position
from ...proto.states import ForgottenOutcome, TxnId, TxnState
from ...runtime.network import World
from ...runtime.tasks import Supervisor, Tasks, run_all_steps
from ..common.transactions import JoinAnswer, Settlement
from .coordinator_core import TransactionCoordinatorCore
from .halves_core import PUBLISH_TIMEOUT_S
from .intents_core import (
    AbandonEpoch,
    AbortByAdmin,
    AbortIfOpen,
    AbortReason,
    AnswerRequest,
    AppendRecords,
    AskAboutHalfMessage,
    BeginAnswer,
    BeginTransactions,
    ChangeHalf,
    CommitSinkBatch,
    CoordinatorEffect,
    CoordinatorIntent,
    CoordinatorLimits,
    EndHalf,
    EndTransaction,
    GetTransactionStatus,
    HalfMessageChangeVerb,
    HalfMessageEndVerb,
    HalfMessageRow,
    IntentResult,
    JoinTransaction,
    PrepareHalf,
    PublishHalfMessage,
    RemoveParticipant,
    SendOutcomeToParticipant,
    TransactionEndVerb,
    TransactionRow,
    WarnOfParkedHalfMessage,
    WatchHalves,
)
from .log import CoordinatorLog
from .peers import CoordinatorRequest, SettlementSender, SettlementTransport
from .records_core import HalfMessage, Participant, SinkBatchTag

HALVES_PUBLISHED_AT_ONCE = 64
"""Half messages that one coordinator publishes at a time."""


class HalfMessagePublisher(Protocol):
    """Publishes half messages to their topics in a transaction. CommittedHalfPublisher
    (broker/node/internal_producer.py) implements it; HalfMessageDriver calls it."""

    def __call__(self, txn: int, messages: Sequence[HalfMessage]) -> Awaitable[list[Participant]]:
        """Publishes the messages to their topics in the transaction `txn`. Returns the topics, each with the number and
        the last position of its entries. If this call raises an error, some messages may be stored, and the transaction
        must not commit."""
        ...


class HalfMessageGroupMember:
    """A connected process that is a member of a group: it answers the checks of the group's half messages (whether to
    commit)."""

    def __init__(self) -> None:
        self._asked: deque[AskAboutHalfMessage] = deque()
        self._changed = asyncio.Event()
        self._over: MagnetarError | None = None

    def queue_half_message_check(self, asked: AskAboutHalfMessage) -> None:
        """Queues a check of a half message for this member."""
        self._asked.append(asked)
        self._changed.set()

    def close(self, error: MagnetarError) -> None:
        """Ends the membership: when its queued checks are taken, `wait_next_check` raises `error`."""
        self._over = error
        self._changed.set()

    async def wait_next_check(self) -> AskAboutHalfMessage:
        """Waits for the next check of a half message and returns it. Raises the error of `close`, which is NotOwner if
        the coordinator moves to another broker."""
        while not self._asked:
            if self._over is not None:
                raise self._over
            self._changed.clear()
            await self._changed.wait()
        return self._asked.popleft()


class HalfMessageDriver:
    """Does the effects of a coordinator's half messages: sends checks to the connected members of groups, and runs the
    tasks that publish half messages. Each publish ends with one call of `published` or `not_published`, unless `close`
    cancels it."""

    def __init__(
        self, publish: HalfMessagePublisher, published: Callable[[PublishHalfMessage, list[Participant]], None],
        not_published: Callable[[PublishHalfMessage, MagnetarError], None],
    ) -> None:  # fmt: skip
        self._publish = publish
        self._published = published
        self._not_published = not_published
        self._members: dict[HalfMessageGroupMember, None] = {}  # in the order in which they came
        self._room = asyncio.Semaphore(HALVES_PUBLISHED_AT_ONCE)
        self._tasks = Tasks()

    # ------------------------------------------------------------------ members
    @contextmanager
    def connect_member(self) -> Iterator[HalfMessageGroupMember]:
        """Returns a context manager. On entry it adds a member for a connected process, and yields the member. On exit
        it removes the member from this object; the caller must also call `HalfMessageCore.remove_member`."""
        member = HalfMessageGroupMember()
        self._members[member] = None
        try:
            yield member
        finally:
            self._members.pop(member, None)

    def send_half_message_check(self, effect: AskAboutHalfMessage) -> None:
        """Sends a check of a half message to the member that the effect names."""
        assert isinstance(effect.member, HalfMessageGroupMember), "members are of this object"
        effect.member.queue_half_message_check(effect)

    # ------------------------------------------------------------------ publishing
    def start_publishing_half_message(self, effect: PublishHalfMessage) -> None:
        """Starts a task that publishes the messages of the effect in its transaction, within PUBLISH_TIMEOUT_S seconds.
        Then the task calls `published` or `not_published`."""
        self._tasks.spawn(self._work(effect), f"publish of half {effect.half}")

    async def _work(self, effect: PublishHalfMessage) -> None:
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S), self._room:
                listed = await self._publish(effect.txn, effect.messages)
        except TimeoutError as error:
            known = (
                error if isinstance(error, MagnetarError) else TimedOut(f"not published within {PUBLISH_TIMEOUT_S:g} s")
            )
            self._not_published(effect, known)
        except MagnetarError as error:
            self._not_published(effect, error)
        except Exception as error:  # a fault of ours must not leave the half without an end
            _LOG.exception("a half is not published")
            self._not_published(effect, InternalError(str(error)))
        else:
            self._published(effect, listed)

    async def close(self) -> None:
        """Ends all memberships with NotOwner, cancels the publishes in progress, and waits for their tasks."""
        for member in self._members:
            member.close(NotOwner("the coordinator moves; look it up again"))
        await self._tasks.close()


_LOG = logging.getLogger("magnetar.broker.transactions")

COORDINATOR_TICK_S = 0.5
"""Seconds between two checks of deadlines; also how long a deferred record, such as TransactionsSettled, may wait for
an append that it can join."""
ANSWER_TIMEOUT_S = 25.0
"""Seconds that a request may take: less than the time after which a client repeats it."""

TXN_ID_GAP_MAX = 1 << 16
"""Bound of the random number of ids that are left out before a block, so that ids cannot be guessed. An epoch has 40
bits of ids, which are 33 million blocks on average."""


PublishHalfMessages = Callable[[TxnId, Sequence[HalfMessage]], Awaitable[list[Participant]]]
"""Publishes the messages of a half in a transaction; returns its participants (broker/node/internal_producer.py)."""


class RunningCoordinator:
    """A transaction coordinator that runs at this broker. It ends when the coordinator moves to another broker, or when
    its epoch ends for another reason; then `on_over` is called once. All request methods raise NotOwner after the end,
    OutcomeUnknown if the epoch ends before the answer, and TimedOut after ANSWER_TIMEOUT_S seconds."""

    def __init__(
        self, world: World, log: CoordinatorLog, core: TransactionCoordinatorCore, topics: SettlementTransport,
        publish: PublishHalfMessages,
        close_s: float,
        on_over: Callable[[RunningCoordinator], None],
    ) -> None:  # fmt: skip
        self.number, self.epoch = core.table.number, core.table.epoch
        self.loading_ms = self.loaded_ms = 0  # since the epoch: the take-over
        self._clock = world.clock
        self.log = log
        self.core = core
        self._close_s = close_s
        self._on_over = on_over
        self._settler = SettlementSender(world, topics, self._settled)
        self._halves = HalfMessageDriver(
            lambda txn, messages: publish(TxnId(core.table.number, txn), messages), self._published, self._not_published
        )
        self._loop = asyncio.get_running_loop()
        self._is_writing = self._is_stopped = False
        self._writing = Tasks()  # an append that takes more than the ledger's turn
        self._quiet = asyncio.Event()  # nothing is decided that is not durable
        self._quiet.set()
        self._ending: asyncio.Task[None] | None = None
        self._background = Supervisor()

    @classmethod
    async def load(
        cls, world: World, log: CoordinatorLog, limits: CoordinatorLimits, topics: SettlementTransport,
        publish: PublishHalfMessages,
        close_s: float,
        on_over: Callable[[RunningCoordinator], None],
    ) -> RunningCoordinator:  # fmt: skip
        """Takes the coordinator of `log` over, starts it, and returns it. Raises CoordinatorFenced if another broker
        took it over first; DataLost if its ledger is lost or damaged; and the other errors of
        `CoordinatorLog.take_over`. `close_s`: for how many seconds `close` may take; `on_over`: a function that is
        called when the coordinator has ended."""
        loading_ms = world.clock.wall_ms()
        state, epoch = await log.take_over()
        rng = world.rng
        core = TransactionCoordinatorCore(
            log.number, epoch, state, limits, world.clock.monotonic(), lambda: rng.randrange(TXN_ID_GAP_MAX)
        )
        running = cls(world, log, core, topics, publish, close_s, on_over)
        running.loading_ms, running.loaded_ms = loading_ms, world.clock.wall_ms()
        running._do(core.start(world.clock.monotonic()))
        running._background.start_supervised(f"transactions-{log.number}-tick", running._tick)
        return running

    # ------------------------------------------------------------------ questions
    async def begin_transactions(
        self, owner: str, count: int = 1, timeout_s: float = 0.0, *, name: str = "", holder: int = 0,
        tag: SinkBatchTag | None = None, adopt: bool = False, address: str = "",
    ) -> BeginAnswer:  # fmt: skip
        """Begins up to `count` transactions for the role `owner`, and returns their ids; none if the sink of `tag`
        (None: no sink) has committed the batch already. The arguments are explained at `BeginTransactions`. Raises
        BackPressure if there are too many open transactions; InvalidRequest if an argument is invalid; SinkFenced if
        another query writes the sink of `tag`; TransactionFenced if the name `name` has a later holder than `holder`;
        Unavailable if the coordinator has no ids left."""
        found = await self._ask(
            lambda to: BeginTransactions(to, owner, count, timeout_s, name, holder, tag, adopt, address)
        )
        assert isinstance(found, BeginAnswer), "a begin is answered by ids"
        return found

    async def join_transaction(self, txn: TxnId, topic: str, owner: str | None = None) -> JoinAnswer:
        """Makes `topic` a participant of the transaction. Returns the state of the transaction; or, if it is committed
        and the topic has not stored that yet, the Settlement that the topic must store; or a ForgottenOutcome. If
        `topic` is empty, only starts the timeout of the transaction. `owner`: the role that writes in the transaction;
        None: the topic itself asks. Raises InvalidRequest if the id was never given to a client, another role began the
        transaction, or it has its maximum of topics; TransactionEnded if it is prepared."""
        state = await self._ask(lambda to: JoinTransaction(to, txn.least, topic, owner))
        assert isinstance(state, TxnState | ForgottenOutcome), "the question is about a state"
        owed = self.core.outcomes.find_unsettled_participant(txn.least, topic) if state is TxnState.COMMITTED else None
        return self._settlement(txn.least, True, owed) if owed is not None else state

    def join_transaction_nowait(self, txn: TxnId, topic: str, owner: str | None = None) -> bool:
        """Makes the topic a participant, as `join_transaction` does, but without waiting, and returns True. Returns
        False if that is not possible now: then the caller must call `join_transaction`, which waits or raises the
        reason. `owner`: as in `join_transaction`."""
        return self.core.ends.join_transaction_nowait(txn[1], topic, owner, self._clock.monotonic())

    def _settlement(self, txn: int, committed: bool, participant: Participant) -> Settlement:
        last = Position(participant.ledger, participant.entry)
        return Settlement(TxnId(self.number, txn), committed, participant.entries, last)

    def end_transaction_nowait(
        self, to: CoordinatorRequest, txn: TxnId, verb: TransactionEndVerb, owner: str,
        participants: Sequence[Participant] = (),
        *,
        prepared_s: float = 0.0, visible: bool = False,
    ) -> None:  # fmt: skip
        """Ends a transaction, as `end_transaction` does, but does not wait: the answer (a TxnState or an error) is
        passed to the object `to`, perhaps before this method returns. The arguments are those of `end_transaction`."""
        intent = EndTransaction(to, txn.least, verb, owner, participants, prepared_s, visible)
        self._do(self.core.receive(intent, self._clock.monotonic()))

    async def end_transaction(
        self, txn: TxnId, verb: TransactionEndVerb, owner: str, participants: Sequence[Participant] = (), *,
        prepared_s: float = 0.0, visible: bool = False,
    ) -> TxnState:  # fmt: skip
        """Commits, prepares or aborts a transaction, as `verb` says, and waits until its outcome is durable. Returns
        the state of the transaction. `participants`: the entries in each topic, as the client counted them; () if it
        did not. `prepared_s`: for how long a prepared transaction may stay so, 0 for the longest time; `visible`: also
        waits until all participants have stored the outcome. Raises TransactionAborted, TransactionFenced or
        TransactionForgotten if it cannot be ended so; InvalidRequest if the id was never given to a client, another
        role began it, or its participants are too many."""
        return await self._state(
            lambda to: EndTransaction(to, txn.least, verb, owner, participants, prepared_s, visible)
        )

    async def commit_batch(
        self,
        owner: str,
        txns: Mapping[TxnId, Sequence[Participant]],
        tag: SinkBatchTag | None = None,
        *,
        adopt: bool = False,
    ) -> bool:
        """Commits the transactions `txns`, all of them or none, durably; with `tag`, as a batch of a sink (None: they
        belong to no sink). Returns True if the sink has committed this batch before; then this call commits nothing.
        `adopt`: this query may take the sink over from another one; else raises SinkFenced if another query writes it.
        Raises TransactionEnded if only some of them are committed already; TransactionAborted, TransactionFenced or
        TransactionForgotten if one cannot commit; InvalidRequest if an id, a name or the batch is invalid; BackPressure
        if there are too many sinks."""
        least = {txn.least: participants for txn, participants in txns.items()}
        sink = (tag.sink_id, tag.query_id, tag.batch) if tag is not None else ("", "", -1)
        found = await self._ask(lambda to: CommitSinkBatch(to, owner, least, *sink, adopt))
        assert isinstance(found, bool), "a batch is answered by whether it was there"
        return found

    async def get_status(self, txn: TxnId, owner: str | None = None) -> TxnState:
        """Returns the state of a transaction or a half message. `owner`: the role that asks; None: an operator asks.
        Raises InvalidRequest if the id was never given to a client, or another role began the transaction;
        TransactionForgotten if its outcome was discarded."""
        return await self._state(lambda to: GetTransactionStatus(to, txn.least, owner))

    async def abort_by_admin(self, txn: TxnId) -> TxnState:
        """Aborts a transaction for an administrator, also a prepared one. Returns its state afterwards: COMMITTED if it
        was committed before. Raises TransactionForgotten if its outcome was discarded; InvalidRequest if the id was
        never given to a client."""
        return await self._state(lambda to: AbortByAdmin(to, txn.least))

    async def abort_if_open(self, txn: TxnId, *, only_tell: bool) -> TransactionRow:
        """Aborts the transaction if it is open, and returns a TransactionRow that describes it afterwards. A prepared
        transaction is not aborted. `only_tell`: aborts nothing, only returns the row. Raises InvalidRequest if the id
        was never given to a client."""
        if only_tell:
            rows = self.list_transactions(txn, 1)
            if not rows:
                raise InvalidRequest(f"{txn} has not begun")
            return rows[0]
        found = await self._ask(lambda to: AbortIfOpen(to, txn.least))
        assert isinstance(found, TransactionRow), "the question is about a row"
        return found

    async def remove_participant(self, txn: TxnId, topic: str) -> None:
        """Removes a topic from an ended transaction whose outcome the topic cannot store, durably. Raises NotFound if
        the transaction does not wait for this topic."""
        await self._ask(lambda to: RemoveParticipant(to, txn.least, topic))

    # ------------------------------------------------------------------ half messages
    async def prepare_half(
        self, half: TxnId, owner: str, group: str, check_key: str, messages: list[HalfMessage], check_after_s: float
    ) -> TxnState:
        """Stores a half message. Returns PREPARED; if the same half message was stored before, its outcome if it has
        one. Raises BackPressure if there are too many half messages; InvalidRequest if a limit is exceeded, the id was
        never given to a client, or another role prepared it; TransactionAborted if the id `half` cannot be used any
        more."""
        return await self._state(
            lambda to: PrepareHalf(to, half.least, owner, group, check_key, messages, check_after_s)
        )

    async def end_half(
        self, half: TxnId, verb: HalfMessageEndVerb, owner: str, check: int = 0, why: str = ""
    ) -> TxnState:
        """Commits a half message, rolls it back, or answers its check number `check`, as `verb` says. Returns the
        outcome of the half message, or PREPARED if it has none yet. Raises HalfParked, TransactionAborted,
        TransactionEnded, TransactionForgotten, InvalidRequest if the id was never given to a client or another role
        prepared it, or the error because of which the messages cannot be published."""
        return await self._state(lambda to: EndHalf(to, half.least, verb, owner, check, why))

    async def change_half(self, half: TxnId, verb: HalfMessageChangeVerb) -> None:
        """Changes the state of a half message for an operator, as `verb` says, and waits until the change is durable.
        Raises NotFound if the half message is not known; TransactionEnded if it has the opposite outcome;
        InvalidRequest if the id was never given to a client; or the error because of which its messages cannot be
        published."""
        await self._ask(lambda to: ChangeHalf(to, half.least, verb))

    async def watch_halves(self, owner: str, group: str) -> AsyncGenerator[AskAboutHalfMessage, None]:
        """Makes the caller a member of the group, and yields the checks that it must answer, until the generator is
        closed. Raises NotOwner if the coordinator moves to another broker, BackPressure if it has too many members."""
        with self._halves.connect_member() as member:
            try:
                await self._ask(lambda to: WatchHalves(to, member, owner, group))
                while True:
                    yield await member.wait_next_check()
            finally:
                self.core.halves.remove_member(member, self._clock.monotonic())
                self._do(self.core.decisions.take_effects())

    def list_halves(self, half: TxnId | None, group: str, limit: int) -> list[HalfMessageRow]:
        """Returns descriptions of up to `limit` open half messages, the oldest first: only of `half` if that is not
        None; else of the group `group`, or of all groups if that is empty."""
        now = self._clock.monotonic()
        return self.core.halves.list_half_message_rows(now, half.least if half is not None else None, group, limit)

    def half_message_counts(self) -> dict[str, int]:
        """Returns the numbers of open and of parked half messages, the bytes of both together, and counters since the
        take-over."""
        return {**self.core.halves.counters, **self.core.halves.statistics()}

    def _published(self, each: PublishHalfMessage, listed: list[Participant]) -> None:
        self.core.halves.on_published(each.half, each.txn, listed, self._clock.monotonic())
        self._do(self.core.decisions.take_effects())

    def _not_published(self, each: PublishHalfMessage, error: MagnetarError) -> None:
        _LOG.info("half %s is not published: %s", TxnId(self.number, each.half), error)
        self.core.halves.on_not_published(each.half, each.txn, error, self._clock.monotonic())
        self._do(self.core.decisions.take_effects())

    def list_transactions(self, txn: TxnId | None, limit: int) -> list[TransactionRow]:
        """Returns descriptions of up to `limit` transactions that are not settled, the oldest first. If `txn` is not
        None, describes only this transaction; [] if its id was not used."""
        return self.core.table.transaction_rows(self._clock.monotonic(), txn.least if txn is not None else None, limit)

    def statistics(self) -> dict[str, int]:
        """Returns the present numbers of transactions and of settlements that are being sent, and counters since the
        take-over."""
        counters = self.core.table.counters
        return {
            **self.core.statistics(), "begun": counters.begun, "settled": counters.settled,
            "records": counters.records, "settle_failures": self._settler.failures,
            "settling_topics": self._settler.waiting_topic_count,
        }  # fmt: skip

    def aborts_by_reason(self) -> dict[str, int]:
        """Returns how many transactions were aborted since the take-over, by reason."""
        return {reason.name.lower(): self.core.table.counters.aborted.get(reason, 0) for reason in AbortReason}

    def duration_histogram(self) -> tuple[Sequence[int], float]:
        """Returns the histogram of how long transactions were open: the counts for the upper bounds DURATION_BOUNDS_S
        (seconds) and for longer times, and the sum in seconds."""
        return self.core.table.counters.durations, self.core.table.counters.durations_sum_s

    @property
    def oldest_open_s(self) -> float:
        """Returns for how many seconds the oldest transaction without an outcome has been open; 0 if there is none."""
        return self.core.table.oldest_open_s(self._clock.monotonic())

    async def _state(self, make: Callable[[object], CoordinatorIntent]) -> TxnState:
        found = await self._ask(make)
        assert isinstance(found, TxnState), "the question is about a state"
        return found

    async def _ask(self, make: Callable[[object], CoordinatorIntent]) -> Any:
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._do(self.core.receive(make(answered), self._clock.monotonic()))
        if answered.done():
            return answered.result()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answered
        except TimeoutError as error:
            raise TimedOut(
                f"coordinator {self.number} has no answer within {ANSWER_TIMEOUT_S:g} s: ask again"
            ) from error

    # ------------------------------------------------------------------ effects
    def _do(self, effects: Iterable[CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case AnswerRequest(request, result):
                    _answer(request, result)
                case SendOutcomeToParticipant(txn, committed, participant):
                    self._settler.add_settlement(participant.topic, self._settlement(txn, committed, participant))
                case AbandonEpoch(why):
                    _LOG.warning("coordinator %d ends its epoch %d: %s", self.number, self.epoch, why)
                    self._start_ending(self._close())
                case AskAboutHalfMessage():
                    self._halves.send_half_message_check(effect)
                case PublishHalfMessage():
                    self._halves.start_publishing_half_message(effect)
                case WarnOfParkedHalfMessage(half, group, why):
                    text = TxnId(self.number, half)
                    _LOG.warning("half %s of group %r is parked, an operator decides: %s", text, group, why)
                case _:
                    assert_never(effect)
        if self.core.decisions.has_decided_records and not self._is_writing:
            self._is_writing = True
            self._quiet.clear()
            self._loop.call_soon(self._write)  # what is asked in this turn goes together

    def _settled(self, settlement: Settlement, topic: str) -> None:
        self._do(self.core.on_outcome_stored(settlement.txn.least, topic))

    # ------------------------------------------------------------------ writing
    def _write(self) -> None:
        """Appends all decided records to the ledger, in one append. Called in the turn of the event loop after the
        first decision, and again when an append is durable."""
        if self._is_stopped:
            return
        append = self.core.decisions.take_next_append()
        if append is None:
            self._is_writing = False
            self._quiet.set()
            return
        try:
            appended = self.log.append_nowait(append.records)
        except Exception as error:  # as an append of unknown outcome
            self._fail(error)
            return
        if appended is None:
            self._writing.spawn(self._append(append, None), f"append of coordinator {self.number}")
        else:
            appended.add_done_callback(lambda done: self._appended(append, done))

    def _appended(self, append: AppendRecords, done: asyncio.Future[int]) -> None:
        error = ConnectionLost("the append was given up") if done.cancelled() else done.exception()
        if self._is_stopped:
            return
        if error is None:
            self._on_durable(append)
        elif isinstance(error, MagnetarError):
            self._writing.spawn(self._append(append, error), f"append of coordinator {self.number}")
        else:
            self._fail(error)

    async def _append(self, append: AppendRecords, failed: MagnetarError | None) -> None:
        """Appends records if that needs more than the open ledger: a new ledger must be created first, or `failed` is
        the error of an earlier append of the same records."""
        try:
            await self.log.append(append.records, self.core.state, failed)
        except MagnetarError as error:
            self._start_ending(self._abandon_epoch(error))
        except Exception as error:
            self._fail(error)
        else:
            self._on_durable(append)

    def _on_durable(self, append: AppendRecords) -> None:
        try:
            self._do(self.core.on_appended(append.number, self._clock.monotonic()))
        except Exception as error:
            self._fail(error)
        else:
            self._write()

    def _fail(self, error: BaseException) -> None:
        """Ends the epoch after an internal error, as after an append whose outcome is unknown."""
        _LOG.error("coordinator %d fails", self.number, exc_info=error)
        self._start_ending(self._abandon_epoch(InternalError(f"coordinator {self.number} fails: {error}")))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(COORDINATOR_TICK_S)
            self._do(self.core.tick(self._clock.monotonic()))
            if self.core.decisions.has_deferred_records:
                self.core.decisions.append_deferred_records_next()
                self._do(())

    # ------------------------------------------------------------------ the end
    @property
    def has_ended(self) -> bool:
        """Returns True if the coordinator ends or has ended at this broker, so that it accepts no more requests."""
        return self.core.decisions.has_ended

    async def is_owner(self) -> bool:
        """Returns True if the metadata says that this broker still runs the coordinator: no other broker has taken it
        over. Raises the errors of the metadata."""
        return await self.log.is_owner()

    def _start_ending(self, work: Any) -> None:
        if self._ending is not None:
            work.close()
            return
        self._ending = asyncio.get_running_loop().create_task(work, name=f"end of coordinator {self.number}")

    async def close(self) -> None:
        """Closes the coordinator, and hands its open transactions over to the next owner. If that fails, or takes more
        than `close_s` seconds, the next owner recovers the coordinator as after a crash; its open transactions are
        aborted then. Idempotent."""
        self._start_ending(self._close())
        assert self._ending is not None, "it is ending"
        await asyncio.shield(self._ending)

    async def abandon_epoch(self, error: MagnetarError) -> None:
        """Ends the epoch at once, because of `error`: hands nothing over, and waiting requests get OutcomeUnknown or
        NotOwner. If the coordinator is ending already, only waits for that."""
        self._start_ending(self._abandon_epoch(error))
        assert self._ending is not None, "it is ending"
        await asyncio.shield(self._ending)

    async def _close(self) -> None:
        await run_all_steps(self._hand_over, self._stop)

    async def _hand_over(self) -> None:
        core = self.core
        core.decisions.has_ended = True
        try:
            async with asyncio.timeout(self._close_s):
                await self._quiet.wait()
                await self._background.close()
                await self._halves.close()
                records = core.make_next_epoch_records(self._clock.monotonic())
                await self.log.close(records, core.state, idle=core.is_idle)
        except (MagnetarError, TimeoutError) as error:
            _LOG.warning("coordinator %d is not handed over in order: %s", self.number, error)
        except Exception:  # its owner goes on with its own end
            _LOG.exception("coordinator %d is not handed over", self.number)

    async def _abandon_epoch(self, error: MagnetarError) -> None:
        self.core.decisions.has_ended = True
        _LOG.warning("coordinator %d ends its epoch %d: %s", self.number, self.epoch, error)
        await self._stop()

    async def _stop(self) -> None:
        """Ends all parts, each whatever error another one raises: who waits for an answer gets one, and the owner is
        told of the end. Then raises the first error."""
        self._is_stopped = True
        await run_all_steps(
            self._writing.close, self._background.close, self._settler.close, self._halves.close,
            lambda: self._do(self.core.end_epoch()), self.log.abandon, lambda: self._on_over(self),
        )  # fmt: skip


def _answer(request: object, result: IntentResult) -> None:
    if isinstance(request, CoordinatorRequest):
        request.answer(result)
        return
    assert isinstance(request, asyncio.Future), "every other question here has a future"
    if request.done():
        return  # who asked went away
    if isinstance(result, MagnetarError):
        request.set_exception(result)
    else:
        request.set_result(result)
