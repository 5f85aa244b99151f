"""Virtual time, deadlock, determinism and death: what a simulation promises before anything is simulated in it."""

import asyncio

import pytest

from magnetar.runtime.sim.loop import Deadlock, NotSimulated, SimulationLimitExceeded, _name_of, raise_inside_task
from magnetar.runtime.sim.world import NodeCrashed, Simulation


def test_time_jumps_to_the_next_timer() -> None:
    simulation = Simulation(1)

    async def main() -> float:
        await asyncio.sleep(3600)
        async with asyncio.timeout(10):
            await asyncio.sleep(5)
        return asyncio.get_running_loop().time() - simulation.loop.origin_s

    assert simulation.run(main()) == 3605.0
    assert simulation.virtual_seconds == 3605.0


def test_clocks_start_anywhere_agree_with_no_other_and_the_monotonic_one_begins_again_with_its_host() -> None:
    origins: list[float] = []
    for seed in range(1, 41):
        simulation = Simulation(seed)
        first, second = simulation.world("a").clock, simulation.world("b").clock
        origins += [simulation.loop.time(), first.monotonic(), second.monotonic()]
        assert first.wall_ms() == second.wall_ms()

        async def main(simulation: Simulation = simulation) -> None:
            before = simulation.world("a").clock.monotonic()
            await asyncio.sleep(1.0)
            simulation.crash("a")
            assert simulation.world("a").clock.monotonic() == pytest.approx(before + 1.0, abs=1e-6)
            simulation.crash("a", power_loss=True)
            assert simulation.world("a").clock.monotonic() == 0.0

        simulation.run(main())
    assert min(origins) == 0.0
    assert max(origins) > 3e7
    assert len(set(origins)) > 60


def test_a_timer_rings_in_its_moment_however_long_the_host_has_been_up() -> None:
    for seed in range(1, 41):
        simulation = Simulation(seed)

        async def main(simulation: Simulation = simulation) -> None:
            for _ in range(100):
                await asyncio.sleep(0.1)
            assert simulation.virtual_seconds == pytest.approx(10.0, abs=1e-5)

        simulation.run(main())
        assert simulation.trace.steps < 1000


def test_a_deadlock_names_the_tasks_that_wait() -> None:
    simulation = Simulation(1)

    async def waits_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.create_task(waits_for_ever())

    with pytest.raises(Deadlock, match=r"waits_for_ever#\d+ at waits_for_ever:\d+"):
        simulation.run(main())


def test_a_run_that_never_ends_is_stopped_by_its_bounds() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110 - never ends on purpose
            await asyncio.sleep(0)

    async def tick() -> None:
        while True:  # noqa: ASYNC110 - never ends on purpose
            await asyncio.sleep(1)

    with pytest.raises(SimulationLimitExceeded, match="steps"):
        Simulation(1, steps_max=1000).run(spin())
    with pytest.raises(SimulationLimitExceeded, match="virtual seconds"):
        Simulation(1, seconds_max=1000).run(tick())


def test_threads_and_sockets_are_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(NotSimulated):
            await asyncio.to_thread(int)
        with pytest.raises(NotSimulated):
            await loop.getaddrinfo("localhost", 1)
        with pytest.raises(NotSimulated):
            loop.add_reader(0, int)

    Simulation(1).run(main())


def test_a_killed_process_takes_no_further_step_not_even_its_cleanup() -> None:
    simulation = Simulation(1)
    seen: list[str] = []

    async def child() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                seen.append(f"tick {simulation.virtual_seconds:.0f}")
        finally:
            seen.append("cleanup")

    async def service() -> None:
        task = asyncio.create_task(child())
        asyncio.get_running_loop().call_later(5, seen.append, "timer")
        await task

    async def main() -> list[str]:
        running = simulation.spawn("a", service())
        await asyncio.sleep(2.5)
        simulation.crash("a")
        with pytest.raises(NodeCrashed):
            await running
        await asyncio.sleep(100)
        return list(seen)

    assert simulation.run(main()) == ["tick 1", "tick 2"]
    assert simulation.complaints == []


def test_an_exception_nobody_retrieves_is_a_complaint() -> None:
    simulation = Simulation(1)

    async def fails() -> None:
        raise ValueError("lost")

    async def main() -> None:
        asyncio.create_task(fails())  # noqa: RUF006 - dropped on purpose
        await asyncio.sleep(1)

    simulation.run(main())
    assert len(simulation.complaints) == 1
    assert "lost" in simulation.complaints[0]


def test_a_node_has_its_own_clock() -> None:
    simulation = Simulation(1)
    simulation.node("b").skew_ms = 5000

    async def main() -> tuple[int, int]:
        await asyncio.sleep(1.5)
        return simulation.world("a").clock.wall_ms(), simulation.world("b").clock.wall_ms()

    a, b = simulation.run(main())
    assert b - a == 5000
    assert a % 10_000 == 1500


def test_an_exception_is_thrown_into_a_task_where_it_waits_and_a_cancellation_after_it_is_one() -> None:
    simulation = Simulation(1)
    seen: list[str] = []

    async def keeper() -> None:
        while True:
            try:
                async with asyncio.timeout(10):
                    await asyncio.sleep(3600)
            except (RuntimeError, TimeoutError) as error:
                seen.append(f"{type(error).__name__} at {simulation.virtual_seconds:.0f}")

    async def main() -> None:
        running = simulation.spawn("a", keeper())
        await asyncio.sleep(1)
        (task,) = (task for task in simulation.node("a").process.tasks if not task.done())  # type: ignore[union-attr]
        raise_inside_task(task, RuntimeError("a fault"))
        await asyncio.sleep(11)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    simulation.run(main())
    assert seen == ["RuntimeError at 1", "TimeoutError at 11"]


def test_a_second_process_of_a_node_shares_its_disk_and_its_locks_and_ends_alone() -> None:
    simulation = Simulation(1)

    async def main() -> None:
        first = simulation.world("a")
        lock = first.files.lock("/lock")
        second = simulation.start_second_process("a")
        with pytest.raises(BlockingIOError):
            second.world.files.lock("/lock")
        running = simulation.spawn_in_process(second, asyncio.sleep(100))
        await asyncio.sleep(1)
        simulation.end_process(second)
        with pytest.raises(NodeCrashed):
            await running
        assert simulation.is_node_running("a")
        lock.close()

    simulation.run(main())


@pytest.mark.parametrize(("of_mypyc", "name"), [
    ("flush_PartitionProducer_gen", "PartitionProducer.flush"), ("_asked__Listener_gen", "_Listener._asked"),
    ("_ask_on_LedgerReader_gen", "LedgerReader._ask_on"), ("_check_ack_gen", "_check_ack"), ("other", "task"),
])  # fmt: skip
def test_a_compiled_coroutine_has_the_name_of_its_source(of_mypyc: str, name: str) -> None:
    assert _name_of(type(of_mypyc, (), {})()) == name


async def test_a_coroutine_has_its_own_name() -> None:
    async def here() -> None: ...

    coroutine = here()
    assert _name_of(coroutine) == "test_a_coroutine_has_its_own_name.<locals>.here"
    await coroutine
