"""What is told of a namespace's topics, by one who follows, drops off and follows again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.broker.cluster.catalog import Catalog
from magnetar.broker.cluster.policy_cache import TopicAdded, TopicListChange, TopicRemoved, TopicsListed, TopicWatcher
from magnetar.broker.log.managed_ledger import topic_path
from magnetar.metadata.records import TopicRecord
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import get_record
from magnetar.proto.errors import NamespaceNotFound
from magnetar.proto.names import NamespaceName, TopicName
from magnetar.runtime.process import make_system_world

SPACE = NamespaceName("public", "default")


async def forget(store: SqliteStore, catalog: Catalog, name: TopicName) -> None:
    found = await get_record(store.new_session(), topic_path(name), TopicRecord)
    assert found is not None
    still = await catalog.make_topic_unchanged_check(name, found[0])
    assert still is not None
    await catalog.delete_topic_record(name, [], still)


def topic(name: str) -> TopicName:
    return TopicName.parse(name)


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[tuple[SqliteStore, Catalog]]:
    world = make_system_world(1)
    store = await SqliteStore.open(world, str(tmp_path / "metadata.sqlite"))
    catalog = Catalog(world, store.new_session(), bundles=4, auto_creation=True)
    await catalog.create_default_namespace()
    yield store, catalog
    await store.close()


class Follower:
    """A client: what it knows of the topics."""

    def __init__(self, store: SqliteStore, catalog: Catalog) -> None:
        self.feed = TopicWatcher(store.new_session(), catalog)
        self.known: set[str] = set()
        self.revision = 0
        self.task: asyncio.Task[None] | None = None
        self.news = asyncio.Event()

    def take(self, told: TopicListChange) -> None:
        if isinstance(told, TopicsListed):
            self.known = set(told.names)
        elif isinstance(told, TopicAdded):
            self.known.add(told.name)
        elif isinstance(told, TopicRemoved):
            self.known.discard(told.name)
        self.revision = max(self.revision, told.revision)
        self.news.set()

    def follow(self) -> None:
        async def run() -> None:
            async for told in self.feed.watch_topics_of_namespace(SPACE, self.revision):
                self.take(told)

        self.task = asyncio.create_task(run())

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def knows(self, *names: str) -> None:
        async with asyncio.timeout(10):
            while self.known != {topic(name).full for name in names}:
                self.news.clear()
                await self.news.wait()


async def test_whoever_follows_drops_off_and_follows_again_knows_all_topics(made: tuple[SqliteStore, Catalog]) -> None:
    store, catalog = made
    await catalog.create_topic(topic("a"), 0)
    follower = Follower(store, catalog)
    follower.follow()
    await follower.knows("a")
    await catalog.create_topic(topic("b"), 3)
    await catalog.create_topic(topic("c"), 0)
    await follower.knows("a", "b", "c")
    await follower.stop()
    await forget(store, catalog, topic("a"))
    await catalog.create_topic(topic("d"), 0)
    for number in range(3):
        await forget(store, catalog, topic("b").with_partition(number))
    ended = await catalog.get_partitioned_record(topic("b"))
    assert ended is not None
    still = await catalog.make_partition_count_check(topic("b"), ended)
    assert still is not None
    await catalog.delete_partitioned_record(topic("b"), still)
    follower.follow()
    await follower.knows("c", "d")
    await forget(store, catalog, topic("c"))
    await catalog.create_topic(topic("c"), 2)
    await catalog.create_topic(topic("e"), 0)
    await follower.knows("c", "d", "e")
    await follower.stop()


async def test_a_namespace_that_does_not_exist_is_told(made: tuple[SqliteStore, Catalog]) -> None:
    store, catalog = made
    with pytest.raises(NamespaceNotFound):
        async for _ in TopicWatcher(store.new_session(), catalog).watch_topics_of_namespace(
            NamespaceName("public", "none")
        ):
            pass
