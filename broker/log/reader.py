"""Reading a topic's log: by position, by message index, by time. Entries are served from the caches or from bookies.

The tail cache serves consumers at the tail. What is read from bookies is put into a cache of its own (both belong to
all
topics of the broker), and a read in progress is shared: a hundred subscriptions that catch up side by side read
storage
once.

Nothing beyond the last confirmed entry is read. An index is found by its ledger (the list has each one's first index)
and then by bisection over the entries, each of which has the index of its last message. A time is found the same way
by
the broker's timestamp, which never falls along the log; it is when the entry arrived, so it is at or after the
producer's publish time as far as their clocks agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar, NamedTuple

from ...ledger import LedgerClient, LedgerReader, LedgerWriter
from ...proto.errors import InvalidRequest
from ...proto.names import Position
from ...runtime.memory.later import MadeLater, a_dict
from ..common.shared_runs import SharedRuns
from .cache import StoredEntry, TailCache
from .core.log_shape import LogShape, Span


class IndexedPosition(NamedTuple):
    """An entry, and the message of the topic that it begins with."""

    position: Position
    first_index: int


class TopicLogReader(MadeLater):
    """The SegmentReader of a log on bookies (broker/log/log.py)."""

    _readers: dict[int, LedgerReader]
    _reads: SharedRuns[tuple[Position, int, int], list[StoredEntry]]
    LATER: ClassVar = {"_readers": a_dict, "_reads": lambda _: SharedRuns()}

    def __init__(self, ledgers: LedgerClient, shape: LogShape, cache: TailCache) -> None:
        self._ledgers = ledgers
        self._shape = shape
        self._cache = cache
        self._recent = cache.recent
        self.storage_reads = 0

    def writing(self, writer: LedgerWriter) -> None:
        """Sets the ledger that is written in this process: what is confirmed can be read at once."""
        self._readers[writer.ledger_id] = self._ledgers.reader_of(writer)

    def forget(self, ledger_id: int) -> None:
        """The ledger was closed (its record has changed) or deleted."""
        self._readers.pop(ledger_id, None)

    def get(self, position: Position) -> StoredEntry | None:
        """The entry, if it is in memory."""
        found = self._cache.get(position)
        return self._recent.get(position) if found is None and self._recent is not None else found

    def cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        """Confirmed entries from `position` on that are in memory; all of one ledger."""
        span = self._shape.span(position[0])
        if span is None:
            return []
        found = self._cache.run(position, span.last_entry, entries_max, bytes_max)
        if not found and self._recent is not None:
            found = self._recent.run(position, span.last_entry, entries_max, bytes_max)
        return found

    async def read(self, position: Position, bytes_max: int, last_entry: int = 1 << 62) -> list[StoredEntry]:
        """Entries of one ledger from `position` on, up to `last_entry`, at least one, from bookies."""
        span = self._shape.span(position[0])
        if span is None or not self._shape.readable(position):
            raise InvalidRequest(f"there is no entry {position} (any more)", position=position)
        key = (position, bytes_max, min(span.last_entry, last_entry))
        return await self._reads.get(key, lambda: self._read(*key))

    async def _read(self, position: Position, bytes_max: int, last_entry: int) -> list[StoredEntry]:
        ledger_id, first = position
        reader = await self._reader(ledger_id)
        last = min(last_entry, reader.last_entry)
        self.storage_reads += 1
        found = await reader.read_stored(first, max(first, last), bytes_max)
        parse = StoredEntry.parse
        entries = [parse(Position(ledger_id, each.entry), each.payload) for each in found]
        if self._recent is not None:
            self._recent.put_all(ledger_id, entries)
        return entries

    async def entry(self, position: Position) -> StoredEntry:
        cached = self.get(position)
        return cached if cached is not None else (await self.read(position, 1))[0]

    async def _reader(self, ledger_id: int) -> LedgerReader:
        reader = self._readers.get(ledger_id)
        if reader is None:
            reader = self._readers[ledger_id] = await self._ledgers.open(ledger_id)
        return reader

    # ------------------------------------------------------------------ by index and time
    async def locate(self, index: int) -> IndexedPosition:
        """The entry that holds message `index`; at or beyond the end: the place after the last entry.

        Where messages were trimmed it is the first entry after them.
        """
        index = max(index, self._shape.first_index)
        span = self._shape.span_of_index(index)
        if span is None:
            return self._end()
        found = await self._bisect(span, lambda entry: entry.index >= index)
        return IndexedPosition(found.position, found.first_index) if found is not None else self._end()

    async def locate_time(self, time_ms: int) -> IndexedPosition:
        """The first entry that arrived at or after the time; the end when there is none."""
        for span in self._shape.spans:
            if span.last_entry < 0:
                continue
            last = await self.entry(Position(span.ledger_id, span.last_entry))
            if last.timestamp_ms >= time_ms:
                found = await self._bisect(span, lambda entry: entry.timestamp_ms >= time_ms)
                assert found is not None, "the last entry of the ledger is one"
                return IndexedPosition(found.position, found.first_index)
        return self._end()

    async def index_after(self, mark: Position) -> int:
        """The index of the first message after the entry `mark`."""
        known = self.index_now(mark)
        position = self._shape.at_or_after(Position(mark[0], mark[1] + 1))
        return (await self.entry(position)).first_index if known is None else known

    def index_now(self, mark: Position) -> int | None:
        """The same; None: the entry has to be read for it."""
        position = self._shape.at_or_after(Position(mark[0], mark[1] + 1))
        span = self._shape.span(position[0])
        if span is None:
            return self._shape.end_index
        if position[1] == 0:
            return span.first_index
        if not self._shape.readable(position):
            return span.end_index
        entry = self.get(position)
        return None if entry is None else entry.first_index

    async def last_shown(self) -> tuple[Position, int, int] | None:
        last = self._shape.last
        if last.entry_id < 0:
            return None
        count = (await self.entry(last)).count
        return last, count - 1 if count > 1 else -1, self._shape.end_index - 1

    def _end(self) -> IndexedPosition:
        return IndexedPosition(self._shape.after(self._shape.last), self._shape.end_index)

    async def _bisect(self, span: Span, reached: Callable[[StoredEntry], bool]) -> StoredEntry | None:
        """The first entry of the ledger for which `reached` is true; it is true for all after it."""
        return await bisect_entries(span.last_entry, lambda id_: self.entry(Position(span.ledger_id, id_)), reached)


async def bisect_entries(
    last: int, entry_of: Callable[[int], Awaitable[StoredEntry]], reached: Callable[[StoredEntry], bool]
) -> StoredEntry | None:
    low, high, found = 0, last, None
    while low <= high:
        middle = (low + high) // 2
        entry = await entry_of(middle)
        if reached(entry):
            found, high = entry, middle - 1
        else:
            low = middle + 1
    return found
