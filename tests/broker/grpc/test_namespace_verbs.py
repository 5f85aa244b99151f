"""Verbs of a whole namespace, over two brokers: unload, clear-backlog, unsubscribe; and two questions about a topic."""

import asyncio
from pathlib import Path

import pytest

from magnetar.broker.cluster.bundles_core import find_topic_bundle_name, make_bundle_name
from magnetar.broker.session.administration import Administration
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import InitialPosition
from magnetar.metadata import paths
from magnetar.metadata.records import OwnerRecord
from magnetar.metadata.store import put_record
from magnetar.proto.errors import Busy, InvalidRequest, NamespaceNotFound, TopicNotFound, Unavailable
from magnetar.proto.names import NamespaceName, TopicName
from tests.support.cluster import Cluster, cluster

SPACE = "public/default"


def url_of(running: Cluster, broker: int = 0) -> str:
    return f"magnetar://{running.brokers[broker].endpoint}"


async def test_unloading_a_namespace_gives_its_bundles_up_and_no_message_is_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=2) as running, AdminClient(url_of(running)) as admin:
        one, two = (broker.topic_manager for broker in running.brokers)
        async with aio.Client(url_of(running)) as client:
            await admin.create_topic("many", partitions=4)
            consumer = await client.subscribe("many", "s", initial_position=InitialPosition.Earliest)
            producer = await client.create_producer("many", batching_enabled=False)
            await asyncio.gather(*(producer.send(b"%d" % number) for number in range(40)))
            assert len(one.loaded) == 4
            going = [asyncio.ensure_future(producer.send(b"%d" % number)) for number in range(40, 80)]
            assert (await admin.unload_namespace(SPACE)).topics == 4
            await asyncio.gather(*going)
            found = {(await consumer.receive(20_000)).data() for _ in range(80)}
            assert found == {b"%d" % number for number in range(80)}
        await admin.unload_namespace(SPACE)
        async with AdminClient(url_of(running, 1)) as other:
            await other.topic_stats("many-partition-0")  # who is asked next takes it
            count = (await other.namespace(SPACE)).bundles
            kept = find_topic_bundle_name(TopicName.parse("many-partition-0"), count)
            assert (len(one.loaded), len(two.loaded)) == (0, 1)
            free = next(bundle for number in range(count) if (bundle := make_bundle_name(number, count)) != kept)
            assert (await admin.unload_namespace(SPACE, free)).topics == 0
            assert (await admin.unload_namespace(SPACE, kept)).topics == 1, "of whichever broker has it"
        with pytest.raises(InvalidRequest, match="no bundle 'x'"):
            await admin.unload_namespace(SPACE, "x")
        with pytest.raises(NamespaceNotFound):
            await admin.unload_namespace("public/nowhere")


async def test_a_bundle_that_another_broker_takes_meanwhile_is_unloaded_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = ["a", "b", "c"]
    async with (
        cluster(tmp_path, brokers=2) as running,
        AdminClient(url_of(running)) as admin,
        AdminClient(url_of(running, 1)) as other,
    ):
        one, two = (broker.topic_manager for broker in running.brokers)
        for each in topics:
            await admin.create_topic(each)
            await admin.topic_stats(each)
        bundles = one.owned_object_count
        unload = one.unload_namespace

        async def unload_and_use(name: NamespaceName, bundle: str = "") -> tuple[int, int]:
            done = await unload(name, bundle)
            for each in topics:
                await other.topic_stats(each)  # a client of the other broker, which takes what is free
            return done

        monkeypatch.setattr(one, "unload_namespace", unload_and_use)
        found = await admin.unload_namespace(SPACE)
        assert (found.topics, found.bundles) == (3, bundles)
        assert (len(one.loaded), len(two.loaded)) == (0, 3), "none is unloaded again"


async def test_a_namespace_is_unloaded_although_a_bundle_is_assigned_to_a_broker_that_is_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, AdminClient(url_of(running)) as admin:
        (one,) = (broker.topic_manager for broker in running.brokers)
        await admin.create_topic("a")
        await admin.topic_stats("a")
        count = (await admin.namespace(SPACE)).bundles
        own = find_topic_bundle_name(TopicName.parse("a"), count)
        free = next(bundle for number in range(count) if (bundle := make_bundle_name(number, count)) != own)
        gone = OwnerRecord(broker="gone", endpoint="127.0.0.1:1", assigned_by=one.name)
        await put_record(one.metadata, paths.bundle_owner("public", "default", free), gone)
        assert (await admin.unload_namespace(SPACE)).topics == 1
        assert (await admin.unload_namespace(SPACE, free)).bundles == 0


async def test_a_broker_that_fails_lets_the_others_give_up_their_bundles_before_its_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=2) as running, AdminClient(url_of(running)) as admin:
        one, two = (broker.topic_manager for broker in running.brokers)
        async with AdminClient(url_of(running, 1)) as other:
            await other.create_topic("a")
            await other.topic_stats("a")
            count = (await other.namespace(SPACE)).bundles
        names = (f"n{number}" for number in range(100))
        mine = find_topic_bundle_name(TopicName.parse("a"), count)
        elsewhere = next(each for each in names if find_topic_bundle_name(TopicName.parse(each), count) != mine)
        await admin.create_topic(elsewhere)
        await admin.topic_stats(elsewhere)
        assert (len(one.loaded), len(two.loaded)) == (1, 1)
        unload, failed = two.unload_namespace, asyncio.Event()

        async def fail(name: NamespaceName, bundle: str = "") -> tuple[int, int]:
            failed.set()
            raise Unavailable("not now")

        async def unload_late(name: NamespaceName, bundle: str = "") -> tuple[int, int]:
            await failed.wait()
            for _ in range(100):  # the failure is known to the broker that asks
                await asyncio.sleep(0)
            return await unload(name, bundle)

        monkeypatch.setattr(one, "unload_namespace", fail)
        monkeypatch.setattr(two, "unload_namespace", unload_late)
        with pytest.raises(Unavailable, match="not now"):
            await Administration(one).unload_namespace(NamespaceName.parse(SPACE), here=False)
        assert len(two.loaded) == 0


async def test_backlogs_of_a_namespace_are_cleared_and_a_subscription_goes_from_all_its_topics(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, brokers=2) as running,
        AdminClient(url_of(running)) as admin,
        aio.Client(url_of(running)) as client,
    ):
        topics = ["a", "b-partition-0", "b-partition-1"]
        await admin.create_topic("b", partitions=2)
        for topic in ("a", "b"):
            for name in ("s", "t"):
                await (await client.subscribe(topic, name)).close()
            async with await client.create_producer(topic, batching_enabled=False) as producer:
                for _ in range(6):
                    await producer.send(b"x")
        await admin.create_topic("without")

        async def backlogs(name: str) -> list[int]:
            stats = [await admin.topic_stats(topic) for topic in topics]
            return [each.backlog for found in stats for each in found.subscriptions if each.name == name]

        assert await backlogs("s") == [6, 3, 3]
        assert await admin.clear_namespace_backlog(SPACE, "s") == 3
        assert (await backlogs("s"), await backlogs("t")) == ([0, 0, 0], [6, 3, 3])
        assert await admin.clear_namespace_backlog(SPACE) == 4
        assert await backlogs("t") == [0, 0, 0]
        user = await client.subscribe("a", "t")
        with pytest.raises(Busy, match="2 topics are done and 1 are not, the first persistent://public/default/a:"):
            await admin.unsubscribe_namespace(SPACE, "t")
        assert await backlogs("t") == [0]
        assert await admin.unsubscribe_namespace(SPACE, "t", force=True) == 1
        assert await backlogs("t") == []
        assert await backlogs("s") == [0, 0, 0]
        await user.close()


async def test_unloading_a_topic_that_is_not_loaded_loads_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, AdminClient(url_of(running)) as admin:
        await admin.create_topic("cold")
        await admin.unload_topic("cold")
        assert running.brokers[0].topic_manager.loaded == {}
        with pytest.raises(TopicNotFound):
            await admin.unload_topic("nowhere")


async def test_a_place_is_found_by_time_and_what_lies_behind_it_is_counted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running, AdminClient(url_of(running)) as admin:
        async with aio.Client(url_of(running)) as client:
            producer = await client.create_producer("t", batching_enabled=False)
            sent = [await producer.send(bytes(1000)) for _ in range(3)]
        assert (await admin.message_id_by_time("t", 0)).position() == sent[0].position()
        assert (await admin.message_id_by_time("t", 1 << 50)).position() > sent[2].position()
        sizes = [await admin.backlog_size("t", place) for place in (MessageId.earliest, *sent, MessageId.latest)]
        assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == sizes[4] == 0
        assert 3000 < sizes[0] < 4000
