"""The ledger index's bytes: what a bookie knows of each ledger besides its entries, and its own state.

    file     = file header (format/journal.py: magic "MGN-LIDX", number = generation) | record*
    record   = crc32c u32 (of the 46 bytes after it) | type u8 | ledger i64 | flags u8 | key 20 bytes | lac i64
               | last i64

50 bytes, big-endian.
| type | ledger | flags | key | lac | last |
|---|---|---|---|---|---|
| 1 LEDGER | id | 1: fenced; 2: dropped copies | key | largest LAC known, -1: none | largest entry stored, -1: none |
| 2 TOMBSTONE | first of an interval | 0 | zeros | 0 | last of the interval |
| 3 QUARANTINED | id | 0 | zeros | first entry of an interval | last: the only local copies are damaged |
| 4 MENDED | id | 0 | zeros | first entry of an interval | last: good copies of these are in the log again |
| 5 LIMBO | largest ledger it concerns | 1: entered, 0: left | zeros | 0 | 0 |
| 6 DRAINED | a log's number | 0 | zeros | 0 | 0: all that lives of this log was copied, the log may go |

Later records of a ledger replace earlier ones; a tombstone removes the ledgers of its interval, also from quarantine.
Limbo fences all ledgers up to its id for ever, also after it was left. An older Magnetar ignores the flag 2, and loses
it when it writes the ledger again. Appended at every
checkpoint (also one without entries) and synced; rewritten as the next generation when most of it is outdated. Which
generation counts and how far is in the mark (format/mark.py): damage before that end is damage in durable data (file
and offset), what is after belongs to an unfinished checkpoint and is cut. Because all records are equally long, a
reader can go on after a damaged one (`decode_record_if_intact`).

Examples: ledger 5, fenced, key 20 × 0x22, no LAC, entries up to 9; entry 4 of ledger 5 quarantined; limbo up to 7;
log 3 drained:
`<crc32c> 01 0000000000000005 01 22…22 ffffffffffffffff 0000000000000009`
`<crc32c> 03 0000000000000005 00 00…00 0000000000000004 0000000000000004`
`<crc32c> 05 0000000000000007 01 00…00 0000000000000000 0000000000000000`
`<crc32c> 06 0000000000000003 00 00…00 0000000000000000 0000000000000000`.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple, assert_never

from ...ledger.peer_format import LEDGER_KEY_BYTES
from ...proto import versions
from .journal import Buffer, crc32c

LEDGER_INDEX_MAGIC = versions.LEDGER_INDEX.magic
_BODY = struct.Struct(">BqB20sqq")
_CRC = struct.Struct(">I")
LEDGER_RECORD_BYTES = _CRC.size + _BODY.size
_SET = 1
_DROPPED = 2
_NO_KEY = bytes(LEDGER_KEY_BYTES)


class LedgerIndexRecordKind(enum.IntEnum):
    """The type of a record in the ledger index. The table in the module's docstring lists the fields of each type."""

    LEDGER = 1
    TOMBSTONE = 2
    QUARANTINED = 3
    MENDED = 4
    LIMBO = 5
    DRAINED = 6


class LedgerState(NamedTuple):
    """The record of a ledger in the ledger index: whether the ledger is fenced, its master key (20 bytes), its largest
    known last-add-confirmed (LAC; -1: none), and the largest entry id stored here (-1: none). `dropped`: copies of it
    were dropped here, because its record in the metadata names other bookies (bookie/maintenance/garbage.py)."""

    ledger: int
    fenced: bool
    key: bytes
    lac: int
    last: int
    dropped: bool = False

    def __repr__(self) -> str:
        """Returns a text without the master key, because a repr may be logged."""
        return f"LedgerState({self.ledger}, fenced={self.fenced}, lac={self.lac}, last={self.last})"


class Tombstone(NamedTuple):
    """The durable record that the ledgers `first … last` are deleted: their entries cannot be read any more, and their
    disk space may be freed."""

    first: int
    last: int


class QuarantinedEntries(NamedTuple):
    """The durable record that this bookie's copies of the entries `first … last` of the ledger are damaged. If a read
    of such an entry finds no good copy, the answer is UNKNOWN, never "no such entry"."""

    ledger: int
    first: int
    last: int


class QuarantineEnded(NamedTuple):
    """The durable record that the entries `first … last` of the ledger are not quarantined any more, because this
    bookie has good copies of them again."""

    ledger: int
    first: int
    last: int


class LimboChange(NamedTuple):
    """The durable record that limbo (the state of a bookie that may have lost data) begins or ends. `entered` True:
    limbo begins, because entries of ledgers up to `upto` may be lost. `entered` False: limbo ends, because all lost
    entries were restored or given up. In both cases the ledgers up to `upto` stay fenced here for ever."""

    upto: int
    entered: bool


class DrainedEntryLog(NamedTuple):
    """The durable record that all living entries of the entry log number `log` were copied to another log (the log is
    drained). No reader needs the log any more, and a start of the bookie removes its files."""

    log: int


LedgerIndexRecord = LedgerState | Tombstone | QuarantinedEntries | QuarantineEnded | LimboChange | DrainedEntryLog


def encode_ledger_record(
    ledger: int, fenced: bool, key: bytes, lac: int, last: int, dropped: bool = False
) -> bytes:  # fmt: skip
    """Encodes the record of a ledger in the ledger index and returns its 50 bytes. The fields are those of
    `LedgerState`."""
    body = _BODY.pack(1, ledger, (_SET if fenced else 0) | (_DROPPED if dropped else 0), key, lac, last)
    return _CRC.pack(crc32c(body)) + body


def encode_ledger_index_record(record: LedgerIndexRecord) -> bytes:
    """Encodes any record of the ledger index and returns its 50 bytes."""
    match record:
        case LedgerState(ledger, fenced, key, lac, last, dropped):
            return encode_ledger_record(ledger, fenced, key, lac, last, dropped)
        case Tombstone(first, last):
            body = _BODY.pack(LedgerIndexRecordKind.TOMBSTONE, first, 0, _NO_KEY, 0, last)
        case QuarantinedEntries(ledger, first, last):
            body = _BODY.pack(LedgerIndexRecordKind.QUARANTINED, ledger, 0, _NO_KEY, first, last)
        case QuarantineEnded(ledger, first, last):
            body = _BODY.pack(LedgerIndexRecordKind.MENDED, ledger, 0, _NO_KEY, first, last)
        case LimboChange(upto, entered):
            body = _BODY.pack(LedgerIndexRecordKind.LIMBO, upto, _SET if entered else 0, _NO_KEY, 0, 0)
        case DrainedEntryLog(number):
            body = _BODY.pack(LedgerIndexRecordKind.DRAINED, number, 0, _NO_KEY, 0, 0)
        case _ as never:
            assert_never(never)
    return _CRC.pack(crc32c(body)) + body


def decode_record_if_intact(data: Buffer, offset: int = 0) -> LedgerIndexRecord | None:
    """Decodes the record of the ledger index that begins at `offset` of `data` and returns it. Returns None if the
    record is damaged, cut off, or of an unknown type."""
    body = bytes(data[offset + _CRC.size : offset + LEDGER_RECORD_BYTES])
    if len(body) != _BODY.size or crc32c(body) != _CRC.unpack_from(data, offset)[0]:
        return None
    kind, ledger, flags, key, lac, last = _BODY.unpack(body)
    if kind == LedgerIndexRecordKind.LEDGER:
        return LedgerState(ledger, bool(flags & _SET), key, lac, last, bool(flags & _DROPPED))
    match kind:
        case LedgerIndexRecordKind.TOMBSTONE:
            return Tombstone(ledger, last)
        case LedgerIndexRecordKind.QUARANTINED:
            return QuarantinedEntries(ledger, lac, last)
        case LedgerIndexRecordKind.MENDED:
            return QuarantineEnded(ledger, lac, last)
        case LedgerIndexRecordKind.LIMBO:
            return LimboChange(ledger, bool(flags & _SET))
        case LedgerIndexRecordKind.DRAINED:
            return DrainedEntryLog(ledger)
    return None
