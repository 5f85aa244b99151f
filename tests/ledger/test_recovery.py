"""A recoverer that goes away at any moment leaves nothing undone, and a reader finds entries that were moved."""

import asyncio

import msgspec
import pytest

from magnetar.ledger import recovery
from magnetar.ledger.peer_format import BookieOperation, BookieRequestFlags
from magnetar.ledger.recovery_core import CloseRecoveredLedger
from magnetar.metadata import paths
from magnetar.metadata.records import CLOSED, IN_RECOVERY, OPEN, Fragment
from magnetar.metadata.store import put_record
from magnetar.proto.errors import LedgerNotFound, Unavailable
from tests.ledger.conftest import Cluster
from tests.ledger.fake_bookie import FakeBookie


@pytest.mark.parametrize("op", [BookieOperation.READ_LAC, BookieOperation.READ, BookieOperation.ADD])
async def test_a_recoverer_that_stops_at_any_step_leaves_the_ledger_to_another_which_keeps_all(
    cluster: Cluster, op: BookieOperation
) -> None:
    """Fencing, reading, writing back: it hangs there, is stopped, and the next one starts from the beginning."""
    writer = await cluster.client().create()
    await asyncio.gather(*(writer.append(b"%d" % i) for i in range(10)))
    for bookie in cluster.bookies:
        bookie.requests.clear()
        bookie.silent.add(op)
    first = asyncio.create_task(cluster.client().recover(writer.ledger_id))
    await cluster.bookies[0].wait_requests(op, 1)
    client = cluster.client()
    assert (await client.read_record(writer.ledger_id)).state == "in-recovery"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    for bookie in cluster.bookies:
        bookie.silent.clear()
    reader = await client.recover(writer.ledger_id)
    assert (reader.is_closed, reader.last_entry) == (True, 9)
    assert [bytes(e.payload) for e in await reader.read(0, 9)] == [b"%d" % i for i in range(10)]
    added = [head for bookie in cluster.bookies for head in bookie.requests if head.op is BookieOperation.ADD]
    assert added, "what is beyond the LAC is written back"
    assert all(head.flags & BookieRequestFlags.RECOVERY for head in added), (
        "or the fenced bookies would refuse it (#4163)"
    )


async def test_a_reader_of_a_closed_ledger_finds_its_entries_at_the_bookies_they_were_moved_to(
    cluster: Cluster,
) -> None:
    """Its record is from before the move: on failure it is read again, once."""
    spares = [await FakeBookie(number).start(cluster.world, cluster.metadata) for number in (3, 4, 5)]
    client = cluster.client()
    writer = await client.create()
    for i in range(4):
        await writer.append(b"%d" % i)
    await writer.close()
    reader = await client.open(writer.ledger_id)
    old = {bookie.id: bookie for bookie in (*cluster.bookies, *spares)}
    record = reader.record
    new = [bookie for id_, bookie in old.items() if id_ not in record.fragments[0].bookies]
    for id_, bookie in zip(record.fragments[0].bookies, new, strict=True):
        bookie.shelves = old[id_].shelves
        old[id_].shelves = {}
    moved = msgspec.structs.replace(record, fragments=(Fragment(0, tuple(bookie.id for bookie in new)),))
    assert moved.state == CLOSED
    await put_record(cluster.metadata, paths.ledger(record.ledger_id), moved)
    assert [bytes(e.payload) for e in await reader.read(0, 3)] == [b"%d" % i for i in range(4)]
    for bookie in spares:
        await bookie.stop()


async def test_who_recovers_a_ledger_has_its_last_entry_without_another_read(cluster: Cluster) -> None:
    """A broker looks at it next, for where the log goes on."""
    writer = await cluster.client().create()
    await asyncio.gather(*(writer.append(b"%d" % i) for i in range(3)))
    reader = await cluster.client().recover(writer.ledger_id)
    for bookie in cluster.bookies:
        bookie.requests.clear()
    (last,) = await reader.read(2, 2)
    assert (last.entry_id, bytes(last.payload)) == (2, b"2")
    assert not any(bookie.requests for bookie in cluster.bookies)
    assert [bytes(each.payload) for each in await reader.read(0, 2)] == [b"0", b"1", b"2"]
    joined = await cluster.client().recover(writer.ledger_id)  # it is closed already
    assert [bytes(each.payload) for each in await joined.read(2, 2)] == [b"2"]


async def test_the_end_that_another_recoverer_stored_is_adopted_and_not_the_entry_that_was_found(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = await cluster.client().create()
    for i in range(2):
        await writer.append(b"%d" % i)
    cluster.bookies[0].silent.add(BookieOperation.ADD)  # what is written back; two are enough
    record = await cluster.client().read_record(writer.ledger_id)
    close = recovery._Attempt._close

    async def late(attempt: recovery._Attempt, effect: CloseRecoveredLedger) -> recovery.RecoveryFact:
        shorter = msgspec.structs.replace(record, state=CLOSED, last_entry=0, length=1)
        await put_record(cluster.metadata, paths.ledger(record.ledger_id), shorter)
        return await close(attempt, effect)

    monkeypatch.setattr(recovery._Attempt, "_close", late)
    reader = await cluster.client().recover(writer.ledger_id)
    assert reader.last_entry == 0
    assert [bytes(each.payload) for each in await reader.read(0, 0)] == [b"0"]


@pytest.mark.parametrize("is_marked", [False, True], ids=["open", "another-last-fragment"])
async def test_a_ledger_whose_record_does_not_allow_the_close_without_lost_entries_exists_and_may_be_tried_again(
    cluster: Cluster, is_marked: bool
) -> None:
    client = cluster.client()
    writer = await client.create()
    await writer.append(b"kept")
    record = writer.record
    search = client.make_lost_entries_search(record, force=True)
    if is_marked:
        changed = (Fragment(0, record.fragments[0].bookies[::-1]),)
        record = msgspec.structs.replace(record, state=IN_RECOVERY, fragments=changed)
        await put_record(cluster.metadata, paths.ledger(record.ledger_id), record)
    with pytest.raises(Unavailable, match="try again") as caught:
        await search.close_unrecoverable_ledger()
    assert caught.value.retryable
    assert (await client.read_record(record.ledger_id)).state == (IN_RECOVERY if is_marked else OPEN)
    assert (await client.recover(record.ledger_id)).last_entry == 0
    assert (await search.close_unrecoverable_ledger()).last_entry == 0, "it is closed already"
    await client.delete(record.ledger_id)
    with pytest.raises(LedgerNotFound, match="does not exist any more"):
        await search.close_unrecoverable_ledger()


async def test_a_malformed_answer_about_stored_entries_says_nothing_and_each_entry_is_asked_for(
    cluster: Cluster,
) -> None:
    """A fake bookie answers the question which entries it has with the entries themselves."""
    client = cluster.client()
    writer = await client.create()
    for i in range(3):
        await writer.append(b"%d" % i)
    await writer.close()
    search = client.make_lost_entries_search(await client.read_record(writer.ledger_id))
    assert await search.find_lost_entries() == recovery.LostEntriesReport([], [], [])
    for bookie in cluster.bookies:
        del bookie.shelves[writer.ledger_id].entries[1]
    search = client.make_lost_entries_search(await client.read_record(writer.ledger_id))
    assert await search.find_lost_entries() == recovery.LostEntriesReport([(1, 1)], [], [])
