"""Buckets and gaps of a cursor, against plain sets."""

from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
from magnetar.broker.session.inspection import count_entries_in_buckets, find_largest_gaps, find_largest_runs
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState, PendingAcks, TxnAcks
from magnetar.proto.names import Position
from magnetar.proto.states import TxnId

SIZES = (7, 1, 12, 3)


def made(acked: set[int]) -> tuple[LogShape, Cursor, list[Position]]:
    """A log of four ledgers, and a cursor with the entries of these numbers acknowledged."""
    shape, index = LogShape(), 0
    for at, size in enumerate(SIZES):
        shape.add(LedgerSpan(10 + at, index, size - 1, index + 2 * size, open=at == len(SIZES) - 1))
        index += 2 * size
    every = [Position(span.ledger_id, entry) for span in shape.spans for entry in range(span.last_entry + 1)]
    cursor = Cursor(shape, CursorState(shape.start_position))
    for number in sorted(acked):
        cursor.ack(every[number])
    return shape, cursor, every


ACKED = st.sets(st.integers(0, sum(SIZES) - 1))


@settings(max_examples=200, deadline=None)
@given(ACKED, st.integers(1, 30), ACKED)
def test_buckets_are_of_one_size_and_count_what_is_in_them(acked: set[int], buckets: int, late: set[int]) -> None:
    shape, cursor, every = made(acked)
    after = [each for each in every if each > cursor.mark]
    delayed = dict[int, BitMap]()
    for number in late:
        delayed.setdefault(every[number].ledger_id, BitMap()).add(every[number].entry_id)
    found = count_entries_in_buckets(shape, cursor, delayed, buckets)
    assert len(found) <= buckets
    assert len({each.entries for each in found[:-1]}) <= 1
    for each in found:
        mine, after = after[: each.entries], after[each.entries :]
        assert each.first == mine[0]
        assert each.first_index == 2 * every.index(mine[0])
        assert each.acknowledged == sum(cursor.is_acked(one) for one in mine)
        assert each.delayed == sum(every.index(one) in late for one in mine)
        assert each.pending == 0
    assert not after


@settings(max_examples=200, deadline=None)
@given(ACKED, st.integers(1, 5))
def test_the_largest_gaps_are_found(acked: set[int], count: int) -> None:
    shape, cursor, every = made(acked)
    sizes, runs = list[int](), groupby(every, key=lambda each: (each.ledger_id, cursor.is_acked(each)))
    for (_, done), run in runs:
        entries = [*run]
        if not done and entries[-1] < cursor.last_hole_position:
            sizes.append(len(entries))
    found = find_largest_gaps(shape, cursor, count)
    assert [size for _, size in found] == sorted(sizes, reverse=True)[:count]
    for first, size in found:
        at = every.index(first)
        assert not any(cursor.is_acked(each) for each in every[at : at + size])
        assert at == 0 or cursor.is_acked(every[at - 1]) or every[at - 1].ledger_id != first.ledger_id


def test_what_a_transaction_holds_is_pending() -> None:
    shape, cursor, _ = made({1})
    cursor.pending = PendingAcks({TxnId(0, 1): TxnAcks({12: BitMap([3, 4])}, {}, Position(10, 4))})
    found = count_entries_in_buckets(shape, cursor, {}, 4)
    assert sum(each.pending for each in found) == 5 + 2


def test_millions_of_holes_are_ten_gaps() -> None:
    odd = BitMap(range(1, 4_000_000, 2))
    assert [size for _, size in find_largest_runs(odd, 10)] == [1] * 10
    odd.add(500_000)
    assert find_largest_runs(odd, 10)[0] == (499_999, 3)
