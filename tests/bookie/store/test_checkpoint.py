"""The checkpoint: its order in real syncs, no gap for readers, what a failed one leaves (ledger protocol §2.4)."""

import asyncio
import errno
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.bookie.format.index import EXTENT_HEAD_BYTES, GROUP_HEADER_BYTES
from magnetar.bookie.format.journal import FILE_HEADER_BYTES
from magnetar.bookie.store import checkpoint, memtable
from magnetar.bookie.store.disk import NoSpace
from magnetar.bookie.store.entrylog import files as log_files
from magnetar.bookie.store.entrylog import writer
from magnetar.bookie.store.store import CHECKPOINT_RETRY_S, Store
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.disk import DiskOperation, FileFault
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.entries import payload_of
from tests.bookie.stores import DATA, NODE, SMALL, UUID, add, fence, open_store, payload, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

_DURABLE = ("fdatasync", "sync_directory", "rename", "remove")


async def fill(store: Store, ledger: int, entries: range, size: int = 300) -> None:
    for entry in entries:
        assert await add(store, ledger, entry, payload(ledger, entry, size)) is Status.OK


def test_the_steps_stand_in_the_order_of_the_protocol() -> None:
    assert tuple(step.__name__ for step in checkpoint.CHECKPOINT_STEPS) == (
        "capture_position",
        "swap_memtable",
        "write_entries",
        "write_index",
        "write_ledgers",
        "write_mark",
        "publish",
        "release_journals",
    )


def test_real_syncs_follow_the_order() -> None:
    events: list[str] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind in _DURABLE:
            name = operation.path.removeprefix(DATA + "/").replace("0", "")
            events.append(f"{operation.kind} {name}" + (" to mark" if operation.target.endswith("/mark") else ""))

    async def main(simulation: Simulation) -> None:
        big = 1 << 20  # no other checkpoint and no new segment meanwhile
        config = replace(
            SMALL, memtable_bytes=big, journal_bytes=big, journal_segment_bytes=big, log_bytes_max=16 * big
        )
        store = await open_store(simulation, replace(config, journal_first_segment_bytes=big))
        await simulation.spawn(NODE, fill(store, 1, range(30)))
        await simulation.spawn(NODE, store.checkpoint())
        await simulation.spawn(NODE, fill(store, 1, range(30, 60)))
        simulation.node(NODE).disk.record = record
        await simulation.spawn(NODE, store.checkpoint())
        simulation.node(NODE).disk.record = None

    simulate(main)
    assert events == [
        "fdatasync entries/1.log",
        "fdatasync entries/1.idx",
        "fdatasync ledgers/1.lidx",
        "fdatasync mark.tmp",
        "rename mark.tmp to mark",
        "sync_directory /data/bookie",
    ]


def test_entries_of_a_deleted_ledger_are_written_once_alone_to_the_journal() -> None:
    written: list[bytes] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "pwrite" and operation.path.endswith(".log"):
            written.append(operation.data)

    async def main(simulation: Simulation) -> None:
        big = 1 << 20  # no other checkpoint meanwhile
        config = replace(SMALL, memtable_bytes=big, journal_bytes=big, log_bytes_max=16 * big)
        store = await open_store(simulation, config)
        for ledger in (1, 2):
            await simulation.spawn(NODE, fill(store, ledger, range(30)))
        assert await simulation.spawn(NODE, store.delete_ledgers([1]))
        simulation.node(NODE).disk.record = record
        await simulation.spawn(NODE, store.checkpoint())
        simulation.node(NODE).disk.record = None

    simulate(main)
    whole = b"".join(written)
    assert [payload(ledger, 7, 300) in whole for ledger in (1, 2)] == [False, True]


def test_journals_go_only_after_the_mark_is_durable() -> None:
    events: list[str] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "sync_directory" and operation.path == DATA:
            events.append("mark")
        if operation.kind in ("rename", "remove") and operation.path.endswith(".jnl"):
            events.append("release")

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        await simulation.spawn(NODE, fill(store, 1, range(60)))
        simulation.node(NODE).disk.record = record
        await simulation.spawn(NODE, store.checkpoint())

    simulate(main)
    assert events[0] == "mark"
    assert "release" in events


async def test_failed_mark_deletes_no_journal_and_stops_the_process(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    await simulation.spawn(NODE, fill(store, 1, range(60)))
    disk = simulation.node(NODE).disk
    journals = [path for path in disk.list_paths() if path.endswith(".jnl")]
    disk.faults.append(FileFault("fdatasync", "mark.tmp"))
    with pytest.raises(NodeCrashed):
        await simulation.spawn(NODE, store.checkpoint())
    assert [path for path in disk.list_paths() if path.endswith(".jnl")] == journals
    store = await open_store(simulation)
    for entry in range(60):
        assert (await simulation.spawn(NODE, store.read_entries(1, entry))).status is Status.OK


def test_readers_find_every_entry_at_every_moment_of_a_flush() -> None:
    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        simulation.node(NODE).disk_delays.mean_s = 0.003
        finished = asyncio.Event()
        known: list[int] = []
        reads = 0

        async def read_what_was_just_added() -> None:
            nonlocal reads
            while not finished.is_set():
                results = await asyncio.gather(*[store.read_entries(1, entry) for entry in known[-20:]])
                assert {result.status for result in results} <= {Status.OK}
                reads += len(results)
                await asyncio.sleep(0.0001)

        async def add_and_flush() -> None:
            for entry in range(60):
                await fill(store, 1, range(entry, entry + 1))
                known.append(entry)
                if entry % 10 == 9:
                    await store.checkpoint()
            finished.set()

        reader = simulation.spawn(NODE, read_what_was_just_added())
        await simulation.spawn(NODE, add_and_flush())
        await reader
        assert reads > 1000

    simulate(main)


def test_a_flush_that_lags_writes_many_slices_before_it_waits_for_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each step of the flush adds come: first fewer bytes than it takes, then more."""
    at_once: list[int] = []
    take_next_slices = writer.MemtableFlush.take_next_slices

    async def main(simulation: Simulation) -> None:
        big = 1 << 20
        config = replace(SMALL, memtable_bytes=big, journal_bytes=16 * big, log_bytes_max=16 * big)
        store = await open_store(simulation, config)
        await simulation.spawn(NODE, fill(store, 1, range(300)))

        def come(flush: writer.MemtableFlush, count: int) -> list[list[bytes]]:
            at_once.append(count)
            size = 1000 if len(at_once) < 10 else big // 3
            store.memtable.active.size_bytes += size  # as adds of many clients do
            return take_next_slices(flush, count)

        monkeypatch.setattr(writer, "APPEND_SLICE_BYTES", 1 << 11)
        monkeypatch.setattr(writer, "ENCODE_PIECE_BYTES", 1 << 10)
        monkeypatch.setattr(writer.MemtableFlush, "take_next_slices", come)
        await simulation.spawn(NODE, store.checkpoint())
        for entry in (0, 150, 299):
            assert (await simulation.spawn(NODE, store.read_entries(1, entry))).status is Status.OK

    simulate(main)
    few, many = at_once[:10], at_once[11:]
    assert set(few) == {1}
    assert checkpoint.LAGGING_SLICES_PER_TURN in many
    assert len(many) < len(few), "the rest takes fewer turns"


async def test_the_memory_of_a_flush_goes_in_slices_between_the_turns_of_the_loop(
    simulation: Simulation, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = replace(SMALL, memtable_bytes=4 << 20, journal_bytes=64 << 20, log_bytes_max=16 << 20)
    store = await open_store(simulation, large)
    await simulation.spawn(NODE, fill(store, 1, range(3000), size=1))
    entries = store.memtable.active.ledgers[1]
    left = [len(entries)]
    begins = asyncio.Event()

    def release(values: dict[int, Any]) -> Iterator[None]:
        begins.set()
        return memtable.clear_in_steps(values)

    monkeypatch.setattr(checkpoint, "clear_in_steps", release)

    async def watch() -> None:
        await begins.wait()
        while left[-1]:
            await asyncio.sleep(0)
            left.append(len(entries))

    await asyncio.gather(simulation.spawn(NODE, store.checkpoint()), watch())
    assert left[0] == 3000
    assert max(before - after for before, after in pairwise(left)) <= 2 * memtable.ENTRIES_RELEASED_PER_SLICE
    await simulation.spawn(NODE, store.close())


async def test_fence_of_an_idle_ledger_survives_checkpoint_and_power_loss(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    await simulation.spawn(NODE, fill(store, 1, range(3)))
    await simulation.spawn(NODE, store.checkpoint())
    assert await simulation.spawn(NODE, fence(store, 1)) is Status.OK
    assert await simulation.spawn(NODE, fence(store, 2)) is Status.OK
    await simulation.spawn(NODE, store.checkpoint())
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert store.counters["replayed_records"] == 0, "the journal was not needed"
    for ledger in (1, 2):
        assert await simulation.spawn(NODE, add(store, ledger, 3, b"late")) is Status.FENCED
        assert await simulation.spawn(NODE, add(store, ledger, 3, b"recovered", recovery=True)) is Status.OK


async def test_lac_and_last_entry_survive_checkpoint_and_restart(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    for entry in range(5):
        await simulation.spawn(NODE, add(store, 1, entry, b"x", lac=entry - 1))
    await simulation.spawn(NODE, store.checkpoint())
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert store.read_lac(1) == (Status.OK, 3, 4)
    assert store.read_lac(2) == (Status.NO_SUCH_LEDGER, -1, -1)


async def test_flipped_bit_in_log_or_index_is_unknown_and_never_no_such_entry(simulation: Simulation, /) -> None:
    disk = simulation.node(NODE).disk
    config = replace(SMALL, read_cache_bytes=0, index_cache_bytes=0)
    store = await open_store(simulation, config)
    await simulation.spawn(NODE, fill(store, 1, range(10)))
    await simulation.spawn(NODE, store.checkpoint())
    extent = next(log_files.read_extents(simulation.world(NODE).files, f"{DATA}/entries", 1, UUID, None))[0]
    record = extent.length // 10
    log = next(path for path in disk.list_paths() if path.endswith(".log"))
    for at in (0, 5, 9, 20, 43, 60, record - 1):
        disk.flip_bit(log, extent.start + 4 * record + at)
        assert (await simulation.spawn(NODE, store.read_entries(1, 4))).status is Status.UNKNOWN
        result = await simulation.spawn(NODE, store.read_entries(1, 0, count=10, bytes_max=1 << 20))
        assert [payload_of(entry) for entry in result.entries] == [payload(1, entry) for entry in range(4)]
        disk.flip_bit(log, extent.start + 4 * record + at)
    index = next(path for path in disk.list_paths() if path.endswith(".idx"))
    end = FILE_HEADER_BYTES + GROUP_HEADER_BYTES + EXTENT_HEAD_BYTES + extent.table_bytes
    for at in range(FILE_HEADER_BYTES + GROUP_HEADER_BYTES, end, 7):  # every field of head and table
        disk.flip_bit(index, at)
        assert (await simulation.spawn(NODE, store.read_entries(1, 9))).status is Status.UNKNOWN
        disk.flip_bit(index, at)
    disk.faults.append(FileFault("pread", ".log", errno.EIO, times=1))
    assert (await simulation.spawn(NODE, store.read_entries(1, 3))).status is Status.UNKNOWN
    assert (await simulation.spawn(NODE, store.read_entries(1, 3))).status is Status.OK
    assert (await simulation.spawn(NODE, store.read_entries(1, 10))).status is Status.NO_SUCH_ENTRY


def test_a_range_is_one_read_and_stops_at_gaps_and_bounds() -> None:
    preads: list[int] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "pread" and operation.path.endswith(".log"):
            preads.append(operation.size)

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        await simulation.spawn(NODE, fill(store, 1, range(20)))
        await simulation.spawn(NODE, fill(store, 1, range(30, 40)))
        await simulation.spawn(NODE, store.checkpoint())
        simulation.node(NODE).disk.record = record
        result = await simulation.spawn(NODE, store.read_entries(1, 5, count=100, bytes_max=1 << 20))
        assert [payload_of(entry) for entry in result.entries] == [payload(1, entry) for entry in range(5, 20)]
        assert len(preads) == 1
        result = await simulation.spawn(NODE, store.read_entries(1, 5, count=100, bytes_max=1000))
        assert len(result.entries) == 3, "about bytes_max"
        result = await simulation.spawn(NODE, store.read_entries(1, 30, count=2, bytes_max=1 << 20))
        assert len(result.entries) == 2
        result = await simulation.spawn(NODE, store.read_entries(1, 20, count=2, bytes_max=1 << 20))
        assert result.status is Status.NO_SUCH_ENTRY

    simulate(main)


async def test_single_reads_read_ahead(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    await simulation.spawn(NODE, fill(store, 1, range(20)))
    await simulation.spawn(NODE, store.checkpoint())
    for entry in range(20):
        result = await simulation.spawn(NODE, store.read_entries(1, entry))
        assert payload_of(result.entries[0]) == payload(1, entry)
    assert store.statistics()["reads_disk"] < 6
    store.check()


async def test_logs_roll_and_memory_stays_bounded(simulation: Simulation, /) -> None:
    config = replace(SMALL, memtable_bytes=16 << 10, log_bytes_max=(8 << 20) + (32 << 10))
    store = await open_store(simulation, config)
    object.__setattr__(store._log, "_log_bytes_max", 64 << 10)

    async def work() -> None:
        for entry in range(400):
            assert await add(store, 1, entry, payload(1, entry, 700)) is Status.OK
            assert store.memtable.size_bytes <= 3 * config.memtable_bytes
        for entry in range(400):
            assert payload_of((await store.read_entries(1, entry)).entries[0]) == payload(1, entry, 700)
        store.check()

    await simulation.spawn(NODE, work())
    assert len(store.index.log_numbers()) > 3


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("name", [".jnl", ".lidx", ""])
async def test_a_process_without_a_free_descriptor_is_no_broken_disk(
    simulation: Simulation, /, name: str, error: int
) -> None:
    """It is busy for a while; what it acknowledged is there, and it goes on when files open again."""
    config = replace(SMALL, journal_bytes=64 << 10)
    store = await open_store(simulation, config)
    acknowledged: dict[int, bytes] = {}

    async def adds(entries: range) -> None:
        for entry in entries:
            if await add(store, 1, entry, payload(1, entry, 700)) is Status.OK:
                acknowledged[entry] = payload(1, entry, 700)

    await simulation.spawn(NODE, adds(range(50)))
    fault = FileFault("open", name, error, times=20)
    simulation.node(NODE).disk.faults.append(fault)
    await simulation.spawn(NODE, adds(range(50, 400)))
    assert fault.times < 20
    fault.times = 0

    async def after() -> None:
        await asyncio.sleep(2 * CHECKPOINT_RETRY_S)
        assert not store.room.no_space
        await adds(range(1000, 1100))
        assert set(range(1000, 1100)) <= acknowledged.keys()
        for entry, data in acknowledged.items():
            assert payload_of((await store.read_entries(1, entry)).entries[0]) == data
        store.check()

    await simulation.spawn(NODE, after())
    assert simulation.is_node_running(NODE)


async def test_work_that_fails_unforeseen_ends_the_process_and_loses_nothing(simulation: Simulation, /) -> None:
    for fault in (FileFault("rename", ".jnl", errno.EACCES), FileFault("open", ".lidx", errno.EIO)):
        store = await open_store(simulation)
        simulation.node(NODE).disk.faults.append(fault)
        with pytest.raises(NodeCrashed):
            await simulation.spawn(NODE, fill(store, 1, range(200)))
        assert not simulation.is_node_running(NODE)
        assert fault.times == 0


@pytest.mark.parametrize("refused", range(6))
def test_one_write_of_a_flush_that_finds_no_room_leaves_every_entry_also_after_a_crash(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes after it succeed: a flush that looks at its last one alone would name bytes that are not there."""
    monkeypatch.setattr(writer, "APPEND_SLICE_BYTES", 1 << 11)
    monkeypatch.setattr(writer, "ENCODE_PIECE_BYTES", 1 << 10)

    async def main(simulation: Simulation) -> None:
        config = replace(SMALL, memtable_bytes=1 << 20, journal_bytes=16 << 20, log_bytes_max=16 << 20)
        store = await open_store(simulation, config)
        await simulation.spawn(NODE, fill(store, 1, range(24), size=1000))
        disk = simulation.node(NODE).disk
        disk.faults = [FileFault("pwrite", ".log", errno.ENOSPC, skip=refused, times=1)]
        with pytest.raises(NoSpace):
            await simulation.spawn(NODE, store.checkpoint())
        assert not disk.faults[0].times, "the fault came"
        await whole(simulation, store)
        await simulation.spawn(NODE, store.checkpoint())
        await whole(simulation, store)
        simulation.crash(NODE, power_loss=True)
        await whole(simulation, await open_store(simulation, config))

    async def whole(simulation: Simulation, store: Store) -> None:
        for entry in range(24):
            found = await simulation.spawn(NODE, store.read_entries(1, entry))
            assert found.status is Status.OK
            assert payload_of(found.entries[0]) == payload(1, entry, 1000)

    simulate(main)
