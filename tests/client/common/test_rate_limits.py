"""RateLimiter and CircuitBreaker as programs use them; the core of the first: tests/runtime/test_token_bucket.py."""

import asyncio
import threading
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.common.rate_limits import (
    AsyncRateLimiter,
    BreakerCore,
    BreakerState,
    CircuitBreaker,
    CircuitOpen,
    RateLimiter,
    parse_rate,
)
from magnetar.runtime.sim.world import Simulation
from tests.client import simulated
from tests.client.fake_broker import FakeBroker
from tests.support.cluster import cluster


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def simulate(body: Any) -> None:
    simulation = Simulation(seed=1)

    async def main() -> None:
        await simulation.spawn("program", body(simulation))

    simulation.run(main())


pytestmark = pytest.mark.run_by.with_args(simulate)


def test_what_the_rate_does_not_allow_is_refused_until_its_time() -> None:
    clock = Clock()
    limiter = RateLimiter(2, clock=clock)
    assert [limiter.allow() for _ in range(3)] == [True, True, False]
    assert limiter.delay_s() == pytest.approx(0.5)
    clock.now += 0.5
    assert [limiter.allow() for _ in range(2)] == [True, False]
    limiter.rate = 100
    clock.now += 0.05
    assert [limiter.allow() for _ in range(6)] == [True] * 5 + [False]


def test_a_slow_rate_lets_one_through_and_a_leaky_one_never_two_at_once() -> None:
    clock = Clock()
    slow, leaky = RateLimiter(0.1, clock=clock), RateLimiter(100, leaky=True, clock=clock)
    assert [slow.allow(), slow.allow()] == [True, False]
    clock.now += 1000
    assert [leaky.allow(), leaky.allow()] == [True, False]
    assert [slow.allow(), slow.allow()] == [True, False]


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 0}, {"rate": float("inf")}, {"rate": True}, {"rate": 1, "burst": 0.5},
        {"rate": 1, "burst": 2, "leaky": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_rate_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(magnetar.InvalidConfiguration):
        RateLimiter(**options)


def test_a_thread_waits_for_its_turn_or_for_its_timeout() -> None:
    limiter = RateLimiter(1000, leaky=True)
    for _ in range(20):
        limiter.wait()
    stopped = RateLimiter(0.001)
    stopped.wait()
    with pytest.raises(magnetar.Timeout, match=r"0\.001 a second"):
        stopped.wait(timeout=0)


def test_threads_together_get_no_more_than_the_rate() -> None:
    clock = Clock()
    limiter, allowed = RateLimiter(50, clock=clock), list[bool]()
    threads = [threading.Thread(target=lambda: allowed.extend(limiter.allow() for _ in range(40))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(allowed) == 50


async def test_tasks_have_their_turn_in_order_at_the_rate(simulation: Simulation, /) -> None:
    loop = asyncio.get_running_loop()
    limiter, turns = AsyncRateLimiter(10, leaky=True, clock=loop.time), list[tuple[int, float]]()
    began = loop.time()

    async def work(number: int) -> None:
        await limiter.wait()
        turns.append((number, loop.time() - began))

    await asyncio.gather(*(work(number) for number in range(30)))
    assert [number for number, _ in turns] == list(range(30))
    assert [at for _, at in turns] == pytest.approx([number / 10 for number in range(30)], abs=0.01)


async def test_who_is_cancelled_or_too_late_counts_nothing(simulation: Simulation, /) -> None:
    loop = asyncio.get_running_loop()
    limiter = AsyncRateLimiter(0.01, clock=loop.time)
    await limiter.wait()
    with pytest.raises(magnetar.Timeout):
        await limiter.wait(timeout=50)
    waiting = asyncio.ensure_future(limiter.wait())
    await asyncio.sleep(10)
    waiting.cancel()
    await asyncio.wait([waiting])
    began = loop.time()
    await limiter.wait()
    assert loop.time() - began == pytest.approx(40, abs=0.6)
    sleeping = asyncio.ensure_future(limiter.wait())
    await asyncio.sleep(1)
    limiter.rate = 1000
    began = loop.time()
    await sleeping
    assert loop.time() - began < 0.6, "a changed rate is seen soon"


def test_a_guard_raises_while_the_breaker_is_open_and_counts_what_it_was_told_to() -> None:
    clock = Clock()
    breaker = CircuitBreaker(2, 30, counts=(ConnectionError,), clock=clock)
    for error in (ConnectionError(), ValueError(), ConnectionError(), ConnectionError()):
        with pytest.raises(type(error)), breaker.guard():
            raise error
    assert (breaker.current_state, breaker.opened) == (BreakerState.OPEN, 1)
    with pytest.raises(CircuitOpen, match="open"), breaker.guard():
        raise AssertionError("it is not called")
    clock.now += 30
    with breaker.guard():
        assert breaker.current_state is BreakerState.HALF_OPEN
    assert breaker.current_state is BreakerState.CLOSED


@pytest.mark.parametrize(
    "options", [{"failures": 0}, {"pause": -1}, {"trials": 0}, {"counts": 3}, {"counts": ()}], ids=str
)
def test_a_breaker_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(magnetar.InvalidConfiguration):
        CircuitBreaker(**options)


def test_a_breaker_opens_after_failures_in_a_row_tries_after_its_pause_and_closes_by_a_success() -> None:
    breaker = BreakerCore(failures=3, pause_s=30, trials=1)

    def call(now: float, failed: bool) -> BreakerState:
        ticket = breaker.begin_call(now)
        assert ticket
        breaker.end_call(ticket, failed, now)
        breaker.check()
        return breaker.find_state(now)

    closed = [call(0, failed) for failed in (True, True, False, True, True)]
    assert set(closed) == {BreakerState.CLOSED}
    assert call(1, True) is BreakerState.OPEN
    assert (breaker.begin_call(2), breaker.delay_s(11), breaker.opened) == (0, 20, 1)
    trial = breaker.begin_call(31)
    assert trial
    assert (breaker.begin_call(31), breaker.delay_s(31), breaker.find_state(31)) == (0, inf, BreakerState.HALF_OPEN)
    breaker.end_call(trial, True, 32)
    assert (breaker.find_state(61), breaker.opened) == (BreakerState.OPEN, 2)
    assert call(62, False) is BreakerState.CLOSED


def test_a_call_of_before_the_breaker_opened_neither_closes_it_nor_counts_as_a_trial() -> None:
    breaker = BreakerCore(failures=1, pause_s=10, trials=1)
    late, first = breaker.begin_call(0), breaker.begin_call(0)
    breaker.end_call(first, True, 0)
    breaker.end_call(late, False, 11)
    assert breaker.find_state(11) is BreakerState.HALF_OPEN
    trial = breaker.begin_call(11)
    breaker.end_call(trial, None, 12)
    assert breaker.begin_call(12), "a trial without an outcome is made again"


# ------------------------------------------------------------------------------------ a rate that is watched
def test_a_rate_is_a_number_above_0_as_text_and_nothing_else() -> None:
    assert [parse_rate(each) for each in (b"50", b"0.5", b" 1e3\n")] == [50, 0.5, 1000]
    wrong = (b"", b"0", b"-1", b"inf", b"nan", b"1e400", b"fast", b"\xff", b"5 a second")
    assert [parse_rate(each) for each in wrong] == [None] * len(wrong)


def test_a_watched_rate_follows_its_key_and_no_other_and_goes_back_when_that_is_deleted(
    caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("rates")

        async def put(key: str, value: bytes | None) -> None:
            await producer.send(value, partition_key=key)
            await asyncio.sleep(1)

        await put("vendor", b"50")
        first, second = AsyncRateLimiter(10), AsyncRateLimiter(10, leaky=True)
        view = await first.watch(client, "rates", "vendor")
        await second.watch(client, "rates", "other")
        assert (first.rate, second.rate) == (50, 10)
        await put("other", b"7.5")
        assert (first.rate, second.rate) == (50, 7.5)
        for wrong in (b"fast", b"0"):
            await put("vendor", wrong)
            assert first.rate == 50
        await put("vendor", None)
        assert first.rate == 10
        await put("vendor", b"20")
        broker.cut()
        await put("vendor", b"30")
        await asyncio.sleep(5)
        assert first.rate == 30, "also after the connection was lost"
        await view.close()
        await put("vendor", b"40")
        assert (first.rate, second.rate) == (30, 7.5)
        with pytest.raises(magnetar.InvalidConfiguration):
            await first.watch(client, "rates", "")

    simulated.simulate(body)
    assert "the rate 'vendor' stays 50 a second" in caplog.text


def test_who_waits_in_a_thread_has_the_rate_that_an_operator_sets(tmp_path: Path) -> None:
    def program(url: str) -> None:
        with magnetar.Client(url) as client:
            limiter = RateLimiter(0.001)
            limiter.watch(client, "rates", "vendor")
            assert limiter.allow()
            client.create_producer("rates").send(b"1000", partition_key="vendor")
            limiter.wait(timeout=30)
            assert limiter.rate == 1000

    async def main(run: Callable[[str], None]) -> None:
        async with cluster(tmp_path) as running:
            await asyncio.to_thread(run, f"magnetar://{running.brokers[0].endpoint}")

    asyncio.run(main(program))
