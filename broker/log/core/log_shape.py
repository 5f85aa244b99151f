"""The shape of a topic's log: which ledgers it has, in which order, and where each ends.

A topic is a list of ledgers whose ids increase, so positions (ledger, entry) compare as tuples. All but the last are
closed and end at a known entry; the last one is open (until the topic is terminated) and grows. Positions are made
here and nowhere else: "the entry after", "the entry before", "how many messages are between" need the shape.
`last_entry` of the open ledger is the last *confirmed* entry: nothing beyond it is read, acknowledged or counted.
Indexes count messages, densely, over the whole topic: span n holds the indexes `first_index` … `end_index - 1`. Ledgers
that are needed no more are removed, at the front and between others: where indexes do not join, messages were trimmed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec
from pyroaring import BitMap

from ....proto.names import Position


class Span(msgspec.Struct):
    """The part of the log that one ledger of the list has. `last_entry` is -1 while it is empty."""

    ledger_id: int
    first_index: int
    last_entry: int = -1
    end_index: int = -1
    size: int = 0
    open: bool = False
    closed_ms: int = 0

    def __post_init__(self) -> None:
        if self.end_index < 0:
            self.end_index = self.first_index


class LogShape:
    """Ordered spans, oldest first. Changed by `add`, `close_span`, `remove`; what is confirmed is noted in the tail."""

    __slots__ = ("_followers", "_holes", "_ids", "_least_index", "_spans")

    def __init__(self) -> None:
        self._holes: dict[int, list[tuple[int, int]]] = {}  # ledger → (first, last) of entries that were passed over
        self._least_index = 0  # of the next message: lost ones before it had theirs
        self._ids: list[int] = []
        self._spans: dict[int, Span] = {}
        self._followers: list[LogShape] = []  # shapes that hold the same spans, and maybe others

    # ------------------------------------------------------------------ changes
    def add(self, span: Span) -> Span:
        """Appends a ledger; its id is above all before it, and they are closed."""
        assert not self._ids or span.ledger_id > self._ids[-1], "ledger ids of a topic increase"
        assert not self._ids or not self._spans[self._ids[-1]].open, "only the last ledger of a topic is open"
        self._ids.append(span.ledger_id)
        self._spans[span.ledger_id] = span
        for follower in self._followers:
            follower.add(span)
        return span

    def close_span(self, ledger_id: int, last_entry: int, end_index: int, size: int, closed_ms: int) -> None:
        """Closes a span: the ledger is CLOSED in its metadata and ends here, for ever."""
        span = self._spans[ledger_id]
        assert last_entry >= span.last_entry, "a ledger closes at or after what was confirmed"
        span.last_entry, span.end_index, span.size = last_entry, end_index, size
        span.open, span.closed_ms = False, closed_ms

    def remove(self, ledger_id: int) -> None:
        """Forgets a ledger that was trimmed from the committed list."""
        assert not self._spans[ledger_id].open, "the open ledger is never trimmed"
        self._ids.remove(ledger_id)
        del self._spans[ledger_id]
        for follower in self._followers:
            follower.remove(ledger_id)

    def pass_over(self, holes: dict[int, list[tuple[int, int]]], least_index: int) -> None:
        """Passes over lost entries: no consumer waits for these holes, and no index before `least_index` is given
        again."""
        self._holes, self._least_index = holes, least_index
        for follower in self._followers:
            follower.pass_over(holes, least_index)

    def hole(self, position: Position) -> Position | None:
        """Returns the last of the lost entries that this one is among; None: it was not passed over."""
        found = self.hole_of(position)
        return None if found is None else Position(position[0], found[1])

    def hole_of(self, position: Position) -> tuple[int, int] | None:
        """The first and the last of the lost entries that this one is among, and that were passed over."""
        found = self._holes.get(position[0]) if self._holes else None
        return next((run for run in found or () if run[0] <= position[1] <= run[1]), None)

    def there(self, position: Position) -> Position:
        """Returns the position like `at_or_after`, past lost entries that are passed over."""
        position = self.at_or_after(position)
        while (last := self.hole(position)) is not None:
            position = self.after(last)
        return position

    @property
    def last_there(self) -> Position:
        """Returns the last position like `last`, before lost entries that are passed over."""
        position = self.last
        while (run := self.hole_of(position)) is not None:
            position = self.before(Position(position[0], run[0]))
        return position

    def follow(self, follower: LogShape) -> None:
        """Gives the follower every span of this shape, now and from now on."""
        self._followers.append(follower)
        follower.pass_over(self._holes, self._least_index)
        for span in self.spans:
            follower.add(span)

    # ------------------------------------------------------------------ questions
    @property
    def spans(self) -> list[Span]:
        return [self._spans[id_] for id_ in self._ids]

    def __len__(self) -> int:
        return len(self._ids)

    def __bool__(self) -> bool:
        return True  # a log without ledgers is one

    @property
    def tail(self) -> Span:
        return self._spans[self._ids[-1]]

    def span(self, ledger_id: int) -> Span | None:
        return self._spans.get(ledger_id)

    @property
    def first_index(self) -> int:
        return self._spans[self._ids[0]].first_index if self._ids else 0

    @property
    def end_index(self) -> int:
        return max(self.tail.end_index, self._least_index) if self._ids else self._least_index

    def messages_from(self, index: int) -> int:
        """Returns how many messages at or after `index` are kept."""
        if not self._ids or index >= self.tail.end_index:
            return 0
        count = 0
        for ledger_id in reversed(self._ids):
            span = self._spans[ledger_id]
            if span.end_index <= index:
                break
            count += span.end_index - max(span.first_index, index)
        return count

    def ahead(self, index: int, messages: int) -> int:
        """The index so many kept messages after `index`; the end when there are fewer."""
        for ledger_id in self._ids:
            span = self._spans[ledger_id]
            index = max(index, span.first_index)
            if index + messages < span.end_index:
                return index + messages
            messages -= max(0, span.end_index - index)
        return self.end_index

    @property
    def size(self) -> int:
        return sum(span.size for span in self._spans.values())

    @property
    def start(self) -> Position:
        """The position before the first entry: where a cursor at `earliest` has its mark."""
        return Position(self._ids[0], -1) if self._ids else Position(-1, -1)

    @property
    def last(self) -> Position:
        """The last entry that is shown: the last confirmed one; `start` when there is none."""
        return self.confirmed

    @property
    def stable(self) -> Position:
        """The position up to which all is decided: the last confirmed entry, where there is no transaction."""
        return self.confirmed

    @property
    def confirmed(self) -> Position:
        """The last confirmed entry, shown or not (core/committed_shape.py); `start` when nothing is stored."""
        for ledger_id in reversed(self._ids):
            span = self._spans[ledger_id]
            if span.last_entry >= 0:
                return Position(ledger_id, span.last_entry)
        return self.start

    def at_or_after(self, position: Position) -> Position:
        """The first position at or after `position` where an entry is or will be."""
        ledger_id, entry_id = position
        span = self._spans.get(ledger_id)
        if span is not None and (span.open or entry_id <= span.last_entry):
            return position if entry_id >= 0 else Position(ledger_id, 0)
        for later in self._ids[bisect_right(self._ids, ledger_id) :]:
            if self._spans[later].open or self._spans[later].last_entry >= 0:
                return Position(later, 0)
        if not self._ids:
            return position
        return Position(self._ids[-1], self.tail.last_entry + 1)

    def after(self, position: Position) -> Position:
        """The place that follows `position`, across ledgers; it may not be written yet."""
        ledger_id, entry_id = position
        span = self._spans.get(ledger_id)
        if span is not None and (span.open or entry_id < span.last_entry):
            return Position(ledger_id, entry_id + 1)
        return self.at_or_after(Position(ledger_id, entry_id + 1))

    def before(self, position: Position) -> Position:
        """The last entry before `position`; the mark of a cursor that wants `position` next."""
        ledger_id, entry_id = position
        span = self._spans.get(ledger_id)
        if span is not None and entry_id > 0:
            return Position(ledger_id, min(entry_id - 1, span.last_entry)) if span.last_entry >= 0 else self.before(
                Position(ledger_id, 0)
            )
        for earlier in reversed(self._ids[: bisect_left(self._ids, ledger_id)]):
            if self._spans[earlier].last_entry >= 0:
                return Position(earlier, self._spans[earlier].last_entry)
        return self.start

    def readable(self, position: Position) -> bool:
        """Whether an entry is at exactly this position, is confirmed, and is shown."""
        span = self._spans.get(position[0])
        return span is not None and 0 <= position[1] <= span.last_entry

    def hidden_in(self, ledger_id: int) -> BitMap | None:
        """Entries of the ledger that are never shown; None: none."""
        return None

    def shown_in(self, ledger_id: int, first: int) -> int:
        """Entries of a ledger that are shown, from entry `first` on."""
        span = self._spans.get(ledger_id)
        return max(0, span.last_entry - first + 1) if span is not None else 0

    def aborted_messages(self, first: int, end: int) -> int:
        """Returns how many of the messages `first` … `end - 1` are in aborted transactions."""
        return 0

    def passed(self, mark: Position) -> Position:
        """The mark, or the last of the entries that follow it and are never shown."""
        return mark

    def has(self, position: Position) -> bool:
        """Whether an entry is at exactly this position and is confirmed, shown or not."""
        span = self._spans.get(position[0])
        return span is not None and 0 <= position[1] <= span.last_entry

    def clamp(self, mark: Position) -> Position:
        """The mark inside the log: not before its start, not after its last confirmed entry."""
        return min(max(mark, self.start), max(self.last, self.start))

    def span_of_index(self, index: int) -> Span | None:
        """The ledger of the first message at or after `index` that is kept."""
        spans = [span for span in self.spans if span.last_entry >= 0]
        place = bisect_right(spans, index, key=lambda span: span.end_index)
        return spans[place] if place < len(spans) else None

    def check(self) -> None:
        """Checks that ids increase, only the last ledger is open, and indexes do not overlap."""
        assert self._ids == sorted(self._spans), "ids are not the spans, in order"
        for ledger_id in self._ids[:-1]:
            assert not self._spans[ledger_id].open, "a ledger that is not the last is open"
        for before, behind in zip(self.spans, self.spans[1:], strict=False):
            assert before.end_index <= behind.first_index, "indexes of two ledgers overlap"
