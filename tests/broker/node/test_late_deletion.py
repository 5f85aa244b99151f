"""A deletion that is late: the topic that it ended was deleted by another call and made anew, or taken over."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import magnetar
from magnetar.broker.cluster.catalog import Catalog
from magnetar.broker.log.managed_ledger import TopicFenced
from magnetar.broker.server import Broker
from magnetar.broker.session.administration import Administration
from magnetar.broker.topic.topic import Topic
from magnetar.client.admin import AdminClient
from magnetar.client.client import Client
from magnetar.client.model.settings import InitialPosition
from magnetar.metadata import paths
from magnetar.metadata.records import CursorRecord, TopicRecord
from magnetar.metadata.store import CheckNodeVersion, MetadataStore, get_record, update_record
from magnetar.proto import operations as op
from magnetar.proto.errors import NotOwner, TimedOut, TopicNotFound, Unavailable
from magnetar.proto.names import TopicName
from tests.support.cluster import Cluster, cluster

TOPIC = "persistent://public/default/named"
NAME = TopicName.parse(TOPIC)
PATH = paths.topic("public", "default", "named")
FLIGHT: Any = type("Flight", (magnetar.schema.Record,), {"x": magnetar.schema.Integer(required=True)})


def when_it_has_ended(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]) -> None:
    """Between the end of the topic and the deletion of its records."""
    delete = Topic.delete

    async def ended(topic: Topic, **options: Any) -> list[int]:
        monkeypatch.setattr(Topic, "delete", delete)
        ledgers = await delete(topic, **options)
        await happens()
        return ledgers

    monkeypatch.setattr(Topic, "delete", ended)


def admin_of(running: Cluster) -> AdminClient:
    return AdminClient(f"magnetar://{running.brokers[0].endpoint}")


async def made_with(admin: AdminClient) -> None:
    await admin.create_topic(TOPIC)
    await admin.put_schema(TOPIC, magnetar.schema.AvroSchema(FLIGHT).info())
    await admin.grant_topic_permission(TOPIC, "someone", ["consume"])
    await admin.set_topic_properties(TOPIC, {"of": "this life"})


async def test_what_was_made_anew_meanwhile_stays_with_all_that_is_its(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    url, owned = f"magnetar://{running.brokers[0].endpoint}", running.brokers[0].topic_manager
    async with AdminClient(url) as admin, Client(url) as client:
        await made_with(admin)

        async def anew() -> None:
            """By two other calls, of which one deletes."""
            owned.loaded.pop(NAME.full)  # as at another broker
            await admin.delete_topic(TOPIC, force=True)
            await made_with(admin)
            producer = await client.create_producer(TOPIC, schema=magnetar.schema.AvroSchema(FLIGHT))
            await producer.send(FLIGHT(x=7))
            await client.subscribe(TOPIC, "s", initial_position=InitialPosition.Earliest)

        when_it_has_ended(monkeypatch, anew)
        await owned.delete_topic(NAME, force=True)
        assert await running.store.new_session().get(PATH) is not None
        assert [each.version for each in await admin.schemas(TOPIC)] == [0]
        assert set((await admin.topic_permissions(TOPIC)).roles) == {"someone"}
        assert await admin.topic_properties(TOPIC) == {"of": "this life"}
        await admin.unload_topic(TOPIC)
        reader = await client.create_reader(
            TOPIC, magnetar.MessageId.earliest, schema=magnetar.schema.AvroSchema(FLIGHT)
        )
        assert (await reader.read_next(20_000)).value().x == 7
        assert await admin.subscriptions(TOPIC) == ["s"]


async def test_a_partitioned_topic_that_was_made_anew_meanwhile_stays_with_all_that_is_its(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    broker: Broker = running.brokers[0]
    url = f"magnetar://{broker.endpoint}"
    async with AdminClient(url) as admin, Client(url) as client:

        async def make() -> None:
            await admin.create_topic(TOPIC, partitions=2)
            await admin.put_schema(TOPIC, magnetar.schema.AvroSchema(FLIGHT).info())
            await admin.grant_topic_permission(TOPIC, "someone", ["consume"])

        await make()
        delete, late = Administration._delete_one, iter([True])

        async def deleted(self: Administration, topic: TopicName, **options: Any) -> None:
            """After its last partition another call deletes the topic, and makes it anew."""
            await delete(self, topic, **options)
            if topic.partition == 1 and next(late, False):
                await admin.delete_topic(TOPIC, force=True)
                await make()

        monkeypatch.setattr(Administration, "_delete_one", deleted)
        await admin.delete_topic(TOPIC, force=True)
        assert len(await admin.parts(TOPIC)) == 2
        assert [each.version for each in await admin.schemas(TOPIC)] == [0]
        assert set((await admin.topic_permissions(TOPIC)).roles) == {"someone"}
        producer = await client.create_producer(TOPIC, schema=magnetar.schema.AvroSchema(FLIGHT))
        await producer.send(FLIGHT(x=7))


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_deletion_that_is_repeated_late_hits_no_other_topic_of_the_name(
    tmp_path: Path, partitions: int
) -> None:
    async with cluster(tmp_path, brokers=1) as running, admin_of(running) as admin:
        await admin.create_topic(TOPIC, partitions=partitions)
        meant = await admin._call(op.CHECK_DELETE, topic=TOPIC, force=True)
        assert meant > 0
        await admin._call(op.DELETE_TOPIC, topic=TOPIC, force=True, incarnation=meant)
        await admin.create_topic(TOPIC, partitions=partitions)
        with pytest.raises(TopicNotFound, match="made anew"):
            await admin._call(op.DELETE_TOPIC, topic=TOPIC, force=True, incarnation=meant)
        assert await admin.partitions(TOPIC) == partitions
        await admin.delete_topic(TOPIC)
        assert await admin.topics("public/default") == []


async def test_a_partition_that_was_made_anew_since_it_was_asked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=1) as running, admin_of(running) as admin:
        await admin.create_topic(TOPIC, partitions=2)
        check, late = Administration.check_delete, iter([True])

        async def checked(self: Administration, topic: TopicName, *, force: bool) -> int:
            found = await check(self, topic, force=force)
            if topic.partition == 1 and next(late, False):
                await admin.delete_topic(TOPIC, force=True)
                await admin.create_topic(TOPIC, partitions=2)
            return found

        monkeypatch.setattr(Administration, "check_delete", checked)
        await admin.delete_topic(TOPIC, force=True)
        for number in range(2):
            path = paths.topic("public", "default", f"named-partition-{number}")
            assert await running.store.new_session().get(path) is not None


async def test_what_was_taken_over_meanwhile_is_not_deleted_by_its_former_owner(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    broker: Broker = running.brokers[0]
    url, store = f"magnetar://{broker.endpoint}", running.store.new_session()
    async with AdminClient(url) as admin:
        await made_with(admin)
        when_it_has_ended(monkeypatch, lambda: claimed(store, PATH, TopicRecord))
        with pytest.raises(NotOwner, match="taken over"):
            await broker.topic_manager.delete_topic(NAME, force=True)
        assert await store.get(PATH) is not None
        assert [each.version for each in await admin.schemas(TOPIC)] == [0]
        assert "someone" in (await admin.topic_permissions(TOPIC)).roles
        await admin.delete_topic(TOPIC, force=True)
        assert await store.get(PATH) is None


async def test_what_was_taken_over_after_the_last_look_keeps_its_schemas_and_grants(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    """Each commit of a deletion looks at the record itself."""
    broker: Broker = running.brokers[0]
    url, store = f"magnetar://{broker.endpoint}", running.store.new_session()
    async with AdminClient(url) as admin:
        await made_with(admin)
        still = Catalog.make_topic_unchanged_check

        async def seen(self: Catalog, topic: TopicName, ended: TopicRecord) -> CheckNodeVersion | None:
            found = await still(self, topic, ended)
            await claimed(store, PATH, TopicRecord)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(Catalog, "make_topic_unchanged_check", seen)
            with pytest.raises(NotOwner, match="taken over"):
                await broker.topic_manager.delete_topic(NAME, force=True)
        assert [each.version for each in await admin.schemas(TOPIC)] == [0]
        assert "someone" in (await admin.topic_permissions(TOPIC)).roles


async def test_a_subscription_that_was_taken_over_or_made_anew_is_not_deleted_by_its_former_owner(
    running: Cluster
) -> None:
    broker: Broker = running.brokers[0]
    async with AdminClient(f"magnetar://{broker.endpoint}") as admin:
        await admin.create_topic(TOPIC)
        await admin.create_subscription(TOPIC, "s")
        topic = await broker.topic_manager.load_topic(NAME, create=False)
        store, path = running.store.new_session(), paths.cursor("public", "default", "named", "s")
        await claimed(store, path, CursorRecord)
        stored: Any = topic.subscriptions["s"].store
        with pytest.raises(NotOwner, match="another broker"):
            await stored.delete()
        assert await get_record(store, path, CursorRecord) is not None


async def test_an_owner_that_stood_still_takes_no_subscription_from_the_next_one(running: Cluster) -> None:
    """It has claimed the topic, and opens its cursors when another one acknowledges already."""
    url = f"magnetar://{running.brokers[0].endpoint}"
    async with AdminClient(url) as admin:
        await admin.create_topic(TOPIC)
        await admin.create_subscription(TOPIC, "s")
        await admin.unload_topic(TOPIC)
        topic = await running.brokers[0].topic_manager.load_topic(NAME, create=False)
        store, path = running.store.new_session(), paths.cursor("public", "default", "named", "s")
        before = await get_record(store, path, CursorRecord)
        storage: Any = topic.registry._storage
        with pytest.raises(TopicFenced, match="taken over"):
            await storage._store(topic, "s", "of the former owner").open(topic.log.shape)
        assert await get_record(store, path, CursorRecord) == before


async def claimed(store: MetadataStore, path: str, kind: Any) -> None:
    """By another owner."""
    await update_record(store, path, kind, lambda found: replace(found, claim="of another owner"))


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_deletion_that_comes_to_nothing_leaves_each_message_its_schema(
    monkeypatch: pytest.MonkeyPatch, partitions: int, running: Cluster
) -> None:
    """The metadata fails at its last step: the topic is there, and a number means what it meant."""
    url, store = f"magnetar://{running.brokers[0].endpoint}", running.store.new_session()
    async with AdminClient(url, timeout_s=5) as admin, Client(url) as client:
        await admin.create_topic(TOPIC, partitions=partitions)
        await admin.put_schema(TOPIC, magnetar.schema.AvroSchema(FLIGHT).info())

        async def fails(*_: Any) -> None:
            raise Unavailable("the metadata does not answer")

        with monkeypatch.context() as patched:
            patched.setattr(Catalog, "delete_partitioned_record" if partitions else "delete_topic_record", fails)
            with pytest.raises((Unavailable, TimedOut)):  # as its last attempt ends
                await admin.delete_topic(TOPIC, force=True)
        assert [each.version for each in await admin.schemas(TOPIC)] == [0]
        producer = await client.create_producer(TOPIC, schema=magnetar.schema.AvroSchema(FLIGHT))
        await producer.send(FLIGHT(x=7))
        await producer.close()
        await admin.delete_topic(TOPIC, force=True)
        assert await store.get(paths.schemas("public", "default", "named")) is None
        assert await store.children(paths.schemas("public", "default", "named")) == []
