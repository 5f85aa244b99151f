"""Compactions come by their intervals, however often the bookie is restarted and whatever its clock says."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.bookie.format import mark as note
from magnetar.bookie.maintenance.garbage import (
    COMPACTION_TIMES_FILE,
    GARBAGE_MAGIC,
    CompactionSchedule,
    LastCompactionTimes,
)
from magnetar.bookie.store import disk
from magnetar.runtime.files import join_path
from magnetar.runtime.sim.world import Simulation
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.stores import DATA, NODE, simulate

HOUR, DAY = 60.0, 24 * 60.0
"""Shorter than real ones: a simulation lasts a day at most."""


class Life:
    """Of one node, restart after restart."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    async def start(self) -> CompactionSchedule:
        self.simulation.crash(NODE, power_loss=True)
        world = self.simulation.world(NODE)

        async def run() -> CompactionSchedule:
            disk.make_directories(world.files, DATA)
            schedule = CompactionSchedule(world, DATA, 10.0, HOUR, DAY)
            await schedule.load()
            return schedule

        return await self.simulation.spawn(NODE, run())

    async def ran(self, schedule: CompactionSchedule, *, minor: bool = True, major: bool = True) -> None:
        await self.simulation.spawn(NODE, schedule.record_compaction_run(minor=minor, major=major))

    def jump(self, seconds: float) -> None:
        self.simulation.node(NODE).skew_ms += int(seconds * 1000)


def with_life(test: Callable[[Life], Awaitable[None]]) -> None:
    simulate(lambda simulation: test(Life(simulation)))


pytestmark = pytest.mark.run_by.with_args(with_life)


async def test_restarts_do_not_put_a_compaction_off(life: Life, /) -> None:
    schedule = await life.start()
    for restart in range(11):
        assert schedule.find_due_compactions() == (restart > 0, False), restart
        if restart:
            await life.ran(schedule, major=False)
        await asyncio.sleep(2 * HOUR)
        schedule = await life.start()
    await asyncio.sleep(2 * HOUR)
    assert schedule.find_due_compactions() == (True, True)
    await life.ran(schedule)
    assert (await life.start()).find_due_compactions() == (False, False)


@pytest.mark.parametrize("jump", [-10 * DAY, 10 * DAY])
async def test_a_clock_that_jumps_between_starts_costs_one_early_compaction(life: Life, /, jump: float) -> None:
    await life.ran(await life.start())
    life.jump(jump)
    schedule = await life.start()
    assert schedule.find_due_compactions() == (True, True)
    await life.ran(schedule)
    schedule = await life.start()
    assert schedule.find_due_compactions() == (False, False)
    await asyncio.sleep(HOUR)
    assert schedule.find_due_compactions() == (True, False)


async def test_a_clock_that_jumps_in_a_life_changes_nothing(life: Life, /) -> None:
    schedule = await life.start()
    for jump in (10 * DAY, -20 * DAY):
        life.jump(jump)
        assert schedule.find_due_compactions() == (False, False)
    await asyncio.sleep(HOUR)
    assert schedule.find_due_compactions() == (True, False)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "newer"])
async def test_a_damaged_note_costs_an_interval_and_no_more(life: Life, /, damage: str) -> None:
    schedule = await life.start()
    await asyncio.sleep(2 * DAY)
    node = life.simulation.node(NODE)
    path = join_path(DATA, COMPACTION_TIMES_FILE)
    size = node.disk.find_inode(path).now.size
    if damage == "flipped":
        node.disk.flip_bit(path, size // 2)
    elif damage == "newer":
        data = bytearray(note.encode_checksummed_json(GARBAGE_MAGIC, LastCompactionTimes(0, 0)))
        data[9] = 2
        data[-4:] = note.crc32c(bytes(data[:-4])).to_bytes(4, "big")
        disk.replace_file(life.simulation.world(NODE).files, DATA, COMPACTION_TIMES_FILE, bytes(data))
    else:
        node.disk.truncate_file(path, 0 if damage == "empty" else size - 1)
    schedule = await life.start()
    assert schedule.find_due_compactions() == (False, False)
    await asyncio.sleep(DAY)
    assert (await life.start()).find_due_compactions() == (True, True), "the note is whole again"


async def test_a_full_disk_keeps_no_note_and_stops_nothing(life: Life, /) -> None:
    schedule = await life.start()
    await asyncio.sleep(HOUR)
    life.simulation.node(NODE).disk.capacity_bytes = 0
    await life.ran(schedule, major=False)
    assert schedule.find_due_compactions() == (False, False)


@pytest.mark.run_by.with_args(with_cluster)
async def test_a_bookie_restarted_every_day_compacts_its_logs(cluster: Cluster, /) -> None:
    ran: list[bool] = []
    for _ in range(4):
        bookie = await cluster.start(
            gc_interval_s=HOUR, gc_minor_interval_s=4 * HOUR, gc_major_interval_s=DAY, upkeep_interval_s=1e6,
            scrub_pass_s=0.0,
        )

        async def run(*, minor: bool, major: bool, roll: bool) -> None:
            ran.append(major)

        bookie.garbage_collector.run_pass = run  # type: ignore[method-assign, assignment]
        await asyncio.sleep(20 * HOUR)
        cluster.simulation.crash(NODE, power_loss=True)
    assert ran.count(True) == 3
