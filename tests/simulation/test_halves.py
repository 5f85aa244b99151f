"""Half messages in a simulated cluster: seeds hold, and the judge sees what is wrong."""

from collections.abc import Callable

import pytest

from magnetar.client.transactions.halves import Decision
from magnetar.proto.states import TxnId
from tests.simulation.load.halves import FATES
from tests.simulation.tiers import TRANSACTIONS, run_any
from tests.simulation.verdict.halves import HalfHistory, HalfSeen
from tests.simulation.verdict.transactions import Seen


def test_each_half_ends_as_was_said_and_is_shown_once_if_committed_whatever_crashes() -> None:
    seeds = [run_any(TRANSACTIONS, seed) for seed in (4, 23)]
    assert [each.failures for each in seeds] == [[], []]
    found = {name: sum(each.figures[name] for each in seeds) for name in seeds[0].figures}
    assert found["halves"] > 10
    assert found["halves"] > found["halves_committed"] > 5
    assert found["halves_asked"] > 10
    assert found["halves_parked"] > 2
    assert found["take_overs"] > 2
    assert sum(FATES.values()) == pytest.approx(1.0)


def _committed(half: HalfSeen) -> None:
    half.id, half.outcome = TxnId(0, 1), Decision.COMMIT
    half.said, half.told = {Decision.COMMIT}, {Decision.COMMIT}


def _rolled_back(half: HalfSeen) -> None:
    half.id, half.outcome = TxnId(0, 1), Decision.ROLLBACK
    half.said = {Decision.ROLLBACK}


def _unsaid(half: HalfSeen) -> None:
    _rolled_back(half)
    half.said = set()


def _told_otherwise(half: HalfSeen) -> None:
    _committed(half)
    half.told = {Decision.ROLLBACK}


def _open(half: HalfSeen) -> None:
    half.id, half.said = TxnId(0, 1), {Decision.COMMIT}


def _unanswered(half: HalfSeen) -> None:
    half.said = {Decision.ROLLBACK}


@pytest.mark.parametrize(
    ("history", "shown", "violated"),
    [
        (_committed, {"a": ["x"], "b": ["y"]}, []),
        (_committed, {"a": ["x", "x"], "b": ["y"]}, ["96"]),
        (_committed, {"a": ["x"], "b": []}, ["96"]),
        (_committed, {"a": ["x", "y"], "b": ["y"]}, ["96"]),
        (_rolled_back, {"a": [], "b": []}, []),
        (_rolled_back, {"a": ["x"], "b": []}, ["96"]),
        (_unsaid, {"a": [], "b": []}, ["98"]),
        (_told_otherwise, {"a": ["x"], "b": ["y"]}, ["95"]),
        (_open, {"a": [], "b": []}, ["98"]),
        (_unanswered, {"a": [], "b": []}, []),
        (_unanswered, {"a": ["x"], "b": []}, ["96"]),
    ],
)
def test_the_judge_sees_each_half_that_is_not_as_it_must_be(
    history: Callable[[HalfSeen], None], shown: dict[str, list[str]], violated: list[str]
) -> None:
    judge = HalfHistory()
    history(judge.begin({"x": "a", "y": "b"}))
    seen = {
        topic: [Seen(value, (1, at, -1), at) for at, value in enumerate(values)] for topic, values in shown.items()
    }
    assert [each.partition(":")[0] for each in judge.check(seen)] == violated
