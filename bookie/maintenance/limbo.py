"""Limbo: a bookie that lost data serves what it has, answers UNKNOWN for what it lacks, and restores it (§2.7).

A start enters limbo (store/boot.py): `limbo_upto` is the largest ledger id that was ever given out, durable before the
bookie serves. Ledgers up to `limbo_upto` are fenced here for ever, because a fence may be among the lost data. A miss
of theirs is UNKNOWN and therefore no vote to end a ledger (invariants 11, 17), and so is their LAC. Later ledgers are
not concerned: the registration has `limbo` and `fenced_upto`, new ledgers get larger ids, and may be placed here.

`LimboRestorer.run` leaves limbo. It makes passes. A pass restores every ledger up to `limbo_upto`
(bookie/maintenance/restore.py), `PARALLEL` at a time. When all are whole, the bookie leaves limbo, durably with a
checkpoint, and registers that. Otherwise the next pass begins after `limbo_pause_s`, with the ledgers that remain. Each
pass logs once what blocks it. Bookies that are away return; a ledger whose only copy was here does not. Then an
operator restores the directory, or gives the entries up: `accept_loss` leaves limbo and names each ledger concerned.
Guarded by tests/bookie/maintenance/test_limbo.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...ledger.client import LedgerClient
from ...metadata import paths
from ...metadata.records import CounterRecord
from ...metadata.store import MetadataStore, get_record, parse_ledger_ids
from ...proto.errors import InvalidRequest, MagnetarError
from ...runtime.network import World
from ...runtime.tasks import run_together
from ..store.disk import NoSpace
from ..store.store import Store
from .restore import LimboEntryRestorer

_LOG = logging.getLogger("magnetar.bookie.maintenance")

PARALLEL = 8
"""Ledgers that are restored at a time; each holds two reads in memory."""
REASONS_LOGGED_MAX = 10


async def largest_allocated_ledger(metadata: MetadataStore) -> int:
    """Returns the largest ledger id that any client may have allocated, -1 if none. All ids of a block that a client
    reserved count.
    """
    counter = await get_record(metadata, paths.LEDGER_IDS, CounterRecord)
    listed = parse_ledger_ids(paths.LEDGERS, await metadata.children(paths.LEDGERS))
    return max(-1 if counter is None else counter[0].next - 1, max(listed, default=-1))


class LimboRestorer:
    """Ends the limbo of one bookie: restores the lost data. Calls `left` once, when that is done. `metadata` returns
    the current metadata session.
    """

    def __init__(
        self, world: World, store: Store, bookie: str, metadata: Callable[[], MetadataStore], pause_s: float,
        left: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._world = world
        self._store = store
        self._bookie = bookie
        self._metadata = metadata
        self._pause_s = pause_s
        self._left = left
        self._entered = self.limbo_upto >= 0
        self._one_pass = asyncio.Lock()
        self.blocked: dict[int, str] = {}  # ledgers that the last pass could not restore, and why
        self.counters = {
            "limbo_passes": 0, "limbo_ledgers": 0, "limbo_ledgers_done": 0, "limbo_restored_entries": 0,
            "limbo_restored_bytes": 0, "limbo_recovered_ledgers": 0,
        }  # fmt: skip

    @property
    def limbo_upto(self) -> int:
        """Returns the largest ledger id that the limbo concerns; -1: the bookie is not in limbo."""
        return self._store.descriptors.limbo_upto

    async def run(self) -> None:
        """Restores lost data, pass by pass, until the bookie has left limbo and is registered without limbo. Returns at
        once if it is not in limbo.
        """
        while self._entered:
            try:
                async with self._one_pass:
                    if self.limbo_upto >= 0 and await self._pass():
                        await self._leave()
                    if self.limbo_upto < 0:
                        await self._left()
                        return
            except (MagnetarError, ValueError, OSError, NoSpace) as error:
                _LOG.warning("limbo: this pass failed, the next one continues: %s", error)
            await asyncio.sleep(self._pause_s)

    async def accept_loss(self) -> dict[int, str]:
        """Leaves limbo without the missing data, because an operator decided so. Returns for each incomplete ledger
        what it lacks.

        Raises InvalidRequest if the bookie is not in limbo.
        """
        async with self._one_pass:
            if self.limbo_upto < 0:
                raise InvalidRequest("the bookie is not in limbo")
            await self._pass()
            given_up = dict(self.blocked)
            for ledger, reason in given_up.items():
                _LOG.error("limbo: what ledger %d lacks here is given up: %s", ledger, reason)
            await self._leave()
            await self._left()
            return given_up

    async def _leave(self) -> None:
        await self._store.leave_limbo()
        self.blocked = {}
        _LOG.warning("limbo has ended: %s", ", ".join(f"{name} {value}" for name, value in self.counters.items()))

    async def _pass(self) -> bool:
        """Restores the remaining ledgers; returns whether all of them are whole."""
        metadata = self._metadata()
        upto = self.limbo_upto
        ledgers = parse_ledger_ids(paths.LEDGERS, await metadata.children(paths.LEDGERS))
        wanted = [ledger for ledger in ledgers if ledger <= upto]
        self.counters["limbo_passes"] += 1
        self.counters["limbo_ledgers"], self.counters["limbo_ledgers_done"] = len(wanted), 0
        _LOG.info("limbo: %d ledgers up to %d are compared", len(wanted), upto)
        client = LedgerClient(self._world, metadata)
        try:
            restorer = LimboEntryRestorer(self._store, self._bookie, metadata, client)
            self.blocked = await self._restore_all(restorer, wanted)
            for name, value in restorer.counters.items():
                self.counters[f"limbo_{name}"] += value
        finally:
            await client.close()
        self._log_blocked()
        return not self.blocked

    async def _restore_all(self, restorer: LimboEntryRestorer, wanted: list[int]) -> dict[int, str]:
        waiting = iter(wanted)
        blocked: dict[int, str] = {}

        async def work() -> None:
            for ledger in waiting:
                reason = await restorer.restore(ledger)
                if reason is not None:
                    blocked[ledger] = reason
                self.counters["limbo_ledgers_done"] += reason is None

        await run_together((work() for _ in range(PARALLEL)), "bookie-limbo")
        return dict(sorted(blocked.items()))

    def _log_blocked(self) -> None:
        if not self.blocked:
            return
        some = "; ".join(list(self.blocked.values())[:REASONS_LOGGED_MAX])
        _LOG.error(
            "limbo: %d of %d ledgers are not whole, another pass follows in %g s: %s. Start the bookies that are down; "
            "if an entry's only copy was here, restore the directory from a backup, or give up what is missing with "
            "`magnetar bookies accept-loss %s`",
            len(self.blocked), self.counters["limbo_ledgers"], self._pause_s, some, self._bookie,
        )  # fmt: skip

    def statistics(self) -> dict[str, int]:
        return {
            "limbo": int(self.limbo_upto >= 0),
            "limbo_upto": self.limbo_upto,
            "limbo_blocked_ledgers": len(self.blocked),
            **self.counters,
        }
