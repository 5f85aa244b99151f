"""The ledger table against dictionaries: merged, deleted, checkpointed and loaded in any order, it says the same."""

import errno
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.bookie.format.journal import FILE_HEADER_BYTES
from magnetar.bookie.format.ledger_index import (
    LEDGER_RECORD_BYTES,
    LedgerState,
    Tombstone,
    encode_ledger_index_record,
    encode_ledger_record,
)
from magnetar.bookie.store import index_files as ledger_index
from magnetar.bookie.store import index_files as ledger_table
from magnetar.bookie.store import memtable
from magnetar.bookie.store.index_files import (
    RECORDS_PER_LEAF,
    LedgerDescriptors,
    LedgerIndexFile,
    LedgerTable,
    LedgerTableLoader,
    sort_in_slices,
)
from magnetar.bookie.store.memtable import IntegerIntervals
from magnetar.runtime.sim.disk import FileFault
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import KEY, OTHER_KEY
from tests.bookie.stores import NODE, UUID, open_store, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

FOLDER = "/ledgers"


def record(ledger: int, last: int) -> bytes:
    return encode_ledger_record(ledger, last % 2 == 0, KEY, last - 1, last)


def state(ledger: int, last: int) -> LedgerState:
    return LedgerState(ledger, last % 2 == 0, KEY, last - 1, last)


# ---------------------------------------------------------------------------------------- the table
@pytest.fixture
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_table, "LEAF_BYTES", 4 * LEDGER_RECORD_BYTES)
    monkeypatch.setattr(ledger_table, "_CHANGES_MAX", 7)
    monkeypatch.setattr(ledger_table, "_SORT_SLICE", 3)


CHANGES = st.dictionaries(st.integers(0, 90), st.integers(0, 50), max_size=30)
SPAN = st.tuples(st.integers(0, 90), st.integers(0, 20))


@pytest.mark.usefixtures("small_leaves")
@settings(deadline=None)
@given(st.lists(CHANGES, max_size=8), st.lists(SPAN, max_size=3))
def test_a_table_is_a_dictionary(batches: list[dict[int, int]], spans: list[tuple[int, int]]) -> None:
    table, model = LedgerTable(), dict[int, int]()
    for batch in batches:
        before, held = table, list(table)
        table = table.with_ledger_records({ledger: record(ledger, last) for ledger, last in batch.items()})
        model |= batch
        assert list(before) == held
        assert list(table) == sorted(model)
        for ledger in range(91):
            assert table.get(ledger) == (state(ledger, model[ledger]) if ledger in model else None)
        assert all(len(leaf) <= 8 * LEDGER_RECORD_BYTES for leaf in table.leaves)
    dead = IntegerIntervals()
    for first, length in spans:
        dead.add(first, first + length)
    assert list(table.without_ledgers(dead)) == [ledger for ledger in sorted(model) if ledger not in dead]


@pytest.mark.usefixtures("small_leaves")
@settings(deadline=None)
@given(st.lists(CHANGES, max_size=8), st.lists(SPAN, max_size=3), st.integers(1, 9), st.randoms())
def test_a_file_loads_as_what_was_written_last(
    batches: list[dict[int, int]], spans: list[tuple[int, int]], slice_records: int, rng: random.Random
) -> None:
    records, model = list[bytes](), dict[int, int]()
    for batch in batches:
        records += [record(ledger, last) for ledger, last in sorted(batch.items())]
        model |= batch
    for first, length in spans:  # wherever a tombstone stands, its ledgers are dead
        records.insert(rng.randint(0, len(records)), encode_ledger_index_record(Tombstone(first, first + length)))
        model = {ledger: last for ledger, last in model.items() if not first <= ledger <= first + length}
    loading, data, size = LedgerTableLoader(), b"".join(records), slice_records * LEDGER_RECORD_BYTES
    for at in range(0, len(data), size):
        assert loading.add_rows(data[at : at + size]) == []
    descriptors = LedgerDescriptors()
    descriptors.load(loading.finish())
    descriptors.check()
    assert list(descriptors.ledger_ids()) == sorted(model)
    for ledger in range(115):
        found = descriptors.get(ledger)
        assert (found is not None) == (ledger in descriptors) == (ledger in model)
        if found is not None:
            assert (found.fenced, found.fence_synced) == (model[ledger] % 2 == 0,) * 2
            assert (found.key, found.lac, found.last) == (KEY, model[ledger] - 1, model[ledger])
            assert found.key_synced


def test_each_damaged_record_is_told_and_the_others_are_loaded() -> None:
    records = [record(ledger, 7) for ledger in (3, 5, 9, 4, 8)]
    whole = b"".join(records)
    for at in range(len(whole)):
        loading = LedgerTableLoader()
        assert loading.add_rows(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]) == [at // 50 * 50]
        assert len(loading.finish().ledgers) == 4
    for size in range(len(whole)):
        loading = LedgerTableLoader()
        assert loading.add_rows(whole[:size]) == ([size // 50 * 50] if size % 50 else [])
        assert len(loading.finish().ledgers) == size // 50


def test_values_come_in_order_in_slices() -> None:
    values = random.Random(3).sample(range(1 << 40), 20_000)
    assert list(sort_in_slices(values)) == sorted(values)
    assert list(sort_in_slices(dict.fromkeys(values))) == sorted(values)


def test_memory_is_given_back_in_slices() -> None:
    values: dict[int, object] = {n: [n] for n in range(1000)}
    nested = {n: dict.fromkeys(range(n), n) for n in (0, 1, 2000, 300, 5)}
    values |= {-n: each for n, each in nested.items()}
    left = [len(values) + sum(map(len, nested.values()))]
    left += [len(values) + sum(map(len, nested.values())) for _ in memtable.clear_in_steps(values)]
    assert values == {}
    assert not any(nested.values())
    assert max(before - after for before, after in pairwise([*left, 0])) <= 2 * memtable.ENTRIES_RELEASED_PER_SLICE


# ---------------------------------------------------------------------------------------- descriptors
LEDGER = st.integers(0, 40)
COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["touch", "fence", "sync", "get"]), LEDGER),
        st.tuples(st.just("delete"), LEDGER, st.integers(0, 5)),
        st.tuples(st.sampled_from(["begin", "settle", "rewrite", "fail", "end", "restart"])),
    ),
    max_size=60,
)


class Bench:
    """Descriptors with their records on a simulated disk, beside a dictionary of (fenced, last)."""

    def __init__(self, simulation: Simulation) -> None:
        self.files = simulation.world(NODE).files
        self.files.make_directories(FOLDER)
        self.file = ledger_index.create_ledger_index(self.files, FOLDER, UUID)
        self.descriptors = LedgerDescriptors()
        self.model: dict[int, tuple[bool, int]] = {}
        self.captured: dict[int, tuple[bool, int]] | None = None  # what the running checkpoint must write
        self.durable: dict[int, tuple[bool, int]] = {}
        self.settled: ledger_index.LedgerIndexContent | None = None
        self.ends = (self.file.generation, self.file.end)

    def touch(self, ledger: int) -> None:
        if ledger in self.descriptors.tombstones:
            return
        found = self.descriptors.get(ledger) or self.descriptors.create(ledger, KEY)
        assert found is self.descriptors.get(ledger)
        found.last += 1
        self.descriptors.mark_changed(found)
        self.model[ledger] = found.fenced, found.last

    def fence(self, ledger: int) -> None:
        self.touch(ledger)
        found = self.descriptors.get(ledger)
        if found is not None:
            found.fenced = True
            self.model[ledger] = True, found.last

    def sync(self, ledger: int) -> None:
        found = self.descriptors.get(ledger)
        if found is not None:
            found.key_synced, found.fence_synced = True, found.fenced

    def get(self, ledger: int) -> None:
        found = self.descriptors.get(ledger)
        assert (None if found is None else (found.fenced, found.last)) == self.model.get(ledger)

    def delete(self, first: int, length: int) -> None:
        self.descriptors.delete(first, first + length)
        for ledger in range(first, first + length + 1):
            self.model.pop(ledger, None)
            self.durable.pop(ledger, None)  # its tombstone is in the journal

    def begin(self) -> None:
        if self.captured is None:
            self.captured = dict(self.model)
            self.descriptors.begin_checkpoint()

    def settle(self) -> None:
        if self.captured is not None and self.settled is None:
            self.settled, *ends = self.file.write(self.descriptors.pending_changes())
            self.ends = (ends[0], ends[1])

    def rewrite(self) -> None:
        if self.captured is not None and self.settled is None:
            unwritten = self.descriptors.pending_changes()
            self.settled = unwritten.encode_changes(everything=True)
            self.ends = self.file.rewrite([*self.settled.statements, *self.settled.table.leaves])

    def fail(self) -> None:
        """The disk was full: the next checkpoint takes this one's ledgers too."""
        self.captured = self.settled = None

    def end(self) -> None:
        if self.settled is not None:
            assert self.captured is not None
            self.file.on_committed(*self.ends)
            self.descriptors.on_changes_durable(self.settled)
            deleted = [ledger for ledger in self.captured if ledger in self.descriptors.tombstones]
            self.durable = {ledger: held for ledger, held in self.captured.items() if ledger not in deleted}
            self.captured = self.settled = None

    def restart(self) -> None:
        tombstones = list(self.descriptors.tombstones)
        self.file = LedgerIndexFile(self.files, FOLDER, UUID, self.file.generation, self.file.end)
        self.descriptors = LedgerDescriptors()
        self.descriptors.load(self.file.load(pytest.fail))
        self.captured = self.settled = None
        for first, last in tombstones:  # replayed from the journal
            self.descriptors.delete(first, last)
        for ledger, (fenced, last) in self.durable.items():
            found = self.descriptors.get(ledger)
            assert found is not None
            assert found.fenced or not fenced
            assert found.last >= last
        found_all = [self.descriptors.get(ledger) for ledger in self.descriptors.ledger_ids()]
        self.model = {found.ledger: (found.fenced, found.last) for found in found_all if found is not None}

    def check(self) -> None:
        self.descriptors.check()
        assert list(self.descriptors.ledger_ids()) == sorted(self.model)
        assert len(self.descriptors) == len(self.model)


@pytest.mark.usefixtures("small_leaves")
@settings(deadline=None, max_examples=200)
@given(COMMANDS)
def test_no_descriptor_is_ever_lost_or_doubled(commands: list[tuple[str | int, ...]]) -> None:
    async def main(simulation: Simulation) -> None:
        bench = Bench(simulation)
        for name, *arguments in commands:
            getattr(bench, str(name))(*arguments)
            bench.check()
            for ledger in range(46):
                bench.get(ledger)

    simulate(main)


def test_a_fence_that_is_not_synced_stays_in_memory_until_it_is() -> None:
    descriptors = LedgerDescriptors()
    fencing = descriptors.create(5, KEY)
    fencing.fenced = True
    for _ in range(2):
        descriptors.begin_checkpoint()
        settled = descriptors.pending_changes().encode_changes(everything=False)
        descriptors.on_changes_durable(settled)
        assert descriptors.get(5) is fencing
        assert descriptors.has_unwritten_changes
    fencing.key_synced = fencing.fence_synced = True
    descriptors.begin_checkpoint()
    descriptors.on_changes_durable(descriptors.pending_changes().encode_changes(everything=False))
    assert not descriptors.has_unwritten_changes
    again = descriptors.get(5)
    assert again is not None
    assert again is not fencing
    assert (again.fenced, again.fence_synced) == (True, True)
    assert not again.has_key(OTHER_KEY)


def test_a_ledger_deleted_while_a_checkpoint_writes_does_not_come_back() -> None:
    descriptors = LedgerDescriptors()
    descriptors.create(5, KEY).fenced = True
    descriptors.begin_checkpoint()
    settled = descriptors.pending_changes().encode_changes(everything=False)
    descriptors.delete(5, 5)
    assert descriptors.get(5) is None
    descriptors.on_changes_durable(settled)
    assert descriptors.get(5) is None
    descriptors.check()
    descriptors.begin_checkpoint()
    assert descriptors.pending_changes().encode_changes(everything=False).changes == [
        encode_ledger_index_record(Tombstone(5, 5))
    ]


def test_what_changes_while_a_checkpoint_writes_is_written_by_the_next() -> None:
    descriptors = LedgerDescriptors()
    found = descriptors.create(5, KEY)
    found.key_synced = True
    descriptors.begin_checkpoint()
    settled = descriptors.pending_changes().encode_changes(everything=False)
    changed = descriptors.get(5)
    assert changed is found
    changed.last = 7
    descriptors.mark_changed(changed)
    descriptors.delete(9, 9)
    descriptors.on_changes_durable(settled)
    assert descriptors.has_unwritten_changes
    descriptors.begin_checkpoint()
    assert descriptors.pending_changes().encode_changes(everything=False).changes == [
        encode_ledger_index_record(Tombstone(9, 9)),
        encode_ledger_record(5, False, KEY, -1, 7),
    ]


# ---------------------------------------------------------------------------------------- the file
def _filled(simulation: Simulation, ledgers: int) -> tuple[LedgerIndexFile, LedgerDescriptors]:
    files = simulation.world(NODE).files
    files.make_directories(FOLDER)
    file, descriptors = ledger_index.create_ledger_index(files, FOLDER, UUID), LedgerDescriptors()
    for ledger in range(ledgers):
        descriptors.create(ledger, KEY).key_synced = True
    return file, descriptors


def _checkpoint(file: LedgerIndexFile, descriptors: LedgerDescriptors) -> None:
    descriptors.begin_checkpoint()
    settled, generation, end = file.write(descriptors.pending_changes())
    descriptors.on_changes_durable(settled)
    file.on_committed(generation, end)


async def test_a_file_that_is_mostly_outdated_is_written_anew_and_appended_to_when_there_is_no_room(
    simulation: Simulation, /
) -> None:
    file, descriptors = _filled(simulation, 4000)
    _checkpoint(file, descriptors)
    disk = simulation.node(NODE).disk
    while not file.must_rewrite(4000):
        for ledger in range(4000):
            touched = descriptors.get(ledger)
            assert touched is not None
            descriptors.mark_changed(touched)
        _checkpoint(file, descriptors)
    descriptors.delete(0, 1999)
    disk.faults.append(FileFault("pwrite", ".lidx.tmp", errno.ENOSPC, times=1))
    _checkpoint(file, descriptors)
    assert file.generation == 1
    _checkpoint(file, descriptors)
    assert file.generation == 2
    assert file.end == FILE_HEADER_BYTES + 2001 * LEDGER_RECORD_BYTES
    loaded = file.load(pytest.fail)
    assert list(loaded.table) == list(loaded.ledgers) == list(range(2000, 4000))
    assert loaded.facts == [Tombstone(0, 1999)]
    disk.flip_bit(f"{FOLDER}/{ledger_index.ledger_index_file_name(2)}", FILE_HEADER_BYTES + 50 * 700 + 3)
    missing: list[str] = []
    loaded = file.load(missing.append)
    assert len(loaded.ledgers) == 1999
    assert f"damaged at offset {FILE_HEADER_BYTES + 50 * 700}" in missing[0]
    _checkpoint(file, descriptors)
    assert (file.generation, file.load(pytest.fail).facts) == (3, [Tombstone(0, 1999)])


def test_a_ledger_at_rest_costs_its_record() -> None:
    table = LedgerTable().with_ledger_records({ledger: record(ledger, 1) for ledger in range(0, 60_000, 3)})
    assert sum(map(len, table.leaves)) == 20_000 * LEDGER_RECORD_BYTES
    assert len(table.leaves) <= 20_000 // RECORDS_PER_LEAF + 1, "and 33 bytes a leaf"


async def test_a_store_finds_its_ledgers_again_after_many_checkpoints(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    for ledger in range(50):
        store.fence(ledger * 7 % 50, KEY)
        if ledger % 9 == 0:
            assert await simulation.spawn(NODE, store.seal_group_and_wait())
            await simulation.spawn(NODE, store.checkpoint())
    assert await simulation.spawn(NODE, store.seal_group_and_wait())
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    store.check()
    assert list(store.descriptors.ledger_ids()) == list(range(50))
    assert all(found.fenced for ledger in range(50) if (found := store.descriptors.get(ledger)))
