"""Every interleaving of a small protocol keeps the promises; a broken core is found; the reductions lose nothing."""

import pytest

from tests.exhaustive.search import Result, search
from tests.exhaustive.space import Space
from tests.exhaustive.values import FAULTS, Shape
from tests.mutants.bank import BANK, planted

SMALL = Shape((3, 3, 2), 3, 1, 1)
STATES = 50_000
EACH = 1_000


def look(shape: Shape, states: int = EACH, *, symmetric: bool = True) -> Result:
    return search(Space(shape), states, symmetric=symmetric)


@pytest.mark.parametrize("fault", ["none", "cas", "unknown"])
def test_one_entry_and_one_recoverer_are_searched_to_the_end(fault: str) -> None:
    result = look(SMALL._replace(fault=fault), STATES)
    assert result.violation == ""
    assert result.exhausted
    assert result.ends > 50


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("quorum", [(3, 3, 2), (3, 2, 2), (2, 2, 2)])
def test_two_entries_and_two_recoverers_in_part(quorum: tuple[int, int, int], fault: str) -> None:
    result = look(Shape(quorum, 3, 2, 2, fault))
    assert (result.violation, result.path) == ("", [])
    assert result.states == EACH


def test_names_make_no_difference() -> None:
    """Without symmetry there are more states, and the same verdict, on the right and on a broken core."""
    shape = SMALL._replace(fault="cas")
    whole, folded = look(shape, STATES, symmetric=False), look(shape, STATES)
    assert whole.exhausted
    assert folded.exhausted
    assert folded.states < whole.states / 3
    with planted(BANK["M05"]):
        assert look(shape, STATES, symmetric=False).violation
        assert look(shape, STATES).violation


@pytest.mark.parametrize(
    ("mutant", "shape"),
    [
        ("M01", SMALL),
        ("M05", SMALL),
        ("M05b", SMALL),
        ("M10", Shape((2, 2, 2), 3, 2, 0)),
        ("M12", Shape((2, 2, 2), 3, 1, 0)),
        ("M18", Shape((3, 2, 2), 3, 1, 1)),
    ],
)
def test_a_broken_core_is_found(mutant: str, shape: Shape) -> None:
    with planted(BANK[mutant]):
        result = look(shape, STATES)
    assert result.violation
    assert result.path, "and the way there is told"
