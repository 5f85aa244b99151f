"""The ledger index's bytes: what a bookie knows of each ledger besides its entries.

    file     = file header (format/framing.py: magic "MGN-LIDX", number = generation) | record*
    record   = crc32c u32 (of the 46 bytes behind it) | type u8 | ledger i64 | flags u8 | key 20 bytes | lac i64
               | last i64

50 bytes, big-endian.
| type | ledger | flags | key | lac | last |
|---|---|---|---|---|---|
| 1 LEDGER | id | 1: fenced | master key | largest LAC known, -1: none | largest entry stored, -1: none |
| 2 TOMBSTONE | first of an interval | 0 | zeros | 0 | last of the interval |

Later records of a ledger replace earlier ones; a tombstone removes the ledgers of its interval. Appended at every
checkpoint (also one without entries) and synced; rewritten as the next generation when most of it is outdated. Which
generation counts and how far is in the mark (format/mark.py): damage before that end is damage in durable data (file
and offset), what lies behind belongs to an unfinished checkpoint and is cut.

Example: ledger 5, fenced, key 20 × 0x22, no LAC, entries up to 9:
`<crc32c> 01 0000000000000005 01 22…22 ffffffffffffffff 0000000000000009`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from .framing import FILE_HEADER_BYTES, Damaged, crc32c
from .peer import KEY_BYTES

MAGIC = b"MGN-LIDX"
_BODY = struct.Struct(">BqB20sqq")
_CRC = struct.Struct(">I")
RECORD_BYTES = _CRC.size + _BODY.size
_LEDGER = 1
_TOMBSTONE = 2
_FENCED = 1


class LedgerState(NamedTuple):
    ledger: int
    fenced: bool
    key: bytes
    lac: int
    last: int


class Tombstone(NamedTuple):
    first: int
    last: int


def encode(record: LedgerState | Tombstone) -> bytes:
    if isinstance(record, Tombstone):
        body = _BODY.pack(_TOMBSTONE, record.first, 0, bytes(KEY_BYTES), 0, record.last)
    else:
        flags = _FENCED if record.fenced else 0
        body = _BODY.pack(_LEDGER, record.ledger, flags, record.key, record.lac, record.last)
    return _CRC.pack(crc32c(body)) + body


def decode_all(data: bytes, path: str) -> Iterator[LedgerState | Tombstone]:
    """The records of a whole file (with its header, which is checked elsewhere), cut at the mark's end."""
    offset = FILE_HEADER_BYTES
    while offset < len(data):
        body = data[offset + _CRC.size : offset + RECORD_BYTES]
        if len(body) != _BODY.size or crc32c(body) != _CRC.unpack_from(data, offset)[0]:
            raise Damaged(path, offset, "record of the ledger index does not match its checksum")
        kind, ledger, flags, key, lac, last = _BODY.unpack(body)
        if kind == _LEDGER:
            yield LedgerState(ledger, bool(flags & _FENCED), key, lac, last)
        elif kind == _TOMBSTONE:
            yield Tombstone(ledger, last)
        else:
            raise Damaged(path, offset, f"unknown record type {kind}")
        offset += RECORD_BYTES
