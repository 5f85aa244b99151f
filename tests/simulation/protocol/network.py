"""Requests between clients and bookies. A bookie is its name: whoever stands at its address under another refuses.

A request ends once: with the bookie's answer, or as failed: refused at once when nobody is there, when the connection
was reset, or after its time-out. What failed may have been done, and may still be done later.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .bookie import Bookie

if TYPE_CHECKING:
    from .run import Simulation

Serve = Callable[[Bookie, Callable[[Any], None]], None]


class Client:
    """A process that asks: alive, standing still, or dead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.seen: dict[int, int] = {}  # versions of records
        self._waiting: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def take(self, function: Callable[..., object], *arguments: Any) -> None:
        """What comes to a process that stands still is done when it goes on, in order."""
        if self.paused:
            self._waiting.append((function, arguments))
        elif self.alive:
            function(*arguments)

    def go_on(self) -> None:
        self.paused = False
        waiting, self._waiting = self._waiting, []
        for at, (function, arguments) in enumerate(waiting):
            if self.paused:
                self._waiting = waiting[at:] + self._waiting
                return
            if self.alive:
                function(*arguments)


class Node:
    """An address, and the bookie that is there now."""

    def __init__(self, address: int, bookie: Bookie) -> None:
        self.address = address
        self.bookie = self.first = bookie


class Link:
    __slots__ = ("back", "calls", "cut_back", "cut_there", "epoch", "refused", "there")

    def __init__(self) -> None:
        self.epoch = 0
        self.refused = False  # the bookie does not admit the client's key: nothing is done, and it is told so
        self.there = self.back = 0.0  # when the last message arrives: a connection keeps the order
        self.cut_there = self.cut_back = False
        self.calls: dict[Call, None] = {}


class Call:
    __slots__ = ("answered", "client", "done", "failed", "link")

    def __init__(self, client: Client, link: Link, answered: Callable[[Any], None], failed: Callable[[], None]) -> None:
        self.client = client
        self.link = link
        self.answered = answered
        self.failed = failed
        self.done = False


class Network:
    def __init__(self, simulation: Simulation, nodes: list[Node]) -> None:
        self._simulation = simulation
        self._scheduler = simulation.scheduler
        self._latency = simulation.options.latency_s
        self._jitter = simulation.options.jitter
        self._random = random.Random(f"network {simulation.options.seed}").random
        self.nodes = nodes
        self.node_of = {node.bookie.name: node for node in nodes}  # also of names that are gone
        self._links: dict[tuple[str, int], Link] = {}

    def link(self, client: str, node: Node) -> Link:
        found = self._links.get((client, node.address))
        if found is None:
            found = self._links[client, node.address] = Link()
        return found

    def request(
        self, client: Client, name: str, serve: Serve, answered: Callable[[Any], None], failed: Callable[[], None],
        timeout_s: float,
    ) -> None:  # fmt: skip
        node = self.node_of[name]
        link = self.link(client.name, node)
        call = Call(client, link, answered, failed)
        link.calls[call] = None
        scheduler, faults = self._scheduler, self._simulation.faults
        scheduler.after(timeout_s, self._fail, call)
        delay = self._latency * (0.5 + self._random()) if self._jitter else self._latency
        twice = False
        if faults.messages and not faults.calm:
            where = f"{client.name} → {name}"
            if faults.strikes("reset", scheduler.now, where):
                self._reset(link)
                return
            if faults.strikes("drop", scheduler.now, where):
                return
            if faults.strikes("delay", scheduler.now, where):
                delay *= 10 + 300 * self._random() ** 2
                scheduler.after(delay, self._arrive, call, node, name, serve, link.epoch)
                return
            twice = faults.strikes("duplicate", scheduler.now, where)
        when = max(link.there, scheduler.now + delay)
        link.there = when
        scheduler.at(when, self._arrive, call, node, name, serve, link.epoch)
        if twice:
            scheduler.at(when + delay * 50 * self._random(), self._arrive, call, node, name, serve, link.epoch)

    def _arrive(self, call: Call, node: Node, name: str, serve: Serve, epoch: int) -> None:
        link, bookie = call.link, node.bookie
        if link.cut_there or epoch != link.epoch:
            return
        if not bookie.up or link.refused or (bookie.name != name and bookie.rules.name_is_checked):
            if not link.cut_back:
                self._scheduler.after(self._latency, self._fail, call)
            return
        serve(bookie, lambda result: self._reply(call, node, name, result, epoch, bookie.life))

    def _reply(self, call: Call, node: Node, name: str, result: Any, epoch: int, life: int) -> None:
        link, scheduler, faults = call.link, self._scheduler, self._simulation.faults
        if call.done or life != node.bookie.life:
            return
        delay = self._latency * (0.5 + self._random()) if self._jitter else self._latency
        if faults.messages and not faults.calm:
            where = f"{call.client.name} ← {name}"
            if faults.strikes("reset", scheduler.now, where):
                self._reset(link)
                return
            if faults.strikes("drop", scheduler.now, where):
                return
            if faults.strikes("delay", scheduler.now, where):
                delay *= 10 + 300 * self._random() ** 2
                scheduler.after(delay, self._deliver, call, result, epoch)
                return
        link.back = max(link.back, scheduler.now + delay)
        scheduler.at(link.back, self._deliver, call, result, epoch)

    def _deliver(self, call: Call, result: Any, epoch: int) -> None:
        if not call.done and not call.link.cut_back and epoch == call.link.epoch:
            call.done = True
            call.link.calls.pop(call, None)
            call.client.take(call.answered, result)

    def _fail(self, call: Call) -> None:
        if not call.done:
            call.done = True
            call.link.calls.pop(call, None)
            call.client.take(call.failed)

    def _reset(self, link: Link) -> None:
        """The connection breaks: what was on its way is gone, and who waits for it hears so."""
        link.epoch += 1
        for call in list(link.calls):
            self._scheduler.after(self._latency, self._fail, call)

    def reset(self, client: str, node: Node) -> None:
        self._reset(self.link(client, node))

    def broken(self, node: Node) -> None:
        """The process at the other end is gone: its operating system resets the connections."""
        for (_, address), link in self._links.items():
            if address == node.address:
                self._reset(link)

    def heal(self) -> None:
        for link in self._links.values():
            link.cut_there = link.cut_back = link.refused = False

    # ------------------------------------------------------------------------------ who is there
    def registered(self) -> list[str]:
        """As the metadata says: it hears of a death late, here: not at all while the bookie may come back."""
        return [node.bookie.name for node in self.nodes]

    def choose(self, count: int, exclude: tuple[str, ...] = ()) -> list[str] | None:
        """Writable bookies that are not excluded; those that are up first, mostly."""
        rng = self._simulation.rng
        names = [name for name in self.registered() if name not in exclude]
        rng.shuffle(names)
        if rng.random() < 0.8:
            names.sort(key=lambda name: not self.node_of[name].bookie.up or self.node_of[name].bookie.read_only)
        return names[:count] if len(names) >= count else None
