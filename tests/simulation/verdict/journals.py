"""What a bookie's journals and ledger index certainly hold: by writes and syncs of its disk, and the formats alone.

A journal is judged by the order of its bytes, not by the time of its writes: two blocks may be in the disk at once, and
the later one may be there first. A replay ends at the first hole, so a block counts as synced when it is and everything
before it in its file is. A record is behind another when it is behind it in the file, or in a later file.
"""

import struct
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

from magnetar.bookie.format import journal, ledger_index
from magnetar.bookie.format import journal as framing
from magnetar.ledger import peer_format as peer

_BLOCK = struct.Struct(">IQQQIII")
Key = tuple[int, int]
"""Ledger and entry."""


class Place(NamedTuple):
    """Of a record: journal, offset of its block, and its number there. In the order in which a replay meets them."""

    journal: int
    offset: int
    index: int


BEFORE_ALL = Place(-1, 0, 0)


class Block(NamedTuple):
    journal: int
    offset: int
    size: int
    records: list[journal.JournalRecord]

    def placed(self) -> list[tuple[Place, journal.JournalRecord]]:
        return [(Place(self.journal, self.offset, index), record) for index, record in enumerate(self.records)]


@dataclass(slots=True)
class Synced:
    """What one bookie's disk certainly holds, from the syncs of its journals."""

    adds: dict[Key, int] = field(default_factory=dict)  # (ledger, entry) -> CRC-32 of the entry's payload
    fences: dict[int, None] = field(default_factory=dict)
    pending: dict[str, list[Block]] = field(default_factory=dict)  # written, not synced; by path
    landed: dict[int, dict[int, Block]] = field(default_factory=dict)  # synced behind a hole; by journal and offset
    upto: dict[int, int] = field(default_factory=dict)  # journal -> where its first hole is
    fence_written: dict[int, Place] = field(default_factory=dict)
    last_add: dict[int, tuple[Place, Key]] = field(default_factory=dict)  # ledger -> its writer's last, in file order
    indexing: dict[str, list[int]] = field(default_factory=dict)  # fences written into a ledger index, by its path
    indexed: dict[int, None] = field(default_factory=dict)  # of those, what is synced there …
    covered: dict[int, None] = field(default_factory=dict)  # … and what a mark that is not yet durable covers
    marked: str = ""  # the folder of that mark
    fenced_upto: int = -1  # an older disk came back: in limbo it counts every ledger up to this as fenced
    sync_failed: bool = False  # in this life


def payload_crc(stored: bytes) -> int:
    return zlib.crc32(memoryview(stored)[peer.ENTRY_HEADER_STRUCT.size :])


def indexed_fences(data: bytes) -> list[int]:
    """Ledgers that the rows of a write into a ledger index call fenced."""
    start = framing.FILE_HEADER_BYTES if data.startswith(ledger_index.LEDGER_INDEX_MAGIC) else 0
    rows = [
        ledger_index.decode_record_if_intact(data, at)
        for at in range(start, len(data), ledger_index.LEDGER_RECORD_BYTES)
    ]
    return [row.ledger for row in rows if isinstance(row, ledger_index.LedgerState) and row.fenced]


def journal_blocks(data: bytes, at: int) -> list[Block]:
    """The blocks in a write at that offset; none when it is not a write of journal blocks."""
    found: list[Block] = []
    offset = 0
    while offset + journal.BLOCK_HEADER_BYTES <= len(data):
        magic, *rest = _BLOCK.unpack_from(data, offset)
        if magic != journal.BLOCK_MAGIC:
            break
        header = journal.BlockHeader(*rest)
        start = offset + journal.BLOCK_HEADER_BYTES
        records = journal.decode_records_if_intact(header, data[start : start + header.length])
        if records is not None:
            found.append(Block(header.journal, at + offset, header.padded_bytes, list(records.rows())))
        offset += header.padded_bytes
    return found


def wiped(synced: Synced, path: str, offset: int) -> None:
    """Zeros were written over the start of a block, so that it never counts: the block before it found no room."""
    number = int(path.rpartition("/")[2].removesuffix(".jnl"))
    synced.landed.get(number, {}).pop(offset, None)
    synced.pending[path] = [block for block in synced.pending.get(path, ()) if block.offset != offset]
    for ledger, place in list(synced.fence_written.items()):
        if place[:2] == (number, offset):
            del synced.fence_written[ledger]


def land(synced: Synced, path: str) -> list[journal.JournalRecord]:
    """The file was synced: the records that certainly count from now on, in their order."""
    counted: list[journal.JournalRecord] = []
    for number in dict.fromkeys(block.journal for block in synced.pending.get(path, ())):
        landed = synced.landed.setdefault(number, {})
        landed |= {block.offset: block for block in synced.pending[path] if block.journal == number}
        upto = synced.upto.get(number, journal.BLOCK_ALIGNMENT_BYTES)
        while upto in landed:
            block = landed.pop(upto)
            counted += block.records
            upto += block.size
        synced.upto[number] = upto
    synced.pending.pop(path, None)
    return counted


def apply_power_loss(synced: Synced) -> None:
    synced.pending.clear()
    synced.fence_written = {ledger: synced.fence_written.get(ledger, BEFORE_ALL) for ledger in synced.fences}


def rolled_back(synced: Synced) -> None:
    """Journals begin again with numbers that were used: places of before say nothing any more."""
    synced.landed, synced.upto, synced.last_add = {}, {}, {}
    synced.fence_written = dict.fromkeys(synced.fence_written, BEFORE_ALL)
