"""Ledgers whose bookies answer before their sync: what is lost is the end of an open one."""

import asyncio

import pytest
from msgspec.structs import replace

from magnetar.ledger import LedgerConfig, LedgerWriter
from magnetar.ledger.metadata_core import UNSYNCED_PROPERTIES
from magnetar.ledger.peer_format import BookieAnswerHead, BookieOperation, BookieRequestFlags, Status
from magnetar.metadata.records import CLOSED, OPEN
from magnetar.proto.errors import LedgerClosed
from tests.ledger.conftest import QUICK, Cluster, until

ADDS = (BookieOperation.ADD, BookieOperation.ADD_MANY)


async def unsynced(cluster: Cluster, config: LedgerConfig = QUICK, ack_quorum: int = 2) -> LedgerWriter:
    return await cluster.client(config).create(
        ensemble_size=2, write_quorum=2, ack_quorum=ack_quorum, properties=UNSYNCED_PROPERTIES
    )


def flags_of_adds(cluster: Cluster, ledger_id: int) -> set[BookieRequestFlags]:
    requests = (each for bookie in cluster.bookies for each in bookie.requests)
    return {each.flags for each in requests if each.op in ADDS and each.ledger == ledger_id}


async def test_only_adds_of_a_ledger_with_that_property_have_the_flag(cluster: Cluster) -> None:
    other, writer = await cluster.client().create(), await unsynced(cluster)
    for each in (other, writer):
        await each.append(b"one")
        await asyncio.gather(*(each.append(b"many") for _ in range(5)))
    assert flags_of_adds(cluster, writer.ledger_id) == {BookieRequestFlags.UNSYNCED}
    assert flags_of_adds(cluster, other.ledger_id) == {BookieRequestFlags.NONE}


async def test_what_a_recovery_writes_back_is_synced(cluster: Cluster) -> None:
    writer = await unsynced(cluster)
    await writer.append(b"x")
    for bookie in cluster.bookies:
        bookie.requests.clear()
    await cluster.client().recover(writer.ledger_id)
    assert flags_of_adds(cluster, writer.ledger_id) <= {BookieRequestFlags.RECOVERY}


async def test_the_end_is_stored_after_one_bookie_has_synced_all(cluster: Cluster) -> None:
    writer = await unsynced(cluster)
    await writer.append(b"x")
    mine = [cluster.bookie(each) for each in writer.record.fragments[0].bookies]
    for bookie in mine:
        bookie.silent.add(BookieOperation.READ_LAC)
    closing = asyncio.ensure_future(writer.close())
    await until(lambda: all(bookie.unanswered for bookie in mine))
    assert (await cluster.client().read_record(writer.ledger_id)).state == OPEN
    head, request = mine[1].unanswered[0]
    assert head.flags is BookieRequestFlags.FENCE
    request.reply(BookieAnswerHead(head.op, Status.OK, head.ledger, 0, -1, 0).encode())
    assert (await closing).last_entry == 0
    assert (await cluster.client().read_record(writer.ledger_id)).state == CLOSED


async def test_the_end_of_another_ledger_and_of_an_empty_one_waits_for_no_bookie(cluster: Cluster) -> None:
    for bookie in cluster.bookies:
        bookie.silent.add(BookieOperation.READ_LAC)
    other, empty = await cluster.client().create(), await unsynced(cluster)
    await other.append(b"x")
    assert (await other.close()).last_entry == 0
    assert (await empty.close()).last_entry == -1


async def test_when_no_bookie_says_that_it_has_synced_the_ledger_ends_and_the_log_says_so(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    writer = await unsynced(cluster, replace(QUICK, add_timeout_s=0.1))
    await writer.append(b"x")
    for bookie in cluster.bookies:
        bookie.status[BookieOperation.READ_LAC] = Status.UNKNOWN
    assert (await writer.close()).last_entry == 0
    assert "no bookie has said that it is synced" in caplog.text


async def test_no_bookie_is_replaced_and_the_ledger_ends_instead(cluster: Cluster) -> None:
    """Else an entry of the first ensemble could be missing below the entries of the second one."""
    writer = await unsynced(cluster)
    await writer.append(b"x")
    cluster.bookie(writer.record.fragments[0].bookies[0]).status[BookieOperation.ADD] = Status.UNKNOWN
    with pytest.raises(LedgerClosed):
        await writer.append(b"y")
    await writer.wait_finished()
    record = await cluster.client().read_record(writer.ledger_id)
    assert (record.state, record.last_entry, len(record.fragments)) == (CLOSED, 0, 1)


@pytest.mark.parametrize("kept", [(4, 6), (6, 4)])
async def test_entries_that_all_bookies_lost_are_the_end_of_the_ledger_and_no_others(
    cluster: Cluster, kept: tuple[int, int]
) -> None:
    """Both were killed, each after other entries: the recovery ends where the longer copy ends."""
    writer = await unsynced(cluster)
    await asyncio.gather(*(writer.append(b"%d" % entry) for entry in range(10)))
    assert writer.last_confirmed == 9
    for bookie, entries in zip(writer.record.fragments[0].bookies, kept, strict=True):
        shelf = cluster.bookie(bookie).shelves[writer.ledger_id]
        shelf.entries = {entry: stored for entry, stored in shelf.entries.items() if entry < entries}
        shelf.lac = min(shelf.lac, entries - 2)
    reader = await cluster.client().recover(writer.ledger_id)
    assert reader.last_entry == 5
    assert [bytes(each.payload) for each in await reader.read(0, 5)] == [b"%d" % entry for entry in range(6)]


async def test_an_entry_that_one_bookie_lost_is_found_at_the_other_although_one_miss_would_prove_its_absence(
    cluster: Cluster,
) -> None:
    writer = await unsynced(cluster)
    await writer.append(b"x")
    one, two = (cluster.bookie(each) for each in writer.record.fragments[0].bookies)
    one.shelves[writer.ledger_id].entries.clear()
    two.silent.add(BookieOperation.READ)
    recovering = asyncio.ensure_future(cluster.client().recover(writer.ledger_id))
    await until(lambda: bool(two.unanswered) and any(each.op is BookieOperation.READ for each in one.requests))
    await asyncio.sleep(0.05)
    assert not recovering.done(), "it waits for the other one"
    two.silent.clear()
    for head, request in two.unanswered:
        answer, frames = two._answer(head, request)
        request.reply(answer.encode(), frames)
    assert (await recovering).last_entry == 0
