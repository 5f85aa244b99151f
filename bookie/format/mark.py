"""The mark's bytes: the one commit point of a checkpoint.

    mark = file header (format/framing.py: magic "MGN-MARK", number = count of marks written)
           | journal id u64 | journal offset u64 | log id u64 | log end u64 | index end u64
           | ledgers generation u64 | ledgers end u64 | crc32c u32 (of the 56 bytes before)

124 bytes, big-endian. It says: everything in the journal before (journal id, offset) is in entry logs, indexes and the
ledger index; of the last log and its index exactly so many bytes count, of older ones all; of the ledger index that
generation and so many bytes. What lies behind was written by a checkpoint that did not end, and its records are still
in the journal. Written to a temporary name, synced, renamed, directory synced; never goes backwards.

A reader refuses a mark of another length or with a wrong checksum (Damaged): it was synced before its name was.
Log id 0: no log was ever written (log ids begin with 1).
Example: Mark(1, 4096, 0, 0, 0, 1, 64) is the mark of a new store: seven u64 and their checksum.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from .framing import FILE_HEADER_BYTES, Damaged, FileHeader, crc32c, decode_file_header, encode_file_header

MAGIC = b"MGN-MARK"
_BODY = struct.Struct(">7Q")
_CRC = struct.Struct(">I")
MARK_BYTES = FILE_HEADER_BYTES + _BODY.size + _CRC.size


class Mark(NamedTuple):
    journal: int
    offset: int
    log: int
    log_end: int
    index_end: int
    ledgers_generation: int
    ledgers_end: int

    @property
    def position(self) -> tuple[int, int]:
        """In the journal; what must not go backwards."""
        return self.journal, self.offset


def encode_mark(mark: Mark, uuid: bytes, count: int) -> bytes:
    body = _BODY.pack(*mark)
    return encode_file_header(FileHeader(MAGIC, uuid, count)) + body + _CRC.pack(crc32c(body))


def decode_mark(data: bytes, uuid: bytes, path: str) -> tuple[Mark, int]:
    """(mark, count of marks written)."""
    count = int.from_bytes(data[28:36], "big")
    decode_file_header(data, MAGIC, uuid, count, path)
    if len(data) != MARK_BYTES:
        raise Damaged(path, len(data), f"{len(data)} bytes long, not {MARK_BYTES}")
    body = data[FILE_HEADER_BYTES : FILE_HEADER_BYTES + _BODY.size]
    if crc32c(body) != _CRC.unpack_from(data, FILE_HEADER_BYTES + _BODY.size)[0]:
        raise Damaged(path, FILE_HEADER_BYTES, "checksum of the mark does not match")
    return Mark(*_BODY.unpack(body)), count
