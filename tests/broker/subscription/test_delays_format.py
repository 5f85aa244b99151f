"""Buckets of delayed entries as bytes: the documented example, round trips, and damage that is noticed."""

import random

import pytest
from pyroaring import BitMap

from magnetar.broker.subscription import delays as stored
from magnetar.broker.subscription.core.delay_buckets import (
    DELAY_KEY_BYTES,
    UnstoredDelayBucket,
    decode_entries_by_ledger,
    make_delay_key,
    make_unstored_bucket,
    position_of_delay_key,
)
from magnetar.proto.names import Position

EXAMPLE = (
    "4d4401010000000000000001" "{}" "00000000000003e8000000000000000700000003",
    "4d4401020000000100000001" "{}" "00000000000003e800000000000003e8000000010000001e"
    "000000000000000700000012" "3a3000000100000000000000100000000300",
)


def draft_of(keys: list[int]) -> UnstoredDelayBucket:
    held: dict[int, BitMap] = {}
    for position in map(position_of_delay_key, keys):
        held.setdefault(position[0], BitMap()).add(position[1])
    return make_unstored_bucket(keys, held)


def a_bucket(entries: int = 5000, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    keys = sorted(
        make_delay_key(Position(7 + number // 3000, number), rng.randrange(10_000)) for number in range(entries)
    )
    return stored.encode_bucket(draft_of(keys))


def test_the_bytes_are_those_of_the_example() -> None:
    entries = stored.encode_bucket(draft_of([make_delay_key(Position(7, 3), 1000)]))
    for entry, example in zip(entries, EXAMPLE, strict=True):
        assert entry.hex() == example.format(entry[12:16].hex())
    assert stored.decode_segment(entries[0], 0).hex() == EXAMPLE[0][-40:]
    (segment,) = stored.decode_directory(entries[1], 1)
    assert segment[:3] == (1000, 1000, 1)
    assert [(ledger, list(bits)) for ledger, bits in decode_entries_by_ledger(segment.places)] == [(7, [3])]


def test_what_is_encoded_comes_back() -> None:
    entries = a_bucket()
    segments = stored.decode_directory(entries[-1], len(entries) - 1)
    bodies = [stored.decode_segment(entry, number) for number, entry in enumerate(entries[:-1])]
    keys = b"".join(bodies)
    assert keys == b"".join(sorted(keys[at : at + DELAY_KEY_BYTES] for at in range(0, len(keys), DELAY_KEY_BYTES)))
    assert (
        [segment.keys for segment in segments]
        == [len(body) // DELAY_KEY_BYTES for body in bodies]
        == [2000, 2000, 1000]
    )
    places = {
        (ledger, each)
        for segment in segments
        for ledger, bits in decode_entries_by_ledger(segment.places)
        for each in bits
    }
    assert places == {(7 + number // 3000, number) for number in range(5000)}


@pytest.mark.parametrize("which", [0, -1])
def test_what_is_cut_or_changed_is_noticed(which: int) -> None:
    rng, entries = random.Random(2), a_bucket(300)
    number, entry = (0, entries[0]) if which == 0 else (len(entries) - 1, entries[-1])
    decode = stored.decode_segment if which == 0 else stored.decode_directory
    for size in range(0, len(entry), 7):
        with pytest.raises(stored.DamagedDelayBucket):
            decode(entry[:size], number)
    for _ in range(200):
        damaged = bytearray(entry)
        damaged[rng.randrange(len(entry))] ^= 1 << rng.randrange(8)
        with pytest.raises(stored.DamagedDelayBucket):
            decode(bytes(damaged), number)
    with pytest.raises(stored.DamagedDelayBucket):
        decode(entry, number + 1)


def test_a_directory_that_contradicts_itself_is_damage_though_its_checksum_is_right() -> None:
    rng, entries = random.Random(3), a_bucket(300)
    body = bytearray(entries[-1][stored.ENTRY_HEAD_BYTES :])
    refused = 0
    for _ in range(300):
        changed = bytearray(body)
        changed[rng.randrange(len(body))] = rng.randrange(256)
        entry = stored._entry(stored.DIRECTORY_KIND, 1, 1, bytes(changed[: rng.randrange(len(body)) + 1]))
        try:
            stored.decode_directory(entry, 1)
        except stored.DamagedDelayBucket:
            refused += 1
    assert refused > 250
