"""`magnetar status`, `magnetar top` and `magnetar why`: what an operator asks first.

`status` asks any broker for the sums of all (`BrokerSummaries`), and the bookies for their state and for repair. What
needs somebody is an alarm: a sentence, and the command that shows more or helps; with one, the exit code is 1.
proto/alarms.py has the rules. Guarding tests: tests/cli/test_status.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click
from click import option

from ...proto.alarms import count_of, find_alarms, find_metadata_alarms, find_repair_alarms, format_age
from ...runtime.clock import SystemClock
from ..common.exits import FAILED, Failure
from ..common.session import Session, session_command
from ..common.units import FiniteNumber
from ..storage.admin_port import with_operator

if TYPE_CHECKING:
    from ...proto.statistics import ClusterSummary

WORST = 5
"""Topics that `status` shows."""
BROKER_COLUMNS = ("broker", "endpoint", "version", "up", "busy", "topics", "in", "out", "backlog", "connections")
BOOKIE_COLUMNS = ("bookie", "endpoint", "version", "state", "freePercent", "freeBytes")
TOPIC_COLUMNS = ("topic", "in", "out", "bytesIn", "bytesOut", "backlog", "oldest", "storage", "producers", "consumers")
SORTS = {"traffic": "throughput_in", "backlog": "backlog", "age": "oldest_ms"}
"""The ways of `top`, and how pages of topics are sorted for them."""


# ------------------------------------------------------------------------------------------------------ status


@click.command()
@with_operator
def status(session: Session) -> None:
    """The cluster on one screen: brokers, bookies, repair, the worst backlogs, and what needs somebody.

    Exit code 1 if somebody is needed: each alarm has the command that shows more. While the metadata does not answer,
    that is the first sentence, and the rest is what the broker that was asked knows.

    \b
    Examples:
      magnetar status
      magnetar status -o json
    """
    now_ms = SystemClock().wall_ms()
    summary = session.admin.broker_summaries()
    brokers = [broker_row(asdict(each), now_ms) for each in summary.brokers]
    bookies, repair = list_known_bookies(session, summary), repair_state(session, summary)
    backlogs, oldest = find_largest_topics(summary, "backlog", WORST), find_largest_topics(summary, "age", WORST)
    away = find_metadata_alarms(summary.metadata_away_ms, now_ms)
    alarms = [] if away else find_repair_alarms(repair)
    alarms += find_alarms(brokers, summary.silent, bookies, oldest, now_ms)
    alarms = [*away, *sorted(alarms, key=lambda alarm: not alarm.needed)]
    if session.out.structured:
        session.out.print_document({
            "brokers": brokers, "silent": list(summary.silent), "bookies": bookies, "repair": repair,
            "backlogs": [topic_row(each, now_ms) for each in backlogs],
            "alarms": [each._asdict() for each in alarms],
        })  # fmt: skip
    else:
        for each in away:
            click.echo(f"! {each.text}  {each.command}\n")
        session.out.print_rows(brokers, BROKER_COLUMNS, empty="no brokers")
        click.echo()
        session.out.print_rows(bookies, BOOKIE_COLUMNS, empty="no bookies")
        if backlogs:
            click.echo()
            rows = [topic_row(each, now_ms) for each in backlogs]
            session.out.print_rows(rows, ("topic", "backlog", "oldest", "consumers"))
        click.echo()
        for each in alarms[len(away) :]:
            click.echo(f"{'!' if each.needed else '-'} {each.text}  {each.command}")
        if not alarms:
            click.echo("All is well.")
    if any(each.needed for each in alarms):
        sys.exit(FAILED)


def broker_row(found: dict[str, Any], now_ms: int) -> dict[str, Any]:
    total = found["total"]
    return {
        "broker": found["name"], "endpoint": found["endpoint"], "version": found["version"],
        "up": format_age((now_ms - found["since_ms"]) / 1000), "sinceMs": found["since_ms"],
        "busy": round(found["loop_busy"], 3) if found["loop_busy"] >= 0 else None, "topics": total["topics"],
        "in": total["rate_in"], "out": total["rate_out"], "backlog": total["backlog"],
        "connections": found["connections"], "degraded": found["degraded"], "storageBytes": total["storage_bytes"],
    }  # fmt: skip


def list_known_bookies(session: Session, summary: ClusterSummary) -> list[dict[str, Any]]:
    """Returns the registered bookies and those that ledgers name, with the state that they say themselves. While the
    metadata is away no bookie is asked."""
    from ...proto.errors import MagnetarError
    from ..storage.admin_port import ask_answering
    from ..storage.ledgers import ask_any_bookie

    away = bool(summary.metadata_away_ms)
    known: dict[str, dict[str, Any]] = {
        each.id: {
            "bookie": each.id, "endpoint": each.endpoint, "version": None,
            "state": "read-only" if each.read_only else "writable",
            "freeBytes": each.free_bytes, "totalBytes": each.total_bytes,
        }
        for each in summary.bookies or (() if away else session.admin.bookies())  # an older broker does not say them
    }  # fmt: skip
    if known and not away:
        for id_, found in ask_answering(session, "state").items():
            if id_ in known:
                known[id_].update(freeBytes=found["freeBytes"], totalBytes=found["totalBytes"])
                known[id_]["version"] = found.get("version")  # an older bookie does not say it
        try:
            for each in ask_any_bookie(session, "bookies")["bookies"]:
                nowhere = {"bookie": each["id"], "endpoint": None, "version": None, "freeBytes": 0, "totalBytes": 0}
                known.setdefault(each["id"], nowhere)["state"] = each["state"]
        except (MagnetarError, Failure):
            pass  # what is registered is shown
    for each in known.values():
        each["freePercent"] = round(100 * each["freeBytes"] / each["totalBytes"], 1) if each["totalBytes"] else None
    return list(known.values())


def repair_state(session: Session, summary: ClusterSummary) -> dict[str, Any] | None:
    """Returns the repair state that a bookie reports. Returns None if no bookie reports one, or the metadata, which
    bookies read for it, does not answer."""
    from ...proto.errors import MagnetarError
    from ..storage.ledgers import ask_any_bookie

    if summary.metadata_away_ms:
        return None
    try:
        found = ask_any_bookie(session, "repair-status")
    except (MagnetarError, Failure):
        return None
    return {name: found[name] for name in ("enabled", "auditor", "underReplicated", "secondsToGo")}


# --------------------------------------------------------------------------------------------------------- top


def find_largest_topics(summary: ClusterSummary, by: str, limit: int) -> list[dict[str, Any]]:
    """Returns the largest topics of all brokers, the largest first. `by`: one of SORTS."""
    rows = [asdict(row) for broker in summary.brokers for row in getattr(broker, f"by_{by}")]
    if by == "traffic":
        rows.sort(key=lambda row: (-(row["throughput_in"] + row["throughput_out"]), row["name"]))
    elif by == "backlog":
        rows.sort(key=lambda row: (-row["backlog"], row["name"]))
    else:
        rows.sort(key=itemgetter("oldest_ms", "name"))
    return rows[:limit]


def topic_row(found: Mapping[str, Any], now_ms: int) -> dict[str, Any]:
    oldest = found["oldest_ms"]
    return {
        "topic": found["name"], "owner": found["owner"], "in": found["rate_in"], "out": found["rate_out"],
        "bytesIn": found["throughput_in"], "bytesOut": found["throughput_out"], "backlog": found["backlog"],
        "oldest": format_age((now_ms - oldest) / 1000) if oldest else None, "oldestMs": oldest,
        "storage": found["storage_bytes"], "producers": found["producers"], "consumers": found["consumers"],
    }  # fmt: skip


@session_command(
    option("--by", type=click.Choice(list(SORTS)), default="traffic", show_default=True, help="What is large."),
    option("--contains", default="", metavar="TEXT", help="Only topics whose full name contains it."),
    option("-n", "--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="Topics."),
    option("--every", "every_s", type=FiniteNumber(0.5), default=2.0, show_default=True, help="Seconds."),
    option("--once", is_flag=True, help="Show it once; so it is on a pipe."),
)
def top(session: Session, by: str, contains: str, limit: int, every_s: float, once: bool) -> None:
    """Topics with most traffic, the largest backlog or the oldest message, of all brokers, until Ctrl-C.

    \b
    Examples:
      magnetar top
      magnetar top --by backlog --once -o json
    """
    live = not once and not session.out.structured and sys.stdout.isatty()
    while True:
        rows, silent = _largest_now(session, by, contains, limit)
        if live:
            click.echo("\x1b[H\x1b[J", nl=False)  # to the corner, and all after it is empty
        session.out.print_rows(rows, TOPIC_COLUMNS, empty="no such topics")
        for name in silent:
            click.echo(f"broker {name} does not answer: its topics are missing", err=True)
        if not live:
            return
        time.sleep(every_s)


def _largest_now(session: Session, by: str, contains: str, limit: int) -> tuple[list[dict[str, Any]], Sequence[str]]:
    now_ms = SystemClock().wall_ms()
    if contains:
        page = session.admin.topic_page(contains=contains, sort=SORTS[by], limit=limit)
        return [topic_row(asdict(each), now_ms) for each in page.topics], page.silent
    summary = session.admin.broker_summaries()
    return [topic_row(each, now_ms) for each in find_largest_topics(summary, by, limit)], summary.silent


# --------------------------------------------------------------------------------------------------------- why


@session_command(watched=True)
def why(session: Session, topic: str, subscription: str = "") -> None:
    """Why the subscriptions of a topic, or one of them, do not get on, and what keeps the topic's ledgers.

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
    if session.out.structured:
        session.out.print_document(found)
        return
    for each in found:
        click.echo(each["topic"])
        for one in each["subscriptions"]:
            click.echo(f"  subscription {one['subscription']}: {' '.join(one['sentences'])}")
        for ledger in each["ledgers"]:
            text = f"{count_of(ledger['messages'], 'message')}, {ledger['bytes']:,} bytes"
            click.echo(f"  ledger {ledger['ledger_id']} ({text}): {ledger['sentence']}")
