"""Adds that are answered before their sync: what a crash may take, and from whom."""

import asyncio
import contextlib
from functools import partial

import pytest

from magnetar.ledger.peer_format import (
    BookieOperation,
    BookieRequestFlags,
    Status,
    encode_add_many_request,
    encode_adds,
)
from magnetar.proto.errors import MagnetarError
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, PeerCaller, payload_of, rows, stored_entry
from tests.bookie.stores import NODE

pytestmark = pytest.mark.run_by.with_args(with_cluster)

ON_DISK, IN_MEMORY = 1, 2
"""Ledgers, of which the adds are answered after their sync, and before it."""
UNSYNCED = BookieRequestFlags.UNSYNCED


async def add_unsynced(caller: PeerCaller, entry: int, payload: bytes = b"x", ledger: int = IN_MEMORY) -> Status:
    stored = stored_entry(ledger, entry, payload)
    head, _ = await caller.send(BookieOperation.ADD, ledger, entry, flags=UNSYNCED, frames=(stored,))
    return head.status


async def entries_of(caller: PeerCaller, ledger: int) -> list[bytes]:
    head, entries = await caller.read(ledger, 0, count=100)
    return [payload_of(each) for each in entries] if head.status is Status.OK else []


async def test_an_unsynced_add_is_answered_before_its_block_is_written_and_written_all_the_same(
    cluster: Cluster, /
) -> None:
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    await caller.add(ON_DISK, 0, b"synced")
    cluster.simulation.node(NODE).disk_delays.mean_s = 1.0
    before = bookie.statistics()["journal_blocks"]
    assert await add_unsynced(caller, 0) is Status.OK
    assert bookie.statistics()["journal_blocks"] == before
    assert await entries_of(caller, IN_MEMORY) == [b"x"], "and may be read"
    assert (await caller.add(ON_DISK, 1, b"synced")).status is Status.OK
    caller = cluster.caller(await cluster.restart())
    assert await entries_of(caller, IN_MEMORY) == [b"x"], "its record was in the journal before the other one"


async def test_many_entries_of_a_request_are_answered_so_too_and_bad_ones_are_refused(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    cluster.simulation.node(NODE).disk_delays.mean_s = 1.0
    stored = [stored_entry(IN_MEMORY, entry, b"%d" % entry) for entry in range(3)]
    head = encode_add_many_request(IN_MEMORY, 0, 3, KEY, UNSYNCED)
    before = bookie.statistics()["journal_blocks"]
    reply = await caller.peer.request(head, encode_adds(rows(stored)), timeout_s=10)
    assert bytes(reply.frames[0]) == bytes([Status.OK] * 3)
    assert bookie.statistics()["journal_blocks"] == before
    wrong = [stored[0], stored[1][:-1] + b"?"]
    head = encode_add_many_request(IN_MEMORY, 0, 2, KEY, UNSYNCED)
    reply = await caller.peer.request(head, encode_adds(rows(wrong)), timeout_s=10)
    assert bytes(reply.frames[0]) == bytes([Status.OK, Status.BAD_REQUEST])


async def test_what_a_recovery_writes_is_synced_and_a_flag_that_is_not_known_is_refused(
    cluster: Cluster, /
) -> None:
    caller = cluster.caller(await cluster.start())
    stored = stored_entry(IN_MEMORY, 0, b"x")
    for flags in (BookieRequestFlags.RECOVERY | UNSYNCED, BookieRequestFlags.FENCE | UNSYNCED, BookieRequestFlags(8)):
        head, _ = await caller.send(BookieOperation.ADD, IN_MEMORY, 0, flags=flags, frames=(stored,))
        assert head.status is Status.BAD_REQUEST
    assert await entries_of(caller, IN_MEMORY) == []


async def test_an_answered_fence_is_synced_with_all_unsynced_adds_before_it(cluster: Cluster, /) -> None:
    caller = cluster.caller(await cluster.start())
    cluster.simulation.node(NODE).disk_delays.mean_s = 0.05
    adds = [await add_unsynced(caller, entry) for entry in range(5)]
    head, _ = await caller.send(BookieOperation.READ_LAC, IN_MEMORY, flags=BookieRequestFlags.FENCE)
    caller = cluster.caller(await cluster.restart())
    assert (set(adds), head.status) == ({Status.OK}, Status.OK)
    assert len(await entries_of(caller, IN_MEMORY)) == 5
    assert await add_unsynced(caller, 5) is Status.FENCED


async def test_the_adds_on_their_way_to_the_disk_stay_bounded(cluster: Cluster, /) -> None:
    bookie = await cluster.start(held_bytes_max=30_000)
    caller = cluster.caller(bookie)
    cluster.simulation.node(NODE).disk_delays.mean_s = 0.05
    statuses = await asyncio.gather(*(add_unsynced(caller, entry, bytes(1000)) for entry in range(300)))
    assert set(statuses) == {Status.OK, Status.BUSY}, "the memtables and the journal's queue have their bounds"


def test_wherever_the_power_fails_an_unsynced_ledger_alone_loses_and_no_more_than_its_last_answers() -> None:
    """Both ledgers get entries in turn. Each point of the disk's work is a place to die at."""
    lost = kept = 0

    async def main(operation: int, cluster: Cluster) -> None:
        nonlocal lost, kept
        synced = unsynced = 0
        caller = cluster.caller(await cluster.start())
        cluster.simulation.crash_at(NODE, operation, power_loss=True)
        with contextlib.suppress(MagnetarError):  # it died
            for entry in range(6):
                unsynced += await add_unsynced(caller, entry) is Status.OK
                synced += (await caller.add(ON_DISK, entry, b"d")).status is Status.OK
        cluster.simulation.node(NODE).disk.cancel_crash()
        caller = cluster.caller(await cluster.restart())
        assert len(await entries_of(caller, ON_DISK)) >= synced, "what was answered after its sync"
        found = len(await entries_of(caller, IN_MEMORY))
        assert found >= synced, "its records are in the blocks of those that were synced after it"
        lost += max(0, unsynced - found)
        kept += found

    for operation in range(1, 14):
        with_cluster(partial(main, operation))
    assert lost > 0, "an answer is no promise"
    assert kept > 0
