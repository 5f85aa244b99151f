"""The views of the page: each is a function that returns a value, which a template shows as HTML. `?format=json`
returns the value itself.

A view calls operations as its caller (`RestRequest`), so the page shows a caller only what REST would show. Statistics
and ledgers of a topic need the permission to look the topic up. Payloads, and the cursor and the buttons of a
subscription, need the permission to consume.

| path below /ui | view | template |
|---|---|---|
| `/` | `view_overview`; without the right to operate the cluster `view_landing_page` | overview.html, landing.html |
| `/topics` | `view_topics` | topics.html |
| `/topics/{domain}/{tenant}/{namespace}/{topic}` | `view_topic` | topic.html |
| the same, and `/ledgers` | `view_ledgers` | ledgers.html |
| … and `/messages`, `/tail` | `view_messages`, `view_newest_messages` (messages.py) | messages.html, tail.html |
| … and `/subscription/{name}` | `view_subscription` | subscription.html |
| `/brokers`, `/bookies`, `/repair`, `/metadata`, `/security`, `/settings` | `view_…` of that name | of that name |

Also in this file: the filters of the templates, which format numbers and names, such as `size` and `topic_path`.

Guarding tests: tests/broker/rest/test_page.py, tests/broker/rest/test_page_views.py.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.responses import RedirectResponse, Response

from ....proto import operations as op
from ....proto.alarms import (
    Alarm,
    find_alarms,
    find_backup_alarms,
    find_certificate_alarms,
    find_metadata_alarms,
    find_metadata_disk_alarms,
    find_metadata_refusal_alarms,
    find_repair_alarms,
)
from ....proto.errors import NotFound, Unavailable
from ....proto.names import NamespaceName, TopicName, parse_number
from ....proto.statistics import (
    BookieInfo,
    BrokerSetting,
    BrokerSummary,
    ClusterSummary,
    CursorBucket,
    CursorShape,
    DiedBroker,
    KeptLedger,
    LedgerCopies,
    MetadataNode,
    SecurityDescription,
    SubscriptionStats,
    TopicPage,
    TopicRow,
    TopicStats,
    WhyStuck,
)
from ....runtime.config import REQUIRED_VALUE, list_setting_defaults, list_settings
from ...session.inspection import ask_bookies, format_setting_value
from ..call import HttpError, RestRequest
from .messages import OPEN_ONE_PARTITION, ask_topic_owner, indent_json, view_messages, view_newest_messages

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")


def size(count: float) -> str:
    """Returns a number of bytes as text with a unit: "1.5 MB"."""
    for unit in _SIZES:
        if abs(count) < 1000 or unit == _SIZES[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def number(count: float) -> str:
    """Returns a number as text, with a thin space between thousands."""
    return f"{count:,.0f}".replace(",", "\u202f")


def rate(count: float) -> str:
    """Returns a rate per second as text; a rate below 10 has one digit after the point."""
    return f"{count:.1f}" if 0 < count < 10 else number(count)


def percent(share: float) -> str:
    """Returns a share (0 to 1) as text in percent. Returns "–" for a share below 0, which means that it is unknown."""
    return "–" if share < 0 else f"{100 * share:.0f} %"


def age(since_ms: int, now_ms: int) -> str:
    """Returns the time from `since_ms` to `now_ms` (ms since the epoch) as text, in the largest fitting unit: "3 h".
    Returns "–" if `since_ms` is 0, which means that there is no such time."""
    if not since_ms:
        return "–"
    seconds = max(0, now_ms - since_ms) // 1000
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def moment(at_ms: int) -> str:
    """Returns a time (ms since the epoch) as text: date and time in UTC. Returns the number itself for a time after the
    year 9999, which a producer may have sent; "–" for 0, which means that there is no such time."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at_ms else "–"
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"


def topic_path(name: str) -> str:
    """Returns the path of a topic's page below /ui/topics. Each part of the topic name becomes one segment of the path,
    so a slash in a part is encoded."""
    domain, _, rest = name.partition("://")
    return "/".join(quote(part, safe="") for part in (domain, *rest.split("/", 2)))


def segment(name: str) -> str:
    """Returns a name, encoded as one segment of a URL path."""
    return quote(name, safe="")


def stretches(sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Divides a bar with a width of 1,000 into parts in proportion to `sizes`. Returns (beginning, width) of each part;
    all widths are 0 if all sizes are 0."""
    whole, found, at = sum(sizes) or 1, list[tuple[float, float]](), 0.0
    for each in sizes:
        found.append((round(1000 * at / whole, 2), round(1000 * each / whole, 2)))
        at += each
    return found


def shade(bucket: CursorBucket) -> float:
    """Returns the share (0 to 1) of a bucket's entries that are acknowledged, or whose acknowledgement is pending in a
    transaction."""
    return round((bucket.acknowledged + bucket.pending) / max(1, bucket.entries), 3)


def steps(path: str) -> list[tuple[str, str]]:
    """Splits a path of the metadata into its names. Returns each name together with the path from the root to it."""
    names = path.strip("/").split("/") if path.strip("/") else []
    return [(name, "/" + "/".join(names[: at + 1])) for at, name in enumerate(names)]


TEMPLATE_FILTERS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (size, number, rate, percent, age, moment, topic_path, segment, shade, steps, stretches, indent_json)
}


EXPLAINED_SUBSCRIPTIONS_MAX = 50
"""Subscriptions of a topic that are explained: each is a request to its owner."""
CURSOR_BUCKETS = 200
"""Of the strip of a subscription: a few pixels for each."""
LEDGERS_PER_PAGE = 100


@dataclass(frozen=True, slots=True)
class ExplainedSubscription:
    """The statistics of a subscription, and `why`, the reason why it makes no progress. `why` is None if the reason was
    not asked for, or if the caller may not see it."""

    stats: SubscriptionStats
    why: WhyStuck | None


@dataclass(frozen=True, slots=True)
class TopicView:
    """The content of the page of one topic. For a partitioned topic only `name` and `partitions` are set; for any other
    topic or a partition, `partitions` is empty. `stats`: its statistics; `subscriptions`: those that are shown, with
    the reason why they make no progress; `may_peek`: whether the caller may consume the topic, and so see its messages.
    """

    name: str
    partitions: tuple[str, ...] = ()
    stats: TopicStats | None = None
    subscriptions: tuple[ExplainedSubscription, ...] = ()
    may_peek: bool = False


@dataclass(frozen=True, slots=True)
class SubscriptionView:
    """The content of the page of one subscription. `explained`: its statistics, and the reason why it makes no
    progress; `cursor`: None if the caller may not see it; `may_operate`: whether the caller may change the backlog of
    the subscription and see its cursor."""

    topic: str
    explained: ExplainedSubscription
    cursor: CursorShape | None
    may_operate: bool


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A ledger of a topic: its copies at the bookies, and `kept`, the reason why it is kept. `kept` is None if the
    ledger was trimmed in the meantime."""

    copies: LedgerCopies
    kept: KeptLedger | None

    @property
    def messages(self) -> int:
        """Returns the number of messages in the ledger; 0 if it was trimmed in the meantime."""
        return self.kept.messages if self.kept is not None else 0

    @property
    def sentence(self) -> str:
        """Returns the reason, in words, why the ledger is kept; or that it was deleted."""
        return self.kept.sentence if self.kept is not None else "It was deleted just now."


@dataclass(frozen=True, slots=True)
class LedgersView:
    """The content of one page with ledgers of a topic, the oldest first. `next`: the ledger id after which the next
    page begins; 0 if this is the last page. `may_peek`: as in TopicView."""

    topic: str
    ledgers: tuple[LedgerRow, ...]
    next: int
    may_peek: bool

    @property
    def sizes(self) -> list[int]:
        """Returns the sizes of the ledgers in bytes, for the bar that shows them."""
        return [each.copies.bytes for each in self.ledgers]

    @property
    def shades(self) -> list[float]:
        """Returns, for each ledger, the share (0 to 1) of its bookies that have their copy."""
        return [1 - len(each.copies.missing) / max(1, len(each.copies.bookies)) for each in self.ledgers]


async def view_topic(call: RestRequest) -> TopicView:
    """Returns the content of the page of one topic. Explains at most EXPLAINED_SUBSCRIPTIONS_MAX subscriptions, each by
    a request to the topic's owner. Raises TopicNotFound if the topic does not exist; and the errors of
    `RestRequest.authorize` and `ask_topic_owner`."""
    name = call.topic.full
    await call.authorize(op.TOPIC_STATS, name=name)
    if partitions := await call.list_partitions():
        return TopicView(name, partitions=tuple(each.full for each in partitions))
    stats = await ask_topic_owner(call, op.TOPIC_STATS)
    explained = [
        ExplainedSubscription(each, await _why(call, each.name) if at < EXPLAINED_SUBSCRIPTIONS_MAX else None)
        for at, each in enumerate(stats.subscriptions)
    ]
    return TopicView(
        name, stats=stats, subscriptions=tuple(explained), may_peek=await call.may_call(op.GET_MESSAGE, topic=name)
    )


async def _why(call: RestRequest, subscription: str) -> WhyStuck | None:
    if not await call.may_call(op.WHY_STUCK, topic=call.topic.full, name=subscription):
        return None
    return await call.call_topic_owner(op.WHY_STUCK, call.topic, name=subscription)


async def view_subscription(call: RestRequest) -> SubscriptionView:
    """Returns the content of the page of one subscription. Raises HttpError (404) if the topic has no such
    subscription, and the errors of `ask_topic_owner`."""
    name, full = call.names["subscription"], call.topic.full
    stats = await ask_topic_owner(call, op.TOPIC_STATS)
    found = next((each for each in stats.subscriptions if each.name == name), None)
    if found is None:
        raise HttpError("the topic has no such subscription", 404)
    may_operate = await call.may_call(op.SKIP_MESSAGES, topic=full, name=name)
    cursor: CursorShape | None = None
    if may_operate:
        cursor = await ask_topic_owner(call, op.DESCRIBE_CURSOR, name=name, buckets=CURSOR_BUCKETS)
    return SubscriptionView(full, ExplainedSubscription(found, await _why(call, name)), cursor, may_operate)


async def view_ledgers(call: RestRequest) -> LedgersView:
    """Returns the content of one page with up to LEDGERS_PER_PAGE ledgers of a topic, after the ledger id in the query
    parameter `after`. Raises HttpError (405) if the topic is partitioned, and the errors of `ask_topic_owner`."""
    await call.check_unpartitioned(op.DESCRIBE_LEDGERS, OPEN_ONE_PARTITION)
    after = parse_number(call.query.get("after", "0")) or 0
    found = await ask_topic_owner(call, op.DESCRIBE_LEDGERS, after=after, limit=LEDGERS_PER_PAGE)
    kept = {each.ledger_id: each for each in (await ask_topic_owner(call, op.WHY_KEPT)).ledgers}
    rows = tuple(LedgerRow(each, kept.get(each.ledger_id)) for each in found)
    after = rows[-1].copies.ledger_id if len(rows) == LEDGERS_PER_PAGE else 0
    return LedgersView(call.topic.full, rows, after, await call.may_call(op.GET_MESSAGE, topic=call.topic.full))


TOP_TOPICS_SHOWN = 10
"""Rows of a table of the overview."""
REPAIR_MARKS_SHOWN = 200
"""Ledgers that miss copies: on the page, and of each the record is read."""
METADATA_CHILDREN_SHOWN = 200
LANDING_TENANTS_MAX, LANDING_NAMESPACES_MAX = 100, 200
"""Tenants and namespaces whose grants `view_landing_page` looks at: two reads of the metadata each, the first time."""
LANDING_NAMES_MAX = 200
"""Namespaces, and topics, that `view_landing_page` shows."""


@dataclass(frozen=True, slots=True)
class OverviewView:
    """The content of the start page: sums over the brokers of the cluster, and the alarms. `worst`: the topics with the
    largest backlogs, `busiest`: those with the most traffic; at most TOP_TOPICS_SHOWN of each. `backlog`: in messages;
    `connections`: of clients, at all brokers. Rates are messages per second, throughputs bytes per second."""

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
class LandingView:
    """The content of the start page for a caller who may not operate the cluster. `namespaces`: those in which the
    caller may look up every topic; `topics`: the topics that were granted to the caller by name, or, if the query names
    one of the namespaces (`namespace`), the topics of that."""

    namespaces: tuple[str, ...]
    topics: tuple[str, ...]
    namespace: str


@dataclass(frozen=True, slots=True)
class TopicsView:
    """The content of one page of the list of topics. `q`: the text that the names of the topics contain. `sort`: the
    order of the topics."""

    q: str
    sort: str
    page: TopicPage


@dataclass(frozen=True, slots=True)
class BrokersView:
    """The content of the page about brokers. `silent`: the endpoints of the brokers that did not answer; `died`: the
    brokers that have ended without closing in order."""

    brokers: tuple[BrokerSummary, ...]
    silent: tuple[str, ...]
    died: tuple[DiedBroker, ...]


@dataclass(frozen=True, slots=True)
class BookiesView:
    """The content of the page about bookies, with all registered bookies."""

    bookies: tuple[BookieInfo, ...]


@dataclass(frozen=True, slots=True)
class RepairView:
    """The content of the page about auto-recovery: the status that a bookie reports (bookie/admin.py), alarms, and the
    first ledgers that lack copies."""

    status: dict[str, Any]
    alarms: tuple[Alarm, ...]
    ledgers: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class SecurityView:
    """The content of the page about security: the caller of the page, with the `method` and the expiry (`expires_ms`:
    ms since the epoch; 0: none) of its credentials, and the callers that are connected to this broker or were refused
    (`found`)."""

    caller: str
    method: str
    expires_ms: int
    found: SecurityDescription


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting of the broker that serves the page: its value, its default, and what it means. `default` is "" if the
    setting has none, `meaning` is "" if it is not documented."""

    setting: BrokerSetting
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class SettingsView:
    """The content of the page about settings: all settings that are in force at the broker that serves the page.
    `broker`: its name."""

    broker: str
    settings: tuple[SettingRow, ...]


async def view_overview(call: RestRequest) -> OverviewView:
    """Returns the content of the start page. Brokers that do not answer in time are missing from its sums, and cause an
    alarm; so does a metadata store that does not answer. Raises the errors of `RestRequest.call_local`."""
    summary = await call.call_local(op.BROKER_SUMMARIES)
    unread = summary.metadata_away_ms or summary.metadata_late
    status = None if unread else await _repair_status(call)
    repair = () if unread else find_repair_alarms(status)
    departing = frozenset((status or {}).get("departing", ()))
    totals = [each.total for each in summary.brokers]
    by_backlog = [row for each in summary.brokers for row in each.by_backlog if row.backlog]
    by_traffic = [row for each in summary.brokers for row in each.by_traffic if row.rate_in or row.rate_out]
    return OverviewView(
        topics=sum(each.topics for each in totals), subscriptions=sum(each.subscriptions for each in totals),
        producers=sum(each.producers for each in totals), consumers=sum(each.consumers for each in totals),
        rate_in=sum(each.rate_in for each in totals), rate_out=sum(each.rate_out for each in totals),
        throughput_in=sum(each.throughput_in for each in totals),
        throughput_out=sum(each.throughput_out for each in totals),
        storage_bytes=sum(each.storage_bytes for each in totals), backlog=sum(each.backlog for each in totals),
        connections=sum(each.connections for each in summary.brokers), brokers=summary.brokers,
        bookies=summary.bookies, alarms=(*_alarms(summary, call.broker.world.clock.wall_ms(), departing), *repair),
        worst=tuple(heapq.nsmallest(TOP_TOPICS_SHOWN, by_backlog, key=lambda row: (-row.backlog, row.name))),
        busiest=tuple(heapq.nsmallest(TOP_TOPICS_SHOWN, by_traffic,
            key=lambda row: (-row.rate_in - row.rate_out, row.name))),
    )  # fmt: skip


async def view_landing_page(call: RestRequest) -> LandingView | Response:
    """Returns the namespaces and topics in which the caller has rights: looks at the first LANDING_NAMESPACES_MAX
    namespaces of the first LANDING_TENANTS_MAX tenants, and returns at most LANDING_NAMES_MAX names of each sort. If
    the query names a topic, returns a redirect to its page, which checks the caller's rights itself. Raises InvalidName
    if the name is invalid, Unavailable if grants cannot be read, and the errors of `RestRequest.call_local`."""
    if named := call.query.get("topic", "").strip():
        return RedirectResponse(f"/ui/topics/{topic_path(TopicName.parse(named).full)}", 303)
    if of := call.query.get("namespace", ""):
        found = await call.call_local(op.LIST_TOPICS, namespace=of)
        return LandingView((), tuple(found[:LANDING_NAMES_MAX]), of)
    catalog, names = call.broker.catalog, list[NamespaceName]()
    for tenant in (await catalog.list_tenants())[:LANDING_TENANTS_MAX]:
        with contextlib.suppress(NotFound):  # it was deleted meanwhile
            names += map(NamespaceName.parse, await catalog.list_namespaces(tenant))
        if len(names) >= LANDING_NAMESPACES_MAX:
            break
    places, topics = await call.broker.access.find_granted_namespaces_and_topics(
        call.context.principal, names[:LANDING_NAMESPACES_MAX], LANDING_NAMES_MAX
    )
    return LandingView(tuple(places), tuple(topics), "")


async def _repair_status(call: RestRequest) -> dict[str, Any] | None:
    try:
        return await _ask_bookies(call, "repair-status")
    except Unavailable:
        return None  # which is an alarm


def _bookie_state(bookie: BookieInfo, departing: Collection[str]) -> str:
    """Returns the state as `magnetar bookies list` names it. A departing bookie is read-only too, as was ordered."""
    return "departing" if bookie.id in departing else "read-only" if bookie.read_only else "writable"


def _alarms(found: ClusterSummary, now_ms: int, departing: Collection[str]) -> list[Alarm]:
    oldest = [
        {"name": row.name, "oldest_ms": row.oldest_ms} for each in found.brokers for row in each.by_age if row.oldest_ms
    ]
    oldest.sort(key=itemgetter("oldest_ms"))
    metadata = find_metadata_alarms(found.metadata_away_ms, now_ms, late=found.metadata_late)
    metadata += find_metadata_disk_alarms(found.metadata_total_bytes, found.metadata_free_bytes)
    metadata += find_metadata_refusal_alarms(found.metadata_refusal)
    metadata += find_backup_alarms(
        found.metadata_backup_ms, found.metadata_backup_every_ms, found.metadata_backup_failure, now_ms
    )
    metadata += find_certificate_alarms("the metadata service", found.metadata_certificate_ends_ms, now_ms)
    return metadata + find_alarms(
        [
            {
                "broker": each.name, "busy": each.loop_busy, "degraded": each.degraded,
                "tokenEndsMs": each.token_ends_ms, "full": each.full,
                "certificateEndsMs": each.certificate_ends_ms, "draining": each.draining,
            }
            for each in found.brokers
        ],
        found.silent,
        [
            {
                "bookie": each.id, "state": _bookie_state(each, departing),
                "freeBytes": each.free_bytes, "totalBytes": each.total_bytes,
            }
            for each in found.bookies
        ],
        oldest, now_ms, found.refusing, found.late, map(asdict, found.died),
    )  # fmt: skip


async def view_topics(call: RestRequest) -> TopicsView:
    """Returns one page of the list of topics in the cluster: at most 100, selected by the query parameters `q`, `sort`
    and `after`. Raises the errors of `RestRequest.call_local`."""
    q, sort = call.query.get("q", ""), call.query.get("sort", "")
    page = await call.call_local(
        op.TOPIC_PAGE, prefix="", contains=q, sort=sort, after=call.query.get("after", ""), limit=100, here=False
    )
    return TopicsView(q, sort, page)


async def view_brokers(call: RestRequest) -> BrokersView:
    """Returns the content of the page about brokers. Raises the errors of `RestRequest.call_local`."""
    found = await call.call_local(op.BROKER_SUMMARIES)
    return BrokersView(found.brokers, found.silent, found.died)


async def view_bookies(call: RestRequest) -> BookiesView:
    """Returns the content of the page about bookies. Raises the errors of `RestRequest.call_local`."""
    found = await call.call_local(op.LIST_BOOKIES)
    return BookiesView(tuple(found))


async def view_settings(call: RestRequest) -> SettingsView:
    """Returns the content of the page about settings: the settings of this broker, each with its default and its
    meaning. Raises the errors of `RestRequest.call_local`."""
    described = await call.call_local(op.DESCRIBE_BROKER, tasks=False, metrics=False)
    config = type(call.broker.config)
    defaults, meanings = list_setting_defaults(config), {each.name: each.doc for each in list_settings(config)}
    rows = list[SettingRow]()
    for each in described.settings:
        default = defaults.get(each.name, REQUIRED_VALUE)
        rows.append(
            SettingRow(
                each, "" if default is REQUIRED_VALUE else format_setting_value(default), meanings.get(each.name, "")
            )
        )
    return SettingsView(described.name, tuple(rows))


async def _ask_bookies(call: RestRequest, verb: str, **options: object) -> dict[str, Any]:
    """Asks the bookies as this broker, for a caller who may operate the cluster."""
    names = [each.id for each in await call.call_local(op.LIST_BOOKIES)]
    return await ask_bookies(call.broker.bookies, names, verb, **options)


async def view_repair(call: RestRequest) -> RepairView:
    """Returns the content of the page about auto-recovery, with at most REPAIR_MARKS_SHOWN ledgers that lack copies.
    Raises Unavailable if no bookie answers, and the errors of `RestRequest.call_local`."""
    status = await _ask_bookies(call, "repair-status")
    found = await _ask_bookies(call, "under-replicated", limit=REPAIR_MARKS_SHOWN)
    return RepairView(status, tuple(find_repair_alarms(status)), tuple(found["ledgers"]))


async def view_metadata(call: RestRequest) -> MetadataNode:
    """Returns the metadata node that the query parameter `path` names, with at most METADATA_CHILDREN_SHOWN children
    after the name `after`. Raises the errors of `RestRequest.call_local`."""
    path, after = call.query.get("path", ""), call.query.get("after", "")
    return await call.call_local(op.DESCRIBE_METADATA, node=path, after=after, limit=METADATA_CHILDREN_SHOWN)


async def view_security(call: RestRequest) -> SecurityView:
    """Returns the caller of the page, with the method and expiry of its credentials, and the other callers that are
    connected to this broker. Raises the errors of `RestRequest.call_local`."""
    found, who = await call.call_local(op.DESCRIBE_SECURITY), call.context.principal
    return SecurityView(str(who), who.method, who.expires_ms, found)


class PageView(NamedTuple):
    """A kind of page below /ui: the function that makes its content (`run`), its template, its title, and whether the
    browser reloads it while it is open (`live`)."""

    run: Callable[[RestRequest], Awaitable[object]]
    template: str
    title: str
    live: bool = True


PAGE_VIEWS = {
    "": PageView(view_overview, "overview.html", "Overview"),
    "topics": PageView(view_topics, "topics.html", "Topics"),
    "brokers": PageView(view_brokers, "brokers.html", "Brokers"),
    "bookies": PageView(view_bookies, "bookies.html", "Bookies"),
    "repair": PageView(view_repair, "repair.html", "Repair"),
    "metadata": PageView(view_metadata, "metadata.html", "Metadata", live=False),
    "security": PageView(view_security, "security.html", "Security"),
    "settings": PageView(view_settings, "settings.html", "Settings"),
}
"""The views by their path below /ui."""
LANDING_VIEW = PageView(view_landing_page, "landing.html", "Your topics", live=False)
"""The view at /ui for a caller who may not operate the cluster."""
TOPIC_PAGE_VIEWS = {
    "": PageView(view_topic, "topic.html", "Topic"),
    "ledgers": PageView(view_ledgers, "ledgers.html", "Ledgers"),
    "messages": PageView(view_messages, "messages.html", "Messages", live=False),
    "tail": PageView(view_newest_messages, "tail.html", "Tail"),
}
"""The views of a topic, by what follows its path."""
SUBSCRIPTION_VIEW = PageView(view_subscription, "subscription.html", "Subscription")


def find_view(path: str) -> tuple[PageView, list[str]]:
    """Returns the view for a path below /ui, and the encoded segments of the path that name its topic and its
    subscription. Raises HttpError (404) if there is no such view."""
    if view := PAGE_VIEWS.get(path.strip("/")):
        return view, []
    parts = path.strip("/").split("/")
    if parts[0] == "topics" and len(parts) in (5, 6) and (view := TOPIC_PAGE_VIEWS.get("".join(parts[5:]))):
        return view, parts[1:5]
    if parts[0] == "topics" and len(parts) == 7 and parts[5] == "subscription":
        return SUBSCRIPTION_VIEW, [*parts[1:5], parts[6]]
    raise HttpError("the page has no such view", 404)
