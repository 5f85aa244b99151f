"""Which transactions are committed: the machine of one coordinator in one epoch. It decides, and waits for nothing.

    effects = coordinator.receive(End(request, txn, Verb.COMMIT, …), now)     an intent
    append = coordinator.take()                                               all that was decided: one append
    effects = coordinator.appended(append.number, now)                        a fact
    effects = coordinator.settled(txn, topic, now) | tick(now) | given_up()

    OPEN ─commit→ COMMITTING ─appended→ COMMITTED ─every participant settled→ done
     │ └─prepare→ PREPARING ─appended→ PREPARED ─commit→ COMMITTING
     │                                  └─abort, deadline→ ABORTING ─appended→ ABORTED ─settled→ done
     └─abort, deadline, fence→ ABORTED (nothing is written) ─settled→ gone

Rules (docs/transactions.md)
- **Commit is a record.** A transaction is committed when its record is durable, and aborted when there is none and none
  can come. So "aborted" is answered of an id of this epoch that is in no table, and of one of an earlier epoch of which
  the ledger says nothing: its coordinator cannot append any more.
- **Doubt.** While a record of a transaction is on its way nothing is answered about its id: the questions wait in
  `later` and are asked again when the record is durable. When the append is unknown, `given_up` ends them without an
  outcome, and the next epoch reads the ledger.
- **One decision.** Ids are unique, a decision takes the transaction out of the states that others may start from, and
  all happens in one event loop: two commits make one record.
- **Settling.** An outcome that is durable is kept until each participant has stored it (`Done`). Results stay for
  `retention_s` after that: `tick` notes the lowest id that is not done, and forgets what is below it when that time has
  passed. A participant is never told "forgotten": what it does not know the outcome of was not committed, for a commit
  is done only after it stored it.
- **Time** is monotonic; deadlines begin anew in a new epoch and are never shortened.

Guards: tests/broker/transaction/core/.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, assert_never

import msgspec

from ....proto.errors import (
    BackPressure,
    InvalidRequest,
    MagnetarError,
    NotFound,
    NotOwner,
    OutcomeUnknown,
    SinkFenced,
    TransactionAborted,
    TransactionEnded,
    TransactionFenced,
    TransactionForgotten,
    Unauthorized,
    Unavailable,
)
from ....proto.transactions import COUNTER_BITS, EPOCH_BITS, TxnId, TxnState
from .halves import Halves
from .halves import Waits as _Wait
from .intents import (
    AbortByAdmin,
    AbortOpen,
    Answer,
    Append,
    Begin,
    Begun,
    ChangeHalf,
    CommitBatch,
    Counters,
    Detach,
    Effect,
    End,
    EndHalf,
    GiveUp,
    Intent,
    Join,
    Limits,
    PrepareHalf,
    Reason,
    Result,
    Row,
    Settle,
    Status,
    Verb,
    WatchHalves,
)
from .records import (
    Aborted,
    AnyRecord,
    Committed,
    Detached,
    Done,
    Forgotten,
    HalfNoted,
    HalfRecord,
    HalfRolledBack,
    HalfStored,
    HandedLease,
    HandedOpen,
    HandedOver,
    Named,
    Owned,
    Participant,
    Prepared,
    SinkBatch,
    Tag,
    Unnamed,
    committed,
    participants,
)
from .state import State

COUNTER_MAX, EPOCH_MAX = (1 << COUNTER_BITS) - 1, (1 << EPOCH_BITS) - 1
BLOCK_MAX = 1_000
"""Ids of one Begin."""
REASONS_MAX = 100_000
"""Why the last ones were aborted: only the text of an error."""
RECORD_BYTES_MAX = 4 << 20
"""Of a commit, estimated: a record is one entry of the ledger."""
NAME_MAX = 512
MARKS = 8
"""Notes of the lowest id that is not done, per retention."""
HANDED_MAX = 500
"""Transactions in one record of a hand-over."""


class Phase(enum.Enum):
    OPEN = "open"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    ABORTING = "aborting"


IN_DOUBT = (Phase.PREPARING, Phase.COMMITTING, Phase.ABORTING)


class Lease(msgspec.Struct):
    """Ids that were given together: those that are not used yet are void after `until`."""

    owned: Owned
    until: float


class Live(msgspec.Struct):
    """A transaction without an outcome."""

    txn: int
    owned: Owned
    began: float
    deadline: float
    phase: Phase = Phase.OPEN
    participants: dict[str, Participant] = msgspec.field(default_factory=dict)
    reason: Reason = Reason.CLIENT
    later: list[Intent] = msgspec.field(default_factory=list)  # asked while it is in doubt


class Ending(msgspec.Struct):
    """A transaction with an outcome that some participants have not stored."""

    committed: bool
    waiting: dict[str, Participant]
    owned: Owned | None
    began: float  # of one of an earlier epoch: the start of this one
    is_durable: bool
    visible: list[object] = msgspec.field(default_factory=list)  # requests that wait for the last of them


class _Decision(NamedTuple):
    record: AnyRecord
    intent: Intent | None = None


class Coordinator:
    """One epoch. `state` is what its ledger says, and from here on this object alone applies records to it."""

    def __init__(self, number: int, epoch: int, state: State, limits: Limits, now: float) -> None:
        assert 0 < epoch <= EPOCH_MAX, "an epoch begins with a claim"
        self.number, self.epoch, self.state, self.limits = number, epoch, state, limits
        self.counters = Counters()
        self.is_over = False  # it gave itself up, or is closing: it answers nothing new
        self._next = epoch << COUNTER_BITS
        self._unused: dict[int, Lease] = {}
        self._live: dict[int, Live] = {}
        self._ending: dict[int, Ending] = {}
        self._per_owner: dict[str, int] = {}
        self._of_name: dict[str, set[int]] = {}  # unused and live ones
        self._of_sink: dict[str, set[int]] = {}
        self._reasons: dict[int, Reason] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._used_names = dict.fromkeys(state.names, now)
        self._holders = state.holders
        self._marks: deque[tuple[float, int]] = deque()
        self._names_looked_at = now
        self._gathered: list[_Decision] = []
        self._lazy: list[_Decision] = []  # go with the next append, or with the next tick
        self._writing: list[_Decision] = []
        self._number = 0
        self._sinks_in_doubt: dict[str, list[Intent]] = {}
        self._effects: list[Effect] = []
        self.halves = Halves(state.halves, limits.halves, self, epoch, now)

    # ------------------------------------------------------------------ intents
    def start(self, now: float) -> list[Effect]:
        """The first effects: what earlier epochs decided is settled."""
        for handed in self.state.handed:
            if handed.epoch == self.epoch - 1:
                self._take_handed(handed, now)
        self.state.handed.clear()
        for txn, prepared in self.state.prepared.items():
            live = Live(txn, prepared.owned, now, now + prepared.left_s, Phase.PREPARED)
            live.participants = {each.topic: each for each in prepared.participants}
            self._add(live)
        for txn, outcome in self.state.unsettled.items():
            self._end(txn, outcome.committed, outcome.waiting.values(), None, now, is_durable=True)
        self.halves.start(now)
        return self.take_effects()

    def _take_handed(self, handed: HandedOver, now: float) -> None:
        for txn, owned, topics in handed.opened:
            live = Live(txn, owned, now, now + owned.timeout_s)
            live.participants = {topic: Participant(topic) for topic in topics}
            self._add(live)
        for txns, owned in handed.leases:
            self._lease(txns, owned, now)

    def receive(self, intent: Intent, now: float) -> list[Effect]:
        if self.is_over:
            return [Answer(intent.request, NotOwner(f"coordinator {self.number} is moving; look it up again"))]
        self._receive(intent, now)
        return self.take_effects()

    def _receive(self, intent: Intent, now: float) -> None:
        try:
            match intent:
                case Begin():
                    self._begin(intent, now)
                case Join():
                    self._answer(intent, self._join(intent, now))
                case End():
                    self._end_of(intent, now)
                case CommitBatch():
                    self._commit_batch(intent, now)
                case Status():
                    self._answer(intent, self._status(intent, now))
                case AbortByAdmin():
                    self._abort_by_admin(intent, now)
                case AbortOpen():
                    self._abort_open(intent, now)
                case Detach():
                    self._detach(intent)
                case PrepareHalf() | EndHalf() | ChangeHalf() | WatchHalves():
                    self.halves.receive(intent, now)
                case _:
                    assert_never(intent)
        except _Wait:
            pass
        except MagnetarError as error:
            self._answer(intent, error)

    # ------------------------------------------------------------------ begin
    def _begin(self, intent: Begin, now: float) -> None:
        limits = self.limits
        if not 0 <= intent.timeout_s <= limits.timeout_s_max:
            raise InvalidRequest(
                f"a transaction may stay open for {limits.timeout_s_max:g} s, not {intent.timeout_s:g}; prepare it"
            )
        tag = intent.tag
        texts = (intent.name, *((tag.sink_id, tag.query_id, tag.run) if tag is not None else ()))
        if max(map(len, texts)) > NAME_MAX:
            raise InvalidRequest(f"names of owners and sinks have at most {NAME_MAX} characters")
        if tag is not None and self._has_batch(intent, tag, adopt=intent.adopt):
            self._answer(intent, Begun(0, 0, 0.0, already=True))
            return
        count = self._room(intent)
        if intent.name and not intent.holder:
            self._take_name(intent, now)
            return
        self._check_holder(intent.name, intent.holder)
        self._give_ids(intent, count, intent.holder, now)

    def _room(self, intent: Begin) -> int:
        limits, used = self.limits, len(self._live) + len(self._unused)
        room = limits.open_max - used
        if intent.owner and limits.open_per_role_max:
            room = min(room, limits.open_per_role_max - self._per_owner.get(intent.owner, 0))
        if room <= 0:
            raise BackPressure(f"coordinator {self.number} has {used} open transactions: wait for some to end")
        return min(max(1, intent.count), BLOCK_MAX, room)

    def _take_name(self, intent: Begin, now: float) -> None:
        if intent.name not in self.state.names and len(self.state.names) >= self.limits.names_max:
            raise BackPressure(f"coordinator {self.number} knows {len(self.state.names)} names of owners already")
        self._holders += 1
        for txn in list(self._of_name.get(intent.name, ())):
            self._void(txn, Reason.FENCED, now)
        self._decide(Named(intent.name, self._holders), intent)

    def _named(self, record: Named, intent: Begin, now: float) -> None:
        for txn in list(self._of_name.get(record.name, ())):
            self._void(txn, Reason.FENCED, now)  # what an earlier begin was given in the meantime, or was in doubt
        try:
            self._give_ids(intent, self._room(intent), record.holder, now)
        except MagnetarError as error:
            self._answer(intent, error)

    def _end_outdated(self, live: Live, now: float) -> None:
        """Aborts one that was in doubt when its name got a later holder, or its sink the batch."""
        owned = live.owned
        if live.phase not in (Phase.OPEN, Phase.PREPARED):
            return
        if owned.name and (found := self.state.names.get(owned.name)) and found.holder > owned.holder:
            self._abort(live, Reason.FENCED, now)
        elif self._is_superseded(owned.tag):
            self._abort(live, Reason.SUPERSEDED, now)

    def _is_superseded(self, tag: Tag | None) -> bool:
        sink = self.state.sinks.get(tag.sink_id) if tag is not None else None
        return sink is not None and tag is not None and sink.query_id == tag.query_id and sink.batch >= tag.batch

    def _check_holder(self, name: str, holder: int) -> None:
        found = self.state.names.get(name) if name else None
        if name and (found is None or found.holder != holder):
            raise TransactionFenced(f"a later holder of {name!r} took over")

    def _give_ids(self, intent: Begin, count: int, holder: int, now: float) -> None:
        if self._next + count - 1 > (self.epoch << COUNTER_BITS) + COUNTER_MAX:
            if self.epoch == EPOCH_MAX:
                raise Unavailable(f"coordinator {self.number} has no ids any more; use another one")
            self._give_up("the ids of its epoch are used up")
            raise NotOwner(f"coordinator {self.number} takes a new epoch; try again")
        first, self._next = self._next, self._next + count
        if intent.name:
            self._used_names[intent.name] = now
        timeout_s = intent.timeout_s or self.limits.timeout_s
        owned = Owned(intent.owner, timeout_s, intent.name, holder, intent.tag, intent.address)
        self._lease(range(first, first + count), owned, now)
        self._answer(intent, Begun(first, count, self.limits.lease_s, holder))

    def _lease(self, txns: Iterable[int], owned: Owned, now: float) -> None:
        lease = Lease(owned, now + self.limits.lease_s)
        for txn in txns:
            self._unused[txn] = lease
            heapq.heappush(self._deadlines, (lease.until, txn))
            self._index(txn, owned)

    def _index(self, txn: int, owned: Owned) -> None:
        self._per_owner[owned.owner] = self._per_owner.get(owned.owner, 0) + 1
        if owned.name:
            self._of_name.setdefault(owned.name, set()).add(txn)
        if owned.tag is not None:
            self._of_sink.setdefault(owned.tag.sink_id, set()).add(txn)

    def _unindex(self, txn: int, owned: Owned) -> None:
        self._per_owner[owned.owner] -= 1
        if not self._per_owner[owned.owner]:
            del self._per_owner[owned.owner]
        for key, index in ((owned.name, self._of_name), (owned.tag.sink_id if owned.tag else "", self._of_sink)):
            if key in index:
                index[key].discard(txn)
                if not index[key]:
                    del index[key]

    # ------------------------------------------------------------------ what is known of an id
    def _find(self, txn: int, now: float) -> Live | Ending | TxnState:
        """Uses an id that was leased. NotOwner, InvalidRequest: it is none of this coordinator's ids so far."""
        if txn >> COUNTER_BITS > self.epoch:
            raise NotOwner(f"coordinator {self.number} has a later epoch elsewhere; look it up again")
        if txn in self._unused:
            self._use(txn, now)
        found = self._live.get(txn) or self._ending.get(txn)
        if found is not None:
            return found
        if self.state.is_committed(txn):
            return TxnState.COMMITTED
        if txn >= self._next:
            raise InvalidRequest(f"{self._id(txn)} was never given")
        return TxnState.ABORTED

    def _use(self, txn: int, now: float) -> None:
        owned = self._unused[txn].owned
        if self._unused[txn].until <= now:
            self._void(txn, Reason.LEASE, now)
        elif self._is_superseded(owned.tag):
            self._void(txn, Reason.SUPERSEDED, now)
        else:
            del self._unused[txn]  # its owner, name and sink have it as before
            self._live[txn] = Live(txn, owned, now, now + owned.timeout_s)
            heapq.heappush(self._deadlines, (now + owned.timeout_s, txn))
            self.counters.begun += 1

    def _add(self, live: Live) -> None:
        self._live[live.txn] = live
        heapq.heappush(self._deadlines, (live.deadline, live.txn))
        self._index(live.txn, live.owned)

    def _certain(self, txn: int, intent: Intent, now: float) -> Live | Ending | TxnState:
        """As `_find`; _Wait while it is in doubt, and the intent is received again later."""
        found = self._find(txn, now)
        if isinstance(found, Live) and found.phase in IN_DOUBT:
            found.later.append(intent)
            raise _Wait
        return found

    def _status(self, intent: Status, now: float) -> TxnState:
        if intent.txn in self._unused:
            return TxnState.OPEN
        if (half := self.halves.state_of(intent.txn, intent)) is not None:
            return half
        found = self._certain(intent.txn, intent, now)
        if found is TxnState.ABORTED and intent.txn < self.state.forgotten:
            raise TransactionForgotten(f"{self._id(intent.txn)} ended more than {self.limits.retention_s:g} s ago")
        return _state(found)

    # ------------------------------------------------------------------ join
    def _join(self, intent: Join, now: float) -> TxnState:
        found = self._certain(intent.txn, intent, now)
        if not isinstance(found, Live):
            return _state(found)
        self._take_in(found, intent.topic)
        return _state(found)

    def _take_in(self, live: Live, topic: str) -> None:
        if topic in live.participants:
            return
        if live.phase is Phase.PREPARED:
            raise TransactionEnded(f"{self._id(live.txn)} is prepared: nothing may be added")
        if len(live.participants) >= self.limits.participants_max:
            raise InvalidRequest(f"{self._id(live.txn)} has {len(live.participants)} topics: no more may join")
        live.participants[topic] = Participant(topic)

    def join_now(self, txn: int, topic: str, now: float) -> bool:
        """Whether the topic is a participant of a transaction that is not in doubt and has not ended. Without an answer
        to anybody: False says nothing, ask by a Join."""
        if self.is_over:
            return False
        try:
            found = self._find(txn, now)
            if not isinstance(found, Live) or found.phase in IN_DOUBT:
                return False
            self._take_in(found, topic)
        except MagnetarError:
            return False
        return True

    def owed(self, txn: int, topic: str) -> Participant | None:
        """What a commit that is durable says of the topic, which has not stored it. None: there is no such thing."""
        ending = self._ending.get(txn)
        return ending.waiting.get(topic) if ending is not None and ending.committed and ending.is_durable else None

    # ------------------------------------------------------------------ ends
    def _end_of(self, intent: End, now: float) -> None:
        found = self._certain(intent.txn, intent, now)
        if isinstance(found, Live):
            if found.owned.owner != intent.owner:
                raise Unauthorized(f"{self._id(intent.txn)} was begun by another role")
            self._end_live(found, intent, now)
        elif isinstance(found, Ending) and _is_to_wait(found, intent):
            found.visible.append(intent.request)
        else:
            self._answer(intent, self._ended(intent, _state(found)))

    def _ended(self, intent: End, state: TxnState) -> TxnState:
        """What an end of a transaction that has ended is answered."""
        if state is TxnState.COMMITTED or (intent.verb is Verb.ABORT and intent.txn >= self.state.forgotten):
            return state
        raise self._why_aborted(intent.txn)

    def _why_aborted(self, txn: int) -> MagnetarError:
        if txn < self.state.forgotten:
            return TransactionForgotten(f"{self._id(txn)} ended more than {self.limits.retention_s:g} s ago")
        lost = txn >> COUNTER_BITS < self.epoch
        reason = self._reasons.get(txn, Reason.LOST if lost else Reason.TIMEOUT)
        if reason is Reason.FENCED:
            return TransactionFenced(f"{self._id(txn)}: a later holder of its name took over")
        return TransactionAborted(f"{self._id(txn)} is aborted: {reason.value}", reason=reason.value)

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
        self._check_holder(live.owned.name, live.owned.holder)
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
            self._decide(committed({live.txn: listed}), None)
        live.participants = {each.topic: each for each in listed}
        live.later.append(intent)

    def _participants(self, live: Live, listed: Sequence[Participant], now: float) -> list[Participant]:
        """Those that joined, with what the client says of them. A receipt of a topic that never joined cannot be:
        something of the transaction is lost, and it is aborted.
        """
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

    def _commit_nothing(self, live: Live, now: float) -> None:
        """It has no effect, so its record may be lost with the coordinator: it goes with the next append."""
        self._remove(live)
        record = committed({live.txn: []})
        self.state.apply(record)
        self._lazy.append(_Decision(record))
        self.counters.committed += 1
        self.counters.ended(now - live.began)

    def _abort(self, live: Live, reason: Reason, now: float) -> None:
        """`live` is OPEN or PREPARED."""
        live.reason = reason
        if live.phase is Phase.PREPARED:
            live.phase = Phase.ABORTING
            self._decide(Aborted(live.txn, list(live.participants)), None)
            return
        assert live.phase is Phase.OPEN, "a transaction in doubt is not aborted"
        self._remove(live)
        self._aborted(live, now, is_durable=False)

    def _aborted(self, live: Live, now: float, *, is_durable: bool) -> None:
        self.counters.ended(now - live.began)
        self._remember(live.txn, live.reason)
        self._end(live.txn, False, live.participants.values(), live.owned, live.began, is_durable=is_durable)

    def _remember(self, txn: int, reason: Reason) -> None:
        self.counters.aborted[reason] = self.counters.aborted.get(reason, 0) + 1
        self._reasons[txn] = reason
        if len(self._reasons) > REASONS_MAX:
            del self._reasons[next(iter(self._reasons))]

    def _void(self, txn: int, reason: Reason, now: float) -> None:
        """Aborts whatever is not in doubt."""
        lease = self._unused.pop(txn, None)
        if lease is not None:
            self._unindex(txn, lease.owned)
            self._remember(txn, reason)
            return
        live = self._live[txn]
        if live.phase not in IN_DOUBT:
            self._abort(live, reason, now)

    def _remove(self, live: Live) -> None:
        del self._live[live.txn]
        self._unindex(live.txn, live.owned)

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
        self._answer(intent, _state(found))

    def _abort_open(self, intent: AbortOpen, now: float) -> None:
        found = self._certain(intent.txn, intent, now)
        if isinstance(found, Live) and found.phase is Phase.OPEN:
            self._abort(found, Reason.DELETED, now)
        row = self._row(intent.txn, now)
        assert row is not None, "it is none of those that were never used"
        self._answer(intent, row)

    # ------------------------------------------------------------------ sinks
    def _has_batch(self, intent: Intent, tag: Tag, *, adopt: bool) -> bool:
        """Whether the sink has the batch already. SinkFenced; _Wait while a batch of it is in doubt."""
        waiting = self._sinks_in_doubt.get(tag.sink_id)
        if waiting is not None:
            waiting.append(intent)
            raise _Wait
        stored = self.state.sinks.get(tag.sink_id)
        if stored is None:
            if len(self.state.sinks) >= self.limits.sinks_max:
                raise BackPressure(f"coordinator {self.number} knows {len(self.state.sinks)} sinks already")
            return False
        if stored.query_id != tag.query_id:
            if not adopt:
                raise SinkFenced(
                    f"sink {tag.sink_id!r} is written by query {stored.query_id!r}, not {tag.query_id!r}: "
                    "use another sinkId, or onNewCheckpoint=adopt"
                )
            return False
        return tag.batch <= stored.batch

    def _commit_batch(self, intent: CommitBatch, now: float) -> None:
        sink = None
        if intent.sink_id:
            tag = Tag(intent.sink_id, intent.query_id, intent.batch)
            if self._has_batch(intent, tag, adopt=intent.adopt):
                self._answer(intent, True)
                return
            sink = SinkBatch(intent.sink_id, intent.query_id, intent.batch)
        found = {txn: self._certain(txn, intent, now) for txn in intent.txns}
        done = [txn for txn, each in found.items() if _state(each) is TxnState.COMMITTED]
        if done and sink is None and len(done) == len(found):
            self._answer(intent, False)
            return
        if done:
            raise TransactionEnded(f"{self._id(done[0])} is committed already, without the others")
        live = [each for each in found.values() if isinstance(each, Live)]
        for txn in found:
            if txn not in self._live:
                raise self._why_aborted(txn)
        self._check_batch(intent, live)
        shares = {each.txn: self._participants(each, intent.txns[each.txn], now) for each in live}
        if sum(len(each) for each in shares.values()) * 40 > RECORD_BYTES_MAX:
            raise InvalidRequest(f"a batch of {len(shares)} transactions has too many participants for one record")
        for each in live:
            each.phase = Phase.COMMITTING
            each.participants = {share.topic: share for share in shares[each.txn]}
        if sink is not None:
            self._sinks_in_doubt[sink.sink_id] = []
        self._decide(committed(shares, sink), intent)

    def _check_batch(self, intent: CommitBatch, live: list[Live]) -> None:
        for each in live:
            if each.owned.owner != intent.owner:
                raise Unauthorized(f"{self._id(each.txn)} was begun by another role")
            tag = each.owned.tag
            wanted = (intent.sink_id, intent.query_id, intent.batch) if intent.sink_id else None
            if (tag and (tag.sink_id, tag.query_id, tag.batch)) != wanted:
                raise InvalidRequest(f"{self._id(each.txn)} was begun for another batch, or for none")
            self._check_holder(each.owned.name, each.owned.holder)

    # ------------------------------------------------------------------ detach
    def _detach(self, intent: Detach) -> None:
        ending = self._ending.get(intent.txn)
        if ending is None or intent.topic not in ending.waiting:
            raise NotFound(f"{self._id(intent.txn)} does not wait for {intent.topic}")
        if ending.is_durable:
            self._decide(Detached(intent.txn, intent.topic), intent)
        else:
            self._settled(intent.txn, intent.topic)
            self._answer(intent, None)

    # ------------------------------------------------------------------ of halves (core/halves.py `Desk`)
    def decide(self, record: HalfRecord, *, lazily: bool = False) -> None:
        (self._lazy if lazily else self._gathered).append(_Decision(record))

    def do(self, effect: Effect) -> None:
        self._effects.append(effect)

    def again(self, intents: Iterable[Intent], now: float) -> None:
        self._again(intents, now)

    def text_of(self, half: int) -> str:
        return f"half {self._id(half)}"

    def check_id(self, half: int) -> None:
        if half >> COUNTER_BITS > self.epoch:
            raise NotOwner(f"coordinator {self.number} has a later epoch elsewhere; look it up again")
        if half >= self._next:
            raise InvalidRequest(f"{self._id(half)} was never given")

    def take_half_id(self, half: int, owner: str, now: float) -> bool:
        self.check_id(half)
        lease = self._unused.get(half)
        if lease is None:
            return False
        if lease.owned.owner != owner:
            raise Unauthorized(f"{self._id(half)} was given to another role")
        if lease.until <= now:
            self._void(half, Reason.LEASE, now)
            return False
        del self._unused[half]
        self._unindex(half, lease.owned)
        return True

    def begin_own(self, owner: str, timeout_s: float, now: float) -> int:
        if self._next > (self.epoch << COUNTER_BITS) + COUNTER_MAX:
            self._give_up("the ids of its epoch are used up")
            raise NotOwner(f"coordinator {self.number} takes a new epoch; try again")
        txn, self._next = self._next, self._next + 1
        self._add(Live(txn, Owned(owner, timeout_s), now, now + timeout_s))
        return txn

    def commit_own(self, txn: int, listed: Sequence[Participant], half: int, now: float) -> None:
        live = self._live.get(txn)
        if live is None or live.phase is not Phase.OPEN:
            raise self._why_aborted(txn)
        found = self._participants(live, listed, now)
        live.phase, live.participants = Phase.COMMITTING, {each.topic: each for each in found}
        self._decide(committed({txn: found}, half=half), None)

    def abort_own(self, txn: int, now: float) -> None:
        live = self._live.get(txn)
        if live is not None and live.phase is Phase.OPEN:
            self._abort(live, Reason.FAILED, now)

    # ------------------------------------------------------------------ records
    def _decide(self, record: AnyRecord, intent: Intent | None) -> None:
        self._gathered.append(_Decision(record, intent))

    def hurry(self) -> None:
        """What may wait for another append has waited long enough."""
        self._gathered += self._lazy
        self._lazy = []

    def take(self) -> Append | None:
        """What is to be appended now; None: nothing, or an append is on its way."""
        if self._writing or not self._gathered:
            return None
        self._writing = [*self._gathered, *self._lazy]
        self._gathered, self._lazy = [], []
        self._number += 1
        return Append(self._number, [each.record for each in self._writing])

    def appended(self, number: int, now: float) -> list[Effect]:
        """The records of that append are durable."""
        assert number == self._number, "one append at a time"
        assert self._writing, "an append has records"
        decisions, self._writing = self._writing, []
        self.counters.records += len(decisions)
        for decision in decisions:
            self._durable(decision, now)
        return self.take_effects()

    def _durable(self, decision: _Decision, now: float) -> None:
        record, intent = decision
        self.state.apply(record)
        match record:
            case Committed():
                self._durable_commit(record, intent, now)
            case Prepared():
                live = self._live[record.txn]
                live.phase, live.deadline = Phase.PREPARED, now + record.left_s
                heapq.heappush(self._deadlines, (live.deadline, live.txn))
                self._end_outdated(live, now)
                self._resolved(live, now)
            case Aborted():
                live = self._live[record.txn]
                self._remove(live)
                self._aborted(live, now, is_durable=True)
                self._resolved(live, now)
            case Named():
                assert isinstance(intent, Begin), "a name is taken by a begin"
                self._named(record, intent, now)
            case Detached():
                assert intent is not None, "a participant is detached by an administrator"
                self._settled(record.txn, record.topic)
                self._answer(intent, None)
            case Done():
                for txn in record.txns:
                    self._ending.pop(txn, None)
            case HalfStored() | HalfNoted() | HalfRolledBack():
                self.halves.durable(record, now)

    def _durable_commit(self, record: Committed, intent: Intent | None, now: float) -> None:
        ended = []
        for txn, shares in record.txns:
            live = self._live.get(txn)
            if live is None:
                continue  # it was empty, and is counted
            self._remove(live)
            self._end(txn, True, participants(record, shares), live.owned, live.began, is_durable=True)
            self.counters.committed += 1
            self.counters.ended(now - live.began)
            ended.append(live)
        if intent is not None:
            self._answer(intent, False)
        for live in ended:
            self._resolved(live, now)
        if record.sink is not None:
            self._batch_ended(record.sink, now)
        if record.half:
            self.halves.committed(record.half, now)

    def _batch_ended(self, sink: SinkBatch, now: float) -> None:
        """What else was begun for it, or for a query that the sink was taken from, is aborted."""
        for txn in list(self._of_sink.get(sink.sink_id, ())):
            owned = self._unused[txn].owned if txn in self._unused else self._live[txn].owned
            assert owned.tag is not None, "it is of a sink"
            if owned.tag.query_id != sink.query_id or owned.tag.batch <= sink.batch:
                self._void(txn, Reason.SUPERSEDED, now)
        self._again(self._sinks_in_doubt.pop(sink.sink_id), now)

    def _resolved(self, live: Live, now: float) -> None:
        later, live.later = live.later, []
        self._again(later, now)

    def _again(self, intents: Iterable[Intent], now: float) -> None:
        for intent in intents:
            self._receive(intent, now)

    # ------------------------------------------------------------------ settling
    def _end(
        self, txn: int, is_committed: bool, waiting: Iterable[Participant], owned: Owned | None, began: float, *,
        is_durable: bool,
    ) -> None:  # fmt: skip
        each_waiting = {each.topic: each for each in waiting}
        if not each_waiting:
            if is_durable and txn in self.state.unsettled:
                self._lazy.append(_Decision(Done([txn])))
            return
        self._ending[txn] = Ending(is_committed, each_waiting, owned, began, is_durable)
        self._effects += [Settle(txn, is_committed, each) for each in each_waiting.values()]

    def settled(self, txn: int, topic: str) -> list[Effect]:
        """The topic has stored the outcome; repeated, or late: nothing."""
        self._settled(txn, topic)
        return self.take_effects()

    def _settled(self, txn: int, topic: str) -> None:
        ending = self._ending.get(txn)
        if ending is None or ending.waiting.pop(topic, None) is None or ending.waiting:
            return
        self.counters.settled += 1
        state = TxnState.COMMITTED if ending.committed else TxnState.ABORTED
        self._effects += [Answer(request, state) for request in ending.visible]
        ending.visible.clear()
        if ending.is_durable:
            self._lazy.append(_Decision(Done([txn])))
        else:
            del self._ending[txn]

    # ------------------------------------------------------------------ time
    def tick(self, now: float) -> list[Effect]:
        """To be called about once a second."""
        if self.is_over:
            return []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, txn = heapq.heappop(self._deadlines)
            self._passed(txn, now)
        if len(self._deadlines) > 2 * (len(self._live) + len(self._unused)) + 1000:
            self._deadlines = [(each.deadline, txn) for txn, each in self._live.items()]
            self._deadlines += [(each.until, txn) for txn, each in self._unused.items()]
            heapq.heapify(self._deadlines)
        self._forget(now)
        self.halves.tick(now)
        return self.take_effects()

    def _passed(self, txn: int, now: float) -> None:
        lease, live = self._unused.get(txn), self._live.get(txn)
        if lease is not None and lease.until <= now:
            self._void(txn, Reason.LEASE, now)
        elif live is not None and live.deadline <= now and live.phase not in IN_DOUBT:
            self._abort(live, Reason.TIMEOUT, now)

    def _forget(self, now: float) -> None:
        limits = self.limits
        if not self._marks or now - self._marks[-1][0] >= limits.retention_s / MARKS:
            self._marks.append((now, self._lowest()))
        below = self.state.forgotten
        while self._marks and now - self._marks[0][0] >= limits.retention_s:
            below = max(below, self._marks.popleft()[1])
        if below > self.state.forgotten and not any(isinstance(each.record, Forgotten) for each in self._lazy):
            self._lazy.append(_Decision(Forgotten(below)))
        if now - self._names_looked_at > limits.name_idle_s / 1000:
            self._names_looked_at = now
            self._forget_names(now)

    def _lowest(self) -> int:
        """The lowest id that has no outcome, or whose outcome is not stored everywhere."""
        return min((self._next, *self._unused, *self._live, *self._ending, *self.state.unsettled))

    def _forget_names(self, now: float) -> None:
        idle = [
            name for name, each in self.state.names.items()
            if now - self._used_names.get(name, now) + each.idle_s >= self.limits.name_idle_s
            and name not in self._of_name
        ]  # fmt: skip
        taken = {each.record.name for each in (*self._gathered, *self._writing) if isinstance(each.record, Named)}
        idle = [name for name in idle if name not in taken]
        if idle:
            self._decide(Unnamed(idle), None)
            for name in idle:
                self._used_names.pop(name, None)

    # ------------------------------------------------------------------ the end of the epoch
    def _give_up(self, why: str) -> None:
        self.is_over = True
        self._effects.append(GiveUp(why))

    def given_up(self) -> list[Effect]:
        """Ends all that waits, without an outcome: the next epoch reads the ledger."""
        self.is_over = True
        waiting: list[Intent] = [intent for live in self._live.values() for intent in live.later]
        waiting += [each.intent for each in (*self._gathered, *self._writing) if each.intent is not None]
        waiting += [intent for intents in self._sinks_in_doubt.values() for intent in intents]
        waiting += self.halves.give_up()
        unknown = OutcomeUnknown(f"coordinator {self.number} is moving: ask it again")
        nothing = NotOwner(f"coordinator {self.number} is moving; look it up again")
        answers: dict[object, Result] = {
            intent.request: nothing if isinstance(intent, Join | Status | AbortOpen) else unknown for intent in waiting
        }
        answers |= {request: unknown for ending in self._ending.values() for request in ending.visible}
        self._effects += [Answer(request, result) for request, result in answers.items()]
        for live in self._live.values():
            live.later = []
        for ending in self._ending.values():
            ending.visible.clear()
        self._sinks_in_doubt.clear()
        return self.take_effects()

    def hand_over(self, now: float) -> list[AnyRecord]:
        """What the next epoch goes on with. `is_over` holds and nothing is on its way: nothing is decided after it."""
        assert self.is_over, "nothing is decided after a hand-over"
        assert not [*self._writing, *self._gathered], "nothing is in doubt at a hand-over"
        opened = [
            HandedOpen(txn, live.owned, list(live.participants))
            for txn, live in self._live.items() if live.phase is Phase.OPEN
        ]  # fmt: skip
        grouped: dict[int, tuple[Lease, list[int]]] = {}
        for txn, lease in self._unused.items():
            grouped.setdefault(id(lease), (lease, []))[1].append(txn)
        leases = [HandedLease(txns, lease.owned) for lease, txns in grouped.values()]
        records: list[AnyRecord] = [*(each.record for each in self._lazy), *self.halves.hand_over(now)]
        for start in range(0, max(len(opened), len(leases)), HANDED_MAX):
            end = start + HANDED_MAX
            records.append(HandedOver(self.epoch, opened[start:end], leases[start:end]))
        return records

    # ------------------------------------------------------------------ views
    def _id(self, txn: int) -> TxnId:
        return TxnId(self.number, txn)

    def _answer(self, intent: Intent, result: Result) -> None:
        self._effects.append(Answer(intent.request, result))

    def take_effects(self) -> list[Effect]:
        """Of a fact about a half (`halves.left`, `published`, `not_published`)."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def has_decided(self) -> bool:
        return bool(self._gathered)

    @property
    def has_lazy(self) -> bool:
        return bool(self._lazy)

    @property
    def is_idle(self) -> bool:
        """Nothing is open, prepared or unsettled, nor a half to be asked about: it may be left alone until a client
        asks."""
        open_ = self._live or self._unused or self._ending or self.state.unsettled or self.state.prepared
        return not open_ and self.state.halves.is_idle

    @property
    def next_id(self) -> int:
        return self._next

    @property
    def done_below(self) -> int:
        """Ids below it have ended, and every participant has stored how."""
        return self._lowest()

    def oldest_s(self, now: float) -> float:
        """How long the oldest transaction without an outcome is open; 0: there is none."""
        began = (live.began for live in self._live.values())
        return now - min(began, default=now)

    def sink(self, sink_id: str) -> SinkBatch | None:
        return self.state.sinks.get(sink_id)

    def statistics(self) -> dict[str, int]:
        prepared = sum(live.phase is Phase.PREPARED for live in self._live.values())
        return {
            "open": len(self._live) - prepared,
            "leased": len(self._unused),
            "prepared": prepared,
            "unsettled": len(self._ending),
            "committed": self.counters.committed,
            "aborted": sum(self.counters.aborted.values()),
            **{f"halves_{name}": count for name, count in self.halves.statistics().items()},
        }

    def rows(self, now: float, txn: int | None, limit: int) -> list[Row]:
        """The oldest first; `txn`: this one alone."""
        found = sorted({*self._live, *self._ending}) if txn is None else [txn]
        return [row for each in found[:limit] if (row := self._row(each, now)) is not None]

    def _row(self, txn: int, now: float) -> Row | None:
        live, ending = self._live.get(txn), self._ending.get(txn)
        if live is not None:
            left_s = max(0.0, live.deadline - now)
            owned, waiting = live.owned, list(live.participants)
            return Row(
                txn, _state(live), owned.owner, owned.name, owned.tag, now - live.began, left_s, waiting, "",
                owned.address, owned.timeout_s,
            )  # fmt: skip
        if ending is not None:
            owned = ending.owned or Owned("", 0.0)
            reason = "" if ending.committed else self._reasons.get(txn, Reason.LOST).value
            return Row(
                txn, _state(ending), owned.owner, owned.name, owned.tag, now - ending.began, 0.0, list(ending.waiting),
                reason, owned.address, owned.timeout_s,
            )  # fmt: skip
        if txn >= self._next or txn in self._unused:
            return None
        committed_ = self.state.is_committed(txn)
        reason = "" if committed_ else self._reasons.get(txn, Reason.LOST).value
        return Row(txn, TxnState.COMMITTED if committed_ else TxnState.ABORTED, "", "", None, 0.0, 0.0, [], reason)

    def check(self) -> None:
        """Raises AssertionError."""
        self.state.check()
        self.halves.check()
        own = {txn for txn in (*self._live, *self._unused) if txn >> COUNTER_BITS == self.epoch}
        assert all(txn < self._next for txn in own), "every id was given before it is used"
        assert not self._live.keys() & self._unused.keys(), "an id is leased or used"
        assert not self._live.keys() & self._ending.keys(), "a transaction has an outcome or not"
        for txn, live in self._live.items():
            assert not self.state.is_committed(txn), "a live transaction has no outcome"
            assert (live.phase in IN_DOUBT) or not live.later, "only what is in doubt waits"
            assert (txn in self.state.prepared) is (
                live.phase in (Phase.PREPARED, Phase.ABORTING)
                or (live.phase is Phase.COMMITTING and txn in self.state.prepared)
            ), "prepared is durable"
        written = [each.record for each in (*self._gathered, *self._writing)]
        doubt = {txn for record in written if isinstance(record, Committed) for txn, _ in record.txns}
        doubt |= {record.txn for record in written if isinstance(record, Prepared | Aborted)}
        in_doubt = {txn for txn, live in self._live.items() if live.phase in IN_DOUBT}
        assert doubt - {txn for txn in doubt if txn not in self._live} == in_doubt, "in doubt is what is on its way"
        for txn, ending in self._ending.items():
            assert ending.committed is self.state.is_committed(txn), "committed is durable"
        assert len(self._live) + len(self._unused) <= self.limits.open_max + BLOCK_MAX, "the bound holds"


def _is_to_wait(ending: Ending, intent: End) -> bool:
    return intent.visible and bool(ending.waiting) and ending.committed is (intent.verb is Verb.COMMIT)


def _state(found: Live | Ending | TxnState) -> TxnState:
    if isinstance(found, Live):
        return TxnState.PREPARED if found.phase is Phase.PREPARED else TxnState.OPEN
    if isinstance(found, Ending):
        return TxnState.COMMITTED if found.committed else TxnState.ABORTED
    return found
