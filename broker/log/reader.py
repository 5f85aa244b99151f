"""Reads a topic's log (`TopicLogReader`): by position, by message index, by time; from the caches or from bookies. Also
in this file: the limit on the memory of all subscriptions of a broker for entries that they have read
(`ReadMemoryBudget`).

Consumers at the tail of a topic get entries from the tail cache. Entries that are read from bookies are added to a
second cache (all topics of the broker share both caches). A read in progress is shared: a hundred subscriptions that
catch up at the same position read from bookies once.

No entry after the last confirmed one is read. The entry of an index is found in its ledger (the list has the first
index of each ledger) by bisection over the entries, each of which has the index of its last message. The entry of a
time is found in the same way by the broker's timestamp, which never decreases along the log. The timestamp is the time
at which the entry arrived at the broker.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from ...ledger import LedgerClient, LedgerReader, LedgerWriter
from ...proto.errors import DataLost, InvalidRequest, MagnetarError
from ...proto.names import Position
from ..common.retry import SharedCallsByKey
from .cache import StoredEntry, TailCache
from .log_shape_core import (
    LOST_ENTRY_READS_MAX,
    EntrySearchResult,
    LedgerSpan,
    LogShape,
    find_first_entry_by_bisection,
    make_data_lost_error,
)


class PositionAndIndex(NamedTuple):
    """The position of an entry, and the index of its first message."""

    position: Position
    first_index: int


class TopicLogReader:
    """Reads the entries of a log that is stored on bookies. A LogEntryReader (broker/log/log.py). Every asynchronous
    method raises Unavailable if bookies do not answer."""

    def __init__(self, ledgers: LedgerClient, shape: LogShape, cache: TailCache) -> None:
        self._ledgers = ledgers
        self._shape = shape
        self._cache = cache
        self._recent = cache.recent
        self._readers: dict[int, LedgerReader] = {}
        # most logs never read
        self._reads: SharedCallsByKey[tuple[Position, int, int], list[StoredEntry]] | None = None
        self.storage_reads = 0

    def add_writer(self, writer: LedgerWriter) -> None:
        """Adds the ledger that this process writes with `writer`, so that its confirmed entries can be read at once."""
        self._readers[writer.ledger_id] = self._ledgers.make_local_reader(writer)

    def discard(self, ledger_id: int) -> None:
        """Removes the reader of a ledger, because the ledger was closed, which changes its record, or because it was
        deleted."""
        self._readers.pop(ledger_id, None)

    def get(self, position: Position) -> StoredEntry | None:
        """Returns the entry at `position` if it is in memory, else None."""
        found = self._cache.get(position)
        return self._recent.get(position) if found is None and self._recent is not None else found

    def read_cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        """Returns consecutive confirmed entries of one ledger that are in memory, beginning at `position`: at most
        `entries_max` entries, and about `bytes_max` bytes. Returns no entries if the one at `position` is not in
        memory."""
        span = self._shape.find_span_of_ledger(position[0])
        if span is None:
            return []
        found = self._cache.get_cached_entries(position, span.last_entry, entries_max, bytes_max)
        if not found and self._recent is not None:
            found = self._recent.get_cached_entries(position, span.last_entry, entries_max, bytes_max)
        return found

    async def read(self, position: Position, bytes_max: int, last_entry: int = 1 << 62) -> list[StoredEntry]:
        """Reads entries of one ledger from bookies and returns them: from `position` up to the entry id `last_entry`,
        about `bytes_max` bytes, at least one entry. Adds them to the cache of read entries. Raises InvalidRequest if
        there is no entry at `position`, or if it was trimmed; DataLost, with the range of lost entries, if the entry is
        lost; Unavailable if bookies do not answer."""
        span = self._shape.find_span_of_ledger(position[0])
        if span is None or not self._shape.has_visible_entry(position):
            raise InvalidRequest(f"there is no entry {position} (any more)", position=position)
        key = (position, bytes_max, min(span.last_entry, last_entry))
        if self._reads is None:
            self._reads = SharedCallsByKey()
        return await self._reads.run(key, lambda: self._read(*key))

    async def _read(self, position: Position, bytes_max: int, last_entry: int) -> list[StoredEntry]:
        try:
            return await self._read_stored(position, bytes_max, last_entry)
        except DataLost as error:
            lost = error
        raise make_data_lost_error(position[0], (position[1], await self._lost_upto(position))) from lost

    async def _lost_upto(self, position: Position) -> int:
        """Returns the last entry id of the range of lost entries that begins at `position`. Tries to read at most
        LOST_ENTRY_READS_MAX entries, so the range may be longer."""
        ledger_id, last = position
        span = self._shape.find_span_of_ledger(ledger_id)
        end = last if span is None else min(span.last_entry, last + LOST_ENTRY_READS_MAX)
        while last < end:
            following = Position(ledger_id, last + 1)
            if self.get(following) is not None or self._shape.skipped_lost_range(following) is not None:
                break
            try:
                await self._read_stored(following, 1, following.entry_id)
            except DataLost:
                last += 1
            except MagnetarError:
                break  # it is not known
            else:
                break
        return last

    async def _read_stored(self, position: Position, bytes_max: int, last_entry: int) -> list[StoredEntry]:
        ledger_id, first = position
        reader = await self._reader(ledger_id)
        last = min(last_entry, reader.last_entry)
        self.storage_reads += 1
        found = await reader.read_stored(first, max(first, last), bytes_max)
        parse = StoredEntry.parse
        entries = [parse(Position(ledger_id, each.entry), each.payload) for each in found]
        if self._recent is not None:
            self._recent.add_entries_of_ledger(ledger_id, entries)
        return entries

    async def read_entry(self, position: Position) -> StoredEntry:
        """Returns the entry at `position`, from memory or from bookies. Raises DataLost, with the range of lost
        entries, if it is lost; InvalidRequest if there is no such entry, or it was trimmed; LedgerNotFound if its
        ledger was deleted meanwhile; Unavailable if bookies do not answer; and the errors of the metadata."""
        cached = self.get(position)
        return cached if cached is not None else (await self.read(position, 1))[0]

    async def _reader(self, ledger_id: int) -> LedgerReader:
        reader = self._readers.get(ledger_id)
        if reader is None:
            reader = self._readers[ledger_id] = await self._ledgers.open(ledger_id)
        return reader

    # ------------------------------------------------------------------ by index and time
    async def find_position_by_index(self, index: int) -> PositionAndIndex:
        """Returns the position of the entry that contains the message with the index `index`; the position after the
        last entry if `index` is at or after the end of the log. If the message was trimmed, or if its entry is lost and
        was skipped, returns the position of the first entry after it.

        Raises DataLost if the message may be in a lost entry that was not skipped; Unavailable if bookies do not
        answer.
        """
        index = max(index, self._shape.first_index)
        span = self._shape.find_span_of_index(index)
        if span is None:
            return self._end_position()
        found, lost = await self._first(span, lambda entry: entry.index >= index)
        if lost is not None and (found is None or found.first_index > index):
            raise make_data_lost_error(span.ledger_id, lost)
        return _indexed(found) if found is not None else await self._after(span)

    async def find_position_by_time(self, time_ms: int) -> PositionAndIndex:
        """Returns the position of the first entry that arrived at or after `time_ms` (ms since the epoch); the position
        after the last entry if there is none. Raises DataLost if that entry may be a lost one: the entry before the
        lost range arrived earlier, and the entry after it did not. Raises Unavailable if bookies do not answer."""
        doubt: DataLost | None = None
        for span in self._shape.spans:
            if span.last_entry < 0:
                continue
            found, lost = await self._since(span, time_ms)
            if lost is not None:
                doubt = make_data_lost_error(span.ledger_id, lost)
            elif self._is_any_before(span, found):
                doubt = None  # it arrived before the time, and so did what is before it
            if found is not None and doubt is None:
                return _indexed(found)
            if found is not None:
                break
        if doubt is not None:
            raise doubt
        return self._end_position()

    async def find_message_index_after(self, mark: Position) -> int:
        """Returns the index of the first message after the entry `mark`; the index that the next message will get if
        there is none. Raises DataLost if the entry of that message is lost, and the entry `mark` is lost or trimmed,
        too. Raises Unavailable if bookies do not answer."""
        known = self.find_cached_message_index_after(mark)
        if known is not None:
            return known
        try:
            return (await self.read_entry(self._following(mark))).first_index
        except DataLost:
            if not self._shape.has_entry(mark):
                raise
        return (await self.read_entry(mark)).index + 1

    def find_cached_message_index_after(self, mark: Position) -> int | None:
        """Returns the index of the first message after the entry `mark`, without reading an entry; None if an entry
        would have to be read."""
        position = self._following(mark)
        span = self._shape.find_span_of_ledger(position[0])
        if span is None:
            return self._shape.end_index
        if position[1] == 0:
            return span.first_index
        if not self._shape.has_visible_entry(position):
            return span.end_index
        entry = self.get(position)
        return None if entry is None else entry.first_index

    def _following(self, mark: Position) -> Position:
        return self._shape.next_unskipped_position(Position(mark[0], mark[1] + 1))

    async def read_last_message(self) -> tuple[Position, int, int] | None:
        """Returns the last message that readers see: the position of its entry, its batch index (-1: the entry is not a
        batch) and its index; None if there is no such message. Raises the errors of `read_entry`."""
        last = self._shape.last_unskipped_position
        if last.entry_id < 0:
            return None
        entry = await self.read_entry(last)
        return last, entry.count - 1 if entry.count > 1 else -1, entry.index

    def _end_position(self) -> PositionAndIndex:
        return PositionAndIndex(self._shape.position_after(self._shape.last_position), self._shape.end_index)

    async def _after(self, span: LedgerSpan) -> PositionAndIndex:
        """Returns the position of the first entry after the span, and the index of its first message."""
        position = self._shape.next_unskipped_position(Position(span.ledger_id, span.last_entry + 1))
        return (
            _indexed(await self.read_entry(position))
            if self._shape.has_visible_entry(position)
            else self._end_position()
        )

    def _is_any_before(self, span: LedgerSpan, entry: StoredEntry | None) -> bool:
        """Returns True if the ledger has an entry before `entry`. `entry` None: if the ledger has any entry."""
        first = self._shape.next_unskipped_position(Position(span.ledger_id, 0))
        return self._shape.has_entry(first) and first < (
            Position(span.ledger_id + 1, 0) if entry is None else entry.position
        )

    async def _since(self, span: LedgerSpan, time_ms: int) -> EntrySearchResult:
        """Finds the first entry of the ledger that arrived at or after `time_ms`. Does not search a ledger whose last
        entry arrived before that."""
        last = await self._one(span, span.last_entry)
        if last is not None and last.timestamp_ms < time_ms:
            return EntrySearchResult(None)
        return await self._first(span, lambda entry: entry.timestamp_ms >= time_ms)

    async def _one(self, span: LedgerSpan, entry_id: int) -> StoredEntry | None:
        """Returns the entry with this id; None if it is lost."""
        if self._shape.skipped_lost_range(Position(span.ledger_id, entry_id)) is not None:
            return None
        try:
            return await self._stored(Position(span.ledger_id, entry_id))
        except DataLost:
            return None

    async def _stored(self, position: Position) -> StoredEntry:
        """Returns the entry at `position`, as `read_entry` does. If the entry is lost, raises DataLost without
        searching for the end of the lost range."""
        cached = self.get(position)
        return cached if cached is not None else (await self._read_stored(position, 1, position[1]))[0]

    async def _first(self, span: LedgerSpan, reached: Callable[[StoredEntry], bool]) -> EntrySearchResult:
        """Finds the first entry of the ledger for which the function `reached` returns True. `reached` must return True
        for all later entries, too."""
        return await find_first_entry_by_bisection(
            span.last_entry, lambda id_: self._stored(Position(span.ledger_id, id_)), reached,
            lambda id_: self._shape.skipped_lost_range(Position(span.ledger_id, id_)),
        )  # fmt: skip


def _indexed(entry: StoredEntry) -> PositionAndIndex:
    return PositionAndIndex(entry.position, entry.first_index)


# --------------------------------------------------------------------------------------------------- read_memory
# Memory for what subscriptions have read from bookies and not delivered: one bound for all subscriptions of a broker.
#
#     size = memory.choose_read_size(read_bytes)       what to read now: less when many subscriptions have something
#     async with memory.reserve(size)                  waits while the reads under way take all of it
#     memory.set_used_bytes_of_holder(buffer, size)    what a subscription has now; 0: nothing
#
# A read that begins makes room: the subscriptions that have used what they have least recently give it back, and read
# it again when they need it. So a subscription whose consumers take nothing keeps no other from reading, nothing waits
# for a consumer, and a lone read is always done, whatever its size. Reads under way end: they have a time-out.
#
# What a read brings is counted once: as under way until the read has ended, then as held. Subscriptions that share a
# read count its entries each, so the memory that they really use is at most what is counted. For two turns of the loop
# after a read has ended its reservation still keeps others from beginning (`settling`): its subscription delivers what
# it can before anything may be dropped for the next read. Guards: tests/broker/log/test_read_memory.py,
# tests/broker/subscription/test_catching_up.py.


CHUNK_BYTES_MIN = 64 << 10
"""Least bytes of a read, however many subscriptions there are: a shorter one costs a bookie as much."""


class ReadMemoryHolder(Protocol):
    """An object with entries in memory, which it can drop when memory is scarce. The buffer of entries that a
    subscription has read ahead implements it; ReadMemoryBudget calls it."""

    def release_memory(self) -> None:
        """Drops all entries, which can be read again, and reports 0 bytes to
        `ReadMemoryBudget.set_used_bytes_of_holder` before it returns."""
        ...


class ReadMemoryBudget:
    """Limits the memory of one broker for entries that subscriptions have read and not yet delivered. `limit`: in
    bytes; `held`: the bytes of all holders; `under_way`: the bytes of the reads in progress; `settling`: those of the
    reads that ended within the last two turns of the event loop, whose entries are in `held`; `given_back`: how often
    a holder had to drop its entries."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0  # by subscriptions
        self.under_way = 0  # asked of bookies
        self.settling = 0  # read, and perhaps not delivered yet
        self.given_back = 0  # times that a subscription had to
        self._holders: OrderedDict[ReadMemoryHolder, int] = OrderedDict()  # the one that was used last comes last
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def used_bytes(self) -> int:
        """Returns the bytes of memory that all holders and the reads in progress use."""
        return self.held + self.under_way

    def choose_read_size(self, wanted: int) -> int:
        """Returns how many bytes a subscription should read at once: `wanted`, halved until the memory limit has room
        for two and a half such reads of each subscription, or the size is at most CHUNK_BYTES_MIN. (The steps are
        coarse, so that the reads of several subscriptions at the same position are equal, and can be shared.)"""
        several = 2.5 * (len(self._holders) + 1)
        while wanted > CHUNK_BYTES_MIN and wanted * several > self.limit:
            wanted //= 2
        return wanted

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Reserves memory for a read of `size` bytes, as a context manager. First waits while other reads are in
        progress or have just ended, and the limit has no room for this one. Then makes the holders that were used least
        recently drop their entries, until the limit is met. A single read is never refused, even if it is larger than
        the limit. The caller must report what it has read (`set_used_bytes_of_holder`) in the turn of the event loop
        in which it leaves the context."""
        while (reserved := self.under_way + self.settling) and reserved + size > self.limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except BaseException:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._next_turn()  # it was ours
                raise
        self.under_way += size
        self._make_room()
        try:
            yield
        finally:
            self.under_way -= size
            self.settling += size
            soon = asyncio.get_running_loop().call_soon
            soon(soon, self._on_read_settled, size)

    def _on_read_settled(self, size: int) -> None:
        """Lets the next read begin. Called two turns of the event loop after a read has ended, when its subscription
        has delivered what it can. If the next read began earlier, it could evict the entries before they are delivered,
        and subscriptions could read for ever without delivering."""
        self.settling -= size
        self._next_turn()

    def _next_turn(self) -> None:
        """Resumes one waiting read. That read checks again whether it fits, and resumes the next one when it ends."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _make_room(self) -> None:
        while self._holders and self.held + self.under_way > self.limit:
            holder = next(iter(self._holders))
            self.given_back += 1
            holder.release_memory()
            assert holder not in self._holders, "it has given all back"

    def set_used_bytes_of_holder(self, holder: ReadMemoryHolder, size: int) -> None:
        """Stores that `holder` now has `size` bytes of entries in memory (0: none), and counts it as the most recently
        used holder."""
        self.held += size - self._holders.get(holder, 0)
        if size:
            self._holders[holder] = size
            self._holders.move_to_end(holder)
        else:
            self._holders.pop(holder, None)

    def check(self) -> None:
        """Raises AssertionError unless the counted bytes are those of the holders, and reads wait only while others are
        in progress or have just ended."""
        assert self.held == sum(self._holders.values()), "what is held is what the subscriptions hold"
        assert all(size > 0 for size in self._holders.values()), "who holds nothing is not listed"
        assert self.under_way or self.settling or not self._waiting, "nothing waits while nothing is read"
