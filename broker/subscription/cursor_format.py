"""The stored state of a cursor, as entries of its cursor ledger.

A state is a *marker* and the chunks that it names (broker/subscription/core/positions.py). Each of them is one entry,
or several consecutive ones when it is larger than CHUNK_BYTES_MAX:

    entry = magic "MC" | version u8 | kind u8 | sequence u64 | ledger i64 | block u32 | piece u32 | pieces u32
          | crc32c u32 | body                              the checksum covers the 32 bytes before it and the body

    kind 0  marker    mark ledger i64 | mark entry i64 | rows u32
                      | ( kind u8 | ledger i64 | block u32 | sequence u64 | first entry i64 | pieces u32 | size u32 )*
    kind 1  holes     whole entries of the ledger after the mark, as a portable roaring bitmap
    kind 2  partials  ( entry i64 | messages u32 | size u32 | bits )*     bit i of byte j: message 8j + i is done
    kind 3  counts    ( entry i64 | redeliveries u32 | until ms u64 )*
    kind 4  pending   ( most u16 | least u64 | up to: ledger i64, entry i64 | size u32 | whole entries, as in holes
                      | size u32 | rows as in partials )*     of each transaction that has something pending there
    kind 5  note      the note of the last commit, as it was given; ledger and block are 0

Big-endian; a chunk of kind 4 has version 2, which a Magnetar without transactions does not read, one of kind 5 has
version 3, a marker that of the latest kind that it names, and all else version 1 (proto/versions.py). A block is 2^20
entries of holes and pending, 2^10 of the others. `messages` 0: not known; `until` 0: not held back; up to -1:-1:
nothing. The position of a cumulative acknowledgement is in the chunk of its own ledger and block. `sequence` is that of
the write, and grows by one with each; a row has that of its chunk, so that an entry in the wrong place is detected.
`size` of a row is all bytes of the chunk's entries. A reader starts at the end and goes back to the last marker all of
whose chunks can be read: chunks after it are what a crash left (torn, skipped), damage is DamagedCursorState. Holes
before the mark may still be stored; they are ignored.

Example: mark 7:3, no chunks, sequence 1:

    4d43 01 00 0000000000000001 0000000000000000 00000000 00000000 00000001 <crc32c>
    0000000000000007 0000000000000003 00000000

A *snapshot* (in the subscription's record, made by a clean close) is the entries of one write of the whole state, each
after its length as u32.

Guarding tests: tests/broker/subscription/test_cursor_format.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pyroaring import BitMap

from ...proto.checksum import crc32c
from ...proto.names import Position
from ...proto.states import TxnId
from ...proto.versions import CURSOR, check_format
from .core.cursor import Cursor
from .core.cursor_state import (
    BATCH_INDEXES_MAX,
    COMMIT_NOTE_KEY,
    NO_POSITION,
    CursorChunkKey,
    CursorChunkKind,
    CursorState,
    PartlyAckedBatch,
    PendingAcks,
    RedeliveryCount,
    TxnAcks,
)

CURSOR_MAGIC = b"MC"
CHUNK_BYTES_MAX = 1 << 20
"""Largest body of an entry: far below the largest entry, large enough that nearly every chunk is one."""

_HEAD = struct.Struct(">2sBBQqIII")
_CRC = struct.Struct(">I")
_POSITION = struct.Struct(">qq")
_COUNT = struct.Struct(">I")
_ROW = struct.Struct(">BqIQqII")
_PARTIAL = struct.Struct(">qII")
_REDELIVERED = struct.Struct(">qIQ")
_TXN = struct.Struct(">HQqq")
VERSION_BY_KIND = {CursorChunkKind.PENDING: 2, CursorChunkKind.NOTE: 3}
"""Kind → the version of its chunks, and of a marker that names one."""
OLDEST_VERSION = 1
"""The version of all else, which every Magnetar reads."""
ENTRY_HEAD_BYTES = _HEAD.size + _CRC.size
LENGTH_BYTES = _COUNT.size
"""Bytes before each entry in a snapshot (`encode_snapshot`)."""
ROW_BYTES, MARKER_HEAD_BYTES = _ROW.size, _POSITION.size + _COUNT.size
"""Bytes of a marker for each chunk, and before its rows."""
MARKER_KIND = 0


class DamagedCursorState(ValueError):
    """Raised if stored bytes of a cursor's state are damaged."""


class CursorChunkPlace(NamedTuple):
    """Where a chunk (a part of a cursor's state) is stored in the cursor ledger. `sequence`: the number of the write;
    `first_entry`: the id of its first entry; `pieces`: the number of its entries; `size_bytes`: their size together."""

    sequence: int
    first_entry: int
    pieces: int
    size_bytes: int


class CursorPiece(NamedTuple):
    """One decoded entry of a cursor ledger. A chunk of the state is stored as one or more pieces, and so is a marker,
    which ends a write: it contains the mark and the places of all valid chunks. `kind`: a CursorChunkKind, or
    MARKER_KIND; `sequence`: the number of the write; `ledger_id`, `block`: which entries the chunk covers
    (`CursorChunkKey`); `piece`: the number of this piece, from 0; `pieces`: how many the chunk or marker has; `body`:
    its part of the content."""

    kind: int
    sequence: int
    ledger_id: int
    block: int
    piece: int
    pieces: int
    body: bytes

    @property
    def is_last_piece(self) -> bool:
        """True if this is the last piece of a marker, which completes a write of the state."""
        return self.kind == MARKER_KIND and self.piece == self.pieces - 1

    def is_piece_of_chunk(self, key: CursorChunkKey, row: CursorChunkPlace, piece: int) -> bool:
        """Returns True if this is piece number `piece` of the chunk `key`. `row`: the place of the chunk, as the marker
        lists it."""
        return self[:6] == (key.kind, row.sequence, key.ledger_id, key.block, piece, row.pieces)


# ------------------------------------------------------------------------------------------ encoding
def encode_cursor_chunk(key: CursorChunkKey, sequence: int, body: bytes) -> list[bytes]:
    """Returns the ledger entries that store the chunk `key` with the content `body`, in the order in which the caller
    must append them. `sequence`: the number of the write."""
    version = VERSION_BY_KIND.get(key.kind, OLDEST_VERSION)
    return _encode(version, key.kind, key.ledger_id, key.block, sequence, body)


def encode_marker(mark: Position, rows: Mapping[CursorChunkKey, CursorChunkPlace], sequence: int) -> list[bytes]:
    """Returns the ledger entries of a marker, which completes a write. `mark`: the mark of the cursor; `rows`: the
    places of all valid chunks; `sequence`: the number of the write."""
    parts = [_POSITION.pack(*mark), _COUNT.pack(len(rows))]
    parts += [_ROW.pack(*key, *row) for key, row in sorted(rows.items())]
    version = max((VERSION_BY_KIND.get(key.kind, OLDEST_VERSION) for key in rows), default=OLDEST_VERSION)
    return _encode(version, MARKER_KIND, 0, 0, sequence, b"".join(parts))


def _encode(version: int, kind: int, ledger_id: int, block: int, sequence: int, body: bytes) -> list[bytes]:
    pieces = [body[start : start + CHUNK_BYTES_MAX] for start in range(0, len(body), CHUNK_BYTES_MAX)] or [b""]
    entries = []
    for number, piece in enumerate(pieces):
        head = _HEAD.pack(CURSOR_MAGIC, version, kind, sequence, ledger_id, block, number, len(pieces))
        entries.append(b"".join((head, _CRC.pack(crc32c(head + piece)), piece)))
    return entries


def encode_cursor_chunk_body(key: CursorChunkKey, cursor: Cursor) -> bytes:
    """Returns the content of the chunk `key`, encoded from the current state of the cursor."""
    covered = key.entry_range()
    first, last = Position(key.ledger_id, covered[0]), Position(key.ledger_id, covered[-1])
    if key.kind is CursorChunkKind.NOTE:
        return cursor.note
    if key.kind is CursorChunkKind.HOLES:
        return _holes_body(cursor.holes.compress_holes_of_ledger(key.ledger_id), covered)
    if key.kind is CursorChunkKind.PENDING:
        return _pending_body(cursor.pending, key) if cursor.pending is not None else b""
    parts: list[bytes] = []
    if key.kind is CursorChunkKind.PARTIALS:
        for position in cursor.partial.irange(first, last):
            parts += _partial_row(position, cursor.partial[position])
    else:
        parts = [_REDELIVERED.pack(each[1], *cursor.counts[each]) for each in cursor.counts.irange(first, last)]
    return b"".join(parts)


def _partial_row(position: Position, partial: PartlyAckedBatch) -> tuple[bytes, bytes]:
    bits = partial.bits.to_bytes((partial.bits.bit_length() + 7) // 8, "little")
    return _PARTIAL.pack(position[1], partial.size, len(bits)), bits


def _pending_body(pending: PendingAcks, key: CursorChunkKey) -> bytes:
    """Returns the content of a chunk of pending acknowledgements. Reuses the encoded bytes of each transaction that has
    not changed."""
    parts, kept = list[bytes](), pending.rows
    for txn, keys in pending.keys_of.items():
        if (row := kept.get(txn)) is not None:
            if keys[0] == key:
                parts.append(row)
        elif key in keys:
            parts.append(row := _txn_row(txn, pending.of[txn], key))
            if len(keys) == 1:
                kept[txn] = row
    return b"".join(parts)


def _txn_row(txn: TxnId, acks: TxnAcks, key: CursorChunkKey) -> bytes:
    """Returns the encoded acknowledgements of the transaction, as far as they belong to the chunk `key`."""
    covered = key.entry_range()
    here = acks.up_to[0] == key.ledger_id and max(0, acks.up_to[1]) in covered
    some = acks.entries.get(key.ledger_id)
    if some is not None and not covered.start <= some.min() <= some.max() < covered.stop:
        some = some & BitMap(covered)
    rows = [
        part for position in sorted(acks.parts) if position[0] == key.ledger_id and position[1] in covered
        for part in _partial_row(position, acks.parts[position])
    ]  # fmt: skip
    if some:
        some.run_optimize()
    whole, partials = some.serialize() if some else b"", b"".join(rows)
    head = _TXN.pack(*txn, *(acks.up_to if here else NO_POSITION))
    return b"".join((head, _COUNT.pack(len(whole)), whole, _COUNT.pack(len(partials)), partials))


def _holes_body(holes: BitMap, covered: range) -> bytes:
    if holes.min() >= covered.start and holes.max() < covered.stop:
        return holes.serialize()
    return (holes & BitMap(covered)).serialize()


def encode_snapshot(entries: list[bytes]) -> bytes:
    """Returns the complete state of a cursor as it is stored in the subscription's record. `entries`: the entries of
    one write that contains the whole state, the marker last."""
    return b"".join(part for entry in entries for part in (_COUNT.pack(len(entry)), entry))


# ------------------------------------------------------------------------------------------ decoding
def decode_piece(entry: bytes) -> CursorPiece:
    """Decodes one entry of a cursor ledger, and returns it. Raises DamagedCursorState if the entry is damaged;
    NewerFormat if a later version of Magnetar wrote it."""
    if len(entry) < ENTRY_HEAD_BYTES:
        raise DamagedCursorState(f"{len(entry)} bytes are too few for a cursor entry")
    if entry[:2] != CURSOR_MAGIC:
        raise DamagedCursorState("not a cursor entry")
    body = entry[ENTRY_HEAD_BYTES:]
    if crc32c(entry[: _HEAD.size] + body) != _CRC.unpack_from(entry, _HEAD.size)[0]:
        raise DamagedCursorState("checksum does not match")
    check_format(CURSOR, entry[2], "a cursor ledger")
    _, _, kind, sequence, ledger_id, block, piece, pieces = _HEAD.unpack_from(entry)
    found = CursorPiece(kind, sequence, ledger_id, block, piece, pieces, body)
    if not found.piece < found.pieces or found.kind > max(CursorChunkKind):
        raise DamagedCursorState(f"piece {found.piece} of {found.pieces} of kind {found.kind}")
    return found


def decode_marker(body: bytes) -> tuple[Position, dict[CursorChunkKey, CursorChunkPlace]]:
    """Returns (the mark, the places of all valid chunks by their keys) that a marker contains. `body`: the bodies of
    its pieces, in order. Raises DamagedCursorState if `body` is damaged."""
    try:
        mark = Position(*_POSITION.unpack_from(body))
        (count,) = _COUNT.unpack_from(body, _POSITION.size)
        start = _POSITION.size + _COUNT.size
        if len(body) != start + count * _ROW.size:
            raise DamagedCursorState(f"a marker of {count} rows has {len(body)} bytes")
        rows = {
            CursorChunkKey(CursorChunkKind(kind), ledger_id, block): CursorChunkPlace(*where)
            for kind, ledger_id, block, *where in _ROW.iter_unpack(body[start:])
        }
    except (struct.error, ValueError) as error:
        raise DamagedCursorState(f"a marker does not parse: {error}") from error
    return mark, rows


def decode_chunk_into_state(state: CursorState, key: CursorChunkKey, body: bytes) -> None:
    """Decodes the content `body` of the chunk `key`, and adds it to the state. Raises DamagedCursorState if `body` is
    damaged."""
    try:
        if key.kind is CursorChunkKind.HOLES:
            _add_holes(state, key, _bitmap(body))
        elif key.kind is CursorChunkKind.PARTIALS:
            state.partial.update(_partials(key, body))
        elif key.kind is CursorChunkKind.PENDING:
            _add_pending(state, key, body)
        elif key.kind is CursorChunkKind.NOTE:
            _add_note(state, key, body)
        else:
            for entry_id, redeliveries, until_ms in _REDELIVERED.iter_unpack(body):
                state.counts[_inside(key, entry_id)] = RedeliveryCount(redeliveries, until_ms)
    except struct.error as error:
        raise DamagedCursorState(f"a chunk ends early: {error}") from error


def _partials(key: CursorChunkKey, body: bytes) -> Iterator[tuple[Position, PartlyAckedBatch]]:
    offset = 0
    while offset < len(body):
        entry_id, messages, size = _PARTIAL.unpack_from(body, offset)
        offset += _PARTIAL.size
        if not size or offset + size > len(body) or size * 8 > BATCH_INDEXES_MAX + 8:
            raise DamagedCursorState(f"{size} bytes of bits at {offset} of {len(body)}")
        bits = int.from_bytes(body[offset : offset + size], "little")
        yield _inside(key, entry_id), PartlyAckedBatch(bits, messages)
        offset += size


def _add_pending(state: CursorState, key: CursorChunkKey, body: bytes) -> None:
    offset = 0
    while offset < len(body):
        most, least, *up_to = _TXN.unpack_from(body, offset)
        whole, offset = _sized(body, offset + _TXN.size)
        partials, offset = _sized(body, offset)
        acks = state.pending.setdefault(TxnId(most, least), TxnAcks())
        acks.up_to = max(acks.up_to, Position(*up_to))
        entries = _bitmap(whole) if whole else BitMap()
        if entries:
            _inside(key, entries.min())
            _inside(key, entries.max())
            acks.entries[key.ledger_id] = acks.entries.get(key.ledger_id, BitMap()) | entries
        for position, partial in _partials(key, partials):
            if position in acks.parts or not partial.bits:
                raise DamagedCursorState(f"{position} is pending twice, or not at all")
            acks.parts[position] = partial


def _add_note(state: CursorState, key: CursorChunkKey, body: bytes) -> None:
    if key != COMMIT_NOTE_KEY or not body:
        raise DamagedCursorState(f"a note of {len(body)} bytes in block {key.block} of ledger {key.ledger_id}")
    state.note = body


def _sized(body: bytes, offset: int) -> tuple[bytes, int]:
    """Returns the bytes that follow the length at `offset`, and the offset after them."""
    (size,) = _COUNT.unpack_from(body, offset)
    start = offset + _COUNT.size
    if start + size > len(body):
        raise DamagedCursorState(f"{size} bytes at {start} of {len(body)}")
    return body[start : start + size], start + size


def _add_holes(state: CursorState, key: CursorChunkKey, holes: BitMap) -> None:
    if holes:
        _inside(key, holes.min())
        _inside(key, holes.max())
        if key.ledger_id in state.acked:
            state.acked[key.ledger_id] |= holes
        else:
            state.acked[key.ledger_id] = holes


def _inside(key: CursorChunkKey, entry_id: int) -> Position:
    """Returns the position of the entry. Raises DamagedCursorState if the chunk `key` does not cover this entry."""
    if entry_id not in key.entry_range():
        raise DamagedCursorState(f"entry {entry_id} is in block {key.block} of the {key.kind.name.lower()}")
    return Position(key.ledger_id, entry_id)


def decode_snapshot(data: bytes) -> CursorState:
    """Returns the state of a cursor that a snapshot contains. Raises DamagedCursorState if the snapshot is damaged,
    NewerFormat if a later version of Magnetar wrote it."""
    pieces, offset = [], 0
    while offset < len(data):
        if offset + _COUNT.size > len(data):
            raise DamagedCursorState("a snapshot ends inside a length")
        (size,) = _COUNT.unpack_from(data, offset)
        offset += _COUNT.size
        pieces.append(decode_piece(data[offset : offset + size]))
        offset += size
    if not pieces or pieces[-1].kind != MARKER_KIND:
        raise DamagedCursorState("a snapshot without a marker")
    last = pieces[-1]
    mark, rows = decode_marker(b"".join(each.body for each in pieces[-last.pieces :]))
    state = CursorState(mark)
    for key, row in rows.items():
        chunk = pieces[row.first_entry : row.first_entry + row.pieces]
        if len(chunk) != row.pieces or not all(each.is_piece_of_chunk(key, row, at) for at, each in enumerate(chunk)):
            raise DamagedCursorState("a chunk is missing in a snapshot")
        decode_chunk_into_state(state, key, b"".join(each.body for each in chunk))
    return state


def _bitmap(data: bytes) -> BitMap:
    try:
        return BitMap.deserialize(data)
    except (ValueError, MemoryError, IndexError) as error:
        raise DamagedCursorState(f"a bitmap does not parse: {error}") from error
