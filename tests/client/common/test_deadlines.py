"""Waits with deadlines share one timer: each ends at its own, and what is over in time does not."""

import asyncio

import pytest

from magnetar.client.client import Client
from magnetar.client.common.closing import DEADLINE_TOLERANCE_S, Deadlines, timeout_after_silence
from magnetar.client.common.errors import AlreadyClosed
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate


async def test_each_wait_ends_at_its_own_deadline_whatever_the_order_in_which_they_began() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop.time)
    begin, over = loop.time(), list[str]()

    async def wait(name: str, after_s: float) -> None:
        with pytest.raises(TimeoutError):
            await deadlines.wait(loop.create_future(), begin + after_s)
        assert loop.time() >= begin + after_s
        over.append(name)

    async with asyncio.timeout(20):
        await asyncio.gather(wait("c", 0.06), wait("a", 0.0), wait("b", 0.03))
    assert over == ["a", "b", "c"]


async def test_what_is_done_in_time_has_its_result_and_the_timer_goes_on_for_the_others() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop.time)
    done: asyncio.Future[int] = loop.create_future()
    done.set_result(1)
    assert await deadlines.wait(done, 0.0) == 1, "it is not asked how late it is"
    soon: asyncio.Future[int] = loop.create_future()
    first = asyncio.ensure_future(deadlines.wait(soon, loop.time() + 0.01))
    late = asyncio.ensure_future(deadlines.wait(loop.create_future(), loop.time() + 0.05))
    await asyncio.sleep(0)
    soon.set_result(2)
    assert await first == 2
    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            await late


async def test_a_wait_that_is_cancelled_leaves_nothing_and_a_fault_ends_all_of_them() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop.time)
    future: asyncio.Future[int] = loop.create_future()
    waiting = asyncio.ensure_future(deadlines.wait(future, loop.time() + 100.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert future.cancelled()
    assert not deadlines._at
    other = asyncio.ensure_future(deadlines.wait(loop.create_future(), loop.time() + 100.0))
    await asyncio.sleep(0)
    deadlines._broke(ValueError("of ours"))
    with pytest.raises(ValueError, match="of ours"):
        await other
    deadlines.stop()


@pytest.mark.parametrize("quiet_s", [DEADLINE_TOLERANCE_S / 2, 0.0, -1.0])
async def test_a_block_that_has_next_to_no_time_ends_with_timeout_error(quiet_s: float) -> None:
    now = asyncio.get_running_loop().time
    for quiet, longest in ((quiet_s, 100.0), (100.0, quiet_s)):
        with pytest.raises(TimeoutError):
            async with timeout_after_silence(quiet, lambda: 0.0, now, longest):
                await asyncio.get_running_loop().create_future()
    async with timeout_after_silence(quiet_s, lambda: 0.0, now, 100.0):
        pass  # what needs no wait is done


def test_a_client_that_is_given_next_to_no_time_is_closed_nevertheless() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producers = [await client.create_producer("t"), await client.create_producer("u", levels=2)]
        consumers = [await client.subscribe("t", "s"), await client.subscribe("u", "s", levels=2)]
        await client.close(timeout=DEADLINE_TOLERANCE_S / 2)
        for producer in producers:
            with pytest.raises(AlreadyClosed):
                await producer.send(b"x")
        for consumer in consumers:
            with pytest.raises(AlreadyClosed):
                await consumer.receive()
        assert all(producer.is_over for producer in producers)

    simulate(body)
