"""Shared: any consumer may get any entry; each entry is outstanding at one consumer at most. No order.

Round robin over the consumers that can take something, TURN_ENTRIES at a time (Pulsar T17); consumers of a smaller
priority number come first, others only when none of those can. No cumulative acks: the entries before one may be
outstanding at other consumers.

Chunks of a message go to the consumer that got the first of them while it is connected and can take some (Pulsar PR4):
it assembles them. A chunk that another consumer gets is given back, and delivered to that one later. The consumer is
remembered for the latest CHUNKED_MAX messages.
"""

from __future__ import annotations

from bisect import insort
from typing import ClassVar

from .....proto.states import Blocked
from .in_log_order import InLogOrder, why_none
from .policy import Entry, Member, SubscriptionOptions

TURN_ENTRIES = 20
CHUNKED_MAX = 10_000


class Shared(InLogOrder):
    """The policy of Shared: round robin."""

    individual: ClassVar = True
    keeps_order: ClassVar = False

    def __init__(self, options: SubscriptionOptions) -> None:
        super().__init__(options)
        self.takers: list[Member] = []  # by priority, then in order of joining
        self._current: Member | None = None
        self._left_in_turn = 0
        self._chunked: dict[str, Member] = {}  # message in chunks → who puts it together

    def refuses(self, newcomer: Member) -> str | None:
        return None

    def joined(self, member: Member) -> None:
        insort(self.takers, member, key=lambda each: (each.priority, each.id))
        self._left_in_turn = 0  # the newcomer may be a better one

    def left(self, member: Member) -> None:
        self.takers.remove(member)
        for uuid in [uuid for uuid, holder in self._chunked.items() if holder is member]:
            del self._chunked[uuid]
        if self._current is member:
            self._current, self._left_in_turn = None, 0

    def pick(self, entry: Entry, waited: bool) -> Member | Blocked:
        holder = self._chunked.get(entry.chunk_of) if entry.chunk_of else None
        if holder is not None and holder.able:
            self._goes_out(entry.position, waited)
            return holder
        current = self._current
        if (
            current is None or self._left_in_turn <= 0
            or current.permits <= 0 or current.paused or current.blocked
        ):  # fmt: skip
            current = self._next()
            if current is None:
                return why_none(self.takers) or Blocked.NO_PERMITS
            first = current.priority == self.takers[0].priority  # else a better one may be able at any moment
            self._current, self._left_in_turn = current, TURN_ENTRIES if first else 1
        self._left_in_turn -= 1
        if waited:
            self._goes_out(entry.position, waited)
        if entry.chunk_of and holder is None:
            self._chunked[entry.chunk_of] = current
            if len(self._chunked) > CHUNKED_MAX:
                del self._chunked[next(iter(self._chunked))]
        return current

    def _next(self) -> Member | None:
        """The next able consumer of the first priority that has one, after the current."""
        able = [member for member in self.takers if member.able]
        if not able:
            return None
        level = [member for member in able if member.priority == able[0].priority]
        after = self._current.id if self._current is not None else -1
        return next((member for member in level if member.id > after), level[0])
