"""The frames of HTTP/2 by their bytes (RFC 9113, 4 and 6): what this side sends, and the numbers of both sides.

A frame is a header of 9 bytes (length of the payload in 24 bits, type, flags, stream) and the payload. What comes is
taken apart by `runtime/http2/connection.py`; here is what leaves.
"""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER = struct.Struct("!HBBBI")
"""Length (two parts), type, flags, stream."""
HEADER_BYTES = 9
STREAM_MASK = 0x7FFFFFFF  # the highest bit is reserved, and ignored

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

WINDOW_DEFAULT = 65_535
"""Window of a connection and of each stream, before the first frame says otherwise (RFC 9113, 6.9.2)."""
WINDOW_MAX = (1 << 31) - 1
FRAME_DEFAULT = 16_384
FRAME_MAX = (1 << 24) - 1


class Setting(IntEnum):
    """The number of a setting."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Code(IntEnum):
    """The reason why a stream or a connection ends (RFC 9113, 7)."""

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


class BrokenRules(Exception):
    """The other end did what the RFC forbids: the connection ends with `code`."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def code_name(number: int) -> str:
    return Code(number).name if number in Code._value2member_map_ else f"code {number}"


def header(length: int, kind: int, flags: int, stream: int) -> bytes:
    return HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream)


def settings(values: dict[Setting, int]) -> bytes:
    payload = b"".join(struct.pack("!HI", key, value) for key, value in values.items())
    return header(len(payload), SETTINGS, 0, 0) + payload


SETTINGS_ACK = header(0, SETTINGS, ACK, 0)


def window_update(stream: int, size: int) -> bytes:
    return header(4, WINDOW_UPDATE, 0, stream) + size.to_bytes(4, "big")


def rst_stream(stream: int, code: Code) -> bytes:
    return header(4, RST_STREAM, 0, stream) + code.to_bytes(4, "big")


def ping(data: bytes, flags: int = 0) -> bytes:
    return header(8, PING, flags, 0) + data


def goaway(last: int, code: Code, text: str = "") -> bytes:
    payload = last.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()[:256]
    return header(len(payload), GOAWAY, 0, 0) + payload


def header_block(stream: int, block: bytes, flags: int, frame_max: int) -> bytes:
    """Encodes HEADERS, and CONTINUATION where the other end takes no frame as long."""
    if len(block) <= frame_max:
        return header(len(block), HEADERS, flags | END_HEADERS, stream) + block
    parts = [block[begin : begin + frame_max] for begin in range(0, len(block), frame_max)]
    framed = [header(frame_max, HEADERS, flags, stream) + parts[0]]
    framed += [header(len(part), CONTINUATION, 0, stream) + part for part in parts[1:-1]]
    framed.append(header(len(parts[-1]), CONTINUATION, END_HEADERS, stream) + parts[-1])
    return b"".join(framed)


def unpadded(flags: int, payload: bytes) -> tuple[bytes, int]:
    """The payload without its padding, and how many bytes that had with its length."""
    if not flags & PADDED:
        return payload, 0
    if not payload or payload[0] >= len(payload):
        raise BrokenRules(Code.PROTOCOL_ERROR, "more padding than payload")
    padding = payload[0]
    return payload[1 : len(payload) - padding], padding + 1
