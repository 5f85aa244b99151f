"""A half message, as its program has it: stored and not published. client/transactions/halves.py stores and ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...proto.names import TopicName
from ...proto.transactions import TxnId
from ..core.transaction import TransactionState


class EndsHalves(Protocol):
    """The half messages of a client. A caller that is cancelled is cancelled when the outcome is there."""

    async def commit(self, id_: TxnId) -> TransactionState: ...
    async def rollback(self, id_: TxnId) -> TransactionState: ...


class PreparesHalves(Protocol):
    """Prepares halves, for producers."""

    async def prepare(
        self, messages: Sequence[tuple[TopicName, bytes]], group: str, check_key: str, check_after: float
    ) -> Half:
        """Prepares a half. `messages`: each with its topic, or partition, and encoded."""
        ...


class Half:
    """A message, or some, stored and not published. `Producer.prepare` and `Client.half` make it.

        half = await producer.prepare(b"…", group="orders", check_key="17")
        await half.commit()

    `commit` publishes it, once; `rollback` drops it. Without either its group is asked (`Client.on_check`).
    """

    def __init__(self, halves: EndsHalves, id_: TxnId, group: str, check_key: str) -> None:
        self.id = id_
        self.group = group
        self.check_key = check_key
        self.state = TransactionState.PREPARED  # as this program knows it
        self._halves = halves

    async def commit(self) -> None:
        """Returns when it is published for good. Once more is no harm.

        TransactionAborted: it is rolled back. HalfParked: an operator decides. What keeps it from being published
        (TopicTerminated, …): nothing of it counts, and it is parked. OutcomeUnknown: call it again; else the group is
        asked.
        """
        self.state = await self._halves.commit(self.id)

    async def rollback(self) -> None:
        """Returns when it is dropped for good. Once more is no harm. TransactionEnded: it is committed. HalfParked.
        OutcomeUnknown: call it again; else the group is asked."""
        self.state = await self._halves.rollback(self.id)

    def __repr__(self) -> str:
        return f"<Half {self.id} of group {self.group!r}, {self.state.name}>"
