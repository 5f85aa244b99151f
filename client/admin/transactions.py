"""The part of AdminClient about transactions: which are open, and how they are ended by an operator."""

from __future__ import annotations

import contextlib
from typing import TypeVar

from ...proto.errors import NotFound
from ...proto.names import TopicName
from ...proto.transactions import COORDINATORS_MAX, TxnId, TxnState
from . import operations as op
from . import values
from .operations import Operation

T = TypeVar("T")


class TransactionAdmin:
    async def _call(self, operation: Operation[T], **arguments: object) -> T:
        raise NotImplementedError

    async def transactions(self, coordinator: int, limit: int = 1000) -> values.CoordinatorTransactions:
        """Those of one coordinator that are not done, the oldest first. NotFound: there is no such coordinator."""
        return await self._call(op.LIST_TRANSACTIONS, coordinator=coordinator, limit=limit)

    async def all_transactions(self, limit: int = 1000) -> list[values.CoordinatorTransactions]:
        """Of every coordinator, by its number; `limit` for each."""
        found: list[values.CoordinatorTransactions] = []
        with contextlib.suppress(NotFound):
            while len(found) < COORDINATORS_MAX:
                found.append(await self.transactions(len(found), limit))
        return found

    async def transaction(self, txn: TxnId | str) -> values.TransactionStats:
        """NotFound: the coordinator has not given this id."""
        found = await self._call(op.LIST_TRANSACTIONS, txn=_fields(txn), limit=1)
        if not found.items:
            raise NotFound(f"no transaction {txn} has begun")
        return found.items[0]

    async def transaction_at(self, txn: TxnId | str, topic: str) -> values.TransactionHere:
        """What a topic (without partitions, or a partition) has of it, and what waits there for its end."""
        return await self._call(op.TOPIC_TRANSACTION, topic=TopicName.parse(topic).full, txn=_fields(txn))

    async def abort_transaction(self, txn: TxnId | str) -> TxnState:
        """Aborts one that is open or prepared, of any role; the state of one that has ended."""
        return await self._call(op.ABORT_TRANSACTION, **_fields(txn))

    async def detach_transaction(self, txn: TxnId | str, topic: str) -> None:
        """The transaction does not wait any more for a topic that can store its outcome no more. NotFound."""
        await self._call(op.DETACH_TRANSACTION, txn=_fields(txn), topic=TopicName.parse(topic).full)


def _fields(txn: TxnId | str) -> dict[str, int]:
    """InvalidRequest."""
    found = TxnId.parse(txn) if isinstance(txn, str) else txn
    return {"most": found.most, "least": found.least}
