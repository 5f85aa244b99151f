"""Who owns a slot: each way, by the words of the contract."""

import random

import pytest

from magnetar.broker.subscription.core.in_log_order import (
    RING_POINTS_PER_CONSUMER,
    HashRingSlotOwners,
    KeySharedOptions,
    SlotOwners,
    SplitRangeSlotOwners,
    StickyRangeSlotOwners,
)
from magnetar.broker.subscription.core.policy import Member
from magnetar.proto.names import STICKY_SLOTS, compute_key_slot
from tests.broker.subscription.core.dispatch_walk import ring_owner


def owners(ways: SlotOwners) -> list[int]:
    found = [ways.find_owner(slot) for slot in range(1, STICKY_SLOTS + 1)]
    return [owner.id if owner is not None else 0 for owner in found]


def by_ranges(ways: SlotOwners) -> list[int]:
    found = [0] * STICKY_SLOTS
    for first, last, owner in ways.list_ranges():
        for slot in range(max(1, first), last + 1):
            assert found[slot - 1] == 0, "ranges overlap"
            found[slot - 1] = owner.id
    return found


def test_a_slot_belongs_to_the_next_point_of_the_ring() -> None:
    ring, members = HashRingSlotOwners(), [Member(1, "a"), Member(2, "b"), Member(3, "a")]
    for member in members:
        ring.add_member(member)
    for slot in [1, 2, 777, 30_000, STICKY_SLOTS]:
        assert ring.find_owner(slot) is ring_owner(members, slot)
    point = compute_key_slot("b\0" + "0\0" + "17")
    assert ring.find_owner(point) is members[1]


def test_only_slots_of_the_newcomer_move_on_the_ring_and_come_back() -> None:
    ring, second = HashRingSlotOwners(), Member(2, "b")
    ring.add_member(Member(1, "a"))
    ring.add_member(second)
    before = owners(ring)
    third = Member(3, "c")
    ring.add_member(third)
    after = owners(ring)
    assert all(now in (3, was) for was, now in zip(before, after, strict=True))
    assert STICKY_SLOTS // 6 < after.count(3) < STICKY_SLOTS // 2, f"{RING_POINTS_PER_CONSUMER} points spread it evenly"
    assert by_ranges(ring) == after
    ring.remove_member(third)
    assert owners(ring) == before


def test_of_two_points_at_one_slot_the_first_comers_counts_and_then_the_others() -> None:
    ring, members = HashRingSlotOwners(), [Member(number, f"c{number}") for number in range(1, 60)]
    for member in members:
        ring.add_member(member)
    at: dict[int, list[Member]] = {}
    for member in members:
        for i in range(RING_POINTS_PER_CONSUMER):
            at.setdefault(compute_key_slot(f"{member.name}\0" + f"0\0{i}"), []).append(member)
    point, there = next((point, there) for point, there in at.items() if len(set(map(id, there))) > 1)
    assert ring.find_owner(point) is there[0]
    ring.remove_member(there[0])
    assert ring.find_owner(point) is next(member for member in there if member is not there[0])


def test_halves_split_the_largest_range_and_give_it_to_the_right_neighbour_back() -> None:
    halves, members = SplitRangeSlotOwners(), [Member(number, f"c{number}") for number in range(5)]
    for member in members[:3]:
        halves.add_member(member)
    assert [(first, last, owner.id) for first, last, owner in halves.list_ranges()] == [
        (1, 32767, 1), (32768, 49151, 2), (49152, 65535, 0)
    ]  # fmt: skip
    halves.remove_member(members[1])
    assert [(first, last, owner.id) for first, last, owner in halves.list_ranges()] == [
        (1, 49151, 2),
        (49152, 65535, 0),
    ]
    halves.remove_member(members[0])
    assert [(first, last, owner.id) for first, last, owner in halves.list_ranges()] == [(1, 65535, 2)]
    halves.remove_member(members[2])
    assert halves.find_owner(5) is None
    assert halves.list_ranges() == []


@pytest.mark.parametrize("kind", [HashRingSlotOwners, SplitRangeSlotOwners])
def test_every_slot_has_an_owner_whoever_comes_and_goes(kind: type[HashRingSlotOwners | SplitRangeSlotOwners]) -> None:
    rng, ways = random.Random(1), kind()
    there: list[Member] = []
    for id_ in range(1, 40):
        if there and rng.random() < 0.45:
            ways.remove_member(there.pop(rng.randrange(len(there))))
        else:
            there.append(Member(id_, rng.choice("abc")))
            ways.add_member(there[-1])
        if id_ % 8 == 0 and there:
            assert set(owners(ways)) <= {member.id for member in there}
            assert by_ranges(ways) == owners(ways)


def sticky_member(id_: int, ranges: tuple[tuple[int, int], ...]) -> Member:
    return Member(id_, f"c{id_}", options=KeySharedOptions(sticky=True, ranges=ranges))


def test_sticky_ranges_are_exact_and_conflicts_are_refused() -> None:
    sticky = StickyRangeSlotOwners()
    sticky.add_member(sticky_member(1, ((0, 100), (500, 600))))
    assert [owner.id if (owner := sticky.find_owner(slot)) else None for slot in (1, 100, 101, 499, 500, 600, 601)] == [
        1, 1, None, None, 1, 1, None
    ]  # fmt: skip
    overlapping = (((100, 200),), ((550, 560),), ((0, 65535),), ((200, 300), (300, 400)))
    for ranges in ((), ((7, 3),), ((200, 65536),), *overlapping):
        assert sticky.why_refused(sticky_member(2, ranges)) is not None, ranges
    assert sticky.why_refused(sticky_member(2, ((101, 499), (601, 65535)))) is None
