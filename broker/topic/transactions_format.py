"""The stored outcomes of a topic's transactions, as entries of its outcomes ledger.

A snapshot is a *marker* and the parts that it names, those of earlier snapshots too. Each of them is one entry, or
several consecutive ones when it is larger than PIECE_BYTES:

    entry = magic "MX" | version u8 | kind u8 | sequence u64 | piece u32 | pieces u32 | crc32c u32 | body

    kind 0  marker    MessagePack: {position, open, parts, ended}
                      position [ledger, entry]    what is known is known of all entries up to it
                      open     of each open transaction [most, least, first, entries, indexes, starts, bytes, numbers]
                      ended    [most, least] of each that has ended with entries on their way, which are aborted
                      parts    of each ledger with aborted entries [ledger, sequence, first entry, pieces]
    kind 1  part      MessagePack: [ledger, entries, indexes, bytes]: what is aborted in one ledger of the log

Numbers before the body are big-endian; the version is that of proto/versions.py. `entries` are entry ids as a portable
roaring bitmap (of an open transaction {ledger: bitmap}); `indexes` and `starts` are indexes of messages, as 64-bit
ones.
`sequence` is that of the write, and grows by one with each; a row of `parts` has that of its part, so that an entry in
the wrong place is detected. The checksum covers the 20 bytes before it and the body.
A reader goes back from the end to the last marker all of whose parts can be read. Damage is DamagedOutcomes.
Guarding test: tests/broker/topic/test_transactions_format.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from pyroaring import BitMap, BitMap64

from ...proto.checksum import crc32c
from ...proto.names import Position
from ...proto.states import TxnId
from ...proto.versions import OUTCOMES, check_format
from .dedup_core import SequenceProgress
from .transactions_core import AbortedEntriesOfLedger, OpenTxn

MAGIC = b"MX"
PIECE_BYTES = 1 << 20
"""Largest body of an entry."""
MARKER, PART = 0, 1

_HEAD = struct.Struct(">2sBBQII")
_CRC = struct.Struct(">I")
HEAD_BYTES = _HEAD.size + _CRC.size


class DamagedOutcomes(ValueError):
    """Raised if bytes are no valid (piece of a) snapshot of transactions."""


class OutcomesPartRow(NamedTuple):
    """The place of a part in the outcomes ledger, as a marker lists it."""

    sequence: int
    first_entry: int
    pieces: int


class Piece(NamedTuple):
    """A decoded entry of an outcomes ledger."""

    kind: int
    sequence: int
    piece: int
    pieces: int
    body: bytes

    @property
    def is_last(self) -> bool:
        """Returns True if this is the last piece of a marker, which completes a snapshot."""
        return self.kind == MARKER and self.piece == self.pieces - 1


class Marker(NamedTuple):
    """The marker that ends a snapshot: it lists the valid parts."""

    position: Position
    open: tuple[OpenTxn, ...]
    parts: Mapping[int, OutcomesPartRow]
    ended: tuple[TxnId, ...] = ()


class _Open(msgspec.Struct, frozen=True, array_like=True):
    most: int
    least: int
    first: tuple[int, int]
    entries: dict[int, bytes]
    indexes: bytes
    starts: bytes
    size: int
    numbers: list[tuple[str, int, str, int, int, int]]


class _Marker(msgspec.Struct, frozen=True):
    position: tuple[int, int]
    open: list[_Open]
    parts: list[tuple[int, int, int, int]]
    ended: list[tuple[int, int]] = []


class _Part(msgspec.Struct, frozen=True, array_like=True):
    ledger: int
    entries: bytes
    indexes: bytes
    size: int


# ------------------------------------------------------------------------------------------ encoding
def encode_part(ledger_id: int, part: AbortedEntriesOfLedger, sequence: int) -> list[bytes]:
    """Returns the entries of the part, in the order in which they are to be appended."""
    part.entries.run_optimize()
    stored = _Part(ledger_id, part.entries.serialize(), part.indexes.serialize(), part.size)
    return _pieces(PART, sequence, msgspec.msgpack.encode(stored))


def encode_marker(marker: Marker, sequence: int) -> list[bytes]:
    """Returns the entries of the marker, in the order in which they are to be appended."""
    rows = [(ledger_id, *row) for ledger_id, row in sorted(marker.parts.items())]
    opened = [_open(each) for each in marker.open]
    stored = _Marker((marker.position[0], marker.position[1]), opened, rows, list(marker.ended))
    return _pieces(MARKER, sequence, msgspec.msgpack.encode(stored))


def _open(each: OpenTxn) -> _Open:
    numbers = [(name, *progress, *last) for name, (progress, last) in each.numbers.items()]
    entries = {ledger_id: entries.serialize() for ledger_id, entries in each.entries.items()}
    return _Open(
        *each.txn, (each.first[0], each.first[1]), entries, each.indexes.serialize(), each.starts.serialize(),
        each.size, numbers,
    )  # fmt: skip


def _pieces(kind: int, sequence: int, body: bytes) -> list[bytes]:
    bodies = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)]
    entries = []
    for number, each in enumerate(bodies):
        head = _HEAD.pack(MAGIC, OUTCOMES.version, kind, sequence, number, len(bodies))
        entries.append(head + _CRC.pack(crc32c(each, crc32c(head))) + each)
    return entries


# ------------------------------------------------------------------------------------------ decoding
def decode_piece(entry: bytes) -> Piece:
    """Returns the piece that the entry contains. Raises DamagedOutcomes if the entry is damaged; NewerFormat if a later
    version of Magnetar wrote it."""
    if len(entry) < HEAD_BYTES:
        raise DamagedOutcomes(f"{len(entry)} bytes are no piece of outcomes")
    magic, version, kind, sequence, piece, pieces = _HEAD.unpack_from(entry)
    if magic != MAGIC:
        raise DamagedOutcomes(f"{entry[:2].hex()} does not begin outcomes")
    body = entry[HEAD_BYTES:]
    if _CRC.unpack_from(entry, _HEAD.size)[0] != crc32c(body, crc32c(entry[: _HEAD.size])):
        raise DamagedOutcomes("the checksum does not match")
    check_format(OUTCOMES, version, "an outcomes ledger")
    if not piece < pieces or kind > PART:
        raise DamagedOutcomes(f"piece {piece} of {pieces} of kind {kind}")
    return Piece(kind, sequence, piece, pieces, body)


def decode_marker(pieces: Sequence[Piece]) -> Marker:
    """Returns the marker that consists of these pieces. Raises DamagedOutcomes if it is damaged."""
    try:
        found = msgspec.msgpack.decode(b"".join(each.body for each in pieces), type=_Marker)
        opened = tuple(
            OpenTxn(
                TxnId(each.most, each.least), Position(*each.first),
                {ledger_id: BitMap.deserialize(entries) for ledger_id, entries in each.entries.items()},
                BitMap64.deserialize(each.indexes), BitMap64.deserialize(each.starts), each.size,
                {
                    name: (SequenceProgress(number, uuid, chunk), Position(ledger_id, entry_id))
                    for name, number, uuid, chunk, ledger_id, entry_id in each.numbers
                },
            )
            for each in found.open
        )  # fmt: skip
    except (msgspec.DecodeError, ValueError, IndexError, MemoryError, RecursionError) as error:
        raise DamagedOutcomes(f"it is no marker: {error}") from error
    rows = {row[0]: OutcomesPartRow(*row[1:]) for row in found.parts}
    return Marker(Position(*found.position), opened, rows, tuple(TxnId(*each) for each in found.ended))


def decode_part(ledger_id: int, row: OutcomesPartRow, pieces: Sequence[Piece]) -> AbortedEntriesOfLedger:
    """Returns the part at the place `row`. Raises DamagedOutcomes if the pieces are damaged, or belong to another
    part."""
    for number, each in enumerate(pieces):
        if each[:4] != (PART, row.sequence, number, row.pieces):
            raise DamagedOutcomes(f"the part of ledger {ledger_id} is not at entry {row.first_entry}")
    try:
        found = msgspec.msgpack.decode(b"".join(each.body for each in pieces), type=_Part)
        if found.ledger != ledger_id:
            raise DamagedOutcomes(f"the part of ledger {ledger_id} is of ledger {found.ledger}")
        return AbortedEntriesOfLedger(
            BitMap.deserialize(found.entries), BitMap64.deserialize(found.indexes), found.size
        )
    except (msgspec.DecodeError, ValueError, IndexError, MemoryError, RecursionError) as error:
        raise DamagedOutcomes(f"it is no part: {error}") from error
