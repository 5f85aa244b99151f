"""The claim of whole units: an atomic relay claims the rows that one transaction of the application wrote, or none of
them.

    rows = UnitClaim(connection, table, claim, phases).run()      in the order of their ids, unit by unit

A unit is taken when each of its rows may be claimed, and is locked: one that is parked, that waits for another attempt
or whose destination takes nothing keeps all of it. **Order.** What is passed over keeps its keys: a later unit with a
row of one of these keys is passed over, too. So the rows of a key leave in the order of their ids.

Units that cannot be taken are looked at in each claim, at most WINDOWS of `rows_max` rows: what is after so many of
them waits with them. Guards: tests/client/outbox/test_units.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, or_, select

from .core.values import Claim

WINDOWS = 10
CHUNK = 500
"""Ids of one statement: SQLite had a limit of 999 parameters."""
Where = Sequence[ColumnElement[bool]]


class UnitClaim:
    """The claim of whole units. `phases`: what may be claimed, in the order in which it is looked for."""

    def __init__(self, connection: Connection, rows: Table, claim: Claim, phases: Sequence[Where]) -> None:
        self._connection, self._rows, self._claim, self._phases = connection, rows, claim, phases
        self._taken: list[Any] = []
        self._size = 0
        self._seen: set[int] = set()
        self._kept: set[tuple[str, str]] = set()  # topic and key of what was passed over

    def run(self) -> list[Any]:
        for phase in self._phases:
            after = 0
            for _ in range(WINDOWS):
                heads = self._heads(phase, after)
                if not heads or not self._look(heads) or self._taken:
                    break
                after = heads[-1].id
            if self._taken:
                break
        return self._taken

    def _heads(self, phase: Where, after: int) -> Sequence[Any]:
        columns = self._rows.c
        query = select(columns.id, columns.unit).where(*phase, columns.id > after).order_by(columns.id)
        return self._connection.execute(query.limit(self._claim.rows_max)).all()

    def _look(self, heads: Sequence[Any]) -> bool:
        """Takes what can be taken. False: there is no more room."""
        whole = self._whole(heads)
        free = self._free([row.id for rows in whole.values() for row in rows])
        for head in heads:
            rows = whole.pop((head.unit, None if head.unit is not None else head.id), None)
            if rows is None:
                continue  # it was looked at
            places = {(row.topic, row.key) for row in rows if row.key is not None}
            if not free.issuperset(row.id for row in rows) or places & self._kept:
                self._kept |= places
            elif not self._take(rows):
                return False
        return True

    def _take(self, rows: Sequence[Any]) -> bool:
        claim, size = self._claim, sum(row.size for row in rows)
        is_large = len(self._taken) + len(rows) > claim.rows_max or self._size + size > claim.bytes_max
        if self._taken and is_large:
            return False
        self._taken += rows
        self._size += size
        return True

    def _whole(self, heads: Sequence[Any]) -> dict[tuple[int | None, int | None], list[Any]]:
        """Returns all rows of the units, and rows without one, by unit or id."""
        columns = self._rows.c
        units = list(dict.fromkeys(each.unit for each in heads if each.unit not in {None, *self._seen}))
        self._seen.update(units)
        found: dict[tuple[int | None, int | None], list[Any]] = {}
        of = ((columns.unit, units), (columns.id, [each.id for each in heads if each.unit is None]))
        for column, values in of:
            for some in chunks(values):
                query = select(
                    columns.id, columns.unit, columns.topic, columns.key, columns.key_hash, columns.size
                ).where(column.in_(some)).order_by(columns.id)  # fmt: skip
                for row in self._connection.execute(query):
                    found.setdefault((row.unit, None if row.unit is not None else row.id), []).append(row)
        return found

    def _free(self, ids: Sequence[int]) -> set[int]:
        """Locks and returns the rows that may be claimed."""
        rows = self._rows
        may_be = or_(*(and_(*phase) for phase in self._phases))
        free: set[int] = set()
        for some in chunks(ids):
            query = select(rows.c.id).where(rows.c.id.in_(some), may_be).with_for_update(skip_locked=True, of=rows)
            free.update(self._connection.scalars(query))
        return free


def chunks(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    return (ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK))
