"""A connected consumer, as its subscription sees it: where its deliveries go, and what the dispatcher knows of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ...proto.errors import MagnetarError
from .core.dispatch import Delivery
from .core.policies.policy import Member


class Outlet(Protocol):
    """Where a consumer's deliveries go: its stream. Nothing here waits but `drained`."""

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """All of them are this consumer's; their entries are StoredEntries."""
        ...

    def ended(self) -> None:
        """The topic is terminated and everything was delivered."""
        ...

    def active(self, active: bool) -> None:
        """Failover: this consumer is the one that gets the messages, or is not."""
        ...

    def closed(self, error: MagnetarError) -> None:
        """The broker gives the consumer up; nothing more comes."""
        ...

    @property
    def full(self) -> bool:
        """More is queued for it than should be: nothing is delivered before `drained` returns."""
        ...

    async def drained(self) -> None: ...


class Consumer:
    """`member` is what the dispatcher knows of it."""

    __slots__ = ("address", "instance", "member", "outlet", "told_active", "waiting")

    def __init__(self, member: Member, outlet: Outlet, *, address: str, instance: str) -> None:
        self.member = member
        self.outlet = outlet
        self.told_active: bool | None = None
        self.address = address
        self.instance = instance
        self.waiting: asyncio.Task[None] | None = None  # for its queue to drain
