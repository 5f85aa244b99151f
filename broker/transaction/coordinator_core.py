"""The core of a coordinator in one epoch: which transactions are committed. It decides, and waits for nothing.

    effects = coordinator.receive(EndTransaction(request, txn, TransactionEndVerb.COMMIT, …), now)     an intent
    append = coordinator.decisions.take_next_append()              all records that were decided, in one append
    effects = coordinator.on_appended(append.number, now)          a fact
    effects = coordinator.on_outcome_stored(txn, topic) | tick(now) | end_epoch()

    OPEN ─commit→ COMMITTING ─appended→ COMMITTED ─every participant settled→ done
     │ └─prepare→ PREPARING ─appended→ PREPARED ─commit→ COMMITTING
     │                                  └─abort, deadline→ ABORTING ─appended→ ABORTED ─settled→ done
     └─abort, deadline, fence→ ABORTED (nothing is written) ─settled→ gone

Rules (docs/transactions.md)
- **Commit is a record.** A transaction is committed when its record is durable. It is aborted when there is no such
  record and none can come. So the answer is ABORTED for an id of this epoch that is in no table, and for an id of an
  earlier epoch without a record: the coordinator of that epoch cannot append any more.
- **Doubt.** While a record of a transaction is in flight, no intent about its id is answered: intents wait in
  `waiting_intents`, and are handled when the record is durable. If the outcome of the append is unknown, `end_epoch`
  answers them without an outcome, and the next epoch reads the ledger.
- **One decision.** Ids are unique, and a decision moves the transaction out of the phases in which it may be decided.
  All of this runs in one event loop, so two requests to commit make one record.
- **Settling.** A durable outcome is kept until each participant has stored it (`TransactionsSettled`), and for
  `retention_s` after that: `tick` records the lowest unsettled id, and discards the outcomes below it after that time.
  A participant that asks later is told that the outcome is discarded. If it does not know the outcome, and has lost
  none that it stored, there was no commit: a commit is settled only after each participant has stored it. If it may
  have lost some, it decides nothing (invariant 87).
- **Time** is monotonic; deadlines begin anew in a new epoch and are never shortened.

`TransactionCoordinatorCore` has an object for each idea: the table of ids (state_core.py); what is decided, and
outcomes (outcomes_core.py); joins and ends, batches of sinks, begins and names (begins_core.py); half messages
(halves_core.py). This module gives each intent to one of them, applies durable records, and handles deadlines.
Guards: tests/broker/transaction/.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import assert_never

from ...proto.errors import MagnetarError, NotOwner, OutcomeUnknown
from ...proto.states import COUNTER_BITS, TxnState
from .begins_core import IDS_PER_BLOCK_MAX, SinkBatchDecider, TransactionBeginDecider, TransactionEndDecider
from .halves_core import HalfMessageCore, IntentQueuedUntilDurable
from .intents_core import (
    AbortByAdmin,
    AbortIfOpen,
    AbortReason,
    AnswerRequest,
    BeginTransactions,
    ChangeHalf,
    CommitSinkBatch,
    CoordinatorEffect,
    CoordinatorIntent,
    CoordinatorLimits,
    EndHalf,
    EndTransaction,
    GetTransactionStatus,
    IntentResult,
    JoinTransaction,
    PrepareHalf,
    RemoveParticipant,
    WatchHalves,
)
from .outcomes_core import OutcomeDecider, PendingDecision, PendingDecisions
from .records_core import (
    AnyCoordinatorRecord,
    EpochHandedOver,
    HalfMessageAgeRecorded,
    HalfMessageRolledBack,
    HalfMessageStored,
    HandedOverIdLease,
    HandedOverTransaction,
    NameHolderChanged,
    OutcomesDiscarded,
    Participant,
    ParticipantDetached,
    PreparedTransactionAborted,
    TransactionOwner,
    TransactionPrepared,
    TransactionsCommitted,
    TransactionsSettled,
    decode_participants,
    make_commit_record,
)
from .state_core import (
    IN_DOUBT_PHASES,
    CoordinatorState,
    LiveTransaction,
    TransactionIdLease,
    TransactionPhase,
    TransactionTable,
    txn_state_of_table_entry,
)

LOWEST_ID_RECORDS_PER_PERIOD = 8
"""How often per `retention_s` the lowest unsettled id is recorded."""
HANDOVER_RECORD_ITEMS_MAX = 500
"""Most open transactions, and most leases, in one record of a hand-over."""


class TransactionCoordinatorCore:
    """The core of a transaction coordinator, in one epoch. `state`: the state that was read from the coordinator's
    ledger. From then on only this object applies records to `state`. In all methods `now` is in monotonic seconds."""

    def __init__(
        self,
        number: int,
        epoch: int,
        state: CoordinatorState,
        limits: CoordinatorLimits,
        now: float,
        gap: Callable[[], int],
    ) -> None:
        """Begins an epoch. `gap`: returns a random number: so many ids are left out before the next ids are given, so
        that ids cannot be guessed."""
        self.state = state
        self.table = TransactionTable(
            number, epoch, state, limits, lambda half, owner: self.halves.has_other_owner(half, owner)
        )
        self.decisions = PendingDecisions()
        self.outcomes = OutcomeDecider(self.table, self.decisions, self._receive)
        self.ends = TransactionEndDecider(self.table, self.decisions, self.outcomes)
        self.batches = SinkBatchDecider(self.table, self.decisions, self.outcomes, self.ends, now)
        self.begins = TransactionBeginDecider(self.table, self.decisions, self.outcomes, self.batches, now, gap)
        self._marks: deque[tuple[float, int]] = deque()
        self.halves = HalfMessageCore(state.halves, limits.halves, self, epoch, now)

    # ------------------------------------------------------------------ intents
    def start(self, now: float) -> list[CoordinatorEffect]:
        """Resumes the transactions of earlier epochs. Returns the first effects: send the outcomes that those epochs
        decided."""
        for handed in self.state.handed:
            if handed.epoch == self.table.epoch - 1:
                self._take_handed(handed, now)
        self.state.handed.clear()
        for txn, prepared in self.state.prepared.items():
            live = LiveTransaction(txn, prepared.owned, now, now + prepared.left_s, TransactionPhase.PREPARED)
            live.participants = {each.topic: each for each in prepared.participants}
            self.table.add_transaction(live)
        for txn, outcome in self.state.unsettled.items():
            self.outcomes.send_outcome(txn, outcome.committed, outcome.waiting.values(), None, now, is_durable=True)
        self.halves.start(now)
        return self.decisions.take_effects()

    def _take_handed(self, handed: EpochHandedOver, now: float) -> None:
        for txn, owned, topics in handed.opened:
            live = LiveTransaction(txn, owned, now, now + owned.timeout_s)
            live.participants = {topic: Participant(topic) for topic in topics}
            self.table.add_transaction(live)
        for txns, owned in handed.leases:
            self.table.add_lease(txns, owned, now)

    def receive(self, intent: CoordinatorIntent, now: float) -> list[CoordinatorEffect]:
        """Decides about the intent, and returns the effects. The answer to the intent is among these effects, or among
        the effects of a later call. After the end of the epoch the answer is NotOwner."""
        if self.decisions.has_ended:
            return [
                AnswerRequest(intent.request, NotOwner(f"coordinator {self.table.number} is moving; look it up again"))
            ]
        self._receive(intent, now)
        return self.decisions.take_effects()

    def _receive(self, intent: CoordinatorIntent, now: float) -> None:
        try:
            match intent:
                case BeginTransactions():
                    self.begins.begin_transactions(intent, now)
                case JoinTransaction():
                    self.decisions.answer_intent(intent, self.ends.join_transaction(intent, now))
                case EndTransaction():
                    self.ends.end_transaction(intent, now)
                case CommitSinkBatch():
                    self.batches.commit_batch(intent, now)
                case GetTransactionStatus():
                    self.decisions.answer_intent(intent, self._status(intent, now))
                case AbortByAdmin():
                    self.ends.abort_by_admin(intent, now)
                case AbortIfOpen():
                    self.ends.abort_if_open(intent, now)
                case RemoveParticipant():
                    self.ends.remove_participant(intent)
                case PrepareHalf() | EndHalf() | ChangeHalf() | WatchHalves():
                    self.halves.receive(intent, now)
                case _:
                    assert_never(intent)
        except IntentQueuedUntilDurable:
            pass
        except MagnetarError as error:
            self.decisions.answer_intent(intent, error)

    def _status(self, intent: GetTransactionStatus, now: float) -> TxnState:
        self.table.check_owner(intent.txn, intent.owner)
        if intent.txn in self.table.unused:
            return TxnState.OPEN
        if (half := self.halves.find_half_message_state(intent.txn, intent, intent.owner)) is not None:
            return half
        found = self.outcomes.find_transaction_not_in_doubt(intent.txn, intent, now, intent.owner)
        if found is TxnState.ABORTED and intent.txn < self.state.forgotten_below:
            raise self.table.make_transaction_forgotten_error(intent.txn)
        return txn_state_of_table_entry(found)

    # ------------------------------------------------------------------ of halves (halves_core.py)
    def check_half_message_id(self, half: int) -> None:
        """Raises NotOwner if the id belongs to a later epoch; InvalidRequest if it was never given to a client. Called
        by HalfMessageCore, as are the following methods for half messages."""
        if half >> COUNTER_BITS > self.table.epoch:
            raise NotOwner(f"coordinator {self.table.number} has a later epoch elsewhere; look it up again")
        if half >= self.table.next_id:
            raise self.table.make_unknown_id_error(half)

    def claim_half_message_id(self, half: int, now: float) -> bool:
        """Removes the leased id from the unused ones, so that a half message can have it, and returns True. Returns
        False if the id is not leased, or its lease is over. Raises the errors of `check_half_message_id`."""
        self.check_half_message_id(half)
        lease = self.table.unused.get(half)
        if lease is None:
            return False
        if lease.until <= now:
            self.outcomes.abort_or_void_id(half, AbortReason.LEASE, now)
            return False
        del self.table.unused[half]
        self.table.remove_from_indexes(half, lease.owned)
        return True

    def begin_transaction_for_half_message(self, owner: str, timeout_s: float, now: float) -> int:
        """Opens a transaction for the role `owner`, which times out after `timeout_s` seconds, and returns its id. If
        this epoch has no ids left, raises NotOwner; Unavailable if no further epoch is possible."""
        txn = self.begins.reserve_transaction_ids(1)
        self.table.add_transaction(LiveTransaction(txn, TransactionOwner(owner, timeout_s), now, now + timeout_s))
        return txn

    def commit_transaction_for_half_message(
        self, txn: int, listed: Sequence[Participant], half: int, now: float
    ) -> None:
        """Decides to commit the open transaction `txn`, and with it the half message. `listed`: its topics, each with
        the number of its entries. Raises TransactionAborted if the transaction is not open any more, or lacks one of
        the topics; InvalidRequest as `TransactionEndDecider.match_reported_participants` does."""
        live = self.table.live.get(txn)
        if live is None or live.phase is not TransactionPhase.OPEN:
            raise self.table.make_abort_error(txn)
        found = self.ends.match_reported_participants(live, listed, now)
        live.phase, live.participants = TransactionPhase.COMMITTING, {each.topic: each for each in found}
        self.decisions.append_decision(make_commit_record({txn: found}, half=half, owner=live.owned.owner), None)

    def abort_transaction_for_half_message(self, txn: int, now: float) -> None:
        """Aborts the transaction if it is open; else does nothing."""
        live = self.table.live.get(txn)
        if live is not None and live.phase is TransactionPhase.OPEN:
            self.outcomes.abort_transaction(live, AbortReason.FAILED, now)

    # ------------------------------------------------------------------ what is durable
    def on_appended(self, number: int, now: float) -> list[CoordinatorEffect]:
        """Called when the records of append `number` are durable. Applies them to the state, and returns the
        effects."""
        decisions = self.decisions.take_durable_decisions(number)
        self.table.counters.records += len(decisions)
        for decision in decisions:
            self._on_durable(decision, now)
        return self.decisions.take_effects()

    def on_outcome_stored(self, txn: int, topic: str) -> list[CoordinatorEffect]:
        """Called when the topic has stored the outcome of the transaction. Returns the effects. A repeated call does
        nothing."""
        self.outcomes.on_outcome_stored(txn, topic)
        return self.decisions.take_effects()

    def _on_durable(self, decision: PendingDecision, now: float) -> None:
        record, intent = decision
        self.state.apply(record)
        match record:
            case TransactionsCommitted():
                self._durable_commit(record, intent, now)
            case TransactionPrepared():
                live = self.table.live[record.txn]
                live.phase, live.deadline = TransactionPhase.PREPARED, now + record.left_s
                heapq.heappush(self.table.deadlines, (live.deadline, live.txn))
                self.outcomes.abort_if_superseded(live, now)
                self.outcomes.handle_queued_intents(live, now)
            case PreparedTransactionAborted():
                live = self.table.live[record.txn]
                self.table.remove_transaction(live)
                self.outcomes.record_aborted_end(live, now, is_durable=True)
                self.outcomes.handle_queued_intents(live, now)
            case NameHolderChanged() if intent is not None:
                assert isinstance(intent, BeginTransactions), "a name is taken by a begin"
                self.begins.on_name_holder_changed(record, intent, now)
            case ParticipantDetached():
                assert intent is not None, "a participant is detached by an administrator"
                self.outcomes.on_outcome_stored(record.txn, record.topic)
                self.decisions.answer_intent(intent, None)
            case TransactionsSettled():
                for txn in record.txns:
                    self.table.ending.pop(txn, None)
            case HalfMessageStored() | HalfMessageAgeRecorded() | HalfMessageRolledBack():
                self.halves.on_record_durable(record, now)

    def _durable_commit(self, record: TransactionsCommitted, intent: CoordinatorIntent | None, now: float) -> None:
        ended = []
        for txn, shares in record.txns:
            live = self.table.live.get(txn)
            if live is None:
                continue  # it was empty, and is counted
            self.table.remove_transaction(live)
            waiting = decode_participants(record, shares)
            self.outcomes.send_outcome(txn, True, waiting, live.owned, live.began, is_durable=True)
            self.table.counters.committed += 1
            self.table.counters.count_ended_transaction(now - live.began)
            ended.append(live)
        if intent is not None:
            self.decisions.answer_intent(intent, False)
        for live in ended:
            self.outcomes.handle_queued_intents(live, now)
        if record.sink is not None:
            self.batches.on_committed(record.sink, now)
        if record.half:
            self.halves.remove_half_message(record.half, "committed", now)

    # ------------------------------------------------------------------ time
    def tick(self, now: float) -> list[CoordinatorEffect]:
        """Aborts the transactions whose deadline has passed, and discards old outcomes. Returns the effects. The driver
        must call this method about once a second."""
        if self.decisions.has_ended:
            return []
        while self.table.deadlines and self.table.deadlines[0][0] <= now:
            _, txn = heapq.heappop(self.table.deadlines)
            self._on_deadline(txn, now)
        if len(self.table.deadlines) > 2 * (len(self.table.live) + len(self.table.unused)) + 1000:
            self.table.deadlines = [(each.deadline, txn) for txn, each in self.table.live.items()]
            self.table.deadlines += [(each.until, txn) for txn, each in self.table.unused.items()]
            heapq.heapify(self.table.deadlines)
        self._expire_outcomes(now)
        self.halves.tick(now)
        return self.decisions.take_effects()

    def _on_deadline(self, txn: int, now: float) -> None:
        lease, live = self.table.unused.get(txn), self.table.live.get(txn)
        if lease is not None and lease.until <= now:
            self.outcomes.abort_or_void_id(txn, AbortReason.LEASE, now)
        elif live is not None and live.deadline <= now and live.phase not in IN_DOUBT_PHASES:
            self.outcomes.abort_transaction(live, AbortReason.TIMEOUT, now)

    def _expire_outcomes(self, now: float) -> None:
        limits = self.table.limits
        if not self._marks or now - self._marks[-1][0] >= limits.retention_s / LOWEST_ID_RECORDS_PER_PERIOD:
            self._marks.append((now, self.table.lowest_unsettled_id))
        below = self.state.forgotten_below
        while self._marks and now - self._marks[0][0] >= limits.retention_s:
            below = max(below, self._marks.popleft()[1])
        is_decided = any(isinstance(each.record, OutcomesDiscarded) for each in self.decisions.deferred)
        if below > self.state.forgotten_below and not is_decided:
            self.decisions.defer_record(OutcomesDiscarded(below))
        self.begins.expire_idle_names_and_sinks(now)

    # ------------------------------------------------------------------ the end of the epoch
    def end_epoch(self) -> list[CoordinatorEffect]:
        """Ends the epoch, and returns the effects. Answers every waiting request with OutcomeUnknown or NotOwner: the
        next epoch reads from the ledger what was decided."""
        self.decisions.has_ended = True
        waiting: list[CoordinatorIntent] = [
            intent for live in self.table.live.values() for intent in live.waiting_intents
        ]
        undecided = (*self.decisions.gathered, *self.decisions.writing)
        waiting += [each.intent for each in undecided if each.intent is not None]
        waiting += [intent for intents in self.batches.in_doubt.values() for intent in intents]
        waiting += self.halves.take_waiting_intents()
        unknown = OutcomeUnknown(f"coordinator {self.table.number} is moving: ask it again")
        nothing = NotOwner(f"coordinator {self.table.number} is moving; look it up again")
        answers: dict[object, IntentResult] = {
            intent.request: nothing
            if isinstance(intent, JoinTransaction | GetTransactionStatus | AbortIfOpen)
            else unknown
            for intent in waiting
        }
        answers |= {request: unknown for ending in self.table.ending.values() for request in ending.waiting_requests}
        self.decisions.effects += [AnswerRequest(request, result) for request, result in answers.items()]
        for live in self.table.live.values():
            live.waiting_intents = []
        for ending in self.table.ending.values():
            ending.waiting_requests.clear()
        self.batches.in_doubt.clear()
        return self.decisions.take_effects()

    def make_next_epoch_records(self, now: float) -> list[AnyCoordinatorRecord]:
        """Returns the records that hand this epoch's open transactions and leases over to the next epoch. `has_ended`
        must be True, and no append may be in flight. The coordinator must decide nothing after this call."""
        assert self.decisions.has_ended, "nothing is decided after a hand-over"
        assert not [*self.decisions.writing, *self.decisions.gathered], "nothing is in doubt at a hand-over"
        opened = [
            HandedOverTransaction(txn, live.owned, list(live.participants))
            for txn, live in self.table.live.items() if live.phase is TransactionPhase.OPEN
        ]  # fmt: skip
        grouped: dict[int, tuple[TransactionIdLease, list[int]]] = {}
        for txn, lease in self.table.unused.items():
            grouped.setdefault(id(lease), (lease, []))[1].append(txn)
        leases = [HandedOverIdLease(txns, lease.owned) for lease, txns in grouped.values()]
        records: list[AnyCoordinatorRecord] = [
            *(each.record for each in self.decisions.deferred),
            *self.halves.make_half_message_age_records(now),
            *self.begins.make_idle_time_records(now),
        ]
        for start in range(0, max(len(opened), len(leases)), HANDOVER_RECORD_ITEMS_MAX):
            end = start + HANDOVER_RECORD_ITEMS_MAX
            records.append(EpochHandedOver(self.table.epoch, opened[start:end], leases[start:end]))
        return records

    # ------------------------------------------------------------------ views
    @property
    def is_idle(self) -> bool:
        """Returns True if the coordinator has nothing to do until a client asks: no transaction is open, prepared or
        unsettled, and no half message must be checked. Then no broker needs to load it."""
        table = self.table
        open_ = table.live or table.unused or table.ending or self.state.unsettled or self.state.prepared
        return not open_ and self.state.halves.is_idle

    def statistics(self) -> dict[str, int]:
        """Returns the present numbers of transactions and half messages, and the numbers of commits and aborts since
        the take-over, by name."""
        prepared = sum(live.phase is TransactionPhase.PREPARED for live in self.table.live.values())
        return {
            "open": len(self.table.live) - prepared,
            "leased": len(self.table.unused),
            "prepared": prepared,
            "unsettled": len(self.table.ending),
            "committed": self.table.counters.committed,
            "aborted": sum(self.table.counters.aborted.values()),
            **{f"halves_{name}": count for name, count in self.halves.statistics().items()},
        }

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken. The messages of the assertions are the invariants."""
        self.state.check()
        self.halves.check()
        own = {txn for txn in (*self.table.live, *self.table.unused) if txn >> COUNTER_BITS == self.table.epoch}
        assert all(txn < self.table.next_id for txn in own), "every id was given before it is used"
        assert not self.table.live.keys() & self.table.unused.keys(), "an id is leased or used"
        assert not self.table.live.keys() & self.table.ending.keys(), "a transaction has an outcome or not"
        for txn, live in self.table.live.items():
            assert not self.state.is_committed(txn), "a live transaction has no outcome"
            assert (live.phase in IN_DOUBT_PHASES) or not live.waiting_intents, "only what is in doubt waits"
            assert (txn in self.state.prepared) is (
                live.phase in (TransactionPhase.PREPARED, TransactionPhase.ABORTING)
                or (live.phase is TransactionPhase.COMMITTING and txn in self.state.prepared)
            ), "prepared is durable"
        written = [each.record for each in (*self.decisions.gathered, *self.decisions.writing)]
        doubt = {txn for record in written if isinstance(record, TransactionsCommitted) for txn, _ in record.txns}
        doubt |= {
            record.txn for record in written if isinstance(record, TransactionPrepared | PreparedTransactionAborted)
        }
        in_doubt = {txn for txn, live in self.table.live.items() if live.phase in IN_DOUBT_PHASES}
        assert doubt & self.table.live.keys() == in_doubt, "in doubt is what is on its way"
        for txn, ending in self.table.ending.items():
            assert ending.committed is self.state.is_committed(txn), "committed is durable"
        assert len(self.table.live) + len(self.table.unused) <= self.table.limits.open_max + IDS_PER_BLOCK_MAX, (
            "the bound holds"
        )
