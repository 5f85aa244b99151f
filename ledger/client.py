"""LedgerClient: creates, opens, recovers and deletes ledgers. One per process; its handles share the bookie table
and the connections.

    create   none → OPEN, on a new ensemble; the only writer is the handle that is returned. An owner that makes the
             ledger in the commit that names it does it in three steps: `draft_record`, `make_creation_update`,
             `make_writer`
    open     reads what is certainly stored; never fences, so the writer continues
    recover  fences the writer and gives the ledger its end: CLOSED for ever (ledger protocol §1.8)
    delete   records that the ledger is deleted, and removes its record; bookies free the space later. Nothing may
             reference the ledger durably any more (§1.11)

Ledger ids are allocated in blocks from a counter in the metadata, in larger blocks while many ledgers are created, and
are never used twice. A retried create whose first outcome was unknown recognises its own record by a random token
(§1.1). The key (20 random bytes) prevents any other client from writing or fencing.
Guards: tests/ledger/test_ledger.py.

Also in this file, below its heading: the ledgers that were deleted (deletions).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from pyroaring import BitMap64

from ..metadata import paths
from ..metadata.records import DeletedLedgersRecord, LedgerRecord, decode_record, encode_record
from ..metadata.store import (
    ANY_VERSION,
    NODE_ABSENT,
    CommitOperation,
    DeleteNode,
    MetadataStore,
    NodeUpdate,
    VersionedValue,
    allocate_ids,
    commit_in_parts,
    get_record,
    make_put_operation,
    update_nodes,
    update_record,
)
from ..proto.errors import AlreadyExists, BadVersion, NotEnoughBookies
from ..runtime.network import World
from . import recovery
from . import recovery as records
from .bookies import Bookies, LedgerConfig
from .handle import LedgerEnd, LedgerWriter
from .metadata_core import RecordToStore, decide_ledger_creation, make_ledger_record, make_striping
from .peer_format import LEDGER_KEY_BYTES
from .placement_core import ANY_GROUP, BookieGroups, StripingReduction, reduce_striping
from .reader import LedgerReader
from .recovery import LostEntriesSearch
from .writer_core import Striping

# ----------------------------------------------------------------------------------------------------- deletions
# The ledgers that were deleted, for ever: without this record no bookie deletes a ledger's data.
#
#     /deleted/<page, 20 digits>    DeletedLedgersRecord: the ranges of deleted ids among
#                                   LEDGER_IDS_PER_PAGE consecutive ones
#
# Rule. That a ledger's record is missing proves nothing: a damaged file, an older copy or another store lacks it too. A
# ledger is deleted only by its owner, in this order:
#
#  1. `record_deletions`: its id is added to the page, by compare-and-set. From now on the ledger counts as deleted
#  2. its own record is deleted
#  3. each bookie sees both, in two passes (bookie/maintenance/garbage.py), and deletes its copy
#
# A crash after 1 leaves a record that no list names: the sweep (broker/cluster/orphans.py) goes on with 2. A ledger
# without a record whose id is in no page is *unexplained*: its data stays until an operator decides. Ids are never
# given out twice, so a page only grows. It has at most LEDGER_IDS_PER_PAGE / 2 ranges, usually a few; nothing deletes a
# page: a bookie that returns after a year asks for it. Guarded by tests/ledger/test_deletions.py.


LEDGER_IDS_PER_PAGE = 4096
"""The number of ledger ids for which one record has the deleted ones. If every second id is deleted, the record has 50
kB of JSON. A block of ids is a part of one page."""
DELETE_ATTEMPTS_MAX = 20
DELETE_RETRY_PAUSE_S = 0.01


async def find_deleted_ledgers(store: MetadataStore, ledgers: Iterable[int]) -> BitMap64:
    """Returns those of `ledgers` whose deletion the metadata records. Raises DamagedRecord, and the errors of the
    metadata."""
    deleted = BitMap64()
    asked = BitMap64(ledgers)
    for page, ids in _paged(asked):
        found = await get_record(store, paths.deleted_ledgers(page), DeletedLedgersRecord)
        deleted |= _ids(found[0]) & BitMap64(ids) if found is not None else BitMap64()
    return deleted


async def record_deletions(store: MetadataStore, ledgers: Iterable[int]) -> None:
    """Records in the metadata, for ever, that the owner of these ledgers has deleted them. May be repeated. Raises the
    errors of `update_record`; then some of the deletions may be recorded."""
    for page, ids in _paged(ledgers):

        def noted(record: DeletedLedgersRecord | None, page: int = page, ids: list[int] = ids) -> DeletedLedgersRecord:
            return _with(record, page, ids)

        await update_record(store, paths.deleted_ledgers(page), DeletedLedgersRecord, noted)


async def make_deletion_operations(store: MetadataStore, ledgers: Iterable[int]) -> list[CommitOperation]:
    """Returns the operations that record the deletion of these ledgers, like `record_deletions`. The caller must commit
    them, alone or with other operations. The commit raises BadVersion if another process has changed the same records
    since this call. Raises DamagedRecord, and the errors of the metadata."""
    operations: list[CommitOperation] = []
    for page, ids in _paged(ledgers):
        path = paths.deleted_ledgers(page)
        found = await get_record(store, path, DeletedLedgersRecord)
        record, version = (None, NODE_ABSENT) if found is None else found
        operations.append(make_put_operation(path, _with(record, page, ids), version))
    return operations


async def commit_ledger_deletions(
    store: MetadataStore, ledgers: Sequence[int], owner: Sequence[CommitOperation]
) -> None:
    """Commits the operations `owner`, which delete the record that lists `ledgers`, and records in the same commit that
    these ledgers are deleted. So their deletion can be completed after a crash.

    Raises BadVersion at once if an operation of `owner` conflicts, or if the records of deletions conflicted
    DELETE_ATTEMPTS_MAX times. Raises the other errors of `MetadataStore.commit`, and those of
    `make_deletion_operations`."""
    own = {operation.path for operation in owner}
    for attempt in range(DELETE_ATTEMPTS_MAX):
        try:
            await store.commit([*await make_deletion_operations(store, ledgers), *owner])
            return
        except BadVersion as error:  # of a page, which another process changed meanwhile
            if error.fields.get("path") in own or attempt == DELETE_ATTEMPTS_MAX - 1:
                raise
            await asyncio.sleep(DELETE_RETRY_PAUSE_S * attempt)


async def delete_ledgers(store: MetadataStore, ledgers: Iterable[int]) -> None:
    """Deletes these ledgers: records their deletion, like `record_deletions`, then deletes their records in the
    metadata. May be repeated, also for ledgers that have no record any more. Raises the errors of `update_record` and
    `commit_in_parts`; then some of them may be deleted."""
    ordered = sorted(ledgers)
    await record_deletions(store, ordered)
    await commit_in_parts(store, [DeleteNode(paths.ledger(ledger), ANY_VERSION) for ledger in ordered])


def _paged(ledgers: Iterable[int]) -> list[tuple[int, list[int]]]:
    return [(page, list(ids)) for page, ids in groupby(sorted(ledgers), lambda ledger: ledger // LEDGER_IDS_PER_PAGE)]


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


# -------------------------------------------------------------------------------------------------------- client


_LOG = logging.getLogger("magnetar.ledger")

BLOCK_DOUBLED_WITHIN_S, IDS_PER_BLOCK_MAX = 1.0, 1024
"""If a block of ids is used up within BLOCK_DOUBLED_WITHIN_S seconds, the next one is twice as large, up to
IDS_PER_BLOCK_MAX. Otherwise a client that creates hundreds of ledgers a second would spend half of its time on the
counter. The unused rest of a block is lost at a stop, which does no harm: there are 2^63 ids."""
TRACKED_WRITERS_MIN = 16
PLACED_IDS_MAX = 16
"""How many ids are tried for a new ledger while disks of bookies are full or have failed. With half of two bookies'
directories, one id in four fits both."""
"""The number of ended writers that may be kept before they are dropped, because dropping them walks over all open
writers."""

__all__ = ["LedgerClient", "LedgerEnd"]


class LedgerIdTaken(AlreadyExists):
    """Raised when another process has already created a ledger with this id. The caller must try another id."""


class LedgerClient:
    """Creates, opens, recovers and deletes ledgers (see the module's docstring).

    `world` provides the clock, random numbers and the network. The caller must close `metadata`. `close` abandons the
    writers that this client made and closes its connections."""

    def __init__(self, world: World, metadata: MetadataStore, config: LedgerConfig | None = None) -> None:
        self._world = world
        self._metadata = metadata
        self._config = config if config is not None else LedgerConfig()
        self._bookies = Bookies(world, metadata, self._config)
        self._ids: deque[int] = deque()
        self._block = 0  # size of the last block of ids, and when it was taken
        self._taken_at = 0.0
        self._taking = asyncio.Lock()
        self._unwanted: set[int] = set()  # ledgers that wait to be deleted
        self._deleting = asyncio.Lock()
        self._writers: dict[int, LedgerWriter] = {}  # the open ones, and at most as many that failed
        self._looked_at = 0  # number of open writers when those that failed were dropped last
        self._drop_writer = self._drop  # one bound method for all writers

    async def connect(self) -> None:
        """Lists the bookies and connects to some of them (`Bookies.connect`), so that the first ledger need not wait
        for that. Waits until each of these bookies has answered or failed, at most `add_timeout_s`. Raises Unavailable
        after `close`, and the errors of the metadata."""
        await self._bookies.wait_bookies_listed()
        await self._bookies.connect()

    async def create(
        self, *, ensemble_size: int | None = None, write_quorum: int | None = None, ack_quorum: int | None = None,
        properties: Mapping[str, str] | None = None, shrink: StripingReduction = StripingReduction.NOTHING,
        above: int = -1, groups: BookieGroups = ANY_GROUP,
    ) -> LedgerWriter:  # fmt: skip
        """Creates a ledger on writable bookies and returns its writer. The ledger's id is larger than `above`. Sizes
        and quorums that are None are those of the configuration.

        `shrink`: what to reduce if fewer bookies are healthy than the ensemble needs (`reduce_striping`). The ack
        quorum is never reduced, so a confirmed entry always has as many synced copies. `properties`: texts that are
        stored in the ledger's record, such as the name of its topic. `groups`: of the bookies that may hold it; they
        are stored there, too.

        Raises InvalidConfiguration if the sizes contradict each other, NotEnoughBookies if too few bookies are
        writable, Unavailable after `close`, or the errors of the metadata."""
        while True:
            record = await self.draft_record(
                ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum, properties=properties,
                shrink=shrink, above=above, groups=groups,
            )  # fmt: skip
            try:
                await update_nodes(self._metadata, (self.make_creation_update(record),))
            except LedgerIdTaken as error:
                _LOG.warning("%s", error)
            else:
                return self.make_writer(record)

    async def draft_record(
        self, *, ensemble_size: int | None = None, write_quorum: int | None = None, ack_quorum: int | None = None,
        properties: Mapping[str, str] | None = None, shrink: StripingReduction = StripingReduction.NOTHING,
        above: int = -1, groups: BookieGroups = ANY_GROUP,
    ) -> LedgerRecord:  # fmt: skip
        """Chooses an id and bookies for a new ledger, as `create` does, and returns the ledger's record. Stores
        nothing. Parameters and errors are those of `create`."""
        config = self._config
        shape = make_striping(
            config.ensemble_size if ensemble_size is None else ensemble_size,
            config.write_quorum if write_quorum is None else write_quorum,
            config.ack_quorum if ack_quorum is None else ack_quorum,
        )
        await self._bookies.wait_bookies_listed()
        if shrink is not StripingReduction.NOTHING:
            shape = await self._fit(shape, shrink, groups)
        rng = self._world.rng
        ledger, bookies = await self._place(above, shape, groups)
        return make_ledger_record(
            ledger, shape, bookies, key=rng.randbytes(LEDGER_KEY_BYTES), token=rng.randbytes(16).hex(),
            created_ms=self._world.clock.wall_ms(), properties={**(properties or {}), **groups.encode()},
        )  # fmt: skip

    async def _place(self, above: int, shape: Striping, groups: BookieGroups) -> tuple[int, list[str]]:
        """Returns (id of a new ledger, its bookies). A bookie whose disk for this id is full or has failed does not
        take it, and the disk of the next id may be another one: so up to PLACED_IDS_MAX ids are tried."""
        for tried in range(1, PLACED_IDS_MAX + 1):
            ledger = await self._next_id(above)
            try:
                return ledger, await self._bookies.choose_bookies_after_listing(
                    shape.ensemble_size, write_quorum=shape.write_quorum, ledger=ledger, groups=groups
                )
            except NotEnoughBookies:
                if tried == PLACED_IDS_MAX or not self._bookies.has_unwritable_directories:
                    raise
        raise AssertionError("the last id returns or raises")

    def make_creation_update(self, draft: LedgerRecord) -> NodeUpdate:
        """Returns the change of the metadata that creates the ledger of `draft`, a record made by `draft_record`. The
        caller must commit it with `update_nodes`, alone or together with other changes. That raises LedgerIdTaken if
        another process has created a ledger with this id: then the caller must call `draft_record` again."""
        path = paths.ledger(draft.ledger_id)

        def transform(node: VersionedValue | None) -> bytes | None:
            answer = decide_ledger_creation(
                decode_record(node.value, LedgerRecord, path) if node is not None else None, draft
            )
            if answer is None:
                raise LedgerIdTaken(f"ledger {draft.ledger_id} exists already", ledger=draft.ledger_id)
            return encode_record(answer.record, path) if isinstance(answer, RecordToStore) else None

        return NodeUpdate(path, transform, absent=True)

    def make_writer(self, record: LedgerRecord) -> LedgerWriter:
        """Returns the writer of a new ledger. Its record must be made by `draft_record`, and its `make_creation_update`
        must be committed."""
        writer = LedgerWriter(record, self._bookies, self._metadata, self._config)
        self._remember(writer)
        return writer

    async def check_enough_bookies(
        self, wanted: Striping, *, shrink: StripingReduction = StripingReduction.NOTHING
    ) -> None:
        """Raises NotEnoughBookies if a ledger with the striping `wanted` could not be created now, because there are
        too few bookies. `shrink` as in `create`. Stores nothing. Raises the errors of the metadata."""
        await self._bookies.wait_bookies_listed()
        if shrink is not StripingReduction.NOTHING:
            wanted = reduce_striping(wanted, await self._bookies.count_healthy_bookies(wanted.ensemble_size), shrink)
        await self._bookies.choose_bookies_after_listing(wanted.ensemble_size, write_quorum=wanted.write_quorum)

    def _drop(self, ledger_id: int) -> None:
        self._writers.pop(ledger_id, None)

    def _remember(self, writer: LedgerWriter) -> None:
        if len(self._writers) > 2 * self._looked_at + TRACKED_WRITERS_MIN:
            self._writers = {ledger: open_ for ledger, open_ in self._writers.items() if open_.is_writable}
            self._looked_at = len(self._writers)
        self._writers[writer.ledger_id] = writer
        writer.on_closed = self._drop_writer

    async def _fit(self, wanted: Striping, shrink: StripingReduction, groups: BookieGroups) -> Striping:
        well = await self._bookies.count_healthy_bookies(wanted.ensemble_size, groups)
        fitting = reduce_striping(wanted, well, shrink)
        if fitting is not wanted:
            _LOG.warning(
                "%d of %d bookies are healthy: the ledger is created on those, with %d of %d copies",
                well, wanted.ensemble_size, fitting.write_quorum, wanted.write_quorum,
            )  # fmt: skip
        return fitting

    async def open(self, ledger_id: int) -> LedgerReader:
        """Opens a ledger for reading and returns a reader. The reader reads up to the end of a CLOSED ledger; otherwise
        up to the largest last-add-confirmed (LAC) that a bookie reports. Fences nothing.

        Raises LedgerNotFound, Unavailable if no bookie of an open ledger answers or this client is closed, and the
        errors of the metadata."""
        await self._bookies.wait_bookies_listed()
        reader = LedgerReader(await self.read_record(ledger_id), self._bookies, self._metadata, self._config)
        await reader.refresh_last_entry()
        return reader

    @property
    def bookies(self) -> Bookies:
        return self._bookies

    def make_reader(self, record: LedgerRecord) -> LedgerReader:
        """Returns a reader of the ledger with this record. Sends no request. The reader reads what the record alone
        proves to be stored: all entries of a CLOSED ledger, otherwise those before the last fragment. Its
        `refresh_last_entry` asks the bookies for more."""
        return LedgerReader(record, self._bookies, self._metadata, self._config)

    def make_local_reader(self, writer: LedgerWriter) -> LedgerReader:
        """Returns a reader of the ledger that `writer`, in this process, is writing. It reads up to the writer's
        last-add-confirmed (LAC), and needs no request to learn it."""
        reader = LedgerReader(
            writer.record, self._bookies, self._metadata, self._config, confirmed=lambda: writer.last_confirmed
        )
        writer.add_ensemble_change_listener(reader.apply_record)
        return reader

    async def recover(self, ledger_id: int) -> LedgerReader:
        """Recovers a ledger: fences its writer, wherever that runs, and closes the ledger with every confirmed entry in
        it. Returns a reader.

        Raises LedgerNotFound, and the errors of the metadata. Raises Unavailable or NotEnoughBookies if too few bookies
        answer, OutcomeUnknown if the metadata does not answer the close: then the ledger may stay IN_RECOVERY, and the
        caller may try again."""
        return (await self._recover(ledger_id, joined=False))[0]

    async def recover_without_close(self, ledger_id: int) -> tuple[LedgerReader, NodeUpdate | None]:
        """Recovers a ledger like `recover`, with the same errors, but does not close it. Returns (reader, change of the
        metadata that closes the ledger). The change is None if the ledger is closed already. The caller must commit the
        change; only then the reader is valid. The commit raises the errors that `RecoveryResult` in ledger/recovery.py
        names."""
        return await self._recover(ledger_id, joined=True)

    async def _recover(self, ledger_id: int, *, joined: bool) -> tuple[LedgerReader, NodeUpdate | None]:
        await self._bookies.wait_bookies_listed()
        found = await recovery.recover_ledger(ledger_id, self._bookies, self._metadata, self._config, joined=joined)
        return LedgerReader(found.record, self._bookies, self._metadata, self._config, known=found.last), found.end

    def make_lost_entries_search(self, record: LedgerRecord, *, force: bool = False) -> LostEntriesSearch:
        """Returns a search for the entries of the ledger that are certainly lost (recovery.py). Sends no request yet.
        `force`: treats bookies that do not answer as if an operator had deleted them."""
        return LostEntriesSearch(record, self._bookies, self._metadata, self._config, force=force)

    async def read_record(self, ledger_id: int) -> LedgerRecord:
        """Reads the stored record of a ledger and returns it. Raises LedgerNotFound, and the errors of the metadata."""
        return await records.read_record(self._metadata, ledger_id)

    async def delete(self, *ledger_ids: int) -> None:
        """Deletes ledgers for ever. May be repeated, also for ledgers that have no record any more. Raises the errors
        of `delete_ledgers`: then some may be deleted, and the caller must call this again. Calls at the same time share
        their commits."""
        self._unwanted.update(ledger_ids)
        async with self._deleting:
            if not self._unwanted.isdisjoint(ledger_ids):
                some = frozenset(self._unwanted)
                await delete_ledgers(self._metadata, some)
                self._unwanted -= some

    def statistics(self) -> dict[str, dict[str, int]]:
        """Returns the counters of each bookie, by bookie, as `Bookies.statistics` does."""
        return self._bookies.statistics()

    async def close(self) -> None:
        """Abandons all open writers and closes the connections. The ledgers of these writers stay OPEN until a
        recovery."""
        for writer in list(self._writers.values()):
            await writer.abandon()
        await self._bookies.close()

    # ------------------------------------------------------------------------------ creating
    async def _next_id(self, above: int) -> int:
        """Returns the next free ledger id. It is larger than `above`, and than every id up to which some bookie refuses
        adds."""
        while True:
            while self._ids and self._ids[0] <= max(above, self._bookies.fenced_upto):
                self._ids.popleft()
            if self._ids:
                return self._ids.popleft()
            async with self._taking:
                if not self._ids:
                    self._ids.extend(await self._take_ids())

    async def _take_ids(self) -> range:
        """Allocates the next block of ledger ids and returns it. It is twice as large as the last block if that was
        used up within BLOCK_DOUBLED_WITHIN_S seconds."""
        now, least = self._world.clock.monotonic(), self._config.ids_block
        soon = now - self._taken_at < BLOCK_DOUBLED_WITHIN_S
        self._block, self._taken_at = (
            min(2 * self._block, max(least, IDS_PER_BLOCK_MAX)) if soon and self._block else least,
            now,
        )
        return await allocate_ids(self._metadata, self._block)
