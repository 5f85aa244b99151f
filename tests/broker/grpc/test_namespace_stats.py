"""Statistics of all topics of a namespace: requests grow with brokers, not with topics."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.asyncio import Client
from magnetar.broker.cluster.bundles_core import find_topic_bundle_number
from magnetar.broker.grpc import admin as service
from magnetar.broker.session.administration import Administration
from magnetar.broker.topic.statistics import TopicStatistics, TrafficRates
from magnetar.cli.admin.stats import (
    COUNT_FIELDS,
    TOPIC_STATS_COLUMNS,
    make_topic_record,
    make_topic_row,
    sum_topic_records,
)
from magnetar.client.admin import AdminClient
from magnetar.client.admin.grpc_transport import GrpcTransport
from magnetar.proto.errors import NamespaceNotFound, Unavailable
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
            monkeypatch.setattr(service, "STATS_PAGE_BYTES", 0)
            calls.clear()
            again = await admin.namespace_stats("public/default")
            assert [each.name for each in again] == [each.name for each in found]
            assert len(calls) <= 3 + TOPICS // service.STATS_REQUESTS_AT_ONCE + 1, "in pages"
            with pytest.raises(NamespaceNotFound):
                await admin.namespace_stats("public/nothing-there")


@pytest.mark.parametrize("group", ["", "all"], ids=["first asked takes it", "shared"])
async def test_brief_statistics_are_those_that_the_whole_ones_have(
    tmp_path: Path, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a broker is older and answers whole ones, and when a broker does not answer."""
    async with cluster(tmp_path, brokers=0) as running:
        one, two = [await running.add_broker(share_group=group) for _ in range(2)]
        url, namespace = f"magnetar://{one.endpoint}", "public/default"
        monkeypatch.setattr(TopicStatistics, "rates", lambda self: TrafficRates(self.messages_in / 2, 1.5, 2.5, 3.5))
        call = GrpcTransport.call
        older, silent, asked = set[str](), set[str](), list[str]()

        async def answered(self: GrpcTransport, operation: Any, arguments: Any, *, at: str = "") -> Any:
            asked.append(operation.name)
            if operation.name == "NamespaceStats":
                if at in silent:
                    raise Unavailable("it does not answer")
                if (at or "first") in older:
                    arguments = {name: value for name, value in arguments.items() if name != "brief"}
            return await call(self, operation, arguments, at=at)

        monkeypatch.setattr(GrpcTransport, "call", answered)
        async with AdminClient(url) as admin, Client(url) as client:
            for number in range(12):
                await admin.create_topic(f"t{number:02}")
            await admin.create_topic("parts", partitions=3)
            parts = await admin.parts("parts")
            for topic, subscription in (
                ("t03", "a"), ("t03", "b"), ("t04", "a"), (parts[1], "of one part"),
                *((part, name) for part in parts for name in ("a", "b")),
            ):  # fmt: skip
                await admin.create_subscription(topic, subscription)
            for topic, count in (("t03", 5), ("t05", 2), ("parts-partition-0", 3), ("parts-partition-1", 4)):
                producer = await client.create_producer(topic)
                for _ in range(count):
                    await producer.send(b"x")
            consumer = await client.subscribe("t03", "b", ack_receipt_enabled=True)
            for _ in range(2):
                await consumer.acknowledge(await consumer.receive())
            await admin.skip_messages("parts-partition-1", "a", 4)

            def table(found: list[Any], row: Callable[[str, list[Any]], dict[str, Any]]) -> list[list[Any]]:
                topics: dict[str, list[Any]] = {}
                for each in found:
                    topics.setdefault(TopicName.parse(each.name).base.full, []).append(each)
                rows = [row(topic, parts) for topic, parts in topics.items()]
                sums = sum_topic_records("all", rows, COUNT_FIELDS)
                return [[each[name] for name in TOPIC_STATS_COLUMNS] for each in (*rows, sums)]

            asked.clear()
            whole = table(await admin.namespace_stats(namespace), partial(make_topic_record, None))
            requests = sorted(asked)
            backlogs = {row[0].rpartition("/")[2]: row[TOPIC_STATS_COLUMNS.index("msgBacklog")] for row in whole[:-1]}
            assert {name: count for name, count in backlogs.items() if count} == {"t03": 5, "parts": 7}
            asked.clear()
            found = await admin.brief_namespace_stats(namespace)
            assert table(found, make_topic_row) == whole
            assert sorted(asked) == requests
            for older_ones in ({"first"}, {str(two.endpoint)}):
                older.clear()
                older.update(older_ones)
                assert await admin.brief_namespace_stats(namespace) == found
            older.clear()
            silent.update({str(one.endpoint), str(two.endpoint)})
            assert await admin.brief_namespace_stats(namespace) == found
            assert ("TopicStats" in asked) == bool(group), "a topic of the broker that does not answer"


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
        get_namespace=lambda name: answer(SimpleNamespace(bundles=bundles)),
    )
    world = SimpleNamespace(clock=SystemClock())
    broker: Any = SimpleNamespace(name="me", catalog=catalog, loaded={}, world=world, find_owner=find_owner)
    listed = Administration(broker).list_owned_topics
    async with asyncio.timeout(10):
        found = await listed(NamespaceName("public", "default"), "")
        assert sorted(asked) == list(range(bundles)), "each bundle once"
        assert found == sorted(each for each in names if find_topic_bundle_number(TopicName.parse(each), bundles) % 2)
        assert await listed(NamespaceName("public", "default"), found[9]) == found[10:]


@pytest.mark.parametrize("older", [False, True])
async def test_a_list_of_topics_is_asked_for_in_pages_also_of_an_older_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    monkeypatch.setattr("magnetar.client.admin.topics.TOPICS_PER_PAGE", 3)
    answers: list[int] = []
    honest = service.AdminService.list_topics

    async def counting(self: Any, request: Any, context: Any) -> list[str]:
        if older:
            request = type(request)(namespace=request.namespace, partitions=request.partitions)
        answers.append(len(found := await honest(self, request, context)))
        return found

    monkeypatch.setattr(service.AdminService, "list_topics", counting)
    async with cluster(tmp_path) as running, AdminClient(f"magnetar://{running.brokers[0].endpoint}") as admin:
        names: list[str] = []
        for number, pages in enumerate(([0], [1], [2], [3, 0], [3, 1], [3, 2], [3, 3, 0])):
            answers.clear()
            assert await admin.topics() == names
            assert answers == ([number] * (2 if number == 3 else 1) if older else pages)
            names.append(f"persistent://public/default/t{number}")
            await admin.create_topic(f"t{number}", partitions=0)
