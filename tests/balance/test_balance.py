"""The balancer's core in a simulated cluster: what it reaches, what it never does, and what lying loads do to it."""

import math
import random
from collections import Counter

import pytest

from magnetar.broker.cluster.balance_core import (
    BALANCE_CHECK_INTERVAL_S,
    BELIEVED_REPORTS_MIN,
    BUNDLE_OWNED_S_MIN,
    CARRIED_LOAD_RATIO_MAX,
    MOVED_BUNDLE_REST_S,
    MOVES_PER_BROKER_MAX,
    SILENT_BROKER_FORGOTTEN_S,
    SILENT_CHECKS_MAX,
    Balancer,
    BrokerLoad,
    MovableBundle,
    Move,
    costs_more_than_it_brings,
)
from tests.balance.machines import count_requests
from tests.balance.scenarios import SCENARIOS
from tests.balance.simulation import BalanceSimulation, FirstAsked, ThresholdShedder

BROKERS, BUNDLES = 40, 4_000
"""So many take seconds; `python -m tests.balance --brokers 1000 --bundles 100000` is the same with larger numbers."""


@pytest.mark.parametrize("seed", range(3))
def test_ten_minutes_after_a_start_by_first_asked_no_broker_is_a_quarter_above_the_mean(seed: int) -> None:
    found = SCENARIOS["start"](seed, BROKERS, BUNDLES, Balancer())
    assert found["before"] > 2
    assert found["max_to_mean"] <= 1.25
    assert found["moves_a_bundle"] <= 0.1, "it moves what is heavy, and not everything"


def test_what_is_compared_with_is_worse() -> None:
    balanced = SCENARIOS["noise"](1, 10, 1_000, Balancer())
    shed, first = (SCENARIOS["noise"](1, 10, 1_000, rule) for rule in (ThresholdShedder(), FirstAsked()))
    assert balanced["max_to_mean"] < shed["max_to_mean"] < first["max_to_mean"]
    assert balanced["moves_a_bundle_and_day"] <= 0.1
    assert balanced["minutes_above_1.25"] == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_a_burst_moves_about_one_bundle_and_what_it_moved_does_not_go_to_and_fro(seed: int) -> None:
    """Whether it moves the bundle with the burst or another is the same: one pause."""
    found = SCENARIOS["bursts"](seed, 10, 1_000, Balancer())
    assert found["moves_a_burst"] <= 1.1
    assert found["minutes_above_1.25"] <= 0.2


def test_after_the_death_of_a_tenth_the_others_are_equal_in_ten_minutes() -> None:
    assert SCENARIOS["deaths"](1, BROKERS, BUNDLES, Balancer())["max_to_mean"] <= 1.25


def test_brokers_that_join_have_their_share_in_fifteen_minutes() -> None:
    found = SCENARIOS["joins"](1, BROKERS, BUNDLES, Balancer())
    assert found["least_to_mean"] >= 0.6
    assert found["max_to_mean"] <= 1.25


def test_a_rolling_restart_moves_a_bundle_twice_at_most_in_the_mean() -> None:
    assert SCENARIOS["restart"](1, 20, 2_000, Balancer())["moves_a_bundle"] <= 2


def test_a_skew_of_ten_to_one_over_four_brokers_is_balanced_in_eight_moves() -> None:
    found = [SCENARIOS["skew"](seed, 4, 32, Balancer()) for seed in range(100)]
    assert min(each["before"] for each in found) > 3
    assert max(each["max_to_mean"] for each in found) <= 1.25
    assert sum(each["moves"] <= 8 for each in found) >= 95


class Watched(Balancer):
    """Checks each plan: no broker has more on its way than it may, none gives and gets, no bundle moves that rests or
    is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.moving: dict[str, Move] = {}
        self.ended_s: dict[str | tuple[str, str], float] = {}  # by bundle; a move that failed: and its source

    def plan_moves(self, now_s: float) -> list[Move]:
        moves = super().plan_moves(now_s)
        for each in moves:
            assert each.path not in self.moving
            for rest in (each.path, (each.path, each.source)):
                assert now_s - self.ended_s.get(rest, -math.inf) >= MOVED_BUNDLE_REST_S
            assert each.source != each.target
            assert each.points > 0
            self.moving[each.path] = each
        assert {each.source for each in moves}.isdisjoint(each.target for each in moves)
        for ends in (Counter(each.source for each in self.moving.values()),
                     Counter(each.target for each in self.moving.values())):  # fmt: skip
            assert max(ends.values(), default=0) <= MOVES_PER_BROKER_MAX
        return moves

    def end_move(self, path: str, moved: bool, now_s: float) -> None:
        source = self.moving.pop(path).source
        self.ended_s[path if moved else (path, source)] = now_s
        super().end_move(path, moved, now_s)


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_breaks_a_bound_whatever_happens(seed: int) -> None:
    rng, watched = random.Random(seed), Watched()
    cluster = BalanceSimulation(seed, brokers=12, bundles=600, rule=watched, noise=0.2)
    for step in range(120):
        cluster.run(BALANCE_CHECK_INTERVAL_S * rng.randint(1, 6))
        names = [each.name for each in cluster.brokers.values() if not each.draining]
        match rng.randrange(5):
            case 0:
                cluster.add_broker(f"new{step}", rng.choice((0.5, 1.0, 2.0)))
            case 1 if len(names) > 6:
                cluster.kill(rng.choice(names))
            case 2 if len(names) > 6:
                cluster.drain(rng.choice(names))
            case _:
                cluster.burst(rng.choice(cluster.bundles), rng.choice((1.0, 10.0)))
    assert watched.ended_s, "something has moved"


# ------------------------------------------------------------------------------------------------ one rule each


def feed(balancer: Balancer, *reports: BrokerLoad, checks: int = BELIEVED_REPORTS_MIN, from_s: float = 0.0) -> float:
    now_s = from_s
    for _ in range(checks):
        now_s += BALANCE_CHECK_INTERVAL_S
        for each in reports:
            balancer.add_report(each, now_s)
    return now_s


def report(name: str, *loads: float, score: float | None = None, **more: object) -> BrokerLoad:
    bundles = [MovableBundle(f"/{name}/{at}", load) for at, load in enumerate(loads)]
    return BrokerLoad(name, sum(loads) if score is None else score, sum(loads), bundles)._replace(**more)  # type: ignore[arg-type]


def test_the_hot_gives_to_the_cold_what_brings_both_to_the_mean() -> None:
    balancer = Balancer()
    now_s = feed(balancer, report("hot", *[10.0] * 6), report("cold", 20.0))
    moves = balancer.plan_moves(now_s)
    assert [(each.source, each.target, each.points) for each in moves] == [("hot", "cold", 10.0)] * 2
    assert balancer.plan_moves(now_s) == [], "what is on its way counts"


def test_what_is_left_of_a_gap_is_not_filled_with_crumbs() -> None:
    balancer = Balancer()
    moves = balancer.plan_moves(feed(balancer, report("hot", *[20.0] * 4, *[2.0] * 10), report("cold", 40.0)))
    assert [each.points for each in moves] == [20.0]
    balancer = Balancer()
    moves = balancer.plan_moves(feed(balancer, report("hot", 20.0, 20.0, 20.0, *[3.5] * 10), report("cold", 42.0)))
    assert [round(each.points, 1) for each in moves] == [20.0, 3.5], "that is no crumb"


def test_one_bundle_moves_rather_than_crumbs_if_its_target_is_not_too_busy_then() -> None:
    balancer = Balancer()
    moves = balancer.plan_moves(feed(balancer, report("hot", *[8.0] * 3, *[0.8] * 5), report("cold", *[8.0] * 2)))
    assert [each.points for each in moves] == [8.0], "it closes 4 of 12, four crumbs close 3.2"
    balancer = Balancer()
    moves = balancer.plan_moves(feed(balancer, report("hot", *[9.0] * 2, *[1.2] * 5), report("cold", *[6.0] * 2)))
    assert [each.points for each in moves] == [9.0], "18 is the mean, and 21 is tolerated: one pause, not four"
    balancer = Balancer()
    moves = balancer.plan_moves(feed(balancer, report("hot", *[8.0] * 3, *[2.0] * 2), report("cold", *[8.0] * 2)))
    assert [each.points for each in moves] == [2.0, 2.0], "these are no crumbs"
    balancer = Balancer()
    moves = balancer.plan_moves(feed(balancer, report("hot", *[14.0] * 3, *[1.0] * 8), report("cold", *[10.0] * 2)))
    assert [round(each.points, 1) for each in moves] == [14.0], "35 is the mean, and 34 is not hot"
    balancer = Balancer()
    moves = balancer.plan_moves(feed(balancer, report("hot", 30.0, *[3.0] * 10), report("cold", *[10.0] * 2)))
    assert [round(each.points, 1) for each in moves] == [3.0] * 4, "40 is the mean, and 50 is too hot"


def test_small_bundles_are_not_worth_their_pauses_while_their_broker_is_tolerably_busy() -> None:
    balancer = Balancer()
    small = [0.5] * 46
    assert balancer.plan_moves(feed(balancer, report("hot", *small), report("mean", 20.0), report("low", 17.0))) == []
    balancer = Balancer()
    moves = balancer.plan_moves(
        feed(balancer, report("hot", *small, *[0.5] * 10), report("mean", 20.0), report("low", 14.0))
    )
    assert len(moves) == 3, "28 is more than a fifth above the mean, 20.7, and 26.5 is not"
    balancer = Balancer()
    moves = balancer.plan_moves(feed(balancer, *(report(f"b{at}", *small) for at in range(3)), report("new", 1.0)))
    assert {each.target for each in moves} == {"new"}, "a cold broker gets small ones, too"


def test_what_is_left_of_a_gap_is_measured_again_before_small_bundles_move() -> None:
    balancer, cold = Balancer(), report("cold", 20.0)
    now_s = feed(balancer, report("hot", *[30.0] * 3, *[1.0] * 10), cold)
    first = balancer.plan_moves(now_s)
    assert [each.points for each in first] == [30.0]
    balancer.end_move(first[0].path, True, now_s)
    left, got = report("hot", *[30.0] * 2, *[1.0] * 30), report("cold", 50.0)
    now_s = feed(balancer, left, got, checks=3, from_s=now_s)
    assert balancer.plan_moves(now_s) == [], "what was expected is not measured yet"
    assert balancer.plan_moves(feed(balancer, left, got, checks=6, from_s=now_s)) != []


def test_the_averages_follow_quickly_when_brokers_are_gone_and_what_they_had_has_gone_to_others() -> None:
    for gone, expected in ((0.0, 24), (20.0, 30)):
        balancer = Balancer()
        before = [report(name, 20.0) for name in ("one", "other")]
        now_s = feed(balancer, *before, report("gone", gone), checks=40)
        balancer.forget_broker("gone")
        balancer.plan_moves(now_s)
        feed(balancer, *(report(name, 24.0 + gone / 2) for name in ("one", "other")), checks=12, from_s=now_s)
        slow = [score for _, score, _ in balancer.list_scores()]
        assert all(expected - 3 < each <= 24 + gone / 2 for each in slow), slow


def test_a_broker_that_gets_a_bundle_gives_none_in_the_same_plan() -> None:
    balancer = Balancer()
    got, idle = report("got", *[1.0] * 10), report("idle", *[1.0] * 11)
    moves = balancer.plan_moves(feed(balancer, report("hot", *[20.0] * 3), report("mean", *[1.0] * 27), got, idle))
    assert [(each.source, each.target) for each in moves] == [("hot", "got")], "it is above the mean then"


def test_the_score_of_a_broker_that_carries_little_does_not_tell_what_a_bundle_costs_there() -> None:
    balancer = Balancer()
    little = report("cold", *[1.0] * 10, score=20.0)  # half of it is what a broker needs without any load
    moves = balancer.plan_moves(feed(balancer, report("hot", *[5.0] * 11), little))
    assert [round(each.points, 1) for each in moves] == [5.0] * 3, "by its score it could take one"


def test_a_slow_broker_that_is_busy_tells_what_a_bundle_costs_there() -> None:
    balancer = Balancer()
    slow = report("slow", *[1.0] * 13, score=26.0)  # it does half as much a point
    moves = balancer.plan_moves(feed(balancer, report("hot", *[3.0] * 17), slow))
    assert [round(each.points, 1) for each in moves] == [3.0] * 2, "they cost 6 each there, and 38 is the mean"


def test_a_bundle_counts_with_the_mean_of_its_last_reports_and_a_burst_at_once() -> None:
    """A broker's load is at least that of its bundles: of 72 the burst is 30."""
    for last, expected in ((2.0, [8.0]), (10.0, [10.0]), (30.0, [22.0])):
        balancer = Balancer()
        heavy = [report("hot", load, *[1.0] * 42, score=52.0) for load in (10.0, 10.0, 10.0, 10.0, 10.0, last)]
        for number, each in enumerate(heavy, 1):
            now_s = feed(balancer, each._replace(load=52.0), report("cold", 20.0), checks=1, from_s=10.0 * (number - 1))
        moves = [each for each in balancer.plan_moves(now_s) if each.path == "/hot/0"]
        assert [round(each.points) for each in moves] == expected, last


def test_a_target_counts_as_busier_until_what_it_got_is_measured() -> None:
    for checks, expected in ((3, 2), (8, 3)):
        balancer = Balancer()
        hot, cold = report("hot", *[6.9] * 12), report("cold", *[5.0] * 7, 3.0)
        before = [each._replace(score=60.0) for each in (hot, cold)]
        now_s = feed(balancer, *before, report("gone", 1e6, score=60.0))
        balancer.forget_broker("gone")
        assert balancer.plan_moves(now_s) == []
        now_s = feed(balancer, hot, cold, checks=checks, from_s=now_s)
        assert len(balancer.plan_moves(now_s)) == expected, "three of 6.9 are 20.7, and the mean is 22.4 above"


def test_one_large_bundle_does_not_go_to_and_fro() -> None:
    balancer = Balancer()
    now_s = feed(balancer, report("hot", 80.0), report("cold", 2.0))
    assert balancer.plan_moves(now_s) == []


def test_a_broker_that_drains_gets_nothing_and_neither_does_one_that_a_label_excludes() -> None:
    for allowed, more in (("cold", {"takes_bundles": False}), ("other", {}), ("cold", {"group": "other"})):
        balancer = Balancer()
        hot = report("hot", *[10.0] * 6)
        hot = hot._replace(bundles=[each._replace(allowed=frozenset(("hot", allowed))) for each in hot.bundles])
        now_s = feed(balancer, hot, report("cold", 1.0, **more))
        assert balancer.plan_moves(now_s) == [], more
    hot = hot._replace(bundles=[each._replace(allowed=frozenset(("hot", "cold"))) for each in hot.bundles])
    balancer = Balancer()
    assert balancer.plan_moves(feed(balancer, hot, report("cold", 1.0)))


def test_a_new_leader_and_a_broker_that_has_just_joined_wait_for_averages() -> None:
    balancer = Balancer()
    hot, cold = report("hot", *[10.0] * 6), report("cold", 1.0)
    now_s = feed(balancer, hot, cold, checks=BELIEVED_REPORTS_MIN - 1)
    assert balancer.plan_moves(now_s) == []
    assert balancer.plan_moves(feed(balancer, hot, cold, checks=1, from_s=now_s))


def test_a_move_that_costs_more_than_it_brings_is_none() -> None:
    assert not costs_more_than_it_brings(MovableBundle("/b", 1.0, topics=100, sessions=1_000), 1.0)
    assert costs_more_than_it_brings(MovableBundle("/b", 1.0, topics=100, sessions=1_000), 0.1)
    balancer, hot = Balancer(), report("hot", *[10.0] * 6)
    hot = hot._replace(bundles=[each._replace(sessions=100_000) for each in hot.bundles])
    assert balancer.plan_moves(feed(balancer, hot, report("cold", 20.0))) == []


def test_a_move_that_failed_is_undone_in_the_averages_and_its_bundle_rests() -> None:
    balancer = Balancer()
    hot, cold = report("hot", *[10.0] * 6), report("cold", 20.0)
    now_s = feed(balancer, hot, cold)
    first = balancer.plan_moves(now_s)
    for each in first:
        balancer.end_move(each.path, False, now_s)
    again = balancer.plan_moves(feed(balancer, hot, cold, checks=6, from_s=now_s))
    assert {each.path for each in again}.isdisjoint(each.path for each in first)
    assert len(again) == 2


def test_a_broker_that_does_not_answer_takes_no_part_until_it_does() -> None:
    balancer = Balancer()
    hot, cold, late = report("hot", *[10.0] * 6), report("cold", 20.0), report("late", 0.0)
    now_s = feed(balancer, hot, cold, late)
    now_s = feed(balancer, hot, cold, checks=SILENT_CHECKS_MAX, from_s=now_s)
    assert {each.target for each in balancer.plan_moves(now_s)} == {"cold"}
    assert {each.target for each in balancer.plan_moves(feed(balancer, hot, late, checks=1, from_s=now_s))} == {"late"}


def test_a_broker_that_comes_back_while_its_bundles_move_is_not_given_more_than_it_may_have() -> None:
    balancer = Balancer()
    hot, cold = report("hot", *[5.0] * 18), report("cold", 1.0)
    now_s = feed(balancer, hot, cold)
    first = balancer.plan_moves(now_s)
    assert len(first) == MOVES_PER_BROKER_MAX
    balancer.forget_broker("cold")
    now_s = feed(balancer, hot, cold, from_s=now_s)
    assert balancer.plan_moves(now_s) == [], "as many are on their way to it as may be"
    for each in first:
        balancer.end_move(each.path, True, now_s)
    assert len(balancer.plan_moves(feed(balancer, hot, cold, checks=3, from_s=now_s))) == MOVES_PER_BROKER_MAX


def test_what_a_broker_said_before_a_long_silence_does_not_count() -> None:
    balancer = Balancer()
    hot, cold = report("hot", *[10.0] * 6), report("cold", 20.0)
    now_s = feed(balancer, hot, cold)
    now_s = feed(balancer, hot, checks=1, from_s=now_s + SILENT_BROKER_FORGOTTEN_S)
    assert balancer.plan_moves(feed(balancer, report("cold", 60.0), checks=1, from_s=now_s)) == []
    balancer = Balancer()
    now_s = feed(balancer, hot, cold)
    now_s = feed(balancer, *(report(name, 20.0) for name in ("hot", "cold")), from_s=now_s + SILENT_BROKER_FORGOTTEN_S)
    assert [(name, round(score)) for name, score, _ in balancer.list_scores()] == [("cold", 20), ("hot", 20)]


def test_a_broker_that_drains_neither_gives_nor_counts_in_the_mean() -> None:
    going = {"takes_bundles": False}
    balancer = Balancer()
    now_s = feed(balancer, report("going", *[10.0] * 6, **going), report("one", 20.0), report("other", 20.0))
    assert balancer.plan_moves(now_s) == [], "its bundles leave by the drain"
    balancer = Balancer()
    loads = report("hot", *[5.0] * 13), report("mean", *[5.0] * 10), report("cold", *[5.0] * 7)
    moves = balancer.plan_moves(feed(balancer, *loads, report("empty", 0.0, **going)))
    assert [(each.source, each.target) for each in moves] == [("hot", "cold")] * 3


def test_a_bundle_that_has_just_come_stays_whoever_gave_it() -> None:
    for owned_s in (0.0, BUNDLE_OWNED_S_MIN - 1, math.nan, -math.inf):
        balancer, hot = Balancer(), report("hot", *[10.0] * 6)
        hot = hot._replace(bundles=[each._replace(owned_s=owned_s) for each in hot.bundles])
        assert balancer.plan_moves(feed(balancer, hot, report("cold", 20.0))) == [], owned_s


def test_an_idle_cluster_moves_nothing() -> None:
    balancer = Balancer()
    assert balancer.plan_moves(feed(balancer, report("one", *[0.5] * 6), report("other"))) == []


def test_loads_that_lie_move_no_more_than_the_bounds_allow() -> None:
    for lie in (math.nan, math.inf, -1.0):
        balancer = Balancer()
        assert balancer.plan_moves(feed(balancer, report("liar", 10.0, score=lie), report("cold", 1.0))) == []
        assert balancer.plan_moves(feed(balancer, report("liar", lie), report("cold", 1.0))) == []
    balancer = Balancer()
    now_s = feed(balancer, report("liar", *[1e300] * 50, score=1e300), *(report(f"b{at}", 10.0) for at in range(9)))
    moves = balancer.plan_moves(now_s)
    assert len(moves) <= MOVES_PER_BROKER_MAX
    balancer = Balancer()  # it says that it is idle, and is not: it gets what the others have too much of, and rests
    now_s = feed(balancer, report("liar", score=0.0), *(report(f"b{at}", *[4.0] * 10) for at in range(9)))
    assert len(balancer.plan_moves(now_s)) <= MOVES_PER_BROKER_MAX


def test_a_bundle_that_is_reported_twice_moves_once_at_most() -> None:
    balancer = Balancer()
    hot, cold = report("hot", *[10.0] * 6), report("cold", 20.0)
    twice = hot._replace(bundles=[*hot.bundles, hot.bundles[0]])
    assert balancer.plan_moves(feed(balancer, twice, cold)) == [], "it counts as no report"
    balancer = Balancer()
    other = hot._replace(name="other")  # two brokers say that they have it
    moves = balancer.plan_moves(feed(balancer, hot, other, cold, report("new", 20.0)))
    assert len({each.path for each in moves}) == len(moves) > 0
    for each in moves:
        balancer.end_move(each.path, True, 1_000.0)
    assert balancer.list_moves() == []


def test_a_broker_that_never_says_that_it_is_busy_does_not_get_everything() -> None:
    balancer, now_s = Balancer(), 0.0
    loads = {f"b{at}": [3.0] * 20 for at in range(4)} | {"liar": list[float]()}
    for _ in range(400):
        reports = [report(name, *carried, score=0.0 if name == "liar" else None) for name, carried in loads.items()]
        now_s = feed(balancer, *reports, checks=1, from_s=now_s)
        for each in balancer.plan_moves(now_s):
            loads[each.target].append(loads[each.source].pop())
            balancer.end_move(each.path, True, now_s)
    others = sum(sum(carried) for name, carried in loads.items() if name != "liar") / 4
    assert sum(loads["liar"]) <= (CARRIED_LOAD_RATIO_MAX + 1) * others
    assert others > 20


def test_two_leaders_plan_moves_that_the_owners_can_refuse() -> None:
    one, other = Balancer(), Balancer()
    hot, cold = report("hot", *[10.0] * 6), report("cold", 20.0)
    now_s = feed(one, hot, cold)
    feed(other, hot, cold)
    assert one.plan_moves(now_s) == other.plan_moves(now_s), "the second of two equal moves finds another owner"


@pytest.mark.parametrize(("event", "requests", "nodes"), [
    ("start of all bookies", 40, 1.1), ("take-over", 101, 6.0), ("look-ups", 2000, 10.0),
])  # fmt: skip
def test_what_a_process_asks_of_the_metadata_does_not_grow_with_the_machines(
    event: str, requests: int, nodes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nodes`: at most, for each machine. At 200 machines the answers of look-ups are remembered for a second."""
    monkeypatch.setattr("tests.balance.machines.START_S", 10.0)
    asked = count_requests(event, 200)
    assert asked.requests <= requests
    assert asked.nodes <= nodes * 200


@pytest.mark.parametrize(("bookies", "busiest"), [(20, 1.0), (200, 0.15)])
def test_processes_that_hear_of_the_same_change_read_it_one_after_another_in_a_large_cluster(
    bookies: int, busiest: float
) -> None:
    """`busiest`: of 200 reads those in the busiest 10 ms. 20 bookies are read at once, 200 within 0.2 s."""
    asked = count_requests("change of one bookie", bookies)
    assert (asked.requests, asked.nodes) == (1, 1)
    assert 0.5 * busiest < asked.busiest_share <= busiest
