"""A topic's log as a `read_compacted` consumer sees it: the compacted ledger up to the horizon, then the log.

It takes the place of the log for a subscription (`shape`, `reader`). Positions are those of the topic, so order,
cursors, acknowledgements and seeks work unchanged. What compaction removed counts as acknowledged by a subscription
that reads this way (`left_out`): it is skipped like any hole, and never shown.

When a topic is compacted again, the subscriptions whose position is before the new horizon start over after their mark
(broker/topic/topic.py): then no consumer holds anything of the ledger that is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyroaring import BitMap

from ...proto.names import Position
from ...proto.states import TopicState
from ...runtime.world import World
from .cache import StoredEntry
from .compacted_log import CompactedLog, CompactedShape
from .core.committed_shape import CommittedShape
from .log import ReadableLog, SegmentReader
from .reader import IndexedPosition


class CompactedReader:
    """The SegmentReader of the compacted ledger, and past its horizon that of the log."""

    def __init__(self, shape: CompactedShape, log: SegmentReader) -> None:
        self.compacted: CompactedLog | None = None
        self._shape = shape
        self._log = log

    def read_on_in(self, log: SegmentReader) -> None:
        self._log = log

    def _covers(self, position: Position) -> CompactedLog | None:
        compacted = self.compacted
        return compacted if compacted is not None and position <= compacted.horizon else None

    def cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        return [] if self._covers(position) else self._log.cached(position, entries_max, bytes_max)

    def get(self, position: Position) -> StoredEntry | None:
        return None if self._covers(position) else self._log.get(position)

    async def read(self, position: Position, bytes_max: int, last_entry: int = 1 << 62) -> list[StoredEntry]:
        """Reads from the first entry that survives at or after `position`; none when all of those were removed and
        nothing follows."""
        compacted = self._covers(position)
        if compacted is None:
            return await self._log.read(position, bytes_max, last_entry)
        number = compacted.number_of(position)
        if number < compacted.entries:
            return await compacted.read(number, bytes_max)
        following = self._shape.after(compacted.horizon)
        return await self._log.read(following, bytes_max) if self._shape.readable(following) else []

    async def entry(self, position: Position) -> StoredEntry:
        return (await self.read(position, 1))[0] if self._covers(position) else await self._log.entry(position)

    async def locate(self, index: int) -> IndexedPosition:
        compacted, place = self.compacted, await self._log.locate(index)
        if compacted is not None:
            for row in compacted.rows:
                if index < row.end_index and row.ledger_id < place.position[0] and self._shape.trimmed(row.ledger_id):
                    return IndexedPosition(Position(row.ledger_id, 0), row.first_index)  # trimmed: from its ledger on
        return place

    async def locate_time(self, time_ms: int) -> IndexedPosition:
        compacted = self.compacted
        if compacted is not None and (found := await compacted.first_since(time_ms)) is not None:
            return IndexedPosition(found.position, found.first_index)
        return await self._log.locate_time(time_ms)

    async def index_after(self, mark: Position) -> int:
        return await self._log.index_after(mark)

    def index_now(self, mark: Position) -> int | None:
        return self._log.index_now(mark)

    async def last_shown(self) -> tuple[Position, int, int] | None:
        compacted = self.compacted
        if compacted is not None and self._shape.last <= compacted.horizon:
            survivor = await compacted.last()
            return None if survivor is None else (survivor[0].position, survivor[1], survivor[0].index)
        return await self._log.last_shown()


class CompactedView:
    """The ReadableLog of a consumer that reads compacted."""

    is_compacted = True

    def __init__(self, log: ReadableLog) -> None:
        self.topic = log.topic
        self.shape = CompactedShape(log.shape)
        self.reader = CompactedReader(self.shape, log.reader)
        self._log = log

    @property
    def world(self) -> World:
        return self._log.world

    @property
    def state(self) -> TopicState:
        return self._log.state

    def show_committed(self, log: ReadableLog) -> None:
        """Reads from here on, past the horizon, `log`, which shows what is committed (committed_view.py)."""
        self._log = log
        self.reader.read_on_in(log.reader)
        assert isinstance(log.shape, CommittedShape), "it is the view of what is committed"
        self.shape.show(log.shape.decided)

    @property
    def compacted(self) -> CompactedLog | None:
        return self.reader.compacted

    def show(self, compacted: CompactedLog) -> None:
        self.shape.cover(compacted.rows)
        self.reader.compacted = compacted

    def left_out(self) -> Iterator[tuple[int, BitMap]]:
        """Yields the entries that compaction removed, by ledger."""
        compacted = self.compacted
        if compacted is None:
            return
        horizon = compacted.horizon
        for span in self.shape.spans:
            if span.ledger_id > horizon[0]:
                break
            row = compacted.row(span.ledger_id)
            last = horizon[1] if span.ledger_id == horizon[0] else span.last_entry
            removed = BitMap(range(last + 1))
            if row is not None:
                removed -= row.survivors
            if removed:
                yield span.ledger_id, removed
