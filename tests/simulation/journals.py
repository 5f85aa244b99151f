"""What a bookie's journals certainly hold: read from the writes and syncs of its disk with the format module alone."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

from magnetar.bookie.format import journal, peer

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
    unsynced_fences: dict[int, None] = field(default_factory=dict)  # written by a life that ended before the sync
    asked: dict[int, None] = field(default_factory=dict)  # of this life: a checkpoint may store one before the journal
    replayed: dict[int, None] = field(default_factory=dict)  # of both, what a mark that is not yet durable covers
    marked: str = ""  # the folder of that mark
    fenced_upto: int = -1  # an older disk came back: in limbo it counts every ledger up to this as fenced
    sync_failed: bool = False  # in this life


def payload_crc(stored: bytes) -> int:
    return zlib.crc32(memoryview(stored)[peer.ENTRY_HEADER.size :])


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
