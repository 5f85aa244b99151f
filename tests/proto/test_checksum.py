"""CRC32C: known answers, pieces, and parts that are joined without being read."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.checksum import JOINED_BYTES_MAX, combine_checksums, crc32c


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)  # fmt: skip
def test_the_checksums_are_those_of_rfc_3720(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum
    assert crc32c(memoryview(b"?" + data)[1:]) == crc32c(bytearray(data)) == checksum


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_bytes_in_pieces_have_the_checksum_of_the_whole(first: bytes, second: bytes) -> None:
    whole = crc32c(first + second)
    assert crc32c(second, crc32c(first)) == whole
    assert combine_checksums(crc32c(first), crc32c(second), len(second)) == whole


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 131_072, 1_048_576 + 77, JOINED_BYTES_MAX - 1])
def test_a_large_part_is_joined_by_its_checksum_and_size(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert combine_checksums(crc32c(b"head"), crc32c(data), size) == crc32c(b"head" + data)


def test_joining_forgets_the_head_again() -> None:
    """What follows a known head has a known checksum, when the whole has one: the part is not read for it."""
    head, data = b"h" * 32, random.Random(1).randbytes(40_000)
    assert combine_checksums(crc32c(head), crc32c(head + data), len(data)) == crc32c(data)


def test_a_part_that_is_too_large_is_refused() -> None:
    with pytest.raises(AssertionError):
        combine_checksums(0, 0, JOINED_BYTES_MAX)
