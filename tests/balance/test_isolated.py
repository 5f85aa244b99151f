"""Brokers with labels in a simulated cluster: misplaced bundles leave, nothing goes where it may not be, and a set of
labelled brokers is balanced in itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import pytest

from magnetar.broker.cluster.balance_core import (
    BALANCE_CHECK_INTERVAL_S,
    BELIEVED_REPORTS_MIN,
    MOVES_PER_BROKER_MAX,
    REPORTED_BUNDLES_MAX,
    Balancer,
    BrokerLoad,
    MovableBundle,
    Move,
)
from magnetar.broker.cluster.isolation_core import FALLBACK_KEPT_S, BrokerIsolation, IsolationTracker
from magnetar.metadata.records import BrokerRecord
from tests.balance.simulation import BalanceSimulation, SimulatedBroker, SimulatedBundle
from tests.balance.test_balance import feed, report

GOLD, SILVER = ("tier=gold",), ("tier=silver",)


class IsolatedSimulation(BalanceSimulation):
    """Some brokers have labels, some bundles ask for them. `rested_s`: the longest time for which a bundle was at a
    broker that may not have it, while another one was there that may."""

    def __init__(self, seed: int, *, brokers: int, bundles: int) -> None:
        super().__init__(seed, brokers=brokers, bundles=bundles, weights=[1.0] * bundles, noise=0.1)
        self.labels: dict[str, tuple[str, ...]] = {}
        self.asks: dict[int, BrokerIsolation] = {}
        self.trackers: dict[str, IsolationTracker] = {}
        self.waits_s: dict[int, float] = {}
        self.rested_s = 0.0

    def record(self, broker: SimulatedBroker) -> BrokerRecord:
        return BrokerRecord(
            name=broker.name, endpoint="h:1", labels=self.labels.get(broker.name, ()), draining=broker.draining
        )

    def records(self) -> list[BrokerRecord]:
        return [self.record(each) for each in self.brokers.values() if not each.draining]

    def select_allowed(self, bundle: SimulatedBundle, brokers: Sequence[BrokerRecord]) -> Sequence[BrokerRecord]:
        if (asks := self.asks.get(bundle.number)) is None:
            return brokers
        labelled = [self.record(self.brokers[each.name]) for each in brokers]
        allowed = {each.name for each in asks.select_allowed(labelled)}
        return [each for each in brokers if each.name in allowed]

    def _report(self, broker: SimulatedBroker) -> BrokerLoad:
        available = self.records()
        allowed = {each: frozenset(found.name for found in each.select_allowed(available)) for each in
                   set(self.asks.values())}  # fmt: skip
        me = self.record(broker)
        owned = {each.path: self.asks[each.number] for each in broker.bundles.values()
                 if each.number in self.asks and not self.asks[each.number].is_primary(me)}  # fmt: skip
        tracker = self.trackers.setdefault(broker.name, IsolationTracker())
        misplaced = set(tracker.find_misplaced(owned, me, available, self.now_s))
        found = super()._report(broker)
        first = [MovableBundle(path, 0.0, misplaced=True) for path in sorted(misplaced)]
        told = [*first, *(each for each in found.bundles if each.path not in misplaced)][:REPORTED_BUNDLES_MAX]
        return found._replace(bundles=[
            each._replace(allowed=allowed[self.asks[number]] if (number := int(each.path[1:])) in self.asks else None)
            for each in told
        ])  # fmt: skip

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / BALANCE_CHECK_INTERVAL_S)):
            super().run(BALANCE_CHECK_INTERVAL_S)
            available = self.records()
            for number, asks in self.asks.items():
                owner = self.bundles[number].owner
                me = None if owner is None else self.record(owner)
                rests = me is not None and not asks.is_primary(me) and not asks.is_fallback(me)
                rests = rests and bool(asks.select_allowed(available))
                self.waits_s[number] = self.waits_s.get(number, 0.0) + BALANCE_CHECK_INTERVAL_S if rests else 0.0
                self.rested_s = max(self.rested_s, self.waits_s[number])

    def owners(self, asks: BrokerIsolation) -> list[str]:
        return [owner.name for number, each in self.asks.items()
                if each == asks and (owner := self.bundles[number].owner) is not None]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_a_policy_that_is_set_later_is_kept_by_all_bundles_after_the_moves_that_it_takes(seed: int) -> None:
    cluster = IsolatedSimulation(seed, brokers=20, bundles=800)
    cluster.labels = {f"b{at}": GOLD for at in range(4)}
    cluster.run(300.0)
    isolation = BrokerIsolation(GOLD)
    cluster.asks = dict.fromkeys(range(0, 800, 10), isolation)
    cluster.run(600.0)
    moving = sum(name not in cluster.labels for name in cluster.owners(isolation))
    checks = -(-80 // (MOVES_PER_BROKER_MAX * 4))  # all of them, four at a time to each of four brokers
    assert cluster.rested_s <= (checks + 2) * BALANCE_CHECK_INTERVAL_S
    assert moving == 0
    assert len(cluster.owners(isolation)) == 80


def test_bundles_leave_a_broker_also_when_they_are_too_light_to_be_among_its_heaviest() -> None:
    cluster = IsolatedSimulation(1, brokers=4, bundles=400)
    cluster.labels = {"b0": GOLD}
    lightest = sorted(cluster.brokers["b1"].bundles.values(), key=lambda each: each.number)[0]
    lightest.base = 1e-9
    cluster.asks = {lightest.number: BrokerIsolation(GOLD)}
    cluster.run(60.0)
    assert lightest.owner is cluster.brokers["b0"]


def test_what_only_a_broker_that_died_may_have_waits_and_goes_to_the_next_one_that_may() -> None:
    cluster = IsolatedSimulation(2, brokers=10, bundles=200)
    cluster.labels = {"b0": GOLD, "new": GOLD}
    isolation = BrokerIsolation(GOLD)
    cluster.asks = {each.number: isolation for each in cluster.brokers["b0"].bundles.values()}
    expected = len(cluster.asks)
    cluster.kill("b0")
    cluster.run(100.0)
    assert cluster.owners(isolation) == [], "whoever is asked says that no broker may have them"
    for number, each in zip(cluster.asks, count(), strict=False):  # some are at brokers that had them before
        if each % 2:
            cluster.brokers["b1"].add(cluster.bundles[number], cluster.now_s)
    cluster.add_broker("new")
    cluster.run(200.0)
    assert cluster.owners(isolation) == ["new"] * (expected // 2)


@pytest.mark.parametrize("seed", range(3))
def test_primary_brokers_that_flap_around_the_minimum_move_nothing_to_and_fro(seed: int) -> None:
    cluster = IsolatedSimulation(seed, brokers=12, bundles=240)
    cluster.labels = {"b0": GOLD, "b1": GOLD, "b2": GOLD, "b3": SILVER, "b4": SILVER}
    isolation = BrokerIsolation(GOLD, SILVER, 3)
    cluster.asks = dict.fromkeys(range(60), isolation)
    cluster.run(900.0)
    assert set(cluster.owners(isolation)) <= {"b0", "b1", "b2"}
    planned = list[Move]()
    plan_moves = cluster.rule.plan_moves

    def plan(now_s: float) -> list[Move]:
        found = plan_moves(now_s)
        planned.extend(each for each in found if int(each.path[1:]) in cluster.asks)
        return found

    cluster.rule.plan_moves = plan  # type: ignore[method-assign]
    for _ in range(20):
        cluster.kill("b2")
        cluster.run(60.0)
        cluster.add_broker("b2")
        cluster.run(60.0)
    assert not [each for each in planned if "does not let" in each.why], "fallback brokers keep what they got"
    away = [each for each in planned if cluster.labels[each.target] == SILVER]
    assert len(away) <= 3, "only what a broker that died leaves goes to a fallback broker"
    assert set(cluster.owners(isolation)) & {"b3", "b4"}, "some wait at fallback brokers"
    cluster.run(FALLBACK_KEPT_S + 300.0)
    assert [each for each in planned if "does not let" in each.why], "and return when nothing flaps any more"
    assert set(cluster.owners(isolation)) <= {"b0", "b1", "b2"}


def test_brokers_that_a_namespace_asks_for_are_balanced_while_all_of_them_are_busier_than_the_others() -> None:
    pool = frozenset(("gold-1", "gold-2"))
    balancer = Balancer()
    hot, warm = report("gold-1", *[10.0] * 8), report("gold-2", *[10.0] * 3)
    hot, warm = (each._replace(bundles=[one._replace(allowed=pool) for one in each.bundles]) for each in (hot, warm))
    others = [report(f"plain-{at}", 1.0) for at in range(20)]
    moves = balancer.plan_moves(feed(balancer, hot, warm, *others))
    assert {(each.source, each.target) for each in moves} == {("gold-1", "gold-2")}
    assert len(moves) == 2


def test_evictions_wait_for_no_averages_and_count_as_moves() -> None:
    balancer = Balancer()
    full = report("full", *[0.0] * 10, score=1.0)
    full = full._replace(bundles=[each._replace(misplaced=True, allowed=frozenset(("gold",))) for each in full.bundles])
    now_s = feed(balancer, full, report("gold"), report("plain"), checks=1)
    first = balancer.plan_moves(now_s)
    assert [each.target for each in first] == ["gold"] * MOVES_PER_BROKER_MAX
    assert balancer.plan_moves(now_s) == [], "so many are on their way"
    for each in first:
        balancer.end_move(each.path, False, now_s + 1.0)
    assert balancer.plan_moves(now_s + 2.0) == [], "its next report tells whether they have moved"
    again = balancer.plan_moves(feed(balancer, full, report("gold"), checks=1, from_s=now_s))
    assert {each.path for each in again} & {each.path for each in first}, "a move that failed is tried again"
    assert BELIEVED_REPORTS_MIN > 2


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_reported_no_bundle_moves_to_a_broker_that_may_not_have_it(seed: int) -> None:
    rng, balancer, now_s = random.Random(seed), Balancer(), 0.0
    names = [f"b{at}" for at in range(8)]
    at: dict[str, str] = {f"/{number}": rng.choice(names) for number in range(120)}
    may: dict[str, frozenset[str] | None] = {}
    for check in range(120):
        if check % 20 == 0:  # policies change, or brokers come and go
            may = {path: None if rng.random() < 0.3 else frozenset(rng.sample(names, rng.randrange(4))) for path in at}
        reports = list[BrokerLoad]()
        for name in names:
            bundles = [
                MovableBundle(path, rng.random() * 3, allowed=may[path],
                              misplaced=(found := may[path]) is not None and name not in found)
                for path, owner in at.items() if owner == name
            ]  # fmt: skip
            reports.append(BrokerLoad(name, min(100.0, sum(each.load for each in bundles)), 30.0, bundles))
        now_s = feed(balancer, *reports, checks=1, from_s=now_s)
        for move in balancer.plan_moves(now_s):
            allowed = may[move.path]
            assert allowed is None or move.target in allowed
            assert at[move.path] == move.source
            at[move.path] = move.target
            balancer.end_move(move.path, True, now_s)
