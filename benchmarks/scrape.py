"""scrape: what a page of metrics costs the loop of a broker with very many topics, and how long it is held at a time.

The value is the processor time of the loop for a page, in ms, with `metrics_topics` as it is by default; in the detail
the longest step of the loop, and the same of the lines of a page with each topic (`all`), without its walk. With more
than TOPICS_WALKED_ON_REQUEST topics a page needs no walk: the rounds of maintenance measure them, and `round_ms` is the
processor time of that, every `trim_interval_s`.
Topics are stand-ins with real logs, cursors and counters: to make 100,000 real ones takes minutes. One in ten has
traffic and a backlog. The text is made in the thread of the request, and is not part of it.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
from magnetar.broker.log.reader import TopicLogReader
from magnetar.broker.node.survey import TOPICS_WALKED_ON_REQUEST, TopicSurveyRunner
from magnetar.broker.node.topic_manager import TOPICS_PER_BUCKET
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState
from magnetar.broker.subscription.subscription import NO_DELIVERY_COUNTS
from magnetar.broker.topic.statistics import TopicStatistics
from magnetar.cli.run.metrics import MeasuredParts
from magnetar.metadata.session import MetadataResponsiveness
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import Blocked
from magnetar.runtime.budget import CallerMemory
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.metrics import DURATION_BOUNDS, Histogram, MetricsPage

from .harness import Options, Run

TOPICS = 10_000


def stand_in(number: int, *, backlog: int = 0) -> Any:
    """A topic with one ledger and one durable subscription, whose mark is `backlog` entries before its end."""
    shape = LogShape()
    shape.add(LedgerSpan(number, 0, 9, 10, size=1000, open=True))
    subscription = SimpleNamespace(
        name="s", is_durable=True, store=True, consumers={}, dispatcher=SimpleNamespace(
            unacked=number, held=(), policy=SimpleNamespace(by_keys=False)
        ),
        deliveries=NO_DELIVERY_COUNTS, dead_letters=None, expired=SimpleNamespace(count=0),
        pump=SimpleNamespace(blocked=Blocked.CAUGHT_UP), reads_uncommitted=False,
        delayed=None, cursor=Cursor(shape, CursorState(Position(number, 9 - backlog))),
    )  # fmt: skip
    cache = SimpleNamespace(recent=None, get=lambda position: None)
    reader = TopicLogReader(SimpleNamespace(), shape, cache)  # type: ignore[arg-type]
    log = SimpleNamespace(shape=shape, pending_entries=0, is_degraded=number == 7, reader=reader)
    name = TopicName.parse(f"persistent://public/n{number % 20}/topic-{number}")
    return SimpleNamespace(
        name=name, traffic=TopicStatistics(SystemClock()), producers=(), log=log, subscriptions={"s": subscription},
        transactions=SimpleNamespace(statistics=lambda: None),
        key_indexes=SimpleNamespace(count_unindexed_ledgers=lambda: 0),
        waiting_message_count=0, applied=SimpleNamespace(durability="disk"),
        maintenance=SimpleNamespace(quota=None, expired=0, evicted=0,
        oldest_arrival_ms_in_memory=lambda subscription: 1_000_000 + number),
    )  # fmt: skip


def stand_in_broker(topics: dict[str, Any], config: BrokerConfig) -> Any:
    """A broker that has loaded these, for `MeasuredParts`."""
    clock = SystemClock()
    owned = SimpleNamespace(
        world=SimpleNamespace(clock=clock, own_token_ends_ms=lambda: 0),
        loaded=topics, cache=SimpleNamespace(statistics=dict), config=config,
        metrics_topics=config.metrics_topics, publish_seconds=Histogram(DURATION_BOUNDS), bookie_statistics=dict,
        memory=CallerMemory(), coordinators=(), metadata_use=MetadataResponsiveness(clock),
        survey=TopicSurveyRunner(clock, topics.values), load_seconds=Histogram(DURATION_BOUNDS), lookups=0,
        balancing=SimpleNamespace(statistics=dict), idle_unloads=0,
        sharing=SimpleNamespace(statistics=dict, stored=SimpleNamespace(limits={})),
        shared_rates=(),
    )  # fmt: skip
    return SimpleNamespace(topic_manager=owned)


def scrape(options: Options) -> Run:
    count = int(options.extra.get("topics", TOPICS // 50 if options.rehearses else TOPICS))
    topics = {str(number): stand_in(number, backlog=0 if number % 10 else 10) for number in range(count)}
    busy = [topics[str(number)].traffic for number in range(0, count, 10)]
    usual = stand_in_broker(topics, BrokerConfig())
    _page(usual)  # imports
    run = Run(0.0)
    usual.topic_manager.survey._last = None
    for each in busy:
        each.record_published(10, 1000)
    survey = usual.topic_manager.survey
    if count > TOPICS_WALKED_ON_REQUEST:
        run.detail["round_ms"], run.detail["round_longest_step_ms"] = _steps(lambda: _round(survey, topics))
    run.value, longest = _page(usual)
    run.detail |= {"topics": count, "longest_step_ms": longest}
    every = stand_in_broker(topics, BrokerConfig(metrics_topics="all"))
    asyncio.run(every.topic_manager.survey.run_survey())  # it is the other's that is measured
    run.detail["all_ms"], run.detail["all_longest_step_ms"] = _page(every)
    return run


async def _round(survey: TopicSurveyRunner, topics: dict[str, Any]) -> None:
    each = list(topics.values())
    survey.begin_round()
    for start in range(0, len(each), TOPICS_PER_BUCKET):
        await survey.add_to_round(each[start : start + TOPICS_PER_BUCKET])
        await asyncio.sleep(0)
    survey.end_round()


def _page(broker: Any) -> tuple[float, float]:
    """Returns the processor time of the steps of the loop for a page, and of the longest, in ms."""
    return _steps(lambda: MeasuredParts(broker=broker)(MetricsPage()))


def _steps(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Returns the processor time of the steps of the loop for `work`, and of the longest, in ms."""
    steps, honest = list[float](), asyncio.Handle._run

    def step(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        honest(handle)
        steps.append(time.thread_time() - begun)

    async def page() -> None:
        gc.collect()
        gc.disable()  # a collection is no work of the page
        steps.clear()
        await asyncio.sleep(0)
        await work()

    asyncio.Handle._run = step  # type: ignore[method-assign]
    try:
        asyncio.run(page())
    finally:
        asyncio.Handle._run = honest  # type: ignore[method-assign]
        gc.enable()
    del steps[0]  # that of the collection
    return round(1000 * sum(steps), 2), round(1000 * max(steps), 2)
