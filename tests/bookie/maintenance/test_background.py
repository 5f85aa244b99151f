"""No task of a bookie, of its metadata session or of a ledger client ends without being seen and begun again."""

import asyncio

import pytest

from magnetar.bookie.registration import DiskState
from magnetar.metadata import paths
from magnetar.metadata.records import BookieRecord, DamagedEntriesRecord, decode_record
from magnetar.metadata.remote import RemoteStore
from magnetar.runtime.tasks import STABLE_AFTER_S
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.maintenance.copies import Deployment, with_deployment
from tests.bookie.maintenance.test_repair import newer
from tests.bookie.stores import NODE

NAMES = [
    "bookie-session", "bookie-upkeep", "bookie-gc", "bookie-scrub", "bookie-mend", "bookie-repair",
    "bookie-journal-notes",
]  # fmt: skip
"""Of a bookie that is not in limbo: that task is over."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.run_by(with_deployment, 3)
async def test_a_task_of_a_bookie_that_somebody_kills_begins_again_and_is_counted(
    deployment: Deployment, /, name: str
) -> None:
    bookie = deployment.bookies["b1"]
    kept = next(each for each in bookie.background._kept if each.name == name)
    first = kept._task
    assert first is not None
    first.cancel()
    await asyncio.sleep(5.0)
    assert first.done()
    assert kept._task is not first
    assert kept._task is not None
    assert not kept._task.done()
    assert list(bookie.background.failure_reasons) == [name]
    statistics = bookie.statistics()
    assert (statistics["background_failing"], statistics["background_restarts"]) == (1, 1)
    await asyncio.sleep(STABLE_AFTER_S)
    assert bookie.statistics()["background_failing"] == 0
    ledger = (await deployment.a_ledger(10)).ledger_id
    await deployment.check_whole(ledger)


@pytest.mark.parametrize("fault", ["newer record", "a fault of ours"])
@pytest.mark.run_by.with_args(with_cluster)
async def test_a_disk_that_fills_up_is_seen_whatever_becomes_of_the_reports(cluster: Cluster, /, fault: str) -> None:
    bookie = await cluster.start(upkeep_interval_s=1.0)
    if fault == "newer record":
        path = paths.damaged_copies_of_bookie(7, bookie.id)
        record = DamagedEntriesRecord(ledger_id=7, bookie=bookie.id, ranges=())
        await cluster.metadata.put(path, newer(record, path))
        bookie.store.descriptors.quarantine(7, 1, 2)
    else:

        async def tell(metadata: object) -> None:
            raise KeyError("not foreseen")

        bookie.first.reports.store_quarantine_reports = tell  # type: ignore[method-assign]
    await asyncio.sleep(120.0)
    disk = cluster.simulation.node(NODE).disk
    disk.capacity_bytes = int(disk.used_bytes() / 0.97)
    await asyncio.sleep(5.0)
    assert bookie.disk_monitor.state is DiskState.FULL
    node = await cluster.metadata.get(paths.bookie(bookie.id))
    assert node is not None
    assert decode_record(node.value, BookieRecord, paths.bookie(bookie.id)).read_only
    assert bool(bookie.statistics()["upkeep_failures"]) is (fault != "newer record")
    await bookie.close()


@pytest.mark.run_by(with_deployment, 3)
async def test_a_session_whose_keeper_is_killed_is_lost_and_the_bookie_registers_again(
    deployment: Deployment, /
) -> None:
    bookie = deployment.bookies["b1"]
    session = bookie._registration.metadata
    assert isinstance(session, RemoteStore)
    assert session._keeper is not None
    session._keeper.cancel()
    await asyncio.sleep(20.0)
    assert bookie._registration.metadata is not session
    assert await deployment.metadata.get(paths.bookie(bookie.id)) is not None


@pytest.mark.run_by(with_deployment, 3)
async def test_a_client_that_lost_its_watch_on_bookies_still_hears_of_new_ones(deployment: Deployment, /) -> None:
    client = deployment.client()
    await client.bookies.wait_bookies_listed()
    follower = client.bookies._follower
    assert follower is not None
    assert follower._task is not None
    follower._task.cancel()
    late = await deployment.start("late")
    await asyncio.sleep(5.0)
    assert late.id in client.bookies._available
    await client.bookies.wait_bookies_listed()
    await client.close()


