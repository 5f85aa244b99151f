"""Reading a journal back: torn tails are cut, damage is reported and stepped over, only what is whole comes back."""

import random
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from magnetar.bookie.format.journal import (
    BLOCK_ALIGNMENT_BYTES,
    HEADER_COPY_OFFSET,
    ForeignFile,
    JournalRecord,
    RecordType,
    crc32c,
)
from magnetar.bookie.store import replay as replay
from magnetar.bookie.store.memtable import ENTRY_MEMORY_BYTES, LEDGER_MEMORY_BYTES
from magnetar.bookie.store.replay import JournalPosition
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.proto.errors import NewerFormat
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import KEY, stored_entry
from tests.bookie.journals import Journals, adds, block_bytes, read_all
from tests.bookie.stores import NODE, SMALL, add, open_store, payload, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

ROOMY = replace(
    SMALL, memtable_bytes=1 << 20, log_bytes_max=16 << 20, journal_bytes=1 << 20, journal_first_segment_bytes=64 << 10
)
"""Nothing is flushed before a crash."""
FENCE = JournalRecord(RecordType.FENCE, 5, -1, b"")


def filled(blocks: int = 5, journals: int = 1, seed: int = 1) -> Journals:
    made = Journals(seed)
    for _ in range(journals):
        made.begin()
        for _ in range(blocks):
            made.write(adds(made.rng, 2))
    return made


def without(made: Journals, *blocks: tuple[int, int]) -> list[JournalRecord]:
    """All records but those of these (journal, block)s, counted from 0."""
    return [
        record
        for j, journal in enumerate(made.journals)
        for b, (_, _, records) in enumerate(journal.blocks)
        if (j, b) not in blocks
        for record in records
    ]


# ---------------------------------------------------------------------------------------- what is whole
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("window", [4096, 12288, 4 << 20])
@pytest.mark.parametrize("bytes_max", [1, 20_000, 1 << 20])
def test_everything_that_was_written_comes_back_in_order(window: int, bytes_max: int, direct: bool) -> None:
    made = filled(blocks=6, journals=3)
    made.disk.takes_direct = direct
    with mock.patch.object(replay, "REPLAY_WINDOW_BYTES", window):
        reader = made.reader()
        assert read_all(reader, bytes_max) == made.records()
    assert (reader.damages, reader.torn_bytes) == ([], 0)
    assert reader.end == JournalPosition(3, made.journals[-1].end)


def test_reading_begins_at_the_mark() -> None:
    made = filled(journals=2)
    reader = made.reader(JournalPosition(1, made.journals[0].blocks[3][0]))
    assert read_all(reader) == without(made, (0, 0), (0, 1), (0, 2))
    reader = made.reader(JournalPosition(2, made.journals[1].end))
    assert read_all(reader) == []
    assert (reader.end, reader.damages) == (JournalPosition(2, made.journals[1].end), [])


def test_an_entry_that_looks_like_a_block_is_none() -> None:
    """The bytes of a block of this journal, but for the salt that only the disk knows, aligned inside a payload."""
    made = Journals()
    journal = made.begin(size=256 << 10)
    posing = block_bytes([FENCE], 0, journal.number, 1, journal.end + BLOCK_ALIGNMENT_BYTES)
    filler = bytes(BLOCK_ALIGNMENT_BYTES - 44 - 25)
    offset = made.write([JournalRecord(RecordType.ADD, 1, 1, filler + posing)])
    made.write(adds(made.rng, 1))
    made.overwrite(journal.path, offset, bytes(44))
    reader = made.reader()
    assert read_all(reader) == without(made, (0, 0))
    assert len(reader.damages) == 1


# ---------------------------------------------------------------------------------------- torn tails
def test_a_whole_block_that_was_on_its_way_beside_a_torn_one_is_cut_with_it() -> None:
    made = filled(blocks=2)
    journal = made.journals[0]
    torn = made.write(adds(made.rng, 1))
    made.write(adds(made.rng, 1), synced=torn)
    made.disk.flip_bit(journal.path, torn + 44)
    reader = made.reader()
    assert read_all(reader) == without(made, (0, 2), (0, 3))
    assert (reader.damages, reader.end) == ([], JournalPosition(1, torn))


def test_a_bad_block_is_damage_when_any_block_behind_it_was_made_after_its_sync() -> None:
    made = filled(blocks=2)
    journal = made.journals[0]
    bad = made.write(adds(made.rng, 1))
    beside = made.write(adds(made.rng, 1), synced=bad)
    made.write(adds(made.rng, 1), synced=beside)
    made.disk.flip_bit(journal.path, bad + 44)
    reader = made.reader()
    assert read_all(reader) == without(made, (0, 2)), "the block beside it is whole, and it is served"
    assert [damage.offset for damage in reader.damages] == [bad]
    assert reader.end == JournalPosition(1, journal.end)


def test_zeros_and_stale_blocks_behind_the_end_are_not_counted_as_torn() -> None:
    made = filled()
    reader = made.reader()
    read_all(reader)
    assert reader.torn_bytes == 0
    made.overwrite(made.journals[0].path, made.journals[0].end, bytes(8192))
    reader = made.reader()
    assert (read_all(reader), reader.torn_bytes) == (made.records(), 0)


# ---------------------------------------------------------------------------------------- damage
def test_a_journal_that_was_cut_short_and_has_a_successor_is_reported() -> None:
    made = filled(journals=2)
    made.disk.truncate_file(made.journals[0].path, made.journals[0].blocks[2][0] + 100)
    reader = made.reader()
    assert read_all(reader) == without(made, (0, 2), (0, 3), (0, 4))
    assert len(reader.damages) == 1


def test_a_journal_that_ends_before_the_mark_is_reported() -> None:
    made = filled()
    made.disk.truncate_file(made.journals[0].path, made.journals[0].blocks[1][0])
    start = JournalPosition(1, made.journals[0].blocks[3][0])
    reader = made.reader(start)
    assert read_all(reader) == []
    assert [damage.offset for damage in reader.damages] == [made.journals[0].blocks[1][0]]
    assert reader.end == start


@pytest.mark.parametrize("gone", [(1,), (2,), (1, 2), (2, 3)])
def test_missing_journals_are_reported_and_the_others_are_read(gone: tuple[int, ...]) -> None:
    made = filled(journals=4)
    for number in gone:
        made.files.remove(made.journals[number - 1].path)
    reader = made.reader()
    assert read_all(reader) == without(made, *[(number - 1, block) for number in gone for block in range(5)])
    assert [damage.path for damage in reader.damages] == [made.journals[number - 1].path for number in gone]
    assert reader.end == JournalPosition(4, made.journals[-1].end)


def test_when_the_marked_journal_and_all_others_are_missing_the_mark_is_the_end() -> None:
    made = filled()
    made.files.remove(made.journals[0].path)
    reader = made.reader(JournalPosition(1, 12288))
    assert (reader.read_blocks(1), reader.finished, reader.end) == ([], True, JournalPosition(1, 12288))
    assert len(reader.damages) == 1


def test_a_block_found_in_a_place_that_is_not_its_own_is_damage() -> None:
    made = filled()
    journal = made.journals[0]
    for which, (offset, _, _) in enumerate(journal.blocks[:-1]):
        other = journal.blocks[(which + 1) % 4][2]
        made.overwrite(journal.path, offset, block_bytes(other, journal.salt, 1, 9, offset + BLOCK_ALIGNMENT_BYTES))
    reader = made.reader()
    assert read_all(reader) == without(made, (0, 0), (0, 1), (0, 2), (0, 3))
    assert len(reader.damages) == 1


def test_what_is_another_bookies_or_newer_raises() -> None:
    made = filled()
    with pytest.raises(ForeignFile, match="belongs to bookie"):
        made.reader(uuid=bytes(16))
    for offset in (0, HEADER_COPY_OFFSET):
        head = made.files.open(made.journals[0].path).pread(52, offset)
        newer = head[:8] + b"\x00\x02" + head[10:]
        made.overwrite(made.journals[0].path, offset, newer + crc32c(newer).to_bytes(4, "big"))
    with pytest.raises(NewerFormat):
        made.reader()


# ---------------------------------------------------------------------------------------- any damage at all
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_damage_of_the_part_that_was_not_synced_is_cut(seed: int) -> None:
    """The last block in any state that a crash can leave: each of its sectors new, old, or noise; cut anywhere."""
    made = filled(blocks=3, journals=2, seed=seed)
    rng = random.Random(seed)
    journal = made.journals[-1]
    offset = made.write(adds(rng, rng.randint(1, 4), 6000))
    meaningful = journal.blocks[-1][1]
    before = made.files.open(journal.path).pread(journal.end - offset, offset)
    for sector in range(offset, journal.end, 512):
        if rng.random() < 0.4:
            made.overwrite(journal.path, sector, rng.choice((bytes(512), rng.randbytes(512))))
    if rng.random() < 0.3:
        made.disk.truncate_file(journal.path, rng.randint(offset, journal.end))
    after = made.files.open(journal.path).pread(journal.end - offset, offset)
    whole = after[:meaningful] == before[:meaningful] and len(after) == len(before)
    reader = made.reader()
    assert read_all(reader) == (made.records() if whole else without(made, (1, 3)))
    assert reader.damages == []
    assert reader.end == JournalPosition(2, journal.end if whole else offset)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32))
@example(seed=99857)  # a header of which only the zeros at the end were hit
def test_any_damage_of_the_synced_part_is_reported_and_none_of_it_comes_back(seed: int) -> None:
    """Bits, sectors and pages anywhere before the last block: every block that was hit is covered by a report.

    A report of the next journal covers it too: when that has no header, nobody knows where this one ended.
    """
    rng = random.Random(seed)
    made = filled(blocks=rng.randint(1, 5), journals=rng.randint(1, 3), seed=seed)
    made.write(adds(rng, 1))
    for _ in range(rng.randint(1, 4)):
        journal = rng.choice(made.journals)
        end = journal.blocks[-1][0] if journal is made.journals[-1] else journal.end
        size = rng.choice((1, 1, 512, 4096, 3 * 4096))
        at = rng.randrange(0, end)
        made.overwrite(journal.path, at, rng.choice((rng.randbytes, bytes))(min(size, end - at)))
    reader = made.reader()
    found = read_all(reader)
    hit = _hit(made)
    assert found == without(made, *hit)
    assert (reader.damages != []) == (hit != [])
    for j, b in hit:
        offset = made.journals[j].blocks[b][0]
        mine, following = made.journals[j].path, [journal.path for journal in made.journals[j + 1 : j + 2]]
        assert any((d.path == mine and d.offset <= offset) or [d.path] == following for d in reader.damages)
    assert reader.end == JournalPosition(made.journals[-1].number, made.journals[-1].end) or 0 in [
        d.offset for d in reader.damages
    ]


def _hit(made: Journals) -> list[tuple[int, int]]:
    """The (journal, block)s whose bytes are not what was written; all of a file that lost both copies of its header."""
    hit = []
    for j, journal in enumerate(made.journals):
        data = made.files.open(journal.path).pread(journal.end, 0)
        readable = journal.header in (data[:64], data[HEADER_COPY_OFFSET : HEADER_COPY_OFFSET + 64])
        for b, (offset, meaningful, records) in enumerate(journal.blocks):
            original = block_bytes(records, journal.salt, journal.number, b, offset)
            if not readable or data[offset : offset + meaningful] != original[:meaningful]:
                hit.append((j, b))
    return hit


# ---------------------------------------------------------------------------------------- a store
async def test_a_store_replays_what_is_whole_of_a_header_that_was_hit(simulation: Simulation, /) -> None:
    store = await open_store(simulation, replace(SMALL, journal_first_segment_bytes=64 << 10))
    for entry in range(3):
        await simulation.spawn(NODE, add(store, 1, entry, payload(1, entry)))
    simulation.crash(NODE)
    disk = simulation.node(NODE).disk
    path = [each for each in disk.list_paths() if each.endswith(".jnl")][-1]
    disk.flip_bit(path, 20)
    store = await open_store(simulation)
    assert store.counters["replayed_records"] == 4


def test_a_replay_finds_the_largest_entry_and_lac_whatever_the_order() -> None:
    """Also of ledgers whose records take turns, with fences and explicit LACs between them, in one block or several."""
    rng = random.Random(5)

    async def group(store: Store, lacs: dict[int, int], entries: dict[tuple[int, int], bytes]) -> bool:
        for _ in range(rng.randint(1, 12)):
            ledger, entry = rng.randint(1, 4), rng.randint(1, 200)
            if rng.random() < 0.1:
                assert store.fence(ledger + 10, KEY) is Status.OK
            if rng.random() < 0.1:
                assert store.write_lac(ledger, KEY, entry) is Status.OK
                lacs[ledger] = max(lacs[ledger], entry)
            lac = rng.randint(-1, entry - 1)
            stored = stored_entry(ledger, entry, rng.randbytes(rng.choice((0, 10, 500))), lac)
            assert store.add_entry(ledger, entry, KEY, (stored[:36], stored[36:]), len(stored), lac, False) is Status.OK
            lacs[ledger], entries[ledger, entry] = max(lacs[ledger], lac), stored
        return await store.seal_group_and_wait()

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation, ROOMY)
        lacs, entries = dict.fromkeys(range(1, 5), -1), dict[tuple[int, int], bytes]()
        for _ in range(15):
            assert await simulation.spawn(NODE, group(store, lacs, entries))
        simulation.crash(NODE)
        store = await open_store(simulation, ROOMY)
        for ledger in range(1, 5):
            descriptor = store.descriptors.get(ledger)
            last = max(entry for of, entry in entries if of == ledger)
            assert descriptor is not None
            assert (descriptor.lac, descriptor.last, descriptor.fenced) == (lacs[ledger], last, False)
        for (ledger, entry), stored in entries.items():
            found = await simulation.spawn(NODE, store.read_entries(ledger, entry))
            assert b"".join(found.entries) == stored

    simulate(main)


async def test_a_replay_flushes_whenever_the_memtable_is_full(simulation: Simulation, /) -> None:
    store = await open_store(simulation, ROOMY)
    for entry in range(60):
        assert await simulation.spawn(NODE, add(store, 1, entry, payload(1, entry, 1000))) is Status.OK
    simulation.crash(NODE)
    table = 60 * (1036 + ENTRY_MEMORY_BYTES)
    store = await open_store(simulation, replace(ROOMY, memtable_bytes=table // 4))
    assert store.statistics()["replayed_records"] == 61
    assert store.statistics()["checkpoints"] == 4 + 2  # with the rest; and with the new journal
    assert store.statistics()["flushed_bytes"] == table + 4 * LEDGER_MEMORY_BYTES
