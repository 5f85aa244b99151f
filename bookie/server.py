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
from ..proto.errors import InvalidConfiguration, InvalidRequest, MagnetarError, NewerFormat, ReadOnly, Unavailable
from ..proto.policies import check_bookie_groups
from ..proto.versions import PRODUCT
from ..runtime.access import Principal
from ..runtime.config import MIB, MemoryShare
from ..runtime.metrics import Histogram, combine_histograms
from ..runtime.network import Endpoint, RunningPeerServer, World
from ..runtime.tasks import Supervisor, run_to_end
from .directory import DirectoryOwner, LedgersDirectory, RequestRouter, close_all, combine_statistics
from .format.journal import DamagedFile
from .maintenance.garbage import GarbageCollector
from .maintenance.repair import RepairSupervisor
from .maintenance.repair_worker import BATCH_MEMORY_BYTES, RepairConfig
from .maintenance.restore import LimboRestorer, read_largest_allocated_ledger
from .maintenance.scrub import Scrubber
from .maintenance.seen import RollbackGuard
from .registration import BookieRegistration, DiskMonitor, DiskUsage, JournalPositionRecorder, OpenMetadataSession
from .service import HELD_BYTES_DIVISOR
from .store import identity
from .store.directories import ClaimedDirectories, GivenDirectories, claim_directories
from .store.disk import NoFileDescriptor, NoSpace
from .store.identity import BookieIdentity
from .store.memtable import MEMTABLES_MAX
from .store.replay import JournalPosition
from .store.store import Store, StoreConfig

if TYPE_CHECKING:
    from .admin import BookieAdmin

_LOG = logging.getLogger("magnetar.bookie")


LEDGERS_DIRECTORIES_MAX = 16
"""Each has a sixteenth of the memory then; more disks are better served by several bookies."""


class BookieConfig(msgspec.Struct, frozen=True):
    """The settings of a bookie. The constructor raises InvalidConfiguration for values that cannot work together."""

    data: str  # data directory; one process at a time
    journal: str = ""  # directory of the journal, on a device of its own; "": a folder of `data`
    ledgers: tuple[str, ...] = ()  # directories of the ledgers, one for each disk (store/directories.py); (): `data`
    host: str = "127.0.0.1"  # where it listens
    port: int = 0  # 0: a free one
    advertised_host: str = ""  # the host that it registers; none: `host`
    place: str = ""  # what the cookie calls the data directory; "": advertised host and `data`, which then may not move
    rack: str = "/default"  # copies of a ledger go to distinct racks first
    group: str = ""  # a namespace may ask for bookies of a group; none: such a namespace does not use it
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
        if len(self.ledgers) > LEDGERS_DIRECTORIES_MAX:
            raise InvalidConfiguration(f"a bookie has at most {LEDGERS_DIRECTORIES_MAX} ledgers directories")
        if not all(self.ledgers):
            raise InvalidConfiguration("a ledgers directory has no name")
        if not 0 < self.disk_low_water_share <= self.disk_full_share <= 1:
            raise InvalidConfiguration("disk_low_water_share must not be above disk_full_share, nor that above 1")
        try:
            check_bookie_groups((self.group,) if self.group else (), "group")
        except InvalidRequest as error:
            raise InvalidConfiguration(error.message, setting="group") from error
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


    @property
    def directories(self) -> GivenDirectories:
        """The directories of the bookie."""
        return GivenDirectories.name(self.data, self.journal, self.ledgers)


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
        self._pressed: set[int] = set()  # directories whose services want the sockets to be read slowly
        self._identity: BookieIdentity
        self._claimed: ClaimedDirectories
        self.directories: list[LedgersDirectory] = []
        """Its ledgers directories, by number."""
        self._serving: RunningPeerServer
        self._notes: JournalPositionRecorder
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
            await self._open_directories()
        except BaseException as error:
            await run_to_end(self._release())
            if isinstance(error, DamagedFile | NewerFormat | NoSpace | PermissionError):
                raise self._refusal(error) from error
            raise
        self._memory.here = lambda: max(each.highest_ledger() for each in self.directories)
        self._make_parts()
        try:
            for each in self.directories:
                await each.labels.load()
            first, *more = self._journal_positions()
            await identity.record_bookie_start(
                world, self._registration.metadata, config.data, self._identity, first, more,
                ledgers=self._claimed.generations, journal=config.directories.journal,
                paths_of_ledgers=config.directories.ledgers,
            )  # fmt: skip
            for each in self.directories:
                await each.upkeep.check_disk()
            await self._learn_departing()
            listen = Endpoint(config.host, config.port)
            router = RequestRouter(self._claimed.generations, [each.service for each in self.directories])
            self._serving = await world.network.serve_peers(listen, self._identity.uuid, router.serve)
            await self._registration.register()
        except BaseException:
            await run_to_end(self._stop_serving())
            raise
        self.background.start_supervised("bookie-session", self._registration.run)
        for each in self.directories:
            each.start_upkeep(self.background)
        self.background.start_supervised("bookie-journal-notes", self._notes.run)
        self.background.start_supervised("bookie-repair", self._repair.run)

    async def _open_directories(self) -> None:
        """Claims the directories besides `data`, and opens the store of each ledgers directory."""
        world, metadata = self._world, self._registration.metadata
        upto = partial(read_largest_allocated_ledger, metadata)
        await self._registration.check_no_other_process(world, UUID(bytes=self._identity.uuid))
        await self._memory.load()
        await self._memory.check_metadata_not_older(metadata, accepted=self._identity.is_metadata_accepted)
        self._claimed = await claim_directories(world, metadata, self._config.directories, self._identity, upto)
        owner = DirectoryOwner(
            world, self._config, self._identity, self._claimed.generations, lambda: self._registration.metadata,
            self._registration.register, self._keep_registered, self._check_registration,
            lambda: self._went_back + self._notes.went_back, lambda: self._notes.compare_stored_position(),
            self._answer_admin, self._slow_down,
        )  # fmt: skip
        for claimed in self._claimed.ledgers:
            opened = await LedgersDirectory.open(owner, claimed, count=len(self._claimed.ledgers))
            self.directories.append(opened)

    async def _release(self) -> None:
        """Closes the ledgers directories, then releases all that this process holds of the bookie's directories."""
        try:
            await close_all(self.directories)
        finally:
            if hasattr(self, "_claimed"):
                self._claimed.close()
            self._identity.lock.close()
            await self._memory.close()

    def _journal_positions(self) -> tuple[JournalPosition, ...]:
        return tuple(each.store.journal_position for each in self.directories)

    def _make_parts(self) -> None:
        self._repair = RepairSupervisor(
            self._world, lambda: self._registration.metadata, self._config.repair, self.id,
            self._config.register_retry_s,
        )  # fmt: skip
        self._notes = JournalPositionRecorder(
            [each.store for each in self.directories], lambda: self._registration.metadata, self._identity,
            self._end_deferral,
        )  # fmt: skip
        for each in self.directories:
            each.service.defer_answer = self._notes.defer_answer

    def _end_deferral(self) -> None:
        for each in self.directories:
            each.service.defer_answer = None

    def _slow_down(self, number: int, pressed: bool) -> None:
        """Reads the sockets slowly while the service of any directory wants that."""
        before = bool(self._pressed)
        (self._pressed.add if pressed else self._pressed.discard)(number)
        if bool(self._pressed) is not before:
            self._serving.receive_slowly(bool(self._pressed))

    async def _answer_admin(self, request: bytes, sender: Principal, local: bool) -> bytes:
        if self._admin is None:
            await self._world.workers.load(f"{__package__}.admin")
            from .admin import BookieAdmin, RepairAdmin

            if self._admin is None:
                metadata, clock = lambda: self._registration.metadata, self._world.clock
                self._admin = BookieAdmin(self.id, self.directories, metadata, clock)
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
        for each in self.directories:
            await each.service.close()
        await self._notes.close()
        if self._admin is not None:
            await self._admin.close()
        await self._release()

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
    def first(self) -> LedgersDirectory:
        """Returns the first of its ledgers directories, usually the only one."""
        return self.directories[0]

    def get_directory(self, ledger: int) -> LedgersDirectory:
        """Returns the ledgers directory that has this ledger."""
        return self.directories[records.find_ledgers_directory(self._claimed.generations, ledger)]

    @property
    def store(self) -> Store:
        return self.first.store

    def statistics(self) -> dict[str, int]:
        """Returns the bookie's counters and present values, by the names under which metrics show them."""
        parts = (self._repair, self.background, self._registration)
        own = {name: value for part in parts for name, value in part.statistics().items()}
        return combine_statistics([each.statistics() for each in self.directories]) | own

    def why_not_ready(self) -> list[str]:
        """Returns the reasons why the bookie does not serve all of its data, as texts; an empty list: the bookie is
        ready. A read-only bookie serves reads and counts as ready, and so does one of whose directories some serve. A
        bookie whose `start` has returned has replayed its journal."""
        reasons = []
        if not self._registration.is_registered:
            reasons.append(f"bookie {self.id} is not registered in the metadata now")
        if self._in_limbo:
            reasons.append(f"bookie {self.id} restores lost data: it is in limbo")
        return reasons

    @property
    def _in_limbo(self) -> bool:
        return any(each.limbo.limbo_upto >= 0 for each in self.directories)

    def histograms(self) -> dict[str, Histogram]:
        """Returns the bookie's histograms, by the names under which cli/run/metrics.py shows them."""
        first, *more = (each.histograms() for each in self.directories)
        return {name: combine_histograms([one, *(each[name] for each in more)]) for name, one in first.items()}

    @property
    def garbage_collector(self) -> GarbageCollector:
        return self.first.collector

    @property
    def limbo_restorer(self) -> LimboRestorer:
        return self.first.limbo

    @property
    def scrubber(self) -> Scrubber:
        return self.first.scrubber

    @property
    def journal_position_recorder(self) -> JournalPositionRecorder:
        return self._notes

    @property
    def disk_monitor(self) -> DiskMonitor:
        return self.first.upkeep

    async def _record(self) -> records.BookieRecord:
        usages = [DiskUsage(*await each.store.room.measure_disk()) for each in self._measurable]
        return records.BookieRecord(
            bookie=self.id, endpoint=str(self.endpoint), read_only=self._is_read_only,
            rack=self._config.rack, group=self._config.group, total_bytes=sum(each.total for each in usages),
            free_bytes=sum(each.free for each in usages), limbo=self._in_limbo,
            fenced_upto=max(each.store.descriptors.fenced_upto for each in self.directories), process=self._process,
            key=self._serving.key, version=PRODUCT, format=records.CLUSTER_FORMAT,
            ledgers=self._claimed.generations if len(self.directories) > 1 else (), unwritable=self._unwritable,
            failed=self._failed,
        )  # fmt: skip

    @property
    def _is_read_only(self) -> bool:
        """Whether no directory takes adds of clients."""
        return all(each.upkeep.is_read_only for each in self.directories)

    @property
    def _measurable(self) -> list[LedgersDirectory]:
        """The directories whose free space counts for placement: those that take adds, else all that did not fail."""
        writable = [each for each in self.directories if not each.upkeep.is_read_only]
        return writable or [each for each in self.directories if each.store.failure is None]

    @property
    def _unwritable(self) -> tuple[int, ...]:
        if self._is_read_only:
            return self._failed
        return tuple(each.number for each in self.directories if each.upkeep.is_read_only)

    @property
    def _failed(self) -> tuple[int, ...]:
        return tuple(each.number for each in self.directories if each.store.failure is not None)

    # ------------------------------------------------------------------------------------ upkeep
    async def _keep_registered(self) -> None:
        """Writes the registration if it is out of date."""
        if not self._registration.is_record_current(
            read_only=self._is_read_only, free_bytes=sum(each.upkeep.usage.free for each in self._measurable),
            unwritable=self._unwritable, failed=self._failed,
        ):  # fmt: skip
            await self._registration.register()

    async def _learn_departing(self) -> None:
        """Reads whether an operator has ordered to move all copies off this bookie."""
        departing = await self._registration.metadata.get(paths.departing_bookie(self.id)) is not None
        for each in self.directories:
            each.upkeep.set_bookie_departing(departing)

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
        for each in self.directories:
            if each.store.failure is None:
                await each.reports.store_quarantine_reports(self._registration.metadata)


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
