"""Which entries of a subscription wait for their time, and which are due: decisions, without a clock or storage.

An entry whose delivery time lies ahead is *held*: neither outstanding nor acknowledged, and the dispatcher leaps over
it without reading it. When it is due it comes out of `due`, once, and goes through the dispatcher's replay queue.

    delays.hold(position, at_ms)                    it was seen, and its time lies ahead
    delays.due(now_ms, limit)                       → positions whose time has come, earliest first
    delays.seal(now_ms) → Draft … sealed | kept     what is far off goes to storage, as a *bucket*
    delays.wanted(now_ms) → Load … loaded | lost    what is near comes back, a few segments at a time
    delays.drained()                                buckets nobody needs any more

Rules
- **The bitmaps are the truth** (`is_delayed`: one roaring bitmap per ledger of the topic). Each position in them has a
  source that will give it up: the heap of fresh ones, a draft, a bucket, or the stretch of a lost bucket. A source may
  name a position that is held no more (acknowledged, trimmed, given up by another source): it is passed over.
- **Not to be held is always safe.** Such an entry is read from the log like any other, and held then if it is early. So
  nothing here has to be stored before anything else: what is not sealed when the broker dies is read again, and nothing
  but that; after a restart segments whose time has passed are left out; a bucket may go when its last entry is given
  up, acknowledged or not. The time of an entry stands in the entry: two sources never disagree.
- **A bucket is durable and named before its entries leave memory** (`sealed`); until then the draft serves them.
- A bucket that cannot be read is *lost*: what it held comes out of `due` at once, in log order and a few at a time, is
  read from the log, and is held again if it is early. Late for nobody but the loser's disk; dropped never.
- `due` looks at the time it is told and remembers none: a clock that jumps forward delivers, one that jumps back waits.
- Acknowledged without delivery (skip, expiry, seek, a cleared backlog): `forget`, `forget_up_to`.

Memory: a fresh entry costs `FRESH_BYTES`; a sealed one its place in two bitmaps (2 bytes at most, much less where all
messages of a stretch are delayed); a loaded one KEY_BYTES, for LOOKAHEAD_MS. Sealing begins at `seal_entries`, or at a
64th of all that is held: so there are some 64 buckets and one for each further 1.6 %, and nothing has to be merged.
Entries that are due within NEAR_MS are not sealed: they would come back at once; past `memory_bytes_max` they are too.

Source: Pulsar A12–A14, PIP-195. Guarding tests: tests/broker/core/test_delays.py.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from pyroaring import BitMap

from ...proto.names import Position
from .cursor import Cursor, run_end
from .log_shape import LogShape

KEY_BYTES = 20
"""Time in ms (8), ledger (8), entry (4): big-endian, so that keys sort as bytes, as numbers and by time."""
FRESH_BYTES = 56
"""A key as a number in a heap."""
SEGMENT_ENTRIES = 2000
"""One read brings so many: 40 KB, a fifth of a second at 10,000 a second."""
LOOKAHEAD_MS = 3_000
"""Segments are in memory so long before their first entry is due: a read may fail a few times."""
LOAD_SEGMENTS_MAX = 32
"""Of one bucket at once."""
NEAR_MS = 10_000
GROWTH = 64

_TIME = 96
_ENTRY_MASK = (1 << 32) - 1
_LEDGER_MASK = (1 << 64) - 1
_NEVER = 1 << 200


class Segment(NamedTuple):
    """A stretch of time of a bucket: one entry of its ledger, SEGMENT_ENTRIES keys at most."""

    first_ms: int
    last_ms: int
    keys: int
    places: bytes  # which positions: `pack_places`


class Draft(NamedTuple):
    """A bucket to be written: the keys of each segment, and what the bucket's directory says of it."""

    bodies: list[bytes]
    segments: list[Segment]


class Load(NamedTuple):
    """Segments of a bucket to be read, both ends included."""

    ledger_id: int
    first: int
    last: int


@dataclass(slots=True, eq=False)
class _Bucket:
    ledger_id: int
    segments: list[Segment]
    last: Position
    next: int = 0  # segment that is loaded next


@dataclass(slots=True, eq=False)
class _Source:
    """Keys in order, some of them given up."""

    body: bytes
    bucket: _Bucket | None  # None: the draft
    offset: int = 0

    def advance(self) -> int:
        """The key it stands at now; _NEVER at the end."""
        self.offset += KEY_BYTES
        return self.key

    @property
    def key(self) -> int:
        if self.offset >= len(self.body):
            return _NEVER
        return int.from_bytes(self.body[self.offset : self.offset + KEY_BYTES])


@dataclass(slots=True)
class Delays:
    shape: LogShape
    cursor: Cursor
    seal_entries: int = 50_000
    memory_bytes_max: int = 16 << 20
    count: int = 0  # entries that are held
    _held: dict[int, BitMap] = field(default_factory=dict)
    _fresh: list[int] = field(default_factory=list)  # a heap of keys
    _seal_at: int = 0  # fresh ones at the next look; 0: by the rule
    _draft: _Source | None = None
    _draft_segments: list[Segment] = field(default_factory=list)
    _heads: list[tuple[int, int, _Source]] = field(default_factory=list)  # a heap: (key, order, source)
    _order: int = 0
    _buckets: dict[int, _Bucket] = field(default_factory=dict)
    _waiting: list[tuple[int, int]] = field(default_factory=list)  # a heap: (first time, ledger), not loaded
    _lost: dict[int, BitMap] = field(default_factory=dict)
    _drained: list[int] = field(default_factory=list)

    # ------------------------------------------------------------------ intents
    def hold(self, position: Position, at_ms: int) -> None:
        """It is not delivered before that time. Nothing happens when it is held already."""
        held = self._held.get(position[0])
        if held is None:
            held = self._held[position[0]] = BitMap()
        if position[1] not in held:
            held.add(position[1])
            self.count += 1
            heappush(self._fresh, key_of(position, at_ms))

    def forget(self, position: Position) -> None:
        """It is acknowledged."""
        if self.count and self._take(position) and not self.count:
            self.clear()

    def forget_set(self, ledger_id: int, entries: BitMap) -> None:
        """They are acknowledged."""
        held = self._held.get(ledger_id)
        if held is None:
            return
        before = len(held)
        held -= entries
        self.count -= before - len(held)
        if not held:
            del self._held[ledger_id]
        if not self.count:
            self.clear()

    def forget_up_to(self, mark: Position) -> None:
        """All of that is acknowledged, or stands in the log no more."""
        if not self.count:
            return
        for held in (self._held, self._lost):
            for ledger_id in [each for each in held if each <= mark[0]]:
                before = len(held[ledger_id])
                if ledger_id == mark[0]:
                    held[ledger_id].remove_range(0, mark[1] + 1)
                else:
                    held[ledger_id].clear()
                if held is self._held:
                    self.count -= before - len(held[ledger_id])
                if not held[ledger_id]:
                    del held[ledger_id]
        if not self.count:
            self.clear()
        for bucket in [each for each in self._buckets.values() if each.last <= mark]:
            self._end(bucket)

    def release(self) -> None:
        """All that is held may come now (the policy says that nothing is delayed any more)."""
        lost = {ledger_id: held.copy() for ledger_id, held in self._held.items()}
        count, held = self.count, self._held
        self.clear()
        self._lost, self.count, self._held = lost, count, held

    @property
    def released(self) -> bool:
        return bool(self._lost) and not (self._fresh or self._heads or self._buckets)

    def clear(self) -> None:
        """Nothing is held."""
        self._held, self._lost, self.count = {}, {}, 0
        self._fresh, self._seal_at, self._heads, self._waiting = [], 0, [], []
        self._drained += self._buckets
        self._buckets = {}

    # ------------------------------------------------------------------ what is due
    def due(self, now_ms: int, limit: int) -> list[Position]:
        """So many at most, earliest first; they are held no more."""
        found: list[Position] = []
        fresh, heads, end = self._fresh, self._heads, (now_ms + 1) << _TIME
        while len(found) < limit:
            first = fresh[0] if fresh else _NEVER
            head = heads[0][0] if heads else _NEVER
            if min(first, head) >= end:
                break
            if first <= head:
                heappop(fresh)
            else:
                self._advance()
            position = position_of(min(first, head))
            if self._take(position):
                found.append(position)
        if self._lost and len(found) < limit:
            found += self._found_again(limit - len(found))
        if found and not self.count:
            self.clear()
        return found

    def _advance(self) -> None:
        _, order, source = self._heads[0]
        key = source.advance()
        if key != _NEVER:
            heapreplace(self._heads, (key, order, source))
            return
        heappop(self._heads)
        bucket = source.bucket
        if bucket is not None and bucket.next < len(bucket.segments):
            heappush(self._waiting, (bucket.segments[bucket.next].first_ms, bucket.ledger_id))
        elif bucket is not None:
            self._end(bucket)

    def _take(self, position: Position) -> bool:
        """It is held no more. False: it was not."""
        ledger_id, entry_id = position
        held = self._held.get(ledger_id)
        if held is None or entry_id not in held:
            return False
        held.remove(entry_id)
        if not held:
            del self._held[ledger_id]
        self.count -= 1
        return True

    def _found_again(self, limit: int) -> list[Position]:
        found: list[Position] = []
        for ledger_id in sorted(self._lost):
            entries = self._lost[ledger_id]
            for entry_id in list(entries[: limit - len(found)]):
                entries.remove(entry_id)
                position = Position(ledger_id, entry_id)
                if self._take(position):
                    found.append(position)
            if not entries:
                del self._lost[ledger_id]
            if len(found) >= limit:
                break
        return found

    @property
    def next_look_ms(self) -> int | None:
        """When something is to be done next: an entry is due, or a segment is wanted. None: nothing is."""
        looks = [self._fresh[0] >> _TIME] if self._fresh else []
        if self._heads:
            looks.append(self._heads[0][0] >> _TIME)
        if self._waiting:
            looks.append(self._waiting[0][0] - LOOKAHEAD_MS)
        return 0 if self._lost else min(looks, default=None)

    # ------------------------------------------------------------------ sealing
    @property
    def full(self) -> bool:
        """Far too much is in memory because it cannot be stored: nothing more may be held."""
        return len(self._fresh) * FRESH_BYTES > 4 * self.memory_bytes_max

    @property
    def seals(self) -> bool:
        """Whether it is time to look what can be sealed."""
        fresh = len(self._fresh)
        over = fresh * FRESH_BYTES > self.memory_bytes_max
        return self._draft is None and (over or fresh >= max(self.seal_entries, self.count // GROWTH, self._seal_at))

    def seal(self, now_ms: int, *, least: int | None = None) -> Draft | None:
        """What is far off, as a bucket; None: too little of it. One at a time; then `sealed`, or `kept`."""
        assert self._draft is None, "one bucket is sealed at a time"
        fresh = self._fresh
        fresh.sort()
        pressed = len(fresh) * FRESH_BYTES > self.memory_bytes_max
        cut = bisect_left(fresh, 0 if pressed else (now_ms + NEAR_MS) << _TIME)
        least = max(1, len(fresh) // 2) if least is None else least
        if len(fresh) - cut < least:
            self._seal_at = 2 * len(fresh)
            return None
        keys = [key for key in dict.fromkeys(fresh[cut:]) if self.is_delayed(position_of(key))]
        self._fresh, self._seal_at = fresh[:cut], 0  # sorted: it is a heap
        if not keys:
            return None
        draft = drafted(keys)
        self._draft, self._draft_segments = _Source(b"".join(draft.bodies), None), draft.segments
        self._push(self._draft)
        return draft

    def sealed(self, ledger_id: int) -> None:
        """The draft is durable in that ledger, and the ledger is named."""
        draft, self._draft = self._draft, None
        assert draft is not None, "a draft was sealed"
        self._heads[:] = [head for head in self._heads if head[2] is not draft]
        heapify(self._heads)
        segments, self._draft_segments = self._draft_segments, []
        bucket = _Bucket(ledger_id, segments, _last_of(segments), draft.offset // KEY_BYTES // SEGMENT_ENTRIES)
        self._buckets[ledger_id] = bucket
        if bucket.next < len(segments) and self.count:
            heappush(self._waiting, (segments[bucket.next].first_ms, ledger_id))
        else:
            self._end(bucket)

    def kept(self) -> None:
        """The draft is not sealed: its entries are fresh again."""
        draft, self._draft, self._draft_segments = self._draft, None, []
        assert draft is not None, "a draft was not sealed"
        self._heads[:] = [head for head in self._heads if head[2] is not draft]
        heapify(self._heads)
        for offset in range(draft.offset, len(draft.body), KEY_BYTES):
            heappush(self._fresh, int.from_bytes(draft.body[offset : offset + KEY_BYTES]))

    # ------------------------------------------------------------------ buckets
    def found(self, ledger_id: int, segments: list[Segment], now_ms: int) -> None:
        """A bucket of an earlier time (of another broker): what of it is still early is held."""
        first = next((at for at, each in enumerate(segments) if each.last_ms > now_ms), len(segments))
        bucket = _Bucket(ledger_id, segments, _last_of(segments), first)
        self._buckets[ledger_id] = bucket
        for segment in segments[first:]:
            for place, entries in unpack_places(segment.places):
                self._add(place, entries)
        if first < len(segments) and any(self._of(bucket).values()):
            heappush(self._waiting, (segments[first].first_ms, ledger_id))
        else:
            self._end(bucket)

    def _add(self, ledger_id: int, entries: BitMap) -> None:
        span = self.shape.span(ledger_id)
        if span is None or ledger_id < self.cursor.mark[0]:
            return
        entries &= BitMap(range(span.last_entry + 1))
        if ledger_id == self.cursor.mark[0]:
            entries.remove_range(0, self.cursor.mark[1] + 1)
        if ledger_id in self.cursor.acked:
            entries -= self.cursor.acked[ledger_id]
        if not entries:
            return
        held = self._held.get(ledger_id)
        self.count += len(entries) if held is None else len(entries - held)
        self._held[ledger_id] = entries if held is None else held | entries

    def _of(self, bucket: _Bucket, first: int | None = None) -> dict[int, BitMap]:
        """What the bucket still has to give up."""
        result: dict[int, BitMap] = {}
        for segment in bucket.segments[bucket.next if first is None else first :]:
            for ledger_id, entries in unpack_places(segment.places):
                held = self._held.get(ledger_id)
                if held is not None:
                    result[ledger_id] = result.get(ledger_id, BitMap()) | (entries & held)
        return result

    def wanted(self, now_ms: int) -> list[Load]:
        """Segments to be read now; each is asked for once."""
        loads: list[Load] = []
        while self._waiting and self._waiting[0][0] - LOOKAHEAD_MS <= now_ms:
            _, ledger_id = heappop(self._waiting)
            bucket = self._buckets.get(ledger_id)
            if bucket is None or bucket.next >= len(bucket.segments):
                continue
            first = last = bucket.next
            while (
                last + 1 < len(bucket.segments) and last - first + 1 < LOAD_SEGMENTS_MAX
                and bucket.segments[last + 1].first_ms - LOOKAHEAD_MS <= now_ms
            ):  # fmt: skip
                last += 1
            loads.append(Load(ledger_id, first, last))
        return loads

    def loaded(self, load: Load, body: bytes) -> None:
        """The keys of those segments."""
        bucket = self._buckets.get(load.ledger_id)
        if bucket is not None and bucket.next == load.first:
            bucket.next = load.last + 1
            self._push(_Source(body, bucket))

    def lost(self, ledger_id: int) -> None:
        """The bucket cannot be read."""
        bucket = self._buckets.get(ledger_id)
        if bucket is None:
            return
        for place, entries in self._of(bucket).items():
            self._lost[place] = self._lost.get(place, BitMap()) | entries
        bucket.next = len(bucket.segments)
        if not any(head[2].bucket is bucket for head in self._heads):
            self._end(bucket)

    def drained(self) -> list[int]:
        """Ledgers of buckets that have nothing to give up; each is told once."""
        drained, self._drained = self._drained, []
        return drained

    @property
    def has_drained(self) -> bool:
        return bool(self._drained)

    def _push(self, source: _Source) -> None:
        self._order += 1
        heappush(self._heads, (source.key, self._order, source))

    def _end(self, bucket: _Bucket) -> None:
        if self._buckets.pop(bucket.ledger_id, None) is not None:
            self._heads[:] = [head for head in self._heads if head[2].bucket is not bucket]
            heapify(self._heads)
            self._drained.append(bucket.ledger_id)

    # ------------------------------------------------------------------ questions
    def is_delayed(self, position: Position) -> bool:
        held = self._held.get(position[0])
        return held is not None and position[1] in held

    def next_after(self, position: Position) -> Position:
        """The first place at or behind it that is neither held nor acknowledged: one step per ledger of the topic."""
        while self.is_delayed(position):
            ledger_id, entry_id = position
            over = self._held[ledger_id]
            acked = self.cursor.acked.get(ledger_id)
            last = run_end(over if acked is None else over | acked, entry_id)
            position = self.cursor.next_unacked(self.shape.after(Position(ledger_id, last)))
        return position

    @property
    def buckets(self) -> int:
        return len(self._buckets)

    @property
    def memory_bytes(self) -> int:
        """Of keys; bitmaps and directories come on top."""
        return len(self._fresh) * FRESH_BYTES + sum(len(head[2].body) for head in self._heads)

    def held_in(self, ledger_id: int) -> int:
        """How many entries of that ledger of the topic are held."""
        held = self._held.get(ledger_id)
        return len(held) if held is not None else 0

    def check(self) -> None:
        """Each held position has a source; the count is right; nothing that is acknowledged is held."""
        held = {Position(ledger_id, each) for ledger_id, entries in self._held.items() for each in entries}
        assert self.count == len(held), "the count of held entries is wrong"
        assert all(self._held.values()), "an empty bitmap is kept"
        sources = {position_of(key) for key in self._fresh}
        for _, _, source in self._heads:
            for offset in range(source.offset, len(source.body), KEY_BYTES):
                sources.add(position_of(int.from_bytes(source.body[offset : offset + KEY_BYTES])))
        for places in (*(self._of(bucket) for bucket in self._buckets.values()), self._lost):
            sources |= {Position(ledger_id, each) for ledger_id, entries in places.items() for each in entries}
        assert held <= sources, "an entry is held that nobody will ever give up"
        assert not any(map(self.cursor.is_acked, held)), "an acknowledged entry is held"


# ------------------------------------------------------------------------------------------ keys and places
def key_of(position: Position, at_ms: int) -> int:
    return max(at_ms, 0) << _TIME | position[0] << 32 | position[1]


def position_of(key: int) -> Position:
    return Position(key >> 32 & _LEDGER_MASK, key & _ENTRY_MASK)


def drafted(keys: list[int]) -> Draft:
    """Sorted keys as a bucket."""
    bodies, segments = [], []
    for start in range(0, len(keys), SEGMENT_ENTRIES):
        part = keys[start : start + SEGMENT_ENTRIES]
        bodies.append(b"".join([key.to_bytes(KEY_BYTES) for key in part]))
        segments.append(Segment(part[0] >> _TIME, part[-1] >> _TIME, len(part), pack_places(part)))
    return Draft(bodies, segments)


def pack_places(keys: list[int]) -> bytes:
    """( ledger i64 | size u32 | the entries as a portable roaring bitmap )*"""
    entries: dict[int, list[int]] = {}
    for key in keys:
        entries.setdefault(key >> 32 & _LEDGER_MASK, []).append(key & _ENTRY_MASK)
    parts: list[bytes] = []
    for ledger_id in sorted(entries):
        bitmap = BitMap(entries[ledger_id])
        bitmap.run_optimize()
        bits = bitmap.serialize()
        parts += (ledger_id.to_bytes(8), len(bits).to_bytes(4), bits)
    return b"".join(parts)


def unpack_places(places: bytes) -> list[tuple[int, BitMap]]:
    """The other way round. ValueError."""
    result, offset = [], 0
    while offset < len(places):
        ledger_id, size = int.from_bytes(places[offset : offset + 8]), int.from_bytes(places[offset + 8 : offset + 12])
        offset += 12
        if not 0 < size <= len(places) - offset:
            raise ValueError(f"{size} bytes of a bitmap at {offset} of {len(places)}")
        result.append((ledger_id, BitMap.deserialize(places[offset : offset + size])))
        offset += size
    return result


def _last_of(segments: list[Segment]) -> Position:
    """The highest position of a bucket."""
    places = [place for segment in segments for place in unpack_places(segment.places)]
    return max((Position(ledger_id, entries.max()) for ledger_id, entries in places), default=Position(-1, -1))
