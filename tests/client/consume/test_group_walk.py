"""A walk of members of a group over joins, leaves, crashes and views that are old or lack somebody: the brokers let one
member into a partition, and when nobody comes or goes, each partition has one member by the strategy, and stays there.
"""

import random

import pytest

from magnetar.client.consume.assignment_core import (
    STRATEGIES,
    GroupMember,
    GroupView,
    PartitionState,
    RevokePartition,
    TakePartition,
)

SEEDS = 60


class Brokers:
    """The exclusive subscriptions of the partitions, and what each has committed."""

    def __init__(self, partitions: int) -> None:
        self.owner: list[str] = [""] * partitions
        self.committed = [0] * partitions

    def owners(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for partition, name in enumerate(self.owner):
            found.setdefault(name, set()).add(partition)
        found.pop("", None)
        return found


class Walk:
    def __init__(self, seed: int, strategy: str) -> None:
        self.rng, self.strategy = random.Random(seed), strategy
        self.brokers = Brokers(self.rng.randrange(1, 9))
        self.members: dict[str, GroupMember] = {}
        self.positions: dict[tuple[str, int], int] = {}  # of a member in a partition that it has
        self.dead: set[str] = set()  # crashed, and the brokers do not know it yet
        self.old = self.brokers.owners()
        self.names = 0
        self.moves = 0

    @property
    def partitions(self) -> int:
        return len(self.brokers.owner)

    def join(self) -> None:
        self.names += 1
        name = f"m{self.names % 7}-{self.names}"
        self.members[name] = GroupMember(name, self.strategy)

    def leave(self) -> None:
        if self.members:
            self._forget(self.rng.choice(sorted(self.members)))

    def crash(self) -> None:
        if self.members:
            name = self.rng.choice(sorted(self.members))
            del self.members[name]
            self.dead.add(name)

    def bury(self) -> None:
        """The brokers learn of all that have crashed."""
        for name in sorted(self.dead):
            self._forget(name)
        self.dead.clear()

    def _forget(self, name: str) -> None:
        self.members.pop(name, None)
        self.brokers.owner = ["" if each == name else each for each in self.brokers.owner]

    def lose(self) -> None:
        """The connection of a member is interrupted, and another one may take a partition of it."""
        owned = [(member, each) for member in self.members.values() for each in sorted(member.owned)]
        if owned:
            member, partition = self.rng.choice(owned)
            if self.brokers.owner[partition] == member.name:
                self.brokers.owner[partition] = ""
            if self.rng.random() < 0.5:
                member.on_partition_lost(partition)
            # else it does not know it yet: what it commits is refused

    def grow(self) -> None:
        if self.partitions < 12:
            self.brokers.owner.append("")
            self.brokers.committed.append(0)

    def look(self, name: str, *, honest: bool = False) -> int:
        """A member learns who is there, and does what it decides. Returns how many effects it had."""
        member, rng = self.members[name], self.rng
        there = {*self.members, *self.dead}
        owners = self.brokers.owners()
        if not honest and rng.random() < 0.3:
            there = set(rng.sample(sorted(there), rng.randrange(len(there) + 1)))
        if not honest and rng.random() < 0.3:
            owners = self.old
        self.old = self.brokers.owners()
        asked = member.must_ask_owners(there, self.partitions)
        effects = member.on_group_view(GroupView(there, self.partitions, owners if asked else None))
        member.check()
        for effect in effects:
            if isinstance(effect, TakePartition):
                self._take(member, effect.partition)
            else:
                self._revoke(member, effect)
        member.check()
        return len(effects)

    def _take(self, member: GroupMember, partition: int) -> None:
        if self.brokers.owner[partition] not in ("", member.name):
            member.on_partition_busy(partition)
            return
        self.brokers.owner[partition] = member.name
        self.positions[member.name, partition] = self.brokers.committed[partition]
        self.moves += 1
        member.on_partition_taken(partition)

    def _revoke(self, member: GroupMember, effect: RevokePartition) -> None:
        assert member.states[effect.partition] is PartitionState.REVOKING
        if self.brokers.owner[effect.partition] == member.name:
            self.commit(member.name, effect.partition)
            self.brokers.owner[effect.partition] = ""
        member.on_partition_revoked(effect.partition)

    def commit(self, name: str, partition: int) -> None:
        """A member reads on, and commits what it read: the broker takes it from the owner alone."""
        if self.brokers.owner[partition] == name:
            at = self.positions[name, partition]
            assert at >= self.brokers.committed[partition], "a committed message is read again"
            self.positions[name, partition] = self.brokers.committed[partition] = at + self.rng.randrange(3)

    def find_out(self) -> None:
        """Each member hears which of its partitions it has lost."""
        for member in self.members.values():
            for each in sorted(member.owned):
                if self.brokers.owner[each] != member.name:
                    member.on_partition_lost(each)

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.06 or not self.members:
            self.join()
        elif kind < 0.09:
            self.leave()
        elif kind < 0.12:
            self.crash()
        elif kind < 0.15:
            self.bury()
        elif kind < 0.18:
            self.lose()
        elif kind < 0.19:
            self.grow()
        elif kind < 0.25:
            self.find_out()
        elif kind < 0.6:
            self.commit(self.rng.choice(sorted(self.members)), self.rng.randrange(self.partitions))
        else:
            self.look(self.rng.choice(sorted(self.members)))

    def settle(self) -> None:
        """Nobody comes or goes any more, and what is told is true."""
        self.bury()
        if not self.members:
            self.join()
        quiet = 0
        for _ in range(200):
            self.find_out()
            mixed = self.rng.sample(sorted(self.members), len(self.members))
            effects = sum(self.look(name, honest=True) for name in mixed)
            quiet = quiet + 1 if not effects else 0
            if quiet > 12:
                return
        raise AssertionError("they never come to rest")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_partition_has_one_member_by_the_strategy_when_nobody_comes_or_goes(strategy: str) -> None:
    for seed in range(SEEDS):
        walk = Walk(seed, strategy)
        for _ in range(150):
            walk.step()
        walk.settle()
        owners = walk.brokers.owners()
        assert sorted(each for mine in owners.values() for each in mine) == list(range(walk.partitions)), seed
        assert {name: frozenset(member.owned) for name, member in walk.members.items() if member.owned} == owners, seed
        sizes = [len(owners.get(name, ())) for name in walk.members]
        assert max(sizes) - min(sizes) <= 1, seed
        if strategy != "sticky":
            wanted = STRATEGIES[strategy](walk.members, walk.partitions, {})
            assert owners == {name: set(mine) for name, mine in wanted.items() if mine}, seed


def test_a_member_that_joins_a_sticky_group_takes_only_its_share() -> None:
    walk = Walk(1, "sticky")
    walk.brokers = Brokers(8)
    walk.join()
    walk.join()
    walk.settle()
    before, walk.moves = walk.brokers.owners(), 0
    walk.join()
    walk.settle()
    assert walk.moves == 2, "of eight partitions among three the new one gets two"
    assert sum(len(mine & before.get(name, set())) for name, mine in walk.brokers.owners().items()) == 6


def test_one_view_that_lacks_a_member_revokes_nothing() -> None:
    member = GroupMember("a", "round_robin")
    for effect in member.on_group_view(GroupView({"a"}, 4)):
        member.on_partition_taken(effect.partition)
    assert member.on_group_view(GroupView({"a", "b"}, 4)) == []
    assert member.on_group_view(GroupView({"a"}, 4)) == []
    assert member.on_group_view(GroupView({"a", "b"}, 4)) == []
    assert member.on_group_view(GroupView({"a", "b"}, 4)) == [RevokePartition(1), RevokePartition(3)]
