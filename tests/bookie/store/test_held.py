"""HELD says exactly what a bookie could give now: from memory, flushed, striped, quarantined, mended, deleted."""

import asyncio
import errno
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.store.disk import NoSpace
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import (
    ENTRIES_PER_ANSWER_MAX,
    BookieAnswerHead,
    BookieOperation,
    Status,
    decode_stored_runs,
    encode_stored_runs,
)
from magnetar.runtime.sim.disk import FileFault
from magnetar.runtime.sim.world import Simulation
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, stored_entry
from tests.bookie.stores import NODE, add, open_store, payload, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)


async def _held(store: Store, ledger: int, first: int, last: int) -> set[int]:
    found = await store.find_stored_entries(ledger, first, last)
    found.check()
    return {entry for low, high in found for entry in range(low, high + 1)}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_held_is_what_can_be_read(seed: int) -> None:
    rng = random.Random(seed)

    async def main(simulation: Simulation) -> None:
        store = await open_store(simulation)
        for turn in range(150):
            ledger = rng.randint(1, 3)
            entry = rng.choice((turn, rng.randint(0, 200)))
            await add(store, ledger, entry, payload(ledger, entry, rng.choice((20, 300, 3000))))
            if rng.random() < 0.05:
                await store.checkpoint()
        store.descriptors.quarantine(2, 10, 60)
        await store.delete_ledgers([3])
        for ledger in (1, 2, 3, 4):
            first, last = sorted((rng.randint(0, 200), rng.randint(0, 200)))
            readable = {e for e in range(first, last + 1) if (await store.read_entries(ledger, e)).entries}
            in_memory = {e for e in range(10, 61) if store.memtable.get(2, e) is not None}
            hidden = set(range(10, 61)) - in_memory if ledger == 2 else set()
            assert await _held(store, ledger, first, last) == readable - hidden
        await store.close()

    simulate(main, seed)


async def test_an_entry_that_was_quarantined_is_held_again_when_it_is_added_again(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    for entry in range(5):
        await add(store, 1, entry, payload(1, entry))
    await store.checkpoint()
    store.descriptors.quarantine(1, 2, 3)
    assert await _held(store, 1, 0, 9) == {0, 1, 4}
    await add(store, 1, 2, payload(1, 2), recovery=True)
    assert await _held(store, 1, 0, 9) == {0, 1, 2, 4}
    await store.checkpoint()
    assert await _held(store, 1, 0, 9) == {0, 1, 2, 4}
    await store.close()


async def test_what_is_held_was_synced_before_it_is_said(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    await add(store, 1, 0, payload(1, 0))
    delays = simulation.node(NODE).disk_delays
    delays.stall_rate, delays.stall_s = 1.0, 1000.0
    stored = stored_entry(1, 1, payload(1, 1))
    assert store.add_entry(1, 1, KEY, (stored,), len(stored), -1, True) is Status.OK
    adding = asyncio.ensure_future(store.seal_group_and_wait())
    asking = asyncio.ensure_future(_held(store, 1, 0, 9))
    done, _ = await asyncio.wait([adding, asking], return_when=asyncio.FIRST_COMPLETED)
    assert adding in done, "the answer overtakes the sync"
    assert await asking == {0, 1}
    simulation.crash(NODE, power_loss=True)
    delays.stall_rate = 0.0
    store = await open_store(simulation)
    assert await _held(store, 1, 0, 9) == {0, 1}
    await store.close()


async def test_what_the_journal_refused_is_not_held_until_it_is_synced_or_a_checkpoint_has_it(
    simulation: Simulation, /
) -> None:
    store = await open_store(simulation)
    disk = simulation.node(NODE).disk
    await add(store, 1, 0, payload(1, 0))

    async def refused(entry: int) -> None:
        disk.faults.append(FileFault("pwrite", "/journal/", errno.ENOSPC))
        assert await add(store, 1, entry, payload(1, entry), recovery=True) is Status.READ_ONLY

    await refused(1)
    await refused(2)
    assert await store.seal_group_and_wait(), "nothing was enqueued since"
    assert await _held(store, 1, 0, 9) == {0}
    assert not await store.wait_durable(1)
    assert await store.wait_durable(2), "another ledger"
    assert await add(store, 1, 1, payload(1, 1), recovery=True) is Status.OK
    assert await _held(store, 1, 0, 9) == {0, 1}
    disk.faults.append(FileFault("pwrite", "/entries/", errno.ENOSPC, times=-1))
    with pytest.raises(NoSpace):
        await store.checkpoint()
    assert await _held(store, 1, 0, 9) == {0, 1}, "it is being flushed"
    disk.faults.clear()
    await store.checkpoint()
    assert await _held(store, 1, 0, 9) == {0, 1, 2}
    assert await store.wait_durable(1)
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert await _held(store, 1, 0, 9) == {0, 1, 2}
    await store.close()


@pytest.mark.parametrize("recovery", [False, True])
async def test_an_entry_that_is_there_already_is_answered_after_a_sync_with_it(
    simulation: Simulation, /, recovery: bool
) -> None:
    """The first copy is on its way to a disk that hangs: the second add of it is no shortcut."""
    store = await open_store(simulation)
    await add(store, 1, 0, payload(1, 0))
    delays = simulation.node(NODE).disk_delays
    delays.stall_rate, delays.stall_s = 1.0, 1000.0
    synced = store.journal_position
    adding = [asyncio.ensure_future(add(store, 1, 1, payload(1, 1)))]
    await asyncio.sleep(1.0)
    adding.append(asyncio.ensure_future(add(store, 1, 1, payload(1, 1), recovery=recovery)))
    await asyncio.wait(adding, return_when=asyncio.FIRST_COMPLETED)
    assert store.journal_position > synced
    simulation.crash(NODE, power_loss=True)
    delays.stall_rate = 0.0
    store = await open_store(simulation)
    assert await _held(store, 1, 0, 9) == {0, 1}
    await store.close()


@pytest.mark.run_by.with_args(with_cluster)
async def test_a_bookie_answers_held_and_refuses_what_is_no_question(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    for entry in (0, 1, 2, 5):
        await caller.add(7, entry, b"x")
    head, frames = await caller.send(BookieOperation.HELD, 7, 1, count=10)
    assert decode_stored_runs(head, frames, 1, 10) == [(1, 2), (5, 5)]
    head, frames = await caller.send(BookieOperation.HELD, 8, 0, count=10)
    assert decode_stored_runs(head, frames, 0, 9) == []
    for entry, count in ((-1, 1), (0, 0), (0, ENTRIES_PER_ANSWER_MAX + 1)):
        head, _ = await caller.send(BookieOperation.HELD, 7, entry, count=count, key=KEY)
        assert head.status is Status.BAD_REQUEST
    await bookie.close()


@given(st.sets(st.integers(5, 60)))
def test_runs_come_back(entries: set[int]) -> None:
    runs: list[tuple[int, int]] = []
    for entry in sorted(entries):
        if runs and runs[-1][1] == entry - 1:
            runs[-1] = runs[-1][0], entry
        else:
            runs.append((entry, entry))
    answer = BookieAnswerHead(BookieOperation.HELD, Status.OK, 1, 5, -1, len(runs))
    assert decode_stored_runs(answer, (encode_stored_runs(runs),), 5, 60) == runs


@pytest.mark.parametrize("runs", [[(4, 6)], [(5, 61)], [(7, 6)], [(5, 6), (7, 8)], [(8, 9), (5, 6)]])
def test_runs_that_break_the_rules_are_no_answer(runs: list[tuple[int, int]]) -> None:
    answer = BookieAnswerHead(BookieOperation.HELD, Status.OK, 1, 5, -1, len(runs))
    with pytest.raises(ValueError, match="a run from"):
        decode_stored_runs(answer, (encode_stored_runs(runs),), 5, 60)
    with pytest.raises(ValueError, match="runs take"):
        decode_stored_runs(answer._replace(count=9), (encode_stored_runs(runs),), 5, 60)
    with pytest.raises(ValueError, match="an answer to"):
        decode_stored_runs(answer._replace(status=Status.BUSY), (encode_stored_runs(runs),), 5, 60)


def test_the_example_of_the_format() -> None:
    wanted = "0000000000000000 0000000000000004 0000000000000007 0000000000000007"
    assert encode_stored_runs([(0, 4), (7, 7)]) == bytes.fromhex(wanted)
