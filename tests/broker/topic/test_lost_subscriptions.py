"""The record of a subscription that is merely absent: its messages stay, and it begins anew; a deleted one does not."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.log.managed_ledger import TopicFenced
from magnetar.broker.log.managed_ledger import topic_path as topic_path
from magnetar.broker.subscription.cursors import DurableCursor, cursor_path
from magnetar.broker.topic.storage import DurableTopicStorage
from magnetar.broker.topic.topic import RECORD_LOST_PROPERTY, SUBSCRIPTION_NAMES_BYTES_MAX, Topic
from magnetar.metadata.records import CursorRecord
from magnetar.metadata.sqlite import LocalSession
from magnetar.metadata.store import ANY_VERSION, CheckNodeVersion, CommitOperation, DeleteNode, get_record
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import DataLost, MessageTooLarge, OutcomeUnknown, Unavailable
from magnetar.proto.names import TopicName
from tests.support.cluster import Cluster, TestConsumer, TestProducer, cluster

TOPIC = "persistent://public/default/t"
NAME = TopicName.parse(TOPIC)


async def _published(running: Cluster) -> Topic:
    """Subscriptions `kept` and `lost`; two closed ledgers, which `kept` alone has acknowledged."""
    broker, world = running.brokers[0], running.world
    for name in ("lost", "kept"):
        await (await TestConsumer(world, broker, TOPIC, subscription=name).ready()).leave()
    for _ in range(2):
        producer = await TestProducer(world, broker, TOPIC).opened()
        await producer.send(b"x")
        await producer.close()
        await broker.topic_manager.unload_topic(NAME)
    consumer = await TestConsumer(world, broker, TOPIC, subscription="kept").ready()
    await consumer.ack(*[await consumer.receive() for _ in range(2)])
    await consumer.leave()
    return await broker.topic_manager.load_topic(NAME)


async def test_the_messages_of_a_subscription_whose_record_is_lost_stay_and_it_begins_anew(
    caplog: pytest.LogCaptureFixture, running: Cluster
) -> None:
    broker, world = running.brokers[0], running.world
    topic = await _published(running)
    before = len(topic.log.shape)
    assert topic.log.record.subscriptions == ("kept", "lost")
    await broker.topic_manager.unload_topic(NAME)
    await running.sessions[0].commit([DeleteNode(cursor_path(NAME, "lost"), ANY_VERSION)])
    with caplog.at_level(logging.ERROR):
        topic = await broker.topic_manager.load_topic(NAME)
    assert "the record of the subscription is lost" in caplog.text
    assert await topic.trim_ledgers() == []
    assert len(topic.log.shape) == before, "nothing went"
    store = topic.find_subscription("lost").store
    assert store is not None
    assert int(store.properties[RECORD_LOST_PROPERTY]) > 0, "an operator sees it"
    consumer = await TestConsumer(
        world, broker, TOPIC, subscription="lost", initial_position=wire.Subscribe.LATEST
    ).ready()
    assert len(await consumer.receive_payloads(2)) == 2


@pytest.mark.parametrize("whose", ["subscription", "topic"])
async def test_messages_stay_while_a_record_of_them_is_damaged_and_who_asks_is_told(
    whose: str, running: Cluster
) -> None:
    """Nothing is written over the record, and all goes on when it was restored."""
    broker, world = running.brokers[0], running.world
    topic = await _published(running)
    before = len(topic.log.shape)
    await broker.topic_manager.unload_topic(NAME)
    session = running.sessions[0]
    path = cursor_path(NAME, "lost") if whose == "subscription" else topic_path(NAME)
    whole = (await session.get(path)).value
    for place in (0, 2, 6, len(whole) - 3):
        bad = bytearray(whole)
        bad[place] ^= 1
        await session.put(path, bytes(bad), ANY_VERSION)
        with pytest.raises(DataLost, match=path) as told:
            await broker.topic_manager.load_topic(NAME)
        assert "restore" in told.value.message
        assert (await session.get(path)).value == bytes(bad), "nothing is written over it"
        consumer = TestConsumer(world, broker, TOPIC, subscription="lost")
        with pytest.raises(DataLost):
            await consumer.ready()
    await session.put(path, whole, ANY_VERSION)
    topic = await broker.topic_manager.load_topic(NAME)
    assert len(topic.log.shape) == before, "nothing went"
    consumer = await TestConsumer(world, broker, TOPIC, subscription="lost").ready()
    assert len(await consumer.receive_payloads(2)) == 2


async def test_a_deleted_subscription_keeps_nothing_and_does_not_come_back(running: Cluster) -> None:
    broker = running.brokers[0]
    topic = await _published(running)
    await topic.registry.unsubscribe("lost")
    await broker.topic_manager.unload_topic(NAME)
    topic = await broker.topic_manager.load_topic(NAME)
    assert sorted(topic.subscriptions) == ["kept"]
    assert topic.log.record.subscriptions == ("kept",)
    assert await topic.trim_ledgers() != []


async def test_a_crash_between_the_two_records_of_a_deletion_leaves_a_subscription_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        topic = await _published(running)
        delete = DurableCursor.delete

        async def fail(_: DurableCursor) -> None:
            raise Unavailable("a crash")

        monkeypatch.setattr(DurableCursor, "delete", fail)
        with pytest.raises(Unavailable):
            await topic.registry.unsubscribe("lost")
        monkeypatch.setattr(DurableCursor, "delete", delete)
        await broker.topic_manager.unload_topic(NAME)
        topic = await broker.topic_manager.load_topic(NAME)
        assert sorted(topic.subscriptions) == ["kept", "lost"], "its record was there"
        await topic.registry.unsubscribe("lost")
        await broker.topic_manager.unload_topic(NAME)
        assert sorted((await broker.topic_manager.load_topic(NAME)).subscriptions) == ["kept"]


@pytest.mark.parametrize("step", ["before", "after"])
async def test_a_name_is_free_when_its_deletion_has_ended_and_a_failed_one_is_repeated(
    step: str, running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, session, path = await _published(running), running.sessions[0], cursor_path(NAME, "lost")
    delete, old = DurableCursor.delete, topic.find_subscription("lost").store

    async def fail(self: DurableCursor) -> None:
        if step == "after":
            await delete(self)
        raise OutcomeUnknown("no answer from the metadata")

    for repeat in (topic.registry.subscribe, topic.registry.unsubscribe):
        with monkeypatch.context() as failing:
            failing.setattr(DurableCursor, "delete", fail)
            with pytest.raises(OutcomeUnknown):
                await topic.registry.unsubscribe("lost")
            with pytest.raises(OutcomeUnknown):
                await topic.registry.subscribe("lost")
        await repeat("lost")
        found = await get_record(session, path, CursorRecord)
        if repeat == topic.registry.subscribe:
            made = topic.find_subscription("lost").store
            assert found is not None
            assert (made is not old, found[0].claim) == (True, made and made._claim)
            assert old is not None
            with pytest.raises(TopicFenced):
                await old.set_properties({"of": "the deleted one"})
        else:
            assert found is None
            assert topic.log.record.subscriptions == ("kept",)


async def test_a_topic_goes_with_the_records_of_subscriptions_whose_deletion_has_failed(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await _published(running)

    async def fail(_: DurableCursor) -> None:
        raise Unavailable("no metadata")

    with monkeypatch.context() as failing:
        failing.setattr(DurableCursor, "delete", fail)
        with pytest.raises(Unavailable):
            await topic.registry.unsubscribe("lost")
    await topic.delete(force=True, abort=False)
    assert await running.sessions[0].get(cursor_path(NAME, "lost")) is None


async def test_a_record_of_before_names_them_with_its_next_change_and_a_long_list_is_not_kept(running: Cluster) -> None:
    topic = await _published(running)
    await topic.log.commit_fields(subscriptions=None)
    await running.brokers[0].topic_manager.unload_topic(NAME)
    topic = await running.brokers[0].topic_manager.load_topic(NAME)
    await topic.registry.subscribe("kept")
    assert topic.log.record.subscriptions == ("kept", "lost")
    for number in range(SUBSCRIPTION_NAMES_BYTES_MAX // 200 + 1):
        if topic.log.record.subscriptions is None:
            break
        await topic.registry.subscribe(f"{number:0200d}")
    assert topic.log.record.subscriptions is None


async def test_a_crash_after_the_first_of_two_lost_ones_was_made_anew_forgets_the_other_not(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    broker = running.brokers[0]
    await _published(running)
    await broker.topic_manager.unload_topic(NAME)
    await running.sessions[0].commit([DeleteNode(cursor_path(NAME, each), ANY_VERSION) for each in ("kept", "lost")])
    create, made = DurableTopicStorage.create_subscription, list[str]()

    async def crash(self: DurableTopicStorage, owner: Any, name: str, *given: Any) -> Any:
        if made:
            raise Unavailable("a crash")
        made.append(name)
        return await create(self, owner, name, *given)

    monkeypatch.setattr(DurableTopicStorage, "create_subscription", crash)
    with pytest.raises(Unavailable):
        await broker.topic_manager.load_topic(NAME)
    monkeypatch.undo()
    assert sorted((await broker.topic_manager.load_topic(NAME)).subscriptions) == ["kept", "lost"]


async def test_a_subscription_is_made_in_the_commit_that_names_it_and_claimed_in_that_which_claims_its_topic(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    broker = running.brokers[0]
    topic = await broker.topic_manager.load_topic(NAME)
    commits, commit = list[list[str]](), LocalSession.commit

    async def counted(self: LocalSession, operations: Sequence[CommitOperation]) -> list[int]:
        commits.append([each.path for each in operations])
        return await commit(self, operations)

    monkeypatch.setattr(LocalSession, "commit", counted)
    for name in ("a", "b"):
        await topic.registry.subscribe(name)
    topics = topic_path(NAME)
    assert commits == [[cursor_path(NAME, "a"), topics], [cursor_path(NAME, "b"), topics]]
    await broker.topic_manager.unload_topic(NAME)
    commits.clear()
    topic = await broker.topic_manager.load_topic(NAME)
    assert commits == [[cursor_path(NAME, "a"), cursor_path(NAME, "b"), topics]]
    records = [await get_record(running.sessions[0], cursor_path(NAME, each), CursorRecord) for each in ("a", "b")]
    assert {each[0].claim for each in records if each is not None} == {topic.log.record.claim}
    await topic.registry.unsubscribe("a")
    await topic.registry.subscribe("a")
    made = await get_record(running.sessions[0], cursor_path(NAME, "a"), CursorRecord)
    assert made is not None
    assert made[0].claim != topic.log.record.claim, "what is left of the deleted one cannot write here"


async def test_subscriptions_that_are_too_large_for_one_commit_are_claimed_one_by_one(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    broker = running.brokers[0]
    await _published(running)
    await broker.topic_manager.unload_topic(NAME)
    commit = LocalSession.commit

    async def one_at_a_time(self: LocalSession, operations: Sequence[CommitOperation]) -> list[int]:
        if sum(not isinstance(each, CheckNodeVersion) for each in operations) > 1:
            raise MessageTooLarge("a commit of more than one")
        return await commit(self, operations)

    monkeypatch.setattr(LocalSession, "commit", one_at_a_time)
    topic = await broker.topic_manager.load_topic(NAME)
    assert sorted(topic.subscriptions) == ["kept", "lost"]
    record = await get_record(running.sessions[0], cursor_path(NAME, "kept"), CursorRecord)
    assert record is not None
    assert record[0].claim == topic.log.record.claim
