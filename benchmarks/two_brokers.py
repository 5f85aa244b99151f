"""two-brokers: how many times as many messages a second two brokers carry as one, when brokers are what limits.

Each broker process gets SHARE of one core and is pinned to a core of its own (a control group for the CPU; Linux, as
root); clients, bookies and the metadata have the rest, all with WEIGHT times the claim of other programs. There are two
clusters on this machine, of metadata and three bookies each, whose data is in memory (tmpfs): one with one broker, one
with two. Each has --topics topics (TOPICS) in a namespace with the default number of bundles, placed as they are when
they are first used. A message counts when its consumer has it: that lets its producer send the next one, so publishing
never outruns consuming. The clusters take turns, ROUNDS each, in each of MODES: batches off, and batches of ten.

The value is the smallest ratio of a mode, medians of its rounds. `detail` has for each mode and number of brokers: the
messages a second, the CPU of the brokers per message, the part of its share that each used (`used`; what limits has
0.95 at least), how often it had to wait for it (`throttled`), medians of the rounds, and the cores that the busiest
other process used. `limited` says whether in all of these the brokers used up their shares while no other process used
a whole core.

The load is `python -m benchmarks.two_brokers URL TOPIC…`, a process for each half of the topics. Each line of its stdin
is an order (`MODE NUMBER`: begin, with so many messages of each topic under way; `stop`; `count`), and is answered by a
line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import click

from .harness import Options, Run, progress, read_cpu_s
from .messaging import MEMORY_FOLDER

SHARE = 0.15
"""Of a core, for each broker: with two of them enough is left for what else a message costs."""
PERIOD_US = 20_000
"""A broker that has used up its share waits for the next period."""
WEIGHT = 100
"""Of these groups: without it, brokers on a busy machine would get less than their share, and others would limit."""
TOPICS = 64
NAMESPACE = "public/default"
ROUNDS = 3
SETTLE_S = 3.0
BALANCED_S = 25.0
"""From the first message to the first turn: bundles that move do so before."""
MOUNTS = Path("/proc/mounts")
MODES: dict[str, dict[str, Any]] = {
    "unbatched": {"batching_enabled": False},
    "batches-of-10": {
        "batching_enabled": True, "batching_max_messages": 10, "batching_max_publish_delay_ms": 1000,
    },
}  # fmt: skip
"""Options of the producers. Batches wait until they are full: else a slower broker would get smaller ones."""
IN_FLIGHT = 6400
"""Messages of all topics between their sends and their consumers, for each broker that there is: so each has a queue of
the same length. With three times as many a broker takes half as much CPU again for each, and up to as much again."""
USED_MIN = 0.95


class NoCpuShare(click.ClickException):
    """Raised where a process cannot be given a share of the CPU. The text says why."""


# ------------------------------------------------------------------------------------- shares of the CPU
class CpuShare:
    """A control group whose processes get at most `share` of one core in sum; 0: no limit. `close` removes it, after
    they ended."""

    def __init__(self, name: str, share: float = 0) -> None:
        """Makes the group. Raises NoCpuShare if this system or user may not have it."""
        try:
            version, root = _find_controller()
            self._path = root / f"magnetar-bench-{os.getpid()}-{name}"
            self._path.mkdir()
            limit = round(share * PERIOD_US)
            if version == 2:
                (self._path / "cpu.weight").write_text(str(100 * WEIGHT))
                (self._path / "cpu.max").write_text(f"{limit or 'max'} {PERIOD_US}")
            else:
                (self._path / "cpu.shares").write_text(str(1024 * WEIGHT))
                (self._path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self._path / "cpu.cfs_quota_us").write_text(str(limit or -1))
        except OSError as cause:
            raise NoCpuShare(f"no control group for the CPU can be made here (Linux, as root): {cause}") from cause

    def add(self, pid: int, core: int | None = None) -> None:
        """Moves the process with its threads into the group, and pins all of them to `core` if there is one."""
        (self._path / "cgroup.procs").write_text(str(pid))
        for task in Path(f"/proc/{pid}/task").iterdir() if core is not None else ():
            with suppress(ProcessLookupError):  # a thread that has ended
                os.sched_setaffinity(int(task.name), {core})

    def count_throttled(self) -> tuple[int, int]:
        """Returns in how many periods processes of the group ran, and in how many of them they had to wait."""
        found = dict(line.split() for line in (self._path / "cpu.stat").read_text().splitlines())
        return int(found["nr_periods"]), int(found["nr_throttled"])

    def close(self) -> None:
        with suppress(OSError):  # a process that did not end keeps it
            self._path.rmdir()


def _find_controller() -> tuple[int, Path]:
    """Returns the version of control groups that has the CPU's controller, and the directory of its root group."""
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    for _, path, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            return 1, Path(path)
    for _, path, kind, *_ in mounts:
        root = Path(path)
        if kind == "cgroup2" and "cpu" in (root / "cgroup.controllers").read_text().split():
            (root / "cgroup.subtree_control").write_text("+cpu")
            return 2, root
    raise NoCpuShare("no control groups for the CPU are mounted here")


# ---------------------------------------------------------------------------------------------- the load
class Topic:
    """A producer and a consumer of one topic: some messages are under way, and each that comes sends the next."""

    def __init__(self, counted: Counter[str], body: bytes) -> None:
        self._counted, self._body = counted, body
        self._producer: Any = None
        self.is_loaded = False

    async def open(self, client: Any, name: str) -> asyncio.Task[None]:
        self._consumer = await client.subscribe(name, "load")
        self._producers = {
            mode: await client.create_producer(name, max_pending_messages=4 * IN_FLIGHT, **options)
            for mode, options in MODES.items()
        }
        return asyncio.create_task(self._consume())

    def begin(self, mode: str, in_flight: int) -> None:
        self._producer, self.is_loaded = self._producers[mode], True
        for _ in range(in_flight):
            self._send()

    def _send(self) -> None:
        self._producer.send_nowait(self._body, self._sent)

    def _sent(self, result: Any, _id: Any) -> None:
        self._counted[result.name] += 1
        if result.name != "Ok" and self.is_loaded:
            self._send()

    async def _consume(self) -> None:
        while True:
            message = await self._consumer.receive()
            await self._consumer.acknowledge(message)
            self._counted["received"] += 1
            if self.is_loaded:
                self._send()


async def _load(url: str, size: int, names: Sequence[str]) -> None:
    from magnetar.asyncio import Client

    counted: Counter[str] = Counter()
    loop = asyncio.get_running_loop()
    async with Client(url) as client:
        topics = [Topic(counted, bytes(size)) for _ in names]
        tasks = [await topic.open(client, name) for topic, name in zip(topics, names, strict=True)]
        print("{}", flush=True)
        while order := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            for each in tasks:
                if each.done():
                    each.result()  # its error ends the process
            for topic in topics:
                if order == "stop":
                    topic.is_loaded = False
                elif order != "count":
                    mode, in_flight = order.split()
                    topic.begin(mode, int(in_flight))
            print(json.dumps({"at": time.perf_counter(), "cpu": time.process_time(), **counted}), flush=True)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Loader:
    """A process that loads some topics of a cluster."""

    def __init__(self, url: str, size: int, topics: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.two_brokers", url, str(size), *topics],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a load ended, exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def order(self, order: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# ------------------------------------------------------------------------------------------- the clusters
class Turn(NamedTuple):
    """What a cluster did in one turn. `used`: the part of its share that each broker used."""

    rate: float
    broker_cpu_us: float
    used: list[float]
    throttled: list[float]
    busiest_other: float
    errors: int


class Loaded:
    """A cluster whose brokers have shares of the CPU, and the processes that load it."""

    def __init__(self, cluster: Any, shares: list[CpuShare], loaders: list[Loader], topics: int) -> None:
        self.cluster, self._shares, self._loaders = cluster, shares, loaders
        self._in_flight = max(1, IN_FLIGHT * len(shares) // topics)
        self._others = [cluster.metadata.pid, *(each.pid for each in (*cluster.bookies, *loaders))]

    def order(self, order: str) -> list[dict[str, Any]]:
        return [each.order(order) for each in self._loaders]

    def _read(self) -> tuple[Any, ...]:
        return (
            time.perf_counter(), [read_cpu_s(each.pid) for each in self.cluster.brokers],
            [each.count_throttled() for each in self._shares], [read_cpu_s(pid) for pid in self._others],
            self.order("count"),
        )  # fmt: skip

    def measure(self, mode: str, seconds: float, settle_s: float) -> Turn:
        """Loads the cluster in this mode; what it does in `seconds`, after it settled."""
        self.order(f"{mode} {self._in_flight}")
        time.sleep(settle_s)
        at, brokers, waits, others, counts = self._read()
        time.sleep(seconds)
        at1, brokers1, waits1, others1, counts1 = self._read()
        self.order("stop")
        took = at1 - at
        cpu = [b - a for a, b in zip(brokers, brokers1, strict=True)]
        got = [(b.get("received", 0) - a.get("received", 0)) / (b["at"] - a["at"])
               for a, b in zip(counts, counts1, strict=True)]  # fmt: skip
        return Turn(
            sum(got), sum(cpu) / took / max(1e-9, sum(got)) * 1e6, [each / took / SHARE for each in cpu],
            [(b[1] - a[1]) / max(1, b[0] - a[0]) for a, b in zip(waits, waits1, strict=True)],
            max(b - a for a, b in zip(others, others1, strict=True)) / took, _errors(counts1) - _errors(counts),
        )  # fmt: skip


def _errors(counts: list[dict[str, Any]]) -> int:
    return sum(
        number for each in counts for name, number in each.items() if name not in ("at", "cpu", "Ok", "received")
    )


@contextmanager
def _loaded(brokers: int, topics: int, size: int) -> Iterator[Loaded]:
    from magnetar.cli.common.processes import Cluster

    with ExitStack() as stack:
        folder = MEMORY_FOLDER if os.path.isdir(MEMORY_FOLDER) else None
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="magnetar-bench-", dir=folder, ignore_cleanup_errors=True)
        )
        shares = [CpuShare(f"{brokers}-{number}", SHARE if number else 0) for number in range(brokers + 1)]
        for each in shares:
            stack.callback(each.close)
        rest, *shares = shares
        cluster = stack.enter_context(Cluster(Path(directory), bookies=3, brokers=brokers))
        cores = sorted(os.sched_getaffinity(0))
        for number, (share, broker) in enumerate(zip(shares, cluster.brokers, strict=True)):
            share.add(broker.pid, cores[number % len(cores)])
        names = [f"persistent://{NAMESPACE}/load-{number}" for number in range(topics)]
        loaders = []
        for half in (names[::2], names[1::2]):
            loaders.append(Loader(cluster.url, size, half))
            stack.callback(loaders[-1].close)
        for loader in loaders:
            loader.read()
        for process in (cluster.metadata, *cluster.bookies, *loaders):
            rest.add(process.pid)
        yield Loaded(cluster, shares, loaders, topics)


async def _placed(url: str, topics: int) -> dict[str, Any]:
    """Where the topics and their bundles are, and how many bundles moved since the start."""
    from magnetar.admin import AdminClient
    from magnetar.broker.cluster.bundles_core import compute_bundle_number
    from magnetar.broker.common.config import BrokerConfig

    bundles = BrokerConfig().namespace_bundles
    async with AdminClient(url) as admin:
        names = [f"persistent://{NAMESPACE}/load-{number}" for number in range(topics)]
        owners = {name: (await admin.owner(name)).rpartition("/")[2] for name in names}
        moves = (await admin.balance_status()).moves
    owned = {(compute_bundle_number(name, bundles), owner) for name, owner in owners.items()}
    return {
        "topics": sorted(Counter(owners.values()).values()), "moves": moves,
        "bundles": sorted(Counter(owner for _, owner in owned).values()),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ the benchmark
def two_brokers(options: Options) -> Run:
    """The ratio of two brokers' messages a second to one broker's. Raises NoCpuShare where a broker cannot be given a
    share of the CPU."""
    topics = options.extra.get("topics", TOPICS)
    turns: dict[str, dict[int, list[Turn]]] = {mode: {1: [], 2: []} for mode in MODES}
    placed: list[dict[str, Any]] = []
    with _loaded(1, topics, options.size) as one, _loaded(2, topics, options.size) as two:
        two.measure("unbatched", options.at_most(BALANCED_S), 0.0)
        placed.append(asyncio.run(_placed(two.cluster.url, topics)))
        for _ in range(1 if options.rehearses else ROUNDS):
            for mode, found in turns.items():
                for number, cluster in ((1, one), (2, two)):
                    turn = cluster.measure(mode, options.seconds, options.at_most(SETTLE_S))
                    progress(f"two-brokers: {mode}, {number}: {turn}")
                    found[number].append(turn)
        placed.append(asyncio.run(_placed(two.cluster.url, topics)))
    return _summary(turns, placed)


def _medians(rounds: list[list[float]]) -> list[float]:
    return [round(statistics.median(column), 3) for column in zip(*rounds, strict=True)]


def _summary(turns: dict[str, dict[int, list[Turn]]], placed: list[dict[str, Any]]) -> Run:
    every = [turn for found in turns.values() for each in found.values() for turn in each]
    ratios = {
        mode: statistics.median(b.rate / max(1e-9, a.rate) for a, b in zip(found[1], found[2], strict=True))
        for mode, found in turns.items()
    }
    detail: dict[str, Any] = {mode: {"ratio": round(ratios[mode], 3)} for mode in turns}
    for mode, found in turns.items():
        for number, each in found.items():
            detail[mode][f"{number}"] = {
                "msg_per_s": round(statistics.median(turn.rate for turn in each)),
                "broker_cpu_us": round(statistics.median(turn.broker_cpu_us for turn in each), 1),
                "used": _medians([turn.used for turn in each]),
                "throttled": _medians([turn.throttled for turn in each]),
                "busiest_other": round(max(turn.busiest_other for turn in each), 2),
            }
    used = min(part for mode in turns for number in ("1", "2") for part in detail[mode][number]["used"])
    detail |= {
        "share": SHARE, "errors": sum(turn.errors for turn in every), "placed": placed[0], "placed_at_end": placed[-1],
        "limited": used >= USED_MIN and max(turn.busiest_other for turn in every) < USED_MIN,
    }  # fmt: skip
    return Run(round(min(ratios.values()), 3), detail=detail)


if __name__ == "__main__":
    asyncio.run(_load(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
