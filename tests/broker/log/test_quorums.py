"""What is said of a choice of ensemble and quorums."""

import pytest

from magnetar.broker.log.log_shape_core import describe_quorum_risks


@pytest.mark.parametrize(
    ("shape", "bookies", "words"),
    [
        ((3, 3, 2), 4, []),
        ((5, 3, 2), 5, []),
        ((3, 3, 2), 3, ["no bookie is left"]),
        ((1, 1, 1), 1, ["lost with one disk"]),
        ((2, 2, 1), 3, ["lost with one disk"]),
        ((3, 2, 2), 4, ["slowest bookie"]),
        ((5, 3, 2), 4, ["made over 4"]),
        ((3, 3, 2), 2, ["fewer copies"]),
        ((3, 3, 2), 1, ["have to wait"]),
    ],
)
def test_each_risk_is_named(shape: tuple[int, int, int], bookies: int, words: list[str]) -> None:
    found = describe_quorum_risks(*shape, bookies)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))
