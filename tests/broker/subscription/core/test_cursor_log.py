"""What is written of a cursor: only what changed, everything that is valid, and a ledger that ends in time."""

from pyroaring import BitMap

from magnetar.broker.subscription import cursor_format as stored
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState
from magnetar.broker.subscription.core.positions import (
    CursorLedgerBounds,
    CursorLedgerEndReason,
    CursorWritePlanner,
    add_older_holes,
    contains_holes_of,
    plan_record_state,
)
from magnetar.proto.names import Position
from tests.broker.subscription.core.shapes import shape_of

LEDGERS = 40
SIZE = 50_000
BOUNDS = CursorLedgerBounds(entries=1000, size_bytes=64 << 20, live_share=0.2)


def full_of_holes() -> Cursor:
    """A million alternating acks over forty ledgers."""
    shape = shape_of(*[SIZE] * LEDGERS)
    cursor = Cursor(shape, CursorState(shape.start_position))
    for number in range(LEDGERS):
        cursor.ack_entries_of_ledger((number + 1) * 10, BitMap(range(1, SIZE, 2)))
    return cursor


def state_of(entries: list[bytes], every: list[bytes]) -> CursorState:
    """What a reader finds that reads the marker at the end."""
    mark, rows = stored.decode_marker(stored.decode_piece(entries[-1]).body)
    state = CursorState(mark)
    for key, row in rows.items():
        pieces = [stored.decode_piece(every[row.first_entry + at]) for at in range(row.pieces)]
        assert all(piece.is_piece_of_chunk(key, row, at) for at, piece in enumerate(pieces))
        stored.decode_chunk_into_state(state, key, b"".join(piece.body for piece in pieces))
    return state


def test_one_ack_rewrites_one_chunk() -> None:
    cursor, log = full_of_holes(), CursorWritePlanner()
    first = log.plan_write(cursor, 1)
    log.on_write_confirmed(first)
    assert len(first.entries) == LEDGERS + 1
    cursor.ack(Position(200, 8))
    second = log.plan_write(cursor, 2)
    log.on_write_confirmed(second)
    assert len(second.entries) == 2, "one chunk and the marker"
    assert sum(map(len, second.entries)) < 11_000
    assert state_of(second.entries, [*first.entries, *second.entries]) == cursor.copy_cursor_state()


def test_moving_the_mark_rewrites_nothing_but_the_marker() -> None:
    cursor, log = full_of_holes(), CursorWritePlanner()
    first = log.plan_write(cursor, 1)
    log.on_write_confirmed(first)
    cursor.ack(Position(10, 0))
    second = log.plan_write(cursor, 2)
    assert len(second.entries) == 1
    found = Cursor(shape_of(*[SIZE] * LEDGERS), state_of(second.entries, [*first.entries, *second.entries]))
    found.adapt_to_log_after_restart()
    assert found.copy_cursor_state() == cursor.copy_cursor_state()


def test_what_a_failed_write_held_is_in_the_next_one() -> None:
    cursor, log = full_of_holes(), CursorWritePlanner()
    log.on_write_confirmed(log.plan_write(cursor, 1))
    cursor.ack(Position(200, 8))
    log.on_write_failed(log.plan_write(cursor, 2), cursor)
    again = CursorWritePlanner().plan_write(cursor, 3)
    assert state_of(again.entries, again.entries) == cursor.copy_cursor_state()


def test_a_cursor_ledger_ends_by_entries_bytes_and_when_little_of_it_is_valid() -> None:
    cursor, log = full_of_holes(), CursorWritePlanner()
    log.on_write_confirmed(log.plan_write(cursor, 1))
    assert log.why_ledger_ends(BOUNDS) is None
    assert log.why_ledger_ends(CursorLedgerBounds(10, 64 << 20, 0.2)) is CursorLedgerEndReason.ENTRIES
    writes = 1
    while log.why_ledger_ends(BOUNDS) is None:
        writes += 1
        cursor.ack(Position(10 * (writes % LEDGERS + 1), 8 + 2 * writes))
        log.on_write_confirmed(log.plan_write(cursor, writes))
    assert log.why_ledger_ends(BOUNDS) is CursorLedgerEndReason.EMPTY
    assert 300 < writes < 600, "a valid state is a fifth of the ledger's 4 MiB or so when it ends"
    cursor.ack_cumulative(Position(10 * (LEDGERS - 1), 0))
    log.on_write_confirmed(log.plan_write(cursor, writes + 1))
    assert log.why_ledger_ends(CursorLedgerBounds(100_000, 1 << 20, 0.0)) is CursorLedgerEndReason.BYTES


def test_a_state_larger_than_the_bound_of_a_ledger_does_not_roll_without_end() -> None:
    cursor, log = full_of_holes(), CursorWritePlanner()
    log.on_write_confirmed(log.plan_write(cursor, 1))
    assert log.why_ledger_ends(CursorLedgerBounds(100_000, 1000, 0.2)) is None


def test_complaint_12_five_million_holes_are_stored_whole_and_take_little_memory() -> None:
    """Pulsar (PIP-262): the record of the acks was too large to be stored at all."""
    shape = shape_of(*[SIZE] * 200)
    cursor = Cursor(shape, CursorState(shape.start_position))
    for number in range(200):
        cursor.ack_entries_of_ledger((number + 1) * 10, BitMap(range(1, SIZE, 2)))
    assert cursor.hole_entry_count == 5_000_000
    assert cursor.memory_bytes < 2_000_000
    write = CursorWritePlanner().plan_write(cursor, 1)
    assert max(map(len, write.entries)) < 16_384
    assert state_of(write.entries, write.entries) == cursor.copy_cursor_state()


# ------------------------------------------------------------------------------------ a state for the metadata
def test_a_state_for_the_metadata_has_the_mark_and_as_many_holes_as_fit_in_the_order_of_the_log() -> None:
    cursor = full_of_holes()
    for bytes_max in (150, 1000, 7000, 16 << 10, 100_000):
        planned = plan_record_state(cursor, 1, bytes_max)
        assert planned is not None
        assert len(planned.snapshot) <= bytes_max
        found = stored.decode_snapshot(planned.snapshot)
        kept = [(ledger, entry) for ledger, holes in sorted(found.acked.items()) for entry in holes]
        every = [(ledger, entry) for ledger, holes in sorted(cursor.acked.items()) for entry in holes]
        assert found.mark == cursor.mark
        assert kept == every[: len(kept)], "the first ones"
        assert planned.lacks == len(every) - len(kept)
        assert len(planned.snapshot) > 0.7 * bytes_max - 100, "as many as fit"


def test_a_state_that_fits_lacks_nothing() -> None:
    shape = shape_of(SIZE)
    cursor = Cursor(shape, CursorState(shape.start_position))
    cursor.ack_entries_of_ledger(10, BitMap([3, 5, *range(100, 40_000)]))
    planned = plan_record_state(cursor, 1, 16 << 10)
    assert planned is not None
    assert planned.lacks == 0
    assert stored.decode_snapshot(planned.snapshot) == cursor.copy_cursor_state()


def test_what_is_no_hole_is_never_left_out() -> None:
    """Redelivery counts and parts of batches: a state without them would be another one."""
    shape = shape_of(SIZE)
    cursor = Cursor(shape, CursorState(shape.start_position))
    cursor.ack_entries_of_ledger(10, BitMap(range(1, SIZE, 2)))
    for entry in range(0, 40, 2):
        cursor.count_redelivery(Position(10, entry))
    assert plan_record_state(cursor, 1, 400) is None
    planned = plan_record_state(cursor, 1, 1000)
    assert planned is not None
    assert planned.lacks > 0
    assert len(stored.decode_snapshot(planned.snapshot).counts) == 20
    for entry in range(40, 20_000, 2):
        cursor.count_redelivery(Position(10, entry))
    assert plan_record_state(cursor, 1, 16 << 10) is None


def test_a_state_contains_an_older_one_if_it_has_each_of_its_holes_or_a_mark_after_it() -> None:
    older = CursorState(Position(10, 3), {10: BitMap([5, 9]), 20: BitMap([1])})
    assert contains_holes_of(CursorState(Position(10, 9), {20: BitMap([1, 2])}), older)
    assert contains_holes_of(CursorState(Position(20, 1)), older)
    assert not contains_holes_of(CursorState(Position(10, 7), {20: BitMap([1])}), older)
    assert not contains_holes_of(CursorState(Position(10, 9)), older)
    assert not contains_holes_of(CursorState(Position(10, 2), older.acked), older)


def test_holes_of_an_older_state_are_added_after_the_mark_alone() -> None:
    state = CursorState(Position(20, 3), {20: BitMap([7])})
    add_older_holes(state, CursorState(Position(10, 0), {10: BitMap([4]), 20: BitMap([2, 5]), 30: BitMap([0])}))
    assert state == CursorState(Position(20, 3), {20: BitMap([5, 7]), 30: BitMap([0])})
