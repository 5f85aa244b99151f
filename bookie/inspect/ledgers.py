"""The ledger index (format/ledger_index.py): descriptors, tombstones, quarantine, limbo, drained logs.

`read_index_overview` is one pass over the file: the facts, and which ledgers have a descriptor. `walk_ledgers` makes
one pass for every `WINDOW` ledgers, so that a million of them are shown in order and are not in memory. No reader of
this folder returns a key.

A rewrite replaces the file as a whole: when the one that the mark named is gone, the newer mark is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from pyroaring import BitMap64

from ..format import ledger_index
from ..format.journal import FILE_HEADER_BYTES
from ..format.ledger_index import MAGIC, RECORD_BYTES, LedgerState, State, Tombstone
from ..store.boot import LEDGERS
from ..store.index_files import SUFFIX, index_file_name
from ..store.state_log import StateLog
from .snapshot import (
    WINDOW_BYTES,
    Damage,
    ReadableFile,
    Snapshot,
    list_file_numbers,
    open_file,
    read_header,
    read_windows,
    take_snapshot,
)

WINDOW = 100_000
_TRIES = 3
_PIECE_BYTES = WINDOW_BYTES // RECORD_BYTES * RECORD_BYTES


class IndexedLedger(NamedTuple):
    """The record of a ledger in the ledger index, without the ledger's key."""

    ledger: int
    fenced: bool
    lac: int
    last: int


class IndexOverview(NamedTuple):
    """The content of a store's ledger index: its facts, the ledgers with a descriptor, and the damage that was found in
    it.
    """

    facts: StateLog
    ledgers: BitMap64  # those that have a descriptor
    damages: list[Damage]
    path: str
    bytes: int  # what counts of the file
    quarantined: dict[int, list[tuple[int, int]]]  # ledger: intervals of entries


def read_index_overview(snapshot: Snapshot) -> IndexOverview:
    facts, ledgers, damages = StateLog(), BitMap64(), list[Damage]()
    opened = _open(snapshot)
    if isinstance(opened, Damage):
        return IndexOverview(facts, ledgers, [opened], opened.path, 0, {})
    file, end = opened
    try:
        for record in _records(snapshot, file, end):
            if isinstance(record, Damage):
                damages.append(record)
            elif isinstance(record, LedgerState):
                ledgers.add(record.ledger)
            else:
                facts.apply(record)
                if isinstance(record, Tombstone):
                    ledgers.remove_range(record.first, record.last + 1)
    finally:
        file.close()
    quarantined: dict[int, list[tuple[int, int]]] = {}
    for ledger, first, last in facts.quarantined():
        quarantined.setdefault(ledger, []).append((first, last))
    return IndexOverview(facts, ledgers, damages, file.path, end, quarantined)


def walk_ledgers(
    snapshot: Snapshot, seen: IndexOverview, start: int = 0, stop: int | None = None
) -> Iterator[IndexedLedger]:
    """Yields the records of the ledgers with `start` ≤ id < `stop`, ascending: the last record of each."""
    opened = _open(snapshot)
    if isinstance(opened, Damage):
        return
    file, end = opened
    wanted = (ledger for ledger in seen.ledgers if ledger >= start and (stop is None or ledger < stop))
    try:
        while ids := list(islice(wanted, WINDOW)):
            found: dict[int, IndexedLedger] = dict.fromkeys(ids, IndexedLedger(-1, False, -1, -1))
            for record in _records(snapshot, file, end):
                if isinstance(record, LedgerState) and record.ledger in found:
                    found[record.ledger] = IndexedLedger(record.ledger, record.fenced, record.lac, record.last)
            yield from (state for state in found.values() if state.ledger >= 0)
    finally:
        file.close()


def _open(snapshot: Snapshot) -> tuple[ReadableFile, int] | Damage:
    """Returns the file that the mark names, and its end; without a mark the newest generation, to its end."""
    for _ in range(_TRIES):
        generation, end = _named(snapshot)
        path = snapshot.path(LEDGERS, index_file_name(generation))
        file = open_file(snapshot, path)
        if file is not None:
            return file, file.size() if end is None else end
        snapshot = take_snapshot(snapshot.files, snapshot.directory)
    return Damage(path, 0, "the ledger index is missing")


def _named(snapshot: Snapshot) -> tuple[int, int | None]:
    if snapshot.mark is not None:
        return snapshot.mark.ledgers_generation, snapshot.mark.ledgers_end
    return max(list_file_numbers(snapshot, LEDGERS, (SUFFIX,)), default=1), None


def _records(snapshot: Snapshot, file: ReadableFile, end: int) -> Iterator[State | Damage]:
    """Yields the records in the order of the file, and a Damage in the place of each damaged one."""
    generation = int(file.path.rpartition("/")[2].removesuffix(SUFFIX))
    header = read_header(snapshot, file, MAGIC, generation)
    if isinstance(header, Damage):
        yield header
    offset = FILE_HEADER_BYTES
    for base, data in read_windows(file, FILE_HEADER_BYTES, end, _PIECE_BYTES):
        for at in range(0, len(data), RECORD_BYTES):
            record = ledger_index.intact_record(data, at)
            yield record or Damage(file.path, base + at, "record of the ledger index does not match its checksum")
        offset = base + len(data)
    if offset < end:
        yield Damage(file.path, offset, f"the file ends here and should be {end} bytes long")
