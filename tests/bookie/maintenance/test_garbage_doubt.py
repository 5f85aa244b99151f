"""A ledger is missing from the metadata: deleted by its owner, or is the metadata damaged, older, or the wrong one?"""

import asyncio
import logging
from collections.abc import Callable

import pytest
from pyroaring import BitMap64

from magnetar.bookie.maintenance.garbage import GarbageRefusal
from magnetar.ledger import client as deletions
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths
from magnetar.metadata.records import Incarnation, IncarnationsRecord, encode_record
from magnetar.metadata.store import DeleteNode, MetadataStore, PutNode, parse_ledger_ids
from magnetar.proto.errors import Unavailable
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.maintenance.test_garbage import delete, with_ledgers
from tests.bookie.stores import NODE, payload

pytestmark = pytest.mark.run_by.with_args(with_cluster)

INTERVALS = {"gc_interval_s": 60.0, "gc_grace_s": 120.0, "gc_doubt_s": 1200.0, "upkeep_interval_s": 1e6}


@pytest.mark.parametrize("gone", [15, 27, 30])
async def test_more_than_half_of_the_ledgers_go_later_and_with_a_warning_when_they_were_deleted(
    cluster: Cluster, /, gone: int
) -> None:
    """A topic whose backlog was read at once is trimmed so; a bookie that waited for an operator would fill up."""
    bookie, caller = await with_ledgers(cluster, 30, **INTERVALS)
    await deletions.delete_ledgers(cluster.metadata, range(1, gone + 1))
    await asyncio.sleep(1100)
    doubtful = gone > 15
    statistics = bookie.statistics()
    assert (statistics["gc_doubtful"], statistics["gc_refused"]) == (gone if doubtful else 0, 0)
    assert ((await caller.read(1, 0))[0].status is Status.OK) == doubtful, "an operator has this time"
    await asyncio.sleep(400)
    assert bookie.statistics()["gc_doubtful"] == 0
    for ledger in range(1, 31):
        status = (await caller.read(ledger, 0))[0].status
        assert status is (Status.NO_SUCH_LEDGER if ledger <= gone else Status.OK)


def _flipped(path: str, at: int, bit: int) -> str:
    return path[:at] + chr(ord(path[at]) ^ 1 << bit) + path[at + 1 :]


LOST: list[tuple[str, Callable[[str], str | None]]] = [
    ("no-record", lambda path: None),
    ("folder", lambda path: _flipped(path, 4, 1)),
    ("id-of-no-ledger", lambda path: _flipped(path, len(path) - 1, 3)),
    ("larger-id", lambda path: _flipped(path, 15, 0)),
]


CASES = [(range(3, 4), *lost) for lost in LOST] + [(gone, *LOST[0]) for gone in (range(1, 4), range(1, 13))]


@pytest.mark.parametrize(("gone", "what", "path"), CASES, ids=[f"{len(gone)}-{what}" for gone, what, _ in CASES])
async def test_a_ledger_whose_record_is_gone_without_a_deletion_stays_and_is_told_until_an_operator_says_so(
    cluster: Cluster, /, gone: range, what: str, path: Callable[[str], str | None], caplog: pytest.LogCaptureFixture
) -> None:
    bookie, caller = await with_ledgers(cluster, 12, **INTERVALS | {"gc_interval_s": 600.0})
    for ledger in gone:
        node = await cluster.metadata.get(paths.ledger(ledger))
        assert node is not None
        other = path(paths.ledger(ledger))
        moved = [] if other is None else [PutNode(other, node.value)]
        await cluster.metadata.commit([DeleteNode(paths.ledger(ledger)), *moved])
    unexplained = set(gone) - set(parse_ledger_ids(paths.LEDGERS, await cluster.metadata.children(paths.LEDGERS)))
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(90_000 if len(gone) == 12 else 9_000)  # a day; or 15 passes
    assert bookie.garbage_collector.refusal is GarbageRefusal.UNEXPLAINED
    assert (bookie.statistics()["gc_refused"], bookie.statistics()["gc_unexplained"]) == (1, len(unexplained))
    assert sum("keeps" in record.message for record in caplog.records) == 1, "told once, while it stays as it is"
    for ledger in range(1, 13):
        assert (await caller.read(ledger, 0))[0].status is Status.OK
    began_ms = cluster.simulation.world(NODE).clock.wall_ms()
    done = await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(force=True))
    assert (done.suspected, done.ledgers_deleted, done.refused) == (len(unexplained), [], None)
    assert (done.grace_ends_ms - began_ms) // 1000 == 120 if unexplained else not done.grace_ends_ms
    await asyncio.sleep(1300)
    for ledger in range(1, 13):
        status = (await caller.read(ledger, 0))[0].status
        assert status is (Status.NO_SUCH_LEDGER if ledger in unexplained else Status.OK), "one --force is enough"
    assert (bookie.statistics()["gc_refused"], bookie.statistics()["gc_unexplained"]) == (0, 0)


async def test_what_an_operator_accepted_ends_with_another_restore(cluster: Cluster, /) -> None:
    bookie, caller = await with_ledgers(cluster, 5, **INTERVALS)
    await cluster.metadata.delete(paths.ledger(1))
    await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(force=True))
    await asyncio.sleep(70)
    assert bookie.garbage_collector.refusal is None
    restored = Incarnation(number=9, token="another", revision=0, restored=True)
    cluster.sqlite._incarnations = encode_record(IncarnationsRecord(incarnations=(restored,)), paths.INCARNATIONS)
    await asyncio.sleep(1000)
    assert bookie.garbage_collector.refusal is GarbageRefusal.UNEXPLAINED
    assert (await caller.read(1, 0))[0].status is Status.OK
    done = await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(force=True))
    assert (done.suspected, done.ledgers_deleted) == (1, []), "its grace begins anew"
    await asyncio.sleep(200)
    assert (await caller.read(1, 0))[0].status is Status.NO_SUCH_LEDGER


async def test_what_is_lost_after_an_operator_accepted_is_not_accepted(cluster: Cluster, /) -> None:
    bookie, caller = await with_ledgers(cluster, 5, **INTERVALS)
    await cluster.metadata.delete(paths.ledger(1))
    await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(force=True))
    await cluster.metadata.delete(paths.ledger(2))
    await asyncio.sleep(1000)
    assert (await caller.read(1, 0))[0].status is Status.NO_SUCH_LEDGER
    assert (await caller.read(2, 0))[0].status is Status.OK
    assert bookie.garbage_collector.refusal is GarbageRefusal.UNEXPLAINED


async def test_an_accepted_ledger_whose_record_is_back_stays(cluster: Cluster, /) -> None:
    bookie, caller = await with_ledgers(cluster, 5, **INTERVALS)
    node = await cluster.metadata.get(paths.ledger(1))
    assert node is not None
    await cluster.metadata.delete(paths.ledger(1))
    await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(force=True))
    await asyncio.sleep(70)
    await cluster.metadata.put(paths.ledger(1), node.value)
    await asyncio.sleep(1000)
    assert (await caller.read(1, 0))[0].status is Status.OK


async def test_a_metadata_that_is_replaced_during_a_pass_of_an_operator_is_not_accepted(
    cluster: Cluster, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie, caller = await with_ledgers(cluster, 5, **INTERVALS | {"gc_grace_s": 0.0})
    await cluster.metadata.delete(paths.ledger(1))
    restored = Incarnation(number=9, token="another", revision=0, restored=True)
    find = deletions.find_deleted_ledgers

    async def replaced(metadata: MetadataStore, missing: BitMap64) -> BitMap64:
        cluster.sqlite._incarnations = encode_record(IncarnationsRecord(incarnations=(restored,)), paths.INCARNATIONS)
        return await find(metadata, missing)

    with monkeypatch.context() as patch:
        patch.setattr(deletions, "find_deleted_ledgers", replaced)
        with pytest.raises(Unavailable, match="replaced during the pass"):
            await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(force=True))
    await asyncio.sleep(1000)
    assert (await caller.read(1, 0))[0].status is Status.OK


async def test_what_was_deleted_goes_beside_what_is_unexplained(cluster: Cluster, /) -> None:
    _, caller = await with_ledgers(cluster, 5, **INTERVALS)
    await cluster.metadata.delete(paths.ledger(1))
    await delete(cluster, range(2, 3))
    await asyncio.sleep(1000)
    assert (await caller.read(1, 0))[0].status is Status.OK
    assert (await caller.read(2, 0))[0].status is Status.NO_SUCH_LEDGER


@pytest.mark.parametrize("damage", [0, 5, 12])
async def test_a_damaged_record_of_deletions_deletes_nothing(cluster: Cluster, /, damage: int) -> None:
    _, caller = await with_ledgers(cluster, 5, **INTERVALS)
    await delete(cluster, range(2, 3))
    page = paths.deleted_ledgers(0)
    node = await cluster.metadata.get(page)
    assert node is not None
    if damage:
        value = bytearray(node.value)
        value[damage] ^= 4
        await cluster.metadata.put(page, bytes(value))
    else:
        await cluster.metadata.commit([DeleteNode(page), PutNode(_flipped(page, len(page) - 1, 0), node.value)])
    await asyncio.sleep(1000)
    assert (await caller.read(2, 0))[0].status is Status.OK


async def test_nothing_is_deleted_once_the_metadata_went_back(cluster: Cluster, /) -> None:
    """It was restored from a backup under the running bookie: ledgers made since are not in it."""
    bookie, caller = await with_ledgers(cluster, 5, gc_interval_s=60.0, upkeep_interval_s=1.0)
    await asyncio.sleep(5)
    backup = await cluster.metadata.get(paths.cookie(bookie.id))
    assert backup is not None
    assert (await caller.add(5, 1, payload(5, 1))).status is Status.OK
    await asyncio.sleep(5)
    await cluster.metadata.put(paths.cookie(bookie.id), backup.value)
    await delete(cluster, range(5, 6))
    assert (await caller.add(4, 1, payload(4, 1))).status is Status.OK
    await asyncio.sleep(2)
    assert (bookie.garbage_collector.refusal, bookie.statistics()["gc_refused"]) == (GarbageRefusal.WENT_BACK, 1)
    await asyncio.sleep(1000)
    assert bookie.garbage_collector.refusal is GarbageRefusal.WENT_BACK
    assert (await caller.read(5, 0))[0].status is Status.OK
    bookie = await cluster.restart()
    await asyncio.sleep(1000)
    assert (await cluster.caller(bookie).read(5, 0))[0].status is Status.NO_SUCH_LEDGER


async def test_a_metadata_that_went_back_counts_again_once_an_operator_accepted_it(cluster: Cluster, /) -> None:
    """Without a restart, and before the bookie noticed; and until it goes back again."""
    bookie, caller = await with_ledgers(cluster, 5, gc_interval_s=60.0, upkeep_interval_s=1.0)
    await asyncio.sleep(5)
    backup = await cluster.metadata.get(paths.cookie(bookie.id))
    assert backup is not None
    for entry in (1, 2):
        assert (await caller.add(5, entry, payload(5, entry))).status is Status.OK
        await asyncio.sleep(5)
        await cluster.metadata.put(paths.cookie(bookie.id), backup.value)
        await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(force=True))
        assert bookie._notes.went_back == entry
        assert bookie.garbage_collector.refusal is None
    assert (await caller.add(4, 1, payload(4, 1))).status is Status.OK
    await delete(cluster, range(5, 6))
    await asyncio.sleep(1000)
    assert (await caller.read(5, 0))[0].status is Status.NO_SUCH_LEDGER
    await cluster.metadata.put(paths.cookie(bookie.id), backup.value)
    assert (await caller.add(4, 2, payload(4, 2))).status is Status.OK
    await asyncio.sleep(2)
    await delete(cluster, range(3, 4))
    await asyncio.sleep(1000)
    assert bookie.garbage_collector.refusal is GarbageRefusal.WENT_BACK
    assert (await caller.read(3, 0))[0].status is Status.OK
