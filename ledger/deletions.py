"""The ledgers that were deleted, for ever: without this record no bookie deletes a ledger's data.

    /deleted/<page, 20 digits>    DeletedLedgersRecord: the ranges of deleted ids among PAGE_IDS consecutive ones

Rule. That a ledger's record is missing proves nothing: a damaged file, an older copy or another store lacks it too. A
ledger is deleted when its owner says so, in this order:

 1. `note`: its id enters the page, by compare-and-set. From here on the owner wants it gone
 2. its own record is deleted
 3. each bookie finds both, in two passes (bookie/maintenance/garbage.py), and deletes its copy

A crash after 1 leaves a record that no list names: the sweep (broker/cluster/orphans.py) goes on with 2. A ledger
without a record whose id is in no page is *unexplained*: its data stays until an operator decides.
Ids are never given out twice, so a page only grows. It has at most PAGE_IDS / 2 ranges, usually a few; nothing deletes
a page: a bookie that returns after a year asks for it. Guarded by tests/ledger/test_deletions.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import groupby

from pyroaring import BitMap64

from ..metadata import paths
from ..metadata.records import DeletedLedgersRecord
from ..metadata.store import ABSENT, ANY, Delete, MetadataStore, Operation
from ..metadata.update import get_record, put_of, update_record
from ..proto.errors import BadVersion

PAGE_IDS = 4096
"""Ids of a page: one in which every second id is deleted has 50 kB of JSON; blocks of ids (ledger/client.py) are a part
of one."""
ATTEMPTS_MAX = 20
PAUSE_S = 0.01
DELETED_AT_ONCE = 512
"""Ledgers that are deleted in one commit: half of what it may contain."""


async def among(store: MetadataStore, ledgers: Iterable[int]) -> BitMap64:
    """Returns the ledgers among the given ones that were deleted. Raises DamagedRecord, and the errors of the metadata.
    """
    deleted = BitMap64()
    asked = BitMap64(ledgers)
    for page, ids in _paged(asked):
        found = await get_record(store, paths.deleted(page), DeletedLedgersRecord)
        deleted |= _ids(found[0]) & BitMap64(ids) if found is not None else BitMap64()
    return deleted


async def note(store: MetadataStore, ledgers: Iterable[int]) -> None:
    """Records that the owner of these ledgers deletes them, for ever. Idempotent; after an error of the metadata the
    outcome is unknown."""
    for page, ids in _paged(ledgers):

        def noted(record: DeletedLedgersRecord | None, page: int = page, ids: list[int] = ids) -> DeletedLedgersRecord:
            return _with(record, page, ids)

        await update_record(store, paths.deleted(page), DeletedLedgersRecord, noted)


async def notes(store: MetadataStore, ledgers: Iterable[int]) -> list[Operation]:
    """Returns what `note` writes, as a part of a commit, which fails with BadVersion when another one was faster."""
    operations: list[Operation] = []
    for page, ids in _paged(ledgers):
        path = paths.deleted(page)
        found = await get_record(store, path, DeletedLedgersRecord)
        record, version = (None, ABSENT) if found is None else found
        operations.append(put_of(path, _with(record, page, ids), version))
    return operations


async def with_owner(store: MetadataStore, ledgers: Sequence[int], owner: Sequence[Operation]) -> None:
    """Commits `owner`, which deletes the owner's record, and in the same commit the notes of its ledgers: a crash
    before their own records go leaves no doubt. Raises what the commit raises; BadVersion is that of `owner`.
    """
    own = {operation.path for operation in owner}
    for attempt in range(ATTEMPTS_MAX):
        try:
            await store.commit([*await notes(store, ledgers), *owner])
            return
        except BadVersion as error:  # of a page, which another process changed meanwhile
            if error.fields.get("path") in own or attempt == ATTEMPTS_MAX - 1:
                raise
            await asyncio.sleep(PAUSE_S * attempt)


async def delete(store: MetadataStore, ledgers: Iterable[int]) -> None:
    """Notes the deletion like `note`, then deletes the records. Idempotent, also for a ledger whose record does not
    exist."""
    ordered = sorted(ledgers)
    await note(store, ordered)
    for at in range(0, len(ordered), DELETED_AT_ONCE):
        await store.commit([Delete(paths.ledger(ledger), ANY) for ledger in ordered[at : at + DELETED_AT_ONCE]])


def _paged(ledgers: Iterable[int]) -> list[tuple[int, list[int]]]:
    return [(page, list(ids)) for page, ids in groupby(sorted(ledgers), lambda ledger: ledger // PAGE_IDS)]


def _ids(record: DeletedLedgersRecord) -> BitMap64:
    found = BitMap64()
    for first, last in record.ranges:
        found.add_range(first, last + 1)
    return found


def _with(record: DeletedLedgersRecord | None, page: int, ledgers: Sequence[int]) -> DeletedLedgersRecord:
    ids = BitMap64(ledgers) if record is None else _ids(record) | BitMap64(ledgers)
    ranges: list[tuple[int, int]] = []
    for ledger in ids:
        if ranges and ranges[-1][1] == ledger - 1:
            ranges[-1] = ranges[-1][0], ledger
        else:
            ranges.append((ledger, ledger))
    return DeletedLedgersRecord(page=page, ranges=tuple(ranges))
