"""runtime/tasks.py: work that began ends, whatever becomes of its caller."""

import asyncio
from functools import partial

import pytest

from magnetar.runtime.tasks import run_all_steps, run_and_clean_up, run_or_undo, run_to_end


def test_the_result_and_the_error_of_the_work_are_its_callers() -> None:
    async def work(fails: bool) -> int:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("as it is")
        return 7

    async def main() -> None:
        assert await run_to_end(work(False)) == 7
        with pytest.raises(ValueError, match="as it is"):
            await run_to_end(work(True))

    asyncio.run(main())


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_caller_hears_of_it_when_the_work_has_ended(times: int, fails: bool) -> None:
    async def main() -> list[str]:
        told: list[str] = []
        go_on = asyncio.Event()

        async def work() -> None:
            await go_on.wait()
            told.append("ended")
            if fails:
                raise OSError("logged, since its caller is gone")

        async def caller() -> None:
            try:
                await run_to_end(work())
            except asyncio.CancelledError:
                told.append("cancelled")
                raise

        task = asyncio.create_task(caller())
        await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        assert told == []
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return told

    assert asyncio.run(main()) == ["ended", "cancelled"]


def test_several_callers_wait_for_the_same_end_and_one_that_is_cancelled_stops_no_other() -> None:
    async def main() -> None:
        go_on = asyncio.Event()
        ending = asyncio.create_task(go_on.wait())
        callers = [asyncio.create_task(run_to_end(ending)) for _ in range(3)]
        await asyncio.sleep(0)
        callers[1].cancel()
        await asyncio.sleep(0)
        assert not any(caller.done() for caller in callers)
        go_on.set()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert results[0] is results[2] is True
        assert isinstance(results[1], asyncio.CancelledError)

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["well", "badly", "cancelled"])
async def test_what_follows_runs_whatever_became_of_the_work_and_what_undoes_it_where_it_failed(ends: str) -> None:
    done: list[str] = []

    async def work() -> int:
        if ends == "badly":
            raise ValueError("of the work")
        await asyncio.sleep(0 if ends == "well" else 3600)
        return 7

    async def noted(name: str) -> None:
        await asyncio.sleep(0)
        done.append(name)

    for name, of in (("followed", run_and_clean_up), ("undone", run_or_undo)):
        task = asyncio.create_task(of(work(), partial(noted, name)))
        await asyncio.sleep(0)
        if ends == "cancelled":
            task.cancel()
        if ends == "well":
            assert await task == 7
        else:
            with pytest.raises(ValueError if ends == "badly" else asyncio.CancelledError):
                await task
    assert done == (["followed"] if ends == "well" else ["followed", "undone"])


@pytest.mark.parametrize("failing", [(), (0,), (1, 2), (0, 3), (3,)])
def test_each_step_runs_whatever_the_others_raise_and_the_first_error_is_raised(
    failing: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    def run(number: int) -> None:
        ran.append(number)
        if number in failing:
            raise ValueError(f"step {number}")

    async def wait_and_run(number: int) -> None:
        await asyncio.sleep(0)
        run(number)

    async def main() -> None:
        kinds = (wait_and_run, run, wait_and_run, run)
        await run_all_steps(*(partial(kind, number) for number, kind in enumerate(kinds)))

    if failing:
        with pytest.raises(ValueError, match=f"step {failing[0]}"):
            asyncio.run(main())
    else:
        asyncio.run(main())
    assert ran == [0, 1, 2, 3]
    assert [f"step {each}" in caplog.text for each in failing[1:]] == [True] * len(failing[1:]), "none is lost"


@pytest.mark.parametrize("fails", [False, True])
def test_steps_that_are_cancelled_run_all_and_end_with_the_cancellation(fails: bool) -> None:
    ran: list[str] = []

    def fail() -> None:
        if fails:
            raise ValueError("before")

    async def hang() -> None:
        ran.append("hangs")
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(run_all_steps(fail, hang, partial(ran.append, "last")))
        while not ran:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ran == ["hangs", "last"]
