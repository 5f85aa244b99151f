"""Shared: any consumer may get any entry; each entry is outstanding at one consumer at most. No order.

Round robin over the consumers that can take something, TURN_ENTRIES at a time; consumers of a smaller priority number
come first, others only when none of those can. A consumer that holds UNACKED_CONSUMER_MAX messages gets no more, nor
does anybody when the subscription holds UNACKED_SUBSCRIPTION_MAX (Pulsar S4); that one is looked at before each read,
so one chunk may pass it. No cumulative acks: nobody knows who holds the rest.
"""

from __future__ import annotations

from ..dispatch import Blocked, Entry, Member

TURN_ENTRIES = 20
UNACKED_CONSUMER_MAX = 50_000
UNACKED_SUBSCRIPTION_MAX = 200_000


class Shared:
    cumulative_acks = False

    def __init__(self) -> None:
        self._members: list[Member] = []  # by priority, then in order of joining
        self._current: Member | None = None
        self._left_in_turn = 0

    def refuses(self, newcomer: Member) -> str | None:
        return None

    def joined(self, member: Member) -> None:
        self._members.append(member)
        self._members.sort(key=lambda each: (each.priority, each.id))

    def left(self, member: Member) -> None:
        self._members.remove(member)
        if self._current is member:
            self._current, self._left_in_turn = None, 0

    def pick(self, entry: Entry) -> Member | Blocked:
        current = self._current
        if current is not None and self._left_in_turn > 0 and _able(current):
            self._left_in_turn -= 1
            return current
        chosen = self._next()
        if chosen is None:
            return self.blocked() or Blocked.NO_PERMITS
        self._current, self._left_in_turn = chosen, TURN_ENTRIES - 1
        return chosen

    def blocked(self) -> Blocked | None:
        if not self._members:
            return Blocked.NO_CONSUMER
        if sum(member.unacked for member in self._members) >= UNACKED_SUBSCRIPTION_MAX:
            return Blocked.TOO_MANY_UNACKED
        if any(_able(member) for member in self._members):
            return None
        if all(member.permits <= 0 for member in self._members):
            return Blocked.NO_PERMITS
        if any(member.paused and member.permits > 0 for member in self._members):
            return Blocked.SLOW_CONSUMER
        return Blocked.TOO_MANY_UNACKED

    def _next(self) -> Member | None:
        """The next able consumer of the first priority that has one, after the current."""
        able = [member for member in self._members if _able(member)]
        if not able:
            return None
        level = [member for member in able if member.priority == able[0].priority]
        after = self._current.id if self._current is not None else -1
        return next((member for member in level if member.id > after), level[0])


def _able(member: Member) -> bool:
    return member.permits > 0 and not member.paused and member.unacked < UNACKED_CONSUMER_MAX
