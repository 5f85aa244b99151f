"""Header blocks: what is decoded is what the library decodes, whatever comes, in slices or as random bytes."""

from __future__ import annotations

import random

import hpack
import pytest
from hpack.huffman_table import decode_huffman

from magnetar.runtime.tcp import http2_frames as huffman
from magnetar.runtime.tcp.http2_frames import (
    HEADER_FIELDS_MAX,
    HUFFMAN_BYTES_MAX,
    SIZE_UPDATES_MAX,
    HeaderDecoder,
    HeaderField,
    Http2ErrorCode,
    Http2Violation,
    encode_headers,
)

LIST_BYTES_MAX = 32 << 10
NAMES = [b":path", b":method", b"content-type", b"authorization", b"x-own", b"", b"te", b"grpc-timeout"]


def coded(text: bytes) -> bytes:
    encoder = hpack.Encoder()
    return encoder.huffman_coder.encode(text)


@pytest.fixture(params=["no row is made", "all rows are made"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(huffman, "HUFFMAN_ROWS_PER_CALL", 4 if request.param == "no row is made" else 256)
    for row in huffman._ROWS:
        row.clear()
    return str(request.param)


def outcome(decode: object, data: bytes) -> bytes | None:
    try:
        return decode(data)  # type: ignore[operator, no-any-return]
    except hpack.HPACKDecodingError:
        return None


def test_a_string_is_what_the_library_makes_of_it(rows: str) -> None:
    rng = random.Random(1)
    for size in (0, 1, 2, 3, 5, 10, 100, 1000):
        for _ in range(200 if size < 1000 else 20):
            text = rng.randbytes(size) if rng.random() < 0.5 else bytes(rng.choices(b"abcDEF012-_./ \x00\xff", k=size))
            assert huffman.decode_huffman_text(coded(text)) == text


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_string_is_refused_as_by_the_library(rows: str, seed: int) -> None:
    """Random bytes, strings that are torn or changed, padding of more than seven bits or not of ones, and EOS."""
    rng = random.Random(seed)
    refused = 0
    for _ in range(500):
        data = bytearray(coded(bytes(rng.choices(range(256), k=rng.randrange(20)))))
        match rng.randrange(5):
            case 0:
                data = bytearray(rng.randbytes(rng.randrange(30)))
            case 1:
                data += b"\xff" * rng.randrange(6)
            case 2 if data:
                del data[rng.randrange(len(data)) :]
            case 3 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 4:
                data += b"\x00" * rng.randrange(3)
        found = outcome(huffman.decode_huffman_text, bytes(data))
        assert found == outcome(decode_huffman, bytes(data)), bytes(data).hex()
        refused += found is None
    assert 50 < refused < 450


def test_a_call_makes_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in huffman._ROWS:
        row.clear()
    text = random.Random(1).randbytes(4000)
    for number in range(1, 10):
        assert huffman.decode_huffman_text(coded(text)) == text
        assert sum(map(bool, huffman._ROWS)) == number * huffman.HUFFMAN_ROWS_PER_CALL


def read(decoder: HeaderDecoder[list[HeaderField]], data: bytes) -> list[HeaderField] | Http2ErrorCode:
    try:
        return decoder.decode(data)
    except Http2Violation as error:
        return error.code


def read_by_library(decoder: hpack.Decoder, data: bytes) -> list[HeaderField] | Http2ErrorCode:
    try:
        return [(bytes(each[0]), bytes(each[1])) for each in decoder.decode(data, raw=True)]
    except hpack.OversizedHeaderListError:
        return Http2ErrorCode.ENHANCE_YOUR_CALM
    except (hpack.HPACKError, IndexError, ValueError):
        return Http2ErrorCode.COMPRESSION_ERROR


def a_block(rng: random.Random, encoder: hpack.Encoder) -> bytes:
    headers = [
        (rng.choice(NAMES), bytes(rng.choices(b"abc/019 \xff\x00", k=rng.choice((0, 1, 5, 30, 300)))))
        for _ in range(rng.randrange(12))
    ]
    if rng.random() < 0.2:
        return encode_headers(headers)
    if rng.random() < 0.1:
        encoder.header_table_size = rng.choice((0, 50, 1000, 4096))
    return encoder.encode(headers, huffman=rng.random() < 0.7)


@pytest.mark.parametrize("seed", range(60))
def test_blocks_of_a_connection_are_what_the_library_makes_of_them(seed: int) -> None:
    """With its dynamic table, changed sizes of it, never-indexed fields; and blocks that are damaged, or random."""
    rng = random.Random(seed)
    ours: HeaderDecoder[list[HeaderField]] = HeaderDecoder(lambda found: found, LIST_BYTES_MAX)
    theirs, encoder = hpack.Decoder(LIST_BYTES_MAX), hpack.Encoder()
    for _ in range(60):
        data = bytearray(a_block(rng, encoder))
        match rng.randrange(12):
            case 0 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1 if data:
                del data[rng.randrange(len(data)) :]
            case 2:
                data = bytearray(rng.randbytes(rng.randrange(1, 60)))
            case 3:
                data += bytes((rng.choice((0x20, 0x3F, 0x7F, 0xFF, 0x0F, 0x40)),)) + b"\xff" * rng.randrange(7)
        found, expected = read(ours, bytes(data)), read_by_library(theirs, bytes(data))
        assert found == expected, bytes(data).hex()
        if not isinstance(found, list):
            return  # the connection ends
    assert ours._table.dynamic_entries == theirs.header_table.dynamic_entries


def test_the_longest_headers_are_refused_as_by_the_library() -> None:
    for size in (LIST_BYTES_MAX - 33, LIST_BYTES_MAX - 32):
        data = encode_headers([(b"x", bytes(size))])
        found = read(HeaderDecoder(lambda found: found, LIST_BYTES_MAX), data)
        assert found == read_by_library(hpack.Decoder(LIST_BYTES_MAX), data)


def test_what_is_more_work_than_a_call_has_is_refused_before_it_is_decoded() -> None:
    for data in (b"\x82" * (HEADER_FIELDS_MAX + 1), b"\x00\x01x" + b"\xff\x82\x7f" + bytes(HUFFMAN_BYTES_MAX + 1)):
        decoder: HeaderDecoder[list[HeaderField]] = HeaderDecoder(lambda found: found, LIST_BYTES_MAX)
        assert read(decoder, data) is Http2ErrorCode.ENHANCE_YOUR_CALM
    assert read(HeaderDecoder(lambda found: found, LIST_BYTES_MAX), b"\x20" * (SIZE_UPDATES_MAX + 1)) is (
        Http2ErrorCode.COMPRESSION_ERROR
    )
