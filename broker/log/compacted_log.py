"""Reading a compacted ledger: by original position and by time. And the places of the topic as its readers see them.

`CompactedLog` is one compacted ledger, open: its table (broker/log/format/compacted.py) is in memory, two bytes at most
for each entry that survives. `CompactedShape` is the log's shape with the ledgers before it that were trimmed and of
which something survives: a consumer that reads compacted still sees them. It follows the log's own shape.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from ...ledger import LedgerReader
from ...metadata.records import Compacted
from ...proto.errors import DataLost
from ...proto.names import Position
from .cache import StoredEntry
from .core.committed_shape import CommittedShape
from .core.compaction import last_shown
from .core.log_shape import LogShape, Span
from .core.lookup import first_reached
from .format.compacted import DamagedCompaction, Row, decode_piece, decode_rows, decode_survivor
from .snapshot_ledger import StateLedgers


class CompactedLog:
    """A compacted ledger. `open` it; `read` gives survivors as entries of the topic, at their original positions."""

    def __init__(self, record: Compacted, reader: LedgerReader, rows: list[Row]) -> None:
        self.record = record
        self.rows = rows
        self._reader = reader
        self._ids = [row.ledger_id for row in rows]

    @classmethod
    async def open(cls, ledgers: StateLedgers, record: Compacted) -> CompactedLog:
        """Opens the ledger. DataLost: it is damaged or lost; LedgerNotFound, Unavailable."""
        reader = await ledgers.open(record.ledger_id)
        try:
            _, pieces, body = decode_piece((await reader.read(reader.last_entry, reader.last_entry))[0].payload)
            for back in range(1, pieces):
                at = reader.last_entry - back
                body = decode_piece((await reader.read(at, at))[0].payload)[2] + body
            return cls(record, reader, decode_rows(body))
        except DamagedCompaction as error:
            raise DataLost(f"compacted ledger {record.ledger_id}: {error}", ledger=record.ledger_id) from error

    @property
    def horizon(self) -> Position:
        return Position(self.record.horizon_ledger, self.record.horizon_entry)

    @property
    def entries(self) -> int:
        return self.record.entries

    def number_of(self, position: Position) -> int:
        """The number of the first survivor at or after `position`; `entries` when there is none."""
        at = bisect_left(self._ids, position[0])
        if at == len(self.rows):
            return self.entries
        row = self.rows[at]
        before = row.survivors.rank(position[1] - 1) if row.ledger_id == position[0] and position[1] > 0 else 0
        return row.first + before

    def row(self, ledger_id: int) -> Row | None:
        at = bisect_left(self._ids, ledger_id)
        return self.rows[at] if at < len(self.rows) and self._ids[at] == ledger_id else None

    async def read(self, first: int, bytes_max: int) -> list[StoredEntry]:
        """Survivors from that number on, at least one."""
        found = await self._reader.read(first, self.entries - 1, bytes_max)
        try:
            return [StoredEntry.parse(*decode_survivor(each.payload)) for each in found]
        except DamagedCompaction as error:
            raise DataLost(f"compacted ledger {self.record.ledger_id}: {error}") from error

    async def entry(self, number: int) -> StoredEntry:
        return (await self.read(number, 1))[0]

    async def first_since(self, time_ms: int) -> StoredEntry | None:
        """The first survivor that arrived at or after the time."""
        return (await first_reached(self.entries - 1, self.entry, lambda entry: entry.timestamp_ms >= time_ms)).entry

    async def last(self) -> tuple[StoredEntry, int] | None:
        """The last survivor, and the batch index of its last message that is shown (-1: it is no batch)."""
        if not self.entries:
            return None
        entry = await self.entry(self.entries - 1)
        return entry, last_shown(entry.payload)


class CompactedShape(CommittedShape):
    """The positions of the topic for a consumer that reads compacted."""

    __slots__ = ("_ghosts", "_rows")

    def __init__(self, log: LogShape) -> None:
        self._ghosts: set[int] = set()
        self._rows: dict[int, Row] = {}
        super().__init__(log)

    def cover(self, rows: list[Row]) -> None:
        """Adds those ledgers: what survives of them can be read, also where the log has them no more."""
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

    def trimmed(self, ledger_id: int) -> bool:
        """Whether the log has the ledger no more."""
        return ledger_id in self._ghosts


def _ghost(row: Row) -> Span:
    return Span(row.ledger_id, row.first_index, row.entries - 1, row.end_index)
