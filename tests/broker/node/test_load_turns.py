"""Topics are loaded a few at a time, those of producers first, and one that does not end delays no other."""

import asyncio

import pytest

from magnetar.broker.node import load_turns
from magnetar.broker.node.load_turns import TopicLoadQueue
from magnetar.runtime.clock import SystemClock


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_no_more_than_so_many_at_a_time_and_those_of_producers_first() -> None:
    turns, begun, ends = TopicLoadQueue(2, SystemClock()), list[str](), dict[str, asyncio.Event]()

    async def load(name: str) -> None:
        ends[name] = asyncio.Event()
        async with turns.make_load_turn(name):
            begun.append(name)
            await ends[name].wait()

    turns.prioritize_topic_load("p0")
    tasks = [asyncio.create_task(load(name)) for name in ("c0", "c1", "c2", "c3", "p0", "c4")]
    await _settled()
    assert begun == ["c0", "c1"]
    assert len(turns) == 4
    turns.prioritize_topic_load("c3")  # a producer comes, too
    for name in ("c0", "c1", "p0", "c3", "c2", "c4"):
        ends[name].set()
        await _settled()
    await asyncio.gather(*tasks)
    assert begun == ["c0", "c1", "p0", "c3", "c2", "c4"]


async def test_who_gives_up_while_waiting_passes_the_turn_on() -> None:
    turns, begun, end = TopicLoadQueue(1, SystemClock()), list[int](), asyncio.Event()

    async def load(number: int) -> None:
        async with turns.make_load_turn(str(number)):
            begun.append(number)
            await end.wait()

    tasks = [asyncio.create_task(load(number)) for number in range(4)]
    await _settled()
    tasks[1].cancel()
    tasks[0].cancel()
    await asyncio.sleep(0)
    tasks[2].cancel()  # in the turn in which it got it, perhaps
    await _settled()
    assert begun[-1] == 3
    end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(turns) == 0
    async with turns.make_load_turn("again"):
        begun.append(9)
    assert begun[-1] == 9


async def test_a_load_that_does_not_end_delays_no_other_and_a_failed_one_ends_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_turns, "TURN_INTERVAL_S", 0.01)
    turns, never = TopicLoadQueue(1, SystemClock()), asyncio.Event()

    async def stuck() -> None:
        async with turns.make_load_turn("stuck"):
            await never.wait()

    task = asyncio.create_task(stuck())
    await _settled()
    with pytest.raises(ValueError, match="broken"):
        async with turns.make_load_turn("next"):  # after TURN_INTERVAL_S
            raise ValueError("broken")
    async with turns.make_load_turn("last"):
        never.set()
        await task


async def test_where_loads_take_long_and_succeed_turns_are_longer_and_no_more_topics_are_loaded_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow machine: turns that end too soon would make it slower still, until no load ends in time."""
    monkeypatch.setattr(load_turns, "TURN_INTERVAL_S", 0.01)
    turns, second = TopicLoadQueue(1, SystemClock()), asyncio.Event()

    async def load() -> None:
        async with turns.make_load_turn("second"):
            second.set()

    async with turns.make_load_turn("first"):
        task = asyncio.create_task(load())
        await second.wait()  # the turn of the first one is over before its load is
    await task
    before = turns.load_turn_timeout_s
    assert 0.01 < before <= load_turns.TURN_INTERVAL_S_MAX
    with pytest.raises(ValueError, match="broken"):
        async with turns.make_load_turn("failed"):
            raise ValueError("broken")
    assert turns.load_turn_timeout_s == before, "how long a failure takes says nothing"
    for _ in range(100):
        async with turns.make_load_turn("quick"):
            pass
    assert turns.load_turn_timeout_s == pytest.approx(0.01)
