"""The policies of Exclusive and Failover, and their base class (`LogOrderPolicy`), which Shared has too: waiting
entries are delivered in log order, to any consumer that can get them. The waiting entries are a set of positions.

Also in this file, below its heading: the owner of each slot of keys, in three ways (slot_owners).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar, Protocol

import msgspec
from pyroaring import BitMap

from ....proto.errors import InvalidRequest
from ....proto.names import STICKY_SLOTS, Position, compute_key_slot
from ....proto.states import Blocked
from .policy import (
    ActiveConsumerChanged,
    DispatcherEntry,
    HeldSlot,
    Member,
    PolicyOptions,
    PolicyStatistics,
    SubscriptionOptions,
)
from .positions import PositionSet

# ---------------------------------------------------------------------------------------------------------- slot_owners
# The owner of each of the slots 1 … 65535 that keys are hashed to. Three ways, one interface.
#     HashRingSlotOwners      AUTO_SPLIT by consistent hashing (Pulsar S7): each consumer has RING_POINTS_PER_CONSUMER
#                             points, point i of the n-th of a name is the slot of `name NUL n NUL i`; a slot belongs to
#                             the next point at or above it, round the end. Of two consumers with the same point the
#                             earlier one has it, the other takes it over later.
#     SplitRangeSlotOwners    AUTO_SPLIT by ranges (S8): a newcomer takes the lower half of the largest range; the range
#                             of one that leaves goes to its right neighbour (the last one's to its left neighbour).
#     StickyRangeSlotOwners   each consumer requests its ranges (S9); none may overlap another's; entries in slots that
#                             no consumer requested wait.
# The answer depends only on which consumers joined and left, and in which order.
# Guarding test: tests/broker/subscription/core/test_slot_owners.py.

RING_POINTS_PER_CONSUMER = 100
"""Points of each consumer on the ring (Pulsar S7)."""
SLOT_RANGES_MAX = 1000
"""Ranges of a sticky consumer: each is compared with those of the others."""


class KeySharedOptions(PolicyOptions, msgspec.Struct, frozen=True):
    """The options of a consumer of a Key_Shared subscription. All connected consumers must have the same values of
    `sticky` and `out_of_order`; their ranges of slots differ."""

    sticky: bool = False  # the consumers request their ranges
    out_of_order: bool = False  # allow_out_of_order_delivery
    ranges: tuple[tuple[int, int], ...] = ()  # of a sticky consumer: slots 0 … 65535, both ends included

    @property
    def is_order_guaranteed(self) -> bool:
        return not self.out_of_order

    def check(self) -> None:
        if len(self.ranges) > SLOT_RANGES_MAX:
            raise InvalidRequest(f"{len(self.ranges)} ranges of slots are more than {SLOT_RANGES_MAX}")


DEFAULT_KEY_SHARED_OPTIONS = KeySharedOptions()


def to_key_shared_options(asked: PolicyOptions) -> KeySharedOptions:
    """Returns `asked`, the options that a consumer sent, if they are those of Key_Shared; otherwise the defaults of
    Key_Shared."""
    return asked if isinstance(asked, KeySharedOptions) else DEFAULT_KEY_SHARED_OPTIONS


class SlotOwners(Protocol):
    """Assigns each slot of keys to the consumer that owns it. The policy of Key_Shared calls it. There is one
    implementation for each way to assign slots: HashRingSlotOwners, SplitRangeSlotOwners and StickyRangeSlotOwners."""

    def why_refused(self, newcomer: Member) -> str | None:
        """Returns why the consumer `newcomer` cannot get slots; None if it can."""
        ...

    def add_member(self, member: Member) -> None:
        """Adds a consumer. Slots of other consumers may then belong to it."""
        ...

    def remove_member(self, member: Member) -> None:
        """Removes a consumer. Its slots then belong to other consumers, or to none."""
        ...

    def find_owner(self, slot: int) -> Member | None:
        """Returns the consumer that owns the slot; None if no consumer does."""
        ...

    def list_ranges(self) -> list[tuple[int, int, Member]]:
        """Returns the ranges of slots in order, each as (first slot, last slot, the consumer that owns the range)."""
        ...


class HashRingSlotOwners:
    """Assigns slots to consumers in the mode AUTO_SPLIT by consistent hashing: each consumer has
    RING_POINTS_PER_CONSUMER points on a ring, and owns each slot whose next point, at or above it, is one of them."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._at: dict[int, list[Member]] = {}  # point → who is there, in order of coming
        self._numbers: dict[str, dict[int, Member]] = {}  # name → number among those of the name → who

    def why_refused(self, newcomer: Member) -> str | None:
        return None

    def add_member(self, member: Member) -> None:
        of_name = self._numbers.setdefault(member.name, {})
        number = next(each for each in range(len(of_name) + 1) if each not in of_name)
        of_name[number] = member
        for point in _points(member.name, number):
            there = self._at.setdefault(point, [])
            if not there:
                insort(self._points, point)
            there.append(member)

    def remove_member(self, member: Member) -> None:
        of_name = self._numbers[member.name]
        number = next(each for each, who in of_name.items() if who is member)
        del of_name[number]
        if not of_name:
            del self._numbers[member.name]
        for point in _points(member.name, number):
            there = self._at[point]
            there.remove(member)
            if not there:
                del self._at[point]
                self._points.remove(point)

    def find_owner(self, slot: int) -> Member | None:
        points = self._points
        if not points:
            return None
        place = bisect_left(points, slot)
        return self._at[points[place if place < len(points) else 0]][0]

    def list_ranges(self) -> list[tuple[int, int, Member]]:
        if not self._points:
            return []
        ends = [*self._points] if self._points[-1] == STICKY_SLOTS else [*self._points, STICKY_SLOTS]
        first, found = 1, list[tuple[int, int, Member]]()
        for end in ends:
            owner = self.find_owner(end)
            assert owner is not None, "a ring with points has owners"
            if found and found[-1][2] is owner:
                found[-1] = (found[-1][0], end, owner)
            else:
                found.append((first, end, owner))
            first = end + 1
        return found


def _points(name: str, number: int) -> list[int]:
    return list(dict.fromkeys(compute_key_slot(f"{name}\0{number}\0{i}") for i in range(RING_POINTS_PER_CONSUMER)))


class SplitRangeSlotOwners:
    """Assigns slots to consumers in the mode AUTO_SPLIT by ranges: each new consumer gets the lower half of the largest
    range."""

    def __init__(self) -> None:
        self._ends: list[int] = []  # the last slot of each range, rising; the last one is STICKY_SLOTS
        self._owners: list[Member] = []

    def why_refused(self, newcomer: Member) -> str | None:
        if len(self._ends) >= STICKY_SLOTS:
            return f"there are {STICKY_SLOTS} consumers already, one for each slot"
        return None

    def add_member(self, member: Member) -> None:
        if not self._ends:
            self._ends, self._owners = [STICKY_SLOTS], [member]
            return
        firsts = [0, *self._ends[:-1]]
        sizes = [end - first for first, end in zip(firsts, self._ends, strict=True)]
        largest = sizes.index(max(sizes))
        self._ends.insert(largest, firsts[largest] + sizes[largest] // 2)
        self._owners.insert(largest, member)

    def remove_member(self, member: Member) -> None:
        place = self._owners.index(member)
        last = place == len(self._ends) - 1
        del self._owners[place]
        del self._ends[place - 1 if last and place else place]

    def find_owner(self, slot: int) -> Member | None:
        return self._owners[bisect_left(self._ends, slot)] if self._ends else None

    def list_ranges(self) -> list[tuple[int, int, Member]]:
        found, first = list[tuple[int, int, Member]](), 1
        for end, owner in zip(self._ends, self._owners, strict=True):
            found.append((first, end, owner))
            first = end + 1
        return found


class StickyRangeSlotOwners:
    """Assigns slots to consumers in the mode STICKY: each consumer gets the ranges that it requests. A slot that no
    consumer requested has no owner."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, Member]] = []

    def why_refused(self, newcomer: Member) -> str | None:
        ranges = to_key_shared_options(newcomer.options).ranges
        if not ranges:
            return "a sticky consumer says which ranges of 0 … 65535 it takes"
        before = -1
        for first, last in sorted(ranges):
            if not before < first <= last <= STICKY_SLOTS:
                return f"the range [{first}, {last}] overlaps another, or is none within [0, {STICKY_SLOTS}]"
            before = last
            for taken_first, taken_last, owner in self._ranges:
                if first <= taken_last and taken_first <= last:
                    return f"the range [{first}, {last}] overlaps [{taken_first}, {taken_last}] of {owner.name}"
        return None

    def add_member(self, member: Member) -> None:
        self._ranges += [(first, last, member) for first, last in to_key_shared_options(member.options).ranges]
        self._ranges.sort(key=lambda each: each[0])

    def remove_member(self, member: Member) -> None:
        self._ranges = [each for each in self._ranges if each[2] is not member]

    def find_owner(self, slot: int) -> Member | None:
        place = bisect_left(self._ranges, slot + 1, key=lambda each: each[0]) - 1
        if place < 0:
            return None
        _first, last, owner = self._ranges[place]
        return owner if slot <= last else None

    def list_ranges(self) -> list[tuple[int, int, Member]]:
        return list(self._ranges)


# --------------------------------------------------------------------------------------------------------- in_log_order

NO_FAILED_ENTRIES = PositionSet()
"""The waiting entries of a subscription in which nothing has failed; never add to it."""


class LogOrderPolicy:
    """The base class of the policies of Exclusive, Failover and Shared subscriptions. Entries that wait for redelivery
    are delivered in log order. A subclass defines which consumers may join, and `choose_member`."""

    is_order_guaranteed: ClassVar = True
    by_keys: ClassVar = False
    busy: ClassVar = Blocked.KEYS_BUSY
    is_full = False  # only what was delivered before waits here, so its number is bounded by what was outstanding
    is_looking_ahead = paced = False

    def __init__(self, options: SubscriptionOptions) -> None:
        self.waiting = PositionSet()
        self._failed = NO_FAILED_ENTRIES

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

    def is_entry_waiting(self, entry: DispatcherEntry) -> bool:
        return entry.position in self.waiting

    def next_ready_entries(self, count: int) -> Sequence[Position]:
        return self.waiting.first_positions(count) if self.waiting.entries else ()

    def on_entry_failed(self, position: Position, outstanding: Collection[Position]) -> Sequence[Position]:
        if self._failed is NO_FAILED_ENTRIES:
            self._failed = PositionSet()
        self._failed.add(position)
        return [each for each in outstanding if each > position]

    def on_failed_entry_done(self, position: Position) -> None:
        self._failed.discard(position)

    def is_held_back_by_failure(self, position: Position) -> bool:
        return bool(self._failed) and position > self._failed.first_position()

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
        self._failed = NO_FAILED_ENTRIES

    @property
    def waiting_entries_to_read(self) -> int:
        return self.waiting.entries

    def _comes_later(self, position: Position) -> bool:
        """Returns True if another entry must be delivered before this one: an earlier waiting entry, or a failed entry
        that holds this one back."""
        return (self.waiting.entries > 0 and self.waiting.first_position() != position) or (
            self._failed is not NO_FAILED_ENTRIES and self.is_held_back_by_failure(position)
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
    """The policy of Exclusive subscriptions: at most one consumer may be connected, and it gets every entry."""

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

    def choose_member(self, entry: DispatcherEntry, waited: bool) -> Member | Blocked:
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
#   owner of the topic's name on a ring of the consumers' names (in_log_order.py), so that the topics spread over them.
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
                ring.add_member(member)
            return ring.find_owner(compute_key_slot(self._topic))
        return able[0]

    def choose_member(self, entry: DispatcherEntry, waited: bool) -> Member | Blocked:
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
