"""Which pairs there are, and where each is met: the names of tests, and the sentences that exclude."""

from collections.abc import Sequence
from itertools import combinations

from tests.pairs.features import FEATURES

Names = tuple[str, ...]
HOMES = {
    "here": "tests/pairs/test_pairs.py::test_two_features_keep_their_promises_together",
    "processes": "tests/pairs/test_pairs_kills.py::test_two_features_keep_their_promises_through_a_kill",
    "spark": "tests/pairs/test_pairs_spark.py::test_spark_and_a_feature_keep_their_promises_together",
}


def excluded(names: Sequence[str]) -> str:
    """The sentence; "": they make sense together."""
    for one, other in combinations(names, 2):
        for first, second in ((one, other), (other, one)):
            if second in FEATURES[first].excludes:
                return FEATURES[first].excludes[second]
    return ""


def where(names: Sequence[str]) -> str:
    places = {FEATURES[name].where for name in names}
    return "spark" if "spark" in places else "processes" if "processes" in places else "here"


def pairs(place: str = "") -> list[Names]:
    """Those that are met, of all places or of one; in the order of the rows."""
    return [
        pair for pair in combinations(FEATURES, 2) if not excluded(pair) and place in ("", where(pair))
    ]  # fmt: skip


def title(names: Sequence[str]) -> str:
    return " + ".join(names)


def table() -> dict[Names, str]:
    """Of each pair the test that meets it, or the sentence that excludes it."""
    return {
        pair: f"{HOMES[where(pair)]}[{title(pair)}]" if not excluded(pair) else f"excluded: {excluded(pair)}"
        for pair in combinations(FEATURES, 2)
    }
