"""The cookie's bytes: who owns a data directory. The same facts stand in the metadata (CookieRecord).

    cookie = magic "MGN-COOK" | version u16 (1) | length u32 | body (JSON, `length` bytes) | crc32c u32 (of all before)
    body   = {"bookie": uuid text, "instance": cluster instance, "directories": [place, …], "starts": count}

`starts` counts the starts that were completed; a cookie without it counts 0. Written anew at each start: to a temporary
name, synced, renamed, directory synced. A reader refuses any damage: it never guesses who owns a directory (BookKeeper
protocol §2.7).
Example: `MGN-COOK 0001 0000003f {"bookie":"b","instance":"i","directories":["h:/d"],"starts":2} <crc32c>`.
"""

from __future__ import annotations

import struct

import msgspec

from .framing import VERSION, Damaged, NewerFormat, crc32c

MAGIC = b"MGN-COOK"
_HEAD = struct.Struct(">8sHI")
_CRC = struct.Struct(">I")


class Cookie(msgspec.Struct, frozen=True):
    bookie: str
    instance: str
    directories: tuple[str, ...]
    starts: int = 0


def encode(cookie: Cookie) -> bytes:
    body = msgspec.json.encode(cookie)
    data = _HEAD.pack(MAGIC, VERSION, len(body)) + body
    return data + _CRC.pack(crc32c(data))


def decode(data: bytes, path: str) -> Cookie:
    if len(data) < _HEAD.size:
        raise Damaged(path, 0, f"{len(data)} bytes are too few for a cookie")
    magic, version, length = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Damaged(path, 0, "not a cookie")
    end = _HEAD.size + length
    if len(data) != end + _CRC.size or crc32c(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise Damaged(path, 0, "checksum of the cookie does not match")
    if version > VERSION:
        raise NewerFormat(path, version)
    try:
        return msgspec.json.decode(data[_HEAD.size : end], type=Cookie)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Damaged(path, _HEAD.size, str(error)) from error
