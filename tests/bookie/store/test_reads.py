"""Reading: ranges that are read ahead, what ends that, and that no entry is missed while it moves from log to log."""

import asyncio
import errno
import random

import pytest
from msgspec.structs import replace

from magnetar.bookie.format.entry_log import RECORD_HEADER_BYTES
from magnetar.bookie.store.entrylog import files as log_files
from magnetar.bookie.store.index import LoadedIndexGroup
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import ENTRY_HEADER_STRUCT, Status
from magnetar.runtime.files import DIRECT_ALIGNMENT
from magnetar.runtime.sim.disk import DiskOperation, FileFault, SimFile
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import payload_of
from tests.bookie.stores import DATA, NODE, SMALL, UUID, add, open_store, payload, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

AHEAD = replace(
    SMALL, read_cache_bytes=64 << 10, read_chunk_bytes=4 << 10, index_cache_bytes=32 << 10,
    memtable_bytes=64 << 10, journal_bytes=1 << 20, log_bytes_max=9 << 20,
)  # fmt: skip
ENTRIES = f"{DATA}/entries"


async def fill(store: Store, ledger: int, entries: range, size: int = 300) -> None:
    for entry in entries:
        assert await add(store, ledger, entry, payload(ledger, entry, size)) is Status.OK


async def read_on(store: Store, ledger: int, first: int, last: int, bytes_max: int) -> list[bytes]:
    """As the ledger library reads: all that is left is asked for, about `bytes_max` comes."""
    found: list[bytes] = []
    while first + len(found) <= last:
        result = await store.read_entries(ledger, first + len(found), last + 1 - first - len(found), bytes_max)
        assert result.status is Status.OK
        assert len(result.entries) >= 1
        found += map(payload_of, result.entries)
        store.check()
        assert store.statistics()["read_cache_bytes"] <= 2 * store._reads._cache.bytes_max
    return found


async def test_who_reads_on_finds_it_read_ahead(simulation: Simulation, /) -> None:
    store = await open_store(simulation, AHEAD)
    for first in range(0, 400, 100):  # four extents
        await simulation.spawn(NODE, fill(store, 1, range(first, first + 100)))
        await simulation.spawn(NODE, store.checkpoint())
    found = await simulation.spawn(NODE, read_on(store, 1, 0, 399, 1500))
    assert found == [payload(1, entry) for entry in range(400)]
    counted = store.statistics()
    assert counted["reads_disk"] < counted["reads_ahead"] / 10
    assert counted["read_entries"] == 400


async def test_one_answer_has_several_chunks_when_they_are_there(simulation: Simulation, /) -> None:
    """A reader that is late gets all that it asked for: an answer a chunk would cost it a turn of its loop each."""
    store = await open_store(simulation, AHEAD)
    await simulation.spawn(NODE, fill(store, 1, range(100)))
    await simulation.spawn(NODE, store.checkpoint())
    await simulation.spawn(NODE, read_on(store, 1, 0, 9, 1500))
    first = await simulation.spawn(NODE, store.read_entries(1, 10, 90, 1500))
    await asyncio.sleep(1)
    at = 10 + len(first.entries)
    result = store.read_from_memory(1, at, 100 - at, 9_000)
    assert result is not None
    assert result.status is Status.OK
    assert 9_000 <= sum(map(len, result.entries)) < 9_000 + 4 * 1024, "more than two chunks of 4 KiB"
    assert [payload_of(entry) for entry in result.entries] == [
        payload(1, entry) for entry in range(at, at + len(result.entries))
    ]
    store.check()


async def test_the_table_of_the_next_extent_is_there_before_its_entries_are_wanted(simulation: Simulation, /) -> None:
    store = await open_store(simulation, AHEAD)
    for first in (0, 100):
        await simulation.spawn(NODE, fill(store, 1, range(first, first + 100)))
        await simulation.spawn(NODE, store.checkpoint())
    await simulation.spawn(NODE, store.read_entries(1, 0, 200, 1500))
    await simulation.spawn(NODE, asyncio.sleep(1))
    places = store.index.find_extents(1, 100)
    assert places is not None
    assert store.index.get_extent_table(places[0]) is not None


LARGE = replace(
    AHEAD, memtable_bytes=4 << 20, journal_bytes=16 << 20, journal_segment_bytes=1 << 20, log_bytes_max=16 << 20,
    read_cache_bytes=8 << 20, read_chunk_bytes=512 << 10, journal_queue_bytes_max=8 << 20,
)  # fmt: skip


@pytest.mark.parametrize("refused", [None, "open", "pread"])
async def test_large_reads_go_past_the_page_cache_and_small_ones_do_not(
    simulation: Simulation, /, refused: str | None
) -> None:
    """Direct reads are whole blocks; where the file system does not do them, all are as long as what was asked for."""
    disk = simulation.node(NODE).disk
    disk.takes_direct = refused != "open"
    store = await open_store(simulation, LARGE)
    await simulation.spawn(NODE, fill(store, 1, range(100), 30_000))
    await simulation.spawn(NODE, store.checkpoint())
    reads: list[DiskOperation] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "pread" and operation.path.endswith(".log"):
            reads.append(operation)

    disk.record = record
    if refused == "pread":
        disk.faults.append(FileFault("pread", ".log", errno.EINVAL, times=1))  # of those that read, one is told
    found = await simulation.spawn(NODE, read_on(store, 1, 0, 99, 300_000))
    assert found == [payload(1, entry, 30_000) for entry in range(100)]
    large = [read for read in reads if read.size >= log_files.DIRECT_READ_BYTES_MIN]
    assert len(large) >= 5
    assert all(read.size <= LARGE.read_chunk_bytes + 40_000 for read in large)
    direct = [read for read in large if read.offset % DIRECT_ALIGNMENT == read.size % DIRECT_ALIGNMENT == 0]
    told = {None: 0, "open": len(large), "pread": 1}[refused]
    assert len(large) - len(direct) == told
    reads.clear()
    result = await simulation.spawn(NODE, store.read_entries(1, 50))
    assert payload_of(result.entries[0]) == payload(1, 50, 30_000)
    assert [read.size for read in reads] == [ENTRY_HEADER_STRUCT.size + RECORD_HEADER_BYTES + 30_000]
    await simulation.spawn(NODE, store.close())


async def test_a_log_that_goes_is_closed_by_all_that_read(simulation: Simulation, /) -> None:
    simulation.node(NODE).disk.takes_direct = True
    opened: list[SimFile] = []
    store = await open_store(simulation, LARGE)
    await simulation.spawn(NODE, fill(store, 1, range(100), 30_000))
    await simulation.spawn(NODE, store.checkpoint())
    files = store._reads._reader._files
    really_open = files.open

    def open_(path: str, **how: bool) -> SimFile:
        opened.append(really_open(path, **how))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open", open_)
        await simulation.spawn(NODE, read_on(store, 1, 0, 99, 300_000))
    assert len(opened) >= 3
    await simulation.spawn(NODE, store._reads.close_log(1))
    assert all(file._closed for file in opened)


@pytest.mark.parametrize("seed", range(12))
def test_readers_beside_each_other_get_what_was_stored(seed: int) -> None:
    """Ranges, single entries, gaps, misses; more readers than there is room for; flushes in between."""

    async def main(simulation: Simulation) -> None:
        rng = random.Random(seed)
        read_cache, index_cache = rng.choice((0, 6 << 10, 64 << 10)), rng.choice((0, 3 << 10, 64 << 10))
        config = replace(AHEAD, read_cache_bytes=read_cache, index_cache_bytes=index_cache)
        store = await open_store(simulation, config)
        step = rng.choice((1, 1, 3))
        numbers = [(ledger, entry) for ledger in (1, 2, 3) for entry in range(0, 150 * step, step)]
        stored = {each for each in numbers if rng.random() < 0.97}

        async def write() -> None:
            for number, (ledger, entry) in enumerate(sorted(stored, key=lambda each: (each[1], each[0]))):
                assert await add(store, ledger, entry, payload(ledger, entry, 200)) is Status.OK
                if number % 70 == 69:
                    await store.checkpoint()

        async def reader(number: int) -> None:
            at = random.Random(seed << 8 | number)
            ledger, entry = at.randint(1, 3), 0
            for _ in range(60):
                count, bytes_max = at.choice((1, 2, 5, 1000)), at.choice((0, 700, 3000))
                result = store.read_from_memory(ledger, entry, count, bytes_max) if at.random() < 0.3 else None
                if result is None:
                    result = await store.read_entries(ledger, entry, count, bytes_max)
                if (ledger, entry) not in stored:
                    assert result.status is Status.NO_SUCH_ENTRY
                    entry += 1
                    continue
                assert result.status is Status.OK
                assert 1 <= len(result.entries) <= count
                for i, each in enumerate(result.entries):
                    assert payload_of(each) == payload(ledger, entry + i, 200)
                entry = (entry + len(result.entries) if at.random() < 0.9 else at.randrange(150)) % (150 * step)
            store.check()

        await simulation.spawn(NODE, write())

        async def readers() -> None:
            await asyncio.gather(*map(reader, range(9)), store.checkpoint())

        await simulation.spawn(NODE, readers())

    simulate(main, seed)


async def test_reading_ahead_ends_at_damage_which_is_unknown_and_nothing_else_is(simulation: Simulation, /) -> None:
    store = await open_store(simulation, AHEAD)
    await simulation.spawn(NODE, fill(store, 1, range(40)))
    await simulation.spawn(NODE, store.checkpoint())
    extent = next(log_files.read_extents(simulation.world(NODE).files, ENTRIES, 1, UUID, None))[0]
    assert extent.entries == 40
    disk = simulation.node(NODE).disk
    disk.flip_bit(f"{ENTRIES}/{log_files.entry_log_file_name(1)}", extent.start + 20 * (extent.length // 40) + 100)
    found = await simulation.spawn(NODE, read_on(store, 1, 0, 19, 1500))
    assert found == [payload(1, entry) for entry in range(20)]
    assert store.statistics()["reads_ahead"] > 0
    result = await simulation.spawn(NODE, store.read_entries(1, 20, 10, 1500))
    assert result.status is Status.UNKNOWN
    assert await simulation.spawn(NODE, read_on(store, 1, 21, 39, 1500)) == [payload(1, e) for e in range(21, 40)]


async def test_an_error_while_reading_ahead_costs_a_second_try_and_no_answer(simulation: Simulation, /) -> None:
    store = await open_store(simulation, AHEAD)
    await simulation.spawn(NODE, fill(store, 1, range(60)))
    await simulation.spawn(NODE, store.checkpoint())
    first = await simulation.spawn(NODE, store.read_entries(1, 0, 60, 1500))
    assert len(first.entries) < 10
    simulation.node(NODE).disk.faults.append(FileFault("pread", ".log", errno.EIO, times=1))
    await simulation.spawn(NODE, asyncio.sleep(1))
    rest = await simulation.spawn(NODE, read_on(store, 1, len(first.entries), 59, 1500))
    assert rest == [payload(1, entry) for entry in range(len(first.entries), 60)]
    assert simulation.node(NODE).disk.faults[-1].times == 0


@pytest.mark.parametrize("name", [".log", ".idx"])
@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
async def test_a_read_that_finds_no_descriptor_free_is_busy_and_no_entry_counts_as_damaged(
    simulation: Simulation, /, name: str, error: int
) -> None:
    store = await open_store(simulation)
    await simulation.spawn(NODE, fill(store, 1, range(20)))
    await simulation.spawn(NODE, store.checkpoint())
    simulation.crash(NODE)
    store = await open_store(simulation)
    fault = FileFault("open", name, error, times=1000)
    simulation.node(NODE).disk.faults.append(fault)
    result = await simulation.spawn(NODE, store.read_entries(1, 5))
    assert result.status is Status.BUSY
    with pytest.raises(OSError, match=f"Errno {error}"):
        await simulation.spawn(NODE, store.verify_entry(1, 5))
    if name == ".idx":
        assert not len(await simulation.spawn(NODE, store.find_stored_entries(1, 0, 19))), "as far as it is known"
    fault.times = 0
    result = await simulation.spawn(NODE, store.read_entries(1, 5))
    assert payload_of(result.entries[0]) == payload(1, 5)
    assert await simulation.spawn(NODE, store.verify_entry(1, 5)) is Status.OK
    counters = store.statistics()
    assert (counters["damaged"], counters["reads_unknown"], counters["reads_busy"]) == (0, 0, 1)


async def test_what_was_read_ahead_of_a_deleted_ledger_is_not_served(simulation: Simulation, /) -> None:
    store = await open_store(simulation, AHEAD)
    await simulation.spawn(NODE, fill(store, 1, range(60)))
    await simulation.spawn(NODE, store.checkpoint())
    first = await simulation.spawn(NODE, store.read_entries(1, 0, 60, 1500))
    reading = simulation.spawn(NODE, store.read_entries(1, len(first.entries), 50, 1500))
    await simulation.spawn(NODE, store.delete_ledgers([1]))
    assert (await reading).status in (Status.OK, Status.NO_SUCH_LEDGER)
    assert (await simulation.spawn(NODE, store.read_entries(1, 20, 5, 1500))).status is Status.NO_SUCH_LEDGER
    assert (await simulation.spawn(NODE, store.read_entries(1, len(first.entries), 5))).status is Status.NO_SUCH_LEDGER


async def test_an_entry_that_moves_while_it_is_looked_for_is_found(simulation: Simulation, /) -> None:
    """The move is one step between two looks: the log that was asked is gone, the other was not there before."""
    store = await open_store(simulation, replace(SMALL, read_cache_bytes=0, index_cache_bytes=0))
    await simulation.spawn(NODE, fill(store, 1, range(5)))
    await simulation.spawn(NODE, store.checkpoint())
    files = simulation.world(NODE).files
    extents = next(log_files.read_extents(files, ENTRIES, 1, UUID, None))
    for log in range(1, 25):
        for name in (log_files.entry_log_file_name, log_files.entry_log_index_file_name):
            old = files.open(f"{ENTRIES}/{name(log)}", write=False)
            files.open(f"{ENTRIES}/{name(log + 1)}", create=True).pwrite([old.pread(old.size(), 0)], 0)
        reading = simulation.spawn(NODE, store.read_entries(1, 3))
        await simulation.spawn(NODE, asyncio.sleep(log / 8000))
        store.index.add_group(LoadedIndexGroup(log + 1, 64, extents), [log])
        store._reads._reader.close_log(log)
        log_files.remove_log_files(files, ENTRIES, log)
        result = await reading
        assert result.status is Status.OK
        assert payload_of(result.entries[0]) == payload(1, 3)
    missing = simulation.spawn(NODE, store.read_entries(1, 7))
    assert (await missing).status is Status.NO_SUCH_ENTRY
