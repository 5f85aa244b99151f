"""The stored buckets of delayed entries of a subscription: what of them is in memory, what is to be read, and which of
them are merged.

    buckets.add(bucket)                             it is durable and named
    buckets.earliest_key, .remove_earliest_key()    the earliest key in memory; removes this key
    buckets.take_segment_reads(now_ms)              → segments to read, SEGMENT_LOOKAHEAD_MS before they are due; then
                                                    `finish_segment_read`, or `mark_bucket_lost`
    buckets.begin_bucket_merge(keys_max)            many small ones become one; `merged_ledgers`, then
                                                    `remove_merged_buckets`
    buckets.take_unused_ledgers()                   ledgers of buckets that are no longer needed

Rules
- Of a bucket there are descriptions in memory, one per segment. Its keys are in memory for SEGMENT_LOOKAHEAD_MS only,
  and its places never.
- A bucket ends when its last key is used, because its entry is due or acknowledged.
- **Merging.** Entries with a long delay remain in old buckets, each of which is a name in the record, a directory at a
  restart and a segment in memory. When the MERGED_BUCKETS_MIN smallest contain no more than one new bucket does, they
  are read and become fresh entries; they end when those are sealed. So of n entries there are at most
  MERGED_BUCKETS_MIN * (1 + n / new bucket) buckets, and an entry is written again only when its bucket has grown
  several times.

Source: Pulsar A14, where neighbours merge, past a number of buckets. Guarding tests:
tests/broker/subscription/core/test_delays_core.py.

Also in this file, below its heading: the parts of a bucket of delayed entries (delay_keys).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate
from typing import NamedTuple

import msgspec
from pyroaring import BitMap

from ....proto.names import Position

# ---------------------------------------------------------------------------------------------------- delay_keys
# The parts of a bucket of delayed entries: keys, in order of time, in segments.
#     key      time in ms (8 bytes) | ledger (8) | entry (4), big-endian: they sort as bytes, as numbers and by time
#     segment  ENTRIES_PER_SEGMENT_MAX keys at most, one entry of the bucket's ledger; its *places* are the positions
#     draft    a bucket that is to be written (broker/subscription/delays.py)
# Guarding tests: tests/broker/subscription/core/test_delays_core.py,
# tests/broker/subscription/test_delays_format.py.


DELAY_KEY_BYTES = 20
ENTRIES_PER_SEGMENT_MAX = 2000
"""Keys in a segment, which is read at once: 40 KB; a fifth of a second if 10,000 entries become due per second."""
TIME_SHIFT_BITS = 96
"""How many bits of a key follow its delivery time."""
NEVER_DUE_KEY = 1 << 200
"""A number greater than every key."""

_ENTRY_MASK = (1 << 32) - 1
_LEDGER_MASK = (1 << 64) - 1
_NOTHING = BitMap()


class DelaySegment(NamedTuple):
    """The description of one segment of a bucket. A *bucket* is a stored set of delayed entries; a *segment* is the
    part of a bucket that is stored in one ledger entry. `first_ms`, `last_ms`: the delivery times of the first and the
    last key, in ms since the epoch; `keys`: the number of keys."""

    first_ms: int
    last_ms: int
    keys: int
    places: bytes  # which positions: `encode_entries_by_ledger`


class UnstoredDelayBucket(NamedTuple):
    """A bucket of delayed entries that is not stored yet (a draft): for each segment its encoded keys, and the
    description that the bucket's directory will contain."""

    bodies: list[bytes]
    segments: list[DelaySegment]


class DelayKeySequence(msgspec.Struct, eq=False):
    """A sequence of keys of delayed entries, ascending, and encoded as bytes. It is read from the front: the keys
    before `offset` (in bytes) are used already."""

    body: bytes
    offset: int = 0

    @property
    def head(self) -> int:
        """The first key that is not used yet; NEVER_DUE_KEY if there is none."""
        if self.offset >= len(self.body):
            return NEVER_DUE_KEY
        return int.from_bytes(self.body[self.offset : self.offset + DELAY_KEY_BYTES])

    def advance(self) -> int:
        """Marks the first unused key as used. Returns the next unused key; NEVER_DUE_KEY if there is none."""
        self.offset += DELAY_KEY_BYTES
        return self.head

    @property
    def remaining_count(self) -> int:
        """The number of keys that are not used yet."""
        return (len(self.body) - self.offset) // DELAY_KEY_BYTES

    def remaining_keys(self) -> list[int]:
        """Returns the keys that are not used yet, in ascending order."""
        body = self.body
        return [
            int.from_bytes(body[at : at + DELAY_KEY_BYTES]) for at in range(self.offset, len(body), DELAY_KEY_BYTES)
        ]


def make_delay_key(position: Position, at_ms: int) -> int:
    """Returns the key of a delayed entry whose delivery time is `at_ms` (ms since the epoch). The key is a number that
    consists of the time and the position, so that keys are sorted by time."""
    return max(at_ms, 0) << TIME_SHIFT_BITS | position[0] << 32 | position[1]


def position_of_delay_key(key: int) -> Position:
    """Returns the position of the delayed entry that has this key."""
    return Position(key >> 32 & _LEDGER_MASK, key & _ENTRY_MASK)


def make_unstored_bucket(keys: Sequence[int], held: Mapping[int, BitMap]) -> UnstoredDelayBucket:
    """Returns a new bucket that contains the ascending `keys`, and that the caller must store. `held`: the entries that
    are held back, by ledger. Leaves out repeated keys, and keys of entries that are not in `held`; so the bucket may be
    empty."""
    bodies, segments, last = [], [], NEVER_DUE_KEY
    for start in range(0, len(keys), ENTRIES_PER_SEGMENT_MAX):
        part = keys[start : start + ENTRIES_PER_SEGMENT_MAX]
        entries = _entries_of(part)
        whole = sum(map(len, entries.values())) == len(part) and part[0] != last
        if not whole or any(not each <= held.get(ledger_id, _NOTHING) for ledger_id, each in entries.items()):
            return make_unstored_bucket(
                [key for key in dict.fromkeys(keys) if _is_held(position_of_delay_key(key), held)], held
            )
        last = part[-1]
        bodies.append(b"".join([key.to_bytes(DELAY_KEY_BYTES) for key in part]))
        segments.append(
            DelaySegment(
                part[0] >> TIME_SHIFT_BITS, last >> TIME_SHIFT_BITS, len(part), encode_entries_by_ledger(entries)
            )
        )
    return UnstoredDelayBucket(bodies, segments)


def _is_held(position: Position, held: Mapping[int, BitMap]) -> bool:
    return position[1] in held.get(position[0], _NOTHING)


def _entries_of(keys: Sequence[int]) -> dict[int, BitMap]:
    entries: dict[int, list[int]] = {}
    for key in keys:
        entries.setdefault(key >> 32 & _LEDGER_MASK, []).append(key & _ENTRY_MASK)
    return {ledger_id: BitMap(each) for ledger_id, each in entries.items()}


def encode_entries_by_ledger(entries: Mapping[int, BitMap]) -> bytes:
    """Returns positions, given as a set of entry ids for each ledger, encoded as bytes: ( ledger i64 | size u32 | the
    entry ids as a portable roaring bitmap )*."""
    parts: list[bytes] = []
    for ledger_id in sorted(entries):
        bitmap = entries[ledger_id]
        bitmap.run_optimize()
        bits = bitmap.serialize()
        parts += (ledger_id.to_bytes(8), len(bits).to_bytes(4), bits)
    return b"".join(parts)


def decode_entries_by_ledger(places: bytes) -> list[tuple[int, BitMap]]:
    """Returns the pairs of ledger id and set of entry ids that `encode_entries_by_ledger` has encoded. Raises
    ValueError if the bytes are damaged."""
    result, offset = [], 0
    while offset < len(places):
        ledger_id, size = int.from_bytes(places[offset : offset + 8]), int.from_bytes(places[offset + 8 : offset + 12])
        offset += 12
        if not 0 < size <= len(places) - offset:
            raise ValueError(f"{size} bytes of a bitmap at {offset} of {len(places)}")
        result.append((ledger_id, BitMap.deserialize(places[offset : offset + size])))
        offset += size
    return result


# ------------------------------------------------------------------------------------------------- delay_buckets


SEGMENT_LOOKAHEAD_MS = 3_000
"""A segment is loaded so many milliseconds before its first entry is due, because a read may fail a few times."""
SEGMENT_READS_MAX = 32
"""Most segments of one bucket that are read at once."""
MERGED_BUCKETS_MIN, MERGED_BUCKETS_MAX = 16, 64
"""How many buckets are merged into one, at least and at most."""
SEGMENT_MEMORY_BYTES = 200


class ReadDelaySegments(NamedTuple):
    """A request to read the segments number `first` to `last` (inclusive) of the bucket in the ledger `ledger_id`."""

    ledger_id: int
    first: int
    last: int


class StoredDelayBucket(msgspec.Struct, eq=False):
    """What is in memory of a stored bucket of delayed entries: a description of each segment, and the number of the
    segment that is loaded next. `first_ledger`, `last`: the first ledger and the last position of its entries.
    `reading`: segments are being read."""

    ledger_id: int
    segments: list[DelaySegment]  # without their places
    first_ledger: int
    last: Position  # the highest that it holds
    next: int = 0  # segment that is loaded next
    reading: bool = False

    @classmethod
    def create(cls, ledger_id: int, segments: list[DelaySegment], places: list[list[tuple[int, BitMap]]],
        next_: int) -> StoredDelayBucket:
        """Returns a bucket that is stored in the ledger `ledger_id`, and whose segments from number `next_` on are not
        loaded yet. `places`: for each segment, the positions of its entries, as pairs of ledger id and set of entry
        ids."""
        every = [place for of_segment in places for place in of_segment]
        return cls(
            ledger_id, [segment._replace(places=b"") for segment in segments],
            min((ledger for ledger, _ in every), default=-1),
            max((Position(ledger, entries.max()) for ledger, entries in every), default=Position(-1, -1)), next_,
        )  # fmt: skip

    @property
    def has_more(self) -> bool:
        """True if the bucket has segments that are not loaded yet."""
        return self.next < len(self.segments)

    @property
    def unloaded_count(self) -> int:
        """The number of keys in the segments that are not loaded yet."""
        return sum(segment.keys for segment in self.segments[self.next :])


class DelayBucketIndex(msgspec.Struct):
    """The stored buckets with delayed entries of one subscription, and all keys of delayed entries that are in memory,
    sorted by delivery time."""

    _all: dict[int, StoredDelayBucket] = msgspec.field(default_factory=dict)
    # a heap by key and order
    _heads: list[tuple[int, int, DelayKeySequence, StoredDelayBucket | None]] = msgspec.field(default_factory=list)
    _order: int = 0
    _waiting: list[tuple[int, int]] = msgspec.field(default_factory=list)  # a heap: (first time, ledger), not loaded
    _merging: dict[int, StoredDelayBucket] = msgspec.field(default_factory=dict)
    _merges: list[ReadDelaySegments] = msgspec.field(default_factory=list)  # of those, not asked for yet
    _drained: list[int] = msgspec.field(default_factory=list)

    def __len__(self) -> int:
        return len(self._all)

    # ------------------------------------------------------------------ in and out
    def add(self, bucket: StoredDelayBucket) -> None:
        """Adds a bucket that is stored durably. The entries in its unloaded segments must be held back already. A
        bucket without unloaded segments is removed at once."""
        self._all[bucket.ledger_id] = bucket
        if bucket.has_more:
            self._wait(bucket)
        else:
            self.remove_bucket(bucket)

    def remove_bucket(self, bucket: StoredDelayBucket) -> None:
        """Removes a bucket that is no longer needed, and its keys. The next `take_unused_ledgers` returns the ledger of
        the bucket, which may then be deleted."""
        self._drained.append(bucket.ledger_id)
        self._merging.pop(bucket.ledger_id, None)
        if self._all.pop(bucket.ledger_id, None) is not None:
            self._leave([head for head in self._heads if head[3] is not bucket])

    def remove_buckets_up_to(self, mark: Position) -> None:
        """Removes the buckets all of whose entries are at or before the position `mark`. The next `take_unused_ledgers`
        returns their ledgers."""
        for bucket in [each for each in self._all.values() if each.last <= mark]:
            self.remove_bucket(bucket)

    def clear(self) -> None:
        """Removes all buckets and all keys. The next `take_unused_ledgers` returns the ledgers of the buckets."""
        self._drained += self._all
        self._all, self._heads, self._waiting, self._merging, self._merges = {}, [], [], {}, []

    def take_unused_ledgers(self) -> list[int]:
        """Returns the ids of the ledgers whose buckets were removed since the last call. The caller must delete these
        ledgers. Each id is returned once."""
        drained, self._drained = self._drained, []
        return drained

    @property
    def has_unused_ledgers(self) -> bool:
        """True if there are ledgers of merged or empty buckets that the caller must delete."""
        return bool(self._drained)

    # ------------------------------------------------------------------ keys in memory
    def add_keys(self, keys: DelayKeySequence, bucket: StoredDelayBucket | None) -> None:
        """Adds keys of delayed entries. `bucket`: the stored bucket that contains the keys; None: a bucket that is not
        stored yet contains them."""
        self._order += 1
        heappush(self._heads, (keys.head, self._order, keys, bucket))

    def remove_keys(self, keys: DelayKeySequence) -> None:
        """Removes the keys `keys`, which were added by `add_keys`."""
        self._leave([head for head in self._heads if head[2] is not keys])

    def _leave(self, heads: list[tuple[int, int, DelayKeySequence, StoredDelayBucket | None]]) -> None:
        if len(heads) != len(self._heads):
            heapify(heads)
            self._heads = heads

    @property
    def earliest_key(self) -> int:
        """The earliest key in memory; NEVER_DUE_KEY if no key is in memory."""
        return self._heads[0][0] if self._heads else NEVER_DUE_KEY

    def remove_earliest_key(self) -> None:
        """Removes the earliest key; there must be one. If that was the last loaded key of its bucket, schedules the
        load of the bucket's next segment; if the bucket has no more segments, removes the bucket."""
        _, order, keys, bucket = self._heads[0]
        key = keys.advance()
        if key != NEVER_DUE_KEY:
            heapreplace(self._heads, (key, order, keys, bucket))
            return
        heappop(self._heads)
        if bucket is None or bucket.ledger_id in self._merging:
            return
        if bucket.has_more:
            self._wait(bucket)
        else:
            self.remove_bucket(bucket)

    # ------------------------------------------------------------------ reading
    def _wait(self, bucket: StoredDelayBucket) -> None:
        """Schedules the load of the bucket's next segment."""
        heappush(self._waiting, (bucket.segments[bucket.next].first_ms, bucket.ledger_id))

    @property
    def next_due_ms(self) -> int | None:
        """The time (ms since the epoch) at which a key becomes due, or a segment must be loaded; 0: at once; None if
        there is neither."""
        if self._merges:
            return 0
        looks = [self._heads[0][0] >> TIME_SHIFT_BITS] if self._heads else []
        if self._waiting:
            looks.append(self._waiting[0][0] - SEGMENT_LOOKAHEAD_MS)
        return min(looks, default=None)

    def take_segment_reads(self, now_ms: int) -> list[ReadDelaySegments]:
        """Returns requests to read segments: those whose first entry is due within SEGMENT_LOOKAHEAD_MS after `now_ms`
        (ms since the epoch), and those that a merge of buckets needs. A request has at most SEGMENT_READS_MAX segments,
        and is returned once."""
        loads, self._merges = self._merges, []
        while self._waiting and self._waiting[0][0] - SEGMENT_LOOKAHEAD_MS <= now_ms:
            _, ledger_id = heappop(self._waiting)
            bucket = self._all.get(ledger_id)
            if bucket is None or bucket.reading or not bucket.has_more:
                continue
            first = last = bucket.next
            while (
                last + 1 < len(bucket.segments) and last - first + 1 < SEGMENT_READS_MAX
                and bucket.segments[last + 1].first_ms - SEGMENT_LOOKAHEAD_MS <= now_ms
            ):  # fmt: skip
                last += 1
            bucket.reading = True
            loads.append(ReadDelaySegments(ledger_id, first, last))
        return loads

    def finish_segment_read(self, load: ReadDelaySegments, body: bytes) -> list[int]:
        """Adds the keys `body` of segments that were read because of the request `load`, and returns an empty list. If
        the bucket is being merged, adds nothing, and returns its keys; from then on they belong to no bucket. Ignores a
        load of a bucket that was removed meanwhile."""
        bucket = self._all.get(load.ledger_id)
        if bucket is None or bucket.next != load.first:
            return []
        bucket.next, bucket.reading, keys = load.last + 1, False, DelayKeySequence(body)
        if load.ledger_id not in self._merging:
            self.add_keys(keys, bucket)
            return []
        return self._taken(bucket) + keys.remaining_keys()

    def mark_bucket_lost(self, ledger_id: int) -> StoredDelayBucket | None:
        """Gives up a bucket that cannot be read. Its unloaded keys will never be loaded, and the bucket is removed when
        its loaded keys are used. Returns the bucket; None if no bucket is stored in this ledger."""
        bucket = self._all.get(ledger_id)
        if bucket is None:
            return None
        bucket.next, bucket.reading = len(bucket.segments), False
        self._merging.pop(ledger_id, None)
        if not any(head[3] is bucket for head in self._heads):
            self.remove_bucket(bucket)
        return bucket

    # ------------------------------------------------------------------ merging
    def begin_bucket_merge(self, keys_max: int) -> list[int]:
        """Begins to merge the smallest buckets, at most MERGED_BUCKETS_MAX, if at least MERGED_BUCKETS_MIN of them have
        at most `keys_max` keys together. Returns those of their keys that are in memory; from then on these keys belong
        to no bucket. The other keys are read by `take_segment_reads`."""
        if len(self._all) < MERGED_BUCKETS_MIN or self._merging:
            return []
        rests = {bucket.ledger_id: bucket.unloaded_count for bucket in self._all.values() if not bucket.reading}
        for _, _, keys, bucket in self._heads:
            if bucket is not None and bucket.ledger_id in rests:
                rests[bucket.ledger_id] += keys.remaining_count
        smallest = sorted(rests, key=lambda ledger_id: (rests[ledger_id], ledger_id))[:MERGED_BUCKETS_MAX]
        sums = accumulate(rests[ledger_id] for ledger_id in smallest)
        chosen = smallest[: sum(size <= keys_max for size in sums)]
        return (
            self._start_merge([self._all[ledger_id] for ledger_id in chosen])
            if len(chosen) >= MERGED_BUCKETS_MIN
            else []
        )

    def _start_merge(self, chosen: list[StoredDelayBucket]) -> list[int]:
        fresh: list[int] = []
        for bucket in chosen:
            self._merging[bucket.ledger_id] = bucket
            if bucket.has_more:
                bucket.reading = True
                self._merges.append(ReadDelaySegments(bucket.ledger_id, bucket.next, len(bucket.segments) - 1))
            else:
                fresh += self._taken(bucket)
        return fresh

    def _taken(self, bucket: StoredDelayBucket) -> list[int]:
        """Removes and returns the bucket's keys that are in memory."""
        keys = [key for head in self._heads if head[3] is bucket for key in head[2].remaining_keys()]
        self._leave([head for head in self._heads if head[3] is not bucket])
        return keys

    @property
    def merged_ledgers(self) -> frozenset[int]:
        """The ledgers of the buckets that are being merged, as soon as all of their keys were read; until then an empty
        set."""
        if not self._merging or any(bucket.reading for bucket in self._merging.values()):
            return frozenset()
        return frozenset(self._merging)

    def remove_merged_buckets(self, ledgers: frozenset[int]) -> None:
        """Removes the buckets in these ledgers, because another bucket now contains their keys."""
        for bucket in [self._all[each] for each in sorted(ledgers) if each in self._all]:
            self.remove_bucket(bucket)

    # ------------------------------------------------------------------ questions
    @property
    def loaded_bytes(self) -> int:
        """The bytes in memory of the delay keys that are loaded from buckets."""
        return sum(len(head[2].body) for head in self._heads)

    @property
    def memory_bytes(self) -> int:
        """The bytes in memory of the loaded keys and of the descriptions of the segments."""
        return self.loaded_bytes + SEGMENT_MEMORY_BYTES * sum(len(bucket.segments) for bucket in self._all.values())

    def loaded_keys(self) -> set[int]:
        """Returns all keys of delayed entries that are in memory."""
        return {key for head in self._heads for key in head[2].remaining_keys()}

    def may_contain_entry(self, position: Position) -> bool:
        """Returns True if a bucket that is not completely loaded may contain the entry at the position."""
        return any(
            each.has_more and each.first_ledger <= position[0] and position <= each.last for each in self._all.values()
        )


def find_first_unused_segment(draft: UnstoredDelayBucket, given_up: int) -> int:
    """Returns the number of the segment of the bucket `draft` that contains the first unused key; the number of
    segments if all keys are used. `given_up`: how many keys of the bucket, from the first on, are used already."""
    for number, segment in enumerate(draft.segments):
        if given_up < segment.keys:
            return number
        given_up -= segment.keys
    return len(draft.segments)
