"""A cluster in a simulation: which nodes there are, how each is started, and who starts what died.

Nodes: `metadata` (does not crash; what it says and hears may be late, lost or cut), `bookie-1…`, `broker-1…2`, `client`
or `writer` and `rival`, and `admin`, from where operators and the judge ask. Auditor and repair workers run in every
bookie, as in production, with short periods of grace. In some seeds each broker is in the process of a bookie
(`hosts`), as in `magnetar standalone`: the node has the bookie's name, and both live and die together. Whatever dies
(killed, unplugged, or by `Files.end_process`) is started again after a while, as by an init system, unless it is in
`gone`."""

import asyncio
import contextlib
import contextvars
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from magnetar.bookie.maintenance.repair_worker import RepairConfig
from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.bookie.store import identity
from magnetar.bookie.store.store import StoreConfig
from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.server import Broker
from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import DataLost, InvalidConfiguration, MagnetarError, NotFound, TimedOut
from magnetar.runtime.access import OPEN_ACCESS
from magnetar.runtime.network import Endpoint, World
from magnetar.runtime.sim.disk import UNLIMITED_BYTES
from magnetar.runtime.sim.loop import DiskDelays
from magnetar.runtime.sim.wires import NetworkFaults
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.simulation.inside import ObservedInside
from tests.simulation.metadata import FaultyService, ObservedStore
from tests.simulation.options import Options
from tests.simulation.security import CHANGING, READING, STRANGER_ROLE, Security
from tests.simulation.verdict.observer import Observer
from tests.simulation.verdict.owners import Owners
from tests.simulation.verdict.rights import RightsJudge
from tests.simulation.verdict.transactions import Coordination

T = TypeVar("T")

METADATA = "metadata"
CLIENT = "client"
ADMIN = "admin"
SESSION_TIMEOUT_S = 5.0
ANY_PORT = Endpoint("127.0.0.1", 0)
FIRST_BROKER_PORT = 7651
FIRST_BOOKIE_PORT = 6651
FIRST_PULSAR_PORT = 16650

REFUSALS_MAX = 10
STOP_S = 20.0
"""Of a stop in order, then it is killed."""

REPAIR = RepairConfig(
    lost_bookie_grace_s=6.0, open_ledger_grace_s=8.0, check_pass_s=30.0, retry_min_s=0.5, retry_max_s=8.0,
    audit_interval_s=3.0, scan_interval_s=60.0, poll_interval_s=5.0, bytes_per_s=0,
)  # fmt: skip
"""As in production, but that minutes are seconds."""


class GaveUp(TimedOut):
    """The call was cancelled, by a strike, where it waited."""


class DoesNotStart(Exception):
    """A process refuses to start on what its former lives left, and nothing will change that."""


class Cluster:
    """`start`, then faults from outside, then `heal`. Starting is retried until it works."""

    def __init__(
        self, simulation: Simulation, options: Options, observer: Observer, only: Collection[str] | None = None
    ) -> None:
        self.simulation = simulation
        self.only = only  # strikes that may happen, by name; None: all
        self.struck: dict[str, float] = {}
        self.options = options
        self.observer = observer
        self.security = Security(simulation, options) if options.secured else None
        uses = {CHANGING: CHANGING, STRANGER_ROLE: "intruder", READING: "letters"}
        self.coordination = Coordination(simulation)
        self.owners = Owners(simulation.add_line)
        self.rights = RightsJudge(simulation, (*options.rates, *options.times), uses)
        if options.secured:
            observer.on_commit = self.rights.committed
        self.metadata: Endpoint
        self.service: FaultyService
        self.bookies: dict[str, Bookie] = {}
        self._bookie_sessions: dict[str, MetadataStore] = {}  # the first one of each: who starts a bookie closes it
        self.gone: dict[str, None] = {}  # nodes that nobody starts any more
        self.broker_names: list[str] = []
        self._bookie_names: list[str] = []
        self.brokers: dict[str, Broker] = {}
        self.hosts: dict[str, World] = {}  # bookies' nodes with a broker → the world of both in their last life
        self.inside: dict[str, ObservedInside] = {}  # its network
        self.starts: dict[str, int] = {}
        self.serving: dict[str, None] = {}  # nodes whose start is over
        self._starters: dict[str, Callable[[World], Awaitable[None]]] = {}
        self._rng = simulation.random_generator("supervisor")
        self._refusals: dict[str, int] = {}
        self._refused: DoesNotStart | None = None
        self._supervising = False
        self.healed = False
        self.on_heal: list[Callable[[], Awaitable[bool]]] = []  # what an operator takes back; again until it works
        self.late = "", ""  # the next deletion of what, and of which topic, is late (strikes/late.py)
        self.late_deletions = 0
        self.on_anew: list[Callable[[random.Random], None]] = []  # loads whose names come back (load/names.py)
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._context = contextvars.Context()

    # ------------------------------------------------------------------ starting
    async def start(self) -> None:
        """Metadata and the bookies."""
        self._context = contextvars.copy_context()
        await self.simulation.spawn(METADATA, self._start_metadata(self.simulation.world(METADATA)))
        names = [self.add_bookie() for _ in range(self.options.bookies)]
        if self.options.inside:
            for name in [name for number, name in enumerate(names) if number != self.options.loser]:
                if len(self.hosts) < self.options.brokers:
                    self._add_host(name, names.index(name))
        self.simulation.on_crash.append(self._crashed)
        self._supervising = True
        await asyncio.gather(*(self.up(name) for name in names if name not in self.hosts))
        await asyncio.gather(*(self.up(name) for name in self.hosts))

    def add_bookie(self) -> str:
        """A node for one more; `up` starts it."""
        name = f"bookie-{len(self._bookie_names) + 1}"
        self.observer.watch_disk(name)
        self.simulation.node(name).disk.takes_direct = self.options.direct
        self.observer.node_at[str(FIRST_BOOKIE_PORT + len(self._bookie_names))] = name
        self.add(name, self._start_bookie(name, len(self._bookie_names)))
        self._bookie_names.append(name)
        return name

    def _add_host(self, name: str, number: int) -> None:
        """The process of this bookie has the next broker in it."""
        start_bookie = self._start_bookie(name, number)
        start_broker = self._start_broker(name, FIRST_BROKER_PORT + len(self.broker_names))
        self.hosts[name] = self.simulation.world(name)
        self.broker_names.append(name)

        async def start(world: World) -> None:
            self.inside[name] = network = ObservedInside(world, self.observer, name)
            self.hosts[name] = shared = replace(world, network=network)
            await start_bookie(shared)
            await start_broker(shared)

        self.add(name, start)

    @property
    def bookie_names(self) -> list[str]:
        """Of those that are not gone for good."""
        return [name for name in self._bookie_names if name not in self.gone]

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
            self.simulation.add_line(f"{name} did not start: {type(error).__name__}: {error}")
            self._refusals[name] = self._refusals.get(name, 0) + 1
            if self._refusals[name] >= REFUSALS_MAX and isinstance(error, InvalidConfiguration | DataLost):
                self._refused = DoesNotStart(f"{name}: {type(error).__name__}: {error}")
            self.simulation.crash(name)
            return
        self._refusals[name] = 0
        self.starts[name] = self.starts.get(name, 0) + 1
        self.serving[name] = None
        self.simulation.add_line(f"{name} is up")

    def _crashed(self, name: str, power_loss: bool) -> None:
        self.serving.pop(name, None)
        if name not in self._starters or name in self.gone or not self._supervising or self._refused is not None:
            return
        mean = 0.1 if self.healed else self.options.down_s
        delay = self._rng.expovariate(1.0 / mean)
        self.simulation.loop.call_later(delay, self._restart, name, context=self._context)

    def _restart(self, name: str) -> None:
        if self.simulation.is_node_running(name) or name in self.gone:
            return
        rate = 0.0 if self.healed else self.options.rates.get("crash-in-start", 0.0)
        if rate and name in self._bookie_names and self._rng.random() < rate:
            self.simulation.world(name)
            power_loss = self._rng.random() < 0.5
            self.simulation.crash_at(name, self._rng.randint(1, 30), power_loss=power_loss)
        self.background(self.up(name))

    def background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """A task of the test, whose failure fails the test."""
        task = self.simulation.loop.create_task(coroutine, context=self._context.copy())
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def call(self, what: str, work: Awaitable[T]) -> T:
        """What a client or an operator does; a strike may cancel it where it waits: GaveUp."""
        task = asyncio.get_running_loop().create_task(_awaited(work))
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if task.cancelled() and me is not None and not me.cancelling():
                raise GaveUp(f"{what} was cancelled") from None
            raise

    def later(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Part of a fault, or its end; when the cluster is healed by then, nothing."""

        def act() -> None:
            if not self.healed:
                action(*arguments)

        self.simulation.loop.call_later(seconds, act, context=self._context)

    async def stop(self, name: str) -> None:
        """In order, as an init system does; one that hangs is killed after a while."""
        parts = [part for part in (self.brokers.get(name), self.bookies.get(name)) if part is not None]
        if not parts or not self.simulation.is_node_running(name):
            return
        self.simulation.add_line(f"fault: {name} is stopped")
        try:
            async with asyncio.timeout(STOP_S):
                for part in parts:
                    await self.simulation.spawn(name, part.close())
        except (TimeoutError, NodeCrashed, MagnetarError, OSError) as error:
            self.simulation.add_line(f"{name} does not stop in order: {error!r}")
        self.simulation.crash(name)

    async def renew_bookie(self, name: str, slower: int, pause_s: float) -> None:
        """The bookie of a host stops in order and starts again in its process, where its broker goes on. It stops
        while it has requests: its disk is so many times slower."""
        process, world = self.simulation.node(name).process, self.hosts[name]
        if process is None or name not in self.serving or name not in self.bookies:
            return
        bookie, delays = self.bookies.pop(name), self.simulation.node(name).disk_delays
        session = self._bookie_sessions[name]
        try:
            healthy_s, delays.mean_s = delays.mean_s, delays.mean_s * slower
            try:
                await asyncio.sleep(0.1)
                self.simulation.add_line(f"fault: the bookie in {name} is stopped")
                async with asyncio.timeout(STOP_S):
                    await self.simulation.spawn_in_process(process, bookie.close())
                    await self.simulation.spawn_in_process(process, session.close())
            finally:
                delays.mean_s = healthy_s
            await asyncio.sleep(pause_s)
            if not process.alive:
                return
            await self.simulation.spawn_in_process(
                process, self._start_bookie(name, self._bookie_names.index(name))(world)
            )
            self.simulation.add_line(f"the bookie in {name} is up")
        except NodeCrashed:
            return
        except (TimeoutError, MagnetarError, OSError) as error:
            self.simulation.add_line(f"the bookie in {name} is not renewed: {error!r}")
            self.simulation.crash(name)

    async def session(self, world: World) -> MetadataStore:
        world = world if self.security is None else self.security.member(world)
        return await connect_metadata(world, self.metadata, SESSION_TIMEOUT_S)

    async def _broker_session(self, name: str, world: World) -> MetadataStore:
        store = await self.session(world)
        return store if self.security is None else self.rights.listening(name, store)

    async def joined(self, world: World) -> World:
        """The world with which the process speaks to bookies."""
        return world if self.security is None else await self.security.joined(world, self.session)

    def credentials(self, role: str) -> object:
        """What a client of that role brings to a broker: `authentication` of Client and AdminClient."""
        return None if self.security is None else self.security.of(role)

    async def _start_metadata(self, world: World) -> None:
        store = await ObservedStore.open(world, ":memory:")
        store.observer = self.observer
        self.service = FaultyService(store, self.simulation.random_generator("metadata"))
        access = OPEN_ACCESS if self.security is None else self.security.listener
        serving = await world.network.serve(ANY_PORT, [("Metadata", self.service)], access)
        self.metadata = serving.endpoint

    def bookie_config(self, name: str, number: int) -> BookieConfig:
        options = self.options
        store = StoreConfig(
            memtable_bytes=options.memtable_bytes,
            journal_bytes=8 * options.memtable_bytes,
            checkpoint_interval_s=3.0,
            journal_segment_bytes=options.journal_segment_bytes,
            journal_first_segment_bytes=min(64 << 10, options.journal_segment_bytes),
            log_allocate_bytes=64 << 10,
            reserve_bytes=256 << 10,
            journal_queue_bytes_max=(4 << 10) if options.tight else (32 << 20),
        )
        return BookieConfig(
            data=f"/{name}/data", port=FIRST_BOOKIE_PORT + number, rack=f"/r{number % options.racks}", store=store,
            held_bytes_max=(8 << 10) if options.tight else (32 << 20),
            gc_interval_s=20.0, gc_grace_s=20.0, gc_doubt_s=40.0, limbo_pause_s=2.0, upkeep_interval_s=4.0,
            scrub_pass_s=30.0, free_bytes_min=64 << 10, repair=REPAIR,
        )  # fmt: skip

    def _start_bookie(self, name: str, number: int) -> Callable[[World], Awaitable[None]]:
        config = self.bookie_config(name, number)

        async def start(world: World) -> None:
            metadata = self._bookie_sessions[name] = await self.session(world)
            world = await self.joined(world)
            bookie = await Bookie.start(world, config, metadata, lambda: self.session(world))
            self.bookies[name] = bookie

        return start

    # ------------------------------------------------------------------ faults and their end
    def harm(self) -> None:
        """Turns the seed's random faults on."""
        rates = self.options.rates
        self.simulation.wires.faults = NetworkFaults(
            latency_s=self.options.latency_s,
            slow_rate=rates.get("delay", 0.0),
            drop_rate=rates.get("drop", 0.0),
            cut_rate=rates.get("reset", 0.0),
            silence_s=4.0,
        )
        for name in self.bookie_names:
            self.simulation.node(name).disk_delays.stall_rate = rates.get("stall", 0.0)
        self.simulation.node(METADATA).disk_delays.stall_rate = rates.get("metadata-slow", 0.0)
        self.service.rates = rates

    def go_away(self, name: str) -> None:
        """For good: nobody starts it again."""
        self.gone[name] = None
        self.simulation.crash(name, power_loss=True)

    async def replace(self, name: str) -> None:
        """The disk is lost. An operator says so, and another bookie starts at the address."""
        bookie = self.bookies[name].id
        self.gone[name] = None
        self.simulation.crash(name, power_loss=True)
        self.simulation.add_line(f"fault: {name} loses its disk")
        self.simulation.node(name).disk.delete_everything()
        self.observer.disk_lost(name, bookie)
        while not await self.ask("forget", lambda world, store: _forget(store, bookie)):  # noqa: ASYNC110
            await asyncio.sleep(1.0)  # until its session is over
        del self.gone[name]
        self._restart(name)

    async def ask(self, what: str, work: Callable[[World, MetadataStore], Awaitable[object]]) -> bool:
        """An operator's work in a session of its own; whether it worked."""

        async def ask() -> None:
            world = self.simulation.world(ADMIN)
            session = await self.session(world)
            try:
                await self.call(what, work(world, session))
            finally:
                await session.close()

        try:
            await self.simulation.spawn(ADMIN, ask())
        except (MagnetarError, NodeCrashed, TimeoutError) as error:
            self.simulation.add_line(f"admin: {what} did not work: {error!r}"[:300])
            return False
        self.simulation.add_line(f"admin: {what}")
        return True

    async def heal(self) -> None:
        """Nothing fails any more, and everything is up when this returns."""
        self.healed = True
        self.simulation.add_line("heal: the whole cluster")
        self.simulation.wires.faults = NetworkFaults(latency_s=self.options.latency_s)
        self.simulation.wires.heal_partition()
        self.service.rates, self.service.mute = {}, False
        for node in self.simulation.nodes.values():
            node.disk.cancel_crash()
            node.disk.faults.clear()
            node.disk.capacity_bytes = UNLIMITED_BYTES
            healthy, delays = DiskDelays(), node.disk_delays
            delays.mean_s, delays.stall_rate, delays.stall_s = healthy.mean_s, healthy.stall_rate, healthy.stall_s
            node.skew_ms = 0
            self.simulation.resume(node.name)
        for name in self._starters:
            self._restart(name)
        while self._tasks or not all(
            self.simulation.is_node_running(name) for name in self._starters if name not in self.gone
        ):
            if self._refused is not None:
                raise self._refused
            await asyncio.sleep(0.1)
        for undo in self.on_heal:
            while not await undo():  # noqa: ASYNC110
                await asyncio.sleep(1.0)

    # ------------------------------------------------------------------ brokers
    async def start_brokers(self, count: int) -> None:
        """Those that are in no bookie's process."""
        for number in range(len(self.broker_names), count):
            name = f"broker-{number + 1}"
            self.broker_names.append(name)
            self.add(name, self._start_broker(name, FIRST_BROKER_PORT + number))
        await asyncio.gather(*(self.up(name) for name in self.broker_names if name not in self.hosts))

    @property
    def service_url(self) -> str:
        hosts = [f"127.0.0.1:{FIRST_BROKER_PORT + number}" for number in range(len(self.broker_names))]
        return "magnetar://" + ",".join(hosts)

    @property
    def pulsar_endpoints(self) -> list[Endpoint]:
        """Of the brokers, for clients of Pulsar."""
        return [Endpoint("127.0.0.1", FIRST_PULSAR_PORT + number) for number in range(len(self.broker_names))]

    def owner(self) -> str | None:
        """The node of a living broker that has a topic loaded, if any."""
        for name, broker in self.brokers.items():
            if broker.topics and self.simulation.is_node_running(name):
                return name
        return None

    def _start_broker(self, name: str, port: int) -> Callable[[World], Awaitable[None]]:
        options = self.options
        ensemble, write, ack = options.quorum
        pulsar = Endpoint("127.0.0.1", port - FIRST_BROKER_PORT + FIRST_PULSAR_PORT)
        config = BrokerConfig(
            name=name, listen=Endpoint("127.0.0.1", port), pulsar_listen=pulsar if options.pulsar else None,
            ensemble_size=ensemble, write_quorum=write, ack_quorum=ack,
            roll_entries=options.ledger_entries_max, cursor_roll_entries=options.ledger_entries_max,
            cursor_flush_s=0.5, trim_interval_s=3.0, cache_bytes=options.cache_bytes,
            deduplication=options.deduplication, dedup_snapshot_entries=options.ledger_entries_max,
            dedup_snapshot_s=5, delayed_seal_entries=5, transaction_coordinators=2,
            transaction_half_check_after_s=1.0, transaction_half_pause_s=0.5, transaction_half_pause_s_max=2.0,
            transaction_half_answer_s=2.0, transaction_half_unknown_max=4,
            transaction_half_open_s=random.Random(f"halves {options.seed}").choice((20.0, 3600.0)),
            key_index="keys+properties" if options.filtered else "off",
            share_group=random.Random(f"group {options.seed}").choice(("", "one address")),
        )  # fmt: skip

        async def start(world: World) -> None:
            metadata = await self._broker_session(name, world)
            own = await self.joined(world)
            own = own if self.security is None else self.security.broker(own)
            self.brokers[name] = await Broker.start(own, config, metadata, lambda: self._broker_session(name, world))

        return start


async def _awaited(work: Awaitable[T]) -> T:
    """By its name a task that strikes may cancel (intrusions.py)."""
    return await work


async def _forget(store: MetadataStore, bookie: str) -> None:
    with contextlib.suppress(NotFound):  # an earlier try did it, and its answer was lost
        await identity.delete_bookie(store, bookie)


async def _run(starter: Callable[[World], Awaitable[None]], world: World) -> None:
    await starter(world)
