"""Text that a stranger may give, as a whole number.

`str.isdigit` is true of `²` and of ten thousand nines, and `int` raises ValueError for both; `int` takes the digits of
every script, so that one number has many spellings. Guard: tests/proto/test_digits.py, which also finds other ways.
"""

from __future__ import annotations

DIGITS_MAX = 19
"""Digits of a number below 2^63."""


def whole(text: str) -> int | None:
    """The number that is written in so many ASCII digits at most; None: the text is none."""
    return int(text) if len(text) <= DIGITS_MAX and text.isascii() and text.isdigit() else None
