"""The index's bytes: where the entries of one entry log are. One index file per log; each flush appends one group.

    file   = file header (format/journal.py: magic "MGN-INDX", number = log id) | group*
    group  = "MIGR" | extents u32 | tables u64 (bytes of all tables) | crc32c u32 (of the 16 bytes before and all heads)
             | head* | table*
    head   = ledger i64 | first entry i64 | last entry i64 | entries u32 | length u32 | start u64 | table crc32c u32
    table  = entries × (entry - first entry) u32 | (entries + 1) × (offset - start) u32

Big-endian; a table is as long as `entries` says, tables are in the order of the heads. An extent is a run of records of
one ledger in ascending entry order at log[start : start+length]; record i of it is log[start + offset[i] : start +
offset[i+1]]. Entry ids may have gaps (a bookie of a striped ensemble holds every n-th). A group's heads ascend by
ledger, so that the extents of a ledger are adjacent: a reader finds them by the first ledger of each page of
`HEADS_PER_PAGE` heads, which is all that stays in memory (bookie/store/index.py). Heads can be read without the
tables, which are loaded when needed; the table of an extent with one entry follows from its head.

Damage: the mark says where the file must end (format/mark.py). Anything invalid before that end is damage in durable
data (file and offset); anything after it is left from an unfinished checkpoint and is cut. A table that does not
match its checksum makes the entries of that extent UNKNOWN.

Example: entries 0 and 1 of ledger 3 with records of 8+36 bytes at 4096: heads `3, 0, 1, 2, 88, 4096, crc`, table
`00000000 00000001 | 00000000 0000002c 00000058`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import add
from typing import NamedTuple

from ...proto import versions
from .journal import Buffer, crc32c

INDEX_MAGIC = versions.INDEX.magic
GROUP_MAGIC = b"MIGR"
_GROUP = struct.Struct(">4sIQ")
_CRC = struct.Struct(">I")
_HEAD = struct.Struct(">qqqIIQI")
GROUP_HEADER_BYTES = _GROUP.size + _CRC.size
EXTENT_HEAD_BYTES = _HEAD.size
ENTRY_DELTA_MAX = (1 << 32) - 1
HEADS_PER_PAGE = 64
INDEX_PAGE_BYTES = HEADS_PER_PAGE * EXTENT_HEAD_BYTES
_HEAD_WORDS = EXTENT_HEAD_BYTES // 4


class Extent(NamedTuple):
    """The head of an extent: a run of records of one ledger at log[start : start + length], in ascending entry order.

    `first` and `last` are the smallest and the largest entry id; `entries` is the number of records; `length` and
    `start` are in bytes; `table_crc` is the CRC32C of the extent's table."""

    ledger: int
    first: int
    last: int
    entries: int
    length: int
    start: int
    table_crc: int

    @property
    def table_bytes(self) -> int:
        """The size of the extent's table in the index file, in bytes."""
        return 4 * (2 * self.entries + 1)


class ExtentTable(NamedTuple):
    """The table of an extent: which entries the extent's records contain, and where the records are in the log. Record
    i contains the entry `first + deltas[i]` and is at log[start + offsets[i] : start + offsets[i + 1]]; `first` and
    `start` are fields of the extent."""

    deltas: array[int]
    offsets: array[int]


class IndexGroupHeader(NamedTuple):
    """The header of a group of extents in an index file: the number of extents, the size of all their tables in bytes,
    and the checksum of the header and the extent heads."""

    extents: int
    tables_bytes: int
    crc: int

    @property
    def extent_heads_bytes(self) -> int:
        """The size of all extent heads of the group, in bytes."""
        return self.extents * EXTENT_HEAD_BYTES


def encode_extent(ledger: int, entries: Sequence[int], offsets: Sequence[int], start: int) -> tuple[Extent, bytes]:
    """Makes an extent of the ascending `entries`. Returns the extent and the encoded bytes of its table. `offsets` are
    the offsets of the records relative to `start`, followed by the end of the last record. The last entry must be at
    most ENTRY_DELTA_MAX after the first one."""
    first = entries[0]
    table = _words([entry - first for entry in entries]) + _words(offsets)
    return Extent(ledger, first, entries[-1], len(entries), offsets[-1], start, crc32c(table)), table


def encode_extent_heads(extents: Sequence[Extent]) -> bytes:
    """Encodes the heads of these extents, one after the other, and returns their bytes."""
    return b"".join([_HEAD.pack(*extent) for extent in extents])


def encode_index_group(extents: Sequence[Extent], tables: Sequence[bytes]) -> bytes:
    """Encodes a group of an index file and returns its bytes. `extents` must ascend by ledger; `tables` are their
    encoded tables, in the same order."""
    assert all(a.ledger <= b.ledger for a, b in pairwise(extents)), "the extents of a group must ascend by ledger"
    heads = encode_extent_heads(extents)
    head = _GROUP.pack(GROUP_MAGIC, len(extents), sum(map(len, tables)))
    return b"".join([head, _CRC.pack(crc32c(head, heads)), heads, *tables])


def decode_group_header_if_intact(data: bytes) -> IndexGroupHeader | None:
    """Decodes the group header at the start of `data`. Returns None if the bytes are not a group header. Does not
    verify the header's checksum, which also covers the extent heads: the caller must do that."""
    if len(data) < GROUP_HEADER_BYTES:
        return None
    magic, extents, tables_bytes = _GROUP.unpack_from(data)
    if magic != GROUP_MAGIC:
        return None
    return IndexGroupHeader(extents, tables_bytes, _CRC.unpack_from(data, _GROUP.size)[0])


def compute_group_header_checksum(data: bytes) -> int:
    """Returns the CRC32C of the group header at the start of `data`, without its checksum field. The caller must
    continue this CRC with the bytes of the extent heads."""
    return crc32c(data[: _GROUP.size])


def decode_extent_heads(heads: Buffer) -> Iterator[Extent]:
    """Yields the extents that are encoded in `heads`. Verifies nothing: the caller must have verified the checksum of
    these bytes."""
    return map(Extent._make, _HEAD.iter_unpack(heads))


def find_ledger_extents(heads: Buffer, ledger: int, tables_offset: int) -> list[tuple[Extent, int]]:
    """Returns the extents of `ledger` among the encoded extent heads `heads`, each with the offset of its table in the
    index file. `tables_offset` is the offset of the table that belongs to the first head."""
    found: list[tuple[Extent, int]] = []
    for head in _HEAD.iter_unpack(heads):  # of other ledgers, mostly: no object for each
        if head[0] == ledger:
            found.append((Extent(*head), tables_offset))
        tables_offset += 4 * (2 * head[3] + 1)  # `Extent.table_bytes`
    return found


class ExtentHeadColumns(NamedTuple):
    """The extent heads of one group as two arrays: the ledger ids, and the numbers of entries. An object for each head
    would need too much memory. `reach` is the largest offset in the log at which any of these extents ends."""

    ledgers: array[int]
    entries: array[int]
    reach: int


def decode_head_columns(heads: bytes) -> ExtentHeadColumns:
    """Decodes whole extent heads and returns them as columns. Verifies nothing: the caller must have verified the
    checksum of these bytes."""
    words = array("I", heads)
    if sys.byteorder == "little":
        words.byteswap()
    ledgers = array("I", bytes(8 * (len(heads) // EXTENT_HEAD_BYTES)))
    low = 0 if sys.byteorder == "little" else 1
    ledgers[low::2], ledgers[1 - low :: 2] = words[1::_HEAD_WORDS], words[0::_HEAD_WORDS]
    starts = array("I", bytes(8 * (len(heads) // EXTENT_HEAD_BYTES)))
    starts[low::2], starts[1 - low :: 2] = words[9::_HEAD_WORDS], words[8::_HEAD_WORDS]
    reach = max(map(add, array("Q", starts.tobytes()), words[7::_HEAD_WORDS]), default=0)
    return ExtentHeadColumns(array("Q", ledgers.tobytes()), words[6::_HEAD_WORDS], reach)


def decode_table_if_intact(extent: Extent, data: bytes) -> ExtentTable | None:
    """Decodes the table of `extent` from the bytes `data`. Returns None if the table is damaged."""
    if len(data) != extent.table_bytes or crc32c(data) != extent.table_crc:
        return None
    words = array("I", data)
    if sys.byteorder == "little":
        words.byteswap()
    return ExtentTable(words[: extent.entries], words[extent.entries :])


def make_single_entry_table(extent: Extent) -> ExtentTable:
    """Returns the table of an extent that contains only one entry. It follows from the head of the extent."""
    assert extent.entries == 1
    return ExtentTable(array("I", (0,)), array("I", (0, extent.length)))


def _words(values: Sequence[int]) -> bytes:
    words = array("I", values)
    assert words.itemsize == 4
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()
