"""A coordinator over its epochs, with the ledger in memory, and the rules that hold whatever happens.

`World` runs one epoch at a time: `ask` an intent, `append` what was decided, `crash` in the middle, `hand_over`,
`settle` a topic. Everything that is answered goes through `Judge`, which knows nothing of the coordinator's tables:
it has the answers, the durable records, and what the topics stored.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy

from magnetar.broker.transaction.coordinator_core import TransactionCoordinatorCore
from magnetar.broker.transaction.intents_core import (
    AbandonEpoch,
    AbortIfOpen,
    AnswerRequest,
    AppendRecords,
    BeginAnswer,
    BeginTransactions,
    CoordinatorEffect,
    CoordinatorIntent,
    CoordinatorLimits,
    EndTransaction,
    GetTransactionStatus,
    JoinTransaction,
    SendOutcomeToParticipant,
    TransactionEndVerb,
    TransactionRow,
)
from magnetar.broker.transaction.records_core import (
    AnyCoordinatorRecord,
    OutcomesDiscarded,
    TransactionsCommitted,
    TransactionsSettled,
)
from magnetar.broker.transaction.state_core import LOW_ID_BITS, CommittedTransactionIds, CoordinatorState
from magnetar.proto.errors import MagnetarError, TransactionAborted, TransactionFenced, TransactionForgotten
from magnetar.proto.states import ForgottenOutcome, TxnState

ENDED = (TxnState.COMMITTED, TxnState.ABORTED)


class Judge:
    def __init__(self) -> None:
        self.given: set[int] = set()
        self.outcomes: dict[int, TxnState] = {}
        self.committed: set[int] = set()  # durable
        self.on_its_way: set[int] = set()
        self.stored: dict[tuple[int, str], bool] = {}  # by the topics: committed or not
        self.participants: dict[int, set[str]] = {}  # of committed transactions, as their record says
        self.done: set[int] = set()
        self.forgotten = 0
        self.empty: set[int] = set()

    def begun(self, begun: BeginAnswer) -> None:
        ids = set(range(begun.first, begun.first + begun.ids))
        assert not ids & self.given, "no id is given twice"
        self.given |= ids

    def says(self, txn: int, state: TxnState) -> None:
        """An answer about an id."""
        assert txn not in self.on_its_way, "no answer about an id while its commit is in doubt"
        if state not in ENDED:
            assert txn not in self.outcomes, f"{self.outcomes.get(txn)} was answered, then {state}"
            return
        if txn in self.empty:
            return
        assert self.outcomes.setdefault(txn, state) is state, "at most one outcome per id"
        if state is TxnState.COMMITTED:
            assert txn in self.committed, "COMMITTED answered: COMMIT is durable"
        else:
            assert txn not in self.committed, "ABORTED answered: no COMMIT exists"

    def durable(self, record: AnyCoordinatorRecord) -> None:
        if isinstance(record, TransactionsCommitted):
            for txn, shares in record.txns:
                if not shares:
                    self.empty.add(txn)
                assert self.outcomes.get(txn) is not TxnState.ABORTED, "ABORTED answered: no COMMIT comes later"
                self.committed.add(txn)
                self.participants[txn] = {record.topics[share.topic] for share in shares}
        elif isinstance(record, TransactionsSettled):
            for txn in record.txns:
                for topic in self.participants.get(txn, ()):
                    assert self.stored.get((txn, topic)), "done: every participant has stored the outcome"
                self.done.add(txn)
        elif isinstance(record, OutcomesDiscarded):
            self.forgotten = record.below
            for txn, topics in self.participants.items():
                assert txn >= record.below or txn in self.done or not topics, "forgotten: it was done"

    def told(self, settle: SendOutcomeToParticipant) -> None:
        self.says(settle.txn, TxnState.COMMITTED if settle.committed else TxnState.ABORTED)


class World:
    """The epochs of one coordinator."""

    def __init__(self, limits: CoordinatorLimits | None = None, gap: Callable[[], int] = lambda: 0) -> None:
        self.limits, self.gap = limits or CoordinatorLimits(), gap
        self.judge = Judge()
        self.log: list[AnyCoordinatorRecord] = []
        self.epoch = 0
        self.now = 1000.0
        self.asked: dict[int, CoordinatorIntent] = {}
        self.answers: dict[int, object] = {}
        self.settling: list[SendOutcomeToParticipant] = []
        self.append_now: AppendRecords | None = None
        self.gave_up = False
        self.checks = True  # False: these steps were checked in another world
        self.core = self._next_epoch()

    def _next_epoch(self) -> TransactionCoordinatorCore:
        self.epoch += 1
        state, again = CoordinatorState(), CoordinatorState()
        for record in self.log:
            state.apply(deepcopy(record))
        handed, state.handed = state.handed, []
        for record in state.snapshot():
            again.apply(deepcopy(record))
        assert _plain(again) == _plain(state), "a snapshot makes the same state"
        state.handed = handed
        self.settling, self.append_now, self.gave_up = [], None, False
        self.judge.on_its_way.clear()
        self.core = TransactionCoordinatorCore(0, self.epoch, state, self.limits, self.now, self.gap)
        self._do(self.core.start(self.now))
        return self.core

    # ------------------------------------------------------------------ events
    def ask(self, intent: CoordinatorIntent) -> None:
        assert isinstance(intent.request, int)
        self.asked[intent.request] = intent
        self._do(self.core.receive(intent, self.now))

    def begin(self, request: int, **options: object) -> int:
        """The first id; -1: none was given, or not yet."""
        self.ask(BeginTransactions(request, **{"owner": "me", **options}))  # type: ignore[arg-type]
        found = self.answers.get(request)
        return found.first if isinstance(found, BeginAnswer) and found.ids else -1

    def take(self) -> bool:
        """Begins an append."""
        if self.append_now is None:
            self.append_now = self.core.decisions.take_next_append()
            if self.append_now is not None:
                for record in self.append_now.records:
                    if isinstance(record, TransactionsCommitted):
                        self.judge.on_its_way |= {txn for txn, shares in record.txns if shares}
        self.core.check()
        return self.append_now is not None

    def appended(self) -> None:
        assert self.append_now is not None
        append, self.append_now = self.append_now, None
        self._write(append.records)
        self._do(self.core.on_appended(append.number, self.now))

    def _write(self, records: Sequence[AnyCoordinatorRecord]) -> None:
        self.log += deepcopy(list(records))
        self.judge.on_its_way.clear()
        for record in records:
            self.judge.durable(record)

    def flush(self) -> None:
        while self.take():
            self.appended()

    def crash(self, *, lands: int = 0, told: bool = True) -> None:
        """The owner dies; the first records of an append on its way may be durable. `told`: it could still answer."""
        append = self.append_now
        if told:
            self._do(self.core.end_epoch())
        if append is not None:
            self._write(append.records[:lands])
        self._next_epoch()

    def hand_over(self) -> None:
        self.core.decisions.has_ended = True
        if self.append_now is not None:
            self.appended()
        self.flush()
        self._write(self.core.make_next_epoch_records(self.now))
        self._do(self.core.end_epoch())
        self._next_epoch()

    def settle(self, number: int = 0) -> None:
        """A topic stores an outcome and answers."""
        if self.settling:
            each = self.settling.pop(number % len(self.settling))
            self.store(each)
            self._do(self.core.on_outcome_stored(each.txn, each.participant.topic))

    def store(self, each: SendOutcomeToParticipant) -> None:
        before = self.judge.stored.setdefault((each.txn, each.participant.topic), each.committed)
        assert before is each.committed, "a topic is told one outcome"

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self._do(self.core.tick(self.now))

    def heal(self, rounds: int = 12) -> None:
        """Time passes, and every topic answers."""
        for _ in range(rounds):
            self.tick(self.limits.timeout_s_max + self.limits.lease_s + self.limits.prepared_s_max)
            self.core.decisions.append_deferred_records_next()
            self.flush()
            while self.settling:
                self.settle()

    # ------------------------------------------------------------------ effects
    def _do(self, effects: Sequence[CoordinatorEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendOutcomeToParticipant):
                self.judge.told(effect)
                self.settling.append(effect)
            elif isinstance(effect, AbandonEpoch):
                self.gave_up = True
            else:
                self._answered(effect)
        if self.checks:
            self.core.check()

    def _answered(self, answer: AnswerRequest) -> None:
        assert isinstance(answer.request, int)
        assert answer.request not in self.answers, "a request is answered once"
        self.answers[answer.request] = result = answer.result
        intent = self.asked[answer.request]
        if isinstance(result, BeginAnswer) and result.ids:
            self.judge.begun(result)
        if isinstance(intent, AbortIfOpen) and isinstance(result, TransactionRow):
            assert result.state is not TxnState.OPEN, "what was open is aborted"
            self.judge.says(intent.txn, result.state)
        if isinstance(intent, JoinTransaction | EndTransaction | GetTransactionStatus):
            if (
                isinstance(intent, EndTransaction)
                and intent.verb is TransactionEndVerb.COMMIT
                and result is TxnState.COMMITTED
            ):
                self.judge.empty |= {intent.txn} - self.judge.committed if not self._has_topics(intent.txn) else set()
            if isinstance(result, ForgottenOutcome):
                assert isinstance(intent, JoinTransaction), "a client gets an error"
                assert intent.txn < self.judge.forgotten, "forgotten is what is below the watermark"
            elif isinstance(result, TxnState):
                self.judge.says(intent.txn, result)
            elif isinstance(result, TransactionAborted | TransactionFenced):
                self.judge.says(intent.txn, TxnState.ABORTED)
            elif isinstance(result, TransactionForgotten):
                assert intent.txn < self.judge.forgotten, "forgotten is what is below the watermark"
                assert not isinstance(intent, JoinTransaction), "a participant gets an answer, and no error"
            else:
                assert isinstance(result, MagnetarError)

    def _has_topics(self, txn: int) -> bool:
        return any(isinstance(each, JoinTransaction) and each.txn == txn for each in self.asked.values())


def _ids_by_owner(kept: CommittedTransactionIds) -> dict[str, set[int]]:
    """The ids of the committed transactions, by the role that began them; "": without a role."""
    listed = {
        owner: {high << LOW_ID_BITS | low for high, lows in ids.items() for low in lows}
        for owner, ids in {"": kept._free, **kept._of}.items()
    }
    return {owner: ids for owner, ids in listed.items() if ids}


def _plain(state: CoordinatorState) -> tuple[object, ...]:
    return (
        _ids_by_owner(state.kept), state.unsettled, state.prepared,
        dict(state.names.items()), dict(state.sinks.items()), state.last_holder, state.forgotten_below,
        state.halves.open,
        {half: state.halves.find_half_message_outcome(half) for half in state.halves.ended_half_message_ids()},
    )  # fmt: skip
