"""The transactions of a loaded topic: joins before the first entry, outcomes, and what is asked again after a load.

What is decided is in core/transactions.py, and stored by outcomes.py. Rules
- **Seen.** Before a topic's first join its record says that it has seen transactions (`transactions` beside `dedup`):
  a later owner looks for their entries in the log. A topic whose record does not say it replays nothing for them.
- **Join first.** `join` asks the coordinator to take the topic as a participant, and returns when it did; then
  `is_open` is true, and is asked again in the turn that appends. A join that is refused leaves no trace in the log.
- **A role writes in what it began.** The coordinator says so at the first join of that role; the topic remembers it
  until the end. Another role's entry or acknowledgement is refused alone, and what the owner has in flight goes on.
- **The end** of a transaction comes by `settle`: it is applied at once to the entries and to the pending
  acknowledgements of each subscription, and answered when all of that is durable and nothing of the transaction is on
  its way. Repeating it changes nothing. Where nothing of it is known the answer waits for the metadata: no other broker
  has taken the topic over.
- **Asked again.** What a load finds open (entries in the log, pending acknowledgements) is asked for with back-off, in
  a task; a coordinator that does not answer holds back only what is after those entries. What is open is asked for
  every `OPEN_ASK_S`, because a coordinator that was taken over knows no participant of what it lost; and at once when
  it refuses a join, as it does soon when a client goes on with ids of before. ABORTED ends it at once; so does a
  settlement, which names the last receipt. Only where the coordinator has none (COMMITTED alone: an operator made it
  wait for this topic no more), and none comes for `SETTLEMENT_S`, every entry counts.
Guarding tests: tests/broker/topic/test_transactions.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from ...ledger import LedgerClient
from ...metadata.records import OutcomesPlace
from ...proto.applied import Applied
from ...proto.entry import EntryHeader
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import (
    BackPressure,
    InternalError,
    MagnetarError,
    NotAllowed,
    NotOwner,
    TimedOut,
    TransactionAborted,
    TransactionEnded,
    Unavailable,
)
from ...proto.names import Position, TopicName
from ...proto.states import LedgerStays
from ...proto.transactions import TxnId, TxnState
from ...runtime.tasks import Tasks
from ...runtime.world import World
from ..common.config import BrokerConfig, Policy
from ..common.transactions import Coordinators, Joined, Settlement, state_of
from ..log.cache import StoredEntry
from ..log.core.sequence_range import SequenceRange
from ..log.core.trimming import Safe
from ..log.log import Log
from .core.dedup import DedupVerdict
from .core.transactions import NOT_KNOWN, OPEN_MAX, OpenHere, Transactions, TxnEnd, TxnPhase, TxnSnapshot
from .deletion import Deletion
from .outcomes import OutcomesLedger

_LOG = logging.getLogger("magnetar.broker.topic.transactions")

JOIN_S, JOIN_RETRY_S = 5.0, 0.1
"""Seconds that a send or an acknowledgement waits for a coordinator that does not answer, and between two tries."""
ASK_S, ASK_S_MAX = 0.2, 5.0
"""Seconds between two rounds of questions about what a load found: first, and at most."""
OPEN_ASK_S = 30.0
SETTLEMENT_S = 10.0
ASK_AT_ONCE = 1_000
SETTLE_AT_ONCE = 100
"""Settlements that are applied in one step of the loop: a millisecond."""


class PendingAcks(Protocol):
    """A durable subscription, and its acknowledgements in transactions."""

    @property
    def pending_transactions(self) -> Collection[TxnId]: ...
    def has_pending(self, txn: TxnId) -> bool: ...
    def settle(self, txn: TxnId, committed: bool) -> None:
        """Counts the transaction's pending acknowledgements, or gives them back. Idempotent."""

    async def stored(self) -> None:
        """Returns when the state with everything up to now is durable."""


class Transacting(Protocol):
    """A topic, as its transactions use it."""

    name: TopicName

    def pending_acks(self) -> Iterable[PendingAcks]:
        """Returns the pending acknowledgements of each durable subscription."""

    def merge_numbers(self, end: TxnEnd) -> None:
        """Called when a transaction ended: which sequence ids count from now on, and which do not."""

    def show_committed(self, core: Transactions) -> None:
        """Called when the topic has seen a transaction: what is shown ends at the last stable position from here on."""

    def decided(self) -> None:
        """Called when the last stable position, or what is aborted, has changed."""


class _Writes(NamedTuple):
    """The writes that must be stored before the end of a transaction is: pending acknowledgements of subscriptions, an
    outcome, and what of the transaction `landing` is on its way."""

    acks: tuple[PendingAcks, ...]
    outcome: bool
    landing: TxnId | None


class Awaited(NamedTuple):
    """The event that an entry waits for before it can be judged: that the topic joins its transaction, or that another
    one ends."""

    txn: TxnId
    end: bool = False
    owner: str | None = None  # the role that writes it; None: who may write in each


Key = TypeVar("Key")


class TransactionStats(NamedTuple):
    """The transactions of a topic that has seen some."""

    last_stable: Position
    stable_index: int
    open: int
    oldest: TxnId | None
    oldest_ms: int
    aborted_entries: int
    aborted_bytes: int
    commits: int  # transactions that ended since the topic was loaded
    aborts: int


def txn_of(metadata: MessageMetadata) -> TxnId | None:
    """The transaction of an entry; None: of none. InvalidRequest: its id cannot be one."""
    if not metadata.HasField("txnid_most_bits") or not metadata.HasField("txnid_least_bits"):
        return None
    return TxnId.checked(metadata.txnid_most_bits, metadata.txnid_least_bits)


class _Here:
    """The work on transactions that is under way in a topic."""

    __slots__ = (
        "asked", "committed_at", "ends", "joins", "landing", "seeing", "settles", "since", "suspects", "tasks",
        "writers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.joins: dict[tuple[TxnId, str | None], asyncio.Future[None]] = {}  # by the role that wants to write in it
        self.asked: dict[TxnId, int] = {}  # how many of these joins ask its coordinator now
        self.writers: dict[TxnId, str] = {}
        """The role that began it, as its coordinator said when that role wrote here first."""
        self.settles: dict[TxnId, asyncio.Future[None]] = {}
        self.landing: dict[TxnId, asyncio.Future[None]] = {}  # until nothing of it is on its way
        self.ends: dict[TxnId, list[Callable[[MagnetarError | None], None]]] = {}
        self.since: dict[TxnId, float] = {}  # when it was joined or found, on the monotonic clock
        self.committed_at: dict[TxnId, float] = {}  # the coordinator said so, and its settlement has not come
        self.suspects: dict[int, asyncio.Task[None]] = {}  # coordinators of which all that is open is asked for now
        self.seeing = asyncio.Lock()
        self.tasks = Tasks()


class TopicTransactions:
    """The transactions of a loaded topic; see the module. A part of its topic (part.py); the `TransactionJoins` of its
    producers and subscriptions."""

    __slots__ = (
        "_asking", "_config", "_coordinators", "_ended", "_leaving", "_ledger", "_ledger_client", "_log", "_loop",
        "_replication", "_topic", "_under_way", "_world", "core", "replayed",
    )  # fmt: skip

    def __init__(
        self, world: World, ledgers: LedgerClient, config: BrokerConfig, topic: Transacting, log: Log,
        replication: Policy, coordinators: Coordinators,
    ) -> None:  # fmt: skip
        self.core: Transactions | None = None  # None: the topic has seen no transaction
        self.replayed = 0  # entries, when the topic was loaded
        self._world, self._topic, self._log, self._coordinators = world, topic, log, coordinators
        self._ledger_client, self._config, self._replication = ledgers, config, replication
        self._ledger: OutcomesLedger | None = None
        self._loop = asyncio.get_running_loop()
        self._under_way: _Here | None = None
        self._asking: asyncio.Task[None] | None = None
        self._ended = self._leaving = False  # it takes nothing any more; the topic is about to be deleted

    @property
    def _here(self) -> _Here:
        """Returns the work under way, made with the first transaction: most topics have none."""
        if self._under_way is None:
            self._under_way = _Here()
        return self._under_way

    # ------------------------------------------------------------------ opening
    async def open(self, applied: Applied) -> None:
        """Restores what is stored, where the record says that there is something. `replay` gives the rest."""
        place = self._log.record.transactions
        if place is None:
            return
        ledger = self._make_ledger()
        self._begin(ledger, await ledger.recover(place))

    def _make_ledger(self) -> OutcomesLedger:
        return OutcomesLedger(self._world, self._ledger_client, self._config, self._log, self._replication)

    def _begin(self, ledger: OutcomesLedger, snapshot: TxnSnapshot) -> Transactions:
        core = ledger.core = Transactions(self._log.shape, snapshot)
        self._ledger, self.core = ledger, core
        return core

    @property
    def replays_after(self) -> Position | None:
        """Returns where the replay begins; None: nothing has to be replayed."""
        return self.core.position if self.core is not None else None

    def replay(self, txn: TxnId, header: EntryHeader, numbers: SequenceRange, entry: StoredEntry) -> bool:
        """Takes an entry of a transaction, in the order of the log. Returns whether it is aborted."""
        if self.core is None:
            return False
        if entry.position > self.core.position:
            self.core.replayed(
                txn, header.producer_name, numbers, entry.position, entry.first_index, entry.count, entry.size
            )
            self.replayed += 1
        return self.core.noted(txn, header.producer_name, numbers, entry.position)

    def undecided(self) -> Position | None:
        """The position after which the first entry of an open transaction is; None: there is none."""
        first = self.core.first_hidden if self.core is not None else None
        return self._log.shape.before(first) if first is not None else None

    def is_hidden(self, txn: TxnId, position: Position) -> bool:
        """Whether that entry of the transaction is not shown, now or ever."""
        return self.core is not None and self.core.is_hidden(txn, position)

    def replay_done(self) -> None:
        """Ends the replay: all entries of the log are known."""
        if self.core is not None:
            self.core.replay_done()

    def loaded(self) -> None:
        """Begins to show what is known, after the log was replayed and the subscriptions are open."""
        if self.core is None:
            return
        self._ask_for_pending(self.core)
        self._topic.show_committed(self.core)
        now = self._world.clock.monotonic()
        self._here.since = dict.fromkeys(self.core.open, now)
        self._ask_on()

    # ------------------------------------------------------------------ joining
    def is_open(self, txn: TxnId) -> bool:
        return self.core is not None and self.core.is_open(txn)

    def join_now(self, txn: TxnId, owner: str | None = None) -> bool:
        """Whether it `is_open`, and is the role's: joined before, or now, where its coordinator is in this process.
        False: `join` it, or `when` it is joined; that also says why not. `owner` None: a caller that may write in each.
        """
        core = self.core
        if core is None or self._ended or (txn, owner) in self._here.joins:
            return False
        if core.is_open(txn) and self._is_writer(txn, owner):
            return True
        if self._leaving or not core.may_join(txn):
            return False
        if not self._coordinators.join_now(txn, self._topic.name.full, owner):
            return False
        core.ask(txn)
        return self._is_in(core, txn, owner)

    def _is_writer(self, txn: TxnId, owner: str | None) -> bool:
        return owner is None or self._here.writers.get(txn) == owner

    async def join(self, txn: TxnId, owner: str | None = None) -> None:
        """Returns when `is_open`. InvalidRequest: it is another role's, or was never begun; TransactionEnded,
        TransactionAborted: it has ended; Unavailable: its coordinator does not answer; BackPressure: too many are open;
        NotOwner.
        """
        if not (self.is_open(txn) and self._is_writer(txn, owner)):
            await asyncio.shield(self._joining(txn, owner))

    async def outcome(self, txn: TxnId) -> TxnState | None:
        """Returns COMMITTED or ABORTED if the transaction has ended; its end has been applied here when this returns.
        None: it is open, or its coordinator does not answer within JOIN_S. Raises NotOwner."""
        try:
            async with asyncio.timeout(JOIN_S):
                return await self._until_over(txn)
        except (MagnetarError, TimeoutError) as error:
            if self._ended:
                raise self._not_here() from error
            _LOG.info("%s: transaction %s: %s", self._topic.name, txn, error)
            return None

    async def _until_over(self, txn: TxnId) -> TxnState | None:
        core = self.core
        if core is None or not core.is_known(txn):
            return None
        joined = await self._coordinators.join(txn, self._topic.name)
        state = state_of(joined)
        if state in (TxnState.OPEN, TxnState.PREPARED):
            return None
        if core.is_known(txn):
            over: asyncio.Future[None] = self._loop.create_future()

            def tell(_: MagnetarError | None) -> None:
                if not over.done():
                    over.set_result(None)

            self.when(Awaited(txn, end=True), tell)
            self._told(txn, joined)
            await over
        return state

    def when(self, awaited: Awaited, then: Callable[[MagnetarError | None], None]) -> None:
        """Calls `then` once, in a later turn: with None when the entry can be judged, else with why it is refused."""
        if awaited.end:
            self._here.ends.setdefault(awaited.txn, []).append(then)
            return
        self._joining(awaited.txn, awaited.owner).add_done_callback(lambda done: then(_error_of(done)))

    def _joining(self, txn: TxnId, owner: str | None) -> asyncio.Future[None]:
        """Begins a join, or returns the run that others of the role asked for."""
        key = txn, owner
        return self._here.joins.get(key) or self._shared(self._here.joins, [key], lambda: self._join(txn, owner))

    def _shared(
        self, runs: dict[Key, asyncio.Future[None]], txns: Sequence[Key],
        work: Callable[[], Coroutine[Any, Any, None]],
    ) -> asyncio.Future[None]:  # fmt: skip
        """Starts a run of `work`; until it is over, each of `txns` has it."""
        if self._ended:
            return self._refused()
        future: asyncio.Future[None] = self._loop.create_future()
        runs.update(dict.fromkeys(txns, future))
        self._here.tasks.spawn(self._run(runs, txns, future, work), "transaction of a topic")
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
            _LOG.exception("%s: transactions %s", self._topic.name, txns)
            error = InternalError(f"transaction {txns[0]} of topic {self._topic.name}: {failure!r}")
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

    def _refused(self) -> asyncio.Future[None]:
        refused: asyncio.Future[None] = self._loop.create_future()
        refused.set_exception(self._not_here())
        refused.exception()
        return refused

    def _not_here(self) -> MagnetarError:
        return NotOwner(f"topic {self._topic.name} is not served here any more; look it up again")

    async def _join(self, txn: TxnId, owner: str | None) -> None:
        self._here.asked[txn] = self._here.asked.get(txn, 0) + 1
        try:
            await self._join_for(txn, owner)
        finally:
            self._here.asked[txn] -= 1
            if not self._here.asked[txn]:
                del self._here.asked[txn]

    async def _join_for(self, txn: TxnId, owner: str | None) -> None:
        if not self._topic.name.persistent:
            raise NotAllowed(f"topic {self._topic.name} keeps nothing, and takes part in no transaction")
        self._check_leaving()
        core = await self._see()
        if core.is_full(txn):
            raise BackPressure(f"topic {self._topic.name} has {OPEN_MAX} open transactions")
        if core.ask(txn) is TxnPhase.ENDED:
            raise TransactionEnded(f"transaction {txn} has ended", txn=str(txn))
        try:
            joined = await self._patiently(txn, owner)
            self._check_leaving()  # the coordinator may have it as a participant, with nothing to settle
        except BaseException:
            self._join_refused(core, txn)
            raise
        state = state_of(joined)
        if state in (TxnState.OPEN, TxnState.PREPARED):
            if not self._is_in(core, txn, owner):
                raise TransactionEnded(f"transaction {txn} ended meanwhile", txn=str(txn))
            return
        self._join_refused(core, txn)
        if txn in core.known:  # a load found entries of it
            self._told(txn, joined)
        if state is TxnState.ABORTED:
            self._suspect(txn.coordinator)
        if state is TxnState.COMMITTED:
            raise TransactionEnded(f"transaction {txn} is committed", txn=str(txn))
        raise TransactionAborted(f"transaction {txn} is aborted", txn=str(txn))

    def _join_refused(self, core: Transactions, txn: TxnId) -> None:
        """Notes a refused join, unless the transaction is asked about for another role as well."""
        if self._here.asked[txn] == 1:
            core.refused(txn)

    def _is_in(self, core: Transactions, txn: TxnId, owner: str | None) -> bool:
        """Notes that the coordinator has the topic as a participant. False: the transaction has ended meanwhile."""
        if not core.joined(txn):
            return False
        if owner is not None:
            self._here.writers[txn] = owner
        self._here.since.setdefault(txn, self._world.clock.monotonic())
        self._ask_on()
        return True

    def _check_leaving(self) -> None:
        if self._leaving:
            raise Unavailable(f"topic {self._topic.name} is about to be deleted: nothing joins a transaction there")

    async def _see(self) -> Transactions:
        """Writes into the topic's record, before its first transaction, that it has seen one."""
        async with self._here.seeing:
            core = self.core
            if core is None:
                position = self._log.shape.confirmed
                await self._log.note(
                    transactions=OutcomesPlace(mark_ledger=position[0], mark_entry=position[1])
                )
                ledger = self._make_ledger()
                ledger.position, ledger.stored_index = position, self._log.shape.end_index
                core = self._begin(ledger, TxnSnapshot(position))
                self._topic.show_committed(core)
        return core

    async def _patiently(self, txn: TxnId, owner: str | None) -> Joined:
        """Returns the coordinator's answer. Unavailable: there is none for JOIN_S; the entry is certainly not in the
        log."""
        end = self._world.clock.monotonic() + JOIN_S
        while True:
            try:
                return await self._coordinators.join(txn, self._topic.name, owner)
            except MagnetarError as error:
                if not error.retryable:
                    raise
                if self._world.clock.monotonic() + JOIN_RETRY_S >= end:
                    raise Unavailable(f"the coordinator of transaction {txn} does not answer: {error}") from error
            await asyncio.sleep(JOIN_RETRY_S)

    # ------------------------------------------------------------------ entries
    def judge(self, txn: TxnId, name: str, numbers: SequenceRange) -> DedupVerdict:
        """Returns the verdict on an entry of the transaction, like core/dedup.py. The caller has just seen that it
        `is_open`."""
        assert self.core is not None, "it is open"
        return self.core.judge(txn, name, numbers)

    def confirmed(
        self, txn: TxnId, name: str, numbers: SequenceRange, position: Position, first_index: int, count: int,
        size: int,
    ) -> None:  # fmt: skip
        assert self.core is not None, "it was open"
        late = self.core.version
        self.core.confirmed(txn, name, numbers, position, first_index, count, size)
        if self.core.version != late:
            self._stored_soon()
            self._topic.decided()
        self._landed(txn)

    def failed(self, txn: TxnId, name: str) -> None:
        assert self.core is not None, "it was open"
        self.core.failed(txn, name)
        self._landed(txn)

    def _landed(self, txn: TxnId) -> None:
        if self._here.landing and txn in self._here.landing and self.core is not None and not self.core.flying(txn):
            future = self._here.landing.pop(txn)
            if not future.done():
                future.set_result(None)

    def holding(self, name: str, txn: TxnId | None, numbers: SequenceRange) -> TxnId | None:
        """Returns another open transaction in which the producer sent one of those ids."""
        return self.core.holding(name, txn, numbers) if self.core is not None and self.core.known else None

    def last(self, name: str) -> int:
        """The highest sequence id of the producer in an open transaction; -1: none."""
        return self.core.last(name) if self.core is not None and self.core.known else -1

    async def settled(self, name: str) -> None:
        """Returns when nothing of the producer is on its way in a transaction, or the topic has ended."""
        core = self.core
        while core is not None and not self._ended and not core.is_settled(name):
            txn = next(txn for txn, each in core.known.items() if name in each.numbers and each.numbers[name].flying)
            await asyncio.shield(self._landing_of(txn))

    def _landing_of(self, txn: TxnId) -> asyncio.Future[None]:
        if txn not in self._here.landing:
            self._here.landing[txn] = self._loop.create_future()
        return self._here.landing[txn]

    # ------------------------------------------------------------------ the end
    async def settle(self, settlements: Sequence[Settlement], timeout_s: float) -> list[MagnetarError | None]:
        """Settles transactions; returns an answer for each, when that is durable here. Idempotent. NotOwner: another
        broker has the topic, or may have it; the coordinator asks the owner again. TimedOut: it is not durable so far.
        """
        runs: list[asyncio.Future[None]] = []
        for first in range(0, len(settlements), SETTLE_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            runs += self._settling(settlements[first : first + SETTLE_AT_ONCE])
        await asyncio.wait(set(runs), timeout=timeout_s)
        late = TimedOut(f"topic {self._topic.name} has not stored it within {timeout_s:g} s")
        return [_error_of(run) if run.done() else late for run in runs]

    def _settling(self, settlements: Sequence[Settlement]) -> list[asyncio.Future[None]]:
        """Applies them at once, but for those that are being settled already. Each is done when its end is durable:
        those that wait for the same writes are one run."""
        if self._ended:
            return [self._refused()] * len(settlements)
        groups: dict[_Writes, list[TxnId]] = {}
        for txn, each in {each.txn: each for each in settlements if each.txn not in self._here.settles}.items():
            groups.setdefault(self._apply(each), []).append(txn)
        if any(writes.outcome for writes in groups):
            self._topic.decided()
        for writes, txns in groups.items():
            self._shared(self._here.settles, txns, partial(self._written, writes))
        return [self._here.settles[each.txn] for each in settlements]

    def _apply(self, settlement: Settlement) -> _Writes:
        """Applies a settlement to its entries, and to the pending acknowledgements of each subscription; returns what
        has to be written then."""
        txn, core = settlement.txn, self.core
        touched = [each for each in self._topic.pending_acks() if each.has_pending(txn)]
        end = core.settle(settlement) if core is not None else NOT_KNOWN
        if end.missing:
            _LOG.error(
                "%s: transaction %s is committed with %d entries that are not in the log: acknowledged data is lost",
                self._topic.name, txn, end.missing,
            )  # fmt: skip
        if end.numbers or end.back:
            self._topic.merge_numbers(end)
        for each in touched:
            each.settle(txn, settlement.committed)
        if end.shown:
            self._stored_soon()
        self._over(txn)
        return _Writes(tuple(touched), end.shown, txn if core is not None and core.flying(txn) else None)

    async def _written(self, writes: _Writes) -> None:
        """Returns when they are stored, and nothing of the transaction is on its way."""
        core = self.core
        if writes.landing is not None and core is not None and core.flying(writes.landing):
            await asyncio.shield(self._landing_of(writes.landing))
        if self._ledger is not None and core is not None and self._ledger.version < core.version:
            await self._ledger.durable()
        if len(writes.acks) == 1:
            await writes.acks[0].stored()
        else:
            await asyncio.gather(*(each.stored() for each in writes.acks))
        if not writes.outcome and not writes.acks and not await self._log.is_ours():
            raise self._not_here()

    def _over(self, txn: TxnId) -> None:
        self._here.since.pop(txn, None)
        self._here.writers.pop(txn, None)
        self._here.committed_at.pop(txn, None)
        for then in self._here.ends.pop(txn, ()):
            self._loop.call_soon(then, None)

    def _stored_soon(self) -> None:
        assert self._ledger is not None, "there is an outcome"
        self._ledger.touched()

    # ------------------------------------------------------------------ asking
    def _ask_for_pending(self, core: Transactions) -> None:
        """Asks for the transactions of acknowledgements that wait, as for those of entries."""
        for each in self._topic.pending_acks():
            for txn in each.pending_transactions:
                core.ask(txn)

    def _ask_on(self) -> None:
        if self._asking is None and not self._ended and self.core is not None and self.core.open:
            self._asking = self._here.tasks.spawn(self._keep_asking(), "open transactions of a topic")

    async def _keep_asking(self) -> None:
        core, clock = self.core, self._world.clock
        assert core is not None, "there is something to ask for"
        pause_s, swept = ASK_S, clock.monotonic()
        try:
            while not self._ended:
                self._ask_for_pending(core)
                if not core.open:
                    break
                every = clock.monotonic() - swept >= OPEN_ASK_S
                if every:
                    swept = clock.monotonic()
                wanted = [
                    txn for txn in core.open
                    if (every or core.known[txn].phase is TxnPhase.ASKED) and not self._here.asked.get(txn)
                ]  # fmt: skip
                await self._ask_all(wanted)
                pause_s = min(2 * pause_s, ASK_S_MAX) if wanted else ASK_S
                await asyncio.sleep(pause_s if wanted else ASK_S_MAX)
        finally:
            self._asking = None

    async def _ask_all(self, txns: Sequence[TxnId]) -> None:
        for first in range(0, len(txns), ASK_AT_ONCE):
            await asyncio.gather(*map(self._ask_one, txns[first : first + ASK_AT_ONCE]))

    def _suspect(self, number: int) -> None:
        """Asks a coordinator about its other transactions: it aborted one and did not say so here, so they may be lost
        too."""
        others = [txn for txn in self.still_open if txn.coordinator == number and not self._here.asked.get(txn)]
        here = self._here
        if others and number not in here.suspects:
            here.suspects[number] = asked = here.tasks.spawn(self._ask_all(others), "lost transactions of a topic")
            asked.add_done_callback(lambda _: here.suspects.pop(number, None))

    async def _ask_one(self, txn: TxnId) -> None:
        """Asks the coordinator, once, about an open transaction."""
        assert self.core is not None, "something is open"
        try:
            joined = await self._coordinators.join(txn, self._topic.name)
        except MagnetarError as error:
            _LOG.info("%s: transaction %s: %s", self._topic.name, txn, error)
            return
        except Exception:  # a fault of ours must not keep the others from being asked for
            _LOG.exception("%s: transaction %s", self._topic.name, txn)
            return
        if txn not in self.core.known:
            return  # it was settled meanwhile
        if state_of(joined) in (TxnState.OPEN, TxnState.PREPARED):
            self.core.joined(txn)
        else:
            self._told(txn, joined)

    def _told(self, txn: TxnId, joined: Joined) -> None:
        """Handles the outcome of a transaction that is not settled here."""
        if isinstance(joined, Settlement):
            self._settle_soon(joined)
        elif joined is TxnState.ABORTED:
            self._settle_soon(Settlement(txn, False))
        elif joined is TxnState.COMMITTED:
            now = self._world.clock.monotonic()
            if now - self._here.committed_at.setdefault(txn, now) >= SETTLEMENT_S:
                _LOG.error("%s: no settlement of the committed %s has come: every entry counts", self._topic.name, txn)
                self._settle_soon(Settlement(txn, True))

    def _settle_soon(self, settlement: Settlement) -> None:
        self._settling([settlement])

    # ------------------------------------------------------------------ as a part of the topic
    def look(self, applied: Applied) -> None:
        if self._ledger is not None and not self._ended:
            self._ledger.refresh()

    def held(self, applied: Applied) -> Safe | None:
        """Returns the mark up to which nothing more is needed: the last stored write, and the first entry of an open
        transaction."""
        if self.core is None or self._ledger is None:
            return None
        first, stored = self.core.first_hidden, self._ledger.position
        if first is not None and first <= stored:
            return Safe(self._log.shape.before(first), why=LedgerStays.TRANSACTION_OPEN)
        return Safe(stored, why=LedgerStays.NOT_IN_OUTCOMES)

    def trimmed(self, ledger_id: int, first_index: int, end_index: int) -> None:
        if self.core is not None:
            self.core.trimmed(ledger_id, first_index, end_index)

    @property
    def still_open(self) -> list[TxnId]:
        """Returns the transactions that have not ended here, the one with the earliest entry first."""
        return self.core.open if self.core is not None else []

    # ------------------------------------------------------------------ deletion (deletion.py)
    async def leave(self, *, force: bool) -> None:
        """Returns when no transaction has something here that can commit; until `stay`, nothing joins.
        TransactionsOpen.
        """
        self._leaving = True
        await self.check_leave(force=force)
        if force and (opened := self.still_open):
            await self._deletion().abort(opened)

    async def check_leave(self, *, force: bool) -> None:
        """Whether `leave` would succeed; changes nothing."""
        if opened := self.still_open:
            await self._deletion().check(opened, force=force)

    def _deletion(self) -> Deletion:
        return Deletion(self._world.clock, self._topic.name, self._coordinators)

    def stay(self) -> None:
        """Takes joins again: the topic is not deleted."""
        self._leaving = False

    def statistics(self) -> TransactionStats | None:
        """Returns the statistics; None: the topic has seen no transaction."""
        core = self.core
        if core is None:
            return None
        opened = core.open
        oldest = opened[0] if opened else None
        now = self._world.clock.monotonic()
        age_s = now - self._here.since.get(oldest, now) if oldest is not None else 0.0
        return TransactionStats(
            core.stable, core.stable_index, len(opened), oldest, int(age_s * 1000), core.aborted_entries,
            core.aborted_bytes, core.commits, core.aborts,
        )

    def open_here(self, txn: TxnId) -> OpenHere | None:
        """Returns an open transaction; None: it has ended here, or is not known."""
        return self.core.open_here(txn) if self.core is not None else None

    def stop(self) -> None:
        self._ended = True
        if (here := self._under_way) is not None:
            here.tasks.cancel()
            waiting = [*here.joins.values(), *here.settles.values(), *here.landing.values()]
            for runs in (here.joins, here.settles, here.landing):
                runs.clear()
            for future in waiting:
                if not future.done():
                    future.set_exception(self._not_here())
                    future.exception()
            here.ends.clear()
        if self._ledger is not None:
            self._ledger.stop()

    async def close(self) -> None:
        self.stop()
        if self._under_way is not None:
            await self._under_way.tasks.drain()
        if self._ledger is not None:
            await self._ledger.close()

    def own_ledgers(self) -> list[int]:
        place = self._log.record.transactions
        return [place.ledger_id] if place is not None and place.ledger_id >= 0 else []


def _error_of(done: asyncio.Future[None]) -> MagnetarError | None:
    error = done.exception()
    assert error is None or isinstance(error, MagnetarError), "a run raises typed errors"
    return error
