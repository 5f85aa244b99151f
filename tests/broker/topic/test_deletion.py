"""Deleting a topic that has something in transactions: refused, or they are aborted first; never half of it."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.broker.topic import storage as deletion
from magnetar.broker.topic.maintenance import TopicMaintenance
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.metadata.sqlite import LocalSession
from magnetar.metadata.store import DeleteNode
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    Busy,
    ConnectionLost,
    MagnetarError,
    NotOwner,
    TopicNotFound,
    TransactionsOpen,
    Unavailable,
    from_wire,
)
from magnetar.proto.names import TopicName
from magnetar.proto.policies import Policies
from magnetar.proto.states import TxnId, TxnState
from magnetar.runtime.network import find_rpc
from tests.broker.subscription.test_delays import until
from tests.broker.topic.coordination import FakeCoordinator, coordinator
from tests.broker.topic.test_maintenance import deployment
from tests.broker.topic.test_transactions import TxnProducer, loaded, shown
from tests.support.cluster import Cluster, TestConsumer, cluster

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)
__all__ = ["coordinator"]


class Scene:
    """The topic, with one entry in an open transaction, and no producer any more."""

    def __init__(self, running: Cluster, coordinator: FakeCoordinator, txn: TxnId) -> None:
        self.running, self.coordinator, self.txn = running, coordinator, txn
        self.broker = running.brokers[0]

    async def producer(self) -> TxnProducer:
        return await TxnProducer(self.running.world, self.broker, TOPIC).opened()

    async def delete(self, *, force: bool) -> None:
        await self.broker.topic_manager.delete_topic(NAME, force=force)

    async def is_gone(self) -> bool:
        with suppress(TopicNotFound):
            await self.broker.topic_manager.load_topic(NAME, create=False)
            return False
        return True

    async def still_takes(self) -> None:
        """Publishes, and messages in new transactions."""
        producer, txn = await self.producer(), self.coordinator.begin()
        await producer.send_in(txn, b"in another one")
        await producer.send(b"plain")
        await producer.close()
        await self.coordinator.end(await loaded(self.broker), txn, True)
        await until(lambda: not len(self.broker.topics[TOPIC].producers))


@pytest.fixture
async def scene(tmp_path: Path, coordinator: FakeCoordinator) -> AsyncIterator[Scene]:
    async with cluster(tmp_path) as running:
        found = Scene(running, coordinator, coordinator.begin())
        producer = await found.producer()
        await producer.send_in(found.txn, b"0")
        await producer.close()
        topic = await loaded(found.broker)
        await until(lambda: not len(topic.producers))
        yield found


async def test_without_force_the_refusal_says_who_holds_the_topic_since_when_and_what_to_do(scene: Scene) -> None:
    with pytest.raises(TransactionsOpen) as refused:
        await scene.delete(force=False)
    text = str(refused.value)
    for said in (str(scene.txn), "role 'billing'", "begun 17 s ago", "delete by force, which aborts them"):
        assert said in text, text
    assert refused.value.fields == {"topic": TOPIC, "txn": str(scene.txn), "state": "OPEN", "count": "1"}
    assert not scene.coordinator.aborts
    await scene.still_takes()


async def test_by_force_what_is_open_is_aborted_before_the_topic_goes(scene: Scene) -> None:
    await scene.delete(force=True)
    assert scene.coordinator.states[scene.txn] is TxnState.ABORTED
    assert await scene.is_gone()
    settlement = scene.coordinator.settlement(scene.txn, False)
    assert await scene.broker.topic_manager.topic_transaction_settler.settle(NAME, [settlement]) == [None], (
        "there is nothing to settle"
    )


async def test_acknowledgements_in_a_transaction_are_aborted_too(scene: Scene) -> None:
    topic, txn = await loaded(scene.broker), scene.coordinator.begin()
    await scene.coordinator.end(topic, scene.txn, False)
    await (await scene.producer()).send(b"1")
    consumer = await TestConsumer(scene.running.world, scene.broker, TOPIC).ready()
    await topic.transactions.joins.join(txn)
    await scene.delete(force=True)
    assert scene.coordinator.states[txn] is TxnState.ABORTED
    await consumer.close()


async def test_what_is_prepared_is_not_aborted_by_force_nor_is_anything_else_then(scene: Scene) -> None:
    producer, prepared = await scene.producer(), scene.coordinator.begin()
    await producer.send_in(prepared, b"1")
    await producer.close()
    scene.coordinator.states[prepared] = TxnState.PREPARED
    with pytest.raises(TransactionsOpen, match=re.escape(str(prepared))) as refused:
        await scene.delete(force=True)
    assert "magnetar transactions abort" in str(refused.value)
    assert refused.value.fields["state"] == "PREPARED"
    assert not scene.coordinator.aborts, "no other transaction pays for a deletion that does not happen"
    await scene.still_takes()
    scene.coordinator.states[prepared] = TxnState.ABORTED
    await scene.delete(force=True)
    assert await scene.is_gone()


async def test_one_that_is_prepared_while_the_topic_is_deleted_stays(scene: Scene) -> None:
    scene.coordinator.deciding.clear()
    deleting = asyncio.create_task(scene.delete(force=True))
    await until(lambda: bool(scene.coordinator.aborts))
    scene.coordinator.states[scene.txn] = TxnState.PREPARED
    scene.coordinator.deciding.set()
    with pytest.raises(TransactionsOpen):
        await deleting
    await scene.still_takes()


async def test_a_commit_on_its_way_is_waited_for_and_counts(scene: Scene) -> None:
    scene.coordinator.deciding.clear()
    deleting = asyncio.create_task(scene.delete(force=True))
    await until(lambda: bool(scene.coordinator.aborts))
    assert not await scene.is_gone(), "the topic is there until the outcome is known"
    settlement = scene.coordinator.settlement(scene.txn, True)
    scene.coordinator.deciding.set()
    await deleting
    assert scene.coordinator.states[scene.txn] is TxnState.COMMITTED
    assert await scene.is_gone()
    assert await scene.broker.topic_manager.topic_transaction_settler.settle(NAME, [settlement]) == [None]


@pytest.mark.parametrize("force", [False, True])
async def test_a_coordinator_that_does_not_answer_keeps_the_topic_as_it_was(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    monkeypatch.setattr(deletion, "ANSWER_TIMEOUT_S", 0.3)
    with scene.coordinator.unreachable(), pytest.raises(TransactionsOpen) as refused:
        await scene.delete(force=force)
    assert refused.value.fields["state"] == "UNKNOWN"
    assert str(scene.txn) in str(refused.value)
    assert "is not deleted" in str(refused.value)
    await scene.still_takes()
    await scene.coordinator.end(await loaded(scene.broker), scene.txn, True)
    assert await shown(scene.broker) == [b"0", b"in another one", b"plain"], "and the transaction may still commit"


async def test_a_coordinator_that_hangs_ends_the_deletion_in_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "ANSWER_TIMEOUT_S", 0.3)
    scene.coordinator.deciding.clear()
    with pytest.raises(TransactionsOpen, match="no answer within"):
        await scene.delete(force=True)
    scene.coordinator.deciding.set()
    await scene.still_takes()


async def test_an_outcome_that_the_topic_has_not_applied_does_not_refuse_a_deletion(scene: Scene) -> None:
    scene.coordinator.settlement(scene.txn, True)
    assert (await loaded(scene.broker)).transactions.open_transactions == [scene.txn]
    await scene.delete(force=False)
    assert await scene.is_gone()


async def test_nothing_joins_while_the_topic_is_deleted(scene: Scene) -> None:
    """Neither a transaction that asks then, nor one whose coordinator answers then: its commit would lose a part."""
    early, late = scene.coordinator.begin(), scene.coordinator.begin()
    scene.coordinator.deciding.clear()
    joining, honest, at_once = (
        asyncio.Event(),
        FakeCoordinator.join_transaction,
        FakeCoordinator.join_transaction_nowait,
    )

    async def join(txn: TxnId, topic: TopicName, owner: str | None = None) -> Any:
        if txn == early:
            joining.set()
            await scene.coordinator.deciding.wait()
        return await honest(scene.coordinator, txn, topic)

    def join_nowait(txn: TxnId, topic: str, owner: str | None = None) -> bool:
        return txn != early and at_once(scene.coordinator, txn, topic)

    scene.coordinator.join_transaction, scene.coordinator.join_transaction_nowait = join, join_nowait  # type: ignore[method-assign]
    first, second = await scene.producer(), await TxnProducer(
        scene.running.world, scene.broker, TOPIC, "second"
    ).opened()
    first.publish_in(early, b"1")
    await joining.wait()
    deleting = asyncio.create_task(scene.delete(force=True))
    await until(lambda: bool(scene.coordinator.aborts))
    second.publish_in(late, b"2")
    assert isinstance(from_wire((await second.next("failed")).error), Unavailable)
    scene.coordinator.deciding.set()
    await deleting
    assert late not in scene.coordinator.participants
    with pytest.raises((Unavailable, NotOwner)):  # NotOwner: its end is told before what waited
        raise from_wire((await first.next("failed")).error)
    assert await scene.is_gone(), "early has nothing in the topic"


async def test_a_producer_that_comes_while_a_deletion_without_force_waits_keeps_the_topic(scene: Scene) -> None:
    scene.coordinator.settlement(scene.txn, False)
    asked, go, honest = asyncio.Event(), asyncio.Event(), scene.coordinator.ask_transaction_state

    async def tell(txn: TxnId) -> Any:
        asked.set()
        await go.wait()
        return await honest(txn)

    scene.coordinator.ask_transaction_state = tell  # type: ignore[method-assign]
    deleting = asyncio.create_task(scene.delete(force=False))
    await asked.wait()
    producer = await scene.producer()
    go.set()
    with pytest.raises(Busy):
        await deleting
    await producer.send(b"1")


async def test_of_two_deletions_at_once_one_does_it(scene: Scene) -> None:
    scene.coordinator.deciding.clear()
    first = asyncio.create_task(scene.delete(force=True))
    await until(lambda: bool(scene.coordinator.aborts))
    second = asyncio.create_task(scene.delete(force=True))
    scene.coordinator.deciding.set()
    await first
    with pytest.raises(NotOwner):
        await second
    assert await scene.is_gone()
    with pytest.raises(TopicNotFound):
        await scene.delete(force=True)


async def test_a_partitioned_topic_is_refused_as_a_whole(tmp_path: Path, coordinator: FakeCoordinator) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        channel = running.world.network.connect(broker.endpoint)
        await channel.call(find_rpc("Admin", "CreateTopic"), wire.TopicSpec(name=TOPIC, partitions=3), timeout_s=20.0)
        last, txn = f"{TOPIC}-partition-2", coordinator.begin()
        for number in range(3):
            await (await TxnProducer(running.world, broker, f"{TOPIC}-partition-{number}").opened()).send(b"0")
        producer = await TxnProducer(running.world, broker, last, "second").opened()
        await producer.send_in(txn, b"1")
        coordinator.states[txn] = TxnState.PREPARED
        delete = find_rpc("Admin", "DeleteTopic"), wire.DeleteRequest(name=TOPIC, force=True)
        with pytest.raises(TransactionsOpen):
            await channel.call(*delete, timeout_s=20.0)
        for number in range(3):
            await broker.topic_manager.load_topic(NAME.with_partition(number), create=False)
        coordinator.states[txn] = TxnState.OPEN
        await channel.call(*delete, timeout_s=20.0)
        assert coordinator.states[txn] is TxnState.ABORTED
        for number in range(3):
            with pytest.raises(TopicNotFound):
                await broker.topic_manager.load_topic(NAME.with_partition(number), create=False)
        await channel.close()


@pytest.mark.parametrize("mode", ["delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"])
async def test_a_topic_that_only_an_open_transaction_uses_is_not_deleted_as_unused(
    tmp_path: Path, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    async with deployment(tmp_path) as at:
        producer = await TxnProducer(at.running.world, at.broker, TOPIC).opened()
        txn = coordinator.begin()
        await producer.send_in(txn, b"0")
        await at.broker.topic_manager.policies.change_policies(
            NAME.namespace_name, NAME, Policies(inactive_s=60, inactive_mode=mode)
        )
        await producer.close()
        await until(lambda: not at.topic.producers)
        for _ in range(3):
            await at.later(100)
        assert TOPIC in at.broker.topics
        assert not at.topic.maintenance.is_inactive()
        with monkeypatch.context() as patched:
            patched.setattr(TopicMaintenance, "is_inactive", lambda _: True)  # it joined just after the look
            await at.later(1)
        assert TOPIC in at.broker.topics
        assert not coordinator.aborts
        await coordinator.end(at.topic, txn, False)
        await at.later(1)
        await at.later(100)
        assert TOPIC not in at.broker.topics, "then it is unused"


async def test_a_topic_with_an_open_transaction_is_deleted_at_each_step_then_again(
    tmp_path: Path, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change of the metadata fails in its turn, before it is done or after. The second delete ends it, and there
    is nothing to settle then."""
    steps, fails, after = list[str](), -1, False
    honest = LocalSession.commit

    async def commit(self: LocalSession, operations: Sequence[Any]) -> list[int]:
        if not any(isinstance(each, DeleteNode) for each in operations):
            return await honest(self, operations)
        steps.append(",".join(each.path for each in operations))
        failing = len(steps) - 1 == fails
        if failing and not after:
            raise Unavailable("the metadata is away")
        done = await honest(self, operations)
        if failing:
            raise ConnectionLost("the metadata has answered to nobody")
        return done

    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        monkeypatch.setattr(LocalSession, "commit", commit)
        number, failed = 0, 0
        while True:
            name = TopicName.parse(f"{TOPIC}-{number}")
            fails, after = number // 2, bool(number % 2)
            producer = await TxnProducer(running.world, broker, name.full).opened()
            consumer = await TestConsumer(running.world, broker, name.full).ready()
            txn = coordinator.begin()
            await producer.send_in(txn, b"0")
            await producer.close()
            await consumer.close()
            steps.clear()
            try:
                await broker.topic_manager.delete_topic(name, force=True)
            except MagnetarError:
                failed += 1
                with suppress(TopicNotFound):
                    await broker.topic_manager.delete_topic(name, force=True)
            assert coordinator.states[txn] is TxnState.ABORTED
            settlement = coordinator.settlement(txn, False)
            assert await broker.topic_manager.topic_transaction_settler.settle(name, [settlement]) == [None], (
                "there is nothing to settle"
            )
            with pytest.raises(TopicNotFound):
                await broker.topic_manager.load_topic(name, create=False)
            number += 1
            if fails >= len(steps):
                break
    assert number >= 5, "several changes are made, and each failed twice"
    assert failed, "some of them are the delete's own"


@pytest.mark.parametrize("creation", [True, False])
async def test_a_topic_deleted_under_its_producer_comes_back_unless_creation_is_off(
    tmp_path: Path, creation: bool
) -> None:
    """Its clients are told of the end as of a move, and open it again: what they send is in the new topic alone."""
    async with cluster(tmp_path) as running:
        url, owned = f"magnetar://{running.brokers[0].endpoint}", running.brokers[0].topic_manager
        async with aio.Client(url) as client, AdminClient(url) as admin:
            await admin.update_namespace("public/default", auto_topic_creation=creation)
            await admin.create_topic(TOPIC)
            producer = await client.create_producer(TOPIC)
            await producer.send(b"of the first")
            first = await owned.load_topic(NAME)
            await admin.delete_topic(TOPIC, force=True)
            if creation:
                await producer.send(b"of the second")
                async with await client.create_reader(TOPIC, magnetar.MessageId.earliest) as reader:
                    assert (await reader.read_next(10_000)).data() == b"of the second"
                assert (await owned.load_topic(NAME)).incarnation > first.incarnation
                assert producer.last_sequence_id() == 1, "it keeps its numbering; the new topic knows none of the old"
                name = producer.producer_name()
                await producer.close()
                await admin.delete_topic(TOPIC, force=True)
                assert (await client.create_producer(TOPIC, producer_name=name)).last_sequence_id() == -1
            else:
                with pytest.raises(magnetar.TopicNotFound):
                    await producer.send(b"of none")
                with pytest.raises(TopicNotFound):
                    await owned.load_topic(NAME, create=False)
