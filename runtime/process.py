"""A real process: its world, its run and its end.

`make_system_world()` is the one place where the interfaces get their real implementations. `run_process(main)` runs a
program on the fastest available event loop, ends it in order at SIGTERM or SIGINT, and turns its outcome into an exit
code.

The parts of a process are started one after the other, and stopped in the reverse order:

    async with ProcessParts(world.clock) as parts:
        store = await parts.start("metadata", SqliteStore.open(…), SqliteStore.close)
        bookie = await parts.start("bookie", Bookie.start(…), Bookie.close)

When a part does not start, the parts before it are stopped, and the error is raised. Each stop has a deadline; one that
fails or takes too long is logged, and the others are stopped nevertheless. `statistics` has the state of each part, and
the time that its start and its stop took.

Also in this file, below its heading: the system's random source (chance).
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import gc
import logging
import os
import random
import signal
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from ..proto.errors import InvalidRequest, MagnetarError
from .access import NO_CREDENTIALS, OPEN_ACCESS, CallerAccess, ListenerAccess, TlsFiles
from .clock import Clock, ServerClock
from .disk import SystemFiles
from .grpc import client, server
from .network import (
    NO_PEER_KEYS,
    ByteService,
    ByteStream,
    Channel,
    Endpoint,
    KeyPair,
    Peer,
    PeerClientKeys,
    PeerServerKeys,
    PeerService,
    RunningByteServer,
    RunningPeerServer,
    RunningServer,
    World,
)
from .peer import client as peers
from .peer import server as peer_server
from .peer import sockets
from .tasks import SystemWorkers
from .tcp import listening

# -------------------------------------------------------------------------------------------------------- chance
# The system's random source: the kernel's bytes, `RANDOM_BLOCK_BYTES` at a time.
#
# Each question to the kernel is a system call for which the interpreter's lock is given away, and a loop that is busy
# waits for it again: the claims and tokens of a topic that is opened took 20 us each. A process that was forked begins
# with a block of its own. Guarded by tests/runtime/test_chance.py.


RANDOM_BLOCK_BYTES = 4096


class SystemRandomNumbers(random.SystemRandom):
    """Random numbers of the operating system, for use in one thread. `randbytes` reads the bytes in blocks, and returns
    each byte of a block only once."""

    def __init__(self) -> None:
        super().__init__()
        self._block = b""
        self._at = 0
        _ALL.add(self)

    def randbytes(self, n: int) -> bytes:
        end = self._at + n
        if end > len(self._block):
            if n > RANDOM_BLOCK_BYTES:
                return super().randbytes(n)
            self._block, self._at, end = super().randbytes(RANDOM_BLOCK_BYTES), 0, n
        taken, self._at = self._block[self._at : end], end
        return taken

    def reset(self) -> None:
        """Drops the random bytes of the current block that were not used yet. Called in a forked process, so that it
        does not use the same bytes as its parent."""
        self._block, self._at = b"", 0


_ALL: weakref.WeakSet[SystemRandomNumbers] = weakref.WeakSet()


def _forked() -> None:
    for each in _ALL:
        each.reset()


os.register_at_fork(after_in_child=_forked)


# ------------------------------------------------------------------------------------------------------- process


class SystemNetwork:
    """The real implementation of `runtime.network.Network`: gRPC, TCP, and ZeroMQ with one context for all peers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._context = sockets.ZmqContext()

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN_ACCESS
    ) -> RunningServer:
        return await server.serve(endpoint, services, access, self._clock)

    def connect(self, endpoint: Endpoint, access: CallerAccess = NO_CREDENTIALS) -> Channel:
        return client.connect(endpoint, access)

    async def serve_bytes(
        self, endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN_ACCESS
    ) -> RunningByteServer:
        return await listening.serve(endpoint, service, access)

    async def connect_bytes(self, endpoint: Endpoint, tls: TlsFiles | None = None) -> ByteStream:
        return await listening.connect(endpoint, tls)

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerServerKeys | None = None
    ) -> RunningPeerServer:
        return await peer_server.serve(self._context, endpoint, identity, service, access)

    def connect_peer(self, endpoint: Endpoint, identity: bytes, access: PeerClientKeys = NO_PEER_KEYS) -> Peer:
        return peers.ZmqPeer(self._context, self._clock, endpoint, identity, access)

    def generate_keys(self) -> KeyPair:
        return sockets.new_keys()


def make_system_world(seed: int | None = None) -> World:
    """Returns the world of this process (runtime/network.py `World`): the clock, disk, threads and network of the
    operating system. `seed` fixes only the random numbers."""
    rng = random.Random(seed) if seed is not None else SystemRandomNumbers()
    clock = ServerClock()
    return World(clock, rng, SystemFiles(), SystemWorkers(), SystemNetwork(clock))


SWITCH_INTERVAL_S = 0.0005
"""Seconds that a worker which computes (a flush sorts and packs a mebibyte of small entries in 3 ms) keeps the
interpreter while the event loop waits for it: a tenth of CPython's. p99 of adds of 1 KiB, 20,000/s, a bookie that
flushes without a pause, five interleaved pairs on a busy machine: 175/734/133/217/23 ms against 391/63/80/28/14."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_process(
    main: Callable[[], Coroutine[Any, Any, int | None]], stopping: Sequence[signal.Signals] = STOP_SIGNALS
) -> int:
    """Runs the program `main` to its end on a new event loop, and returns its exit code.

    SIGTERM and SIGINT (the signals in `stopping`) cancel `main`, once: its `finally` and `async with` blocks close what
    it opened. A second signal has the system's default effect: it ends the process.

    The exit code is the result of `main` (None: 0), or 0 after SIGTERM and 130 after SIGINT. It is 2 for a wrong
    configuration or request, and 1 for any other MagnetarError, both with one line on stderr. Any other exception is a
    bug and is raised.
    """
    tune_glibc_heap()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_STARTUP_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_until_signal(main, stopping))
    except MagnetarError as error:
        print(f"magnetar: {error.message or type(error).__name__}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1


async def _until_signal(
    main: Callable[[], Coroutine[Any, Any, int | None]], stopping: Sequence[signal.Signals]
) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main())
    stopped_by: list[int] = []

    def stop(number: int) -> None:
        stopped_by.append(number)
        for each in stopping:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        task.cancel()

    for number in stopping:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task or 0
    except asyncio.CancelledError:
        if not stopped_by:
            raise
        return 130 if stopped_by[0] == signal.SIGINT else 0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Returns the function that creates event loops: uvloop's if uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
TRIM_HEAP_BYTES, TRIM_BYTES_MIN = 64 << 20, 8 << 20


def tune_glibc_heap() -> None:
    """Makes glibc take buffers of 128 KiB and more from its heap, instead of calling mmap and munmap for each, which
    takes eight times as long. Up to 64 MiB of free heap stay with the process. Does nothing with another C library, or
    if the user has set MALLOC_*."""
    mallopt = _mallopt()
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, TRIM_HEAP_BYTES)
    mallopt(_M_ARENA_MAX, 2)


def set_heap_trim_threshold(free_bytes: int) -> None:
    """Makes glibc return free heap memory to the system when more than `free_bytes` are free; the number is limited to
    TRIM_BYTES_MIN … TRIM_HEAP_BYTES. Has no effect where `tune_glibc_heap` has none."""
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, max(TRIM_BYTES_MIN, min(free_bytes, TRIM_HEAP_BYTES)))


def _mallopt() -> Callable[[int, int], int] | None:
    if any(name.startswith("MALLOC_") for name in os.environ):
        return None
    try:
        found: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return None
    return found


GC_THRESHOLDS = (100_000, 20, 50)
"""Thresholds of the collector: a server makes few cycles and many short-lived records. With Python's 700 allocations
between two collections they cost a tenth of the throughput (three bookies, 1 KB: 60,600 to 88,800 msg/s; with these
88,000 to 108,500), and of the time of a replay. What is delivered and not acknowledged yet lives through a collection
for nothing: with 20,000 a fiftieth of the server's time under `key-shared` was collections."""

GC_STARTUP_THRESHOLDS = (200_000, 20, 50)
"""Thresholds of the collector until `freeze_objects`: the objects of imported modules stay alive, so collecting them is
useless. It took 17 of the 250 ms of processor time from the start of `magnetar standalone` to its first line."""


def freeze_objects() -> None:
    """Excludes all objects that exist now from garbage collection, and sets the collector's thresholds for a running
    server. Must be called after start-up. Does not collect garbage before: almost no object is garbage then, and the
    search would stop the event loop for 20 ms while the first clients connect."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


# -------------------------------------------------------------------------------------------------------- parts


Part = TypeVar("Part")

STOP_TIMEOUT_S = 10.0
"""Seconds for a part to end in order. Data are safe without it (kill -9 is always possible); the next start is only
slower."""

_PARTS_LOG = logging.getLogger("magnetar.lifecycle")


class ProcessPartState(enum.Enum):
    """The state of one part of a process, such as its broker, after its start. FAILED: its stop failed or took too
    long, or goes on still."""

    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed to stop"


class ProcessPartStatistics:
    """The state of one part of a process, and how many seconds its start and its stop took. `stop_s` is 0 until it has
    stopped."""

    __slots__ = ("name", "start_s", "state", "stop_s")

    def __init__(self, name: str, state: ProcessPartState, start_s: float, stop_s: float) -> None:
        self.name, self.state, self.start_s, self.stop_s = name, state, start_s, stop_s


class _Started:
    __slots__ = ("statistics", "stop", "timeout_s")

    def __init__(
        self, statistics: ProcessPartStatistics, stop: Callable[[], Awaitable[object]], timeout_s: float
    ) -> None:
        self.statistics, self.stop, self.timeout_s = statistics, stop, timeout_s


class ProcessParts:
    """The parts of one process, such as its bookie and its broker, in the order of their start. As a context manager,
    closes itself at the end of the block."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started: list[_Started] = []

    async def start(
        self,
        name: str,
        starting: Awaitable[Part],
        stop: Callable[[Part], Awaitable[object]],
        *,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> Part:
        """Awaits `starting`, which starts the part `name`, and returns its result. Later, `close` calls `stop` with
        this result, and waits for it at most `stop_timeout_s`. If `starting` fails, raises its error, and `stop` is not
        called."""
        began = self._clock.monotonic()
        part = await starting
        statistics = ProcessPartStatistics(name, ProcessPartState.RUNNING, self._clock.monotonic() - began, 0.0)
        self._started.append(_Started(statistics, lambda: stop(part), stop_timeout_s))
        return part

    async def close(self) -> None:
        """Stops the running parts one by one, in the reverse order of their start. A part that fails to stop, or takes
        too long, is logged. Raises nothing except CancelledError, if the caller is cancelled. Parts that were stopped
        before are left out."""
        for started in reversed(self._started):
            if started.statistics.state is ProcessPartState.RUNNING:
                await self._stop(started)

    async def _stop(self, started: _Started) -> None:
        statistics = started.statistics
        statistics.state = ProcessPartState.FAILED  # until it has ended
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(started.timeout_s):
                await started.stop()
            statistics.state = ProcessPartState.STOPPED
        except TimeoutError:
            _PARTS_LOG.error("%s did not stop within %s s", statistics.name, started.timeout_s)
        except Exception:
            _PARTS_LOG.exception("%s failed to stop", statistics.name)
        finally:
            statistics.stop_s = self._clock.monotonic() - began

    def statistics(self) -> list[ProcessPartStatistics]:
        """Returns the state of each part, in the order of their start."""
        return [started.statistics for started in self._started]

    async def __aenter__(self) -> ProcessParts:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
