"""Namespaces choose the brokers that serve them by labels: what is decided, who gets a bundle, and what moves away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.admin import AdminClient
from magnetar.asyncio import Client, Consumer, Producer
from magnetar.broker import server
from magnetar.broker.cluster import policy_cache
from magnetar.broker.cluster.isolation_core import (
    FALLBACK_KEPT_S,
    BrokerIsolation,
    IsolationTracker,
    read_isolation,
)
from magnetar.broker.cluster.ownership import Ownership
from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.node import topic_manager
from magnetar.broker.server import Broker
from magnetar.metadata.records import CLUSTER_FORMAT, BrokerRecord, DamagedRecord, NamespaceRecord
from magnetar.metadata.sqlite import SqliteStore
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.errors import InvalidConfiguration, InvalidRequest, NotAllowed, Unavailable
from magnetar.proto.names import NamespaceName, TopicName
from magnetar.proto.policies import LABELS_MAX, Policies, check_policies, parse_labels
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.process import make_system_world
from tests.broker.node.test_failover import vanish
from tests.support.cluster import Cluster, cluster

NAME = NamespaceName("public", "default")
GOLD, SILVER = ("tier=gold",), ("tier=silver",)


def broker(name: str, *labels: str, **more: Any) -> BrokerRecord:
    return BrokerRecord(name=name, endpoint=f"{name}:1", group="here", labels=labels, format=CLUSTER_FORMAT, **more)


def names(brokers: list[BrokerRecord]) -> list[str]:
    return [each.name for each in brokers]


# ------------------------------------------------------------------------------------------------ what is decided


def test_a_broker_needs_all_labels_and_one_without_labels_serves_no_namespace_that_asks_for_some() -> None:
    both, gold, older = broker("both", "tier=gold", "zone=a"), broker("gold", "tier=gold"), broker("older")
    assert names(BrokerIsolation(("tier=gold", "zone=a")).select_allowed([both, gold, older])) == ["both"]
    assert names(BrokerIsolation(GOLD).select_allowed([both, gold, older])) == ["both", "gold"]
    assert BrokerIsolation(GOLD).select_allowed([older]) == []
    assert read_isolation(AppliedPolicies()) is None
    assert read_isolation(AppliedPolicies(primary_broker_labels=GOLD)) == BrokerIsolation(GOLD)


def test_fallback_brokers_get_bundles_only_while_fewer_primary_brokers_than_asked_for_are_available() -> None:
    one, two, silver, none = broker("one", *GOLD), broker("two", *GOLD), broker("silver", *SILVER), broker("none")
    isolation = BrokerIsolation(GOLD, SILVER, 2)
    assert names(isolation.select_allowed([one, two, silver, none])) == ["one", "two"]
    assert names(isolation.select_allowed([one, silver, none])) == ["one", "silver"], "both, as Pulsar does"
    assert names(isolation.select_allowed([none, silver])) == ["silver"]
    assert isolation.select_allowed([none]) == []
    assert names(BrokerIsolation(GOLD, ("*",)).select_allowed([none, silver])) == ["none", "silver"]


def test_a_bundle_leaves_a_forbidden_broker_at_once_and_a_fallback_broker_after_a_time() -> None:
    isolation, gold = BrokerIsolation(GOLD, SILVER), broker("gold", *GOLD)
    owned = {"/b": isolation}
    bronze, silver = broker("bronze", "tier=bronze"), broker("silver", *SILVER)
    tracker = IsolationTracker()
    assert tracker.find_misplaced(owned, bronze, [bronze], 0.0) == [], "there is no other one"
    assert tracker.find_misplaced(owned, bronze, [bronze, gold], 1.0) == ["/b"]
    assert tracker.find_misplaced(owned, bronze, [bronze, silver], 2.0) == ["/b"]
    tracker = IsolationTracker()
    for now_s, misplaced in ((0.0, []), (FALLBACK_KEPT_S - 1.0, []), (FALLBACK_KEPT_S, ["/b"])):
        assert tracker.find_misplaced(owned, silver, [silver, gold], now_s) == misplaced, now_s
    assert IsolationTracker().find_misplaced(owned, gold, [gold, broker("other", *GOLD)], 0.0) == []


def test_bundles_do_not_follow_a_primary_broker_that_comes_and_goes() -> None:
    isolation, gold, silver = BrokerIsolation(GOLD, SILVER), broker("gold", *GOLD), broker("silver", *SILVER)
    tracker, rng, now_s = IsolationTracker(), random.Random(5), 0.0
    for _ in range(200):
        for available in ([silver, gold], [silver]):
            until_s = now_s + rng.uniform(1.0, FALLBACK_KEPT_S - 1.0)
            while now_s < until_s:
                assert tracker.find_misplaced({"/b": isolation}, silver, available, now_s) == []
                now_s += 20.0


@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_registered_only_allowed_brokers_are_chosen_and_what_is_misplaced_has_somewhere_to_go(
    seed: int,
) -> None:
    rng = random.Random(seed)
    labels = ["tier=gold", "tier=silver", "zone=a", "zone=b"]
    for _ in range(200):
        found = [broker(f"b{at}", *rng.sample(labels, rng.randrange(3))) for at in range(rng.randrange(1, 7))]
        isolation = BrokerIsolation(
            tuple(rng.sample(labels, rng.randrange(1, 3))),
            rng.choice([(), ("*",), tuple(rng.sample(labels, 1))]), rng.randrange(1, 4),
        )  # fmt: skip
        allowed, enough = isolation.select_allowed(found), isolation.has_enough_primaries(found)
        assert all(isolation.is_primary(each) or isolation.is_fallback(each) for each in allowed)
        assert not enough or all(map(isolation.is_primary, allowed))
        for me in found:
            tracker = IsolationTracker()
            tracker.find_misplaced({"/b": isolation}, me, found, 0.0)
            misplaced = tracker.find_misplaced({"/b": isolation}, me, found, FALLBACK_KEPT_S)
            assert bool(misplaced) == (bool(allowed) and me not in allowed), (me, isolation, found)


def test_labels_and_policies_that_mean_nothing_are_refused() -> None:
    for wrong in ("gold", "tier=", "=gold", "tier=g=x", "tier=g x", "t" * 65 + "=x", "*"):
        with pytest.raises(InvalidRequest, match="NAME=VALUE"):
            check_policies(Policies(primary_broker_labels=(wrong,)))
        with pytest.raises(InvalidConfiguration, match="NAME=VALUE"):
            BrokerConfig(labels=wrong).validate()
    for wrongs in (("tier=a", "tier=b"), tuple(f"n{at}=x" for at in range(LABELS_MAX + 1))):
        with pytest.raises(InvalidRequest, match="at most 16 labels"):
            check_policies(Policies(primary_broker_labels=wrongs))
    with pytest.raises(InvalidRequest, match="needs primary_broker_labels"):
        check_policies(Policies(fallback_broker_labels=GOLD))
    with pytest.raises(InvalidRequest, match="1 or more"):
        check_policies(Policies(primary_broker_labels=GOLD, primary_brokers_min=0))
    with pytest.raises(InvalidConfiguration, match="needs primary_broker_labels"):
        BrokerConfig(fallback_broker_labels=GOLD).validate()
    assert check_policies(Policies(primary_broker_labels=GOLD, fallback_broker_labels=("*",)))
    assert parse_labels("zone=a, tier=gold") == ("tier=gold", "zone=a")


# ------------------------------------------------------------------------------------------------ who gets a bundle

BUNDLES = NamespaceRecord(bundles=32)
TOPICS = [TopicName.parse(f"persistent://public/default/t{number}") for number in range(40)]


@pytest.fixture
async def tree(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    try:
        yield store
    finally:
        await store.close()


async def owning(tree: SqliteStore, name: str, *labels: str, asks: BrokerIsolation | None, group: str = "") -> (
    Ownership
):
    me = BrokerRecord(name=name, endpoint=f"{name}:1", group=group, labels=labels, format=CLUSTER_FORMAT)

    async def find(namespace: NamespaceName) -> BrokerIsolation | None:
        assert namespace == NAME
        return asks

    made = Ownership(tree.new_session(), me, random.Random(name), SystemClock(), find)
    await made.register_broker()
    return made


@pytest.mark.parametrize("group", ["", "here"])
async def test_whichever_broker_is_asked_an_allowed_one_gets_the_bundle(tree: SqliteStore, group: str) -> None:
    asks = BrokerIsolation(GOLD)
    plain = await owning(tree, "plain", asks=asks, group=group)
    with pytest.raises(Unavailable, match=r"tier=gold, and none of the 1 that may get its bundles has them") as told:
        await plain.find_owner(TOPICS[0], BUNDLES)
    assert told.value.retryable
    assert told.value.fields["labels"] == "tier=gold"
    await owning(tree, "gold", *GOLD, asks=asks, group=group)
    await owning(tree, "silver", *SILVER, asks=asks, group=group)
    assert {(await plain.find_owner(topic, BUNDLES)).name for topic in TOPICS} == {"gold"}
    assert not plain.owner_record_paths


async def test_a_coordinator_of_transactions_goes_to_any_broker(tree: SqliteStore) -> None:
    plain = await owning(tree, "plain", asks=BrokerIsolation(GOLD), group="here")
    path = "/transactions/owners/3"
    assert (await plain.find_owner_by_path(path, "coordinator 3")).name == "plain"
    assert await plain.list_misplaced_bundles() == []


async def test_the_only_allowed_broker_keeps_its_bundles_when_it_drains_and_says_why(tree: SqliteStore) -> None:
    asks = BrokerIsolation(GOLD)
    gold, plain = [await owning(tree, name, *labels, asks=asks, group="here")
                   for name, labels in (("gold", GOLD), ("plain", ()))]  # fmt: skip
    path = gold.owner_record_path(TOPICS[0], BUNDLES)
    assert (await gold.find_owner(TOPICS[0], BUNDLES)).name == "gold"
    await gold.store_draining(True)
    with pytest.raises(Unavailable, match="tier=gold"):
        await gold.choose_next_owner(path, others=True)
    assert (await gold.find_owner(TOPICS[9], BUNDLES)).name == "gold", "as the last one of any group does"
    with pytest.raises(Unavailable, match="tier=gold"):
        await plain.find_owner(TOPICS[20], BUNDLES)


async def test_damaged_policies_of_one_namespace_hide_no_misplaced_bundle_of_another(tree: SqliteStore) -> None:
    async def find(namespace: NamespaceName) -> BrokerIsolation | None:
        if namespace.namespace == "damaged" and is_damaged:
            raise DamagedRecord("nothing is known")
        return BrokerIsolation(GOLD) if is_damaged else None

    is_damaged = False
    me = BrokerRecord(name="plain", endpoint="plain:1", group="here", format=CLUSTER_FORMAT)
    plain = Ownership(tree.new_session(), me, random.Random(1), SystemClock(), find)
    await plain.register_broker()
    for topic in (TOPICS[0], TopicName.parse("persistent://public/damaged/t")):
        await plain.find_owner(topic, BUNDLES)
    is_damaged = True
    assert await plain.list_misplaced_bundles() == []
    await owning(tree, "gold", *GOLD, asks=None, group="here")
    assert await plain.list_misplaced_bundles() == [plain.owner_record_path(TOPICS[0], BUNDLES)]


async def test_a_move_by_hand_to_a_broker_that_the_policy_excludes_is_refused(tree: SqliteStore) -> None:
    asks = BrokerIsolation(GOLD, SILVER)
    gold, silver, plain = [await owning(tree, name, *labels, asks=asks, group="here")
                           for name, labels in (("gold", GOLD), ("silver", SILVER), ("plain", ()))]  # fmt: skip
    await plain.check_may_own(NAME, gold.me)
    for each, has in ((silver, "tier=silver"), (plain, "no labels")):
        with pytest.raises(NotAllowed, match=f"has {has}; namespace public/default asks for brokers with labels tier"):
            await gold.check_may_own(NAME, each.me)
    await gold.close()
    await plain.check_may_own(NAME, silver.me)


# ------------------------------------------------------------------------------------------------ what moves away


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(server, "EVICTION_INTERVAL_S", 0.05)
    async with cluster(tmp_path, brokers=0) as running:
        yield running


async def add(running: Cluster, name: str, labels: str = "", **more: Any) -> Broker:
    return await running.add_broker(name=name, share_group="all", labels=labels, balance="off", **more)


def admin_of(at: Broker) -> AdminClient:
    return AdminClient(f"magnetar://{at.endpoint}")


async def until(is_so: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not (found if isinstance(found := is_so(), bool) else await found):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def has_policy(at: Broker) -> bool:
    """What the broker knows by its watch."""
    return bool((await at.topic_manager.policies.get_applied_namespace_policies(NAME)).primary_broker_labels)


async def send_and_receive(producer: Producer, consumer: Consumer, text: bytes) -> None:
    await producer.send(text)
    message = await consumer.receive()
    assert message.data() == text
    await consumer.acknowledge(message)


async def test_a_policy_that_is_set_on_a_namespace_in_use_moves_it_and_no_client_sees_an_error(
    running: Cluster,
) -> None:
    plain, gold = await add(running, "plain"), await add(running, "gold", "tier=gold,zone=a")
    async with admin_of(plain) as admin, Client(f"magnetar://{plain.endpoint}") as client:
        topics = [f"t{number}" for number in range(12)]
        pairs = [(await client.create_producer(each), await client.subscribe(each, "s")) for each in topics]
        await asyncio.gather(*(send_and_receive(*pair, b"before") for pair in pairs))
        assert plain.topics, "some are at the broker that must not have them later"
        assert {each.name: each.labels for each in await admin.brokers()} == {
            "plain": (), "gold": ("tier=gold", "zone=a"),
        }  # fmt: skip
        await admin.set_namespace_policies("public/default", Policies(primary_broker_labels=("tier=gold",)))
        await until(lambda: len(gold.topics) == 12)
        for text in (b"one", b"two"):
            await asyncio.gather(*(send_and_receive(*pair, text) for pair in pairs))
        assert not plain.topics
        assert not plain.topic_manager._open().ownership.list_owned_bundle_paths(NAME)
        with pytest.raises(NotAllowed, match="has no labels; namespace public/default asks for brokers with labels"):
            await admin.unload_namespace("public/default", destination="plain")
        await admin.remove_namespace_policies("public/default", "primary_broker_labels")

        async def is_known() -> bool:
            return not await has_policy(gold)

        await until(is_known)
        await admin.unload_namespace("public/default", destination="plain")
        await asyncio.gather(*(send_and_receive(*pair, b"anywhere") for pair in pairs))
        assert len(plain.topics) == 12


async def test_clients_wait_while_the_last_allowed_broker_is_gone_and_go_on_when_one_comes(running: Cluster) -> None:
    plain, gold = await add(running, "plain"), await add(running, "gold", "tier=gold")
    async with admin_of(plain) as admin, Client(f"magnetar://{plain.endpoint}") as client:
        await admin.set_namespace_policies("public/default", Policies(primary_broker_labels=("tier=gold",)))
        producer = await client.create_producer("t")
        await producer.send(b"before")
        await vanish(running, gold)
        sending = asyncio.create_task(producer.send(b"after"))

        async def is_unavailable() -> bool:
            try:
                await plain.topic_manager.find_owner(TopicName.parse("persistent://public/default/t"))
            except Unavailable as error:
                return "labels tier=gold" in error.message
            return False

        await until(is_unavailable)
        assert not sending.done()
        assert not plain.topics
        again = await add(running, "again", "tier=gold")
        await sending
        assert again.topics


async def test_a_drain_leaves_bundles_where_they_are_if_no_other_broker_may_have_them_and_says_so(
    running: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    gold, _ = await add(running, "gold", "tier=gold"), await add(running, "plain")
    async with admin_of(gold) as admin, Client(f"magnetar://{gold.endpoint}") as client:
        await admin.set_namespace_policies("public/default", Policies(primary_broker_labels=("tier=gold",)))
        producer = await client.create_producer("t")
        assert await gold.topic_manager.drain_broker() == 1
        assert "is not given away: namespace public/default asks for brokers with labels tier=gold" in caplog.text
        await producer.send(b"served")
        await add(running, "other", "tier=gold")
        assert await gold.topic_manager.drain_broker() == 0
        await producer.send(b"there")


async def test_the_leader_of_the_balance_has_its_turn_first(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await add(running, "plain")
    async with admin_of(plain) as admin, Client(f"magnetar://{plain.endpoint}") as client:
        await (await client.create_producer("t")).send(b"x")
        monkeypatch.setattr(topic_manager.TopicManager, "balance", property(lambda self: "on"))
        await add(running, "gold", "tier=gold")
        await admin.set_namespace_policies("public/default", Policies(primary_broker_labels=("tier=gold",)))
        manager = plain.topic_manager
        await until(lambda: bool(manager._misplaced_since_s))
        assert manager.owned_object_count == 1
        monkeypatch.setattr(topic_manager, "EVICTION_WAIT_S", 0.0)
        await until(lambda: manager.owned_object_count == 0)


async def test_a_policy_is_not_set_before_the_upgrade_is_finished(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await add(running, "plain")
    async with admin_of(plain) as admin:
        monkeypatch.setattr(policy_cache, "may_write_feature", lambda feature: False)
        with pytest.raises(NotAllowed, match="finish-upgrade"):
            await admin.set_namespace_policies("public/default", Policies(primary_broker_labels=("tier=gold",)))
        await admin.set_namespace_policies("public/default", Policies(message_ttl_s=5))
