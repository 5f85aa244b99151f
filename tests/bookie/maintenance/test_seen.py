"""A bookie does not believe a metadata store that is older than what it saw, unless it was restored on purpose."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import cast

import msgspec
import pytest

from magnetar.bookie.maintenance.garbage import GarbageRefusal
from magnetar.bookie.maintenance.repair_worker import RepairConfig
from magnetar.bookie.maintenance.seen import (
    CurrentMetadataState,
    MetadataAgeVerdict,
    RecordedMetadataState,
    RollbackGuard,
    judge_metadata_age,
    make_recorded_metadata_state,
)
from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.bookie.store.identity import accept_restored_metadata
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths
from magnetar.metadata.records import BookieRecord, CounterRecord, Incarnation, decode_record, encode_record
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore, VersionedValue, allocate_ids, get_record, make_put_operation
from magnetar.metadata.tree import ANSWERED_FILE_SUFFIX
from magnetar.proto.errors import InvalidConfiguration
from magnetar.runtime.process import make_system_world
from tests.bookie.bookies import CONFIG, Cluster, with_cluster
from tests.bookie.entries import PeerCaller, a_record
from tests.bookie.stores import NODE, payload


def spans(*revisions: int, restored: int = 0) -> tuple[Incarnation, ...]:
    """Incarnations that began at these revisions; `restored`: the number of the one that was."""
    return tuple(
        Incarnation(number=number, token=f"t{number}", revision=revision, restored=number == restored)
        for number, revision in enumerate(revisions, 1)
    )


KNOWN = RecordedMetadataState(number=2, token="t2", revision=50, ledger=9)
FORKED = (*spans(0), Incarnation(number=2, token="another", revision=20))


@pytest.mark.parametrize(
    ("shown", "verdict"),
    [
        (CurrentMetadataState(spans(0, 10), 50, 10), MetadataAgeVerdict.CURRENT),
        (CurrentMetadataState(spans(0, 10, 50), 60, 11), MetadataAgeVerdict.CURRENT),
        # a copy of this incarnation, that has overtaken since
        (CurrentMetadataState(spans(0, 10, 49), 99, 11), MetadataAgeVerdict.OLDER),
        (CurrentMetadataState(FORKED, 999, 999), MetadataAgeVerdict.OLDER),
        # a copy of the one before, that has overtaken since
        (CurrentMetadataState(spans(0, 10), 49, 10), MetadataAgeVerdict.OLDER),
        (CurrentMetadataState(spans(0, 10), 50, 9), MetadataAgeVerdict.OLDER),
        (CurrentMetadataState(spans(0, 10), 50, None), MetadataAgeVerdict.OLDER),
        (CurrentMetadataState(spans(0, 10, 50), 60, 11, here=10), MetadataAgeVerdict.CURRENT),
        # it was given out after the copy was made
        (CurrentMetadataState(spans(0, 10, 50), 60, 11, here=11), MetadataAgeVerdict.OLDER),
        (CurrentMetadataState(spans(0, 10, 20, restored=3), 20, 5), MetadataAgeVerdict.RESTORED),
        (CurrentMetadataState((), 49, 10), MetadataAgeVerdict.OLDER),  # a ZooKeeper
        (CurrentMetadataState((), 50, 10), MetadataAgeVerdict.CURRENT),
        # it was away for long
        (CurrentMetadataState((Incarnation(number=900, token="t900", revision=70),), 80, 12),
        MetadataAgeVerdict.CURRENT),
    ],
)
def test_what_is_older_than_what_was_seen_is_recognised(
    shown: CurrentMetadataState, verdict: MetadataAgeVerdict
) -> None:
    assert judge_metadata_age(KNOWN, shown) is verdict


def test_a_restore_is_believed_once() -> None:
    """An older copy of the file that was restored before is older, and no restore."""
    restored = CurrentMetadataState(spans(0, 10, 20, restored=3), 25, 5)
    assert judge_metadata_age(KNOWN, restored) is MetadataAgeVerdict.RESTORED
    seen = make_recorded_metadata_state(KNOWN, msgspec.structs.replace(restored, here=9), restored=True)
    assert (seen.ledger, seen.revision, seen.restore) == (9, 25, "t3")
    assert judge_metadata_age(seen, CurrentMetadataState(restored.incarnations, 30, 12)) is MetadataAgeVerdict.CURRENT
    assert judge_metadata_age(seen, CurrentMetadataState(restored.incarnations, 24, 12)) is MetadataAgeVerdict.OLDER


def test_a_tree_that_moves_between_stores_with_and_without_incarnations_is_older_at_most_until_it_is_accepted() -> None:
    on_etcd = CurrentMetadataState((), 7, 12)
    assert judge_metadata_age(KNOWN, on_etcd) is MetadataAgeVerdict.OLDER
    seen = make_recorded_metadata_state(KNOWN, on_etcd, restored=True)
    assert judge_metadata_age(seen, on_etcd) is MetadataAgeVerdict.CURRENT
    on_sqlite = CurrentMetadataState(spans(0), 3, 12)
    seen = make_recorded_metadata_state(seen, on_sqlite, restored=False)
    assert judge_metadata_age(seen, on_sqlite) is MetadataAgeVerdict.CURRENT, "it counts revisions of its own"
    assert judge_metadata_age(seen, CurrentMetadataState(spans(0), 2, 12)) is MetadataAgeVerdict.OLDER


def test_a_bookie_that_saw_nothing_believes_anything() -> None:
    assert (
        judge_metadata_age(RecordedMetadataState(), CurrentMetadataState((), 0, None))
        is judge_metadata_age(RecordedMetadataState(), CurrentMetadataState(spans(5), 7, 3))
        is MetadataAgeVerdict.CURRENT
    )


# ------------------------------------------------------------------------------------------ with real files
class Deployment:
    """A metadata file and a bookie, in one process, on the disk of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "metadata" / "metadata.sqlite"
        self.world = make_system_world(1)
        self.tree: SqliteStore
        self.metadata: MetadataStore

    async def open(self) -> None:
        self.tree = await SqliteStore.open(self.world, str(self.file))
        self.metadata = self.tree.new_session()

    async def bookie(self) -> Bookie:
        config = BookieConfig(
            data=str(self.path / "bookie"), upkeep_interval_s=0.05, free_bytes_min=0, place="here",
            repair=RepairConfig(enabled=False),
        )  # fmt: skip
        return await Bookie.start(self.world, config, self.tree.new_session())

    async def ledgers(self, bookie: Bookie, count: int) -> range:
        ids = await allocate_ids(self.metadata, count)
        caller = self.caller(bookie)
        for ledger in ids:
            await self.metadata.put(paths.ledger(ledger), a_record(ledger, bookie.id))
            assert (await caller.add(ledger, 0, payload(ledger, 0))).status is Status.OK
        await caller.peer.close()
        return ids

    def caller(self, bookie: Bookie) -> PeerCaller:
        from uuid import UUID

        return PeerCaller(self.world.network.connect_peer(bookie.endpoint, UUID(bookie.id).bytes))


async def an_older_copy_in_place(deployment: Deployment) -> range:
    """A copy is made between two ledgers, a bookie saw both, and the copy stands where the file was, without a note of
    what was answered. The lost ids."""
    await deployment.open()
    bookie = await deployment.bookie()
    await deployment.ledgers(bookie, 3)
    await bookie.close()
    await deployment.tree.close()
    shutil.copy(deployment.file, deployment.path / "copy")
    await deployment.open()
    bookie = await deployment.bookie()
    lost = await deployment.ledgers(bookie, 2)
    await bookie._check_registration()
    await bookie.close()
    await deployment.tree.close()
    shutil.copy(deployment.path / "copy", deployment.file)
    os.remove(f"{deployment.file}{ANSWERED_FILE_SUFFIX}")
    await deployment.open()
    return lost


async def test_a_bookie_does_not_start_on_an_older_copy_of_the_metadata_and_says_what_to_do(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    await an_older_copy_in_place(deployment)
    with pytest.raises(InvalidConfiguration, match=r"older than what this bookie saw.*magnetar metadata restore"):
        await deployment.bookie()
    assert await deployment.metadata.children(paths.AVAILABLE_BOOKIES) == [], "nobody puts a ledger there"
    await deployment.tree.close()


async def test_what_an_operator_accepts_keeps_its_ledgers_and_no_id_is_given_again(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    lost = await an_older_copy_in_place(deployment)
    (bookie_id,) = await deployment.metadata.children(paths.COOKIES)
    await accept_restored_metadata(deployment.metadata, bookie_id)
    bookie = await deployment.bookie()
    try:
        counter = await get_record(deployment.metadata, paths.LEDGER_IDS, CounterRecord)
        assert counter is not None
        assert counter[0].next > lost[-1]
        bookie.store.descriptors.leave_limbo()
        bookie.first.collector._patience = bookie.first.collector._patience._replace(grace_s=0.0)
        for _ in range(3):
            done = await bookie.garbage_collector.run_pass(minor=False)
            assert (done.ledgers_deleted, done.refused) == ([], GarbageRefusal.UNEXPLAINED)
        for force in (True, True):
            done = await bookie.garbage_collector.run_pass(force=force, minor=False)
            await asyncio.sleep(0.01)
        assert done.ledgers_deleted == list(lost), "by hand it is given up"
    finally:
        await bookie.close()
        await deployment.tree.close()


@pytest.mark.run_by.with_args(with_cluster)
async def test_a_bookie_whose_metadata_goes_back_under_it_registers_no_more_and_deletes_nothing(
    cluster: Cluster, /
) -> None:
    """Its session ends, and the next one is with an older tree: it serves what it has, and waits for the right one."""
    older = await cluster.simulation.spawn("meta", SqliteStore.open(cluster.simulation.world("meta"), ":memory:"))
    first = cluster.sqlite.new_session()
    now = cluster.sqlite

    async def again() -> MetadataStore:
        return now.new_session()

    world = cluster.simulation.world(NODE)
    bookie = await cluster.simulation.spawn(NODE, Bookie.start(world, CONFIG, first, again))
    await allocate_ids(cluster.metadata, 5)
    await cluster.metadata.put(paths.ledger(1), a_record(1, bookie.id))
    caller = cluster.caller(bookie)
    assert (await caller.add(1, 0, b"x")).status is Status.OK
    await asyncio.sleep(100)
    now = older
    await first.close()
    await asyncio.sleep(100)
    assert await older.new_session().children(paths.AVAILABLE_BOOKIES) == []
    assert (await caller.read(1, 0))[0].status is Status.OK
    now = cluster.sqlite
    await asyncio.sleep(10)
    assert await cluster.metadata.children(paths.AVAILABLE_BOOKIES) == [bookie.id]


@pytest.mark.parametrize("answered", [0, 1, 2])
async def test_a_metadata_service_that_is_started_again_during_a_look_is_no_older_one(
    tmp_path: Path, answered: int
) -> None:
    """After that many answers: what is remembered then must not be of two incarnations."""
    deployment = Deployment(tmp_path)
    await deployment.open()
    (tmp_path / "bookie").mkdir()
    memory = RollbackGuard(deployment.world, str(tmp_path / "bookie"))
    await memory.check_metadata_not_older(deployment.metadata)
    await allocate_ids(deployment.metadata, 5)  # news: it is kept at once

    class Reconnecting:
        """A session that outlives the service's process, as a remote one does."""

        def __init__(self) -> None:
            self._asked = 0

        async def _again(self) -> None:
            self._asked += 1
            if self._asked == answered + 1:
                await deployment.tree.close()
                await deployment.open()
                await deployment.metadata.put("/topics/t", b"later")

        async def get(self, path: str) -> VersionedValue | None:
            await self._again()
            return await deployment.metadata.get(path)

        async def revision(self) -> int:
            await self._again()
            return await deployment.metadata.revision()

    try:
        await memory.check_metadata_not_older(cast("MetadataStore", Reconnecting()))
        await memory.check_metadata_not_older(deployment.metadata)
    finally:
        await memory.close()
        await deployment.tree.close()


async def test_a_bookie_on_an_older_copy_with_its_own_old_session_leaves_and_does_not_end(tmp_path: Path) -> None:
    """The copy has the session of the bookie, and the node of its process before: nothing seems to have happened."""
    deployment = Deployment(tmp_path)
    await deployment.open()
    await (await deployment.bookie()).close()
    bookie = await deployment.bookie()
    await deployment.ledgers(bookie, 3)
    node = await deployment.metadata.get(paths.bookie(bookie.id))
    assert node is not None
    before = msgspec.structs.replace(decode_record(node.value, BookieRecord, paths.bookie(bookie.id)), process="before")
    try:
        await deployment.metadata.commit(
            [
                make_put_operation(paths.bookie(bookie.id), before),
                make_put_operation(paths.LEDGER_IDS, CounterRecord(next=2)),
            ]
        )
        ended: list[str] = []
        deployment.world.files.end_process = ended.append  # type: ignore[assignment]
        await bookie._check_registration()
        assert ended == []
        assert await deployment.metadata.children(paths.AVAILABLE_BOOKIES) == [], "nobody puts a ledger there"
        await deployment.metadata.put(paths.LEDGER_IDS, encode_record(CounterRecord(next=20), paths.LEDGER_IDS))
        await bookie._check_registration()
        await bookie.first.upkeep._register()
        assert await deployment.metadata.children(paths.AVAILABLE_BOOKIES) == [bookie.id], "the right one is back"
    finally:
        await bookie.close()
        await deployment.tree.close()
