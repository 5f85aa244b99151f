"""Garbage collection deletes dead logs and only those (invariants 21, 22)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from magnetar.bookie.format.peer import Op, Status
from magnetar.bookie.server import Bookie
from magnetar.bookie.store.compaction_plan import LogFacts
from magnetar.bookie.store.disk import NoSpace
from magnetar.metadata import paths, records
from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.sim.files import Operation
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import PeerCaller, payload_of
from tests.bookie.stores import NODE, SMALL, payload

FEW = replace(SMALL, memtable_bytes=64 << 10, log_bytes_max=(8 << 20) + (128 << 10))


async def with_logs(cluster: Cluster, ledgers: int = 4) -> tuple[Bookie, PeerCaller]:
    """A bookie with one entry log per ledger 1..n, all of them in the metadata."""
    bookie = await cluster.start(store=FEW)
    caller = cluster.caller(bookie)
    for ledger in range(1, ledgers + 1):
        record = records.LedgerRecord(
            ledger_id=ledger, state=records.OPEN, ensemble_size=1, write_quorum=1, ack_quorum=1,
            key=b"k" * 20, token="t", fragments=(records.Fragment(0, (bookie.id,)),),
        )  # fmt: skip
        await cluster.metadata.put(paths.ledger(ledger), records.encode(record))
        for entry in range(10):
            assert (await caller.add(ledger, entry, payload(ledger, entry))).status is Status.OK
        await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
        bookie.store._log._log_bytes_max = 0  # every flush goes to a log of its own
    return bookie, caller


async def collect(cluster: Cluster, bookie: Bookie) -> None:
    await cluster.simulation.spawn(NODE, bookie.collector.run(minor=False))
    await asyncio.sleep(1)


def logs(cluster: Cluster) -> list[str]:
    return [path.rpartition("/")[2] for path in cluster.simulation.node(NODE).disk.paths() if path.endswith(".log")]


def test_dead_log_goes_after_two_passes_and_live_ones_stay() -> None:
    async def main(cluster: Cluster) -> None:
        bookie, caller = await with_logs(cluster)
        before = logs(cluster)
        assert len(before) == 4
        await collect(cluster, bookie)
        await collect(cluster, bookie)
        assert logs(cluster) == before, "nothing is dead"
        await cluster.metadata.delete(paths.ledger(2))
        await collect(cluster, bookie)
        assert logs(cluster) == before, "one pass is not enough"
        assert (await caller.read(2, 0))[0].status is Status.OK
        await collect(cluster, bookie)
        assert logs(cluster) == [before[0], *before[2:]]
        for ledger in (1, 3, 4):
            _, entries = await caller.read(ledger, 0, count=10)
            assert [payload_of(entry) for entry in entries] == [payload(ledger, entry) for entry in range(10)]
        assert (await caller.read(2, 0))[0].status is Status.NO_SUCH_LEDGER
        bookie.store.check()

    with_cluster(main)


def test_deleted_ledger_never_takes_an_add_again_also_after_a_restart() -> None:
    async def main(cluster: Cluster) -> None:
        bookie, caller = await with_logs(cluster, 2)
        await cluster.metadata.delete(paths.ledger(1))
        await collect(cluster, bookie)
        await collect(cluster, bookie)
        for _ in range(3):
            assert (await caller.add(1, 10, b"late")).status is Status.FENCED
            assert (await caller.add(1, 10, b"late", recovery=True)).status is Status.FENCED
            assert (await caller.send(Op.WRITE_LAC, 1, 3))[0].status is Status.FENCED
            assert (await caller.read(1, 0, fence=True))[0].status is Status.NO_SUCH_LEDGER
            assert (await caller.read(2, 0))[0].status is Status.OK
            caller = cluster.caller(await cluster.restart())

    with_cluster(main)


def test_tombstone_is_durable_before_data_goes() -> None:
    events: list[str] = []

    def record(operation: Operation) -> None:
        if operation.kind == "fdatasync" and operation.path.endswith(".jnl"):
            events.append("tombstone")
        if operation.kind == "remove" and operation.path.endswith(".log"):
            events.append("remove")

    async def main(cluster: Cluster) -> None:
        bookie, _ = await with_logs(cluster, 3)
        await cluster.metadata.delete(paths.ledger(1))
        await collect(cluster, bookie)
        cluster.simulation.node(NODE).disk.record = record
        await collect(cluster, bookie)
        cluster.simulation.node(NODE).disk.record = None

    with_cluster(main)
    assert events == ["tombstone", "remove"]


def test_a_pass_that_finds_the_disk_full_is_not_the_last_one() -> None:
    async def main(cluster: Cluster) -> None:
        cluster.config = replace(cluster.config, gc_interval_s=5.0)
        bookie, _ = await with_logs(cluster)
        survey = bookie.store.compactor.survey
        failures = [NoSpace("full"), OSError("a directory that cannot be read")]

        async def failing() -> list[LogFacts]:
            if failures:
                raise failures.pop()
            return await survey()

        bookie.store.compactor.survey = failing  # type: ignore[method-assign]
        await cluster.metadata.delete(paths.ledger(2))
        await asyncio.sleep(60)
        assert not failures
        assert len(logs(cluster)) == 3

    with_cluster(main)


def test_log_with_one_living_ledger_stays() -> None:
    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start(store=FEW)
        caller = cluster.caller(bookie)
        record = records.encode(records.CounterRecord(next=0))
        for ledger in (1, 2):
            await cluster.metadata.put(paths.ledger(ledger), record)
            await caller.add(ledger, 0, b"x")
        await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
        bookie.store._log._log_bytes_max = 0
        await caller.add(2, 1, b"y")
        await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
        await cluster.metadata.delete(paths.ledger(1))
        for _ in range(3):
            await collect(cluster, bookie)
        assert len(logs(cluster)) == 2
        assert (await caller.read(2, 0))[0].status is Status.OK
        assert (await caller.read(1, 0))[0].status is Status.NO_SUCH_LEDGER

    with_cluster(main)


def test_nothing_goes_when_listing_or_reading_fails_or_the_cluster_is_another() -> None:
    async def main(cluster: Cluster) -> None:
        bookie, caller = await with_logs(cluster)
        metadata = cluster.metadata
        await metadata.delete(paths.ledger(1))
        await collect(cluster, bookie)
        original = metadata.children, metadata.get

        async def fail(path: str) -> list[str]:
            raise ConnectionLost("gone")

        metadata.children = fail  # type: ignore[method-assign]
        with pytest.raises(ConnectionLost):
            await cluster.simulation.spawn(NODE, bookie.collector.run(minor=False))
        metadata.children = original[0]  # type: ignore[method-assign]
        metadata.get = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(ConnectionLost):
            await cluster.simulation.spawn(NODE, bookie.collector.run(minor=False))
        metadata.get = original[1]  # type: ignore[method-assign]
        cluster_record = await metadata.get(paths.CLUSTER)
        assert cluster_record is not None
        for other in (records.encode(records.ClusterRecord(instance="other")), None):
            if other is None:
                await metadata.delete(paths.CLUSTER)
            else:
                await metadata.put(paths.CLUSTER, other)
            with pytest.raises(ValueError, match="nothing is deleted"):
                await cluster.simulation.spawn(NODE, bookie.collector.run(minor=False))
        assert len(logs(cluster)) == 4
        assert (await caller.read(1, 0))[0].status is Status.OK
        await metadata.put(paths.CLUSTER, cluster_record.value)
        await collect(cluster, bookie)
        assert len(logs(cluster)) == 3

    with_cluster(main)


def test_ledger_that_reappears_between_the_passes_lives() -> None:
    async def main(cluster: Cluster) -> None:
        bookie, caller = await with_logs(cluster, 2)
        found = await cluster.metadata.get(paths.ledger(1))
        assert found is not None
        await cluster.metadata.delete(paths.ledger(1))
        await collect(cluster, bookie)
        await cluster.metadata.put(paths.ledger(1), found.value)
        await collect(cluster, bookie)
        await cluster.metadata.delete(paths.ledger(1))
        await collect(cluster, bookie)
        assert (await caller.read(1, 0))[0].status is Status.OK, "the count of passes began anew"

    with_cluster(main)
