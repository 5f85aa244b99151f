"""A bookie whose metadata is lost or was made again deletes nothing that the new tree merely lacks."""

import asyncio

import pytest

from magnetar.bookie.holdings import read_holdings
from magnetar.bookie.maintenance.garbage import GarbageRefusal
from magnetar.bookie.server import Bookie
from magnetar.ledger import client as deletions
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.metadata.rebuild_core import plan_rebuild
from magnetar.metadata.records import CookieRecord, CounterRecord
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import get_record, put_record
from magnetar.proto.errors import InvalidConfiguration
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import a_record
from tests.bookie.maintenance.test_labels import add, make_ledger
from tests.bookie.stores import DATA, NODE

pytestmark = pytest.mark.run_by.with_args(with_cluster)


async def lose_metadata(cluster: Cluster) -> None:
    """Kills the bookie; its metadata is another store, which is empty."""
    cluster.simulation.crash(NODE, power_loss=False)
    store = await cluster.simulation.spawn("meta", SqliteStore.open(cluster.simulation.world("meta"), ":memory:"))
    cluster.metadata = store.new_session()


async def rebuild(cluster: Cluster, *, leave_out: tuple[str, ...] = ()) -> None:
    held = read_holdings(cluster.simulation.world(NODE).files, DATA)
    for path, record in plan_rebuild([held], now_ms=1_800_000_000_000).records:
        if path not in leave_out:
            await put_record(cluster.metadata, path, record)


async def a_bookie_with_ledgers(cluster: Cluster) -> Bookie:
    """Ledger 1 is of a topic, 2 is one that a rebuild leaves out, 3 has no label."""
    bookie = await cluster.start()
    await put_record(cluster.metadata, paths.LEDGER_IDS, CounterRecord(next=50))
    await make_ledger(cluster, bookie, 1, topic="persistent://t/n/a", index="0")
    await make_ledger(cluster, bookie, 2, topic="persistent://t/n/a", compacted="true")
    await cluster.metadata.put(paths.ledger(3), a_record(3, bookie.id))
    for ledger in (1, 2, 3):
        await add(cluster.caller(bookie), ledger)
    await bookie._memory.check_metadata_not_older(cluster.metadata)  # as at the next check of the registration
    return bookie


async def run_passes(cluster: Cluster, bookie: Bookie, force: bool = False) -> None:
    for _ in range(4):
        await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(force=force))
        await asyncio.sleep(1)


async def check_all_is_here(cluster: Cluster, bookie: Bookie) -> None:
    for ledger in (1, 2, 3):
        assert (await cluster.caller(bookie).read(ledger, 0))[0].status is Status.OK, ledger


async def test_an_empty_metadata_starts_no_bookie_and_the_rebuilt_one_starts_it_without_limbo(
    cluster: Cluster, /
) -> None:
    bookie = await a_bookie_with_ledgers(cluster)
    await lose_metadata(cluster)
    with pytest.raises(InvalidConfiguration) as refused:
        await cluster.start()
    assert refused.value.fields["verdict"] == "OTHER_CLUSTER", "a new cluster was begun in the empty metadata"
    await lose_metadata(cluster)
    await rebuild(cluster, leave_out=(paths.cookie(bookie.id),))
    with pytest.raises(InvalidConfiguration) as refused:
        await cluster.start()
    assert refused.value.fields["verdict"] == "UNKNOWN"
    await lose_metadata(cluster)
    await rebuild(cluster)
    bookie = await cluster.start()
    assert bookie.why_not_ready() == []
    found = await get_record(cluster.metadata, paths.cookie(bookie.id), CookieRecord)
    assert found is not None
    assert not found[0].rebuilt, "the next start accepts no other metadata"
    counter = await get_record(cluster.metadata, paths.LEDGER_IDS, CounterRecord)
    assert counter is not None
    assert counter[0].next >= 50, "above all ids that were given out"
    await lose_metadata(cluster)  # and somebody puts another tree in its place, which is not said to be rebuilt
    await put_record(cluster.metadata, paths.CLUSTER, records.ClusterRecord(instance=found[0].instance))
    await put_record(cluster.metadata, paths.cookie(bookie.id), found[0])
    with pytest.raises(InvalidConfiguration, match="older"):
        await cluster.start()


async def test_no_pass_deletes_what_a_rebuilt_tree_lacks_until_an_operator_gives_it_up(cluster: Cluster, /) -> None:
    await a_bookie_with_ledgers(cluster)
    await lose_metadata(cluster)
    await rebuild(cluster)
    assert await cluster.metadata.children(paths.LEDGERS) == [f"{1:020d}"]
    bookie = await cluster.start()
    await run_passes(cluster, bookie)
    await check_all_is_here(cluster, bookie)
    assert bookie.garbage_collector.refusal is GarbageRefusal.UNEXPLAINED
    bookie = await cluster.restart(power_loss=False)
    await run_passes(cluster, bookie)
    await check_all_is_here(cluster, bookie)
    await deletions.delete_ledgers(cluster.metadata, [1])
    await run_passes(cluster, bookie)
    assert (await cluster.caller(bookie).read(1, 0))[0].status is not Status.OK, "deletion works as before"
    assert (await cluster.caller(bookie).read(2, 0))[0].status is Status.OK
    await run_passes(cluster, bookie, force=True)
    assert (await cluster.caller(bookie).read(2, 0))[0].status is not Status.OK


async def test_while_the_rebuilt_tree_is_not_whole_nothing_starts_and_nothing_is_deleted(cluster: Cluster, /) -> None:
    """/cluster is written last: a bookie that starts meanwhile begins another cluster, and refuses its own directory.
    """
    bookie = await a_bookie_with_ledgers(cluster)
    await lose_metadata(cluster)
    await rebuild(cluster, leave_out=(paths.CLUSTER,))
    with pytest.raises(InvalidConfiguration) as refused:
        await cluster.start()
    assert refused.value.fields["verdict"] == "OTHER_CLUSTER"
    held = read_holdings(cluster.simulation.world(NODE).files, DATA)
    assert [each.ledger_id for each in held.ledgers] == [1, 2, 3]
    assert held.bookie == bookie.id
