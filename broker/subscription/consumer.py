"""A connected consumer, as its subscription sees it: the outlet to which entries are delivered, its state in the
dispatcher (the member), and the times of its last activity.

Also in this file, below its heading: the times at which a subscription or a consumer was last active (activity)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ...proto.errors import MagnetarError
from ...runtime.access import LOCAL_PRINCIPAL, Principal
from .core.dispatch import Delivery
from .core.policy import Member

# ------------------------------------------------------------------------------------------------------ activity
# The times at which a subscription or a consumer was last active: for statistics alone, set once for each batch and
# frame.


class ActivityTimes:
    """The times at which a subscription or a consumer last did something: delivered, acknowledged, or gave permits.
    Each is in ms since the epoch, by the clock of this broker; 0: not since the topic was loaded here."""

    __slots__ = ("acked_ms", "consumed_ms", "expired_ms", "flow_ms", "marked_ms")

    def __init__(self) -> None:
        self.flow_ms = 0  # a consumer asked for messages
        self.consumed_ms = 0  # messages were handed to a consumer
        self.acked_ms = 0
        self.marked_ms = 0  # everything up to a later message was acknowledged
        self.expired_ms = 0  # messages were given up for their age


# ------------------------------------------------------------------------------------------------------ consumer


class ConsumerOutlet(Protocol):
    """The interface through which a subscription sends messages and events to one consumer. `ConsumerSession`
    implements it; the subscription and its pump call it. Only `wait_drained` waits; all other methods return at
    once."""

    def deliver(self, deliveries: Sequence[Delivery]) -> bool:
        """Sends the entries of `deliveries` to the consumer. Returns True if the queue of the consumer's connection is
        full now: then the caller must deliver nothing more before `wait_drained` returns."""
        ...

    def on_end_of_topic(self) -> None:
        """Called when the topic is terminated and all of its entries were delivered."""
        ...

    def on_active_changed(self, active: bool) -> None:
        """Called on a Failover subscription after the active consumer was elected. `active`: whether this consumer is
        the active one, which alone gets the messages."""
        ...

    def on_closed(self, error: MagnetarError) -> None:
        """Called when the broker closes the consumer because of `error`. Nothing is delivered to the consumer after
        that."""
        ...

    def on_topic_moving(self, error: MagnetarError) -> asyncio.Future[None] | None:
        """Called when the topic begins to close in order, to move to another broker. Sends `error` to the client, as
        `on_closed` does. Acknowledgements that the client sends before it reads the error still count.

        Returns a future that completes when the last of these acknowledgements has arrived; None if `error` was not
        sent yet, or if the client's protocol cannot mark the last acknowledgement.
        """
        ...

    async def wait_drained(self) -> None:
        """Waits until the consumer may get more deliveries, after `deliver` has returned True. Raises ConnectionLost if
        the connection is lost."""
        ...


class Consumer:
    """A consumer that is connected to a subscription. `member`: its state in the dispatcher of the subscription;
    `outlet`: where entries and events for it go; `instance`: identifies the client's consumer object over all its
    connections, "" if the client names none; `client`: name and version of the client; `principal`: who it is
    authenticated as; `since_ms`: when it was opened (ms since the epoch)."""

    __slots__ = (
        "activity", "address", "client", "instance", "member", "outlet", "principal", "properties", "since_ms",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, member: Member, outlet: ConsumerOutlet, *, address: str, instance: str,
        principal: Principal = LOCAL_PRINCIPAL,
        client: str = "", since_ms: int = 0, properties: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.client = client  # its name and version, as it says
        self.since_ms = since_ms  # it was opened, wall clock
        self.activity = ActivityTimes()
        self.properties = properties or {}
        self.member = member
        self.outlet = outlet
        self.address = address
        self.instance = instance
        self.principal = principal
        self.waiting: asyncio.Task[None] | None = None  # for its queue to drain
