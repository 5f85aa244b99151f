"""The bookies as a ledger client sees them: who is there, how to reach each, and whom to choose for an ensemble.

One watch on `/bookies/available` keeps the table; a bookie that leaves it keeps its last endpoint, because ledgers on
it may still be readable. One peer connection per bookie and endpoint: a bookie that registers elsewhere gets a new
one, and the old one is closed. A bookie is its uuid, never its address: the transport checks it (BookKeeper protocol
§1.5, #4812).

**Choice**: writable bookies in random order, distinct racks first; those that failed within `quarantine_s` only when
the others do not suffice. Never the same bookie twice, never one in `exclude`.
Guards: tests/bookie/ledger/test_ledger.py, test_bookies.py.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Iterable, Sequence

from ...metadata import paths
from ...metadata.records import BookieRecord, decode
from ...metadata.store import MetadataStore, Reset
from ...proto.errors import BackPressure, MagnetarError, NotEnoughBookies, Unavailable
from ...runtime.files import Buffer
from ...runtime.network import Endpoint, Peer, Reply
from ...runtime.world import World
from ..format.peer import AnswerHead, Status, decode_answer
from .config import LedgerConfig
from .core.trouble import Kind, Trouble
from .damage import DamageReports

log = logging.getLogger(__name__)


class Bookies:
    def __init__(self, world: World, metadata: MetadataStore, config: LedgerConfig) -> None:
        self._world = world
        self._metadata = metadata
        self._config = config
        self._available: dict[str, BookieRecord] = {}
        self._peers: dict[str, Peer] = {}
        self._failed_at: dict[str, float] = {}
        self._trouble = Trouble(config.quarantine_s)
        self.damage = DamageReports(metadata)
        self._closed = False
        self._listed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._closing: dict[asyncio.Task[None], None] = {}  # a set in order

    async def ready(self) -> None:
        """After the first listing. Raises what ended the table's upkeep: SessionExpired, or Unavailable once closed."""
        if self._closed:
            raise Unavailable("this ledger client is closed")
        if self._follower is None:
            self._follower = asyncio.get_running_loop().create_task(self._follow())
            self._follower.add_done_callback(lambda _: self._listed.set())
        await self._listed.wait()
        if self._follower.done() and not self._follower.cancelled():
            self._follower.result()

    # ------------------------------------------------------------------------------ reaching
    def request(
        self, bookie: str, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float
    ) -> asyncio.Future[Reply]:
        """Never raises; see `Peer.request`. A bookie that never registered is Unavailable."""
        peer = self._peers.get(bookie)
        if peer is not None:
            return peer.request(head, frames, timeout_s=timeout_s)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        future.set_exception(Unavailable(f"bookie {bookie} is not registered", bookie=bookie))
        return future

    async def ask(
        self, bookie: str, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float
    ) -> tuple[AnswerHead, Sequence[Buffer]] | None:
        """The answer; None when none comes in time, or what comes is not one: no news, whatever the question.

        A busy bookie did nothing and is asked again as long as there is time.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while True:
            try:
                reply = await self.request(bookie, head, frames, timeout_s=max(deadline - clock(), 0.0))
                answer = decode_answer(reply.head)
                if answer.status is not Status.BUSY:
                    return answer, reply.frames
            except BackPressure:
                log.debug("the queue to bookie %s is full", bookie)
            except (MagnetarError, ValueError) as error:
                log.debug("no answer from bookie %s: %s", bookie, error)
                return None
            if clock() + self._config.retry_s >= deadline:
                return None
            await asyncio.sleep(self._config.retry_s)

    def failed(self, bookie: str) -> None:
        """The bookie failed just now: it is chosen, and asked, last for a while."""
        self._failed_at[bookie] = self._world.clock.monotonic()
        self.note(bookie, Kind.FAILED)

    def note(self, bookie: str, kind: Kind) -> None:
        """It gave trouble to a reader: it is asked last for a while (core/trouble.py)."""
        self._trouble.note(bookie, kind, self._world.clock.monotonic())

    def gave_damage(self, bookie: str, ledger: int, entry: int) -> None:
        """Bytes that are not the entry: it is asked last for a while, and the metadata is told (damage.py)."""
        log.error("ledger %d, entry %d: wrong bytes from bookie %s", ledger, entry, bookie)
        self.note(bookie, Kind.DAMAGED)
        self.damage.note(ledger, bookie, entry)

    def troubled(self) -> dict[str, float]:
        """By bookie how much trouble it gave lately."""
        return self._trouble.weights(self._world.clock.monotonic())

    def is_quarantined(self, bookie: str) -> bool:
        at = self._failed_at.get(bookie)
        if at is None:
            return False
        if self._world.clock.monotonic() - at < self._config.quarantine_s:
            return True
        del self._failed_at[bookie]
        return False

    def quarantined(self) -> frozenset[str]:
        return frozenset(bookie for bookie in list(self._failed_at) if self.is_quarantined(bookie))

    # ------------------------------------------------------------------------------ choosing
    async def count_well(self, wanted: int) -> int:
        """Writable bookies that did not fail lately; looks at the metadata again before it says fewer than wanted."""
        if self._well() < wanted:
            await self._list()
        return self._well()

    def _well(self) -> int:
        return sum(not each.read_only and not self.is_quarantined(name) for name, each in self._available.items())

    async def choose_now(self, count: int) -> list[str]:
        """`choose`; when that is not enough, after a look at the metadata, for the watch may be behind."""
        try:
            return self.choose(count)
        except NotEnoughBookies:
            await self._list()
            return self.choose(count)

    def choose(self, count: int, exclude: Collection[str] = ()) -> list[str]:
        """`count` distinct writable bookies, or NotEnoughBookies with `wanted` and `available`."""
        writable = [b for b in sorted(self._available) if not self._available[b].read_only and b not in exclude]
        self._world.rng.shuffle(writable)
        writable.sort(key=self.is_quarantined)  # stable: keeps the random order inside both groups
        if len(writable) < count:
            raise NotEnoughBookies(
                f"{count} writable bookies are needed, {len(writable)} are there", wanted=count, available=len(writable)
            )
        healthy = sum(not self.is_quarantined(bookie) for bookie in writable)
        pool = writable[: max(healthy, count)]
        racks: set[str] = set()
        first: list[str] = []
        rest: list[str] = []
        for bookie in pool:
            rack = self._available[bookie].rack
            (rest if rack in racks else first).append(bookie)
            racks.add(rack)
        return (first + rest)[:count]

    @property
    def fenced_upto(self) -> int:
        """Some bookie refuses adds to ledgers up to this id: it lost data once (BookieRecord)."""
        return max((record.fenced_upto for record in self._available.values()), default=-1)

    # ------------------------------------------------------------------------------ the table
    async def _follow(self) -> None:
        while True:
            try:
                revision = await self._metadata.revision()
                await self._list()
                self._listed.set()
                async for change in self._metadata.watch(paths.BOOKIES, revision):
                    if isinstance(change, Reset):
                        break
                    await self._refresh(change.path.rpartition("/")[2])
            except MagnetarError as error:
                if not error.retryable:
                    raise
                log.warning("the watch on bookies broke, listing again: %s", error)
                await asyncio.sleep(self._config.retry_s)

    async def look_again(self) -> None:
        """Lists the bookies now, for the watch may be behind; many who ask at once share one listing."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._list())
            self._looking.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody waits
        await asyncio.shield(self._looking)

    async def _list(self) -> None:
        names = await self._metadata.children(paths.BOOKIES)
        for gone in sorted(set(self._available) - set(names)):
            del self._available[gone]
        for name in names:
            await self._refresh(name)

    async def _refresh(self, bookie: str) -> None:
        path = paths.bookie(bookie)
        async with self._refreshing:  # what was read first is taken over first
            node = await self._metadata.get(path)
            self._available.pop(bookie, None)
            if node is not None:
                try:
                    self._learn(bookie, decode(node.value, BookieRecord, path))
                except ValueError as error:  # a damaged record, uuid or endpoint: this bookie only is not used
                    log.error("bookie %s is not used, its registration is wrong: %s", bookie, error)

    def _learn(self, bookie: str, record: BookieRecord) -> None:
        endpoint = Endpoint.parse(record.endpoint)
        peer = self._peers.get(bookie)
        if peer is None or peer.endpoint != endpoint:
            self._peers[bookie] = self._world.network.peer(endpoint, uuid.UUID(bookie).bytes)
            self._failed_at.pop(bookie, None)  # it has started anew
            self._trouble.forgive(bookie)
            if peer is not None:
                task = asyncio.get_running_loop().create_task(peer.close())
                self._closing[task] = None
                task.add_done_callback(lambda done: self._closing.pop(done, None))
        self._available[bookie] = record

    def statistics(self) -> dict[str, dict[str, int]]:
        """By bookie: those of the connection to it, and its trouble (`reads_slow`, …: core/trouble.py)."""
        return {
            bookie: {**peer.statistics(), **{f"reads_{kind.value}": count for kind, count in self._counts(bookie)}}
            for bookie, peer in self._peers.items()
        }

    def _counts(self, bookie: str) -> Iterable[tuple[Kind, int]]:
        return self._trouble.counts.get(bookie, {}).items()

    async def close(self) -> None:
        self._closed = True
        for task in (self._follower, self._looking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.damage.close()
        await asyncio.gather(*list(self._closing))
        for peer in list(self._peers.values()):
            await peer.close()
        self._peers.clear()
