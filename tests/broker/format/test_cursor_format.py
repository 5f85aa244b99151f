"""The stored state of a cursor: byte for byte, in chunks, and damaged at every offset."""

from __future__ import annotations

import pytest
from pyroaring import BitMap

from magnetar.broker.core.cursor import CursorState, Partial
from magnetar.broker.format import cursor as stored
from magnetar.proto.names import Position

STATE = CursorState(
    Position(7, 3), {7: BitMap([5, 6, 9]), 8: BitMap(range(0, 1000, 2))}, {Position(7, 7): Partial(BitMap([0, 2]), 4)}
)


def test_the_example_of_the_specification() -> None:
    (entry,) = stored.encode(CursorState(Position(7, 3)), 1)
    assert entry[:20].hex(" ") == "4d 43 01 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 01"
    assert entry[24:].hex() == "00000000000000070000000000000003" + "00000000" * 2


def test_a_state_comes_back_as_it_was() -> None:
    (entry,) = stored.encode(STATE, 9)
    chunk = stored.decode_chunk(entry)
    assert (chunk.sequence, chunk.chunk, chunk.chunks) == (9, 0, 1)
    assert stored.decode_state(chunk.body) == STATE


def test_a_large_state_is_split_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "CHUNK_BYTES", 50)
    chunks = [stored.decode_chunk(entry) for entry in stored.encode(STATE, 9)]
    assert len(chunks) > 3
    assert [(each.chunk, each.chunks) for each in chunks] == [(number, len(chunks)) for number in range(len(chunks))]
    assert stored.decode_state(b"".join(each.body for each in chunks)) == STATE


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    (entry,) = stored.encode(STATE, 9)
    for offset in range(len(entry)):
        damaged = bytearray(entry)
        damaged[offset] ^= 0x10
        with pytest.raises(stored.DamagedState):
            stored.decode_chunk(bytes(damaged))
        with pytest.raises(stored.DamagedState):
            stored.decode_chunk(entry[:offset])


def test_a_state_that_contradicts_itself_is_damage() -> None:
    data = stored.encode_state(STATE)
    for cut in range(len(data)):
        with pytest.raises(stored.DamagedState):
            stored.decode_state(data[:cut])
    with pytest.raises(stored.DamagedState):
        stored.decode_state(data + b"\0")
