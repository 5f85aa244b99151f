"""Processes that stand still, connections that fall silent, links that are slow, and backups of disks, simulated."""

import asyncio
from collections.abc import Sequence

import pytest

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.network import Endpoint, PeerRequest, World
from magnetar.runtime.sim.world import Simulation

NAME = bytes(16)


def echo(requests: Sequence[PeerRequest]) -> None:
    for request in requests:
        request.reply(request.head)


async def serve(world: World) -> Endpoint:
    return (await world.network.serve_peers(Endpoint("127.0.0.1", 0), NAME, echo)).endpoint


async def ask(world: World, endpoint: Endpoint, timeout_s: float) -> tuple[float, str]:
    """When it was answered, or what failed."""
    begun = world.clock.monotonic()
    try:
        await world.network.connect_peer(endpoint, NAME).request(b"?", timeout_s=timeout_s)
    except MagnetarError as error:
        return world.clock.monotonic() - begun, type(error).__name__
    return world.clock.monotonic() - begun, "answered"


def test_a_process_that_stands_still_answers_when_it_goes_on_and_its_timers_are_late() -> None:
    simulation = Simulation(1)
    rang: list[float] = []

    async def ring() -> None:
        await asyncio.sleep(1.0)
        rang.append(simulation.virtual_seconds)

    async def scenario() -> tuple[float, str]:
        endpoint = await simulation.spawn("b", serve(simulation.world("b")))
        ringing = simulation.spawn("b", ring())
        await asyncio.sleep(0.5)
        assert simulation.pause("b")
        simulation.loop.call_later(5.0, simulation.resume, "b")
        answered = await simulation.spawn("a", ask(simulation.world("a"), endpoint, 20.0))
        await ringing
        return answered

    took, how = simulation.run(scenario())
    assert how == "answered"
    assert 5.0 <= took < 5.1
    assert rang == [pytest.approx(5.5, abs=0.01)]


def test_one_that_is_killed_while_it_stands_still_takes_no_step_again() -> None:
    simulation = Simulation(1)
    rang: list[float] = []

    async def ring() -> None:
        await asyncio.sleep(1.0)
        rang.append(simulation.virtual_seconds)

    async def scenario() -> None:
        simulation.spawn("b", ring())
        await asyncio.sleep(0.5)
        simulation.pause("b")
        await asyncio.sleep(2.0)
        simulation.crash("b")
        simulation.resume("b")
        await asyncio.sleep(2.0)

    simulation.run(scenario())
    assert rang == []


def test_a_half_open_connection_is_silent_and_the_next_one_works() -> None:
    simulation = Simulation(1)

    async def talk(endpoint: Endpoint) -> list[str]:
        peer = simulation.world("a").network.connect_peer(endpoint, NAME)
        await peer.request(b"?", timeout_s=1.0)
        assert simulation.wires.make_half_open("a", "b", noticed_s=4.0) == 1
        said = []
        for _ in range(8):
            try:
                await peer.request(b"?", timeout_s=1.0)
                said.append("answered")
            except MagnetarError as error:
                said.append(type(error).__name__)
        return said

    async def scenario() -> list[str]:
        endpoint = await simulation.spawn("b", serve(simulation.world("b")))
        return await simulation.spawn("a", talk(endpoint))

    said = simulation.run(scenario())
    assert (said[0], said[-1]) == ("TimedOut", "answered")


def test_a_clogged_link_is_slow_until_it_is_not() -> None:
    simulation = Simulation(1)

    async def scenario() -> tuple[float, float]:
        endpoint = await simulation.spawn("b", serve(simulation.world("b")))
        simulation.wires.delay_messages("a", "b", 2.0)
        slow, _ = await simulation.spawn("a", ask(simulation.world("a"), endpoint, 20.0))
        simulation.wires.delay_messages("a", "b", 0.0)
        fast, _ = await simulation.spawn("a", ask(simulation.world("a"), endpoint, 20.0))
        return slow, fast

    slow, fast = simulation.run(scenario())
    assert 0.1 < slow < 4.1
    assert fast < 0.1


def test_a_disk_that_is_restored_has_what_was_durable_then() -> None:
    simulation = Simulation(1)
    node = simulation.node("b")

    def write(name: str, data: bytes, *, sync: bool) -> None:
        files = simulation.world("b").files
        file = files.open(name, create=not files.exists(name), write=True)
        file.pwrite([data], 0)
        if sync:
            file.fdatasync()
            files.sync_directory("/")
        file.close()

    write("/old", b"then", sync=True)
    backup = node.disk.take_snapshot()
    write("/old", b"now!", sync=True)
    write("/new", b"new", sync=True)
    simulation.crash("b")
    node.disk.restore_snapshot(backup)
    files = simulation.world("b").files
    assert node.disk.list_paths() == ["/old"]
    assert files.open("/old").pread(4, 0) == b"then"
