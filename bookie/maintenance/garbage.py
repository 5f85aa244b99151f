"""Garbage collection: when the data of a ledger is deleted, and how its disk space becomes free (ledger protocol §2.6).

A ledger is *dead* when, in this order,
 1. the store is not in limbo, and the ledger was here before the listing began (later arrivals are out of scope);
 2. the cluster's instance is the cookie's; the listing of the metadata, which is linearizable
    (`MetadataStore.children`), succeeded and does not name the ledger;
 3. the metadata still has everything that this process stored in it (`went_back`); and when the listing would delete
    at least DELETED_MIN and more than DOUBT_SHARE of the ledgers here, the metadata gave out all of their ids. Else the
    pass is refused (`GarbageRefusal`) unless it is forced;
 4. it is not one that a restored metadata may have forgotten (`Memory.seen`, `kept_upto`), unless the pass is forced;
 5. a direct read says that its record does not exist; in two passes at least `grace_s` apart, by the monotonic clock
    and by the time of day, so that a step of one of them shortens nothing; `doubt_s` past DOUBT_SHARE, or past
    DELETED_SHARE_MAX where the tree saw them deleted: time for an operator to see the warning and `gc_doubtful`;
 6. together they are at most DELETED_SHARE_MAX of the ledgers here (from DELETED_MIN on), or the tree saw them deleted:
    between the pass that found a ledger missing for the first time and the one before it the tree had at least as many
    commits as ledgers disappeared. When the listing lacks more than that, nothing is deleted, however long it lasts,
    until a pass is forced (`magnetar bookies gc --now --force`); `gc_refused` and the log say so. With ZooKeeper, and
    where the pass before is not known, no commits are counted. The first pass of a process counts from the last one
    whose listing named most ledgers (`Memory.was_whole`);
 7. its tombstone is durable in the journal.
Then readers do not find its entries any more. A log without living entries is deleted, and the living entries of sparse
logs are moved together (store/compaction/compaction.py). Any error ends the pass and deletes nothing.

    collector.plan()                                   what would be done with each log, and why; changes nothing
    collector.run(force, minor, major, on_progress)    one pass, then deletion and compaction; one at a time
    collector.keep()                                   for ever: passes, minor and major compactions by their intervals

Guarded by tests/bookie/maintenance/test_garbage.py and test_garbage_doubt.py.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import NamedTuple

from pyroaring import BitMap64

from ...metadata import paths, records
from ...metadata.store import MetadataStore
from ...metadata.update import get_record
from ...proto.errors import Busy, MagnetarError
from ...runtime.clock import Clock
from ..store.compaction.plan import CompactionPolicy, LogPlan
from ..store.disk import NoSpace
from ..store.store import Store
from .schedule import Schedule
from .seen import Memory

_LOG = logging.getLogger("magnetar.bookie.maintenance")

DELETED_SHARE_MAX = 0.5
"""Share of the ledgers here. More of them get tombstones only in a forced pass, or when the tree saw them deleted."""
DOUBT_SHARE = 0.25
"""Share of the ledgers here. More of them wait for `doubt_s`, unless the tree saw them deleted."""
DELETED_MIN = 10
"""No share applies to fewer missing ledgers than this: of few ledgers any number is a large share."""
_PART = 4096
_READS_MAX = 64
"""Reads of the metadata at a time."""


class GarbageRefusal(enum.Enum):
    """Why a pass deleted no ledger although some are missing from the metadata."""

    LIMBO = "the store may have lost entries and is being repaired"
    EMPTY_LISTING = "the metadata names no ledger at all"
    TOO_MANY = "more than half of the ledgers here are missing from the metadata"
    KEPT = "a restored metadata does not know them, and may have forgotten them"
    WENT_BACK = "the metadata forgot what this bookie told it: it was restored from a backup, or is another one"


class GracePeriod(NamedTuple):
    """Seconds for which a ledger must be missing from the metadata before its data is deleted."""

    grace_s: float
    doubt_s: float  # when more than DOUBT_SHARE of the ledgers are missing


class GarbageProgress(NamedTuple):
    phase: str  # "metadata", "plan", "delete", "compact", "done"
    logs_done: int
    logs: int
    bytes_done: int  # moved
    bytes: int  # to be moved


class _Seen(NamedTuple):
    """A moment on two clocks: a step of one of them shortens no grace."""

    monotonic_s: float
    wall_ms: int

    def is_after(self, since: _Seen, grace_s: float) -> bool:
        elapsed_s = min(self.monotonic_s - since.monotonic_s, (self.wall_ms - since.wall_ms) / 1000)
        return self.monotonic_s > since.monotonic_s and elapsed_s >= grace_s


class Collected(NamedTuple):
    suspected: int  # dead for the first time, or not for long enough
    refused: GarbageRefusal | None
    ledgers_deleted: list[int]
    logs_deleted: list[int]
    logs_compacted: list[int]
    bytes_freed: int  # of the files that went
    bytes_moved: int
    bad_records: int  # found while moving: quarantined


OnProgress = Callable[[GarbageProgress], None]


class Collector:
    """`metadata` returns the present session; `may_compact_major` is asked before each major compaction.

    `went_back`: the metadata lost something that this process stored in it (identity.py); only a restart resets it.
    `memory` knows which ledgers a restored metadata may lack (seen.py); a forced pass gives them up.

    While `disk_is_full`, each pass compacts every log that gives something back (`CompactionPolicy.full_share`): a
    bookie with half-dead logs must not stay read-only until the next major compaction, or for ever.
    """

    def __init__(
        self, store: Store, clock: Clock, metadata: Callable[[], MetadataStore], instance: str, patience: GracePeriod,
        policy: CompactionPolicy, schedule: Schedule, may_compact_major: Callable[[], bool] = lambda: True,
        disk_is_full: Callable[[], bool] = lambda: False, went_back: Callable[[], bool] = lambda: False,
        memory: Memory | None = None,
    ) -> None:  # fmt: skip
        self._memory = memory
        self._store = store
        self._clock = clock
        self._metadata = metadata
        self._instance = instance
        self._patience = patience
        self._policy = policy
        self._schedule = schedule
        self._may_compact_major = may_compact_major
        self._disk_is_full = disk_is_full
        self._went_back = went_back
        self._doubtful = 0  # more than DOUBT_SHARE of the ledgers, which the last pass left for `doubt_s`
        self._before: tuple[BitMap64, int] | None = None  # what the last pass missed, and at which revision
        self._unexplained = BitMap64()  # of what is missing: went without a commit of their own
        self._suspects: dict[int, _Seen] = {}  # ledger: when it was first seen dead
        self._running = False
        self.refused: GarbageRefusal | None = None  # of the last pass

    # ------------------------------------------------------------------------------------ intents
    async def plan(self, *, major: bool = True) -> list[LogPlan]:
        """What compaction would do with each log now, for the ledgers that have tombstones now."""
        return await self._store.compactor.plan(self._policy, major=major)

    async def run(
        self, *, force: bool = False, minor: bool = True, major: bool = False, roll: bool = False,
        on_progress: OnProgress = lambda progress: None,
    ) -> Collected:  # fmt: skip
        """One pass over the metadata, then deletion, and compaction if asked. Busy when one is running.

        `force`: also deletes what condition 3 refuses. `roll`: closes open logs with few living entries, and moves
        those. Errors of the metadata are raised, and nothing was deleted.
        """
        if self._running:
            raise Busy("garbage collection is running already; ask for its status")
        self._running = True
        try:
            on_progress(GarbageProgress("metadata", 0, 0, 0, 0))
            suspected, refused, dead = await self._delete_dead(force)
            self.refused = refused
            policy = self._policy.on_a_full_disk() if self._disk_is_full() else self._policy
            done = await self._store.compactor.run(
                policy if minor or major else None, major=major, roll=roll,
                on_progress=lambda *numbers: on_progress(GarbageProgress(*numbers)),
            )  # fmt: skip
            if dead or done.deleted or done.compacted:
                _LOG.info(
                    "deleted %d ledgers, deleted %d and compacted %d entry logs: %d bytes freed, %d moved",
                    len(dead), len(done.deleted), len(done.compacted), done.bytes_freed, done.bytes_moved,
                )  # fmt: skip
            return Collected(suspected, refused, dead, *done)
        finally:
            self._running = False

    def statistics(self) -> dict[str, int]:
        refused = int(self.refused is not None and not self._doubtful)
        return {"gc_running": int(self._running), "gc_refused": refused, "gc_doubtful": self._doubtful}

    async def keep(self) -> None:
        """The first pass comes one interval after the start: clients that waited for the bookie are served first."""
        await asyncio.sleep(self._schedule.pass_s)
        await self._schedule.load()
        while True:
            await self._run_what_is_due()
            await asyncio.sleep(self._schedule.pass_s)

    async def _run_what_is_due(self) -> None:
        minor_due, major_due = self._schedule.due()
        major = major_due and self._may_compact_major()
        full = self._disk_is_full()
        minor = major or minor_due or full
        try:
            await self.run(minor=minor, major=major, roll=full)
        except (MagnetarError, ValueError, NoSpace, OSError) as error:
            _LOG.warning("garbage collection failed, the next pass continues: %s", error)
            return
        await self._schedule.ran(minor=minor, major=major)

    # ------------------------------------------------------------------------------------ the pass
    async def _delete_dead(self, force: bool) -> tuple[int, GarbageRefusal | None, list[int]]:
        """(number of missing ledgers, why none got a tombstone, those that got one)."""
        store, metadata = self._store, self._metadata()
        if store.descriptors.limbo_upto >= 0:
            self._suspects = {}
            return 0, GarbageRefusal.LIMBO, []
        local = self._local()
        await self._check_cluster(metadata)
        revision = await metadata.revision()
        listed = await _ids(await metadata.children(paths.LEDGERS))
        missing = local - listed
        self._explain(missing, revision)
        if self._memory is not None and not _is_more_than(DOUBT_SHARE, missing, local):
            await self._memory.was_whole(revision)
        kept = self._kept(missing)
        if force:
            await self._give_up(kept)
        else:
            missing -= kept
        refused = None if force else await self._refusal(metadata, listed, missing, local)
        self._doubtful = 0
        if refused is not None:
            _LOG.error(
                "garbage collection deletes nothing: %s (%d of %d); if they were deleted on purpose, "
                "`magnetar bookies gc --now --force` deletes them", refused.value, len(missing), len(local),
            )  # fmt: skip
            gone = missing if refused is not GarbageRefusal.WENT_BACK else BitMap64()
            self._suspects = {ledger: since for ledger, since in self._suspects.items() if ledger in gone}
            return len(missing), refused, []
        doubtful = not force and _is_more_than(
            DOUBT_SHARE if self._unexplained & missing else DELETED_SHARE_MAX, missing, local
        )
        confirmed = await _confirmed(metadata, list(missing))
        now = _Seen(self._clock.monotonic(), self._clock.wall_ms())
        self._suspects = {ledger: self._since(ledger, now) for ledger in confirmed}
        grace_s, doubt_s = self._patience
        wait_s = max(grace_s, doubt_s) if doubtful else grace_s
        dead = [ledger for ledger, since in self._suspects.items() if now.is_after(since, wait_s)]
        if store.descriptors.limbo_upto >= 0:
            return len(self._suspects), GarbageRefusal.LIMBO, []
        left = GarbageRefusal.KEPT if kept and not force else None
        if doubtful and not dead:
            self._doubtful = len(self._suspects)
            _LOG.warning(
                "%d of %d ledgers here are missing from the metadata; they are deleted after %g s",
                len(missing), len(local), wait_s,
            )  # fmt: skip
            return len(self._suspects), left, []
        if dead and not await store.delete(dead):
            return len(self._suspects), left, []
        for ledger in dead:
            del self._suspects[ledger]
        return len(self._suspects), left, dead

    def _explain(self, missing: BitMap64, revision: int) -> None:
        """Whether the tree had a commit for each ledger that is missing for the first time."""
        new, commits = missing, 0 if self._memory is None else self._memory.commits_since_whole(revision)
        if self._before is not None:
            new = missing - self._before[0]
            counted = self._memory is not None and self._memory.seen.token
            commits = max(0, revision - self._before[1]) if counted else 0
        self._unexplained &= missing
        if len(new) > commits:
            self._unexplained |= new
        self._before = missing.copy(), revision

    async def _refusal(
        self, metadata: MetadataStore, listed: BitMap64, missing: BitMap64, local: BitMap64
    ) -> GarbageRefusal | None:
        if missing and self._went_back():
            return GarbageRefusal.WENT_BACK
        if not listed and len(missing) >= DELETED_MIN:
            return GarbageRefusal.EMPTY_LISTING
        if _is_more_than(DELETED_SHARE_MAX, missing, local) and self._unexplained & missing:
            return GarbageRefusal.TOO_MANY
        if _is_more_than(DOUBT_SHARE, missing, local) and not await _handed_out(metadata, missing):
            return GarbageRefusal.TOO_MANY
        return None

    def _kept(self, missing: BitMap64) -> BitMap64:
        upto = -1 if self._memory is None else self._memory.seen.kept_upto
        return BitMap64(ledger for ledger in missing if ledger <= upto) if upto >= 0 else BitMap64()

    async def _give_up(self, kept: BitMap64) -> None:
        if kept and self._memory is not None:
            _LOG.warning("%d ledgers that the restored metadata does not know are given up", len(kept))
            await self._memory.give_up()

    def _local(self) -> BitMap64:
        """Every ledger that is here without a tombstone, also one of which only entries are left."""
        store = self._store
        local = store.descriptors.ids()
        for number in store.index.logs():
            local |= store.index.ledgers_of(number)
        for first, last in store.descriptors.tombstones:
            local.remove_range(first, last + 1)
        return local

    def _since(self, ledger: int, now: _Seen) -> _Seen:
        """When it was first seen dead; now, when the time of day stepped back to before that."""
        since = self._suspects.get(ledger, now)
        return since if since.wall_ms <= now.wall_ms else now

    async def _check_cluster(self, metadata: MetadataStore) -> None:
        found = await metadata.get(paths.CLUSTER)
        if found is None:
            raise ValueError(f"{paths.CLUSTER} is missing from the metadata: nothing is deleted")
        record = records.decode(found.value, records.ClusterRecord, paths.CLUSTER)
        if record.instance != self._instance:
            raise ValueError(f"the metadata is of cluster {record.instance}, not {self._instance}: nothing is deleted")


async def _ids(names: list[str]) -> BitMap64:
    """In parts: a million names would hold up adds."""
    found = BitMap64()
    for at in range(0, len(names), _PART):
        found.update(map(paths.ledger_id, names[at : at + _PART]))
        await asyncio.sleep(0)
    return found


async def _confirmed(metadata: MetadataStore, ledgers: list[int]) -> list[int]:
    """Those of which the metadata has no record."""
    gone: list[int] = []
    for at in range(0, len(ledgers), _READS_MAX):
        asked = ledgers[at : at + _READS_MAX]
        found = await asyncio.gather(*[metadata.get(paths.ledger(ledger)) for ledger in asked])
        gone += [ledger for ledger, record in zip(asked, found, strict=True) if record is None]
    return gone


async def _handed_out(metadata: MetadataStore, ledgers: BitMap64) -> bool:
    """Whether this metadata store handed out all of these ids, as far as it counts them: it may have deleted them."""
    counter = await get_record(metadata, paths.LEDGER_IDS, records.CounterRecord)
    return counter is None or max(ledgers, default=-1) < counter[0].next


def _is_more_than(share: float, missing: BitMap64, local: BitMap64) -> bool:
    return len(missing) >= DELETED_MIN and len(missing) > share * len(local)
