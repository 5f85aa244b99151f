"""A topic's log as a consumer of committed entries sees it: up to the last stable position, without what is aborted.

It takes the place of the log for everything that shows entries (`shape`, `reader`): subscriptions, readers, reads by
index, the last message, peeks, compaction. It is made with the first transaction of a topic; a topic that never saw one
shows its log. Positions and indexes are those of the log: what is left out keeps its indexes. Who adds a path on which
entries leave the broker reads from `Topic.shown` or from a subscription's `log`, never from `Topic.log`
(tests/broker/topic/test_shown.py lists who may).
"""

from __future__ import annotations

from collections.abc import Iterable

from pyroaring import BitMap

from ...proto.errors import InvalidRequest
from ...proto.names import Position
from ...proto.states import TopicState
from ...runtime.world import World
from .cache import StoredEntry
from .core.committed_shape import CommittedShape, Decided
from .log import ReadableLog, SegmentReader
from .reader import IndexedPosition


class CommittedReader:
    """The SegmentReader of what is committed: the one filter of all that reads."""

    def __init__(self, shape: CommittedShape, log: SegmentReader) -> None:
        self._shape = shape
        self._log = log

    def _shown(self, entries: list[StoredEntry]) -> list[StoredEntry]:
        if not entries or self._shape.shows_all(entries[0].position, entries[-1].position):
            return entries
        readable = self._shape.readable
        return [entry for entry in entries if readable(entry.position)]

    def cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        return self._shown(self._log.cached(position, entries_max, bytes_max))

    def get(self, position: Position) -> StoredEntry | None:
        return self._log.get(position) if self._shape.readable(position) else None

    async def read(self, position: Position, bytes_max: int, last_entry: int = 1 << 62) -> list[StoredEntry]:
        """Reads at least the entry at `position`, which is shown."""
        self._check(position)
        stable = self._shape.stable
        if position[0] == stable[0]:
            last_entry = min(last_entry, stable[1])
        return self._shown(await self._log.read(position, bytes_max, last_entry))

    async def entry(self, position: Position) -> StoredEntry:
        self._check(position)
        return await self._log.entry(position)

    def _check(self, position: Position) -> None:
        if not self._shape.readable(position):
            raise InvalidRequest(f"there is no entry {position} (any more)", position=position)

    async def locate(self, index: int) -> IndexedPosition:
        return await self._next_shown(await self._log.locate(index))

    async def locate_time(self, time_ms: int) -> IndexedPosition:
        return await self._next_shown(await self._log.locate_time(time_ms))

    async def _next_shown(self, place: IndexedPosition) -> IndexedPosition:
        position = self._shape.there(place.position)
        if not self._shape.readable(position):
            return IndexedPosition(self._shape.after(self._shape.stable), self._shape.end_index)
        if position == place.position:
            return place
        return IndexedPosition(position, (await self._log.entry(position)).first_index)

    async def index_after(self, mark: Position) -> int:
        return await self._log.index_after(mark)

    def index_now(self, mark: Position) -> int | None:
        return self._log.index_now(mark)

    async def last_shown(self) -> tuple[Position, int, int] | None:
        last = self._shape.last_there
        if last.entry_id < 0:
            return None
        entry = await self._log.entry(last)
        return last, entry.count - 1 if entry.count > 1 else -1, entry.index


class CommittedView:
    """The ReadableLog of what is committed."""

    is_compacted = False

    def __init__(self, log: ReadableLog, decided: Decided) -> None:
        self.topic = log.topic
        self.shape = CommittedShape(log.shape)
        self.shape.show(decided)
        self.reader = CommittedReader(self.shape, log.reader)
        self._log = log

    @property
    def world(self) -> World:
        return self._log.world

    @property
    def state(self) -> TopicState:
        return self._log.state

    def left_out(self) -> Iterable[tuple[int, BitMap]]:
        """Returns nothing: the shape leaves out aborted entries, and nothing is acknowledged for them."""
        return ()
