"""The bytes of a compacted ledger: survivors under their original ids, then a table of their places.

    survivor = head | ledger u64 | entry u64 | the entry as it is stored in the topic (proto/entry.py)
    table    = head | piece u32 | pieces u32 | a part of the rows; pieces follow each other at the ledger's end
    row      = ledger u64 | entries u64 | first index i64 | end index i64 | first survivor u64 | size u32 | bitmap
    head     = magic "MC" | version u8 | kind u8 (1 survivor, 2 table) | crc32c u32 of all that follows it

Big-endian. There is a row for each ledger of the topic up to the horizon of which something survives: how many entries
of it were read, their message indexes, the number (entry id here) of its first survivor, and the entry ids of its
survivors as a portable roaring bitmap. So the place of a survivor is `first survivor` + its rank in the bitmap, and an
entry that is not in the bitmap was removed. A ledger without its table is no compacted ledger (a crash while it was
written), and no record names it.

Example: entry `6869` of position 5:7 is

    4d43 01 01 7847c27a  0000000000000005 0000000000000007 6869
"""

from __future__ import annotations

import struct

import msgspec
from pyroaring import BitMap

from ...proto.checksum import crc32c
from ...proto.entry import Buffer
from ...proto.names import Position
from ...proto.versions import COMPACTED, check_format

MAGIC = b"MC"
SURVIVOR, TABLE = 1, 2
PIECE_BYTES = 1 << 20
"""Bytes of a piece of a table: far below what a ledger takes as one entry."""
_HEAD = struct.Struct(">2sBBI")
_POSITION = struct.Struct(">QQ")
_PIECE = struct.Struct(">II")
_ROW = struct.Struct(">QQqqQI")


class DamagedCompaction(ValueError):
    """Raised if bytes of a compacted ledger are damaged."""


class SurvivorRow(msgspec.Struct):
    """A row of a compacted ledger's table: the surviving entries of one ledger of the topic."""

    ledger_id: int
    entries: int
    first_index: int
    end_index: int
    first: int  # number of its first survivor
    survivors: BitMap

    @property
    def removed(self) -> BitMap:
        """Returns the entry ids that compaction removed from the ledger."""
        return BitMap(range(self.entries)) - self.survivors


def _record(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(MAGIC, COMPACTED.version, kind, crc32c(body)) + body


def _body(data: Buffer, kind: int) -> bytes:
    if len(data) < _HEAD.size:
        raise DamagedCompaction(f"{len(data)} bytes are too few for a record")
    magic, version, found, crc = _HEAD.unpack_from(data)
    if magic != MAGIC or found != kind or version < 1:
        raise DamagedCompaction(f"begins with {bytes(data[:4]).hex()}, not with a record of kind {kind}")
    body = bytes(data[_HEAD.size :])
    if crc32c(body) != crc:
        raise DamagedCompaction("the checksum does not match")
    check_format(COMPACTED, version, "a compacted ledger")
    return body


def encode_survivor(position: Position, entry: bytes) -> bytes:
    """Returns a surviving entry of the topic as an entry of the compacted ledger, with its original position."""
    return _record(SURVIVOR, _POSITION.pack(*position) + entry)


def decode_survivor(data: Buffer) -> tuple[Position, bytes]:
    """Returns the original position and the stored bytes of a surviving entry. Raises DamagedCompaction if `data` is
    damaged."""
    body = _body(data, SURVIVOR)
    if len(body) < _POSITION.size:
        raise DamagedCompaction("a survivor ends inside its position")
    return Position(*_POSITION.unpack_from(body)), body[_POSITION.size :]


def encode_table(rows: list[SurvivorRow]) -> list[bytes]:
    """Returns the pieces of the table that ends a compacted ledger, as entries of the ledger."""
    parts: list[bytes] = []
    for row in rows:
        bitmap = row.survivors.serialize()
        parts += (
            _ROW.pack(row.ledger_id, row.entries, row.first_index, row.end_index, row.first, len(bitmap)), bitmap,
        )  # fmt: skip
    body = b"".join(parts)
    pieces = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
    return [_record(TABLE, _PIECE.pack(number, len(pieces)) + each) for number, each in enumerate(pieces)]


def decode_table_piece(data: Buffer) -> tuple[int, int, bytes]:
    """Returns the number of a piece of the table, the number of all pieces, and the bytes of the rows in it. Raises
    DamagedCompaction if `data` is damaged."""
    body = _body(data, TABLE)
    if len(body) < _PIECE.size:
        raise DamagedCompaction("a piece of a table ends inside its head")
    number, pieces = _PIECE.unpack_from(body)
    if not 0 <= number < pieces:
        raise DamagedCompaction(f"piece {number} of {pieces}")
    return number, pieces, body[_PIECE.size :]


def decode_table_rows(body: bytes) -> list[SurvivorRow]:
    """Returns the rows of a table. `body`: the rows' bytes of all pieces, concatenated. Raises DamagedCompaction if it
    is damaged."""
    rows: list[SurvivorRow] = []
    offset = 0
    while offset < len(body):
        if len(body) - offset < _ROW.size:
            raise DamagedCompaction("the table ends inside a row")
        ledger_id, entries, first_index, end_index, first, size = _ROW.unpack_from(body, offset)
        offset += _ROW.size
        if size > len(body) - offset:
            raise DamagedCompaction("the table ends inside a bitmap")
        try:
            survivors = BitMap.deserialize(body[offset : offset + size])
        except (ValueError, IndexError, MemoryError) as error:
            raise DamagedCompaction(f"a bitmap of the table cannot be read: {error}") from error
        offset += size
        rows.append(SurvivorRow(ledger_id, entries, first_index, end_index, first, survivors))
    return rows
