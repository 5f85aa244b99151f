"""Looking an entry of a ledger up by what never falls along it (index, time), where entries are lost.

Rules:
- What an operator passed over (`topics skip-lost`) is left out: the answer is the next entry that exists.
- A lost entry that was not passed over is skipped by the search as long as the answer does not depend on it. Where it
  does, the answer is `DataLost` with the range: `Found.lost` are the lost entries directly before the one that was
  found, which may be those that are looked for.
- Unavailable is not lost: it ends the search, and who asked may ask again.
Bounds: LOST_LOOKED_AT lost entries in a row are looked at, each costs a question to every replica.
Guarding test: tests/broker/log/test_lookup.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ....proto.errors import DataLost
from ..cache import StoredEntry

LOST_LOOKED_AT = 100
"""Entries after a lost one that are read to find one that is there."""

Run = tuple[int, int]
"""The first and the last of entries of a ledger."""
EntryOf = Callable[[int], Awaitable[StoredEntry]]
"""Reads an entry of the ledger. DataLost."""


class Found(NamedTuple):
    """The result of a search: the entry, and the lost run before it."""

    entry: StoredEntry | None
    lost: Run | None = None  # directly before it, or at the end of the ledger


async def first_reached(
    last: int, entry_of: EntryOf, reached: Callable[[StoredEntry], bool],
    passed_over: Callable[[int], Run | None] = lambda entry_id: None,
) -> Found:  # fmt: skip
    """The first entry that is there and for which `reached` is true; it is true for all after it. DataLost: more than
    LOST_LOOKED_AT in a row are lost."""
    lost: set[int] = set()

    async def there(first: int, end: int) -> StoredEntry | None:
        """Returns the first entry that can be read from `first` to `end`; None: there is none."""
        entry_id, looked = first, 0
        while entry_id <= end:
            run = passed_over(entry_id)
            if run is not None:
                entry_id = run[1] + 1
                continue
            if entry_id not in lost:
                try:
                    return await entry_of(entry_id)
                except DataLost:
                    lost.add(entry_id)
                    looked += 1
                    if looked > LOST_LOOKED_AT:
                        raise
            entry_id += 1
        return None

    low, high, found = 0, last, None
    while low <= high:
        middle = (low + high) // 2
        entry = await there(middle, high)
        if entry is not None and not reached(entry):
            low = entry.position[1] + 1
        else:
            found, high = entry or found, middle - 1  # none is there from the middle up to the entry
    return Found(found, _before(last + 1 if found is None else found.position[1], lost, passed_over))


def _before(entry_id: int, lost: set[int], passed_over: Callable[[int], Run | None]) -> Run | None:
    """The first and the last lost entry of the missing ones directly before the entry; None: none of them was lost."""
    found: list[int] = []
    at = entry_id - 1
    while at >= 0:
        run = passed_over(at)
        if run is None and at not in lost:
            break
        if run is None:
            found.append(at)
        at = (at if run is None else run[0]) - 1
    return (found[-1], found[0]) if found else None


def data_lost(ledger_id: int, run: Run, about: str = "") -> DataLost:
    """Returns the error for entries that every replica lost. `about`: the subscription or topic, with a colon."""
    first, last = run
    return DataLost(
        f"{about}entries {first} to {last} of ledger {ledger_id} are lost: every replica is certain to lack them. "
        "Restore a bookie that has them; or pass over them on purpose: for all with "
        "`magnetar topics skip-lost`, for one subscription alone with `magnetar subscriptions reset`",
        ledger=ledger_id, first=first, last=last,
    )  # fmt: skip
