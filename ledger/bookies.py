"""The bookies as a ledger client sees them: which are registered, how to reach each, which to choose for an ensemble.

One watch on `/bookies/available` updates the table; the last registration of a bookie that leaves it is kept, because
ledgers on it may still be readable. One peer connection per bookie, endpoint and key: a bookie that registers
elsewhere, or with another key, gets a new one, and the old one is closed. A bookie is its uuid, never its address: the
transport checks it (docs/design/protocol.md §1.5, #4812). A bookie that registers as another process has restarted: it
is chosen at once, whatever its last process failed. So while bookies are restarted one after the other, the one before
replaces the next.

**Choice**: placement_core.py decides; this module supplies the candidates. A bookie's rack is the one in
`/bookies/racks`, which the same watch follows, else the one it registered with. The rack of a bookie that left is
remembered, because the ensembles that name it still count it. When the minimum of racks cannot be kept and is not
enforced, one warning is logged, and the next one only after it could be kept again.
Guards: tests/ledger/test_ledger.py, tests/ledger/test_bookies.py.

Reports of damaged copies: `/damaged/<ledger>/<bookie>` lists the entries that need another copy at that bookie.

Two kinds of process write the same record. Each changes only its own part, by compare-and-set (`store_damage_report`),
and removes the record when nothing is left:

    a reader or recoverer that got bytes which are not the entry   adds it, once per entry (`DamageReports`)
    the bookie itself (bookie/maintenance/scrub.py)                adds what it has quarantined, removes what is
                                                                   repaired; it also quarantines what a reader added,
                                                                   so that its repairer checks and restores it

A report never delays a read: `add` only queues, one task writes. At most WAITING_REPORTS_MAX entries wait and
KNOWN_DAMAGED_ENTRIES_MAX are remembered as reported; more are counted in `dropped`, and reported when they are read the
next time. So is a report that the metadata did not accept. Guards: tests/ledger/test_damage.py.

Also in this file, below its heading: settings of the ledger library (config).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import aclosing

import msgspec

from ..metadata import paths
from ..metadata.records import BookieRecord, DamagedEntriesRecord, RacksRecord, decode_record
from ..metadata.store import (
    NODE_ABSENT,
    MetadataStore,
    VersionedValue,
    choose_read_delay,
    get_record,
    group_changes,
    put_record,
)
from ..proto.errors import BackPressure, BadVersion, InvalidConfiguration, MagnetarError, NotEnoughBookies, Unavailable
from ..runtime.files import Buffer
from ..runtime.network import AnswerListener, Endpoint, Peer, PeerClientKeys, PeerReply, World
from ..runtime.tasks import SupervisedTask, Supervisor, Tasks
from .peer_format import BookieAnswerHead, Status, decode_answer, encode_ping_request
from .placement_core import (
    ANY_GROUP,
    UNKNOWN_RACK,
    BookieCandidate,
    BookieFaultKind,
    BookieGroups,
    BookieHealth,
    BookieQuarantine,
    PlacementFailure,
    RackRule,
    choose_bookies_of_groups,
)
from .writer_core import AppendMemoryBudget, Striping

EntryIdRanges = tuple[tuple[int, int], ...]
"""Ranges of entry ids, as (first, last) pairs in ascending order."""

DAMAGED_RANGES_MAX = 20_000
"""The largest number of ranges in a damage report: 840 kB, because a metadata value has at most 1 MiB. Further ranges
are reported when these are repaired."""
WAITING_REPORTS_MAX = 1000
KNOWN_DAMAGED_ENTRIES_MAX = 10_000
"""The largest number of damaged entries that are remembered, at about 200 bytes each. If there are more, the bookie's
disk is dead, and the bookie finds that itself."""


def subtract_ranges(ranges: EntryIdRanges, others: EntryIdRanges) -> EntryIdRanges:
    """Returns the entries that are in `ranges` and not in `others`, as ascending ranges that do not overlap."""
    gaps = union_ranges(others, ())
    left: list[tuple[int, int]] = []
    at = 0
    for first, last in union_ranges(ranges, ()):
        while at < len(gaps) and gaps[at][1] < first:
            at += 1
        gap = at
        while gap < len(gaps) and gaps[gap][0] <= last:
            if first < gaps[gap][0]:
                left.append((first, gaps[gap][0] - 1))
            first = gaps[gap][1] + 1
            gap += 1
        at = max(at, gap - 1)
        if first <= last:
            left.append((first, last))
    return tuple(left)


def union_ranges(ranges: EntryIdRanges, others: EntryIdRanges) -> EntryIdRanges:
    """Returns the entries that are in `ranges` or in `others`, as ascending ranges that neither overlap nor touch."""
    both: list[tuple[int, int]] = []
    for first, last in sorted((*ranges, *others)):
        if both and first <= both[-1][1] + 1:
            both[-1] = both[-1][0], max(both[-1][1], last)
        else:
            both.append((first, last))
    return tuple(both)


async def store_damage_report(
    metadata: MetadataStore, ledger: int, bookie: str, now: EntryIdRanges, before: EntryIdRanges = ()
) -> EntryIdRanges:
    """Changes the damage report of a ledger's copy at a bookie, in the metadata: adds the ranges `now`, and removes the
    ranges `before`, which the caller added earlier. Ranges that other processes added stay. Deletes the report when no
    range is left.

    Returns the ranges that are stored afterwards, at most DAMAGED_RANGES_MAX. Raises DamagedRecord if the stored report
    cannot be decoded, and the metadata's errors."""
    path = paths.damaged_copies_of_bookie(ledger, bookie)
    while True:
        found = await get_record(metadata, path, DamagedEntriesRecord)
        said, version = ((), NODE_ABSENT) if found is None else (found[0].ranges, found[1])
        ranges = union_ranges(subtract_ranges(said, before), now)[:DAMAGED_RANGES_MAX]
        if ranges == said:
            return ranges
        try:
            if ranges:
                record = DamagedEntriesRecord(ledger_id=ledger, bookie=bookie, ranges=ranges)
                await put_record(metadata, path, record, version)
            else:
                await metadata.delete(path, version)
        except BadVersion:
            continue  # another process wrote first: read again
        return ranges


class DamageReports:
    """Stores in the metadata which copies of entries a client's readers and recoveries found damaged. `dropped` is the
    number of entries that were not reported because the queue was full."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._told: dict[tuple[int, str, int], None] = {}
        self._waiting: dict[tuple[int, str], list[int]] = {}
        self._tasks = Tasks()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self.dropped = 0

    def add(self, ledger: int, bookie: str, entry: int) -> None:
        """Queues a report that the bookie sent damaged or wrong bytes for this entry. Does nothing if that was reported
        before, or after `close`. If WAITING_REPORTS_MAX reports wait, or KNOWN_DAMAGED_ENTRIES_MAX are known, only
        counts the report in `dropped`."""
        if self._closed or (ledger, bookie, entry) in self._told:
            return
        if len(self._told) >= KNOWN_DAMAGED_ENTRIES_MAX or sum(map(len, self._waiting.values())) >= WAITING_REPORTS_MAX:
            self.dropped += 1
            return
        self._told[ledger, bookie, entry] = None
        self._waiting.setdefault((ledger, bookie), []).append(entry)
        if self._writer is None or self._writer.done():
            self._writer = self._tasks.spawn(self._write(), "damage-reports")

    async def _write(self) -> None:
        while self._waiting:
            (ledger, bookie), entries = next(iter(self._waiting.items()))
            del self._waiting[ledger, bookie]
            try:
                await store_damage_report(self._metadata, ledger, bookie, tuple((entry, entry) for entry in entries))
            except (MagnetarError, ValueError) as error:  # ValueError: the stored record is damaged
                _LOG.warning("ledger %d: damage at bookie %s cannot be reported: %s", ledger, bookie, error)
                for entry in entries:
                    self._told.pop((ledger, bookie, entry), None)

    async def wait_reports_written(self) -> None:
        """Waits until every report that was queued before this call is stored, or has failed."""
        await self._tasks.drain()

    async def close(self) -> None:
        """Cancels the report that is being stored, and drops those that wait."""
        self._closed = True
        await self._tasks.close()


_LOG = logging.getLogger("magnetar.ledger")

CONNECTED_AHEAD_MAX = 16
"""The largest number of bookies to which a process connects before it needs them: the first connection takes
longest."""
BUSY_PAUSE_DIVISOR = 4
"""The pause before a busy bookie is asked again grows up to the timeout divided by this number."""


class Bookies:
    """The bookies of the cluster as one `LedgerClient` knows them: follows their registrations, connects to them,
    chooses among them, and records which of them failed lately.

    A bookie is named by its uuid as text. All methods must be called from one event loop. Before bookies are chosen or
    asked, `wait_bookies_listed` must have returned once: it starts the watch of the registrations."""

    def __init__(self, world: World, metadata: MetadataStore, config: LedgerConfig) -> None:
        self._world = world
        self._metadata = metadata
        self._config = config
        self.memory = AppendMemoryBudget(config.memory_bytes_max)
        self.now = world.clock.monotonic
        self._available: dict[str, BookieRecord] = {}
        self.peers = _Peers()
        self._last: dict[str, BookieRecord] = {}  # the last registration of each bookie, also of those that left
        self._trouble = BookieHealth(config.quarantine_s)
        self.damage = DamageReports(metadata)
        self._quarantine = BookieQuarantine(config.quarantine_s, config.quarantine_max_s)
        self._rule = RackRule(config.min_racks_per_write_quorum, config.enforce_min_racks)
        self._racks_short = False
        self._racks: dict[str, str] = {}  # from the metadata; overrides what a bookie registered
        self._closed = False
        self._listed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._listings = 0
        self._background = Supervisor()
        self._follower: SupervisedTask | None = None
        self._closing = Tasks()  # of peers that were replaced

    async def wait_bookies_listed(self) -> None:
        """Waits until the registered bookies have been listed for the first time. Raises Unavailable after `close`. If
        the watch of the registrations has ended, raises its error, such as SessionExpired."""
        if self._closed:
            raise Unavailable("this ledger client is closed")
        if self._follower is None:
            self._follower = self._background.start_supervised("ledger-bookies", self._follow, final=_ends_the_session)
            self._follower.ended.add_done_callback(lambda _: self._listed.set())
        await self._listed.wait()
        if self._follower.ended.done() and not self._follower.ended.cancelled():
            self._follower.ended.result()

    # ------------------------------------------------------------------------------ reaching
    async def connect(self) -> None:
        """Connects to up to CONNECTED_AHEAD_MAX registered bookies, so that the first ledgers need not wait for
        connections. Waits until each of them has answered, at most `add_timeout_s`. Ignores bookies that do not
        answer."""
        some, timeout_s = sorted(self._available)[:CONNECTED_AHEAD_MAX], self._config.add_timeout_s
        await asyncio.gather(
            *(self.request(each, encode_ping_request(), timeout_s=timeout_s) for each in some), return_exceptions=True
        )

    def request(
        self, bookie: str, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float
    ) -> asyncio.Future[PeerReply]:
        """Sends a request to a bookie: its encoded `head`, and its frames. Returns a future of the reply (see
        `Peer.request`). Raises no error itself: the future fails with Unavailable if the bookie was never registered,
        and with the errors of that method."""
        return self.peers[bookie].request(head, frames, timeout_s=timeout_s)

    async def ask(
        self, bookie: str, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float, busy_s: float = 0.0
    ) -> tuple[BookieAnswerHead, Sequence[Buffer]] | None:
        """Sends a request to a bookie and returns (head of the answer, its frames). Returns None if no answer arrives
        within `timeout_s`, or if it cannot be decoded: then it is unknown what the bookie did.

        If the bookie answers BUSY, it did nothing, and is asked again after a pause that grows. Each BUSY proves that
        the bookie is alive, so the timeout starts again, for up to `busy_s` seconds in all."""
        clock = self._world.clock.monotonic
        began, pause_s = clock(), self._config.retry_s
        deadline = began + timeout_s
        while True:
            try:
                reply = await self.request(bookie, head, frames, timeout_s=max(deadline - clock(), 0.0))
                answer = decode_answer(reply.head)
                if answer.status is not Status.BUSY:
                    return answer, reply.frames
                deadline = max(deadline, min(clock() + timeout_s, began + busy_s))
            except BackPressure:
                _LOG.debug("the queue to bookie %s is full", bookie)
            except (MagnetarError, ValueError) as error:
                _LOG.debug("no answer from bookie %s: %s", bookie, error)
                return None
            if clock() + pause_s >= deadline:
                return None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, timeout_s / BUSY_PAUSE_DIVISOR)

    def record_failure(self, bookie: str) -> None:
        """Records that the bookie failed: it is in quarantine for at least `quarantine_s`, and other bookies are
        preferred for ensembles and for reads."""
        self._quarantine.record_failure(bookie, self._world.clock.monotonic())
        self.record_read_fault(bookie, BookieFaultKind.FAILED)

    def record_read_fault(self, bookie: str, kind: BookieFaultKind) -> None:
        """Records a fault of this `kind` of the bookie in answering a read: for a while, reads ask other bookies first
        (placement_core.py)."""
        self._trouble.record_read_fault(bookie, kind, self._world.clock.monotonic())

    def record_damage(self, bookie: str, ledger: int, entry: int) -> None:
        """Records that the bookie sent damaged or wrong bytes for the entry: for a while, reads ask other bookies
        first. Also reports the damage in the metadata (`DamageReports`)."""
        _LOG.error("ledger %d, entry %d: wrong bytes from bookie %s", ledger, entry, bookie)
        self.record_read_fault(bookie, BookieFaultKind.DAMAGED)
        self.damage.add(ledger, bookie, entry)

    def fault_weights(self) -> dict[str, float]:
        """Returns the weight of each bookie's recent faults, by bookie (placement_core.py). A bookie with a larger
        weight is asked later. Leaves out bookies without recent faults."""
        return self._trouble.fault_weights(self._world.clock.monotonic())

    def is_quarantined(self, bookie: str) -> bool:
        """Returns whether the bookie is in quarantine because it failed lately: it is then chosen and asked last."""
        return self._quarantine.is_quarantined(bookie, self._world.clock.monotonic())

    def quarantined_bookies(self) -> frozenset[str]:
        """Returns the bookies that are in quarantine now."""
        return frozenset(self._quarantine.quarantined_bookies(self._world.clock.monotonic()))

    # ------------------------------------------------------------------------------ choosing
    async def count_healthy_bookies(self, wanted: int, groups: BookieGroups = ANY_GROUP) -> int:
        """Returns the number of writable bookies of these groups that have not failed within the last `quarantine_s`
        seconds. If there are fewer than `wanted`, first lists the bookies again. Raises the metadata's errors."""
        if self._well(groups) < wanted:
            await self.refresh_bookie_list()
        return self._well(groups)

    def _well(self, groups: BookieGroups) -> int:
        return sum(
            not each.read_only and not self._failed_lately(name) and groups.contains(each.group)
            for name, each in self._available.items()
        )

    def _failed_lately(self, bookie: str) -> bool:
        return self._quarantine.has_failed_lately(bookie, self._world.clock.monotonic())

    async def choose_bookies_after_listing(
        self, count: int, *, write_quorum: int | None = None, ledger: int = -1, groups: BookieGroups = ANY_GROUP
    ) -> list[str]:
        """Chooses bookies like `choose_bookies`. If there are too few, lists the bookies again and chooses once more,
        because the watch may lag. Raises the errors of `choose_bookies`, and the metadata's errors."""
        try:
            return self.choose_bookies(count, write_quorum=write_quorum, ledger=ledger, groups=groups)
        except NotEnoughBookies:
            await self.refresh_bookie_list()
            return self.choose_bookies(count, write_quorum=write_quorum, ledger=ledger, groups=groups)

    @property
    def has_unwritable_directories(self) -> bool:
        """Returns whether some writable bookie takes adds to a part of the ledgers alone: one of its disks is full or
        has failed."""
        return any(each.unwritable and not each.read_only for each in self._available.values())

    def choose_bookies(
        self, count: int, exclude: Collection[str] = (), *, write_quorum: int | None = None, ledger: int = -1,
        groups: BookieGroups = ANY_GROUP,
    ) -> list[str]:  # fmt: skip
        """Chooses `count` distinct writable bookies of these groups for copies and returns them. Raises
        NotEnoughBookies, with the fields `wanted` and `available`; InvalidConfiguration if `write_quorum` is larger
        than `count`.

        With `write_quorum`, for a new ledger, every write set must cover the smallest number of racks. Without
        `write_quorum`, the bookies in `exclude` have copies already; they are not chosen, and other racks than theirs
        are preferred. `ledger`: whose copies they are for; a bookie whose directory of this ledger is full or has
        failed is not chosen. -1: not known yet."""
        there = sorted(each for each in exclude if each in self._available and not self._failed_lately(each))
        beside = {count + slot: self.find_rack(bookie) for slot, bookie in enumerate(there)}
        return self._placed(count, exclude, beside, write_quorum, ledger, groups)

    def choose_recovery_bookie(self, exclude: Collection[str], ledger: int, groups: BookieGroups) -> str:
        """Chooses a bookie for entries of the ledger that a recovery writes back: one of these groups, or, if none is
        left, any other one, with a warning: what is confirmed must have its copies. Raises NotEnoughBookies."""
        try:
            return self.choose_bookies(1, exclude, ledger=ledger, groups=groups)[0]
        except NotEnoughBookies:
            found = self.choose_bookies(1, exclude, ledger=ledger)[0]
            _warn_of_other_group("a recovery writes", found, groups)
            return found

    def choose_replacements(
        self, ensemble: Sequence[str], slots: Sequence[int], write_quorum: int, ledger: int = -1,
        groups: BookieGroups = ANY_GROUP,
    ) -> dict[int, str]:  # fmt: skip
        """Chooses a replacement of these groups for the bookie in each of `slots` of the ensemble, so that the write
        sets of `write_quorum` slots cover enough racks. Returns slot → bookie; only for the first slots, or for none,
        if there are too few bookies.

        Never chooses a bookie that failed lately. Prefers racks that the other slots do not have."""
        failed = [each for each in self.quarantined_bookies() if self._failed_lately(each)]
        return self._replaced(ensemble, slots, write_quorum, [*ensemble, *failed], ledger, groups)

    def choose_repair_targets(
        self, ensemble: Sequence[str], slots: Sequence[int], write_quorum: int, gone: Collection[str],
        ledger: int = -1, groups: BookieGroups = ANY_GROUP,
    ) -> dict[int, str]:  # fmt: skip
        """Chooses replacements like `choose_replacements`, for copies of entries that are final, because the bookies in
        `slots` are lost or leaving. Returns slot → bookie.

        Prefers bookies that have not failed lately. Never chooses a bookie of `gone` or of `limbo_bookies`. Chooses a
        bookie of another group, with a warning, only if none of these groups can take the copy: an entry with too few
        copies is worse than a copy in the wrong place."""
        exclude = [*ensemble, *gone, *self.limbo_bookies]
        found = self._replaced(ensemble, slots, write_quorum, exclude, ledger, groups)
        if not found and groups != ANY_GROUP:
            found = self._replaced(ensemble, slots, write_quorum, exclude, ledger, ANY_GROUP)
            for bookie in found.values():
                _warn_of_other_group("a lost copy is made", bookie, groups)
        return found

    def _replaced(
        self, ensemble: Sequence[str], slots: Sequence[int], write_quorum: int, exclude: Collection[str],
        ledger: int, groups: BookieGroups,
    ) -> dict[int, str]:  # fmt: skip
        for count in range(len(slots), 0, -1):
            places = sorted(slots[:count])
            rest = {slot: self.find_rack(bookie) for slot, bookie in enumerate(ensemble) if slot not in places}
            try:
                chosen = self._placed(count, exclude, rest, write_quorum, ledger, groups)
                return dict(zip(places, chosen, strict=True))
            except NotEnoughBookies as error:
                _LOG.debug("%d of %d bookies cannot be replaced: %s", count, len(ensemble), error)
        return {}

    def _placed(
        self, count: int, exclude: Collection[str], existing: dict[int, str], write_quorum: int | None,
        ledger: int, groups: BookieGroups,
    ) -> list[str]:  # fmt: skip
        candidates = [
            BookieCandidate(
                bookie, self.find_rack(bookie), record.free_bytes, self.is_quarantined(bookie), record.group
            )
            for bookie, record in sorted(self._available.items())
            if (record.takes_adds_of(ledger) if ledger >= 0 else not record.read_only)
            and bookie not in exclude
            and groups.contains(record.group)
        ]
        rule = RackRule() if write_quorum is None else self._rule
        found = choose_bookies_of_groups(
            candidates, groups, count, rng=self._world.rng, existing=existing, write_quorum=write_quorum, rule=rule
        )  # fmt: skip
        of_groups = f" of the groups {groups}" if groups.primary else ""
        if found is PlacementFailure.BOOKIES:
            raise NotEnoughBookies(
                f"{count} writable bookies{of_groups} are needed, {len(candidates)} are registered",
                wanted=count, available=len(candidates),
            )  # fmt: skip
        if found is PlacementFailure.RACKS:
            racks = sorted({*existing.values(), *(each.rack for each in candidates)} - {UNKNOWN_RACK})
            raise NotEnoughBookies(
                f"every write set must cover {rule.racks_min} racks (min_racks_per_write_quorum), and the writable "
                f"bookies are on too few racks: {', '.join(racks)}; start bookies on another rack, or turn "
                "enforce_min_racks off",
                wanted=count, available=len(candidates), racks=len(racks),
            )  # fmt: skip
        assert not isinstance(found, PlacementFailure)
        if write_quorum is not None:
            self._record_racks(found.racks_short)
        return list(found.bookies)

    def _record_racks(self, short: bool) -> None:
        if short and not self._racks_short:
            _LOG.warning(
                "copies of an entry are on fewer than %d racks: the writable bookies are on too few "
                "(min_racks_per_write_quorum)", self._rule.racks_min,
            )  # fmt: skip
        self._racks_short = short

    def find_rack(self, bookie: str) -> str:
        """Returns the rack of a bookie: the one that an operator assigned, otherwise the one in its last registration.
        Returns UNKNOWN_RACK if the bookie was never registered."""
        last = self._last.get(bookie)
        return self._racks.get(bookie) or (UNKNOWN_RACK if last is None else last.rack)

    @property
    def limbo_bookies(self) -> frozenset[str]:
        """Returns the bookies in limbo (BookieRecord.limbo): they lost data and restore it, so they must get no copies
        of older ledgers."""
        return frozenset(bookie for bookie, record in self._available.items() if record.limbo)

    @property
    def fenced_upto(self) -> int:
        """Returns the largest ledger id up to which some bookie refuses adds, because it once lost data
        (BookieRecord.fenced_upto); -1 if no bookie does."""
        return max((record.fenced_upto for record in self._available.values()), default=-1)

    # ------------------------------------------------------------------------------ the table
    async def _follow(self) -> None:
        while True:
            try:
                revision = await self._metadata.revision()
                await self._list()
                self._listed.set()
                changes = group_changes(self._metadata.watch(paths.BOOKIES_ROOT, revision), self._choose_read_delay)
                async with aclosing(changes) as groups:
                    async for changed in groups:
                        await self._apply_changes(changed)
                await asyncio.sleep(self._choose_read_delay())
            except MagnetarError as error:
                if not error.retryable:
                    raise
                _LOG.warning("the watch on bookies broke, listing again: %s", error)
                await asyncio.sleep(self._config.retry_s + self._choose_read_delay())

    def _choose_read_delay(self) -> float:
        """Returns the seconds to wait before the next read: the other processes of the cluster heard of the same
        change at the same moment."""
        return choose_read_delay(len(self._available), self._world.rng)

    async def refresh_bookie_list(self) -> None:
        """Lists the registered bookies again now, because the watch may lag. Callers at the same time share one
        listing. Raises the metadata's errors."""
        listings = self._listings
        async with self._looking:
            if self._listings == listings:
                await self._list()

    async def _apply_changes(self, changed: set[str]) -> None:
        if paths.RACKS in changed:
            await self._refresh_racks()
        folder = f"{paths.AVAILABLE_BOOKIES}/"
        bookies = sorted(each.removeprefix(folder) for each in changed if each.startswith(folder))
        async with self._refreshing:  # records are applied in the order in which they were read
            nodes = await self._metadata.read_nodes(paths.AVAILABLE_BOOKIES, bookies)
            for bookie in bookies:
                self._apply_node(bookie, nodes.get(bookie))

    async def _list(self) -> None:
        await self._refresh_racks()
        await self._read_registrations()
        self._listings += 1

    async def _read_registrations(self) -> None:
        async with self._refreshing:
            nodes = await self._metadata.read_nodes(paths.AVAILABLE_BOOKIES)
            for gone in sorted(set(self._available) - set(nodes)):
                del self._available[gone]
            for bookie, node in nodes.items():
                self._apply_node(bookie, node)

    async def _refresh_racks(self) -> None:
        async with self._refreshing:
            node = await self._metadata.get(paths.RACKS)
            try:
                self._racks = {} if node is None else decode_record(node.value, RacksRecord, paths.RACKS).racks
            except ValueError as error:
                _LOG.error("the racks in the metadata are not used, their record is invalid: %s", error)

    def _apply_node(self, bookie: str, node: VersionedValue | None) -> None:
        self._available.pop(bookie, None)
        if node is not None:
            try:
                self._apply_registration(bookie, decode_record(node.value, BookieRecord, paths.bookie(bookie)))
            except ValueError as error:  # a damaged record, uuid or endpoint: this bookie only is not used
                _LOG.error("bookie %s is not used, its registration is invalid: %s", bookie, error)

    def _apply_registration(self, bookie: str, record: BookieRecord) -> None:
        endpoint = Endpoint.parse(record.endpoint)
        peer, last = self.peers.get(bookie), self._last.get(bookie)
        is_elsewhere = peer is None or last is None or peer.endpoint != endpoint or last.key != record.key
        if is_elsewhere:
            access = PeerClientKeys(record.key)
            self.peers[bookie] = self._world.network.connect_peer(endpoint, uuid.UUID(bookie).bytes, access)
            if peer is not None:
                self._closing.spawn(peer.close(), "ledger-peer-close")
        if is_elsewhere or last is None or last.process != record.process:
            self._quarantine.on_bookie_restarted(bookie, self._world.clock.monotonic())
            self._trouble.reset_weight(bookie)
        self._available[bookie] = self._last[bookie] = record

    def statistics(self) -> dict[str, dict[str, int]]:
        """Returns the counters of each bookie's connection, and of its faults in answering reads, by bookie."""
        return {
            bookie: {**peer.statistics(), **{f"reads_{kind.value}": count for kind, count in self._counts(bookie)}}
            for bookie, peer in self.peers.items()
        }

    def _counts(self, bookie: str) -> Iterable[tuple[BookieFaultKind, int]]:
        return self._trouble.counts.get(bookie, {}).items()

    async def close(self) -> None:
        """Ends the watch of the registrations, drops damage reports that are not stored, and closes the connections.
        Requests on their way fail. May be called again."""
        self._closed = True
        await self._background.close()
        await self.damage.close()
        await self._closing.drain()
        for peer in list(self.peers.values()):
            await peer.close()
        self.peers.clear()


class _Unregistered:
    """Stands for a bookie that was never registered: each request to it fails with Unavailable."""

    def __init__(self, bookie: str) -> None:
        self._error = Unavailable(f"bookie {bookie} is not registered", bookie=bookie)

    def request(self, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float) -> asyncio.Future[PeerReply]:
        future: asyncio.Future[PeerReply] = asyncio.get_running_loop().create_future()
        future.set_exception(self._error)
        return future

    def send_request(
        self, asker: AnswerListener, head: bytes, frames: Sequence[Buffer], *, timeout_s: float
    ) -> MagnetarError | None:
        return self._error


class _Peers(dict[str, Peer]):
    """The connections by bookie; an `_Unregistered` for a bookie that was never registered."""

    def __missing__(self, bookie: str) -> _Unregistered:
        return _Unregistered(bookie)


def _warn_of_other_group(what: str, bookie: str, groups: BookieGroups) -> None:
    if groups.primary:
        text = "%s to bookie %s, which is of no group of its ledger (%s): none of those can"
        _LOG.warning(text, what, bookie, groups)


def _ends_the_session(error: Exception) -> bool:
    return isinstance(error, MagnetarError) and not error.retryable


# --------------------------------------------------------------------------------------------------------------- config
# Settings of the ledger library. Behaviour first, performance second; each with what it bounds and what it costs.

class LedgerConfig(msgspec.Struct, frozen=True):
    """The settings of one `LedgerClient`. The constructor raises InvalidConfiguration for values that cannot work
    together."""
    # ---- behaviour
    ensemble_size: int = 3  # bookies over which a ledger is striped, unless `create` gives another
    write_quorum: int = 3  # copies of each entry; each costs its bytes on disk and network
    ack_quorum: int = 2  # synced copies before an append is confirmed; one slow bookie of three then costs nothing

    min_racks_per_write_quorum: int = 1  # racks on which the copies of an entry are, at most write_quorum; 1: any
    enforce_min_racks: bool = False  # with too few racks no new ledger is made; or made anyway, with a warning

    ensemble_changes_max: int = 100  # of one ledger; then it ends with the next failure: bookies flap. Each ~150 bytes
    pending_entries_max: int = 50_000  # appends of one ledger on their way; above, `append` fails with BackPressure
    pending_bytes_max: int = 64 << 20  # … and their bytes, in memory until they are confirmed
    unanswered_bytes_max: int = 256 << 20  # of one ledger at bookies that have not answered, each copy; as above

    memory_bytes_max: int = 512 << 20  # … of all ledgers of a client, copies of an entry once; as above

    # ---- performance
    add_timeout_s: float = 5.0  # one add at one bookie; longer: the bookie failed, and another takes its place
    quorum_timeout_s: float = 20.0  # an append, whatever happens, metadata included; longer: OutcomeUnknown
    close_timeout_s: float = 30.0  # of tries to write an ensemble or the end; of a recovery whose bookies are busy
    retry_s: float = 0.2  # before a busy bookie, or a metadata store that gave up a watch, is asked again
    late_s: float = 0.0  # later answers to adds are noted, the last 64 of a ledger; 0: none. A clock read each
    read_timeout_s: float = 5.0  # one replica; then the next one is asked
    speculative_read_s: float = 0.25  # no answer: the next replica is asked as well; costs a read, not a time-out
    fence_timeout_s: float = 5.0  # one bookie during recovery: what a dead one costs when the others do not suffice
    recovery_batch: int = 32  # entries read at once during recovery; each is up to 5 MiB in memory
    read_bytes_max: int = 1 << 20  # of one range read, unless it gives another bound
    quarantine_s: float = 10.0  # a bookie that failed gets no new ledger for so long; readers' trouble halves in it
    quarantine_max_s: float = 300.0  # … twice as long each time it fails again soon after, up to this; then forgiven
    ids_block: int = 16  # ledger ids taken at once: one metadata write per block; the rest of a block is lost at a stop

    def __post_init__(self) -> None:
        Striping(self.ensemble_size, self.write_quorum, self.ack_quorum)
        for name in ("add_timeout_s", "quorum_timeout_s", "close_timeout_s", "retry_s", "read_timeout_s",
                     "fence_timeout_s", "speculative_read_s", "recovery_batch", "read_bytes_max", "ids_block",
                     "pending_entries_max", "pending_bytes_max", "unanswered_bytes_max",
                     "memory_bytes_max"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise InvalidConfiguration(f"{name} must be positive, not {getattr(self, name)}", setting=name)
        if self.min_racks_per_write_quorum < 1:
            raise InvalidConfiguration(
                f"min_racks_per_write_quorum must be at least 1, not {self.min_racks_per_write_quorum}",
                setting="min_racks_per_write_quorum",
            )
        if self.quarantine_max_s < self.quarantine_s:
            raise InvalidConfiguration(
                f"quarantine_max_s ({self.quarantine_max_s}) must not be below quarantine_s ({self.quarantine_s})",
                setting="quarantine_max_s",
            )
        if self.ensemble_changes_max < 0:
            raise InvalidConfiguration("ensemble_changes_max must not be negative", setting="ensemble_changes_max")
        if self.quorum_timeout_s <= self.add_timeout_s:
            raise InvalidConfiguration(
                f"quorum_timeout_s ({self.quorum_timeout_s}) must be above add_timeout_s ({self.add_timeout_s}): "
                "a bookie has to be able to fail first"
            )
