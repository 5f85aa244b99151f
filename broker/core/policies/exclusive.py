"""Exclusive: one consumer; it gets every entry, first deliveries in log order.

A second consumer is refused while the first is there. What the consumer gives back comes again before anything new.
"""

from __future__ import annotations

from ..dispatch import Blocked, Entry, Member


class Exclusive:
    cumulative_acks = True

    def __init__(self) -> None:
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

    def pick(self, entry: Entry) -> Member | Blocked:
        only = self._only
        if only is not None and only.permits > 0 and not only.paused:
            return only
        return self.blocked() or Blocked.NO_PERMITS

    def blocked(self) -> Blocked | None:
        if self._only is None:
            return Blocked.NO_CONSUMER
        if self._only.paused:
            return Blocked.SLOW_CONSUMER
        return None if self._only.permits > 0 else Blocked.NO_PERMITS
