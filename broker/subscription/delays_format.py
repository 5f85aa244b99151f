"""A bucket of delayed entries on bookies: a closed ledger of segments, and a directory as its last entry.

    entry = magic "MD" | version u8 | kind u8 | number u32 | count u32 | crc32c u32 | body
                                                        the checksum covers the 12 bytes before it and the body

    kind 1  segment     `number` counts from 0, as the ledger's entries do; the body is `count` keys of 20 bytes, which
                        ascend: delivery time (ms since the epoch) u64 | ledger u64 | entry u32
    kind 2  directory   `number` is that of the segments before it; a row for each of them:
                        first time u64 | last time u64 | keys u32 | size u32 | places
    places = ( ledger i64 | size u32 | entries as a portable roaring bitmap )*

Big-endian. Every position in the places of a segment is one of its keys, and each key is in the places. The bucket
counts when the subscription's record names its ledger, which happens after all of it is stored: so nothing here is ever
torn, and what does not parse or match its checksum is damage (DamagedBucket).

Example: the entry 7:3, due at 1000 ms, in a bucket of its own:

    4d44 01 01 00000000 00000001 <crc32c>  00000000000003e8 0000000000000007 00000003
    4d44 01 02 00000001 00000001 <crc32c>  00000000000003e8 00000000000003e8 00000001 0000001e
                                           0000000000000007 00000012 <18 bytes: a bitmap of 3>

Guarding tests: tests/broker/subscription/test_delays_format.py.
"""

from __future__ import annotations

import struct

from ...proto.checksum import crc32c
from ...proto.versions import DELAYS, check_format
from .core.delay_buckets import KEY_BYTES, SEGMENT_ENTRIES, DelaySegment, UnstoredDelayBucket, decode_entries_by_ledger

MAGIC = b"MD"
SEGMENT, DIRECTORY = 1, 2

_HEAD = struct.Struct(">2sBBII")
_CRC = struct.Struct(">I")
_ROW = struct.Struct(">QQII")
HEAD_BYTES = _HEAD.size + _CRC.size


class DamagedBucket(ValueError):
    """Raised if bytes are not an entry of a bucket."""


def encode_bucket(draft: UnstoredDelayBucket) -> list[bytes]:
    """Returns the entries of the bucket's ledger, in order."""
    entries = [_entry(SEGMENT, number, len(body) // KEY_BYTES, body) for number, body in enumerate(draft.bodies)]
    rows = b"".join(_ROW.pack(*each[:3], len(each.places)) + each.places for each in draft.segments)
    return [*entries, _entry(DIRECTORY, len(entries), len(entries), rows)]


def _entry(kind: int, number: int, count: int, body: bytes) -> bytes:
    head = _HEAD.pack(MAGIC, DELAYS.version, kind, number, count)
    return b"".join((head, _CRC.pack(crc32c(head + body)), body))


def decode_segment(entry: bytes, number: int) -> bytes:
    """Returns the keys of segment `number`, concatenated. Raises DamagedBucket if the entry is damaged, or is not that
    segment."""
    count, body = _decode(entry, SEGMENT, number)
    if not 0 < count <= SEGMENT_ENTRIES or len(body) != count * KEY_BYTES:
        raise DamagedBucket(f"a segment of {count} keys has {len(body)} bytes")
    return body


def decode_directory(entry: bytes, number: int) -> list[DelaySegment]:
    """Returns the segments that the directory lists. `number`: the id of the directory's entry, which is the last one
    of the ledger. Raises DamagedBucket if the entry is damaged."""
    count, body = _decode(entry, DIRECTORY, number)
    segments: list[DelaySegment] = []
    offset = 0
    while offset < len(body):
        if offset + _ROW.size > len(body):
            raise DamagedBucket("a directory ends inside a row")
        first_ms, last_ms, keys, size = _ROW.unpack_from(body, offset)
        offset += _ROW.size
        segment = DelaySegment(first_ms, last_ms, keys, body[offset : offset + size])
        offset += size
        try:
            places = sum(len(entries) for _, entries in decode_entries_by_ledger(segment.places))
        except (ValueError, MemoryError, IndexError) as error:
            raise DamagedBucket(f"places do not parse: {error}") from error
        if places != keys or offset > len(body) or first_ms > last_ms:
            raise DamagedBucket(f"a row of {keys} keys has {places} places")
        segments.append(segment)
    if len(segments) != count or count != number:
        raise DamagedBucket(f"a directory of {count} rows at entry {number} has {len(segments)}")
    return segments


def _decode(entry: bytes, kind: int, number: int) -> tuple[int, bytes]:
    if len(entry) < HEAD_BYTES:
        raise DamagedBucket(f"{len(entry)} bytes are too few for an entry of a bucket")
    magic, version, found, place, count = _HEAD.unpack_from(entry)
    body = entry[HEAD_BYTES:]
    if magic != MAGIC:
        raise DamagedBucket("not an entry of a bucket")
    if crc32c(entry[: _HEAD.size] + body) != _CRC.unpack_from(entry, _HEAD.size)[0]:
        raise DamagedBucket("checksum does not match")
    check_format(DELAYS, version, "a ledger of delayed messages")
    if found != kind or place != number:
        raise DamagedBucket(f"entry {place} of kind {found} where {number} of kind {kind} belongs")
    return count, body
