"""Auto-recovery from end to end: marked, copied, then the record; never the fragment that is not settled.

Real bookies, metadata and clients in a simulation (tests/bookie/maintenance/copies.py). `broken` mutants show that the
named test sees the defect: M20 (copies without RECOVERY), M21 (the last fragment of an open ledger).
"""

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from magnetar.bookie.maintenance import marks
from magnetar.bookie.maintenance import repair_core as copies
from magnetar.bookie.maintenance import repair_worker as copier
from magnetar.bookie.maintenance import repair_worker as worker
from magnetar.bookie.maintenance.repair_core import StuckReason
from magnetar.ledger import LedgerClient
from magnetar.ledger import client as deletions
from magnetar.ledger import metadata_core as transitions
from magnetar.ledger.peer_format import BookieRequestFlags, encode_add_many_request
from magnetar.metadata import paths
from magnetar.metadata.records import (
    CLOSED,
    IN_RECOVERY,
    OPEN,
    AuditorRecord,
    BookieRecord,
    CookieRecord,
    CounterRecord,
    DamagedEntriesRecord,
    DepartingRecord,
    Fragment,
    LedgerRecord,
    MetadataRecord,
    RepairLockRecord,
    RepairSettingsRecord,
    RepairWorkerRecord,
    UnderReplicatedRecord,
    encode_record,
)
from magnetar.metadata.store import NODE_ABSENT, UNREADABLE_RECORDS, MetadataStore, get_record, put_record
from magnetar.proto.errors import DataLost, Unavailable
from magnetar.runtime.tasks import run_together
from tests.bookie.maintenance.copies import REPAIR, Deployment, payload, with_deployment

pytestmark = pytest.mark.run_by.with_args(with_deployment)


def payloads(ledger: int, count: int) -> list[bytes]:
    return [payload(ledger, entry) for entry in range(count)]


async def one_is_killed(deployment: Deployment, entries: int = 40, **shape: int) -> tuple[int, str]:
    """A closed ledger, and the bookie of its first slot, which is dead for good."""
    writer = await deployment.a_ledger(entries, **shape)
    gone = writer.record.fragments[0].bookies[0]
    await deployment.kill(deployment.node_of(gone))
    return writer.ledger_id, gone


# ------------------------------------------------------------------------------------------ a bookie dies
@pytest.mark.parametrize(("shape", "bookies"), [((3, 3, 2), 4), ((3, 2, 2), 4), ((4, 2, 2), 6), ((2, 2, 1), 3)])
def test_a_dead_bookies_copies_are_made_again_on_another_one(shape: tuple[int, int, int], bookies: int) -> None:
    ensemble, write, ack = shape

    async def main(deployment: Deployment) -> None:
        ledger, gone = await one_is_killed(deployment, ensemble_size=ensemble, write_quorum=write, ack_quorum=ack)
        record = await deployment.until_whole(ledger, gone)
        assert record.last_entry == 39
        await deployment.check_whole(ledger, write)
        assert await deployment.read_all(ledger) == payloads(ledger, 40)

    with_deployment(main, bookies)


@pytest.mark.run_by(with_deployment, 0)
async def test_a_copy_goes_to_the_rack_that_the_ensemble_lacks_and_never_to_who_may_take_none(
    deployment: Deployment, /
) -> None:
    for name, rack in (("b1", "/a"), ("b2", "/b"), ("b3", "/c")):
        await deployment.start(name, rack=rack)
    writers = [await deployment.a_ledger(4) for _ in range(6)]
    for name, rack in (("same1", "/a"), ("same2", "/b"), ("same3", "/a"), ("leaving", "/c"), ("spare", "/c")):
        await deployment.start(name, rack=rack)
    leaving, spare = deployment.bookies["leaving"].id, deployment.bookies["spare"].id
    record = DepartingRecord(bookie=leaving)
    await deployment.metadata.put(
        paths.departing_bookie(leaving), encode_record(record, paths.departing_bookie(leaving))
    )
    gone = await deployment.kill("b3")
    for writer in writers:
        bookies = (await deployment.until_whole(writer.ledger_id, gone)).fragments[0].bookies
        assert spare in bookies, "one of each rack"
        assert leaving not in bookies


@pytest.mark.run_by(with_deployment, 3)
async def test_two_dead_bookies_of_one_fragment_get_two_others_in_one_turn(deployment: Deployment, /) -> None:
    writers = [await deployment.a_ledger(4) for _ in range(8)]
    await marks.set_repair_enabled(deployment.metadata, False)
    for name in ("b4", "b5"):
        await deployment.start(name)
    dead = [await deployment.kill(name) for name in ("b1", "b2")]
    await asyncio.sleep(30.0)
    await marks.set_repair_enabled(deployment.metadata, True)
    for writer in writers:
        for gone in dead:
            await deployment.until_whole(writer.ledger_id, gone)
        await deployment.check_whole(writer.ledger_id)
    workers = [deployment.bookies[name].statistics() for name in ("b3", "b4", "b5")]
    assert sum(each["repair_failures"] for each in workers) == 0, "no two copies were sent to the same bookie"


def test_m20_a_fenced_ledgers_copies_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(deployment: Deployment) -> None:
        writer = await deployment.a_ledger(10, closed=False)
        client = deployment.client()
        await client.recover(writer.ledger_id)
        await client.close()
        bookies = writer.record.fragments[0].bookies
        await deployment.kill(deployment.node_of(bookies[0]))
        spare = next(each for each in deployment.bookies.values() if each.id not in bookies)
        spare.store.keys.record_key_of_metadata(writer.ledger_id, writer.record.key)
        assert spare.store.fence(writer.ledger_id, writer.record.key).name == "OK", "fenced there, for whatever reason"
        await spare.store.seal_group_and_wait()
        await deployment.until_whole(writer.ledger_id, bookies[0])
        await deployment.check_whole(writer.ledger_id)

    with_deployment(main)

    def without_recovery(
        ledger: int, entry: int, count: int, key: bytes, flags: BookieRequestFlags = BookieRequestFlags.NONE
    ) -> bytes:
        return encode_add_many_request(ledger, entry, count, key)

    monkeypatch.setattr(copier, "encode_add_many_request", without_recovery)
    with pytest.raises(TimeoutError):
        with_deployment(main)


@pytest.mark.parametrize(("shape", "bookies"), [((1, 1, 1), 2), ((3, 3, 2), 4)])
def test_a_bookie_whose_disk_hangs_is_not_named_before_its_copy_is_synced(
    shape: tuple[int, int, int], bookies: int
) -> None:
    """The first try times out with the copy in the target's memory, the second asks what it holds; then the power
    goes."""
    ensemble, write, ack = shape

    async def main(deployment: Deployment) -> None:
        writer = await deployment.a_ledger(20, ensemble_size=ensemble, write_quorum=write, ack_quorum=ack)
        ledger, named = writer.ledger_id, writer.record.fragments[0].bookies
        leaving = named[0]
        target = next(name for name, each in deployment.bookies.items() if each.id not in named)
        delays = deployment.simulation.node(target).disk_delays
        delays.stall_rate, delays.stall_s = 1.0, 100_000.0
        await put_record(deployment.metadata, paths.departing_bookie(leaving), DepartingRecord(bookie=leaving))
        await deployment.until_marked(ledger)
        await asyncio.sleep(60.0)
        assert (await deployment.record(ledger)).fragments[0].bookies == named, "nothing is synced at the target"
        assert await deployment.mark(ledger) is not None
        await deployment.kill(target)
        delays.stall_rate = 0.0
        await deployment.start(target)
        await deployment.until_whole(ledger, leaving)
        await deployment.kill(deployment.node_of(leaving))
        await deployment.check_whole(ledger, write)
        assert await deployment.read_all(ledger) == payloads(ledger, 20)

    with_deployment(main, bookies)


async def test_a_ledger_without_entries_changes_its_bookie_too(deployment: Deployment, /) -> None:
    ledger, gone = await one_is_killed(deployment, entries=0)
    await deployment.until_whole(ledger, gone)


@pytest.mark.run_by(with_deployment, 5)
async def test_two_dead_bookies_of_three_cost_nothing_while_one_copy_lives(deployment: Deployment, /) -> None:
    writer = await deployment.a_ledger(30)
    gone = writer.record.fragments[0].bookies[:2]
    for bookie in gone:
        await deployment.kill(deployment.node_of(bookie))
    await deployment.until_whole(writer.ledger_id, gone[0])
    await deployment.until_whole(writer.ledger_id, gone[1])
    await deployment.check_whole(writer.ledger_id)


async def test_nobody_is_replaced_who_was_away_for_less_than_the_grace(deployment: Deployment, /) -> None:
    writer = await deployment.a_ledger()
    name = deployment.node_of(writer.record.fragments[0].bookies[0])
    await deployment.kill(name)
    await asyncio.sleep(8.0)  # the session's 5 seconds, and a part of the grace
    await deployment.start(name)
    await asyncio.sleep(60.0)
    assert await deployment.record(writer.ledger_id) == replace_state(writer.record, 19)
    assert await deployment.mark(writer.ledger_id) is None


def replace_state(record: LedgerRecord, last_entry: int, size: int = 300) -> LedgerRecord:
    return msgspec.structs.replace(record, state=CLOSED, last_entry=last_entry, length=(last_entry + 1) * size)


# ------------------------------------------------------------------------------------------ E = number of bookies
@pytest.mark.run_by(with_deployment, 3)
async def test_three_of_three_the_bookie_that_comes_back_empty_under_a_new_name_is_filled_again(
    deployment: Deployment, /
) -> None:
    ledger, gone = await one_is_killed(deployment)
    await deployment.until_marked(ledger)
    await asyncio.sleep(60.0)
    mark = await deployment.mark(ledger)
    assert mark is not None
    assert mark.stuck == StuckReason.NO_TARGET.value
    assert mark.attempts <= 12, "nobody tries it hot"
    assert gone in (await deployment.record(ledger)).fragments[0].bookies
    name = deployment.node_of(gone)
    new = await deployment.start(name, home="fresh")
    assert new.id != gone
    began = deployment.simulation.virtual_seconds
    record = await deployment.until_whole(ledger, gone)
    assert deployment.simulation.virtual_seconds - began < 5.0, "a bookie that comes brings the next try forward"
    assert new.id in record.fragments[0].bookies
    await deployment.check_whole(ledger)


@pytest.mark.run_by(with_deployment, 3)
async def test_three_of_three_the_bookie_that_comes_back_with_its_data_is_compared_and_unmarked(
    deployment: Deployment, /
) -> None:
    ledger, gone = await one_is_killed(deployment)
    await deployment.until_marked(ledger)
    before = await deployment.record(ledger)
    await deployment.start(deployment.node_of(gone))
    assert await deployment.until_whole(ledger) == before
    await deployment.check_whole(ledger)


# ------------------------------------------------------------------------------------------ never for ever
@pytest.mark.run_by(with_deployment, 3)
async def test_a_deleted_ledger_is_unmarked(deployment: Deployment, /) -> None:
    ledger, _ = await one_is_killed(deployment)
    await deployment.until_marked(ledger)
    await deletions.delete_ledgers(deployment.metadata, [ledger])

    async def unmarked() -> bool:
        return await deployment.mark(ledger) is None

    await deployment.until(unmarked)


async def test_the_only_copy_is_reported_as_lost_tried_seldom_and_never_replaced(deployment: Deployment, /) -> None:
    ledger, gone = await one_is_killed(deployment, ensemble_size=1, write_quorum=1, ack_quorum=1)
    await deployment.until_marked(ledger)
    await asyncio.sleep(100.0)
    mark = await deployment.mark(ledger)
    assert mark is not None
    assert mark.stuck == StuckReason.LOST.value
    assert 2 <= mark.attempts <= 20
    assert (await deployment.record(ledger)).fragments[0].bookies == (gone,)
    with pytest.raises((DataLost, Unavailable)):
        await deployment.read_all(ledger)
    await deployment.start(deployment.node_of(gone))
    await deployment.until_whole(ledger)
    assert await deployment.read_all(ledger) == payloads(ledger, 40)


@pytest.mark.run_by(with_deployment, 5, repair=replace(REPAIR, check_pass_s=0.0))
async def test_an_entry_that_nobody_gives_leaves_the_record_as_it_is_and_the_rest_is_copied(
    deployment: Deployment, /
) -> None:
    writer = await deployment.a_ledger(12, ensemble_size=3, write_quorum=2, ack_quorum=2)
    ledger = writer.ledger_id
    first, second, _ = writer.record.fragments[0].bookies
    holder = deployment.bookies[deployment.node_of(second)]
    holder.store.descriptors.quarantine(ledger, 0, 0)
    holder.store.memtable.active.ledgers[ledger].pop(0)
    await deployment.kill(deployment.node_of(first))
    await deployment.until_marked(ledger)
    await asyncio.sleep(60.0)
    mark = await deployment.mark(ledger)
    assert mark is not None
    assert mark.stuck == StuckReason.LOST.value
    assert "entry 0" in mark.last_error
    assert first in (await deployment.record(ledger)).fragments[0].bookies


@pytest.mark.run_by(with_deployment, 3)
async def test_a_bookie_that_came_back_and_is_silent_is_waited_for(deployment: Deployment, /) -> None:
    ledger, gone = await one_is_killed(deployment)
    await deployment.until_marked(ledger)
    name = deployment.node_of(gone)
    for node in deployment.bookies:
        if node != name:
            deployment.simulation.wires.partition_nodes(node, name)
    deployment.repair = replace(REPAIR, enabled=False)
    await deployment.start(name)
    await asyncio.sleep(60.0)
    mark = await deployment.mark(ledger)
    assert mark is not None
    assert (mark.bookies, mark.stuck) == ({gone: "returned"}, StuckReason.UNREACHABLE.value)
    deployment.simulation.wires.heal_partition()
    await deployment.until_whole(ledger)


@pytest.mark.run_by(with_deployment, 3)
async def test_a_worker_whose_clock_was_a_day_ahead_stops_no_repair(deployment: Deployment, /) -> None:
    writer = await deployment.a_ledger(10)
    await asyncio.sleep(10.0)  # no bookie is new any more: one that comes brings each try forward
    in_a_day = deployment.simulation.world("client").clock.wall_ms() + 86_400_000
    late = UnderReplicatedRecord(
        ledger_id=writer.ledger_id, bookies={writer.record.fragments[0].bookies[0]: "incomplete"}, attempts=9,
        stuck=StuckReason.FAILED.value, retry_ms=in_a_day,
    )  # fmt: skip
    await marks.change_repair_mark(deployment.metadata, writer.ledger_id, lambda mark: late)
    await deployment.until_whole(writer.ledger_id)


# ------------------------------------------------------------------------------------------ open ledgers
async def test_an_open_ledger_that_misses_a_bookie_is_recovered_after_the_grace_and_then_filled(
    deployment: Deployment, /
) -> None:
    writer = await deployment.a_ledger(10, closed=False)
    ledger, gone = writer.ledger_id, writer.record.fragments[0].bookies[0]
    await deployment.kill(deployment.node_of(gone))
    await deployment.until_marked(ledger)
    marked_at = deployment.simulation.virtual_seconds
    while (record := await deployment.record(ledger)).state == OPEN:
        assert record == writer.record, "nobody touches the last fragment of an open ledger"
        await asyncio.sleep(0.2)
    assert deployment.simulation.virtual_seconds - marked_at >= 8.0
    record = await deployment.until_whole(ledger, gone)
    assert (record.state, record.last_entry) == (CLOSED, 9)
    await deployment.check_whole(ledger)


async def test_a_writer_that_changes_its_ensemble_itself_is_not_fenced(deployment: Deployment, /) -> None:
    writer = await deployment.a_ledger(10, closed=False)
    ledger, old = writer.ledger_id, writer.record.fragments[0].bookies
    await deployment.kill(deployment.node_of(old[0]))
    await deployment.until_marked(ledger)
    await asyncio.sleep(5.0)
    spare = next(each.id for each in deployment.bookies.values() if each.id not in old)
    changed = msgspec.structs.replace(
        writer.record, fragments=(*writer.record.fragments, Fragment(10, (spare, *old[1:])))
    )
    await deployment.metadata.put(paths.ledger(ledger), encode_record(changed, paths.ledger(ledger)))
    record = await deployment.until_whole(ledger, old[0])
    await asyncio.sleep(30.0)
    assert (await deployment.record(ledger)).state == OPEN
    assert record.fragments == (Fragment(0, (spare, *old[1:])), changed.fragments[1])
    await deployment.check_whole(ledger)


def test_m21_the_last_fragment_of_an_open_ledger_is_not_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: what the writer adds after the copy is on one bookie less than it believes."""

    async def main(deployment: Deployment) -> None:
        writer = await deployment.a_ledger(10, closed=False)
        gone = writer.record.fragments[0].bookies[0]
        await deployment.kill(deployment.node_of(gone))
        await asyncio.sleep(40.0)
        assert (await deployment.record(writer.ledger_id)).fragments == writer.record.fragments

    patient = replace(REPAIR, open_ledger_grace_s=1000.0)
    with_deployment(main, repair=patient)

    def all_of_them(record: LedgerRecord) -> list[copies.FinalFragment]:
        return [copies.FinalFragment(each.first_entry, 9, each.bookies) for each in record.fragments]

    def unguarded(
        current: LedgerRecord | None, first_entry: int, old: str, new: str
    ) -> transitions.RecordToStore | transitions.RecordAlreadyStored:
        assert current is not None
        assert first_entry == 0
        bookies = tuple(new if each == old else each for each in current.fragments[0].bookies)
        changed = msgspec.structs.replace(current, fragments=(Fragment(0, bookies),))
        return transitions.RecordAlreadyStored(current) if changed == current else transitions.RecordToStore(changed)

    original = LedgerClient.make_reader
    monkeypatch.setattr(copies, "list_final_fragments", all_of_them)
    with_deployment(main, repair=patient)  # a reader does not go beyond what is settled, and the transition refuses
    monkeypatch.setattr(LedgerClient, "make_reader", lambda self, record: original(self, replace_state(record, 9)))
    with_deployment(main, repair=patient)  # the transition refuses
    monkeypatch.setattr(worker, "decide_bookie_replacement", unguarded)
    with pytest.raises(AssertionError):
        with_deployment(main, repair=patient)


async def test_a_recovery_that_its_starter_left_is_finished(deployment: Deployment, /) -> None:
    writer = await deployment.a_ledger(10, closed=False)
    outcome = transitions.decide_recovery_start(writer.record)
    assert isinstance(outcome, transitions.RecordToStore)
    await put_record(deployment.metadata, paths.ledger(writer.ledger_id), outcome.record)

    async def closed() -> bool:
        return (await deployment.record(writer.ledger_id)).state == CLOSED

    await deployment.until(closed)
    assert (await deployment.until_whole(writer.ledger_id)).last_entry == 9


async def test_recoveries_that_go_well_are_not_marked_and_one_that_was_left_is(deployment: Deployment, /) -> None:
    """A broker that takes hundreds of topics over ends their ledgers itself: a mark for each would only delay it."""
    writers = [await deployment.a_ledger(3, closed=False) for _ in range(20)]
    for writer in writers:
        outcome = transitions.decide_recovery_start(writer.record)
        assert isinstance(outcome, transitions.RecordToStore)
        await put_record(deployment.metadata, paths.ledger(writer.ledger_id), outcome.record)
    for _ in range(4):
        await asyncio.sleep(2.0)  # looks of the auditor, within the grace
        for writer in writers:
            assert await deployment.mark(writer.ledger_id) is None
    client = deployment.client()
    for writer in writers[:-1]:
        await client.recover(writer.ledger_id)
    await deployment.until_marked(writers[-1].ledger_id)
    for writer in writers[:-1]:
        assert await deployment.mark(writer.ledger_id) is None


async def the_last_entry_is_gone_everywhere(deployment: Deployment, entries: int, gone: int, *, damaged: bool) -> int:
    """A ledger that was left in recovery."""
    writer = await deployment.a_ledger(entries, closed=False)
    ledger = writer.ledger_id
    for bookie in deployment.bookies.values():
        entries_of = bookie.store.memtable.active.ledgers.get(ledger, {})
        if gone in entries_of:
            entries_of.pop(gone)
            if damaged:
                bookie.store.descriptors.quarantine(ledger, gone, gone)
    outcome = transitions.decide_recovery_start(writer.record)
    assert isinstance(outcome, transitions.RecordToStore)
    await deployment.metadata.put(paths.ledger(ledger), encode_record(outcome.record, paths.ledger(ledger)))
    return ledger


@pytest.mark.run_by(with_deployment, repair=replace(REPAIR, check_pass_s=20.0))
async def test_a_ledger_whose_last_confirmed_entry_nobody_has_is_closed_with_it_and_shown_as_lost(
    deployment: Deployment, /
) -> None:
    ledger = await the_last_entry_is_gone_everywhere(deployment, 10, 8, damaged=False)
    for bookie in deployment.bookies.values():
        if bookie.store.memtable.active.ledgers.get(ledger, {}).pop(9, None) is not None:
            bookie.store.descriptors.get(ledger).lac = 8

    async def shown() -> bool:
        mark = await deployment.mark(ledger)
        return mark is not None and mark.stuck == StuckReason.LOST.value

    await deployment.until(shown)
    record = await deployment.record(ledger)
    assert (record.state, record.last_entry, record.length) == (CLOSED, 8, 8 * 300)
    with pytest.raises((DataLost, Unavailable)):
        await deployment.read_all(ledger)


async def test_a_ledger_whose_end_nobody_can_tell_stays_in_recovery_and_is_shown_as_undecided(
    deployment: Deployment, /
) -> None:
    """Entry 9 may have been confirmed, and each bookie that had it says that it is damaged."""
    ledger = await the_last_entry_is_gone_everywhere(deployment, 10, 9, damaged=True)

    async def shown() -> bool:
        mark = await deployment.mark(ledger)
        return mark is not None and mark.stuck == StuckReason.UNDECIDED.value and "entry 9" in mark.last_error

    await deployment.until(shown)
    assert (await deployment.record(ledger)).state == IN_RECOVERY


# ------------------------------------------------------------------------------------------ holes and damage
async def test_a_closed_ledger_is_checked_soon_and_who_lacks_entries_gets_them(deployment: Deployment, /) -> None:
    """§1.3: with Qa of Qw the bookie that missed an entry stays behind; only a comparison finds it."""
    writer = await deployment.a_ledger(10, closed=False)
    ledger = writer.ledger_id
    behind = deployment.bookies[deployment.node_of(writer.record.fragments[0].bookies[2])]
    for entry in (3, 4, 9):
        del behind.store.memtable.active.ledgers[ledger][entry]
    await writer.close()

    async def filled() -> bool:
        return all(len(names) == 3 for names in (await deployment.copies(ledger)).values())

    await deployment.until(filled)
    await deployment.until_whole(ledger)
    assert (await deployment.record(ledger)).fragments == writer.record.fragments, "the same record"


@pytest.mark.run_by(with_deployment, repair=replace(REPAIR, check_pass_s=0.0))
async def test_damaged_entries_are_mended_at_the_bookie_that_has_them(deployment: Deployment, /) -> None:
    writer = await deployment.a_ledger(10)
    ledger, owner = writer.ledger_id, writer.record.fragments[0].bookies[1]
    store = deployment.bookies[deployment.node_of(owner)].store
    await store.checkpoint()
    store.descriptors.quarantine(ledger, 2, 5)
    path = paths.damaged_copies_of_bookie(ledger, owner)

    async def reported(wanted: bool) -> bool:
        return (await get_record(deployment.metadata, path, DamagedEntriesRecord) is not None) is wanted

    async def mended() -> bool:
        return [first for first, _ in await store.find_stored_entries(ledger, 0,
            9)] == [0] and await deployment.mark(ledger) is None

    await deployment.until(lambda: reported(True))
    await deployment.until(mended)
    await store.checkpoint()
    await deployment.until(lambda: reported(False))
    assert store.descriptors.quarantined() == []


@pytest.mark.parametrize("deleted", [False, True])
async def test_the_report_of_a_lost_bookie_goes_when_nothing_is_to_be_there_any_more(
    deployment: Deployment, /, deleted: bool
) -> None:
    """Nobody else takes it back, and a report that stands for ever is a false alarm."""
    writer = await deployment.a_ledger(10)
    ledger, owner = writer.ledger_id, writer.record.fragments[0].bookies[1]
    path = paths.damaged_copies_of_bookie(ledger, owner)
    await put_record(
        deployment.metadata, path, DamagedEntriesRecord(ledger_id=ledger, bookie=owner, ranges=((2, 5),)), NODE_ABSENT
    )
    await deployment.kill(deployment.node_of(owner))
    if deleted:
        await deletions.delete_ledgers(deployment.metadata, [ledger])
        await deployment.metadata.delete(paths.cookie(owner))  # forgotten, too

    async def dropped() -> bool:
        there = await get_record(deployment.metadata, path, DamagedEntriesRecord) is not None
        record = await get_record(deployment.metadata, paths.ledger(ledger), LedgerRecord)
        needed = record is not None and any(owner in each.bookies for each in record[0].fragments)
        assert there or not needed, "it goes last"
        return not there

    await deployment.until(dropped)


# ------------------------------------------------------------------------------------------ workers
def test_two_workers_at_the_same_ledger_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    original = marks.claim_ephemeral_node

    async def everybody(store: MetadataStore, path: str, record: AuditorRecord | RepairLockRecord) -> bool:
        return isinstance(record, RepairLockRecord) or await original(store, path, record)

    monkeypatch.setattr(marks, "claim_ephemeral_node", everybody)

    async def main(deployment: Deployment) -> None:
        ledger, gone = await one_is_killed(deployment)
        record = await deployment.until_whole(ledger, gone)
        assert len(set(record.fragments[0].bookies)) == 3
        await deployment.check_whole(ledger)

    for seed in range(3):
        with_deployment(main, 6, seed=seed)


@pytest.mark.parametrize("step", ["_held_at", "_replace"])
@pytest.mark.run_by(with_deployment, 5)
async def test_a_worker_that_dies_between_copy_and_record_is_followed_by_another(
    deployment: Deployment, /, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[str] = []
    original = getattr(worker.RepairWorker, step)
    async def die(self: worker.RepairWorker, *arguments: object) -> object:
        if not died and self.progress:
            died.append(self._name)
            deployment.simulation.crash(deployment.node_of(self._name), power_loss=True)
            await asyncio.sleep(1e6)
        return await original(self, *arguments)

    monkeypatch.setattr(worker.RepairWorker, step, die)
    ledger, gone = await one_is_killed(deployment)
    await deployment.until_marked(ledger)
    await deployment.until(lambda: asyncio.sleep(0.1, bool(died)))
    assert gone in (await deployment.record(ledger)).fragments[0].bookies, "its copy was not whole"
    await deployment.start(deployment.node_of(died[0]))
    await deployment.until_whole(ledger, gone)
    await deployment.check_whole(ledger)
    assert await deployment.metadata.children(paths.REPAIR_LOCKS) == []


async def test_a_lock_that_somebody_else_holds_is_respected_and_waited_for(deployment: Deployment, /) -> None:
    other = RepairLockRecord(worker="somebody", token="else")
    assert await marks.claim_ephemeral_node(deployment.metadata, paths.repair_lock(1), other)
    ledger, gone = await one_is_killed(deployment)
    assert ledger == 1
    await deployment.until_marked(ledger)
    await asyncio.sleep(30.0)
    assert gone in (await deployment.record(ledger)).fragments[0].bookies
    await marks.delete_own_node(deployment.metadata, paths.repair_lock(1), other)
    await deployment.until_whole(ledger, gone)


def test_what_a_failed_repair_could_not_give_up_is_its_successors_in_the_same_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The metadata is out of reach while it fails: its lock stays, and the session that keeps the lock goes on."""
    holder: list[worker.RepairWorker] = []
    kept: list[str] = []
    met = asyncio.Event()
    run, repair, drop = worker.RepairWorker.run, worker.RepairWorker._repair, marks.delete_own_node

    async def held(self: worker.RepairWorker, *arguments: Any) -> None:
        if not holder:
            holder.append(self)
            met.set()
            await asyncio.sleep(1e6)
        await repair(self, *arguments)

    async def fails(self: worker.RepairWorker) -> None:
        async def meets() -> None:
            await met.wait()
            if holder == [self]:
                raise RuntimeError("an exception of ours")

        await run_together([run(self), meets()], "worker")

    async def lost(store: MetadataStore, path: str, record: AuditorRecord | RepairLockRecord) -> None:
        if holder and record.token == holder[0]._lock.token and path not in kept:
            kept.append(path)
        else:
            await drop(store, path, record)

    monkeypatch.setattr(worker.RepairWorker, "_repair", held)
    monkeypatch.setattr(worker.RepairWorker, "run", fails)
    monkeypatch.setattr(marks, "delete_own_node", lost)

    async def main(deployment: Deployment) -> None:
        ledger, gone = await one_is_killed(deployment)
        await deployment.until_whole(ledger, gone)
        assert paths.repair_lock(ledger) in kept
        assert holder[0]._metadata is deployment.bookies[deployment.node_of(holder[0]._name)]._registration.metadata

    with_deployment(main)


async def test_gc_takes_nothing_of_a_copy_that_no_record_names_yet(
    deployment: Deployment, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    """#4668: the target is in no fragment until the copy is done; only what the metadata has forgotten is deleted."""
    original = worker.RepairWorker._replace
    collected: list[int] = []
    async def collect_first(
        self: worker.RepairWorker, record: LedgerRecord, gap: copies.CopyGap, target: str
    ) -> None:
        collector = deployment.bookies[deployment.node_of(target)].garbage_collector
        for _ in range(2):
            collected.extend((await collector.run_pass(force=True, major=True, roll=True)).ledgers_deleted)
            await asyncio.sleep(1.0)
        await original(self, record, gap, target)

    monkeypatch.setattr(worker.RepairWorker, "_replace", collect_first)
    ledger, gone = await one_is_killed(deployment)
    await deployment.until_whole(ledger, gone)
    assert collected == []
    await deployment.check_whole(ledger)


# ------------------------------------------------------------------------------------------ what an operator says
async def test_a_departing_bookie_is_emptied_while_it_serves_takes_nothing_new_and_is_forgotten_when_it_stops(
    deployment: Deployment, /
) -> None:
    writers = [await deployment.a_ledger(10) for _ in range(4)]
    leaving = writers[0].record.fragments[0].bookies[0]
    record = DepartingRecord(bookie=leaving, forget=True)
    await deployment.metadata.put(
        paths.departing_bookie(leaving), encode_record(record, paths.departing_bookie(leaving))
    )
    for writer in writers:
        await deployment.until_whole(writer.ledger_id, leaving)
        await deployment.check_whole(writer.ledger_id)
    later = [await deployment.a_ledger(3) for _ in range(4)]
    assert all(leaving not in writer.record.fragments[0].bookies for writer in later)
    await asyncio.sleep(30.0)
    assert await deployment.metadata.get(paths.cookie(leaving)) is not None, "it still runs"
    await deployment.kill(deployment.node_of(leaving))

    async def forgotten() -> bool:
        return await deployment.metadata.get(paths.cookie(leaving)) is None

    await deployment.until(forgotten)
    assert await deployment.metadata.get(paths.departing_bookie(leaving)) is None


async def test_switched_off_nothing_is_marked_or_copied_until_it_is_switched_on(deployment: Deployment, /) -> None:
    await marks.set_repair_enabled(deployment.metadata, False)
    await asyncio.sleep(5.0)
    ledger, gone = await one_is_killed(deployment)
    await asyncio.sleep(60.0)
    assert await deployment.mark(ledger) is None
    assert gone in (await deployment.record(ledger)).fragments[0].bookies
    await marks.set_repair_enabled(deployment.metadata, True)
    await deployment.until_whole(ledger, gone)


@pytest.mark.run_by(with_deployment, 5)
async def test_the_auditor_that_dies_is_followed_by_another_who_gives_everybody_the_whole_grace(
    deployment: Deployment, /
) -> None:
    await asyncio.sleep(3.0)
    auditor = next(name for name, each in deployment.bookies.items() if each.statistics()["repair_auditor"])
    writer = await deployment.a_ledger(10)
    await deployment.kill(auditor)
    died = deployment.simulation.virtual_seconds
    dead = deployment.bookies[auditor].id
    named = dead in writer.record.fragments[0].bookies
    await deployment.until_whole(writer.ledger_id, dead)
    assert not named or deployment.simulation.virtual_seconds - died >= 10.0

    async def one_auditor() -> bool:
        alive = [each for name, each in deployment.bookies.items() if deployment.simulation.is_node_running(name)]
        return sum(each.statistics()["repair_auditor"] for each in alive) == 1

    await deployment.until(one_auditor)




# ------------------------------------------------------------------------------------------ records of a newer version
def newer(record: MetadataRecord, path: str) -> bytes:
    """As a version of Magnetar that is yet to come writes it."""
    value = encode_record(record, path)
    return value[:2] + bytes([value[2] + 1]) + value[3:]


NOBODY = "11111111-1111-4111-8111-111111111111"
NEWER = {
    paths.damaged_copies_of_bookie(77, NOBODY): DamagedEntriesRecord(ledger_id=77, bookie=NOBODY, ranges=((0, 1),)),
    paths.departing_bookie(NOBODY): DepartingRecord(bookie=NOBODY),
    paths.under_replicated(78): UnderReplicatedRecord(ledger_id=78, bookies={NOBODY: "lost"}),
    paths.ledger(79): CounterRecord(next=1),
    paths.bookie(NOBODY): BookieRecord(bookie=NOBODY, endpoint="nowhere:1"),
    paths.cookie(NOBODY): CookieRecord(bookie=NOBODY, instance="", directories=("nowhere",)),
    paths.REPAIR_SETTINGS: RepairSettingsRecord(enabled=False),
    paths.repair_worker("newer"): RepairWorkerRecord(name="newer"),
    f"{paths.LEDGERS}/named-otherwise": CounterRecord(next=1),
}


@pytest.mark.parametrize("path", NEWER)
async def test_a_record_of_a_newer_version_stops_the_repair_of_no_other_ledger(
    deployment: Deployment, /, path: str
) -> None:
    UNREADABLE_RECORDS.remove(path)
    before = UNREADABLE_RECORDS.skipped
    await deployment.metadata.put(path, newer(NEWER[path], path))
    ledger, gone = await one_is_killed(deployment)
    await deployment.until_whole(ledger, gone)
    await deployment.check_whole(ledger)
    living = [each for name, each in deployment.bookies.items() if deployment.simulation.is_node_running(name)]
    assert all(each.statistics()["background_failing"] == 0 for each in living)
    assert await deployment.metadata.get(path) is not None, "nobody takes away what it cannot read"
    await deployment.start("late")
    if path != paths.repair_worker("newer"):  # for the command line alone
        assert UNREADABLE_RECORDS.skipped > before


@pytest.mark.run_by(with_deployment, 3)
async def test_an_auditor_node_of_a_newer_version_is_somebody_elses_and_workers_go_on(
    deployment: Deployment, /
) -> None:
    for name in list(deployment.bookies):
        await deployment.kill(name)
    await asyncio.sleep(10.0)
    auditor = newer(AuditorRecord(name="newer", token="t"), paths.REPAIR_AUDITOR)
    await deployment.metadata.put(paths.REPAIR_AUDITOR, auditor)
    for name in list(deployment.bookies):
        await deployment.start(name)
    writer = await deployment.a_ledger()
    lost = {writer.record.fragments[0].bookies[0]: "lost"}
    mark = UnderReplicatedRecord(ledger_id=writer.ledger_id, bookies=lost)
    await put_record(deployment.metadata, paths.under_replicated(writer.ledger_id), mark)
    await deployment.until_whole(writer.ledger_id)
    assert all(each.statistics()["background_failing"] == 0 for each in deployment.bookies.values())
