"""The stored state of a cursor, as entries of its cursor ledger.

Every write is the full state, so only the last complete one counts. A state above CHUNK_BYTES is split over several
entries, written in order one behind the other:

    entry = magic "MC" | version u8 (1) | reserved u8 (0) | sequence u64 | chunk u32 | chunks u32 | crc32c u32 | body
    body  = a piece of the state; the checksum covers the 20 bytes in front of it and the piece

    state = mark ledger i64 | mark entry i64
          | ledgers u32  | ( ledger i64 | size u32 | entries as a roaring bitmap )*     whole entries behind the mark
          | partials u32 | ( ledger i64 | entry i64 | messages u32 | size u32 | batch indexes as a roaring bitmap )*

Big-endian; bitmaps in the portable roaring format; `messages` 0: not known. `sequence` grows by one with each state.
The marker of a complete state is its last chunk (`chunk` = `chunks` - 1) with all others of the same sequence in front.
A reader starts at the end and goes back: a torn state (the writer died between two chunks) is skipped, damage
is DamagedState. Example: mark 7:3, no holes, sequence 1:

    4d43 01 00 0000000000000001 00000000 00000001 <crc32c>  0000000000000007 0000000000000003 00000000 00000000

Guarding tests: tests/broker/format/test_cursor_format.py.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import google_crc32c
from pyroaring import BitMap

from ...proto.names import Position
from ..core.cursor import CursorState, Partial

MAGIC = b"MC"
VERSION = 1
CHUNK_BYTES = 1 << 20
"""Piece of a state per entry: far below the largest entry, large enough that nearly every state is one entry."""

_HEAD = struct.Struct(">2sBBQII")
_CRC = struct.Struct(">I")
_POSITION = struct.Struct(">qq")
_COUNT = struct.Struct(">I")
_LEDGER = struct.Struct(">qI")
_PARTIAL = struct.Struct(">qqII")
HEAD_BYTES = _HEAD.size + _CRC.size


class DamagedState(ValueError):
    """The bytes are not (a piece of) a cursor's state."""


class Chunk(NamedTuple):
    sequence: int
    chunk: int
    chunks: int
    body: bytes


def encode(state: CursorState, sequence: int) -> list[bytes]:
    """The entries to append, in order."""
    data = encode_state(state)
    pieces = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    entries = []
    for number, piece in enumerate(pieces):
        head = _HEAD.pack(MAGIC, VERSION, 0, sequence, number, len(pieces))
        entries.append(head + _CRC.pack(google_crc32c.value(head + piece)) + piece)
    return entries


def decode_chunk(entry: bytes) -> Chunk:
    if len(entry) < HEAD_BYTES:
        raise DamagedState(f"{len(entry)} bytes are too few for a cursor entry")
    magic, version, _, sequence, chunk, chunks = _HEAD.unpack_from(entry)
    if magic != MAGIC:
        raise DamagedState("not a cursor entry")
    if version != VERSION:
        raise DamagedState(f"cursor format version {version}; this Magnetar reads {VERSION}")
    body = entry[HEAD_BYTES:]
    if google_crc32c.value(entry[: _HEAD.size] + body) != _CRC.unpack_from(entry, _HEAD.size)[0]:
        raise DamagedState("checksum does not match")
    if not chunk < chunks:
        raise DamagedState(f"chunk {chunk} of {chunks}")
    return Chunk(sequence, chunk, chunks, body)


def encode_state(state: CursorState) -> bytes:
    parts = [_POSITION.pack(*state.mark), _COUNT.pack(len(state.acked))]
    for ledger_id, holes in sorted(state.acked.items()):
        bits = holes.serialize()
        parts += (_LEDGER.pack(ledger_id, len(bits)), bits)
    parts.append(_COUNT.pack(len(state.partial)))
    for position, partial in sorted(state.partial.items()):
        bits = partial.acked.serialize()
        parts += (_PARTIAL.pack(*position, partial.size, len(bits)), bits)
    return b"".join(parts)


def decode_state(data: bytes) -> CursorState:
    try:
        state = CursorState(Position(*_POSITION.unpack_from(data)))
        offset = _POSITION.size
        (ledgers,) = _COUNT.unpack_from(data, offset)
        offset += _COUNT.size
        for _ in range(ledgers):
            ledger_id, size = _LEDGER.unpack_from(data, offset)
            offset += _LEDGER.size
            state.acked[ledger_id] = _bitmap(data, offset, size)
            offset += size
        (partials,) = _COUNT.unpack_from(data, offset)
        offset += _COUNT.size
        for _ in range(partials):
            ledger_id, entry_id, messages, size = _PARTIAL.unpack_from(data, offset)
            offset += _PARTIAL.size
            state.partial[Position(ledger_id, entry_id)] = Partial(_bitmap(data, offset, size), messages)
            offset += size
    except struct.error as error:
        raise DamagedState(f"the state ends early: {error}") from error
    if offset != len(data):
        raise DamagedState(f"{len(data) - offset} bytes follow the state")
    return state


def _bitmap(data: bytes, offset: int, size: int) -> BitMap:
    if offset + size > len(data):
        raise DamagedState(f"a bitmap of {size} bytes ends behind the state's {len(data)}")
    try:
        return BitMap.deserialize(data[offset : offset + size])
    except (ValueError, MemoryError) as error:
        raise DamagedState(f"a bitmap does not parse: {error}") from error
