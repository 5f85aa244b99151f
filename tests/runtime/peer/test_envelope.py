"""The bytes of a peer envelope: exact, and every damage of them is refused."""

import random

import pytest

from magnetar.runtime.peer.envelope import (
    INLINE_FRAME_BYTES_MAX,
    MULTIPART_BYTES_MAX,
    EnvelopeKind,
    MalformedEnvelope,
    WrongEnvelopeMagic,
    decode_envelope,
    encode_envelope,
    encode_refusal_envelope,
)

IDENTITY = bytes(range(16))


def test_the_documented_bytes_of_a_request() -> None:
    parts = encode_envelope(EnvelopeKind.REQUESTS, IDENTITY, [(7, b"head", [b"ab"])])
    assert [bytes(part) for part in parts] == [
        b"MGTP\x01\x01" + IDENTITY + b"\0\0\0\x01"  # magic, version, kind; count
        b"\0\0\0\0\0\0\0\x07" + b"\0\0\0\x04\0\0\0\x01" + b"\0\0\0\x02" + b"headab"  # id; sizes
    ]


def test_small_frames_lie_in_the_header_and_large_ones_travel_as_parts() -> None:
    large = bytes(INLINE_FRAME_BYTES_MAX + 1)
    small = bytes(INLINE_FRAME_BYTES_MAX)
    parts = encode_envelope(
        EnvelopeKind.REPLIES, IDENTITY, [(1, b"a", [small, large, b""]), (2, b"", ()), (3, b"c", [large])]
    )
    assert parts[1] is large
    assert parts[2] is large
    envelope = decode_envelope(parts[0])
    assert (envelope.kind, envelope.identity) == (EnvelopeKind.REPLIES, IDENTITY)
    assert [(item.id, item.head) for item in envelope.items] == [(1, b"a"), (2, b""), (3, b"c")]
    assert envelope.items[0].frames == [small, None, b""]
    assert [(item.id, index, size) for item, index, size in envelope.parts] == [(1, 1, len(large)), (3, 0, len(large))]


def test_every_truncation_and_every_extension_of_a_header_is_malformed() -> None:
    items = [(1, b"head", [b"x" * 9, bytes(5000)]), (2, b"h", [b"y"])]
    header = bytes(encode_envelope(EnvelopeKind.REQUESTS, IDENTITY, items)[0])
    for end in range(5, len(header)):
        with pytest.raises(MalformedEnvelope):
            decode_envelope(header[:end])
    for end in range(5):
        with pytest.raises(WrongEnvelopeMagic):
            decode_envelope(header[:end])
    with pytest.raises(MalformedEnvelope):
        decode_envelope(header + b"\0")


def test_what_a_header_announces_is_bounded_in_bytes_and_with_them_in_parts() -> None:
    frame = bytes(1 << 20)

    def header(frames: int) -> bytes:
        return bytes(encode_envelope(EnvelopeKind.REQUESTS, IDENTITY, [(1, b"", [frame] * frames)])[0])

    most = (MULTIPART_BYTES_MAX - len(header(31))) // len(frame)
    assert len(decode_envelope(header(most)).parts) == most
    with pytest.raises(MalformedEnvelope, match="at most"):
        decode_envelope(header(most + 1))


def test_another_magic_or_version_is_told_from_damage() -> None:
    header = bytes(encode_envelope(EnvelopeKind.REQUESTS, IDENTITY, [])[0])
    with pytest.raises(WrongEnvelopeMagic, match="not of Magnetar"):
        decode_envelope(b"HTTP" + header[4:])
    with pytest.raises(WrongEnvelopeMagic, match="version 2"):
        decode_envelope(header[:4] + b"\x02" + header[5:])
    with pytest.raises(MalformedEnvelope, match="kind 9"):
        decode_envelope(header[:5] + b"\x09" + header[6:])


def test_any_flipped_or_random_bytes_raise_nothing_else() -> None:
    rng = random.Random(20)
    header = bytes(encode_envelope(EnvelopeKind.REQUESTS, IDENTITY, [(1, b"head", [b"x" * 9]), (2, b"h", [b"y"])])[0])
    refused = 0
    for _ in range(20_000):
        damaged = bytearray(header)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            decode_envelope(bytes(damaged))
        except (MalformedEnvelope, WrongEnvelopeMagic):
            refused += 1
    assert refused > 10_000  # the rest are other ids and other content


def test_a_refusal_names_the_identity_and_the_ids() -> None:
    envelope = decode_envelope(encode_refusal_envelope(EnvelopeKind.WRONG_IDENTITY, IDENTITY, [4, 5]))
    assert (envelope.kind, envelope.identity, [item.id for item in envelope.items]) == (
        EnvelopeKind.WRONG_IDENTITY,
        IDENTITY,
        [4, 5],
    )
