"""The owner of each of the slots 1 … 65535 that keys are hashed to. Three ways, one interface.
    HashRingSlotOwners      AUTO_SPLIT by consistent hashing (Pulsar S7): each consumer has POINTS points, point i of
                            the n-th of a name is the slot of `name NUL n NUL i`; a slot belongs to the next point at or
                            above it, round the end. Of two consumers with the same point the earlier one has it, the
                            other takes it over later.
    SplitRangeSlotOwners    AUTO_SPLIT by ranges (S8): a newcomer takes the lower half of the largest range; the range
                            of one that leaves goes to its right neighbour (the last one's to its left neighbour).
    StickyRangeSlotOwners   each consumer requests its ranges (S9); none may overlap another's; entries in slots that
                            no consumer requested wait.
The answer depends only on which consumers joined and left, and in which order.
Guarding test: tests/broker/subscription/core/test_slot_owners.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

import msgspec

from ....proto.errors import InvalidRequest
from ....proto.names import STICKY_SLOTS, compute_key_slot
from .policy import Member, PolicyOptions

POINTS = 100
"""Points of each consumer on the ring (Pulsar S7)."""
RANGES_MAX = 1000
"""Ranges of a sticky consumer: each is compared with those of the others."""


class KeySharedOptions(PolicyOptions, msgspec.Struct, frozen=True):
    """The options of a consumer of a Key_Shared subscription. All connected consumers must have the same options; only
    their ranges of slots differ."""

    sticky: bool = False  # the consumers request their ranges
    out_of_order: bool = False  # allow_out_of_order_delivery
    ranges: tuple[tuple[int, int], ...] = ()  # of a sticky consumer: slots 0 … 65535, both ends included

    @property
    def is_order_guaranteed(self) -> bool:
        return not self.out_of_order

    def check(self) -> None:
        if len(self.ranges) > RANGES_MAX:
            raise InvalidRequest(f"{len(self.ranges)} ranges of slots are more than {RANGES_MAX}")


DEFAULTS = KeySharedOptions()


def to_key_shared_options(asked: PolicyOptions) -> KeySharedOptions:
    """Returns the options of a consumer for Key_Shared. `asked`: the options that the consumer sent, possibly of
    another subscription type."""
    return asked if isinstance(asked, KeySharedOptions) else DEFAULTS


class SlotOwners(Protocol):
    """Assigns each slot of keys to the consumer that owns it. There is one implementation for each way to assign
    slots."""

    def why_refused(self, newcomer: Member) -> str | None: ...
    def join(self, member: Member) -> None: ...
    def leave(self, member: Member) -> None: ...
    def owner(self, slot: int) -> Member | None: ...
    def ranges(self) -> list[tuple[int, int, Member]]:
        """Returns the ranges of slots in order, each as (first slot, last slot, the consumer that owns the range)."""
        ...


class HashRingSlotOwners:
    """Assigns slots to consumers in the mode AUTO_SPLIT by consistent hashing."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._at: dict[int, list[Member]] = {}  # point → who is there, in order of coming
        self._numbers: dict[str, dict[int, Member]] = {}  # name → number among those of the name → who

    def why_refused(self, newcomer: Member) -> str | None:
        return None

    def join(self, member: Member) -> None:
        of_name = self._numbers.setdefault(member.name, {})
        number = next(each for each in range(len(of_name) + 1) if each not in of_name)
        of_name[number] = member
        for point in _points(member.name, number):
            there = self._at.setdefault(point, [])
            if not there:
                insort(self._points, point)
            there.append(member)

    def leave(self, member: Member) -> None:
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

    def owner(self, slot: int) -> Member | None:
        points = self._points
        if not points:
            return None
        place = bisect_left(points, slot)
        return self._at[points[place if place < len(points) else 0]][0]

    def ranges(self) -> list[tuple[int, int, Member]]:
        if not self._points:
            return []
        ends = [*self._points] if self._points[-1] == STICKY_SLOTS else [*self._points, STICKY_SLOTS]
        first, found = 1, list[tuple[int, int, Member]]()
        for end in ends:
            owner = self.owner(end)
            assert owner is not None, "a ring with points has owners"
            if found and found[-1][2] is owner:
                found[-1] = (found[-1][0], end, owner)
            else:
                found.append((first, end, owner))
            first = end + 1
        return found


def _points(name: str, number: int) -> list[int]:
    return list(dict.fromkeys(compute_key_slot(f"{name}\0{number}\0{i}") for i in range(POINTS)))


class SplitRangeSlotOwners:
    """Assigns slots to consumers in the mode AUTO_SPLIT: each new consumer gets the lower half of the largest range."""

    def __init__(self) -> None:
        self._ends: list[int] = []  # the last slot of each range, rising; the last one is STICKY_SLOTS
        self._owners: list[Member] = []

    def why_refused(self, newcomer: Member) -> str | None:
        if len(self._ends) >= STICKY_SLOTS:
            return f"there are {STICKY_SLOTS} consumers already, one for each slot"
        return None

    def join(self, member: Member) -> None:
        if not self._ends:
            self._ends, self._owners = [STICKY_SLOTS], [member]
            return
        firsts = [0, *self._ends[:-1]]
        sizes = [end - first for first, end in zip(firsts, self._ends, strict=True)]
        largest = sizes.index(max(sizes))
        self._ends.insert(largest, firsts[largest] + sizes[largest] // 2)
        self._owners.insert(largest, member)

    def leave(self, member: Member) -> None:
        place = self._owners.index(member)
        last = place == len(self._ends) - 1
        del self._owners[place]
        del self._ends[place - 1 if last and place else place]

    def owner(self, slot: int) -> Member | None:
        return self._owners[bisect_left(self._ends, slot)] if self._ends else None

    def ranges(self) -> list[tuple[int, int, Member]]:
        found, first = list[tuple[int, int, Member]](), 1
        for end, owner in zip(self._ends, self._owners, strict=True):
            found.append((first, end, owner))
            first = end + 1
        return found


class StickyRangeSlotOwners:
    """Assigns slots to consumers in the mode STICKY: each consumer gets the ranges that it requests."""

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

    def join(self, member: Member) -> None:
        self._ranges += [(first, last, member) for first, last in to_key_shared_options(member.options).ranges]
        self._ranges.sort(key=lambda each: each[0])

    def leave(self, member: Member) -> None:
        self._ranges = [each for each in self._ranges if each[2] is not member]

    def owner(self, slot: int) -> Member | None:
        place = bisect_left(self._ranges, slot + 1, key=lambda each: each[0]) - 1
        if place < 0:
            return None
        _first, last, owner = self._ranges[place]
        return owner if slot <= last else None

    def ranges(self) -> list[tuple[int, int, Member]]:
        return list(self._ranges)
