"""One process serves a bookie's uuid, also when its directory was copied."""

import asyncio
import copy

import pytest
from msgspec.structs import replace

from magnetar.bookie.server import Bookie
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.metadata.store import get_record, put_record
from magnetar.proto.errors import Busy, NewerFormat
from magnetar.runtime.sim.disk import SimFiles
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.stores import NODE

pytestmark = pytest.mark.run_by.with_args(with_cluster)


async def a_copy(cluster: Cluster) -> Bookie:
    """A bookie, and a copy of its directory on another node, at the same place."""
    bookie = await cluster.start(place="here", upkeep_interval_s=1.0)
    assert (await cluster.caller(bookie).add(1, 0, b"x")).status is Status.OK
    await asyncio.sleep(3)
    cluster.simulation.node("copy").disk.root = copy.deepcopy(cluster.simulation.node(NODE).disk.root)
    return bookie


async def start_copy(cluster: Cluster) -> Bookie:
    config = replace(cluster.config, host="copy", port=0)
    start = Bookie.start(cluster.simulation.world("copy"), config, cluster.sqlite.new_session())
    return await cluster.simulation.spawn("copy", start)


async def test_a_second_process_of_a_uuid_is_refused_while_the_first_answers(cluster: Cluster, /) -> None:
    bookie = await a_copy(cluster)
    with pytest.raises(Busy, match="is served already"):
        await start_copy(cluster)
    found = await get_record(cluster.metadata, paths.bookie(bookie.id), records.BookieRecord)
    assert found is not None
    assert found[0].endpoint == str(bookie.endpoint)
    assert (await cluster.caller(bookie).read(1, 0))[0].status is Status.OK


async def test_a_process_that_was_replaced_while_it_was_silent_ends_when_it_finds_out(cluster: Cluster, /) -> None:
    await a_copy(cluster)
    cluster.simulation.wires.partition_nodes(NODE, "copy")
    second = await start_copy(cluster)
    await asyncio.sleep(5)
    assert not cluster.simulation.is_node_running(NODE), "one of them is left"
    cluster.simulation.wires.heal_partition(NODE, "copy")
    found = await get_record(cluster.metadata, paths.bookie(second.id), records.BookieRecord)
    assert found is not None
    assert found[0].endpoint == str(second.endpoint)


async def test_a_bookie_that_registers_after_a_later_format_was_put_in_force_does_not_start(
    cluster: Cluster, /
) -> None:
    """Its session is older than that: the format was another one when it asked."""
    later = records.ClusterRecord(instance="c0ffee", format=records.CLUSTER_FORMAT + 1)
    await put_record(cluster.metadata, paths.CLUSTER, later)
    with pytest.raises(NewerFormat, match="upgrade this process"):
        await cluster.start(place="here")


async def test_the_free_space_that_is_registered_is_a_minute_old_at_most(cluster: Cluster, /) -> None:
    disk = cluster.simulation.node(NODE).disk
    disk.capacity_bytes = 1 << 30
    bookie = await cluster.start(upkeep_interval_s=10.0)

    async def registered() -> records.BookieRecord:
        found = await get_record(cluster.metadata, paths.bookie(bookie.id), records.BookieRecord)
        assert found is not None
        return found[0]

    before = await registered()
    file = SimFiles(disk).open("/ballast", create=True)
    file.allocate(before.total_bytes // 50)
    file.fdatasync()
    SimFiles(disk).sync_directory("/")
    await asyncio.sleep(30)
    assert await registered() == before, "it weighs little in the choice of bookies"
    await asyncio.sleep(41)
    after = await registered()
    assert after.free_bytes <= before.free_bytes - before.total_bytes // 50
    _, revision = await get_record(cluster.metadata, paths.bookie(bookie.id), records.BookieRecord) or (None, 0)
    await asyncio.sleep(300)
    _, later = await get_record(cluster.metadata, paths.bookie(bookie.id), records.BookieRecord) or (None, 1)
    assert later == revision, "nothing new is told once"
