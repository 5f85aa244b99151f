"""A ledger's label is durable before its first add is answered, and passes of the garbage collector label the rest."""

import asyncio
import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.format.journal import FILE_HEADER_BYTES
from magnetar.bookie.maintenance import labels
from magnetar.bookie.maintenance.labels import LABELS_FILE, encode_label, walk_labels
from magnetar.bookie.server import Bookie
from magnetar.bookie.store.disk import read_file_size
from magnetar.ledger import client as deletions
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.metadata.records import Fragment, LedgerLabel
from magnetar.runtime.files import Files, join_path
from magnetar.runtime.sim.disk import FileFault
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, PeerCaller
from tests.bookie.stores import DATA, NODE

pytestmark = pytest.mark.run_by.with_args(with_cluster)
PATH = join_path(DATA, LABELS_FILE)


async def make_ledger(cluster: Cluster, bookie: Bookie, ledger: int, **properties: str) -> None:
    record = records.LedgerRecord(
        ledger_id=ledger, state=records.OPEN, ensemble_size=1, write_quorum=1, ack_quorum=1, key=KEY, token="t",
        fragments=(Fragment(0, (bookie.id,)),), created_ms=1000 + ledger, properties=properties,
    )  # fmt: skip
    await cluster.metadata.put(paths.ledger(ledger), records.encode_record(record, paths.ledger(ledger)))


async def add(caller: PeerCaller, ledger: int) -> None:
    assert (await caller.add(ledger, 0, b"first")).status is Status.OK


async def run_pass(cluster: Cluster, bookie: Bookie) -> None:
    await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(minor=False))
    await asyncio.sleep(1)


def stored(cluster: Cluster, bookie: Bookie) -> dict[int, LedgerLabel]:
    files = cluster.simulation.world(NODE).files
    walked = walk_labels(files, DATA, bytes.fromhex(bookie.id.replace("-", "")))
    return {label.ledger_id: label for label in walked}


async def test_a_label_is_durable_before_the_first_add_is_answered(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    for ledger in (5, 6):
        await make_ledger(cluster, bookie, ledger, topic=f"persistent://a/b/t{ledger}", index="40")
        await add(cluster.caller(bookie), ledger)
        bookie = await cluster.restart(power_loss=True)
        label = stored(cluster, bookie)[ledger]
        assert label.properties == {"topic": f"persistent://a/b/t{ledger}", "index": "40"}
        assert label.fragments == (Fragment(0, (bookie.id,)),)
        assert (label.created_ms, label.ack_quorum, label.deleted) == (1000 + ledger, 1, False)
    assert sorted(stored(cluster, bookie)) == [5, 6]


async def test_ledgers_that_begin_together_are_labelled_by_one_sync_and_later_adds_by_none(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    caller, disk = cluster.caller(bookie), cluster.simulation.node(NODE).disk
    await make_ledger(cluster, bookie, 1)
    await add(caller, 1)
    for ledger in range(2, 30):
        await make_ledger(cluster, bookie, ledger)
    seen: list[str] = []
    disk.record = lambda operation: seen.append(operation.path) if operation.kind == "fdatasync" else None
    await asyncio.gather(*(add(caller, ledger) for ledger in range(2, 30)))
    began = seen.count(PATH)
    assert 1 <= began <= 6
    await asyncio.gather(*(caller.add(ledger, 1, b"second") for ledger in range(1, 30)))
    assert seen.count(PATH) == began
    assert len(stored(cluster, bookie)) == 29


async def test_a_pass_labels_what_has_no_label_and_marks_what_was_deleted(cluster: Cluster, /) -> None:
    bookie = await cluster.start(gc_grace_s=3600.0)
    caller = cluster.caller(bookie)
    for ledger in (1, 2, 3):
        await make_ledger(cluster, bookie, ledger, topic=f"t{ledger}")
        await add(caller, ledger)
    cluster.simulation.crash(NODE, power_loss=False)
    cluster.simulation.world(NODE).files.remove(PATH)  # as of an earlier version
    bookie = await cluster.start()
    assert stored(cluster, bookie) == {}
    await deletions.delete_ledgers(cluster.metadata, [3])
    await run_pass(cluster, bookie)
    assert sorted(stored(cluster, bookie)) == [1, 2], "the record of ledger 3 is gone already"
    await deletions.delete_ledgers(cluster.metadata, [2])
    await run_pass(cluster, bookie)
    await run_pass(cluster, bookie)
    found = stored(cluster, bookie)
    assert {ledger: label.deleted for ledger, label in found.items()} == {1: False, 2: True}
    assert found[2].properties == {"topic": "t2"}
    assert bookie.statistics()["labels_written"] == 3
    assert (await caller.read(3, 0))[0].status is Status.OK, "its data is here: the grace period runs"


async def test_what_begins_with_a_damaged_label_is_labelled_again(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    for ledger in (1, 2, 3):
        await make_ledger(cluster, bookie, ledger, topic=f"t{ledger}")
        await add(cluster.caller(bookie), ledger)
    whole = stored(cluster, bookie)
    cluster.simulation.crash(NODE, power_loss=False)
    cluster.simulation.node(NODE).disk.flip_bit(PATH, FILE_HEADER_BYTES + len(encode_label(whole[1])) + 9)
    bookie = await cluster.start()
    assert list(stored(cluster, bookie)) == [1]
    await run_pass(cluster, bookie)
    assert stored(cluster, bookie) == whole
    cluster.simulation.crash(NODE, power_loss=False)
    cluster.simulation.node(NODE).disk.flip_bit(PATH, 3)  # in the header
    bookie = await cluster.start()
    await run_pass(cluster, bookie)
    assert stored(cluster, bookie) == whole


async def test_a_full_disk_keeps_a_ledger_from_its_label_and_from_nothing_else(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    disk = cluster.simulation.node(NODE).disk
    await make_ledger(cluster, bookie, 1)
    await add(cluster.caller(bookie), 1)
    disk.faults.append(FileFault("pwrite", PATH, errno.ENOSPC))
    await make_ledger(cluster, bookie, 2)
    await add(cluster.caller(bookie), 2)
    assert list(stored(cluster, bookie)) == [1]
    assert bookie.statistics()["labels_failed"] == 1
    await run_pass(cluster, bookie)
    assert list(stored(cluster, bookie)) == [1, 2]


async def test_a_file_of_mostly_deleted_ledgers_is_rewritten_and_keeps_the_others(
    cluster: Cluster, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "REWRITTEN_BYTES_MIN", 0)
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    for ledger in range(1, 9):
        await make_ledger(cluster, bookie, ledger, topic=f"t{ledger}")
        await add(caller, ledger)
    files = cluster.simulation.world(NODE).files
    await deletions.delete_ledgers(cluster.metadata, range(1, 7))
    before = _size(files)
    for _ in range(3):
        await run_pass(cluster, bookie)
    assert list(stored(cluster, bookie)) == [7, 8]
    assert _size(files) < before / 2
    bookie = await cluster.restart()
    assert {ledger: label.properties for ledger, label in stored(cluster, bookie).items()} == {
        7: {"topic": "t7"}, 8: {"topic": "t8"},
    }  # fmt: skip
    await make_ledger(cluster, bookie, 9)
    await add(cluster.caller(bookie), 9)
    assert list(stored(cluster, bookie)) == [7, 8, 9]


def _size(files: Files) -> int:
    return read_file_size(files, PATH)


BOOKIES = st.uuids().map(str)
LABELS = st.builds(
    LedgerLabel,
    ledger_id=st.integers(0, (1 << 63) - 1), ensemble_size=st.integers(1, 20), write_quorum=st.integers(1, 20),
    ack_quorum=st.integers(1, 20), created_ms=st.integers(0, 1 << 45),
    fragments=st.lists(
        st.builds(Fragment, st.integers(0, 1 << 50), st.lists(BOOKIES, max_size=5).map(tuple)), max_size=8
    ).map(tuple),
    properties=st.dictionaries(st.text(max_size=20), st.text(max_size=60), max_size=3), deleted=st.booleans(),
)  # fmt: skip


@given(st.lists(LABELS, max_size=4), st.data())
def test_labels_are_read_as_they_were_written_up_to_the_first_damaged_byte(
    written: list[LedgerLabel], data: st.DataObject
) -> None:
    parts = [encode_label(label) for label in written]
    whole = b"".join(parts)
    assert [labels._label_of(found) for found, _ in labels._decode_stored(whole)] == written
    if not whole:
        return
    at = data.draw(st.integers(0, len(whole) - 1))
    bad = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    before = next(number for number in range(len(parts)) if at < sum(map(len, parts[: number + 1])))
    assert [labels._label_of(found) for found, _ in labels._decode_stored(bad)] == written[:before]
    assert [labels._label_of(found) for found, _ in labels._decode_stored(whole[:at])] == written[:before]
