"""The origin of a copied entry: a field at the end of its metadata, which clients pass over.

    metadata = the source's metadata | schema? | origin
    schema   = field 16 (schema_version) again: the version at the destination, or empty; the last one counts
    origin   = field 50001, bytes: 'mgr1' | topic u64 | ledger i64 | entry i64

Big-endian. `topic` is the first half of the SHA-256 of the topic's full name, with the number of its partition. The
rest of the entry is the source's, byte for byte: payload, compression, encryption, batches, chunks, keys, properties,
times, the producer's name and its sequence ids. Origins of one partition rise, so the newest copied entry has the
position after which a later run continues.

Example: entry 5:7 of a topic whose number is 1 ends in 8ab518 1c 6d677231 0000000000000001 0000000000000005
0000000000000007. Guard: tests/cli/migrate/test_origin.py.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from ...proto.entry import ENTRY_HEAD_BYTES, EntryHeader, client_part_of_bytes, parse_header, split_broker_part
from ...proto.names import Position
from ...proto.varint import varint

_BODY = struct.Struct(">4sQqq")
_MAGIC = b"mgr1"
_TAG = varint(50001 << 3 | 2) + bytes([_BODY.size])
_SCHEMA_VERSION = varint(16 << 3 | 2)
ORIGIN_BYTES = len(_TAG) + _BODY.size


class Origin(NamedTuple):
    """An entry of the source."""

    topic: int  # `number_of` its topic
    position: Position


def number_of(topic: str) -> int:
    """Returns the number of a topic's full name."""
    return int.from_bytes(hashlib.sha256(topic.encode()).digest()[:8])


def copied(client_part: bytes, header: EntryHeader, origin: Origin, schema_version: bytes | None) -> bytes:
    """The entry as it is published at the destination. `schema_version`: None keeps that of the source."""
    added = b"" if schema_version is None else _SCHEMA_VERSION + varint(len(schema_version)) + schema_version
    added += _TAG + _BODY.pack(_MAGIC, origin.topic, *origin.position)
    metadata = client_part[ENTRY_HEAD_BYTES : header.payload_offset] + added
    return client_part_of_bytes(metadata, client_part[header.payload_offset :])


def origin_of(entry: bytes) -> Origin | None:
    """Returns the origin of a stored entry; None: it is not a copy. Raises CorruptEntry."""
    client_part = split_broker_part(entry)[2]
    end = parse_header(client_part).payload_offset
    begin = end - ORIGIN_BYTES
    if begin < ENTRY_HEAD_BYTES or client_part[begin : begin + len(_TAG)] != _TAG:
        return None
    magic, topic, ledger_id, entry_id = _BODY.unpack(client_part[begin + len(_TAG) : end])
    return Origin(topic, Position(ledger_id, entry_id)) if magic == _MAGIC else None
