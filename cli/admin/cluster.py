"""`magnetar brokers …` and `magnetar bookies …`: who is there, and who is to give away what it owns."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from click import option

from ..common.exits import NOT_FOUND, Failure
from ..common.lazy import LazyCommand, LazyGroup
from ..common.session import Session, session_command
from ..common.units import FiniteNumber
from ..storage.admin_port import watching_operator

if TYPE_CHECKING:
    from ...proto.statistics import BrokerInfo, SubscriptionStats

brokers = LazyGroup(
    "brokers",
    {
        "list": LazyCommand(".admin.cluster", "list_brokers", "Brokers, and how many topics and bundles they own."),
        "drain": LazyCommand(".admin.cluster", "drain", "Let one give what it owns to others, and get nothing."),
        "undrain": LazyCommand(".admin.cluster", "undrain", "Let one get bundles again."),
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
            ".storage.gc", "state", "What each says of itself: disk, limbo, scrubber, garbage collection."
        ),
        "accept-loss": LazyCommand(
            ".storage.gc", "accept_loss", "Let one leave limbo with entries that are lost for good."
        ),
        "gc": LazyCommand(".storage.gc", "gc", "Garbage collection: what would be done (--plan), or do it (--now)."),
        "racks": LazyCommand(".storage.identity", "racks", "Where bookies stand, as the metadata says."),
        "set-rack": LazyCommand(".storage.identity", "set_rack", "Say where one stands, above what it says itself."),
        "delete-rack": LazyCommand(".storage.identity", "delete_rack", "… and go back to what it says itself."),
        "decommission": LazyCommand(".storage.ledgers", "decommission", "Empty one before it is taken away."),
        "recover": LazyCommand(".storage.ledgers", "recover", "Make every copy again that lay on a dead one, now."),
        "forget": LazyCommand(
            ".storage.identity", "forget", "A bookie's data is lost for good: its place may be taken."
        ),
        "move": LazyCommand(".storage.identity", "move", "A bookie's directory has moved to another place."),
        "accept-metadata": LazyCommand(
            ".storage.identity", "accept_metadata", "Start on metadata older than the directory."
        ),
    },
    {"list-bookies": "list"},
    help="Bookies of the cluster.\n\nExample: magnetar bookies list",
)


@session_command(name="list", watched=True)
def list_brokers(session: Session) -> None:
    """Brokers, how many topics and bundles each owns (- when it does not answer), and whether it drains.

    Example: magnetar brokers list -o json
    """
    rows = [asdict(broker) for broker in session.admin.brokers()]
    session.out.print_rows(rows, ("name", "endpoint", "topics", "bundles", "draining"), empty="no brokers")


DRAIN_LOOK_S = 0.5
"""Seconds between two questions for what a broker still owns."""


@session_command(
    option("--wait", is_flag=True, help="Until it owns nothing any more, and show what is left."),
    option("--wait-s", type=FiniteNumber(0), default=None, help="… but at most so many seconds."),
)
def drain(session: Session, broker: str, wait: bool, wait_s: float | None) -> None:
    """Let a broker give what it owns to the other brokers of its group, and get nothing, until it is undrained.

    It begins within two seconds. Its clients are told where to go. The order outlives a restart of the broker. Without
    another broker in the group it keeps all. Ctrl-C ends the waiting, not the drain. BROKER is its name.

    \b
    Examples:
      magnetar brokers drain broker-1 --wait
      magnetar brokers drain broker-1 --wait --wait-s 60
    """
    from ...runtime.clock import SystemClock

    session.admin.drain_broker(broker)
    if not wait:
        session.out.print_done(f"broker {broker} drains: 'magnetar brokers list' shows what is left", broker=broker)
        return
    now = SystemClock().monotonic
    end_s, told = None if wait_s is None else now() + wait_s, ""
    while (found := _find_broker(session, broker)) is not None:
        if found.draining and found.bundles == 0 and found.topics == 0:
            break
        left = f"{_say_left(found)} left"
        if left != told and not session.out.structured:
            click.echo(left, err=True)
            told = left
        if end_s is not None and now() >= end_s:
            raise Failure(f"broker {broker} has {left} after {wait_s:g} s; it goes on giving them away")
        time.sleep(DRAIN_LOOK_S)
    session.out.print_done(f"broker {broker} owns nothing any more", broker=broker, bundles=0, topics=0)


def _find_broker(session: Session, name: str) -> BrokerInfo | None:
    """Returns the broker; None if it is not registered any more."""
    return next((each for each in session.admin.brokers() if each.name == name), None)


def _say_left(broker: BrokerInfo) -> str:
    if broker.bundles is None or broker.topics is None:
        return "an unknown number of bundles"
    return f"{broker.bundles} bundles and {broker.topics} topics"


@session_command()
def undrain(session: Session, broker: str) -> None:
    """Let a broker get bundles again. What it gave away stays where it is.

    Example: magnetar brokers undrain broker-1
    """
    session.admin.undrain_broker(broker)
    session.out.print_done(f"broker {broker} gets bundles again", broker=broker)


CONFIG = option("--config", "-c", "setting", required=True, metavar="NAME", help="Of the setting; ours or Pulsar's.")


@session_command(watched=True)
def list_dynamic_config(session: Session) -> None:
    """Names of the settings that may change while brokers run.

    Example: magnetar brokers list-dynamic-config
    """
    found = session.admin.describe_broker().settings
    session.out.print_names(sorted(each.name for each in found if each.dynamic))


@session_command(watched=True)
def get_all_dynamic_config(session: Session) -> None:
    """The settings that were changed for all brokers while they run, with their values.

    Example: magnetar brokers get-all-dynamic-config
    """
    found = session.admin.describe_broker().settings
    rows = [{"name": each.name, "value": each.value} for each in found if each.source == "dynamic"]
    session.out.print_rows(rows, ("name", "value"), empty="none is changed")


@session_command(
    option("--changed", is_flag=True, help="Only those that are not the defaults."),
    watched=True,
)
def get_runtime_config(session: Session, changed: bool) -> None:
    """The settings in force at the broker that answers, each with its source.

    The source is default; file (--config); environment (MAGNETAR_BROKER_…); option, also of what is worked out from
    memory_bytes; or dynamic, which beats them: it was changed for all brokers with update-dynamic-config.

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


@session_command(CONFIG, option("--value", "-v", required=True, help="Items of a list are separated by commas."))
def update_dynamic_config(session: Session, setting: str, value: str) -> None:
    """Change a setting of all brokers: it is stored in the metadata, and each applies it within a second or two. It
    beats what brokers are started with, until it is deleted; so brokers that start later have it too.

    \b
    Examples:
      magnetar brokers update-dynamic-config --config log_level --value debug
      magnetar brokers update-dynamic-config --config dispatch_rate_messages --value 1000
    """
    session.admin.change_setting(name=setting, value=value)
    session.out.print_done(f"{setting} is {value} at all brokers", config=setting, value=value)


@session_command(CONFIG)
def delete_dynamic_config(session: Session, setting: str) -> None:
    """Remove a change of all brokers: each has the value again that it was started with.

    Example: magnetar brokers delete-dynamic-config --config log_level
    """
    session.admin.remove_setting(name=setting)
    session.out.print_done(f"each broker has its own value of {setting} again", config=setting)


@click.command("list")
@option("--registered", is_flag=True, help="Only those that are registered; asks no bookie.")
@watching_operator
def list_bookies(session: Session, registered: bool) -> None:
    """Bookies: their state, their disks, and how many ledgers name them; also those that are away.

    writable, read-only, limbo (it lost data and looks for it), departing (it is being emptied), absent (not
    registered), forgotten (no cookie any more, and ledgers still name it). The free space is what each bookie says now;
    of one that does not answer, and with --registered, what it registered, a minute ago at most.

    \b
    Examples:
      magnetar bookies list
      magnetar bookies list -o json
    """
    from ...proto.errors import MagnetarError
    from ..common.exits import Failure
    from ..storage.admin_port import ask_answering
    from ..storage.ledgers import ask_any_bookie

    known = {
        bookie.id: {
            "id": bookie.id,
            "endpoint": bookie.endpoint,
            "state": "read-only" if bookie.read_only else "writable",
            "readOnly": bookie.read_only,
            "rack": bookie.rack,
            "freeBytes": bookie.free_bytes,
            "totalBytes": bookie.total_bytes,
        }
        for bookie in session.admin.bookies()
    }
    if known and not registered:
        for id_, state in ask_answering(session, "state").items():
            if id_ in known:
                known[id_].update(freeBytes=state["freeBytes"], totalBytes=state["totalBytes"])
        try:
            for each in ask_any_bookie(session, "bookies")["bookies"]:
                read_only = each["state"] in ("read-only", "departing")
                known[each["id"]] = {**each, **known.get(each["id"], {}), "state": each["state"], "readOnly": read_only}
        except (MagnetarError, Failure) as error:
            click.echo(f"only what is registered, no bookie answers: {error}", err=True)
    columns = ("id", "endpoint", "state", "rack", "freeBytes", "totalBytes", "ledgers")
    session.out.print_rows(list(known.values()), columns, empty="no bookies")


# --------------------------------------------------------------------------------------------------------- spark
# `magnetar spark …`: Spark's streaming queries that hold data, by the subscriptions that they have of their own.


COLUMNS = ("query", "topic", "lag", "bytes")
NAME = re.compile(r"spark-query-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
"""Matches the name of a query's own subscription, with the query's id (spark_connector/source.py)."""
NAMESPACE = option("-n", "--namespace", default="public/default", show_default=True, help="Of the topics.")

spark = LazyGroup(
    "spark",
    {
        "queries": LazyCommand(".admin.cluster", "queries", "The queries that hold data, and how far each lags."),
        "forget": LazyCommand(".admin.cluster", "forget", "Delete what a query that is no more holds."),
    },
    help="Streaming queries of Spark.\n\nExample: magnetar spark queries",
)


@session_command(NAMESPACE, watched=True)
def queries(session: Session, namespace: str) -> None:
    """The queries that hold data, with what each has not committed, by topic and partition. A query has the id that is
    in the file `metadata` of its checkpoint, and shown by Spark.

    Example: magnetar spark queries
    """
    rows = [
        {"query": query, "topic": part, "lag": each.backlog, "bytes": each.backlog_bytes}
        for part, query, each in _found(session, namespace)
    ]
    session.out.print_rows(
        sorted(rows, key=lambda row: (str(row["query"]), str(row["topic"]))), COLUMNS, empty="no queries"
    )


@session_command(NAMESPACE)
def forget(session: Session, query: str, namespace: str) -> None:
    """Delete the subscriptions of a query that does not run any more, by its id. If it runs again, it goes on from its
    checkpoint; what was deleted meanwhile is lost to it.

    Example: magnetar spark forget 6e1d5c1c-0d0e-4a3b-9a51-2f1c5a4f8f0e
    """
    parts = [(part, each.name) for part, id_, each in _found(session, namespace) if id_ == query]
    if not parts:
        raise Failure(f"no query {query} holds data of {namespace}: magnetar spark queries lists them", NOT_FOUND)
    for part, name in parts:
        session.admin.delete_subscription(part, name)
    text = f"query {query} holds nothing any more: {len(parts)} subscriptions are deleted"
    session.out.print_done(text, query=query, subscriptions=len(parts))


def _found(session: Session, namespace: str) -> Iterator[tuple[str, str, SubscriptionStats]]:
    for topic in session.admin.topics(namespace):
        if topic.startswith("non-persistent:"):
            continue
        for part in session.admin.parts(topic):
            for each in session.admin.topic_stats(part).subscriptions:
                if (name := NAME.fullmatch(each.name)) is not None:
                    yield part, name[1], each
