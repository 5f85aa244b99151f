"""A cluster in a simulation: which nodes there are, how each is started, and who starts what died.

Nodes: `metadata` (does not crash today; what it says and hears may be late or cut), `bookie-1…3`, `broker-1…2`,
`client`. Whatever dies (killed, unplugged, or by `Files.die`) is started again after a while, as by an init system.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.bookie.store.store import StoreConfig
from magnetar.broker.config import BrokerConfig
from magnetar.broker.server import Broker
from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.server import MetadataService
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore
from magnetar.metadata.tree import Commit
from magnetar.proto.errors import DataLost, InvalidConfiguration
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.wires import NetworkFaults
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from magnetar.runtime.world import World
from tests.simulation.observer import Observer
from tests.simulation.options import Options

METADATA = "metadata"
CLIENT = "client"
SESSION_TIMEOUT_S = 5.0
ANY_PORT = Endpoint("127.0.0.1", 0)
FIRST_BROKER_PORT = 7651
BOOKIES = ("bookie-1", "bookie-2", "bookie-3")


REFUSALS_MAX = 10


class DoesNotStart(Exception):
    """A process refuses to start on what its former lives left, and nothing will change that."""


class ObservedStore(SqliteStore):
    """Tells the observer every transaction in the moment in which it is durable."""

    observer: Observer

    def _publish(self, job: Any, done: Any) -> None:
        if isinstance(job, Commit):
            for operation, version in zip(job.operations, done.versions, strict=True):
                self.observer.committed(operation, version)
        super()._publish(job, done)


class Cluster:
    """`start`, then faults from outside, then `heal`. Starting is retried until it works."""

    def __init__(self, simulation: Simulation, options: Options, observer: Observer) -> None:
        self.simulation = simulation
        self.options = options
        self.observer = observer
        self.metadata: Endpoint
        self.broker_names: list[str] = []
        self._brokers: dict[str, Broker] = {}
        self.starts: dict[str, int] = {}
        self._starters: dict[str, Callable[[World], Awaitable[None]]] = {}
        self._rng = simulation.stream("supervisor")
        self._refusals: dict[str, int] = {}
        self._refused: DoesNotStart | None = None
        self._supervising = False
        self._healed = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._context = contextvars.Context()

    # ------------------------------------------------------------------ starting
    async def start(self) -> None:
        """Metadata and three bookies."""
        self._context = contextvars.copy_context()
        await self.simulation.spawn(METADATA, self._start_metadata(self.simulation.world(METADATA)))
        for name in BOOKIES:
            self.observer.watch_disk(name)
            self.add(name, self._start_bookie(name))
        self.simulation.on_crash.append(self._crashed)
        self._supervising = True
        await asyncio.gather(*(self.up(name) for name in BOOKIES))

    def add(self, name: str, starter: Callable[[World], Awaitable[None]]) -> None:
        """A node whose process is made by `starter` each time."""
        self._starters[name] = starter

    async def up(self, name: str) -> None:
        """Starts the node's process. When that fails the process ends, and the supervisor starts another later."""
        try:
            await self.simulation.spawn(name, _run(self._starters[name], self.simulation.world(name)))
        except NodeCrashed:
            return
        except Exception as error:
            self.simulation.note(f"{name} did not start: {type(error).__name__}: {error}")
            self._refusals[name] = self._refusals.get(name, 0) + 1
            if self._refusals[name] >= REFUSALS_MAX and isinstance(error, InvalidConfiguration | DataLost):
                self._refused = DoesNotStart(f"{name}: {type(error).__name__}: {error}")
            self.simulation.crash(name)
            return
        self._refusals[name] = 0
        self.starts[name] = self.starts.get(name, 0) + 1
        self.simulation.note(f"{name} is up")

    def _crashed(self, name: str, power_loss: bool) -> None:
        if name not in self._starters or not self._supervising or self._refused is not None:
            return
        mean = 0.1 if self._healed else self.options.down_s
        delay = self._rng.expovariate(1.0 / mean)
        self.simulation.loop.call_later(delay, self._restart, name, context=self._context)

    def _restart(self, name: str) -> None:
        if self.simulation.is_up(name):
            return
        if self.options.crash_in_start and name in BOOKIES and not self._healed and self._rng.random() < 0.5:
            self.simulation.world(name)
            power_loss = self._rng.random() < self.options.power_loss_rate
            self.simulation.crash_at(name, self._rng.randint(1, 30), power_loss=power_loss)
        self.background(self.up(name))

    def background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """A task of the test, whose failure fails the test."""
        task = self.simulation.loop.create_task(coroutine, context=self._context.copy())
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def session(self, world: World) -> MetadataStore:
        return await connect_metadata(world, self.metadata, SESSION_TIMEOUT_S)

    async def _start_metadata(self, world: World) -> None:
        store = await ObservedStore.open(world, ":memory:")
        assert isinstance(store, ObservedStore)
        store.observer = self.observer
        serving = await world.network.serve(ANY_PORT, [("Metadata", MetadataService(store))])
        self.metadata = serving.endpoint

    def _start_bookie(self, name: str) -> Callable[[World], Awaitable[None]]:
        options = self.options
        store = StoreConfig(
            memtable_bytes=options.memtable_bytes,
            journal_bytes=8 * options.memtable_bytes,
            checkpoint_interval_s=3.0,
            journal_segment_bytes=options.journal_segment_bytes,
            journal_first_segment_bytes=min(64 << 10, options.journal_segment_bytes),
            log_allocate_bytes=64 << 10,
        )
        config = BookieConfig(data=f"/{name}/data", store=store, gc_interval_s=20.0, gc_grace_s=20.0)

        async def start(world: World) -> None:
            metadata = await self.session(world)
            bookie = await Bookie.start(world, config, metadata, lambda: self.session(world))
            self.observer.node_of[bookie.id] = name

        return start

    # ------------------------------------------------------------------ faults and their end
    def harm(self) -> None:
        """Turns the seed's random faults on."""
        options = self.options
        self.simulation.wires.faults = NetworkFaults(
            latency_s=options.latency_s,
            slow_rate=options.slow_rate,
            drop_rate=options.drop_rate,
            cut_rate=options.cut_rate,
            silence_s=4.0,
        )
        for name in BOOKIES:
            self.simulation.node(name).disk_delays.stall_rate = options.stall_rate

    async def heal(self) -> None:
        """Nothing fails any more, and everything is up when this returns."""
        self._healed = True
        self.simulation.note("heal: the whole cluster")
        self.simulation.wires.faults = NetworkFaults(latency_s=self.options.latency_s)
        self.simulation.wires.heal()
        for node in self.simulation.nodes.values():
            node.disk.disarm()
            node.disk.faults.clear()
            node.disk_delays.stall_rate = 0.0
        for name in self._starters:
            self._restart(name)
        while self._tasks or not all(self.simulation.is_up(name) for name in self._starters):
            if self._refused is not None:
                raise self._refused
            await asyncio.sleep(0.1)

    # ------------------------------------------------------------------ brokers
    async def start_brokers(self, count: int) -> None:
        for number in range(count):
            name = f"broker-{number + 1}"
            self.broker_names.append(name)
            self.add(name, self._start_broker(name, FIRST_BROKER_PORT + number))
        await asyncio.gather(*(self.up(name) for name in self.broker_names))

    @property
    def service_url(self) -> str:
        hosts = [f"127.0.0.1:{FIRST_BROKER_PORT + number}" for number in range(len(self.broker_names))]
        return "magnetar://" + ",".join(hosts)

    def owner(self) -> str | None:
        """The node of a living broker that has a topic loaded, if any."""
        for name, broker in self._brokers.items():
            if broker.topics and self.simulation.is_up(name):
                return name
        return None

    def _start_broker(self, name: str, port: int) -> Callable[[World], Awaitable[None]]:
        options = self.options
        ensemble, write, ack = options.quorum
        config = BrokerConfig(
            name=name, listen=Endpoint("127.0.0.1", port),
            ensemble_size=ensemble, write_quorum=write, ack_quorum=ack,
            roll_entries=options.ledger_entries_max, cursor_roll_entries=options.ledger_entries_max,
            cursor_flush_s=0.5, trim_interval_s=3.0, cache_bytes=options.cache_bytes,
        )  # fmt: skip

        async def start(world: World) -> None:
            metadata = await self.session(world)
            self._brokers[name] = await Broker.start(world, config, metadata, lambda: self.session(world))

        return start


async def _run(starter: Callable[[World], Awaitable[None]], world: World) -> None:
    await starter(world)
