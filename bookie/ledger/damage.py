"""Reports of damaged copies: `/damaged/<ledger>/<bookie>` says which entries of a ledger want another copy there.

Two write the same record, so each changes its own part of it by compare-and-set (`report`), and removes the record when
nothing is left:

    a reader or recoverer that got bytes which are not the entry   adds it, once per entry (`DamageReports`)
    the bookie itself (bookie/scrub.py `Reports`)                  adds what it has quarantined, takes back what is
                                                                   whole again; what a reader added it quarantines too,
                                                                   so that its mender looks at it, and mends it

Never in the way of a read: `note` only queues, one task writes. At most WAITING_MAX wait and KNOWN_MAX are remembered
as told; beyond, they are counted as dropped: whoever reads the entry again reports it then. A report that the metadata
did not take is forgotten likewise. Guards: tests/bookie/ledger/test_damage.py.
"""

from __future__ import annotations

import asyncio
import logging

from ...metadata import paths
from ...metadata.records import DamagedEntriesRecord
from ...metadata.store import ABSENT, MetadataStore
from ...metadata.update import get_record, put_record
from ...proto.errors import BadVersion, MagnetarError
from ..store.intervals import Intervals

log = logging.getLogger(__name__)

Ranges = tuple[tuple[int, int], ...]
"""(first, last) of each, ascending."""

WAITING_MAX = 1000
KNOWN_MAX = 10_000
"""Entries, about 200 bytes each in memory. More damage than that is a dead disk, which the bookie itself finds."""


def without(ranges: Ranges, others: Ranges) -> Ranges:
    left = Intervals()
    for first, last in ranges:
        left.add(first, last)
    for first, last in others:
        left.remove(first, last)
    return tuple(left)


def together(ranges: Ranges, others: Ranges) -> Ranges:
    both = Intervals()
    for first, last in (*ranges, *others):
        both.add(first, last)
    return tuple(both)


async def report(metadata: MetadataStore, ledger: int, bookie: str, now: Ranges, before: Ranges = ()) -> Ranges:
    """Makes the record say `now` where it said `before`, and leaves what others said. What it says then."""
    path = paths.damaged(ledger, bookie)
    while True:
        found = await get_record(metadata, path, DamagedEntriesRecord)
        said, version = ((), ABSENT) if found is None else (found[0].ranges, found[1])
        ranges = together(without(said, before), now)
        if ranges == said:
            return ranges
        try:
            if ranges:
                record = DamagedEntriesRecord(ledger_id=ledger, bookie=bookie, ranges=ranges)
                await put_record(metadata, path, record, version)
            else:
                await metadata.delete(path, version)
        except BadVersion:
            continue  # somebody else was faster: that one got through
        return ranges


class DamageReports:
    """What the readers and recoverers of one client found."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._told: dict[tuple[int, str, int], None] = {}
        self._waiting: dict[tuple[int, str], list[int]] = {}
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self.dropped = 0

    def note(self, ledger: int, bookie: str, entry: int) -> None:
        """The bookie gave bytes that are not this entry."""
        if self._closed or (ledger, bookie, entry) in self._told:
            return
        if len(self._told) >= KNOWN_MAX or sum(map(len, self._waiting.values())) >= WAITING_MAX:
            self.dropped += 1
            return
        self._told[ledger, bookie, entry] = None
        self._waiting.setdefault((ledger, bookie), []).append(entry)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write(), name="damage-reports")

    async def _write(self) -> None:
        while self._waiting:
            (ledger, bookie), entries = next(iter(self._waiting.items()))
            del self._waiting[ledger, bookie]
            try:
                await report(self._metadata, ledger, bookie, tuple((entry, entry) for entry in entries))
            except (MagnetarError, ValueError) as error:  # ValueError: a damaged record stands there
                log.warning("ledger %d: damage at bookie %s cannot be reported: %s", ledger, bookie, error)
                for entry in entries:
                    self._told.pop((ledger, bookie, entry), None)

    async def flushed(self) -> None:
        """Returns when what was noted so far is written, or given up."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def close(self) -> None:
        self._closed = True
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
