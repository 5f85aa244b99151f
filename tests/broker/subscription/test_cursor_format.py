"""The stored state of a cursor: byte for byte, in pieces, damaged at every offset."""

import pytest
from pyroaring import BitMap

from magnetar.broker.subscription import cursor_format as stored
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import (
    COMMIT_NOTE_KEY,
    CursorChunkKey,
    CursorChunkKind,
    CursorState,
    PartlyAckedBatch,
    RedeliveryCount,
)
from magnetar.broker.subscription.core.positions import CursorWritePlanner, chunk_keys_of_cursor
from magnetar.proto.names import Position
from tests.broker.subscription.core.shapes import shape_of

MARK = Position(10, 3)


def state() -> CursorState:
    return CursorState(
        MARK,
        {10: BitMap([5, 6, 9]), 20: BitMap(range(0, 1000, 2))},
        {Position(10, 7): PartlyAckedBatch(0b101, 4), Position(20, 2001): PartlyAckedBatch(1 << 700, 0)},
        {Position(10, 7): RedeliveryCount(3), Position(20, 1): RedeliveryCount(2, 1_700_000_000_000)},
    )


def entries_of(found: CursorState) -> list[bytes]:
    return CursorWritePlanner().plan_write(Cursor(shape_of(4000, 4000), found), 9).entries


def test_the_example_of_the_specification() -> None:
    (entry,) = stored.encode_marker(Position(7, 3), {}, 1)
    assert entry[:32].hex() == "4d430100" + "0000000000000001" + "00" * 8 + "00" * 4 + "00" * 4 + "00000001"
    assert entry[36:].hex() == "00000000000000070000000000000003" + "00000000"


def test_a_state_comes_back_as_it_was() -> None:
    assert stored.decode_snapshot(stored.encode_snapshot(entries_of(state()))) == state()


def test_a_large_chunk_is_split_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "CHUNK_BYTES_MAX", 50)
    entries = entries_of(state())
    pieces = [stored.decode_piece(entry) for entry in entries]
    assert max(each.pieces for each in pieces) > 3
    assert stored.decode_snapshot(stored.encode_snapshot(entries)) == state()


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    for entry in entries_of(state()):
        for offset in range(len(entry)):
            damaged = bytearray(entry)
            damaged[offset] ^= 0x10
            with pytest.raises(stored.DamagedCursorState):
                stored.decode_piece(bytes(damaged))
            with pytest.raises(stored.DamagedCursorState):
                stored.decode_piece(entry[:offset])


def test_a_chunk_that_contradicts_itself_is_damage() -> None:
    cursor = Cursor(shape_of(4000, 4000), state())
    for key in chunk_keys_of_cursor(cursor):
        body = stored.encode_cursor_chunk_body(key, cursor)
        other = CursorChunkKey(key.kind, key.ledger_id, key.block + 1)
        with pytest.raises(stored.DamagedCursorState):
            stored.decode_chunk_into_state(CursorState(MARK), other, body)
        with pytest.raises(stored.DamagedCursorState):
            stored.decode_chunk_into_state(CursorState(MARK), key, body[:-1])
    (marker,) = stored.encode_marker(
        MARK, {CursorChunkKey(CursorChunkKind.HOLES, 10, 0): stored.CursorChunkPlace(1, 0, 1, 40)}, 1
    )
    body = stored.decode_piece(marker).body
    for cut in range(len(body)):
        with pytest.raises(stored.DamagedCursorState):
            stored.decode_marker(body[:cut])
    with pytest.raises(stored.DamagedCursorState):
        stored.decode_marker(body + b"\0")


def test_a_snapshot_without_its_end_is_damage() -> None:
    data = stored.encode_snapshot(entries_of(state()))
    for cut in range(len(data)):
        with pytest.raises(stored.DamagedCursorState):
            stored.decode_snapshot(data[:cut])


def test_a_note_comes_back_and_only_a_state_with_one_has_its_version() -> None:
    with_note = state()
    with_note.note = b"batch 7"
    assert stored.decode_snapshot(stored.encode_snapshot(entries_of(with_note))) == with_note
    assert [entry[2] for entry in entries_of(state())] == [1] * len(entries_of(state()))
    assert [entry[2] for entry in entries_of(with_note)][-2:] == [3, 3], "the note and the marker that names it"
    for key, body in ((CursorChunkKey(CursorChunkKind.NOTE, 7, 0), b"x"), (COMMIT_NOTE_KEY, b"")):
        with pytest.raises(stored.DamagedCursorState):
            stored.decode_chunk_into_state(CursorState(MARK), key, body)


def test_a_note_is_written_when_it_changes_and_goes_with_a_seek() -> None:
    cursor, planner = Cursor(shape_of(4000, 4000), CursorState(MARK)), CursorWritePlanner()
    sizes = []
    for number, (note, is_new) in enumerate(((b"a", True), (b"a", False), (b"b", True), (b"", True))):
        before = cursor.version
        cursor.set_commit_note(note)
        assert (cursor.version != before) is is_new
        write = planner.plan_write(cursor, number + 1)
        planner.on_write_confirmed(write)
        sizes.append(len(write.entries))
    assert sizes == [2, 1, 2, 1]
    cursor.set_commit_note(b"c")
    cursor.seek(MARK)
    assert cursor.note == b""
    assert COMMIT_NOTE_KEY not in planner.plan_write(cursor, 9).rows
