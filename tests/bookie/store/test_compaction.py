"""Compaction moves what lives, loses nothing at any crash, and gives the disk back (ledger protocol §2.6)."""

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from msgspec.structs import replace
from pyroaring import BitMap64

from magnetar.bookie.format.ledger_index import QuarantinedEntries
from magnetar.bookie.store.entrylog.mover import (
    CompactionAction,
    CompactionPolicy,
    CompactionReason,
    EntryLogState,
    EntryLogUsage,
    LiveLedger,
    group_logs_to_move,
    plan_entry_logs,
)
from magnetar.bookie.store.store import Store, StoreConfig
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.disk import FileFault
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.entries import payload_of
from tests.bookie.stores import DATA, NODE, SMALL, UUID, Model, add, load, open_store, payload, simulate


def facts(
    log: int, data: int, live: int, *, state: EntryLogState = EntryLogState.CLOSED, readable: bool = True
) -> EntryLogUsage:
    holders = (LiveLedger(7, live),) if live else ()
    return EntryLogUsage(log, state, data + 5000, data, live, 1 if live else 0, len(holders), holders, readable)


POLICY = CompactionPolicy(0.2, 0.5, 1000)


def test_each_log_gets_one_action_and_its_reason() -> None:
    logs = [
        facts(1, 100_000, 0),
        facts(2, 100_000, 19_999),
        facts(3, 100_000, 49_999),
        facts(4, 100_000, 50_000),
        facts(5, 100_000, 10, state=EntryLogState.HOT),
        facts(6, 100_000, 0, state=EntryLogState.COLD),
        facts(7, 100_000, 0, readable=False),
        facts(8, 0, 0),
    ]
    minor = [(plan.action, plan.reason) for plan in plan_entry_logs(logs, POLICY, major=False)]
    assert minor == [
        (CompactionAction.DELETE, CompactionReason.DEAD),
        (CompactionAction.COMPACT, CompactionReason.SPARSE),
        (CompactionAction.KEEP, CompactionReason.WAITS),
        (CompactionAction.KEEP, CompactionReason.LIVE),
        (CompactionAction.KEEP, CompactionReason.OPEN),
        (CompactionAction.KEEP, CompactionReason.OPEN),
        (CompactionAction.KEEP, CompactionReason.UNREADABLE),
        (CompactionAction.DELETE, CompactionReason.DEAD),
    ]
    major = [(plan.action, plan.reason) for plan in plan_entry_logs(logs, POLICY, major=True)]
    assert major[2] == (CompactionAction.COMPACT, CompactionReason.SPARSE)
    assert major[:2] + major[3:] == minor[:2] + minor[3:]


def test_small_logs_are_merged_by_major_compaction_and_one_alone_is_not() -> None:
    policy = CompactionPolicy(0.2, 0.5, 10_000)
    small = [facts(1, 1000, 1000), facts(2, 1000, 1000)]
    assert [plan.reason for plan in plan_entry_logs(small, policy, major=True)] == [
        CompactionReason.SMALL,
        CompactionReason.SMALL,
    ]
    assert [plan.reason for plan in plan_entry_logs(small, policy, major=False)] == [
        CompactionReason.WAITS,
        CompactionReason.WAITS,
    ]
    assert [plan.reason for plan in plan_entry_logs(small[:1], policy, major=True)] == [CompactionReason.LIVE]


def test_batches_fit_into_one_log_and_the_sparse_ones_come_first() -> None:
    logs = [facts(1, 100, 40), facts(2, 100, 10), facts(3, 100, 30), facts(4, 1000, 90)]
    numbers = [[log.log for log in batch] for batch in group_logs_to_move(logs, 50, 100, 100)]
    assert numbers == [[4], [2, 3], [1]]
    assert [len(batch) for batch in group_logs_to_move(logs, 1000, 2, 100)] == [2, 2]
    assert [len(batch) for batch in group_logs_to_move(logs, 1000, 100, 3)] == [3, 1]


# ---------------------------------------------------------------------------------------- on a disk
EVERYTHING = CompactionPolicy(1.1, 1.1, 0, 1 << 40)
"""Moves every closed log, whatever lives in it, at once."""


async def flush(store: Store, ledgers: dict[int, range], size: int = 300) -> None:
    for ledger, entries in ledgers.items():
        for entry in entries:
            assert await add(store, ledger, entry, payload(ledger, entry, size)) is Status.OK
    await store.checkpoint()


async def flush_to_own_log(store: Store, ledgers: dict[int, range], size: int = 300) -> None:
    await flush(store, ledgers, size)
    await store._checkpoint.run_between_checkpoints(store._log.close)


async def expect(store: Store, ledger: int, entries: range, size: int = 300) -> None:
    for entry in entries:
        result = await store.read_entries(ledger, entry)
        assert result.status is Status.OK, f"entry {entry} of ledger {ledger}: {result.status!r}"
        assert payload_of(result.entries[0]) == payload(ledger, entry, size)


def files(simulation: Simulation, suffix: str = ".log") -> list[str]:
    return [path for path in simulation.node(NODE).disk.list_paths() if path.endswith(suffix)]


def in_store(main: Callable[[Simulation, Store], Awaitable[None]], config: StoreConfig = SMALL) -> Simulation:
    async def run(simulation: Simulation) -> None:
        store = await open_store(simulation, config)

        async def body() -> None:
            await main(simulation, store)

        await simulation.spawn(NODE, body())

    return simulate(run)


pytestmark = pytest.mark.run_by.with_args(in_store)


async def test_what_lives_in_sparse_logs_is_moved_together_and_the_logs_go(
    simulation: Simulation, store: Store, /
) -> None:
    for round_ in range(4):
        entries = range(10 * round_, 10 * round_ + 2)
        await flush_to_own_log(store, {1: entries, 2: entries, 100 + round_: range(40)})
    assert len(files(simulation)) == 4
    await store.delete_ledgers([100, 101, 102, 103])
    done = await store.compactor.run_compaction(CompactionPolicy(0.2, 0.5))
    assert (done.deleted, done.compacted, done.bad_records) == ([], [1, 2, 3, 4], 0)
    assert done.bytes_freed > 4 * 40 * 300
    assert [path.rpartition("/")[2] for path in files(simulation)] == ["0000000000000005.log"]
    for ledger in (1, 2):
        for round_ in range(4):
            await expect(store, ledger, range(10 * round_, 10 * round_ + 2))
    assert store.index.ledgers_of_log(5) == BitMap64([1, 2])
    (facts,) = await store.compactor.list_log_usage()
    assert (facts.state, facts.live_share, facts.ledgers) == (EntryLogState.COLD, 1.0, 2)
    assert facts.live_extents == 2, "a ledger's entries lie together"
    store.check()


async def test_minor_compaction_leaves_what_major_compaction_moves(simulation: Simulation, store: Store, /) -> None:
    await flush_to_own_log(store, {1: range(30), 2: range(70)})
    await flush_to_own_log(store, {3: range(40), 4: range(60)})
    await store.delete_ledgers([2, 4])
    assert (await store.compactor.run_compaction(CompactionPolicy(0.2, 0.35, 0))).compacted == []
    assert (await store.compactor.run_compaction(CompactionPolicy(0.2, 0.35, 0), major=True)).compacted == [1]
    assert (await store.compactor.run_compaction(CompactionPolicy(0.2, 0.5, 0), major=True)).compacted == [2]
    await expect(store, 1, range(30))
    await expect(store, 3, range(40))
    for ledger in (2, 4):
        assert (await store.read_entries(ledger, 0)).status is Status.NO_SUCH_LEDGER


async def test_rolling_gives_back_an_open_log_that_holds_little(simulation: Simulation, store: Store, /) -> None:
    await flush(store, {1: range(2), 2: range(60)})
    await store.delete_ledgers([2])
    assert (await store.compactor.run_compaction(CompactionPolicy(0.2, 0.5))).compacted == [], "it is open"
    assert (await store.compactor.run_compaction(CompactionPolicy(0.2, 0.5), roll=True)).compacted == [1]
    await flush(store, {1: range(2, 4)})
    await expect(store, 1, range(4))
    states = [facts.state for facts in await store.compactor.list_log_usage()]
    assert states == [EntryLogState.CLOSED, EntryLogState.HOT]


async def test_a_cold_log_that_died_is_closed_and_goes(simulation: Simulation, store: Store, /) -> None:
    await flush_to_own_log(store, {1: range(2), 2: range(60)})
    await store.delete_ledgers([2])
    await store.compactor.run_compaction(CompactionPolicy(0.2, 0.5))
    await store.delete_ledgers([1])
    done = await store.compactor.run_compaction(CompactionPolicy(0.2, 0.5))
    assert done.deleted == [2]
    assert files(simulation) == []


async def test_an_entry_that_stands_in_several_logs_is_copied_once(simulation: Simulation, store: Store, /) -> None:
    await flush_to_own_log(store, {1: range(20)})
    for _ in range(2):
        for entry in range(5, 15):
            assert await add(store, 1, entry, payload(1, entry), recovery=True) is Status.OK
        await store.checkpoint()
        await store._checkpoint.run_between_checkpoints(store._log.close)
    assert sum(facts.data_bytes for facts in await store.compactor.list_log_usage()) == 40 * 344
    await store.compactor.run_compaction(EVERYTHING)
    assert [facts.data_bytes for facts in await store.compactor.list_log_usage()] == [20 * 344]
    await expect(store, 1, range(20))
    store.check()


@pytest.mark.parametrize("what", ["payload", "length", "ledger", "table too", "unreadable"])
async def test_a_bad_record_is_quarantined_and_the_rest_is_moved(
    simulation: Simulation, store: Store, /, what: str
) -> None:
    await flush_to_own_log(store, {1: range(20), 2: range(3)})
    disk, (path,) = simulation.node(NODE).disk, files(simulation)
    record = 4096 + 7 * 344
    if what == "unreadable":
        disk.faults += [FileFault("pread", ".log", times=1), FileFault("pread", ".log", skip=8, times=1)]
    else:
        disk.flip_bit(path, record + {"payload": 100, "length": 2, "ledger": 12, "table too": 50}[what])
    if what == "table too":
        disk.flip_bit(files(simulation, ".idx")[0], 64 + 20 + 2 * 44 + 10)
    reported: list[list[QuarantinedEntries]] = []
    store.compactor._on_bad = lambda: reported.append(store.descriptors.quarantined())
    done = await store.compactor.run_compaction(EVERYTHING)
    lost = range(7, 20) if what == "table too" else range(7, 8)
    assert done.compacted == [1]
    assert done.bad_records == 1
    assert reported == [[QuarantinedEntries(1, lost[0], lost[-1])]]
    assert path not in files(simulation)
    for again in range(2):
        for entry in range(20):
            status = (await store.read_entries(1, entry)).status
            assert status is (Status.UNKNOWN if entry in lost else Status.OK), (entry, again)
        await expect(store, 2, range(3))
        if again:
            break
        await store.close()
        store = await Store.open(simulation.world(NODE), DATA, UUID, SMALL)


async def test_a_good_copy_of_a_bad_record_is_moved_instead(simulation: Simulation, store: Store, /) -> None:
    await flush_to_own_log(store, {1: range(20)})
    (path,) = files(simulation)
    assert await add(store, 1, 7, payload(1, 7), recovery=True) is Status.OK
    await store.checkpoint()
    await store._checkpoint.run_between_checkpoints(store._log.close)
    simulation.node(NODE).disk.flip_bit(path, 4096 + 7 * 344 + 100)
    assert (await store.compactor.run_compaction(EVERYTHING)).bad_records == 0
    await expect(store, 1, range(20))


def test_readers_find_every_entry_at_every_moment_of_a_compaction() -> None:
    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation, replace(SMALL, read_cache_bytes=0))
        simulation.node(NODE).disk_delays.mean_s = 0.003
        finished = asyncio.Event()
        reads = 0

        async def read() -> None:
            nonlocal reads
            while not finished.is_set():
                results = await asyncio.gather(*[store.read_entries(1, entry) for entry in range(20)])
                assert {result.status for result in results} == {Status.OK}
                reads += len(results)
                await asyncio.sleep(0.0001)

        async def compact() -> None:
            for _ in range(20):
                await store.compactor.run_compaction(EVERYTHING, roll=True)
            finished.set()

        await simulation.spawn(NODE, flush(store, {1: range(20)}))
        reader = simulation.spawn(NODE, read())
        await simulation.spawn(NODE, compact())
        await reader
        assert store.compactor.counters["logs_compacted"] == 20
        assert reads > 400

    simulate(main)


@pytest.mark.run_by(in_store, replace(SMALL, memtable_bytes=1 << 20, journal_bytes=1 << 20, log_bytes_max=16 << 20))
async def test_a_move_is_as_fast_as_it_may_be(simulation: Simulation, store: Store, /) -> None:
    await flush_to_own_log(store, {1: range(100)}, 3000)
    clock = simulation.world("other").clock
    began = clock.monotonic()
    done = await store.compactor.run_compaction(CompactionPolicy(1.1, 1.1, 0, 10_000))
    seconds = clock.monotonic() - began
    assert done.bytes_moved == 100 * 3044
    assert 0.9 * seconds < 2 * done.bytes_moved / 10_000 < 1.1 * seconds, "reading and writing count"
    assert store.compactor.seconds.total == pytest.approx(seconds, rel=0.1)


def test_what_a_move_without_room_left_in_an_index_is_cut_for_good() -> None:
    """Its group is whole on the disk; when the log is closed, no mark says any more that it does not count."""

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation, replace(SMALL, reserve_bytes=0))
        await simulation.spawn(NODE, flush_to_own_log(store, {1: range(10)}))
        simulation.node(NODE).disk.faults.append(FileFault("pwrite", "mark.tmp", errno.ENOSPC))
        assert (await simulation.spawn(NODE, store.compactor.run_compaction(EVERYTHING))).compacted == []
        assert store.compactor.counters["moves_without_room"] == 1
        await simulation.spawn(NODE, store._checkpoint.run_between_checkpoints(store._cold.close))
        await simulation.spawn(NODE, store.checkpoint())
        simulation.crash(NODE, power_loss=True)
        store = await open_store(simulation)
        assert store.index.log_numbers() == [1]
        await simulation.spawn(NODE, expect(store, 1, range(10)))

    for seed in range(8):
        simulate(main, seed)


# ---------------------------------------------------------------------------------------- crashes
async def load_and_compact(store: Store, model: Model, rng: random.Random, turns: int) -> None:
    """`load`, and now and then a ledger is deleted and everything is moved."""
    for _ in range(turns):
        await load(store, model, rng, 1)
        chance = rng.random()
        if chance < 0.1:
            await model.delete(store, rng.randint(1, 9))
        if chance < 0.25:
            await store.compactor.run_compaction(EVERYTHING, roll=rng.random() < 0.5)


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power-loss"])
@pytest.mark.parametrize("seed", range(1, 9))  # 0 crashes before it ever compacts
def test_no_entry_is_lost_by_crashes_anywhere_in_a_compaction(seed: int, power_loss: bool) -> None:
    simulation = Simulation(seed)
    simulation.node(NODE).disk.takes_direct = seed % 2 == 1
    rng = random.Random(f"{seed}/compaction")
    model = Model()
    compacted = 0

    async def life(crash_in: int) -> None:
        nonlocal compacted
        simulation.world(NODE)
        if crash_in:
            simulation.crash_at(NODE, crash_in, power_loss=power_loss)
        store = await open_store(simulation)
        await simulation.spawn(NODE, model.check(store))
        try:
            await simulation.spawn(NODE, load_and_compact(store, model, rng, 1000 if crash_in else 20))
        finally:
            compacted += store.compactor.counters["logs_compacted"]

    async def main() -> None:
        for _ in range(12):
            with pytest.raises(NodeCrashed):
                await life(rng.randint(1, 600))
        await life(0)

    simulation.run(main())
    assert simulation.complaints == []
    assert len(model.acked) > 30
    assert compacted > 2


@pytest.mark.run_by.with_args(simulate)
async def test_a_crash_at_each_operation_of_a_compaction_loses_nothing_and_doubles_nothing(
    simulation: Simulation, /
) -> None:
    operation, crashed = 1, True
    while crashed:
        simulation.node(NODE).disk.delete_everything()
        store = await open_store(simulation)
        await simulation.spawn(NODE, flush_to_own_log(store, {1: range(10), 2: range(30), 3: range(3)}))
        await simulation.spawn(NODE, flush_to_own_log(store, {1: range(10, 20), 4: range(30)}))
        await simulation.spawn(NODE, store.delete_ledgers([2, 4]))
        simulation.crash_at(NODE, operation, power_loss=operation % 3 > 0)
        crashed = False
        try:
            await simulation.spawn(NODE, store.compactor.run_compaction(EVERYTHING))
        except NodeCrashed:
            crashed = True
        simulation.node(NODE).disk.cancel_crash()
        simulation.crash(NODE, power_loss=operation % 2 > 0)
        store = await open_store(simulation)
        await simulation.spawn(NODE, expect(store, 1, range(20)))
        await simulation.spawn(NODE, expect(store, 3, range(3)))
        await simulation.spawn(NODE, store.compactor.run_compaction(CompactionPolicy(0.9, 0.9, 0)))
        survey = await simulation.spawn(NODE, store.compactor.list_log_usage())
        assert sum(facts.data_bytes for facts in survey) == sum(facts.live_bytes for facts in survey) == 23 * 344
        operation += 1
    assert operation > 40


@pytest.mark.parametrize("seed", range(30))
def test_a_log_that_is_made_during_a_survey_is_not_taken_for_a_closed_one(seed: int) -> None:
    """It would be moved and removed while checkpoints go on writing to it."""

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        for number in range(1, 7):
            await simulation.spawn(NODE, flush_to_own_log(store, {number: range(1)}))
        await simulation.spawn(NODE, add(store, 7, 0, payload(7, 0)))
        survey = simulation.spawn(NODE, store.compactor.list_log_usage())
        await simulation.spawn(NODE, store.checkpoint())  # makes another log
        closed = [log.log for log in await survey if log.state is EntryLogState.CLOSED]
        assert set(closed).isdisjoint(store._checkpoint.mark.open_log_numbers)

    simulate(main, seed)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("which", ["hot", "cold"])
@pytest.mark.run_by.with_args(simulate)
async def test_a_log_that_a_mark_names_before_anything_is_in_it_is_no_damage_after_a_power_loss(
    simulation: Simulation, /, which: str, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A flush ends beside a move that has begun its log; or a commit after a flush that found no room in its own."""
    simulation.node(NODE).disk.takes_direct = direct
    for seed in range(12):
        simulation.node(NODE).disk.delete_everything()
        store = await open_store(simulation)
        assert await simulation.spawn(NODE, add(store, 1, 0, payload(1, 0))) is Status.OK
        writer = store._cold if which == "cold" else store._log
        await simulation.spawn(NODE, store._checkpoint.run_between_checkpoints(partial(writer.ensure_room, 5000)))
        if which == "cold":
            await simulation.spawn(NODE, store.checkpoint())
        else:
            await simulation.spawn(NODE, store._checkpoint.commit(None, [], ()))
        caplog.clear()
        simulation.crash(NODE, power_loss=True)
        store = await open_store(simulation)
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [], seed
        assert store.descriptors.limbo_upto == -1
        simulation.crash(NODE)
