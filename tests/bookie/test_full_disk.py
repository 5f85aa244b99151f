"""A full disk: nothing acknowledged is lost, recovery goes on, and the bookie comes back by itself (invariant 24)."""

import asyncio

import pytest
from msgspec.structs import replace

from magnetar.bookie.registration import DiskLimits, DiskState, DiskUsage, decide_disk_state
from magnetar.bookie.server import Bookie
from magnetar.bookie.store.entrylog.mover import CompactionPolicy
from magnetar.bookie.store.headroom import RESERVE_FILE
from magnetar.ledger import client as deletions
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.runtime.sim.disk import EMPTY_INODE_BYTES, UNLIMITED_BYTES, SimDisk, SimFiles
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import PeerCaller, a_record, payload_of
from tests.bookie.stores import DATA, NODE, SMALL, add, open_store, payload, simulate

pytestmark = pytest.mark.run_by.with_args(with_cluster)

LIMITS = DiskLimits(0.95, 0.90, 0.90, 1000)
BALLAST = "/ballast"
RESERVE = f"{DATA}/{RESERVE_FILE}"
CONFIG = replace(SMALL, reserve_bytes=512 << 10, log_allocate_bytes=8 << 10)


def usage(used: float) -> DiskUsage:
    return DiskUsage(1_000_000, round(1_000_000 * (1 - used)))


@pytest.mark.parametrize(
    ("used", "was", "no_room", "now"),
    [
        (0.10, DiskState.WRITABLE, False, DiskState.WRITABLE),
        (0.90, DiskState.WRITABLE, False, DiskState.TIGHT),
        (0.949, DiskState.TIGHT, False, DiskState.TIGHT),
        (0.95, DiskState.TIGHT, False, DiskState.FULL),
        (0.92, DiskState.FULL, False, DiskState.FULL),
        (0.90, DiskState.NO_ROOM, False, DiskState.FULL),
        (0.899, DiskState.FULL, False, DiskState.WRITABLE),
        (0.10, DiskState.WRITABLE, True, DiskState.NO_ROOM),
        (0.10, DiskState.NO_ROOM, False, DiskState.WRITABLE),
    ],
)
def test_the_state_of_the_disk(used: float, was: DiskState, no_room: bool, now: DiskState) -> None:
    assert decide_disk_state(usage(used), LIMITS, was, no_room=no_room) is now


def test_a_floor_that_nobody_set_is_never_more_than_a_twentieth_of_the_disk() -> None:
    limits = LIMITS._replace(full_share=0.99, free_bytes_min=-1)
    assert decide_disk_state(usage(0.94), limits, DiskState.WRITABLE, no_room=False) is DiskState.TIGHT
    assert decide_disk_state(usage(0.96), limits, DiskState.WRITABLE, no_room=False) is DiskState.FULL
    limits = limits._replace(full_share=1.0)
    assert decide_disk_state(
        DiskUsage(1 << 40, (256 << 20) - 1), limits, DiskState.WRITABLE, no_room=False
    ) is DiskState.FULL
    assert decide_disk_state(
        DiskUsage(1 << 40, 256 << 20), limits, DiskState.WRITABLE, no_room=False
    ) is DiskState.TIGHT


@pytest.mark.parametrize("floor", [0, 1, 20_000, 50_001, 300_000, 256 << 20, 1 << 40])
def test_a_floor_that_is_set_holds_whatever_share_of_the_disk_it_is(floor: int) -> None:
    limits = DiskLimits(1.0, 1.0, 1.0, floor)
    for free in (0, 999, 1000, 19_999, 20_000, 49_000, 50_000, 50_001, 299_999, 300_000, 999_999):
        state = decide_disk_state(DiskUsage(1_000_000, free), limits, DiskState.WRITABLE, no_room=False)
        assert state.is_read_only == (free < floor or free == 0), (free, state)


def test_a_bookie_at_its_floor_does_not_come_and_go_at_each_check() -> None:
    limits = DiskLimits(0.95, 0.9, 0.9, 300_000)
    assert decide_disk_state(DiskUsage(1_000_000, 300_001), limits, DiskState.FULL, no_room=False) is DiskState.FULL
    assert decide_disk_state(DiskUsage(1_000_000, 330_001), limits, DiskState.FULL, no_room=False) is DiskState.WRITABLE


async def test_a_floor_that_makes_the_bookie_read_only_is_told_at_its_start(
    cluster: Cluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.simulation.node(NODE).disk.capacity_bytes = CAPACITY
    bookie = await cluster.start(store=CONFIG, free_bytes_min=CAPACITY // 2 + (4 << 20))
    assert bookie.disk_monitor.state is DiskState.WRITABLE
    assert not caplog.messages
    await bookie.close()
    bookie = await cluster.start(store=CONFIG, free_bytes_min=CAPACITY + 1)
    assert await registered_read_only(cluster, bookie)
    assert (await cluster.caller(bookie).add(1, 0, b"x")).status is Status.READ_ONLY
    (said,) = [each for each in caplog.messages if "free_bytes_min" in each]
    assert f"fewer than the {CAPACITY + 1} of free_bytes_min" in said
    assert "never writable" in said


CAPACITY = 16 << 20


def fill(disk: SimDisk) -> None:
    """Somebody else fills the disk to the last byte."""
    room = disk.capacity_bytes - disk.used_bytes() - EMPTY_INODE_BYTES
    if room >= 0:
        file = SimFiles(disk).open(BALLAST, create=True)
        file.allocate(room)
        file.fdatasync()
        SimFiles(disk).sync_directory("/")


def free(disk: SimDisk) -> None:
    SimFiles(disk).remove(BALLAST)


async def registered_read_only(cluster: Cluster, bookie: Bookie) -> bool:
    found = await cluster.metadata.get(paths.bookie(bookie.id))
    assert found is not None
    return records.decode_record(found.value, records.BookieRecord, paths.bookie(bookie.id)).read_only


async def add_until_refused(caller: PeerCaller, ledger: int, acked: dict[tuple[int, int], None], most: int) -> Status:
    for entry in range(most):
        status = (await caller.add(ledger, entry, payload(ledger, entry, 900))).status
        if status is not Status.OK:
            return status
        acked[ledger, entry] = None
    return Status.OK


async def check(caller: PeerCaller, acked: dict[tuple[int, int], None]) -> None:
    for ledger, entry in acked:
        head, found = await caller.read(ledger, entry)
        assert head.status is Status.OK, (ledger, entry, head.status)
        assert payload_of(found[0]) == payload(ledger, entry, 900)


async def put_ledger(cluster: Cluster, ledger: int) -> None:
    await cluster.metadata.put(paths.ledger(ledger), a_record(ledger))


async def test_recovery_goes_on_when_clients_adds_are_refused(cluster: Cluster, /) -> None:
    disk = cluster.simulation.node(NODE).disk
    disk.capacity_bytes = CAPACITY
    bookie = await cluster.start(store=CONFIG)
    assert disk.find_inode(RESERVE).now.size == 512 << 10, "allocated at the start"
    caller, acked = cluster.caller(bookie), dict[tuple[int, int], None]()
    fill(disk)
    assert await add_until_refused(caller, 1, acked, 1000) is Status.READ_ONLY
    await asyncio.sleep(20)
    assert await registered_read_only(cluster, bookie)
    assert bookie.disk_monitor.state is DiskState.NO_ROOM
    assert not bookie.store.room.is_reserve_held
    for entry in range(40):
        assert (await caller.add(2, entry, payload(2, entry, 900), recovery=True)).status is Status.OK
        acked[2, entry] = None
    assert (await caller.add(2, 40, b"x")).status is Status.READ_ONLY
    assert (await caller.read(1, 0, fence=True))[0].status is Status.OK
    await check(caller, acked)
    free(disk)
    await asyncio.sleep(20)
    assert not await registered_read_only(cluster, bookie)
    assert bookie.store.room.is_reserve_held
    assert (await caller.add(3, 0, b"again")).status is Status.OK
    await check(caller, acked)


async def test_deleting_ledgers_on_a_full_disk_makes_it_writable_again(cluster: Cluster, /) -> None:
    """The reserve is enough to move what lives beside what was deleted."""
    disk = cluster.simulation.node(NODE).disk
    disk.capacity_bytes = CAPACITY
    bookie = await cluster.start(store=CONFIG)
    caller, acked = cluster.caller(bookie), dict[tuple[int, int], None]()
    for ledger in (1, 2, 3, 4):
        await put_ledger(cluster, ledger)
    for entry in range(0, 1200, 40):
        for ledger in (1, 2, 3):
            for each in range(entry, entry + 40):
                assert (await caller.add(ledger, each, payload(ledger, each, 900))).status is Status.OK
        assert (await caller.add(4, entry, payload(4, entry, 900))).status is Status.OK
        acked[4, entry] = None
    total = disk.used_bytes()
    fill(disk)
    await add_until_refused(caller, 5, {}, 1000)
    await asyncio.sleep(20)
    assert await registered_read_only(cluster, bookie)
    for ledger in (1, 2, 3):
        await deletions.delete_ledgers(cluster.metadata, [ledger])
    await put_ledger(cluster, 5)
    for _ in range(2):
        await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(roll=True))
        await asyncio.sleep(1)
    await asyncio.sleep(20)
    assert disk.used_bytes() - disk.find_inode(BALLAST).now.size < total // 2
    assert not await registered_read_only(cluster, bookie)
    assert (await caller.add(4, 5000, b"again")).status is Status.OK
    await check(caller, acked)


async def test_a_full_disk_whose_logs_are_a_third_dead_comes_back_without_waiting_for_a_major_compaction(
    cluster: Cluster, /
) -> None:
    """Full to the last byte: the reserve, which grew with the logs, holds what lives in one of them."""
    disk = cluster.simulation.node(NODE).disk
    disk.capacity_bytes = 128 << 20
    bookie = await cluster.start(store=CONFIG, gc_interval_s=60.0)
    caller = cluster.caller(bookie)
    for ledger in (1, 2, 3):
        await put_ledger(cluster, ledger)
    entry = 0
    while (await caller.add(1 + entry % 3, entry, payload(entry % 50, 0, 60_000))).status is Status.OK:
        entry += 1
        if entry % 100 == 0:
            await asyncio.sleep(11)
    assert disk.find_inode(RESERVE).now.size > 5 << 20
    fill(disk)
    await asyncio.sleep(200)
    assert await registered_read_only(cluster, bookie)
    await deletions.delete_ledgers(cluster.metadata, [1])
    await asyncio.sleep(400)
    assert not await registered_read_only(cluster, bookie)
    assert (await caller.add(2, 1 << 20, b"again")).status is Status.OK
    for each in range(entry):
        if each % 3:
            head, found = await caller.read(1 + each % 3, each)
            assert head.status is Status.OK
            assert payload_of(found[0]) == payload(each % 50, 0, 60_000)


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power-loss"])
@pytest.mark.parametrize("before", range(0, 400, 23))
async def test_a_bookie_that_was_full_when_stopped_can_start(
    cluster: Cluster, /, before: int, power_loss: bool
) -> None:
    disk = cluster.simulation.node(NODE).disk
    disk.capacity_bytes = CAPACITY
    bookie = await cluster.start(store=CONFIG)
    caller, acked = cluster.caller(bookie), dict[tuple[int, int], None]()
    await add_until_refused(caller, 1, acked, before)
    fill(disk)
    await add_until_refused(caller, 2, acked, 1000)
    await asyncio.sleep(1)  # it has registered as read-only: the metadata of these tests dies with who asks it
    bookie = await cluster.restart(power_loss=power_loss)
    caller = cluster.caller(bookie)
    await check(caller, acked)
    assert await registered_read_only(cluster, bookie)
    free(disk)
    await asyncio.sleep(20)
    assert (await caller.add(3, 0, b"again")).status is Status.OK


@pytest.mark.parametrize("operation", range(1, 260, 7))
async def test_a_disk_that_fills_up_at_any_moment_loses_nothing(cluster: Cluster, /, operation: int) -> None:
    """Before that operation of adds, checkpoints, compaction and deletion."""
    disk = cluster.simulation.node(NODE).disk
    disk.capacity_bytes = CAPACITY
    bookie = await cluster.start(store=CONFIG)
    caller, acked = cluster.caller(bookie), dict[tuple[int, int], None]()
    disk.crash_at_operation(operation, lambda: fill(disk))
    for round_ in range(3):
        await add_until_refused(caller, 10 + round_, acked, 20)
        await add_until_refused(caller, 20 + round_, {}, 20)
        await cluster.simulation.spawn(NODE, bookie.store.delete_ledgers([20 + round_]))
        await cluster.simulation.spawn(
            NODE, bookie.store.compactor.run_compaction(CompactionPolicy(0.6, 0.6), roll=True)
        )
    await asyncio.sleep(20)
    assert await registered_read_only(cluster, bookie)
    free(disk)
    await asyncio.sleep(20)
    await check(caller, acked)
    assert (await caller.add(30, 0, b"again")).status is Status.OK
    await asyncio.sleep(3)  # between two looks at the disk: a call would be under way in the metadata, here
    bookie = await cluster.restart()
    await check(cluster.caller(bookie), acked)
    bookie.store.check()


@pytest.mark.parametrize("flushed", [False, True], ids=["tombstones-in-the-journal", "tombstones-in-the-ledger-index"])
def test_a_log_that_made_room_for_its_own_note_is_no_damage(flushed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A dead log on a disk without room for `Drained`, and a crash at each operation of its removal."""

    async def main(simulation: Simulation) -> None:
        disk = simulation.node(NODE).disk
        operation, crashed, given_up = 1, True, 0
        while crashed:
            disk.delete_everything()
            disk.capacity_bytes = CAPACITY
            store = await open_store(simulation, replace(CONFIG, reserve_bytes=0))
            for ledger in (1, 2, 3):
                assert await simulation.spawn(NODE, add(store, ledger, 0, payload(ledger, 0))) is Status.OK
                await simulation.spawn(NODE, store.checkpoint())
                await simulation.spawn(NODE, store._checkpoint.run_between_checkpoints(store._log.close))
            await simulation.spawn(NODE, store.delete_ledgers([1, 2]))
            if flushed:
                await simulation.spawn(NODE, store.checkpoint())
            fill(disk)
            simulation.crash_at(NODE, operation, power_loss=operation % 3 > 0)
            crashed = False
            try:
                assert (await simulation.spawn(NODE, store.compactor.run_compaction(None))).deleted == [1, 2]
            except NodeCrashed:
                crashed = True
            disk.cancel_crash()
            simulation.crash(NODE, power_loss=operation % 2 > 0)
            logs = {path[-20:-4] for path in disk.list_paths() if path.endswith(".log")}
            indexes = {path[-20:-4] for path in disk.list_paths() if path.endswith(".idx")}
            given_up += indexes > logs
            disk.capacity_bytes = UNLIMITED_BYTES
            caplog.clear()
            for _ in range(2):
                store = await open_store(simulation)
                assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
                assert store.descriptors.limbo_upto == -1
                assert store.descriptors.quarantined() == []
                found = await simulation.spawn(NODE, store.read_entries(3, 0))
                assert payload_of(found.entries[0]) == payload(3, 0)
                await simulation.spawn(NODE, store.compactor.run_compaction(CompactionPolicy(1.1, 1.1), roll=True))
                assert {1, 2} <= store.descriptors.drained
                simulation.crash(NODE, power_loss=True)
            operation += 1
        assert given_up > 2

    for seed in range(2):
        simulate(main, seed)


async def test_moves_that_find_no_room_leave_nothing_behind_however_often_they_are_tried(cluster: Cluster, /) -> None:
    disk = cluster.simulation.node(NODE).disk
    disk.capacity_bytes = CAPACITY
    bookie = await cluster.start(store=replace(CONFIG, reserve_bytes=0))
    caller, acked = cluster.caller(bookie), dict[tuple[int, int], None]()
    await add_until_refused(caller, 1, acked, 30)
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    fill(disk)
    before = 0
    for _ in range(5):
        done = await cluster.simulation.spawn(NODE, bookie.store.compactor.run_compaction(CompactionPolicy(1.1, 1.1),
            roll=True))
        assert done.compacted == []
        names = [path for path in disk.list_paths() if "/entries/" in path]
        before = before or len(names)
        assert len(names) == before
    free(disk)
    done = await cluster.simulation.spawn(
        NODE, bookie.store.compactor.run_compaction(CompactionPolicy(1.1, 1.1), roll=True)
    )
    assert done.compacted != []
    await check(caller, acked)
