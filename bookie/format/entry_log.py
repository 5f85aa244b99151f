"""The entry log's bytes: entries of many ledgers, each flush ledger by ledger in entry order.

    file   = file header (format/journal.py: magic "MGN-ELOG", number = log id), zeros up to 4096 | record* | zeros
    record = length u32 | crc32c u32 (of length, then the stored entry) | stored entry (`length` bytes)

Big-endian. The stored entry (ledger/peer_format.py) begins with ledger i64, entry i64, so a record identifies its
entry; a reader compares both with what it asked for. Where records begin is in the index (index.py); because a
record carries its length, a log can also be read from 4096 on without one. The file is pre-allocated: zeros after the
last record, and `length` 0 is no record. A record with a wrong length, checksum or id is damage: the reader answers
UNKNOWN for that entry, never "no such entry".

Example: the stored entry b"abc" is `00000003 <crc32c of 00000003616263> 616263`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from operator import add
from typing import NamedTuple

from ...ledger.peer_format import ENTRY_HEADER_STRUCT, extend_checksum_by_entry
from ...proto import checksum, versions
from ...proto.checksum import JOINED_BYTES_MIN
from .journal import crc32c

ENTRY_LOG_MAGIC = versions.ENTRY_LOG.magic
FIRST_RECORD_OFFSET = 4096
_HEAD = struct.Struct(">II")
_LENGTH = struct.Struct(">I")
_IDS = struct.Struct(">qq")
_HEAD_AND_IDS = struct.Struct(">IIqq")
RECORD_HEADER_BYTES = _HEAD.size
_RECORD_BYTES_MIN = RECORD_HEADER_BYTES + ENTRY_HEADER_STRUCT.size


class EntryIds(NamedTuple):
    """The ledger id and the entry id that the header of a stored entry contains."""

    ledger: int
    entry: int


def encode_records(stored: Sequence[tuple[bytes, ...]]) -> tuple[list[int], Iterator[tuple[bytes, ...]]]:
    """Encodes the entry log's records of these stored entries. Returns the sizes of the records in bytes, and an
    iterator over the buffers of each record.

    `stored` has at least one entry. Each entry is one or more buffers, with the entry's header in the first buffer; the
    caller must have verified all entries. The records are encoded column by column: a flush has a million entries, and
    a call for each entry would cost four times as much. The checksums are computed while the iterator is read."""
    columns = list(zip_longest(*stored, fillvalue=b""))
    lengths = list(map(len, columns[0]))
    for column in columns[1:]:
        lengths = list(map(add, lengths, map(len, column)))
    crcs: Iterator[int]
    if max(lengths) < JOINED_BYTES_MIN:
        prefixes = {length: checksum.crc32c(_LENGTH.pack(length), 0) for length in set(lengths)}
        crcs = map(prefixes.__getitem__, lengths)
        for column in columns:
            crcs = map(checksum.crc32c, column, crcs)
    else:
        crcs = map(_record_crc, lengths, stored)
    return [length + RECORD_HEADER_BYTES for length in lengths], zip(
        map(_HEAD.pack, lengths, crcs), *columns, strict=True
    )


def _record_crc(length: int, stored: tuple[bytes, ...]) -> int:
    head = _LENGTH.pack(length)
    if length < JOINED_BYTES_MIN:
        return crc32c(head, *stored)
    return extend_checksum_by_entry(head, stored[0][: ENTRY_HEADER_STRUCT.size], length - ENTRY_HEADER_STRUCT.size)


def decode_record_if_intact(data: bytes, start: int, end: int) -> bytes | None:
    """Decodes the entry log's record data[start:end] and returns the stored entry in it. Returns None if the record is
    damaged, or if `data` ends before it."""
    stored = data[start + RECORD_HEADER_BYTES : end]
    if end - start < RECORD_HEADER_BYTES or end > len(data):
        return None
    length, crc = _HEAD.unpack_from(data, start)
    if length != len(stored) or crc32c(data[start : start + 4], stored) != crc:
        return None
    return stored


def decode_entries_if_intact(data: bytes | memoryview, offsets: Sequence[int], ledger: int, entry: int) -> list[bytes]:
    """Decodes records of an entry log and returns their stored entries: `entry`, `entry + 1`, … of `ledger`, up to the
    first record that is damaged or belongs to another entry.

    Record i is data[offsets[i] - offsets[0] : offsets[i + 1] - offsets[0]]. Only the returned bytes are copied; small
    records are sliced faster if `data` is `bytes`.
    """
    found: list[bytes] = []
    extend = checksum.crc32c
    base, size = offsets[0], len(data)
    known_length = length_crc = -1  # entries are often equally long: the checksum of their length is taken once
    for start, end in pairwise(offsets):
        start, end = start - base, end - base
        if end > size or end - start < _RECORD_BYTES_MIN:
            break
        length, crc, of_ledger, of_entry = _HEAD_AND_IDS.unpack_from(data, start)
        stored = data[start + RECORD_HEADER_BYTES : end]
        if type(stored) is not bytes:
            stored = bytes(stored)
        if length != known_length:
            known_length, length_crc = length, crc32c(data[start : start + 4])
        if length != len(stored) or extend(stored, length_crc) != crc or of_entry != entry or of_ledger != ledger:
            break
        found.append(stored)
        entry += 1
    return found


def decode_record_size(data: bytes, start: int) -> int:
    """Returns the size in bytes, with the header, of the record that begins at `start`, as the record's length field
    says. Returns 0 if `data` ends within the header."""
    if len(data) - start < RECORD_HEADER_BYTES:
        return 0
    return RECORD_HEADER_BYTES + int(_HEAD.unpack_from(data, start)[0])


def verify_record_at(data: bytes, start: int) -> tuple[int, int, int] | None:
    """Verifies the record that begins at `start` and returns (offset of its end, ledger id, entry id). Returns None if
    `data` has no complete, undamaged record there."""
    if len(data) - start < _RECORD_BYTES_MIN:
        return None
    length, crc = _HEAD.unpack_from(data, start)
    end = start + RECORD_HEADER_BYTES + length
    if end > len(data) or length < ENTRY_HEADER_STRUCT.size:
        return None
    if crc32c(data[start : start + 4], data[start + RECORD_HEADER_BYTES : end]) != crc:
        return None
    ledger, entry = _IDS.unpack_from(data, start + RECORD_HEADER_BYTES)
    return end, ledger, entry


def decode_entry_ids(stored: bytes) -> EntryIds | None:
    """Returns the ledger id and the entry id from the header of a stored entry; None if the bytes are too short for a
    header."""
    if len(stored) < ENTRY_HEADER_STRUCT.size:
        return None
    return EntryIds(*ENTRY_HEADER_STRUCT.unpack_from(stored)[:2])
