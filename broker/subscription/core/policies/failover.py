"""Failover: several consumers, one of them active; it gets every entry, first deliveries in log order.

The active consumer is a function of the connected consumers, so every broker and every test gets the same answer:
- only consumers of the best priority (the smallest number) count;
- of a partition (Pulsar S2): sorted by name, the one with the number `partition % how many`;
- of a topic without partitions (S3): the one that subscribed first; but when one of them covers several topics, the
  owner of the topic's name on a ring of the consumers' names (slot_owners.py), so that the topics spread over them.

When another becomes active, what the old one holds is taken from it and delivered to the new one in log order, before
anything new: an entry never has two holders. Acknowledgements that the old one still sends count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .....proto.routing import sticky_slot
from .....proto.states import Blocked
from .in_log_order import InLogOrder, why_none
from .policy import ActiveChanged, Entry, Member, Statistics, SubscriptionOptions
from .slot_owners import Ring


class Failover(InLogOrder):
    """The policy of Failover subscriptions: one active consumer."""

    individual: ClassVar = False

    def __init__(self, options: SubscriptionOptions) -> None:
        super().__init__(options)
        self._topic = options.topic
        self._partition = options.partition
        self._members: list[Member] = []  # in order of subscribing
        self.active: Member | None = None
        self.takers: Sequence[Member] = ()  # the active one
        self._changed = False  # since the last `events`
        self._notified: dict[int, bool] = {}  # consumer → what it was notified of last

    def refuses(self, newcomer: Member) -> str | None:
        return None

    def joined(self, member: Member) -> Member | None:
        self._members.append(member)
        return self._elect()

    def left(self, member: Member) -> None:
        self._members.remove(member)
        self._elect()

    def _elect(self) -> Member | None:
        """Elects the active consumer. Returns the one that was active and is no longer."""
        before, self.active, self._changed = self.active, self._elected(), True
        self.takers = () if self.active is None else (self.active,)
        return before if before is not self.active else None

    def _elected(self) -> Member | None:
        if not self._members:
            return None
        best = min(member.priority for member in self._members)
        able = [member for member in self._members if member.priority == best]
        if self._partition >= 0:
            able.sort(key=lambda member: (member.name, member.id))
            return able[self._partition % len(able)]
        if any(member.many_topics for member in able):
            ring = Ring()
            for member in able:
                ring.join(member)
            return ring.owner(sticky_slot(self._topic))
        return able[0]

    def pick(self, entry: Entry, waited: bool) -> Member | Blocked:
        active = self.active
        if active is None or active.permits <= 0 or active.paused:
            return why_none(self.takers) or Blocked.NO_PERMITS
        if self._comes_later(entry.position):
            return Blocked.NOT_YET
        self._goes_out(entry.position, waited)
        return active

    def events(self) -> Sequence[ActiveChanged]:
        if not self._changed:
            return ()
        self._changed = False
        before, self._notified = self._notified, {each.id: each is self.active for each in self._members}
        events = [ActiveChanged(each, each is self.active) for each in self._members]
        return [each for each in events if before.get(each.member.id) is not each.active]

    def statistics(self) -> Statistics:
        return Statistics(self.active)
