"""What the bookie knows of each ledger besides its entries: exactly one descriptor per ledger (BookKeeper #4701).

    fenced        no add without RECOVERY is admitted, ever; set before the fence record is enqueued
    fence_synced  that record is durable; only then is a fence request answered
    key           master key, 20 bytes, compared in constant time and never logged
    key_synced    its record is durable; until then every turn that adds to the ledger journals it again, so that no
                  record of a ledger is ever durable without its key, whichever block the disk had no room for
    lac, last     largest LAC known (from entries and explicit), largest entry stored

Deleted ledgers live on as tombstones; those and what else must never be forgotten are store/facts.py.
`dirty`: there is something that the next checkpoint must write to the ledger index, also when there were no entries
(#4843).
"""

from __future__ import annotations

import hmac

from ..format.ledger_index import LedgerState, State, Tombstone
from .facts import Facts


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


class Descriptors(Facts):
    def __init__(self) -> None:
        super().__init__()
        self.ledgers: dict[int, Descriptor] = {}
        self._dirty: dict[int, None] = {}

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
        self.state(Tombstone(first, last))
        self._drop(first, last)

    def _drop(self, first: int, last: int) -> None:
        span = range(first, last + 1)
        dead = span if len(span) <= len(self.ledgers) else [ledger for ledger in self.ledgers if ledger in span]
        for ledger in list(dead):
            self.ledgers.pop(ledger, None)
            self._dirty.pop(ledger, None)

    def load(self, record: State) -> None:
        """From the ledger index; what it says is durable."""
        if not isinstance(record, LedgerState):
            self.apply(record)
            if isinstance(record, Tombstone):
                self._drop(record.first, record.last)
            return
        descriptor = self.ledgers.get(record.ledger)
        if descriptor is None:
            descriptor = self.ledgers[record.ledger] = Descriptor(record.ledger, record.key)
        descriptor.key_synced = True
        descriptor.fenced = descriptor.fence_synced = record.fenced
        descriptor.lac, descriptor.last = record.lac, record.last

    def take_dirty(self) -> list[State]:
        """What changed since the last call, as it is now."""
        dirty = self.take_changes()
        dirty += [self.ledgers[ledger].state() for ledger in sorted(self._dirty)]
        self._dirty = {}
        return dirty

    @property
    def dirty(self) -> bool:
        return bool(self._dirty or self.changed)

    def everything(self) -> list[State]:
        return self.statements() + [self.ledgers[ledger].state() for ledger in sorted(self.ledgers)]

    @property
    def alive(self) -> int:
        """About how many records `everything` has."""
        return len(self.ledgers) + len(self.tombstones)

    def check(self) -> None:
        """Those of the facts; synced fences are fences."""
        self.check_facts(self.ledgers)
        assert all(d.fenced or not d.fence_synced for d in self.ledgers.values())
