"""Workers on real threads: order, errors, one wake-up for many results."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from magnetar.runtime.tasks import SystemWorkers


async def test_calls_run_in_order_on_one_other_thread() -> None:
    worker = SystemWorkers().start("journal")
    seen: list[int] = []
    threads: set[str] = set()

    def call(n: int, *, double: bool) -> int:
        seen.append(n)
        threads.add(threading.current_thread().name)
        return n * 2 if double else n

    results = await asyncio.gather(*(worker.run(call, n, double=True) for n in range(500)))
    assert results == [n * 2 for n in range(500)]
    assert seen == list(range(500))
    assert threads == {"journal"}
    await worker.close()


async def test_an_error_is_the_futures_and_the_worker_goes_on() -> None:
    worker = SystemWorkers().start("w")

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(OSError, match="full"):
        await worker.run(fail, OSError("full"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await worker.run(fail, StopIteration())
    assert await worker.run(int, "7") == 7
    await worker.close()


async def test_results_that_are_ready_together_come_with_one_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    worker = SystemWorkers().start("w")
    wakes = 0
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counted(callback: object, *args: object) -> asyncio.Handle:
        nonlocal wakes
        wakes += 1
        return call_soon_threadsafe(callback, *args)  # type: ignore[arg-type]

    class Counting:
        """The worker's loop, its wake-ups counted (uvloop's methods cannot be replaced)."""

        call_soon_threadsafe = staticmethod(counted)
        create_future = staticmethod(loop.create_future)

    monkeypatch.setattr(worker, "_loop", Counting)
    finished = threading.Event()
    futures = [worker.run(int, n) for n in range(100)]
    worker.run(finished.set)
    finished.wait(10)  # the loop stands still while the thread works
    assert await asyncio.gather(*futures) == list(range(100))
    assert wakes <= 2  # the second if the last result came after the first look
    await worker.close()


async def test_close_lets_what_is_queued_run_first() -> None:
    worker = SystemWorkers().start("w")
    gate = threading.Event()
    first = worker.run(gate.wait, 10)
    rest = [worker.run(int, n) for n in range(5)]
    gate.set()
    await worker.close()
    assert first.done()
    assert [future.result() for future in rest] == list(range(5))
    await worker.close()
    with pytest.raises(AssertionError, match="closed"):
        worker.run(int)


async def test_a_cancelled_future_does_not_stop_the_others() -> None:
    worker = SystemWorkers().start("w")
    gate = threading.Event()
    first = worker.run(gate.wait, 10)
    second = worker.run(int, "2")
    first.cancel()
    gate.set()
    assert await second == 2
    await worker.close()


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Modules `waits` and `fails`: until it is set their import does."""
    event = threading.Event()
    monkeypatch.setitem(sys.modules, "gate_of_the_test", SimpleNamespace(event=event))  # type: ignore[arg-type]
    for name, asked in (("waits", "wait(30)"), ("fails", "is_set()")):
        (tmp_path / f"{name}.py").write_text(f"import gate_of_the_test\nassert gate_of_the_test.event.{asked}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return event


async def test_modules_are_loaded_while_the_loop_goes_on(gate: threading.Event) -> None:
    workers = SystemWorkers()
    first, second = [asyncio.create_task(workers.load("waits")) for _ in range(2)]
    while "waits" not in sys.modules:  # noqa: ASYNC110 - a thread puts it there
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert not first.done(), "the module is there and not loaded"
    assert not second.done()
    gate.set()
    await asyncio.gather(first, second)
    with pytest.raises(StopIteration):
        workers.load("waits").send(None)  # in the same turn


async def test_a_module_that_cannot_be_loaded_is_tried_again(gate: threading.Event) -> None:
    workers = SystemWorkers()
    with pytest.raises(AssertionError):
        await workers.load("fails")
    gate.set()
    await workers.load("fails")
