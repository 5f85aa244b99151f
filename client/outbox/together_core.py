"""Rows of an atomic relay: whole units, and the one cluster transaction in flight. Pure; a part of relay_core.py.

A *unit* is the rows that one transaction of the application wrote, to any destinations. A *flight* is one transaction
of the cluster that publishes whole units, as many as one claim may have. So readers see all of a unit or nothing.

    units.add(rows)                    claimed rows; a unit is never claimed in part
    parts = units.start_transaction()  the next flight: the entries of each destination, in order
    units.take_stored() | put_back() | take_refused()     how it ended
    units.take_unstored()              units that are certainly not stored give their ids back

**One flight at a time**, in the order of the claims: a topic takes the sequence ids of a producer in their order, and
judges those of a flight only when the one before has ended there.

**Sure or not.** When a relay dies, or a commit gets no answer, a flight may be stored or not. What a destination has is
told when it is opened: `last`, the highest id in it, also of a transaction that may still be aborted. A unit with a row
above `last` is not stored, and never will be: its transaction lacks that row. A unit of which each row is at `last` or
below may be stored: it is sent again under its ids, an entry for each row, and the topics drop what they have. Such a
unit keeps its ids until it is known to be stored. Guard: tests/client/outbox/test_together.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from .destination_core import Destination, DestinationStatus, may_join_entry
from .values_core import NONE, ClaimedRow, RelaySettings

Unit = tuple[ClaimedRow, ...]
Parts = dict[str, tuple[tuple[ClaimedRow, ...], ...]]
"""Destination → its entries of a flight, each a group of rows."""


class AtomicUnits:
    """The units of an atomic relay that wait, and the units of its one cluster transaction in flight."""

    def __init__(self, settings: RelaySettings, destinations: Mapping[str, Destination]) -> None:
        self.queue: deque[Unit] = deque()
        self.in_flight: tuple[Unit, ...] = ()
        self._settings = settings
        self._at = destinations
        self._alone_to = NONE  # units up to this id are sent one by one: one of them was refused

    @property
    def row_count(self) -> int:
        """Returns the number of rows that wait. Rows in flight are not included: their destinations count them."""
        return sum(map(len, self.queue))

    def count_rows(self, destination: str) -> int:
        """Returns the number of rows that wait for `destination`; rows in flight are not included."""
        return sum(row.destination == destination for unit in self.queue for row in unit)

    def add(self, rows: Sequence[ClaimedRow]) -> None:
        """Adds claimed rows, which must be in the order of their sequence ids with the rows of each unit next to each
        other."""
        last: list[ClaimedRow] = []
        for row in rows:
            if last and (row.unit is None or row.unit != last[-1].unit):
                self.queue.append(tuple(last))
                last = []
            last.append(row)
        if last:
            self.queue.append(tuple(last))

    @property
    def may_claim(self) -> bool:
        """Returns True if more rows may be claimed: there is room for them, and no waiting unit may be stored
        already."""
        return self.row_count < self._settings.rows_per_claim and not any(map(self.may_be_stored, self.queue))

    def may_be_stored(self, unit: Unit) -> bool:
        return all(row.seq <= self._at[row.destination].last_open for row in unit)

    # ------------------------------------------------------------------------------ a flight
    def start_transaction(self) -> Parts:
        """Begins the next cluster transaction and returns its entries by destination. Returns an empty dict if one is
        in flight, no unit waits, or a destination of the first unit is not ready."""
        if self.in_flight:
            return {}
        chosen: list[Unit] = []
        rows = size = 0
        while self.queue and self._joins(chosen, rows, size):
            unit = self.queue.popleft()
            chosen.append(unit)
            rows, size = rows + len(unit), size + _size(unit)
        self.in_flight = tuple(chosen)
        parts: dict[str, list[ClaimedRow]] = {}
        for row in (row for unit in chosen for row in unit):
            parts.setdefault(row.destination, []).append(row)
        alone = {row.seq for unit in chosen if self.may_be_stored(unit) for row in unit}
        return {name: tuple(self._entries(each, alone)) for name, each in parts.items()}

    def _joins(self, chosen: Sequence[Unit], rows: int, size: int) -> bool:
        unit = self.queue[0]
        if any(self._at[row.destination].state is not DestinationStatus.READY for row in unit):
            return False
        if not chosen:
            return True
        settings = self._settings
        is_small = rows + len(unit) <= settings.rows_per_claim and size + _size(unit) <= settings.bytes_per_claim
        return is_small and unit[0].seq > self._alone_to

    def _entries(self, rows: Sequence[ClaimedRow], alone: set[int]) -> list[tuple[ClaimedRow, ...]]:
        entries: list[tuple[ClaimedRow, ...]] = []
        group: list[ClaimedRow] = []
        size = 0
        for row in rows:
            together = group and group[-1].seq not in alone and row.seq not in alone
            if group and not (together and may_join_entry(group, size, row, self._settings)):
                entries.append(tuple(group))
                group, size = [], 0
            group.append(row)
            size += row.size
        return [*entries, tuple(group)]

    # ------------------------------------------------------------------------------ how it ended
    def take_stored(self) -> list[ClaimedRow]:
        flight, self.in_flight = self.in_flight, ()
        return [row for unit in flight for row in unit]

    def put_back(self) -> None:
        """Puts the units in flight back to the front of the queue: they are sent again under the same ids."""
        self.queue.extendleft(reversed(self.in_flight))
        self.in_flight = ()

    @property
    def is_outcome_unknown(self) -> bool:
        """Whether the cluster transaction has a single unit that may be stored already: then a refusal does not show
        that it is not stored."""
        return len(self.in_flight) == 1 and self.may_be_stored(self.in_flight[0])

    def take_refused(self) -> Unit:
        """Removes and returns the unit that was refused. Returns an empty tuple if several units were in flight: they
        go back to the queue and are sent again one by one."""
        assert not self.is_outcome_unknown, "what may be stored is not given up"
        flight = self.in_flight
        self.put_back()
        if len(flight) > 1:
            self._alone_to = flight[-1][-1].seq
            return ()
        return self.queue.popleft()

    def take_unstored(self) -> list[ClaimedRow]:
        """Removes and returns all waiting rows, if none of them may be stored already. Else removes nothing and
        returns an empty list: one unit retains its ids, so the rows after it must retain theirs, too."""
        if any(map(self.may_be_stored, self.queue)):
            return []
        found = [row for unit in self.queue for row in unit]
        self.queue.clear()
        return found

    def is_blocked(self) -> bool:
        """Whether nothing is in flight and the first unit needs a destination that is closed for a pause (WAITS)."""
        needed = (self._at[row.destination].state for row in self.queue[0]) if self.queue else ()
        return not self.in_flight and any(each is DestinationStatus.WAITS for each in needed)

    def check(self) -> None:
        ids = [row.seq for unit in (*self.in_flight, *self.queue) for row in unit]
        assert ids == sorted(set(ids)), "units are in the order of their claims"
        flying: dict[str, list[ClaimedRow]] = {}
        for row in (row for unit in self.in_flight for row in unit):
            flying.setdefault(row.destination, []).append(row)
        found = {name: list(each.in_flight) for name, each in self._at.items() if each.in_flight}
        assert flying == found, "a destination has its part of the flight"


def _size(unit: Unit) -> int:
    return sum(row.size for row in unit)
