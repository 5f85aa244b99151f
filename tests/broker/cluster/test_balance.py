"""An operator has bundles moved: a plan from loads that were measured just now, and moves to brokers that are named."""

import random
from pathlib import Path
from typing import Any

import pytest

from magnetar.admin import AdminClient
from magnetar.broker.cluster.bundles_core import (
    BALANCED_LOAD_SHARE,
    MOVES_PER_PLAN_MAX,
    BundleLoad,
    PlannedMove,
    plan_balance,
)
from magnetar.broker.session import balancing, summaries
from magnetar.broker.session.administration import Administration
from magnetar.broker.session.balancing import balance_brokers, plan_balance_of_brokers
from magnetar.proto.errors import NotAllowed, NotFound, NotOwner, Unavailable
from tests.support.cluster import TestProducer, cluster

TOPIC = "persistent://public/default/t"


def loads_after(brokers: list[str], bundles: dict[str, list[BundleLoad]], moves: list[PlannedMove]) -> dict[str, float]:
    found = {name: sum(each.load for each in bundles.get(name, ())) for name in brokers}
    for move in moves:
        found[move.source] -= move.load
        found[move.target] += move.load
    return found


def test_a_broker_that_was_added_gets_its_share() -> None:
    bundles = {name: [BundleLoad(f"/{name}/{at}", 10.0) for at in range(15)] for name in ("a", "b")}
    moves = plan_balance(["a", "b", "new"], bundles)
    assert loads_after(["a", "b", "new"], bundles, moves) == {"a": 100.0, "b": 100.0, "new": 100.0}
    assert len(moves) == 10, "no more than it needs"
    assert {move.target for move in moves} == {"new"}


def test_what_is_balanced_stays_and_one_large_bundle_is_not_sent_to_and_fro() -> None:
    assert plan_balance(["a", "b"], {"a": [BundleLoad("/1", 51.0)], "b": [BundleLoad("/2", 49.0)]}) == []
    assert plan_balance(["a", "b"], {"a": [BundleLoad("/1", 500.0)], "b": []}) == []
    assert plan_balance(["a"], {"a": [BundleLoad("/1", 5.0)]}) == []
    assert plan_balance([], {}) == []
    assert plan_balance(["a", "b"], {"a": [BundleLoad("/1", 0.0)], "b": []}) == []


def test_the_bundle_that_fits_best_moves_first() -> None:
    bundles = {"a": [BundleLoad("/small", 1.0), BundleLoad("/half", 50.0), BundleLoad("/large", 49.0)], "b": []}
    assert plan_balance(["a", "b"], bundles) == [PlannedMove("/half", "a", "b", 50.0)]


def test_a_bundle_is_planned_for_a_broker_that_may_have_it_and_stays_where_there_is_none() -> None:
    may = frozenset(("a", "gold"))
    bundles = {"a": [BundleLoad(f"/{at}", 10.0, may) for at in range(8)], "b": [], "gold": []}
    moves = plan_balance(["a", "b", "gold"], bundles)
    assert {each.target for each in moves} == {"gold"}
    assert len(moves) == 4
    assert plan_balance(["a", "b"], bundles) == []


def test_each_plan_narrows_the_loads_and_moves_each_bundle_once() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        brokers = [f"b{at}" for at in range(rng.randint(2, 6))]
        bundles = {
            name: [
                BundleLoad(f"/{name}/{at}", rng.choice((0.1, 1.0, rng.uniform(0, 40))))
                for at in range(rng.randint(0, 20))
            ]
            for name in brokers
        }
        before, moves = loads_after(brokers, bundles, []), plan_balance(brokers, bundles)
        after = loads_after(brokers, bundles, moves)
        assert len({move.path for move in moves}) == len(moves) <= MOVES_PER_PLAN_MAX, seed
        least = BALANCED_LOAD_SHARE * sum(before.values()) / len(brokers)
        assert sum(each**2 for each in after.values()) <= sum(each**2 for each in before.values()) + 1e-6, seed
        smallest = min((each.load for found in bundles.values() for each in found), default=0.0)
        largest = max((each.load for found in bundles.values() for each in found), default=0.0)
        apart = max(after.values()) - min(after.values())
        assert apart <= max(least, largest) + least + smallest or len(moves) == MOVES_PER_PLAN_MAX, (seed, after)


async def test_a_bundle_moves_to_the_broker_that_is_named_and_its_clients_follow(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        first = await running.add_broker(name="first", share_group="all")
        producer = await TestProducer(running.world, first, TOPIC).opened()
        await producer.send(b"before")
        second = await running.add_broker(name="second", share_group="all")
        async with AdminClient(f"magnetar://{second.endpoint}") as admin:
            (row,) = (await admin.list_bundles(namespace="public/default")).bundles
            assert (row.broker, row.topics) == ("first", 1)
            for there in ("first", str(first.endpoint)):
                done = await admin.unload_namespace("public/default", row.bundle, destination=there)
                assert (done.bundles, done.topics) == (0, 0), "it is there"
            assert (await admin.unload_namespace("public/default", row.bundle, destination="second")).topics == 1
            with pytest.raises(NotOwner) as told:
                await producer.next("never")
            assert told.value.fields["owner"] == str(second.endpoint)
            resumed = await TestProducer(running.world, second, TOPIC, name="q").opened()
            await resumed.send(b"after")
            (row,) = (await admin.list_bundles(namespace="public/default")).bundles
            assert (row.broker, row.topics, str(row.endpoint)) == ("second", 1, str(second.endpoint))
            with pytest.raises(NotFound, match="no broker 'third' is registered"):
                await admin.unload_namespace("public/default", destination="third")
            await admin.drain_broker("first")
            await first.topic_manager.apply_drain_order()
            with pytest.raises(NotAllowed, match="'first' drains"):
                await admin.unload_namespace("public/default", destination="first")


async def test_a_balance_gives_a_new_broker_its_share_and_then_moves_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        first = await running.add_broker(name="first", share_group="all")
        async with AdminClient(f"magnetar://{first.endpoint}") as admin:
            for number in range(12):
                await admin.create_topic(f"t{number}")
                await admin.topic_stats(f"t{number}")
            second = await running.add_broker(name="second", share_group="all")
            planned = await admin.balance_brokers(dry_run=True)
            assert len(planned.moves) > 0 == len(second.topics), "a plan moves nothing"
            done = await admin.balance_brokers()
            assert done == planned
            assert {(each.source, each.target) for each in done.moves} == {("first", "second")}
            for number in range(12):
                await admin.topic_stats(f"t{number}")  # whoever asks next loads them where they are now
            assert 5 <= len(second.topics) <= 7
            assert len(first.topics) + len(second.topics) == 12
            assert (await admin.balance_brokers()).moves == ()


async def test_a_move_from_a_broker_that_has_ended_meanwhile_is_not_told_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        first = await running.add_broker(name="first", share_group="all")
        async with AdminClient(f"magnetar://{first.endpoint}") as admin:
            for number in range(4):
                await admin.create_topic(f"t{number}")
                await admin.topic_stats(f"t{number}")
        manager = (await running.add_broker(name="second", share_group="all")).topic_manager
        list_brokers, planned = manager.list_brokers, list[str]()

        async def list_those_left() -> Any:
            return [each for each in await list_brokers() if not (planned and each.name == "first")]

        def plan(names: Any, bundles: Any, allowed: Any) -> Any:
            planned.extend(names)
            return plan_balance_of_brokers(names, bundles)

        monkeypatch.setattr(manager, "list_brokers", list_those_left)
        monkeypatch.setattr(balancing, "plan_balance_of_brokers", plan)
        with pytest.raises(Unavailable, match="'first' has ended meanwhile"):
            await balance_brokers(manager, Administration(manager), dry_run=False)


async def test_nothing_moves_while_a_broker_does_not_say_what_it_owns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=2, share_group="all") as running:
        first, second = running.brokers
        monkeypatch.setattr(summaries, "OTHER_BROKERS_WAIT_S", 0.01)
        monkeypatch.setattr(summaries, "LATE_BROKERS_WAIT_S", 0.01)
        monkeypatch.setattr(second.topic_manager, "sum_traffic_by_bundle", None)  # a defect there, and no answer
        async with AdminClient(f"magnetar://{first.endpoint}") as admin:
            assert (await admin.list_bundles()).silent == (second.topic_manager.name,)
            with pytest.raises(Unavailable, match="nothing is moved"):
                await admin.balance_brokers()
