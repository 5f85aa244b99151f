"""Workers without threads keep the order that a thread keeps."""

import asyncio
import sys

import pytest

from magnetar.runtime.sim.disk import DeadProcess
from magnetar.runtime.sim.world import Simulation


def test_calls_run_one_at_a_time_in_order_and_results_come_in_order() -> None:
    simulation = Simulation(1)
    events: list[str] = []

    def work(name: str) -> str:
        events.append(f"run {name}")
        if name == "3":
            raise OSError(name)
        return name

    async def main() -> None:
        worker = simulation.world("a").workers.start("disk")
        futures = [worker.run(work, str(number)) for number in range(6)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda done, number=number: events.append(f"answer {number}"))
        futures[1].cancel()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [str(result) for result in results] == ["0", "", "2", "3", "4", "5"]
        await worker.close()
        with pytest.raises(AssertionError):
            worker.run(int)

    simulation.run(main())
    assert [event for event in events if event.startswith("run")] == [f"run {number}" for number in range(6)]
    answers = [event for event in events if event.startswith("answer")]
    assert answers == [f"answer {number}" for number in (1, 0, 2, 3, 4, 5)]


def test_a_dead_process_has_no_workers() -> None:
    simulation = Simulation(1)
    ran: list[int] = []

    async def main() -> None:
        worker = simulation.world("a").workers.start("disk")
        worker.run(ran.append, 1)
        simulation.crash("a")
        with pytest.raises(DeadProcess):
            worker.run(ran.append, 2)
        await asyncio.sleep(10)

    simulation.run(main())
    assert ran == []


def test_what_is_loaded_changes_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the process that simulates has imported a module before must not."""
    simulation = Simulation(1)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)

    async def main() -> None:
        loading = simulation.world("a").workers.load("colorsys")
        with pytest.raises(StopIteration):
            loading.send(None)  # type: ignore[attr-defined]
        assert "colorsys" in sys.modules

    simulation.run(main())
