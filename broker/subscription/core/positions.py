"""A set of positions in log order (`PositionSet`): a short list, or one roaring bitmap per ledger. And the writes of a
cursor to its ledger (`CursorWritePlanner`).

A PositionSet contains the entries that wait to be delivered. A few positions are in a sorted list, because adding to a
list and taking from its front costs a tenth of what a bitmap costs. From LISTED_ENTRIES_MAX on they are in bitmaps: a
million contiguous positions take 130 KB. `size_bytes` is an estimate of its memory that is cheap to maintain. Guarding
test: tests/broker/subscription/core/test_positions.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec
from pyroaring import BitMap

from ....proto.names import Position
from .. import cursor_format as stored
from ..cursor_format import CursorChunkPlace
from .cursor import Cursor
from .cursor_state import (
    COMMIT_NOTE_KEY,
    CursorChunkKey,
    CursorChunkKind,
    CursorState,
    chunk_key_of,
    chunk_keys_of_holes,
)

LISTED_ENTRIES_MAX = 16
"""Most positions that are kept in a list. Such a list is as large as a bitmap, and still fast to search."""
SET_MEMORY_BYTES = 200
"""Bytes of the set itself, with its list."""
LISTED_ENTRY_BYTES = 110
"""Bytes of a position with its number and its place in the list."""
BITMAP_MEMORY_BYTES = 280
"""Bytes of a bitmap with one container and its place in the dictionary (measured with 100,000 of them: 277)."""
BITMAP_ENTRY_BYTES = 2
"""Bytes of a position in a container; fewer where they are dense."""


class PositionSet:
    """A set of positions of entries, in ascending order. `entries`: the number of positions; it is an attribute because
    it is read for each entry that is delivered. `size_bytes`: an estimate of the memory that the set takes."""

    __slots__ = ("_few", "_maps", "entries", "size_bytes")

    def __init__(self) -> None:
        self._few: list[Position] = []  # sorted; empty while there are bitmaps
        self._maps: dict[int, BitMap] = {}
        self.entries = 0
        self.size_bytes = SET_MEMORY_BYTES

    def __len__(self) -> int:
        return self.entries

    def __contains__(self, position: Position) -> bool:
        if not self._maps:
            return position in self._few
        held = self._maps.get(position[0])
        return held is not None and position[1] in held

    def __iter__(self) -> Iterator[Position]:
        yield from self._few
        for ledger_id in sorted(self._maps):
            for entry_id in self._maps[ledger_id]:
                yield Position(ledger_id, entry_id)

    def add(self, position: Position) -> bool:
        """Adds a position to the set. Returns False if the set contained it already."""
        if self._maps:
            return self._add_to_map(position)
        few = self._few
        if not few or position > few[-1]:
            few.append(position)
        else:
            place = bisect_left(few, position)
            if few[place] == position:
                return False
            few.insert(place, position)
        self.entries += 1
        self.size_bytes += LISTED_ENTRY_BYTES
        if len(few) > LISTED_ENTRIES_MAX:
            self._few, self.entries = [], 0
            for each in few:
                self._add_to_map(each)
        return True

    def _add_to_map(self, position: Position) -> bool:
        ledger_id, entry_id = position
        held = self._maps.get(ledger_id)
        if held is None:
            self._maps[ledger_id] = BitMap((entry_id,))
        elif entry_id in held:
            return False
        else:
            held.add(entry_id)
        self.entries += 1
        self._measure()
        return True

    def _measure(self) -> None:
        each = BITMAP_ENTRY_BYTES if self._maps else LISTED_ENTRY_BYTES
        self.size_bytes = SET_MEMORY_BYTES + len(self._maps) * BITMAP_MEMORY_BYTES + self.entries * each

    def discard(self, position: Position) -> bool:
        """Removes a position from the set. Returns False if the set did not contain it."""
        if not self._maps:
            few = self._few
            if few and few[0] == position:
                del few[0]
            elif position in few:
                few.remove(position)
            else:
                return False
            self.entries -= 1
            self.size_bytes -= LISTED_ENTRY_BYTES
            return True
        ledger_id, entry_id = position
        held = self._maps.get(ledger_id)
        if held is None or entry_id not in held:
            return False
        held.discard(entry_id)
        if not held:
            del self._maps[ledger_id]
        self.entries -= 1
        self._measure()
        return True

    def first_position(self) -> Position:
        """Returns the earliest position in the set. The set must not be empty."""
        if self._few:
            return self._few[0]
        maps = self._maps
        ledger_id = min(maps) if len(maps) > 1 else next(iter(maps))
        return Position(ledger_id, maps[ledger_id].min())

    def first_positions(self, count: int) -> list[Position]:
        """Returns up to `count` positions, the earliest in the set, without removing them."""
        found = self._few[:count]
        for ledger_id in sorted(self._maps):
            found += [Position(ledger_id, entry_id) for entry_id in self._maps[ledger_id][: count - len(found)]]
            if len(found) >= count:
                break
        return found

    def contains_any_of(self, ledger_id: int, entries: BitMap) -> bool:
        """Returns True if the set contains one of these entries of a ledger."""
        if self._few:
            return any(each[0] == ledger_id and each[1] in entries for each in self._few)
        held = self._maps.get(ledger_id)
        return held is not None and held.intersect(entries)

    def discard_entries_of_ledger(self, ledger_id: int, entries: BitMap) -> BitMap:
        """Removes these entries of a ledger from the set. Returns those that the set contained."""
        held = self._maps.get(ledger_id)
        if held is not None:
            gone = held & entries
            held -= gone
            if not held:
                del self._maps[ledger_id]
        else:
            gone = BitMap([each[1] for each in self._few if each[0] == ledger_id and each[1] in entries])
            if gone:
                self._few = [each for each in self._few if each[0] != ledger_id or each[1] not in gone]
        self.entries -= len(gone)
        self._measure()
        return gone

    def discard_up_to(self, mark: Position) -> list[Position]:
        """Removes the positions up to and including `mark` from the set, and returns them."""
        end = bisect_right(self._few, mark)
        gone, self._few = self._few[:end], self._few[end:]
        for ledger_id in sorted(each for each in self._maps if each <= mark[0]):
            held = self._maps[ledger_id]
            end = mark[1] + 1 if ledger_id == mark[0] else held.max() + 1
            done = held[: held.rank(end - 1) if end > 0 else 0]
            gone += [Position(ledger_id, entry_id) for entry_id in done]
            held.remove_range(0, max(0, end))
            if not held:
                del self._maps[ledger_id]
        self.entries -= len(gone)
        self._measure()
        return gone

    def clear(self) -> None:
        self._few.clear()
        self._maps.clear()
        self.entries = 0
        self._measure()

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken: the count and the size are right, and the positions are in
        order."""
        assert self.entries == len(self._few) + sum(map(len, self._maps.values())), "the count is not what is held"
        assert all(self._maps.values()), "an empty bitmap is kept"
        assert not (self._few and self._maps), "positions are kept in two ways at once"
        assert self._few == sorted(set(self._few)), "the list is not in order"
        held = sum(map(len, self._maps.values())) * BITMAP_ENTRY_BYTES
        size = SET_MEMORY_BYTES + len(self._few) * LISTED_ENTRY_BYTES + len(self._maps) * BITMAP_MEMORY_BYTES + held
        assert self.size_bytes == size, "the size is counted wrong"


def select_positions(positions: Collection[Position], ledger_id: int, entries: BitMap) -> list[Position]:
    """Returns those of `positions` that are in the ledger `ledger_id` and whose entry id is in `entries`."""
    if len(positions) <= len(entries):
        return [each for each in positions if each[0] == ledger_id and each[1] in entries]
    return [each for each in (Position(ledger_id, entry_id) for entry_id in entries) if each in positions]


# ---------------------------------------------------------------------------------------------------- cursor_log
# The log of a cursor: what is written next, and where in its cursor ledger each valid chunk is.
#
# A write is the chunks that have changed, then a *marker*: the mark and a row for every valid chunk, those of earlier
# writes too. A write counts when its marker is confirmed, and only then (`on_write_confirmed`); a crash in the middle
# leaves chunks that no marker names. So a million holes in a hundred ledgers cost one chunk per ack that hits one.
#     write = log.plan_write(cursor, sequence)   # takes what has changed, as bytes: later acks are in a later write
#     … its entries are appended, in order, to the ledger that `log` belongs to …
#     log.on_write_confirmed(write)   |   log.on_write_failed(write, cursor)
# A ledger ends (`why_ledger_ends`) by entries, by bytes, or when too little of it is still valid; the next one begins
# with all chunks (`plan_write` of a new CursorWritePlanner). Nothing is dropped, however large it is. While no bookies
# take a ledger, a bounded state goes to the metadata (`plan_record_state`): it may lack holes, and never has one too
# many. Guards: tests/broker/subscription/core/test_cursor_log.py, tests/broker/subscription/test_cursor_model.py.


MARKER_BYTES = stored.ENTRY_HEAD_BYTES + stored.LENGTH_BYTES + stored.MARKER_HEAD_BYTES
"""Bytes of a marker without rows, in a record."""
PARTIAL_ROW_BYTES_MIN = 16
"""Least bytes of a batch of which a part is acknowledged, or of a redelivery count: a bound without encoding them."""
LIVE_BYTES_MIN = 4 << 20
"""Bytes below which a cursor ledger is never too empty: a roll costs a ledger and a metadata write."""


class CursorLedgerEndReason(enum.Enum):
    """The reasons why a cursor ledger ends, so that the next write goes to a new ledger."""

    ENTRIES = "it holds as many entries as it may"
    BYTES = "it holds as many bytes as it may"
    EMPTY = "little of it is still valid"


class CursorLedgerBounds(msgspec.Struct, frozen=True):
    """The limits of a cursor ledger, at which the next write goes to a new ledger. `entries`: a number of entries.
    `size_bytes`: a number of bytes, or twice the valid bytes if that is more. `live_share`: the share of its bytes that
    must be valid, from LIVE_BYTES_MIN bytes on."""

    entries: int
    size_bytes: int
    live_share: float


class CursorWrite(NamedTuple):
    """One write of a cursor's state to its ledger: the entries to append, and the chunks (parts of the state) that they
    contain. `version`, `mark`: the version and the mark of the cursor that the write contains."""

    entries: list[bytes]
    rows: dict[CursorChunkKey, CursorChunkPlace]  # of all valid chunks, when it is confirmed
    chunks: frozenset[CursorChunkKey]  # that it writes
    version: int
    mark: Position
    seeks: int = 0  # `Cursor.seeks` of the state


class CursorWritePlanner:
    """Plans the writes of a cursor to one cursor ledger, and keeps a table of the valid chunks in the ledger."""

    __slots__ = ("_bytes", "_entries", "_live_bytes", "_rows")

    def __init__(self) -> None:
        self._rows: dict[CursorChunkKey, CursorChunkPlace] = {}
        self._entries = 0
        self._bytes = 0
        self._live_bytes = 0

    def plan_write(self, cursor: Cursor, sequence: int) -> CursorWrite:
        """Returns the next write, with the chunks that have changed, and clears `Cursor.changed_chunks`. The first
        write to a ledger contains the whole state. The caller must make the write, and then call `on_write_confirmed`
        or `on_write_failed`. `sequence`: the number of the write."""
        valid = list(chunk_keys_of_cursor(cursor))
        wanted = [key for key in valid if key in cursor.changed_chunks or key not in self._rows]
        cursor.changed_chunks.clear()
        entries: list[bytes] = []
        rows = {key: self._rows[key] for key in valid if key in self._rows}
        for key in wanted:
            pieces = stored.encode_cursor_chunk(key, sequence, stored.encode_cursor_chunk_body(key, cursor))
            size = sum(map(len, pieces))
            rows[key] = CursorChunkPlace(sequence, self._entries + len(entries), len(pieces), size)
            entries += pieces
        entries += stored.encode_marker(cursor.mark, rows, sequence)
        return CursorWrite(entries, rows, frozenset(wanted), cursor.version, cursor.mark, cursor.seeks)

    def on_write_confirmed(self, write: CursorWrite) -> None:
        """Called when all entries of the write are confirmed: the chunks in it are valid from now on."""
        self._rows = write.rows
        self._entries += len(write.entries)
        self._bytes += sum(map(len, write.entries))
        self._live_bytes = sum(row.size_bytes for row in write.rows.values())

    @staticmethod
    def on_write_failed(write: CursorWrite, cursor: Cursor) -> None:
        """Called when it is certain that the write will never be stored: its chunks are contained in the next write
        again."""
        cursor.changed_chunks.update(write.chunks)

    def why_ledger_ends(self, bounds: CursorLedgerBounds) -> CursorLedgerEndReason | None:
        """Returns why the next write must go to a new cursor ledger; None if it may be appended to the present one."""
        if self._entries >= bounds.entries:
            return CursorLedgerEndReason.ENTRIES
        if self._bytes >= max(bounds.size_bytes, 2 * self._live_bytes):
            return CursorLedgerEndReason.BYTES
        if self._bytes >= LIVE_BYTES_MIN and self._live_bytes < bounds.live_share * self._bytes:
            return CursorLedgerEndReason.EMPTY
        return None


class CursorRecordState(NamedTuple):
    """A state of a cursor for the subscription's record in the metadata. `snapshot`: the state, encoded; `lacks`: the
    number of acknowledged entries after the mark that it has no room for; `version`, `mark`, `seeks`: those of the
    cursor."""

    snapshot: bytes
    lacks: int
    version: int
    mark: Position
    seeks: int


def plan_record_state(cursor: Cursor, sequence: int, bytes_max: int) -> CursorRecordState | None:
    """Returns the state of the cursor in at most `bytes_max` bytes: all of it, or all but the last holes (acknowledged
    entries after the mark), the first ones in the order of the log. Returns None if even what is not a hole is larger:
    redelivery counts, parts of batches, and acknowledgements in transactions are never left out. `sequence`: the number
    of the write. Changes nothing in the cursor."""
    least = MARKER_BYTES + PARTIAL_ROW_BYTES_MIN * (len(cursor.partial) + len(cursor.counts))
    if least > bytes_max:
        return None
    rows: dict[CursorChunkKey, CursorChunkPlace] = {}
    entries: list[bytes] = []
    room, stored_holes, cut = bytes_max - MARKER_BYTES, 0, False
    keys = sorted(chunk_keys_of_cursor(cursor), key=lambda key: (key.kind is CursorChunkKind.HOLES, key))
    for key in keys:
        body = stored.encode_cursor_chunk_body(key, cursor)
        if key.kind is CursorChunkKind.HOLES:
            holes = cursor.acked[key.ledger_id] & BitMap(key.entry_range())
            least = stored.ENTRY_HEAD_BYTES + stored.LENGTH_BYTES + stored.ROW_BYTES
            if len(body) + least > room or cut:
                holes, cut = (BitMap() if cut else find_holes_that_fit(holes, room - least)), True
                body = holes.serialize()
            if not holes:
                continue
            stored_holes += len(holes)
        pieces = stored.encode_cursor_chunk(key, sequence, body)
        size = sum(map(len, pieces))
        room -= size + len(pieces) * stored.LENGTH_BYTES + stored.ROW_BYTES
        rows[key] = CursorChunkPlace(sequence, len(entries), len(pieces), size)
        entries += pieces
        if room < 0 and key.kind is not CursorChunkKind.HOLES:
            return None
    snapshot = stored.encode_snapshot([*entries, *stored.encode_marker(cursor.mark, rows, sequence)])
    if len(snapshot) > bytes_max:
        return None
    lacks = cursor.hole_entry_count - stored_holes
    return CursorRecordState(snapshot, lacks, cursor.version, cursor.mark, cursor.seeks)


def find_holes_that_fit(holes: BitMap, bytes_max: int) -> BitMap:
    """Returns as many of `holes`, the first ones, as take at most `bytes_max` bytes when they are stored; none if one
    hole alone takes more."""
    fits, least, most = BitMap(), 0, len(holes)
    while least < most:
        middle = (least + most + 1) // 2
        tried = holes[:middle]
        tried.run_optimize()
        if len(tried.serialize()) <= bytes_max:
            fits, least = tried, middle
        else:
            most = middle - 1
    return fits


def contains_holes_of(state: CursorState, older: CursorState) -> bool:
    """Returns True if each entry that `older` has acknowledged is acknowledged in `state`."""
    if state.mark < older.mark:
        return False
    for ledger_id, holes in older.acked.items():
        if ledger_id < state.mark[0]:
            continue
        after = holes & BitMap(range(state.mark[1] + 1, holes.max() + 1)) if ledger_id == state.mark[0] else holes
        if not after <= state.acked.get(ledger_id, BitMap()):
            return False
    return True


def add_older_holes(state: CursorState, older: CursorState) -> None:
    """Adds what `older` has acknowledged after the mark of `state`. No seek may be between the two states."""
    for ledger_id, holes in older.acked.items():
        if ledger_id < state.mark[0]:
            continue
        if ledger_id == state.mark[0]:
            holes = holes & BitMap(range(state.mark[1] + 1, holes.max() + 1))
        if holes:
            state.acked[ledger_id] = state.acked.get(ledger_id, BitMap()) | holes


def chunk_keys_of_cursor(cursor: Cursor) -> Iterator[CursorChunkKey]:
    """Yields the keys of all chunks that store the state of a cursor. (No chunk contains the mark.)"""
    for ledger_id, holes in sorted(cursor.acked.items()):
        yield from chunk_keys_of_holes(ledger_id, holes)
    for kind, positions in ((CursorChunkKind.PARTIALS, cursor.partial), (CursorChunkKind.COUNTS, cursor.counts)):
        last: CursorChunkKey | None = None
        for position in positions:
            key = chunk_key_of(kind, position)
            if key != last:
                yield key
            last = key
    if cursor.pending is not None:
        yield from cursor.pending.chunk_keys()
    if cursor.note:
        yield COMMIT_NOTE_KEY
