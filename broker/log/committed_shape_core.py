"""The positions of a log for readers of committed entries: it ends at the last stable position, without gaps.

    shape = CommittedShape(log.shape)        as the log itself, at no cost
    shape.set_outcomes(outcomes)             from here on it ends where `outcomes` says, and leaves out what is aborted

The *last stable position* is the last entry before which, and at which, each entry is plain, committed or aborted. What
is aborted is skipped by every question: `after`, `before`, `at_or_after`, `last`, counts. So a cursor's mark moves over
it, nothing reads it, and no backlog counts it; and nothing of it is stored for any subscription. What was ever shown
stays: entries before the last stable position change no more.
`has` and `last_confirmed` are of the log, shown or not: acknowledgements are checked against those (after a take-over
the last stable position may be before what was delivered already, until the outcomes are known again).
Guarding tests: tests/broker/topic/test_transactions_core.py, tests/broker/topic/test_shown.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pyroaring import BitMap

from ...proto.names import Position
from .log_shape_core import LogShape

# ----------------------------------------------------------------------------------------------------- runs_core
# Runs of contiguous values in bitmaps, found in logarithmically many steps.


def run_end(entries: BitMap, first: int) -> int:
    """Returns the last of the contiguous values that begin with `first`, which must be in `entries`."""
    low, step = first, 1
    while entries.contains_range(low, low + step + 1):
        low, step = low + step, step * 2
    while step:
        if entries.contains_range(low, low + step + 1):
            low += step
        step //= 2
    return low


def first_of_contiguous(entries: BitMap, last: int) -> int:
    """Returns the first of the contiguous values that end with `last`, which must be in `entries`."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if entries.contains_range(middle, last + 1):
            high = middle
        else:
            low = middle + 1
    return low


# ------------------------------------------------------------------------------------------ committed_shape_core


class TxnOutcomes(Protocol):
    """The outcomes of a topic's transactions: which entries are aborted, and up to where all transactions have
    ended."""

    @property
    def aborted(self) -> Mapping[int, BitMap]:
        """Returns the entries of aborted transactions, by ledger."""

    @property
    def stable(self) -> Position:
        """Returns the last stable position; the position before the first entry of the log if there is none."""

    @property
    def stable_index(self) -> int:
        """Returns the index after the last message at or before the last stable position."""

    def aborted_messages(self, first: int, end: int) -> int:
        """Returns the number of messages with indexes `first` … `end - 1` that are in aborted transactions."""


class CommittedShape(LogShape):
    """The shape of a log for readers of committed entries. It follows the shape of the log itself
    (`LogShape.add_follower`)."""

    __slots__ = ("_decided",)

    def __init__(self, log: LogShape) -> None:
        super().__init__()
        self._decided: TxnOutcomes | None = None
        log.add_follower(self)

    def set_outcomes(self, decided: TxnOutcomes) -> None:
        """Sets the source of outcomes: from now on the shape ends at the last stable position, and skips aborted
        entries."""
        self._decided = decided

    @property
    def outcomes(self) -> TxnOutcomes:
        assert self._decided is not None, "it shows what is committed"
        return self._decided

    # ------------------------------------------------------------------ what is left out
    def _skip_aborted(self, position: Position) -> Position:
        """Returns the first position at or after `position` that is not aborted."""
        decided = self._decided
        while decided is not None and decided.aborted:
            aborted = decided.aborted.get(position[0])
            if aborted is None or position[1] < 0 or position[1] not in aborted:
                break
            position = self._following(Position(position[0], run_end(aborted, position[1])))
        return position

    def _following(self, position: Position) -> Position:
        """Returns the position after `position`, as `after` does, but without skipping aborted entries."""
        ledger_id, entry_id = position
        span = self._spans.get(ledger_id)
        if span is not None and (span.open or entry_id < span.last_entry):
            return Position(ledger_id, entry_id + 1)
        return super().at_or_after(Position(ledger_id, entry_id + 1))

    def hidden_entries_of_ledger(self, ledger_id: int) -> BitMap | None:
        decided = self._decided
        return decided.aborted.get(ledger_id) if decided is not None else None

    def skip_hidden(self, mark: Position) -> Position:
        if self._decided is None:
            return mark
        following = self._skip_aborted(first := self._following(mark))
        return mark if following == first else super().before(following)

    # ------------------------------------------------------------------ questions
    @property
    def end_index(self) -> int:
        return super().end_index if self._decided is None else self._decided.stable_index

    @property
    def last(self) -> Position:
        decided = self._decided
        if decided is None:
            return self.last_confirmed
        stable = decided.stable
        if stable[1] < 0:
            return self.start
        aborted = decided.aborted.get(stable[0])
        return stable if aborted is None or stable[1] not in aborted else self.before(stable)

    @property
    def stable(self) -> Position:
        """Returns the last stable position; its entry may be aborted."""
        return self.last_confirmed if self._decided is None else self._decided.stable

    def is_readable(self, position: Position) -> bool:
        decided = self._decided
        if decided is None:
            return self.has_entry(position)
        if position > decided.stable or not self.has_entry(position):
            return False
        aborted = decided.aborted.get(position[0])
        return aborted is None or position[1] not in aborted

    def at_or_after(self, position: Position) -> Position:
        found = super().at_or_after(position)
        return found if self._decided is None else self._skip_aborted(found)

    def after(self, position: Position) -> Position:
        return super().after(position) if self._decided is None else self._skip_aborted(self._following(position))

    def before(self, position: Position) -> Position:
        found = super().before(position)
        decided = self._decided
        while decided is not None and found[1] >= 0:
            aborted = decided.aborted.get(found[0])
            if aborted is None or found[1] not in aborted:
                break
            found = super().before(Position(found[0], first_of_contiguous(aborted, found[1])))
        return found

    def hides_none_between(self, first: Position, last: Position) -> bool:
        """Returns True if readers see each entry from `first` to `last`, which must be in one ledger."""
        decided = self._decided
        if decided is None:
            return True
        aborted = decided.aborted.get(first[0])
        return last <= decided.stable and (aborted is None or not aborted.range_cardinality(first[1], last[1] + 1))

    def count_messages_from(self, index: int) -> int:
        decided = self._decided
        if decided is None:
            return super().count_messages_from(index)
        end = decided.stable_index
        if index >= end:
            return 0
        return (
            super().count_messages_from(index) - super().count_messages_from(end) - decided.aborted_messages(index, end)
        )

    def index_after_messages(self, index: int, messages: int) -> int:
        if self._decided is None:
            return super().index_after_messages(index, messages)
        low, high, total = index, self.end_index, self.count_messages_from(index)
        if messages >= total:
            return high
        while low < high:  # the first index after which fewer than `total - messages` messages are left
            middle = (low + high) // 2
            if total - self.count_messages_from(middle + 1) > messages:
                high = middle
            else:
                low = middle + 1
        return low

    def aborted_messages(self, first: int, end: int) -> int:
        return 0 if self._decided is None or first >= end else self._decided.aborted_messages(first, end)

    def count_visible(self, ledger_id: int, first: int) -> int:
        span = self.find_span(ledger_id)
        if span is None:
            return 0
        last, decided = span.last_entry, self._decided
        if decided is None:
            return max(0, last - first + 1)
        if ledger_id >= decided.stable[0]:
            last = min(last, decided.stable[1]) if ledger_id == decided.stable[0] else -1
        if first > last:
            return 0
        aborted = decided.aborted.get(ledger_id)
        return last - first + 1 - (aborted.range_cardinality(first, last + 1) if aborted is not None else 0)
