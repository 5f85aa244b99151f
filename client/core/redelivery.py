"""The entries that are to be delivered again, and when: negative acknowledgements and acknowledgement time-outs.

Both are the same question: an entry is *watched* until a time; acknowledging it forgets it; when the time comes it is
given out once, never early. An entry that is watched again keeps its first time. What differs is how often one forgets:

- `RedeliveryTracker`, for time-outs: every message that is taken is watched, and nearly every one is forgotten. Times
  are kept in buckets of a tick, so that a watch costs two dictionary entries and no timer; at most one tick late. Its
  size is that of what the application holds.
- `NackTracker`, for negative acks (Pulsar A6, complaint 17): nearly every one comes to its time, and an hour's worth
  may wait. A bucket is a roaring set per ledger, as wide as a 256th of the delay (0.256 s at least: PIP-393's
  precision), so that there are at most 257 buckets for a delay however long it is, and an entry is that much late at
  most.
  Memory: 2 × 2 bytes an entry at most (one in its bucket, one in the set of all that are watched; less when they are
  dense), and about 300 bytes for each bucket and ledger.

How long an entry waits by how often it came back: client/common/redelivery_backoff.py. Guarding tests:
tests/client/core/test_cores.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyroaring import BitMap

from ...proto.names import Position

PRECISION_MS = 256
BUCKETS_MAX = 256


class RedeliveryTracker:
    """Watches entries for the acknowledgement time-out."""

    def __init__(self, delay_s: float, tick_s: float) -> None:
        assert delay_s >= 0 < tick_s, "delays are not negative"
        self._delay_s = delay_s
        self.tick_s = tick_s
        self.watched: dict[Position, int] = {}  # and its tick
        self._buckets: dict[int, dict[Position, None]] = {}

    def __len__(self) -> int:
        return len(self.watched)

    def watch(self, position: Position, now: float, longer_s: float = 0.0) -> None:
        if position in self.watched:
            return
        tick = int((now + self._delay_s + longer_s) / self.tick_s) + 1
        self.watched[position] = tick
        self._buckets.setdefault(tick, {})[position] = None

    def forget(self, position: Position) -> None:
        tick = self.watched.pop(position, None)
        if tick is not None:
            bucket = self._buckets[tick]
            del bucket[position]
            if not bucket:
                del self._buckets[tick]

    def forget_up_to(self, position: Position) -> None:
        for covered in [each for each in self.watched if each <= position]:
            self.forget(covered)

    def take(self, now: float) -> list[Position]:
        """The entries that are due, forgotten from now on."""
        current = int(now / self.tick_s)
        due: list[Position] = []
        for tick in sorted(tick for tick in self._buckets if tick <= current):
            due.extend(self._buckets.pop(tick))
        for position in due:
            del self.watched[position]
        return due

    def clear(self) -> None:
        self.watched.clear()
        self._buckets.clear()

    def check(self) -> None:
        assert sum(map(len, self._buckets.values())) == len(self.watched)
        assert all(position in self._buckets[tick] for position, tick in self.watched.items())


EntrySets = dict[int, BitMap]
"""Ledger → entries."""


def places_of(sets: EntrySets) -> Iterator[Position]:
    return (Position(ledger_id, each) for ledger_id, some in sets.items() for each in some)


class NackTracker:
    """Watches entries for negative acknowledgements. Times are whole milliseconds of any clock that does not go back.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, EntrySets] = {}  # due time → entries
        self.watched: EntrySets = {}  # all of them

    def __len__(self) -> int:
        return sum(map(len, self.watched.values()))

    def __bool__(self) -> bool:
        return bool(self.watched)

    def __contains__(self, position: Position) -> bool:
        return position[0] in self.watched and position[1] in self.watched[position[0]]

    def watch(self, position: Position, now_ms: int, delay_ms: int) -> None:
        ledger_id, entry_id = position
        watched = self.watched.get(ledger_id)
        if watched is None:
            watched = self.watched[ledger_id] = BitMap()
        elif entry_id in watched:
            return
        watched.add(entry_id)
        width = max(PRECISION_MS, -(-delay_ms // BUCKETS_MAX))
        due = -(-(now_ms + delay_ms) // width) * width
        bucket = self._buckets.setdefault(due, {})
        if ledger_id not in bucket:
            bucket[ledger_id] = BitMap()
        bucket[ledger_id].add(entry_id)

    def forget(self, position: Position) -> None:
        if position in self:
            for bucket in self._buckets.values():
                if position[0] in bucket and position[1] in bucket[position[0]]:
                    bucket[position[0]].remove(position[1])
            self._unwatch(position[0], BitMap([position[1]]))

    def forget_up_to(self, position: Position) -> None:
        for ledger_id in [each for each in self.watched if each <= position[0]]:
            gone = self.watched[ledger_id]
            if ledger_id == position[0]:
                gone = gone & BitMap(range(position[1] + 1))
            gone = gone.copy()
            for bucket in self._buckets.values():
                if ledger_id in bucket:
                    bucket[ledger_id] -= gone
            self._unwatch(ledger_id, gone)

    def _unwatch(self, ledger_id: int, entries: BitMap) -> None:
        self.watched[ledger_id] -= entries
        if not self.watched[ledger_id]:
            del self.watched[ledger_id]
        if not self.watched:
            self._buckets.clear()

    def next_ms(self) -> int | None:
        """Returns when the next entry is due; None: nothing is watched."""
        return min(self._buckets, default=None)

    def take(self, now_ms: int) -> EntrySets:
        """The entries that are due, forgotten from now on."""
        due: EntrySets = {}
        for time_ms in sorted(each for each in self._buckets if each <= now_ms):
            for ledger_id, entries in self._buckets.pop(time_ms).items():
                due[ledger_id] = due[ledger_id] | entries if ledger_id in due else entries
        for ledger_id, entries in due.items():
            if ledger_id in self.watched:
                self._unwatch(ledger_id, entries)
        return {ledger_id: entries for ledger_id, entries in due.items() if entries}

    def clear(self) -> None:
        self._buckets.clear()
        self.watched.clear()

    @property
    def memory_bytes(self) -> int:
        """Returns about what it takes: the sets as CRoaring holds them, and their objects and places."""
        sets = [each for bucket in (*self._buckets.values(), self.watched) for each in bucket.values()]
        figures = [each.get_statistics() for each in sets]
        held = sum(each["n_bytes_array_containers"] + each["n_bytes_bitset_containers"] for each in figures)
        return int(held) + 300 * len(sets)

    def check(self) -> None:
        kept: EntrySets = {}
        for bucket in self._buckets.values():
            for ledger_id, entries in bucket.items():
                assert ledger_id not in kept or not kept[ledger_id] & entries, "an entry has two times"
                kept[ledger_id] = kept[ledger_id] | entries if ledger_id in kept else entries
        kept = {each: entries for each, entries in kept.items() if entries}
        assert kept == self.watched, "what is watched has a time"
