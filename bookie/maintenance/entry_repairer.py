"""Repair of quarantined entries: gets a good copy of each from the other bookies (ledger protocol §2.6).

The scrubber, compaction and a start quarantine entries, and call `found`. (Compaction deletes the log with the bad
record, so that no scrubber finds it again.) `found` reports the entries to the metadata at once and wakes `keep`.
`keep` restores each ledger that has quarantined entries (bookie/maintenance/restore.py; it leaves an open ledger to its
writer), and makes a checkpoint, which ends the quarantine and with it the report. What could not be repaired is tried
again after PAUSE_S, then after twice as long each time, up to PAUSE_MAX_S, because each try reads the ledger.
Guarded by tests/bookie/maintenance/test_entry_repairer.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...ledger.client import LedgerClient
from ...metadata.store import MetadataStore
from ...proto.errors import MagnetarError
from ...runtime.world import World
from ..store.disk import NoSpace
from ..store.store import Store
from .restore import Restorer

_LOG = logging.getLogger("magnetar.bookie.maintenance")

PAUSE_S = 60.0
PAUSE_MAX_S = 3600.0


class EntryRepairer:
    """Calls `report` when there is something new for the metadata; `metadata` returns the present session."""

    def __init__(
        self, world: World, store: Store, bookie: str, metadata: Callable[[], MetadataStore],
        report: Callable[[], None],
    ) -> None:  # fmt: skip
        self._world = world
        self._store = store
        self._bookie = bookie
        self._metadata = metadata
        self._report = report
        self._asked = asyncio.Event()

    def found(self) -> None:
        """Starts a repair: entries were quarantined just now."""
        self._report()
        self._asked.set()

    async def keep(self) -> None:
        """Repairs entries for ever."""
        pause_s = PAUSE_S
        while True:
            try:
                left = await self._pass()
            except (MagnetarError, ValueError, OSError, NoSpace) as error:
                _LOG.warning("damaged entries are not repaired yet: %s", error)
                left = 1
            try:
                async with asyncio.timeout(pause_s if left else None):
                    await self._asked.wait()
                pause_s = PAUSE_S
            except TimeoutError:
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            self._asked.clear()

    async def _pass(self) -> int:
        """The number of ledgers that are still damaged."""
        ledgers = sorted({found.ledger for found in self._store.descriptors.quarantined()})
        left = 0
        for ledger in ledgers:
            left += not await self.mend(ledger)
        if left < len(ledgers):
            await self._store.checkpoint()
            self._report()
        return left

    async def mend(self, ledger: int) -> bool:
        """Whether the ledger is whole here, as far as it is closed and the other bookies have it."""
        metadata = self._metadata()
        client = LedgerClient(self._world, metadata)
        try:
            reason = await Restorer(self._store, self._bookie, metadata, client).restore(ledger, recover=False)
        finally:
            await client.close()
        if reason is not None:
            _LOG.warning("the damage is not repaired yet: %s", reason)
        return reason is None
