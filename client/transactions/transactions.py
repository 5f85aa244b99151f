"""The transactions of one client: those that are open, the tasks that end them, and the coordinators that they ask.

A client that is closed aborts what is open, and waits for what is being ended. Nesting is refused: a task in the body
of an `async with` does not enter another one; transactions that are open at the same time belong to tasks of their own,
or are ended by hand. Guards: tests/client/transactions/test_transactions.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ...proto.errors import MagnetarError
from ...proto.transactions import TxnId
from ...runtime.tasks import Tasks
from ..common.errors import PulsarException, TransactionEnded, translate
from ..common.guard import ignored, run
from ..connect.connections import Connections
from ..core.transaction import TransactionState
from .coordinators import Coordinators
from .transaction import Transaction

T = TypeVar("T")


class Transactions:
    """The transactions of one client, in its event loop."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.coordinators = Coordinators(connections)
        self.now = connections.world.clock.monotonic
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._open: dict[Transaction, None] = {}
        self._bodies: WeakKeyDictionary[asyncio.Task[Any], Transaction] = WeakKeyDictionary()
        self._tasks = Tasks()

    @classmethod
    def of(cls, connections: Connections) -> Transactions:
        """Returns the transactions of a client, made when first used."""
        found = connections.transactions
        if found is None:
            found = connections.transactions = cls(connections)
        assert isinstance(found, cls), "a client has its transactions"
        return found

    def __len__(self) -> int:
        """Returns the number of open ones."""
        return len(self._open)

    def begin_now(self, transaction: Transaction) -> TxnId | None:
        """Begins a transaction, from any thread, by an id that was leased ahead. None: there is none."""
        if transaction.name is not None:
            return None
        found = self.coordinators.begin_now(_timeout_ms(transaction), self.soon)
        if found is not None:
            self._open[transaction] = None
        return found

    async def begin(self, transaction: Transaction) -> TxnId:
        timeout_ms = _timeout_ms(transaction)
        try:
            if transaction.name is None:
                found = await self.coordinators.begin(timeout_ms)
            else:
                found = await self.coordinators.begin_named(transaction.name, timeout_ms)
        except MagnetarError as error:
            raise translate(error) from error
        self._open[transaction] = None
        return found

    def begun(self, found: TxnId, timeout_s: float) -> Transaction:
        """Returns an open transaction with this id."""
        transaction = Transaction(self, timeout_s, None, found)
        self._open[transaction] = None
        return transaction

    def ended(self, transaction: Transaction) -> None:
        self._open.pop(transaction, None)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        return self._tasks.spawn(work, name)

    def soon(self, work: Callable[[], None]) -> None:
        """Runs `work` now, in the event loop; else there, soon."""
        if threading.get_ident() == self._thread:
            work()
        else:
            self._loop.call_soon_threadsafe(run, work, ignored)

    # ------------------------------------------------------------------------------ bodies
    def enter_body(self, transaction: Transaction) -> None:
        task = asyncio.current_task()
        if task is not None:
            if task in self._bodies:
                raise TransactionEnded("transactions are not nested: this task is in the body of another one")
            self._bodies[task] = transaction

    def leave_body(self, transaction: Transaction) -> None:
        for task, each in list(self._bodies.items()):
            if each is transaction:
                del self._bodies[task]

    # ------------------------------------------------------------------------------ the end
    async def close(self) -> None:
        """Aborts what is open; returns when nothing is under way."""

        async def abort(transaction: Transaction) -> None:
            if transaction.state is TransactionState.OPEN:
                await transaction.abort()

        try:
            outcomes = await asyncio.gather(*map(abort, list(self._open)), return_exceptions=True)
            await self._tasks.drain()
            for each in outcomes:
                if isinstance(each, BaseException) and not isinstance(each, PulsarException):
                    raise each
        finally:
            await self._tasks.close()
            await self.coordinators.close()

    def shutdown(self) -> None:
        """Stops at once: time-outs abort what is open."""
        self._open.clear()
        self._tasks.cancel()
        self.coordinators.deadlines.stop()


def _timeout_ms(transaction: Transaction) -> int:
    return max(1, round(transaction.timeout_s * 1000))
