"""Very much that is given back, or left by a consumer that goes: in slices of the loop, in order, and all of it."""

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.log.cache import StoredEntry
from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
from magnetar.broker.subscription.consumer import Consumer
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState
from magnetar.broker.subscription.core.policy import Member
from magnetar.broker.subscription.core.subscription_types import find_subscription_type
from magnetar.broker.subscription.subscription import Subscription
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import TopicState
from magnetar.runtime.clock import SystemClock
from tests.cli.run.test_metrics_many_topics import STEP_S
from tests.support.steps import Steps, slowness

ENTRIES = 50_000


class Outlet:
    """Takes everything."""

    def __init__(self) -> None:
        self.came: list[int] = []

    def deliver(self, deliveries: Any) -> bool:
        self.came += [each.entry.position[1] for each in deliveries]
        return False

    def on_active_changed(self, active: bool) -> None:
        pass


class Log:
    """A log of one ledger in memory."""

    def __init__(self) -> None:
        self.shape = LogShape()
        self.shape.add(LedgerSpan(1, 0, ENTRIES - 1, ENTRIES, size=ENTRIES, open=True))
        self.topic, self.state, self.reader = TopicName.parse("t"), TopicState.SERVING, self
        self.world = SimpleNamespace(clock=SystemClock())
        self._entries = [
            StoredEntry(Position(1, each), (b"x",), 1, each, 1, 0, slots=(each % 65535 + 1,)) for each in range(ENTRIES)
        ]

    def read_cached(self, position: Position, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        return self._entries[position[1] : position[1] + entries_max]

    def get(self, position: Position) -> StoredEntry:
        return self._entries[position[1]]


class Deployment:
    def __init__(self, type_: int) -> None:
        self.log: Any = Log()
        self.cursor = Cursor(self.log.shape, CursorState(self.log.shape.start_position))
        store: Any = SimpleNamespace(properties={}, schedule_write=lambda: None)
        limits = AppliedPolicies(max_unacked_per_consumer=0, max_unacked_per_subscription=0)
        self.subscription = Subscription("s", self.log, self.cursor, store, SystemClock(), BrokerConfig(), limits)
        self.type = type_

    def join(self, id_: int, permits: int = 10 * ENTRIES) -> tuple[Consumer, Outlet]:
        outlet = Outlet()
        consumer = Consumer(Member(id_, f"c{id_}"), outlet, address="h:1", instance="")  # type: ignore[arg-type]
        self.subscription.join(consumer, find_subscription_type(self.type))
        self.subscription.grant_permits(consumer, permits)
        return consumer, outlet

    async def quiet(self) -> None:
        """Until it has nothing more to do by itself."""
        for _ in range(100_000):
            await asyncio.sleep(0)
            if not (self.subscription.pump._due or self.subscription.pump.return_queue):
                return
        raise AssertionError("it has no end")


async def test_what_is_given_back_comes_again_in_order_before_anything_new(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(wire.Subscribe.EXCLUSIVE)
    consumer, outlet = deployment.join(1, ENTRIES - 100)
    await deployment.quiet()
    assert outlet.came == list(range(ENTRIES - 100))
    outlet.came.clear()
    gc.collect()
    gc.disable()
    try:
        steps = Steps(monkeypatch)
        await asyncio.sleep(0)
        deployment.subscription.redeliver(consumer, None)
        deployment.subscription.grant_permits(consumer, 2 * ENTRIES)
        await deployment.quiet()
    finally:
        gc.enable()
    assert outlet.came == list(range(ENTRIES))
    assert steps.longest < STEP_S * slowness(), f"{steps.longest:.3f} s of {steps.all:.3f} s in one step"
    deployment.subscription.dispatcher.check()
    print(f"{steps.all:.3f} s in all, {steps.longest:.4f} s in the longest step")


@pytest.mark.parametrize("type_", [wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED], ids=["shared", "key_shared"])
async def test_what_a_consumer_held_that_goes_is_given_to_the_others_in_slices(
    monkeypatch: pytest.MonkeyPatch, type_: int
) -> None:
    deployment = Deployment(type_)
    going, outlet = deployment.join(1)
    await deployment.quiet()
    assert len(outlet.came) == ENTRIES
    _, other = deployment.join(2)
    await deployment.quiet()
    gc.collect()
    gc.disable()
    try:
        steps = Steps(monkeypatch)
        await asyncio.sleep(0)
        deployment.subscription.leave(going)
        await deployment.quiet()
    finally:
        gc.enable()
    assert sorted(other.came) == list(range(ENTRIES))
    assert steps.longest < STEP_S * slowness(), f"{steps.longest:.3f} s of {steps.all:.3f} s in one step"
    deployment.subscription.dispatcher.check()
    print(f"{steps.all:.3f} s in all, {steps.longest:.4f} s in the longest step")


async def test_when_the_last_consumer_goes_nothing_is_given_back_and_the_next_begins_anew() -> None:
    deployment = Deployment(wire.Subscribe.SHARED)
    going, _ = deployment.join(1)
    await deployment.quiet()
    deployment.subscription.leave(going)
    assert not deployment.subscription.pump.return_queue
    deployment.type = wire.Subscribe.KEY_SHARED
    _, outlet = deployment.join(2)
    await deployment.quiet()
    assert sorted(outlet.came) == list(range(ENTRIES))
