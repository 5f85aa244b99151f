"""The keys of ledgers: which request opens a ledger, and with which key a ledger may begin here.

A ledger has one key for ever, that of the first intent that was admitted. Its KEY record is in the same group of the
journal as that intent, so a start never finds an entry, a fence or an LAC of a ledger without its key.

    introduce(ledger, key)            the metadata has a record of the ledger with this key
    verdict(ledger, key)              whether an intent with this key is admitted
    ensure_descriptor(ledger, key)    the descriptor, after OK; enqueues the KEY record if it is not durable
    take_enqueued()                   the KEY records of the group that is sealed now

`TombstoneWriter` writes the tombstones of deleted ledgers. Bound: `INTRODUCED_MAX` ledgers that were introduced and did
not begin. Guarded by tests/bookie/test_newcomers.py, tests/bookie/store/test_crashes.py.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from ...ledger.peer_format import Status
from ..format.journal import RecordType
from .index import LruCache
from .index_files import LedgerDescriptor, LedgerDescriptors
from .journal.journal import Journal
from .memtable import IntegerIntervals, Memtable

INTRODUCED_MAX = 4096
"""Ledgers that were introduced and did not begin: those of a burst."""


class LedgerKeys:
    """The keys of one store's ledgers. Changes `descriptors`, and adds records to the open group of `journal`."""

    def __init__(self, descriptors: LedgerDescriptors, journal: Journal) -> None:
        self._descriptors = descriptors
        self._journal = journal
        # keys of ledgers that are not here; None: any ledger may begin
        self._introduced: LruCache[int, bytes] | None = None
        self._keying: dict[int, LedgerDescriptor] = {}  # whose key goes out with the next seal

    def require_keys_before_ledgers(self) -> None:
        """Requires from now on that the key of a ledger that is unknown here was introduced before the ledger begins
        (bookie/newcomers.py).
        """
        self._introduced = LruCache(INTRODUCED_MAX)

    def record_key_of_metadata(self, ledger: int, key: bytes) -> None:
        """Records that the metadata has a record of the ledger with this key."""
        if self._introduced is not None:
            self._introduced.put(ledger, key, 1)

    def may_begin_unknown_ledger(self, ledger: int, key: bytes) -> bool:
        """Returns whether a ledger that is unknown here may begin with this key."""
        if self._introduced is None:
            return True
        known = self._introduced.get(ledger)
        return known is not None and hmac.compare_digest(known, key)

    def verdict(self, ledger: int, key: bytes) -> Status:
        """Returns whether an add or a fence with this key is admitted: OK; FENCED if the ledger is deleted,
        NO_SUCH_LEDGER if it is new and was not introduced, UNAUTHORIZED if it has another key.
        """
        descriptor = self._descriptors.get(ledger)
        if descriptor is not None:
            return Status.OK if descriptor.has_key(key) else Status.UNAUTHORIZED
        if ledger in self._descriptors.tombstones:
            return Status.FENCED
        return Status.OK if self.may_begin_unknown_ledger(ledger, key) else Status.NO_SUCH_LEDGER

    def judge_read(self, ledger: int, key: bytes) -> Status:
        """Returns OK if a sender with this key may read the ledger. NO_SUCH_LEDGER: the key may have been lost here,
        and must be introduced first.
        """
        descriptor = self._descriptors.get(ledger)
        if descriptor is not None:
            return Status.OK if descriptor.has_key(key) else Status.UNAUTHORIZED
        lost = 0 <= ledger <= self._descriptors.limbo_upto and ledger not in self._descriptors.tombstones
        return Status.NO_SUCH_LEDGER if lost and not self.may_begin_unknown_ledger(ledger, key) else Status.OK

    def ensure_key(self, ledger: int, key: bytes) -> Status:
        """Binds the key to the ledger if the ledger is unknown here. Returns UNAUTHORIZED if the ledger is deleted or
        has another key. Otherwise returns OK; the key is durable when the next seal is done."""
        descriptor = self._descriptors.get(ledger)
        if ledger in self._descriptors.tombstones or (descriptor is not None and not descriptor.has_key(key)):
            return Status.UNAUTHORIZED
        self.ensure_descriptor(ledger, key)
        return Status.OK

    def ensure_descriptor(self, ledger: int, key: bytes) -> LedgerDescriptor:
        """Returns the ledger's descriptor, and creates it if there is none. Enqueues its KEY record unless the key is
        durable.
        """
        descriptor = self._descriptors.get(ledger) or self._descriptors.create(ledger, key)
        if not descriptor.key_synced and ledger not in self._keying:
            self._journal.enqueue(RecordType.KEY, ledger, -1, (key,))
            self._keying[ledger] = descriptor
        return descriptor

    def take_enqueued(self) -> dict[int, LedgerDescriptor]:
        """Removes and returns the descriptors, by ledger, whose KEY records were enqueued since the last seal."""
        keying, self._keying = self._keying, {}
        return keying


# ---------------------------------------------------------------------------------------------------- tombstones
# Tombstones of deleted ledgers: only when a ledger's tombstone is durable may its data be removed.
#
# Rule (ledger protocol §2.6): no entry of a ledger is removed from a log before its tombstone is durable, in the
# journal or in the ledger index. Else a start would find the ledger without its entries, and answer NO_SUCH_ENTRY for
# them.
#
#     write(ledgers)   tombstones into the journal, and out of memory with the rest; True: they are durable
#     settle()         before a log is removed: every tombstone is durable when this returns, also if the journal was
#     full
#
# bookie/maintenance/garbage.py decides which ledgers are deleted. Bound: `TOMBSTONES_MAX` intervals in one group.
# Guarded by tests/bookie/store/test_compaction.py, tests/bookie/test_full_disk.py and the crash states
# (tests/crashes).


TOMBSTONES_MAX = 4096
"""Intervals of deleted ledgers in one group of the journal, which must fit into a block."""


class TombstoneWriter:
    """Writes the tombstones of one store. `sealed` waits until the journal has synced, or refused, what was enqueued
    before the call.
    """

    def __init__(
        self, journal: Journal, descriptors: LedgerDescriptors, memtable: Memtable, sealed: Callable[[],
        Awaitable[bool]],
        checkpoint: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._journal = journal
        self._descriptors = descriptors
        self._memtable = memtable
        self._sealed = sealed
        self._checkpoint = checkpoint
        self._batches = 0
        self._loose: set[int] = set()  # batches whose tombstones may be in memory alone
        self.counters = {"ledgers_deleted": 0}

    async def write(self, ledgers: list[int]) -> bool:
        """Writes tombstones. Returns False if the journal had no room for all of them: then they are in memory, and
        `write_pending` makes them durable.
        """
        spans = IntegerIntervals()
        for ledger in ledgers:
            spans.add(ledger, ledger)
        waiting = list(spans)
        while waiting:
            batch, waiting = waiting[:TOMBSTONES_MAX], waiting[TOMBSTONES_MAX:]
            self._batches += 1
            number = self._batches
            self._loose.add(number)
            for first, last in batch:
                self._journal.enqueue(RecordType.TOMBSTONE, first, last)
                self._descriptors.delete(first, last)
                for ledger in range(first, last + 1):
                    self._memtable.discard(ledger)
            if not await self._sealed():
                return False
            self._loose.discard(number)
        self.counters["ledgers_deleted"] += len(ledgers)
        return True

    async def write_pending(self) -> None:
        """Makes tombstones durable for which the journal had no room, by a checkpoint."""
        loose = set(self._loose)
        if loose:
            await self._checkpoint()  # the journal had no room for a tombstone: the ledger index must have it first
            self._loose -= loose
