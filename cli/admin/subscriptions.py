"""`magnetar subscriptions …`, and the same verbs under `topics` where pulsar-admin has them.

On a partitioned topic each verb is applied to every partition, at its owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..common.lazy import Lazy, LazyGroup
from ..common.session import YES, Session, confirm, connected
from .topics import full

if TYPE_CHECKING:
    from google.protobuf.message import Message

subscriptions = LazyGroup(
    "subscriptions",
    {
        "list": Lazy(".admin.subscriptions", "list_", "Subscriptions of a topic."),
        "create": Lazy(".admin.subscriptions", "create", "Make a subscription."),
        "stats": Lazy(
            ".admin.subscriptions", "stats", "Backlog, holes, consumers, and why nobody gets the next message."
        ),
        "peek": Lazy(".admin.subscriptions", "peek", "Show the next messages without taking them."),
        "skip": Lazy(".admin.subscriptions", "skip", "Acknowledge the next messages unseen."),
        "clear-backlog": Lazy(".admin.subscriptions", "clear", "Acknowledge everything unseen."),
        "reset": Lazy(".admin.subscriptions", "reset", "Move it to a message or a time."),
        "properties": Lazy(".admin.subscriptions", "properties", "Its properties."),
        "set-properties": Lazy(".admin.subscriptions", "set_properties", "Give it these properties and no others."),
        "delete": Lazy(".admin.subscriptions", "delete", "Delete a subscription."),
    },
    {"seek": "reset", "reset-cursor": "reset", "peek-messages": "peek", "unsubscribe": "delete"},
    help="Subscriptions: where the readers of a topic stand.\n\nExample: magnetar subscriptions list orders",
)

PROPERTIES = click.option("-p", "--property", "--properties", "pairs", multiple=True, help="KEY=VALUE, several too.")
SUBSCRIPTION = click.option("-s", "--subscription", required=True, help="Name of the subscription.")


def _each(session: Session, topic: str, method: str, request: type[Message], **fields: Any) -> list[Any]:
    """The same request to the owner of each partition."""
    parts = session.parts(full(topic))
    return [session.topic_call(part, method, request(topic=part, **fields)) for part in parts]


def _done(session: Session, text: str, topic: str, subscription: str) -> None:
    session.out.done(text, topic=full(topic), subscription=subscription)


@click.command("list")
@click.argument("topic")
@connected
def list_(session: Session, topic: str) -> None:
    """Subscriptions of a topic.

    Example: magnetar subscriptions list orders
    """
    from ...proto import wire_pb2 as wire

    names: set[str] = set()
    for part in session.parts(full(topic)):
        names.update(session.topic_call(part, "ListSubscriptions", wire.Name(name=part)).names)
    session.out.names(sorted(names), empty=f"no subscriptions of {full(topic)}")


@click.command()
@click.argument("topic")
@SUBSCRIPTION
@click.option("-m", "--messageId", "position", default="latest", show_default=True, help="earliest, latest, L:E.")
@PROPERTIES
@connected
def create(session: Session, topic: str, subscription: str, position: str, pairs: tuple[str, ...]) -> None:
    """Make a subscription, before any consumer comes.

    Example: magnetar subscriptions create orders -s billing -m earliest
    """
    from ...proto import wire_pb2 as wire
    from ..common.units import message_id, properties

    given = {"position": message_id(position), "properties": properties(pairs)}
    _each(session, topic, "CreateSubscription", wire.SubscriptionSpec, name=subscription, **given)
    session.out.done(
        f"subscription {subscription} of {full(topic)} created", topic=full(topic), subscription=subscription
    )


@click.command("get-subscription-properties")
@click.argument("topic")
@SUBSCRIPTION
@connected
def properties(session: Session, topic: str, subscription: str) -> None:
    """The properties of a subscription, each partition's.

    Example: magnetar topics get-subscription-properties orders -s billing
    """
    from ...proto import wire_pb2 as wire

    found = _each(session, topic, "GetSubscriptionProperties", wire.DeleteSubscriptionRequest, name=subscription)
    rows = [
        {"topic": each.topic, "property": key, "value": value}
        for each in found
        for key, value in sorted(each.properties.items())
    ]
    session.out.rows(rows, ("topic", "property", "value"), empty=f"{subscription} has no properties")


@click.command("update-subscription-properties")
@click.argument("topic")
@SUBSCRIPTION
@PROPERTIES
@click.option("-c", "--clear", is_flag=True, help="None at all.")
@connected
def set_properties(session: Session, topic: str, subscription: str, pairs: tuple[str, ...], clear: bool) -> None:
    """Give a subscription these properties and no others. Some lay down its own dead-letter policy:
    dead-letter.max-redeliver-count, dead-letter.topic, dead-letter.backoff-s.

    Example: magnetar topics update-subscription-properties orders -s billing -p dead-letter.max-redeliver-count=5
    """
    from ...proto import wire_pb2 as wire
    from ..common.units import properties

    if clear == bool(pairs):
        raise click.UsageError("either -p KEY=VALUE or --clear")
    given = properties(pairs)
    _each(session, topic, "SetSubscriptionProperties", wire.SubscriptionSpec, name=subscription, properties=given)
    said = ", ".join(f"{key}={value}" for key, value in given.items()) or "no properties"
    _done(session, f"subscription {subscription} of {full(topic)} has {said}", topic, subscription)


@click.command()
@click.argument("topic")
@click.option("-s", "--subscription", default=None, help="Only this one.")
@connected
def stats(session: Session, topic: str, subscription: str | None) -> None:
    """Backlog, holes, consumers, and why nobody gets the next message.

    Example: magnetar subscriptions stats orders -s billing
    """
    from ..common.exits import NOT_FOUND, Failure
    from . import stats as tables

    found = tables.subscriptions(tables.replies(session, full(topic)))
    if subscription is not None:
        if subscription not in found:
            raise Failure(f"{full(topic)} has no subscription {subscription!r}", NOT_FOUND)
        found = {subscription: found[subscription]}
    if session.out.json:
        session.out.document(found if subscription is None else found[subscription])
        return
    session.out.rows(tables.subscription_rows(found), tables.SUBSCRIPTION_COLUMNS, empty="no subscriptions")


@click.command()
@click.argument("topic")
@SUBSCRIPTION
@click.option("-n", "--count", type=click.IntRange(1, 1000), default=1, show_default=True, help="Of each partition.")
@connected
def peek(session: Session, topic: str, subscription: str, count: int) -> None:
    """Show the next messages of a subscription; they stay where they are.

    Example: magnetar topics peek-messages orders -s billing -n 5
    """
    from ...proto import wire_pb2 as wire
    from ..messages.messages import decode_deliveries, show

    for part in session.parts(full(topic)):
        request = wire.PeekMessagesRequest(topic=part, name=subscription, messages=count)
        found = session.topic_call(part, "PeekMessages", request)
        for message in decode_deliveries(found.entries, part)[:count]:
            show(message, session.out)


@click.command()
@click.argument("topic")
@SUBSCRIPTION
@click.option("-n", "--count", type=click.IntRange(1), default=None, help="Of each partition.")
@click.option("-a", "--all", "everything", is_flag=True, help="All there are.")
@connected
def skip(session: Session, topic: str, subscription: str, count: int | None, everything: bool) -> None:
    """Acknowledge the next messages of a subscription unseen.

    Example: magnetar topics skip orders -s billing -n 10
    """
    if everything == (count is not None):
        raise click.UsageError("either -n COUNT or --all")
    _skip(session, topic, subscription, -1 if count is None else count)


@click.command("clear-backlog")
@click.argument("topic")
@SUBSCRIPTION
@connected
def clear(session: Session, topic: str, subscription: str) -> None:
    """Acknowledge everything of a subscription unseen.

    Example: magnetar topics clear-backlog orders -s billing
    """
    _skip(session, topic, subscription, -1)


def _skip(session: Session, topic: str, subscription: str, count: int) -> None:
    from ...proto import wire_pb2 as wire

    _each(session, topic, "SkipMessages", wire.SkipMessagesRequest, name=subscription, messages=count)
    what = "the backlog" if count < 0 else f"{count} messages"
    _done(session, f"{what} of {subscription} skipped", topic, subscription)


@click.command()
@click.argument("topic")
@SUBSCRIPTION
@click.option("-t", "--time", "moment", default=None, help="A time ago (10m, 2h), an ISO time, or milliseconds.")
@click.option("-m", "--messageId", "position", default=None, help="earliest, latest, L:E.")
@click.option("-e", "--exclude-reset-position", "exclude", is_flag=True, help="Begin behind that message.")
@connected
def reset(
    session: Session, topic: str, subscription: str, moment: str | None, position: str | None, exclude: bool
) -> None:
    """Move a subscription to a time or a message: what comes after is delivered (again).

    Example: magnetar topics reset-cursor orders -s billing -t 2h
    """
    from ...proto import wire_pb2 as wire
    from ...runtime.clock import SystemClock
    from ..common.units import message_id, moment_ms

    if (moment is None) == (position is None):
        raise click.UsageError("either -t TIME or -m POSITION")
    if moment is not None:
        to: dict[str, Any] = {"publish_time_ms": moment_ms(moment, SystemClock().wall_ms())}
    else:
        to = {"message_id": message_id(position or ""), "exclude": exclude}
    _each(session, topic, "ResetSubscription", wire.ResetSubscriptionRequest, name=subscription, **to)
    session.out.done(
        f"subscription {subscription} moved to {moment or position}", topic=full(topic), subscription=subscription
    )


@click.command()
@click.argument("topic")
@SUBSCRIPTION
@click.option("-f", "--force", is_flag=True, help="Although consumers are connected.")
@YES
@connected
def delete(session: Session, topic: str, subscription: str, force: bool, yes: bool) -> None:
    """Delete a subscription: nothing is kept for it any more.

    Example: magnetar subscriptions delete orders -s billing
    """
    from ...proto import wire_pb2 as wire

    confirm(f"Delete subscription {subscription} of {full(topic)}", yes)
    _each(session, topic, "DeleteSubscription", wire.DeleteSubscriptionRequest, name=subscription, force=force)
    session.out.done(
        f"subscription {subscription} of {full(topic)} deleted", topic=full(topic), subscription=subscription
    )
