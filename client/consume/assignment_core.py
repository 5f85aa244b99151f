"""Which member of a group reads which partitions: strategies, as pure functions of the members and the partitions.

    ours = assign_round_robin(["a", "b", "c"], 8)["b"]         (1, 4, 7)
    await consumer.assign(ours)

Each strategy gives each partition to exactly one member, and the numbers of partitions of two members differ by one at
most; the order in which members are named does not matter. `assign_sticky` moves the fewest partitions that allow that.

**What makes a group safe.** A strategy decides who *should* read a partition; two members that do not know of each
other yet may decide differently. That no two own a partition at the same time is the broker's part: members take
partitions by `Consumer.assign` on an Exclusive subscription, and the broker lets one consumer in; it accepts `commit`
and acknowledgements of that one alone, also when a former owner was suspended and goes on. A member that gets
ConsumerBusy tries again when the other has left: it crashed, and its connection ended, or it heard of the same members.

Who the members are, is the program's: a list in its configuration, a StatefulSet's ordinals, or a list that they keep
elsewhere. Who wants brokers to decide that uses Failover on all partitions: the same guarantee, without `assign`.
Guard: tests/client/consume/test_assignment_core.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..common.checks import NAME, WrongValue, check_parameter, make_whole_number_check, shorten_value

Assignment = dict[str, tuple[int, ...]]
"""Member → its partitions, in order."""
PARTITIONS = make_whole_number_check(0, 100_000)


def assign_range(members: Collection[str], partitions: int) -> Assignment:
    """Gives each member a run of consecutive partitions, in the order of the members' names. Raises
    InvalidConfiguration if a member is named twice, or has no name."""
    names = _check(members, partitions)
    found: Assignment = {}
    first = 0
    for place, name in enumerate(names):
        last = first + _share(place, len(names), partitions)
        found[name] = tuple(range(first, last))
        first = last
    return found


def assign_round_robin(members: Collection[str], partitions: int) -> Assignment:
    """Gives the partitions to the members in turns, in the order of their names."""
    names = _check(members, partitions)
    return {name: tuple(range(place, partitions, len(names))) for place, name in enumerate(names)}


def assign_sticky(members: Collection[str], partitions: int, before: Mapping[str, Collection[int]]) -> Assignment:
    """Gives the partitions to the members so that as few as possible have another member than in `before`, the present
    assignment. What `before` says of members and partitions that do not exist is ignored; a partition that it gives to
    several members belongs to the first of them by name."""
    names = _check(members, partitions)
    kept, free = _keep_valid(names, partitions, before)
    room = _find_quotas(names, partitions, {name: len(kept[name]) for name in names})
    found = {name: sorted(kept[name])[: room[name]] for name in names}
    free |= {each for name in names for each in sorted(kept[name])[room[name] :]}
    waiting = sorted(free, reverse=True)
    for name in names:
        while len(found[name]) < room[name]:
            found[name].append(waiting.pop())
    return {name: tuple(sorted(mine)) for name, mine in found.items()}


def _keep_valid(
    names: Collection[str], partitions: int, before: Mapping[str, Collection[int]]
) -> tuple[dict[str, list[int]], set[int]]:
    """Returns what each member has of the partitions that exist, each partition once; and the partitions without a
    member."""
    free = set(range(partitions))
    kept: dict[str, list[int]] = {}
    for name in names:
        kept[name] = sorted(free.intersection(before.get(name, ())))
        free.difference_update(kept[name])
    return kept, free


def _find_quotas(names: Collection[str], partitions: int, has: Mapping[str, int]) -> dict[str, int]:
    """Returns how many partitions each member gets. Those that have most get one more, if not all get as many."""
    by_size = sorted(names, key=lambda name: (-has[name], name))
    return {name: _share(place, len(by_size), partitions) for place, name in enumerate(by_size)}


def _share(place: int, members: int, partitions: int) -> int:
    return partitions // members + (place < partitions % members)


def _check(members: Collection[str], partitions: int) -> list[str]:
    """Returns the members in the order of their names."""
    check_parameter("partitions", PARTITIONS, partitions)
    if isinstance(members, str | bytes) or not members:
        raise WrongValue(f"members is a list of one or more names, not {shorten_value(members)}")
    for each in members:
        check_parameter("a member", NAME, each)
    if len(set(members)) != len(members):
        raise WrongValue(f"a member is named twice: {shorten_value(sorted(members))}")
    return sorted(members)
