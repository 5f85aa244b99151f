"""The sessions serve a second protocol, of text lines: over TCP, and in the simulator."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.broker.server import Broker
from magnetar.proto.errors import InvalidRequest, ProducerBusy
from magnetar.runtime.network import Endpoint, Serving, World
from magnetar.runtime.sim.world import Simulation
from tests.line_protocol.client import Lines
from tests.line_protocol.protocol import LineProtocol
from tests.metadata.stores import SimulatedBackend
from tests.support.cluster import SMALL, cluster

ANY = Endpoint("127.0.0.1", 0)
T = "persistent://public/default/t"


async def scenario(world: World, endpoint: Endpoint) -> None:
    """Produces, consumes, acknowledges and seeks; a second connection goes on where the first one was."""
    lines = Lines(await world.network.connect_bytes(endpoint))
    lines.send("produce", "p", T, "one")
    assert (await lines.next("opened"))[:3] == ["opened", "p", "one"]
    for number in range(10):
        lines.send("publish", "p", number, f"text-{number}")
    receipts = [await lines.next("receipt", "failed") for _ in range(10)]
    assert [(words[2], words[4]) for words in receipts] == [(str(number), str(number)) for number in range(10)]
    lines.send("consume", "c", T, "s", "shared")
    await lines.next("opened")
    lines.send("flow", "c", 4)
    found = await lines.messages(4)
    assert [text for _, text in found] == [f"text-{number}" for number in range(4)]
    lines.send("last", "c")
    assert await lines.next("last", "message") == ["last", "c", "9"], "nothing is delivered without permits"
    for position, _ in found[:2]:
        lines.send("ack", "c", position)
    lines.send("durable", "c")
    assert await lines.next("done", "error") == ["done", "c"]
    lines.send("seek", "c", 1)
    assert await lines.next("done", "error") == ["done", "c"]
    lines.send("flow", "c", 100)
    found = await lines.messages(9)
    assert [text for _, text in found] == [f"text-{number}" for number in range(1, 10)]
    for position, _ in found[:5]:
        lines.send("ack", "c", position)
    lines.send("durable", "c")
    await lines.next("done")
    await lines.stream.close()

    lines = Lines(await world.network.connect_bytes(endpoint))
    lines.send("produce", "a", T, "one")
    opened = await lines.next("opened", "closed")
    assert opened[0] == "opened", "the first connection left nothing"
    lines.send("produce", "b", T, "other")
    lines.send("consume", "c", T, "s", "shared")
    lines.send("publish", "a", 10, "text-10")
    await lines.next("receipt")
    await lines.next("opened")
    lines.send("flow", "c", 100)
    assert sorted([text for _, text in await lines.messages(5)]) == sorted(f"text-{n}" for n in (6, 7, 8, 9, 10))
    lines.send("flow", "nothing", 1)
    assert (await lines.next("closed"))[:3] == ["closed", "nothing", str(InvalidRequest.code)]
    lines.send("close", "c")
    await lines.next("done")
    await lines.stream.close()


async def two_connections_of_one_name(world: World, endpoint: Endpoint) -> None:
    first, second = [Lines(await world.network.connect_bytes(endpoint)) for _ in range(2)]
    first.send("produce", "p", T, "same")
    await first.next("opened")
    second.send("produce", "p", T, "same")
    words = await second.next("opened", "closed")
    told = await first.next("closed") if words[0] == "opened" else words
    assert int(told[2]) in (ProducerBusy.code, 40), "the later connection takes the name, or is refused"
    await first.stream.close()
    await second.stream.close()


Scenario = Callable[[World, Endpoint], Coroutine[Any, Any, None]]


async def _over_tcp(folder: Path, scenario: Scenario) -> None:
    async with cluster(folder) as running:
        broker = running.brokers[0]
        serving = await running.world.network.serve_bytes(ANY, LineProtocol(broker.topic_manager).serve)
        try:
            await scenario(running.world, serving.endpoint)
            async with asyncio.timeout(10):
                while any(topic.connected_client_count for topic in broker.topics.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            await serving.close()


def _simulated(scenario: Scenario, seed: int) -> str:
    simulation = Simulation(seed)
    simulation.run(_in_simulation(simulation, scenario))
    assert not simulation.complaints
    return simulation.trace_hash


async def _in_simulation(simulation: Simulation, scenario: Scenario) -> None:
    backend = SimulatedBackend(simulation)
    bookie_store, broker_store = await backend.store(), await backend.store()
    node = backend.node(broker_store)
    world = simulation.world(node)
    bookie_node = backend.node(bookie_store)
    await simulation.spawn(
        bookie_node, Bookie.start(simulation.world(bookie_node), BookieConfig(data="/data"), bookie_store)
    )
    broker = await simulation.spawn(node, Broker.start(world, replace(SMALL, cursor_flush_s=1.0), broker_store))

    async def serve() -> Serving:
        return await world.network.serve_bytes(ANY, LineProtocol(broker.topic_manager).serve)

    serving = await simulation.spawn(node, serve())
    client = simulation.world("lines")
    await simulation.spawn("lines", scenario(client, serving.endpoint))


async def test_lines_produce_consume_ack_and_seek_through_the_sessions(tmp_path: Path) -> None:
    await _over_tcp(tmp_path, scenario)


async def test_names_are_one_space_over_connections(tmp_path: Path) -> None:
    await _over_tcp(tmp_path, two_connections_of_one_name)


def test_the_same_in_the_simulator_and_a_seed_has_the_same_trace_again() -> None:
    assert _simulated(scenario, 1) == _simulated(scenario, 1)
    for seed in range(2, 6):
        _simulated(scenario, seed)
