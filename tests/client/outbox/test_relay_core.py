"""The relay's core in a world of values: it dies at every step, alone and twice; and what makes it stop."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from magnetar.client.outbox.destination_core import (
    AskTopicPartitions,
    ClaimedShard,
    ClaimRequest,
    OpenDestination,
    RelayDatabaseTransaction,
    RelayEffect,
    RelaySettings,
    RunDatabaseTransaction,
    StopRelay,
)
from magnetar.client.outbox.relay_core import RelayCore, find_shard_of_destination
from magnetar.client.outbox.rows import DeduplicationOff, OutboxBehind, RelayFenced, RowState, SequencesForgotten

from .model import SMALL, Relay, Row, World


def plain() -> tuple[World, set[int], set[int]]:
    world = World(partitions={"b": 2})
    for id_ in range(1, 8):
        world.commit(id_, "ab"[id_ % 2], f"k{id_ % 3}", late=id_ == 5)
    return world, set(range(1, 8)), set()


def failing() -> tuple[World, set[int], set[int]]:
    """The first row is refused for ever; one of its key follows."""
    world = World()
    world.commit(1, "a", "x", poison=True)
    world.commit(2, "a", "y")
    world.commit(3, "a", "x")
    world.commit(4, "a", None)
    world.commit(5, "a", "y")
    return world, {2, 4, 5}, {1}


def put_off() -> tuple[World, set[int], set[int]]:
    world, rows, parked = plain()
    from .model import Topic

    world.topics["a"] = Topic(put_off=2)
    return world, rows, parked


SCENARIOS: list[Callable[[], tuple[World, set[int], set[int]]]] = [plain, failing, put_off]


def steps_of(make: Callable[[], tuple[World, set[int], set[int]]]) -> int:
    world, expected, parked = make()
    relay, count = Relay(world), 0
    while not (world.done() and not relay.steps):
        relay.step()
        count += 1
        assert count < 2000
    world.check(expected, parked=parked)
    return count


@pytest.mark.parametrize("make", SCENARIOS)
@pytest.mark.parametrize("late", [False, True])
def test_a_relay_that_dies_at_any_step_leaves_each_row_stored_once(
    make: Callable[[], tuple[World, set[int], set[int]]], late: bool
) -> None:
    for at in range(steps_of(make) + 1):
        world, expected, parked = make()
        relay = Relay(world)
        for _ in range(at):
            relay.step()
        relay.die(late=late)
        Relay(world).finish()
        world.check(expected, parked=parked)
        assert order_kept(world), f"died at step {at}"


@pytest.mark.parametrize("make", SCENARIOS)
def test_a_relay_that_dies_twice_at_any_two_steps_leaves_each_row_stored_once(
    make: Callable[[], tuple[World, set[int], set[int]]],
) -> None:
    steps = steps_of(make)
    for first in range(steps + 1):
        for second in range(0, steps + 1, 2):
            world, expected, parked = make()
            for at, late in ((first, True), (second, bool(second % 4))):
                relay = Relay(world)
                for _ in range(at):
                    if relay.dead or (world.done() and not relay.steps):
                        break
                    relay.step()
                relay.die(late=late)
            Relay(world).finish()
            world.check(expected, parked=parked)


def order_kept(world: World) -> bool:
    """Rows of a key are in the order of their ids."""
    return all(
        [id_ for id_ in topic.ids if id_ % 3 == rest] == sorted(id_ for id_ in topic.ids if id_ % 3 == rest)
        for topic in world.topics.values()
        for rest in range(3)
        if not world.poison
    )


def test_any_order_of_facts_commits_and_failures_stores_each_row_once(walks: Callable[[int], range]) -> None:
    """Rows commit in any order of their ids; transactions take place and seem to fail; the relay dies or is replaced
    while it lives."""
    for seed in walks(76):
        rng = random.Random(seed)
        world, left = World(partitions={"b": 3}), list(range(1, 30))
        rng.shuffle(left)
        poison = {id_ for id_ in left if rng.random() < 0.05}
        relays = [Relay(world)]
        for _ in range(400):
            if left and rng.random() < 0.2:
                id_ = left.pop()
                world.commit(id_, rng.choice("abc"), rng.choice([None, "k", str(id_)]), poison=id_ in poison)
            chosen = rng.choice(relays)
            chosen.step(rng)
            if rng.random() < 0.02:
                relays.append(Relay(world))  # the older ones live on, and learn of it
            if rng.random() < 0.02:
                relays[-1].die(late=rng.random() < 0.5)
                relays.append(Relay(world))
            if rng.random() < 0.05:
                relays[-1].lost_turns = 1
            for topic in world.topics.values():
                topic.put_off = 1 if rng.random() < 0.01 else topic.put_off
            relays = [each for each in relays if not each.dead]
            assert relays, f"seed {seed}: the newest was fenced"
        for id_ in left:
            world.commit(id_, "a", poison=id_ in poison)
        for old in relays[:-1]:
            old.die(late=True)
        relays[-1].finish()
        stored = {id_ for topic in world.topics.values() for id_ in topic.ids}
        assert not stored & poison, f"seed {seed}"
        gone = set(range(1, 30)) - poison - set(world.rows)
        assert stored == gone, f"seed {seed}: stored once and deleted, or blocked by a parked row of its key"
        assert sum(len(topic.ids) for topic in world.topics.values()) == len(stored), f"seed {seed}: stored twice"


def test_an_older_relay_learns_that_it_is_fenced_and_the_newer_one_continues() -> None:
    world, expected, parked = plain()
    old = Relay(world)
    for _ in range(6):
        old.step()
    new = Relay(world)
    for _ in range(400):
        if not old.dead:
            old.step()
        new.step()
        if world.done() and old.dead:
            break
    assert isinstance(old.error, RelayFenced)
    assert "--standby" in old.error.message
    assert new.error is None
    world.check(expected, parked=parked)


def test_a_failing_row_is_parked_after_its_attempts_and_only_rows_of_its_key_wait() -> None:
    world, expected, parked = failing()
    Relay(world).finish()
    world.check(expected, parked=parked)
    assert world.rows[1].attempts == SMALL.attempts_max
    assert world.rows[3].state is RowState.WAITING, "its key waits"
    world.rows[1].poison, world.rows[1].state = False, RowState.WAITING  # repaired and revived
    Relay(world).finish()
    world.check({1, 2, 3, 4, 5})
    found = world.topics["a"].ids
    assert found.index(1) < found.index(3)


def test_nothing_follows_a_refused_row_before_its_refusal_is_recorded() -> None:
    """Else a crash leaves it below the topic's last id, and it would count as stored."""
    world = World()
    world.commit(1, "a", "x", poison=True)
    world.commit(2, "a", "y")
    relay = Relay(world, settings=replace(SMALL, rows_per_entry=1))
    while relay.core.destinations.get("a") is None or not relay.core.refused_rows:
        relay.step()
    assert world.topics["a"].ids == []
    while not world.topics["a"].ids:
        assert world.rows[1].state is RowState.CLAIMED or world.rows[1].attempts == 1
        relay.step()
    assert world.rows[1].attempts == 1, "recorded before the next row was sent"


def test_a_database_from_a_backup_is_refused() -> None:
    """Its ids are lower than the topic's: rows of the backup may be in the topic, and new ones would be dropped."""
    world, expected, parked = plain()
    Relay(world).finish()
    restored = World(partitions=dict(world.partitions), topics=world.topics)
    restored.commit(100, "a")
    relay = Relay(restored)
    relay.finish()
    assert isinstance(relay.error, OutboxBehind)
    assert "magnetar outbox renumber --shard 0" in relay.error.message
    restored_later = World(topics=world.topics, next_seq=3, stored={"a": 1})
    relay = Relay(restored_later)
    relay.finish()
    for _ in range(5):
        relay.step()
    assert isinstance(relay.error, OutboxBehind), "at the start, without a row that waits"
    world.check(expected, parked=parked)


def claimed_world(stored: int, topic_last: int) -> World:
    from .model import Topic

    world = World(next_seq=10, stored={"a": stored} if stored >= 0 else {}, topics={"a": Topic(last=topic_last)})
    world.rows[1] = Row(1, "a", None, state=RowState.CLAIMED, seq=9, destination="a")
    return world


def test_ids_that_a_topic_has_forgotten_stop_the_relay_only_where_rows_may_double() -> None:
    relay = Relay(claimed_world(5, -1))
    relay.finish()
    assert isinstance(relay.error, SequencesForgotten)
    assert "dedup_inactive_minutes" in relay.error.message
    relay = Relay(world := claimed_world(5, -1))
    world.rows.clear()
    core = RelayCore(0, 1, SMALL)
    core.on_shard_claimed(ClaimedShard(1, 10, {"a": 5}, []), 0.0)
    assert not any(isinstance(each, StopRelay) for each in core.on_opened("a", -1, 0.0)), "nothing is claimed"


def test_a_relay_that_was_away_longer_than_topics_remember_stops_when_a_first_claim_is_open() -> None:
    world = claimed_world(-1, -1)
    for absent_s, stops in ((60.0, False), (SMALL.remembered_s + 1, True)):
        core = RelayCore(0, 1, SMALL)
        core.on_shard_claimed(ClaimedShard(1, 10, {}, [world.rows[1].claimed()], absent_s), 0.0)
        effects = core.on_opened("a", -1, 0.0)
        assert any(isinstance(each, StopRelay) for each in effects) == stops
        core.check()


def test_a_topic_that_does_not_deduplicate_stops_a_relay_that_starts_and_later_only_that_topic_waits() -> None:
    core = RelayCore(0, 1, SMALL)
    core.on_shard_claimed(ClaimedShard(1, 0, {}, []), 0.0)
    core.on_topics_found(["a"], 0.0)
    error = DeduplicationOff("turn it on: magnetar namespaces set-deduplication")
    assert core.on_topic_resolve_failed("a", error, 0.0) == [StopRelay(error)]
    core = RelayCore(0, 1, SMALL)
    core.on_shard_claimed(ClaimedShard(1, 0, {}, []), 0.0)
    core.on_topics_found([], 0.0)
    core.on_topics_found(["b"], 1.0)
    assert core.on_topic_resolve_failed("b", error, 1.0) == []
    assert core.topics["b"].error == error.message
    core.check()


def test_no_row_is_claimed_for_a_topic_whose_deduplication_was_switched_off_until_it_is_on_again() -> None:
    core = RelayCore(0, 1, SMALL)
    for each in core.on_shard_claimed(ClaimedShard(1, 0, {}, []), 0.0):
        if isinstance(each, RunDatabaseTransaction):
            core.on_database_committed(each.turn, [], 0, 0.0)
    core.on_topics_found(["a"], 0.0)
    core.on_topic_resolved("a", 0, 0.0)

    def turns(effects: list[RelayEffect]) -> list[RelayDatabaseTransaction]:
        return [each.turn for each in effects if isinstance(each, RunDatabaseTransaction)]

    core.on_topic_resolve_failed("a", DeduplicationOff("it is off"), 60.0)
    for turn in turns(core.on_opened("a", -1, 60.0)):
        assert turn.claim is None
        core.on_database_committed(turn, [], 0, 60.0)
    core.check()
    claims = [each.claim for each in turns(core.on_topic_resolved("a", 0, 61.0)) if each.claim is not None]
    assert [each.topics for each in claims] == [{"a": (0, (0,))}]


def test_each_destination_has_one_shard_whatever_the_number_of_partitions() -> None:
    for shards in (1, 2, 3, 4):
        owners = [find_shard_of_destination(f"t-partition-{number}", shards) for number in range(12)]
        assert set(owners) == set(range(shards))
    assert find_shard_of_destination("t-partition-x", 4) == find_shard_of_destination("t-partition-x", 4)
    cores = [RelayCore(shard, 3, SMALL) for shard in range(3)]
    opened: list[str] = []
    for core in cores:
        core.on_shard_claimed(ClaimedShard(1, 0, {}, []), 0.0)
        assert AskTopicPartitions("t") in core.on_topics_found(["t"], 0.0)
        opened += [
            each.destination for each in core.on_topic_resolved("t", 4, 0.0) if isinstance(each, OpenDestination)
        ]
        core.on_topic_resolved("t", 6, 1.0)  # partitions were added
    assert sorted(opened) == [f"t-partition-{number}" for number in range(4)], "each once"
    names = sorted(name for core in cores for name in core.destinations)
    assert names == [f"t-partition-{number}" for number in range(6)], "each once"


def test_a_destination_that_is_put_off_is_opened_again_only_when_the_shard_is_still_ours() -> None:
    core = RelayCore(0, 1, SMALL)
    core.on_shard_claimed(ClaimedShard(1, 10, {"a": 4}, []), 0.0)
    core.on_producer_open_failed("a", "no broker", 0.0)
    assert core._turning is not None, "begun before it was put off"
    effects = core.on_database_committed(core._turning, [], 10, 0.2)
    assert not any(isinstance(each, OpenDestination) for each in effects)
    turn = next(each.turn for each in effects if isinstance(each, RunDatabaseTransaction))
    assert OpenDestination("a") in core.on_database_committed(turn, [], 10, 0.2)


def test_a_stopping_relay_claims_and_sends_nothing_and_records_outcomes() -> None:
    world, expected, _ = plain()
    relay = Relay(world)
    while not relay.flying:
        relay.step()
    relay._do(relay.core.stop_claiming(world.now))
    sent = relay.core.sent_rows
    while not relay.core.is_idle:
        relay.step()
    assert relay.core.sent_rows == sent
    assert relay.core.stored_rows == sent
    assert len(world.rows) == len(expected) - sent
    Relay(world).finish()
    world.check(expected)


def test_memory_is_bounded_by_what_a_claim_may_have() -> None:
    world = World()
    for id_ in range(1, 200):
        world.commit(id_, "a")
    settings = RelaySettings(rows_per_claim=5, rows_per_entry=2)
    relay = Relay(world, settings=settings)
    while not world.done():
        relay.step()
        assert relay.core.destinations.get("a") is None or relay.core.destinations["a"].row_count <= 5 + 5 + 2


def test_a_turn_asks_only_for_destinations_with_room() -> None:
    core = RelayCore(0, 1, SMALL)
    core.on_shard_claimed(ClaimedShard(1, 0, {}, []), 0.0)
    turn = RelayDatabaseTransaction(1, 0)
    assert core._claim() is None
    core.on_topics_found(["a"], 0.0)
    effects = core.on_topic_resolved("a", 0, 0.0)
    assert turn == RelayDatabaseTransaction(1, 0)
    assert core._claim() is None, "it is not open"
    assert effects is not None
    core.destinations["a"].try_begin_opening_producer(0.0)
    core.on_opened("a", -1, 0.0)
    assert core._claim() == ClaimRequest(3, SMALL.bytes_per_claim, {"a": (0, (0,))})
