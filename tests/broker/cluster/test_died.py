"""A broker that has gone without closing in order is shown as died, until it is back or an operator says that it is
gone."""

import asyncio
import random
from pathlib import Path

import pytest

from magnetar.admin import AdminClient
from magnetar.broker import server
from magnetar.broker.cluster import ownership
from magnetar.broker.cluster.ownership import LastReadServerLists, Ownership, RegisteredServers
from magnetar.metadata import paths, records
from magnetar.metadata.records import BrokerRecord, StartedBrokerRecord, encode_record
from magnetar.metadata.session import MetadataResponsiveness
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import NotAllowed, NotFound
from magnetar.runtime.clock import Clock, SystemClock
from tests.broker.node.test_failover import vanish
from tests.metadata.stores import Backend, conformance
from tests.support.cluster import Cluster, cluster


async def _register(store: MetadataStore, name: str, clock: Clock | None = None, endpoint: str = "") -> Ownership:
    me = BrokerRecord(name=name, endpoint=endpoint or f"{name}:1")
    made = Ownership(store, me, random.Random(1), clock or SystemClock())
    await made.register_broker()
    return made


def _members(clock: Clock | None = None) -> LastReadServerLists:
    clock = clock or SystemClock()
    return LastReadServerLists(clock, MetadataResponsiveness(clock))


def _names(found: RegisteredServers) -> tuple[list[str], list[str]]:
    return [each.name for each in found.brokers], [each.broker for each in found.died]


class WallClock(SystemClock):
    """A clock whose time of day a test sets."""

    now_ms = 1_000

    def wall_ms(self) -> int:
        return self.now_ms


@conformance
async def test_who_vanishes_has_died_and_who_closes_has_not(backend: Backend) -> None:
    asked, members = await backend.store(), _members()
    sessions = {name: await backend.store(1.0) for name in ("closes", "dies", "older")}
    brokers = {name: await _register(session, name) for name, session in sessions.items()}
    await asked.delete(paths.started_broker("older"))  # as if its release did not know the record
    assert _names(await members.read_lists(asked)) == (["closes", "dies", "older"], [])
    await brokers["closes"].close()
    await backend.vanish(sessions["dies"])
    await backend.vanish(sessions["older"])
    async with asyncio.timeout(20):
        while (found := await members.read_lists(asked)).brokers:  # noqa: ASYNC110 - until the sessions end
            await asyncio.sleep(0.1)
    assert _names(found) == ([], ["dies"])
    await _register(await backend.store(), "dies")
    assert _names(await members.read_lists(asked)) == (["dies"], [])


async def test_a_broker_that_died_is_shown_by_everybody_until_it_is_back_or_forgotten(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        one, two, three = [await running.add_broker(name=name) for name in ("one", "two", "three")]
        await three.close()
        await vanish(running, two)
        async with AdminClient(f"magnetar://{one.endpoint}") as admin, asyncio.timeout(20):
            while not (died := (await admin.broker_summaries()).died):  # noqa: ASYNC110 - until its session ends
                await asyncio.sleep(0.05)
            (found,) = died
            assert (found.name, found.endpoint) == ("two", str(two.endpoint))
            assert 0 <= running.world.clock.wall_ms() - found.seen_ms < 20_000
            back = await running.add_broker(name="two")
            assert not (await admin.broker_summaries()).died
            with pytest.raises(NotAllowed, match="is registered"):
                await admin.forget_broker("two")
            with pytest.raises(NotFound, match="no broker 'three' has died"):
                await admin.forget_broker("three")
            await vanish(running, back)
            while not (await admin.broker_summaries()).died:  # noqa: ASYNC110 - until its session ends
                await asyncio.sleep(0.05)
            await admin.forget_broker("two")
            assert not (await admin.broker_summaries()).died
            with pytest.raises(NotFound):
                await admin.forget_broker("two")


async def _until_none_is_registered(running: Cluster) -> None:
    session = running.store.new_session()
    async with asyncio.timeout(20):
        while await session.children(paths.BROKERS):  # noqa: ASYNC110 - until the sessions end
            await asyncio.sleep(0.05)


async def test_that_a_broker_died_is_known_after_a_restart_of_all_of_them(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        for name in ("one", "two"):
            await vanish(running, await running.add_broker(name=name))
        await _until_none_is_registered(running)
        one = await running.add_broker(name="one")
        async with AdminClient(f"magnetar://{one.endpoint}") as admin:
            assert [each.name for each in (await admin.broker_summaries()).died] == ["two"]


async def test_a_broker_without_a_name_is_back_when_one_without_a_name_is_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        dead = await running.add_broker()
        await vanish(running, dead)
        await _until_none_is_registered(running)
        named = await running.add_broker(name="named", listen=dead.endpoint)
        async with AdminClient(f"magnetar://{named.endpoint}") as admin:
            assert [each.name for each in (await admin.broker_summaries()).died] == [dead.topic_manager.name]
        await named.close()
        monkeypatch.setattr(server, "SERVER_LISTS_REFRESH_S", 0.05)
        again = await running.add_broker(listen=dead.endpoint)
        async with AdminClient(f"magnetar://{again.endpoint}") as admin:
            assert not (await admin.broker_summaries()).died
        async with asyncio.timeout(20):
            metadata = again.topic_manager.metadata
            while await metadata.get(paths.started_broker(dead.topic_manager.name)):  # noqa: ASYNC110 - until it is deleted
                await asyncio.sleep(0.05)


@conformance
async def test_when_a_broker_was_last_seen_is_stored_by_who_saw_it(backend: Backend) -> None:
    clock = WallClock()
    asked, dying, members = await backend.store(), await backend.store(1.0), _members(clock)
    await _register(dying, "dies", clock)
    clock.now_ms = 5_000
    await members.read_lists(asked)
    await backend.vanish(dying)
    async with asyncio.timeout(20):
        while (await members.read_lists(asked)).brokers:  # noqa: ASYNC110 - until its session ends
            await asyncio.sleep(0.1)
    clock.now_ms = 90_000
    assert [each.seen_ms for each in (await members.read_lists(asked)).died] == [5_000]
    assert [each.seen_ms for each in (await _members(clock).read_lists(asked)).died] == [1_000], "when it registered"
    await members.update_last_seen_records(asked)
    assert [each.seen_ms for each in (await _members(clock).read_lists(asked)).died] == [5_000]


@conformance
async def test_no_more_than_so_many_records_of_brokers_that_died_are_kept(backend: Backend) -> None:
    asked, members, most = await backend.store(), _members(), 3
    for number in range(5):
        path = paths.started_broker(f"b{number}")
        await asked.put(path, encode_record(StartedBrokerRecord(broker=f"b{number}", seen_ms=number), path))
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(ownership, "DEAD_BROKER_RECORDS_MAX", most)
        await members.update_last_seen_records(asked)
    assert _names(await members.read_lists(asked)) == ([], ["b2", "b3", "b4"]), "those that were seen last"


async def test_before_the_upgrade_is_finished_no_record_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older broker of the same name would not delete it when it closes, and be shown as died for ever."""
    async with cluster(tmp_path, brokers=0) as running:
        session = running.store.new_session()
        monkeypatch.setattr(records._Written, "format", 1)
        await running.add_broker(name="one")
        assert await session.children(paths.STARTED_BROKERS) == []
        monkeypatch.setattr(records._Written, "format", records.CLUSTER_FORMAT)
        await running.add_broker(name="two")
        assert await session.children(paths.STARTED_BROKERS) == ["two"]
