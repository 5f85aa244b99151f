"""The runs of a message's chunks in the log: which of them make it whole.

All chunks of a message have its uuid. A producer publishes them in order, and without a receipt again, from any chunk
on: 0 1 0 1 2. It may publish the whole message twice: 0 1 2 0 1 2. A *run* is what a consumer puts together: it begins
at chunk 0, takes the next chunk when it comes, passes over one that it has, and ends with the last chunk. A chunk after
a gap, and one without a beginning, is in no run that is whole.
Guarding test: tests/broker/subscription/core/test_chunk_runs.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ....proto.names import Position


class Chunk(NamedTuple):
    """A chunk in the log: its number, and of how many."""

    position: Position
    number: int
    of: int


class Run(NamedTuple):
    """A run of chunks. `chunks`: where each chunk is, in order; `places`: those and the entries that repeat one."""

    chunks: Sequence[Position]
    places: Sequence[Position]
    whole: bool


def runs_of(found: Iterable[Chunk]) -> list[Run]:
    """The runs, in order, of all entries with the uuid, in log order."""
    runs: list[Run] = []
    chunks: list[Position] = []
    places: list[Position] = []
    for position, number, of in found:
        if number > len(chunks) or number < 0:
            runs += [Run(tuple(chunks), tuple(places), False)] if places else []
            runs.append(Run((), (position,), False))
            chunks, places = [], []
            continue
        places.append(position)
        if number == len(chunks):
            chunks.append(position)
        if len(chunks) == of:
            runs.append(Run(tuple(chunks), tuple(places), True))
            chunks, places = [], []
    if places:
        runs.append(Run(tuple(chunks), tuple(places), False))
    return runs


def run_at(found: Iterable[Chunk], position: Position) -> tuple[Run, bool]:
    """The run that the entry is in, and whether it is the last one."""
    runs = runs_of(found)
    at = next(number for number, run in enumerate(runs) if position in run.places)
    return runs[at], at == len(runs) - 1
