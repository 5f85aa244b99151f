"""The metadata of auto-recovery: marks, locks, the election, departing bookies, settings (metadata/paths.py).

Every change is by compare-and-set on what was just read, or of one's own ephemeral node, which a random token tells
from another's. What these functions raise are the metadata's errors; callers try again in their next round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...metadata import paths
from ...metadata.records import (
    AuditorRecord,
    BookieRecord,
    DamagedEntriesRecord,
    DamagedRecord,
    DepartingRecord,
    LedgerRecord,
    MetadataRecord,
    RepairLockRecord,
    RepairSettingsRecord,
    UnderReplicatedRecord,
    decode_record,
    encode_record,
)
from ...metadata.store import (
    NODE_ABSENT,
    UNREADABLE_RECORDS,
    MetadataStore,
    get_readable_record,
    get_record,
    parse_ledger_ids,
    update_record,
)
from ...proto.errors import BadVersion, MagnetarError

_LOG = logging.getLogger("magnetar.bookie.repair")

R = TypeVar("R", bound=MetadataRecord)

DELETE_NODE_TIMEOUT_S = 2.0
"""The longest time, in seconds, that the deletion of an own node may take."""


# ------------------------------------------------------------------------------------------ reading
async def read_ledger_record(store: MetadataStore, ledger_id: int) -> LedgerRecord | None:
    """Returns the ledger's record in the metadata; None if the ledger has none. Raises the errors of the metadata."""
    found = await get_record(store, paths.ledger(ledger_id), LedgerRecord)
    return None if found is None else found[0]


async def read_repair_mark(store: MetadataStore, ledger_id: int) -> tuple[UnderReplicatedRecord, int] | None:
    """Returns (repair mark of the ledger, version of the mark's node); None if the ledger has no mark. Raises the
    errors of the metadata."""
    return await get_record(store, paths.under_replicated(ledger_id), UnderReplicatedRecord)


async def list_ledger_ids(store: MetadataStore, folder: str) -> list[int]:
    """Returns, in ascending order, the ids of the ledgers that have a node in `folder` of the metadata. Ignores nodes
    whose names are not ledger ids. Raises the errors of the metadata."""
    return sorted(parse_ledger_ids(folder, await store.children(folder)))


async def list_registered_bookies(store: MetadataStore) -> dict[str, BookieRecord]:
    """Returns the records of all registered bookies, by bookie. A bookie whose record cannot be read counts as
    registered and read-only. Raises the errors of the metadata."""
    found: dict[str, BookieRecord] = {}
    for name in await store.children(paths.AVAILABLE_BOOKIES):
        node = await store.get(paths.bookie(name))
        if node is None:
            continue
        try:
            found[name] = decode_record(node.value, BookieRecord, paths.bookie(name))
        except DamagedRecord as error:
            UNREADABLE_RECORDS.record_unreadable(paths.bookie(name), error)
            found[name] = BookieRecord(bookie=name, endpoint="", read_only=True)
    return found


async def list_departing_bookies(store: MetadataStore) -> dict[str, DepartingRecord]:
    """Returns the records of the departing bookies, by bookie: an operator has ordered to move all copies away from
    them. A bookie whose record cannot be read counts as departing, because its node exists; its cookie is then never
    deleted. Raises the errors of the metadata."""
    found: dict[str, DepartingRecord] = {}
    for name in await store.children(paths.DEPARTING_BOOKIES):
        path = paths.departing_bookie(name)
        record = await get_readable_record(store, path, DepartingRecord)
        if record is not None:
            found[name] = record[0]
        elif path in UNREADABLE_RECORDS.paths:
            found[name] = DepartingRecord(bookie=name)
    return found


async def list_damage_reports(store: MetadataStore, ledger_id: int) -> dict[str, DamagedEntriesRecord]:
    """Returns the damage reports of the ledger, by bookie. Leaves out reports that cannot be read. Raises the errors of
    the metadata."""
    found: dict[str, DamagedEntriesRecord] = {}
    for name in await store.children(paths.damaged_copies(ledger_id)):
        record = await get_readable_record(store, paths.damaged_copies_of_bookie(ledger_id, name), DamagedEntriesRecord)
        if record is not None:
            found[name] = record[0]
    return found


async def delete_damage_report(store: MetadataStore, ledger_id: int, bookie: str) -> None:
    """Deletes the bookie's damage report of the ledger. Does nothing if another process changes the report at the same
    moment. Raises the errors of the metadata."""
    path = paths.damaged_copies_of_bookie(ledger_id, bookie)
    node = await store.get(path)
    if node is not None:
        with contextlib.suppress(BadVersion):
            await store.delete(path, node.version)


async def is_repair_enabled(store: MetadataStore) -> bool:
    """Returns whether auto-recovery is switched on for the cluster. Returns True if the setting cannot be read, because
    missing copies do more harm than an unwanted repair. Raises the errors of the metadata."""
    found = await get_readable_record(store, paths.REPAIR_SETTINGS, RepairSettingsRecord)
    return found is None or found[0].enabled


# ------------------------------------------------------------------------------------------ changing
async def set_repair_enabled(store: MetadataStore, on: bool) -> None:
    """Switches auto-recovery on or off, for the whole cluster. Raises the errors of `update_record`."""
    await update_record(store, paths.REPAIR_SETTINGS, RepairSettingsRecord, lambda _: RepairSettingsRecord(enabled=on))


ChangeRepairMark = Callable[[UnderReplicatedRecord | None], UnderReplicatedRecord | None]
"""A function that gets the present repair mark of a ledger and returns the mark that should replace it. None means: no
mark."""


async def change_repair_mark(
    store: MetadataStore, ledger_id: int, change: ChangeRepairMark
) -> UnderReplicatedRecord | None:
    """Replaces the repair mark of the ledger by the mark that `change` returns for the present mark; returns the new
    mark (None: no mark). Calls `change` again if another process has changed the mark meanwhile. Raises the errors of
    the metadata."""
    path = paths.under_replicated(ledger_id)
    while True:
        found = await read_repair_mark(store, ledger_id)
        before, version = (None, NODE_ABSENT) if found is None else found
        wanted = change(before)
        if wanted == before:
            return before
        try:
            if wanted is None:
                await store.delete(path, version)
            else:
                await store.put(path, encode_record(wanted, path), version)
        except BadVersion:
            continue
        return wanted


async def delete_repair_mark(store: MetadataStore, ledger_id: int, version: int) -> bool:
    """Deletes the repair mark of the ledger if its node still has this version. Returns True if there is no mark any
    more. Returns False if another process has changed the mark: then the worker must examine the ledger again. Raises
    the errors of the metadata."""
    try:
        await store.delete(paths.under_replicated(ledger_id), version)
    except BadVersion:
        return await read_repair_mark(store, ledger_id) is None
    return True


async def claim_ephemeral_node(store: MetadataStore, path: str, record: AuditorRecord | RepairLockRecord) -> bool:
    """Creates the ephemeral node `path` with this record, so that this process owns the node. Returns True if this
    process owns the node afterwards, False if another process owns it. If the outcome of the creation is unknown, reads
    the node and compares its token. Raises the errors of `MetadataStore.get`, and those errors of the creation that no
    retry can help.

    All owners of one metadata session use the same token (repair.py), so a process recognizes its own node even if it
    missed the answer."""
    if await store.get(path) is not None:
        return await is_own_node(store, path, record)
    try:
        await store.put(path, encode_record(record, path), NODE_ABSENT, ephemeral=True)
    except BadVersion:
        return await is_own_node(store, path, record)
    except MagnetarError as error:
        if not error.retryable:
            raise
        return await is_own_node(store, path, record)
    return True


async def is_own_node(store: MetadataStore, path: str, record: AuditorRecord | RepairLockRecord) -> bool:
    """Returns whether this process owns the node at `path`: whether the node has the token of `record`. A node that
    cannot be read counts as another process's. Raises the errors of the metadata."""
    found = await get_readable_record(store, path, type(record))
    return found is not None and found[0].token == record.token


async def delete_own_node(store: MetadataStore, path: str, record: AuditorRecord | RepairLockRecord) -> None:
    """Deletes the node at `path` if this process owns it, that is, if it has the token of `record`. If the metadata
    does not answer within DELETE_NODE_TIMEOUT_S seconds, or with an error, the node stays until the session ends."""
    try:
        async with asyncio.timeout(DELETE_NODE_TIMEOUT_S):
            found = await get_readable_record(store, path, type(record))
            if found is not None and found[0].token == record.token:
                await store.delete(path, found[1])
    except (MagnetarError, TimeoutError) as error:
        _LOG.debug("%s stays until the session ends: %s", path, error)


async def list_records(store: MetadataStore, folder: str, cls: type[R]) -> Sequence[R]:
    """Returns the records of class `cls` directly below `folder`. Leaves out records that cannot be read. Raises the
    errors of the metadata."""
    found: list[R] = []
    for name in await store.children(folder):
        record = await get_readable_record(store, f"{folder}/{name}", cls)
        if record is not None:
            found.append(record[0])
    return found
