"""Header blocks of HTTP/2 (HPACK, RFC 7541).

What leaves has no state: each header is a literal that is not indexed, so the block of a call is made once and sent as
it is for each call. What comes is decoded here, with the tables of the library `hpack`, which is the reference of the
tests: it takes two to ten times as long, and twenty times for a long string in Huffman's code (huffman.py). As long as
the other end has not used the dynamic table, a block is decoded once for a connection: the same bytes mean the same
again.
Guarding tests: tests/runtime/http2/test_headers.py, tests/runtime/http2/test_patience.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from . import frames, huffman
from .frames import BrokenRules, Code, unpadded
from .patience import FrameAllowance

Header = tuple[bytes, bytes]
T = TypeVar("T")

HEADER_BYTES_MAX = 32 << 10
"""Most bytes of a header block, and of its decoded headers."""
CONTINUATIONS_MAX = 16
SIZE_UPDATES_MAX = 2
"""Most size updates of the dynamic table in one block (RFC 7541, 4.2: the smallest size, and the last one)."""
FIELDS_MAX = 256
"""Most fields of a block: decoding one takes 2 µs. A call of gRPC has ten, and those that its application adds."""
FOLDED_BYTES_MAX = 16 << 10
"""Most bytes of a block in Huffman's code: decoding a byte takes 0.03 µs. A token of AUTHORIZATION_MAX has fewer."""
FOLDED_A_FRAME = 8
"""Bytes in Huffman's code that cost as much as a frame that carries nothing."""
INTEGER_BITS_MAX = 28
KNOWN_BLOCKS = 32
KNOWN_BYTES = 4096
"""Bounds of what a connection remembers: so many blocks of so many bytes."""

logging.getLogger("hpack").setLevel(logging.CRITICAL)
"""The library logs what leaves its table, with credentials, for its own developers."""

TABLE_BYTES_MAX = 4096
"""Size of the dynamic table, as the settings of HTTP/2 have it when they say nothing."""
FIELD_BYTES = 32
"""Bytes that a field counts in the table, and in a list of headers, besides its name and value (RFC 7541, 4.1)."""

_STATUS_200 = b"\x88"  # the static table's entry


def block(headers: Iterable[Header]) -> bytes:
    return b"".join(_literal(name, value) for name, value in headers)


def _literal(name: bytes, value: bytes) -> bytes:
    if (name, value) == (b":status", b"200"):
        return _STATUS_200
    return b"\0" + _string(name) + _string(value)


def _string(data: bytes) -> bytes:
    """Encodes a string without Huffman's code; the length is an integer with a prefix of 7 bits (RFC 7541, 5.1)."""
    size = len(data)
    if size < 127:
        return bytes((size,)) + data
    size, digits = size - 127, bytearray(b"\x7f")
    while size > 127:
        digits.append(0x80 | size & 0x7F)
        size >>= 7
    digits.append(size)
    return bytes(digits) + data


class _Shape(NamedTuple):
    """The content of a block, told by its lengths alone. Of one that is torn: what comes before the tear."""

    updates: int  # of the table's size
    fields: int
    folded: int  # bytes in Huffman's code


def _shape(data: bytes) -> _Shape:
    """Counts updates and fields, no further than one above their maximum."""
    updates = fields = folded = offset = 0
    end = len(data)
    while offset < end and updates <= SIZE_UPDATES_MAX and fields <= FIELDS_MAX:
        first = data[offset]
        if first & 0xE0 == 0x20:
            updates += 1
            _, offset = _integer(data, offset, 0x1F)
            continue
        fields += 1
        if first & 0x80:
            _, offset = _integer(data, offset, 0x7F)
            continue
        index, offset = _integer(data, offset, 0x3F if first & 0x40 else 0x0F)
        for _ in range(1 if index else 2):
            if offset >= end:
                break
            is_folded = data[offset] & 0x80
            size, offset = _integer(data, offset, 0x7F)
            if is_folded:
                folded += min(size, end - offset)
            offset += size
    return _Shape(updates, fields, folded)


def _integer(data: bytes, offset: int, mask: int) -> tuple[int, int]:
    """Returns (the integer, what follows it), RFC 7541, 5.1."""
    value, shift = data[offset] & mask, 0
    offset += 1
    if value < mask:
        return value, offset
    while offset < len(data) and shift <= INTEGER_BITS_MAX:
        byte = data[offset]
        offset += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, offset
    return 0, len(data) + 1  # it is torn, or too long


def _text(data: bytes, offset: int) -> tuple[bytes, int]:
    """Returns (the string, what follows it), RFC 7541, 5.2. IndexError, ValueError: it is torn. HPACKError."""
    is_folded = data[offset] & 0x80
    size, offset = _integer(data, offset, 0x7F)
    after = offset + size
    if after > len(data):
        raise ValueError("a torn string")
    text = data[offset:after]
    return (huffman.decode(text) if is_folded else text), after


class HeaderDecoder(Generic[T]):
    """The decoder of one connection. `parse` makes of the headers what the service wants to know of them."""

    def __init__(self, parse: Callable[[list[Header]], T], list_bytes_max: int) -> None:
        self._parse = parse
        self._list_bytes_max = list_bytes_max
        self._table = HeaderTable()
        self._is_used = False  # the table, by a block, also where an entry did not fit in
        self._known: dict[bytes, T] = {}
        self.cost = 0  # of the last block, in frames that carry nothing

    def decode(self, data: bytes) -> T:
        """Decodes a header block. BrokenRules: it is none, or it is more work than the headers of a call are."""
        found = self._known.get(data)
        if found is not None:
            self.cost = 0
            return found
        updates, fields, folded = _shape(data)
        self.cost = 1 + fields + folded // FOLDED_A_FRAME
        if fields > FIELDS_MAX or folded > FOLDED_BYTES_MAX:
            raise BrokenRules(Code.ENHANCE_YOUR_CALM, f"more than {FIELDS_MAX} headers, or too many in Huffman's code")
        if updates > SIZE_UPDATES_MAX:
            raise BrokenRules(Code.COMPRESSION_ERROR, f"more than {SIZE_UPDATES_MAX} sizes of the table in a block")
        try:
            headers = self._fields(data)
        except OversizedHeaderListError as error:
            raise BrokenRules(Code.ENHANCE_YOUR_CALM, f"headers of more than {self._list_bytes_max} bytes") from error
        except (HPACKError, IndexError, ValueError) as error:
            why = type(error).__name__  # its text quotes the block, with credentials
            raise BrokenRules(Code.COMPRESSION_ERROR, f"a header block that cannot be decoded: {why}") from None
        parsed = self._parse(headers)
        if not self._is_used and not updates and len(data) <= KNOWN_BYTES:
            if len(self._known) >= KNOWN_BLOCKS:
                self._known.clear()
            self._known[data] = parsed
        return parsed

    def _fields(self, data: bytes) -> list[Header]:
        """Decodes a header block. HPACKError, IndexError, ValueError: it is none. OversizedHeaderListError."""
        table, found = self._table, list[Header]()
        offset, end, left = 0, len(data), self._list_bytes_max
        while offset < end:
            first = data[offset]
            if first & 0x80:
                index, offset = _integer(data, offset, 0x7F)
                name, value = table.get_by_index(index)
            elif first & 0xE0 == 0x20:
                size, offset = _integer(data, offset, 0x1F)
                if found or size > TABLE_BYTES_MAX or offset > end:
                    raise ValueError("a size of the table that is too large, or after a field")
                table.maxsize = size
                continue
            else:
                index, offset = _integer(data, offset, 0x3F if first & 0x40 else 0x0F)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, offset = _text(data, offset)
                value, offset = _text(data, offset)
                if first & 0x40:
                    self._is_used = True
                    table.add(name, value)
            if offset > end:
                raise ValueError("a torn block")
            found.append((name, value))
            left -= len(name) + len(value) + FIELD_BYTES
            if left < 0:
                raise OversizedHeaderListError("more headers than are taken")
        return found


class HeaderBlocks:
    """The header block that comes on a connection: at most one at a time, in one frame or several."""

    __slots__ = ("_continuations", "_patience", "continued")

    def __init__(self, patience: FrameAllowance) -> None:
        self._patience = patience
        self.continued: tuple[int, int, bytearray] | None = None  # stream, flags, and what of it has come
        self._continuations = 0

    def begin(self, flags: int, id_: int, payload: bytes) -> tuple[int, int, bytes] | None:
        """Takes HEADERS. Returns (flags, stream, block) when it is whole; None: its continuations have to come."""
        if not id_:
            raise BrokenRules(Code.PROTOCOL_ERROR, "HEADERS without a stream")
        block, _ = unpadded(flags, payload)
        if flags & frames.HAS_PRIORITY:
            if len(block) < 5:
                raise BrokenRules(Code.FRAME_SIZE_ERROR, "HEADERS without their priority")
            block = block[5:]
        if flags & frames.END_HEADERS:
            return flags, id_, block
        self.continued, self._continuations = (id_, flags, bytearray(block)), 0
        return None

    def go_on(self, flags: int, id_: int, payload: bytes) -> tuple[int, int, bytes] | None:
        """Takes a CONTINUATION, as `begin`."""
        if self.continued is None or self.continued[0] != id_:
            raise BrokenRules(Code.PROTOCOL_ERROR, "a CONTINUATION of nothing")
        _, first, block = self.continued
        self._continuations += 1
        self._patience.charge()
        if len(block) + len(payload) > HEADER_BYTES_MAX or self._continuations > CONTINUATIONS_MAX:
            raise BrokenRules(Code.ENHANCE_YOUR_CALM, f"a header block of more than {HEADER_BYTES_MAX} bytes")
        block += payload
        if flags & frames.END_HEADERS:
            self.continued = None
            return first, id_, bytes(block)
        return None
