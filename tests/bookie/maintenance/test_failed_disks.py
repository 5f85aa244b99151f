"""A disk of a bookie fails or is replaced, in a cluster: writers go on, and its copies are made again."""

import asyncio
import errno

import pytest

from magnetar.bookie.maintenance.repair_core import RepairReason
from magnetar.bookie.server import Bookie
from magnetar.bookie.store.identity import accept_replaced_directory
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths
from magnetar.metadata.records import BookieRecord, CookieRecord, find_ledgers_directory
from magnetar.metadata.store import get_record
from magnetar.runtime.sim.disk import FileFault
from tests.bookie.maintenance.copies import Deployment, payload, with_deployment

pytestmark = pytest.mark.run_by.with_args(with_deployment)

TWO = ((0, 2),)


async def three(deployment: Deployment) -> None:
    """Three bookies with two ledgers directories each, and one with one."""
    for name in ("a", "b", "c"):
        await deployment.start(name, ledgers=(f"/{name}-0", f"/{name}-1"), journal=f"/{name}-journal")
    await deployment.start("d")


def break_disk(deployment: Deployment, name: str, number: int) -> Bookie:
    where = f"/{name}-{number}/"
    deployment.simulation.node(name).disk.faults = [
        FileFault(kind, where, errno.EIO, times=-1) for kind in ("fdatasync", "pwrite", "create", "pread")
    ]
    return deployment.bookies[name]


async def let_fail(deployment: Deployment, bookie: Bookie, number: int) -> None:
    """A checkpoint meets the fault, and the bookie says so."""
    with pytest.raises(OSError, match=r"\[Errno"):
        await bookie.directories[number].store.checkpoint()

    async def said() -> bool:
        found = await get_record(deployment.metadata, paths.bookie(bookie.id), BookieRecord)
        return found is not None and found[0].failed == (number,)

    await deployment.until(said)


async def test_a_writer_leaves_a_disk_that_failed_and_new_ledgers_avoid_it(deployment: Deployment, /) -> None:
    await three(deployment)
    client = deployment.client()
    writers = [await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2) for _ in range(8)]
    for writer in writers:
        await writer.append(payload(writer.ledger_id, 0))
    bookie = break_disk(deployment, "a", 1)
    await let_fail(deployment, bookie, 1)
    for writer in writers:
        for entry in range(1, 10):
            await writer.append(payload(writer.ledger_id, entry))
        assert writer.is_writable
    for writer in writers:
        failed = find_ledgers_directory(TWO, writer.ledger_id) == 1
        record = await deployment.record(writer.ledger_id)
        assert bookie.id in record.fragments[0].bookies or len(record.fragments) == 1
        if failed:
            assert bookie.id not in record.fragments[-1].bookies
    await client.bookies.refresh_bookie_list()
    await asyncio.sleep(5)  # the writers' quarantine of the bookie is over
    later = [await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2) for _ in range(30)]
    named = [each.ledger_id for each in later if bookie.id in each.record.fragments[0].bookies]
    assert {find_ledgers_directory(TWO, ledger) for ledger in named} == {0}, "the other disk takes ledgers"


async def test_a_ledger_on_all_bookies_takes_an_id_whose_disks_all_work(deployment: Deployment, /) -> None:
    await three(deployment)
    everywhere = {"ensemble_size": len(deployment.bookies), "write_quorum": 3, "ack_quorum": 2}
    bookie = break_disk(deployment, "a", 1)
    bookie.directories[1].store.descriptors.quarantine(1 << 40, 0, 0)  # something to write
    await let_fail(deployment, bookie, 1)
    client = deployment.client()
    for _ in range(8):
        writer = await client.create(**everywhere)
        await writer.append(payload(writer.ledger_id, 0))
        assert find_ledgers_directory(TWO, writer.ledger_id) == 0


async def test_what_was_on_a_failed_disk_is_copied_to_other_bookies(deployment: Deployment, /) -> None:
    await three(deployment)
    shape = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 3}
    writers = [await deployment.a_ledger(10, **shape) for _ in range(8)]
    bookie = break_disk(deployment, "a", 1)
    for each in bookie.directories:
        each.store.descriptors.quarantine(1 << 40, 0, 0)  # something to write
    await let_fail(deployment, bookie, 1)
    hit = [
        each.ledger_id for each in writers
        if bookie.id in each.record.fragments[0].bookies and find_ledgers_directory(TWO, each.ledger_id) == 1
    ]
    assert hit
    for ledger in hit:
        record = await deployment.until_whole(ledger, gone=bookie.id)
        assert len(set(record.fragments[0].bookies)) == 3
        copies = await deployment.copies(ledger)
        assert all(len(nodes) == 3 for nodes in copies.values())
    for each in writers:
        if each.ledger_id not in hit:
            assert await deployment.mark(each.ledger_id) is None
            assert (await deployment.record(each.ledger_id)).fragments == each.record.fragments
    assert RepairReason.DISK_FAILED.value == "disk failed"


async def test_a_replaced_disk_is_filled_from_the_other_bookies(deployment: Deployment, /) -> None:
    await three(deployment)
    writers = [await deployment.a_ledger(10, ensemble_size=3, write_quorum=3, ack_quorum=3) for _ in range(8)]
    id_ = deployment.bookies["a"].id
    mine = [each.ledger_id for each in writers if id_ in each.record.fragments[0].bookies]
    await deployment.simulation.spawn("a", deployment.bookies["a"].close())
    await accept_replaced_directory(deployment.metadata, id_, "ledgers-1")
    bookie = await deployment.start("a", ledgers=("/a-0", "/a-new"), journal="/a-journal")
    assert bookie.directories[1].limbo.limbo_upto >= 0
    assert bookie.first.limbo.limbo_upto == -1

    async def whole() -> bool:
        return bookie.directories[1].limbo.limbo_upto < 0

    await deployment.until(whole)
    for ledger in mine:
        number = find_ledgers_directory(TWO, ledger)
        for entry in range(10):
            found = await bookie.directories[number].store.read_entries(ledger, entry)
            assert found.status is Status.OK, (ledger, entry)
        assert ledger not in bookie.directories[1 - number].store.descriptors.ledger_ids()
    found = await get_record(deployment.metadata, paths.cookie(id_), CookieRecord)
    assert found is not None
    assert found[0].replaced == ()
