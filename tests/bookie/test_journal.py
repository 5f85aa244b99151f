"""The journal: answers after the sync and in order; what a full disk, a failed sync and damage do; recycled files."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import pytest

from magnetar.bookie.format.framing import Damaged
from magnetar.bookie.format.journal import ALIGNMENT
from magnetar.bookie.format.peer import Status
from magnetar.bookie.store.store import Store
from magnetar.runtime.sim.files import FileFault, Operation
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.entries import KEY, payload_of, stored_entry
from tests.bookie.stores import DATA, NODE, SMALL, add, fence, open_store, payload, simulate

JOURNAL = f"{DATA}/journal"


def put(store: Store, ledger: int, entry: int, size: int = 300) -> None:
    stored = stored_entry(ledger, entry, payload(ledger, entry, size))
    assert store.add(ledger, entry, KEY, (stored,), len(stored), -1, False) is Status.OK


def journal_files(simulation: Simulation) -> list[str]:
    return [path for path in simulation.node(NODE).disk.paths() if path.endswith(".jnl")]


def test_answers_come_in_order_and_after_the_sync() -> None:
    events: list[str] = []

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)

        def record(operation: Operation) -> None:
            if operation.kind == "fdatasync" and operation.path.startswith(JOURNAL):
                events.append("sync")

        simulation.node(NODE).disk.record = record

        async def work() -> None:
            done = asyncio.Event()
            for entry in range(40):
                put(store, 1, entry)

                def answered(ok: bool, entry: int = entry) -> None:
                    assert ok
                    events.append(str(entry))
                    if entry == 39:
                        done.set()

                store.seal(answered)
                if entry % 7 == 0:
                    await asyncio.sleep(0.0003)
            await done.wait()

        await simulation.spawn(NODE, work())

    simulate(main)
    assert events[0] == "sync"
    assert [int(event) for event in events if event != "sync"] == list(range(40))
    assert 1 < events.count("sync") < 40, "adds that wait share a sync"


def test_add_is_visible_before_it_is_durable_and_gone_only_when_nobody_was_told() -> None:
    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        put(store, 1, 0)
        assert (await simulation.spawn(NODE, store.read(1, 0))).status is Status.OK
        simulation.crash(NODE, power_loss=True)
        store = await open_store(simulation)
        assert (await simulation.spawn(NODE, store.read(1, 0))).status is Status.NO_SUCH_LEDGER

    simulate(main)


def test_failed_sync_ends_the_process_and_nobody_is_answered() -> None:
    answers: list[bool] = []

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        simulation.node(NODE).disk.faults.append(FileFault("fdatasync", ".jnl"))

        async def work() -> None:
            put(store, 1, 0)
            store.seal(answers.append)
            await asyncio.sleep(10)

        with pytest.raises(NodeCrashed):
            await simulation.spawn(NODE, work())
        assert not simulation.is_up(NODE)

    simulate(main)
    assert answers == []


def test_full_disk_refuses_adds_loses_nothing_and_recovers() -> None:
    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        disk = simulation.node(NODE).disk

        async def work() -> None:
            assert await add(store, 1, 0, payload(1, 0)) is Status.OK
            fault = FileFault("pwrite", ".jnl", errno.ENOSPC, times=-1)
            disk.faults.append(fault)
            assert await add(store, 1, 1, payload(1, 1)) is Status.READ_ONLY
            assert await add(store, 2, 0, payload(2, 0)) is Status.READ_ONLY
            assert await fence(store, 3) is Status.UNKNOWN
            assert store.no_space
            disk.faults.remove(fault)
            assert await add(store, 2, 1, payload(2, 1)) is Status.OK
            assert await fence(store, 3) is Status.OK
            assert not store.no_space

        await simulation.spawn(NODE, work())
        simulation.crash(NODE, power_loss=True)
        store = await open_store(simulation)
        assert store.counters["replayed_records"] > 0
        for ledger, entry in ((1, 0), (2, 1)):
            result = await simulation.spawn(NODE, store.read(ledger, entry))
            assert payload_of(result.entries[0]) == payload(ledger, entry)
        assert await simulation.spawn(NODE, add(store, 3, 0, b"late")) is Status.FENCED
        assert await simulation.spawn(NODE, add(store, 2, 2, b"more")) is Status.OK

    simulate(main)


def test_full_disk_during_a_checkpoint_keeps_everything_readable_and_is_repeated() -> None:
    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        disk = simulation.node(NODE).disk

        async def work() -> None:
            for entry in range(20):
                assert await add(store, 1, entry, payload(1, entry)) is Status.OK
            for kind, name in (("pwrite", ".log"), ("pwrite", ".idx"), ("allocate", ".log"), ("pwrite", ".lidx")):
                fault = FileFault(kind, name, errno.ENOSPC, times=-1)
                disk.faults.append(fault)
                with pytest.raises(Exception, match="No space left"):
                    await store.checkpoint()
                assert store.no_space
                for entry in range(20):
                    result = await store.read(1, entry)
                    assert payload_of(result.entries[0]) == payload(1, entry)
                disk.faults.remove(fault)
            await store.checkpoint()
            assert store.statistics()["checkpoints"] == 2
            for entry in range(20):
                assert payload_of((await store.read(1, entry)).entries[0]) == payload(1, entry)
            store.check()

        await simulation.spawn(NODE, work())

    simulate(main)


def test_recycled_journals_never_replay_their_stale_records() -> None:
    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)

        async def fill(ledger: int) -> None:
            for entry in range(600):
                assert await add(store, ledger, entry, payload(ledger, entry)) is Status.OK

        for ledger in range(1, 5):
            await simulation.spawn(NODE, fill(ledger))
        await simulation.spawn(NODE, store.bury([1, 2, 3, 4]))
        await simulation.spawn(NODE, store.checkpoint())
        assert store.statistics()["journal_recycled"] > 0
        await simulation.spawn(NODE, add(store, 9, 0, b"new"))
        simulation.crash(NODE, power_loss=True)
        store = await open_store(simulation)
        assert 1 <= store.counters["replayed_records"] <= 3, "only the key and the entry of ledger 9"
        assert list(store.descriptors.ids()) == [9]

    simulate(main)


async def _journal_with_blocks(simulation: Simulation, blocks: int) -> tuple[str, list[int]]:
    """A journal file that was not checkpointed, and where its blocks begin."""
    store = await open_store(simulation, replace(SMALL, journal_first_segment_bytes=64 << 10))
    offsets: list[int] = []

    def record(operation: Operation) -> None:
        if operation.kind == "pwrite" and operation.path.endswith(".jnl"):
            offsets.append(operation.offset)

    simulation.node(NODE).disk.record = record
    for entry in range(blocks):
        await simulation.spawn(NODE, add(store, 1, entry, payload(1, entry)))
    simulation.crash(NODE)
    return journal_files(simulation)[-1], offsets


def test_torn_tail_is_cut_and_counted() -> None:
    async def main(simulation: Simulation) -> None:
        path, offsets = await _journal_with_blocks(simulation, 5)
        simulation.node(NODE).disk.flip_bit(path, offsets[-1] + 200)
        store = await open_store(simulation)
        assert store.counters["torn_bytes"] == ALIGNMENT
        for entry in range(4):
            assert (await simulation.spawn(NODE, store.read(1, entry))).status is Status.OK
        assert (await simulation.spawn(NODE, store.read(1, 4))).status is Status.NO_SUCH_ENTRY
        await simulation.spawn(NODE, add(store, 1, 4, b"again"))
        simulation.crash(NODE, power_loss=True)
        store = await open_store(simulation)
        assert payload_of((await simulation.spawn(NODE, store.read(1, 4))).entries[0]) == b"again"

    simulate(main)


@pytest.mark.parametrize("at", [0, 5, 43, 200])
@pytest.mark.parametrize("which", [0, 2, 3])
def test_damage_in_front_of_synced_blocks_stops_the_start_with_file_and_offset(which: int, at: int) -> None:
    async def main(simulation: Simulation) -> None:
        path, offsets = await _journal_with_blocks(simulation, 5)
        simulation.node(NODE).disk.flip_bit(path, offsets[which] + at)
        with pytest.raises(Damaged, match=f"{path}: damaged at offset {offsets[which]}: ") as caught:
            await open_store(simulation)
        assert caught.value.offset == offsets[which]

    simulate(main)


def test_damage_at_the_end_of_a_journal_that_has_a_successor_stops_the_start() -> None:
    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation, replace(SMALL, journal_first_segment_bytes=16 << 10))
        first = journal_files(simulation)[0]
        offsets: list[int] = []

        def record(operation: Operation) -> None:
            if operation.kind == "pwrite" and operation.path == first:
                offsets.append(operation.offset)

        simulation.node(NODE).disk.record = record
        while len(journal_files(simulation)) < 2:
            await simulation.spawn(NODE, add(store, 1, len(offsets), payload(1, len(offsets))))
        simulation.crash(NODE)
        assert len(journal_files(simulation)) > 1, "the journal went on in another file"
        simulation.node(NODE).disk.flip_bit(first, offsets[-1] + 100)
        with pytest.raises(Damaged, match="the next journal was begun when they were synced"):
            await open_store(simulation)

    simulate(main)


def test_missing_journal_and_damaged_header_stop_the_start() -> None:
    async def main(simulation: Simulation) -> None:
        path, _ = await _journal_with_blocks(simulation, 3)
        for offset in (20, 2048 + 20):
            simulation.node(NODE).disk.flip_bit(path, offset)
        with pytest.raises(Damaged, match=f"{path}: damaged at offset 0"):
            await open_store(simulation)
        simulation.world(NODE).files.remove(path)
        with pytest.raises(Damaged, match="this journal is missing"):
            await open_store(simulation)

    simulate(main)
