"""The storage process: identity, store, peer service, registration, upkeep.

    bookie = await Bookie.start(world, config, metadata)     serves when this returns
    bookie.id, bookie.endpoint                               uuid text; where it listens
    await bookie.close()                                     in order: no new requests, what is queued is synced, files

Order of a start: lock and cookie (identity.py), replay (store/boot.py), listen, register; a bookie that is registered
serves. It registers as an ephemeral `paths.bookie(uuid)`, again after its session was lost, and when it becomes
read-only or writable. Unregistered it still serves: brokers that know it lose nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ..metadata import paths, records
from ..metadata.store import ABSENT, ANY, Delete, MetadataStore, Put
from ..proto.errors import InvalidConfiguration, MagnetarError, ReadOnly
from ..runtime.network import Endpoint, Serving
from ..runtime.world import World
from . import identity
from .format.framing import Damaged, NewerFormat
from .garbage import Collector
from .identity import Identity
from .service import BookieService
from .store.disk import NoSpace
from .store.journal import Position
from .store.store import Store, StoreConfig

log = logging.getLogger(__name__)

NewSession = Callable[[], Awaitable[MetadataStore]]


@dataclass(frozen=True, slots=True)
class BookieConfig:
    data: str  # data directory; one process at a time
    host: str = "127.0.0.1"  # where it listens
    port: int = 0  # 0: a free one
    advertised_host: str = ""  # what it registers, when that is not `host`
    place: str = ""  # what the cookie calls the data directory; "": advertised host and `data`, which then may not move
    rack: str = "/default"  # copies of a ledger go to distinct racks first
    entry_bytes_max: int = (5 << 20) + (128 << 10)  # the largest message, and what client and broker put in front
    held_bytes_max: int = 32 << 20  # adds that wait for room in the memtable; past it they are BUSY
    reads_max: int = 256  # file reads at a time, each up to `store.read_bytes_max` of memory
    free_bytes_min: int = 1 << 30  # below it the bookie is read-only (recovery may still write)
    upkeep_interval_s: float = 10.0  # between looks at the disk; one system call
    gc_interval_s: float = 600.0  # between passes; each lists all ledgers of the cluster
    gc_grace_s: float = 600.0  # a ledger must be gone this long before its data goes
    register_retry_s: float = 1.0  # after a failed registration
    store: StoreConfig = field(default_factory=StoreConfig)  # of journal, memtable, entry logs and caches

    def __post_init__(self) -> None:
        if not self.data:
            raise InvalidConfiguration("a bookie needs a data directory")
        if self.entry_bytes_max > 8 << 20:
            raise InvalidConfiguration(
                f"entry_bytes_max = {self.entry_bytes_max} is above the journal's limit of 8 MiB"
            )


class Bookie:
    """`metadata` stays the caller's; `new_session` makes another when its session is lost (None: it stays lost)."""

    def __init__(
        self, world: World, config: BookieConfig, metadata: MetadataStore, new_session: NewSession | None = None
    ) -> None:
        self._world = world
        self._config = config
        self._metadata = metadata
        self._new_session = new_session
        self._own_session = False
        self._tasks: list[asyncio.Task[None]] = []
        self._read_only = False
        self._registered_read_only = False
        self._closed = False
        self._noted = Position(0, 0)  # what the metadata knows of the journal
        self._identity: Identity
        self._store: Store
        self._service: BookieService
        self._serving: Serving
        self._collector: Collector

    @classmethod
    async def start(
        cls, world: World, config: BookieConfig, metadata: MetadataStore, new_session: NewSession | None = None
    ) -> Bookie:
        bookie = cls(world, config, metadata, new_session)
        await bookie._start()
        return bookie

    async def _start(self) -> None:
        world, config = self._world, self._config
        address = f"{config.advertised_host or config.host}:{config.data}"
        places = (config.place, address) if config.place else (address,)
        try:
            self._identity = await identity.claim(world, self._metadata, config.data, *places)
        except (Damaged, NewerFormat, NoSpace) as error:
            raise self._refusal(error) from error
        try:
            self._store = await Store.open(world, config.data, self._identity.uuid, config.store)
        except BaseException as error:
            self._identity.lock.close()
            if isinstance(error, Damaged | NewerFormat | NoSpace | PermissionError):
                raise self._refusal(error) from error
            raise
        self._service = BookieService(
            self._store,
            world.clock,
            entry_bytes_max=config.entry_bytes_max,
            held_bytes_max=config.held_bytes_max,
            reads_max=config.reads_max,
        )
        self._collector = Collector(self._store, world.clock, self._identity.instance, config.gc_grace_s)
        try:
            await identity.complete(
                world, self._metadata, config.data, self._identity, self._store.journal_position
            )
            await self._look_at_disk()
            listen = Endpoint(config.host, config.port)
            self._serving = await world.network.serve_peers(listen, self._identity.uuid, self._service.serve)
            await self._register()
        except BaseException:
            await self._stop_serving()
            raise
        self._tasks = [
            asyncio.create_task(self._keep_registered(), name="bookie-session"),
            asyncio.create_task(self._upkeep(), name="bookie-upkeep"),
            asyncio.create_task(self._collect(), name="bookie-gc"),
        ]

    def _refusal(self, error: Damaged | NewerFormat | NoSpace | PermissionError) -> MagnetarError:
        if isinstance(error, NoSpace):
            return ReadOnly(f"no room for the journal in {self._config.data}; free some and start again")
        if isinstance(error, PermissionError):
            return identity.unusable(self._config.data, error)
        return InvalidConfiguration(str(error))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._unregister()
        await self._stop_serving()

    async def _unregister(self) -> None:
        try:
            if self._own_session:
                await self._metadata.close()
            else:
                await self._metadata.delete(paths.bookie(self.id))
        except MagnetarError as error:
            log.warning("the registration stays until the session ends: %s", error)

    async def _stop_serving(self) -> None:
        if hasattr(self, "_serving"):
            await self._serving.close()
        await self._service.close()
        await self._store.close()
        self._identity.lock.close()

    # ------------------------------------------------------------------------------------ facts
    @property
    def id(self) -> str:
        return self._identity.text

    @property
    def endpoint(self) -> Endpoint:
        """As others reach it."""
        found = self._serving.endpoint
        return Endpoint(self._config.advertised_host or found.host, found.port)

    @property
    def store(self) -> Store:
        return self._store

    def statistics(self) -> dict[str, int]:
        return {**self._store.statistics(), **self._service.statistics(), "read_only": int(self._read_only)}

    # ------------------------------------------------------------------------------------ registration
    async def _register(self) -> None:
        """A new ephemeral in place of whatever a former process left: it must be of this session."""
        total, free = await self._store.disk_usage()
        read_only = self._read_only
        record = records.BookieRecord(
            bookie=self.id, endpoint=str(self.endpoint), read_only=read_only, rack=self._config.rack,
            total_bytes=total, free_bytes=free,
        )  # fmt: skip
        path = paths.bookie(self.id)
        await self._metadata.commit([Delete(path, ANY), Put(path, records.encode(record), ABSENT, ephemeral=True)])
        self._registered_read_only = read_only

    async def _keep_registered(self) -> None:
        while True:
            await self._metadata.wait_session_lost()
            log.warning("the metadata session is lost")
            if self._new_session is None:
                return
            await self._retry(self._renew)

    async def _renew(self) -> None:
        assert self._new_session is not None
        metadata = await self._new_session()
        if self._own_session:
            await self._metadata.close()
        self._metadata, self._own_session = metadata, True
        await self._register()
        log.info("registered again")

    async def _retry(self, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await action()
            except (MagnetarError, OSError) as error:
                log.warning("cannot register: %s", error)
                await asyncio.sleep(self._config.register_retry_s)

    # ------------------------------------------------------------------------------------ upkeep
    async def _look_at_disk(self) -> bool:
        """Whether the registration does not say what the bookie is: read-only or writable.

        A read-only bookie gets no new ledgers, so no add will find out that there is room again: the store tries.
        """
        _, free = await self._store.disk_usage()
        if self._store.no_space and free >= self._config.free_bytes_min:
            await self._store.try_room()
        read_only = self._store.no_space or free < self._config.free_bytes_min
        if read_only != self._read_only:
            log.warning("the bookie is %s, %d bytes are free", "read-only" if read_only else "writable", free)
        self._read_only = self._service.read_only = read_only
        return read_only != self._registered_read_only

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(self._config.upkeep_interval_s)
            try:
                if await self._look_at_disk():
                    await self._register()
                await self._note_journal()
            except (MagnetarError, OSError) as error:
                log.warning("cannot look at the disk or update the registration: %s", error)

    async def _note_journal(self) -> None:
        position = self._store.journal_position
        if position != self._noted:
            await identity.note_journal(self._metadata, self._identity, position)
            self._noted = position

    async def collect(self) -> None:
        """One pass of garbage collection now."""
        await self._collector.collect(self._metadata)

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(self._config.gc_interval_s)
            try:
                await self.collect()
            except (MagnetarError, ValueError, NoSpace, OSError) as error:
                log.warning("garbage collection gave up, the next pass goes on: %s", error)
