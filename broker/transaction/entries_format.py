"""The format of the entries of a coordinator's ledger.

    entry = magic "MX" | version u8 | kind u8 | number u32 | crc32c u32 | body

    kind 1  a piece of the snapshot that the ledger begins with
    kind 2  its last piece
    kind 3  records that were decided after it

The body is JSON: a list of records (broker/transaction/records_core.py), each a list that begins with its number.
Big-endian; `number` is the entry's id in the ledger; the checksum covers the 8 bytes before it and the body. The
version is that of proto/versions.py. A ledger that the metadata names has a whole snapshot, because it is named after
the snapshot is stored. An entry that does not parse is damage (DamagedCoordinator): the coordinator is not loaded, for
it could answer "aborted" for a committed transaction.

Example: an entry that says that the transactions below 7 are forgotten, as entry 3 of its ledger:

    4d58 01 03 00000003 <crc32c>  [[8,7]]

Guarding test: tests/broker/transaction/test_entries.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ...proto.checksum import crc32c
from ...proto.versions import COORDINATOR, check_format
from .records_core import AnyRecord

MAGIC = b"MX"
SNAPSHOT, SNAPSHOT_END, RECORDS = 1, 2, 3
ENTRY_BYTES = 1 << 20
"""Bytes of an entry, which ends after the record that reaches them; a record is at most RECORD_BYTES_MAX of the core.
"""

_HEAD = struct.Struct(">2sBBI")
_CRC = struct.Struct(">I")
HEAD_BYTES = _HEAD.size + _CRC.size
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(list[AnyRecord])


class DamagedCoordinator(ValueError):
    """Raised when bytes are not an entry of a coordinator's ledger, or a ledger is not one of a coordinator."""


class CoordinatorEntry(NamedTuple):
    """A decoded entry of a coordinator's ledger."""

    kind: int
    records: list[AnyRecord]


def encode_records(records: Iterable[AnyRecord], first: int) -> list[bytes]:
    """Returns the entries with these records; the first one gets the entry id `first`."""
    bodies = _bodies(records)
    return [_entry(RECORDS, first + number, body) for number, body in enumerate(bodies)]


def encode_snapshot(records: Iterable[AnyRecord]) -> list[bytes]:
    """Encodes these records as the entries of a snapshot. A ledger of a coordinator begins with a snapshot."""
    bodies = _bodies(records) or [b"[]"]
    last = len(bodies) - 1
    return [_entry(SNAPSHOT_END if number == last else SNAPSHOT, number, body) for number, body in enumerate(bodies)]


def _bodies(records: Iterable[AnyRecord]) -> list[bytes]:
    bodies, piece, size = list[bytes](), list[bytes](), 0
    for record in records:
        piece.append(_ENCODER.encode(record))
        size += len(piece[-1])
        if size >= ENTRY_BYTES:
            bodies.append(b"[" + b",".join(piece) + b"]")
            piece, size = [], 0
    if piece:
        bodies.append(b"[" + b",".join(piece) + b"]")
    return bodies


def _entry(kind: int, number: int, body: bytes) -> bytes:
    head = _HEAD.pack(MAGIC, COORDINATOR.version, kind, number)
    return head + _CRC.pack(crc32c(body, crc32c(head))) + body


def decode_entry(entry: bytes, number: int, where: str) -> CoordinatorEntry:
    """Decodes the entry of id `number`. Raises DamagedCoordinator, or NewerFormat if a later version wrote it."""
    if len(entry) < HEAD_BYTES:
        raise DamagedCoordinator(f"{where}: entry {number} of {len(entry)} bytes is too short")
    magic, version, kind, found = _HEAD.unpack_from(entry)
    body = entry[HEAD_BYTES:]
    if magic != MAGIC:
        raise DamagedCoordinator(f"{where}: entry {number} is none of a coordinator")
    if _CRC.unpack_from(entry, _HEAD.size)[0] != crc32c(body, crc32c(entry[: _HEAD.size])):
        raise DamagedCoordinator(f"{where}: the checksum of entry {number} does not match")
    check_format(COORDINATOR, version, where)
    if found != number or kind not in (SNAPSHOT, SNAPSHOT_END, RECORDS):
        raise DamagedCoordinator(f"{where}: entry {found} of kind {kind} where entry {number} belongs")
    try:
        return CoordinatorEntry(kind, _DECODER.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCoordinator(f"{where}: entry {number}: {error}") from error
