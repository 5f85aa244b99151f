"""What happens at a time: crashes, wipes, partitions, pauses, deletions. What befalls messages is in network.py."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .bookie import Bookie
from .network import Link, Node
from .options import LOSSES

if TYPE_CHECKING:
    from .run import Simulation


class Nemesis:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._scheduler = simulation.scheduler
        self._options = simulation.options
        seed = self._options.seed
        self._rng = random.Random(f"nemesis {seed}")
        for kind, count in self._options.times.items():
            rng = random.Random(f"nemesis {seed} {kind}")
            for _ in range(count):
                self._scheduler.at(rng.random() * self._options.faulty_s, self._strike, kind, rng)
        nodes = list(simulation.nodes)
        self._rng.shuffle(nodes)
        self._losing = nodes[: self._options.losing]

    def _strike(self, kind: str, rng: random.Random) -> None:
        simulation = self._simulation
        if simulation.healed:
            return
        node = rng.choice(self._losing if kind in LOSSES and self._losing else simulation.nodes)
        if kind in LOSSES and (not self._losing or (node.bookie is not node.first and not self._options.beyond)):
            return  # whoever came instead of one that lost its data would be one more of the same ensembles
        client = rng.choice(simulation.asking())
        where = {"recover": "", "delete": "", "die": "", "expire": "", "blackout": "", "metadata-down": "", "cut": "",
                 "repair": "", "unadmitted": client.name,
                 "pause": client.name, "partition": f"{client.name}, {node.bookie.name}"}.get(kind, node.bookie.name)
        if simulation.faults.allowed(kind, self._scheduler.now, where):
            simulation.story(f"!! {kind} {where}")
            getattr(self, "_" + kind.replace("-", "_"))(rng, node, client)

    def _down_s(self, rng: random.Random) -> float:
        return rng.expovariate(1.0 / self._options.down_s)

    # ------------------------------------------------------------------------------ bookies
    def _crash(self, node: Node, power: bool, down_s: float) -> None:
        if node.bookie.up:
            node.bookie.crash(power=power)
            self._simulation.network.broken(node)
            self._scheduler.after(down_s, self._restart, node, node.bookie)

    def _restart(self, node: Node, bookie: Bookie) -> None:
        if node.bookie is bookie and not bookie.up:
            bookie.restart()
            self._simulation.story(f"{bookie.name} is back")

    def _kill(self, rng: random.Random, node: Node, client: object) -> None:
        self._crash(node, False, self._down_s(rng))

    def _power(self, rng: random.Random, node: Node, client: object) -> None:
        self._crash(node, True, self._down_s(rng))

    def _blackout(self, rng: random.Random, node: Node, client: object) -> None:
        for each in self._simulation.nodes:
            self._crash(each, True, self._down_s(rng))

    def _stall(self, rng: random.Random, node: Node, client: object) -> None:
        node.bookie.stalled_until = self._scheduler.now + self._down_s(rng)

    def _slow(self, rng: random.Random, node: Node, client: object) -> None:
        node.bookie.slowness = rng.choice((5, 20))
        self._scheduler.after(self._down_s(rng), setattr, node.bookie, "slowness", 1)

    def _read_only(self, rng: random.Random, node: Node, client: object) -> None:
        node.bookie.read_only = True
        self._scheduler.after(self._down_s(rng), setattr, node.bookie, "read_only", False)

    def _wipe(self, rng: random.Random, node: Node, client: object) -> None:
        """Stopped, its disk lost, started again under its name: it knows that it lost something."""
        bookie = node.bookie
        if bookie.up:
            bookie.crash(power=True)
            self._simulation.network.broken(node)
        bookie.wipe(self._simulation.register.next_id - 1)
        self._scheduler.after(self._down_s(rng), self._restart, node, bookie)

    def _replace(self, rng: random.Random, node: Node, client: object) -> None:
        """Its disk is lost; another bookie, empty, stands at its address."""
        simulation, old = self._simulation, node.bookie
        if old.up:
            old.crash(power=True)
        simulation.network.broken(node)
        old.wipe(simulation.register.next_id - 1)
        node.bookie = simulation.new_bookie(f"{old.name.partition('.')[0]}.{len(simulation.bookies)}")
        simulation.network.node_of[node.bookie.name] = node

    def _damage(self, rng: random.Random, node: Node, client: object) -> None:
        node.bookie.damage(rng.choice((0.1, 0.5, 1.0)))

    # ------------------------------------------------------------------------------ the network
    def _partition(self, rng: random.Random, node: Node, client: object) -> None:
        network = self._simulation.network
        link = network.link(client.name, node)  # type: ignore[attr-defined]
        self._part([link], rng.choice(("there", "back", "both")), self._down_s(rng))

    def _cut(self, rng: random.Random, node: Node, client: object) -> None:
        """Mostly a writer's: with entries on their way, some of them answered."""
        simulation = self._simulation
        if rng.random() < 0.7:
            client = rng.choice(simulation.writers).client
        simulation.network.reset(client.name, node)  # type: ignore[attr-defined]

    def _cut_off(self, rng: random.Random, node: Node, client: object) -> None:
        """A bookie from all clients, or a client from all bookies."""
        simulation = self._simulation
        if rng.random() < 0.5:
            links = [simulation.network.link(each.name, node) for each in simulation.asking()]
        else:
            links = [simulation.network.link(client.name, each) for each in simulation.nodes]  # type: ignore[attr-defined]
        self._part(links, rng.choice(("there", "back", "both")), self._down_s(rng))

    def _unadmitted(self, rng: random.Random, node: Node, client: object) -> None:
        """At one bookie, or at all: its session ended, or they have not read its record yet."""
        simulation = self._simulation
        nodes = simulation.nodes if rng.random() < 0.5 else [node]
        for each in nodes:
            link = simulation.network.link(client.name, each)  # type: ignore[attr-defined]
            link.refused = True
            self._scheduler.after(self._down_s(rng), setattr, link, "refused", False)

    def _part(self, links: list[Link], way: str, seconds: float) -> None:
        for link in links:
            link.cut_there |= way != "back"
            link.cut_back |= way != "there"
            self._scheduler.after(seconds, self._mend, link)

    def _mend(self, link: Link) -> None:
        link.cut_there = link.cut_back = False

    def _metadata_down(self, rng: random.Random, node: Node, client: object) -> None:
        register = self._simulation.register
        register.down = True
        self._scheduler.after(self._down_s(rng), setattr, register, "down", False)

    # ------------------------------------------------------------------------------ clients
    def _pause(self, rng: random.Random, node: Node, client: object) -> None:
        """A writer mostly: it does not know what happens meanwhile."""
        simulation = self._simulation
        victim = rng.choice(simulation.writers).client if rng.random() < 0.7 else rng.choice(simulation.asking())
        if victim.alive and not victim.paused:
            victim.paused = True
            self._scheduler.after(self._down_s(rng) * rng.choice((1, 10)), victim.go_on)

    def _expire(self, rng: random.Random, node: Node, client: object) -> None:
        alive = [each for each in self._simulation.recoverers if each.alive]
        if alive:
            rng.choice(alive).alive = False

    def _die(self, rng: random.Random, node: Node, client: object) -> None:
        writer = rng.choice(self._simulation.writers)
        writer.client.alive = False
        self._simulation.story(f"{writer.client.name} is dead")

    def _recover(self, rng: random.Random, node: Node, client: object) -> None:
        self._simulation.recover_some(rng)

    def _repair(self, rng: random.Random, node: Node, client: object) -> None:
        self._simulation.repair_some(rng)

    def _delete(self, rng: random.Random, node: Node, client: object) -> None:
        self._simulation.delete_some(rng)
