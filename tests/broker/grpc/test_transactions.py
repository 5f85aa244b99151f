"""Transactions of a whole broker over gRPC: ends, repeats, a crash, a hand-over. The topics record what they hear."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.cluster.orphans import find_orphans
from magnetar.broker.common.transactions import Settlement, convert_join_answer_to_state
from magnetar.broker.server import Broker
from magnetar.broker.topic.topic import Topic
from magnetar.broker.transaction.peers import read_join_answer
from magnetar.broker.transaction.records_core import OutcomesDiscarded
from magnetar.client.admin import AdminClient
from magnetar.metadata import paths
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    InvalidRequest,
    MagnetarError,
    NotFound,
    NotOwner,
    TransactionAborted,
    Unavailable,
    from_wire,
)
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import ForgottenOutcome, TxnId, TxnState
from magnetar.runtime.network import Channel, find_rpc
from tests.support.cluster import Cluster, cluster

TOPIC = "persistent://public/default/t"


class Settled:
    """What topics were told; `failing` of them fail."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Settlement]] = []
        self.failing = 0
        self.changed = asyncio.Event()

    def of(self, txn: TxnId) -> list[tuple[str, bool]]:
        return [(topic, each.committed) for topic, each in self.told if each.txn == txn]

    async def wait(self, count: int) -> None:
        while len(self.told) < count:
            self.changed.clear()
            await self.changed.wait()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Settled:
    found = Settled()

    async def settle(self: Topic, settlements: Sequence[Settlement], timeout_s: float) -> list[MagnetarError | None]:
        if found.failing:
            found.failing -= 1
            return [Unavailable("not now")] * len(settlements)
        found.told += [(self.name.full, each) for each in settlements]
        found.changed.set()
        return [None] * len(settlements)

    monkeypatch.setattr(Topic, "settle", settle, raising=False)
    return found


class Client:
    def __init__(self, broker: Broker, running: Cluster) -> None:
        self.broker = broker
        self.channel: Channel = running.world.network.connect(broker.endpoint)

    async def call(self, method: str, request: Any, service: str = "Transactions") -> Any:
        return await self.channel.call(find_rpc(service, method), request, timeout_s=20.0)

    async def begin(self, coordinator: int = 0, **options: Any) -> TxnId:
        found = await self.call("Begin", wire.BeginRequest(coordinator=coordinator, **options))
        return TxnId(found.first.most, found.first.least)

    async def join(self, txn: TxnId, topic: str = TOPIC) -> TxnState:
        return convert_join_answer_to_state(
            await self.broker.topic_manager.transactions.join_transaction(txn, TopicName.parse(topic))
        )

    async def end(
        self, txn: TxnId, verb: str = "COMMIT", *topics: str, visible: bool = False
    ) -> TxnState:
        participants = [wire.Participant(topic=topic, entries=1, last=wire.Position(ledger_id=1)) for topic in topics]
        item = wire.EndItem(txn=_wire(txn), verb=verb, participants=participants, visible=visible)  # type: ignore[arg-type]
        return _state((await self.call("End", wire.EndRequest(items=[item]))).items[0])

    async def get_status(self, txn: TxnId) -> TxnState:
        return _state((await self.call("Status", wire.StatusRequest(txns=[_wire(txn)]))).items[0])

    async def make_topic(self, topic: str = TOPIC) -> None:
        await self.call("CreateTopic", wire.TopicSpec(name=topic), "Admin")


def _wire(txn: TxnId) -> wire.TransactionId:
    return wire.TransactionId(most=txn.most, least=txn.least)


def _state(reply: wire.TransactionReply) -> TxnState:
    if reply.HasField("error"):
        raise from_wire(reply.error)
    return TxnState(reply.state)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


@pytest.fixture
async def client(running: Cluster) -> AsyncIterator[Client]:
    found = Client(running.brokers[0], running)
    yield found
    await found.channel.close()


async def test_a_topic_that_asks_is_answered_by_what_it_has_to_settle(client: Client, settled: Settled) -> None:
    """Here, and over the network: a topic that was loaded does not depend on what is pushed to it."""
    await client.make_topic()
    txn, settled.failing = await client.begin(), 1000
    await client.join(txn)
    assert await client.end(txn, "COMMIT", TOPIC) is TxnState.COMMITTED
    expected = Settlement(txn, True, 1, Position(1, 0))
    coordinators, name = client.broker.topic_manager.transactions, TopicName.parse(TOPIC)
    assert await coordinators.join_transaction(txn, name) == expected
    assert await coordinators.peers.join_transaction(str(client.broker.endpoint), txn, name) == expected
    settled.failing = 0
    assert await client.end(txn, "COMMIT", TOPIC, visible=True) is TxnState.COMMITTED
    assert await coordinators.join_transaction(txn, name) is TxnState.COMMITTED, "nothing is left to settle"


async def test_a_topic_is_told_that_an_outcome_is_forgotten_and_an_earlier_version_that_it_is_aborted(
    client: Client, settled: Settled
) -> None:
    await client.make_topic()
    txn = await client.begin()
    await client.join(txn)
    assert await client.end(txn, "COMMIT", TOPIC, visible=True) is TxnState.COMMITTED
    coordinators, name = client.broker.topic_manager.transactions, TopicName.parse(TOPIC)
    running = await coordinators.load_owned_coordinator(txn.coordinator)
    running.core.table.ending.clear()  # it is settled
    running.core.state.unsettled.clear()
    running.core.state.apply(OutcomesDiscarded(txn.least + 1))
    peers, endpoint = coordinators.peers, str(client.broker.endpoint)
    assert await coordinators.join_transaction(txn, name) is ForgottenOutcome.DISCARDED
    assert await peers.join_transaction(endpoint, txn, name) is ForgottenOutcome.DISCARDED
    item = wire.JoinItem(txn=_wire(txn), topic=TOPIC)
    (reply,) = (await client.call("Join", wire.JoinRequest(items=[item]))).items
    assert TxnState(reply.state) is TxnState.ABORTED, "an earlier version reads the state"
    reply.forgotten = 7  # type: ignore[assignment]
    assert read_join_answer(txn, reply) is ForgottenOutcome.UNKNOWN, "a later version has more reasons"
    reply.ClearField("forgotten")
    assert read_join_answer(txn, reply) is TxnState.ABORTED, "an earlier coordinator says no more"


async def test_settlements_of_a_topic_that_are_none_are_refused_and_those_of_another_are_done(client: Client) -> None:
    other = TOPIC + "-other"
    for topic in (TOPIC, other):
        await client.make_topic(topic)
    good = wire.Settlement(topic=TOPIC, txn=_wire(await client.begin()), committed=False)
    wrong = wire.Settlement(topic=other, txn=wire.TransactionId(most=(1 << 64) - 1), committed=False)
    reply = await client.call("Settle", wire.SettleRequest(items=[good, wrong]))
    done = {each.request_id: each for each in reply.items}
    assert not done[0].HasField("error")
    assert isinstance(from_wire(done[1].error), InvalidRequest)


async def test_a_topic_that_is_gone_has_nothing_to_settle(client: Client, settled: Settled) -> None:
    txn = await client.begin()
    await client.join(txn)
    assert await client.end(txn, "COMMIT", visible=True) is TxnState.COMMITTED
    assert settled.told == []


async def test_a_question_about_a_transaction_at_a_missing_topic_creates_none(client: Client) -> None:
    txn = await client.begin()
    with pytest.raises(NotFound):
        await client.call("TopicTransaction", wire.TopicTransactionRequest(topic=TOPIC, txn=_wire(txn)), "Admin")
    assert TOPIC not in client.broker.topics



async def test_after_a_crash_what_was_decided_is_settled_and_the_rest_aborted(
    running: Cluster, client: Client, settled: Settled
) -> None:
    await client.make_topic()
    committed, opened, prepared = [await client.begin() for _ in range(3)]
    settled.failing = 1 << 30
    for txn in (committed, opened, prepared):
        await client.join(txn)
    assert await client.end(committed) is TxnState.COMMITTED
    assert await client.end(prepared, "PREPARE") is TxnState.PREPARED
    await running.brokers[0].topic_manager.abandon_all_topics(Unavailable("crash"))
    settled.failing = 0

    other = Client(await running.add_broker(), running)
    await running.sessions[0].close()
    await other.broker.topic_manager.transactions.load_unowned_coordinators()
    await settled.wait(1)
    assert settled.told[0][1].txn == committed
    assert await other.get_status(committed) is TxnState.COMMITTED
    assert await other.get_status(prepared) is TxnState.PREPARED
    assert await other.get_status(opened) is TxnState.ABORTED
    with pytest.raises(TransactionAborted, match="coordinator lost"):
        await other.end(opened)
    assert await other.end(prepared, visible=True) is TxnState.COMMITTED
    assert (await other.begin()).epoch == committed.epoch + 1
    await other.channel.close()


async def test_a_node_of_another_program_among_the_coordinators_does_not_keep_them_from_being_loaded(
    running: Cluster, client: Client, settled: Settled
) -> None:
    await client.make_topic()
    txn = await client.begin()
    await running.brokers[0].topic_manager.abandon_all_topics(Unavailable("crash"))
    other = Client(await running.add_broker(), running)
    await running.sessions[0].close()
    session = running.sessions[-1]
    for foreign in ("-1", "00", "backup", "²"):
        await session.put(f"{paths.COORDINATORS}/{foreign}", b"?")
    transactions = other.broker.topic_manager.transactions
    await transactions.load_unowned_coordinators()
    assert [each.number for each in transactions.loaded_coordinators] == [txn.most]
    assert not (await find_orphans(session, 0, 3600)).orphans
    await other.channel.close()


async def test_a_broker_that_closes_hands_its_open_transactions_over(
    running: Cluster, client: Client, settled: Settled
) -> None:
    await client.make_topic()
    txn = await client.begin()
    await client.join(txn)
    await running.brokers[0].close()
    other = Client(await running.add_broker(), running)
    assert await other.get_status(txn) is TxnState.OPEN
    assert await other.end(txn, "COMMIT", TOPIC, visible=True) is TxnState.COMMITTED
    assert settled.of(txn) == [(TOPIC, True)]
    await other.channel.close()


async def test_another_broker_says_who_has_the_coordinator_and_joins_there(
    running: Cluster, client: Client, settled: Settled
) -> None:
    await client.make_topic()
    txn = await client.begin()
    other = Client(await running.add_broker(), running)
    with pytest.raises(NotOwner) as refused:
        await other.get_status(txn)
    assert refused.value.fields["owner"] == str(client.broker.endpoint)
    found = await other.call("Find", wire.FindCoordinator(coordinator=0))
    assert (found.owner, found.here, found.coordinators) == (str(client.broker.endpoint), False, 16)
    assert await asyncio.gather(other.join(txn), other.join(txn, TOPIC + "2")) == [TxnState.OPEN, TxnState.OPEN]
    assert await client.end(txn, "COMMIT", visible=True) is TxnState.COMMITTED
    assert await other.join(txn) is TxnState.COMMITTED
    await other.channel.close()


async def test_a_broker_without_transactions_loads_nothing(client: Client) -> None:
    await client.make_topic()
    await client.broker.topic_manager.transactions.load_unowned_coordinators()
    assert client.broker.topic_manager.transactions.loaded_coordinators == []
    with pytest.raises(NotFound):
        await client.call("Find", wire.FindCoordinator(coordinator=16))


async def test_the_admin_client_lists_shows_and_aborts_and_loads_nothing_for_a_question(client: Client) -> None:
    url = f"magnetar://{client.broker.endpoint}"
    async with AdminClient(url) as admin:
        assert [each.epoch for each in await admin.all_transactions()] == [0] * 16
        assert client.broker.topic_manager.transactions.loaded_coordinators == [], "a question loads no coordinator"
        txn = await client.begin(3)
        await client.join(txn)
        (found,) = (await admin.transactions(3)).items
        assert (found.txn, found.state, found.topics, found.sink.sink_id) == (txn, TxnState.OPEN, (TOPIC,), "")
        assert await admin.abort_transaction(str(txn)) is TxnState.ABORTED
        with pytest.raises(NotFound):
            await admin.detach_transaction(txn, TOPIC + "2")
        assert (await admin.transaction(txn)).reason == "admin"
