"""The checker sees what it is there for: a loss, a wrong place, a wrong value, a wrong order, a stranger."""

from __future__ import annotations

import pytest

from tests.chaos.checker import History, Stored, value, violations


def _topic(*numbers: int) -> list[Stored]:
    return [Stored(f"1:{at}", value("p", number)) for at, number in enumerate(numbers)]


def _history(sent: int, *acked: tuple[int, str]) -> dict[str, History]:
    return {"p": History("p", sent, dict(acked))}


def test_a_topic_that_keeps_its_promises_is_accepted() -> None:
    assert violations(_history(3, (0, "1:0"), (2, "1:2")), _topic(0, 1, 2)) == []


def test_a_repeated_message_is_accepted_and_an_unacknowledged_one_may_be_missing() -> None:
    assert violations(_history(4, (0, "1:0"), (1, "1:2")), _topic(0, 1, 1)) == []


@pytest.mark.parametrize(
    ("history", "topic", "expected"),
    [
        (_history(2, (1, "1:1")), _topic(0), "lost"),
        (_history(2, (1, "1:0")), _topic(0, 1), "and is at"),
        (_history(3, (0, "1:0")), _topic(0, 2, 1), "first appears after 2"),
        (_history(1, (0, "1:0")), [*_topic(0), Stored("1:1", "p:0:damaged")], "nobody sent"),
        (_history(1), _topic(0, 1), "nobody sent"),
        (_history(1), [Stored("1:0", value("q", 0))], "nobody sent"),
    ],
)
def test_a_broken_promise_is_named(history: dict[str, History], topic: list[Stored], expected: str) -> None:
    found = violations(history, topic)
    assert len(found) == 1
    assert expected in found[0]
