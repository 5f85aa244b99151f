"""The bytes of a small file that holds one record: the cookie, the losses that a start found, the scrubber's position.

    note = magic 8 bytes | version u16 (1) | length u32 | body (JSON, `length` bytes) | crc32c u32 (of all before)

Big-endian. Written anew each time: to a temporary name, synced, renamed, directory synced. Unknown fields of the body
are ignored, missing ones have their defaults. A reader refuses any damage.
Example: `encode(b"MGN-TEST", {"a": 1})` is `4d474e2d54455354 0001 00000007 {"a":1} <crc32c>`.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from ...proto.versions import NOTE, check_format
from .framing import Damaged, crc32c

_HEAD = struct.Struct(">8sHI")
_CRC = struct.Struct(">I")

N = TypeVar("N")


def encode(magic: bytes, note: object) -> bytes:
    body = msgspec.json.encode(note)
    data = _HEAD.pack(magic, NOTE.version, len(body)) + body
    return data + _CRC.pack(crc32c(data))


def decode(data: bytes, magic: bytes, kind: type[N], path: str) -> N:
    """The note of class `kind`. Damaged, NewerFormat."""
    if len(data) < _HEAD.size:
        raise Damaged(path, 0, f"{len(data)} bytes are too few for a {kind.__name__.lower()}")
    found, version, length = _HEAD.unpack_from(data)
    if found != magic:
        raise Damaged(path, 0, f"not a {kind.__name__.lower()}")
    end = _HEAD.size + length
    if len(data) != end + _CRC.size or crc32c(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise Damaged(path, 0, f"checksum of the {kind.__name__.lower()} does not match")
    check_format(NOTE, version, path)
    try:
        return msgspec.json.decode(data[_HEAD.size : end], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(path, _HEAD.size, str(error)) from error
