"""What a bookie's journals and ledger index certainly hold: by writes and syncs of its disk, and the formats alone."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

from magnetar.bookie.format import framing, journal, ledger_index, peer

_BLOCK = struct.Struct(">IQQQIII")
Key = tuple[int, int]
"""Ledger and entry."""


@dataclass(slots=True)
class Synced:
    """What one bookie's disk certainly holds, from the syncs of its journals."""

    adds: dict[Key, int] = field(default_factory=dict)  # (ledger, entry) -> CRC-32 of the entry's payload
    fences: dict[int, None] = field(default_factory=dict)
    pending: dict[str, list[journal.Record]] = field(default_factory=dict)
    fence_written: dict[int, None] = field(default_factory=dict)
    indexing: dict[str, list[int]] = field(default_factory=dict)  # fences written into a ledger index, by its path
    indexed: dict[int, None] = field(default_factory=dict)  # of those, what is synced there …
    covered: dict[int, None] = field(default_factory=dict)  # … and what a mark that is not yet durable covers
    marked: str = ""  # the folder of that mark
    fenced_upto: int = -1  # an older disk came back: in limbo it counts every ledger up to this as fenced
    sync_failed: bool = False  # in this life


def payload_crc(stored: bytes) -> int:
    return zlib.crc32(memoryview(stored)[peer.ENTRY_HEADER.size :])


def indexed_fences(data: bytes) -> list[int]:
    """Ledgers that the rows of a write into a ledger index call fenced."""
    start = framing.FILE_HEADER_BYTES if data.startswith(ledger_index.MAGIC) else 0
    rows = [ledger_index.decode(data, at) for at in range(start, len(data), ledger_index.RECORD_BYTES)]
    return [row.ledger for row in rows if isinstance(row, ledger_index.LedgerState) and row.fenced]


def journal_records(data: bytes) -> list[journal.Record]:
    """The records of all blocks in a write; none when it is not a write of journal blocks."""
    found: list[journal.Record] = []
    offset = 0
    while offset + journal.BLOCK_HEADER_BYTES <= len(data):
        magic, *rest = _BLOCK.unpack_from(data, offset)
        if magic != journal.BLOCK_MAGIC:
            break
        header = journal.BlockHeader(*rest)
        start = offset + journal.BLOCK_HEADER_BYTES
        records = journal.decode_records(header, data[start : start + header.length])
        found += [] if records is None else records.rows()
        offset += header.padded_bytes
    return found
