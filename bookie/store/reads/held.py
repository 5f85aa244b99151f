"""The lookup of the entries that the store holds durably of a ledger, without a read of their data: memtable, then the
index.

A repair that gets the answer "held" makes no other copy, names this bookie in the ledger's record, and lets the last
other copy be deleted (bookie/repair). So an entry is held when it is in the index, which a mark covers, or when it is
in memory and the journal is synced after the lookup: `within` seals before it returns. An entry for which the journal
had no room is not held until a checkpoint has moved it into the log (`Memtable.refused_of`), even if an older copy is
in a log.

The lookup takes memory first and the index next. A flush moves entries from memory to the index, and after a compaction
the index is read again (`Index.generation`), so no entry is missed. Extents without gaps cost a read of their head;
those of a striped ledger cost their table. An extent whose table is damaged counts as not held. Quarantined entries are
not held, unless memory has them again, which is how they are repaired.
Guards: tests/bookie/store/test_held.py.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ....runtime.workers import Worker
from ..entrylog.files import EntryLogReader
from ..index.index import ExtentPlace, Index
from ..intervals import Intervals
from ..ledgers.descriptors import Descriptors
from ..memtable import Memtable
from .search import load_run

_LOG = logging.getLogger("magnetar.bookie.store.reads")


class HeldEntries:
    """The lookup of held entries. `sealed`: the journal has, or refused, what was enqueued before the call."""

    def __init__(
        self, descriptors: Descriptors, memtable: Memtable, index: Index, reader: EntryLogReader, worker: Worker,
        sealed: Callable[[], Awaitable[bool]],
    ) -> None:  # fmt: skip
        self._sealed = sealed
        self._descriptors = descriptors
        self._memtable = memtable
        self._index = index
        self._reader = reader
        self._worker = worker

    async def within(self, ledger: int, first: int, last: int) -> Intervals:
        """Returns the held entries of `first … last`; none of a deleted ledger. Waits for the journal, if memory has
        some."""
        while True:
            if ledger in self._descriptors.tombstones:
                return Intervals()
            generation = self._index.generation
            memory = self._in_memory(ledger, first, last)
            found = Intervals()
            for number in self._index.logs_of(ledger):
                try:
                    extents, _ = await load_run(self._index, self._reader, self._worker, number, ledger)
                except OSError as error:  # no descriptor is free: not held, as far as it is known
                    _LOG.warning("cannot read the index of log %d: %s", number, error)
                    continue
                for place in extents:
                    if place.extent.first <= last and place.extent.last >= first:
                        await self._add(found, place, first, last)
            if generation == self._index.generation:
                break
        for run in self._descriptors.quarantined_of(ledger):
            found.remove(*run)
        for run in memory:
            found.add(*run)
        if len(memory):
            await self._sealed()  # they were enqueued before the look
        for run in self._memtable.refused_of(ledger):
            found.remove(*run)
        return found

    def _in_memory(self, ledger: int, first: int, last: int) -> Intervals:
        found = Intervals()
        for table in (self._memtable.flushing, self._memtable.active):
            entries = {} if table is None else table.ledgers.get(ledger, {})
            for entry in sorted(entry for entry in entries if first <= entry <= last):
                found.add(entry, entry)
        return found

    async def _add(self, found: Intervals, place: ExtentPlace, first: int, last: int) -> None:
        extent = place.extent
        if extent.entries == extent.last - extent.first + 1:
            found.add(max(first, extent.first), min(last, extent.last))
            return
        table = self._index.table(place)
        if table is None:
            try:
                table = await self._worker.run(self._reader.read_table, place)
            except OSError as error:
                _LOG.error("cannot read the index of log %d: %s", place.log, error)
            if table is None:
                return
            self._index.keep_table(place, table)
        for delta in table.deltas:
            if first <= extent.first + delta <= last:
                found.add(extent.first + delta, extent.first + delta)
