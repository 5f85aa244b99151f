"""`magnetar brokers …` and `magnetar bookies …`: list the servers, and drain brokers.

`magnetar status`, `magnetar top` and `magnetar why`: the first commands of an operator when something is wrong.

`status` asks any broker for the sums over all brokers (`BrokerSummaries`), and the bookies for their state and for the
state of repair. A problem that needs an operator is an alarm: a sentence, and the command that shows more or helps. If
there is an alarm, the exit code is 1.
proto/alarms.py has the rules. Guarding tests: tests/cli/test_status.py.

Also in this file, below its heading: `magnetar spark …` (spark).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click import option

from ...proto.alarms import (
    describe_backup_age,
    find_alarms,
    find_backup_alarms,
    find_certificate_alarms,
    find_metadata_alarms,
    find_metadata_disk_alarms,
    find_metadata_refusal_alarms,
    find_repair_alarms,
    format_age,
    format_count,
)
from ...runtime.clock import SystemClock
from ..common.exits import FAILED, NOT_FOUND, CommandFailure
from ..common.lazy import LazyCommand, LazyGroup
from ..common.output import escape_controls
from ..common.session import CommandSession, confirm_deletion, session_command
from ..common.units import FiniteNumber
from ..storage.admin_port import with_operator_and_watch_options

if TYPE_CHECKING:
    from ...proto.statistics import BrokerInfo, ClusterSummary, SubscriptionStats


TOP_TOPICS_SHOWN = 5
"""Topics that `status` shows."""
BROKER_COLUMNS = ("broker", "endpoint", "version", "up", "busy", "topics", "in", "out", "backlog", "connections")
BOOKIE_COLUMNS = ("bookie", "endpoint", "version", "state", "freePercent", "freeBytes")
TOPIC_COLUMNS = (
    "topic", "in", "out", "bytesIn", "bytesOut", "backlog", "slowest", "slowestBacklog", "oldest", "storage",
    "producers", "consumers",
)  # fmt: skip
TOP_SORT_FIELDS = {"traffic": "throughput_in", "backlog": "backlog", "age": "oldest_ms"}
"""The ways of `top`, and how pages of topics are sorted for them."""
TOP_SORT_NOUNS = {"traffic": "traffic", "backlog": "a backlog", "age": "a message that is not acknowledged"}


NAMESPACES_SHOWN = 10
"""Namespaces with durability=memory in `status`; `-o json` has all."""


# ------------------------------------------------------------------------------------------------------ status


@click.command()
@with_operator_and_watch_options
def status(session: CommandSession) -> None:
    """Show the cluster on one screen: brokers, bookies, repair, the largest backlogs, and the alarms.

    Exit code 1 if there is an alarm; each alarm names the command that shows more. While the metadata does not answer,
    the first sentence says so, and the rest is what the broker that was asked knows.

    \b
    Examples:
      magnetar status
      magnetar status -o json
    """
    now_ms = SystemClock().wall_ms()
    summary = read_summary(session)
    brokers = [make_broker_row(asdict(each), now_ms) for each in summary.brokers]
    storage = ask_bookie_states(session, summary)
    bookies, repair = storage.bookies, storage.repair
    backlogs, oldest = (
        find_largest_topics(summary, "backlog", TOP_TOPICS_SHOWN),
        find_largest_topics(summary, "age", TOP_TOPICS_SHOWN),
    )
    away = find_metadata_alarms(summary.metadata_away_ms, now_ms, late=summary.metadata_late)
    died = [asdict(each) for each in summary.died]
    alarms = find_alarms(brokers, summary.silent, bookies, oldest, now_ms, summary.refusing, summary.late, died)
    alarms += find_metadata_disk_alarms(summary.metadata_total_bytes, summary.metadata_free_bytes)
    alarms += find_metadata_refusal_alarms(summary.metadata_refusal)
    made_ms, every_ms = summary.metadata_backup_ms, summary.metadata_backup_every_ms
    alarms += find_backup_alarms(made_ms, every_ms, summary.metadata_backup_failure, now_ms)
    alarms += find_certificate_alarms("the metadata service", summary.metadata_certificate_ends_ms, now_ms)
    if not away:
        alarms += find_repair_alarms(repair, storage.why, refused=storage.refused, unlisted=storage.unlisted)
    balancers = [each.name for each in summary.brokers if each.balances]
    in_memory = sum_topics_in_memory(summary)
    hot_topics = sorted({topic for each in summary.brokers for topic in each.hot_topics})
    alarms = [*away, *sorted(alarms, key=lambda alarm: not alarm.needed)]
    if session.out.is_structured:
        session.out.print_document({
            "brokers": brokers, "silent": list(summary.silent), "late": list(summary.late),
            "died": [{"broker": each["name"], "endpoint": each["endpoint"], "seenMs": each["seen_ms"]}
                     for each in died],
            "balancers": balancers, "hotTopics": hot_topics, "durabilityMemory": in_memory, "bookies": bookies,
            "metadataDisk": {"totalBytes": summary.metadata_total_bytes, "freeBytes": summary.metadata_free_bytes},
            "metadataRefusal": summary.metadata_refusal,
            "metadataBackup": {"madeMs": made_ms, "everyMs": every_ms, "failure": summary.metadata_backup_failure},
            "repair": repair, "backlogs": [make_topic_row(each, now_ms) for each in backlogs],
            "alarms": [each._asdict() for each in alarms],
        })  # fmt: skip
    else:
        for each in away:
            click.echo(f"{'!' if each.needed else '-'} {each.text}  {each.command}\n")
        session.out.print_rows(brokers, BROKER_COLUMNS, empty="no brokers")
        if balancers or len(brokers) > 1:
            click.echo(describe_balancers(balancers))
        if in_memory:
            click.echo(f"durability=memory, so that a crash may lose stored messages: {describe_in_memory(in_memory)}.")
        for topic in hot_topics[:TOP_TOPICS_SHOWN]:
            click.echo(f"{topic} is too busy for its bundle, and one broker serves it: give it more partitions.")
        click.echo()
        session.out.print_rows(bookies, BOOKIE_COLUMNS, empty="no bookies")
        if backlogs:
            click.echo()
            rows = [make_topic_row(each, now_ms) for each in backlogs]
            session.out.print_rows(rows, ("topic", "backlog", "oldest", "consumers"))
        click.echo()
        if made_ms:
            click.echo(f"The newest backup of the metadata {describe_backup_age(made_ms, now_ms)}.")
        for each in alarms[len(away) :]:
            click.echo(f"{'!' if each.needed else '-'} {each.text}  {each.command}")
        if not alarms:
            click.echo("All is well.")
    if any(each.needed for each in alarms):
        sys.exit(FAILED)


def sum_topics_in_memory(summary: ClusterSummary) -> dict[str, int]:
    """Returns the number of loaded topics with durability=memory, by namespace; namespaces that have one alone."""
    found: dict[str, int] = {}
    for broker in summary.brokers:
        for sums in broker.namespaces:
            if sums.in_memory:
                found[sums.name] = found.get(sums.name, 0) + sums.in_memory
    return dict(sorted(found.items()))


def describe_in_memory(found: Mapping[str, int]) -> str:
    """Returns the namespaces of `sum_topics_in_memory` as text, at most NAMESPACES_SHOWN of them."""
    shown = [f"{name} ({count} {'topic' if count == 1 else 'topics'})" for name, count in found.items()]
    more = len(shown) - NAMESPACES_SHOWN
    return ", ".join(shown[:NAMESPACES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def describe_balancers(balancers: Sequence[str]) -> str:
    """Returns the line of `status` that says whether brokers balance their load. `balancers`: the leaders that the
    brokers name; two while one does not know yet that its session has ended."""
    if not balancers:
        return "No broker balances their load: the balance is off, or no leader is elected yet."
    return f"Brokers balance their load; the leader is {' and '.join(sorted(balancers))}."


def read_summary(session: CommandSession) -> ClusterSummary:
    """Returns the summaries of all brokers. A broker of an older release does not support this request. If such a
    broker is asked, the result has only the names and addresses of brokers, and the bookies, that it lists. Raises the
    errors of the admin client."""
    from ...proto.errors import WrongProtocol, is_unknown_operation
    from ...proto.statistics import BrokerSummary, ClusterSummary, NamespaceSums

    try:
        return session.admin.broker_summaries()
    except WrongProtocol as error:
        if not is_unknown_operation(error):
            raise
    nothing = NamespaceSums("", 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0, 0)
    listed = [
        BrokerSummary(each.name, each.endpoint, "", 0, -1.0, 0, 0, nothing, (), (), (), ())
        for each in session.admin.brokers()
    ]
    return ClusterSummary(tuple(listed), (), tuple(session.admin.bookies()))


FIELDS_OLDER_LACK = ("up", "sinceMs", "busy", "topics", "in", "out", "backlog", "connections", "storageBytes")
"""What is not known of a broker of an older release."""


def make_broker_row(found: dict[str, Any], now_ms: int) -> dict[str, Any]:
    """Returns the row of a broker in `magnetar status`. `found`: its summary as a dictionary. `now_ms`: ms since the
    epoch. What a broker of an older release does not report is None."""
    total = found["total"]
    row = {
        "broker": found["name"], "endpoint": found["endpoint"], "version": found["version"] or None,
        "up": format_age((now_ms - found["since_ms"]) / 1000), "sinceMs": found["since_ms"],
        "busy": round(found["loop_busy"], 3) if found["loop_busy"] >= 0 else None, "topics": total["topics"],
        "in": total["rate_in"], "out": total["rate_out"], "backlog": total["backlog"],
        "connections": found["connections"], "degraded": found["degraded"], "storageBytes": total["storage_bytes"],
        "tokenEndsMs": found["token_ends_ms"], "full": list(found["full"]),
        "certificateEndsMs": found["certificate_ends_ms"], "draining": found["draining"],
    }  # fmt: skip
    return row if found["since_ms"] else row | dict.fromkeys(FIELDS_OLDER_LACK)


def _name_directories(found: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns what is shown of the ledgers directories of a bookie; [] if it has one."""
    return [{name: each[name] for name in ("path", "disk", "readOnly", "failure")} for each in found or ()]


class BookiesReport(NamedTuple):
    """The state of the bookies as they report it. `repair`: the state of repair (missing copies of ledgers); None if no
    bookie reports it, or if the metadata, from which bookies read it, does not answer, or answers late. `why`: the
    reason why no bookie answers; `refused`: that reason is that the bookies do not accept this caller."""

    bookies: list[dict[str, Any]]
    repair: dict[str, Any] | None = None
    why: str = ""
    refused: bool = False
    unlisted: str = ""  # why the bookies that only the metadata of ledgers names are not known; empty: they are
    answered: bool = False  # a bookie answered, whether or not it says how repair gets on


BOOKIE_WAIT_STEPS = 3
"""Times that `ask_bookie_states` waits for bookies, each for its share of the time-out."""


REPAIR_FIELDS = ("enabled", "auditor", "underReplicated", "reasons", "stuck", "secondsToGo")


def ask_bookie_states(session: CommandSession, summary: ClusterSummary) -> BookiesReport:
    """Asks the bookies for their states, within the session's time-out, and returns the states. `summary`: the result
    of `read_summary`. Includes the registered bookies, and those that only the metadata of ledgers names. If `summary`
    says that the metadata does not answer, or answers late, no bookie is asked. A bookie that does not answer the first
    request is not asked again. Errors of bookies are part of the result. Raises the errors of the admin client, by
    which a broker is asked for the bookies, and NotFound if none is registered any more."""
    from ...proto.errors import MagnetarError, Unauthorized
    from ..storage.admin_port import ask_reachable_bookies
    from ..storage.ledgers import ask_any_bookie

    session = copy(session)
    session.timeout_s /= BOOKIE_WAIT_STEPS
    if session.operator is not None:
        # less than the whole share, so that metadata that does not answer is what is said
        session.operator = session.operator._replace(timeout_s=0.8 * session.timeout_s)
    errors, repair, answered, unlisted = list[Exception](), None, dict[str, dict[str, Any]](), ""
    away = bool(summary.metadata_away_ms or summary.metadata_late)
    known: dict[str, dict[str, Any]] = {
        each.id: {
            "bookie": each.id, "endpoint": each.endpoint, "version": None,
            "state": "read-only" if each.read_only else "writable",
            "freeBytes": each.free_bytes, "totalBytes": each.total_bytes, "gcRefused": None, "ledgers": None,
            "disk": None,
        }
        for each in summary.bookies or (() if away else session.admin.bookies())  # an older broker does not say them
    }  # fmt: skip
    if known and not away:
        answered = ask_reachable_bookies(session, "state", errors)
        for id_, found in answered.items():
            if id_ in known:
                known[id_].update(freeBytes=found["freeBytes"], totalBytes=found["totalBytes"])
                known[id_]["version"] = found.get("version")  # an older bookie does not say it
                known[id_].update(gcRefused=found["gcRefused"], disk=found.get("disk"))
                known[id_].update(directories=_name_directories(found.get("directories")))
                known[id_].update(certificateEndsMs=found.get("certificateEndsMs"))
    if answered:
        try:
            for each in ask_any_bookie(session, "bookies", answered)["bookies"]:
                nowhere = {
                    "bookie": each["id"], "endpoint": None, "version": None, "freeBytes": 0, "totalBytes": 0,
                    "gcRefused": None, "disk": None,
                }  # fmt: skip
                known.setdefault(each["id"], nowhere).update(state=each["state"], ledgers=each["ledgers"])
        except (MagnetarError, CommandFailure) as error:
            unlisted = str(error)  # what is registered is shown
        try:
            said = ask_any_bookie(session, "repair-status", answered)
            repair = {name: said[name] for name in REPAIR_FIELDS}
        except (MagnetarError, CommandFailure) as error:
            errors = [error]
    for each in known.values():
        each["freePercent"] = round(100 * each["freeBytes"] / each["totalBytes"], 1) if each["totalBytes"] else None
    refused = bool(errors) and all(isinstance(each, Unauthorized) for each in errors)
    why = str(errors[0]) if errors else ""
    return BookiesReport(list(known.values()), repair, why, refused, unlisted, bool(answered))


# --------------------------------------------------------------------------------------------------------- top


def find_largest_topics(summary: ClusterSummary, by: str, limit: int) -> list[dict[str, Any]]:
    """Returns the `limit` largest topics of all brokers, the largest first. `by`: the measure by which topics are
    compared, one of TOP_SORT_FIELDS; "age": the oldest message comes first."""
    rows = [asdict(row) for broker in summary.brokers for row in getattr(broker, f"by_{by}")]
    if by == "traffic":
        rows.sort(key=lambda row: (-(row["throughput_in"] + row["throughput_out"]), row["name"]))
    elif by == "backlog":
        rows.sort(key=lambda row: (-row["backlog"], row["name"]))
    else:
        rows.sort(key=itemgetter("oldest_ms", "name"))
    return rows[:limit]


def make_topic_row(found: Mapping[str, Any], now_ms: int) -> dict[str, Any]:
    """Returns the row of a topic in `magnetar top` and `status`. `found`: its summary as a dictionary. `now_ms`: ms
    since the epoch."""
    oldest = found["oldest_ms"]
    return {
        "topic": found["name"], "owner": found["owner"], "in": found["rate_in"], "out": found["rate_out"],
        "bytesIn": found["throughput_in"], "bytesOut": found["throughput_out"], "backlog": found["backlog"],
        "oldest": format_age((now_ms - oldest) / 1000) if oldest else None, "oldestMs": oldest or None,
        "slowest": found["slowest"] or None, "slowestBacklog": found["slowest_backlog"],
        "storage": found["storage_bytes"], "producers": found["producers"], "consumers": found["consumers"],
    }  # fmt: skip


@session_command(
    option(
        "--by", type=click.Choice(list(TOP_SORT_FIELDS)), default="traffic", show_default=True, help="What is large."
    ),
    option("--contains", default="", metavar="TEXT", help="Only topics whose full name contains it."),
    option("-n", "--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="Topics."),
    option("--every", "every_s", type=FiniteNumber(0.5), default=2.0, show_default=True, help="Seconds."),
    option("--once", is_flag=True, help="Show it once; so it is on a pipe."),
)
def top(session: CommandSession, by: str, contains: str, limit: int, every_s: float, once: bool) -> None:
    """Show the topics of all brokers with most traffic, the largest backlog or the oldest message, again and again
    until Ctrl-C. A topic's backlog is the sum over its durable subscriptions; the column `slowest` names the one with
    the largest backlog.

    \b
    Examples:
      magnetar top
      magnetar top --by backlog --once -o json
    """
    live = not once and not session.out.is_structured and sys.stdout.isatty()
    while True:
        rows, silent = _largest_now(session, by, contains, limit)
        if live:
            click.echo("\x1b[H\x1b[J", nl=False)  # to the corner, and all after it is empty
        nothing = "no such topics" if contains else f"no topic has {TOP_SORT_NOUNS[by]}"
        session.out.print_rows(rows, TOPIC_COLUMNS, empty=nothing)
        for name in silent:
            click.echo(f"broker {name} does not answer: its topics are missing", err=True)
        if not live:
            return
        time.sleep(every_s)


def _largest_now(
    session: CommandSession, by: str, contains: str, limit: int
) -> tuple[list[dict[str, Any]], Sequence[str]]:
    now_ms = SystemClock().wall_ms()
    if contains:
        page = session.admin.topic_page(contains=contains, sort=TOP_SORT_FIELDS[by], limit=limit)
        return [make_topic_row(asdict(each), now_ms) for each in page.topics], page.silent
    summary = session.admin.broker_summaries()
    return [make_topic_row(each, now_ms) for each in find_largest_topics(summary, by, limit)], summary.silent


# --------------------------------------------------------------------------------------------------------- why


@session_command(watched=True)
def why(session: CommandSession, topic: str, subscription: str = "") -> None:
    """Show why the subscriptions of a topic, or one of them, make no progress, and why the topic's ledgers are not
    deleted.

    \b
    Examples:
      magnetar why orders
      magnetar why orders billing
    """
    found: list[dict[str, Any]] = []
    for part in session.admin.parts(topic):
        names = [subscription] if subscription else session.admin.subscriptions(part)
        stuck = [{"subscription": name, **asdict(session.admin.why_stuck(part, name))} for name in names]
        kept = [] if subscription else [asdict(each) for each in session.admin.why_kept(part).ledgers]
        found.append({"topic": part, "subscriptions": stuck, "ledgers": kept})
    idle = [] if subscription else _idle_schedules(session, topic)
    if session.out.is_structured:
        session.out.print_document([*found, *idle])
        return
    for one in idle:
        click.echo(escape_controls(f"{one['topic']}\n  schedule {one['schedule']}: {one['status']}"))
    for each in found:
        click.echo(each["topic"])
        for one in each["subscriptions"]:
            click.echo(escape_controls(f"  subscription {one['subscription']}: {' '.join(one['sentences'])}"))
        for ledger in each["ledgers"]:
            text = f"{format_count(ledger['messages'], 'message')}, {ledger['bytes']:,} bytes"
            click.echo(f"  ledger {ledger['ledger_id']} ({text}): {ledger['sentence']}")


def _idle_schedules(session: CommandSession, topic: str) -> list[dict[str, Any]]:
    """Returns the schedules of a topic that are due and do not fire. A caller that may not produce sees none."""
    from ...proto.errors import NotFound, Unauthorized

    try:
        found = session.admin.schedules(topic)
    except (Unauthorized, NotFound):
        return []
    late = ("cannot fire", "due", "its topic")
    return [
        {"topic": topic, "schedule": each.name, "status": each.status}
        for each in found if each.status.startswith(late)
    ]  # fmt: skip


brokers = LazyGroup(
    "brokers",
    {
        "list": LazyCommand(".admin.cluster", "list_brokers", "Brokers, and how many topics and bundles they own."),
        "drain": LazyCommand(".admin.cluster", "drain", "Let one give what it owns to others, and get nothing."),
        "undrain": LazyCommand(".admin.cluster", "undrain", "Let one get bundles again."),
        "forget": LazyCommand(".admin.cluster", "forget_broker", "One that died will not come back: show it no more."),
        "list-dynamic-config": LazyCommand(
            ".admin.cluster", "list_dynamic_config", "Names of the settings that change while brokers run."
        ),
        "get-all-dynamic-config": LazyCommand(
            ".admin.cluster", "get_all_dynamic_config", "The settings that were changed so."
        ),
        "get-runtime-config": LazyCommand(
            ".admin.cluster", "get_runtime_config", "The settings in force at a broker, and where each is from."
        ),
        "update-dynamic-config": LazyCommand(
            ".admin.cluster", "update_dynamic_config", "Change a setting of all brokers, without a restart."
        ),
        "security": LazyCommand(
            ".admin.cluster", "show_security", "Who is connected, until when, and who was denied something."
        ),
        "delete-dynamic-config": LazyCommand(
            ".admin.cluster", "delete_dynamic_config", "Each broker has its own value of it again."
        ),
    },
    with_rows=True,
    help="Brokers of the cluster.\n\nExample: magnetar brokers list",
)
cluster = LazyGroup(
    "cluster",
    {
        "finish-upgrade": LazyCommand(
            ".storage.identity", "finish_upgrade", "Let all processes write what this version can, for good."
        ),
    },
    help="The cluster as a whole.\n\nExample: magnetar cluster finish-upgrade --dry-run",
)
bookies = LazyGroup(
    "bookies",
    {
        "list": LazyCommand(".admin.cluster", "list_bookies", "Bookies: state, disk, how many ledgers lie on them."),
        "state": LazyCommand(
            ".storage.identity", "state", "What each says of itself: disk, limbo, scrubber, garbage collection."
        ),
        "accept-loss": LazyCommand(
            ".storage.identity", "accept_loss", "Let one leave limbo with entries that are lost for good."
        ),
        "gc": LazyCommand(
            ".storage.identity", "gc", "Garbage collection: what would be done (--plan), or do it (--now)."
        ),
        "racks": LazyCommand(".storage.identity", "racks", "Where bookies stand, as the metadata says."),
        "set-rack": LazyCommand(".storage.identity", "set_rack", "Say where one stands, above what it says itself."),
        "delete-rack": LazyCommand(".storage.identity", "delete_rack", "… and go back to what it says itself."),
        "decommission": LazyCommand(".storage.ledgers", "decommission", "Empty one before it is taken away."),
        "rebalance": LazyCommand(".storage.ledgers", "rebalance", "Move sealed ledgers off full bookies."),
        "recover": LazyCommand(".storage.ledgers", "recover", "Make every copy again that lay on a dead one, now."),
        "forget": LazyCommand(
            ".storage.identity", "forget", "A bookie's data is lost for good: its place may be taken."
        ),
        "move": LazyCommand(".storage.identity", "move", "A bookie's directory has moved to another place."),
        "replace-directory": LazyCommand(
            ".storage.identity", "replace_directory", "Start with an empty folder in the place of a lost disk."
        ),
        "accept-metadata": LazyCommand(
            ".storage.identity", "accept_metadata", "Start on metadata older than the directory."
        ),
    },
    {"list-bookies": "list"},
    help="Bookies of the cluster.\n\nExample: magnetar bookies list",
)


@session_command(name="list", watched=True)
def list_brokers(session: CommandSession) -> None:
    """List the brokers: how many topics and bundles each of them owns (- if the broker does not answer), whether it is
    being drained, and its labels.

    Example: magnetar brokers list -o json
    """
    rows = [{**asdict(broker), "labels": ",".join(broker.labels) or None} for broker in session.admin.brokers()]
    columns = ("name", "endpoint", "topics", "bundles", "draining", "labels")
    session.out.print_rows(rows, columns, empty="no brokers")


BROKER_ASK_TIMEOUT_S = 5.0
"""Seconds for which a broker is asked for what only it knows."""
DRAIN_POLL_S = 0.5
"""Seconds between two questions for what a broker still owns."""


@session_command(
    option("--wait", is_flag=True, help="Until it owns nothing any more, and show what is left."),
    option("--wait-s", type=FiniteNumber(0), default=None, help="… but at most so many seconds."),
)
def drain(session: CommandSession, broker: str, wait: bool, wait_s: float | None) -> None:
    """Move all topics and bundles of a broker to the other brokers of its group, and give it no new ones until it is
    undrained.

    The drain begins within two seconds. The broker's clients are told where to go. The order stays in force when the
    broker restarts. If there is no other broker in the group, the broker keeps everything. Ctrl-C ends the waiting, not
    the drain. BROKER is the name of the broker.

    \b
    Examples:
      magnetar brokers drain broker-1 --wait
      magnetar brokers drain broker-1 --wait --wait-s 60
    """
    from ...runtime.clock import SystemClock

    session.admin.drain_broker(broker)
    if not wait:
        session.out.print_result_text(
            f"broker {broker} drains: 'magnetar brokers list' shows what is left", broker=broker
        )
        return
    now = SystemClock().monotonic
    end_s, told = None if wait_s is None else now() + wait_s, ""
    while (found := _find_broker(session, broker)) is not None:
        if found.draining and found.bundles == 0 and found.topics == 0:
            break
        left = f"{_say_left(found)} left"
        if left != told and not session.out.is_structured:
            click.echo(left, err=True)
            told = left
        if end_s is not None and now() >= end_s:
            raise CommandFailure(f"broker {broker} has {left} after {wait_s:g} s; it goes on giving them away")
        time.sleep(DRAIN_POLL_S)
    session.out.print_result_text(f"broker {broker} owns nothing any more", broker=broker, bundles=0, topics=0)


def _find_broker(session: CommandSession, name: str) -> BrokerInfo | None:
    """Returns the broker; None if it is not registered any more."""
    return next((each for each in session.admin.brokers() if each.name == name), None)


def _say_left(broker: BrokerInfo) -> str:
    if broker.bundles is None or broker.topics is None:
        return "an unknown number of bundles"
    return f"{broker.bundles} bundles and {broker.topics} topics"


@session_command()
def undrain(session: CommandSession, broker: str) -> None:
    """Let a drained broker get bundles again. The bundles that it gave away stay at the other brokers.

    Example: magnetar brokers undrain broker-1
    """
    session.admin.undrain_broker(broker)
    session.out.print_result_text(f"broker {broker} gets bundles again", broker=broker)


@session_command(name="forget")
def forget_broker(session: CommandSession, broker: str, yes: bool) -> None:
    """Say that a broker that died is gone for good, so that status and doctor do not show it any more. Nothing else
    changes: its topics are served by others. If it starts again, it is a broker as before.

    Example: magnetar brokers forget broker-1
    """
    died = next((each for each in session.admin.broker_summaries().died if each.name == broker), None)
    if died is not None:  # else the broker that is asked says why not
        confirm_deletion(f"Broker {broker} ({died.endpoint}) is gone for good", yes)
    session.admin.forget_broker(broker)
    session.out.print_result_text(f"broker {broker} is forgotten", broker=broker)


SECURITY_COLUMNS = ("broker", "role", "kind", "method", "credential_id", "expires_ms", "producers", "consumers")


@session_command(
    option("--broker", "named", default="", metavar="NAME", help="Only of this one."),
    watched=True, name="security",
)  # fmt: skip
def show_security(session: CommandSession, named: str) -> None:
    """Show the credentials with which clients are connected to the brokers, when they expire, and the callers to whom
    brokers denied something. Each broker is asked at the address that look-ups answer. If one does not answer, the exit
    code is 1.

    \b
    Examples:
      magnetar brokers security
      magnetar brokers security --broker broker-1 -o json
    """
    brokers = [each for each in session.admin.brokers() if named in ("", each.name)]
    if not brokers:
        raise CommandFailure(f"no broker {named!r} is registered; 'magnetar brokers list' shows them", NOT_FOUND)
    found, silent = ask_who_is_connected(session, brokers)
    _print_security(session, found)
    for name, why in silent.items():
        click.echo(f"broker {name} does not answer: {why}", err=True)
    if silent:
        sys.exit(FAILED)


def ask_who_is_connected(
    session: CommandSession, brokers: Sequence[BrokerInfo]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Asks each of the brokers who is connected. Returns the answers, and by broker name the reason why another one did
    not answer within BROKER_ASK_TIMEOUT_S seconds. Raises Unauthenticated or Unauthorized if a broker refuses this
    caller."""
    from ...proto.errors import MagnetarError, Unauthenticated, Unauthorized

    found, silent = list[dict[str, Any]](), dict[str, str]()
    for broker in brokers:
        other = session.with_broker(broker.endpoint).with_timeout(BROKER_ASK_TIMEOUT_S)
        try:
            found.append(asdict(other.admin.describe_security()))
        except (Unauthenticated, Unauthorized):
            raise
        except MagnetarError as error:
            silent[broker.name] = str(error)
        finally:
            other.close()
    return found, silent


def _print_security(session: CommandSession, found: Sequence[Mapping[str, Any]]) -> None:
    if session.out.is_structured:
        session.out.print_rows(found, ("broker", "roles", "refused"))
        return
    roles = [{"broker": each["broker"], **role} for each in found for role in each["roles"]]
    session.out.print_rows(roles, SECURITY_COLUMNS, empty="no client is connected with credentials")
    refused = [{"broker": each["broker"], **caller} for each in found for caller in each["refused"]]
    if refused:
        click.echo()
        session.out.print_rows(refused, ("broker", "caller", "refusals"))


CONFIG_OPTION = option(
    "--config", "-c", "setting", required=True, metavar="NAME", help="Of the setting; ours or Pulsar's."
)


@session_command(watched=True)
def list_dynamic_config(session: CommandSession) -> None:
    """List the names of the settings that can be changed while brokers run.

    Example: magnetar brokers list-dynamic-config
    """
    found = session.admin.describe_broker().settings
    session.out.print_names(sorted(each.name for each in found if each.dynamic))


@session_command(watched=True)
def get_all_dynamic_config(session: CommandSession) -> None:
    """Show the settings that were changed for all brokers with update-dynamic-config, and their values.

    Example: magnetar brokers get-all-dynamic-config
    """
    found = session.admin.describe_broker().settings
    rows = [{"name": each.name, "value": each.value} for each in found if each.source == "dynamic"]
    session.out.print_rows(rows, ("name", "value"), empty="none is changed")


@session_command(
    option("--changed", is_flag=True, help="Only those that are not the defaults."),
    watched=True,
)
def get_runtime_config(session: CommandSession, changed: bool) -> None:
    """Show the settings of the broker that answers, and the source of each value.

    The source is default; file (--config); environment (MAGNETAR_BROKER_…); option, which also means a value that was
    computed from memory_bytes; or dynamic: the value was changed for all brokers with update-dynamic-config, and
    overrides the other sources.

    \b
    Examples:
      magnetar brokers get-runtime-config --changed
      magnetar brokers get-runtime-config -o json
    """
    found = session.admin.describe_broker().settings
    rows = [
        {"name": each.name, "value": each.value, "source": each.source, "dynamic": each.dynamic}
        for each in found if not changed or each.source != "default"
    ]  # fmt: skip
    session.out.print_rows(rows, ("name", "value", "source", "dynamic"))


@session_command(CONFIG_OPTION, option("--value", "-v", required=True, help="Items of a list are separated by commas."))
def update_dynamic_config(session: CommandSession, setting: str, value: str) -> None:
    """Change a setting of all brokers. The value is stored in the metadata, and each broker applies it within a second
    or two. Until it is deleted, it overrides the value with which a broker was started, also for brokers that start
    later. The setting log_level is applied by bookies and by the metadata service, too.

    \b
    Examples:
      magnetar brokers update-dynamic-config --config log_level --value debug
      magnetar brokers update-dynamic-config --config dispatch_rate_messages --value 1000
    """
    session.admin.change_setting(name=setting, value=value)
    where = "all brokers, bookies and metadata services" if setting == "log_level" else "all brokers"
    session.out.print_result_text(f"{setting} is {value} at {where}", config=setting, value=value)


@session_command(CONFIG_OPTION)
def delete_dynamic_config(session: CommandSession, setting: str) -> None:
    """Undo the change of a setting for all brokers: each broker uses again the value that it was started with.

    Example: magnetar brokers delete-dynamic-config --config log_level
    """
    session.admin.remove_setting(name=setting)
    session.out.print_result_text(f"each broker has its own value of {setting} again", config=setting)


@click.command("list")
@option("--registered", is_flag=True, help="Only those that are registered; asks no bookie.")
@with_operator_and_watch_options
def list_bookies(session: CommandSession, registered: bool) -> None:
    """List the bookies, also those that are away: their state, their disks, and how many ledgers name them.

    The states: writable, read-only, limbo (it lost data and looks for it), departing (it is being emptied), absent (not
    registered), forgotten (it has no cookie any more, but ledgers still name it). The free space is what each bookie
    reports now; for a bookie that does not answer, and with --registered, what it registered a minute ago at most.

    \b
    Examples:
      magnetar bookies list
      magnetar bookies list -o json
    """
    from ...proto.errors import MagnetarError
    from ..common.exits import CommandFailure
    from ..storage.admin_port import ask_reachable_bookies
    from ..storage.ledgers import ask_any_bookie

    known = {
        bookie.id: {
            "id": bookie.id,
            "endpoint": bookie.endpoint,
            "state": "read-only" if bookie.read_only else "writable",
            "readOnly": bookie.read_only,
            "rack": bookie.rack,
            "group": bookie.group or None,
            "freeBytes": bookie.free_bytes,
            "totalBytes": bookie.total_bytes,
        }
        for bookie in session.admin.bookies()
    }
    if known and not registered:
        for id_, state in ask_reachable_bookies(session, "state").items():
            if id_ in known:
                known[id_].update(freeBytes=state["freeBytes"], totalBytes=state["totalBytes"])
        try:
            for each in ask_any_bookie(session, "bookies")["bookies"]:
                read_only = each["state"] in ("read-only", "departing")
                known[each["id"]] = {**each, **known.get(each["id"], {}), "state": each["state"], "readOnly": read_only}
        except (MagnetarError, CommandFailure) as error:
            click.echo(f"only what is registered, no bookie answers: {error}", err=True)
    columns = ("id", "endpoint", "state", "rack", "group", "freeBytes", "totalBytes", "ledgers")
    session.out.print_rows(list(known.values()), columns, empty="no bookies")


# --------------------------------------------------------------------------------------------------------- spark
# `magnetar spark …`: Spark's streaming queries that hold data, by the subscriptions that they have of their own.


QUERY_COLUMNS = ("query", "topic", "lag", "bytes")
QUERY_SUBSCRIPTION_NAME = re.compile(r"spark-query-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
"""Matches the name of a query's own subscription, with the query's id (spark_connector/source.py)."""
NAMESPACE_OPTION = option("-n", "--namespace", default="public/default", show_default=True, help="Of the topics.")

spark = LazyGroup(
    "spark",
    {
        "queries": LazyCommand(".admin.cluster", "queries", "The queries that hold data, and how far each lags."),
        "forget": LazyCommand(".admin.cluster", "forget", "Delete what a query that is no more holds."),
    },
    help="Streaming queries of Spark.\n\nExample: magnetar spark queries",
)


@session_command(NAMESPACE_OPTION, watched=True)
def queries(session: CommandSession, namespace: str) -> None:
    """List the Spark queries whose subscriptions keep data, and how much each of them has not committed, by topic and
    partition. The id of a query is in the file `metadata` of its checkpoint, and Spark shows it.

    Example: magnetar spark queries
    """
    rows = [
        {"query": query, "topic": part, "lag": each.backlog, "bytes": each.backlog_bytes}
        for part, query, each in _found(session, namespace)
    ]
    session.out.print_rows(
        sorted(rows, key=lambda row: (str(row["query"]), str(row["topic"]))), QUERY_COLUMNS, empty="no queries"
    )


@session_command(NAMESPACE_OPTION)
def forget(session: CommandSession, query: str, namespace: str, yes: bool) -> None:
    """Delete the subscriptions of a Spark query that does not run any more, by the query's id. If the query runs again,
    it continues from its checkpoint; messages that were deleted meanwhile are lost to it.

    Example: magnetar spark forget 6e1d5c1c-0d0e-4a3b-9a51-2f1c5a4f8f0e
    """
    parts = [(part, each.name) for part, id_, each in _found(session, namespace) if id_ == query]
    if not parts:
        raise CommandFailure(
            f"no query {query} holds data of {namespace}: magnetar spark queries lists them", NOT_FOUND
        )
    confirm_deletion(f"Delete all subscriptions of query {query} in {namespace}", yes)
    for part, name in parts:
        session.admin.delete_subscription(part, name)
    text = f"query {query} holds nothing any more: {len(parts)} subscriptions are deleted"
    session.out.print_result_text(text, query=query, subscriptions=len(parts))


def _found(session: CommandSession, namespace: str) -> Iterator[tuple[str, str, SubscriptionStats]]:
    for topic in session.admin.topics(namespace):
        if topic.startswith("non-persistent:"):
            continue
        for part in session.admin.parts(topic):
            for each in session.admin.topic_stats(part).subscriptions:
                if (name := QUERY_SUBSCRIPTION_NAME.fullmatch(each.name)) is not None:
                    yield part, name[1], each
