"""Whose directory it is: the boot matrix of reference §2.7, the lock, newer formats."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from magnetar.bookie import identity
from magnetar.bookie.format.framing import crc32c
from magnetar.bookie.format.peer import Status
from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.bookie.store.store import StoreConfig
from magnetar.metadata import paths, records
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import Busy, InvalidConfiguration, ReadOnly, SessionExpired
from magnetar.runtime.process import real_world
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.stores import DATA, NODE, SMALL


def test_new_bookie_gets_a_uuid_and_keeps_it() -> None:
    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start()
        first = bookie.id
        found = await cluster.metadata.get(paths.cookie(first))
        assert found is not None
        cookie = records.decode(found.value, records.CookieRecord)
        assert (cookie.bookie, cookie.directories) == (first, (f"{NODE}:{DATA}",))
        found = await cluster.metadata.get(paths.bookie(first))
        assert found is not None
        assert records.decode(found.value, records.BookieRecord).endpoint == str(bookie.endpoint)
        assert (await cluster.restart()).id == first
        assert await cluster.metadata.children(paths.COOKIES) == [first]

    with_cluster(main)


def test_closed_bookie_is_no_longer_registered() -> None:
    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start()
        await cluster.simulation.spawn(NODE, bookie.close())
        await cluster.simulation.spawn(NODE, bookie.close())
        assert await cluster.metadata.children(paths.BOOKIES) == []
        bookie = await cluster.start()
        assert await cluster.metadata.children(paths.BOOKIES) == [bookie.id]

    with_cluster(main)


def test_known_bookie_with_an_empty_directory_is_refused_and_comes_back_under_a_new_uuid() -> None:
    async def main(cluster: Cluster) -> None:
        first = (await cluster.start()).id
        cluster.simulation.crash(NODE)
        cluster.simulation.node(NODE).disk.wipe()
        with pytest.raises(InvalidConfiguration, match=f"knows bookie {first} at .* its data is lost"):
            await cluster.start()
        await cluster.metadata.delete(paths.cookie(first))
        assert (await cluster.restart()).id != first

    with_cluster(main)


def test_directory_that_the_metadata_does_not_know_is_refused() -> None:
    async def main(cluster: Cluster) -> None:
        first = (await cluster.start()).id
        await cluster.metadata.delete(paths.cookie(first))
        with pytest.raises(InvalidConfiguration, match="which the metadata does not know"):
            await cluster.restart()

    with_cluster(main)


def test_directory_of_another_cluster_is_refused() -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.start()
        await cluster.metadata.put(paths.CLUSTER, records.encode(records.ClusterRecord(instance="other")))
        with pytest.raises(InvalidConfiguration, match="belongs to a bookie of cluster"):
            await cluster.restart()

    with_cluster(main)


def test_files_without_a_cookie_and_a_damaged_cookie_are_refused() -> None:
    async def main(cluster: Cluster) -> None:
        await cluster.start()
        cluster.simulation.crash(NODE)
        path = f"{DATA}/{identity.COOKIE}"
        cluster.simulation.node(NODE).disk.flip_bit(path, 40)
        with pytest.raises(InvalidConfiguration, match=f"{path}: damaged"):
            await cluster.start()
        cluster.simulation.world(NODE).files.remove(path)
        with pytest.raises(InvalidConfiguration, match="files but no cookie"):
            await cluster.start()

    with_cluster(main)


def test_first_start_that_was_cut_short_is_finished_or_explained() -> None:
    """Wherever the first start dies, the next one serves: nothing was stored yet."""
    for operation in range(1, 40):

        async def main(cluster: Cluster, operation: int = operation) -> None:
            cluster.simulation.world(NODE)
            cluster.simulation.crash_at(NODE, operation, power_loss=True)
            try:
                await cluster.start()
            except Exception:
                cluster.simulation.note("the first start died")
            bookie = await cluster.restart()
            assert await cluster.metadata.children(paths.COOKIES) == [bookie.id]

        with_cluster(main)


def test_newer_format_says_which_and_what_to_do() -> None:
    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start()
        await cluster.simulation.spawn(NODE, bookie.close())
        cluster.simulation.crash(NODE)
        files = cluster.simulation.world(NODE).files
        file = files.open(f"{DATA}/mark")
        head = file.pread(52, 0)
        newer = head[:8] + b"\x00\x02" + head[10:]
        file.pwrite([newer, crc32c(newer).to_bytes(4, "big")], 0)
        with pytest.raises(InvalidConfiguration, match="mark: format version 2; this Magnetar reads up to 1"):
            await cluster.start()

    with_cluster(main)


async def test_two_bookies_on_one_directory_the_second_is_told_what_to_do(tmp_path: Path) -> None:
    world = real_world()
    store = await SqliteStore.open(world, ":memory:")
    config = BookieConfig(data=str(tmp_path / "data"), store=SMALL)
    first = await Bookie.start(world, config, store.session())
    with pytest.raises(Busy, match="is used by another process; stop that process or give another directory"):
        await Bookie.start(world, config, store.session())
    await first.close()
    second = await Bookie.start(world, config, store.session())
    assert second.id == first.id
    await second.close()
    await store.close()


def test_full_disk_at_the_start_says_so_and_loses_nothing() -> None:
    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start()
        assert (await cluster.caller(bookie).add(1, 0, b"kept")).status is Status.OK
        disk = cluster.simulation.node(NODE).disk
        cluster.simulation.crash(NODE, power_loss=True)
        capacity, disk.capacity_bytes = disk.capacity_bytes, disk.used_bytes()
        with pytest.raises(ReadOnly, match="no room for the journal"):
            await cluster.start()
        disk.capacity_bytes = capacity
        caller = cluster.caller(await cluster.restart())
        assert (await caller.read(1, 0))[0].status is Status.OK

    with_cluster(main)


def test_bookie_registers_again_after_its_session_was_lost() -> None:
    async def main(cluster: Cluster) -> None:
        store = cluster.sqlite
        sessions = [store.session(timeout_s=2.0), store.session(timeout_s=2.0)]
        made = iter(sessions)

        async def new_session() -> MetadataStore:
            return next(made)

        world = cluster.simulation.world(NODE)
        first = await new_session()
        bookie = await cluster.simulation.spawn(NODE, Bookie.start(world, cluster.config, first, new_session))
        store.abandon_session(first.session_id)
        await asyncio.sleep(10)
        assert await cluster.metadata.children(paths.BOOKIES) == [bookie.id]
        with pytest.raises(SessionExpired):
            await first.get(paths.CLUSTER)
        assert (await cluster.caller(bookie).add(1, 0, b"x")).status is Status.OK
        await cluster.simulation.spawn(NODE, bookie.close())
        assert await cluster.metadata.children(paths.BOOKIES) == []

    with_cluster(main)


def test_contradicting_settings_are_refused_at_once() -> None:
    for wrong in ({"journal_first_segment_bytes": 1 << 30}, {"memtable_bytes": 1 << 30}):
        with pytest.raises(InvalidConfiguration):
            StoreConfig(**wrong)
    with pytest.raises(InvalidConfiguration, match="data directory"):
        BookieConfig(data="")
    with pytest.raises(InvalidConfiguration, match="entry_bytes_max"):
        BookieConfig(data="d", entry_bytes_max=1 << 30)
