"""`magnetar topics …`: pulsar-admin's verbs and spellings. A name may be short: orders is public/default/orders."""

from __future__ import annotations

import time
from typing import Any

import click
from click import option

from ...proto.policies import TOPIC_LEVEL
from ..common.lazy import OPERATION_ROW, LazyCommand, LazyGroup
from ..common.session import CommandSession, confirm_deletion, session_command
from .namespaces import TOPIC_PERMISSION_COMMANDS
from .policies import COMMAND_ALIASES, make_policy_commands
from .policies import TOPIC_COMMANDS as PROPERTIES_OF_TOPICS

topics = LazyGroup(
    "topics",
    {
        "list": LazyCommand(".admin.topics", "list_", "Topics of a namespace."),
        "create": LazyCommand(".admin.topics", "create", "Make a topic, with or without partitions."),
        "update": LazyCommand(".admin.topics", "update", "Give a partitioned topic more partitions."),
        "stats": LazyCommand(".admin.topics", "stats", "Messages, storage, producers, subscriptions."),
        "stats-internal": LazyCommand(".admin.topics", "stats_internal", "Ledgers of a topic, and why each stays."),
        "lookup": LazyCommand(".admin.topics", "lookup", "Which broker owns it."),
        "get-partitioned-topic-metadata": LazyCommand(".admin.topics", "metadata", "How many partitions it has."),
        "bundle-range": LazyCommand(".admin.topics", "bundle_range", "The bundle that it is in, and is owned with."),
        "offsets": LazyCommand(".admin.topics", "offsets", "First and next index of each partition."),
        "subscriptions": LazyCommand(".admin.rows", "subscriptions list", "Its subscriptions."),
        "create-subscription": LazyCommand(".admin.subscriptions", "create", "Make a subscription."),
        "get-subscription-properties": LazyCommand(
            ".admin.subscriptions", "properties", "A subscription's properties."
        ),
        "update-subscription-properties": LazyCommand(
            ".admin.subscriptions", "set_properties", "Give it these and no others."
        ),
        "unsubscribe": LazyCommand(".admin.rows", "subscriptions delete", "Delete a subscription."),
        "peek-messages": LazyCommand(".admin.subscriptions", "peek", "Show the next messages without taking them."),
        "skip": LazyCommand(".admin.subscriptions", "skip", "Acknowledge the next messages unseen."),
        "clear-backlog": LazyCommand(".admin.subscriptions", "clear", "Acknowledge everything unseen."),
        "reset-cursor": LazyCommand(".admin.subscriptions", "reset", "Move a subscription back or on."),
        "expire-messages": LazyCommand(".admin.subscriptions", "expire", "Acknowledge what is older than a time."),
        "expire-messages-all-subscriptions": LazyCommand(
            ".admin.subscriptions", "expire_all", "… for every subscription."
        ),
        "examine-messages": LazyCommand(
            ".admin.subscriptions", "examine", "Show the n-th message from the oldest or the newest."
        ),
        "find": LazyCommand(".admin.messages", "find", "Show the messages with a key, a property, a text."),
        "trace": LazyCommand(".admin.messages", "trace", "What has become of a message, in each subscription."),
        "letters": LazyCommand(".admin.messages", "letters", "Count dead letters by what they failed of."),
        "cancel-delayed": LazyCommand(".admin.messages", "cancel_delayed", "Cancel a delayed message."),
        "redrive": LazyCommand(".admin.messages", "redrive", "Send dead letters back to where they came from."),
        "get-message-by-id": LazyCommand(".admin.subscriptions", "get_message", "Show the messages of an entry."),
        "get-message-id": LazyCommand(
            ".admin.subscriptions", "get_message_id", "Id of the first message that arrived at a time."
        ),
        "get-backlog-size": LazyCommand(".admin.subscriptions", "backlog_size", "Bytes after a message."),
        "last-message-id": LazyCommand(".admin.subscriptions", "last_message_id", "Id of the newest message."),
        "analyze-backlog": OPERATION_ROW,
        "truncate": OPERATION_ROW,
        "unload": LazyCommand(".admin.topics", "unload", "Let its broker give it up, or move it to another one."),
        "trim": OPERATION_ROW,
        "compact": OPERATION_ROW,
        "compaction-status": LazyCommand(
            ".admin.topics", "compaction_status", "How far the last compaction is, and what it left."
        ),
        "skip-lost": LazyCommand(".admin.subscriptions", "skip_lost", "Pass over entries that every replica lost."),
        "terminate": LazyCommand(".admin.topics", "terminate", "Seal it: it can be read and not written."),
        "delete": LazyCommand(".admin.topics", "delete", "Delete a topic and its messages."),
        **TOPIC_PERMISSION_COMMANDS,
        **PROPERTIES_OF_TOPICS,
    },
    {
        "list-partitioned-topics": "list",
        "create-partitioned-topic": "create",
        "update-partitioned-topic": "update",
        "delete-partitioned-topic": "delete",
        "partitioned-stats": "stats",
        "partitioned-lookup": "lookup",
        "partitioned-stats-internal": "stats-internal",
        "internal-stats": "stats-internal",
        "info-internal": "stats-internal",
        "partitioned-terminate": "terminate",
        "trim-topic": "trim",
        "peek": "peek-messages",
        "skip-all": "clear-backlog",
        "examine-message": "examine-messages",
        **COMMAND_ALIASES,
    },
    policies=make_policy_commands(TOPIC_LEVEL),
    with_rows=True,
    help="Topics: [persistent://]TENANT/NAMESPACE/NAME, or just NAME.\n\nExample: magnetar topics create orders -p 4",
)
POLL_S = 0.5
COMPACTION_COLUMNS = (
    "topic",
    "state",
    "step",
    "progress",
    "messages",
    "entries",
    "bytes",
    "horizon",
    "dueBytes",
    "error",
)


def full_name(topic: str) -> str:
    """Returns the full name of `topic`, with its domain, tenant and namespace. Raises InvalidName if `topic` is not a
    valid name."""
    from ...proto.names import TopicName

    return TopicName.parse(topic).full


@session_command(option("--partitions", is_flag=True, help="Each partition by its own name."), watched=True)
def list_(session: CommandSession, namespace: str = "public/default", *, partitions: bool) -> None:
    """List the topics of a namespace (default public/default).

    Example: magnetar topics list public/default
    """
    found = session.admin.topics(namespace, partitions=partitions)
    session.out.print_names(found, empty=f"no topics in {namespace}")


@session_command(
    option("-p", "--partitions", type=click.IntRange(0, 10_000), default=0, help="0: not partitioned (default).")
)
def create(session: CommandSession, topic: str, partitions: int) -> None:
    """Create a topic.

    Example: magnetar topics create orders -p 4
    """
    session.admin.create_topic(topic, partitions=partitions)
    suffix = f" with {partitions} partitions" if partitions else ""
    session.out.print_result_text(
        f"topic {full_name(topic)} created{suffix}", topic=full_name(topic), partitions=partitions
    )


@session_command(
    option("-p", "--partitions", type=click.IntRange(1, 10_000), required=True, help="The new number; never fewer.")
)
def update(session: CommandSession, topic: str, partitions: int) -> None:
    """Increase the number of partitions of a topic. Messages of a key may go to another partition from then on.

    Example: magnetar topics update orders -p 8
    """
    session.admin.update_topic(topic, partitions=partitions)
    session.out.print_result_text(
        f"topic {full_name(topic)} has {partitions} partitions", topic=full_name(topic), partitions=partitions
    )


@session_command(
    option("--per-partition", is_flag=True, help="A record for each partition."),
    option(
        "-gpb", "--get-precise-backlog", "precise", is_flag=True, help="Count what is acknowledged message by message."
    ),
    watched=True,
)
def stats(session: CommandSession, topic: str, per_partition: bool, precise: bool) -> None:
    """Show the messages, storage, producers and subscriptions of a topic. The backlog is a number of messages. With
    `-o wide` also each producer and consumer: its role, its address, since when it is connected, and when a consumer
    acknowledged last.

    \b
    Examples:
      magnetar topics stats orders -o wide
      magnetar topics stats orders --get-precise-backlog -o json
    """
    from . import stats as tables

    parts = session.admin.parts(topic) if per_partition else [full_name(topic)]
    records = [tables.get_topic_stats(session, part, precise=precise) for part in parts]
    if session.out.is_structured:
        session.out.print_document(records if per_partition else records[0])
        return
    session.out.print_rows(records, tables.TOPIC_STATS_COLUMNS)
    for record in records:
        if record["subscriptions"]:
            print()
            session.out.print_rows(tables.make_subscription_rows(record["subscriptions"]), tables.SUBSCRIPTION_COLUMNS)
    if session.out.kind == "wide":
        producers = [row for record in records for row in tables.make_producer_rows(record)]
        consumers = [row for record in records for row in tables.make_consumer_rows(record["subscriptions"])]
        for rows, columns in ((producers, tables.PRODUCER_COLUMNS), (consumers, tables.CONSUMER_COLUMNS)):
            if rows:
                print()
                session.out.print_rows(rows, columns)
    if transacted := [tables.transaction_row(record) for record in records if record["transactions"]]:
        print()
        session.out.print_rows(transacted, tables.TRANSACTION_COLUMNS)


@session_command(watched=True)
def stats_internal(session: CommandSession, topic: str) -> None:
    """Show the ledgers of a topic: their state, their bookies, and the reason why each of them is not deleted yet.

    Example: magnetar topics stats-internal orders
    """
    from ...proto.pulsar_json import TOPIC_LOG_FIELDS, pick_fields
    from .stats import LEDGER_COLUMNS

    admin = session.admin
    found = {
        part: pick_fields(TOPIC_LOG_FIELDS, admin.topic_internal_stats(part), " ".join(TOPIC_LOG_FIELDS))
        for part in admin.parts(topic)
    }
    if session.out.is_structured:
        session.out.print_document(found if len(found) > 1 else next(iter(found.values())))
        return
    for part, record in found.items():
        print(f"{part}: {record['state']}, last confirmed {record['lastConfirmedEntry']}")
        session.out.print_rows(record["ledgers"], LEDGER_COLUMNS, empty="no ledgers")


@session_command(watched=True)
def lookup(session: CommandSession, topic: str) -> None:
    """Show which broker owns a topic (each of its partitions).

    Example: magnetar topics lookup orders
    """
    rows = [{"topic": part, "broker": session.admin.owner(part)} for part in session.admin.parts(topic)]
    session.out.print_rows(rows, ("topic", "broker"))


@session_command(name="get-partitioned-topic-metadata", watched=True)
def metadata(session: CommandSession, topic: str) -> None:
    """Show how many partitions a topic has (0: the topic is not partitioned).

    Example: magnetar topics get-partitioned-topic-metadata orders
    """
    session.out.print_record({"topic": full_name(topic), "partitions": session.admin.partitions(topic)})


@session_command(
    option("--to", "destination", default="", metavar="BROKER", help="The broker that gets it: its name or address."),
)
def unload(session: CommandSession, topic: str, destination: str) -> None:
    """Let the owner close a topic; its next user makes a broker open it. With --to that broker gets it, with all other
    topics of its bundle, and clients are told so: no request fails.

    \b
    Examples:
      magnetar topics unload orders
      magnetar topics unload orders --to broker-2
    """
    if not destination:
        session.admin.unload_topic(topic)
        session.out.print_result_text(f"topic {topic} unloaded", topic=topic)
        return
    from ...broker.cluster.bundles_core import find_topic_bundle_name
    from ...proto.names import TopicName

    namespace = str(TopicName.parse(topic).namespace_name)
    count = session.admin.namespace(namespace).bundles
    parts = session.admin.parts(topic)
    bundles = sorted({find_topic_bundle_name(TopicName.parse(part), count) for part in parts})
    for bundle in bundles:
        session.admin.unload_namespace(namespace, bundle, destination=destination)
    text = f"topic {topic} moved to {destination}, with its bundle{'s' if len(bundles) > 1 else ''}"
    session.out.print_result_text(f"{text} {', '.join(bundles)}", topic=topic, bundles=bundles)


@session_command()
def bundle_range(session: CommandSession, topic: str) -> None:
    """Show to which bundle (hash range) of its namespace a topic, or each of its partitions, belongs.

    Example: magnetar topics bundle-range orders
    """
    from ...broker.cluster.bundles_core import find_topic_bundle_name
    from ...proto.names import TopicName

    bundles = session.admin.namespace(str(TopicName.parse(topic).namespace_name)).bundles
    parts = session.admin.parts(topic)
    rows = [{"topic": part, "bundle": find_topic_bundle_name(TopicName.parse(part), bundles)} for part in parts]
    session.out.print_rows(rows, ("topic", "bundle"))


@session_command(watched=True)
def offsets(session: CommandSession, topic: str) -> None:
    """Show the index of the oldest stored message and the index that the next message will get, for each partition.

    Example: magnetar topics offsets orders
    """
    rows = []
    for part in session.admin.parts(topic):
        found = session.admin.offsets(part)
        rows.append({"topic": part, "earliest": found.earliest_index, "end": found.end_index, "bytes": found.bytes})
    session.out.print_rows(rows, ("topic", "earliest", "end", "bytes"))


@session_command()
def terminate(session: CommandSession, topic: str, yes: bool) -> None:
    """Seal a topic for good: producers are refused, and consumers can read up to the topic's end.

    Example: magnetar topics terminate orders
    """
    confirm_deletion(f"Seal {full_name(topic)} for ever", yes)
    last = {part: str(session.admin.terminate_topic(part).position()) for part in session.admin.parts(topic)}
    session.out.print_result_text(
        f"topic {full_name(topic)} terminated at {', '.join(last.values())}", topic=full_name(topic), last=last
    )


@session_command(
    option("-f", "--force", is_flag=True, help="Although producers, subscriptions or open transactions are there.")
)
def delete(session: CommandSession, topic: str, force: bool, yes: bool) -> None:
    """Delete a topic with all its partitions and messages.

    With --force, the open transactions in the topic are aborted first. A prepared transaction must be ended before.

    Example: magnetar topics delete orders -f
    """
    confirm_deletion(f"Delete {full_name(topic)} and all its messages", yes)
    session.admin.delete_topic(topic, force=force)
    session.out.print_result_text(f"topic {full_name(topic)} deleted", topic=full_name(topic))


@session_command(option("-w", "--wait-complete", is_flag=True, help="Wait until none is running."), watched=True)
def compaction_status(session: CommandSession, topic: str, wait_complete: bool) -> None:
    """Show the last compaction of a topic (of each partition), and up to where the topic is compacted.

    Example: magnetar topics compaction-status prices -w
    """
    rows = _compactions(session, topic)
    while wait_complete and any(row["state"] == "RUNNING" for row in rows):
        time.sleep(POLL_S)
        rows = _compactions(session, topic)
    session.out.print_rows(rows, COMPACTION_COLUMNS)


def _compactions(session: CommandSession, topic: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for part in session.admin.parts(topic):
        found = session.admin.compaction_status(part)
        share = f"{min(100, 100 * found.looked_at // found.to_look_at)} %" if found.to_look_at else ""
        rows.append(
            {
                "topic": part, "state": found.state, "step": found.step, "progress": share, "messages": found.messages,
                "entries": found.entries, "bytes": found.bytes, "dueBytes": found.due_bytes, "error": found.error,
                "horizon": str(found.horizon) if found.ledger_id >= 0 else "",
            }
        )  # fmt: skip
    return rows
