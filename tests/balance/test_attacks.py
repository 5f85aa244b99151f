"""What no broker, leader or clock can do to the balance: two leaders, loads that lie or come late, clocks that jump."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import pytest

from magnetar.broker.cluster.balance_core import (
    BALANCE_CHECK_INTERVAL_S,
    MOVED_BUNDLE_REST_S,
    Balancer,
    BrokerLoad,
    Move,
)
from tests.balance.simulation import BalanceSimulation
from tests.balance.test_balance import feed, report

Lie = Callable[[BrokerLoad], BrokerLoad | None]
"""What a leader hears in place of a report; None: nothing."""


class TwoLeaders(Balancer):
    """Two leaders that do not know of each other: the second hears the loads a check later. Of two moves of a bundle
    the owner makes the first. `both`: whether the second one still decides."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Balancer()
        self.both = True
        self.last: dict[str, BrokerLoad] = {}
        self.planned: dict[str, list[Balancer]] = {}
        self.refused = 0

    def add_report(self, report: BrokerLoad, now_s: float) -> None:
        super().add_report(report, now_s)
        late = self.last.get(report.name, report)
        self.other.add_report(late._replace(window_s=late.window_s + BALANCE_CHECK_INTERVAL_S), now_s)
        self.last[report.name] = report

    def plan_moves(self, now_s: float) -> list[Move]:
        first = super().plan_moves(now_s)
        second = self.other.plan_moves(now_s) if self.both else []
        for leader, moves in ((super(), first), (self.other, second)):
            for each in moves:
                self.planned.setdefault(each.path, []).append(leader)  # type: ignore[arg-type]
        return first + second

    def end_move(self, path: str, moved: bool, now_s: float) -> None:
        leaders = self.planned[path]
        self.refused += not moved
        leaders.pop(0 if moved else -1).end_move(path, moved, now_s)


@pytest.mark.parametrize("seed", range(3))
def test_two_leaders_balance_as_one_does_and_move_nothing_to_and_fro(seed: int) -> None:
    leaders = TwoLeaders()
    cluster = BalanceSimulation(seed, brokers=12, bundles=600, rule=leaders, noise=0.2)
    alone = BalanceSimulation(seed, brokers=12, bundles=600, rule=Balancer(), noise=0.2)
    for each in (cluster, alone):
        each.run(1_200.0)
    assert leaders.refused > 0, "both have wanted to move the same bundle"
    assert cluster.max_to_mean() <= 1.3
    assert cluster.moves <= 2 * alone.moves, "each decides once"
    assert max(each.moved for each in cluster.bundles) <= 2
    leaders.both = False  # the one whose session was lost has noticed it
    before = cluster.moves
    cluster.run(1_200.0)
    assert cluster.max_to_mean() <= 1.25
    assert cluster.moves - before <= 0.1 * alone.moves


class Deceived(Balancer):
    """A leader that hears what `lie` makes of the reports of the broker b1."""

    def __init__(self, lie: Lie) -> None:
        super().__init__()
        self.lie = lie

    def add_report(self, report: BrokerLoad, now_s: float) -> None:
        told = self.lie(report) if report.name == "b1" else report
        if told is not None:
            super().add_report(told, now_s)


class Frozen:
    """Says for ever what it said first."""

    def __init__(self) -> None:
        self.first: BrokerLoad | None = None

    def __call__(self, report: BrokerLoad) -> BrokerLoad:
        self.first = self.first or report
        return self.first


class Late:
    """Says what was five checks ago."""

    def __init__(self) -> None:
        self.told: list[BrokerLoad] = []

    def __call__(self, report: BrokerLoad) -> BrokerLoad | None:
        self.told.append(report._replace(window_s=report.window_s + 5 * BALANCE_CHECK_INTERVAL_S))
        return self.told[-6] if len(self.told) > 5 else None


def claim_others(report: BrokerLoad) -> BrokerLoad:
    """Says that it has the heaviest bundles of all."""
    first = [each._replace(path=f"/{number}") for number, each in enumerate(report.bundles)]
    return report._replace(score=90.0, bundles=first)


LIES: dict[str, Callable[[], Lie]] = {
    "idle": lambda: lambda report: report._replace(score=0.0),
    "busy": lambda: lambda report: report._replace(score=100.0),
    "huge": lambda: lambda report: report._replace(score=1e308, load=1e308),
    "light": lambda: lambda report: report._replace(load=1e-300),
    "no number": lambda: lambda report: report._replace(score=math.nan),
    "negative": lambda: lambda report: report._replace(load=-1.0),
    "no bundle": lambda: lambda report: report._replace(bundles=[]),
    "owned for ever": lambda: lambda report: report._replace(
        bundles=[each._replace(owned_s=math.inf) for each in report.bundles]
    ),
    "clock an hour off": lambda: lambda report: report._replace(
        window_s=3_600.0, bundles=[each._replace(owned_s=each.owned_s + 3_600.0) for each in report.bundles]
    ),
    "bundles of others": lambda: claim_others, "frozen": Frozen, "late": Late, "silent": lambda: lambda report: None,
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_broker_that_lies_neither_gets_everything_nor_keeps_the_others_from_their_balance(lie: str) -> None:
    cluster = BalanceSimulation(1, brokers=12, bundles=600, rule=Deceived(LIES[lie]()), noise=0.1)
    liar = cluster.brokers["b1"]
    before = cluster.utilisation(liar)
    cluster.run(1_800.0)
    others = [cluster.utilisation(each) for each in cluster.brokers.values() if each is not liar]
    assert max(others) <= 1.3 * fmean(others)
    assert cluster.utilisation(liar) <= max(1.5 * fmean(others), before)
    assert max(each.moved for each in cluster.bundles) <= 3
    assert cluster.moves <= 0.2 * len(cluster.bundles)


def test_a_broker_that_claims_a_bundle_of_another_does_not_keep_it_there() -> None:
    balancer = Balancer()
    hot, cold = report("hot", *[10.0] * 6), report("cold", 20.0)
    liar = hot._replace(name="liar", score=70.0)
    now_s = feed(balancer, hot, cold, liar)
    claimed = [each for each in balancer.plan_moves(now_s) if each.source == "liar"]
    assert claimed
    for each in balancer.list_moves():
        balancer.end_move(each.path, False, now_s)  # it does not own them, and moves nothing
    moves = list[Move]()
    for _ in range(8):
        now_s = feed(balancer, hot, cold, liar, checks=1, from_s=now_s)
        moves += balancer.plan_moves(now_s)
    assert {each.path for each in claimed} & {each.path for each in moves if each.source == "hot"}


@pytest.mark.parametrize("jump_s", [3_600.0, 86_400.0 * 365])
def test_a_clock_of_the_leader_that_jumps_costs_a_few_checks(jump_s: float) -> None:
    cluster = BalanceSimulation(2, brokers=12, bundles=600, noise=0.1)
    cluster.run(90.0)
    cluster.now_s += jump_s  # the machine was stopped
    before = cluster.moves
    cluster.run(BALANCE_CHECK_INTERVAL_S)
    assert cluster.moves == before, "what was heard before counts no more"
    cluster.run(MOVED_BUNDLE_REST_S)
    assert cluster.max_to_mean() <= 1.25
    assert max(each.moved for each in cluster.bundles) <= 2
