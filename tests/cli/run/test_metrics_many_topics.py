"""A page of metrics with very many topics: written while the broker works, and not instead."""

import asyncio
import contextlib
import re

import pytest

from benchmarks.scrape import stand_in, stand_in_broker
from magnetar.broker.common.config import BrokerConfig
from magnetar.cli.run import metrics
from magnetar.cli.run.metrics import CachedMetricsPage, MeasuredParts
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.metrics import MetricsPage, MetricsQuery
from tests.support.steps import Steps, slowness

TOPICS = 10_000
STEP_S = 0.05
"""Ten times what a scrape may hold the loop."""


async def scrape(count: int, shown: str = "auto", query: MetricsQuery = MetricsQuery()) -> tuple[MetricsPage, str]:  # noqa: B008
    topics = {str(number): stand_in(number, backlog=0 if number % 100 else 10) for number in range(count)}
    page = MetricsPage(query)
    await MeasuredParts(broker=stand_in_broker(topics, BrokerConfig(metrics_topics=shown)))(page)  # type: ignore[arg-type]
    return page, b"".join(page.series_chunks()).decode()


@pytest.mark.parametrize("shown", ["all", "auto"])
async def test_a_scrape_of_ten_thousand_topics_holds_the_loop_for_no_longer_than_a_slice(
    monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    topics = {str(number): stand_in(number) for number in range(TOPICS)}
    measured, page = MeasuredParts(broker=stand_in_broker(topics, BrokerConfig(metrics_topics=shown))), MetricsPage()  # type: ignore[arg-type]
    await scrape(1)  # imports
    with contextlib.closing(Steps(monkeypatch)) as steps:
        await asyncio.sleep(0)
        steps.clear()
        await measured(page)
        await asyncio.sleep(0)
        longest = steps.longest
        text = b"".join(page.series_chunks()).decode()
    assert longest < STEP_S * slowness(), f"{longest:.3f} s of {steps.all:.3f} s in one step"
    if shown == "all":
        lines = [each for each in text.splitlines() if each.startswith(("magnetar_topic_", "magnetar_subscription_"))]
        assert len(lines) == TOPICS * 21, "eleven of a topic and ten of a subscription"
        whose = '{subscription="s",topic="persistent://public/n2/topic-42"}'
        assert f"magnetar_subscription_unacked_messages{whose} 42\n" in text
    assert page.shown["magnetar_broker_degraded_ledgers", ()] == 1
    assert page.shown["magnetar_broker_backlogs_missing", ()] == 0
    print(f"{steps.all:.3f} s in all, {longest:.4f} s in the longest step")


async def test_up_to_two_thousand_topics_each_is_shown_and_above_that_the_largest() -> None:
    page, text = await scrape(metrics.TOPIC_LEVEL_TOPICS_MAX)
    assert page.shown["magnetar_broker_topics_not_shown", ()] == 0
    assert text.count("\nmagnetar_topic_producers{") + text.startswith("magnetar_topic_producers{") == 2000
    page, text = await scrape(metrics.TOPIC_LEVEL_TOPICS_MAX + 100)
    assert text.count("\nmagnetar_topic_producers{") == 21, "those with a backlog, of which 50 would be shown"
    assert page.shown["magnetar_broker_topics_not_shown", ()] == 2079
    assert page.shown["magnetar_broker_backlog_messages", ()] == 210
    assert 'magnetar_namespace_backlog_messages{namespace="public/n0"} 210\n' in text


async def test_the_level_is_a_setting() -> None:
    page, text = await scrape(50, "namespace")
    assert 'magnetar_namespace_topics{namespace="public/n3"} 3\n' in text
    assert text.count("\nmagnetar_topic_producers{") == 1
    page, text = await scrape(50, "none")
    assert not text
    assert page.shown["magnetar_broker_topics", ()] == page.shown["magnetar_broker_topics_not_shown", ()] == 50
    assert page.shown["magnetar_broker_storage_bytes", ()] == 50_000


def topics_of(text: str) -> set[str]:
    return set(re.findall(r'^magnetar_topic_producers{topic="persistent://(.*)/topic-', text, re.M))


async def test_a_request_may_ask_for_another_level_and_for_one_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    page, text = await scrape(50, "none", MetricsQuery("topic"))
    assert page.shown["magnetar_broker_topics_not_shown", ()] == 0
    assert len(topics_of(text)) == 20
    page, text = await scrape(50, "none", MetricsQuery("topic", "public/n3"))
    assert topics_of(text) == {"public/n3"}
    assert page.shown["magnetar_broker_topics_not_shown", ()] == 47
    assert page.shown["magnetar_broker_storage_bytes", ()] == 50_000, "the sums of the broker are of all"
    assert re.findall(r'^magnetar_namespace_topics{namespace="(.*)"} 3$', text, re.M) == ["public/n3"]
    page, text = await scrape(50, "all", MetricsQuery("namespace", "public/n3"))
    assert topics_of(text) == set()
    assert 'magnetar_namespace_topics{namespace="public/n3"} 3\n' in text
    page, text = await scrape(50, "all", MetricsQuery("none"))
    assert not text
    page, text = await scrape(2100, "auto", MetricsQuery("", "public/n3"))
    assert topics_of(text) == {"public/n3"}, "of this namespace there are few"
    page, text = await scrape(50, "auto", MetricsQuery("topic", "public/none"))
    assert page.shown["magnetar_broker_topics_not_shown", ()] == 50
    monkeypatch.setattr(metrics, "REQUESTED_TOPICS_MAX", 7)
    page, text = await scrape(50, "none", MetricsQuery("topic"))
    assert page.shown["magnetar_broker_topics_not_shown", ()] == 43


async def test_pages_of_two_queries_are_each_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[MetricsQuery]()

    async def measure(page: MetricsPage) -> None:
        made.append(page.query)
        series = page.add_series("magnetar_things", "gauge", "Things.")
        series.lines += ["1\n"] * (metrics.UNCACHED_LINES_MAX + 1)

    repeated = CachedMetricsPage(measure, SystemClock())
    queries = [MetricsQuery(), MetricsQuery("topic")]
    for query in 2 * queries:
        await repeated(MetricsPage(query))
    assert made == queries
    for query in (MetricsQuery("none"), *reversed(queries)):
        await repeated(MetricsPage(query))
    assert made == [*queries, MetricsQuery("none"), MetricsQuery()], "the oldest made room"


async def test_a_page_of_many_lines_is_served_again_and_a_small_one_is_as_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, lines, now = 0, 1, 0.0

    async def measure(page: MetricsPage) -> None:
        nonlocal made
        made += 1
        series = page.add_series("magnetar_things", "gauge", "Things.")
        for number in range(lines):
            series.add("", number)

    clock = SystemClock()
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    repeated = CachedMetricsPage(measure, clock)
    for _ in range(3):
        await repeated(MetricsPage())
    assert made == 3
    lines = metrics.UNCACHED_LINES_MAX + 1
    pages = [MetricsPage() for _ in range(3)]
    await asyncio.gather(*map(repeated, pages))
    assert made == 4
    assert len({b"".join(page.series_chunks()) for page in pages}) == 1
    now += metrics.PAGE_CACHE_S
    await repeated(MetricsPage())
    assert made == 5
