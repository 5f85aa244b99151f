"""Registration of a bookie: an ephemeral node `paths.bookie(uuid)` with its endpoint and whether it takes adds.

The bookie writes the node when it begins to answer requests, when it becomes read-only or writable, and after its
session was lost. It writes the node again when its free disk space has changed by `FREE_BYTES_DRIFT_SHARE`, or at all
since `FREE_BYTES_RECORD_AGE_S`. It always replaces the node of a former process, so that the node belongs to this
session. It registers only while its cookie record exists: a bookie that an operator deleted while it started, or had no
session, does not register again. A bookie that is not registered still answers the brokers that know it.

*One process of a uuid.* For the metadata a copy of a directory at the same place is the same bookie: two processes
would answer for one uuid, and neither has the entries of the other. So a start first asks at the registered endpoint
(`check_no_other_process`). If a process answers as this bookie, the start is refused (Busy). A process that does not
answer is replaced. If it still runs, it finds another `process` in the node at its next check of the disk
(`is_replaced_by_other_process`), and ends at once.
Guarded by tests/bookie/test_service.py and tests/bookie/test_registration.py.

**The disk of a bookie** decides when the bookie refuses adds of clients, and when it accepts them again.
`decide_disk_state` decides from three facts: how much of the disk is used, whether a write found no room, and the state
before:

| state | when | what it stops |
|---|---|---|
| WRITABLE | | nothing |
| TIGHT | used ≥ `disk_warn_share` | major compaction, which needs room before it gives some |
| FULL | used ≥ `disk_full_share`, or free < the floor; until both are well within their limits | adds of clients |
| NO_ROOM | a write found no room, or the reserve was given up and is not filled again | adds of clients |
| FAILED | the disk of a ledgers directory of several failed, until a restart | all adds |

An operator who empties the bookie (DepartingRecord) makes it read-only as FULL does, until the operator cancels it.
The floor is `free_bytes_min` as it is set, whatever share of the disk that is; unset: DEFAULT_FREE_BYTES_MIN, at most 5
% of the disk. A bookie leaves FULL below `disk_low_water_share`, with the floor and a tenth of it free. In FULL and
NO_ROOM it is read-only and registers as such. It still takes recovery adds and fences, and writes checkpoints and the
ledger index. Each pass of garbage collection then compacts (garbage.py). When no other room is left, the store gives up
its reserve for this work (bookie/store/headroom.py). The bookie leaves both states by itself. It checks the disk every
`upkeep_interval_s`, and at once when a write finds no room.
Guarded by tests/bookie/test_full_disk.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple
from uuid import UUID

from ..ledger.peer_format import encode_ping_request
from ..metadata import paths, records
from ..metadata.store import (
    ANY_VERSION,
    NODE_ABSENT,
    CheckNodeVersion,
    DeleteNode,
    MetadataStore,
    PutNode,
    check_format_after_registration,
    get_record,
)
from ..proto.errors import BadVersion, Busy, InvalidConfiguration, MagnetarError, NotFound, Unauthorized, Unavailable
from ..runtime.clock import Clock
from ..runtime.network import Endpoint, PeerClientKeys, World
from .store import identity
from .store.disk import NoSpace
from .store.identity import BookieIdentity
from .store.replay import JournalPosition
from .store.store import Store

_LOG = logging.getLogger("magnetar.bookie.node")

PING_TIMEOUT_S = 2.0
"""Seconds to wait for an answer of the process that is already registered as this bookie."""

COOKIE_ATTEMPTS_MAX = 10
FREE_BYTES_DRIFT_SHARE = 0.05
"""When the free space has changed by more than this share of the whole disk, the bookie writes its registration
again."""
FREE_BYTES_RECORD_AGE_S = 60.0
"""After this many seconds the bookie writes its registration again if the free space has changed at all, so that
operators see it. A bookie that gets adds makes one such commit a minute."""

OpenMetadataSession = Callable[[], Awaitable[MetadataStore]]


class BookieRegistration:
    """Registers a bookie in the metadata, so that clients find it. The caller must close `metadata`. When that session
    is lost, `new_session` opens another one; if `new_session` is None, the bookie then stays unregistered. A
    registration that fails is repeated every `retry_s` seconds."""

    def __init__(
        self, metadata: MetadataStore, new_session: OpenMetadataSession | None, retry_s: float,
        record: Callable[[], Awaitable[records.BookieRecord]],
        trust: Callable[[MetadataStore], Awaitable[None]], clock: Clock,
    ) -> None:  # fmt: skip
        """Creates the object; `register` then registers the bookie. `record` makes the record to register. `trust`
        raises InvalidConfiguration if the metadata is older than the bookie has seen it (seen.py)."""
        self._trust = trust
        self._clock = clock
        self.metadata = metadata  # of the present session
        self._new_session = new_session
        self._own_session = False
        self._retry_s = retry_s
        self._record = record
        self._said: records.BookieRecord | None = None
        self._said_at = 0.0  # by the monotonic clock
        self._lost = False  # the session
        self._sessions_ended = 0

    async def check_no_other_process(self, world: World, bookie: UUID) -> None:
        """Raises Busy if another process serves as the bookie with this uuid now. Asks it at the registered endpoint
        and waits at most PING_TIMEOUT_S seconds. Must be called before this process changes anything in the data
        directory. Raises the errors of the metadata."""
        found = await get_record(self.metadata, paths.bookie(str(bookie)), records.BookieRecord)
        if found is None:
            return
        peer = world.network.connect_peer(Endpoint.parse(found[0].endpoint), bookie.bytes, PeerClientKeys(found[0].key))
        try:
            await peer.request(encode_ping_request(), timeout_s=PING_TIMEOUT_S)
        except Unauthorized as error:  # only a process with the registered key, or in clear as registered, says so
            _LOG.error("the process that is registered refuses this one: %s", error)
        except MagnetarError as error:
            _LOG.info("the process that was registered before does not answer: %s", error)
            return
        finally:
            await peer.close()
        raise Busy(
            f"bookie {bookie} is served already, at {found[0].endpoint}: by another process, on a copy of this "
            "directory or the directory itself. Stop that one; of two copies only one may ever start",
            bookie=str(bookie), endpoint=found[0].endpoint,
        )  # fmt: skip

    async def is_replaced_by_other_process(self) -> bool:
        """Returns whether the bookie's registration node in the metadata is now that of another process. Returns False
        if this process has not registered the bookie. Raises the errors of the metadata."""
        if self._said is None:
            return False
        found = await get_record(self.metadata, paths.bookie(self._said.bookie), records.BookieRecord)
        return found is not None and found[0].process not in ("", self._said.process)

    async def register(self) -> None:
        """Writes the ephemeral node that registers the bookie, in place of an older one. Raises InvalidConfiguration if
        an operator has deleted the bookie, or if the metadata is older than the bookie has seen it. Raises NewerFormat
        if the upgrade of the cluster was finished meanwhile, and this process is older. Raises Unavailable if the
        cookie record changes at each of COOKIE_ATTEMPTS_MAX attempts, the errors of the metadata, and OSError or
        NoFileDescriptor if the free space of the disk cannot be measured."""
        await self._trust(self.metadata)
        record = await self._record()
        path, cookie = paths.bookie(record.bookie), paths.cookie(record.bookie)
        put = (
            DeleteNode(path, ANY_VERSION),
            PutNode(path, records.encode_record(record, path), NODE_ABSENT, ephemeral=True),
        )
        for _ in range(COOKIE_ATTEMPTS_MAX):
            node = await self.metadata.get(cookie)
            if node is None:
                raise InvalidConfiguration(f"bookie {record.bookie} was forgotten: its directory never starts again")
            try:
                await self.metadata.commit([CheckNodeVersion(cookie, node.version), *put])
            except BadVersion:
                continue  # the cookie record has a new position of the journal
            self._said, self._said_at = record, self._clock.monotonic()
            self._lost = False
            await check_format_after_registration(self.metadata)
            return
        raise Unavailable(f"the cookie of bookie {record.bookie} changes all the time")

    @property
    def is_registered(self) -> bool:
        """Returns whether clients can find the bookie in the metadata, as far as this process knows."""
        return self._said is not None and not self._lost

    async def unregister(self) -> None:
        """Deletes the bookie's registration node, if this process has written one. Clients choose the bookie for no new
        ledger until it registers again. Raises the errors of the metadata."""
        if self._said is not None:
            with contextlib.suppress(NotFound):
                await self.metadata.delete(paths.bookie(self._said.bookie))
            self._said = None

    def is_record_current(
        self, *, read_only: bool, free_bytes: int, unwritable: tuple[int, ...] = (), failed: tuple[int, ...] = ()
    ) -> bool:
        """Returns whether the registered record has these values; False if the bookie is not registered. A change of
        the free bytes by at most `FREE_BYTES_DRIFT_SHARE` does not count until the record is older than
        `FREE_BYTES_RECORD_AGE_S`."""
        said = self._said
        if said is None or (said.read_only, said.unwritable, said.failed) != (read_only, unwritable, failed):
            return False
        is_old = self._clock.monotonic() - self._said_at >= FREE_BYTES_RECORD_AGE_S
        return abs(said.free_bytes - free_bytes) <= (0 if is_old else said.total_bytes * FREE_BYTES_DRIFT_SHARE)

    def statistics(self) -> dict[str, int]:
        return {"metadata_sessions_ended": self._sessions_ended}

    async def run(self) -> None:
        """Keeps the bookie registered until the task is cancelled: when the metadata session is lost, opens a new
        session and registers the bookie in it. Returns when the session is lost if there is no `new_session`."""
        while True:
            await self.metadata.wait_session_lost()
            self._lost = True
            self._sessions_ended += 1
            _LOG.warning("the metadata session is lost")
            if self._new_session is None:
                return
            await self._retry(self._renew)

    async def _renew(self) -> None:
        assert self._new_session is not None
        metadata = await self._new_session()
        if self._own_session:
            await self.metadata.close()
        self.metadata, self._own_session = metadata, True
        await self.register()
        _LOG.info("registered again")

    async def _retry(self, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await action()
            except (MagnetarError, OSError) as error:
                _LOG.warning("cannot register: %s", error)
                await asyncio.sleep(self._retry_s)

    async def close(self) -> None:
        """Deletes the bookie's registration node if the metadata can be reached, and closes the session that
        `new_session` opened. If the metadata cannot be reached, the node stays until the session expires; that is only
        logged."""
        try:
            if self._own_session:
                await self.metadata.close()
            elif self._said is not None:
                await self.metadata.delete(paths.bookie(self._said.bookie))
        except MagnetarError as error:
            _LOG.warning("the registration stays until the session ends: %s", error)


# ------------------------------------------------------------------------------------------------- journal_notes
# Tells the metadata up to where the journal is synced: a directory that ends before that was rolled back.
#
# A snapshot of a volume, or the asynchronous replica of a disk, is whole in itself and looks like the disk after a
# crash. Only the metadata can tell that the bookie has answered more (identity.py `judge`, boot.py: such a start is
# limbo). So the bookie's record has a position of the journal, which only grows:
#
#     at each start                 the end of what was replayed (identity.py `record_bookie_start`)
#     before the first answer       after a start: answers wait for this note, once; a copy of before the start is told
#     POSITION_WRITE_INTERVAL_S after a later answer
#                                   of what is synced by then, also of the next journal; nothing when nothing moved
#     at an orderly end             of all that was answered
#
# What it costs: no add waits for it but the first ones; one commit in POSITION_WRITE_INTERVAL_S while there are adds.
# What it does not see: a copy of less than POSITION_WRITE_INTERVAL_S before a crash, of the same start, which lacks
# entries that were answered since. Guarded by tests/bookie/test_journal_notes.py, test_identity.py.


POSITION_WRITE_INTERVAL_S = 1.0
"""Seconds between two writes of the journal position to the metadata. Each write is one commit, whatever the number of
adds."""
FINAL_WRITE_TIMEOUT_S = 2.0
"""The longest time, in seconds, for the last write of the journal position at an orderly stop: the metadata may have
stopped before."""


class JournalPositionRecorder:
    """Records in the metadata up to which position the bookie's journals (of `stores`) are synced, so that a start
    notices a directory that was rolled back. Until the first position of this process is stored, answers to clients
    wait (`defer_answer`). Then `on_first` is called, which must make later answers go out at once."""

    def __init__(
        self, stores: Sequence[Store], metadata: Callable[[], MetadataStore], mine: BookieIdentity,
        on_first: Callable[[], None],
    ) -> None:  # fmt: skip
        self._stores = stores
        self._metadata = metadata
        self._identity = mine
        self._on_first = on_first
        self._noted = (JournalPosition(0, 0),) * len(stores)
        self._held: list[Callable[[], None]] = []
        self._due = asyncio.Event()
        self._noting = asyncio.Lock()
        self.went_back = 0
        """How often the metadata was found to have lost a position that this process stored in it."""

    @property
    def noted(self) -> JournalPosition:
        """The latest position of the first journal that this process has stored in the metadata."""
        return self._noted[0]

    def defer_answer(self, answer: Callable[[], None]) -> None:
        """Queues the function `answer`, which sends answers to clients. The next successful `store_position` calls all
        queued functions, in order. The entries that `answer` confirms must already be synced."""
        self._held.append(answer)
        self._due.set()

    async def compare_stored_position(self) -> None:
        """Compares the position in the metadata with the one that this process stored, also if nothing has changed.
        Counts a loss in `went_back`. Raises the errors of the metadata."""
        await self.store_position(changed_only=False)

    async def store_position(self, *, changed_only: bool = True) -> None:
        """Stores the present journal position in the metadata if it has changed (`changed_only` False: in any case),
        then calls the functions that `defer_answer` has queued. Raises the errors of the metadata; then the functions
        stay queued.

        If the metadata has a smaller position than this process stored, counts that in `went_back`: the metadata was
        replaced by an older copy."""
        async with self._noting:
            positions = tuple(each.journal_position for each in self._stores)
            if positions != self._noted or not changed_only:
                kept = await identity.store_journal_position(self._metadata(), self._identity, positions, self._noted)
                if not kept:
                    self.went_back += 1
                    _LOG.error(
                        "the metadata lacks what this bookie stored in it: nothing is deleted until a restart, or "
                        "`magnetar bookies gc --now --force`"
                    )
                self._noted = positions
        if self._held:
            self._on_first()
            held, self._held = self._held, []
            for answer in held:
                answer()

    async def run(self) -> None:
        """Stores the journal position every POSITION_WRITE_INTERVAL_S seconds, and at once when answers wait for it,
        until the task is cancelled. Only logs errors of the metadata."""
        while True:
            try:
                async with asyncio.timeout(POSITION_WRITE_INTERVAL_S):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            try:
                await self.store_position()
            except MagnetarError as error:
                _LOG.warning("up to where the journal is synced is not noted: %s", error)

    async def close(self) -> None:
        """Stores the journal position a last time. Gives up after FINAL_WRITE_TIMEOUT_S seconds, or on an error of the
        metadata."""
        try:
            async with asyncio.timeout(FINAL_WRITE_TIMEOUT_S):
                await self.store_position()
        except (MagnetarError, TimeoutError) as error:
            _LOG.info("up to where the journal is synced is not noted at the end: %s", error or "no answer")


DEFAULT_FREE_BYTES_MIN = 256 << 20
FREE_BYTES_MIN_SHARE = 0.05
"""If no smallest number of free bytes is set, it is DEFAULT_FREE_BYTES_MIN, but at most this share of the disk."""
WRITABLE_AGAIN_FACTOR = 1.1
"""A full bookie takes adds again when its free space is above its smallest number of free bytes, times this factor.
With 1.0 the state could change at each check."""


class DiskState(enum.Enum):
    """The state of a disk of a bookie, from WRITABLE (enough room) to NO_ROOM (a write found the disk full) and FAILED.
    Its ledgers are read-only from FULL on."""

    WRITABLE = "writable"
    TIGHT = "tight"
    FULL = "full"
    NO_ROOM = "no room"
    FAILED = "failed"

    @property
    def is_read_only(self) -> bool:
        return self in (DiskState.FULL, DiskState.NO_ROOM, DiskState.FAILED)


class DiskLimits(NamedTuple):
    """The limits by which `decide_disk_state` decides: used shares of the disk (0 to 1), and a smallest number of free
    bytes. TIGHT: at least `warn_share` is used; FULL: at least `full_share` is used, or fewer than the smallest number
    of bytes are free. A full disk becomes writable below `low_water_share`."""

    full_share: float
    low_water_share: float
    warn_share: float
    free_bytes_min: int  # -1: not set

    def compute_free_bytes_min(self, total: int) -> int:
        """Returns the smallest number of free bytes for a disk of `total` bytes. With fewer free bytes the disk is
        FULL."""
        return (
            self.free_bytes_min
            if self.free_bytes_min >= 0
            else min(DEFAULT_FREE_BYTES_MIN, int(total * FREE_BYTES_MIN_SHARE))
        )


class DiskUsage(NamedTuple):
    """The size of a file system and its free space, in bytes."""

    total: int
    free: int

    @property
    def used_share(self) -> float:
        """The share of the disk that is used, from 0.0 to 1.0; 1.0 if `total` is 0."""
        return 1.0 - self.free / self.total if self.total else 1.0


def decide_disk_state(usage: DiskUsage, limits: DiskLimits, was: DiskState, *, no_room: bool) -> DiskState:
    """Returns the state of a disk with this usage, by these limits. `was`: its state before. `no_room`: the last write
    found the disk full, or the disk reserve is missing."""
    floor = limits.compute_free_bytes_min(usage.total) * (WRITABLE_AGAIN_FACTOR if was.is_read_only else 1.0)
    if no_room:
        return DiskState.NO_ROOM
    if usage.used_share >= limits.full_share or usage.free < floor:
        return DiskState.FULL
    if was.is_read_only and usage.used_share >= limits.low_water_share:
        return DiskState.FULL
    return DiskState.TIGHT if usage.used_share >= limits.warn_share else DiskState.WRITABLE


class DiskMonitor:
    """Checks a bookie's disk every `interval_s` seconds and keeps its `state`.

    Calls `on_read_only` after each check and each change of the state; its argument says whether the bookie is
    read-only. Calls `register`, which must write the bookie's registration if it is out of date. Also calls `note`
    after each check, so that the caller can compare other facts with the metadata. With several ledgers directories,
    each has a monitor of its disk."""

    def __init__(
        self, store: Store, register: Callable[[], Awaitable[None]], limits: DiskLimits, interval_s: float,
        on_read_only: Callable[[bool], None], note: Callable[[], Awaitable[None]] | None,
    ) -> None:  # fmt: skip
        self._store = store
        self._register = register
        self._limits = limits
        self._interval_s = interval_s
        self._on_read_only = on_read_only
        self._note = note
        self._asked = asyncio.Event()
        self.state = DiskState.WRITABLE
        self.usage = DiskUsage(0, 0)  # at the last check
        self.failures = 0  # of steps, by our own faults
        self.departing = False  # an operator empties the bookie: read-only, whatever the state of its disk

    @property
    def is_read_only(self) -> bool:
        """Returns whether adds of clients are refused: the bookie is departing, or the disk is FULL or worse."""
        return self.departing or self.state.is_read_only

    def set_bookie_departing(self, departing: bool) -> None:
        """Sets whether the bookie is departing (an operator has ordered to move all copies off it). A departing bookie
        is read-only."""
        if departing is not self.departing:
            how = "departing: it takes no new ledgers" if departing else "not departing any more"
            _LOG.warning("the bookie is %s", how)
        self.departing = departing
        self._on_read_only(self.is_read_only)

    def on_no_space(self) -> None:
        """Called when a write found the disk full: makes the bookie refuse the adds of clients at once, and requests a
        check of the disk."""
        self._become(DiskState.NO_ROOM)
        self.request_check()

    def on_failed(self) -> None:
        """Called when the disk has failed: no add is taken any more, and the registration says so."""
        self._become(DiskState.FAILED)
        self.request_check()

    def request_check(self) -> None:
        """Makes `run` check the disk and the registration now instead of at the end of the interval."""
        self._asked.set()

    async def check_disk(self) -> None:
        """Checks the disk and sets `state` and `usage`. First, if there may be room again, repeats the write that found
        the disk full, and fills the disk reserve. Raises OSError or NoFileDescriptor if the disk cannot be checked
        now."""
        if self._store.failure is not None:
            self._become(DiskState.FAILED)
            return
        limits = self._limits
        limit = limits.low_water_share if self.state.is_read_only else limits.full_share
        try:
            no_room = not await self._store.room.ensure_room(limit)
            usage = self.usage = DiskUsage(*await self._store.room.measure_disk())
        except OSError as error:
            self._store.note_disk_error(error)
            raise
        self._become(decide_disk_state(usage, limits, self.state, no_room=no_room), usage)

    def _become(self, state: DiskState, usage: DiskUsage | None = None) -> None:
        if self.state is DiskState.FAILED:
            return
        if state is DiskState.FAILED:
            _LOG.error("%s failed, its ledgers are not written any more: %s", self._store.directory,
            self._store.failure)
        elif state is not self.state:
            free = "" if usage is None else f", {usage.free} of {usage.total} bytes are free{self._floor_told(usage)}"
            level = logging.INFO if state is DiskState.WRITABLE else logging.WARNING
            _LOG.log(level, "the disk is %s, was %s%s", state.value, self.state.value, free)
        self.state = state
        self._on_read_only(self.is_read_only)

    def _floor_told(self, usage: DiskUsage) -> str:
        """Returns a text for the log if the disk has fewer free bytes than its limit; otherwise ""."""
        floor = self._limits.compute_free_bytes_min(usage.total)
        if usage.free >= floor:
            return ""
        why = "free_bytes_min" if self._limits.free_bytes_min >= 0 else "the least where free_bytes_min is not set"
        never = "; the disk is smaller: the bookie is never writable" if floor > usage.total else ""
        return f", fewer than the {floor} of {why}: read-only{never}"

    async def run(self) -> None:
        """Checks the disk, and writes the bookie's registration if it is out of date, at each interval and after
        `request_check`, until the task is cancelled. Logs errors and goes on."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            for step in (self.check_disk, *((self._note,) if self._note is not None else ()), self._register):
                try:
                    await step()
                except (MagnetarError, OSError, NoSpace) as error:
                    _LOG.warning("the disk cannot be checked, or the registration not changed: %s", error)
                except Exception:  # the disk is checked even when the other steps fail
                    self.failures += 1
                    _LOG.exception("a step of the disk monitor failed, the others run")
