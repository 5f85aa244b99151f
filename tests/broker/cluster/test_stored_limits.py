"""Limits of stored bytes of a namespace and a tenant in sum over brokers: at real brokers, with topics that are idle,
bundles that move and are divided, and what is shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from magnetar import ProducerBlockedQuotaExceededException
from magnetar.admin import AdminClient, Policies
from magnetar.asyncio import Client
from magnetar.broker.cluster.bundles_core import make_bundle_name
from magnetar.broker.node import topic_manager
from magnetar.broker.server import Broker
from magnetar.broker.session.sharing import LimitSharer, answer_report
from magnetar.broker.topic.topic import Topic
from magnetar.proto.errors import InvalidRequest, Unavailable
from magnetar.proto.names import TopicName
from magnetar.proto.states import BacklogQuotaState
from magnetar.proto.statistics import StoredBundleBytes
from tests.broker.cluster.test_shared_limits import Shared, name_topic, place, until
from tests.broker.rest.http import V2, serving
from tests.support.cluster import cluster
from tests.support.processes import run_here

BODY = b"x" * 1000
HOLD, REFUSE = BacklogQuotaState.STORAGE_HOLD, BacklogQuotaState.STORAGE_REFUSE


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges follow each other at once, each measures, and brokers make none by themselves."""

    async def never(_: LimitSharer) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(LimitSharer, "run", never)
    monkeypatch.setattr("magnetar.broker.session.storing.MEASURE_INTERVAL_S", 0.0)
    monkeypatch.setattr("magnetar.broker.cluster.stored_core.REPORTS_AWAITED_S", 0.0)
    monkeypatch.setattr("magnetar.broker.cluster.stored_core.RESEND_S", 0.0)


@asynccontextmanager
async def stored(folder: Path, **changes: object) -> AsyncIterator[tuple[Shared, AdminClient, Client]]:
    """Two brokers, each with a topic of acme/a and one of acme/b. `changes`: of the first broker's settings."""
    async with cluster(folder, brokers=0) as running:
        found = Shared(running)
        await found.add("first", **changes)
        await found.add("second")
        url = f"magnetar://{found.brokers['first'].endpoint}"
        async with AdminClient(url) as admin, Client(url) as client:
            await admin.create_tenant("acme")
            for namespace in ("acme/a", "acme/b"):
                await admin.create_namespace(namespace, bundles=2)
                for number, broker in enumerate(found.brokers.values()):
                    await place(admin, namespace, number, str(broker.endpoint))
            try:
                yield found, admin, client
            finally:
                for each in found.sharers.values():
                    await each.storage.close()


async def exchange(found: Shared, rounds: int = 3) -> None:
    """Some exchanges of all brokers, with the reads of lists of ledgers that they start."""
    for _ in range(rounds):
        await found.exchange(1)
        for each in found.sharers.values():
            await each.storage._reads.drain()


async def publish(client: Client, topic: str, messages: int) -> None:
    async with await client.create_producer(topic, batching_enabled=False) as producer:
        for _ in range(messages):
            await producer.send(BODY)


def loaded(broker: Broker, topic: str) -> Topic:
    return broker.topics[topic]


def estimates(found: Shared, place_: str) -> list[int]:
    return [each.topic_manager.sharing.stored.estimate(place_) for each in found.brokers.values()]


def total(found: Shared, namespace: str) -> int:
    return sum(topic.log.shape.size for broker in found.brokers.values() for name, topic in broker.topics.items()
               if f"//{namespace}/" in name)  # fmt: skip


async def limit_namespace(found: Shared, admin: AdminClient, size: int, policy: str = "producer_request_hold") -> None:
    await admin.set_namespace_policies(
        "acme/a", Policies(namespace_storage_bytes=size, namespace_storage_policy=policy)  # type: ignore[arg-type]
    )
    await until(lambda: all(
        topic.applied.namespace_storage_bytes == size for broker in found.brokers.values()
        for name, topic in broker.topics.items() if "//acme/a/" in name
    ))  # fmt: skip


async def test_what_one_broker_stores_holds_the_producers_of_the_other_until_a_topic_is_deleted(tmp_path: Path) -> None:
    async with stored(tmp_path) as (found, admin, client):
        one, other = name_topic("acme/a", 0), name_topic("acme/a", 1)
        await limit_namespace(found, admin, 20_000)
        await publish(client, one, 15)
        await publish(client, other, 3)
        await exchange(found)
        assert estimates(found, "acme/a") == [total(found, "acme/a")] * 2
        topic = loaded(found.brokers["second"], other)
        assert topic.maintenance.quota is None
        await publish(client, one, 4)
        await exchange(found)
        assert topic.maintenance.quota is HOLD
        assert found.brokers["first"].topic_manager.loaded[one].maintenance.quota is HOLD
        assert loaded(found.brokers["second"], name_topic("acme/b", 1)).maintenance.quota is None
        async with await client.create_producer(other, batching_enabled=False) as producer:
            waits = asyncio.create_task(producer.send(BODY))
            await until(lambda: topic.gate._waiting is not None)
            assert not waits.done()
            assert (await admin.topic_stats(other)).quota is HOLD
            await admin.delete_topic(one, force=True)
            await exchange(found)
            assert topic.maintenance.quota is None
            await waits


async def test_a_limit_of_a_tenant_refuses_publishes_in_all_its_namespaces(tmp_path: Path) -> None:
    async with stored(tmp_path) as (found, admin, client):
        given = Policies(tenant_storage_bytes=5_000, tenant_storage_policy="producer_exception")
        await admin.set_tenant_policies("acme", given)
        await until(lambda: all(
            topic.applied.tenant_storage_bytes for broker in found.brokers.values() for topic in broker.topics.values()
        ))  # fmt: skip
        await publish(client, name_topic("acme/a", 0), 3)
        await publish(client, name_topic("acme/b", 1), 3)
        await exchange(found)
        for broker, name in (("first", name_topic("acme/b", 0)), ("second", name_topic("acme/a", 1))):
            assert loaded(found.brokers[broker], name).maintenance.quota is REFUSE
            with pytest.raises(ProducerBlockedQuotaExceededException, match="limit of stored bytes is reached"):
                await client.create_producer(name)
        (row,) = [each for each in (await admin.shared_limits()).limits if each.broker == "second"]
        assert (row.place, row.policy, row.limit, row.throttled) == ("acme", "tenant_storage_bytes", 5_000, 1)
        assert row.wanted > 1 > row.used > 0
        assert "all brokers store" in row.why
        assert "publishes are refused" in row.why
        await admin.remove_tenant_policies("acme", "tenant_storage_bytes", "tenant_storage_policy")
        await until(lambda: not any(
            topic.applied.tenant_storage_bytes for broker in found.brokers.values() for topic in broker.topics.values()
        ))  # fmt: skip
        await exchange(found, 1)
        await publish(client, name_topic("acme/a", 1), 1)


async def test_topics_that_left_memory_and_bundles_without_an_owner_count(tmp_path: Path) -> None:
    async with stored(tmp_path) as (found, admin, client):
        one, other = name_topic("acme/a", 0), name_topic("acme/a", 1)
        await publish(client, one, 9)
        await publish(client, other, 2)
        await found.brokers["first"].topic_manager.unload_topic(TopicName.parse(one))
        size = total(found, "acme/a")
        await limit_namespace(found, admin, 10_000)
        await exchange(found)
        assert one not in found.brokers["first"].topics
        idle = estimates(found, "acme/a")[0] - size
        assert idle > 9 * len(BODY)
        assert loaded(found.brokers["second"], other).maintenance.quota is HOLD
        await found.brokers["first"].topic_manager.unload_namespace(
            TopicName.parse(one).namespace_name, make_bundle_name(0, 2)
        )
        found.brokers["first"].topic_manager.sharing.sums = None  # a leader that knows nothing yet
        await exchange(found)
        assert found.brokers["first"].topic_manager.list_owned_bundles().count(("acme/a", make_bundle_name(0, 2))) == 0
        second = found.brokers["second"].topic_manager.sharing.stored
        assert second.estimate("acme/a") == size + idle
        assert second.is_complete("acme/a")


async def test_a_bundle_that_moves_with_idle_topics_and_one_that_is_divided_count_once(tmp_path: Path) -> None:
    async with stored(tmp_path) as (found, admin, client):
        one, other = name_topic("acme/a", 0), name_topic("acme/a", 1)
        await publish(client, one, 9)
        await publish(client, other, 2)
        await limit_namespace(found, admin, 1_000_000)
        size = total(found, "acme/a")
        await exchange(found)
        second = found.brokers["second"]
        await admin.unload_topic(one)
        await admin.unload_namespace("acme/a", make_bundle_name(0, 2), destination=str(second.endpoint))
        await exchange(found)
        assert one not in second.topics, "nobody asked for it"
        assert second.topic_manager.sharing.stored.estimate("acme/a") == size
        await admin.split_bundles("acme/a", bundles=8)
        await admin.topic_stats(other)
        await exchange(found)
        here = second.topic_manager.sharing.stored
        here.check()
        assert here.estimate("acme/a") == size
        await publish(client, one, 1)
        await exchange(found)
        assert here.estimate("acme/a") == total(found, "acme/a") > size


async def test_isolation_moves_a_bundle_of_topics_that_left_memory_and_they_count_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_manager, "EVICTION_WAIT_S", 0.0)
    async with stored(tmp_path, labels="tier=gold") as (found, admin, client):
        topic = name_topic("acme/a", 1)
        first, second = (each.topic_manager for each in found.brokers.values())
        await publish(client, topic, 9)
        await limit_namespace(found, admin, 1_000_000)
        size = total(found, "acme/a")
        await exchange(found)
        await second.unload_topic(TopicName.parse(topic))
        await exchange(found)
        assert first.sharing.stored.estimate("acme/a") == size
        await admin.set_namespace_policies("acme/a", Policies(primary_broker_labels=("tier=gold",)))
        bundle = "acme/a", make_bundle_name(1, 2)
        while bundle in second.list_owned_bundles():
            await second.evict_misplaced_bundles()
            await asyncio.sleep(0.01)
        await exchange(found)
        assert bundle not in second.list_owned_bundles()
        assert topic not in second.loaded
        assert first.sharing.stored.estimate("acme/a") == size
        await publish(client, topic, 1)
        assert topic in first.loaded
        await exchange(found)
        assert first.sharing.stored.estimate("acme/a") == total(found, "acme/a") > size


async def test_a_broker_alone_counts_what_it_has_not_loaded(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        broker = await running.add_broker(name="only")
        url = f"magnetar://{broker.endpoint}"
        async with AdminClient(url) as admin, Client(url) as client:
            await publish(client, "a", 5)
            await publish(client, "b", 1)
            await broker.topic_manager.unload_topic(TopicName.parse("a"))
            await admin.set_namespace_policies("public/default", Policies(namespace_storage_bytes=4_000))
            topic = broker.topics[TopicName.parse("b").full]
            await until(lambda: topic.applied.namespace_storage_bytes > 0)
            sharer = LimitSharer(broker.topic_manager)
            for _ in range(3):
                sharer._brokers_read_s = float("-inf")
                await sharer.exchange()
                await sharer.storage._reads.drain()
            assert topic.maintenance.quota is HOLD
            assert broker.topic_manager.sharing.stored.is_complete("public/default")
            await sharer.storage.close()


async def test_without_a_leader_a_broker_stops_by_what_it_knows(tmp_path: Path) -> None:
    async with stored(tmp_path) as (found, admin, client):
        one, other = name_topic("acme/a", 0), name_topic("acme/a", 1)
        await limit_namespace(found, admin, 20_000)
        await publish(client, one, 9)
        await exchange(found)
        found.brokers["first"].topic_manager.sharing.grants = None
        await publish(client, other, 15)
        with pytest.raises(Unavailable):
            await found.sharers["second"].exchange()
        assert loaded(found.brokers["second"], other).maintenance.quota is HOLD


async def test_a_report_that_is_none_is_refused(tmp_path: Path) -> None:
    async with stored(tmp_path) as (found, _, _client):
        await exchange(found, 1)
        first, second = (each.topic_manager for each in found.brokers.values())
        row = StoredBundleBytes("acme/a", make_bundle_name(0, 2), 5)
        with pytest.raises(InvalidRequest, match="a bundle that is none"):
            answer_report(first, "third", "run", 1, (), [StoredBundleBytes("acme/a", "0x0_0x1", 5)])
        with pytest.raises(InvalidRequest, match="at most"):
            answer_report(first, "third", "run", 2, (), (), ["acme"] * 1001)
        with pytest.raises(Unavailable):
            answer_report(second, "third", "run", 3, (), [row])
        (answer,) = answer_report(first, "third", "run", 4, (), [row], ["acme/a"]).stored
        assert (answer.bytes, answer.complete) == (5, False)


async def test_the_limits_are_set_on_every_face(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _), AdminClient(url := f"magnetar://{broker.endpoint}") as admin:
        await admin.create_topic("t")
        path = f"{V2}/namespaces/public/default/maxStoragePerNamespace"
        assert (await http.ask("GET", path)).status == 204
        await http.done("POST", path, {"limitSize": 7, "policy": "producer_exception"})
        assert await http.get(path) == {"limitSize": 7, "policy": "producer_exception"}
        assert (await admin.namespace_policies("public/default")).namespace_storage_bytes == 7
        refused = await http.ask("POST", path, {"limitSize": 7, "policy": "consumer_backlog_eviction"})
        assert refused.status == 400
        await http.done("DELETE", path)
        assert (await http.ask("GET", path)).status == 204

        async def run(*words: str) -> str:
            done = await asyncio.to_thread(run_here, *words, MAGNETAR_URL=url)
            assert done.code == 0, done.err
            return done.out

        assert "in sum over brokers" in await run("tenants", "set-max-storage-per-tenant", "public", "-l", "1G")
        shown = json.loads(await run("tenants", "get-max-storage-per-tenant", "public", "-o", "json"))
        assert shown["tenant_storage_bytes"] == 1 << 30
        assert (await http.get(f"{V2}/tenants/public/maxStoragePerTenant"))["limitSize"] == 1 << 30
        await run("tenants", "remove-max-storage-per-tenant", "public")
        for wrong in (
            admin.set_namespace_policies("public/default", Policies(tenant_storage_bytes=1)),
            admin.set_topic_policies("t", Policies(namespace_storage_bytes=1)),
        ):
            with pytest.raises(InvalidRequest):
                await wrong
