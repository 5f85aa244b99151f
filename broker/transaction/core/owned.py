"""The values that belong to a role: names and sinks by their owner, and whose the ids that were committed are.

    table.find(owner, name)      what the role has under the name; else what no role has
    kept.add(txn, owner)         it is committed
    kept.is_of_another(…)        it is committed, and another role began it

A name is of a role: two roles use one name for two things, and neither learns of the other's. The owner "" is no role:
a caller of a cluster without security, or of a record that an earlier version wrote, which named no owner. What "" has
is found by each role, and changed by none: a role that changes it has its own from then on.
Guards: tests/broker/transaction/core/test_owners.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from pyroaring import BitMap

from .records import Kept

Value = TypeVar("Value")
Key = tuple[str, str]
"""A role, and a name of it."""
LOW_BITS = 32
_LOW = (1 << LOW_BITS) - 1
Ids = dict[int, BitMap]
"""Upper bits of ids → a bitmap of their lower ones."""


class OwnedTable(Generic[Value]):
    """Values by role and name."""

    __slots__ = ("_counts", "_values")

    def __init__(self) -> None:
        self._values: dict[Key, Value] = {}
        self._counts: dict[str, int] = {}

    def find(self, owner: str, name: str) -> Value | None:
        found = self._values.get((owner, name))
        return found if found is not None or not owner else self._values.get(("", name))

    def key(self, owner: str, name: str) -> Key:
        """Returns the key of what `find` finds."""
        return (owner, name) if (owner, name) in self._values else ("", name)

    def put(self, owner: str, name: str, value: Value) -> None:
        if (owner, name) not in self._values:
            self._counts[owner] = self._counts.get(owner, 0) + 1
        self._values[owner, name] = value

    def remove(self, owner: str, name: str) -> None:
        if self._values.pop((owner, name), None) is None:
            return
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]

    def has_room(self, owner: str, name: str, most: int, most_of_role: int) -> bool:
        """Whether the role has the name, or may have one more. Callers without a role have no bound of a role."""
        if (owner, name) in self._values:
            return True
        return len(self._values) < most and (not owner or self._counts.get(owner, 0) < most_of_role)

    def items(self) -> Iterable[tuple[Key, Value]]:
        return self._values.items()

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)


class KeptCommits:
    """Ids that are committed and not forgotten. In a cluster without roles there is one bitmap of all."""

    __slots__ = ("_free", "_of", "_owned")

    def __init__(self) -> None:
        self._free: Ids = {}  # of no role
        self._owned: Ids = {}  # of any role
        self._of: dict[str, Ids] = {}

    def add(self, txn: int, owner: str) -> None:
        if not owner:
            _add(self._free, txn)
            return
        _add(self._owned, txn)
        _add(self._of.setdefault(owner, {}), txn)

    def __contains__(self, txn: int) -> bool:
        return _has(self._free, txn) or _has(self._owned, txn)

    def is_of_another(self, txn: int, owner: str) -> bool:
        return _has(self._owned, txn) and not _has(self._of.get(owner, {}), txn)

    def forget(self, below: int) -> None:
        for ids in (self._free, self._owned, *self._of.values()):
            _forget(ids, below)
        self._of = {owner: ids for owner, ids in self._of.items() if ids}

    def restore(self, record: Kept) -> None:
        everything, owned = BitMap.deserialize(record.committed), BitMap()
        for owner, ids in record.owners.items():
            found = self._of.setdefault(owner, {})[record.high] = BitMap.deserialize(ids)
            owned |= found
        if free := everything - owned:
            self._free[record.high] = free
        if owned:
            self._owned[record.high] = owned

    def snapshot(self) -> Iterator[Kept]:
        """Yields the records. `committed` has those of all: it is what an earlier version reads."""
        for high in dict.fromkeys((*self._free, *self._owned)):
            everything = self._free.get(high, BitMap()) | self._owned.get(high, BitMap())
            owners = {owner: ids[high].serialize() for owner, ids in self._of.items() if high in ids}
            yield Kept(high, everything.serialize(), owners)

    def listed(self) -> dict[str, set[int]]:
        """Returns the ids by owner."""
        found = {"": self._free, **self._of}
        listed = {
            owner: {high << LOW_BITS | low for high, lows in ids.items() for low in lows}
            for owner, ids in found.items()
        }  # fmt: skip
        return {owner: ids for owner, ids in listed.items() if ids}


def _add(ids: Ids, txn: int) -> None:
    ids.setdefault(txn >> LOW_BITS, BitMap()).add(txn & _LOW)


def _has(ids: Ids, txn: int) -> bool:
    found = ids.get(txn >> LOW_BITS)
    return found is not None and txn & _LOW in found


def _forget(ids: Ids, below: int) -> None:
    high, low = below >> LOW_BITS, below & _LOW
    for each in [each for each in ids if each < high]:
        del ids[each]
    if high in ids:
        ids[high].remove_range(0, low)
        if not ids[high]:
            del ids[high]
