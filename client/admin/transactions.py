"""Methods of AdminClient: which transactions and half messages are open, and how an operator ends them."""

from __future__ import annotations

import contextlib

from ...proto import operations as op
from ...proto import statistics as values
from ...proto.errors import NotFound
from ...proto.names import TopicName
from ...proto.transactions import COORDINATORS_MAX, TxnId, TxnState
from .transport import Caller


async def transactions(self: Caller, coordinator: int, limit: int = 1000) -> values.CoordinatorTransactions:
    """Returns the transactions of one coordinator that are not done, the oldest first. NotFound: there is no such
    coordinator."""
    return await self._call(op.LIST_TRANSACTIONS, coordinator=coordinator, limit=limit)


async def all_transactions(self: Caller, limit: int = 1000) -> list[values.CoordinatorTransactions]:
    """Returns the transactions of every coordinator, by its number; `limit` for each."""
    found: list[values.CoordinatorTransactions] = []
    with contextlib.suppress(NotFound):
        while len(found) < COORDINATORS_MAX:
            found.append(await transactions(self, len(found), limit))
    return found


async def transaction(self: Caller, txn: TxnId | str) -> values.TransactionStats:
    """Returns a transaction. NotFound: the coordinator has not given this id."""
    found = await self._call(op.LIST_TRANSACTIONS, txn=_fields(txn), limit=1)
    if not found.items:
        raise NotFound(f"no transaction {txn} has begun")
    return found.items[0]


async def transaction_at(self: Caller, txn: TxnId | str, topic: str) -> values.TransactionHere:
    """Returns what a topic (without partitions, or a partition) has of the transaction, and what waits there for
    its end."""
    return await self._call(op.TOPIC_TRANSACTION, topic=TopicName.parse(topic).full, txn=_fields(txn))


async def abort_transaction(self: Caller, txn: TxnId | str) -> TxnState:
    """Aborts one that is open or prepared, of any role; returns the state, also of one that has ended."""
    return await self._call(op.ABORT_TRANSACTION, **_fields(txn))


async def detach_transaction(self: Caller, txn: TxnId | str, topic: str) -> None:
    """Detaches a topic that can store the outcome no more: the transaction does not wait for it any longer.
    NotFound."""
    await self._call(op.DETACH_TRANSACTION, txn=_fields(txn), topic=TopicName.parse(topic).full)


# ------------------------------------------------------------------------------------ half messages
async def halves(self: Caller, coordinator: int, *, group: str = "", limit: int = 1000) -> values.CoordinatorHalves:
    """Returns the half messages of one coordinator that are not decided, the oldest first; `group`: of this one
    alone. NotFound: there is no such coordinator."""
    return await self._call(op.LIST_HALVES, coordinator=coordinator, group=group, limit=limit)


async def all_halves(self: Caller, *, group: str = "", limit: int = 1000) -> list[values.CoordinatorHalves]:
    """Returns the half messages of every coordinator, by its number; `limit` for each."""
    found: list[values.CoordinatorHalves] = []
    with contextlib.suppress(NotFound):
        while len(found) < COORDINATORS_MAX:
            found.append(await halves(self, len(found), group=group, limit=limit))
    return found


async def half(self: Caller, half: TxnId | str) -> values.HalfStats:
    """Returns a half message. NotFound: it is decided, or never was."""
    found = await self._call(op.LIST_HALVES, half=_fields(half), limit=1)
    if not found.items:
        raise NotFound(f"no half {half} is open")
    return found.items[0]


async def commit_half(self: Caller, half: TxnId | str) -> None:
    """Publishes a half message, whatever its group says; also a parked one. NotFound; TransactionEnded: it is
    rolled back; and what keeps it from being published."""
    await _change_half(self, half, values.HalfDecision.COMMIT)


async def rollback_half(self: Caller, half: TxnId | str) -> None:
    """Drops a half message, also a parked one. NotFound; TransactionEnded: it is committed."""
    await _change_half(self, half, values.HalfDecision.ROLLBACK)


async def park_half(self: Caller, half: TxnId | str) -> None:
    """Parks a half message: its group is not asked about it any more; an operator decides. NotFound,
    TransactionEnded."""
    await _change_half(self, half, values.HalfDecision.PARK)


async def revive_half(self: Caller, half: TxnId | str) -> None:
    """Revives a half message: its group is asked about it again, at once; what was counted is forgotten. NotFound,
    TransactionEnded."""
    await _change_half(self, half, values.HalfDecision.REVIVE)


async def _change_half(self: Caller, half: TxnId | str, verb: values.HalfDecision) -> None:
    await self._call(op.CHANGE_HALF, half=_fields(half), verb=verb)


def _fields(txn: TxnId | str) -> dict[str, int]:
    """Returns the fields of an id. Raises InvalidRequest."""
    found = TxnId.parse(txn) if isinstance(txn, str) else txn
    return {"most": found.most, "least": found.least}
