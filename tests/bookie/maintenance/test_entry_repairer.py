"""What compaction finds damaged is reported at once, and fetched from the other bookies."""

import asyncio
import errno

import pytest

from magnetar.bookie.maintenance.restore import LedgerCopyRestorer
from magnetar.bookie.store.entrylog.mover import CompactionPolicy
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths
from magnetar.metadata.records import OPEN, DamagedEntriesRecord
from magnetar.metadata.store import get_record
from magnetar.runtime.sim.disk import FileFault
from tests.bookie.bookies import with_cluster
from tests.bookie.maintenance.test_limbo import Deployment, with_deployment
from tests.bookie.maintenance.test_scrub import DATA_OFFSET, Cluster, a_bookie, reported

pytestmark = pytest.mark.run_by.with_args(with_deployment)

ALL = CompactionPolicy(minor_share=1.1, major_share=1.1, small_bytes=1 << 30, bytes_per_s=1 << 30)


async def a_closed_ledger(deployment: Deployment) -> int:
    """On all three bookies, and in a log of b1."""
    client = deployment.client()
    writer = await client.create()
    for i in range(30):
        await writer.append(b"%d" % i * 100)
    await writer.close()
    await client.close()
    await deployment.simulation.spawn("b1", deployment.bookies["b1"].store.checkpoint())
    return writer.ledger_id


def damage(deployment: Deployment) -> None:
    disk = deployment.simulation.node("b1").disk
    log = next(path for path in disk.list_paths() if path.endswith(".log"))
    for offset in range(DATA_OFFSET + 300, DATA_OFFSET + 1500, 400):
        disk.flip_bit(log, offset)


async def damaged(deployment: Deployment, ledger: int) -> DamagedEntriesRecord | None:
    found = await get_record(deployment.metadata, paths.damaged_copies_of_bookie(ledger, deployment.bookies["b1"].id),
        DamagedEntriesRecord)
    return None if found is None else found[0]


async def test_a_record_that_compaction_finds_bad_is_reported_at_once_and_mended(deployment: Deployment, /) -> None:
    ledger = await a_closed_ledger(deployment)
    bookie = deployment.bookies["b1"]
    bookie.disk_monitor._interval_s = 1e6
    await asyncio.sleep(2.0)  # its last look by the interval is over
    damage(deployment)
    for name in ("b2", "b3"):
        await deployment.stop(name)
    done = await deployment.simulation.spawn("b1", bookie.store.compactor.run_compaction(ALL, major=True, roll=True))
    assert done.bad_records > 0
    await asyncio.sleep(0.5)
    assert await damaged(deployment, ledger) is not None
    assert bookie.store.descriptors.quarantined() != [], "nobody has it now"
    for name in ("b2", "b3"):
        await deployment.start(name)
    await asyncio.sleep(200)
    assert bookie.store.descriptors.quarantined() == []
    assert await damaged(deployment, ledger) is None
    key = (await deployment.record(ledger)).key
    for entry in range(30):
        answer, _ = await deployment.caller("b1").read(ledger, entry, key=key)
        assert answer.status is Status.OK


async def test_a_start_asks_again_for_what_was_quarantined_before(deployment: Deployment, /) -> None:
    ledger = await a_closed_ledger(deployment)
    bookie = deployment.bookies["b1"]
    bookie.store.descriptors.quarantine(ledger, 4, 6)
    await deployment.simulation.spawn("b1", bookie.store.checkpoint())
    await deployment.stop("b1")
    bookie = await deployment.start("b1")
    assert bookie.store.descriptors.is_quarantined(ledger, 4)
    await asyncio.sleep(5)
    assert bookie.store.descriptors.quarantined() == []


async def test_a_cut_log_quarantines_also_what_was_never_placed_here_and_that_ends_with_the_rest(
    deployment: Deployment, /
) -> None:
    """What a log held behind its end is known by first and last entry; with Qw < E not all between them were there."""
    client = deployment.client()
    writer = await client.create(ensemble_size=3, write_quorum=2, ack_quorum=2)
    for i in range(30):
        await writer.append(b"%d" % i * 100)
    await writer.close()
    await client.close()
    await deployment.simulation.spawn("b1", deployment.bookies["b1"].store.checkpoint())
    await deployment.stop("b1")
    disk = deployment.simulation.node("b1").disk
    log = next(path for path in disk.list_paths() if path.endswith(".log"))
    disk.truncate_file(log, DATA_OFFSET + 500)
    bookie = await deployment.start("b1")
    slot = writer.record.fragments[0].bookies.index(bookie.id)
    quarantined = [entry for entry in range(30) if bookie.store.descriptors.is_quarantined(writer.ledger_id, entry)]
    assert any(slot not in (entry % 3, (entry + 1) % 3) for entry in quarantined), "one that never lay here"
    await asyncio.sleep(200)
    assert bookie.store.descriptors.quarantined() == []
    assert await damaged(deployment, writer.ledger_id) is None


async def test_what_an_open_ledger_does_not_place_here_any_more_stays_neither_quarantined_nor_reported(
    deployment: Deployment, /
) -> None:
    """An idle ledger may be open for months: its copies were made elsewhere while this bookie was away."""
    client = deployment.client()
    writer = await client.create(ensemble_size=2, write_quorum=2, ack_quorum=2)
    await writer.append(b"one")
    ledger, placed = writer.ledger_id, writer.record.fragments[0].bookies
    bookie = next(each for each in deployment.bookies.values() if each.id not in placed)
    bookie.store.keys.record_key_of_metadata(ledger, writer.record.key)
    bookie.store.descriptors.quarantine(ledger, 0, 0)
    bookie.first.mender.on_entries_quarantined()
    await asyncio.sleep(0.2)
    await asyncio.sleep(200)
    assert (await deployment.record(ledger)).state == OPEN
    assert bookie.store.descriptors.quarantined() == []
    assert (
        await get_record(
            deployment.metadata, paths.damaged_copies_of_bookie(ledger, bookie.id), DamagedEntriesRecord
        )
        is None
    )
    await client.close()


@pytest.mark.run_by.with_args(with_cluster)
async def test_the_only_copy_stays_quarantined_and_reported(cluster: Cluster, /) -> None:
    bookie = await a_bookie(cluster)
    bookie.store.descriptors.quarantine(1, 50, 51)
    bookie.store.compactor._on_bad()
    await asyncio.sleep(5000)
    assert await reported(cluster, bookie, 1) == ((50, 51),)


async def test_a_copy_that_the_journal_had_no_room_for_is_not_whole_and_ends_no_quarantine(
    deployment: Deployment, /
) -> None:
    """It can be read, out of memory alone: a power loss takes it. So limbo and a report of damage last."""
    ledger = await a_closed_ledger(deployment)
    bookie = deployment.bookies["b1"]
    store, disk = bookie.store, deployment.simulation.node("b1").disk
    store.descriptors.quarantine(ledger, 4, 6)
    client = deployment.client()
    restorer = LedgerCopyRestorer(store, bookie.id, deployment.metadata, client)

    async def restore() -> str | None:
        return await deployment.simulation.spawn("b1", restorer.restore_ledger(ledger))

    damage(deployment)  # of the entries that are read from the log
    disk.faults.append(FileFault("pwrite", "/journal/", errno.ENOSPC))
    for _ in range(2):
        assert "the disk is full" in (await restore() or "")
        assert store.descriptors.is_quarantined(ledger, 4)
        (refused,) = {first for first, _ in store.memtable.refused_runs_of_ledger(ledger)}
        assert refused not in await store.find_stored_entries(ledger, 0, 29)
    await deployment.simulation.spawn("b1", store.checkpoint())
    assert await restore() is None
    assert not store.descriptors.is_quarantined(ledger, 4)
    assert refused in await store.find_stored_entries(ledger, 0, 29)
    await client.close()
    await deployment.stop("b1")
    await deployment.start("b1")
    key = (await deployment.record(ledger)).key
    for entry in range(30):
        assert (await deployment.caller("b1").read(ledger, entry, key=key))[0].status is Status.OK


async def test_a_ledger_is_not_whole_while_every_bookie_is_sure_not_to_have_an_entry_of_it(
    deployment: Deployment, /
) -> None:
    client = deployment.client()
    writer = await client.create()
    for i in range(6):
        await writer.append(b"%d" % i)
    await writer.close()
    await asyncio.sleep(0.5)
    for bookie in deployment.bookies.values():
        del bookie.store.memtable.active.ledgers[writer.ledger_id][3]
    bookie = deployment.bookies["b1"]
    restorer = LedgerCopyRestorer(bookie.store, bookie.id, deployment.metadata, client)
    reason = await deployment.simulation.spawn("b1", restorer.restore_ledger(writer.ledger_id))
    assert "lost everywhere" in (reason or "")
    await client.close()
