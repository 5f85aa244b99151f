"""The metadata knows up to where a bookie's journal is synced: a copy of its directory that ends before is seen."""

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import pytest

from magnetar.bookie.registration import POSITION_WRITE_INTERVAL_S
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.metadata.records import DamagedEntriesRecord
from magnetar.metadata.store import CommitOperation, get_record, put_record
from magnetar.proto.errors import ConnectionLost
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.stores import NODE
from tests.bookie.test_identity import a_ledger, record_of

pytestmark = pytest.mark.run_by.with_args(with_cluster)


async def _start_on(cluster: Cluster, older: object, bookie: str) -> None:
    """The node is killed, and its disk is a crash-consistent copy from now on."""
    cluster.simulation.crash(NODE)
    await put_record(cluster.metadata, paths.LEDGER_IDS, records.CounterRecord(next=9))
    await put_record(cluster.metadata, paths.ledger(1), a_ledger(bookie))
    cluster.simulation.node(NODE).disk.root = older  # type: ignore[assignment]
    again = await cluster.start()
    assert again.limbo_restorer.limbo_upto == 8
    assert (await cluster.caller(again).read(1, 1))[0].status is Status.UNKNOWN


@pytest.mark.parametrize("before", [0, 3])
async def test_a_copy_from_before_the_first_answer_of_this_start_is_seen_at_once(
    cluster: Cluster, /, before: int
) -> None:
    bookie = await cluster.start(upkeep_interval_s=1e6)
    for entry in range(before):
        assert (await cluster.caller(bookie).add(1, 10 + entry, b"of an earlier start")).status is Status.OK
    bookie = await cluster.restart()
    older = copy.deepcopy(cluster.simulation.node(NODE).disk.root)
    assert (await cluster.caller(bookie).add(1, 1, b"late")).status is Status.OK
    await _start_on(cluster, older, bookie.id)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_copy_from_within_one_start_is_seen_when_a_note_came_or_the_end_after_a_later_add(
    cluster: Cluster, /, *, ends: bool
) -> None:
    bookie = await cluster.start(upkeep_interval_s=1e6)
    caller = cluster.caller(bookie)
    assert (await caller.add(1, 0, b"early")).status is Status.OK
    older = copy.deepcopy(cluster.simulation.node(NODE).disk.root)
    assert (await caller.add(1, 1, b"late")).status is Status.OK
    await (cluster.simulation.spawn(NODE, bookie.close()) if ends else asyncio.sleep(2 * POSITION_WRITE_INTERVAL_S))
    await _start_on(cluster, older, bookie.id)


async def test_the_first_answers_of_a_start_wait_for_the_note_and_later_ones_do_not(
    cluster: Cluster, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await cluster.start(upkeep_interval_s=1e6)
    caller = cluster.caller(bookie)
    original, away = type(cluster.metadata).commit, True

    async def commit(self: Any, operations: Sequence[CommitOperation]) -> list[int]:
        if away and any(each.path == paths.cookie(bookie.id) for each in operations):
            raise ConnectionLost("the metadata does not answer")
        return await original(self, operations)

    monkeypatch.setattr(type(cluster.metadata), "commit", commit)
    adds = [asyncio.create_task(caller.add(1, entry, b"first")) for entry in range(3)]
    await asyncio.sleep(1.5)
    assert not any(each.done() for each in adds)
    before = await record_of(cluster, bookie.id)
    away = False
    assert [(await each).status for each in adds] == [Status.OK] * 3
    after = await record_of(cluster, bookie.id)
    assert (after.journal, after.offset) >= bookie.store.journal_position > (before.journal, before.offset)
    away = True
    assert (await caller.add(1, 3, b"later")).status is Status.OK
    away = False


async def test_a_report_of_more_damage_than_a_record_holds_is_cut_and_stops_no_note(cluster: Cluster, /) -> None:
    bookie = await cluster.start(upkeep_interval_s=1.0)
    caller = cluster.caller(bookie)
    assert (await caller.add(1, 0, b"x")).status is Status.OK
    for entry in range(0, 120_000, 2):
        bookie.store.descriptors.quarantine(1, entry, entry)
    await asyncio.sleep(3)
    found = await get_record(cluster.metadata, paths.damaged_copies_of_bookie(1, bookie.id), DamagedEntriesRecord)
    assert found is not None
    assert len(found[0].ranges) > 10_000
    assert (await caller.add(1, 200_000, b"y")).status is Status.OK
    await asyncio.sleep(3)
    record = await record_of(cluster, bookie.id)
    assert (record.journal, record.offset) == bookie.store.journal_position
    await cluster.simulation.spawn(NODE, bookie.close())
