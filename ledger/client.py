"""LedgerClient: the door to ledgers. One per process; shares the bookie table and the connections among its handles.

    create   none → OPEN, on a fresh ensemble; the only writer is the handle that comes back
    open     reads what is certainly stored, never fences: the writer goes on
    recover  fences the writer, gives the ledger its end, CLOSED for ever (ledger protocol §1.8)
    delete   removes the record; bookies free the space later. Nothing may reference the ledger durably any more (§1.11)

Ledger ids come in blocks from a counter in the metadata, larger ones while many ledgers are made, and are never used
twice; a retried create whose first outcome was unknown recognises its own record by a random token (§1.1). The key
(20 random bytes) lets nobody else write or fence.
Guards: tests/ledger/test_ledger.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping

from ..metadata import paths
from ..metadata.records import LedgerRecord, decode, encode
from ..metadata.store import MetadataStore, Versioned
from ..metadata.update import take_ids, update
from ..runtime.world import World
from . import records, recovery
from .bookies import Bookies
from .config import LedgerConfig
from .core.metadata import RecordWrite, create, new_record
from .core.placement import Shrink, fit
from .core.striping import Striping
from .format.peer import KEY_BYTES
from .handle import LedgerEnd, LedgerWriter
from .reader import LedgerReader

_LOG = logging.getLogger("magnetar.ledger")

IDS_LAST_S, IDS_MAX = 1.0, 1024
"""Blocks of ids grow up to IDS_MAX while one lasts for less than IDS_LAST_S: who makes hundreds of ledgers a second
would else wait for the counter half of the time. What is left of a block at a stop is lost, of 2^63."""
WRITERS_MIN = 16
"""So many that ended are remembered without a look: one at each create would be a look at all that are open."""

__all__ = ["LedgerClient", "LedgerEnd"]


class LedgerClient:
    def __init__(self, world: World, metadata: MetadataStore, config: LedgerConfig | None = None) -> None:
        self._world = world
        self._metadata = metadata
        self._config = config if config is not None else LedgerConfig()
        self._bookies = Bookies(world, metadata, self._config)
        self._ids: deque[int] = deque()
        self._block = 0  # ids that were taken last, and when
        self._taken_at = 0.0
        self._taking = asyncio.Lock()
        self._writers: dict[int, LedgerWriter] = {}  # that are open, and at most as many that ended
        self._looked_at = 0  # how many were open when those that ended were left out last

    async def create(
        self, *, ensemble_size: int | None = None, write_quorum: int | None = None, ack_quorum: int | None = None,
        properties: Mapping[str, str] | None = None, shrink: Shrink = Shrink.NOTHING, above: int = -1,
    ) -> LedgerWriter:  # fmt: skip
        """A new ledger on bookies that are there, with an id above that one (which was taken from the same counter).
        InvalidConfiguration, NotEnoughBookies, or the metadata's errors.

        `shrink`: what it may have less of where fewer bookies are well than the ensemble needs; never less than the ack
        quorum, so what is confirmed has as many synced copies as ever (core/placement.py `fit`). Its record shows it.
        """
        config = self._config
        striping = Striping(
            config.ensemble_size if ensemble_size is None else ensemble_size,
            config.write_quorum if write_quorum is None else write_quorum,
            config.ack_quorum if ack_quorum is None else ack_quorum,
        )
        await self._bookies.ready()
        if shrink is not Shrink.NOTHING:
            striping = await self._fit(striping, shrink)
        rng = self._world.rng
        record: LedgerRecord | None = None
        while record is None:
            record = await self._store_new(
                new_record(
                    await self._next_id(above), striping,
                    await self._bookies.choose_now(striping.ensemble_size, write_quorum=striping.write_quorum),
                    key=rng.randbytes(KEY_BYTES), token=rng.randbytes(16).hex(),
                    created_ms=self._world.clock.wall_ms(), properties=properties or {},
                )
            )  # fmt: skip
        writer = LedgerWriter(record, self._bookies, self._metadata, config)
        self._remember(writer)
        return writer

    def _remember(self, writer: LedgerWriter) -> None:
        if len(self._writers) > 2 * self._looked_at + WRITERS_MIN:
            self._writers = {ledger: open_ for ledger, open_ in self._writers.items() if open_.writable}
            self._looked_at = len(self._writers)
        self._writers[writer.ledger_id] = writer

    async def _fit(self, wanted: Striping, shrink: Shrink) -> Striping:
        well = await self._bookies.count_well(wanted.ensemble_size)
        fitting = fit(wanted, well, shrink)
        if fitting is not wanted:
            _LOG.warning(
                "%d of %d bookies are well: a ledger is made over those, with %d of %d copies",
                well, wanted.ensemble_size, fitting.write_quorum, wanted.write_quorum,
            )  # fmt: skip
        return fitting

    async def open(self, ledger_id: int) -> LedgerReader:
        """CLOSED: to its end; else up to the largest LAC that a bookie reports. LedgerNotFound, Unavailable."""
        await self._bookies.ready()
        reader = LedgerReader(await self.record(ledger_id), self._bookies, self._metadata, self._config)
        await reader.refresh()
        return reader

    @property
    def bookies(self) -> Bookies:
        return self._bookies

    def reader(self, record: LedgerRecord) -> LedgerReader:
        """Reads what the record says is settled; asks nobody to find out."""
        return LedgerReader(record, self._bookies, self._metadata, self._config)

    def reader_of(self, writer: LedgerWriter) -> LedgerReader:
        """Reads beside the writer in this process, up to its LAC at any time; asks nobody to find out."""
        reader = LedgerReader(
            writer.record, self._bookies, self._metadata, self._config, confirmed=lambda: writer.last_confirmed
        )
        writer.on_changed(reader.learn)
        return reader

    async def recover(self, ledger_id: int) -> LedgerReader:
        """Fences the writer, wherever it is, and closes the ledger; every confirmed entry is in it.

        LedgerNotFound; Unavailable, NotEnoughBookies: too few bookies answer, the ledger stays IN_RECOVERY, try again.
        """
        await self._bookies.ready()
        record = await recovery.recover(ledger_id, self._bookies, self._metadata, self._config)
        return LedgerReader(record, self._bookies, self._metadata, self._config)

    async def record(self, ledger_id: int) -> LedgerRecord:
        return await records.read(self._metadata, ledger_id)

    async def delete(self, ledger_id: int) -> None:
        """Idempotent. A metadata error means unknown: delete again."""
        await self._metadata.delete(paths.ledger(ledger_id))

    def statistics(self) -> dict[str, dict[str, int]]:
        """By bookie: those of the connection to it."""
        return self._bookies.statistics()

    async def close(self) -> None:
        """Abandons writers that were not closed (their ledgers stay open for a recoverer) and ends the connections."""
        for writer in self._writers.values():
            await writer.abandon()
        await self._bookies.close()

    # ------------------------------------------------------------------------------ creating
    async def _next_id(self, above: int) -> int:
        """Above what any bookie fences for ever: an id of a block that was taken before might be refused."""
        while True:
            while self._ids and self._ids[0] <= max(above, self._bookies.fenced_upto):
                self._ids.popleft()
            if self._ids:
                return self._ids.popleft()
            async with self._taking:
                if not self._ids:
                    self._ids.extend(await self._take_ids())

    async def _take_ids(self) -> range:
        """Twice as many as last time, while that many last for less than IDS_LAST_S."""
        now, least = self._world.clock.monotonic(), self._config.ids_block
        soon = now - self._taken_at < IDS_LAST_S
        self._block, self._taken_at = min(2 * self._block, max(least, IDS_MAX)) if soon and self._block else least, now
        return await take_ids(self._metadata, self._block)

    async def _store_new(self, mine: LedgerRecord) -> LedgerRecord | None:
        """The stored record; None when the id belongs to another process."""
        path = paths.ledger(mine.ledger_id)
        taken = False

        def transform(node: Versioned | None) -> bytes | None:
            nonlocal taken
            answer = create(decode(node.value, LedgerRecord, path) if node is not None else None, mine)
            taken = answer is None
            return encode(answer.record) if isinstance(answer, RecordWrite) else None

        await update(self._metadata, path, transform, absent=True)
        return None if taken else mine
