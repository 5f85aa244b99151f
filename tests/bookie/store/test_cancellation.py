"""What began on the disk ends, although its caller is cancelled; and a stop over it loses nothing.

Everywhere else: the stops of the crash enumeration (tests/crashes/stops.py).
"""

import asyncio
import contextlib
import errno
from collections.abc import Coroutine
from typing import Any

import pytest

from magnetar.bookie.server import Bookie
from magnetar.bookie.store.entrylog.mover import CompactionPolicy
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.disk import DiskOperation, FileFault
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, payload_of
from tests.bookie.stores import NODE, add, fence, open_store, payload, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

EVERYTHING = CompactionPolicy(1.1, 1.1, 0, 1 << 40)


async def cancelled_after(simulation: Simulation, work: Coroutine[Any, Any, None], kind: str, where: str) -> None:
    """Runs the work in the node and cancels it when that operation is done, before its result is told."""
    disk = simulation.node(NODE).disk
    before = disk.record

    async def run() -> None:
        task = asyncio.create_task(work)

        def record(operation: DiskOperation) -> None:
            if operation.kind == kind and where in operation.path:
                disk.record = before
                asyncio.get_running_loop().call_soon(task.cancel)

        disk.record = record
        with pytest.raises(asyncio.CancelledError):
            await task

    await simulation.spawn(NODE, run())


async def check(store: Store, entries: dict[int, int]) -> None:
    store.check()
    for ledger, count in entries.items():
        for entry in range(count):
            found = await store.read_entries(ledger, entry)
            assert found.status is Status.OK, (ledger, entry, found.status)
            assert payload_of(found.entries[0]) == payload(ledger, entry)


async def write(simulation: Simulation, store: Store, ledger: int, entries: int) -> None:
    for entry in range(entries):
        assert await simulation.spawn(NODE, add(store, ledger, entry, payload(ledger, entry))) is Status.OK


@pytest.mark.parametrize(("kind", "where"), [("pwrite", ".log"), ("pwrite", ".lidx"), ("rename", "mark")])
async def test_a_checkpoint_that_began_ends_before_its_caller_hears_of_its_cancellation(
    simulation: Simulation, /, kind: str, where: str
) -> None:
    store = await open_store(simulation)
    await write(simulation, store, 1, 3)
    done = store._checkpoint.counters["checkpoints"]
    await cancelled_after(simulation, store.checkpoint(), kind, where)
    assert store._checkpoint.counters["checkpoints"] == done + 1
    assert store.memtable.flushing is None
    await simulation.spawn(NODE, check(store, {1: 3}))


async def test_a_stop_after_a_cancelled_checkpoint_overwrites_nothing_that_the_mark_names(
    simulation: Simulation, /
) -> None:
    """The mark was durable and memory did not know: the next append to the ledger index began too early."""
    crash, crashed = 1, True
    while crashed:
        simulation.node(NODE).disk.delete_everything()
        store = await open_store(simulation)
        await write(simulation, store, 9, 2)
        assert await simulation.spawn(NODE, fence(store, 5)) is Status.OK
        await cancelled_after(simulation, store.checkpoint(), "rename", "mark")
        await write(simulation, store, 1, 2)
        simulation.crash_at(NODE, crash, power_loss=True)
        crashed = False
        try:
            await simulation.spawn(NODE, store.close())
        except NodeCrashed:
            crashed = True
        simulation.crash(NODE, power_loss=True)
        store = await open_store(simulation)
        await simulation.spawn(NODE, check(store, {9: 2, 1: 2}))
        assert await simulation.spawn(NODE, add(store, 5, 0, b"late")) is Status.FENCED
        simulation.crash(NODE)
        crash += 1
    assert crash > 10


@pytest.mark.parametrize("where", ["mark", ".lidx"])
async def test_a_move_that_is_cancelled_in_its_commit_loses_nothing_also_without_room_for_a_last_checkpoint(
    simulation: Simulation, /, where: str
) -> None:
    disk = simulation.node(NODE).disk
    store = await open_store(simulation)
    for ledger in (1, 2):
        await write(simulation, store, ledger, 3)
        await simulation.spawn(NODE, store.checkpoint())
        await simulation.spawn(NODE, store._checkpoint.run_between_checkpoints(store._log.close))

    async def move() -> None:
        await store.compactor.run_compaction(EVERYTHING, major=True)

    await cancelled_after(simulation, move(), "rename" if where == "mark" else "fdatasync", where)
    await simulation.spawn(NODE, check(store, {1: 3, 2: 3}))
    await write(simulation, store, 3, 1)
    disk.faults = [FileFault("pwrite", "mark", errno.ENOSPC, times=-1)]
    await simulation.spawn(NODE, store.close())
    disk.faults = []
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert store.descriptors.limbo_upto == -1
    await simulation.spawn(NODE, check(store, {1: 3, 2: 3, 3: 1}))


async def test_a_close_ends_although_its_caller_is_cancelled_and_all_callers_wait_for_the_same_end(
    simulation: Simulation, /
) -> None:
    store = await open_store(simulation)
    await write(simulation, store, 1, 3)
    await cancelled_after(simulation, store.close(), "fdatasync", "mark")
    before = simulation.node(NODE).disk.operations
    await simulation.spawn(NODE, store.close())
    assert simulation.node(NODE).disk.operations == before
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert store.counters["replayed_records"] == 0
    await simulation.spawn(NODE, check(store, {1: 3}))


async def test_a_tombstone_that_found_no_room_is_settled_although_a_later_one_did(simulation: Simulation, /) -> None:
    """The data of both may go after it."""
    disk = simulation.node(NODE).disk
    store = await open_store(simulation)
    for ledger in (1, 2, 3):
        await write(simulation, store, ledger, 2)
    await simulation.spawn(NODE, store.checkpoint())
    await simulation.spawn(NODE, store._checkpoint.run_between_checkpoints(store._log.close))
    disk.faults = [FileFault("pwrite", ".jnl", errno.ENOSPC, times=1)]
    assert not await simulation.spawn(NODE, store.delete_ledgers([1]))
    assert await simulation.spawn(NODE, store.delete_ledgers([2, 3]))
    assert (await simulation.spawn(NODE, store.compactor.run_compaction(None))).deleted
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    for ledger in (1, 2, 3):
        assert store.read_lac(ledger).status is Status.NO_SUCH_LEDGER, "its entries are gone, and it is back"


async def stop_over_a_checkpoint(cluster: Cluster, bookie: Bookie, ledger: int, cancel: int, crash: int) -> None:
    """Stops the bookie at that operation of a checkpoint; the power goes at that one of the stop."""
    simulation = cluster.simulation
    stop = asyncio.Event()
    simulation.node(NODE).disk.crash_at_operation(cancel, stop.set)

    async def live() -> None:
        bookie.background.start_supervised("checkpoint", bookie.store.checkpoint)
        await stop.wait()
        bookie.store.keys.record_key_of_metadata(ledger, KEY)
        assert await add(bookie.store, ledger, 0, payload(ledger, 0)) is Status.OK
        simulation.crash_at(NODE, crash, power_loss=True)
        await bookie.close()

    with contextlib.suppress(NodeCrashed):
        await simulation.spawn(NODE, live())
    simulation.crash(NODE, power_loss=True)


@pytest.mark.run_by.with_args(with_cluster)
async def test_a_stop_of_a_bookie_over_its_running_work_loses_nothing_at_any_operation(cluster: Cluster, /) -> None:
    """`Bookie.close` cancels its tasks; one of them makes a checkpoint."""
    for cancel, crash in [(cancel, crash) for cancel in range(1, 24, 2) for crash in range(1, 24, 4)]:
        bookie = await (cluster.restart() if cluster.simulation.is_node_running(NODE) else cluster.start())
        caller, ledger = cluster.caller(bookie), 1000 * cancel + crash
        for entry in range(3):
            assert (await caller.add(ledger, entry, payload(ledger, entry))).status is Status.OK
        await stop_over_a_checkpoint(cluster, bookie, ledger - 1, cancel, crash)
        bookie = await cluster.start()
        await cluster.simulation.spawn(NODE, check(bookie.store, {ledger: 3, ledger - 1: 1}))


async def test_a_checkpoint_that_is_cut_off_with_all_tasks_of_the_loop_is_the_last(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    await write(simulation, store, 1, 2)

    async def cut_off() -> None:
        before = asyncio.all_tasks()
        outer = asyncio.create_task(store.checkpoint())
        for _ in range(3):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - before - {outer}:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        with pytest.raises(AssertionError, match="cut off"):
            await store.checkpoint()
        with pytest.raises(AssertionError, match="cut off"):
            await store._checkpoint.commit(None, [], ())

    await simulation.spawn(NODE, cut_off())
