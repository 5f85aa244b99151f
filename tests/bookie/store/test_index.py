"""The index against a dictionary: groups come, logs go, pages are loaded by need into a cache with a bound."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.bookie.format import entry_log
from magnetar.bookie.format import index as index_format
from magnetar.bookie.format.index import EXTENT_HEAD_BYTES, GROUP_HEADER_BYTES, HEADS_PER_PAGE, Extent, ExtentTable
from magnetar.bookie.format.journal import FILE_HEADER_BYTES, DamagedFile, FileHeader, encode_file_header
from magnetar.bookie.store.entrylog import files as log_files
from magnetar.bookie.store.entrylog.files import EntryLogReader, entry_log_file_name, entry_log_index_file_name
from magnetar.bookie.store.index import (
    EntryLogIndex,
    ExtentLocation,
    IndexPage,
    LedgerExtents,
    LoadedIndexGroup,
    LruCache,
    find_record_number,
    find_run_end,
)
from magnetar.bookie.store.reads import EntrySearch
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import log_record, stored_entry
from tests.bookie.stores import NODE, UUID, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

FOLDER = "/entries"
CACHE = 4 << 10


# ---------------------------------------------------------------------------------------- pure parts
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=60), st.integers(0, 200))
def test_lru_keeps_the_latest_that_fit(puts: list[tuple[int, int]], bytes_max: int) -> None:
    cache: LruCache[int, int] = LruCache(bytes_max)
    kept: dict[int, int] = {}
    for key, size in puts:
        cache.put(key, size, size)
        kept.pop(key, None)
        kept[key] = size
        while sum(kept.values()) > bytes_max:
            del kept[next(iter(kept))]
        cache.check()
        assert [key for key in range(10) if key in cache] == sorted(kept)
        probe = key % 3
        assert cache.get(probe) == kept.get(probe)
        if probe in kept:
            kept[probe] = kept.pop(probe)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=25, unique=True).map(sorted),
    st.lists(st.integers(1, 9), min_size=25, max_size=25),
    st.integers(1, 30), st.integers(1, 99), st.data(),
)  # fmt: skip
def test_a_run_ends_at_a_gap_the_count_or_the_bytes(
    entries: list[int], sizes: list[int], count: int, bytes_max: int, data: st.DataObject
) -> None:
    offsets = [sum(sizes[:i]) for i in range(len(entries) + 1)]
    extent, packed = index_format.encode_extent(7, entries, offsets, 4096)
    table = index_format.decode_table_if_intact(extent, packed)
    assert isinstance(table, ExtentTable)
    first = data.draw(st.integers(0, len(entries) - 1))
    assert find_record_number(ExtentLocation(1, extent, 0), table, entries[first]) == first
    expected = first + 1
    while (
        expected < min(first + count, len(entries))
        and entries[expected] == entries[expected - 1] + 1
        and offsets[expected] - offsets[first] < bytes_max
    ):
        expected += 1
    assert find_run_end(table, first, count, bytes_max) == expected


def test_columns_are_the_fields_of_the_heads() -> None:
    extents = [Extent(1 << 40 | n, n, n, n + 1, 9, 1 << 35, 5) for n in range(130)]
    heads = index_format.encode_extent_heads(extents)
    columns = index_format.decode_head_columns(heads)
    assert list(columns.ledgers) == [extent.ledger for extent in extents]
    assert list(columns.entries) == [extent.entries for extent in extents]
    assert list(index_format.decode_extent_heads(heads)) == extents


def test_a_group_fed_in_slices_is_the_same_and_must_ascend() -> None:
    extents = [Extent(n // 3, n, n, 1 + n % 5, 9, 4096, 5) for n in range(5 * HEADS_PER_PAGE + 7)]
    whole, fed = LoadedIndexGroup(1, 64, extents), LoadedIndexGroup.start_empty(1, 64, len(extents))
    for first in range(0, len(extents), 2 * HEADS_PER_PAGE):
        fed.add_extent_heads(index_format.encode_extent_heads(extents[first : first + 2 * HEADS_PER_PAGE]))
    assert [fed.pages.get_page(i) for i in range(6)] == [whole.pages.get_page(i) for i in range(6)]
    assert fed.ledgers == whole.ledgers
    assert (
        fed.end_offset
        == whole.end_offset
        == 64 + GROUP_HEADER_BYTES + sum(EXTENT_HEAD_BYTES + each.table_bytes for each in extents)
    )
    with pytest.raises(ValueError, match="ascend by ledger"):
        LoadedIndexGroup(1, 64, extents[::-1])
    with pytest.raises(ValueError, match="ascend by ledger"):
        fed.add_extent_heads(index_format.encode_extent_heads(extents[:1]))


# ---------------------------------------------------------------------------------------- against a dictionary
LEDGERS = st.integers(1, 8)
STARTS = st.lists(st.tuples(LEDGERS, st.integers(0, 30), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=9)
COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("group"), st.integers(1, 4), STARTS, st.integers(0, 200)),
        st.tuples(st.just("drop"), st.integers(1, 4)),
        st.tuples(st.just("look"), LEDGERS, st.integers(0, 45)),
        st.tuples(st.just("look"), LEDGERS, st.integers(0, 45)),
        st.tuples(st.just("restart")),
    ),
    max_size=25,
)


@dataclass
class Bench:
    """Logs in files, their index, and the dictionary: (ledger, entry) → the logs that hold it."""

    simulation: Simulation
    bytes_max: int = CACHE
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)  # of log and index file
    entries: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # of each log
    dropped: Counter[int] = field(default_factory=Counter)  # a number is used once, as a store does

    def __post_init__(self) -> None:
        world = self.simulation.world(NODE)
        self.files = world.files
        self.files.make_directories(FOLDER)
        self.index = EntryLogIndex(self.bytes_max)
        self.reader = EntryLogReader(self.files, FOLDER, 4)
        self.worker = world.workers.start("read")

    def group(self, log: int, runs: list[tuple[int, int, int, int]], fillers: int = 0) -> None:
        """Appends runs of (ledger, first, entries, step) and extents of other ledgers, so that there are many pages."""
        log += 10 * self.dropped[log]
        runs = sorted([*runs, *((100 + n, 0, 1, 1) for n in range(fillers))])
        log_end, index_end = self.ends.get(log, (entry_log.FIRST_RECORD_OFFSET, FILE_HEADER_BYTES))
        with_log = self.files.open(f"{FOLDER}/{entry_log_file_name(log)}", create=True)
        extents, tables = [], []
        for ledger, first, count, step in runs:
            numbers, offsets, start = list(range(first, first + count * step, step)), [0], log_end
            for entry in numbers:
                stored = stored_entry(ledger, entry, b"%d" % log)
                log_end += with_log.pwrite([log_record(stored)], log_end)
                offsets.append(log_end - start)
                self.entries.setdefault(log, []).append((ledger, entry))
            extent, table = index_format.encode_extent(ledger, numbers, offsets, start)
            extents.append(extent)
            tables.append(table)
        data = index_format.encode_index_group(extents, tables)
        with_index = self.files.open(f"{FOLDER}/{entry_log_index_file_name(log)}", create=True)
        with_index.pwrite([encode_file_header(FileHeader(index_format.INDEX_MAGIC, UUID, log))], 0)
        with_index.pwrite([data], index_end)
        self.index.add_group(LoadedIndexGroup(log, index_end, extents), ())
        self.ends[log] = log_end, index_end + len(data)

    def drop(self, log: int) -> None:
        self.dropped[log] += 1
        log += 10 * (self.dropped[log] - 1)
        self.index.add_group(None, [log])
        self.entries.pop(log, None)
        self.ends.pop(log, None)
        self.reader.close_log(log)
        log_files.remove_log_files(self.files, FOLDER, log)

    def restart(self) -> None:
        self.index = EntryLogIndex(self.bytes_max)
        for log in log_files.list_entry_log_numbers(self.files, FOLDER):
            for group in log_files.read_index_groups(self.files, FOLDER, log, UUID, None):
                self.index.add(group)

    async def look(self, ledger: int, entry: int) -> list[tuple[int, bytes]]:
        """(log, entry's bytes) of all copies."""
        search = EntrySearch(self.index, self.reader, self.worker, ledger, entry)
        found = []
        while (place := await search.next_extent_to_search()) is not None:
            read = self.reader.read_entries(place, self.index.get_extent_table(place), entry, 1, 1)
            assert not read.damaged
            assert read.table is not None
            self.index.add_extent_table(place, read.table)
            found += [(place.log, stored) for stored in read.entries]
        assert not search.damaged
        return found

    def check(self) -> None:
        self.index.check()
        assert self.index.statistics()["index_cache_bytes"] <= self.bytes_max
        assert self.index.log_numbers() == sorted(self.entries)
        for log, held in self.entries.items():
            assert list(self.index.ledgers_of_log(log)) == sorted({ledger for ledger, _ in held})


@settings(max_examples=150, deadline=None)
@given(COMMANDS, st.sampled_from([0, 700, CACHE, 1 << 20]))
def test_every_copy_is_found_and_nothing_else(commands: list[tuple[object, ...]], bytes_max: int) -> None:
    async def main(simulation: Simulation) -> None:
        bench = Bench(simulation, bytes_max)
        for name, *arguments in commands:
            if name == "look":
                ledger, entry = arguments
                assert isinstance(ledger, int)
                assert isinstance(entry, int)
                copies = sorted(log for log, held in bench.entries.items() for each in held if each == (ledger, entry))
                found = await bench.look(ledger, entry)
                assert sorted(log for log, _ in found) == copies
                assert all(stored == stored_entry(ledger, entry, b"%d" % log) for log, stored in found)
                known = bench.index.find_extents(ledger, entry)
                assert known is None or {place.log for place in known} >= set(copies)
                if bytes_max == 1 << 20:
                    assert known is not None
            else:
                generation = bench.index.generation
                getattr(bench, str(name))(*arguments)
                assert bench.index.generation != generation or name == "restart"
            bench.check()

    simulate(main)


# ---------------------------------------------------------------------------------------- damage
async def test_a_damaged_page_is_noticed_and_not_kept(simulation: Simulation, /) -> None:
    bench = Bench(simulation)
    bench.group(1, [(5, 0, 3, 1)], fillers=300)
    bench.group(2, [(5, 3, 3, 1)], fillers=300)
    disk = simulation.node(NODE).disk
    path = f"{FOLDER}/{entry_log_index_file_name(1)}"
    for at in range(EXTENT_HEAD_BYTES):
        disk.flip_bit(path, FILE_HEADER_BYTES + GROUP_HEADER_BYTES + 5 * EXTENT_HEAD_BYTES + at)
        miss = EntrySearch(bench.index, bench.reader, bench.worker, 5, 1)
        assert await miss.next_extent_to_search() is None
        assert miss.damaged
        hit = EntrySearch(bench.index, bench.reader, bench.worker, 5, 4)
        assert (await hit.next_extent_to_search()) is not None, "the other log is whole"
        disk.flip_bit(path, FILE_HEADER_BYTES + GROUP_HEADER_BYTES + 5 * EXTENT_HEAD_BYTES + at)
    assert len(await bench.look(5, 1)) == 1
    disk.flip_bit(path, FILE_HEADER_BYTES + GROUP_HEADER_BYTES + 100)
    with pytest.raises(DamagedFile):
        list(log_files.read_extents(bench.files, FOLDER, 1, UUID, None))


async def test_who_asks_for_a_run_that_is_being_loaded_waits_for_it(simulation: Simulation, /) -> None:
    """A recovery asks for an entry and for the next one at once."""
    bench, loads = Bench(simulation), list[int]()
    bench.group(1, [(5, 0, 1, 1), (6, 0, 1, 1)], fillers=300)
    read_pages = bench.reader.read_pages

    def counted(log: int, ledger: int, pages: list[IndexPage]) -> tuple[list[ExtentLocation], int]:
        loads.append(ledger)
        return read_pages(log, ledger, pages)

    bench.reader.read_pages = counted  # type: ignore[method-assign]

    def ask(ledger: int, entry: int) -> asyncio.Task[ExtentLocation | None]:
        return asyncio.ensure_future(
            EntrySearch(bench.index, bench.reader, bench.worker, ledger, entry).next_extent_to_search()
        )

    first, second, other = ask(5, 0), ask(5, 1), ask(6, 0)
    found, missing, of_other = await asyncio.gather(first, second, other)
    assert found is not None
    assert missing is None
    assert of_other is not None
    assert sorted(loads) == [5, 6]
    assert not bench.index.loading
    bench.restart()
    gone, left = ask(5, 0), ask(5, 0)
    await asyncio.sleep(0)
    gone.cancel()
    assert await left is not None, "whose caller is gone is loaded by the next one"
    assert not bench.index.loading
    bench.restart()
    simulation.node(NODE).disk.flip_bit(
        f"{FOLDER}/{entry_log_index_file_name(1)}", FILE_HEADER_BYTES + GROUP_HEADER_BYTES + 9
    )
    searches = [EntrySearch(bench.index, bench.reader, bench.worker, 5, 0) for _ in range(3)]
    assert await asyncio.gather(*(each.next_extent_to_search() for each in searches)) == [None] * 3
    assert all(each.damaged for each in searches), "each of them knows that the page is damaged"


async def test_no_extent_of_a_damaged_group_is_handed_out_and_a_start_refuses_it(simulation: Simulation, /) -> None:
    bench = Bench(simulation)
    bench.group(1, [(5, 0, 3, 1)])
    bench.group(1, [(6, 0, 3, 1)], fillers=log_files.EXTENTS_PER_SLICE_MAX + 10)
    disk, path = simulation.node(NODE).disk, f"{FOLDER}/{entry_log_index_file_name(1)}"
    slices = list(log_files.read_extents(bench.files, FOLDER, 1, UUID, None))
    assert [len(each) for each in slices] == [1, log_files.EXTENTS_PER_SLICE_MAX, 11]
    last = bench.index.find_extents_of_ledger_in_log(1, 100 + log_files.EXTENTS_PER_SLICE_MAX)
    assert not isinstance(last, LedgerExtents)
    disk.flip_bit(path, last.pages[-1].offset + 9)
    handed_out = log_files.read_extents(bench.files, FOLDER, 1, UUID, None)
    assert next(handed_out) == slices[0]
    with pytest.raises(DamagedFile, match="does not match its checksum"):
        next(handed_out)
    with pytest.raises(DamagedFile, match="does not match its checksum"):
        log_files.read_index_groups(bench.files, FOLDER, 1, UUID, None)
    with pytest.raises(DamagedFile, match="there should be a group"):
        log_files.read_index_groups(bench.files, FOLDER, 1, UUID, bench.ends[1][1] - 1)


def test_an_idle_index_costs_half_a_byte_per_extent() -> None:
    extents = [Extent(n, 0, 0, 1, 9, 4096, 5) for n in range(64 * HEADS_PER_PAGE)]
    pages = LoadedIndexGroup(1, 64, extents).pages
    arrays = [getattr(pages, name) for name in pages.__slots__]
    assert sum(each.itemsize * len(each) for each in arrays) <= 0.5 * len(extents)


async def test_a_hit_asks_few_of_many_logs(simulation: Simulation, /) -> None:
    bench = Bench(simulation, 1 << 20)
    for log in range(1, 65):
        bench.group(log, [(5, 10 * log, 10, 1)])
    rng = random.Random(1)
    for entry in [rng.randrange(10, 650) for _ in range(20)]:
        bench.restart()
        search = EntrySearch(bench.index, bench.reader, bench.worker, 5, entry)
        place = await search.next_extent_to_search()
        assert place is not None
        assert place.log == entry // 10
        loaded = [
            log for log in range(1, 65) if isinstance(bench.index.find_extents_of_ledger_in_log(log, 5), LedgerExtents)
        ]
        assert len(loaded) <= 7
