"""The entries of a subscription that wait for their time, and which are due: decisions, without a clock or storage.

An entry whose delivery time is in the future is *held*: neither outstanding nor acknowledged, and the dispatcher skips
it without reading it. When its time has come `take_due` returns it, once, and it passes through the dispatcher's replay
queue.

    delays.add_entry(position, at_ms)                   its delivery time is in the future
    delays.take_due(now_ms, limit)                      → positions whose time has come, earliest first
    delays.seal_bucket(now_ms)                          → what is far in the future, to be stored as a *bucket*; then
                                                        `on_bucket_stored`, or `on_bucket_store_failed`
    delays.take_segment_reads(now_ms)                   → what is near, to be read, a few segments at a time; then
                                                        `finish_segment_read`, or `mark_bucket_lost`
    delays.take_unused_ledgers()                        buckets that are no longer needed

Buckets, their keys and segments are in core/delay_buckets.py.

Rules
- **The bitmaps decide what is held** (`is_delayed`: one roaring bitmap per ledger of the topic). Each position in them
  has a source from which its time becomes known: the heap of fresh keys, a draft, a bucket, or the range of a lost
  bucket. A source may name a position that is no longer held (acknowledged, trimmed, or due from another source): such
  a position is skipped.
- **Not to be held is always safe.** Such an entry is read from the log like any other, and held then if it is early. So
  nothing here has to be stored before anything else. What is not sealed when the broker dies is read again, and nothing
  but that; after a restart segments whose time has passed are left out. A bucket may be deleted when its last entry is
  due or acknowledged. The time of an entry is in the entry: two sources never disagree.
- **A bucket is durable and named before its entries leave memory** (`on_bucket_stored`); until then the draft has them.
- A bucket that cannot be read is *lost*: `take_due` returns what is held in the ledgers of the topic that it covers at
  once, in log order and a few at a time. These entries are read from the log, and held again if they are early; none is
  dropped.
- `take_due` uses the time that it is given and remembers none: a clock that jumps forward delivers, one that jumps back
  waits.
- Acknowledged without delivery (skip, expiry, seek, a cleared backlog): `discard`, `discard_up_to`.

Memory: a fresh entry costs `UNBUCKETED_KEY_BYTES`; a sealed one its place in a bitmap (a bit, or two bytes where few
are delayed) and a 2000th of a row; a loaded one DELAY_KEY_BYTES, for SEGMENT_LOOKAHEAD_MS. Sealing begins at
`seal_entries`, or at 1 / SEAL_SHARE_DIVISOR of all that is held. So there are about SEAL_SHARE_DIVISOR buckets and one
for each further 0.8 %, and no more when old ones are left over, because those are merged. Entries that are due within
UNBUCKETED_WITHIN_MS are not sealed, because they would have to be loaded again at once; past `memory_bytes_max` they
are too.

Source: Pulsar A12–A14, PIP-195. Guarding tests: tests/broker/subscription/core/test_delays_core.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from pyroaring import BitMap

from ....proto.names import Position
from ...log.log_shape_core import LogShape
from .cursor import Cursor
from .cursor_state import find_end_of_contiguous
from .delay_buckets import (
    DELAY_KEY_BYTES,
    NEVER_DUE_KEY,
    TIME_SHIFT_BITS,
    DelayBucketIndex,
    DelayKeySequence,
    DelaySegment,
    ReadDelaySegments,
    StoredDelayBucket,
    UnstoredDelayBucket,
    decode_entries_by_ledger,
    find_first_unused_segment,
    make_delay_key,
    make_unstored_bucket,
    position_of_delay_key,
)

UNBUCKETED_KEY_BYTES = 56
"""Bytes of memory of a key that is in no bucket: a number in a heap."""
UNBUCKETED_WITHIN_MS = 10_000
SEAL_SHARE_DIVISOR = 128
"""Share of the held entries, as a divisor, at which sealing begins. To sort and pack a bucket of 80,000 entries takes
50 ms, in which nothing else is done."""


class _Memory:
    """The entries that are held back, and the keys from which their delivery times are known: keys that are in no
    bucket yet (`fresh`), the keys of buckets, and the entries of buckets that are lost."""

    __slots__ = ("buckets", "fresh", "held", "lost")

    def __init__(self) -> None:
        self.held: dict[int, BitMap] = {}
        self.fresh: list[int] = []  # a heap of keys
        self.buckets = DelayBucketIndex()
        self.lost: dict[int, BitMap] = {}


class DelayIndex:
    """The delayed entries of one subscription. Holds each of them back until its delivery time. `count`: how many are
    held back. `seal_entries`: how many entries without a bucket begin a bucket; `memory_bytes_max`: the bytes of memory
    from which on entries that are due soon go to a bucket too."""

    __slots__ = (
        "_draft", "_seal_at", "_used", "count", "cursor", "memory_bytes_max", "seal_entries", "shape",
    )  # fmt: skip

    def __init__(
        self, shape: LogShape, cursor: Cursor, seal_entries: int = 50_000, memory_bytes_max: int = 16 << 20
    ) -> None:
        self.shape, self.cursor = shape, cursor
        self.seal_entries, self.memory_bytes_max = seal_entries, memory_bytes_max
        self.count = 0  # entries that are held
        self._seal_at = 0  # fresh ones at the next look; 0: by the rule
        self._used: _Memory | None = None
        # with the buckets that are merged in it
        self._draft: tuple[UnstoredDelayBucket, DelayKeySequence, frozenset[int]] | None = None

    @property
    def _memory(self) -> _Memory:
        """Returns the memory of this index. Creates it on the first use, because most subscriptions delay nothing."""
        if self._used is None:
            self._used = _Memory()
        return self._used

    @property
    def delayed_entries(self) -> Mapping[int, BitMap]:
        """The entries that are held back: for each ledger of the topic, a set of entry ids."""
        return self._used.held if self._used is not None else {}

    # ------------------------------------------------------------------ intents
    def add_entry(self, position: Position, at_ms: int) -> None:
        """Holds the entry back until `at_ms` (ms since the epoch). Does nothing if the entry is already held back."""
        memory = self._memory
        held = memory.held.get(position[0])
        if held is None:
            held = memory.held[position[0]] = BitMap()
        if position[1] not in held:
            held.add(position[1])
            self.count += 1
            heappush(memory.fresh, make_delay_key(position, at_ms))

    def discard(self, position: Position) -> None:
        """Stops holding the entry back, because it is acknowledged or trimmed. The entry will not become due. Does
        nothing if it is not held back."""
        if self.count and self._discard(position) and not self.count:
            self.clear()

    def discard_entries_of_ledger(self, ledger_id: int, entries: BitMap) -> None:
        """Stops holding these entries of a ledger back, because they are acknowledged."""
        held = self._memory.held.get(ledger_id)
        if held is None:
            return
        before = len(held)
        held -= entries
        self.count -= before - len(held)
        if not held:
            del self._memory.held[ledger_id]
        if not self.count:
            self.clear()

    def discard_up_to(self, mark: Position) -> None:
        """Stops holding back the entries up to and including `mark`, because they are acknowledged or no longer in the
        log."""
        if not self.count:
            return
        for held in (self._memory.held, self._memory.lost):
            for ledger_id in [each for each in held if each <= mark[0]]:
                before = len(held[ledger_id])
                if ledger_id == mark[0]:
                    held[ledger_id].remove_range(0, mark[1] + 1)
                else:
                    held[ledger_id].clear()
                if held is self._memory.held:
                    self.count -= before - len(held[ledger_id])
                if not held[ledger_id]:
                    del held[ledger_id]
        if not self.count:
            self.clear()
        self._memory.buckets.remove_buckets_up_to(mark)

    def release_all_entries(self) -> None:
        """Makes all entries that are held back due at once, because the topic's policy no longer delays messages."""
        lost = {ledger_id: held.copy() for ledger_id, held in self._memory.held.items()}
        count, held = self.count, self._memory.held
        self.clear()
        self._memory.lost, self.count, self._memory.held = lost, count, held

    @property
    def has_released_all(self) -> bool:
        """True if all entries that are held back are due because of `release_all_entries`."""
        return bool(self._memory.lost) and not (self._memory.fresh or self._draft or self._memory.buckets)

    def clear(self) -> None:
        """Removes all entries that are held back, and all buckets. No entry will become due; the next
        `take_unused_ledgers` returns the ledgers of the buckets."""
        self._memory.held, self._memory.lost, self.count = {}, {}, 0
        self._memory.fresh, self._seal_at = [], 0
        self._memory.buckets.clear()

    # ------------------------------------------------------------------ what is due
    def take_due(self, now_ms: int, limit: int) -> list[Position]:
        """Removes the entries that are due at `now_ms` (ms since the epoch), at most `limit` of them, and returns them,
        the earliest first. Entries of lost buckets follow them in log order, also if they are not due."""
        found: list[Position] = []
        fresh, buckets, end = self._memory.fresh, self._memory.buckets, (now_ms + 1) << TIME_SHIFT_BITS
        while len(found) < limit:
            first, head = fresh[0] if fresh else NEVER_DUE_KEY, buckets.earliest_key
            if min(first, head) >= end:
                break
            if first <= head:
                heappop(fresh)
            else:
                buckets.remove_earliest_key()
            position = position_of_delay_key(min(first, head))
            if self._discard(position):
                found.append(position)
        if self._memory.lost and len(found) < limit:
            found += self._found_again(limit - len(found))
        if found and not self.count:
            self.clear()
        return found

    def _discard(self, position: Position) -> bool:
        """Stops holding the entry back. Returns False if it was not held back."""
        ledger_id, entry_id = position
        every = self._memory.held
        held = every.get(ledger_id)
        if held is None or entry_id not in held:
            return False
        held.remove(entry_id)
        if not held:
            del every[ledger_id]
        self.count -= 1
        return True

    def _found_again(self, limit: int) -> list[Position]:
        """Removes and returns up to `limit` held entries in the range of lost buckets, in log order. They are read from
        the log, which has their delivery times."""
        found: list[Position] = []
        for ledger_id in sorted(self._memory.lost):
            entries = self._memory.lost[ledger_id]
            for entry_id in list(entries[: limit - len(found)]):
                entries.remove(entry_id)
                position = Position(ledger_id, entry_id)
                if self._discard(position):
                    found.append(position)
            if not entries:
                del self._memory.lost[ledger_id]
            if len(found) >= limit:
                break
        return found

    @property
    def next_due_ms(self) -> int | None:
        """The time (ms since the epoch) at which the next entry becomes due, or the next segment of a bucket must be
        loaded; 0: at once; None if there is neither."""
        if self._memory.lost:
            return 0
        looks = [
            self._memory.fresh[0] >> TIME_SHIFT_BITS if self._memory.fresh else None,
            self._memory.buckets.next_due_ms,
        ]
        return min((look for look in looks if look is not None), default=None)

    # ------------------------------------------------------------------ sealing
    @property
    def is_full(self) -> bool:
        """True if the keys take several times their memory budget, because buckets cannot be stored. Then no further
        entry may be held back."""
        return len(self._memory.fresh) * UNBUCKETED_KEY_BYTES > 4 * self.memory_bytes_max

    @property
    def must_make_bucket(self) -> bool:
        """True if enough entries are in no bucket, or if buckets are to be merged. Then the caller must call
        `seal_bucket`, and store the bucket that it returns."""
        fresh = len(self._memory.fresh)
        over = fresh * UNBUCKETED_KEY_BYTES > self.memory_bytes_max
        enough = over or fresh >= max(self._seal_entries, self._seal_at)
        return self._draft is None and (enough or bool(self._memory.buckets and self._memory.buckets.merged_ledgers))

    @property
    def _seal_entries(self) -> int:
        return max(self.seal_entries, self.count // SEAL_SHARE_DIVISOR)

    def seal_bucket(self, now_ms: int, *, least: int | None = None) -> UnstoredDelayBucket | None:
        """Moves the entries that are due far in the future (UNBUCKETED_WITHIN_MS after `now_ms`; all of them if they
        exceed `memory_bytes_max`) to a new bucket, and returns the bucket, which the caller must store. Then the caller
        must call `on_bucket_stored`, or `on_bucket_store_failed`, before it calls `seal_bucket` again.

        Returns None if too few entries are due far in the future: fewer than `least`; None: fewer than half of those
        without a bucket. A merge of buckets needs only one. Returns None also if none of them is held back any more.
        """
        assert self._draft is None, "one bucket is sealed at a time"
        fresh, merged = self._memory.fresh, self._memory.buckets.merged_ledgers
        fresh.sort()
        pressed = len(fresh) * UNBUCKETED_KEY_BYTES > self.memory_bytes_max
        cut = bisect_left(fresh, 0 if pressed else (now_ms + UNBUCKETED_WITHIN_MS) << TIME_SHIFT_BITS)
        if least is None or merged:
            least = 1 if merged else max(1, len(fresh) // 2)
        if len(fresh) - cut < least:
            self._seal_at = 2 * len(fresh)
            self._memory.buckets.remove_merged_buckets(merged)  # all of it is near, and in memory
            return None
        draft = make_unstored_bucket(fresh[cut:], self._memory.held)
        self._memory.fresh, self._seal_at = fresh[:cut], 0  # sorted: it is a heap
        if not draft.bodies:
            self._memory.buckets.remove_merged_buckets(merged)
            return None
        keys = DelayKeySequence(b"".join(draft.bodies))
        self._draft = draft, keys, merged
        self._memory.buckets.add_keys(keys, None)
        return draft

    def on_bucket_stored(self, ledger_id: int) -> None:
        """Called when the bucket that `seal_bucket` returned is stored durably in the ledger `ledger_id`, and the
        subscription's record names this ledger. The keys of the bucket leave memory; they are loaded from the ledger
        when they are almost due."""
        assert self._draft is not None, "a draft was sealed"
        (draft, keys, merged), self._draft, buckets = self._draft, None, self._memory.buckets
        buckets.remove_keys(keys)
        places = [decode_entries_by_ledger(segment.places) for segment in draft.segments]
        given_up = keys.offset // DELAY_KEY_BYTES if self.count else len(keys.body)
        buckets.add(
            StoredDelayBucket.create(ledger_id, draft.segments, places, find_first_unused_segment(draft, given_up))
        )
        buckets.remove_merged_buckets(merged)
        self._be_fresh(
            buckets.begin_bucket_merge(min(self._seal_entries, self.memory_bytes_max // UNBUCKETED_KEY_BYTES))
        )

    def on_bucket_store_failed(self) -> None:
        """Called when the bucket that `seal_bucket` returned was not stored. Its entries are in no bucket again, as
        before `seal_bucket`."""
        assert self._draft is not None, "a draft was not sealed"
        (_, keys, _), self._draft = self._draft, None
        self._memory.buckets.remove_keys(keys)
        self._be_fresh(keys.remaining_keys())

    def _be_fresh(self, keys: list[int]) -> None:
        """Adds keys that are in no bucket (fresh keys)."""
        if keys:
            self._memory.fresh += keys
            heapify(self._memory.fresh)

    # ------------------------------------------------------------------ buckets
    def add_stored_bucket(self, ledger_id: int, segments: list[DelaySegment], now_ms: int) -> None:
        """Adds a bucket that an earlier owner of the topic stored in the ledger `ledger_id`. Holds back its entries,
        except those of segments that are due at `now_ms` (ms since the epoch), and those that are acknowledged, pending
        or trimmed."""
        first = next((at for at, each in enumerate(segments) if each.last_ms > now_ms), len(segments))
        places = [decode_entries_by_ledger(segment.places) for segment in segments]
        bucket = StoredDelayBucket.create(ledger_id, segments, places, first)
        held = [self._add(ledger, entries) for of_segment in places[first:] for ledger, entries in of_segment]
        if not any(held):
            bucket.next = len(segments)
        self._memory.buckets.add(bucket)

    def _add(self, ledger_id: int, entries: BitMap) -> bool:
        """Holds entries of a ledger back, except those that are not in the log, and those that are acknowledged or
        pending. Returns False if no entry is left."""
        span = self.shape.find_span_of_ledger(ledger_id)
        if span is None or ledger_id < self.cursor.mark[0]:
            return False
        entries.remove_range(span.last_entry + 1, 1 << 32)
        if ledger_id == self.cursor.mark[0]:
            entries.remove_range(0, self.cursor.mark[1] + 1)
        if ledger_id in self.cursor.acked:
            entries -= self.cursor.acked[ledger_id]
        if self.cursor.pending is not None:
            entries = self.cursor.pending.exclude_pending_entries(ledger_id, entries)
        if not entries:
            return False
        held = self._memory.held.setdefault(ledger_id, BitMap())
        before = len(held)
        held |= entries
        self.count += len(held) - before
        return True

    def take_segment_reads(self, now_ms: int) -> list[ReadDelaySegments]:
        """Returns requests to read the segments of buckets that become due soon after `now_ms` (ms since the epoch).
        Each request is returned once."""
        return self._memory.buckets.take_segment_reads(now_ms)

    def finish_segment_read(self, load: ReadDelaySegments, body: bytes) -> None:
        """Adds the keys of segments that were read because of the request `load`. `body`: the keys, encoded."""
        self._be_fresh(self._memory.buckets.finish_segment_read(load, body))

    def mark_bucket_lost(self, ledger_id: int) -> None:
        """Gives up a bucket that cannot be read. All held entries in the ledgers that the bucket covers become due at
        once. They are then read from the log, and are held back again if it is too early."""
        bucket = self._memory.buckets.mark_bucket_lost(ledger_id)
        if bucket is not None:
            for place in [each for each in self._memory.held if bucket.first_ledger <= each <= bucket.last[0]]:
                self._memory.lost[place] = self._memory.lost.get(place, BitMap()) | self._memory.held[place]

    def take_unused_ledgers(self) -> list[int]:
        """Returns the ids of the ledgers whose buckets were removed since the last call. The caller must delete these
        ledgers. Each id is returned once."""
        return self._memory.buckets.take_unused_ledgers()

    @property
    def has_unused_ledgers(self) -> bool:
        """True if there are ledgers of merged or empty buckets that the caller must delete."""
        return self._used is not None and self._used.buckets.has_unused_ledgers

    # ------------------------------------------------------------------ questions
    def is_delayed(self, position: Position) -> bool:
        """Returns True if the entry is held back until its delivery time."""
        held = self._memory.held.get(position[0])
        return held is not None and position[1] in held

    def next_undelayed_position(self, position: Position) -> Position:
        """Returns the first position at or after `position` whose entry is neither held back nor done (acknowledged or
        pending). Its cost grows with the number of ledgers of the topic that it passes."""
        while self.is_delayed(position):
            ledger_id, entry_id = position
            over = self._memory.held[ledger_id]
            acked = self.cursor.acked.get(ledger_id)
            last = find_end_of_contiguous(over if acked is None else over | acked, entry_id)
            position = self.cursor.next_deliverable_position(self.shape.position_after(Position(ledger_id, last)))
        return position

    @property
    def bucket_count(self) -> int:
        """The number of stored buckets of delayed entries."""
        return len(self._memory.buckets)

    @property
    def memory_bytes(self) -> int:
        """How many bytes of memory the keys and the descriptions of the buckets take. The bitmaps of the held entries
        are not counted."""
        if not self.count:
            return 0
        return len(self._memory.fresh) * UNBUCKETED_KEY_BYTES + self._memory.buckets.memory_bytes

    def count_delayed_entries(self, ledger_id: int) -> int:
        """Returns how many entries of a ledger of the topic are held back."""
        held = self._memory.held.get(ledger_id)
        return len(held) if held is not None else 0

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken: each entry that is held back has a key in memory or in a
        bucket; the count of these entries is right; none of them is acknowledged."""
        held = {Position(ledger_id, each) for ledger_id, entries in self._memory.held.items() for each in entries}
        assert self.count == len(held), "the count of held entries is wrong"
        assert all(self._memory.held.values()), "an empty bitmap is kept"
        sources = set(map(position_of_delay_key, [*self._memory.fresh, *self._memory.buckets.loaded_keys()]))
        sources |= {Position(ledger_id, each) for ledger_id, entries in self._memory.lost.items() for each in entries}
        lone = [each for each in held - sources if not self._memory.buckets.may_contain_entry(each)]
        assert not lone, "an entry is held that no source will give up"
        assert not any(map(self.cursor.is_acked, held)), "an acknowledged entry is held"
