"""Defects of half messages: patches of the core of a coordinator."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from magnetar.broker.transaction.core.coordinator import Coordinator
from magnetar.broker.transaction.core.halves import Half, Halves
from magnetar.broker.transaction.core.intents import EndHalf, HalfVerb
from magnetar.broker.transaction.core.live import Phase
from magnetar.broker.transaction.core.records import HalfRolledBack, Participant, committed
from tests.mutants.ledgers import Stack, put


def decided_apart(stack: Stack) -> None:
    """M98: a half ends by a record of its own, after that of the transaction that publishes it."""

    def commit_own(self: Coordinator, txn: int, listed: Sequence[Participant], half: int, now: float) -> None:
        live = self._live[txn]
        found = self._participants(live, listed, now)
        live.phase, live.participants = Phase.COMMITTING, {each.topic: each for each in found}
        self._decide(committed({txn: found}), None)
        self.decide(HalfRolledBack(half))

    put(stack, Coordinator, "commit_own", commit_own)


def any_unknown_counts(stack: Stack) -> None:
    """M98b: an answer of UNKNOWN counts whichever question it answers."""
    honest = Halves._end

    def end(self: Halves, intent: EndHalf, now: float) -> None:
        half = self._halves.get(intent.half)
        if half is not None and intent.verb is HalfVerb.UNKNOWN:
            intent = replace(intent, check=half.check)
        honest(self, intent, now)

    put(stack, Halves, "_end", end)


def failures_count(stack: Stack) -> None:
    """M98c: a check that failed counts like an answer of UNKNOWN."""
    honest = Halves._undecided

    def undecided(self: Halves, half: Half, intent: EndHalf, now: float) -> None:
        honest(self, half, replace(intent, verb=HalfVerb.UNKNOWN), now)

    put(stack, Halves, "_undecided", undecided)
