"""Exclusive: one consumer; it gets every entry, first deliveries in log order.

A second consumer is refused while the first is connected. What the consumer gives back is delivered again before
anything new.
"""

from __future__ import annotations

from typing import ClassVar

from .....proto.states import Blocked
from .in_log_order import InLogOrder, why_none
from .policy import Entry, Member, SubscriptionOptions


class Exclusive(InLogOrder):
    """The policy of Exclusive subscriptions: one consumer."""

    individual: ClassVar = False

    def __init__(self, options: SubscriptionOptions) -> None:
        super().__init__(options)
        self.takers: list[Member] = []

    def refuses(self, newcomer: Member) -> str | None:
        return f"the exclusive subscription has a consumer already ({self.takers[0].name})" if self.takers else None

    def joined(self, member: Member) -> None:
        assert not self.takers, "an exclusive subscription has one consumer"
        self.takers.append(member)

    def left(self, member: Member) -> None:
        self.takers.clear()

    def pick(self, entry: Entry, waited: bool) -> Member | Blocked:
        only = self.takers[0] if self.takers else None
        if only is None or only.permits <= 0 or only.paused:
            return why_none(self.takers) or Blocked.NO_PERMITS
        if self._comes_later(entry.position):
            return Blocked.NOT_YET
        self._goes_out(entry.position, waited)
        return only
