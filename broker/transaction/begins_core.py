"""Begins of transactions (`TransactionBeginDecider`): a client gets transaction ids in blocks, within the bounds of its
role. Also in this file, each below its heading: the participants of a transaction, and who may end it (ends_core);
batches of sinks (batches_core).

A block begins after a gap of random length, so that no caller can guess other ids from one id. An id that is not used
within `lease_s` seconds is void. A begin with a name and without a holder takes the name over, which is a record; from
then on only this holder may use the name. The open transactions of earlier holders are aborted when this is decided,
and again when it is durable. Names and sinks belong to a role (state_core.py). A name without a begin for `name_idle_s`
seconds is removed, and so is a sink without a begin or a batch for `sink_idle_s`. Holder numbers only grow, so none is
given twice. Idle times are recorded at a hand-over, and IDLE_RECORDS_PER_PERIOD times per `name_idle_s` or
`sink_idle_s`; the next owner continues from the recorded time. Guards:
tests/broker/transaction/test_names_and_sinks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from ...proto.errors import (
    BackPressure,
    InvalidRequest,
    MagnetarError,
    NotFound,
    NotOwner,
    SinkFenced,
    TransactionAborted,
    TransactionEnded,
    Unavailable,
)
from ...proto.states import COUNTER_BITS, ForgottenOutcome, TxnState
from .halves_core import IntentQueuedUntilDurable
from .intents_core import (
    NAME_CHARACTERS_MAX,
    AbortByAdmin,
    AbortIfOpen,
    AbortReason,
    BeginAnswer,
    BeginTransactions,
    CommitSinkBatch,
    CoordinatorIntent,
    EndTransaction,
    JoinTransaction,
    RemoveParticipant,
    TransactionEndVerb,
)
from .outcomes_core import OutcomeDecider, PendingDecisions
from .records_core import (
    DISCARDED_BATCH_NUMBER,
    AnyCoordinatorRecord,
    IdleNamesRemoved,
    NameHolderChanged,
    Participant,
    ParticipantDetached,
    SinkBatch,
    SinkBatchRecorded,
    SinkBatchTag,
    TransactionOwner,
    TransactionPrepared,
    make_commit_record,
)
from .state_core import (
    COUNTER_MAX,
    EPOCH_MAX,
    IN_DOUBT_PHASES,
    LiveTransaction,
    OwnerAndName,
    TransactionPhase,
    TransactionTable,
    UnsettledTransaction,
    txn_state_of_table_entry,
)

# ----------------------------------------------------------------------------------------------------- ends_core
# The participants of a transaction, and who may end it: its client, an administrator, or a topic that is deleted.
#
# A topic joins before it stores an operation of the transaction. The end names what each participant stored, and a
# participant that never joined means that something is lost: the transaction is aborted. A repeated end gets the answer
# of the first one; an end in doubt waits (outcomes_core.py). A role may end, and write in, only transactions that it
# began: for those of another role it gets the answer for an id that was never given (state_core.py).
# Guards: tests/broker/transaction/test_coordinator_walk.py.


COMMIT_RECORD_BYTES_MAX = 4 << 20
"""Largest estimated size of a commit record in bytes: a record must fit into one entry of the ledger."""


class TransactionEndDecider:
    """Decides requests of topics to join a transaction, and requests to commit, prepare or abort one. A transaction is
    *in doubt* while a record about it is being written: requests about it then wait. In all methods `now` is in
    monotonic seconds."""

    def __init__(self, table: TransactionTable, decisions: PendingDecisions, outcomes: OutcomeDecider) -> None:
        self._table = table
        self._decisions = decisions
        self._outcomes = outcomes

    # ------------------------------------------------------------------ join
    def join_transaction(self, intent: JoinTransaction, now: float) -> TxnState | ForgottenOutcome:
        """Makes the topic that `intent` names a participant of the transaction, and returns the state of the
        transaction. If the topic is empty, only starts the timeout of the transaction. Raises TransactionEnded if the
        transaction is prepared; InvalidRequest if it has its maximum of topics, or another role began it; the errors of
        `OutcomeDecider.find_transaction`; IntentQueuedUntilDurable while it is in doubt. If the transaction has an
        outcome, only returns that; a ForgottenOutcome if the outcome was discarded."""
        found = self._outcomes.find_transaction_not_in_doubt(intent.txn, intent, now, intent.owner)
        if isinstance(found, LiveTransaction) and intent.topic:
            self._add_participant(found, intent.topic)
        if found is TxnState.ABORTED and intent.txn < self._table.state.forgotten_below:
            return ForgottenOutcome.DISCARDED
        return txn_state_of_table_entry(found)

    def _add_participant(self, live: LiveTransaction, topic: str) -> None:
        if topic in live.participants:
            return
        if live.phase is TransactionPhase.PREPARED:
            raise TransactionEnded(f"{self._table.make_txn_id(live.txn)} is prepared: nothing may be added")
        if (count := len(live.participants)) >= self._table.limits.participants_max:
            raise InvalidRequest(f"{self._table.make_txn_id(live.txn)} has {count} topics: no more may join")
        live.participants[topic] = Participant(topic)

    def join_transaction_nowait(self, txn: int, topic: str, owner: str | None, now: float) -> bool:
        """Makes the topic a participant of the transaction, and returns True. Returns False if that is not possible
        now: then the caller must send the intent JoinTransaction, which waits while the transaction is in doubt, or is
        refused with a reason. `owner`: the role that writes in the transaction; None: the topic itself asks."""
        if self._decisions.has_ended:
            return False
        try:
            found = self._outcomes.find_transaction(txn, now, owner)
            if not isinstance(found, LiveTransaction) or found.phase in IN_DOUBT_PHASES:
                return False
            self._add_participant(found, topic)
        except MagnetarError:
            return False
        return True

    # ------------------------------------------------------------------ ends
    def end_transaction(self, intent: EndTransaction, now: float) -> None:
        """Commits, prepares or aborts the transaction that `intent` names. The intent is answered when the outcome is
        durable; an abort of an open transaction at once. Raises InvalidRequest, TransactionAborted, TransactionFenced
        or TransactionForgotten if the transaction cannot be ended so; the errors of `OutcomeDecider.find_transaction`;
        IntentQueuedUntilDurable while it is in doubt."""
        found = self._outcomes.find_transaction_not_in_doubt(intent.txn, intent, now, intent.owner)
        if isinstance(found, LiveTransaction):
            self._end_live(found, intent, now)
        elif isinstance(found, UnsettledTransaction) and _is_to_wait(found, intent):
            found.waiting_requests.append(intent.request)
        else:
            self._decisions.answer_intent(intent, self._answer_ended(intent, txn_state_of_table_entry(found)))

    def _answer_ended(self, intent: EndTransaction, state: TxnState) -> TxnState:
        """Returns the answer to an intent to end a transaction that has ended already: its state, if the transaction is
        committed, or if `intent` is an abort. Otherwise raises the reason of the abort; TransactionForgotten if the
        outcome was discarded."""
        is_known = intent.txn >= self._table.state.forgotten_below
        if state is TxnState.COMMITTED or (intent.verb is TransactionEndVerb.ABORT and is_known):
            return state
        raise self._table.make_abort_error(intent.txn)

    def _end_live(self, live: LiveTransaction, intent: EndTransaction, now: float) -> None:
        if intent.verb is TransactionEndVerb.ABORT:
            self._outcomes.abort_transaction(live, AbortReason.CLIENT, now)
            if live.phase is TransactionPhase.ABORTING:
                live.waiting_intents.append(intent)
            else:
                self._outcomes.handle_intents([intent], now)
            return
        if intent.verb is TransactionEndVerb.COMMIT and live.owned.tag is not None:
            raise InvalidRequest(f"{self._table.make_txn_id(live.txn)} is of a sink: it commits with its batch")
        if intent.verb is TransactionEndVerb.PREPARE and live.phase is TransactionPhase.PREPARED:
            self._decisions.answer_intent(intent, TxnState.PREPARED)
            return
        self._table.check_name_holder(live.owned.owner, live.owned.name, live.owned.holder)
        listed = self.match_reported_participants(live, intent.participants, now)
        if intent.verb is TransactionEndVerb.PREPARE:
            live.phase = TransactionPhase.PREPARING
            left_s = min(intent.prepared_s or self._table.limits.prepared_s_max, self._table.limits.prepared_s_max)
            self._decisions.append_decision(TransactionPrepared(live.txn, live.owned, listed, left_s))
        elif not listed and live.phase is TransactionPhase.OPEN:
            self._outcomes.commit_without_participants(live, now)
            self._outcomes.handle_intents([intent], now)
            return
        else:
            live.phase = TransactionPhase.COMMITTING
            self._decisions.append_decision(make_commit_record({live.txn: listed}, owner=live.owned.owner))
        live.participants = {each.topic: each for each in listed}
        live.waiting_intents.append(intent)

    def match_reported_participants(
        self, live: LiveTransaction, listed: Sequence[Participant], now: float
    ) -> list[Participant]:
        """Returns the topics that have joined the transaction, each with the number of entries that the client reports
        in `listed`. The number is 0 for a topic that the client does not report; it is -1 (not known) for all topics if
        `listed` is empty. If the client reports entries in a topic that has not joined, data is lost: then aborts the
        transaction and raises TransactionAborted. Raises InvalidRequest if the participants are too many for one
        record."""
        if not listed:
            return list(live.participants.values())
        said = {each.topic: each for each in listed}
        strange = [each.topic for each in listed if each.entries and each.topic not in live.participants]
        if strange:
            self._outcomes.abort_transaction(live, AbortReason.FAILED, now)
            raise TransactionAborted(
                f"{self._table.make_txn_id(live.txn)} is aborted: topic {strange[0]} has not joined it",
                reason=AbortReason.FAILED.value,
            )
        found = [said.get(topic) or Participant(topic, 0) for topic in live.participants]
        size = sum(len(each.topic) + 100 for each in found)
        if size > COMMIT_RECORD_BYTES_MAX:
            why = f"a commit of {len(found)} participants is larger than {COMMIT_RECORD_BYTES_MAX} bytes"
            raise InvalidRequest(why)
        return found

    # ------------------------------------------------------------------ of an administrator
    def abort_by_admin(self, intent: AbortByAdmin, now: float) -> None:
        """Aborts the transaction that `intent` names, because an administrator asks for that. Answers the intent with
        the state of the transaction, when it is durable. Raises TransactionForgotten if the outcome was discarded; the
        errors of `OutcomeDecider.find_transaction`; IntentQueuedUntilDurable while the transaction is in doubt."""
        if intent.txn in self._table.unused:
            self._outcomes.abort_or_void_id(intent.txn, AbortReason.ADMIN, now)
        found = self._outcomes.find_transaction_not_in_doubt(intent.txn, intent, now)
        if isinstance(found, LiveTransaction):
            self._outcomes.abort_transaction(found, AbortReason.ADMIN, now)
            if found.phase is TransactionPhase.ABORTING:
                found.waiting_intents.append(intent)
                return
            found = TxnState.ABORTED
        if found is TxnState.ABORTED and intent.txn < self._table.state.forgotten_below:
            raise self._table.make_transaction_forgotten_error(intent.txn)
        self._decisions.answer_intent(intent, txn_state_of_table_entry(found))

    def abort_if_open(self, intent: AbortIfOpen, now: float) -> None:
        """Aborts the transaction that `intent` names, if it is open; not if it is prepared. Answers the intent with a
        TransactionRow that describes the transaction afterwards. Raises IntentQueuedUntilDurable while the transaction
        is in doubt; and the errors of `OutcomeDecider.find_transaction`, such as InvalidRequest for an id that was
        never given."""
        found = self._outcomes.find_transaction_not_in_doubt(intent.txn, intent, now)
        if isinstance(found, LiveTransaction) and found.phase is TransactionPhase.OPEN:
            self._outcomes.abort_transaction(found, AbortReason.DELETED, now)
        row = self._table.transaction_row(intent.txn, now)
        assert row is not None, "it is none of those that were never used"
        self._decisions.answer_intent(intent, row)

    def remove_participant(self, intent: RemoveParticipant) -> None:
        """Removes a topic from an ended transaction whose outcome the topic cannot store, and answers the intent with
        None when that is durable. Raises NotFound if the transaction does not wait for this topic."""
        ending = self._table.ending.get(intent.txn)
        if ending is None or intent.topic not in ending.waiting:
            raise NotFound(f"{self._table.make_txn_id(intent.txn)} does not wait for {intent.topic}")
        if ending.is_durable:
            self._decisions.append_decision(ParticipantDetached(intent.txn, intent.topic), intent)
        else:
            self._outcomes.on_outcome_stored(intent.txn, intent.topic)
            self._decisions.answer_intent(intent, None)


def _is_to_wait(ending: UnsettledTransaction, intent: EndTransaction) -> bool:
    return intent.visible and bool(ending.waiting) and ending.committed is (intent.verb is TransactionEndVerb.COMMIT)


# -------------------------------------------------------------------------------------------------- batches_core
# Batches of sinks: the transactions of a batch commit together, and each batch of a sink once.
#
# A sink is written by one query, in batches whose numbers grow. The record that commits the transactions of a batch
# names it, so a batch that a query repeats after a crash is known. A sink is of a role: what another role commits under
# that id is another sink (state_core.py). A sink that was not used for `sink_idle_s` is forgotten (begins_core.py).
# All other transactions for that batch or an earlier one, or for another query, are aborted. While a batch of a sink is
# in doubt, intents about the sink wait. Guards: tests/broker/transaction/test_names_and_sinks.py.


class SinkBatchDecider:
    """Decides the requests to commit batches of a sink (the writer of a query). Each numbered batch of a sink is
    committed at most once. In all methods `now` is in monotonic seconds."""

    def __init__(
        self, table: TransactionTable, decisions: PendingDecisions, outcomes: OutcomeDecider,
        ends: TransactionEndDecider,
        now: float
    ) -> None:
        self._table = table
        self._decisions = decisions
        self._outcomes = outcomes
        self._ends = ends
        # by sink: what waits for the batch that is being committed
        self.in_doubt: dict[OwnerAndName, list[CoordinatorIntent]] = {}
        self.last_used_times = {key: now - each.idle_s for key, each in table.state.sinks.items()}

    def has_committed_batch(self, intent: BeginTransactions | CommitSinkBatch, tag: SinkBatchTag, now: float) -> bool:
        """Returns True if the sink has committed the batch `tag` already. Raises InvalidRequest if the number of the
        batch is negative; BackPressure if there are too many sinks; SinkFenced if another query writes the sink and
        `intent.adopt` is False; IntentQueuedUntilDurable while another batch of the sink is being committed."""
        owner, limits = intent.owner, self._table.limits
        if tag.batch < 0:
            raise InvalidRequest(f"the batches of a sink have numbers from 0, and not {tag.batch}")
        waiting = self.in_doubt.get((owner, tag.sink_id))
        if waiting is not None:
            waiting.append(intent)
            raise IntentQueuedUntilDurable
        sinks = self._table.state.sinks
        if not sinks.has_room(owner, tag.sink_id, limits.sinks_max, limits.sinks_per_role_max):
            raise BackPressure(
                f"coordinator {self._table.number} knows as many sinks as it may, of all roles or of this one"
            )
        stored = sinks.find(owner, tag.sink_id)
        if stored is None:
            return False
        self.last_used_times[sinks.make_key(owner, tag.sink_id)] = now
        if stored.query_id != tag.query_id:
            if not intent.adopt:
                raise SinkFenced(
                    f"sink {tag.sink_id!r} is written by query {stored.query_id!r}, not {tag.query_id!r}: "
                    "use another sinkId, or onNewCheckpoint=adopt"
                )
            return False
        return tag.batch <= stored.batch

    def commit_batch(self, intent: CommitSinkBatch, now: float) -> None:
        """Commits the transactions that `intent` names, all of them or none. If the intent names a sink, they are a
        batch of this sink. Answers the intent with True if the sink had committed the batch before; else with False,
        when the commit is durable. Raises TransactionEnded if some of the transactions are committed already; the
        errors of `has_committed_batch` and of `OutcomeDecider.find_transaction`; InvalidRequest if a name is too long
        or the batch too large; IntentQueuedUntilDurable if the decision waits for a record; else the reason why a
        transaction cannot be committed."""
        sink = None
        if intent.sink_id:
            tag = SinkBatchTag(intent.sink_id, intent.query_id, intent.batch)
            if max(len(tag.sink_id), len(tag.query_id)) > NAME_CHARACTERS_MAX:
                raise InvalidRequest(f"names of sinks and queries have at most {NAME_CHARACTERS_MAX} characters")
            if self.has_committed_batch(intent, tag, now):
                self._decisions.answer_intent(intent, True)
                return
            sink = SinkBatch(intent.sink_id, intent.query_id, intent.batch, intent.owner)
        found = {
            txn: self._outcomes.find_transaction_not_in_doubt(txn, intent, now, intent.owner) for txn in intent.txns
        }
        done = [txn for txn, each in found.items() if txn_state_of_table_entry(each) is TxnState.COMMITTED]
        if done and sink is None and len(done) == len(found):
            self._decisions.answer_intent(intent, False)
            return
        if done:
            raise TransactionEnded(f"{self._table.make_txn_id(done[0])} is committed already, without the others")
        live = [each for each in found.values() if isinstance(each, LiveTransaction)]
        for txn in found:
            if txn not in self._table.live:
                raise self._table.make_abort_error(txn)
        self._check_batch(intent, live)
        shares = {each.txn: self._ends.match_reported_participants(each, intent.txns[each.txn], now) for each in live}
        if sum(len(each) for each in shares.values()) * 40 > COMMIT_RECORD_BYTES_MAX:
            raise InvalidRequest(f"a batch of {len(shares)} transactions has too many participants for one record")
        for each in live:
            each.phase = TransactionPhase.COMMITTING
            each.participants = {share.topic: share for share in shares[each.txn]}
        if sink is not None:
            self.in_doubt[sink.owner, sink.sink_id] = []
        self._decisions.append_decision(make_commit_record(shares, sink, owner=intent.owner), intent)

    def _check_batch(self, intent: CommitSinkBatch, live: list[LiveTransaction]) -> None:
        for each in live:
            tag = each.owned.tag
            wanted = (intent.sink_id, intent.query_id, intent.batch) if intent.sink_id else None
            if (tag and (tag.sink_id, tag.query_id, tag.batch)) != wanted:
                raise InvalidRequest(f"{self._table.make_txn_id(each.txn)} was begun for another batch, or for none")
            self._table.check_name_holder(each.owned.owner, each.owned.name, each.owned.holder)

    def on_committed(self, sink: SinkBatch, now: float) -> None:
        """Called when the commit of a batch is durable. Aborts the other transactions of the sink that belong to this
        batch, to an earlier one, or to another query. Then handles the intents that waited for the commit."""
        key = sink.owner, sink.sink_id
        self.last_used_times[key] = now
        for txn in list(self._table.by_sink.get(key, ())):
            owned = self._table.unused[txn].owned if txn in self._table.unused else self._table.live[txn].owned
            assert owned.tag is not None, "it is of a sink"
            if owned.tag.query_id != sink.query_id or owned.tag.batch <= sink.batch:
                self._outcomes.abort_or_void_id(txn, AbortReason.SUPERSEDED, now)
        self._outcomes.handle_intents(self.in_doubt.pop(key), now)


# --------------------------------------------------------------------------------------------------- begins_core


IDS_PER_BLOCK_MAX = 1_000
"""Largest number of ids that one BeginTransactions gets."""
FREE_IDS_DIVISOR = 64
"""A BeginTransactions gets at most this fraction (1 / FREE_IDS_DIVISOR) of the ids that may still be given. So a client
which does not use its ids leaves some for others."""
IDLE_RECORDS_PER_PERIOD = 24
"""How often the idle time of a name or a sink is recorded, per period after which it is forgotten."""


class TransactionBeginDecider:
    """Decides the requests to begin transactions. Also removes the names and the sinks that were idle for too long. In
    all methods `now` is in monotonic seconds."""

    def __init__(
        self, table: TransactionTable, decisions: PendingDecisions, outcomes: OutcomeDecider,
        batches: SinkBatchDecider, now: float,
        gap: Callable[[], int],
    ) -> None:  # fmt: skip
        """`gap`: returns a random number: so many ids are left out before the next ids are given, so that ids cannot be
        guessed."""
        self._table = table
        self._decisions = decisions
        self._outcomes = outcomes
        self._batches = batches
        self._gap = gap
        self._used_names = {key: now - each.idle_s for key, each in table.state.names.items()}
        self._holders = table.state.last_holder
        self._idle_looked_at = self._idle_noted_at = now

    def begin_transactions(self, intent: BeginTransactions, now: float) -> None:
        """Answers the intent with new transaction ids, which are leased to the client; with no ids if the batch of its
        sink is committed already. If the intent gives a name but no holder, the client becomes the new holder of the
        name; this is stored durably before the answer. Raises BackPressure if there are too many open transactions or
        names; InvalidRequest if an argument is invalid; SinkFenced or TransactionFenced if another query or holder took
        over; NotOwner or Unavailable as `reserve_transaction_ids` does; IntentQueuedUntilDurable if the answer waits
        for a record that is being written."""
        limits = self._table.limits
        if not 0 <= intent.timeout_s <= limits.timeout_s_max:
            raise InvalidRequest(
                f"a transaction may stay open for {limits.timeout_s_max:g} s, not {intent.timeout_s:g}; prepare it"
            )
        tag = intent.tag
        texts = (intent.name, *((tag.sink_id, tag.query_id, tag.run) if tag is not None else ()))
        if max(map(len, texts)) > NAME_CHARACTERS_MAX:
            raise InvalidRequest(f"names of owners and sinks have at most {NAME_CHARACTERS_MAX} characters")
        if tag is not None and self._batches.has_committed_batch(intent, tag, now):
            self._decisions.answer_intent(intent, BeginAnswer(0, 0, 0.0, already=True))
            return
        count = self._room(intent)
        if intent.name and not intent.holder:
            self._change_holder(intent, now)
            return
        self._table.check_name_holder(intent.owner, intent.name, intent.holder)
        self._lease_ids(intent, count, intent.holder, now)

    def _room(self, intent: BeginTransactions) -> int:
        limits, used = self._table.limits, len(self._table.live) + len(self._table.unused)
        room = limits.open_max - used
        if intent.owner and limits.open_per_role_max:
            room = min(room, limits.open_per_role_max - self._table.open_by_owner.get(intent.owner, 0))
        if room <= 0:
            raise BackPressure(f"coordinator {self._table.number} has {used} open transactions: wait for some to end")
        return min(max(1, intent.count), IDS_PER_BLOCK_MAX, max(1, room // FREE_IDS_DIVISOR))

    def _change_holder(self, intent: BeginTransactions, now: float) -> None:
        owner, limits = intent.owner, self._table.limits
        if not self._table.state.names.has_room(owner, intent.name, limits.names_max, limits.names_per_role_max):
            raise BackPressure(
                f"coordinator {self._table.number} knows as many names as it may, of all roles or of this one"
            )
        self._holders += 1
        for txn in list(self._table.by_name.get((owner, intent.name), ())):
            self._outcomes.abort_or_void_id(txn, AbortReason.FENCED, now)
        self._decisions.append_decision(NameHolderChanged(intent.name, self._holders, owner=owner), intent)

    def on_name_holder_changed(self, record: NameHolderChanged, intent: BeginTransactions, now: float) -> None:
        """Called when the new holder of a name is stored durably. Aborts the transactions of earlier holders, and
        answers the intent with new transaction ids, or with the error if none can be leased."""
        for txn in list(self._table.by_name.get((record.owner, record.name), ())):
            # what an earlier begin was given in the meantime, or was in doubt
            self._outcomes.abort_or_void_id(txn, AbortReason.FENCED, now)
        try:
            self._lease_ids(intent, self._room(intent), record.holder, now)
        except MagnetarError as error:
            self._decisions.answer_intent(intent, error)

    def _lease_ids(self, intent: BeginTransactions, count: int, holder: int, now: float) -> None:
        first = self.reserve_transaction_ids(count)
        if intent.name:
            self._used_names[self._table.state.names.make_key(intent.owner, intent.name)] = now
        timeout_s = intent.timeout_s or self._table.limits.timeout_s
        owned = TransactionOwner(intent.owner, timeout_s, intent.name, holder, intent.tag, intent.address)
        self._table.add_lease(range(first, first + count), owned, now)
        self._decisions.answer_intent(intent, BeginAnswer(first, count, self._table.limits.lease_s, holder))

    def reserve_transaction_ids(self, count: int) -> int:
        """Reserves `count` consecutive transaction ids, and returns the first one. If this epoch has too few ids left,
        ends the epoch and raises NotOwner; the next epoch has new ids. Raises Unavailable if no further epoch is
        possible."""
        first = self._table.next_id + self._gap()
        if first + count - 1 > (self._table.epoch << COUNTER_BITS) + COUNTER_MAX:
            if self._table.epoch == EPOCH_MAX:
                raise Unavailable(f"coordinator {self._table.number} has no ids any more; use another one")
            self._decisions.abandon_epoch("the ids of its epoch are used up")
            raise NotOwner(f"coordinator {self._table.number} takes a new epoch; try again")
        self._table.next_id = first + count
        return first

    # ------------------------------------------------------------------ what is idle
    def expire_idle_names_and_sinks(self, now: float) -> None:
        """Adds records to the next append: records that remove the names and sinks which were idle for too long, and
        records that store for how long the other ones have been idle. Does nothing more often than once per thousandth
        of the shorter idle time."""
        limits, shortest = self._table.limits, min(self._table.limits.name_idle_s, self._table.limits.sink_idle_s)
        if now - self._idle_looked_at <= shortest / 1000:
            return
        self._idle_looked_at = now
        taken = {
            (each.record.owner, each.record.name)
            for each in (*self._decisions.gathered, *self._decisions.writing) if isinstance(each.record,
            NameHolderChanged)
        }  # fmt: skip
        names = [
            key for key, _ in self._table.state.names.items()
            if now - self._used_names.get(key, now) >= limits.name_idle_s and key not in self._table.by_name
            and key not in taken
        ]  # fmt: skip
        sinks = [
            sink for key, sink in self._table.state.sinks.items()
            if now - self._batches.last_used_times.get(key, now) >= limits.sink_idle_s
            and key not in self._table.by_sink and key not in self._batches.in_doubt
        ]  # fmt: skip
        if names:
            self._decisions.append_decision(
                IdleNamesRemoved([name for _, name in names], [owner for owner, _ in names])
            )
        for sink in sinks:
            last = SinkBatch(sink.sink_id, sink.query_id, DISCARDED_BATCH_NUMBER, sink.owner)
            self._decisions.append_decision(SinkBatchRecorded(last))
        for key in names:
            self._used_names.pop(key, None)
        for sink in sinks:
            self._batches.last_used_times.pop((sink.owner, sink.sink_id), None)
        if now - self._idle_noted_at >= shortest / IDLE_RECORDS_PER_PERIOD:
            self._idle_noted_at = now
            changing = {*taken, *self._batches.in_doubt, *names, *((each.owner, each.sink_id) for each in sinks)}
            for note in list(self.make_idle_time_records(now, changing)):
                self._decisions.append_decision(note)

    def make_idle_time_records(
        self, now: float, changing: Collection[OwnerAndName] = ()
    ) -> Iterator[AnyCoordinatorRecord]:
        """Yields records that store for how long names and sinks have been idle. Leaves out those in `changing`, and
        those whose stored time differs from the actual time by less than 1 / IDLE_RECORDS_PER_PERIOD of the longest
        allowed idle time."""
        limits = self._table.limits
        for (owner, name), each in self._table.state.names.items():
            idle_s = now - self._used_names.get((owner, name), now)
            if (owner, name) not in changing and abs(
                idle_s - each.idle_s
            ) >= limits.name_idle_s / IDLE_RECORDS_PER_PERIOD:
                yield NameHolderChanged(name, each.holder, idle_s, owner)
        for key, sink in self._table.state.sinks.items():
            idle_s = now - self._batches.last_used_times.get(key, now)
            if key not in changing and abs(idle_s - sink.idle_s) >= limits.sink_idle_s / IDLE_RECORDS_PER_PERIOD:
                yield SinkBatchRecorded(SinkBatch(sink.sink_id, sink.query_id, sink.batch, sink.owner, idle_s))
