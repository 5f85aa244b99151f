"""Rebalancing: copies of sealed ledgers move from full bookies to emptier ones, and nothing else changes."""

import asyncio
import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from magnetar.bookie.maintenance import marks
from magnetar.bookie.maintenance import repair_worker as worker
from magnetar.bookie.maintenance.rebalance import make_rebalance_order
from magnetar.bookie.maintenance.rebalance_core import (
    BookieLoad,
    CopyMove,
    RebalanceEnd,
    Rebalancing,
    count_uncollected,
    list_named_bookies,
    move_in_record,
)
from magnetar.ledger.metadata_core import check_ledger_record, get_striping_of_record
from magnetar.ledger.placement_core import BookieGroups, decode_bookie_groups
from magnetar.metadata import paths
from magnetar.metadata.records import CLOSED, OPEN, BookieRecord, Fragment, LedgerRecord, RebalanceRecord
from magnetar.metadata.store import get_record
from magnetar.proto import errors
from tests.bookie.maintenance.copies import REPAIR, Deployment, payload, with_deployment
from tests.bookie.test_repair_verbs import say

GIB = 1 << 30


# ------------------------------------------------------------------------------------------ the plan
def a_load(
    bookie: str, used: int, total: int = 100, *, rack: str = "/a", is_leaving: bool = False, **record: Any
) -> BookieLoad:  # fmt: skip
    return BookieLoad(total, used, rack, BookieRecord(bookie=bookie, endpoint="b:1", **record), is_leaving)


def a_ledger(
    *ensembles: tuple[str, ...], size: int = 30, quorum: int = 0, ledger: int = 1, state: str = CLOSED,
    groups: BookieGroups | None = None,
) -> LedgerRecord:  # fmt: skip
    count = len(ensembles[0])
    return LedgerRecord(
        ledger_id=ledger, state=state, ensemble_size=count, write_quorum=quorum or count, ack_quorum=1, key=bytes(20),
        token="t", fragments=tuple(Fragment(10 * at, each) for at, each in enumerate(ensembles)),
        last_entry=10 * len(ensembles), length=size, properties={} if groups is None else groups.encode(),
    )  # fmt: skip


def planned(record: LedgerRecord, *loads: BookieLoad, share: float = 0.8, group: str = "") -> list[CopyMove]:
    plan = Rebalancing(share, {each.record.bookie: each for each in loads}, group)
    found = plan.plan_ledger(record)
    plan.check()
    return found


def test_a_copy_moves_from_the_fullest_bookie_to_the_emptiest() -> None:
    loads = [a_load("a", 90), a_load("b", 85), a_load("c", 40), a_load("d", 10)]
    assert planned(a_ledger(("b",), ("a",)), *loads) == [CopyMove("a", "d", 15), CopyMove("b", "c", 15)]


@pytest.mark.parametrize(
    ("loads", "record"),
    [
        ([a_load("a", 90), a_load("b", 10)], a_ledger(("a",), state=OPEN)),
        ([a_load("a", 80), a_load("b", 10)], a_ledger(("a",))),
        ([a_load("a", 90), a_load("b", 10)], a_ledger(("a", "b"))),
        ([a_load("a", 90), a_load("b", 10)], a_ledger(("a",), ("b",))),
        ([a_load("a", 90), a_load("b", 60)], a_ledger(("a",))),
        ([a_load("a", 90), a_load("b", 10, read_only=True)], a_ledger(("a",))),
        ([a_load("a", 90), a_load("b", 10, limbo=True)], a_ledger(("a",))),
        ([a_load("a", 90), a_load("b", 10, is_leaving=True)], a_ledger(("a",))),
        ([a_load("a", 90, is_leaving=True), a_load("b", 10)], a_ledger(("a",))),
        ([a_load("a", 90, limbo=True), a_load("b", 10)], a_ledger(("a",))),
        ([a_load("a", 90), a_load("b", 10, unwritable=(0,))], a_ledger(("a",))),
        ([a_load("a", 90), a_load("b", 10)], a_ledger(("a",), size=0)),
        ([a_load("a", 90, rack="/a"), a_load("b", 10, rack="/b"), a_load("c", 70, rack="/b")], a_ledger(("a", "c"))),
        ([a_load("a", 90, group="x"), a_load("b", 10)], a_ledger(("a",), groups=BookieGroups(("x",)))),
        (
            [a_load("a", 90, group="x"), a_load("b", 10, group="y")],
            a_ledger(("a",), groups=BookieGroups(("x",), ("y",))),
        ),
        ([a_load("a", 90), a_load("b", 0, total=20)], a_ledger(("a",))),
    ],
    ids=[
        "open", "not full", "has it", "has another fragment", "would be full", "read-only", "in limbo", "departing",
        "departs itself", "in limbo itself", "disk takes none", "empty", "racks", "group", "secondary", "small disk",
    ],
)
def test_what_must_not_move_stays(loads: list[BookieLoad], record: LedgerRecord) -> None:
    assert planned(record, *loads) == []


def test_a_rebalancing_of_a_group_is_between_its_bookies() -> None:
    loads = [a_load("a", 90, group="x"), a_load("b", 0), a_load("c", 20, group="x"), a_load("d", 95)]
    assert planned(a_ledger(("a",)), *loads, group="x") == [CopyMove("a", "c", 30)]
    assert planned(a_ledger(("d",)), *loads, group="x") == []


def test_a_move_that_was_not_made_counts_no_more() -> None:
    plan = Rebalancing(0.8, {"a": a_load("a", 90), "b": a_load("b", 10)})
    (move,) = plan.plan_ledger(a_ledger(("a",)))
    assert (plan.loads["a"].used, plan.loads["b"].used, plan.full_bookies) == (60, 40, [])
    plan.undo(move)
    assert (plan.loads["a"].used, plan.loads["b"].used, plan.full_bookies) == (90, 10, ["a"])


GROUPS = (None, BookieGroups(("x",)), BookieGroups(("x",), ("y",)))
RACKS = ("", "/a", "/b", "/c")


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[str, BookieLoad], list[LedgerRecord], float]:
    names = [f"b{number}" for number in range(draw(st.integers(2, 7)))]
    loads = {}
    for name in names:
        total = draw(st.integers(50, 2000))
        loads[name] = a_load(
            name, draw(st.integers(0, total)), total, rack=draw(st.sampled_from(RACKS)),
            group=draw(st.sampled_from(("", "x", "y"))), read_only=draw(st.booleans()) and draw(st.booleans()),
            limbo=draw(st.integers(0, 9)) == 0, is_leaving=draw(st.integers(0, 9)) == 0,
        )  # fmt: skip
    ledgers = []
    for number in range(draw(st.integers(0, 25))):
        size = draw(st.integers(1, min(3, len(names))))
        ensembles = [
            tuple(draw(st.permutations(names))[:size]) for _ in range(draw(st.integers(1, 3)))
        ]
        ledgers.append(
            a_ledger(
                *ensembles, size=draw(st.integers(0, 300)), quorum=draw(st.integers(1, size)), ledger=number,
                state=draw(st.sampled_from((CLOSED, CLOSED, OPEN))), groups=draw(st.sampled_from(GROUPS)),
            )
        )  # fmt: skip
    return loads, ledgers, draw(st.sampled_from((0.1, 0.3, 0.5, 0.8)))


def racks_of(record: LedgerRecord, loads: dict[str, BookieLoad]) -> list[int]:
    write_sets = get_striping_of_record(record).write_sets
    return [
        len({loads[fragment.bookies[slot]].rack for slot in each} - {""})
        for fragment in record.fragments for each in write_sets
    ]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_the_spread_falls_with_each_move_no_two_undo_each_other_and_all_that_must_hold_holds(
    cluster: tuple[dict[str, BookieLoad], list[LedgerRecord], float],
) -> None:
    """Passes over all ledgers until one moves nothing: it comes to an end, and another order then moves nothing."""
    loads, ledgers, share = cluster
    plan = Rebalancing(share, loads)
    began = plan.spread()
    visited = {tuple(each.fragments for each in ledgers)}
    moved = True
    while moved:
        moved = False
        for at, record in enumerate(ledgers):
            before, spread = dict(plan.loads), plan.spread()
            moves = plan.plan_ledger(record)
            plan.check()
            for move in moves:
                source, target = before[move.source], before[move.target]
                assert record.state == CLOSED
                assert move.target not in list_named_bookies(record), "never two copies on one bookie"
                assert not target.record.read_only
                assert not any((target.record.limbo, target.is_leaving, source.record.limbo, source.is_leaving))
                assert decode_bookie_groups(record.properties).contains(target.record.group)
                after = move_in_record(record, move)
                check_ledger_record(after)
                assert all(new >= old for new, old in zip(racks_of(after, loads), racks_of(record, loads), strict=True))
                record = after
            if moves:
                moved = True
                assert plan.spread() < spread
                ledgers[at] = record
                where = tuple(each.fragments for each in ledgers)
                assert where not in visited, "no oscillation"
                visited.add(where)
                for bookie, load in plan.loads.items():
                    gained = load.used > before[bookie].used
                    assert not gained or load.used <= share * load.total, "no bookie becomes full by it"
    assert plan.spread() <= began
    again = Rebalancing(share, plan.loads)
    assert [move for record in ledgers for move in again.plan_ledger(record)] == []


def test_what_an_earlier_order_moved_off_and_is_not_collected_is_not_moved_twice() -> None:
    assert count_uncollected(30, used_before=90, used_now=90) == 30
    assert count_uncollected(30, used_before=90, used_now=70) == 10
    assert count_uncollected(30, used_before=90, used_now=50) == 0
    there = {"a": BookieRecord(bookie="a", endpoint="a:1", total_bytes=100, free_bytes=10)}
    first = make_rebalance_order(0.8, "", there, None, 1000)
    assert (first.used, first.before, first.moved_off) == ({"a": 90}, {"a": 90}, {})
    ended = replace(first, moved_off={"a": 30}, ended_ms=5000)
    assert make_rebalance_order(0.8, "", there, ended, 6000).used == {"a": 60}
    assert make_rebalance_order(0.8, "", there, ended, 5001 + 86_400_000).used == {"a": 90}


# ------------------------------------------------------------------------------------------ a cluster
QUICK_GC: dict[str, object] = {"gc_interval_s": 20.0, "gc_grace_s": 5.0, "gc_doubt_s": 10.0}


async def with_a_full_bookie(
    deployment: Deployment, ledgers: int = 12, *, quick_gc: bool = True, spares: int = 2
) -> list[int]:  # fmt: skip
    """Three bookies with all ledgers, of which the first has a small disk, and `spares` that are empty."""
    changes: dict[str, object] = QUICK_GC if quick_gc else {}
    for name in ("b1", "b2", "b3"):
        await deployment.start(name, **changes)
    found = [(await deployment.a_ledger(20, size=3000)).ledger_id for _ in range(ledgers)]
    for bookie in deployment.bookies.values():
        await deployment.simulation.spawn(deployment.node_of(bookie.id), bookie.store.checkpoint())
    for number in range(spares):
        await deployment.start(f"b{number + 4}", **changes)
    for name, share in (("b1", 0.9), ("b2", 0.5), ("b3", 0.5), ("b4", 0.05), ("b5", 0.05)):
        if name in deployment.bookies:
            disk = deployment.simulation.node(name).disk
            disk.capacity_bytes = max(int(disk.used_bytes() / share), 40 << 20 if share < 0.1 else 0)
    await asyncio.sleep(70.0)  # registrations with the usage of now
    return found


async def order(deployment: Deployment) -> RebalanceRecord:
    found = await get_record(deployment.metadata, paths.REBALANCE, RebalanceRecord)
    assert found is not None
    return found[0]


async def until_ended(deployment: Deployment) -> RebalanceRecord:
    async def ended() -> bool:
        record = await order(deployment)
        return bool(record.ended_ms) and not record.moves

    await deployment.until(ended)
    return await order(deployment)


async def names(deployment: Deployment, ledgers: list[int], bookie: str) -> int:
    return sum([bookie in list_named_bookies(await deployment.record(ledger)) for ledger in ledgers])


async def check_refused(
    deployment: Deployment, error: type[errors.MagnetarError], text: str, verb: str, **options: object
) -> None:  # fmt: skip
    answer = await say(deployment, verb, **options)
    assert answer.get("error") == error.__name__, answer
    assert text in answer["message"]


NONE = pytest.mark.run_by(with_deployment, 0)


async def planned_share(deployment: Deployment, less: float = 0.001) -> float:
    """A share that the full bookie is a little above: some of its ledgers have to move."""
    plan = await say(deployment, "rebalance-plan", share=0.5)
    used = {each["id"]: each["used"] for each in plan["bookies"]}
    return round(used[deployment.bookies["b1"].id] - less, 4)


@NONE
async def test_sealed_ledgers_move_off_the_full_bookie_and_their_old_copies_are_dropped(
    deployment: Deployment, /
) -> None:
    ledgers = await with_a_full_bookie(deployment)
    full = deployment.bookies["b1"]
    share = await planned_share(deployment, 0.004)
    plan = await say(deployment, "rebalance-plan", share=share)
    assert plan["full"] == [full.id]
    assert plan["reached"]
    assert plan["seconds"] > 0
    assert 0 < plan["ledgers"] < len(ledgers)
    assert await deployment.metadata.get(paths.REBALANCE) is None, "a plan changes nothing"
    ordered = await say(deployment, "rebalance", share=share)
    assert (ordered["ledgers"], ordered["bytes"]) == (plan["ledgers"], plan["bytes"])
    ended = await until_ended(deployment)
    assert (ended.end, ended.ledgers, ended.bytes, ended.skipped) == (
        RebalanceEnd.REACHED.value, plan["ledgers"], plan["bytes"], 0
    )  # fmt: skip
    assert await names(deployment, ledgers, full.id) == len(ledgers) - plan["ledgers"]
    for ledger in ledgers:
        assert await deployment.mark(ledger) is None
        await deployment.check_whole(ledger)
        assert await deployment.read_all(ledger) == [payload(ledger, entry, 3000) for entry in range(20)]
    status = await say(deployment, "rebalance-status")
    assert (status["running"], status["ledgers"], status["end"]) == (False, plan["ledgers"], RebalanceEnd.REACHED.value)

    async def dropped() -> bool:
        return full.statistics()["gc_dropped"] == plan["ledgers"]

    await deployment.until(dropped)
    for ledger in ledgers:
        await deployment.check_whole(ledger)
    statistics = [each.statistics() for each in deployment.bookies.values()]
    assert sum(each["rebalance_ledgers"] for each in statistics) == plan["ledgers"], "of the auditor alone"
    assert sum(each["repair_moved"] for each in statistics) == plan["ledgers"]
    assert all(each["repair_under_replicated"] == 0 for each in statistics)


@pytest.mark.parametrize("seed", range(1, 5))
def test_bookies_die_while_ledgers_move_and_are_read_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The full bookie, a target or a holder dies, two of them, at some moment of a move, and comes back later."""
    rng = random.Random(seed)
    original = worker.RepairWorker._replace
    deployments: list[Deployment] = []
    victims = rng.sample(["b1", "b4", "b2"], 2)

    async def die(self: worker.RepairWorker, *arguments: Any) -> LedgerRecord:
        if victims and rng.random() < 0.3:
            asyncio.get_running_loop().call_soon(partial(deployments[0].simulation.crash, victims.pop()))
            await asyncio.sleep(1.0)
        return await original(self, *arguments)

    async def bring_back(deployment: Deployment, probability: float) -> None:
        for name in ("b1", "b2", "b4"):
            if not deployment.simulation.is_node_running(name) and rng.random() < probability:
                await deployment.start(name, **QUICK_GC)

    async def main(deployment: Deployment) -> None:
        deployments.append(deployment)
        ledgers = await with_a_full_bookie(deployment, 24)
        await say(deployment, "rebalance", share=await planned_share(deployment, 0.012))
        monkeypatch.setattr(worker.RepairWorker, "_replace", die)
        for _ in range(20):
            await asyncio.sleep(3.0)
            for ledger in ledgers:
                assert len(await deployment.read_all(ledger)) == 20
            await bring_back(deployment, 0.3)
        await bring_back(deployment, 1.0)
        ended = await until_ended(deployment)
        await asyncio.sleep(120.0)
        for ledger in ledgers:
            await deployment.until_whole(ledger)
            await deployment.check_whole(ledger)
            assert await deployment.read_all(ledger) == [payload(ledger, entry, 3000) for entry in range(20)]
        assert ended.ledgers > 0
        assert not victims, "both died in the middle"

    with_deployment(main, 0, seed=seed)


@pytest.mark.run_by(with_deployment, 0, repair=replace(REPAIR, bytes_per_s=20_000, ledgers_at_once=1))
async def test_a_rebalancing_is_stopped_and_the_same_order_goes_on_where_it_was(deployment: Deployment, /) -> None:
    ledgers = await with_a_full_bookie(deployment, 24, quick_gc=False)
    full = deployment.bookies["b1"].id
    share = await planned_share(deployment, 0.012)
    plan = await say(deployment, "rebalance", share=share)
    await check_refused(deployment, errors.Busy, "under way", "rebalance", share=share)
    under = await say(deployment, "under-replicated")
    assert under["count"] == 0, "nothing is missing"

    async def some_moved() -> bool:
        return (await order(deployment)).ledgers > 0

    await deployment.until(some_moved)
    assert (await say(deployment, "rebalance-stop"))["end"] == RebalanceEnd.STOPPED.value
    stopped = await until_ended(deployment)
    assert 0 < stopped.ledgers < plan["ledgers"]
    await asyncio.sleep(60.0)
    assert await names(deployment, ledgers, full) == len(ledgers) - stopped.ledgers, "nothing moves any more"
    assert await marks.list_ledger_ids(deployment.metadata, paths.UNDER_REPLICATED_LEDGERS) == []
    rest = await say(deployment, "rebalance", share=share)
    assert rest["ledgers"] == plan["ledgers"] - stopped.ledgers, "what the bookie has not collected is not moved again"
    await until_ended(deployment)
    assert await names(deployment, ledgers, full) == len(ledgers) - plan["ledgers"]
    for ledger in ledgers:
        await deployment.check_whole(ledger)


@NONE
async def test_a_rebalancing_that_cannot_help_is_refused(deployment: Deployment, /) -> None:
    await with_a_full_bookie(deployment, 4, spares=0)
    share = await planned_share(deployment)
    await check_refused(deployment, errors.NotAllowed, "no bookie uses more than", "rebalance", share=0.99)
    await check_refused(deployment, errors.NotAllowed, "no copy can be moved", "rebalance", share=share)
    await check_refused(deployment, errors.NotFound, "group", "rebalance", share=share, group="fast")
    for wrong in (0, 1, 1.5, "0.8", True, None):
        await check_refused(deployment, errors.InvalidRequest, "between 0 and 1", "rebalance-plan", share=wrong)
    await check_refused(deployment, errors.NotFound, "no rebalancing", "rebalance-stop")
    assert await say(deployment, "rebalance-status") == {}
    await marks.set_repair_enabled(deployment.metadata, False)
    await check_refused(deployment, errors.NotAllowed, "auto-recovery is off", "rebalance", share=share)


@NONE
async def test_a_target_that_takes_no_copies_any_more_costs_nothing(deployment: Deployment, /) -> None:
    ledgers = await with_a_full_bookie(deployment, spares=1)
    share = await planned_share(deployment, 0.006)
    await say(deployment, "rebalance", share=share)
    await deployment.kill("b4")
    ended = await until_ended(deployment)
    assert ended.end == RebalanceEnd.EXHAUSTED.value
    assert await names(deployment, ledgers, deployment.bookies["b1"].id) == len(ledgers) - ended.ledgers
    assert ended.ledgers == 0 or ended.skipped == 0
