"""A transaction in memory: an id that is not used yet, one without an outcome, or one whose outcome is being told.

    Lease ─first use→ Live ─outcome→ Ending ─every participant has stored it→ gone; core/state.py says the rest

The phases are those of core/coordinator.py. Guards: tests/broker/transaction/core/.
"""

from __future__ import annotations

import enum

import msgspec

from ....proto.transactions import COUNTER_BITS, EPOCH_BITS, TxnState
from .intents import Intent, Reason
from .records import Owned, Participant

COUNTER_MAX, EPOCH_MAX = (1 << COUNTER_BITS) - 1, (1 << EPOCH_BITS) - 1


class Phase(enum.Enum):
    """The phase of a transaction that has no outcome, or whose outcome is being told."""

    OPEN = "open"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    ABORTING = "aborting"


IN_DOUBT = (Phase.PREPARING, Phase.COMMITTING, Phase.ABORTING)
"""Phases of a transaction of which a record is on its way."""


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


def state_of(found: Live | Ending | TxnState) -> TxnState:
    if isinstance(found, Live):
        return TxnState.PREPARED if found.phase is Phase.PREPARED else TxnState.OPEN
    if isinstance(found, Ending):
        return TxnState.COMMITTED if found.committed else TxnState.ABORTED
    return found
