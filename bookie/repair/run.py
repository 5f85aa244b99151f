"""Repair: auditor and worker together, as every bookie runs them, or `magnetar repair run` alone.

    repair = Repair(world, metadata, client, config, name="…")
    await repair.run()      until cancelled; raises SessionExpired when the metadata session is lost

All waiting is asyncio's and all time the world's, so it runs in the simulator. What is lost with the process is lost
gladly: the election and the locks are ephemeral, everything else is in the marks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...ledger.client import LedgerClient
from ...metadata.store import MetadataStore
from ...proto.errors import MagnetarError
from ...runtime.tasks import together
from ...runtime.world import World
from .auditor import Auditor
from .config import RepairConfig
from .worker import Worker

_LOG = logging.getLogger("magnetar.bookie.repair")

GAUGES = ("repair_auditor", "repair_under_replicated", "repair_lost_bookies", "repair_working_on")
COUNTERS = (
    "repair_scans", "repair_scanned_ledgers", "repair_checks", "repair_marks", "repair_ledgers", "repair_failures",
    "repair_recovered", "repair_entries", "repair_bytes",
)  # fmt: skip
"""The numbers of `statistics` that only grow; the others can fall."""


def new_token(world: World) -> str:
    return world.rng.randbytes(16).hex()


class Repair:
    """The auditor and the worker of one process. `metadata` and `client` stay the caller's. `name`: whose worker this
    is; a bookie's is its id.

    `token` marks its ephemeral nodes. One for all that runs, one after the other, in the same metadata session: what
    the one left is then the next one's own.
    """

    def __init__(
        self, world: World, metadata: MetadataStore, client: LedgerClient, config: RepairConfig | None = None,
        name: str = "", token: str = "",
    ) -> None:  # fmt: skip
        config = config or RepairConfig()
        token = token or new_token(world)
        self.name = name or f"worker-{token[:8]}"
        self._client = client
        self.auditor = Auditor(world, metadata, client, config, self.name, token)
        self.worker = Worker(world, metadata, client, config, self.name, token)

    async def run(self) -> None:
        await self._client.bookies.ready()
        await together([self.auditor.run(), self.worker.run()], "repair")

    def statistics(self) -> dict[str, int]:
        return {**self.auditor.statistics(), **self.worker.statistics()}


class RepairKeeper:
    """Runs a `Repair` for the life of a process (`metadata` gives the present session).

    Each metadata session and each failure begins a new one. After a failure the session goes on, with the nodes that
    the old one could not give up; so the token is the session's.
    """

    def __init__(
        self, world: World, metadata: Callable[[], MetadataStore], config: RepairConfig, name: str, retry_s: float
    ) -> None:
        self._world = world
        self._metadata = metadata
        self._config = config
        self.name = name
        self._retry_s = retry_s
        self._session: MetadataStore | None = None
        self._token = ""  # of the session
        self._repair: Repair | None = None
        self._past = dict.fromkeys(COUNTERS, 0)

    async def keep(self) -> None:
        """Runs repair for ever; returns at once if this process takes no part."""
        while self._config.enabled:
            metadata = self._metadata()
            if metadata is not self._session:
                self._session, self._token = metadata, new_token(self._world)
            client = LedgerClient(self._world, metadata)
            self._repair = Repair(self._world, metadata, client, self._config, self.name, self._token)
            try:
                await self._repair.run()
            except MagnetarError as error:
                _LOG.warning("auto-recovery starts again on this bookie: %s", error)
            except Exception:
                _LOG.exception("auto-recovery failed on this bookie, and starts again")
            finally:
                self._past, self._repair = self._counted(), None
                await client.close()
            await asyncio.sleep(self._retry_s)

    def _counted(self) -> dict[str, int]:
        now = {} if self._repair is None else self._repair.statistics()
        return {name: value + now.get(name, 0) for name, value in self._past.items()}

    def statistics(self) -> dict[str, int]:
        now = {} if self._repair is None else self._repair.statistics()
        return {**self._counted(), **{name: now.get(name, 0) for name in GAUGES}}
