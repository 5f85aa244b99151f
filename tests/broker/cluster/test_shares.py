"""Limits in sum over brokers: what the leader grants, whatever it is told, and what a broker uses without a leader."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.cluster.shares_core import (
    GROW_AFTER_S,
    LIMITS_PER_REPORT_MAX,
    REST_SHARE,
    SHRINK_AFTER_S,
    SILENT_AFTER_S,
    GrantedShare,
    HeldShares,
    ShareGrants,
    ShareReport,
    WantedShare,
    divide_fairly,
)

ROUNDING = 1e-9
PARTS = st.floats(0, 1)
WANTED = st.dictionaries(st.sampled_from("abcdefgh"), PARTS, min_size=1)
ANY_NUMBER = st.floats()  # also below 0, infinite, and no number


@given(WANTED, st.floats(0, 1))
def test_what_is_divided_is_all_and_no_more(wanted: dict[str, float], room: float) -> None:
    least = REST_SHARE / 8
    shares = divide_fairly(wanted, least, room)
    assert shares.keys() == wanted.keys()
    assert all(each >= least for each in shares.values())
    assert sum(shares.values()) == pytest.approx(max(room, least * len(wanted)))


@given(WANTED, st.floats(0.5, 1))
def test_who_has_less_than_it_wants_has_no_less_than_any_other(wanted: dict[str, float], room: float) -> None:
    shares = divide_fairly(wanted, REST_SHARE / 8, room)
    for name, share in shares.items():
        if share < wanted[name] - ROUNDING:
            assert share >= max(shares.values()) - ROUNDING
            assert share >= room / len(wanted) - ROUNDING


Step = tuple[str, float, float, float]
STEPS = st.lists(st.tuples(st.sampled_from("abcde"), st.floats(0, 4), ANY_NUMBER, ANY_NUMBER), max_size=60)


@given(STEPS)
def test_whatever_is_reported_the_sum_of_what_is_granted_stays_within_the_limit(steps: list[Step]) -> None:
    grants, now, granted = ShareGrants(0.0), 0.0, dict[str, float]()
    grants.set_registered("abcde", now)
    for number, (broker, passed, wanted, held) in enumerate(steps):
        now += passed
        answer = grants.grant_shares(ShareReport(broker, "run", number, {"x": WantedShare(wanted, held)}), now)
        assert answer is not None
        grants.check()
        share = granted[broker] = answer["x"].share
        assert REST_SHARE / 5 <= share <= 1
        assert share <= max(1 - sum(granted[each] for each in granted if each != broker), REST_SHARE / 5) + ROUNDING


@given(STEPS)
def test_brokers_that_say_what_is_true_hold_the_limit_whenever_they_report(steps: list[Step]) -> None:
    grants, now = ShareGrants(0.0), 0.0
    grants.set_registered("abcde", now)
    held = {name: HeldShares(name, "run", now) for name in "abcde"}
    for each in held.values():
        each.brokers = 5
    for broker, passed, wanted, _ in steps:
        now += min(passed, 1.0)
        for name in "abcde":  # all are heard often enough
            if name != broker:
                report = held[name].make_report(now)
                held[name].on_granted(report, grants.grant_shares(report, now) or {})
        held[broker].note_use("x", wanted, throttled=passed > 2)
        report = held[broker].make_report(now)
        held[broker].on_granted(report, grants.grant_shares(report, now) or {})
        assert sum(each.get_share("x", now) for each in held.values()) <= 1 + ROUNDING
        assert grants.sum_counted("x", now) <= 1 + ROUNDING


def test_without_answers_more_than_an_equal_part_goes_first_and_less_grows_later() -> None:
    rich, poor = HeldShares("a", "run", 0.0), HeldShares("b", "run", 0.0)
    for each, share in ((rich, 0.9), (poor, 0.1)):
        each.brokers = 2
        each.note_use("x", 1.0, throttled=True)
        each.on_granted(each.make_report(0.0), {"x": GrantedShare(share, 2.0, 2)})
    at = (SHRINK_AFTER_S - 0.1, SHRINK_AFTER_S, GROW_AFTER_S - 0.1, GROW_AFTER_S, 1000.0)
    assert [rich.get_share("x", now) for now in at] == [0.9, 0.5, 0.5, 0.5, 0.5]
    assert [poor.get_share("x", now) for now in at] == [0.1, 0.1, 0.1, 0.5, 0.5]
    assert rich.get_share("of another limit", 1000.0) == 0.5


def test_the_only_broker_has_everything_and_needs_no_leader() -> None:
    held = HeldShares("a", "run", 0.0)
    held.brokers = 1
    assert [held.get_share("x", now) for now in (0.0, 7.0, 100.0)] == [1.0, 1.0, 1.0]


def test_a_share_grows_after_the_other_one_has_said_that_it_shrank() -> None:
    grants = ShareGrants(0.0)
    grants.set_registered("ab", 0.0)

    def ask(broker: str, number: int, wanted: float, held: float) -> float:
        report = ShareReport(broker, "run", number, {"x": WantedShare(wanted, held)})
        answer = grants.grant_shares(report, float(number))
        assert answer is not None
        return answer["x"].share

    ask("b", 0, 0.0, 0.025)
    assert ask("a", 1, 1.0, 0.025) == pytest.approx(0.975)
    assert ask("b", 2, 1.0, 0.025) == pytest.approx(0.025), "a may use the rest until it has its answer"
    assert ask("a", 3, 1.0, 0.975) == pytest.approx(0.5)
    assert ask("b", 3, 1.0, 0.025) == pytest.approx(0.025), "the answer to a may be lost"
    assert ask("a", 4, 1.0, 0.5) == pytest.approx(0.5)
    assert ask("b", 4, 1.0, 0.025) == pytest.approx(0.5)


def test_a_silent_broker_counts_with_an_equal_part_before_it_uses_it() -> None:
    grants = ShareGrants(0.0)
    grants.set_registered("ab", 0.0)
    for number in range(20):
        now = float(number)
        answer = grants.grant_shares(ShareReport("a", "run", number, {"x": WantedShare(1.0, 1.0)}), now)
        assert answer is not None
        if number == 0:
            grants.grant_shares(ShareReport("b", "run", 0, {}), now)
        elif number <= SILENT_AFTER_S:
            assert answer["x"].share == pytest.approx(0.975)
        else:
            assert answer["x"].share == pytest.approx(0.5)


def test_a_report_that_comes_late_is_ignored_and_a_restarted_broker_begins_anew() -> None:
    grants = ShareGrants(0.0)
    grants.set_registered("a", 0.0)
    report = ShareReport("a", "run", 5, {"x": WantedShare(1.0, 0.0)})
    assert grants.grant_shares(report, 0.0) is not None
    assert grants.grant_shares(report._replace(number=4, limits={}), 0.1) is None
    assert grants.grant_shares(report, 0.2) is None
    assert grants.grant_shares(report._replace(run="next", number=1), 0.3) is not None
    grants.check()


def test_a_broker_that_ended_is_forgotten_and_a_report_is_bounded() -> None:
    grants = ShareGrants(0.0)
    grants.set_registered("ab", 0.0)
    many = {f"limit {number}": WantedShare(1.0, 1.0) for number in range(LIMITS_PER_REPORT_MAX + 10)}
    answer = grants.grant_shares(ShareReport("a", "run", 0, many), 0.0)
    assert answer is not None
    assert len(answer) == LIMITS_PER_REPORT_MAX
    grants.set_registered("b", 1.0)
    assert grants.brokers == 2, "it serves on without its registration, perhaps"
    grants.set_registered("b", GROW_AFTER_S + 1.0)
    assert grants.brokers == 1
    grants.check()


def test_what_a_broker_wants_is_what_it_uses_or_everything_if_something_waits() -> None:
    held = HeldShares("a", "run", 0.0)
    held.brokers = 2
    held.note_use("x", 0.5, throttled=False)
    assert held.make_report(0.0).limits["x"].wanted == pytest.approx(0.55)
    held.note_use("x", 0.01, throttled=True)
    assert held.make_report(0.0).limits["x"].wanted == 1.0
    for _ in range(10):
        held.note_use("x", 0.0, throttled=False)
    assert not held.wants_any
    held.note_use("y", math.inf, throttled=False)
    assert not held.wants_any
