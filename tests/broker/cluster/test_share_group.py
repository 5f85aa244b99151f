"""Brokers of one group share what any of them is asked for; the others of a cluster take what they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.broker.cluster.bundles_core import bundle_number, choose_broker
from magnetar.broker.cluster.ownership import Ownership
from magnetar.metadata.records import BrokerRecord, NamespaceRecord
from magnetar.metadata.sqlite import SqliteStore
from magnetar.proto.names import TopicName
from magnetar.runtime.process import real_world

POLICIES = NamespaceRecord(bundles=4)
TOPICS = [TopicName.parse(f"persistent://public/default/t{number}") for number in range(40)]


def owns(broker: Ownership, topic: TopicName) -> bool:
    return broker.is_owned(broker.owner_path(topic, POLICIES))


@pytest.fixture
async def tree(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(real_world(1), str(tmp_path / "metadata.sqlite"))
    try:
        yield store
    finally:
        await store.close()


async def _broker(tree: SqliteStore, name: str, group: str = "here") -> Ownership:
    made = Ownership(tree.new_session(), BrokerRecord(name=name, endpoint=f"{name}:1", group=group))
    await made.register_broker()
    return made


async def test_one_that_is_asked_for_everything_keeps_its_share_and_names_the_others(tree: SqliteStore) -> None:
    first, second = [await _broker(tree, name) for name in ("first", "second")]
    named = {topic: (await first.find_owner(topic, POLICIES)).name for topic in TOPICS}
    by_bundle = {bundle_number(topic, 4): name for topic, name in named.items()}
    assert Counter(by_bundle.values()) == {"first": 2, "second": 2}
    assert not any(owns(second, topic) for topic in TOPICS), "it is named, and takes what it is asked for"
    for topic, name in named.items():
        assert (await second.find_owner(topic, POLICIES)).name == name, "both say the same"
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
    (theirs, *_) = [topic for topic in TOPICS if (await first.find_owner(topic, POLICIES)).name == "second"]
    assert (await second.find_owner(theirs, POLICIES)).name == "second"
    await second.close()
    assert (await first.find_owner(theirs, POLICIES)).name == "first"


def test_bundles_that_follow_each_other_go_to_different_brokers() -> None:
    brokers = ["b", "c", "a"]
    found = [choose_broker(brokers, "/owners/public/default", number) for number in range(12)]
    assert Counter(found) == {"a": 4, "b": 4, "c": 4}
    assert found == [choose_broker(brokers[::-1], "/owners/public/default", number) for number in range(12)]
    firsts = {choose_broker(brokers, f"/owners/public/n{number}", 0) for number in range(20)}
    assert firsts == set(brokers)
