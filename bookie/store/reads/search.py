"""The search for an entry in the index when pages must be loaded: the order of the logs, and what damage means.

Entries of a ledger mostly ascend with the numbers of the logs, so the logs are bisected first: a hit needs a few of
them. Any good copy counts. A miss needs all logs: the others follow, newest first. A page that cannot be read or does
not match its checksum makes `damaged` true: then the answer must not be NO_SUCH_ENTRY. Pages are read when needed, in
the read worker, in slices of `PAGES_MAX`, so that other reads run in between.

Guarded by tests/bookie/store/index/test_index.py.
"""

from __future__ import annotations

import asyncio
import logging

from ....runtime.workers import Worker
from .. import disk
from ..entrylog.files import EntryLogReader
from ..index.index import ExtentPlace, Index, Missing, Run

_LOG = logging.getLogger("magnetar.bookie.store.reads")

PAGES_MAX = 64


class Search:
    """A search for one entry. `next` is called until it returns None: then all places were searched."""

    def __init__(self, index: Index, reader: EntryLogReader, worker: Worker, ledger: int, entry: int) -> None:
        self._index = index
        self._reader = reader
        self._worker = worker
        self._ledger = ledger
        self._entry = entry
        self._logs = index.logs_of(ledger)
        self._low, self._high = 0, len(self._logs)  # where the bisection goes on
        self._found: list[ExtentPlace] = []
        self.damaged = False

    async def next(self) -> ExtentPlace | None:
        """The next extent whose range holds the entry, the likely ones first."""
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

    def _narrow(self, at: int, run: Run) -> None:
        """Narrows the search by a run that was loaded. `at`: the log after the one that was asked."""
        if run.first is None or self._entry < run.first:
            self._high = at
        elif self._entry > run.last:
            self._low = at
        else:
            self._low = self._high

    async def _run(self, number: int) -> Run:
        run, whole = await load_run(self._index, self._reader, self._worker, number, self._ledger)
        self.damaged = self.damaged or not whole
        return run


async def load_run(index: Index, reader: EntryLogReader, worker: Worker, number: int, ledger: int) -> tuple[Run, bool]:
    """The extents of the ledger in that log as far as they can be read; it is kept when that is all (True).

    Who asks while they are loaded waits for that: a recovery reads an entry and the next one at once. OSError: no
    descriptor is free.
    """
    missing = index.lookup(number, ledger)
    if isinstance(missing, Missing) and (other := index.loading.get((number, ledger))) is not None:
        await asyncio.wait([other])
        missing = index.lookup(number, ledger)  # of damaged pages, or a group that came meanwhile, it is not all
    if isinstance(missing, Run):
        return missing, True
    loaded = index.loading[number, ledger] = asyncio.get_running_loop().create_future()
    try:
        return await _load(index, reader, worker, missing)
    finally:
        loaded.set_result(None)
        if index.loading.get((number, ledger)) is loaded:
            del index.loading[number, ledger]


async def _load(index: Index, reader: EntryLogReader, worker: Worker, missing: Missing) -> tuple[Run, bool]:
    found: list[ExtentPlace] = []
    whole = True
    for first in range(0, len(missing.pages), PAGES_MAX):
        pages = missing.pages[first : first + PAGES_MAX]
        try:
            places, bad = await worker.run(reader.read_pages, missing.log, missing.ledger, pages)
        except OSError as error:
            disk.raise_busy(error)
            _LOG.error("cannot read the index of log %d: %s", missing.log, error)
            places, bad = [], len(pages)
        found += places
        whole = whole and not bad
    run = missing.complete(found)
    if whole:
        index.keep(run)
    return run, whole
