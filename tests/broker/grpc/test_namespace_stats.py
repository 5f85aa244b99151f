"""Statistics of all topics of a namespace: requests grow with brokers, not with topics."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.cluster.bundles_core import find_topic_bundle_number
from magnetar.broker.grpc import admin as service
from magnetar.broker.session.administration import Administration
from magnetar.client.admin import AdminClient
from magnetar.client.admin.grpc_transport import GrpcTransport
from magnetar.proto.errors import NamespaceNotFound
from magnetar.proto.names import NamespaceName, TopicName
from magnetar.runtime.clock import SystemClock
from tests.support.cluster import cluster

TOPICS = 60


@pytest.mark.parametrize("group", ["", "all"], ids=["first asked takes it", "shared"])
async def test_statistics_of_a_namespace_are_a_request_to_each_broker(
    tmp_path: Path, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        one, _ = [await running.add_broker(share_group=group) for _ in range(2)]
        calls: list[str] = []
        call = GrpcTransport.call

        async def counted(self: GrpcTransport, operation: Any, arguments: Any, *, at: str = "") -> Any:
            calls.append(operation.name)
            return await call(self, operation, arguments, at=at)

        monkeypatch.setattr(GrpcTransport, "call", counted)
        async with AdminClient(f"magnetar://{one.endpoint}") as admin:
            for number in range(TOPICS):
                await admin.create_topic(f"t{number:03}")
            await admin.create_topic("parts", partitions=3)
            calls.clear()
            found = await admin.namespace_stats("public/default")
            assert sorted(calls) == ["ListTopics", "NamespaceStats", "NamespaceStats"]
            names = [each.name.rpartition("/")[2] for each in found]
            assert names == [*(f"parts-partition-{n}" for n in range(3)), *(f"t{n:03}" for n in range(TOPICS))]
            owners = {each.owner for each in found}
            assert len(owners) == (2 if group else 1), "a bundle is where its share is"
            single = [await admin.topic_stats(each.name) for each in found[:5]]
            assert [(each.name, each.owner) for each in single] == [(each.name, each.owner) for each in found[:5]]
            monkeypatch.setattr(service, "PAGE_BYTES", 0)
            calls.clear()
            again = await admin.namespace_stats("public/default")
            assert [each.name for each in again] == [each.name for each in found]
            assert len(calls) <= 3 + TOPICS // service.STATS_AT_ONCE + 1, "in pages"
            with pytest.raises(NamespaceNotFound):
                await admin.namespace_stats("public/nothing-there")


async def test_the_owners_of_all_bundles_are_asked_for_at_once() -> None:
    bundles, asked, everyone = 8, list[int](), asyncio.Event()
    names = [f"persistent://public/default/t{number}" for number in range(64)]

    async def find_owner(topic: TopicName) -> Any:
        bundle = find_topic_bundle_number(topic, bundles)
        asked.append(bundle)
        if len(asked) == bundles:
            everyone.set()
        await everyone.wait()
        return SimpleNamespace(name="me" if bundle % 2 else "other")

    async def answer(value: Any) -> Any:
        return value

    catalog = SimpleNamespace(
        list_topics=lambda name, partitions: answer(names),
        get_cached_namespace=lambda name: answer(SimpleNamespace(bundles=bundles)),
    )
    world = SimpleNamespace(clock=SystemClock())
    broker: Any = SimpleNamespace(name="me", catalog=catalog, loaded={}, world=world, find_owner=find_owner)
    listed = Administration(broker).list_owned_topics
    async with asyncio.timeout(10):
        found = await listed(NamespaceName("public", "default"), "")
        assert sorted(asked) == list(range(bundles)), "each bundle once"
        assert found == sorted(each for each in names if find_topic_bundle_number(TopicName.parse(each), bundles) % 2)
        assert await listed(NamespaceName("public", "default"), found[9]) == found[10:]
