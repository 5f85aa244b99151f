"""What the benchmark of the balance says of brokers that are equally busy and carry unequal messages."""

from __future__ import annotations

from magnetar.benchmarks.balance import Carried, explain, fit_cost


def make(*of: tuple[float, float]) -> list[Carried]:
    return [Carried(score, messages_s, False) for score, messages_s in of]


def test_a_broker_needs_points_without_messages_and_points_for_each_thousand() -> None:
    fixed, each = fit_cost(make((2.5, 50.0), (3.0, 100.0), (12.0, 1000.0)))
    assert (round(fixed, 6), round(each, 6)) == (2.0, 10.0)
    assert fit_cost(make((2.0, 50.0), (4.0, 50.0))) == (3.0, 0.0), "equal messages tell nothing of their cost"


def test_the_part_of_a_score_that_is_due_to_no_message_explains_unequal_messages() -> None:
    before = make((2.5, 50.0), (3.0, 100.0), (12.0, 1000.0))
    said = explain(before, make((4.0, 200.0), (4.0, 300.0)))
    assert "of the mean score at the end, 4.0, 50% is due to no message" in said
    assert said.endswith("none had 5, so nothing moved")
    assert "so nothing moved" not in explain(before, make((40.0, 4000.0), (40.0, 3000.0)))
