"""Defects of half messages: patches of the core of a coordinator, and of what its next epoch reads."""

from collections.abc import Sequence

from msgspec.structs import replace

from magnetar.broker.transaction import log
from magnetar.broker.transaction.coordinator_core import TransactionCoordinatorCore
from magnetar.broker.transaction.halves_core import HalfMessageCore, OpenHalfMessage
from magnetar.broker.transaction.halves_core import UndecidedHalfPhase as HalfMessagePhase
from magnetar.broker.transaction.intents_core import EndHalf, HalfMessageEndVerb
from magnetar.broker.transaction.log import CoordinatorLog
from magnetar.broker.transaction.records_core import (
    HalfMessageRolledBack,
    Participant,
    TransactionsCommitted,
    make_commit_record,
)
from magnetar.broker.transaction.state_core import CoordinatorState, TransactionPhase
from tests.mutants.ledgers import Stack, put


def decided_apart(stack: Stack) -> None:
    """M98: a half ends by a record of its own, after that of the transaction that publishes it."""

    def commit_own(
        self: TransactionCoordinatorCore, txn: int, listed: Sequence[Participant], half: int, now: float
    ) -> None:
        live = self.table.live[txn]
        found = self.ends.match_reported_participants(live, listed, now)
        live.phase, live.participants = TransactionPhase.COMMITTING, {each.topic: each for each in found}
        self.decisions.append_decision(make_commit_record({txn: found}))
        self.decisions.append_decision(HalfMessageRolledBack(half))

    put(stack, TransactionCoordinatorCore, "commit_transaction_for_half_message", commit_own)


def any_unknown_counts(stack: Stack) -> None:
    """M98b: an answer of UNKNOWN counts whichever question it answers."""
    honest = HalfMessageCore._end

    def end(self: HalfMessageCore, intent: EndHalf, now: float) -> None:
        half = self._halves.get(intent.half)
        if half is not None and intent.verb is HalfMessageEndVerb.UNKNOWN:
            intent = replace(intent, check=half.check_number)
        honest(self, intent, now)

    put(stack, HalfMessageCore, "_end", end)


def failures_count(stack: Stack) -> None:
    """M98c: a check that failed counts like an answer of UNKNOWN."""
    honest = HalfMessageCore._undecided

    def undecided(self: HalfMessageCore, half: OpenHalfMessage, intent: EndHalf, now: float) -> None:
        honest(self, half, replace(intent, verb=HalfMessageEndVerb.UNKNOWN), now)

    put(stack, HalfMessageCore, "_undecided", undecided)


def dropped_when_unknown(stack: Stack) -> None:
    """M98d: a half whose checks are used up is rolled back, and not parked."""
    honest = HalfMessageCore._park

    def park(self: HalfMessageCore, half: OpenHalfMessage, why: str, now: float, *, unknown: int = 0) -> None:
        if not unknown:
            honest(self, half, why, now)
            return
        self._leave(half)
        half.phase = HalfMessagePhase.ROLLING_BACK
        self._coordinator.decisions.append_decision(HalfMessageRolledBack(half.record.half))
        self._ask(half.half_message_group_key, now)

    put(stack, HalfMessageCore, "_park", park)


class _Forgetful(CoordinatorState):
    __slots__ = ()

    def _committed(self, record: TransactionsCommitted) -> None:
        super()._committed(replace(record, half=0))


def open_again_after_a_take_over(stack: Stack) -> None:
    """M98e: a half that is committed is open again in the next epoch, and is published once more."""

    async def recover_ledger(self: CoordinatorLog) -> None:
        self._state.__class__ = _Forgetful
        try:
            await self.recover_ledger()
        finally:
            self._state.__class__ = CoordinatorState

    steps = (recover_ledger if step is CoordinatorLog.recover_ledger else step for step in log.TAKE_OVER_STEPS)
    put(stack, log, "TAKE_OVER_STEPS", tuple(steps))
