"""Entries that are pushed: their listener is told in order, once, and of each failure."""

import asyncio

import pytest
from msgspec.structs import replace

from magnetar.ledger import LedgerEnd
from magnetar.ledger.handle import ENTRY_BYTES_MAX, LedgerWriter
from magnetar.ledger.peer_format import BookieOperation, Status
from magnetar.ledger.reader_core import PendingAppend
from magnetar.proto.errors import BackPressure, LedgerClosed, MessageTooLarge
from tests.ledger.conftest import QUICK, Cluster, until


class Listener:
    def __init__(self) -> None:
        self.told: list[int] = []
        self.failures = 0
        self.changed = asyncio.Event()

    def on_appended(self, writer: LedgerWriter, last_entry: int) -> None:
        assert writer.last_confirmed >= last_entry
        self.told.append(last_entry)
        self.changed.set()

    def on_append_failed(self, writer: LedgerWriter) -> None:
        self.failures += 1
        self.changed.set()

    async def until(self, last_entry: int) -> None:
        async with asyncio.timeout(30):
            while not self.told or self.told[-1] < last_entry:
                self.changed.clear()
                await self.changed.wait()


def payload(data: bytes) -> PendingAppend:
    return PendingAppend((data,), len(data))


async def listening(cluster: Cluster, **config: object) -> tuple[LedgerWriter, Listener]:
    writer, listener = await cluster.client(replace(QUICK, **config)).create(), Listener()
    writer.listener = listener
    return writer, listener


async def test_a_listener_is_told_once_for_all_that_an_answer_confirms_and_in_order(cluster: Cluster) -> None:
    writer, listener = await listening(cluster)
    for number in range(50):
        writer.append_for_listener(payload(b"entry %d" % number))
    assert writer.pending_entries == 50
    await listener.until(49)
    assert listener.told == sorted(set(listener.told))
    assert len(listener.told) < 10, "not once an entry"
    assert (writer.pending_entries, writer.pending_bytes, writer.adds.length_confirmed) == (0, 0, writer.adds.length)
    assert await writer.close() == LedgerEnd(49, writer.adds.length_confirmed)
    assert not listener.failures


async def test_pushes_and_appends_are_one_order(cluster: Cluster) -> None:
    writer, listener = await listening(cluster)
    writer.append_for_listener(payload(b"0"))
    one = writer.append(b"1")
    writer.append_for_listener(payload(b"2"))
    assert await one == 1
    await listener.until(2)
    writer.append_for_listener(payload(b"3"))
    assert await writer.append(b"4") == 4
    assert listener.told[-1] == 3, "of the entries that were pushed"


async def test_what_is_refused_raises_before_any_work(cluster: Cluster) -> None:
    writer, listener = await listening(cluster, pending_entries_max=2)
    with pytest.raises(MessageTooLarge):
        writer.append_for_listener(payload(bytes(ENTRY_BYTES_MAX + 1)))
    writer.append_for_listener(payload(b"0"))
    writer.append_for_listener(payload(b"1"))
    assert not writer.has_room
    with pytest.raises(BackPressure):
        writer.append_for_listener(payload(b"2"))
    await writer.close()
    with pytest.raises(LedgerClosed):
        writer.append_for_listener(payload(b"2"))
    assert listener.told[-1] == 1


async def test_a_listener_hears_of_entries_that_are_not_confirmed_any_more(cluster: Cluster) -> None:
    writer, listener = await listening(cluster)
    writer.append_for_listener(payload(b"stored"))
    await listener.until(0)
    for id_ in writer.record.fragments[0].bookies[:2]:
        cluster.bookie(id_).status[BookieOperation.ADD] = Status.READ_ONLY
    for _ in range(5):
        writer.append_for_listener(payload(b"x"))
    await writer.wait_finished()
    assert (await writer.close()).last_entry == 0
    assert listener.told == [0]
    assert listener.failures >= 1
    assert writer.pending_bytes == 0


async def test_after_a_fence_a_listener_hears_of_the_failure_and_of_nothing_as_stored(cluster: Cluster) -> None:
    writer, listener = await listening(cluster)
    writer.append_for_listener(payload(b"a"))
    await listener.until(0)
    await cluster.client().recover(writer.ledger_id)
    writer.append_for_listener(payload(b"zombie"))
    async with asyncio.timeout(30):
        while not listener.failures:
            listener.changed.clear()
            await listener.changed.wait()
    assert await writer.close() == LedgerEnd(0, 1)
    assert listener.told == [0]


async def test_an_entry_that_went_on_to_another_ledger_hears_nothing_of_the_first(cluster: Cluster) -> None:
    """One object is in both, one after the other: a late answer of the first confirms nothing in the second."""
    first, told_first = await listening(cluster)
    second, told = await listening(cluster)
    moved = [payload(b"zero"), payload(b"one")]
    for bookie in cluster.bookies:
        bookie.silent.add(BookieOperation.ADD)
    for each in moved:
        first.append_for_listener(each)
    for bookie in cluster.bookies:
        await bookie.wait_requests(BookieOperation.ADD, 2)
    await first.abandon()
    assert (told_first.failures, first.pending_bytes) == (1, 0)
    for each in (payload(b"new"), *reversed(moved)):
        second.append_for_listener(each)
    for bookie in cluster.bookies:
        await bookie.wait_requests(BookieOperation.ADD, 5)
        bookie.answer_late(first.ledger_id)
    await until(lambda: first._sender.unanswered_bytes == 0)
    assert (told_first.told, told.told, second.pending_entries) == ([], [], 3)
    second.adds.check()
    for bookie in cluster.bookies:
        bookie.answer_late(second.ledger_id)
    await told.until(2)
    assert await second.close() == LedgerEnd(2, len(b"newonezero"))
    reader = await cluster.client().open(second.ledger_id)
    assert [each.payload for each in await reader.read(0, 2)] == [b"new", b"one", b"zero"]


async def test_what_has_not_left_when_its_ledger_ended_leaves_with_the_next_ledger_alone(cluster: Cluster) -> None:
    first, _ = await listening(cluster)
    second, told = await listening(cluster)
    entry = payload(b"moved")
    first.append_for_listener(entry)
    first._abandon()
    second.append_for_listener(payload(b"new"))
    second.append_for_listener(entry)
    await told.until(1)
    assert {head.ledger for bookie in cluster.bookies for head in bookie.requests} == {second.ledger_id}
    assert cluster.clients[0].bookies.memory.held == 0


async def test_a_closed_ledger_is_not_kept_in_memory_and_a_client_closes_while_one_ends(cluster: Cluster) -> None:
    client = cluster.client(QUICK)
    writers = [await client.create() for _ in range(3)]
    writers[0].append(b"1")
    await writers[0].close()
    assert set(client._writers) == {each.ledger_id for each in writers[1:]}
    await writers[1].abandon()
    await asyncio.gather(client.close(), writers[2].close(), return_exceptions=True)
    assert all(not each.is_writable for each in writers)
