"""The registry: equal schemas share a number, concurrent ones do not pass each other, and no number is used twice."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from magnetar.broker.cluster.schema_registry import SchemaPolicies, SchemaRegistry
from magnetar.metadata import paths
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import CommitOperation, DeleteNode, MetadataStore
from magnetar.proto.errors import ConnectionLost, IncompatibleSchema, InvalidSchema, NotAllowed, SchemaNotFound
from magnetar.proto.names import TopicName
from magnetar.proto.schema import Compatibility, SchemaInfo, SchemaType
from magnetar.runtime.process import make_system_world

TOPIC = TopicName.parse("acme/shop/orders")
ANY = SchemaPolicies(Compatibility.ALWAYS_COMPATIBLE)
FULL = SchemaPolicies()
CLOSED = SchemaPolicies(auto_update=False)
BYTES = SchemaInfo(type=SchemaType.NONE)
AUTO = SchemaInfo(type=SchemaType.AUTO_CONSUME)


def schema(*names: str, default: bool = True) -> SchemaInfo:
    fields = [{"name": name, "type": "int", **({"default": 0} if default else {})} for name in names]
    text = json.dumps({"type": "record", "name": "R", "fields": fields})
    return SchemaInfo(type=SchemaType.AVRO, data=text.encode())


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(make_system_world(1), ":memory:")
    yield opened
    await opened.close()


@pytest.fixture
def registry(store: SqliteStore) -> SchemaRegistry:
    return SchemaRegistry(make_system_world(2), store.new_session())


async def put(
    registry: SchemaRegistry, info: SchemaInfo, rules: SchemaPolicies = FULL, topic: TopicName = TOPIC
) -> int:
    return await registry.register_schema(topic, info, rules, user="me")


async def test_a_topic_and_its_namesake_that_is_not_persistent_have_schemas_of_their_own(
    registry: SchemaRegistry, store: SqliteStore
) -> None:
    """So a grant on one of them reads and writes nothing of the other."""
    volatile = TopicName.parse("non-persistent://acme/shop/orders")
    await put(registry, schema("secret"))
    with pytest.raises(SchemaNotFound):
        await registry.get_schema(volatile)
    assert await put(registry, schema("x", default=False), topic=volatile) == 0, "nor is it compared with the other's"
    assert await put(registry, schema("y", default=False), ANY, topic=volatile.with_partition(1)) == 1
    assert [each.info for each in await registry.list_versions(TOPIC)] == [schema("secret")]
    await registry.delete_schemas(volatile, force=True)
    assert (await registry.get_schema(TOPIC)).info == schema("secret")
    await put(registry, schema("x"), topic=volatile)
    await registry.delete_namespace_schemas(TOPIC.namespace_name)
    assert not [
        each
        for each in await store.new_session().children(paths.schemas_of_namespace("acme", "shop"))
        if "orders" in each
    ]


async def test_an_equal_schema_has_its_number_and_a_new_one_the_next(registry: SchemaRegistry) -> None:
    assert [await put(registry, schema("a")), await put(registry, schema("a", "b"))] == [0, 1]
    assert await put(registry, schema("a")) == 0, "also when a newer one is there"
    assert await put(registry, schema("a"), CLOSED, TOPIC.with_partition(3)) == 0, "partitions share"
    newest, first = await registry.get_schema(TOPIC), await registry.get_schema(TOPIC, 0)
    assert (newest.version, newest.info, newest.user) == (1, schema("a", "b"), "me")
    assert (first.version, first.info) == (0, schema("a"))
    assert [each.version for each in await registry.list_versions(TOPIC)] == [0, 1]
    assert await registry.find_schema_version(TOPIC, schema("a", "b")) == 1
    for missing in (
        registry.get_schema(TOPIC, 2),
        registry.find_schema_version(TOPIC, schema("x")),
        registry.get_schema(TopicName.parse("a/b/c")),
    ):
        with pytest.raises(SchemaNotFound):
            await missing


async def test_what_does_not_go_with_the_newest_is_refused_and_not_stored(registry: SchemaRegistry) -> None:
    await put(registry, schema("a", default=False))
    with pytest.raises(IncompatibleSchema, match=r"FULL against version 0: .* field `b`: it has no default"):
        await put(registry, schema("b", default=False))
    with pytest.raises(InvalidSchema):
        await put(registry, SchemaInfo(type=SchemaType.AVRO, data=b"{"))
    with pytest.raises(IncompatibleSchema, match="'magnetar schemas upload'"):
        await put(registry, schema("a", "c"), CLOSED)
    assert await registry.register_schema(TOPIC, schema("a", "c"), CLOSED, user="op", by_hand=True) == 1
    assert await registry.why_schema_refused(TOPIC, schema("b", default=False), Compatibility.FULL) is not None
    assert await registry.why_schema_refused(TOPIC, schema("a"), Compatibility.ALWAYS_INCOMPATIBLE) is not None
    assert await registry.why_schema_refused(TOPIC, schema("a", "c"), Compatibility.ALWAYS_INCOMPATIBLE) is None, (
        "it is there"
    )


async def test_producers_without_a_schema_are_refused_only_where_that_is_enforced(registry: SchemaRegistry) -> None:
    enforced = SchemaPolicies(enforced=True)
    assert await registry.register_producer_schema(TOPIC, None, enforced, "me") is None, "the topic has none"
    assert await registry.register_producer_schema(TOPIC, schema("a"), enforced, "me") == 0
    for none in (None, BYTES):
        assert await registry.register_producer_schema(TOPIC, none, FULL, "me") is None
        with pytest.raises(IncompatibleSchema, match="takes no producer without one"):
            await registry.register_producer_schema(TOPIC, none, enforced, "me")


async def test_a_consumers_schema_is_the_first_of_an_idle_topic_and_has_to_read_else(registry: SchemaRegistry) -> None:
    with pytest.raises(IncompatibleSchema, match="in use without a schema"):
        await registry.check_consumer_schema(TOPIC, schema("a"), FULL, "me", idle=False)
    await registry.check_consumer_schema(TOPIC, schema("a"), ANY, "me", idle=False)
    for idle in (True, False):
        for none in (None, AUTO):
            await registry.check_consumer_schema(TOPIC, none, FULL, "me", idle=idle)
    with pytest.raises(SchemaNotFound):
        await registry.get_schema(TOPIC)
    await registry.check_consumer_schema(TOPIC, schema("a", default=False), FULL, "me", idle=True)
    assert (await registry.get_schema(TOPIC)).version == 0
    await registry.check_consumer_schema(
        TOPIC, schema("a", "b"), SchemaPolicies(Compatibility.FULL_TRANSITIVE), "me", idle=False
    )
    assert len(await registry.list_versions(TOPIC)) == 1, "a reader's schema is not stored"
    never = SchemaPolicies(Compatibility.ALWAYS_INCOMPATIBLE)
    await registry.check_consumer_schema(TOPIC, schema("a", default=False), never, "me", idle=False)
    with pytest.raises(IncompatibleSchema, match=r"cannot read version 0: .*field `b`"):
        await registry.check_consumer_schema(TOPIC, schema("a", "b", default=False), FULL, "me", idle=False)
    with pytest.raises(IncompatibleSchema, match="the type is INT32, and not AVRO"):
        await registry.check_consumer_schema(TOPIC, SchemaInfo(type=SchemaType.INT32), FULL, "me", idle=False)


async def test_deleted_ones_count_for_nothing_and_still_decode_until_they_are_forced(registry: SchemaRegistry) -> None:
    assert await registry.delete_schemas(TOPIC, force=False) is None
    for names in ("a", "ab"):
        await put(registry, schema(*names), ANY)
    assert await registry.delete_schemas(TOPIC, force=False) == 1
    with pytest.raises(SchemaNotFound):
        await registry.get_schema(TOPIC)
    assert (await registry.get_schema(TOPIC, 0)).deleted
    assert await put(registry, schema("a")) == 2, "its old number is not used again"
    assert await registry.delete_schemas(TOPIC, force=True) == 2
    for version in (None, 0, 2):
        with pytest.raises(SchemaNotFound):
            await registry.get_schema(TOPIC, version)
    assert await put(registry, schema("z", default=False)) == 3


def ending(session: MetadataStore) -> Callable[[Sequence[CommitOperation]], Awaitable[None]]:
    """The commit that ends a topic."""

    async def commit(also: Sequence[CommitOperation]) -> None:
        await session.commit([DeleteNode("/a-topic"), *also])

    return commit


async def test_schemas_end_with_their_topic_and_leave_nothing(registry: SchemaRegistry, store: SqliteStore) -> None:
    await put(registry, schema("a"))
    await registry.delete_schemas_with_topic(
        TopicName.parse("non-persistent://acme/shop/orders"), ending(store.new_session())
    )
    assert (await registry.get_schema(TOPIC)).version == 0, "the persistent topic has it too"
    await registry.delete_schemas_with_topic(TOPIC, ending(store.new_session()))
    await registry.delete_schemas_with_topic(TOPIC, ending(store.new_session()))
    session = store.new_session()
    assert await session.children(paths.schemas("acme", "shop", "orders")) == []
    assert await session.get(paths.schemas("acme", "shop", "orders")) is None


async def test_a_topic_that_is_made_again_has_none_of_its_former_definitions_at_any_broker(store: SqliteStore) -> None:
    here, there = (SchemaRegistry(make_system_world(number), store.new_session()) for number in range(2))
    await put(here, schema("a"))
    assert (await there.get_schema(TOPIC, 0)).info == schema("a")
    await here.delete_schemas_with_topic(TOPIC, ending(store.new_session()))
    assert await put(here, schema("b")) == 0
    assert (await there.get_schema(TOPIC, 0)).info == schema("b")


async def test_a_version_that_is_registered_while_its_topic_ends_leaves_nothing(store: SqliteStore) -> None:
    session = Late(store.new_session())
    registry = SchemaRegistry(make_system_world(1), session)  # type: ignore[arg-type]
    await put(registry, schema("a"))
    session.first = put(SchemaRegistry(make_system_world(2), store.new_session()), schema("a", "b"))
    await registry.delete_schemas_with_topic(TOPIC, ending(session))
    assert await store.new_session().children(paths.schemas("acme", "shop", "orders")) == []


async def test_a_namespace_takes_its_schemas_along(registry: SchemaRegistry, store: SqliteStore) -> None:
    await put(registry, schema("a"), topic=TopicName.parse("non-persistent://acme/shop/a-b"))
    await put(registry, schema("a"), topic=TopicName.parse("acme/other/orders"))
    await registry.delete_namespace_schemas(TOPIC.namespace_name)
    assert await store.new_session().children(paths.schemas_of_namespace("acme", "shop")) == []
    assert await store.new_session().children(paths.schemas_of_namespace("acme", "other")) == ["orders"]


class Late:
    """A session before whose next commit another thing happens."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self.first: Awaitable[object] | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def commit(self, operations: object) -> object:
        first, self.first = self.first, None
        if first is not None:
            await first
        return await self._store.commit(operations)  # type: ignore[arg-type]


async def test_a_hundred_equal_first_schemas_make_one_version_and_different_ones_meet_each_other(
    store: SqliteStore,
) -> None:
    registries = [SchemaRegistry(make_system_world(number), store.new_session()) for number in range(10)]
    equal = [put(each, schema("a", default=False)) for each in registries for _ in range(10)]
    assert {*await asyncio.gather(*equal)} == {0}
    others = [put(each, schema(f"f{number}", default=False)) for number, each in enumerate(registries)]
    found = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(each, IncompatibleSchema) for each in found)
    added = [put(each, schema("a", f"g{number}"), ANY) for number, each in enumerate(registries)]
    assert sorted(await asyncio.gather(*added)) == list(range(1, 11))


class Losing:
    """A session whose next commits happen, or not, without an answer."""

    def __init__(self, store: MetadataStore, happens: list[bool]) -> None:
        self._store, self._happens = store, happens

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def commit(self, operations: object) -> object:
        if self._happens:
            if self._happens.pop(0):
                await self._store.commit(operations)  # type: ignore[arg-type]
            raise ConnectionLost("no answer")
        return await self._store.commit(operations)  # type: ignore[arg-type]


@pytest.mark.parametrize("happens", [[True], [False], [False, True], [False, False]])
async def test_a_lost_answer_makes_no_second_version(store: SqliteStore, happens: list[bool]) -> None:
    registry = SchemaRegistry(make_system_world(1), Losing(store.new_session(), [*happens]))  # type: ignore[arg-type]
    assert await put(registry, schema("a")) == 0
    assert len(await registry.list_versions(TOPIC)) == 1


async def test_a_topic_has_a_bounded_number_of_versions(
    registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.broker.cluster.schema_registry.SCHEMA_VERSIONS_MAX", 2)
    for names in ("a", "b"):
        await put(registry, schema(names), ANY)
    with pytest.raises(NotAllowed, match="delete them with force"):
        await put(registry, schema("c"), ANY)
    assert await put(registry, schema("a"), ANY) == 0
    await registry.delete_schemas(TOPIC, force=True)
    assert await put(registry, schema("c"), ANY) == 2


async def test_too_much_to_compare_or_to_list_is_refused(
    registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.broker.cluster.schema_registry.COMPARED_BYTES_MAX", 200)
    every = SchemaPolicies(Compatibility.FULL_TRANSITIVE)
    for names in ("a", "ab", "abc"):
        await put(registry, schema(*names), ANY)
    with pytest.raises(NotAllowed, match="not transitive"):
        await put(registry, schema(*"abcd"), every)
    with pytest.raises(NotAllowed, match="by its number"):
        await registry.list_versions(TOPIC)
    assert await put(registry, schema(*"abcd"), FULL) == 3


async def test_a_long_definition_is_compared_in_a_thread(registry: SchemaRegistry) -> None:
    names = [f"field_{number}" for number in range(2000)]
    assert await put(registry, schema(*names)) == 0
    assert await put(registry, schema(*names, "more")) == 1
