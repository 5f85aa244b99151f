"""CRC32C (Castagnoli; RFC 3720 §12.1): the checksum of entries on the wire, in ledgers and in every file.

    crc32c(data)                   of any bytes, also of a view of them, which is not copied
    crc32c(data, crc)              of bytes that have the checksum `crc`, followed by `data`
    combine_checksums(a, b, size)  of bytes with the checksum `a`, followed by `size` bytes with the checksum `b`;
                                   no bytes are read

The bytes of an entry have a checksum by its producer, another one in its ledger, and others in the journal and the
entry log, each with another head in front. A large entry is read once at a broker and once at each bookie, to verify
it; the other checksums follow by `combine_checksums` (JOINED_BYTES_MIN). So the stored bytes have the checksum of the
verified ones, even if the bytes in memory change in between. For 128 KiB on one core, crc32c takes 5 µs in the
processor's cache and 12 µs in memory (google-crc32c 25 µs), combine_checksums 2 µs. Above 32 KiB crc32c releases the
interpreter lock.

**How checksums are combined.** CRCs are polynomials over GF(2), modulo P, whose reflected bits are an integer's. `a`
followed by n bytes is a·x^(8n), and n is split into two digits to the base 4096 so that few powers are needed: 2
multiplications. A product without carries is one of integers whose bits have seven zeros between them: no count of ones
reaches the next bit. The C module reduces it: the CRC of a message m is m·x^32, hence the x^(-32) in the powers.
Guards: tests/proto/test_checksum.py.

Also in this file, below its heading: Protobuf's base-128 number (varint).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from typing import Protocol, cast

Buffer = bytes | bytearray | memoryview


class ChecksumFunction(Protocol):
    """The type of the checksum function: returns the CRC32C of `data`. If `crc` is the CRC32C of earlier bytes, returns
    the CRC32C of these bytes followed by `data`."""

    def __call__(self, data: Buffer, crc: int = 0, /) -> int: ...


def _function() -> ChecksumFunction:
    """Returns the checksum function of the package crc32c. Loads only its C module, because importing the package takes
    20 ms of each start."""
    package = importlib.util.find_spec("crc32c")
    if package is None:
        raise ImportError("the package crc32c is missing", name="crc32c")
    found = importlib.machinery.PathFinder.find_spec("crc32c._crc32c", package.submodule_search_locations)
    if found is None or found.loader is None:
        raise ImportError("the package crc32c has no C module _crc32c", name="crc32c")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return cast(ChecksumFunction, module.crc32c)


crc32c = _function()

JOINED_BYTES_MIN = 32 << 10
"""A part with fewer bytes is read again instead of combining checksums: that is as fast, and simpler."""

_P, _ONE, _ALL = 0x82F63B78, 1 << 31, (1 << 32) - 1
_DIGIT = 12
_BITS = int.from_bytes(b"\1" * 63)
_TEXT = int.from_bytes(b"0" * 63)


def _times(a: int, b: int) -> int:
    """Returns the product of the polynomials `a` and `b` modulo CRC32C's polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_P if b & 1 else 0)
    return product


def _power(exponent: int) -> int:
    """Returns the polynomial x^exponent modulo CRC32C's polynomial."""
    found, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            found = _times(found, square)
        square, exponent = _times(square, square), exponent >> 1
    return found


def _spread(a: int) -> int:
    """Returns the polynomial whose bit 8·i is bit i of `a`."""
    return int.from_bytes(f"{a:032b}".encode()) & _BITS


class _Shifts(dict[int, int]):
    """The factors that shift a polynomial by `digit` units of `unit` bytes, by digit, in the form of `_spread`."""

    def __init__(self, unit: int) -> None:
        self._unit = unit

    def __missing__(self, digit: int) -> int:
        found = self[digit] = _spread(_times(_power(8 * self._unit * digit), _BACK))
        return found


_BACK = _power((1 << 31) - 1 - 32)
"""The power x^(-32): the order of x is 2^31 - 1."""
_LOW, _HIGH = _Shifts(1), _Shifts(1 << _DIGIT)
JOINED_BYTES_MAX = 1 << 2 * _DIGIT
"""Checksums can be combined for parts with fewer bytes. The factors for all sizes below it take less than 1 MB of
memory."""


def combine_checksums(first: int, second: int, size: int) -> int:
    """Returns the CRC32C of two adjacent parts of data, from the CRC32C of each. `size` is the number of bytes of the
    second part, less than JOINED_BYTES_MAX."""
    assert 0 <= size < JOINED_BYTES_MAX, f"a part of {size} bytes"
    for digit, shifts in ((size & (1 << _DIGIT) - 1, _LOW), (size >> _DIGIT, _HIGH)):
        if digit:
            product = int((_spread(first) * shifts[digit] & _BITS | _TEXT).to_bytes(63), 2)
            first = crc32c((product << 1).to_bytes(8, "little"), _ALL) ^ _ALL
    return first ^ second


# -------------------------------------------------------------------------------------------------------- varint
# Protobuf's base-128 number: seven bits a byte, the lowest first; the last byte is below 0x80. Not for negatives.
#
# For what writes an item around bytes that are there already; protobuf would copy them. Guard:
# tests/broker/grpc/test_delivery.py, which compares items with protobuf's.


def encode_varint(value: int) -> bytes:
    """Returns a number, which must not be negative, as protobuf's varint."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
