"""The storage process: identity, store, peer service, registration, upkeep.

    bookie = await Bookie.start(world, config, metadata)     serves when this returns
    bookie.id, bookie.endpoint                               uuid text; where it listens
    await bookie.close()                                     in order: no new requests, the queue is synced, files

Order of a start: lock and cookie (identity.py), replay (store/boot.py), listen, register. A registered bookie serves.
In the background: registration.py, garbage.py, restore.py, scrub.py, repair (auto-recovery).

Also in this file, below its heading: the parts of a bookie that may take memory, and how much of `memory_bytes` each
gets (memory).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from ..metadata import paths, records
from ..metadata.store import MetadataStore
from ..proto.errors import InvalidConfiguration, MagnetarError, NewerFormat, ReadOnly, Unavailable
from ..proto.versions import PRODUCT
from ..runtime.access import Principal
from ..runtime.config import MIB, MemoryShare
from ..runtime.metrics import Histogram
from ..runtime.network import Endpoint, RunningPeerServer, World
from ..runtime.tasks import Supervisor, run_to_end
from .format.journal import DamagedFile
from .maintenance.garbage import CompactionSchedule, GarbageCollector, GracePeriod
from .maintenance.labels import LedgerLabels
from .maintenance.repair import RepairSupervisor
from .maintenance.repair_worker import BATCH_MEMORY_BYTES, RepairConfig
from .maintenance.restore import LimboRestorer, read_largest_allocated_ledger
from .maintenance.scrub import EntryRepairer, QuarantineReports, Scrubber
from .maintenance.seen import RollbackGuard
from .registration import (
    BookieRegistration,
    DiskLimits,
    DiskMonitor,
    DiskState,
    JournalPositionRecorder,
    OpenMetadataSession,
)
from .service import HELD_BYTES_DIVISOR, BookieService
from .store import identity
from .store.disk import NoFileDescriptor, NoSpace
from .store.entrylog.mover import CompactionPolicy
from .store.identity import BookieIdentity
from .store.memtable import MEMTABLES_MAX
from .store.state_log import RecordedDirectoryState
from .store.store import Store, StoreCallbacks, StoreConfig

if TYPE_CHECKING:
    from .admin import BookieAdmin

_LOG = logging.getLogger("magnetar.bookie")


class BookieConfig(msgspec.Struct, frozen=True):
    """The settings of a bookie. The constructor raises InvalidConfiguration for values that cannot work together."""

    data: str  # data directory; one process at a time
    host: str = "127.0.0.1"  # where it listens
    port: int = 0  # 0: a free one
    advertised_host: str = ""  # the host that it registers; none: `host`
    place: str = ""  # what the cookie calls the data directory; "": advertised host and `data`, which then may not move
    rack: str = "/default"  # copies of a ledger go to distinct racks first
    entry_bytes_max: int = (5 << 20) + (128 << 10)  # the largest message, and what client and broker put in front
    held_bytes_max: int = 32 << 20  # adds that wait for room; from half of it the socket is read slowly, past it BUSY
    reads_max: int = 256  # file reads at a time, each up to `store.read_bytes_max` of memory
    reads_bytes_max: int = 256 << 20  # … and what they may bring together; past either BUSY
    free_bytes_min: int = -1  # free, or clients' adds are refused, not recovery; -1: 256 MiB, at most 5 % of the disk
    disk_full_share: float = 0.95  # used share of the disk at which clients' adds are refused
    disk_low_water_share: float = 0.90  # used share below which they are taken again
    disk_warn_share: float = 0.90  # used share at which major compaction waits, which takes room before it gives some
    upkeep_interval_s: float = 10.0  # between checks of the disk; one system call
    scrub_pass_s: float = 604800.0  # in which all that is stored is read once and compared; 0: never
    limbo_pause_s: float = 60.0  # between passes in limbo, each asks the peers for what could not be had before
    gc_interval_s: float = 600.0  # between passes; each lists all ledgers of the cluster
    gc_grace_s: float = 600.0  # a ledger must be gone this long before its data goes
    gc_doubt_s: float = 3600.0  # the same when more than half of the ledgers here were deleted (garbage.py)
    gc_minor_share: float = 0.2  # minor compaction moves what lives in closed logs with a smaller live share: cheap
    gc_minor_interval_s: float = 3600.0  # between minor compactions; each reads the index of every log
    gc_major_share: float = 0.5  # the same for major compaction, which also merges small logs: up to a copy for a copy
    gc_major_interval_s: float = 86400.0  # between major compactions
    gc_full_share: float = 0.9  # on a full disk each pass moves what lives in closed logs with a smaller live share
    gc_bytes_per_s: int = 32 << 20  # that compaction reads and writes; the disk is shared with adds
    register_retry_s: float = 1.0  # after a failed registration
    repair: RepairConfig = msgspec.field(default_factory=RepairConfig)  # of its part in auto-recovery
    store: StoreConfig = msgspec.field(default_factory=StoreConfig)  # of journal, memtable, entry logs and caches

    def __post_init__(self) -> None:
        if not self.data:
            raise InvalidConfiguration("a bookie needs a data directory")
        if not 0 < self.disk_low_water_share <= self.disk_full_share <= 1:
            raise InvalidConfiguration("disk_low_water_share must not be above disk_full_share, nor that above 1")
        if self.free_bytes_min < -1:
            raise InvalidConfiguration("free_bytes_min is a number of bytes, or -1: not set")
        if not 0 <= self.gc_minor_share <= self.gc_major_share <= 1:
            raise InvalidConfiguration("gc_minor_share must not be above gc_major_share, nor that above 1")
        if self.gc_bytes_per_s < 1 << 10:
            raise InvalidConfiguration("gc_bytes_per_s must be at least 1024, or compaction never ends")
        if self.entry_bytes_max > 8 << 20:
            raise InvalidConfiguration(
                f"entry_bytes_max = {self.entry_bytes_max} is above the journal's limit of 8 MiB"
            )


class Bookie:
    """A bookie process: its store, its service and its background work. Made by `Bookie.start`. The caller must close
    `metadata`. When that session is lost, `new_session` opens another one; if `new_session` is None, the bookie then
    stays unregistered."""

    def __init__(
        self,
        world: World,
        config: BookieConfig,
        metadata: MetadataStore,
        new_session: OpenMetadataSession | None = None,
    ) -> None:
        self._world = world
        self._config = config
        self._registration = BookieRegistration(
            metadata, new_session, config.register_retry_s, self._record, self._trust, world.clock
        )  # fmt: skip
        self._memory = RollbackGuard(world, config.data)
        self._process = world.rng.randbytes(8).hex()
        self.background = Supervisor()
        self._ending: asyncio.Task[None] | None = None
        self._went_back = 0  # how often the metadata was found to be an older one
        self._identity: BookieIdentity
        self._store: Store
        self._service: BookieService
        self._serving: RunningPeerServer
        self._notes: JournalPositionRecorder
        self._upkeep: DiskMonitor
        self._labels: LedgerLabels
        self._schedule: CompactionSchedule
        self._collector: GarbageCollector
        self._mender: EntryRepairer
        self._limbo: LimboRestorer
        self._scrubber: Scrubber
        self._reports: QuarantineReports
        self._repair: RepairSupervisor
        self._admin: BookieAdmin | None = None  # made by the first operator that asks

    @property
    def metadata(self) -> MetadataStore:
        """Returns the metadata session that the bookie has now."""
        return self._registration.metadata

    @classmethod
    async def start(
        cls, world: World, config: BookieConfig, metadata: MetadataStore, new_session: OpenMetadataSession | None = None
    ) -> Bookie:
        """Starts a bookie and returns it when it serves requests and is registered. `metadata` and `new_session`: as in
        the class. Raises a MagnetarError if the bookie may not start with its directory, such as Busy,
        InvalidConfiguration, NewerFormat or ReadOnly. Raises the errors of the metadata, and OSError if the disk fails.
        After an error the directory is not locked any more."""
        bookie = cls(world, config, metadata, new_session)
        await bookie._start()
        return bookie

    async def _start(self) -> None:
        world, config = self._world, self._config
        address = f"{config.advertised_host or config.host}:{config.data}"
        places = (config.place, address) if config.place else (address,)
        try:
            self._identity = await identity.claim_directory(world, self._registration.metadata, config.data, *places)
        except (DamagedFile, NewerFormat, NoSpace) as error:
            raise self._refusal(error) from error
        try:
            upto = partial(read_largest_allocated_ledger, self._registration.metadata)
            await self._registration.check_no_other_process(world, UUID(bytes=self._identity.uuid))
            await self._memory.load()
            await self._memory.check_metadata_not_older(
                self._registration.metadata, accepted=self._identity.is_metadata_accepted
            )
            known = RecordedDirectoryState(self._identity.stored_journal_position, self._identity.losses, upto)
            ports = StoreCallbacks(
                on_room=lambda: self._service.on_store_has_room(), on_no_space=lambda: self._upkeep.on_no_space(),
                on_bad=lambda: self._mender.on_entries_quarantined(),
            )  # fmt: skip
            self._store = await Store.open(world, config.data, self._identity.uuid, config.store, known, ports)
        except BaseException as error:
            self._identity.lock.close()
            await self._memory.close()
            if isinstance(error, DamagedFile | NewerFormat | NoSpace | PermissionError):
                raise self._refusal(error) from error
            raise
        self._memory.here = self._highest
        self._make_parts()
        try:
            await self._labels.load()
            await identity.record_bookie_start(
                world, self._registration.metadata, config.data, self._identity, self._store.journal_position
            )
            await self._upkeep.check_disk()
            await self._learn_departing()
            listen = Endpoint(config.host, config.port)
            self._serving = await world.network.serve_peers(listen, self._identity.uuid, self._service.serve)
            await self._registration.register()
        except BaseException:
            await run_to_end(self._stop_serving())
            raise
        for name, work in (
            ("bookie-session", self._registration.run), ("bookie-upkeep", self._upkeep.run),
            ("bookie-journal-notes", self._notes.run),
            ("bookie-gc", self._collector.run_forever), ("bookie-limbo", self._limbo.run),
            ("bookie-scrub", self._scrubber.run), ("bookie-mend", self._mender.run),
            ("bookie-repair", self._repair.run),
        ):  # fmt: skip
            self.background.start_supervised(name, work)

    def _make_parts(self) -> None:
        config = self._config
        limits = DiskLimits(
            config.disk_full_share, config.disk_low_water_share, config.disk_warn_share, config.free_bytes_min
        )
        self._upkeep = DiskMonitor(
            self._store,
            self._registration,
            limits,
            config.upkeep_interval_s,
            self._set_read_only,
            self._check_registration,
        )
        policy = CompactionPolicy(
            config.gc_minor_share, config.gc_major_share, config.store.log_bytes_max // 16, config.gc_bytes_per_s,
            config.gc_full_share,
        )  # fmt: skip
        self._labels = LedgerLabels(
            self._world, config.data, self._identity.uuid, lambda: self._registration.metadata
        )
        self._schedule = CompactionSchedule(
            self._world, config.data, config.gc_interval_s, config.gc_minor_interval_s, config.gc_major_interval_s
        )
        self._collector = GarbageCollector(
            self._store, self._world.clock, lambda: self._registration.metadata, self._identity.instance,
            GracePeriod(config.gc_grace_s, config.gc_doubt_s), policy, self._schedule,
            lambda: self._upkeep.state is not DiskState.TIGHT, lambda: self._upkeep.state.is_read_only,
            lambda: self._went_back + self._notes.went_back, lambda: self._notes.compare_stored_position(),
            self._labels.run_pass,
        )  # fmt: skip
        self._limbo = LimboRestorer(
            self._world, self._store, self.id, lambda: self._registration.metadata, config.limbo_pause_s,
            self._registration.register,
        )  # fmt: skip
        self._mender = EntryRepairer(
            self._world, self._store, self.id, lambda: self._registration.metadata, self._upkeep.request_check
        )
        self._scrubber = Scrubber(
            self._world, self._store, config.data, self._identity.uuid, config.scrub_pass_s, self._mender.repair_ledger
        )
        self._reports = QuarantineReports(self._store, self.id, self._world.clock, self._mender.on_entries_quarantined)
        self._repair = RepairSupervisor(
            self._world, lambda: self._registration.metadata, config.repair, self.id, config.register_retry_s
        )
        self._service = BookieService(
            self._store, self._world.clock, entry_bytes_max=config.entry_bytes_max,
            held_bytes_max=config.held_bytes_max, reads_max=config.reads_max,
            reads_bytes_max=config.reads_bytes_max, read_bytes_max=config.store.read_bytes_max,
            metadata=lambda: self._registration.metadata, on_admin=self._answer_admin,
            slow_down=lambda pressed: self._serving.receive_slowly(pressed), add_label=self._labels.add_label,
        )  # fmt: skip
        self._notes = JournalPositionRecorder(
            self._store, lambda: self._registration.metadata, self._identity,
            partial(setattr, self._service, "defer_answer", None),
        )  # fmt: skip
        self._service.defer_answer = self._notes.defer_answer

    async def _answer_admin(self, request: bytes, sender: Principal, local: bool) -> bytes:
        if self._admin is None:
            await self._world.workers.load(f"{__package__}.admin")
            from .admin import BookieAdmin, RepairAdmin

            if self._admin is None:
                metadata, clock = lambda: self._registration.metadata, self._world.clock
                self._admin = BookieAdmin(
                    self.id, self._store, self._upkeep, self._collector, self._limbo, self._scrubber, metadata, clock
                )
                self._admin.add_verbs(RepairAdmin(metadata, clock).table)
        return await self._admin.answer_request(request, sender, local)

    def _refusal(self, error: DamagedFile | NewerFormat | NoSpace | PermissionError) -> MagnetarError:
        if isinstance(error, NoFileDescriptor):
            return Unavailable(f"no descriptor is free for {self._config.data} ({error}): raise the limit, `ulimit -n`")
        if isinstance(error, NoSpace):
            return ReadOnly(f"no room for the journal in {self._config.data}; free some and start again")
        if isinstance(error, PermissionError):
            return identity.make_unusable_directory_error(self._config.data, error)
        return error if isinstance(error, NewerFormat) else InvalidConfiguration(str(error))

    async def close(self) -> None:
        """Stops the bookie and releases its directory. The stop completes even if the caller is cancelled; a second
        caller waits until the stop has ended."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._shut_down(), name="bookie-close")
        await run_to_end(self._ending)

    async def _shut_down(self) -> None:
        await self.background.close()
        await self._registration.close()
        await self._stop_serving()

    async def _stop_serving(self) -> None:
        if hasattr(self, "_serving"):
            await self._serving.close()
        await self._service.close()
        await self._notes.close()
        if self._admin is not None:
            await self._admin.close()
        await self._scrubber.close()
        await self._labels.close()
        await self._schedule.close()
        await self._memory.close()
        await self._store.close()
        self._identity.lock.close()

    # ------------------------------------------------------------------------------------ facts
    @property
    def id(self) -> str:
        """The bookie's uuid as text."""
        return self._identity.uuid_text

    @property
    def endpoint(self) -> Endpoint:
        """Returns the endpoint (host and port) at which other processes reach the bookie."""
        found = self._serving.endpoint
        return Endpoint(self._config.advertised_host or found.host, found.port)

    @property
    def store(self) -> Store:
        return self._store

    def statistics(self) -> dict[str, int]:
        """Returns the bookie's counters and present values, by the names under which metrics show them."""
        total, free = self._upkeep.usage
        own = {
            "read_only": int(self._upkeep.is_read_only), "disk_total_bytes": total, "disk_free_bytes": free,
            "reserve_held": int(self._store.room.is_reserve_held), "upkeep_failures": self._upkeep.failures,
        }  # fmt: skip
        parts = (
            self._store, self._service, self._collector, self._limbo, self._scrubber, self._repair, self.background,
            self._registration, self._labels,
        )  # fmt: skip
        return {name: value for part in parts for name, value in part.statistics().items()} | own

    def why_not_ready(self) -> list[str]:
        """Returns the reasons why the bookie does not serve all of its data, as texts; an empty list: the bookie is
        ready. A read-only bookie serves reads and counts as ready. A bookie whose `start` has returned has replayed its
        journal."""
        reasons = []
        if not self._registration.is_registered:
            reasons.append(f"bookie {self.id} is not registered in the metadata now")
        if self._limbo.limbo_upto >= 0:
            reasons.append(f"bookie {self.id} restores lost data: it is in limbo")
        return reasons

    def histograms(self) -> dict[str, Histogram]:
        """Returns the bookie's histograms, by the names under which cli/run/metrics.py shows them."""
        return {**self._store.histograms(), **self._service.histograms()}

    @property
    def garbage_collector(self) -> GarbageCollector:
        return self._collector

    @property
    def limbo_restorer(self) -> LimboRestorer:
        return self._limbo

    @property
    def scrubber(self) -> Scrubber:
        return self._scrubber

    @property
    def journal_position_recorder(self) -> JournalPositionRecorder:
        return self._notes

    @property
    def disk_monitor(self) -> DiskMonitor:
        return self._upkeep

    async def _record(self) -> records.BookieRecord:
        total, free = await self._store.room.measure_disk()
        return records.BookieRecord(
            bookie=self.id, endpoint=str(self.endpoint), read_only=self._upkeep.is_read_only,
            rack=self._config.rack, total_bytes=total, free_bytes=free, limbo=self._limbo.limbo_upto >= 0,
            fenced_upto=self._store.descriptors.fenced_upto, process=self._process, key=self._serving.key,
            version=PRODUCT, format=records.CLUSTER_FORMAT,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------ upkeep
    def _set_read_only(self, read_only: bool) -> None:
        self._service.is_read_only = read_only

    async def _learn_departing(self) -> None:
        """Reads whether an operator has ordered to move all copies off this bookie."""
        self._upkeep.set_bookie_departing(
            await self._registration.metadata.get(paths.departing_bookie(self.id)) is not None
        )

    def _highest(self) -> int:
        """Returns the largest ledger id that this bookie knows, including deleted ledgers; -1 if there is none."""
        facts = self._store.descriptors
        return max(facts.highest, max((last for _, last in facts.tombstones), default=-1))

    async def _trust(self, metadata: MetadataStore) -> None:
        """Raises InvalidConfiguration if the metadata is older than the bookie has seen it. After that no data is
        deleted until a restart, or until an operator accepts the metadata (garbage.py)."""
        try:
            await self._memory.check_metadata_not_older(metadata)
        except InvalidConfiguration:
            self._went_back += 1
            raise

    async def _check_registration(self) -> None:
        await self._learn_departing()
        replaced = await self._registration.is_replaced_by_other_process()
        try:
            await self._trust(self._registration.metadata)
        except InvalidConfiguration as error:  # an older copy may have the bookie's session, and its former process
            _LOG.error("no longer registered, and nothing is deleted until a restart: %s", error)
            await self._registration.unregister()
            return
        if replaced:
            self._world.files.end_process(
                f"another process serves as bookie {self.id}, and was started on a copy of its data"
            )
            return
        await self._reports.store_quarantine_reports(self._registration.metadata)


# -------------------------------------------------------------------------------------------------------- memory
# The parts of a bookie that may take memory, and how much of `memory_bytes` each gets (runtime/config.py).


BOOKIE_MEMORY_SHARES = (
    MemoryShare("memtables", "bookie.store.memtable_bytes", MEMTABLES_MAX, 46, 4 * MIB, 64 * MIB,
          "entries that are synced and not yet in an entry log"),
    MemoryShare("journal-queue", "bookie.store.journal_queue_bytes_max", 1, 12, 6 * MIB, 32 * MIB,
          "journal records on their way to the disk"),
    MemoryShare("held-adds", "bookie.held_bytes_max", HELD_BYTES_DIVISOR, 24, 2 * MIB, 32 * MIB,
          "requests that wait: adds for room, of clients and of recoverers, fences, and first requests of a ledger"),
    MemoryShare("index-cache", "bookie.store.index_cache_bytes", 1, 4, MIB, 16 * MIB, "extents and entry tables"),
    MemoryShare("read-cache", "bookie.store.read_cache_bytes", 1, 18, 2 * MIB, 32 * MIB,
    "entries that were read ahead"),
    MemoryShare("reads", "bookie.reads_bytes_max", 1, 8, 8 * MIB, 1 << 30, "answers that are read from the disk now"),
    MemoryShare("repair", "bookie.repair.batches_at_once", BATCH_MEMORY_BYTES, 8, 1, 6,
    "batches of copies that are made"),
)  # fmt: skip
"""The weights are about the mebibytes of each part in a bookie that has 128 MiB."""
