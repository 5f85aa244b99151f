"""Tombstones of deleted ledgers: only when a ledger's tombstone is durable may its data be removed.

Rule (ledger protocol §2.6): no entry of a ledger is removed from a log before its tombstone is durable, in the journal
or in the ledger index. Else a start would find the ledger without its entries, and answer NO_SUCH_ENTRY for them.

    write(ledgers)   tombstones into the journal, and out of memory with the rest; True: they are durable
    settle()         before a log is removed: every tombstone is durable when this returns, also if the journal was full

bookie/maintenance/garbage.py decides which ledgers are deleted. Bound: `TOMBSTONES_MAX` intervals in one group.
Guarded by tests/bookie/store/test_compaction.py, tests/bookie/node/test_full_disk.py and the crash states
(tests/crashes).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...format.journal import RecordType
from ..intervals import Intervals
from ..journal.journal import Journal
from ..memtable import Memtable
from .descriptors import Descriptors

TOMBSTONES_MAX = 4096
"""Intervals of deleted ledgers in one group of the journal, which must fit into a block."""


class TombstoneWriter:
    """Writes the tombstones of one store. `sealed`: the journal has, or refused, what was enqueued before the call."""

    def __init__(
        self, journal: Journal, descriptors: Descriptors, memtable: Memtable, sealed: Callable[[], Awaitable[bool]],
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
        """Writes tombstones. False: the journal had no room for all of them; memory has them, and `settle` makes them
        durable."""
        spans = Intervals()
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
                    self._memtable.forget(ledger)
            if not await self._sealed():
                return False
            self._loose.discard(number)
        self.counters["ledgers_deleted"] += len(ledgers)
        return True

    async def settle(self) -> None:
        loose = set(self._loose)
        if loose:
            await self._checkpoint()  # the journal had no room for a tombstone: the ledger index must have it first
            self._loose -= loose
