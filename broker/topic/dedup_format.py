"""The stored snapshot of a topic's deduplication, as entries of its snapshot ledger.

    entry = magic "MD" | version u8 | 0 u8 | sequence u64 | piece u32 | pieces u32 | crc32c u32 | body

The bodies of a snapshot's pieces, concatenated, are JSON: the position, and for each producer its name, its
highest sequence id, and of a chunked message that is not complete its uuid and the last chunk (else "" and -1):

    {"ledger":7,"entry":41,"producers":[["p",120,"",-1],["q",3,"5f0c",1]],"gaps":{"p":"..."}}

`gaps` has of a producer the ids of aborted transactions that nothing stored has, as a portable 64-bit roaring bitmap in
base64; a reader that does not know it takes those up to its highest id for stored.
The version is that of proto/versions.py. Big-endian; `sequence` grows by one with each snapshot; the checksum covers
the 20 bytes before it and the body. A reader goes back from the end to the last whole snapshot: torn ones are
what a crash left. Damage is DamagedSnapshot.
Guarding test: tests/broker/topic/test_dedup_format.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from pyroaring import BitMap64

from ...proto.checksum import crc32c
from ...proto.names import Position
from ...proto.versions import DEDUPLICATION, check_format
from .dedup_core import SequenceProgress, Snapshot

MAGIC = b"MD"
PIECE_BYTES = 1 << 20
"""Largest body of an entry: 10,000 producers fit one."""

_HEAD = struct.Struct(">2sBBQII")
_CRC = struct.Struct(">I")


class DamagedSnapshot(ValueError):
    """Raised if bytes are not a piece of a snapshot, or the pieces are not a snapshot."""


class Piece(NamedTuple):
    """A decoded entry of a snapshot ledger."""

    sequence: int
    piece: int
    pieces: int
    body: bytes

    @property
    def is_last(self) -> bool:
        """Returns True if it is the last piece of a snapshot."""
        return self.piece == self.pieces - 1


class _Stored(msgspec.Struct, frozen=True, omit_defaults=True):
    ledger: int
    entry: int
    producers: list[tuple[str, int, str, int]]
    gaps: dict[str, bytes] = {}


def encode_snapshot(snapshot: Snapshot, sequence: int) -> list[bytes]:
    """Returns the entries of the snapshot, in the order in which they are to be appended."""
    rows = [(name, *progress) for name, progress in snapshot.persisted.items()]
    gaps = {name: each.serialize() for name, each in snapshot.gaps.items()}
    body = msgspec.json.encode(_Stored(*snapshot.position, rows, gaps))
    bodies = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)]
    return [_piece(sequence, number, len(bodies), each) for number, each in enumerate(bodies)]


def _piece(sequence: int, piece: int, pieces: int, body: bytes) -> bytes:
    head = _HEAD.pack(MAGIC, DEDUPLICATION.version, 0, sequence, piece, pieces)
    return head + _CRC.pack(crc32c(body, crc32c(head))) + body


def decode_piece(entry: bytes) -> Piece:
    """Returns the piece that the entry contains. Raises DamagedSnapshot."""
    if len(entry) < _HEAD.size + _CRC.size:
        raise DamagedSnapshot(f"{len(entry)} bytes are no piece of a snapshot")
    magic, version, _, sequence, piece, pieces = _HEAD.unpack_from(entry)
    if magic != MAGIC:
        raise DamagedSnapshot(f"{entry[:2].hex()} does not begin a snapshot")
    body = entry[_HEAD.size + _CRC.size :]
    if _CRC.unpack_from(entry, _HEAD.size)[0] != crc32c(body, crc32c(entry[: _HEAD.size])):
        raise DamagedSnapshot("the checksum does not match")
    check_format(DEDUPLICATION, version, "a snapshot ledger")
    return Piece(sequence, piece, pieces, body)


def decode_snapshot(pieces: Sequence[Piece]) -> Snapshot:
    """Returns the snapshot that these pieces contain, in order. Raises DamagedSnapshot if it is damaged."""
    try:
        found = msgspec.json.decode(b"".join(each.body for each in pieces), type=_Stored)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedSnapshot(f"it is no snapshot: {error}") from error
    persisted = {name: SequenceProgress(number, uuid, chunk) for name, number, uuid, chunk in found.producers}
    try:
        gaps = {name: BitMap64.deserialize(each) for name, each in found.gaps.items()}
    except ValueError as error:
        raise DamagedSnapshot(f"its gaps do not parse: {error}") from error
    return Snapshot(Position(found.ledger, found.entry), persisted, gaps)
