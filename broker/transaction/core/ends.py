"""The participants of a transaction, and who may end it: its client, an administrator, or a topic that is deleted.

A topic joins before it stores an operation of the transaction. The end names what each participant stored, and a
participant that never joined means that something is lost: the transaction is aborted. A repeated end gets the answer
of the first one; an end in doubt waits (core/outcomes.py). A role ends, and writes in, what it began itself: of
another's it is answered as of an id that was never given (core/table.py).
Guards: tests/broker/transaction/core/test_coordinator_walk.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....proto.errors import (
    InvalidRequest,
    MagnetarError,
    NotFound,
    TransactionAborted,
    TransactionEnded,
    TransactionForgotten,
)
from ....proto.transactions import TxnState
from .intents import AbortByAdmin, AbortOpen, Detach, End, Join, Reason, Verb
from .live import IN_DOUBT, Ending, Live, Phase, state_of
from .outcomes import Outcomes
from .records import Detached, Participant, Prepared, committed

RECORD_BYTES_MAX = 4 << 20
"""Most bytes of a commit, estimated: a record is one entry of the ledger."""


class Ends(Outcomes):
    """The part of a coordinator that decides joins and ends."""

    # ------------------------------------------------------------------ join
    def _join(self, intent: Join, now: float) -> TxnState:
        found = self._certain(intent.txn, intent, now, intent.owner)
        if isinstance(found, Live) and intent.topic:
            self._take_in(found, intent.topic)
        return state_of(found)

    def _take_in(self, live: Live, topic: str) -> None:
        if topic in live.participants:
            return
        if live.phase is Phase.PREPARED:
            raise TransactionEnded(f"{self._id(live.txn)} is prepared: nothing may be added")
        if len(live.participants) >= self.limits.participants_max:
            raise InvalidRequest(f"{self._id(live.txn)} has {len(live.participants)} topics: no more may join")
        live.participants[topic] = Participant(topic)

    def join_now(self, txn: int, topic: str, owner: str | None, now: float) -> bool:
        """Whether the topic is a participant of a transaction that is not in doubt and has not ended. Without an answer
        to anybody: False says nothing, ask by a Join."""
        if self.is_over:
            return False
        try:
            found = self._find(txn, now, owner)
            if not isinstance(found, Live) or found.phase in IN_DOUBT:
                return False
            self._take_in(found, topic)
        except MagnetarError:
            return False
        return True

    # ------------------------------------------------------------------ ends
    def _end_of(self, intent: End, now: float) -> None:
        found = self._certain(intent.txn, intent, now, intent.owner)
        if isinstance(found, Live):
            self._end_live(found, intent, now)
        elif isinstance(found, Ending) and _is_to_wait(found, intent):
            found.visible.append(intent.request)
        else:
            self._answer(intent, self._ended(intent, state_of(found)))

    def _ended(self, intent: End, state: TxnState) -> TxnState:
        """Returns the answer to an end of a transaction that has ended, or raises why it was aborted."""
        if state is TxnState.COMMITTED or (intent.verb is Verb.ABORT and intent.txn >= self.state.forgotten):
            return state
        raise self._why_aborted(intent.txn)

    def _end_live(self, live: Live, intent: End, now: float) -> None:
        if intent.verb is Verb.ABORT:
            self._abort(live, Reason.CLIENT, now)
            self._again([intent], now) if live.phase is not Phase.ABORTING else live.later.append(intent)
            return
        if intent.verb is Verb.COMMIT and live.owned.tag is not None:
            raise InvalidRequest(f"{self._id(live.txn)} is of a sink: it commits with its batch")
        if intent.verb is Verb.PREPARE and live.phase is Phase.PREPARED:
            self._answer(intent, TxnState.PREPARED)
            return
        self._check_holder(live.owned.owner, live.owned.name, live.owned.holder)
        listed = self._participants(live, intent.participants, now)
        if intent.verb is Verb.PREPARE:
            live.phase = Phase.PREPARING
            left_s = min(intent.prepared_s or self.limits.prepared_s_max, self.limits.prepared_s_max)
            self._decide(Prepared(live.txn, live.owned, listed, left_s), None)
        elif not listed and live.phase is Phase.OPEN:
            self._commit_nothing(live, now)
            self._again([intent], now)
            return
        else:
            live.phase = Phase.COMMITTING
            self._decide(committed({live.txn: listed}, owner=live.owned.owner), None)
        live.participants = {each.topic: each for each in listed}
        live.later.append(intent)

    def _participants(self, live: Live, listed: Sequence[Participant], now: float) -> list[Participant]:
        """Returns the topics that joined, with what the client says of them. A receipt of a topic that never joined
        cannot be: something of the transaction is lost, and it is aborted."""
        if not listed:
            return list(live.participants.values())
        said = {each.topic: each for each in listed}
        strange = [each.topic for each in listed if each.entries and each.topic not in live.participants]
        if strange:
            self._abort(live, Reason.FAILED, now)
            raise TransactionAborted(
                f"{self._id(live.txn)} is aborted: topic {strange[0]} has not joined it", reason=Reason.FAILED.value
            )
        found = [said.get(topic) or Participant(topic, 0) for topic in live.participants]
        size = sum(len(each.topic) + 100 for each in found)
        if size > RECORD_BYTES_MAX:
            raise InvalidRequest(f"a commit of {len(found)} participants is larger than {RECORD_BYTES_MAX} bytes")
        return found

    # ------------------------------------------------------------------ of an administrator
    def _abort_by_admin(self, intent: AbortByAdmin, now: float) -> None:
        if intent.txn in self._unused:
            self._void(intent.txn, Reason.ADMIN, now)
        found = self._certain(intent.txn, intent, now)
        if isinstance(found, Live):
            self._abort(found, Reason.ADMIN, now)
            if found.phase is Phase.ABORTING:
                found.later.append(intent)
                return
            found = TxnState.ABORTED
        if found is TxnState.ABORTED and intent.txn < self.state.forgotten:
            raise TransactionForgotten(f"{self._id(intent.txn)} ended more than {self.limits.retention_s:g} s ago")
        self._answer(intent, state_of(found))

    def _abort_open(self, intent: AbortOpen, now: float) -> None:
        found = self._certain(intent.txn, intent, now)
        if isinstance(found, Live) and found.phase is Phase.OPEN:
            self._abort(found, Reason.DELETED, now)
        row = self._row(intent.txn, now)
        assert row is not None, "it is none of those that were never used"
        self._answer(intent, row)

    def _detach(self, intent: Detach) -> None:
        ending = self._ending.get(intent.txn)
        if ending is None or intent.topic not in ending.waiting:
            raise NotFound(f"{self._id(intent.txn)} does not wait for {intent.topic}")
        if ending.is_durable:
            self._decide(Detached(intent.txn, intent.topic), intent)
        else:
            self._settled(intent.txn, intent.topic)
            self._answer(intent, None)


def _is_to_wait(ending: Ending, intent: End) -> bool:
    return intent.visible and bool(ending.waiting) and ending.committed is (intent.verb is Verb.COMMIT)
