"""`magnetar standalone --processes N`: the storage in some processes, brokers in the others, on one folder.

    storage       the metadata, which listens on loopback, and the first bookie
    storage-2 …   other bookies: each has a process of its own, as long as one is left for a broker
    broker-1      the broker at the ports of the command; its page of metrics is that of all
    broker-2 …    brokers that share what it is asked for (brokers.py), each at ports of its own

So a message is stored in another process than the one that speaks with its clients; bookies come before further brokers
because the storage of three copies costs more than the broker. The parent holds the lock of the folder, and the ports
(processes.py). When the storage is killed, the brokers keep their clients and wait for it; when a broker is killed, the
others go on, and its topics are served again by the one that follows it, under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from . import brokers, processes
from .members import as_member, asks_members, join
from .memory import STANDALONE_BYTES, planned
from .servers import connect, disconnect, serve_for_ever
from .standalone_parts import CLUSTER, Given, bookie_settings, broker_settings, count_bookies, start_bookie

if TYPE_CHECKING:
    from ...metadata.store import MetadataStore
    from ...runtime.memory.shares import Plan
    from ...runtime.network import Endpoint
    from ...runtime.world import World
    from .voice import Voice

STORAGE = "storage"
SESSION_S = 10.0
"""Seconds of a broker's session: so long after the death of one that does not come back, others take its topics."""
WAIT_S = 60.0
"""Seconds to wait for the storage, which may have a journal to replay."""

LOADED = ("bookie.server", "metadata.server", "runtime.peer.inside")
"""Modules that the storage imports besides those of a broker: in the parent."""


def several(given: Given, count: int, log_level: str, log_format: Any) -> int:
    """Runs it in `count` processes; returns the exit code. Busy, InvalidConfiguration."""
    from ...runtime.network import Endpoint

    processes.check_fork()
    asks_members(given.security)
    held = processes.lock(str(given.folder))
    bookies = count_bookies(given.folder, given.bookies)
    ports = processes.Ports()
    tree = ports.reserve(Endpoint("127.0.0.1", 0))
    settings = broker_settings(given, bookies)
    memory = Memory(STANDALONE_BYTES * (1 + bookies), count)
    first = brokers.Given(
        settings, tree, WAIT_S, SESSION_S, given.security, given.metrics, given.compat, given.warning, given.config,
        given.memory_bytes, *memory,
    )  # fmt: skip
    groups = bookies_by_process(bookies, count)
    mains = [partial(_storage, given, memory, tree, groups[0])]
    mains += [partial(_bookies, given, memory, tree, each) for each in groups[1:]]
    names = [STORAGE, *(f"{STORAGE}-{number}" for number in range(2, len(groups) + 1))]
    stores = [processes.spec(name, main, log_level, log_format) for name, main in zip(names, mains, strict=True)]
    own = settings.name or CLUSTER
    serving = brokers.processes_of(first, count - len(groups), own, ports, log_level, log_format)
    tiers = [each for each in (stores[:1], stores[1:], serving) if each]
    processes.preload(*brokers.LOADED, *LOADED)

    def said(facts: dict[str, dict[str, str]]) -> tuple[str, Mapping[str, object]]:
        url, first = brokers.said(facts)
        return url, {"data": given.folder, "bookies": bookies, "processes": count, "metadata": tree, **first}

    try:
        return processes.run(tiers, said, log_level, log_format)
    finally:
        held.close()


def bookies_by_process(bookies: int, processes: int) -> list[list[int]]:
    """The numbers of the bookies, from 1, of each process of the storage: the first has the metadata too."""
    count = min(bookies, processes - 1)
    return [list(range(first, bookies + 1, count)) for first in range(1, count + 1)]


class Memory(NamedTuple):
    """The memory of all processes together: at most so much where nothing is set, in equal parts."""

    most: int
    processes: int

    def plan(self, given: Given, numbers: list[int], *, metadata: bool) -> Plan:
        """Returns the plan for the process with these bookies. Raises InvalidConfiguration."""
        return planned(
            given.config, given.memory_bytes, bookie=bookie_settings(given, numbers[0]), bookies=len(numbers),
            metadata=metadata, most=self.most, processes=self.processes,
        )  # fmt: skip


async def _storage(
    given: Given, memory: Memory, tree: Endpoint, numbers: list[int], world: World, voice: Voice
) -> None:
    """Runs the metadata, and these bookies."""
    from ...metadata.server import MetadataServer
    from ...runtime.lifecycle import Parts
    from ..metrics.samples import Measured, second_names

    plan = memory.plan(given, numbers, metadata=True)
    async with Parts(world.clock) as parts:
        starting = MetadataServer.start(
            as_member(world, given.security, "metadata"), tree, str(given.folder / "metadata.sqlite"),
            plan.values["metadata.client_memory_bytes"],
        )  # fmt: skip
        server = await parts.start("metadata", starting, MetadataServer.close)

        async def session() -> MetadataStore:
            return server.store.session()

        serving = await join(parts, _inside(world), given.security, "bookie", session)
        started = [await start_bookie(parts, serving, given, each, plan, server.store.session()) for each in numbers]
        second = second_names(given.compat, world.clock)
        voice.measure(Measured(metadata=server, bookies=started, second=second, memory=plan))
        voice.ready(f"metadata://{server.endpoint}")
        await serve_for_ever()


async def _bookies(
    given: Given, memory: Memory, tree: Endpoint, numbers: list[int], world: World, voice: Voice
) -> None:
    """Runs these bookies, whose metadata is in another process."""
    from ...runtime.lifecycle import Parts
    from ..metrics.samples import Measured, second_names

    plan = memory.plan(given, numbers, metadata=False)
    member = as_member(world, given.security, "bookie")

    async def session() -> MetadataStore:
        return await connect(member, tree, WAIT_S, SESSION_S)

    async with Parts(world.clock) as parts:
        serving = await join(parts, _inside(member), given.security, "bookie", session)
        started = []
        for number in numbers:
            store = await parts.start("metadata", session(), disconnect)
            started.append(await start_bookie(parts, serving, given, number, plan, store, session))
        voice.measure(Measured(bookies=started, second=second_names(given.compat, world.clock), memory=plan))
        voice.ready("bookies://")
        await serve_for_ever()


def _inside(world: World) -> World:
    """Returns a world in which bookies of one process ask each other without a socket."""
    from ...runtime.peer.inside import InsideNetwork

    return replace(world, network=InsideNetwork(world.network, world.clock))
