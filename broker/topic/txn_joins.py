"""The joins of a topic's transactions: each is asked of its coordinator before the first entry (transactions.py, "Join
first")."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ...proto.errors import (
    BackPressure,
    MagnetarError,
    NotAllowed,
    TransactionAborted,
    TransactionEnded,
    Unavailable,
)
from ...proto.transactions import TxnId, TxnState
from ..common.transactions import Joined, state_of
from .core.transactions import OPEN_MAX, Transactions, TxnPhase
from .txn_questions import JOIN_S, TxnQuestions
from .txn_runs import TransactionRuns

if TYPE_CHECKING:
    from .transactions import TopicTransactions

JOIN_RETRY_S = 0.1
"""Seconds between two tries of a join."""


class TxnJoins:
    """The joins of one topic, for its producers and subscriptions."""

    __slots__ = ("_asked", "_of", "_questions", "_runs", "_under_way", "_writers", "is_leaving", "since")

    def __init__(self, of: TopicTransactions, runs: TransactionRuns, questions: TxnQuestions) -> None:
        self._of = of
        self._runs = runs
        self._questions = questions
        self._under_way: dict[tuple[TxnId, str | None], asyncio.Future[None]] = {}
        """By the role that wants to write in it."""
        self._asked: dict[TxnId, int] = {}  # how many of these joins ask its coordinator now
        self._writers: dict[TxnId, str] = {}
        """The role that began it, as its coordinator said when that role wrote here first."""
        self.since: dict[TxnId, float] = {}  # when it was joined or found, on the monotonic clock
        self.is_leaving = False  # the topic is about to be deleted

    def is_asked(self, txn: TxnId) -> bool:
        """Whether a join asks its coordinator now."""
        return txn in self._asked

    def forget(self, txn: TxnId) -> None:
        self.since.pop(txn, None)
        self._writers.pop(txn, None)

    def stop(self) -> list[asyncio.Future[None]]:
        """Forgets the joins under way, and returns them."""
        waiting = list(self._under_way.values())
        self._under_way.clear()
        return waiting

    def join_now(self, txn: TxnId, owner: str | None = None) -> bool:
        """Whether it `is_open`, and is the role's: joined before, or now, where its coordinator is in this process.
        False: `join` it, or `when` it is joined; that also says why not. `owner` None: a caller that may write in each.
        """
        core = self._of.core
        if core is None or self._of.ended or (txn, owner) in self._under_way:
            return False
        if core.is_open(txn) and self._is_writer(txn, owner):
            return True
        if self.is_leaving or not core.may_join(txn):
            return False
        if not self._of.coordinators.join_now(txn, self._of.topic.name.full, owner):
            return False
        core.ask(txn)
        return self._is_in(core, txn, owner)

    def _is_writer(self, txn: TxnId, owner: str | None) -> bool:
        return owner is None or self._writers.get(txn) == owner

    async def join(self, txn: TxnId, owner: str | None = None) -> None:
        """Returns when `is_open`. InvalidRequest: it is another role's, or was never begun; TransactionEnded,
        TransactionAborted: it has ended; Unavailable: its coordinator does not answer; BackPressure: too many are open;
        NotOwner.
        """
        if not (self._of.is_open(txn) and self._is_writer(txn, owner)):
            await asyncio.shield(self.begin(txn, owner))

    def begin(self, txn: TxnId, owner: str | None) -> asyncio.Future[None]:
        """Begins a join, or returns the run that others of the role asked for."""
        key = txn, owner
        return self._under_way.get(key) or self._runs.begin(self._under_way, [key], lambda: self._join(txn, owner))

    async def _join(self, txn: TxnId, owner: str | None) -> None:
        self._asked[txn] = self._asked.get(txn, 0) + 1
        try:
            await self._join_for(txn, owner)
        finally:
            self._asked[txn] -= 1
            if not self._asked[txn]:
                del self._asked[txn]

    async def _join_for(self, txn: TxnId, owner: str | None) -> None:
        if not self._of.topic.name.persistent:
            raise NotAllowed(f"topic {self._of.topic.name} keeps nothing, and takes part in no transaction")
        self._check_leaving()
        core = await self._of.see()
        if core.is_full(txn):
            raise BackPressure(f"topic {self._of.topic.name} has {OPEN_MAX} open transactions")
        if core.ask(txn) is TxnPhase.ENDED:
            raise TransactionEnded(f"transaction {txn} has ended", txn=str(txn))
        try:
            joined = await self._patiently(txn, owner)
            self._check_leaving()  # the coordinator may have it as a participant, with nothing to settle
        except BaseException:
            self._join_refused(core, txn)
            raise
        state = state_of(joined)
        if state in (TxnState.OPEN, TxnState.PREPARED):
            if not self._is_in(core, txn, owner):
                raise TransactionEnded(f"transaction {txn} ended meanwhile", txn=str(txn))
            return
        self._join_refused(core, txn)
        if txn in core.known:  # a load found entries of it
            self._questions.heard(txn, joined)
        if state is TxnState.ABORTED:
            self._questions.suspect(txn.coordinator)
        if state is TxnState.COMMITTED:
            raise TransactionEnded(f"transaction {txn} is committed", txn=str(txn))
        raise TransactionAborted(f"transaction {txn} is aborted", txn=str(txn))

    def _join_refused(self, core: Transactions, txn: TxnId) -> None:
        """Notes a refused join, unless the transaction is asked about for another role as well."""
        if self._asked[txn] == 1:
            core.refused(txn)

    def _is_in(self, core: Transactions, txn: TxnId, owner: str | None) -> bool:
        """Notes that the coordinator has the topic as a participant. False: the transaction has ended meanwhile."""
        if not core.joined(txn):
            return False
        if owner is not None:
            self._writers[txn] = owner
        self.since.setdefault(txn, self._of.world.clock.monotonic())
        self._questions.go_on()
        return True

    def _check_leaving(self) -> None:
        if self.is_leaving:
            raise Unavailable(f"topic {self._of.topic.name} is about to be deleted: nothing joins a transaction there")

    async def _patiently(self, txn: TxnId, owner: str | None) -> Joined:
        """Returns the coordinator's answer. Unavailable: there is none for JOIN_S; the entry is certainly not in the
        log."""
        end = self._of.world.clock.monotonic() + JOIN_S
        while True:
            try:
                return await self._of.coordinators.join(txn, self._of.topic.name, owner)
            except MagnetarError as error:
                if not error.retryable:
                    raise
                if self._of.world.clock.monotonic() + JOIN_RETRY_S >= end:
                    raise Unavailable(f"the coordinator of transaction {txn} does not answer: {error}") from error
            await asyncio.sleep(JOIN_RETRY_S)
