"""The views of the page: each is a function that returns a value, and a template shows it.

A view calls operations as its caller (`RestRequest`), so the page shows nobody more than REST does. `?format=json`
shows the value itself.

| path below /ui | view | template |
|---|---|---|
| `/` | `overview` | overview.html |
| `/topics` | `topics` | topics.html |
| `/topics/{domain}/{tenant}/{namespace}/{topic}` | `topic` | topic.html |
| the same, and `/subscription/{subscription}` | `subscription` | subscription.html |
| `/brokers`, `/bookies`, `/settings` | of the same name | of the same name |

Guarding tests: tests/broker/rest/test_page.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from ....proto import operations as op
from ....proto.alarms import Alarm, find_alarms, find_metadata_alarms
from ....proto.statistics import (
    BookieInfo,
    BrokerSetting,
    BrokerSummary,
    ClusterSummary,
    KeptLedger,
    SubscriptionStats,
    TopicPage,
    TopicRow,
    TopicStats,
    WhyStuck,
)
from ....runtime.config import REQUIRED, defaults_of, settings
from ...session.settings import to_java_text
from ..call import BadRequest, RestRequest

ROWS = 10
"""Rows of a table of the overview."""
WHY_MAX = 50
"""Subscriptions of a topic that are explained: each is a request to its owner."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The cluster: its sums, what is wrong, and the topics to look at first."""

    topics: int
    subscriptions: int
    producers: int
    consumers: int
    rate_in: float
    rate_out: float
    throughput_in: float
    throughput_out: float
    storage_bytes: int
    backlog: int
    connections: int
    brokers: tuple[BrokerSummary, ...]
    bookies: tuple[BookieInfo, ...]
    alarms: tuple[Alarm, ...]
    worst: tuple[TopicRow, ...]  # the largest backlogs
    busiest: tuple[TopicRow, ...]


@dataclass(frozen=True, slots=True)
class Topics:
    """A page of topics, and what was asked for."""

    q: str
    sort: str
    page: TopicPage


@dataclass(frozen=True, slots=True)
class Explained:
    """A subscription, and why it does not get on. None: it was not asked for."""

    stats: SubscriptionStats
    why: WhyStuck | None


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic without partitions or a partition: `stats` and what follows. A partitioned topic: `partitions`."""

    name: str
    partitions: tuple[str, ...] = ()
    stats: TopicStats | None = None
    subscriptions: tuple[Explained, ...] = ()
    ledgers: tuple[KeptLedger, ...] = ()


@dataclass(frozen=True, slots=True)
class SubscriptionView:
    """One subscription of a topic."""

    topic: str
    explained: Explained


@dataclass(frozen=True, slots=True)
class Brokers:
    """All brokers; `silent` did not answer."""

    brokers: tuple[BrokerSummary, ...]
    silent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bookies:
    """All registered bookies."""

    bookies: tuple[BookieInfo, ...]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting of the broker that was asked, and what it is for."""

    setting: BrokerSetting
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in force at the broker that was asked."""

    broker: str
    settings: tuple[SettingRow, ...]


async def overview(call: RestRequest) -> Overview:
    summary = await call.call_local(op.BROKER_SUMMARIES)
    totals = [each.total for each in summary.brokers]
    by_backlog = [row for each in summary.brokers for row in each.by_backlog if row.backlog]
    by_traffic = [row for each in summary.brokers for row in each.by_traffic if row.rate_in or row.rate_out]
    return Overview(
        topics=sum(each.topics for each in totals), subscriptions=sum(each.subscriptions for each in totals),
        producers=sum(each.producers for each in totals), consumers=sum(each.consumers for each in totals),
        rate_in=sum(each.rate_in for each in totals), rate_out=sum(each.rate_out for each in totals),
        throughput_in=sum(each.throughput_in for each in totals),
        throughput_out=sum(each.throughput_out for each in totals),
        storage_bytes=sum(each.storage_bytes for each in totals), backlog=sum(each.backlog for each in totals),
        connections=sum(each.connections for each in summary.brokers), brokers=summary.brokers,
        bookies=summary.bookies, alarms=tuple(_alarms(summary, call.broker.world.clock.wall_ms())),
        worst=tuple(heapq.nsmallest(ROWS, by_backlog, key=lambda row: (-row.backlog, row.name))),
        busiest=tuple(heapq.nsmallest(ROWS, by_traffic, key=lambda row: (-row.rate_in - row.rate_out, row.name))),
    )  # fmt: skip


def _alarms(found: ClusterSummary, now_ms: int) -> list[Alarm]:
    oldest = [{"name": row.name, "oldest_ms": row.oldest_ms} for each in found.brokers for row in each.by_age
              if row.oldest_ms]
    oldest.sort(key=itemgetter("oldest_ms"))
    return find_metadata_alarms(found.metadata_away_ms, now_ms) + find_alarms(
        [{"broker": each.name, "busy": each.loop_busy, "degraded": each.degraded} for each in found.brokers],
        found.silent,
        [
            {
                "bookie": each.id, "state": "read-only" if each.read_only else "writable",
                "freeBytes": each.free_bytes, "totalBytes": each.total_bytes,
            }
            for each in found.bookies
        ],
        oldest, now_ms,
    )  # fmt: skip


async def topics(call: RestRequest) -> Topics:
    q, sort = call.query.get("q", ""), call.query.get("sort", "")
    page = await call.call_local(
        op.TOPIC_PAGE, prefix="", contains=q, sort=sort, after=call.query.get("after", ""), limit=100, here=False
    )
    return Topics(q, sort, page)


async def topic(call: RestRequest) -> TopicView:
    name = call.topic
    await call.authorize(op.TOPIC_STATS, name=name.full)
    partitions = await call.list_partitions()
    if partitions:
        return TopicView(name.full, partitions=tuple(each.full for each in partitions))
    stats = await call.call_owner(op.TOPIC_STATS, name)
    kept = await call.call_owner(op.WHY_KEPT, name)

    async def explain(each: SubscriptionStats) -> Explained:
        await call.authorize(op.WHY_STUCK, topic=name.full, name=each.name)
        why = await call.call_owner(op.WHY_STUCK, name, name=each.name)
        return Explained(each, why)

    first, others = stats.subscriptions[:WHY_MAX], stats.subscriptions[WHY_MAX:]
    explained = [await explain(each) for each in first]
    return TopicView(
        name.full, stats=stats, subscriptions=(*explained, *(Explained(each, None) for each in others)),
        ledgers=kept.ledgers,
    )  # fmt: skip


async def subscription(call: RestRequest) -> SubscriptionView:
    name = call.names["subscription"]
    await call.authorize(op.WHY_STUCK, topic=call.topic.full, name=name)
    why = await call.call_owner(op.WHY_STUCK, call.topic, name=name)
    await call.authorize(op.TOPIC_STATS, name=call.topic.full)
    stats = await call.call_owner(op.TOPIC_STATS, call.topic)
    found = next((each for each in stats.subscriptions if each.name == name), None)
    if found is None:
        raise BadRequest("the topic has no such subscription", 404)
    return SubscriptionView(call.topic.full, Explained(found, why))


async def brokers(call: RestRequest) -> Brokers:
    found = await call.call_local(op.BROKER_SUMMARIES)
    return Brokers(found.brokers, found.silent)


async def bookies(call: RestRequest) -> Bookies:
    found = await call.call_local(op.LIST_BOOKIES)
    return Bookies(tuple(found))


async def broker_settings(call: RestRequest) -> Settings:
    described = await call.call_local(op.DESCRIBE_BROKER, tasks=False, metrics=False)
    config = type(call.broker.config)
    defaults, meanings = defaults_of(config), {each.name: each.doc for each in settings(config)}
    rows = list[SettingRow]()
    for each in described.settings:
        default = defaults.get(each.name, REQUIRED)
        rows.append(SettingRow(each, "" if default is REQUIRED else to_java_text(default), meanings.get(each.name, "")))
    return Settings(described.name, tuple(rows))


class View(NamedTuple):
    """A view: its function, its template, and its title."""

    run: Callable[[RestRequest], Awaitable[object]]
    template: str
    title: str


VIEWS = {
    "": View(overview, "overview.html", "Overview"),
    "topics": View(topics, "topics.html", "Topics"),
    "brokers": View(brokers, "brokers.html", "Brokers"),
    "bookies": View(bookies, "bookies.html", "Bookies"),
    "settings": View(broker_settings, "settings.html", "Settings"),
}
"""The views by their path below /ui."""
TOPIC = View(topic, "topic.html", "Topic")
SUBSCRIPTION = View(subscription, "subscription.html", "Subscription")


def find_view(path: str) -> tuple[View, list[str]]:
    """Returns the view of a path below /ui, and the encoded segments that name its topic, and subscription. Raises
    BadRequest (404)."""
    if view := VIEWS.get(path.strip("/")):
        return view, []
    parts = path.strip("/").split("/")
    if parts[0] == "topics" and len(parts) == 5:
        return TOPIC, parts[1:]
    if parts[0] == "topics" and len(parts) == 7 and parts[5] == "subscription":
        return SUBSCRIPTION, [*parts[1:5], parts[6]]
    raise BadRequest("the page has no such view", 404)
