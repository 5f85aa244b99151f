"""A bookie and its metadata in a simulation, and a caller on another node."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import UUID

from msgspec.structs import replace

from magnetar.bookie.maintenance.repair_worker import RepairConfig
from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import PeerCaller
from tests.bookie.stores import DATA, NODE, SMALL

CONFIG = BookieConfig(
    data=DATA, host=NODE, port=3181, gc_grace_s=0.0, store=SMALL, repair=RepairConfig(enabled=False)
)  # fmt: skip
"""Without auto-recovery: its calls would be under way in the metadata, in this process, whenever the node crashes."""


@dataclass
class Cluster:
    """One bookie on node `bookie`, metadata on node `meta`; tests call from node `caller`."""

    simulation: Simulation
    sqlite: SqliteStore
    metadata: MetadataStore
    config: BookieConfig = CONFIG

    async def start(self, **changes: object) -> Bookie:
        self.config = replace(self.config, **changes)  # type: ignore[arg-type]
        world = self.simulation.world(NODE)
        return await self.simulation.spawn(NODE, Bookie.start(world, self.config, self.metadata))

    async def restart(self, *, power_loss: bool = True) -> Bookie:
        self.simulation.crash(NODE, power_loss=power_loss)
        return await self.start()

    def caller(self, bookie: Bookie, identity: bytes = b"") -> PeerCaller:
        there, here = (self.simulation.world(node).network for node in ("caller", NODE))
        identity = identity or UUID(bookie.id).bytes
        return PeerCaller(there.connect_peer(bookie.endpoint, identity), here.connect_peer(bookie.endpoint, identity))


def with_cluster(test: Callable[[Cluster], Awaitable[None]], seed: int = 1) -> Simulation:
    simulation = Simulation(seed)

    async def body() -> None:
        store = await simulation.spawn("meta", SqliteStore.open(simulation.world("meta"), ":memory:"))
        await simulation.spawn("caller", _as_coroutine(test(Cluster(simulation, store, store.new_session()))))

    simulation.run(body())
    assert simulation.complaints == []
    return simulation


async def _as_coroutine(test: Awaitable[None]) -> None:
    await test
