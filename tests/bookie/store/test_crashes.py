"""The store against crashes at any disk operation: acked ⊆ present ⊆ sent, fences are for ever (invariants 14–18)."""

import random

import pytest

from magnetar.bookie.store.disk import NoSpace
from magnetar.runtime.sim.disk import UNLIMITED_BYTES
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.stores import DATA, NODE, Model, load, open_store, simulate


@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power-loss"])
@pytest.mark.parametrize("seed", range(12))
def test_no_acknowledged_add_and_no_fence_is_lost_by_crashes_anywhere(seed: int, power_loss: bool) -> None:
    simulation = Simulation(seed)
    simulation.node(NODE).disk.takes_direct = seed % 2 == 1
    rng = random.Random(f"{seed}/load")
    model = Model()

    async def life(crash_in: int) -> None:
        if crash_in:
            simulation.world(NODE)
            simulation.crash_at(NODE, crash_in, power_loss=power_loss)
        store = await open_store(simulation)
        await simulation.spawn(NODE, model.check(store))
        await simulation.spawn(NODE, load(store, model, rng, 1000 if crash_in else 20))

    async def main() -> None:
        for _ in range(8):
            with pytest.raises(NodeCrashed):
                await life(rng.randint(1, 400))
            model.deleted.clear()
        await life(0)

    simulation.run(main())
    assert simulation.complaints == []
    assert len(model.acked) > 30


@pytest.mark.parametrize("seed", range(3))
def test_a_crash_during_the_start_is_harmless(seed: int) -> None:
    """Every operation of a start that has something to replay, in turn."""
    simulation = Simulation(seed)
    simulation.node(NODE).disk.takes_direct = seed % 2 == 1
    rng = random.Random(f"{seed}/start")
    model = Model()

    async def main() -> None:
        store = await open_store(simulation)
        simulation.crash_at(NODE, 300, power_loss=True)
        with pytest.raises(NodeCrashed):
            await simulation.spawn(NODE, load(store, model, rng, 1000))
        for operation in range(1, 60):
            simulation.world(NODE)
            simulation.crash_at(NODE, operation, power_loss=operation % 2 == 0)
            try:
                store = await open_store(simulation)
                await simulation.spawn(NODE, store.close())
            except NodeCrashed:
                continue
        simulation.node(NODE).disk.cancel_crash()
        store = await open_store(simulation)
        await simulation.spawn(NODE, model.check(store))
        await simulation.spawn(NODE, store.close())

    simulation.run(main())
    assert simulation.complaints == []
    assert len(model.acked) > 30


@pytest.mark.run_by.with_args(simulate)
async def test_a_first_start_on_a_full_disk_says_so_and_works_when_there_is_room(simulation: Simulation, /) -> None:
    disk = simulation.node(NODE).disk
    simulation.world(NODE).files.make_directories(DATA)
    disk.capacity_bytes = disk.used_bytes()
    with pytest.raises(NoSpace):
        await open_store(simulation)
    disk.capacity_bytes = UNLIMITED_BYTES
    await open_store(simulation)
