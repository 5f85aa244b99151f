"""What a topic asks coordinators again: the outcome of each transaction that is open here (transactions.py, "Asked
again")."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...proto.errors import MagnetarError
from ...proto.transactions import TxnId, TxnState
from ..common.transactions import Joined, Settlement, state_of
from .core.transactions import Transactions, TxnPhase
from .txn_runs import TransactionRuns

if TYPE_CHECKING:
    from .transactions import TopicTransactions

_LOG = logging.getLogger("magnetar.broker.topic.transactions")

JOIN_S = 5.0
"""Seconds that a send or an acknowledgement waits for a coordinator that does not answer."""
ASK_S, ASK_S_MAX = 0.2, 5.0
"""Seconds between two rounds of questions about what a load found: first, and at most."""
OPEN_ASK_S = 30.0
SETTLEMENT_S = 10.0
ASK_AT_ONCE = 1_000


class TxnQuestions:
    """The questions of one topic. The task that asks lives while something is open."""

    __slots__ = ("_asking", "_committed_at", "_of", "_runs", "_suspects")

    def __init__(self, of: TopicTransactions, runs: TransactionRuns) -> None:
        self._of = of
        self._runs = runs
        self._asking: asyncio.Task[None] | None = None
        self._committed_at: dict[TxnId, float] = {}  # the coordinator said so, and its settlement has not come
        self._suspects: dict[int, asyncio.Task[None]] = {}  # coordinators of which all that is open is asked for now

    def forget(self, txn: TxnId) -> None:
        self._committed_at.pop(txn, None)

    async def outcome(self, txn: TxnId) -> TxnState | None:
        """Returns COMMITTED or ABORTED if the transaction has ended; its end has been applied here when this returns.
        None: it is open, or its coordinator does not answer within JOIN_S. Raises NotOwner."""
        try:
            async with asyncio.timeout(JOIN_S):
                return await self._until_over(txn)
        except (MagnetarError, TimeoutError) as error:
            if self._of.ended:
                raise self._runs.not_here() from error
            _LOG.info("%s: transaction %s: %s", self._of.topic.name, txn, error)
            return None

    async def _until_over(self, txn: TxnId) -> TxnState | None:
        core = self._of.core
        if core is None or not core.is_known(txn):
            return None
        joined = await self._of.coordinators.join(txn, self._of.topic.name)
        state = state_of(joined)
        if state in (TxnState.OPEN, TxnState.PREPARED):
            return None
        if core.is_known(txn):
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def tell(_: MagnetarError | None) -> None:
                if not over.done():
                    over.set_result(None)

            self._of.when_over(txn, tell)
            self.heard(txn, joined)
            await over
        return state

    def ask_for_pending(self, core: Transactions) -> None:
        """Asks for the transactions of acknowledgements that wait, as for those of entries."""
        for each in self._of.topic.registry.durable():
            for txn in each.pending_transactions:
                core.ask(txn)

    def go_on(self) -> None:
        if self._asking is None and not self._of.ended and self._of.core is not None and self._of.core.open:
            self._asking = self._runs.tasks.spawn(self._keep_asking(), "open transactions of a topic")

    async def _keep_asking(self) -> None:
        core, clock = self._of.core, self._of.world.clock
        assert core is not None, "there is something to ask for"
        pause_s, swept = ASK_S, clock.monotonic()
        try:
            while not self._of.ended:
                self.ask_for_pending(core)
                if not core.open:
                    break
                every = clock.monotonic() - swept >= OPEN_ASK_S
                if every:
                    swept = clock.monotonic()
                wanted = [
                    txn for txn in core.open
                    if (every or core.known[txn].phase is TxnPhase.ASKED) and not self._of.joins.is_asked(txn)
                ]  # fmt: skip
                await self._ask_all(wanted)
                pause_s = min(2 * pause_s, ASK_S_MAX) if wanted else ASK_S
                await asyncio.sleep(pause_s if wanted else ASK_S_MAX)
        finally:
            self._asking = None

    async def _ask_all(self, txns: Sequence[TxnId]) -> None:
        for first in range(0, len(txns), ASK_AT_ONCE):
            await asyncio.gather(*map(self._ask_one, txns[first : first + ASK_AT_ONCE]))

    def suspect(self, number: int) -> None:
        """Asks a coordinator about its other transactions: it aborted one and did not say so here, so they may be lost
        too."""
        others = [txn for txn in self._of.still_open if txn.coordinator == number and not self._of.joins.is_asked(txn)]
        if others and number not in self._suspects:
            asked = self._runs.tasks.spawn(self._ask_all(others), "lost transactions of a topic")
            self._suspects[number] = asked
            asked.add_done_callback(lambda _: self._suspects.pop(number, None))

    async def _ask_one(self, txn: TxnId) -> None:
        """Asks the coordinator, once, about an open transaction."""
        assert self._of.core is not None, "something is open"
        try:
            joined = await self._of.coordinators.join(txn, self._of.topic.name)
        except MagnetarError as error:
            _LOG.info("%s: transaction %s: %s", self._of.topic.name, txn, error)
            return
        except Exception:  # a fault of ours must not keep the others from being asked for
            _LOG.exception("%s: transaction %s", self._of.topic.name, txn)
            return
        if txn not in self._of.core.known:
            return  # it was settled meanwhile
        if state_of(joined) in (TxnState.OPEN, TxnState.PREPARED):
            self._of.core.joined(txn)
        else:
            self.heard(txn, joined)

    def heard(self, txn: TxnId, joined: Joined) -> None:
        """Handles the outcome of a transaction that is not settled here."""
        if isinstance(joined, Settlement):
            self._of.settling([joined])
        elif joined is TxnState.ABORTED:
            self._of.settling([Settlement(txn, False)])
        elif joined is TxnState.COMMITTED:
            now = self._of.world.clock.monotonic()
            if now - self._committed_at.setdefault(txn, now) >= SETTLEMENT_S:
                topic = self._of.topic.name
                _LOG.error("%s: no settlement of the committed %s has come: every entry counts", topic, txn)
                self._of.settling([Settlement(txn, True)])
