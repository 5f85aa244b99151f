"""Tasks have an owner: what fails is seen, and nothing outlives its part."""

import asyncio

import pytest

from magnetar.runtime.tasks import Tasks, run_together


async def test_what_a_task_raises_is_logged_with_its_name_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("of ours")

    tasks = Tasks()
    tasks.spawn(fail(), "test-read")
    await tasks.drain()
    assert (len(tasks), tasks.failures) == (0, 1)
    assert "test-read failed" in caplog.text
    assert "of ours" in caplog.text


async def test_close_cancels_every_task_and_waits_for_its_end_and_none_begins_after_it() -> None:
    ended: list[int] = []

    async def last(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    tasks = Tasks()
    for number in range(3):
        tasks.spawn(last(number), "test")
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == [0, 1, 2]
    assert (len(tasks), tasks.failures) == (0, 0)
    with pytest.raises(RuntimeError, match="late"):
        tasks.spawn(last(4), "late")


async def test_drain_waits_also_for_tasks_that_begin_meanwhile() -> None:
    tasks, done = Tasks(), asyncio.Event()

    async def second() -> None:
        await asyncio.sleep(0)
        done.set()

    async def first() -> None:
        tasks.spawn(second(), "second")

    tasks.spawn(first(), "first")
    await tasks.drain()
    assert done.is_set()


async def test_the_first_error_ends_the_others_and_is_raised_when_they_have_ended() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("wait")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        await run_together([wait(), fail()], "test")
    assert ended == ["wait"]


async def test_a_cancelled_caller_leaves_none_of_them_running_and_each_does_what_it_does_at_its_end() -> None:
    ended: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(number / 100)
            ended.append(number)

    caller = asyncio.create_task(run_together([wait(0), wait(1)], "test"))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [0, 1]


async def test_the_owner_is_given_the_error_of_a_task_and_a_task_that_closes_its_own_part_comes_to_its_end() -> None:
    given: list[Exception] = []
    tasks, ended = Tasks(given.append), asyncio.Event()

    async def fail() -> None:
        raise ValueError("of ours")

    async def last() -> None:
        await tasks.close()
        ended.set()

    tasks.spawn(fail(), "test-fail")
    await tasks.drain()
    assert [str(each) for each in given] == ["of ours"]
    waiting = tasks.spawn(asyncio.Event().wait(), "test-wait")
    tasks.spawn(last(), "test-last")
    await asyncio.wait_for(ended.wait(), 30)
    assert waiting.cancelled()
