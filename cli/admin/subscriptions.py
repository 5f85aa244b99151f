"""`magnetar subscriptions …`, and the same verbs under `topics` where pulsar-admin has them.

On a partitioned topic each verb is applied to every partition, at its owner.

Also in this file, below its heading: `magnetar topics expire-messages|examine-messages|…` (backlog).
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import click
from click import option

from ...proto.alarms import format_count
from ..common import units
from ..common.lazy import OPERATION_ROW, LazyCommand, LazyGroup
from ..common.output import RAW_OPTION, format_message_id
from ..common.session import NAME_COMPLETIONS, SUBSCRIPTION_OPTION, CommandSession, confirm_deletion, session_command
from ..common.units import parse_duration, parse_message_id
from .policies import PROPERTIES_OPTION
from .topics import full_name

if TYPE_CHECKING:
    from ...client.model.message_id import MessageId
    from ...proto.statistics import SubscriptionStats

subscriptions = LazyGroup(
    "subscriptions",
    {
        "list": OPERATION_ROW,
        "create": LazyCommand(".admin.subscriptions", "create", "Make a subscription."),
        "stats": LazyCommand(
            ".admin.subscriptions", "stats", "Backlog, holes, consumers, and why the next message is not delivered."
        ),
        "peek": LazyCommand(".admin.subscriptions", "peek", "Show the next messages without taking them."),
        "skip": LazyCommand(".admin.subscriptions", "skip", "Acknowledge the next messages unseen."),
        "clear-backlog": LazyCommand(".admin.subscriptions", "clear", "Acknowledge everything unseen."),
        "reset": LazyCommand(".admin.subscriptions", "reset", "Move it to a message or a time."),
        "properties": LazyCommand(".admin.subscriptions", "properties", "Its properties."),
        "filter": LazyCommand(".admin.subscriptions", "filter_", "Its filter: set, show, try."),
        "set-properties": LazyCommand(
            ".admin.subscriptions", "set_properties", "Give it these properties and no others."
        ),
        "delete": OPERATION_ROW,
    },
    {"seek": "reset", "reset-cursor": "reset", "peek-messages": "peek", "unsubscribe": "delete"},
    with_rows=True,
    help="Subscriptions: where the readers of a topic stand.\n\nExample: magnetar subscriptions list orders",
)


filter_ = LazyGroup(
    "subscriptions filter", {},
    help="Filters: which messages of a topic a subscription wants.\n\n"
    "Example: magnetar subscriptions filter show orders -s billing",
    with_rows=True,
)  # fmt: skip


def _done(session: CommandSession, text: str, topic: str, subscription: str) -> None:
    session.out.print_result_text(text, topic=full_name(topic), subscription=subscription)


@session_command(
    SUBSCRIPTION_OPTION,
    option("-m", "--messageId", "position", default="latest", show_default=True, help="earliest, latest, L:E."),
    option("--filter", "wanted", default="", help="Which messages it wants, by their properties: \"region = 'eu'\"."),
    PROPERTIES_OPTION,
)
def create(
    session: CommandSession, topic: str, subscription: str, position: str, wanted: str, pairs: tuple[str, ...]
) -> None:
    """Create a subscription before its first consumer connects.

    Example: magnetar subscriptions create orders -s billing -m earliest
    """
    place, given = parse_message_id(position), units.parse_properties(pairs)
    if wanted:
        given["filter"] = wanted
    for part in session.admin.parts(topic):
        session.admin.create_subscription(part, subscription, place, given)
    _done(session, f"subscription {subscription} of {full_name(topic)} created", topic, subscription)


@session_command(SUBSCRIPTION_OPTION, name="get-subscription-properties")
def properties(session: CommandSession, topic: str, subscription: str) -> None:
    """Show the properties of a subscription, for each partition.

    Example: magnetar topics get-subscription-properties orders -s billing
    """
    rows = [
        {"topic": part, "property": key, "value": value}
        for part in session.admin.parts(topic)
        for key, value in sorted(session.admin.subscription_properties(part, subscription).items())
    ]
    session.out.print_rows(rows, ("topic", "property", "value"), empty=f"{subscription} has no properties")


@session_command(
    SUBSCRIPTION_OPTION,
    PROPERTIES_OPTION,
    option("-c", "--clear", is_flag=True, help="None at all."),
    name="update-subscription-properties",
)
def set_properties(session: CommandSession, topic: str, subscription: str, pairs: tuple[str, ...], clear: bool) -> None:
    """Replace all properties of a subscription. Some properties set the dead-letter policy of this subscription:
    dead-letter.max-redeliver-count, dead-letter.topic, dead-letter.backoff-s.

    Example: magnetar topics update-subscription-properties orders -s billing -p dead-letter.max-redeliver-count=5
    """
    if clear == bool(pairs):
        raise click.UsageError("either -p KEY=VALUE or --clear")
    given = units.parse_properties(pairs)
    for part in session.admin.parts(topic):
        session.admin.set_subscription_properties(part, subscription, given)
    said = ", ".join(f"{key}={value}" for key, value in given.items()) or "no properties"
    _done(session, f"subscription {subscription} of {full_name(topic)} has {said}", topic, subscription)


@session_command(
    option(
        "-s", "--subscription", default=None, help="Only this one.", shell_complete=NAME_COMPLETIONS["subscription"]
    ),
    watched=True,
)
def stats(session: CommandSession, topic: str, subscription: str | None) -> None:
    """Show the backlog, the holes (acknowledged ranges after the mark-delete position) and the consumers of a
    subscription, and why its next message is not delivered. With `-o wide` also each consumer: its role, its address,
    since when it is connected, and when it acknowledged last.

    Example: magnetar subscriptions stats orders -s billing -o wide
    """
    from ...proto.errors import SubscriptionNotFound
    from . import stats as tables

    found = tables.merge_subscriptions(tables.ask_partition_stats(session, full_name(topic)))
    if subscription is not None:
        if subscription not in found:
            raise SubscriptionNotFound(f"{full_name(topic)} has no subscription {subscription!r}")
        found = {subscription: found[subscription]}
    if session.out.is_structured:
        session.out.print_document(found if subscription is None else found[subscription])
        return
    session.out.print_rows(tables.make_subscription_rows(found), tables.SUBSCRIPTION_COLUMNS, empty="no subscriptions")
    if session.out.kind == "wide" and (rows := tables.make_consumer_rows(found)):
        print()
        session.out.print_rows(rows, tables.CONSUMER_COLUMNS)


@session_command(
    SUBSCRIPTION_OPTION,
    option("-n", "--count", type=click.IntRange(1, 1000), default=1, show_default=True, help="Of each partition."),
    RAW_OPTION, watched=True,
)  # fmt: skip
def peek(session: CommandSession, topic: str, subscription: str, count: int, raw: bool) -> None:
    """Show the next messages of a subscription without consuming them.

    Example: magnetar topics peek-messages orders -s billing -n 5
    """
    from ..common.output import make_printed_stored_message, print_consumed_message

    for part in session.admin.parts(topic):
        for message in session.admin.peek_messages(part, subscription, count):
            print_consumed_message(make_printed_stored_message(message), session.out, raw=raw)


@session_command(
    SUBSCRIPTION_OPTION,
    option("-n", "--count", type=click.IntRange(1), default=None, help="Of each partition."),
    option("-a", "--all", "everything", is_flag=True, help="All there are."),
)
def skip(
    session: CommandSession, topic: str, subscription: str, count: int | None, everything: bool, yes: bool
) -> None:
    """Acknowledge the next messages of a subscription without delivering them.

    Example: magnetar topics skip orders -s billing -n 10
    """
    if everything == (count is not None):
        raise click.UsageError("either -n COUNT or --all")
    _skip(session, topic, subscription, -1 if count is None else count, yes)


@session_command(SUBSCRIPTION_OPTION, name="clear-backlog")
def clear(session: CommandSession, topic: str, subscription: str, yes: bool) -> None:
    """Acknowledge all messages of a subscription without delivering them.

    Example: magnetar topics clear-backlog orders -s billing
    """
    _skip(session, topic, subscription, -1, yes)


def _skip(session: CommandSession, topic: str, subscription: str, count: int, yes: bool) -> None:
    which = "all messages" if count < 0 else f"the next {format_count(count, 'message')}"
    question = f"Acknowledge {which} of subscription {subscription} of {full_name(topic)}"
    confirm_deletion(question, yes, partial(_count_backlog, session, topic, subscription))
    for part in session.admin.parts(topic):
        session.admin.skip_messages(part, subscription, count)
    what = "the backlog" if count < 0 else f"{count} messages"
    _done(session, f"{what} of {subscription} skipped", topic, subscription)


def _count_backlog(session: CommandSession, topic: str, subscription: str = "") -> str:
    """Returns what a question says about the backlog of a subscription, or of all durable subscriptions: how many
    messages it has, in all partitions. Empty if the caller may not know."""
    from ...proto.errors import Unauthorized

    try:
        stats = [session.admin.topic_stats(part) for part in session.admin.parts(topic)]
    except Unauthorized:
        return ""
    found = [each for reply in stats for each in reply.subscriptions if each.durable or subscription]
    if subscription:
        found = [each for each in found if each.name == subscription]
    return f" (the backlog has {format_count(sum(each.backlog for each in found), 'message')})"


class ResetPreview(NamedTuple):
    """What a reset of a subscription would do in one partition. `again` and `passed_over` are None if they are not
    known."""

    topic: str
    message_id: str  # delivered first; "earliest" and "latest" are the ends of the topic
    again: int | None  # messages that are acknowledged and would be delivered again
    passed_over: int | None  # messages that are not acknowledged and would not be delivered
    exact: bool  # False: the two numbers are maxima, because single messages after mark-delete are acknowledged


def _preview_reset(session: CommandSession, part: str, name: str, to: MessageId | int, exclude: bool) -> ResetPreview:
    """Asks what a reset of the subscription `name` would do in one partition; changes nothing. `to`: a message id, or
    ms since the epoch. Raises SubscriptionNotFound."""
    from ...client.model.message_id import MessageId
    from ...proto.errors import SubscriptionNotFound

    admin = session.admin
    stats = admin.topic_stats(part)
    found = next((each for each in stats.subscriptions if each.name == name), None)
    if found is None:
        raise SubscriptionNotFound(f"{part} has no subscription {name!r}")
    if isinstance(to, int):
        place = format_message_id(admin.message_id_by_time(part, to))
    else:
        place = {MessageId.earliest: "earliest", MessageId.latest: "latest"}.get(to, format_message_id(to))
        if place not in ("earliest", "latest"):
            text = f"after {place}" if exclude else place
            return ResetPreview(part, text, None, 0 if _is_all_delivered(found, to, exclude) else None, False)
    # it exists, so that this question does not make it
    offsets = admin.offsets(part, publish_times_ms=(to,) if isinstance(to, int) else (), subscription=name)
    end, begin = stats.end_index, max(offsets.subscription_index, offsets.earliest_index)
    asked = {"earliest": offsets.earliest_index, "latest": end}.get(place)
    target = min(end, offsets.by_time[0] if asked is None else asked)
    passed = min(max(0, target - begin), found.backlog)
    again = max(0, end - target - (found.backlog - passed))
    exact = target <= begin or target == end or found.backlog == end - begin
    return ResetPreview(part, place, again, passed, exact)


def _is_all_delivered(found: SubscriptionStats, to: MessageId, exclude: bool) -> bool:
    """Returns whether a reset to the message `to` certainly passes over no message that is not acknowledged."""
    begins_entry = not exclude and to.batch_index() <= 0
    mark, position = found.mark_delete, to.position()
    is_next = begins_entry and position == (mark.ledger_id, mark.entry_id + 1)
    return not found.backlog or position <= mark or is_next


@session_command(
    SUBSCRIPTION_OPTION,
    option("-t", "--time", "moment", default=None, help="A time ago (10m, 2h), an ISO time, or milliseconds."),
    option("-m", "--messageId", "position", default=None, help="earliest, latest, L:E."),
    option("-e", "--exclude-reset-position", "exclude", is_flag=True, help="Begin after that message."),
    option("--dry-run", is_flag=True, help="Change nothing: show what would be delivered again, and passed over."),
)
def reset(
    session: CommandSession,
    topic: str,
    subscription: str,
    moment: str | None,
    position: str | None,
    exclude: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Move a subscription to a time or a message. All messages after this position are delivered, also those that were
    delivered before. Asks first if messages before this position are not acknowledged: they are not delivered any more.

    \b
    Examples:
      magnetar topics reset-cursor orders -s billing -t 2h --dry-run
      magnetar topics reset-cursor orders -s billing -t 2h
    """
    from ...runtime.clock import SystemClock

    if (moment is None) == (position is None):
        raise click.UsageError("either -t TIME or -m POSITION")
    to = (
        units.parse_moment_ms(moment, SystemClock().wall_ms())
        if moment is not None
        else parse_message_id(position or "")
    )
    parts = session.admin.parts(topic)
    if dry_run:
        rows = [_preview_reset(session, part, subscription, to, exclude)._asdict() for part in parts]
        session.out.print_rows(rows, ResetPreview._fields)
        return
    target = moment or position or ""
    if not yes and target != "earliest":
        found = [_preview_reset(session, part, subscription, to, exclude) for part in parts]
        if over := _describe_passed_over(found):
            confirm_deletion(f"Move subscription {subscription} of {full_name(topic)} to {target}, past {over}", yes)
    for part in parts:
        session.admin.reset_subscription(part, subscription, to, exclusive=exclude)
    _done(session, f"subscription {subscription} moved to {target}", topic, subscription)


def _describe_passed_over(found: list[ResetPreview]) -> str:
    """Returns which messages a reset passes over, as the end of a question; empty if it passes over none."""
    unknown = any(each.passed_over is None for each in found)
    number = sum(each.passed_over or 0 for each in found)
    if unknown:
        return "messages that are not acknowledged"
    if not number:
        return ""
    most = "" if all(each.exact or not each.passed_over for each in found) else "at most "
    return f"{most}{format_count(number, 'message')} not acknowledged"


# ------------------------------------------------------------------------------------------------------- backlog
# `magnetar topics expire-messages|examine-messages|…`: what a topic contains, examined and cleared by hand.
#
# Names and options are pulsar-admin's. On a partitioned topic each verb is applied to every partition, at its owner.


OLDER_OPTION = option(
    "-t", "--expireTime", "--time", "older", default=None, help="Older than 90s, 10m, 2h; or seconds."
)


def _expire(session: CommandSession, topic: str, name: str, older: str | None, position: str | None, yes: bool) -> None:
    if (older is None) == (position is None):
        raise click.UsageError("either -t TIME or -m POSITION")
    limit = parse_duration(older, 1) or 0 if older is not None else parse_message_id(position or "")
    if isinstance(limit, int) and limit < 1:
        raise click.UsageError("a time is 1 s or more; 'magnetar topics clear-backlog' acknowledges everything")
    whose = f"subscription {name}" if name else "every subscription"
    which = f"older than {older}" if older is not None else f"up to {position}"
    question = f"Acknowledge the messages {which} of {whose} of {full_name(topic)}"
    confirm_deletion(question, yes, partial(_count_backlog, session, topic, name))
    admin = session.admin
    entries = sum(admin.expire_messages(part, name, limit) for part in admin.parts(topic))
    whose = name or "all subscriptions"
    session.out.print_result_text(
        f"{entries} entries of {whose} expired", topic=full_name(topic), subscription=name, entries=entries
    )


@session_command(
    SUBSCRIPTION_OPTION,
    OLDER_OPTION,
    option("-m", "-p", "--position", "position", default=None, help="… or everything up to L:E, earliest, latest."),
    name="expire-messages",
)
def expire(
    session: CommandSession, topic: str, subscription: str, older: str | None, position: str | None, yes: bool
) -> None:
    """Acknowledge all messages of a subscription that are older than a time, or all messages up to a given one, without
    delivering them.

    Example: magnetar topics expire-messages orders -s billing -t 2h
    """
    _expire(session, topic, subscription, older, position, yes)


@session_command(OLDER_OPTION, name="expire-messages-all-subscriptions")
def expire_all(session: CommandSession, topic: str, older: str | None, yes: bool) -> None:
    """Acknowledge the messages that are older than a time, for every subscription of a topic, without delivering them.

    Example: magnetar topics expire-messages-all-subscriptions orders -t 3d
    """
    _expire(session, topic, "", older, None, yes)


@session_command(
    option(
        "-i", "--initialPosition", "end", type=click.Choice(["earliest", "latest"]), default="latest", show_default=True
    ),
    option("-m", "--messagePosition", "number", type=click.IntRange(1), default=1, show_default=True),
    RAW_OPTION, name="examine-messages",
)  # fmt: skip
def examine(session: CommandSession, topic: str, end: str, number: int, raw: bool) -> None:
    """Show the n-th message of a topic (of each partition), counted from the oldest or from the newest.

    Example: magnetar topics examine-messages orders -i latest -m 1
    """
    from ...proto.errors import NotFound
    from ..common.output import make_printed_stored_message, print_consumed_message

    parts, failed = session.admin.parts(topic), list[NotFound]()
    for part in parts:
        try:
            print_consumed_message(
                make_printed_stored_message(session.admin.nth_message(part, number, from_latest=end == "latest")),
                session.out, raw=raw,
            )  # fmt: skip
        except NotFound as error:  # it has not so many
            failed.append(error)
    if len(failed) == len(parts):
        raise failed[0]


@session_command(
    option("-l", "--ledgerId", "ledger", type=int, required=True),
    option("-e", "--entryId", "entry", type=int, required=True),
    RAW_OPTION, name="get-message-by-id",
)  # fmt: skip
def get_message(session: CommandSession, topic: str, ledger: int, entry: int, raw: bool) -> None:
    """Show the messages of one stored entry, by its ledger and entry id. For a partitioned topic, give the name of the
    partition.

    Example: magnetar topics get-message-by-id orders-partition-0 -l 17 -e 3
    """
    from ..common.output import make_printed_stored_message, print_consumed_message

    for message in session.admin.messages(topic, ledger, entry):
        print_consumed_message(make_printed_stored_message(message), session.out, raw=raw)


@session_command(
    option("-d", "--datetime", "moment", required=True, help="An ISO time, a time ago (10m, 2h), or milliseconds.")
)
def get_message_id(session: CommandSession, topic: str, moment: str) -> None:
    """Show the id of the first message that arrived at a time or later. If there is no such message, show the id of the
    next message that will arrive.

    Example: magnetar topics get-message-id orders -d 2h
    """
    from ...runtime.clock import SystemClock
    from ..common.units import parse_moment_ms

    at = parse_moment_ms(moment, SystemClock().wall_ms())
    rows = []
    for part in session.admin.parts(topic):
        found = session.admin.message_id_by_time(part, at)
        rows.append({"topic": part, "messageId": f"{found.position()}:{found.partition()}"})
    session.out.print_rows(rows, ("topic", "messageId"))


@session_command(
    option("-m", "--messageId", "position", default="earliest", show_default=True, help="earliest, latest, L:E."),
    name="get-backlog-size",
    watched=True,
)
def backlog_size(session: CommandSession, topic: str, position: str) -> None:
    """Show about how many bytes a topic (each of its partitions) has after a message.

    Example: magnetar topics get-backlog-size orders -m 17:3
    """
    admin, place = session.admin, parse_message_id(position)
    rows = [{"topic": part, "bytes": admin.backlog_size(part, place)} for part in admin.parts(topic)]
    session.out.print_rows(rows, ("topic", "bytes"))


@session_command(watched=True)
def last_message_id(session: CommandSession, topic: str) -> None:
    """Show the id of the newest message of a topic (of each partition); -1:-1 if the topic has no message.

    Example: magnetar topics last-message-id orders
    """
    admin = session.admin
    rows = [
        {"topic": part, "lastMessageId": format_message_id(admin.last_message_id(part))} for part in admin.parts(topic)
    ]
    session.out.print_rows(rows, ("topic", "lastMessageId"))


TXN_COLUMNS = ("topic", "txn", "first", "entries", "bytes")


@session_command(
    option("--ledger", type=click.IntRange(min=0), help="This ledger alone.  [default: all of the topic]"),
    option(
        "--force", is_flag=True,
        help="Also what a replica that does not answer may have: when it comes back, its messages stay lost.",
    ),
    option(
        "--forgotten", type=click.Choice(["commit", "abort"]),
        help="Skip nothing: show the messages of transactions whose outcomes are lost, or hide them for ever.",
    ),
)  # fmt: skip
def skip_lost(
    session: CommandSession, topic: str, ledger: int | None, force: bool, forgotten: str | None, yes: bool
) -> None:
    """Skip entries of which every copy is lost, for all consumers and readers of a topic.

    If the last ledger of the topic is lost, the topic opens again and continues in a new ledger. Only entries that are
    certainly lost are skipped: a bookie that is gone for good must be forgotten before (magnetar bookies forget). This
    cannot be undone.

    Also list the transactions whose outcomes are lost: the topic cannot read the outcomes that it stored, and the
    coordinators have forgotten them. They hold back all later messages until --forgotten decides about all of them.

    Example: magnetar topics skip-lost orders --yes
    """
    if forgotten and (force or ledger is not None):
        raise click.UsageError("--forgotten skips nothing: it needs neither --ledger nor --force")
    what = f"Pass over what {full_name(topic)} lost, for ever" + (", and what it may not have lost" if force else "")
    if forgotten:
        ended = "committed" if forgotten == "commit" else "aborted"
        what = f"Count all transactions of {full_name(topic)} whose outcomes are lost as {ended}, for ever"
    confirm_deletion(what, yes)
    admin, rows, missed, undecided = session.admin, [], [], []
    for part in admin.parts(topic):
        found = admin.skip_lost(part, ledger_id=ledger, force=force, forgotten=forgotten or "")
        undecided += [
            {"topic": part, "txn": str(each.txn), "first": str(each.first), "entries": each.entries,
             "bytes": each.bytes}
            for each in found.forgotten
        ]  # fmt: skip
        rows += [{"topic": part, **asdict(each)} for each in found.ranges]
        missed += [{"topic": part, **asdict(each)} for each in found.subscriptions] if found.ranges else []
    if session.out.is_structured:
        session.out.print_document({"ranges": rows, "subscriptions": missed, "forgotten": undecided})
        return
    if forgotten:
        session.out.print_rows(undecided, TXN_COLUMNS, empty="no outcome is lost")
        return
    columns = ("topic", "ledger_id", "first_entry", "last_entry", "first_index", "end_index", "forced")
    session.out.print_rows(rows, columns, empty="nothing is lost")
    if missed:
        session.out.print_rows(missed, ("topic", "name", "messages"))
    if undecided:
        session.out.print_rows(undecided, TXN_COLUMNS)


@session_command(
    option("--delete", "remove", is_flag=True, help="Fence and delete them now; brokers do it every hour."),
    option("--unexplained", is_flag=True, help="With --delete: also those whose owner has no record."),
)
def orphans(session: CommandSession, remove: bool, unexplained: bool, yes: bool) -> None:
    """List the ledgers to which no record refers, and the deleted ledgers that a topic still lists. Asks before it
    deletes ledgers whose owner has no record, because they may be all that is left of a topic.

    Example: magnetar ledgers orphans
    """
    if remove and unexplained:
        confirm_deletion("Delete also the ledgers whose owner has no record, and their messages", yes)
    found = session.admin.find_orphans(remove=remove, unexplained=unexplained)
    rows = [
        {
            "ledger": each.ledger_id,
            "topic": each.topic,
            "subscription": each.subscription or None,
            "state": "deleted" if each.deleted else "unexplained" if each.unexplained else state,
        }
        for state, ledgers in (("orphan", found.orphans), ("missing", found.missing))
        for each in ledgers
    ]
    session.out.print_rows(
        rows, ("ledger", "topic", "subscription", "state"), empty="no orphans, and nothing is missing"
    )
