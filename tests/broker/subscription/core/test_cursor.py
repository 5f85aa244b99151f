"""The cursor against plain sets, and the rules that have a name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from magnetar.broker.log.log_shape_core import LogShape, TrimLimit
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import HOLES_OF_LEDGER_BYTES, CursorState, bits_of_indexes
from magnetar.broker.subscription.core.positions import CursorWritePlanner
from magnetar.proto.names import Position
from tests.broker.subscription.core.shapes import positions_of, shape_of

BATCH = 3


def cursor_on(shape: LogShape) -> Cursor:
    return Cursor(shape, CursorState(shape.start_position))


class Model:
    """What is acknowledged, message by message."""

    def __init__(self, shape: LogShape) -> None:
        self.positions = positions_of(shape)
        self.done: set[tuple[Position, int]] = set()

    def ack(self, position: Position, indexes: range | list[int]) -> None:
        self.done |= {(position, index) for index in indexes}

    def ack_before(self, position: Position) -> None:
        for each in self.positions:
            if each < position:
                self.ack(each, range(BATCH))

    def whole(self, position: Position) -> bool:
        return all((position, index) in self.done for index in range(BATCH))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["one", "batch", "upto", "upto_batch", "seek"]), st.integers(0, 10), st.integers(0, BATCH - 1)
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_a_cursor_is_a_set_of_acknowledged_messages(actions: list[tuple[str, int, int]]) -> None:
    shape = shape_of(4, 0, 3, 4)
    cursor, model = cursor_on(shape), Model(shape)
    for action, number, index in actions:
        position = model.positions[number]
        version, mark = cursor.version, cursor.mark
        if action == "one":
            cursor.ack(position)
            model.ack(position, range(BATCH))
        elif action == "batch":
            cursor.ack_messages_of_batch(position, bits_of_indexes([index]), BATCH)
            model.ack(position, [index])
        elif action == "upto":
            cursor.ack_cumulative(position)
            model.ack_before(position)
            model.ack(position, range(BATCH))
        elif action == "upto_batch":
            cursor.ack_cumulative_into_batch(position, index, BATCH)
            model.ack_before(position)
            model.ack(position, range(index + 1))
        else:
            cursor.seek(shape.position_before(position))
            model.done.clear()
            model.ack_before(position)
            assert cursor.version > version
        cursor.check()
        assert action == "seek" or cursor.mark >= mark, "the mark went backwards"
        for each in model.positions:
            assert cursor.is_acked(each) == model.whole(each)
            if not cursor.is_acked(each):
                assert cursor.acked_indexes(each) == [i for i in range(BATCH) if (each, i) in model.done]


def test_a_hundred_thousand_holes_are_kept_and_counted() -> None:
    shape = shape_of(200_001)
    cursor = cursor_on(shape)
    for entry in range(1, 200_001, 2):
        cursor.ack(Position(10, entry))
    assert (cursor.hole_entry_count, cursor.holes.hole_range_count, cursor.mark) == (100_000, 100_000, Position(10, -1))
    cursor.ack(Position(10, 0))
    assert cursor.mark == (10, 1)
    cursor.check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70_000), st.integers(1, 2000), st.integers(1, 70_000)), max_size=4))
def test_holes_take_a_bit_an_entry_or_four_bytes_for_each_entry_that_is_left_between_them(
    left: list[tuple[int, int, int]],
) -> None:
    """`left`: ranges of entries that are not acknowledged. The worst is a hole alone in its ledger."""
    size = 140_000
    shape = shape_of(1, size)
    cursor = cursor_on(shape)
    open_entries = BitMap().union(*[BitMap(range(first, size, step)[:count]) for first, step, count in left])
    holes = BitMap(range(size)) - open_entries
    cursor.ack_entries_of_ledger(20, holes)
    if not holes:
        return
    cursor.exceeds_memory(0)
    containers = (size >> 16) + 1
    constant = HOLES_OF_LEDGER_BYTES + 200 + 22 * containers
    assert cursor.memory_bytes <= constant + 4 * len(open_entries), "a run ends at an entry that is left"
    assert cursor.memory_bytes <= constant + 2 * len(holes), "an array has two bytes for each"
    assert cursor.memory_bytes <= constant + 8192 * containers, "a bitset has a bit for each entry"
    cursor.check()


def test_the_size_of_holes_that_a_write_has_compressed_is_counted_again() -> None:
    size = 50_000
    cursor = cursor_on(shape_of(1, size))
    for entry in range(size):
        if entry % 1000:
            cursor.ack(Position(20, entry))
    loose = cursor.memory_bytes
    planned = CursorWritePlanner().plan_write(cursor, 1)
    assert cursor.memory_bytes < loose / 7
    assert cursor.memory_bytes < HOLES_OF_LEDGER_BYTES + 200 + 2 * sum(map(len, planned.entries))
    cursor.ack(Position(20, 1000))
    assert cursor.memory_bytes < loose / 7, "a bitmap of runs stays one"
    cursor.check()


def test_what_is_acknowledged_after_holes_were_compressed_takes_no_more_than_before_when_they_are_again() -> None:
    """A bitmap of runs takes four bytes for each alone that is added, and no other form by itself."""
    size, block = 120_000, 1 << 16
    loose, cursor = cursor_on(shape_of(1, size)), cursor_on(shape_of(1, size))
    for each in (loose, cursor):
        each.ack_entries_of_ledger(20, BitMap(range(1, 1000)))
    cursor.exceeds_memory(0)
    for entry in range(1001, block, 2):
        for each in (loose, cursor):
            each.ack(Position(20, entry))
    assert cursor.memory_bytes > 15 * 8192
    assert not cursor.exceeds_memory(loose.memory_bytes)
    assert cursor.memory_bytes == loose.memory_bytes
    cursor.check()


def test_dirty_means_that_more_was_acknowledged_than_is_stored() -> None:
    cursor = cursor_on(shape_of(5))
    assert not cursor.has_unstored_changes
    cursor.ack(Position(10, 0))
    version, mark = cursor.version, cursor.mark
    cursor.ack(Position(10, 1))
    cursor.on_state_stored(version, mark)
    assert cursor.has_unstored_changes
    assert cursor.persisted_mark == (10, 0)
    cursor.on_state_stored(cursor.version, cursor.mark)
    assert not cursor.has_unstored_changes
    assert not cursor.ack(Position(10, 1)), "acknowledged twice"
    assert not cursor.has_unstored_changes
    with pytest.raises(AssertionError):
        cursor.on_state_stored(cursor.version + 1, cursor.mark)


def test_after_a_seek_backwards_nothing_may_be_trimmed_that_is_wanted_again() -> None:
    cursor = cursor_on(shape_of(5))
    cursor.ack_cumulative(Position(10, 3))
    assert cursor.durable_trim_mark == (10, -1), "not stored yet"
    cursor.on_state_stored(cursor.version, cursor.mark)
    assert cursor.durable_trim_mark == (10, 3)
    cursor.seek(Position(10, 0))
    assert cursor.persisted_mark == (10, 3)
    assert cursor.durable_trim_mark == (10, 0)


def test_a_ledger_behind_the_mark_is_safe_when_all_of_it_is_acknowledged_and_stored() -> None:
    shape = shape_of(2, 2, 2, 1)
    cursor = Cursor(shape, CursorState(Position(10, -1)))
    cursor.ack(Position(20, 0))
    assert cursor.trim_limit.released_ledgers == set()
    cursor.ack(Position(20, 1))
    assert cursor.trim_limit.released_ledgers == set(), "a crash would forget it"
    cursor.on_state_stored(cursor.version, cursor.mark)
    assert cursor.trim_limit == TrimLimit(Position(10, -1), frozenset({20}))
    cursor.ack(Position(30, 0))
    assert cursor.trim_limit.released_ledgers == {20}, "later changes, which are not stored, take nothing back"
    cursor.seek(Position(10, -1))
    assert cursor.trim_limit.released_ledgers == set(), "it is needed again"
    cursor.ack_entries_of_ledger(20, BitMap([0, 1]))
    assert cursor.trim_limit.released_ledgers == set(), "and what is stored is of a time before"
    cursor.on_state_stored(cursor.version, cursor.mark)
    shape.remove(20)
    cursor.on_ledger_trimmed(20)
    cursor.check()
    assert cursor.hole_entry_count == 0
    cursor.ack(Position(10, 0))
    cursor.ack(Position(10, 1))
    assert shape.position_after(cursor.mark) == (30, 0)


def test_the_open_ledger_is_safe_only_as_far_as_it_was_when_that_was_stored() -> None:
    shape = shape_of(1, 1)
    cursor = Cursor(shape, CursorState(Position(10, -1)))
    cursor.ack(Position(20, 0))
    cursor.on_state_stored(cursor.version, cursor.mark)
    assert cursor.trim_limit.released_ledgers == {20}
    shape.tail_span.last_entry += 1
    assert cursor.trim_limit.released_ledgers == set()
    cursor.ack(Position(20, 1))
    assert cursor.trim_limit.released_ledgers == set(), "it was full before, but what came since is not stored"
    cursor.on_state_stored(cursor.version, cursor.mark)
    assert cursor.trim_limit.released_ledgers == {20}


def test_the_size_of_a_batch_may_come_later() -> None:
    cursor = cursor_on(shape_of(2))
    assert not cursor.ack_messages_of_batch(Position(10, 0), bits_of_indexes([0, 1, 2]))
    assert not cursor.set_batch_size(Position(10, 0), 4)
    assert cursor.ack_messages_of_batch(Position(10, 0), bits_of_indexes([3]))
    assert cursor.mark == (10, 0)


def test_indexes_beyond_a_batch_acknowledge_nothing() -> None:
    cursor = cursor_on(shape_of(2))
    assert not cursor.ack_messages_of_batch(Position(10, 0), bits_of_indexes([1, 7, 4_000_000_000]), 3)
    assert cursor.acked_indexes(Position(10, 0)) == [1]


def test_a_recovered_state_is_fitted_into_the_log_that_is_left() -> None:
    before = shape_of(3, 3, 3)
    cursor = cursor_on(before)
    for position in [(10, 1), (20, 0), (20, 1), (20, 2), (30, 0), (30, 2)]:
        cursor.ack(Position(*position))
    cursor.ack_messages_of_batch(Position(10, 0), bits_of_indexes([0]), 2)
    state = cursor.copy_cursor_state()
    after = shape_of(3, 3, 2)  # the last ledger was recovered without its last, unconfirmed entry
    after.remove(10)
    again = Cursor(after, state)
    again.adapt_to_log_after_restart()
    again.check()
    assert again.mark == (30, 0)
    assert not again.is_acked(Position(30, 1))
    assert not again.partial


def test_a_million_holes_are_one_step_and_the_mark_takes_it() -> None:
    shape = shape_of(500_000, 0, 500_001)
    cursor = cursor_on(shape)
    cursor.ack_entries_of_ledger(10, BitMap(range(1, 500_000)))
    cursor.ack_entries_of_ledger(30, BitMap(range(500_000)))
    assert cursor.next_unacked_position(Position(10, 0)) == (10, 0)
    assert cursor.next_unacked_position(Position(10, 1)) == (30, 500_000)
    cursor.ack(Position(10, 0))
    assert cursor.mark == (30, 499_999)
    cursor.check()
    assert cursor.memory_bytes == 0


def test_what_is_partly_acknowledged_and_counted_goes_with_its_entry() -> None:
    cursor = cursor_on(shape_of(10))
    for entry in (2, 3, 5, 7):
        cursor.ack_messages_of_batch(Position(10, entry), 0b10, 3)
        assert cursor.count_redelivery(Position(10, entry)) == 1
    assert cursor.count_redelivery(Position(10, 7), 99) == 2
    assert cursor.redelivery_count(Position(10, 7)) == 2
    assert len(cursor.ack_entries_of_ledger(10, BitMap([2, 3, 9]))) == 3
    assert (list(cursor.partial), list(cursor.counts)) == ([(10, 5), (10, 7)], [(10, 5), (10, 7)])
    cursor.ack_cumulative(Position(10, 6))
    assert (list(cursor.partial), list(cursor.counts)) == ([(10, 7)], [(10, 7)])
    cursor.ack_messages_of_batch(Position(10, 7), 0b101, 3)
    cursor.check()
    assert cursor.memory_bytes < 2000
    assert not cursor.counts


def test_in_order_a_count_is_that_of_the_first_message_that_is_left() -> None:
    cursor, place = cursor_on(shape_of(4)), Position(10, 1)
    cursor.counts_first = True
    assert [cursor.count_redelivery(place) for _ in range(2)] == [1, 2]
    cursor.ack_messages_of_batch(place, bits_of_indexes([1]), BATCH)
    assert cursor.redelivery_count(place) == 2, "the first one is left"
    cursor.changed_chunks.clear()
    cursor.ack_messages_of_batch(place, bits_of_indexes([0]), BATCH)
    assert (cursor.redelivery_count(place), len(cursor.changed_chunks)) == (0, 2), "and its absence is stored"
    assert cursor.count_redelivery(place) == 1
    cursor.counts_first = False
    cursor.ack_cumulative_into_batch(place, 1, BATCH)
    assert cursor.redelivery_count(place) == 1
