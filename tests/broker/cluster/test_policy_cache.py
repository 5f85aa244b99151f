"""Policies as a broker knows them: inherited, and current whoever changes them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from magnetar.broker.cluster.policy_cache import PolicyCache
from magnetar.metadata import paths
from magnetar.metadata.records import PoliciesRecord, encode_record
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import DeleteNode
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.errors import InvalidRequest
from magnetar.proto.names import NamespaceName, TopicName
from magnetar.proto.policies import Policies
from magnetar.runtime.process import make_system_world
from tests.support.cut_store import CutStore

NAMESPACE = NamespaceName("acme", "shop")
TOPIC = TopicName.parse("acme/shop/orders")
PARTITION = TOPIC.with_partition(3)


class Deployment:
    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.told: list[NamespaceName] = []
        self.book = PolicyCache(store.new_session(), AppliedPolicies(max_producers=1), self.told.append)
        self.other = PolicyCache(store.new_session(), AppliedPolicies(max_producers=1))

    async def until(self, holds: object) -> None:
        assert callable(holds)
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0)


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    store = await SqliteStore.open(make_system_world(1), ":memory:")
    made = Deployment(store)
    await made.book.open()
    await made.other.open()
    yield made
    await made.book.close()
    await made.other.close()
    await store.close()


async def test_a_partition_has_the_policies_of_its_topic_its_namespace_and_the_broker(deployment: Deployment) -> None:
    await deployment.book.change_policies(NAMESPACE, None, Policies(max_consumers=2, message_ttl_s=2))
    await deployment.book.change_policies(NAMESPACE, TOPIC, Policies(message_ttl_s=3))
    found = await deployment.book.get_applied_policies(PARTITION)
    assert (found.max_producers, found.max_consumers, found.message_ttl_s) == (1, 2, 3)
    other = await deployment.book.get_applied_policies(TopicName.parse("acme/shop/others"))
    assert (other.max_consumers, other.message_ttl_s) == (2, 2)


async def test_what_another_broker_changes_is_known_here(deployment: Deployment) -> None:
    assert (await deployment.book.get_applied_policies(PARTITION)).message_ttl_s == 0
    await deployment.other.change_policies(NAMESPACE, TOPIC, Policies(message_ttl_s=3))
    await deployment.until(lambda: deployment.book.get_applied_policies_nowait(PARTITION).message_ttl_s == 3)
    assert NAMESPACE in deployment.told
    await deployment.other.change_policies(NAMESPACE, None, Policies(max_consumers=9))
    await deployment.until(lambda: deployment.book.get_applied_policies_nowait(PARTITION).max_consumers == 9)
    await deployment.other.change_policies(NAMESPACE, TOPIC, Policies(), ("message_ttl_s",))
    await deployment.until(lambda: deployment.book.get_applied_policies_nowait(PARTITION).message_ttl_s == 0)


async def test_what_is_changed_for_all_brokers_is_inherited_by_every_topic(deployment: Deployment) -> None:
    await deployment.book.change_policies(NAMESPACE, TOPIC, Policies(max_consumers=3))
    await deployment.book.get_applied_policies(PARTITION)
    await deployment.other.change_policies(None, None, Policies(max_producers=7, max_consumers=7))
    assert deployment.other.defaults.max_producers == 7
    await deployment.until(lambda: deployment.book.get_applied_policies_nowait(PARTITION).max_producers == 7)
    assert deployment.book.get_applied_policies_nowait(PARTITION).max_consumers == 3
    assert deployment.book.get_applied_policies_nowait(TopicName.parse("acme/shop/others")).max_consumers == 7
    assert deployment.told[-1] == NAMESPACE
    later = PolicyCache(deployment.store.new_session(), AppliedPolicies(max_producers=2))
    await later.open()
    assert later.defaults.max_producers == 7
    assert (await later.get_applied_namespace_policies(NamespaceName("acme", "elsewhere"))).max_producers == 7
    await later.change_policies(None, None, Policies(), ("max_producers", "max_consumers"))
    assert later.defaults.max_producers == 2
    await deployment.until(lambda: deployment.book.get_applied_policies_nowait(PARTITION).max_producers == 1)
    await later.close()


async def test_what_one_changes_oneself_is_known_when_it_returns(deployment: Deployment) -> None:
    await deployment.book.get_applied_policies(TOPIC)
    await deployment.book.change_policies(NAMESPACE, TOPIC, Policies(message_ttl_s=3))
    assert deployment.book.get_applied_policies_nowait(TOPIC).message_ttl_s == 3


async def test_a_topic_that_goes_leaves_no_policies_behind(deployment: Deployment) -> None:
    await deployment.book.get_applied_policies(TOPIC)
    await deployment.book.change_policies(NAMESPACE, TOPIC, Policies(message_ttl_s=3))
    path = paths.topic_policies(NAMESPACE.tenant, NAMESPACE.namespace, TOPIC.local)
    await deployment.store.new_session().commit([DeleteNode(path)])
    await deployment.until(lambda: deployment.book.get_applied_policies_nowait(TOPIC).message_ttl_s == 0)
    assert await deployment.book.read_uninherited_policies(NAMESPACE, TOPIC) == Policies()


async def test_a_contradiction_changes_nothing(deployment: Deployment) -> None:
    await deployment.book.change_policies(NAMESPACE, None, Policies(ensemble_size=3, write_quorum=3, ack_quorum=2))
    with pytest.raises(InvalidRequest):
        await deployment.book.change_policies(NAMESPACE, None, Policies(ensemble_size=1))
    assert (await deployment.book.read_uninherited_policies(NAMESPACE, None)).ensemble_size == 3


async def test_a_damaged_record_leaves_what_was_known_and_the_next_change_counts(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.broker.cluster.policy_cache.WATCH_RETRY_S", 0.0)
    await deployment.book.change_policies(NAMESPACE, None, Policies(message_ttl_s=3))
    assert (await deployment.book.get_applied_policies(TOPIC)).message_ttl_s == 3
    path = paths.namespace_policies("acme", "shop")
    session = deployment.store.new_session()
    await session.put(path, b"junk")
    await session.put(path, encode_record(PoliciesRecord(policies=Policies(message_ttl_s=4)), path))
    await deployment.until(lambda: deployment.book.get_applied_policies_nowait(TOPIC).message_ttl_s == 4)


async def test_what_changes_while_the_watch_is_broken_is_read_however_often_reading_fails(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two namespaces; the record of the first is damaged by then."""
    monkeypatch.setattr("magnetar.broker.cluster.policy_cache.WATCH_RETRY_S", 0.0)
    store, session = CutStore(deployment.store.new_session()), deployment.store.new_session()
    book = PolicyCache(store, AppliedPolicies())  # type: ignore[arg-type]
    await book.open()
    try:
        damaged, other = NamespaceName("acme", "damaged"), TopicName.parse("acme/other/orders")
        await deployment.other.change_policies(damaged, None, Policies(message_ttl_s=1))
        first = TopicName("acme", "damaged", "orders")
        assert [(await book.get_applied_policies(topic)).message_ttl_s for topic in (first, TOPIC, other)] == [1, 0, 0]
        store.cut.set()
        path = paths.namespace_policies("acme", "damaged")
        await session.put(path, b"junk")
        await deployment.other.change_policies(NAMESPACE, None, Policies(message_ttl_s=3))
        await deployment.other.change_policies(other.namespace_name, None, Policies(message_ttl_s=4))
        store.failing["get"] = 3
        store.cut.clear()
        await deployment.until(lambda: book.get_applied_policies_nowait(other).message_ttl_s == 4)
        assert [book.get_applied_policies_nowait(topic).message_ttl_s for topic in (first, TOPIC)] == [1, 3]
    finally:
        await book.close()
