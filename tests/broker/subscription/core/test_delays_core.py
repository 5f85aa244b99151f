"""Delayed entries against a plain dictionary: nothing early, nothing twice, nothing lost, through seals and crashes.

The walk is a subscription in small: a reader that leaps as the dispatcher does, a clock that also jumps, and a storage
that keeps what was written when the broker dies, at any point between two of its writes.
"""

import random
from dataclasses import dataclass, field

import pytest

from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
from magnetar.broker.subscription.core import delay_buckets
from magnetar.broker.subscription.core import delay_buckets as delay_keys
from magnetar.broker.subscription.core import delays as core
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState
from magnetar.broker.subscription.core.delay_buckets import (
    DELAY_KEY_BYTES,
    MERGED_BUCKETS_MIN,
    SEGMENT_LOOKAHEAD_MS,
    SEGMENT_MEMORY_BYTES,
    DelaySegment,
    ReadDelaySegments,
    UnstoredDelayBucket,
    make_delay_key,
)
from magnetar.broker.subscription.core.delays import DelayIndex
from magnetar.proto.names import Position
from tests.broker.subscription.core.shapes import shape_of

START_MS = 1_000_000


@dataclass
class Storage:
    """What survives: ledgers of buckets, and which of them are named."""

    ledgers: dict[int, UnstoredDelayBucket] = field(default_factory=dict)
    named: list[int] = field(default_factory=list)
    next_ledger: int = 1000

    def write(self, draft: UnstoredDelayBucket) -> int:
        self.next_ledger += 1
        self.ledgers[self.next_ledger] = draft
        return self.next_ledger


class Walk:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.storage = Storage()
        self.now_ms = START_MS
        self.times: dict[Position, int] = {}
        self.shape = LogShape()
        self.shape.add(LedgerSpan(10, 0, open=True))
        self.state = CursorState(Position(10, -1))
        self.released = False
        self.start()

    def start(self) -> None:
        """A broker takes over: the cursor as it was stored, and the buckets that are named."""
        self.cursor = Cursor(self.shape, self.state)
        self.cursor.adapt_to_log_after_restart()
        self.delays = DelayIndex(
            self.shape, self.cursor, seal_entries=20, memory_bytes_max=40 * core.UNBUCKETED_KEY_BYTES
        )
        self.draft: UnstoredDelayBucket | None = None
        self.loads: list[ReadDelaySegments] = []
        self.delivered: set[Position] = set()
        self.read = self.shape.position_after(self.cursor.mark)
        for ledger_id in self.storage.named:
            self.delays.add_stored_bucket(ledger_id, list(self.storage.ledgers[ledger_id].segments), self.now_ms)

    # ------------------------------------------------------------------ what happens
    def publish(self) -> None:
        tail = self.shape.tail_span
        for _ in range(self.rng.randrange(1, 30)):
            tail.last_entry += 1
            tail.end_index += 1
            delay = self.rng.choice((0, 0, 500, 20_000, 60_000, self.rng.randrange(200_000)))
            self.times[Position(tail.ledger_id, tail.last_entry)] = self.now_ms + delay
        if self.rng.random() < 0.2:
            self.shape.close_last_ledger_span(tail.ledger_id, tail.last_entry, tail.end_index, 0, 0)
            self.shape.add(LedgerSpan(tail.ledger_id + 10, tail.end_index, open=True))

    def pump(self) -> None:
        for position in self.delays.take_due(self.now_ms, self.rng.randrange(1, 50)):
            if self.cursor.is_acked(position) or position >= self.read:
                continue  # in front of it, it is read in its turn
            if self.times[position] > self.now_ms:  # of a lost bucket
                self.delays.add_entry(position, self.times[position])
            else:
                self.deliver(position)
        for _ in range(self.rng.randrange(40)):
            self.read = self.delays.next_undelayed_position(
                self.cursor.next_unacked_position(self.shape.position_at_or_after(self.read))
            )
            if not self.shape.has_visible_entry(self.read):
                break
            if self.times[self.read] > self.now_ms:
                self.delays.add_entry(self.read, self.times[self.read])
            else:
                self.deliver(self.read)
            self.read = Position(self.read[0], self.read[1] + 1)
        self.loads += self.delays.take_segment_reads(self.now_ms)

    def deliver(self, position: Position) -> None:
        assert self.times[position] <= self.now_ms, "delivered before its time"
        assert position not in self.delivered, "delivered twice"
        assert not self.cursor.is_acked(position), "delivered although acknowledged"
        self.delivered.add(position)

    def clock(self) -> None:
        self.now_ms += self.rng.choice((10, 300, 5_000, 30_000, -4_000, -60_000, 100_000))

    def seal(self) -> None:
        if self.draft is None and (self.delays.must_make_bucket or self.rng.random() < 0.3):
            self.draft = self.delays.seal_bucket(self.now_ms, least=self.rng.choice((None, 1)))
        elif self.draft is not None and self.rng.random() < 0.2:
            self.delays.on_bucket_store_failed()
            self.draft = None
        elif self.draft is not None:
            ledger_id = self.storage.write(self.draft)
            if self.rng.random() < 0.1:
                self.crash()
                return
            self.storage.named.append(ledger_id)
            if self.rng.random() < 0.1:
                self.crash()
                return
            self.delays.on_bucket_stored(ledger_id)
            self.draft = None

    def load(self) -> None:
        for load in self.loads:
            if self.rng.random() < 0.1:
                self.delays.mark_bucket_lost(load.ledger_id)
            else:
                bodies = self.storage.ledgers[load.ledger_id].bodies[load.first : load.last + 1]
                self.delays.finish_segment_read(load, b"".join(bodies))
        self.loads = []

    def drop(self) -> None:
        for ledger_id in self.delays.take_unused_ledgers():
            self.storage.named.remove(ledger_id)

    def ack(self) -> None:
        some = sorted(each for each in self.delivered if not self.cursor.is_acked(each))
        for position in self.rng.sample(some, min(len(some), self.rng.randrange(20))):
            self.cursor.ack(position)
            self.delays.discard(position)

    def skip(self) -> None:
        if self.times and self.rng.random() < 0.1:
            self.cursor.ack_cumulative(self.rng.choice(sorted(self.times)))
            self.delays.discard_up_to(self.cursor.mark)
            self.read = max(self.read, self.shape.position_after(self.cursor.mark))

    def store(self) -> None:
        self.state = self.cursor.copy_cursor_state()

    def crash(self) -> None:
        self.start()

    def quiet(self) -> None:
        """Everything comes in the end, and nothing stays on disk."""
        self.now_ms = max([START_MS, *self.times.values()]) + 1
        for _ in range(400):
            self.pump()
            self.load()
            if self.draft is not None:
                self.delays.on_bucket_store_failed()
                self.draft = None
        missing = [each for each in self.times if each not in self.delivered and not self.cursor.is_acked(each)]
        assert not missing, "never delivered"
        assert self.delays.count == 0, "something is still held"
        assert self.delays.next_due_ms is None, "something is still waited for"
        self.drop()
        assert not self.storage.named, "a bucket stays that nobody needs"


@pytest.mark.parametrize("seed", range(60))
def test_everything_comes_once_when_it_is_due(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay_keys, "ENTRIES_PER_SEGMENT_MAX", 7)
    monkeypatch.setattr(delay_buckets, "MERGED_BUCKETS_MIN", 2 if seed % 2 else 16)
    walk = Walk(seed)
    steps = [walk.publish, walk.pump, walk.pump, walk.clock, walk.seal, walk.load, walk.drop, walk.ack, walk.store]
    for _ in range(400):
        walk.rng.choice(steps)()
        if walk.rng.random() < 0.02:
            walk.rng.choice((walk.crash, walk.skip))()
        walk.delays.check()
    walk.quiet()


# ------------------------------------------------------------------------------------------ by name
def held(entries: int, at_ms: int = 0) -> DelayIndex:
    """So many entries of one ledger; entry n is due at 100,000 + n, or all at one time."""
    shape = shape_of(entries)
    delays = DelayIndex(shape, Cursor(shape, CursorState(shape.start_position)))
    for entry in range(entries):
        delays.add_entry(Position(10, entry), at_ms or 100_000 + entry)
    return delays


def sealed(delays: DelayIndex, ledger_id: int = 500) -> list[DelaySegment]:
    draft = delays.seal_bucket(0, least=1)
    assert draft is not None, "there was something to seal"
    delays.on_bucket_stored(ledger_id)
    return draft.segments


def test_a_leap_over_a_ledger_is_one_step_and_goes_over_what_is_acknowledged_too() -> None:
    shape = shape_of(1000, 1000, 5)
    cursor = Cursor(shape, CursorState(shape.start_position))
    delays = DelayIndex(shape, cursor)
    for ledger in (10, 20):
        for entry in range(1000):
            if entry % 2 or not entry:
                delays.add_entry(Position(ledger, entry), 10)
            else:
                cursor.ack(Position(ledger, entry))
    assert delays.next_undelayed_position(Position(10, 0)) == (30, 0)


def test_a_restart_reads_the_directory_and_the_segments_that_are_near_and_no_more() -> None:
    segments = sealed(held(10_000))
    shape = shape_of(10_000)
    again = DelayIndex(shape, Cursor(shape, CursorState(shape.start_position)))
    again.add_stored_bucket(500, segments, now_ms=0)
    assert again.count == 10_000
    assert again.next_undelayed_position(Position(10, 0)) == (10, 10_000)
    assert again.take_segment_reads(0) == []
    assert again.memory_bytes == 5 * SEGMENT_MEMORY_BYTES
    assert again.next_due_ms == 100_000 - SEGMENT_LOOKAHEAD_MS
    assert again.take_segment_reads(100_000 - SEGMENT_LOOKAHEAD_MS) == [ReadDelaySegments(500, 0, 0)]


def test_after_a_restart_what_is_due_already_is_left_to_the_log() -> None:
    segments = sealed(held(10_000))
    shape = shape_of(10_000)
    again = DelayIndex(shape, Cursor(shape, CursorState(shape.start_position)))
    again.add_stored_bucket(500, segments, now_ms=104_500)
    assert again.next_undelayed_position(Position(10, 0)) == (10, 0), "read in its turn"
    assert again.is_delayed(Position(10, 4501))
    assert again.take_segment_reads(104_500) == [ReadDelaySegments(500, 2, 3)]


def test_a_lost_bucket_gives_up_what_it_held_a_few_at_a_time() -> None:
    delays = held(5000)
    sealed(delays)
    delays.mark_bucket_lost(500)
    assert delays.next_due_ms == 0
    assert delays.take_due(0, 100) == [Position(10, entry) for entry in range(100)]
    assert delays.count == 4900
    delays.check()


def test_what_is_near_is_not_sealed_unless_memory_demands_it() -> None:
    delays = held(5000, at_ms=core.UNBUCKETED_WITHIN_MS - 1)
    assert delays.seal_bucket(0) is None
    assert not delays.must_make_bucket
    delays.memory_bytes_max = 5000 * core.UNBUCKETED_KEY_BYTES - 1
    assert delays.must_make_bucket
    assert delays.seal_bucket(0) is not None


def test_a_draft_still_serves_what_is_due_and_what_was_served_does_not_come_again() -> None:
    delays = held(5000)
    draft = delays.seal_bucket(0, least=1)
    assert draft is not None
    assert len(delays.take_due(102_499, 10_000)) == 2500
    delays.on_bucket_stored(500)
    assert delays.count == 2500
    assert delays.take_segment_reads(102_499) == [ReadDelaySegments(500, 1, 2)]
    delays.finish_segment_read(ReadDelaySegments(500, 1, 2), b"".join(draft.bodies[1:3]))
    assert [each.entry_id for each in delays.take_due(200_000, 10_000)] == list(range(2500, 5000))
    assert delays.take_unused_ledgers() == [500]


def left_over(buckets: int, keys: int = 100) -> tuple[DelayIndex, dict[int, UnstoredDelayBucket]]:
    """So many of those keys each, which are due in the far future."""
    shape = shape_of(buckets * keys)
    delays, drafts = (
        DelayIndex(shape, Cursor(shape, CursorState(shape.start_position))),
        dict[int, UnstoredDelayBucket](),
    )
    for number in range(buckets):
        for entry in range(number * keys, (number + 1) * keys):
            delays.add_entry(Position(10, entry), 10**9 + entry * 7919 % 10_000)
        draft = delays.seal_bucket(0, least=1)
        assert draft is not None
        drafts[500 + number] = draft
        delays.on_bucket_stored(500 + number)
    return delays, drafts


def test_many_small_buckets_become_one_and_nothing_of_them_is_lost_or_comes_twice() -> None:
    delays, drafts = left_over(MERGED_BUCKETS_MIN)
    loads = delays.take_segment_reads(0)
    assert [load.ledger_id for load in loads] == list(drafts)
    for load in loads[:-1]:
        delays.finish_segment_read(load, b"".join(drafts[load.ledger_id].bodies))
    assert not delays.must_make_bucket, "one is not read yet"
    delays.finish_segment_read(loads[-1], b"".join(drafts[loads[-1].ledger_id].bodies))
    assert delays.must_make_bucket, "although they are few"
    assert delays.take_unused_ledgers() == [], "a crash before they are sealed anew costs no reading of the log"
    draft = delays.seal_bucket(0)
    assert draft is not None
    assert sum(segment.keys for segment in draft.segments) == 100 * MERGED_BUCKETS_MIN == delays.count
    delays.on_bucket_stored(900)
    delays.check()
    assert sorted(delays.take_unused_ledgers()) == list(drafts)
    assert delays.bucket_count == 1
    loads = delays.take_segment_reads(10**9)
    delays.finish_segment_read(loads[0], b"".join(draft.bodies[loads[0].first : loads[0].last + 1]))
    assert len(set(delays.take_due(2 * 10**9, 10_000))) == 100 * MERGED_BUCKETS_MIN
    assert delays.take_unused_ledgers() == [900]


def test_buckets_stay_few_when_each_leaves_something_over_for_a_month() -> None:
    """Of 100 that are due soon one is not: without merging there would be 400 buckets."""
    shape = shape_of(40_000)
    delays, stored = (
        DelayIndex(shape, Cursor(shape, CursorState(shape.start_position)), seal_entries=100),
        dict[int, UnstoredDelayBucket](),
    )
    now_ms, most = 0, 0
    for number in range(400):
        for entry in range(100 * number, 100 * (number + 1)):
            delays.add_entry(Position(10, entry), 10**10 + entry if entry % 100 == 7 else now_ms + 20_000)
        draft = delays.seal_bucket(now_ms)
        assert draft is not None
        stored[500 + number] = draft
        delays.on_bucket_stored(500 + number)
        now_ms += 30_000
        for _ in range(3):
            for load in delays.take_segment_reads(now_ms):
                delays.finish_segment_read(load, b"".join(stored[load.ledger_id].bodies[load.first : load.last + 1]))
            delays.take_due(now_ms, 1 << 30)
        most = max(most, delays.bucket_count)
    assert delays.count == 400
    assert most < 2 * MERGED_BUCKETS_MIN + 4
    delays.check()


def test_a_cleared_backlog_frees_every_bucket() -> None:
    delays = held(5000)
    sealed(delays)
    delays.add_entry(Position(10, 4999), 5)
    delays.cursor.ack_cumulative(Position(10, 4999))
    delays.discard_up_to(Position(10, 4999))
    assert delays.count == 0
    assert delays.take_unused_ledgers() == [500]
    assert delays.take_unused_ledgers() == []


def test_released_they_all_come_at_once_in_log_order() -> None:
    delays = held(5000)
    sealed(delays)
    delays.release_all_entries()
    delays.check()
    assert delays.take_due(0, 10_000) == [Position(10, entry) for entry in range(5000)]
    assert delays.take_unused_ledgers() == [500]


def test_complaint_18_memory_does_not_grow_with_what_is_delayed() -> None:
    """A bucket's keys leave memory; what stays of 200,000 sealed entries is a few kilobytes of bitmaps and rows."""
    delays = held(200_000)
    segments = sealed(delays)
    assert delays.count == 200_000
    assert delays.memory_bytes == 100 * SEGMENT_MEMORY_BYTES
    assert sum(len(each.places) for each in segments) < 20_000
    assert make_delay_key(Position(10, 0), 1).bit_length() <= DELAY_KEY_BYTES * 8
