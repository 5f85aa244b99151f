"""Tombstones, quarantine, limbo, drained logs: true at once, durable with a checkpoint, and what reads answer."""

import errno
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.format.ledger_index import Tombstone, encode_ledger_index_record
from magnetar.bookie.store.index_files import LedgerDescriptors, LedgerTableLoader
from magnetar.bookie.store.memtable import IntegerIntervals
from magnetar.bookie.store.state_log import StateLog
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.disk import FileFault
from magnetar.runtime.sim.world import Simulation
from tests.bookie.stores import NODE, add, open_store, payload, simulate
from tests.compiled import replaces_code

pytestmark = pytest.mark.run_by.with_args(simulate)

SPANS = st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 6))


@given(st.lists(SPANS, max_size=25), st.integers(0, 36), st.integers(0, 9))
def test_intervals_are_a_set(changes: list[tuple[bool, int, int]], first: int, length: int) -> None:
    intervals, model = IntegerIntervals(), set[int]()
    for adds, start, size in changes:
        span = range(start, start + size + 1)
        (intervals.add if adds else intervals.remove)(span[0], span[-1])
        model = model.union(span) if adds else model.difference(span)
        intervals.check()
        assert {value for value in range(40) if value in intervals} == model
    inside = {value for a, b in intervals.intersect(first, first + length) for value in range(a, b + 1)}
    assert inside == model.intersection(range(first, first + length + 1))
    assert len(intervals) == len(list(intervals)) == len([v for v in model if v - 1 not in model])


def answers(facts: StateLog) -> object:
    """All that a reader can ask."""
    asked = [(ledger in facts.tombstones, [facts.is_quarantined(ledger, e) for e in range(8)]) for ledger in range(8)]
    return asked, facts.limbo_upto, facts.fenced_upto, sorted(facts.drained)


def told(records: list[bytes]) -> LedgerDescriptors:
    """A start that finds these records."""
    loading, loaded = LedgerTableLoader(), LedgerDescriptors()
    assert loading.add_rows(b"".join(records)) == []
    loaded.load(loading.finish())
    return loaded


def stated(facts: StateLog) -> list[bytes]:
    return list(map(encode_ledger_index_record, facts.list_facts()))


NUMBER = st.integers(0, 6)
CALLS = st.one_of(
    st.tuples(st.sampled_from(["quarantine", "end_quarantine"]), NUMBER, NUMBER, NUMBER),
    st.tuples(st.just("delete"), NUMBER, NUMBER),
    st.tuples(st.sampled_from(["enter_limbo", "mark_log_drained"]), NUMBER),
    st.tuples(st.just("leave_limbo")),
)


@given(st.lists(CALLS, max_size=20))
def test_changes_and_statements_say_the_same_to_a_later_start(calls: list[tuple[str | int, ...]]) -> None:
    facts, records = LedgerDescriptors(), list[bytes]()
    for name, *numbers in calls:
        assert isinstance(name, str)
        getattr(facts, name)(*numbers[:-2], *sorted(map(int, numbers[-2:])))
        facts.begin_checkpoint()
        settled = facts.pending_changes().encode_changes(everything=False)
        records += settled.changes
        facts.on_changes_durable(settled)
        assert not facts.has_unwritten_changes
        facts.check()
        for loaded in (told(records), told(stated(facts)), told(records + stated(facts)), told(stated(facts.copy()))):
            loaded.check()
            assert answers(loaded) == answers(facts)


def test_limbo_fences_and_logs_are_drained_for_ever() -> None:
    facts = LedgerDescriptors()
    facts.enter_limbo(7)
    facts.enter_limbo(3)
    assert (facts.limbo_upto, facts.fenced_upto) == (7, 7)
    facts.leave_limbo()
    facts.leave_limbo()
    assert (facts.limbo_upto, facts.fenced_upto) == (-1, 7)
    facts.mark_log_drained(4)
    assert told(stated(facts)).drained == {4}
    assert told(stated(facts)).fenced_upto == 7


def test_a_deleted_ledger_leaves_quarantine_and_does_not_come_back() -> None:
    facts = LedgerDescriptors()
    facts.quarantine(5, 0, 3)
    facts.delete(5, 5)
    facts.quarantine(5, 0, 3)
    assert not facts.is_quarantined(5, 1)
    assert facts.list_facts() == [Tombstone(5, 5)]
    assert facts.take_changes() == [Tombstone(5, 5)], "a disk that is full has no room for what nobody asks for"


# ---------------------------------------------------------------------------------------- in a store
async def _status(simulation: Simulation, store: Store, ledger: int, entry: int) -> Status:
    return (await simulation.spawn(NODE, store.read_entries(ledger, entry))).status


async def _again(simulation: Simulation, store: Store) -> Store:
    """After a checkpoint and a power loss."""
    await simulation.spawn(NODE, store.checkpoint())
    simulation.crash(NODE, power_loss=True)
    return await open_store(simulation)


async def test_quarantined_miss_is_unknown_until_a_recovery_add_is_checkpointed(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    await simulation.spawn(NODE, add(store, 5, 0, payload(5, 0)))
    store.descriptors.quarantine(5, 2, 3)
    for _ in range(2):
        assert await _status(simulation, store, 5, 0) is Status.OK
        assert await _status(simulation, store, 5, 1) is Status.NO_SUCH_ENTRY
        assert await _status(simulation, store, 5, 2) is Status.UNKNOWN
        store = await _again(simulation, store)
    await simulation.spawn(NODE, add(store, 5, 2, payload(5, 2), recovery=True))
    assert await _status(simulation, store, 5, 2) is Status.OK
    assert store.descriptors.is_quarantined(5, 2), "its copy is in the journal alone"
    store = await _again(simulation, store)
    assert await _status(simulation, store, 5, 2) is Status.OK
    assert not store.descriptors.is_quarantined(5, 2)
    assert await _status(simulation, store, 5, 3) is Status.UNKNOWN


async def test_in_limbo_hits_are_served_and_misses_are_unknown(simulation: Simulation, /) -> None:
    store = await open_store(simulation)
    await simulation.spawn(NODE, add(store, 5, 0, payload(5, 0)))
    await simulation.spawn(NODE, add(store, 9, 0, payload(9, 0)))
    await simulation.spawn(NODE, store.delete_ledgers([4]))
    store.descriptors.enter_limbo(7)
    for _ in range(2):
        assert await _status(simulation, store, 5, 0) is Status.OK
        assert await _status(simulation, store, 5, 1) is Status.UNKNOWN
        assert await _status(simulation, store, 6, 0) is Status.UNKNOWN
        assert store.read_lac(6).status is Status.UNKNOWN
        assert await _status(simulation, store, 4, 0) is Status.NO_SUCH_LEDGER
        assert await _status(simulation, store, 8, 0) is Status.NO_SUCH_LEDGER
        assert store.read_lac(8).status is Status.NO_SUCH_LEDGER
        assert await _status(simulation, store, 9, 1) is Status.NO_SUCH_ENTRY
        store = await _again(simulation, store)
    store.descriptors.leave_limbo()
    store = await _again(simulation, store)
    assert await _status(simulation, store, 6, 0) is Status.NO_SUCH_LEDGER
    assert store.descriptors.fenced_upto == 7


@replaces_code
async def test_limbo_ends_although_no_descriptor_is_free_to_sync_the_deletion_of_its_losses(
    simulation: Simulation, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is durable with the checkpoint before: what it says of the rest is a line of the log. If the list comes
    back, the next start deletes it."""
    store, disk = await open_store(simulation), simulation.node(NODE).disk
    store._losses.add_data_loss("a test")
    await simulation.spawn(NODE, run(store._losses.write))
    store.descriptors.enter_limbo(7)
    await simulation.spawn(NODE, store.checkpoint())
    await simulation.spawn(NODE, run(store._losses.mark_limbo_durable))  # as the start does
    honest = Store.checkpoint

    async def checkpoint(self: Store) -> None:
        await honest(self)
        disk.faults.append(FileFault("sync_directory", "", errno.EMFILE))

    monkeypatch.setattr(Store, "checkpoint", checkpoint)
    await simulation.spawn(NODE, store.leave_limbo())
    monkeypatch.undo()
    assert not disk.faults[-1].times, "the fault came"
    assert (store.descriptors.limbo_upto, list(store.limbo_losses)) == (-1, [])
    simulation.crash(NODE, power_loss=True)
    store = await open_store(simulation)
    assert (store.descriptors.limbo_upto, list(store.limbo_losses)) == (-1, [])


async def run(act: Callable[[], None]) -> None:
    act()
