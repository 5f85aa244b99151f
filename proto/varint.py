"""Protobuf's base-128 number: seven bits a byte, the lowest first; the last byte is below 0x80. Not for negatives.

For what writes an item around bytes that are there already; protobuf would copy them. Guard:
tests/broker/protocols/grpc/test_delivery.py, which compares items with protobuf's.
"""

from __future__ import annotations


def varint(value: int) -> bytes:
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
