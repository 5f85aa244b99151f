"""What a cluster of a thousand brokers and a thousand bookies asks of its metadata, counted with the product's classes.

    python -m tests.balance.machines --machines 1000

Prints a JSON line for each event: the requests and the nodes that one process reads, and all of them together. The
processes are on virtual time, and the network answers at once: counted is what is asked, not how long it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from magnetar.broker.cluster.ownership import Ownership
from magnetar.ledger.bookies import Bookies, LedgerConfig
from magnetar.metadata import paths
from magnetar.metadata.records import (
    BookieRecord,
    BrokerRecord,
    ClusterRecord,
    NamespaceRecord,
    OwnerRecord,
    encode_record,
)
from magnetar.metadata.remote import RemoteStore
from magnetar.metadata.store import PutNode, put_record
from magnetar.proto.names import TopicName
from magnetar.runtime.sim.world import Simulation
from tests.metadata.stores import SimulatedBackend

START_S = 60.0
"""Seconds over which the machines of a cluster start."""
BUNDLES_EACH = 100
LOOK_UPS = 2000


WATCHERS = 200
"""Processes of those that hear of one change: each of them connects to all bookies."""
MOMENT_S = 0.01


class Asked(NamedTuple):
    """What one process asks; `busiest_share`: of the requests of the WATCHERS, those within one moment of MOMENT_S."""

    requests: int
    nodes: int
    busiest_share: float = 0.0


class Counter:
    """Counts what a store is asked, and the nodes that it answers."""

    def __init__(self, store: RemoteStore) -> None:
        self.requests = self.nodes = 0
        self.asked_s: list[float] = []
        asks = store._ask

        async def ask(rpc: Any, request: Any, *of: Any, **more: Any) -> Any:
            self.asked_s.append(asyncio.get_running_loop().time())
            reply = await asks(rpc, request, *of, **more)
            self.requests += 1
            self.nodes += len(getattr(reply, "nodes", ())) or 1
            return reply

        store._ask = ask  # type: ignore[method-assign]


def _brokers(count: int) -> list[BrokerRecord]:
    return [BrokerRecord(name=f"b{each}", endpoint=f"b:{each + 1}", group="g", format=2) for each in range(count)]


async def start_bookies(backend: SimulatedBackend, machines: int) -> Asked:
    """`machines` bookies register within START_S, before a process that watches them."""
    world = backend.simulation.world
    watching, writing = await backend.store(), await backend.store()
    counter = Counter(watching)
    table = Bookies(world(backend.node(watching)), watching, LedgerConfig())
    await backend.simulation.spawn(backend.node(watching), table.wait_bookies_listed())
    for each in range(machines):
        record = BookieRecord(bookie=str(uuid.UUID(int=each)), endpoint=f"10.0.0.2:{each + 1}")
        path = paths.bookie(record.bookie)
        await backend.simulation.spawn(backend.node(writing), writing.put(path, encode_record(record, path)))
        await asyncio.sleep(START_S / machines)
    await asyncio.sleep(5)
    assert await backend.simulation.spawn(backend.node(watching), table.count_healthy_bookies(0)) == machines
    return Asked(counter.requests, counter.nodes)


async def change_one_bookie(backend: SimulatedBackend, machines: int) -> Asked:
    """One of `machines` bookies registers again, after a quiet time, before WATCHERS processes that watch them."""
    world, writing, bookies = backend.simulation.world, await backend.store(), list[tuple[str, bytes]]()
    for each in range(machines):
        record = BookieRecord(bookie=str(uuid.UUID(int=each)), endpoint=f"10.0.0.2:{each + 1}")
        path = paths.bookie(record.bookie)
        bookies.append((path, encode_record(record, path)))
    for start in range(0, machines, 100):
        puts = [PutNode(*each) for each in bookies[start : start + 100]]
        await backend.simulation.spawn(backend.node(writing), writing.commit(puts))
    counters = list[Counter]()
    for _ in range(WATCHERS):
        store = await backend.store()
        table = Bookies(world(backend.node(store)), store, LedgerConfig())
        await backend.simulation.spawn(backend.node(store), table.wait_bookies_listed())
        counters.append(Counter(store))
    await asyncio.sleep(5)
    for each in counters:
        each.asked_s.clear()
    await backend.simulation.spawn(backend.node(writing), writing.put(*bookies[0]))
    await asyncio.sleep(5)
    asked = sorted(at for each in counters for at in each.asked_s)
    busiest = max(sum(0 <= at - first < MOMENT_S for at in asked) for first in asked)
    one = counters[0]
    return Asked(one.requests, one.nodes, busiest / len(asked))


async def take_over(backend: SimulatedBackend, machines: int) -> Asked:
    """A broker is asked for BUNDLES_EACH bundles whose owner has died."""
    store, brokers = await backend.store(), _brokers(machines)
    for start in range(0, machines, 100):
        puts = [PutNode(paths.broker(each.name), encode_record(each, paths.broker(each.name)))
                for each in brokers[start : start + 100]]  # fmt: skip
        await backend.simulation.spawn(backend.node(store), store.commit(puts))
    counter = Counter(store)
    owners = Ownership(store, brokers[0], random.Random(1), backend.simulation.world("b0").clock)
    bundles = [paths.bundle_owner("public", "default", f"{each:08x}") for each in range(BUNDLES_EACH)]
    found = asyncio.gather(*[owners.find_owner_by_path(path, "a bundle") for path in bundles])
    assert len({each.name for each in await backend.simulation.spawn(backend.node(store), _wait(found))}) > 1
    return Asked(counter.requests, counter.nodes)


async def look_up(backend: SimulatedBackend, machines: int) -> Asked:
    """Clients look up LOOK_UPS topics of one namespace at a broker that owns none of them, within two seconds."""
    store, brokers = await backend.store(), _brokers(machines)
    node, policies = backend.node(store), NamespaceRecord(bundles=32)
    cluster = ClusterRecord(instance="0" * 32)
    await backend.simulation.spawn(node, put_record(store, paths.CLUSTER, cluster, -1))
    for each in brokers:
        await backend.simulation.spawn(node, put_record(store, paths.broker(each.name), each, -1))
    owners = Ownership(store, brokers[0], random.Random(1), backend.simulation.world("b0").clock)
    await backend.simulation.spawn(node, owners.register_broker())
    topics = [TopicName.parse(f"persistent://public/default/t{each}") for each in range(LOOK_UPS)]
    for path in {owners.owner_record_path(each, policies) for each in topics}:
        await backend.simulation.spawn(
            node, put_record(store, path, OwnerRecord(broker="b1", endpoint=brokers[1].endpoint), -1)
        )
    counter = Counter(store)
    for each in topics:
        assert (await backend.simulation.spawn(node, owners.find_owner(each, policies))).name == "b1"
        await asyncio.sleep(2 / LOOK_UPS)
    return Asked(counter.requests, counter.nodes)


async def _wait(found: Awaitable[Any]) -> Any:
    return await found


EVENTS: dict[str, Callable[[SimulatedBackend, int], Awaitable[Asked]]] = {
    "start of all bookies": start_bookies, "change of one bookie": change_one_bookie, "take-over": take_over,
    "look-ups": look_up,
}  # fmt: skip


def count_requests(event: str, machines: int) -> Asked:
    """Returns what one process asks in the event of that name, in a cluster of so many brokers and so many bookies."""
    simulation = Simulation(seed=1)
    return simulation.run(EVENTS[event](SimulatedBackend(simulation), machines))


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of a command line (None: of this process). Exits with a sentence if they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.balance.machines", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--machines", type=int, default=1000, help="brokers, and as many bookies (1000)")
    return parser.parse_args(words)


def main() -> int:
    machines = read_options().machines
    for event in EVENTS:
        print(f"{event} …", file=sys.stderr, flush=True)
        asked = count_requests(event, machines)
        print(json.dumps({"event": event, "machines": machines, **asked._asdict()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
