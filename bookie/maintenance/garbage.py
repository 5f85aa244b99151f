"""Garbage collection: when the data of a ledger is deleted, and how its disk space becomes free (ledger protocol §2.6).

A ledger is *dead* when, in this order,
 1. the store is not in limbo, and the ledger was here before the listing began (later arrivals are out of scope);
 2. the cluster's instance is the cookie's; the listing of the metadata, of which each page is linearizable
    (`MetadataStore.list_nodes`), succeeded and does not name the ledger;
 3. the metadata still has everything that this process stored in it (`went_back`), or an operator accepted it;
 4. *its owner deleted it*: it is among the deleted ledgers of the metadata (ledger/client.py). A ledger that has no
    record and is not among them is *unexplained*: the metadata may be damaged, an older copy, or another one. Such a
    ledger is kept, counted (`gc_unexplained`) and logged, until an operator accepts that it is deleted;
 5. a direct read says that its record does not exist; in two passes at least `grace_s` apart, by the monotonic clock
    and by the time of day, so that a step of one of them shortens nothing; `doubt_s` when more than
    DOUBTFUL_DELETIONS_SHARE of the ledgers here were deleted: time for an operator to see the warning and
    `gc_doubtful`;
 6. its tombstone is durable in the journal.
With a forced pass (`magnetar bookies gc --now --force`) an operator accepts the present state of the metadata, and that
the ledgers that it lacks now are deleted (`AcceptedMetadataState`). A later pass, forced or not, deletes them by
conditions 1, 2, 5 (with `grace_s`) and 6. The acceptance is in memory. It ends with the process, and with the first
pass that finds that the metadata was restored or went back since: then an operator is asked again.

A copy is *surplus* when the ledger's record is CLOSED and names other bookies alone. A repair or a rebalancing that
makes the copies elsewhere leaves it behind (repair_core.py, rebalance_core.py). A pass drops it when
 1. the store is not in limbo, and the metadata did not go back (as above);
 2. the ledger has no repair mark and no report of damaged entries, and every bookie that its record names is
    registered, not in limbo, and says of no failed disk that the ledger is on it;
 3. that is so in two passes at least `grace_s` apart (`doubt_s`: as above);
 4. it is so once more while the store admits no add to the ledger, and says that it holds nothing of it
    (`Store.dropping`). A worker marks a ledger before it asks what a bookie holds, and names the bookie before it takes
    the mark away: so no copy goes that a record is about to name;
 5. that copies were dropped is durable (`Store.record_dropped_copies`): a miss is UNKNOWN, and no vote to end a ledger.
Key and fence of the ledger stay, and the bookie takes copies of it again: there is no tombstone. What lives of it in a
log goes when that log is deleted or compacted. A pass reads `SURPLUS_READS_PER_PASS` records, in turn.

Then readers do not find its entries any more. A log without living entries is deleted, and the living entries of sparse
logs are moved together (store/entrylog/compaction.py). Any error ends the pass and deletes nothing.

    collector.plan_compaction()                        what would be done with each log, and why; changes nothing
    collector.run_pass(force, minor, major, …)         one pass, then deletion and compaction; one at a time
    collector.run_forever()                            for ever: passes, minor and major compactions by their intervals

Guarded by tests/bookie/maintenance/test_garbage.py and test_garbage_doubt.py.

Also in this file, below its heading: the times at which minor and major compaction are due, also for a bookie that is
restarted more often than that (schedule).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec
from pyroaring import BitMap64

from ...ledger import client as deletions
from ...metadata import paths, records
from ...metadata.store import MetadataStore, iterate_nodes, parse_ledger_ids, read_readable_records
from ...proto.errors import Busy, MagnetarError, NewerFormat, Unavailable
from ...runtime.clock import Clock
from ...runtime.files import join_path
from ...runtime.network import World
from ..format import mark as note
from ..format.journal import DamagedFile
from ..store import disk
from ..store.disk import NoSpace
from ..store.entrylog.mover import CompactionPolicy, EntryLogPlan
from ..store.store import Store
from .seen import (
    RecordedMetadataState,
    is_same_metadata,
    make_recorded_metadata_state,
    read_current_metadata_state,
)

# ------------------------------------------------------------------------------------------------------ schedule
# The times at which minor and major compaction are due, also for a bookie that is restarted more often than that.
#
#     find_due_compactions()    (minor, major): the interval since the last complete one is over
#     record_compaction_run()   just now; durable in the note `gc` of the data directory (format/mark.py, magic
#                               "MGN-GCOL")
#     load()                    reads the note, before the first pass of a process
#
#     note body = {"minor_ms": time of day, "major_ms": time of day}
#
# A running process measures with the monotonic clock; the times of the note count at a start only. A time in the future
# means that the clock was wrong then or is wrong now. It is taken as long ago: that costs one early compaction, and the
# other guess could delay compaction for ever. Without a note, or with a damaged one, the intervals begin with the
# start, which writes the note; its loss costs no more than that. Guarded by tests/bookie/maintenance/test_schedule.py.


_LOG = logging.getLogger("magnetar.bookie.maintenance")

COMPACTION_TIMES_FILE = "gc"
GARBAGE_MAGIC = b"MGN-GCOL"


class LastCompactionTimes(msgspec.Struct, frozen=True):
    """The times of day at which the last minor and the last major compaction ran, in ms since the epoch."""

    minor_ms: int
    major_ms: int


class CompactionSchedule:
    """Decides when a minor and a major compaction of the entry logs are due: `minor_s` and `major_s` seconds after the
    last one. `pass_s`: the seconds between two passes of the garbage collector. Stores the times of the last
    compactions in a file of the data directory, so that restarts do not delay them."""

    def __init__(self, world: World, directory: str, pass_s: float, minor_s: float, major_s: float) -> None:
        self._world = world
        self._directory = directory
        self._worker = world.workers.start("bookie-gc")
        self.pass_s = pass_s
        self._minor_s = minor_s
        self._major_s = major_s
        now = world.clock.monotonic()
        self._minor_due, self._major_due = now + minor_s, now + major_s
        self._times = LastCompactionTimes(world.clock.wall_ms(), world.clock.wall_ms())

    async def load(self) -> None:
        """Reads the times that an earlier process stored. Must be called once, before the first compaction. Without a
        file, or if it is damaged, the intervals begin now."""
        found = await self._worker.run(self._read)
        if found is None:
            await self._save()
            return
        self._times = found
        self._minor_due = self._due_at(found.minor_ms, self._minor_s)
        self._major_due = self._due_at(found.major_ms, self._major_s)

    def _due_at(self, last_ms: int, interval_s: float) -> float:
        elapsed_s = (self._world.clock.wall_ms() - last_ms) / 1000
        left_s = interval_s - elapsed_s if elapsed_s >= 0 else 0.0
        return self._world.clock.monotonic() + max(0.0, left_s)

    def find_due_compactions(self) -> tuple[bool, bool]:
        """Returns (whether a minor compaction is due, whether a major compaction is due)."""
        now = self._world.clock.monotonic()
        return now >= self._minor_due, now >= self._major_due

    async def record_compaction_run(self, *, minor: bool, major: bool) -> None:
        """Records that a minor or a major compaction (or both) has just run. The interval until the next one begins
        again. The times are durable when this returns, unless the disk has no room for them."""
        if not minor and not major:
            return
        now, wall_ms = self._world.clock.monotonic(), self._world.clock.wall_ms()
        if minor:
            self._minor_due = now + self._minor_s
            self._times = msgspec.structs.replace(self._times, minor_ms=wall_ms)
        if major:
            self._major_due = now + self._major_s
            self._times = msgspec.structs.replace(self._times, major_ms=wall_ms)
        await self._save()

    async def close(self) -> None:
        """Waits until the times that are being written are on the disk, and ends the worker."""
        await self._worker.close()

    def _read(self) -> LastCompactionTimes | None:
        path = join_path(self._directory, COMPACTION_TIMES_FILE)
        if not self._world.files.exists(path):
            return None
        try:
            return note.decode_checksummed_json(
                disk.read_file(self._world.files, path), GARBAGE_MAGIC, LastCompactionTimes, path
            )
        except (DamagedFile, NewerFormat, OSError) as error:
            _LOG.warning("the times of the last compactions cannot be read: %s", error)
            return None

    async def _save(self) -> None:
        data = note.encode_checksummed_json(GARBAGE_MAGIC, self._times)
        try:
            await self._worker.run(disk.replace_file, self._world.files, self._directory, COMPACTION_TIMES_FILE, data)
        except (disk.NoSpace, OSError) as error:
            _LOG.warning("the times of the last compactions are not stored: %s", error)


# ------------------------------------------------------------------------------------------------------- garbage


DOUBTFUL_DELETIONS_SHARE = 0.5
"""If more than this share of the bookie's ledgers was deleted, their data is kept for `doubt_s` instead of
`grace_s`."""
DOUBTFUL_DELETIONS_MIN = 10
"""DOUBTFUL_DELETIONS_SHARE applies from this number of deleted ledgers on: of few ledgers any number is a large
share."""
SURPLUS_READS_PER_PASS = 20_000
"""The largest number of ledgers of which one pass reads the records to find surplus copies: some seconds in all."""
LOGGED_LEDGERS_MAX = 5
"""The largest number of unexplained ledgers that a log message names."""
_READS_MAX = 64
"""The largest number of metadata reads at a time."""


class GarbageRefusal(enum.Enum):
    """The reason why a pass of the garbage collector keeps the data of ledgers that have no record in the metadata."""

    LIMBO = "the store may have lost entries and is being repaired"
    UNEXPLAINED = "the metadata has no record of them, and none of their deletion"
    WENT_BACK = "the metadata forgot what this bookie told it: it was restored from a backup, or is another one"

    def describe(self) -> str:
        """Returns the reason, and what an operator is to do."""
        return self.value + _TODO.get(self, "")


_FORCE = "`magnetar bookies gc --now --force` gives up what it lacks"
_TODO = {
    GarbageRefusal.UNEXPLAINED: f"; put the right metadata back, or, if it is the right one, {_FORCE}",
    GarbageRefusal.WENT_BACK: f"; if it is the right one, restart the bookie, which keeps what it lacks; or {_FORCE}",
}


class GracePeriod(NamedTuple):
    """How many seconds a ledger must be dead before the bookie deletes its data: `grace_s`, or `doubt_s` if unusually
    many ledgers were deleted (DOUBTFUL_DELETIONS_SHARE)."""

    grace_s: float
    doubt_s: float  # when more than DOUBTFUL_DELETIONS_SHARE of the ledgers were deleted


class GarbageProgress(NamedTuple):
    """The progress of a running pass, for its status: what it does now, and how many entry logs and bytes of how many
    are done."""

    phase: str  # "metadata", "plan", "delete", "compact", "done"
    logs_done: int
    logs: int
    bytes_done: int  # moved
    bytes: int  # to be moved


class _Seen(NamedTuple):
    """A moment, by the monotonic clock and by the time of day. The grace period is measured by both clocks, so that a
    jump of one of them does not shorten it."""

    monotonic_s: float
    wall_ms: int

    def is_after(self, since: _Seen, grace_s: float) -> bool:
        elapsed_s = min(self.monotonic_s - since.monotonic_s, (self.wall_ms - since.wall_ms) / 1000)
        return self.monotonic_s > since.monotonic_s and elapsed_s >= grace_s


class GarbageResult(NamedTuple):
    """The result of a pass: which ledgers and logs were deleted or compacted, and how many bytes that freed. `refused`:
    why the data of other ledgers is kept; None: no reason."""

    suspected: int  # dead for the first time, or not for long enough
    grace_ends_ms: int  # of the last of them, in ms since the epoch: the first pass after it deletes them; 0: none
    refused: GarbageRefusal | None
    ledgers_deleted: list[int]
    logs_deleted: list[int]
    logs_compacted: list[int]
    bytes_freed: int  # of the files that went
    bytes_moved: int
    bad_records: int  # found while moving: quarantined
    surplus: int = 0  # ledgers with copies here that no record names, and that are not dropped yet
    dropped: int = 0  # … that were dropped; their bytes go when their logs go


class AcceptedMetadataState(NamedTuple):
    """What an operator accepted with a forced pass: that this state of the metadata is the right one, and that the data
    of the `ledgers` that it lacked then may be deleted."""

    state: RecordedMetadataState
    went_back: int  # how often the metadata had gone back by then
    ledgers: BitMap64


OnProgress = Callable[[GarbageProgress], None]
UpdateLabels = Callable[[BitMap64, BitMap64, Iterable[tuple[int, int]]], Awaitable[None]]
"""A function that gets (ledgers that are here, those whose deletion is recorded, the intervals of all tombstones)."""


async def update_no_labels(local: BitMap64, deleted: BitMap64, tombstones: Iterable[tuple[int, int]]) -> None:
    """Does nothing. The default of `update_labels`."""



class GarbageCollector:
    """Deletes the data of a bookie's dead ledgers and frees their disk space. Calling `metadata` returns the current
    metadata session. `instance`: the id of the cluster to which the bookie belongs. A major compaction that is due runs
    only if `may_compact_major` returns True.

    `went_back` returns how often the metadata was found to have lost something that this process stored in it. If that
    happened, no data is deleted until an operator accepts the metadata, or until a restart. `compare_metadata` looks
    for such a loss now. `update_labels` is a part of each pass (labels.py). `bookie`: the id of the bookie, by which
    its surplus copies are found; "": none is looked for.

    While `disk_is_full` returns True, each pass compacts every log from which space can be freed
    (`CompactionPolicy.full_share`). Otherwise a bookie with half-dead logs would stay read-only until the next major
    compaction, or for ever."""

    def __init__(
        self, store: Store, clock: Clock, metadata: Callable[[], MetadataStore], instance: str, patience: GracePeriod,
        policy: CompactionPolicy, schedule: CompactionSchedule, may_compact_major: Callable[[], bool] = lambda: True,
        disk_is_full: Callable[[], bool] = lambda: False, went_back: Callable[[], int] = lambda: 0,
        compare_metadata: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
        update_labels: UpdateLabels = update_no_labels, bookie: str = "",
    ) -> None:  # fmt: skip
        self._store = store
        self._bookie = bookie
        self._surplus: dict[int, _Seen] = {}  # ledger: since when no record names the copies here
        self._looked_upto = -1  # the last ledger of which a pass read the record, for that
        self._dropped = BitMap64()  # ledgers of which copies were dropped since the start
        self._clock = clock
        self._metadata = metadata
        self._instance = instance
        self._patience = patience
        self._policy = policy
        self._schedule = schedule
        self._may_compact_major = may_compact_major
        self._disk_is_full = disk_is_full
        self._went_back = went_back
        self._compare_metadata = compare_metadata
        self._update_labels = update_labels
        self._deleted = BitMap64()  # of what the last pass missed: known to be deleted
        self._accepted: AcceptedMetadataState | None = None
        self._doubtful = BitMap64()  # above DOUBTFUL_DELETIONS_SHARE: the last pass left them for `doubt_s`
        self._unexplained = BitMap64()  # of what the last pass missed: not known to be deleted
        self._suspects: dict[int, _Seen] = {}  # ledger: when it was first seen dead
        self._running = False
        self._refused: GarbageRefusal | None = None  # of the last pass

    @property
    def refusal(self) -> GarbageRefusal | None:
        """Why data of some ledgers is kept: the reason of the last pass, or WENT_BACK as soon as the metadata went
        back. None: no reason."""
        if self._refused is not GarbageRefusal.LIMBO and self._has_gone_back():
            return GarbageRefusal.WENT_BACK
        return self._refused

    # ------------------------------------------------------------------------------------ intents
    async def plan_compaction(self, *, major: bool = True) -> list[EntryLogPlan]:
        """Returns for each entry log the action that a minor or (`major` True) a major compaction would take now, and
        its reason. Changes nothing. Raises OSError if the directory of the logs cannot be listed."""
        return await self._store.compactor.plan_compaction(self._policy, major=major)

    async def run_pass(
        self, *, force: bool = False, minor: bool = True, major: bool = False, roll: bool = False,
        on_progress: OnProgress = lambda progress: None,
    ) -> GarbageResult:  # fmt: skip
        """Makes one pass: compares the bookie's ledgers with the metadata, deletes dead ledgers, and compacts entry
        logs if `minor` or `major` is true. Returns what was deleted and compacted.

        `force`: an operator accepts the metadata, and that later passes delete the data of the ledgers that it lacks
        (the module's docstring). `roll`: first closes open logs that have few living entries, so that they can be
        compacted. `on_progress` is called with the progress, again and again.

        Raises Busy while another pass runs, ValueError if the metadata is of another cluster or damaged, and the errors
        of the metadata; then nothing was deleted. Raises NoSpace, OSError or DamagedFile if the compaction failed; then
        ledgers may be deleted."""
        if self._running:
            raise Busy("garbage collection is running already; ask for its status")
        self._running = True
        try:
            on_progress(GarbageProgress("metadata", 0, 0, 0, 0))
            refused, dead = await self._delete_dead(force)
            self._refused = refused
            await self._update_labels(self._local(), self._deleted, self._store.descriptors.tombstones)
            policy = self._policy.full_disk_policy() if self._disk_is_full() else self._policy
            surplus = await self._find_droppable()
            try:
                dropped = await self._begin_dropping(surplus)
                done = await self._store.compactor.run_compaction(
                    policy if minor or major else None, major=major, roll=roll,
                    on_progress=lambda *numbers: on_progress(GarbageProgress(*numbers)),
                )  # fmt: skip
            finally:
                self._store.dropping.clear()
            if dead or done.deleted or done.compacted:
                _LOG.info(
                    "deleted %d ledgers, deleted %d and compacted %d entry logs: %d bytes freed, %d moved",
                    len(dead), len(done.deleted), len(done.compacted), done.bytes_freed, done.bytes_moved,
                )  # fmt: skip
            return GarbageResult(
                len(self._suspects), self._grace_ends_ms(), refused, dead, *done, len(self._surplus), dropped
            )  # fmt: skip
        finally:
            self._running = False

    def statistics(self) -> dict[str, int]:
        return {
            "gc_running": int(self._running), "gc_refused": int(self.refusal is not None),
            "gc_doubtful": len(self._doubtful), "gc_unexplained": len(self._unexplained),
            "gc_surplus": len(self._surplus), "gc_dropped": len(self._dropped),
        }  # fmt: skip

    async def run_forever(self) -> None:
        """Makes a pass at each interval, until the task is cancelled. The first pass begins one interval after the
        start, because clients that waited for the bookie are served first. Logs errors; the next pass continues."""
        await asyncio.sleep(self._schedule.pass_s)
        await self._schedule.load()
        while True:
            await self._run_what_is_due()
            await asyncio.sleep(self._schedule.pass_s)

    async def _run_what_is_due(self) -> None:
        minor_due, major_due = self._schedule.find_due_compactions()
        major = major_due and self._may_compact_major()
        full = self._disk_is_full()
        minor = major or minor_due or full
        try:
            await self.run_pass(minor=minor, major=major, roll=full)
        except (MagnetarError, ValueError, NoSpace, OSError, DamagedFile) as error:
            _LOG.warning("garbage collection failed, the next pass continues: %s", error)
            return
        await self._schedule.record_compaction_run(minor=minor, major=major)

    # ------------------------------------------------------------------------------------ the pass
    async def _delete_dead(self, force: bool) -> tuple[GarbageRefusal | None, list[int]]:
        """Deletes the dead ledgers. Returns (reason why other missing ledgers are kept or None, ids of the deleted
        ledgers). Those whose grace period still runs are in `_suspects`."""
        store, metadata = self._store, self._metadata()
        if store.descriptors.limbo_upto >= 0:
            self._suspects = {}
            return GarbageRefusal.LIMBO, []
        local = self._local()
        await self._check_cluster(metadata)
        if force:
            await self._compare_metadata()
        accepted = self._accepted
        if accepted is not None and not await self._is_accepted(metadata, accepted):
            _LOG.error("an operator accepted another state of the metadata: ledgers that it lacks are kept")
            accepted = self._accepted = None
            self._suspects = {}
        if force:
            accepted = await self._make_acceptance(metadata)
        missing = await _select_missing(metadata, local)
        if force and accepted is not None:
            accepted = accepted._replace(ledgers=missing)
        given_up = BitMap64() if accepted is None else accepted.ledgers & missing
        deleted = await deletions.find_deleted_ledgers(metadata, missing)
        self._deleted = deleted
        refused = self._refusal(missing - given_up, deleted)
        wanted = given_up if refused is GarbageRefusal.WENT_BACK else given_up | deleted
        confirmed = await _confirmed(metadata, list(wanted))
        if accepted is not None and not await self._is_accepted(metadata, accepted):
            raise Unavailable("the metadata was replaced during the pass: nothing is deleted")
        self._accepted = accepted
        now = _Seen(self._clock.monotonic(), self._clock.wall_ms())
        self._suspects = {ledger: self._since(ledger, now) for ledger in confirmed}
        doubtful = wanted - given_up
        if len(doubtful) < DOUBTFUL_DELETIONS_MIN or len(doubtful) <= DOUBTFUL_DELETIONS_SHARE * len(local):
            doubtful = BitMap64()
        self._doubtful = doubtful
        dead = [
            ledger for ledger, since in self._suspects.items() if now.is_after(since, self._grace_of_ledger_s(ledger))
        ]
        if store.descriptors.limbo_upto >= 0:
            return GarbageRefusal.LIMBO, []
        if doubtful and not dead:
            wait_s = self._grace_of_ledger_s(doubtful[0])
            told = "%d of %d ledgers here were deleted; their data goes after %g s"
            _LOG.info(told, len(doubtful), len(local), wait_s)
        if not dead or not await store.delete_ledgers(dead):
            return refused, []
        for ledger in dead:
            del self._suspects[ledger]
        self._doubtful -= BitMap64(dead)
        return refused, dead

    def _grace_of_ledger_s(self, ledger: int) -> float:
        """Returns for how many seconds a ledger must be dead before its data goes."""
        return max(self._patience) if ledger in self._doubtful else self._patience.grace_s

    def _grace_ends_ms(self) -> int:
        """Returns when the grace period of the last suspected ledger ends, in ms since the epoch; 0: there is none."""
        ends = (since.wall_ms + 1000 * self._grace_of_ledger_s(ledger) for ledger, since in self._suspects.items())
        return int(max(ends, default=0))

    def _has_gone_back(self) -> bool:
        """Returns whether the metadata lost something that this process stored, and no operator accepted it since."""
        return self._went_back() > (0 if self._accepted is None else self._accepted.went_back)

    async def _make_acceptance(self, metadata: MetadataStore) -> AcceptedMetadataState:
        """Returns the acceptance of the present state of the metadata; its ledgers are to be listed after this."""
        shown = await read_current_metadata_state(metadata)
        state = make_recorded_metadata_state(RecordedMetadataState(), shown, restored=True)
        return AcceptedMetadataState(state, self._went_back(), BitMap64())

    async def _is_accepted(self, metadata: MetadataStore, accepted: AcceptedMetadataState) -> bool:
        """Returns whether the metadata is the accepted one: it was not restored and did not go back since."""
        shown = await read_current_metadata_state(metadata)
        return accepted.went_back == self._went_back() and is_same_metadata(accepted.state, shown)

    def _refusal(self, missing: BitMap64, deleted: BitMap64) -> GarbageRefusal | None:
        """Returns the reason why some of the ledgers `missing` from the metadata are kept; None if all of them may be
        deleted. Logs the reason if it is new."""
        unexplained = missing - deleted
        refused, kept = (GarbageRefusal.UNEXPLAINED, unexplained) if unexplained else (None, missing)
        if missing and self._has_gone_back():
            refused, kept = GarbageRefusal.WENT_BACK, missing
        if refused is not None and (refused is not self._refused or unexplained - self._unexplained):
            _LOG.error(
                "garbage collection keeps %d ledgers (%s%s): %s",
                len(kept), ", ".join(map(str, kept[:LOGGED_LEDGERS_MAX])),
                ", …" if len(kept) > LOGGED_LEDGERS_MAX else "", refused.describe(),
            )  # fmt: skip
        self._unexplained = unexplained
        return refused

    # ------------------------------------------------------------------------------------ surplus copies
    async def _find_droppable(self) -> BitMap64:
        """Returns the ledgers whose copies here have been surplus for the grace period. Looks at those that were
        surplus before, and at the next `SURPLUS_READS_PER_PASS` others."""
        if not self._bookie or self._store.descriptors.limbo_upto >= 0 or self._has_gone_back():
            self._surplus = {}
            return BitMap64()
        here = self._in_logs()
        now = _Seen(self._clock.monotonic(), self._clock.wall_ms())
        looked = self._next_to_look_at(here) | (BitMap64(self._surplus) & here)
        found = await self._select_surplus(looked)
        self._surplus = {ledger: self._surplus_since(ledger, now) for ledger in found}
        doubtful = len(found) >= DOUBTFUL_DELETIONS_MIN and len(found) > DOUBTFUL_DELETIONS_SHARE * len(here)
        grace_s = max(self._patience) if doubtful else self._patience.grace_s
        return BitMap64(ledger for ledger, since in self._surplus.items() if now.is_after(since, grace_s))

    async def _begin_dropping(self, surplus: BitMap64) -> int:
        """Lets the next compaction remove the copies of those ledgers of `surplus` that are still surplus. Returns how
        many ledgers that are."""
        if not surplus:
            return 0
        dropping = self._store.dropping
        dropping.update(surplus)
        still = await self._select_surplus(surplus)
        dropping.intersection_update(still)
        await self._store.record_dropped_copies()
        new = still - self._dropped
        if new:
            _LOG.info("copies of %d ledgers are dropped: other bookies have them", len(new))
        self._dropped |= still
        return len(still)

    def _next_to_look_at(self, here: BitMap64) -> BitMap64:
        """Returns the next ledgers whose records are read; begins again with the lowest after the last one."""
        later = here.copy()
        later.remove_range(0, self._looked_upto + 1)
        some = BitMap64((later or here)[:SURPLUS_READS_PER_PASS])
        self._looked_upto = some.max() if some and len(later) > SURPLUS_READS_PER_PASS else -1
        return some

    def _in_logs(self) -> BitMap64:
        """Returns the ledgers with entries in logs that this store knows, without those that were deleted."""
        index, descriptors = self._store.index, self._store.descriptors
        found = BitMap64()
        for number in index.log_numbers():
            found |= index.ledgers_of_log(number)
        return found & descriptors.ledger_ids()

    async def _select_surplus(self, ledgers: BitMap64) -> BitMap64:
        """Returns those of `ledgers` whose copies here are surplus now, by conditions 1 and 2. What is reported of a
        ledger, and its mark, are read before its record."""
        metadata, wanted = self._metadata(), list(ledgers)
        there = dict[str, records.BookieRecord]()
        if wanted:
            there = await read_readable_records(metadata, paths.AVAILABLE_BOOKIES, records.BookieRecord)
        damaged = set(await metadata.children(paths.DAMAGED_LEDGERS) if wanted else ())
        found = BitMap64()
        for at in range(0, len(wanted), _READS_MAX):
            some = [f"{ledger:020d}" for ledger in wanted[at : at + _READS_MAX]]
            marked = await metadata.read_nodes(paths.UNDER_REPLICATED_LEDGERS, some)
            some_records = await read_readable_records(metadata, paths.LEDGERS, records.LedgerRecord, some)
            for name, record in some_records.items():
                if name not in marked and name not in damaged and is_surplus(record, self._bookie, there):
                    found.add(record.ledger_id)
        if self._store.descriptors.limbo_upto >= 0 or self._has_gone_back():
            return BitMap64()
        return found

    def _surplus_since(self, ledger: int, now: _Seen) -> _Seen:
        since = self._surplus.get(ledger, now)
        return since if since.wall_ms <= now.wall_ms else now

    def _local(self) -> BitMap64:
        """Returns the ids of all ledgers of this bookie that have no tombstone, including those of which only entries
        in logs are left."""
        store = self._store
        local = store.descriptors.ledger_ids()
        for number in store.index.log_numbers():
            local |= store.index.ledgers_of_log(number)
        for first, last in store.descriptors.tombstones:
            local.remove_range(first, last + 1)
        return local

    def _since(self, ledger: int, now: _Seen) -> _Seen:
        """Returns the moment at which the ledger was first seen dead. Returns `now` if the time of day was set back
        since then."""
        since = self._suspects.get(ledger, now)
        return since if since.wall_ms <= now.wall_ms else now

    async def _check_cluster(self, metadata: MetadataStore) -> None:
        found = await metadata.get(paths.CLUSTER)
        if found is None:
            raise ValueError(f"{paths.CLUSTER} is missing from the metadata: nothing is deleted")
        record = records.decode_record(found.value, records.ClusterRecord, paths.CLUSTER)
        if record.instance != self._instance:
            raise ValueError(f"the metadata is of cluster {record.instance}, not {self._instance}: nothing is deleted")


def is_surplus(record: records.LedgerRecord, bookie: str, there: Mapping[str, records.BookieRecord]) -> bool:
    """Returns whether the copies of a ledger at `bookie` are surplus: the ledger is CLOSED, its record names other
    bookies alone, and each of them is registered (`there`) and may have its copies."""
    named = {each for fragment in record.fragments for each in fragment.bookies}
    if record.state != records.CLOSED or bookie in named:
        return False
    return all(each in there and not there[each].limbo and not there[each].has_lost(record.ledger_id) for each in named)


async def _select_missing(metadata: MetadataStore, local: BitMap64) -> BitMap64:
    """Returns those of the ledgers `local` that the metadata does not list. Lists them in pages, because a million
    names at once would delay adds. Each page is read after `local` was, and a ledger has a record before it is here."""
    missing = local.copy()
    async for names in iterate_nodes(metadata, paths.LEDGERS):
        missing -= BitMap64(parse_ledger_ids(paths.LEDGERS, names))
    return missing


async def _confirmed(metadata: MetadataStore, ledgers: list[int]) -> list[int]:
    """Reads the record of each of `ledgers` in the metadata. Returns the ledgers that have no record."""
    gone: list[int] = []
    for at in range(0, len(ledgers), _READS_MAX):
        asked = ledgers[at : at + _READS_MAX]
        found = await asyncio.gather(*[metadata.get(paths.ledger(ledger)) for ledger in asked])
        gone += [ledger for ledger, record in zip(asked, found, strict=True) if record is None]
    return gone
