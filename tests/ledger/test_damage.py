"""What readers and recoverers get damaged is reported, once, beside what others report, and never in their way."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.maintenance import scrub
from magnetar.ledger import LedgerClient, bookies
from magnetar.ledger.bookies import DamageReports, EntryIdRanges, store_damage_report, subtract_ranges, union_ranges
from magnetar.ledger.peer_format import Status
from magnetar.ledger.placement_core import BookieFaultKind
from magnetar.metadata import paths
from magnetar.metadata.records import DamagedEntriesRecord
from magnetar.metadata.store import MetadataStore, get_record
from magnetar.proto.errors import Unavailable
from tests.bookie.maintenance.test_entry_repairer import a_closed_ledger, damaged
from tests.bookie.maintenance.test_entry_repairer import damage as damage_on_disk
from tests.bookie.maintenance.test_limbo import Deployment, with_deployment
from tests.ledger.conftest import Cluster

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=12).map(
    lambda found: tuple((first, first + more) for first, more in found)
)


def numbers(ranges: EntryIdRanges) -> set[int]:
    return {entry for first, last in ranges for entry in range(first, last + 1)}


@given(RANGES, RANGES)
def test_ranges_are_put_together_and_taken_away_as_sets_are(some: EntryIdRanges, others: EntryIdRanges) -> None:
    assert numbers(union_ranges(some, others)) == numbers(some) | numbers(others)
    assert numbers(subtract_ranges(some, others)) == numbers(some) - numbers(others)
    for found in (union_ranges(some, others), subtract_ranges(some, others)):
        assert all(first <= last for first, last in found)
        assert list(found) == sorted(found)
    assert all(a[1] + 1 < b[0] for a, b in pairwise(union_ranges(some, others)))


async def said(metadata: MetadataStore, ledger: int, bookie: str) -> tuple[tuple[int, int], ...] | None:
    found = await get_record(metadata, paths.damaged_copies_of_bookie(ledger, bookie), DamagedEntriesRecord)
    return None if found is None else found[0].ranges


async def flushed(client: LedgerClient) -> None:
    await client._bookies.damage.wait_reports_written()


async def test_a_reader_reports_wrong_bytes_once_and_reads_on(cluster: Cluster) -> None:
    client = cluster.client()
    writer = await client.create()
    for i in range(6):
        await writer.append(b"%d" % i)
    await writer.close()
    rotten = cluster.bookies[0]
    rotten.flip |= {1, 2, 4}
    for _ in range(3):  # whoever is asked first: all replicas are, one after the other
        reader = await client.open(writer.ledger_id)
        for other in cluster.bookies[1:]:
            client._bookies.record_read_fault(other.id, BookieFaultKind.FAILED)
        for entry in range(6):
            assert [bytes(e.payload) for e in await reader.read(entry, entry)] == [b"%d" % entry]
            client._bookies._trouble.reset_weight(rotten.id)
    await flushed(client)
    assert await said(cluster.metadata, writer.ledger_id, rotten.id) == ((1, 2), (4, 4))
    assert client._bookies.damage.dropped == 0
    for other in cluster.bookies[1:]:
        assert await said(cluster.metadata, writer.ledger_id, other.id) is None


async def test_a_recoverer_reports_the_copy_that_is_no_vote(cluster: Cluster) -> None:
    client = cluster.client()
    writer = await client.create()
    await writer.append(b"kept")
    await asyncio.gather(*[bookie.wait_requests(bookie.requests[0].op, 1) for bookie in cluster.bookies])
    cluster.bookies[1].flip.add(0)
    assert (await client.recover(writer.ledger_id)).last_entry == 0
    await flushed(client)
    assert await said(cluster.metadata, writer.ledger_id, cluster.bookies[1].id) == ((0, 0),)


async def test_each_changes_its_own_part_of_a_report_and_the_last_removes_it(cluster: Cluster) -> None:
    store = cluster.metadata
    assert await store_damage_report(store, 7, "b", ((3, 5),)) == ((3, 5),)
    assert await store_damage_report(store, 7, "b", ((6, 6), (9, 9))) == ((3, 6), (9, 9))
    assert await store_damage_report(store, 7, "b", ((4, 4),), before=((3, 5),)) == ((4, 4), (6, 6), (9, 9))
    many = [store_damage_report(store, 7, "b", ((number, number),)) for number in range(20, 40, 2)]
    await asyncio.gather(*many)
    assert await store_damage_report(store, 7, "b", (), before=((0, 19),)) == tuple((n, n) for n in range(20, 40, 2))
    assert await store_damage_report(store, 7, "b", (), before=((20, 40),)) == ()
    assert await said(store, 7, "b") is None
    assert await store_damage_report(
        store, 7, "b", (), before=((20, 40),)
    ) == (), "nothing to take back is nothing to do"


async def test_a_report_that_the_metadata_did_not_take_is_made_again_when_the_entry_is_read_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = DamageReports(cluster.metadata)

    async def refuse(*_: object, **__: object) -> None:
        raise Unavailable("not now")

    with monkeypatch.context() as patched:
        patched.setattr(bookies, "put_record", refuse)
        reports.add(7, "b", 1)
        await reports.wait_reports_written()
    assert await said(cluster.metadata, 7, "b") is None
    reports.add(7, "b", 1)
    await reports.wait_reports_written()
    assert await said(cluster.metadata, 7, "b") == ((1, 1),)
    await reports.close()


async def test_what_waits_and_what_is_remembered_is_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookies, "WAITING_REPORTS_MAX", 10)
    monkeypatch.setattr(bookies, "KNOWN_DAMAGED_ENTRIES_MAX", 15)
    reports = DamageReports(cluster.metadata)
    for entry in range(50):
        reports.add(7, "b", entry)
    assert reports.dropped == 40
    await reports.wait_reports_written()
    assert await said(cluster.metadata, 7, "b") == ((0, 9),)
    for entry in range(50):
        reports.add(7, "b", entry)
    await reports.wait_reports_written()
    assert await said(cluster.metadata, 7, "b") == ((0, 14),)
    await reports.close()


def test_what_a_reader_reports_is_mended_by_the_bookie_and_the_report_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole entry that somebody reported, and damaged ones that no scrubber has found."""
    monkeypatch.setattr(scrub, "FIRST_PASS_DELAY_S", 1e6)

    async def main(deployment: Deployment) -> None:
        ledger = await a_closed_ledger(deployment)
        bookie = deployment.bookies["b1"]
        damage_on_disk(deployment)
        rotten = [entry for entry in range(30) if await status(deployment, ledger, entry) is not Status.OK]
        assert rotten
        assert bookie.store.descriptors.quarantined() == [], "nobody has found it"
        await store_damage_report(
            deployment.metadata, ledger, bookie.id, tuple((entry, entry) for entry in (*rotten, 29))
        )
        await asyncio.sleep(200)
        assert bookie.store.descriptors.quarantined() == []
        assert await damaged(deployment, ledger) is None
        assert {await status(deployment, ledger, entry) for entry in range(30)} == {Status.OK}

    with_deployment(main)


async def status(deployment: Deployment, ledger: int, entry: int) -> Status:
    key = (await deployment.record(ledger)).key
    return (await deployment.caller("b1").read(ledger, entry, key=key))[0].status
