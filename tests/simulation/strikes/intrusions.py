"""Who does not belong there, and tasks that end where they wait.

`cancel` cancels a call of a client or an operator (`Cluster.call`), or a handler of a request, wherever it waits: no
await may leave anything half done. `dead-task` throws an exception of ours into a task that is to live as long as its
process. A stranger speaks to every port: bytes that are no request, requests without a key; nothing may come of them
but an error. A twin is a second process on the directory of a bookie that lives. A newer record is one of a later
version of Magnetar, in a folder of which a background task reads everything.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from magnetar.bookie.maintenance.garbage import GarbageCollector
from magnetar.bookie.maintenance.repair import Auditor, RepairSupervisor
from magnetar.bookie.maintenance.repair_worker import RepairWorker
from magnetar.bookie.maintenance.restore import LimboRestorer
from magnetar.bookie.maintenance.scrub import EntryRepairer, Scrubber
from magnetar.bookie.registration import BookieRegistration, DiskMonitor
from magnetar.bookie.server import Bookie
from magnetar.bookie.service import BookieService
from magnetar.broker.server import Broker
from magnetar.ledger.peer_format import LEDGER_KEY_BYTES, BookieOperation, BookieRequestFlags, BookieRequestHead
from magnetar.metadata import paths
from magnetar.metadata.records import RECORD_MAGIC, RECORD_VERSION
from magnetar.metadata.store import ANY_VERSION, MetadataStore
from magnetar.proto.errors import MagnetarError, NotFound
from magnetar.runtime.network import NO_PEER_KEYS, Channel, Endpoint, PeerClientKeys, World, find_rpc
from magnetar.runtime.sim.loop import SimTask, raise_inside_task
from magnetar.runtime.sim.rpc import _Connection as rpc_server
from magnetar.runtime.sim.world import NodeCrashed
from tests.simulation.cluster import FIRST_BOOKIE_PORT, METADATA, Cluster, _awaited
from tests.simulation.verdict.observer import STRANGER


def _name(of: type, method: str) -> str:
    """The name that a task of this method has; on the compiled twin too, where methods have no `__qualname__`."""
    assert callable(getattr(of, method))
    return f"{of.__name__}.{method}"


SINGLE = {
    _name(rpc_server, "_call"), _name(BookieService, "_read_disk"), _name(BookieService, "_find_held"),
    _awaited.__qualname__,
}  # fmt: skip
"""Handlers of one request each, in a server; and what goes through `Cluster.call`."""
STREAMS_OPEN = {_name(rpc_server, "_stream")}
WAITS_S = (0.0, 0.0005, 0.005, 0.05, 0.5)
"""How long a call may go on before it is cancelled: at its first await, or at a later one."""

KEEPERS = {
    _name(BookieRegistration, "run"), _name(DiskMonitor, "run"), _name(GarbageCollector, "run_forever"),
    _name(LimboRestorer, "run"), _name(Scrubber, "run"), _name(EntryRepairer, "run"), _name(RepairSupervisor, "run"),
    _name(Auditor, "run"), _name(RepairWorker, "run"), _name(Broker, "_follow_session"),
    _name(Broker, "_maintain_topics"), _name(Broker, "_sweep"),
}  # fmt: skip
"""Tasks that live as long as their bookie, or broker."""

CALLS = (("Broker", "Lookup"), ("Broker", "Partitions"), ("Admin", "TopicStats"), ("Metadata", "Commit"))
STREAMS = (("Broker", "Connect"), ("Broker", "Read"), ("Metadata", "Session"))


# ---------------------------------------------------------------------------------- tasks
def _tasks(cluster: Cluster, node: str, names: set[str]) -> list[SimTask[Any]]:
    process = cluster.simulation.node(node).process
    tasks = [] if process is None else process.tasks
    return [task for task in tasks if not task.done() and getattr(task.get_coro(), "__qualname__", "") in names]


def _cancel(cluster: Cluster, rng: random.Random) -> None:
    """One stream that is open now; and for a second some of the calls that come."""
    simulation = cluster.simulation
    streams = [task for node in cluster.broker_names for task in _tasks(cluster, node, STREAMS_OPEN)]
    if streams and rng.random() < 0.3:
        _cancel_now(cluster, rng.choice(streams))
    told, over_at = simulation.on_task, simulation.loop.time() + rng.uniform(0.1, 2.0)

    def came(node: str, task: SimTask[Any]) -> None:
        if told is not None:
            told(node, task)
        if simulation.loop.time() > over_at or cluster.healed:
            return
        if task.get_name().partition("#")[0] in SINGLE and rng.random() < 0.2:
            cluster.later(rng.choice(WAITS_S), _cancel_now, cluster, task)

    simulation.on_task = came


def _cancel_now(cluster: Cluster, task: SimTask[Any]) -> None:
    if not task.done() and task.process is not None and task.process.alive:
        cluster.simulation.add_line(f"fault: {task.get_name()} is cancelled")
        task.cancel()


def _dead_task(cluster: Cluster, rng: random.Random) -> None:
    nodes = *cluster.bookie_names, *cluster.broker_names
    found = [task for node in nodes for task in _tasks(cluster, node, KEEPERS)]
    if found:
        task = rng.choice(found)
        cluster.simulation.add_line(f"fault: an exception in {task.get_name()}")
        if rng.random() < 0.7:
            raise_inside_task(task, RuntimeError("a fault of ours"))
        else:
            task.cancel()


# ---------------------------------------------------------------------------------- strangers
class _Garbage:
    """In the place of a message."""

    def __init__(self, noise: bytes) -> None:
        self._noise = noise

    def SerializeToString(self, deterministic: bool = False) -> bytes:
        return self._noise


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 7, 60, 4000)))


def _head(cluster: Cluster, rng: random.Random) -> bytes:
    """Noise, noise behind a good beginning, or a whole request of somebody who does not know the key."""
    ledger = rng.choice([*cluster.observer.records, -1, (1 << 63) - 1])
    op = rng.choice(
        [
            BookieOperation.READ,
            BookieOperation.READ_LAC,
            BookieOperation.ADD,
            BookieOperation.ADD_MANY,
            BookieOperation.PING,
            BookieOperation.HELD,
        ]
    )
    number = rng.choice((0, 1, 5, (1 << 32) - 1))
    entry, key = rng.choice((0, 3, -1)), rng.randbytes(LEDGER_KEY_BYTES)
    whole = BookieRequestHead(op, BookieRequestFlags.NONE, ledger, entry, number, number, key).encode()
    return rng.choice((_noise(rng), whole[: rng.randrange(len(whole))], whole + _noise(rng), whole))


async def _talk_to_bookie(cluster: Cluster, world: World, rng: random.Random, name: str) -> None:
    bookie = cluster.bookies.get(name)
    if bookie is None:
        return
    port = FIRST_BOOKIE_PORT + int(name.partition("-")[2]) - 1
    identity = bookie._identity.uuid if rng.random() < 0.9 else rng.randbytes(16)
    keys = NO_PEER_KEYS
    if cluster.security is not None and rng.random() < 0.7:  # it read the bookie's key, and has one of its own
        keys = PeerClientKeys(bookie._serving.key, world.network.generate_keys())
    peer = world.network.connect_peer(Endpoint("127.0.0.1", port), identity, keys)
    for _ in range(rng.randint(1, 20)):
        frames = [_noise(rng) for _ in range(rng.randrange(4))]
        try:
            await peer.request(_head(cluster, rng), frames, timeout_s=0.5)
        except MagnetarError:
            continue
        if cluster.security is not None:
            cluster.observer.violations.append(f"46: {name} answers a process that is no member")
    await peer.close()


async def _talk_to_server(world: World, rng: random.Random, endpoint: Endpoint) -> None:
    channel: Channel = world.network.connect(endpoint)
    for _ in range(rng.randint(1, 10)):
        data: Any = _Garbage(_noise(rng))
        try:
            if rng.random() < 0.7:
                await channel.call(find_rpc(*rng.choice(CALLS)), data, timeout_s=0.5)
                continue
            stream = channel.stream(find_rpc(*rng.choice(STREAMS)))
            stream.send_nowait(_noise(rng))
            async with asyncio.timeout(0.5):
                await stream.receive()
        except (MagnetarError, TimeoutError, ValueError):
            continue
    await channel.close()


def _stranger(cluster: Cluster, rng: random.Random) -> None:
    async def talk() -> None:
        world = cluster.simulation.world(STRANGER)
        targets = [*cluster.bookie_names, *cluster.broker_names, METADATA]
        for name in rng.sample(targets, rng.randint(1, len(targets))):
            cluster.simulation.add_line(f"fault: a stranger speaks to {name}")
            if name in cluster.bookie_names:
                await _talk_to_bookie(cluster, world, rng, name)
            elif name == METADATA:
                await _talk_to_server(world, rng, cluster.metadata)
            elif name in cluster.brokers:  # else a bookie that was replaced meanwhile
                await _talk_to_server(world, rng, cluster.brokers[name].endpoint)

    async def visit() -> None:
        try:
            await cluster.simulation.spawn(STRANGER, talk())
        except NodeCrashed:
            return

    cluster.background(visit())


def _twin(cluster: Cluster, rng: random.Random) -> None:
    """Somebody starts a bookie by hand that an init system keeps alive: it is refused and disturbs nobody."""
    name = rng.choice(cluster.bookie_names)
    node, first = cluster.simulation.node(name), cluster.simulation.node(name).process
    if name not in cluster.serving or first is None:
        return
    twin = cluster.simulation.start_second_process(name)
    cluster.simulation.add_line(f"fault: a twin of {name} starts")

    async def start() -> None:
        config = cluster.bookie_config(name, 99)
        metadata = await cluster.session(twin.world)
        try:
            bookie = await Bookie.start(await cluster.joined(twin.world), config, metadata)
        except (MagnetarError, OSError) as error:
            cluster.simulation.add_line(f"the twin of {name} does not start: {error!r}"[:200])
        else:
            if node.process is first:
                cluster.observer.violations.append(f"twin: {bookie.id} runs twice")
            await bookie.close()
        await metadata.close()

    async def run() -> None:
        try:
            async with asyncio.timeout(60.0):
                await cluster.simulation.spawn_in_process(twin, start())
        except (NodeCrashed, MagnetarError, TimeoutError) as error:
            cluster.simulation.add_line(f"the twin of {name} gives up: {error!r}"[:200])
        cluster.simulation.end_process(twin)

    cluster.background(run())


# ---------------------------------------------------------------------------------- a later version
def newer(kind: int, body: bytes = b"{}") -> bytes:
    return RECORD_MAGIC + bytes([RECORD_VERSION + 1, kind]) + bytes(4) + body


def _newer_record(cluster: Cluster, rng: random.Random) -> None:
    ledger, uuid = (1 << 40) + rng.randrange(1000), f"00000000-0000-0000-0000-{rng.randrange(1000):012}"
    path = rng.choice((
        f"{paths.DAMAGED_LEDGERS}/{ledger:020d}/{uuid}", f"{paths.UNDER_REPLICATED_LEDGERS}/{ledger:020d}",
        f"{paths.DEPARTING_BOOKIES}/{uuid}", f"{paths.AVAILABLE_BOOKIES}/{uuid}", f"{paths.BROKERS}/newer",
    ))  # fmt: skip

    async def write(world: World, store: MetadataStore) -> None:
        await store.put(path, newer(rng.randrange(1, 20)), ANY_VERSION)

    async def remove(world: World, store: MetadataStore) -> None:
        try:
            await store.delete(path)
        except NotFound:
            return

    async def ask() -> None:
        await cluster.ask(f"a newer record at {path}", write)

    cluster.background(ask())
    cluster.on_heal.append(lambda: cluster.ask(f"no newer record at {path}", remove))


# ---------------------------------------------------------------------------------- clocks
def _clock_skew(cluster: Cluster, rng: random.Random) -> None:
    """All of them: no two agree on the hour, some not on the day."""
    for name in (METADATA, *cluster.bookie_names, *cluster.broker_names):
        hours = rng.choice((0.0, rng.uniform(-2.0, 2.0), rng.uniform(-30.0, 30.0)))
        cluster.simulation.node(name).skew_ms = int(hours * 3_600_000)
        cluster.simulation.add_line(f"fault: the clock of {name} is {hours:.1f} hours off")


INTRUSIONS: Mapping[str, Callable[[Cluster, random.Random], None]] = {
    "cancel": _cancel,
    "dead-task": _dead_task,
    "stranger": _stranger,
    "twin": _twin,
    "newer-record": _newer_record,
    "clock-skew": _clock_skew,
}
