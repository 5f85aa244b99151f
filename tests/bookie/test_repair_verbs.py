"""What an operator asks of ledgers and their copies is told as the metadata says, and no key is ever shown."""

from typing import Any
from uuid import UUID

import pytest

from magnetar.bookie.admin import WORKER_RATE_FRESH_MS, RepairWorkerAges
from magnetar.metadata.records import RepairWorkerRecord
from magnetar.proto import errors
from tests.bookie.entries import PeerCaller
from tests.bookie.maintenance.copies import Deployment, with_deployment
from tests.bookie.test_admin import ask


async def say(deployment: Deployment, verb: str, **options: object) -> dict[str, Any]:
    name, bookie = next(
        (name, each) for name, each in deployment.bookies.items() if deployment.simulation.is_node_running(name)
    )
    network = deployment.simulation.world(name).network
    return await ask(PeerCaller(network.connect_peer(bookie.endpoint, UUID(bookie.id).bytes)), verb, **options)


@pytest.mark.run_by.with_args(with_deployment)
async def test_ledgers_are_listed_in_parts_by_state_and_by_bookie(deployment: Deployment, /) -> None:
    closed = [await deployment.a_ledger(5) for _ in range(3)]
    opened = await deployment.a_ledger(1, closed=False)
    ids = [writer.ledger_id for writer in closed]
    first = await say(deployment, "ledgers", limit=2)
    assert ([each["ledger"] for each in first["ledgers"]], first["more"]) == (ids[:2], True)
    rest = await say(deployment, "ledgers", limit=9, after=ids[1])
    assert [each["ledger"] for each in rest["ledgers"]] == [ids[2], opened.ledger_id]
    assert not rest["more"]
    (one,) = (await say(deployment, "ledgers", state="open"))["ledgers"]
    assert (one["ledger"], one["entries"], one["quorum"]) == (opened.ledger_id, None, "3/3/2")
    bookie = closed[0].record.fragments[0].bookies[0]
    named = [writer.ledger_id for writer in [*closed, opened] if bookie in writer.record.fragments[0].bookies]
    assert [each["ledger"] for each in (await say(deployment, "ledgers", bookie=bookie))["ledgers"]] == named
    shown = await say(deployment, "ledger", ledger=ids[0])
    assert (shown["entries"], shown["bytes"], shown["underReplicated"]) == (5, 1500, None)
    assert closed[0].record.key.hex() not in str(shown)
    assert (await say(deployment, "ledger", ledger=99))["error"] == errors.LedgerNotFound.__name__
    assert (await say(deployment, "ledgers", limit="many"))["error"] == errors.InvalidRequest.__name__


@pytest.mark.run_by(with_deployment, 3)
async def test_a_dead_bookie_its_marks_and_the_work_are_shown_and_it_is_recovered_at_once_when_somebody_says_so(
    deployment: Deployment, /
) -> None:
    writer = await deployment.a_ledger(20)
    dead = writer.record.fragments[0].bookies[0]
    assert (await say(deployment, "depart", bookie=dead, dead=True))["error"] == errors.Busy.__name__
    await deployment.kill(deployment.node_of(dead))

    async def unregistered() -> bool:
        rows = {each["id"]: each for each in (await say(deployment, "bookies"))["bookies"]}
        return (rows[dead]["state"], rows[dead]["ledgers"]) == ("absent", 1)

    await deployment.until(unregistered)
    began = deployment.simulation.virtual_seconds
    assert (await say(deployment, "depart", bookie=dead, dead=True, forget=True))["departing"]
    await deployment.until_marked(writer.ledger_id)
    assert deployment.simulation.virtual_seconds - began < 5.0, "no grace is waited for"
    found = await say(deployment, "under-replicated")
    (mark,) = found["ledgers"]
    assert (mark["missing"], mark["reason"], found["count"]) == ({dead: "departing"}, "departing", 1)
    status = await say(deployment, "repair-status")
    assert (status["enabled"], status["underReplicated"], status["reasons"]) == (True, 1, {"departing": 1})
    assert status["bytesLeft"] == 20 * 300
    left = await say(deployment, "departure", bookie=dead)
    assert (left["ledgers"], left["marked"], left["registered"]) == (1, 1, False)
    await deployment.start("b4")
    await deployment.until_whole(writer.ledger_id, dead)

    async def forgotten() -> bool:
        return all(each["id"] != dead for each in (await say(deployment, "bookies"))["bookies"])

    await deployment.until(forgotten)
    assert (await say(deployment, "departure", bookie=dead))["ledgers"] == 0
    status = await say(deployment, "repair-status")
    assert sum(each["entries"] for each in status["workers"]) >= 20


@pytest.mark.run_by(with_deployment, 3)
async def test_who_departs_may_be_told_to_stay(deployment: Deployment, /) -> None:
    bookie = deployment.bookies["b1"].id

    async def state(wanted: str) -> bool:
        rows = {each["id"]: each for each in (await say(deployment, "bookies"))["bookies"]}
        assert rows[bookie]["state"] in ("writable", "read-only", "departing")
        read_only = deployment.bookies["b1"].disk_monitor.is_read_only
        return bool(rows[bookie]["state"] == wanted) and read_only is (wanted != "writable")

    await deployment.a_ledger(1)
    await say(deployment, "depart", bookie=bookie)
    left = await say(deployment, "departure", bookie=bookie)
    assert (left["ledgers"], left["takers"], left["nowhere"]) == (1, 2, 1), "the two others have their copies"
    await deployment.until(lambda: state("departing"))
    assert (await say(deployment, "repair-status"))["departing"] == [bookie]
    await say(deployment, "depart", bookie=bookie, cancel=True)
    await deployment.until(lambda: state("writable"))


@pytest.mark.parametrize("verb", ["repair-enable", "depart"])
@pytest.mark.run_by(with_deployment, 1)
async def test_an_option_of_a_wrong_type_is_refused(deployment: Deployment, /, verb: str) -> None:
    assert (await say(deployment, verb, on="yes", bookie=7))["error"] == errors.InvalidRequest.__name__


class TwoClocks:
    """A time of day that a test sets, and a monotonic time."""

    def __init__(self) -> None:
        self.wall, self.mono = 10_000_000, 50.0

    def wall_ms(self) -> int:
        return self.wall

    def monotonic(self) -> float:
        return self.mono


def test_how_old_the_progress_of_a_worker_is_does_not_follow_a_time_of_day_that_jumps() -> None:
    clock = TwoClocks()
    ages = RepairWorkerAges(clock)

    def look(seconds: float, **workers: tuple[int, int]) -> dict[str, bool]:
        clock.mono += seconds
        records = [RepairWorkerRecord(name=name, updated_ms=at, bytes=done) for name, (at, done) in workers.items()]
        return {name: age_ms < WORKER_RATE_FRESH_MS for name, age_ms in ages.measure_ages(records).items()}

    now = clock.wall
    fresh = look(
        0, ahead=(now + 3_600_000, 1), late=(now - 3_600_000, 1), old=(now - WORKER_RATE_FRESH_MS, 1), new=(now, 1)
    )
    assert fresh == {"ahead": True, "late": False, "old": False, "new": True}, "by the time of day at first, 0 at least"
    assert look(5, late=(now - 3_595_000, 2), ahead=(now + 3_600_000, 1)) == {"late": True, "ahead": True}
    assert look(WORKER_RATE_FRESH_MS / 1000, late=(now - 3_595_000, 2), ahead=(now + 3_600_000, 1)) == {
        "late": False, "ahead": False,
    }, "it stays as it was"  # fmt: skip
    clock.wall -= 3_600_000
    assert look(1, late=(now - 3_595_000, 2)) == {"late": False}, "also when the time of day goes back"
    assert ages._seen.keys() == {"late"}, "no more than there are"
