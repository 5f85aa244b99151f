"""What goes wrong, and when: the faults that a seed plans, carried out while the load runs."""

from __future__ import annotations

import asyncio

from magnetar.runtime.sim.files import FileFault
from tests.simulation.cluster import BOOKIES, CLIENT, METADATA, Cluster


class Nemesis:
    """`run` returns when the phase with faults is over; then the cluster may be healed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._simulation = cluster.simulation
        self._options = cluster.options
        self._rng = self._simulation.stream("nemesis")

    async def run(self) -> None:
        options, rng = self._options, self._rng
        plan: list[tuple[float, str]] = []
        for kind, count in (
            ("kill bookie", options.bookie_kills),
            ("kill broker", options.broker_kills),
            ("blackout", options.blackouts),
            ("sync error", options.sync_errors),
            ("cut", options.client_cuts),
            ("partition", options.partitions),
        ):
            plan += [(rng.uniform(0.0, options.seconds), kind) for _ in range(count)]
        self._cluster.harm()
        start = self._simulation.loop.time()
        for when, kind in sorted(plan):
            await asyncio.sleep(max(0.0, start + when - self._simulation.loop.time()))
            self._strike(kind)
        await asyncio.sleep(max(0.0, start + options.seconds - self._simulation.loop.time()))

    def _strike(self, kind: str) -> None:
        rng = self._rng
        brokers = list(self._cluster.broker_names)
        if kind == "kill bookie":
            name = rng.choice(BOOKIES)
            power_loss = rng.random() < self._options.power_loss_rate
            if self._options.crash_at_operation:
                self._simulation.crash_at(name, rng.randint(1, 60), power_loss=power_loss)
            else:
                self._simulation.crash(name, power_loss=power_loss)
        elif kind == "kill broker" and brokers:
            victim = self._cluster.owner() or rng.choice(brokers)
            self._simulation.crash(victim, power_loss=rng.random() < self._options.power_loss_rate)
        elif kind == "blackout":
            for name in (*BOOKIES, *brokers):
                self._simulation.crash(name, power_loss=True)
        elif kind == "sync error":
            self._simulation.node(rng.choice(BOOKIES)).disk.faults.append(FileFault("fdatasync", "/data/"))
        elif kind == "cut":
            nodes = [CLIENT, METADATA, *BOOKIES, *brokers]
            self._simulation.wires.cut(rng.choice([CLIENT, *brokers]), rng.choice(nodes))
        elif kind == "partition":
            nodes = [METADATA, *BOOKIES, *brokers]
            source, target = rng.choice([*brokers, *BOOKIES, CLIENT]), rng.choice(nodes)
            if source != target:
                self._simulation.wires.partition(source, target, both=rng.random() < 0.5)
                after = rng.expovariate(1.0 / max(1.0, self._options.down_s))
                self._cluster.background(self._heal(after, source, target))

    async def _heal(self, after: float, source: str, target: str) -> None:
        await asyncio.sleep(after)
        self._simulation.wires.heal(source, target)
