"""`magnetar consume`: messages of a subscription on standard output, acknowledged once they are printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ...proto.subscription_types import NUMBERS
from ..common.session import Session, connected
from ..common.units import Real

if TYPE_CHECKING:
    from ...client.model.message import Message
    from ..common.output import Output

TYPES = {name.lower(): number for name, number in NUMBERS.items()}
POLL_MS = 200
"""Milliseconds of one receive: a Ctrl-C takes effect within it."""


@click.command()
@click.argument("topic")
@click.option(
    "-s", "--subscription", default=None,
    help="Name of the subscription; made when it does not exist, and kept. Without: nothing is kept.",
)  # fmt: skip
@click.option("-n", "--count", type=click.IntRange(0), default=None, help="End after so many; 0: never (as --follow).")
@click.option(
    "-p",
    "--position",
    type=click.Choice(["earliest", "latest"], case_sensitive=False),
    default="earliest",
    show_default=True,
    help="Where a new subscription starts, and what is read without one.",
)
@click.option(
    "-t", "--type", "kind", type=click.Choice(list(TYPES), case_sensitive=False), default=None,
    help="Of the subscription.  [default: exclusive]",
)  # fmt: skip
@click.option("--follow", is_flag=True, help="Go on for ever.")
@click.option(
    "--idle", type=Real(0.1), default=2.0, show_default=True, help="End after so much silence, in s."
)
@connected
def consume(
    session: Session,
    topic: str,
    subscription: str | None,
    count: int | None,
    position: str,
    kind: str | None,
    follow: bool,
    idle: float,
) -> None:
    """Receive messages of a subscription, print and acknowledge them.

    Without -s it reads the topic from --position on, and leaves nothing: no subscription that would keep the
    messages that come later.

    With -n it waits for that many, with --follow it never ends, else it ends after --idle seconds without a message.

    \b
    Examples:
      magnetar consume orders -s billing -n 10
      magnetar consume orders --follow
      magnetar consume orders -s audit --follow -o json | jq .payload
    """
    from ...client.model.message_id import MessageId
    from ...client.model.settings import ConsumerType, InitialPosition

    if subscription is None and kind is not None:
        raise click.UsageError("--type is of a subscription: name it with -s")
    for_ever = follow or count == 0
    client = session.client()
    try:
        if subscription is None:
            reader = client.create_reader(topic, getattr(MessageId, position.lower()))
            receive, acknowledge = reader.read_next, None
        else:
            consumer = client.subscribe(
                topic,
                subscription,
                consumer_type=ConsumerType(TYPES[kind or "exclusive"]),
                initial_position=getattr(InitialPosition, position.capitalize()),
            )
            receive, acknowledge = consumer.receive, consumer.acknowledge
        idle_ms = None if for_ever or count else int(idle * 1000)
        _copy(receive, acknowledge, session.out, None if for_ever else count, idle_ms)
    finally:
        client.close()


def _copy(
    receive: Callable[[int], Message], acknowledge: Callable[[Message], None] | None, out: Output, count: int | None,
    idle_ms: int | None,
) -> int:  # fmt: skip
    """Prints, and acknowledges, until `count` messages, or until `idle_ms` without one; the number of messages."""
    from ...client.common.errors import Timeout
    from .messages import received, show

    done, silent_ms = 0, 0
    while done != count:
        try:
            message = receive(POLL_MS)
        except Timeout:
            silent_ms += POLL_MS
            if idle_ms is not None and silent_ms >= idle_ms:
                break
            continue
        silent_ms = 0
        show(received(message), out)
        if acknowledge is not None:
            acknowledge(message)
        done += 1
    return done
