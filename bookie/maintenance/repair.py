"""Repair: auditor and worker together, as every bookie runs them, or `magnetar repair run` alone.

    repair = AutoRepair(world, metadata, client, config, name="…")
    await repair.run()      until cancelled; raises SessionExpired when the metadata session is lost

All waiting is asyncio's and all time the world's, so it runs in the simulator. A process that ends loses nothing that
another one needs: the election and the locks are ephemeral nodes, everything else is in the marks.

Also in this file, below its heading: the auditor (auditor).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from pyroaring import BitMap64

from ...ledger.client import LedgerClient
from ...metadata import paths
from ...metadata.records import (
    CLOSED,
    IN_RECOVERY,
    AuditorRecord,
    BookieRecord,
    DamagedRecord,
    DepartingRecord,
    LedgerRecord,
    UnderReplicatedRecord,
)
from ...metadata.store import (
    ANY_VERSION,
    UNREADABLE_RECORDS,
    DeleteNode,
    MetadataStore,
    WatchReset,
    ledger_id_of,
    read_ledger_ids,
)
from ...proto.errors import MagnetarError
from ...runtime.network import World
from ...runtime.tasks import run_together
from ..store.identity import delete_cookie
from ..store.memtable import IntegerIntervals
from . import marks
from .rebalance import REBALANCE_NUMBERS, Rebalancer
from .repair_core import (
    BookieAbsences,
    RepairReason,
    decide_repair_mark,
    find_bookies_with_failed_disk,
    find_copy_gaps,
    list_bookies_of_ledger,
    list_copies_to_check,
    schedule_next_attempt_now,
)
from .repair_worker import EntryCopier, RepairConfig, RepairWorker

# ------------------------------------------------------------------------------------------------------- auditor
# The auditor: one in the cluster looks for missing copies and marks the ledgers that miss some
# (bookie/maintenance/repair_core.py).
#
# Elected by an ephemeral node; the others wait for it to vanish. Two that believe in themselves for a moment mark the
# same. Every `audit_interval_s` it looks at who is registered, and then
#
#     scan      reads every ledger's record, when who is lost or departing changed, at its start, and now and then
#     changed   reads those that changed since (a watch tells which); one that was closed is checked soon
#     hurry     brings every mark's next try forward when a bookie has come
#     recovering
#               marks a ledger that is in recovery for RECOVERING_MARKED_AFTER_S: a broker that takes topics over ends
#               hundreds itself, and a mark for each would only delay it
#     damage    marks what scrubbers and readers reported (DamagedEntriesRecord), each report once; one of a lost bookie
#               and of a ledger that is gone, or closed without it, is removed: that bookie cannot take it back
#     rebalance moves copies from full bookies to emptier ones, if an operator ordered it (rebalance.py)
#     forget    a departing bookie of which nothing is left, and which is stopped: its cookie goes, if an operator
#               asked for that
#
# and, beside that, `check`: asks the bookies of a closed ledger which entries they hold (HELD), one ledger after the
# other, `checks_per_s` at most and every ledger once in `check_pass_s`; who lacks some is marked INCOMPLETE. A bookie
# that does not answer, or is in limbo, is no finding.
# Guards: tests/bookie/maintenance/test_repair.py.


_LOG = logging.getLogger("magnetar.bookie.repair")

RECORD_READS_AT_ONCE = 32
"""The number of metadata reads at a time during a scan."""
RECOVERING_MARKED_AFTER_S = 30.0
"""A ledger that is in recovery for longer than this, in seconds, counts as stuck. A recovery that goes well takes a
small part of this time."""
REBALANCE_PAUSE_S = 1.0
"""Seconds between two steps of a rebalancing that is under way."""
FORGET_BOOKIE_PAUSE_S = 30.0
"""The shortest time, in seconds, between two scans that only find out whether a departed bookie may be removed."""


class Auditor:
    """Finds ledgers that lack copies and gives them repair marks: records in the metadata that tell repair workers what
    is missing. Each bookie has an auditor; only the one that is elected in the cluster does this work. `token`: by it
    this process recognises its own election."""

    def __init__(
        self, world: World, metadata: MetadataStore, client: LedgerClient, config: RepairConfig, name: str, token: str
    ) -> None:
        self._clock = world.clock
        self._metadata = metadata
        self._config = config
        self._recovering_s = min(RECOVERING_MARKED_AFTER_S, config.open_ledger_grace_s)
        self._node = AuditorRecord(name=name, token=token, since_ms=world.clock.wall_ms())
        self._copier = EntryCopier(client.bookies, world.clock, config)
        self._rebalancer = Rebalancer(metadata, world.clock, client.bookies.find_rack)
        self.elected = False
        self._marks = 0
        self._lost = 0
        self._reset()
        self.counters = {"repair_scans": 0, "repair_scanned_ledgers": 0, "repair_checks": 0, "repair_marks": 0}

    def _reset(self) -> None:
        """Resets all state to that of a new auditor. Each absent bookie then gets the whole grace period again."""
        self._absences = BookieAbsences(self._config.lost_bookie_grace_s)
        self._gone: dict[str, RepairReason] | None = None
        self._with_failed_disks: dict[str, BookieRecord] = {}
        self._available: dict[str, BookieRecord] | None = None
        self._named: dict[str, None] = {}  # bookies that some record names
        self._changed: dict[int, None] = {}
        self._recovering: dict[int, float] = {}  # ledgers in recovery that miss nothing else, and since when
        self._closed: dict[int, None] = {}  # to be checked soon
        self._closing = asyncio.Event()
        self._reports: dict[tuple[int, str], tuple[tuple[int, int], ...]] = {}
        self._scan_due = self._forget_due = 0.0

    def statistics(self) -> dict[str, int]:
        return {
            **self.counters,
            "repair_auditor": int(self.elected),
            "repair_under_replicated": self._marks,
            "repair_lost_bookies": self._lost,
            **self._rebalancer.statistics(),
        }

    async def run(self) -> None:
        """Takes part in the election of the auditor, and does the auditor's work while this process is elected, until
        the task is cancelled. Then deletes its election node. Raises an error of the metadata if retrying cannot help,
        because the session is lost."""
        try:
            while True:
                try:
                    if await marks.claim_ephemeral_node(self._metadata, paths.REPAIR_AUDITOR, self._node):
                        _LOG.info("%s is the auditor", self._node.name)
                        await self._serve()
                except MagnetarError as error:
                    if not error.retryable:
                        raise
                    _LOG.warning("the auditor starts again: %s", error)
                await asyncio.sleep(self._config.audit_interval_s)
        finally:
            await marks.delete_own_node(self._metadata, paths.REPAIR_AUDITOR, self._node)

    async def _serve(self) -> None:
        """Runs the auditor's tasks until one of them ends, because another process was elected or the session is
        lost."""
        self._reset()
        self.elected = True
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(self._follow(), name="repair-ledgers"),
            loop.create_task(self._check_all(), name="repair-checks"),
            loop.create_task(self._check_bookies(), name="repair-looks"),
            loop.create_task(self._rebalance(), name="repair-rebalance"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.elected, self._marks, self._lost = False, 0, 0
            self._rebalancer.reset()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _follow(self) -> None:
        """Watches the metadata and records which ledgers change. If the watch has missed changes, schedules a scan of
        all ledgers."""
        while True:
            try:
                revision = await self._metadata.revision()
                self._scan_due = 0.0
                async for change in self._metadata.watch(paths.LEDGERS, revision):
                    if isinstance(change, WatchReset):
                        break
                    ledger = ledger_id_of(change.path)
                    if ledger is not None:
                        self._changed[ledger] = None
            except MagnetarError as error:
                if not error.retryable:
                    raise
                _LOG.warning("the watch on the ledgers broke, all of them are checked: %s", error)
                await asyncio.sleep(self._config.audit_interval_s)

    # ------------------------------------------------------------------------------ looks
    async def _check_bookies(self) -> None:
        """Makes a check of the bookies at each interval while this process is elected. A check that fails neither
        shortens nor restarts the grace period of an absent bookie."""
        holds = True
        while holds:
            try:
                if await marks.is_repair_enabled(self._metadata):
                    await self._survey()
                holds = await marks.is_own_node(self._metadata, paths.REPAIR_AUDITOR, self._node)
            except MagnetarError as error:
                if not error.retryable:
                    raise
                _LOG.warning("the check was interrupted, the next one covers all ledgers: %s", error)
                self._scan_due = 0.0
            await asyncio.sleep(self._config.audit_interval_s)
        _LOG.warning("%s is not the auditor any more", self._node.name)

    async def _survey(self) -> None:
        """Makes one check: finds the bookies that are lost or departing, sets the repair marks of the ledgers
        concerned, and reads new damage reports."""
        available = await marks.list_registered_bookies(self._metadata)
        departing = await marks.list_departing_bookies(self._metadata)
        now = self._clock.monotonic()
        reported = [bookie for _, bookie in self._reports]
        known = [*await self._metadata.children(paths.COOKIES), *self._named, *reported]
        lost = self._absences.update_absent_and_gone(now, known, available)
        gone = dict.fromkeys(sorted(lost), RepairReason.LOST) | dict.fromkeys(departing, RepairReason.DEPARTING)
        failed = {bookie: record for bookie, record in available.items() if record.failed}
        news = {bookie: record.failed for bookie, record in failed.items()} != {
            bookie: record.failed for bookie, record in self._with_failed_disks.items()
        }
        for bookie in sorted(failed.keys() - self._with_failed_disks.keys()):
            _LOG.warning("a disk of bookie %s failed: what was on it is copied to other bookies", bookie)
        self._with_failed_disks = failed
        if gone != self._gone or news or now >= self._scan_due:
            for bookie in sorted(gone.keys() - (self._gone or {}).keys()):
                _LOG.warning("bookie %s is %s: its entries are copied to other bookies", bookie, gone[bookie].value)
            self._scan_due = now + self._config.scan_interval_s  # before the reads: what changes meanwhile is told
            self._gone = gone
            await self._scan()
        else:
            await self._judge_changed()
        self._lost = len(lost)
        came = [name for name, record in available.items() if not record.read_only and self._is_new(name)]
        self._available = available
        marked = await marks.list_ledger_ids(self._metadata, paths.UNDER_REPLICATED_LEDGERS)
        self._marks = len(set(marked) - self._rebalancer.under_way)
        if came:
            await self._each(marked, self._hurry)
        await self._check_reports()
        await self._delete_departed(departing, available)

    async def _rebalance(self) -> None:
        """Carries out the order of a rebalancing, while there is one and auto-recovery is on."""
        while True:
            under_way = False
            try:
                if await marks.is_repair_enabled(self._metadata):
                    under_way = await self._rebalancer.run_step()
            except MagnetarError as error:
                if not error.retryable:
                    raise
                _LOG.warning("the rebalancing was interrupted, the next step goes on: %s", error)
            await asyncio.sleep(REBALANCE_PAUSE_S if under_way else self._config.audit_interval_s)

    def _is_new(self, bookie: str) -> bool:
        """Returns whether the bookie was missing or read-only at the previous check."""
        before = {} if self._available is None else self._available
        return self._available is not None and (bookie not in before or before[bookie].read_only)

    async def _scan(self) -> None:
        """Sets the repair mark of every ledger, and removes the marks of ledgers that do not exist any more."""
        listed = await read_ledger_ids(self._metadata)
        marked = await read_ledger_ids(self._metadata, paths.UNDER_REPLICATED_LEDGERS)
        self._named = {}
        await self._each(listed | marked, partial(self._judge, marked=marked))
        self.counters["repair_scans"] += 1
        self.counters["repair_scanned_ledgers"] += len(listed)

    async def _judge_changed(self) -> None:
        """Sets the repair marks of the ledgers that have changed since the last check."""
        changed, self._changed = self._changed, {}
        now = self._clock.monotonic()
        left = [ledger for ledger, since in self._recovering.items() if now - since >= self._recovering_s]
        ledgers = {**changed, **dict.fromkeys(left)}
        if ledgers:
            marked = await read_ledger_ids(self._metadata, paths.UNDER_REPLICATED_LEDGERS)
            await self._each(ledgers, partial(self._judge, marked=marked, changed=True))

    def _gone_for(self, ledger: int) -> dict[str, RepairReason]:
        """Returns the bookies whose copies of the ledger do not count, each with the reason."""
        failed = find_bookies_with_failed_disk(ledger, self._with_failed_disks)
        return dict.fromkeys(sorted(failed), RepairReason.DISK_FAILED) | (self._gone or {})

    async def _each(self, ledgers: Iterable[int], work: object) -> None:
        """Calls `work` with each ledger, for `RECORD_READS_AT_ONCE` ledgers at a time. If the record of a ledger cannot
        be read, only the work on that ledger ends."""
        assert callable(work)
        waiting = iter(ledgers)

        async def keep() -> None:
            for ledger in waiting:
                try:
                    await work(ledger)
                except DamagedRecord as error:
                    UNREADABLE_RECORDS.record_unreadable(paths.ledger(ledger), error)

        await asyncio.gather(*[keep() for _ in range(RECORD_READS_AT_ONCE)])

    async def _judge(
        self, ledger: int, found: Mapping[str, RepairReason] | None = None, marked: BitMap64 | None = None, *,
        changed: bool = False,
    ) -> None:  # fmt: skip
        """Sets the ledger's repair mark, or removes it. `marked`, the ledgers that had a mark a moment ago, saves a
        read. `changed`: if the ledger is closed now, its copies are checked soon."""
        record = await marks.read_ledger_record(self._metadata, ledger)
        for bookie in list_bookies_of_ledger(record) if record is not None else ():
            self._named[bookie] = None
        if record is not None and record.state == CLOSED and changed:
            self._closed[ledger] = None
            self._closing.set()
        found, now_ms = found or {}, self._clock.wall_ms()
        gone = self._gone_for(ledger)
        waits = self._is_recovering(ledger, record) and not found

        def change(mark: UnderReplicatedRecord | None) -> UnderReplicatedRecord | None:
            wanted = decide_repair_mark(record, gone, found, mark, now_ms)
            return None if mark is None and waits and wanted is not None and not wanted.bookies else wanted

        if marked is not None and ledger not in marked and change(None) is None:
            return
        after = await marks.change_repair_mark(self._metadata, ledger, change)
        if after is not None and after.since_ms == now_ms:
            self.counters["repair_marks"] += 1
            why = f"misses copies of {after.bookies}" if after.bookies else "was left in recovery"
            _LOG.warning("ledger %d %s", ledger, why)

    def _is_recovering(self, ledger: int, record: LedgerRecord | None) -> bool:
        """Returns whether the ledger is in recovery, and this auditor has seen that for less than
        RECOVERING_MARKED_AFTER_S."""
        if record is None or record.state != IN_RECOVERY:
            self._recovering.pop(ledger, None)
            return False
        now = self._clock.monotonic()
        if now - self._recovering.setdefault(ledger, now) < self._recovering_s:
            return True
        del self._recovering[ledger]
        return False

    async def _hurry(self, ledger: int) -> None:
        """Makes the next repair attempt of a marked ledger due at once."""
        await marks.change_repair_mark(
            self._metadata, ledger, lambda mark: None if mark is None else schedule_next_attempt_now(mark)
        )

    async def _check_reports(self) -> None:
        """Gives a repair mark to each ledger with a new damage report. A worker repairs the entries, and then the
        bookie deletes its report.

        The report of a lost bookie is deleted here, once no fragment of the ledger names that bookie. If the bookie
        returns, it reports its quarantined entries again."""
        gone = self._gone or {}
        reports: dict[tuple[int, str], tuple[tuple[int, int], ...]] = {}

        async def look_at_ledger(ledger: int) -> None:
            found = await marks.list_damage_reports(self._metadata, ledger)
            new = [bookie for bookie in found if self._reports.get((ledger, bookie)) != found[bookie].ranges]
            if new:
                await self._judge(ledger, dict.fromkeys(new, RepairReason.DAMAGED))
            reports.update({(ledger, bookie): report.ranges for bookie, report in found.items()})
            lost = [bookie for bookie in found if gone.get(bookie) is RepairReason.LOST]
            if lost:
                await self._drop_reports(ledger, lost)

        await self._each(await marks.list_ledger_ids(self._metadata, paths.DAMAGED_LEDGERS), look_at_ledger)
        self._reports = reports

    async def _drop_reports(self, ledger: int, lost: Iterable[str]) -> None:
        """Deletes the damage reports that the bookies `lost` made of this ledger, if the ledger does not need these
        bookies any more."""
        record = await marks.read_ledger_record(self._metadata, ledger)
        for bookie in lost:
            if record is None or (record.state == CLOSED and bookie not in list_bookies_of_ledger(record)):
                await marks.delete_damage_report(self._metadata, ledger, bookie)

    async def _delete_departed(
        self, departing: Mapping[str, DepartingRecord], available: Mapping[str, BookieRecord]
    ) -> None:
        """Deletes the cookies of departed bookies that no ledger names any more, if the operator asked for that."""
        for bookie, record in departing.items():
            if not record.forget or bookie in available:
                continue
            now = self._clock.monotonic()
            if bookie in self._named and now >= self._forget_due:
                self._forget_due = now + FORGET_BOOKIE_PAUSE_S
                await self._scan()
            if bookie not in self._named:
                departed = DeleteNode(paths.departing_bookie(bookie), ANY_VERSION)
                if await delete_cookie(self._metadata, bookie, departed):
                    _LOG.warning("bookie %s is forgotten: no ledger names it any more", bookie)

    # ------------------------------------------------------------------------------ checks
    async def _check_all(self) -> None:
        """Checks the copies of all ledgers at their bookies, again and again. Ledgers that were just closed are checked
        first."""
        pass_ends = 0.0
        waiting = BitMap64()
        while True:
            now = self._clock.monotonic()
            if not waiting and now >= pass_ends and self._config.check_pass_s:
                waiting = await read_ledger_ids(self._metadata)
                pass_ends = now + self._config.check_pass_s
            if self._closed:
                ledger = next(iter(self._closed))
                del self._closed[ledger]
                await self._each([ledger], self._check)
                await asyncio.sleep(1.0 / self._config.checks_per_s)
            elif waiting:
                ledger = waiting.min()
                waiting.remove(ledger)
                await self._each([ledger], self._check)
                await self._pause(max(1.0 / self._config.checks_per_s, (pass_ends - now) / (len(waiting) + 1)))
            else:
                await self._pause(max(self._config.audit_interval_s, pass_ends - now))

    async def _pause(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until a ledger is closed."""
        self._closing.clear()
        if not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._closing.wait()

    async def _check(self, ledger: int) -> None:
        """Checks the copies of a ledger, and marks it for repair if a bookie that is neither lost nor departing lacks
        entries. Does nothing if the ledger is not closed."""
        if self._gone is None or not await marks.is_repair_enabled(self._metadata):
            return
        record = await marks.read_ledger_record(self._metadata, ledger)
        if record is None or record.state != CLOSED:
            return
        self.counters["repair_checks"] += 1
        found = await self._incomplete(record)
        if found:
            await self._judge(ledger, found)

    async def _incomplete(self, record: LedgerRecord) -> dict[str, RepairReason]:
        """Asks the bookies for their copies of the ledger's final fragments. Returns the bookies, neither lost nor
        departing, that lack entries."""
        gone = self._gone_for(record.ledger_id)
        held: dict[tuple[int, str], IntegerIntervals | None] = {}
        for final, bookie in list_copies_to_check(record, gone):
            there = (self._available or {}).get(bookie)
            answer = None
            if there is not None and not there.limbo:
                answer = await self._copier.find_stored_entries(record, bookie, final.first, final.last)
            held[final.first, bookie] = answer
        return {gap.bookie: RepairReason.INCOMPLETE for gap in find_copy_gaps(record, gone, held) if not gap.gone}


# -------------------------------------------------------------------------------------------------------- repair


REPAIR_GAUGES = (
    "repair_auditor", "repair_under_replicated", "repair_lost_bookies", "repair_working_on", *REBALANCE_NUMBERS,
)  # fmt: skip
REPAIR_COUNTERS = (
    "repair_scans", "repair_scanned_ledgers", "repair_checks", "repair_marks", "repair_ledgers", "repair_failures",
    "repair_recovered", "repair_entries", "repair_bytes", "repair_moved", "repair_moves_failed",
)  # fmt: skip
"""The names of those `statistics` that only grow; the others can fall."""


def make_repair_owner_token(world: World) -> str:
    """Returns a new random token, by which the owner of an ephemeral node recognizes the node."""
    return world.rng.randbytes(16).hex()


class AutoRepair:
    """Runs the auditor and the repair worker of one process. The caller must close `metadata` and `client`. `name` is
    the worker's name; a bookie uses its own id.

    `token` identifies the owner of ephemeral nodes. All `AutoRepair` objects of one metadata session use the same
    token, so that a new `AutoRepair` owns the nodes that the old one left."""

    def __init__(
        self, world: World, metadata: MetadataStore, client: LedgerClient, config: RepairConfig | None = None,
        name: str = "", token: str = "",
    ) -> None:  # fmt: skip
        config = config or RepairConfig()
        token = token or make_repair_owner_token(world)
        self.name = name or f"worker-{token[:8]}"
        self._client = client
        self.auditor = Auditor(world, metadata, client, config, self.name, token)
        self.worker = RepairWorker(world, metadata, client, config, self.name, token)

    async def run(self) -> None:
        """Runs the auditor and the worker until the task is cancelled. If one of them fails, stops the other and raises
        the error: an error of the metadata if the session is lost."""
        await self._client.bookies.wait_bookies_listed()
        await run_together([self.auditor.run(), self.worker.run()], "repair")

    def statistics(self) -> dict[str, int]:
        return {**self.auditor.statistics(), **self.worker.statistics()}


class RepairSupervisor:
    """Keeps an `AutoRepair` running for the life of a process: starts a new one `retry_s` seconds after a failure, and
    in each new metadata session. Calling `metadata` returns the current session.

    After a failure the session continues, with nodes that the old `AutoRepair` could not delete. So all `AutoRepair`
    objects of a session share one token."""

    def __init__(
        self, world: World, metadata: Callable[[], MetadataStore], config: RepairConfig, name: str, retry_s: float
    ) -> None:
        self._world = world
        self._metadata = metadata
        self._config = config
        self.name = name
        self._retry_s = retry_s
        self._session: MetadataStore | None = None
        self._token = ""  # of the session
        self._repair: AutoRepair | None = None
        self._past = dict.fromkeys(REPAIR_COUNTERS, 0)

    async def run(self) -> None:
        """Runs auto-recovery until the task is cancelled. Returns at once if auto-recovery is disabled in this process.
        After an error, which is logged, starts again."""
        while self._config.enabled:
            metadata = self._metadata()
            if metadata is not self._session:
                self._session, self._token = metadata, make_repair_owner_token(self._world)
            client = LedgerClient(self._world, metadata)
            self._repair = AutoRepair(self._world, metadata, client, self._config, self.name, self._token)
            try:
                await self._repair.run()
            except MagnetarError as error:
                _LOG.warning("auto-recovery starts again on this bookie: %s", error)
            except Exception:
                _LOG.exception("auto-recovery failed on this bookie, and starts again")
            finally:
                self._past, self._repair = self._counted(), None
                await client.close()
            await asyncio.sleep(self._retry_s)

    def _counted(self) -> dict[str, int]:
        now = {} if self._repair is None else self._repair.statistics()
        return {name: value + now.get(name, 0) for name, value in self._past.items()}

    def statistics(self) -> dict[str, int]:
        """Returns the numbers of `AutoRepair.statistics`. Those in REPAIR_COUNTERS are totals over all `AutoRepair`
        objects of this process; those in REPAIR_GAUGES are 0 while none runs."""
        now = {} if self._repair is None else self._repair.statistics()
        return {**self._counted(), **{name: now.get(name, 0) for name in REPAIR_GAUGES}}
