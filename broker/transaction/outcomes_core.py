"""How a transaction gets its outcome: decisions are gathered for one append, and take effect when that is durable.

    take_append() → on_appended(number)    one append at a time, with all that was decided
    promote_lazy()                         records that could wait for another append make one due
    on_settled(txn, topic)                 a participant has stored the outcome

An abort of an open transaction writes nothing: without a record of a commit it is aborted. An abort of a prepared one,
and each commit, is a record. Effects are gathered here; each method that handles an event returns those it caused.
coordinator_core.py says what a durable record changes.
"""

from __future__ import annotations

import abc
import heapq
from collections.abc import Iterable
from typing import NamedTuple

from ...proto.errors import NotOwner
from ...proto.states import COUNTER_BITS, TxnState
from .halves_core import IntentQueued
from .intents_core import AbandonEpoch, AbortReason, Answer, Append, Effect, Intent, Limits, Result, SendOutcome
from .records_core import Aborted, AnyRecord, Done, Participant, TransactionOwner, make_commit_record
from .state_core import CoordinatorState
from .table_core import IN_DOUBT, LiveTransaction, Phase, TransactionTable, UnsettledTransaction


class Decision(NamedTuple):
    """A record to write, and the intent that is answered when it is durable."""

    record: AnyRecord
    intent: Intent | None = None


class OutcomeDecider(TransactionTable, abc.ABC):
    """The part of a coordinator that gathers decisions, aborts and settles. Its subclasses receive the intents."""

    def __init__(self, number: int, epoch: int, state: CoordinatorState, limits: Limits) -> None:
        super().__init__(number, epoch, state, limits)
        self.has_ended = False  # it gave itself up, or is closing: it answers nothing new
        self._gathered: list[Decision] = []
        self._lazy: list[Decision] = []  # records that join the next append, or are appended at the next tick
        self._writing: list[Decision] = []
        self._number = 0
        self._effects: list[Effect] = []

    @abc.abstractmethod
    def _receive(self, intent: Intent, now: float) -> None:
        """Handles an intent: adds its answer to the effects, or lets it wait."""

    @abc.abstractmethod
    def _on_durable(self, decision: Decision, now: float) -> None:
        """Applies a decision whose record is durable: to the state, then to the tables and the effects."""

    # ------------------------------------------------------------------ records
    def _decide(self, record: AnyRecord, intent: Intent | None) -> None:
        self._gathered.append(Decision(record, intent))

    def promote_deferred_records(self) -> None:
        """Makes an append due for the records that could wait for another append: they have waited long enough."""
        self._gathered += self._lazy
        self._lazy = []

    def take_append(self) -> Append | None:
        """Returns the next append, with all records that were decided, or None if none was decided or an append is in
        flight."""
        if self._writing or not self._gathered:
            return None
        self._writing = [*self._gathered, *self._lazy]
        self._gathered, self._lazy = [], []
        self._number += 1
        return Append(self._number, [each.record for each in self._writing])

    def on_appended(self, number: int, now: float) -> list[Effect]:
        """Fact: the records of append `number` are durable. Applies them and returns the effects."""
        assert number == self._number, "one append at a time"
        assert self._writing, "an append has records"
        decisions, self._writing = self._writing, []
        self.counters.records += len(decisions)
        for decision in decisions:
            self._on_durable(decision, now)
        return self.take_effects()

    @property
    def has_decided_records(self) -> bool:
        return bool(self._gathered)

    @property
    def has_deferred_records(self) -> bool:
        return bool(self._lazy)

    # ------------------------------------------------------------------ effects
    def _answer(self, intent: Intent, result: Result) -> None:
        self._effects.append(Answer(intent.request, result))

    def take_effects(self) -> list[Effect]:
        """Removes the gathered effects and returns them. The driver must also call this after it has called a method of
        `halves`."""
        effects, self._effects = self._effects, []
        return effects

    def _abandon_epoch(self, why: str) -> None:
        self.has_ended = True
        self._effects.append(AbandonEpoch(why))

    def _resolved(self, live: LiveTransaction, now: float) -> None:
        later, live.waiting_intents = live.waiting_intents, []
        self._again(later, now)

    def _again(self, intents: Iterable[Intent], now: float) -> None:
        for intent in intents:
            self._receive(intent, now)

    # ------------------------------------------------------------------ uses and doubt
    def _find(
        self, txn: int, now: float, owner: str | None = None
    ) -> LiveTransaction | UnsettledTransaction | TxnState:
        """Returns what is known of an id; a leased id becomes an open transaction. Raises NotOwner if a later epoch
        gave it, InvalidRequest if it was never given or another role began it."""
        if txn >> COUNTER_BITS > self.epoch:
            raise NotOwner(f"coordinator {self.number} has a later epoch elsewhere; look it up again")
        self._check_owner(txn, owner)
        if txn in self._unused:
            self._use(txn, now)
        found = self._live.get(txn) or self._ending.get(txn)
        if found is not None:
            return found
        if self.state.is_committed(txn):
            return TxnState.COMMITTED
        if txn >= self._next:
            raise self._unknown_id_error(txn)
        return TxnState.ABORTED

    def _use(self, txn: int, now: float) -> None:
        owned = self._unused[txn].owned
        if self._unused[txn].until <= now:
            self._abort_or_void(txn, AbortReason.LEASE, now)
        elif self._is_superseded(owned):
            self._abort_or_void(txn, AbortReason.SUPERSEDED, now)
        else:
            del self._unused[txn]  # its owner, name and sink have it as before
            self._live[txn] = LiveTransaction(txn, owned, now, now + owned.timeout_s)
            heapq.heappush(self._deadlines, (now + owned.timeout_s, txn))
            self.counters.begun += 1

    def _certain(
        self, txn: int, intent: Intent, now: float, owner: str | None = None
    ) -> LiveTransaction | UnsettledTransaction | TxnState:
        """Returns what `_find` returns. Raises MustWait while the transaction is in doubt; the intent is handled
        later."""
        found = self._find(txn, now, owner)
        if isinstance(found, LiveTransaction) and found.phase in IN_DOUBT:
            found.waiting_intents.append(intent)
            raise IntentQueued
        return found

    # ------------------------------------------------------------------ outcomes
    def _commit_nothing(self, live: LiveTransaction, now: float) -> None:
        """Commits a transaction without participants. Its record is added to the next append; it does no harm if the
        record is lost."""
        self._remove(live)
        record = make_commit_record({live.txn: []}, owner=live.owned.owner)
        self.state.apply(record)
        self._lazy.append(Decision(record))
        self.counters.committed += 1
        self.counters.count_ended(now - live.began)

    def _abort(self, live: LiveTransaction, reason: AbortReason, now: float) -> None:
        """Aborts `live`, which must be OPEN or PREPARED."""
        live.reason = reason
        if live.phase is Phase.PREPARED:
            live.phase = Phase.ABORTING
            self._decide(Aborted(live.txn, list(live.participants), live.owned.owner), None)
            return
        assert live.phase is Phase.OPEN, "a transaction in doubt is not aborted"
        self._remove(live)
        self._aborted(live, now, is_durable=False)

    def _aborted(self, live: LiveTransaction, now: float, *, is_durable: bool) -> None:
        self.counters.count_ended(now - live.began)
        self._record_abort(live.txn, live.reason, live.owned.owner)
        self._decide_end(live.txn, False, live.participants.values(), live.owned, live.began, is_durable=is_durable)

    def _abort_or_void(self, txn: int, reason: AbortReason, now: float) -> None:
        """Aborts the transaction, or voids the id that was not used yet; does nothing while it is in doubt."""
        lease = self._unused.pop(txn, None)
        if lease is not None:
            self._unindex(txn, lease.owned)
            self._record_abort(txn, reason, lease.owned.owner)
            return
        live = self._live[txn]
        if live.phase not in IN_DOUBT:
            self._abort(live, reason, now)

    def _end_outdated(self, live: LiveTransaction, now: float) -> None:
        """Aborts `live` if its name got a later holder, or its sink committed the batch, while it was in doubt."""
        owned = live.owned
        if live.phase not in (Phase.OPEN, Phase.PREPARED):
            return
        holder = self.state.names.find(owned.owner, owned.name) if owned.name else None
        if holder is not None and holder.holder > owned.holder:
            self._abort(live, AbortReason.FENCED, now)
        elif self._is_superseded(owned):
            self._abort(live, AbortReason.SUPERSEDED, now)

    # ------------------------------------------------------------------ settling
    def _decide_end(
        self, txn: int, is_committed: bool, waiting: Iterable[Participant], owned: TransactionOwner | None,
        began: float, *,
        is_durable: bool,
    ) -> None:  # fmt: skip
        each_waiting = {each.topic: each for each in waiting}
        if not each_waiting:
            if is_durable and txn in self.state.unsettled:
                self._lazy.append(Decision(Done([txn])))
            return
        self._ending[txn] = UnsettledTransaction(is_committed, each_waiting, owned, began, is_durable)
        self._effects += [SendOutcome(txn, is_committed, each) for each in each_waiting.values()]

    def on_settled(self, txn: int, topic: str) -> list[Effect]:
        """Fact: the topic has stored the outcome. Returns the effects. Repeated calls do nothing."""
        self._on_settled(txn, topic)
        return self.take_effects()

    def _on_settled(self, txn: int, topic: str) -> None:
        ending = self._ending.get(txn)
        if ending is None or ending.waiting.pop(topic, None) is None or ending.waiting:
            return
        self.counters.settled += 1
        state = TxnState.COMMITTED if ending.committed else TxnState.ABORTED
        self._effects += [Answer(request, state) for request in ending.waiting_requests]
        ending.waiting_requests.clear()
        if ending.is_durable:
            self._lazy.append(Decision(Done([txn])))
        else:
            del self._ending[txn]

    def find_unsettled(self, txn: int, topic: str) -> Participant | None:
        """Returns what the topic must still store of a committed transaction; None if the topic has stored the outcome,
        or the commit is not durable."""
        ending = self._ending.get(txn)
        return ending.waiting.get(topic) if ending is not None and ending.committed and ending.is_durable else None
