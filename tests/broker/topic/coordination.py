"""A coordinator of transactions in memory, for topics under test: it says what a test decided, and settles."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from magnetar.broker.common.transactions import JoinAnswer, ReportedTransaction, Settlement
from magnetar.broker.topic.topic import Topic
from magnetar.proto.entry import encode_batch, encode_entry, encode_plain_items
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import InvalidRequest, MagnetarError, Unavailable
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import ForgottenOutcome, TxnId, TxnState


class FakeCoordinator:
    """Transactions are OPEN unless a test says otherwise."""

    def __init__(self) -> None:
        self.states: dict[TxnId, TxnState] = {}
        self.owners: dict[TxnId, str] = {}  # of none: each role may write in it
        self.participants: dict[TxnId, list[TopicName]] = {}
        self.joins: list[TxnId] = []
        self.aborts: list[TxnId] = []  # asked, because of a deletion
        self.deciding = asyncio.Event()  # until then such a question is not answered
        self.deciding.set()
        self.owed: dict[TxnId, Settlement] = {}  # what a join is answered
        self.forgotten: dict[TxnId, ForgottenOutcome] = {}
        self.down: MagnetarError | None = None
        self.is_near = False  # in the process of the topics
        self._next = 0

    def begin(self) -> TxnId:
        self._next += 1
        return TxnId.from_parts(3, 1, self._next)

    def _is_foreign(self, txn: TxnId, owner: str | None) -> bool:
        return owner is not None and self.owners.get(txn, owner) != owner

    async def join_transaction(self, txn: TxnId, topic: TopicName, owner: str | None = None) -> JoinAnswer:
        self.joins.append(txn)
        if self.down is not None:
            raise self.down
        if self._is_foreign(txn, owner):
            raise InvalidRequest(f"{txn} was never given")
        if txn in self.owed:
            return self.owed[txn]
        if txn in self.forgotten:
            return self.forgotten[txn]
        state = self.states.get(txn, TxnState.OPEN)
        if state is TxnState.OPEN:
            self.participants.setdefault(txn, []).append(topic)
        return state

    def join_transaction_nowait(self, txn: TxnId, topic: str, owner: str | None = None) -> bool:
        if self._is_foreign(txn, owner):
            return False
        if txn in self.forgotten:
            return False
        if not self.is_near or self.down is not None or self.states.get(txn, TxnState.OPEN) is not TxnState.OPEN:
            return False
        self.joins.append(txn)
        self.participants.setdefault(txn, []).append(TopicName.parse(topic))
        return True

    async def ask_transaction_state(self, txn: TxnId) -> ReportedTransaction:
        if self.down is not None:
            raise self.down
        return ReportedTransaction(txn, self.states.get(txn, TxnState.OPEN), "billing", age_s=17.0)

    async def abort_if_open(self, txn: TxnId) -> ReportedTransaction:
        self.aborts.append(txn)
        await self.deciding.wait()
        found = await self.ask_transaction_state(txn)
        if found.state is TxnState.OPEN:
            self.states[txn] = TxnState.ABORTED
        return await self.ask_transaction_state(txn)

    def settlement(self, txn: TxnId, committed: bool, **receipts: Any) -> Settlement:
        self.states[txn] = TxnState.COMMITTED if committed else TxnState.ABORTED
        return Settlement(txn, committed, **receipts)

    async def end(self, topic: Topic, txn: TxnId, committed: bool, **receipts: Any) -> None:
        await settle_at(topic, self.settlement(txn, committed, **receipts))

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        self.down = Unavailable("the coordinator is down")
        try:
            yield
        finally:
            self.down = None


async def settle_at(topic: Topic, settlement: Settlement) -> None:
    """Returns when the topic has stored it; or its error."""
    (error,) = await topic.settle([settlement], 60.0)
    if error is not None:
        raise error


def in_txn(
    producer: str, sequence_id: int, txn: TxnId, *payloads: bytes, deliver_at_ms: int = 0, key: str | None = None
) -> bytes:
    """A client-part that is in the transaction."""
    metadata = MessageMetadata(
        producer_name=producer, sequence_id=sequence_id, publish_time=1000, txnid_most_bits=txn.most,
        txnid_least_bits=txn.least, partition_key=key,
    )  # fmt: skip
    if deliver_at_ms:
        metadata.deliver_at_time = deliver_at_ms
    if len(payloads) == 1:
        return encode_entry(metadata, payloads[0])
    return encode_batch(metadata, encode_plain_items(payloads), len(payloads))


@pytest.fixture(params=["far", "near"])
def coordinator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCoordinator:
    """All topics of the test have it: at another broker, or in their process."""
    fake, honest = FakeCoordinator(), Topic.__init__
    fake.is_near = request.param == "near"

    def with_coordinator(self: Topic, *args: Any, **options: Any) -> None:
        honest(self, *args, **{**options, "coordinators": fake})

    monkeypatch.setattr(Topic, "__init__", with_coordinator)
    return fake


def position_of_delay_key(receipt: Any) -> Position:
    return Position(receipt.ledger_id, receipt.entry_id)
