"""One ledgers directory of a bookie: its store, the service of its requests, its disk and its upkeep.

    directory = await LedgersDirectory.open(owner, claimed, shares=2)
    directory.start_upkeep(background)
    await directory.close()

A bookie has one of them for each directory (store/directories.py), usually one. Each has its share of the memory, its
own garbage collection, scrubber and limbo, and knows the ledgers of its directory alone (`is_own`): what another
directory has is neither missing nor deleted here.

**One failing disk** takes its ledgers and not the bookie, if there are several directories and it is not that of
`data`. The first write or sync that fails ends the use of the directory (store/disk.py `IsolatedFiles`). Adds are
answered READ_ONLY, also those of recoverers, so writers change the ensemble. Fences go to the journal and hold. What
memory and the disk can still read is served. The registration names the directory as failed: then no new ledger of it
is placed here, and auto-recovery counts its copies as gone, at once: a directory that failed never takes an add again
in this process, so no grace would bring it back. A disk that hangs has not failed: adds wait when memory is full, so
writers go elsewhere, nothing is copied, and it goes on when the disk answers. The next start replays the journal, or
replaces the directory. A disk that is full makes its own ledgers read-only, and those of no other directory.

`RequestRouter` gives each request to the service of its ledger's directory, in the order of arrival.
Guarded by tests/bookie/test_several_disks.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..ledger.peer_format import read_ledger_of_request
from ..metadata.records import LedgerGenerations, find_ledgers_directory
from ..metadata.store import MetadataStore
from ..proto.errors import InvalidConfiguration
from ..runtime.metrics import Histogram
from ..runtime.network import PeerRequest, World
from ..runtime.tasks import SupervisedTask, Supervisor, TaskFunction
from .maintenance.garbage import CompactionSchedule, GarbageCollector, GracePeriod
from .maintenance.labels import LedgerLabels
from .maintenance.restore import LimboRestorer
from .maintenance.scrub import EntryRepairer, QuarantineReports, Scrubber
from .registration import DiskLimits, DiskMonitor, DiskState
from .service import BookieService, HandleAdminRequest
from .store.boot import JournalPlace
from .store.directories import ClaimedDirectory, name_directory
from .store.disk import IsolatedFiles
from .store.entrylog.mover import CompactionPolicy
from .store.identity import BookieIdentity
from .store.store import Store, StoreCallbacks

if TYPE_CHECKING:
    from .server import BookieConfig


class DirectoryOwner(NamedTuple):
    """What a directory needs of its bookie. `register` writes the registration, `keep_registered` does so if it is out
    of date. `note` is called after each check of the disk of the first directory, on behalf of all. `went_back` and
    `compare_metadata`: as in GarbageCollector."""

    world: World
    config: BookieConfig
    identity: BookieIdentity
    generations: LedgerGenerations
    metadata: Callable[[], MetadataStore]
    register: Callable[[], Awaitable[None]]
    keep_registered: Callable[[], Awaitable[None]]
    note: Callable[[], Awaitable[None]]
    went_back: Callable[[], int]
    compare_metadata: Callable[[], Awaitable[None]]
    on_admin: HandleAdminRequest
    slow_down: Callable[[int, bool], None]  # (number of the directory, whether its service is pressed)


def divide_config(config: BookieConfig, count: int) -> BookieConfig:
    """Returns the settings of one of `count` directories: those that bound memory and waiting requests are divided."""
    if count == 1:
        return config
    store = msgspec.structs.replace(
        config.store, memtable_bytes=config.store.memtable_bytes // count,
        journal_queue_bytes_max=config.store.journal_queue_bytes_max // count,
        index_cache_bytes=config.store.index_cache_bytes // count,
        read_cache_bytes=config.store.read_cache_bytes // count,
    )  # fmt: skip
    return msgspec.structs.replace(
        config, store=store, held_bytes_max=config.held_bytes_max // count, reads_max=max(1, config.reads_max // count),
        reads_bytes_max=config.reads_bytes_max // count,
    )  # fmt: skip


class LedgersDirectory:
    """A ledgers directory that is open. Made by `open`. `number`: from 0; `upkeep` watches its disk."""

    def __init__(self, owner: DirectoryOwner, claimed: ClaimedDirectory, count: int, world: World) -> None:
        self._owner = owner
        self._world = world
        self._config = divide_config(owner.config, count)
        self._maintenance: list[SupervisedTask] = []
        self.number = claimed.number
        self.path = claimed.path
        self.journal = claimed.journal
        self.store: Store
        self.service: BookieService
        self.upkeep: DiskMonitor
        self.labels: LedgerLabels
        self.schedule: CompactionSchedule
        self.collector: GarbageCollector
        self.mender: EntryRepairer
        self.limbo: LimboRestorer
        self.scrubber: Scrubber
        self.reports: QuarantineReports

    @classmethod
    async def open(cls, owner: DirectoryOwner, claimed: ClaimedDirectory, *, count: int) -> LedgersDirectory:
        """Opens the store of a claimed directory, one of `count`, and makes the parts that work on it. Raises the
        errors of `Store.open`; InvalidConfiguration if the disk of a directory of several fails."""
        world = owner.world
        isolated = count > 1 and claimed.path != owner.config.directories.data
        if isolated:
            world = replace(world, files=IsolatedFiles(world.files))
        directory = cls(owner, claimed, count, world)
        ports = StoreCallbacks(
            on_room=lambda: directory.service.on_store_has_room(),
            on_no_space=lambda: directory.upkeep.on_no_space(),
            on_bad=lambda: directory.mender.on_entries_quarantined(),
            on_failed=lambda: directory.upkeep.on_failed(),
        )
        try:
            directory.store = await Store.open(
                world, claimed.path, owner.identity.uuid, directory._config.store, claimed.known, ports,
                JournalPlace(claimed.journal, owner.world.files),
            )  # fmt: skip
        except OSError as error:
            if not isolated or isinstance(error, PermissionError):
                raise
            raise InvalidConfiguration(
                f"the disk of {claimed.path} fails: {error}. Mend it and start again; or, if it is lost for good, give "
                "an empty directory of any disk in its place, and run `magnetar bookies replace-directory "
                f"{owner.identity.uuid_text} {name_directory(claimed.number)}`", directory=claimed.path
            ) from error  # fmt: skip
        directory._make_parts()
        return directory

    def _make_parts(self) -> None:
        owner, config, store, world = self._owner, self._config, self.store, self._world
        identity, clock = owner.identity, world.clock
        limits = DiskLimits(
            config.disk_full_share, config.disk_low_water_share, config.disk_warn_share, config.free_bytes_min
        )
        self.upkeep = DiskMonitor(
            store, owner.keep_registered, limits, config.upkeep_interval_s, self._set_read_only,
            None if self.number else owner.note,
        )  # fmt: skip
        policy = CompactionPolicy(
            config.gc_minor_share, config.gc_major_share, config.store.log_bytes_max // 16, config.gc_bytes_per_s,
            config.gc_full_share,
        )  # fmt: skip
        self.labels = LedgerLabels(world, self.path, identity.uuid, owner.metadata)
        self.schedule = CompactionSchedule(
            world, self.path, config.gc_interval_s, config.gc_minor_interval_s, config.gc_major_interval_s
        )
        self.collector = GarbageCollector(
            store, clock, owner.metadata, identity.instance, GracePeriod(config.gc_grace_s, config.gc_doubt_s), policy,
            self.schedule, lambda: self.upkeep.state is not DiskState.TIGHT, lambda: self.upkeep.state.is_read_only,
            owner.went_back, owner.compare_metadata, self.labels.run_pass, identity.uuid_text,
        )  # fmt: skip
        self.limbo = LimboRestorer(
            world, store, identity.uuid_text, owner.metadata, config.limbo_pause_s, owner.register, self.is_own
        )
        self.mender = EntryRepairer(world, store, identity.uuid_text, owner.metadata, self.upkeep.request_check)
        self.scrubber = Scrubber(
            world, store, self.path, identity.uuid, config.scrub_pass_s, self.mender.repair_ledger
        )
        self.reports = QuarantineReports(
            store, identity.uuid_text, clock, self.mender.on_entries_quarantined, self.is_own
        )
        self.service = BookieService(
            store, clock, entry_bytes_max=config.entry_bytes_max, held_bytes_max=config.held_bytes_max,
            reads_max=config.reads_max, reads_bytes_max=config.reads_bytes_max,
            read_bytes_max=config.store.read_bytes_max, metadata=owner.metadata, on_admin=owner.on_admin,
            slow_down=lambda pressed: owner.slow_down(self.number, pressed), add_label=self.labels.add_label,
        )  # fmt: skip

    def is_own(self, ledger: int) -> bool:
        """Returns whether the ledger is in this directory, by the bookie's map."""
        return find_ledgers_directory(self._owner.generations, ledger) == self.number

    # ------------------------------------------------------------------------------------ upkeep
    def start_upkeep(self, background: Supervisor) -> None:
        """Starts the background tasks of the directory in `background`."""
        suffix = f"-{self.number}" if self.number else ""
        background.start_supervised(f"bookie-upkeep{suffix}", self.upkeep.run)
        works: list[tuple[str, TaskFunction]] = [
            ("gc", self.collector.run_forever), ("limbo", self.limbo.run), ("scrub", self.scrubber.run),
            ("mend", self.mender.run),
        ]  # fmt: skip
        for name, work in works:
            self._maintenance.append(background.start_supervised(f"bookie-{name}{suffix}", work))

    def _set_read_only(self, read_only: bool) -> None:
        """Called after each check of the disk. If the disk has failed, refuses the adds that wait, and ends the
        maintenance."""
        self.service.is_read_only = read_only
        if self.store.failure is not None:
            self.service.on_store_has_room()
            for each in self._maintenance:
                each.cancel()

    async def close(self) -> None:
        """Closes the parts of the directory and its store. The tasks of `start_upkeep` must have ended."""
        await self.service.close()
        await self.scrubber.close()
        await self.labels.close()
        await self.schedule.close()
        await self.store.close()

    # ------------------------------------------------------------------------------------ facts
    def highest_ledger(self) -> int:
        """Returns the largest ledger id that the directory knows, including deleted ledgers; -1 if there is none."""
        facts = self.store.descriptors
        return max(facts.highest, max((last for _, last in facts.tombstones), default=-1))

    def statistics(self) -> dict[str, int]:
        """Returns the counters and present values of the directory's parts, by their names."""
        total, free = self.upkeep.usage
        own = {
            "read_only": int(self.upkeep.is_read_only), "disk_total_bytes": total, "disk_free_bytes": free,
            "reserve_held": int(self.store.room.is_reserve_held), "upkeep_failures": self.upkeep.failures,
            "directories": 1, "directories_writable": int(not self.upkeep.is_read_only),
            "directories_failed": int(self.store.failure is not None),
        }  # fmt: skip
        parts = (self.store, self.service, self.collector, self.limbo, self.scrubber, self.labels)
        return {name: value for part in parts for name, value in part.statistics().items()} | own

    def histograms(self) -> dict[str, Histogram]:
        """Returns the histograms of the directory's parts, by their names."""
        return {**self.store.histograms(), **self.service.histograms()}


LARGEST_COUNTS = frozenset({
    "limbo", "limbo_upto", "gc_running", "gc_refused", "scrub_last_pass_s", "gc_doubtful",
})  # fmt: skip
SMALLEST_COUNTS = frozenset({"read_only", "reserve_held", "scrub_pass"})
"""Statistics of which a bookie shows the largest, or the smallest, of its directories. Of all others it shows the
sum."""


def combine_statistics(several: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Returns the statistics of a bookie from those of its directories."""
    found: dict[str, int] = {}
    for name in several[0]:
        values = [each[name] for each in several]
        fold = max if name in LARGEST_COUNTS else min if name in SMALLEST_COUNTS else sum
        found[name] = fold(values)
    return found


class RequestRouter:
    """Gives each request to the service of the directory that has its ledger. Requests without a ledger go to the
    first."""

    def __init__(self, generations: LedgerGenerations, services: Sequence[BookieService]) -> None:
        self._generations = generations
        self._services = services

    def serve(self, requests: Sequence[PeerRequest]) -> None:
        """Takes all requests that arrived in one turn of the event loop (`BookieService.serve`)."""
        if len(self._services) == 1:
            self._services[0].serve(requests)
            return
        sorted_out: dict[int, list[PeerRequest]] = {}
        for request in requests:
            number = find_ledgers_directory(self._generations, read_ledger_of_request(request.head))
            sorted_out.setdefault(number, []).append(request)
        for number, its in sorted_out.items():
            self._services[number].serve(its)


async def close_all(directories: Sequence[LedgersDirectory]) -> None:
    """Closes all directories. An error of one does not keep the others open; the first error is raised afterwards."""
    results = await asyncio.gather(*(each.close() for each in directories), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
