"""Shared by all file formats of the bookie: the checksum, the file header, and how damage is reported.

Every file begins with one header of 64 bytes, all integers big-endian:

    file header = magic 8 bytes | version u16 | reserved u16 (0) | bookie uuid 16 bytes | number u64 | a u64 | b u64
                  | crc32c u32 (of the 52 bytes before) | 8 zero bytes

`number` is the one in the file's name (journal id, log id, generation); `a` and `b` belong to the format (else 0). A
file under a wrong name or with a broken checksum is `Damaged`, a whole one of another bookie `ForeignFile`, a newer
version `NewerFormat`.

The versions are those of proto/versions.py. Example: magic "MGN-MARK", uuid 16 × 0x11, number 7:
`4d474e2d4d41524b 0001 0000 11…11 0000000000000007 0…0 0…0 <crc32c> 0000000000000000`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ...proto import checksum, versions

_FORMATS = {form.magic: form for form in versions.BOOKIE_FILES}
_HEADER = struct.Struct(">8sHH16sQQQ")
_CRC = struct.Struct(">I")
FILE_HEADER_BYTES = 64
assert _HEADER.size + _CRC.size + 8 == FILE_HEADER_BYTES

Buffer = bytes | bytearray | memoryview


class Damaged(Exception):
    """The bytes at `offset` of `path` are not what was written there."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: damaged at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


class ForeignFile(Damaged):
    """The file is whole and belongs to another bookie: an operator mixed up directories. It cannot be repaired here."""


class FileHeader(NamedTuple):
    """The 64-byte header of a file: its format's magic, the bookie's uuid (16 bytes), and its number.

    `a` and `b` belong to the format.
    """

    magic: bytes
    uuid: bytes
    number: int
    a: int = 0
    b: int = 0


def crc32c(*buffers: Buffer) -> int:
    """Returns the CRC32C over the buffers one after the other."""
    crc = 0
    for buffer in buffers:
        crc = checksum.crc32c(buffer, crc)
    return crc


def extend_crc32c(crc: int, data: bytes) -> int:
    """The CRC32C of the bytes that have the CRC32C `crc`, followed by `data`."""
    return checksum.crc32c(data, crc)


def encode_file_header(header: FileHeader) -> bytes:
    head = _HEADER.pack(header.magic, _FORMATS[header.magic].version, 0, header.uuid, header.number, header.a, header.b)
    return head + _CRC.pack(crc32c(head)) + bytes(8)


def decode_file_header(data: bytes, magic: bytes, uuid: bytes, number: int, path: str) -> FileHeader:
    """The header of a file that should be `number` of bookie `uuid`."""
    if len(data) < FILE_HEADER_BYTES:
        raise Damaged(path, 0, f"{len(data)} bytes are too few for a file header")
    head = data[: _HEADER.size]
    found_magic, version, _, found_uuid, found_number, a, b = _HEADER.unpack(head)
    if found_magic != magic:
        raise Damaged(path, 0, f"begins with {found_magic!r}, not {magic!r}")
    if crc32c(head) != _CRC.unpack_from(data, _HEADER.size)[0] or any(data[_HEADER.size + 4 : FILE_HEADER_BYTES]):
        raise Damaged(path, 0, "checksum of the file header does not match")
    versions.check_format(_FORMATS[magic], version, path)
    if found_uuid != uuid:
        raise ForeignFile(path, 0, f"belongs to bookie {found_uuid.hex()}, not to {uuid.hex()}")
    if found_number != number:
        raise Damaged(path, 0, f"says that it is number {found_number}, its name says {number}")
    return FileHeader(found_magic, found_uuid, found_number, a, b)
