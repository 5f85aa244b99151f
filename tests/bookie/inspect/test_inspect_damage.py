"""Looking into a store with damage in it: it is named with its place, and what lies behind it is found."""

import errno

import pytest

from magnetar.bookie.format import index as index_format
from magnetar.bookie.format import mark as note
from magnetar.bookie.format.journal import FILE_HEADER_BYTES, crc32c
from magnetar.bookie.format.ledger_index import LEDGER_RECORD_BYTES
from magnetar.bookie.inspect import journals, logs, snapshot, summary
from magnetar.bookie.inspect.snapshot import FileDamage, RemovedFile
from magnetar.bookie.store import disk
from magnetar.bookie.store import state_log as losses
from magnetar.bookie.store.index import ExtentLocation
from magnetar.proto.errors import InvalidRequest, NotFound
from magnetar.runtime.files import File, join_path
from magnetar.runtime.sim.world import Simulation
from tests.bookie.inspect.test_inspect import (
    OnlyReads,
    blocks_of,
    counted,
    damages,
    filled,
    first_log,
    flip,
    groups_of,
    look,
)
from tests.bookie.stores import DATA, NODE, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)


async def test_a_flipped_bit_in_a_log_costs_one_record_and_is_named_with_its_place(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    before = counted(found)
    log = first_log(found)
    records = [each for each in logs.walk_entry_log(found, log) if isinstance(each, logs.LoggedEntry)]
    hit = records[len(records) // 2]
    for at in (0, 2, 5, 9, 17, hit.bytes - 1):  # length, checksum, ledger, entry, payload
        flip(simulation, logs.log_path(found, log), hit.offset + at)
        (damage,) = damages(look(simulation))
        assert damage[:2] == (logs.log_path(found, log), hit.offset)
        assert counted(look(simulation)) == (before[0] - 1, *before[1:])
        places = [
            each for each in logs.walk_ledger_extents(found, hit.ledger)
            if isinstance(each, ExtentLocation)
            and each.log == log
            and each.extent.first <= hit.entry <= each.extent.last
        ]  # fmt: skip
        (copy,) = logs.find_log_copies(look(simulation), places, hit.entry)
        assert isinstance(copy, logs.EntryCopy)
        assert (copy.offset, copy.damage is None) == (hit.offset, False)
        flip(simulation, logs.log_path(found, log), hit.offset + at)
    assert counted(look(simulation)) == before


async def test_a_damaged_group_of_an_index_is_passed_over(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    log = max(logs.list_entry_log_numbers(found), key=lambda log: sum(1 for _ in groups_of(found, log)))
    groups = list(groups_of(found, log))
    assert len(groups) > 2
    path = logs.index_file_path(found, log)
    before = counted(found)
    hit = groups[1]
    for at in (0, 5, index_format.GROUP_HEADER_BYTES + 3):  # magic, number of extents, a head
        flip(simulation, path, hit.offset + at)
        now = look(simulation)
        (damage,) = damages(now)
        assert damage[:2] == (path, hit.offset)
        assert counted(now) == (before[0], before[1] - hit.header.extents, *before[2:])
        flip(simulation, path, hit.offset + at)


async def test_a_damaged_table_hides_the_places_of_one_extent_only(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    log = first_log(found)
    place = next(each for each in logs.walk_log_extents(found, log) if isinstance(each, ExtentLocation))
    flip(simulation, logs.index_file_path(found, log), place.table_offset + 1)
    (damage,) = logs.find_log_copies(look(simulation), [place])
    assert isinstance(damage, FileDamage)
    assert damage[:2] == (logs.index_file_path(found, log), place.table_offset)


async def test_a_damaged_record_of_the_ledger_index_is_passed_over(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    path = logs.read_ledger_index_overview(found).path
    offset = FILE_HEADER_BYTES + 4 * LEDGER_RECORD_BYTES
    flip(simulation, path, offset + 20)
    (damage,) = damages(look(simulation))
    assert damage[:2] == (path, offset)
    assert counted(look(simulation))[2] >= counted(found)[2] - 1


async def test_damage_in_a_journal_is_passed_over_and_a_torn_tail_is_none(simulation: Simulation, /) -> None:
    store, _ = await filled(simulation, closed=False)
    await store.close()
    found = look(simulation)
    number = max(journals.list_journal_numbers(found), key=lambda each: len(blocks_of(found, each)))
    blocks = blocks_of(found, number)
    path = join_path(DATA, "journal", f"{number:016d}.jnl")
    assert len(blocks) > 3
    for hit, behind in ((blocks[1], 0), (blocks[1], 50)):  # its header, its records
        flip(simulation, path, hit.offset + behind)
        now = look(simulation)
        (damage,) = damages(now)
        assert damage[:2] == (path, hit.offset)
        assert [block.offset for block in blocks_of(now, number)] == [
            block.offset for block in blocks if block is not hit
        ]
        flip(simulation, path, hit.offset + behind)
    flip(simulation, path, blocks[-1].offset + 50)
    now = look(simulation)
    assert damages(now) == []
    assert journals.TornTail(path, blocks[-1].offset) in list(journals.walk_journal(now, number))


@pytest.mark.parametrize("name", ["cookie", "mark"])
async def test_without_cookie_or_mark_the_rest_is_still_shown(simulation: Simulation, /, name: str) -> None:
    await filled(simulation)
    before = counted(look(simulation))
    flip(simulation, join_path(DATA, name), 70)
    now = look(simulation)
    assert [damage.path for damage in damages(now)] == [join_path(DATA, name)]
    assert counted(now)[:3] == before[:3]
    simulation.world(NODE).files.remove(join_path(DATA, name))
    gone = look(simulation)
    assert [(damage.path, damage.reason) for damage in gone.damages] == [
        (join_path(DATA, name), f"the {name} is missing")
    ]


async def test_missing_and_short_files_are_damage(simulation: Simulation, /) -> None:
    await filled(simulation)
    files = simulation.world(NODE).files
    found = look(simulation)
    log, path = first_log(found), logs.log_path(found, first_log(found))
    last = [each for each in logs.walk_entry_log(found, log) if isinstance(each, logs.LoggedEntry)][-1]
    file = files.open(path)
    file.truncate(last.offset + 10)
    file.close()
    assert [damage[:2] for damage in damages(look(simulation))] == [(path, last.offset)]
    files.remove(path)
    assert [damage[:2] for damage in damages(look(simulation))] == [(path, 0)]
    assert found.mark is not None
    journal = join_path(DATA, "journal", f"{found.mark.journal:016d}.jnl")
    files.remove(journal)
    assert (journal, 0) in [damage[:2] for damage in damages(look(simulation))]


async def test_files_that_vanish_under_the_look_are_gone_and_not_damaged(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    assert found.mark is not None
    older = found._replace(mark=found.mark._replace(journal=found.mark.journal + 5))
    log = first_log(found)
    walked = logs.walk_entry_log(found, log)
    next(walked)
    for name in ("log", "idx"):
        simulation.world(NODE).files.remove(join_path(DATA, "entries", f"{log:016d}.{name}"))
    assert not [each for each in walked if isinstance(each, FileDamage)]
    assert list(logs.walk_entry_log(found, log)) == [RemovedFile(logs.log_path(found, log))]
    assert list(logs.walk_log_extents(found, log)) == [RemovedFile(logs.index_file_path(found, log))]
    assert isinstance(
        summary.summarize_entry_log(found, log, logs.read_ledger_index_overview(found).facts), RemovedFile
    )
    assert list(journals.walk_journal(older, 999)) == [RemovedFile(join_path(DATA, "journal", f"{999:016d}.jnl"))]


async def test_a_log_in_which_nothing_lived_is_gone_before_it_is_drained(simulation: Simulation, /) -> None:
    """A full disk takes the log of a dead index to make room (bookie/store/entrylog/compaction.py)."""
    store, _ = await filled(simulation, closed=False)
    before = look(simulation)
    log = first_log(before)
    simulation.world(NODE).files.remove(logs.log_path(before, log))
    assert isinstance(logs.classify_missing_log(before, log), FileDamage)
    assert await store.delete_ledgers(sorted(store.descriptors.ledger_ids()))
    await store.checkpoint()
    assert logs.classify_missing_log(before, log) == RemovedFile(logs.log_path(before, log))


async def test_a_log_that_a_running_bookie_is_removing_is_gone_and_not_missing(simulation: Simulation, /) -> None:
    """A removal takes the log first, then its index; it was drained before."""
    store, _ = await filled(simulation, closed=False)
    log = first_log(look(simulation))
    files = simulation.world(NODE).files
    before = look(simulation)
    files.remove(logs.log_path(before, log))
    assert isinstance(logs.classify_missing_log(before, log), FileDamage)
    store.descriptors.mark_log_drained(log)
    await store.checkpoint()
    assert logs.classify_missing_log(before, log) == RemovedFile(logs.log_path(before, log))
    assert isinstance(
        summary.summarize_entry_log(before, log, logs.read_ledger_index_overview(before).facts), RemovedFile
    )
    newer = f"{before.mark.last_log + 1:016d}.log" if before.mark else ""
    files.open(join_path(DATA, "entries", newer), create=True).close()
    assert damages(look(simulation)) == [], "one that is being created"


async def test_a_wrong_directory_and_a_newer_format_are_refused_with_a_hint(simulation: Simulation, /) -> None:
    await filled(simulation)
    files = simulation.world(NODE).files
    with pytest.raises(NotFound, match="there is no directory"):
        snapshot.snapshot_directory(files, "/nowhere")
    with pytest.raises(NotFound, match=f"did you mean {DATA}"):
        snapshot.snapshot_directory(files, "/data")
    file = files.open(logs.log_path(look(simulation), 1))
    header = bytearray(file.pread(FILE_HEADER_BYTES, 0))
    header[9] = 9
    header[52:56] = crc32c(bytes(header[:52])).to_bytes(4, "big")
    file.pwrite([bytes(header)], 0)
    file.close()
    with pytest.raises(InvalidRequest, match="format version 9"):
        list(logs.walk_entry_log(look(simulation), 1))


class BadSectors(OnlyReads):
    """Some pages of one file cannot be read."""

    def __init__(self, files: object, path: str, first: int, last: int) -> None:
        super().__init__(files)  # type: ignore[arg-type]
        self._bad = path, range(first, last + 1)

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        file = super().open(path, create=create, exclusive=exclusive, write=write)
        bad, offsets = self._bad
        return _Scratched(file, offsets) if path == bad else file  # type: ignore[return-value]


class _Scratched:
    def __init__(self, file: File, bad: range) -> None:
        self._file, self._bad_bytes = file, bad
        self.path, self.size, self.close = file.path, file.size, file.close

    def pread(self, size: int, offset: int) -> bytes:
        if offset < self._bad_bytes.stop and offset + size > self._bad_bytes.start:
            raise OSError(errno.EIO, "Input/output error", self.path)
        return self._file.pread(size, offset)


async def test_sectors_that_cannot_be_read_are_damage_and_what_lies_behind_is_found(simulation: Simulation, /) -> None:
    await filled(simulation)
    whole = look(simulation)
    log = first_log(whole)
    records = [each for each in logs.walk_entry_log(whole, log) if isinstance(each, logs.LoggedEntry)]
    path = logs.log_path(whole, log)
    first, last = 3 * 4096, 4 * 4096 - 1
    touched = [each for each in records if each.offset <= last and each.offset + each.bytes > first]
    files = BadSectors(simulation.world(NODE).files, path, first, last)
    hurt = snapshot.snapshot_directory(files, DATA)  # type: ignore[arg-type]
    found = [each for each in logs.walk_entry_log(hurt, log) if isinstance(each, logs.LoggedEntry)]
    assert found == [each for each in records if each not in touched]
    assert 0 < len(touched) < len(records) - 2
    assert damages(hurt)[0][:2] == (path, touched[0].offset)
    cookie = BadSectors(simulation.world(NODE).files, join_path(DATA, "cookie"), 0, 4095)
    (damage,) = snapshot.snapshot_directory(cookie, DATA).damages  # type: ignore[arg-type]
    assert "the disk cannot read it" in damage.reason


async def test_the_reasons_of_limbo_are_shown(simulation: Simulation, /) -> None:
    await filled(simulation)
    files = simulation.world(NODE).files
    assert look(simulation).reasons == ()
    data = note.encode_checksummed_json(losses.LIMBO_MAGIC, losses.DataLossRecord(("a log is gone",)))
    disk.replace_file(files, DATA, losses.LIMBO_FILE, data)
    assert look(simulation).reasons == ("a log is gone",)
    flip(simulation, join_path(DATA, losses.LIMBO_FILE), 20)
    (damage,) = damages(look(simulation))
    assert damage.path == join_path(DATA, losses.LIMBO_FILE)


async def test_bytes_behind_the_ends_that_the_mark_names_are_not_looked_at(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    assert found.mark is not None
    log, log_end, index_end = found.mark.log, found.mark.log_end, found.mark.index_end
    assert log
    before = counted(found)
    for path, end in ((logs.log_path(found, log), log_end), (logs.index_file_path(found, log), index_end)):
        file = simulation.world(NODE).files.open(path)
        file.pwrite([b"\x01" * 5000], end)
        file.close()
    now = look(simulation)
    assert damages(now) == []
    assert counted(now) == before


async def test_a_block_that_stands_where_it_was_not_written_does_not_count(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    number = max(journals.list_journal_numbers(found), key=lambda each: len(blocks_of(found, each)))
    blocks = blocks_of(found, number)
    file = simulation.world(NODE).files.open(join_path(DATA, "journal", f"{number:016d}.jnl"))
    first = blocks[0]
    file.pwrite([file.pread(first.end_offset - first.offset, first.offset)], blocks[-1].end_offset)
    file.close()
    now = look(simulation)
    assert blocks_of(now, number) == blocks
    assert damages(now) == []
