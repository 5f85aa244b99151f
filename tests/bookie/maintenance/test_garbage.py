"""Garbage collection deletes dead logs and only those (invariants 21, 22)."""

import asyncio

import pytest
from msgspec.structs import replace

from magnetar.bookie.format.journal import DamagedFile
from magnetar.bookie.maintenance.garbage import GarbageProgress, GarbageRefusal, GarbageResult
from magnetar.bookie.registration import DiskState
from magnetar.bookie.server import Bookie
from magnetar.bookie.store.disk import NoSpace
from magnetar.bookie.store.entrylog.compaction import CompactionResult
from magnetar.bookie.store.entrylog.mover import CompactionPolicy, EntryLogUsage
from magnetar.ledger import client as deletions
from magnetar.ledger.peer_format import BookieOperation, Status
from magnetar.metadata import paths, records
from magnetar.metadata.store import NODES_PER_PAGE, NodePage
from magnetar.proto.errors import Busy, ConnectionLost
from magnetar.runtime.sim.disk import DiskOperation
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import PeerCaller, a_record, payload_of
from tests.bookie.stores import NODE, SMALL, payload

pytestmark = pytest.mark.run_by.with_args(with_cluster)

FEW = replace(SMALL, memtable_bytes=64 << 10, log_bytes_max=(8 << 20) + (128 << 10))


async def with_logs(cluster: Cluster, ledgers: int = 4) -> tuple[Bookie, PeerCaller]:
    """A bookie with one entry log per ledger 1..n, all of them in the metadata."""
    bookie = await cluster.start(store=FEW)
    caller = cluster.caller(bookie)
    for ledger in range(1, ledgers + 1):
        await cluster.metadata.put(paths.ledger(ledger), a_record(ledger, bookie.id))
        for entry in range(10):
            assert (await caller.add(ledger, entry, payload(ledger, entry))).status is Status.OK
        await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
        bookie.store._log._log_bytes_max = 0  # every flush goes to a log of its own
    return bookie, caller


async def collect(cluster: Cluster, bookie: Bookie) -> None:
    await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(minor=False))
    await asyncio.sleep(1)


def logs(cluster: Cluster) -> list[str]:
    return [
        path.rpartition("/")[2] for path in cluster.simulation.node(NODE).disk.list_paths() if path.endswith(".log")
    ]


async def test_dead_log_goes_after_two_passes_and_live_ones_stay(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)
    before = logs(cluster)
    assert len(before) == 4
    await collect(cluster, bookie)
    await collect(cluster, bookie)
    assert logs(cluster) == before, "nothing is dead"
    await deletions.delete_ledgers(cluster.metadata, [2])
    await collect(cluster, bookie)
    assert logs(cluster) == before, "one pass is not enough"
    assert (await caller.read(2, 0))[0].status is Status.OK
    await collect(cluster, bookie)
    assert logs(cluster) == [before[0], *before[2:]]
    for ledger in (1, 3, 4):
        _, entries = await caller.read(ledger, 0, count=10)
        assert [payload_of(entry) for entry in entries] == [payload(ledger, entry) for entry in range(10)]
    assert (await caller.read(2, 0))[0].status is Status.NO_SUCH_LEDGER
    bookie.store.check()


async def test_deleted_ledger_never_takes_an_add_again_also_after_a_restart(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster, 2)
    await deletions.delete_ledgers(cluster.metadata, [1])
    await collect(cluster, bookie)
    await collect(cluster, bookie)
    for _ in range(3):
        assert (await caller.add(1, 10, b"late")).status is Status.FENCED
        assert (await caller.add(1, 10, b"late", recovery=True)).status is Status.FENCED
        assert (await caller.send(BookieOperation.WRITE_LAC, 1, 3))[0].status is Status.FENCED
        assert (await caller.read(1, 0, fence=True))[0].status is Status.NO_SUCH_LEDGER
        assert (await caller.read(2, 0))[0].status is Status.OK
        caller = cluster.caller(await cluster.restart())


def test_tombstone_is_durable_before_data_goes() -> None:
    events: list[str] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "fdatasync" and operation.path.endswith(".jnl"):
            events.append("tombstone")
        if operation.kind == "remove" and operation.path.endswith(".log"):
            events.append("remove")

    async def main(cluster: Cluster) -> None:
        bookie, _ = await with_logs(cluster, 3)
        await deletions.delete_ledgers(cluster.metadata, [1])
        await collect(cluster, bookie)
        cluster.simulation.node(NODE).disk.record = record
        await collect(cluster, bookie)
        cluster.simulation.node(NODE).disk.record = None

    with_cluster(main)
    assert events == ["tombstone", "remove"]


async def test_a_pass_that_finds_the_disk_full_or_damaged_is_not_the_last_one(cluster: Cluster, /) -> None:
    cluster.config = replace(cluster.config, gc_interval_s=5.0)
    bookie, _ = await with_logs(cluster)
    survey = bookie.store.compactor.list_log_usage
    failures = [
        NoSpace("full"), OSError("a directory that cannot be read"), DamagedFile("1.idx", 0, "not a group of an index"),
    ]  # fmt: skip

    async def failing() -> list[EntryLogUsage]:
        if failures:
            raise failures.pop()
        return await survey()

    bookie.store.compactor.list_log_usage = failing  # type: ignore[method-assign]
    await deletions.delete_ledgers(cluster.metadata, [2])
    await asyncio.sleep(60)
    assert not failures
    assert len(logs(cluster)) == 3
    assert bookie.background.restarts == 0, "the collector itself goes on"


async def test_log_with_one_living_ledger_stays(cluster: Cluster, /) -> None:
    bookie = await cluster.start(store=FEW)
    caller = cluster.caller(bookie)
    for ledger in (1, 2):
        await cluster.metadata.put(paths.ledger(ledger), a_record(ledger))
        await caller.add(ledger, 0, b"x")
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    bookie.store._log._log_bytes_max = 0
    await caller.add(2, 1, b"y")
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    await deletions.delete_ledgers(cluster.metadata, [1])
    for _ in range(3):
        await collect(cluster, bookie)
    assert len(logs(cluster)) == 2
    assert (await caller.read(2, 0))[0].status is Status.OK
    assert (await caller.read(1, 0))[0].status is Status.NO_SUCH_LEDGER


async def test_nothing_goes_when_listing_or_reading_fails_or_the_cluster_is_another(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)
    metadata = cluster.metadata
    await deletions.delete_ledgers(metadata, [1])
    await collect(cluster, bookie)
    original = metadata.list_nodes, metadata.get

    async def fail(*_: object) -> NodePage:
        raise ConnectionLost("gone")

    metadata.list_nodes = fail  # type: ignore[method-assign]
    with pytest.raises(ConnectionLost):
        await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(minor=False))
    metadata.list_nodes = original[0]  # type: ignore[method-assign]
    metadata.get = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(ConnectionLost):
        await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(minor=False))
    metadata.get = original[1]  # type: ignore[method-assign]
    cluster_record = await metadata.get(paths.CLUSTER)
    assert cluster_record is not None
    for other in (records.encode_record(records.ClusterRecord(instance="other"), paths.CLUSTER), None):
        if other is None:
            await metadata.delete(paths.CLUSTER)
        else:
            await metadata.put(paths.CLUSTER, other)
        with pytest.raises(ValueError, match="nothing is deleted"):
            await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(minor=False))
    assert len(logs(cluster)) == 4
    assert (await caller.read(1, 0))[0].status is Status.OK
    await metadata.put(paths.CLUSTER, cluster_record.value)
    await collect(cluster, bookie)
    assert len(logs(cluster)) == 3


async def test_ledger_that_reappears_between_the_passes_lives(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster, 2)
    found = await cluster.metadata.get(paths.ledger(1))
    assert found is not None
    await deletions.delete_ledgers(cluster.metadata, [1])
    await collect(cluster, bookie)
    await cluster.metadata.put(paths.ledger(1), found.value)
    await collect(cluster, bookie)
    await deletions.delete_ledgers(cluster.metadata, [1])
    await collect(cluster, bookie)
    assert (await caller.read(1, 0))[0].status is Status.OK, "the count of passes began anew"


# ---------------------------------------------------------------------------------------- what is refused
async def with_ledgers(cluster: Cluster, ledgers: int, **settings: object) -> tuple[Bookie, PeerCaller]:
    """A bookie with one entry of each, all in the metadata and in one log."""
    bookie = await cluster.start(**settings)
    caller = cluster.caller(bookie)
    for ledger in range(1, ledgers + 1):
        await cluster.metadata.put(paths.ledger(ledger), a_record(ledger))
        assert (await caller.add(ledger, 0, payload(ledger, 0))).status is Status.OK
    return bookie, caller


async def run(cluster: Cluster, bookie: Bookie, **options: bool) -> GarbageResult:
    found = await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(**options))
    await asyncio.sleep(1)
    return found


async def delete(cluster: Cluster, ledgers: range) -> None:
    await deletions.delete_ledgers(cluster.metadata, ledgers)


async def test_nothing_is_deleted_in_limbo(cluster: Cluster, /) -> None:
    bookie, caller = await with_ledgers(cluster, 4)
    await delete(cluster, range(1, 2))
    await run(cluster, bookie)
    bookie.store.descriptors.enter_limbo(100)
    for _ in range(3):
        assert (await run(cluster, bookie)).refused is GarbageRefusal.LIMBO
    assert (await caller.read(1, 0))[0].status is Status.OK
    bookie.store.descriptors.leave_limbo()
    await run(cluster, bookie)
    assert (await run(cluster, bookie)).ledgers_deleted == [1]


async def test_ledgers_that_arrive_after_the_snapshot_are_out_of_scope(cluster: Cluster, /) -> None:
    bookie, caller = await with_ledgers(cluster, 2)
    list_nodes = cluster.metadata.list_nodes

    async def slow(folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        found = await list_nodes(folder, after, limit)
        assert (await caller.add(3, 0, payload(3, 0))).status is Status.OK
        return found

    cluster.metadata.list_nodes = slow  # type: ignore[method-assign]
    assert (await run(cluster, bookie)).suspected == 0


async def test_a_pass_reads_the_names_of_ledgers_in_pages_and_never_all_at_once(
    cluster: Cluster, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie, caller = await with_ledgers(cluster, 10)
    monkeypatch.setattr("magnetar.metadata.store.iterate_nodes.__defaults__", ("", 3))
    await delete(cluster, range(4, 6))
    list_nodes, pages = cluster.metadata.list_nodes, list[NodePage]()

    async def counting(folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        pages.append(await list_nodes(folder, after, limit))
        return pages[-1]

    async def whole(path: str) -> list[str]:
        raise AssertionError(f"{path} is listed as a whole")

    cluster.metadata.list_nodes, cluster.metadata.children = counting, whole  # type: ignore[method-assign]
    await run(cluster, bookie)
    assert [len(page.names) for page in pages] == [3, 3, 2]
    assert (await run(cluster, bookie)).ledgers_deleted == [4, 5]
    assert (await caller.read(10, 0))[0].status is Status.OK


class SteppingClock:
    """Two clocks that a test sets."""

    def __init__(self) -> None:
        self.seconds, self.wall_s = 1000.0, 1e9

    def monotonic(self) -> float:
        return self.seconds

    def wall_ms(self) -> int:
        return int(self.wall_s * 1000)


@pytest.mark.parametrize(
    ("monotonic", "wall", "deleted"),
    [(601, 601, True), (599, 599, False), (1e6, 599, False), (599, 1e6, False), (601, -1e6, False), (601, 1e6, True)],
)
async def test_a_step_of_one_clock_does_not_shorten_the_grace(
    cluster: Cluster, /, monotonic: float, wall: float, deleted: bool
) -> None:
    bookie, _ = await with_ledgers(cluster, 2, gc_grace_s=600.0)
    clock = bookie.garbage_collector._clock = SteppingClock()
    await delete(cluster, range(1, 2))
    assert (await run(cluster, bookie)).suspected == 1
    clock.seconds += monotonic
    clock.wall_s += wall
    assert (await run(cluster, bookie)).ledgers_deleted == ([1] if deleted else [])
    if wall < 0:
        clock.seconds += 601
        clock.wall_s += 601
        assert (await run(cluster, bookie)).ledgers_deleted == [1], "the time of day stepped back: a new grace"


async def test_one_run_at_a_time_and_each_says_how_far_it_is(cluster: Cluster, /) -> None:
    bookie, _ = await with_logs(cluster)
    await delete(cluster, range(1, 3))
    await run(cluster, bookie)
    said: list[GarbageProgress] = []
    first = cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(on_progress=said.append))
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass())
    assert (await first).logs_deleted == [1, 2]
    assert [progress.phase for progress in said] == ["metadata", "plan", "delete", "delete", "done"]
    assert said[-1].logs_done == said[-1].logs == 2


async def test_minor_and_major_compaction_come_by_their_intervals(cluster: Cluster, /) -> None:
    bookie, _ = await with_ledgers(
        cluster, 1, gc_interval_s=600.0, gc_minor_interval_s=3600.0, gc_major_interval_s=10800.0
    )
    ran: list[str] = []
    compact = bookie.store.compactor.run_compaction

    async def note(policy: CompactionPolicy | None, *, major: bool = False, roll: bool = False,
        **rest: object) -> CompactionResult:
        ran.append("major" if major else "pass" if policy is None else "minor")
        return await compact(policy, major=major, roll=roll)

    bookie.store.compactor.run_compaction = note  # type: ignore[method-assign, assignment]
    await asyncio.sleep(6 * 3600 + 60)
    assert len(ran) == 36
    assert [index for index, kind in enumerate(ran, 1) if kind != "pass"] == [6, 12, 18, 24, 30, 36]
    assert [kind for kind in ran if kind != "pass"] == ["minor", "minor", "major"] * 2


async def test_major_compaction_waits_while_the_disk_is_tight_and_each_pass_compacts_when_it_is_full(
    cluster: Cluster, /
) -> None:
    intervals = {"gc_interval_s": 600.0, "gc_major_interval_s": 3600.0, "upkeep_interval_s": 1e9}
    bookie, _ = await with_ledgers(cluster, 1, **intervals)
    ran: list[tuple[bool, bool, bool]] = []

    async def note(*, minor: bool, major: bool, roll: bool) -> None:
        ran.append((minor, major, roll))

    bookie.garbage_collector.run_pass = note  # type: ignore[method-assign, assignment]
    bookie.disk_monitor.state = DiskState.TIGHT
    await asyncio.sleep(2 * 3600)
    assert {(major, roll) for _, major, roll in ran} == {(False, False)}
    bookie.disk_monitor.state = DiskState.FULL
    await asyncio.sleep(601)
    assert ran[-1][0], "what gives room is moved"
    assert ran[-1][2], "also out of open logs"


async def test_the_disk_comes_back_though_each_of_500_ledgers_keeps_an_entry_in_it(cluster: Cluster, /) -> None:
    """The case to win: closed logs and their index files take at most 1.3 times the live bytes."""
    store = replace(FEW, memtable_bytes=1 << 20, journal_bytes=1 << 20, log_bytes_max=(9 << 20) + (128 << 10))
    bookie, caller = await with_ledgers(cluster, 0, store=store)
    kept, deleted = range(1, 501), range(501, 521)
    for ledger in (*kept, *deleted):
        await cluster.metadata.put(paths.ledger(ledger), a_record(ledger))
    for ledger in kept:
        for each in range(3):
            await caller.add(deleted[ledger % 20], 3 * ledger + each, bytes(8 << 10))
        assert (await caller.add(ledger, 0, payload(ledger, 0, 1024))).status is Status.OK
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    before = await cluster.simulation.spawn(NODE, bookie.garbage_collector.plan_compaction())
    assert sum(plan.facts.bytes for plan in before) > 12 << 20
    await delete(cluster, deleted)
    await run(cluster, bookie, major=True, roll=True)
    assert len((await run(cluster, bookie, major=True, roll=True)).ledgers_deleted) == 20
    plans = await cluster.simulation.spawn(NODE, bookie.garbage_collector.plan_compaction())
    live = 500 * 1024
    assert sum(plan.facts.live_bytes for plan in plans) == 500 * (1024 + 36 + 8)
    assert sum(plan.facts.bytes for plan in plans) <= 1.3 * live
    for ledger in kept:
        _, entries = await caller.read(ledger, 0)
        assert payload_of(entries[0]) == payload(ledger, 0, 1024)
