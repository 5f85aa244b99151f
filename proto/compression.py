"""Compression of a batch, and decompression with bounded memory.

LZ4 is the raw block format without a size header, SNAPPY the raw format, ZSTD one or more frames, ZLIB a zlib stream
that may lack its end (Java's). `decompress` writes into a buffer of exactly the declared size,
allocated only after `declared <= limit`; output that does not fill it, or would overflow it, is CorruptEntry. So the
entry's declared size bounds the memory, and the limit bounds the declared size, whatever the bytes contain.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from mmap import mmap
from typing import NamedTuple

from .errors import CorruptEntry

UNCOMPRESSED_BYTES_MAX = 64 << 20
"""The largest uncompressed payload, in bytes: a dozen times the largest entry, so that an attack costs no more than a
burst."""


class Compression(IntEnum):
    """The compression codec of a payload, with the numbers of `CompressionType` in proto/entry.proto."""

    NONE = 0
    LZ4 = 1
    ZLIB = 2
    ZSTD = 3
    SNAPPY = 4


def _unzip_into(payload: bytes, output: bytearray | mmap) -> int:
    """Decompresses a zlib stream into `output`. Returns the number of bytes found, which may be too large for `output`.
    The stream may have no end, because Java's client does not write it."""
    stream = zlib.decompressobj()
    found = stream.decompress(payload, len(output) + 1)  # one byte more shows that there is more
    size = min(len(found), len(output))
    output[:size] = found[:size]
    return len(found)


class _Codecs(NamedTuple):
    compress: dict[int, Callable[[bytes], object]]
    decompress_into: dict[int, Callable[[bytes, bytearray | mmap], int]]


@cache
def _codecs() -> _Codecs:
    """Loads the compression library and returns its functions. It is loaded at the first compressed payload, because it
    takes 2 MB and most processes do not need it."""
    import cramjam

    return _Codecs(
        {
            Compression.LZ4: lambda payload: cramjam.lz4.compress_block(payload, store_size=False),
            Compression.ZLIB: lambda payload: cramjam.zlib.compress(payload, 6),
            Compression.ZSTD: lambda payload: cramjam.zstd.compress(payload, 3),
            Compression.SNAPPY: cramjam.snappy.compress_raw,
        },
        {
            Compression.LZ4: cramjam.lz4.decompress_block_into,
            Compression.ZLIB: _unzip_into,
            Compression.ZSTD: cramjam.zstd.decompress_into,
            Compression.SNAPPY: cramjam.snappy.decompress_raw_into,
        },
    )


def compress(kind: int, payload: bytes) -> bytes:
    """Compresses the payload with the codec `kind` (a number of `Compression`) and returns the result. The result for
    an empty payload is empty only with NONE. Raises KeyError if there is no such codec."""
    return payload if kind == Compression.NONE else bytes(_codecs().compress[kind](payload))  # type: ignore[call-overload]


def decompress(kind: int, payload: bytes, declared: int) -> bytes:
    """Decompresses the payload with the codec `kind` and returns the result. Raises CorruptEntry if the result does not
    have exactly `declared` bytes, if `declared` is above UNCOMPRESSED_BYTES_MAX, or if there is no such codec. With
    NONE returns the payload unchanged, and checks nothing."""
    if kind == Compression.NONE:
        return payload
    _check(kind, declared)
    if declared == 0:
        return _nothing(kind, payload)
    output = bytearray(declared)
    _into(kind, payload, output)
    return bytes(output)


def decompress_to_mapping(kind: int, payload: bytes, declared: int) -> mmap:
    """Decompresses the payload with the codec `kind` into a new anonymous memory mapping and returns it. Raises
    CorruptEntry like `decompress`. `declared`, the uncompressed size in bytes, must not be 0. For threads beside an
    event loop: the memory is neither zeroed nor copied while Python's interpreter lock is held, which would take 60 ms
    for 64 MiB."""
    _check(kind, declared)
    output = mmap(-1, declared)
    try:
        _into(kind, payload, output)
    except CorruptEntry:
        output.close()
        raise
    return output


def _check(kind: int, declared: int) -> None:
    if not 0 <= declared <= UNCOMPRESSED_BYTES_MAX:
        raise CorruptEntry(
            f"an entry declares {declared} uncompressed bytes; the limit is {UNCOMPRESSED_BYTES_MAX}", size=declared
        )
    if kind not in _codecs().decompress_into:
        raise CorruptEntry(f"unknown compression {kind}")


def _into(kind: int, payload: bytes, output: bytearray | mmap) -> None:
    declared = len(output)
    try:
        size = _codecs().decompress_into[kind](payload, output)
    except Exception as error:  # cramjam raises its own errors and, on a short buffer, OSError and others
        raise CorruptEntry(f"{Compression(kind).name} payload does not unfold to {declared} bytes: {error}") from error
    if size != declared:
        raise CorruptEntry(f"{Compression(kind).name} payload unfolds to {size} bytes, not to the {declared} declared")


def _nothing(kind: int, payload: bytes) -> bytes:
    """Returns the empty payload. Raises CorruptEntry if `payload` is not the compressed form of an empty one. The
    codecs cannot do this, because they refuse an empty output."""
    if payload not in (b"", compress(kind, b"")):
        raise CorruptEntry(f"{Compression(kind).name} payload of {len(payload)} bytes declares to be empty")
    return b""
