"""A worker: takes marked ledgers, one lock each, and makes them whole (bookie/maintenance/repair_core.py says what
comes next).

    follow    the watch on the marks, and a look at all of them now and then, say which ledgers are due
    try       lock (ephemeral: a worker that dies gives it back) → look → step, until RemoveRepairMark or
              WaitForNextAttempt → unlock

The lock spares work, nothing more: two workers at one ledger do no harm, since adds are idempotent and the record is
changed by compare-and-set on its content. A mark is deleted only in the version that the worker read.
A ledger that cannot be made whole stays marked, with the reason and a time before which no worker tries again;
`StuckReason` has the reasons. A deleted ledger is unmarked. Switched off, a worker drops what it does.
Guards: tests/bookie/maintenance/test_repair.py.

Also in this file, each below its heading: settings of auto-recovery (repair_config); what copies entries of a ledger to
a bookie (copier).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from ...ledger import recovery as records
from ...ledger.bookies import Bookies
from ...ledger.client import LedgerClient
from ...ledger.metadata_core import LedgerTransitionRefused, decide_bookie_replacement
from ...ledger.peer_format import (
    ADDS_PER_REQUEST_MAX,
    ENTRIES_PER_ANSWER_MAX,
    ENTRY_HEADER_STRUCT,
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    Status,
    decode_add_statuses,
    decode_stored_runs,
    encode_add_many_request,
    encode_adds,
)
from ...ledger.placement_core import decode_bookie_groups
from ...ledger.reader import LedgerReader
from ...ledger.reader_core import StoredCopy, encode_header
from ...ledger.recovery_core import RecoveryFailure
from ...metadata import paths
from ...metadata.records import (
    DamagedRecord,
    LedgerRecord,
    RepairLockRecord,
    RepairWorkerRecord,
    UnderReplicatedRecord,
    encode_record,
)
from ...metadata.store import UNREADABLE_RECORDS, MetadataStore, WatchReset, ledger_id_of
from ...proto.errors import DataLost, InvalidConfiguration, MagnetarError
from ...runtime.clock import Clock
from ...runtime.network import World
from ...runtime.tasks import Tasks, run_together
from ..store.memtable import IntegerIntervals
from . import marks
from .repair_core import (
    CopyGap,
    CopyRateLimit,
    MoveCopies,
    RecoverLedger,
    RemoveRepairMark,
    RepairFindings,
    RepairReason,
    StuckReason,
    WaitForNextAttempt,
    compute_seconds_until_attempt,
    decide_next_repair_step,
    find_bookies_damaged_in_last_fragment,
    find_bookies_with_failed_disk,
    find_lost_or_departing_bookies,
    find_moves,
    find_runs_without_copies,
    is_recovery_needed,
    list_copies_to_check,
    make_repair_mark_after_failure,
    why_unreadable,
)

# ------------------------------------------------------------------------------------------------- repair_config
# Settings of auto-recovery. Behaviour first, performance second; each with what it bounds and what it costs.


BATCH_MEMORY_BYTES = 8 << 20
"""The memory in bytes that each of `batches_at_once` takes with the default settings: a batch of a mebibyte, twice, for
each of four ledgers."""


class RepairConfig(msgspec.Struct, frozen=True):
    """The settings of auto-recovery, the repair of ledgers that lack copies. The constructor raises
    InvalidConfiguration for values that cannot work."""

    # ---- behaviour
    enabled: bool = True  # takes part: as auditor when elected, and as worker
    lost_bookie_grace_s: float = 30.0  # not registered for longer: lost; shorter copies ledgers for every restart
    open_ledger_grace_s: float = 30.0  # an open ledger that misses a bookie, or is damaged, longer: recovered
    check_pass_s: float = 86400.0  # every closed ledger's copies are compared once in this; 0: only once, when closed
    checks_per_s: float = 50.0  # at most; a check is one small request for each fragment and bookie
    retry_min_s: float = 5.0  # before a ledger that could not be made whole is tried again; doubles each time …
    retry_max_s: float = 300.0  # … up to this; a change meanwhile (a new bookie) ends the wait

    # ---- performance
    bytes_per_s: int = 8 << 20  # a worker copies at most this, so that producers are hardly slowed; 0: no limit
    ledgers_at_once: int = 4  # of a worker; small ledgers wait for the metadata most of the time
    batches_at_once: int = 6  # of a ledger, each about `batch_bytes` in memory, twice
    batch_bytes: int = 1 << 20  # read and added at once; with a limit less: a 64th of a second
    audit_interval_s: float = 5.0  # between checks of the registered bookies; one listing each
    scan_interval_s: float = 3600.0  # between reads of all ledgers' records when nothing happened
    poll_interval_s: float = 10.0  # between listings of all marks, besides the watch on them

    def __post_init__(self) -> None:
        for name in ("lost_bookie_grace_s", "checks_per_s", "retry_min_s", "ledgers_at_once", "batches_at_once",
                     "batch_bytes", "audit_interval_s", "scan_interval_s", "poll_interval_s"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise InvalidConfiguration(f"{name} must be positive, not {getattr(self, name)}", setting=name)
        for name in ("open_ledger_grace_s", "check_pass_s", "bytes_per_s"):
            if getattr(self, name) < 0:
                raise InvalidConfiguration(f"{name} must not be negative", setting=name)
        if self.retry_max_s < self.retry_min_s:
            raise InvalidConfiguration("retry_max_s must not be below retry_min_s", setting="retry_max_s")


# -------------------------------------------------------------------------------------------------------- copier
# Copies entries of a ledger to a bookie: many at a time, at a bounded rate, with RECOVERY (M20).
#
#     copier.find_stored_entries(record, bookie, first, last)   which entries the bookie holds (ledger/peer_format.py);
#                                                               None: no answer
#     copier.copy_runs_of_entries(reader, target, runs, …)      the entries of `runs` are synced at `target` when this
#                                                               returns
#
# Every entry is read from any bookie that has it, its checksum and ids compared (ledger/reader.py), and added as it is,
# also to a ledger that is fenced there or unknown. So an entry that the target has damaged is mended by it.
# `batches_at_once` batches are under way, each with one read and one ADD_MANY of about `batch_bytes`; runs of a striped
# ledger are short, so a batch then has many reads. A failure ends the copy: `CopyFailed`; what was added stays.
# **Memory**: `ledgers_at_once` x `batches_at_once` x (`batch_bytes` + one entry), once as read and once on its way:
# with the defaults 24 MiB, twice. Adds are synced at the target before they are answered, many at a time and in any
# order; the record changes after the last answer, so no add waits for the one before. Guards:
# tests/bookie/maintenance/test_repair.py.


ENTRY_READS_AT_ONCE = 16
"""The number of reads at a time for one batch. In a striped ledger each run of entries is a read of its own."""
COPY_BATCHES_PER_S = 64
"""If the rate is limited, a second has at least this number of batches: many small batches disturb producers less than
a few large ones."""
ASK_TIMEOUT_S = 10.0
"""The longest time, in seconds, to wait for an answer. A bookie that takes longer is neither copied from nor copied to,
for a while."""
BUSY_PAUSE_S = 0.05
BUSY_RETRIES_MAX = 200
_FIRST_GUESS_BYTES = 16 << 10

EntryIdRange = tuple[int, int]


class CopyFailed(Exception):
    """Raised when entries could not be copied. `stuck` is the reason. `entry` is the entry that could not be read; -1:
    copying failed for another reason."""

    def __init__(self, stuck: StuckReason, text: str, entry: int = -1) -> None:
        super().__init__(text)
        self.stuck = stuck
        self.entry = entry


class EntryCopier:
    """Copies entries of ledgers to other bookies, for one repair worker. All copies together share one rate limit.
    `counters` are totals since this object was made."""

    def __init__(self, bookies: Bookies, clock: Clock, config: RepairConfig) -> None:
        self._bookies = bookies
        self._clock = clock
        self._config = config
        self._pace = CopyRateLimit(config.bytes_per_s)
        limit = config.bytes_per_s or config.batch_bytes * COPY_BATCHES_PER_S
        self._batch_bytes = max(1, min(config.batch_bytes, limit // COPY_BATCHES_PER_S))
        self.counters = {"repair_entries": 0, "repair_bytes": 0}

    # ------------------------------------------------------------------------------ asking
    async def find_stored_entries(
        self, record: LedgerRecord, bookie: str, first: int, last: int
    ) -> IntegerIntervals | None:
        """Asks a bookie which of the entries `first … last` of a ledger it has stored. Returns these entries; None if
        the bookie does not answer within ASK_TIMEOUT_S seconds, or its answer is not valid."""
        found = IntegerIntervals()
        for at in range(first, last + 1, ENTRIES_PER_ANSWER_MAX):
            end = min(last, at + ENTRIES_PER_ANSWER_MAX - 1)
            head = BookieRequestHead(
                BookieOperation.HELD, BookieRequestFlags.NONE, record.ledger_id, at, end - at + 1, 0, record.key
            ).encode()
            answer = await self._bookies.ask(bookie, head, timeout_s=ASK_TIMEOUT_S)
            if answer is None:
                return None
            try:
                for run in decode_stored_runs(*answer, at, end):
                    found.add(*run)
            except ValueError:
                return None
        return found

    # ------------------------------------------------------------------------------ copying
    async def copy_runs_of_entries(
        self, reader: LedgerReader, target: str, runs: Sequence[EntryIdRange], copied: Callable[[int], None]
    ) -> None:
        """Reads the `runs` of entries with `reader` and stores copies of them at the bookie `target`. When this
        returns, all of them are durable there. Calls `copied` after each part that the bookie has stored, with the size
        of the part in bytes.

        Raises CopyFailed if an entry cannot be read or stored; then some entries may be stored."""
        work = _Batches(runs, _guess(reader.record), self._batch_bytes)

        async def keep() -> None:
            for batch in work:
                size = await self._copy_batch(reader, target, batch, copied)
                work.learn(sum(last - first + 1 for first, last in batch), size)

        await run_together((keep() for _ in range(self._config.batches_at_once)), "repair-copy")

    async def _copy_batch(
        self, reader: LedgerReader, target: str, batch: list[EntryIdRange], copied: Callable[[int], None]
    ) -> int:
        total = 0
        while batch:
            some, batch = batch[:ENTRY_READS_AT_ONCE], batch[ENTRY_READS_AT_ONCE:]
            bytes_max = max(1, self._batch_bytes // len(some))
            read = await asyncio.gather(*[self._read(reader, first, last, bytes_max) for first, last in some])
            rest = [(got[-1].entry + 1, last) for got, (_, last) in zip(read, some, strict=True)]
            batch = [(first, last) for first, last in rest if first <= last] + batch
            entries = [entry for got in read for entry in got]
            size = sum(len(entry.payload) + ENTRY_HEADER_STRUCT.size for entry in entries)
            wait_s = self._pace.reserve(self._clock.monotonic(), size)
            if wait_s:
                await asyncio.sleep(wait_s)
            for at in range(0, len(entries), ADDS_PER_REQUEST_MAX):
                await self._add(reader.record, target, entries[at : at + ADDS_PER_REQUEST_MAX])
            self.counters["repair_entries"] += len(entries)
            self.counters["repair_bytes"] += size
            copied(size)
            total += size
        return total

    async def _read(self, reader: LedgerReader, first: int, last: int, bytes_max: int) -> list[StoredCopy]:
        try:
            return await reader.read_stored(first, last, bytes_max)
        except DataLost as error:
            raise CopyFailed(StuckReason.LOST, str(error), first) from error
        except MagnetarError as error:
            raise CopyFailed(StuckReason.UNREACHABLE, str(error), first) from error

    async def _add(self, record: LedgerRecord, target: str, entries: list[StoredCopy]) -> None:
        ledger = record.ledger_id
        for tries in range(BUSY_RETRIES_MAX):
            if tries:
                await asyncio.sleep(BUSY_PAUSE_S)
            sealed = [
                (
                    encode_header(ledger, each.entry, each.lac, each.length, (each.payload,)),
                    (each.payload,),
                    len(each.payload),
                )
                for each in entries
            ]
            head = encode_add_many_request(
                ledger, entries[0].entry, len(entries), record.key, BookieRequestFlags.RECOVERY
            )
            answer = await self._bookies.ask(target, head, encode_adds(sealed), timeout_s=ASK_TIMEOUT_S)
            if answer is None:
                self._bookies.record_failure(target)
                raise CopyFailed(StuckReason.UNREACHABLE, f"bookie {target} does not answer")
            try:
                statuses = decode_add_statuses(*answer, len(entries))
            except ValueError as error:
                raise CopyFailed(StuckReason.FAILED, f"bookie {target}: {error}") from error
            refused = next((status for status in statuses if status not in (Status.OK, Status.BUSY)), None)
            if refused is not None:
                raise CopyFailed(StuckReason.FAILED, f"bookie {target} refuses a copy: {refused.name}")
            entries = [entry for entry, status in zip(entries, statuses, strict=True) if status is Status.BUSY]
            if not entries:
                return
        raise CopyFailed(StuckReason.FAILED, f"bookie {target} is busy")


class _Batches:
    """Splits runs of entries into batches of about `batch_bytes` bytes. Estimates the size of an entry by the entries
    read so far."""

    def __init__(self, runs: Sequence[EntryIdRange], entry_bytes: float, batch_bytes: int) -> None:
        self._runs = iter(runs)
        self._rest: EntryIdRange | None = None
        self._entry_bytes = max(1.0, entry_bytes)
        self._batch_bytes = batch_bytes

    def learn(self, entries: int, size: int) -> None:
        """Updates the estimated size of an entry: the last batch had `entries` entries of `size` bytes together."""
        self._entry_bytes = max(1.0, size / entries)

    def __iter__(self) -> Iterator[list[EntryIdRange]]:
        return self

    def __next__(self) -> list[EntryIdRange]:
        left = min(ADDS_PER_REQUEST_MAX, max(1, int(self._batch_bytes / self._entry_bytes)))
        batch: list[EntryIdRange] = []
        while left > 0:
            run = self._rest or next(self._runs, None)
            self._rest = None
            if run is None:
                break
            first, last = run
            end = min(last, first + left - 1)
            batch.append((first, end))
            left -= end - first + 1
            if end < last:
                self._rest = (end + 1, last)
        if not batch:
            raise StopIteration
        return batch


def _guess(record: LedgerRecord) -> float:
    """Returns an estimate of the size in bytes of an entry of this ledger, for use before any entry was read."""
    if record.last_entry < 0:
        return _FIRST_GUESS_BYTES
    return record.length / (record.last_entry + 1) + ENTRY_HEADER_STRUCT.size


# -------------------------------------------------------------------------------------------------------- worker


_LOG = logging.getLogger("magnetar.bookie.repair")

PROGRESS_PUBLISH_INTERVAL_S = 3.0
"""The time, in seconds, between two writes of a busy worker's progress to the metadata."""


class _Unsettled(NamedTuple):
    """The state of a ledger's last fragment, and since when (monotonic, in seconds) it has been in this state."""

    state: str
    fragments: int
    bookies: tuple[str, ...]
    since: float


class RepairWorker:
    """Repairs ledgers for auto-recovery: locks a ledger that has a repair mark, restores its missing copies, and
    removes the mark. `progress` has (bytes copied, bytes in all, approximately) of each ledger that is being repaired.
    `token`: by it this process recognises its own locks."""

    def __init__(
        self, world: World, metadata: MetadataStore, client: LedgerClient, config: RepairConfig, name: str, token: str
    ) -> None:
        self._clock = world.clock
        self._rng = world.rng
        self._metadata = metadata
        self._client = client
        self._config = config
        self._name = name
        self._lock = RepairLockRecord(worker=name, token=token)
        self._copier = EntryCopier(client.bookies, world.clock, config)
        self._due: dict[int, None] = {}  # to be tried now, in order
        self._later: dict[int, float] = {}  # not before
        self._woken = asyncio.Event()
        self._unsettled: dict[int, _Unsettled] = {}
        self._seen: dict[int, tuple[int, float]] = {}  # the version of each mark that was looked at, and since when
        self._trying: dict[int, asyncio.Task[None]] = {}
        self._tasks = Tasks()  # of the ledgers
        self._on = True
        self.progress: dict[int, tuple[int, int]] = {}  # ledger → bytes copied, of about how many
        self.counters = {
            "repair_ledgers": 0, "repair_failures": 0, "repair_recovered": 0, "repair_moved": 0,
            "repair_moves_failed": 0,
        }  # fmt: skip

    def statistics(self) -> dict[str, int]:
        return {**self.counters, **self._copier.counters, "repair_working_on": len(self._trying)}

    async def run(self) -> None:
        """Repairs marked ledgers until the task is cancelled, up to `ledgers_at_once` at a time, while auto-recovery is
        enabled in the cluster. Raises an error of the metadata if retrying cannot help, because the session is lost."""
        try:
            await run_together(
                [self._follow(), self._poll_marks(), self._store_progress(), self._work()], "repair-worker"
            )
        finally:
            await self._tasks.close()

    # ------------------------------------------------------------------------------ which ledgers are due
    async def _follow(self) -> None:
        """Watches the repair marks in the metadata and schedules each ledger that gets or changes one."""
        while True:
            try:
                revision = await self._metadata.revision()
                self._add(await marks.list_ledger_ids(self._metadata, paths.UNDER_REPLICATED_LEDGERS))
                async for change in self._metadata.watch(paths.UNDER_REPLICATED_LEDGERS, revision):
                    if isinstance(change, WatchReset):
                        break
                    ledger = ledger_id_of(change.path)
                    if ledger is None:
                        continue
                    self._later.pop(ledger, None)
                    if change.version >= 0:
                        self._add([ledger])
            except MagnetarError as error:
                if not error.retryable:
                    raise
                _LOG.warning("the watch on the marks broke, they are listed again: %s", error)
                await asyncio.sleep(self._config.retry_min_s)

    async def _poll_marks(self) -> None:
        """Schedules all marked ledgers at each interval, because no watch tells that another worker has released a
        lock."""
        while True:
            await asyncio.sleep(self._config.poll_interval_s)
            try:
                self._on = await marks.is_repair_enabled(self._metadata)
                if not self._on:
                    for task in list(self._trying.values()):
                        task.cancel()
                now = self._clock.monotonic()
                listed = await marks.list_ledger_ids(self._metadata, paths.UNDER_REPLICATED_LEDGERS)
            except MagnetarError as error:
                if not error.retryable:
                    raise
                _LOG.warning("cannot list the marks: %s", error)
                continue
            self._unsettled = {ledger: self._unsettled[ledger] for ledger in listed if ledger in self._unsettled}
            self._seen = {ledger: self._seen[ledger] for ledger in listed if ledger in self._seen}
            self._later = {ledger: self._later[ledger] for ledger in listed if ledger in self._later}
            self._add([ledger for ledger in listed if self._later.get(ledger, now) <= now])

    def _add(self, ledgers: Sequence[int]) -> None:
        """Schedules these ledgers for repair, in random order, so that workers that learn of the same ledgers rarely
        compete for one."""
        for ledger in self._rng.sample(ledgers, len(ledgers)):
            self._due[ledger] = None
        self._woken.set()

    async def _work(self) -> None:
        self._on = await marks.is_repair_enabled(self._metadata)
        while True:
            while self._on and len(self._trying) < self._config.ledgers_at_once:
                ledger = next((each for each in self._due if each not in self._trying), None)
                if ledger is None:
                    break
                del self._due[ledger]
                task = self._trying[ledger] = self._tasks.spawn(self._try(ledger), f"repair of ledger {ledger}")
                task.add_done_callback(partial(self._on_attempt_ended, ledger))
            self._woken.clear()
            await self._woken.wait()

    def _on_attempt_ended(self, ledger: int, task: asyncio.Task[None]) -> None:
        """Called when an attempt to repair a ledger has ended: handles its result."""
        del self._trying[ledger]
        self.progress.pop(ledger, None)
        self._woken.set()

    # ------------------------------------------------------------------------------ one ledger
    async def _try(self, ledger: int) -> None:
        """Repairs the ledger if its next attempt is due and this worker gets the lock."""
        try:
            found = await marks.read_repair_mark(self._metadata, ledger)
            if found is None:
                return
            wait_s = self._waits_s(ledger, *found)
            if wait_s > 0:
                self._put_off(ledger, wait_s)
                return
            path = paths.repair_lock(ledger)
            if not await marks.claim_ephemeral_node(self._metadata, path, self._lock):
                self._put_off(ledger, self._config.poll_interval_s)
                return
            try:
                await self._repair(ledger, *found)
            finally:
                await marks.delete_own_node(self._metadata, path, self._lock)
        except MagnetarError as error:
            _LOG.warning("ledger %d cannot be repaired now: %s", ledger, error)
            self._put_off(ledger, self._config.retry_min_s)
        except DamagedRecord as error:
            UNREADABLE_RECORDS.record_unreadable(paths.ledger(ledger), error)
            self._put_off(ledger, self._config.retry_max_s)

    def _waits_s(self, ledger: int, mark: UnderReplicatedRecord, version: int) -> float:
        """Returns how many seconds the ledger must still wait before its next attempt."""
        now, config = self._clock.monotonic(), self._config
        if self._seen.get(ledger, (-1, 0.0))[0] != version:
            self._seen[ledger] = version, now
        seen_s = now - self._seen[ledger][1]
        return compute_seconds_until_attempt(
            mark, self._clock.wall_ms(), seen_s, config.retry_min_s, config.retry_max_s
        )

    def _put_off(self, ledger: int, seconds: float) -> None:
        """Schedules the next attempt to repair the ledger, after `seconds`."""
        self._later[ledger] = self._clock.monotonic() + seconds
        asyncio.get_running_loop().call_later(seconds, self._again, ledger)

    def _again(self, ledger: int) -> None:
        if self._later.get(ledger, float("inf")) <= self._clock.monotonic():
            del self._later[ledger]
            self._add([ledger])

    async def _repair(self, ledger: int, mark: UnderReplicatedRecord, version: int) -> None:
        stuck = WaitForNextAttempt(StuckReason.FAILED, "")
        tried = False
        while True:
            look = await self._examine(ledger, mark)
            step = decide_next_repair_step(look, tried, self._config.open_ledger_grace_s)
            if isinstance(step, RemoveRepairMark):
                await self._unmark(ledger, version, step.why)
                return
            if isinstance(step, MoveCopies):
                await self._move(look, step.gaps, version)
                return
            if isinstance(step, WaitForNextAttempt):
                stuck = step
            elif isinstance(step, RecoverLedger):
                try:
                    await self._client.recover(ledger)
                    self.counters["repair_recovered"] += 1
                    tried = False
                    continue
                except MagnetarError as error:
                    stuck = WaitForNextAttempt(await self._why_open(look, error), f"it cannot be recovered: {error}")
            elif not tried:
                stuck = await self._fill(look, step.gaps) or stuck
                tried = True
                continue
            await self._record_failure(ledger, stuck)
            return

    async def _why_open(self, look: RepairFindings, error: MagnetarError) -> StuckReason:
        """Returns the reason why a ledger could not be closed. UNDECIDED: all bookies that could know the ledger's end
        have answered, and none of them knows it."""
        if error.fields.get("reason") != RecoveryFailure.UNDECIDED.name or look.record is None:
            return StuckReason.UNREACHABLE
        are_there = set(look.record.fragments[-1].bookies) <= set(await marks.list_registered_bookies(self._metadata))
        return StuckReason.UNDECIDED if are_there else StuckReason.UNREACHABLE

    async def _examine(self, ledger: int, mark: UnderReplicatedRecord) -> RepairFindings:
        """Reads the ledger's record, asks its bookies which entries they have, and returns the findings."""
        record = await marks.read_ledger_record(self._metadata, ledger)
        available = await marks.list_registered_bookies(self._metadata)
        gone = find_lost_or_departing_bookies(mark, available, await marks.list_departing_bookies(self._metadata))
        gone |= find_bookies_with_failed_disk(ledger, available)
        damaged = frozenset[str]()
        held: dict[tuple[int, str], IntegerIntervals | None] = {}
        if record is not None:
            damaged = find_bookies_damaged_in_last_fragment(
                record, await marks.list_damage_reports(self._metadata, ledger)
            )
            asked = list_copies_to_check(record, gone)
            answers = await asyncio.gather(*[
                self._copier.find_stored_entries(record, bookie, final.first, final.last)
                if bookie in available and not available[bookie].limbo else _silent()
                for final, bookie in asked
            ])  # fmt: skip
            held = {(final.first, bookie): answer for (final, bookie), answer in zip(asked, answers, strict=True)}
        unsettled_s = self._unsettled_s(ledger, record, gone | damaged)
        marked = frozenset(bookie for bookie, why in mark.bookies.items() if why != RepairReason.MOVING.value)
        return RepairFindings(
            record, marked, gone, gone - available.keys(), held, unsettled_s, damaged,
            find_moves(mark, available, gone),
        )  # fmt: skip

    def _unsettled_s(self, ledger: int, record: LedgerRecord | None, gone: frozenset[str]) -> float:
        """Returns for how many seconds the ledger's last fragment has been in its present state. A change by the writer
        starts this time again."""
        if record is None or not is_recovery_needed(record, gone):
            self._unsettled.pop(ledger, None)
            return 0.0
        now = self._clock.monotonic()
        seen = _Unsettled(record.state, len(record.fragments), record.fragments[-1].bookies, now)
        before = self._unsettled.get(ledger)
        if before is None or before[:3] != seen[:3]:
            before = self._unsettled[ledger] = seen
        return now - before.since

    async def _unmark(self, ledger: int, version: int, why: str) -> None:
        if await marks.delete_repair_mark(self._metadata, ledger, version):
            _LOG.info("ledger %d: %s", ledger, why)
            self.counters["repair_ledgers"] += 1
            self._unsettled.pop(ledger, None)

    async def _move(self, look: RepairFindings, gaps: Sequence[CopyGap], version: int) -> None:
        """Moves copies of a ledger that misses nothing, and removes its mark. A copy that cannot be moved stays where
        it is: the auditor plans another move. Looks at the mark again, now that this worker has the lock: so a move
        that the auditor took back is not made after it saw no lock."""
        assert look.record is not None, "a ledger without a record has no copies"
        found = await marks.read_repair_mark(self._metadata, look.record.ledger_id)
        if found is None or found[1] != version:
            return
        failed = await self._fill(look, gaps)
        self.counters["repair_moved" if failed is None else "repair_moves_failed"] += 1
        ledger, text = look.record.ledger_id, "its copies were moved"
        if failed is not None:
            text = f"a copy stays where it is: {failed.why.value}: {failed.text}"
        if await marks.delete_repair_mark(self._metadata, ledger, version):
            _LOG.log(logging.INFO if failed is None else logging.WARNING, "ledger %d: %s", ledger, text)

    async def _record_failure(self, ledger: int, stuck: WaitForNextAttempt) -> None:
        config, now_ms = self._config, self._clock.wall_ms()
        if stuck.why is StuckReason.OPEN:  # nothing was tried: the same worker looks again when the grace is over
            self._put_off(ledger, stuck.seconds)
        else:
            self.counters["repair_failures"] += 1
            _LOG.log(
                logging.ERROR if stuck.why in (StuckReason.LOST, StuckReason.UNDECIDED) else logging.WARNING,
                "ledger %d stays marked: %s: %s", ledger, stuck.why.value, stuck.text,
            )  # fmt: skip

        def change(current: UnderReplicatedRecord | None) -> UnderReplicatedRecord | None:
            if current is None or stuck.why is StuckReason.OPEN:
                return current
            return make_repair_mark_after_failure(
                current, stuck.why, stuck.text, now_ms, config.retry_min_s, config.retry_max_s
            )

        await marks.change_repair_mark(self._metadata, ledger, change)

    # ------------------------------------------------------------------------------ gaps
    async def _fill(self, look: RepairFindings, gaps: Sequence[CopyGap]) -> WaitForNextAttempt | None:
        """Tries to fill each gap once. Returns why a gap could not be filled, LOST before other reasons; None if all
        were filled."""
        record, worst = look.record, None
        assert record is not None, "a ledger without a record has no gaps"
        self.progress[record.ledger_id] = (0, _bytes_of(record, gaps))
        for gap in gaps:
            try:
                record = await self._fill_one(record, look.gone, gap)
            except CopyFailed as error:
                why, text = error.stuck, str(error)
                if error.entry >= 0:
                    why = why_unreadable(look, error.entry)
                worst = WaitForNextAttempt(why, text) if worst is None or why is StuckReason.LOST else worst
        return worst

    async def _fill_one(self, record: LedgerRecord, gone: frozenset[str], gap: CopyGap) -> LedgerRecord:
        """Fills a gap by the steps of `FILL_STEPS` (bookie/maintenance/repair_core.py). Returns the ledger's record as
        it is afterwards."""
        target = self._choose(record, gone, gap)
        wanted: Sequence[tuple[int, int]] = gap.missing
        if gap.gone and wanted:
            wanted = find_runs_without_copies(iter(gap.missing), await self._held_at(record, target, gap))
        reader = self._client.make_reader(record)
        await self._copier.copy_runs_of_entries(reader, target, wanted, partial(self._copied, record.ledger_id))
        missing = find_runs_without_copies(
            iter(gap.missing), await self._held_at(record, target, gap)
        ) if gap.missing else ()
        if missing:
            raise CopyFailed(StuckReason.FAILED, f"bookie {target} does not hold entry {missing[0][0]} that it took")
        return await self._replace(record, gap, target) if gap.gone else record

    def _choose(self, record: LedgerRecord, gone: frozenset[str], gap: CopyGap) -> str:
        """Returns the bookie that gets the copy: the target of a move; else the bookie that lacks it, or, if that one
        is gone, another one that fits the rest of the ensemble."""
        if gap.target or not gap.gone:
            return gap.target or gap.bookie
        ensemble = next(each.bookies for each in record.fragments if each.first_entry == gap.first)
        slots = [gap.slot, *(slot for slot, each in enumerate(ensemble) if each in gone and slot != gap.slot)]
        groups = decode_bookie_groups(record.properties)
        found = self._client.bookies.choose_repair_targets(
            ensemble, slots, record.write_quorum, gone, record.ledger_id, groups
        )
        if not found:
            raise CopyFailed(
                StuckReason.NO_TARGET,
                f"no writable bookie besides those of the ensemble can take the copy of {gap.bookie}",
            )
        return found[gap.slot]

    async def _held_at(self, record: LedgerRecord, bookie: str, gap: CopyGap) -> IntegerIntervals:
        held = await self._copier.find_stored_entries(record, bookie, gap.first, gap.last)
        if held is None:
            raise CopyFailed(StuckReason.UNREACHABLE, f"bookie {bookie} does not answer")
        return held

    async def _replace(self, record: LedgerRecord, gap: CopyGap, target: str) -> LedgerRecord:
        change = partial(decide_bookie_replacement, first_entry=gap.first, old=gap.bookie, new=target)
        outcome = await records.store_record_transition(self._metadata, record.ledger_id, change, timeout_s=30.0)
        if isinstance(outcome, LedgerTransitionRefused):
            raise CopyFailed(StuckReason.FAILED, outcome.reason.value)
        _LOG.info(
            "ledger %d: bookie %s takes the place of %s from entry %d on",
            record.ledger_id, target, gap.bookie, gap.first,
        )  # fmt: skip
        return outcome.record

    # ------------------------------------------------------------------------------ progress
    def _copied(self, ledger: int, size: int) -> None:
        done, total = self.progress.get(ledger, (0, 0))
        self.progress[ledger] = (done + size, max(total, done + size))

    async def _store_progress(self) -> None:
        """Stores this worker's progress in the metadata at intervals while there is work, and once after the work has
        ended."""
        path, said = paths.repair_worker(self._name), None
        counted, at = 0, self._clock.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_PUBLISH_INTERVAL_S)
            now, numbers = self._clock.monotonic(), self.statistics()
            rate = int((numbers["repair_bytes"] - counted) / max(now - at, 0.001))
            counted, at = numbers["repair_bytes"], now
            state = (tuple(numbers.values()), tuple(self.progress.items()), rate)
            if state == said:
                continue
            record = RepairWorkerRecord(
                name=self._name, updated_ms=self._clock.wall_ms(), ledgers=numbers["repair_ledgers"],
                entries=numbers["repair_entries"], bytes=numbers["repair_bytes"],
                failures=numbers["repair_failures"], bytes_per_s=rate, limit_bytes_per_s=self._config.bytes_per_s,
                working_on={str(ledger): each for ledger, each in self.progress.items()},
            )  # fmt: skip
            try:
                await self._metadata.put(path, encode_record(record, path), ephemeral=True)
                said = state
            except MagnetarError as error:
                if not error.retryable:
                    raise
                _LOG.debug("the progress is not stored: %s", error)


async def _silent() -> None:
    return None


def _bytes_of(record: LedgerRecord, gaps: Sequence[CopyGap]) -> int:
    """Returns about how many bytes must be copied to fill the gaps."""
    entries = sum(last - first + 1 for gap in gaps for first, last in gap.missing)
    return record.length * entries // (record.last_entry + 1) if record.last_entry >= 0 else 0
