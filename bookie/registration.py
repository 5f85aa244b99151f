"""Registration of a bookie: an ephemeral node `paths.bookie(uuid)` with its endpoint and whether it takes adds.

The bookie writes the node when it begins to serve, when it becomes read-only or writable, when its free disk has
changed by `FREE_DRIFT`, or at all within `FREE_AGE_S`, and again after its session was lost. It always replaces the
node of a former process, so that the node belongs to this session. It registers only while its cookie record exists: a
bookie that was forgotten while it started, or had no session, does not return. A bookie that is not registered still
serves the brokers that know it.

*One process of a uuid.* For the metadata a copy of a directory at the same place is the same bookie: two processes
would answer for one uuid, and neither has the entries of the other. So a start first asks at the registered endpoint
(`check_only_process`). If a process answers as this bookie, the start is refused (Busy). A process that does not answer
is replaced. If it still runs, it finds another `process` in the node at its next check of the disk (`is_replaced`),
and ends at once.
Guarded by tests/bookie/test_service.py and tests/bookie/test_registration.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from uuid import UUID

from ..ledger.peer_format import encode_ping
from ..metadata import paths, records
from ..metadata.store import ABSENT, ANY, Check, Delete, MetadataStore, Put, get_record
from ..proto.errors import BadVersion, Busy, InvalidConfiguration, MagnetarError, NotFound, Unauthorized, Unavailable
from ..runtime.clock import Clock
from ..runtime.network import Endpoint, World
from ..runtime.peer.keys import PeerClientKeys
from .store import identity
from .store.identity import BookieIdentity
from .store.journal.replay import JournalPosition
from .store.store import Store

_LOG = logging.getLogger("magnetar.bookie.node")

ALIVE_S = 2.0
"""Seconds to wait for an answer of the process that is registered already."""

ATTEMPTS_MAX = 10
FREE_DRIFT = 0.05
"""Share of the whole disk: when the free space has changed by so much, the bookie registers again."""
FREE_AGE_S = 60.0
"""Seconds after which operators see the new free space: one commit a minute of a bookie that is written to."""

NewSession = Callable[[], Awaitable[MetadataStore]]


class Registration:
    """The registration of a bookie in the metadata. The caller must close `metadata`. When that session is lost,
    `new_session` opens another one; without `new_session` the bookie then stays unregistered.
    """

    def __init__(
        self, metadata: MetadataStore, new_session: NewSession | None, retry_s: float,
        record: Callable[[], Awaitable[records.BookieRecord]],
        trust: Callable[[MetadataStore], Awaitable[None]], clock: Clock,
    ) -> None:  # fmt: skip
        """Creates the object and registers nothing yet. `trust` raises if the metadata is older than what the bookie
        has seen of it (seen.py).
        """
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

    async def check_only_process(self, world: World, bookie: UUID) -> None:
        """Raises Busy if another process already serves as this bookie. Must be called before the process changes
        anything in the directory."""
        found = await get_record(self.metadata, paths.bookie(str(bookie)), records.BookieRecord)
        if found is None:
            return
        peer = world.network.peer(Endpoint.parse(found[0].endpoint), bookie.bytes, PeerClientKeys(found[0].key))
        try:
            await peer.request(encode_ping(), timeout_s=ALIVE_S)
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

    async def is_replaced(self) -> bool:
        """Returns whether another process has replaced this process's node by its own."""
        if self._said is None:
            return False
        found = await get_record(self.metadata, paths.bookie(self._said.bookie), records.BookieRecord)
        return found is not None and found[0].process not in ("", self._said.process)

    async def register(self) -> None:
        """Writes the node that registers the bookie. Raises InvalidConfiguration if the bookie's cookie record was
        deleted, or the metadata is older than what the bookie has seen of it.
        """
        await self._trust(self.metadata)
        record = await self._record()
        path, cookie = paths.bookie(record.bookie), paths.cookie(record.bookie)
        put = (Delete(path, ANY), Put(path, records.encode(record, path), ABSENT, ephemeral=True))
        for _ in range(ATTEMPTS_MAX):
            node = await self.metadata.get(cookie)
            if node is None:
                raise InvalidConfiguration(f"bookie {record.bookie} was forgotten: its directory never starts again")
            try:
                await self.metadata.commit([Check(cookie, node.version), *put])
            except BadVersion:
                continue  # the cookie record has a new position of the journal
            self._said, self._said_at = record, self._clock.monotonic()
            self._lost = False
            return
        raise Unavailable(f"the cookie of bookie {record.bookie} changes all the time")

    @property
    def is_registered(self) -> bool:
        """Returns whether clients find the bookie in the metadata, as far as it knows."""
        return self._said is not None and not self._lost

    async def unregister(self) -> None:
        """Deletes the registration: no client chooses the bookie for a new ledger until it registers again."""
        if self._said is not None:
            with contextlib.suppress(NotFound):
                await self.metadata.delete(paths.bookie(self._said.bookie))
            self._said = None

    def is_current(self, *, read_only: bool, free_bytes: int) -> bool:
        """Returns True if the registered node already has these values. The free bytes, by which bookies are chosen,
        may differ by `FREE_DRIFT` until the node is older than `FREE_AGE_S`."""
        said = self._said
        if said is None or said.read_only != read_only:
            return False
        is_old = self._clock.monotonic() - self._said_at >= FREE_AGE_S
        return abs(said.free_bytes - free_bytes) <= (0 if is_old else said.total_bytes * FREE_DRIFT)

    def statistics(self) -> dict[str, int]:
        return {"metadata_sessions_ended": self._sessions_ended}

    async def run(self) -> None:
        """Keeps the bookie registered until cancelled: when the metadata session is lost, registers again in a new one.
        Returns if there is no `new_session`.
        """
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
        """Deletes the node if the metadata can be reached."""
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
#     at each start                 the end of what was replayed (identity.py `record_start`)
#     before the first answer       after a start: answers wait for this note, once; a copy of before the start is told
#     NOTE_S after a later answer   of what is synced by then, also of the next journal; nothing when nothing moved
#     at an orderly end             of all that was answered
#
# What it costs: no add waits for it but the first ones; one commit in NOTE_S while there are adds. What it does not
# see: a copy of less than NOTE_S before a crash, of the same start, which lacks entries that were answered since.
# Guarded by tests/bookie/test_journal_notes.py, test_identity.py.


NOTE_S = 1.0
"""Seconds. Each note is one commit of the metadata, for all of its adds."""
END_S = 2.0
"""Seconds for the note at an orderly end: the metadata may be gone before the bookie."""


class PositionRecorder:
    """Stores in the metadata the position up to which the bookie's journal is synced. Until it is first stored, answers
    to clients wait (`defer_answer`); `on_first` is called when answers need not wait any more.
    """

    def __init__(
        self, store: Store, metadata: Callable[[], MetadataStore], mine: BookieIdentity, on_first: Callable[[], None]
    ) -> None:
        self._store = store
        self._metadata = metadata
        self._identity = mine
        self._on_first = on_first
        self.noted = JournalPosition(0, 0)
        """Position up to which the metadata knows that the journal is synced, from this process."""
        self._held: list[Callable[[], None]] = []
        self._due = asyncio.Event()
        self._noting = asyncio.Lock()
        self.went_back = False
        """The metadata forgot what this process stored in it."""

    def defer_answer(self, answer: Callable[[], None]) -> None:
        """Calls `answer` after the next successful `store_position`, in the order of these calls. The entries that
        `answer` confirms must be synced.
        """
        self._held.append(answer)
        self._due.set()

    async def store_position(self) -> None:
        """Stores the position if it changed, then calls the deferred answers. Raises the metadata's errors, and then
        has changed nothing.
        """
        async with self._noting:
            position = self._store.journal_position
            if position != self.noted:
                kept = await identity.store_journal_position(self._metadata(), self._identity, position, self.noted)
                if not kept:
                    _LOG.error("the metadata lacks what this bookie stored in it: nothing is deleted until a restart")
                self.went_back = self.went_back or not kept
                self.noted = position
        if self._held:
            self._on_first()
            held, self._held = self._held, []
            for answer in held:
                answer()

    async def run(self) -> None:
        """Stores the position periodically, and at once when answers wait, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(NOTE_S):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            try:
                await self.store_position()
            except MagnetarError as error:
                _LOG.warning("up to where the journal is synced is not noted: %s", error)

    async def close(self) -> None:
        """Stores the position a last time, if the metadata answers in time."""
        try:
            async with asyncio.timeout(END_S):
                await self.store_position()
        except (MagnetarError, TimeoutError) as error:
            _LOG.info("up to where the journal is synced is not noted at the end: %s", error or "no answer")
