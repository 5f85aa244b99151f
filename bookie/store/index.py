"""Where entries are: extents of all logs in memory (about 400 bytes each), their tables loaded when needed.

Per ledger the extents are sorted by first entry; a lookup bisects
to the last extent that begins at or before the entry and goes back while an earlier one may still reach it (an entry
that was replayed after a crash stands in two extents; both copies are good). Tables are kept in an LRU bounded by
bytes. `add` and `drop_log` are synchronous, so that readers see a flush or a deletion at once and whole.

The files are format/index.py, one per log, next to it; reading and writing happens in workers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from ..format.index import Extent, Table


class Place(NamedTuple):
    """An extent, the log it is in, and where its table is in the log's index file."""

    log: int
    extent: Extent
    table_offset: int


class _LedgerPlaces:
    __slots__ = ("firsts", "places", "reach")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.places: list[Place] = []
        self.reach: list[int] = []  # largest `last` of all extents up to here

    def insert(self, place: Place) -> None:
        at = bisect_right(self.firsts, place.extent.first)
        self.firsts.insert(at, place.extent.first)
        self.places.insert(at, place)
        self.reach.insert(at, 0)
        for i in range(at, len(self.places)):
            reach = max(self.reach[i - 1] if i else -1, self.places[i].extent.last)
            if i > at and self.reach[i] == reach:
                break
            self.reach[i] = reach


class Index:
    def __init__(self, tables_bytes_max: int) -> None:
        self._ledgers: dict[int, _LedgerPlaces] = {}
        self._logs: dict[int, dict[int, None]] = {}
        self._tables: OrderedDict[tuple[int, int], Table] = OrderedDict()
        self._tables_bytes = 0
        self._tables_bytes_max = tables_bytes_max

    def add(self, places: list[Place]) -> None:
        for place in places:
            ledger = place.extent.ledger
            found = self._ledgers.get(ledger)
            if found is None:
                found = self._ledgers[ledger] = _LedgerPlaces()
            found.insert(place)
            self._logs.setdefault(place.log, {})[ledger] = None

    def candidates(self, ledger: int, entry: int) -> Iterator[Place]:
        """Extents that may hold the entry, the best first. Taken before any await: a copy."""
        found = self._ledgers.get(ledger)
        if found is None:
            return
        at = bisect_right(found.firsts, entry) - 1
        while at >= 0 and found.reach[at] >= entry:
            if found.places[at].extent.last >= entry:
                yield found.places[at]
            at -= 1

    def has_ledger(self, ledger: int) -> bool:
        return ledger in self._ledgers

    def logs(self) -> list[int]:
        return sorted(self._logs)

    def ledgers_of(self, log: int) -> list[int]:
        return sorted(self._logs.get(log, ()))

    def drop_log(self, log: int) -> None:
        for ledger in self._logs.pop(log, {}):
            old = self._ledgers.pop(ledger)
            kept = [place for place in old.places if place.log != log]
            if kept:
                self._ledgers[ledger] = new = _LedgerPlaces()
                for place in kept:
                    new.insert(place)
        for key in [key for key in self._tables if key[0] == log]:
            self._forget(key)

    # ------------------------------------------------------------------------------------ tables
    def table(self, place: Place) -> Table | None:
        key = (place.log, place.table_offset)
        table = self._tables.get(key)
        if table is not None:
            self._tables.move_to_end(key)
        return table

    def keep_table(self, place: Place, table: Table) -> None:
        key = (place.log, place.table_offset)
        if key in self._tables:
            return
        self._tables[key] = table
        self._tables_bytes += place.extent.table_bytes
        while self._tables_bytes > self._tables_bytes_max and len(self._tables) > 1:
            self._forget(next(iter(self._tables)))

    def _forget(self, key: tuple[int, int]) -> None:
        table = self._tables.pop(key)
        self._tables_bytes -= 4 * (len(table.deltas) + len(table.offsets))

    def check(self) -> None:
        """Sorted by first entry; `reach` is the running maximum; each log's ledgers are those of its extents."""
        for found in self._ledgers.values():
            assert found.places
            assert found.firsts == sorted(found.firsts)
            running = -1
            for place, reach in zip(found.places, found.reach, strict=True):
                running = max(running, place.extent.last)
                assert reach == running
                assert place.extent.ledger in self._logs[place.log]
        assert self._tables_bytes == sum(4 * (len(t.deltas) + len(t.offsets)) for t in self._tables.values())

    def statistics(self) -> dict[str, int]:
        return {
            "index_ledgers": len(self._ledgers),
            "index_extents": sum(len(found.places) for found in self._ledgers.values()),
            "index_tables_bytes": self._tables_bytes,
        }


def find(place: Place, table: Table, entry: int) -> int | None:
    """The number of the entry's record in the extent; None: it is in a gap."""
    delta = entry - place.extent.first
    at = bisect_left(table.deltas, delta)
    return at if at < len(table.deltas) and table.deltas[at] == delta else None
