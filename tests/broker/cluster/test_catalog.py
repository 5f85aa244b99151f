"""What a user may choose the size of is not bounded by one commit, and a crash in between loses nothing."""

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.cluster.catalog import PARTITIONS_MAX, Catalog
from magnetar.broker.cluster.ownership import Ownership
from magnetar.metadata import paths
from magnetar.metadata.records import BrokerRecord, CursorRecord, NamespaceRecord, encode_record
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import CommitOperation
from magnetar.metadata.tree_core import OPERATIONS_PER_COMMIT_MAX
from magnetar.proto.errors import AlreadyExists, InvalidName, InvalidRequest, TopicNotFound, Unavailable
from magnetar.proto.names import NAME_BYTES_MAX, NamespaceName, TopicName
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.process import make_system_world

SPACE = NamespaceName("public", "default")
T = TopicName.parse("persistent://public/default/t")


class Stopping:
    """A session that fails from a commit on, as that of a process that was killed there. `left`: commits until then."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.left = 1 << 30

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        self.left -= 1
        if self.left < 0:
            raise Unavailable("killed")
        found: list[int] = await self.session.commit(operations)
        return found


@pytest.fixture
async def tree(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    yield store
    await store.close()


async def catalog_of(session: Any) -> Catalog:
    catalog = Catalog(make_system_world(1), session, bundles=4, auto_creation=True)
    await catalog.create_default_namespace()
    return catalog


async def partitions_there(tree: SqliteStore) -> int:
    return len(await tree.new_session().children(paths.topics("public", "default")))


@pytest.mark.parametrize("partitions", [1, 499, 500, 501, OPERATIONS_PER_COMMIT_MAX, PARTITIONS_MAX])
async def test_a_topic_has_as_many_partitions_as_are_documented(tree: SqliteStore, partitions: int) -> None:
    catalog = await catalog_of(tree.new_session())
    await catalog.create_topic(T, partitions)
    assert await catalog.count_partitions(T) == partitions
    assert await partitions_there(tree) == partitions
    with pytest.raises(AlreadyExists):
        await catalog.create_topic(T, partitions)


async def test_one_more_is_refused_before_anything_is_made(tree: SqliteStore) -> None:
    catalog = await catalog_of(tree.new_session())
    with pytest.raises(InvalidRequest):
        await catalog.create_topic(T, PARTITIONS_MAX + 1)
    assert await partitions_there(tree) == 0


@pytest.mark.parametrize("scheme", ["persistent", "non-persistent"])
@pytest.mark.parametrize("letter", ["n", "ü"])
async def test_partitions_whose_names_would_be_too_long_are_refused_before_anything_is_made(
    tree: SqliteStore, scheme: str, letter: str
) -> None:
    catalog = await catalog_of(tree.new_session())

    def name_with_room_for(end: str) -> TopicName:
        room = NAME_BYTES_MAX - len(end)
        count, rest = divmod(room, len(letter.encode()))
        return TopicName.parse(f"{scheme}://public/default/{letter * count}{'n' * rest}")

    full = name_with_room_for("")
    with pytest.raises(InvalidName, match=r"has no room for the end -partition-0 .* at most 243"):
        await catalog.create_topic(full, 1)
    assert await partitions_there(tree) == 0
    assert not await catalog.count_partitions(full)
    await catalog.create_topic(full, 0)

    nine = name_with_room_for("-partition-9")
    with pytest.raises(InvalidName, match="-partition-10 "):
        await catalog.create_topic(nine, 11)
    await catalog.create_topic(nine, 9)
    await catalog.add_partitions(nine, 10)
    with pytest.raises(InvalidName, match="-partition-10 "):
        await catalog.add_partitions(nine, 11)
    assert await catalog.count_partitions(nine) == 10
    for number in range(10):
        TopicName.parse(str(nine.with_partition(number)))


async def test_a_topic_that_is_made_by_its_use_has_room_for_its_partitions_in_its_name(tree: SqliteStore) -> None:
    catalog = await catalog_of(tree.new_session())
    full = TopicName.parse(f"persistent://public/default/{'n' * NAME_BYTES_MAX}")
    path, record = paths.namespace("public", "default"), NamespaceRecord(default_partitions=4)
    await tree.new_session().put(path, encode_record(record, path))
    with pytest.raises(InvalidName, match="-partition-3 "):
        await catalog.count_or_create_partitions(full, by_use=True)
    assert await partitions_there(tree) == 0


async def test_a_topic_made_by_half_is_whole_by_the_use_of_its_partitions(tree: SqliteStore) -> None:
    stopping = Stopping(tree.new_session())
    catalog = await catalog_of(stopping)
    stopping.left = 2
    with pytest.raises(Unavailable):
        await catalog.create_topic(T, 2000)
    stopping.left = 1 << 30
    assert await catalog.count_partitions(T) == 2000
    await catalog.ensure_topic_exists(T.with_partition(1999))
    with pytest.raises(TopicNotFound):
        await catalog.ensure_topic_exists(T.with_partition(2000))


@pytest.mark.parametrize("stops_after", range(15))
async def test_added_partitions_have_the_subscriptions_before_they_are_used(
    tree: SqliteStore, stops_after: int
) -> None:
    """Wherever the growth is interrupted: until it is done, no partition of it exists for anybody."""
    stopping = Stopping(tree.new_session())
    catalog = await catalog_of(stopping)
    await catalog.create_topic(T, 4)
    for name in ("a", "b"):
        path = paths.cursor("public", "default", T.with_partition(0).stored_local, name)
        await tree.new_session().put(path, encode_record(CursorRecord(created_ms=1), path))
    stopping.left = stops_after
    try:
        await catalog.add_partitions(T, 2004)
    except Unavailable:
        stopping.left = 1 << 30
        if await catalog.count_partitions(T) == 4:
            with pytest.raises(TopicNotFound):
                await catalog.ensure_topic_exists(T.with_partition(4))
            await catalog.add_partitions(T, 2004)
    assert await catalog.count_partitions(T) == 2004
    await catalog.ensure_topic_exists(T.with_partition(2003))
    for number in (4, 503, 1000, 2003):
        local = T.with_partition(number).stored_local
        assert len(await tree.new_session().children(paths.cursors("public", "default", local))) == 2


@pytest.mark.parametrize("wanted", [8, 700])
async def test_two_that_add_partitions_at_once_meet_no_error_but_their_own(tree: SqliteStore, wanted: int) -> None:
    other = await catalog_of(tree.new_session())
    await other.create_topic(T, 2)

    class Later(Stopping):
        async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
            if growing:
                await other.add_partitions(T, growing.pop())
            return await super().commit(operations)

    growing = list[int]()
    catalog = await catalog_of(Later(tree.new_session()))
    growing.append(6)
    await catalog.add_partitions(T, wanted)
    assert await catalog.count_partitions(T) == wanted
    growing.append(wanted + 2)
    with pytest.raises(InvalidRequest, match="only grows"):
        await catalog.add_partitions(T, wanted + 1)
    assert await catalog.count_partitions(T) == wanted + 2


async def test_a_broker_gives_thousands_of_bundles_back(tree: SqliteStore) -> None:
    broker = Ownership(
        tree.new_session(), BrokerRecord(name="b", endpoint="b:1"), random.Random(1), SystemClock()
    )
    await broker.register_broker()
    policies = NamespaceRecord(bundles=4096)
    owned = set()
    for number in range(3000):
        topic = TopicName.parse(f"persistent://public/default/{number}")
        await broker.find_owner(topic, policies)
        owned.add(broker.owner_record_path(topic, policies))
    assert len(owned) > OPERATIONS_PER_COMMIT_MAX
    await broker.close()
    for path in owned:
        assert await tree.new_session().get(path) is None


async def test_a_namespace_goes_with_the_policies_of_thousands_of_topics(tree: SqliteStore) -> None:
    catalog = await catalog_of(tree.new_session())
    space = NamespaceName("public", "many")
    await catalog.create_namespace(space, NamespaceRecord(bundles=1))
    for number in range(1500):
        await tree.new_session().put(paths.topic_policies("public", "many", f"t{number}"), b"{}")
    await catalog.delete_namespace(space)
    assert await tree.new_session().children(paths.namespace_policies("public", "many")) == []
    assert await tree.new_session().get(paths.namespace("public", "many")) is None


@pytest.mark.parametrize("same", [0, 7])
async def test_the_update_of_a_namespace_keeps_its_bundles_and_refuses_another_number(
    tree: SqliteStore, same: int
) -> None:
    catalog = await catalog_of(tree.new_session())
    space = NamespaceName("public", "seven")
    await catalog.create_namespace(space, NamespaceRecord(bundles=7))
    with pytest.raises(InvalidRequest, match="has 7 bundles, and an update does not make them 8"):
        await catalog.update_namespace(space, NamespaceRecord(bundles=8, default_partitions=3))
    assert (await catalog.get_namespace(space)).default_partitions == 0
    await catalog.update_namespace(space, NamespaceRecord(bundles=same, default_partitions=3))
    found = await catalog.get_namespace(space)
    assert (found.bundles, found.default_partitions) == (7, 3)
