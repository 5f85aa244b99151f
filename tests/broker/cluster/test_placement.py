"""Which broker gets a bundle: the better of two at random, by its load and by what it was assigned a moment ago."""

import random
from collections import Counter

from magnetar.broker.cluster.bundles_core import ASSIGNED_BUNDLE_COUNTS_S, BrokerLoadReport, BundlePlacement
from magnetar.metadata.records import BrokerRecord


def broker(name: str, *, busy: int = 0, bundles: int = 0, report: int = 0, draining: bool = False) -> BrokerRecord:
    return BrokerRecord(
        name=name, endpoint=f"{name}:1", busy_percent=busy, bundles=bundles, report=report, draining=draining
    )  # fmt: skip


def place(placement: BundlePlacement, brokers: list[BrokerRecord], count: int, now_s: float = 0.0) -> Counter[str]:
    chosen = Counter[str]()
    for number in range(count):
        found = placement.choose_broker(f"/{now_s}/{number}", brokers, now_s)
        assert found is not None
        chosen[found.name] += 1
    return chosen


def test_what_is_placed_before_anybody_reports_is_spread() -> None:
    for seed in range(50):
        chosen = place(BundlePlacement(random.Random(seed)), [broker(name) for name in "abc"], 30)
        assert max(chosen.values()) - min(chosen[name] for name in "abc") <= 6, (seed, chosen)


def test_two_brokers_get_the_same_number() -> None:
    chosen = place(BundlePlacement(random.Random(1)), [broker("a"), broker("b")], 20)
    assert chosen == {"a": 10, "b": 10}


def test_a_broker_that_drains_gets_nothing_and_with_no_other_there_is_none() -> None:
    placement = BundlePlacement(random.Random(1))
    chosen = place(placement, [broker("a", draining=True), broker("b"), broker("c")], 20)
    assert set(chosen) == {"b", "c"}
    assert placement.choose_broker("/p", [broker("a", draining=True)], 0.0) is None
    assert placement.choose_broker("/p", [], 0.0) is None


def test_a_broker_that_is_added_gets_new_bundles() -> None:
    brokers = [broker("a", bundles=20), broker("b", bundles=20), broker("new")]
    chosen = place(BundlePlacement(random.Random(1)), brokers, 12)
    assert chosen["new"] >= 6, chosen


def test_a_busy_broker_gets_fewer_though_it_has_fewer_bundles() -> None:
    brokers = [broker("a", busy=90, bundles=2), broker("b", busy=10, bundles=8)]
    assert set(place(BundlePlacement(random.Random(1)), brokers, 3)) == {"b"}


def test_the_least_busy_one_does_not_get_all_until_it_reports() -> None:
    brokers = [broker("a", busy=60, bundles=10), broker("b", busy=20, bundles=10)]
    chosen = place(BundlePlacement(random.Random(1)), brokers, 40)
    assert chosen["b"] > chosen["a"] > 5, chosen


def test_what_was_assigned_counts_until_the_broker_reports_or_for_a_while() -> None:
    placement = BundlePlacement(random.Random(1))
    assert place(placement, [broker("a"), broker("b", bundles=6)], 6) == {"a": 6}
    later = ASSIGNED_BUNDLE_COUNTS_S - 1
    assert place(placement, [broker("a"), broker("b", bundles=6)], 2, later) == {"a": 1, "b": 1}
    reported = [broker("a", bundles=6, report=1), broker("b", bundles=9)]
    assert place(placement, reported, 2, later) == {"a": 2}
    assert place(placement, [broker("a"), broker("b", bundles=6)], 1, 3 * ASSIGNED_BUNDLE_COUNTS_S) == {"a": 1}
    assert len(placement._assigned) == 1, "what was assigned long ago is forgotten"


def test_an_idle_broker_reports_nothing_and_a_change_is_reported() -> None:
    told = broker("a", busy=40, bundles=100)
    assert not BrokerLoadReport(45, 105).differs_enough_to_report(told)
    assert BrokerLoadReport(50, 100).differs_enough_to_report(told)
    assert BrokerLoadReport(40, 111).differs_enough_to_report(told)
    assert BrokerLoadReport(0, 1).differs_enough_to_report(broker("a"))
