"""What a subscription has acknowledged, in few numbers: buckets of entries, and the largest gaps.

    count_buckets(shape, cursor, delayed, 600)     from mark-delete to the end, at most so many
    find_gaps(shape, cursor, 10)                   the largest runs of entries that are not acknowledged

A *gap* is a run of entries of one ledger that are not acknowledged, before one that is. A cursor may have millions of
holes: both functions work on whole bitmaps, and look at single runs of at most twice as many as they return. An entry
that readers never see (of an aborted transaction) counts as acknowledged.
Guarding tests: tests/broker/session/test_cursor_shape.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nlargest

from pyroaring import BitMap

from ...proto.names import Position
from ...proto.statistics import CursorBucket
from ..log.log_shape_core import LogShape, Span
from ..subscription.core.cursor import Cursor
from ..subscription.core.cursor_state import count_ranges, run_end

NONE = BitMap()


def spans_after(shape: LogShape, mark: Position) -> Iterator[tuple[Span, int]]:
    """Yields the ledgers with entries after `mark`, and the first entry of each that is after it."""
    for span in shape.spans:
        first = mark.entry_id + 1 if span.ledger_id == mark.ledger_id else 0
        if span.ledger_id >= mark.ledger_id and first <= span.last_entry:
            yield span, first


def done_entries(shape: LogShape, cursor: Cursor, ledger_id: int) -> BitMap:
    """Returns the entries of a ledger after mark-delete that are acknowledged, or hidden from readers."""
    acked, hidden = cursor.acked.get(ledger_id, NONE), shape.hidden_entries_of_ledger(ledger_id)
    return acked if hidden is None else acked | hidden


def count_buckets(
    shape: LogShape, cursor: Cursor, delayed: Mapping[int, BitMap], buckets: int
) -> tuple[CursorBucket, ...]:
    """Returns the entries after mark-delete in at most `buckets` buckets, all but the last of the same size."""
    spans = [*spans_after(shape, cursor.mark)]
    left = size = -(-sum(span.last_entry + 1 - first for span, first in spans) // buckets)
    found, pending = list[CursorBucket](), cursor.pending
    start, counts = Position(-1, -1), [0, 0, 0, 0]
    index = 0
    for span, first in spans:
        done, held = done_entries(shape, cursor, span.ledger_id), delayed.get(span.ledger_id, NONE)
        whole = pending.whole.get(span.ledger_id, NONE) if pending is not None else NONE
        while first <= span.last_entry:
            end = min(first + left, span.last_entry + 1)
            if left == size:
                start, counts = Position(span.ledger_id, first), [0, 0, 0, 0]
                messages = span.end_index - span.first_index
                index = span.first_index + messages * first // (span.last_entry + 1)
            cumulative = 0 if pending is None else _entries_up_to(pending.up_to, span.ledger_id, first, end)
            waiting = max(cumulative, whole.range_cardinality(first, end))
            for at, number in enumerate((
                end - first, done.range_cardinality(first, end), waiting, held.range_cardinality(first, end),
            )):  # fmt: skip
                counts[at] += number
            left, first = left - (end - first), end
            if not left:
                found.append(CursorBucket(start, index, *counts))
                left = size
    return (*found, CursorBucket(start, index, *counts)) if left != size else tuple(found)


def _entries_up_to(mark: Position, ledger_id: int, first: int, end: int) -> int:
    """Returns how many of the entries `first` … `end - 1` of the ledger are up to and with `mark`."""
    if mark.ledger_id != ledger_id:
        return end - first if ledger_id < mark.ledger_id else 0
    return min(max(mark.entry_id + 1 - first, 0), end - first)


def find_gaps(shape: LogShape, cursor: Cursor, count: int) -> list[tuple[Position, int]]:
    """Returns the first entry and the number of entries of the `count` largest gaps, the largest first."""
    found, last = list[tuple[Position, int]](), cursor.last_hole
    for span, first in spans_after(shape, cursor.mark):
        end = last.entry_id if span.ledger_id == last.ledger_id else span.last_entry + 1
        if span.ledger_id > last.ledger_id or first >= end:
            continue
        open_ = BitMap(range(first, end)) - done_entries(shape, cursor, span.ledger_id)
        found += [(Position(span.ledger_id, at), size) for at, size in largest_runs(open_, count)]
    return nlargest(count, found, key=lambda each: (each[1], -each[0].ledger_id, -each[0].entry_id))


def largest_runs(entries: BitMap, count: int) -> list[tuple[int, int]]:
    """Returns (first, number) of the `count` largest runs of entries, or of so many of them that are equally large.

    `starts` are the first entries of stretches of `length` that are all in `entries`: a run of n has n - length + 1 of
    them next to each other. `length` is doubled, and then refined, while there are runs enough."""
    starts, length = entries, 1
    while count_ranges(longer := starts & starts.shift(-length)) >= count:
        starts, length = longer, 2 * length
    step = length // 2
    while step:
        longer = starts & starts.shift(-step)
        if count_ranges(longer) >= count:
            starts, length = longer, length + step
        step //= 2
    found, longer = list[tuple[int, int]](), starts & starts.shift(-1)
    for among, more in ((longer, 1), (starts, 0)):  # those that are longer, then of `length`
        at, known = 0, {first for first, _ in found}
        while among and at <= among.max() and len(found) < count:
            first = among.next_set_bit(at)
            last = run_end(among, first)
            if first not in known:
                found.append((first, last - first + length + more))
            at = last + 1
    return found
