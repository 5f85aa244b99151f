"""Pairs that do not hold yet, and the defect in plain words. A test of such a pair has to fail (xfail, strict): who
mends the defect takes its rows away."""

from collections.abc import Collection

DEFECTS: dict[tuple[str, str], str] = {}


def defect_of(names: Collection[str]) -> str:
    """"": none is known."""
    return next((why for pair, why in DEFECTS.items() if set(pair) <= set(names)), "")
