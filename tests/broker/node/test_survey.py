"""One walk over all loaded topics: what it adds up, and what it does not read."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scrape import stand_in
from magnetar.broker.log.log_shape_core import LedgerSpan
from magnetar.broker.node import survey
from magnetar.broker.node.survey import (
    ROUND_AGE_S_MAX,
    SURVEY_CACHE_S,
    TOP_TOPICS,
    TopicSurveyRunner,
    measure_topic,
)


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


class _Counted:
    """The topics of a broker; how often they were asked for, which is once for a walk on request."""

    def __init__(self, count: int) -> None:
        self.topics = [stand_in(number) for number in range(count)]
        self.walks = 0

    def __call__(self) -> list[Any]:
        self.walks += 1
        return self.topics


def _rounds(count: int = 40) -> tuple[TopicSurveyRunner, _Clock, _Counted]:
    clock, topics = _Clock(), _Counted(count)
    return TopicSurveyRunner(clock, topics), clock, topics  # type: ignore[arg-type]


async def _round(walker: TopicSurveyRunner, clock: _Clock, topics: list[Any]) -> None:
    walker.begin_round()
    for start in range(0, len(topics), 10):
        clock.now += 2
        await walker.add_to_round(topics[start : start + 10])
    walker.end_round()


async def test_rounds_measure_what_a_walk_would_and_a_request_in_between_walks_over_nothing() -> None:
    walker, clock, counted = _rounds()
    counted.topics[3].traffic.record_published(20, 4000)
    await _round(walker, clock, counted.topics)
    counted.topics[3].traffic.record_published(16, 800)
    await _round(walker, clock, counted.topics)
    clock.now += 15  # into the next round
    found = await walker.run_survey()
    assert counted.walks == 0
    assert (found.total.topics, found.total.messages_in, found.total.bytes_in) == (40, 36, 4800)
    assert (found.total.rate_in, found.namespaces["public/n3"].rate_in) == (2.0, 2.0), "16 in the 8 s of a round"
    other, _, same = _rounds()
    assert (await other.run_survey()).total.storage_bytes == found.total.storage_bytes
    assert same.walks == 1


async def test_a_request_walks_itself_when_the_rounds_are_held_up_and_nothing_is_counted_twice_or_lost() -> None:
    walker, clock, counted = _rounds()
    topics = counted.topics
    await _round(walker, clock, topics)
    walker.begin_round()
    topics[3].traffic.record_published(20, 4000)
    await walker.add_to_round(topics[:10])
    topics[3].traffic.record_published(1, 10)
    clock.now += ROUND_AGE_S_MAX
    found = await walker.run_survey()
    assert counted.walks == 1
    assert (found.total.topics, found.total.messages_in) == (40, 21)
    assert found.namespaces["public/n3"].messages_in == 21
    await walker.add_to_round(topics[10:])
    walker.end_round()
    assert (await walker.run_survey()) is found, "the round that was given up has no result"
    await _round(walker, clock, topics)
    found = await walker.run_survey()
    assert (found.total.topics, found.total.messages_in, counted.walks) == (40, 21, 1)


async def test_with_few_topics_again_requests_measure_them() -> None:
    walker, clock, counted = _rounds()
    await _round(walker, clock, counted.topics)
    walker.stop_rounds()
    clock.now += SURVEY_CACHE_S
    assert (await walker.run_survey()).total.topics == 40
    assert counted.walks == 1


async def test_a_round_that_begins_while_a_request_walks_changes_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    walker, clock, counted = _rounds()
    counted.topics[3].traffic.record_published(20, 4000)

    class Slices:
        is_slice_used_up = True

        def __init__(self, clock: Any) -> None: ...

        async def begin_slice(self) -> None:
            await _round(walker, clock, counted.topics)

    monkeypatch.setattr(survey, "EventLoopSlices", Slices)
    found = await walker.run_survey()
    assert (found.total.topics, found.total.messages_in) == (40, 20)
