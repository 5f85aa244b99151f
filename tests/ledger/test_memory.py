"""What all ledgers of a client keep for bookies that do not answer has one bound, and nothing waits for good."""

import asyncio

import pytest

from magnetar.ledger import LedgerConfig, LedgerWriter
from magnetar.ledger.memory import LOOK_BYTES, AppendMemory
from magnetar.ledger.peer_format import BookieOperation, Status
from tests.ledger.conftest import Cluster
from tests.ledger.test_sender import Rig

LIMIT = 20_000


async def fill(writers: list[LedgerWriter], size: int) -> None:
    """Appends to all in turn as long as they have room."""
    while any(writer.has_room for writer in writers):
        await asyncio.gather(*(writer.append(bytes(size)) for writer in writers if writer.has_room))


async def test_a_bookie_that_does_not_answer_stops_all_ledgers_at_one_bound_and_none_for_good(cluster: Cluster) -> None:
    client = cluster.client(LedgerConfig(add_timeout_s=5.0, retry_s=0.02, memory_bytes_max=LIMIT))
    writers = [await client.create() for _ in range(8)]
    hanging = cluster.bookies[0]
    hanging.silent.add(BookieOperation.ADD)
    await fill(writers, 500)
    held = client.bookies.memory.held
    assert LIMIT <= held < LIMIT + 8 * 700, "one entry of each ledger exceeds it at most"
    assert not any(writer.pending_entries for writer in writers), "the other two have confirmed all"
    async with asyncio.timeout(60):
        await asyncio.gather(*(writer.wait_room() for writer in writers))
    assert client.bookies.memory.held < LIMIT, "the bookie failed, and nothing is kept for it"
    hanging.silent.clear()


async def test_what_cannot_wait_is_taken_past_the_bound(cluster: Cluster) -> None:
    client = cluster.client(LedgerConfig(memory_bytes_max=1000))
    topic, cursor = await client.create(), await client.create()
    cluster.bookies[0].status[BookieOperation.ADD] = Status.BUSY
    await fill([topic], 600)
    assert not cursor.has_room
    assert await cursor.append(b"acknowledged") == 0
    cluster.bookies[0].status.clear()
    await cursor.wait_room()


@pytest.mark.asyncio
async def test_an_entry_counts_once_until_the_last_copy_is_answered() -> None:
    rig = Rig((3, 3, 2))
    rig.append(bytes(1000), bytes(500))
    assert rig.memory.held == 1500, "before it is sent"
    await rig.wait_sent(3)
    sent = rig.memory.held
    assert 1500 < sent < 1800
    for each in rig.sent[:2]:
        each.say(Status.OK, Status.OK)
    await rig.wait_facts(2)
    assert rig.memory.held == sent
    rig.sent[2].say(Status.OK, Status.BUSY)
    await rig.wait_sent(4)
    assert 0 < rig.memory.held < sent, "what is asked again is one entry"
    rig.sent[3].say(Status.OK)
    await rig.wait_facts(4)
    assert rig.memory.held == 0


@pytest.mark.asyncio
async def test_a_request_that_fails_or_is_cancelled_is_kept_no_more() -> None:
    rig = Rig((3, 3, 2))
    rig.append(bytes(1000))
    await rig.wait_sent(3)
    rig.sent[0].answer.cancel()
    rig.sent[1].answer.set_exception(ConnectionResetError())
    rig.sent[2].say(Status.OK)
    await rig.wait_facts(3)
    assert rig.memory.held == 0


def test_as_many_that_wait_are_told_as_there_is_room_for_and_all_when_nothing_is_held() -> None:
    memory = AppendMemory(10 * LOOK_BYTES)
    told: list[int] = []
    memory.held = 12 * LOOK_BYTES
    looks = [lambda number=number: told.append(number) for number in range(20)]
    for look in looks:
        memory.add_waiter(look)
    memory.remove_waiter(looks[1])
    memory.release(4 * LOOK_BYTES)
    assert told == [0, 2], "in the order of waiting"
    memory.release(4 * LOOK_BYTES)
    assert told == [0, *range(2, 9)]
    memory.release(4 * LOOK_BYTES)
    assert told == [0, *range(2, 20)], "no later answer would tell them"
