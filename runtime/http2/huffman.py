"""Strings in Huffman's code (RFC 7541, 5.2), decoded a byte at a time.

The library `hpack` takes half a byte at a time, 0.16 µs a byte, so that the longest block of headers held the event
loop for 2.5 ms. Here a row is a state of the decoder, which has for each byte the next row and what the byte completes:
0.03 µs. A row is made from the library's table when it is first needed, which takes 0.1 ms and 22 KB. A call makes at
most ROWS_A_CALL; a string that needs more is decoded by the library. Texts need a hundred of the 256.
Guarded by tests/runtime/http2/test_headers.py, with the library as the reference.
"""

from __future__ import annotations

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE, decode_huffman

ROWS_A_CALL = 4

_Row = list[tuple["_Row", bytes]]

_STATES = 256
_ROWS: list[_Row] = [[] for _ in range(_STATES)]
_DEAD: _Row = []
_DEAD += [(_DEAD, b"")] * 256
"""State in which no code begins with what came."""
_STATE_OF = {id(row): state for state, row in enumerate(_ROWS)}
_SYMBOLS = [bytes((each,)) for each in range(256)]


def _complete() -> frozenset[int]:
    """Rows in which a string may end: of what came nothing is left, or at most seven bits, all ones."""
    found = {0}
    for next_state, flags, _ in HUFFMAN_TABLE:
        if flags & HUFFMAN_COMPLETE and not flags & HUFFMAN_FAIL:
            found.add(next_state)
    return frozenset(id(_ROWS[state]) for state in found)


_COMPLETE = _complete()


def decode(data: bytes) -> bytes:
    """Decodes Huffman's code. Raises HPACKDecodingError."""
    row, parts, left = _ROWS[0], list[bytes](), ROWS_A_CALL
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
