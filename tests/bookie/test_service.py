"""The peer service: what is answered, when, and to whom (ledger protocol §1.5, §1.7, §1.9)."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from msgspec.structs import replace

from magnetar.bookie import service
from magnetar.bookie.adds import RequestBudget
from magnetar.bookie.server import Bookie
from magnetar.bookie.service import READ_BYTES_MIN
from magnetar.ledger.peer_format import BookieOperation, BookieRequestFlags, Status
from magnetar.metadata import paths, records
from magnetar.metadata.store import CommitOperation as Operation_
from magnetar.proto.errors import Unavailable, WrongIdentity
from magnetar.runtime.sim.disk import DiskOperation
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import OTHER_KEY, payload_of, stored_entry
from tests.bookie.stores import NODE, SMALL

pytestmark = pytest.mark.run_by.with_args(with_cluster)


async def test_add_read_and_read_lac(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    heads = await asyncio.gather(*[caller.add(7, entry, b"p%d" % entry, lac=entry - 1) for entry in range(20)])
    assert {head.status for head in heads} == {Status.OK}
    assert [head.entry for head in heads] == list(range(20))
    head, entries = await caller.read(7, 3, count=5)
    assert (head.status, head.count, head.lac) == (Status.OK, 5, 18)
    assert [payload_of(entry) for entry in entries] == [b"p%d" % entry for entry in range(3, 8)]
    assert (await caller.read(7, 20))[0].status is Status.NO_SUCH_ENTRY
    assert (await caller.read(8, 0))[0].status is Status.NO_SUCH_LEDGER
    head, _ = await caller.send(BookieOperation.READ_LAC, 7)
    assert (head.status, head.lac, head.entry) == (Status.OK, 18, 19)
    assert (await caller.send(BookieOperation.WRITE_LAC, 7, 19))[0].status is Status.OK
    assert (await caller.send(BookieOperation.READ_LAC, 7))[0].lac == 19
    assert (await caller.send(BookieOperation.PING, 7))[0].status is Status.OK


async def test_entry_in_several_frames_is_one_entry(cluster: Cluster, /) -> None:
    caller = cluster.caller(await cluster.start())
    stored = stored_entry(1, 0, b"hello world")
    for entry, cuts in enumerate(((36,), (36, 40), (10, 20), (40, 41))):
        stored = stored_entry(1, entry, b"hello world")
        edges = (0, *cuts, len(stored))
        frames = tuple(stored[start:end] for start, end in pairwise(edges))
        assert (await caller.send(BookieOperation.ADD, 1, entry, frames=frames))[0].status is Status.OK
        assert (await caller.read(1, entry))[1] == [stored]


async def test_damaged_or_misplaced_entries_are_bad_requests_and_not_stored(cluster: Cluster, /) -> None:
    bookie = await cluster.start(entry_bytes_max=1000)
    caller = cluster.caller(bookie)
    good = stored_entry(1, 5, b"hello")
    wrong = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    wrong += [good[:i] for i in range(len(good))] + [good + b"x", stored_entry(1, 5, bytes(1000))]
    for stored in wrong:
        assert (await caller.send(BookieOperation.ADD, 1, 5, frames=(stored,)))[0].status is Status.BAD_REQUEST
    for ledger, entry in ((1, 6), (2, 5)):
        assert (await caller.send(BookieOperation.ADD, ledger, entry, frames=(good,)))[0].status is Status.BAD_REQUEST
    assert (await caller.send(BookieOperation.ADD, 1, 5))[0].status is Status.BAD_REQUEST
    assert (await caller.read(1, 5, count=0))[0].status is Status.BAD_REQUEST
    assert (await caller.read(1, 5))[0].status is Status.NO_SUCH_LEDGER
    assert bookie.statistics()["bad_requests"] == len(wrong) + 4


async def test_bytes_that_are_no_request_are_answered_and_harm_nobody(cluster: Cluster, /) -> None:
    caller = cluster.caller(await cluster.start())
    for head in (b"", b"x" * 20, bytes(54), bytes(58), b"\x01\x09" + bytes(52), b"\x02\x01" + bytes(52)):
        reply = await caller.peer.request(head, (b"junk",), timeout_s=5)
        assert reply.head[3] == Status.BAD_REQUEST
    assert (await caller.add(1, 0, b"fine")).status is Status.OK


async def test_wrong_key_is_unauthorized(cluster: Cluster, /) -> None:
    caller = cluster.caller(await cluster.start())
    assert (await caller.add(1, 0, b"mine")).status is Status.OK
    assert (await caller.add(1, 1, b"not mine", key=OTHER_KEY)).status is Status.UNAUTHORIZED
    assert (await caller.read(1, 0, fence=True, key=OTHER_KEY))[0].status is Status.UNAUTHORIZED
    assert (await caller.send(BookieOperation.WRITE_LAC, 1, 0, key=OTHER_KEY))[0].status is Status.UNAUTHORIZED
    assert (await caller.add(1, 1, b"mine")).status is Status.OK, "the wrong key fenced nothing"
    caller = cluster.caller(await cluster.restart())
    assert (await caller.add(1, 2, b"not mine", key=OTHER_KEY)).status is Status.UNAUTHORIZED


async def test_after_a_fence_only_recovery_adds_are_taken_also_after_restarts(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    assert (await caller.add(1, 0, b"zero")).status is Status.OK
    head, entries = await caller.read(1, 0, fence=True)
    assert (head.status, payload_of(entries[0])) == (Status.OK, b"zero")
    for _ in range(3):
        assert (await caller.add(1, 1, b"late")).status is Status.FENCED
        assert (await caller.add(1, 1, b"recovered", recovery=True)).status is Status.OK
        assert payload_of((await caller.read(1, 1))[1][0]) == b"recovered"
        caller = cluster.caller(await cluster.restart())


@pytest.mark.parametrize("op", [BookieOperation.READ, BookieOperation.READ_LAC])
async def test_every_answer_to_a_fence_waits_for_its_sync_also_a_negative_one(
    cluster: Cluster, /, op: BookieOperation
) -> None:
    """M08 (ledger protocol §1.9)."""
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    synced: list[str] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "fdatasync" and operation.path.endswith(".jnl"):
            synced.append("sync")

    cluster.simulation.node(NODE).disk_delays.mean_s = 0.05
    cluster.simulation.node(NODE).disk.record = record
    first = caller.send(op, 9, 0, flags=BookieRequestFlags.FENCE)
    second = caller.send(op, 9, 0, flags=BookieRequestFlags.FENCE)
    await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
    assert synced, "answered before the sync"
    head, _ = await first
    assert head.status is (Status.NO_SUCH_ENTRY if op is BookieOperation.READ else Status.OK)
    await second
    caller = cluster.caller(await cluster.restart())
    assert (await caller.add(9, 0, b"late")).status is Status.FENCED


def test_answered_fence_holds_wherever_the_power_fails() -> None:
    answered = 0

    async def main(cluster: Cluster) -> None:
        nonlocal answered
        for operation in range(1, 8):
            caller = cluster.caller(await cluster.start())
            cluster.simulation.crash_at(NODE, operation, power_loss=True)
            (outcome,) = await asyncio.gather(caller.read(operation, 0, fence=True), return_exceptions=True)
            caller = cluster.caller(await cluster.restart())
            if not isinstance(outcome, BaseException):
                answered += 1
                assert (await caller.add(operation, 0, b"late")).status is Status.FENCED
            cluster.simulation.crash(NODE, power_loss=True)

    with_cluster(main)
    assert 0 < answered < 7


async def test_recovery_reads_see_every_add_admitted_before_the_fence(cluster: Cluster, /) -> None:
    caller = cluster.caller(await cluster.start())
    for ledger in range(1, 30):
        adds = [asyncio.ensure_future(caller.add(ledger, entry, b"x")) for entry in range(5)]
        head, entries = await caller.read(ledger, 0, fence=True, count=10)
        seen = len(entries)
        acked = [add.entry for add in await asyncio.gather(*adds) if add.status is Status.OK]
        assert len(acked) <= seen, f"{len(acked)} adds were acknowledged, the fencing read saw {seen}: {head}"


async def test_duplicate_add_is_answered_after_a_sync_of_its_own(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    heads = await asyncio.gather(*[caller.add(1, 0, b"same") for _ in range(5)])
    assert {head.status for head in heads} == {Status.OK}
    blocks = bookie.statistics()["journal_blocks"]
    assert (await caller.add(1, 0, b"same")).status is Status.OK
    assert bookie.statistics()["journal_blocks"] == blocks + 1
    caller = cluster.caller(await cluster.restart())
    assert payload_of((await caller.read(1, 0))[1][0]) == b"same"


async def test_adds_beyond_the_memtables_wait_and_beyond_the_bound_are_busy(cluster: Cluster, /) -> None:
    bookie = await cluster.start(held_bytes_max=30_000)
    cluster.simulation.node(NODE).disk_delays.mean_s = 0.02
    caller = cluster.caller(bookie)
    heads = await asyncio.gather(*[caller.add(1, entry, bytes(1000)) for entry in range(300)])
    statuses = [head.status for head in heads]
    assert set(statuses) == {Status.OK, Status.BUSY}
    stats = bookie.statistics()
    assert (stats["held_adds"], stats["held_bytes"]) == (0, 0)
    for entry, status in enumerate(statuses):
        found = (await caller.read(1, entry))[0].status
        assert found is (Status.OK if status is Status.OK else Status.NO_SUCH_ENTRY)
    assert (await caller.add(1, 300, bytes(1000))).status is Status.OK


async def test_read_only_bookie_takes_recovery_adds_and_fences_and_says_so_in_the_metadata(cluster: Cluster, /) -> None:
    disk = cluster.simulation.node(NODE).disk
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    assert (await caller.add(1, 0, b"before")).status is Status.OK
    capacity, disk.capacity_bytes = disk.capacity_bytes, disk.used_bytes() * 100 // 96
    await asyncio.sleep(30)
    assert (await caller.add(1, 1, b"after")).status is Status.READ_ONLY
    assert (await caller.add(1, 1, b"after", recovery=True)).status is Status.OK
    assert (await caller.read(1, 0, fence=True))[0].status is Status.OK
    found = await cluster.metadata.get(paths.bookie(bookie.id))
    assert found is not None
    assert records.decode_record(found.value, records.BookieRecord, paths.bookie(bookie.id)).read_only
    disk.capacity_bytes = capacity
    await asyncio.sleep(30)
    assert (await caller.add(2, 0, b"again")).status is Status.OK


async def test_a_bookie_that_met_a_full_disk_is_writable_again_when_there_is_room_though_nobody_writes(
    cluster: Cluster, /
) -> None:
    disk = cluster.simulation.node(NODE).disk
    bookie = await cluster.start(free_bytes_min=0, store=replace(SMALL, reserve_bytes=0))
    caller = cluster.caller(bookie)
    capacity, disk.capacity_bytes = disk.capacity_bytes, disk.used_bytes()
    entry = 0
    while (await caller.add(1, entry, bytes(3000))).status is Status.OK:
        entry += 1
    await asyncio.sleep(30)
    assert await registered_read_only(cluster, bookie)
    disk.capacity_bytes = capacity
    await asyncio.sleep(30)
    assert not await registered_read_only(cluster, bookie)
    assert (await caller.add(2, 0, b"again")).status is Status.OK


async def test_what_a_bookie_is_gets_registered_though_the_metadata_did_not_answer_at_once(cluster: Cluster, /) -> None:
    disk = cluster.simulation.node(NODE).disk
    bookie = await cluster.start()
    commit, failures = cluster.metadata.commit, [Unavailable("metadata")]

    async def failing(operations: Sequence[Operation_]) -> list[int]:
        if failures:
            raise failures.pop()
        return await commit(operations)

    cluster.metadata.commit = failing  # type: ignore[method-assign]
    disk.capacity_bytes = disk.used_bytes() * 100 // 96
    await asyncio.sleep(30)
    assert not failures
    assert await registered_read_only(cluster, bookie)


async def registered_read_only(cluster: Cluster, bookie: Bookie) -> bool:
    found = await cluster.metadata.get(paths.bookie(bookie.id))
    assert found is not None
    return records.decode_record(found.value, records.BookieRecord, paths.bookie(bookie.id)).read_only


async def test_a_caller_of_another_bookie_is_refused(cluster: Cluster, /) -> None:
    caller = cluster.caller(await cluster.start(), identity=bytes(16))
    with pytest.raises(WrongIdentity):
        await caller.add(1, 0, b"x")


@pytest.mark.parametrize("bound", [{"reads_max": 4}, {"reads_bytes_max": 4 * READ_BYTES_MIN}, {"reads_bytes_max": 1}])
def test_reads_past_the_bound_wait_for_each_other_and_only_too_many_of_them_are_busy(bound: dict[str, int]) -> None:
    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start(**bound, store=replace(SMALL, read_cache_bytes=0))
        caller = cluster.caller(bookie)
        for entry in range(30):
            await caller.add(1, entry, bytes(300))
        await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
        cluster.simulation.node(NODE).disk_delays.mean_s = 0.02
        statuses = [head.status for head, _ in await asyncio.gather(*[caller.read(1, entry) for entry in range(30)])]
        assert set(statuses) == {Status.OK}
        assert (await caller.read(1, 3))[0].status is Status.OK, "a lone one is taken, whatever the bound"
        bookie.first.service._waiting_reads = RequestBudget(8_000)
        statuses = [head.status for head, _ in await asyncio.gather(*[caller.read(1, entry) for entry in range(30)])]
        assert set(statuses) == {Status.OK, Status.BUSY}
        assert (bookie.statistics()["disk_reads_bytes"], bookie.statistics()["reads_waiting_bytes"]) == (0, 0)


def test_a_read_that_waited_longer_than_its_sender_is_refused_and_the_next_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "READ_WAIT_S_MAX", 0.03)

    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start(reads_max=1, store=replace(SMALL, read_cache_bytes=0))
        caller = cluster.caller(bookie)
        for entry in range(8):
            await caller.add(1, entry, bytes(300))
        await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
        cluster.simulation.node(NODE).disk_delays.mean_s = 0.02
        statuses = [head.status for head, _ in await asyncio.gather(*[caller.read(1, entry) for entry in range(8)])]
        assert statuses[0] is Status.OK
        assert statuses[-1] is Status.BUSY
        cluster.simulation.node(NODE).disk_delays.mean_s = 0.0001
        assert (await caller.read(1, 7))[0].status is Status.OK

    with_cluster(main)


def test_the_reads_of_a_recovery_fence_once_and_need_no_room_beside_reads_of_the_disk() -> None:
    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start()
        caller = cluster.caller(bookie)
        await caller.add(1, 0, b"x")
        assert (await caller.read(1, 0, fence=True))[0].status is Status.OK
        blocks = bookie.statistics()["journal_blocks"]
        bookie.first.service._reads_max = 0
        for entry in range(64):
            status = (await caller.read(1, entry, fence=True))[0].status
            assert status is (Status.NO_SUCH_ENTRY if entry else Status.OK)
        assert bookie.statistics()["journal_blocks"] == blocks

    with_cluster(main)

    with_cluster(main)
