"""What is read from a stopped bookie's directory is what the bookie would answer, and nothing is touched."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.format import mark as note
from magnetar.bookie.format.journal import FileHeader, encode_file_header
from magnetar.bookie.format.mark import Cookie, encode_cookie
from magnetar.bookie.holdings import (
    HOLDINGS_MAGIC,
    _HeldEntries,
    decode_holdings,
    encode_holdings,
    read_holdings,
)
from magnetar.bookie.maintenance.labels import LABELS_FILE, LABELS_MAGIC, encode_label
from magnetar.bookie.maintenance.seen import METADATA_STATE_FILE, SEEN_MAGIC, RecordedMetadataState
from magnetar.bookie.store import disk
from magnetar.bookie.store.store import Store
from magnetar.metadata.rebuild_core import BookieHoldings, HeldLedger, HeldRun
from magnetar.metadata.records import Fragment, LedgerLabel
from magnetar.proto.entry import MessageMetadata, encode_broker_part, encode_entry
from magnetar.proto.errors import InvalidRequest, NotFound
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import KEY
from tests.bookie.inspect.test_inspect import BOOKIE, OnlyReads
from tests.bookie.stores import DATA, NODE, UUID, Model, add, load, open_store, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)


def label(ledger: int, size: int = 1, quorum: int = 1, **properties: str) -> LedgerLabel:
    return LedgerLabel(
        ledger_id=ledger, ensemble_size=size, write_quorum=quorum, ack_quorum=1, created_ms=5,
        fragments=(Fragment(0, (BOOKIE,)),), properties=properties or {"topic": "t", "index": "0"},
    )  # fmt: skip


def put_cookie(simulation: Simulation) -> None:
    cookie = Cookie(BOOKIE, "i", ("h:/d",), 4)
    disk.replace_file(simulation.world(NODE).files, DATA, "cookie", encode_cookie(cookie))


def put_labels(simulation: Simulation, *labels: LedgerLabel) -> None:
    head = encode_file_header(FileHeader(LABELS_MAGIC, UUID, 1))
    data = head + b"".join(map(encode_label, labels))
    disk.replace_file(simulation.world(NODE).files, DATA, LABELS_FILE, data)


def read(simulation: Simulation) -> BookieHoldings:
    found = read_holdings(OnlyReads(simulation.world(NODE).files), DATA)  # type: ignore[arg-type]
    assert decode_holdings(encode_holdings(found), "it") == found
    return found


def entries(held: HeldLedger) -> list[int]:
    return sorted(entry for first, last, stride in held.runs for entry in range(first, last + 1, stride))


async def held_by(store: Store, ledger: int) -> list[int]:
    runs = await store.find_stored_entries(ledger, 0, 1000)
    return [entry for first, last in runs for entry in range(first, last + 1)]


@pytest.mark.parametrize("seed", range(6))
async def test_the_directory_of_a_killed_bookie_says_what_the_bookie_would_answer(
    simulation: Simulation, /, seed: int
) -> None:
    store, model, rng = await open_store(simulation), Model(), random.Random(seed)
    put_cookie(simulation)
    put_labels(simulation, *(label(ledger, 3, 2) if ledger % 2 else label(ledger) for ledger in range(1, 10)))
    await load(store, model, rng, 60)
    await model.delete(store, 3)
    await load(store, model, rng, 20)
    simulation.crash(NODE, power_loss=seed % 2 == 0)
    found = read(simulation)
    assert (found.bookie, found.instance, found.place, found.starts) == (BOOKIE, "i", "h:/d", 4)
    assert (3, 3) in found.tombstones
    assert found.damages == ()
    by_id = {held.ledger_id: held for held in found.ledgers}
    assert 3 not in by_id
    store = await open_store(simulation)
    assert (found.journal, found.offset) <= store.journal_position
    for ledger in sorted({ledger for ledger, _ in model.acked} - {3}):
        assert entries(by_id[ledger]) == await held_by(store, ledger), ledger
        assert by_id[ledger].key == KEY
        known = by_id[ledger].label
        assert known is not None
        assert known.ensemble_size == (3 if ledger % 2 else 1)


async def test_what_is_quarantined_or_in_a_lost_log_is_not_held_and_damage_is_told(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    put_cookie(simulation)
    for entry in range(10):
        await add(store, 1, entry, b"x" * 200)
    await store.checkpoint()
    store.descriptors.quarantine(1, 4, 5)
    await store.checkpoint()
    await store.close()
    (held,) = read(simulation).ledgers
    assert entries(held) == [0, 1, 2, 3, 6, 7, 8, 9]
    files = simulation.world(NODE).files
    for path in simulation.node(NODE).disk.list_paths():
        if path.endswith(".log"):
            files.remove(path)
    found = read(simulation)
    assert [entries(held) for held in found.ledgers] == [[]]
    assert any("log is missing" in damage for damage in found.damages)
    disk.replace_file(files, DATA, LABELS_FILE, b"no labels")
    assert any(LABELS_FILE in damage for damage in read(simulation).damages)


@pytest.mark.parametrize("flushed", [True, False])
async def test_the_index_of_a_first_message_is_read_where_no_label_has_it(
    simulation: Simulation, /, flushed: bool
) -> None:
    store = await open_store(simulation)
    put_cookie(simulation)
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=7)
    await add(store, 1, 3, encode_broker_part(106, 1) + encode_entry(metadata, b"seven"))
    await add(store, 1, 4, encode_broker_part(107, 1) + b"another")
    await add(store, 2, 0, b"of no topic")
    if flushed:
        await store.checkpoint()
    put_labels(simulation, label(1, topic="persistent://a/b/c"), label(2, topic="persistent://a/b/c"))
    simulation.crash(NODE, power_loss=False)
    found = read(simulation)
    assert {held.ledger_id: held.first_index for held in found.ledgers} == {1: 100, 2: -1}
    assert any("ledger 2" in damage for damage in found.damages)
    put_labels(simulation, label(1, topic="t", index="5"), label(2))
    assert {held.first_index for held in read(simulation).ledgers} == {-1}, "the labels have it"


async def test_ids_that_the_bookie_saw_given_out_are_told(simulation: Simulation, /) -> None:
    await (await open_store(simulation)).close()
    put_cookie(simulation)
    assert read(simulation).seen_ledger == -1
    seen = note.encode_checksummed_json(SEEN_MAGIC, RecordedMetadataState(ledger=77))
    disk.replace_file(simulation.world(NODE).files, DATA, METADATA_STATE_FILE, seen)
    assert read(simulation).seen_ledger == 77


async def test_a_directory_without_a_cookie_and_another_file_are_refused(simulation: Simulation, /) -> None:
    await (await open_store(simulation)).close()
    with pytest.raises(InvalidRequest, match="cookie is missing"):
        read(simulation)
    with pytest.raises(NotFound):
        read_holdings(simulation.world(NODE).files, "/nowhere")
    whole = encode_holdings(BookieHoldings(bookie="b", instance="i", place="h:/d", starts=1))
    for data in (b"", b"x" * 100, whole[:-1], whole[:20] + b"\xff" + whole[21:], HOLDINGS_MAGIC):
        with pytest.raises(InvalidRequest, match="it is"):
            decode_holdings(data, "it")


@given(st.sets(st.integers(0, 60)), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9))))
def test_runs_have_the_entries_that_were_added_without_the_bad_ones(
    held: set[int], stride: int, bad: list[tuple[int, int]]
) -> None:
    found = _HeldEntries(stride)
    half = sorted(held)[: len(held) // 2]
    found.add(half)
    for entry in sorted(held - set(half)):
        found.add_run(entry, entry)
    intervals = [(first, first + more) for first, more in bad]
    runs = found.finish(intervals)
    left = [entry for entry in held if not any(first <= entry <= last for first, last in intervals)]
    assert sorted(entry for first, last, step in runs for entry in range(first, last + 1, step)) == sorted(left)
    assert {run.stride for run in runs} <= {stride}
    assert all(HeldRun(run.last + stride, run.last + stride, stride) not in runs for run in runs), "runs are joined"
