"""A topic is deleted by force from under transactions: real brokers, topics and coordinators, over the network."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.broker.topic import storage as deletion
from magnetar.broker.transaction.coordinator import RunningCoordinator
from magnetar.client.admin import AdminClient
from magnetar.client.client import Client
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto.errors import Busy, TransactionsOpen
from magnetar.proto.names import TopicName
from magnetar.proto.states import TxnState
from tests.broker.node.test_failover import vanish
from tests.support.cluster import cluster

IN, OUT, OTHER = (f"persistent://public/default/{name}" for name in ("in", "out", "other"))


@pytest.mark.parametrize("going", [IN, OUT])
async def test_the_coordinator_elsewhere_aborts_what_is_open_in_a_topic_before_it_is_deleted(
    tmp_path: Path, going: str
) -> None:
    """Of a topic with messages of the transaction, and of one with acknowledgements; nothing of it counts elsewhere."""
    async with cluster(tmp_path, brokers=2) as running:
        first, second = running.brokers
        for number in range(16):
            await second.topic_manager.transactions.load_owned_coordinator(number)
        url = f"magnetar://{first.endpoint}"
        async with Client(url) as client, AdminClient(f"magnetar://{second.endpoint}") as admin:
            source, out, other = [await client.create_producer(topic) for topic in (IN, OUT, OTHER)]
            assert (await first.topic_manager.find_owner(TopicName.parse(going))).name == first.topic_manager.name
            consumer = await client.subscribe(IN, "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest)
            await source.send(b"in")
            txn = await client.transaction(timeout=60)
            for producer in (out, other):
                await producer.send(b"out", txn=txn)
            await consumer.acknowledge(await consumer.receive(), txn=txn)
            with pytest.raises(Busy, match="producers"):
                await admin.delete_topic(going)
            await admin.delete_topic(going, force=True)
            with pytest.raises(magnetar.TransactionAborted) as aborted:
                await txn.commit()
            assert aborted.value.reason == "a topic of it was deleted by force"
            assert await client.transaction_status(txn.id) is magnetar.TransactionState.ABORTED
            await other.send(b"next")
            reader = await client.create_reader(OTHER, magnetar.MessageId.earliest)
            assert (await reader.read_next(10_000)).data() == b"next"


async def test_a_deletion_waits_for_no_coordinator_for_ever_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker of the coordinator hangs; then it is gone, and its successor aborts what was open."""

    async def hang(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    async with cluster(tmp_path, brokers=2) as running:
        first, second = running.brokers
        for number in range(16):
            await second.topic_manager.transactions.load_owned_coordinator(number)
        url = f"magnetar://{first.endpoint}"
        async with Client(url) as client, AdminClient(url) as admin:
            out = await client.create_producer(OUT)
            txn = await client.transaction(timeout=60)
            await out.send(b"1", txn=txn)
            await out.close()
            with pytest.raises(TransactionsOpen):
                await admin.delete_topic(OUT)
            with monkeypatch.context() as patched:
                patched.setattr(deletion, "ANSWER_TIMEOUT_S", 0.5)
                patched.setattr(RunningCoordinator, "abort_if_open", hang)
                with pytest.raises(TransactionsOpen, match="is not deleted"):
                    await admin.delete_topic(OUT, force=True)
            topic = await first.topic_manager.load_topic(TopicName.parse(OUT), create=False)
            assert topic.transactions.open_transactions == [txn.id]
            await vanish(running, second)
            await admin.delete_topic(OUT, force=True)
            coordinator = await first.topic_manager.transactions.load_owned_coordinator(txn.id.coordinator)
            assert await coordinator.get_status(txn.id) is TxnState.ABORTED
