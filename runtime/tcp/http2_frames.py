"""The frames of HTTP/2 that this end sends, as bytes (RFC 9113, 4 and 6), and the numbers that both ends use.

A frame is a header of 9 bytes (length of the payload in 24 bits, type, flags, stream) and the payload. Frames that
arrive are parsed by `runtime/tcp/http2.py`.

Also in this file, each below its heading: strings in Huffman's code, decoded a byte at a time (huffman); the limit for
frames that carry nothing (patience); and header blocks, RFC 7541 (headers).
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from hpack.exceptions import HPACKDecodingError, HPACKError, OversizedHeaderListError
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE, decode_huffman
from hpack.table import HeaderTable

from .share import UnauthenticatedLoopShare

CONNECTION_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_STRUCT = struct.Struct("!HBBBI")
"""Length (two parts), type, flags, stream."""
FRAME_HEADER_BYTES = 9
STREAM_MASK = 0x7FFFFFFF  # the highest bit is reserved, and ignored

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
FLAG_END_HEADERS = 0x4
FLAG_PADDED = 0x8
FLAG_PRIORITY = 0x20

DEFAULT_WINDOW_BYTES = 65_535
"""Window of a connection and of each stream, before the first frame says otherwise (RFC 9113, 6.9.2)."""
WINDOW_BYTES_MAX = (1 << 31) - 1
DEFAULT_FRAME_BYTES = 16_384
FRAME_BYTES_LIMIT = (1 << 24) - 1


class Http2Setting(IntEnum):
    """The number that identifies a setting in a SETTINGS frame."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Http2ErrorCode(IntEnum):
    """The codes that say why a stream or a connection ends (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Http2Violation(Exception):
    """Raised when the other end has violated the HTTP/2 protocol (RFC 9113). The connection must be ended with the
    error code `code`."""

    def __init__(self, code: Http2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def get_error_code_name(number: int) -> str:
    """Returns the name of an HTTP/2 error code, such as "CANCEL"; "code N" if the number is not known."""
    return Http2ErrorCode(number).name if number in Http2ErrorCode._value2member_map_ else f"code {number}"


def encode_frame_header(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Returns the 9 bytes before the payload of a frame. `length`: of the payload; `kind`: the type."""
    return FRAME_HEADER_STRUCT.pack(length >> 8, length & 0xFF, kind, flags, stream)


def encode_settings(values: dict[Http2Setting, int]) -> bytes:
    """Returns a SETTINGS frame with these values."""
    payload = b"".join(struct.pack("!HI", key, value) for key, value in values.items())
    return encode_frame_header(len(payload), SETTINGS, 0, 0) + payload


SETTINGS_ACK = encode_frame_header(0, SETTINGS, ACK, 0)


def encode_window_update(stream: int, size: int) -> bytes:
    """Returns the WINDOW_UPDATE frame that lets the other end send `size` more bytes on the stream. `stream` 0: on the
    connection as a whole."""
    return encode_frame_header(4, WINDOW_UPDATE, 0, stream) + size.to_bytes(4, "big")


def encode_rst_stream(stream: int, code: Http2ErrorCode) -> bytes:
    """Returns the RST_STREAM frame that ends the stream with this code."""
    return encode_frame_header(4, RST_STREAM, 0, stream) + code.to_bytes(4, "big")


def encode_ping(data: bytes, flags: int = 0) -> bytes:
    """Returns a PING frame. `data` has 8 bytes; `flags` is ACK in an answer."""
    return encode_frame_header(8, PING, flags, 0) + data


def encode_goaway(last: int, code: Http2ErrorCode, text: str = "") -> bytes:
    """Returns the GOAWAY frame that ends the connection with this code. `last`: the last stream of the other end that
    this end has accepted. `text` is cut to 256 bytes."""
    payload = last.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()[:256]
    return encode_frame_header(len(payload), GOAWAY, 0, 0) + payload


def encode_header_block(stream: int, block: bytes, flags: int, frame_max: int) -> bytes:
    """Returns the HEADERS frame of `stream` for a header block, followed by CONTINUATION frames if the block is longer
    than `frame_max` bytes. `flags`: of the HEADERS frame, without FLAG_END_HEADERS."""
    if len(block) <= frame_max:
        return encode_frame_header(len(block), HEADERS, flags | FLAG_END_HEADERS, stream) + block
    parts = [block[begin : begin + frame_max] for begin in range(0, len(block), frame_max)]
    framed = [encode_frame_header(frame_max, HEADERS, flags, stream) + parts[0]]
    framed += [encode_frame_header(len(part), CONTINUATION, 0, stream) + part for part in parts[1:-1]]
    framed.append(encode_frame_header(len(parts[-1]), CONTINUATION, FLAG_END_HEADERS, stream) + parts[-1])
    return b"".join(framed)


def strip_padding(flags: int, payload: bytes) -> tuple[bytes, int]:
    """Removes the padding of a frame. Returns the payload without padding, and the number of removed bytes (the padding
    and its length field). Raises Http2Violation if the padding is longer than the frame."""
    if not flags & FLAG_PADDED:
        return payload, 0
    if not payload or payload[0] >= len(payload):
        raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    padding = payload[0]
    return payload[1 : len(payload) - padding], padding + 1


# ------------------------------------------------------------------------------------------------------- huffman
# Strings in Huffman's code (RFC 7541, 5.2), decoded a byte at a time.
#
# The library `hpack` takes half a byte at a time, 0.16 µs a byte, so that the longest block of headers held the event
# loop for 2.5 ms. Here a row is a state of the decoder, which has for each byte the next row and what the byte
# completes: 0.03 µs. A row is made from the library's table when it is first needed, which takes 0.1 ms and 22 KB. A
# call makes at most HUFFMAN_ROWS_PER_CALL; a string that needs more is decoded by the library. Texts need a hundred of
# the 256. Guarded by tests/runtime/tcp/test_headers.py, with the library as the reference.


HUFFMAN_ROWS_PER_CALL = 4

_Row = list[tuple["_Row", bytes]]

_STATES = 256
_ROWS: list[_Row] = [[] for _ in range(_STATES)]
_DEAD: _Row = []
_DEAD += [(_DEAD, b"")] * 256
"""State in which no code begins with what came."""
_STATE_OF = {id(row): state for state, row in enumerate(_ROWS)}
_SYMBOLS = [bytes((each,)) for each in range(256)]


def _complete() -> frozenset[int]:
    """Returns the rows of the table in which a string may end: no bits are left over, or at most seven, all ones."""
    found = {0}
    for next_state, flags, _ in HUFFMAN_TABLE:
        if flags & HUFFMAN_COMPLETE and not flags & HUFFMAN_FAIL:
            found.add(next_state)
    return frozenset(id(_ROWS[state]) for state in found)


_COMPLETE = _complete()


def decode_huffman_text(data: bytes) -> bytes:
    """Returns the text of a Huffman-coded string. Raises HPACKDecodingError if the string is not valid, or is cut off.
    """
    row, parts, left = _ROWS[0], list[bytes](), HUFFMAN_ROWS_PER_CALL
    append, rest = parts.append, iter(data)
    while True:
        try:
            for byte in rest:
                row, out = row[byte]
                append(out)
            break
        except IndexError:  # the row is not made yet
            if not left:
                return decode_huffman(data)
            left -= 1
            _make(row)
            row, out = row[byte]
            append(out)
    if id(row) not in _COMPLETE:
        raise HPACKDecodingError("a string in Huffman's code that is none, or is torn")
    return b"".join(parts)


def _make(row: _Row) -> None:
    made: _Row = []
    first = 16 * _STATE_OF[id(row)]
    for state, flags, symbol in HUFFMAN_TABLE[first : first + 16]:
        if flags & HUFFMAN_FAIL:
            made += [(_DEAD, b"")] * 16
            continue
        before = _SYMBOLS[symbol] if flags & HUFFMAN_EMIT_SYMBOL else b""
        for after, then, last in HUFFMAN_TABLE[16 * state : 16 * state + 16]:
            if then & HUFFMAN_FAIL:
                made.append((_DEAD, b""))
            elif then & HUFFMAN_EMIT_SYMBOL:
                made.append((_ROWS[after], before + _SYMBOLS[last]))
            else:
                made.append((_ROWS[after], before))
    row += made


# ------------------------------------------------------------------------------------------------------ patience
# The allowance of a connection: how many frames without content, and how many refused calls, the other end may send.
#
#     allowance.set_allowance(most, rate)    from now on
#     allowance.charge_frames(frames)        raises Http2Violation if the allowance is used up
#     allowance.charged                      in the present slice, less CHARGE_PER_TURN_MAX for each earlier slice
#
# A server has STRANGER_ALLOWANCE for a stranger and KNOWN_CALLER_ALLOWANCE for a connection with a call that was
# admitted. A client has chosen its server, and is patient without end. What strangers are charged is their port's
# `UnauthenticatedLoopShare` as well. Guarding tests: tests/runtime/tcp/test_patience.py.


CHARGE_PER_TURN_MAX = 100
"""Frames that carry nothing: 0.15 ms. No honest connection sends so many at once."""
STRANGER_CHARGE_PER_TURN = 25
LIGHT_CHARGE_MAX = 64
"""Charge below which a stranger goes before the others: an honest one is charged about ten."""

STRANGER_ALLOWANCE, KNOWN_CALLER_ALLOWANCE = 500.0, 20_000.0
"""Frames that carry nothing; handling one takes 1.5 µs. A client sends about ten before its first call is admitted."""
ALLOWANCE_RATE = 2_000.0
"""Growth of the patience a second, for a connection that is known: 0.3 % of the loop. A stranger's grows a hundred
times slower: it has seconds at most."""
REFUSED_CALL_CHARGE = 20
"""Cost of a call that is refused, or reset before its end, in frames that carry nothing."""
SMALL_WINDOW_UPDATE = 8
"""Bytes of a window update below which it costs more than it carries."""


class FrameAllowance:
    """Limits how many frames without content and how many refused calls one connection may send. The connection has an
    allowance that is refilled over time; a new one is not limited."""

    __slots__ = (
        "_granted", "_granted_most", "_granted_streams", "_granted_streams_most", "_left", "_loop", "_most", "_rate",
        "_since", "charged", "drawn", "is_known", "share",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = self._most = math.inf
        self._rate = 0.0
        self._since = loop.time()
        self.is_known = True  # a call of it was admitted; or it is a server that this end has chosen
        self.charged = 0.0  # less CHARGE_PER_TURN_MAX for each slice
        self.share: UnauthenticatedLoopShare | None = None  # of the port, whose connections are bounded together
        self.drawn = 0  # charged to it
        self._granted = 0  # by the other end: of the connection's window …
        self._granted_streams = 0  # … and of all streams'
        self._granted_most = 0  # more than was sent, of the connection's window …
        self._granted_streams_most = 0  # … and of all streams'

    def set_allowance(self, most: float, rate: float) -> None:
        """Sets the allowance of the connection: it may send `most` frames without content at once, and `rate` more per
        second. More than STRANGER_ALLOWANCE means that its caller is authenticated (`is_known`)."""
        self._left = self._most = most
        self._rate, self._since = rate, self._loop.time()
        self.is_known = most > STRANGER_ALLOWANCE

    @property
    def must_wait(self) -> bool:
        """Returns whether this connection must wait before it is read: its caller is not authenticated yet, and the
        unauthenticated connections of the port have together used up their share of the event loop."""
        return not self.is_known and self.share is not None and self.share.is_share_used_up

    def charge_frames(self, frames_: int = 1) -> None:
        """Takes `frames_` from the allowance, for work that costs as much as that many frames without content. Raises
        Http2Violation if the allowance is used up."""
        if self._most == math.inf:
            return
        self.charged += frames_
        self._left -= frames_
        if not self.is_known and self.share is not None:
            self.drawn += frames_
            self.share.spend_frames(frames_)
        if self._left < 0:
            now = self._loop.time()
            more = (now - self._since) * self._rate
            self._since = now
            self._left = min(self._left + more, self._most)
            if self._left < 0:
                raise Http2Violation(
                    Http2ErrorCode.ENHANCE_YOUR_CALM, "too many refused calls, or frames that carry nothing"
                )

    def charge_window_update(self, id_: int, size: int, send_left: int) -> None:
        """Charges a window update like a frame without content, unless it only gives back credit for data that was
        sent. An update is charged if it is small, or grants more than any update before. `id_`: the stream, 0 for the
        connection; `size`: the granted bytes; `send_left`: the send window of the connection before the update. Raises
        Http2Violation if the allowance is used up."""
        sent = DEFAULT_WINDOW_BYTES + self._granted - send_left
        if id_:
            self._granted_streams += size
            more, most = self._granted_streams - sent, self._granted_streams_most
            self._granted_streams_most = max(most, more)
        else:
            self._granted += size
            more, most = self._granted - sent, self._granted_most
            self._granted_most = max(most, more)
        if size < SMALL_WINDOW_UPDATE or more > most:
            self.charge_frames()


# ------------------------------------------------------------------------------------------------------- headers
# Header blocks of HTTP/2 (HPACK, RFC 7541).
#
# What leaves has no state: each header is a literal that is not indexed, so the block of a call is made once and sent
# as it is for each call. What comes is decoded here, with the tables of the library `hpack`, which is the reference of
# the tests: it takes two to ten times as long, and twenty times for a long string in Huffman's code (http2_frames.py).
# As long as the other end has not used the dynamic table, a block is decoded once for a connection: the same bytes mean
# the same again. Guarding tests: tests/runtime/tcp/test_headers.py, tests/runtime/tcp/test_patience.py.


HeaderField = tuple[bytes, bytes]
T = TypeVar("T")

HEADER_BYTES_MAX = 32 << 10
"""Most bytes of a header block, and of its decoded headers."""
CONTINUATIONS_MAX = 16
SIZE_UPDATES_MAX = 2
"""Most size updates of the dynamic table in one block (RFC 7541, 4.2: the smallest size, and the last one)."""
HEADER_FIELDS_MAX = 256
"""Most fields of a block: decoding one takes 2 µs. A call of gRPC has ten, and those that its application adds."""
HUFFMAN_BYTES_MAX = 16 << 10
"""Most bytes of a block in Huffman's code: decoding a byte takes 0.03 µs. A token of AUTHORIZATION_MAX has fewer."""
HUFFMAN_BYTES_PER_CHARGE = 8
"""Bytes in Huffman's code that cost as much as a frame that carries nothing."""
INTEGER_BITS_MAX = 28
CACHED_BLOCKS_MAX = 32
CACHED_BLOCK_BYTES_MAX = 4096
"""Bounds of what a connection remembers: so many blocks of so many bytes."""

logging.getLogger("hpack").setLevel(logging.CRITICAL)
"""The library logs what leaves its table, with credentials, for its own developers."""

HPACK_TABLE_BYTES_MAX = 4096
"""Size of the dynamic table, as the settings of HTTP/2 have it when they say nothing."""
HEADER_FIELD_OVERHEAD_BYTES = 32
"""Bytes that a field counts in the table, and in a list of headers, besides its name and value (RFC 7541, 4.1)."""

_STATUS_200 = b"\x88"  # the static table's entry


def encode_headers(headers: Iterable[HeaderField]) -> bytes:
    """Returns the header block of these headers, without Huffman codes and without entries in the dynamic table. So the
    same headers always have the same bytes."""
    return b"".join(_literal(name, value) for name, value in headers)


def _literal(name: bytes, value: bytes) -> bytes:
    if (name, value) == (b":status", b"200"):
        return _STATUS_200
    return b"\0" + _string(name) + _string(value)


def _string(data: bytes) -> bytes:
    """Encodes a string without Huffman coding; its length is an integer with a prefix of 7 bits (RFC 7541, 5.1)."""
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
    """The content of a header block by its lengths alone; of a block that is cut off, what comes before the cut."""

    updates: int  # of the table's size
    fields: int
    folded: int  # bytes in Huffman's code


def _shape(data: bytes) -> _Shape:
    """Counts the table updates and fields of a block, and stops when there is one more than allowed."""
    updates = fields = folded = offset = 0
    end = len(data)
    while offset < end and updates <= SIZE_UPDATES_MAX and fields <= HEADER_FIELDS_MAX:
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
    """Returns (the integer, the offset after it); RFC 7541, 5.1."""
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
    """Returns (the string, the offset after it); RFC 7541, 5.2. Raises IndexError or ValueError if it is cut off,
    HPACKError if it cannot be decoded.
    """
    is_folded = data[offset] & 0x80
    size, offset = _integer(data, offset, 0x7F)
    after = offset + size
    if after > len(data):
        raise ValueError("a torn string")
    text = data[offset:after]
    return (decode_huffman_text(text) if is_folded else text), after


class HeaderDecoder(Generic[T]):
    """Decodes the header blocks of one connection. `parse`: the function that makes the result of `decode` from the
    headers of a block. `list_bytes_max`: the most bytes of the decoded headers of a block. `cost`: of the last block,
    in frames without content."""

    def __init__(self, parse: Callable[[list[HeaderField]], T], list_bytes_max: int) -> None:
        self._parse = parse
        self._list_bytes_max = list_bytes_max
        self._table = HeaderTable()
        self._is_used = False  # the table, by a block, also where an entry did not fit in
        self._known: dict[bytes, T] = {}
        self.cost = 0  # of the last block, in frames that carry nothing

    def decode(self, data: bytes) -> T:
        """Decodes a header block, and returns the result of `parse` for its headers. Raises Http2Violation if the block
        is malformed, or needs more work than the headers of a call may need. Blocks must be decoded in the order of
        their arrival, because later ones may refer to earlier ones."""
        found = self._known.get(data)
        if found is not None:
            self.cost = 0
            return found
        updates, fields, folded = _shape(data)
        self.cost = 1 + fields + folded // HUFFMAN_BYTES_PER_CHARGE
        if fields > HEADER_FIELDS_MAX or folded > HUFFMAN_BYTES_MAX:
            raise Http2Violation(
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"more than {HEADER_FIELDS_MAX} headers, or too many in Huffman's code",
            )
        if updates > SIZE_UPDATES_MAX:
            raise Http2Violation(
                Http2ErrorCode.COMPRESSION_ERROR, f"more than {SIZE_UPDATES_MAX} sizes of the table in a block"
            )
        try:
            headers = self._fields(data)
        except OversizedHeaderListError as error:
            raise Http2Violation(
                Http2ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {self._list_bytes_max} bytes"
            ) from error
        except (HPACKError, IndexError, ValueError) as error:
            why = type(error).__name__  # its text quotes the block, with credentials
            raise Http2Violation(
                Http2ErrorCode.COMPRESSION_ERROR, f"a header block that cannot be decoded: {why}"
            ) from None
        parsed = self._parse(headers)
        if not self._is_used and not updates and len(data) <= CACHED_BLOCK_BYTES_MAX:
            if len(self._known) >= CACHED_BLOCKS_MAX:
                self._known.clear()
            self._known[data] = parsed
        return parsed

    def _fields(self, data: bytes) -> list[HeaderField]:
        """Decodes the fields of a header block. Raises HPACKError, IndexError or ValueError if it is malformed,
        OversizedHeaderListError if it is too long.
        """
        table, found = self._table, list[HeaderField]()
        offset, end, left = 0, len(data), self._list_bytes_max
        while offset < end:
            first = data[offset]
            if first & 0x80:
                index, offset = _integer(data, offset, 0x7F)
                name, value = table.get_by_index(index)
            elif first & 0xE0 == 0x20:
                size, offset = _integer(data, offset, 0x1F)
                if found or size > HPACK_TABLE_BYTES_MAX or offset > end:
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
            left -= len(name) + len(value) + HEADER_FIELD_OVERHEAD_BYTES
            if left < 0:
                raise OversizedHeaderListError("more headers than are taken")
        return found


class HeaderBlocks:
    """Joins the frames of a connection to header blocks. A block consists of one or more frames; only one block may be
    incomplete at a time."""

    __slots__ = ("_continuations", "_patience", "continued")

    def __init__(self, patience: FrameAllowance) -> None:
        self._patience = patience
        self.continued: tuple[int, int, bytearray] | None = None  # stream, flags, and what of it has come
        self._continuations = 0

    def start_header_block(self, flags: int, id_: int, payload: bytes) -> tuple[int, int, bytes] | None:
        """Takes a HEADERS frame of the stream `id_`. Returns (flags, stream, block) if it completes the block; None if
        CONTINUATION frames must follow. Raises Http2Violation if the frame is malformed."""
        if not id_:
            raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "HEADERS without a stream")
        block, _ = strip_padding(flags, payload)
        if flags & FLAG_PRIORITY:
            if len(block) < 5:
                raise Http2Violation(Http2ErrorCode.FRAME_SIZE_ERROR, "HEADERS without their priority")
            block = block[5:]
        if flags & FLAG_END_HEADERS:
            return flags, id_, block
        self.continued, self._continuations = (id_, flags, bytearray(block)), 0
        return None

    def add_continuation(self, flags: int, id_: int, payload: bytes) -> tuple[int, int, bytes] | None:
        """Takes a CONTINUATION frame of the stream `id_`. Returns (flags of the HEADERS frame, stream, block) if it
        completes the block; None if more frames must follow. Raises Http2Violation if no block of this stream is
        incomplete, if the block becomes too long, or if the allowance of the connection is used up."""
        if self.continued is None or self.continued[0] != id_:
            raise Http2Violation(Http2ErrorCode.PROTOCOL_ERROR, "a CONTINUATION of nothing")
        _, first, block = self.continued
        self._continuations += 1
        self._patience.charge_frames()
        if len(block) + len(payload) > HEADER_BYTES_MAX or self._continuations > CONTINUATIONS_MAX:
            raise Http2Violation(
                Http2ErrorCode.ENHANCE_YOUR_CALM, f"a header block of more than {HEADER_BYTES_MAX} bytes"
            )
        block += payload
        if flags & FLAG_END_HEADERS:
            self.continued = None
            return first, id_, bytes(block)
        return None
