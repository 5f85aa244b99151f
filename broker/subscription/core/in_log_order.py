"""The policies that deliver waiting entries in log order, to any consumer that can take them: what they have in common
(`LogOrderPolicy`), and Exclusive and Failover. What waits is a set of positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from pyroaring import BitMap

from ....proto.names import Position, compute_key_slot
from ....proto.states import Blocked
from .policy import ActiveConsumerChanged, Entry, HeldSlot, Member, PolicyStatistics, SubscriptionOptions
from .positions import PositionSet
from .slot_owners import HashRingSlotOwners

NOTHING = PositionSet()
"""The waiting entries of a subscription in which nothing has failed; never add to it."""


class LogOrderPolicy:
    """The base class of the policies of Exclusive, Failover and Shared subscriptions. Entries that wait for redelivery
    are delivered in log order."""

    is_order_guaranteed: ClassVar = True
    by_keys: ClassVar = False
    busy: ClassVar = Blocked.KEYS_BUSY
    is_full = False  # only what was delivered before waits here, so its number is bounded by what was outstanding
    is_looking_ahead = paced = False

    def __init__(self, options: SubscriptionOptions) -> None:
        self.waiting = PositionSet()
        self._failed = NOTHING

    def why_incompatible(self, newcomer: Member) -> str | None:
        return None

    def take_active_changes(self) -> Sequence[ActiveConsumerChanged]:
        return ()

    def statistics(self) -> PolicyStatistics:
        return PolicyStatistics()

    def on_entries_released(self, positions: Sequence[Position]) -> None:
        pass

    def on_entry_returned(self, position: Position) -> None:
        self.waiting.add(position)

    def is_entry_waiting(self, entry: Entry) -> bool:
        return entry.position in self.waiting

    def next_ready_entries(self, count: int) -> Sequence[Position]:
        return self.waiting.earliest(count) if self.waiting.entries else ()

    def on_entry_failed(self, position: Position, outstanding: Collection[Position]) -> Sequence[Position]:
        if self._failed is NOTHING:
            self._failed = PositionSet()
        self._failed.add(position)
        return [each for each in outstanding if each > position]

    def on_failed_entry_done(self, position: Position) -> None:
        self._failed.discard(position)

    def is_held_back_by_failure(self, position: Position) -> bool:
        return bool(self._failed) and position > self._failed.first()

    def discard(self, position: Position) -> None:
        if self.waiting.entries:
            self.waiting.discard(position)

    def discard_entries_of_ledger(self, ledger_id: int, entries: BitMap) -> None:
        if self.waiting.entries:
            self.waiting.discard_entries_of_ledger(ledger_id, entries)

    def discard_up_to(self, mark: Position) -> None:
        if self.waiting.entries:
            self.waiting.discard_up_to(mark)

    def rebalance_slots(self, count: int) -> bool:
        return True

    def find_held_slots(self, now_s: float) -> Sequence[HeldSlot]:
        return ()

    def advance_clock(self, now: float) -> None:
        pass

    def next_release_s(self) -> float:
        return 0.0

    def on_entries_passed_over(self, count: int) -> None:
        pass

    def clear(self) -> None:
        self.waiting.clear()
        self._failed = NOTHING

    @property
    def waiting_entries_to_read(self) -> int:
        return self.waiting.entries

    def _comes_later(self, position: Position) -> bool:
        """Returns True if another entry must be delivered before this one: an earlier waiting entry, or a failed entry
        that holds this one back."""
        return (self.waiting.entries > 0 and self.waiting.first() != position) or (
            self._failed is not NOTHING and self.is_held_back_by_failure(position)
        )

    def _goes_out(self, position: Position, waited: bool) -> None:
        """Called when the entry is delivered: removes it from the waiting entries if it was one (`waited`)."""
        if waited:
            self.waiting.discard(position)

    def check(self, outstanding: set[Position]) -> None:
        self.waiting.check()
        assert not any(position in self.waiting for position in outstanding), "an entry is held and waits"


def why_no_receiver(members: Iterable[Member]) -> Blocked | None:
    """Returns the reason why none of the consumers can receive an entry now; None if one of them can."""
    why = Blocked.NO_CONSUMER
    for member in members:
        if member.permits > 0:
            if not member.paused and not member.blocked:
                return None
            why = Blocked.TOO_MANY_UNACKED if member.blocked else Blocked.SLOW_CONSUMER
        elif why is Blocked.NO_CONSUMER:
            why = Blocked.NO_PERMITS
    return why


# ----------------------------------------------------------------------------------------------------- exclusive
# Exclusive: one consumer; it gets every entry, first deliveries in log order.
#
# A second consumer is refused while the first is connected. What the consumer gives back is delivered again before
# anything new.


class Exclusive(LogOrderPolicy):
    """The policy of Exclusive subscriptions: at most one consumer may be connected."""

    individual: ClassVar = False

    def __init__(self, options: SubscriptionOptions) -> None:
        super().__init__(options)
        self.candidates: list[Member] = []

    def why_refused(self, newcomer: Member) -> str | None:
        return (
            f"the exclusive subscription has a consumer already ({self.candidates[0].name})"
            if self.candidates
            else None
        )

    def add_member(self, member: Member) -> None:
        assert not self.candidates, "an exclusive subscription has one consumer"
        self.candidates.append(member)

    def remove_member(self, member: Member) -> None:
        self.candidates.clear()

    def pick(self, entry: Entry, waited: bool) -> Member | Blocked:
        only = self.candidates[0] if self.candidates else None
        if only is None or only.permits <= 0 or only.paused:
            return why_no_receiver(self.candidates) or Blocked.NO_PERMITS
        if self._comes_later(entry.position):
            return Blocked.NOT_YET
        self._goes_out(entry.position, waited)
        return only


# ------------------------------------------------------------------------------------------------------ failover
# Failover: several consumers, one of them active; it gets every entry, first deliveries in log order.
#
# The active consumer is a function of the connected consumers, so every broker and every test gets the same answer:
# - only consumers of the best priority (the smallest number) count;
# - of a partition (Pulsar S2): sorted by name, the one with the number `partition % how many`;
# - of a topic without partitions (S3): the one that subscribed first; but when one of them covers several topics, the
#   owner of the topic's name on a ring of the consumers' names (slot_owners.py), so that the topics spread over them.
#
# When another becomes active, what the old one holds is taken from it and delivered to the new one in log order, before
# anything new: an entry never has two holders. Acknowledgements that the old one still sends count.


class Failover(LogOrderPolicy):
    """The policy of Failover subscriptions: only one of the consumers, the active one, gets messages."""

    individual: ClassVar = False

    def __init__(self, options: SubscriptionOptions) -> None:
        super().__init__(options)
        self._topic = options.topic
        self._partition = options.partition
        self._members: list[Member] = []  # in order of subscribing
        self.active: Member | None = None
        self.candidates: Sequence[Member] = ()  # the active one
        self._changed = False  # since the last `take_active_changes`
        self._notified: dict[int, bool] = {}  # consumer → what it was notified of last

    def why_refused(self, newcomer: Member) -> str | None:
        return None

    def add_member(self, member: Member) -> Member | None:
        self._members.append(member)
        return self._elect()

    def remove_member(self, member: Member) -> None:
        self._members.remove(member)
        self._elect()

    def _elect(self) -> Member | None:
        """Elects the active consumer. Returns the former active consumer if another one, or none, is active now; else
        None."""
        before, self.active, self._changed = self.active, self._elected(), True
        self.candidates = () if self.active is None else (self.active,)
        return before if before is not self.active else None

    def _elected(self) -> Member | None:
        """Returns the consumer that must be the active one; None if no consumer is connected."""
        if not self._members:
            return None
        best = min(member.priority for member in self._members)
        able = [member for member in self._members if member.priority == best]
        if self._partition >= 0:
            able.sort(key=lambda member: (member.name, member.id))
            return able[self._partition % len(able)]
        if any(member.many_topics for member in able):
            ring = HashRingSlotOwners()
            for member in able:
                ring.join(member)
            return ring.owner(compute_key_slot(self._topic))
        return able[0]

    def pick(self, entry: Entry, waited: bool) -> Member | Blocked:
        active = self.active
        if active is None or active.permits <= 0 or active.paused:
            return why_no_receiver(self.candidates) or Blocked.NO_PERMITS
        if self._comes_later(entry.position):
            return Blocked.NOT_YET
        self._goes_out(entry.position, waited)
        return active

    def take_active_changes(self) -> Sequence[ActiveConsumerChanged]:
        if not self._changed:
            return ()
        self._changed = False
        before, self._notified = self._notified, {each.id: each is self.active for each in self._members}
        events = [ActiveConsumerChanged(each, each is self.active) for each in self._members]
        return [each for each in events if before.get(each.member.id) is not each.active]

    def statistics(self) -> PolicyStatistics:
        return PolicyStatistics(self.active)
