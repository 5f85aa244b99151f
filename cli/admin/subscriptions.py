"""`magnetar subscriptions …`, and the same verbs under `topics` where pulsar-admin has them.

On a partitioned topic each verb is applied to every partition, at its owner.
"""

from __future__ import annotations

import click
from click import option

from ..common import units
from ..common.lazy import ROW, Lazy, LazyGroup
from ..common.session import SUBSCRIPTION, Session, verb
from ..common.units import message_id
from .properties import PROPERTIES
from .topics import full

subscriptions = LazyGroup(
    "subscriptions",
    {
        "list": ROW,
        "create": Lazy(".admin.subscriptions", "create", "Make a subscription."),
        "stats": Lazy(
            ".admin.subscriptions", "stats", "Backlog, holes, consumers, and why the next message is not delivered."
        ),
        "peek": Lazy(".admin.subscriptions", "peek", "Show the next messages without taking them."),
        "skip": Lazy(".admin.subscriptions", "skip", "Acknowledge the next messages unseen."),
        "clear-backlog": Lazy(".admin.subscriptions", "clear", "Acknowledge everything unseen."),
        "reset": Lazy(".admin.subscriptions", "reset", "Move it to a message or a time."),
        "properties": Lazy(".admin.subscriptions", "properties", "Its properties."),
        "set-properties": Lazy(".admin.subscriptions", "set_properties", "Give it these properties and no others."),
        "delete": ROW,
    },
    {"seek": "reset", "reset-cursor": "reset", "peek-messages": "peek", "unsubscribe": "delete"},
    with_rows=True,
    help="Subscriptions: where the readers of a topic stand.\n\nExample: magnetar subscriptions list orders",
)


def _done(session: Session, text: str, topic: str, subscription: str) -> None:
    session.out.done(text, topic=full(topic), subscription=subscription)


@verb(
    SUBSCRIPTION,
    option("-m", "--messageId", "position", default="latest", show_default=True, help="earliest, latest, L:E."),
    PROPERTIES,
)
def create(session: Session, topic: str, subscription: str, position: str, pairs: tuple[str, ...]) -> None:
    """Make a subscription, before any consumer comes.

    Example: magnetar subscriptions create orders -s billing -m earliest
    """
    place, given = message_id(position), units.properties(pairs)
    for part in session.admin.parts(topic):
        session.admin.create_subscription(part, subscription, place, given)
    _done(session, f"subscription {subscription} of {full(topic)} created", topic, subscription)


@verb(SUBSCRIPTION, name="get-subscription-properties")
def properties(session: Session, topic: str, subscription: str) -> None:
    """The properties of a subscription, each partition's.

    Example: magnetar topics get-subscription-properties orders -s billing
    """
    rows = [
        {"topic": part, "property": key, "value": value}
        for part in session.admin.parts(topic)
        for key, value in sorted(session.admin.subscription_properties(part, subscription).items())
    ]
    session.out.rows(rows, ("topic", "property", "value"), empty=f"{subscription} has no properties")


@verb(
    SUBSCRIPTION,
    PROPERTIES,
    option("-c", "--clear", is_flag=True, help="None at all."),
    name="update-subscription-properties",
)
def set_properties(session: Session, topic: str, subscription: str, pairs: tuple[str, ...], clear: bool) -> None:
    """Give a subscription these properties and no others. Some set its own dead-letter policy:
    dead-letter.max-redeliver-count, dead-letter.topic, dead-letter.backoff-s.

    Example: magnetar topics update-subscription-properties orders -s billing -p dead-letter.max-redeliver-count=5
    """
    if clear == bool(pairs):
        raise click.UsageError("either -p KEY=VALUE or --clear")
    given = units.properties(pairs)
    for part in session.admin.parts(topic):
        session.admin.set_subscription_properties(part, subscription, given)
    said = ", ".join(f"{key}={value}" for key, value in given.items()) or "no properties"
    _done(session, f"subscription {subscription} of {full(topic)} has {said}", topic, subscription)


@verb(option("-s", "--subscription", default=None, help="Only this one."))
def stats(session: Session, topic: str, subscription: str | None) -> None:
    """Backlog, holes, consumers, and why the next message is not delivered.

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


@verb(
    SUBSCRIPTION,
    option("-n", "--count", type=click.IntRange(1, 1000), default=1, show_default=True, help="Of each partition."),
)
def peek(session: Session, topic: str, subscription: str, count: int) -> None:
    """Show the next messages of a subscription; they stay where they are.

    Example: magnetar topics peek-messages orders -s billing -n 5
    """
    from ..messages.messages import show, stored

    for part in session.admin.parts(topic):
        for message in session.admin.peek_messages(part, subscription, count):
            show(stored(message), session.out)


@verb(
    SUBSCRIPTION,
    option("-n", "--count", type=click.IntRange(1), default=None, help="Of each partition."),
    option("-a", "--all", "everything", is_flag=True, help="All there are."),
)
def skip(session: Session, topic: str, subscription: str, count: int | None, everything: bool) -> None:
    """Acknowledge the next messages of a subscription unseen.

    Example: magnetar topics skip orders -s billing -n 10
    """
    if everything == (count is not None):
        raise click.UsageError("either -n COUNT or --all")
    _skip(session, topic, subscription, -1 if count is None else count)


@verb(SUBSCRIPTION, name="clear-backlog")
def clear(session: Session, topic: str, subscription: str) -> None:
    """Acknowledge everything of a subscription unseen.

    Example: magnetar topics clear-backlog orders -s billing
    """
    _skip(session, topic, subscription, -1)


def _skip(session: Session, topic: str, subscription: str, count: int) -> None:
    for part in session.admin.parts(topic):
        session.admin.skip_messages(part, subscription, count)
    what = "the backlog" if count < 0 else f"{count} messages"
    _done(session, f"{what} of {subscription} skipped", topic, subscription)


@verb(
    SUBSCRIPTION,
    option("-t", "--time", "moment", default=None, help="A time ago (10m, 2h), an ISO time, or milliseconds."),
    option("-m", "--messageId", "position", default=None, help="earliest, latest, L:E."),
    option("-e", "--exclude-reset-position", "exclude", is_flag=True, help="Begin after that message."),
)
def reset(
    session: Session, topic: str, subscription: str, moment: str | None, position: str | None, exclude: bool
) -> None:
    """Move a subscription to a time or a message: what comes after is delivered (again).

    Example: magnetar topics reset-cursor orders -s billing -t 2h
    """
    from ...runtime.clock import SystemClock

    if (moment is None) == (position is None):
        raise click.UsageError("either -t TIME or -m POSITION")
    to = units.moment_ms(moment, SystemClock().wall_ms()) if moment is not None else message_id(position or "")
    for part in session.admin.parts(topic):
        session.admin.reset_subscription(part, subscription, to, exclusive=exclude)
    _done(session, f"subscription {subscription} moved to {moment or position}", topic, subscription)
