"""A whole cluster in one process, on virtual time, from one seed.

    simulation = Simulation(seed=17)
    async def main() -> int:
        bookie = await simulation.spawn("b1", start_bookie(simulation.world("b1")))
        simulation.crash("b1", power_loss=True)
        bookie = await simulation.spawn("b1", start_bookie(simulation.world("b1")))  # restarted
        …
    simulation.run(main())
    print(simulation.trace_hash, simulation.virtual_seconds)

A *node* is a machine: a name, a disk, a clock. A *process* runs on a node, from `world(node)` (if there is none) to
`crash(node)`. Code belongs to the process in whose context it runs: start everything of a node with `spawn`. It returns
a future of the caller, which fails with `NodeCrashed` when the process dies first. Tasks that the process starts, and
functions of it that the network calls, belong to the process too, and take no step after its death.

Chance: every purpose has its own random generator derived from the seed (`random_generator`), so that one more draw in
one place does not change another. The same seed gives the same `trace_hash`; anything else is a bug of the code under
test (order of a set, `id`, a clock, a thread) or of this package.

Also in this file, below its heading: a simulated process' network (network).
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...proto.errors import MagnetarError
from ..access import NO_CREDENTIALS, OPEN_ACCESS, CallerAccess, ListenerAccess, TlsFiles
from ..clock import Clock
from ..network import NO_PEER_KEYS, ByteService, Endpoint, KeyPair, PeerClientKeys, PeerServerKeys, PeerService, World
from . import peers
from .disk import DeadProcess, SimDisk, SimFiles, SimulatedDeath
from .loop import CURRENT_PROCESS, DiskDelays, SimTask, SimTrace, SimWorkers, VirtualLoop
from .peers import SimPeer, SimPeerServer
from .rpc import RunningSimServer, SimChannel
from .wires import RunningSimByteServer, SimByteStream, SimConnections

# ------------------------------------------------------------------------------------------------------- network
# A simulated process' network (`runtime.network.Network`): gRPC, peers and bytes over the simulation's cables.
#
# There is no TLS: every connection counts as encrypted, and no caller has a certificate.


class SimNetwork:
    """The network of a simulated process; implements `runtime.network.Network`. Every method raises DeadProcess when
    the process is dead. There is no TLS."""

    def __init__(
        self, wires: SimConnections, owner: SimProcess, clock: Clock, is_alive: Callable[[], bool], rng: random.Random
    ) -> None:
        self._wires = wires
        self._owner = owner
        self._clock = clock
        self._is_alive = is_alive
        self._rng = rng

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN_ACCESS
    ) -> RunningSimServer:
        self._check()
        return RunningSimServer(self._wires, self._owner, endpoint, services, access.guard, self._clock)

    def connect(self, endpoint: Endpoint, access: CallerAccess = NO_CREDENTIALS) -> SimChannel:
        self._check()
        return SimChannel(self._wires, self._owner, endpoint, access.authorization)

    async def serve_bytes(
        self, endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN_ACCESS
    ) -> RunningSimByteServer:
        self._check()
        return RunningSimByteServer(self._wires, self._owner, endpoint, service, access.guard)

    async def connect_bytes(self, endpoint: Endpoint, tls: TlsFiles | None = None) -> SimByteStream:
        self._check()
        return SimByteStream(await self._wires.open_connection(self._owner, endpoint))

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerServerKeys | None = None
    ) -> SimPeerServer:
        self._check()
        return SimPeerServer(self._wires, self._owner, endpoint, identity, service, access)

    def connect_peer(self, endpoint: Endpoint, identity: bytes, access: PeerClientKeys = NO_PEER_KEYS) -> SimPeer:
        self._check()
        return SimPeer(self._wires, self._owner, endpoint, identity, access)

    def generate_keys(self) -> KeyPair:
        self._check()
        return peers.new_keys(self._rng)

    def _check(self) -> None:
        if not self._is_alive():
            raise DeadProcess("network of a dead process")


# --------------------------------------------------------------------------------------------------------- world


T = TypeVar("T")

EPOCH_MS = 1_700_000_000_000
"""The wall clock of every node when a simulation starts."""

UPTIMES_S = (0, 60, 86_400, 100_000_000)
"""Seconds that a host has been up, at most one of these, up to three years. The origin of a monotonic clock has no
other meaning, and no two origins agree: those of two nodes, or of `loop.time()` and `clock.monotonic()` of one."""


def random_boot_uptime_s(rng: random.Random) -> float:
    """Returns a random uptime in seconds, at which the monotonic clock of a simulated machine starts."""
    return float(rng.randint(0, rng.choice(UPTIMES_S)))


class NodeCrashed(Exception):
    """Raised to the caller of `Simulation.spawn` when the process died before its work was done."""


class SimClock:
    """The clocks of a simulated node. The wall clock differs from the true time by the node's skew; the monotonic clock
    counts from the node's boot."""

    def __init__(self, loop: VirtualLoop, node: SimNode) -> None:
        self._loop = loop
        self._node = node

    def wall_ms(self) -> int:
        return EPOCH_MS + self._node.skew_ms + int(self._loop.elapsed_s * 1000)

    def monotonic(self) -> float:
        return self._loop.elapsed_s - self._node.booted_s


@dataclass(slots=True)
class SimNode:
    """A simulated machine. Its processes run one after the other. `skew_ms`: by how much its wall clock differs from
    the true time. `lives`: how many processes were started on it. `process`: the last one."""

    name: str
    disk: SimDisk
    disk_delays: DiskDelays = field(default_factory=DiskDelays)
    skew_ms: int = 0
    booted_s: float = 0.0
    """The simulation's time at which its monotonic clock was 0; a power loss sets it anew."""
    lives: int = 0
    process: SimProcess | None = None


class SimProcess:
    """A simulated process on a node, from its start to its death. `held`: the steps that wait while the process is
    paused; None: it is not paused. `life`: its number among the processes of its node, from 1."""

    def __init__(self, simulation: Simulation, node: SimNode) -> None:
        node.lives += 1
        self.alive = True
        self._simulation = simulation
        self.held: list[asyncio.Handle] | None = None
        self.node = node.name
        self.life = node.lives
        self.context = contextvars.Context()
        self.context.run(CURRENT_PROCESS.set, self)
        self._tasks: list[SimTask[Any]] = []
        self._prune_at = 64
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        name = f"{node.name}/{self.life}"
        files = SimFiles(node.disk, on_death=simulation._on_death(node.name), is_alive=self.is_alive)
        clock = SimClock(simulation.loop, node)
        self.world = World(
            clock=clock,
            rng=simulation.random_generator(f"process {name}"),
            files=files,
            workers=SimWorkers(simulation.random_generator(f"workers {name}"), node.disk_delays, self.is_alive),
            network=SimNetwork(simulation.wires, self, clock, self.is_alive,
            simulation.random_generator(f"keys {name}")),
        )

    def is_alive(self) -> bool:
        """Returns whether the process was not ended and has not crashed."""
        return self.alive

    @property
    def tasks(self) -> list[SimTask[Any]]:
        """Returns the tasks of this process, in the order in which they were created. Some of them may have ended."""
        return self._tasks

    def adopt_task(self, task: SimTask[Any]) -> None:
        """Makes the task one of this process: it takes no step after the process has died, and its coroutine is closed
        after the run."""
        self._tasks.append(task)
        if self._simulation.on_task is not None:
            self._simulation.on_task(self.node, task)
        if len(self._tasks) >= self._prune_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._prune_at = 64 + 2 * len(self._tasks)

    def fail_when_process_dies(self, future: asyncio.Future[Any]) -> None:
        """Arranges that `future` fails with NodeCrashed if this process dies before the future is done."""
        self._waiting[id(future)] = future
        future.add_done_callback(lambda done: self._waiting.pop(id(done), None))

    def end_process(self, reason: str) -> None:
        """Ends the process at once, without running any of its code. Futures of `fail_when_process_dies` fail with
        NodeCrashed."""
        self.alive = False
        self.held = None
        waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            if not future.done():
                future.set_exception(NodeCrashed(f"{self.node}: {reason}"))
                future.exception()  # the caller need not wait

    def end_tasks(self) -> None:
        """Closes the coroutines that are left after the run. Their `finally` blocks run now, but cannot change anything
        any more."""
        self.alive = False
        for task in self._tasks:
            _end_task(task)


class Simulation:
    """A simulated cluster; see the head of this module. `show`: a function that is called with each line of the trace;
    with `details`, also with lines about single messages and disk operations. `steps_max` and `seconds_max` (virtual)
    limit the run; beyond them it raises SimulationLimitExceeded."""

    def __init__(
        self,
        seed: int,
        *,
        show: Callable[[str], None] | None = None,
        details: bool = True,
        steps_max: int = 20_000_000,
        seconds_max: float = 1e5,
    ) -> None:
        self.seed = seed
        self.trace = SimTrace(show, details=details)
        self.loop = VirtualLoop(
            self.trace,
            steps_max=steps_max,
            seconds_max=seconds_max,
            origin_s=random_boot_uptime_s(self.random_generator("clock")),
        )
        self.loop.set_exception_handler(self._complain)
        self.wires = SimConnections(self.loop, self.trace, self.random_generator("network"))
        self.nodes: dict[str, SimNode] = {}
        self.complaints: list[str] = []
        """Messages that asyncio would have logged: unretrieved exceptions of processes that were alive."""
        self.on_crash: list[Callable[[str, bool], None]] = []
        """Called at every death of a process: (node, whether the machine lost power). For observers."""
        self.on_task: Callable[[str, SimTask[Any]], None] | None = None
        """Called for every task that a process makes: (node, task)."""
        self._ended: list[SimProcess] = []
        self._crash_rng = self.random_generator("crashes")
        self._over = False

    # ------------------------------------------------------------------ the two clocks of a run
    @property
    def trace_hash(self) -> str:
        """The hash of the trace of the run: equal for equal seeds."""
        return self.trace.hash

    @property
    def virtual_seconds(self) -> float:
        """The virtual time since the start, in seconds."""
        return self.loop.elapsed_s

    def random_generator(self, purpose: str) -> random.Random:
        """Returns a new random generator for this purpose. Its numbers depend on the seed and the purpose alone, so two
        generators of one purpose return the same numbers."""
        return random.Random(f"{self.seed}/{purpose}")

    def add_line(self, text: str) -> None:
        """Adds a line of text to the trace."""
        self.trace.add_line(self.loop.elapsed_s, text)

    # ------------------------------------------------------------------ nodes
    def node(self, name: str) -> SimNode:
        """Returns the machine of this name; creates it at its first use."""
        if name not in self.nodes:
            node = self.nodes[name] = SimNode(
                name, SimDisk(), booted_s=-random_boot_uptime_s(self.random_generator(f"clock {name}"))
            )
            trace, loop = self.trace, self.loop
            node.disk.record = lambda op: trace.add_detail(
                loop.elapsed_s, f"{name} disk {op.kind} {op.path} {op.offset} {len(op.data) or op.size}"
            )
        return self.nodes[name]

    def is_node_running(self, name: str) -> bool:
        """Returns whether a process runs on the machine."""
        process = self.node(name).process
        return process is not None and process.alive

    def world(self, name: str) -> World:
        """Returns the world of the process that runs on the node `name`. Starts a process if none is running."""
        return self._process(name).world

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Runs the coroutine in the process of the node `name`, which is started if none is running. Returns a future
        of the result. The future belongs to the caller; it fails with NodeCrashed if the process dies first."""
        return self.spawn_in_process(self._process(name), coroutine)

    def spawn_in_process(self, process: SimProcess, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Runs the coroutine in the given process, and returns a future of its result, like `spawn`; the future gets
        NodeCrashed if the process dies before. The process may be one that `start_second_process` returned."""
        outer: asyncio.Future[T] = self.loop.create_future()
        process.fail_when_process_dies(outer)
        task = self.loop.create_task(coroutine, context=process.context.copy())
        here = contextvars.copy_context()
        task.add_done_callback(lambda done: _pass_on(done, outer), context=here)
        return outer

    def start_second_process(self, name: str) -> SimProcess:
        """Starts and returns a second process on the node. `crash` and `pause` do not affect this process; it lives
        until `end_process`.
        """
        return SimProcess(self, self.node(name))

    def end_process(self, process: SimProcess) -> None:
        """Kills a process that `start_second_process` returned, as `kill -9` does. The process must hold no locks,
        because they would stay. Does nothing if the process is dead."""
        if process.alive:
            process.end_process("killed")
            self._ended.append(process)
            self.wires.on_process_died(process, silent=False)

    def crash(self, name: str, *, power_loss: bool = False) -> None:
        """Kills the process of a node, as `kill -9` does. Does nothing if none is running. With `power_loss` the
        machine stops too, and data that was not synced is lost, in part or completely."""
        node = self.node(name)
        process = node.process
        if process is None or not process.alive:
            return
        reason = "power loss" if power_loss else "killed"
        self.add_line(f"fault: {name} {reason}")
        node.process = None
        process.end_process(reason)
        self._ended.append(process)
        self.wires.on_process_died(process, silent=power_loss)
        if power_loss:
            node.disk.on_power_lost(self._crash_rng)
            node.booted_s = self.loop.elapsed_s
        else:
            node.disk.on_process_died()
        for told in self.on_crash:
            told(name, power_loss)

    def crash_at(self, name: str, operations: int, *, power_loss: bool = False) -> None:
        """Arranges that the process of a node crashes just before its `operations`-th disk operation from now. With
        `power_loss`, its machine loses power at that moment."""

        def strike() -> None:
            self.crash(name, power_loss=power_loss)
            raise SimulatedDeath(f"{name}: crashed at a disk operation")

        self.node(name).disk.crash_at_operation(operations, strike)

    def pause(self, name: str) -> bool:
        """Pauses the process of a node, as SIGSTOP does, and returns True: until `resume` the process runs no code, and
        messages to it wait. Returns False if there is no process, or if it is paused already."""
        process = self.node(name).process
        if process is None or process.held is not None:
            return False
        self.add_line(f"fault: {name} is stopped")
        process.held = []
        return True

    def resume(self, name: str) -> None:
        """Continues the paused process of a node, as SIGCONT does. Timers that were due during the pause run now, late.
        Does nothing if it is not paused."""
        process = self.node(name).process
        if process is not None and process.held is not None:
            self.add_line(f"{name} goes on")
            held, process.held = process.held, None
            self.loop.schedule_held_steps(held)

    # ------------------------------------------------------------------ the run
    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine `main`, which belongs to no node, to its end, and returns its result or raises its error.
        Then closes everything. May be called once for each simulation. Raises Deadlock if nothing can run any more,
        SimulationLimitExceeded beyond the limits of the simulation."""
        assert not self._over, "a simulation runs once"
        collecting = gc.isenabled()
        gc.disable()  # collecting cycles runs finalisers at moments that depend on the history of the whole process
        chance = random.getstate()
        random.seed(f"{self.seed}/module")  # a library that uses the module's generator gets the same numbers again
        try:
            return self.loop.run_until_complete(main)
        finally:
            self._over = True
            self.trace.end_trace()
            self._close()
            random.setstate(chance)
            if collecting:
                gc.enable()

    def _close(self) -> None:
        for node in self.nodes.values():
            if node.process is not None:
                self._ended.append(node.process)
                node.process = None
        for process in self._ended:
            process.alive = False
        for process in self._ended:
            process.end_tasks()
        for task in sorted(asyncio.all_tasks(self.loop), key=_serial):
            _end_task(task)
        self._ended.clear()
        self.loop.close()

    # ------------------------------------------------------------------ inside
    def _process(self, name: str) -> SimProcess:
        assert not self._over, "the simulation is over"
        node = self.node(name)
        if node.process is None or not node.process.alive:
            node.process = SimProcess(self, node)
            self.add_line(f"{name} starts, life {node.lives}")
        return node.process

    def _on_death(self, name: str) -> Callable[[str], None]:
        def died(reason: str) -> None:
            self.add_line(f"{name} dies: {reason}")
            self.crash(name)

        return died

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._over or isinstance(error, SimulatedDeath | DeadProcess):
            return
        task = context.get("task") or context.get("future")
        process = task.process if isinstance(task, SimTask) else None
        if process is not None and not process.alive:
            return
        text = f"{context.get('message')}: {error!r} {task!r}"
        self.complaints.append(text)


def _serial(task: asyncio.Task[Any]) -> int:
    return task.serial if isinstance(task, SimTask) else 0


def _pass_on(done: asyncio.Future[T], outer: asyncio.Future[T]) -> None:
    if outer.done():
        if not done.cancelled():
            done.exception()
    elif done.cancelled():
        outer.cancel()
    elif (error := done.exception()) is not None:
        if isinstance(error, SimulatedDeath | DeadProcess):
            error = NodeCrashed(str(error))
        outer.set_exception(error)
    else:
        outer.set_result(done.result())


def _end_task(task: asyncio.Task[Any]) -> None:
    if task.done():
        if not task.cancelled():
            task.exception()
        return
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine: Any = task.get_coro()
    try:
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:  # it ends with what it would have awaited
            for each in coroutine.cr_frame.f_locals.values():
                if inspect.iscoroutine(each):
                    each.close()
        coroutine.close()
    except (Exception, DeadProcess, SimulatedDeath, MagnetarError, GeneratorExit):
        return  # its cleanup used a dead world, and must fail
