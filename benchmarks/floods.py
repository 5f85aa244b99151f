"""What one connection of HTTP/2 without credentials may send for ever: `FLOODS`, name → the bytes of number n.

Each carries nothing, or is refused. `python -m benchmarks.abusers http2` sends one of them at RATE_BYTES a second.
"""

from __future__ import annotations

from collections.abc import Callable

from magnetar.runtime.tcp import http2_frames as frames
from magnetar.runtime.tcp.http2_frames import Http2ErrorCode, Http2Setting, encode_headers

RATE_BYTES = 4 << 20
OPENED = frames.CONNECTION_PREFACE + frames.encode_settings({})
_HEAD = [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"x"), (b"content-type", b"application/grpc")]


def _call(n: int, method: str, flags: int = 0, token: bytes = b"") -> bytes:
    more = [(b"authorization", token)] if token else []
    head = encode_headers([*_HEAD, (b":path", f"/magnetar.wire.Broker/{method}".encode()), *more])
    return frames.encode_header_block(2 * n + 1, head, flags, frames.DEFAULT_FRAME_BYTES)


def _raw(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return frames.encode_frame_header(len(payload), kind, flags, stream) + payload


def _over(n: int) -> bytes:
    """Stream 1, which is over."""
    return b"" if n else _call(0, "Connect") + frames.encode_rst_stream(1, Http2ErrorCode.CANCEL)


def _huffman(n: int) -> bytes:
    value = b"\x18\xc6\x31\x8c\x63" * (1600 - n % 100)  # "a", of 5 bits
    left, digits = len(value) - 127, bytearray(b"\xff")
    while left > 127:
        digits.append(0x80 | left & 0x7F)
        left >>= 7
    return b"\0\x01a" + bytes(digits) + bytes((left,)) + value


_END = frames.FLAG_END_HEADERS | frames.END_STREAM
FLOODS: dict[str, Callable[[int], bytes]] = {
    "window-updates": lambda n: frames.encode_window_update(0, 1),
    "window-updates-over": lambda n: _over(n) + frames.encode_window_update(1, 5),
    "pings": lambda n: frames.encode_ping(n.to_bytes(8, "big")),
    "ping-answers": lambda n: frames.encode_ping(bytes(8), frames.ACK),
    "settings": lambda n: frames.encode_settings({}),
    "settings-windows": lambda n: frames.encode_settings({Http2Setting.INITIAL_WINDOW_SIZE: n % 1000}),
    "settings-answers": lambda n: frames.SETTINGS_ACK,
    "priorities": lambda n: _raw(frames.PRIORITY, bytes(5), stream=1),
    "later-kinds": lambda n: _raw(77),
    "goaways": lambda n: frames.encode_goaway(0, Http2ErrorCode.NO_ERROR),
    "resets": lambda n: _over(n) + frames.encode_rst_stream(1, Http2ErrorCode.CANCEL),
    "rapid-resets": lambda n: _call(n, "Lookup") + frames.encode_rst_stream(2 * n + 1, Http2ErrorCode.CANCEL),
    "made-resets": lambda n: _call(n, "Connect") + frames.encode_window_update(2 * n + 1, 0),
    "empty-data": lambda n: _over(n) + _raw(frames.DATA, stream=1),
    "single-bytes": lambda n: _over(n) + _raw(frames.DATA, b"x", stream=1),
    "padding": lambda n: _over(n) + _raw(frames.DATA, b"\xff" + bytes(255), frames.FLAG_PADDED, 1),
    "continuations": lambda n: (
        _raw(frames.HEADERS, b"", 0, 2 * n + 1) + _raw(frames.CONTINUATION, b"", 0, 2 * n + 1) * 15
        + _raw(frames.CONTINUATION, b"", frames.FLAG_END_HEADERS, 2 * n + 1)),
    "no-method": lambda n: _call(n, "Nowhere", frames.END_STREAM),
    "wrong-tokens": lambda n: _call(n, "Lookup", frames.END_STREAM, b"Bearer %d" % n),
    "huffman": lambda n: _raw(frames.HEADERS, _huffman(n), _END, 2 * n + 1),
    "many-headers": lambda n: _raw(frames.HEADERS, b"\0\x01a\x02%02d" % (n % 100) * 250, _END, 2 * n + 1),
}  # fmt: skip
