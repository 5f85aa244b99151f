"""Brokers of one group share what any of them is asked for; the others of a cluster take what they are asked for."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.broker.cluster.bundles_core import find_topic_bundle_number
from magnetar.broker.cluster.ownership import Ownership, list_brokers
from magnetar.metadata.records import CLUSTER_FORMAT, BrokerRecord, NamespaceRecord
from magnetar.metadata.sqlite import SqliteStore
from magnetar.proto.names import TopicName
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.process import make_system_world

POLICIES = NamespaceRecord(bundles=32)
TOPICS = [TopicName.parse(f"persistent://public/default/t{number}") for number in range(40)]


def owns(broker: Ownership, topic: TopicName) -> bool:
    return broker.is_owned(broker.owner_record_path(topic, POLICIES))


@pytest.fixture
async def tree(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    try:
        yield store
    finally:
        await store.close()


async def _broker(tree: SqliteStore, name: str, group: str = "here") -> Ownership:
    me = BrokerRecord(name=name, endpoint=f"{name}:1", group=group, format=CLUSTER_FORMAT)
    made = Ownership(tree.new_session(), me, random.Random(name), SystemClock())
    await made.register_broker()
    return made


async def test_one_that_is_asked_for_everything_keeps_its_share_and_names_the_others(tree: SqliteStore) -> None:
    first, second, third = brokers = [await _broker(tree, name) for name in ("first", "second", "third")]
    named = {topic: (await first.find_owner(topic, POLICIES)).name for topic in TOPICS}
    by_bundle = {find_topic_bundle_number(topic, 32): name for topic, name in named.items()}
    counts = Counter(by_bundle.values())
    assert min(counts[each.me.name] for each in brokers) >= len(by_bundle) // 6, counts
    assert not any(owns(each, topic) for topic in TOPICS for each in (second, third)), "each takes what it is asked for"
    assert [(await third.find_owner(topic, POLICIES)).name for topic in TOPICS] == list(named.values()), "all say so"
    for topic, name in named.items():
        assert (await second.find_owner(topic, POLICIES)).name == name
        assert owns(second, topic) == (name == "second")
        assert owns(first, topic) == (name == "first")


async def test_a_broker_of_no_group_or_another_one_gets_nothing_and_gives_nothing(tree: SqliteStore) -> None:
    first, alone = await _broker(tree, "first"), await _broker(tree, "alone", "")
    await _broker(tree, "theirs", "there")
    assert {(await first.find_owner(topic, POLICIES)).name for topic in TOPICS[:20]} == {"first"}
    other = NamespaceRecord(bundles=1)
    assert (await alone.find_owner(TopicName.parse("persistent://public/other/t"), other)).name == "alone"


async def test_what_a_broker_owns_stays_when_the_group_grows_and_goes_to_the_rest_when_it_ends(
    tree: SqliteStore,
) -> None:
    first = await _broker(tree, "first")
    assert (await first.find_owner(TOPICS[0], POLICIES)).name == "first"
    second = await _broker(tree, "second")
    assert (await second.find_owner(TOPICS[0], POLICIES)).name == "first"
    theirs = await _assigned(first, "second")
    assert (await second.find_owner(theirs, POLICIES)).name == "second"
    await second.close()
    assert (await first.find_owner(theirs, POLICIES)).name == "first"


async def _assigned(asked: Ownership, name: str) -> TopicName:
    """Asks for topics until one is assigned to the broker of that name."""
    for topic in TOPICS:
        if (await asked.find_owner(topic, POLICIES)).name == name:
            return topic
    raise AssertionError(f"{name} gets nothing")


async def test_a_bundle_assigned_to_a_broker_that_goes_before_it_takes_it_is_anothers(tree: SqliteStore) -> None:
    first, second, third = [await _broker(tree, name) for name in ("first", "second", "third")]
    topic = await _assigned(first, "second")
    await second.close()
    owner = await third.find_owner(topic, POLICIES)
    assert owner.name in ("first", "third")
    assert (await first.find_owner(topic, POLICIES)).name == owner.name


async def test_an_assignment_ends_with_the_broker_that_made_it_unless_it_was_taken(tree: SqliteStore) -> None:
    first, second = [await _broker(tree, name) for name in ("first", "second")]
    taken = await _assigned(first, "second")
    assert (await second.find_owner(taken, POLICIES)).name == "second"
    for topic in TOPICS:
        await first.find_owner(topic, POLICIES)
    await first._store.close()
    left = {await tree.get(second.owner_record_path(topic, POLICIES)) for topic in TOPICS} - {None}
    assert len(left) == 1, "what second has taken"
    assert owns(second, taken)


async def test_a_broker_that_drains_gets_nothing_and_passes_on_what_it_was_assigned(tree: SqliteStore) -> None:
    first, second, _ = [await _broker(tree, name) for name in ("first", "second", "third")]
    topic = await _assigned(first, "second")
    await second.store_draining(True)
    owner = await second.find_owner(topic, POLICIES)
    assert owner.name in ("first", "third")
    assert not owns(second, topic)
    new = NamespaceRecord(bundles=64)
    assert {(await second.find_owner(topic, new)).name for topic in TOPICS} == {"first", "third"}
    await second.store_draining(False)
    assert (await second.find_owner(topic, POLICIES)).name == owner.name


async def test_the_only_broker_takes_what_it_is_asked_for_also_when_it_drains(tree: SqliteStore) -> None:
    only = await _broker(tree, "only")
    await only.store_draining(True)
    assert (await only.find_owner(TOPICS[0], POLICIES)).name == "only"


async def test_a_load_that_changed_is_registered_and_an_equal_one_is_not_written(tree: SqliteStore) -> None:
    first = await _broker(tree, "first")
    await first.report_load(42)
    found = {each.name: each for each in await list_brokers(first._store)}["first"]
    assert (found.busy_percent, found.report, found.endpoint) == (42, 1, "first:1")
    revision = await first._store.revision()
    await first.report_load(45)
    assert await first._store.revision() == revision
