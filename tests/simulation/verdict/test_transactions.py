"""The judge of transactions knows a late commit of a former epoch from one that the next epoch makes."""

from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.transaction.records_core import TransactionsCommitted
from magnetar.broker.transaction.state_core import CoordinatorState

from .transactions import Coordination

COMMIT = [TransactionsCommitted([(7, [])], [])]


@pytest.fixture
def judge() -> Coordination:
    simulation: Any = SimpleNamespace(add_line=lambda text: None)
    return Coordination(simulation)


def test_a_commit_that_is_durable_after_a_take_over_that_did_not_read_it_is_a_violation(judge: Coordination) -> None:
    append, txns = judge.appending(0, COMMIT)
    judge.taken_over(0, CoordinatorState())
    judge.appended(0, append, txns, COMMIT)
    assert len(judge.violations) == 1


def test_the_next_epoch_may_commit_what_the_one_before_could_not(judge: Coordination) -> None:
    late, txns = judge.appending(0, COMMIT)
    judge.taken_over(0, CoordinatorState())
    judge.appended(0, *judge.appending(0, COMMIT), COMMIT)
    assert not judge.violations
    judge.appended(0, late, txns, COMMIT)
    assert len(judge.violations) == 1, "the late one still is a violation"
