"""A page of metrics with very many topics: written while the broker works, and not instead."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.log.log_shape_core import LogShape, Span
from magnetar.broker.log.reader import TopicLogReader
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState
from magnetar.broker.topic.statistics import TopicStatistics
from magnetar.cli.run.metrics import MeasuredParts
from magnetar.proto.names import Position, TopicName
from magnetar.runtime.budget import CallerMemory
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.metrics import SECONDS, Histogram, Page
from tests.support.steps import Steps, slowness

TOPICS = 10_000
STEP_S = 0.05
"""Ten times what a scrape may hold the loop."""


def topic(number: int) -> Any:
    shape = LogShape()
    shape.add(Span(number, 0, 9, 10, size=1000, open=True))
    subscription = SimpleNamespace(
        name="s", is_durable=True, consumers={}, dispatcher=SimpleNamespace(unacked=number, held=()),
        delayed=None, cursor=Cursor(shape, CursorState(Position(number, 9))),
    )  # fmt: skip
    reader = TopicLogReader(SimpleNamespace(), shape, SimpleNamespace(recent=None))  # type: ignore[arg-type]
    log = SimpleNamespace(shape=shape, pending_entries=0, is_degraded=number == 7, reader=reader)
    name = TopicName.parse(f"persistent://public/default/topic-{number}")
    return SimpleNamespace(name=name, traffic=TopicStatistics(SystemClock()), producers=(), log=log,
        subscriptions={"s": subscription}, transactions=SimpleNamespace(statistics=lambda: None),
        maintenance=SimpleNamespace(expired=0, evicted=0))


async def test_a_scrape_of_ten_thousand_topics_holds_the_loop_for_no_longer_than_a_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = {str(number): topic(number) for number in range(TOPICS)}
    owned = SimpleNamespace(
        world=SimpleNamespace(clock=SystemClock()), loaded=topics, cache=SimpleNamespace(statistics=dict),
        publish_seconds=Histogram(SECONDS), bookie_statistics=dict, memory=CallerMemory(), coordinators=(),
    )
    measured, page = MeasuredParts(broker=SimpleNamespace(topic_manager=owned, topics=topics)), Page()  # type: ignore[arg-type]
    await MeasuredParts(broker=SimpleNamespace(topic_manager=owned, topics=topics))(Page())  # type: ignore[arg-type]  # imports
    with contextlib.closing(Steps(monkeypatch)) as steps:
        await asyncio.sleep(0)
        steps.clear()
        await measured(page)
        await asyncio.sleep(0)
        longest = steps.longest
        text = b"".join(page.series_chunks()).decode()
    assert longest < STEP_S * slowness(), f"{longest:.3f} s of {steps.all:.3f} s in one step"
    assert text.count("\n") == TOPICS * 15 + 30, "ten lines of a topic and five of a subscription, each with a head"
    whose = '{subscription="s",topic="persistent://public/default/topic-42"}'
    assert f"magnetar_subscription_unacked_messages{whose} 42.0\n" in text
    assert page.shown["magnetar_broker_degraded_ledgers", ()] == 1
    assert page.shown["magnetar_broker_backlogs_missing", ()] == 0
    print(f"{steps.all:.3f} s in all, {longest:.4f} s in the longest step")
