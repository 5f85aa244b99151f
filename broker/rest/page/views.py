"""The views of the page: each is a function that returns a value, and a template shows it.

A view calls operations as its caller (`RestRequest`), so the page shows nobody more than REST does. `?format=json`
shows the value itself.

| path below /ui | view | template |
|---|---|---|
| `/` | `overview` | overview.html |
| `/topics` | `topics` | topics.html |
| `/topics/{domain}/{tenant}/{namespace}/{topic}` | `topic` (topic_views.py) | topic.html |
| the same, and `/ledgers`, `/messages`, `/subscription/{name}` | of the same name, there | of the same name |
| `/brokers`, `/bookies`, `/repair`, `/metadata`, `/security`, `/settings` | of the same name | of the same name |

Guarding tests: tests/broker/rest/test_page.py, tests/broker/rest/test_page_views.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from ....proto import operations as op
from ....proto.alarms import Alarm, find_alarms, find_metadata_alarms, find_repair_alarms
from ....proto.errors import Unavailable
from ....proto.statistics import (
    BookieInfo,
    BrokerSetting,
    BrokerSummary,
    ClusterSummary,
    MetadataNode,
    SecurityDescription,
    TopicPage,
    TopicRow,
)
from ....runtime.config import REQUIRED, defaults_of, settings
from ...session.inspection import ask_bookies
from ...session.settings import to_java_text
from ..call import BadRequest, RestRequest
from . import topic_views

ROWS = 10
"""Rows of a table of the overview."""
MARKS = 200
"""Ledgers that miss copies: on the page, and of each the record is read."""
CHILDREN = 200


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
class Brokers:
    """All brokers of the cluster. `silent`: those that did not answer."""

    brokers: tuple[BrokerSummary, ...]
    silent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bookies:
    """All registered bookies."""

    bookies: tuple[BookieInfo, ...]


@dataclass(frozen=True, slots=True)
class Repair:
    """Auto-recovery, as a bookie says it (bookie/admin.py): `status`, and the first ledgers that miss copies."""

    status: dict[str, Any]
    alarms: tuple[Alarm, ...]
    ledgers: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Security:
    """The caller of the page, and the other callers that are connected to the same broker."""

    caller: str
    method: str
    expires_ms: int
    found: SecurityDescription


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting of the broker that serves the page, with its description."""

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
    repair = () if summary.metadata_away_ms else find_repair_alarms(await _repair_status(call))
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
        bookies=summary.bookies, alarms=(*_alarms(summary, call.broker.world.clock.wall_ms()), *repair),
        worst=tuple(heapq.nsmallest(ROWS, by_backlog, key=lambda row: (-row.backlog, row.name))),
        busiest=tuple(heapq.nsmallest(ROWS, by_traffic, key=lambda row: (-row.rate_in - row.rate_out, row.name))),
    )  # fmt: skip


async def _repair_status(call: RestRequest) -> dict[str, Any] | None:
    try:
        return await _ask_bookies(call, "repair-status")
    except Unavailable:
        return None  # which is an alarm


def _alarms(found: ClusterSummary, now_ms: int) -> list[Alarm]:
    oldest = [
        {"name": row.name, "oldest_ms": row.oldest_ms} for each in found.brokers for row in each.by_age if row.oldest_ms
    ]
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


async def _ask_bookies(call: RestRequest, verb: str, **options: object) -> dict[str, Any]:
    """Asks the bookies as this broker, for a caller who may operate the cluster."""
    names = [each.id for each in await call.call_local(op.LIST_BOOKIES)]
    return await ask_bookies(call.broker.bookies, names, verb, **options)


async def repair(call: RestRequest) -> Repair:
    status = await _ask_bookies(call, "repair-status")
    found = await _ask_bookies(call, "under-replicated", limit=MARKS)
    return Repair(status, tuple(find_repair_alarms(status)), tuple(found["ledgers"]))


async def metadata(call: RestRequest) -> MetadataNode:
    path, after = call.query.get("path", ""), call.query.get("after", "")
    return await call.call_local(op.DESCRIBE_METADATA, node=path, after=after, limit=CHILDREN)


async def security(call: RestRequest) -> Security:
    found, who = await call.call_local(op.DESCRIBE_SECURITY), call.context.principal
    return Security(str(who), who.method, who.expires_ms, found)


class View(NamedTuple):
    """A view of the page: its function, its template, its title, and whether the browser reloads it while it is
    open."""

    run: Callable[[RestRequest], Awaitable[object]]
    template: str
    title: str
    live: bool = True


VIEWS = {
    "": View(overview, "overview.html", "Overview"),
    "topics": View(topics, "topics.html", "Topics"),
    "brokers": View(brokers, "brokers.html", "Brokers"),
    "bookies": View(bookies, "bookies.html", "Bookies"),
    "repair": View(repair, "repair.html", "Repair"),
    "metadata": View(metadata, "metadata.html", "Metadata", live=False),
    "security": View(security, "security.html", "Security"),
    "settings": View(broker_settings, "settings.html", "Settings"),
}
"""The views by their path below /ui."""
OF_TOPIC = {
    "": View(topic_views.topic, "topic.html", "Topic"),
    "ledgers": View(topic_views.ledgers, "ledgers.html", "Ledgers"),
    "messages": View(topic_views.messages, "messages.html", "Messages", live=False),
}
"""The views of a topic, by what follows its path."""
SUBSCRIPTION = View(topic_views.subscription, "subscription.html", "Subscription")


def find_view(path: str) -> tuple[View, list[str]]:
    """Returns the view of a path below /ui, and the encoded segments that name its topic, and subscription. Raises
    BadRequest (404)."""
    if view := VIEWS.get(path.strip("/")):
        return view, []
    parts = path.strip("/").split("/")
    if parts[0] == "topics" and len(parts) in (5, 6) and (view := OF_TOPIC.get("".join(parts[5:]))):
        return view, parts[1:5]
    if parts[0] == "topics" and len(parts) == 7 and parts[5] == "subscription":
        return SUBSCRIPTION, [*parts[1:5], parts[6]]
    raise BadRequest("the page has no such view", 404)
