"""What a role began is its own: others end nothing of it, write nothing into it, and learn nothing of it.

Over gRPC, with roles; the rules one by one are in tests/broker/transaction/test_owners.py. `victim` and `etl` may
write and read in the namespace; `stranger` has no grant at all.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.common.config import BrokerConfig
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InvalidRequest, MagnetarError, Unauthorized, from_wire
from magnetar.proto.states import TxnId, TxnState, coordinator_of
from magnetar.proto.wire_pb2 import TransactionId
from tests.broker.access.roles import ROOT, Roles, roles
from tests.broker.access.test_grants import NAMESPACE, TOPIC
from tests.broker.subscription.test_acks_in_transactions import ack_in
from tests.broker.topic.coordination import in_txn
from tests.support.cluster import client_part, payloads_of


@pytest.fixture
async def acme(tmp_path: Path) -> AsyncIterator[Roles]:
    async with roles(tmp_path) as found:
        for role in ("victim", "etl"):
            await found.grant(role, "produce", "consume", namespace=NAMESPACE)
        await found.call(ROOT, "Admin.CreateTopic", wire.TopicSpec(name=TOPIC))
        yield found


async def begun(acme: Roles, role: str, **options: Any) -> TransactionId:
    reply = await acme.call(role, "Transactions.Begin", wire.BeginRequest(coordinator=0, count=1, **options))
    found: TransactionId = reply.first
    return found


def told(item: wire.TransactionReply, txn: TransactionId) -> object:
    if not item.HasField("error"):
        return TxnState(item.state)
    return type(from_wire(item.error)), item.error.message.replace(str(txn.least), "ID")


async def asked(acme: Roles, role: str, txn: TransactionId) -> list[object]:
    """What each question about a transaction is answered, without its id."""
    found = [told((await acme.call(role, "Transactions.Status", wire.StatusRequest(txns=[txn]))).items[0], txn)]
    for verb in wire.EndItem.Verb.values():
        end = wire.EndRequest(items=[wire.EndItem(txn=txn, verb=verb)])
        found.append(told((await acme.call(role, "Transactions.End", end)).items[0], txn))
    try:
        await acme.call(role, "Transactions.CommitBatch", wire.CommitBatchRequest(items=[wire.EndItem(txn=txn)]))
    except MagnetarError as error:
        found.append((type(error), error.message.replace(str(txn.least), "ID")))
    return found


async def status(acme: Roles, role: str, txn: TransactionId) -> object:
    return told((await acme.call(role, "Transactions.Status", wire.StatusRequest(txns=[txn]))).items[0], txn)


def never(txn: TransactionId) -> TransactionId:
    return TransactionId(most=txn.most, least=txn.least + (1 << 39))


async def test_a_stranger_is_told_what_it_is_told_of_an_id_that_was_never_given(acme: Roles) -> None:
    txn = await begun(acme, "victim")
    producer = await acme.producer("victim", TOPIC)
    producer.frame(publish=in_txn(producer.name, 0, TxnId(txn.most, txn.least), b"mine"))
    await producer.next("receipt")
    for role in ("stranger", "etl", ROOT):
        assert await asked(acme, role, txn) == await asked(acme, role, never(txn))
        assert (await asked(acme, role, txn))[0][0] is InvalidRequest  # type: ignore[index]
    assert await status(acme, "victim", txn) is TxnState.OPEN
    end = wire.EndRequest(items=[wire.EndItem(txn=txn)])
    assert told((await acme.call("victim", "Transactions.End", end)).items[0], txn) is TxnState.COMMITTED
    for role in ("stranger", "etl", ROOT):
        assert await asked(acme, role, txn) == await asked(acme, role, never(txn))
    assert await status(acme, "victim", txn) is TxnState.COMMITTED
    listed = await acme.call(ROOT, "Admin.ListTransactions", wire.ListTransactionsRequest(txn=txn))
    assert wire.TransactionState.Name(listed.items[0].state) == "COMMITTED", "an operator has its verbs"


async def test_nobody_publishes_or_acknowledges_in_a_transaction_of_another_role(acme: Roles) -> None:
    txn = await begun(acme, "victim")
    here = TxnId(txn.most, txn.least)
    thief = await acme.producer("etl", TOPIC)
    for number in range(2):
        thief.frame(publish=in_txn(thief.name, 2 * number, here, b"foreign"))
        refused = from_wire((await thief.next("failed")).error)
        assert isinstance(refused, InvalidRequest)
        assert "never given" in refused.message
        producer = await acme.producer("victim", TOPIC, f"p-{number}")
        producer.frame(publish=in_txn(producer.name, 0, here, b"mine %d" % number))
        await producer.next("receipt")  # it has joined: the second try of the thief is for an open one
    thief.publish(b"plain")
    await thief.next("receipt")
    consumer = await acme.consumer("etl", TOPIC, isolation="READ_UNCOMMITTED", initial_position=wire.Subscribe.EARLIEST)
    deliveries = [await consumer.receive() for _ in range(3)]
    assert sorted(each for one in deliveries for each in payloads_of(one.entry)) == [b"mine 0", b"mine 1", b"plain"]
    with pytest.raises(InvalidRequest, match="never given"):
        await ack_in(consumer, here, deliveries[0])
    earliest = wire.Subscribe.EARLIEST
    reader = await acme.consumer("victim", TOPIC, "v", isolation="READ_UNCOMMITTED", initial_position=earliest)
    await ack_in(reader, here, await reader.receive())
    with pytest.raises(InvalidRequest, match="never given"):
        await ack_in(consumer, here, deliveries[0])
    topic = acme.broker.topics[TOPIC]
    assert topic.transactions.core is not None
    assert [str(each) for each in topic.transactions.core.open_transaction_ids] == [str(here)]


async def test_a_stranger_moves_no_batch_of_a_sink_and_fences_no_name(acme: Roles) -> None:
    sink = wire.SinkTag(sink_id="sales", query_id="q", batch=7, run="1")
    mine = await begun(acme, "victim", sink=sink)
    named = await begun(acme, "victim", name="app")
    far = wire.SinkTag(sink_id="sales", query_id="q", batch=1 << 40)
    await acme.call("stranger", "Transactions.CommitBatch", wire.CommitBatchRequest(coordinator=0, sink=far))
    await begun(acme, "stranger", name="app")
    asked_for = wire.SinkRequest(coordinator=0, sink_id="sales")
    assert not (await acme.call("victim", "Transactions.SinkStatus", asked_for)).known
    done = await acme.call(
        "victim", "Transactions.CommitBatch", wire.CommitBatchRequest(items=[wire.EndItem(txn=mine)], sink=sink)
    )
    assert not done.already, "its batch is written, and counts"
    assert (await acme.call("victim", "Transactions.SinkStatus", asked_for)).batch == 7
    assert not (await acme.call("third", "Transactions.SinkStatus", asked_for)).known
    assert await status(acme, "victim", named) is TxnState.OPEN


async def test_a_half_of_a_role_is_published_by_a_broker_that_calls_as_a_super_user(acme: Roles) -> None:
    """As brokers do that have a token, and no certificate of a member."""
    half = await begun(acme, "victim")
    message = wire.HalfMessage(topic=TOPIC, entry=client_part("", 0, b"mine"))
    coordinators = BrokerConfig().transaction_coordinators
    group = next(name for number in range(1000) if coordinator_of(name := f"g{number}", coordinators) == half.most)
    request = wire.HalfRequest(half=half, group=group, messages=[message])
    assert (await acme.call("victim", "Transactions.PrepareHalf", request)).state == wire.PREPARED
    commit = wire.EndHalfRequest(half=half, verb=wire.EndHalfRequest.COMMIT)
    assert (await acme.call("victim", "Transactions.EndHalf", commit)).state == wire.COMMITTED
    consumer = await acme.consumer("etl", TOPIC, initial_position=wire.Subscribe.EARLIEST)
    assert payloads_of((await consumer.receive()).entry) == [b"mine"]


async def test_what_a_topic_has_of_a_transaction_is_shown_to_administrators_and_lists_to_operators(acme: Roles) -> None:
    txn = await begun(acme, "victim")
    about = wire.TopicTransactionRequest(topic=TOPIC, txn=txn)
    for role in ("etl", "victim", "stranger"):
        with pytest.raises(Unauthorized):
            await acme.call(role, "Admin.TopicTransaction", about)
        with pytest.raises(Unauthorized):
            await acme.call(role, "Admin.ListTransactions", wire.ListTransactionsRequest(coordinator=0))
    await acme.call("acme-admin", "Admin.TopicTransaction", about)
    await acme.call(ROOT, "Admin.ListTransactions", wire.ListTransactionsRequest(coordinator=0))
