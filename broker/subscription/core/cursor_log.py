"""The log of a cursor: what is written next, and where in its cursor ledger each valid chunk is.

A write is the chunks that have changed, then a *marker*: the mark and a row for every valid chunk, those of earlier
writes too. A write counts when its marker is confirmed, and only then (`confirmed`); a crash in the middle leaves
chunks that no marker names. So a million holes in a hundred ledgers cost one chunk per ack that hits one of them.
    write = log.plan(cursor, sequence)      # takes what has changed, as bytes: later acks are in a later write
    … its entries are appended, in order, to the ledger that `log` belongs to …
    log.confirmed(write)   |   log.failed(write, cursor)
A ledger ends (`ends`) by entries, by bytes, or when too little of it is still valid; the next one begins with all
chunks (`plan` of a new CursorLog). Nothing is dropped, however large. Guards:
tests/broker/subscription/core/test_cursor_log.py, tests/broker/subscription/test_cursor_model.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ....proto.names import Position
from ..format import cursor as stored
from ..format.cursor import Row
from .cursor import Cursor
from .cursor_state import ChunkKey, ChunkKind, key_of, keys_of_holes

LIVE_BYTES_MIN = 4 << 20
"""Bytes below which a cursor ledger is never too empty: a roll costs a ledger and a metadata write."""


class Ends(enum.Enum):
    """The reason why a cursor ledger ends."""

    ENTRIES = "it holds as many entries as it may"
    BYTES = "it holds as many bytes as it may"
    EMPTY = "little of it is still valid"


class Bounds(msgspec.Struct, frozen=True):
    """The bounds at which a cursor ledger ends: entries, bytes, and the least share that has to be valid."""

    entries: int
    size_bytes: int
    live_share: float


class CursorWrite(NamedTuple):
    """A write of a cursor: its entries, and which chunks they hold."""

    entries: list[bytes]
    rows: dict[ChunkKey, Row]  # of all valid chunks, when it is confirmed
    chunks: frozenset[ChunkKey]  # that it writes
    version: int
    mark: Position


class CursorLog:
    """The log in one cursor ledger, from its first entry on."""

    __slots__ = ("_bytes", "_entries", "_live_bytes", "_rows")

    def __init__(self) -> None:
        self._rows: dict[ChunkKey, Row] = {}
        self._entries = 0
        self._bytes = 0
        self._live_bytes = 0

    def plan(self, cursor: Cursor, sequence: int) -> CursorWrite:
        """The next write; nothing of it counts yet. A first one holds the whole state."""
        valid = list(chunks_of(cursor))
        wanted = [key for key in valid if key in cursor.changed or key not in self._rows]
        cursor.changed.clear()
        entries: list[bytes] = []
        rows = {key: self._rows[key] for key in valid if key in self._rows}
        for key in wanted:
            pieces = stored.encode_chunk(key, sequence, stored.body_of(key, cursor))
            size = sum(map(len, pieces))
            rows[key] = Row(sequence, self._entries + len(entries), len(pieces), size)
            entries += pieces
        entries += stored.encode_marker(cursor.mark, rows, sequence)
        return CursorWrite(entries, rows, frozenset(wanted), cursor.version, cursor.mark)

    def confirmed(self, write: CursorWrite) -> None:
        self._rows = write.rows
        self._entries += len(write.entries)
        self._bytes += sum(map(len, write.entries))
        self._live_bytes = sum(row.size_bytes for row in write.rows.values())

    @staticmethod
    def failed(write: CursorWrite, cursor: Cursor) -> None:
        """Notes that the write never counts: what it held has to be written again."""
        cursor.changed.update(write.chunks)

    def ends(self, bounds: Bounds) -> Ends | None:
        if self._entries >= bounds.entries:
            return Ends.ENTRIES
        if self._bytes >= max(bounds.size_bytes, 2 * self._live_bytes):
            return Ends.BYTES
        if self._bytes >= LIVE_BYTES_MIN and self._live_bytes < bounds.live_share * self._bytes:
            return Ends.EMPTY
        return None


def chunks_of(cursor: Cursor) -> Iterator[ChunkKey]:
    """Yields the keys of the chunks of the state, without the mark."""
    for ledger_id, holes in sorted(cursor.acked.items()):
        yield from keys_of_holes(ledger_id, holes)
    for kind, positions in ((ChunkKind.PARTIALS, cursor.partial), (ChunkKind.COUNTS, cursor.counts)):
        last: ChunkKey | None = None
        for position in positions:
            key = key_of(kind, position)
            if key != last:
                yield key
            last = key
    if cursor.pending is not None:
        yield from cursor.pending.keys()
