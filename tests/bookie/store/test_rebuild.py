"""An index made from its log says what the old one said; what lies between damaged records is found again."""

import random

import pytest

from magnetar.bookie.format import entry_log, index
from magnetar.bookie.store.entrylog import files as log_files
from magnetar.bookie.store.entrylog import repair_at_start as rebuild
from magnetar.bookie.store.entrylog.repair_at_start import EntryLogScan, UnreadableLogRange
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import log_record
from tests.bookie.stores import DATA, NODE, UUID, add, open_store, payload, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

ENTRIES = f"{DATA}/entries"


async def a_log(simulation: Simulation, rounds: int = 3) -> None:
    """Log 1 with three ledgers in each of several flushes, some entries twice."""
    store = await open_store(simulation)
    for turn in range(rounds):
        for ledger in (3, 1, 2):
            for entry in range(5 * turn, 5 * turn + 6):
                size = random.Random(entry).choice((0, 1, 200, 3000))
                await simulation.spawn(NODE, add(store, ledger, entry, payload(ledger, entry, size)))
        await simulation.spawn(NODE, store.checkpoint())
    await simulation.spawn(NODE, store.close())
    simulation.crash(NODE)


def places_of(simulation: Simulation) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Of each entry, where its copies are, by the index."""
    files = simulation.world(NODE).files
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    reader = log_files.EntryLogReader(files, ENTRIES, 4)
    for group in log_files.read_index_groups(files, ENTRIES, 1, UUID, None):
        for at in range(len(group.pages)):
            for ledger in group.ledgers:
                for place in reader.read_pages(1, ledger, [group.pages.get_page(at)])[0]:
                    table = reader.read_table(place)
                    assert table is not None
                    for i, delta in enumerate(table.deltas):
                        bounds = (place.extent.start + table.offsets[i], place.extent.start + table.offsets[i + 1])
                        found.setdefault((ledger, place.extent.first + delta), []).append(bounds)
    return {ids: sorted(copies) for ids, copies in found.items()}


def rebuilt(simulation: Simulation, *, exact: bool = True) -> list[UnreadableLogRange]:
    lost: list[UnreadableLogRange] = []
    rebuild.rebuild_index(simulation.world(NODE).files, ENTRIES, 1, UUID, lost.extend, exact=exact)
    return lost


async def test_a_rebuilt_index_says_what_the_old_one_said(simulation: Simulation, /) -> None:
    await a_log(simulation)
    before = places_of(simulation)
    assert len(before) == 3 * 16
    assert rebuilt(simulation) == []
    assert places_of(simulation) == before
    simulation.crash(NODE, power_loss=True)
    assert places_of(simulation) == before


async def test_groups_of_a_rebuilt_index_are_bounded_and_sorted(simulation: Simulation, /) -> None:
    await a_log(simulation, rounds=6)
    before = places_of(simulation)
    rebuild.ENTRIES_PER_GROUP, whole = 7, rebuild.ENTRIES_PER_GROUP
    try:
        assert rebuilt(simulation) == []
    finally:
        rebuild.ENTRIES_PER_GROUP = whole
    groups = log_files.read_index_groups(simulation.world(NODE).files, ENTRIES, 1, UUID, None)
    assert len(groups) > 6
    assert places_of(simulation) == before


async def test_every_record_beside_a_damaged_one_is_found_again(simulation: Simulation, /) -> None:
    await a_log(simulation)
    disk = simulation.node(NODE).disk
    path = f"{ENTRIES}/{log_files.entry_log_file_name(1)}"
    before = places_of(simulation)
    where = sorted((bounds, ids) for ids, copies in before.items() for bounds in copies)
    for harmed in range(0, len(where), 5):
        (start, end), ids = where[harmed]
        for offset in (start, start + 2, start + 5, start + 8, start + 20, end - 1):
            disk.flip_bit(path, offset, 3)
            with_file = simulation.world(NODE).files.open(path, write=False)
            scan = EntryLogScan(with_file)
            found = [(record.start, record.end, record.ids) for record in scan.records()]
            wanted = [(*bounds, ids_) for bounds, ids_ in where if bounds[0] != start]
            assert found == wanted, f"{ids} harmed at {offset - start}"
            assert scan.lost == [UnreadableLogRange(start, end)]
            disk.flip_bit(path, offset, 3)


async def test_zeros_and_a_torn_end_are_lost_and_cut(simulation: Simulation, /) -> None:
    await a_log(simulation)
    files = simulation.world(NODE).files
    file = files.open(f"{ENTRIES}/{log_files.entry_log_file_name(1)}")
    end = file.size()
    file.pwrite([bytes(100_000), b"\x00\x00\x10\x00torn"], end)
    assert rebuilt(simulation) == [UnreadableLogRange(end, end + 100_008)]
    file.pwrite([bytes(100_000)], end)
    assert rebuilt(simulation, exact=False) == []
    assert rebuilt(simulation) == [UnreadableLogRange(end, end + 100_000)]
    assert file.size() == end
    assert rebuilt(simulation) == []


async def test_payload_that_looks_like_records_is_no_record(simulation: Simulation, /) -> None:
    """Whoever writes payloads knows the format; only a whole record with its checksum counts, and ours is the outer."""
    inner = payload(9, 9)
    record = log_record(inner)
    store = await open_store(simulation)
    await simulation.spawn(NODE, add(store, 1, 0, record * 3))
    await simulation.spawn(NODE, add(store, 1, 1, b"behind"))
    await simulation.spawn(NODE, store.close())
    simulation.crash(NODE)
    assert rebuilt(simulation) == []
    assert list(places_of(simulation)) == [(1, 0), (1, 1)]
    simulation.node(NODE).disk.flip_bit(
        f"{ENTRIES}/{log_files.entry_log_file_name(1)}", entry_log.FIRST_RECORD_OFFSET + 20
    )
    assert len(rebuilt(simulation)) == 1
    assert list(places_of(simulation)) == [(1, 1)]


async def test_an_empty_log_has_an_empty_index(simulation: Simulation, /) -> None:
    await a_log(simulation, rounds=1)
    files = simulation.world(NODE).files
    files.open(f"{ENTRIES}/{log_files.entry_log_file_name(1)}").truncate(entry_log.FIRST_RECORD_OFFSET)
    assert rebuilt(simulation) == []
    assert log_files.read_index_groups(files, ENTRIES, 1, UUID, None) == []
    assert files.open(f"{ENTRIES}/{log_files.entry_log_index_file_name(1)}").size() == index.GROUP_HEADER_BYTES + 44
