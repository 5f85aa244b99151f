"""Surplus copies: what no record names any more leaves the disk, and nothing that a record names or is about to name.

The mutants M27f and M27g show that these tests see when the order is another one (tests/mutants/bookies.py)."""

import asyncio
from uuid import UUID

import msgspec
import pytest
from msgspec.structs import replace
from pyroaring import BitMap64

from magnetar.bookie.maintenance.garbage import GarbageCollector, GarbageResult
from magnetar.bookie.server import Bookie
from magnetar.bookie.store.entrylog.compaction import CompactionResult
from magnetar.ledger.bookies import store_damage_report
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.runtime.sim.disk import DiskOperation
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, PeerCaller, payload_of
from tests.bookie.maintenance.test_garbage import logs, with_logs
from tests.bookie.stores import NODE, payload

pytestmark = pytest.mark.run_by.with_args(with_cluster)

OTHER = str(UUID(int=7))
MOVED = 2


async def put_other(cluster: Cluster, **changes: object) -> None:
    """Registers another bookie, which the records name."""
    record = records.BookieRecord(bookie=OTHER, endpoint="other:3181")
    path = paths.bookie(OTHER)
    await cluster.metadata.put(path, records.encode_record(msgspec.structs.replace(record, **changes), path))


async def put_record(cluster: Cluster, ledger: int, *bookies: str, state: str = records.CLOSED) -> None:
    closed = state == records.CLOSED
    record = records.LedgerRecord(
        ledger_id=ledger, state=state, ensemble_size=1, write_quorum=1, ack_quorum=1, key=KEY, token="t",
        fragments=tuple(records.Fragment(5 * at, (each,)) for at, each in enumerate(bookies)),
        last_entry=9 if closed else -1, length=1000 if closed else 0,
    )  # fmt: skip
    await cluster.metadata.put(paths.ledger(ledger), records.encode_record(record, paths.ledger(ledger)))


async def put_mark(cluster: Cluster, ledger: int = MOVED) -> None:
    mark, path = records.UnderReplicatedRecord(ledger_id=ledger, bookies={}), paths.under_replicated(ledger)
    await cluster.metadata.put(path, records.encode_record(mark, path))


async def moved(cluster: Cluster, **changes: object) -> tuple[Bookie, PeerCaller]:
    """A bookie with a log for each of four ledgers; the record of MOVED names another bookie, which is there."""
    bookie, caller = await with_logs(cluster)
    assert (await caller.read(MOVED, 0, fence=True))[0].status is Status.OK
    await put_other(cluster, **changes)
    await put_record(cluster, MOVED, OTHER)
    return bookie, caller


async def collect(cluster: Cluster, bookie: Bookie) -> GarbageResult:
    done = await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(minor=False))
    await asyncio.sleep(1)
    return done


async def test_copies_that_no_record_names_go_after_two_passes_and_all_others_stay(cluster: Cluster, /) -> None:
    bookie, caller = await moved(cluster)
    before = logs(cluster)
    done = await collect(cluster, bookie)
    assert (done.surplus, done.dropped, logs(cluster)) == (1, 0, before), "one pass is not enough"
    assert bookie.statistics()["gc_surplus"] == 1
    done = await collect(cluster, bookie)
    assert done.dropped == 1
    assert done.logs_deleted
    assert done.bytes_freed > 0
    assert logs(cluster) == [before[0], *before[2:]]
    for ledger in (1, 3, 4):
        _, entries = await caller.read(ledger, 0, count=10)
        assert [payload_of(entry) for entry in entries] == [payload(ledger, entry) for entry in range(10)]
    done = await collect(cluster, bookie)
    assert (done.surplus, done.dropped) == (0, 0), "nothing of it is here any more"
    assert bookie.statistics()["gc_dropped"] == 1


async def test_a_bookie_that_dropped_copies_is_no_vote_keeps_the_fence_and_takes_them_again(
    cluster: Cluster, /
) -> None:
    """An older copy of the metadata may name the bookie again, of a time when the ledger was open."""
    bookie, caller = await moved(cluster)
    for _ in range(2):
        await collect(cluster, bookie)
    for _ in range(2):
        caller = cluster.caller(await cluster.restart())  # without its cache
        assert (await caller.read(MOVED, 4))[0].status is Status.UNKNOWN
        assert (await caller.read(MOVED, 10))[0].status is Status.NO_SUCH_ENTRY, "it never had this one"
        assert (await caller.add(MOVED, 10, b"late")).status is Status.FENCED
    entries = {entry: payload(MOVED, entry) for entry in range(10)}
    assert set(await caller.add_many(MOVED, entries, recovery=True)) == {Status.OK}
    caller = cluster.caller(await cluster.restart())
    _, found = await caller.read(MOVED, 0, count=10)
    assert [payload_of(entry) for entry in found] == list(entries.values())


@pytest.mark.parametrize(
    "why",
    ["open", "named", "named in one fragment", "marked", "damage is reported", "other is away", "other is in limbo",
     "disk of other failed"],
)  # fmt: skip
async def test_copies_stay_while_they_may_be_needed(cluster: Cluster, /, why: str) -> None:
    bookie, caller = await with_logs(cluster)
    if why != "other is away":
        await put_other(cluster, limbo=why == "other is in limbo", failed=(0,) if why.startswith("disk") else ())
    named = {"named": (bookie.id,), "named in one fragment": (bookie.id, OTHER)}.get(why, (OTHER,))
    await put_record(cluster, MOVED, *named, state=records.OPEN if why == "open" else records.CLOSED)
    if why == "marked":
        await put_mark(cluster)
    if why == "damage is reported":
        await store_damage_report(cluster.metadata, MOVED, OTHER, [(3, 4)])
    for _ in range(3):
        done = await collect(cluster, bookie)
        assert (done.surplus, done.dropped) == (0, 0)
    assert (await caller.read(MOVED, 0))[0].status is Status.OK


async def test_a_ledger_that_is_needed_again_between_the_passes_begins_anew(cluster: Cluster, /) -> None:
    bookie, caller = await moved(cluster)
    await collect(cluster, bookie)
    await put_record(cluster, MOVED, bookie.id)
    await collect(cluster, bookie)
    await put_record(cluster, MOVED, OTHER)
    assert (await collect(cluster, bookie)).dropped == 0, "the first of two passes"
    assert (await caller.read(MOVED, 0))[0].status is Status.OK


async def test_nothing_is_dropped_in_limbo(cluster: Cluster, /) -> None:
    bookie, _ = await moved(cluster)
    bookie.store.descriptors.enter_limbo(10)
    for _ in range(3):
        assert (await collect(cluster, bookie)).dropped == 0


def let_a_worker_come(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark is made after the last look at the ledger before its copies cannot be held any more."""
    select = GarbageCollector._select_surplus

    async def marked_afterwards(self: GarbageCollector, ledgers: BitMap64) -> BitMap64:
        found = await select(self, ledgers)
        if found and self._surplus:
            await put_mark(cluster)
        return found

    monkeypatch.setattr(GarbageCollector, "_select_surplus", marked_afterwards)


async def test_a_worker_that_comes_before_nothing_is_held_keeps_the_copies(
    cluster: Cluster, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie, caller = await moved(cluster)
    await collect(cluster, bookie)
    let_a_worker_come(cluster, monkeypatch)
    assert (await collect(cluster, bookie)).dropped == 0
    assert (await caller.read(MOVED, 0))[0].status is Status.OK


async def test_while_copies_are_dropped_nothing_of_them_is_held_and_none_is_taken(
    cluster: Cluster, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie, caller = await moved(cluster)
    compactor, store = bookie.store.compactor, bookie.store
    compact = compactor.run_compaction
    seen: list[object] = []

    async def asked_meanwhile(*arguments: object, **options: object) -> CompactionResult:
        if store.dropping:
            seen.extend([
                list(await store.find_stored_entries(MOVED, 0, 9)), list(await store.find_stored_entries(1, 0, 9)),
                (await caller.add(MOVED, 0, payload(MOVED, 0), recovery=True)).status,
                (await caller.read(MOVED, 0))[0].status,
            ])  # fmt: skip
        return await compact(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(compactor, "run_compaction", asked_meanwhile)
    for _ in range(2):
        await collect(cluster, bookie)
    assert seen == [[], [(0, 9)], Status.READ_ONLY, Status.OK]
    assert (await caller.add(MOVED, 0, payload(MOVED, 0), recovery=True)).status is Status.OK


def test_that_copies_were_dropped_is_durable_before_a_log_goes() -> None:
    async def main(cluster: Cluster) -> None:
        bookie, _ = await moved(cluster)
        await collect(cluster, bookie)

        def crash(operation: DiskOperation) -> None:
            if operation.kind == "remove" and operation.path.endswith(".log"):
                cluster.simulation.node(NODE).disk.record = None
                asyncio.get_running_loop().call_soon(cluster.simulation.crash, NODE)

        cluster.simulation.node(NODE).disk.record = crash
        with pytest.raises(BaseException):  # noqa: B017, PT011 - the node is gone
            await collect(cluster, bookie)
        caller = cluster.caller(await cluster.start())
        assert (await caller.read(MOVED, 4))[0].status is Status.UNKNOWN

    with_cluster(main)


async def test_records_are_read_in_turn_and_each_ledger_is_found(
    cluster: Cluster, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.bookie.maintenance.garbage.SURPLUS_READS_PER_PASS", 1)
    cluster.config = replace(cluster.config, gc_grace_s=100.0)
    bookie, _ = await with_logs(cluster)
    await put_other(cluster)
    for ledger in (1, 2, 3, 4):
        await put_record(cluster, ledger, OTHER)
    counts = [(await collect(cluster, bookie)).surplus for _ in range(4)]
    assert counts == [1, 2, 3, 4]
    await asyncio.sleep(100)
    assert (await collect(cluster, bookie)).dropped == 4


async def test_a_small_share_of_the_ledgers_goes_after_the_grace_and_many_after_the_doubt(
    cluster: Cluster, /
) -> None:
    cluster.config = replace(cluster.config, gc_grace_s=10.0, gc_doubt_s=100.0)
    bookie, _ = await with_logs(cluster, 12)
    await put_other(cluster)
    for ledger in range(1, 12):
        await put_record(cluster, ledger, OTHER)
    assert (await collect(cluster, bookie)).surplus == 11
    await asyncio.sleep(20)
    assert (await collect(cluster, bookie)).dropped == 0, "more than half of what is here"
    await asyncio.sleep(100)
    assert (await collect(cluster, bookie)).dropped == 11
