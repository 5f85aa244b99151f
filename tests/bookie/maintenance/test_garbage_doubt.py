"""Most of the ledgers are gone: deleted by their users, or is it the wrong metadata?"""

from __future__ import annotations

import asyncio

import pytest

from magnetar.bookie.maintenance.garbage import GarbageRefusal
from magnetar.ledger.format.peer import Status
from magnetar.metadata import paths, records
from magnetar.metadata.store import Delete
from magnetar.metadata.update import put_record
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.maintenance.test_garbage import delete, with_ledgers
from tests.bookie.stores import NODE, payload

INTERVALS = {"gc_interval_s": 60.0, "gc_grace_s": 120.0, "gc_doubt_s": 1200.0, "upkeep_interval_s": 1e6}


def test_up_to_half_of_the_ledgers_go_without_an_operator_but_later_and_with_a_warning() -> None:
    async def main(cluster: Cluster) -> None:
        bookie, caller = await with_ledgers(cluster, 30, **INTERVALS)
        await put_record(cluster.metadata, paths.LEDGER_IDS, records.CounterRecord(next=31))
        await delete(cluster, range(1, 16))
        await asyncio.sleep(1100)
        statistics = bookie.statistics()
        assert (statistics["gc_doubtful"], statistics["gc_refused"]) == (15, 0)
        assert (await caller.read(1, 0))[0].status is Status.OK, "an operator has this time"
        await asyncio.sleep(400)
        assert bookie.statistics()["gc_doubtful"] == 0
        for ledger in range(1, 31):
            status = (await caller.read(ledger, 0))[0].status
            assert status is (Status.NO_SUCH_LEDGER if ledger <= 15 else Status.OK)

    with_cluster(main)


@pytest.mark.parametrize(("here", "gone"), [(20, 20), (30, 16), (30, 27)])
def test_a_listing_that_shrank_by_more_than_half_deletes_nothing_also_after_a_day_until_an_operator_says_so(
    here: int, gone: int
) -> None:
    """The metadata handed all the ids out, and nobody knows whether their users deleted them."""

    async def main(cluster: Cluster) -> None:
        bookie, caller = await with_ledgers(cluster, here, **INTERVALS)
        await put_record(cluster.metadata, paths.LEDGER_IDS, records.CounterRecord(next=here + 1))
        await delete(cluster, range(1, gone + 1))
        await asyncio.sleep(90_000)
        assert bookie.statistics()["gc_refused"] == 1
        for ledger in range(1, here + 1):
            assert (await caller.read(ledger, 0))[0].status is Status.OK
        await cluster.simulation.spawn(NODE, bookie.collector.run(force=True))
        await asyncio.sleep(130)
        deleted = await cluster.simulation.spawn(NODE, bookie.collector.run(force=True))
        assert len(deleted.ledgers_deleted) == gone

    with_cluster(main)


@pytest.mark.parametrize("one_by_one", [True, False], ids=["deleted", "the listing shrank"])
def test_most_of_the_ledgers_go_without_an_operator_when_the_tree_saw_each_of_them_deleted(one_by_one: bool) -> None:
    """A topic whose backlog was read at once is trimmed so; a bookie that waited for an operator would fill up."""

    async def main(cluster: Cluster) -> None:
        bookie, caller = await with_ledgers(cluster, 30, **INTERVALS)
        await put_record(cluster.metadata, paths.LEDGER_IDS, records.CounterRecord(next=31))
        await asyncio.sleep(100)  # a pass finds the listing whole
        if one_by_one:
            await delete(cluster, range(1, 28))
        else:
            await cluster.metadata.commit([Delete(paths.ledger(ledger)) for ledger in range(1, 28)])
        await asyncio.sleep(1000)
        assert (await caller.read(1, 0))[0].status is Status.OK, "an operator has this time"
        await asyncio.sleep(90_000)
        assert bookie.statistics()["gc_refused"] == int(not one_by_one)
        for ledger in range(1, 31):
            status = (await caller.read(ledger, 0))[0].status
            assert status is (Status.NO_SUCH_LEDGER if one_by_one and ledger < 28 else Status.OK)

    with_cluster(main)


def test_ids_that_the_metadata_never_handed_out_are_not_deleted() -> None:
    async def main(cluster: Cluster) -> None:
        bookie, caller = await with_ledgers(cluster, 30, gc_interval_s=60.0, gc_doubt_s=0.0, upkeep_interval_s=1e6)
        await put_record(cluster.metadata, paths.LEDGER_IDS, records.CounterRecord(next=20))  # of an older backup
        await delete(cluster, range(17, 31))  # less than half
        await asyncio.sleep(1000)
        assert bookie.collector.refused is GarbageRefusal.TOO_MANY
        assert bookie.statistics()["gc_refused"] == 1
        assert (await caller.read(17, 0))[0].status is Status.OK

    with_cluster(main)


def test_nothing_is_deleted_once_the_metadata_went_back() -> None:
    """It was restored from a backup under the running bookie: ledgers made since are not in it."""

    async def main(cluster: Cluster) -> None:
        bookie, caller = await with_ledgers(cluster, 5, gc_interval_s=60.0, upkeep_interval_s=1.0)
        await asyncio.sleep(5)
        backup = await cluster.metadata.get(paths.cookie(bookie.id))
        assert backup is not None
        assert (await caller.add(5, 1, payload(5, 1))).status is Status.OK
        await asyncio.sleep(5)
        await cluster.metadata.put(paths.cookie(bookie.id), backup.value)
        await delete(cluster, range(5, 6))
        assert (await caller.add(4, 1, payload(4, 1))).status is Status.OK
        await asyncio.sleep(1000)
        assert bookie.collector.refused is GarbageRefusal.WENT_BACK
        assert (await caller.read(5, 0))[0].status is Status.OK
        bookie = await cluster.restart()
        await asyncio.sleep(1000)
        assert (await cluster.caller(bookie).read(5, 0))[0].status is Status.NO_SUCH_LEDGER

    with_cluster(main)
