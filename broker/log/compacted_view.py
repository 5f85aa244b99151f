"""A topic's log as a `read_compacted` consumer sees it: the compacted ledger up to the horizon, then the log.

It takes the place of the log for a subscription (`shape`, `reader`). Positions are those of the topic, so order,
cursors, acknowledgements and seeks work unchanged. What compaction removed counts as acknowledged by a subscription
that reads this way (`removed_entries`): it is skipped like any hole, and never shown.

When a topic is compacted again, the subscriptions whose position is before the new horizon start over after their mark
(broker/topic/topic.py): then no consumer holds anything of the ledger that is replaced.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from pyroaring import BitMap

from ...ledger import LedgerReader
from ...metadata.records import Compacted
from ...proto.errors import DataLost
from ...proto.names import Position
from ...proto.states import TopicState
from ...runtime.network import World
from .cache import StoredEntry
from .committed_shape_core import CommittedShape
from .compaction_core import (
    DamagedCompaction,
    SurvivorRow,
    decode_survivor,
    decode_table_piece,
    decode_table_rows,
    last_batch_index,
)
from .log import ReadableLog, SegmentReader
from .log_shape_core import LogShape, Span, bisect_entries
from .reader import PositionOfIndex
from .snapshot_ledger import StateLedgers

# ------------------------------------------------------------------------------------------------- compacted_log
# Reading a compacted ledger: by original position and by time. And the places of the topic as its readers see them.
#
# `CompactedLedger` is one compacted ledger, open: its table (broker/log/compaction_core.py) is in memory, two bytes at
# most for each entry that survives. `CompactedShape` is the log's shape with the ledgers before it that were trimmed
# and of which something survives: a consumer that reads compacted still sees them. It follows the log's own shape.


class CompactedLedger:
    """An open compacted ledger. `read` returns surviving entries as entries of the topic, at their original
    positions."""

    def __init__(self, record: Compacted, reader: LedgerReader, rows: list[SurvivorRow]) -> None:
        self.record = record
        self.rows = rows
        self._reader = reader
        self._ids = [row.ledger_id for row in rows]

    @classmethod
    async def open(cls, ledgers: StateLedgers, record: Compacted) -> CompactedLedger:
        """Opens the compacted ledger and reads its table. Raises DataLost if it is damaged or lost; LedgerNotFound if
        the ledger does not exist; Unavailable if bookies do not answer."""
        reader = await ledgers.open(record.ledger_id)
        try:
            _, pieces, body = decode_table_piece((await reader.read(reader.last_entry, reader.last_entry))[0].payload)
            for back in range(1, pieces):
                at = reader.last_entry - back
                body = decode_table_piece((await reader.read(at, at))[0].payload)[2] + body
            return cls(record, reader, decode_table_rows(body))
        except DamagedCompaction as error:
            raise DataLost(f"compacted ledger {record.ledger_id}: {error}", ledger=record.ledger_id) from error

    @property
    def horizon(self) -> Position:
        return Position(self.record.horizon_ledger, self.record.horizon_entry)

    @property
    def entries(self) -> int:
        return self.record.entries

    def find_survivor_number(self, position: Position) -> int:
        """Returns the number (from 0) of the first surviving entry at or after `position`; `entries` if there is
        none."""
        at = bisect_left(self._ids, position[0])
        if at == len(self.rows):
            return self.entries
        row = self.rows[at]
        before = row.survivors.rank(position[1] - 1) if row.ledger_id == position[0] and position[1] > 0 else 0
        return row.first + before

    def find_row(self, ledger_id: int) -> SurvivorRow | None:
        """Returns the table's row for a ledger of the topic; None if no entry of the ledger survives."""
        at = bisect_left(self._ids, ledger_id)
        return self.rows[at] if at < len(self.rows) and self._ids[at] == ledger_id else None

    async def read(self, first: int, bytes_max: int) -> list[StoredEntry]:
        """Reads surviving entries from number `first` on, at least one. Raises DataLost if one is damaged."""
        found = await self._reader.read(first, self.entries - 1, bytes_max)
        try:
            return [StoredEntry.parse(*decode_survivor(each.payload)) for each in found]
        except DamagedCompaction as error:
            raise DataLost(f"compacted ledger {self.record.ledger_id}: {error}") from error

    async def read_survivor(self, number: int) -> StoredEntry:
        return (await self.read(number, 1))[0]

    async def find_first_since(self, time_ms: int) -> StoredEntry | None:
        """Returns the first surviving entry that arrived at or after `time_ms` (ms since the epoch); None if there is
        none."""
        return (
            await bisect_entries(self.entries - 1, self.read_survivor, lambda entry: entry.timestamp_ms >= time_ms)
        ).entry

    async def read_last_survivor(self) -> tuple[StoredEntry, int] | None:
        """Returns the last surviving entry, and the batch index of its last message that was not removed (-1: the entry
        is no batch); None if no entry survives."""
        if not self.entries:
            return None
        entry = await self.read_survivor(self.entries - 1)
        return entry, last_batch_index(entry.payload)


class CompactedShape(CommittedShape):
    """The shape of a topic for consumers that read the compacted form."""

    __slots__ = ("_ghosts", "_rows")

    def __init__(self, log: LogShape) -> None:
        self._ghosts: set[int] = set()
        self._rows: dict[int, SurvivorRow] = {}
        super().__init__(log)

    def set_survivors(self, rows: list[SurvivorRow]) -> None:
        """Sets the rows of the compacted ledger: its surviving entries can be read also where the log has trimmed their
        ledger."""
        self._rows = {row.ledger_id: row for row in rows}
        for row in rows:
            if row.ledger_id not in self._spans:
                self._spans[row.ledger_id] = _ghost(row)
                insort(self._ids, row.ledger_id)
                self._ghosts.add(row.ledger_id)

    def remove(self, ledger_id: int) -> None:
        row = self._rows.get(ledger_id)
        if row is None:
            super().remove(ledger_id)
        else:
            self._spans[ledger_id] = _ghost(row)
            self._ghosts.add(ledger_id)

    def is_trimmed(self, ledger_id: int) -> bool:
        """Returns True if the log has trimmed the ledger, of which entries survive here."""
        return ledger_id in self._ghosts


def _ghost(row: SurvivorRow) -> Span:
    """Returns a span for a trimmed ledger, for the entries of it that compaction kept."""
    return Span(row.ledger_id, row.first_index, row.entries - 1, row.end_index)


# ------------------------------------------------------------------------------------------------ compacted_view


class CompactedReader:
    """The SegmentReader of the compacted ledger up to its horizon, and of the log after it."""

    def __init__(self, shape: CompactedShape, log: SegmentReader) -> None:
        self.compacted: CompactedLedger | None = None
        self._shape = shape
        self._log = log

    def set_log_reader(self, log: SegmentReader) -> None:
        """Sets the reader of the entries after the horizon."""
        self._log = log

    def _covers(self, position: Position) -> CompactedLedger | None:
        """Returns the compacted ledger if `position` is at or before its horizon, else None."""
        compacted = self.compacted
        return compacted if compacted is not None and position <= compacted.horizon else None

    def read_cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        return [] if self._covers(position) else self._log.read_cached(position, entries_max, bytes_max)

    def get(self, position: Position) -> StoredEntry | None:
        return None if self._covers(position) else self._log.get(position)

    async def read(self, position: Position, bytes_max: int, last_entry: int = 1 << 62) -> list[StoredEntry]:
        """Returns entries from the first surviving one at or after `position` on; after the horizon those of the log.
        Empty if compaction removed all of them and none follows."""
        compacted = self._covers(position)
        if compacted is None:
            return await self._log.read(position, bytes_max, last_entry)
        number = compacted.find_survivor_number(position)
        if number < compacted.entries:
            return await compacted.read(number, bytes_max)
        following = self._shape.after(compacted.horizon)
        return await self._log.read(following, bytes_max) if self._shape.is_readable(following) else []

    async def read_entry(self, position: Position) -> StoredEntry:
        return (await self.read(position, 1))[0] if self._covers(position) else await self._log.read_entry(position)

    async def locate_index(self, index: int) -> PositionOfIndex:
        compacted, place = self.compacted, await self._log.locate_index(index)
        if compacted is not None:
            for row in compacted.rows:
                if (
                    index < row.end_index
                    and row.ledger_id < place.position[0]
                    and self._shape.is_trimmed(row.ledger_id)
                ):
                    return PositionOfIndex(Position(row.ledger_id, 0), row.first_index)  # trimmed: from its ledger on
        return place

    async def locate_time(self, time_ms: int) -> PositionOfIndex:
        compacted = self.compacted
        if compacted is not None and (found := await compacted.find_first_since(time_ms)) is not None:
            return PositionOfIndex(found.position, found.first_index)
        return await self._log.locate_time(time_ms)

    async def index_after(self, mark: Position) -> int:
        return await self._log.index_after(mark)

    def cached_index_after(self, mark: Position) -> int | None:
        return self._log.cached_index_after(mark)

    async def read_last_message(self) -> tuple[Position, int, int] | None:
        compacted = self.compacted
        if compacted is not None and self._shape.last <= compacted.horizon:
            survivor = await compacted.read_last_survivor()
            return None if survivor is None else (survivor[0].position, survivor[1], survivor[0].index)
        return await self._log.read_last_message()


class CompactedView:
    """The ReadableLog for consumers that read the compacted form."""

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

    def hide_uncommitted_entries(self, log: ReadableLog) -> None:
        """From now on, only committed entries are read after the horizon. `log`: the view of the log with these entries
        (log.py)."""
        self._log = log
        self.reader.set_log_reader(log.reader)
        assert isinstance(log.shape, CommittedShape), "it is the view of what is committed"
        self.shape.set_outcomes(log.shape.outcomes)

    @property
    def compacted(self) -> CompactedLedger | None:
        return self.reader.compacted

    def switch_compacted_ledger(self, compacted: CompactedLedger) -> None:
        """Reads from another compacted ledger from now on."""
        self.shape.set_survivors(compacted.rows)
        self.reader.compacted = compacted

    def removed_entries(self) -> Iterator[tuple[int, BitMap]]:
        """Yields the entries that compaction removed, by ledger."""
        compacted = self.compacted
        if compacted is None:
            return
        horizon = compacted.horizon
        for span in self.shape.spans:
            if span.ledger_id > horizon[0]:
                break
            row = compacted.find_row(span.ledger_id)
            last = horizon[1] if span.ledger_id == horizon[0] else span.last_entry
            removed = BitMap(range(last + 1))
            if row is not None:
                removed -= row.survivors
            if removed:
                yield span.ledger_id, removed
