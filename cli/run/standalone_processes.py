"""`magnetar standalone --processes N`: the storage in one process, brokers in the others, on one folder.

    storage      the metadata, which listens on loopback, and the bookies
    broker-1     the broker at the ports of the command; its page of metrics is that of all
    broker-2 …   brokers that share what it is asked for (brokers.py), each at ports of its own

So a message is stored in another process than the one that speaks with its clients. The parent holds the lock of the
folder, and the ports (processes.py). When the storage is killed, the brokers keep their clients and wait for it; when a
broker is killed, the others go on, and its topics are served again by the one that follows it, under the same name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from . import brokers, processes
from .members import as_member, asks_members, join
from .servers import serve_for_ever
from .standalone import CLUSTER, Given, broker_settings, count_bookies, start_bookies

if TYPE_CHECKING:
    from ...metadata.store import MetadataStore
    from ...runtime.network import Endpoint
    from ...runtime.world import World
    from .voice import Voice

STORAGE = "storage"
SESSION_S = 10.0
"""Of a broker: so long after the death of one that does not come back, others take its topics."""
WAIT_S = 60.0
"""For the storage, which may have a journal to replay."""

LOADED = ("bookie.server", "metadata.server", "runtime.peer.inside")
"""What the storage imports beside that: in the parent."""


def several(given: Given, count: int, log_level: str, log_format: Any) -> int:
    """Runs it in `count` processes; the exit code. Busy, InvalidConfiguration."""
    from ...runtime.network import Endpoint

    processes.check_fork()
    asks_members(given.security)
    held = processes.lock(str(given.folder))
    bookies = count_bookies(given.folder, given.bookies)
    ports = processes.Ports()
    tree = ports.reserve(Endpoint("127.0.0.1", 0))
    settings = broker_settings(given, bookies)
    first = brokers.Given(settings, tree, WAIT_S, SESSION_S, given.security, given.metrics, given.compat, given.warning)
    tiers = [
        [processes.spec(STORAGE, partial(_storage, given, tree, bookies), log_level, log_format)],
        brokers.processes_of(first, count - 1, settings.name or CLUSTER, ports, log_level, log_format),
    ]
    processes.preload(*brokers.LOADED, *LOADED)

    def said(facts: dict[str, dict[str, str]]) -> tuple[str, dict[str, object]]:
        url, first = brokers.said(facts)
        return url, {"data": given.folder, "bookies": bookies, "processes": count, **first}

    try:
        return processes.run(tiers, said, log_level, log_format)
    finally:
        held.close()


async def _storage(given: Given, tree: Endpoint, bookies: int, world: World, voice: Voice) -> None:
    from ...metadata.server import MetadataServer
    from ...runtime.lifecycle import Parts
    from ...runtime.peer.inside import InsideNetwork
    from ..metrics.samples import Measured, second_names

    async with Parts(world.clock) as parts:
        starting = MetadataServer.start(
            as_member(world, given.security, "metadata"), tree, str(given.folder / "metadata.sqlite")
        )
        server = await parts.start("metadata", starting, MetadataServer.close)

        async def session() -> MetadataStore:
            return server.store.session()

        world = replace(world, network=InsideNetwork(world.network, world.clock))  # bookies ask each other
        serving = await join(parts, world, given.security, "bookie", session)
        started = await start_bookies(parts, serving, server.store, given, bookies)
        voice.measure(Measured(metadata=server, bookies=started, second=second_names(given.compat, world.clock)))
        voice.ready(f"metadata://{server.endpoint}")
        await serve_for_ever()
