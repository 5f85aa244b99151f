"""Closed sets: what is said in one place, read in another, perhaps by an earlier version."""

import pytest

from magnetar.proto import states
from magnetar.proto.states import BacklogQuotaState, Blocked, LedgerStays, TopicState

SETS = [each for each in vars(states).values() if isinstance(each, type) and hasattr(each, "reasons")]


@pytest.mark.parametrize("of", SETS, ids=lambda each: each.__name__)
def test_what_a_later_version_says_is_unknown_and_never_a_failure(of: type[Blocked]) -> None:
    if of.__members__:
        assert of("what a later version says") is of.UNKNOWN
        assert {"", "unknown"}.isdisjoint(of.reasons())


def test_a_reason_is_the_sentence_that_is_sent_and_shown() -> None:
    assert f"{Blocked.CAUGHT_UP}" == "everything was delivered"
    assert not Blocked.NO
    assert not LedgerStays.NO
    assert not BacklogQuotaState.NOT_REACHED
    assert next(TopicState.reasons()) is TopicState.OPENING
