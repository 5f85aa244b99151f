"""Which member of a group reads which partitions: strategies, as pure functions of the members and the partitions.

    ours = assign_round_robin(["a", "b", "c"], 8)["b"]         (1, 4, 7)
    await consumer.assign(ours)

Each strategy gives each partition to exactly one member, and the numbers of partitions of two members differ by at most
one. The order in which members are named does not matter. `assign_sticky` moves the fewest partitions that allow that.

**What makes a group safe.** A strategy decides who *should* read a partition; two members that do not know of each
other yet may decide differently. The broker ensures that no two own a partition at the same time. Members take
partitions by `Consumer.assign` on an Exclusive subscription, and the broker lets one consumer in. It accepts `commit`
and acknowledgements from that consumer alone, also when a former owner was suspended and goes on. A member that gets
ConsumerBusy tries again when the other has left: the other crashed and its connection ended, or it learned of the same
members.

The program decides who the members are: by a list in its configuration, a StatefulSet's ordinals, or a list that the
members keep elsewhere. A program that wants brokers to decide uses Failover on all partitions: the same guarantee,
without `assign`.

**A member of a pull group** (client/pull_group.py) takes and revokes partitions by such a strategy, as it learns of the
other members. `GroupMember` decides this without I/O:

    effects = member.on_group_view(GroupView({"a", "b"}, 8, owners))    Take(3), Revoke(5), …
    member.on_taken(3), on_partition_busy(3), on_revoked(5), on_lost(4)      the facts that follow

A view may be wrong: it may lack a member that is reconnecting. So a partition is revoked only when two views, one after
the other, give it to another member. To take a partition that another member has does no harm, because the broker
refuses it. A sticky strategy starts from the owners that the brokers report; `must_ask_owners` returns whether a view
needs them. When the members stay the same, each soon has its partitions, and no effect follows any more. Guards:
tests/client/consume/test_assignment_core.py, tests/client/consume/test_group_walk.py."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias

from ..common.checks import NAME_CHECK, WrongValue, check_parameter, make_whole_number_check, shorten_value

Assignment = dict[str, tuple[int, ...]]
"""Member → its partitions, in order."""
PARTITION_COUNT_CHECK = make_whole_number_check(0, 100_000)


def assign_range(members: Collection[str], partitions: int) -> Assignment:
    """Returns an assignment in which each member has a run of consecutive partitions, in the order of the members'
    names. `partitions`: the number of partitions. Raises InvalidConfiguration if there is no member, a member is named
    twice or has an invalid name, or `partitions` is not from 0 to 100,000."""
    names = _check(members, partitions)
    found: Assignment = {}
    first = 0
    for place, name in enumerate(names):
        last = first + _share(place, len(names), partitions)
        found[name] = tuple(range(first, last))
        first = last
    return found


def assign_round_robin(members: Collection[str], partitions: int) -> Assignment:
    """Returns an assignment in which the members have the partitions in turns, in the order of the members' names.
    `partitions`: the number of partitions. Raises the errors of `assign_range`."""
    names = _check(members, partitions)
    return {name: tuple(range(place, partitions, len(names))) for place, name in enumerate(names)}


def assign_sticky(members: Collection[str], partitions: int, before: Mapping[str, Collection[int]]) -> Assignment:
    """Returns an assignment in which as few partitions as possible have another member than in `before`, the present
    assignment. Members and partitions in `before` that do not exist are ignored; a partition that several members have
    there counts as that of the first of them by name. Raises the errors of `assign_range`."""
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
    check_parameter("partitions", PARTITION_COUNT_CHECK, partitions)
    if isinstance(members, str | bytes) or not members:
        raise WrongValue(f"members is a list of one or more names, not {shorten_value(members)}")
    for each in members:
        check_parameter("a member", NAME_CHECK, each)
    if len(set(members)) != len(members):
        raise WrongValue(f"a member is named twice: {shorten_value(sorted(members))}")
    return sorted(members)


# --------------------------------------------------------------------------------------------- a member of a group
class PartitionState(enum.Enum):
    """The states of a partition at a member of a group. TAKING: the member has asked the broker for it. OWNED: the
    broker has let the member in. REVOKING: the member is leaving it, and the program commits what it has done."""

    TAKING = "taking"
    OWNED = "owned"
    REVOKING = "revoking"


class GroupView(NamedTuple):
    """What a member has learned of its group: the members that are connected, the number of partitions, and which
    partitions each member owns; `owners` None: the brokers were not asked."""

    members: Collection[str]
    partitions: int
    owners: Mapping[str, Collection[int]] | None = None


class TakePartition(NamedTuple):
    """Effect: ask the broker for the partition. The driver then calls `on_partition_taken` or `on_partition_busy`."""

    partition: int


class RevokePartition(NamedTuple):
    """Effect: tell the program that it loses the partition, and leave it. The driver then calls
    `on_partition_revoked`."""

    partition: int


GroupEffect: TypeAlias = TakePartition | RevokePartition
AssignFunction: TypeAlias = Callable[[Collection[str], int, Mapping[str, Collection[int]]], Assignment]
STRATEGIES: Mapping[str, AssignFunction] = {
    "range": lambda members, partitions, before: assign_range(members, partitions),
    "round_robin": lambda members, partitions, before: assign_round_robin(members, partitions),
    "sticky": assign_sticky,
}
OWNERS_REFRESH_VIEWS = 10
"""Views after which the owners are asked again, though nothing seems to change: another member may have decided by an
old view, and have a partition too many."""


class GroupMember:
    """Decides which partitions one member of a group takes and revokes. `states`: its partitions. `strategy`: a key of
    STRATEGIES. It does not ensure safety: the broker lets only one member into a partition at a time."""

    __slots__ = ("_calm", "_known", "_leaving", "_strategy", "_wants", "name", "states")

    def __init__(self, name: str, strategy: str) -> None:
        self.name = name
        self.states: dict[int, PartitionState] = {}
        self._strategy = strategy
        self._leaving = frozenset[int]()  # that the last view gave to others
        self._known: tuple[frozenset[str], int] | None = None  # members and partitions of the last view
        self._wants = frozenset[int]()  # the partitions that the last view gave to it
        self._calm = 0  # views since the owners were asked

    @property
    def owned(self) -> frozenset[int]:
        """Returns the partitions into which the broker has let this member."""
        return frozenset(each for each, state in self.states.items() if state is PartitionState.OWNED)

    def must_ask_owners(self, members: Collection[str], partitions: int) -> bool:
        """Returns whether the next view, with these members and this number of partitions, must have the owners. True
        only for the sticky strategy: while something changes, and every OWNERS_REFRESH_VIEWS views."""
        if self._strategy != "sticky":
            return False
        same = self._known == (frozenset(members) | {self.name}, partitions)
        is_settled = same and not self._leaving and self._wants == self.owned == frozenset(self.states)
        return not is_settled or self._calm >= OWNERS_REFRESH_VIEWS

    def on_group_view(self, view: GroupView) -> list[GroupEffect]:
        """Fact: the member has learned which members there are. Returns the partitions to take and to revoke, as
        effects; from then on these partitions are TAKING or REVOKING. If `must_ask_owners` was true, the view must have
        owners. Raises InvalidConfiguration if a member's name or the number of partitions is not valid."""
        members = frozenset(view.members) | {self.name}
        known, self._known = self._known, (members, view.partitions)
        if view.owners is None and self._strategy == "sticky":
            assert known == self._known, "the owners are asked when something changes"
            self._calm += 1
            return []
        self._calm = 0
        owners = {name: set(mine) - self.owned for name, mine in (view.owners or {}).items()}
        owners[self.name] = set(self.owned)
        self._wants = frozenset(STRATEGIES[self._strategy](members, view.partitions, owners)[self.name])
        leaving = self.owned - self._wants
        revoked, self._leaving = leaving & self._leaving, leaving
        effects: list[GroupEffect] = [RevokePartition(each) for each in sorted(revoked)]
        effects += [TakePartition(each) for each in sorted(self._wants - self.states.keys())]
        for effect in effects:
            taking = isinstance(effect, TakePartition)
            self.states[effect.partition] = PartitionState.TAKING if taking else PartitionState.REVOKING
        return effects

    def on_partition_taken(self, partition: int) -> None:
        """Fact: the broker has let the member into the partition."""
        assert self.states[partition] is PartitionState.TAKING, "it was asked for"
        self.states[partition] = PartitionState.OWNED

    def on_partition_busy(self, partition: int) -> None:
        """Fact: another member has the partition for which this one asked, or the broker could not be asked. A later
        view takes it again."""
        assert self.states.pop(partition) is PartitionState.TAKING, "it was asked for"

    def on_partition_revoked(self, partition: int) -> None:
        """Fact: the member has left the partition that it was told to revoke."""
        assert self.states.pop(partition) is PartitionState.REVOKING, "it was told to"

    def on_partition_lost(self, partition: int) -> None:
        """Fact: the connection of a partition that the member owns was interrupted, so the broker may have let another
        member in. The member no longer owns the partition."""
        assert self.states.pop(partition) is PartitionState.OWNED, "it has it"

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert not self._leaving & self._wants, "a partition is wanted or left"
        for each, state in self.states.items():
            assert each >= 0, "partitions are numbered from 0"
            assert state is not PartitionState.TAKING or each in self._wants, f"partition {each} is asked for in vain"
