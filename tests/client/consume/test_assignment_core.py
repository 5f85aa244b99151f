"""Strategies of assignment: whole, balanced, the same for all who ask; a sticky one moves the fewest partitions."""

from collections.abc import Collection
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.common.errors import InvalidConfiguration
from magnetar.client.consume.assignment_core import Assignment, assign_range, assign_round_robin, assign_sticky

MEMBERS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True)
PARTITIONS = st.integers(0, 40)
BEFORE = st.dictionaries(st.sampled_from("abcdefghxy"), st.sets(st.integers(0, 45), max_size=20))


def check_whole_and_balanced(found: Assignment, members: Collection[str], partitions: int) -> None:
    assert set(found) == set(members)
    assert sorted(each for mine in found.values() for each in mine) == list(range(partitions)), "each has one member"
    sizes = [len(mine) for mine in found.values()]
    assert max(sizes) - min(sizes) <= 1
    assert all(list(mine) == sorted(mine) for mine in found.values())


@given(MEMBERS, PARTITIONS, BEFORE, st.randoms())
def test_each_strategy_is_whole_balanced_and_says_the_same_to_all(
    members: list[str], partitions: int, before: dict[str, set[int]], rng: object
) -> None:
    mixed = members.copy()
    rng.shuffle(mixed)  # type: ignore[attr-defined]
    for strategy in (assign_range, assign_round_robin):
        found = strategy(members, partitions)
        check_whole_and_balanced(found, members, partitions)
        assert found == strategy(mixed, partitions)
    found = assign_sticky(members, partitions, before)
    check_whole_and_balanced(found, members, partitions)
    assert found == assign_sticky(mixed, partitions, dict(reversed(before.items())))


@given(MEMBERS, PARTITIONS)
def test_a_range_is_a_run_and_a_round_robin_takes_turns(members: list[str], partitions: int) -> None:
    for mine in assign_range(members, partitions).values():
        assert list(mine) == list(range(mine[0], mine[-1] + 1)) if mine else True
    turns = assign_round_robin(members, partitions)
    for each in range(partitions):
        assert each in turns[sorted(members)[each % len(members)]]


@given(MEMBERS, MEMBERS, PARTITIONS)
def test_sticky_changes_nothing_when_nothing_changed_and_gives_back_after_a_restart(
    members: list[str], others: list[str], partitions: int
) -> None:
    before = assign_sticky(members, partitions, {})
    assert assign_sticky(members, partitions, before) == before
    changed = assign_sticky(others, partitions, before)
    assert assign_sticky(others, partitions, changed) == changed


def moved(found: Assignment, before: dict[str, tuple[int, ...]]) -> int:
    return sum(each not in before.get(name, ()) for name, mine in found.items() for each in mine)


def least_moved(members: list[str], partitions: int, before: dict[str, tuple[int, ...]]) -> int:
    """Of all balanced assignments there are: the fewest partitions that have another member than before."""
    low, rest = divmod(partitions, len(members))
    best = partitions
    for owners in product(members, repeat=partitions):
        sizes = sorted(owners.count(each) for each in members)
        if sizes == [low] * (len(members) - rest) + [low + 1] * rest:
            best = min(best, sum(each not in before.get(owner, ()) for each, owner in enumerate(owners)))
    return best


def test_sticky_moves_no_more_than_any_balanced_assignment_must() -> None:
    for owners in product("abx", repeat=4):
        before = {name: tuple(i for i, owner in enumerate(owners) if owner == name) for name in "abx"}
        for members in (list(each) for size in (1, 2, 3) for each in combinations("abc", size)):
            found = assign_sticky(members, len(owners), before)
            assert moved(found, before) == least_moved(members, len(owners), before), (members, owners)


def test_wrong_members_are_refused() -> None:
    for wrong in ([], "ab", ["a", "a"], [""], [1]):
        with pytest.raises(InvalidConfiguration):
            assign_range(wrong, 4)  # type: ignore[arg-type]
    for partitions in (-1, 1 << 20, True, "4"):
        with pytest.raises(InvalidConfiguration):
            assign_round_robin(["a"], partitions)  # type: ignore[arg-type]
