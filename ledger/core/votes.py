"""The votes of a write set on one entry, and what they prove (core/recovery.py, rules 2 and 3). Pure.

One undamaged copy is positive. Only misses of bookies that are *certain* not to have the entry are negative; an error,
damage or silence answers and is no vote (M05, M06). Guards: tests/ledger/core/test_recovery_core.py,
tests/ledger/test_sabotage.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from .stored import StoredCopy


class EntryVerdict(enum.Enum):
    """The result of the votes on an entry. UNKNOWN: every slot has voted, and the votes prove nothing."""

    WAITING = enum.auto()
    POSITIVE = enum.auto()
    NEGATIVE = enum.auto()
    UNKNOWN = enum.auto()


class Votes:
    """The votes of the write set `of` (slots) on one entry."""

    __slots__ = ("answered", "found", "missing", "of")

    def __init__(self, of: Sequence[int]) -> None:
        self.of = of
        self.answered: set[int] = set()
        self.missing: set[int] = set()
        self.found: StoredCopy | None = None

    def verdict(self, misses_for_negative: int) -> EntryVerdict:
        """Returns the verdict on an entry after LAC0: `misses_for_negative` certain misses prove that it was never
        confirmed."""
        if self.found is None and len(self.missing) >= misses_for_negative:
            return EntryVerdict.NEGATIVE
        return self.found_or_unknown()

    def found_or_unknown(self) -> EntryVerdict:
        """Returns the verdict on an entry up to LAC0: it is stored, so that no miss proves anything."""
        if self.found is not None:
            return EntryVerdict.POSITIVE
        return EntryVerdict.UNKNOWN if len(self.answered) == len(self.of) else EntryVerdict.WAITING
