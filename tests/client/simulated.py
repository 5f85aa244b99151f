"""A client and a broker in memory, in one simulation: minutes of virtual time cost milliseconds, and a seed replays."""

from collections.abc import Awaitable, Callable
from typing import Any

from magnetar.client.client import Client
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.world import Simulation
from tests.client.fake_broker import FakeBroker

URL = "magnetar://broker:7650"


def simulate(
    body: Callable[[Client, FakeBroker], Awaitable[None]], broker: FakeBroker | None = None, *, seed: int = 1,
    url: str = URL, **options: Any,
) -> str:  # fmt: skip
    """Runs `body(client, broker)` and closes the client; the trace hash."""
    simulation = Simulation(seed=seed)
    serving = broker or FakeBroker()

    async def client_side() -> None:
        client = Client(url, world=simulation.world("client"), **options)
        try:
            await body(client, serving)
        finally:
            await client.close()

    async def main() -> None:
        world = simulation.world("broker")
        await simulation.spawn("broker", world.network.serve(Endpoint("broker", 7650), serving.services))
        await simulation.spawn("client", client_side())

    simulation.run(main())
    return simulation.trace_hash
