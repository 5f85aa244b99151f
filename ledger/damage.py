"""Reports of damaged copies: `/damaged/<ledger>/<bookie>` lists the entries that need another copy at that bookie.

Two kinds of process write the same record. Each changes only its own part, by compare-and-set (`store_report`), and
removes the record when nothing is left:

    a reader or recoverer that got bytes which are not the entry   adds it, once per entry (`DamageReports`)
    the bookie itself (bookie/maintenance/scrub.py)                adds what it has quarantined, removes what is
                                                                   repaired; it also quarantines what a reader added,
                                                                   so that its repairer checks and restores it

A report never delays a read: `add` only queues, one task writes. At most WAITING_MAX entries wait and KNOWN_MAX are
remembered as reported; more are counted in `dropped`, and reported when they are read the next time. So is a report
that the metadata did not accept. Guards: tests/ledger/test_damage.py.
"""

from __future__ import annotations

import asyncio
import logging

from ..metadata import paths
from ..metadata.records import DamagedEntriesRecord
from ..metadata.store import ABSENT, MetadataStore, get_record, put_record
from ..proto.errors import BadVersion, MagnetarError
from ..runtime.tasks import Tasks

_LOG = logging.getLogger("magnetar.ledger")

Ranges = tuple[tuple[int, int], ...]
"""Ranges of entry ids, each (first, last), ascending."""

RANGES_MAX = 20_000
"""Most ranges in a record: 840 kB, as a metadata value has at most 1 MiB. Further ones are reported when these are
repaired."""
WAITING_MAX = 1000
KNOWN_MAX = 10_000
"""Most entries that are remembered, about 200 bytes each. More damage is a dead disk, which the bookie itself finds."""


def subtract_ranges(ranges: Ranges, others: Ranges) -> Ranges:
    """Returns the entries of `ranges` that are in none of `others`, as ranges."""
    gaps = union_ranges(others, ())
    left: list[tuple[int, int]] = []
    at = 0
    for first, last in union_ranges(ranges, ()):
        while at < len(gaps) and gaps[at][1] < first:
            at += 1
        gap = at
        while gap < len(gaps) and gaps[gap][0] <= last:
            if first < gaps[gap][0]:
                left.append((first, gaps[gap][0] - 1))
            first = gaps[gap][1] + 1
            gap += 1
        at = max(at, gap - 1)
        if first <= last:
            left.append((first, last))
    return tuple(left)


def union_ranges(ranges: Ranges, others: Ranges) -> Ranges:
    """Returns the union of both as ascending ranges, of which none touches the next one."""
    both: list[tuple[int, int]] = []
    for first, last in sorted((*ranges, *others)):
        if both and first <= both[-1][1] + 1:
            both[-1] = both[-1][0], max(both[-1][1], last)
        else:
            both.append((first, last))
    return tuple(both)


async def store_report(metadata: MetadataStore, ledger: int, bookie: str, now: Ranges, before: Ranges = ()) -> Ranges:
    """Replaces in the ledger's record for `bookie` the ranges `before`, which the caller added earlier, by `now`.
    Ranges that others added stay. Returns the stored ranges, at most RANGES_MAX."""
    path = paths.damaged_copies_of_bookie(ledger, bookie)
    while True:
        found = await get_record(metadata, path, DamagedEntriesRecord)
        said, version = ((), ABSENT) if found is None else (found[0].ranges, found[1])
        ranges = union_ranges(subtract_ranges(said, before), now)[:RANGES_MAX]
        if ranges == said:
            return ranges
        try:
            if ranges:
                record = DamagedEntriesRecord(ledger_id=ledger, bookie=bookie, ranges=ranges)
                await put_record(metadata, path, record, version)
            else:
                await metadata.delete(path, version)
        except BadVersion:
            continue  # another process wrote first: read again
        return ranges


class DamageReports:
    """Reports damaged copies that the readers and recoverers of one client find. `dropped` counts the entries that were
    not queued."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._told: dict[tuple[int, str, int], None] = {}
        self._waiting: dict[tuple[int, str], list[int]] = {}
        self._tasks = Tasks()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self.dropped = 0

    def add(self, ledger: int, bookie: str, entry: int) -> None:
        """Queues a report: the bookie sent bytes that are not this entry."""
        if self._closed or (ledger, bookie, entry) in self._told:
            return
        if len(self._told) >= KNOWN_MAX or sum(map(len, self._waiting.values())) >= WAITING_MAX:
            self.dropped += 1
            return
        self._told[ledger, bookie, entry] = None
        self._waiting.setdefault((ledger, bookie), []).append(entry)
        if self._writer is None or self._writer.done():
            self._writer = self._tasks.spawn(self._write(), "damage-reports")

    async def _write(self) -> None:
        while self._waiting:
            (ledger, bookie), entries = next(iter(self._waiting.items()))
            del self._waiting[ledger, bookie]
            try:
                await store_report(self._metadata, ledger, bookie, tuple((entry, entry) for entry in entries))
            except (MagnetarError, ValueError) as error:  # ValueError: the stored record is damaged
                _LOG.warning("ledger %d: damage at bookie %s cannot be reported: %s", ledger, bookie, error)
                for entry in entries:
                    self._told.pop((ledger, bookie, entry), None)

    async def wait_written(self) -> None:
        """Waits until every report that was queued before this call was written, or was given up after errors."""
        await self._tasks.drain()

    async def close(self) -> None:
        self._closed = True
        await self._tasks.close()
