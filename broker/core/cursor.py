"""A cursor: what one subscription has acknowledged, exactly, however many holes there are.

State: `mark` (mark-delete: everything up to and with it is acknowledged), `acked` (whole entries behind the mark, one
roaring bitmap per ledger: the holes) and `partial` (entries of which only some batch indexes are acknowledged).

Rules (ledger protocol §3.5, invariants 36 and 44)
- The mark advances only over contiguous acknowledged entries, and never goes backwards; `seek` alone sets it freely.
- Nothing beyond the last confirmed entry can be acknowledged: the caller checks that against the log's shape.
- No hole is ever dropped. There is no cap: a bitmap of a million holes takes about 125 KB.
- `version` grows with every change; `persisted` is the version that the cursor ledger holds. `dirty` compares them.
- A batch whose size is not known yet (acknowledged after a restart) keeps its bits; `settle` decides when it is read.

Guarding tests: tests/broker/core/test_cursor.py (a Hypothesis model compares with plain sets).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pyroaring import BitMap

from ...proto.names import Position
from .log_shape import LogShape


@dataclass(slots=True)
class Partial:
    """A batch acknowledged in part. `size` 0: not known."""

    acked: BitMap
    size: int = 0


@dataclass(slots=True)
class CursorState:
    """What is stored: enough to continue after a crash (broker/format/cursor.py)."""

    mark: Position
    acked: dict[int, BitMap] = field(default_factory=dict)
    partial: dict[Position, Partial] = field(default_factory=dict)


class Cursor:
    __slots__ = ("_shape", "acked", "mark", "partial", "persisted", "persisted_mark", "version")

    def __init__(self, shape: LogShape, state: CursorState) -> None:
        self._shape = shape
        self.mark = state.mark
        self.acked = state.acked
        self.partial = state.partial
        self.version = 0
        self.persisted = 0
        self.persisted_mark = state.mark

    # ------------------------------------------------------------------ intents
    def ack(self, position: Position) -> bool:
        """The whole entry is done. False: it was already."""
        if self.is_acked(position):
            return False
        self.version += 1
        if self.partial:
            self.partial.pop(position, None)
        if position == self._shape.after(self.mark):
            self.mark = position
            if self.acked:
                self._advance()
            return True
        ledger_id, entry_id = position
        holes = self.acked.get(ledger_id)
        if holes is None:
            holes = self.acked[ledger_id] = BitMap()
        holes.add(entry_id)
        return True

    def ack_batch(self, position: Position, indexes: Iterable[int], size: int = 0) -> bool:
        """Some messages of a batch of `size` are done; with the last of them the entry is. True: the entry is done."""
        if self.is_acked(position):
            return False
        partial = self.partial.get(position)
        if partial is None:
            partial = self.partial[position] = Partial(BitMap(), size)
        partial.size = partial.size or size
        before = len(partial.acked)
        partial.acked.update(indexes)
        if partial.size:
            partial.acked &= BitMap(range(partial.size))
        if len(partial.acked) != before:
            self.version += 1
        return self.settle(position, partial.size)

    def settle(self, position: Position, size: int) -> bool:
        """The size of a batch became known: if all of it is acknowledged, the entry is."""
        partial = self.partial.get(position)
        if partial is None or not size:
            return False
        partial.size = size
        return len(partial.acked) >= size and self.ack(position)

    def ack_cumulative(self, position: Position) -> bool:
        """Everything up to and with the entry is done. False: it was already."""
        if position <= self.mark:
            return False
        self.version += 1
        self.mark = position
        self._forget_behind_mark()
        self._advance()
        return True

    def ack_cumulative_batch(self, position: Position, last_index: int, size: int = 0) -> bool:
        """Everything before the entry, and its messages 0 … last_index."""
        if size and last_index + 1 >= size:
            return self.ack_cumulative(position)
        moved = self.ack_cumulative(self._shape.before(position))
        version = self.version
        if position > self.mark:
            self.ack_batch(position, range(last_index + 1), size)
        return moved or self.version != version

    def seek(self, mark: Position) -> None:
        """Starts over behind `mark`: the only move that may go backwards; all holes are forgotten."""
        self.version += 1
        self.mark = mark
        self.acked.clear()
        self.partial.clear()

    @property
    def safe_mark(self) -> Position:
        """Up to here nothing is needed any more, neither now nor after a crash: what may be trimmed.

        The persisted mark lags behind the mark; after a seek backwards it is ahead of it until the next write.
        """
        return min(self.mark, self.persisted_mark)

    def fit(self) -> None:
        """After a restart: the mark inside the log, no hole where there is no entry, and the mark as far as it goes."""
        shape = self._shape
        self.mark = shape.clamp(self.mark)
        for ledger_id, holes in list(self.acked.items()):
            span = shape.span(ledger_id)
            holes &= BitMap(range(span.last_entry + 1)) if span is not None else BitMap()
            if not holes:
                del self.acked[ledger_id]
        for position in [position for position in self.partial if not shape.readable(position)]:
            del self.partial[position]
        self._advance()

    def stored(self, version: int, mark: Position) -> None:
        """The fact: the state of that version (with that mark) is durable."""
        assert version <= self.version, "a version was stored that never was"
        if version >= self.persisted:
            self.persisted, self.persisted_mark = version, mark

    # ------------------------------------------------------------------ questions
    @property
    def dirty(self) -> bool:
        return self.version != self.persisted

    def is_acked(self, position: Position) -> bool:
        if position <= self.mark:
            return True
        if not self.acked:
            return False
        holes = self.acked.get(position[0])
        return holes is not None and position[1] in holes

    def acked_indexes(self, position: Position) -> list[int]:
        """Batch indexes of the entry that are done and are not to be shown again."""
        if not self.partial:
            return []
        partial = self.partial.get(position)
        return list(partial.acked) if partial is not None else []

    @property
    def hole_entries(self) -> int:
        """Entries acknowledged behind the mark."""
        return sum(len(holes) for holes in self.acked.values())

    @property
    def hole_ranges(self) -> int:
        """Contiguous stretches of them."""
        return sum(_ranges(holes) for holes in self.acked.values())

    def state(self) -> CursorState:
        """A copy to be stored."""
        return CursorState(
            self.mark,
            {ledger_id: holes.copy() for ledger_id, holes in self.acked.items()},
            {position: Partial(partial.acked.copy(), partial.size) for position, partial in self.partial.items()},
        )

    def check(self) -> None:
        """No hole at or in front of the mark; none touches it; no empty bitmap; partial entries are not done."""
        assert self.persisted <= self.version, "more is stored than was ever changed"
        assert not self.is_hole(self._shape.after(self.mark)), "the mark could advance and did not"
        for ledger_id, holes in self.acked.items():
            assert holes, "an empty bitmap is kept"
            assert Position(ledger_id, holes.min()) > self.mark, "a hole lies in front of the mark"
        for position, partial in self.partial.items():
            assert not self.is_acked(position), "a finished entry is kept as partial"
            assert not partial.size or len(partial.acked) < partial.size, "a whole batch is kept as partial"

    def is_hole(self, position: Position) -> bool:
        holes = self.acked.get(position[0])
        return holes is not None and position[1] >= 0 and position[1] in holes

    # ------------------------------------------------------------------ inside
    def _advance(self) -> None:
        following = self._shape.after(self.mark)
        while self.is_hole(following):
            self.mark = following
            following = self._shape.after(following)
        self._forget_behind_mark()

    def _forget_behind_mark(self) -> None:
        ledger_id, entry_id = self.mark
        for id_ in [id_ for id_ in self.acked if id_ < ledger_id]:
            del self.acked[id_]
        holes = self.acked.get(ledger_id)
        if holes is not None:
            holes.remove_range(0, entry_id + 1)
            if not holes:
                del self.acked[ledger_id]
        if self.partial:
            for position in [position for position in self.partial if position <= self.mark]:
                del self.partial[position]


def _ranges(holes: BitMap) -> int:
    shifted = holes.shift(1)
    return len(holes) - len(holes & shifted)
