"""The durable state of a coordinator (`CoordinatorState`): the result of applying the records of its ledger in order.

    state.apply(record)      when the record is durable, and in the same order when the ledger is read
    state.snapshot()         yields records that restore the same state: a ledger begins with them

So the next owner of a coordinator has the same state as its former owner. Guards:
tests/broker/transaction/test_coordinator_walk.py.

`TransactionTable` has the ids that a coordinator gave to clients, with the owner, the deadline and the outcome of each.
It only stores and finds them; outcomes_core.py and begins_core.py decide about transactions. An id is in one of three
tables (unused, live, ending), or is settled: then it is committed if the durable state says so, and else aborted.
Indexes lead from a role, its names and its sinks to the ids without an outcome.

**Another role** than the one that began a transaction gets the answer for an id that was never given, whatever its
state is: `check_owner` is called before any other check. An id that was aborted and is in no table is ABORTED for every
role, because its role is not known; the answer only says that there was no commit.

Also in this file, each below its heading: the half messages in a coordinator's ledger, and the outcomes of those that
ended (stored_halves_core); values that belong to a role (owned_core); a transaction in memory (live_core).
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Generic, NamedTuple, TypeVar, assert_never

import msgspec
from pyroaring import BitMap, BitMap64

from ...proto.errors import InvalidRequest, MagnetarError, TransactionAborted, TransactionFenced, TransactionForgotten
from ...proto.states import COUNTER_BITS, EPOCH_BITS, TxnId, TxnState
from .intents_core import AbortReason, CoordinatorCounters, CoordinatorIntent, CoordinatorLimits, TransactionRow
from .records_core import (
    DISCARDED_BATCH_NUMBER,
    AnyCoordinatorRecord,
    EpochHandedOver,
    HalfMessageAgeRecorded,
    HalfMessageOutcomesDiscarded,
    HalfMessageOutcomesInSnapshot,
    HalfMessageRecord,
    HalfMessageRolledBack,
    HalfMessageStored,
    IdleNamesRemoved,
    LargestHolderNumber,
    NameHolderChanged,
    OutcomesDiscarded,
    Participant,
    ParticipantDetached,
    PreparedTransactionAborted,
    SettledOutcomesInSnapshot,
    SinkBatch,
    SinkBatchRecorded,
    TransactionOwner,
    TransactionPrepared,
    TransactionsCommitted,
    TransactionsSettled,
    decode_participants,
    make_commit_record,
)

# -------------------------------------------------------------------------------------------- stored_halves_core
# The half messages in a coordinator's ledger, and the outcomes of those that ended: a part of its state.
#
#     halves.apply(record) | add_committed_half_message(half)    when it is durable, and when the ledger is read
#     halves.find_half_message_outcome(half)     COMMITTED, ABORTED; None: it is open, forgotten, or never was stored
#
# A half is in `open` from its HalfMessageStored to the record that ends it: the COMMIT of the transaction that
# published it (`half` of its record), or HalfMessageRolledBack. Then its id is in one of two bitmaps until
# HalfMessageOutcomesDiscarded. Its age is that of the last HalfMessageAgeRecorded: the time since then is lost in a
# take-over, so that no clock of another machine matters. Guards: tests/broker/transaction/test_halves_walk.py.


class StoredHalfMessages:
    """The half messages that are stored in a coordinator's ledger: the open ones (`open`, by id), and the outcomes of
    those that have ended. `size_bytes`: the bytes of the messages of all open ones."""

    __slots__ = ("_committed", "_of", "_rolled_back", "open", "size_bytes")

    def __init__(self) -> None:
        self.open: dict[int, HalfMessageStored] = {}
        self.size_bytes = 0  # of the messages of all that are open
        self._committed = BitMap64()
        self._rolled_back = BitMap64()
        self._of: dict[str, BitMap64] = {}  # those that ended, by the role that prepared them

    def apply(self, record: HalfMessageRecord) -> None:
        """Applies a durable record about half messages. Must be called in the order of the ledger. Raises KeyError or
        ValueError as `CoordinatorState.apply` does. (A commit comes by `add_committed_half_message`.)"""
        match record:
            case HalfMessageStored():
                self.open[record.half] = record
                self.size_bytes += half_message_size_bytes(record)
            case HalfMessageAgeRecorded():
                found = self.open.get(record.half)
                if found is not None:
                    self.open[record.half] = msgspec.structs.replace(
                        found, unknown=record.unknown, age_s=record.age_s, parked=record.parked
                    )
            case HalfMessageRolledBack():
                self._remove(record.half)
                self._rolled_back.add(record.half)
            case HalfMessageOutcomesInSnapshot():
                self._committed = BitMap64.deserialize(record.committed)
                self._rolled_back = BitMap64.deserialize(record.rolled_back)
                self._of = {owner: BitMap64.deserialize(ids) for owner, ids in record.owners.items()}
            case HalfMessageOutcomesDiscarded():
                forgotten = BitMap64.deserialize(record.halves)
                self._committed -= forgotten
                self._rolled_back -= forgotten
                left = {owner: ids - forgotten for owner, ids in self._of.items()}
                self._of = {owner: ids for owner, ids in left.items() if ids}
            case _:
                assert_never(record)

    def add_committed_half_message(self, half: int) -> None:
        """Records that the half message is committed, so that it is not open any more. Raises KeyError if it was not
        open."""
        self._remove(half)
        self._committed.add(half)

    def _remove(self, half: int) -> None:
        stored = self.open.pop(half)
        self.size_bytes -= half_message_size_bytes(stored)
        if stored.owner:
            self._of.setdefault(stored.owner, BitMap64()).add(half)

    def find_half_message_outcome(self, half: int) -> TxnState | None:
        """Returns the outcome of the half message, COMMITTED or ABORTED; None if it has no outcome, or if the id is not
        known."""
        if half in self._committed:
            return TxnState.COMMITTED
        return TxnState.ABORTED if half in self._rolled_back else None

    def has_other_owner(self, half: int, owner: str) -> bool:
        """Returns True if the half message has ended, and another role than `owner` prepared it. (An earlier version
        did not store the role; then returns False.)"""
        if self.find_half_message_outcome(half) is None or half in self._of.get(owner, ()):
            return False
        return any(half in ids for ids in self._of.values())

    def ended_half_message_ids(self) -> BitMap64:
        """Returns the ids of the half messages whose outcomes are still stored."""
        return self._committed | self._rolled_back

    @property
    def is_idle(self) -> bool:
        """Returns True if no half message must be checked, because each open one is parked."""
        return all(each.parked for each in self.open.values())

    def snapshot(self) -> Iterator[HalfMessageRecord]:
        """Yields records from which the same state can be restored."""
        yield from self.open.values()
        if self._committed or self._rolled_back:
            owners = {owner: ids.serialize() for owner, ids in self._of.items()}
            yield HalfMessageOutcomesInSnapshot(self._committed.serialize(), self._rolled_back.serialize(), owners)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken. The messages of the assertions are the invariants."""
        assert not self._committed & self._rolled_back, "a half has at most one outcome"
        assert not any(self.find_half_message_outcome(half) for half in self.open), "an open half has no outcome"
        assert self.size_bytes == sum(map(half_message_size_bytes, self.open.values())), (
            "the bytes of all open halves are counted"
        )


def half_message_size_bytes(half: HalfMessageStored) -> int:
    """Returns the bytes of the messages of a half message, with the names of their topics."""
    return sum(len(each.topic) + len(each.entry) for each in half.messages)


# ---------------------------------------------------------------------------------------------------- owned_core
# Values that belong to a role: names and sinks by their owner, and the roles that began the committed transactions.
#
#     table.find(owner, name)      what the role has under the name; else what no role has
#     kept.add(txn, owner)         it is committed
#     kept.has_other_owner(…)      it is committed, and another role began it
#
# A name belongs to a role: two roles may use one name for two things, and neither learns of the other's. The owner ""
# is no role: a caller in a cluster without security, or the owner in a record of an earlier version, which named none.
# Every role finds the values of "", and none changes them: a role that changes one has its own from then on. Guards:
# tests/broker/transaction/test_owners.py.


Value = TypeVar("Value")
OwnerAndName = tuple[str, str]
"""A role, and a name that this role uses."""
LOW_ID_BITS = 32
_LOW = (1 << LOW_ID_BITS) - 1
IdSet = dict[int, BitMap]
"""A set of ids: for each value of the upper bits, a bitmap of the lower bits."""


class ValuesByRoleAndName(Generic[Value]):
    """A map from a role and a name to a value. It counts the names of each role."""

    __slots__ = ("_counts", "_values")

    def __init__(self) -> None:
        self._values: dict[OwnerAndName, Value] = {}
        self._counts: dict[str, int] = {}

    def find(self, owner: str, name: str) -> Value | None:
        """Returns the value that belongs to the role `owner` and the name; if there is none, the value of this name
        without a role, which an earlier version stored; else None."""
        found = self._values.get((owner, name))
        return found if found is not None or not owner else self._values.get(("", name))

    def make_key(self, owner: str, name: str) -> OwnerAndName:
        """Returns the key of the value that `find` returns: the role and the name, or "" and the name."""
        return (owner, name) if (owner, name) in self._values else ("", name)

    def store_value(self, owner: str, name: str, value: Value) -> None:
        """Stores the value of the role `owner` under the name, in place of its former value."""
        if (owner, name) not in self._values:
            self._counts[owner] = self._counts.get(owner, 0) + 1
        self._values[owner, name] = value

    def remove(self, owner: str, name: str) -> None:
        """Removes the value of exactly this role and name, if there is one."""
        if self._values.pop((owner, name), None) is None:
            return
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]

    def has_room(self, owner: str, name: str, most: int, most_of_role: int) -> bool:
        """Returns True if the role `owner` may add `name`. That is so if the map contains it already, or if it has
        fewer than `most` values, and fewer than `most_of_role` values of this role. Without a role there is no limit
        per role."""
        if (owner, name) in self._values:
            return True
        return len(self._values) < most and (not owner or self._counts.get(owner, 0) < most_of_role)

    def items(self) -> Iterable[tuple[OwnerAndName, Value]]:
        return self._values.items()

    def __contains__(self, key: OwnerAndName) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)


class CommittedTransactionIds:
    """The ids of the committed transactions whose outcomes are not discarded yet. Stores bitmaps: one for transactions
    without a role, one for all transactions with a role, and one for each role."""

    __slots__ = ("_free", "_of", "_owned")

    def __init__(self) -> None:
        self._free: IdSet = {}  # of no role
        self._owned: IdSet = {}  # of any role
        self._of: dict[str, IdSet] = {}

    def add(self, txn: int, owner: str) -> None:
        if not owner:
            _add(self._free, txn)
            return
        _add(self._owned, txn)
        _add(self._of.setdefault(owner, {}), txn)

    def __contains__(self, txn: int) -> bool:
        return _has(self._free, txn) or _has(self._owned, txn)

    def has_other_owner(self, txn: int, owner: str) -> bool:
        """Returns True if the transaction is committed, and another role than `owner` began it. Returns False if it was
        begun without a role."""
        return _has(self._owned, txn) and not _has(self._of.get(owner, {}), txn)

    def discard_ids_below(self, below: int) -> None:
        """Removes all ids below `below`."""
        for ids in (self._free, self._owned, *self._of.values()):
            discard_ids_below(ids, below)
        self._of = {owner: ids for owner, ids in self._of.items() if ids}

    def restore_ids_from_record(self, record: SettledOutcomesInSnapshot) -> None:
        """Adds the ids of one record of a snapshot, while the ledger is read. Raises ValueError if a bitmap in it is
        damaged."""
        everything, owned = BitMap.deserialize(record.committed), BitMap()
        for owner, ids in record.owners.items():
            found = self._of.setdefault(owner, {})[record.high] = BitMap.deserialize(ids)
            owned |= found
        if free := everything - owned:
            self._free[record.high] = free
        if owned:
            self._owned[record.high] = owned

    def snapshot(self) -> Iterator[SettledOutcomesInSnapshot]:
        """Yields the records that store these ids in a snapshot. Each record lists all ids in the field `committed`,
        and the ids of each role again, because an earlier version reads only `committed`."""
        for high in dict.fromkeys((*self._free, *self._owned)):
            everything = self._free.get(high, BitMap()) | self._owned.get(high, BitMap())
            owners = {owner: ids[high].serialize() for owner, ids in self._of.items() if high in ids}
            yield SettledOutcomesInSnapshot(high, everything.serialize(), owners)


def _add(ids: IdSet, txn: int) -> None:
    ids.setdefault(txn >> LOW_ID_BITS, BitMap()).add(txn & _LOW)


def _has(ids: IdSet, txn: int) -> bool:
    found = ids.get(txn >> LOW_ID_BITS)
    return found is not None and txn & _LOW in found


def discard_ids_below(ids: IdSet, below: int) -> None:
    """Removes from the set `ids` all ids below `below`."""
    high, low = below >> LOW_ID_BITS, below & _LOW
    for each in [each for each in ids if each < high]:
        del ids[each]
    if high in ids:
        ids[high].remove_range(0, low)
        if not ids[high]:
            del ids[high]


# ---------------------------------------------------------------------------------------------------- state_core


_NOBODY = TransactionOwner("", 0.0)


class UnsettledOutcome(msgspec.Struct):
    """The outcome of a transaction that is not settled yet. `waiting`: the participants that may not have stored the
    outcome."""

    committed: bool
    waiting: dict[str, Participant]
    owner: str = ""


class NameHolder(msgspec.Struct):
    """The present holder of a name under which transactions are begun. Each client that takes the name over gets the
    next holder number; only the latest may begin and end transactions under the name. `idle_s`: for how long the name
    was idle when this was recorded."""

    holder: int
    idle_s: float  # when the record was written


class CoordinatorState:
    """The durable state of one coordinator. It results from applying the records of its ledger in order. `kept`: the
    ids of committed transactions; `unsettled`: outcomes that participants may not have stored; `prepared`: prepared
    transactions; `handed`: what earlier epochs handed over; `forgotten_below`: the outcomes of lower ids are
    discarded."""

    __slots__ = (
        "forgotten_below",
        "halves",
        "handed",
        "kept",
        "last_holder",
        "names",
        "prepared",
        "sinks",
        "unsettled",
    )

    def __init__(self) -> None:
        self.kept = CommittedTransactionIds()
        self.unsettled: dict[int, UnsettledOutcome] = {}
        self.prepared: dict[int, TransactionPrepared] = {}
        self.names: ValuesByRoleAndName[NameHolder] = ValuesByRoleAndName()
        self.sinks: ValuesByRoleAndName[SinkBatch] = ValuesByRoleAndName()
        self.last_holder = 0  # the largest number of a holder of any name: none is given twice
        self.forgotten_below = 0  # the outcomes of ids below are not known any more
        self.handed: list[EpochHandedOver] = []
        self.halves = StoredHalfMessages()

    def is_committed(self, txn: int) -> bool:
        return txn in self.kept

    def apply(self, record: AnyCoordinatorRecord) -> None:
        """Applies a durable record. Must be called in the order of the ledger. Raises KeyError or ValueError if the
        record contradicts the state, which means that the ledger is damaged."""
        match record:
            case TransactionsCommitted():
                self._committed(record)
            case TransactionPrepared():
                self.prepared[record.txn] = record
            case PreparedTransactionAborted():
                del self.prepared[record.txn]
                waiting = {topic: Participant(topic) for topic in record.topics}
                self.unsettled[record.txn] = UnsettledOutcome(False, waiting, record.owner)
            case TransactionsSettled():
                for txn in record.txns:
                    self.unsettled.pop(txn, None)
            case ParticipantDetached():
                outcome = self.unsettled.get(record.txn)
                if outcome is not None:
                    outcome.waiting.pop(record.topic, None)
            case NameHolderChanged():
                self.names.store_value(record.owner, record.name, NameHolder(record.holder, record.idle_s))
                self.last_holder = max(self.last_holder, record.holder)
            case IdleNamesRemoved():
                for owner, name in zip_longest(record.owners, record.names, fillvalue=""):
                    self.names.remove(owner, name)
            case OutcomesDiscarded():
                self.forgotten_below = record.below
                self.kept.discard_ids_below(record.below)
            case EpochHandedOver():
                self.handed.append(record)
            case SettledOutcomesInSnapshot():
                self.kept.restore_ids_from_record(record)
            case LargestHolderNumber():
                self.last_holder = record.holders
            case SinkBatchRecorded():
                self._sink(record.sink)
            case (
                    HalfMessageStored() | HalfMessageAgeRecorded() | HalfMessageRolledBack()
                    | HalfMessageOutcomesInSnapshot() | HalfMessageOutcomesDiscarded()
                ):
                self.halves.apply(record)
            case _:
                assert_never(record)

    def _committed(self, record: TransactionsCommitted) -> None:
        for txn, shares in record.txns:
            self.prepared.pop(txn, None)
            self.kept.add(txn, record.owner)
            if shares:
                found = decode_participants(record, shares)
                self.unsettled[txn] = UnsettledOutcome(True, {each.topic: each for each in found}, record.owner)
        if record.sink is not None:
            self._sink(record.sink)
        if record.half:
            self.halves.add_committed_half_message(record.half)

    def _sink(self, sink: SinkBatch) -> None:
        if sink.batch == DISCARDED_BATCH_NUMBER:
            self.sinks.remove(sink.owner, sink.sink_id)
        else:
            self.sinks.store_value(sink.owner, sink.sink_id, sink)

    def snapshot(self) -> Iterator[AnyCoordinatorRecord]:
        """Yields records from which the state can be restored. The records are small, so that they can be stored in
        several entries."""
        yield LargestHolderNumber(self.last_holder)
        yield OutcomesDiscarded(self.forgotten_below)
        for txn, outcome in self.unsettled.items():
            if outcome.committed:
                yield make_commit_record({txn: list(outcome.waiting.values())}, owner=outcome.owner)
            else:
                yield from (
                    TransactionPrepared(txn, _NOBODY, [], 0.0),
                    PreparedTransactionAborted(txn, list(outcome.waiting), outcome.owner),
                )
        # after the unsettled ones, whose bits are in it
        yield from self.kept.snapshot()
        yield from self.prepared.values()
        for (owner, name), each in self.names.items():
            yield NameHolderChanged(name, each.holder, each.idle_s, owner)
        yield from (SinkBatchRecorded(sink) for _, sink in self.sinks.items())
        yield from self.halves.snapshot()

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken. The messages of the assertions are the invariants."""
        for txn, outcome in self.unsettled.items():
            assert not outcome.committed or self.is_committed(txn), "an outcome that is not settled is kept"
            assert txn >= self.forgotten_below, "nothing is forgotten that is not done"
            assert txn not in self.prepared, "a transaction that ended is not prepared"
        assert not any(self.is_committed(txn) for txn in self.prepared), "a prepared transaction has no outcome"
        assert all(txn >= self.forgotten_below for txn in self.prepared), "no prepared transaction is forgotten"
        self.halves.check()
        assert all(each.holder <= self.last_holder for _, each in self.names.items()), (
            "no holder's number is given twice"
        )


# ----------------------------------------------------------------------------------------------------- live_core
# A transaction in memory: an id that is not used yet, one without an outcome, or one whose outcome is being settled.
#
#     lease ─first use→ live ─outcome→ ending ─every participant has stored it→ gone; CoordinatorState says the rest
#
# The phases are those of coordinator_core.py. Guards: tests/broker/transaction/.


COUNTER_MAX, EPOCH_MAX = (1 << COUNTER_BITS) - 1, (1 << EPOCH_BITS) - 1


class TransactionPhase(enum.Enum):
    """The phases of a transaction that has no durable outcome yet."""

    OPEN = "open"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    ABORTING = "aborting"


IN_DOUBT_PHASES = (TransactionPhase.PREPARING, TransactionPhase.COMMITTING, TransactionPhase.ABORTING)
"""Phases in which a record of the transaction is in flight, so that its outcome is in doubt."""


class TransactionIdLease(msgspec.Struct):
    """Transaction ids that were given to a client together, in advance. Ids that the client has not used by the time
    `until` (monotonic seconds) become void: they can never be used."""

    owned: TransactionOwner
    until: float


class LiveTransaction(msgspec.Struct):
    """A transaction that has begun and has no durable outcome yet. `began`: the time of its first use, or of this
    epoch's start; `deadline`: when it is aborted (both in monotonic seconds); `reason`: why it is being aborted."""

    txn: int
    owned: TransactionOwner
    began: float
    deadline: float
    phase: TransactionPhase = TransactionPhase.OPEN
    participants: dict[str, Participant] = msgspec.field(default_factory=dict)
    reason: AbortReason = AbortReason.CLIENT
    waiting_intents: list[CoordinatorIntent] = msgspec.field(default_factory=list)  # asked while it is in doubt


class UnsettledTransaction(msgspec.Struct):
    """A transaction that has an outcome, which some of its participants have not stored yet. `waiting`: those
    participants, by topic; `owned`: None if it ended in an earlier epoch; `began`: the time of its first use in this
    epoch, or the epoch's start, in monotonic seconds; `is_durable`: a record of the outcome is durable."""

    committed: bool
    waiting: dict[str, Participant]
    owned: TransactionOwner | None
    began: float
    is_durable: bool
    waiting_requests: list[object] = msgspec.field(default_factory=list)  # requests that wait for the last of them


def txn_state_of_table_entry(found: LiveTransaction | UnsettledTransaction | TxnState) -> TxnState:
    """Returns the state of a transaction. `found`: the result of a search in the TransactionTable, which is an object
    or the state itself."""
    if isinstance(found, LiveTransaction):
        return TxnState.PREPARED if found.phase is TransactionPhase.PREPARED else TxnState.OPEN
    if isinstance(found, UnsettledTransaction):
        return TxnState.COMMITTED if found.committed else TxnState.ABORTED
    return found


# ---------------------------------------------------------------------------------------------------- table_core


ABORTS_REMEMBERED_MAX = 100_000
"""Most aborted ids whose reason and owner are remembered."""


class AbortedTransaction(NamedTuple):
    """Why a transaction was aborted in this epoch, and the role that began it."""

    reason: AbortReason
    owner: str


class TransactionTable:
    """The transactions of a coordinator by id, and the leased ids that were not used yet (`unused`). `live`: those
    without a durable outcome; `ending`: those whose outcome is being settled; `state`: the state that was read from the
    ledger; from then on only the coordinator applies records to it. In all methods `now` is in monotonic seconds."""

    def __init__(
        self, number: int, epoch: int, state: CoordinatorState, limits: CoordinatorLimits,
        has_half_of_other: Callable[[int, str], bool],
    ) -> None:  # fmt: skip
        """`has_half_of_other(id, role)`: a function that returns True if the id belongs to a half message that another
        role prepared."""
        assert 0 < epoch <= EPOCH_MAX, "an epoch begins with a claim"
        self._has_half_of_other = has_half_of_other
        self.number, self.epoch, self.state, self.limits = number, epoch, state, limits
        self.counters = CoordinatorCounters()
        self.next_id = epoch << COUNTER_BITS
        self.unused: dict[int, TransactionIdLease] = {}
        self.live: dict[int, LiveTransaction] = {}
        self.ending: dict[int, UnsettledTransaction] = {}
        self.open_by_owner: dict[str, int] = {}
        self.by_name: dict[OwnerAndName, set[int]] = {}  # unused and live ones
        self.by_sink: dict[OwnerAndName, set[int]] = {}
        self._gone: dict[int, AbortedTransaction] = {}
        self.deadlines: list[tuple[float, int]] = []

    # ------------------------------------------------------------------ what is added and removed
    def add_lease(self, txns: Iterable[int], owned: TransactionOwner, now: float) -> None:
        """Adds ids that are leased to a client for `lease_s` seconds from `now` on."""
        lease = TransactionIdLease(owned, now + self.limits.lease_s)
        for txn in txns:
            self.unused[txn] = lease
            heapq.heappush(self.deadlines, (lease.until, txn))
            self._index(txn, owned)

    def add_transaction(self, live: LiveTransaction) -> None:
        """Adds a transaction without an outcome, with its deadline."""
        self.live[live.txn] = live
        heapq.heappush(self.deadlines, (live.deadline, live.txn))
        self._index(live.txn, live.owned)

    def remove_transaction(self, live: LiveTransaction) -> None:
        """Removes a transaction because it gets its outcome."""
        del self.live[live.txn]
        self.remove_from_indexes(live.txn, live.owned)

    def _index(self, txn: int, owned: TransactionOwner) -> None:
        self.open_by_owner[owned.owner] = self.open_by_owner.get(owned.owner, 0) + 1
        if owned.name:
            self.by_name.setdefault((owned.owner, owned.name), set()).add(txn)
        if owned.tag is not None:
            self.by_sink.setdefault((owned.owner, owned.tag.sink_id), set()).add(txn)

    def remove_from_indexes(self, txn: int, owned: TransactionOwner) -> None:
        """Removes the id from the indexes by role, name and sink, because it is no longer unused or live."""
        self.open_by_owner[owned.owner] -= 1
        if not self.open_by_owner[owned.owner]:
            del self.open_by_owner[owned.owner]
        sink = owned.tag.sink_id if owned.tag else ""
        for name, index in ((owned.name, self.by_name), (sink, self.by_sink)):
            if (key := (owned.owner, name)) in index:
                index[key].discard(txn)
                if not index[key]:
                    del index[key]

    # ------------------------------------------------------------------ what is known of an id
    def make_txn_id(self, txn: int) -> TxnId:
        return TxnId(self.number, txn)

    def check_owner(self, txn: int, owner: str | None) -> None:
        """Raises InvalidRequest if another role than `owner` began the transaction. The error is the same as for an id
        that was never given, so that the caller learns nothing. `owner` None: the caller may see the transactions of
        every role."""
        if owner is None:
            return
        began = self._owner_of(txn)
        if began == owner:
            return
        if began is not None or self._has_half_of_other(txn, owner) or self.state.kept.has_other_owner(txn, owner):
            raise self.make_unknown_id_error(txn)

    def _owner_of(self, txn: int) -> str | None:
        """Returns the role that began the transaction; None if that is not known."""
        found = self.unused.get(txn) or self.live.get(txn) or self.ending.get(txn)
        if found is not None and found.owned is not None:
            return found.owned.owner
        gone, outcome = self._gone.get(txn), self.state.unsettled.get(txn)
        if gone is not None:
            return gone.owner
        return (outcome.owner or None) if outcome is not None else None

    def make_unknown_id_error(self, txn: int) -> InvalidRequest:
        """Returns the error for an id that was never given to a client."""
        return InvalidRequest(f"{self.make_txn_id(txn)} was never given")

    def is_sink_batch_committed(self, owned: TransactionOwner) -> bool:
        """Returns True if the sink of the transaction has committed the transaction's batch, or a later batch of the
        same query."""
        tag = owned.tag
        sink = self.state.sinks.find(owned.owner, tag.sink_id) if tag is not None else None
        return sink is not None and tag is not None and sink.query_id == tag.query_id and sink.batch >= tag.batch

    def check_name_holder(self, owner: str, name: str, holder: int) -> None:
        """Raises TransactionFenced if `holder` is not the present holder of the name. Does nothing if `name` is
        empty."""
        found = self.state.names.find(owner, name) if name else None
        if name and (found is None or found.holder != holder):
            raise TransactionFenced(f"a later holder of {name!r} took over")

    def record_abort(self, txn: int, reason: AbortReason, owner: str) -> None:
        """Counts an aborted transaction, and stores its reason and its role in memory, for later requests about it. Of
        more than ABORTS_REMEMBERED_MAX aborts, the oldest is dropped."""
        self.counters.aborted[reason] = self.counters.aborted.get(reason, 0) + 1
        self._gone[txn] = AbortedTransaction(reason, owner)
        if len(self._gone) > ABORTS_REMEMBERED_MAX:
            del self._gone[next(iter(self._gone))]

    def _reason_of(self, txn: int, unknown: AbortReason) -> AbortReason:
        gone = self._gone.get(txn)
        return gone.reason if gone is not None else unknown

    def make_transaction_forgotten_error(self, txn: int) -> TransactionForgotten:
        """Returns the error for a transaction whose outcome was discarded."""
        return TransactionForgotten(f"{self.make_txn_id(txn)} ended more than {self.limits.retention_s:g} s ago")

    def make_abort_error(self, txn: int) -> MagnetarError:
        """Returns the error that answers a request about an aborted transaction: TransactionForgotten if the outcome
        was discarded; TransactionFenced if a later holder of its name took over; else TransactionAborted with the
        reason."""
        if txn < self.state.forgotten_below:
            return self.make_transaction_forgotten_error(txn)
        lost = txn >> COUNTER_BITS < self.epoch
        reason = self._reason_of(txn, AbortReason.LOST if lost else AbortReason.TIMEOUT)
        if reason is AbortReason.FENCED:
            return TransactionFenced(f"{self.make_txn_id(txn)}: a later holder of its name took over")
        return TransactionAborted(f"{self.make_txn_id(txn)} is aborted: {reason.value}", reason=reason.value)

    # ------------------------------------------------------------------ views
    @property
    def lowest_unsettled_id(self) -> int:
        """Returns the lowest transaction id that has no outcome yet, or whose outcome some participant has not
        stored."""
        return min((self.next_id, *self.unused, *self.live, *self.ending, *self.state.unsettled))

    def oldest_open_s(self, now: float) -> float:
        """Returns for how many seconds the oldest transaction without an outcome has been open; 0 if no transaction is
        open."""
        began = (live.began for live in self.live.values())
        return now - min(began, default=now)

    def find_sink_batch(self, sink_id: str, owner: str = "") -> SinkBatch | None:
        """Returns the batch that the sink `sink_id` of the role `owner` has committed last; if it has committed none,
        that of a sink of this id without a role; else None."""
        return self.state.sinks.find(owner, sink_id)

    def transaction_rows(self, now: float, txn: int | None, limit: int) -> list[TransactionRow]:
        """Returns descriptions of up to `limit` transactions that have begun and are not settled, the oldest first. If
        `txn` is not None, describes only this transaction, also if it is settled; [] if its id was not used."""
        found = sorted({*self.live, *self.ending}) if txn is None else [txn]
        return [row for each in found[:limit] if (row := self.transaction_row(each, now)) is not None]

    def transaction_row(self, txn: int, now: float) -> TransactionRow | None:
        """Returns a description of the transaction; None if its id was not given or not used yet. For a settled
        transaction only the state and the reason are known."""
        live, ending = self.live.get(txn), self.ending.get(txn)
        if live is not None:
            left_s = max(0.0, live.deadline - now)
            owned, waiting = live.owned, list(live.participants)
            return TransactionRow(
                txn, txn_state_of_table_entry(live), owned.owner, owned.name, owned.tag, now - live.began, left_s,
                waiting, "",
                owned.address, owned.timeout_s,
            )  # fmt: skip
        if ending is not None:
            owned = ending.owned or TransactionOwner("", 0.0)
            reason = "" if ending.committed else self._reason_of(txn, AbortReason.LOST).value
            return TransactionRow(
                txn, txn_state_of_table_entry(ending), owned.owner, owned.name, owned.tag, now - ending.began, 0.0,
                list(ending.waiting), reason, owned.address, owned.timeout_s,
            )  # fmt: skip
        if txn >= self.next_id or txn in self.unused:
            return None
        committed_ = self.state.is_committed(txn)
        reason = "" if committed_ else self._reason_of(txn, AbortReason.LOST).value
        return TransactionRow(
            txn, TxnState.COMMITTED if committed_ else TxnState.ABORTED, "", "", None, 0.0, 0.0, [], reason
        )
