"""The judge of names that come back, alone: a good history passes, each bad one is named."""

from collections.abc import Callable

import pytest

from magnetar.metadata.records import TopicLedger, TopicRecord
from tests.simulation.verdict.history import SOMEWHERE
from tests.simulation.verdict.lives import Group, Lives, Spoken

PATH = "/topics/public/anew/named"


def record(*ledgers: int) -> TopicRecord:
    return TopicRecord(ledgers=tuple(TopicLedger(ledger_id=each, first_index=0) for each in ledgers))


def life_of(lives: Lives, ledger: int, values: int) -> None:
    lives.recorded(PATH, exists=True)
    lives.committed(PATH, record(ledger))
    for number in range(values):
        value = f"w{ledger}:{number}"
        lives.send(value)
        lives.store(value, (ledger, number, -1))


def two_lives() -> tuple[Lives, list[Spoken]]:
    """The second one has fewer values than the first."""
    lives = Lives(PATH, lambda text: None)
    life_of(lives, 1, 5)
    stream = lives.opened("s")
    for number in range(3):
        lives.show(stream, f"w1:{number}", (1, number, -1))
    with lives.deleting("topic"):
        lives.recorded(PATH, exists=False)
        lives.committed(PATH, None)
    life_of(lives, 4, 2)
    for number in range(2):
        lives.show(stream, f"w4:{number}", (4, number, -1))
    return lives, [(f"w4:{number}", (4, number, -1)) for number in range(2)]


def test_a_later_life_with_fewer_values_passes_and_what_the_former_had_is_not_asked_for() -> None:
    lives, shown = two_lives()
    assert lives.missing() == []
    lives.end(shown, lives.missing())
    assert lives.violations == []
    assert (lives.life, lives.entries) == (1, [5, 2])


def of_transaction(outcome: bool | None) -> Callable[[Lives, list[Spoken]], None]:
    def spoil(lives: Lives, shown: list[Spoken]) -> None:
        lives.groups.append(Group(["w4:0", "w4:1"], outcome))
        if outcome is None:
            shown.pop()

    return spoil


def late(lives: Lives, shown: list[Spoken]) -> None:
    lives.send("w:9")
    lives.store("w:9", (1, 9, -1))


def called_stored(lives: Lives, shown: list[Spoken]) -> None:
    """A duplicate, says a broker that has the sequence ids of the former life."""
    lives.send("w:9")
    lives.store("w:9", SOMEWHERE)


@pytest.mark.parametrize(("violated", "spoil"), {
    "stray": lambda lives, shown: lives.show(lives.opened("r"), "w4:0", (9, 0, -1)),
    "former": lambda lives, shown: lives.show(lives.opened("r"), "w1:4", (1, 4, -1)),
    "unwanted": lambda lives, shown: lives.recorded(PATH, exists=False),
    "unwritten": late,
    "identity": lambda lives, shown: lives.show(lives.opened("r"), "w4:0", (4, 1, -1)),
    "schema": lambda lives, shown: lives.show(lives.opened("r"), "w4:0", (4, 0, -1), whole=False),
    "lost": lambda lives, shown: shown.pop(),
    "doubled": lambda lives, shown: shown.append(("w4:0", (4, 7, -1))),
    "half": of_transaction(outcome=False),
}.items())  # fmt: skip
def test_each_bad_history_is_named(violated: str, spoil: Callable[[Lives, list[Spoken]], None]) -> None:
    lives, shown = two_lives()
    spoil(lives, shown)
    lives.end(shown, lives.missing())
    assert violated in {each.partition(":")[0] for each in lives.violations}


@pytest.mark.parametrize("spoil", [called_stored, of_transaction(outcome=None)])
def test_what_was_called_stored_is_missed_and_half_of_a_transaction_is_seen(
    spoil: Callable[[Lives, list[Spoken]], None],
) -> None:
    lives, shown = two_lives()
    spoil(lives, shown)
    lives.end(shown, [])
    assert [each.partition(":")[0] for each in lives.violations] == ["lost" if spoil is called_stored else "half"]


def test_a_stream_goes_forward_alone() -> None:
    lives, _ = two_lives()
    stream = lives.opened("s")
    stream.begun = 0
    lives.show(stream, "w4:0", (4, 0, -1))
    assert lives.violations == []
    lives.show(stream, "w1:3", (1, 3, -1))
    assert [each.partition(":")[0] for each in lives.violations] == ["former"]
