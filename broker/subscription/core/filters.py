"""The filters that keep an entry that was read from the policy, in this order; and the runs of chunks of a message
(`Chunk`, `ChunkRun`). A new reason is a new filter.

| filter | catches |
|---|---|
| `_acknowledged` | what is acknowledged |
| `_pending` | what is acknowledged in an open transaction |
| `_held_back` | what waits for its back-off, or for the dead letters |
| `_delayed` | what is known to have a later delivery time |

What has a later delivery time that is not known yet `assign` holds itself, after all of these. The dispatcher asks for
the filters once for each `assign`: those that can catch anything in it.
Guarding test: tests/broker/subscription/core/test_dispatch_walk.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ....proto.names import Position
from .cursor import Cursor
from .delays import DelayIndex
from .policy import Entry, Policy
from .redelivery_backoff import BackoffQueue


class SkipReason(enum.Enum):
    """The reason why the policy does not get an entry that was read."""

    PASSED = "it is outstanding, or done"
    NOT_ITS_TURN = "another entry comes first: it is read again"
    ACKNOWLEDGED = "it is acknowledged"
    PENDING = "it is acknowledged in an open transaction"
    HELD_BACK = "it comes when its back-off has passed, or goes to the dead letters"
    NOT_DUE = "it comes when it is due"


Filter = Callable[[Entry, bool], SkipReason | None]
"""(entry, whether it waited with the policy) → why the policy does not get it; None: it does."""


def filters_of(
    cursor: Cursor, policy: Policy, held: BackoffQueue, delays: DelayIndex | None, first: Position, new: Position
) -> list[Filter]:
    """Returns the filters for entries from position `first` on. `new`: the read position; entries from there on cannot
    wait for redelivery. `delays`: None if the subscription type does not delay."""
    filters: list[Filter] = []
    if cursor.partial or first < new or first <= cursor.last_hole:
        filters.append(partial(_acknowledged, cursor, policy))
    if cursor.pending is not None:
        filters.append(partial(_pending, cursor, policy))
    if held.until:
        filters.append(partial(_held_back, held))
    if delays is not None and delays.count:
        filters.append(partial(_delayed, delays))
    return filters


def _acknowledged(cursor: Cursor, policy: Policy, entry: Entry, waited: bool) -> SkipReason | None:
    position = entry.position
    if cursor.partial:
        cursor.set_batch_size_if_unknown(position, entry.count)
    if position > cursor.mark and not (cursor.acked and cursor.is_acked(position)):
        return None
    if waited:
        policy.discard(position)
    return SkipReason.ACKNOWLEDGED


def _pending(cursor: Cursor, policy: Policy, entry: Entry, waited: bool) -> SkipReason | None:
    position = entry.position
    cursor.set_batch_size_if_unknown(position, entry.count)
    if not cursor.is_done(position):
        return None
    if waited:
        policy.discard(position)
    return SkipReason.PENDING


def _held_back(held: BackoffQueue, entry: Entry, waited: bool) -> SkipReason | None:
    return SkipReason.HELD_BACK if not waited and entry.position in held else None


def _delayed(delays: DelayIndex, entry: Entry, waited: bool) -> SkipReason | None:
    return SkipReason.NOT_DUE if not waited and delays.is_delayed(entry.position) else None


# ---------------------------------------------------------------------------------------------------- chunk_runs
# The runs of a message's chunks in the log: which of them make it whole.
#
# All chunks of a message have its uuid. A producer publishes them in order, and without a receipt again, from any chunk
# on: 0 1 0 1 2. It may publish the whole message twice: 0 1 2 0 1 2. A *run* is what a consumer puts together: it
# begins at chunk 0, takes the next chunk when it comes, passes over one that it has, and ends with the last chunk. A
# chunk after a gap, and one without a beginning, is in no run that is whole. Guarding test:
# tests/broker/subscription/core/test_chunk_runs.py.


class Chunk(NamedTuple):
    """A chunk in the log: its position, its number, and the number of chunks of its message (`of`)."""

    position: Position
    number: int
    of: int


class ChunkRun(NamedTuple):
    """A run of chunks. `chunks`: the position of each chunk, in order; `places`: those, and the entries that repeat a
    chunk; `whole`: no chunk is missing."""

    chunks: Sequence[Position]
    places: Sequence[Position]
    whole: bool


def chunk_runs_of(found: Iterable[Chunk]) -> list[ChunkRun]:
    """Returns the runs, in order; `found` must be all entries with one uuid, in log order."""
    runs: list[ChunkRun] = []
    chunks: list[Position] = []
    places: list[Position] = []
    for position, number, of in found:
        if number > len(chunks) or number < 0:
            runs += [ChunkRun(tuple(chunks), tuple(places), False)] if places else []
            runs.append(ChunkRun((), (position,), False))
            chunks, places = [], []
            continue
        places.append(position)
        if number == len(chunks):
            chunks.append(position)
        if len(chunks) == of:
            runs.append(ChunkRun(tuple(chunks), tuple(places), True))
            chunks, places = [], []
    if places:
        runs.append(ChunkRun(tuple(chunks), tuple(places), False))
    return runs


def chunk_run_at(found: Iterable[Chunk], position: Position) -> tuple[ChunkRun, bool]:
    """Returns the run that contains the entry at `position`, and whether that is the last run. `found` must be as for
    `chunk_runs_of`."""
    runs = chunk_runs_of(found)
    at = next(number for number, run in enumerate(runs) if position in run.places)
    return runs[at], at == len(runs) - 1
