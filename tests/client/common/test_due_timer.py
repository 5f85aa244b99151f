"""The timer of a driver fires for the earliest time, and never tells a time before the one that it was armed for."""

import asyncio

import pytest

from magnetar.client.common.closing import DueTimer, EventLoopCaller


async def test_the_earliest_time_fires_and_a_clock_that_lags_the_loops_is_no_reason_to_fire_again() -> None:
    reached: list[float] = []
    done = asyncio.Event()

    def note(now: float) -> None:
        reached.append(now)
        done.set()

    timer = DueTimer(lambda: 100.0, note, lambda _error: None)  # a clock with an origin of its own, which does not move
    timer.move_to_earlier(None)
    timer.move_to_earlier(200.0)
    timer.move_to_earlier(100.02)
    timer.move_to_earlier(300.0)
    assert timer.at == 100.02
    await asyncio.wait_for(done.wait(), 30)
    assert reached == [100.02]
    timer.move_to_earlier(100.01)
    timer.stop()
    await asyncio.sleep(0.03)
    assert reached == [100.02], "a timer that was stopped does not fire"


async def test_what_fails_when_it_fires_is_told_to_its_owner() -> None:
    broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def fail(_now: float) -> None:
        raise ValueError("of ours")

    DueTimer(lambda: 0.0, fail, broken.set_result).move_to_earlier(0.0)
    assert str(await asyncio.wait_for(broken, 30)) == "of ours"


def test_each_call_after_the_loop_was_closed_is_refused() -> None:
    loop = asyncio.new_event_loop()
    caller = EventLoopCaller(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            caller.call(lambda: None, lambda error: None)
