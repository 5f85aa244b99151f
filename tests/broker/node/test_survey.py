"""One walk over all loaded topics: what it adds up, and what it does not read."""

import asyncio
from types import SimpleNamespace
from typing import Any

from benchmarks.scrape import stand_in
from magnetar.broker.log.log_shape_core import LedgerSpan
from magnetar.broker.node.survey import SURVEY_CACHE_S, TOP_TOPICS, TopicSurveyRunner, measure_topic


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def surveyor(topics: dict[str, Any]) -> tuple[TopicSurveyRunner, _Clock]:
    clock = _Clock()
    return TopicSurveyRunner(clock, lambda: topics.values()), clock  # type: ignore[arg-type]


async def test_a_walk_adds_up_all_topics_and_each_namespace() -> None:
    topics = {str(number): stand_in(number, backlog=number % 3) for number in range(40)}
    walker, clock = surveyor(topics)
    topics["3"].traffic.record_published(20, 4000)
    topics["3"].traffic.record_delivered(5, 1000)
    clock.now += 10
    found = await walker.run_survey()
    assert found.total.topics == found.total.subscriptions == 40
    assert found.total.storage_bytes == 40_000
    assert found.total.degraded == 1
    assert found.total.backlog == sum(number % 3 for number in range(40))
    assert (found.total.messages_in, found.total.bytes_in, found.total.rate_in) == (20, 4000, 2.0)
    assert (found.total.messages_out, found.total.throughput_out) == (5, 100.0)
    assert len(found.namespaces) == 20
    assert found.namespaces["public/n3"].messages_in == 20
    assert sum(each.backlog for each in found.namespaces.values()) == found.total.backlog


async def test_totals_never_fall_though_topics_go() -> None:
    topics = {str(number): stand_in(number) for number in range(40)}
    walker, clock = surveyor(topics)
    topics["3"].traffic.record_published(20, 4000)
    clock.now += SURVEY_CACHE_S
    assert (await walker.run_survey()).total.messages_in == 20
    topics["3"].traffic.record_published(1, 10)
    clock.now += SURVEY_CACHE_S
    found = await walker.run_survey()
    assert (found.total.messages_in, found.namespaces["public/n3"].messages_in) == (21, 21)
    for number in range(20):
        del topics[str(number)]
    topics["30"].traffic.record_published(2, 20)
    clock.now += SURVEY_CACHE_S
    found = await walker.run_survey()
    assert (found.total.topics, found.total.messages_in, found.total.bytes_in) == (20, 23, 4030)
    assert found.namespaces["public/n3"].messages_in == 21, "one of its topics is left"


async def test_the_largest_topics_are_those_with_most_traffic_backlog_and_age() -> None:
    topics = {str(number): stand_in(number, backlog=number % 10) for number in range(200)}
    walker, clock = surveyor(topics)
    for number in (7, 70, 170):
        topics[str(number)].traffic.record_published(number, number * 100)
    clock.now += SURVEY_CACHE_S
    found = await walker.run_survey()
    assert [facts.topic.name.local for facts in found.largest["traffic"]] == ["topic-170", "topic-70", "topic-7"]
    assert len(found.largest["backlog"]) == TOP_TOPICS
    assert [facts.backlog for facts in found.largest["backlog"]][:20] == [9] * 20
    ages = [facts.oldest_ms for facts in found.largest["age"]]
    assert ages == sorted(ages)
    assert found.largest["age"][0].topic.name.local == "topic-1", "the oldest first; topic-0 has no backlog"
    clock.now += SURVEY_CACHE_S
    assert not (await walker.run_survey()).largest["traffic"], "of the time since the walk before"


async def test_a_walk_is_shown_again_and_callers_share_one() -> None:
    topics = {"1": stand_in(1)}
    walker, clock = surveyor(topics)
    first, second = await asyncio.gather(walker.run_survey(), walker.run_survey())
    assert first is second
    clock.now += SURVEY_CACHE_S / 2
    assert await walker.run_survey() is first
    clock.now += SURVEY_CACHE_S
    assert await walker.run_survey() is not first


async def test_an_age_that_is_not_known_is_read_after_the_walk() -> None:
    topic, read = stand_in(1, backlog=3), list[str]()

    async def oldest(subscription: Any) -> int:
        read.append(subscription.name)
        topic.maintenance.oldest_arrival_ms_in_memory = lambda subscription: 77
        return 77

    topic.maintenance = SimpleNamespace(
        quota=None, oldest_arrival_ms_in_memory=lambda subscription: 0, oldest_arrival_ms=oldest
    )
    walker, clock = surveyor({"1": topic})
    assert not (await walker.run_survey()).largest["age"]
    await asyncio.sleep(0)
    assert read == ["s"]
    clock.now += SURVEY_CACHE_S
    assert (await walker.run_survey()).largest["age"][0].oldest_ms == 77


async def test_the_age_of_a_topic_is_that_of_the_subscription_that_lags_most_or_not_known() -> None:
    """As after a move: of what comes now the time is in memory, and of the oldest message it has to be read."""
    topic, times = stand_in(1, backlog=3), {"s": 0, "live": 99}
    (lagging,), (live,) = (each.subscriptions.values() for each in (topic, stand_in(1, backlog=1)))
    live.name = "live"
    topic.subscriptions = {"live": live, "s": lagging}

    async def read(subscription: Any) -> int:
        return times[subscription.name]

    topic.maintenance = SimpleNamespace(
        quota=None, oldest_arrival_ms_in_memory=lambda each: times[each.name], oldest_arrival_ms=read
    )
    walker, clock = surveyor({"1": topic})
    found = await walker.run_survey()
    assert [facts.oldest_ms for facts in found.largest["backlog"]] == [measure_topic(topic).oldest_ms] == [0]
    assert not found.largest["age"]
    times["s"] = 77
    clock.now += SURVEY_CACHE_S
    found = await walker.run_survey()
    assert [facts.oldest_ms for facts in found.largest["age"]] == [measure_topic(topic).oldest_ms] == [77]


async def test_a_topic_that_was_away_for_a_walk_counts_with_the_others_of_its_namespace() -> None:
    topics = {str(number): stand_in(number) for number in (1, 21)}  # of one namespace
    walker, clock = surveyor(topics)
    assert (await walker.run_survey()).namespaces["public/n1"].topics == 2
    away, there = topics.pop("1"), topics.pop("21")
    clock.now += SURVEY_CACHE_S
    assert not (await walker.run_survey()).namespaces
    topics["41"] = stand_in(41)
    clock.now += SURVEY_CACHE_S
    assert (await walker.run_survey()).namespaces["public/n1"].topics == 1
    topics |= {"1": away, "21": there}
    clock.now += SURVEY_CACHE_S
    found = await walker.run_survey()
    assert found.namespaces["public/n1"].topics == found.total.topics == 3


async def test_a_ledger_that_follows_another_is_walked() -> None:
    topic = stand_in(1)
    walker, clock = surveyor({"1": topic})
    assert (await walker.run_survey()).total.backlog == 0
    shape = topic.log.shape
    shape.close_last_ledger_span(1, 9, 10, 1000, 5)
    shape.add(LedgerSpan(2, 10, 4, 15, size=500, open=True))
    clock.now += SURVEY_CACHE_S
    found = await walker.run_survey()
    assert (found.total.storage_bytes, found.total.backlog) == (1500, 5)
    shape.remove(1)
    shape.tail_span.last_entry, shape.tail_span.end_index, shape.tail_span.size = 5, 16, 600
    clock.now += SURVEY_CACHE_S
    found = await walker.run_survey()
    assert (found.total.storage_bytes, found.total.backlog) == (600, 6)
    shape.close_last_ledger_span(2, 5, 16, 600, 6)
    clock.now += SURVEY_CACHE_S
    assert (await walker.run_survey()).total.storage_bytes == 600
