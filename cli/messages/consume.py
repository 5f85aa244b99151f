"""`magnetar consume`: messages of a subscription on standard output, acknowledged once they are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...proto.subscription_types import NUMBERS
from ..common.session import Session, connected

if TYPE_CHECKING:
    from ..common.output import Output

TYPES = {name.lower(): number for name, number in NUMBERS.items()}
POLL_MS = 200
"""The wait of one receive: a Ctrl-C takes effect within it."""


@click.command()
@click.argument("topic")
@click.option("-s", "--subscription", required=True, help="Name of the subscription; made when it does not exist.")
@click.option("-n", "--count", type=click.IntRange(0), default=None, help="End after so many; 0: never (as --follow).")
@click.option(
    "-p",
    "--position",
    type=click.Choice(["earliest", "latest"], case_sensitive=False),
    default="earliest",
    show_default=True,
    help="Where a new subscription starts.",
)
@click.option("-t", "--type", "kind", type=click.Choice(list(TYPES), case_sensitive=False), default="exclusive")
@click.option("--follow", is_flag=True, help="Go on for ever.")
@click.option(
    "--idle", type=click.FloatRange(0.1), default=2.0, show_default=True, help="End after so much silence, in s."
)
@connected
def consume(
    session: Session,
    topic: str,
    subscription: str,
    count: int | None,
    position: str,
    kind: str,
    follow: bool,
    idle: float,
) -> None:
    """Receive messages of a subscription, print and acknowledge them.

    With -n it waits for that many, with --follow it never ends, else it ends after --idle seconds without a message.

    \b
    Examples:
      magnetar consume orders -s billing -n 10
      magnetar consume orders -s audit --follow -o json | jq .payload
    """
    from ...client.model.settings import ConsumerType, InitialPosition

    for_ever = follow or count == 0
    client = session.client()
    try:
        consumer = client.subscribe(
            topic,
            subscription,
            consumer_type=ConsumerType(TYPES[kind]),
            initial_position=getattr(InitialPosition, position.capitalize()),
        )
        idle_ms = None if for_ever or count else int(idle * 1000)
        _copy(consumer, session.out, None if for_ever else count, idle_ms)
    finally:
        client.close()


def _copy(consumer: Any, out: Output, count: int | None, idle_ms: int | None) -> int:
    """Prints and acknowledges until `count` messages, or until `idle_ms` without one; the number of messages."""
    from ...client.common.errors import Timeout
    from .messages import received, show

    done, silent_ms = 0, 0
    while done != count:
        try:
            message = consumer.receive(timeout_millis=POLL_MS)
        except Timeout:
            silent_ms += POLL_MS
            if idle_ms is not None and silent_ms >= idle_ms:
                break
            continue
        silent_ms = 0
        show(received(message), out)
        consumer.acknowledge(message)
        done += 1
    return done
