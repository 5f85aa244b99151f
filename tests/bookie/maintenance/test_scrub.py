"""The scrubber finds what is damaged before a reader does, says so, and has it mended where a good copy is."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from magnetar.bookie.maintenance.scrub import SCRUB_FILE, QuarantineReports
from magnetar.bookie.server import Bookie
from magnetar.ledger.bookies import DAMAGED_RANGES_MAX
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.metadata.records import DamagedEntriesRecord, encode_record
from magnetar.metadata.store import get_record, put_record
from magnetar.runtime.sim.disk import DiskOperation
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, payload_of
from tests.bookie.maintenance.test_limbo import Deployment, with_deployment
from tests.bookie.stores import DATA, NODE, payload
from tests.support.steps import slowness

RECORD = 8 + 36 + 300
DATA_OFFSET = 4096
PASS_S = 60.0
LOG = f"{DATA}/entries/0000000000000001.log"
INDEX = f"{DATA}/entries/0000000000000001.idx"


async def a_bookie(cluster: Cluster, entries: int = 20, ledgers: tuple[int, ...] = (1, 2)) -> Bookie:
    """With one log of entries of 300 bytes, ledger by ledger."""
    bookie = await cluster.start(scrub_pass_s=PASS_S, upkeep_interval_s=1.0)
    for ledger in ledgers:
        record = records.LedgerRecord(
            ledger_id=ledger, state=records.OPEN, ensemble_size=1, write_quorum=1, ack_quorum=1, key=KEY, token="t",
            fragments=(records.Fragment(0, (bookie.id,)),),
        )  # fmt: skip
        await put_record(cluster.metadata, paths.ledger(ledger), record)
        for entry in range(entries):
            assert (await cluster.caller(bookie).add(ledger, entry, payload(ledger, entry))).status is Status.OK
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    return bookie


async def reported(cluster: Cluster, bookie: Bookie, ledger: int) -> tuple[tuple[int, int], ...] | None:
    path = paths.damaged_copies_of_bookie(ledger, bookie.id)
    found = await get_record(cluster.metadata, path, DamagedEntriesRecord)
    return None if found is None else found[0].ranges


def with_bookie(test: Callable[[Cluster, Bookie], Awaitable[None]]) -> None:
    async def main(cluster: Cluster) -> None:
        await test(cluster, await a_bookie(cluster))

    with_cluster(main)


pytestmark = pytest.mark.run_by.with_args(with_bookie)


async def test_damaged_entries_are_quarantined_and_reported_until_they_are_mended(
    cluster: Cluster, bookie: Bookie, /
) -> None:
    disk = cluster.simulation.node(NODE).disk
    for entry in (3, 4, 9):
        disk.flip_bit(LOG, DATA_OFFSET + entry * RECORD + 100)
    await asyncio.sleep(2 * PASS_S + 5)
    assert await reported(cluster, bookie, 1) == ((3, 4), (9, 9))
    assert await reported(cluster, bookie, 2) is None
    assert bookie.statistics()["scrub_damaged"] >= 3
    for entry in range(20):
        wanted = Status.UNKNOWN if entry in (3, 4, 9) else Status.OK
        assert (await cluster.caller(bookie).read(1, entry))[0].status is wanted
    bookie = await cluster.restart()
    assert bookie.store.descriptors.is_quarantined(1, 9)
    for entry in (3, 4, 9):
        answer = await cluster.caller(bookie).add(1, entry, payload(1, entry), recovery=True)
        assert answer.status is Status.OK
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    await asyncio.sleep(3)
    assert await reported(cluster, bookie, 1) is None


async def test_damage_beside_a_good_copy_here_is_no_matter(cluster: Cluster, bookie: Bookie, /) -> None:
    assert (await cluster.caller(bookie).add(1, 3, payload(1, 3), recovery=True)).status is Status.OK
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    cluster.simulation.node(NODE).disk.flip_bit(LOG, DATA_OFFSET + 3 * RECORD + 100)
    await asyncio.sleep(2 * PASS_S + 5)
    assert bookie.statistics()["scrub_entries"] >= 40
    assert bookie.statistics()["scrub_damaged"] == 0
    answer, frames = await cluster.caller(bookie).read(1, 3)
    assert answer.status is Status.OK
    assert payload_of(frames[0]) == payload(1, 3)


@pytest.mark.run_by.with_args(with_cluster)
async def test_damaged_table_of_the_index_is_written_again_from_the_records(cluster: Cluster, /) -> None:
    bookie = await a_bookie(cluster)
    disk = cluster.simulation.node(NODE).disk
    size = len(bytes(disk.find_inode(INDEX).now.read(1 << 20, 0)))
    before = disk.find_inode(INDEX).now.read(size, 0)
    disk.flip_bit(INDEX, size - 40)
    bookie = await cluster.restart()
    assert (await cluster.caller(bookie).read(2, 7))[0].status is Status.UNKNOWN
    await asyncio.sleep(2 * PASS_S + 5)
    assert bookie.statistics()["scrub_tables_mended"] == 1
    assert disk.find_inode(INDEX).now.read(size, 0) == before
    assert (await cluster.caller(bookie).read(2, 7))[0].status is Status.OK
    assert bookie.store.descriptors.quarantined() == []


def test_pass_takes_its_time_and_goes_on_after_a_restart_where_it_was() -> None:
    read: list[int] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "pread" and operation.path == LOG and operation.size > RECORD:
            read.append(operation.offset)

    async def main(cluster: Cluster) -> None:
        bookie = await a_bookie(cluster, entries=40, ledgers=tuple(range(1, 13)))
        await cluster.simulation.spawn(NODE, bookie.close())
        cluster.simulation.crash(NODE)
        bookie = await cluster.start(scrub_pass_s=1000.0)
        bookie.scrubber.rate_min = 1
        await asyncio.sleep(500)
        half = bookie.scrubber.describe()
        assert 30 <= half["percent"] <= 70  # type: ignore[operator]
        cluster.simulation.crash(NODE)
        cluster.simulation.node(NODE).disk.record = record
        bookie = await cluster.start()
        bookie.scrubber.rate_min = 1
        assert cluster.simulation.world(NODE).files.exists(f"{DATA}/{SCRUB_FILE}")
        await asyncio.sleep(300)
        status = bookie.scrubber.describe()
        assert (status["pass"], status["damaged"]) == (1, 0)
        assert min(read) > DATA_OFFSET + 3 * 40 * RECORD, "what was read before the restart is not read again"
        await asyncio.sleep(700)
        status = bookie.scrubber.describe()
        assert status["pass"] == 2
        assert 700 <= status["lastPassSeconds"] <= 1300  # type: ignore[operator]

    with_cluster(main)


@pytest.mark.parametrize("jump_ms", [-3_600_000, 86_400_000])
def test_how_long_a_pass_takes_is_not_of_the_time_of_day(jump_ms: int) -> None:
    async def main(cluster: Cluster) -> None:
        bookie = await a_bookie(cluster, entries=400)
        await asyncio.sleep(12)
        assert bookie.scrubber.describe()["beganMs"], "its first pass runs"
        cluster.simulation.node(NODE).skew_ms += jump_ms
        await asyncio.sleep(48)
        found = bookie.statistics()
        assert 10 <= found["scrub_last_pass_s"] <= 48
        assert found["scrub_pass"] == 1, "the next one begins when this one's time is over"

    with_cluster(main)


def test_a_pass_that_an_earlier_process_began_took_no_less_than_its_part_here() -> None:
    """Whose time of day was an hour ahead."""

    async def main(cluster: Cluster) -> None:
        bookie = await a_bookie(cluster, entries=40, ledgers=tuple(range(1, 13)))
        await cluster.simulation.spawn(NODE, bookie.close())
        cluster.simulation.crash(NODE)
        bookie = await cluster.start(scrub_pass_s=1000.0)
        bookie.scrubber.rate_min = 1
        await asyncio.sleep(500)
        cluster.simulation.crash(NODE)
        cluster.simulation.node(NODE).skew_ms -= 3_600_000
        bookie = await cluster.start()
        bookie.scrubber.rate_min = 1
        await asyncio.sleep(990)
        status = bookie.scrubber.describe()
        assert status["pass"] in (1, 2)
        assert 400 <= status["lastPassSeconds"] <= 700  # type: ignore[operator]

    with_cluster(main)


async def test_deleted_ledgers_are_passed_by(cluster: Cluster, bookie: Bookie, /) -> None:
    await cluster.simulation.spawn(NODE, bookie.store.delete_ledgers([1]))
    cluster.simulation.node(NODE).disk.flip_bit(LOG, DATA_OFFSET + 3 * RECORD + 100)
    await asyncio.sleep(PASS_S + 5)
    assert bookie.statistics()["scrub_damaged"] == 0


@pytest.mark.run_by.with_args(with_deployment)
async def test_damaged_copy_of_a_closed_ledger_is_mended_from_its_peers(deployment: Deployment, /) -> None:
    client = deployment.client()
    writer = await client.create()
    for i in range(30):
        await writer.append(b"%d" % i * 100)
    await writer.close()
    await client.close()
    bookie = deployment.bookies["b1"]
    await deployment.simulation.spawn("b1", bookie.store.checkpoint())
    disk = deployment.simulation.node("b1").disk
    log = next(path for path in disk.list_paths() if path.endswith(".log"))
    for offset in range(DATA_OFFSET + 300, DATA_OFFSET + 1500, 400):
        disk.flip_bit(log, offset)
    await deployment.simulation.spawn("b1", bookie.scrubber.run_pass())
    assert bookie.statistics()["scrub_damaged"] > 0
    await deployment.simulation.spawn("b1", bookie.store.checkpoint())
    await asyncio.sleep(3)
    assert bookie.store.descriptors.quarantined() == []
    assert await deployment.metadata.children(paths.DAMAGED_LEDGERS) == []
    for entry in range(30):
        answer, _ = await deployment.caller("b1").read(writer.ledger_id, entry, key=writer.record.key)
        assert answer.status is Status.OK


async def test_a_report_of_forty_thousand_ranges_costs_each_a_step(cluster: Cluster, bookie: Bookie, /) -> None:
    """It was quadratic, 44 s in the event loop, and a report of a reader may name any entry."""
    store, many = bookie.store, 40_000
    bookie.disk_monitor._interval_s = 1e6
    await asyncio.sleep(2.0)  # its last look by the interval is over
    for entry in (3, 4, 9):
        cluster.simulation.node(NODE).disk.flip_bit(LOG, DATA_OFFSET + entry * RECORD + 100)
    for entry in range(many):
        store.descriptors.quarantine(7, 2 * entry, 2 * entry)
    wide = DamagedEntriesRecord(ledger_id=1, bookie=bookie.id, ranges=((-5, 3), (8, 1 << 62)))
    await cluster.metadata.put(
        paths.damaged_copies_of_bookie(1, bookie.id), encode_record(wide, paths.damaged_copies_of_bookie(1, bookie.id))
    )
    reports = QuarantineReports(store, bookie.id, cluster.simulation.world(NODE).clock, lambda: None)
    began = time.process_time()
    await cluster.simulation.spawn(NODE, reports.store_quarantine_reports(cluster.metadata))
    told = tuple((2 * entry, 2 * entry) for entry in range(DAMAGED_RANGES_MAX))
    assert await reported(cluster, bookie, 7) == told, "what has room in a record; the others when these are mended"
    assert await reported(cluster, bookie, 1) == ((3, 3), (9, 9)), "what is damaged here"
    for entry in range(many):
        store.descriptors.end_quarantine(7, 2 * entry, 2 * entry)
    await cluster.simulation.spawn(NODE, reports.store_quarantine_reports(cluster.metadata))
    assert await reported(cluster, bookie, 7) is None
    assert time.process_time() - began < 5 * slowness()
