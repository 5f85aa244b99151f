"""What the bookie knows of each ledger besides its entries: exactly one descriptor per ledger (BookKeeper #4701).

    fenced        no add without RECOVERY is admitted, ever; set before the fence record is enqueued
    fence_synced  that record is durable; only then is a fence request answered
    key           master key, 20 bytes, compared in constant time and never logged
    key_synced    its record is durable; until then every turn that adds to the ledger journals it again, so that no
                  record of a ledger is ever durable without its key, whichever block the disk had no room for
    lac, last     largest LAC known (from entries and explicit), largest entry stored

Deleted ledgers live on as tombstones: intervals of ids, kept for ever. An add or fence of such a ledger is refused.
`dirty` holds what the next checkpoint must write to the ledger index, also when there were no entries (#4843).
"""

from __future__ import annotations

import hmac
from bisect import bisect_right
from itertools import pairwise

from ..format.ledger_index import LedgerState, Tombstone


class Descriptor:
    __slots__ = ("fence_synced", "fenced", "key", "key_synced", "lac", "last", "ledger")

    def __init__(self, ledger: int, key: bytes) -> None:
        self.ledger = ledger
        self.key = key
        self.key_synced = False
        self.fenced = False
        self.fence_synced = False
        self.lac = -1
        self.last = -1

    def opens_with(self, key: bytes) -> bool:
        return hmac.compare_digest(self.key, key)

    def state(self) -> LedgerState:
        return LedgerState(self.ledger, self.fenced, self.key, self.lac, self.last)


class Tombstones:
    """Disjoint intervals of ledger ids, ascending; neighbours are merged."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, ledger: int) -> bool:
        at = bisect_right(self._firsts, ledger) - 1
        return at >= 0 and ledger <= self._lasts[at]

    def __len__(self) -> int:
        return len(self._firsts)

    def add(self, first: int, last: int) -> None:
        assert first <= last
        low = bisect_right(self._firsts, first)
        if low and self._lasts[low - 1] >= first - 1:
            low -= 1
        high = low
        while high < len(self._firsts) and self._firsts[high] <= last + 1:
            first, last = min(first, self._firsts[high]), max(last, self._lasts[high])
            high += 1
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]

    def intervals(self) -> list[Tombstone]:
        return [Tombstone(first, last) for first, last in zip(self._firsts, self._lasts, strict=True)]


class Descriptors:
    def __init__(self) -> None:
        self.ledgers: dict[int, Descriptor] = {}
        self.tombstones = Tombstones()
        self._dirty: dict[int, None] = {}
        self._new_tombstones: list[Tombstone] = []

    def get(self, ledger: int) -> Descriptor | None:
        return self.ledgers.get(ledger)

    def create(self, ledger: int, key: bytes) -> Descriptor:
        assert ledger not in self.ledgers, f"ledger {ledger} has a descriptor"
        assert ledger not in self.tombstones, f"ledger {ledger} is deleted"
        descriptor = self.ledgers[ledger] = Descriptor(ledger, key)
        self._dirty[ledger] = None
        return descriptor

    def touch(self, descriptor: Descriptor) -> None:
        """The next checkpoint writes it."""
        self._dirty[descriptor.ledger] = None

    def bury(self, first: int, last: int) -> None:
        """The ledgers of the interval are deleted for ever."""
        self._new_tombstones.append(Tombstone(first, last))
        self._entomb(first, last)

    def _entomb(self, first: int, last: int) -> None:
        self.tombstones.add(first, last)
        span = range(first, last + 1)
        dead = span if len(span) <= len(self.ledgers) else [ledger for ledger in self.ledgers if ledger in span]
        for ledger in list(dead):
            self.ledgers.pop(ledger, None)
            self._dirty.pop(ledger, None)

    def load(self, record: LedgerState | Tombstone) -> None:
        """From the ledger index; what it says is durable."""
        if isinstance(record, Tombstone):
            self._entomb(record.first, record.last)
            return
        descriptor = self.ledgers.get(record.ledger)
        if descriptor is None:
            descriptor = self.ledgers[record.ledger] = Descriptor(record.ledger, record.key)
        descriptor.key_synced = True
        descriptor.fenced = descriptor.fence_synced = record.fenced
        descriptor.lac, descriptor.last = record.lac, record.last

    def take_dirty(self) -> list[LedgerState | Tombstone]:
        """What changed since the last call, as it is now."""
        dirty: list[LedgerState | Tombstone] = [*self._new_tombstones]
        dirty += [self.ledgers[ledger].state() for ledger in sorted(self._dirty)]
        self._dirty = {}
        self._new_tombstones = []
        return dirty

    @property
    def dirty(self) -> bool:
        return bool(self._dirty or self._new_tombstones)

    def everything(self) -> list[LedgerState | Tombstone]:
        intervals: list[LedgerState | Tombstone] = [*self.tombstones.intervals()]
        return intervals + [self.ledgers[ledger].state() for ledger in sorted(self.ledgers)]

    def check(self) -> None:
        """No live ledger is buried; intervals are disjoint, ascending and not adjacent; synced fences are fences."""
        intervals = self.tombstones.intervals()
        assert all(a.last + 1 < b.first for a, b in pairwise(intervals))
        assert all(ledger not in self.tombstones for ledger in self.ledgers)
        assert all(d.fenced or not d.fence_synced for d in self.ledgers.values())
