"""The scrubber: reads every entry of every log at a low rate, and finds damage before a reader needs the entry (§2.6).

A pass reads the logs in the order of their numbers, and in each log the extents of its index in order. It reads every
record and compares its checksum, ledger and entry, and the checksum that the client gave the entry. What a pass finds,
and what follows:

    damaged, and another copy here is good    nothing: readers find the good one
    damaged, and it was the only copy here    the entry is quarantined: a miss is UNKNOWN, never "no such entry"; it is
                                              reported (`QuarantineReports`), and asked for from the peers
                                              (`EntryRepairer` below)
    quarantined, and it is whole after all    the quarantine ends
    a damaged table of the index              written again from the records, if those are whole: the table's own
                                              checksum says that the bytes are the ones that were there

It changes nothing else. Its position is in the note `scrub` of the data directory (format/mark.py, magic "MGN-SCRB"),
written at most once in PROGRESS_SAVE_INTERVAL_S; after a restart it continues there. Its rate is that of one pass in
`scrub_pass_s`, at least SCRUB_BYTES_PER_S_MIN. The next pass begins when that time is over. Deleted ledgers are left
out. Guarded by tests/bookie/maintenance/test_scrub.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from ...ledger.bookies import EntryIdRanges, store_damage_report, subtract_ranges
from ...ledger.client import LedgerClient
from ...ledger.peer_format import Status
from ...ledger.reader_core import verify_entry
from ...metadata import paths
from ...metadata.records import DamagedEntriesRecord, DamagedRecord
from ...metadata.store import UNREADABLE_RECORDS, MetadataStore, get_readable_record
from ...proto.errors import MagnetarError, NewerFormat
from ...runtime.clock import Clock
from ...runtime.files import join_path
from ...runtime.network import World
from ..format import mark as note
from ..format.index import Extent
from ..format.journal import DamagedFile
from ..store import boot, disk
from ..store.disk import NoSpace
from ..store.entrylog import files as log_files
from ..store.entrylog.files import ExtentScan, rewrite_table
from ..store.entrylog.mover import file_size
from ..store.store import Store
from . import marks
from .restore import LedgerCopyRestorer

_LOG = logging.getLogger("magnetar.bookie.maintenance")

SCRUB_FILE = "scrub"
SCRUB_MAGIC = b"MGN-SCRB"
SCRUB_BYTES_PER_S_MIN = 16 << 10
PROGRESS_SAVE_INTERVAL_S = 60.0
DAMAGE_REPORT_READ_INTERVAL_S = 60.0
"""Seconds between two reads of the damage reports that readers stored. Each lists the metadata, and a repair can
wait."""
ENTRIES_PER_YIELD = 64
"""The number of entries that are checked before the event loop gets a turn: about a millisecond of work."""
FIRST_PASS_DELAY_S = 10.0
"""Seconds from the start of the bookie to the first pass: clients that waited for the bookie are served first."""


class ScrubPosition(msgspec.Struct):
    """How far the present scrub pass is: all records before extent number `extent` of the log `log` have been checked.
    The other fields are counts of this pass. `began_ms`: when the pass began, in ms since the epoch; 0: it has not
    begun."""

    number: int = 1  # of the pass
    began_ms: int = 0
    log: int = 0
    extent: int = 0
    entries: int = 0
    bytes: int = 0
    damaged: int = 0
    last_pass_s: float = 0.0  # of a pass within one process exact; else by the time of day at the restart, 0 at least


class Scrubber:
    """Reads all entries in the entry logs periodically, to find damage before a reader does. One pass takes about
    `pass_s` seconds. Calls `mend`, which repairs a ledger, with the id of each ledger in which it finds damage."""

    def __init__(
        self, world: World, store: Store, directory: str, uuid: bytes, pass_s: float,
        mend: Callable[[int], Awaitable[bool]],
    ) -> None:  # fmt: skip
        self._world = world
        self._store = store
        self._directory = directory
        self._entries = join_path(directory, boot.ENTRIES_FOLDER)
        self._uuid = uuid
        self._pass_s = pass_s
        self._mend = mend
        self._worker = world.workers.start("bookie-scrub")
        self._place = ScrubPosition()
        self._began_s = 0.0  # when this pass began, on the monotonic clock of this process
        self._saved_at = 0.0
        self._owed_bytes = 0  # read and not waited for yet
        self._total_bytes = 0
        self.rate_min = SCRUB_BYTES_PER_S_MIN
        self.counters = {"scrub_entries": 0, "scrub_bytes": 0, "scrub_damaged": 0, "scrub_tables_mended": 0}

    async def run(self) -> None:
        """Makes one scrub pass after the other, each within `pass_s` seconds, until the task is cancelled. Returns at
        once if `pass_s` is 0. The first pass begins FIRST_PASS_DELAY_S seconds after the call. After an error of the
        disk, which is logged, continues PROGRESS_SAVE_INTERVAL_S seconds later."""
        if self._pass_s <= 0:
            return
        await asyncio.sleep(FIRST_PASS_DELAY_S)
        await self._load()
        while True:
            try:
                await self.run_pass()
            except (OSError, disk.NoSpace) as error:
                _LOG.warning("the scrubber stopped, and continues later: %s", error)
                await asyncio.sleep(PROGRESS_SAVE_INTERVAL_S)
                continue
            over_s = self._world.clock.monotonic() - self._began_s
            await asyncio.sleep(min(self._pass_s, max(1.0, self._pass_s - over_s)))
            self._place = ScrubPosition(self._place.number + 1, last_pass_s=self._place.last_pass_s)

    async def close(self) -> None:
        """Waits until the read under way has ended, and ends the worker. The task of `run` must have ended."""
        await self._worker.close()

    async def run_pass(self) -> None:
        """Makes one scrub pass: checks all records from the saved position to the end of the last entry log.
        Quarantines the entries that have no good copy in any log, and ends the quarantine of entries that are good.
        Waits between reads, so that the pass keeps to its rate. Raises OSError or NoSpace; then the next call
        continues."""
        place = self._place
        if not place.began_ms:
            place.began_ms, self._began_s = self._world.clock.wall_ms(), self._world.clock.monotonic()
        files, entries = self._world.files, self._entries
        logs = self._store.index.log_numbers()
        sizes = [
            await self._worker.run(file_size, files, join_path(entries, log_files.entry_log_file_name(each)))
            for each in logs
        ]
        self._total_bytes = sum(sizes)
        for number in logs:
            if number >= place.log:
                if number > place.log:
                    place.log, place.extent = number, 0
                await self._scrub_log(number)
        place.log, place.extent = (logs[-1] + 1 if logs else 0), 0
        place.last_pass_s = self._world.clock.monotonic() - self._began_s
        await self._save(now=True)
        _LOG.info("scrubbed %d entries, %d bytes; %d are damaged", place.entries, place.bytes, place.damaged)

    # ------------------------------------------------------------------------------------ one log
    async def _scrub_log(self, number: int) -> None:
        end = self._store.committed_index_end(number)
        parts = log_files.read_extents(self._world.files, self._entries, number, self._uuid, end)
        at = 0
        while True:
            try:
                extents = await self._worker.run(next, parts, None)
            except (DamagedFile, FileNotFoundError) as error:
                if number in self._store.index.log_numbers():
                    _LOG.error("the index of log %d is damaged; the next start rebuilds it: %s", number, error)
                return
            for extent in extents or ():
                if at >= self._place.extent and number in self._store.index.log_numbers():
                    if extent.ledger not in self._store.descriptors.tombstones:
                        await self._scrub_extent(number, extent)
                    self._place.extent = at + 1
                    await self._save()
                at += 1
            if extents is None:
                return

    async def _scrub_extent(self, number: int, extent: Extent) -> None:
        path = join_path(self._entries, log_files.entry_log_file_name(number))
        try:
            walk = await self._worker.run(ExtentScan, self._world.files, path, extent)
        except FileNotFoundError:
            return  # compacted or deleted just now
        try:
            while size := await self._worker.run(walk.run_step):
                self._count(0, size)
                await self._pace(size)
        finally:
            self._worker.run(walk.close)  # after a read that may be under way there
        self._count(walk.records, 0)
        if walk.has_all_records:
            await self._check_table(number, extent, walk)
            for entry in walk.entries:
                self._store.end_quarantine(extent.ledger, entry, 1)
        else:
            await self._judge(number, extent)

    async def _check_table(self, number: int, extent: Extent, walk: ExtentScan) -> None:
        found = await self._store.read_extent_from_disk(number, extent)
        if found is None or found[1] is not None:
            return
        path = join_path(self._entries, log_files.entry_log_index_file_name(number))
        if await self._worker.run(rewrite_table, self._world.files, path, found[0].table_offset, extent, walk):
            _LOG.warning("a table of the index of log %d was damaged and is written again", number)
            self.counters["scrub_tables_mended"] += 1

    async def _judge(self, number: int, extent: Extent) -> None:
        """Reads each entry of a damaged extent. Quarantines the entries that have no good copy in any log, and ends the
        quarantine of the others."""
        before = self._place.damaged
        found = await self._store.read_extent_from_disk(number, extent)
        if found is not None and found[1] is not None:
            entries = [extent.first + delta for delta in found[1].deltas]
        elif extent.last - extent.first < 2 * extent.entries:
            entries = list(range(extent.first, extent.last + 1))
        else:
            self._damaged(extent.ledger, extent.first, extent.last)
            entries = []
        for entry in entries:
            status = await self._store.verify_entry(extent.ledger, entry)
            await self._pace(extent.length // extent.entries)
            if status is Status.UNKNOWN:
                self._damaged(extent.ledger, entry, entry)
            elif status is Status.OK:
                self._store.end_quarantine(extent.ledger, entry, 1)
        if self._place.damaged > before:
            await self._mend(extent.ledger)
            await self._store.checkpoint()  # quarantine is durable before the place is

    def _damaged(self, ledger: int, first: int, last: int) -> None:
        """Quarantines the entries `first … last` of the ledger, and counts and logs the damage."""
        _LOG.error("entries %d to %d of ledger %d are damaged, and there is no other copy here", first, last, ledger)
        self.counters["scrub_damaged"] += 1
        self._place.damaged += 1
        if not all(self._store.descriptors.is_quarantined(ledger, entry) for entry in (first, last)):
            self._store.descriptors.quarantine(ledger, first, last)

    # ------------------------------------------------------------------------------------ pace and place
    def _count(self, entries: int, size: int) -> None:
        self._place.entries += entries
        self._place.bytes += size
        self.counters["scrub_entries"] += entries
        self.counters["scrub_bytes"] += size

    async def _pace(self, size: int) -> None:
        """Waits so that reading stays within the allowed rate after `size` more bytes. Waits of less than a tenth of a
        second are added up."""
        rate = max(self.rate_min, self._total_bytes / self._pass_s if self._pass_s > 0 else 0.0)
        self._owed_bytes += size
        if self._owed_bytes >= rate / 10:
            owed, self._owed_bytes = self._owed_bytes, 0
            await asyncio.sleep(owed / rate)

    async def _load(self) -> None:
        path = join_path(self._directory, SCRUB_FILE)

        def read() -> ScrubPosition:
            if not self._world.files.exists(path):
                return ScrubPosition()
            try:
                return note.decode_checksummed_json(
                    disk.read_file(self._world.files, path), SCRUB_MAGIC, ScrubPosition, path
                )
            except (DamagedFile, NewerFormat) as error:
                _LOG.warning("the scrubber starts again: %s", error)
                return ScrubPosition()

        self._place = await self._worker.run(read)
        # a monotonic clock does not outlive its process: how long ago an earlier process began the pass is known by the
        # time of day alone, here once; set back since, it says 0
        before_s = max(0, self._world.clock.wall_ms() - self._place.began_ms) / 1000
        self._began_s = self._world.clock.monotonic() - before_s

    async def _save(self, *, now: bool = False) -> None:
        moment = self._world.clock.monotonic()
        if now or moment - self._saved_at >= PROGRESS_SAVE_INTERVAL_S:
            self._saved_at = moment
            data = note.encode_checksummed_json(SCRUB_MAGIC, self._place)
            await self._worker.run(disk.replace_file, self._world.files, self._directory, SCRUB_FILE, data)

    def describe(self) -> dict[str, object]:
        """Returns how far the present pass is and what it has found, as the admin verb `scrub-status` shows it."""
        place = self._place
        percent = 100.0 if not self._total_bytes else min(100.0, round(100 * place.bytes / self._total_bytes, 1))
        return {
            "pass": place.number, "percent": percent, "log": place.log, "entries": place.entries, "bytes": place.bytes,
            "damaged": place.damaged, "beganMs": place.began_ms, "lastPassSeconds": place.last_pass_s,
        }  # fmt: skip

    def statistics(self) -> dict[str, int]:
        return {**self.counters, "scrub_pass": self._place.number, "scrub_last_pass_s": int(self._place.last_pass_s)}


class QuarantineReports:
    """Stores in the metadata which entries are quarantined on this bookie: one record per ledger. The record is removed
    when all of the ledger's entries are repaired.

    Readers add entries to this record when this bookie sent them damaged bytes (ledger/bookies.py). The first call of
    `store_quarantine_reports`, and then one call in DAMAGE_REPORT_READ_INTERVAL_S seconds, reads these entries here. A
    damaged entry is quarantined and `adopted` is called, which starts its repair. An entry that is good, or of a ledger
    that is unknown here, is removed from the record. `is_own`: whether a ledger is in the directory of this store."""

    def __init__(
        self, store: Store, bookie: str, clock: Clock, adopted: Callable[[], None],
        is_own: Callable[[int], bool] = lambda ledger: True,
    ) -> None:  # fmt: skip
        self._store = store
        self._is_own = is_own
        self._bookie = bookie
        self._clock = clock
        self._adopted = adopted
        self._reported: dict[int, EntryIdRanges] = {}
        self._look_at = 0.0

    async def store_quarantine_reports(self, metadata: MetadataStore) -> None:
        """Stores in the metadata which entries are quarantined, if that has changed since the last call. Raises the
        errors of the metadata; then the next call stores what is missing."""
        if self._clock.monotonic() >= self._look_at:
            await self._read_stored(metadata)
            self._look_at = self._clock.monotonic() + DAMAGE_REPORT_READ_INTERVAL_S
        descriptors = self._store.descriptors
        for ledger in sorted({*descriptors.quarantined_ledgers(), *self._reported}):
            ranges = tuple(descriptors.quarantined_runs_of_ledger(ledger))
            if self._reported.get(ledger, ()) != ranges:
                try:
                    await store_damage_report(metadata, ledger, self._bookie, ranges, self._reported.get(ledger, ()))
                except DamagedRecord as error:  # what another process put there cannot be changed
                    UNREADABLE_RECORDS.record_unreadable(paths.damaged_copies_of_bookie(ledger, self._bookie), error)
                    continue
            if ranges:
                self._reported[ledger] = ranges
            else:
                self._reported.pop(ledger, None)

    async def _read_stored(self, metadata: MetadataStore) -> None:
        """Reads this bookie's damage reports in the metadata. Quarantines those entries in them that are damaged here;
        readers have added them."""
        adopted = False
        for ledger in await marks.list_ledger_ids(metadata, paths.DAMAGED_LEDGERS):
            if not self._is_own(ledger):
                continue
            found = await get_readable_record(
                metadata, paths.damaged_copies_of_bookie(ledger, self._bookie), DamagedEntriesRecord
            )
            if found is None:
                continue
            new = subtract_ranges(found[0].ranges, self._reported.get(ledger, ()))
            self._reported[ledger] = found[0].ranges
            for entry in self._stored(ledger, new):
                if entry % ENTRIES_PER_YIELD == 0:
                    await asyncio.sleep(0)  # what is read from memory does not wait
                if await self._is_damaged(ledger, entry):
                    self._store.descriptors.quarantine(ledger, entry, entry)
                    adopted = True
        if adopted:
            self._adopted()

    def _stored(self, ledger: int, ranges: EntryIdRanges) -> Iterator[int]:
        """Yields those entries of `ranges` that this bookie may have, because a damage report may name any entries."""
        descriptor = self._store.descriptors.get(ledger)
        end = -1 if descriptor is None else descriptor.last
        for first, last in ranges:
            yield from range(max(first, 0), min(last, end) + 1)

    async def _is_damaged(self, ledger: int, entry: int) -> bool:
        descriptors = self._store.descriptors
        if descriptors.get(ledger) is None or descriptors.is_quarantined(ledger, entry):
            return False
        found = await self._store.read_entries(ledger, entry)
        return found.status is not Status.OK or verify_entry(found.entries[0], ledger, entry) is None


# ------------------------------------------------------------------------------------------------ entry_repairer
# Repair of quarantined entries: gets a good copy of each from the other bookies (ledger protocol §2.6).
#
# The scrubber, compaction and a start quarantine entries, and call `on_entries_quarantined`. (Compaction deletes the
# log with the bad record, so that no scrubber finds it again.) `on_entries_quarantined` reports the entries to the
# metadata at once and wakes `run`. `run` restores each ledger that has quarantined entries
# (bookie/maintenance/restore.py; it leaves an open ledger to its writer), and makes a checkpoint, which ends the
# quarantine and with it the report. What could not be repaired is tried again after REPAIR_PAUSE_S, then after twice as
# long each time, up to REPAIR_PAUSE_S_MAX, because each try reads the ledger. Guarded by
# tests/bookie/maintenance/test_entry_repairer.py.


REPAIR_PAUSE_S = 60.0
REPAIR_PAUSE_S_MAX = 3600.0


class EntryRepairer:
    """Replaces this bookie's damaged (quarantined) copies of entries by good copies from other bookies. Calls `report`
    when the damage reports in the metadata must be stored again. Calling `metadata` returns the current metadata
    session."""

    def __init__(
        self, world: World, store: Store, bookie: str, metadata: Callable[[], MetadataStore],
        report: Callable[[], None],
    ) -> None:  # fmt: skip
        self._world = world
        self._store = store
        self._bookie = bookie
        self._metadata = metadata
        self._report = report
        self._asked = asyncio.Event()

    def on_entries_quarantined(self) -> None:
        """Called when entries were quarantined: calls `report`, and makes `run` repair the entries now."""
        self._report()
        self._asked.set()

    async def run(self) -> None:
        """Repairs quarantined entries until the task is cancelled. While some are left, tries again after
        REPAIR_PAUSE_S seconds, then after twice as long each time, up to REPAIR_PAUSE_S_MAX. Only logs errors."""
        pause_s = REPAIR_PAUSE_S
        while True:
            try:
                left = await self._pass()
            except (MagnetarError, ValueError, OSError, NoSpace) as error:
                _LOG.warning("damaged entries are not repaired yet: %s", error)
                left = 1
            try:
                async with asyncio.timeout(pause_s if left else None):
                    await self._asked.wait()
                pause_s = REPAIR_PAUSE_S
            except TimeoutError:
                pause_s = min(2 * pause_s, REPAIR_PAUSE_S_MAX)
            self._asked.clear()

    async def _pass(self) -> int:
        """Tries to repair each ledger with quarantined entries once. Returns the number of ledgers that could not be
        repaired."""
        ledgers = sorted({found.ledger for found in self._store.descriptors.quarantined()})
        left = 0
        for ledger in ledgers:
            left += not await self.repair_ledger(ledger)
        if left < len(ledgers):
            await self._store.checkpoint()
            self._report()
        return left

    async def repair_ledger(self, ledger: int) -> bool:
        """Restores this bookie's copy of a ledger from other bookies, unless the ledger is open. Returns whether the
        copy is complete afterwards; False also for an open ledger. Errors of other bookies and of the metadata cause
        False."""
        metadata = self._metadata()
        client = LedgerClient(self._world, metadata)
        try:
            reason = await LedgerCopyRestorer(
                self._store, self._bookie, metadata, client
            ).restore_ledger(ledger, recover=False)
        finally:
            await client.close()
        if reason is not None:
            _LOG.warning("the damage is not repaired yet: %s", reason)
        return reason is None
