"""The ids that a coordinator gave, and what is known of each: its owner, its deadline, and its outcome.

This class only stores and finds them; outcomes_core.py and begins_core.py decide what becomes of a transaction. An id
is in one of three tables (unused, live, ending), or has ended: then it is committed if the durable state says so, and
else aborted. Indexes lead from an owner, its names and its sinks to the ids without an outcome.

**Another role** than the one that began a transaction gets the answer for an id that was never given, whatever its
state is: `check_owner` comes before any other check. Ids that were aborted and are in no table are ABORTED for every
role, for it is not known who began them; the answer says no more than that there was no commit.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from ...proto.errors import InvalidRequest, MagnetarError, TransactionAborted, TransactionFenced, TransactionForgotten
from ...proto.states import COUNTER_BITS, EPOCH_BITS, TxnId, TxnState
from .intents_core import AbortReason, Counters, Intent, Limits, TransactionRow
from .records_core import Participant, SinkBatch, TransactionOwner
from .state_core import CoordinatorState, Key

# ----------------------------------------------------------------------------------------------------- live_core
# A transaction in memory: an id that is not used yet, one without an outcome, or one whose outcome is being settled.
#
#     Lease ─first use→ Live ─outcome→ Ending ─every participant has stored it→ gone; state_core.py says the rest
#
# The phases are those of coordinator_core.py. Guards: tests/broker/transaction/.


COUNTER_MAX, EPOCH_MAX = (1 << COUNTER_BITS) - 1, (1 << EPOCH_BITS) - 1


class Phase(enum.Enum):
    """The phase of a transaction that has no durable outcome."""

    OPEN = "open"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    ABORTING = "aborting"


IN_DOUBT = (Phase.PREPARING, Phase.COMMITTING, Phase.ABORTING)
"""Phases in which a record of the transaction is in flight, so that its outcome is in doubt."""


class IdLease(msgspec.Struct):
    """A block of ids that were given together. Those that are not used by the time `until` become void."""

    owned: TransactionOwner
    until: float


class LiveTransaction(msgspec.Struct):
    """A transaction without an outcome."""

    txn: int
    owned: TransactionOwner
    began: float
    deadline: float
    phase: Phase = Phase.OPEN
    participants: dict[str, Participant] = msgspec.field(default_factory=dict)
    reason: AbortReason = AbortReason.CLIENT
    waiting_intents: list[Intent] = msgspec.field(default_factory=list)  # asked while it is in doubt


class UnsettledTransaction(msgspec.Struct):
    """A transaction with an outcome that some participants have not stored."""

    committed: bool
    waiting: dict[str, Participant]
    owned: TransactionOwner | None
    began: float  # of one of an earlier epoch: the start of this one
    is_durable: bool
    waiting_requests: list[object] = msgspec.field(default_factory=list)  # requests that wait for the last of them


def txn_state_of(found: LiveTransaction | UnsettledTransaction | TxnState) -> TxnState:
    if isinstance(found, LiveTransaction):
        return TxnState.PREPARED if found.phase is Phase.PREPARED else TxnState.OPEN
    if isinstance(found, UnsettledTransaction):
        return TxnState.COMMITTED if found.committed else TxnState.ABORTED
    return found


# ---------------------------------------------------------------------------------------------------- table_core


GONE_MAX = 100_000
"""Most aborted ids whose reason and owner are remembered."""


class AbortedTransaction(NamedTuple):
    """A transaction that was aborted in this epoch."""

    reason: AbortReason
    owner: str


class TransactionTable:
    """The table of ids. `state` is what was read from the ledger; from now on only the coordinator applies records to
    it."""

    def __init__(
        self, number: int, epoch: int, state: CoordinatorState, limits: Limits,
        has_half_of_other: Callable[[int, str], bool],
    ) -> None:  # fmt: skip
        """`has_half_of_other` returns whether an id is that of a half message that another role prepared."""
        assert 0 < epoch <= EPOCH_MAX, "an epoch begins with a claim"
        self._has_half_of_other = has_half_of_other
        self.number, self.epoch, self.state, self.limits = number, epoch, state, limits
        self.counters = Counters()
        self.next_id = epoch << COUNTER_BITS
        self.unused: dict[int, IdLease] = {}
        self.live: dict[int, LiveTransaction] = {}
        self.ending: dict[int, UnsettledTransaction] = {}
        self.open_by_owner: dict[str, int] = {}
        self.by_name: dict[Key, set[int]] = {}  # unused and live ones
        self.by_sink: dict[Key, set[int]] = {}
        self._gone: dict[int, AbortedTransaction] = {}
        self.deadlines: list[tuple[float, int]] = []

    # ------------------------------------------------------------------ what is added and removed
    def add_lease(self, txns: Iterable[int], owned: TransactionOwner, now: float) -> None:
        lease = IdLease(owned, now + self.limits.lease_s)
        for txn in txns:
            self.unused[txn] = lease
            heapq.heappush(self.deadlines, (lease.until, txn))
            self._index(txn, owned)

    def add(self, live: LiveTransaction) -> None:
        self.live[live.txn] = live
        heapq.heappush(self.deadlines, (live.deadline, live.txn))
        self._index(live.txn, live.owned)

    def remove(self, live: LiveTransaction) -> None:
        del self.live[live.txn]
        self.remove_from_indexes(live.txn, live.owned)

    def _index(self, txn: int, owned: TransactionOwner) -> None:
        self.open_by_owner[owned.owner] = self.open_by_owner.get(owned.owner, 0) + 1
        if owned.name:
            self.by_name.setdefault((owned.owner, owned.name), set()).add(txn)
        if owned.tag is not None:
            self.by_sink.setdefault((owned.owner, owned.tag.sink_id), set()).add(txn)

    def remove_from_indexes(self, txn: int, owned: TransactionOwner) -> None:
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
    def txn_id(self, txn: int) -> TxnId:
        return TxnId(self.number, txn)

    def check_owner(self, txn: int, owner: str | None) -> None:
        """Raises InvalidRequest, the same as for an id that was never given, if another role began the transaction.
        `owner` is None: the caller may see those of every role."""
        if owner is None:
            return
        began = self._owner_of(txn)
        if began == owner:
            return
        if began is not None or self._has_half_of_other(txn, owner) or self.state.kept.has_other_owner(txn, owner):
            raise self.make_unknown_id_error(txn)

    def _owner_of(self, txn: int) -> str | None:
        """Returns the role that began the transaction, or None if no table has the transaction id."""
        found = self.unused.get(txn) or self.live.get(txn) or self.ending.get(txn)
        if found is not None and found.owned is not None:
            return found.owned.owner
        gone, outcome = self._gone.get(txn), self.state.unsettled.get(txn)
        if gone is not None:
            return gone.owner
        return (outcome.owner or None) if outcome is not None else None

    def make_unknown_id_error(self, txn: int) -> InvalidRequest:
        return InvalidRequest(f"{self.txn_id(txn)} was never given")

    def has_later_name_holder(self, owned: TransactionOwner) -> bool:
        tag = owned.tag
        sink = self.state.sinks.find(owned.owner, tag.sink_id) if tag is not None else None
        return sink is not None and tag is not None and sink.query_id == tag.query_id and sink.batch >= tag.batch

    def check_holder(self, owner: str, name: str, holder: int) -> None:
        found = self.state.names.find(owner, name) if name else None
        if name and (found is None or found.holder != holder):
            raise TransactionFenced(f"a later holder of {name!r} took over")

    def record_abort(self, txn: int, reason: AbortReason, owner: str) -> None:
        self.counters.aborted[reason] = self.counters.aborted.get(reason, 0) + 1
        self._gone[txn] = AbortedTransaction(reason, owner)
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def _reason_of(self, txn: int, unknown: AbortReason) -> AbortReason:
        gone = self._gone.get(txn)
        return gone.reason if gone is not None else unknown

    def make_forgotten_error(self, txn: int) -> TransactionForgotten:
        return TransactionForgotten(f"{self.txn_id(txn)} ended more than {self.limits.retention_s:g} s ago")

    def why_aborted(self, txn: int) -> MagnetarError:
        if txn < self.state.forgotten_below:
            return self.make_forgotten_error(txn)
        lost = txn >> COUNTER_BITS < self.epoch
        reason = self._reason_of(txn, AbortReason.LOST if lost else AbortReason.TIMEOUT)
        if reason is AbortReason.FENCED:
            return TransactionFenced(f"{self.txn_id(txn)}: a later holder of its name took over")
        return TransactionAborted(f"{self.txn_id(txn)} is aborted: {reason.value}", reason=reason.value)

    # ------------------------------------------------------------------ views
    @property
    def lowest_unsettled_id(self) -> int:
        """The lowest id that has no outcome, or whose outcome some participant has not stored."""
        return min((self.next_id, *self.unused, *self.live, *self.ending, *self.state.unsettled))

    def oldest_open_s(self, now: float) -> float:
        """Returns for how many seconds the oldest transaction without an outcome has been open; 0 if there is no such
        transaction."""
        began = (live.began for live in self.live.values())
        return now - min(began, default=now)

    def find_sink_batch(self, sink_id: str, owner: str = "") -> SinkBatch | None:
        """Returns the last committed batch of the sink of the role `owner`, or None."""
        return self.state.sinks.find(owner, sink_id)

    def transaction_rows(self, now: float, txn: int | None, limit: int) -> list[TransactionRow]:
        """Returns rows of up to `limit` transactions that are not settled, the oldest first; only of `txn` if it is
        given."""
        found = sorted({*self.live, *self.ending}) if txn is None else [txn]
        return [row for each in found[:limit] if (row := self.transaction_row(each, now)) is not None]

    def transaction_row(self, txn: int, now: float) -> TransactionRow | None:
        live, ending = self.live.get(txn), self.ending.get(txn)
        if live is not None:
            left_s = max(0.0, live.deadline - now)
            owned, waiting = live.owned, list(live.participants)
            return TransactionRow(
                txn, txn_state_of(live), owned.owner, owned.name, owned.tag, now - live.began, left_s, waiting, "",
                owned.address, owned.timeout_s,
            )  # fmt: skip
        if ending is not None:
            owned = ending.owned or TransactionOwner("", 0.0)
            reason = "" if ending.committed else self._reason_of(txn, AbortReason.LOST).value
            return TransactionRow(
                txn, txn_state_of(ending), owned.owner, owned.name, owned.tag, now - ending.began, 0.0,
                list(ending.waiting), reason, owned.address, owned.timeout_s,
            )  # fmt: skip
        if txn >= self.next_id or txn in self.unused:
            return None
        committed_ = self.state.is_committed(txn)
        reason = "" if committed_ else self._reason_of(txn, AbortReason.LOST).value
        return TransactionRow(
            txn, TxnState.COMMITTED if committed_ else TxnState.ABORTED, "", "", None, 0.0, 0.0, [], reason
        )
