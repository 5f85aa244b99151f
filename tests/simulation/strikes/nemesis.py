"""What goes wrong, and when: the strikes that a seed plans, carried out while the load runs.

A strike has a name (kill-bookie#2), a time, and a random stream of its own, so that leaving one out (shrink.py) leaves
the others what they are. `Cluster.struck` says which happened. How each kind strikes: network and processes here, disks
in disks.py, strangers and cancelled tasks in intrusions.py, the rest in operations.py; all ends with `Cluster.heal`.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from magnetar.metadata.paths import RACKS
from magnetar.metadata.records import OPEN, RacksRecord
from magnetar.metadata.store import MetadataStore, put_record
from magnetar.runtime.network import World
from tests.simulation.cluster import ADMIN, CLIENT, METADATA, SESSION_TIMEOUT_S, Cluster
from tests.simulation.strikes.disks import DISKS
from tests.simulation.strikes.intrusions import INTRUSIONS
from tests.simulation.strikes.operations import OPERATIONS

WRITER = "writer"
FLAPS = 5


class Strike(NamedTuple):
    at: float
    kind: str
    name: str  # kind and number
    rng: random.Random


def plan(cluster: Cluster) -> list[Strike]:
    """By time. The same strikes whatever else is planned."""
    options = cluster.options
    found: list[Strike] = []
    for kind, count in options.times.items():
        for number in range(1, count + 1):
            name = f"{kind}#{number}"
            rng = cluster.simulation.random_generator(f"strike {name}")
            found.append(Strike(rng.uniform(0.0, options.seconds), kind, name, rng))
    return sorted(found, key=lambda strike: (strike.at, strike.name))


class Nemesis:
    """`run` returns when the phase with faults is over; then the cluster may be healed. `only`: strikes by name."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._simulation = cluster.simulation

    async def run(self) -> None:
        cluster, loop = self._cluster, self._simulation.loop
        cluster.harm()
        start = loop.time()
        for strike in plan(cluster):
            if cluster.only is not None and strike.name not in cluster.only:
                continue
            await asyncio.sleep(max(0.0, start + strike.at - loop.time()))
            self._simulation.add_line(f"strike {strike.name}")
            cluster.struck[strike.name] = round(loop.elapsed_s, 6)
            STRIKES[strike.kind](cluster, strike.rng)
        await asyncio.sleep(max(0.0, start + cluster.options.seconds - loop.time()))


# ---------------------------------------------------------------------------------- who
def _pair(cluster: Cluster, rng: random.Random) -> tuple[str, str]:
    """Two nodes that talk to each other."""
    topics = cluster.options.kind != "ledgers"
    callers = [*cluster.broker_names, *cluster.bookie_names] + ([CLIENT] if topics else [WRITER])
    source = rng.choice(callers)
    if source == CLIENT:
        return source, rng.choice(cluster.broker_names)
    targets = [METADATA, *cluster.bookie_names]
    return source, rng.choice([name for name in targets if name != source])


def _down(cluster: Cluster, rng: random.Random) -> float:
    return min(rng.expovariate(1.0 / cluster.options.down_s), 4 * cluster.options.down_s) + 0.05


def _owner(cluster: Cluster, rng: random.Random) -> str:
    return cluster.owner() or rng.choice(cluster.broker_names)


def _bookie(cluster: Cluster, rng: random.Random) -> str:
    return rng.choice(cluster.bookie_names)


def _written(cluster: Cluster, rng: random.Random) -> str:
    """One that a ledger is written to, if any."""
    for record in reversed(cluster.observer.records.values()):
        if record.state == OPEN:
            nodes = [cluster.observer.node_of.get(bookie, "") for bookie in record.fragments[-1].bookies]
            return rng.choice([name for name in nodes if name in cluster.bookie_names] or cluster.bookie_names)
    return _bookie(cluster, rng)


# ---------------------------------------------------------------------------------- network
def _cut(cluster: Cluster, rng: random.Random) -> None:
    cluster.simulation.wires.cut_connections(*_pair(cluster, rng))


def _half_open(cluster: Cluster, rng: random.Random) -> None:
    cluster.simulation.wires.make_half_open(*_pair(cluster, rng), noticed_s=10.0)


def _partition(cluster: Cluster, rng: random.Random) -> None:
    source, target = _pair(cluster, rng)
    cluster.simulation.wires.partition_nodes(source, target)
    cluster.later(_down(cluster, rng), cluster.simulation.wires.heal_partition, source, target)


def _one_way(cluster: Cluster, rng: random.Random) -> None:
    source, target = _pair(cluster, rng)
    if rng.random() < 0.5:
        source, target = target, source
    cluster.simulation.wires.partition_nodes(source, target, both=False)
    cluster.later(_down(cluster, rng), cluster.simulation.wires.heal_partition, source, target)


def _isolate(cluster: Cluster, rng: random.Random) -> None:
    _cut_off(cluster, rng.choice([*cluster.bookie_names, *cluster.broker_names]), _down(cluster, rng))


def _cut_off(cluster: Cluster, name: str, seconds: float) -> None:
    nodes = [METADATA, CLIENT, WRITER, "rival", "tail", ADMIN, *cluster.bookie_names, *cluster.broker_names]
    for other in nodes:
        if other != name:
            cluster.simulation.wires.partition_nodes(name, other)
            cluster.later(seconds, cluster.simulation.wires.heal_partition, name, other)


def _flap(cluster: Cluster, rng: random.Random) -> None:
    source, target = _pair(cluster, rng)
    for number in range(FLAPS):
        at = number * 0.6
        cluster.later(at, cluster.simulation.wires.partition_nodes, source, target)
        cluster.later(at + 0.1 + 0.4 * rng.random(), cluster.simulation.wires.heal_partition, source, target)


def _clog(cluster: Cluster, rng: random.Random) -> None:
    source, target = _pair(cluster, rng)
    cluster.simulation.wires.delay_messages(source, target, rng.uniform(0.05, 1.0))
    cluster.later(_down(cluster, rng), cluster.simulation.wires.delay_messages, source, target, 0.0)


def _metadata_down(cluster: Cluster, rng: random.Random) -> None:
    _cut_off(cluster, METADATA, min(_down(cluster, rng), 3 * SESSION_TIMEOUT_S))


def _unheard(cluster: Cluster, rng: random.Random) -> None:
    """Beyond its session, and all the while the node is told of changes: what it hears is no proof that it is heard."""
    name = rng.choice([*cluster.bookie_names, *cluster.broker_names])
    cluster.simulation.wires.partition_nodes(name, METADATA, both=False)
    seconds = SESSION_TIMEOUT_S * rng.uniform(1.1, 2.5)
    cluster.later(seconds, cluster.simulation.wires.heal_partition, name, METADATA)

    async def change() -> None:
        for number in range(int(seconds / 0.4)):
            if cluster.healed:
                return
            await cluster.ask("racks", partial(_write_racks, number))
            await asyncio.sleep(0.4)

    cluster.background(change())


async def _write_racks(number: int, world: World, store: MetadataStore) -> None:
    await put_record(store, RACKS, RacksRecord(racks={f"busy-{number % 2}": "/r0"}))


def _mute(cluster: Cluster, rng: random.Random) -> None:
    """Whoever writes now has to find out what became of it; a dead bookie makes writers of ledgers write. Before it
    dies the others fall behind it: what it acknowledged alone is worth nothing when another takes its place."""
    cluster.simulation.add_line("fault: the metadata does not answer to commits")
    cluster.service.mute = True

    def speak() -> None:
        cluster.service.mute = False
        cluster.simulation.add_line("the metadata answers again")

    cluster.later(rng.uniform(1.0, 2 * SESSION_TIMEOUT_S), speak)
    if rng.random() < 0.7:
        dies, writers = _written(cluster, rng), cluster.broker_names or [WRITER]
        for writer, name in itertools.product(writers, cluster.bookie_names):
            if name != dies:
                cluster.simulation.wires.delay_messages(writer, name, 0.8)
                cluster.later(3.0, cluster.simulation.wires.delay_messages, writer, name, 0.0)
        cluster.later(rng.uniform(0.0, 1.0), cluster.simulation.crash, dies)


# ---------------------------------------------------------------------------------- processes
def _kill_bookie(cluster: Cluster, rng: random.Random) -> None:
    cluster.simulation.crash(_bookie(cluster, rng))


def _kill_broker(cluster: Cluster, rng: random.Random) -> None:
    cluster.simulation.crash(_owner(cluster, rng))


def _unplug_broker(cluster: Cluster, rng: random.Random) -> None:
    cluster.simulation.crash(_owner(cluster, rng), power_loss=True)


def _kill_writer(cluster: Cluster, rng: random.Random) -> None:
    cluster.simulation.crash(WRITER)


def _crash_at_operation(cluster: Cluster, rng: random.Random) -> None:
    power_loss = rng.random() < 0.5
    cluster.simulation.crash_at(_bookie(cluster, rng), rng.randint(1, 60), power_loss=power_loss)


def _power_bookie(cluster: Cluster, rng: random.Random) -> None:
    cluster.simulation.crash(_bookie(cluster, rng), power_loss=True)


def _blackout(cluster: Cluster, rng: random.Random) -> None:
    for name in (*cluster.bookie_names, *cluster.broker_names):
        cluster.simulation.crash(name, power_loss=True)


def _stand_still(cluster: Cluster, name: str, rng: random.Random) -> None:
    if cluster.simulation.pause(name):
        seconds = rng.choice((_down(cluster, rng), SESSION_TIMEOUT_S * rng.uniform(1.1, 3.0)))
        cluster.later(seconds, cluster.simulation.resume, name)


def _pause_bookie(cluster: Cluster, rng: random.Random) -> None:
    _stand_still(cluster, _bookie(cluster, rng), rng)


def _pause_broker(cluster: Cluster, rng: random.Random) -> None:
    _stand_still(cluster, _owner(cluster, rng), rng)


def _pause_client(cluster: Cluster, rng: random.Random) -> None:
    _stand_still(cluster, CLIENT, rng)


def _pause_writer(cluster: Cluster, rng: random.Random) -> None:
    _stand_still(cluster, WRITER, rng)


def _clean_stop(cluster: Cluster, rng: random.Random) -> None:
    cluster.background(cluster.stop(_bookie(cluster, rng)))


def _renew_bookie(cluster: Cluster, rng: random.Random) -> None:
    name, slower, pause_s = rng.choice(list(cluster.hosts)), rng.choice((1, 100, 400)), rng.choice((0.0, 0.5, 3.0))
    cluster.background(cluster.renew_bookie(name, slower, pause_s))


def _rolling_restart(cluster: Cluster, rng: random.Random) -> None:
    async def roll() -> None:
        for name in (*cluster.bookie_names, *cluster.broker_names):
            if cluster.healed:
                return
            await cluster.stop(name)
            while not cluster.simulation.is_node_running(name) and name not in cluster.gone:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    cluster.background(roll())


def _clock_jump(cluster: Cluster, rng: random.Random) -> None:
    name = rng.choice([METADATA, *cluster.bookie_names, *cluster.broker_names])
    skew_ms = rng.choice((1000, 30_000, 300_000)) * rng.choice((-1, 1))
    cluster.simulation.add_line(f"fault: the clock of {name} jumps by {skew_ms} ms")
    cluster.simulation.node(name).skew_ms += skew_ms


STRIKES: Mapping[str, Callable[[Cluster, random.Random], None]] = {
    "cut": _cut,
    "half-open": _half_open,
    "partition": _partition,
    "one-way": _one_way,
    "isolate": _isolate,
    "flap": _flap,
    "clog": _clog,
    "metadata-down": _metadata_down,
    "mute": _mute,
    "unheard": _unheard,
    "kill-bookie": _kill_bookie,
    "kill-broker": _kill_broker,
    "unplug-broker": _unplug_broker,
    "crash-at-operation": _crash_at_operation,
    "kill-writer": _kill_writer,
    "power-bookie": _power_bookie,
    "blackout": _blackout,
    "pause-bookie": _pause_bookie,
    "pause-broker": _pause_broker,
    "pause-client": _pause_client,
    "pause-writer": _pause_writer,
    "clean-stop": _clean_stop,
    "renew-bookie": _renew_bookie,
    "rolling-restart": _rolling_restart,
    "clock-jump": _clock_jump,
    **DISKS,
    **OPERATIONS,
    **INTRUSIONS,
}
