"""A long-lived task that fails, or is cancelled by a stranger, is logged, counted, shown, and runs again."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from magnetar.runtime.sim.world import Simulation
from magnetar.runtime.tasks import RETRY_MAX_S, STABLE_AFTER_S, Supervisor


def in_a_process(test: Callable[[], Awaitable[None]]) -> Simulation:
    simulation = Simulation(1)

    async def run() -> None:
        await test()

    async def main() -> None:
        await simulation.spawn("node", run())

    simulation.run(main())
    assert simulation.complaints == []
    return simulation


def test_what_fails_runs_again_after_a_longer_and_longer_pause(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop, supervisor = asyncio.get_running_loop(), Supervisor()
        starts: list[float] = []

        async def work() -> None:
            starts.append(loop.time())
            raise ValueError("format version 2")

        supervisor.start_supervised("part-work", work)
        await asyncio.sleep(200.0)
        pauses = [b - a for a, b in itertools.pairwise(starts)]
        assert pauses[:4] == pytest.approx([0.5, 1.0, 2.0, 4.0])
        assert max(pauses) == pytest.approx(RETRY_MAX_S)
        assert supervisor.failure_reasons == {"part-work": "ValueError: format version 2"}
        assert supervisor.statistics()["background_restarts"] == len(starts)
        assert Supervisor.count_failing_tasks()["part-work"] == 1
        assert sum("part-work failed" in each for each in caplog.messages) == len(starts)
        await supervisor.close()
        before = len(starts)
        await asyncio.sleep(200.0)
        assert len(starts) == before

    in_a_process(main)


def test_what_a_stranger_cancels_runs_again_and_is_well_after_a_while() -> None:
    async def main() -> None:
        supervisor, running = Supervisor(), list[asyncio.Task[None] | None]()

        async def work() -> None:
            running.append(asyncio.current_task())
            await asyncio.get_running_loop().create_future()

        supervisor.start_supervised("part-work", work)
        await asyncio.sleep(1.0)
        for _ in range(3):
            task = running[-1]
            assert task is not None
            task.cancel()
            await asyncio.sleep(5.0)
        assert len(running) == 4
        assert list(supervisor.failure_reasons) == ["part-work"]
        await asyncio.sleep(STABLE_AFTER_S)
        assert supervisor.failure_reasons == {}
        assert supervisor.statistics() == {"background_tasks": 1, "background_failing": 0, "background_restarts": 3}
        await supervisor.close()
        assert running[-1] is not None
        assert running[-1].cancelled()
        assert supervisor.statistics()["background_tasks"] == 0

    in_a_process(main)


def test_what_returns_is_over_and_a_final_error_is_told() -> None:
    async def main() -> None:
        supervisor = Supervisor()

        async def work() -> None:
            await asyncio.sleep(1.0)

        async def fails() -> None:
            raise KeyError("for good")

        await supervisor.start_supervised("ends", work).ended
        with pytest.raises(KeyError):
            await supervisor.start_supervised("fails", fails, final=lambda error: isinstance(error, KeyError)).ended
        assert supervisor.statistics() == {"background_tasks": 0, "background_failing": 1, "background_restarts": 0}
        await supervisor.close()
        assert supervisor.statistics() == {"background_tasks": 0, "background_failing": 0, "background_restarts": 0}
        assert "fails" not in Supervisor.count_failing_tasks(), "a part that is closed has no task that should run"

    in_a_process(main)


def test_a_loop_that_ends_without_a_close_is_not_held_up() -> None:
    async def main() -> None:
        async def work() -> None:
            await asyncio.get_running_loop().create_future()

        Supervisor().start_supervised("left", work)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_task_that_is_well_is_shown_too() -> None:
    async def main() -> None:
        supervisor = Supervisor()

        async def work() -> None:
            await asyncio.get_running_loop().create_future()

        supervisor.start_supervised("well-work", work)
        await asyncio.sleep(1.0)
        assert dict(Supervisor.count_failing_tasks())["well-work"] == 0
        await supervisor.close()

    in_a_process(main)
