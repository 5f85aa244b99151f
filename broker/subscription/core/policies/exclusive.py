"""Exclusive: one consumer; it gets every entry, first deliveries in log order.

A second consumer is refused while the first is connected. What the consumer gives back is delivered again before
anything new.
"""

from __future__ import annotations

from typing import ClassVar

from .in_log_order import InLogOrder, why_none
from .policy import Blocked, Entry, Member, SubscriptionOptions


class Exclusive(InLogOrder):
    individual: ClassVar = False

    def __init__(self, options: SubscriptionOptions) -> None:
        super().__init__(options)
        self._only: Member | None = None

    def refuses(self, newcomer: Member) -> str | None:
        if self._only is None:
            return None
        return f"the exclusive subscription has a consumer already ({self._only.name})"

    def joined(self, member: Member) -> None:
        assert self._only is None, "an exclusive subscription has one consumer"
        self._only = member

    def left(self, member: Member) -> None:
        self._only = None

    def pick(self, entry: Entry, waited: bool) -> Member | Blocked:
        only = self._only
        if only is None or only.permits <= 0 or only.paused:
            return self.blocked() or Blocked.NO_PERMITS
        if self._comes_later(entry.position):
            return Blocked.NOT_YET
        self._goes_out(entry.position, waited)
        return only

    def blocked(self) -> Blocked | None:
        return why_none(() if self._only is None else (self._only,))
