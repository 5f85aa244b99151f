"""Header blocks of HTTP/2 (HPACK, RFC 7541).

What leaves has no state: each header is a literal that is not indexed, so the block of a call is made once and sent as
it is for each call. What comes is decoded by the library `hpack`. As long as the other end has not used the dynamic
table, a block is decoded once for a connection: the same bytes mean the same again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import hpack
from hpack.table import HeaderTable

from .frames import BrokenRules, Code

Header = tuple[bytes, bytes]
T = TypeVar("T")

SIZE_UPDATES_MAX = 2
"""Of the dynamic table, in one block (RFC 7541, 4.2: the smallest size, and the last one)."""
KNOWN_BLOCKS = 32
KNOWN_BYTES = 4096
"""What a connection remembers at most: so many blocks of so many bytes."""

logging.getLogger("hpack").setLevel(logging.CRITICAL)
"""The library logs each header, with credentials, for its own developers."""

_STATUS_200 = b"\x88"  # the static table's entry


def block(headers: Iterable[Header]) -> bytes:
    return b"".join(_literal(name, value) for name, value in headers)


def _literal(name: bytes, value: bytes) -> bytes:
    if (name, value) == (b":status", b"200"):
        return _STATUS_200
    return b"\0" + _string(name) + _string(value)


def _string(data: bytes) -> bytes:
    """Without Huffman's code; the length is an integer with a prefix of 7 bits (RFC 7541, 5.1)."""
    size = len(data)
    if size < 127:
        return bytes((size,)) + data
    size, digits = size - 127, bytearray(b"\x7f")
    while size > 127:
        digits.append(0x80 | size & 0x7F)
        size >>= 7
    digits.append(size)
    return bytes(digits) + data


def _size_updates(data: bytes) -> int:
    """With how many updates of the table's size the block begins; one more than the maximum: with too many."""
    count = offset = 0
    while offset < len(data) and data[offset] & 0xE0 == 0x20 and count <= SIZE_UPDATES_MAX:
        is_long = data[offset] & 0x1F == 0x1F
        offset += 1
        while is_long and offset < len(data):
            is_long = bool(data[offset] & 0x80)
            offset += 1
        count += 1
    return count


class _Table(HeaderTable):
    """The dynamic table, which says whether a block has used it, also when an entry did not fit in."""

    is_used = False

    def add(self, name: bytes, value: bytes) -> None:
        self.is_used = True
        super().add(name, value)


class HeaderDecoder(Generic[T]):
    """Of one connection. `parse` makes of the headers what the service wants to know of them."""

    def __init__(self, parse: Callable[[list[Header]], T], list_bytes_max: int) -> None:
        self._parse = parse
        self._list_bytes_max = list_bytes_max
        self._decoder: hpack.Decoder | None = None
        self._table = _Table()
        self._known: dict[bytes, T] = {}

    def decode(self, data: bytes) -> T:
        """BrokenRules: it is no header block, or its headers are longer than `list_bytes_max`."""
        found = self._known.get(data)
        if found is not None:
            return found
        decoder = self._decoder
        if decoder is None:
            decoder = self._decoder = hpack.Decoder(max_header_list_size=self._list_bytes_max)
            decoder.header_table = self._table
        updates = _size_updates(data)
        if updates > SIZE_UPDATES_MAX:
            raise BrokenRules(Code.COMPRESSION_ERROR, f"more than {SIZE_UPDATES_MAX} sizes of the table in a block")
        try:
            headers = decoder.decode(data, raw=True)
        except hpack.OversizedHeaderListError as error:
            raise BrokenRules(Code.ENHANCE_YOUR_CALM, f"headers of more than {self._list_bytes_max} bytes") from error
        except (hpack.HPACKError, IndexError, ValueError) as error:
            why = type(error).__name__  # its text quotes the block, with credentials
            raise BrokenRules(Code.COMPRESSION_ERROR, f"a header block that cannot be decoded: {why}") from None
        parsed = self._parse([(bytes(each[0]), bytes(each[1])) for each in headers])
        if not self._table.is_used and not updates and len(data) <= KNOWN_BYTES:
            if len(self._known) >= KNOWN_BLOCKS:
                self._known.clear()
            self._known[data] = parsed
        return parsed


