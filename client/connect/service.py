"""The cluster that a client connects to, and where the client goes when that changes.

A program's provider may name another cluster at any time, from any thread. The clusters of an AutoClusterFailover are
tried in rounds, which begin when the client is first used, each `check_interval_ms` after the end of the one before: a
cluster answers when a connection to one of its addresses is made within the connection time-out. The connection is
closed again, and nothing is asked. To move, the client closes its connections; producers, consumers and readers open
again at the other cluster, as after any broken connection. Guard: tests/client/connect/test_service.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from ...proto.errors import MagnetarError
from ...runtime.access import CallerAccess
from ...runtime.network import Endpoint, Network
from ...runtime.tasks import Tasks, together
from ...runtime.world import World
from ..common.guard import ignored, run, survived
from ..core.failover import FailoverCore
from ..model.settings import ClientSettings
from .authentication import caller_access
from .connections import Connections
from .service_info import AutoClusterFailover, ServiceInfo, ServiceInfoProvider, checked, first_service_info

_LOG = logging.getLogger("magnetar.client")


class Service:
    """The service of a client. `given`: the client's `service_url`. `options`: its parameters. InvalidUrl,
    InvalidConfiguration."""

    def __init__(self, given: object, authentication: object, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self.info = first_service_info(given, authentication, self._options)
        self._access_of(self.info)
        self._clusters = given if isinstance(given, AutoClusterFailover) else None
        for each in self._clusters.secondary if self._clusters is not None else ():
            self._access_of(each)
        self._tasks = Tasks()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: Connections | None = None
        self._used: ServiceInfo | None = None  # what the connections go to
        self._provider = given if isinstance(given, ServiceInfoProvider) else None
        if self._provider is not None:
            self._provider.initialize(self.updated)

    def _access_of(self, info: ServiceInfo) -> CallerAccess:
        trusted = {"tls_trust_certs_file_path": info.tls_trust_certs_file_path}
        return caller_access(info.url, info.authentication, {**self._options, **trusted})

    def connect(self, world: World, settings: ClientSettings) -> Connections:
        """Makes the connections, in the event loop that uses them."""
        self._loop = asyncio.get_running_loop()  # before the look at `info`: what is told later calls into it
        self._used = self.info
        self._connections = Connections(world, self._used.url, settings, self._access_of(self._used))
        if self._clusters is not None:
            rounds = self._try_clusters(self._clusters, world.network, settings.connection_timeout_s)
            self._tasks.spawn(rounds, "failover of a client")
        return self._connections

    def updated(self, info: ServiceInfo) -> None:
        """Moves the client, from any thread. Raises InvalidConfiguration."""
        self._access_of(checked(info))
        self.info = info
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(run, self._move, ignored)

    def _move(self) -> None:
        info, connections = self.info, self._connections
        if connections is not None and info is not self._used and not self._tasks.closed:
            _LOG.warning("the client goes to %s", info.service_url)
            self._used = info
            self._tasks.spawn(connections.move(info.url, self._access_of(info)), "move of a client")

    async def _try_clusters(self, clusters: AutoClusterFailover, network: Network, timeout_s: float) -> None:
        infos = [clusters.primary, *clusters.secondary]
        core = FailoverCore(
            len(infos), failover_after=clusters.failover_threshold, back_after=clusters.switch_back_threshold
        )
        answered = [False] * len(infos)

        async def look_at(which: int) -> None:
            answered[which] = await answers(infos[which], network, timeout_s)

        while True:
            await asyncio.sleep(clusters.check_interval_ms / 1000)
            await together(map(look_at, range(len(infos))), "look at a cluster")
            self.info = infos[core.tried(answered)]
            self._move()

    async def close(self) -> None:
        """Closes the service, in the event loop. Idempotent."""
        self._connections = None
        provider, self._provider = self._provider, None
        try:
            await self._tasks.close()
        finally:
            if provider is not None:
                try:
                    provider.close()
                except BaseException as error:
                    survived(error, "the close of the provider of a client's service")


async def answers(info: ServiceInfo, network: Network, timeout_s: float) -> bool:
    """Whether one of its addresses takes a connection."""
    for address in info.url.ask or info.url.endpoints:
        if await _takes(address, network, timeout_s):
            return True
    return False


async def _takes(address: Endpoint, network: Network, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            stream = await network.connect_bytes(address)
    except (MagnetarError, TimeoutError):
        return False
    await stream.close()
    return True
