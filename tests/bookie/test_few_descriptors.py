"""A bookie that has no free descriptor: it is busy, and not on a full or broken disk."""

import asyncio
import errno

import pytest

from magnetar.bookie.registration import DiskState
from magnetar.bookie.store.headroom import RESERVE_FILE
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.disk import FileFault, SimDisk
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.stores import DATA, NODE, payload
from tests.bookie.test_full_disk import CONFIG, add_until_refused, check, registered_read_only

pytestmark = pytest.mark.run_by.with_args(with_cluster)

NEEDS_ONE = ("open", "create", "list", "sync_directory")
"""The operations that need a free descriptor."""


def starve(disk: SimDisk, error: int) -> None:
    disk.faults += [FileFault(kind, "", error, times=-1) for kind in NEEDS_ONE]


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
async def test_adds_without_a_free_descriptor_are_busy_and_the_disk_is_not_full(
    cluster: Cluster, /, error: int
) -> None:
    """Also for many passes of its upkeep and its checkpoints; and it goes on by itself."""
    disk = cluster.simulation.node(NODE).disk
    bookie = await cluster.start(store=CONFIG)
    caller, acked = cluster.caller(bookie), dict[tuple[int, int], None]()
    assert await add_until_refused(caller, 1, acked, 10) is Status.OK
    starve(disk, error)
    for ledger in range(2, 20):
        assert await add_until_refused(caller, ledger, acked, 1000) is Status.BUSY
        assert bookie.disk_monitor.state is DiskState.WRITABLE
        await asyncio.sleep(30)
    assert await add_until_refused(caller, 1, {}, 1) is Status.BUSY
    assert bookie.disk_monitor.state is DiskState.WRITABLE
    assert not await registered_read_only(cluster, bookie)
    names = "".join(f"/{each}" for each in sorted(disk.find_node(DATA).now))  # type: ignore[union-attr]
    assert f"/{RESERVE_FILE}" in names, "the reserve is there"
    disk.faults.clear()
    await asyncio.sleep(5)
    assert await add_until_refused(caller, 100, acked, 300) is Status.OK
    await check(caller, acked)
    bookie.store.check()


async def test_many_adds_at_once_without_a_free_descriptor_are_busy_at_once(cluster: Cluster, /) -> None:
    """None waits for a checkpoint that cannot be made: its sender would take the silence for a failed bookie."""
    disk = cluster.simulation.node(NODE).disk
    bookie = await cluster.start(store=CONFIG)
    caller = cluster.caller(bookie)
    starve(disk, errno.EMFILE)
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*(caller.add(1, each, payload(1, each, 900)) for each in range(600)))
    assert {each.status for each in answers} == {Status.OK, Status.BUSY}
    disk.faults.clear()
    await asyncio.sleep(5)
    acked = {(1, at): None for at, each in enumerate(answers) if each.status is Status.OK}
    await check(caller, acked)


async def test_a_checkpoint_that_cannot_list_a_folder_is_done_all_the_same(cluster: Cluster, /) -> None:
    """What it no longer needs is removed later."""
    disk = cluster.simulation.node(NODE).disk
    bookie = await cluster.start(store=CONFIG)
    caller, acked = cluster.caller(bookie), dict[tuple[int, int], None]()
    disk.faults.append(FileFault("list", "", errno.EMFILE, times=-1))
    assert await add_until_refused(caller, 1, acked, 300) is Status.OK
    assert bookie.store.statistics()["checkpoints"] > 5
    before = len(disk.find_node(f"{DATA}/journal").now)  # type: ignore[union-attr]
    disk.faults.clear()
    assert await add_until_refused(caller, 2, acked, 200) is Status.OK
    assert len(disk.find_node(f"{DATA}/journal").now) < before  # type: ignore[union-attr]
    await check(caller, acked)
