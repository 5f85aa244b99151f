"""A subscription's timers: one for a rate, one for a read that failed, however often it is woken meanwhile."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.proto.states import Blocked
from tests.broker.topic.test_maintenance import deployment


class Timers:
    """Counts the timers of the loop that call `function`, and are neither over nor cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        loop, self.all = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        honest = loop.call_at

        def call_at(when: float, callback: Any, *args: Any, **options: Any) -> asyncio.TimerHandle:
            timer = honest(when, callback, *args, **options)
            if getattr(callback, "__qualname__", "") == function:
                self.all.append(timer)
            return timer

        monkeypatch.setattr(loop, "call_at", call_at)  # `call_later` comes here too

    @property
    def pending(self) -> int:
        now = asyncio.get_running_loop().time()
        return sum(not each.cancelled() and each.when() > now for each in self.all)


async def _turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_throttled_subscription_has_one_timer_however_often_it_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path) as at:
        await at.lay_down(subscription_dispatch_rate_messages=1)
        producer, consumer = await at.producer(), await at.consumer()
        timers = Timers(monkeypatch, "SubscriptionDeliveryPump._ring")
        await producer.send(*[b"x"] * 60)  # a minute's debt
        await consumer.receive()
        subscription = at.topic.find_subscription("s")
        await producer.send(b"waits")
        for _ in range(100):
            subscription.pump.wake()
            await _turns()
        assert subscription.pump.blocked is Blocked.THROTTLED
        assert timers.pending == 1
        await at.lay_down(subscription_dispatch_rate_messages=0)  # the limit is lifted: it does not wait for the timer
        assert await consumer.receive_payloads(1) == [b"waits"]


async def test_a_publish_rate_that_changes_often_leaves_one_timer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path) as at:
        await at.lay_down(publish_rate_messages=1)
        producer = await at.producer()
        await producer.send(*[b"x"] * 60)
        producer.publish(b"waits")
        gate, timers = at.topic.gate, Timers(monkeypatch, "PublishGate.resume_queued_publishes")
        gate.queue_waiting_publish(lambda: False)
        for _ in range(100):
            await _turns()
            gate.resume_queued_publishes()
        await _turns()
        assert timers.pending == 1


async def test_a_read_that_fails_for_an_unforeseen_reason_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path) as at:
        producer, consumer = await at.producer(), await at.consumer()
        reader, failed = at.topic.log.reader, 0
        honest = reader.read

        async def read(*arguments: Any) -> Any:
            nonlocal failed
            failed += 1
            if failed == 1:
                raise RuntimeError("nobody thought of it")
            return await honest(*arguments)

        monkeypatch.setattr(reader, "read", read)
        monkeypatch.setattr(reader, "read_cached", lambda *_: [])
        await producer.send(b"one")
        async with asyncio.timeout(10):
            assert await consumer.receive_payloads(1) == [b"one"]
        assert failed == 2
