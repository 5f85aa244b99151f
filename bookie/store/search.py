"""The search for an entry in the index when pages must be loaded: the order of the logs, and what damage means.

Entries of a ledger mostly ascend with the numbers of the logs, so the logs are bisected first: a hit needs a few of
them. Any good copy counts. A miss needs all logs: the others follow, newest first. A page that cannot be read or does
not match its checksum makes `damaged` true: then the answer must not be NO_SUCH_ENTRY. Pages are read when needed, in
the read worker, in slices of `PAGES_MAX`, so that other reads run in between.

`StoredEntryFinder` finds which entries of a range the bookie has. Guarded by tests/bookie/store/test_index.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...runtime.threads import Worker
from . import disk
from .entrylog.files import EntryLogReader
from .index import EntryLogIndex, ExtentPlace, LedgerExtents, MissingIndexPages
from .index_files import LedgerDescriptors
from .memtable import IntegerIntervals, Memtable

_LOG = logging.getLogger("magnetar.bookie.store.reads")

PAGES_MAX = 64


class EntrySearch:
    """The search for one entry. `next_extent_to_search` is called until it returns None: then every place was
    searched."""

    def __init__(self, index: EntryLogIndex, reader: EntryLogReader, worker: Worker, ledger: int, entry: int) -> None:
        self._index = index
        self._reader = reader
        self._worker = worker
        self._ledger = ledger
        self._entry = entry
        self._logs = index.logs_of(ledger)
        self._low, self._high = 0, len(self._logs)  # where the bisection goes on
        self._found: list[ExtentPlace] = []
        self.damaged = False

    async def next_extent_to_search(self) -> ExtentPlace | None:
        """Returns the next extent whose range includes the entry, the likeliest extent first. Returns None after the
        last one."""
        while not self._found:
            if not self._logs:
                return None
            bisecting = self._low < self._high
            at = (self._low + self._high) // 2 if bisecting else len(self._logs) - 1
            run = await self._run(self._logs.pop(at))
            self._found = run.places(self._entry)
            self._high -= bisecting
            if bisecting:
                self._narrow(at, run)
        return self._found.pop(0)

    def _narrow(self, at: int, run: LedgerExtents) -> None:
        """Narrows the bisection by `run`, which was loaded. `at` is where the searched log was among the logs."""
        if run.first is None or self._entry < run.first:
            self._high = at
        elif self._entry > run.last:
            self._low = at
        else:
            self._low = self._high

    async def _run(self, number: int) -> LedgerExtents:
        run, whole = await load_run(self._index, self._reader, self._worker, number, self._ledger)
        self.damaged = self.damaged or not whole
        return run


async def load_run(
    index: EntryLogIndex, reader: EntryLogReader, worker: Worker, number: int, ledger: int
) -> tuple[LedgerExtents, bool]:
    """Returns the extents of the ledger in that log that can be read, and whether these are all of its extents. Caches
    a complete result. A second caller for the same ledger waits while the first one loads them, because a recovery
    reads an entry and the next one at the same time. Raises OSError if no file descriptor is free."""
    missing = index.find_run(number, ledger)
    if isinstance(missing, MissingIndexPages) and (other := index.loading.get((number, ledger))) is not None:
        await asyncio.wait([other])
        missing = index.find_run(number, ledger)  # of damaged pages, or a group that came meanwhile, it is not all
    if isinstance(missing, LedgerExtents):
        return missing, True
    loaded = index.loading[number, ledger] = asyncio.get_running_loop().create_future()
    try:
        return await _load(index, reader, worker, missing)
    finally:
        loaded.set_result(None)
        if index.loading.get((number, ledger)) is loaded:
            del index.loading[number, ledger]


async def _load(
    index: EntryLogIndex, reader: EntryLogReader, worker: Worker, missing: MissingIndexPages
) -> tuple[LedgerExtents, bool]:
    found: list[ExtentPlace] = []
    whole = True
    for first in range(0, len(missing.pages), PAGES_MAX):
        pages = missing.pages[first : first + PAGES_MAX]
        try:
            places, bad = await worker.run(reader.read_pages, missing.log, missing.ledger, pages)
        except OSError as error:
            disk.raise_if_no_descriptor(error)
            _LOG.error("cannot read the index of log %d: %s", missing.log, error)
            places, bad = [], len(pages)
        found += places
        whole = whole and not bad
    run = missing.complete(found)
    if whole:
        index.add_run(run)
    return run, whole


# ---------------------------------------------------------------------------------------------------------- held
# The lookup of the entries that the store holds durably of a ledger, without a read of their data: memtable, then the
# index.
#
# A repair that gets the answer "held" makes no other copy, names this bookie in the ledger's record, and lets the last
# other copy be deleted (bookie/maintenance). So an entry is held when it is in the index, which a mark covers, or when
# it is
# in memory and the journal is synced after the lookup: `find_held` seals before it returns. An entry for which the
# journal had no room is not held until a checkpoint has moved it into the log (`Memtable.refused_runs_of_ledger`), even
# if an older copy is in a log.
#
# The lookup takes memory first and the index next. A flush moves entries from memory to the index, and after a
# compaction the index is read again (`EntryLogIndex.generation`), so no entry is missed. Extents without gaps cost a
# read of
# their head; those of a striped ledger cost their table. An extent whose table is damaged counts as not held.
# Quarantined entries are not held, unless memory has them again, which is how they are repaired. Guards:
# tests/bookie/store/test_held.py.


class StoredEntryFinder:
    """Finds which entries the bookie has. `sealed` waits until the journal has synced, or refused, what was enqueued
    before the call.
    """

    def __init__(
        self, descriptors: LedgerDescriptors, memtable: Memtable, index: EntryLogIndex, reader: EntryLogReader,
        worker: Worker,
        sealed: Callable[[], Awaitable[bool]],
    ) -> None:  # fmt: skip
        self._sealed = sealed
        self._descriptors = descriptors
        self._memtable = memtable
        self._index = index
        self._reader = reader
        self._worker = worker

    async def find_held(self, ledger: int, first: int, last: int) -> IntegerIntervals:
        """Returns which of the entries `first … last` are durable here; none if the ledger is deleted. Waits for the
        journal if some are in memory.
        """
        while True:
            if ledger in self._descriptors.tombstones:
                return IntegerIntervals()
            generation = self._index.generation
            memory = self._in_memory(ledger, first, last)
            found = IntegerIntervals()
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
        for run in self._memtable.refused_runs_of_ledger(ledger):
            found.remove(*run)
        return found

    def _in_memory(self, ledger: int, first: int, last: int) -> IntegerIntervals:
        found = IntegerIntervals()
        for table in (self._memtable.flushing, self._memtable.active):
            entries = {} if table is None else table.ledgers.get(ledger, {})
            for entry in sorted(entry for entry in entries if first <= entry <= last):
                found.add(entry, entry)
        return found

    async def _add(self, found: IntegerIntervals, place: ExtentPlace, first: int, last: int) -> None:
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
            self._index.add_table(place, table)
        for delta in table.deltas:
            if first <= extent.first + delta <= last:
                found.add(extent.first + delta, extent.first + delta)
