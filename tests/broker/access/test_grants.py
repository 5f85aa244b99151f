"""Grants that change while clients are connected, at every broker; and what becomes of them when their place goes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.access import authorizer
from magnetar.broker.access import authorizer as module
from magnetar.broker.access.authorizer import AccessGrants
from magnetar.broker.access.table_core import GrantsAndAdministrators
from magnetar.broker.session.backlogs import EntryRangeReader, MessageIndexRange
from magnetar.broker.topic.topic import ProducerRegistry
from magnetar.metadata import paths
from magnetar.metadata.records import GrantsRecord, TenantRecord, encode_record
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import put_record
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import DataLost, Unauthorized, Unavailable
from magnetar.proto.names import NamespaceName, TopicName
from magnetar.runtime.access import Principal, PrincipalKind
from magnetar.runtime.alarm import EventLoopSlices
from magnetar.runtime.process import make_system_world
from tests.broker.access.roles import ROOT, Roles, roles
from tests.support.cut_store import CutStore
from tests.support.steps import stopwatch

NAMESPACE = "acme/orders"
TOPIC = f"persistent://{NAMESPACE}/t"
WITHIN_S = 1.0


@pytest.fixture
async def acme(tmp_path: Path) -> AsyncIterator[Roles]:
    async with roles(tmp_path) as found:
        for role in ("etl", "web"):
            await found.grant(role, "produce", "consume", namespace=NAMESPACE)
        yield found


async def ended(client: Any, kind: str = "receipt") -> float:
    """How long until the broker closes it as unauthorized."""
    with stopwatch() as seconds, pytest.raises(Unauthorized, match=r"it was not granted|takes the roles|named by"):
        await client.next(kind)
    return seconds()


async def test_a_revocation_ends_what_is_open_within_a_second_and_no_other(acme: Roles) -> None:
    producers = {role: await acme.producer(role, TOPIC) for role in ("etl", "web")}
    consumers = {role: await acme.consumer(role, TOPIC, role) for role in ("etl", "web")}
    reader = await acme.consumer("etl", TOPIC, "reader", durable=False)
    waiting = acme.producer("etl", f"{TOPIC}-x")
    await producers["etl"].send(b"before")
    await acme.revoke("etl", namespace=NAMESPACE)
    for gone in (producers["etl"], consumers["etl"], reader):
        kind = "receipt" if gone is producers["etl"] else "seek"
        assert await ended(gone, kind) < WITHIN_S
    with pytest.raises(Unauthorized):
        await waiting
    await producers["web"].send(b"after")
    assert len(await consumers["web"].receive_payloads(2)) == 2
    with pytest.raises(Unauthorized):
        await acme.producer("etl", TOPIC, "again")


async def test_less_ends_what_it_does_not_cover_any_more(acme: Roles) -> None:
    producer, consumer = await acme.producer("etl", TOPIC), await acme.consumer("etl", TOPIC, "own")
    await acme.grant("etl", "produce", namespace=NAMESPACE)
    assert await ended(consumer, "seek") < WITHIN_S
    await producer.send(b"still")


async def test_a_subscriptions_list_ends_those_who_are_not_on_it(acme: Roles) -> None:
    consumer, other = await acme.consumer("etl", TOPIC, "s"), await acme.consumer("etl", TOPIC, "free")
    await acme.list_for("s", "web")
    assert await ended(consumer, "seek") < WITHIN_S
    assert await other.quiet()


async def test_an_administrator_who_leaves_is_disconnected(acme: Roles) -> None:
    producer = await acme.producer("acme-admin", TOPIC)
    await acme.call(ROOT, "Admin.UpdateTenant", wire.TenantSpec(name="acme", admin_roles=["next"]))
    assert await ended(producer) < WITHIN_S
    with pytest.raises(Unauthorized):
        await acme.call("acme-admin", "Admin.DeleteTopic", wire.DeleteRequest(name=TOPIC))
    await acme.producer("next", TOPIC)


async def test_another_broker_ends_them_as_soon(tmp_path: Path) -> None:
    async with roles(tmp_path, brokers=2) as acme:
        await acme.grant("etl", "produce", namespace=NAMESPACE)
        served: set[str] = set()
        opened = []
        for number in range(40):
            topic, acme.broker = f"{TOPIC}-{number}", acme.running.brokers[number % 2]  # the first one asked takes it
            owner = (await acme.call(ROOT, "Broker.Lookup", wire.LookupRequest(topic=topic))).owner
            acme.broker = next(each for each in acme.running.brokers if str(each.endpoint) == owner)
            opened.append(await acme.producer("etl", topic))
            served.add(owner)
            if len(served) == 2:
                break
        assert len(served) == 2, "both brokers serve topics of the namespace"
        acme.broker = acme.running.brokers[0]
        await acme.revoke("etl", namespace=NAMESPACE)
        assert max([await ended(each) for each in opened]) < WITHIN_S


async def test_a_topic_that_is_made_anew_has_no_grants_of_an_earlier_one(acme: Roles) -> None:
    for topic, partitions in ((f"{TOPIC}-single", 0), (f"{TOPIC}-parts", 2)):
        spec = wire.TopicSpec(name=topic, partitions=partitions)
        await acme.call(ROOT, "Admin.CreateTopic", spec)
        await acme.grant("guest", "produce", topic=topic)
        of = f"{topic}-partition-0" if partitions else topic
        await (await acme.producer("guest", of)).close()
        await acme.call(ROOT, "Admin.DeleteTopic", wire.DeleteRequest(name=topic, force=True))
        await acme.call(ROOT, "Admin.CreateTopic", spec)
        with pytest.raises(Unauthorized):
            await acme.producer("guest", of)
    await acme.call(ROOT, "Admin.DeleteNamespace", wire.DeleteRequest(name=NAMESPACE, force=True))
    await acme.call(ROOT, "Admin.CreateNamespace", wire.NamespaceSpec(name=NAMESPACE))
    with pytest.raises(Unauthorized):
        await acme.producer("etl", TOPIC)


async def test_a_grant_that_comes_between_the_question_and_the_opening_is_seen(
    acme: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revoked after the first question, and before the producer is known to its topic."""
    manager = acme.broker.topic_manager
    topic = await manager.load_topic(TopicName.parse(TOPIC))
    inner = ProducerRegistry.join

    async def late(registry: ProducerRegistry, producer: Any) -> None:
        await acme.revoke("etl", namespace=NAMESPACE)
        await asyncio.sleep(0.2)
        await inner(registry, producer)

    monkeypatch.setattr(ProducerRegistry, "join", late)
    with pytest.raises(Unauthorized):
        await acme.producer("etl", TOPIC)
    assert len(topic.producers) == 0


async def test_a_read_of_a_range_that_is_under_way_ends_when_its_role_loses_the_right(acme: Roles) -> None:
    """A client that takes slowly what it asked for holds its read open for as long as it likes."""
    producer = await acme.producer("etl", TOPIC)
    for _ in range(4):
        await producer.send(bytes(700_000))
    caller: Any = SimpleNamespace(principal=Principal("web", PrincipalKind.CLIENT, "test"))
    manager = acme.broker.topic_manager
    reader = EntryRangeReader(manager, MessageIndexRange(TOPIC, 0, 4), caller)
    async with aclosing(reader.read_entries(EventLoopSlices(manager.world.clock))) as entries:
        assert (await anext(entries)).index == 0
        await acme.revoke("web", namespace=NAMESPACE)
        with pytest.raises(Unauthorized):
            [entry async for entry in entries]
    assert reader.next_index < 4


async def test_permissions_are_shown_as_they_are_set(acme: Roles) -> None:
    await acme.call(ROOT, "Admin.CreateTopic", wire.TopicSpec(name=TOPIC))
    await acme.grant("web", "consume", topic=TOPIC)
    await acme.list_for("s", "web", "etl")
    prefix = wire.ChangePermissionsRequest(namespace=NAMESPACE, prefix_mode=True)
    await acme.call("acme-admin", "Admin.ChangePermissions", prefix)
    asked = wire.PermissionsRequest(namespace=NAMESPACE)
    found = await acme.call("acme-admin", "Admin.GetPermissions", asked)
    assert {role: list(each.names) for role, each in found.roles.items()} == {
        "etl": ["produce", "consume"], "web": ["produce", "consume"],
    }
    assert {name: list(each.names) for name, each in found.subscriptions.items()} == {"s": ["web", "etl"]}
    assert found.prefix_mode
    of_topic = await acme.call("acme-admin", "Admin.GetPermissions", wire.PermissionsRequest(topic=TOPIC))
    assert {role: list(each.names) for role, each in of_topic.roles.items()} == {"web": ["consume"]}
    assert not of_topic.subscriptions


# ------------------------------------------------------------------------------------ the cache
class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)


async def test_a_watch_that_stays_broken_denies_after_a_while_and_what_changed_meanwhile_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_RETRY_S", 0.01)
    world, clock, name = make_system_world(1), Clock(), NamespaceName("acme", "orders")
    sqlite = await SqliteStore.open(world, str(tmp_path / "metadata.sqlite"))
    inner = sqlite.new_session()
    store = CutStore(inner)
    await inner.put(paths.tenant("acme"), encode_record(TenantRecord(admin_roles=("a",)), paths.tenant("acme")))
    await put_record(inner, paths.grants("acme", "orders"), GrantsRecord(roles={"r": ("produce",)}))
    changed: list[tuple[str, str]] = []
    grants = AccessGrants(store, clock, lambda *place: changed.append(place))  # type: ignore[arg-type]
    await grants.open()
    try:
        assert await grants.get_grants_and_administrators(name) == GrantsAndAdministrators(
            frozenset({"a"}), {"r": ("produce",)}
        )
        store.cut.set()
        await asyncio.sleep(0.1)
        await inner.put(paths.grants("acme", "orders"), encode_record(GrantsRecord(), paths.grants("acme", "orders")))
        assert (await grants.get_grants_and_administrators(name)).roles == {"r": ("produce",)}, (
            "the last known ones decide"
        )
        clock.now += module.STALE_GRANTS_S_MAX + 1
        with pytest.raises(Unavailable, match="grants cannot be read"):
            await grants.get_grants_and_administrators(name)
        changed.clear()
        store.cut.clear()
        async with asyncio.timeout(30):
            while ("", "") not in changed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            while (await grants.get_grants_and_administrators(name)).roles:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await inner.put(paths.tenant("acme"), encode_record(TenantRecord(admin_roles=("b",)), paths.tenant("acme")))
        async with asyncio.timeout(30):
            while ("acme", "") not in changed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await grants.get_grants_and_administrators(name)).admins == {"b"}
    finally:
        await grants.close()
        await inner.close()
        await sqlite.close()


async def test_a_watch_that_goes_on_while_nothing_changes_denies_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata fails once more while the watch is set again."""
    monkeypatch.setattr(module, "WATCH_RETRY_S", 0.0)
    sqlite = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    store, clock, name = CutStore(sqlite.new_session()), Clock(), NamespaceName("acme", "orders")
    grants = AccessGrants(store, clock, lambda *_: None)  # type: ignore[arg-type]
    await grants.open()
    try:
        await grants.get_grants_and_administrators(name)
        store.failing["revision"] = 3
        store.break_watches()
        async with asyncio.timeout(30):
            while store.failing["revision"] or grants._broken:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        clock.now += module.STALE_GRANTS_S_MAX + 1
        assert (await grants.get_grants_and_administrators(name)).roles == {}
    finally:
        await grants.close()
        await sqlite.close()


async def test_a_revocation_whose_grants_cannot_be_read_at_once_holds_as_soon_as_they_can(
    acme: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorizer, "GRANTS_RETRY_S", 0.05)
    producer = await acme.producer("etl", TOPIC)
    read, failed = AccessGrants._read, []

    async def fails_twice(grants: AccessGrants, name: NamespaceName) -> GrantsAndAdministrators:
        if len(failed) < 2:
            failed.append(name)
            raise Unavailable("the metadata does not answer")
        return await read(grants, name)

    monkeypatch.setattr(AccessGrants, "_read", fails_twice)
    await acme.revoke("etl", namespace=NAMESPACE)
    assert await ended(producer) < WITHIN_S
    assert len(failed) == 2


async def test_damaged_grants_of_a_namespace_keep_nobody_connected_in_another(acme: Roles) -> None:
    await acme.call(ROOT, "Admin.CreateNamespace", wire.NamespaceSpec(name="acme/damaged"))
    await acme.grant("etl", "produce", namespace="acme/damaged")
    other = await acme.producer("acme-admin", "persistent://acme/damaged/first")
    producer = await acme.producer("acme-admin", TOPIC)
    session, path = acme.running.store.new_session(), paths.grants("acme", "damaged")
    found = await session.get(path)
    assert found is not None
    await session.put(path, b"{")
    with pytest.raises(DataLost, match=r"acme/damaged.*restore the metadata"):
        await acme.producer("etl", "persistent://acme/damaged/first", "p2")
    await acme.call(ROOT, "Admin.UpdateTenant", wire.TenantSpec(name="acme", admin_roles=["next"]))
    assert await ended(producer) < WITHIN_S
    await session.put(path, found.value)
    assert await ended(other) < WITHIN_S, "it is decided when the grants are there again"
    await session.close()


async def test_a_read_that_began_before_a_revocation_decides_nothing_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_system_world(1)
    sqlite = await SqliteStore.open(world, str(tmp_path / "metadata.sqlite"))
    inner = sqlite.new_session()
    grants = AccessGrants(inner, world.clock, lambda *place: None)
    name = NamespaceName("acme", "jobs")
    await grants.change_grants(name, lambda record: replace(record, roles={"etl": ("produce",)}))
    read, told, revoked = AccessGrants._read, asyncio.Event(), asyncio.Event()

    async def slow(grants: AccessGrants, name: NamespaceName) -> GrantsAndAdministrators:
        found = await read(grants, name)
        told.set()
        await revoked.wait()
        return found

    monkeypatch.setattr(AccessGrants, "_read", slow)
    asked = asyncio.create_task(grants.get_grants_and_administrators(name))
    await told.wait()
    await grants.change_grants(name, lambda record: replace(record, roles={}))
    revoked.set()
    assert (await asked).roles == {"etl": ("produce",)}, "who asked before may be answered as it was"
    assert (await grants.get_grants_and_administrators(name)).roles == {}, "who asks after it is not"
    await inner.close()
    await sqlite.close()


async def test_names_that_strangers_ask_for_take_a_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHED_NAMESPACES_MAX", 50)
    world = make_system_world(1)
    sqlite = await SqliteStore.open(world, str(tmp_path / "metadata.sqlite"))
    inner = sqlite.new_session()
    grants = AccessGrants(inner, world.clock, lambda *place: None)
    for number in range(200):
        assert (
            await grants.get_grants_and_administrators(NamespaceName("ghost", f"n{number}"))
            == GrantsAndAdministrators()
        )
    assert len(grants._known) == 50
    await inner.close()
    await sqlite.close()
