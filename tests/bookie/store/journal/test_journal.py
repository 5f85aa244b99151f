"""The journal: answers after the sync and in order; what a full disk, a failed sync and damage do; recycled files."""

import asyncio
import contextlib
import errno
import random

import pytest
from msgspec.structs import replace

from magnetar.bookie.format.journal import BLOCK_ALIGNMENT_BYTES, BLOCK_HEADER_BYTES, JOURNAL_MAGIC
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.disk import DiskOperation, FileFault
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.entries import KEY, payload_of, stored_entry
from tests.bookie.stores import DATA, NODE, SMALL, Model, add, fence, load, open_store, payload, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

JOURNAL = f"{DATA}/journal"


def put(store: Store, ledger: int, entry: int, size: int = 300) -> None:
    stored = stored_entry(ledger, entry, payload(ledger, entry, size))
    assert store.add_entry(ledger, entry, KEY, (stored,), len(stored), -1, False) is Status.OK


def journal_files(simulation: Simulation) -> list[str]:
    return [path for path in simulation.node(NODE).disk.list_paths() if path.endswith(".jnl")]


def test_answers_come_in_order_and_after_the_sync() -> None:
    events: list[str] = []

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)

        def record(operation: DiskOperation) -> None:
            if operation.kind == "fdatasync" and operation.path.startswith(JOURNAL):
                events.append("sync")

        simulation.node(NODE).disk.record = record

        async def work() -> None:
            done = asyncio.Event()
            for entry in range(40):
                put(store, 1, entry)

                def answered(ok: bool, entry: int = entry) -> None:
                    assert ok
                    events.append(str(entry))
                    if entry == 39:
                        done.set()

                store.seal_group(answered)
                if entry % 7 == 0:
                    await asyncio.sleep(0.0003)
            await done.wait()

        await simulation.spawn(NODE, work())

    simulate(main)
    assert events[0] == "sync"
    assert [int(event) for event in events if event != "sync"] == list(range(40))
    assert 1 < events.count("sync") < 40, "adds that wait share a sync"


async def test_add_is_visible_before_it_is_durable_and_gone_only_when_nobody_was_told(
    simulation: Simulation, /
) -> None:
    store = await open_store(simulation)
    put(store, 1, 0)
    assert (await simulation.spawn(NODE, store.read_entries(1, 0))).status is Status.OK
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert (await simulation.spawn(NODE, store.read_entries(1, 0))).status is Status.NO_SUCH_LEDGER


def test_failed_sync_ends_the_process_and_nobody_is_answered() -> None:
    answers: list[bool] = []

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        simulation.node(NODE).disk.faults.append(FileFault("fdatasync", ".jnl"))

        async def work() -> None:
            put(store, 1, 0)
            store.seal_group(answers.append)
            await asyncio.sleep(10)

        with pytest.raises(NodeCrashed):
            await simulation.spawn(NODE, work())
        assert not simulation.is_node_running(NODE)

    simulate(main)
    assert answers == []


def test_a_fault_while_a_block_is_answered_ends_the_process_and_what_follows_is_not_answered() -> None:
    """The call that reports the block written answers it, outside of the journal's task."""
    answers: list[bool] = []

    def faulty(ok: bool) -> None:
        raise ZeroDivisionError("a fault of ours")

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)

        async def work() -> None:
            put(store, 1, 0)
            store.seal_group(faulty)
            put(store, 1, 1)
            store.seal_group(answers.append)
            await asyncio.sleep(10)

        with pytest.raises(NodeCrashed):
            await simulation.spawn(NODE, work())
        assert not simulation.is_node_running(NODE)

    simulate(main)
    assert answers == []


async def test_a_block_begins_in_the_seal_that_finds_no_other_one_on_its_way(simulation: Simulation, /) -> None:
    store = await open_store(simulation)

    async def work() -> None:
        journal, done = store._journal, asyncio.Event()
        await store.seal_group_and_wait()
        put(store, 1, 0)
        store.seal_group(lambda ok: None)
        assert len(journal._flying) == 1, "no task is waited for"
        put(store, 1, 1)
        store.seal_group(lambda ok: done.set())
        assert len(journal._flying) == 1
        assert journal.queued_records, "this one waits for the task"
        await done.wait()
        assert not journal.queued_bytes

    await simulation.spawn(NODE, work())


def journal_operations(simulation: Simulation, kinds: tuple[str, ...]) -> list[DiskOperation]:
    """What is done to journals from now on."""
    found: list[DiskOperation] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind in kinds and operation.path.endswith(".jnl"):
            found.append(operation)

    simulation.node(NODE).disk.record = record
    return found


def test_a_block_is_written_only_behind_a_synced_one_and_waits_for_nobody_else() -> None:
    """One sync at a time; the next block goes to the disk although nobody was told of the last one."""
    order: list[str] = []

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation, replace(SMALL, journal_first_segment_bytes=64 << 10))
        found = journal_operations(simulation, ("pwrite", "fdatasync"))

        async def work() -> None:
            last = asyncio.Event()
            for entry in range(12):
                put(store, 1, entry)

                def answered(ok: bool, entry: int = entry) -> None:
                    assert ok
                    written = sum(each.kind == "pwrite" for each in found)
                    order.extend(["write"] * (written - order[order.index(f"seed {simulation.seed}") :].count("write")))
                    order.append("answer")
                    if entry == 11:
                        last.set()

                store.seal_group(answered)
                await asyncio.sleep(0.0001)
            await last.wait()

        await simulation.spawn(NODE, work())
        kinds = [each.kind for each in found]
        assert kinds == ["pwrite", "fdatasync"] * (len(kinds) // 2)
        assert [b.offset for b in found[2::2]] == [a.offset + len(a.data) for a in found[:-2:2]], "no gap"

    for seed in range(1, 6):
        order.append(f"seed {seed}")
        simulate(main, seed)
    assert "write write answer" in " ".join(order), "a block was written before the one in front of it was answered"


def test_direct_blocks_are_in_the_disk_at_once_and_answered_in_order() -> None:
    """An answer comes when all blocks up to its own are synced, also where the disk took the second one first."""
    orders: list[list[int]] = []

    async def main(simulation: Simulation) -> None:
        simulation.node(NODE).disk.takes_direct = True
        store = await open_store(simulation, replace(SMALL, journal_first_segment_bytes=64 << 10))
        found = journal_operations(simulation, ("pwrite",))
        answers: list[int] = []

        async def work() -> None:
            for entry in range(12):
                put(store, 1, entry)

                def answered(ok: bool, entry: int = entry) -> None:
                    assert ok
                    written = {each.offset: each.data for each in found}
                    whole = b""
                    while block := written.pop(BLOCK_ALIGNMENT_BYTES + len(whole), b""):
                        whole += block
                    assert payload(1, entry) in whole, "it, and all before it"
                    answers.append(entry)

                store.seal_group(answered)
                await asyncio.sleep(0.0001)
            await store.seal_group_and_wait()

        await simulation.spawn(NODE, work())
        assert answers == list(range(12))
        orders.append([each.offset for each in found])

    for seed in range(1, 8):
        simulate(main, seed)
    assert any(order != sorted(order) for order in orders), "no block was written before the one in front of it"


@pytest.mark.parametrize("direct", [False, True])
def test_a_block_behind_one_without_room_is_refused_and_never_counts(direct: bool) -> None:
    """The block that takes the place of the refused one is as long: the one behind it, written too, would follow."""
    seen: set[tuple[bool, ...]] = set()

    async def main(simulation: Simulation) -> None:
        simulation.node(NODE).disk.takes_direct = direct
        store = await open_store(simulation, replace(SMALL, journal_first_segment_bytes=64 << 10))
        answers: list[bool] = []

        async def work() -> None:
            assert await add(store, 1, 0, payload(1, 0)) is Status.OK
            simulation.node(NODE).disk.faults.append(FileFault("pwrite", ".jnl", errno.ENOSPC))
            for entry in (1, 2):
                put(store, 1, entry)
                store.seal_group(answers.append)
                for _ in range(5):
                    await asyncio.sleep(0)  # so that each goes into a block of its own
            await asyncio.sleep(0.1)
            assert len(answers) == 2
            assert await add(store, 1, 3, payload(1, 3)) is Status.OK

        await simulation.spawn(NODE, work())
        seen.add(tuple(answers))
        assert store.statistics()["journal_no_space"] == answers.count(False)
        simulation.crash(NODE, power_loss=True)
        store = await open_store(simulation)
        for entry, ok in enumerate((True, *answers, True)):
            result = await simulation.spawn(NODE, store.read_entries(1, entry))
            assert result.status is (Status.OK if ok else Status.NO_SUCH_ENTRY)

    for seed in range(1, 9):
        simulate(main, seed)
    assert (False, False) in seen
    assert seen == {(False, False), (True, False)} or not direct


@pytest.mark.parametrize(
    ("kind", "error", "direct"),
    [
        ("pwrite", errno.EIO, False),
        ("pwrite", errno.EIO, True),
        ("fdatasync", errno.EIO, False),
        ("fdatasync", errno.EIO, True),
        ("fdatasync", errno.ENOSPC, False),
    ],
)
def test_a_disk_that_fails_ends_the_process_and_nobody_is_answered(kind: str, error: int, direct: bool) -> None:
    """With two blocks on their way."""
    answers: list[bool] = []

    async def main(simulation: Simulation) -> None:
        simulation.node(NODE).disk.takes_direct = direct
        store = await open_store(simulation)
        simulation.node(NODE).disk.faults.append(FileFault(kind, ".jnl", error))

        async def work() -> None:
            for entry in range(3):
                put(store, 1, entry)
                store.seal_group(answers.append)
                await asyncio.sleep(0)
            await asyncio.sleep(10)

        with pytest.raises(NodeCrashed):
            await simulation.spawn(NODE, work())
        assert not simulation.is_node_running(NODE)

    simulate(main)
    assert answers == []


async def test_a_failed_sync_of_the_folder_of_journals_ends_the_process(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    simulation.node(NODE).disk.faults.append(FileFault("sync_directory", JOURNAL))

    async def until_a_journal_rolls() -> None:
        for entry in range(1000):
            await add(store, 1, entry, payload(1, entry))

    with pytest.raises(NodeCrashed):
        await simulation.spawn(NODE, until_a_journal_rolls())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
async def test_room_is_looked_for_by_allocating_it(simulation: Simulation, /, error: int) -> None:
    store = await open_store(simulation)
    disk = simulation.node(NODE).disk

    async def work() -> None:
        disk.faults.append(FileFault("pwrite", ".jnl", errno.ENOSPC))
        assert await add(store, 1, 0, payload(1, 0)) is Status.READ_ONLY
        disk.faults.append(FileFault("allocate", "probe", error))
        await store.room.ensure_room(0.0)
        assert store.room.no_space
        await store.room.ensure_room(0.0)
        assert not store.room.no_space

    if error == errno.ENOSPC:
        await simulation.spawn(NODE, work())
    else:
        with pytest.raises(NodeCrashed):
            await simulation.spawn(NODE, work())


@pytest.mark.parametrize("seed", range(6))
def test_a_direct_journal_keeps_what_it_acknowledged(seed: int) -> None:
    """Rolls, recycling and power losses on a disk that writes direct."""

    async def main(simulation: Simulation) -> None:
        simulation.node(NODE).disk.takes_direct = True
        model = Model()
        rng = random.Random(seed)
        for _ in range(4):
            store = await open_store(simulation)
            found = journal_operations(simulation, ("pwrite", "fdatasync"))
            work = asyncio.ensure_future(simulation.spawn(NODE, load(store, model, rng, 60)))
            await asyncio.sleep(rng.random() * 0.1)
            simulation.crash(NODE, power_loss=True)
            with contextlib.suppress(NodeCrashed):
                await work
            assert all(_padding(each.data) == bytes(len(_padding(each.data))) for each in found if each.data)
            kinds = [each.kind for each in found]
            assert kinds[: len(kinds) // 2 * 2] == ["pwrite", "fdatasync"] * (len(kinds) // 2)
        store = await open_store(simulation)
        await simulation.spawn(NODE, model.check(store))

    simulate(main, seed)


def _padding(block: bytes) -> bytes:
    """What stands behind the records of a block."""
    return block[BLOCK_HEADER_BYTES + int.from_bytes(block[32:36], "big") :]


@pytest.mark.parametrize("where", ["open", "write"])
async def test_where_direct_writes_are_refused_blocks_are_written_and_synced(
    simulation: Simulation, /, where: str
) -> None:
    disk = simulation.node(NODE).disk
    if where == "write":  # the second: the first one fills the file with zeros, not direct
        disk.takes_direct = True
        disk.faults.append(FileFault("pwrite", "filling", errno.EINVAL, skip=1))
    store = await open_store(simulation)
    syncs = journal_operations(simulation, ("fdatasync",))
    await simulation.spawn(NODE, add(store, 1, 0, payload(1, 0)))
    assert len(syncs) == 1
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert (await simulation.spawn(NODE, store.read_entries(1, 0))).status is Status.OK


async def test_a_journal_rolls_only_when_all_of_it_is_synced(simulation: Simulation, /) -> None:
    """The next one's header names the end of the last block, whatever was on its way."""
    store = await open_store(simulation)

    async def work() -> None:
        for entry in range(300):
            stored = stored_entry(1, entry, payload(1, entry, 300))
            while store.add_entry(1, entry, KEY, (stored,), len(stored), -1, False) is Status.BUSY:  # noqa: ASYNC110
                await asyncio.sleep(0.0002)  # both memtables are full
            store.seal_group(lambda ok: None)
            await asyncio.sleep(0.0002)
        await store.seal_group_and_wait()

    ends: dict[str, int] = {}
    headers: list[bytes] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "pwrite" and operation.path.endswith(".jnl"):
            ends[operation.path] = operation.offset + len(operation.data)
        elif operation.kind == "pwrite" and operation.data.startswith(JOURNAL_MAGIC):
            headers.append(operation.data)
            assert list(ends.values())[-1:] == [int.from_bytes(operation.data[36:44], "big")]

    simulation.node(NODE).disk.record = record
    await simulation.spawn(NODE, work())
    assert len(headers) >= 2


async def test_what_the_journal_does_is_in_its_histograms(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    for entry in range(5):
        await simulation.spawn(NODE, add(store, 1, entry, payload(1, entry, 3000)))
    counts = {name: sum(histogram.counts) for name, histogram in store.histograms().items() if "journal" in name}
    assert counts == {
        "journal_queue_seconds": 5, "journal_sync_seconds": 5, "journal_block_bytes": 5, "journal_block_records": 5
    }  # fmt: skip
    assert store.histograms()["journal_block_bytes"].total == 5 * BLOCK_ALIGNMENT_BYTES
    assert store.histograms()["journal_block_records"].total == 6, "five entries and a key"


async def test_full_disk_refuses_adds_loses_nothing_and_recovers(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    disk = simulation.node(NODE).disk

    async def work() -> None:
        assert await add(store, 1, 0, payload(1, 0)) is Status.OK
        fault = FileFault("pwrite", ".jnl", errno.ENOSPC, times=-1)
        disk.faults.append(fault)
        assert await add(store, 1, 1, payload(1, 1)) is Status.READ_ONLY
        assert await add(store, 2, 0, payload(2, 0)) is Status.READ_ONLY
        assert await fence(store, 3) is Status.UNKNOWN
        assert store.room.no_space
        disk.faults.remove(fault)
        assert await add(store, 2, 1, payload(2, 1)) is Status.OK
        assert await fence(store, 3) is Status.OK
        assert not store.room.no_space

    await simulation.spawn(NODE, work())
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert store.counters["replayed_records"] > 0
    for ledger, entry in ((1, 0), (2, 1)):
        result = await simulation.spawn(NODE, store.read_entries(ledger, entry))
        assert payload_of(result.entries[0]) == payload(ledger, entry)
    assert await simulation.spawn(NODE, add(store, 3, 0, b"late")) is Status.FENCED
    assert await simulation.spawn(NODE, add(store, 2, 2, b"more")) is Status.OK


async def test_full_disk_during_a_checkpoint_keeps_everything_readable_and_is_repeated(
    simulation: Simulation, /
) -> None:
    store = await open_store(simulation)
    disk = simulation.node(NODE).disk

    async def work() -> None:
        for entry in range(20):
            assert await add(store, 1, entry, payload(1, entry)) is Status.OK
        for kind, name in (("pwrite", ".log"), ("pwrite", ".idx"), ("allocate", ".log"), ("pwrite", ".lidx")):
            fault = FileFault(kind, name, errno.ENOSPC, times=-1)
            disk.faults.append(fault)
            with pytest.raises(Exception, match="No space left"):
                await store.checkpoint()
            assert store.room.no_space
            for entry in range(20):
                result = await store.read_entries(1, entry)
                assert payload_of(result.entries[0]) == payload(1, entry)
            disk.faults.remove(fault)
        await store.checkpoint()
        assert store.statistics()["checkpoints"] == 2
        for entry in range(20):
            assert payload_of((await store.read_entries(1, entry)).entries[0]) == payload(1, entry)
        store.check()

    await simulation.spawn(NODE, work())


async def test_recycled_journals_never_replay_their_stale_records(simulation: Simulation, /) -> None:
    store = await open_store(simulation)

    async def fill(ledger: int) -> None:
        for entry in range(600):
            assert await add(store, ledger, entry, payload(ledger, entry)) is Status.OK

    for ledger in range(1, 5):
        await simulation.spawn(NODE, fill(ledger))
    await simulation.spawn(NODE, store.delete_ledgers([1, 2, 3, 4]))
    await simulation.spawn(NODE, store.checkpoint())
    assert store.statistics()["journal_recycled"] > 0
    await simulation.spawn(NODE, add(store, 9, 0, b"new"))
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert 1 <= store.counters["replayed_records"] <= 3, "only the key and the entry of ledger 9"
    assert list(store.descriptors.ledger_ids()) == [9]


async def _journal_with_blocks(simulation: Simulation, blocks: int) -> tuple[str, list[int]]:
    """A journal file that was not checkpointed, and where its blocks begin."""
    store = await open_store(simulation, replace(SMALL, journal_first_segment_bytes=64 << 10))
    offsets: list[int] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "pwrite" and operation.path.endswith(".jnl"):
            offsets.append(operation.offset)

    simulation.node(NODE).disk.record = record
    for entry in range(blocks):
        await simulation.spawn(NODE, add(store, 1, entry, payload(1, entry)))
    simulation.crash(NODE)
    return journal_files(simulation)[-1], offsets


async def test_torn_tail_is_cut_and_counted(simulation: Simulation, /) -> None:
    path, offsets = await _journal_with_blocks(simulation, 5)
    simulation.node(NODE).disk.flip_bit(path, offsets[-1] + 200)
    store = await open_store(simulation)
    assert store.counters["torn_bytes"] == BLOCK_ALIGNMENT_BYTES
    for entry in range(4):
        assert (await simulation.spawn(NODE, store.read_entries(1, entry))).status is Status.OK
    assert (await simulation.spawn(NODE, store.read_entries(1, 4))).status is Status.NO_SUCH_ENTRY
    await simulation.spawn(NODE, add(store, 1, 4, b"again"))
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert payload_of((await simulation.spawn(NODE, store.read_entries(1, 4))).entries[0]) == b"again"
