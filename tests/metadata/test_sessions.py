"""The table of sessions, alone: who expires, and when nobody does."""

import pytest

from magnetar.metadata.tree_core import TIMER_LATE_S, MetadataSessions
from magnetar.proto.errors import SessionExpired


def _two() -> MetadataSessions:
    sessions = MetadataSessions()
    sessions.open("a", 10.0, 0.0)
    sessions.open("b", 20.0, 0.0)
    return sessions


def test_a_session_expires_when_its_timeout_has_passed_since_its_last_sign_of_life() -> None:
    sessions = _two()
    assert sessions.next_deadline() == 10.0
    assert sessions.expire(9.99) == []
    assert sessions.renew_session("a", 8.0) == 10.0
    assert sessions.expire(10.0) == []
    assert sessions.next_deadline() == 18.0
    assert sessions.expire(18.0) == ["a"]
    assert list(sessions.open_ones) == ["b"]
    with pytest.raises(SessionExpired):
        sessions.renew_session("a", 18.0)
    sessions.check()


def test_a_closed_session_has_expired_and_closing_twice_says_so() -> None:
    sessions = _two()
    assert sessions.close("a")
    assert not sessions.close("a")
    assert "a" not in sessions
    with pytest.raises(SessionExpired) as error:
        sessions.get("a")
    assert error.value.fields == {"session": "a"}


def test_a_session_without_a_deadline_lives_until_it_is_abandoned() -> None:
    sessions = MetadataSessions()
    sessions.open("here", 5.0, None)
    assert sessions.next_deadline() is None
    assert sessions.expire(1e9) == []
    sessions.renew_session("here", 1.0)
    sessions.abandon("here", 100.0)
    sessions.abandon("unknown", 100.0)
    assert sessions.expire(104.9) == []
    assert sessions.expire(105.0) == ["here"]


def test_who_slept_does_not_judge() -> None:
    """The process was stopped over both deadlines: signs of life may lie unread, so all get their time again."""
    sessions = _two()
    assert sessions.expire(25.0 + TIMER_LATE_S) == []
    assert sorted(sessions.open_ones) == ["a", "b"]
    first = sessions.next_deadline()
    assert first is not None
    assert first >= 25.0 + TIMER_LATE_S + 10.0
    assert sessions.expire(first) == ["a"]
    sessions.check()
